//! What training an adapter takes on a device, before it is there.
//!
//! ```text
//! adapter      A and B of every factor, in f32
//! optimizer    two moments of each of these values
//! passing      of these moments the one that has most alive:
//!                loss        the input of every layer, and logits of some rows: as they are, their exponentials, their
//!                            gradient and what it is multiplied by, in f32
//!                backward    of the uppermost layer: inputs of those below, what its graph keeps, three times what goes
//!                            into its last product, and a dense copy of that product's matrix where it is quantised;
//!                            or five times, where gate and up are one in 4 bits
//!                step        the gradient twice while its parts become one; what AdamW makes of it
//! ```
//!
//! A graph keeps x, the two normalised rows, x in the middle and what leaves, queries, keys and values as they were
//! multiplied and as they were turned, what attention gave twice, and what the activation needs: see [`kept_inside`].

use crate::config::{Activation, Ffn};
use crate::footprint::{Held, SMALL_PAGE, slack};
use crate::{DecoderConfig, Error, LoraOptions, Matrices, Recompute};

/// What is learned at most at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lessons {
    /// Sequences that pass together.
    pub batch: usize,
    /// Tokens of each.
    pub positions: usize,
    /// Whether gradients of several such batches are added up.
    pub accumulates: bool,
    /// What backward passes make again.
    pub recompute: Recompute,
}

/// Bytes on a device, part by part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TrainFootprint {
    /// Of the model, which stay as they are.
    pub weights: u128,
    /// A and B of every factor, in f32.
    pub adapter: u128,
    /// Two moments of each value of the adapter, in f32.
    pub optimizer: u128,
    /// What comes and goes in a step: inputs of layers, activations, logits, gradients.
    pub passing: u128,
    /// A page of what is small, and what that of the rest is rounded up by.
    pub small: u128,
}

impl TrainFootprint {
    /// Bytes of all parts together.
    pub const fn total(&self) -> u128 {
        self.weights + self.adapter + self.optimizer + self.passing + self.small
    }
}

impl DecoderConfig {
    /// What training takes, beside weights of so many bytes that are held so.
    ///
    /// # Errors
    /// As [`DecoderConfig::factors`].
    pub fn training_footprint(
        &self,
        held: Held,
        weights: u128,
        lora: &LoraOptions,
        load: Lessons,
    ) -> Result<TrainFootprint, Error> {
        let factors = self.factors(lora)?;
        let values = factors.iter().map(|own| own.sizes(lora.rank).iter().sum::<usize>());
        let adapter = 4 * values.sum::<usize>() as u128;
        let lowest = factors.iter().map(|own| own.layer).min().unwrap_or(0);
        let learning = (self.layers.len() - lowest) as u128;
        let rows = load.batch as u128 * load.positions as u128;
        let x = rows * self.hidden as u128 * held.size();
        let added = if load.accumulates { adapter } else { 0 };
        let kept = match load.recompute {
            Recompute::Layers => learning * x,
            Recompute::Nothing => learning * self.graph_bytes(held, rows),
        };
        let loss = kept + x + self.loss_bytes(held, rows) + added;
        let inner = rows * self.ffn_hidden as u128 * held.size();
        let dense = match held.matrices {
            Matrices::Dense => 0,
            Matrices::Int8 | Matrices::FourBit => {
                self.ffn_hidden as u128 * self.hidden as u128 * held.size()
            }
        };
        let graph = match load.recompute {
            Recompute::Layers => self.graph_bytes(held, rows) - x,
            Recompute::Nothing => 0,
        };
        // Gate and up in one have gradients of that width each, zeros but for its half, and then their sum.
        let joint = match (held.matrices, self.ffn) {
            (Matrices::FourBit, Ffn::Gated) => 5 * inner,
            _ => 0,
        };
        // Beside the graph: its result, the gradient that is given to it, their product, and ones.
        let backward = kept + graph + 4 * x + (3 * inner + dense).max(joint) + added;
        let step = (4 * adapter).max(2 * adapter + added);
        let passing = loss.max(backward).max(step);
        Ok(TrainFootprint {
            weights,
            adapter,
            optimizer: 2 * adapter,
            passing,
            // The adapter moves with each step, and lies where it passes.
            small: SMALL_PAGE + slack(3 * adapter + passing) + self.rounded_bytes(),
        })
    }

