//! Requests to the Hub and to the storage that it redirects to.
//!
//! This module follows redirects itself instead of ureq, so that a token goes only to the Hub's own address
//! and https never changes to http. A stalled server times out, but a download has no time limit while bytes
//! arrive.

use std::fmt;
use std::io::{self, ErrorKind, Read};
use std::time::Duration;

use ureq::http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, ETAG, HeaderValue, LOCATION, RANGE, RETRY_AFTER,
};
use ureq::http::{Method, Request, Response, Uri};
use ureq::{Agent, Body, Error, Timeout};

use crate::Patience;
use crate::failure::Failure;
use crate::origin::{Origin, redirected};

/// Maximum number of redirects per request.
const REDIRECTS: usize = 5;

/// Headers of the Hub for a file in separate storage; `ETag` and length of the storage differ.
const LINKED_ETAG: &str = "x-linked-etag";
const LINKED_SIZE: &str = "x-linked-size";

/// An access token for gated and private models. `Debug` hides it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Token(String);

impl Token {
    pub(crate) const fn new(token: String) -> Self {
        Self(token)
    }

    /// Returns the header value; `None` if the token contains invalid characters.
    fn header(&self) -> Option<HeaderValue> {
        let mut value = HeaderValue::from_str(&format!("Bearer {}", self.0)).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Facts about a file, requested before the download.
pub(crate) struct Facts {
    /// ETag header, unparsed.
    pub(crate) etag: String,
    pub(crate) size: Option<u64>,
}

pub(crate) struct Client<'a> {
    agent: Agent,
    endpoint: &'a str,
    own: Origin,
    bearer: Option<HeaderValue>,
    pub(crate) patience: Patience,
}

impl<'a> Client<'a> {
    pub(crate) fn new(
        endpoint: &'a str,
        token: Option<&Token>,
        patience: Patience,
    ) -> Result<Self, Failure> {
        let refused = |why: &str| Failure::Unreached { why: why.to_owned(), passes: false };
        let own = endpoint.parse().ok().and_then(|uri| Origin::from_uri(&uri));
        let own =
            own.ok_or_else(|| refused("expected an address that starts with http:// or https://"))?;
        let bearer = token
            .map(|token| token.header().ok_or_else(|| refused("the token is invalid")))
            .transpose()?;
        let config = Agent::config_builder()
            .user_agent(concat!("flashover/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_resolve(Some(patience.connect))
            .timeout_connect(Some(patience.connect))
            .timeout_send_request(Some(patience.connect))
            .timeout_recv_response(Some(patience.stall))
            .timeout_per_read(Some(patience.stall))
            .build();
        Ok(Self { agent: config.into(), endpoint, own, bearer, patience })
    }

    /// Requests a body of at most `max` bytes.
    pub(crate) fn text(&self, path: &str, max: u64) -> Result<Vec<u8>, Failure> {
        let mut answer = self.get(path, 0)?;
        let mut body = Vec::new();
        let mut reader = answer.body_mut().as_reader().take(max + 1);
        reader.read_to_end(&mut body).map_err(|why| self.broke(why))?;
        match body.len() as u64 > max {
            true => Err(Failure::Unusable(format!("it sends more than {max} bytes"))),
            false => Ok(body),
        }
    }

    /// Requests the facts about a file from the Hub, without contacting separate storage.
    pub(crate) fn facts(&self, path: &str) -> Result<Facts, Failure> {
        let answer = self.follow(&Method::HEAD, path, 0)?;
        let size = match answer.status().is_success() {
            true => {
                header(&answer, LINKED_SIZE).or_else(|| header(&answer, CONTENT_LENGTH.as_str()))
            }
            false => header(&answer, LINKED_SIZE),
        };
        let etag = etag(&answer).ok_or_else(|| Failure::Unusable("it has no ETag".to_owned()))?;
        Ok(Facts { etag: etag.to_owned(), size: size.and_then(|size| size.parse().ok()) })
    }

    /// Requests a file from byte `from` on; returns an answer of status 2xx.
    pub(crate) fn get(&self, path: &str, from: u64) -> Result<Response<Body>, Failure> {
        self.follow(&Method::GET, path, from)
    }

    /// Converts the error of a body that ended early.
    pub(crate) fn broke(&self, why: io::Error) -> Failure {
        match Error::from(why) {
            Error::Timeout(which) => Failure::Broke(self.late(which)),
            // ureq decompresses bodies that we asked to be plain; a range from the middle cannot be decompressed.
            why @ Error::Decompress(..) => Failure::Wrong(plainly(&why)),
            why => Failure::Broke(plainly(&why)),
        }
    }

    /// Follows redirects. A HEAD request stops at a redirect to another origin that has the file's ETag.
    fn follow(&self, method: &Method, path: &str, from: u64) -> Result<Response<Body>, Failure> {
        let uri = format!("{}{path}", self.endpoint).parse();
        let mut uri: Uri =
            uri.map_err(|_| Failure::Unusable(format!("{path} is not a valid address")))?;
        for _ in 0..=REDIRECTS {
            let origin = Origin::from_uri(&uri);
            let is_own = origin.as_ref() == Some(&self.own);
            let answer = self.send(method, &uri, from, is_own)?;
            let status = answer.status();
            if status.is_success() {
                return Ok(answer);
            }
            if !matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308) {
                let elsewhere = origin.filter(|_| !is_own).map(|origin| origin.host().to_owned());
                let wait = header(&answer, RETRY_AFTER.as_str()).and_then(|wait| wait.parse().ok());
                let wait = wait.map(Duration::from_secs);
                return Err(Failure::Status { status: status.as_u16(), elsewhere, wait });
            }
            let location = header(&answer, LOCATION.as_str())
                .ok_or_else(|| Failure::Unusable("its redirect has no target".to_owned()))?;
            let next = redirected(&uri, location).map_err(Failure::Unusable)?;
            if method == Method::HEAD
                && Origin::from_uri(&next) != origin
                && etag(&answer).is_some()
            {
                return Ok(answer);
            }
            uri = next;
        }
        Err(Failure::Unusable(format!("it redirects more than {REDIRECTS} times")))
    }

    fn send(
        &self,
        method: &Method,
        uri: &Uri,
        from: u64,
        is_own: bool,
    ) -> Result<Response<Body>, Failure> {
        // Lengths and ranges must count bytes of the file, not of a compressed body.
        let mut request = Request::builder().method(method).uri(uri);
        request = request.header(ACCEPT_ENCODING, "identity");
        if let Some(bearer) = self.bearer.as_ref().filter(|_| is_own) {
            request = request.header(AUTHORIZATION, bearer);
        }
        if from > 0 {
            request = request.header(RANGE, format!("bytes={from}-"));
        }
        let request = request.body(()).map_err(|why| Failure::Unusable(why.to_string()))?;
        self.agent.run(request).map_err(|why| match self.unanswered(&why) {
            Failure::Unreached { why, passes } if !is_own => {
                let host = uri.host().unwrap_or_default();
                Failure::Unreached {
                    why: format!("{host}, the target of its redirect: {why}"),
                    passes,
                }
            }
            other => other,
        })
    }

    fn unanswered(&self, why: &Error) -> Failure {
        let (why, passes) = match why {
            Error::Protocol(_) | Error::LargeResponseHeader(..) | Error::Http(_) => {
                return Failure::Unusable(plainly(why));
            }
            Error::Timeout(which) => (self.late(*which), true),
            Error::Io(io) => (plainly(why), passes(io.kind())),
            other => (plainly(other), false),
        };
        Failure::Unreached { why, passes }
    }

    fn late(&self, which: Timeout) -> String {
        match which {
            Timeout::PerRead | Timeout::RecvResponse | Timeout::RecvBody => {
                format!("no data arrived for {:?}", self.patience.stall)
            }
            _ => format!("no connection within {:?}", self.patience.connect),
        }
    }
}

/// Returns true for connection errors worth a retry: a server restarts or the network changes. A refused connection
/// is not among them.
const fn passes(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::BrokenPipe
            | ErrorKind::UnexpectedEof
            | ErrorKind::TimedOut
    )
}

/// Returns the first value of a header if it is text.
pub(crate) fn header<'r>(answer: &'r Response<Body>, name: &str) -> Option<&'r str> {
    answer.headers().get(name)?.to_str().ok()
}

fn etag(answer: &Response<Body>) -> Option<&str> {
    header(answer, LINKED_ETAG).or_else(|| header(answer, ETAG.as_str()))
}

/// Formats an error of ureq without the prefix of I/O errors.
fn plainly(why: &Error) -> String {
    match why {
        Error::Io(io) => io.to_string(),
        other => other.to_string(),
    }
}
