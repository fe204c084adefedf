//! Embeds the commit in the program.

#[path = "../crates/cli/commit.rs"]
mod commit;

fn main() {
    commit::main();
}
