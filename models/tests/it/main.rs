//! Tests on folders in the format of transformers: results, and errors of invalid ones.

mod bad;
mod device;
mod full;
mod golden;
mod lora;
mod names;
mod policy;
mod rehearsal;
mod rope;
mod unet;

use std::path::{Path, PathBuf};

use models::Weights;

/// Every folder that `fixtures/make.py` writes.
const FIXTURES: [&str; 22] = [
    "gemma2",
    "gemma3",
    "gemma3_new",
    "gpt2",
    "gpt2_bare",
    "gpt2_nf4",
    "llama",
    "llama3_tied",
    "llama_dynamic",
    "llama_int8",
    "llama_linear_bias",
    "llama_nf4",
    "llama_sharded",
    "mistral",
    "mistral_full",
    "phi3",
    "phi3_longrope",
    "phi3_nf4",
    "qwen2",
    "qwen2_yarn",
    "qwen3",
    "qwen3_windows",
];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn open(name: &str) -> Weights {
    Weights::open(fixture(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Returns the largest of values from 0 up; NaN if one is NaN.
fn largest(values: impl IntoIterator<Item = f64>) -> f64 {
    let larger = |max: f64, value: f64| if value <= max || max.is_nan() { max } else { value };
    values.into_iter().fold(0.0, larger)
}

#[test]
fn one_nan_is_enough() {
    assert!(largest([1e-7, f64::NAN, 1e-7]).is_nan() && largest([f64::NAN]).is_nan());
    assert_eq!((largest([]), largest([2.0, 3.0, 1.0])), (0.0, 3.0));
}

#[test]
fn every_folder_is_listed() {
    let folder = std::fs::read_dir(fixture("")).expect("fixtures are there");
    let entries = folder.map(|entry| entry.expect("readable").file_name());
    let decoder = |name: &std::ffi::OsString| name != "unet" && fixture("").join(name).is_dir();
    let mut names: Vec<_> = entries.filter(decoder).collect();
    names.sort();
    assert_eq!(names, FIXTURES);
}
