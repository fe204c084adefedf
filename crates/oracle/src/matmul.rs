//! Matmul against its reference, and the shapes that break matmuls.

use arch::{Backend, Device};
use cubecl::server::Handle;
use kernels::matmul::{
    Activation, Batches, Epilogue, EpilogueBuffers, Layout, Matmul, MatmulConfig, MatmulOperands,
    MatmulProblem, NormBuffers, Operand, Precision,
};
use kernels::norm::NormKind;
use reference::{Comparison, Distribution, Special, Strides, fill, plant};
use tune::Kernel;

use crate::norm::reference_rule;
use crate::{
    CheckError, FAR, Verdict, fnv1a, give_back, kernel_error, launch_twice, nearby, padded,
    scattered, twice, unwritten, weights, window,
};

/// What the operands hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inputs {
    /// Seeded, normal.
    Normal(u64),
    /// Normal with infinities and NaN planted in both operands.
    Special(u64),
    /// Normal, in buffers that reach past 2^31 elements: only what the problem reads is there.
    Far(u64),
}

impl Inputs {
    const fn seed(self) -> u64 {
        match self {
            Self::Normal(seed) | Self::Special(seed) | Self::Far(seed) => seed,
        }
    }
}

/// One shape to verify.
#[derive(Debug, Clone, Copy)]
pub struct EdgeCase {
    pub problem: MatmulProblem,
    pub inputs: Inputs,
}

impl EdgeCase {
    /// How the rows of a grouped problem are shared out, by the seed.
    pub fn shares(&self) -> Option<Shares> {
        self.problem.grouped.then(|| Shares::ALL[(self.inputs.seed() % 4) as usize])
    }
}

/// How many rows each group has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shares {
    /// As many as every other.
    Even,
    /// None but the last, which has all.
    Last,
    /// One, and the last what is left.
    Single,
    /// Every other group none.
    Gaps,
}

impl Shares {
    const ALL: [Self; 4] = [Self::Even, Self::Last, Self::Single, Self::Gaps];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Even => "even",
            Self::Last => "last",
            Self::Single => "single",
            Self::Gaps => "gaps",
        }
    }

    /// Where the rows of each group begin, and the last one's end.
    fn offsets(self, problem: &MatmulProblem) -> Vec<u32> {
        let (groups, m) = (problem.batches.inner, problem.m);
        let first = |g: u32| match self {
            Self::Even => g * m / groups,
            Self::Last => 0,
            Self::Single => g.min(m),
            Self::Gaps => g / 2 * 2 * m / groups,
        };
        (0..groups).map(first).chain([m]).collect()
    }
}

