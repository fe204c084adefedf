//! Cooperative-matrix path: FlashAttention-2's loop on plane-scope matrices of Vulkan.
//!
//! | loop                              | level                                                             |
//! |-----------------------------------|-------------------------------------------------------------------|
//! | blocks of `planes · rows` queries | cubes; within a head, blocks with the most keys first             |
//! | tiles of `tile_kv` keys           | K and V in shared memory, the next tile prefetched into registers |
//! | `rows` queries                    | planes; q and the accumulators are matrices, in registers         |
//! | head dimension, then keys, by 16  | one matrix multiplication each                                    |
//!
//! ```text
//!   s = q · kᵀ                           // matrices -> the plane's shared memory
//!   m, l, p = exp(s - m)                 // plane / 16 units per row hold its scores, m and l
//!   p -> shared memory -> matrices
//!   acc += p · v
//! ```
//!
//! The driver chooses the element layout of a matrix. Scores and softmax weights therefore pass
//! through shared memory: 12 bytes per score for `4·head_dim` flop. Accumulator rows cannot be
//! scaled in place. As in the `mma.sync` path, m only moves when a score exceeds it by 2⁸; then the
//! accumulators pass through shared memory too.
//!
//! Cost: `4·head_dim` flop per visible pair; K and V are read from shared memory once per `rows`
//! queries.
//!
//! TFLOP/s on an H200 at 4 x 16 heads, 4096 positions, head dimension 128, with the configs that
//! the tuner chose: f16 197, bf16 179, causal 148 (Vulkan records in benches/baselines). The plain
//! path reaches 6. Configs timed once by `tune try`:
//!
//! | planes, rows, keys | f16 | bf16 |
//! |--------------------|-----|------|
//! | 8, 16, 32          | 198 | 177  |
//! | 4, 16, 32          | 126 | 115  |
//! | 8, 16, 16          | 50  | 148  |
//! | 4, 16, 16          | 49  | 155  |
//! | 2, 16, 32          | 17  | 33   |

use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

use super::scores::{Place, Region, Scores};
use super::{Dims, Sequences, Steps};
use crate::cooperative::{Corner, Tile, U32x4, load, put, read, zeros};
use crate::round::rounded;

/// Tile sizes of the cooperative-matrix path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SubgroupConfig {
    /// Planes per cube.
    pub planes: u32,
    /// Queries per plane: 16 or 32.
    pub rows: u32,
    /// Keys per tile.
    pub tile_kv: u32,
}

/// Padding elements per line of scores or weights, against bank conflicts.
const PAD: u32 = 8;

impl SubgroupConfig {
    /// Queries per cube.
    pub(crate) const fn tile_q(self) -> u32 {
        self.planes * self.rows
    }

    /// Bytes of shared memory: K and V tiles, and each plane's f32 scores and 16-bit weights.
    pub(crate) const fn shared_bytes(self, head_dim: u32) -> u32 {
        let line = head_dim.next_multiple_of(16);
        let tile = Tile { lines: self.tile_kv, line, units: 1, exact: true };
        2 * tile.bytes() + self.tile_q() * (self.tile_kv + PAD) * (4 + 2)
    }

    /// Estimated registers per unit: q, accumulators, scores, the prefetched tile, addresses.
    pub(crate) const fn registers(self, head_dim: u32, plane: u32) -> u32 {
        let head_dim = head_dim.next_multiple_of(16);
        let matrices = self.rows / 16 * 256 / plane;
        let own = matrices * (head_dim / 16 * 3 / 2 + 1 + self.tile_kv / 16);
        own + self.tile_kv * head_dim / (self.planes * plane) + 40
    }
}

/// Comptime parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SubgroupPlan {
    pub(crate) config: SubgroupConfig,
    pub(crate) head_dim: u32,
    /// Units per plane.
    pub(crate) plane: u32,
    /// Rounds weights and results explicitly before the cast to `F`.
    pub(crate) by_hand: bool,
    /// True if no tile of keys reaches past the end.
    pub(crate) exact: bool,
}

impl SubgroupPlan {
    pub(crate) const fn units(self) -> u32 {
        self.config.planes * self.plane
    }

    /// Head dimension of the matrices: zeros follow one that is no multiple of 16.
    pub(crate) const fn depth(self) -> u32 {
        self.head_dim.next_multiple_of(16)
    }

