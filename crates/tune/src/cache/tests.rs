use super::*;

fn entry(bucket: &str, date: &str, ns: f64) -> Entry {
    Entry {
        format: FORMAT,
        key: Key {
            kernel: "matmul".into(),
            version: 1,
            arch_id: ArchId("cuda-sm89-128".into()),
            bucket: bucket.into(),
        },
        problem: Value::Null,
        config: serde_json::json!({ "tile_m": 128 }),
        median_ns: Some(ns),
        timings: Vec::new(),
        commit: "abc".into(),
        date: date.into(),
    }
}

#[test]
fn shipped_results_are_readable() {
    assert_eq!(TuneCache::shipped().warnings(), &[]);
}

#[test]
fn damaged_and_foreign_lines_are_named_and_the_rest_counts() {
    let good = serde_json::to_string(&entry("a", "2026-01-01T00:00:00Z", 5.0)).expect("plain");
    let foreign = good.replace("\"format\":1", "\"format\":9").replace("\"a\"", "\"b\"");
    let frozen = good.replace("5.0", "-1.0").replace("\"a\"", "\"c\"");
    let text = format!("{good}\n{{\"format\":1,\n{foreign}\n{frozen}\n");
    let (entries, warnings) = parse(text.as_bytes(), "f");
    assert_eq!(entries.len(), 1);
    assert_eq!(warnings.iter().map(|w| w.line).collect::<Vec<_>>(), [2, 3, 4]);
}

#[test]
fn the_newer_result_wins_whatever_the_order() {
    let old = entry("a", "2026-01-01T00:00:00Z", 9.0);
    let new = entry("a", "2026-02-01T00:00:00Z", 5.0);
    for pair in [[&old, &new], [&new, &old]] {
        let mut cache = TuneCache::default();
        for e in pair {
            let text = serde_json::to_string(e).expect("plain");
            cache.merge_text(&text, "f").expect("no file to write");
        }
        let (found, source) = cache.get(&old.key).expect("merged");
        assert_eq!((found.median_ns, source), (Some(5.0), Source::Tuned));
    }
}

#[test]
fn what_ships_is_not_hidden_by_older_results_or_undated_ones() {
    let shipped = TuneCache::shipped();
    let (first, _) = shipped.entries().next().expect("something ships");
    let merged = |date: &str| {
        let text = serde_json::to_string(&Entry { date: date.into(), ..first.clone() });
        let mut cache = TuneCache::shipped();
        let merged = cache.merge_text(&text.expect("plain"), "f").expect("no file to write");
        (merged.results, merged.taken, cache.measured.len(), cache.warnings().len())
    };
    assert_eq!(merged("2020-01-01T00:00:00Z"), (1, 0, 0, 0));
    let now = rfc3339(OffsetDateTime::now_utc());
    assert_eq!(merged(&now), (1, 1, 1, 0), "{now}");
    assert_eq!(merged("2999-01-01T00:00:00Z"), (0, 0, 0, 1), "it would win forever");
    for undated in
        ["", "garbage", "2999-01-01", "2999-01-01T00:00:00+01:00", "2999-13-01T00:00:00Z"]
    {
        assert_eq!(merged(undated), (0, 0, 0, 1), "{undated}");
    }
}

#[test]
fn relatives_are_the_nearest_cards_first() {
    let of = |id: &str, bucket: &str, ns| {
        let mut entry = entry(bucket, "2026-01-01T00:00:00Z", ns);
        entry.key.arch_id = ArchId(id.into());
        serde_json::to_string(&entry).expect("plain") + "\n"
    };
    let text = [
        of("cuda-sm90-132@rtx4090", "a", 1.0),
        of("cuda-sm89-76", "a", 2.0),
        of("cuda-sm90-132", "a", 3.0),
        of("cuda-sm90-132@rtx5090", "a", 4.0),
        of("cuda-sm89-76", "b", 5.0),
        of("vulkan-10de-2335-nvidia.580.159.04", "a", 6.0),
    ];
    let mut cache = TuneCache::default();
    cache.merge_text(&text.concat(), "f").expect("no file to write");
    let near = |id: &str| {
        let key = Key { arch_id: ArchId(id.into()), ..entry("a", "", 0.0).key };
        cache.relatives(&key).map(|entry| entry.median_ns).collect::<Vec<_>>()
    };
    assert_eq!(near("cuda-sm89-128"), [Some(2.0), Some(1.0)]);
    assert_eq!(near("cuda-sm90-132@rtx4080"), [Some(2.0), Some(1.0)]);
    assert_eq!(near("cuda-sm120-170"), [Some(4.0), Some(2.0), Some(1.0)]);
    assert_eq!(near("vulkan-10de-2330-nvidia.570.1"), [Some(6.0)]);
    assert!(near("vulkan-1002-744c-radv").is_empty() && near("cuda-sm86-82").is_empty());
}

