//! Options of loading a model.

use models::{KvFormat, Workload};
use quant::WeightFormat;

use crate::memory::MemoryBudget;

/// Options of [`Engine::load`](crate::Engine::load).
#[derive(Debug, Clone, PartialEq, Default)]
pub struct EngineOptions {
    /// Compute dtype. None takes f32 on a CPU or if the device lacks the files' dtype, and the files' dtype otherwise.
    pub dtype: Option<Compute>,
    /// Format to quantise the layers' matrices to while they load. It applies to matrices that are dense in the files
    /// or have more bits. Files with fewer bits are an error: [`LoadError::FourBits`](crate::LoadError::FourBits). None
    /// keeps the formats of the files.
    pub quant: Option<WeightFormat>,
    /// Format of the KV cache; the compute dtype by default.
    pub kv: KvFormat,
    /// True to round the activations of int8 matmuls to 8 bits with one scale per row, on CUDA, from 128 rows on; false
    /// by default. Outlier columns stay in the compute dtype: columns with a value of at least the files' threshold, or
    /// 6, as in `LLM.int8()`. This speeds up prefill and is less exact. Each outlier column costs one multiply-add per
    /// result, so a model with thousands of outlier columns becomes slower.
    pub int8_activations: bool,
    /// Policy for shapes without a tuned config. None takes `Policy::Default`.
    pub policy: Option<tune::Policy>,
    /// Limits on the device memory of the model and its sequences; no limits by default.
    pub budget: MemoryBudget,
    /// Maximum context length in tokens. It may exceed the length in config.json. None takes that length, including
    /// RoPE scaling.
    pub max_context: Option<usize>,
    /// Workload that must fit in memory for the model to load. None takes one position of one sequence.
    pub workload: Option<Workload>,
    /// Number of tokens of the first prompt, if known. On CUDA, the kernels for this prefill and for the workload's
    /// decode step then compile while weights load. Kernels for other shapes compile before their first launch.
    pub prompt: Option<usize>,
}

/// Compute dtype of a model. Logits are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compute {
    /// f32: 32 bits, IEEE 754.
    F32,
    /// f32, except that matmuls with dense matrices and more than 8 rows round their operands to a mantissa of 10 bits
    /// for the tensor cores. Available on CUDA only.
    Tf32,
    /// f16: 16 bits, IEEE 754, with a mantissa of 10 bits and values up to 65504.
    F16,
    /// bf16: 16 bits, with the exponents of f32 and a mantissa of 7 bits.
    Bf16,
}
