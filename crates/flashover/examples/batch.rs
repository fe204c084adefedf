//! Generates several completions of several prompts, in two batches on parallel threads.
//!
//! `cargo run --release --example batch -- models/demo [cuda, vulkan or cpu]`

use std::error::Error;
use std::thread;

use flashover::{Backend, Device, Engine, EngineOptions, GenerateError, Sampling};

use flashover::memory::Workload;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().ok_or("a folder")?;
    let backend = args.next().map_or(Ok(Backend::Cpu), |name| name.parse())?;
    let device = Device::open(backend)?;
    let engine = Engine::load(&device, folder, &EngineOptions::default())?;

    // Memory of four sequences with 128 positions, before they are allocated.
    let plan = engine.plan(Workload::new(4, 128))?;
    println!("{plan}");

    let mut request = engine.request();
    request.sampling = Sampling { temperature: 1.0, ..request.sampling };
    request.max_new_tokens = Some(12);

    // Each thread has its own stream. All threads share the weights.
    let batch = |prompts: [&str; 2]| -> Result<String, GenerateError> {
        let tokens = prompts.map(|prompt| engine.encode(prompt));
        let tokens = tokens.into_iter().collect::<Result<Vec<_>, _>>()?;
        // Two completions per prompt, which share the KV cache of the prompt.
        let answers = engine.generate_batch(&tokens, 2, &request)?;
        let mut text = String::new();
        for ((prompt, tokens), answers) in prompts.iter().zip(&tokens).zip(answers) {
            for answer in answers {
                let ids: Vec<u32> = answer.tokens.iter().map(|token| token.id).collect();
                text += &format!("{prompt}|{}\n", engine.decode_after(tokens, &ids)?);
            }
        }
        Ok(text)
    };
    thread::scope(|threads| {
        let one = threads.spawn(|| batch(["Once upon a time", "The dog"]));
        let other = threads.spawn(|| batch(["Lily was", "They went to the"]));
        for thread in [one, other] {
            print!("{}", thread.join().expect("it does not panic")?);
        }
        Ok(())
    })
}
