//! Embeds the commit in the program and exports the symbols that it needs.

#[path = "../crates/cli/commit.rs"]
mod commit;
#[path = "../crates/arch/export.rs"]
mod export;

fn main() {
    commit::main();
    export::main();
}
