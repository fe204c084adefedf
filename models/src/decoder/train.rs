//! Training of an adapter: the gradient of a loss with respect to it. The decoder's own weights are frozen.
//!
//! ```text
//! x₀ = embed(tokens)
//! for each layer l: keep x_l;  x_{l+1} = layer_l(x_l)                 no graph, fused launches
//! loss, dx = cross entropy of head(norm(x_L)), some rows at a time    no logits are kept
//! for each layer l, the last first: x_{l+1} = layer_l(x_l) once more, as a graph;
//!                                   dx, dA, dB = its gradients, given dx
//! ```
//!
//! Each layer is a graph of its own, which lives while its gradients are computed (Chen et al., 2016,
//! arXiv:1604.06174). Live at once are the input of every layer and the saved tensors of one layer, at any
//! depth. The cost is a second forward pass of each layer: a step runs three matmuls per frozen matrix
//! instead of two (forward, forward again, backward). [`Recompute::Nothing`] keeps all graphs and skips the
//! second forward pass.
//!
//! Sequences are padded on the right. A causal model does not attend to the padding, and the loss ignores it.

use std::ops::Range;

use burn::tensor::{DType, FloatDType, Gradients, IndexingUpdateOp, Int, Tensor, TensorData};
use ops::{AttentionOptions, Epilogue, linear};

use super::batch::Example;
use super::memory::tables;
use super::projection::{Ffn, Projection};
use super::{Decoder, joined, rounded};
use crate::lora::{Block, Factor, LoraOptions};
use crate::{DecoderConfig, Error};

/// Activations that the backward pass recomputes instead of keeping them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Recompute {
    /// All activations of a layer except its input.
    #[default]
    Layers,
    /// Results of norms. For an adapter the same as [`Recompute::Layers`].
    Norms,
    /// None: all graphs are kept, which takes more memory and saves a forward pass.
    Nothing,
}

/// Loss and gradient of a batch.
#[derive(Debug)]
pub struct Learned {
    /// Sum of -ln p(token) over the learned tokens, `[1]` in f32.
    pub loss: Tensor<1>,
    /// Gradient of `weight` · loss for each value of the adapter, in f32.
    pub gradient: Tensor<1>,
    /// Number of learned tokens.
    pub tokens: usize,
}

/// An adapter on the device of a decoder.
#[derive(Debug, Clone, Copy)]
pub struct Adaptation<'a> {
    /// Rank and scale of the factors.
    pub options: &'a LoraOptions,
    /// Factors, in the order of their values.
    pub factors: &'a [Factor],
    /// A and B of each factor, in f32.
    pub values: &'a Tensor<1>,
}

/// A batch on the device.
struct TrainBatch {
    batch: usize,
    /// Length of the longest sequence.
    seq: usize,
    /// `[batch, seq]`
    tokens: Tensor<2, Int>,
    /// Rows of the residual stream whose next token is learned, and that token.
    rows: Tensor<1, Int>,
    next: Tensor<1, Int>,
    count: usize,
    /// One table `[seq, dim]` per rope.
    tables: Vec<Tensor<2>>,
}

/// A and s·B of one module, in the compute dtype.
struct Pair {
    /// Index among the adapter's factors.
    factor: usize,
    block: Block,
    /// Rows of the block that the pair contributes to.
    rows: Range<usize>,
    /// `[rank, k]`
    a: Tensor<2>,
    /// `[rows, rank]`
    b: Tensor<2>,
}

/// A layer's graph, from its leaves to its output.
struct Graph {
    x: Tensor<2>,
    pairs: Vec<Pair>,
    out: Tensor<2>,
}

/// Most logits that are live at once: 64 MiB. A single row may exceed it.
const LOGITS: usize = 1 << 24;

impl DecoderConfig {
    /// Returns the number of rows whose logits are live at once during training.
    pub(crate) fn rows_with_loss(&self, rows: usize) -> usize {
        (LOGITS / self.vocab).clamp(1, rows.max(1))
    }
}

