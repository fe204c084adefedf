//! C = epilogue(A·Bᵀ · scb[n] / 127)    A: `[m, k]` in halves   B: `[n, k]` in i8
//!
//! With activation rounding A is also i8, rounded from x `[m, k]`:
//!
//! C = epilogue(scale[m] · (A·Bᵀ) · scb[n] / 127 + Σ over outlier columns o of x[m, o] · B[n, o] · scb[n] / 127)
//!
//! Int8 as the right operand of the `mma.sync` loop ([`crate::matmul::mma`]), whose copies and tiles count
//! two bytes as an element.
//!
//! *Codes as halves*: of the 16 codes of a row `ldmatrix` gives a unit four neighbours; of 16 halves it gives
//! two pairs that are eight apart. The order of k does not matter as long as A and B agree. Units therefore
//! read four neighbours of A as well, half a chunk at a time. Eight instructions in bf16, seven in f16, turn
//! four codes into two words of halves, once for all rows of a plane's part.
//!
//! *Both in bytes*: fragments of 16 x 32 bytes have the layout of fragments of 16 x 16 halves, so that only
//! the instruction differs. Accumulators are i32, exact up to k = 133 000, and become f32 at the end of an
//! item.
//!
//! Cost: `2·m·n·k` operations. By NVIDIA's figures bytes run at twice the rate of halves (four times the rate
//! of halves with f32 accumulators on GeForce). 4096 x 14336 x 4096 takes 680 us on an H200, and 1090 us in
//! bf16. An outlier column costs one multiply-add per result.
//!
//! Source: Dettmers et al., "LLM.int8()" (2022).

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use tune::{Infeasible, Kernel, Queue};

use super::problem::Int8MatmulProblem;
use crate::elem::elem;
use crate::fits::{lacks, shape, stores};
use crate::launch::launch;
use crate::matmul::mma::{
    CopyFeed, F32Accumulators, I32Accumulators, Item, Maps, MmaPlan, RightOperand,
    RightOperandExpand, check_source, multiply,
};
use crate::matmul::{
    Dims, EpilogueBuffers, Finish, FinishLaunch, Matmul, MatmulConfig, MatmulProblem, MmaConfig,
    Path, split_k, spread,
};
use crate::tile::{CopyPlan, TileShape};

/// Form in which codes reach the instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum OperandForm {
    /// Codes of the right operand become halves, in bf16 or f16.
    Halves { bf16: bool },
    /// Both operands are bytes. Outlier columns may be excluded from them.
    Bytes { outliers: bool },
}

/// An 8-bit weight as the right operand.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Int8Operand<F: Float> {
    /// `[n]`
    scb: Box<[f32]>,
    /// Present if A was rounded.
    rounded: ComptimeOption<Rounded<F>>,
    #[cube(comptime)]
    form: OperandForm,
}

/// A left operand that was rounded to i8.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Rounded<F: Float> {
    /// `[m]`
    scales: Box<[f32]>,
    /// Number of outlier columns, and their indices.
    outliers: Box<[u32]>,
    /// `[m, k]`
    x: Box<[F]>,
    /// Words of B.
    words: Box<[u32]>,
}

/// Device buffers of one matmul.
pub(super) struct BytesOperands<'a> {
    /// Halves or i8 `[m, k]`.
    pub(super) lhs: Handle,
    /// Present if `lhs` is i8.
    pub(super) rounded: Option<RoundedOperands<'a>>,
    /// i8 `[n, k]`.
    pub(super) codes: &'a Handle,
    pub(super) scb: &'a Handle,
    pub(super) out: &'a Handle,
    pub(super) epilogue: &'a EpilogueBuffers,
    /// Workspace for the partial sums of split-k.
    pub(super) partials: Option<&'a Handle>,
}

/// Device buffers of [`Rounded`].
pub(super) struct RoundedOperands<'a> {
    pub(super) scales: Handle,
    pub(super) outliers: Handle,
    pub(super) x: &'a Handle,
}

/// Shared tiles of halves and of codes; two codes count as an element.
const fn tiles(c: MmaConfig) -> [TileShape; 2] {
    [
        TileShape { halved: true, ..TileShape::new(c.tile_m, c.tile_k, false, 2) },
        TileShape::new(c.tile_n, c.tile_k / 2, false, 2),
    ]
}