/// Runs `problem` on fresh host inputs and compares every result with the reference. The output is
/// filled with NaN first, so an element nobody wrote fails.
///
/// # Errors
/// The kernel failed to run; a wrong result is a [`Verdict`], not an error.
pub fn check(
    device: &Device,
    case: &EdgeCase,
    config: &MatmulConfig,
) -> Result<Verdict, CheckError> {
    let EdgeCase { problem, inputs } = case;
    if let Inputs::Far(seed) = *inputs {
        let checked = check_far(device, problem, seed, config);
        give_back(device)?;
        return checked;
    }
    let [lhs_len, rhs_len, out_len] = problem.extents();
    let (stored, result) = (reference_dtype(problem.precision), result_dtype(problem));
    let hold = |mut values: Vec<f32>, dtype: reference::DType| -> Result<Vec<f32>, CheckError> {
        let len = values.len();
        if matches!(inputs, Inputs::Special(_)) {
            let places =
                [(len / 7, Special::Inf), (len / 3, Special::Nan), (len / 2, Special::NegInf)];
            plant(&mut values, dtype, &places)?;
        }
        Ok(dtype.decode(&dtype.encode(&values))?)
    };
    let seed = |salt: u64| 2 * inputs.seed() + salt;
    let make = |len: usize, dtype: reference::DType, salt: u64| {
        hold(fill(seed(salt), len, Distribution::Normal), dtype)
    };
    let Epilogue { bias, gate, residual, .. } = problem.epilogue;
    let host = Host {
        lhs: make(lhs_len, stored, 0)?,
        rhs: hold(weights(seed(1), rhs_len, problem.k), stored)?,
        bias: bias.then(|| make(problem.bias_len(), stored, 1 << 40)).transpose()?,
        gate: gate.then(|| make(out_len, result, 1 << 41)).transpose()?,
        residual: residual.then(|| make(out_len, result, 1 << 42)).transpose()?,
        norm: problem.norm.map(|_| make(problem.k as usize, stored, 1 << 43)).transpose()?,
        offsets: case.shares().map(|shares| shares.offsets(problem)),
    };
    let client = device.client();
    let upload = |bytes: &[u8]| client.create_from_slice(&padded(bytes));
    let part = |values: &Option<Vec<f32>>, dtype: reference::DType| {
        values.as_ref().map(|v| upload(&dtype.encode(v)))
    };
    let operands = MatmulOperands {
        lhs: upload(&stored.encode(&host.lhs)),
        rhs: upload(&stored.encode(&host.rhs)),
        out: unwritten(device, out_len * problem.out.size()),
        epilogue: EpilogueBuffers {
            bias: part(&host.bias, stored),
            gate: part(&host.gate, result),
            residual: part(&host.residual, result),
        },
        rows: host.offsets.as_ref().map(|offsets| {
            let bytes: Vec<u8> = offsets.iter().flat_map(|o| o.to_le_bytes()).collect();
            upload(&bytes)
        }),
        norm: host
            .norm
            .as_ref()
            .map(|weight| NormBuffers { weight: upload(&stored.encode(weight)), eps: EPS }),
    };
    launch_twice::<Matmul>(device, problem, config, &operands, &[&operands.out])?;
    verdict(device, problem, &operands, &host, None)
}

/// Rows of a result that is far itself which are checked, the first and the last.
const FAR_ROWS: u32 = 64;

/// [`check`] without an epilogue of operands that begin, or whose second batch begins, far away, or of a result that
/// reaches far: the reference has them close together.
fn check_far(
    device: &Device,
    problem: &MatmulProblem,
    seed: u64,
    config: &MatmulConfig,
) -> Result<Verdict, CheckError> {
    let mut near = *problem;
    for start in [&mut near.lhs.start, &mut near.rhs.start] {
        *start = nearby(*start);
    }
    for step in [&mut near.batches.lhs.1, &mut near.batches.rhs.1] {
        *step = nearby(*step);
    }
    let stored = reference_dtype(problem.precision);
    let make = |len: usize, salt: u64| -> Result<Vec<f32>, CheckError> {
        let values = fill(2 * seed + salt, len, Distribution::Normal);
        Ok(stored.decode(&stored.encode(&values))?)
    };
    let [lhs_len, rhs_len, _] = near.extents();
    let host = Host {
        lhs: make(lhs_len, 0)?,
        rhs: make(rhs_len, 1)?,
        bias: None,
        gate: None,
        residual: None,
        norm: None,
        offsets: None,
    };
    let [lhs, rhs, out] = problem.extents();
    let size = stored.bytes();
    // Each batch's matrix of an operand, written where it lies.
    let place = |values: &[f32], of: [Operand; 2], steps: [u64; 2], len: usize| {
        let last = u64::from(problem.batches.inner - 1);
        let matrix = values.len() - (of[0].start + last * steps[0]) as usize;
        let pieces = (0..=last).map(|batch| {
            let [from, to] = [0, 1].map(|i| (of[i].start + batch * steps[i]) as usize);
            (from * size..(from + matrix) * size, to * size)
        });
        scattered(device, len * size, &stored.encode(values), pieces)
    };
    let steps = [near.batches, problem.batches];
    let far = out as u64 >= FAR[0];
    let out_bytes = out * problem.out.size();
    let operands = MatmulOperands {
        lhs: place(&host.lhs, [near.lhs, problem.lhs], steps.map(|b| b.lhs.1), lhs),
        rhs: place(&host.rhs, [near.rhs, problem.rhs], steps.map(|b| b.rhs.1), rhs),
        out: if far { device.client().empty(out_bytes) } else { unwritten(device, out_bytes) },
        epilogue: EpilogueBuffers::default(),
        rows: None,
        norm: None,
    };
    if !far {
        launch_twice::<Matmul>(device, problem, config, &operands, &[&operands.out])?;
        return verdict(device, &near, &operands, &host, None);
    }
    let compared = [0, near.m - FAR_ROWS].map(|first| rows_of(&operands.out, &near, first));
    let scratch = Matmul::scratch(device, problem, config);
    twice(device, &compared, || {
        Matmul::launch(device, problem, config, &operands, scratch.as_ref());
    })?;
    let some = |first: u32| {
        let mut part = MatmulProblem { m: FAR_ROWS, ..near };
        part.lhs.start += u64::from(first) * near.lhs.stride;
        let out = rows_of(&operands.out, &near, first);
        let operands = MatmulOperands { out, ..operands.clone() };
        verdict(device, &part, &operands, &host, None)
    };
    let (first, last) = (some(0)?, some(near.m - FAR_ROWS)?);
    let comparison = Comparison::worst(vec![first.comparison, last.comparison]);
    Ok(Verdict { comparison, digest: first.digest ^ last.digest.rotate_left(1) })
}

