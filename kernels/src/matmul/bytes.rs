//! C = epilogue(A·Bᵀ · scb[n] / 127)    A: `[m, k]` in halves   B: `[n, k]` in bytes with signs
//!
//! C = epilogue(scale[m] · (A·Bᵀ) · scb[n] / 127 + Σ over outlying columns o of x[m, o] · B[n, o] · scb[n] / 127)
//! A, too, in bytes; x: `[m, k]`, what A was rounded from
//!
//! Both with the loop, copies and tiles of [`super::mma`], where two bytes pass for an element.
//!
//! *Codes as halves*: what `ldmatrix` brings a unit of 16 codes of a row are four neighbours, where of 16 halves it
//! brings two pairs eight apart. A product does not ask in which order k comes, if only A and B agree, and so units
//! read four neighbours of A as well, half a chunk at a time. Four codes become two words of halves by eight
//! instructions in bf16, seven in f16, once for all rows of a plane's part.
//!
//! *Both in bytes*: fragments of 16 x 32 bytes lie as those of 16 x 16 halves do, so that only the instruction is
//! another. Sums are i32, exact up to k = 133 000, and become f32 when an item is done.
//!
//! Cost: `2·m·n·k` operations; those of bytes by NVIDIA's figures at twice the rate of halves (four times that of halves
//! with f32 sums on GeForce): 4096 x 14336 x 4096 takes 680 us of an H200, and 1090 in bf16. An outlying column costs a
//! multiply-add a result.
//!
//! Source: Dettmers et al., "LLM.int8()" (2022).

use std::sync::Arc;

use arch::{ArchProfile, Device};
use cubecl::ir::{DeviceProperties, ElemType, TargetProperties};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::bulk::Bulk;
use super::config::Plan;
use super::dims::Dims;
use super::epilogue::{EpilogueBuffers, FinishCompilationArg, FinishLaunch};
use super::mma::{self, Codes, MmaPlan};
use super::parts;
use super::{Epilogue, Finish, MatmulConfig, MatmulProblem, MmaConfig, Path};
use crate::elem::elem;
use crate::tile::{CopyPlan, TileShape, offset_in_tile};

/// What sums of codes are worth.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Worth<F: Float> {
    /// `[n]`
    pub(crate) scb: Box<[f32]>,
    /// Where A was rounded.
    pub(crate) rounded: ComptimeOption<Rounded<F>>,
}

/// How A was rounded.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Rounded<F: Float> {
    /// `[m]`
    pub(crate) scales: Box<[f32]>,
    /// How many columns were left out, and which.
    pub(crate) outliers: Box<[u32]>,
    /// `[m, k]`
    pub(crate) x: Box<[F]>,
    /// Words of B.
    pub(crate) words: Box<[u32]>,
}

/// Device buffers of one product.
pub(crate) struct BytesOperands<'a> {
    /// Halves or bytes `[m, k]`.
    pub(crate) lhs: Handle,
    /// Where those are bytes.
    pub(crate) rounded: Option<RoundedOperands<'a>>,
    /// Bytes `[n, k]`.
    pub(crate) codes: &'a Handle,
    pub(crate) scb: &'a Handle,
    pub(crate) out: &'a Handle,
    pub(crate) epilogue: &'a EpilogueBuffers,
    /// Room for the sums of several parts.
    pub(crate) partials: Option<&'a Handle>,
}

/// Device buffers of [`Rounded`].
pub(crate) struct RoundedOperands<'a> {
    pub(crate) scales: Handle,
    pub(crate) outliers: Handle,
    pub(crate) x: &'a Handle,
}

/// The tile of the left operand beside codes that become halves.
pub(crate) const fn halves_tile(c: MmaConfig) -> TileShape {
    TileShape { halved: true, ..TileShape::new(c.tile_m, c.tile_k, false, 2) }
}

/// The tile of codes beside it, two in an element.
pub(crate) const fn codes_tile(c: MmaConfig) -> TileShape {
    TileShape::new(c.tile_n, c.tile_k / 2, false, 2)
}

