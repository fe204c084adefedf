//! KV cache in pages, for sequences that come and go.
//!
//! ```text
//! group of a prompt of 150 tokens, 2 completions, 256 positions each
//!
//! prompt         page 3   page 4                        full pages, shared
//! completion 0                     page 5   page 6      22 tokens of the prompt, then its own
//! completion 1                     page 7   page 8      the same 22 tokens
//! ```
//!
//! All pages of a sequence are taken when it joins, and returned when it leaves. A step reads only its page table, tokens and
//! positions from the host, so one graph per number of rows serves all sequences. Rows are rounded up, and those without a
//! sequence write to page 0, which no sequence has.

use std::collections::BTreeMap;
use std::fmt;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use ops::{Ctx, KvSlots, OpError, Rehearsed, RopeOptions};

use super::backward::PackedPrefill;
use super::memory::{Memory, tables};
use super::step::{Repeated, Step, decode_longest};
use super::{CHUNK, Decoder, cells, joined};
use crate::{DecoderConfig, Error, KvFormat};

/// Positions per page.
const PAGE: usize = 64;
/// Most tokens of prompts with a common prefill.
pub const MOST_PACKED: usize = CHUNK;

/// Keys and values of sequences in pages, for every layer, with the tokens that they belong to.
#[derive(Debug)]
pub struct PagedCache {
    memory: Memory,
    device: Device,
    /// Most positions of a sequence.
    capacity: usize,
    /// Free pages.
    free: Vec<u32>,
    /// Number of sequences that use each page.
    uses: Vec<u32>,
    /// None for those that left.
    sequences: Vec<Option<Sequence>>,
    /// Steps by their rows and longest sequence.
    steps: BTreeMap<[usize; 2], Rows>,
}

#[derive(Debug)]
struct Sequence {
    tokens: Vec<u32>,
    pages: Vec<u32>,
    /// Most positions.
    most: usize,
}

/// Steps of a number of rows.
struct Rows {
    /// The cache with the page table of these rows.
    memory: Memory,
    repeated: Repeated,
    /// Pages on the device.
    loaded: Vec<u32>,
}

impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rows").field("captured", &self.repeated.captured()).finish_non_exhaustive()
    }
}

/// Ending a graph waits for its stream.
impl Drop for PagedCache {
    fn drop(&mut self) {
        let _stream_guard = ops::stream_guard();
        self.steps.clear();
    }
}

/// Places of keys and values of some rows of a projection.
pub(super) struct Places<'a> {
    memory: &'a Memory,
    /// Rows of the projection; none for all, in order.
    rows: Option<Tensor<1, Int>>,
    /// Position on the page, `[rows]`.
    start: Tensor<1, Int>,
    /// Page, `[rows, 1]`.
    pages: Tensor<2, Int>,
}

impl PagedCache {
    /// Returns the rows of a step of `count` sequences: 2ⁿ or 3 · 2ⁿ.
    pub const fn rows(count: usize) -> usize {
        let power = count.next_power_of_two();
        if power >= 8 && power / 4 * 3 >= count { power / 4 * 3 } else { power }
    }

    /// Returns the number of pages of `completions` sequences of a prompt of `prompt` tokens, each of up to `most` positions.
    pub const fn pages(prompt: usize, completions: usize, most: usize) -> usize {
        let whole = prompt / PAGE;
        whole + completions * (most.div_ceil(PAGE) - whole)
    }

    /// Returns the positions that `batch` sequences of `capacity` positions share, or lack, if they have `pages` pages.
    pub const fn shared_positions(batch: usize, capacity: usize, pages: usize) -> usize {
        (batch * capacity.div_ceil(PAGE)).saturating_sub(pages) * PAGE
    }

    /// Returns the number of positions of a prompt of `prompt` tokens that all of its sequences share.
    pub const fn shared(prompt: usize) -> usize {
        prompt / PAGE * PAGE
    }

    /// Returns a number of positions rounded up to whole pages.
    pub const fn whole_pages(positions: usize) -> usize {
        positions.next_multiple_of(PAGE)
    }

