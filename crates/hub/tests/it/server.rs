//! A single-threaded test Hub that serves the models of a test.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

/// The commit of every revision.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Special behaviour of the server.
#[derive(Default)]
pub(crate) struct Manners {
    /// Token that is required for files.
    pub(crate) token: Option<&'static str>,
    /// File that is cut off at a byte.
    pub(crate) cut: Option<(&'static str, usize)>,
    /// Other changes to answers.
    pub(crate) whim: Option<Whim>,
}

/// A closure that changes an answer before it is sent.
pub(crate) type Whim = Box<dyn FnMut(&Asked, &mut Reply) + Send>;

/// A request.
pub(crate) struct Asked {
    pub(crate) method: String,
    pub(crate) path: String,
    /// Headers by name in lower case.
    pub(crate) headers: BTreeMap<String, String>,
}

/// An answer.
pub(crate) struct Reply {
    pub(crate) status: &'static str,
    /// Headers; empty ones are not sent.
    pub(crate) headers: BTreeMap<&'static str, String>,
    pub(crate) body: Vec<u8>,
    /// Number of bytes of the body to send; all if `None`.
    pub(crate) sent: Option<usize>,
    /// True if the connection then stays open without further bytes.
    pub(crate) stalls: bool,
}

/// Files by model and name.
pub(crate) type Models = BTreeMap<&'static str, BTreeMap<String, Vec<u8>>>;

pub(crate) struct Server {
    pub(crate) endpoint: String,
    /// Requests so far: method and path.
    asked: Arc<Mutex<Vec<String>>>,
}

impl Server {
    pub(crate) fn start(models: Models, manners: Manners) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (address, log) = (endpoint.clone(), Arc::clone(&asked));
        let mut hub = Answers { models, manners, endpoint: address, asked: log, held: Vec::new() };
        thread::spawn(move || {
            for stream in listener.incoming() {
                // A client may close its connection early.
                stream.and_then(|stream| hub.serve(stream)).ok();
            }
        });
        Self { endpoint, asked }
    }

    /// Returns the files requested since the last call, without those in separate storage.
    pub(crate) fn sent(&self) -> Vec<String> {
        let asked = std::mem::take(&mut *self.asked.lock().expect("no test panics with it"));
        let file = |line: &String| {
            let path = line.strip_prefix("GET ")?;
            let name = path.split_once(&format!("/resolve/{COMMIT}/"))?.1;
            (!path.starts_with("/stored/")).then(|| name.to_owned())
        };
        asked.iter().filter_map(file).collect()
    }
}

/// Reads the files of a folder.
pub(crate) fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("listed"));
    entries
        .map(|entry| {
            let name = entry.file_name().into_string().expect("UTF-8");
            (name, fs::read(entry.path()).expect("a file"))
        })
        .collect()
}

impl Reply {
    fn new(status: &'static str, headers: &[(&'static str, String)], body: Vec<u8>) -> Self {
        let mut headers: BTreeMap<_, _> = headers.iter().cloned().collect();
        headers.insert("Content-Length", body.len().to_string());
        Self { status, headers, body, sent: None, stalls: false }
    }

    fn bare(status: &'static str) -> Self {
        Self::new(status, &[], Vec::new())
    }
}

struct Answers {
    models: Models,
    manners: Manners,
    endpoint: String,
    asked: Arc<Mutex<Vec<String>>>,
    /// Connections that are neither answered nor closed.
    held: Vec<TcpStream>,
}

