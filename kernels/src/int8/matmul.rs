//! y = residual + gate · activation(x · wᵀ + bias)    x: `[m, k]`   w: `[n, k]` in 8 bits   y: `[m, n]`
//!
//! Five paths, chosen by [`Int8MatmulConfig`]:
//!
//! | path       | decodes                           | multiplies with       | used for                       |
//! |------------|-----------------------------------|-----------------------|--------------------------------|
//! | `Gemv`     | in registers                      | multiply-add          | any device                     |
//! | `Fused`    | in registers, to halves           | `mma.sync`            | CUDA, x in halves              |
//! | `Subgroup` | into shared memory                | plane-scope matrices  | Vulkan, up to 256 rows         |
//! | `Dense`    | into memory, by [`Int8Dequantize`] | any path of [`Matmul`] | many rows                     |
//! | `Bytes`    | no decoding                       | `mma.sync` of bytes   | CUDA, with x rounded to i8     |
//!
//! A matmul with [`Activations`] rounds x first. `Bytes` multiplies the codes, the other paths the
//! dequantised values. The file of a path holds its config, limits and loop; `Fused` and `Bytes` are in
//! `mma.rs`.
//!
//! Cost: `2·m·n·k` flop; codes, absmax, x and y once. `Gemv` decodes with three instructions an element, plus
//! one per row of x; `Fused` with two. For one row of 14336 x 4096 these instructions take 8 us and 4 us on
//! an H200, the bytes 14 us. `Gemv` reads codes once for every `columns` rows of x. `Dense` also writes and
//! reads a dense weight, 4 bytes an element.
//!
//! Time in us for 14336 x 4096 in bf16, tuned (H200 limited to the features of an RTX 4090; other formats are
//! in the README). Times with rounded x include its three launches:
//!
//! | m    | int8         | before        | x rounded    |
//! |------|--------------|---------------|--------------|
//! | 1    | 20.6 `Fused` | 21.3 `Gemv`   |              |
//! | 4    | 20.6 `Fused` | 31.7 `Gemv`   |              |
//! | 8    | 21.0 `Fused` | 50.2 `Gemv`   | 32.5 `Bytes` |
//! | 16   | 20.8 `Fused` | 84.1 `Dense`  | 37.6 `Bytes` |
//! | 64   | 41.6 `Fused` | 85.5 `Dense`  | 46.5 `Bytes` |
//! | 512  | 194 `Dense`  | 189 `Dense`   | 108 `Bytes`  |
//! | 4096 | 1130 `Dense` | 1131 `Dense`  | 684 `Bytes`  |
//!
//! `Fused` decodes a plane's codes once for all rows of the plane, and again in each row of planes. Decoding
//! limits it at 64 rows (one warp a scheduler); at 512 rows it takes 230 us. For one row of the smaller 4096
//! x 4096, `Gemv` takes 8.4 us and `Fused` 10.4 us, because it needs split-k to fill the card. Through Vulkan
//! one row takes 20.4 us, and 16 rows take 46.5 us with `Subgroup`.
//!
//! [`Int8Dequantize`]: super::Int8Dequantize
//! [`Matmul`]: crate::matmul::Matmul

use arch::{ArchProfile, DType};
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use super::activations::{Activations, Places, Rounding};
use super::dequantize::{self, Int8Dequantize};
use super::gemv;
use super::mma::{self, BytesOperands, OperandForm, RoundedOperands};
use super::problem::{Int8MatmulOperands, Int8MatmulProblem};
use super::subgroup;
use crate::dequant::{self, DequantizeConfig, GemvConfig, SubgroupConfig};
use crate::elem::rounding;
use crate::fits::{shape, stores};
use crate::matmul::{
    EpilogueBuffers, Matmul, MatmulConfig, MatmulOperands, MatmulProblem, MmaConfig, split_k,
};

/// The matmul kernel for int8 weights.
pub struct Int8Matmul;

/// Config of a matmul with an int8 weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "path", rename_all = "lowercase")]
pub enum Int8MatmulConfig {
    #[serde(rename = "lanes")]
    Gemv(GemvConfig),
    Dense(DenseConfig),
    Fused(MmaConfig),
    #[serde(rename = "plane")]
    Subgroup(SubgroupConfig),
    /// Sizes along k count pairs of bytes.
    Bytes(MmaConfig),
}

/// Dequantises the weight, then runs a dense matmul.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DenseConfig {
    pub dequantize: DequantizeConfig,
    pub matmul: MatmulConfig,
}