    fn new(of: &Decoder, pages: usize, capacity: usize) -> Self {
        let _stream_guard = ops::stream_guard();
        let DecoderConfig { kv_heads, head_dim, layers, .. } = &of.config;
        // Page 0 is for rows without a sequence.
        let shape = [pages + 1, PAGE, *kv_heads, *head_dim];
        let zeros = !of.ctx.rehearses();
        let empty = || cells::empty(of.kv, of.dtype, shape, &of.device, zeros);
        let make = |()| {
            let layers = layers.iter().map(|_| (empty(), empty())).collect();
            (layers, tables(&of.config, capacity, capacity, &of.device))
        };
        let (layers, tables) = of.device.memory_persistent_allocations((), make);
        Self {
            memory: Memory { layers, pages: None, tables },
            device: of.device.clone(),
            capacity,
            free: (1..=pages as u32).rev().collect(),
            uses: vec![0; pages + 1],
            sequences: Vec::new(),
            steps: BTreeMap::new(),
        }
    }

    /// Checks that the device allocated the memory of keys and values, without waiting for kernels.
    ///
    /// # Errors
    /// [`Error::Failed`] if an allocation failed.
    pub fn check_allocation(&self) -> Result<(), Error> {
        self.memory.check_allocation()
    }

    /// Returns the bytes of keys and values on the device.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// Returns the most positions of a sequence.
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the number of pages.
    pub const fn all_pages(&self) -> usize {
        self.uses.len() - 1
    }

    /// Returns the number of pages that no sequence uses.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Returns the tokens of a sequence so far; none if it left.
    pub fn tokens(&self, sequence: usize) -> Option<&[u32]> {
        self.sequences.get(sequence)?.as_ref().map(|own| &own.tokens[..])
    }

    /// Returns true if steps of some number of rows are replayed from a captured graph.
    pub fn captured(&self) -> bool {
        self.steps.values().any(|rows| rows.repeated.captured())
    }

    /// Removes a sequence, and returns its pages. Nothing happens if it has left.
    pub fn leave(&mut self, sequence: usize) {
        let Some(own) = self.sequences.get_mut(sequence).and_then(Option::take) else { return };
        for page in own.pages {
            let uses = &mut self.uses[page as usize];
            *uses -= 1;
            if *uses == 0 {
                self.free.push(page);
            }
        }
    }

    /// Removes all sequences; keeps the captured graphs.
    pub fn clear(&mut self) {
        (0..self.sequences.len()).for_each(|sequence| self.leave(sequence));
        self.sequences.clear();
        // The same prompts then get the same pages.
        self.free.sort_unstable_by(|one, other| other.cmp(one));
    }

    /// Adds the sequences of a prompt, each with room for more tokens, and returns their numbers.
    fn join(
        &mut self,
        prompt: &[u32],
        completions: usize,
        room: usize,
    ) -> Result<Vec<usize>, Error> {
        let (length, capacity) = (prompt.len(), self.capacity);
        if length > capacity {
            return Err(Error::Full { need: length, capacity });
        }
        let most = length.saturating_add(room).min(capacity);
        let (need, have) = (Self::pages(length, completions, most), self.free.len());
        if need > have {
            return Err(Error::Pages { need, have });
        }
        let shared = self.free.split_off(have - length / PAGE);
        let mut joined = Vec::new();
        for _ in 0..completions {
            let own = most.div_ceil(PAGE) - shared.len();
            let own = self.free.split_off(self.free.len() - own);
            let pages = [&shared[..], &own].concat();
            pages.iter().for_each(|page| self.uses[*page as usize] += 1);
            joined.push(self.sequences.len());
            self.sequences.push(Some(Sequence { tokens: prompt.to_vec(), pages, most }));
        }
        Ok(joined)
    }

    /// Returns true if each of these sequences has a free position.
    fn free_to_write(&self, sequences: &[usize]) -> bool {
        sequences.iter().all(|at| self.sequence(*at).is_ok_and(|own| own.tokens.len() < own.most))
    }

    fn sequence(&self, at: usize) -> Result<&Sequence, Error> {
        self.sequences.get(at).and_then(Option::as_ref).ok_or(Error::Left { sequence: at })
    }

    /// Returns the cache as one sequence sees it.
    fn of_one(&self, sequence: usize) -> Result<Memory, Error> {
        let pages = self.sequence(sequence)?.pages.iter().map(|page| page.cast_signed()).collect();
        let pages = list(pages, &self.device);
        let per = pages.dims()[0];
        Ok(Memory { pages: Some(pages.reshape([1, per])), ..self.memory.clone() })
    }

