//! Adapters: their effect, their gradients, and their files.

use std::collections::BTreeSet;
use std::path::Path;

use burn::tensor::{Device, FloatDType, Tensor};
use checkpoint::{Checkpoint, Plan, Writer};
use models::{
    Adapter, Decoder, DecoderConfig, Error, Example, FlatAdapter, Gradients, LoadOptions,
    LoraOptions, Loss, OnDevice, Recompute, Trained, Weights,
};
use ops::{Block, Ctx, Scheme, WeightFormat};
use reference::{Distribution, fill};
use serde_json::{Value, json};
use suite::decoder::floats;

use crate::device::{distance, each, shortened};
use crate::golden::{Golden, golden};
use crate::{FIXTURES, fixture, open};

/// Fixtures with adapters from `fixtures/lora.py`.
const PEFT: [&str; 8] = ["gemma2", "gemma3", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3"];

fn load(name: &str, quant: Option<Scheme>) -> Decoder {
    let options = LoadOptions { dtype: Some(FloatDType::F32), quant, ..LoadOptions::default() };
    Decoder::load(&open(name), &Device::cpu(), Ctx::default(), &options, |_| {}).expect("a fixture")
}

/// Returns an adapter with nonzero B.
fn adapter(config: &DecoderConfig, options: LoraOptions) -> Adapter {
    let adapter = Adapter::new(config, options, 1).expect("a rank that fits");
    let noise = fill(7, adapter.values().len(), Distribution::Normal);
    adapter.with_values(noise.into_iter().map(|value| 0.05 * value).collect())
}

fn small() -> LoraOptions {
    LoraOptions { rank: 4, alpha: 8.0, ..LoraOptions::default() }
}

/// Returns sequences of different lengths; one is only partly learned.
fn batch(name: &str) -> Vec<Example> {
    let tokens = golden(name).prompt;
    let reversed: Vec<u32> = tokens.iter().rev().take(17).copied().collect();
    vec![Example { tokens, from: 5 }, Example { tokens: reversed, from: 0 }]
}

fn uploaded(decoder: &Decoder, adapter: &Adapter) -> (FlatAdapter, Gradients) {
    let flat =
        FlatAdapter::new(adapter, decoder.config(), decoder.device()).expect("it has kernels");
    let gradients = Gradients::zeros(Trained::Adapter(&flat));
    (flat, gradients)
}

/// Returns the loss, and its gradient times `weight`.
fn learned(
    decoder: &Decoder,
    adapter: &Adapter,
    values: &[f32],
    batch: &[Example],
    weight: f64,
    recompute: Recompute,
) -> (f64, Vec<f32>) {
    let adapter = adapter.clone().with_values(values.to_vec());
    let (flat, gradients) = uploaded(decoder, &adapter);
    let trained = Trained::Adapter(&flat);
    let scale = Tensor::ones([1], decoder.device());
    let Loss { sum: loss, tokens, .. } = decoder
        .add_gradients(trained, &gradients, batch, (weight, scale), &recompute.into())
        .expect("a batch");
    assert_eq!(tokens, batch.iter().map(Example::learned).sum::<usize>());
    let numbers = |made: Tensor<1>| made.into_data().try_to_vec::<f32>().expect("f32");
    let loss = f64::from(numbers(loss)[0]);
    let alone = decoder.loss_of(Some(trained), batch).expect("a batch").sum;
    assert!(close(f64::from(numbers(alone)[0]), loss, 1e-6));
    (loss, flat.unpadded(&numbers(gradients.sums().clone())))
}

fn on_device_of(weights: &Weights, adapter: Option<&Adapter>, options: &LoadOptions) -> OnDevice {
    models::on_device(weights, adapter, options).expect("a fixture")
}

/// Returns Σ -ln p of the same tokens from prefill logits.
fn loss_of(decoder: &Decoder, batch: &[Example]) -> f64 {
    let vocab = decoder.config().vocab;
    let mut sum = 0.0;
    for Example { tokens, from } in batch {
        let mut cache = decoder.cache(1, tokens.len()).expect("short");
        let logits = each(decoder, &mut cache, tokens);
        for at in (*from).max(1)..tokens.len() {
            let row = &logits[(at - 1) * vocab..at * vocab];
            let row_max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let all: f64 = row.iter().map(|logit| f64::from(logit - row_max).exp()).sum();
            sum += all.ln() - f64::from(row[tokens[at] as usize] - row_max);
        }
    }
    sum
}

fn close(have: f64, want: f64, relative: f64) -> bool {
    (have - want).abs() <= relative * want.abs()
}

/// An adapter with B = 0 does not change the model, in any family.
#[test]
fn the_loss_begins_as_the_models() {
    for name in FIXTURES {
        let decoder = load(name, None);
        let fresh = Adapter::new(decoder.config(), small(), 3).expect("a rank that fits");
        let batch = batch(name);
        let want = loss_of(&decoder, &batch);
        let (have, _) = learned(&decoder, &fresh, fresh.values(), &batch, 1.0, Recompute::Layers);
        assert!(close(have, want, 1e-5), "{name}: {have} for {want}");
    }
}

/// Sequences longer than `max_position_embeddings`, with and without RoPE scaling, and with frequencies that
/// depend on the length. At these lengths the reference's logits and tokens equal those of transformers.
#[test]
fn losses_past_the_files_count_are_those_of_the_reference() {
    for name in
        ["llama", "gemma2", "qwen2_yarn", "llama_linear_bias", "llama_dynamic", "phi3_longrope"]
    {
        let weights = shortened(name, 32).with_context(64).expect("rope turns any");
        let Golden { prompt, greedy, .. } = golden(name);
        let tokens: Vec<u32> = prompt.into_iter().chain(greedy).take(60).collect();
        let example = Example { tokens, from: 20 };
        let reference = suite::decoder::decoder(&weights);
        let (vocab, tokens) = (weights.config().vocab, &example.tokens);
        let logits = reference.forward(tokens).expect("whole");
        let rows = logits.chunks(vocab).zip(&tokens[1..]).skip(example.from - 1);
        let want = rows.map(|(row, next)| {
            let row_max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let all: f64 = row.iter().map(|logit| (logit - row_max).exp()).sum();
            all.ln() - (row[*next as usize] - row_max)
        });
        let want: f64 = want.sum();
        let options = LoadOptions { dtype: Some(FloatDType::F32), ..LoadOptions::default() };
        let decoder = Decoder::load(&weights, &Device::cpu(), Ctx::default(), &options, |_| {})
            .expect("fits");
        let fresh = Adapter::new(decoder.config(), small(), 3).expect("a rank that fits");
        let (have, _) =
            learned(&decoder, &fresh, fresh.values(), &[example], 1.0, Recompute::Layers);
        assert!(close(have, want, 1e-5), "{name}: {have} for {want}");
    }
}

/// Adapters match PEFT and torch: logits, loss and gradients.
#[test]
fn adapters_are_those_of_peft() {
    for name in PEFT {
        let (weights, folder) = (open(name), fixture(name).join("lora"));
        let file = Checkpoint::open(folder.join("golden.safetensors")).expect("lora.py writes it");
        let numbers = |of: &str| floats(&file.tensor(of).expect("lora.py writes it"));
        let ids = |of: &str| -> Vec<u32> {
            let tensor = file.tensor(of).expect("lora.py writes it");
            tensor
                .bytes
                .as_chunks::<8>()
                .0
                .iter()
                .map(|id| i64::from_le_bytes(*id) as u32)
                .collect()
        };
        let adapter = Adapter::open(&folder, &weights).expect("PEFT wrote it");
        let options = LoadOptions { dtype: Some(FloatDType::F32), ..LoadOptions::default() };
        let on = |adapter: Option<&Adapter>| {
            let (device, ctx) = (Device::cpu(), Ctx::default());
            Decoder::load_adapted(&weights, adapter, &device, ctx, &options, |_| {}).expect("dense")
        };
        // Merged.
        let (tokens, lengths, from) = (ids("tokens"), ids("lengths"), ids("from"));
        let merged = on(Some(&adapter));
        let mut cache = merged.cache(1, 24).expect("short");
        let logits = each(&merged, &mut cache, &tokens[..24]);
        let gap = distance(&logits, &numbers("logits"));
        assert!(gap <= 1e-4, "{name}: {gap:e}");
        // Unmerged.
        let batch: Vec<Example> = (0..2)
            .map(|row| Example {
                tokens: tokens[24 * row..24 * row + lengths[row] as usize].to_vec(),
                from: from[row] as usize,
            })
            .collect();
        let decoder = on(None);
        let (loss, gradient) =
            learned(&decoder, &adapter, adapter.values(), &batch, 1.0, Recompute::Layers);
        let want = f64::from(numbers("loss")[0]);
        assert!(close(loss, want, 1e-5), "{name}: {loss} for {want}");
        let mut all = 0;
        for factor in adapter.factors() {
            let mut at = factor.at;
            for (side, len) in ["A", "B"].into_iter().zip(factor.sizes(4)) {
                let suffix = format!(".{}.lora_{side}.weight", factor.module);
                let whole =
                    file.names().find(|of| of.starts_with("grad.") && of.ends_with(&suffix));
                let gap = distance(&gradient[at..at + len], &numbers(whole.expect("every factor")));
                assert!(gap <= 1e-4, "{name} {suffix}: {gap:e}");
                at += len;
                all += 1;
            }
        }
        assert_eq!(all, file.names().filter(|of| of.starts_with("grad.")).count(), "{name}");
    }
}

/// An adapter survives writing and reading, and PEFT's own file is rewritten byte for byte.
#[test]
fn files_come_back() {
    for name in PEFT {
        let (weights, folder) = (open(name), fixture(name).join("lora"));
        let config = weights.config();
        let adapter = Adapter::open(&folder, &weights).expect("PEFT wrote it");
        let target = tempfile::tempdir().expect("a folder");
        let mut output = Adapter::begin(target.path()).expect("nobody else writes it");
        adapter.write(&mut output, config, name).expect("it is empty");
        assert_eq!(
            Adapter::open(target.path(), &weights).expect("just written"),
            adapter,
            "{name}"
        );
        let [own, theirs] = [target.path(), &folder].map(|folder| {
            let file = Checkpoint::open(folder.join("adapter_model.safetensors")).expect("there");
            file.names()
                .map(|of| {
                    let tensor = file.tensor(of).expect("it has the name");
                    (of.to_owned(), tensor.shape.clone(), tensor.bytes.to_vec())
                })
                .collect::<Vec<_>>()
        });
        assert!(own == theirs, "{name}");
        let text = std::fs::read_to_string(target.path().join("adapter_config.json"));
        let written: Value = serde_json::from_str(&text.expect("written")).expect("JSON");
        assert_eq!(written["base_model_name_or_path"], name);
        assert_eq!(written["fan_in_fan_out"], name == "gpt2");
        assert_eq!(written["use_rslora"], name == "qwen2");
    }
}

/// Rewrites a safetensors file with the tensors that `keep` accepts, and with more.
fn rewritten(
    path: &Path,
    keep: impl Fn(&str) -> bool,
    more: &[(String, checkpoint::Tensor<'static>)],
) {
    let file = Checkpoint::open(path).expect("a fixture");
    let owned = |name: &str| {
        let tensor = file.tensor(name).expect("it has the name");
        let bytes = tensor.bytes.to_vec();
        (name.to_owned(), checkpoint::Tensor::new(tensor.dtype, &tensor.shape, bytes))
    };
    let mut all: Vec<_> = file.names().filter(|name| keep(name)).map(owned).collect();
    all.extend(more.iter().cloned());
    drop(file);
    let plans = all.iter().map(|(name, own)| Plan::new(name, own.dtype, &own.shape));
    let mut writer = Writer::create(path, plans.collect::<Vec<_>>()).expect("writable");
    writer.write_all(&all).expect("writable");
    writer.finish().expect("writable");
}

/// PEFT saves embedding and head with an adapter if the vocabulary might have grown.
#[test]
fn copies_of_the_embedding_in_an_adapter_are_ignored() {
    let (weights, source) = (open("llama"), fixture("llama").join("lora"));
    let adapter = Adapter::open(&source, &weights).expect("PEFT wrote it");
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(source.join(file), folder.path().join(file)).expect("a fixture");
    }
    let copy = |name: &str| {
        let tensor = weights.checkpoint().tensor(name).expect("the model has it");
        let bytes = tensor.bytes.to_vec();
        let own = checkpoint::Tensor::new(tensor.dtype, &tensor.shape, bytes);
        (format!("base_model.model.{name}"), own)
    };
    let mut copies = vec![copy("model.embed_tokens.weight"), copy("lm_head.weight")];
    let path = folder.path().join("adapter_model.safetensors");
    rewritten(&path, |_| true, &copies);
    assert_eq!(Adapter::open(folder.path(), &weights).expect("copies"), adapter);
    // A different embedding means another model.
    let bytes = copies[0].1.bytes.to_mut();
    bytes[0] ^= 1;
    rewritten(&path, |name| !name.contains("embed_tokens"), &copies[..1]);
    let refused = Adapter::open(folder.path(), &weights).expect_err("changed").to_string();
    assert!(refused.contains("unused: base_model.model.model.embed_tokens.weight"), "{refused}");
}

/// PEFT has no limit: a rank above those of the matrices has full effect.
#[test]
fn a_rank_may_be_past_those_of_the_matrices() {
    let weights = open("llama");
    let options = LoraOptions { rank: 96, ..small() };
    let adapter = adapter(weights.config(), options);
    assert!(adapter.factors().iter().all(|own| own.n.min(own.k) < 96));
    let decoder = load("llama", None);
    let (loss, gradient) =
        learned(&decoder, &adapter, adapter.values(), &batch("llama"), 1.0, Recompute::Layers);
    assert!(loss.is_finite() && gradient.iter().any(|slope| *slope != 0.0));
}

#[test]
fn adapters_that_are_not_of_a_model_are_refused() {
    let weights = open("llama");
    let opened = |edit: &dyn Fn(&Path), weights: &Weights| {
        let folder = tempfile::tempdir().expect("a folder");
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            let from = fixture("llama").join("lora").join(file);
            std::fs::copy(from, folder.path().join(file)).expect("a fixture");
        }
        edit(folder.path());
        Adapter::open(folder.path(), weights).expect_err("refused").to_string()
    };
    let field = |field: &str, value: Value| {
        let edit = move |folder: &Path| {
            let path = folder.join("adapter_config.json");
            let text = std::fs::read_to_string(&path).expect("a fixture");
            let mut json: Value = serde_json::from_str(&text).expect("JSON");
            json[field] = value.clone();
            std::fs::write(&path, json.to_string()).expect("it is ours");
        };
        opened(&edit, &weights)
    };
    assert!(field("peft_type", json!("IA3")).contains("`peft_type` is \"IA3\""));
    assert!(field("use_dora", json!(true)).contains("`use_dora` is true"));
    assert!(field("bias", json!("all")).contains("`bias`"));
    assert!(field("modules_to_save", json!(["lm_head"])).contains("`modules_to_save`"));
    assert!(field("rank_pattern", json!({"q_proj": 8})).contains("`rank_pattern`"));
    assert!(field("r", json!(8)).contains("0 missing, 0 unused, 28 wrong"));
    let gone = |file: &'static str| {
        opened(
            &move |folder: &Path| std::fs::remove_file(folder.join(file)).expect("there"),
            &weights,
        )
    };
    assert!(gone("adapter_config.json").starts_with("cannot read"));
    assert!(gone("adapter_model.safetensors").starts_with("cannot read"));
    let cut = |folder: &Path| {
        let path = folder.join("adapter_model.safetensors");
        let bytes = std::fs::read(&path).expect("a fixture");
        std::fs::write(&path, &bytes[..bytes.len() - 1]).expect("it is ours");
    };
    assert!(opened(&cut, &weights).contains("is not a safetensors file"));
    // One of the layers that the configuration names has no factors.
    let fewer = |folder: &Path| {
        let only = |name: &str| !name.contains(".layers.1.");
        rewritten(&folder.join("adapter_model.safetensors"), only, &[]);
    };
    assert!(opened(&fewer, &weights).contains("14 missing, 0 unused, 0 wrong"));
    // Another model of the same width, with other names.
    let other = open("phi3");
    assert!(
        opened(&|_| {}, &other).contains("unused: base_model.model.model.layers.0.mlp.gate_proj")
    );
}

