//! Decoders on the CPU runtime, against transformers and against themselves.

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use models::{Decoder, DecoderConfig, Error, KvCache, KvFormat, LoadOptions, PagedCache, Weights};
use ops::{Ctx, QuantizedWeight, Scales, Scheme, WeightFormat};

use reference::nf4::{FourBit, dequantize};
use reference::{Block, Linear, int8};

use crate::golden::{Golden, golden};
use crate::{FIXTURES, fixture, open};
use suite::decoder::decoder;

/// Tolerance, relative to the largest logit.
const BAR: f64 = 1e-4;

fn load(name: &str, options: LoadOptions) -> Decoder {
    let weights = open(name);
    Decoder::load(&weights, &Device::cpu(), Ctx::default(), &options, |_| {}).expect("a fixture")
}

fn in_f32(name: &str) -> Decoder {
    load(name, LoadOptions { dtype: Some(FloatDType::F32), ..LoadOptions::default() })
}

fn with_bytes(name: &str) -> Decoder {
    let dtype = Some(FloatDType::F32);
    load(name, LoadOptions { dtype, kv: KvFormat::Int8, ..LoadOptions::default() })
}

fn values(logits: Tensor<2>) -> Vec<f32> {
    logits.into_data().try_to_vec().expect("f32")
}

/// Returns the logits after each of `tokens`, of one sequence.
pub(crate) fn each(decoder: &Decoder, cache: &mut KvCache, tokens: &[u32]) -> Vec<f32> {
    let mut all = Vec::new();
    let passed = decoder.prefill_each(cache, tokens, |logits| {
        all.extend(values(logits));
        Ok::<_, Error>(())
    });
    passed.expect("room");
    all
}

/// Returns the largest difference, relative to the largest of `want`.
pub(crate) fn distance(have: &[f32], want: &[f32]) -> f64 {
    assert_eq!(have.len(), want.len());
    let largest = want.iter().fold(0f32, |top, logit| top.max(logit.abs()));
    let gaps = have.iter().zip(want).map(|(a, b)| f64::from((a - b).abs()));
    crate::largest(gaps) / f64::from(largest)
}

fn best(logits: &[f32]) -> u32 {
    let better = |top: usize, i: usize| if logits[i] > logits[top] { i } else { top };
    (0..logits.len()).fold(0, better) as u32
}

/// Returns the greedy tokens of each sequence after the last of `logits`, `[batch, vocab]`.
fn greedy(decoder: &Decoder, cache: &mut KvCache, logits: Vec<f32>, count: usize) -> Vec<Vec<u32>> {
    let vocab = decoder.config().vocab;
    let mut next: Vec<u32> = logits.chunks(vocab).map(best).collect();
    let mut tokens: Vec<Vec<u32>> = next.iter().map(|one| vec![*one]).collect();
    for _ in 1..count {
        let logits = values(decoder.decode(cache, &next).expect("room"));
        next = logits.chunks(vocab).map(best).collect();
        tokens.iter_mut().zip(&next).for_each(|(all, one)| all.push(*one));
    }
    tokens
}

#[test]
fn logits_and_greedy_tokens_are_those_of_transformers() {
    for name in FIXTURES {
        let (decoder, Golden { prompt, logits, greedy: want }) = (in_f32(name), golden(name));
        let mut cache = decoder.cache(1, prompt.len() + want.len()).expect("short");
        let all = each(&decoder, &mut cache, &prompt);
        let distance = distance(&all, &logits);
        println!("{name}: {distance:.1e} of the largest logit");
        assert!(distance <= BAR, "{name}: {distance:e}");
        let last = all[all.len() - decoder.config().vocab..].to_vec();
        let tokens = greedy(&decoder, &mut cache, last, want.len());
        assert_eq!(tokens[0], want, "{name}");
    }
}

