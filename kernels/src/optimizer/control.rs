//! The norm of a gradient, and the state of an optimizer that stays on the device.

use arch::{ArchProfile, DType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use crate::launch::{index_width, launch};
use crate::rows::{RowPlan, row_sum};

/// f32 in the state of an optimizer: the fields of [`Control`], in order.
pub const CONTROL: usize = 8;

/// State of an optimizer on the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Control {
    /// Factor of gradients: clipping divided by the loss scale.
    pub factor: f32,
    /// 1 if the last gradient was finite, else 0.
    pub finite: f32,
    /// 1 - β₁ᵗ
    pub c1: f32,
    /// 1 - β₂ᵗ
    pub c2: f32,
    /// Steps t with a finite gradient, exact below 2²⁴.
    pub steps: f32,
    /// Factor of the loss.
    pub scale: f32,
    /// Norm of the last gradient without the loss scale.
    pub norm: f32,
    /// Steps with a finite gradient since the scale changed.
    pub good: f32,
}

impl Control {
    /// Returns the state before the first step.
    pub const fn new(scale: f32) -> Self {
        Self { factor: 0.0, finite: 1.0, c1: 0.0, c2: 0.0, steps: 0.0, scale, norm: 0.0, good: 0.0 }
    }

    pub const fn to_array(self) -> [f32; CONTROL] {
        let Self { factor, finite, c1, c2, steps, scale, norm, good } = self;
        [factor, finite, c1, c2, steps, scale, norm, good]
    }

    pub const fn from_array(of: [f32; CONTROL]) -> Self {
        let [factor, finite, c1, c2, steps, scale, norm, good] = of;
        Self { factor, finite, c1, c2, steps, scale, norm, good }
    }
}

/// The kernel of the squared norm and the control.
pub struct Squares;

/// A flat gradient and the rules of the next step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SquaresProblem {
    /// Elements of the gradient, a multiple of 4.
    pub len: u64,
    /// Largest norm; infinity for no limit.
    pub max_norm: f32,
    pub beta1: f64,
    pub beta2: f64,
    /// Finite steps after which the loss scale doubles; none for a fixed scale. A gradient that is not finite halves an
    /// adaptive scale.
    pub growth_interval: Option<u32>,
}

impl SquaresProblem {
    /// Vectors of four.
    const fn vectors(&self) -> u64 {
        self.len / 4
    }
}

/// Launch shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SquaresConfig {
    /// Units of a cube.
    pub units: u32,
    /// Units that share a partial sum.
    pub lanes: u32,
    /// Most cubes.
    pub cubes: u32,
}

impl SquaresConfig {
    /// Partial sums of a launch.
    const fn partials(self, p: &SquaresProblem) -> u32 {
        self.launched(p) * (self.units / self.lanes)
    }

    const fn launched(self, p: &SquaresProblem) -> u32 {
        let needed = p.vectors().div_ceil(self.units as u64);
        if needed < self.cubes as u64 { needed as u32 } else { self.cubes }
    }
}

/// Device buffers.
#[derive(Debug, Clone)]
pub struct SquaresOperands {
    /// f32 `[len]`
    pub gradient: Handle,
    /// f32 `[CONTROL]`, read and written.
    pub control: Handle,
}

impl Kernel for Squares {
    type Problem = SquaresProblem;
    type Config = SquaresConfig;
    type Operands = SquaresOperands;

    const NAME: &'static str = "gradient_norm";
    const VERSION: u32 = 1;
    const SUMS_BY_UNITS: bool = true;

    fn bucket(p: &SquaresProblem) -> String {
        format!("elements {}", p.len.next_power_of_two())
    }

    fn candidates(arch: &ArchProfile, p: &SquaresProblem) -> Vec<SquaresConfig> {
        Self::baseline(arch, p).into_iter().collect()
    }

    fn check(arch: &ArchProfile, _: &SquaresProblem, c: &SquaresConfig) -> Result<(), Infeasible> {
        RowPlan::new(arch, c.units, c.lanes).check(arch)
    }

    fn cost(p: &SquaresProblem) -> Cost {
        Cost { flops: 2 * p.len, bytes: 4 * p.len }
    }