/// [`FAR_ROWS`] rows of the result of `p` from row `first` on.
fn rows_of(out: &Handle, p: &MatmulProblem, first: u32) -> Handle {
    let row = p.n as usize * p.out.size();
    window(out, first as usize * row, FAR_ROWS as usize * row)
}

/// Views and batches past 2^31 elements; past 2^32, and with a result that is so large, on cards. Where a buffer may be so
/// large: not through wgpu, which ends at 4 GiB. On a CPU of types of 16 bits alone, for others need twice the memory.
fn far_cases(precision: Precision, backend: Backend) -> Vec<EdgeCase> {
    let served = match backend {
        Backend::Cuda => true,
        Backend::Cpu => precision.storage().size() == 2,
        _ => false,
    };
    if !served {
        return Vec::new();
    }
    let mut cases = Vec::new();
    let dense = |batch, sizes, rhs| {
        MatmulProblem::dense(batch, sizes, [Layout::Row, rhs], precision)
            .expect("sizes are positive")
    };
    let distances = if backend == Backend::Cuda { &FAR[..] } else { &FAR[..1] };
    for far in distances {
        for rhs in [Layout::Row, Layout::Col] {
            for sizes in [[37, 136, 72], [1, 264, 512], [150, 130, 64]] {
                let mut p = dense(1, sizes, rhs);
                p.lhs.start = *far;
                cases.push(p);
                let mut p = dense(1, sizes, rhs);
                p.rhs.start = *far;
                cases.push(p);
            }
            let mut p = dense(2, [40, 72, 64], rhs);
            p.batches.rhs.1 += far;
            cases.push(p);
        }
    }
    if backend == Backend::Cuda {
        cases.extend([Layout::Row, Layout::Col].map(|rhs| dense(1, [65_600, 32_800, 16], rhs)));
    }
    let seeds = 400..;
    seeds
        .zip(cases)
        .map(|(seed, problem)| EdgeCase { problem, inputs: Inputs::Far(seed) })
        .collect()
}

/// The inputs of one product, decoded.
struct Host {
    lhs: Vec<f32>,
    rhs: Vec<f32>,
    bias: Option<Vec<f32>>,
    gate: Option<Vec<f32>>,
    residual: Option<Vec<f32>>,
    /// The weight of the norm.
    norm: Option<Vec<f32>>,
    /// Of the groups.
    offsets: Option<Vec<u32>>,
}

