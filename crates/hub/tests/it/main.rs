//! Downloads from a local test server.

mod server;
mod transfer;
mod trust;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hub::{Hub, HubError, ModelName, Patience};
use server::{Asked, COMMIT, Manners, Models, Reply, Server, Whim, files};

fn demo() -> BTreeMap<String, Vec<u8>> {
    files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo"))
}

/// Files of the demo model in download order, weights last.
const FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "tokenizer.json",
    "model.safetensors",
];

fn name(text: &str) -> ModelName {
    text.parse().expect("a name")
}

/// Short pauses between retries, and timeouts long enough for a busy machine.
const QUICK: Patience = Patience {
    connect: Duration::from_secs(10),
    stall: Duration::from_secs(10),
    busy: Duration::from_millis(200),
    tries: 3,
    pause: Duration::from_millis(5),
};

/// A server with the demo model, and an empty cache.
struct Place {
    server: Server,
    dir: tempfile::TempDir,
}

impl Place {
    fn new(manners: Manners) -> Self {
        Self::with(Models::from([("owner/demo", demo())]), manners)
    }

    fn with(models: Models, manners: Manners) -> Self {
        let dir = tempfile::tempdir().expect("temporary folder");
        Self { server: Server::start(models, manners), dir }
    }

    fn whim(whim: impl FnMut(&Asked, &mut Reply) + Send + 'static) -> Self {
        Self::new(Manners { whim: Some(Box::new(whim)), ..Manners::default() })
    }

    fn cache(&self) -> PathBuf {
        self.dir.path().join("hub")
    }

    fn hub(&self, token: Option<&str>) -> Hub {
        let token = token.map(str::to_owned);
        Hub::new(&self.server.endpoint, token, self.cache()).with_patience(QUICK)
    }

    fn model(&self, text: &str) -> Result<PathBuf, HubError> {
        self.hub(None).model(&name(text), |_| {})
    }

    fn offline(&self, text: &str) -> Result<PathBuf, HubError> {
        self.hub(None).offline().model(&name(text), |_| {})
    }
}

/// Cuts off a file at byte `at`, in `times` answers. Returns the counter of remaining cuts.
fn cutting(name: &'static str, at: usize, times: usize) -> (Arc<AtomicUsize>, Whim) {
    let left = Arc::new(AtomicUsize::new(times));
    let count = Arc::clone(&left);
    let whim = move |asked: &Asked, reply: &mut Reply| {
        if asked.method == "GET" && asked.path.ends_with(name) && !reply.body.is_empty() {
            let cuts = count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
            let from = asked.headers.get("range").map_or(0, |range| first(range));
            reply.sent = cuts.is_ok().then(|| at.saturating_sub(from));
        }
    };
    (left, Box::new(whim))
}

/// Returns the first byte of a range.
fn first(range: &str) -> usize {
    let from = range.strip_prefix("bytes=").and_then(|range| range.strip_suffix('-'));
    from.and_then(|from| from.parse().ok()).expect("bytes=N-")
}

fn refused(result: Result<PathBuf, HubError>) -> HubError {
    let error = result.expect_err("refused");
    assert_eq!(error.to_string().matches("\nhint: ").count(), 1, "{error}");
    error
}

#[test]
fn a_model_comes_whole_once_and_nothing_else_comes() {
    let place = Place::new(Manners::default());
    let mut last = (0, 0);
    let folder = place.hub(None).model(&name("owner/demo"), |progress| {
        assert!(progress.bytes <= progress.total_bytes || progress.total_bytes == 0);
        last = (progress.bytes, progress.total_bytes);
    });
    let folder = folder.expect("downloads");
    assert_eq!(place.server.sent(), FILES, "each once");
    assert_eq!(folder, place.cache().join("models--owner--demo/snapshots").join(COMMIT));
    let (have, mut want) = (files(&folder), demo());
    want.retain(|name, _| FILES.contains(&name.as_str()));
    assert!(have == want, "{:?}", have.keys());
    let bytes: usize = want.values().map(Vec::len).sum();
    assert_eq!(last, (bytes as u64, bytes as u64));
    assert_eq!(place.model("owner/demo").expect("is there"), folder);
    assert_eq!(place.server.sent(), [""; 0], "nothing twice");
    assert_eq!(place.offline("owner/demo").expect("is there"), folder);
    let by_commit = format!("owner/demo@{COMMIT}");
    assert_eq!(place.offline(&by_commit).expect("is there"), folder);
}