    /// Layout of a K tile; V uses the same layout.
    pub(crate) const fn tile(self) -> Tile {
        let SubgroupConfig { tile_kv, .. } = self.config;
        let (line, units) = (self.depth(), self.units());
        Tile { lines: tile_kv, line, units, exact: self.exact && line == self.head_dim }
    }

    /// Number of units that share a row of 16 queries.
    pub(crate) const fn sharers(self) -> u32 {
        if self.plane > 16 { self.plane / 16 } else { 1 }
    }

    /// Number of rows, out of 16, that a unit works on.
    pub(crate) const fn own_rows(self) -> usize {
        if self.plane < 16 { (16 / self.plane) as usize } else { 1 }
    }

    /// Number of rows that a unit works on, and the distance between them.
    pub(crate) const fn slots(self) -> (usize, u32) {
        let own = self.own_rows();
        (self.config.rows as usize / 16 * own, 16 / own as u32)
    }

    /// Vectors of four scores that a unit holds per row.
    pub(crate) const fn held(self) -> usize {
        (self.config.tile_kv / 4 / self.sharers()) as usize
    }

    /// Elements from one line of a plane's scores to the next.
    pub(crate) const fn line(self) -> u32 {
        self.config.tile_kv + PAD
    }

    /// Region of a plane's scores, to which masks and ends apply.
    const fn region(self) -> Region {
        let SubgroupConfig { rows, tile_kv, .. } = self.config;
        Region { queries: rows, keys: tile_kv, transposed: false, exact: self.exact }
    }
}

/// Softmax weights stay at or below e to this power, 2⁸.
const HEADROOM: f32 = 8.0 * std::f32::consts::LN_2;

