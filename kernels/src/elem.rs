//! Element types in CubeCL's terms, and their rounding errors.

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

/// Largest difference between two results that were each rounded once to `dtype`, relative to the largest
/// result. Returns 0 for f32, where the order of sums determines the error.
pub(crate) fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-10),
        DType::Bf16 => 2f64.powi(-7),
        _ => 0.0,
    }
}
