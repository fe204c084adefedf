//! Computation of a decoder: one description for every family.
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

/// Computation of a decoder. It contains everything that changes the logits.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// Family of the `config.json`, which names its tensors.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Inner width of the feed-forward block.
    pub ffn_hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; `heads * head_dim` need not be `hidden`.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Context length of the model, with the scaling of its rope, or set by [`DecoderConfig::with_context`].
    pub max_seq: usize,
    /// Layers, in the order of the forward pass.
    pub layers: Vec<Layer>,
    /// Distinct ropes of the layers; [`Layer::rope`] is an index into them.
    pub ropes: Vec<Rope>,
    /// Kind and epsilon of all norms.
    pub norm: Norm,
    /// Positions of the norms in a layer.
    pub placement: Placement,
    /// True if queries and keys are normalised per head before RoPE.
    pub qk_norm: bool,
    /// Soft cap of attention scores s: softcap·tanh(s / softcap).
    pub softcap: Option<f64>,
    /// True if the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// True if the output projection of attention has a bias.
    pub out_bias: bool,
    /// Kind of the feed-forward block.
    pub ffn: Ffn,
    /// Activation of the gate, or of the up projection in a block without a gate.
    pub activation: Activation,
    /// True if the matrices of the feed-forward block have biases.
    pub ffn_bias: bool,
    /// Factor of embeddings, rounded to the compute dtype of the model.
    pub embedding_scale: Option<f64>,
    /// True if a learned vector is added at every position, up to `max_seq`.
    pub learned_positions: bool,
    /// Soft cap of logits l: logit_softcap·tanh(l / logit_softcap).
    pub logit_softcap: Option<f64>,
    /// True if the output projection is the embedding.
    pub tie_embeddings: bool,
    /// Outlier threshold of int8 matmuls: bitsandbytes' `llm_int8_threshold`. If activations are rounded to 8
    /// bits, columns with a magnitude of this or above are not. None if the file does not load in 8 bits.
    pub int8_threshold: Option<f64>,
}

/// A family of decoders, identified by the `model_type` of its `config.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Family(pub(crate) &'static str);

impl Family {
    /// Returns its name in `config.json`.
    pub const fn model_type(self) -> &'static str {
        self.0
    }
}

/// Attributes that differ between layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Layer {
    /// Sliding window: keys at this distance or further are masked; none attends to all earlier keys.
    pub window: Option<usize>,
    /// Index into [`DecoderConfig::ropes`]; none for learned positions.
    pub rope: Option<usize>,
    /// Factor of attention scores.
    pub scale: f64,
}

/// Normalisation of vectors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// RMS norm, RMS norm with weight + 1, or layer norm.
    pub kind: NormKind,
    /// Epsilon, added to the mean square or to the variance.
    pub eps: f64,
}

/// Positions of the norms in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Norms before attention and before the feed-forward block.
    Before,
    /// Norms before both blocks and on their outputs, before the residual addition.
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

/// Reads a field that names an activation; none if it is absent.
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

/// Default `llm_int8_threshold` of bitsandbytes.
pub(crate) const THRESHOLD: f64 = 6.0;

/// Returns the bits per weight that `quantization_config` claims.
pub(crate) fn claimed_bits(text: &str) -> Option<u32> {
    let value = json("config.json", text).ok()?;
    let quantization = value.get("quantization_config")?;
    let says =
        |bits: &u32| quantization.get(format!("load_in_{bits}bit")) == Some(&Value::Bool(true));
    [4, 8].into_iter().find(says)
}

impl DecoderConfig {
    /// Returns the number of leading layers that contain one of each kind.
    pub(crate) fn layers_of_each_kind(&self) -> usize {
        let kind = |at: usize| (self.layers[at].window, self.layers[at].rope);
        let new = |at: &usize| !(0..*at).any(|earlier| kind(earlier) == kind(*at));
        (0..self.layers.len()).rfind(new).map_or(0, |at| at + 1)
    }

    /// Returns the most positions of a sequence; none if dynamic RoPE scaling allows any length.
    pub fn context(&self) -> Option<usize> {
        let stretches = |rope: &Rope| matches!(rope.scaling, Scaling::Dynamic { .. });
        (!self.ropes.iter().any(stretches)).then_some(self.max_seq)
    }

    /// Sets the most positions of a sequence. RoPE works at any position, but training may not have covered
    /// those past `max_seq`.
    ///
    /// # Errors
    /// [`Error::LearnedPositions`] for more tokens than the model has learned position embeddings.
    pub fn with_context(self, positions: usize) -> Result<Self, Error> {
        match self.learned_positions && positions > self.max_seq {
            true => Err(Error::LearnedPositions { need: positions, max_seq: self.max_seq }),
            // The learned vectors stay as they are.
            false if self.learned_positions => Ok(self),
            false => Ok(Self { max_seq: positions, ..self }),
        }
    }

    /// Checks that all tokens are in the vocabulary.
    ///
    /// # Errors
    /// [`Error::Token`] for the first token past the vocabulary.
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