#[cube]
#[expect(clippy::too_many_arguments, reason = "operands, results and comptime facts")]
pub(crate) fn subgroup<F: Float, M: Int, NI: Size, NO: Size>(
    q: &[Vector<F, NI>],
    k: &[Vector<F, NI>],
    v: &[Vector<F, NI>],
    out: &mut [Vector<F, NO>],
    lse: &mut [f32],
    scores: &Scores<F, M>,
    sequences: &Sequences,
    dims: &Dims,
    #[comptime] plan: SubgroupPlan,
) {
    let SubgroupConfig { rows, tile_kv, .. } = comptime!(plan.config);
    let tile_q = comptime!(plan.config.tile_q());
    let frags = comptime!(rows as usize / 16);
    let steps = comptime!(plan.depth() as usize / 16);
    let sharers = comptime!(plan.sharers());
    let own_rows = comptime!(plan.own_rows());
    let (slots, pass) = comptime!(plan.slots());
    let (held, line) = comptime!((plan.held(), plan.line()));
    let tile = comptime!(plan.tile());

    let (lane, plane) = (UNIT_POS_X, UNIT_POS_Y);
    let unit = plane * plan.plane + lane;
    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    let here = sequences.span(dims, batch);
    // Under the causal mask later queries have more keys. Start them first, so that no long block
    // runs last.
    let last_block = dims.seq_q.div_ceil(tile_q) - 1;
    let block = if comptime!(scores.rules.causal) { last_block - CUBE_POS_X } else { CUBE_POS_X };
    let first_row = block * tile_q;
    if first_row >= here.seq_q {
        terminate!();
    }

    let mut keys =
        Shared::<[U32x4]>::new_aligned_slice(comptime!(tile.vectors() as usize), 128usize);
    let mut values =
        Shared::<[U32x4]>::new_aligned_slice(comptime!(tile.vectors() as usize), 128usize);
    // [planes, rows, line]
    let mut shared_s = Shared::<[Vector<f32, Const<4>>]>::new_aligned_slice(
        comptime!((tile_q * line / 4) as usize),
        32usize,
    );
    let mut shared_p = Shared::<[Vector<F, Const<4>>]>::new_aligned_slice(
        comptime!((tile_q * line / 4) as usize),
        32usize,
    );
    let corner = corner_of(plan);
    // This unit's first row, and its first vector in each row.
    let (down, across) = (lane / sharers, lane % sharers);
    let row0 = first_row + plane * rows;

    let kv_head = head / dims.group;
    let from_q = Rows { first: row0, end: here.seq_q, before: here.from_q, batch, head };
    let a = fragments_of::<F, NI>(q, &dims.q, &from_q, &mut shared_p, plan); // [rows / 16, head_dim / 16]
    let mut acc = Sequence::<Matrix<f32>>::new(); // [rows / 16, head_dim / 16]
    #[unroll]
    for _ in 0..comptime!(frags * steps) {
        acc.push(zeros(16usize));
    }
    let mut row_max = Array::<f32>::new(slots); // m of this unit's rows
    let mut sum = Array::<f32>::new(slots); //  this unit's part of l
    #[unroll]
    for i in 0..slots {
        row_max[i] = scores.hidden;
        sum[i] = 0.0f32.runtime();
    }
    // `Scores::unit` gives exponents of 2; this path computes powers of e.
    let power = scores.unit() * std::f32::consts::LN_2;

    let (first_key, last_key) = scores.range(&here, first_row, comptime!(tile_q));
    let (first_tile, last_tile) = (first_key / tile_kv, last_key.div_ceil(tile_kv));
    let copies = comptime!(tile.copies());
    let (mut next_k, mut next_v) = (Array::<U32x4>::new(copies), Array::<U32x4>::new(copies));
    let mut corner_k = Corner {
        start: dims.k.at(here.from_kv, batch, kv_head),
        stride: dims.k.seq,
        line: first_tile * tile_kv,
        lines: here.seq_kv,
        element: 0u32.runtime(),
        elements: comptime!(plan.head_dim).runtime(),
    };
    let mut corner_v = Corner {
        start: dims.v.at(here.from_kv, batch, kv_head),
        stride: dims.v.seq,
        line: first_tile * tile_kv,
        lines: here.seq_kv,
        element: 0u32.runtime(),
        elements: comptime!(plan.head_dim).runtime(),
    };
    read::<F, NI>(k, &mut next_k, &corner_k, unit, tile);
    read::<F, NI>(v, &mut next_v, &corner_v, unit, tile);

    for number in first_tile..last_tile {
        let col0 = number * tile_kv;
        sync_cube();
        put(&mut keys, &next_k, unit, tile);
        put(&mut values, &next_v, unit, tile);
        sync_cube();
        // The read after the last tile is not used.
        let mut ahead = col0 + tile_kv;
        if comptime!(plan.exact) {
            ahead = min(ahead, here.seq_kv - tile_kv);
        }
        corner_k.line = ahead;
        corner_v.line = ahead;
        read::<F, NI>(k, &mut next_k, &corner_k, unit, tile);
        read::<F, NI>(v, &mut next_v, &corner_v, unit, tile);

        // s = q · kᵀ
        multiply::<F>(&a, &keys, &mut shared_s, plan);
        sync_plane();

        // This unit's scores: every `sharers`th vector of each row.
        let mut s = Array::<Vector<f32, Const<4>>>::new(comptime!(slots * held));
        let corner_place = Place { batch, head, row: row0, col: col0 };
        let mut cut = scores.cuts(&corner_place, &here, comptime!(plan.region()));
        if comptime!(scores.rules.every()) {
            cut = true;
        }
        let mut tops = Array::<f32>::new(slots);
        let mut grows = false;
        #[unroll]
        for i in 0..slots {
            let line_of = comptime!(pass * i as u32) + down;
            let row = row0 + line_of;
            let from = corner + line_of * comptime!(line / 4) + across;
            let mut top = scores.hidden;
            #[unroll]
            for j in 0..held {
                let mut own = shared_s[(from + comptime!(j as u32 * sharers)) as usize];
                if cut {
                    let col = col0 + 4 * (across + comptime!(j as u32 * sharers));
                    #[unroll]
                    for e in 0..4usize {
                        let place = Place { batch, head, row, col: col + comptime!(e as u32) };
                        let score = scores.score(own.extract(e), &place, &here, dims);
                        let hidden = scores.hidden;
                        own.insert(e, select(row < here.seq_q, score, hidden));
                    }
                }
                let pairs = max(
                    max(own.extract(0usize), own.extract(1usize)),
                    max(own.extract(2usize), own.extract(3usize)),
                );
                top = max(top, pairs);
                s[comptime!(i * held + j)] = own;
            }
            tops[i] = top * power;
            grows = grows || tops[i] > row_max[i] + HEADROOM;
        }

        // Update m and rescale everything that is a multiple of exp(-m).
        if plane_any(grows) {
            let mut factors = Array::<f32>::new(slots);
            #[unroll]
            for i in 0..slots {
                let mut reached = tops[i];
                if comptime!(sharers > 1) {
                    reached = max(reached, plane_shuffle_xor(reached, 1));
                }
                if comptime!(sharers > 2) {
                    reached = max(reached, plane_shuffle_xor(reached, 2));
                }
                let grown = max(row_max[i], reached);
                // -inf - -inf is NaN: leave a row without keys so far as it is.
                let factor = select(grown == scores.hidden, 1.0f32, (row_max[i] - grown).exp());
                row_max[i] = grown;
                sum[i] *= factor;
                factors[i] = factor;
            }
            // Wait until all scores are in registers; the accumulators reuse their place.
            sync_plane();
            if number > first_tile {
                #[unroll]
                for i in 0..frags {
                    #[unroll]
                    for step in 0..steps {
                        let at = comptime!(i * steps + step);
                        let row_major = comptime!(MatrixLayout::RowMajor);
                        let (from, end) = (corner as usize, shared_s.len());
                        cmma::store(&mut shared_s[from..end], acc.index(at), line, row_major);
                        sync_plane();
                        #[unroll]
                        for r in 0..own_rows {
                            let line_of = comptime!(pass * r as u32) + down;
                            let first = corner + line_of * comptime!(line / 4) + across;
                            let factor = factors[comptime!(i * own_rows + r)];
                            scale(&mut shared_s, first, factor, sharers);
                        }
                        sync_plane();
                        let sums = acc.index_mut(at);
                        cmma::load_with_layout(sums, &shared_s[from..end], line, row_major);
                        sync_plane();
                    }
                }
            }
        }

        // p = exp(s - m), l
        #[unroll]
        for i in 0..slots {
            let line_of = comptime!(pass * i as u32) + down;
            let from = corner + line_of * comptime!(line / 4) + across;
            let shift = select(row_max[i] == scores.hidden, 0.0f32, -row_max[i]);
            let mut part = 0.0f32.runtime();
            #[unroll]
            for j in 0..held {
                let four = s[comptime!(i * held + j)];
                let mut weights = Vector::<F, Const<4>>::new(F::new(0.0));
                #[unroll]
                for e in 0..4usize {
                    let weight = fma(four.extract(e), power, shift).exp();
                    part += weight;
                    weights.insert(e, rounded::<F>(weight, plan.by_hand));
                }
                shared_p[(from + comptime!(j as u32 * sharers)) as usize] = weights;
            }
            sum[i] += part;
        }
        sync_plane();

        // acc += p · v
        accumulate::<F>(&acc, &shared_p, &values, plan);
    }

    let mut quotients = Array::<f32>::new(slots);
    #[unroll]
    for i in 0..slots {
        let mut l = sum[i];
        if comptime!(sharers > 1) {
            l += plane_shuffle_xor(l, 1);
        }
        if comptime!(sharers > 2) {
            l += plane_shuffle_xor(l, 2);
        }
        // A row without keys is 0.
        quotients[i] = select(l == 0.0, 0.0, 1.0 / l);
        if comptime!(scores.rules.lse) {
            // One of the units that share the row.
            let row = row0 + comptime!(pass * i as u32) + down;
            if row < here.seq_q && across == 0 {
                let at = dims.lse_at(here.from_q + row, batch, head);
                lse[at] = select(l == 0.0, scores.hidden, row_max[i] + l.ln());
            }
        }
    }
    store_rows::<F, NO>(out, &dims.out, &from_q, &acc, &quotients, &mut shared_s, plan);
}

