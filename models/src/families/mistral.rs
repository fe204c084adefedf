//! Mistral: Llama with a window in every layer, or in none.

use super::common::{DEFAULTS, Definition, common, set_window_of_all};
use crate::fields::Fields;
use crate::names::standard;
use crate::{DecoderConfig, Error, Family};

pub(super) const MISTRAL: Definition = Definition {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    read,
    place: standard,
    prefixes: &["model.", ""],
    ignored: &["layers.{}.self_attn.rotary_emb.inv_freq"],
};

fn read(family: Family, fields: &Fields<'_>) -> Result<DecoderConfig, Error> {
    let mut config = common(family, fields, DEFAULTS)?;
    set_window_of_all(&mut config, fields, Some(4096))?;
    Ok(config)
}
