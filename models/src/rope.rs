//! Rotary positions: pair i of a head, at position p, is rotated by p·f[i] radians.
//!
//! ```text
//! f[i] = theta^(-2i/dim)                             none
//! f[i] / factor                                      linear
//! theta·(factor·seq/max_seq - factor + 1)^(dim/(dim-2)) in place of theta, past max_seq   dynamic
//! f[i] / factor below low, f[i] above high, a blend between      llama3, by rotations in original_max_seq
//! a blend by i, between the bounds of beta_fast and beta_slow    yarn
//! f[i] / short[i], or / long[i] past original_max_seq            longrope
//! ```
//!
//! Source: Su et al., "RoFormer" (2021); Peng et al., "YaRN" (2023); Ding et al., "LongRoPE" (2024); the
//! functions of the same names in Hugging Face transformers.

use std::f64::consts::TAU;

use serde_json::Value;

use crate::Error;
use crate::fields::Fields;

/// Rotary position embedding of a head. Pairs are `(i, i + dim/2)`.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the frequencies: theta^(-2i/dim) for pair i, before scaling.
    pub theta: f64,
    /// Number of rotated dimensions of a head, the first ones; even.
    pub dim: usize,
    /// Scaling of the frequencies.
    pub scaling: Scaling,
    /// Factor of sine and cosine.
    pub attention_factor: f64,
    /// Context length after linear or YaRN scaling, in positions.
    pub context: Option<usize>,
}

/// Scaling of frequencies beyond the context length of the first training.
#[derive(Debug, Clone, PartialEq)]
pub enum Scaling {
    /// No scaling.
    None,
    /// Divides all frequencies by the same factor.
    Linear {
        /// Divisor of the frequencies.
        factor: f64,
    },
    /// Raises theta with the sequence length (dynamic NTK).
    Dynamic {
        /// Growth of theta with the length past `max_seq`.
        factor: f64,
        /// Longest unscaled sequence, in positions.
        max_seq: usize,
    },
    /// Divides low frequencies, keeps high ones, and blends those between, as Llama 3.1 does.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Most rotations within `original_max_seq` of a low frequency.
        low_freq_factor: f64,
        /// Fewest rotations within `original_max_seq` of a high frequency.
        high_freq_factor: f64,
        /// Context length of the first training, in positions.
        original_max_seq: usize,
    },
    /// Divides slow pairs, keeps fast ones, and blends those between by their index.
    Yarn {
        /// Divisor of the frequencies of slow pairs.
        factor: f64,
        /// Rotations within `original_max_seq` above which a pair is fast.
        beta_fast: f64,
        /// Rotations within `original_max_seq` below which a pair is slow.
        beta_slow: f64,
        /// Context length of the first training, in positions.
        original_max_seq: usize,
        /// True if the bounds of the blend are rounded to whole dimensions.
        truncate: bool,
    },
    /// Divides by `short` or by `long`, depending on the length of the whole sequence.
    LongRope {
        /// Divisors up to `original_max_seq`, `[dim / 2]`
        short: Vec<f64>,
        /// Divisors past `original_max_seq`, `[dim / 2]`
        long: Vec<f64>,
        /// Longest sequence that uses `short`, in positions.
        original_max_seq: usize,
    },
}

/// Model attributes that its frequencies depend on, apart from the rope section.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Model {
    pub(crate) head_dim: usize,
    pub(crate) max_seq: usize,
    /// Default base, if the file has none.
    pub(crate) theta: f64,
}

const KNOWN: &str = "default, linear, dynamic, llama3, yarn, longrope";

