//! A training batch on a device.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use ops::Packing;
use ops::training::{IGNORED, RowSegments};

use super::backward::{Objective, OnDevice};
use super::memory::tables;
use super::{Decoder, rounded};
use crate::{Error, Policy};

/// A training sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// Tokens of the whole sequence, in order.
    pub tokens: Vec<u32>,
    /// Index of the first token to learn; the tokens before it are context only. The first token is never
    /// learned.
    pub from: usize,
}

impl Example {
    /// Returns the number of tokens to learn.
    pub fn learned(&self) -> usize {
        self.tokens.len().saturating_sub(self.from.max(1))
    }

    /// Returns the number of positions that the model reads: the last token is only a target.
    pub fn rows(&self) -> usize {
        self.tokens.len().saturating_sub(1)
    }
}

/// Sequences that learn together, and their loss: -ln p of the learned tokens, or that of a policy.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MicroBatch {
    /// The sequences.
    pub examples: Vec<Example>,
    /// Their loss, unless it is -ln p of the learned tokens.
    pub policy: Option<Policy>,
}

impl From<Vec<Example>> for MicroBatch {
    fn from(examples: Vec<Example>) -> Self {
        Self { examples, policy: None }
    }
}

/// A borrowed [`MicroBatch`], or sequences whose tokens are measured: no loss has a gradient.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    examples: &'a [Example],
    asked: Asked<'a>,
}

#[derive(Debug, Clone, Copy)]
enum Asked<'a> {
    Likelihood,
    Measured { temperature: f64 },
    Policy(&'a Policy),
}

impl<'a> Batch<'a> {
    /// Asks for ln p and entropy of each learned token, of the logits divided by `temperature`.
    pub const fn measured(examples: &'a [Example], temperature: f64) -> Self {
        Self { examples, asked: Asked::Measured { temperature } }
    }
}

impl<'a> From<&'a MicroBatch> for Batch<'a> {
    fn from(batch: &'a MicroBatch) -> Self {
        let asked = batch.policy.as_ref().map_or(Asked::Likelihood, Asked::Policy);
        Self { examples: &batch.examples, asked }
    }
}

impl<'a> From<&'a [Example]> for Batch<'a> {
    fn from(examples: &'a [Example]) -> Self {
        Self { examples, asked: Asked::Likelihood }
    }
}

impl<'a> From<&'a Vec<Example>> for Batch<'a> {
    fn from(examples: &'a Vec<Example>) -> Self {
        Self::from(&examples[..])
    }
}

/// A batch on the device: all tokens of each sequence but the last, which is only a target. Sequences of different lengths are
/// packed one after the other, without padding.
pub(super) struct TrainBatch {
    /// Number of sequences, and their length; `[1, rows]` for packed sequences.
    shape: [usize; 2],
    /// Offsets of packed sequences.
    pub(super) packing: Option<Packing>,
    /// `[rows]`
    tokens: Tensor<1, Int>,
    /// Position of each row, `[rows]`.
    pub(super) positions: Tensor<1, Int>,
    /// Tokens and positions of each row, on the host.
    pub(super) looked_up: LookedUp,
    /// Rows whose next token is learned; none for all rows.
    pub(super) rows: Option<Tensor<1, Int>>,
    /// Next token of these rows, or [`IGNORED`].
    pub(super) targets: Tensor<1, Int>,
    /// Number of learned tokens.
    pub(super) count: usize,
    pub(super) objective: Objective,
    /// One table `[seq, dim]` per rope.
    pub(super) tables: Vec<Tensor<2>>,
}

/// Rows of the embedding tables that a batch looks up.
pub(super) struct LookedUp {
    tokens: Vec<u32>,
    positions: Vec<u32>,
}

impl LookedUp {
    pub(super) fn tokens(&self, device: &Device) -> RowSegments {
        RowSegments::new(&self.tokens, device)
    }

    pub(super) fn positions(&self, device: &Device) -> RowSegments {
        RowSegments::new(&self.positions, device)
    }
}

