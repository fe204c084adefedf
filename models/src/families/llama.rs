//! Llama 2 and 3.x, and models that share their code.

use super::common::{DEFAULTS, Defaults, Definition, common};
use crate::fields::Fields;
use crate::names::standard;
use crate::{DecoderConfig, Error, Family};

pub(super) const LLAMA: Definition = Definition {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    read,
    place: standard,
    prefixes: &["model.", ""],
    ignored: &["layers.{}.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"],
};

fn read(family: Family, fields: &Fields<'_>) -> Result<DecoderConfig, Error> {
    let config = common(family, fields, Defaults { kv_heads_are_heads: true, ..DEFAULTS })?;
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    Ok(DecoderConfig {
        qkv_bias: bias,
        out_bias: bias,
        ffn_bias: fields.flag("mlp_bias")?.unwrap_or(false),
        ..config
    })
}
