//! The CUDA path for many rows: a tile of x in shared memory, codes decoded into right fragments.
//!
//! | loop                                     | level                                              |
//! |------------------------------------------|----------------------------------------------------|
//! | `(tile_m, 32·planes)` blocks of y, parts of k | cubes                                         |
//! | 64 of k                                  | ring of `stages`: x swizzled, codes, absmax        |
//! | 32 columns of y                          | planes, accumulators in registers                  |
//! | 32 of k                                  | codes of all columns decoded, then row after row   |
//!
//! Planes are adjacent along n. Each code is therefore decoded once a cube, directly into the register that
//! the instruction takes. This needs no dense tile in shared memory, and no barrier for one. While a half
//! step is multiplied, the codes of the next are decoded, one slice with each fragment of rows.
//!
//! Byte permutations turn eight codes into four registers. The 16 halves of the codebook are two tables of 16
//! bytes. One `prmt` reads half a table for four codes, and the top bits of the codes choose between the
//! halves. That takes 24 instructions for eight codes and no shared memory access, which the loads of x need.
//! Each pair is then multiplied by its absmax in half precision: codebook value, absmax and product are each
//! rounded.
//!
//! Cost: the matmul, and 24 integer instructions for eight codes a cube.
//!
//! Ladder in us at m = 64 / 128 / 512 (14336 x 4096, H200 limited to the features of an RTX 4090; a dense
//! weight with its matmul takes 85 / 98 / 192, bitsandbytes 0.50.2 114 / 109 / 166):
//!
//! | version                                                         |  64 | 128 | 512 |
//! |-----------------------------------------------------------------|-----|-----|-----|
//! | v1 x by 16-byte loads in the order of the codes, decoded at once | 48  | 80  | 252 |
//! | v2 v1, next half step's codes decoded during the matmul          | 51  | 82  | 251 |
//! | v3 codes in the order of `ldmatrix`: no register is moved        | 43  | 71  | 207 |
//! | v4 v3, fragments of x loaded three iterations ahead              | 39  | 68  | 200 |
//! | v5 v4, copies a step and a half ahead instead of half a step     | 40  | 69  | 204 |
//!
//! At 512 rows the tensor pipe is busy for 47% of the time, and no pipe for more than 53%. Of 5.2 cycles
//! between two instructions of a plane, 1.3 are a pipe that another plane occupies, and 1.3 a fixed latency.
//! Two planes a scheduler are too few to hide both, and there are no registers for a third. At 512 rows
//! [`shared`](super::shared) is faster.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

use super::Dims;
use super::tensor_core::{
    AbsmaxFeed, HalfCodebook, NESTED_BYTES, RowPlan, decode_pairs, fill_nested, first_nested,
    load_absmax, store_row,
};
use crate::matmul::{Finish, block_of};
use crate::nf4::{QuantizedPlan, QuantizedValues};
use crate::tile::{
    CopyLane, CopyPlan, TileShape, commit_copies, copy_vector, global_address, lhs_lane,
    load_fragments, load_words, next_stage, shared_address, typed, wait_copies,
};

/// Tile sizes of the fused path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FusedConfig {
    /// Rows of x that a cube processes.
    pub tile_m: u32,
    /// Planes of a cube, with 32 columns each.
    pub planes: u32,
    /// Stages in the ring, each 64 of k.
    pub stages: u32,
    /// Number of split-k parts; each part has its own cubes.
    pub parts: u32,
}

/// Register sets for fragments of x; all except one are loaded ahead.
const SETS: usize = 4;
/// Size of a stage along k.
const STEP: u32 = 64;
/// Bytes of codes of a plane's 32 columns in a stage: two pieces of 16 rows of the weight.
const CODES_BYTES: u32 = 1024;

impl FusedConfig {
    pub(super) const fn units(self) -> u32 {
        32 * self.planes
    }

    pub(super) const fn tile_n(self) -> u32 {
        32 * self.planes
    }

    /// Rough number of registers of a unit: accumulators, fragments of both operands, codes, codebook and
    /// addresses.
    pub(super) const fn registers(self) -> u32 {
        self.tile_m + 96
    }
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FusedPlan {
    /// Config with one part, so that instances of different parts differ only in `partial`.
    pub(super) config: FusedConfig,
    pub(super) weight: QuantizedPlan,
    pub(super) bf16: bool,
    /// True if every tile of x is full, so that no edge is checked.
    pub(super) exact: bool,
    /// True if the first 16 of a plane's columns gate the others.
    pub(super) glu: bool,
    /// True if sums go to the workspace.
    pub(super) partial: bool,
}

impl FusedPlan {
    const fn copies(self) -> CopyPlan {
        CopyPlan {
            shape: TileShape::new(self.config.tile_m, STEP, false, 2),
            width: 8,
            units: self.config.units() as usize,
            exact: self.exact,
        }
    }