impl Decoder {
    /// Computes the loss of a batch, and the gradient of `weight` · loss with respect to an adapter.
    ///
    /// # Errors
    /// [`Error::NothingToLearn`] for a batch without target tokens or with an empty sequence. [`Error::Token`].
    /// [`Error::Context`] for a sequence longer than the context length of the model. [`Error::Op`].
    ///
    /// # Panics
    /// Panics if the backward pass of an op fails, because it cannot return an error.
    pub fn learn(
        &self,
        adaptation: Adaptation<'_>,
        batch: &[Example],
        weight: f64,
        recompute: Recompute,
    ) -> Result<Learned, Error> {
        let _stream_guard = ops::stream_guard();
        let train_batch = self.train_batch(batch)?;
        let layers = self.layers.len();
        // Layers below the lowest adapted layer need no gradient.
        let lowest = adaptation.factors.iter().map(|own| own.layer).min().unwrap_or(layers);
        let mut x = self.embedded(&train_batch)?;
        let (mut inputs, mut graphs) = (Vec::new(), Vec::new());
        for index in 0..layers {
            let _layer = trace::span(|| format!("layer {index}"));
            if recompute == Recompute::Nothing && index >= lowest {
                let graph = self.graph(index, x, adaptation, &train_batch, index > lowest)?;
                x = graph.out.clone().inner();
                graphs.push(graph);
                continue;
            }
            let pairs = self.pairs(index, adaptation);
            let out = self.adapted_layer(index, x.clone(), &pairs, &train_batch)?;
            if index >= lowest {
                inputs.push(x);
            }
            x = out;
        }
        let (loss, dx) = self.loss(x, &train_batch, Some(weight))?;
        let mut dx = dx.expect("it is asked for");
        let mut parts = vec![None; adaptation.factors.len()];
        for index in (lowest..layers).rev() {
            let _layer = trace::span(|| format!("backward {index}"));
            let graph = match inputs.pop() {
                Some(x) => self.graph(index, x, adaptation, &train_batch, index > lowest)?,
                None => graphs.pop().expect("a layer that learns has its input or its graph"),
            };
            self.note_memory();
            let Graph { x, pairs, out } = graph;
            let mut gradients = given(out, dx);
            for Pair { factor, a, b, .. } in pairs {
                let [a, b] = [a, b].map(|leaf| {
                    taken(&leaf, &mut gradients).cast(FloatDType::F32).flatten::<1>(0, 1)
                });
                parts[factor] = Some([a, b * adaptation.options.scale()]);
            }
            if index == lowest {
                break;
            }
            dx = taken(&x, &mut gradients);
        }
        let gradient = Tensor::cat(parts.into_iter().flatten().flatten().collect(), 0);
        Ok(Learned { loss, gradient, tokens: train_batch.count })
    }

    /// Computes the sum of -ln p over the learned tokens of a batch, `[1]` in f32, and the number of these
    /// tokens.
    ///
    /// # Errors
    /// The errors of [`Decoder::learn`].
    pub fn loss_of(
        &self,
        adaptation: Adaptation<'_>,
        batch: &[Example],
    ) -> Result<(Tensor<1>, usize), Error> {
        let _stream_guard = ops::stream_guard();
        let train_batch = self.train_batch(batch)?;
        let mut x = self.embedded(&train_batch)?;
        for index in 0..self.layers.len() {
            let _layer = trace::span(|| format!("layer {index}"));
            x = self.adapted_layer(index, x, &self.pairs(index, adaptation), &train_batch)?;
        }
        Ok((self.loss(x, &train_batch, None)?.0, train_batch.count))
    }

    /// Records memory use in a trace.
    pub(super) fn note_memory(&self) {
        trace::memory(|| {
            let usage = self.device.memory_pool_usage();
            usage.map_or((0, 0), |usage| (usage.bytes_in_use, usage.bytes_reserved))
        });
    }

