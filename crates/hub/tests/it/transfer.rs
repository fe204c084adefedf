//! Transfers in pieces, late, repeated or with wrong data.

use std::fs::{self, File};
use std::io::Read;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use hub::{Hub, HubError, Patience};
use sha2::{Digest, Sha256};

use crate::server::{Asked, COMMIT, Manners, Reply};
use crate::{Place, QUICK, cutting, demo, name, refused};

const WEIGHTS: &str = "model.safetensors";

/// ETag of the weights on the test server.
const ETAG: &str = "owner-demo-model-safetensors";

fn sum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns true for a request of the weights from storage, not for the redirected one.
fn is_weights(asked: &Asked) -> bool {
    asked.method == "GET" && asked.path.starts_with("/stored/") && asked.path.ends_with(WEIGHTS)
}

/// Makes a place whose answers with weights are changed by `whim`, which gets their number so far. Also returns the
/// requested ranges.
fn weights(
    mut whim: impl FnMut(usize, &Asked, &mut Reply) + Send + 'static,
) -> (Place, Arc<Mutex<Vec<String>>>) {
    let ranges = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&ranges);
    let place = Place::whim(move |asked, reply| {
        if is_weights(asked) {
            let mut seen = seen.lock().expect("no test panics with it");
            whim(seen.len(), asked, reply);
            seen.push(asked.headers.get("range").cloned().unwrap_or_default());
        }
    });
    (place, ranges)
}

fn taken(ranges: &Mutex<Vec<String>>) -> Vec<String> {
    std::mem::take(&mut ranges.lock().expect("no test panics with it"))
}

/// Returns the path of the partial weights.
fn incomplete(place: &Place, etag: &str) -> PathBuf {
    place.cache().join("models--owner--demo/blobs").join(format!("{etag}.incomplete"))
}

/// Writes partial weights, like an interrupted download.
fn leave(place: &Place, etag: &str, bytes: &[u8]) {
    let path = incomplete(place, etag);
    fs::create_dir_all(path.parent().expect("a folder")).expect("made");
    fs::write(path, bytes).expect("written");
}

/// Asserts that the download succeeds, the weights are correct and no partial file is left.
fn came(place: &Place) {
    let folder = place.model("owner/demo").expect("downloads");
    assert!(fs::read(folder.join(WEIGHTS)).expect("there") == demo()[WEIGHTS]);
    let blobs = place.cache().join("models--owner--demo/blobs");
    let names = crate::files(&blobs).into_keys();
    assert_eq!(names.filter(|name| name.ends_with(".incomplete")).count(), 0);
}

/// Asserts that the download fails with an unusable answer and leaves nothing.
fn unusable(place: &Place, etag: &str, word: &str) {
    let error = refused(place.model("owner/demo"));
    assert!(matches!(error, HubError::Answer { .. }), "{error}");
    assert!(error.to_string().contains(word), "{word:?} is not in {error}");
    assert!(!incomplete(place, etag).exists(), "{error}");
    let snapshot = place.cache().join("models--owner--demo/snapshots").join(COMMIT);
    assert!(!snapshot.join(WEIGHTS).exists(), "{error}");
}

#[test]
fn a_download_that_breaks_off_goes_on_where_it_was() {
    let (place, ranges) = weights(|before, _, reply| {
        reply.sent = (before < 5).then_some(1_000_000);
    });
    came(&place);
    let want = ["", "bytes=1000000-", "bytes=2000000-", "bytes=3000000-", "bytes=4000000-"];
    assert_eq!(taken(&ranges)[..5], want, "more tries than may fail in a row: each brought more");
}

#[test]
fn a_download_that_ends_is_gone_on_with_by_the_next() {
    let (_, whim) = cutting(WEIGHTS, 4_000_000, 3);
    let place = Place::new(Manners { whim: Some(whim), ..Manners::default() });
    let error = refused(place.model("owner/demo"));
    assert!(matches!(error, HubError::Interrupted { .. }), "{error}");
    let snapshot = place.cache().join("models--owner--demo/snapshots").join(COMMIT);
    assert!(!snapshot.join(WEIGHTS).exists());
    assert_eq!(fs::metadata(incomplete(&place, ETAG)).expect("kept").len(), 4_000_000);
    assert!(matches!(refused(place.offline("owner/demo")), HubError::NotCached { .. }));
    place.server.sent();
    let mut least = u64::MAX;
    let folder = place.hub(None).model(&name("owner/demo"), |progress| {
        if progress.file == WEIGHTS && progress.bytes > 1_000_000 {
            least = least.min(progress.bytes);
        }
    });
    let have = fs::read(folder.expect("goes on").join(WEIGHTS)).expect("there");
    assert!(have == demo()[WEIGHTS]);
    assert_eq!(place.server.sent(), [WEIGHTS]);
    assert!(least >= 4_000_000, "it went on at {least}");
}

