//! Matmuls with a weight in Q8_0.
//!
//! | path       | multiplies with              | rows of x                             |
//! |------------|------------------------------|---------------------------------------|
//! | `Gemv`     | multiply-adds, codes decoded in registers: [`dequant::gemv`] | few, on any device |
//! | `Subgroup` | matrices of a plane, codes decoded into shared memory: [`dequant`] | 3 to 256, through Vulkan |
//! | `Dense`    | the matmul of the dense weight | many                                |

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use super::{
    DequantizeOperands, DequantizeProblem, Q8_0Dequantize, QuantizedValues, QuantizedValuesLaunch,
    Weight, WeightBuffers, out_bytes,
};
use crate::dequant::gemv::{self, DimsLaunch};
use crate::dequant::{
    self, DequantizeConfig, Dims, GemvConfig, SubgroupConfig, SubgroupPlan, SubgroupProblem,
};
use crate::elem::{elem, rounding};
use crate::fits::{shape, stores};
use crate::launch::{index_width, launch};
use crate::matmul::{
    Epilogue, EpilogueBuffers, Finish, FinishLaunch, InvalidMatmul, Layout, Matmul, MatmulConfig,
    MatmulOperands, MatmulProblem, Precision, split_k,
};

/// The matmul kernel for Q8_0 weights.
pub struct Q8_0Matmul;

/// One matmul. Build it with [`Q8_0MatmulProblem::new`], which checks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Q8_0MatmulProblem {
    pub m: u32,
    pub weight: Weight,
    /// Type of x, bias and y: f32, f16 or bf16.
    pub dtype: DType,
    /// Bias has `[n]` elements; the other operands have the shape of y.
    pub epilogue: Epilogue,
}

/// Config of a matmul with a Q8_0 weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "path", rename_all = "lowercase")]
pub enum Q8_0MatmulConfig {
    Gemv(GemvConfig),
    #[serde(rename = "plane")]
    Subgroup(SubgroupConfig),
    Dense(DenseConfig),
}

/// Dequantises the weight, then runs a dense matmul.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DenseConfig {
    pub dequantize: DequantizeConfig,
    pub matmul: MatmulConfig,
}

/// Device buffers of one matmul.
#[derive(Debug, Clone)]
pub struct Q8_0MatmulOperands {
    pub x: Handle,
    pub weight: WeightBuffers,
    pub out: Handle,
    pub epilogue: EpilogueBuffers,
}

impl Q8_0MatmulProblem {
    /// Creates the matmul of x `[m, k]` and the weight.
    ///
    /// # Errors
    /// A size of 0.
    pub fn new(m: u32, weight: Weight, dtype: DType) -> Result<Self, InvalidMatmul> {
        if m == 0 {
            return Err(InvalidMatmul::Empty { axis: "m" });
        }
        Ok(Self { m, weight, dtype, epilogue: Epilogue::default() })
    }

    /// Returns the matmul with the dense weight.
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

    const fn dequantized(&self) -> DequantizeProblem {
        DequantizeProblem { weight: self.weight, out: self.dtype }
    }

    fn subgroup_problem(&self) -> SubgroupProblem {
        let (Weight { n, k }, precision) = (self.weight, self.dense().precision);
        SubgroupProblem { m: self.m, n, k, precision, bits: 8, glu: false }
    }

    /// Vector width of x in elements: 16 bytes.
    const fn width(&self) -> usize {
        16 / self.dtype.size()
    }

    fn address(&self) -> AddressType {
        let [x, _, out] = self.dense().extents();
        let longest = x.max(out).max(self.weight.len() as usize);
        index_width(longest as u64)
    }
}

/// Words of a vector of codes; a block is two vectors.
const WORDS: usize = 4;

/// Maximum rows of x for which codes are always multiplied directly. For more rows the weight may be
/// dequantised first.
pub(crate) const MAX_FUSED_ROWS: u32 = 32;

impl Kernel for Q8_0Matmul {
    type Problem = Q8_0MatmulProblem;
    type Config = Q8_0MatmulConfig;
    type Operands = Q8_0MatmulOperands;

    const NAME: &'static str = "q8_0";
    const VERSION: u32 = 1;

    fn bucket(p: &Q8_0MatmulProblem) -> String {
        p.dense().bucket()
    }

    fn candidates(arch: &ArchProfile, p: &Q8_0MatmulProblem) -> Vec<Q8_0MatmulConfig> {
        let feasible = |c: &Q8_0MatmulConfig| Self::check(arch, p, c).is_ok();
        let gemv = GemvConfig::candidates(arch, p.m).into_iter().map(Q8_0MatmulConfig::Gemv);
        let subgroups = dequant::candidates(arch, &p.subgroup_problem())
            .into_iter()
            .map(Q8_0MatmulConfig::Subgroup);
        let dense = denses(arch, p).into_iter().map(Q8_0MatmulConfig::Dense);
        // With few rows a dense weight does not pay off; with many rows codes are read repeatedly.
        let all: Vec<_> = match p.m {
            0..=2 => gemv.chain(subgroups).collect(),
            3..=MAX_FUSED_ROWS => subgroups.chain(gemv).collect(),
            _ => subgroups.chain(dense).chain(gemv.take(2)).collect(),
        };
        all.into_iter().filter(feasible).collect()
    }