#[test]
fn of_equally_old_results_the_later_one_wins() {
    let mut cache = TuneCache::default();
    for ns in [9.0, 5.0, 7.0] {
        let text = serde_json::to_string(&entry("a", "2026-01-01T00:00:00Z", ns));
        cache.merge_text(&text.expect("plain"), "f").expect("no file to write");
    }
    assert_eq!(cache.measured.values().map(|e| e.median_ns).collect::<Vec<_>>(), [Some(7.0)]);
}

#[test]
fn what_was_measured_now_wins_over_a_future_date() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let path = dir.path().join("tune.jsonl");
    let mut cache = TuneCache::open(&path).expect("absent file");
    let soon = rfc3339(OffsetDateTime::now_utc() + Duration::HOUR);
    cache.insert(entry("a", &soon, 9.0)).expect("writable");
    cache.insert(entry("b", &soon, 9.0)).expect("writable");
    let mut cache = TuneCache::open(&path).expect("readable");
    cache.insert(entry("a", "2026-01-01T00:00:00Z", 5.0)).expect("writable");
    let kept = TuneCache::open(&path).expect("readable");
    let times: Vec<_> = kept.measured.values().map(|e| e.median_ns).collect();
    assert_eq!(times, [Some(5.0), Some(9.0)]);
}

#[test]
fn two_writers_keep_each_others_results() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let path = dir.path().join("sub/tune.jsonl");
    let mut one = TuneCache::open(&path).expect("absent file");
    let mut two = TuneCache::open(&path).expect("absent file");
    one.insert(entry("a", "2026-01-01T00:00:00Z", 1.0)).expect("writable");
    two.insert(entry("b", "2026-01-01T00:00:00Z", 2.0)).expect("writable");
    let both = TuneCache::open(&path).expect("readable");
    assert_eq!(both.measured.len(), 2);
    assert_eq!(both.warnings(), TuneCache::shipped().warnings());
}

#[test]
fn results_of_another_version_survive_a_rewrite() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let path = dir.path().join("tune.jsonl");
    let newer = r#"{"format":99,"whatever":[1,2]}"#;
    fs::write(&path, format!("{newer}\nnot JSON\n")).expect("writable");
    let mut cache = TuneCache::open(&path).expect("readable");
    cache.insert(entry("a", "2026-01-01T00:00:00Z", 1.0)).expect("writable");
    let text = fs::read_to_string(&path).expect("written");
    assert!(text.lines().any(|l| l == newer) && text.lines().count() == 2, "{text}");
}

#[test]
fn a_file_that_is_no_cache_is_refused_and_kept() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let path = dir.path().join("tune.jsonl");
    for bytes in [b"export PATH\n".as_slice(), b"\xff\n", b"{\n}\n"] {
        let mut cache = TuneCache::open(&path).expect("absent file");
        fs::write(&path, bytes).expect("writable");
        let text = TuneCache::open(&path).expect_err("no cache").to_string();
        assert!(text.contains("\nhint: "), "{text}");
        assert!(cache.insert(entry("a", "2026-01-01T00:00:00Z", 1.0)).is_err());
        assert_eq!(fs::read(&path).expect("there"), bytes);
        fs::remove_file(&path).expect("ours");
    }
}

