//! Decoder families: fields of each family's `config.json`, and names of its tensors.
//!
//! To add a family, add a file with one [`Definition`] here, and one line in [`DEFINITIONS`].

use std::path::Path;

use self::common::Definition;
use crate::Error;
use crate::config::{DecoderConfig, Family, THRESHOLD};
use crate::fields::{Fields, json, read};
use crate::names::{Place, Slot};

mod common;
mod gemma2;
mod gemma3;
mod gpt2;
mod llama;
mod mistral;
mod phi3;
mod qwen2;
mod qwen3;

const DEFINITIONS: [&Definition; 8] = [
    &llama::LLAMA,
    &mistral::MISTRAL,
    &qwen2::QWEN2,
    &qwen3::QWEN3,
    &gemma2::GEMMA2,
    &gemma3::GEMMA3,
    &phi3::PHI3,
    &gpt2::GPT2,
];

impl Family {
    /// Returns every family.
    pub fn all() -> [Self; DEFINITIONS.len()] {
        DEFINITIONS.map(|definition| Self(definition.model_type))
    }

    /// Returns the family with this `model_type`, if it is one of [`Family::all`].
    pub fn named(model_type: &str) -> Option<Self> {
        Self::all().into_iter().find(|family| family.model_type() == model_type)
    }

    fn definition(self) -> &'static Definition {
        let own = |definition: &&Definition| definition.model_type == self.model_type();
        DEFINITIONS.into_iter().find(own).expect("a family is made of its definition")
    }

    pub(crate) fn place(self, config: &DecoderConfig, slot: Slot) -> Place {
        (self.definition().place)(config, slot)
    }

    pub(crate) fn prefixes(self) -> &'static [&'static str] {
        self.definition().prefixes
    }

    /// Returns the class that transformers loads a model of this family with.
    pub fn architecture(self) -> &'static str {
        self.definition().architecture
    }

    pub(crate) fn ignored(self) -> &'static [&'static str] {
        self.definition().ignored
    }
}

impl DecoderConfig {
    /// Reads a Hugging Face `config.json`, as transformers 4 and 5 write it.
    ///
    /// An absent field takes the default of the family's class in transformers if published files omit it.
    /// Otherwise it counts as missing. Fields that the family's code there ignores are ignored here too.
    ///
    /// # Errors
    /// [`Error::Json`] or [`Error::NotAnObject`] for text that is not a JSON object.
    /// [`Error::UnknownModelType`]. [`Error::Field`] for a field that is missing, malformed, out of range,
    /// unsupported or contradicted by another field. It is also returned for weights quantised by anything
    /// except bitsandbytes.
    ///
    /// Source: the configuration classes of Hugging Face transformers.
    pub fn from_json(text: &str) -> Result<Self, Error> {
        let file = "config.json";
        let value = json(file, text)?;
        let fields = Fields::new(file, &value)?;
        // Attention to later tokens, too.
        fields.only("is_causal", &[true.into()])?;
        if let Some(quantization) = fields.section("quantization_config")? {
            quantization.only("quant_method", &["bitsandbytes".into()])?;
        }
        let int8_threshold = int8_threshold(&fields)?;
        Ok(Self { int8_threshold, ..of_family(&fields)? })
    }

    /// Reads the `config.json` of a folder.
    ///
    /// # Errors
    /// [`Error::Read`], and the errors of [`DecoderConfig::from_json`].
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, Error> {
        Self::from_json(&read(&folder.as_ref().join("config.json"))?)
    }
}

/// Reads the configuration by the rules of the family that `config.json` names.
fn of_family(fields: &Fields<'_>) -> Result<DecoderConfig, Error> {
    let field = "model_type";
    let Some(name) = fields.text(field)? else {
        return Err(match fields.absent("_class_name") {
            true => fields.missing(field),
            false => fields.other_kind(field, "a model of diffusers, for `flashover unet`"),
        });
    };
    let known = || Family::all().map(Family::model_type).join(", ");
    let family = Family::named(name).ok_or_else(|| fields.unknown_model_type(name, known()))?;
    (family.definition().read)(family, fields)
}

/// Returns [`DecoderConfig::int8_threshold`].
fn int8_threshold(fields: &Fields<'_>) -> Result<Option<f64>, Error> {
    let Some(quantization) = fields.section("quantization_config")? else { return Ok(None) };
    if quantization.flag("load_in_8bit")? != Some(true) {
        return Ok(None);
    }
    let field = "llm_int8_threshold";
    let threshold = quantization.optional(field, "a number of 0 or above", |value| {
        value.as_f64().filter(|number| number.is_finite() && *number >= 0.0)
    })?;
    Ok(Some(threshold.unwrap_or(THRESHOLD)))
}
