//! A whole decoder, from tokens to logits.
//!
//! ```text
//! x[t] = embedding[token[t]]·embedding_scale + positions[t]                   [seq, hidden]
//! for each block:
//!   y = norm(x);  q, k, v = query(y), key(y), value(y)      // heads of head_dim
//!   q, k = rotary(norm(q)), rotary(norm(k))                 // if the block has them
//!   a[t, h] = Σ_j softmax_j(softcap(scale·q[t, h]·k[j, h'])) v[j, h']         h' = h / (heads / kv_heads)
//!                                                           // j from t - window + 1 to t
//!   x += norm(out(a))                                       // norm if the block has one
//!   y = norm(x);  x += norm(down(act(gate(y))·up(y)))       // without a gate: down(act(up(y)))
//! logits = softcap(head(norm(x)))                                             [seq, vocab]
//! ```
//!
//! Arithmetic is f64 with f32 weights. Each token recomputes the whole sequence, so that there is no cache to
//! get wrong. [`Decoder::naive`], the naive evaluation of the tolerance rule, has f32 sums and rounds stored
//! results.
//!
//! Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); Touvron et al.,
//! "Llama 2" (2023); Gemma Team, "Gemma 2" (2024) and "Gemma 3" (2025).

use rayon::prelude::*;

use crate::{Activation, DType, Error, Norm, NormRule, Rotary};

/// A decoder with its weights. Matrices are `[out, in]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Decoder {
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    /// `[vocab, hidden]`
    pub embedding: Vec<f32>,
    pub embedding_scale: f64,
    /// `[positions, hidden]`
    pub positions: Option<Vec<f32>>,
    pub blocks: Vec<Block>,
    pub norm_rule: NormRule,
    pub eps: f64,
    pub final_norm: Linear,
    /// `[vocab, hidden]`; None ties the head to the embedding.
    pub head: Option<Vec<f32>>,
    pub activation: Activation,
    /// Soft cap of attention scores.
    pub softcap: Option<f64>,
    pub logit_softcap: Option<f64>,
    /// Format of results stored between operations; None does not round.
    pub stored: Option<DType>,
}

/// One layer. The weight of a norm is a vector.
#[derive(Debug, Clone, PartialEq)]
pub struct Block {
    pub attention_norm: Linear,
    pub query: Linear,
    pub key: Linear,
    pub value: Linear,
    /// `[head_dim]`
    pub query_norm: Option<Linear>,
    /// `[head_dim]`
    pub key_norm: Option<Linear>,
    pub out: Linear,
    pub attention_post_norm: Option<Linear>,
    pub ffn_norm: Linear,
    pub gate: Option<Linear>,
    pub up: Linear,
    pub down: Linear,
    pub ffn_post_norm: Option<Linear>,
    pub rotary: Option<Rotary>,
    /// Positions at this distance or further are hidden.
    pub window: Option<usize>,
    pub scale: f64,
}

impl Block {
    fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        let some = [
            &mut self.query_norm,
            &mut self.key_norm,
            &mut self.attention_post_norm,
            &mut self.gate,
            &mut self.ffn_post_norm,
        ];
        let all = [&mut self.attention_norm, &mut self.ffn_norm].into_iter().chain([
            &mut self.query,
            &mut self.key,
            &mut self.value,
            &mut self.out,
            &mut self.up,
            &mut self.down,
        ]);
        all.chain(some.into_iter().flatten())
    }
}

/// A weight with an optional bias.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Linear {
    pub weight: Vec<f32>,
    pub bias: Option<Vec<f32>>,
}

impl Decoder {
    /// Computes the logits after each token, `[seq, vocab]`.
    ///
    /// # Errors
    /// Fails if `kv_heads` does not divide `heads`, if a weight's length contradicts the sizes, or if a token
    /// or a position is out of range.
    pub fn forward(&self, tokens: &[u32]) -> Result<Vec<f64>, Error> {
        self.check()?;
        let mut x = self.embed(tokens)?; // [seq, hidden]
        for block in &self.blocks {
            let y = self.normalised(&x, &block.attention_norm);
            let attended = self.attend(block, &y, tokens.len());
            self.add(&mut x, attended, block.attention_post_norm.as_ref());
            let y = self.normalised(&x, &block.ffn_norm);
            let fed = self.feed(block, &y);
            self.add(&mut x, fed, block.ffn_post_norm.as_ref());
        }
        let y = self.normalised(&x, &self.final_norm);
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        // Logits are f32.
        let mut logits = self.product(&y, head, self.hidden);
        if let Some(cap) = self.logit_softcap {
            logits.iter_mut().for_each(|logit| *logit = cap * (*logit / cap).tanh());
        }
        Ok(logits)
    }

