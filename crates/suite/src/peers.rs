//! Burn's and cubek's ops on the same case, in the same process.

use std::panic::{AssertUnwindSafe, catch_unwind};

use arch::{Backend, Device};
use burn::tensor::module::{attention, conv2d};
use burn::tensor::ops::{AttentionModuleOptions, ConvOptions};
use burn::tensor::{DType, DeviceKind, Distribution, FloatDType, Tensor};
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::TensorBinding;
use cubecl::server::Handle;
use cubecl::zspace::Tiling;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::strategy::Strategy;
use cubek::std::InputBinding;
use kernels::attention::AttentionProblem;
use kernels::conv::ConvProblem;
use kernels::matmul::{
    Epilogue, Layout, Matmul, MatmulOperands, MatmulProblem, Precision, Reading,
};
use tune::Kernel;
use tune::timing::{self, Effort, Timing, TimingError};

use crate::kernel::KernelSuite;

/// Name of the Burn peer on `device`: its CubeCL ops on a GPU, its CPU backend on a host.
pub(crate) const fn burn_name(device: Backend) -> &'static str {
    match device {
        Backend::Cpu => "burn-flex",
        _ => "burn",
    }
}

/// Reasons why neither peer runs a case.
const SUMS: &str = "it accumulates f16 in f32";
const GROUPS: &str = "it has no grouped matmul";

/// Times Burn's matmul on dense operands.
///
/// # Errors
/// The reason why Burn has no time for it.
pub(crate) fn burn_matmul(
    device: &Device,
    p: &MatmulProblem,
    sets: usize,
) -> Result<Timing, TimingError> {
    let burn_device = burn_device(device)?;
    let dtype = burn_dtype(p.precision)?;
    if p.grouped {
        return Err(failed(GROUPS));
    }
    let batch = p.batch() as usize;
    let make = |layout: Layout, rows: u32, cols: u32| {
        let (rows, cols) = (rows as usize, cols as usize);
        let shape = match layout {
            Layout::Row => [batch, rows, cols],
            Layout::Col => [batch, cols, rows],
        };
        let normal = Distribution::Normal(0.0, 1.0);
        let tensor = Tensor::<3>::random(shape, normal, &burn_device).cast(dtype);
        if layout == Layout::Col { tensor.swap_dims(1, 2) } else { tensor }
    };
    let operands: Vec<_> =
        (0..sets).map(|_| (make(p.lhs.layout, p.m, p.k), make(p.rhs.layout, p.k, p.n))).collect();
    let multiply = |i: usize| {
        let (lhs, rhs) = &operands[i % operands.len()];
        lhs.clone().matmul(rhs.clone())
    };
    let out = multiply(0);
    let wanted = DType::from(dtype);
    if out.dtype() != wanted {
        return Err(TimingError::Failed(format!("Burn computed in {:?}", out.dtype())));
    }
    let wait = || burn_device.sync().map_err(|e| TimingError::Failed(format!("{e:?}")));
    wait()?;
    time_burn(device, |i| drop(multiply(i)), wait)
}

/// Returns Burn's dtype of a precision; an error for sums that Burn lacks.
fn burn_dtype(precision: Precision) -> Result<FloatDType, TimingError> {
    match precision {
        Precision::F32 | Precision::Tf32 => Ok(FloatDType::F32),
        Precision::F16 => Ok(FloatDType::F16),
        Precision::Bf16 => Ok(FloatDType::BF16),
        Precision::F16Acc16 => Err(failed(SUMS)),
    }
}

/// Returns Burn's device for the processor of `device`.
fn burn_device(device: &Device) -> Result<burn::tensor::Device, TimingError> {
    match device.backend() {
        Backend::Cuda => Ok(burn::tensor::Device::cuda(0)),
        Backend::Vulkan => Ok(burn::tensor::Device::vulkan(DeviceKind::DefaultDevice)),
        Backend::Cpu => Ok(burn::tensor::Device::flex()),
        Backend::WebGpu => Err(TimingError::Failed("Burn has no native WGSL device".to_owned())),
    }
}