/// Compares what a launch left in `operands` with the reference at a seeded sample of positions,
/// reading the inputs back from the device.
///
/// # Errors
/// The launch failed.
pub fn check_operands(
    device: &Device,
    problem: &MatmulProblem,
    operands: &MatmulOperands,
    seed: u64,
) -> Result<Verdict, CheckError> {
    let (stored, result) = (reference_dtype(problem.precision), result_dtype(problem));
    let [lhs_len, rhs_len, out_len] = problem.extents();
    let read = |handle: &Handle, len: usize, dtype: reference::DType| {
        let bytes = device.client().read_one(handle.clone()).map_err(kernel_error)?;
        Ok::<_, CheckError>(dtype.decode(&bytes[..len * dtype.bytes()])?)
    };
    let part = |handle: &Option<Handle>, len, dtype| {
        handle.as_ref().map(|h| read(h, len, dtype)).transpose()
    };
    let host = Host {
        lhs: read(&operands.lhs, lhs_len, stored)?,
        rhs: read(&operands.rhs, rhs_len, stored)?,
        bias: part(&operands.epilogue.bias, problem.bias_len(), stored)?,
        gate: part(&operands.epilogue.gate, out_len, result)?,
        residual: part(&operands.epilogue.residual, out_len, result)?,
        norm: operands
            .norm
            .as_ref()
            .map(|norm| read(&norm.weight, problem.k as usize, stored))
            .transpose()?,
        offsets: operands.rows.as_ref().map(|rows| words(device, rows, problem)).transpose()?,
    };
    verdict(device, problem, operands, &host, Some(seed))
}

fn words(device: &Device, rows: &Handle, problem: &MatmulProblem) -> Result<Vec<u32>, CheckError> {
    let bytes = device.client().read_one(rows.clone()).map_err(kernel_error)?;
    let words = bytes.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]));
    Ok(words.take(problem.batches.inner as usize + 1).collect())
}

fn verdict(
    device: &Device,
    problem: &MatmulProblem,
    operands: &MatmulOperands,
    host: &Host,
    sample: Option<u64>,
) -> Result<Verdict, CheckError> {
    let dtype = result_dtype(problem);
    let len = problem.extents()[2] * dtype.bytes();
    let bytes = device.client().read_one(operands.out.clone()).map_err(kernel_error)?;
    let out = dtype.decode(&bytes[..len])?;
    let reference = reference_of(problem);
    let lhs = &host.lhs[problem.lhs.start as usize..];
    let rhs = &host.rhs[problem.rhs.start as usize..];
    let epilogue = reference::Epilogue {
        norm: row_norm(problem.norm, operands.norm.as_ref(), host.norm.as_deref()),
        bias: host.bias.as_deref(),
        activation: problem.epilogue.activation.map(reference_activation),
        up: None,
        gate: host.gate.as_deref(),
        residual: host.residual.as_deref(),
    };
    let comparison = if let Some(offsets) = &host.offsets {
        let offsets: Vec<_> = offsets.iter().map(|o| *o as usize).collect();
        reference.check_groups(&offsets, sample, lhs, rhs, epilogue, &out)?
    } else {
        let sample = match sample {
            Some(seed) => reference.sample(seed),
            None => reference.everything(),
        };
        reference.check(&sample, lhs, rhs, epilogue, &out)?
    };
    Ok(Verdict { comparison, digest: fnv1a(&bytes[..len]) })
}

/// Added to the mean of the squares of rows that are near 1.
pub(crate) const EPS: f32 = 0.25;

/// A problem's norm, whose weight is `weight`.
pub(crate) fn row_norm<'a>(
    norm: Option<NormKind>,
    buffers: Option<&NormBuffers>,
    weight: Option<&'a [f32]>,
) -> Option<reference::RowNorm<'a>> {
    assert_eq!(norm.is_some(), buffers.is_some(), "a problem's norm and its weight go together");
    let (kind, buffers) = norm.zip(buffers)?;
    let norm = reference::Norm { rule: reference_rule(kind), eps: buffers.eps.into() };
    weight.map(|weight| reference::RowNorm { norm, weight })
}

