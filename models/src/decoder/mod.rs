//! A decoder's weights on a device, with prefill, decode and training.
//!
//! ```text
//! x = embed(tokens)                                          [batch · seq, hidden]
//! for each layer:
//!   q, k, v = rope(norm(x) · qkvᵀ)                           k and v go into the cache
//!   x = x + post(attention(q, cache) · outᵀ)                 the sum in the matmul's epilogue
//!   y = norm(x);  x = x + post((act(y · gateᵀ) · (y · upᵀ)) · downᵀ)
//! logits = softcap(norm(x) · headᵀ)                          of the requested rows, in f32
//! ```
//!
//! Launches of a layer: qkv, rope, attention, out, gate, up, down; gate and up are one in 4 bits. For few
//! rows, the norm before a block is fused into the matmuls that read it ([`ops::takes_norm`]). Otherwise it
//! is a launch of its own, as is every norm after a block. If each sequence adds one token per step, a step
//! reads only two words per sequence from the host. It is captured as a graph, if the device can, and
//! replayed.
//!
//! Projections with the same input are one matmul if their weights allow it: queries, keys and values always
//! if dense, gate and up in 4 bits.

mod adapted;
mod backward;
mod batch;
mod cache;
mod cells;
mod flat;
mod flat_adapter;
mod load;
mod memory;
mod paged;
mod precompile;
mod projection;
mod step;
mod unmerged_lora;
mod warnings;

use std::ops::Range;

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use ops::{
    AttentionOptions, Cache, Cached, Ctx, DecodeOptions, Epilogue, KvSlots, Lengths, NormWeights,
    QkNorm, RopeOptions, RowNorm, Table,
};

use crate::{DecoderConfig, Error, KvFormat, ModelPrecision};
pub use adapted::Adapted;
pub use backward::{Activations, Gradients, Loss, Parking, Recompute, TokenStats, Trained};
pub use batch::{Batch, Example, MicroBatch};
pub use cache::KvCache;
pub(crate) use cells::dequantized_bytes;
use cells::{SoFar, dequantized, rearranged};
pub use flat::FlatWeights;
pub(crate) use flat::{normals, zeros};
pub use flat_adapter::FlatAdapter;
pub(crate) use flat_adapter::flat_len;
pub(crate) use load::rounded as rounded_bytes;
pub use load::{LoadOptions, Loading, OnDevice, file_dtype, on_device};
use memory::Memory;
pub use paged::{MOST_PACKED, PagedCache};
use projection::{Ffn, Projection, synchronize};
use step::Step;

/// Longest step of the attention decode kernel, in positions per sequence.
const SHORT: usize = 16;
/// Prompt tokens per prefill chunk, which bounds the memory of activations.
pub(crate) const CHUNK: usize = 2048;

/// A decoder with its weights on a device. It is immutable; clones share its memory.
#[derive(Debug, Clone)]
pub struct Decoder {
    config: DecoderConfig,
    ctx: Ctx,
    device: Device,
    dtype: FloatDType,
    tf32: bool,
    kv: KvFormat,
    /// True if the device captures graphs.
    captures: bool,
    /// `[vocab, hidden]`
    embedding: Tensor<2>,
    /// `[max_seq, hidden]`
    positions: Option<Tensor<2>>,
    layers: Vec<Layer>,
    final_norm: NormWeights,
    head: Projection,
}

/// The weights of one layer.
#[derive(Debug, Clone)]
struct Layer {
    attention_norm: NormWeights,
    /// Queries, keys and values, with their rows in this order.
    qkv: Projection,
    /// Norms of queries and of keys, per head.
    qk_norm: Option<[NormWeights; 2]>,
    out: Projection,
    attention_post_norm: Option<NormWeights>,
    ffn_norm: NormWeights,
    ffn: Ffn,
    ffn_post_norm: Option<NormWeights>,
}

