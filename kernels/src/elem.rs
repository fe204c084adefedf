//! Element types: ours as CubeCL names them, and how coarse they are.

use arch::DType;
use cubecl::ir::{ElemType, FloatKind};

/// Returns the element type that a kernel over `dtype` computes in.
pub(crate) const fn elem(dtype: DType) -> ElemType {
    match dtype {
        DType::Tf32 => ElemType::Float(FloatKind::TF32),
        DType::F16 => ElemType::Float(FloatKind::F16),
        DType::Bf16 => ElemType::Float(FloatKind::BF16),
        _ => ElemType::Float(FloatKind::F32),
    }
}

/// Largest difference of two results that were rounded to `dtype` once each, relative to the largest; 0 for f32, where the order
/// of sums counts.
pub(crate) fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-10),
        DType::Bf16 => 2f64.powi(-7),
        _ => 0.0,
    }
}