/// The plan of a product whose right operand, or both, count two bytes as an element.
fn plan(arch: &ArchProfile, p: &MatmulProblem, c: MmaConfig, codes: Codes) -> (Plan, MmaPlan) {
    let plan = Plan::new(arch, p, &MatmulConfig::Mma(c));
    let Path::Mma(mma) = plan.path else { unreachable!("the path is the config's") };
    let mma = MmaPlan { codes, ..mma };
    let mma = match codes {
        Codes::Right { .. } => MmaPlan {
            // Copies that look for edges are faster, for a reason not found: 8 rows of 14336 x 4096 take 21.0 us of an H200
            // with them, 27.4 where those of codes did not; 16 rows 21.3 and 24.9.
            lhs: CopyPlan { shape: halves_tile(c), exact: false, ..mma.lhs },
            rhs: CopyPlan { shape: codes_tile(c), exact: false, ..mma.rhs },
            ..mma
        },
        Codes::Neither | Codes::Both { .. } => mma,
    };
    (plan, mma)
}

/// Epilogue of the product's own launch.
fn own(p: &MatmulProblem, parts: u32) -> Epilogue {
    if parts == 1 { p.epilogue } else { Epilogue::default() }
}

pub(crate) fn programs(
    arch: &ArchProfile,
    p: &MatmulProblem,
    c: MmaConfig,
    codes: Codes,
    properties: &Arc<DeviceProperties>,
    target: &Arc<TargetProperties>,
) -> Vec<Box<dyn CubeKernel>> {
    let (plan, mma) = plan(arch, p, c, codes);
    let address = plan.address(p);
    let settings = KernelSettings::new(plan.cube_dim().into(), ExecutionMode::Unchecked, address);
    let buffer = || BufferCompilationArg { inplace: None };
    let [width_lhs, width_rhs, width_out, width_partials] = plan.widths;
    let rounded = match codes {
        Codes::Both { .. } => ComptimeOptionCompilationArg::Some(RoundedCompilationArg {
            scales: buffer(),
            outliers: buffer(),
            x: buffer(),
            words: buffer(),
        }),
        Codes::Neither | Codes::Right { .. } => ComptimeOptionCompilationArg::None,
    };
    let mut all: Vec<Box<dyn CubeKernel>> = vec![Box::new(multiply_codes::MultiplyCodes::new(
        settings,
        properties.clone(),
        target.clone(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        FinishCompilationArg::of(own(p, c.parts)),
        WorthCompilationArg { scb: buffer(), rounded },
        Dims::compiled(false),
        width_lhs,
        width_rhs,
        width_out,
        width_partials,
        mma,
        elem(p.out),
    ))];
    if c.parts > 1 {
        all.push(parts::program(p, c.parts, false, properties, target));
    }
    all
}

pub(crate) fn launch(
    device: &Device,
    p: &MatmulProblem,
    c: MmaConfig,
    codes: Codes,
    operands: &BytesOperands<'_>,
) {
    let (plan, mma) = plan(device.profile(), p, c, codes);
    let [lhs_len, _, out_len] = p.extents();
    let (m, n, row) = (p.m as usize, p.n as usize, p.rhs.stride as usize); // a row's pairs of codes
    let [width_lhs, width_rhs, width_out, width_partials] = plan.widths;
    // A kernel without partial sums still binds a buffer in their place, and never writes it.
    let (partials, partials_len) = match operands.partials {
        Some(partials) if c.parts > 1 => (partials, out_len * c.parts as usize),
        _ => (operands.out, 2),
    };
    let epilogue = operands.epilogue;
    let finish = match c.parts {
        1 => FinishLaunch::of(p.epilogue, epilogue, p.bias_len(), out_len / width_out),
        _ => FinishLaunch::nothing(),
    };
    let slices = p.batch_slices(device.profile());
    let [slice] = &slices[..] else { unreachable!("one batch is one launch") };
    // SAFETY: the extents are the problem's, whose elements are two bytes; the kernel checks the edges that
    // `plan.exact` does not rule out.
    unsafe {
        let rounded = operands.rounded.as_ref().map(|rounded| {
            let outlying = codes == Codes::Both { outlying: true };
            let outliers = if outlying { 2 * row + 1 } else { 1 };
            RoundedLaunch::new(
                BufferArg::from_raw_parts(rounded.scales.clone(), m),
                BufferArg::from_raw_parts(rounded.outliers.clone(), outliers),
                BufferArg::from_raw_parts(rounded.x.clone(), m * 2 * row),
                BufferArg::from_raw_parts(operands.codes.clone(), n * row / 2),
            )
        });
        multiply_codes::launch_unchecked(
            device.client(),
            plan.cubes(p, slice.count, c.parts),
            plan.cube_dim(),
            plan.address(p),
            width_lhs,
            width_rhs,
            width_out,
            width_partials,
            BufferArg::from_raw_parts(operands.lhs.clone(), lhs_len / width_lhs),
            BufferArg::from_raw_parts(operands.codes.clone(), n * row / width_rhs),
            BufferArg::from_raw_parts(operands.out.clone(), out_len / width_out),
            BufferArg::from_raw_parts(partials.clone(), partials_len / width_partials),
            finish,
            WorthLaunch::new(
                BufferArg::from_raw_parts(operands.scb.clone(), n),
                ComptimeOptionArgs::from(rounded),
            ),
            slice.dims(p, c.parts, plan.part_tiles, None),
            mma,
            elem(p.out),
        );
    }
    if let (Some(partials), true) = (operands.partials, c.parts > 1) {
        parts::add(device, p, partials, c.parts, false, operands.out, epilogue);
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "operands, results, what they are")]
fn multiply_codes<F: Float, NL: Size, NR: Size, NO: Size, NP: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<F, NO>],
    partials: &mut [Vector<f32, NP>],
    finish: Finish<F, F, NO>,
    worth: Worth<F>,
    dims: &Dims,
    #[comptime] plan: MmaPlan,
    #[define(F)] _dtype: ElemType,
) {
    let worth = ComptimeOption::<Worth<F>>::new_Some(worth);
    let bulk = ComptimeOption::<Bulk>::new_None();
    mma::multiply::<F, F, F, NL, NR, NO, NP>(
        lhs, rhs, out, partials, bulk, &finish, &worth, dims, plan,
    );
}