/// Returns candidate configs for codes as halves.
pub(super) fn candidates_of_halves(arch: &ArchProfile, p: &Int8MatmulProblem) -> Vec<MmaConfig> {
    if p.weight.k % CHUNK != 0 || p.dtype.size() != 2 {
        return Vec::new();
    }
    spread(arch, &p.dense(), &HALVES, |c| check_halves(arch, p, c).is_ok())
}

/// Configs for codes as halves. A tile of codes takes half the space of a tile of halves.
const HALVES: [MmaConfig; 10] = [
    MmaConfig::new([128, 256, 64], [2, 4], 3),
    MmaConfig::new([256, 128, 64], [4, 2], 2),
    MmaConfig::new([128, 128, 64], [2, 4], 4),
    MmaConfig::new([128, 128, 64], [2, 2], 4),
    MmaConfig::new([64, 128, 64], [2, 2], 4),
    MmaConfig::new([64, 128, 128], [2, 4], 3),
    MmaConfig::new([32, 128, 128], [1, 4], 4),
    MmaConfig::new([32, 64, 128], [1, 4], 5),
    MmaConfig::new([16, 128, 128], [1, 4], 4),
    MmaConfig::new([16, 64, 256], [1, 4], 4),
];

/// Checks a config for codes as halves.
pub(super) fn check_halves(
    arch: &ArchProfile,
    p: &Int8MatmulProblem,
    c: &MmaConfig,
) -> Result<(), Infeasible> {
    stores(arch, [DType::I8])?;
    if p.dtype.size() != 2 {
        return Err(lacks("f16 or bf16 x for 16-bit fragments"));
    }
    if p.weight.k % CHUNK != 0 {
        return Err(shape(
            "k",
            p.weight.k,
            "expected rows of quantised values in multiples of 16 bytes",
        ));
    }
    if c.tile_k % 64 != 0 {
        return Err(shape(
            "tile_k",
            c.tile_k,
            "expected a multiple of 64, because k steps of 32 alternate between two register sets",
        ));
    }
    check_source(arch, &p.dense(), c, tiles(*c))
}

/// Returns candidate configs for matmuls of bytes.
pub(super) fn candidates_of_bytes(arch: &ArchProfile, p: &Int8MatmulProblem) -> Vec<MmaConfig> {
    if p.activations.is_none() || p.weight.k % CHUNK != 0 {
        return Vec::new();
    }
    let mma = |config| match config {
        // This tile spills 16 bytes with split-k (sm_120).
        MatmulConfig::Mma(c) if (c.tile_m, c.tile_n) != (16, 32) => Some(c),
        _ => None,
    };
    Matmul::candidates(arch, &p.pairs()).into_iter().filter_map(mma).collect()
}

/// Checks a config for matmuls of bytes.
pub(super) fn check_bytes(
    arch: &ArchProfile,
    p: &Int8MatmulProblem,
    c: &MmaConfig,
) -> Result<(), Infeasible> {
    if p.activations.is_none() {
        return Err(lacks("x rounded to int8, which this matmul does not request"));
    }
    stores(arch, [DType::I8])?;
    if p.dtype.size() != 2 {
        return Err(lacks("f16 or bf16 results for int8 fragments"));
    }
    if p.weight.k % CHUNK != 0 {
        return Err(shape(
            "k",
            p.weight.k,
            "expected rows of quantised values in multiples of 16 bytes",
        ));
    }
    if p.weight.k > MAX_K {
        return Err(shape(
            "k",
            p.weight.k,
            "longer dot products would overflow the i32 accumulators",
        ));
    }
    Matmul::check(arch, &p.pairs(), &MatmulConfig::Mma(*c))
}

/// Bytes of one asynchronous copy.
const CHUNK: u32 = 16;
/// Maximum k for which the sum of products of codes stays below 2^31.
const MAX_K: u32 = (1 << 31) / (127 * 127);

