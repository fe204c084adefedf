//! Timeouts and retries.

use std::thread;
use std::time::Duration;

use crate::failure::Failure;

/// Longest accepted `Retry-After` of a server; a longer one is not waited for.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);

/// Timeouts and retries of a [`Hub`](crate::Hub). A download has no time limit as long as bytes arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Timeout for resolving a host, for connecting, and for sending a request.
    pub connect: Duration,
    /// Timeout for the start of an answer, and for each next part of it.
    pub stall: Duration,
    /// Timeout for another program that downloads the same file.
    pub busy: Duration,
    /// Number of requests in a row that may fail temporarily and bring little data; 1 disables retries.
    pub tries: u32,
    /// Pause before the first retry; it doubles with each further one.
    pub pause: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            stall: Duration::from_secs(30),
            busy: Duration::from_secs(5),
            tries: 4,
            pause: Duration::from_millis(500),
        }
    }
}

impl Patience {
    pub(crate) const fn tries(self) -> Tries {
        Tries { left: self.tries.saturating_sub(1), pause: self.pause }
    }

    /// Calls `ask` until it succeeds or must not be retried, and returns the last result.
    pub(crate) fn retry<T>(
        self,
        mut ask: impl FnMut() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let mut tries = self.tries();
        loop {
            match ask() {
                Err(failure) if tries.again(&failure) => {}
                done => return done,
            }
        }
    }
}

/// Remaining retries of a [`Patience`].
pub(crate) struct Tries {
    left: u32,
    pause: Duration,
}

impl Tries {
    /// Returns true, after a pause, if the request should be retried.
    pub(crate) fn again(&mut self, failure: &Failure) -> bool {
        let asked = match failure {
            _ if self.left == 0 => return false,
            Failure::Unreached { passes: true, .. } | Failure::Broke(_) => Duration::ZERO,
            Failure::Status { status: 429 | 500..=599, wait, .. } => wait.unwrap_or_default(),
            _ => return false,
        };
        if asked > MAX_RETRY_AFTER {
            return false;
        }
        thread::sleep(self.pause.max(asked));
        self.left -= 1;
        self.pause = self.pause.saturating_mul(2);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_is_asked_again_and_nothing_else() {
        let patience = Patience { tries: 3, pause: Duration::ZERO, ..Patience::default() };
        let status = |status, wait| Failure::Status { status, elsewhere: None, wait };
        let unreached = |passes| Failure::Unreached { why: String::new(), passes };
        for (failure, times) in [
            (status(503, None), 3),
            (status(429, Some(Duration::from_millis(1))), 3),
            (status(429, Some(Duration::from_secs(3600))), 1),
            (status(404, None), 1),
            (status(401, None), 1),
            (unreached(true), 3),
            (unreached(false), 1),
            (Failure::Broke(String::new()), 3),
            (Failure::Unusable(String::new()), 1),
        ] {
            let mut tries = patience.tries();
            let asked = 1 + (0..10).take_while(|_| tries.again(&failure)).count();
            assert_eq!(asked, times, "{failure:?}");
        }
    }
}
