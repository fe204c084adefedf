//! GPT-2: learned positions, layer norms, a plain feed-forward block; matrices stored `[in, out]`.

use serde_json::Value;

use super::common::Definition;
use crate::config::{Activation, Ffn, Layer, Norm, NormKind, Placement};
use crate::fields::Fields;
use crate::names::{Part, Place, Slot, standard};
use crate::{DecoderConfig, Error, Family};

pub(super) const GPT2: Definition = Definition {
    model_type: "gpt2",
    architecture: "GPT2LMHeadModel",
    read,
    place,
    // Files of the first release have no prefix.
    prefixes: &["transformer.", ""],
    // Causal masks, and the score of masked keys.
    ignored: &["h.{}.attn.bias", "h.{}.attn.masked_bias"],
};

fn read(family: Family, fields: &Fields<'_>) -> Result<DecoderConfig, Error> {
    fields.only("add_cross_attention", &[Value::Bool(false)])?;
    let [hidden, heads] = [fields.size("n_embd")?, fields.size("n_head")?];
    fields.divides(("n_embd", hidden), ("n_head", heads))?;
    let head_dim = hidden / heads;
    let scaled = fields.flag("scale_attn_weights")?.unwrap_or(true);
    let by_depth = fields.flag("scale_attn_by_inverse_layer_idx")?.unwrap_or(false);
    let layer = |depth: usize| {
        let scale = if scaled { 1.0 / (head_dim as f64).sqrt() } else { 1.0 };
        let scale = if by_depth { scale / (depth as f64 + 1.0) } else { scale };
        Layer { window: None, rope: None, scale }
    };
    let activation = crate::config::activation(fields, "activation_function")?;
    let eps = fields.optional_eps("layer_norm_epsilon")?.unwrap_or(1e-5);
    Ok(DecoderConfig {
        family,
        hidden,
        ffn_hidden: fields.optional_size("n_inner")?.unwrap_or(4 * hidden),
        heads,
        kv_heads: heads,
        head_dim,
        vocab: fields.size("vocab_size")?,
        max_seq: fields.size("n_positions")?,
        layers: (0..fields.layers("n_layer")?).map(layer).collect(),
        ropes: Vec::new(),
        norm: Norm { kind: NormKind::Layer, eps },
        placement: Placement::Before,
        qk_norm: false,
        softcap: None,
        qkv_bias: true,
        out_bias: true,
        ffn: Ffn::Plain,
        activation: activation.unwrap_or(Activation::GeluTanh),
        ffn_bias: true,
        embedding_scale: None,
        learned_positions: true,
        logit_softcap: None,
        tie_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(true),
        int8_threshold: None,
    })
}

fn place(config: &DecoderConfig, slot: Slot) -> Place {
    let Slot::Layer(layer, part) = slot else {
        return match slot {
            Slot::Embedding => Place::new("wte"),
            Slot::Positions => Place::new("wpe"),
            Slot::FinalNorm => Place::new("ln_f"),
            _ => standard(config, slot),
        };
    };
    let at = |module: &str| Place::new(format!("h.{layer}.{module}"));
    let qkv = |third: usize| {
        at("attn.c_attn").transposed().rows(third * config.hidden, 3 * config.hidden)
    };
    match part {
        Part::AttentionNorm => at("ln_1"),
        Part::Query => qkv(0),
        Part::Key => qkv(1),
        Part::Value => qkv(2),
        Part::Out => at("attn.c_proj").transposed(),
        Part::FfnNorm => at("ln_2"),
        Part::Up => at("mlp.c_fc").transposed(),
        Part::Down => at("mlp.c_proj").transposed(),
        _ => standard(config, slot),
    }
}