/// Returns the plan of a matmul in which the right operand, or both, count two bytes as an element.
fn plan(arch: &ArchProfile, p: &MatmulProblem, c: MmaConfig, form: OperandForm) -> MmaPlan {
    let plan = c.plan(arch, p);
    let [lhs, rhs] = tiles(c);
    match form {
        OperandForm::Halves { .. } => MmaPlan {
            // Copies that check edges are faster, for an unknown reason. 8 rows of 14336 x 4096 take 21.0 us
            // on an H200 with checks, and 27.4 us without checks on the codes. 16 rows take 21.3 and 24.9 us.
            lhs: CopyPlan { shape: lhs, exact: false, ..plan.lhs },
            rhs: CopyPlan { shape: rhs, exact: false, ..plan.rhs },
            packing: 2,
            ..plan
        },
        OperandForm::Bytes { .. } => plan,
    }
}

pub(super) fn launch(
    queue: &Queue,
    p: &MatmulProblem,
    c: MmaConfig,
    form: OperandForm,
    operands: &BytesOperands<'_>,
) {
    let arch = queue.profile();
    let (plan, grid) = (plan(arch, p, c, form), c.grid(arch, p));
    let [lhs_len, _, out_len] = p.extents();
    let (m, n, row) = (p.m as usize, p.n as usize, p.rhs.stride as usize); // pairs of codes in a row
    let [width_lhs, width_rhs, width_out, width_partials] = grid.widths;
    // A kernel without partial sums binds another buffer in their place and never writes it.
    let (partials, partials_len) = match operands.partials {
        Some(partials) if c.parts > 1 => (partials, out_len * c.parts as usize),
        _ => (operands.out, 2),
    };
    let epilogue = operands.epilogue;
    let finish = match c.parts {
        1 => FinishLaunch::from_buffers(p.epilogue, epilogue, p.bias_len(), out_len / width_out),
        _ => FinishLaunch::nothing(),
    };
    let slices = p.batch_slices(arch);
    let [slice] = &slices[..] else { unreachable!("one batch is one launch") };
    // SAFETY: the extents follow from the problem, whose elements are two bytes; the kernel checks all edges
    // that `plan.exact` does not rule out.
    unsafe {
        let rounded = operands.rounded.as_ref().map(|rounded| {
            let outliers =
                if form == (OperandForm::Bytes { outliers: true }) { 2 * row + 1 } else { 1 };
            RoundedLaunch::new(
                BufferArg::from_raw_parts(rounded.scales.clone(), m),
                BufferArg::from_raw_parts(rounded.outliers.clone(), outliers),
                BufferArg::from_raw_parts(rounded.x.clone(), m * 2 * row),
                BufferArg::from_raw_parts(operands.codes.clone(), n * row / 2),
            )
        });
        launch!(
            queue,
            multiply_codes,
            grid.cubes(arch, p, slice.count, c.parts),
            grid.cube_dim(),
            grid.address(p),
            width_lhs,
            width_rhs,
            width_out,
            width_partials,
            BufferArg::from_raw_parts(operands.lhs.clone(), lhs_len / width_lhs),
            BufferArg::from_raw_parts(operands.codes.clone(), n * row / width_rhs),
            BufferArg::from_raw_parts(operands.out.clone(), out_len / width_out),
            BufferArg::from_raw_parts(partials.clone(), partials_len / width_partials),
            finish,
            Int8OperandLaunch::new(
                BufferArg::from_raw_parts(operands.scb.clone(), n),
                ComptimeOptionArgs::from(rounded),
                form,
            ),
            slice.dims(p, c.parts, grid.part_tiles, None),
            plan,
            elem(p.out),
        );
    }
    if let (Some(partials), true) = (operands.partials, c.parts > 1) {
        split_k::add(queue, p, partials, c.parts, false, operands.out, epilogue);
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "operands, results, what they are")]
fn multiply_codes<F: Float, NL: Size, NR: Size, NO: Size, NP: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<F, NO>],
    partials: &mut [Vector<f32, NP>],
    finish: Finish<F, F, NO>,
    source: Int8Operand<F>,
    dims: &Dims,
    #[comptime] plan: MmaPlan,
    #[define(F)] _dtype: ElemType,
) {
    let maps = ComptimeOption::<Maps>::new_None();
    if comptime!(matches!(source.form, OperandForm::Halves { .. })) {
        multiply::<
            F,
            F,
            F,
            F32Accumulators,
            Int8Operand<F>,
            ComptimeOption<Maps>,
            CopyFeed,
            NL,
            NR,
            NO,
            NP,
        >(lhs, rhs, out, partials, &maps, &finish, &source, dims, plan);
    } else {
        multiply::<
            F,
            F,
            F,
            I32Accumulators,
            Int8Operand<F>,
            ComptimeOption<Maps>,
            CopyFeed,
            NL,
            NR,
            NO,
            NP,
        >(lhs, rhs, out, partials, &maps, &finish, &source, dims, plan);
    }
}

