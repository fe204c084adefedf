//! Phi-3 and Phi-4-mini: Llama with fused QKV and fused gate and up.

use super::common::{DEFAULTS, Defaults, Definition, common, set_window_of_all};
use crate::fields::Fields;
use crate::names::{Part, Place, Slot, standard};
use crate::{DecoderConfig, Error, Family};

pub(super) const PHI3: Definition = Definition {
    model_type: "phi3",
    architecture: "Phi3ForCausalLM",
    read,
    place,
    prefixes: &["model.", ""],
    ignored: &["layers.{}.self_attn.rotary_emb.inv_freq"],
};

fn read(family: Family, fields: &Fields<'_>) -> Result<DecoderConfig, Error> {
    let mut config = common(family, fields, Defaults { kv_heads_are_heads: true, ..DEFAULTS })?;
    set_window_of_all(&mut config, fields, None)?;
    Ok(config)
}

fn place(config: &DecoderConfig, slot: Slot) -> Place {
    let Slot::Layer(layer, part) = slot else { return standard(config, slot) };
    let qkv = Place::new(format!("layers.{layer}.self_attn.qkv_proj"));
    let gate_up = Place::new(format!("layers.{layer}.mlp.gate_up_proj"));
    let (ffn, [q, kv]) = (config.ffn_hidden, config.qkv_rows());
    match part {
        Part::Query => qkv.rows(0, q + 2 * kv),
        Part::Key => qkv.rows(q, q + 2 * kv),
        Part::Value => qkv.rows(q + kv, q + 2 * kv),
        Part::Gate => gate_up.rows(0, 2 * ffn),
        Part::Up => gate_up.rows(ffn, 2 * ffn),
        _ => standard(config, slot),
    }
}
