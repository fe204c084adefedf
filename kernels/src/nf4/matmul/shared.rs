//! The CUDA path for hundreds of rows: codes decoded into right fragments in shared memory, once a cube.
//!
//! | loop                                                   | level                                             |
//! |--------------------------------------------------------|---------------------------------------------------|
//! | `(64·planes_m, 64·planes_n)` blocks of y, parts of k   | cubes                                             |
//! | 32 of k                                                | ring of `stages` of x, two of right fragments      |
//! | 64 x 64 of y                                           | planes, accumulators in registers                 |
//! | 16 of k                                                | fragments in registers, one step ahead            |
//!
//! The loop is that of [`matmul`](crate::matmul)'s `Mma`, except that tiles of the weight are not copied.
//! Each plane decodes its part of the cube's codes, as in [`fused`](super::fused), while the previous tile is
//! multiplied. Registers are stored and loaded in the layout of the instruction, 16 bytes a unit: no swizzle,
//! no `ldmatrix`.
//!
//! Cost: the matmul, and 24 integer instructions for eight codes a cube. A cube has up to twice as many rows
//! as in `Fused`.
//!
//! Ladder in us at m = 512, bf16, with `planes_m`, `planes_n` = 4, 2 (H200 limited to the features of an RTX
//! 4090, measured one after the other with `tune try`). At that time `Fused` took 204 and 405 us, a dense
//! weight with its matmul 192 and 410 us, and bitsandbytes 0.50.2 163 and 346 us. Another run gave 169 us
//! instead of 164 us.
//!
//! | version                                                                   | 14336 x 4096 | gated 28672 x 4096 |
//! |---------------------------------------------------------------------------|--------------|--------------------|
//! | v1 decoded during the previous tile's matmul, and stored at once           | 229          | 460                |
//! | v2 v1, stored half a step later: the barrier waits for no decoding         | 184          | 370                |
//! | v3 v2, copies by running addresses, predicated; codes half a step earlier  | 164          | 334                |
//!
//! v3 with other `planes_m`, `planes_n`: 4, 1 takes 180 us and, gated, 326 us (the chosen config); 2, 2 takes
//! 197 us; 2, 4 takes 200 us.
//!
//! Dropped: stream-k. 512 rows are 224 blocks, 1.7 for each of 132 processors, which take as long as 2.
//! Stream-k runs whole rounds of blocks, then equal shares of the rest; the last cube of a block adds its
//! parts in order. It leaves no processor idle and should take 148 us. It took 176 us in a run in which one
//! block a cube took 170 us; gated 334 and 333 us.
//!
//! Dropped: split-k of the last blocks in `Fused`, whose 448 blocks are 3.4 a processor and take as long as
//! 4. Only the blocks past the third round were split along k, and a second launch added the sums. That took
//! 185 us instead of 203 us, but gated 361 us instead of 348 us.

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
    load_fragments, load_words, next_stage, shared_address, store_words, typed, wait_copies,
};

/// Tile sizes of the path through shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SharedConfig {
    /// Grid of planes of a cube, each with 64 rows and 64 columns.
    pub planes_m: u32,
    pub planes_n: u32,
    /// Stages of x in the ring, each 32 of k.
    pub stages: u32,
    /// Number of split-k parts; each part has its own cubes.
    pub parts: u32,
}

/// Size of a tile along k, and of a unit's 16 bytes of codes, which span two tiles.
const TILE: u32 = 32;
const STEP: u32 = 64;
/// Rows and columns of a plane.
const SIDE: u32 = 64;
/// Pieces of a plane's columns, each 16 rows of the weight.
const PIECES: u32 = SIDE / 16;
/// Bytes of a piece's codes in a step.
const CODES_BYTES: u32 = 512;
/// Bytes of the two right fragments of a piece in 16 of k.
const FRAGMENT_BYTES: u32 = 512;
/// Number of fragments along a plane's rows, and along its columns.
const FRAGS_M: usize = 4;
const FRAGS_N: usize = 8;

