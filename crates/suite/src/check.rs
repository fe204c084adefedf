//! Shared parts of every check: guarded buffers, two launches that must be bit-identical, and inputs.

use std::ops::Range;

use arch::{Backend, DType, Device};
use cubecl::bytes::Bytes;
use cubecl::server::Handle;
use reference::Comparison;
use tune::{Kernel, Queue};

/// Reason why a check has no verdict.
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
    /// FNV-1a of the output's bytes; equal digests mean bit-identical results.
    pub digest: u64,
}

pub(crate) fn kernel_error(e: impl std::fmt::Debug) -> CheckError {
    CheckError::Kernel(format!("{e:?}"))
}

pub(crate) const fn reference_dtype(dtype: DType) -> reference::DType {
    match dtype {
        DType::F16 => reference::DType::F16,
        DType::Bf16 => reference::DType::Bf16,
        _ => reference::DType::F32,
    }
}

/// Reads the first `bytes` of a buffer.
pub(crate) fn read(device: &Device, handle: &Handle, bytes: usize) -> Result<Vec<u8>, CheckError> {
    let all = device.client().read_one(handle.clone()).map_err(kernel_error)?;
    Ok(all[..bytes].to_vec())
}

/// Minimum guard on each side of a buffer that a kernel writes, in bytes. The kernel must leave it unchanged. Every
/// device can bind a buffer at a multiple of it, and allocates multiples of it.
pub(crate) const GUARD: usize = 512;

/// Uploads `bytes` between guards.
pub(crate) fn guarded(device: &Device, bytes: &[u8]) -> Handle {
    let bytes = padded(bytes);
    let mut whole = vec![0xff; guarded_len(bytes.len())];
    whole[GUARD..][..bytes.len()].copy_from_slice(&bytes);
    window(&device.client().create_from_slice(&whole), GUARD, bytes.len())
}

/// Allocates a buffer of `bytes`, rounded up to whole words, between guards. All bits are ones, which is NaN.
pub(crate) fn unwritten(device: &Device, bytes: usize) -> Handle {
    let bytes = bytes.next_multiple_of(4);
    let whole = device.client().empty(guarded_len(bytes));
    ones(device, &whole);
    window(&whole, GUARD, bytes)
}

pub(crate) const fn guarded_len(bytes: usize) -> usize {
    (bytes + 2 * GUARD).next_multiple_of(GUARD)
}

pub(crate) fn ones(device: &Device, buffer: &Handle) {
    tune::fill(device, buffer, buffer.size_in_used() as usize / 4, u32::MAX);
}

/// Checks that no launch wrote to the guards of a buffer.
pub(crate) fn intact(device: &Device, buffer: &Handle) -> Result<(), CheckError> {
    let mut whole = buffer.clone();
    (whole.offset_start, whole.offset_end) = (None, None);
    let behind = GUARD + buffer.size_in_used() as usize;
    let rest = whole.size() as usize - behind;
    for (place, start, len) in [("before", 0, GUARD), ("behind", behind, rest)] {
        let guard = window(&whole, start, len);
        let bytes = device.client().read_one(guard).map_err(kernel_error)?;
        if let Some(at) = bytes.iter().position(|byte| *byte != 0xff) {
            let what = format!("byte {at} of the {len} {place} a buffer was overwritten");
            return Err(CheckError::Kernel(what));
        }
    }
    Ok(())
}

/// Launches twice, as a session does. Scratch left by the first launch must not affect the second. Kernels are
/// deterministic, so both launches must write the same bytes to `outputs`.
///
/// Outputs are NaN before each launch, which exposes unwritten elements. Scratch is NaN before the first launch. Guards
/// of outputs and scratch must stay unchanged; allocate outputs with [`unwritten`].
pub(crate) fn launch_twice<K: Kernel>(
    device: &Device,
    problem: &K::Problem,
    config: &K::Config,
    operands: &K::Operands,
    outputs: &[&Handle],
) -> Result<(), CheckError> {
    let scratch = scratch_of::<K>(device, problem, config);
    let outputs: Vec<_> = outputs.iter().map(|output| (*output).clone()).collect();
    twice(device, &outputs, || {
        K::launch(&Queue::Device(device), problem, config, operands, scratch.as_ref())
    })?;
    outputs.iter().chain(&scratch).try_for_each(|buffer| intact(device, buffer))
}

