//! Device memory of a model, computed before it is loaded.
//!
//! ```text
//! weights        every parameter in the compute dtype; quantised ones in 4 bits with an 8-bit absmax per block of
//!                64, in 8 bits with an f32 absmax per row, or in 8 bits with an f16 scale per 32 values (Q8_0)
//! kv_cache       2 · layers · kv_heads · head_dim · batch · context, in the compute dtype or in bytes with an f32
//!                per position and head; RoPE tables; a bit per token of the vocabulary that occurred
//! trained, gradients, optimizer    of training (`train.rs`)
//! activations    peak of live bytes while rows pass the layers (`layers.rs`) or a step is trained (`train.rs`)
//! workspace      a dense copy of the largest quantised weight, for prefill matmuls
//! graph          all tensors of a captured decode step, which lie outside the pages of prompts
//! pool_overhead  a page of small buffers, and the rounding of pages and of buffers
//! ```
//!
//! Each op states the memory of a call next to its function. This module calls these functions in the order
//! of the decoder.

mod layers;
#[cfg(test)]
mod tests;
mod train;

use burn::tensor::{DType, FloatDType};
use ops::{GRAPH_OVERHEAD, MemoryProfile, pool_overhead, seen_bytes};
use quant::WeightFormat;
use serde::Serialize;

use crate::decoder::PagedCache;
use crate::names::Slot;
use crate::{DecoderConfig, Error, Ffn, Param, Side, Workload};
use layers::Rows;

/// Device memory of a model, part by part, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Footprint {
    /// Parameters of the model.
    pub weights: u128,
    /// Keys and values, tables of RoPE, and tokens that occurred.
    pub kv_cache: u128,
    /// Values of a trained adapter, or master weights in f32 next to weights in 16 bits.
    pub trained: u128,
    /// Gradients of all trained values.
    pub gradients: u128,
    /// Moments of the optimizer.
    pub optimizer: u128,
    /// State of training in host memory, which is no part of the total.
    pub host: u128,
    /// Activations that layers keep between forward and backward pass.
    pub saved: u128,
    /// Number of layers that keep them.
    pub saved_layers: usize,
    /// Peak of other live activations.
    pub activations: u128,
    /// Dense copy of the largest quantised weight.
    pub workspace: u128,
    /// Captured graph of a decode step.
    pub graph: u128,
    /// Page of small buffers, and the rounding of pages and buffers.
    pub pool_overhead: u128,
}

/// Precision of a model on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelPrecision {
    /// Compute dtype.
    pub dtype: FloatDType,
    /// See [`LoadOptions::tf32`](crate::LoadOptions::tf32).
    pub tf32: bool,
    /// Weight format of the layers; none for dense matrices.
    pub weight_format: Option<WeightFormat>,
    /// Format of the KV cache.
    pub kv: KvFormat,
    /// Most columns of an unmerged LoRA of one projection: the sum of its modules' ranks; 0 without one.
    pub lora_columns: usize,
}

/// Format of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KvFormat {
    /// In the compute dtype.
    #[default]
    Float,
    /// A byte per value, and an f32 per position and head: about half the size of 16 bits.
    Int8,
}

impl KvFormat {
    /// All formats.
    pub const ALL: [Self; 2] = [Self::Float, Self::Int8];

    /// Returns the name of the format on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float => "float",
            Self::Int8 => "int8",
        }
    }
}

impl Footprint {
    /// Returns the bytes of all parts on the device.
    pub const fn total(&self) -> u128 {
        self.weights + self.kept() + self.transient()
    }

    /// Returns the bytes that live as long as a session or a trainer.
    pub const fn kept(&self) -> u128 {
        self.kv_cache + self.graph + self.trained + self.gradients + self.optimizer + self.saved
    }

    /// Returns the bytes that are live only during a forward or backward pass.
    pub const fn transient(&self) -> u128 {
        self.activations + self.workspace + self.pool_overhead
    }
}

impl ModelPrecision {
    fn size(self) -> u128 {
        DType::from(self.dtype).size() as u128
    }

    /// Returns the bytes of one key or value vector of a head.
    pub(crate) fn kv_bytes(self, head_dim: usize) -> u128 {
        match self.kv {
            KvFormat::Float => head_dim as u128 * self.size(),
            KvFormat::Int8 => head_dim as u128 + 4,
        }
    }

    /// Returns the bytes of a layer's matrix `[n, k]`.
    pub(crate) fn matrix_bytes(self, shape: &[usize]) -> u128 {
        match (self.weight_format, shape) {
            (Some(format), &[n, k]) => format.scheme().bytes([n, k]),
            _ => values_of(shape) * self.size(),
        }
    }

    /// Returns true if gate and up of a feed-forward block are one matrix.
    fn joins_gate(self, ffn: Ffn) -> bool {
        ffn == Ffn::Gated && self.weight_format.is_some_and(|format| format.info().gated)
    }
}

/// Returns the bytes of one parameter.
fn param_bytes(precision: ModelPrecision, param: &Param) -> u128 {
    let layers = param.slot.is_matrix() && param.slot != Slot::Head;
    match param.side == Side::Weight && layers {
        true => precision.matrix_bytes(&param.shape),
        false => values_of(&param.shape) * precision.size(),
    }
}

