//! Converts panics of the `tokenizers` crate to errors.
//!
//! The crate assumes properties of a `tokenizer.json` that only its own writer guarantees. It unwraps a decoder,
//! indexes with results of a normalizer, and looks up special tokens that may be missing. No check can find these
//! cases in advance, so unwinding is caught, only around calls of the crate.
//!
//! The panic hook would still print a message. Replacing the hook during each call would be a race: the second of two
//! threads might restore the silent hook of the first, and hide panics of a third. So a hook is set once and stays. It
//! checks a flag of the panicking thread, and otherwise calls the previous hook.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;
use std::thread;

thread_local! {
    /// True while panics of this thread are caught and reported as errors.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs `call`; returns its result, or the message of its panic. Borrowed state must tolerate an early end. For
/// tokenizers that is their locked caches, which are not used if the lock is poisoned.
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    // No hook can be set while a thread unwinds; an additional message is harmless then.
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

    /// The previous hook is called for all panics except caught ones.
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
