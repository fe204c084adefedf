//! `generation_config.json`: default sampling and stop tokens of a model.

use std::io;
use std::path::Path;

use serde_json::{Value, json};

use crate::Error;
use crate::error::GENERATION_CONFIG as FILE;
use crate::fields::{Fields, json, read};

/// Sampling defaults of a model. None marks an option that the file does not set.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationConfig {
    /// End-of-sequence tokens.
    pub eos: Vec<u32>,
    /// Beginning-of-sequence token.
    pub bos: Option<u32>,
    /// Padding token of the shorter sequences of a batch.
    pub pad: Option<u32>,
    /// False selects greedy sampling, whatever the other options.
    pub do_sample: Option<bool>,
    /// Divisor of the logits; 0 is greedy.
    pub temperature: Option<f64>,
    /// Number of most likely tokens to sample from; 0 is all.
    pub top_k: Option<usize>,
    /// Cumulative probability of the most likely tokens to sample from; 1 is all.
    pub top_p: Option<f64>,
    /// Least probability of a sampled token, relative to the most likely one.
    pub min_p: Option<f64>,
    /// Penalty for tokens that already occurred: divides positive logits, multiplies negative ones; 1 has no
    /// effect.
    pub repetition_penalty: Option<f64>,
    /// Most tokens of a completion.
    pub max_new_tokens: Option<usize>,
    /// Stop sequences, which end a completion.
    pub stop_strings: Vec<String>,
}

impl GenerationConfig {
    /// Reads a Hugging Face `generation_config.json`.
    ///
    /// # Errors
    /// [`Error::Json`] or [`Error::NotAnObject`] for text that is not a JSON object. [`Error::Field`] for a
    /// field that is malformed or out of range, and for an unsupported field that would change the output.
    ///
    /// `max_length` is ignored. It bounds prompt and completion together, as the context length does, and
    /// many files hold only its default of 20.
    ///
    /// Source: the `GenerationConfig` of Hugging Face transformers.
    pub fn from_json(text: &str) -> Result<Self, Error> {
        let value = json(FILE, text)?;
        let fields = Fields::new(FILE, &value)?;
        refuse_others(&fields)?;
        let number = |field, expected, fits: fn(f64) -> bool| {
            fields.optional(field, expected, |value| value.as_f64().filter(|number| fits(*number)))
        };
        let share = "a number from 0 to 1";
        Ok(Self {
            eos: eos(&fields)?,
            bos: id(&fields, "bos_token_id")?,
            pad: id(&fields, "pad_token_id")?,
            do_sample: fields.flag("do_sample")?,
            temperature: number("temperature", "a number of 0 or more", |t| t >= 0.0)?,
            top_k: fields.optional("top_k", "an integer of 0 or more", |value| {
                usize::try_from(value.as_u64()?).ok()
            })?,
            top_p: number("top_p", share, |p| (0.0..=1.0).contains(&p))?,
            min_p: number("min_p", share, |p| (0.0..=1.0).contains(&p))?,
            repetition_penalty: fields.optional_positive("repetition_penalty")?,
            max_new_tokens: fields.optional_size("max_new_tokens")?,
            stop_strings: stop_strings(&fields)?,
        })
    }

    /// Reads the `generation_config.json` of a folder. Without that file, takes the token ids from
    /// `config.json`, as transformers does, and leaves the rest unset.
    ///
    /// # Errors
    /// [`Error::Read`], and the errors of [`GenerationConfig::from_json`].
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, Error> {
        let present = |file: &str| match read(&folder.as_ref().join(file)) {
            Ok(text) => Ok(Some(text)),
            // A dangling link is an unreadable file, not an absent one.
            Err(Error::Read { path, why })
                if why.kind() == io::ErrorKind::NotFound && !path.is_symlink() =>
            {
                Ok(None)
            }
            Err(why) => Err(why),
        };
        if let Some(own) = present(FILE)? {
            return Self::from_json(&own);
        }
        present(MODEL)?.map_or_else(|| Ok(Self::default()), |model| Self::of_model(&model))
    }

    /// Reads the token ids of a model's `config.json`.
    fn of_model(text: &str) -> Result<Self, Error> {
        let value = json(MODEL, text)?;
        let fields = Fields::new(MODEL, &value)?;
        let [bos, pad] = [id(&fields, "bos_token_id")?, id(&fields, "pad_token_id")?];
        Ok(Self { eos: eos(&fields)?, bos, pad, ..Self::default() })
    }

