//! The matrix products of a decoder, and how large it is.

use crate::DecoderConfig;
use crate::names::{Part, Slot};

/// One weight matrix: out [tokens, n] = in [tokens, k] · weight [n, k]ᵀ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Linear {
    /// What most checkpoints call it, such as `q_proj`; `qkv_proj` and `gate_up_proj` when fused.
    pub name: &'static str,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// Whether a vector `[n]` is added to the product.
    pub bias: bool,
    /// Once in every layer, or once in the model.
    pub per_layer: bool,
}

/// Whether matrices that read the same input are one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fusion {
    /// Each is its own.
    Separate,
    /// Query, key and value are one matrix, gate and up another.
    Fused,
}

impl DecoderConfig {
    /// Every weight matrix that a token passes, in the order it does; the output projection is
    /// last, tied or not.
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

    /// Trained values, tied embeddings counted once: matrices, biases, embedding and norms.
    pub fn parameters(&self) -> u64 {
        let wide = |size: &usize| *size as u128; // Absurd sizes overflow 64 bits.
        let total: u128 =
            self.params().iter().map(|param| param.shape.iter().map(wide).product::<u128>()).sum();
        u64::try_from(total).unwrap_or(u64::MAX)
    }

    /// Bytes of all parameters.
    ///
    /// # Units
    /// `bits` per parameter, which may be a fraction: 4 bits with one `f32` for every 64 are 4.5.
    pub fn weight_bytes(&self, bits: f64) -> u64 {
        (self.parameters() as f64 * bits / 8.0).ceil() as u64
    }
}

/// A matrix by itself, and fused; none for a part that is no matrix.
fn names(part: Part) -> Option<(&'static str, &'static str)> {
    Some(match part {
        Part::Query => ("q_proj", "qkv_proj"),
        Part::Key => ("k_proj", "qkv_proj"),
        Part::Value => ("v_proj", "qkv_proj"),
        Part::Out => ("o_proj", "o_proj"),
        Part::Gate => ("gate_proj", "gate_up_proj"),
        // Alone where there is no gate.
        Part::Up => ("up_proj", "gate_up_proj"),
        Part::Down => ("down_proj", "down_proj"),
        _ => return None,
    })
}
