//! Device memory of training an adapter.
//!
//! ```text
//! activations  the largest of these:
//!                loss        the input of every layer, and the logits of some rows, four times in f32: logits,
//!                            exponentials, gradient, and the factor that the gradient is multiplied by
//!                backward    of the uppermost layer: inputs of the layers below, the tensors that its graph keeps,
//!                            three times the input of its last matmul, and a dense copy of that weight if it is
//!                            quantised; or five times, if gate and up are one matrix in 4 bits
//!                step        the gradient twice while its parts are concatenated; AdamW's intermediates
//! ```

use ops::{
    MemoryProfile, activate_memory, attention_memory, linear_memory, norm_memory, pool_overhead,
};

use super::Footprint;
use super::layers::Rows;
use crate::{Error, Ffn, Recompute, Training};

impl Rows<'_> {
    /// Returns the memory of training, with weights of `weights` bytes.
    pub(super) fn trained(self, weights: u128, training: &Training) -> Result<Footprint, Error> {
        let Training { lora, accumulates, recompute } = training;
        let factors = self.config.factors(lora)?;
        let values = factors.iter().map(|own| own.sizes(lora.rank).iter().sum::<usize>());
        let adapter = 4 * values.sum::<usize>() as u128;
        let lowest = factors.iter().map(|own| own.layer).min().unwrap_or(0);
        let trained_layers = (self.config.layers.len() - lowest) as u128;
        let (x, inner) = (self.wide(self.hidden), self.wide(self.inner));
        let accumulated = if *accumulates { adapter } else { 0 };
        let (kept, graph) = match recompute {
            Recompute::Layers | Recompute::Norms => (trained_layers * x, self.saved() - x),
            Recompute::Nothing => (trained_layers * self.saved(), 0),
        };
        let loss = kept + x + self.loss_bytes() + accumulated;
        // The gradient dequantises the weight for any number of rows.
        let dense = Self { profile: MemoryProfile { max_fused_rows: 0, ..self.profile }, ..self };
        let dense = dense.matmul([self.hidden, self.inner]).dense_weight;
        // Each half of a joint gate and up has a gradient of the full width, zero except in its half. Their
        // sum follows.
        let joint = if self.precision.joins_gate(self.config.ffn) { 5 * inner } else { 0 };
        // The output of the graph, its upstream gradient, their product, and ones.
        let given = 4 * x;
        let backward = kept + graph + given + (3 * inner + dense).max(joint) + accumulated;
        let step = (4 * adapter).max(2 * adapter + accumulated);
        let activations = loss.max(backward).max(step);
        Ok(Footprint {
            weights,
            adapter,
            optimizer: 2 * adapter,
            activations,
            // A step writes the adapter and its moments to new buffers, in the page of the activations.
            pool_overhead: pool_overhead(3 * adapter + activations, self.config.buffers()),
            ..Footprint::default()
        })
    }

    /// Returns the bytes that the graph of a layer keeps: `Decoder::adapted_layer`.
    fn saved(self) -> u128 {
        let Self { rows, q, kv, hidden, inner, .. } = self;
        let (dtype, config) = (self.precision.dtype, self.config);
        // A reads the input of each matmul that has factors.
        let factor_of = |k| linear_memory(self.profile, rows, [1, k], dtype).saved;
        let norm = norm_memory(rows, hidden, dtype).saved;
        let attention = attention_memory(rows, config.heads as u128, [q, kv], dtype).saved;
        // Values are a view of the whole projection.
        let rest_of_qkv = self.wide(q + kv);
        let gated = config.ffn == Ffn::Gated;
        let activation = activate_memory(rows, inner, config.activation, gated, dtype).saved;
        norm + factor_of(hidden)
            + attention
            + rest_of_qkv
            + factor_of(q)
            + norm
            + factor_of(hidden)
            + activation
            + factor_of(inner)
    }

    /// Returns the bytes of one slice of the loss.
    fn loss_bytes(self) -> u128 {
        let rows = usize::try_from(self.rows).unwrap_or(usize::MAX);
        let at_once = self.config.rows_with_loss(rows) as u128;
        4 * 4 * at_once * self.config.vocab as u128 + 2 * self.wide(self.hidden)
    }
}
