//! Burn's own ops on the same case, in the same process.

use arch::{Backend, Device};
use burn::tensor::{DType, DeviceKind, Distribution, FloatDType, Tensor};
use kernels::matmul::{Layout, MatmulProblem, Precision};
use tune::timing::{self, Effort, TimingError};

/// Name of the peer that fits `device`: Burn's CubeCL ops on a GPU, its CPU backend on a host.
pub(crate) const fn name(device: Backend) -> &'static str {
    match device {
        Backend::Cpu => "burn-flex",
        _ => "burn",
    }
}

/// Median nanoseconds of Burn's matmul on dense operands, or why there is none.
pub(crate) fn matmul(device: &Device, p: &MatmulProblem, sets: usize) -> Result<f64, TimingError> {
    let (burn_device, host) = match device.backend() {
        Backend::Cuda => (burn::tensor::Device::cuda(0), false),
        Backend::Vulkan => (burn::tensor::Device::vulkan(DeviceKind::DefaultDevice), false),
        Backend::Cpu => (burn::tensor::Device::flex(), true),
        Backend::WebGpu => {
            return Err(TimingError::Failed("Burn has no native WGSL device".to_owned()));
        }
    };
    let dtype = match p.precision {
        Precision::F32 | Precision::Tf32 => FloatDType::F32,
        Precision::F16 | Precision::F16Acc16 => FloatDType::F16,
        Precision::Bf16 => FloatDType::BF16,
    };
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
    burn_device.sync().map_err(|e| TimingError::Failed(format!("{e:?}")))?;
    let timing = if host {
        timing::measure_host(Effort::report(device.backend()), |i| drop(multiply(i)))
    } else {
        timing::measure_launches(device, Effort::report(device.backend()), |i| drop(multiply(i)))?
    };
    Ok(timing.median_ns())
}