    /// Returns the places of packed prompts, each with the sequences that joined for it. The shared positions have one place,
    /// and the others have one in each sequence.
    fn places(&self, prompts: &[&[u32]], joined: &[Vec<usize>]) -> Result<Places<'_>, Error> {
        let (mut rows, mut start, mut pages) = (Vec::new(), Vec::new(), Vec::new());
        let mut first = 0;
        for (prompt, own) in prompts.iter().zip(joined) {
            let shared = Self::shared(prompt.len());
            for (completion, sequence) in own.iter().enumerate() {
                let own = &self.sequence(*sequence)?.pages;
                let from = if completion == 0 { 0 } else { shared };
                for position in from..prompt.len() {
                    rows.push((first + position) as i32);
                    start.push((position % PAGE) as i32);
                    pages.push(own[position / PAGE].cast_signed());
                }
            }
            first += prompt.len();
        }
        let (count, device) = (rows.len(), &self.device);
        let all = count == first;
        Ok(Places {
            memory: &self.memory,
            rows: (!all).then(|| list(rows, device)),
            start: list(start, device),
            pages: list(pages, device).reshape([count, 1]),
        })
    }
}

fn list(words: Vec<i32>, device: &Device) -> Tensor<1, Int> {
    let len = words.len();
    Tensor::from_data(TensorData::new(words, [len]), (device, DType::I32))
}

impl Places<'_> {
    /// Writes keys and values of a layer, given as `[rows, 3 · kv_heads · head_dim]`: anything, keys and values, which are
    /// rotated already.
    pub(super) fn write(
        &self,
        decoder: &Decoder,
        layer: usize,
        mut kkv: Tensor<2>,
    ) -> Result<(), Error> {
        if let Some(rows) = &self.rows {
            kkv = kkv.select(0, rows.clone());
        }
        let DecoderConfig { kv_heads, head_dim, .. } = decoder.config;
        let (k, v) = self.memory.layers[layer].clone();
        let (start, pages) = (self.start.clone(), Some(self.pages.clone()));
        let heads = RopeOptions { heads: kv_heads, kv_heads, head_dim, table: None, qk_norm: None };
        ops::rope(&decoder.ctx, kkv, &KvSlots { k, v, start, pages }, heads)?;
        Ok(())
    }
}

impl Decoder {
    /// Creates an empty cache of `pages` pages, for sequences of up to `capacity` positions each: see [`PagedCache::pages`].
    ///
    /// # Errors
    /// [`Error::Context`] for a capacity above the context length of the model. [`Error::Stretched`] for a capacity that changes
    /// the RoPE frequencies.
    pub fn paged_cache(&self, pages: usize, capacity: usize) -> Result<PagedCache, Error> {
        if let Some(max_seq) = self.config.context().filter(|max_seq| capacity > *max_seq) {
            return Err(Error::Context { need: capacity, max_seq });
        }
        let fixed = self.config.ropes.iter().filter_map(|rope| rope.fixed_until()).min();
        match fixed {
            Some(fixed) if capacity > fixed => Err(Error::Stretched { length: capacity }),
            _ => Ok(PagedCache::new(self, pages, capacity)),
        }
    }