impl Int8MatmulProblem {
    /// Returns the matmul with x rounded if int8 matmul is faster than decoding: from 128 rows on, on
    /// devices with int8 instructions.
    #[must_use]
    pub fn rounded_where_faster(self, arch: &ArchProfile, activations: Activations) -> Self {
        let rounded = Self { activations: Some(activations), ..self };
        let fits = |c: &MmaConfig| mma::check_bytes(arch, &rounded, c).is_ok();
        let faster = self.m >= ROUNDED && mma::candidates_of_bytes(arch, &rounded).iter().any(fits);
        if faster { rounded } else { self }
    }

    /// Returns the rounding of x for this config, and the offsets of its results behind the config's other
    /// scratch.
    fn rounding(&self, config: &Int8MatmulConfig) -> Option<(Rounding, Places)> {
        let Activations { threshold } = self.activations?;
        let codes = matches!(config, Int8MatmulConfig::Bytes(_));
        let rounding =
            Rounding { m: self.m, k: self.weight.k, dtype: self.dtype, threshold, codes };
        Some((rounding, rounding.places(self.other_scratch(config))))
    }

    /// Bytes of scratch, without the rounded x.
    fn other_scratch(&self, config: &Int8MatmulConfig) -> u64 {
        match config {
            Int8MatmulConfig::Dense(_) => dequantize::out_bytes(&self.dequantized()) as u64,
            Int8MatmulConfig::Gemv(_) => 0,
            Int8MatmulConfig::Fused(MmaConfig { parts, .. })
            | Int8MatmulConfig::Bytes(MmaConfig { parts, .. })
            | Int8MatmulConfig::Subgroup(SubgroupConfig { parts, .. }) => {
                split_k::scratch_bytes(&self.dense(), *parts)
            }
        }
    }

