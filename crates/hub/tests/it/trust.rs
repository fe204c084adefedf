//! Limits of a malicious server: it cannot write elsewhere, get another server's token, or redirect to bad addresses.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use hub::HubError;

use crate::server::{Asked, Manners, Reply, Server};
use crate::{FILES, Models, Place, demo, files, name, refused, tree};

/// Requests to one server: path and token.
type Seen = Arc<Mutex<Vec<(String, Option<String>)>>>;

/// Returns a log of requests, and a closure that writes to it.
fn seen() -> (Seen, impl FnMut(&Asked) + Send) {
    let seen = Seen::default();
    let own = Arc::clone(&seen);
    let see = move |asked: &Asked| {
        let token = asked.headers.get("authorization").cloned();
        own.lock().expect("no test panics with it").push((asked.path.clone(), token));
    };
    (seen, see)
}

fn taken(seen: &Seen) -> Vec<(String, Option<String>)> {
    std::mem::take(&mut seen.lock().expect("no test panics with it"))
}

fn answer(result: Result<PathBuf, HubError>, word: &str) {
    let error = refused(result);
    assert!(matches!(error, HubError::Answer { .. }), "{error}");
    assert!(error.to_string().contains(word), "{word:?} is not in {error}");
}

/// Returns true if a path is outside the folders of the model.
fn is_astray(path: &PathBuf) -> bool {
    let homes = ["hub/models--owner--demo", "hub/.locks"].map(Path::new);
    !homes.iter().any(|home| path.starts_with(home) || home.starts_with(path))
}

#[test]
fn an_etag_that_is_a_path_writes_nothing() {
    let long = "a".repeat(129);
    for etag in ["../../../../out", "/tmp/out", "..", ".", "a/b", "a\\b", "W/\"../x\"", "", &long] {
        for (header, file) in [("ETag", "config.json"), ("X-Linked-ETag", "model.safetensors")] {
            let own = etag.to_owned();
            let place = Place::whim(move |asked, reply| {
                if asked.path.ends_with(file) {
                    reply.headers.remove("ETag");
                    reply.headers.insert(header, own.clone());
                }
            });
            answer(place.model("owner/demo"), "ETag");
            let out: Vec<_> = tree(place.dir.path()).into_keys().filter(is_astray).collect();
            assert!(out.is_empty(), "{etag}: {out:?}");
        }
    }
}

#[test]
fn a_commit_that_is_a_path_is_none() {
    for commit in ["../../../out", "", "a/b", ".."] {
        let place = Place::whim(move |asked, reply| {
            if asked.path.starts_with("/api/") {
                let listing = serde_json::json!({ "sha": commit, "siblings": [] });
                reply.body = listing.to_string().into_bytes();
                reply.headers.insert("Content-Length", reply.body.len().to_string());
            }
        });
        answer(place.model("owner/demo"), "names no commit");
        assert!(!place.cache().exists());
    }
}

/// Makes a Hub whose large files are on another server.
fn two(
    mut storage: impl FnMut(&Asked, &mut Reply) + Send + 'static,
) -> (Place, Seen, Seen, Server) {
    let (at_storage, mut see) = seen();
    let whim = move |asked: &Asked, reply: &mut Reply| {
        see(asked);
        storage(asked, reply);
    };
    let models = Models::from([("owner/demo", demo())]);
    let manners = Manners { whim: Some(Box::new(whim)), ..Manners::default() };
    let storage = Server::start(models, manners);
    let (at_hub, mut see) = seen();
    let other = storage.endpoint.clone();
    let whim = move |asked: &Asked, reply: &mut Reply| {
        see(asked);
        if let Some(location) = reply.headers.get_mut("Location") {
            let path = location.find("/stored").expect("where it lies");
            *location = format!("{other}{}", &location[path..]);
        }
    };
    let manners =
        Manners { token: Some("secret"), whim: Some(Box::new(whim)), ..Manners::default() };
    (Place::new(manners), at_hub, at_storage, storage)
}

#[test]
fn a_token_stays_with_the_hub() {
    let (place, at_hub, at_storage, _storage) = two(|_, _| {});
    let folder = place.hub(Some("secret")).model(&name("owner/demo"), |_| {}).expect("downloads");
    assert!(files(&folder)["model.safetensors"] == demo()["model.safetensors"]);
    let bearer = Some("Bearer secret".to_owned());
    let (at_hub, at_storage) = (taken(&at_hub), taken(&at_storage));
    assert_eq!(at_hub.len(), 1 + 2 * FILES.len());
    assert!(at_hub.iter().all(|(_, token)| *token == bearer), "{at_hub:?}");
    let paths: Vec<_> = at_storage.iter().map(|(path, _)| path.rsplit('/').next()).collect();
    assert_eq!(paths, [Some("model.safetensors")], "storage is asked for the file alone");
    assert_eq!(at_storage[0].1, None);
}