impl SharedConfig {
    pub(super) const fn planes(self) -> u32 {
        self.planes_m * self.planes_n
    }

    pub(super) const fn tile_m(self) -> u32 {
        SIDE * self.planes_m
    }

    pub(super) const fn tile_n(self) -> u32 {
        SIDE * self.planes_n
    }
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SharedPlan {
    /// Config with one part, so that instances of different parts differ only in `partial`.
    pub(super) config: SharedConfig,
    pub(super) weight: QuantizedPlan,
    pub(super) bf16: bool,
    /// True if every tile of x is full, so that no edge is checked.
    pub(super) exact: bool,
    /// True if the first 32 of a plane's columns gate the others.
    pub(super) glu: bool,
    /// True if sums go to the workspace.
    pub(super) partial: bool,
}

impl SharedPlan {
    const fn units(self) -> u32 {
        32 * self.config.planes()
    }

    const fn copies(self) -> CopyPlan {
        CopyPlan {
            shape: TileShape::new(self.config.tile_m(), TILE, false, 2),
            width: 8,
            units: self.units() as usize,
            exact: self.exact,
        }
    }

    /// Pieces that a plane decodes.
    const fn pieces(self) -> usize {
        (PIECES / self.config.planes_m) as usize
    }

    const fn x_bytes(self) -> u32 {
        self.config.tile_m() * TILE * 2
    }

    /// Bytes of the right fragments of a tile.
    const fn right_bytes(self) -> u32 {
        self.config.planes_n * PIECES * 2 * FRAGMENT_BYTES
    }

    /// Steps in the ring of codes. The codes of step i + 1 are copied with tile 2·i of x.
    const fn code_stages(self) -> u32 {
        1 + self.config.stages / 2
    }

    /// Offset of absmax in a step of codes; their scales and offsets follow.
    const fn absmax_at(self) -> u32 {
        self.config.planes_n * PIECES * CODES_BYTES
    }

    const fn scales_at(self) -> u32 {
        self.absmax_at() + self.config.planes_n * PIECES * 64
    }

    const fn code_bytes(self) -> u32 {
        self.scales_at() + if self.weight.nested { self.config.planes_n * PIECES * 128 } else { 0 }
    }

    pub(super) const fn shared_bytes(self) -> u32 {
        let x = self.config.stages * self.x_bytes();
        NESTED_BYTES + x + 2 * self.right_bytes() + self.code_stages() * self.code_bytes()
    }
}

/// Source addresses of a unit's copies, for the next tile and step.
#[derive(CubeType)]
struct Feed {
    lane: CopyLane,
    /// Address of the unit's first vector of x.
    x: u64,
    /// Bytes between rows of x.
    line: u64,
    rows_left: u32,
    /// Addresses of the unit's 16 bytes of codes in each of the plane's pieces.
    codes: Array<u64>,
    absmax: AbsmaxFeed,
    /// Next step.
    step: u32,
    /// Remaining tiles and steps.
    tiles: u32,
    steps: u32,
}

#[cube]
pub(crate) fn shared<F: Float, NX: Size, NW: Size, NO: Size>(
    x: &[Vector<F, NX>],
    weight: &QuantizedValues<NW>,
    out: &mut [Vector<F, NO>],
    partials: &mut [f32],
    finish: &Finish<F, F, NO>,
    dims: &Dims,
    #[comptime] plan: SharedPlan,
) {
    let (config, stages) = comptime!((plan.config, plan.config.stages));
    let mut shared = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
        comptime!((plan.shared_bytes() / 16) as usize),
        128usize,
    );
    let nested_codebook = shared_address(&mut shared);
    let ring = nested_codebook + NESTED_BYTES;
    let rights = ring + comptime!(stages * plan.x_bytes());
    let codes_ring = rights + comptime!(2 * plan.right_bytes());
    let codes_end = codes_ring + comptime!(plan.code_stages() * plan.code_bytes());

