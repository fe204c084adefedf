//! Tests of builders, conversations and devices.

use flashover::burn::tensor::{Device as BurnDevice, Tensor};
use flashover::{
    Backend, BuildProgress, Compute, Device, Engine, FinishReason, GenerateError, LoadError,
    Message, OpenError, Request, WeightFormat,
};

use crate::{cpu, demo, fixture};

fn engine() -> Engine {
    Engine::builder(demo()).device(cpu()).build().expect("the demo")
}

#[test]
fn a_builder_loads_as_its_settings_say() {
    let mut parts = Vec::new();
    let engine = Engine::builder(demo())
        .device(cpu())
        .dtype(Compute::F32)
        .quant(WeightFormat::Nf4)
        .max_context(700)
        .on_progress(|progress| {
            if let BuildProgress::Loading(loading) = progress {
                parts.push((loading.done, loading.parts));
            }
        })
        .build()
        .expect("the demo");
    assert_eq!(engine.precision(), ("f32".to_owned(), Some("4-bit".to_owned())));
    assert_eq!(engine.config().context(), Some(700));
    let (_, all) = parts[0];
    assert!(all > 5 && parts.last() == Some(&(all, all)), "{parts:?}");
    let refused = Engine::builder("/nonexistent").device(cpu()).build().expect_err("no folder");
    assert!(matches!(refused, LoadError::Folder(_)), "{refused}");
    let adapter = fixture("llama").join("lora");
    let refused = Engine::builder(demo()).device(cpu()).adapter(adapter).build();
    assert!(refused.expect_err("an adapter of another model").to_string().contains("\nhint: "));
}

#[test]
fn a_generation_is_that_of_a_session() {
    let engine = engine();
    let prompt = engine.encode("Once upon a time").expect("a tokenizer");
    let mut request = engine.request();
    request.max_new_tokens = Some(20);
    request.sampling.temperature = 0.9;
    request.sampling.seed = 5;
    let mut session = engine.session(100).expect("short");
    let stream = session.generate_text(&prompt, &request).expect("fits");
    let want: String = stream.collect::<Result<_, _>>().expect("finite");
    let asked = || engine.generate("Once upon a time").max_new_tokens(20).temperature(0.9).seed(5);
    assert_eq!(asked().text().expect("fits"), want);
    assert_eq!(engine.generate_tokens(prompt).request(request).text().expect("fits"), want);
    let two = asked().completions(2).expect("fits");
    assert_eq!((two.len(), two[0].text.as_deref()), (2, Some(&want[..])));
    assert_ne!(two[0].text, two[1].text, "completions are drawn apart");
    let mut stream = asked().stop(" ").stream().expect("fits");
    let cut: String = stream.by_ref().collect::<Result<_, _>>().expect("finite");
    assert!(want.starts_with(&cut) && !cut.contains(' '), "{cut}");
    assert_eq!(stream.finish_reason(), Some(FinishReason::Stop));
    let greedy = |seed| engine.generate("The dog").max_new_tokens(8).greedy().seed(seed).text();
    assert_eq!(greedy(1).expect("fits"), greedy(2).expect("fits"));
    let hot = engine.generate("x").temperature(-1.0).text().expect_err("no such temperature");
    assert!(matches!(hot, GenerateError::Sampling { .. }), "{hot}");
}

#[test]
fn a_conversation_prefills_what_is_new() {
    let engine = engine();
    let request = Request { max_new_tokens: Some(8), stop_tokens: Vec::new(), ..engine.request() };
    let mut conversation = engine.conversation(None, Some(96), request.clone()).expect("fits");
    let mut answer = conversation.send("The fox ran.").expect("fits");
    let first: String = answer.by_ref().collect::<Result<_, _>>().expect("finite");
    let prompt = answer.prompt_tokens();
    assert_eq!((answer.tokens(), answer.text()), (8, &first[..]));
    drop(answer);
    let user = Message::new("user", "The fox ran.");
    assert_eq!(conversation.messages(), [user.clone(), Message::new("assistant", &first)]);
    let once = engine.chat(&[user]).request(request).text().expect("fits");
    assert_eq!(once, first, "a conversation of one message");
    let answer = conversation.send("The hen ran.").expect("fits");
    assert!(answer.prompt_tokens() < 2 * prompt, "{} after {prompt}", answer.prompt_tokens());
    // An answer dropped before its first piece is an empty message.
    drop(answer);
    assert_eq!(conversation.messages().len(), 4);
    let long = "Once upon a time there was a cat. ".repeat(20);
    let refused = conversation.send(&long).expect_err("too long");
    assert!(matches!(refused, GenerateError::MessageTooLong { context: 96, .. }), "{refused}");
    assert_eq!(conversation.messages().len(), 4, "it is no part of the conversation");
    let half = "Once upon a time there was a cat. ".repeat(6);
    let answer = conversation.send(&half).expect("fits alone");
    assert!(answer.dropped_messages() >= 2);
    let system = engine.conversation(Some(&long), Some(96), engine.request());
    assert!(matches!(system, Err(GenerateError::MessageTooLong { .. })));
}

#[test]
fn devices_are_those_of_burn() {
    let device = cpu();
    let burn = BurnDevice::from(&device);
    let sum = Tensor::<1>::ones([4], &burn).sum().into_scalar::<f32>();
    assert_eq!(sum, 4.0);
    let back = Device::try_from(&burn).expect("CubeCL runs it");
    assert_eq!((back.backend(), back.ordinal()), (Backend::Cpu, 0));
    let foreign = Device::try_from(&BurnDevice::flex()).expect_err("not CubeCL's");
    assert!(matches!(foreign, OpenError::Foreign { .. }), "{foreign}");
    let refused = Device::open_nth(Backend::Cpu, 1).expect_err("there is one");
    assert!(matches!(refused, OpenError::Ordinal { ordinal: 1, count: 1, .. }), "{refused}");
    assert!(refused.to_string().contains("\nhint: pass a device number from 0"), "{refused}");
    Device::auto().expect("the CPU at least");
}
