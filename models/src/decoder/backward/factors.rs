//! The factors of an adapter in a pass.

use std::ops::Range;

use burn::tensor::{DType, Tensor};
use ops::training::add_product;
use ops::{Epilogue, columns, linear, matmul};

use crate::Error;
use crate::decoder::flat_adapter::{FlatAdapter, FlatFactor};
use crate::decoder::projection::{Ffn, Projection};
use crate::decoder::unmerged_lora::UnmergedLora;
use crate::decoder::{Decoder, Layer, joined};
use crate::lora::Block;
use crate::names::Slot;

/// The layers of a decoder with the factors of an adapter in the compute dtype.
pub(super) struct Factors<'a> {
    decoder: &'a Decoder,
    adapter: &'a FlatAdapter,
    /// All values, in the compute dtype.
    plain: Tensor<1>,
    /// All values times s, in the compute dtype.
    scaled: Tensor<1>,
    layers: Vec<Layer>,
}

impl<'a> Factors<'a> {
    /// Rounds the factors, and adds them to their projections.
    pub(super) fn new(decoder: &'a Decoder, adapter: &'a FlatAdapter) -> Result<Self, Error> {
        let _part = trace::span(|| "adapter");
        let (exact, dtype) = (adapter.values(), decoder.dtype);
        let plain = exact.clone().cast(dtype);
        let scaled = (exact.clone() * adapter.scale()).cast(dtype);
        let mut own = Self { decoder, adapter, plain, scaled, layers: Vec::new() };
        let layers = (0..decoder.layers.len())
            .map(|index| adapted_layer(decoder, index, |block, rows| own.of(index, block, rows)));
        own.layers = layers.collect::<Result<_, _>>()?;
        Ok(own)
    }

    /// Returns the lowest adapted layer, or the number of layers.
    pub(super) fn lowest(&self) -> usize {
        let layers = self.adapter.factors().iter().map(|own| own.layer);
        layers.min().unwrap_or(self.decoder.layers.len())
    }

    /// Returns a layer with its factors.
    pub(super) fn layer(&self, index: usize) -> &Layer {
        &self.layers[index]
    }

    /// Returns A and s · B of some rows of a block; none if no factor contributes to them.
    fn of(
        &self,
        layer: usize,
        block: Block,
        rows: Range<usize>,
    ) -> Result<Option<UnmergedLora>, Error> {
        let rank = self.adapter.rank();
        let members: Vec<_> = members(self.adapter, layer, block, &rows).collect();
        let parts = members.iter().enumerate().flat_map(|(place, member)| {
            let own = member.b.iter().filter(|part| rows.contains(&part.rows.start));
            own.map(move |part| (place, part))
        });
        let parts: Vec<_> = parts.collect();
        let view = |at, rows| ops::view(&self.scaled, at, [rows, rank]);
        let b = match parts[..] {
            [] => return Ok(None),
            [(_, part)] if part.rows == rows => view(part.at, rows.len())?,
            _ => {
                let on = (&self.decoder.device, DType::from(self.decoder.dtype));
                let mut b = Tensor::<2>::zeros([rows.len(), rank * members.len()], on);
                for (place, part) in parts {
                    let own = part.rows.start - rows.start..part.rows.end - rows.start;
                    let columns = place * rank..(place + 1) * rank;
                    b = b.slice_assign([own, columns], view(part.at, part.rows.len())?);
                }
                b
            }
        };
        Ok(Some(UnmergedLora { a: self.stacked(&self.plain, &members)?, b }))
    }

    /// Returns A of several factors with the same input, one below the other.
    fn stacked(&self, buffer: &Tensor<1>, members: &[&FlatFactor]) -> Result<Tensor<2>, Error> {
        let rank = self.adapter.rank();
        if self.neighbours(members) {
            let (first, rows) = (members[0], rank * members.len());
            return Ok(ops::view(buffer, first.a, [rows, first.k])?);
        }
        let all = members.iter().map(|own| ops::view(buffer, own.a, [rank, own.k]));
        Ok(joined(all.collect::<Result<_, _>>()?, 0))
    }

    /// Returns true if the A of these factors are one matrix in the buffer.
    fn neighbours(&self, members: &[&FlatFactor]) -> bool {
        members.windows(2).all(|two| two[1].a == two[0].a + self.adapter.rank() * two[0].k)
    }