    fn check(
        arch: &ArchProfile,
        p: &Q8_0MatmulProblem,
        config: &Q8_0MatmulConfig,
    ) -> Result<(), Infeasible> {
        stores(arch, [p.dtype])?;
        match config {
            Q8_0MatmulConfig::Gemv(c) => c.check(arch, p.weight.n),
            Q8_0MatmulConfig::Subgroup(c) => dequant::check(arch, &p.subgroup_problem(), c),
            Q8_0MatmulConfig::Dense(c) => {
                Q8_0Dequantize::check(arch, &p.dequantized(), &c.dequantize)?;
                if c.matmul.splits() > 1 {
                    let why = "split-k needs scratch, which the dense weight fills";
                    return Err(shape("parts", c.matmul.splits(), why));
                }
                Matmul::check(arch, &p.dense(), &c.matmul)
            }
        }
    }

    fn cost(p: &Q8_0MatmulProblem) -> Cost {
        let dense = p.dense().cost();
        let weight = p.weight.len() * p.dtype.size() as u64;
        Cost { flops: dense.flops, bytes: dense.bytes - weight + p.weight.bytes() }
    }

    fn baseline(arch: &ArchProfile, p: &Q8_0MatmulProblem) -> Result<Q8_0MatmulConfig, Infeasible> {
        let config = Q8_0MatmulConfig::Gemv(GemvConfig::baseline(arch));
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(queue: &Queue, p: &Q8_0MatmulProblem, seed: u64) -> Q8_0MatmulOperands {
        let [x, _, out] = p.dense().extents();
        let (bias, matrix) = ((p.weight.n as usize, p.dtype), (out, p.dtype));
        Q8_0MatmulOperands {
            x: crate::noise(queue, x, p.dtype, 7 * seed),
            weight: WeightBuffers::noise(queue, &p.weight, 7 * seed + 1),
            out: queue.empty((out * p.dtype.size()).next_multiple_of(4)),
            epilogue: EpilogueBuffers::noise(queue, p.epilogue, bias, matrix, 7 * seed + 3),
        }
    }

    fn outputs(p: &Q8_0MatmulProblem, operands: &Q8_0MatmulOperands) -> Vec<Output> {
        // Only some paths round the weight.
        let rounding = rounding(p.dtype);
        let tolerance = rounding + f64::from(p.weight.k).sqrt() * 2f64.powi(-22);
        let len = p.dense().extents()[2];
        vec![Output { handle: operands.out.clone(), dtype: p.dtype, len, tolerance }]
    }

    /// Scratch for the dense weight or partial sums.
    fn scratch_bytes(p: &Q8_0MatmulProblem, config: &Q8_0MatmulConfig) -> u64 {
        match config {
            Q8_0MatmulConfig::Gemv(_) => 0,
            Q8_0MatmulConfig::Subgroup(c) => split_k::scratch_bytes(&p.dense(), c.parts),
            Q8_0MatmulConfig::Dense(_) => out_bytes(&p.dequantized()) as u64,
        }
    }

    fn launch(
        queue: &Queue,
        p: &Q8_0MatmulProblem,
        config: &Q8_0MatmulConfig,
        operands: &Q8_0MatmulOperands,
        scratch: Option<&Handle>,
    ) {
        let Q8_0MatmulOperands { x, weight, out, epilogue } = operands;
        let (dense, Weight { n, k }) = (p.dense(), p.weight);
        let [x_len, _, out_len] = dense.extents();
        match config {
            // SAFETY: the extents follow from the problem, and the kernel checks its edges.
            Q8_0MatmulConfig::Gemv(c) => unsafe {
                launch!(
                    queue,
                    multiply_few,
                    CubeCount::Static(n.div_ceil(c.rows_of_cube()), 1, 1),
                    CubeDim::new_1d(c.units),
                    p.address(),
                    p.width(),
                    WORDS,
                    1,
                    BufferArg::from_raw_parts(x.clone(), x_len / p.width()),
                    QuantizedValuesLaunch::from_buffers(&p.weight, weight, WORDS),
                    BufferArg::from_raw_parts(out.clone(), out_len),
                    FinishLaunch::from_buffers(p.epilogue, epilogue, n as usize, out_len),
                    DimsLaunch::new(p.m, n, k),
                    *c,
                    elem(p.dtype),
                );
            },
            Q8_0MatmulConfig::Subgroup(c) => {
                let plan = dequant::plan(queue.profile(), &p.subgroup_problem(), c)
                    .expect("it was checked");
                let (cubes, dim) = p.subgroup_problem().grid(&plan, c);
                // A kernel without partial sums binds another buffer in their place and never writes it.
                let (sums, sums_len, finish) = match scratch {
                    Some(sums) if c.parts > 1 => {
                        (sums, out_len * c.parts as usize, FinishLaunch::nothing())
                    }
                    _ => {
                        let own =
                            FinishLaunch::from_buffers(p.epilogue, epilogue, n as usize, out_len);
                        (out, 1, own)
                    }
                };
                // SAFETY: the extents follow from the problem, and the kernel checks its edges.
                unsafe {
                    launch!(
                        queue,
                        multiply_planes,
                        cubes,
                        dim,
                        p.address(),
                        4,
                        WORDS,
                        1,
                        BufferArg::from_raw_parts(x.clone(), x_len / 4),
                        QuantizedValuesLaunch::from_buffers(&p.weight, weight, WORDS),
                        BufferArg::from_raw_parts(out.clone(), out_len),
                        BufferArg::from_raw_parts(sums.clone(), sums_len),
                        finish,
                        p.m,
                        n,
                        k,
                        c.part_steps(k),
                        plan,
                        elem(p.dtype),
                    );
                }
                if c.parts > 1 {
                    split_k::add(queue, &dense, sums, c.parts, false, out, epilogue);
                }
            }
            Q8_0MatmulConfig::Dense(c) => {
                let rhs = scratch.expect("a dense weight has its scratch").clone();
                let decoded = DequantizeOperands { weight: weight.clone(), out: rhs.clone() };
                Q8_0Dequantize::launch(queue, &p.dequantized(), &c.dequantize, &decoded, None);
                let (lhs, out) = (x.clone(), out.clone());
                let epilogue = epilogue.clone();
                let operands = MatmulOperands {
                    lhs,
                    rhs,
                    out,
                    epilogue,
                    rows: None,
                    norm: None,
                    second: None,
                };
                Matmul::launch(queue, &dense, &c.matmul, &operands, None);
            }
        }
    }
}

/// Returns candidate configs with a dense weight.
fn denses(arch: &ArchProfile, p: &Q8_0MatmulProblem) -> Vec<DenseConfig> {
    let decode = Q8_0Dequantize::candidates(arch, &p.dequantized());
    let Some(dequantize) = decode.first().copied() else { return Vec::new() };
    let all = Matmul::candidates(arch, &p.dense()).into_iter().filter(|c| c.splits() == 1);
    all.take(4).map(|matmul| DenseConfig { dequantize, matmul }).collect()
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn multiply_few<F: Float, NX: Size, NW: Size, NO: Size>(
    x: &[Vector<F, NX>],
    weight: &QuantizedValues<NW>,
    out: &mut [Vector<F, NO>],
    finish: Finish<F, F, NO>,
    dims: &gemv::Dims,
    #[comptime] config: GemvConfig,
    #[define(F)] _dtype: ElemType,
) {
    gemv::multiply::<QuantizedValues<NW>, F, NX, NW, NO>(x, weight, out, &finish, dims, config);
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "operands, results, sizes")]
fn multiply_planes<F: Float, NX: Size, NW: Size, NO: Size>(
    x: &[Vector<F, NX>],
    weight: &QuantizedValues<NW>,
    out: &mut [Vector<F, NO>],
    partials: &mut [f32],
    finish: Finish<F, F, NO>,
    m: u32,
    n: u32,
    k: u32,
    part_steps: u32,
    #[comptime] plan: SubgroupPlan,
    #[define(F)] _dtype: ElemType,
) {
    let dims = Dims { m, n, k, part_steps };
    dequant::subgroup_matmul::<QuantizedValues<NW>, F, NX, NO>(
        x, weight, out, partials, &finish, &dims, plan,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_has_a_candidate_and_every_candidate_passes_its_check() {
        let weight = Weight::new(4096, 4096).expect("whole blocks");
        Weight::new(8, 48).expect_err("half a block");
        for name in arch::recorded() {
            let arch = ArchProfile::recorded(name).expect("recorded");
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                for m in [1, 2, 8, 9, 33, 4096] {
                    let p = Q8_0MatmulProblem::new(m, weight, dtype).expect("rows");
                    let found = Q8_0Matmul::candidates(&arch, &p);
                    assert!(!found.is_empty(), "{name} {p:?}");
                    for c in found {
                        Q8_0Matmul::check(&arch, &p, &c).expect("candidates are checked");
                    }
                    Q8_0Matmul::baseline(&arch, &p).expect("there is one");
                }
            }
        }
    }
}
