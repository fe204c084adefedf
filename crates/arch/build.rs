//! Compiles `src/rounding.rs` to a shared library, which `src/bf16.rs` contains.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

const SOURCE: &str = "src/rounding.rs";

fn main() {
    println!("cargo::rerun-if-changed={SOURCE}");
    let get = |name: &str| env::var(name).unwrap_or_default();
    let library = PathBuf::from(get("OUT_DIR")).join("rounding.so");
    let is_needed =
        get("CARGO_CFG_TARGET_ARCH") == "x86_64" && get("CARGO_CFG_TARGET_OS") == "linux";
    let is_compiled = is_needed && compile(&library);
    if is_needed && !is_compiled {
        println!("cargo::warning={SOURCE} does not compile: some CPUs will lack bf16");
    }
    if !is_compiled {
        fs::write(library, []).expect("OUT_DIR can be written");
    }
}

fn compile(library: &PathBuf) -> bool {
    let variable = |name: &str| env::var(name).expect("cargo sets it");
    let status = Command::new(variable("RUSTC"))
        .args(["--crate-type", "cdylib", "--edition", "2024", "--target", &variable("TARGET")])
        .args(["-O", "-C", "panic=abort", "-C", "strip=symbols", "-C", "link-arg=-nostdlib"])
        .args([SOURCE, "-o"])
        .arg(library)
        .status();
    status.is_ok_and(|status| status.success())
}
