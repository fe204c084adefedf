//! How long is waited, and how often is asked again.

use std::thread;
use std::time::Duration;

use crate::failure::Failure;

/// The longest wait that a server's `Retry-After` is given.
const MOST_ASKED: Duration = Duration::from_secs(60);

/// How long [`Hub`](crate::Hub) waits for others. A download has no limit of its own as long as bytes come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// For a host's address, for a connection, and for a request to be taken.
    pub connect: Duration,
    /// For an answer to begin, and then for its next bytes.
    pub stall: Duration,
    /// For another program that downloads the same file.
    pub busy: Duration,
    /// How many requests in a row may fail and bring little, of failures that pass: 1 asks once.
    pub tries: u32,
    /// Between the first failure and the next request; each that follows waits twice as long.
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

    /// The last of what `ask` gives: what came, or the failure after which it is not asked again.
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

/// What is left of patience.
pub(crate) struct Tries {
    left: u32,
    pause: Duration,
}

impl Tries {
    /// Whether to ask again after a failure; waits where it is so.
    pub(crate) fn again(&mut self, failure: &Failure) -> bool {
        let asked = match failure {
            _ if self.left == 0 => return false,
            Failure::Unreached { passes: true, .. } | Failure::Broke(_) => Duration::ZERO,
            Failure::Status { status: 429 | 500..=599, wait, .. } => wait.unwrap_or_default(),
            _ => return false,
        };
        if asked > MOST_ASKED {
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
