//! Qwen3: Qwen2 with QK norms, and biases only if `attention_bias` is true.

use super::common::{DEFAULTS, Defaults, Definition, common, set_windows_from};
use crate::fields::Fields;
use crate::names::standard;
use crate::{DecoderConfig, Error, Family};

pub(super) const QWEN3: Definition = Definition {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    read,
    place: standard,
    prefixes: &["model.", ""],
    ignored: &[],
};

fn read(family: Family, fields: &Fields<'_>) -> Result<DecoderConfig, Error> {
    let mut config = common(family, fields, Defaults { head_dim: Some(128), ..DEFAULTS })?;
    set_windows_from(&mut config, fields)?;
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    Ok(DecoderConfig { qk_norm: true, qkv_bias: bias, out_bias: bias, ..config })
}
