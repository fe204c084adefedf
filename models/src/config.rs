//! What a decoder computes: one description for every family.
//!
//! ```text
//! x = embedding[token]·embedding_scale (+ positions[p])
//! for each layer:
//!   x += post(out(attention(rope(qk_norm(q, k)), v)))       q, k, v of norm(x)
//!   x += post(down(activation(gate(y))·up(y)))              y = norm(x); without a gate, activation(up(y))
//! logits = softcap(head(norm(x)))
//! ```

pub use ops::{Activation, NormKind};
use serde_json::Value;

use crate::fields::{Fields, json};
use crate::{Error, Rope, Scaling};

/// What a decoder computes. Everything that changes an answer is here.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// Whose `config.json` it was, and what its tensors are called.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width inside of the feed-forward block.
    pub ffn_hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; `heads * head_dim` need not be `hidden`.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Positions the model was made for, with the stretch of its rope, or that [`DecoderConfig::with_context`] set.
    pub max_seq: usize,
    /// In the order that a token passes them.
    pub layers: Vec<Layer>,
    /// The different ropes of the layers.
    pub ropes: Vec<Rope>,
    /// The same for all norms.
    pub norm: Norm,
    /// Where layers have norms.
    pub placement: Placement,
    /// Queries and keys are normalised, head by head, before they turn.
    pub qk_norm: bool,
    /// Scores s become softcap·tanh(s / softcap).
    pub softcap: Option<f64>,
    /// The query, key and value projections have biases.
    pub qkv_bias: bool,
    /// The output projection of attention has one.
    pub out_bias: bool,
    /// Whether the feed-forward block has a gate.
    pub ffn: Ffn,
    /// Of the gate, or of what goes up where there is none.
    pub activation: Activation,
    /// The matrices of the feed-forward block have biases.
    pub ffn_bias: bool,
    /// What embeddings are multiplied by, rounded to the dtype that the model computes in.
    pub embedding_scale: Option<f64>,
    /// A trained vector is added for every position, up to `max_seq`.
    pub learned_positions: bool,
    /// Logits l become logit_softcap·tanh(l / logit_softcap).
    pub logit_softcap: Option<f64>,
    /// The output projection is the embedding itself.
    pub tie_embeddings: bool,
    /// Where products with weights in 8 bits round what they read to 8 bits as well, columns with a value of so much and
    /// above are not: bitsandbytes' `llm_int8_threshold`. None where the file does not say 8 bits.
    pub int8_threshold: Option<f64>,
}

/// A family of decoders, by the `model_type` of its `config.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Family(pub(crate) &'static str);

impl Family {
    /// Its name in `config.json`.
    pub const fn model_type(self) -> &'static str {
        self.0
    }
}

/// What layers differ in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Layer {
    /// Keys at this distance and further are hidden; none sees all before it.
    pub window: Option<usize>,
    /// Index into [`DecoderConfig::ropes`]; none where positions are learned.
    pub rope: Option<usize>,
    /// What scores are multiplied by.
    pub scale: f64,
}

/// How vectors are normalised.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// Whether the mean is taken off, and what the weight means.
    pub kind: NormKind,
    /// Added to the mean square, or to the variance.
    pub eps: f64,
}

/// Where a layer normalises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// What attention and feed-forward read.
    Before,
    /// Also what they add to the residual stream.
    BeforeAndAfter,
}

/// The feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ffn {
    /// down(activation(gate(y))·up(y))
    Gated,
    /// down(activation(up(y)))
    Plain,
}

/// Reads a field that names an activation; none where it is absent.
pub(crate) fn activation(fields: &Fields<'_>, field: &str) -> Result<Option<Activation>, Error> {
    Ok(match fields.text(field)? {
        None => None,
        Some("silu" | "swish") => Some(Activation::Silu),
        Some("gelu") => Some(Activation::Gelu),
        Some("gelu_new" | "gelu_pytorch_tanh" | "gelu_fast") => Some(Activation::GeluTanh),
        Some(_) => {
            let known = "silu, swish, gelu, gelu_new, gelu_pytorch_tanh, gelu_fast";
            return Err(fields.unsupported(field, known));
        }
    })
}

/// What bitsandbytes takes where nothing is said.
pub(crate) const THRESHOLD: f64 = 6.0;

/// Bits that `quantization_config` says matrices have.
pub(crate) fn claimed_bits(text: &str) -> Option<u32> {
    let value = json("config.json", text).ok()?;
    let quantization = value.get("quantization_config")?;
    let says =
        |bits: &u32| quantization.get(format!("load_in_{bits}bit")) == Some(&Value::Bool(true));
    [4, 8].into_iter().find(says)
}

impl DecoderConfig {
    /// Number of layers of which the first ones have one of each kind.
    pub(crate) fn layers_of_each_kind(&self) -> usize {
        let kind = |at: usize| (self.layers[at].window, self.layers[at].rope);
        let new = |at: &usize| !(0..*at).any(|earlier| kind(earlier) == kind(*at));
        (0..self.layers.len()).rfind(new).map_or(0, |at| at + 1)
    }

    /// Positions that a sequence may have; none where the ropes stretch to any length.
    pub fn context(&self) -> Option<usize> {
        let stretches = |rope: &Rope| matches!(rope.scaling, Scaling::Dynamic { .. });
        (!self.ropes.iter().any(stretches)).then_some(self.max_seq)
    }

    /// Sets how many positions a sequence may have. Rope turns any; training may not have seen those past `max_seq`.
    ///
    /// # Errors
    /// [`Error::LearnedPositions`] for more than the model has learned vectors for.
    pub fn with_context(self, positions: usize) -> Result<Self, Error> {
        match self.learned_positions && positions > self.max_seq {
            true => Err(Error::LearnedPositions { need: positions, max_seq: self.max_seq }),
            // The vectors that are learned stay.
            false if self.learned_positions => Ok(self),
            false => Ok(Self { max_seq: positions, ..self }),
        }
    }

    /// # Errors
    /// [`Error::Token`] for one that the vocabulary does not have.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<(), Error> {
        let vocab = self.vocab;
        match tokens.iter().find(|id| **id as usize >= vocab) {
            Some(id) => Err(Error::Token { id: *id, vocab }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
