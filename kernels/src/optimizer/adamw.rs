//! The AdamW step, and the elementwise steps of Muon.

use arch::{ArchProfile, DType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use super::codes::{BLOCK, signed_map, unsigned_map};
use super::control::{CONTROL, Control};
use super::step::{NumbersLaunch, Plan, step, step_of_codes};
use crate::elem::elem;
use crate::fits::stores;
use crate::launch::{index_width, launch};
use crate::rows::RowPlan;

/// The AdamW kernel.
pub struct AdamW;

/// Formulas of a step.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    #[default]
    AdamW,
    /// m = β₁ m + (1 - β₁) g, and weights = β₁ m + (1 - β₁) g, Nesterov's direction. v is left as it is.
    Momentum,
    /// p = (1 - rate · decay) p - rate · gradient, without the factor of clipping. m and v are left as they are.
    Descent,
}

impl Rule {
    pub const fn name(self) -> &'static str {
        match self {
            Self::AdamW => "adamw",
            Self::Momentum => "momentum",
            Self::Descent => "descent",
        }
    }
}

/// Storage of the moments m and v.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Moments {
    F32,
    /// Rounded stochastically.
    Bf16,
    /// Codes of 8 bits with one absmax per [`BLOCK`].
    Int8,
}

impl Moments {
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::Int8];

    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }

    /// Bytes of m and v for `len` parameters.
    pub const fn bytes(self, len: u64) -> u64 {
        match self {
            Self::F32 => 8 * len,
            Self::Bf16 => 4 * len,
            Self::Int8 => 2 * len + 8 * (len / BLOCK as u64),
        }
    }
}

/// Numbers of one step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Scalars {
    pub learning_rate: f32,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f32,
    /// Share of a weight that a step takes away, times the learning rate.
    pub weight_decay: f32,
    /// Seed of stochastic rounding.
    pub seed: u32,
    /// Index of the first parameter among those that share the seed.
    #[serde(default)]
    pub first: u32,
}

/// Flat parameters of one group. End with [`AdamWProblem::checked`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AdamWProblem {
    /// Number of parameters, a multiple of [`BLOCK`].
    pub len: u64,
    /// Type of the weights.
    pub weights: DType,
    /// True if a master in f32 is updated and the weights are its rounded copy. Without one, the weights themselves are
    /// updated; in bf16 they are rounded stochastically.
    pub master: bool,
    pub moments: Moments,
    pub scalars: Scalars,
    #[serde(default)]
    pub rule: Rule,
}

/// An invalid AdamW problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidAdamW {
    #[error("expected a positive multiple of 256 parameters, got {0}\nhint: pad the buffers")]
    Length(u64),
    #[error("expected weights in f32, f16 or bf16, got {0}\nhint: cast them")]
    DType(DType),
    #[error("expected master weights for f16 weights\nhint: add one, or train in bf16")]
    NoMaster,
    #[error(
        "momentum and descent need moments in f32, and momentum no master weights\nhint: use AdamW"
    )]
    Momentum,
    #[error("expected {name} {range}, got {value}\nhint: check the options of the optimizer")]
    Scalar { name: &'static str, range: &'static str, value: f64 },
}

