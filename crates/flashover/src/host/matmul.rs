//! Matmul on host tensors.

use kernels::matmul::Layout;
use ops::{Epilogue, OpError};
use tune::Policy;

use super::call::{Call, check_dtypes};
use super::error::HostOpError;
use super::tensor::HostTensor;

use crate::device::Device;

/// Layouts of the operands of [`matmul`] and precision of the multiplication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatmulOptions {
    /// Layout of lhs: `Row` (default) for `[.., m, k]`, `Col` for `[.., k, m]`.
    pub lhs: Layout,
    /// Layout of rhs: `Row` (default) for `[.., k, n]`, `Col` for `[.., n, k]`, as a linear layer stores its weight.
    pub rhs: Layout,
    /// True to round f32 operands to tf32 for the tensor cores; false by default.
    pub tf32: bool,
}

impl Default for MatmulOptions {
    fn default() -> Self {
        Self { lhs: Layout::Row, rhs: Layout::Row, tf32: false }
    }
}

/// Computes `lhs · rhs + bias`. Batch axes broadcast as in NumPy.
///
/// # Shapes
/// - lhs: `[.., m, k]`, or `[.., k, m]` with [`Layout::Col`]
/// - rhs: `[.., k, n]`, or `[.., n, k]` with [`Layout::Col`]
/// - bias: `[n]`
/// - result: `[.., m, n]`, in the operands' dtype
///
/// # Errors
/// See [`HostOpError`].
pub fn matmul(
    device: &Device,
    lhs: &HostTensor,
    rhs: &HostTensor,
    bias: Option<&HostTensor>,
    options: &MatmulOptions,
    policy: Policy,
) -> Result<HostTensor, HostOpError> {
    check_dtypes(lhs, &[("rhs", Some(rhs)), ("bias", bias)])?;
    let (dtype, swapped) = (lhs.dtype(), [options.lhs == Layout::Col, options.rhs == Layout::Col]);
    let (lhs_batch, [m, lhs_k]) = split("lhs", lhs, swapped[0])?;
    let (rhs_batch, [rhs_k, n]) = split("rhs", rhs, swapped[1])?;
    let shapes = || (lhs.shape().to_vec(), rhs.shape().to_vec());
    if lhs_k != rhs_k {
        let (lhs, rhs) = shapes();
        return Err(OpError::Depth { lhs, lhs_k, rhs, rhs_k }.into());
    }
    if let Some(have) = bias.map(HostTensor::shape).filter(|have| *have != [n]) {
        return Err(OpError::Shape { what: "bias", have: have.to_vec(), need: vec![n] }.into());
    }
    let batch = ops::broadcast(lhs_batch, rhs_batch).ok_or_else(|| {
        let (lhs, rhs) = shapes();
        OpError::Broadcast { lhs, rhs }
    })?;
    let shape: Vec<_> = batch.iter().copied().chain([m, n]).collect();
    if shape.contains(&0) {
        return Ok(HostTensor::new(dtype, &shape, Vec::new())?);
    }
    // An operand without batches repeats by stride. An operand that broadcasts along some axes is copied per batch.
    let count = batch.iter().fold(1, |n: usize, s| n.saturating_mul(*s));
    let copies = |own: &[usize]| if own.iter().all(|s| *s == 1) { 1 } else { count };
    let bytes = |sizes: [usize; 3]| {
        sizes.iter().fold(dtype.size() as u128, |n, s| n.saturating_mul(*s as u128))
    };
    let (lhs_count, rhs_count) = (copies(lhs_batch), copies(rhs_batch));
    let needs = [
        ("lhs", bytes([lhs_count, m, lhs_k])),
        ("rhs", bytes([rhs_count, rhs_k, n])),
        ("the result", bytes([count, m, n])),
    ];
    let call = Call::new(device, policy, dtype, &needs)?;
    let upload = |tensor: &HostTensor, own, [count, rows, columns]: [usize; 3], swapped| {
        let bytes = spread(tensor, own, &batch, rows * columns * dtype.size());
        match swapped {
            false => call.upload(bytes, [count, rows, columns]),
            true => call.upload(bytes, [count, columns, rows]).swap_dims(1, 2),
        }
    };
    let out = ops::matmul(
        &call.ctx,
        upload(lhs, lhs_batch, [lhs_count, m, lhs_k], swapped[0]), // [1 or batch, m, k]
        upload(rhs, rhs_batch, [rhs_count, rhs_k, n], swapped[1]), // [1 or batch, k, n]
        Epilogue {
            bias: bias.map(|bias| call.upload(bias.bytes().to_vec(), [n])),
            tf32: options.tf32,
            ..Epilogue::default()
        },
    )?;
    call.download(out, dtype, &shape)
}

/// Returns the batch axes, then the rows and columns of the matrices, which are stored as columns by rows if `swapped`.
fn split<'a>(
    what: &'static str,
    tensor: &'a HostTensor,
    swapped: bool,
) -> Result<(&'a [usize], [usize; 2]), HostOpError> {
    match tensor.shape() {
        [batch @ .., columns, rows] if swapped => Ok((batch, [*rows, *columns])),
        [batch @ .., rows, columns] => Ok((batch, [*rows, *columns])),
        short => {
            let takes = "matmul takes lhs [.., m, k] and rhs [.., k, n]";
            Err(HostOpError::Rank { what, rank: short.len(), takes })
        }
    }
}

/// Returns the matrices of `tensor`, `size` bytes each, for every batch of `batch` in order; one matrix if all batch
/// axes `own` are 1.
fn spread(tensor: &HostTensor, own: &[usize], batch: &[usize], size: usize) -> Vec<u8> {
    let missing = batch.len() - own.len();
    let once = own.iter().all(|size| *size == 1);
    if once || size == 0 || (own == &batch[missing..] && batch[..missing].iter().all(|s| *s == 1)) {
        return tensor.bytes().to_vec();
    }
    let mut bytes = Vec::new();
    for flat in 0..batch.iter().product() {
        let (mut rest, mut at, mut step) = (flat, 0, 1);
        for (i, size) in batch.iter().enumerate().rev() {
            let index = rest % size;
            rest /= size;
            if let Some(own_size) = i.checked_sub(missing).map(|i| own[i]) {
                at += if own_size == 1 { 0 } else { index * step };
                step *= own_size;
            }
        }
        bytes.extend_from_slice(&tensor.bytes()[at * size..(at + 1) * size]);
    }
    bytes
}