/// Opens a fixture with `max_position_embeddings` set to `positions`; its golden sequence is longer.
pub(crate) fn shortened(name: &str, positions: usize) -> Weights {
    let folder = tempfile::tempdir().expect("temporary folder");
    let text = std::fs::read_to_string(fixture(name).join("config.json")).expect("readable");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    config["max_position_embeddings"] = positions.into();
    std::fs::write(folder.path().join("config.json"), config.to_string()).expect("writable");
    let file = "model.safetensors";
    std::fs::copy(fixture(name).join(file), folder.path().join(file)).expect("writable");
    Weights::open(folder.path()).expect("a model")
}

/// RoPE scaling extends the context by itself. A caller may request more: transformers has no limit.
#[test]
fn contexts_past_the_files_count_are_those_of_transformers() {
    for (name, asked) in [
        ("qwen2_yarn", None),
        ("llama_linear_bias", None),
        ("llama", Some(128)),
        ("qwen2_yarn", Some(200)),
        ("gemma2", Some(128)),
    ] {
        let weights = shortened(name, 32);
        let stretched = if asked.is_none() { 128 } else { weights.config().max_seq };
        assert_eq!(weights.config().context(), Some(stretched), "{name}");
        let weights = match asked {
            Some(positions) => weights.with_context(positions).expect("rope turns any"),
            None => weights,
        };
        let Golden { prompt, logits, greedy: want } = golden(name);
        let need = prompt.len() + want.len();
        assert!(need > 32, "{need} positions are no more than config.json says");
        let options = LoadOptions { dtype: Some(FloatDType::F32), ..LoadOptions::default() };
        let on = Device::cpu();
        let decoder = Decoder::load(&weights, &on, Ctx::default(), &options, |_| {}).expect("fits");
        let mut cache = decoder.cache(1, need).expect("in the context");
        let all = each(&decoder, &mut cache, &prompt);
        assert!(distance(&all, &logits) <= BAR, "{name}");
        let last = all[all.len() - decoder.config().vocab..].to_vec();
        assert_eq!(greedy(&decoder, &mut cache, last, want.len())[0], want, "{name}");
        let max = asked.unwrap_or(stretched);
        assert!(decoder.cache(1, max + 1).is_err(), "{name}: past {max}");
    }
    let learned = open("gpt2");
    let max = learned.config().max_seq;
    let refused = learned.with_context(max + 1).expect_err("no vector").to_string();
    assert!(refused.contains(&format!("at most {max} tokens")), "{refused}");
}

/// Logits in several parts equal those of one forward pass, even if a re-prefill changes all RoPE
/// frequencies.
#[test]
fn logits_of_all_rows_come_in_parts() {
    for name in ["llama", "gemma2", "gpt2", "phi3_nf4", "llama_dynamic"] {
        let decoder = in_f32(name);
        let (vocab, Golden { prompt, .. }) = (decoder.config().vocab, golden(name));
        // With dynamic scaling, the last part exceeds `max_seq`.
        let long: Vec<u32> = prompt.iter().copied().cycle().take(40).collect();
        let cache = || decoder.cache(1, long.len()).expect("short");
        let [mut whole, mut parts] = [cache(), cache()];
        for passed in [0..24, 24..25, 25..long.len()] {
            let own = &long[passed.clone()];
            let (mut have, mut max) = (Vec::new(), 0);
            let done = decoder.prefill_each(&mut parts, own, |logits| {
                max = max.max(logits.dims()[0]);
                have.extend(values(logits));
                Ok::<_, Error>(())
            });
            done.expect("room");
            let all = each(&decoder, &mut cache(), &long[..passed.end]);
            assert_eq!((have.len(), parts.tokens(0)), (own.len() * vocab, &long[..passed.end]));
            assert!(distance(&have, &all[passed.start * vocab..]) < 1e-5, "{name}: {passed:?}");
            assert!(own.len() < 24 || max < 24, "{name}: {max} rows at once");
            let last = values(decoder.prefill(&mut whole, &[own]).expect("room"));
            assert!(distance(&last, &have[have.len() - vocab..]) < 1e-5, "{name}: {passed:?}");
        }
        let mut cache = decoder.cache(1, 8).expect("short");
        let failed =
            decoder.prefill_each(&mut cache, &prompt[..8], |_| Err(Error::Failed("no".into())));
        assert!(matches!(failed, Err(Error::Failed(_))) && cache.lengths() == [0]);
    }
}

