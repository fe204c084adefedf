//! Build script for packages whose programs and tests run kernels on the CPU: it makes them export the symbols of
//! `src/bf16.rs`.

pub(crate) fn main() {
    // The output depends only on the target.
    println!("cargo::rerun-if-env-changed=CARGO_CFG_TARGET_ARCH");
    let is = |what: &str, value: &str| std::env::var(what).is_ok_and(|v| v == value);
    if is("CARGO_CFG_TARGET_ARCH", "x86_64") && is("CARGO_CFG_TARGET_OS", "linux") {
        for name in ["__truncsfbf2", "__truncdfbf2"] {
            println!("cargo::rustc-link-arg=-Wl,--export-dynamic-symbol={name}");
        }
    }
}
