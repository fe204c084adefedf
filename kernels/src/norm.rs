//! out[r] = round(residual[r] + norm(x[r]) · w + bias)    x, out, residual: `[rows, width]`, w, bias: `[width]`
//!
//! ```text
//!   for each row r                                      // one group of units, one or several a cube
//!     factor = 1 / √(Σ (x - mean)² / width + eps)       // mean = 0 except in a layer norm
//!     out = round(residual + (x - mean) · factor · w + bias)        // (1 + w) for RmsPlusOne
//! ```
//!
//! Arithmetic is f32 and rounded once. Transformers rounds `x / rms` to the dtype and multiplies by w in that
//! dtype. Its bf16 results are therefore up to one unit in the last place further from the exact ones; where
//! the two differ, these are nearer.
//!
//! Cost: one read of x and residual, one write of out, one read of w and bias. Latency limits a decode step,
//! bandwidth a prefill. If a unit has only a few vectors of a row, it loads all operands before the first sum
//! and keeps them in registers. A row then costs one trip to memory, not three. Longer rows are read again,
//! from the first-level cache. On a CPU each unit processes whole rows.

pub mod backward;

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use crate::elem::{elem, rounding};
use crate::fits::stores;
use crate::launch::{index_width, launch, vector};
use crate::round::{by_hand, rounded};
pub use crate::rows::NormKind;
use crate::rows::{
    RowPlan, RowScale, add, add_squares, norm_weight, row_scale, row_sum, total, zeros,
};

/// The norm kernel.
pub struct Norm;

/// Rows to normalise. Build it with [`NormProblem::new`], change fields, end with [`NormProblem::checked`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct NormProblem {
    pub rows: u32,
    pub width: u32,
    /// Type of all tensors.
    pub dtype: DType,
    pub kind: NormKind,
    /// Constant added to the mean square.
    pub eps: f32,
    /// True if a vector `[width]` is added.
    pub bias: bool,
    /// True if a matrix of x's shape is added.
    pub residual: bool,
}

/// An invalid norm problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidNorm {
    #[error("expected {axis} of at least 1, got 0\nhint: skip an empty norm")]
    Empty { axis: &'static str },
    #[error(
        "expected a finite eps of at least 0, got {0}\nhint: pass the eps of the model's config"
    )]
    Eps(f32),
    #[error("expected f32, f16 or bf16 rows, got {0}\nhint: cast the rows")]
    DType(DType),
}

