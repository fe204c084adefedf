//! Keys and values of the positions so far.

use burn::tensor::{Device, Tensor, TensorData};

use super::Decoder;
use super::step::Single;
use crate::{DecoderConfig, Error, Rope};

/// Keys and values of a batch of sequences, for every layer, and the tokens that they are of.
#[derive(Debug)]
pub struct KvCache {
    memory: Memory,
    /// Of each sequence those whose keys and values are there.
    tokens: Vec<Vec<u32>>,
    capacity: usize,
    /// Of each rope, by which keys were turned.
    frequencies: Vec<Vec<f64>>,
    /// Steps of one token.
    single: Single,
}

/// What lies on the device. Keys and values are written where they lie: all clones see it.
#[derive(Debug, Clone)]
pub(super) struct Memory {
    /// `[batch, kv_heads, capacity, head_dim]`
    pub(super) layers: Vec<(Tensor<4>, Tensor<4>)>,
    /// Of each rope `[capacity, dim]`: half cosines, half sines.
    pub(super) tables: Vec<Tensor<2>>,
}

impl KvCache {
    pub(super) fn new(of: &Decoder, batch: usize, capacity: usize) -> Self {
        let DecoderConfig { kv_heads, head_dim, layers, .. } = &of.config;
        let zeros = || {
            let shape = [batch, *kv_heads, capacity, *head_dim];
            Tensor::<4>::zeros(shape, (&of.device, burn::tensor::DType::from(of.dtype)))
        };
        let layers = layers.iter().map(|_| (zeros(), zeros())).collect();
        let mut cache = Self {
            memory: Memory { layers, tables: Vec::new() },
            tokens: vec![Vec::new(); batch],
            capacity,
            frequencies: Vec::new(),
            single: Single::default(),
        };
        cache.turn_for(&of.config, 1, &of.device);
        cache
    }

    /// Caches whose sequences decode together from here on, in this order, those of each as often as
    /// said: the batch of one, then that batch again.
    ///
    /// # Panics
    /// Without a sequence, or with caches of different capacities, models or angles: a rope that stretches has
    /// others past its length.
    #[must_use]
    pub fn stack(parts: Vec<(Self, usize)>) -> Self {
        let mut rows = parts.into_iter().filter(|(_, times)| *times > 0);
        let (mut all, times) = rows.next().expect("a batch has a sequence");
        let mut layers: Vec<(Vec<_>, Vec<_>)> =
            all.memory.layers.drain(..).map(|(k, v)| (vec![k; times], vec![v; times])).collect();
        all.tokens = vec![all.tokens; times].concat();
        for (part, times) in rows {
            let theirs = part.memory.layers;
            assert_eq!((part.capacity, theirs.len()), (all.capacity, layers.len()));
            assert_eq!(part.frequencies, all.frequencies);
            for ((k, v), (own_k, own_v)) in layers.iter_mut().zip(theirs) {
                k.extend(vec![own_k; times]);
                v.extend(vec![own_v; times]);
            }
            all.tokens.extend(vec![part.tokens; times].concat());
        }
        let join = |mut tensors: Vec<Tensor<4>>| match tensors.len() {
            1 => tensors.remove(0),
            _ => Tensor::cat(tensors, 0),
        };
        let layers = layers.into_iter().map(|(k, v)| (join(k), join(v))).collect();
        let memory = Memory { layers, ..all.memory };
        Self { memory, single: Single::default(), ..all }
    }

    /// The cache of some of the sequences, in this order.
    ///
    /// # Panics
    /// For a sequence that is not of the batch.
    #[must_use]
    pub fn keep(self, sequences: &[usize]) -> Self {
        let rows = |t: &Tensor<4>| {
            let own = |at: &usize| t.clone().slice_dim(0, *at..at + 1);
            Tensor::cat(sequences.iter().map(own).collect(), 0)
        };
        let Memory { layers, tables } = &self.memory;
        let layers = layers.iter().map(|(k, v)| (rows(k), rows(v))).collect();
        Self {
            memory: Memory { layers, tables: tables.clone() },
            tokens: sequences.iter().map(|at| self.tokens[*at].clone()).collect(),
            single: Single::default(),
            ..self
        }
    }

    pub fn batch(&self) -> usize {
        self.tokens.len()
    }

    /// Positions that each sequence may have.
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Positions that each sequence has.
    pub fn lengths(&self) -> Vec<usize> {
        self.tokens.iter().map(Vec::len).collect()
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
        self.memory.layers.iter().map(|(k, v)| bytes(k) + bytes(v)).sum()
    }

    pub(super) fn longest(&self) -> usize {
        self.tokens.iter().map(Vec::len).max().unwrap_or(0)
    }

    pub(super) const fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Whether steps of one token are replayed from a graph by now.
    pub fn captured(&self) -> bool {
        self.single.captured()
    }

    /// The logits after one more token of each sequence, `[batch, vocab]`.
    pub(super) fn single(&mut self, of: &Decoder, tokens: &[&[u32]]) -> Result<Tensor<2>, Error> {
        let lengths = self.lengths();
        self.single.run(of, &self.memory, tokens, &lengths, self.capacity)
    }

    /// Counts tokens whose keys and values were written.
    pub(super) fn push(&mut self, tokens: &[&[u32]]) {
        self.tokens.iter_mut().zip(tokens).for_each(|(own, new)| own.extend_from_slice(new));
    }

    /// Forgets the positions from `lengths` on.
    pub(super) fn cut(&mut self, lengths: &[usize]) {
        self.tokens.iter_mut().zip(lengths).for_each(|(own, to)| own.truncate(*to));
    }

    /// Forgets all positions, and keeps what was captured.
    pub fn clear(&mut self) {
        self.tokens.iter_mut().for_each(Vec::clear);
    }

    /// Whether the keys that there are were turned as a sequence of `length` asks for; an empty cache turns
    /// as it is told to.
    pub(super) fn turns_for(
        &mut self,
        config: &DecoderConfig,
        length: usize,
        device: &Device,
    ) -> bool {
        let same = |(rope, own): (&Rope, &Vec<f64>)| rope.frequencies(length) == *own;
        let fixed = config.ropes.iter().all(|rope| rope.fixed_until().is_none());
        if fixed || config.ropes.iter().zip(&self.frequencies).all(same) {
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
        self.frequencies = config.ropes.iter().map(|rope| rope.frequencies(length)).collect();
        let table = |(rope, frequencies): (&Rope, &Vec<f64>)| {
            let angles = |position: usize| {
                let turn = move |f: &f64| (position as f64 * f).sin_cos();
                let (sines, cosines): (Vec<_>, Vec<_>) = frequencies.iter().map(turn).unzip();
                let factor = rope.attention_factor;
                cosines.into_iter().chain(sines).map(move |value| (value * factor) as f32)
            };
            let table: Vec<f32> = (0..self.capacity).flat_map(angles).collect();
            let data = TensorData::new(table, [self.capacity, rope.dim]);
            Tensor::from_data(data, (device, burn::tensor::DType::F32))
        };
        self.memory.tables = config.ropes.iter().zip(&self.frequencies).map(table).collect();
        self.single = Single::default();
    }
}