/// A case of `targets.py`: fields of the configuration, and the modules that PEFT selects by them.
#[derive(serde::Deserialize)]
struct Selected {
    fields: serde_json::Map<String, Value>,
    llama: BTreeSet<String>,
    gpt2: BTreeSet<String>,
}

/// The tensors must be those of the modules that PEFT selects; others are unused, and none may be missing.
#[test]
fn modules_are_selected_as_by_peft() {
    let text = std::fs::read_to_string(fixture("targets.json")).expect("a fixture");
    let cases: Vec<Selected> = serde_json::from_str(&text).expect("targets.py writes it");
    for case in cases {
        for (name, selected) in [("llama", &case.llama), ("gpt2", &case.gpt2)] {
            let (weights, source) = (open(name), fixture(name).join("lora"));
            let folder = tempfile::tempdir().expect("a folder");
            let [config, tensors] = Adapter::files(folder.path());
            let config_text = std::fs::read_to_string(&Adapter::files(&source)[0]);
            let mut fields: Value =
                serde_json::from_str(&config_text.expect("a fixture")).expect("JSON");
            let own = fields.as_object_mut().expect("an object");
            own.extend(case.fields.clone());
            std::fs::write(config, fields.to_string()).expect("writable");
            std::fs::copy(&Adapter::files(&source)[1], &tensors).expect("a fixture");
            let module = |tensor: &str| {
                let own = tensor.trim_start_matches("base_model.model.").rsplitn(3, '.');
                own.last().expect("it has a name").to_owned()
            };
            let file = Checkpoint::open(&tensors).expect("a fixture");
            let all: BTreeSet<String> = file.names().map(module).collect();
            let (missing, unused) = (selected.difference(&all), all.difference(selected));
            let expected =
                format!("{} missing, {} unused", 2 * missing.count(), 2 * unused.count());
            let opened = Adapter::open(folder.path(), &weights);
            let got = match &opened {
                Ok(_) => "0 missing, 0 unused".to_owned(),
                Err(why) => why.to_string(),
            };
            assert!(got.contains(&expected), "{name} {:?}: {expected}, but {got}", case.fields);
            if selected.is_empty() || !selected.is_subset(&all) {
                continue;
            }
            rewritten(&tensors, |name| selected.contains(&module(name)), &[]);
            let opened = Adapter::open(folder.path(), &weights).expect("the tensors that it needs");
            assert_eq!(opened.factors().len(), selected.len(), "{name} {:?}", case.fields);
        }
    }
}

