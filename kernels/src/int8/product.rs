//! y = residual + gate · activation(x · wᵀ + bias)    x: `[m, k]`   w: `[n, k]` in 8 bits   y: `[m, n]`
//!
//! One source, five ways through it, chosen by [`Int8MatmulConfig`]:
//!
//! | path    | decodes                           | multiplies with       | where                          |
//! |---------|-----------------------------------|-----------------------|--------------------------------|
//! | `Lanes` | in registers                      | multiply-add          | anywhere                       |
//! | `Fused` | in registers, to halves           | `mma.sync`            | CUDA, x in halves              |
//! | `Plane` | into shared memory           | plane-scope matrices  | Vulkan, up to 256 rows         |
//! | `Dense` | into memory, by [`Int8Dequantize`] | any path of [`Matmul`] | where rows outnumber the bytes |
//! | `Bytes` | not at all                        | `mma.sync` of bytes   | CUDA, where x is rounded to bytes, too |
//!
//! Where a product has [`Activations`], x is rounded first: `Bytes` multiplies the codes, the others what they stand
//! for. `Fused` and `Bytes` give codes to the `mma.sync` loop of [`crate::matmul`], in `int8/mma.rs`. `Lanes` is here:
//!
//! ```text
//!   for each `columns` rows of x
//!     for each vector of a row of the weight              // one unit, the next ones the next unit's
//!       acc += code · x                                   // for `rows` rows and `columns` of x
//!     y = epilogue(sum of the units' acc · scb / 127)     // through shared memory, by halves
//! ```
//!
//! Everything is f32, and a row's absmax waits for its sum. Where k is no multiple of 4 a word straddles rows, and
//! elements are decoded one by one.
//!
//! Cost: `2·m·n·k` flop; codes, absmax, x and y once. Decoding takes `Lanes` three instructions an element, and one more
//! a row of x, `Fused` two: of 14336 x 4096 those of one row take 8 and 4 us of an H200, its bytes 14. `Lanes` reads
//! codes once for every `columns` rows of x; `Dense` writes and reads a dense weight besides, 4 bytes an element.
//!
//! us of 14336 x 4096 in bf16, tuned (H200 restricted to an RTX 4090's features; beside other weights in README). What x
//! rounded takes has its three launches in it:
//!
//! | m    | int8         | before        | x rounded    |
//! |------|--------------|---------------|--------------|
//! | 1    | 20.6 `Fused` | 21.3 `Lanes`  |              |
//! | 4    | 20.6 `Fused` | 31.7 `Lanes`  |              |
//! | 8    | 21.0 `Fused` | 50.2 `Lanes`  | 32.5 `Bytes` |
//! | 16   | 20.8 `Fused` | 84.1 `Dense`  | 37.6 `Bytes` |
//! | 64   | 41.6 `Fused` | 85.5 `Dense`  | 46.5 `Bytes` |
//! | 512  | 194 `Dense`  | 189 `Dense`   | 108 `Bytes`  |
//! | 4096 | 1130 `Dense` | 1131 `Dense`  | 684 `Bytes`  |
//!
//! `Fused` decodes what a plane multiplies once for all its rows, and again in each row of planes: at 64 rows that is
//! what it is short of (a warp a scheduler), at 512 rows 230 us. A row of fewer results, 4096 x 4096, takes `Lanes` 8.4
//! us and `Fused` 10.4, whose k must be cut to fill the card. Through Vulkan one row takes 20.4 us, 16 46.5 by `Plane`.
//!
//! On a CPU sums of neighbouring elements are kept apart, so that codes become numbers and are multiplied by vectors: 4096 x
//! 4096 of one row in f32 takes two cores of cpu-genuineintel.6.167-2 1.19 ms, 3.29 one after the other, dense 2.46.
//!
//! [`Int8Dequantize`]: super::Int8Dequantize
//! [`Matmul`]: crate::matmul::Matmul

use std::sync::Arc;

use arch::{ArchProfile, DType, Device};
use cubecl::ir::{DeviceProperties, ElemType, TargetProperties};
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output};

use super::activations::{Activations, Places, Rounding};
use super::dequantize::{self, DequantizeConfig, DequantizeProblem, Int8Dequantize};
use super::mma::{self, BytesOperands, Codes, RoundedOperands};
use super::{Weight, WeightBuffers, code_of, lifted, plane, scaled};
use crate::coded::{self, PlaneConfig};
use crate::elem::elem;
use crate::fits::{lacks, limits, shape, stores};
use crate::matmul::{
    self, Columns, Epilogue, EpilogueBuffers, Finish, FinishCompilationArg, FinishLaunch,
    InvalidMatmul, Layout, Matmul, MatmulConfig, MatmulOperands, MatmulProblem, MmaConfig, Operand,
    Precision,
};

