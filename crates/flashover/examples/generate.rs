//! Goes on from a text, and prints what comes as it comes.
//!
//! `cargo run --release --example generate -- models/demo "Once upon a time"`

use std::error::Error;
use std::io::Write;

use flashover::{Backend, Device, Engine, EngineOptions, Sampling};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (folder, prompt) = (args.next().ok_or("a folder")?, args.next().ok_or("a text")?);

    // `Backend::Cuda` or `Backend::Vulkan` where there is such a card; nothing falls back by itself.
    let device = Device::open(Backend::Cpu)?;
    let engine = Engine::load(&device, folder, &EngineOptions::default())?;

    // What the model's makers would have, and a little warmer.
    let mut request = engine.request();
    request.sampling = Sampling { temperature: 0.8, seed: 7, ..request.sampling };
    request.max_new_tokens = Some(32);

    let tokens = engine.encode(&prompt)?;
    let mut session = engine.session(engine.room(tokens.len(), &request))?;
    let mut pieces = session.write(&tokens, &request)?;
    print!("{prompt}");
    for piece in pieces.by_ref() {
        print!("{}", piece?);
        std::io::stdout().flush()?;
    }
    println!("\n({} tokens, {:?})", pieces.tokens(), pieces.end());
    Ok(())
}