/// With matrices in 4 and 8 bits, an unmerged adapter gives the loss of training when generating.
#[test]
fn adapters_stay_beside_quantised_matrices() {
    let nf4 = Some(Scheme { block: Block::Elements(32), ..WeightFormat::Nf4.scheme() });
    for (name, quant) in [
        ("llama", nf4),
        ("llama", Some(WeightFormat::Int8.scheme())),
        ("gpt2", nf4),
        ("llama_nf4", None),
        ("llama_int8", None),
        ("phi3_nf4", None),
    ] {
        let (weights, base) = (open(name), load(name, quant));
        let options = LoadOptions { dtype: Some(FloatDType::F32), quant, ..LoadOptions::default() };
        let named = |targets: &[&str]| LoraOptions {
            targets: targets.iter().map(|target| (*target).to_owned()).collect(),
            ..small()
        };
        let some = match name {
            "phi3_nf4" => named(&["qkv_proj", "down_proj"]),
            "gpt2" => named(&["c_fc"]),
            _ => named(&["q_proj", "v_proj", "up_proj"]),
        };
        for targets in [small(), some] {
            let (small, batch) = (adapter(weights.config(), targets), batch(name));
            let larger = small.values().iter().map(|value| 6.0 * value).collect();
            let (adapter, device, ctx) = (small.with_values(larger), Device::cpu(), Ctx::default());
            let adapted =
                Decoder::load_adapted(&weights, Some(&adapter), &device, ctx, &options, |_| {});
            let adapted = adapted.expect("any matrix takes one");
            let (want, _) =
                learned(&base, &adapter, adapter.values(), &batch, 1.0, Recompute::Layers);
            let have = loss_of(&adapted, &batch);
            assert!(close(have, want, 1e-5), "{name}: {have} for {want}");
            let without = loss_of(&base, &batch);
            assert!(!close(have, without, 1e-3), "{name}: it adds nothing: {have}, {without}");
            // One token at a time: fewer rows use other kernels.
            let tokens = &batch[0].tokens;
            let mut cache = adapted.cache(1, tokens.len()).expect("short");
            let whole = adapted.prefill(&mut cache, &[tokens]).expect("room");
            let mut cache = adapted.cache(1, tokens.len()).expect("short");
            let steps = tokens.iter().map(|token| {
                let made = adapted.decode(&mut cache, &[*token]).expect("room");
                made.into_data().try_to_vec::<f32>().expect("f32")
            });
            let last = steps.last().expect("tokens");
            let whole: Vec<f32> = whole.into_data().try_to_vec().expect("f32");
            let gap = distance(&last, &whole);
            assert!(gap <= 1e-4, "{name}: {gap:e}");
            // The planned bytes cover the loaded ones.
            let planned = on_device_of(&weights, Some(&adapter), &options);
            let (precision, plain) = (adapted.precision(), base.precision());
            assert_eq!(
                (planned.weight_format, plain.lora_columns),
                (precision.weight_format, 0),
                "{name}"
            );
            // Gate and up are one matmul, or two with fewer columns.
            let columns = precision.lora_columns;
            assert!((1..=planned.lora_columns).contains(&columns), "{name}: {columns}");
            let more = (adapted.weight_bytes() - base.weight_bytes()) as u128;
            let counted = planned.bytes - on_device_of(&weights, None, &options).bytes;
            assert!(more > 0 && more <= counted, "{name}: {more} of {counted}");
        }
    }
}