#[test]
fn a_server_without_ranges_begins_anew() {
    let all = demo().remove(WEIGHTS).expect("there");
    let (place, ranges) = weights(move |_, _, reply| {
        reply.status = "200 OK";
        reply.headers.remove("Content-Range");
        reply.headers.insert("Content-Length", all.len().to_string());
        reply.body.clone_from(&all);
    });
    leave(&place, ETAG, b"something else");
    came(&place);
    assert_eq!(taken(&ranges), ["bytes=14-"]);
}

#[test]
fn a_range_that_is_another_is_refused() {
    for range in ["bytes 0-9/10", "bytes 5-9999/10000", "items 4-9/10", ""] {
        let (place, ranges) = weights(move |_, _, reply| {
            reply.headers.insert("Content-Range", range.to_owned());
        });
        leave(&place, ETAG, &demo()[WEIGHTS][..4]);
        unusable(&place, ETAG, "Content-Range");
        assert_eq!(taken(&ranges), ["bytes=4-"], "{range}");
    }
    let (place, _) = weights(|_, _, reply| reply.status = "206 Partial Content");
    unusable(&place, ETAG, "206");
}

#[test]
fn a_range_that_is_refused_is_asked_for_no_more() {
    let (place, ranges) = weights(|before, _, reply| {
        if before == 0 {
            *reply = Reply { status: "416 Range Not Satisfiable", body: Vec::new(), ..empty() };
        }
    });
    leave(&place, ETAG, b"old");
    came(&place);
    assert_eq!(taken(&ranges), ["bytes=3-", ""]);
}

fn empty() -> Reply {
    let headers = [("Content-Length", "0".to_owned())].into();
    Reply { status: "200 OK", headers, body: Vec::new(), sent: None, stalls: false }
}

#[test]
fn a_leftover_as_long_as_the_file_is_not_taken_for_it() {
    let (place, ranges) = weights(|_, _, _| {});
    for more in [0, 1] {
        leave(&place, ETAG, &vec![0; demo()[WEIGHTS].len() + more]);
        came(&place);
        assert_eq!(taken(&ranges), [""]);
        fs::remove_dir_all(place.cache()).expect("removed");
    }
}

/// Makes a place whose server sends `etag` for the weights.
fn named(etag: String) -> Place {
    Place::whim(move |asked, reply| {
        if asked.path.ends_with(WEIGHTS) {
            let linked = reply.headers.contains_key("X-Linked-ETag");
            reply.headers.insert(if linked { "X-Linked-ETag" } else { "ETag" }, etag.clone());
        }
    })
}

#[test]
fn weights_have_the_sum_that_they_are_named_by() {
    let right = sum(&demo()[WEIGHTS]);
    let place = named(format!("\"{right}\""));
    leave(&place, &right, &demo()[WEIGHTS][..1000]);
    came(&place);
    let wrong = sum(b"something else");
    unusable(&named(format!("\"{wrong}\"")), &wrong, &format!("is {right}, expected {wrong}"));
}

#[test]
fn a_part_that_is_damaged_is_found_out_and_deleted() {
    let right = sum(&demo()[WEIGHTS]);
    let place = named(right.clone());
    for damaged in [vec![7; 1000], vec![7; demo()[WEIGHTS].len()]] {
        leave(&place, &right, &damaged);
        unusable(&place, &right, "SHA-256");
    }
    came(&place);
}

#[test]
fn a_part_that_is_whole_is_not_downloaded_again() {
    let right = sum(&demo()[WEIGHTS]);
    let place = named(right.clone());
    leave(&place, &right, &demo()[WEIGHTS]);
    came(&place);
    assert!(!place.server.sent().iter().any(|file| file == WEIGHTS));
}

/// Makes a place whose server lists the checksum `sum` for the weights.
fn listed(sum: String, etag: Option<String>) -> Place {
    Place::whim(move |asked, reply| {
        if asked.path.starts_with("/api/") {
            let text = String::from_utf8(reply.body.clone()).expect("UTF-8");
            let old = format!("\"rfilename\":\"{WEIGHTS}\"");
            let new = format!("{old},\"lfs\":{{\"sha256\":\"{sum}\",\"pointerSize\":134}}");
            assert!(text.contains(&old), "{text}");
            reply.body = text.replace(&old, &new).into_bytes();
            reply.headers.insert("Content-Length", reply.body.len().to_string());
        } else if let Some(etag) = etag.as_ref().filter(|_| asked.path.ends_with(WEIGHTS)) {
            reply.headers.insert("X-Linked-ETag", etag.clone());
        }
    })
}