/// Rows that a plane owns, within one head of one sequence.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Rows {
    /// First row, and one past the last row of the sequence.
    pub(super) first: u32,
    pub(super) end: u32,
    /// Rows of the tensor before this sequence.
    pub(super) before: u32,
    pub(super) batch: u32,
    pub(super) head: u32,
}

/// Loads a plane's rows of `from` as matrices `[rows / 16, head_dim / 16]`, with zeros past the
/// end. They pass through `scratch`, the weights buffer of all planes.
#[cube]
pub(super) fn fragments_of<F: Float, N: Size>(
    from: &[Vector<F, N>],
    steps: &Steps,
    rows: &Rows,
    scratch: &mut [Vector<F, Const<4>>],
    #[comptime] plan: SubgroupPlan,
) -> Sequence<Matrix<F>> {
    let (frags, own_rows) = comptime!((plan.config.rows as usize / 16, plan.own_rows()));
    let (sharers, line) = comptime!((plan.sharers(), plan.line()));
    let (_, pass) = comptime!(plan.slots());
    let corner = corner_of(plan);
    let (down, across) = (UNIT_POS_X / sharers, UNIT_POS_X % sharers);
    let mut all = Sequence::<Matrix<F>>::new();
    #[unroll]
    for i in 0..frags {
        #[unroll]
        for step in 0..comptime!(plan.depth() as usize / 16) {
            sync_plane();
            #[unroll]
            for r in 0..own_rows {
                let line_of = comptime!(pass * r as u32) + down;
                let row = rows.first + comptime!(16 * i as u32) + line_of;
                let at = steps.at(rows.before + row, rows.batch, rows.head);
                #[unroll]
                for j in 0..comptime!((4 / sharers) as usize) {
                    let vector = across + comptime!(j as u32 * sharers);
                    let mut part = Vector::<F, Const<4>>::new(F::new(0.0));
                    let col = comptime!(16 * step as u32) + 4 * vector;
                    let whole = comptime!(16 * step as u32 + 16 <= plan.head_dim);
                    if row < rows.end && (whole || col < plan.head_dim) {
                        part = four::<F, N>(from, at + comptime!(16 * step) + 4 * vector as usize);
                    }
                    scratch[(corner + line_of * comptime!(line / 4) + vector) as usize] = part;
                }
            }
            sync_plane();
            all.push(rows_of::<F>(&*scratch, corner, line));
        }
    }
    all
}

