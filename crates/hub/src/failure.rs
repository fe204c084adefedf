//! Failures of one request.

use std::io;
use std::time::Duration;

/// Why there is no answer, or none to use.
#[derive(Debug)]
pub(crate) enum Failure {
    Status {
        status: u16,
        /// The host that says so, where the Hub sent on to it.
        elsewhere: Option<String>,
        /// Time that `Retry-After` asks for.
        wait: Option<Duration>,
    },
    Unreached {
        why: String,
        /// True if the next request may succeed.
        passes: bool,
    },
    /// An answer that broke off.
    Broke(String),
    /// An answer that says nothing of a file.
    Unusable(String),
    /// An answer that is not the file: what there is of it cannot be gone on with.
    Wrong(String),
    Disk(io::Error),
}

impl From<io::Error> for Failure {
    /// Failure of a file; readers of the network use `Client::broke`.
    fn from(why: io::Error) -> Self {
        Self::Disk(why)
    }
}