    /// Uploads a batch, padded to its longest sequence.
    fn train_batch(&self, batch: &[Example]) -> Result<TrainBatch, Error> {
        let seq = batch.iter().map(|own| own.tokens.len()).max().unwrap_or(0);
        let count: usize = batch.iter().map(Example::learned).sum();
        if count == 0 || batch.iter().any(|own| own.tokens.is_empty()) {
            return Err(Error::NothingToLearn);
        }
        if let Some(max_seq) = self.config.context().filter(|max| seq > *max) {
            return Err(Error::Context { need: seq, max_seq });
        }
        batch.iter().try_for_each(|own| self.config.check_tokens(&own.tokens))?;
        let (mut ids, mut rows, mut next) = (Vec::new(), Vec::new(), Vec::new());
        for (sequence, Example { tokens, from }) in batch.iter().enumerate() {
            for (at, token) in tokens.iter().enumerate().skip((*from).max(1)) {
                rows.push((sequence * seq + at - 1) as i32);
                next.push(token.cast_signed());
            }
            ids.extend(tokens.iter().map(|id| id.cast_signed()));
            ids.resize((sequence + 1) * seq, 0);
        }
        let list = |words: Vec<i32>| {
            let len = words.len();
            Tensor::<1, Int>::from_data(TensorData::new(words, [len]), (&self.device, DType::I32))
        };
        Ok(TrainBatch {
            batch: batch.len(),
            seq,
            tokens: list(ids).reshape([batch.len(), seq]),
            rows: list(rows),
            next: list(next),
            count,
            tables: tables(&self.config, seq, seq, &self.device),
        })
    }

    /// Returns the embeddings, `[batch · seq, hidden]`.
    fn embedded(&self, train_batch: &TrainBatch) -> Result<Tensor<2>, Error> {
        let _part = trace::span(|| "embedding");
        let start = Tensor::zeros([train_batch.batch], (&self.device, DType::I32));
        let scale = self.config.embedding_scale.map_or(1.0, |scale| rounded(scale, self.dtype));
        let (table, positions) = (self.embedding.clone(), self.positions.clone());
        Ok(ops::embed(&self.ctx, train_batch.tokens.clone(), table, start, positions, scale)?)
    }

    /// Returns the factors of a layer.
    fn pairs(&self, layer: usize, adaptation: Adaptation<'_>) -> Vec<Pair> {
        let Adaptation { options, factors, values } = adaptation;
        let part = |from: usize, shape: [usize; 2]| {
            let all = from..from + shape[0] * shape[1];
            values.clone().slice_dim(0, all).reshape(shape)
        };
        let own = factors.iter().enumerate().filter(|(_, factor)| factor.layer == layer);
        own.map(|(index, factor)| {
            let (rank, [a, _]) = (options.rank, factor.sizes(options.rank));
            let b: Tensor<2> = part(factor.at + a, [factor.n, rank]) * options.scale();
            Pair {
                factor: index,
                block: factor.block,
                rows: factor.row..factor.row + factor.n,
                a: part(factor.at, [rank, factor.k]).cast(self.dtype),
                b: b.cast(self.dtype),
            }
        })
        .collect()
    }

    fn graph(
        &self,
        index: usize,
        x: Tensor<2>,
        adaptation: Adaptation<'_>,
        train_batch: &TrainBatch,
        below: bool,
    ) -> Result<Graph, Error> {
        let leaf = |part: Tensor<2>| part.autodiff().require_grad();
        let pairs = self.pairs(index, adaptation).into_iter();
        let pairs: Vec<Pair> =
            pairs.map(|pair| Pair { a: leaf(pair.a), b: leaf(pair.b), ..pair }).collect();
        let x = if below { leaf(x) } else { x };
        let out = self.adapted_layer(index, x.clone(), &pairs, train_batch)?;
        Ok(Graph { x, pairs, out })
    }

    /// Returns the output of an adapted layer for x `[batch · seq, hidden]`.
    fn adapted_layer(
        &self,
        index: usize,
        x: Tensor<2>,
        pairs: &[Pair],
        train_batch: &TrainBatch,
    ) -> Result<Tensor<2>, Error> {
        let layer = &self.layers[index];
        let y = self.norm(&layer.attention_norm, x.clone(), None)?;
        let qkv = self.adapted(&layer.qkv, Block::Qkv, y, None, pairs)?;
        let a = self.attention(index, qkv, train_batch)?;
        let x = match &layer.attention_post_norm {
            None => self.adapted(&layer.out, Block::Out, a, Some(x), pairs)?,
            Some(norm) => {
                let a = self.adapted(&layer.out, Block::Out, a, None, pairs)?;
                self.norm(norm, a, Some(x))?
            }
        };
        let y = self.norm(&layer.ffn_norm, x.clone(), None)?;
        let (inner, down) = self.inner(&layer.ffn, y, pairs)?;
        match &layer.ffn_post_norm {
            None => self.adapted(down, Block::Down, inner, Some(x), pairs),
            Some(norm) => {
                let y = self.adapted(down, Block::Down, inner, None, pairs)?;
                self.norm(norm, y, Some(x))
            }
        }
    }