    let (lane, plane) = (UNIT_POS_X, UNIT_POS_Y);
    let unit = plane * 32 + lane;
    let (rows, cols) = (dims.m.div_ceil(config.tile_m()), dims.n.div_ceil(config.tile_n()));
    let (block_m, block_n) = block_of(rows, cols, CUBE_POS_X);
    let (part_m, part_n) = (plane / config.planes_n, plane % config.planes_n);
    let row = block_m * config.tile_m();

    let mut feed = Feed::new(x, weight, dims, row, block_n, plane, lane, plan);
    let steps = feed.steps;
    let (mut x_to, mut codes_to) = (u32::cast_from(ring), u32::cast_from(codes_ring));
    #[unroll]
    for tile in 0..comptime!(stages - 1) {
        feed.x(x_to, plan);
        x_to = next_stage(x_to, ring, rights, plan.x_bytes());
        #[unroll]
        for _ in 0..comptime!(if tile == 0 { 2u32 } else { 1 - tile % 2 }) {
            feed.codes(codes_to, plane, lane, plan);
            codes_to = next_stage(codes_to, codes_ring, codes_end, plan.code_bytes());
        }
        commit_copies();
    }
    let nested = first_nested(weight, unit);
    let codebook = HalfCodebook::new(&weight.codebook, plan.bf16);
    fill_nested(weight, nested, nested_codebook, unit, comptime!(plan.units()));

    let def = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let size!(NF) = def.vector_size(MatrixIdent::A);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    let mut acc = Sequence::<Array<Vector<f32, NC>>>::new(); // [FRAGS_M, FRAGS_N]
    #[unroll]
    for _ in 0..comptime!(FRAGS_M * FRAGS_N) {
        let mut sums = Array::<Vector<f32, NC>>::new(2usize);
        sums[0] = Vector::new(0.0f32);
        sums[1] = Vector::new(0.0f32);
        acc.push(sums);
    }
    // Register sets of the current 16 of k and of the next: [2, 4] each, with two right fragments in one.
    let mut left = Sequence::<Array<u32>>::new();
    let mut right = Sequence::<Array<u32>>::new();
    #[unroll]
    for _ in 0..8usize {
        left.push(Array::<u32>::new(4usize));
        right.push(Array::<u32>::new(4usize));
    }
    let mut words = Array::<u32>::new(comptime!(4 * plan.pieces()));
    let mut scales = Array::<u32>::new(comptime!(2 * plan.pieces()));
    // Fragments of the tile after the next, which wait for a free stage.
    let mut decoded = Array::<u32>::new(comptime!(8 * plan.pieces()));

    let own_left = lhs_lane(part_m * SIDE, lane, plan.copies().shape);
    let own_right = rights + part_n * comptime!(PIECES * 2 * FRAGMENT_BYTES) + lane * 16;
    let pieces = comptime!(plan.pieces() as u32);
    let put = rights + plane * comptime!(pieces * 2 * FRAGMENT_BYTES) + lane * 16;

    wait_copies(comptime!(stages - 2));
    sync_cube();
    let (mut read, mut codes_read) = (u32::cast_from(ring), u32::cast_from(codes_ring));
    load_codes(&mut words, &mut scales, codes_read, nested_codebook, 0u32, plane, lane, plan);
    #[unroll]
    for half in 0..2usize {
        #[unroll]
        for quad in 0..comptime!(2 * plan.pieces()) {
            decode(&words, &scales, &codebook, &mut decoded, half, quad, plan);
        }
        if comptime!(half == 0) {
            store(&decoded, put, half, plan);
        }
    }
    codes_read = next_stage(codes_read, codes_ring, codes_end, plan.code_bytes());
    load_codes(&mut words, &mut scales, codes_read, nested_codebook, 1u32, plane, lane, plan);
    sync_cube();
    load_left::<F>(read, own_left, &mut left, 0usize, plan);
    load_right(own_right, &mut right, 0usize, 0usize, plan);