    /// Offset of the planes' codes in a stage; their absmax follow, then the scales and offsets of these.
    const fn codes_at(self) -> u32 {
        self.config.tile_m * STEP * 2
    }

    const fn absmax_at(self) -> u32 {
        self.codes_at() + self.config.planes * CODES_BYTES
    }

    const fn scales_at(self) -> u32 {
        self.absmax_at() + self.config.planes * 128
    }

    const fn stage_bytes(self) -> u32 {
        self.scales_at() + if self.weight.nested { self.config.planes * 256 } else { 0 }
    }

    pub(super) const fn shared_bytes(self) -> u32 {
        NESTED_BYTES + self.config.stages * self.stage_bytes()
    }
}

/// Source addresses of a unit's copies for every step.
#[derive(CubeType)]
struct Feed {
    lane: CopyLane,
    /// Address of the unit's first vector of x, at step 0.
    x: u64,
    /// Bytes between rows of x.
    line: u64,
    rows_left: u32,
    /// Addresses of the unit's 16 bytes in both pieces of codes, at step 0.
    codes: u64,
    second: u64,
    absmax: AbsmaxFeed,
}

#[cube]
pub(crate) fn fused<F: Float, NX: Size, NW: Size, NO: Size>(
    x: &[Vector<F, NX>],
    weight: &QuantizedValues<NW>,
    out: &mut [Vector<F, NO>],
    partials: &mut [f32],
    finish: &Finish<F, F, NO>,
    dims: &Dims,
    #[comptime] plan: FusedPlan,
) {
    let (config, stages) = comptime!((plan.config, plan.config.stages));
    let frags = comptime!((config.tile_m / 16) as usize);
    let mut shared = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
        comptime!((plan.shared_bytes() / 16) as usize),
        128usize,
    );
    let nested_codebook = shared_address(&mut shared);
    let ring = nested_codebook + NESTED_BYTES;
    let end = ring + comptime!(stages * plan.stage_bytes());

    let (lane, plane) = (UNIT_POS_X, UNIT_POS_Y);
    let unit = plane * 32 + lane;
    let (rows, cols) = (dims.m.div_ceil(config.tile_m), dims.n.div_ceil(config.tile_n()));
    let (block_m, block_n) = block_of(rows, cols, CUBE_POS_X);
    // With a gated pair, a plane has half as many columns of each matrix.
    let wide = comptime!(if plan.glu { 16u32 } else { 32u32 });
    let row = block_m * config.tile_m;
    let col = (block_n * comptime!(config.planes) + plane) * wide;
    let all = dims.k / STEP;
    let first = CUBE_POS_Y * dims.part_steps;
    let steps = min(all - first, dims.part_steps);

    let feed = feed_of(x, weight, dims, unit, row, col, lane, plan);
    let mut to = u32::cast_from(ring);
    #[unroll]
    for step in 0..comptime!(stages - 1) {
        copy(&feed, first, step.runtime(), steps, to, plane, lane, plan);
        to = next_stage(to, ring, end, plan.stage_bytes());
    }
    let nested = first_nested(weight, unit);
    let codebook = HalfCodebook::new(&weight.codebook, plan.bf16);
    fill_nested(weight, nested, nested_codebook, unit, comptime!(config.units()));

