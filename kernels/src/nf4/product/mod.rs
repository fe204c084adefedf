//! y = epilogue(x · wᵀ)    x: `[m, k]`   w: `[n, k]` in 4 bits   y: `[m, n]`
//!
//! One source, four ways through it, chosen by [`Nf4MatmulConfig`]:
//!
//! | path     | decodes                          | multiplies with    | where                          |
//! |----------|----------------------------------|--------------------|--------------------------------|
//! | `Stream` | in registers, by pairs           | `mma.sync`         | CUDA, m to 16, weight in tiles |
//! | `Fused`  | in registers, by eights          | `mma.sync`         | CUDA, weight in tiles          |
//! | `Lanes`  | in registers, one by one         | multiply-add       | anywhere                       |
//! | `Dense`  | into memory, by [`Nf4Dequantize`] | any path of [`Matmul`] | where rows outnumber the bytes  |
//!
//! Cost: `2·m·n·k` flop; codes, absmax, x and y once. `Dense` writes and reads a dense weight besides, 4
//! bytes an element: at 4096 rows a thirtieth of the time of its product.
//!
//! [`Nf4Dequantize`]: super::Nf4Dequantize
//! [`Matmul`]: crate::matmul::Matmul

mod fused;
mod lanes;
mod stream;

use std::sync::Arc;

use arch::{ArchProfile, Backend, DType, Device};
use cubecl::ir::{DeviceProperties, ElemType, TargetProperties};
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output};

pub use fused::FusedConfig;
pub use lanes::LanesConfig;
pub use stream::StreamConfig;

use super::dequantize::{self, DequantizeConfig, DequantizeProblem, Nf4Dequantize};
use super::{Codes, CodesCompilationArg, CodesLaunch, Order, Weight, WeightBuffers};
use crate::matmul::{
    Epilogue, Finish, FinishCompilationArg, FinishLaunch, InvalidMatmul, Layout, Matmul,
    MatmulConfig, MatmulOperands, MatmulProblem, Precision, elem, parts,
};
use fused::FusedPlan;
use lanes::LanesPlan;
use stream::StreamPlan;

/// The family of products with 4-bit weights.
pub struct Nf4Matmul;

/// One product. Build it with [`Nf4MatmulProblem::new`], which checks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nf4MatmulProblem {
    pub m: u32,
    pub weight: Weight,
    /// Type of x, bias and y: f32, f16 or bf16.
    pub dtype: DType,
    pub epilogue: Epilogue,
}

impl Nf4MatmulProblem {
    /// x `[m, k]` by the weight.
    ///
    /// # Errors
    /// A size of 0.
    pub fn new(m: u32, weight: Weight, dtype: DType) -> Result<Self, InvalidMatmul> {
        if m == 0 {
            return Err(InvalidMatmul::Empty { axis: "m" });
        }
        Ok(Self { m, weight, dtype, epilogue: Epilogue::default() })
    }

    /// The product with the dense weight.
    pub fn dense(&self) -> MatmulProblem {
        let Weight { n, k, .. } = self.weight;
        let precision = match self.dtype {
            DType::F16 => Precision::F16,
            DType::Bf16 => Precision::Bf16,
            _ => Precision::F32,
        };
        let dense = MatmulProblem::dense(1, [self.m, n, k], [Layout::Row, Layout::Col], precision)
            .expect("no size is 0");
        MatmulProblem { epilogue: self.epilogue, ..dense }
    }

    const fn dequantized(&self) -> DequantizeProblem {
        DequantizeProblem { weight: self.weight, out: self.dtype }
    }
}

/// Device buffers of one product.
#[derive(Debug, Clone)]
pub struct Nf4MatmulOperands {
    pub x: Handle,
    pub weight: WeightBuffers,
    pub out: Handle,
    /// Present when the problem's epilogue has them.
    pub bias: Option<Handle>,
    pub gate: Option<Handle>,
    pub residual: Option<Handle>,
}

