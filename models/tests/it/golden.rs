//! The reference decoder, with each family's configuration and names, against transformers.

use checkpoint::{Checkpoint, DType};
use models::{DecoderConfig, GenerationConfig, Weights};
use reference::Decoder;

use crate::{FIXTURES, fixture, open};
use suite::decoder::{decoder, floats};

/// Tolerance, relative to the largest logit; transformers, in f32, is within 1.4e-6 of the reference.
const BAR: f64 = 1e-5;

/// Results of transformers for a fixture.
pub(crate) struct Golden {
    pub(crate) prompt: Vec<u32>,
    /// `[24, vocab]`
    pub(crate) logits: Vec<f32>,
    /// `[64]`
    pub(crate) greedy: Vec<u32>,
}

pub(crate) fn golden(name: &str) -> Golden {
    let file = Checkpoint::open(fixture(name).join("golden.safetensors")).expect("a fixture");
    let ids = |name: &str| {
        let tensor = file.tensor(name).expect("make.py writes it");
        assert_eq!(tensor.dtype, DType::I64);
        let ids = tensor.bytes.as_chunks::<8>().0.iter();
        ids.map(|id| u32::try_from(i64::from_le_bytes(*id)).expect("an id")).collect()
    };
    let logits = floats(&file.tensor("logits").expect("make.py writes it"));
    Golden { prompt: ids("prompt"), logits, greedy: ids("greedy") }
}

/// Returns the largest difference, relative to the largest logit.
fn distance(decoder: &Decoder, golden: &Golden) -> f64 {
    let logits = decoder.forward(&golden.prompt).expect("a decoder that is whole");
    assert_eq!(logits.len(), golden.logits.len());
    let largest = golden.logits.iter().fold(0f32, |top, logit| top.max(logit.abs()));
    let gaps = logits.iter().zip(&golden.logits).map(|(a, b)| (a - f64::from(*b)).abs());
    crate::largest(gaps) / f64::from(largest)
}

#[test]
fn logits_and_greedy_tokens_are_those_of_transformers() {
    for name in FIXTURES {
        let (decoder, golden) = (decoder(&open(name)), golden(name));
        let distance = distance(&decoder, &golden);
        println!("{name}: {distance:.1e} of the largest logit");
        assert!(distance <= BAR, "{name}: {distance:e}");
        let greedy = decoder.greedy(&golden.prompt, golden.greedy.len()).expect("whole");
        assert_eq!(greedy, golden.greedy, "{name}");
    }
}

/// Every part of the configuration matters in some fixture: without it, the logits or the greedy tokens
/// differ.
#[test]
fn nothing_in_the_description_is_idle() {
    let changes = |name: &str, change: fn(&mut Decoder)| {
        let mut decoder = decoder(&open(name));
        change(&mut decoder);
        let golden = golden(name);
        let greedy = decoder.greedy(&golden.prompt, golden.greedy.len()).expect("whole");
        let far = distance(&decoder, &golden) > BAR || greedy != golden.greedy;
        assert!(far, "{name}: a change does not show");
    };
    let no_window: fn(&mut Decoder) = |d| d.blocks.iter_mut().for_each(|b| b.window = None);
    for name in ["mistral", "qwen2", "qwen3_windows", "gemma2", "gemma3", "gemma3_new", "phi3"] {
        changes(name, no_window);
    }
    let no_stretch: fn(&mut Decoder) = |d| {
        for rotary in d.blocks.iter_mut().filter_map(|block| block.rotary.as_mut()) {
            rotary.stretch = reference::Stretch::None;
        }
    };
    for name in [
        "llama3_tied",
        "llama_linear_bias",
        "llama_dynamic",
        "qwen2_yarn",
        "gemma3",
        "phi3_longrope",
    ] {
        changes(name, no_stretch);
    }
    for name in ["qwen2_yarn", "phi3_longrope"] {
        changes(name, |d| {
            for rotary in d.blocks.iter_mut().filter_map(|block| block.rotary.as_mut()) {
                rotary.magnitude = 1.0;
            }
        });
    }
    changes("phi3_longrope", |d| {
        for rotary in d.blocks.iter_mut().filter_map(|block| block.rotary.as_mut()) {
            rotary.dims = d.head_dim;
            rotary.stretch = reference::Stretch::None;
        }
    });
    changes("gemma3_new", |d| {
        let full = d.blocks[0].rotary.clone();
        d.blocks[1].rotary = full;
    });
    changes("gemma2", |d| d.softcap = None);
    changes("gemma2", |d| d.logit_softcap = None);
    changes("gemma2", |d| d.embedding_scale = 1.0);
    changes("gemma2", |d| d.norm_rule = reference::NormRule::Rms);
    changes("gemma2", |d| d.activation = reference::Activation::Silu);
    changes("gemma3", |d| d.blocks[0].scale = 0.25);
    changes("gemma3", |d| d.blocks[0].ffn_post_norm = None);
    changes("qwen3", |d| d.blocks[0].key_norm = None);
    changes("qwen2", |d| d.blocks[0].query.bias = None);
    changes("gpt2", |d| d.positions = None);
    changes("gpt2", |d| d.norm_rule = reference::NormRule::Rms);
    changes("gpt2_bare", |d| d.activation = reference::Activation::GeluTanh);
    changes("gpt2_bare", |d| d.blocks[1].scale *= 2.0);
    changes("llama", |d| d.eps = 1e-2);
}

#[test]
fn shards_hold_what_one_file_would() {
    let weights = open("llama_sharded");
    let config = DecoderConfig::open(fixture("llama_sharded")).expect("a fixture");
    let again = Checkpoint::open(fixture("llama_sharded/model.safetensors.index.json"))
        .expect("the index of a fixture");
    let again = Weights::new(config, again).expect("the same tensors");
    assert_eq!(decoder(&weights), decoder(&again));
}

#[test]
fn every_fixture_says_where_texts_end() {
    for name in FIXTURES {
        let generation = GenerationConfig::open(fixture(name)).expect("readable");
        assert_eq!((generation.eos, generation.bos, generation.pad), (vec![2], Some(1), Some(0)));
    }
    let none = GenerationConfig::open(fixture("")).expect("nothing to read");
    assert_eq!(none, GenerationConfig::default());
}