/// The family of products with weights of 8 bits.
pub struct Int8Matmul;

/// One product. Build it with [`Int8MatmulProblem::new`], which checks it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Int8MatmulProblem {
    pub m: u32,
    pub weight: Weight,
    /// Type of x, bias and y: f32, f16 or bf16.
    pub dtype: DType,
    /// A bias has `[n]` elements, the other matrices those of y.
    pub epilogue: Epilogue,
    /// Rounds x to 8 bits, a scale a row.
    #[serde(default)]
    pub activations: Option<Activations>,
}

/// One way to multiply with a weight of 8 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "path", rename_all = "lowercase")]
pub enum Int8MatmulConfig {
    Lanes(LanesConfig),
    Dense(DenseConfig),
    Fused(MmaConfig),
    Plane(PlaneConfig),
    /// Sizes along k are of pairs of bytes.
    Bytes(MmaConfig),
}

/// How the plain path is spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LanesConfig {
    /// Units of a cube.
    pub units: u32,
    /// Units that share rows.
    pub lanes: u32,
    /// Rows of the weight that they take at once.
    pub rows: u32,
    /// Rows of x that they take at once.
    pub columns: u32,
}

/// A weight made dense, and how it is multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DenseConfig {
    pub dequantize: DequantizeConfig,
    pub matmul: MatmulConfig,
}

/// Device buffers of one product.
#[derive(Debug, Clone)]
pub struct Int8MatmulOperands {
    pub x: Handle,
    pub weight: WeightBuffers,
    pub out: Handle,
    pub epilogue: EpilogueBuffers,
}

impl Int8MatmulProblem {
    /// x `[m, k]` by the weight.
    ///
    /// # Errors
    /// A size of 0.
    pub fn new(m: u32, weight: Weight, dtype: DType) -> Result<Self, InvalidMatmul> {
        if m == 0 {
            return Err(InvalidMatmul::Empty { axis: "m" });
        }
        Ok(Self { m, weight, dtype, epilogue: Epilogue::default(), activations: None })
    }

    /// The product with the dense weight.
    pub fn dense(&self) -> MatmulProblem {
        let precision = match self.dtype {
            DType::F16 => Precision::F16,
            DType::Bf16 => Precision::Bf16,
            _ => Precision::F32,
        };
        let sizes = [self.m, self.weight.n, self.weight.k];
        let dense = MatmulProblem::dense(1, sizes, [Layout::Row, Layout::Col], precision)
            .expect("sizes were checked");
        MatmulProblem { epilogue: self.epilogue, ..dense }
    }

    /// The product with x rounded, where bytes multiply faster than codes that are decoded: from as many rows on, on
    /// devices that have instructions for them.
    #[must_use]
    pub fn rounded_where_faster(self, arch: &ArchProfile, activations: Activations) -> Self {
        let rounded = Self { activations: Some(activations), ..self };
        let fits = |c: &MmaConfig| check_bytes(arch, &rounded, c).is_ok();
        let faster = self.m >= ROUNDED && bytes_of(arch, &rounded).iter().any(fits);
        if faster { rounded } else { self }
    }

    /// The product whose weight has two bytes in an element.
    fn coded(&self) -> MatmulProblem {
        let dense = self.dense();
        let rhs = Operand { stride: u64::from(self.weight.k / 2), ..dense.rhs };
        MatmulProblem { rhs, ..dense }
    }

    /// The product with two bytes as an element.
    fn pairs(&self) -> MatmulProblem {
        let dense = self.dense();
        let sizes = [self.m, self.weight.n, self.weight.k / 2];
        let pairs = MatmulProblem::dense(1, sizes, [Layout::Row, Layout::Col], dense.precision);
        MatmulProblem { epilogue: self.epilogue, ..pairs.expect("k is whole chunks") }
    }

    /// How x is rounded, for this config, and where to: behind what else the config has in its scratch.
    fn rounding(&self, config: &Int8MatmulConfig) -> Option<(Rounding, Places)> {
        let Activations { threshold } = self.activations?;
        let codes = matches!(config, Int8MatmulConfig::Bytes(_));
        let rounding =
            Rounding { m: self.m, k: self.weight.k, dtype: self.dtype, threshold, codes };
        Some((rounding, rounding.places(self.other_scratch(config))))
    }

    /// Bytes of a scratch beside a rounded x.
    fn other_scratch(&self, config: &Int8MatmulConfig) -> u64 {
        match config {
            Int8MatmulConfig::Dense(_) => dequantize::out_bytes(&self.dequantized()) as u64,
            Int8MatmulConfig::Lanes(_) => 0,
            Int8MatmulConfig::Fused(c) | Int8MatmulConfig::Bytes(c) if c.parts > 1 => {
                4 * u64::from(c.parts) * self.dense().extents()[2] as u64
            }
            Int8MatmulConfig::Plane(c) if c.parts > 1 => {
                4 * u64::from(c.parts) * self.dense().extents()[2] as u64
            }
            Int8MatmulConfig::Fused(_)
            | Int8MatmulConfig::Bytes(_)
            | Int8MatmulConfig::Plane(_) => 0,
        }
    }