impl Nf4MatmulOperands {
    /// Those of the product with the dense weight at `rhs`.
    fn dense(&self, rhs: &Handle) -> MatmulOperands {
        MatmulOperands {
            lhs: self.x.clone(),
            rhs: rhs.clone(),
            out: self.out.clone(),
            bias: self.bias.clone(),
            gate: self.gate.clone(),
            residual: self.residual.clone(),
            rows: None,
        }
    }
}

/// One way to multiply with a 4-bit weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "path", rename_all = "lowercase")]
pub enum Nf4MatmulConfig {
    Stream(StreamConfig),
    Fused(FusedConfig),
    Lanes(LanesConfig),
    Dense { dequantize: DequantizeConfig, matmul: MatmulConfig },
}

impl Nf4MatmulConfig {
    /// Parts that k is cut into, whose sums are kept between two launches.
    const fn parts(&self) -> u32 {
        match self {
            Self::Stream(c) => c.parts,
            Self::Fused(c) => c.parts,
            Self::Lanes(_) | Self::Dense { .. } => 1,
        }
    }
}

impl Kernel for Nf4Matmul {
    type Problem = Nf4MatmulProblem;
    type Config = Nf4MatmulConfig;
    type Operands = Nf4MatmulOperands;

    const NAME: &'static str = "nf4";
    const VERSION: u32 = 1;

    fn bucket(p: &Nf4MatmulProblem) -> String {
        let Weight { block_size, nested, order, .. } = p.weight;
        let nested = if nested { "n" } else { "" };
        format!("{} {}{block_size}{nested}", p.dense().bucket(), order.name())
    }

