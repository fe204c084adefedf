//! Writes a model with its layers in NF4, in bitsandbytes' format, and generates text with both models.
//!
//! `cargo run --release --example quantize -- models/demo target/demo-nf4`

use std::path::PathBuf;

use flashover::quantize::{QuantizeOptions, quantize_model};
use flashover::{Device, Engine};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1).map(PathBuf::from);
    let (model, output) = (args.next().ok_or("a model")?, args.next().ok_or("a folder")?);

    let device = Device::auto()?;
    let made = quantize_model(&device, &model, &output, &QuantizeOptions::default())?;
    println!("{} bytes became {}", made.bytes_before, made.bytes);
    for folder in [model, output] {
        let engine = Engine::builder(folder).device(device.clone()).build()?;
        println!("{}", engine.generate("Once upon a time").max_new_tokens(12).greedy().text()?);
    }
    Ok(())
}