    for step in 0..steps {
        #[unroll]
        for half in 0..2usize {
            // Stores the fragments decoded during the previous tile. If they were decoded now, the barrier
            // and the loads behind it would wait for the decoding.
            store(&decoded, put, 1 - half, plan);
            load_left::<F>(read, own_left, &mut left, 1usize, plan);
            load_right(own_right, &mut right, half, 1usize, plan);
            // Copy into stages that every plane has read.
            feed.x(x_to, plan);
            x_to = next_stage(x_to, ring, rights, plan.x_bytes());
            if comptime!(half as u32 != stages % 2) {
                feed.codes(codes_to, plane, lane, plan);
                codes_to = next_stage(codes_to, codes_ring, codes_end, plan.code_bytes());
            }
            commit_copies();
            multiply::<F, NF, NC>(&def, &left, &right, &mut acc, 0usize);
            // The current tile is in registers; the next one has arrived and is decoded.
            wait_copies(comptime!(stages - 2));
            sync_cube();
            read = next_stage(read, ring, rights, plan.x_bytes());
            load_left::<F>(read, own_left, &mut left, 0usize, plan);
            load_right(own_right, &mut right, 1 - half, 0usize, plan);
            #[unroll]
            for quad in 0..comptime!(2 * plan.pieces()) {
                decode(&words, &scales, &codebook, &mut decoded, half, quad, plan);
            }
            if comptime!(half == 1) {
                // Past the last step this reads leftovers of an earlier one, which are never multiplied.
                codes_read = next_stage(codes_read, codes_ring, codes_end, plan.code_bytes());
                let (words, scales) = (&mut words, &mut scales);
                load_codes(words, scales, codes_read, nested_codebook, step + 2, plane, lane, plan);
            }
            multiply::<F, NF, NC>(&def, &left, &right, &mut acc, 1usize);
        }
    }

    // With a gated pair, a plane has half as many columns of each matrix.
    let wide = comptime!(if plan.glu { SIDE / 2 } else { SIDE });
    let col = (block_n * config.planes_n + part_n) * wide;
    let stored = comptime!(RowPlan { pairs: FRAGS_N, glu: plan.glu, partial: plan.partial });
    #[unroll]
    for i in 0..comptime!(2 * FRAGS_M) {
        let row = row + part_m * SIDE + comptime!(8 * i as u32) + lane / 4;
        if comptime!(plan.exact) || row < dims.m {
            let mut pairs = Array::<Vector<f32, NC>>::new(FRAGS_N);
            #[unroll]
            for j in 0..FRAGS_N {
                pairs[j] = acc.index(comptime!(i / 2 * FRAGS_N + j))[comptime!(i % 2)];
            }
            store_row(out, partials, finish, &pairs, row, col, lane, dims, stored);
        }
    }
}

#[cube]
impl Feed {
    #[expect(clippy::too_many_arguments, reason = "operands and one place")]
    fn new<F: Float, NX: Size, NW: Size>(
        x: &[Vector<F, NX>],
        weight: &QuantizedValues<NW>,
        dims: &Dims,
        row: u32,
        block_n: u32,
        plane: u32,
        lane: u32,
        #[comptime] plan: SharedPlan,
    ) -> Feed {
        let (copies, pieces) = comptime!((plan.copies(), plan.pieces() as u32));
        let first = CUBE_POS_Y * dims.part_steps;
        let line = u64::cast_from(dims.k) * 2;
        let copy_lane = CopyLane::new(plane * 32 + lane, copies);
        let corner = global_address(x)
            + u64::cast_from(row) * line
            + u64::cast_from(first * comptime!(STEP * 2));
        let span = u64::cast_from(dims.k / STEP) * comptime!(CODES_BYTES as u64);
        let own = global_address(&weight.codes)
            + u64::cast_from(first) * comptime!(CODES_BYTES as u64)
            + u64::cast_from(lane * 16);
        let mut codes = Array::<u64>::new(comptime!(pieces as usize));
        #[unroll]
        for piece in 0..pieces {
            let at = piece_of(dims, block_n, plane * pieces + piece, plan);
            codes[comptime!(piece as usize)] = own + u64::cast_from(at) * span;
        }
        let piece = piece_of(dims, block_n, plane * pieces + lane / 16 % pieces, plan);
        let steps = min(dims.k / STEP - first, dims.part_steps);
        Feed {
            x: corner + copy_lane.start(line, copies),
            lane: copy_lane,
            line,
            rows_left: dims.m - row,
            codes,
            absmax: AbsmaxFeed::new(weight, piece, lane, dims.k, plan.weight),
            step: first,
            tiles: 2 * steps,
            steps,
        }
    }