/// Lists files below a folder, with the targets of links.
fn tree(folder: &Path) -> BTreeMap<PathBuf, Option<PathBuf>> {
    let mut found = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(next).expect("a folder") {
            let path = entry.expect("listed").path();
            if path.is_dir() && !path.is_symlink() {
                open.push(path.clone());
            }
            let own = path.strip_prefix(folder).expect("under it").to_owned();
            found.insert(own, fs::read_link(&path).ok());
        }
    }
    found
}

#[test]
fn what_huggingface_hub_left_is_not_downloaded_again() {
    let place = Place::new(Manners::default());
    let own = place.cache().join("models--owner--demo");
    let (blobs, snapshot) = (own.join("blobs"), own.join("snapshots").join(COMMIT));
    for folder in [&blobs, &snapshot, &own.join("refs")] {
        fs::create_dir_all(folder).expect("made");
    }
    for (at, name) in FILES.into_iter().enumerate() {
        let sum = format!("{at:040x}");
        fs::write(blobs.join(&sum), &demo()[name]).expect("written");
        std::os::unix::fs::symlink(Path::new("../../blobs").join(&sum), snapshot.join(name))
            .expect("linked");
    }
    fs::write(own.join("refs/main"), COMMIT).expect("written");
    let before = tree(&place.cache());
    assert_eq!(place.offline("owner/demo").expect("is there"), snapshot);
    assert_eq!(place.model("owner/demo").expect("is there"), snapshot);
    assert_eq!(place.server.sent(), [""; 0]);
    assert_eq!(tree(&place.cache()), before, "it is left as it is");
}

#[test]
fn the_cache_is_as_huggingface_hub_has_it() {
    let place = Place::new(Manners::default());
    place.model("owner/demo@v1").expect("downloads");
    let own = Path::new("models--owner--demo");
    let snapshot = own.join("snapshots").join(COMMIT);
    let mut want = BTreeMap::new();
    for folder in [own, &own.join("blobs"), &own.join("refs"), &own.join("snapshots"), &snapshot] {
        want.insert(folder.to_owned(), None);
    }
    let locks = Path::new(".locks");
    for path in [own.join("refs/v1"), locks.to_owned(), locks.join(own)] {
        want.insert(path, None);
    }
    for name in FILES {
        let etag = format!("owner-demo-{}", name.replace('.', "-"));
        want.insert(own.join("blobs").join(&etag), None);
        want.insert(locks.join(own).join(format!("{etag}.lock")), None);
        want.insert(snapshot.join(name), Some(Path::new("../../blobs").join(etag)));
    }
    assert_eq!(tree(&place.cache()), want);
    let named = fs::read_to_string(place.cache().join(own).join("refs/v1")).expect("there");
    assert_eq!(named, COMMIT);
}

#[test]
fn a_file_that_another_commit_has_is_not_downloaded_again() {
    let place = Place::new(Manners::default());
    let folder = place.model("owner/demo").expect("downloads");
    place.server.sent();
    let elsewhere = folder.with_file_name("f".repeat(40));
    fs::rename(&folder, elsewhere).expect("renamed");
    assert_eq!(place.model("owner/demo").expect("is linked"), folder);
    assert_eq!(place.server.sent(), [""; 0]);
}

#[test]
fn a_tokenizer_comes_without_weights() {
    let place = Place::new(Manners::default());
    let tokenizer = |hub: Hub| hub.tokenizer(&name("owner/demo@v1"), |_| {}).expect("downloads");
    let folder = tokenizer(place.hub(None));
    assert_eq!(place.server.sent(), FILES[..5]);
    assert_eq!(tokenizer(place.hub(None).offline()), folder);
    let error = refused(place.offline("owner/demo@v1"));
    assert!(matches!(error, HubError::NotCached { .. }), "no weights: {error}");
    assert_eq!(place.model("owner/demo@v1").expect("downloads"), folder);
    assert_eq!(place.server.sent(), FILES[5..], "the rest");
}

