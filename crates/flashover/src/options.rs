//! How a model is put on a device.

use models::{KvFormat, Workload};
use quant::WeightFormat;

use crate::memory::MemoryBudget;

/// How [`Engine::load`](crate::Engine::load) puts a model on a device.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct EngineOptions {
    /// What is computed in. When none, f32 on a CPU and where the device lacks the files' dtype, and that
    /// elsewhere.
    pub dtype: Option<Compute>,
    /// Quantises the matrices of the layers that are dense in the files, and those with more bits; files with fewer bits
    /// are an error: [`LoadError::FourBits`](crate::LoadError::FourBits).
    pub quant: Option<WeightFormat>,
    /// How keys and values are held.
    pub kv: KvFormat,
    /// Whether prompts multiply bytes by bytes where matrices are in 8 bits, on CUDA, from 128 rows on: what a product
    /// reads is rounded to a byte an element and a scale a row, but for columns that reach the threshold of the files or
    /// 6 (`LLM.int8()`). Faster where few columns do, and less exact; each of them costs a multiply-add a result, and a
    /// model in which thousands do is slower with it.
    pub int8_activations: bool,
    /// What a shape whose config is not known gets.
    pub policy: Option<tune::Policy>,
    /// How much of the device's memory the model and its sequences may take.
    pub budget: MemoryBudget,
    /// Most positions of a sequence, also past those that config.json says; when none those, as rope scaling stretches them.
    pub max_context: Option<usize>,
    /// Workload that must fit for the model to be loaded; one position of one sequence when none.
    pub workload: Option<Workload>,
    /// Number of tokens of the first prompt, if it is known: on CUDA, kernels for it and for the decode step of the workload
    /// are compiled while weights load. Kernels of other shapes are compiled before their first launch.
    pub prompt: Option<usize>,
}

/// What a model computes in; logits are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compute {
    /// 32 bits, IEEE 754.
    F32,
    /// f32 but for products with dense matrices, whose operands tensor cores round to 10 bits of mantissa where more than
    /// 8 rows meet one: CUDA alone.
    Tf32,
    /// 16 bits, IEEE 754: 10 of mantissa, numbers up to 65504.
    F16,
    /// 16 bits: the exponents of f32 and 7 bits of mantissa.
    Bf16,
}
