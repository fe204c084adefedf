//! Qwen2 and Qwen2.5: Llama with QKV biases, and windows in the upper layers.

use super::common::{DEFAULTS, Definition, common, set_windows_from};
use crate::fields::Fields;
use crate::names::standard;
use crate::{DecoderConfig, Error, Family};

pub(super) const QWEN2: Definition = Definition {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    read,
    place: standard,
    prefixes: &["model.", ""],
    ignored: &["layers.{}.self_attn.rotary_emb.inv_freq"],
};

fn read(family: Family, fields: &Fields<'_>) -> Result<DecoderConfig, Error> {
    let mut config = common(family, fields, DEFAULTS)?;
    set_windows_from(&mut config, fields)?;
    Ok(DecoderConfig { qkv_bias: true, ..config })
}
