//! Element types.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An element type of files, kernels and matrix instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    F32,
    /// f32 storage, rounded to 10 mantissa bits when a tensor core reads it.
    Tf32,
    F16,
    Bf16,
    I8,
    U8,
    I32,
    // Types that occur only in files; no kernel computes in them.
    F64,
    I64,
    U64,
    U32,
    I16,
    U16,
    Bool,
    F8E4m3,
    F8E5m2,
    F8E8m0,
}

impl DType {
    /// Types that a dense weight may have.
    pub const FLOATS: [Self; 3] = [Self::F16, Self::Bf16, Self::F32];

    /// Returns the bytes of one stored element.
    pub const fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::Tf32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::Bf16 | Self::I16 | Self::U16 => 2,
            Self::I8 | Self::U8 | Self::Bool | Self::F8E4m3 | Self::F8E5m2 | Self::F8E8m0 => 1,
        }
    }

    /// Returns the name used in flags, records and caches.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I32 => "i32",
            Self::F64 => "f64",
            Self::I64 => "i64",
            Self::U64 => "u64",
            Self::U32 => "u32",
            Self::I16 => "i16",
            Self::U16 => "u16",
            Self::Bool => "bool",
            Self::F8E4m3 => "f8e4m3",
            Self::F8E5m2 => "f8e5m2",
            Self::F8E8m0 => "f8e8m0",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