const fn reference_dtype(precision: Precision) -> reference::DType {
    match precision {
        Precision::F32 => reference::DType::F32,
        Precision::Tf32 => reference::DType::Tf32,
        Precision::F16 | Precision::F16Acc16 => reference::DType::F16,
        Precision::Bf16 => reference::DType::Bf16,
    }
}

/// The format of the result.
pub(crate) const fn result_dtype(problem: &MatmulProblem) -> reference::DType {
    match problem.out {
        arch::DType::F16 => reference::DType::F16,
        arch::DType::Bf16 => reference::DType::Bf16,
        _ => reference::DType::F32,
    }
}

pub(crate) const fn reference_activation(activation: Activation) -> reference::Activation {
    match activation {
        Activation::Silu => reference::Activation::Silu,
        Activation::Gelu => reference::Activation::Gelu,
        Activation::GeluTanh => reference::Activation::GeluTanh,
    }
}

pub(crate) fn reference_of(p: &MatmulProblem) -> reference::Matmul {
    let strides = |op: Operand, (outer, inner): (u64, u64)| {
        let line = op.stride as usize;
        let (row, col) = if op.layout == Layout::Row { (line, 1) } else { (1, line) };
        Strides { batch: vec![outer as usize, inner as usize], row, col }
    };
    let dtype = reference_dtype(p.precision);
    reference::Matmul {
        batch: vec![p.batches.outer as usize, p.batches.inner as usize],
        m: p.m as usize,
        n: p.n as usize,
        k: p.k as usize,
        lhs: strides(p.lhs, p.batches.lhs),
        rhs: strides(p.rhs, p.batches.rhs),
        dtype,
        sums: match p.precision.sums() {
            arch::DType::F16 => reference::DType::F16,
            _ => reference::DType::F32,
        },
        out_dtype: result_dtype(p),
    }
}

/// Tile multiples, one more and one less, ones, primes, thin and deep shapes.
const SIZES: [[u32; 3]; 16] = [
    [1, 1, 1],
    [128, 128, 128],
    [129, 127, 65],
    [256, 128, 96],
    [37, 41, 43],
    [1, 256, 512],
    [8, 192, 320],
    [3, 133, 136],
    [1, 1031, 776],
    [257, 1, 64],
    [33, 65, 1],
    [16, 8, 1000],
    [64, 64, 63],
    [5, 7, 2],
    [192, 320, 72],
    [17, 130, 36],
];

