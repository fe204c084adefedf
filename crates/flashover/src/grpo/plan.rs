//! Memory of GRPO.

use serde::Serialize;

use crate::memory::Plan;

/// Memory of GRPO on a device, by phase. Weights, the state of training, keys and values and the reference stay in all phases;
/// activations and workspace of one phase take the place of those of another.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GrpoPlan {
    /// Generation of all completions of a batch.
    pub sample: Plan,
    /// Training on a micro-batch of them.
    pub learn: Plan,
    /// Bytes of a copied reference on the device.
    pub reference_bytes: u64,
}

impl GrpoPlan {
    /// Returns the bytes that stay in all phases.
    pub fn kept_bytes(&self) -> u64 {
        let learn = &self.learn;
        let state = [learn.trained_bytes, learn.gradients_bytes, learn.optimizer_bytes];
        let kept = [learn.weights_bytes, self.sample.cache_bytes, self.reference_bytes];
        state.into_iter().chain(kept).fold(0, u64::saturating_add)
    }

    /// Returns the peak bytes of sampling, and of the phases in micro-batches: reference, old and learning.
    pub fn peaks(&self) -> [u64; 2] {
        [&self.sample, &self.learn].map(|own| {
            let transient = own.activations_bytes.saturating_add(own.workspace_bytes);
            self.kept_bytes().saturating_add(transient)
        })
    }

    /// Returns the peak bytes of all phases.
    pub fn peak_bytes(&self) -> u64 {
        self.peaks().into_iter().max().unwrap_or(0)
    }

    /// Returns true if all phases fit in the budget, or if it is unknown.
    pub fn fits(&self) -> bool {
        self.learn.budget_bytes.is_none_or(|budget| self.peak_bytes() <= budget)
    }

    /// Returns the parts in bytes, with their names.
    pub fn parts(&self) -> Vec<(&'static str, u64)> {
        let [sample, learn] = self.peaks();
        let mut parts = self.learn.parts();
        parts.retain(|(name, _)| !["activations", "workspace"].contains(name));
        parts.push(("keys and values", self.sample.cache_bytes));
        if self.reference_bytes > 0 {
            parts.push(("reference", self.reference_bytes));
        }
        parts.extend([("peak of sampling", sample), ("peak of learning", learn)]);
        parts
    }
}
