//! Downloads, from a server on this machine.

mod server;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use hub::{Hub, HubError, ModelName};
use server::{COMMIT, Manners, Models, Server, files};

fn demo() -> BTreeMap<String, Vec<u8>> {
    files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo"))
}

/// What the demo model is loaded from, the weights last.
const FILES: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
];

fn name(text: &str) -> ModelName {
    text.parse().expect("a name")
}

/// A server with the demo model and a cache of its own.
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

    fn cache(&self) -> PathBuf {
        self.dir.path().join("hub")
    }

    fn hub(&self, token: Option<&str>) -> Hub {
        Hub::new(&self.server.endpoint, token.map(str::to_owned), self.cache())
    }

    fn model(&self, text: &str) -> Result<PathBuf, HubError> {
        self.hub(None).model(&name(text), |_| {})
    }

    fn offline(&self, text: &str) -> Result<PathBuf, HubError> {
        self.hub(None).offline().model(&name(text), |_| {})
    }
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

#[test]
fn what_huggingface_hub_left_is_not_downloaded_again() {
    let place = Place::new(Manners::default());
    let folder = place.model("owner/demo").expect("downloads");
    place.server.sent();
    let refs = place.cache().join("models--owner--demo/refs");
    fs::remove_file(refs.join(COMMIT)).expect("it keeps names of branches alone");
    assert_eq!(place.model("owner/demo").expect("is there"), folder);
    assert_eq!(place.server.sent(), [""; 0]);
}

#[test]
fn a_tokenizer_comes_without_weights() {
    let place = Place::new(Manners::default());
    let tokenizer = |hub: Hub| hub.tokenizer(&name("owner/demo@v1"), |_| {}).expect("downloads");
    let folder = tokenizer(place.hub(None));
    assert_eq!(place.server.sent(), FILES[..4]);
    assert_eq!(tokenizer(place.hub(None).offline()), folder);
    let error = refused(place.offline("owner/demo@v1"));
    assert!(matches!(error, HubError::NotCached { .. }), "no weights: {error}");
    assert_eq!(place.model("owner/demo@v1").expect("downloads"), folder);
    assert_eq!(place.server.sent(), FILES[4..], "the rest");
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
    let cut = Some((two, 3));
    let place =
        Place::with(Models::from([("owner/large", all)]), Manners { cut, ..Manners::default() });
    let error = refused(place.model("owner/large"));
    assert!(matches!(error, HubError::Interrupted { .. }), "{error}");
    assert!(matches!(refused(place.offline("owner/large")), HubError::NotCached { .. }));
    place.server.sent();
    let folder = place.model("owner/large").expect("goes on");
    assert_eq!(place.server.sent(), [two], "what came is kept");
    assert_eq!(fs::read(folder.join(two)).expect("there"), b"the second");
    assert_eq!(place.offline("owner/large").expect("is there"), folder);
}

#[test]
fn a_download_that_breaks_off_leaves_no_model_and_is_gone_on_with() {
    let cut = Some(("model.safetensors", 4_000_000));
    let place = Place::new(Manners { cut, ..Manners::default() });
    let error = refused(place.model("owner/demo"));
    assert!(matches!(error, HubError::Interrupted { .. }), "{error}");
    let snapshot = place.cache().join("models--owner--demo/snapshots").join(COMMIT);
    assert!(!snapshot.join("model.safetensors").exists());
    assert!(matches!(refused(place.offline("owner/demo")), HubError::NotCached { .. }));
    place.server.sent();
    let mut least = u64::MAX;
    let folder = place.hub(None).model(&name("owner/demo"), |progress| {
        if progress.file == "model.safetensors" && progress.bytes > 1_000_000 {
            least = least.min(progress.bytes);
        }
    });
    let have = fs::read(folder.expect("goes on").join("model.safetensors")).expect("there");
    assert!(have == demo()["model.safetensors"]);
    assert_eq!(place.server.sent(), ["model.safetensors"]);
    assert!(least >= 4_000_000, "it went on at {least}");
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
    // Bound and given back: nobody listens there.
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
