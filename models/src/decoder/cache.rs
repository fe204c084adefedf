//! Keys and values of the positions so far.

use burn::tensor::{Device, FloatDType, Tensor, TensorData};

use super::Decoder;
use crate::{DecoderConfig, Rope};

/// Keys and values of a batch of sequences, for every layer, and the tokens that they are of.
#[derive(Debug, Clone)]
pub struct KvCache {
    /// `[batch, kv_heads, capacity, head_dim]`
    layers: Vec<(Tensor<4>, Tensor<4>)>,
    tokens: Vec<Vec<u32>>,
    lengths: Vec<usize>,
    capacity: usize,
    turns: Vec<Turns>,
}

/// The angles of one rope.
#[derive(Debug, Clone)]
struct Turns {
    /// By which keys were turned.
    frequencies: Vec<f64>,
    /// `[capacity, dim]`: half cosines, half sines.
    table: Tensor<2>,
}

impl KvCache {
    pub(super) fn new(of: &Decoder, batch: usize, capacity: usize) -> Self {
        let DecoderConfig { kv_heads, head_dim, layers, .. } = &of.config;
        let zeros = || {
            let shape = [batch, *kv_heads, capacity, *head_dim];
            Tensor::<4>::zeros(shape, (&of.device, burn::tensor::DType::from(of.dtype)))
        };
        let mut cache = Self {
            layers: layers.iter().map(|_| (zeros(), zeros())).collect(),
            tokens: vec![Vec::new(); batch],
            lengths: vec![0; batch],
            capacity,
            turns: Vec::new(),
        };
        cache.turn_for(&of.config, 1, &of.device);
        cache
    }

    /// Sequences that decode together from here on, one after the other; each keeps its length. One that is
    /// named twice goes on as two.
    ///
    /// # Panics
    /// Without a cache, or with caches of different capacities or models.
    #[must_use]
    pub fn stack(parts: &[&Self]) -> Self {
        let first = parts.first().expect("a batch has a sequence");
        let join = |tensors: Vec<Tensor<4>>| match <[_; 1]>::try_from(tensors) {
            Ok([one]) => one,
            Err(several) => Tensor::cat(several, 0),
        };
        let layer = |index: usize| {
            let of = |which: fn(&(Tensor<4>, Tensor<4>)) -> Tensor<4>| {
                join(parts.iter().map(|part| which(&part.layers[index])).collect())
            };
            (of(|layer| layer.0.clone()), of(|layer| layer.1.clone()))
        };
        Self {
            layers: (0..first.layers.len()).map(layer).collect(),
            tokens: parts.iter().flat_map(|part| part.tokens.clone()).collect(),
            lengths: parts.iter().flat_map(|part| part.lengths.clone()).collect(),
            capacity: first.capacity,
            turns: first.turns.clone(),
        }
    }

    pub fn batch(&self) -> usize {
        self.lengths.len()
    }

    /// Positions that each sequence may have.
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Positions that each sequence has.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// The tokens of a sequence so far.
    ///
    /// # Panics
    /// For a sequence that is not of the batch.
    pub fn tokens(&self, sequence: usize) -> &[u32] {
        &self.tokens[sequence]
    }

    /// Bytes of keys and values on the device.
    pub fn bytes(&self) -> u64 {
        let bytes = |t: &Tensor<4>| (t.shape().num_elements() * t.dtype().size()) as u64;
        self.layers.iter().map(|(k, v)| bytes(k) + bytes(v)).sum()
    }

    pub(super) fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }

    pub(super) fn layer(&self, index: usize) -> (Tensor<4>, Tensor<4>) {
        self.layers[index].clone()
    }

    /// Replaces a layer's keys and values by what `write` makes of them.
    pub(super) fn write(
        &mut self,
        index: usize,
        write: impl FnOnce((Tensor<4>, Tensor<4>), &[usize]) -> (Tensor<4>, Tensor<4>),
    ) {
        // What is alone in holding its memory is written in place.
        let nothing = || Tensor::<4>::empty([0, 0, 0, 0], &self.layers[index].0.device());
        let (k, v) = (nothing(), nothing());
        let own = std::mem::replace(&mut self.layers[index], (k, v));
        self.layers[index] = write(own, &self.lengths);
    }

    /// `[capacity, dim]` of a rope.
    pub(super) fn table(&self, rope: usize) -> Tensor<2> {
        self.turns[rope].table.clone()
    }

    /// Counts tokens whose keys and values were written.
    pub(super) fn push(&mut self, tokens: &[&[u32]]) {
        for ((own, length), new) in self.tokens.iter_mut().zip(&mut self.lengths).zip(tokens) {
            own.extend_from_slice(new);
            *length += new.len();
        }
    }

    /// Forgets all positions.
    pub(super) fn clear(&mut self) {
        self.tokens.iter_mut().for_each(Vec::clear);
        self.lengths.fill(0);
    }

    /// Whether the keys that there are were turned as a sequence of `length` asks for; an empty cache turns
    /// as it is told to.
    pub(super) fn turns_for(
        &mut self,
        config: &DecoderConfig,
        length: usize,
        device: &Device,
    ) -> bool {
        let same = |(rope, turns): (&Rope, &Turns)| rope.frequencies(length) == turns.frequencies;
        let fixed = config.ropes.iter().all(|rope| rope.fixed_until().is_none());
        if fixed || config.ropes.iter().zip(&self.turns).all(same) {
            return true;
        }
        if self.longest() > 0 {
            return false;
        }
        self.turn_for(config, length, device);
        true
    }

    /// Angles for sequences of `length`.
    pub(super) fn turn_for(&mut self, config: &DecoderConfig, length: usize, device: &Device) {
        let of = |rope: &Rope| {
            let frequencies = rope.frequencies(length);
            let factor = rope.attention_factor;
            let angles = |position: usize| {
                let turn = move |f: &f64| (position as f64 * f).sin_cos();
                let (sines, cosines): (Vec<_>, Vec<_>) = frequencies.iter().map(turn).unzip();
                cosines.into_iter().chain(sines).map(move |value| (value * factor) as f32)
            };
            let table: Vec<f32> = (0..self.capacity).flat_map(angles).collect();
            let data = TensorData::new(table, [self.capacity, rope.dim]);
            let options = (device, burn::tensor::DType::from(FloatDType::F32));
            Turns { table: Tensor::from_data(data, options), frequencies }
        };
        self.turns = config.ropes.iter().map(of).collect();
    }
}
