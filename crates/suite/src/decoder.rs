//! Converts a model to the reference's decoder, using only the description and the name map.
//!
//! # Panics
//! Every function, for files that a loader refuses.

use checkpoint::{Absmax, DType, FourBit, Int8, Tensor, Weight};
use half::{bf16, f16};
use models::{DecoderConfig, NormKind, Part, Rope, Scaling, Slot, Stored, Weights};
use reference::{Block, Decoder, Linear, NormRule, Rotary, Stretch};

use crate::matmul::reference_activation;

/// Converts a model to the reference's decoder.
///
/// # Panics
/// If weights do not match their configuration.
pub fn decoder(weights: &Weights) -> Decoder {
    let config = weights.config();
    Decoder {
        hidden: config.hidden,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        vocab: config.vocab,
        embedding: linear(weights, Slot::Embedding).weight,
        embedding_scale: config.embedding_scale.unwrap_or(1.0),
        positions: config.learned_positions.then(|| linear(weights, Slot::Positions).weight),
        blocks: (0..config.layers.len()).map(|layer| block(weights, layer)).collect(),
        norm_rule: match config.norm.kind {
            NormKind::Rms => NormRule::Rms,
            NormKind::RmsPlusOne => NormRule::RmsPlusOne,
            NormKind::Layer => NormRule::Layer,
        },
        eps: config.norm.eps,
        final_norm: linear(weights, Slot::FinalNorm),
        head: (!config.tie_embeddings).then(|| linear(weights, Slot::Head).weight),
        activation: reference_activation(config.activation),
        softcap: config.softcap,
        logit_softcap: config.logit_softcap,
        stored: None,
    }
}

fn block(weights: &Weights, index: usize) -> Block {
    let config = weights.config();
    let layer = config.layers[index];
    let at = |part| linear(weights, Slot::Layer(index, part));
    let there = |part| has(config, part).then(|| at(part));
    Block {
        attention_norm: at(Part::AttentionNorm),
        query: at(Part::Query),
        key: at(Part::Key),
        value: at(Part::Value),
        query_norm: there(Part::QueryNorm),
        key_norm: there(Part::KeyNorm),
        out: at(Part::Out),
        attention_post_norm: there(Part::AttentionPostNorm),
        ffn_norm: at(Part::FfnNorm),
        gate: there(Part::Gate),
        up: at(Part::Up),
        down: at(Part::Down),
        ffn_post_norm: there(Part::FfnPostNorm),
        rotary: layer.rope.map(|rope| rotary(&config.ropes[rope])),
        window: layer.window,
        scale: layer.scale,
    }
}

fn has(config: &DecoderConfig, part: Part) -> bool {
    config.params().iter().any(|param| param.slot == Slot::Layer(0, part))
}

/// Converts a rope to the reference's form.
pub fn rotary(rope: &Rope) -> Rotary {
    let stretch = match rope.scaling.clone() {
        Scaling::None => Stretch::None,
        Scaling::Linear { factor } => Stretch::Linear(factor),
        Scaling::Dynamic { factor, max_seq } => {
            Stretch::Dynamic { factor, trained: max_seq as f64 }
        }
        Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_seq } => {
            let trained = original_max_seq as f64;
            Stretch::Llama3 { factor, slow: low_freq_factor, fast: high_freq_factor, trained }
        }
        Scaling::Yarn { factor, beta_fast, beta_slow, original_max_seq, truncate } => {
            let trained = original_max_seq as f64;
            Stretch::Yarn { factor, fast: beta_fast, slow: beta_slow, trained, whole: truncate }
        }
        Scaling::LongRope { short, long, original_max_seq } => {
            Stretch::PerPair { short, long, trained: original_max_seq }
        }
    };
    Rotary { base: rope.theta, dims: rope.dim, stretch, magnitude: rope.attention_factor }
}

fn linear(weights: &Weights, slot: Slot) -> Linear {
    let weight = weights.weight(slot).expect("a parameter of the configuration");
    let bias = weights.bias(slot).expect("readable");
    Linear { weight: values(weight), bias: bias.map(values) }
}

/// Decodes a parameter from any storage format.
///
/// # Panics
/// If the dtype is not a weight's, or if 4- or 8-bit weights are inconsistent.
pub fn values(stored: Stored<'_>) -> Vec<f32> {
    let columns = stored.shape[1..].iter().product::<usize>();
    let rows = stored.rows.start * columns..stored.rows.end * columns;
    match &stored.weight {
        Weight::Dense(_) => floats(&stored.dense().expect("dense")),
        Weight::FourBit(weight) => four_bit(weight)[rows].to_vec(),
        Weight::Int8(weight) => int8(weight)[rows].to_vec(),
    }
}

/// Decodes a tensor of floats.
///
/// # Panics
/// If the dtype is not f32, bf16 or f16.
pub fn floats(tensor: &Tensor<'_>) -> Vec<f32> {
    let pairs = tensor.bytes.as_chunks::<2>().0.iter();
    match tensor.dtype {
        DType::F32 => tensor.clone().f32s().expect("of this dtype").into_owned(),
        DType::Bf16 => pairs.map(|pair| bf16::from_le_bytes(*pair).to_f32()).collect(),
        DType::F16 => pairs.map(|pair| f16::from_le_bytes(*pair).to_f32()).collect(),
        other => panic!("no weight has the slot {other:?}"),
    }
}

fn four_bit(weight: &FourBit<'_>) -> Vec<f32> {
    let absmax = match &weight.absmax {
        Absmax::Plain(absmax) => absmax.to_vec(),
        Absmax::Nested(nested) => {
            let map = nested.quant_map.as_ref().try_into().expect("256 values");
            reference::nf4::unnest(map, &nested.codes, &nested.absmax, nested.offset)
                .expect("a consistent file")
        }
    };
    let codebook = weight.quant_map.as_ref().try_into().expect("16 values");
    let len = weight.layout.shape.iter().product();
    reference::nf4::dequantize(codebook, &weight.codes, &absmax, weight.layout.block_size, len)
        .expect("a consistent file")
}

fn int8(weight: &Int8<'_>) -> Vec<f32> {
    let codes: Vec<i8> = weight.codes.iter().map(|code| *code as i8).collect();
    reference::int8::dequantize(&codes, &weight.scb, weight.shape[1]).expect("a consistent file")
}