    /// Issues the copies of a tile of x to the stage at `to`, if a tile is left.
    fn x(&mut self, to: u32, #[comptime] plan: SharedPlan) {
        if self.tiles > 0 {
            self.lane.copy(self.x, self.line, to, self.rows_left, TILE, plan.copies());
            self.x += comptime!(u64::from(TILE * 2));
            self.tiles -= 1;
        }
    }

    /// Issues the copies of a plane's codes and absmax of a step to the stage at `to`, if a step is left.
    fn codes(&mut self, to: u32, plane: u32, lane: u32, #[comptime] plan: SharedPlan) {
        let pieces = comptime!(plan.pieces() as u32);
        let four = comptime!(CopyPlan::words(4));
        let left = self.steps > 0;
        if left {
            let mine = to + plane * comptime!(pieces * CODES_BYTES) + lane * 16;
            #[unroll]
            for piece in 0..pieces {
                let i = comptime!(piece as usize);
                copy_vector(self.codes[i], mine, comptime!(piece * CODES_BYTES), true, four);
                self.codes[i] += comptime!(u64::from(CODES_BYTES));
            }
        }
        if left && lane < comptime!(16 * pieces) {
            let own = (plane * comptime!(16 * pieces) + lane) * 4;
            let (place, far) = (to + own, comptime!([plan.absmax_at(), plan.scales_at()]));
            self.absmax.copy(self.step, place, place + own, far, plan.weight);
        }
        if left {
            self.step += 1;
            self.steps -= 1;
        }
    }
}

/// Returns the index of the 16 rows of the weight that form piece `piece` of a cube. Columns past the end
/// repeat the last ones and are never stored.
#[cube]
fn piece_of(dims: &Dims, block_n: u32, piece: u32, #[comptime] plan: SharedPlan) -> u32 {
    let planes_n = comptime!(plan.config.planes_n);
    if comptime!(plan.glu) {
        let tiles = dims.n / 32;
        let plane = block_n * planes_n + piece / PIECES;
        let at = min(plane * comptime!(PIECES / 2) + piece % comptime!(PIECES / 2), tiles - 1);
        at + piece % PIECES / comptime!(PIECES / 2) * tiles
    } else {
        min(block_n * comptime!(planes_n * PIECES) + piece, dims.n / 16 - 1)
    }
}

/// Loads a plane's codes of a step, four words a piece, and the absmax of the unit's two columns of each
/// piece, twice in a word of halves.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one step of one plane")]
fn load_codes(
    words: &mut Array<u32>,
    scales: &mut Array<u32>,
    read: u32,
    nested_codebook: u32,
    step: u32,
    plane: u32,
    lane: u32,
    #[comptime] plan: SharedPlan,
) {
    let pieces = comptime!(plan.pieces() as u32);
    let mine = read + plane * comptime!(pieces * CODES_BYTES) + lane * 16;
    #[unroll]
    for piece in 0..comptime!(plan.pieces()) {
        let four = load_words(mine, comptime!(piece as u32 * CODES_BYTES));
        #[unroll]
        for i in 0..4usize {
            words[comptime!(4 * piece + i)] = four.extract(i);
        }
        #[unroll]
        for j in 0..2usize {
            let place = (plane * pieces + comptime!(piece as u32)) * 16
                + lane / 4 * 2
                + comptime!(j as u32);
            let at = read + comptime!(plan.absmax_at()) + place * 4;
            let far = read + comptime!(plan.scales_at()) + place * 8;
            scales[comptime!(2 * piece + j)] =
                load_absmax(at, far, nested_codebook, step, plan.weight.nested, plan.bf16);
        }
    }
}

