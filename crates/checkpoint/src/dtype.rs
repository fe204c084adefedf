//! Converts between element types of safetensors and ours.

use quant::DType;
use safetensors::Dtype;

/// Element types of files with ours. Files with sub-byte or complex elements are refused.
const NAMES: [(Dtype, DType); 16] = [
    (Dtype::BOOL, DType::Bool),
    (Dtype::U8, DType::U8),
    (Dtype::I8, DType::I8),
    (Dtype::F8_E5M2, DType::F8E5m2),
    (Dtype::F8_E4M3, DType::F8E4m3),
    (Dtype::F8_E8M0, DType::F8E8m0),
    (Dtype::I16, DType::I16),
    (Dtype::U16, DType::U16),
    (Dtype::F16, DType::F16),
    (Dtype::BF16, DType::Bf16),
    (Dtype::I32, DType::I32),
    (Dtype::U32, DType::U32),
    (Dtype::F32, DType::F32),
    (Dtype::F64, DType::F64),
    (Dtype::I64, DType::I64),
    (Dtype::U64, DType::U64),
];

/// Converts an element type of a file; `None` if unsupported.
pub(crate) fn from_file(dtype: Dtype) -> Option<DType> {
    NAMES.into_iter().find(|(file, _)| *file == dtype).map(|(_, ours)| ours)
}

/// Converts an element type for a file; tf32 is stored as f32.
pub(crate) fn to_file(dtype: DType) -> Dtype {
    NAMES.into_iter().find(|(_, ours)| *ours == dtype).map_or(Dtype::F32, |(file, _)| file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_of_files_come_back() {
        for (file, ours) in NAMES {
            assert_eq!((from_file(file), to_file(ours)), (Some(ours), file));
            assert_eq!(file.bitsize(), 8 * ours.size());
        }
        assert_eq!(from_file(Dtype::F4), None);
    }
}