/// Rows that need logits.
#[derive(Debug, Clone, Copy)]
enum Rows {
    /// The last row of each sequence.
    Last,
    /// Every row, of one sequence.
    Each,
}

impl Decoder {
    /// Returns the configuration.
    pub const fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Returns the device of the weights.
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the op context: known configs and tuning policy.
    pub const fn ctx(&self) -> &Ctx {
        &self.ctx
    }

    /// Returns the compute dtype; logits are f32.
    pub const fn dtype(&self) -> FloatDType {
        self.dtype
    }

    /// Returns the bytes of the matrices that every token is multiplied with.
    pub fn matrix_bytes(&self) -> u64 {
        (0..self.layers.len()).map(|index| self.layer_bytes(index)).sum::<u64>() + self.head_bytes()
    }

    /// Returns the bytes of all weights on the device, without norms and biases.
    pub fn weight_bytes(&self) -> u64 {
        let dense = |t: &Tensor<2>| (t.shape().num_elements() * t.dtype().size()) as u64;
        let positions = self.positions.as_ref().map_or(0, dense);
        let embedding = if self.config.tie_embeddings { 0 } else { dense(&self.embedding) };
        self.matrix_bytes() + embedding + positions
    }

    /// Waits until the weights are on the device, and checks that they were allocated. A device enqueues
    /// allocations too, and reports a failed one to its first reader. Norms and biases are small and are not
    /// checked.
    ///
    /// # Errors
    /// [`Error::Failed`].
    pub fn check_allocation(&self) -> Result<(), Error> {
        let _stream_guard = ops::stream_guard();
        synchronize(&self.embedding)?;
        self.positions.as_ref().map_or(Ok(()), synchronize)?;
        for Layer { qkv, out, ffn, .. } in &self.layers {
            qkv.check_allocation()?;
            out.check_allocation()?;
            ffn.check_allocation()?;
        }
        self.head.check_allocation()
    }

    /// Returns the precision of the model; for mixed weight formats, the one with the most work.
    pub fn precision(&self) -> ModelPrecision {
        let of = |layer: &Layer| layer.qkv.format().max(layer.out.format()).max(layer.ffn.format());
        let weight_format = self.layers.iter().map(of).max().flatten();
        let columns =
            |layer: &Layer| layer.qkv.columns().max(layer.out.columns()).max(layer.ffn.columns());
        let lora_columns = self.layers.iter().map(columns).max().unwrap_or(0);
        ModelPrecision {
            dtype: self.dtype,
            tf32: self.tf32,
            weight_format,
            kv: self.kv,
            lora_columns,
        }
    }

    /// Returns the bytes of keys and values that a step of `batch` sequences of `positions` each reads. A
    /// layer with a window reads only the positions in it.
    pub fn read_bytes(&self, batch: usize, positions: usize) -> u128 {
        let DecoderConfig { kv_heads, head_dim, layers, .. } = &self.config;
        let seen = |window: Option<usize>| window.unwrap_or(positions).min(positions) as u128;
        let all: u128 = layers.iter().map(|layer| seen(layer.window)).sum();
        all * 2 * (batch * kv_heads) as u128 * self.precision().kv_bytes(*head_dim)
    }

    /// Returns the bytes of the weights of a layer, without norms and biases.
    ///
    /// # Panics
    /// Panics if the model has no such layer.
    pub fn layer_bytes(&self, index: usize) -> u64 {
        let layer = &self.layers[index];
        layer.qkv.bytes() + layer.out.bytes() + layer.ffn.bytes()
    }

    /// Returns the bytes of the output projection.
    pub fn head_bytes(&self) -> u64 {
        self.head.bytes()
    }

    /// Creates an empty KV cache for `batch` sequences of up to `capacity` positions.
    ///
    /// # Errors
    /// [`Error::Context`] for a capacity above the context length of the model.
    pub fn cache(&self, batch: usize, capacity: usize) -> Result<KvCache, Error> {
        if let Some(max_seq) = self.config.context().filter(|max_seq| capacity > *max_seq) {
            return Err(Error::Context { need: capacity, max_seq });
        }
        Ok(KvCache::new(self, batch, capacity))
    }

