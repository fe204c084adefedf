//! KV cache: keys and values of the positions so far.

use burn::tensor::kind::Basic;
use burn::tensor::{Device, Tensor};

use super::Decoder;
use super::cells::{self, Rearrange, rearranged};
use super::memory::{Memory, Pages, tables};
use super::step::{Single, decode_longest};
use crate::{DecoderConfig, Error, Rope};

/// Keys and values of a batch of sequences, for every layer, with the tokens that they belong to.
#[derive(Debug)]
pub struct KvCache {
    memory: Memory,
    device: Device,
    /// Tokens of each sequence whose keys and values are cached.
    tokens: Vec<Vec<u32>>,
    capacity: usize,
    /// Frequencies of each rope, with which the cached keys were rotated.
    frequencies: Vec<Vec<f64>>,
    /// Captured steps of one token.
    single: Single,
}

/// Positions per page. Sequences share the full pages of a prompt; each has its own copy of the last, partial
/// page.
const PAGE: usize = 64;

/// Page layout of the sequences of one prompt: its full pages once, then the pages of each sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shared {
    /// Number of sequences.
    times: usize,
    /// Pages that the prompt fills.
    whole: usize,
    /// Positions on the prompt's last, partial page.
    rest: usize,
    /// Pages per sequence that are not shared.
    own: usize,
}

impl Shared {
    const fn new(length: usize, times: usize, capacity: usize) -> Self {
        let (whole, rest) = (length / PAGE, length % PAGE);
        Self { times, whole, rest, own: capacity.div_ceil(PAGE) - whole }
    }

    const fn pages(self) -> usize {
        self.whole + self.times * self.own
    }

    /// Returns pages `[_, PAGE, kv_heads, width]` of a cache `[1, kv_heads, capacity, width]`.
    fn paged<K: Basic>(self, cache: Tensor<4, K>) -> Vec<Tensor<4, K>> {
        let [_, kv_heads, _, width] = cache.dims();
        let (device, dtype) = (cache.device(), cache.dtype());
        let empty =
            |positions: usize| Tensor::zeros([1, positions, kv_heads, width], (&device, dtype));
        let swapped = cache.swap_dims(1, 2);
        let full = self.whole * PAGE;
        let shared = swapped.clone().slice_dim(1, 0..full);
        let own = || {
            // The prompt's partial page, and free positions.
            let room = empty(self.own * PAGE - self.rest);
            match self.rest {
                0 => room,
                rest => Tensor::cat(vec![swapped.slice_dim(1, full..full + rest), room], 1),
            }
        };
        // A prompt may fill the whole capacity, or less than a page.
        let shared = (self.whole > 0).then_some((shared, self.whole, 1));
        let own = (self.own > 0).then(|| (own(), self.own, self.times));
        shared
            .into_iter()
            .chain(own)
            .flat_map(|(part, pages, times)| {
                vec![part.reshape([pages, PAGE, kv_heads, width]); times]
            })
            .collect()
    }
}

/// Returns the page table of the sequences of `plans`.
fn pages_of(plans: &[Shared], device: &Device) -> Pages {
    let (mut rows, mut first) = (Vec::new(), 0);
    for plan in plans {
        for sequence in 0..plan.times {
            let own = first + plan.whole + sequence * plan.own;
            let pages = (first..first + plan.whole).chain(own..own + plan.own);
            rows.push(pages.map(|page| page as i32).collect());
        }
        first += plan.pages();
    }
    Pages::new(rows, device)
}

/// Joins the keys, or values, of a layer: each part `[1, kv_heads, capacity, width]` is repeated as planned,
/// or laid out in pages.
struct Join<'a> {
    plans: &'a [Shared],
    shares: bool,
}

