//! Device memory of training.
//!
//! ```text
//! weights      of a model: flat, in the compute dtype
//! trained      A and B of an adapter, or master weights next to weights in 16 bits; in f32
//! gradients    of all trained values, in f32
//! optimizer    two moments per trained value, in f32, in bf16, or in bytes with an f32 per 256
//! host         of these, what is offloaded; the device then holds buffers for a part of it at a time
//! saved        what layers keep for their gradients
//! activations  the sum of these:
//!                an adapter's factors in the compute dtype
//!                loss        the logits of some rows, and rows of the residual stream
//!                backward    of the uppermost layer: what it keeps while it runs, its gradients, and a dense copy of its
//!                            largest weight if that is quantised
//! ```
//!
//! Loss and backward pass are not live together, but they free tensors of other sizes than they take: the logits find no place of
//! their size.

use ops::{Arena, MemoryProfile, pool_overhead};

use super::Footprint;
use super::layers::Rows;
use crate::decoder::flat_len;
use crate::optimizer::staging_bytes;
use crate::{
    DecoderConfig, Error, Ffn, Gradients, Offload, Optimizer, Parameters, Placement, Recompute,
    Training, Trains,
};

/// Bytes of what training keeps besides activations.
struct State {
    weights: u128,
    trained: u128,
    gradients: u128,
    optimizer: u128,
    /// Bytes in host memory.
    host: u128,
    /// An adapter's factors in the compute dtype: plain, times the scale, and those of several modules as one matrix.
    factors: u128,
    /// Number of layers with gradients.
    layers: usize,
}

impl State {
    fn new(
        config: &DecoderConfig,
        weights: u128,
        size: u128,
        training: &Training,
    ) -> Result<Self, Error> {
        Ok(match &training.trains {
            Trains::Adapter(lora) => {
                let factors = config.factors(lora)?;
                let trained = 4 * flat_len(config, &factors, lora.rank) as u128;
                let lowest = factors.iter().map(|own| own.layer).min().unwrap_or(0);
                let blocks = factors.chunk_by(|a, b| (a.layer, a.block) == (b.layer, b.block));
                let joined = blocks.filter(|block| block.len() > 1);
                let joined = joined.map(|own| config.block_rows(own[0].block) * own.len());
                Self {
                    weights,
                    trained,
                    gradients: trained,
                    optimizer: 2 * trained,
                    host: 0,
                    factors: size * (trained / 2 + (lora.rank * joined.sum::<usize>()) as u128),
                    layers: config.layers.len() - lowest,
                }
            }
            Trains::Weights { master, moments, muon } => {
                let parameters = Parameters::new(config);
                let len = parameters.len() as u128;
                let master = *master && size < 4;
                let Offload { optimizer: on_host, gradients: offloaded, .. } = training.offload;
                let (mut trained, mut optimizer, mut host) = (0, 0, 0);
                for (group, range) in parameters.groups() {
                    let len = range.len() as u128;
                    let exact = if master { 4 * len } else { 0 };
                    let moments = match *muon && !group.outer {
                        true => 4 * range.len() as u64,
                        false => Optimizer::moments_of(*moments, *group).bytes(range.len() as u64),
                    };
                    if on_host && group.on_host() {
                        host += exact + u128::from(moments);
                    } else {
                        trained += exact;
                        optimizer += u128::from(moments);
                    }
                }
                if on_host {
                    optimizer += staging_bytes(&parameters, *moments, master, offloaded);
                }
                let mut gradients = 4 * len;
                if offloaded {
                    let (window, rest) = Gradients::lengths(&parameters);
                    host += gradients - 4 * rest as u128;
                    gradients = 4 * (window + rest) as u128;
                }
                let (weights, layers) = (size * len, config.layers.len());
                Self { weights, trained, gradients, optimizer, host, factors: 0, layers }
            }
        })
    }
}