    /// Runs the next tokens of every sequence of `cache`, the same number for each, and returns the logits
    /// after the last one.
    ///
    /// # Shapes
    /// tokens `[batch][seq]`; the result `[batch, vocab]` in f32. After one token per sequence, the next step
    /// overwrites the result, as in [`Decoder::decode`].
    ///
    /// # Errors
    /// [`Error::Step`] for no tokens, for different numbers of tokens, and for more than 16 tokens if several
    /// sequences differ in length. [`Error::Token`] for a token past the vocabulary. [`Error::Full`] for more
    /// positions than the cache holds. [`Error::Stretched`] for several sequences past the length that
    /// changes the RoPE frequencies. [`Error::Op`], [`Error::Failed`]. After an error the cache is unchanged,
    /// or empty if a re-prefill was needed.
    pub fn prefill(
        &self,
        cache: &mut KvCache,
        tokens: &[impl AsRef<[u32]>],
    ) -> Result<Tensor<2>, Error> {
        let tokens: Vec<&[u32]> = tokens.iter().map(AsRef::as_ref).collect();
        let mut last = None;
        self.pass(cache, &tokens, Rows::Last, &mut |logits| {
            last = Some(logits);
            Ok::<_, Error>(())
        })?;
        Ok(last.expect("the last chunk has the last rows"))
    }

