//! Gemma 2: four norms per layer, soft caps, and a window in every other layer.

use super::common::{DEFAULTS, Defaults, Definition, gemma, set_windows, sliding};
use crate::fields::Fields;
use crate::names::standard;
use crate::{DecoderConfig, Error, Family};

pub(super) const GEMMA2: Definition = Definition {
    model_type: "gemma2",
    architecture: "Gemma2ForCausalLM",
    read,
    place: standard,
    prefixes: &["model.", ""],
    ignored: &[],
};

fn read(family: Family, fields: &Fields<'_>) -> Result<DecoderConfig, Error> {
    let defaults = Defaults { head_dim: Some(256), tie_embeddings: true, ..DEFAULTS };
    let mut config = gemma(family, fields, defaults)?;
    let slides = sliding(fields, config.layers.len(), |layer| layer % 2 == 0)?;
    set_windows(&mut config, fields, &slides)?;
    let cap = |field, usual| match fields.absent(field) {
        true => Ok(Some(usual)),
        false => fields.optional_positive(field),
    };
    let softcap = cap("attn_logit_softcapping", 50.0)?;
    Ok(DecoderConfig { softcap, logit_softcap: cap("final_logit_softcapping", 30.0)?, ..config })
}
