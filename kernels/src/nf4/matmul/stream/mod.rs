//! The CUDA path for few rows: weights stream through registers into `mma.sync`, and x stays in registers.
//!
//! | loop                                        | level                                         |
//! |---------------------------------------------|-----------------------------------------------|
//! | tiles of 16 rows of the weight              | cubes, one per processor                      |
//! | 256 of k each                               | planes; their part of x in registers for all tiles |
//! | 64 of k: one 16-byte load of codes a unit   | four steps of the instruction                 |
//! | two codes: one lookup in shared memory      | a register of the left fragment               |
//!
//! The left operand is 16 rows of the weight, the right operand eight rows of x. With a weight in tiles, a
//! byte of codes decodes to a pair, which is one register of the instruction. Sums over 64 of k are scaled by
//! the absmax of their rows in f32. A weight is therefore rounded once, as its codebook value, and absmax is
//! not rounded.
//!
//! One lookup decodes two codes. The table has 256 pairs, and a copy for every unit of a plane, so that no
//! two units share a bank. Its entries are 256 bytes apart, so that one instruction computes the address of
//! byte i of a word (`prmt` puts byte i above the unit's offset).
//!
//! Cost: the codes and absmax once, for m = 1 and m = 8. For a weight of 14336 x 4096 that takes 7.0 us at
//! the copy bandwidth of an H200. One lookup per byte takes 4.1 us of shared memory time in parallel.
//!
//! Ladder in us at m = 1 / 8 (H200 limited to the features of an RTX 4090, CUDA C++ prototypes; bitsandbytes
//! 0.50.2 in the same run 33.5 / 70.6):
//!
//! | version                                                                   | 14336 x 4096 | 4096 x 4096 |
//! |---------------------------------------------------------------------------|--------------|-------------|
//! | v1 codes in bitsandbytes' order: eight rows a load, 32 bytes of each       | 17.5 / 17.9  | 7.6 / 7.9   |
//! | v2 codes in tiles: a load is 512 contiguous bytes                          | 13.4 / 13.8  | 6.0 / 6.3   |
//! | v3 v2, table addressed by `prmt` instead of shift, mask and or             | 12.7 / 13.3  | 5.9 / 6.1   |
//! | v4 v3, one barrier for two tiles                                           | 11.5 / 12.2  | 5.7 / 6.1   |
//! | v5 v4 in this kernel, pairs in the order of the instruction                | 11.6 / 11.8  | 5.5 / 6.0   |
//!
//! v1 was bound by the cache's tags: eight lines a load. Two chains of sums (v4: 11.7) and two cubes of eight
//! planes (14.7, with an addition of parts) are slower. v5 gives up direct 16-byte loads of x (11.3 / 12.2),
//! because [`super::fused`] needs this order for `ldmatrix`. x therefore passes through shared memory once,
//! before the table is written. Shuffles instead cost 1.2 us more.
//!
//! A norm of x ([`NormWeight`]) costs a plane 16 instructions for the squares of eight rows, and one for two
//! elements. The product of x and the norm weight is rounded to bf16 before the row's factor is applied.

mod stage;

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

use super::Dims;
use super::tensor_core::{NESTED_BYTES, fill_nested, first_nested, permute, unnest};
use crate::matmul::{Columns, Finish, NormWeight};
use crate::nf4::{QuantizedPlan, QuantizedValues};
use crate::rows::NormKind;
use crate::tile::{
    global_address, load_pair, load_shared, pack_pair, shared_address, store_shared, store_word,
    typed,
};
use stage::Stage;

/// Launch shape of the streaming path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StreamConfig {
    /// Planes of a cube, each with 256 of k.
    pub planes: u32,
    /// Number of split-k parts; each part has its own cubes.
    pub parts: u32,
}

/// Steps of 64 of k that a plane processes.
const SPANS: usize = 4;
/// Bytes of the table of pairs: 256 bytes a pair. The units of a plane use 128 of them.
const TABLE_BYTES: u32 = 256 * 256;
/// Bytes of one f32 for each of 16 rows.
const SQUARES_BYTES: u32 = 4 * 16;

