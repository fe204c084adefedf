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
use cubecl::bytes::Bytes;
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

/// A buffer of `bytes`, whole words, for [`launch_twice`] to fill.
fn unwritten(device: &Device, bytes: usize) -> Handle {
    device.client().empty(bytes.next_multiple_of(4))
}

/// Launches twice, as a session does: what the first launch leaves in scratch must not disturb the second, and both
/// must leave the same bytes in `outputs`, for kernels are deterministic. Before either they are NaN, so that what one
/// does not write is neither the other's nor that of a config before.
fn launch_twice(
    device: &Device,
    outputs: &[&Handle],
    mut launch: impl FnMut(),
) -> Result<(), CheckError> {
    let mut run = || {
        for output in outputs {
            let bytes = output.size_in_used() as usize;
            device.client().write(output, Bytes::from_bytes_vec(vec![0xff; bytes]));
        }
        launch();
        let bytes = outputs.iter().map(|out| device.client().read_one((*out).clone()));
        bytes.collect::<Result<Vec<_>, _>>().map_err(kernel_error)
    };
    let (first, second) = (run()?, run()?);
    for (output, (first, second)) in first.iter().zip(&second).enumerate() {
        if let Some(at) = first.iter().zip(second.iter()).position(|(a, b)| a != b) {
            let which = format!("output {output} of two launches differs from byte {at} on");
            return Err(CheckError::Kernel(which));
        }
    }
    Ok(())
}

/// What q is multiplied by for large scores, of [`LARGEST`] and more; less below a soft cap, which bends a score by more
/// than the tolerance has of what it was rounded by.
const fn large(softcap: Option<f32>) -> f32 {
    if softcap.is_some() { 1000.0 } else { 4000.0 }
}

const LARGEST: f32 = 1e4;

/// Refuses inputs whose scores, as their log-sum-exp tells, are not as large as they are meant to be.
fn scores_are_large(lse: Option<&[f32]>) -> Result<(), CheckError> {
    let largest = lse.unwrap_or_default().iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if largest >= LARGEST {
        return Ok(());
    }
    Err(CheckError::Kernel(format!("the largest score is {largest}, not {LARGEST} or more")))
}

/// Normal values of deviation 1/√k, as a layer's weights over k inputs are: its results are of size 1 then, like
/// bias, gate and residual, none of which could be left out within the tolerance of larger ones.
fn weights(seed: u64, len: usize, k: u32) -> Vec<f32> {
    let scale = 1.0 / (k as f32).sqrt();
    let normal = reference::fill(seed, len, reference::Distribution::Normal);
    normal.into_iter().map(|v| v * scale).collect()
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
