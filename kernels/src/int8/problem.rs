//! A matmul with an 8-bit weight, and its buffers.

use arch::DType;
use cubecl::prelude::AddressType;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};

use super::activations::Activations;
use super::dequantize::DequantizeProblem;
use super::{Weight, WeightBuffers};
use crate::dequant::together;
use crate::launch::index_width;
use crate::matmul::{
    Epilogue, EpilogueBuffers, InvalidMatmul, Layout, MatmulProblem, Operand, Precision,
};

/// One matmul. Build it with [`Int8MatmulProblem::new`], which checks it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Int8MatmulProblem {
    pub m: u32,
    pub weight: Weight,
    /// Type of x, bias and y: f32, f16 or bf16.
    pub dtype: DType,
    /// Bias has `[n]` elements; the other operands have the shape of y.
    pub epilogue: Epilogue,
    /// Rounding of x to i8 with one scale a row.
    #[serde(default)]
    pub activations: Option<Activations>,
}

/// Device buffers of one matmul.
#[derive(Debug, Clone)]
pub struct Int8MatmulOperands {
    pub x: Handle,
    pub weight: WeightBuffers,
    pub out: Handle,
    pub epilogue: EpilogueBuffers,
}

impl Int8MatmulProblem {
    /// Creates the matmul of x `[m, k]` and the weight.
    ///
    /// # Errors
    /// A size of 0.
    pub fn new(m: u32, weight: Weight, dtype: DType) -> Result<Self, InvalidMatmul> {
        if m == 0 {
            return Err(InvalidMatmul::Empty { axis: "m" });
        }
        Ok(Self { m, weight, dtype, epilogue: Epilogue::default(), activations: None })
    }

    /// Returns the matmul with the dense weight.
    pub fn dense(&self) -> MatmulProblem {
        let precision = match self.dtype {
            DType::F16 => Precision::F16,
            DType::Bf16 => Precision::Bf16,
            _ => Precision::F32,
        };
        let sizes = [self.m, self.weight.n, self.weight.k];
        let dense = MatmulProblem::dense(1, sizes, [Layout::Row, Layout::Col], precision)
            .expect("sizes were checked");
        MatmulProblem { epilogue: self.epilogue, ..dense }
    }

    /// Returns the matmul whose weight counts two bytes as an element.
    pub(super) fn paired_weight(&self) -> MatmulProblem {
        let dense = self.dense();
        let rhs = Operand { stride: u64::from(self.weight.k / 2), ..dense.rhs };
        MatmulProblem { rhs, ..dense }
    }

    /// Returns the matmul whose operands both count two bytes as an element.
    pub(super) fn pairs(&self) -> MatmulProblem {
        let dense = self.dense();
        let sizes = [self.m, self.weight.n, self.weight.k / 2];
        let pairs = MatmulProblem::dense(1, sizes, [Layout::Row, Layout::Col], dense.precision);
        MatmulProblem { epilogue: self.epilogue, ..pairs.expect("k is whole chunks") }
    }

    pub(super) const fn dequantized(&self) -> DequantizeProblem {
        DequantizeProblem { weight: self.weight, out: self.dtype }
    }

    /// Vector widths: elements of x and words of codes. A vector is 16 bytes if it lies in one row.
    pub(super) fn widths(&self) -> [usize; 2] {
        match together(self.weight.k, 4) {
            Some(words) => [(16 / self.dtype.size()).min(4 * words as usize), words as usize],
            None => [1, 1],
        }
    }

    /// Width of indices.
    pub(super) fn address(&self) -> AddressType {
        let [x, _, out] = self.dense().extents();
        let longest = x.max(out).max(self.weight.len() as usize);
        index_width(longest as u64)
    }
}
