//! Build script: sets the commit that the program reports and exports the symbols of CPU kernels.

mod commit;
#[path = "../arch/export.rs"]
mod export;

fn main() {
    commit::main();
    export::main();
}