impl StreamConfig {
    pub(super) const fn units(self) -> u32 {
        32 * self.planes
    }

    /// Size of k that all parts cover.
    pub(super) const fn reach(self) -> u32 {
        256 * self.planes * self.parts
    }
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct StreamPlan {
    /// Config with one part, so that instances of different parts differ only in `partial`.
    pub(super) config: StreamConfig,
    pub(super) weight: QuantizedPlan,
    /// Groups of eight rows of x.
    pub(super) eights: usize,
    pub(super) bf16: bool,
    /// True if tiles come in pairs, one of each matrix of a gated pair.
    pub(super) glu: bool,
    /// True if sums go to the workspace.
    pub(super) partial: bool,
    /// Norm of the rows of x; None with split-k.
    pub(super) norm: Option<NormKind>,
}

impl StreamPlan {
    /// Tiles between barriers.
    const fn tiles(self) -> usize {
        if self.eights == 1 || self.glu { 2 } else { 1 }
    }

    /// Sets of sums: with two, one is added up while the planes write the other. One set if there is no space
    /// for two.
    const fn sets(self) -> u32 {
        if self.eights > 1 && self.glu { 1 } else { 2 }
    }

    /// Bytes of a plane's sums of one tile.
    const fn sums_bytes(self) -> u32 {
        512 * self.eights as u32
    }

    /// Bytes of one set of sums: all planes and tiles between two barriers.
    const fn set_bytes(self) -> u32 {
        self.sums_bytes() * self.config.planes * self.tiles() as u32
    }

    /// Bytes of the squares of 16 rows, for every plane, and of the rows' factors.
    const fn squares_bytes(self) -> u32 {
        if self.norm.is_some() { SQUARES_BYTES * (self.config.planes + 1) } else { 0 }
    }

    pub(super) const fn shared_bytes(self) -> u32 {
        TABLE_BYTES + NESTED_BYTES + self.sets() * self.set_bytes() + self.squares_bytes()
    }
}

/// Registers of a unit for the next tile.
#[derive(CubeType)]
struct Prefetched {
    /// Four words for each step.
    codes: Array<u32>,
    /// absmax of rows `lane / 4` and `lane / 4 + 8`, one a step: four bytes in a word, or four f32.
    absmax: Array<u32>,
    /// Scale and offset of both rows, if absmax is nested.
    scales: Array<f32>,
}

/// Addresses of a plane's part of the tiles.
#[derive(CubeType)]
struct PlaneAddresses {
    /// Addresses in tile 0.
    codes: u64,
    absmax: u64,
    scales: u64,
    /// Bytes from one tile to the next.
    codes_step: u64,
    absmax_step: u64,
    /// Index of the plane's 256 of k, and their total number.
    quad: u32,
    quads: u32,
    /// First of the unit's two rows.
    row: u32,
}

#[cube]
#[expect(clippy::too_many_arguments, reason = "operands, and what is done to them")]
pub(crate) fn stream<F: Float, NX: Size, NW: Size, NO: Size>(
    x: &[Vector<F, NX>],
    weight: &QuantizedValues<NW>,
    out: &mut [Vector<F, NO>],
    partials: &mut [f32],
    finish: &Finish<F, F, NO>,
    norm: &ComptimeOption<NormWeight<F, NX>>,
    dims: &Dims,
    #[comptime] plan: StreamPlan,
) {
    let planes = comptime!(plan.config.planes);
    let (eights, at_once) = comptime!((plan.eights, plan.tiles()));
    let mut shared = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
        comptime!((plan.shared_bytes() / 16) as usize),
        128usize,
    );
    let table = shared_address(&mut shared);
    let nested_codebook = table + TABLE_BYTES;
    let sums = nested_codebook + NESTED_BYTES;
    let factors = sums + comptime!(plan.sets() * plan.set_bytes());
    let squares = factors + SQUARES_BYTES;

