//! Tile matmuls shared by the forward and backward loops: scores of a plane's own rows with a tile,
//! and weighted sums of the tile's rows.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use crate::tile::{CopyPlan, TileShape, load_fragments, pack_pair, typed};

/// Elements per row of a shared tile, padded to whole swizzle periods.
pub(super) const fn pitch(head_dim: u32) -> u32 {
    if head_dim <= 32 { 32 } else { head_dim.next_multiple_of(64) }
}

/// Copy plan for tiles of `rows` positions.
pub(super) const fn copies_of(
    rows: u32,
    head_dim: u32,
    width: usize,
    units: usize,
    exact: bool,
) -> CopyPlan {
    CopyPlan { shape: TileShape::new(rows, pitch(head_dim), false, 2), width, units, exact }
}

/// Comptime geometry of the matmuls of a plane's rows with a tile; both are
/// `[positions, head_dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct TileMatmul {
    /// Row fragments of 16 rows.
    pub(super) frags: usize,
    /// Steps of 16 positions of the tile.
    pub(super) pairs: usize,
    /// Steps of 16 along the head dimension.
    pub(super) steps: usize,
    pub(super) own: TileShape,
    pub(super) other: TileShape,
    pub(super) bf16: bool,
    /// True if fragments are loaded one step before they are multiplied.
    pub(super) pipelined: bool,
}

impl TileMatmul {
    /// Number of score fragments, 16 rows by 8 positions.
    pub(super) const fn scores(self) -> usize {
        self.frags * self.pairs * 2
    }

    /// Number of accumulator fragments, 16 rows by 8 columns of the head dimension.
    pub(super) const fn sums(self) -> usize {
        self.frags * self.steps * 2
    }

    /// Tile as the rhs of a matmul that sums over its positions.
    pub(super) const fn summed(self) -> TileShape {
        TileShape { transposed: true, ..self.other }
    }
}

/// Bytes of `elements` two-byte elements.
#[cube]
pub(super) fn bytes(elements: usize) -> u64 {
    u64::cast_from(elements) * 2
}

/// Returns `len` fragments of zeros.
#[cube]
pub(super) fn zeros<NC: Size>(#[comptime] len: usize) -> Sequence<Array<Vector<f32, NC>>> {
    let mut out = Sequence::<Array<Vector<f32, NC>>>::new();
    #[unroll]
    for _ in 0..len {
        let mut fragment = Array::<Vector<f32, NC>>::new(2usize);
        fragment[0] = Vector::new(0.0f32);
        fragment[1] = Vector::new(0.0f32);
        out.push(fragment);
    }
    out
}

/// Computes `s += own · otherᵀ` in fragments `[rows / 16, positions / 8]`. `own` and `other` are
/// the addresses of the plane's first fragments ([`lhs_lane`](crate::tile::lhs_lane),
/// [`rhs_lane`](crate::tile::rhs_lane)).
#[cube]
pub(super) fn multiply<F: Float, NF: Size, NC: Size>(
    s: &mut Sequence<Array<Vector<f32, NC>>>,
    own: u32,
    other: u32,
    #[comptime] p: TileMatmul,
) {
    let def = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut a = registers(comptime!(2 * p.frags));
    let mut b = registers(comptime!(2 * p.pairs));
    load_step::<F>(own, other, &mut a, &mut b, 0u32, 0usize, p);
    #[unroll]
    for step in 0..p.steps {
        let set = comptime!(step % 2);
        if comptime!(p.pipelined && step + 1 < p.steps) {
            load_step::<F>(own, other, &mut a, &mut b, step as u32 + 1, 1 - set, p);
        }
        if comptime!(!p.pipelined && step > 0) {
            load_step::<F>(own, other, &mut a, &mut b, step as u32, set, p);
        }
        #[unroll]
        for j in 0..p.pairs {
            #[unroll]
            for i in 0..p.frags {
                let left = typed::<F, NF>(a.index(comptime!(set * p.frags + i)), 0usize, 4usize);
                #[unroll]
                for half in 0..2usize {
                    let words = b.index(comptime!(set * p.pairs + j));
                    let right = typed::<F, NF>(words, comptime!(2 * half), 2usize);
                    let at = comptime!((i * p.pairs + j) * 2 + half);
                    def.execute_inplace(&left, &right, s.index_mut(at));
                }
            }
        }
    }
}

