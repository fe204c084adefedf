//! Gradients of a norm: `out = norm(x) · w + bias`, given dout.
//!
//! ```text
//!   n = (x - mean) · factor                                     mean = 0 except in a layer norm
//!   g = dout · w                                                (1 + w) for RmsPlusOne
//!   dx = round(residual + factor · (g - n · mean(g · n) - mean(g)))       the last mean only in a layer norm
//!   dw (+)= Σ dout · n,   db (+)= Σ dout                        over rows, in f32
//!
//!   for each group of units, for each of its rows               // stage 1
//!     x and dout into registers; mean and factor of the row, then the two means of g
//!     dx out; dw and db into the registers of the units that own the columns
//!   dw and db of the groups, summed in order                    // stage 2
//! ```
//!
//! `residual` is the gradient of the residual stream that x belongs to. The config alone determines the order of all sums,
//! so that two launches give the same bits. All arithmetic is f32.
//!
//! Cost: one read of x, dout and residual, one write of dx. The partial sums of the groups are a few percent of that. If a
//! unit's share of a row does not fit in registers, it reads the row twice and keeps its sums in memory.
//!
//! Sources: those of [`norm`](super); the two stages as in llm.c (Karpathy, 2024), which however adds with atomics.

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use super::{InvalidNorm, NormKind, held_scale, load};
use crate::column_sums::{ColumnSumsProblem, add_partials};
use crate::elem::{elem, rounding};
use crate::fits::stores;
use crate::launch::{index_width, launch, vector};
use crate::round::{by_hand, rounded};
use crate::rows::{RowPlan, RowScale, norm_weight, row_scale, row_sum};

/// The kernel of a norm's gradients.
pub struct NormBackward;

/// Rows whose norm gets gradients. End with [`NormBackwardProblem::checked`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct NormBackwardProblem {
    pub rows: u32,
    pub width: u32,
    /// Type of x, w, dout, residual and dx.
    pub dtype: DType,
    pub kind: NormKind,
    /// Constant added to the mean square.
    pub eps: f32,
    /// True if the norm has a bias, whose gradient is wanted.
    pub bias: bool,
    /// True if a matrix of x's shape is added to dx.
    pub residual: bool,
    /// True to add to dw and db instead of replacing them.
    pub accumulate: bool,
}

