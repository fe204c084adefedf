//! Builds the shipped results from `baselines`, a link to `benches/baselines`, without the times, which are most of the bytes.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

fn main() {
    let baselines = Path::new("baselines");
    println!("cargo::rerun-if-changed={}", baselines.display());
    let folders = fs::read_dir(baselines).expect("the folder of baselines");
    let mut files: Vec<PathBuf> =
        folders.map(|entry| entry.expect("readable").path().join("tune.jsonl")).collect();
    files.sort();
    let mut shipped = String::new();
    for file in files.iter().filter(|file| file.exists()) {
        println!("cargo::rerun-if-changed={}", file.display());
        let text = fs::read_to_string(file).expect("readable");
        for (number, line) in text.lines().enumerate() {
            // Fields have the order of `Entry`.
            let (before, rest) = line.split_once(r#","median_ns":"#).unwrap_or((line, ""));
            let (_, after) = rest.split_once(r#","commit":"#).unwrap_or_else(|| {
                panic!("{}:{}: no line of a tune cache", file.display(), number + 1)
            });
            shipped += &format!("{before},\"commit\":{after}\n");
        }
    }
    let out = env::var_os("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&out).join("recorded.jsonl"), shipped).expect("writable");
}