/// Compares gradients with finite differences along random directions, with and without recomputation.
#[test]
fn gradients_are_those_of_the_loss() {
    let nf4 = Some(Scheme { block: Block::Elements(32), ..WeightFormat::Nf4.scheme() });
    for (name, quant) in
        [("llama", nf4), ("llama_int8", None), ("llama_linear_bias", None), ("phi3_nf4", None)]
    {
        let decoder = load(name, quant);
        let (adapter, batch) = (adapter(decoder.config(), small()), batch(name));
        let values = adapter.values();
        let of =
            |values: &[f32], recompute| learned(&decoder, &adapter, values, &batch, 0.5, recompute);
        let (loss, gradient) = of(values, Recompute::Layers);
        assert_eq!(gradient.len(), values.len());
        let (same, kept) = of(values, Recompute::Nothing);
        let size = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        assert!(same == loss && gradient == kept, "{name}: recomputing changes bits");
        let direction = fill(100, values.len(), Distribution::Normal);
        let step = 2e-3;
        let at = |by: f32| {
            let moved = values.iter().zip(&direction).map(|(v, d)| v + by * d);
            of(&moved.collect::<Vec<_>>(), Recompute::Layers).0
        };
        let want = 0.5 * (at(step) - at(-step)) / (2.0 * f64::from(step));
        let have: f64 =
            gradient.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
        // Along a unit direction the slope is at most |gradient|.
        let tolerance = 0.01 * want.abs() + 1e-3 * size;
        assert!((have - want).abs() <= tolerance, "{name}: {have} for {want}, of {size}");
    }
}