/// Times one of Burn's ops; `wait` synchronises Burn's device.
fn time_burn(
    device: &Device,
    launch: impl FnMut(usize),
    wait: impl Fn() -> Result<(), TimingError>,
) -> Result<Timing, TimingError> {
    let effort = Effort::report(device.backend());
    match device.backend() {
        Backend::Cpu => Ok(timing::measure_host(effort, launch)),
        // Timestamps of our client do not bracket Burn's launches through wgpu: on an H200, "the profiled window
        // resolved no device timing".
        Backend::Vulkan => timing::measure_batches(effort, launch, wait),
        _ => timing::measure_launches(device, effort, launch),
    }
}

/// Times Burn's attention on dense operands.
///
/// # Errors
/// The reason why Burn has no time for it.
pub(crate) fn burn_attention(
    device: &Device,
    p: &AttentionProblem,
    sets: usize,
) -> Result<Timing, TimingError> {
    let burn_device = burn_device(device)?;
    let dtype = match p.dtype {
        arch::DType::F16 => FloatDType::F16,
        arch::DType::Bf16 => FloatDType::BF16,
        _ => FloatDType::F32,
    };
    if p.heads != p.kv_heads {
        return Err(TimingError::Failed("Burn does not share heads".to_owned()));
    }
    let make = |seq: u32| {
        let shape = [p.batch, p.heads, seq, p.head_dim].map(|s| s as usize);
        let normal = Distribution::Normal(0.0, 1.0);
        Tensor::<4>::random(shape, normal, &burn_device).cast(dtype)
    };
    let operands: Vec<_> =
        (0..sets).map(|_| (make(p.seq_q), make(p.seq_kv), make(p.seq_kv))).collect();
    let attend = |i: usize| {
        let (q, k, v) = operands[i % operands.len()].clone();
        let options = AttentionModuleOptions { is_causal: p.causal, ..Default::default() };
        attention(q, k, v, None, None, options)
    };
    let wait = || burn_device.sync().map_err(|e| TimingError::Failed(format!("{e:?}")));
    drop(attend(0));
    wait()?;
    time_burn(device, |i| drop(attend(i)), wait)
}

/// Times Burn's convolution of one image with channels last, without an epilogue.
///
/// # Errors
/// The reason why Burn has no time for it.
pub(crate) fn burn_conv(
    device: &Device,
    p: &ConvProblem,
    sets: usize,
) -> Result<Timing, TimingError> {
    let burn_device = burn_device(device)?;
    let dtype = burn_dtype(p.precision)?;
    let one_side = p.padding.iter().all(|[before, after]| before == after && *before >= 0);
    let plain = p.reading == Reading::Plain && p.channels[1] == 0 && one_side;
    if !plain || p.epilogue != Epilogue::default() {
        return Err(failed(
            "it convolves one image, padded alike on both sides, without an epilogue",
        ));
    }
    let make = |shape: [u32; 4]| {
        let shape = shape.map(|size| size as usize);
        let normal = Distribution::Normal(0.0, 1.0);
        let last = Tensor::<4>::random(shape, normal, &burn_device).cast(dtype);
        last.permute([0, 3, 1, 2])
    };
    let ([height, width], [rows, cols], channels) = (p.image, p.taps, p.channels[0]);
    let operands: Vec<_> = (0..sets)
        .map(|_| {
            let weight = make([p.filters, rows, cols, channels / p.groups]);
            (make([p.batch, height, width, channels]), weight)
        })
        .collect();
    let pair = |pair: [u32; 2]| pair.map(|size| size as usize);
    let padding = p.padding.map(|[before, _]| before as usize);
    let groups = p.groups as usize;
    let convolve = |i: usize| {
        let (x, weight) = operands[i % operands.len()].clone();
        let options = ConvOptions::new(pair(p.stride), padding, pair(p.dilation), groups);
        conv2d(x, weight, None, options)
    };
    let wait = || burn_device.sync().map_err(|e| TimingError::Failed(format!("{e:?}")));
    drop(convolve(0)); // Tunes.
    wait()?;
    time_burn(device, |i| drop(convolve(i)), wait)
}

