//! y = residual + gate · activation(x · wᵀ + bias)    x: `[m, k]`   w: `[n, k]` in 4 bits   y: `[m, n]`
//!
//! With a gated pair of matrices `[G; U]` in the rows of w:
//!
//! y = residual + gate · activation(x · Gᵀ + bias) · (x · Uᵀ + bias)    y: `[m, n / 2]`
//!
//! [`Nf4MatmulConfig`] chooses one of six paths:
//!
//! | path       | decodes                          | multiplies with    | used for                       |
//! |------------|----------------------------------|--------------------|--------------------------------|
//! | `Stream`   | in registers, by pairs           | `mma.sync`         | CUDA, m up to 16, weight in tiles |
//! | `Fused`    | in registers, by eights          | `mma.sync`         | CUDA, weight in tiles          |
//! | `Shared`   | into shared memory, by eights    | `mma.sync`         | CUDA, weight in tiles, hundreds of rows |
//! | `Subgroup` | into shared memory, by 32        | plane-scope matrices | Vulkan, weight in rows       |
//! | `Gemv`     | in registers, one by one; on a CPU a byte ([`pairs`]) | multiply-add | any device      |
//! | `Dense`    | into memory, by [`Nf4Dequantize`] | any path of [`Matmul`] | many rows                  |
//!
//! Cost: `2·m·n·k` flop; codes, absmax, x and y once. `Dense` also writes and reads a dense weight, 4 bytes
//! an element; at 4096 rows this takes a thirtieth of the time of the matmul.
//!
//! Gating: Shazeer, "GLU Variants Improve Transformer" (2020). G and U are one weight
//! ([`join`](super::join)), so that one launch reads x once and stores nothing in between.
//!
//! A norm can be applied to the rows of x ([`Nf4MatmulProblem::norm`]), by `Gemv`, and by `Stream` without
//! split-k.
//!
//! [`Nf4Dequantize`]: super::Nf4Dequantize
//! [`Matmul`]: crate::matmul::Matmul

mod config;
mod fused;
mod gemv;
mod pairs;
mod shared;
mod stream;
mod subgroup;
mod tensor_core;

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

pub use config::{DenseConfig, Nf4MatmulConfig};
pub use fused::FusedConfig;
pub use gemv::GemvConfig;
pub use shared::SharedConfig;
pub use stream::StreamConfig;

pub use crate::dequant::SubgroupConfig;

use super::dequantize::{self, DequantizeProblem};
use super::{Order, QuantizedValues, QuantizedValuesLaunch, Weight, WeightBuffers};
use crate::dequant::{self, SubgroupPlan};
use crate::elem::{elem, rounding};
use crate::launch::{index_width, launch};
use crate::matmul::{
    Epilogue, EpilogueBuffers, Finish, FinishLaunch, InvalidMatmul, Layout, Matmul, MatmulOperands,
    MatmulProblem, NormBuffers, NormWeight, NormWeightLaunch, Precision, split_k,
};
use crate::rows::NormKind;
use fused::FusedPlan;
use gemv::GemvPlan;
use shared::SharedPlan;
use stream::StreamPlan;

/// The matmul kernel for 4-bit weights.
pub struct Nf4Matmul;

impl Nf4Matmul {
    /// Returns whether the problem has a norm and applying it in the matmul is cheaper than a launch of its
    /// own.
    pub fn takes_norm(arch: &ArchProfile, p: &Nf4MatmulProblem) -> bool {
        config::takes_norm(arch, p)
    }

    /// Maximum rows of x (of `dtype`) for which codes are multiplied directly. For more rows the weight may
    /// be dequantised first.
    pub fn max_fused_rows(arch: &ArchProfile, dtype: DType) -> u32 {
        config::max_fused_rows(arch, dtype)
    }
}

/// One matmul. Build it with [`Nf4MatmulProblem::new`], which checks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nf4MatmulProblem {
    pub m: u32,
    pub weight: Weight,
    /// Type of x, bias and y: f32, f16 or bf16.
    pub dtype: DType,
    /// Bias has `[n]` elements; the other operands have the shape of y.
    pub epilogue: Epilogue,
    /// True if the first half of the weight's rows gates the second half. Absent in serialised form means
    /// false.
    #[serde(default)]
    pub glu: bool,
    /// Norm of the rows of x, with a norm weight `[k]`: see [`matmul`](crate::matmul).
    #[serde(default)]
    pub norm: Option<NormKind>,
}