/// The shapes that every config must get right, for one precision: every size in every layout, then
/// batches, repeated operands, strided views, deep products and special values.
pub fn edge_cases(precision: Precision, backend: Backend) -> Vec<EdgeCase> {
    let layouts = [Layout::Row, Layout::Col];
    let mut cases = Vec::new();
    let dense = |batch, sizes, layouts| {
        MatmulProblem::dense(batch, sizes, layouts, precision).expect("sizes above are positive")
    };
    let mut add = |problem, inputs| cases.push(EdgeCase { problem, inputs });
    for (seed, sizes) in (0u64..).zip(SIZES) {
        for lhs in layouts {
            for rhs in layouts {
                add(dense(1, sizes, [lhs, rhs]), Inputs::Normal(seed));
            }
        }
    }
    let rows = [Layout::Row; 2];
    add(dense(5, [33, 40, 24], rows), Inputs::Normal(90));
    add(dense(3, [64, 64, 64], [Layout::Row, Layout::Col]), Inputs::Normal(91));
    for (batches, seed) in [
        // rhs repeats over every batch: a linear layer.
        (Batches { outer: 1, inner: 4, lhs: (0, 20 * 24), rhs: (0, 0) }, 92),
        // lhs repeats over the inner axis, rhs over the outer: an outer product of batches.
        (Batches { outer: 2, inner: 3, lhs: (20 * 24, 0), rhs: (0, 24 * 16) }, 93),
    ] {
        add(MatmulProblem { batches, ..dense(1, [20, 16, 24], rows) }, Inputs::Normal(seed));
    }
    let view = |lhs: (u64, u64), rhs: (u64, u64), sizes| {
        let mut p = dense(1, sizes, rows);
        (p.lhs.stride, p.lhs.start) = lhs;
        (p.rhs.stride, p.rhs.start) = rhs;
        p
    };
    // Aligned and unaligned views into larger matrices.
    add(view((80, 16), (64, 8), [48, 40, 64]), Inputs::Normal(94));
    add(view((71, 3), (45, 5), [50, 33, 65]), Inputs::Normal(95));
    for (seed, (epilogue, out)) in (120..).zip(epilogues(precision)) {
        // Whole tiles, every edge, thin; and deep enough that k is cut into parts, with batches.
        for sizes in [[64, 64, 64], [33, 47, 29], [1, 136, 40]] {
            let p = MatmulProblem { epilogue, out, ..dense(1, sizes, rows) };
            add(p, Inputs::Normal(seed));
        }
        let deep = dense(3, [20, 24, 4104], rows);
        add(MatmulProblem { epilogue, out, ..deep }, Inputs::Normal(seed));
    }
    for problem in normed(precision) {
        add(problem, Inputs::Normal(140));
    }
    // One row has all that is special, or each of several its own.
    add(normed(precision)[0], Inputs::Special(141));
    add(normed(precision)[6], Inputs::Special(142));
    add_groups(&mut add, precision);
    // k cut into parts, the last of them ragged.
    add(dense(1, [5, 40, 2051], [Layout::Row, Layout::Col]), Inputs::Normal(114));
    for (seed, sizes) in [(96, [40, 48, 56]), (97, [128, 128, 64]), (98, [3, 130, 35])] {
        add(dense(1, sizes, [Layout::Row, Layout::Col]), Inputs::Special(seed));
    }
    cases.extend(far_cases(precision, backend));
    cases
}

/// Rows that are normalised by the product: one and several, whole cubes and columns left over, one step of k and
/// many, other results, batches.
fn normed(precision: Precision) -> Vec<MatmulProblem> {
    let sizes = [[1, 256, 512], [2, 67, 4104], [1, 131, 8], [5, 264, 72], [8, 40, 136]];
    let kinds = [NormKind::Rms, NormKind::RmsPlusOne];
    let mut problems = Vec::new();
    for (i, size) in sizes.into_iter().enumerate() {
        let batch = if i == 1 { 3 } else { 1 };
        let plain = MatmulProblem::dense(batch, size, [Layout::Row, Layout::Col], precision)
            .expect("sizes above are positive");
        let norm = Some(kinds[i % 2]);
        let (epilogue, out) = epilogues(precision).swap_remove(i);
        problems.push(MatmulProblem { norm, ..plain });
        problems.push(MatmulProblem { norm, epilogue, out, ..plain });
    }
    problems
}

/// Groups: one, even ones, all rows in one of them, single rows, empty ones; more rows than a tile has, an
/// edge in every group, and the epilogues, whose bias each group has of its own.
fn add_groups(add: &mut impl FnMut(MatmulProblem, Inputs), precision: Precision) {
    let grouped = |groups, sizes, rhs| {
        MatmulProblem::grouped(groups, sizes, rhs, precision).expect("sizes are positive")
    };
    for pattern in 0..4 {
        for rhs in [Layout::Row, Layout::Col] {
            add(grouped(5, [67, 40, 24], rhs), Inputs::Normal(300 + pattern));
            add(grouped(3, [300, 72, 64], rhs), Inputs::Normal(304 + pattern));
        }
    }
    add(grouped(1, [33, 47, 29], Layout::Row), Inputs::Normal(308));
    add(grouped(40, [40, 264, 36], Layout::Col), Inputs::Normal(310));
    add(grouped(9, [2, 24, 16], Layout::Col), Inputs::Normal(312));
    add(grouped(4, [50, 33, 35], Layout::Row), Inputs::Special(315));
    for (seed, (epilogue, out)) in (316..).zip(epilogues(precision)) {
        let p = grouped(4, [50, 40, 33], Layout::Row);
        add(MatmulProblem { epilogue, out, ..p }, Inputs::Normal(seed));
    }
}

