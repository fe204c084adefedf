//! Continues a text and prints it piece by piece.
//!
//! `cargo run --release --example generate -- models/demo "Once upon a time"`

use std::io::Write;

use flashover::Engine;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (model, prompt) = (args.next().ok_or("a model")?, args.next().ok_or("a text")?);

    // Takes the first GPU, or else the CPU; `.device(Device::cuda(0)?)` chooses another.
    let engine = Engine::builder(model).build()?;
    print!("{prompt}");
    let mut text = engine.generate(&prompt).max_new_tokens(32).temperature(0.8).seed(7).stream()?;
    for piece in text.by_ref() {
        print!("{}", piece?);
        std::io::stdout().flush()?;
    }
    println!("\n({} tokens, {:?})", text.tokens(), text.finish_reason());
    Ok(())
}