impl Nf4MatmulProblem {
    /// Creates the matmul of x `[m, k]` and the weight.
    ///
    /// # Errors
    /// A size of 0.
    pub fn new(m: u32, weight: Weight, dtype: DType) -> Result<Self, InvalidMatmul> {
        if m == 0 {
            return Err(InvalidMatmul::Empty { axis: "m" });
        }
        Ok(Self { m, weight, dtype, epilogue: Epilogue::default(), glu: false, norm: None })
    }

    /// Treats the weight as two matrices, where the first gates the second.
    ///
    /// # Errors
    /// [`InvalidMatmul::Halves`].
    pub fn gated_by_half(self) -> Result<Self, InvalidMatmul> {
        let n = self.weight.n;
        let gated = Self { glu: true, ..self };
        if gated.has_halves() { Ok(gated) } else { Err(InvalidMatmul::Halves { n }) }
    }

    /// Returns whether the weight can be split into two matrices.
    const fn has_halves(&self) -> bool {
        let rows = match self.weight.order {
            Order::Tiles => 32,
            Order::Rows => 2,
        };
        !self.glu || self.weight.n % rows == 0
    }

    /// Number of columns of y.
    pub const fn columns(&self) -> u32 {
        if self.glu { self.weight.n / 2 } else { self.weight.n }
    }

    /// Number of elements of a bias.
    pub const fn bias_len(&self) -> usize {
        self.weight.n as usize
    }

    /// Returns the matmul with a dense weight, with the columns of y.
    pub fn dense(&self) -> MatmulProblem {
        let precision = match self.dtype {
            DType::F16 => Precision::F16,
            DType::Bf16 => Precision::Bf16,
            _ => Precision::F32,
        };
        let sizes = [self.m, self.columns(), self.weight.k];
        let dense = MatmulProblem::dense(1, sizes, [Layout::Row, Layout::Col], precision)
            .expect("sizes were checked");
        MatmulProblem { epilogue: self.epilogue, ..dense }
    }

    const fn dequantized(&self) -> DequantizeProblem {
        DequantizeProblem { weight: self.weight, out: self.dtype }
    }

    /// Returns the second of two dense matmuls, which produces y.
    fn gated(&self) -> MatmulProblem {
        let dense = self.dense();
        let gate = dense.epilogue.gate || self.glu;
        MatmulProblem { epilogue: Epilogue { gate, ..dense.epilogue }, ..dense }
    }

    /// Returns the first of two dense matmuls, whose result gates the second.
    fn ungated(&self) -> MatmulProblem {
        let bias = self.epilogue.bias;
        MatmulProblem { epilogue: Epilogue { bias, ..Epilogue::default() }, ..self.dense() }
    }

    /// Bytes of half a dense weight and of half a bias, which are the offsets of the second halves.
    fn halves(&self) -> [u64; 2] {
        let (columns, size) = (u64::from(self.columns()), self.dtype.size() as u64);
        [columns * u64::from(self.weight.k) * size, columns * size]
    }

    /// Returns whether the second halves begin at offsets that any device can bind.
    fn halves_are_aligned(&self) -> bool {
        let [weight, bias] = self.halves();
        weight % 256 == 0 && (!self.epilogue.bias || bias % 256 == 0)
    }
}

/// Device buffers of one matmul.
#[derive(Debug, Clone)]
pub struct Nf4MatmulOperands {
    pub x: Handle,
    pub weight: WeightBuffers,
    pub out: Handle,
    pub epilogue: EpilogueBuffers,
    /// Buffers of the norm.
    pub norm: Option<NormBuffers>,
}

impl Kernel for Nf4Matmul {
    type Problem = Nf4MatmulProblem;
    type Config = Nf4MatmulConfig;
    type Operands = Nf4MatmulOperands;

    const NAME: &'static str = "nf4";
    const VERSION: u32 = 2;

    fn bucket(p: &Nf4MatmulProblem) -> String {
        let Weight { block_size, nested, order, .. } = p.weight;
        let nested = if nested { "n" } else { "" };
        let glu = if p.glu { " glu" } else { "" };
        let norm = if p.norm.is_some() { " norm" } else { "" };
        format!("{} {}{block_size}{nested}{glu}{norm}", p.dense().bucket(), order.name())
    }

