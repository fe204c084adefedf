//! A decoder with an adapter whose values change: its matrices are written in place, so that captured graphs stay valid.

use std::ops::Range;

use burn::tensor::{DType, Tensor};

use super::backward::{adapted_layer, members};
use super::flat_adapter::FlatAdapter;
use super::unmerged_lora::UnmergedLora;
use super::{Decoder, Layer};
use crate::Error;
use crate::lora::Block;

/// A decoder with the values of an adapter, as of the last [`Adapted::refresh`].
#[derive(Debug)]
pub struct Adapted {
    decoder: Decoder,
    pieces: Vec<Piece>,
}

/// A matrix of the adapter, and its place in a matrix of the decoder.
#[derive(Debug)]
struct Piece {
    /// Offset in the adapter's buffer.
    from: usize,
    shape: [usize; 2],
    into: Tensor<2>,
    /// First row and column.
    at: [usize; 2],
    factor: f64,
}

impl Adapted {
    /// Creates the matrices, in memory that stays where it is, and fills them.
    ///
    /// # Errors
    /// [`Error::Op`] for a device without kernels.
    pub fn new(of: &Decoder, adapter: &FlatAdapter) -> Result<Self, Error> {
        let _stream_guard = ops::stream_guard();
        let mut pieces = Vec::new();
        let layers: Vec<Layer> = (0..of.layers.len())
            .map(|index| {
                adapted_layer(of, index, |block, rows| {
                    Ok(unmerged(of, adapter, (index, block, rows), &mut pieces))
                })
            })
            .collect::<Result<_, Error>>()?;
        let own = Self { decoder: Decoder { layers, ..of.clone() }, pieces };
        own.refresh(adapter)?;
        Ok(own)
    }

    /// Takes the present values of the adapter.
    ///
    /// # Errors
    /// [`Error::Op`] for a device without kernels.
    pub fn refresh(&self, adapter: &FlatAdapter) -> Result<(), Error> {
        let _stream_guard = ops::stream_guard();
        let (ctx, values) = (&self.decoder.ctx, adapter.values());
        for Piece { from, shape, into, at, factor } in &self.pieces {
            let x = ops::view(values, *from, *shape)?;
            ops::training::copy_scaled(ctx, &x, into, *at, *factor as f32)?;
        }
        Ok(())
    }

    /// Returns the decoder.
    pub const fn decoder(&self) -> &Decoder {
        &self.decoder
    }
}

/// Returns empty A and s · B of some rows of a block, and adds their pieces; none if no factor contributes to them.
fn unmerged(
    of: &Decoder,
    adapter: &FlatAdapter,
    (layer, block, rows): (usize, Block, Range<usize>),
    pieces: &mut Vec<Piece>,
) -> Option<UnmergedLora> {
    let rank = adapter.rank();
    let members: Vec<_> = members(adapter, layer, block, &rows).collect();
    let k = members.first()?.k;
    let on = (&of.device, DType::from(of.dtype));
    let make = |()| {
        let zeros = |shape: [usize; 2]| Tensor::<2>::zeros(shape, on);
        (zeros([rank * members.len(), k]), zeros([rows.len(), rank * members.len()]))
    };
    let (a, b) = of.device.memory_persistent_allocations((), make);
    for (place, member) in members.iter().enumerate() {
        let first = place * rank;
        pieces.push(Piece {
            from: member.a,
            shape: [rank, k],
            into: a.clone(),
            at: [first, 0],
            factor: 1.0,
        });
        for part in member.b.iter().filter(|part| rows.contains(&part.rows.start)) {
            pieces.push(Piece {
                from: part.at,
                shape: [part.rows.len(), rank],
                into: b.clone(),
                at: [part.rows.start - rows.start, first],
                factor: adapter.scale(),
            });
        }
    }
    Some(UnmergedLora { a, b })
}