impl Rearrange for Join<'_> {
    fn run<K: Basic>(&self, mut parts: Vec<Tensor<4, K>>) -> Tensor<4, K> {
        let Self { plans, shares } = *self;
        if !shares && let ([_], [Shared { times: 1, .. }]) = (&parts[..], plans) {
            return parts.remove(0);
        }
        let rows = parts.into_iter().zip(plans).flat_map(|(part, plan)| match shares {
            true => plan.paged(part),
            false => vec![part; plan.times],
        });
        Tensor::cat(rows.collect(), 0)
    }
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
            device: of.device.clone(),
            tokens: vec![Vec::new(); batch],
            capacity,
            frequencies: Vec::new(),
            single: Single::default(),
        };
        cache.build_rope_tables(&of.config, 1, &of.device);
        cache
    }

    /// Returns how many positions of a prompt of `length` [`KvCache::stack`] can share: those on full pages.
    pub const fn shareable(length: usize) -> usize {
        length / PAGE * PAGE
    }

    /// Returns the capacity of each sequence, rounded up to whole pages, if [`KvCache::stack`] shares pages.
    pub const fn paged(capacity: usize) -> usize {
        capacity.next_multiple_of(PAGE)
    }

    /// Joins caches of one sequence each into a batch that decodes together, in this order, each repeated as
    /// often as given. Repeated sequences share the full pages of their prompt.
    ///
    /// # Panics
    /// Panics without a sequence, if a part has several sequences, or if the caches differ in capacity, model
    /// or RoPE frequencies. Frequencies differ if RoPE scaling depends on the length.
    #[must_use]
    pub fn stack(mut parts: Vec<(Self, usize)>) -> Self {
        let _stream_guard = ops::stream_guard();
        parts.retain(|(_, times)| *times > 0);
        let (first, _) = parts.first().expect("a batch has a sequence");
        let (capacity, frequencies) = (first.capacity, first.frequencies.clone());
        let (tables, count) = (first.memory.tables.clone(), first.memory.layers.len());
        let device = first.device.clone();
        for (part, _) in &parts {
            let one = part.tokens.len() == 1 && part.memory.pages.is_none();
            assert!(one && part.capacity == capacity && part.frequencies == frequencies);
        }
        let plans: Vec<Shared> = parts
            .iter()
            .map(|(part, times)| Shared::new(part.tokens[0].len(), *times, capacity))
            .collect();
        let shares = plans.iter().any(|plan| plan.times > 1 && plan.whole > 0);
        let tokens = parts.iter().flat_map(|(part, times)| vec![part.tokens[0].clone(); *times]);
        let tokens: Vec<Vec<u32>> = tokens.collect();
        // Layer by layer, so that those of the parts go as those of the whole come.
        let mut theirs: Vec<_> =
            parts.into_iter().map(|(part, _)| part.memory.layers.into_iter()).collect();
        let mut layers = Vec::new();
        for _ in 0..count {
            let layer = theirs.iter_mut().map(|part| part.next().expect("as many layers"));
            let (k, v): (Vec<_>, Vec<_>) = layer.unzip();
            let join = Join { plans: &plans, shares };
            let both = |(k, v): (Vec<_>, Vec<_>)| (rearranged(k, &join), rearranged(v, &join));
            layers.push(device.memory_persistent_allocations((k, v), both));
        }
        let pages = shares.then(|| pages_of(&plans, &device));
        let memory = Memory { layers, pages, tables };
        Self { memory, device, tokens, capacity, frequencies, single: Single::default() }
    }

    /// Keeps only some of the sequences, in this order.
    ///
    /// # Panics
    /// Panics for a sequence outside the batch.
    #[must_use]
    pub fn keep(self, sequences: &[usize]) -> Self {
        let _stream_guard = ops::stream_guard();
        let rows = |cached| rearranged([cached], &cells::Rows(sequences));
        let Memory { layers, pages, tables } = self.memory;
        let memory = match pages {
            // Pages that no sequence uses any longer stay allocated.
            Some(Pages { rows, .. }) => {
                let rows = sequences.iter().map(|at| rows[*at].clone()).collect();
                let pages = Some(Pages::new(rows, &self.device));
                Memory { layers, pages, tables }
            }
            None => {
                let layers = layers.into_iter().map(|(k, v)| (rows(k), rows(v))).collect();
                Memory { layers, pages, tables }
            }
        };
        Self {
            memory,
            tokens: sequences.iter().map(|at| self.tokens[*at].clone()).collect(),
            single: Single::default(),
            ..self
        }
    }

    /// Checks that the device allocated the memory of keys and values, without waiting for kernels.
    ///
    /// # Errors
    /// [`Error::Failed`] if an allocation failed.
    pub fn check_allocation(&self) -> Result<(), Error> {
        for (keys, values) in &self.memory.layers {
            for cached in [keys, values] {
                ops::check_allocation(cached).map_err(Error::Failed)?;
            }
        }
        Ok(())
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
        self.memory.layers.iter().map(|(k, v)| cells::bytes(k) + cells::bytes(v)).sum()
    }

    /// Returns true if sequences share pages of their prompt.
    pub const fn shares(&self) -> bool {
        self.memory.pages.is_some()
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