    fn candidates(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Vec<Nf4MatmulConfig> {
        config::candidates(arch, p)
    }

    fn check(
        arch: &ArchProfile,
        p: &Nf4MatmulProblem,
        config: &Nf4MatmulConfig,
    ) -> Result<(), Infeasible> {
        config::check(arch, p, config)
    }

    fn cost(p: &Nf4MatmulProblem) -> Cost {
        let dense = p.dense().cost();
        let matrices = if p.glu { 2 } else { 1 };
        let weight = u64::from(p.columns()) * u64::from(p.weight.k) * p.dtype.size() as u64;
        Cost { flops: dense.flops * matrices, bytes: dense.bytes - weight + p.weight.bytes() }
    }

    fn baseline(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Result<Nf4MatmulConfig, Infeasible> {
        config::baseline(arch, p)
    }

    fn operands(queue: &Queue, p: &Nf4MatmulProblem, seed: u64) -> Nf4MatmulOperands {
        let [x, _, out] = p.dense().extents();
        let (bias, matrix) = ((p.bias_len(), p.dtype), (out, p.dtype));
        Nf4MatmulOperands {
            x: crate::noise(queue, x, p.dtype, 7 * seed),
            weight: super::noise(queue, p.weight, 7 * seed + 1),
            out: queue.empty((out * p.dtype.size()).next_multiple_of(4)),
            epilogue: EpilogueBuffers::noise(queue, p.epilogue, bias, matrix, 7 * seed + 3),
            norm: NormBuffers::noise(queue, p.norm, (p.weight.k, p.dtype), 7 * seed + 6),
        }
    }

    fn outputs(p: &Nf4MatmulProblem, operands: &Nf4MatmulOperands) -> Vec<Output> {
        // Paths round the weight differently: after the codebook, after absmax or not at all.
        let rounding = rounding(p.dtype);
        // A gated pair has two errors, and a dense weight rounds one of its sums separately.
        let results = if p.glu { 2.0 } else { 1.0 };
        let tolerance = results * (rounding + f64::from(p.weight.k).sqrt() * 2f64.powi(-22));
        let len = p.dense().extents()[2];
        vec![Output { handle: operands.out.clone(), dtype: p.dtype, len, tolerance }]
    }

    /// Scratch for the sums of split-k, or for [`DensePlaces`].
    fn scratch_bytes(p: &Nf4MatmulProblem, config: &Nf4MatmulConfig) -> u64 {
        match config {
            Nf4MatmulConfig::Dense(c) => DensePlaces::new(p, c).end,
            _ => match config.parts() {
                1 => 0,
                parts => 4 * u64::from(parts) * u64::from(p.m) * u64::from(p.weight.n),
            },
        }
    }

    fn launch(
        queue: &Queue,
        p: &Nf4MatmulProblem,
        config: &Nf4MatmulConfig,
        operands: &Nf4MatmulOperands,
        scratch: Option<&Handle>,
    ) {
        if let Nf4MatmulConfig::Dense(c) = config {
            let scratch = scratch.expect("a dense weight has its scratch");
            return launch_dense(queue, p, c, operands, scratch);
        }
        let (dense, epilogue) = (p.dense(), &operands.epilogue);
        let plan = Plan::new(queue.profile(), p, config);
        let [x_len, _, out_len] = dense.extents();
        let sums = out_len * if p.glu { 2 } else { 1 };
        // A kernel without partial sums binds another buffer in their place and never writes it.
        let (partials, partials_len) = match scratch {
            Some(scratch) => (scratch, sums * plan.parts as usize),
            None => (&operands.out, 1),
        };
        let finish = match plan.parts {
            1 => FinishLaunch::from_buffers(
                p.epilogue,
                epilogue,
                p.bias_len(),
                out_len / plan.out_width,
            ),
            _ => FinishLaunch::nothing(),
        };
        // SAFETY: the extents follow from the problem, and every path checks its edges.
        unsafe {
            launch!(
                queue,
                product,
                plan.cubes,
                plan.cube_dim,
                address(p),
                plan.width,
                plan.code_width,
                plan.out_width,
                BufferArg::from_raw_parts(operands.x.clone(), x_len / plan.width),
                QuantizedValuesLaunch::from_buffers(&p.weight, &operands.weight, plan.code_width),
                BufferArg::from_raw_parts(operands.out.clone(), out_len / plan.out_width),
                BufferArg::from_raw_parts(partials.clone(), partials_len),
                finish,
                NormWeightLaunch::from_buffers(
                    p.norm,
                    operands.norm.as_ref(),
                    p.weight.k,
                    plan.width
                ),
                DimsLaunch::new(p.m, p.weight.n, p.weight.k, plan.parts, plan.part_steps),
                plan.path,
                elem(p.dtype),
            );
        }
        if plan.parts > 1 {
            split_k::add(queue, &dense, partials, plan.parts, p.glu, &operands.out, epilogue);
        }
    }
}

/// Byte offsets in the scratch, which begins with the dense weight: the gating result, and the split-k sums,
/// which the two matmuls use in turn. Offsets are multiples of 256, the alignment of a binding.
struct DensePlaces {
    ungated: u64,
    sums: u64,
    end: u64,
}

impl DensePlaces {
    fn new(p: &Nf4MatmulProblem, c: &DenseConfig) -> Self {
        let begins = |bytes: u64| bytes.next_multiple_of(256);
        let result = p.dense().extents()[2] * p.dtype.size();
        let ungated = begins(dequantize::out_bytes(&p.dequantized()) as u64);
        let sums = if p.glu { begins(ungated + result as u64) } else { ungated };
        Self { ungated, sums, end: sums + Matmul::scratch_bytes(&p.gated(), &c.matmul) }
    }
}

/// Dequantises the weight to the start of `scratch`, and multiplies once, or once per half.
fn launch_dense(
    queue: &Queue,
    p: &Nf4MatmulProblem,
    c: &DenseConfig,
    operands: &Nf4MatmulOperands,
    scratch: &Handle,
) {
    let weight = p.dequantized();
    dequantize::launch(queue, &weight, &c.dequantize, &operands.weight, scratch);
    let places = DensePlaces::new(p, c);
    let sums = (places.end > places.sums).then(|| scratch.clone().offset_start(places.sums));
    let multiply = |problem: MatmulProblem, rhs: Handle, out: &Handle, epilogue| {
        let (lhs, out) = (operands.x.clone(), out.clone());
        let operands =
            MatmulOperands { lhs, rhs, out, epilogue, rows: None, norm: None, second: None };
        Matmul::launch(queue, &problem, &c.matmul, &operands, sums.as_ref());
    };
    let mut epilogue = operands.epilogue.clone();
    if p.glu {
        let [half, bias] = p.halves();
        let second = |bytes: u64| move |h: Handle| h.offset_start(bytes);
        let ungated = scratch.clone().offset_start(places.ungated);
        let biased = EpilogueBuffers {
            bias: epilogue.bias.clone().map(second(bias)),
            ..EpilogueBuffers::default()
        };
        multiply(p.ungated(), second(half)(scratch.clone()), &ungated, biased);
        epilogue.gate = Some(ungated);
    }
    multiply(p.gated(), scratch.clone(), &operands.out, epilogue);
}

/// A single-launch config bound to a problem.
struct Plan {
    path: Path,
    /// Vector widths: elements of x, words of codes, elements of y.
    width: usize,
    code_width: usize,
    out_width: usize,
    cubes: CubeCount,
    cube_dim: CubeDim,
    parts: u32,
    part_steps: u32,
}

impl Plan {
    fn new(arch: &ArchProfile, p: &Nf4MatmulProblem, config: &Nf4MatmulConfig) -> Self {
        match *config {
            Nf4MatmulConfig::Stream(c) => {
                let processors = arch.processors.unwrap_or(1);
                let cubes = (processors / c.parts).clamp(1, p.columns() / 16) * c.parts;
                Self {
                    path: Path::Stream(config::stream_plan(p, &c)),
                    // The path only takes addresses of x, so that the width is irrelevant.
                    width: 4,
                    code_width: 1,
                    out_width: 1,
                    cubes: CubeCount::Static(cubes, 1, 1),
                    cube_dim: CubeDim::new_2d(32, c.planes),
                    parts: c.parts,
                    part_steps: 0,
                }
            }
            Nf4MatmulConfig::Fused(c) => {
                let path = Path::Fused(config::fused_plan(p, &c));
                Self::tiled(p, path, [c.tile_m, c.tile_n()], c.planes, c.parts)
            }
            Nf4MatmulConfig::Shared(c) => {
                let path = Path::Shared(config::shared_plan(p, &c));
                Self::tiled(p, path, [c.tile_m(), c.tile_n()], c.planes(), c.parts)
            }
            Nf4MatmulConfig::Subgroup(c) => {
                let problem = config::subgroup_problem(p).expect("it was checked");
                let plan = dequant::plan(arch, &problem, &c).expect("it was checked");
                let (cubes, cube_dim) = problem.grid(&plan, &c);
                Self {
                    path: Path::Subgroup(plan),
                    width: 4,
                    code_width: 4,
                    out_width: 1,
                    cubes,
                    cube_dim,
                    parts: c.parts,
                    part_steps: c.part_steps(p.weight.k),
                }
            }
            Nf4MatmulConfig::Gemv(c) => {
                let plan = gemv_plan(arch, p, &c);
                let widest = (16 / p.dtype.size()).min(arch.load_bytes as usize / p.dtype.size());
                // On a CPU each unit has rows of its own, and builds the table of pairs once.
                let alone = arch.cores().is_some() && plan.whole && p.norm.is_none();
                let cubes = if alone { 1 } else { p.weight.n.div_ceil(c.rows_of_cube()) };
                Self {
                    path: if alone { Path::Pairs(plan) } else { Path::Gemv(plan) },
                    width: if plan.whole { widest.clamp(1, 8) } else { 1 },
                    code_width: plan.words as usize,
                    out_width: 1,
                    cubes: CubeCount::Static(cubes, 1, 1),
                    cube_dim: CubeDim::new_1d(c.units),
                    parts: 1,
                    part_steps: 0,
                }
            }
            Nf4MatmulConfig::Dense(_) => unreachable!("launched as two products of other families"),
        }
    }

    /// Creates the plan of a path with one cube per tile of y and `mma.sync` accumulators.
    fn tiled(p: &Nf4MatmulProblem, path: Path, tile: [u32; 2], planes: u32, parts: u32) -> Self {
        let blocks = p.m.div_ceil(tile[0]) * p.weight.n.div_ceil(tile[1]);
        Self {
            path,
            width: 4,
            code_width: 1,
            // With a gated pair a unit stores pairs; with one matrix it gathers eight elements.
            out_width: if p.glu { 2 } else { 8 },
            cubes: CubeCount::Static(blocks, parts, 1),
            cube_dim: CubeDim::new_2d(32, planes),
            parts,
            part_steps: tensor_core::part_steps(p.weight.k, parts),
        }
    }
}

fn gemv_plan(arch: &ArchProfile, p: &Nf4MatmulProblem, c: &GemvConfig) -> GemvPlan {
    // The smallest block has 32 elements, so that 4 words share an absmax.
    let wide = p.weight.k % 32 == 0 && p.weight.order == Order::Rows && arch.load_bytes >= 16;
    GemvPlan {
        config: *c,
        whole: p.weight.k % 8 == 0,
        words: if wide { 4 } else { 1 },
        glu: p.glu,
        norm: p.norm,
    }
}

/// Width of indices: more than 2^32 elements need 64 bits.
fn address(p: &Nf4MatmulProblem) -> AddressType {
    let [x, _, out] = p.dense().extents();
    let longest = x.max(out).max(p.weight.len() as usize);
    index_width(longest as u64)
}

/// Sizes of one launch.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Dims {
    pub(crate) m: u32,
    pub(crate) n: u32,
    pub(crate) k: u32,
    pub(crate) parts: u32,
    /// Steps of 64 of k in each part except the last, if the path uses split-k.
    pub(crate) part_steps: u32,
}

/// Compile-time path and geometry of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Path {
    Stream(StreamPlan),
    Fused(FusedPlan),
    Shared(SharedPlan),
    Subgroup(SubgroupPlan),
    Gemv(GemvPlan),
    Pairs(GemvPlan),
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn product<F: Float, NX: Size, NW: Size, NO: Size>(
    x: &[Vector<F, NX>],
    weight: &QuantizedValues<NW>,
    out: &mut [Vector<F, NO>],
    partials: &mut [f32],
    finish: Finish<F, F, NO>,
    norm: ComptimeOption<NormWeight<F, NX>>,
    dims: &Dims,
    #[comptime] path: Path,
    #[define(F)] _dtype: ElemType,
) {
    match path {
        Path::Stream(plan) => {
            stream::stream::<F, NX, NW, NO>(x, weight, out, partials, &finish, &norm, dims, plan)
        }
        Path::Fused(plan) => {
            fused::fused::<F, NX, NW, NO>(x, weight, out, partials, &finish, dims, plan)
        }
        Path::Shared(plan) => {
            shared::shared::<F, NX, NW, NO>(x, weight, out, partials, &finish, dims, plan)
        }
        Path::Subgroup(plan) => {
            let sizes =
                dequant::Dims { m: dims.m, n: dims.n, k: dims.k, part_steps: dims.part_steps };
            dequant::subgroup_matmul::<QuantizedValues<NW>, F, NX, NO>(
                x, weight, out, partials, &finish, &sizes, plan,
            )
        }
        Path::Gemv(plan) => gemv::gemv::<F, NX, NW, NO>(x, weight, out, &finish, &norm, dims, plan),
        Path::Pairs(plan) => pairs::pairs::<F, NX, NW, NO>(x, weight, out, &finish, dims, plan),
    }
}