    let def = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let size!(NF) = def.vector_size(MatrixIdent::A);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    let mut acc = Sequence::<Array<Vector<f32, NC>>>::new(); // [frags, 4]
    #[unroll]
    for _ in 0..comptime!(4 * frags) {
        let mut sums = Array::<Vector<f32, NC>>::new(2usize);
        sums[0] = Vector::new(0.0f32);
        sums[1] = Vector::new(0.0f32);
        acc.push(sums);
    }
    let own = lhs_lane(0u32.runtime(), lane, plan.copies().shape);
    let mut read = u32::cast_from(ring);
    wait_copies(comptime!(stages - 2));
    sync_cube();
    // Right fragments of the current half step and of the next: [2, 4], with columns 8j to 8j + 7 each.
    let mut right = Sequence::<Array<u32>>::new();
    #[unroll]
    for _ in 0..8usize {
        right.push(Array::<u32>::new(4usize));
    }
    let mut codes = Array::<u32>::new(8usize);
    let mut scales = Array::<u32>::new(4usize);
    load_codes(&mut codes, read + comptime!(plan.codes_at()) + plane * CODES_BYTES + lane * 16);
    load_scales(&mut scales, read, nested_codebook, 0u32, plane, lane, plan);
    #[unroll]
    for slice in 0..8usize {
        decode(&codes, &scales, &codebook, &mut right, 0usize, slice, plan.bf16);
    }
    let mut left = Sequence::<Array<u32>>::new();
    #[unroll]
    for iteration in 0..SETS {
        left.push(Array::<u32>::new(4usize));
        if comptime!(iteration + 1 < SETS) {
            load_left::<F>(read, own, left.index_mut(iteration), iteration, plan);
        }
    }
    for step in 0..steps {
        // Copy into the stage of the previous step, which every plane has read.
        copy(&feed, first, step + comptime!(stages - 1), steps, to, plane, lane, plan);
        to = next_stage(to, ring, end, plan.stage_bytes());
        let now = u32::cast_from(read);
        #[unroll]
        for half in 0..2usize {
            if comptime!(half == 1) {
                // The codes and absmax of a plane are copied by its own units.
                wait_copies(comptime!(stages - 2));
                sync_plane();
                read = next_stage(read, ring, end, plan.stage_bytes());
                // Past the last step this reads leftovers of an earlier one, which are never multiplied.
                let from = read + comptime!(plan.codes_at()) + plane * CODES_BYTES + lane * 16;
                load_codes(&mut codes, from);
                load_scales(&mut scales, read, nested_codebook, step + 1, plane, lane, plan);
            }
            // Fragments of the first 16 of k, then of the other 16.
            #[unroll]
            for iteration in 0..comptime!(2 * frags) {
                let ahead = comptime!(2 * frags * half + iteration + SETS - 1);
                let next = left.index_mut(comptime!(ahead % SETS));
                if comptime!(ahead < 4 * frags) {
                    load_left::<F>(now, own, next, ahead, plan);
                } else {
                    if comptime!(ahead == 4 * frags) {
                        // The current stage is completely read, and the next one has arrived.
                        sync_cube();
                    }
                    load_left::<F>(read, own, next, comptime!(ahead - 4 * frags), plan);
                }
                // Decodes a slice of the next half step's codes during the matmul.
                #[unroll]
                for slice in
                    comptime!(4 * iteration / frags)..comptime!(4 * (iteration + 1) / frags)
                {
                    decode(&codes, &scales, &codebook, &mut right, 1 - half, slice, plan.bf16);
                }
                let left = typed::<F, NF>(left.index(comptime!(iteration % SETS)), 0usize, 4usize);
                #[unroll]
                for x in 0..4usize {
                    let j = comptime!(if iteration % 2 == 1 { 3 - x } else { x });
                    let words = right.index(comptime!(4 * half + j));
                    let right = typed::<F, NF>(words, comptime!(iteration / frags * 2), 2usize);
                    let sums = acc.index_mut(comptime!(iteration % frags * 4 + j));
                    def.execute_inplace(&left, &right, sums);
                }
            }
        }
    }

    let stored = comptime!(RowPlan { pairs: 4, glu: plan.glu, partial: plan.partial });
    #[unroll]
    for i in 0..comptime!(2 * frags) {
        let row = row + comptime!(8 * i as u32) + lane / 4;
        if comptime!(plan.exact) || row < dims.m {
            let mut pairs = Array::<Vector<f32, NC>>::new(4usize);
            #[unroll]
            for j in 0..4usize {
                pairs[j] = acc.index(comptime!(i / 2 * 4 + j))[comptime!(i % 2)];
            }
            store_row(out, partials, finish, &pairs, row, col, lane, dims, stored);
        }
    }
}

#[cube]
#[expect(clippy::too_many_arguments, reason = "operands and one place")]
fn feed_of<F: Float, NX: Size, NW: Size>(
    x: &[Vector<F, NX>],
    weight: &QuantizedValues<NW>,
    dims: &Dims,
    unit: u32,
    row: u32,
    col: u32,
    lane: u32,
    #[comptime] plan: FusedPlan,
) -> Feed {
    let copies = comptime!(plan.copies());
    let spans = dims.k / STEP;
    let line = u64::cast_from(dims.k) * 2;
    let copy_lane = CopyLane::new(unit, copies);
    // Columns past the end repeat the last ones and are never stored.
    let tiles = dims.n / comptime!(if plan.glu { 32u32 } else { 16u32 });
    let one = min(col / 16, tiles - 1);
    let two = if comptime!(plan.glu) { one + tiles } else { min(col / 16 + 1, tiles - 1) };
    let bytes = u64::cast_from(spans) * 512;
    let codes = global_address(&weight.codes) + u64::cast_from(lane * 16);
    let corner = global_address(x) + u64::cast_from(row) * line;
    Feed {
        x: corner + copy_lane.start(line, copies),
        lane: copy_lane,
        line,
        rows_left: dims.m - row,
        codes: codes + u64::cast_from(one) * bytes,
        second: codes + u64::cast_from(two) * bytes,
        absmax: AbsmaxFeed::new(weight, select(lane < 16, one, two), lane, dims.k, plan.weight),
    }
}