    let (lane, plane) = (UNIT_POS_X, UNIT_POS_Y);
    let unit = plane * 32 + lane;
    let mut cubes = CUBE_COUNT_X;
    let mut part = 0u32.runtime();
    let mut first = CUBE_POS_X;
    if comptime!(plan.partial) {
        cubes = CUBE_COUNT_X / dims.parts;
        part = CUBE_POS_X / cubes;
        first = CUBE_POS_X % cubes;
    }
    let tiles = dims.n / comptime!(if plan.glu { 32u32 } else { 16u32 });
    let quads = dims.k / 256;
    let own = part * planes + plane;
    let addresses = addresses_of(weight, own, quads, lane, plan);

    let mut prefetched = Prefetched {
        codes: Array::new(comptime!(4 * SPANS)),
        absmax: Array::new(comptime!(if plan.weight.nested { 2 } else { 2 * SPANS })),
        scales: Array::new(4usize),
    };
    load_scales(&mut prefetched, &addresses, first, plan);
    #[unroll]
    for span in 0..SPANS {
        load_codes(&mut prefetched, &addresses, first, span);
    }
    let codebook = weight.codebook[(lane % 16) as usize];
    let nested = first_nested(weight, unit);
    let stage = Stage { table, sums, plane, lane };
    stage.copy(x, dims, own, quads, 0usize);
    let mut norm_weights = Vector::<u32, Const<4>>::new(0u32);
    #[comptime]
    match norm {
        ComptimeOption::Some(norm) => {
            // Past the end of k x is zero, so that any weight will do.
            let from = u64::cast_from(min(own, quads - 1) * 512 + lane * 16);
            norm_weights = stream_words(norm.address() + from, 0u32);
        }
        ComptimeOption::None => {}
    }
    fill_table(codebook, table, lane, plane, plan);
    fill_nested(weight, nested, nested_codebook, unit, comptime!(plan.config.units()));
    // Right fragments of a plane's 256 of k: `[eights, spans, steps, 2]` words.
    let mut fixed = Array::<u32>::new(comptime!(eights * SPANS * 8));
    stage.load::<F>(&mut fixed, 0usize);
    if comptime!(eights == 2) {
        stage.copy(x, dims, own, quads, 1usize);
        stage.load::<F>(&mut fixed, 1usize);
    }
    let def = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let size!(NF) = def.vector_size(MatrixIdent::A);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    if comptime!(plan.norm.is_some()) {
        stage.apply_norm_weight::<F, NF, NC>(&mut fixed, norm_weights, squares, &def, plan);
    }
    sync_cube();
    #[comptime]
    match norm {
        ComptimeOption::Some(norm) => {
            if unit < comptime!(8 * eights as u32) {
                // Two independent chains of additions.
                let mut even = 0.0f32.runtime();
                let mut odd = 0.0f32.runtime();
                #[unroll]
                for p in 0..planes {
                    let square = load_shared(squares + unit * 4, comptime!(p * SQUARES_BYTES));
                    if comptime!(p % 2 == 0) {
                        even += square;
                    } else {
                        odd += square;
                    }
                }
                // Units read it after the next barrier.
                store_shared(factors + unit * 4, norm.factor(even + odd), 0u32);
            }
        }
        ComptimeOption::None => {}
    }
    let mut tile = first;
    let mut set = 0u32.runtime();
    while tile < tiles {
        #[unroll]
        for i in 0..at_once {
            // Tiles of a gated pair are `tiles` apart.
            let (now, next) = if comptime!(plan.glu) {
                let after = select(tile + cubes < tiles, tile + cubes, tile);
                let up = tile + tiles;
                if comptime!(i == 0) { (tile, up) } else { (up, after) }
            } else {
                let now = tile + comptime!(i as u32) * cubes;
                (now, select(now + cubes < tiles, now + cubes, now))
            };
            if comptime!(plan.glu) || now < tiles {
                let scales = decode_scales(&prefetched, nested_codebook, plan);
                load_scales(&mut prefetched, &addresses, next, plan);
                let mut acc = Array::<f32>::new(comptime!(4 * eights));
                #[unroll]
                for e in 0..comptime!(4 * eights) {
                    acc[e] = 0.0f32;
                }
                #[unroll]
                for span in 0..SPANS {
                    let left = decode_codes(&prefetched, table, lane, span);
                    load_codes(&mut prefetched, &addresses, next, span);
                    #[unroll]
                    for eight in 0..eights {
                        let mut sum = Array::<Vector<f32, NC>>::new(2usize);
                        sum[0] = Vector::new(0.0f32);
                        sum[1] = Vector::new(0.0f32);
                        #[unroll]
                        for step in 0..4usize {
                            let from = comptime!(((eight * SPANS + span) * 4 + step) * 2);
                            let right = typed::<F, NF>(&fixed, from, 2usize);
                            let left = typed::<F, NF>(&left, comptime!(4 * step), 4usize);
                            def.execute_inplace(&left, &right, &mut sum);
                        }
                        #[unroll]
                        for half in 0..2usize {
                            let scale = scales[comptime!(half * SPANS + span)];
                            #[unroll]
                            for e in 0..2usize {
                                let at = comptime!(4 * eight + 2 * half + e);
                                acc[at] = fma(sum[half].extract(e), scale, acc[at]);
                            }
                        }
                    }
                }
                let to = sums
                    + set
                    + plane * comptime!(plan.sums_bytes())
                    + comptime!(i as u32 * plan.sums_bytes() * planes);
                store_sums(&acc, to, lane, dims.m, plan);
            }
        }
        sync_cube();
        add_sums(out, partials, finish, sums + set, factors, tile, cubes, part, unit, dims, plan);
        if comptime!(plan.sets() == 1) {
            sync_cube();
        } else {
            set ^= comptime!(plan.set_bytes());
        }
        tile += comptime!(if plan.glu { 1 } else { at_once as u32 }) * cubes;
    }
}