/// Computes `acc += weights · other` in fragments `[rows / 16, head_dim / 8]`, with the weights
/// rounded to 16 bits. `other` is the address of the plane's first fragment of the transposed tile.
#[cube]
pub(super) fn accumulate<F: Float, NF: Size, NC: Size>(
    acc: &mut Sequence<Array<Vector<f32, NC>>>,
    weights: &Sequence<Array<Vector<f32, NC>>>,
    other: u32,
    #[comptime] p: TileMatmul,
) {
    let def = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut b = registers(2usize);
    load_summed::<F>(other, b.index_mut(0usize), 0usize, p);
    #[unroll]
    for pair in 0..p.pairs {
        let mut rounded = Sequence::<Array<u32>>::new();
        #[unroll]
        for i in 0..p.frags {
            let mut words = Array::<u32>::new(4usize);
            #[unroll]
            for w in 0..4usize {
                let at = comptime!((i * p.pairs + pair) * 2 + w / 2);
                words[w] = pack_pair::<NC>(weights.index(at)[comptime!(w % 2)], p.bf16);
            }
            rounded.push(words);
        }
        #[unroll]
        for col in 0..p.steps {
            let this = comptime!(pair * p.steps + col);
            if comptime!(p.pipelined && this + 1 < p.pairs * p.steps) {
                let into = b.index_mut(comptime!((this + 1) % 2));
                load_summed::<F>(other, into, comptime!(this + 1), p);
            }
            if comptime!(!p.pipelined && this > 0) {
                load_summed::<F>(other, b.index_mut(comptime!(this % 2)), this, p);
            }
            #[unroll]
            for i in 0..p.frags {
                let left = typed::<F, NF>(rounded.index(i), 0usize, 4usize);
                #[unroll]
                for half in 0..2usize {
                    let words = b.index(comptime!(this % 2));
                    let right = typed::<F, NF>(words, comptime!(2 * half), 2usize);
                    let at = comptime!((i * p.steps + col) * 2 + half);
                    def.execute_inplace(&left, &right, acc.index_mut(at));
                }
            }
        }
    }
}

/// Returns `len` groups of four registers.
#[cube]
pub(super) fn registers(#[comptime] len: usize) -> Sequence<Array<u32>> {
    let mut out = Sequence::<Array<u32>>::new();
    #[unroll]
    for _ in 0..len {
        out.push(Array::<u32>::new(4usize));
    }
    out
}

/// Address change for step `step` of 32 bytes along a row of a shared tile, the width of one
/// `ldmatrix`: the part that the swizzle XORs, and the part to add.
pub(super) const fn along(step: u32) -> (u32, u32) {
    (step * 32 % 128, step * 32 / 128 * 128)
}

/// Loads the fragments of both operands for step `step` of the head dimension into register set
/// `set`.
#[cube]
fn load_step<F: Float>(
    own: u32,
    other: u32,
    a: &mut Sequence<Array<u32>>,
    b: &mut Sequence<Array<u32>>,
    #[comptime] step: u32,
    #[comptime] set: usize,
    #[comptime] p: TileMatmul,
) {
    let (xor, add) = comptime!(along(step));
    #[unroll]
    for i in 0..p.frags {
        let into = a.index_mut(comptime!(set * p.frags + i));
        let far = comptime!(16 * i as u32 * p.own.row_bytes() + add);
        load_fragments::<F>(own ^ xor, into, far, p.own, false);
    }
    #[unroll]
    for j in 0..p.pairs {
        let into = b.index_mut(comptime!(set * p.pairs + j));
        let far = comptime!(16 * j as u32 * p.other.row_bytes() + add);
        load_fragments::<F>(other ^ xor, into, far, p.other, false);
    }
}

/// Loads fragment `which`, 16 positions by 16 columns; columns advance first.
#[cube]
fn load_summed<F: Float>(
    other: u32,
    into: &mut Array<u32>,
    #[comptime] which: usize,
    #[comptime] p: TileMatmul,
) {
    let shape = comptime!(p.summed());
    let (xor, add) = comptime!(along((which % p.steps) as u32));
    let far = comptime!(16 * (which / p.steps) as u32 * shape.row_bytes() + add);
    load_fragments::<F>(other ^ xor, into, far, shape, false);
}
