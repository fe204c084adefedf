//! The name map: every tensor has one name.

use std::collections::BTreeSet;

use checkpoint::{Checkpoint, Plan, Weight, Writer};
use models::{Family, Part, Side, Slot, Weights};

use crate::{FIXTURES, fixture, open};
use suite::decoder::values;

#[test]
fn every_family_has_a_fixture() {
    let have: BTreeSet<_> =
        FIXTURES.iter().map(|name| open(name).config().family.model_type()).collect();
    let all: BTreeSet<_> = Family::all().iter().map(|family| family.model_type()).collect();
    assert_eq!(have, all);
    assert!(Family::all().iter().all(|family| Family::named(family.model_type()) == Some(*family)));
}

/// Rows of fused tensors are disjoint and complete: each row belongs to one parameter.
#[test]
fn fused_tensors_are_cut_without_gaps() {
    for name in FIXTURES {
        let params = open(name).config().params();
        for param in &params {
            let rows = |p: &models::Param| p.row..p.row + p.shape[0];
            let all = if param.transposed { param.stored[1] } else { param.stored[0] };
            let parts = params.iter().filter(|other| other.name == param.name);
            let mut covered: Vec<usize> = parts.flat_map(rows).collect();
            covered.sort_unstable();
            assert_eq!(covered, (0..all).collect::<Vec<_>>(), "{name}: {}", param.name);
        }
        let unique: BTreeSet<_> = params.iter().map(|param| (param.slot, param.side)).collect();
        assert_eq!(unique.len(), params.len());
    }
}

/// AutoModel saves a decoder without a head and without the prefix of its names.
#[test]
fn names_may_lack_the_prefix() {
    let whole = open("qwen3");
    assert!(whole.config().tie_embeddings, "a head would be missing");
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::copy(fixture("qwen3").join("config.json"), folder.path().join("config.json"))
        .expect("a fixture");
    let file = whole.checkpoint();
    let short = |name: &str| name.strip_prefix("model.").map(str::to_owned);
    let all: Vec<_> = file
        .names()
        .filter_map(|name| Some((short(name)?, file.tensor(name).expect("it has the name"))))
        .collect();
    let plans = all.iter().map(|(name, own)| Plan::new(name, own.dtype, &own.shape));
    let path = folder.path().join("model.safetensors");
    let mut writer = Writer::create(&path, plans.collect::<Vec<_>>()).expect("writable");
    writer.write_all(&all).expect("writable");
    writer.finish().expect("writable");
    let bare = Weights::open(folder.path()).expect("the same model");
    for param in whole.config().params().iter().filter(|param| param.side == Side::Weight) {
        let of = |weights: &Weights| {
            let weight = weights.weight(param.slot).expect("there");
            weight.dense().expect("no codes").bytes.to_vec()
        };
        assert!(of(&whole) == of(&bare), "{}", param.name);
    }
}

/// A matrix stored [in, out] is transposed, and its rows are sliced: compared with the bytes in the file.
#[test]
fn conv1d_is_turned_and_cut() {
    let weights = open("gpt2");
    let file = Checkpoint::open(fixture("gpt2")).expect("a fixture");
    let stored = file.tensor("transformer.h.1.attn.c_attn.weight").expect("there"); // [32, 96]
    let bias = file.tensor("transformer.h.1.attn.c_attn.bias").expect("there");
    for (third, part) in [Part::Query, Part::Key, Part::Value].into_iter().enumerate() {
        let slot = Slot::Layer(1, part);
        let transposed = weights.weight(slot).expect("there").dense().expect("no codes");
        assert_eq!(transposed.shape, [32, 32]);
        for (row, column) in [(0, 0), (5, 31), (31, 5)] {
            let to = 2 * (row * 32 + column);
            let from = 2 * (column * 96 + third * 32 + row);
            assert_eq!(transposed.bytes[to..to + 2], stored.bytes[from..from + 2]);
        }
        let cut = weights.bias(slot).expect("readable").expect("there").dense().expect("no codes");
        assert_eq!(cut.bytes, &bias.bytes[third * 64..][..64]);
    }
}

/// Values that the file holds in the requested layout are not copied.
#[test]
fn rows_of_a_file_are_borrowed() {
    let weights = open("phi3");
    for part in [Part::Query, Part::Value, Part::Up] {
        let stored = weights.weight(Slot::Layer(0, part)).expect("there");
        let dense = stored.dense().expect("no codes");
        assert!(matches!(dense.bytes, std::borrow::Cow::Borrowed(_)), "{part:?}");
    }
}

#[test]
fn a_tied_head_is_the_embedding() {
    let weights = open("qwen3");
    let head = weights.weight(Slot::Head).expect("tied");
    assert_eq!(values(head), values(weights.weight(Slot::Embedding).expect("there")));
    assert!(weights.config().params().iter().all(|param| param.slot != Slot::Head));
    let error = weights.weight(Slot::Positions).expect_err("turned, not learned");
    assert_eq!(error.to_string(), "tensor Positions: is missing");
    assert!(weights.bias(Slot::FinalNorm).expect("readable").is_none());
}

/// The tensors decide what is quantised: here all matrices of layers, but not the head.
#[test]
fn tensors_tell_what_is_quantised() {
    use Part::{Down, Gate, Key, Out, Query, Up, Value};
    for name in ["llama_nf4", "llama_int8", "phi3_nf4", "gpt2_nf4", "llama"] {
        let weights = open(name);
        for param in weights.config().params() {
            let Slot::Layer(_, part) = param.slot else { continue };
            let matrix = matches!(part, Query | Key | Value | Out | Gate | Up | Down);
            let codes = matrix && param.side == Side::Weight && name != "llama";
            let stored = match param.side {
                Side::Weight => weights.weight(param.slot).expect("there"),
                Side::Bias => weights.bias(param.slot).expect("readable").expect("there"),
            };
            let int8 = matches!(stored.weight, Weight::Int8(_));
            assert_eq!(int8, codes && name == "llama_int8", "{name}: {param:?}");
            let four_bit = matches!(stored.weight, Weight::FourBit(_));
            assert_eq!(four_bit, codes && name != "llama_int8", "{name}: {param:?}");
            assert!(!(codes && stored.transposed), "{name}: {param:?}");
            assert_eq!(stored.dense().is_none(), codes, "{name}: {param:?}");
        }
        let head = weights.weight(Slot::Head).expect("there");
        assert!(head.dense().is_some(), "{name}");
    }
}

/// `layer_matrices` returns the tensors that bitsandbytes quantised, including fused ones.
#[test]
fn layer_matrices_are_what_bitsandbytes_quantises() {
    for name in ["llama_nf4", "llama_int8", "phi3_nf4", "gpt2_nf4"] {
        let weights = open(name);
        let checkpoint = weights.checkpoint();
        let weights_of = |name: &&str| name.ends_with(".weight");
        let quantised =
            |name: &&str| !matches!(checkpoint.weight(name), Ok(Weight::Dense(_)) | Err(_));
        let want: Vec<_> = checkpoint.names().filter(weights_of).filter(quantised).collect();
        let matrices = weights.layer_matrices();
        assert_eq!(matrices.keys().collect::<Vec<_>>(), want, "{name}");
        assert!(matrices.values().all(|param| param.transposed == (name == "gpt2_nf4")));
    }
    let head = "lm_head.weight".to_owned();
    assert!(!open("llama").layer_matrices().contains_key(&head), "the head is none");
}
