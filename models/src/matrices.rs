//! The weight matrices of a decoder, and its parameter count.

use crate::DecoderConfig;
use crate::names::{Part, Slot};

/// A weight matrix: out [tokens, n] = in [tokens, k] · weight [n, k]ᵀ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Linear {
    /// Usual name in checkpoints, such as `q_proj`; `qkv_proj` and `gate_up_proj` if fused.
    pub name: &'static str,
    /// Number of output features.
    pub n: usize,
    /// Number of input features.
    pub k: usize,
    /// True if a bias `[n]` is added.
    pub bias: bool,
    /// True if every layer has one; false for one per model.
    pub per_layer: bool,
}

/// Fusion of the matrices that read the same input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fusion {
    /// One matrix per projection.
    Separate,
    /// Query, key and value form one matrix; gate and up form another.
    Fused,
}

impl DecoderConfig {
    /// Returns every weight matrix in the order of the forward pass. The output projection is last, tied or
    /// not.
    pub fn linears(&self, fusion: Fusion) -> Vec<Linear> {
        let mut linears: Vec<Linear> = Vec::new();
        for (part, shape) in self.parts() {
            let Some((separate, fused)) = names(part) else { continue };
            let bias = self.biased(Slot::Layer(0, part));
            let (n, k) = (shape[0], shape[1]);
            match linears.last_mut() {
                Some(last) if fusion == Fusion::Fused && last.name == fused => last.n += n,
                _ => {
                    let name = if fusion == Fusion::Fused { fused } else { separate };
                    linears.push(Linear { name, n, k, bias, per_layer: true });
                }
            }
        }
        let (n, k) = (self.vocab, self.hidden);
        linears.push(Linear { name: "lm_head", n, k, bias: false, per_layer: false });
        linears
    }

    /// Returns the number of trained values: matrices, biases, embedding and norms. Tied embeddings count
    /// once.
    pub fn parameters(&self) -> u64 {
        let wide = |size: &usize| *size as u128; // Absurd sizes overflow 64 bits.
        let total: u128 =
            self.params().iter().map(|param| param.shape.iter().map(wide).product::<u128>()).sum();
        u64::try_from(total).unwrap_or(u64::MAX)
    }

    /// Returns the bytes of all parameters.
    ///
    /// # Units
    /// `bits` per parameter may be a fraction: 4 bits with one `f32` per 64 values are 4.5.
    pub fn weight_bytes(&self, bits: f64) -> u64 {
        (self.parameters() as f64 * bits / 8.0).ceil() as u64
    }
}

/// Returns the name of a matrix by itself, and fused; none for a part that is no matrix.
fn names(part: Part) -> Option<(&'static str, &'static str)> {
    Some(match part {
        Part::Query => ("q_proj", "qkv_proj"),
        Part::Key => ("k_proj", "qkv_proj"),
        Part::Value => ("v_proj", "qkv_proj"),
        Part::Out => ("o_proj", "o_proj"),
        Part::Gate => ("gate_proj", "gate_up_proj"),
        // Without a gate, the part is not fused.
        Part::Up => ("up_proj", "gate_up_proj"),
        Part::Down => ("down_proj", "down_proj"),
        _ => return None,
    })
}