#[test]
fn shards_come_by_their_index() {
    let [one, two] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let index = serde_json::json!({ "weight_map": { "a": one, "b": two, "c": one } });
    let file = |name: &str, text: &str| (name.to_owned(), text.as_bytes().to_vec());
    let all = BTreeMap::from([
        file("config.json", "{}"),
        file("model.safetensors.index.json", &index.to_string()),
        file(one, "one"),
        file(two, "the second"),
        file("pytorch_model.bin", "not this"),
    ]);
    let models = Models::from([("owner/large", all)]);
    let (cuts, whim) = cutting(two, 3, 3);
    let place = Place::with(models, Manners { whim: Some(whim), ..Manners::default() });
    let error = refused(place.model("owner/large"));
    assert!(matches!(error, HubError::Interrupted { .. }), "{error}");
    assert!(matches!(refused(place.offline("owner/large")), HubError::NotCached { .. }));
    assert_eq!(cuts.load(Ordering::SeqCst), 0);
    place.server.sent();
    let folder = place.model("owner/large").expect("goes on");
    assert_eq!(place.server.sent(), [two], "what came is kept");
    assert_eq!(fs::read(folder.join(two)).expect("there"), b"the second");
    assert_eq!(place.offline("owner/large").expect("is there"), folder);
}

#[test]
fn a_gated_model_comes_with_a_token() {
    let place = Place::new(Manners { token: Some("secret"), ..Manners::default() });
    let asked = |token| place.hub(token).model(&name("owner/demo"), |_| {});
    for token in [None, Some("wrong")] {
        let error = refused(asked(token));
        assert!(matches!(error, HubError::Refused { status: 401, .. }), "{error}");
        assert!(error.to_string().contains("HF_TOKEN"), "{error}");
        assert!(!error.to_string().contains("wrong"), "a token is no one's to read: {error}");
    }
    asked(Some("secret")).expect("downloads");
}

#[test]
fn what_cannot_come_says_why() {
    let of = |text: &str| (text.to_owned(), b"x".to_vec());
    let models = Models::from([
        ("owner/demo", demo()),
        ("owner/torch", BTreeMap::from([of("config.json"), of("pytorch_model.bin")])),
        ("owner/index", BTreeMap::from([of("config.json"), of("model.safetensors.index.json")])),
    ]);
    let place = Place::with(models, Manners::default());
    let absent = |error: HubError| matches!(error, HubError::NoModel { .. });
    assert!(absent(refused(place.model("owner/absent"))));
    assert!(absent(refused(place.model("owner/demo@absent"))));
    let error = refused(place.model("owner/torch"));
    assert!(matches!(error, HubError::NoSafetensors { .. }), "{error}");
    let error = refused(place.model("owner/index"));
    assert!(matches!(error, HubError::Answer { .. }), "{error}");
    assert!(matches!(refused(place.offline("owner/never")), HubError::NotCached { .. }));
}

#[test]
fn no_network_is_said() {
    let dir = tempfile::tempdir().expect("temporary folder");
    // The listener is dropped, so the port is closed.
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr());
    let closed = format!("http://{}", port.expect("a free port"));
    for endpoint in [closed.as_str(), "no address"] {
        let hub = Hub::new(endpoint, None, dir.path().to_owned());
        let error = refused(hub.model(&name("owner/demo"), |_| {}));
        assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
        assert_eq!(error.to_string().matches(endpoint).count(), 1, "{error}");
    }
}

#[test]
fn a_cache_that_takes_nothing_is_said() {
    let place = Place::new(Manners::default());
    fs::write(place.cache(), "a file in its place").expect("written");
    let error = refused(place.model("owner/demo"));
    assert!(matches!(error, HubError::Disk { .. }), "{error}");
}
