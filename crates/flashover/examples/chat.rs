//! Answers messages through the model's chat template. The conversation keeps its history and its KV cache.
//!
//! `cargo run --release --example chat -- models/demo "The fox" "The hen"`

use flashover::Engine;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let engine = Engine::builder(args.next().ok_or("a model")?).build()?;

    let mut request = engine.request();
    request.max_new_tokens = Some(24);
    let mut conversation = engine.conversation(None, None, request)?;
    for message in args {
        println!("> {message}");
        let mut answer = conversation.send(&message)?;
        for piece in answer.by_ref() {
            print!("{}", piece?);
        }
        println!("\n({} tokens prefilled, {} decoded)", answer.prompt_tokens(), answer.tokens());
    }
    println!("{} messages", conversation.messages().len());
    Ok(())
}