/// Prompts in parts give the logits of whole ones.
#[test]
fn parts_of_prompts_change_nothing() {
    let floats = ["llama", "mistral", "gemma2", "gemma3", "gpt2", "phi3_nf4"];
    let floats = floats.map(|name| (name, in_f32(name)));
    let bytes = ["llama", "gemma2", "qwen3"].map(|name| (name, with_bytes(name)));
    // Parts differ in the last bits, which may change one byte of an int8 cache.
    let floats = floats.map(|(name, decoder)| (name, decoder, 1e-5));
    let bytes = bytes.map(|(name, decoder)| (name, decoder, 2e-3));
    for (name, decoder, bar) in floats.into_iter().chain(bytes) {
        let Golden { prompt, .. } = golden(name);
        for length in [prompt.len(), 7] {
            let own = &prompt[..length];
            let cache = || decoder.cache(1, prompt.len() + 12).expect("short");
            let (mut whole, mut parts) = (cache(), cache());
            let logits = values(decoder.prefill(&mut whole, &[own]).expect("room"));
            let mut stepped = Vec::new();
            for part in own.chunks(length.div_ceil(3)) {
                stepped = values(decoder.prefill(&mut parts, &[part]).expect("room"));
            }
            assert!(distance(&stepped, &logits) < bar, "{name}: {length} tokens in parts");
            assert_eq!((parts.tokens(0), parts.lengths()), (own, vec![length]));
            let mut tokens = || greedy(&decoder, &mut whole, logits.clone(), 12);
            assert_eq!(greedy(&decoder, &mut parts, stepped, 12), tokens(), "{name}");
        }
    }
}

/// Returns the most likely tokens of sequences after `last`, and the numbers of the sequences that remain.
fn greedy_in_pages(
    decoder: &Decoder,
    cache: &mut PagedCache,
    sequences: &[usize],
    mut last: Vec<f32>,
    count: usize,
) -> Vec<Vec<u32>> {
    let mut tokens = vec![Vec::new(); sequences.len()];
    for _ in 0..count {
        let next: Vec<u32> = last.chunks(decoder.config().vocab).map(best).collect();
        tokens.iter_mut().zip(&next).for_each(|(own, token)| own.push(*token));
        let rows: Vec<_> = sequences.iter().copied().map(Some).collect();
        last = values(decoder.decode_paged(cache, &rows, &next).expect("room"));
    }
    tokens
}

