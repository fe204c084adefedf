//! Failures of a single request.

use std::io;
use std::time::Duration;

/// The reason that a request has no usable answer.
#[derive(Debug)]
pub(crate) enum Failure {
    Status {
        status: u16,
        /// Host that answered, if the Hub redirected to another one.
        elsewhere: Option<String>,
        /// Wait requested by `Retry-After`.
        wait: Option<Duration>,
    },
    Unreached {
        why: String,
        /// True if a retry may succeed.
        passes: bool,
    },
    /// The answer broke off.
    Broke(String),
    /// The answer contains no data of the file; a partial file stays valid.
    Unusable(String),
    /// The answer contains wrong data; the partial file cannot be continued.
    Wrong(String),
    Disk(io::Error),
}

impl From<io::Error> for Failure {
    /// Converts an error of a local file; readers of the network use `Client::broke`.
    fn from(why: io::Error) -> Self {
        Self::Disk(why)
    }
}