#[test]
fn what_storage_refuses_is_no_matter_of_tokens() {
    let (place, _, at_storage, storage) = two(|_, reply| reply.status = "403 Forbidden");
    let result = place.hub(Some("secret")).model(&name("owner/demo"), |_| {});
    let host = storage.endpoint.trim_start_matches("http://");
    let host = host.split(':').next().expect("a host");
    answer(result, &format!("status 403 of {host}"));
    assert_eq!(taken(&at_storage).len(), 1);
}

#[test]
fn storage_that_nobody_keeps_is_named() {
    let (place, _, _, storage) = two(|_, _| {});
    let closed = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr());
    let closed = format!("http://{}/stored", closed.expect("a free port"));
    drop((place, storage));
    let place = Place::whim(move |_, reply| {
        if let Some(location) = reply.headers.get_mut("Location") {
            location.clone_from(&closed);
        }
    });
    let error = refused(place.model("owner/demo"));
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("127.0.0.1, the target of its redirect: "), "{error}");
}

#[test]
fn a_redirect_at_home_has_the_token_and_its_own_etag() {
    let (at_hub, mut see) = seen();
    let whim = move |asked: &Asked, reply: &mut Reply| {
        see(asked);
        if asked.path.starts_with("/owner/") && asked.path.ends_with(".json") {
            reply.status = "307 Temporary Redirect";
            reply.headers.insert("Location", format!("/stored{}", asked.path));
            reply.headers.insert("ETag", "../other".to_owned());
        }
    };
    let place = Place::new(Manners { whim: Some(Box::new(whim)), ..Manners::default() });
    let hub = place.hub(Some("secret"));
    let folder = hub.tokenizer(&name("owner/demo"), |_| {}).expect("downloads");
    assert_eq!(fs::read(folder.join("config.json")).expect("there"), demo()["config.json"]);
    let at_hub = taken(&at_hub);
    assert_eq!(at_hub.iter().filter(|(path, _)| path.starts_with("/stored/")).count(), 8);
    assert!(at_hub.iter().all(|(_, token)| token.as_deref() == Some("Bearer secret")));
}

#[test]
fn redirects_come_to_an_end() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let place = Place::whim(move |asked, reply| {
        count.fetch_add(1, Ordering::SeqCst);
        reply.status = "302 Found";
        reply.headers.insert("Location", asked.path.clone());
    });
    answer(place.model("owner/demo"), "redirects more than 5 times");
    assert_eq!(asked.load(Ordering::SeqCst), 6);
}

#[test]
fn redirects_lead_to_addresses_alone() {
    for (location, word) in [
        ("", "its redirect has no target"),
        ("file:///etc/passwd", "an invalid address"),
        ("ftp://127.0.0.1/x", "an invalid address"),
        ("http://", "an invalid address"),
        ("http://name:word@127.0.0.1/x", "a user name or password"),
    ] {
        let place = Place::whim(move |_, reply| {
            reply.status = "302 Found";
            reply.headers.insert("Location", location.to_owned());
        });
        answer(place.model("owner/demo"), word);
    }
}

#[test]
fn a_link_in_the_place_of_a_part_is_not_written_through() {
    let place = Place::new(Manners::default());
    let victim = place.dir.path().join("victim");
    fs::write(&victim, "mine").expect("written");
    let blobs = place.cache().join("models--owner--demo/blobs");
    fs::create_dir_all(&blobs).expect("made");
    let part = blobs.join("owner-demo-config-json.incomplete");
    std::os::unix::fs::symlink(&victim, part).expect("linked");
    let error = refused(place.model("owner/demo"));
    assert!(matches!(error, HubError::Leftover { .. }), "{error}");
    assert_eq!(fs::read_to_string(victim).expect("there"), "mine");
}

#[test]
fn a_file_that_is_listed_and_not_there_is_said() {
    let place = Place::whim(|asked, reply| {
        if asked.path.ends_with("tokenizer.json") {
            reply.status = "404 Not Found";
        }
    });
    answer(place.model("owner/demo"), "lists tokenizer.json, but does not have it");
}

#[test]
fn a_token_that_cannot_be_sent_is_said_and_not_shown() {
    let place = Place::new(Manners::default());
    let error = refused(place.hub(Some("se\ncret")).model(&name("owner/demo"), |_| {}));
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
    assert!(!format!("{error} {error:?}").contains("cret"), "{error}");
}