/// Adds the sums of all planes for the tiles between two barriers, and stores the results.
#[cube]
#[expect(clippy::too_many_arguments, reason = "sums, results and their places")]
fn add_sums<F: Float, NO: Size>(
    out: &mut [Vector<F, NO>],
    partials: &mut [f32],
    finish: &Finish<F, F, NO>,
    sums: u32,
    factors: u32,
    tile: u32,
    cubes: u32,
    part: u32,
    unit: u32,
    dims: &Dims,
    #[comptime] plan: StreamPlan,
) {
    let columns = Columns { first: 0usize.runtime(), count: dims.n };
    let tiles = comptime!(plan.tiles() as u32);
    let count = comptime!(128 * plan.eights as u32);
    // With a gated pair a unit adds both sums, except with split-k.
    let both = comptime!(plan.glu && !plan.partial);
    let width = dims.n / comptime!(if plan.glu { 2u32 } else { 1u32 });
    let ids = comptime!(if both { count } else { tiles * count });
    #[unroll]
    for pass in 0..comptime!(ids.div_ceil(plan.config.units())) {
        let id = unit + comptime!(pass * plan.config.units());
        let (which, row, col) = (id / count, id % 16, id % count / 16);
        // The second matrix of a gated pair begins at column `width`.
        let step = if comptime!(plan.glu) { width } else { cubes * 16 };
        let n = tile * 16 + which * step + row;
        let inside = if comptime!(plan.glu) { true.runtime() } else { n < dims.n };
        if id < ids && col < dims.m && inside {
            let place = sums + place_of_sum(row, col);
            let far = comptime!(plan.sums_bytes() * plan.config.planes);
            let mut sum = sum_of_planes(place + which * far, plan);
            let mut factor = 1.0f32.runtime();
            if comptime!(plan.norm.is_some()) {
                factor = load_shared(factors + col * 4, 0u32);
                sum *= factor;
            }
            if comptime!(plan.partial) {
                let line = (part * dims.m + col) as usize * dims.n as usize;
                partials[line + n as usize] = sum;
            } else {
                let at = col as usize * width as usize + n as usize;
                let value = if comptime!(both) {
                    let mut up = sum_of_planes(place + far, plan);
                    if comptime!(plan.norm.is_some()) {
                        up *= factor;
                    }
                    finish.one_of_two((sum, up), at, (n, width + n), &columns)
                } else {
                    finish.one(sum, at, n, &columns)
                };
                out[at] = Vector::new(F::cast_from(value));
            }
        }
    }
}