    /// Drops end-of-sequence ids past a vocabulary of `vocab` tokens, and logs a warning for each.
    #[must_use]
    pub fn for_vocab(mut self, vocab: usize) -> Self {
        self.eos.retain(|id| {
            let known = (*id as usize) < vocab;
            if !known {
                log::warn!("{EOS} {id} is outside the vocabulary of {vocab} tokens and is ignored");
            }
            known
        });
        self
    }
}

const MODEL: &str = "config.json";
const ID: &str = "a token id";
const EOS: &str = "eos_token_id";

/// Reads a token id; none for a negative number, which old files have in place of null.
fn id(fields: &Fields<'_>, field: &str) -> Result<Option<u32>, Error> {
    Ok(fields.optional(field, ID, token)?.flatten())
}

fn token(value: &Value) -> Option<Option<u32>> {
    match value.as_i64()? {
        ..0 => Some(None),
        id => u32::try_from(id).ok().map(Some),
    }
}

/// Reads one id or a list of ids, without negative ones, which end no text.
fn eos(fields: &Fields<'_>) -> Result<Vec<u32>, Error> {
    let ids = fields.optional(EOS, "a token id or a list of them", |value| match value {
        Value::Array(list) => list.iter().map(token).collect(),
        one => token(one).map(|id| vec![id]),
    })?;
    let ids: Vec<Option<u32>> = ids.unwrap_or_default();
    if ids.contains(&None) {
        log::warn!("{EOS} has a negative id, which is ignored");
    }
    Ok(ids.into_iter().flatten().collect())
}

/// Reads one text or a list of texts, none of them empty.
fn stop_strings(fields: &Fields<'_>) -> Result<Vec<String>, Error> {
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let all = fields.optional("stop_strings", "a text or a list of them", |value| match value {
        Value::Array(list) => list.iter().map(text).collect(),
        one => text(one).map(|text| vec![text]),
    })?;
    Ok(all.unwrap_or_default())
}