    /// Runs the next tokens of one sequence. Passes the logits after each of them to `each`, some rows at a
    /// time, `[rows, vocab]` in f32. The logits of all rows are never on the device together. They take no
    /// more memory than the layers did.
    ///
    /// # Errors
    /// The errors of [`Decoder::prefill`], and those of `each`. The state of the cache is then as after an
    /// error of `prefill`.
    pub fn prefill_each<E: From<Error>>(
        &self,
        cache: &mut KvCache,
        tokens: &[u32],
        mut each: impl FnMut(Tensor<2>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.pass(cache, &[tokens], Rows::Each, &mut each)
    }

    /// Runs one more token of every sequence of `cache` and returns the logits after it, `[batch, vocab]` in
    /// f32. The next step overwrites them: read them before that, on the thread of the step.
    ///
    /// # Errors
    /// The errors of [`Decoder::prefill`].
    pub fn decode(&self, cache: &mut KvCache, tokens: &[u32]) -> Result<Tensor<2>, Error> {
        self.prefill(cache, &tokens.chunks(1).collect::<Vec<_>>())
    }

    /// Runs tokens, and passes the logits of the requested rows to `each`.
    fn pass<E: From<Error>>(
        &self,
        cache: &mut KvCache,
        tokens: &[&[u32]],
        rows: Rows,
        each: &mut impl FnMut(Tensor<2>) -> Result<(), E>,
    ) -> Result<(), E> {
        let _stream_guard = ops::stream_guard();
        let seq = self.check(cache, tokens)?;
        let whole = self.tokens_to_reprefill(cache, tokens, seq)?;
        let before = cache.lengths();
        let passed = match &whole {
            None => self.chunks(cache, tokens, 0, rows, each),
            Some(whole) => self.chunks(cache, &[whole], whole.len() - seq, rows, each),
        };
        if passed.is_err() {
            cache.cut(&before);
        }
        passed
    }

    /// Returns all tokens of a sequence for a re-prefill, with its cache cleared. None if the frequencies of
    /// its cached keys are right for `seq` more tokens.
    fn tokens_to_reprefill(
        &self,
        cache: &mut KvCache,
        tokens: &[&[u32]],
        seq: usize,
    ) -> Result<Option<Vec<u32>>, Error> {
        let longest = cache.longest() + seq;
        if cache.ensure_rotated_for(&self.config, longest, &self.device) {
            return Ok(None);
        }
        if cache.batch() > 1 {
            return Err(Error::Stretched { length: longest });
        }
        let whole = [cache.tokens(0), tokens[0]].concat();
        cache.clear();
        cache.build_rope_tables(&self.config, longest, &self.device);
        Ok(Some(whole))
    }

    /// Checks the tokens of a step, and returns their number per sequence.
    fn check(&self, cache: &KvCache, tokens: &[&[u32]]) -> Result<usize, Error> {
        let seq = tokens.first().map_or(0, |first| first.len());
        let batch = cache.batch();
        let even = seq > 0 && tokens.iter().all(|own| own.len() == seq);
        let lengths = cache.lengths();
        let joint = seq <= SHORT || lengths.iter().all(|own| *own == lengths[0]);
        if tokens.len() != batch || !even || !joint {
            return Err(Error::Step {
                batch,
                tokens: tokens.iter().map(|own| own.len()).collect(),
            });
        }
        tokens.iter().try_for_each(|own| self.config.check_tokens(own))?;
        let (need, capacity) = (cache.longest() + seq, cache.capacity());
        if need > capacity {
            return Err(Error::Full { need, capacity });
        }
        Ok(seq)
    }

    /// Runs valid tokens: one per sequence as a step that may be captured, more in chunks. `each` gets the
    /// logits of the rows after the first `skipped` of each sequence.
    fn chunks<E: From<Error>>(
        &self,
        cache: &mut KvCache,
        tokens: &[&[u32]],
        skipped: usize,
        rows: Rows,
        each: &mut impl FnMut(Tensor<2>) -> Result<(), E>,
    ) -> Result<(), E> {
        let (batch, seq) = (tokens.len(), tokens[0].len());
        if seq == 1 {
            let _first = trace::first(|| "step");
            let _step = trace::span(|| "step");
            let logits = cache.single(self, tokens)?;
            cache.push(tokens);
            return each(logits);
        }
        let chunk = (CHUNK / batch).max(1);
        for from in (0..seq).step_by(chunk) {
            let to = (from + chunk).min(seq);
            let _first = trace::first(|| "prompt");
            let _prompt = trace::span(|| format!("prompt {}", to - from));
            let part: Vec<&[u32]> = tokens.iter().map(|own| &own[from..to]).collect();
            let step = Step::new(&part, &cache.lengths(), &self.device);
            let x = self.layers(cache.memory(), &step)?;
            cache.push(&part);
            match rows {
                Rows::Last if to < seq => {}
                Rows::Last => each(self.logits(self.last(x, &step))?)?,
                Rows::Each => {
                    let (rows, begin) = (to - from, skipped.clamp(from, to) - from);
                    let parts = rows.div_ceil(self.config.rows_with_logits(self.precision(), rows));
                    let at_once = rows.div_ceil(parts);
                    for row in (begin..rows).step_by(at_once) {
                        let end = (row + at_once).min(rows);
                        each(self.logits(x.clone().slice_dim(0, row..end))?)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the last row of each sequence.
    fn last(&self, x: Tensor<2>, step: &Step) -> Tensor<2> {
        let ([batch, seq], hidden) = (step.tokens.dims(), self.config.hidden);
        let x = x.reshape([batch, seq, hidden]);
        x.slice([0..batch, seq - 1..seq]).reshape([batch, hidden])
    }

    /// Returns the output of the last layer, `[batch · seq, hidden]`.
    fn layers(&self, memory: &Memory, step: &Step) -> Result<Tensor<2>, Error> {
        let lengths = step.start.clone() + step.tokens.dims()[1] as i32;
        self.walk(memory, step, lengths, 0..self.layers.len())
    }

    /// Returns the output of the last layer in `indices`, `[batch · seq, hidden]`. `lengths` are the
    /// positions of each sequence after the step.
    fn walk(
        &self,
        memory: &Memory,
        step: &Step,
        lengths: Tensor<1, Int>,
        indices: impl IntoIterator<Item = usize>,
    ) -> Result<Tensor<2>, Error> {
        let scale = self.config.embedding_scale.map_or(1.0, |scale| rounded(scale, self.dtype));
        let (tokens, start) = (step.tokens.clone(), step.start.clone());
        let (table, positions) = (self.embedding.clone(), self.positions.clone());
        let mut x = {
            let _part = trace::span(|| "embedding");
            ops::embed(&self.ctx, tokens, table, start, positions, scale)?
        };
        let lengths = Lengths::Device { lengths, longest: step.longest as u32 };
        for index in indices {
            let _layer = trace::span(|| format!("layer {index}"));
            x = self.attend(index, x, memory, step, &lengths)?;
            x = self.feed(index, x)?;
        }
        Ok(x)
    }

    /// Returns x plus the output of attention.
    fn attend(
        &self,
        index: usize,
        x: Tensor<2>,
        memory: &Memory,
        step: &Step,
        lengths: &Lengths,
    ) -> Result<Tensor<2>, Error> {
        let (layer, rules) = (&self.layers[index], &self.config.layers[index]);
        let DecoderConfig { heads, kv_heads, head_dim, .. } = self.config;
        let [batch, seq] = step.tokens.dims();
        let takes = layer.qkv.takes_norm(&self.ctx, &x, self.config.norm.kind)?;
        let (y, norm) = self.normed(&layer.attention_norm, x.clone(), takes)?;
        let epilogue = Epilogue { norm, ..Epilogue::default() };
        let qkv = self.paced(layer.qkv.apply(&self.ctx, y, epilogue)?)?;
        let (k, v) = memory.layers[index].clone();
        let pages = memory.pages.clone();
        let start = step.start.clone();
        let slots = KvSlots { k: k.clone(), v: v.clone(), start, pages: pages.clone() };
        let qk_norm = layer.qk_norm.as_ref().map(|[q, k]| QkNorm {
            kind: self.config.norm.kind,
            eps: self.config.norm.eps as f32,
            q: q.weight.clone(),
            k: k.weight.clone(),
        });
        let table = rules.rope.map(|rope| memory.tables[rope].clone());
        let heads_of = RopeOptions { heads, kv_heads, head_dim, table, qk_norm };
        let q = self.paced(ops::rope(&self.ctx, qkv, &slots, heads_of)?)?; // [batch, heads, seq, head_dim]
        let (scale, softcap) =
            (Some(rules.scale as f32), self.config.softcap.map(|cap| cap as f32));
        let window = rules.window.map(|window| u32::try_from(window).unwrap_or(u32::MAX));
        let a = if seq <= SHORT {
            let cache = Cache { k, v, lengths: lengths.clone(), table: pages.map(Table::Device) };
            let rules = DecodeOptions { scale, softcap, window, implementation: None };
            self.paced(ops::decode(&self.ctx, q, cache, rules)?)?
        } else {
            let rules =
                AttentionOptions { scale, softcap, causal: true, window, implementation: None };
            let of = |q: Tensor<4>, sequences: Range<usize>| {
                let so_far = SoFar { sequences, longest: step.longest, pages: pages.as_ref() };
                let so_far = |cached: &Cached| {
                    dequantized(rearranged([cached.clone()], &so_far), self.dtype)
                };
                ops::attention(&self.ctx, q, so_far(&k), so_far(&v), None, None, rules)
            };
            match self.kv {
                KvFormat::Float => of(q, 0..batch)?,
                // Only one sequence at a time is dequantised, which bounds the memory.
                KvFormat::Int8 => {
                    let one = |at| of(q.clone().slice_dim(0, at..at + 1), at..at + 1);
                    joined((0..batch).map(one).collect::<Result<_, _>>()?, 0)
                }
            }
        };
        let a = a.swap_dims(1, 2).reshape([batch * seq, heads * head_dim]);
        self.add(&layer.out, a, x, layer.attention_post_norm.as_ref())
    }

    /// Returns x plus the output of the feed-forward block.
    fn feed(&self, index: usize, x: Tensor<2>) -> Result<Tensor<2>, Error> {
        let layer = &self.layers[index];
        let takes = layer.ffn.takes_norm(&self.ctx, &x, self.config.norm.kind)?;
        let (y, norm) = self.normed(&layer.ffn_norm, x.clone(), takes)?;
        let (inner, down) = layer.ffn.inner(&self.ctx, y, norm, self.config.activation)?;
        let inner = self.paced(inner)?;
        self.add(down, inner, x, layer.ffn_post_norm.as_ref())
    }

    /// Returns x + post(y · weightᵀ + bias).
    fn add(
        &self,
        projection: &Projection,
        y: Tensor<2>,
        x: Tensor<2>,
        post: Option<&NormWeights>,
    ) -> Result<Tensor<2>, Error> {
        Ok(match post {
            None => {
                let residual = Some(x);
                self.paced(projection.apply(
                    &self.ctx,
                    y,
                    Epilogue { residual, ..Epilogue::default() },
                )?)?
            }
            Some(norm) => {
                let y = projection.apply(&self.ctx, y, Epilogue::default())?;
                self.norm(norm, y, Some(x))?
            }
        })
    }

    /// Returns the logits of rows `[rows, hidden]`, in f32.
    fn logits(&self, x: Tensor<2>) -> Result<Tensor<2>, Error> {
        let _part = trace::span(|| "head");
        let takes = self.head.takes_norm(&self.ctx, &x, self.config.norm.kind)?;
        let (y, norm) = self.normed(&self.final_norm, x, takes)?;
        let logits = self.head.in_f32(&self.ctx, y, norm)?;
        Ok(match self.config.logit_softcap {
            None => logits,
            Some(cap) => (logits / cap).tanh() * cap,
        })
    }

    /// Returns x and a norm for the matmuls that read it to fuse, if `takes` allows it, otherwise norm(x).
    fn normed(
        &self,
        weights: &NormWeights,
        x: Tensor<2>,
        takes: bool,
    ) -> Result<(Tensor<2>, Option<RowNorm>), Error> {
        let (crate::Norm { kind, eps }, NormWeights { weight, bias }) = (self.config.norm, weights);
        if takes && bias.is_none() {
            return Ok((x, Some(RowNorm { weight: weight.clone(), kind, eps: eps as f32 })));
        }
        Ok((self.norm(weights, x, None)?, None))
    }

    /// Returns residual + norm(x).
    fn norm(
        &self,
        weights: &NormWeights,
        x: Tensor<2>,
        residual: Option<Tensor<2>>,
    ) -> Result<Tensor<2>, Error> {
        let crate::Norm { kind, eps } = self.config.norm;
        self.paced(ops::norm(&self.ctx, x, weights.clone(), residual, kind, eps as f32)?)
    }

    /// Waits for the launch of `made` if host and device share the processor. On two cores, a host that runs
    /// ahead takes one from a kernel, whose other half then spins. The demo model generated 63 tokens/s that
    /// way, on the machine that records 229 tokens/s in the quick suite.
    fn paced<const D: usize>(&self, made: Tensor<D>) -> Result<Tensor<D>, Error> {
        if !self.captures {
            self.device.sync().map_err(|why| Error::Failed(format!("{why:?}")))?;
        }
        Ok(made)
    }
}

/// Concatenates tensors along a dimension; a single one is not copied.
fn joined<const D: usize>(mut parts: Vec<Tensor<D>>, dim: usize) -> Tensor<D> {
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, dim) }
}

/// Returns a factor rounded to the model's dtype.
fn rounded(scale: f64, dtype: FloatDType) -> f32 {
    match DType::from(dtype) {
        DType::BF16 => half::bf16::from_f64(scale).to_f32(),
        DType::F16 => half::f16::from_f64(scale).to_f32(),
        _ => scale as f32,
    }
}