impl AdamWProblem {
    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidAdamW`].
    pub fn checked(self) -> Result<Self, InvalidAdamW> {
        if self.len == 0 || !self.len.is_multiple_of(BLOCK.into()) {
            return Err(InvalidAdamW::Length(self.len));
        }
        let plain = self.moments == Moments::F32 && (self.rule != Rule::Momentum || !self.master);
        if self.rule != Rule::AdamW && !plain {
            return Err(InvalidAdamW::Momentum);
        }
        match (self.weights, self.master) {
            (DType::F16, false) => return Err(InvalidAdamW::NoMaster),
            (DType::F32 | DType::Bf16 | DType::F16, _) => {}
            (other, _) => return Err(InvalidAdamW::DType(other)),
        }
        let Scalars { learning_rate, beta1, beta2, eps, weight_decay, .. } = self.scalars;
        let (wide, below) = ("of 0 or more", "from 0 to below 1");
        for (name, value, range, fits) in [
            ("a learning rate", f64::from(learning_rate), wide, learning_rate >= 0.0),
            ("beta1", beta1, below, (0.0..1.0).contains(&beta1)),
            ("beta2", beta2, below, (0.0..1.0).contains(&beta2)),
            ("eps", f64::from(eps), "above 0", eps > 0.0),
            ("a weight decay", f64::from(weight_decay), wide, weight_decay >= 0.0),
        ] {
            if !fits || !value.is_finite() {
                return Err(InvalidAdamW::Scalar { name, range, value });
            }
        }
        Ok(self)
    }

    const fn vectors(&self) -> u64 {
        self.len / 4
    }
}

/// Launch shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AdamWConfig {
    /// Units of a cube.
    pub units: u32,
    /// Units of a block of 8-bit moments.
    pub lanes: u32,
}

/// Device buffers of moments in 8 bits.
#[derive(Debug, Clone)]
pub struct BlockBuffers {
    /// f32 `[2, len / BLOCK]`: largest magnitudes of m, then of v.
    pub absmax: Handle,
    /// f32 `[512]`: [`signed_map`], then [`unsigned_map`].
    pub maps: Handle,
}

impl BlockBuffers {
    /// Returns the buffers of `len` moments that are 0.
    pub fn zeros(queue: &Queue, len: u64) -> Self {
        let absmax = vec![0.0f32; 2 * (len / u64::from(BLOCK)) as usize];
        let maps = [signed_map(), unsigned_map()].concat();
        Self {
            absmax: queue.upload(f32::as_bytes(&absmax)),
            maps: queue.upload(f32::as_bytes(&maps)),
        }
    }
}

/// Device buffers.
#[derive(Debug, Clone)]
pub struct AdamWOperands {
    /// f32 `[len]`
    pub gradient: Handle,
    /// `[len]`, written; also read without a master.
    pub weights: Handle,
    /// f32 `[len]`
    pub master: Option<Handle>,
    /// First moments `[len]`; not for descent.
    pub m: Option<Handle>,
    /// Second moments `[len]`; for AdamW alone.
    pub v: Option<Handle>,
    /// Buffers of moments in 8 bits.
    pub blocks: Option<BlockBuffers>,
    /// f32 `[CONTROL]`, read only.
    pub control: Handle,
}

impl Kernel for AdamW {
    type Problem = AdamWProblem;
    type Config = AdamWConfig;
    type Operands = AdamWOperands;

    const NAME: &'static str = "adamw";
    const VERSION: u32 = 1;

    fn bucket(p: &AdamWProblem) -> String {
        let master = if p.master { " master" } else { "" };
        let rule = match p.rule {
            Rule::AdamW => format!("moments {}", p.moments.name()),
            other => other.name().to_owned(),
        };
        format!("{}{master} {rule} {}", p.weights, p.len.next_power_of_two())
    }

    fn candidates(arch: &ArchProfile, p: &AdamWProblem) -> Vec<AdamWConfig> {
        Self::baseline(arch, p).into_iter().collect()
    }

    fn check(arch: &ArchProfile, p: &AdamWProblem, c: &AdamWConfig) -> Result<(), Infeasible> {
        let moments = if p.moments == Moments::Bf16 { DType::Bf16 } else { DType::F32 };
        stores(arch, [p.weights, moments])?;
        RowPlan::new(arch, c.units, c.lanes).check(arch)
    }

    fn cost(p: &AdamWProblem) -> Cost {
        let size = p.weights.size() as u64;
        let weights = if p.master { 8 + size } else { 2 * size };
        let (flops, moved) = match p.rule {
            Rule::AdamW => (12, weights * p.len + 2 * p.moments.bytes(p.len)),
            Rule::Momentum => (6, (size + 8) * p.len),
            Rule::Descent => (3, weights * p.len),
        };
        Cost { flops: flops * p.len, bytes: 4 * p.len + moved }
    }

    fn baseline(arch: &ArchProfile, p: &AdamWProblem) -> Result<AdamWConfig, Infeasible> {
        let config = match arch.cores() {
            Some(units) => AdamWConfig { units, lanes: 1 },
            None => AdamWConfig { units: 256, lanes: BLOCK / 4 },
        };
        Self::check(arch, p, &config).map(|()| config)
    }

    /// Moments of 0, as before the first step.
    fn operands(queue: &Queue, p: &AdamWProblem, seed: u64) -> AdamWOperands {
        let len = p.len as usize;
        let zeros = |bytes: usize| queue.upload(&vec![0; bytes]);
        let moment = match p.moments {
            Moments::F32 => 4 * len,
            Moments::Bf16 => 2 * len,
            Moments::Int8 => len,
        };
        let control = Control { factor: 1.0, c1: 0.1, c2: 0.001, steps: 1.0, ..Control::new(1.0) };
        AdamWOperands {
            gradient: crate::noise(queue, len, DType::F32, 3 * seed),
            weights: crate::noise(queue, len, p.weights, 3 * seed + 1),
            master: p.master.then(|| crate::noise(queue, len, DType::F32, 3 * seed + 1)),
            m: Some(zeros(moment)),
            v: Some(zeros(moment)),
            blocks: (p.moments == Moments::Int8).then(|| BlockBuffers::zeros(queue, p.len)),
            control: queue.upload(f32::as_bytes(&control.to_array())),
        }
    }

    /// Empty: the kernel updates its inputs in place, so candidates cannot be compared.
    fn outputs(_: &AdamWProblem, _: &AdamWOperands) -> Vec<Output> {
        Vec::new()
    }

    fn launch(
        queue: &Queue,
        p: &AdamWProblem,
        c: &AdamWConfig,
        operands: &AdamWOperands,
        _scratch: Option<&Handle>,
    ) {
        let arch = queue.profile();
        let plan = Plan::new(arch, p, c);
        let vectors = p.vectors() as usize;
        let cubes = crate::cubes(arch, p.vectors(), c.units);
        let Scalars { learning_rate, beta1, beta2, eps, weight_decay, seed, first } = p.scalars;
        let scalars = NumbersLaunch::new(
            learning_rate,
            1.0 - learning_rate * weight_decay,
            beta1 as f32,
            (1.0 - beta1) as f32,
            beta2 as f32,
            (1.0 - beta2) as f32,
            eps,
            seed,
            first,
        );
        let master = operands.master.as_ref().unwrap_or(&operands.control);
        let masters = if p.master { vectors } else { CONTROL / 4 };
        // A kernel does not touch what its rule leaves alone.
        let moment = |own: &Option<Handle>| match own {
            Some(own) => (own.clone(), vectors),
            None => (operands.control.clone(), CONTROL / 4),
        };
        let (m, v) = (moment(&operands.m), moment(&operands.v));
        // SAFETY: the lengths follow from the problem, and the kernels access whole vectors below them.
        unsafe {
            let matrix = |handle: &Handle| BufferArg::from_raw_parts(handle.clone(), vectors);
            match &operands.blocks {
                None => launch!(
                    queue,
                    step,
                    CubeCount::Static(cubes, 1, 1),
                    CubeDim::new_1d(c.units),
                    index_width(p.len),
                    matrix(&operands.gradient),
                    matrix(&operands.weights),
                    BufferArg::from_raw_parts(master.clone(), masters),
                    BufferArg::from_raw_parts(m.0, m.1),
                    BufferArg::from_raw_parts(v.0, v.1),
                    BufferArg::from_raw_parts(operands.control.clone(), CONTROL),
                    scalars,
                    vectors as u32,
                    plan,
                    elem(p.weights),
                    elem(if p.moments == Moments::Bf16 { DType::Bf16 } else { DType::F32 }),
                ),
                Some(blocks) => launch!(
                    queue,
                    step_of_codes,
                    CubeCount::Static(cubes, 1, 1),
                    CubeDim::new_1d(c.units),
                    index_width(p.len),
                    matrix(&operands.gradient),
                    matrix(&operands.weights),
                    BufferArg::from_raw_parts(master.clone(), masters),
                    BufferArg::from_raw_parts(m.0, m.1),
                    BufferArg::from_raw_parts(v.0, v.1),
                    BufferArg::from_raw_parts(
                        blocks.absmax.clone(),
                        2 * p.len as usize / BLOCK as usize
                    ),
                    BufferArg::from_raw_parts(blocks.maps.clone(), 512),
                    BufferArg::from_raw_parts(operands.control.clone(), CONTROL),
                    scalars,
                    (p.len / u64::from(BLOCK)) as u32,
                    plan,
                    elem(p.weights),
                ),
            }
        }
    }
}