/// Launches twice on fresh `operands` of a kernel that reads what it writes, and returns the bytes of what it `writes`, which
/// must be the same. Allocate these with [`guarded`] or [`unwritten`].
pub(crate) fn launch_in_place<K: Kernel>(
    device: &Device,
    problem: &K::Problem,
    config: &K::Config,
    operands: impl Fn() -> K::Operands,
    writes: impl Fn(&K::Operands) -> Vec<Handle>,
) -> Result<Vec<Vec<u8>>, CheckError> {
    let scratch = scratch_of::<K>(device, problem, config);
    let run = || {
        let operands = operands();
        K::launch(&Queue::Device(device), problem, config, &operands, scratch.as_ref());
        let read = |buffer: &Handle| {
            intact(device, buffer)?;
            read(device, buffer, buffer.size_in_used() as usize)
        };
        writes(&operands).iter().map(read).collect::<Result<Vec<_>, _>>()
    };
    let (first, second) = (run()?, run()?);
    if first != second {
        return Err(kernel_error("two launches differ"));
    }
    scratch.iter().try_for_each(|scratch| intact(device, scratch))?;
    Ok(first)
}

/// Launches the baseline once more on `operands`, and returns the bytes of what it `writes`.
pub(crate) fn launch_again<K: Kernel>(
    device: &Device,
    problem: &K::Problem,
    operands: &K::Operands,
    writes: &[&Handle],
) -> Result<Vec<Vec<u8>>, CheckError> {
    let config = K::baseline(device.profile(), problem).map_err(kernel_error)?;
    let scratch = K::scratch(device, problem, &config);
    K::launch(&Queue::Device(device), problem, &config, operands, scratch.as_ref());
    writes.iter().map(|buffer| read(device, buffer, buffer.size_in_used() as usize)).collect()
}

/// Reads the first `len` elements of a buffer.
pub(crate) fn values(
    device: &Device,
    handle: &Handle,
    len: usize,
    dtype: DType,
) -> Result<Vec<f32>, CheckError> {
    Ok(reference_dtype(dtype).decode(&read(device, handle, len * dtype.size())?)?)
}

/// Allocates guarded scratch for launches: NaN, except for values that the first launch expects.
pub(crate) fn scratch_of<K: Kernel>(
    device: &Device,
    problem: &K::Problem,
    config: &K::Config,
) -> Option<Handle> {
    let bytes = K::scratch_bytes(problem, config) as usize;
    (bytes > 0).then(|| {
        let scratch = unwritten(device, bytes);
        K::prepare(device, &scratch);
        scratch
    })
}

/// [`launch_twice`] for buffers without guards.
pub(crate) fn twice(
    device: &Device,
    outputs: &[Handle],
    mut launch: impl FnMut(),
) -> Result<(), CheckError> {
    let mut run = || {
        outputs.iter().for_each(|output| ones(device, output));
        launch();
        let bytes = outputs.iter().map(|output| device.client().read_one(output.clone()));
        bytes.collect::<Result<Vec<_>, _>>().map_err(kernel_error)
    };
    let (first, second) = (run()?, run()?);
    for (output, (first, second)) in first.iter().zip(&second).enumerate() {
        if let Some(at) = first.iter().zip(second.iter()).position(|(a, b)| a != b) {
            let which = format!("output {output} differs between two launches, from byte {at} on");
            return Err(CheckError::Kernel(which));
        }
    }
    Ok(())
}

/// Offsets past 2^31 and past 2^32 elements, to test 64-bit addressing.
pub(crate) const FAR: [u64; 2] = [(1 << 31) + 64, (1 << 32) + 64];
/// Page stride that puts the third page past 2^31 elements.
pub(crate) const FAR_PAGE: u64 = (1 << 30) + 64;