/// Where a unit's half chunks lie, from the tile's start: four neighbours along k, of row `row + lane / 4`. Rows a
/// multiple of eight further on are at constant distances, chunks an even number further on an XOR away.
#[cube]
pub(super) fn half_chunk_lane(row: u32, lane: u32, #[comptime] shape: TileShape) -> u32 {
    offset_in_tile(row + lane / 4, lane % 4 * 4, shape)
}

/// The registers of a 16 x 16 left fragment, in the order of k that codes have: those of the rows at `at + far`, `at`
/// being the stage plus [`half_chunk_lane`], and of the ones eight below.
#[cube]
pub(super) fn load_half_chunks(
    at: u32,
    into: &mut Array<u32>,
    #[comptime] far: u32,
    #[comptime] shape: TileShape,
) {
    #[unroll]
    for half in 0..2usize {
        let far = comptime!(far + 8 * half as u32 * shape.row_bytes());
        let words: Vector<u32, Const<2>>;
        gpu_asm!(
            "ld.shared.v2.b32 {words}, [{at}+{far}];",
            words = out(_) words,
            at = in(_) at,
            options(explicit_mem, reads_address_space shared)
        );
        into[half] = words.extract(0usize);
        into[comptime!(half + 2)] = words.extract(1usize);
    }
}

/// Four codes as two words of halves, at `to` and after it.
#[cube]
pub(super) fn decode(
    word: u32,
    into: &mut Array<u32>,
    #[comptime] to: usize,
    #[comptime] codes: Codes,
) {
    #[unroll]
    for half in 0..2usize {
        // A byte, and the fifth, which is the same in all: what stands above it.
        let bytes = comptime!(if half == 0 { "0x4140" } else { "0x4342" });
        into[comptime!(to + half)] = match codes {
            Codes::Right { bf16: true } => bf16_of(word, bytes),
            _ => f16_of(word ^ 0x8080_8080u32, bytes),
        };
    }
}

/// Two codes in bf16. Of a code `b` its lower seven bits are the mantissa of 128 + (b mod 128), its sign the lowest bit of
/// the exponent of 128 or 256; the code is their difference.
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

/// Two codes that count from 0 on in f16: mantissas of 1024 + 128 + code.
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