/// Multiplies a plane's rows `a` by the lines of a tile, transposed, and stores the result in the
/// plane's lines of `scores`.
#[cube]
pub(super) fn multiply<F: Float>(
    a: &Sequence<Matrix<F>>,
    tile: &[U32x4],
    scores: &mut [Vector<f32, Const<4>>],
    #[comptime] plan: SubgroupPlan,
) {
    let SubgroupConfig { rows, tile_kv, .. } = comptime!(plan.config);
    let (frags, steps) = comptime!((rows as usize / 16, plan.depth() as usize / 16));
    let line = comptime!(plan.line());
    let corner = corner_of(plan);
    #[unroll]
    for j in 0..comptime!(tile_kv as usize / 16) {
        let mut s = Sequence::<Matrix<f32>>::new();
        #[unroll]
        for _ in 0..frags {
            s.push(zeros(16usize));
        }
        #[unroll]
        for step in 0..steps {
            let b = load::<F>(
                tile,
                comptime!(16 * j as u32).runtime(),
                comptime!(16 * step as u32).runtime(),
                MatrixIdent::B,
                MatrixLayout::ColMajor,
                16usize,
                comptime!(plan.tile()),
            );
            #[unroll]
            for i in 0..frags {
                let c = s.index(i);
                cmma::execute(a.index(comptime!(i * steps + step)), &b, c, c);
            }
        }
        #[unroll]
        for i in 0..frags {
            let at = corner + comptime!((16 * i as u32 * line + 16 * j as u32) / 4);
            let end = scores.len();
            let row_major = comptime!(MatrixLayout::RowMajor);
            cmma::store(&mut scores[at as usize..end], s.index(i), line, row_major);
        }
    }
}

/// Adds the product of a plane's `weights` and a tile to `acc`, `[rows / 16, head_dim / 16]`.
#[cube]
pub(super) fn accumulate<F: Float>(
    acc: &Sequence<Matrix<f32>>,
    weights: &[Vector<F, Const<4>>],
    tile: &[U32x4],
    #[comptime] plan: SubgroupPlan,
) {
    let SubgroupConfig { rows, tile_kv, .. } = comptime!(plan.config);
    let (frags, steps) = comptime!((rows as usize / 16, plan.depth() as usize / 16));
    let line = comptime!(plan.line());
    let corner = corner_of(plan);
    #[unroll]
    for j in 0..comptime!(tile_kv as usize / 16) {
        let mut p = Sequence::<Matrix<F>>::new();
        #[unroll]
        for i in 0..frags {
            let at = corner + comptime!((16 * i as u32 * line + 16 * j as u32) / 4);
            p.push(rows_of::<F>(weights, at, line));
        }
        #[unroll]
        for step in 0..steps {
            let b = load::<F>(
                tile,
                comptime!(16 * j as u32).runtime(),
                comptime!(16 * step as u32).runtime(),
                MatrixIdent::B,
                MatrixLayout::RowMajor,
                16usize,
                comptime!(plan.tile()),
            );
            #[unroll]
            for i in 0..frags {
                let c = acc.index(comptime!(i * steps + step));
                cmma::execute(p.index(i), &b, c, c);
            }
        }
    }
}