#[cube]
impl<F: Float> RightOperand<F32Accumulators> for Int8Operand<F> {
    fn decode(
        &self,
        words: &Sequence<Array<u32>>,
        into: &mut Array<u32>,
        #[comptime] set: usize,
        #[comptime] step: usize,
        #[comptime] plan: MmaPlan,
    ) {
        let frags_n = comptime!(plan.config.plane_tile().1 as usize / 16);
        #[unroll]
        for j in 0..comptime!(2 * frags_n) {
            let pair = words.index(comptime!(set * frags_n + j / 2));
            let word = pair[comptime!(j % 2 * 2 + step % 2)];
            decode(word, into, comptime!(2 * j), self.form);
        }
    }

    fn scale(
        &self,
        acc: &mut F32Accumulators,
        _item: &Item,
        _row: u32,
        col: u32,
        lane: u32,
        dims: &Dims,
        #[comptime] plan: MmaPlan,
    ) {
        let (wm, wn) = comptime!(plan.config.plane_tile());
        let (rows, cols) = comptime!((wm as usize / 8, wn as usize / 4));
        let (_own_cols, units) = self.columns(col, lane, dims, cols);
        #[unroll]
        for i in 0..rows {
            #[unroll]
            for j in 0..comptime!(cols / 2) {
                let mut pair = Vector::<f32, Const<2>>::new(0.0f32);
                pair.insert(0usize, units[comptime!(2 * j)]);
                pair.insert(1usize, units[comptime!(2 * j + 1)]);
                let sums = acc.fragments.index_mut(comptime!(i / 2 * (cols / 2) + j));
                sums[comptime!(i % 2)] *= pair;
            }
        }
    }
}

#[cube]
impl<F: Float> RightOperand<I32Accumulators> for Int8Operand<F> {
    fn decode(
        &self,
        _words: &Sequence<Array<u32>>,
        _into: &mut Array<u32>,
        #[comptime] _set: usize,
        #[comptime] _step: usize,
        #[comptime] _plan: MmaPlan,
    ) {
    }

    /// Only the first part of split-k adds the outlier columns.
    fn scale(
        &self,
        acc: &mut I32Accumulators,
        item: &Item,
        row: u32,
        col: u32,
        lane: u32,
        dims: &Dims,
        #[comptime] plan: MmaPlan,
    ) {
        let first = item.part == 0;
        let (wm, wn) = comptime!(plan.config.plane_tile());
        let (rows, cols) = comptime!((wm as usize / 8, wn as usize / 4));
        let (own_cols, units) = self.columns(col, lane, dims, cols);
        #[comptime]
        match &self.rounded {
            ComptimeOption::Some(rounded) => {
                let mut own_rows = Array::<u32>::new(rows);
                let mut scales = Array::<f32>::new(rows);
                #[unroll]
                for i in 0..rows {
                    own_rows[i] = min(row + comptime!(8 * i as u32) + lane / 4, dims.m - 1);
                    scales[i] = rounded.scales[own_rows[i] as usize];
                }
                #[unroll]
                for i in 0..rows {
                    #[unroll]
                    for j in 0..cols {
                        let sums = acc.fragments.index_mut(comptime!(i / 2 * (cols / 2) + j / 2));
                        let at = comptime!(i % 2 * 2 + j % 2);
                        let sum = f32::cast_from(i32::reinterpret(sums[at]));
                        sums[at] = u32::reinterpret(sum * scales[i] * units[j]);
                    }
                }
                if comptime!(self.form == OperandForm::Bytes { outliers: true }) {
                    add_outliers::<F>(
                        rounded, acc, &own_rows, &own_cols, &units, first, dims, rows, cols,
                    );
                }
            }
            ComptimeOption::None => {}
        }
    }
}