    /// Runs prompts of different lengths, each once, for `completions` sequences each, which have room for `room` more tokens, at
    /// most up to the capacity. Returns the numbers of these, in order, and the logits after each prompt, `[prompts, vocab]` in f32.
    ///
    /// # Errors
    /// [`Error::Step`] for an empty prompt, or for none. [`Error::Token`] for a token past the vocabulary. [`Error::Full`] for a
    /// prompt longer than a sequence. [`Error::Pages`] for more pages than are free. [`Error::Op`], [`Error::Failed`]. After an
    /// error no sequence has joined.
    pub fn prefill_groups(
        &self,
        cache: &mut PagedCache,
        prompts: &[impl AsRef<[u32]>],
        completions: usize,
        room: usize,
    ) -> Result<(Vec<Vec<usize>>, Tensor<2>), Error> {
        let _stream_guard = ops::stream_guard();
        let prompts: Vec<&[u32]> = prompts.iter().map(AsRef::as_ref).collect();
        if prompts.is_empty() || prompts.iter().any(|own| own.is_empty()) {
            let tokens = prompts.iter().map(|own| own.len()).collect();
            return Err(Error::Step { batch: prompts.len(), tokens });
        }
        prompts.iter().try_for_each(|own| self.config.check_tokens(own))?;
        let before = cache.sequences.len();
        let run = |cache: &mut PagedCache| {
            let join = |own: &&[u32]| cache.join(own, completions, room);
            let groups = prompts.iter().map(join).collect::<Result<Vec<_>, _>>()?;
            let mut logits = Vec::new();
            let mut from = 0;
            while from < prompts.len() {
                let count = self.packed(&prompts[from..]);
                let (own, joined) = (&prompts[from..from + count], &groups[from..from + count]);
                logits.push(match own {
                    [long] if count == 1 && !self.packs(long.len()) => {
                        self.prefill_one(cache, long, &joined[0])?
                    }
                    _ => {
                        let places = cache.places(own, joined)?;
                        self.prefill_packed(PackedPrefill { prompts: own, places: &places })?
                    }
                });
                from += count;
            }
            Ok((groups, joined(logits, 0)))
        };
        let made = run(cache);
        if made.is_err() {
            (before..cache.sequences.len()).for_each(|sequence| cache.leave(sequence));
            cache.sequences.truncate(before);
        }
        made
    }

    /// Collects the kernels of [`Decoder::prefill_groups`], of the step after it, and those that `then` launches with logits
    /// `[rows, vocab]` of that step. Runs none of them.
    ///
    /// # Errors
    /// The errors of [`Decoder::prefill_groups`] and of `then`.
    pub fn rehearse_groups(
        &self,
        cache: &mut PagedCache,
        prompts: &[impl AsRef<[u32]>],
        (completions, room): (usize, usize),
        then: impl Fn(&Ctx, Tensor<2>) -> Result<(), OpError>,
    ) -> Result<Rehearsed, Error> {
        let rehearsal = self.rehearsal();
        let (groups, _) = rehearsal.prefill_groups(cache, prompts, completions, room)?;
        let all = groups.concat();
        let rows: Vec<_> = all.iter().copied().map(Some).collect();
        let made = match cache.free_to_write(&all) {
            true => rehearsal.decode_paged(cache, &rows, &vec![0; rows.len()]).map(Some),
            false => Ok(None),
        };
        all.iter().for_each(|sequence| cache.leave(*sequence));
        cache.sequences.truncate(all.first().copied().unwrap_or(0));
        // They hold steps that nothing was computed for.
        cache.steps.clear();
        if let Some(logits) = made? {
            then(&rehearsal.ctx, logits)?;
        }
        Ok(rehearsal.ctx.rehearsed())
    }

    /// Returns true if a prompt of this length has its prefill with others. A longer one has it in chunks, and reads its keys from
    /// the cache, as every prompt does if the cache rounds them to bytes.
    fn packs(&self, length: usize) -> bool {
        self.kv == KvFormat::Float && length <= MOST_PACKED
    }

    /// Returns how many of the next prompts have their prefill together.
    fn packed(&self, prompts: &[&[u32]]) -> usize {
        let mut rows = 0;
        let fits = |own: &&&[u32]| {
            rows += own.len();
            self.packs(own.len()) && rows <= MOST_PACKED
        };
        prompts.iter().take_while(fits).count().max(1)
    }

    /// Runs one prompt in chunks: the shared positions once, and the others for each sequence. Returns the last row's logits.
    fn prefill_one(
        &self,
        cache: &PagedCache,
        prompt: &[u32],
        joined: &[usize],
    ) -> Result<Tensor<2>, Error> {
        let shared = PagedCache::shared(prompt.len());
        let mut last = None;
        for (at, sequence) in joined.iter().enumerate() {
            let memory = cache.of_one(*sequence)?;
            let mut from = if at == 0 { 0 } else { shared };
            while from < prompt.len() {
                // The shared positions end with a chunk.
                let end = if from < shared { shared } else { prompt.len() };
                let to = (from + CHUNK).min(end);
                let _prompt = trace::span(|| format!("prompt {}", to - from));
                let step = Step::new(&[&prompt[from..to]], &[from], &self.device);
                let x = self.layers(&memory, &step)?;
                if at == 0 && to == prompt.len() {
                    last = Some(self.logits(self.last(x, &step))?);
                }
                from = to;
            }
        }
        // A prompt without completions has no result.
        last.ok_or(Error::Step { batch: 0, tokens: Vec::new() })
    }