    /// The operands of `mma.sync` that stay bytes.
    fn codes(&self, config: &Int8MatmulConfig) -> Codes {
        match (config, self.rounding(config)) {
            (Int8MatmulConfig::Bytes(_), Some((rounding, _))) => {
                Codes::Bytes { outliers: rounding.outliers() }
            }
            _ => Codes::Halves { bf16: self.dtype == DType::Bf16 },
        }
    }

    const fn dequantized(&self) -> DequantizeProblem {
        DequantizeProblem { weight: self.weight, out: self.dtype }
    }
}

impl LanesConfig {
    /// Rows of the weight that a cube takes.
    const fn rows_of_cube(self) -> u32 {
        self.units / self.lanes * self.rows
    }

    const fn shared_bytes(self) -> u32 {
        if self.lanes > 1 { 4 * self.units * self.rows * self.columns } else { 0 }
    }

    /// The config with the least to go wrong.
    fn simplest(arch: &ArchProfile) -> Self {
        match arch.cores() {
            Some(units) => Self { units, lanes: 1, rows: 1, columns: 1 },
            None => Self { units: 64, lanes: 8, rows: 1, columns: 1 },
        }
    }
}

impl Kernel for Int8Matmul {
    type Problem = Int8MatmulProblem;
    type Config = Int8MatmulConfig;
    type Operands = Int8MatmulOperands;

    const NAME: &'static str = "int8";
    const VERSION: u32 = 2;

    fn bucket(p: &Int8MatmulProblem) -> String {
        let rounded = match p.activations {
            None => "",
            Some(Activations { threshold }) if threshold > 0.0 => " x8 outliers",
            Some(_) => " x8",
        };
        format!("{} w{}{rounded}", p.dense().bucket(), widths(p)[1])
    }

    fn candidates(arch: &ArchProfile, p: &Int8MatmulProblem) -> Vec<Int8MatmulConfig> {
        let feasible = |c: &Int8MatmulConfig| Self::check(arch, p, c).is_ok();
        let lanes = lanes_of(arch, p).into_iter().map(Int8MatmulConfig::Lanes);
        let dense = denses(arch, p).into_iter().map(Int8MatmulConfig::Dense);
        let fused = fused_of(arch, p).into_iter().map(Int8MatmulConfig::Fused);
        let bytes = bytes_of(arch, p).into_iter().map(Int8MatmulConfig::Bytes);
        let planes = coded::candidates(arch, &plane::coded(p));
        let planes = planes.into_iter().map(Int8MatmulConfig::Plane);
        let on_tensor_cores: Vec<_> = bytes.chain(fused).chain(planes).filter(feasible).collect();
        // Few rows leave a dense weight's bytes unpaid; many have codes read again and again.
        let all: Vec<_> = match p.m {
            0..=2 => lanes.chain(on_tensor_cores).collect(),
            3..=8 => on_tensor_cores.into_iter().chain(lanes).collect(),
            _ if on_tensor_cores.is_empty() && p.m <= 32 => lanes.chain(dense).collect(),
            _ if on_tensor_cores.is_empty() => dense.chain(lanes.take(2)).collect(),
            _ => on_tensor_cores.into_iter().chain(dense).collect(),
        };
        all.into_iter().filter(feasible).collect()
    }

    fn check(
        arch: &ArchProfile,
        p: &Int8MatmulProblem,
        config: &Int8MatmulConfig,
    ) -> Result<(), Infeasible> {
        stores(arch, [p.dtype])?;
        let c = match config {
            Int8MatmulConfig::Lanes(c) => c,
            Int8MatmulConfig::Fused(c) => return check_fused(arch, p, c),
            Int8MatmulConfig::Bytes(c) => return check_bytes(arch, p, c),
            Int8MatmulConfig::Plane(c) => return coded::check(arch, &plane::coded(p), c),
            Int8MatmulConfig::Dense(c) => {
                Int8Dequantize::check(arch, &p.dequantized(), &c.dequantize)?;
                if c.matmul.splits() > 1 {
                    let why = "the dense weight is all the scratch";
                    return Err(shape("parts", c.matmul.splits(), why));
                }
                return Matmul::check(arch, &p.dense(), &c.matmul);
            }
        };
        limits(arch, c.units, 0)?;
        if !c.lanes.is_power_of_two() || c.units % c.lanes != 0 {
            return Err(shape("lanes", c.lanes, "a power of two that units divide among"));
        }
        if arch.cores().is_some() && c.lanes != 1 {
            return Err(lacks("cheap barriers"));
        }
        for (name, value) in [("rows", c.rows), ("columns", c.columns)] {
            if !(1..=8).contains(&value) {
                return Err(shape(name, value, "1 to 8"));
            }
        }
        if c.rows * c.columns > 32 {
            return Err(shape("columns", c.columns, "sums of more than 32 spill"));
        }
        if p.weight.n.div_ceil(c.rows_of_cube()) > 65_535 {
            return Err(shape("n", p.weight.n, "more cubes than a grid has in a line"));
        }
        limits(arch, c.units, c.shared_bytes())
    }

