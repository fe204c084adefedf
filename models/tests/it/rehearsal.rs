//! Kernels collected by a rehearsal before loading, against the launches of the loaded model.

use std::collections::BTreeSet;

use burn::tensor::{Device, FloatDType};
use models::{Decoder, KvFormat, LoadOptions};
use ops::{Ctx, WeightFormat};
use trace::Recording;

use crate::golden::golden;
use crate::{FIXTURES, open};

#[test]
fn an_outline_rehearses_what_the_model_launches() {
    let plain = LoadOptions { dtype: Some(FloatDType::F32), ..LoadOptions::default() };
    let quantised = |format: WeightFormat| LoadOptions { quant: Some(format.scheme()), ..plain };
    let cases = FIXTURES.map(|name| (name, plain)).into_iter().chain([
        ("llama", quantised(WeightFormat::Nf4)),
        ("gpt2", quantised(WeightFormat::Q8_0)),
        ("gemma3", quantised(WeightFormat::Int8)),
        ("gemma2", LoadOptions { kv: KvFormat::Int8, ..plain }),
    ]);
    for (name, options) in cases {
        let (weights, device, prompt) = (open(name), Device::cpu(), golden(name).prompt);
        let ctx = Ctx::default().rehearsal();
        let outline = Decoder::outline(&weights, None, &device, &ctx, &options).expect("shapes");
        let cache = outline.cache(1, prompt.len() + 2).expect("short");
        let nothing = |_: &Ctx, _| Ok(());
        let rehearsed = outline.rehearse(&cache, prompt.len(), true, nothing).expect("f32");
        assert_eq!(rehearsed.count(), 0, "the CPU compiles nothing ahead");

        let recording = Recording::of_this_thread().expect("no other test of this crate records");
        let loaded = Decoder::load(&weights, &device, Ctx::default(), &options, |_| {});
        let loaded = loaded.expect("a fixture");
        let mut cache = loaded.cache(1, prompt.len() + 2).expect("short");
        loaded.prefill(&mut cache, &[&prompt]).expect("room");
        loaded.decode(&mut cache, &[1]).expect("room");
        let spans = recording.finish().spans;
        let operators = spans.iter().filter(|span| span.cost.is_some());
        let launched: BTreeSet<_> = operators.map(|span| span.name.as_str()).collect();
        let rehearsed: BTreeSet<_> = rehearsed.launches().collect();
        assert!(launched.len() > 4, "{name}: {launched:?}");
        let missed: Vec<_> = launched.difference(&rehearsed).collect();
        assert!(missed.is_empty(), "{name}, {options:?}: {missed:?} of {rehearsed:?}");
    }
}
