//! What the programs of this package carry beside their code.

mod commit;
#[path = "../arch/export.rs"]
mod export;

fn main() {
    commit::main();
    export::main();
}
