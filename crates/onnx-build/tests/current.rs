//! Checks that the committed code of the example is current. `FLASHOVER_WRITE=1 cargo test -p
//! flashover-onnx-build --test current` regenerates it.

use std::fs;

#[test]
fn the_committed_code_is_what_the_generator_writes() {
    let folder = tempfile::tempdir().unwrap();
    let mut generator = onnx_build::generator();
    generator.input("tests/example/example.onnx").out_dir(folder.path().to_str().unwrap());
    generator.load_strategy(burn_onnx::LoadStrategy::Bytes).run_from_cli();
    let code = fs::read_to_string(folder.path().join("example.rs")).unwrap();
    if std::env::var_os("FLASHOVER_WRITE").is_some() {
        fs::write("tests/example/example.rs.in", &code).unwrap();
        fs::copy(folder.path().join("example.bpk"), "tests/example/example.bpk").unwrap();
    }
    assert_eq!(code, fs::read_to_string("tests/example/example.rs.in").unwrap());
}
