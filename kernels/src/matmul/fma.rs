//! The path of any GPU: multiply-adds over shared tiles held in f32.
//!
//! Both tiles lie with k outermost, `[tile_k, tile_m]` and `[tile_k, tile_n]`, so that a step of k
//! reads one line of each. A unit owns a grid of results `units_m` and `units_n` apart: neighbouring
//! units read neighbouring elements.

use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

use super::{Dims, bias_at, block_of};

/// Tile sizes of the multiply-add path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FmaConfig {
    pub tile_m: u32,
    pub tile_n: u32,
    pub tile_k: u32,
    /// Grid of units that share the tile.
    pub units_m: u32,
    pub units_n: u32,
}

impl FmaConfig {
    pub(crate) const fn units(self) -> u32 {
        self.units_m * self.units_n
    }

    /// Shared lines are padded by one element, which keeps transposing stores off one bank.
    pub(crate) const fn shared_bytes(self) -> u32 {
        self.tile_k * (self.tile_m + 1 + self.tile_n + 1) * 4
    }
}

/// Comptime facts of one instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FmaPlan {
    pub(crate) config: FmaConfig,
    /// Whether k is the contiguous axis of each operand.
    pub(crate) lhs_along_k: bool,
    pub(crate) rhs_along_k: bool,
}

#[cube]
pub(crate) fn multiply<F: Float, NL: Size, NR: Size, NO: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<F, NO>],
    bias: &[F],
    dims: &Dims,
    #[comptime] plan: FmaPlan,
    #[comptime] biased: bool,
) {
    let config = comptime!(plan.config);
    let (tile_m, tile_n, tile_k) = comptime!((config.tile_m, config.tile_n, config.tile_k));
    let (units_m, units_n) = comptime!((config.units_m, config.units_n));
    let (own_m, own_n) = comptime!(((tile_m / units_m) as usize, (tile_n / units_n) as usize));
    let (line_m, line_n) = comptime!((tile_m + 1, tile_n + 1));

    let mut shared_lhs = Shared::<[f32]>::new_slice(comptime!((tile_k * line_m) as usize));
    let mut shared_rhs = Shared::<[f32]>::new_slice(comptime!((tile_k * line_n) as usize));

    let unit = UNIT_POS;
    let (unit_m, unit_n) = (unit / units_n, unit % units_n);
    let (block_m, block_n) = block_of(dims, CUBE_POS_X, tile_m, tile_n);
    let (row0, col0) = (block_m * tile_m, block_n * tile_n);
    let (lhs_start, rhs_start, out_start) = dims.batch(CUBE_POS_Y as usize);

    let mut acc = Array::<f32>::new(comptime!(own_m * own_n)); // [own_m, own_n]
    #[unroll]
    for i in 0..comptime!(own_m * own_n) {
        acc[i] = 0.0;
    }

    let mut k0 = 0u32;
    while k0 < dims.k {
        fill::<F, NL>(
            lhs,
            &mut shared_lhs,
            lhs_start,
            dims.lhs_stride,
            row0,
            dims.m,
            k0,
            dims.k,
            unit,
            tile_m,
            plan.lhs_along_k,
            config,
        );
        fill::<F, NR>(
            rhs,
            &mut shared_rhs,
            rhs_start,
            dims.rhs_stride,
            col0,
            dims.n,
            k0,
            dims.k,
            unit,
            tile_n,
            plan.rhs_along_k,
            config,
        );
        sync_cube();
        for kk in 0..tile_k {
            let mut a = Array::<f32>::new(own_m);
            #[unroll]
            for i in 0..own_m {
                let row = unit_m + comptime!(i as u32 * units_m);
                a[i] = shared_lhs[(kk * line_m + row) as usize];
            }
            #[unroll]
            for j in 0..own_n {
                let col = unit_n + comptime!(j as u32 * units_n);
                let b = shared_rhs[(kk * line_n + col) as usize];
                #[unroll]
                for i in 0..own_m {
                    let at = comptime!(i * own_n + j);
                    acc[at] = fma(a[i], b, acc[at]);
                }
            }
        }
        sync_cube();
        k0 += tile_k;
    }

    #[unroll]
    for i in 0..own_m {
        let row = row0 + unit_m + comptime!(i as u32 * units_m);
        if row < dims.m {
            #[unroll]
            for j in 0..own_n {
                let col = col0 + unit_n + comptime!(j as u32 * units_n);
                if col < dims.n {
                    let at = out_start + row as usize * dims.out_stride + col as usize;
                    let sum = acc[comptime!(i * own_n + j)] + bias_at(bias, col, biased);
                    out[at] = Vector::new(F::cast_from(sum));
                }
            }
        }
    }
}

/// Brings `tile` lines of `tile_k` elements, starting at line `line0` and depth `k0`, into shared
/// memory with k outermost; zero past `lines` and `depth`.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one matrix, one tile, one edge")]
fn fill<F: Float, N: Size>(
    src: &[Vector<F, N>],
    dst: &mut [f32],
    start: usize,
    stride: usize,
    line0: u32,
    lines: u32,
    k0: u32,
    depth: u32,
    unit: u32,
    #[comptime] tile: u32,
    #[comptime] along_k: bool,
    #[comptime] config: FmaConfig,
) {
    let lanes = N::value();
    let width = comptime!(lanes as u32);
    let vectors = comptime!(tile * config.tile_k / width);
    let units = comptime!(config.units());
    let across = comptime!(if along_k { config.tile_k / width } else { tile / width });
    #[unroll]
    for i in 0..comptime!(vectors.div_ceil(units)) {
        let at = unit + comptime!(i * units);
        if comptime!(vectors % units == 0) || at < vectors {
            let (major, minor) = (at / across, at % across * width);
            let (line, kk) = if comptime!(along_k) { (major, minor) } else { (minor, major) };
            let mut value = Vector::<F, N>::new(F::new(0.0));
            if line0 + line < lines && k0 + kk < depth {
                let from = if comptime!(along_k) {
                    start + (line0 + line) as usize * stride + (k0 + kk) as usize
                } else {
                    start + (k0 + kk) as usize * stride + (line0 + line) as usize
                };
                value = src[from / N::value()];
            }
            #[unroll]
            for e in 0..N::value() {
                let (line, kk) = if comptime!(along_k) {
                    (line, kk + comptime!(e as u32))
                } else {
                    (line + comptime!(e as u32), kk)
                };
                dst[(kk * comptime!(tile + 1) + line) as usize] = f32::cast_from(value.extract(e));
            }
        }
    }
}