/// Decodes quad `quad` of a plane's part of a tile, the first or second tile of a step. A quad is 16 of k of
/// a piece: two right fragments.
#[cube]
fn decode(
    words: &Array<u32>,
    scales: &Array<u32>,
    codebook: &HalfCodebook,
    decoded: &mut Array<u32>,
    #[comptime] half: usize,
    #[comptime] quad: usize,
    #[comptime] plan: SharedPlan,
) {
    let (piece, k) = comptime!((quad / 2, quad % 2));
    #[unroll]
    for j in 0..2usize {
        let word = words[comptime!(4 * piece + 2 * j + half)];
        let scale = scales[comptime!(2 * piece + j)];
        let (first, second) = decode_pairs(word, scale, codebook, k, plan.bf16);
        decoded[comptime!(4 * quad + 2 * j)] = first;
        decoded[comptime!(4 * quad + 2 * j + 1)] = second;
    }
}

/// Stores a plane's part of a tile to stage `half`. `to` is the unit's address in stage 0.
#[cube]
fn store(decoded: &Array<u32>, to: u32, #[comptime] half: usize, #[comptime] plan: SharedPlan) {
    #[unroll]
    for quad in 0..comptime!(2 * plan.pieces()) {
        let mut four = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for i in 0..4usize {
            four.insert(i, decoded[comptime!(4 * quad + i)]);
        }
        let far = comptime!(half as u32 * plan.right_bytes() + quad as u32 * FRAGMENT_BYTES);
        store_words(to + far, four);
    }
}

/// Multiplies the fragments of register set `set`.
#[cube]
fn multiply<F: Float, NF: Size, NC: Size>(
    def: &MmaDefinition<F, F, f32>,
    left: &Sequence<Array<u32>>,
    right: &Sequence<Array<u32>>,
    acc: &mut Sequence<Array<Vector<f32, NC>>>,
    #[comptime] set: usize,
) {
    #[unroll]
    for i in 0..FRAGS_M {
        let rows = left.index(comptime!(4 * set + i));
        let rows = typed::<F, NF>(rows, 0usize, 4usize);
        // Alternating directions over the columns let neighbouring multiplies share a register.
        #[unroll]
        for x in 0..FRAGS_N {
            let j = comptime!(if i % 2 == 1 { FRAGS_N - 1 - x } else { x });
            let pair = right.index(comptime!(4 * set + j / 2));
            let columns = typed::<F, NF>(pair, comptime!(j % 2 * 2), 2usize);
            let sums = acc.index_mut(comptime!(FRAGS_N * i + j));
            def.execute_inplace(&rows, &columns, sums);
        }
    }
}

/// Loads the left fragments of 16 of k of the tile at `read` into the register set of the same index.
#[cube]
fn load_left<F: Float>(
    read: u32,
    own: u32,
    left: &mut Sequence<Array<u32>>,
    #[comptime] k: usize,
    #[comptime] plan: SharedPlan,
) {
    let shape = comptime!(plan.copies().shape);
    let (twist, _) = comptime!(shape.step(0, 16 * k as u32));
    let at = read + (own ^ twist);
    #[unroll]
    for i in 0..FRAGS_M {
        let far = comptime!(16 * i as u32 * shape.row_bytes());
        load_fragments::<F>(at, left.index_mut(comptime!(4 * k + i)), far, shape, false);
    }
}

/// Loads the right fragments of 16 of k of stage `half`, as [`load_left`].
#[cube]
fn load_right(
    own: u32,
    right: &mut Sequence<Array<u32>>,
    #[comptime] half: usize,
    #[comptime] k: usize,
    #[comptime] plan: SharedPlan,
) {
    #[unroll]
    for piece in 0..4usize {
        let quad = comptime!((2 * piece + k) as u32);
        let far = comptime!(half as u32 * plan.right_bytes() + quad * FRAGMENT_BYTES);
        let words = load_words(own, far);
        let into = right.index_mut(comptime!(4 * k + piece));
        #[unroll]
        for i in 0..4usize {
            into[i] = words.extract(i);
        }
    }
}