    fn baseline(arch: &ArchProfile, p: &SquaresProblem) -> Result<SquaresConfig, Infeasible> {
        let config = match arch.cores() {
            Some(units) => SquaresConfig { units, lanes: 1, cubes: 1 },
            None => SquaresConfig { units: 256, lanes: 256, cubes: 1024 },
        };
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(queue: &Queue, p: &SquaresProblem, seed: u64) -> SquaresOperands {
        SquaresOperands {
            gradient: crate::noise(queue, p.len as usize, DType::F32, seed),
            control: queue.upload(f32::as_bytes(&Control::new(1.0).to_array())),
        }
    }

    /// None: a launch reads what it writes.
    fn outputs(_: &SquaresProblem, _: &SquaresOperands) -> Vec<Output> {
        Vec::new()
    }

    fn scratch_bytes(p: &SquaresProblem, c: &SquaresConfig) -> u64 {
        4 * u64::from(c.partials(p))
    }

    fn launch(
        queue: &Queue,
        p: &SquaresProblem,
        c: &SquaresConfig,
        operands: &SquaresOperands,
        scratch: Option<&Handle>,
    ) {
        let arch = queue.profile();
        let partials = scratch.expect("it has scratch memory");
        let count = c.partials(p);
        let alone = arch.cores().is_some();
        let units = if alone { 1 } else { c.units };
        // SAFETY: the lengths follow from the problem, and the kernels check their indices.
        unsafe {
            launch!(
                queue,
                squares,
                CubeCount::Static(c.launched(p), 1, 1),
                CubeDim::new_1d(c.units),
                index_width(p.len),
                BufferArg::from_raw_parts(operands.gradient.clone(), p.vectors() as usize),
                BufferArg::from_raw_parts(partials.clone(), count as usize),
                p.vectors() as u32,
                RowPlan::new(arch, c.units, c.lanes),
            );
            launch!(
                queue,
                control,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(units),
                BufferArg::from_raw_parts(partials.clone(), count as usize),
                BufferArg::from_raw_parts(operands.control.clone(), CONTROL),
                count,
                RulesLaunch::new(
                    p.max_norm,
                    p.beta1 as f32,
                    (1.0 - p.beta1) as f32,
                    p.beta2 as f32,
                    (1.0 - p.beta2) as f32,
                    p.growth_interval.map_or(f32::INFINITY, |steps| steps as f32),
                    if p.growth_interval.is_some() { 0.5 } else { 1.0 },
                ),
                RowPlan::new(arch, units, units),
            );
        }
    }
}

/// Vectors that a unit sums before it adds to its total, so that a long sum keeps its digits.
const RUN: u32 = 64;

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn squares(
    gradient: &[Vector<f32, Const<4>>],
    partials: &mut [f32],
    vectors: u32,
    #[comptime] plan: RowPlan,
) {
    let lanes = comptime!(plan.lanes);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.shared_len()));
    let stride = CUBE_COUNT_X * comptime!(plan.units);
    let mut at = CUBE_POS_X * comptime!(plan.units) + UNIT_POS;
    let mut sum = 0.0f32.runtime();
    while at < vectors {
        let mut part = 0.0f32.runtime();
        let mut run = 0u32.runtime();
        while run < RUN && at < vectors {
            let vector = gradient[at as usize];
            #[unroll]
            for e in 0..4usize {
                part = fma(vector.extract(e), vector.extract(e), part);
            }
            at += stride;
            run += 1;
        }
        sum += part;
    }
    let sum = row_sum(sum, &mut shared, plan);
    if UNIT_POS % lanes == 0 {
        partials[(CUBE_POS_X * comptime!(plan.rows()) + UNIT_POS / lanes) as usize] = sum;
    }
}

/// Rules of the next step; `shrink` is the factor of the scale after a gradient that is not finite.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Rules {
    max_norm: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    growth_interval: f32,
    shrink: f32,
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn control(
    partials: &[f32],
    state: &mut [f32], // [CONTROL]
    count: u32,
    rules: Rules,
    #[comptime] plan: RowPlan,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.shared_len()));
    let mut sum = 0.0f32.runtime();
    let mut at = UNIT_POS;
    while at < count {
        sum += partials[at as usize];
        at += comptime!(plan.units);
    }
    let sum = row_sum(sum, &mut shared, plan);
    if UNIT_POS == 0 {
        let scale = state[5];
        let norm = sum.sqrt() / scale;
        // Neither NaN nor infinity is below the largest number.
        let finite = sum < f32::MAX;
        state[0] = min(1.0f32, rules.max_norm / (norm + 1e-6f32)) / scale;
        state[6] = norm;
        if finite {
            state[1] = 1.0f32;
            state[2] = rules.beta1 * state[2] + rules.rest1;
            state[3] = rules.beta2 * state[3] + rules.rest2;
            state[4] += 1.0f32;
            let good = state[7] + 1.0f32;
            let grows = good >= rules.growth_interval;
            state[7] = select(grows, 0.0f32, good);
            state[5] = select(grows, 2.0f32 * scale, scale);
        } else {
            state[1] = 0.0f32;
            state[7] = 0.0f32;
            state[5] = scale * rules.shrink;
        }
    }
}
