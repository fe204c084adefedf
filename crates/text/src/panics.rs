//! Panics of the `tokenizers` crate as errors.
//!
//! The crate expects of a `tokenizer.json` what only its own writer keeps to: it unwraps a decoder, indexes by
//! what a normalizer makes of a text, looks special tokens up that may not be there. None of that can be
//! found out beforehand without doing it, so that unwinding is caught, around calls of the crate alone.
//!
//! A hook would still print the panic. To take it away for the call and put it back is a race: of two threads the
//! second may put back the silence of the first, and panics of a third go unseen meanwhile. So a hook is set
//! once and stays; it asks a flag of the thread that panics, and leaves the rest to the hook before it.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;
use std::thread;

thread_local! {
    /// Panics of this thread are caught, and told by whoever catches them.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// What `call` returns, or what it said when it panicked. What it borrows must bear that it ended early: of
/// tokenizers that is their caches, which are locked, and which are not used where the lock is poisoned.
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    // While a thread unwinds no hook can be set, and a message more is the least trouble.
    if !thread::panicking() {
        HOOK.call_once(|| {
            let before = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                if !QUIET.get() {
                    before(info);
                }
            }));
        });
    }
    let outer = QUIET.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(call));
    QUIET.set(outer);
    result.map_err(|said| message(said.as_ref()))
}

fn message(said: &(dyn Any + Send)) -> String {
    let text = said.downcast_ref::<&str>().copied();
    let text = text.or_else(|| said.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("without a message").to_owned()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// The hook before ours hears of all panics but those.
    #[test]
    fn caught_panics_are_quiet_and_no_others() {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&heard);
        panic::set_hook(Box::new(move |info| {
            log.lock().expect("no panic while it is held").push(message(info.payload()));
        }));
        assert_eq!(caught(|| 7), Ok(7));
        assert_eq!(caught(|| -> u32 { panic!("one") }), Err("one".to_owned()));
        assert_eq!(caught(|| -> u32 { panic!("{}", 2) }), Err("2".to_owned()));
        let loud = thread::spawn(|| {
            assert_eq!(caught(|| caught(|| 7)), Ok(Ok(7)));
            panic!("loud")
        });
        loud.join().expect_err("it panics");
        assert_eq!(*heard.lock().expect("no panic while it is held"), ["loud"]);
    }
}