impl TrainBatch {
    /// Uploads a batch.
    ///
    /// # Errors
    /// [`Error::NothingToLearn`], [`Error::Context`], [`Error::Token`], [`Error::PolicyLength`].
    pub(super) fn new(decoder: &Decoder, of: Batch<'_>) -> Result<Self, Error> {
        let (device, batch) = (decoder.device(), of.examples);
        let objective = match of.asked {
            Asked::Likelihood => Objective::Likelihood,
            Asked::Measured { temperature } => Objective::Measured { temperature },
            Asked::Policy(policy) => {
                let rows = policy.rows(batch)?;
                Objective::Policy(Box::new(OnDevice::new(policy.rule, rows, device)))
            }
        };
        let config = decoder.config();
        let seq = batch.iter().map(Example::rows).max().unwrap_or(0);
        let count: usize = batch.iter().map(Example::learned).sum();
        if count == 0 || batch.iter().any(|own| own.tokens.is_empty()) {
            return Err(Error::NothingToLearn);
        }
        if let Some(max_seq) = config.context().filter(|max| seq > *max) {
            return Err(Error::Context { need: seq, max_seq });
        }
        batch.iter().try_for_each(|own| config.check_tokens(&own.tokens))?;
        let (mut tokens, mut targets, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        let mut offsets = vec![0];
        for example in batch {
            let own = &example.tokens;
            tokens.extend(&own[..example.rows()]);
            positions.extend(0..example.rows() as u32);
            targets.extend(own.iter().enumerate().skip(1).map(|(at, token)| match at {
                at if at < example.from => IGNORED,
                _ => *token,
            }));
            offsets.push(tokens.len() as u32);
        }
        let apart = batch.iter().any(|own| own.rows() != seq);
        let packing = apart.then(|| Packing::new(&offsets, &offsets)).transpose()?;
        let shape = if apart { [1, tokens.len()] } else { [batch.len(), seq] };
        // Selecting the rows costs a copy of them, and saves the logits of the others. Numbers of tokens are those of learned ones
        // alone.
        let few = match objective {
            Objective::Likelihood => count < tokens.len() / 8 * 7,
            _ => count < tokens.len(),
        };
        let rows = few.then(|| {
            let learned = |row: &u32| targets[*row as usize] != IGNORED;
            let rows: Vec<u32> = (0..targets.len() as u32).filter(learned).collect();
            targets.retain(|target| *target != IGNORED);
            rows
        });
        let list = |words: &[u32]| {
            let words: Vec<i32> = words.iter().map(|word| word.cast_signed()).collect();
            let len = words.len();
            Tensor::<1, Int>::from_data(TensorData::new(words, [len]), (device, DType::I32))
        };
        Ok(Self {
            shape,
            packing,
            tokens: list(&tokens),
            positions: list(&positions),
            rows: rows.as_deref().map(list),
            targets: list(&targets),
            looked_up: LookedUp { tokens, positions },
            count,
            objective,
            // Frequencies that depend on the length count the last token, as in transformers.
            tables: tables(config, seq + 1, seq, device),
        })
    }

    /// Returns the number of sequences, and their length; `[1, rows]` for packed sequences.
    pub(super) const fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Returns the embeddings, `[rows, hidden]`.
    pub(super) fn embedded(&self, decoder: &Decoder) -> Result<Tensor<2>, Error> {
        let _part = trace::span(|| "embedding");
        // Each row is a sequence of one token, which begins at its position.
        let (rows, start) = (self.tokens.dims()[0], self.positions.clone());
        let tokens = self.tokens.clone().reshape([rows, 1]);
        let scale = decoder.config.embedding_scale;
        let scale = scale.map_or(1.0, |scale| rounded(scale, decoder.dtype));
        let (table, positions) = (decoder.embedding.clone(), decoder.positions.clone());
        Ok(ops::embed(&decoder.ctx, tokens, table, start, positions, scale)?)
    }
}