impl Rows<'_> {
    /// Returns the memory of training, with frozen weights of `weights` bytes.
    pub(super) fn trained(self, weights: u128, training: &Training) -> Result<Footprint, Error> {
        let recompute = training.recompute;
        let whole = matches!(training.trains, Trains::Weights { .. });
        let state = State::new(self.config, weights, self.precision.size(), training)?;
        let (x, inner) = (self.wide(self.hidden), self.wide(self.inner));
        let Offload { gradients: offloaded, inputs, .. } = training.offload;
        let micro_batches = if offloaded { training.micro_batches as u128 } else { 1 };
        // Of each layer, and the gradient of one.
        let waiting = micro_batches * (state.layers as u128 + 1) * x;
        let (kept, saved, parked) = match (inputs, offloaded) {
            // Two matrices arrive while one leaves.
            (true, _) => (4 * x, 0, waiting + micro_batches * x),
            (false, true) => (waiting, 0, 0),
            (false, false) => (0, state.layers as u128 * self.kept(recompute, whole), 0),
        };
        let kept = kept + state.factors;
        // The gradient dequantises the weight for any number of rows.
        let dense = Self { profile: MemoryProfile { max_fused_rows: 0, ..self.profile }, ..self };
        let dense = dense.matmul([self.hidden, self.inner]).dense_weight;
        let again = self.kept(Recompute::Nothing, whole) - self.kept(recompute, whole);
        // Gate and up are one matrix.
        let joint = if self.precision.joins_gate(self.config.ffn) { dense } else { 0 };
        let backward = again + 3 * x + inner + dense + joint;
        let activations = kept + self.loss_bytes() + backward;
        let State { weights, trained, gradients, optimizer, host, .. } = state;
        Ok(Footprint {
            weights,
            trained,
            gradients,
            optimizer,
            host: host + parked,
            saved,
            saved_layers: state.layers,
            activations,
            pool_overhead: pool_overhead(activations, self.config.buffers()),
            ..Footprint::default()
        })
    }

    /// Returns the bytes that a layer keeps for its gradients, of all weights if `whole`.
    fn kept(self, recompute: Recompute, whole: bool) -> u128 {
        let Self { rows, q, kv, hidden, inner, .. } = self;
        let config = self.config;
        let x = self.wide(hidden);
        let mut kept = vec![x];
        let post = config.placement == Placement::BeforeAndAfter;
        if recompute != Recompute::Layers {
            let lse = 4 * rows * config.heads as u128;
            // Queries, keys and values; the result; the output.
            kept.extend([self.wide(q + 2 * kv), self.wide(q), lse, x]);
            // QK norms have results of their own.
            kept.extend(
                config.qk_norm.then(|| [self.wide(q), self.wide(kv)]).into_iter().flatten(),
            );
            kept.extend(post.then_some(x));
        }
        if matches!(recompute, Recompute::Norms | Recompute::Nothing) {
            let inner = self.wide(inner);
            match (config.ffn, self.precision.joins_gate(config.ffn)) {
                // Training of all weights keeps both sides of the activation.
                (Ffn::Plain, _) => {
                    kept.extend(std::iter::repeat_n(inner, if whole { 2 } else { 1 }))
                }
                (Ffn::Gated, true) => kept.push(2 * inner),
                (Ffn::Gated, false) => kept.extend([inner, inner]),
            }
            kept.extend(post.then_some(x));
        }
        if recompute == Recompute::Nothing {
            kept.extend([x, x]);
        }
        Arena::bytes_for(kept)
    }

    /// Returns the bytes of the rows of the loss, and of the logits of some of them.
    fn loss_bytes(self) -> u128 {
        let rows = usize::try_from(self.rows).unwrap_or(usize::MAX);
        let at_once = self.config.rows_with_loss(rows, self.precision.dtype);
        let logits = Self { rows: at_once as u128, ..self }.wide(self.config.vocab as u128);
        logits + 4 * self.wide(self.hidden)
    }
}