#[test]
fn every_damaged_line_is_ignored_and_named_even_when_no_other_is_left() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let path = dir.path().join("tune.jsonl");
    let good = serde_json::to_string(&entry("a", "2026-01-01T00:00:00Z", 5.0)).expect("plain");
    let cases: [(Vec<u8>, usize); 5] = [
        (good.as_bytes()[..60].to_vec(), 0),
        ([good.as_bytes(), b"\n\xff\n"].concat(), 1),
        ((good.clone() + &good).into_bytes(), 0),
        (good.replace("5.0", "1e400").into_bytes(), 0),
        (b"{\"format\":99,\"whatever\":\"\xff\"}\n".to_vec(), 0),
    ];
    for (bytes, kept) in cases {
        fs::write(&path, &bytes).expect("writable");
        let shown = String::from_utf8_lossy(&bytes);
        let mut cache = TuneCache::open(&path).expect("a damaged cache");
        assert_eq!((cache.measured.len(), cache.warnings().len()), (kept, 1), "{shown}");
        cache.insert(entry("b", "2026-01-01T00:00:00Z", 1.0)).expect("written");
        let foreign = bytes.starts_with(b"{\"format\":99");
        let left = fs::read(&path).expect("there");
        assert_eq!(left.ends_with(&bytes), foreign, "another version's line stays: {shown}");
    }
}

#[test]
fn the_lock_is_nobody_elses_file() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let path = |name: &str| dir.path().join(name);
    for name in ["Cargo.lock", ".Cargo.jsonl.flashover-lock"] {
        fs::write(path(name), "kept").expect("writable");
    }
    for name in ["Cargo.jsonl", "x.lock"] {
        let mut cache = TuneCache::open(&path(name)).expect("absent file");
        cache.insert(entry("a", "2026-01-01T00:00:00Z", 1.0)).expect("writable");
        assert_eq!(TuneCache::open(&path(name)).expect("readable").measured.len(), 1);
    }
    for name in ["Cargo.lock", ".Cargo.jsonl.flashover-lock"] {
        assert_eq!(fs::read_to_string(path(name)).expect("there"), "kept");
    }
}

#[test]
fn a_link_stays_a_link() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let link = dir.path().join("link");
    std::os::unix::fs::symlink("sub/tune.jsonl", &link).expect("linked");
    for bucket in ["a", "b"] {
        let mut cache = TuneCache::open(&link).expect("readable");
        cache.insert(entry(bucket, "2026-01-01T00:00:00Z", 1.0)).expect("writable");
    }
    assert!(link.is_symlink());
    let behind = TuneCache::open(&dir.path().join("sub/tune.jsonl")).expect("readable");
    assert_eq!(behind.measured.len(), 2);
}

#[test]
fn a_cache_that_cannot_be_written_is_found_out_beforehand() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let path = dir.path().join("sub/tune.jsonl");
    let cache = TuneCache::open(&path).expect("absent file");
    cache.check_writable().expect("can be written");
    assert!(!path.exists(), "nothing to write yet");
    for path in ["/proc/flashover/tune.jsonl", "/dev/null/tune.jsonl"] {
        let cache = TuneCache { path: Some(path.into()), ..TuneCache::default() };
        let text = cache.check_writable().expect_err("no such folder").to_string();
        assert!(text.contains("\nhint: "), "{text}");
    }
    TuneCache::shipped().check_writable().expect("keeps nothing");
}

#[test]
fn concurrent_writers_lose_nothing() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let path = dir.path().join("tune.jsonl");
    std::thread::scope(|scope| {
        for t in 0..4 {
            let path = &path;
            scope.spawn(move || {
                for i in 0..8 {
                    let mut cache = TuneCache::open(path).expect("readable");
                    let bucket = format!("{t}-{i}");
                    cache.insert(entry(&bucket, "2026-01-01T00:00:00Z", 1.0)).expect("written");
                }
            });
        }
    });
    assert_eq!(TuneCache::open(&path).expect("readable").measured.len(), 32);
}

#[test]
fn a_half_written_file_costs_its_last_line_only() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let path = dir.path().join("tune.jsonl");
    let mut cache = TuneCache::open(&path).expect("absent file");
    cache.insert(entry("a", "2026-01-01T00:00:00Z", 1.0)).expect("writable");
    cache.insert(entry("b", "2026-01-01T00:00:00Z", 1.0)).expect("writable");
    let text = fs::read_to_string(&path).expect("written");
    fs::write(&path, &text[..text.len() - 20]).expect("writable");
    let cut = TuneCache::open(&path).expect("readable");
    assert_eq!((cut.measured.len(), cut.warnings().len()), (1, 1));
}