/// Sequences of prompts of different lengths pass together, share pages, and give the tokens that each gives alone. They may
/// leave, and others take their pages.
#[test]
fn sequences_in_pages_are_those_that_are_alone() {
    let floats = ["llama", "mistral", "gemma2", "gemma3", "gpt2", "qwen3", "phi3_nf4"];
    let floats = floats.map(|name| (name, in_f32(name)));
    let floats = floats.map(|(name, decoder)| (name, decoder, 1e-5));
    // Parts of a prompt differ in the last bits, which may change one byte of an int8 cache.
    let bytes = ["llama", "gpt2", "qwen3"].map(|name| (name, with_bytes(name), 2e-3));
    for (name, decoder, bar) in floats.into_iter().chain(bytes) {
        let (Golden { prompt, .. }, vocab) = (golden(name), decoder.config().vocab);
        let long: Vec<u32> = prompt.iter().copied().cycle().take(67).collect();
        let alone = |tokens: &[u32]| {
            let mut cache = decoder.cache(1, 100).expect("short");
            let logits = values(decoder.prefill(&mut cache, &[tokens]).expect("room"));
            (greedy(&decoder, &mut cache, logits.clone(), 8).remove(0), logits)
        };
        // One full page, more, less, and one token.
        let groups = [64, 67, 3, 1].map(|length| &long[..length]);
        let pages: usize = groups.iter().map(|own| PagedCache::pages(own.len(), 2, 100)).sum();
        assert_eq!(pages, 3 + 3 + 4 + 4);
        let mut cache = decoder.paged_cache(pages, 100).expect("short");
        let mut apart = decoder.cache(1, 1).expect("short").bytes();
        apart *= 64 * (pages as u64 + 1);
        assert_eq!(cache.bytes(), apart, "{name}");
        for _ in 0..2 {
            let made = decoder.prefill_groups(&mut cache, &groups, 2, 99).expect("room");
            let (sequences, logits) = (made.0.concat(), values(made.1));
            assert_eq!((sequences.len(), cache.free_pages()), (8, 0));
            let mut want = Vec::new();
            for (own, logits) in groups.iter().zip(logits.chunks(vocab)) {
                let (tokens, alone) = alone(own);
                assert!(distance(logits, &alone) < bar, "{name}: {} tokens", own.len());
                want.extend([tokens.clone(), tokens]);
            }
            let each = |row: &[f32]| [row, row].concat();
            let twice: Vec<f32> = logits.chunks(vocab).flat_map(each).collect();
            let half = twice[2 * vocab..6 * vocab].to_vec();
            let have = greedy_in_pages(&decoder, &mut cache, &sequences, twice, 8);
            assert_eq!(have, want, "{name}");
            assert_eq!(cache.tokens(sequences[1]).expect("there")[64..], want[1], "{name}");

            // The first and the last pair leave, and another prompt takes their pages beside the others.
            for gone in [0, 1, 6, 7] {
                cache.leave(sequences[gone]);
            }
            assert_eq!((cache.tokens(sequences[0]), cache.free_pages()), (None, 7));
            let other = &long[3..60];
            let (new, _) =
                decoder.prefill_groups(&mut cache, &[other], 3, usize::MAX).expect("room");
            let (tokens, logits) = alone(other);
            let have = greedy_in_pages(&decoder, &mut cache, &new[0], logits.repeat(3), 8);
            assert_eq!(have, vec![tokens; 3], "{name}");
            let next: Vec<u32> = half.chunks(vocab).map(best).collect();
            // A row in the middle has no sequence.
            let rows = [Some(sequences[2]), Some(sequences[3]), None, Some(sequences[5])];
            let went_on = decoder.decode_paged(&mut cache, &rows, &next);
            let last = values(went_on.expect("room"));
            let whole = [groups[1], &want[2][..], &next[..1]].concat();
            assert!(distance(&last[..vocab], &alone_logits(&decoder, &whole)) < bar, "{name}");
            cache.clear();
            assert_eq!(cache.free_pages(), pages);
        }
    }
}

fn alone_logits(decoder: &Decoder, tokens: &[u32]) -> Vec<f32> {
    let mut cache = decoder.cache(1, tokens.len()).expect("short");
    values(decoder.prefill(&mut cache, &[tokens]).expect("room"))
}