#[test]
fn weights_have_the_sum_that_the_listing_has() {
    let right = sum(&demo()[WEIGHTS]);
    came(&listed(right.clone(), None));
    came(&listed(right.to_uppercase(), Some(right.clone())));
    let wrong = sum(b"something else");
    unusable(&listed(wrong.clone(), None), ETAG, &format!("is {right}, expected {wrong}"));
    unusable(&listed(right, Some(wrong.clone())), &wrong, "two different SHA-256");
}

#[test]
fn a_file_of_another_length_is_refused() {
    let (place, _) = weights(|_, _, reply| {
        reply.body.truncate(1000);
        reply.headers.insert("Content-Length", "1000".to_owned());
    });
    unusable(&place, ETAG, "Content-Length");
    // No header gives the length.
    let (place, _) = weights(|_, _, reply| {
        reply.body.push(0);
        reply.headers.remove("Content-Length");
    });
    unusable(&place, ETAG, "is larger");
    let (place, ranges) = weights(|_, asked, reply| {
        if !asked.headers.contains_key("range") {
            reply.headers.remove("Content-Length");
            reply.sent = Some(1000);
        }
    });
    came(&place);
    assert_eq!(taken(&ranges), ["", "bytes=1000-"], "an end that comes early is none");
}

#[test]
fn a_part_is_kept_from_an_answer_that_says_nothing_of_the_file() {
    let (place, _) = weights(|_, _, reply| {
        reply.status = "302 Found";
        reply.headers.insert("Location", "/login".to_owned());
    });
    leave(&place, ETAG, &demo()[WEIGHTS][..1000]);
    let error = refused(place.model("owner/demo"));
    assert!(matches!(error, HubError::Answer { .. } | HubError::NoModel { .. }), "{error}");
    assert_eq!(fs::metadata(incomplete(&place, ETAG)).expect("kept").len(), 1000);
}

/// Makes a place whose listing has only names, and whose answers have lengths or not.
fn unlisted(has_lengths: bool) -> Place {
    Place::whim(move |asked, reply| {
        if asked.path.starts_with("/api/") {
            let names = demo().into_keys().map(|name| serde_json::json!({ "rfilename": name }));
            let names: Vec<_> = names.collect();
            let listing = serde_json::json!({ "sha": COMMIT, "siblings": names });
            reply.body = listing.to_string().into_bytes();
            reply.headers.insert("Content-Length", reply.body.len().to_string());
        } else if !has_lengths {
            reply.headers.remove("X-Linked-Size");
            reply.headers.remove("Content-Length");
        }
    })
}

#[test]
fn a_length_comes_of_the_listing_or_of_the_answer() {
    came(&unlisted(true));
    unusable(&unlisted(false), ETAG, "it gives no length for config.json");
}

#[test]
fn what_is_packed_is_no_file() {
    for (encoding, word) in [("br", "the Content-Encoding of"), ("gzip", "gzip")] {
        let (place, _) = weights(move |_, _, reply| {
            reply.headers.insert("Content-Encoding", encoding.to_owned());
        });
        unusable(&place, ETAG, word);
    }
}

/// Makes a place whose server fails the first `times` requests of the listing, and returns their counter.
fn failing(
    status: &'static str,
    retry_after: &'static str,
    times: usize,
) -> (Place, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let place = Place::whim(move |asked, reply| {
        if asked.path.starts_with("/api/") && count.fetch_add(1, Ordering::SeqCst) < times {
            *reply = Reply { status, ..empty() };
            reply.headers.insert("Retry-After", retry_after.to_owned());
        }
    });
    (place, asked)
}

#[test]
fn a_server_that_is_at_its_limit_is_asked_again() {
    for status in ["503 Service Unavailable", "500 Internal Server Error", "429 Too Many Requests"]
    {
        let (place, asked) = failing(status, "", 2);
        came(&place);
        assert_eq!(asked.load(Ordering::SeqCst), 3);
        let (place, asked) = failing(status, "", usize::MAX);
        let error = refused(place.model("owner/demo"));
        assert!(matches!(error, HubError::Answer { .. }), "{error}");
        assert!(error.to_string().contains(&status[..3]), "{error}");
        assert_eq!(asked.load(Ordering::SeqCst), 3);
    }
    let (place, asked) = failing("404 Not Found", "", usize::MAX);
    refused(place.model("owner/demo"));
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    let (place, ranges) = weights(|before, _, reply| {
        if before < 2 {
            *reply = Reply { status: "502 Bad Gateway", ..empty() };
        }
    });
    came(&place);
    assert_eq!(taken(&ranges).len(), 3);
}