impl Rope {
    /// Returns the frequencies of a sequence of `seq` positions, `[dim / 2]`, in radians per position.
    pub fn frequencies(&self, seq: usize) -> Vec<f64> {
        let pairs = 0..self.dim / 2;
        let plain = |theta: f64, i: usize| theta.powf(-2.0 * i as f64 / self.dim as f64);
        let base = pairs.map(|i| (i, plain(self.theta, i)));
        match &self.scaling {
            Scaling::None => base.map(|(_, f)| f).collect(),
            Scaling::Linear { factor } => base.map(|(_, f)| f / factor).collect(),
            Scaling::Dynamic { factor, max_seq } => {
                let length = seq.max(*max_seq) as f64 / *max_seq as f64;
                let dim = self.dim as f64;
                let stretch = (factor * length - (factor - 1.0)).powf(dim / (dim - 2.0));
                base.map(|(i, _)| plain(self.theta * stretch, i)).collect()
            }
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_seq } => base
                .map(|(_, f)| {
                    let rotations = *original_max_seq as f64 * f / TAU;
                    let width = high_freq_factor - low_freq_factor;
                    let kept = ((rotations - low_freq_factor) / width).clamp(0.0, 1.0);
                    blend(f, *factor, kept)
                })
                .collect(),
            Scaling::Yarn { factor, .. } => {
                let [low, high] = self.yarn_bounds();
                let kept = |i: usize| 1.0 - ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                base.map(|(i, f)| blend(f, *factor, kept(i))).collect()
            }
            Scaling::LongRope { short, long, original_max_seq } => {
                let factors = if seq > *original_max_seq { long } else { short };
                base.zip(factors).map(|((_, f), factor)| f / factor).collect()
            }
        }
    }

    /// Returns the longest sequence with the frequencies of every shorter one; none if the length has no
    /// effect. A longer sequence needs other frequencies than the keys rotated before.
    pub fn fixed_until(&self) -> Option<usize> {
        match &self.scaling {
            Scaling::Dynamic { max_seq, .. } => Some(*max_seq),
            Scaling::LongRope { short, long, original_max_seq } => {
                (short != long).then_some(*original_max_seq)
            }
            _ => None,
        }
    }

    /// Returns the bounds of YaRN's blend, as pair indices.
    fn yarn_bounds(&self) -> [f64; 2] {
        let Scaling::Yarn { beta_fast, beta_slow, original_max_seq, truncate, .. } = self.scaling
        else {
            return [0.0, 0.0];
        };
        let pair = |rotations: f64| {
            let wavelengths = original_max_seq as f64 / (rotations * TAU);
            self.dim as f64 * wavelengths.ln() / (2.0 * self.theta.ln())
        };
        let [mut low, mut high] = [beta_fast, beta_slow].map(pair);
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let [low, high] = [low.max(0.0), high.min(self.dim as f64 - 1.0)];
        [low, if low == high { high + 0.001 } else { high }]
    }

    /// Reads the rope of a whole model, from `rope_scaling` and `rope_theta` or from `rope_parameters`.
    pub(crate) fn of_model(fields: &Fields<'_>, model: Model) -> Result<Self, Error> {
        let old = fields.section("rope_scaling")?;
        let new = fields.section("rope_parameters")?;
        if let (Some(_), Some(new)) = (&old, fields.value("rope_parameters"))
            && Some(new) != fields.value("rope_scaling")
        {
            return Err(fields.contradiction("rope_scaling", "rope_parameters", new.clone()));
        }
        Self::read(fields, "rope_theta", old.or(new).as_ref(), model)
    }

    /// Reads one rope; `theta` names the field of its base outside the section.
    pub(crate) fn read(
        fields: &Fields<'_>,
        theta: &str,
        section: Option<&Fields<'_>>,
        model: Model,
    ) -> Result<Self, Error> {
        let base = both(fields, theta, section, "rope_theta", |fields, name| {
            fields.optional_positive(name)
        })?;
        let part = "partial_rotary_factor";
        let part = both(fields, part, section, part, |fields, name| {
            fields.optional(name, "a number above 0, at most 1", |value| {
                value.as_f64().filter(|part| *part > 0.0 && *part <= 1.0)
            })
        })?;
        let dim = (model.head_dim as f64 * part.unwrap_or(1.0)) as usize;
        if dim == 0 || dim % 2 != 0 {
            return Err(odd(fields, section, model.head_dim));
        }
        let theta = base.unwrap_or(model.theta);
        let (scaling, context) = (Scaling::None, None);
        let rope = Self { theta, dim, scaling, attention_factor: 1.0, context };
        match section {
            Some(section) => rope.scaled(fields, section, model),
            None => Ok(rope),
        }
    }

    fn scaled(
        self,
        fields: &Fields<'_>,
        section: &Fields<'_>,
        model: Model,
    ) -> Result<Self, Error> {
        let original = "original_max_position_embeddings";
        let original_max_seq = both(fields, original, Some(section), original, |fields, name| {
            fields.optional_size(name)
        })?;
        let factor = section.optional_positive("factor")?;
        let kind = kind(section)?;
        // The ratio replaces the factor if the file omits it.
        let ratio = original_max_seq.map(|original| model.max_seq as f64 / original as f64);
        let given = |need: Option<f64>| need.ok_or_else(|| section.missing("factor"));
        let mut context = None;
        let mut stretched = |factor: f64| {
            let original = original_max_seq.unwrap_or(model.max_seq);
            context = Some((original as f64 * factor) as usize);
            factor
        };
        let (scaling, attention_factor, known): (_, _, &[&str]) = match kind {
            "default" => (Scaling::None, 1.0, &[original]),
            "linear" => {
                let factor = stretched(given(factor)?);
                (Scaling::Linear { factor }, 1.0, &["factor", original])
            }
            "dynamic" => {
                let scaling = Scaling::Dynamic { factor: given(factor)?, max_seq: model.max_seq };
                (scaling, 1.0, &["factor", original])
            }
            "llama3" => {
                let original_max_seq = original_max_seq.unwrap_or(model.max_seq);
                (llama3(section, given(factor)?, original_max_seq)?, 1.0, LLAMA3)
            }
            "yarn" => {
                let factor = stretched(given(factor.or(ratio))?);
                let original_max_seq = original_max_seq.unwrap_or(model.max_seq);
                let scaling = yarn(section, factor, original_max_seq)?;
                (scaling, yarn_attention_factor(section, factor)?, YARN)
            }
            "longrope" | "su" => {
                let original_max_seq = original_max_seq.ok_or_else(|| fields.missing(original))?;
                let factor = given(factor.or(ratio))?;
                let scaling = longrope(section, self.dim, original_max_seq)?;
                (scaling, long_attention_factor(section, factor, original_max_seq)?, LONGROPE)
            }
            _ => return Err(section.unsupported(kind_field(section), KNOWN)),
        };
        let common = ["rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"];
        match section.names().find(|name| !known.contains(name) && !common.contains(name)) {
            Some(stray) => Err(section.unsupported(stray, &known.join(", "))),
            None => Ok(Self { scaling, attention_factor, context, ..self }),
        }
    }
}

