//! Checks matmul against its reference.

use arch::Device;
use cubecl::server::Handle;
use kernels::matmul::{
    Activation, Epilogue, EpilogueBuffers, Layout, Matmul, MatmulConfig, MatmulOperands,
    MatmulProblem, NormBuffers, Operand, Precision,
};
use kernels::norm::NormKind;
use reference::{Comparison, Distribution, Special, Strides, fill, plant};
use tune::{Kernel, Queue};

use crate::check::{
    CheckError, FAR, Verdict, fnv1a, give_back, kernel_error, launch_twice, nearby, padded,
    scattered, twice, unwritten, weights, window,
};
use crate::norm::reference_rule;

/// Contents of the operands, with a seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inputs {
    /// Normal.
    Normal(u64),
    /// Normal, with infinities and NaN in both operands.
    Special(u64),
    /// Normal, in buffers that reach past 2^31 elements. Only the elements that the problem reads are initialised.
    Far(u64),
}

impl Inputs {
    const fn seed(self) -> u64 {
        match self {
            Self::Normal(seed) | Self::Special(seed) | Self::Far(seed) => seed,
        }
    }
}

/// A problem to verify.
#[derive(Debug, Clone, Copy)]
pub struct EdgeCase {
    pub problem: MatmulProblem,
    pub inputs: Inputs,
}

impl EdgeCase {
    /// Distribution of rows over the groups of a grouped problem, chosen by the seed; `None` for other problems.
    pub fn shares(&self) -> Option<Shares> {
        self.problem.grouped.then(|| Shares::ALL[(self.inputs.seed() % 4) as usize])
    }
}

/// Distribution of rows over groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shares {
    /// The same number for each group.
    Even,
    /// All rows in the last group.
    Last,
    /// One row per group; the last group has the rest.
    Single,
    /// Every other group is empty.
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

    /// First row of each group, then the end of the last group.
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

/// Runs `case` on fresh host inputs and compares every result with the reference. The output is NaN before the launch,
/// so that an unwritten element fails.
///
/// # Errors
/// The kernel failed to run. A wrong result is a [`Verdict`], not an error.
pub(super) fn verify(
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
    let Epilogue { bias, pre_activation, gate, residual, .. } = problem.epilogue;
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
            pre_activation: pre_activation.then(|| unwritten(device, out_len * problem.out.size())),
            gate: part(&host.gate, result),
            residual: part(&host.residual, result),
        },
        second: None,
        rows: host.offsets.as_ref().map(|offsets| {
            let bytes: Vec<u8> = offsets.iter().flat_map(|o| o.to_le_bytes()).collect();
            upload(&bytes)
        }),
        norm: host
            .norm
            .as_ref()
            .map(|weight| NormBuffers { weight: upload(&stored.encode(weight)), eps: EPS }),
    };
    let outputs: Vec<_> =
        [&operands.out].into_iter().chain(&operands.epilogue.pre_activation).collect();
    launch_twice::<Matmul>(device, problem, config, &operands, &outputs)?;
    verdict(device, problem, &operands, &host, None)
}

/// Rows compared at each end of a result that is itself far.
const FAR_ROWS: u32 = 64;

/// [`verify`] without an epilogue, for operands or second batches that begin far away, or for a result that reaches
/// far. The reference gets them close together.
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
    // Writes the matrix of each batch to its place.
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
        second: None,
    };
    if !far {
        launch_twice::<Matmul>(device, problem, config, &operands, &[&operands.out])?;
        return verdict(device, &near, &operands, &host, None);
    }
    let compared = [0, near.m - FAR_ROWS].map(|first| rows_of(&operands.out, &near, first));
    let scratch = Matmul::scratch(device, problem, config);
    twice(device, &compared, || {
        Matmul::launch(&Queue::Device(device), problem, config, &operands, scratch.as_ref());
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

/// A view of [`FAR_ROWS`] rows of the result of `p`, from row `first` on.
fn rows_of(out: &Handle, p: &MatmulProblem, first: u32) -> Handle {
    let row = p.n as usize * p.out.size();
    window(out, first as usize * row, FAR_ROWS as usize * row)
}

/// Decoded inputs of one matmul.
struct Host {
    lhs: Vec<f32>,
    rhs: Vec<f32>,
    bias: Option<Vec<f32>>,
    gate: Option<Vec<f32>>,
    residual: Option<Vec<f32>>,
    /// Weight of the norm.
    norm: Option<Vec<f32>>,
    /// First row of each group, then the end of the last group.
    offsets: Option<Vec<u32>>,
}

/// Compares the result of a launch in `operands` with the reference at a seeded sample of positions. Reads the inputs
/// back from the device.
///
/// # Errors
/// The launch failed.
pub(super) fn verify_operands(
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
    let reference = reference_of(problem);
    let lhs = &host.lhs[problem.lhs.start as usize..];
    let rhs = &host.rhs[problem.rhs.start as usize..];
    let compare = |made: &Handle, epilogue: reference::Epilogue<'_>| {
        let bytes = device.client().read_one(made.clone()).map_err(kernel_error)?;
        let out = dtype.decode(&bytes[..len])?;
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
        Ok::<_, CheckError>((comparison, fnv1a(&bytes[..len])))
    };
    let start = reference::Epilogue {
        norm: row_norm(problem.norm, operands.norm.as_ref(), host.norm.as_deref()),
        bias: host.bias.as_deref(),
        ..reference::Epilogue::NONE
    };
    let own = problem.epilogue;
    let whole = reference::Epilogue {
        pre_activation: own.pre_activation.then_some(dtype),
        activation: own.activation.map(reference_activation),
        activation_last: own.activation_last,
        gate: host.gate.as_deref(),
        slope: own.slope.map(reference_activation),
        residual: host.residual.as_deref(),
        ..start
    };
    let (mut comparison, mut digest) = compare(&operands.out, whole)?;
    if let Some(made) = &operands.epilogue.pre_activation {
        let (second, own) = compare(made, start)?;
        comparison = Comparison::worst(vec![comparison, second]);
        digest ^= own.rotate_left(1);
    }
    Ok(Verdict { comparison, digest })
}

/// Epsilon of the norm. It is large next to the mean square of the rows, which is about 1, so that leaving it out
/// fails.
pub(crate) const EPS: f32 = 0.25;

/// Converts a problem's norm to the reference's form; `weight` is its weight.
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

pub(crate) const fn reference_dtype(precision: Precision) -> reference::DType {
    match precision {
        Precision::F32 => reference::DType::F32,
        Precision::Tf32 => reference::DType::Tf32,
        Precision::F16 | Precision::F16Acc16 => reference::DType::F16,
        Precision::Bf16 => reference::DType::Bf16,
    }
}

/// Dtype of the result.
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
        Activation::Relu => reference::Activation::Relu,
        Activation::Sigmoid => reference::Activation::Sigmoid,
        Activation::Tanh => reference::Activation::Tanh,
        Activation::HardSigmoid { scale, shift } => {
            reference::Activation::HardSigmoid { scale: scale.value(), shift: shift.value() }
        }
        Activation::HardSwish => reference::Activation::HardSwish,
        Activation::Clip { low, high } => {
            reference::Activation::Clip { low: low.value(), high: high.value() }
        }
        Activation::LeakyRelu { slope } => {
            reference::Activation::LeakyRelu { slope: slope.value() }
        }
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