#[cube]
impl<F: Float> Int8Operand<F> {
    /// Returns this unit's columns of a plane's part, and their scales. Columns past the edge repeat the last
    /// one and are never stored.
    fn columns(
        &self,
        col: u32,
        lane: u32,
        dims: &Dims,
        #[comptime] cols: usize,
    ) -> (Array<u32>, Array<f32>) {
        let mut own_cols = Array::<u32>::new(cols);
        let mut units = Array::<f32>::new(cols);
        #[unroll]
        for j in 0..cols {
            let near = comptime!((8 * (j / 2) + j % 2) as u32);
            own_cols[j] = min(col + near + lane % 4 * 2, dims.n - 1);
            units[j] = self.scb[own_cols[j] as usize] * comptime!(1.0f32 / 127.0);
        }
        (own_cols, units)
    }
}

/// Adds the products of the outlier columns if this is the `first` part of split-k.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one matrix, one place, one edge")]
fn add_outliers<F: Float>(
    rounded: &Rounded<F>,
    acc: &mut I32Accumulators,
    own_rows: &Array<u32>,
    own_cols: &Array<u32>,
    units: &Array<f32>,
    first: bool,
    dims: &Dims,
    #[comptime] rows: usize,
    #[comptime] cols: usize,
) {
    let count = select(first, rounded.outliers[0], 0u32);
    let k = dims.k as usize * 2;
    for o in 0..count {
        let column = rounded.outliers[o as usize + 1] as usize;
        let mut left = Array::<f32>::new(rows);
        #[unroll]
        for i in 0..rows {
            left[i] = f32::cast_from(rounded.x[own_rows[i] as usize * k + column]);
        }
        #[unroll]
        for j in 0..cols {
            let at = own_cols[j] as usize * k + column;
            let byte = rounded.words[at / 4] << ((3 - at % 4) as u32 * 8);
            let right = f32::cast_from(i32::reinterpret(byte) >> 24) * units[j];
            #[unroll]
            for i in 0..rows {
                let sums = acc.fragments.index_mut(comptime!(i / 2 * (cols / 2) + j / 2));
                let at = comptime!(i % 2 * 2 + j % 2);
                sums[at] = u32::reinterpret(fma(left[i], right, f32::reinterpret(sums[at])));
            }
        }
    }
}

/// Decodes four codes into two words of halves, at `to` and `to + 1`.
#[cube]
fn decode(word: u32, into: &mut Array<u32>, #[comptime] to: usize, #[comptime] form: OperandForm) {
    #[unroll]
    for half in 0..2usize {
        // Selects a code byte and then byte 4, the constant high byte, for each half.
        let bytes = comptime!(if half == 0 { "0x4140" } else { "0x4342" });
        into[comptime!(to + half)] = match form {
            OperandForm::Halves { bf16: true } => bf16_of(word, bytes),
            _ => f16_of(word ^ 0x8080_8080u32, bytes),
        };
    }
}

/// Decodes two codes to bf16. The lower seven bits of a code `b` are the mantissa of 128 + (b mod 128). Its
/// sign bit is the lowest exponent bit, which makes 128 or 256. The code is the difference of both numbers.
#[cube]
fn bf16_of(word: u32, #[comptime] bytes: &'static str) -> u32 {
    let pair: u32;
    gpu_asm!(
        "{{ .reg .b32 p, low, sign, one; prmt.b32 p, {word}, 0x43434343, {bytes}; and.b32 low, p, 0xff7fff7f; lop3.b32 sign, p, 0xff80ff80, 0x80008000, 0x6a; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 {pair}, low, one, sign; }}",
        pair = out(_) pair,
        word = in(_) u32::cast_from(word),
        options(pure, nomem)
    );
    pair
}

/// Decodes two codes with offset 128 to f16: the mantissas of 1024 + 128 + code.
#[cube]
fn f16_of(word: u32, #[comptime] bytes: &'static str) -> u32 {
    let pair: u32;
    gpu_asm!(
        "{{ .reg .b32 p, far; prmt.b32 p, {word}, 0x64646464, {bytes}; mov.b32 far, 0xe480e480; add.f16x2 {pair}, p, far; }}",
        pair = out(_) pair,
        word = in(_) u32::cast_from(word),
        options(pure, nomem)
    );
    pair
}
