//! Sharded checkpoints.

use std::fs;
use std::path::Path;

use checkpoint::{Checkpoint, DType, Error, Tensor, Weight};

use crate::{save, tensors};

/// Writes the tensors of a fixture alternately into two shards.
fn sharded(folder: &Path) -> Vec<crate::Named> {
    let all = tensors("nf4_nested");
    let mut map = Vec::new();
    for shard in 0..2 {
        let file = format!("model-{}-of-2.safetensors", shard + 1);
        let part: Vec<_> = all.iter().skip(shard).step_by(2).cloned().collect();
        map.extend(part.iter().map(|(name, _)| format!("{name:?}: {file:?}")));
        save(&folder.join(file), &part).expect("written");
    }
    let index =
        format!(r#"{{"metadata": {{"total_size": 1}}, "weight_map": {{{}}}}}"#, map.join(", "));
    fs::write(folder.join("model.safetensors.index.json"), index).expect("written");
    all
}

#[test]
fn a_weight_is_found_in_several_shards() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let all = sharded(folder.path());
    for path in [folder.path(), &folder.path().join("model.safetensors.index.json")] {
        let file = Checkpoint::open(path).expect("two shards");
        assert!(file.names().eq(all.iter().map(|(name, _)| name)));
        for (name, tensor) in &all {
            assert_eq!(&file.tensor(name).expect("listed"), tensor);
        }
        assert!(matches!(file.weight("linear.weight"), Ok(Weight::FourBit(_))));
    }
}

/// A model that was saved again as a single file still has the index and the shards of the first save.
#[test]
fn a_whole_file_comes_before_an_older_index() {
    let folder = tempfile::tempdir().expect("temporary folder");
    sharded(folder.path());
    let [whole, shard] =
        ["model.safetensors", "model-2-of-2.safetensors"].map(|file| folder.path().join(file));
    fs::copy(&shard, &whole).expect("written");
    let names = |path: &Path| -> Vec<String> {
        Checkpoint::open(path).expect("a file").names().map(str::to_owned).collect()
    };
    assert_eq!(names(folder.path()), names(&whole));
    fs::remove_file(shard).expect("there");
    assert_eq!(names(folder.path()), names(&whole), "the index names a shard that is gone");
}

#[test]
fn a_shard_that_is_missing_is_named() {
    let folder = tempfile::tempdir().expect("temporary folder");
    sharded(folder.path());
    fs::remove_file(folder.path().join("model-2-of-2.safetensors")).expect("there");
    let error = Checkpoint::open(folder.path()).expect_err("a shard is missing");
    assert!(
        matches!(&error, Error::MissingShard { shard, .. } if shard == "model-2-of-2.safetensors")
    );
    assert!(error.to_string().ends_with("\nhint: download all shards"), "{error}");
}

#[test]
fn an_index_is_checked() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let all = sharded(folder.path());
    let index = folder.path().join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).expect("written");
    let open = |text: &str| {
        fs::write(&index, text).expect("written");
        Checkpoint::open(folder.path()).expect_err("broken")
    };
    for broken in ["", "{", "[]", "{}", r#"{"weight_map": {"a": 1}}"#] {
        assert!(matches!(open(broken), Error::Index { .. }), "{broken}");
    }
    for path in ["../model-1-of-2.safetensors", "/etc/passwd", "..", ""] {
        let text = text.replace("model-1-of-2.safetensors", path);
        assert!(matches!(open(&text), Error::Index { .. }), "{path}");
    }
    let moved = text.replacen("model-1-of-2", "model-2-of-2", 1);
    assert!(matches!(open(&moved), Error::Misplaced { tensors, .. } if tensors.len() == 1));
    // With the shards swapped, each lacks the tensors of the other.
    let swapped = text.replace("model-1-of-2", "x").replace("model-2-of-2", "model-1-of-2");
    let said = open(&swapped.replace("\"x", "\"model-2-of-2")).to_string();
    for (at, (name, _)) in all.iter().enumerate() {
        let missing = format!("\nmissing: {name} in model-{}-of-2.safetensors", 2 - at % 2);
        assert!(said.contains(&missing), "{missing:?} is not in {said}");
    }
    let head = format!(
        "{} lists tensors that their shards lack: {} missing\n",
        index.display(),
        all.len()
    );
    assert!(said.starts_with(&head), "{said}");
}