/// Each part of an epilogue, all of them together, and results of another type.
fn epilogues(precision: Precision) -> Vec<(Epilogue, arch::DType)> {
    let (none, own) = (Epilogue::default(), precision.storage());
    let all = |activation| Epilogue { bias: true, activation, gate: true, residual: true };
    let other = if own == arch::DType::F32 { arch::DType::F16 } else { arch::DType::F32 };
    let mut parts = vec![
        (Epilogue { bias: true, ..none }, own),
        (Epilogue { gate: true, ..none }, own),
        (Epilogue { residual: true, ..none }, own),
        (none, other),
        (all(None), other),
    ];
    parts.extend(Activation::ALL.map(|a| (all(Some(a)), own)));
    parts
}

/// Fewer shapes for configs that are not the default: full tiles, every edge, one thin, edges of all but k,
/// one of more blocks than a card has processors, one deep enough for k in many parts, the last of them ragged.
pub fn config_cases(precision: Precision) -> Vec<EdgeCase> {
    let layouts = [Layout::Row, Layout::Col];
    let sizes = [[256, 256, 128], [131, 259, 67], [1, 264, 72], [9, 37, 80]];
    let full =
        Epilogue { bias: true, activation: Some(Activation::Silu), gate: true, residual: true };
    let mut cases = Vec::new();
    let mut add = |size, layouts, seed, epilogue| {
        let plain =
            MatmulProblem::dense(1, size, layouts, precision).expect("sizes here are positive");
        let problem = MatmulProblem { epilogue, ..plain };
        cases.push(EdgeCase { problem, inputs: Inputs::Normal(seed) });
    };
    for (seed, size) in (200u64..).zip(sizes) {
        for lhs in layouts {
            for rhs in layouts {
                add(size, [lhs, rhs], seed, Epilogue::default());
            }
        }
        add(size, layouts, seed, full);
    }
    add([24, 72, 8184], layouts, 210, Epilogue::default());
    add([2064, 3080, 256], layouts, 213, full);
    // Large tiles, and k in parts.
    add([256, 1024, 8184], layouts, 214, full);
    // Few rows, whose k is in parts for tiles that a driver moves.
    add([24, 136, 4104], [Layout::Row, Layout::Col], 215, full);
    add([40, 264, 4096], layouts, 216, Epilogue { residual: true, ..Epilogue::default() });
    // Results that do not fill a word: a buffer is longer than they are.
    add([3, 67, 8184], layouts, 211, full);
    // Batches, each of which begins past the start of the buffers, of whole tiles and of none.
    for (seed, batch, size) in
        [(217, 2, [256, 256, 128]), (218, 3, [72, 137, 99]), (219, 3, [24, 136, 4096])]
    {
        for rhs in layouts {
            let problem = MatmulProblem::dense(batch, size, [Layout::Row, rhs], precision)
                .expect("sizes here are positive");
            cases.push(EdgeCase { problem, inputs: Inputs::Normal(seed) });
        }
    }
    let normed = normed(precision).into_iter().skip(2).take(4);
    cases.extend(normed.map(|problem| EdgeCase { problem, inputs: Inputs::Normal(212) }));
    for (seed, rhs) in [(207, Layout::Row), (206, Layout::Col)] {
        let problem = MatmulProblem::grouped(6, [301, 136, 72], rhs, precision)
            .expect("sizes here are positive");
        cases.push(EdgeCase { problem, inputs: Inputs::Normal(seed) });
    }
    cases
}
