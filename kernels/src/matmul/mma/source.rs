//! Sources of the rhs: decoding of stored words into fragments, and dequantisation of accumulators.

use cubecl::prelude::*;

use super::MmaPlan;
use super::work::Item;
use crate::matmul::dims::Dims;

/// Source of the rhs for accumulators `A`.
#[cube]
pub(crate) trait RightOperand<A: CubeType>: CubeType {
    /// Decodes the words of one step of k, register set `set`, if an element of the tile packs
    /// several values.
    fn decode(
        &self,
        words: &Sequence<Array<u32>>,
        into: &mut Array<u32>,
        #[comptime] set: usize,
        #[comptime] step: usize,
        #[comptime] plan: MmaPlan,
    );

    /// Dequantises the accumulators of `item` for a plane's part that starts at `row` and `col`.
    #[expect(clippy::too_many_arguments, reason = "one matrix, one place, one edge")]
    fn scale(
        &self,
        acc: &mut A,
        item: &Item,
        row: u32,
        col: u32,
        lane: u32,
        dims: &Dims,
        #[comptime] plan: MmaPlan,
    );
}

/// Dense matrix in the type that the instruction reads.
#[derive(CubeType)]
pub(crate) struct Dense {}

#[cube]
impl<A: CubeType> RightOperand<A> for Dense {
    fn decode(
        &self,
        _words: &Sequence<Array<u32>>,
        _into: &mut Array<u32>,
        #[comptime] _set: usize,
        #[comptime] _step: usize,
        #[comptime] _plan: MmaPlan,
    ) {
    }

    fn scale(
        &self,
        _acc: &mut A,
        _item: &Item,
        _row: u32,
        _col: u32,
        _lane: u32,
        _dims: &Dims,
        #[comptime] _plan: MmaPlan,
    ) {
    }
}