    fn candidates(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Vec<Nf4MatmulConfig> {
        let feasible = |c: &Nf4MatmulConfig| Self::check(arch, p, c).is_ok();
        let streams = streams(arch, p).into_iter().map(Nf4MatmulConfig::Stream);
        let lanes = lanes(arch, p).into_iter().map(Nf4MatmulConfig::Lanes);
        // Few rows leave a dense weight's bytes unpaid, and tiles mostly empty.
        let fused = if p.m <= 8 { Vec::new() } else { fused(arch, p) };
        let fused: Vec<_> = fused.into_iter().map(Nf4MatmulConfig::Fused).collect();
        let dense = if p.m <= 8 { Vec::new() } else { denses(arch, p) };
        // From a thousand rows on a dense weight costs less than decoding it for every tile of rows.
        let (many, few) = if p.m >= 1024 { (dense, fused) } else { (fused, dense) };
        let all = streams.chain(many).chain(few).chain(lanes);
        let all: Vec<_> = all.filter(feasible).collect();
        match all.iter().position(|c| !matches!(c, Nf4MatmulConfig::Lanes(_))) {
            // On tensor cores only the simplest of the plain path is worth a try.
            Some(_) if p.m > 8 => {
                all.into_iter().filter(|c| !matches!(c, Nf4MatmulConfig::Lanes(_))).collect()
            }
            _ => all,
        }
    }

    fn check(
        arch: &ArchProfile,
        p: &Nf4MatmulProblem,
        config: &Nf4MatmulConfig,
    ) -> Result<(), Infeasible> {
        if !arch.dtypes.contains(&p.dtype) {
            return Err(Infeasible::Feature { what: format!("{} buffers", p.dtype) });
        }
        match config {
            Nf4MatmulConfig::Stream(c) => check_stream(arch, p, c),
            Nf4MatmulConfig::Fused(c) => check_fused(arch, p, c),
            Nf4MatmulConfig::Lanes(c) => check_lanes(arch, p, c),
            Nf4MatmulConfig::Dense { dequantize, matmul } => {
                Nf4Dequantize::check(arch, &p.dequantized(), dequantize)?;
                if matmul.parts() > 1 {
                    return Err(shape(
                        "parts",
                        matmul.parts(),
                        "the dense weight is all the scratch",
                    ));
                }
                Matmul::check(arch, &p.dense(), matmul)
            }
        }
    }

    fn cost(p: &Nf4MatmulProblem) -> Cost {
        let dense = p.dense().cost();
        let weight = p.weight.len() * p.dtype.size() as u64;
        Cost { flops: dense.flops, bytes: dense.bytes - weight + p.weight.bytes() }
    }

    fn simplest(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Result<Nf4MatmulConfig, Infeasible> {
        let config = Nf4MatmulConfig::Lanes(LanesConfig::simplest(arch));
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(device: &Device, p: &Nf4MatmulProblem, seed: u64) -> Nf4MatmulOperands {
        let dense = p.dense();
        let Epilogue { bias, gate, residual, .. } = p.epilogue;
        let [x, _, out] = dense.extents();
        let make = |len, salt| crate::noise(device, len, p.dtype, 7 * seed + salt);
        Nf4MatmulOperands {
            x: make(x, 0),
            weight: super::noise(device, p.weight, 7 * seed + 1),
            out: device.client().empty((out * p.dtype.size()).next_multiple_of(4)),
            bias: bias.then(|| make(dense.bias_len(), 3)),
            gate: gate.then(|| make(out, 4)),
            residual: residual.then(|| make(out, 5)),
        }
    }

    fn outputs(p: &Nf4MatmulProblem, operands: &Nf4MatmulOperands) -> Vec<Output> {
        // Paths differ in where they round the weight: as its book value, as itself or not at all.
        let rounding = match p.dtype {
            DType::F16 => 2f64.powi(-10),
            DType::Bf16 => 2f64.powi(-7),
            _ => 0.0,
        };
        let tolerance = rounding + f64::from(p.weight.k).sqrt() * 2f64.powi(-22);
        let len = p.dense().extents()[2];
        vec![Output { handle: operands.out.clone(), dtype: p.dtype, len, tolerance }]
    }

    /// Sums of parts, or the dense weight.
    fn scratch_bytes(p: &Nf4MatmulProblem, config: &Nf4MatmulConfig) -> u64 {
        match config {
            Nf4MatmulConfig::Dense { .. } => dequantize::out_bytes(&p.dequantized()) as u64,
            _ => match config.parts() {
                1 => 0,
                parts => 4 * u64::from(parts) * u64::from(p.m) * u64::from(p.weight.n),
            },
        }
    }

    fn programs(
        arch: &ArchProfile,
        p: &Nf4MatmulProblem,
        config: &Nf4MatmulConfig,
        properties: &Arc<DeviceProperties>,
        target: &Arc<TargetProperties>,
    ) -> Vec<Box<dyn CubeKernel>> {
        if let Nf4MatmulConfig::Dense { dequantize, matmul } = config {
            let dense = p.dequantized();
            let mut all = Nf4Dequantize::programs(arch, &dense, dequantize, properties, target);
            all.extend(Matmul::programs(arch, &p.dense(), matmul, properties, target));
            return all;
        }
        let plan = Plan::new(arch, p, config);
        let settings =
            KernelSettings::new(plan.cube_dim.into(), ExecutionMode::Unchecked, address(p));
        let buffer = || BufferCompilationArg { inplace: None };
        let epilogue = if plan.parts > 1 { Epilogue::default() } else { p.epilogue };
        let mut programs: Vec<Box<dyn CubeKernel>> = vec![Box::new(product::Product::new(
            settings,
            properties.clone(),
            target.clone(),
            buffer(),
            CodesCompilationArg::of(&p.weight),
            buffer(),
            buffer(),
            FinishCompilationArg::of(epilogue),
            DimsCompilationArg { m: (), n: (), k: (), parts: (), part_steps: () },
            plan.width,
            1,
            plan.out_width,
            plan.path,
            elem(p.dtype),
        ))];
        if plan.parts > 1 {
            programs.push(parts::program(&p.dense(), plan.parts, properties, target));
        }
        programs
    }

    fn launch(
        device: &Device,
        p: &Nf4MatmulProblem,
        config: &Nf4MatmulConfig,
        operands: &Nf4MatmulOperands,
        scratch: Option<&Handle>,
    ) {
        let dense = p.dense();
        if let Nf4MatmulConfig::Dense { dequantize, matmul } = config {
            let rhs = scratch.expect("a dense weight has its scratch");
            dequantize::launch(device, &p.dequantized(), dequantize, &operands.weight, rhs);
            Matmul::launch(device, &dense, matmul, &operands.dense(rhs), None);
            return;
        }
        let plan = Plan::new(device.profile(), p, config);
        let [x_len, _, out_len] = dense.extents();
        // A kernel without partial sums still binds a buffer in their place, and never writes it.
        let (partials, partials_len) = match scratch {
            Some(scratch) => (scratch, out_len * plan.parts as usize),
            None => (&operands.out, 1),
        };
        let unused = operands.dense(&operands.x);
        // SAFETY: the extents are the problem's, and every path checks its edges.
        unsafe {
            product::launch_unchecked(
                device.client(),
                plan.cubes,
                plan.cube_dim,
                address(p),
                plan.width,
                1,
                plan.out_width,
                BufferArg::from_raw_parts(operands.x.clone(), x_len / plan.width),
                CodesLaunch::of(&p.weight, &operands.weight, 1),
                BufferArg::from_raw_parts(operands.out.clone(), out_len / plan.out_width),
                BufferArg::from_raw_parts(partials.clone(), partials_len),
                match plan.parts {
                    1 => FinishLaunch::of(&dense, &unused, plan.out_width),
                    _ => FinishLaunch::nothing(),
                },
                DimsLaunch::new(p.m, p.weight.n, p.weight.k, plan.parts, plan.part_steps),
                plan.path,
                elem(p.dtype),
            );
        }
        if plan.parts > 1 {
            parts::add(device, &dense, &unused, partials, plan.parts);
        }
    }
}

/// Every number of parts that gives whole planes work, the fewest first.
fn streams(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Vec<StreamConfig> {
    let quads = p.weight.k / 256;
    let mut found: Vec<StreamConfig> = Vec::new();
    // Of 16 planes a unit has 128 registers; with two fragments of x it spills 160 bytes on sm_89.
    let tight = p.m > 8 && arch.compute_capability < Some(90);
    for planes in [16u32, 12, 8].map(|planes| planes.min(arch.max_units_per_cube / 32)) {
        if planes == 0 || quads == 0 || planes > 12 && tight {
            continue;
        }
        for extra in 0..2 {
            let parts = quads.div_ceil(planes) + extra;
            // Even shares: no plane more than another.
            let config = StreamConfig { planes: quads.div_ceil(parts), parts };
            if !found.contains(&config) {
                found.push(config);
            }
        }
    }
    found
}

/// Tiles for the rows at hand; k in parts where few blocks leave processors idle.
fn fused(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Vec<FusedConfig> {
    let quads = p.weight.k / 256;
    let mut found = Vec::new();
    for (tile_m, planes, stages) in
        [(128, 8, 3), (64, 8, 5), (32, 8, 6), (64, 4, 4), (32, 4, 6), (128, 4, 4)]
    {
        if quads == 0 || tile_m > p.m.next_power_of_two().max(32) {
            continue;
        }
        let one = FusedConfig { tile_m, planes, stages, parts: 1 };
        let blocks = p.m.div_ceil(tile_m) * p.weight.n.div_ceil(one.tile_n());
        let wanted = (2 * arch.processors.unwrap_or(1) / blocks).clamp(1, quads.min(8));
        for parts in [1, wanted, wanted.div_ceil(2)] {
            // Even shares, and none without one.
            let parts = quads.div_ceil(quads.div_ceil(parts));
            let config = FusedConfig { parts, ..one };
            if !found.contains(&config) {
                found.push(config);
            }
        }
    }
    // The fewest blocks that keep every processor busy come first.
    let idle = |c: &FusedConfig| {
        let blocks = p.m.div_ceil(c.tile_m) * p.weight.n.div_ceil(c.tile_n()) * c.parts;
        blocks < arch.processors.unwrap_or(1)
    };
    found.sort_by_key(|c| (idle(c), c.parts));
    found.truncate(8);
    found
}

fn lanes(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Vec<LanesConfig> {
    let columns = p.m.next_power_of_two().min(4);
    if arch.backend == Backend::Cpu {
        let units = arch.processors.unwrap_or(1);
        return [4, 1].map(|rows| LanesConfig { units, lanes: 1, rows, columns }).to_vec();
    }
    let shapes =
        [[256, 32, 2], [128, 32, 2], [256, 32, 4], [256, 16, 2], [256, 64, 2], [256, 32, 1]];
    let mut all: Vec<_> = shapes
        .into_iter()
        .map(|[units, lanes, rows]| LanesConfig { units, lanes, rows, columns })
        .collect();
    all.push(LanesConfig::simplest(arch));
    all
}

/// The products of the dense weight that are worth a try.
fn denses(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Vec<Nf4MatmulConfig> {
    let Some(dequantize) = Nf4Dequantize::candidates(arch, &p.dequantized()).first().copied()
    else {
        return Vec::new();
    };
    let all = Matmul::candidates(arch, &p.dense()).into_iter().filter(|c| c.parts() == 1);
    all.take(4).map(|matmul| Nf4MatmulConfig::Dense { dequantize, matmul }).collect()
}

fn shape(name: &'static str, value: u32, why: &str) -> Infeasible {
    Infeasible::Shape { name, value: value.into(), why: why.to_owned() }
}

fn check_stream(
    arch: &ArchProfile,
    p: &Nf4MatmulProblem,
    c: &StreamConfig,
) -> Result<(), Infeasible> {
    on_tensor_cores(arch, p)?;
    if p.m > 16 {
        return Err(shape("m", p.m, "x of 16 rows at most lies in registers"));
    }
    if !(1..=16).contains(&c.planes) {
        return Err(shape("planes", c.planes, "1 to 16"));
    }
    if !(1..=64).contains(&c.parts) {
        return Err(shape("parts", c.parts, "1 to 64"));
    }
    if c.reach() < p.weight.k {
        return Err(shape("planes", c.planes, "the planes of all parts do not cover k"));
    }
    let (need, have) = (c.units(), arch.max_units_per_cube);
    if need > have {
        return Err(Infeasible::Units { need, have });
    }
    let (need, have) = (stream_plan(p, c).shared_bytes(), arch.max_shared_bytes);
    if need > have {
        return Err(Infeasible::SharedMemory { need, have });
    }
    Ok(())
}

fn check_fused(
    arch: &ArchProfile,
    p: &Nf4MatmulProblem,
    c: &FusedConfig,
) -> Result<(), Infeasible> {
    on_tensor_cores(arch, p)?;
    if !arch.async_copy {
        return Err(Infeasible::Feature { what: "asynchronous copies".to_owned() });
    }
    for (name, value, allowed) in [
        ("tile_m", c.tile_m, &[32u32, 64, 128][..]),
        ("planes", c.planes, &[2, 4, 8]),
        ("stages", c.stages, &[2, 3, 4, 5, 6]),
    ] {
        if !allowed.contains(&value) {
            return Err(shape(name, value, &format!("one of {allowed:?}")));
        }
    }
    if !(1..=64).contains(&c.parts) || (c.parts - 1) * c.part_steps(p.weight.k) >= p.weight.k / 64 {
        return Err(shape("parts", c.parts, "each has at least 256 of k"));
    }
    if c.registers() > 255 {
        return Err(shape("tile_m", c.tile_m, "sums would spill"));
    }
    let (need, have) = (c.units(), arch.max_units_per_cube);
    if need > have {
        return Err(Infeasible::Units { need, have });
    }
    let (need, have) = (fused_plan(p, c).shared_bytes(), arch.max_shared_bytes);
    if need > have {
        return Err(Infeasible::SharedMemory { need, have });
    }
    Ok(())
}

/// The weight lies in tiles, and there are instructions for it.
fn on_tensor_cores(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Result<(), Infeasible> {
    if p.weight.order != Order::Tiles {
        return Err(shape("k", p.weight.k, "the weight does not lie in tiles"));
    }
    let half = matches!(p.dtype, DType::F16 | DType::Bf16);
    let inst = arch.mma_for(p.dtype, DType::F32).filter(|_| half);
    if inst.is_none_or(|s| (s.m, s.n, s.k) != (16, 8, 16)) {
        return Err(Infeasible::Feature { what: format!("{} matrix instructions", p.dtype) });
    }
    Ok(())
}

fn check_lanes(
    arch: &ArchProfile,
    p: &Nf4MatmulProblem,
    c: &LanesConfig,
) -> Result<(), Infeasible> {
    let (need, have) = (c.units, arch.max_units_per_cube);
    if need == 0 || need > have {
        return Err(Infeasible::Units { need, have });
    }
    if arch.backend == Backend::Cpu && c.lanes != 1 {
        return Err(Infeasible::Feature { what: "cheap barriers".to_owned() });
    }
    if c.lanes == 0 || c.units % c.lanes != 0 || c.lanes > 1 && c.units < 16 {
        return Err(shape("lanes", c.lanes, "units divide among them, and 16 fill the book"));
    }
    if !(1..=8).contains(&c.rows) {
        return Err(shape("rows", c.rows, "1 to 8"));
    }
    if !(1..=8).contains(&c.columns) {
        return Err(shape("columns", c.columns, "1 to 8"));
    }
    if p.weight.n.div_ceil(c.rows_of_cube()) > 65_535 {
        return Err(shape("n", p.weight.n, "more cubes than a grid has in a line"));
    }
    let (need, have) = (c.shared_bytes(), arch.max_shared_bytes);
    if need > have {
        return Err(Infeasible::SharedMemory { need, have });
    }
    Ok(())
}

fn stream_plan(p: &Nf4MatmulProblem, c: &StreamConfig) -> StreamPlan {
    StreamPlan {
        config: StreamConfig { parts: 1, ..*c },
        eights: p.m.div_ceil(8) as usize,
        bf16: p.dtype == DType::Bf16,
        partial: c.parts > 1,
    }
}

fn fused_plan(p: &Nf4MatmulProblem, c: &FusedConfig) -> FusedPlan {
    FusedPlan {
        config: FusedConfig { parts: 1, ..*c },
        bf16: p.dtype == DType::Bf16,
        nested: p.weight.nested,
        exact: p.m % c.tile_m == 0,
        partial: c.parts > 1,
    }
}

/// A config of one launch bound to a problem.
struct Plan {
    path: Path,
    /// Elements of a vector of x, and of y.
    width: usize,
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
                let cubes = (processors / c.parts).clamp(1, p.weight.n / 16) * c.parts;
                Self {
                    path: Path::Stream(stream_plan(p, &c)),
                    // Addresses are taken of x; its width means nothing.
                    width: 4,
                    out_width: 1,
                    cubes: CubeCount::Static(cubes, 1, 1),
                    cube_dim: CubeDim::new_2d(32, c.planes),
                    parts: c.parts,
                    part_steps: 0,
                }
            }
            Nf4MatmulConfig::Fused(c) => {
                let blocks = p.m.div_ceil(c.tile_m) * p.weight.n.div_ceil(c.tile_n());
                Self {
                    path: Path::Fused(fused_plan(p, &c)),
                    width: 4,
                    out_width: 8,
                    cubes: CubeCount::Static(blocks, c.parts, 1),
                    cube_dim: CubeDim::new_2d(32, c.planes),
                    parts: c.parts,
                    part_steps: c.part_steps(p.weight.k),
                }
            }
            Nf4MatmulConfig::Lanes(c) => {
                let whole = p.weight.k % 8 == 0;
                let widest = (16 / p.dtype.size()).min(arch.load_bytes as usize / p.dtype.size());
                Self {
                    path: Path::Lanes(LanesPlan { config: c, whole }),
                    width: if whole { widest.clamp(1, 8) } else { 1 },
                    out_width: 1,
                    cubes: CubeCount::Static(p.weight.n.div_ceil(c.rows_of_cube()), 1, 1),
                    cube_dim: CubeDim::new_1d(c.units),
                    parts: 1,
                    part_steps: 0,
                }
            }
            Nf4MatmulConfig::Dense { .. } => unreachable!("a dense weight has launches of its own"),
        }
    }
}

/// Offsets past 2^32 elements need 64-bit indices.
fn address(p: &Nf4MatmulProblem) -> AddressType {
    let [x, _, out] = p.dense().extents();
    let longest = x.max(out).max(p.weight.len() as usize);
    if longest > u32::MAX as usize { AddressType::U64 } else { AddressType::U32 }
}

/// Sizes of one launch.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Dims {
    pub(crate) m: u32,
    pub(crate) n: u32,
    pub(crate) k: u32,
    pub(crate) parts: u32,
    /// Steps of 64 of k in each part but the last, where parts are cut so.
    pub(crate) part_steps: u32,
}

/// Comptime facts of a launch: which path, with what geometry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Path {
    Stream(StreamPlan),
    Fused(FusedPlan),
    Lanes(LanesPlan),
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn product<F: Float, NX: Size, NW: Size, NO: Size>(
    x: &[Vector<F, NX>],
    weight: &Codes<NW>,
    out: &mut [Vector<F, NO>],
    partials: &mut [f32],
    finish: Finish<F, F, NO>,
    dims: &Dims,
    #[comptime] path: Path,
    #[define(F)] _dtype: ElemType,
) {
    match path {
        Path::Stream(plan) => {
            stream::stream::<F, NX, NW, NO>(x, weight, out, partials, &finish, dims, plan)
        }
        Path::Fused(plan) => {
            fused::fused::<F, NX, NW, NO>(x, weight, out, partials, &finish, dims, plan)
        }
        Path::Lanes(plan) => lanes::lanes::<F, NX, NW, NO>(x, weight, out, &finish, dims, plan),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(m: u32, n: u32, k: u32, order: Order, dtype: DType) -> Nf4MatmulProblem {
        let weight = Weight::new(n, k, 64, true).and_then(|w| w.ordered(order)).expect("valid");
        Nf4MatmulProblem::new(m, weight, dtype).expect("rows")
    }

    #[test]
    fn every_profile_has_a_candidate_and_every_candidate_passes_its_check() {
        for name in arch::recorded() {
            let arch = ArchProfile::recorded(name).expect("recorded");
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                for m in [1, 8, 9, 16, 17, 4096] {
                    for p in [
                        problem(m, 4096, 4096, Order::Tiles, dtype),
                        problem(m, 37, 41, Order::Rows, dtype),
                    ] {
                        let found = Nf4Matmul::candidates(&arch, &p);
                        assert!(!found.is_empty(), "{name} {p:?}");
                        for c in found {
                            Nf4Matmul::check(&arch, &p, &c).expect("candidates are checked");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn few_rows_stream_and_their_planes_have_even_shares() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        let first =
            |m, n, k| Nf4Matmul::candidates(&arch, &problem(m, n, k, Order::Tiles, DType::Bf16))[0];
        let stream = |planes, parts| Nf4MatmulConfig::Stream(StreamConfig { planes, parts });
        assert_eq!(first(1, 14336, 4096), stream(16, 1));
        assert_eq!(first(8, 4096, 14336), stream(14, 4));
        assert_eq!(first(8, 4096, 11008), stream(15, 3));
        // With two fragments of x, 16 planes would spill.
        assert_eq!(first(16, 4096, 11008), stream(11, 4));
        assert!(matches!(first(17, 4096, 4096), Nf4MatmulConfig::Fused(_)));
        assert!(matches!(first(4096, 4096, 4096), Nf4MatmulConfig::Dense { .. }));
    }

    #[test]
    fn a_cut_k_must_be_covered() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        let p = problem(1, 4096, 4096, Order::Tiles, DType::Bf16);
        for (planes, parts) in [(8, 1), (0, 4), (16, 0), (17, 1), (u32::MAX, u32::MAX)] {
            let c = Nf4MatmulConfig::Stream(StreamConfig { planes, parts });
            assert!(Nf4Matmul::check(&arch, &p, &c).is_err(), "{c:?}");
        }
    }
}
