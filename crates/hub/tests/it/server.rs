//! A Hub of one thread, with the models that a test gives it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

/// The commit that every revision stands for.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What the server does beside answering.
#[derive(Default)]
pub(crate) struct Manners {
    /// Its files go to those alone who bring this token.
    pub(crate) token: Option<&'static str>,
    /// A file that breaks off after so many bytes, once.
    pub(crate) cut: Option<(&'static str, usize)>,
}

/// Files by model and name.
pub(crate) type Models = BTreeMap<&'static str, BTreeMap<String, Vec<u8>>>;

pub(crate) struct Server {
    pub(crate) endpoint: String,
    /// What was asked for: address and range.
    asked: Arc<Mutex<Vec<String>>>,
}

impl Server {
    pub(crate) fn start(models: Models, manners: Manners) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (address, log) = (endpoint.clone(), Arc::clone(&asked));
        let mut hub = Answers { models, manners, endpoint: address, asked: log };
        thread::spawn(move || {
            for stream in listener.incoming() {
                // A client that goes away is none of the server's.
                stream.and_then(|stream| hub.serve(stream)).ok();
            }
        });
        Self { endpoint, asked }
    }

    /// Files that were sent, in whole or in part, since the last call.
    pub(crate) fn sent(&self) -> Vec<String> {
        let asked = std::mem::take(&mut *self.asked.lock().expect("no test panics with it"));
        let file = |line: &String| {
            let (path, range) = line.split_once(' ')?;
            let name = path.split_once(&format!("/resolve/{COMMIT}/"))?.1;
            let moved = path.starts_with("/stored/");
            (range != "bytes=0-0" && !moved).then(|| name.to_owned())
        };
        asked.iter().filter_map(file).collect()
    }
}

/// The files of a folder.
pub(crate) fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("listed"));
    entries
        .map(|entry| {
            let name = entry.file_name().into_string().expect("UTF-8");
            (name, fs::read(entry.path()).expect("a file"))
        })
        .collect()
}

struct Answers {
    models: Models,
    manners: Manners,
    endpoint: String,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Answers {
    fn serve(&mut self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let first = lines.next().transpose()?.unwrap_or_default();
        let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
        let mut headers = BTreeMap::new();
        for line in lines {
            let line = line?;
            let Some((name, value)) = line.split_once(':') else { break };
            headers.insert(name.to_lowercase(), value.trim().to_owned());
        }
        let range = headers.get("range").cloned().unwrap_or_default();
        self.asked.lock().expect("no test panics with it").push(format!("{path} {range}"));
        let bearer = headers.get("authorization").and_then(|value| value.strip_prefix("Bearer "));
        let known = self.manners.token.is_none_or(|token| bearer == Some(token));
        let (status, more, body) = self.answer(&path, &range, known);
        let length = body.len();
        let head =
            format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n");
        stream.write_all(format!("{head}{more}\r\n").as_bytes())?;
        let sent = match self.manners.cut {
            Some((name, at)) if path.ends_with(name) && length > at => {
                self.manners.cut = None;
                at
            }
            _ => length,
        };
        stream.write_all(&body[..sent])?;
        stream.shutdown(Shutdown::Both)
    }

    /// Status, headers and body.
    fn answer(&self, path: &str, range: &str, known: bool) -> (&'static str, String, Vec<u8>) {
        let absent = || ("404 Not Found", String::new(), Vec::new());
        let path = path.split('?').next().unwrap_or_default();
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
            return ("200 OK", String::new(), listing.to_string().into_bytes());
        }
        let (path, stored) = match path.strip_prefix("/stored") {
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
        if !known {
            return ("401 Unauthorized", String::new(), Vec::new());
        }
        let etag = format!("{}-{}", model.replace('/', "-"), name.replace('.', "-"));
        // Large files lie elsewhere, as the Hub has it.
        if name.ends_with(".safetensors") && !stored {
            let more = format!(
                "Location: {}/stored{path}\r\nX-Linked-ETag: \"{etag}\"\r\nX-Repo-Commit: {COMMIT}\r\n",
                self.endpoint
            );
            return ("302 Found", more, Vec::new());
        }
        let (from, to) = range.trim_start_matches("bytes=").split_once('-').unwrap_or_default();
        let from: usize = from.parse().unwrap_or(0);
        let to = to.parse().map_or(bytes.len(), |last: usize| last + 1).min(bytes.len());
        if from >= to {
            return ("416 Range Not Satisfiable", String::new(), Vec::new());
        }
        let more = format!(
            "ETag: \"{etag}\"\r\nX-Repo-Commit: {COMMIT}\r\nContent-Range: bytes {from}-{}/{}\r\n",
            to - 1,
            bytes.len()
        );
        ("206 Partial Content", more, bytes[from..to].to_vec())
    }
}