    /// Adds the gradients of the factors of a projection that begins with `slot`:
    ///
    /// ```text
    /// A += (dout · sB)ᵀ · x        B += doutᵀ · s(x · Aᵀ)
    /// ```
    ///
    /// `low` is dout · sB.
    pub(super) fn add(
        &self,
        (dout, low): (Tensor<2>, Tensor<2>),
        x: Tensor<2>,
        slot: Slot,
        gradients: &Tensor<1>,
    ) -> Result<(), Error> {
        let Slot::Layer(layer, part) = slot else { return Ok(()) };
        let Some((block, first)) = self.decoder.config.block(part) else { return Ok(()) };
        let (ctx, rank) = (&self.decoder.ctx, self.adapter.rank());
        let rows = first..first + dout.dims()[1];
        let members: Vec<_> = members(self.adapter, layer, block, &rows).collect();
        let scaled = self.stacked(&self.scaled, &members)?;
        let h = linear(ctx, x.clone(), scaled.transpose(), Epilogue::default())?;
        let own = |place: usize| place * rank..(place + 1) * rank;
        let products = match self.neighbours(&members) {
            true => vec![(0..low.dims()[1], members[0])],
            false => members.iter().enumerate().map(|(at, member)| (own(at), *member)).collect(),
        };
        for (width, member) in products {
            let da = ops::view(gradients, member.a, [width.len(), member.k])?;
            let low = columns(low.clone(), width)?;
            add_product(ctx, low.transpose(), x.clone(), &da, true)?;
        }
        for (place, member) in members.iter().enumerate() {
            let h = columns(h.clone(), own(place))?;
            for part in member.b.iter().filter(|part| rows.contains(&part.rows.start)) {
                let within = part.rows.start - first..part.rows.end - first;
                let db = ops::view(gradients, part.at, [part.rows.len(), rank])?;
                let dout = columns(dout.clone(), within)?;
                add_product(ctx, dout.transpose(), h.clone(), &db, true)?;
            }
        }
        Ok(())
    }
}

/// Returns a layer with the factors that `of` returns for rows of a block.
pub(in crate::decoder) fn adapted_layer(
    decoder: &Decoder,
    index: usize,
    mut of: impl FnMut(Block, Range<usize>) -> Result<Option<UnmergedLora>, Error>,
) -> Result<Layer, Error> {
    let config = &decoder.config;
    let mut layer = decoder.layers[index].clone();
    let rows = |block| 0..config.block_rows(block);
    layer.qkv.unmerged = of(Block::Qkv, rows(Block::Qkv))?;
    layer.out.unmerged = of(Block::Out, rows(Block::Out))?;
    let half = config.ffn_hidden;
    let down = match &mut layer.ffn {
        Ffn::Plain { up, down } => {
            up.unmerged = of(Block::Inner, rows(Block::Inner))?;
            down
        }
        Ffn::Gated { gate, up, down } => {
            gate.unmerged = of(Block::Inner, 0..half)?;
            up.unmerged = of(Block::Inner, half..2 * half)?;
            down
        }
        Ffn::Joint { unmerged, down, .. } => {
            *unmerged = of(Block::Inner, rows(Block::Inner))?;
            down
        }
    };
    down.unmerged = of(Block::Down, rows(Block::Down))?;
    Ok(layer)
}

/// Returns the factors that contribute to some rows of a block, in the order of their rows.
pub(in crate::decoder) fn members<'a>(
    adapter: &'a FlatAdapter,
    layer: usize,
    block: Block,
    rows: &Range<usize>,
) -> impl Iterator<Item = &'a FlatFactor> + use<'a> {
    let rows = rows.clone();
    adapter.factors().iter().filter(move |own| {
        own.layer == layer
            && own.block == block
            && own.b.iter().any(|part| rows.contains(&part.rows.start))
    })
}

/// Returns dout · sB for the factors of a projection, if it has any.
pub(super) fn low(
    decoder: &Decoder,
    projection: &Projection,
    dout: &Tensor<2>,
) -> Result<Option<Tensor<2>>, Error> {
    let Some(UnmergedLora { b, .. }) = &projection.unmerged else { return Ok(None) };
    let low = matmul(&decoder.ctx, dout.clone(), b.clone(), Epilogue::default())?;
    Ok(Some(decoder.paced(low)?))
}