/// Only the named modules are trained; layers below them need no graph.
#[test]
fn targets_are_named_by_their_last_names() {
    let decoder = load("llama", None);
    let named = |targets: &[&str]| LoraOptions {
        targets: targets.iter().map(|target| (*target).to_owned()).collect(),
        ..small()
    };
    let all = adapter(decoder.config(), small());
    let some = adapter(decoder.config(), named(&["v_proj", "q_proj", "up_proj"]));
    let names = |adapter: &Adapter| -> Vec<String> {
        adapter.factors().iter().map(|factor| factor.module.clone()).collect()
    };
    assert_eq!((names(&all).len(), names(&some).len()), (14, 6));
    assert_eq!(names(&some)[..2], ["layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj"]);
    let batch = batch("llama");
    let (_, gradient) = learned(&decoder, &some, some.values(), &batch, 1.0, Recompute::Layers);
    // With all other factors at 0 the model is the same, and so are the gradients of the named ones.
    let mut values = vec![0.0; all.values().len()];
    let mut places = Vec::new();
    for factor in some.factors() {
        let own = all.factors().iter().find(|own| own.module == factor.module).expect("all");
        let len: usize = factor.sizes(4).iter().sum();
        values[own.at..own.at + len].copy_from_slice(&some.values()[factor.at..factor.at + len]);
        places.extend(own.at..own.at + len);
    }
    let (_, whole) = learned(&decoder, &all, &values, &batch, 1.0, Recompute::Layers);
    let size = gradient.iter().fold(0f32, |top, g| top.max(g.abs()));
    for (at, have) in places.into_iter().zip(&gradient) {
        assert!((whole[at] - have).abs() <= 1e-4 * size, "{at}");
    }
    let refused = Adapter::new(decoder.config(), named(&["q_proj", "head"]), 0).expect_err("none");
    assert!(matches!(&refused, Error::Target { target, .. } if target == "head"), "{refused}");
    assert!(refused.to_string().contains("down_proj, gate_proj, k_proj"), "{refused}");
}