    /// Computes attention from qkv `[batch · seq, (heads + 2 · kv_heads) · head_dim]` to `[batch · seq, heads
    /// · head_dim]`.
    fn attention(
        &self,
        index: usize,
        qkv: Tensor<2>,
        train_batch: &TrainBatch,
    ) -> Result<Tensor<2>, Error> {
        let (layer, rules) = (&self.layers[index], &self.config.layers[index]);
        let DecoderConfig { heads, kv_heads, head_dim, .. } = self.config;
        let TrainBatch { batch, seq, .. } = *train_batch;
        let part = |first: usize, own: usize| {
            qkv.clone().slice_dim(1, first * head_dim..(first + own) * head_dim)
        };
        let rotate = |first: usize, own: usize, norm: usize| {
            let mut part = part(first, own);
            if let Some(norms) = &layer.qk_norm {
                part =
                    self.norm(&norms[norm], part.reshape([batch * seq * own, head_dim]), None)?;
            }
            let part = part.reshape([batch, seq, own, head_dim]);
            Ok::<_, Error>(match rules.rope {
                Some(rope) => rotated(part, &train_batch.tables[rope]),
                None => part,
            })
        };
        let (q, k) = (rotate(0, heads, 0)?, rotate(heads, kv_heads, 1)?);
        let v = part(heads + kv_heads, kv_heads).reshape([batch, seq, kv_heads, head_dim]);
        let options = AttentionOptions {
            scale: Some(rules.scale as f32),
            softcap: self.config.softcap.map(|cap| cap as f32),
            causal: true,
            window: rules.window.map(|window| u32::try_from(window).unwrap_or(u32::MAX)),
            implementation: None,
        };
        let [q, k, v] = [q, k, v].map(|part| part.swap_dims(1, 2));
        let a = self.paced(ops::attention(&self.ctx, q, k, v, None, None, options)?)?;
        Ok(a.swap_dims(1, 2).reshape([batch * seq, heads * head_dim]))
    }