    /// Runs one more token of some sequences, and returns the logits after it, `[sequences, vocab]` in f32. The next step
    /// overwrites them: read them before that, on the thread of the step. A row without a sequence has logits of no meaning;
    /// with such rows in place of sequences that left, the others keep their rows.
    ///
    /// # Errors
    /// [`Error::Step`] for no sequences, or another number of tokens. [`Error::Left`] for a sequence that is not in the cache.
    /// [`Error::Token`], [`Error::Full`], [`Error::Op`], [`Error::Failed`]. After an error the cache is unchanged.
    pub fn decode_paged(
        &self,
        cache: &mut PagedCache,
        sequences: &[Option<usize>],
        tokens: &[u32],
    ) -> Result<Tensor<2>, Error> {
        let _stream_guard = ops::stream_guard();
        let (count, capacity) = (sequences.len(), cache.capacity);
        if count == 0 || tokens.len() != count {
            return Err(Error::Step { batch: count, tokens: vec![1; tokens.len()] });
        }
        self.config.check_tokens(tokens)?;
        let per = capacity.div_ceil(PAGE);
        let batch = PagedCache::rows(count);
        let (mut table, mut start) = (Vec::with_capacity(batch * per), Vec::with_capacity(batch));
        for at in sequences {
            let Some(at) = at else {
                table.extend(vec![0; per]);
                start.push(0);
                continue;
            };
            let own = cache.sequence(*at)?;
            if own.tokens.len() >= own.most {
                return Err(Error::Full { need: own.tokens.len() + 1, capacity: own.most });
            }
            table.extend_from_slice(&own.pages);
            table.resize(table.len() + per - own.pages.len(), 0);
            start.push(own.tokens.len() as u32);
        }
        let before = start.iter().copied().max().unwrap_or(0) as usize;
        let longest = decode_longest(before, capacity);
        table.resize(batch * per, 0);
        start.resize(batch, 0);
        // Rows without a sequence all write the same values to page 0.
        let given = sequences.iter().zip(tokens).map(|(at, token)| at.map_or(0, |_| *token));
        let padded: Vec<u32> = given.chain(vec![0; batch - count]).collect();
        let key = [batch, longest];
        if cache.steps.get(&key).is_none_or(|rows| !rows.repeated.is_here()) {
            let pages = Tensor::zeros([batch, per], (&cache.device, DType::I32));
            let rows = Rows {
                memory: Memory { pages: Some(pages), ..cache.memory.clone() },
                repeated: Repeated::new(self, batch, longest),
                loaded: Vec::new(),
            };
            cache.steps.insert(key, rows);
        }
        let rows = cache.steps.get_mut(&key).expect("just inserted");
        if rows.loaded != table {
            let pages = rows.memory.pages.as_ref().expect("rows have a table");
            ops::update_inputs(pages, &table)?;
            rows.loaded = table;
        }
        let _first = trace::first(|| "step");
        let _step = trace::span(|| "step");
        let logits = rows.repeated.run(self, &rows.memory, &padded, &start)?;
        for (at, token) in sequences.iter().zip(tokens) {
            if let Some(at) = at {
                cache.sequences[*at].as_mut().expect("just seen").tokens.push(*token);
            }
        }
        Ok(if batch == count { logits } else { logits.slice_dim(0, 0..count) })
    }
}

#[cfg(test)]
mod tests {
    use super::PagedCache;

    #[test]
    fn rows_are_rounded_up_by_less_than_half() {
        let rows: Vec<usize> =
            [1, 2, 3, 5, 6, 7, 9, 12, 13, 100, 129, 193, 256].map(PagedCache::rows).into();
        assert_eq!(rows, [1, 2, 4, 6, 6, 8, 12, 12, 16, 128, 192, 256, 256]);
    }

    #[test]
    fn completions_share_full_pages() {
        assert_eq!(PagedCache::pages(150, 2, 256), 2 + 2 * 2);
        assert_eq!(PagedCache::pages(3, 4, 64), 4);
        assert_eq!(PagedCache::pages(64, 4, 64), 1);
    }
}