#[test]
fn a_batch_that_teaches_nothing_is_refused() {
    let decoder = load("llama", None);
    let adapter = adapter(decoder.config(), small());
    let (flat, gradients) = uploaded(&decoder, &adapter);
    let refused = |batch: &[Example]| {
        let scale = (1.0, Tensor::ones([1], decoder.device()));
        decoder
            .add_gradients(
                Trained::Adapter(&flat),
                &gradients,
                batch,
                scale,
                &Recompute::Layers.into(),
            )
            .expect_err("refused")
            .to_string()
    };
    let one = |tokens: &[u32], from| Example { tokens: tokens.to_vec(), from };
    for batch in
        [vec![], vec![one(&[3], 0)], vec![one(&[3, 4], 2)], vec![one(&[3, 4], 0), one(&[], 0)]]
    {
        assert!(refused(&batch).starts_with("a batch has no target tokens"), "{batch:?}");
    }
    assert!(refused(&[one(&[3, 9999], 0)]).contains("token 9999"));
    assert!(refused(&[one(&[3; 130], 0)]).contains("got 129"));
    for (rank, alpha) in [(0, 8.0), ((1 << 16) + 1, 8.0), (4, f64::NAN)] {
        let options = LoraOptions { rank, alpha, ..LoraOptions::default() };
        let refused = Adapter::new(decoder.config(), options, 0).expect_err("no adapter");
        assert!(matches!(refused, Error::Rank { max: 65_536, .. }), "{refused}");
    }
}
