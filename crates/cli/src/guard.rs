//! Work of which nothing but its memory tells that it will not end.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// How often somebody looks; a processor fills some ten MiB meanwhile.
const LOOK: Duration = Duration::from_millis(10);
/// Bytes that a chat template may take: a thousand times those of a long conversation.
const TEMPLATE: usize = 1 << 30;
/// Bytes that a file of examples may take.
const EXAMPLES: usize = 8 << 30;

/// Renders a chat template, which is a program of whoever made the model. Its steps are bounded, and what its texts take is
/// not: one that doubles a text forty times has memory until the system ends this process, and others.
///
/// Where it takes more than a GiB this process ends, as for any other error.
pub(crate) fn template<T>(render: impl FnOnce() -> T) -> T {
    within(TEMPLATE, render, || refuse(TEMPLATE, "generate from a plain prompt"))
}

/// The same of examples, of which a file may have many.
pub(crate) fn dataset<T>(read: impl FnOnce() -> T) -> T {
    within(EXAMPLES, read, || {
        refuse(EXAMPLES, "learn from examples that are prompts and completions")
    })
}

fn refuse(bytes: usize, instead: &str) {
    command::note!(
        "error: the chat template takes more than {} MiB\nhint: {instead}, or take the model from where it is trusted",
        bytes >> 20
    );
    std::process::exit(2)
}

/// `refused` is called, beside the work, once this process has so many bytes more than before.
fn within<T>(bytes: usize, work: impl FnOnce() -> T, refused: impl FnOnce() + Send) -> T {
    let now = || memory_stats::memory_stats().map(|stats| stats.physical_mem);
    // Where nobody tells there is no guard.
    let Some(before) = now() else { return work() };
    let (working, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(LOOK) {
                if now().is_some_and(|now| now > before.saturating_add(bytes)) {
                    return refused();
                }
            }
        });
        let made = work();
        drop(working);
        made
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn what_grows_is_told() {
        let told = AtomicBool::new(false);
        let refused = || told.store(true, Ordering::Relaxed);
        assert_eq!(within(64 << 20, || vec![1u8; 1 << 20].len(), refused), 1 << 20);
        assert!(!told.load(Ordering::Relaxed));
        let grow = || {
            let mut all = Vec::new();
            while !told.load(Ordering::Relaxed) && all.len() < 4 << 30 {
                all.resize(all.len() + (1 << 20), 1u8);
            }
            all.len()
        };
        let refused = || told.store(true, Ordering::Relaxed);
        assert!(within(64 << 20, grow, refused) < 4 << 30);
        assert!(told.load(Ordering::Relaxed));
    }
}