    /// Returns the input of the last matmul of a feed-forward block, and that projection.
    fn inner<'a>(
        &self,
        ffn: &'a Ffn,
        y: Tensor<2>,
        pairs: &[Pair],
    ) -> Result<(Tensor<2>, &'a Projection), Error> {
        let activation = self.config.activation;
        if pairs.iter().all(|pair| pair.block != Block::Inner) {
            let (inner, down) = ffn.inner(&self.ctx, y, None, activation)?;
            return Ok((self.paced(inner)?, down));
        }
        let more = |rows| self.delta(Block::Inner, rows, &y, pairs);
        let (inner, down) = ffn.inner_with(&self.ctx, y.clone(), activation, more)?;
        Ok((self.paced(inner)?, down))
    }

    /// Returns residual + y · (W + s·B·A)ᵀ + bias.
    fn adapted(
        &self,
        of: &Projection,
        block: Block,
        y: Tensor<2>,
        residual: Option<Tensor<2>>,
        pairs: &[Pair],
    ) -> Result<Tensor<2>, Error> {
        let delta = self.delta(block, 0..self.config.block_rows(block), &y, pairs)?;
        let residual = match (delta, residual) {
            (Some(delta), Some(residual)) => Some(delta + residual),
            (delta, residual) => delta.or(residual),
        };
        self.paced(of.apply(&self.ctx, y, Epilogue { residual, ..Epilogue::default() })?)
    }

    /// Returns s·(y·Aᵀ)·Bᵀ for some rows of a block, 0 for modules without factors; none if no module has
    /// factors.
    fn delta(
        &self,
        block: Block,
        rows: Range<usize>,
        y: &Tensor<2>,
        pairs: &[Pair],
    ) -> Result<Option<Tensor<2>>, ops::OpError> {
        let zeros = |width: usize| {
            Tensor::zeros([y.dims()[0], width], (&self.device, DType::from(self.dtype)))
        };
        let (mut parts, mut at) = (Vec::new(), rows.start);
        // Factors come in the order of their rows.
        for pair in pairs.iter().filter(|pair| pair.block == block) {
            let (first, last) = (pair.rows.start.max(rows.start), pair.rows.end.min(rows.end));
            if first >= last {
                continue;
            }
            if first > at {
                parts.push(zeros(first - at));
            }
            let own = first - pair.rows.start..last - pair.rows.start;
            let h = linear(&self.ctx, y.clone(), pair.a.clone().transpose(), Epilogue::default())?;
            let b = pair.b.clone().slice_dim(0, own).transpose();
            parts.push(linear(&self.ctx, h, b, Epilogue::default())?);
            at = last;
        }
        if parts.is_empty() {
            return Ok(None);
        }
        if at < rows.end {
            parts.push(zeros(rows.end - at));
        }
        Ok(Some(joined(parts, 1)))
    }

    /// Computes the sum of -ln p over the learned tokens, `[1]`. With a weight, also computes the gradient of
    /// `weight` · loss with respect to x, in the shape of x.
    ///
    /// With p = softmax(logits), the gradient of the logits is `weight · (p - 1 at the token)`.
    fn loss(
        &self,
        x: Tensor<2>,
        train_batch: &TrainBatch,
        weight: Option<f64>,
    ) -> Result<(Tensor<1>, Option<Tensor<2>>), Error> {
        let _part = trace::span(|| "loss");
        let shape = x.dims();
        let x = x.select(0, train_batch.rows.clone());
        let (mut loss, mut parts) = (None, Vec::new());
        let at_once = self.config.rows_with_loss(train_batch.count);
        for from in (0..train_batch.count).step_by(at_once) {
            let to = (from + at_once).min(train_batch.count);
            let x = x.clone().slice_dim(0, from..to);
            let x = if weight.is_some() { x.autodiff().require_grad() } else { x };
            let logits = self.logits(x.clone())?;
            let next = train_batch.next.clone().slice_dim(0, from..to).reshape([to - from, 1]);
            let plain = logits.clone().inner();
            let row_max = plain.clone().max_dim(1);
            let token = plain.clone().gather(1, next.clone()) - row_max.clone();
            let shares = (plain - row_max).exp();
            let sums = shares.clone().sum_dim(1);
            let own = (sums.clone().log() - token).sum();
            loss = Some(loss.map_or(own.clone(), |loss: Tensor<1>| loss + own));
            let Some(weight) = weight else { continue };
            let ones = Tensor::full(next.dims(), -weight, (&self.device, DType::F32));
            self.note_memory();
            let p = shares * (sums.recip() * weight);
            let dlogits = p.scatter(1, next, ones, IndexingUpdateOp::Add);
            parts.push(taken(&x, &mut given(logits, dlogits)));
        }
        let loss = loss.expect("something is learned");
        if parts.is_empty() {
            return Ok((loss, None));
        }
        let empty = Tensor::zeros(shape, (&self.device, DType::from(self.dtype)));
        let (rows, learned) = (train_batch.rows.clone(), joined(parts, 0));
        Ok((loss, Some(empty.select_assign(0, rows, learned, IndexingUpdateOp::Add))))
    }
}

/// Rotates x `[batch, seq, heads, head_dim]` by its positions, like [`ops::rope`], with ordinary
/// differentiable ops.
fn rotated(x: Tensor<4>, table: &Tensor<2>) -> Tensor<4> {
    let ([.., head_dim], [seq, dim]) = (x.dims(), table.dims());
    let (dtype, half) = (x.dtype(), dim / 2);
    let table = table.clone().reshape([1, seq, 1, dim]);
    let (cos, sin) = (table.clone().slice_dim(3, 0..half), table.slice_dim(3, half..dim));
    let x: Tensor<4> = x.cast(FloatDType::F32);
    let part = |from: usize, to: usize| x.clone().slice_dim(3, from..to);
    let (a, b) = (part(0, half), part(half, dim));
    let mut parts = vec![a.clone() * cos.clone() - b.clone() * sin.clone(), b * cos + a * sin];
    if dim < head_dim {
        parts.push(part(dim, head_dim));
    }
    Tensor::cat(parts, 3).cast(dtype)
}

/// Returns the gradients of the inputs of `out`, given its upstream gradient.
fn given(out: Tensor<2>, dout: Tensor<2>) -> Gradients {
    // A backward pass starts from ones.
    (out * dout).backward()
}

fn taken(leaf: &Tensor<2>, gradients: &mut Gradients) -> Tensor<2> {
    leaf.grad_remove(gradients).expect("the outputs of a graph depend on its inputs")
}