/// Starts a download on a thread; its result arrives at the receiver.
fn started(place: &Place, patience: Patience) -> mpsc::Receiver<Result<PathBuf, HubError>> {
    let (done, result) = mpsc::channel();
    let hub = place.hub(None).with_patience(patience);
    thread::spawn(move || done.send(hub.model(&name("owner/demo"), |_| {})));
    result
}

#[test]
fn who_says_when_is_asked_then() {
    let (place, asked) = failing("429 Too Many Requests", "1", 1);
    let result = started(&place, QUICK);
    assert!(result.recv_timeout(Duration::from_millis(900)).is_err(), "it waits for a second");
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    result.recv_timeout(Duration::from_secs(20)).expect("in time").expect("downloads");
    let (place, asked) = failing("429 Too Many Requests", "3600", 1);
    let error = refused(place.model("owner/demo"));
    assert!(error.to_string().contains("status 429, retry after 3600s"), "{error}");
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

/// A short timeout and one retry.
const SHORT: Patience = Patience { stall: Duration::from_millis(300), tries: 2, ..QUICK };

/// Asserts that a stalled download fails within seconds, not after the default half minute or never.
fn soon(place: &Place) -> HubError {
    let result = started(place, SHORT).recv_timeout(Duration::from_secs(8)).expect("in time");
    let error = refused(result);
    assert!(error.to_string().contains("no data arrived for 300ms"), "{error}");
    error
}

#[test]
fn a_server_that_stalls_is_left() {
    for path in ["/api/", "config.json"] {
        let place = Place::whim(move |asked, reply| {
            if asked.path.contains(path) {
                (reply.stalls, reply.sent) = (true, Some(0));
            }
        });
        unreached(&soon(&place));
    }
    let (place, ranges) = weights(|_, _, reply| {
        // Sends one byte of each answer and then stalls.
        (reply.stalls, reply.sent) = (true, Some(1));
    });
    let error = soon(&place);
    assert!(matches!(error, HubError::Interrupted { .. }), "{error}");
    assert_eq!(taken(&ranges), ["", "bytes=1-"]);
}

/// Asserts that no answer arrived.
fn unreached(error: &HubError) {
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
}

#[test]
fn a_stall_is_gone_on_from() {
    let (place, ranges) = weights(|before, _, reply| {
        if before == 0 {
            (reply.stalls, reply.sent) = (true, Some(2_000_000));
        }
    });
    let hub = place.hub(None).with_patience(SHORT);
    hub.model(&name("owner/demo"), |_| {}).expect("goes on");
    came(&place);
    assert_eq!(taken(&ranges), ["", "bytes=2000000-"]);
}

#[test]
fn a_connection_that_closes_without_an_answer_is_tried_again() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
    let taken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&taken);
    thread::spawn(move || {
        for stream in listener.incoming() {
            count.fetch_add(1, Ordering::SeqCst);
            // Read first, else the system sends a reset instead of an orderly end.
            stream.and_then(|mut stream| stream.read(&mut [0; 4096])).ok();
        }
    });
    let dir = tempfile::tempdir().expect("temporary folder");
    let hub = Hub::new(&endpoint, None, dir.path().to_owned()).with_patience(QUICK);
    unreached(&refused(hub.model(&name("owner/demo"), |_| {})));
    assert_eq!(taken.load(Ordering::SeqCst), 3);
}

#[test]
fn a_listing_without_end_is_refused() {
    let place = Place::whim(|asked, reply| {
        if asked.path.starts_with("/api/") {
            reply.body = vec![b' '; (64 << 20) + 1];
            reply.headers.remove("Content-Length");
        }
    });
    let error = refused(place.model("owner/demo"));
    assert!(error.to_string().contains("more than 67108864 bytes"), "{error}");
}

#[test]
fn two_programs_do_not_write_one_file() {
    let place = Place::new(Manners::default());
    let locks = place.cache().join(".locks/models--owner--demo");
    fs::create_dir_all(&locks).expect("made");
    let lock = File::create(locks.join(format!("{ETAG}.lock"))).expect("made");
    lock.lock().expect("ours");
    let error = refused(place.model("owner/demo"));
    assert!(matches!(error, HubError::Busy { .. }), "{error}");
    assert!(!place.server.sent().iter().any(|file| file == WEIGHTS));
    // A download waits for the holder of the lock.
    let other = thread::spawn(move || {
        thread::sleep(Duration::from_millis(300));
        drop(lock);
    });
    let patient = Patience { busy: Duration::from_secs(20), ..QUICK };
    let hub = place.hub(None).with_patience(patient);
    hub.model(&name("owner/demo"), |_| {}).expect("downloads");
    other.join().expect("done");
    came(&place);
}