/// Returns an error for unsupported fields that change the output, unless they hold their neutral value.
fn refuse_others(fields: &Fields<'_>) -> Result<(), Error> {
    let [zero, one, no] = [json!(0), json!(1), json!(false)];
    for (field, neutral) in [
        ("num_beams", &one),
        ("num_beam_groups", &one),
        ("typical_p", &one),
        ("guidance_scale", &one),
        ("encoder_repetition_penalty", &one),
        ("epsilon_cutoff", &zero),
        ("eta_cutoff", &zero),
        ("diversity_penalty", &zero),
        ("no_repeat_ngram_size", &zero),
        ("encoder_no_repeat_ngram_size", &zero),
        ("min_length", &zero),
        ("min_new_tokens", &zero),
        ("penalty_alpha", &zero),
        ("remove_invalid_values", &no),
        ("token_healing", &no),
        ("top_h", &Value::Null),
        ("bad_words_ids", &Value::Null),
        ("force_words_ids", &Value::Null),
        ("constraints", &Value::Null),
        ("sequence_bias", &Value::Null),
        ("suppress_tokens", &Value::Null),
        ("begin_suppress_tokens", &Value::Null),
        ("forced_bos_token_id", &Value::Null),
        ("forced_eos_token_id", &Value::Null),
        ("forced_decoder_ids", &Value::Null),
        ("exponential_decay_length_penalty", &Value::Null),
        ("dola_layers", &Value::Null),
        ("watermarking_config", &Value::Null),
        ("max_time", &Value::Null),
    ] {
        fields.only(field, std::slice::from_ref(neutral))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fails(text: &str, message: &str) {
        let error = GenerationConfig::from_json(text).expect_err(message);
        assert_eq!(error.to_string(), message);
    }

    #[test]
    fn without_a_file_of_its_own_a_model_says_where_texts_end() -> Result<(), Error> {
        let text = r#"{"model_type": "llama", "eos_token_id": [0, 3], "bos_token_id": 1, "pad_token_id": null,
            "vocab_size": 8, "temperature": 0.5}"#;
        let own = GenerationConfig::of_model(text)?;
        let want =
            GenerationConfig { eos: vec![0, 3], bos: Some(1), ..GenerationConfig::default() };
        assert_eq!(own, want);
        let past = GenerationConfig::of_model(r#"{"eos_token_id": 8, "vocab_size": 8}"#)?;
        assert_eq!(past.for_vocab(8), GenerationConfig::default());
        Ok(())
    }

    #[test]
    fn one_eos_or_several() -> Result<(), Error> {
        let one =
            GenerationConfig::from_json(r#"{"eos_token_id": 2, "transformers_version": "4"}"#)?;
        assert_eq!(one, GenerationConfig { eos: vec![2], ..GenerationConfig::default() });
        let text = r#"{"bos_token_id": 128000, "do_sample": true, "eos_token_id": [128001, 128009],
            "temperature": 0.6, "top_p": 0.9, "top_k": 0, "min_p": 0.05, "repetition_penalty": 1.1,
            "pad_token_id": null, "num_beams": 1.0, "max_new_tokens": 7, "max_length": 20,
            "stop_strings": ["\n\n", "User:"]}"#;
        let several = GenerationConfig {
            eos: vec![128_001, 128_009],
            bos: Some(128_000),
            pad: None,
            do_sample: Some(true),
            temperature: Some(0.6),
            top_k: Some(0),
            top_p: Some(0.9),
            min_p: Some(0.05),
            repetition_penalty: Some(1.1),
            max_new_tokens: Some(7),
            stop_strings: vec!["\n\n".into(), "User:".into()],
        };
        assert_eq!(GenerationConfig::from_json(text)?, several);
        for (text, stops) in
            [(r#"{"stop_strings": "."}"#, &["."][..]), (r#"{"stop_strings": null}"#, &[])]
        {
            assert_eq!(GenerationConfig::from_json(text)?.stop_strings, stops);
        }
        Ok(())
    }

    /// Files of Llama 1 have -1 where others have null.
    #[test]
    fn negative_ids_are_no_tokens() -> Result<(), Error> {
        let text = r#"{"eos_token_id": [2, -1], "pad_token_id": -1, "bos_token_id": -1}"#;
        let own = GenerationConfig::from_json(text)?;
        assert_eq!((own.eos, own.pad, own.bos), (vec![2], None, None));
        let none = GenerationConfig::of_model(r#"{"eos_token_id": -1, "pad_token_id": -1}"#)?;
        assert_eq!(none, GenerationConfig::default());
        Ok(())
    }

    #[test]
    fn a_folder_may_lack_the_file_and_may_not_link_to_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let none = GenerationConfig::open(folder.path()).expect("nothing there");
        assert_eq!(none, GenerationConfig::default());
        let link = folder.path().join(FILE);
        std::os::unix::fs::symlink("gone", &link).expect("linked");
        let error = GenerationConfig::open(folder.path()).expect_err("a link to nothing");
        assert!(matches!(&error, Error::Read { path, .. } if *path == link), "{error}");
    }

    #[test]
    fn what_ends_a_text_is_in_the_vocabulary() -> Result<(), Error> {
        let text = r#"{"eos_token_id": [2, 160], "pad_token_id": 200}"#;
        let several = GenerationConfig::from_json(text)?;
        assert_eq!(several.clone().for_vocab(161), several);
        assert_eq!(several.for_vocab(160).eos, [2]);
        Ok(())
    }

    #[test]
    fn what_is_not_offered_is_refused() {
        fails(
            r#"{"num_beams": 4}"#,
            &format!("{FILE}: `num_beams` is 4, which is not supported; expected 1"),
        );
        fails(
            r#"{"top_p": 1.5}"#,
            &format!("{FILE}: `top_p` is 1.5, expected a number from 0 to 1"),
        );
        fails(
            r#"{"eos_token_id": [1, 2.5]}"#,
            &format!("{FILE}: `eos_token_id` is [1,2.5], expected a token id or a list of them"),
        );
        fails(
            r#"{"stop_strings": ["a", ""]}"#,
            &format!("{FILE}: `stop_strings` is [\"a\",\"\"], expected a text or a list of them"),
        );
        for field in [
            "typical_p",
            "guidance_scale",
            "epsilon_cutoff",
            "diversity_penalty",
            "no_repeat_ngram_size",
            "min_new_tokens",
            "penalty_alpha",
            "top_h",
            "bad_words_ids",
            "sequence_bias",
            "suppress_tokens",
            "forced_eos_token_id",
            "watermarking_config",
            "max_time",
        ] {
            let error = GenerationConfig::from_json(&json!({ field: 0.5 }).to_string());
            let error = error.expect_err(field).to_string();
            assert!(error.starts_with(&format!("{FILE}: `{field}` is 0.5, ")), "{error}");
        }
        fails("[]", &format!("{FILE} is not a JSON object"));
        let error = GenerationConfig::from_json("{").expect_err("cut");
        assert!(error.to_string().starts_with(&format!("{FILE} is not JSON: ")), "{error}");
    }
}