impl NormBackwardProblem {
    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidNorm`].
    pub fn checked(self) -> Result<Self, InvalidNorm> {
        let Self { rows, width, dtype, kind, eps, .. } = self;
        super::NormProblem::new(rows, width, dtype, kind, eps).map(|_| self)
    }

    /// Elements of x.
    pub const fn elements(&self) -> usize {
        self.rows as usize * self.width as usize
    }

    /// Vectors of weights with a gradient.
    const fn parts(&self) -> u32 {
        if self.bias { 2 } else { 1 }
    }

    fn vector(&self, arch: &ArchProfile) -> u32 {
        vector(arch, self.dtype, |v| self.width.is_multiple_of(v))
    }
}

/// Launch shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NormBackwardConfig {
    /// Units of a cube.
    pub units: u32,
    /// Units that share a row.
    pub lanes: u32,
    /// Most cubes, each of which leaves partial sums.
    pub cubes: u32,
}

impl NormBackwardConfig {
    const fn launched(self, p: &NormBackwardProblem) -> u32 {
        let needed = p.rows.div_ceil(self.units / self.lanes);
        if needed < self.cubes { needed } else { self.cubes }
    }

    /// Partial sums of each column.
    const fn partials(self, p: &NormBackwardProblem) -> u32 {
        self.launched(p) * (self.units / self.lanes)
    }

    /// Elements from the partial sums of dw to those of db: devices bind buffers at multiples of 512 bytes.
    const fn bias_from(self, p: &NormBackwardProblem) -> usize {
        (self.partials(p) as usize * p.width as usize).next_multiple_of(128)
    }
}

/// Device buffers; residual, db exist only if the problem has them.
#[derive(Debug, Clone)]
pub struct NormBackwardOperands {
    pub x: Handle,
    pub weight: Handle,
    pub dout: Handle,
    pub residual: Option<Handle>,
    pub dx: Handle,
    /// f32 `[width]`
    pub dw: Handle,
    /// f32 `[width]`
    pub db: Option<Handle>,
}

impl Kernel for NormBackward {
    type Problem = NormBackwardProblem;
    type Config = NormBackwardConfig;
    type Operands = NormBackwardOperands;

    const NAME: &'static str = "norm_backward";
    const VERSION: u32 = 1;
    const SUMS_BY_UNITS: bool = true;

    fn bucket(p: &NormBackwardProblem) -> String {
        let rows = p.rows.next_power_of_two().min(1 << 15);
        let flag = |on: bool, name| if on { name } else { "" };
        let (bias, residual) = (flag(p.bias, " bias"), flag(p.residual, " residual"));
        format!("{} {}{bias}{residual} {} rows {rows}", p.dtype, p.kind.name(), p.width)
    }

    fn candidates(arch: &ArchProfile, p: &NormBackwardProblem) -> Vec<NormBackwardConfig> {
        if arch.cores().is_some() {
            return Self::baseline(arch, p).into_iter().collect();
        }
        let vectors = p.width / p.vector(arch);
        let middle = vectors.div_ceil(3).next_power_of_two().clamp(32, 1024);
        let processors = arch.processors.unwrap_or(64);
        let mut configs = Vec::new();
        for lanes in [middle, middle / 2, middle * 2] {
            for (units, waves) in [(lanes.max(128), 4), (lanes.max(256), 2), (lanes.max(128), 8)] {
                let config = NormBackwardConfig { units, lanes, cubes: waves * processors };
                let useful = (32..=1024).contains(&lanes) && !configs.contains(&config);
                if useful && Self::check(arch, p, &config).is_ok() {
                    configs.push(config);
                }
            }
        }
        configs
    }

    fn check(
        arch: &ArchProfile,
        p: &NormBackwardProblem,
        c: &NormBackwardConfig,
    ) -> Result<(), Infeasible> {
        stores(arch, [p.dtype, DType::F32])?;
        RowPlan::new(arch, c.units, c.lanes).check(arch)
    }

    fn cost(p: &NormBackwardProblem) -> Cost {
        let (all, size) = (p.elements() as u64, p.dtype.size() as u64);
        let matrices = if p.residual { 4 } else { 3 };
        let row = u64::from(p.width) * (size + 4 * u64::from(p.parts()));
        Cost { flops: 12 * all, bytes: matrices * all * size + row }
    }

    fn baseline(
        arch: &ArchProfile,
        p: &NormBackwardProblem,
    ) -> Result<NormBackwardConfig, Infeasible> {
        let config = match arch.cores() {
            Some(units) => NormBackwardConfig { units, lanes: 1, cubes: 1 },
            None => NormBackwardConfig { units: 64, lanes: 64, cubes: 256 },
        };
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(queue: &Queue, p: &NormBackwardProblem, seed: u64) -> NormBackwardOperands {
        let noise = |len: usize, salt| crate::noise(queue, len, p.dtype, 8 * seed + salt);
        let (width, all) = (p.width as usize, p.elements());
        NormBackwardOperands {
            x: noise(all, 0),
            weight: noise(width, 1),
            dout: noise(all, 2),
            residual: p.residual.then(|| noise(all, 3)),
            dx: queue.empty((all * p.dtype.size()).next_multiple_of(4)),
            dw: crate::noise(queue, width, DType::F32, 8 * seed + 4),
            db: p.bias.then(|| crate::noise(queue, width, DType::F32, 8 * seed + 5)),
        }
    }

    /// Not dw and db if a launch adds to them.
    fn outputs(p: &NormBackwardProblem, operands: &NormBackwardOperands) -> Vec<Output> {
        let (handle, len) = (operands.dx.clone(), p.elements());
        let tolerance = rounding(p.dtype).max(1e-5);
        let mut outputs = vec![Output { handle, dtype: p.dtype, len, tolerance }];
        if !p.accumulate {
            outputs.extend([Some(&operands.dw), operands.db.as_ref()].into_iter().flatten().map(
                |handle| Output {
                    handle: handle.clone(),
                    dtype: DType::F32,
                    len: p.width as usize,
                    tolerance: 1e-5,
                },
            ));
        }
        outputs
    }

    fn scratch_bytes(p: &NormBackwardProblem, c: &NormBackwardConfig) -> u64 {
        4 * u64::from(p.parts()) * c.bias_from(p) as u64
    }

    fn launch(
        queue: &Queue,
        p: &NormBackwardProblem,
        c: &NormBackwardConfig,
        operands: &NormBackwardOperands,
        scratch: Option<&Handle>,
    ) {
        let arch = queue.profile();
        let partials = scratch.expect("it has scratch memory");
        let plan = Plan::new(arch, p, c);
        let vector = p.vector(arch) as usize;
        let (matrix, row) = (p.elements() / vector, p.width as usize / vector);
        let strips = c.partials(p);
        let all = p.parts() as usize * c.bias_from(p) / vector;
        // Absent operands are bound to another buffer, which the kernel does not read.
        let residual = operands.residual.as_ref().unwrap_or(&operands.x);
        // SAFETY: the lengths follow from the problem, and the kernel accesses whole rows below `rows`.
        unsafe {
            launch!(
                queue,
                backward,
                CubeCount::Static(c.launched(p), 1, 1),
                CubeDim::new_1d(c.units),
                index_width(p.elements() as u64),
                vector,
                BufferArg::from_raw_parts(operands.x.clone(), matrix),
                BufferArg::from_raw_parts(operands.weight.clone(), row),
                BufferArg::from_raw_parts(operands.dout.clone(), matrix),
                BufferArg::from_raw_parts(residual.clone(), matrix),
                BufferArg::from_raw_parts(operands.dx.clone(), matrix),
                BufferArg::from_raw_parts(partials.clone(), all),
                p.rows,
                row as u32,
                (c.bias_from(p) / vector) as u32,
                p.eps,
                plan,
                elem(p.dtype),
            );
        }
        let rest = ColumnSumsProblem {
            rows: strips,
            width: p.width,
            stride: p.width,
            dtype: DType::F32,
            accumulate: p.accumulate,
        };
        add_partials(queue, &rest, partials, &operands.dw);
        if let Some(db) = &operands.db {
            let half = 4 * c.bias_from(p) as u64;
            add_partials(queue, &rest, &partials.clone().offset_start(half), db);
        }
    }
}

/// Maximum vectors of a row that a unit keeps: with 8 elements each, x, dout and w take 48 registers and the sums 64.
const HELD: u32 = 4;

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    rows: RowPlan,
    kind: NormKind,
    bias: bool,
    residual: bool,
    /// Vectors of a row that a unit keeps in registers; 0 if it reads them again.
    held: u32,
    /// True if the kernel rounds results itself before it stores them.
    rounds: bool,
}

impl Plan {
    fn new(arch: &ArchProfile, p: &NormBackwardProblem, c: &NormBackwardConfig) -> Self {
        let share = (p.width / p.vector(arch)).div_ceil(c.lanes);
        Self {
            rows: RowPlan::new(arch, c.units, c.lanes),
            kind: p.kind,
            bias: p.bias,
            residual: p.residual,
            held: if share <= HELD && arch.cores().is_none() { share } else { 0 },
            rounds: by_hand(arch, p.dtype),
        }
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn backward<F: Float, N: Size>(
    x: &[Vector<F, N>],              // [rows, vectors]
    weight: &[Vector<F, N>],         // [vectors]
    dout: &[Vector<F, N>],           // [rows, vectors]
    residual: &[Vector<F, N>],       // [rows, vectors]
    dx: &mut [Vector<F, N>],         // [rows, vectors]
    partials: &mut [Vector<f32, N>], // [dw or db, cubes, groups, vectors], db from bias_from
    rows: u32,
    vectors: u32,
    bias_from: u32,
    eps: f32,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let (lanes, groups, held) = comptime!((plan.rows.lanes, plan.rows.rows(), plan.held as usize));
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.rows.shared_len()));
    let (group, lane) = (UNIT_POS / lanes, UNIT_POS % lanes);
    let strip = CUBE_POS_X * groups + group;
    let own = strip as usize * vectors as usize;
    let of_bias = bias_from as usize + own;
    let width = N::value();
    let count = f32::cast_from(vectors * comptime!(width as u32));
    // One element if nothing is held.
    let mut weights = Array::<Vector<F, N>>::new(comptime!(held.max(1)));
    let mut dw = Array::<Vector<f32, N>>::new(comptime!(held.max(1)));
    let mut db = Array::<Vector<f32, N>>::new(comptime!(held.max(1)));
    if comptime!(held > 0) {
        weights = load(weight, 0usize.runtime(), vectors, comptime!(plan.held), plan.rows);
    }
    #[unroll]
    for h in 0..held {
        dw[h] = Vector::new(0.0f32);
        db[h] = Vector::new(0.0f32);
    }
    if comptime!(held == 0) {
        let mut at = u32::cast_from(lane);
        while at < vectors {
            partials[own + at as usize] = Vector::new(0.0f32);
            if comptime!(plan.bias) {
                partials[of_bias + at as usize] = Vector::new(0.0f32);
            }
            at += lanes;
        }
    }
    let mut first = CUBE_POS_X * groups;
    while first < rows {
        // A group past the end repeats the last row without storing: all units must reach the barriers.
        let row = min(first + group, rows - 1);
        let inside = first + group < rows;
        let from = row as usize * vectors as usize;
        if comptime!(held > 0) {
            let values = load(x, from, vectors, comptime!(plan.held), plan.rows);
            let given = load(dout, from, vectors, comptime!(plan.held), plan.rows);
            let scale = held_scale(
                &values,
                vectors,
                eps,
                &mut shared,
                comptime!(plan.held),
                plan.kind,
                plan.rows,
            );
            let (mut along, mut total) = (0.0f32.runtime(), 0.0f32.runtime());
            #[unroll]
            for h in 0..held {
                // Past the end of a row, dout is 0.
                let sums = sums_of(values[h], weights[h], given[h], &scale, plan.kind);
                along += sums.along;
                total += sums.total;
            }
            let mean = means(along, total, count, &mut shared, plan);
            #[unroll]
            for h in 0..held {
                let at = lane + comptime!(h as u32 * lanes);
                if inside && at < vectors {
                    let mut base = Vector::<F, N>::new(F::from_int(0));
                    if comptime!(plan.residual) {
                        base = residual[from + at as usize];
                    }
                    let place = from + at as usize;
                    dx[place] = finish(values[h], weights[h], given[h], base, &scale, &mean, plan);
                    dw[h] += weighted(values[h], given[h], &scale);
                    db[h] += Vector::cast_from(given[h]);
                }
            }
        } else {
            let scale = row_scale(x, from, vectors, eps, &mut shared, plan.kind, plan.rows);
            let (mut along, mut total) = (0.0f32.runtime(), 0.0f32.runtime());
            let mut at = u32::cast_from(lane);
            while at < vectors {
                let place = from + at as usize;
                let sums = sums_of(x[place], weight[at as usize], dout[place], &scale, plan.kind);
                along += sums.along;
                total += sums.total;
                at += lanes;
            }
            let mean = means(along, total, count, &mut shared, plan);
            let mut at = u32::cast_from(lane);
            while at < vectors {
                let place = from + at as usize;
                let (value, w, given) = (x[place], weight[at as usize], dout[place]);
                let mut base = Vector::<F, N>::new(F::from_int(0));
                if comptime!(plan.residual) {
                    base = residual[place];
                }
                if inside {
                    dx[place] = finish(value, w, given, base, &scale, &mean, plan);
                    let to = own + at as usize;
                    let sum = partials[to] + weighted(value, given, &scale);
                    partials[to] = sum;
                    if comptime!(plan.bias) {
                        let to = of_bias + at as usize;
                        let sum = partials[to] + Vector::cast_from(given);
                        partials[to] = sum;
                    }
                }
                at += lanes;
            }
        }
        first += CUBE_COUNT_X * groups;
    }
    #[unroll]
    for h in 0..held {
        let at = lane + comptime!(h as u32 * lanes);
        if at < vectors {
            partials[own + at as usize] = dw[h];
            if comptime!(plan.bias) {
                partials[of_bias + at as usize] = db[h];
            }
        }
    }
}

/// Sums over a vector, then over a row: Σ g·n and Σ g.
#[derive(CubeType, Clone, Copy)]
struct Sums {
    along: f32,
    total: f32,
}

#[cube]
fn sums_of<F: Float, N: Size>(
    x: Vector<F, N>,
    weight: Vector<F, N>,
    dout: Vector<F, N>,
    scale: &RowScale,
    #[comptime] kind: NormKind,
) -> Sums {
    let (mut along, mut total) = (0.0f32.runtime(), 0.0f32.runtime());
    #[unroll]
    for e in 0..N::value() {
        let n = (f32::cast_from(x.extract(e)) - scale.mean) * scale.factor;
        let g = f32::cast_from(dout.extract(e)) * norm_weight::<F>(weight.extract(e), kind);
        along = fma(g, n, along);
        total += g;
    }
    Sums { along, total }
}

/// Returns the means over a row; that of g is 0 except in a layer norm.
#[cube]
fn means(along: f32, total: f32, count: f32, shared: &mut [f32], #[comptime] plan: Plan) -> Sums {
    let along = row_sum(along, shared, plan.rows) / count;
    let mut mean = 0.0f32.runtime();
    if comptime!(matches!(plan.kind, NormKind::Layer)) {
        mean = row_sum(total, shared, plan.rows) / count;
    }
    Sums { along, total: mean }
}

/// Returns dout · n.
#[cube]
fn weighted<F: Float, N: Size>(
    x: Vector<F, N>,
    dout: Vector<F, N>,
    scale: &RowScale,
) -> Vector<f32, N> {
    let mut out = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for e in 0..N::value() {
        let n = (f32::cast_from(x.extract(e)) - scale.mean) * scale.factor;
        out.insert(e, f32::cast_from(dout.extract(e)) * n);
    }
    out
}

/// Computes one vector of dx.
#[cube]
fn finish<F: Float, N: Size>(
    x: Vector<F, N>,
    weight: Vector<F, N>,
    dout: Vector<F, N>,
    residual: Vector<F, N>,
    scale: &RowScale,
    mean: &Sums,
    #[comptime] plan: Plan,
) -> Vector<F, N> {
    let mut out = Vector::<F, N>::new(F::from_int(0));
    #[unroll]
    for e in 0..N::value() {
        let n = (f32::cast_from(x.extract(e)) - scale.mean) * scale.factor;
        let g = f32::cast_from(dout.extract(e)) * norm_weight::<F>(weight.extract(e), plan.kind);
        let mut value = (g - n * mean.along - mean.total) * scale.factor;
        if comptime!(plan.residual) {
            value += f32::cast_from(residual.extract(e));
        }
        out.insert(e, rounded::<F>(value, plan.rounds));
    }
    out
}