/// `step` without its far offset.
pub(crate) fn nearby(step: u64) -> u64 {
    let apart = [FAR_PAGE, FAR[0], FAR[1]];
    step - apart.into_iter().rfind(|far| step >= *far).unwrap_or_default()
}

/// Allocates `len` bytes and copies each range of `bytes` to the byte offset given with it. The rest is not
/// initialised.
pub(crate) fn scattered(
    device: &Device,
    len: usize,
    bytes: &[u8],
    pieces: impl Iterator<Item = (Range<usize>, usize)>,
) -> Handle {
    let buffer = device.client().empty(len.next_multiple_of(4));
    for (piece, to) in pieces {
        let bytes = bytes[piece].to_vec();
        device.client().write(&window(&buffer, to, bytes.len()), Bytes::from_bytes_vec(bytes));
    }
    buffer
}

/// A view of `len` bytes of a whole buffer, from byte `start` on.
pub(crate) fn window(buffer: &Handle, start: usize, len: usize) -> Handle {
    let rest = buffer.size_in_used() - (start + len) as u64;
    buffer.clone().offset_start(start as u64).offset_end(rest)
}

/// Frees the memory of far operands: gigabytes of a card, which checks in other processes may need.
pub(crate) fn give_back(device: &Device) -> Result<(), CheckError> {
    // A host takes seconds to allocate them again.
    match device.backend() {
        Backend::Cuda => device.client().memory_cleanup().map_err(kernel_error),
        _ => Ok(()),
    }
}

/// Factor for q that yields scores of [`LARGEST`] and more. It is smaller below a soft cap, whose bend would exceed the
/// tolerance for the rounding of a score.
pub(crate) const fn large(softcap: Option<f32>) -> f32 {
    if softcap.is_some() { 1000.0 } else { 4000.0 }
}

pub(crate) const LARGEST: f32 = 1e4;

/// Refuses inputs whose log-sum-exp shows that their scores are not as large as intended.
pub(crate) fn scores_are_large(lse: Option<&[f32]>) -> Result<(), CheckError> {
    let largest = lse.unwrap_or_default().iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if largest >= LARGEST {
        return Ok(());
    }
    Err(CheckError::Kernel(format!(
        "expected a largest score of at least {LARGEST}, got {largest}"
    )))
}

/// Normal values of deviation 1/√k, like the weights of a layer with k inputs. Results then have size 1, as do bias,
/// gate and residual, so the tolerance cannot hide a missing one.
pub(crate) fn weights(seed: u64, len: usize, k: u32) -> Vec<f32> {
    let scale = 1.0 / (k as f32).sqrt();
    let normal = reference::fill(seed, len, reference::Distribution::Normal);
    normal.into_iter().map(|v| v * scale).collect()
}

/// Zeros the first of several blocks of `len`; a block of zeros has no scale. A single block keeps its values.
pub(crate) fn zero_first(values: &mut [f32], len: usize) {
    if values.len() > len {
        values[..len].fill(0.0);
    }
}

/// Checks that a quantiser raises its flag for a value that is not finite: the first, a middle and the last one.
/// `launch` gets the values and the flag.
pub(crate) fn tells_broken(
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
            return Err(CheckError::Kernel(format!("{value} at {place} was not reported")));
        }
    }
    Ok(())
}

/// Spreads rows `[.., width]` to a distance of `stride`, with NaN between them.
pub(crate) fn apart(rows: &[f32], width: usize, stride: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; (rows.len() / width.max(1)).saturating_sub(1) * stride + width];
    for (out, row) in out.chunks_mut(stride.max(1)).zip(rows.chunks(width.max(1))) {
        out[..width].copy_from_slice(row);
    }
    out
}

/// The inverse of [`apart`].
pub(crate) fn together(rows: &[f32], width: usize, stride: usize) -> Vec<f32> {
    rows.chunks(stride.max(1)).flat_map(|row| &row[..width]).copied().collect()
}

/// Pads to whole words, as device buffers require.
pub(crate) fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut out = bytes.to_vec();
    out.resize(bytes.len().next_multiple_of(4), 0);
    out
}

/// FNV-1a hash of `bytes`.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3))
}