const LLAMA3: &[&str] =
    &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"];
const YARN: &[&str] = &[
    "factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
];
const LONGROPE: &[&str] = &[
    "factor",
    "short_factor",
    "long_factor",
    "original_max_position_embeddings",
    "attention_factor",
];

/// Returns the error for a rotary dimension that is odd or 0, naming the field that sets it.
fn odd(fields: &Fields<'_>, section: Option<&Fields<'_>>, head_dim: usize) -> Error {
    let part = "partial_rotary_factor";
    let mut holders = section.into_iter().chain([fields]);
    if let Some(holder) = holders.find(|holder| holder.value(part).is_some()) {
        let share = "a share that rotates an even number above 0 of the";
        return holder.malformed(part, &format!("{share} {head_dim} dimensions of a head"));
    }
    match fields.value("head_dim") {
        Some(_) => fields.malformed("head_dim", "an even number"),
        None => fields.malformed("hidden_size", "an even multiple of `num_attention_heads`"),
    }
}

/// Returns a frequency that keeps the share `kept`, with the rest divided by `factor`.
fn blend(frequency: f64, factor: f64, kept: f64) -> f64 {
    kept * frequency + (1.0 - kept) * frequency / factor
}

/// Reads a field that may stand outside the section or within; two different values are an error.
fn both<T: PartialEq>(
    fields: &Fields<'_>,
    outside: &str,
    section: Option<&Fields<'_>>,
    within: &str,
    read: impl Fn(&Fields<'_>, &str) -> Result<Option<T>, Error>,
) -> Result<Option<T>, Error> {
    let outer = read(fields, outside)?;
    let Some(section) = section else { return Ok(outer) };
    match (outer, read(section, within)?) {
        (Some(outer), Some(inner)) if outer != inner => {
            let value = section.value(within).cloned().unwrap_or_default();
            Err(fields.contradiction(outside, section.name(within), value))
        }
        (outer, inner) => Ok(inner.or(outer)),
    }
}

fn kind_field(section: &Fields<'_>) -> &'static str {
    if section.value("rope_type").is_some() { "rope_type" } else { "type" }
}

/// Returns the scaling type of a section. A factor without a type is ambiguous, and an error.
fn kind<'a>(section: &Fields<'a>) -> Result<&'a str, Error> {
    match (section.text("rope_type")?, section.text("type")?) {
        (Some(new), Some(old)) if new != old => {
            Err(section.contradiction("rope_type", section.name("type"), old))
        }
        (None, None) if section.value("factor").is_some() => Err(section.missing("rope_type")),
        (new, old) => Ok(new.or(old).unwrap_or("default")),
    }
}