fn values_of(shape: &[usize]) -> u128 {
    shape.iter().map(|size| *size as u128).product()
}

impl DecoderConfig {
    /// Returns the memory of the model for a workload. `weights` are the bytes of all weights: see
    /// [`DecoderConfig::loaded_bytes`] and [`on_device`](crate::on_device).
    ///
    /// # Errors
    /// The errors of [`DecoderConfig::factors`] for an invalid adapter.
    pub fn footprint(
        &self,
        precision: ModelPrecision,
        weights: u128,
        workload: &Workload,
        profile: MemoryProfile,
    ) -> Result<Footprint, Error> {
        if let Some(training) = &workload.training {
            let rows = workload.batch as u128 * workload.context as u128;
            return Rows::new(self, precision, profile, rows).trained(weights, training);
        }
        let rows = Rows::of_prompts(self, precision, profile, workload);
        let prompts = rows.prefill(workload);
        let graph = match profile.captures {
            true => rows.step(workload).in_graph + GRAPH_OVERHEAD,
            false => 0,
        };
        Ok(Footprint {
            weights,
            kv_cache: self.shared_cache_bytes(precision, workload)
                + self.rope_table_bytes(workload.context)
                + workload.batch as u128 * seen_bytes(self.vocab as u128),
            activations: prompts.peak,
            workspace: prompts.dense_weight,
            graph,
            pool_overhead: pool_overhead(prompts.peak + prompts.dense_weight, self.buffers()),
            ..Footprint::default()
        })
    }

    /// Returns the bytes of the largest buffer: a weight, the keys of a layer, or activations. Fused QKV
    /// counts as one weight, and so do gate and up in 4 bits.
    pub fn largest_buffer_bytes(
        &self,
        precision: ModelPrecision,
        workload: &Workload,
        profile: MemoryProfile,
    ) -> u128 {
        let [q, kv] = self.qkv_rows();
        let params = self.params();
        let params = params.iter().map(|param| param_bytes(precision, param));
        let qkv = precision.matrix_bytes(&[q + 2 * kv, self.hidden]);
        let both =
            if precision.joins_gate(self.ffn) { 2 * self.ffn_hidden } else { self.ffn_hidden };
        let both = precision.matrix_bytes(&[both, self.hidden]);
        let keys = self.kv_heads as u128 * precision.kv_bytes(self.head_dim);
        let keys = keys * workload.batch as u128 * workload.context as u128;
        let rows = Rows::of_prompts(self, precision, profile, workload);
        let logits = workload.batch as u128 * 4 * self.vocab as u128;
        let dense = rows.prefill(workload).dense_weight;
        let rest = [qkv, both, keys, rows.widest(), logits, dense];
        params.chain(rest).max().unwrap_or(0)
    }

    /// Returns the bytes of all parameters.
    pub fn loaded_bytes(&self, precision: ModelPrecision) -> u128 {
        self.params().iter().map(|param| param_bytes(precision, param)).sum()
    }

    /// Returns the bytes of keys and values.
    pub fn cache_bytes(&self, precision: ModelPrecision, batch: usize, positions: usize) -> u128 {
        let heads = 2 * self.layers.len() as u128 * self.kv_heads as u128;
        heads * precision.kv_bytes(self.head_dim) * batch as u128 * positions as u128
    }

    /// Returns the bytes of keys and values; sequences that share positions lie in pages.
    fn shared_cache_bytes(&self, precision: ModelPrecision, workload: &Workload) -> u128 {
        let Workload { batch, context, shared, .. } = *workload;
        let cache = |batch, positions| self.cache_bytes(precision, batch, positions);
        match shared {
            None => cache(batch, context),
            Some(shared) => {
                // One page more is that of rows without a sequence.
                let (each, one) = (PagedCache::whole_pages(context), PagedCache::whole_pages(1));
                (cache(batch, each) + cache(1, one)).saturating_sub(cache(1, shared))
            }
        }
    }

    fn rope_table_bytes(&self, positions: usize) -> u128 {
        self.ropes.iter().map(|rope| 4 * rope.dim as u128 * positions as u128).sum()
    }

    /// Returns the number of separately allocated buffers.
    const fn buffers(&self) -> u128 {
        // Codes, two levels of absmax and a bias of each of seven matrices, norms, keys and values.
        const OF_LAYER: usize = 40;
        (OF_LAYER * self.layers.len() + OF_LAYER) as u128
    }

    /// Returns how many of `rows` get logits at once, if all rows need them. The logits take no more memory
    /// than the layers did; the result is at least one.
    pub(crate) fn rows_with_logits(&self, precision: ModelPrecision, rows: usize) -> usize {
        let least = Rows::new(self, precision, MemoryProfile::LEAST, rows as u128);
        let fitting = least.layer_peak(rows) / least.logits_bytes();
        usize::try_from(fitting).unwrap_or(rows).clamp(1, rows.max(1))
    }
}
