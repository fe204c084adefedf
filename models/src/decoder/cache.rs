//! KV cache: keys and values of the positions so far.

use burn::tensor::{Device, Tensor};

use super::Decoder;
use super::cells;
use super::memory::{Memory, tables};
use super::step::{Single, decode_longest};
use crate::{DecoderConfig, Error, Rope};

/// Keys and values of a batch of sequences, for every layer, with the tokens that they belong to.
#[derive(Debug)]
pub struct KvCache {
    memory: Memory,
    /// Tokens of each sequence whose keys and values are cached.
    tokens: Vec<Vec<u32>>,
    capacity: usize,
    /// Frequencies of each rope, with which the cached keys were rotated.
    frequencies: Vec<Vec<f64>>,
    /// Captured steps of one token.
    single: Single,
}

impl KvCache {
    pub(super) fn new(of: &Decoder, batch: usize, capacity: usize) -> Self {
        let _stream_guard = ops::stream_guard();
        let DecoderConfig { kv_heads, head_dim, layers, .. } = &of.config;
        let shape = [batch, *kv_heads, capacity, *head_dim];
        let zeros = !of.ctx.rehearses();
        let empty = || cells::empty(of.kv, of.dtype, shape, &of.device, zeros);
        let make = |()| layers.iter().map(|_| (empty(), empty())).collect();
        let layers = of.device.memory_persistent_allocations((), make);
        let mut cache = Self {
            memory: Memory { layers, pages: None, tables: Vec::new() },
            tokens: vec![Vec::new(); batch],
            capacity,
            frequencies: Vec::new(),
            single: Single::default(),
        };
        cache.build_rope_tables(&of.config, 1, &of.device);
        cache
    }

    /// Checks that the device allocated the memory of keys and values, without waiting for kernels.
    ///
    /// # Errors
    /// [`Error::Failed`] if an allocation failed.
    pub fn check_allocation(&self) -> Result<(), Error> {
        self.memory.check_allocation()
    }

    /// Returns the number of sequences.
    pub fn batch(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the most positions of each sequence.
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the number of positions of each sequence.
    pub fn lengths(&self) -> Vec<usize> {
        self.tokens.iter().map(Vec::len).collect()
    }

    /// Returns the tokens of a sequence so far.
    ///
    /// # Panics
    /// Panics for a sequence outside the batch.
    pub fn tokens(&self, sequence: usize) -> &[u32] {
        &self.tokens[sequence]
    }

    /// Returns the bytes of keys and values on the device.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    pub(super) fn longest(&self) -> usize {
        self.tokens.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Returns the positions that a one-token step after `before` positions is launched for.
    pub(super) fn decode_longest(&self, before: usize) -> usize {
        decode_longest(before, self.capacity)
    }

    pub(super) const fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Returns true if one-token steps are replayed from a captured graph.
    pub fn captured(&self) -> bool {
        self.single.captured()
    }

    /// Returns the logits after one more token per sequence, `[batch, vocab]`.
    pub(super) fn single(&mut self, of: &Decoder, tokens: &[&[u32]]) -> Result<Tensor<2>, Error> {
        let lengths = self.lengths();
        self.single.run(of, &self.memory, tokens, &lengths, self.capacity)
    }

    /// Appends tokens whose keys and values were written.
    pub(super) fn push(&mut self, tokens: &[&[u32]]) {
        self.tokens.iter_mut().zip(tokens).for_each(|(own, new)| own.extend_from_slice(new));
    }

    /// Removes the positions from `lengths` on.
    pub(super) fn cut(&mut self, lengths: &[usize]) {
        self.tokens.iter_mut().zip(lengths).for_each(|(own, to)| own.truncate(*to));
    }

    /// Removes all positions; keeps the captured graph.
    pub fn clear(&mut self) {
        self.tokens.iter_mut().for_each(Vec::clear);
    }

    /// Returns true if the cached keys were rotated with the frequencies of a sequence of `length`. An empty
    /// cache switches to these frequencies.
    pub(super) fn ensure_rotated_for(
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
        self.build_rope_tables(config, length, device);
        true
    }

    /// Builds the RoPE tables for sequences of `length`, in persistent allocations: a pool page that a graph
    /// reads cannot be reused.
    pub(super) fn build_rope_tables(
        &mut self,
        config: &DecoderConfig,
        length: usize,
        device: &Device,
    ) {
        self.frequencies = config.ropes.iter().map(|rope| rope.frequencies(length)).collect();
        let make = |()| tables(config, length, self.capacity, device);
        self.memory.tables = device.memory_persistent_allocations((), make);
        self.single = Single::default();
    }
}