impl NormProblem {
    /// Creates a problem with a weight, without bias or residual.
    ///
    /// # Errors
    /// See [`InvalidNorm`].
    pub fn new(
        rows: u32,
        width: u32,
        dtype: DType,
        kind: NormKind,
        eps: f32,
    ) -> Result<Self, InvalidNorm> {
        Self { rows, width, dtype, kind, eps, bias: false, residual: false }.checked()
    }

    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidNorm`].
    pub fn checked(self) -> Result<Self, InvalidNorm> {
        for (axis, size) in [("rows", self.rows), ("width", self.width)] {
            if size == 0 {
                return Err(InvalidNorm::Empty { axis });
            }
        }
        if !self.eps.is_finite() || self.eps < 0.0 {
            return Err(InvalidNorm::Eps(self.eps));
        }
        match self.dtype {
            DType::F32 | DType::F16 | DType::Bf16 => Ok(self),
            other => Err(InvalidNorm::DType(other)),
        }
    }

    /// Elements of x.
    pub const fn elements(&self) -> usize {
        self.rows as usize * self.width as usize
    }

    /// Returns the names of the kind and of the operands that exist: `rms bias residual`.
    pub fn names(&self) -> Vec<&'static str> {
        let flag = |on: bool, name| on.then_some(name);
        [Some(self.kind.name()), flag(self.bias, "bias"), flag(self.residual, "residual")]
            .into_iter()
            .flatten()
            .collect()
    }

    /// Vector width in elements: the widest load that divides a row.
    fn vector(&self, arch: &ArchProfile) -> u32 {
        vector(arch, self.dtype, |v| self.width % v == 0)
    }
}

/// Launch shape of a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NormConfig {
    /// Units of a cube.
    pub units: u32,
    /// Units that share a row.
    pub lanes: u32,
}

/// Device buffers of one launch; bias and residual exist only if the problem has them.
#[derive(Debug, Clone)]
pub struct NormOperands {
    pub x: Handle,
    pub weight: Handle,
    pub bias: Option<Handle>,
    pub residual: Option<Handle>,
    pub out: Handle,
}

impl Kernel for Norm {
    type Problem = NormProblem;
    type Config = NormConfig;
    type Operands = NormOperands;

    const NAME: &'static str = "norm";
    const VERSION: u32 = 1;

    fn bucket(p: &NormProblem) -> String {
        let rows = p.rows.next_power_of_two().min(4096);
        format!("{} {} {} rows {rows}", p.dtype, p.names().join(" "), p.width)
    }

    fn candidates(arch: &ArchProfile, p: &NormProblem) -> Vec<NormConfig> {
        let mut configs = Vec::new();
        if arch.cores().is_some() {
            configs.extend(Self::baseline(arch, p));
            return configs;
        }
        // Two vectors a unit give enough loads in flight with few units to sum over.
        let vectors = p.width / p.vector(arch);
        let middle = vectors.div_ceil(2).next_power_of_two().clamp(32, 512);
        for lanes in [middle, 2 * middle, middle / 2, 4 * middle] {
            let useful = (32..=1024).contains(&lanes) && lanes <= 2 * vectors.max(16);
            for units in [lanes.max(128), lanes.max(64)] {
                let config = NormConfig { units, lanes };
                let new = useful && !configs.contains(&config);
                if new && Self::check(arch, p, &config).is_ok() {
                    configs.push(config);
                }
            }
        }
        configs
    }

    fn check(arch: &ArchProfile, p: &NormProblem, c: &NormConfig) -> Result<(), Infeasible> {
        stores(arch, [p.dtype])?;
        RowPlan::new(arch, c.units, c.lanes).check(arch)
    }

    fn cost(p: &NormProblem) -> Cost {
        let (all, size) = (p.elements() as u64, p.dtype.size() as u64);
        let vectors = u64::from(p.width) * if p.bias { 2 } else { 1 };
        let matrices = if p.residual { 3 } else { 2 };
        Cost { flops: 4 * all, bytes: (matrices * all + vectors) * size }
    }

    fn baseline(arch: &ArchProfile, p: &NormProblem) -> Result<NormConfig, Infeasible> {
        let config = match arch.cores() {
            Some(units) => NormConfig { units, lanes: 1 },
            None => NormConfig { units: 64, lanes: 64 },
        };
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(queue: &Queue, p: &NormProblem, seed: u64) -> NormOperands {
        let noise = |len: usize, salt| crate::noise(queue, len, p.dtype, 8 * seed + salt);
        let (width, all) = (p.width as usize, p.elements());
        NormOperands {
            x: noise(all, 0),
            weight: noise(width, 1),
            bias: p.bias.then(|| noise(width, 2)),
            residual: p.residual.then(|| noise(all, 3)),
            out: queue.empty((all * p.dtype.size()).next_multiple_of(4)),
        }
    }

    fn outputs(p: &NormProblem, operands: &NormOperands) -> Vec<Output> {
        // Configs sum in different orders, then round to the dtype.
        let tolerance = rounding(p.dtype).max(1e-5);
        let handle = operands.out.clone();
        vec![Output { handle, dtype: p.dtype, len: p.elements(), tolerance }]
    }

    fn launch(
        queue: &Queue,
        p: &NormProblem,
        c: &NormConfig,
        operands: &NormOperands,
        _scratch: Option<&Handle>,
    ) {
        let plan = plan(queue.profile(), p, c);
        let cubes = crate::cubes(queue.profile(), p.rows.into(), plan.rows.rows());
        let vector = p.vector(queue.profile()) as usize;
        let (matrix, row) = (p.elements() / vector, p.width as usize / vector);
        // Absent operands are bound to another buffer, which the kernel does not read.
        let bias = operands.bias.as_ref().unwrap_or(&operands.weight);
        let residual = operands.residual.as_ref().unwrap_or(&operands.x);
        // SAFETY: the lengths follow from the problem, and the kernel accesses whole rows below `rows`.
        unsafe {
            launch!(
                queue,
                normalise,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(c.units),
                address(p),
                vector,
                BufferArg::from_raw_parts(operands.x.clone(), matrix),
                BufferArg::from_raw_parts(operands.weight.clone(), row),
                BufferArg::from_raw_parts(bias.clone(), row),
                BufferArg::from_raw_parts(residual.clone(), matrix),
                BufferArg::from_raw_parts(operands.out.clone(), matrix),
                p.rows,
                row as u32,
                p.eps,
                plan,
                elem(p.dtype),
            );
        }
    }
}

fn address(p: &NormProblem) -> AddressType {
    index_width(p.elements() as u64)
}

/// Maximum vectors of a row that a unit keeps; with bias and residual they take 64 registers.
const HELD: u32 = 4;

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct NormPlan {
    rows: RowPlan,
    kind: NormKind,
    bias: bool,
    residual: bool,
    /// Vectors of a row that a unit keeps in registers; 0 if it reads them again.
    held: u32,
    /// True if the kernel rounds results itself before it stores them.
    rounds: bool,
}

fn plan(arch: &ArchProfile, p: &NormProblem, c: &NormConfig) -> NormPlan {
    let share = (p.width / p.vector(arch)).div_ceil(c.lanes);
    let held = if share <= HELD && arch.cores().is_none() { share } else { 0 };
    NormPlan {
        rows: RowPlan::new(arch, c.units, c.lanes),
        kind: p.kind,
        bias: p.bias,
        residual: p.residual,
        held,
        rounds: by_hand(arch, p.dtype),
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn normalise<F: Float, N: Size>(
    x: &[Vector<F, N>],        // [rows, vectors]
    weight: &[Vector<F, N>],   // [vectors]
    bias: &[Vector<F, N>],     // [vectors]
    residual: &[Vector<F, N>], // [rows, vectors]
    out: &mut [Vector<F, N>],  // [rows, vectors]
    rows: u32,
    // The length of the buffer would include padding if the number of halves is odd.
    vectors: u32,
    eps: f32,
    #[comptime] plan: NormPlan,
    #[define(F)] _dtype: ElemType,
) {
    let lanes = comptime!(plan.rows.lanes);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.rows.shared_len()));
    let (group, lane) = (UNIT_POS / lanes, UNIT_POS % lanes);
    let mut first = CUBE_POS_X * comptime!(plan.rows.rows());
    while first < rows {
        // A group past the end repeats the last row without storing: all units must reach the barriers.
        let row = min(first + group, rows - 1);
        let inside = first + group < rows;
        let from = row as usize * vectors as usize;
        if comptime!(plan.held > 0) {
            let values = load(x, from, vectors, comptime!(plan.held), plan.rows);
            let weights = load(weight, 0usize.runtime(), vectors, comptime!(plan.held), plan.rows);
            let mut biases = Array::<Vector<F, N>>::new(comptime!(plan.held as usize));
            if comptime!(plan.bias) {
                biases = load(bias, 0usize.runtime(), vectors, comptime!(plan.held), plan.rows);
            }
            let mut residuals = Array::<Vector<F, N>>::new(comptime!(plan.held as usize));
            if comptime!(plan.residual) {
                residuals = load(residual, from, vectors, comptime!(plan.held), plan.rows);
            }
            let scale = held_scale(
                &values,
                vectors,
                eps,
                &mut shared,
                comptime!(plan.held),
                plan.kind,
                plan.rows,
            );
            #[unroll]
            for h in 0..comptime!(plan.held as usize) {
                let at = lane + comptime!(h as u32 * lanes);
                if inside && at < vectors {
                    let others = Others::<F, N> {
                        weight: weights[h],
                        bias: biases[h],
                        residual: residuals[h],
                    };
                    out[from + at as usize] = finish(values[h], &others, &scale, plan);
                }
            }
        } else {
            let scale = row_scale(x, from, vectors, eps, &mut shared, plan.kind, plan.rows);
            let mut at = u32::cast_from(lane);
            while at < vectors {
                let mut others = Others::<F, N> {
                    weight: weight[at as usize],
                    bias: Vector::new(F::from_int(0)),
                    residual: Vector::new(F::from_int(0)),
                };
                if comptime!(plan.bias) {
                    others.bias = bias[at as usize];
                }
                if comptime!(plan.residual) {
                    others.residual = residual[from + at as usize];
                }
                if inside {
                    let to = from + at as usize;
                    let vector = x[to];
                    out[to] = finish(vector, &others, &scale, plan);
                }
                at += lanes;
            }
        }
        first += CUBE_COUNT_X * comptime!(plan.rows.rows());
    }
}

/// Loads a unit's vectors of the row that starts at vector `from`; vectors past its end are 0.
#[cube]
fn load<F: Float, N: Size>(
    x: &[Vector<F, N>],
    from: usize,
    vectors: u32,
    #[comptime] held: u32,
    #[comptime] plan: RowPlan,
) -> Array<Vector<F, N>> {
    let lanes = comptime!(plan.lanes);
    let mut values = Array::<Vector<F, N>>::new(comptime!(held as usize));
    #[unroll]
    for h in 0..comptime!(held as usize) {
        let at = UNIT_POS % lanes + comptime!(h as u32 * lanes);
        let mut vector = Vector::<F, N>::new(F::from_int(0));
        if at < vectors {
            vector = x[from + at as usize];
        }
        values[h] = vector;
    }
    values
}

/// Computes the scale of a row that the units hold in registers.
#[cube]
fn held_scale<F: Float, N: Size>(
    values: &Array<Vector<F, N>>,
    vectors: u32,
    eps: f32,
    shared: &mut [f32],
    #[comptime] held: u32,
    #[comptime] kind: NormKind,
    #[comptime] plan: RowPlan,
) -> RowScale {
    let (width, lanes) = (N::value(), comptime!(plan.lanes));
    let count = f32::cast_from(vectors * comptime!(width as u32));
    let mut mean = 0.0f32.runtime();
    if comptime!(matches!(kind, NormKind::Layer)) {
        let mut sums = zeros(width);
        #[unroll]
        for h in 0..comptime!(held as usize) {
            add(&mut sums, values[h]);
        }
        mean = row_sum(total(&sums, width), shared, plan) / count;
    }
    let mut sums = zeros(width);
    #[unroll]
    for h in 0..comptime!(held as usize) {
        // Zeros past the end of a row must not count: they deviate from the mean, too.
        if UNIT_POS % lanes + comptime!(h as u32 * lanes) < vectors {
            add_squares(&mut sums, values[h], mean);
        }
    }
    let square = row_sum(total(&sums, width), shared, plan) / count;
    RowScale { mean, factor: (square + eps).inverse_sqrt() }
}

/// Elements of the other operands for one vector of x.
#[derive(CubeType)]
struct Others<F: Float, N: Size> {
    weight: Vector<F, N>,
    bias: Vector<F, N>,
    residual: Vector<F, N>,
}

/// Computes one vector of the result.
#[cube]
fn finish<F: Float, N: Size>(
    x: Vector<F, N>,
    others: &Others<F, N>,
    scale: &RowScale,
    #[comptime] plan: NormPlan,
) -> Vector<F, N> {
    let mut out = Vector::<F, N>::new(F::from_int(0));
    #[unroll]
    for e in 0..N::value() {
        let weight = norm_weight::<F>(others.weight.extract(e), plan.kind);
        let mut value = (f32::cast_from(x.extract(e)) - scale.mean) * scale.factor * weight;
        if comptime!(plan.bias) {
            value += f32::cast_from(others.bias.extract(e));
        }
        if comptime!(plan.residual) {
            value += f32::cast_from(others.residual.extract(e));
        }
        out.insert(e, rounded::<F>(value, plan.rounds));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_has_candidates_that_fit() {
        for name in arch::recorded() {
            let arch = ArchProfile::recorded(name).expect("recorded");
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                for width in [1, 3, 64, 1000, 4096, 16384, 100_000] {
                    let p = NormProblem::new(7, width, dtype, NormKind::Rms, 1e-5).expect("valid");
                    let all = Norm::candidates(&arch, &p);
                    assert!(!all.is_empty(), "{name} {p:?}");
                    let baseline = Norm::baseline(&arch, &p).expect("there is one");
                    for config in all.into_iter().chain([baseline]) {
                        Norm::check(&arch, &p, &config).expect("it is feasible");
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_of_a_model_is_kept_in_registers() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        for (width, dtype) in [(4096, DType::Bf16), (8192, DType::Bf16), (4096, DType::F32)] {
            let p = NormProblem::new(1, width, dtype, NormKind::Rms, 1e-5).expect("valid");
            let first = Norm::candidates(&arch, &p)[0];
            assert_eq!(plan(&arch, &p, &first).held, 2, "{p:?} {first:?}");
        }
    }

    #[test]
    fn what_means_nothing_is_refused() {
        let new = |rows, width, dtype, eps| {
            NormProblem::new(rows, width, dtype, NormKind::Layer, eps).expect_err("refused")
        };
        assert_eq!(new(0, 8, DType::F32, 1e-5), InvalidNorm::Empty { axis: "rows" });
        assert_eq!(new(8, 0, DType::F32, 1e-5), InvalidNorm::Empty { axis: "width" });
        assert_eq!(new(1, 1, DType::I8, 1e-5), InvalidNorm::DType(DType::I8));
        assert_eq!(new(1, 1, DType::F32, -1.0), InvalidNorm::Eps(-1.0));
        assert!(matches!(new(1, 1, DType::F32, f32::NAN), InvalidNorm::Eps(_)));
    }
}