/// A prompt that fills its pages leaves no free position. Mistakes are errors that change nothing.
#[test]
fn a_cache_in_pages_refuses_what_does_not_fit() {
    let decoder = in_f32("llama");
    let tokens: Vec<u32> = golden("llama").prompt.iter().copied().cycle().take(65).collect();
    let mut cache = decoder.paged_cache(2, 64).expect("short");
    let (sequences, _) = decoder.prefill_groups(&mut cache, &[&tokens[..64]], 3, 1).expect("room");
    assert_eq!((&sequences[0][..], cache.free_pages()), (&[0, 1, 2][..], 1));
    let full = decoder.decode_paged(&mut cache, &[Some(0)], &[1]);
    assert!(matches!(full, Err(Error::Full { need: 65, capacity: 64 })));
    let mut refused = |prompts: &[&[u32]], completions| {
        decoder.prefill_groups(&mut cache, prompts, completions, 64).map(drop)
    };
    assert!(matches!(refused(&[&tokens], 1), Err(Error::Full { need: 65, .. })));
    assert!(matches!(refused(&[&tokens[..2]], 2), Err(Error::Pages { need: 2, have: 1 })));
    let both = refused(&[&tokens[..2], &tokens[..3]], 1);
    assert!(matches!(both, Err(Error::Pages { need: 1, have: 0 })));
    assert!(matches!(refused(&[&[]], 1), Err(Error::Step { .. })));
    assert!(matches!(refused(&[], 1), Err(Error::Step { .. })));
    assert!(matches!(refused(&[&[u32::MAX]], 1), Err(Error::Token { .. })));
    assert_eq!(cache.free_pages(), 1);
    cache.leave(1);
    assert_eq!(cache.free_pages(), 1);
    // A sequence with room for one token takes one.
    let (own, _) = decoder.prefill_groups(&mut cache, &[&tokens[..2]], 1, 1).expect("room");
    decoder.decode_paged(&mut cache, &[Some(own[0][0])], &[1]).expect("room");
    let full = decoder.decode_paged(&mut cache, &[Some(own[0][0])], &[1]);
    assert!(matches!(full, Err(Error::Full { need: 4, capacity: 3 })));
    let left = decoder.decode_paged(&mut cache, &[Some(1)], &[1]);
    assert!(matches!(left, Err(Error::Left { sequence: 1 })));
    let none = decoder.decode_paged(&mut cache, &[], &[]);
    assert!(matches!(none, Err(Error::Step { .. })));
    let max = decoder.config().context().expect("it has one");
    assert!(matches!(decoder.paged_cache(1, max + 1), Err(Error::Context { .. })));
}

/// An int8 cache takes about a quarter of f32, and the logits stay close.
#[test]
fn keys_and_values_in_8_bits_stand_for_what_they_were() {
    for name in ["llama", "mistral", "gemma2", "gemma3", "gpt2", "qwen2", "qwen3", "phi3_nf4"] {
        let (float, bytes, Golden { prompt, .. }) = (in_f32(name), with_bytes(name), golden(name));
        assert_eq!(bytes.precision().kv, KvFormat::Int8);
        let [mut whole, mut small] =
            [&float, &bytes].map(|of| of.cache(1, prompt.len() + 8).expect("short"));
        let head_dim = float.config().head_dim as u64;
        assert_eq!(small.bytes() * 4 * head_dim, whole.bytes() * (head_dim + 4), "{name}");
        let positions = 3 * prompt.len();
        let read = [&float, &bytes].map(|of| of.read_bytes(2, positions));
        assert_eq!(read[1] * 4 * u128::from(head_dim), read[0] * u128::from(head_dim + 4));
        // Prefill dequantises the keys first; decode steps read the bytes.
        let want = each(&float, &mut whole, &prompt);
        let have = each(&bytes, &mut small, &prompt);
        let prompts = distance(&have, &want);
        assert!(prompts > 0.0 && prompts < 0.04, "{name}: {prompts:e}");
        for token in &prompt[..8] {
            let want = values(float.decode(&mut whole, &[*token]).expect("room"));
            let have = values(bytes.decode(&mut small, &[*token]).expect("room"));
            let steps = distance(&have, &want);
            assert!(steps < 0.04, "{name}: {steps:e}");
        }
    }
}

/// Rounds a matrix to the reference's 4 bits.
fn in_4_bits(linear: &mut Linear, _: usize) {
    let four_bit = FourBit::Nf4;
    let blocks = four_bit.quantize(&linear.weight, 64).expect("finite");
    linear.weight =
        dequantize(&four_bit.codebook(), &blocks.codes, &blocks.absmax, 64, linear.weight.len())
            .expect("of these blocks");
}

/// Rounds a matrix `[n, k]` to the reference's 8 bits.
fn in_8_bits(linear: &mut Linear, k: usize) {
    let rows = int8::quantize(&linear.weight, linear.weight.len() / k, k).expect("finite");
    linear.weight = int8::dequantize(&rows.codes, &rows.scb, k).expect("of these rows");
}