    /// Returns the form in which codes reach `mma.sync`, and the matmul that counts elements in this form.
    fn operand_form(&self, config: &Int8MatmulConfig) -> (OperandForm, MatmulProblem) {
        match (config, self.rounding(config)) {
            (Int8MatmulConfig::Bytes(_), Some((rounding, _))) => {
                (OperandForm::Bytes { outliers: rounding.outliers() }, self.pairs())
            }
            _ => (OperandForm::Halves { bf16: self.dtype == DType::Bf16 }, self.paired_weight()),
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
        format!("{} w{}{rounded}", p.dense().bucket(), p.widths()[1])
    }

    fn candidates(arch: &ArchProfile, p: &Int8MatmulProblem) -> Vec<Int8MatmulConfig> {
        let feasible = |c: &Int8MatmulConfig| Self::check(arch, p, c).is_ok();
        let gemv = GemvConfig::candidates(arch, p.m).into_iter().map(Int8MatmulConfig::Gemv);
        let dense = denses(arch, p).into_iter().map(Int8MatmulConfig::Dense);
        let fused = mma::candidates_of_halves(arch, p).into_iter().map(Int8MatmulConfig::Fused);
        let bytes = mma::candidates_of_bytes(arch, p).into_iter().map(Int8MatmulConfig::Bytes);
        let subgroups = dequant::candidates(arch, &subgroup::subgroup_problem(p));
        let subgroups = subgroups.into_iter().map(Int8MatmulConfig::Subgroup);
        let on_tensor_cores: Vec<_> =
            bytes.chain(fused).chain(subgroups).filter(feasible).collect();
        // With few rows a dense weight does not pay off; with many rows codes are read repeatedly.
        let all: Vec<_> = match p.m {
            0..=2 => gemv.chain(on_tensor_cores).collect(),
            3..=8 => on_tensor_cores.into_iter().chain(gemv).collect(),
            _ if on_tensor_cores.is_empty() && p.m <= 32 => gemv.chain(dense).collect(),
            _ if on_tensor_cores.is_empty() => dense.chain(gemv.take(2)).collect(),
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
        match config {
            Int8MatmulConfig::Gemv(c) => c.check(arch, p.weight.n),
            Int8MatmulConfig::Fused(c) => mma::check_halves(arch, p, c),
            Int8MatmulConfig::Bytes(c) => mma::check_bytes(arch, p, c),
            Int8MatmulConfig::Subgroup(c) => {
                dequant::check(arch, &subgroup::subgroup_problem(p), c)
            }
            Int8MatmulConfig::Dense(c) => {
                Int8Dequantize::check(arch, &p.dequantized(), &c.dequantize)?;
                if c.matmul.splits() > 1 {
                    let why = "split-k needs scratch, which the dense weight fills";
                    return Err(shape("parts", c.matmul.splits(), why));
                }
                Matmul::check(arch, &p.dense(), &c.matmul)
            }
        }
    }

    fn cost(p: &Int8MatmulProblem) -> Cost {
        let dense = p.dense().cost();
        let weight = p.weight.len() * p.dtype.size() as u64;
        Cost { flops: dense.flops, bytes: dense.bytes - weight + p.weight.bytes() }
    }

    fn baseline(arch: &ArchProfile, p: &Int8MatmulProblem) -> Result<Int8MatmulConfig, Infeasible> {
        let config = Int8MatmulConfig::Gemv(GemvConfig::baseline(arch));
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(queue: &Queue, p: &Int8MatmulProblem, seed: u64) -> Int8MatmulOperands {
        let [x, _, out] = p.dense().extents();
        let (bias, matrix) = ((p.weight.n as usize, p.dtype), (out, p.dtype));
        Int8MatmulOperands {
            x: crate::noise(queue, x, p.dtype, 7 * seed),
            weight: super::noise(queue, p.weight, 7 * seed + 1),
            out: queue.empty((out * p.dtype.size()).next_multiple_of(4)),
            epilogue: EpilogueBuffers::noise(queue, p.epilogue, bias, matrix, 7 * seed + 3),
        }
    }

    fn outputs(p: &Int8MatmulProblem, operands: &Int8MatmulOperands) -> Vec<Output> {
        // Only some paths round the weight.
        let rounding = rounding(p.dtype);
        let tolerance = rounding + f64::from(p.weight.k).sqrt() * 2f64.powi(-22);
        let len = p.dense().extents()[2];
        vec![Output { handle: operands.out.clone(), dtype: p.dtype, len, tolerance }]
    }

    /// Scratch for the dense weight or partial sums, and for the rounded x.
    fn scratch_bytes(p: &Int8MatmulProblem, config: &Int8MatmulConfig) -> u64 {
        match p.rounding(config) {
            Some((_, places)) => places.end,
            None => p.other_scratch(config),
        }
    }

    fn launch(
        queue: &Queue,
        p: &Int8MatmulProblem,
        config: &Int8MatmulConfig,
        operands: &Int8MatmulOperands,
        scratch: Option<&Handle>,
    ) {
        let mut x = operands.x.clone();
        let rounded = p.rounding(config);
        if let Some((rounding, places)) = &rounded {
            let scratch = scratch.expect("a rounded x has its scratch");
            rounding.launch(queue, &operands.x, scratch, places);
            x = scratch.clone().offset_start(places.values);
        }
        match config {
            Int8MatmulConfig::Gemv(c) => gemv::launch(queue, p, c, x, operands),
            Int8MatmulConfig::Dense(c) => {
                let rhs = scratch.expect("a dense weight has its scratch").clone();
                let weight = p.dequantized();
                dequantize::launch(queue, &weight, &c.dequantize, &operands.weight, &rhs);
                let operands = MatmulOperands {
                    lhs: x,
                    rhs,
                    out: operands.out.clone(),
                    epilogue: operands.epilogue.clone(),
                    rows: None,
                    second: None,
                    norm: None,
                };
                Matmul::launch(queue, &p.dense(), &c.matmul, &operands, None);
            }
            Int8MatmulConfig::Subgroup(c) => subgroup::launch(queue, p, c, x, operands, scratch),
            Int8MatmulConfig::Fused(c) | Int8MatmulConfig::Bytes(c) => {
                let (form, matmul) = p.operand_form(config);
                let bytes = matches!(form, OperandForm::Bytes { .. });
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
                mma::launch(queue, &matmul, *c, form, &operands);
            }
        }
    }
}

/// Minimum rows for int8 matmul. On an H200, 64 rows of 14336 x 4096 take 46.5 us, and 41.6 us with decoding;
/// 512 rows take 108 us and 194 us.
const ROUNDED: u32 = 128;

/// Returns candidate configs with a dense weight.
fn denses(arch: &ArchProfile, p: &Int8MatmulProblem) -> Vec<DenseConfig> {
    let decode = Int8Dequantize::candidates(arch, &p.dequantized());
    let Some(dequantize) = decode.first().copied() else { return Vec::new() };
    let all = Matmul::candidates(arch, &p.dense()).into_iter().filter(|c| c.splits() == 1);
    all.take(4).map(|matmul| DenseConfig { dequantize, matmul }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Weight;
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
                        Int8Matmul::baseline(&arch, &p).expect("there is one");
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
        let good = GemvConfig { units: 128, lanes: 32, rows: 4, columns: 1 };
        let check = |c| Int8Matmul::check(&arch, &p, &Int8MatmulConfig::Gemv(c));
        check(good).expect("feasible");
        for bad in [
            GemvConfig { units: 0, ..good },
            GemvConfig { lanes: 0, ..good },
            GemvConfig { lanes: 24, ..good },
            GemvConfig { rows: 0, ..good },
            GemvConfig { rows: 9, ..good },
            GemvConfig { columns: 9, ..good },
            GemvConfig { rows: 8, columns: 8, ..good },
            GemvConfig { units: 2048, ..good },
        ] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }
}