/// Stores a plane's rows, each times its factor in `factors`. They pass through `scratch`, the
/// scores buffer of all planes.
#[cube]
pub(super) fn store_rows<F: Float, N: Size>(
    out: &mut [Vector<F, N>],
    steps: &Steps,
    rows: &Rows,
    acc: &Sequence<Matrix<f32>>,
    factors: &Array<f32>,
    scratch: &mut [Vector<f32, Const<4>>],
    #[comptime] plan: SubgroupPlan,
) {
    let (frags, own_rows) = comptime!((plan.config.rows as usize / 16, plan.own_rows()));
    let all_steps = comptime!(plan.depth() as usize / 16);
    let (sharers, line) = comptime!((plan.sharers(), plan.line()));
    let (_, pass) = comptime!(plan.slots());
    let corner = corner_of(plan);
    let (down, across) = (UNIT_POS_X / sharers, UNIT_POS_X % sharers);
    #[unroll]
    for i in 0..frags {
        #[unroll]
        for step in 0..all_steps {
            sync_plane();
            let end = scratch.len();
            cmma::store(
                &mut scratch[corner as usize..end],
                acc.index(comptime!(i * all_steps + step)),
                line,
                MatrixLayout::RowMajor,
            );
            sync_plane();
            #[unroll]
            for r in 0..own_rows {
                let line_of = comptime!(pass * r as u32) + down;
                let row = rows.first + comptime!(16 * i as u32) + line_of;
                let factor = factors[comptime!(i * own_rows + r)];
                if row < rows.end {
                    let start = steps.at(rows.before + row, rows.batch, rows.head);
                    #[unroll]
                    for j in 0..comptime!((4 / sharers) as usize) {
                        let vector = across + comptime!(j as u32 * sharers);
                        let from = corner + line_of * comptime!(line / 4) + vector;
                        let at = start + comptime!(16 * step) + 4 * vector as usize;
                        let col = comptime!(16 * step as u32) + 4 * vector;
                        if comptime!(16 * step as u32 + 16 <= plan.head_dim) || col < plan.head_dim
                        {
                            let four = scratch[from as usize];
                            store_four::<F, N>(out, at, four, factor, plan.by_hand);
                        }
                    }
                }
            }
        }
    }
}

/// Index in vectors where a plane's own scores and weights begin.
#[cube]
pub(super) fn corner_of(#[comptime] plan: SubgroupPlan) -> u32 {
    UNIT_POS_Y * comptime!(plan.config.rows * plan.line() / 4)
}

/// Loads 16 rows of queries or weights as a matrix, from vector `at` on.
#[cube]
fn rows_of<F: Float>(shared: &[Vector<F, Const<4>>], at: u32, #[comptime] line: u32) -> Matrix<F> {
    let row_major = comptime!(MatrixLayout::RowMajor);
    // SAFETY: the load below initialises the matrix.
    let mut matrix =
        unsafe { Matrix::<F>::uninitialized(MatrixIdent::A, 16usize, 16usize, 16usize, row_major) };
    let end = shared.len();
    cmma::load(&mut matrix, &shared[at as usize..end], line);
    matrix
}

/// Multiplies a unit's share of a row of 16: every `sharers`th vector of four from `first` on.
#[cube]
fn scale(scratch: &mut [Vector<f32, Const<4>>], first: u32, factor: f32, #[comptime] sharers: u32) {
    #[unroll]
    for j in 0..comptime!(4 / sharers) {
        scratch[(first + comptime!(j * sharers)) as usize] *= Vector::new(factor);
    }
}

/// Reads four elements from element `at` on; `at` is a multiple of the vector width.
#[cube]
fn four<F: Float, N: Size>(from: &[Vector<F, N>], at: usize) -> Vector<F, Const<4>> {
    let width = N::value();
    let mut all = Vector::<F, Const<4>>::new(F::new(0.0));
    #[unroll]
    for part in 0..comptime!(4 / width) {
        let vector = from[at / width + part];
        #[unroll]
        for e in 0..width {
            all.insert(comptime!(part * width + e), vector.extract(e));
        }
    }
    all
}

/// Stores four elements times `scale` from element `at` on; `at` is a multiple of the vector width.
#[cube]
fn store_four<F: Float, N: Size>(
    out: &mut [Vector<F, N>],
    at: usize,
    four: Vector<f32, Const<4>>,
    scale: f32,
    #[comptime] by_hand: bool,
) {
    let width = N::value();
    #[unroll]
    for part in 0..comptime!(4 / width) {
        let mut vector = Vector::<F, N>::new(F::new(0.0));
        #[unroll]
        for e in 0..width {
            let value = four.extract(comptime!(part * width + e)) * scale;
            vector.insert(e, rounded::<F>(value, by_hand));
        }
        out[at / width + part] = vector;
    }
}