/// Times cubek's matmul, with its automatic strategy, on our operands. Checks its result like ours and launches it one
/// at a time, like Burn's.
///
/// # Errors
/// The reason why cubek has no time for it.
pub(crate) fn cubek_matmul(
    device: &Device,
    p: &MatmulProblem,
    sets: &[MatmulOperands],
) -> Result<Timing, TimingError> {
    let elem = match p.precision {
        Precision::F32 => ElemType::Float(FloatKind::F32),
        Precision::F16 => ElemType::Float(FloatKind::F16),
        Precision::Bf16 => ElemType::Float(FloatKind::BF16),
        Precision::Tf32 => return Err(failed("it does not report whether the matmul ran in tf32")),
        Precision::F16Acc16 => return Err(failed(SUMS)),
    };
    if p.grouped {
        return Err(failed(GROUPS));
    }
    let tensor = |handle: &Handle, layout: Layout, rows: u32, cols: u32| {
        let [batch, rows, cols] = [p.batch() as usize, rows as usize, cols as usize];
        let [row, col] = if layout == Layout::Row { [cols, 1] } else { [1, rows] };
        TensorBinding {
            handle: handle.clone().binding(),
            strides: [rows * cols, row, col].into(),
            shape: [batch, rows, cols].into(),
            tiling: Tiling::UNTILED,
        }
    };
    let elems = MatmulElems::from_globals(&MatmulGlobalElems { lhs: elem, rhs: elem, out: elem });
    let launch = |i: usize| {
        let set = &sets[i % sets.len()];
        let lhs = InputBinding::new(tensor(&set.lhs, p.lhs.layout, p.m, p.k), elem);
        let rhs = InputBinding::new(tensor(&set.rhs, p.rhs.layout, p.k, p.n), elem);
        let out = tensor(&set.out, Layout::Row, p.m, p.n);
        launch_ref(&Strategy::Auto, device.client(), lhs, rhs, out, &mut elems.clone())
    };
    Matmul::outputs(p, &sets[0]).iter().for_each(|output| tune::poison(device, output));
    // cubek panics if its first choice cannot run.
    match catch_unwind(AssertUnwindSafe(|| launch(0))) {
        Ok(launched) => launched.map_err(failed)?,
        Err(_) => return Err(failed("it panicked, see the message above")),
    }
    let verdict = Matmul::verify_operands(device, p, &sets[0], 7).map_err(failed)?;
    if !verdict.comparison.passed {
        return Err(failed(format!("wrong result: {}", verdict.comparison)));
    }
    let mut error = None;
    let timing = timing::measure_launches(device, Effort::report(device.backend()), |i| {
        error = error.take().or(launch(i).err());
    })?;
    error.map_or(Ok(timing), |e| Err(failed(e)))
}

fn failed(why: impl std::fmt::Display) -> TimingError {
    TimingError::Failed(why.to_string().trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cubek_multiplies_our_operands() {
        let device = Device::open(Backend::Cpu).expect("every machine has one");
        let (row, col) = (Layout::Row, Layout::Col);
        for (batch, sizes, layouts) in [(3, [33, 40, 24], [row, col]), (1, [1, 96, 64], [col, row])]
        {
            let p = MatmulProblem::dense(batch, sizes, layouts, Precision::F32).expect("valid");
            let sets = tune::operand_sets::<Matmul>(&device, &p);
            let timing = cubek_matmul(&device, &p, &sets).expect("right and timed");
            assert!(timing.median_ns() > 0.0);
        }
    }
}