/// Rounds a matrix `[n, k]` with the kernels, which the suite compares with the reference.
fn by_kernels(format: WeightFormat) -> impl Fn(&mut Linear, usize) {
    move |linear, k| {
        let (device, ctx) = (Device::cpu(), Ctx::default());
        let shape = [linear.weight.len() / k, k];
        let dense = TensorData::new(linear.weight.clone(), shape);
        let made = QuantizedWeight::quantize(&ctx, Tensor::from_data(dense, &device), format);
        let dense = made.and_then(|made| made.dequantize(&ctx, FloatDType::F32)).expect("finite");
        linear.weight = dense.into_data().try_to_vec().expect("f32");
    }
}

/// Compares a model that quantises its layers at load with the reference, whose matrices `quantize` rounds.
fn check_quantised(name: &str, quant: Scheme, quantize: impl Fn(&mut Linear, usize)) {
    let options =
        LoadOptions { dtype: Some(FloatDType::F32), quant: Some(quant), ..Default::default() };
    let (ours, prompt) = (load(name, options), golden(name).prompt);
    assert_eq!(ours.precision().weight_format, Some(quant.format));
    let mut reference = decoder(&open(name));
    for block in &mut reference.blocks {
        let Block { query, key, value, out, gate, up, down, .. } = block;
        let DecoderConfig { hidden, heads, head_dim, ffn_hidden, .. } = *ours.config();
        let wide = [query, key, value, up].into_iter().chain(gate);
        wide.for_each(|linear| quantize(linear, hidden));
        quantize(out, heads * head_dim);
        quantize(down, ffn_hidden);
    }
    let want: Vec<f32> =
        reference.forward(&prompt).expect("whole").into_iter().map(|l| l as f32).collect();
    let mut cache = ours.cache(1, prompt.len()).expect("short");
    let have = each(&ours, &mut cache, &prompt);
    let distance = distance(&have, &want);
    assert!(distance <= BAR, "{name} {}: {distance:e}", quant.format);
}

#[test]
fn weights_quantised_at_load_are_the_references() {
    let four = Scheme { scales: Scales::F32, ..WeightFormat::Nf4.scheme() };
    for name in ["llama", "phi3", "gpt2", "qwen2"] {
        check_quantised(name, four, in_4_bits);
        check_quantised(name, WeightFormat::Int8.scheme(), in_8_bits);
    }
}

#[test]
fn every_format_is_loaded() {
    // The rows of GPT-2 are whole blocks in every format.
    for format in WeightFormat::at_load() {
        check_quantised("gpt2", format.scheme(), by_kernels(format));
    }
}

#[test]
fn weights_of_8_bits_stay_so() {
    let load = |quant: Option<WeightFormat>| {
        let quant = quant.map(WeightFormat::scheme);
        let options = LoadOptions { dtype: Some(FloatDType::F32), quant, ..Default::default() };
        load("llama_int8", options).precision().weight_format
    };
    let (int8, nf4) = (Some(WeightFormat::Int8), Some(WeightFormat::Nf4));
    assert_eq!(load(None), int8);
    assert_eq!(load(int8), int8);
    assert_eq!(load(nf4), nf4);
}

#[test]
fn mistakes_are_errors() {
    let decoder = in_f32("llama");
    let (vocab, max_seq) = (decoder.config().vocab, decoder.config().max_seq);
    let error = decoder.cache(1, max_seq + 1).expect_err("longer than the model");
    assert!(matches!(error, Error::Context { .. }), "{error}");
    let mut cache = decoder.cache(2, 4).expect("short");
    let mut fails = |tokens: &[&[u32]]| decoder.prefill(&mut cache, tokens).expect_err("a mistake");
    for uneven in [&[&[1][..]][..], &[&[1], &[1, 2]], &[&[], &[]]] {
        assert!(matches!(fails(uneven), Error::Step { batch: 2, .. }));
    }
    let past = vocab as u32;
    assert!(matches!(fails(&[&[1], &[past]]), Error::Token { id, .. } if id == past));
    assert!(matches!(fails(&[&[1; 5], &[1; 5]]), Error::Full { need: 5, capacity: 4 }));
    assert_eq!(cache.lengths(), [0, 0]);
}