/// Adds the sums of all planes at `from`.
#[cube]
fn sum_of_planes(from: u32, #[comptime] plan: StreamPlan) -> f32 {
    let mut sum = 0.0f32.runtime();
    #[unroll]
    for p in 0..comptime!(plan.config.planes) {
        sum += load_shared(from, comptime!(p * plan.sums_bytes()));
    }
    sum
}

/// Returns the byte offset in a plane's sums for a row of the weight and a row of x. Pairs of columns are
/// rows of 32 words. Each is rotated by eight, so that the units of a plane write to all banks at once.
#[cube]
fn place_of_sum(row: u32, col: u32) -> u32 {
    (col / 2 * 32 + (col % 2 * 16 + row + col / 2 * 8) % 32) * 4
}

#[cube]
fn store_sums(acc: &Array<f32>, to: u32, lane: u32, m: u32, #[comptime] plan: StreamPlan) {
    #[unroll]
    for eight in 0..comptime!(plan.eights) {
        #[unroll]
        for e in 0..2usize {
            let col = lane % 4 * 2 + comptime!((8 * eight + e) as u32);
            if col < m {
                #[unroll]
                for half in 0..2usize {
                    let row = lane / 4 + comptime!(8 * half as u32);
                    let value = acc[comptime!(4 * eight + 2 * half + e)];
                    store_shared(to + place_of_sum(row, col), value, 0u32);
                }
            }
        }
    }
}

#[cube]
fn addresses_of<NW: Size>(
    weight: &QuantizedValues<NW>,
    own: u32,
    quads: u32,
    lane: u32,
    #[comptime] plan: StreamPlan,
) -> PlaneAddresses {
    let quad = min(own, quads - 1);
    // Bytes of absmax per unit and tile: two rows, four steps.
    let unit_bytes = comptime!(if plan.weight.nested { 8u32 } else { 32u32 });
    let absmax_bytes = comptime!(8 * unit_bytes);
    let place = u64::cast_from(quad * absmax_bytes + lane / 4 * unit_bytes);
    PlaneAddresses {
        codes: global_address(&weight.codes) + u64::cast_from(quad * 2048 + lane * 16),
        absmax: global_address(&weight.absmax) + place,
        scales: global_address(&weight.scales),
        codes_step: u64::cast_from(quads) * 2048,
        absmax_step: u64::cast_from(quads * absmax_bytes),
        quad,
        quads,
        row: lane / 4,
    }
}

/// Issues the load of the codes of one step.
#[cube]
fn load_codes(
    prefetched: &mut Prefetched,
    addresses: &PlaneAddresses,
    tile: u32,
    #[comptime] span: usize,
) {
    let from = addresses.codes + u64::cast_from(tile) * addresses.codes_step;
    let words = stream_words(from, comptime!(512 * span as u32));
    #[unroll]
    for i in 0..4usize {
        prefetched.codes[comptime!(4 * span + i)] = words.extract(i);
    }
}

/// Issues the loads of absmax and, if nested, of its scales.
#[cube]
fn load_scales(
    prefetched: &mut Prefetched,
    addresses: &PlaneAddresses,
    tile: u32,
    #[comptime] plan: StreamPlan,
) {
    let from = addresses.absmax + u64::cast_from(tile) * addresses.absmax_step;
    if comptime!(plan.weight.nested) {
        let pair = load_two_words(from);
        prefetched.absmax[0] = pair.extract(0usize);
        prefetched.absmax[1] = pair.extract(1usize);
        #[unroll]
        for half in 0..2usize {
            let row = tile * 16 + addresses.row + comptime!(8 * half as u32);
            // A quad has 256 elements; a group has 256 blocks.
            let group =
                (row * addresses.quads + addresses.quad) / comptime!(plan.weight.block_size);
            let pair = load_pair(addresses.scales + u64::cast_from(group * 8));
            prefetched.scales[comptime!(2 * half)] = pair.extract(0usize);
            prefetched.scales[comptime!(2 * half + 1)] = pair.extract(1usize);
        }
    } else {
        #[unroll]
        for half in 0..2usize {
            let words = stream_words(from, comptime!(16 * half as u32));
            #[unroll]
            for i in 0..SPANS {
                prefetched.absmax[comptime!(SPANS * half + i)] = words.extract(i);
            }
        }
    }
}

