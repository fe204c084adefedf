//! Names the crates that generate CUDA C++, with their versions from the `Cargo.lock` of the program that is built.

use std::env;
use std::fs;
use std::path::Path;

fn main() {
    let get = |name: &str| env::var(name).expect("cargo sets it");
    let (out, own) = (get("OUT_DIR"), get("CARGO_MANIFEST_DIR"));
    let above = Path::new(&out).ancestors().chain(Path::new(&own).ancestors());
    let lock = above.map(|folder| folder.join("Cargo.lock")).find(|lock| lock.exists());
    // Without one, the version of this crate stands for those of its dependencies.
    let text = lock.as_ref().and_then(|lock| fs::read_to_string(lock).ok()).unwrap_or_default();
    if let Some(lock) = lock {
        println!("cargo::rerun-if-changed={}", lock.display());
    }
    let mut names = vec![format!("flashover {}", get("CARGO_PKG_VERSION"))];
    names.extend(text.split("[[package]]").skip(1).filter_map(|package| {
        let field = |name: &str| package.lines().find_map(|line| line.strip_prefix(name));
        let (name, version) = (field("name = ")?, field("version = ")?);
        let part = ["\"cubecl", "\"pliron"].iter().any(|of| name.starts_with(of));
        part.then(|| format!("{name} {version}").replace('"', ""))
    }));
    println!("cargo::rustc-env=FLASHOVER_CUBECL={}", names.join(", "));
}