/// Issues the copies of step `step` of `steps` after `first` to the stage at `to`, and closes their group.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one step, one stage")]
fn copy(
    feed: &Feed,
    first: u32,
    step: u32,
    steps: u32,
    to: u32,
    plane: u32,
    lane: u32,
    #[comptime] plan: FusedPlan,
) {
    if step < steps {
        let span = first + step;
        let x = feed.x + u64::cast_from(span * comptime!(STEP * 2));
        feed.lane.copy(x, feed.line, to, feed.rows_left, STEP, plan.copies());
        let codes = to + comptime!(plan.codes_at()) + plane * CODES_BYTES + lane * 16;
        let four = comptime!(CopyPlan::words(4));
        let far = u64::cast_from(span * 512);
        copy_vector(feed.codes + far, codes, 0u32, true, four);
        copy_vector(feed.second + far, codes, 512u32, true, four);
        let absmax = to + comptime!(plan.absmax_at()) + plane * 128 + lane * 4;
        let scales = to + comptime!(plan.scales_at()) + plane * 256 + lane * 8;
        feed.absmax.copy(span, absmax, scales, comptime!([0, 0]), plan.weight);
    }
    commit_copies();
}

/// Loads the unit's words of both pieces: columns lane / 4 + 8j at 2j and 2j + 1.
#[cube]
fn load_codes(codes: &mut Array<u32>, from: u32) {
    #[unroll]
    for piece in 0..2usize {
        let words = load_words(from, comptime!(512 * piece as u32));
        #[unroll]
        for i in 0..4usize {
            codes[comptime!(4 * piece + i)] = words.extract(i);
        }
    }
}

/// Loads the absmax of the unit's four columns, each twice in a word of halves.
#[cube]
fn load_scales(
    scales: &mut Array<u32>,
    read: u32,
    nested_codebook: u32,
    step: u32,
    plane: u32,
    lane: u32,
    #[comptime] plan: FusedPlan,
) {
    #[unroll]
    for j in 0..4usize {
        let place = comptime!(j as u32 / 2 * 16 + j as u32 % 2) + lane / 4 * 2;
        let at = read + comptime!(plan.absmax_at()) + plane * 128 + place * 4;
        let far = read + comptime!(plan.scales_at()) + plane * 256 + place * 8;
        scales[j] = load_absmax(at, far, nested_codebook, step, plan.weight.nested, plan.bf16);
    }
}

/// Loads fragment `which` of a step: all rows of the first 16 of k, then of the next 16.
#[cube]
fn load_left<F: Float>(
    read: u32,
    own: u32,
    into: &mut Array<u32>,
    #[comptime] which: usize,
    #[comptime] plan: FusedPlan,
) {
    let frags = comptime!((plan.config.tile_m / 16) as usize);
    let (k, row) = comptime!((which / frags, which % frags));
    let at = read + (own ^ comptime!(32 * k as u32));
    let far = comptime!(16 * 128 * row as u32);
    load_fragments::<F>(at, into, far, plan.copies().shape, false);
}

/// Decodes slice `slice` of eight of the right fragments of half step `half`: two bytes of a column's word.
#[cube]
fn decode(
    codes: &Array<u32>,
    scales: &Array<u32>,
    codebook: &HalfCodebook,
    right: &mut Sequence<Array<u32>>,
    #[comptime] half: usize,
    #[comptime] slice: usize,
    #[comptime] bf16: bool,
) {
    let (j, bytes) = comptime!((slice / 2, slice % 2));
    let word = codes[comptime!(2 * j + half)];
    let (first, second) = decode_pairs(word, scales[j], codebook, bytes, bf16);
    let pairs = right.index_mut(comptime!(4 * half + j));
    pairs[comptime!(2 * bytes)] = first;
    pairs[comptime!(2 * bytes + 1)] = second;
}