/// Returns the absmax of both rows, one a step.
#[cube]
fn decode_scales(
    prefetched: &Prefetched,
    nested_codebook: u32,
    #[comptime] plan: StreamPlan,
) -> Array<f32> {
    let mut scales = Array::<f32>::new(comptime!(2 * SPANS));
    #[unroll]
    for half in 0..2usize {
        #[unroll]
        for span in 0..SPANS {
            let at = comptime!(half * SPANS + span);
            if comptime!(plan.weight.nested) {
                let byte = (prefetched.absmax[half] >> comptime!(8 * span as u32)) & 255;
                let scale = prefetched.scales[comptime!(2 * half)];
                scales[at] = unnest(
                    nested_codebook,
                    byte,
                    scale,
                    prefetched.scales[comptime!(2 * half + 1)],
                );
            } else {
                scales[at] = f32::reinterpret(prefetched.absmax[at]);
            }
        }
    }
    scales
}

/// Decodes the left fragments of one step of 64. Row `lane / 4` is at even positions of a pair, the row eight
/// below at odd ones.
#[cube]
fn decode_codes(
    prefetched: &Prefetched,
    table: u32,
    lane: u32,
    #[comptime] span: usize,
) -> Array<u32> {
    let mut left = Array::<u32>::new(16usize);
    #[unroll]
    for half in 0..2usize {
        #[unroll]
        for byte in 0..8usize {
            let word = prefetched.codes[comptime!(4 * span + 2 * half + byte / 4)];
            // Puts byte `byte` above the unit's offset.
            let selector = comptime!(0x5504 | (byte as u32 % 4) << 4);
            let place = permute(word, lane * 4, selector.runtime());
            // Byte 2j is the first pair of step j, byte 2j + 1 the second.
            let to = comptime!(byte / 2 * 4 + byte % 2 * 2 + half);
            left[to] = lookup(table + place);
        }
    }
    left
}

/// Loads the word at shared address `at` of the table, which is read-only by then.
#[cube]
fn lookup(at: u32) -> u32 {
    let word: u32;
    gpu_asm!(
        "ld.shared.b32 {word}, [{at}];",
        word = out(_) word,
        at = in(_) u32::cast_from(at),
        options(explicit_mem, reads_address_space shared)
    );
    word
}

/// Loads 16 bytes at global address `from + far`, which are read only once.
#[cube]
fn stream_words(from: u64, #[comptime] far: u32) -> Vector<u32, Const<4>> {
    let words: Vector<u32, Const<4>>;
    gpu_asm!(
        "ld.global.nc.L1::no_allocate.v4.u32 {words}, [{from}+{far}];",
        words = out(_) words,
        from = in(_) u64::cast_from(from),
        options(explicit_mem, reads_address_space global)
    );
    words
}

#[cube]
fn load_two_words(from: u64) -> Vector<u32, Const<2>> {
    let words: Vector<u32, Const<2>>;
    gpu_asm!(
        "ld.global.nc.v2.u32 {words}, [{from}];",
        words = out(_) words,
        from = in(_) u64::cast_from(from),
        options(explicit_mem, reads_address_space global)
    );
    words
}

/// Writes the pairs of the codebook for every unit of a plane. Unit i passes codebook value i % 16.
#[cube]
fn fill_table(codebook: f32, table: u32, lane: u32, plane: u32, #[comptime] plan: StreamPlan) {
    let size!(NP) = 2usize;
    let planes = comptime!(plan.config.planes);
    #[unroll]
    for i in 0..comptime!(256u32.div_ceil(planes)) {
        let byte = plane + comptime!(i * planes);
        let mut pair = Vector::<f32, NP>::new(0.0f32);
        pair.insert(0usize, plane_shuffle(codebook, byte / 16 % 16));
        pair.insert(1usize, plane_shuffle(codebook, byte % 16));
        if comptime!(256 % planes == 0) || byte < 256 {
            store_word(table + byte * 256 + lane * 4, pack_pair(pair, plan.bf16));
        }
    }
}
