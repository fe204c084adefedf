//! Gemma 3, text model: QK norms in place of soft caps, five windowed layers per full layer, and a separate
//! rope for the windowed layers.

use super::common::{DEFAULTS, Defaults, Definition, SLIDING, gemma, set_windows, sliding};
use crate::fields::Fields;
use crate::names::standard;
use crate::rope::Model;
use crate::{DecoderConfig, Error, Family, Rope};

pub(super) const GEMMA3: Definition = Definition {
    model_type: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    read,
    place: standard,
    prefixes: &["model.", ""],
    ignored: &[],
};

const GLOBAL_THETA: f64 = 1e6;
const LOCAL_THETA: f64 = 1e4;

fn read(family: Family, fields: &Fields<'_>) -> Result<DecoderConfig, Error> {
    // Versions of transformers disagree on whether this field has an effect; no published file has it.
    fields.only("attn_logit_softcapping", &[])?;
    let defaults =
        Defaults { head_dim: Some(256), rope_theta: None, tie_embeddings: true, ..DEFAULTS };
    let mut config = gemma(family, fields, defaults)?;
    let pattern = fields.optional_size("sliding_window_pattern")?.unwrap_or(6);
    let slides = sliding(fields, config.layers.len(), |layer| (layer + 1) % pattern != 0)?;
    set_windows(&mut config, fields, &slides)?;
    config.ropes = ropes(fields, &config)?;
    for layer in &mut config.layers {
        layer.rope = Some(usize::from(layer.window.is_some()));
    }
    let logit_softcap = fields.optional_positive("final_logit_softcapping")?;
    Ok(DecoderConfig { qk_norm: true, logit_softcap, ..config })
}

/// Reads the rope of full layers and the rope of windowed layers.
fn ropes(fields: &Fields<'_>, config: &DecoderConfig) -> Result<Vec<Rope>, Error> {
    let model = |theta| Model { head_dim: config.head_dim, max_seq: config.max_seq, theta };
    let (global, local) = (model(GLOBAL_THETA), model(LOCAL_THETA));
    let Some(parameters) = fields.section("rope_parameters")? else {
        let scaling = fields.section("rope_scaling")?;
        let full = Rope::read(fields, "rope_theta", scaling.as_ref(), global)?;
        return Ok(vec![full, Rope::read(fields, "rope_local_base_freq", None, local)?]);
    };
    if fields.value("rope_scaling").is_some() {
        let value = fields.value("rope_parameters").cloned().unwrap_or_default();
        return Err(fields.contradiction("rope_scaling", "rope_parameters", value));
    }
    let full = parameters.section("full_attention")?;
    let sliding = parameters.section(SLIDING)?;
    if let Some(stray) = parameters.names().find(|name| !["full_attention", SLIDING].contains(name))
    {
        return Err(parameters.unsupported(stray, "full_attention, sliding_attention"));
    }
    Ok(vec![
        Rope::read(fields, "rope_theta", full.as_ref(), global)?,
        Rope::read(fields, "rope_local_base_freq", sliding.as_ref(), local)?,
    ])
}
