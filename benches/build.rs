//! What the program of this package carries beside its code.

#[path = "../crates/cli/commit.rs"]
mod commit;
#[path = "../crates/arch/export.rs"]
mod export;

fn main() {
    commit::main();
    export::main();
}
