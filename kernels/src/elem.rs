//! Element types: ours as CubeCL names them.

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