    /// Returns the next `count` tokens by greedy decoding: the largest logit, the first of equals.
    ///
    /// # Errors
    /// As [`Decoder::forward`]; an empty prompt.
    pub fn greedy(&self, prompt: &[u32], count: usize) -> Result<Vec<u32>, Error> {
        let mut tokens = prompt.to_vec();
        for _ in 0..count {
            let logits = self.forward(&tokens)?;
            let last = logits.rchunks(self.vocab).next();
            let last = last.ok_or(Error::Length { what: "prompt", need: 1, have: 0 })?;
            let mut best = 0;
            for (token, logit) in last.iter().enumerate() {
                if logit > &last[best] {
                    best = token;
                }
            }
            tokens.push(best as u32);
        }
        Ok(tokens.split_off(prompt.len()))
    }

    /// Returns the naive decoder in `dtype`: weights and stored results are rounded to it, sums are f32.
    #[must_use]
    pub fn naive(&self, dtype: DType) -> Self {
        let round = |values: &mut Vec<f32>| {
            values.iter_mut().for_each(|value| *value = dtype.round(f64::from(*value)) as f32);
        };
        let mut own = Self { stored: Some(dtype), ..self.clone() };
        [Some(&mut own.embedding), own.positions.as_mut(), own.head.as_mut()]
            .into_iter()
            .flatten()
            .for_each(round);
        let linears = own.blocks.iter_mut().flat_map(Block::linears).chain([&mut own.final_norm]);
        for Linear { weight, bias } in linears {
            [Some(weight), bias.as_mut()].into_iter().flatten().for_each(round);
        }
        own
    }

    /// Rounds values to the stored format.
    fn kept(&self, mut values: Vec<f64>) -> Vec<f64> {
        if let Some(dtype) = self.stored {
            values.iter_mut().for_each(|value| *value = dtype.round(*value));
        }
        values
    }

    /// Returns input [tokens, k] · weight [n, k]ᵀ.
    fn product(&self, input: &[f64], weight: &[f32], k: usize) -> Vec<f64> {
        let naive = self.stored.is_some();
        let line = |input: &[f64]| -> Vec<f64> {
            let sum = |row: &[f32]| match naive {
                false => row.iter().zip(input).map(|(w, x)| f64::from(*w) * x).sum(),
                true => {
                    let sum = row.iter().zip(input).map(|(w, x)| w * *x as f32).sum::<f32>();
                    f64::from(sum)
                }
            };
            weight.chunks(k).map(sum).collect()
        };
        input.par_chunks(k).flat_map_iter(line).collect()
    }

    fn embed(&self, tokens: &[u32]) -> Result<Vec<f64>, Error> {
        let mut x = Vec::with_capacity(tokens.len() * self.hidden);
        for (position, &token) in tokens.iter().enumerate() {
            let row = row("token", &self.embedding, token as usize, self.hidden)?;
            x.extend(row.iter().map(|value| f64::from(*value) * self.embedding_scale));
            let Some(positions) = &self.positions else { continue };
            let learned = self::row("position", positions, position, self.hidden)?;
            let own = &mut x[position * self.hidden..];
            own.iter_mut().zip(learned).for_each(|(x, learned)| *x += f64::from(*learned));
        }
        Ok(self.kept(x))
    }

    fn normalised(&self, x: &[f64], norm: &Linear) -> Vec<f64> {
        let rule = Norm { rule: self.norm_rule, eps: self.eps };
        let mut out = x.to_vec();
        for line in out.chunks_mut(norm.weight.len()) {
            rule.apply(line, &norm.weight, norm.bias.as_deref());
        }
        self.kept(out)
    }