fn llama3(section: &Fields<'_>, factor: f64, original_max_seq: usize) -> Result<Scaling, Error> {
    let [low_freq_factor, high_freq_factor] =
        [section.positive("low_freq_factor")?, section.positive("high_freq_factor")?];
    if low_freq_factor >= high_freq_factor {
        let other = section.name("high_freq_factor");
        return Err(section.contradiction("low_freq_factor", other, high_freq_factor));
    }
    Ok(Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_seq })
}

fn yarn(section: &Fields<'_>, factor: f64, original_max_seq: usize) -> Result<Scaling, Error> {
    Ok(Scaling::Yarn {
        factor,
        beta_fast: section.optional_positive("beta_fast")?.unwrap_or(32.0),
        beta_slow: section.optional_positive("beta_slow")?.unwrap_or(1.0),
        original_max_seq,
        truncate: section.flag("truncate")?.unwrap_or(true),
    })
}

fn yarn_attention_factor(section: &Fields<'_>, factor: f64) -> Result<f64, Error> {
    let given = section.optional_positive("attention_factor")?;
    let number = |field: &str| {
        let zero_is_none = |value: &Value| value.as_f64().filter(|number| *number >= 0.0);
        section.optional(field, "a number of 0 or more", zero_is_none)
    };
    let [mscale, all] =
        [number("mscale")?, number("mscale_all_dim")?].map(|m| m.filter(|m| *m > 0.0));
    let scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
    Ok(given.unwrap_or(match (mscale, all) {
        (Some(mscale), Some(all)) => scale(mscale) / scale(all),
        _ => scale(1.0),
    }))
}

fn longrope(section: &Fields<'_>, dim: usize, original_max_seq: usize) -> Result<Scaling, Error> {
    let factors = |field: &str| {
        let expected = format!("a list of {} numbers above 0", dim / 2);
        let list = section.list(field)?.ok_or_else(|| section.missing(field))?;
        let number = |value: &Value| value.as_f64().filter(|number| *number > 0.0);
        let factors: Option<Vec<f64>> = list.iter().map(number).collect();
        factors
            .filter(|factors| factors.len() == dim / 2)
            .ok_or_else(|| section.malformed(field, &expected))
    };
    let [short, long] = [factors("short_factor")?, factors("long_factor")?];
    Ok(Scaling::LongRope { short, long, original_max_seq })
}

fn long_attention_factor(
    section: &Fields<'_>,
    factor: f64,
    original_max_seq: usize,
) -> Result<f64, Error> {
    let usual = if factor <= 1.0 {
        1.0
    } else {
        (1.0 + factor.ln() / (original_max_seq as f64).ln()).sqrt()
    };
    Ok(section.optional_positive("attention_factor")?.unwrap_or(usual))
}
