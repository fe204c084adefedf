//! Trains a LoRA adapter on a text, saves it in PEFT's format, and generates with it.
//!
//! `cargo run --release --example fine_tune -- models/demo README.md target/adapter`

use flashover::train::{Dataset, TrainOptions, Trainer};
use flashover::{Device, Engine, EngineOptions, ModelFolder};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let mut next = |name: &'static str| args.next().ok_or(name);
    let (model, data, output) = (next("a model")?, next("a text")?, next("a folder")?);

    let device = Device::auto()?;
    let folder = ModelFolder::open(&model)?;
    let dataset = Dataset::open(data, &folder, 32)?;
    let engine = Engine::from_folder(&device, folder, &EngineOptions::default(), |_| {})?;
    let mut trainer = Trainer::new(engine, TrainOptions::default())?;
    for step in 0..3 {
        let micro_batches: Result<Vec<_>, _> = dataset.micro_batches(step, 2, 1, Some(0)).collect();
        let metrics = trainer.step(&micro_batches?)?;
        println!("step {}: loss {:.3}", metrics.step, metrics.loss);
    }
    trainer.save(&output)?;

    let adapted = Engine::builder(model).device(device).adapter(output).build()?;
    println!("{}", adapted.generate("Once upon a time").max_new_tokens(12).text()?);
    Ok(())
}