    /// Returns the attention output for `y` `[seq, hidden]`.
    fn attend(&self, block: &Block, y: &[f64], seq: usize) -> Vec<f64> {
        let dim = self.head_dim;
        let q = self.heads_of(y, &block.query, block.query_norm.as_ref(), block, self.heads, seq);
        let k = self.heads_of(y, &block.key, block.key_norm.as_ref(), block, self.kv_heads, seq);
        let v = self.linear(&block.value, y, self.hidden); // [seq, kv_heads, head_dim]
        let key = |head: usize, j: usize| {
            let at = (j * self.kv_heads + head / (self.heads / self.kv_heads)) * dim;
            at..at + dim
        };
        let mut attended = vec![0.0; seq * self.heads * dim]; // [seq, heads, head_dim]
        attended.par_chunks_mut(dim).enumerate().for_each(|(at, out)| {
            let (t, head) = (at / self.heads, at % self.heads);
            let first = block.window.map_or(0, |window| (t + 1).saturating_sub(window));
            let query = &q[at * dim..][..dim];
            let score = |j| {
                let score = block.scale * dot(query, &k[key(head, j)]);
                self.softcap.map_or(score, |cap| cap * (score / cap).tanh())
            };
            let scores: Vec<f64> = (first..=t).map(score).collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|score| (score - top).exp()).sum();
            for (j, score) in (first..=t).zip(scores) {
                let weight = (score - top).exp() / total;
                out.iter_mut().zip(&v[key(head, j)]).for_each(|(out, v)| *out += weight * v);
            }
        });
        self.linear(&block.out, &self.kept(attended), self.heads * dim)
    }

    /// Returns queries or keys `[seq, heads, head_dim]`, with norm and rotation if the block has them.
    fn heads_of(
        &self,
        y: &[f64],
        linear: &Linear,
        norm: Option<&Linear>,
        block: &Block,
        heads: usize,
        seq: usize,
    ) -> Vec<f64> {
        let mut out = self.linear(linear, y, self.hidden);
        if let Some(norm) = norm {
            out = self.normalised(&out, norm);
        }
        if let Some(rotary) = &block.rotary {
            for (at, head) in out.chunks_mut(self.head_dim).enumerate() {
                rotary.rotate(head, at / heads, seq);
            }
        }
        self.kept(out)
    }

    fn feed(&self, block: &Block, y: &[f64]) -> Vec<f64> {
        let up = self.linear(&block.up, y, self.hidden);
        let inner = match &block.gate {
            Some(gate) => {
                let gate = self.linear(gate, y, self.hidden);
                gate.iter().zip(&up).map(|(gate, up)| self.activation.exact(*gate) * up).collect()
            }
            None => up.iter().map(|up| self.activation.exact(*up)).collect::<Vec<_>>(),
        };
        self.linear(&block.down, &self.kept(inner), block.up.weight.len() / self.hidden)
    }

    fn add(&self, x: &mut [f64], what: Vec<f64>, norm: Option<&Linear>) {
        let what = match norm {
            Some(norm) => self.normalised(&what, norm),
            None => what,
        };
        x.iter_mut().zip(what).for_each(|(x, what)| *x += what);
        if let Some(dtype) = self.stored {
            x.iter_mut().for_each(|x| *x = dtype.round(*x));
        }
    }

    /// Returns input [tokens, k] · weight [n, k]ᵀ + bias as [tokens, n].
    fn linear(&self, linear: &Linear, input: &[f64], k: usize) -> Vec<f64> {
        let mut out = self.product(input, &linear.weight, k);
        if let Some(bias) = &linear.bias {
            for line in out.chunks_mut(bias.len()) {
                line.iter_mut().zip(bias).for_each(|(out, bias)| *out += f64::from(*bias));
            }
        }
        self.kept(out)
    }

    fn check(&self) -> Result<(), Error> {
        if self.kv_heads == 0 || self.heads % self.kv_heads != 0 {
            return Err(Error::Heads { heads: self.heads, kv_heads: self.kv_heads });
        }
        for (what, size) in
            [("hidden", self.hidden), ("vocab", self.vocab), ("head", self.head_dim)]
        {
            if size == 0 {
                return Err(Error::Length { what, need: 1, have: 0 });
            }
        }
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let table = self.vocab * self.hidden;
        length("embedding", &self.embedding, table)?;
        self.head.as_ref().map_or(Ok(()), |head| length("head", head, table))?;
        self.final_norm.check("final norm", self.hidden, 1)?;
        for block in &self.blocks {
            block.attention_norm.check("attention norm", self.hidden, 1)?;
            block.query.check("query", q, self.hidden)?;
            block.key.check("key", kv, self.hidden)?;
            block.value.check("value", kv, self.hidden)?;
            block.out.check("out", self.hidden, q)?;
            block.ffn_norm.check("ffn norm", self.hidden, 1)?;
            let ffn = block.up.weight.len() / self.hidden;
            block.up.check("up", ffn, self.hidden)?;
            block.down.check("down", self.hidden, ffn)?;
            for (what, linear, n, k) in [
                ("query norm", &block.query_norm, self.head_dim, 1),
                ("key norm", &block.key_norm, self.head_dim, 1),
                ("attention post norm", &block.attention_post_norm, self.hidden, 1),
                ("gate", &block.gate, ffn, self.hidden),
                ("ffn post norm", &block.ffn_post_norm, self.hidden, 1),
            ] {
                linear.as_ref().map_or(Ok(()), |linear| linear.check(what, n, k))?;
            }
            block.rotary.as_ref().map_or(Ok(()), |rotary| rotary.check(self.head_dim))?;
        }
        Ok(())
    }
}

impl Linear {
    fn check(&self, what: &'static str, n: usize, k: usize) -> Result<(), Error> {
        length(what, &self.weight, n * k)?;
        self.bias.as_ref().map_or(Ok(()), |bias| length(what, bias, n))
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn row<'a>(
    what: &'static str,
    table: &'a [f32],
    index: usize,
    width: usize,
) -> Result<&'a [f32], Error> {
    let len = table.len() / width;
    table.chunks(width).nth(index).ok_or(Error::OutOfRange { what, index, len })
}

fn length(what: &'static str, have: &[f32], need: usize) -> Result<(), Error> {
    if have.len() == need { Ok(()) } else { Err(Error::Length { what, need, have: have.len() }) }
}
