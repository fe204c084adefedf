//! Kernels against the reference: the one place that runs both. Kernel tests, `verify` and the bench
//! all check through here.

pub mod attention;
pub mod attention_backward;
pub mod decode;
pub mod decoder;
pub mod embed;
pub mod int8;
pub mod matmul;
pub mod nf4;
pub mod norm;
mod pairs;
pub mod rope;
pub mod sample;

use arch::{DType, Device};
use cubecl::server::Handle;
use reference::Comparison;

/// Why a check has no verdict.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The kernel did not compile, launch or run.
    #[error("the kernel failed: {0}")]
    Kernel(String),
    #[error(transparent)]
    Reference(#[from] reference::Error),
}

/// A finished check.
#[derive(Debug, Clone, Copy)]
pub struct Verdict {
    pub comparison: Comparison,
    /// FNV-1a of the output's bytes: equal digests are equal results, to the last bit.
    pub digest: u64,
}

fn kernel_error(e: impl std::fmt::Debug) -> CheckError {
    CheckError::Kernel(format!("{e:?}"))
}

const fn reference_dtype(dtype: DType) -> reference::DType {
    match dtype {
        DType::F16 => reference::DType::F16,
        DType::Bf16 => reference::DType::Bf16,
        _ => reference::DType::F32,
    }
}

/// The first `bytes` of a buffer.
fn read(device: &Device, handle: &Handle, bytes: usize) -> Result<Vec<u8>, CheckError> {
    let all = device.client().read_one(handle.clone()).map_err(kernel_error)?;
    Ok(all[..bytes].to_vec())
}

/// Whether a quantiser, which `launch` runs on values and a flag, raises the flag for a value that is not finite: the
/// first, one in the middle, the last.
fn tells_broken(
    device: &Device,
    dtype: reference::DType,
    values: &[f32],
    mut launch: impl FnMut(Handle, Handle),
) -> Result<(), CheckError> {
    let (client, last) = (device.client(), values.len() - 1);
    for (place, value) in [(0, f32::NAN), (last / 2, f32::INFINITY), (last, f32::NEG_INFINITY)] {
        let mut broken = values.to_vec();
        broken[place] = value;
        let flag = client.create_from_slice(&[0; 4]);
        launch(client.create_from_slice(&padded(&dtype.encode(&broken))), flag.clone());
        if read(device, &flag, 4)? == [0; 4] {
            return Err(CheckError::Kernel(format!("{value} at {place} was not told")));
        }
    }
    Ok(())
}

/// Rows `[.., width]` as they lie `stride` apart, NaN between them.
fn apart(rows: &[f32], width: usize, stride: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; (rows.len() / width.max(1)).saturating_sub(1) * stride + width];
    for (out, row) in out.chunks_mut(stride.max(1)).zip(rows.chunks(width.max(1))) {
        out[..width].copy_from_slice(row);
    }
    out
}

/// The inverse of [`apart`].
fn together(rows: &[f32], width: usize, stride: usize) -> Vec<f32> {
    rows.chunks(stride.max(1)).flat_map(|row| &row[..width]).copied().collect()
}

/// Device buffers are whole words.
fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut out = bytes.to_vec();
    out.resize(bytes.len().next_multiple_of(4), 0);
    out
}

/// FNV-1a of bytes.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3))
}