impl Answers {
    fn serve(&mut self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let first = lines.next().transpose()?.unwrap_or_default();
        let mut words = first.split(' ').map(str::to_owned);
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let mut headers = BTreeMap::new();
        for line in lines {
            let line = line?;
            let Some((name, value)) = line.split_once(':') else { break };
            headers.insert(name.to_lowercase(), value.trim().to_owned());
        }
        let asked = Asked { method, path, headers };
        let line = format!("{} {}", asked.method, asked.path);
        self.asked.lock().expect("no test panics with it").push(line);
        let mut reply = self.answer(&asked);
        if let Some(whim) = &mut self.manners.whim {
            whim(&asked, &mut reply);
        }
        let mut head = format!("HTTP/1.1 {}\r\nConnection: close\r\n", reply.status);
        for (name, value) in reply.headers.iter().filter(|header| !header.1.is_empty()) {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        let all = match asked.method.as_str() {
            "HEAD" => 0,
            _ => reply.body.len(),
        };
        let sent = reply.sent.map_or(all, |max| max.min(all));
        if reply.stalls && sent == 0 {
            self.held.push(stream);
            return Ok(());
        }
        stream.write_all(format!("{head}\r\n").as_bytes())?;
        stream.write_all(&reply.body[..sent])?;
        if reply.stalls {
            self.held.push(stream);
            return Ok(());
        }
        stream.shutdown(Shutdown::Both)
    }

    fn answer(&self, asked: &Asked) -> Reply {
        let absent = || Reply::bare("404 Not Found");
        let path = asked.path.split('?').next().unwrap_or_default();
        if let Some(asked) = path.strip_prefix("/api/models/") {
            let Some((model, revision)) = asked.split_once("/revision/") else { return absent() };
            let Some(files) = self.models.get(model).filter(|_| revision != "absent") else {
                return absent();
            };
            let siblings: Vec<_> = files
                .iter()
                .map(|(name, bytes)| serde_json::json!({ "rfilename": name, "size": bytes.len() }))
                .collect();
            let listing = serde_json::json!({ "sha": COMMIT, "siblings": siblings });
            return Reply::new("200 OK", &[], listing.to_string().into_bytes());
        }
        let (path, is_stored) = match path.strip_prefix("/stored") {
            Some(path) => (path, true),
            None => (path, false),
        };
        let found =
            path.trim_start_matches('/').split_once("/resolve/").and_then(|(model, rest)| {
                let (revision, name) = rest.split_once('/')?;
                let bytes = self.models.get(model)?.get(name)?;
                (revision == COMMIT).then_some((model, name, bytes))
            });
        let Some((model, name, bytes)) = found else { return absent() };
        let bearer =
            asked.headers.get("authorization").and_then(|value| value.strip_prefix("Bearer "));
        // Storage checks no tokens: its address proves that the Hub checked one.
        if !is_stored && self.manners.token.is_some_and(|token| bearer != Some(token)) {
            return Reply::bare("401 Unauthorized");
        }
        let etag = format!("{}-{}", model.replace('/', "-"), name.replace('.', "-"));
        // Large files are in separate storage, as on the Hub.
        if name.ends_with(".safetensors") && !is_stored {
            let headers = [
                ("Location", format!("{}/stored{path}", self.endpoint)),
                ("X-Linked-ETag", format!("\"{etag}\"")),
                ("X-Linked-Size", bytes.len().to_string()),
            ];
            return Reply::new("302 Found", &headers, Vec::new());
        }
        let tag = ("ETag", format!("\"{etag}\""));
        let range = asked.headers.get("range").and_then(|range| range.strip_prefix("bytes="));
        let from = range.and_then(|range| range.trim_end_matches('-').parse::<usize>().ok());
        let mut reply = match from {
            None => Reply::new("200 OK", &[tag], bytes.clone()),
            Some(from) if from >= bytes.len() => return Reply::bare("416 Range Not Satisfiable"),
            Some(from) => {
                let range = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
                let headers = [tag, ("Content-Range", range)];
                Reply::new("206 Partial Content", &headers, bytes[from..].to_vec())
            }
        };
        if let Some((_, at)) =
            self.manners.cut.filter(|(cut, at)| *cut == name && *at < bytes.len())
        {
            reply.sent = Some(at.saturating_sub(from.unwrap_or(0)));
        }
        reply
    }
}