/// Unlisted tensors are included, as in a single file.
#[test]
fn tensors_that_no_index_lists_are_there() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let all = sharded(folder.path());
    let index = folder.path().join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).expect("written");
    let (name, tensor) = &all[2];
    let cut = text.replacen(&format!("{name:?}: \"model-1-of-2.safetensors\", "), "", 1);
    assert!(cut.len() < text.len(), "{text}");
    fs::write(&index, cut).expect("written");
    let file = Checkpoint::open(folder.path()).expect("two shards");
    assert!(file.names().eq(all.iter().map(|(name, _)| name)));
    assert_eq!(&file.tensor(name).expect("there"), tensor);
}

#[test]
fn a_tensor_of_two_shards_is_refused_by_both() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let all = sharded(folder.path());
    let shard = |number| folder.path().join(format!("model-{number}-of-2.safetensors"));
    let second: Vec<_> = all.iter().skip(1).step_by(2).cloned().collect();
    // First a tensor that the index lists in the first shard, then one that it does not list.
    save(&shard(2), &[&second[..], &all[..1]].concat()).expect("written");
    let said = Checkpoint::open(folder.path()).expect_err("twice").to_string();
    let [one, two] = [1, 2].map(|number| shard(number).display().to_string());
    let line = format!("\ntwice: {} in {one} and {two}\nhint: ", all[0].0);
    assert!(said.contains("contain tensors twice: 1\n") && said.contains(&line), "{said}");
    let stray = ("stray".to_owned(), all[0].1.clone());
    let first: Vec<_> = all.iter().step_by(2).cloned().collect();
    save(&shard(1), &[&first[..], std::slice::from_ref(&stray)].concat()).expect("written");
    save(&shard(2), &[&second[..], &[stray]].concat()).expect("written");
    let error = Checkpoint::open(folder.path()).expect_err("twice");
    assert!(matches!(&error, Error::Twice { tensors, .. } if tensors[0].0 == "stray"), "{error}");
}

#[test]
fn a_folder_without_a_model_is_named() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let error = Checkpoint::open(folder.path()).expect_err("empty").to_string();
    assert!(error.contains(" has neither model.safetensors nor "), "{error}");
    save(&folder.path().join("model.safetensors"), &tensors("int8")).expect("written");
    assert!(Checkpoint::open(folder.path()).expect("one file").contains("linear.SCB"));
    fs::create_dir(folder.path().join("x.safetensors")).expect("made");
    assert!(Checkpoint::open(folder.path().join("x.safetensors")).is_err());
}

/// A released tensor no longer counts in `/proc`, and reads unchanged.
#[test]
fn released_tensors_leave_memory_and_read_again() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("released.safetensors");
    let bytes: Vec<u8> = (0..4 << 20).map(|i: u32| (i % 251) as u8).collect();
    let tensor = Tensor::new(DType::U8, &[bytes.len()], bytes.clone());
    save(&path, &[("x".into(), tensor)]).expect("written");
    let file = Checkpoint::open(&path).expect("whole");
    let read = || file.tensor("x").expect("there").bytes == bytes;
    let held = || {
        let maps = fs::read_to_string("/proc/self/smaps").ok()?;
        let own = maps.split_once("released.safetensors")?.1;
        let line = own.lines().find_map(|line| line.strip_prefix("Rss:"))?;
        line.trim().strip_suffix(" kB")?.parse::<usize>().ok()
    };
    assert!(read());
    let Some(max) = held() else {
        println!("skipped: needs /proc/self/smaps");
        return;
    };
    assert!(max >= 4 << 10, "{max} KiB");
    file.release("absent");
    file.release("x");
    let left = held().expect("still mapped");
    assert!(left <= 64, "{left} KiB");
    assert!(read());
}