    /// What the graph of a layer keeps, its input included.
    fn graph_bytes(&self, held: Held, rows: u128) -> u128 {
        let [q, kv] = self.qkv_rows().map(|size| size as u128);
        let streams = 4 * self.hidden as u128;
        let heads = (q + 2 * kv) + (q + kv) + 2 * q;
        let inner = kept_inside(self.ffn, self.activation) * self.ffn_hidden as u128;
        let lse = 4 * rows * self.heads as u128;
        (streams + heads + inner) * rows * held.size() + lse
    }

    /// What a part of the loss has alive.
    fn loss_bytes(&self, held: Held, rows: u128) -> u128 {
        let at_once = self.rows_with_loss(usize::try_from(rows).unwrap_or(usize::MAX)) as u128;
        let learned = 2 * rows * self.hidden as u128 * held.size();
        4 * 4 * at_once * self.vocab as u128 + learned
    }
}

/// How many matrices of the width inside of the feed-forward block its graph keeps: sums, what the activation is made
/// of, and what goes into the last product.
const fn kept_inside(ffn: Ffn, activation: Activation) -> u128 {
    match (ffn, activation) {
        (Ffn::Gated, Activation::Silu) => 5,
        (Ffn::Gated, Activation::Gelu) => 6,
        (Ffn::Gated, Activation::GeluTanh) => 7,
        (Ffn::Plain, Activation::Silu) => 3,
        (Ffn::Plain, Activation::Gelu) => 4,
        (Ffn::Plain, Activation::GeluTanh) => 5,
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::FloatDType;

    use super::*;
    use crate::{KvFormat, shapes};

    const NF4: Held = Held {
        dtype: FloatDType::BF16,
        tf32: false,
        matrices: Matrices::FourBit,
        kv: KvFormat::Float,
        beside: 0,
    };
    const BF16: Held = Held { matrices: Matrices::Dense, ..NF4 };
    const LOAD: Lessons =
        Lessons { batch: 4, positions: 512, accumulates: false, recompute: Recompute::Layers };

    fn of(name: &str, held: Held, rank: usize, load: Lessons) -> TrainFootprint {
        let config = shapes::named(name).expect("published");
        let lora = LoraOptions { rank, ..LoraOptions::default() };
        let weights = config.held_bytes(held);
        config.training_footprint(held, weights, &lora, load).expect("a rank that fits")
    }

    #[test]
    fn llama_3_8b_takes_what_it_is_known_to() {
        let made = of("llama-3-8b", NF4, 16, LOAD);
        // 41,943,040 values, as PEFT counts them.
        assert_eq!((made.adapter, made.optimizer), (4 * 41_943_040, 8 * 41_943_040));
        let (x, inner) = (2 * 2048 * 4096, 2 * 2048 * 14_336);
        let heads = 2 * 2048 * (6144 + 5120 + 2 * 4096) + 4 * 2048 * 32;
        let graph = 4 * x + heads + 5 * inner;
        let dense = 2 * 14_336 * 4096;
        assert!(dense == 2 * inner, "2048 rows");
        assert_eq!(made.passing, 31 * x + graph + 4 * x + 5 * inner);
        let kept = of("llama-3-8b", NF4, 16, Lessons { recompute: Recompute::Nothing, ..LOAD });
        assert_eq!(kept.passing, 32 * graph + 4 * x + 5 * inner);
        let whole = of("llama-3-8b", BF16, 16, LOAD);
        assert_eq!(whole.passing, made.passing - 2 * inner);
        let int8 = of("llama-3-8b", Held { matrices: Matrices::Int8, ..NF4 }, 16, LOAD);
        assert_eq!(int8.passing, whole.passing + dense);
    }

    #[test]
    fn more_takes_more() {
        for name in shapes::names() {
            let one = |load| of(name, NF4, 8, load).total();
            let all = one(LOAD);
            assert!(one(Lessons { batch: 5, ..LOAD }) > all, "{name}");
            assert!(one(Lessons { positions: 600, ..LOAD }) > all, "{name}");
            assert!(one(Lessons { accumulates: true, ..LOAD }) > all, "{name}");
            assert!(one(Lessons { recompute: Recompute::Nothing, ..LOAD }) > all, "{name}");
            assert!(of(name, NF4, 32, LOAD).total() > all, "{name}");
        }
    }
}
