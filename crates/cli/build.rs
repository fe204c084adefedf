//! Embeds the commit in the program.

mod commit;

fn main() {
    commit::main();
}
