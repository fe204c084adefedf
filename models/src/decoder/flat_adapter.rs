//! The values of an adapter in one flat buffer.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, FloatDType, Tensor};

use super::flat::zeros;
use super::load::rounded;
use crate::lora::{Block, Factor};
use crate::parameters::{ALIGNMENT, Group};
use crate::{Adapter, DecoderConfig, Error};

/// A and B of each module of an adapter, in f32, in one buffer on a device. Clones share the buffer.
///
/// Each matrix begins at a multiple of [`ALIGNMENT`] elements; the padding stays 0. The A of modules with the same input are
/// neighbours. The rows of B are apart for each matrix of the model: a module that fuses gate and up has one A and two of them.
#[derive(Debug, Clone)]
pub struct FlatAdapter {
    rank: usize,
    scale: f64,
    factors: Arc<Vec<FlatFactor>>,
    values: Tensor<1>,
}

/// Places of A and B of one module.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FlatFactor {
    pub(super) layer: usize,
    pub(super) block: Block,
    /// Number of columns of A.
    pub(super) k: usize,
    /// Offset of A `[rank, k]`.
    pub(super) a: usize,
    /// Rows of B, one entry per matrix of the model.
    pub(super) b: Vec<Rows>,
    /// Offset of A in [`Adapter::values`]; B follows it.
    host: usize,
}

/// Rows of B that contribute to one matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rows {
    /// Rows of the block.
    pub(super) rows: Range<usize>,
    /// Offset of B `[rows, rank]`.
    pub(super) at: usize,
}

impl FlatFactor {
    /// Returns the offset on the host, the offset in the buffer, and the length of each matrix.
    fn pieces(&self, rank: usize) -> impl Iterator<Item = [usize; 3]> {
        let b = self.b.iter().map(move |own| (own.at, own.rows.len() * rank));
        let mut host = self.host;
        [(self.a, rank * self.k)].into_iter().chain(b).map(move |(at, len)| {
            host += len;
            [host - len, at, len]
        })
    }
}

/// Lays out the factors of an adapter; also returns the number of elements.
fn layout(config: &DecoderConfig, factors: &[Factor], rank: usize) -> (Vec<FlatFactor>, usize) {
    let mut len = 0;
    let mut place = |values: usize| {
        len += values.next_multiple_of(ALIGNMENT);
        len - values.next_multiple_of(ALIGNMENT)
    };
    let parts = config.parts();
    let mut flat = Vec::new();
    for group in factors.chunk_by(|one, next| (one.layer, one.block) == (next.layer, next.block)) {
        let a: Vec<usize> = group.iter().map(|own| place(rank * own.k)).collect();
        for (own, a) in group.iter().zip(a) {
            let covered = parts.iter().filter_map(|(part, shape)| {
                let (block, first) = config.block(*part)?;
                let inside = block == own.block && (own.row..own.row + own.n).contains(&first);
                inside.then(|| first..first + shape[0])
            });
            let mut b: Vec<Rows> = covered.map(|rows| Rows { rows, at: 0 }).collect();
            b.sort_by_key(|own| own.rows.start);
            b.iter_mut().for_each(|own| own.at = place(own.rows.len() * rank));
            let Factor { layer, block, k, at: host, .. } = *own;
            flat.push(FlatFactor { layer, block, k, a, b, host });
        }
    }
    (flat, len)
}

/// Returns the elements of the buffer of an adapter with these factors.
pub(crate) fn flat_len(config: &DecoderConfig, factors: &[Factor], rank: usize) -> usize {
    layout(config, factors, rank).1
}

impl FlatAdapter {
    /// Uploads the values of an adapter.
    ///
    /// # Errors
    /// [`Error::Op`] for a device without kernels.
    pub fn new(adapter: &Adapter, config: &DecoderConfig, device: &Device) -> Result<Self, Error> {
        let rank = adapter.options().rank;
        let (factors, len) = layout(config, adapter.factors(), rank);
        let mut values = vec![0.0; len];
        for [host, at, len] in factors.iter().flat_map(|own| own.pieces(rank)) {
            values[at..at + len].copy_from_slice(&adapter.values()[host..host + len]);
        }
        let flat = zeros(len, FloatDType::F32, device);
        let _stream_guard = ops::stream_guard();
        ops::training::overwrite(&flat, 0, rounded(&values, FloatDType::F32))?;
        let scale = adapter.options().scale();
        Ok(Self { rank, scale, factors: Arc::new(factors), values: flat })
    }

    /// Returns the buffer.
    pub const fn values(&self) -> &Tensor<1> {
        &self.values
    }

    /// Returns the groups of the buffer: all values are those of matrices.
    pub fn groups(&self) -> Vec<(Group, Range<usize>)> {
        vec![(Group::default(), 0..self.values.dims()[0])]
    }

    /// Returns values of a buffer with this layout in the order of [`Adapter::values`].
    ///
    /// # Panics
    /// Panics if `buffer` is shorter than this buffer.
    pub fn unpadded(&self, buffer: &[f32]) -> Vec<f32> {
        let pieces = || self.factors.iter().flat_map(|own| own.pieces(self.rank));
        let mut values = vec![0.0; pieces().map(|[_, _, len]| len).sum()];
        for [host, at, len] in pieces() {
            values[host..host + len].copy_from_slice(&buffer[at..at + len]);
        }
        values
    }

    pub(super) const fn rank(&self) -> usize {
        self.rank
    }

    pub(super) const fn scale(&self) -> f64 {
        self.scale
    }

    pub(super) fn factors(&self) -> &[FlatFactor] {
        &self.factors
    }
}