    fn cost(p: &Int8MatmulProblem) -> Cost {
        let dense = p.dense().cost();
        let weight = p.weight.len() * p.dtype.size() as u64;
        Cost { flops: dense.flops, bytes: dense.bytes - weight + p.weight.bytes() }
    }

    fn simplest(arch: &ArchProfile, p: &Int8MatmulProblem) -> Result<Int8MatmulConfig, Infeasible> {
        let config = Int8MatmulConfig::Lanes(LanesConfig::simplest(arch));
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(device: &Device, p: &Int8MatmulProblem, seed: u64) -> Int8MatmulOperands {
        let [x, _, out] = p.dense().extents();
        let (bias, matrix) = ((p.weight.n as usize, p.dtype), (out, p.dtype));
        Int8MatmulOperands {
            x: crate::noise(device, x, p.dtype, 7 * seed),
            weight: super::noise(device, p.weight, 7 * seed + 1),
            out: device.client().empty((out * p.dtype.size()).next_multiple_of(4)),
            epilogue: EpilogueBuffers::noise(device, p.epilogue, bias, matrix, 7 * seed + 3),
        }
    }

    fn outputs(p: &Int8MatmulProblem, operands: &Int8MatmulOperands) -> Vec<Output> {
        // Paths differ in whether they round the weight.
        let rounding = match p.dtype {
            DType::F16 => 2f64.powi(-10),
            DType::Bf16 => 2f64.powi(-7),
            _ => 0.0,
        };
        let tolerance = rounding + f64::from(p.weight.k).sqrt() * 2f64.powi(-22);
        let len = p.dense().extents()[2];
        vec![Output { handle: operands.out.clone(), dtype: p.dtype, len, tolerance }]
    }

    /// The dense weight or partial sums, and x as it is rounded.
    fn scratch_bytes(p: &Int8MatmulProblem, config: &Int8MatmulConfig) -> u64 {
        match p.rounding(config) {
            Some((_, places)) => places.end,
            None => p.other_scratch(config),
        }
    }

    fn programs(
        arch: &ArchProfile,
        p: &Int8MatmulProblem,
        config: &Int8MatmulConfig,
        properties: &Arc<DeviceProperties>,
        target: &Arc<TargetProperties>,
    ) -> Vec<Box<dyn CubeKernel>> {
        let rounding = p.rounding(config).map(|(rounding, _)| rounding);
        let mut all = rounding.map_or_else(Vec::new, |r| r.programs(arch, properties, target));
        let c = match config {
            Int8MatmulConfig::Lanes(c) => c,
            Int8MatmulConfig::Dense(c) => {
                let weight = p.dequantized();
                all.extend(Int8Dequantize::programs(
                    arch,
                    &weight,
                    &c.dequantize,
                    properties,
                    target,
                ));
                all.extend(Matmul::programs(arch, &p.dense(), &c.matmul, properties, target));
                return all;
            }
            Int8MatmulConfig::Plane(c) => {
                all.extend(plane::programs(arch, p, c, properties, target));
                return all;
            }
            Int8MatmulConfig::Fused(c) => {
                let codes = p.codes(config);
                all.extend(mma::programs(arch, &p.coded(), *c, codes, properties, target));
                return all;
            }
            Int8MatmulConfig::Bytes(c) => {
                let codes = p.codes(config);
                all.extend(mma::programs(arch, &p.pairs(), *c, codes, properties, target));
                return all;
            }
        };
        let dim = CubeDim::new_1d(c.units).into();
        let settings = KernelSettings::new(dim, ExecutionMode::Unchecked, address(p));
        let buffer = || BufferCompilationArg { inplace: None };
        let [width, words] = widths(p);
        all.push(Box::new(product::Product::new(
            settings,
            properties.clone(),
            target.clone(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            FinishCompilationArg::of(p.epilogue),
            DimsCompilationArg { m: (), n: (), k: () },
            width,
            words,
            1,
            *c,
            elem(p.dtype),
        )));
        all
    }

    fn launch(
        device: &Device,
        p: &Int8MatmulProblem,
        config: &Int8MatmulConfig,
        operands: &Int8MatmulOperands,
        scratch: Option<&Handle>,
    ) {
        let mut x = operands.x.clone();
        let rounded = p.rounding(config);
        if let Some((rounding, places)) = &rounded {
            let scratch = scratch.expect("a rounded x has its scratch");
            rounding.launch(device, &operands.x, scratch, places);
            x = scratch.clone().offset_start(places.values);
        }
        let c = match config {
            Int8MatmulConfig::Lanes(c) => c,
            Int8MatmulConfig::Dense(c) => {
                let rhs = scratch.expect("a dense weight has its scratch").clone();
                let weight = p.dequantized();
                dequantize::launch(device, &weight, &c.dequantize, &operands.weight, &rhs);
                let operands = MatmulOperands {
                    lhs: x,
                    rhs,
                    out: operands.out.clone(),
                    epilogue: operands.epilogue.clone(),
                    rows: None,
                    norm: None,
                };
                return Matmul::launch(device, &p.dense(), &c.matmul, &operands, None);
            }
            Int8MatmulConfig::Plane(c) => {
                return plane::launch(device, p, c, x, operands, scratch);
            }
            Int8MatmulConfig::Fused(c) | Int8MatmulConfig::Bytes(c) => {
                let bytes = matches!(config, Int8MatmulConfig::Bytes(_));
                let dense = if bytes { p.pairs() } else { p.coded() };
                let rounded = rounded.filter(|_| bytes).map(|(_, places)| {
                    let scratch = scratch.expect("a rounded x has its scratch");
                    RoundedOperands {
                        scales: scratch.clone().offset_start(places.scales),
                        outliers: scratch.clone().offset_start(places.outliers),
                        x: &operands.x,
                    }
                });
                let operands = BytesOperands {
                    lhs: x,
                    rounded,
                    codes: &operands.weight.codes,
                    scb: &operands.weight.scb,
                    out: &operands.out,
                    epilogue: &operands.epilogue,
                    partials: scratch,
                };
                return mma::launch(device, &dense, *c, p.codes(config), &operands);
            }
        };
        let ([x_len, _, out_len], [width, words]) = (p.dense().extents(), widths(p));
        let Weight { n, k } = p.weight;
        // SAFETY: the extents are the problem's, and the kernel checks its edges.
        unsafe {
            product::launch_unchecked(
                device.client(),
                CubeCount::Static(n.div_ceil(c.rows_of_cube()), 1, 1),
                CubeDim::new_1d(c.units),
                address(p),
                width,
                words,
                1,
                BufferArg::from_raw_parts(x, x_len / width),
                BufferArg::from_raw_parts(
                    operands.weight.codes.clone(),
                    p.weight.words() as usize / words,
                ),
                BufferArg::from_raw_parts(operands.weight.scb.clone(), n as usize),
                BufferArg::from_raw_parts(operands.out.clone(), out_len),
                FinishLaunch::of(p.epilogue, &operands.epilogue, n as usize, out_len),
                DimsLaunch::new(p.m, n, k),
                *c,
                elem(p.dtype),
            );
        }
    }
}

fn lanes_of(arch: &ArchProfile, p: &Int8MatmulProblem) -> Vec<LanesConfig> {
    let columns = p.m.next_power_of_two().min(8);
    if let Some(units) = arch.cores() {
        let columns = columns.min(4);
        return [8, 4, 2, 1].map(|rows| LanesConfig { units, lanes: 1, rows, columns }).to_vec();
    }
    let shapes = match columns {
        1 => &[[128, 32, 4], [128, 64, 4], [64, 32, 4], [128, 128, 2], [128, 32, 2], [256, 64, 8]],
        2 => &[[128, 32, 4], [128, 64, 4], [256, 32, 4], [128, 128, 2], [128, 32, 2], [256, 64, 8]],
        // Of 128 units, 32 lanes by two rows and 64 by four spill 8 bytes (sm_89, sm_120).
        _ => &[[128, 32, 4], [256, 32, 4], [256, 32, 2], [256, 64, 2]][..],
    };
    let config = |&[units, lanes, rows]: &[u32; 3]| LanesConfig { units, lanes, rows, columns };
    shapes.iter().map(config).chain([LanesConfig::simplest(arch)]).collect()
}

/// The products of the dense weight that are worth a try.
fn denses(arch: &ArchProfile, p: &Int8MatmulProblem) -> Vec<DenseConfig> {
    let decode = Int8Dequantize::candidates(arch, &p.dequantized());
    let Some(dequantize) = decode.first().copied() else { return Vec::new() };
    let all = Matmul::candidates(arch, &p.dense()).into_iter().filter(|c| c.splits() == 1);
    all.take(4).map(|matmul| DenseConfig { dequantize, matmul }).collect()
}

/// Products with codes as halves that are worth a try.
fn fused_of(arch: &ArchProfile, p: &Int8MatmulProblem) -> Vec<MmaConfig> {
    if p.weight.k % CHUNK != 0 || p.dtype.size() != 2 {
        return Vec::new();
    }
    matmul::spread(arch, &p.dense(), &FUSED, |c| check_fused(arch, p, c).is_ok())
}

const fn fused(tiles: [u32; 3], planes: [u32; 2], stages: u32) -> MmaConfig {
    let ([tile_m, tile_n, tile_k], [planes_m, planes_n]) = (tiles, planes);
    MmaConfig { tile_m, tile_n, tile_k, planes_m, planes_n, stages, parts: 1 }
}

/// Tiles of codes take half of what halves do.
const FUSED: [MmaConfig; 10] = [
    fused([128, 256, 64], [2, 4], 3),
    fused([256, 128, 64], [4, 2], 2),
    fused([128, 128, 64], [2, 4], 4),
    fused([128, 128, 64], [2, 2], 4),
    fused([64, 128, 64], [2, 2], 4),
    fused([64, 128, 128], [2, 4], 3),
    fused([32, 128, 128], [1, 4], 4),
    fused([32, 64, 128], [1, 4], 5),
    fused([16, 128, 128], [1, 4], 4),
    fused([16, 64, 256], [1, 4], 4),
];

fn check_fused(arch: &ArchProfile, p: &Int8MatmulProblem, c: &MmaConfig) -> Result<(), Infeasible> {
    stores(arch, [DType::I8])?;
    if p.dtype.size() != 2 {
        return Err(lacks("fragments of halves beside x in f32"));
    }
    if p.weight.k % CHUNK != 0 {
        return Err(shape("k", p.weight.k, "rows of codes are whole chunks of 16 bytes"));
    }
    if c.tile_k % 64 != 0 {
        return Err(shape("tile_k", c.tile_k, "codes come in steps of 32, by two register sets"));
    }
    mma::check_halves(arch, &p.dense(), c)
}

/// The products of bytes that are worth a try.
fn bytes_of(arch: &ArchProfile, p: &Int8MatmulProblem) -> Vec<MmaConfig> {
    if p.activations.is_none() || p.weight.k % CHUNK != 0 {
        return Vec::new();
    }
    let mma = |config| match config {
        // Spills 16 bytes in parts (sm_120).
        MatmulConfig::Mma(c) if (c.tile_m, c.tile_n) != (16, 32) => Some(c),
        _ => None,
    };
    Matmul::candidates(arch, &p.pairs()).into_iter().filter_map(mma).collect()
}

fn check_bytes(arch: &ArchProfile, p: &Int8MatmulProblem, c: &MmaConfig) -> Result<(), Infeasible> {
    if p.activations.is_none() {
        return Err(lacks("bytes to multiply with: the product does not round x"));
    }
    stores(arch, [DType::I8])?;
    if p.dtype.size() != 2 {
        return Err(lacks("fragments of bytes beside results in f32"));
    }
    if p.weight.k % CHUNK != 0 {
        return Err(shape("k", p.weight.k, "rows of codes are whole chunks of 16 bytes"));
    }
    if p.weight.k > MOST_DEPTH {
        return Err(shape("k", p.weight.k, "sums of more products do not fit 31 bits"));
    }
    Matmul::check(arch, &p.pairs(), &MatmulConfig::Mma(*c))
}

/// Rows from which on bytes are faster: 64 of 14336 x 4096 take an H200 46.5 us, and 41.6 decoded; 512 108 and 194.
const ROUNDED: u32 = 128;
/// Bytes that a copy moves.
const CHUNK: u32 = 16;
/// Products of two codes whose sum is below 2^31.
const MOST_DEPTH: u32 = (1 << 31) / (127 * 127);

/// Elements of a vector of x, words of one of codes: 16 bytes where they lie in one row.
fn widths(p: &Int8MatmulProblem) -> [usize; 2] {
    match p.weight.together(4) {
        Some(words) => [(16 / p.dtype.size()).min(4 * words as usize), words as usize],
        None => [1, 1],
    }
}

pub(super) fn address(p: &Int8MatmulProblem) -> AddressType {
    let [x, _, out] = p.dense().extents();
    let longest = x.max(out).max(p.weight.len() as usize);
    if longest > u32::MAX as usize { AddressType::U64 } else { AddressType::U32 }
}

/// Sizes of one launch.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Dims {
    m: u32,
    n: u32,
    k: u32,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn product<F: Float, NX: Size, NW: Size, NO: Size>(
    x: &[Vector<F, NX>],
    codes: &[Vector<u32, NW>],
    scb: &[f32],
    out: &mut [Vector<F, NO>],
    finish: Finish<F, F, NO>,
    dims: &Dims,
    #[comptime] config: LanesConfig,
    #[define(F)] _dtype: ElemType,
) {
    let LanesConfig { units, lanes, rows, columns } = comptime!(config);
    let (width, words) = (NX::value(), NW::value());
    let per_unit = comptime!((rows * columns) as usize);
    let (group, lane) = (UNIT_POS / lanes, UNIT_POS % lanes);
    let first = CUBE_POS_X * comptime!(config.rows_of_cube());
    let own = first + group * rows;
    let mut sums = Shared::<[f32]>::new_slice(comptime!(if lanes > 1 {
        units as usize * per_unit
    } else {
        1
    }));
    let mut col = 0u32;
    while col < dims.m {
        let mut acc = Array::<f32>::new(per_unit); // [rows, columns]
        #[unroll]
        for i in 0..per_unit {
            acc[i] = 0.0f32;
        }
        // Of a unit that is alone, as on a CPU, sums of neighbouring elements apart: registers are vectors there.
        let wide = comptime!(lanes == 1 && width > 1);
        let mut apart = Array::<Vector<f32, NX>>::new(comptime!(if wide { per_unit } else { 1 }));
        #[unroll]
        for i in 0..comptime!(if wide { per_unit } else { 1 }) {
            apart[i] = Vector::new(0.0f32);
        }
        if comptime!(width > 1) {
            let vectors = dims.k / comptime!(4 * words as u32);
            let mut at = u32::cast_from(lane);
            while at < vectors {
                let mut right = Array::<Vector<u32, NW>>::new(comptime!(rows as usize));
                #[unroll]
                for r in 0..rows {
                    // Rows past the end repeat the last; they are never stored.
                    let row = min(own + r, dims.n - 1) as usize;
                    right[comptime!(r as usize)] =
                        lifted(codes[row * vectors as usize + at as usize]);
                }
                #[unroll]
                for v in 0..comptime!(4 * words / width) {
                    let mut left = Array::<Vector<F, NX>>::new(comptime!(columns as usize));
                    #[unroll]
                    for c in 0..columns {
                        let row = min(col + c, dims.m - 1) as usize;
                        let from = (row * dims.k as usize) / NX::value();
                        left[comptime!(c as usize)] =
                            x[from + at as usize * comptime!(4 * words / width) + v];
                    }
                    if comptime!(wide) {
                        #[unroll]
                        for r in 0..rows {
                            let mut values = Vector::<f32, NX>::new(0.0f32);
                            #[unroll]
                            for e in 0..width {
                                let element = comptime!(v * width + e);
                                let word =
                                    right[comptime!(r as usize)].extract(comptime!(element / 4));
                                values.insert(e, code_of(word, comptime!(element as u32 % 4)));
                            }
                            #[unroll]
                            for c in 0..columns {
                                let i = comptime!((r * columns + c) as usize);
                                let x = Vector::cast_from(left[comptime!(c as usize)]);
                                apart[i] = fma(values, x, apart[i]);
                            }
                        }
                    }
                    #[unroll]
                    for e in 0..comptime!(if wide { 0 } else { width }) {
                        let element = comptime!(v * width + e);
                        #[unroll]
                        for r in 0..rows {
                            let word = right[comptime!(r as usize)].extract(comptime!(element / 4));
                            let code = code_of(word, comptime!(element as u32 % 4));
                            #[unroll]
                            for c in 0..columns {
                                let i = comptime!((r * columns + c) as usize);
                                let x = f32::cast_from(left[comptime!(c as usize)].extract(e));
                                acc[i] = fma(code, x, acc[i]);
                            }
                        }
                    }
                }
                at += lanes;
            }
        } else {
            let mut at = u32::cast_from(lane);
            while at < dims.k {
                #[unroll]
                for r in 0..rows {
                    let row = min(own + r, dims.n - 1) as usize;
                    let flat = row * dims.k as usize + at as usize;
                    let word = lifted(codes[flat / 4]).extract(0usize) >> ((flat % 4) as u32 * 8);
                    let code = code_of(word, 0u32);
                    #[unroll]
                    for c in 0..columns {
                        let line = min(col + c, dims.m - 1) as usize * dims.k as usize;
                        let x = f32::cast_from(x[line + at as usize].extract(0usize));
                        let i = comptime!((r * columns + c) as usize);
                        acc[i] = fma(code, x, acc[i]);
                    }
                }
                at += lanes;
            }
        }
        if comptime!(wide) {
            #[unroll]
            for i in 0..per_unit {
                #[unroll]
                for e in 0..width {
                    acc[i] += apart[i].extract(e);
                }
            }
        }
        let results = comptime!(rows * columns);
        if comptime!(lanes > 1) {
            // Sums of a group side by side, those of a unit apart by the cube: no two units of a plane meet in a bank.
            #[unroll]
            for i in 0..per_unit {
                sums[comptime!(i * units as usize) + UNIT_POS as usize] = acc[i];
            }
            #[unroll]
            for level in 0..comptime!(lanes.ilog2()) {
                sync_cube();
                let apart = comptime!((lanes >> (level + 1)) as usize);
                if lane < comptime!(apart as u32) {
                    #[unroll]
                    for i in 0..per_unit {
                        let at = comptime!(i * units as usize) + UNIT_POS as usize;
                        sums[at] += sums[at + apart];
                    }
                }
            }
            sync_cube();
            // Neighbouring units store neighbouring columns of y.
            let per_cube = comptime!(config.rows_of_cube());
            let mut id = UNIT_POS;
            while id < comptime!(config.rows_of_cube() * columns) {
                let (c, row) = (id / per_cube, id % per_cube);
                let i = row % rows * columns + c;
                let sum = sums[(i * units + row / rows * lanes) as usize];
                store(out, scb, &finish, sum, first + row, col + c, dims);
                id += units;
            }
            sync_cube();
        } else {
            #[unroll]
            for i in 0..results {
                let (n, m) = (own + comptime!(i / columns), col + comptime!(i % columns));
                store(out, scb, &finish, acc[comptime!(i as usize)], n, m, dims);
            }
        }
        col += columns;
    }
}

/// Stores the result of column `n` and row `m` of y.
#[cube]
fn store<F: Float, NO: Size>(
    out: &mut [Vector<F, NO>],
    scb: &[f32],
    finish: &Finish<F, F, NO>,
    sum: f32,
    n: u32,
    m: u32,
    dims: &Dims,
) {
    if n < dims.n && m < dims.m {
        let columns = Columns { first: 0usize.runtime(), count: dims.n };
        let to = m as usize * dims.n as usize + n as usize;
        let value = finish.one(scaled(sum, scb[n as usize], dims.k), to, n, &columns);
        out[to] = Vector::new(F::cast_from(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(m: u32, n: u32, k: u32, dtype: DType) -> Int8MatmulProblem {
        let weight = Weight::new(n, k).expect("valid");
        Int8MatmulProblem::new(m, weight, dtype).expect("rows")
    }

    #[test]
    fn every_profile_has_a_candidate_and_every_candidate_passes_its_check() {
        for name in arch::recorded() {
            let arch = ArchProfile::recorded(name).expect("recorded");
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                for m in [1, 2, 8, 9, 33, 4096] {
                    for p in [problem(m, 4096, 4096, dtype), problem(m, 37, 41, dtype)] {
                        let found = Int8Matmul::candidates(&arch, &p);
                        assert!(!found.is_empty(), "{name} {p:?}");
                        for c in found {
                            Int8Matmul::check(&arch, &p, &c).expect("candidates are checked");
                        }
                        Int8Matmul::simplest(&arch, &p).expect("there is one");
                    }
                }
            }
        }
    }

    #[test]
    fn x_is_rounded_where_bytes_multiply_faster() {
        let arch = |name| ArchProfile::recorded(name).expect("recorded");
        let rounds = |arch: &ArchProfile, m, k, dtype| {
            let p = problem(m, 4096, k, dtype);
            p.rounded_where_faster(arch, Activations { threshold: 6.0 }).activations.is_some()
        };
        let card = arch("rtx4090");
        assert!(rounds(&card, 128, 4096, DType::Bf16));
        assert!(rounds(&card, 4096, 4096, DType::F16));
        for (m, k, dtype) in
            [(127, 4096, DType::Bf16), (128, 4104, DType::Bf16), (128, 4096, DType::F32)]
        {
            assert!(!rounds(&card, m, k, dtype), "{m} {k} {dtype}");
        }
        let host = ArchProfile { backend: arch::Backend::Cpu, mma: Default::default(), ..card };
        assert!(!rounds(&host, 4096, 4096, DType::Bf16));
    }

    #[test]
    fn what_no_kernel_does_is_refused() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        let p = problem(1, 4096, 4096, DType::Bf16);
        let good = LanesConfig { units: 128, lanes: 32, rows: 4, columns: 1 };
        let check = |c| Int8Matmul::check(&arch, &p, &Int8MatmulConfig::Lanes(c));
        check(good).expect("feasible");
        for bad in [
            LanesConfig { units: 0, ..good },
            LanesConfig { lanes: 0, ..good },
            LanesConfig { lanes: 24, ..good },
            LanesConfig { rows: 0, ..good },
            LanesConfig { rows: 9, ..good },
            LanesConfig { columns: 9, ..good },
            LanesConfig { rows: 8, columns: 8, ..good },
            LanesConfig { units: 2048, ..good },
        ] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }
}
