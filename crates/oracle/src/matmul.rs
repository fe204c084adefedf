//! Matmul against its reference, and the shapes that break matmuls.

use arch::Device;
use kernels::matmul::{
    Batches, Layout, Matmul, MatmulConfig, MatmulOperands, MatmulProblem, Operand, Precision,
};
use reference::{Distribution, Special, Strides, fill, plant};
use tune::Kernel;

use crate::{CheckError, Verdict, fnv1a};

/// What the operands hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inputs {
    /// Seeded, normal.
    Normal(u64),
    /// Normal with infinities and NaN planted in both operands.
    Special(u64),
}

/// One shape to verify.
#[derive(Debug, Clone, Copy)]
pub struct EdgeCase {
    pub problem: MatmulProblem,
    pub inputs: Inputs,
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
    let [lhs_len, rhs_len, out_len] = problem.extents();
    let dtype = reference_dtype(problem.precision);
    let make = |len: usize, salt: u64| -> Result<Vec<f32>, CheckError> {
        let (Inputs::Normal(seed) | Inputs::Special(seed)) = *inputs;
        let mut values = fill(2 * seed + salt, len, Distribution::Normal);
        if matches!(inputs, Inputs::Special(_)) {
            let places =
                [(len / 7, Special::Inf), (len / 3, Special::Nan), (len / 2, Special::NegInf)];
            plant(&mut values, dtype, &places)?;
        }
        Ok(dtype.decode(&dtype.encode(&values))?)
    };
    let (lhs, rhs) = (make(lhs_len, 0)?, make(rhs_len, 1)?);
    let bias = problem.bias.then(|| make(problem.n as usize, 1 << 40)).transpose()?;
    let client = device.client();
    let upload = |bytes: &[u8]| client.create_from_slice(&padded(bytes));
    let poison = vec![0xffu8; out_len * problem.precision.storage().size()];
    let operands = MatmulOperands {
        lhs: upload(&dtype.encode(&lhs)),
        rhs: upload(&dtype.encode(&rhs)),
        out: upload(&poison),
        bias: bias.as_ref().map(|b| upload(&dtype.encode(b))),
    };
    let scratch = Matmul::scratch(device, problem, config);
    Matmul::launch(device, problem, config, &operands, scratch.as_ref());
    verdict(device, problem, &operands, [&lhs, &rhs], bias.as_deref(), None)
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
    let dtype = reference_dtype(problem.precision);
    let [lhs_len, rhs_len, _] = problem.extents();
    let read = |handle: &cubecl::server::Handle, len: usize| -> Result<Vec<f32>, CheckError> {
        let bytes = device.client().read_one(handle.clone()).map_err(kernel_error)?;
        Ok(dtype.decode(&bytes[..len * dtype.bytes()])?)
    };
    let (lhs, rhs) = (read(&operands.lhs, lhs_len)?, read(&operands.rhs, rhs_len)?);
    let bias = operands.bias.as_ref().map(|b| read(b, problem.n as usize)).transpose()?;
    verdict(device, problem, operands, [&lhs, &rhs], bias.as_deref(), Some(seed))
}

fn verdict(
    device: &Device,
    problem: &MatmulProblem,
    operands: &MatmulOperands,
    [lhs, rhs]: [&[f32]; 2],
    bias: Option<&[f32]>,
    sample: Option<u64>,
) -> Result<Verdict, CheckError> {
    let dtype = reference_dtype(problem.precision);
    let len = problem.extents()[2] * dtype.bytes();
    let bytes = device.client().read_one(operands.out.clone()).map_err(kernel_error)?;
    let out = dtype.decode(&bytes[..len])?;
    let reference = reference_of(problem);
    let sample = match sample {
        Some(seed) => reference.sample(seed),
        None => reference.everything(),
    };
    let lhs = &lhs[problem.lhs.start as usize..];
    let rhs = &rhs[problem.rhs.start as usize..];
    let comparison = reference.check(&sample, lhs, rhs, bias, &out)?;
    Ok(Verdict { comparison, digest: fnv1a(&bytes[..len]) })
}

fn kernel_error(e: impl std::fmt::Debug) -> CheckError {
    CheckError::Kernel(format!("{e:?}"))
}

/// Device buffers are whole words.
fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut out = bytes.to_vec();
    out.resize(bytes.len().next_multiple_of(4), 0);
    out
}

const fn reference_dtype(precision: Precision) -> reference::DType {
    match precision {
        Precision::F32 => reference::DType::F32,
        Precision::Tf32 => reference::DType::Tf32,
        Precision::F16 => reference::DType::F16,
        Precision::Bf16 => reference::DType::Bf16,
    }
}

fn reference_of(p: &MatmulProblem) -> reference::Matmul {
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
        out_dtype: dtype.storage(),
    }
}

/// Tile multiples, one more and one less, ones, primes, thin and deep shapes.
const SIZES: [[u32; 3]; 14] = [
    [1, 1, 1],
    [128, 128, 128],
    [129, 127, 65],
    [256, 128, 96],
    [37, 41, 43],
    [1, 256, 512],
    [8, 192, 320],
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
pub fn edge_cases(precision: Precision) -> Vec<EdgeCase> {
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
    for (seed, sizes) in [(110, [64, 64, 64]), (111, [33, 47, 29]), (112, [1, 130, 40])] {
        add(MatmulProblem { bias: true, ..dense(1, sizes, rows) }, Inputs::Normal(seed));
    }
    // Deep enough that k is cut into parts: with batches and a bias, and with a ragged last part.
    add(MatmulProblem { bias: true, ..dense(3, [20, 24, 4104], rows) }, Inputs::Normal(113));
    add(dense(1, [5, 40, 2051], [Layout::Row, Layout::Col]), Inputs::Normal(114));
    for (seed, sizes) in [(96, [40, 48, 56]), (97, [128, 128, 64]), (98, [3, 130, 35])] {
        add(dense(1, sizes, [Layout::Row, Layout::Col]), Inputs::Special(seed));
    }
    cases
}

/// Fewer shapes for configs that are not the default: full tiles, every edge, one thin, one deep enough
/// for k in many parts, the last of them ragged.
pub fn config_cases(precision: Precision) -> Vec<EdgeCase> {
    let layouts = [Layout::Row, Layout::Col];
    let sizes = [[256, 256, 128], [131, 259, 67], [1, 264, 72]];
    let mut cases = Vec::new();
    let mut add = |size, layouts, seed| {
        let problem =
            MatmulProblem::dense(1, size, layouts, precision).expect("sizes here are positive");
        cases.push(EdgeCase { problem, inputs: Inputs::Normal(seed) });
    };
    for (seed, size) in (200u64..).zip(sizes) {
        for lhs in layouts {
            for rhs in layouts {
                add(size, [lhs, rhs], seed);
            }
        }
    }
    add([24, 72, 8184], layouts, 210);
    cases
}
