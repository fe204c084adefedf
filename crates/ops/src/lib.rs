//! GPU kernels as functions of Burn tensors, with gradients.
//!
//! Provides matmul, attention (forward and backward), decode attention over contiguous or paged KV caches,
//! norms, convolutions, pooling, RoPE and sampling. Matmuls also take NF4, FP4, int8 and Q8_0 weights. Only this crate depends on
//! both the kernels and Burn.
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use ops::{Ctx, Epilogue, matmul};
//!
//! let device = Device::cpu().autodiff();
//! let x = Tensor::<2>::random([4, 8], Distribution::Default, &device).require_grad();
//! let w = Tensor::<2>::random([8, 3], Distribution::Default, &device);
//! let y = matmul(&Ctx::default(), x.clone(), w, Epilogue::default())?; // [4, 3]
//! let gradient = x.grad(&y.sum().backward()).expect("x is tracked"); // [4, 8]
//! assert_eq!(gradient.dims(), [4, 8]);
//! # Ok::<(), ops::OpError>(())
//! ```
//!
//! Most functions take a [`Ctx`] first: it holds the tuned configs, and the policy for shapes without one.
//! Tensors live on a CubeCL device of Burn: CUDA, Vulkan or the CPU runtime.
//!
//! # Panics
//! `backward` panics with the error's text if an op has no config for it, for example with the policy
//! `frozen`, or fails on the device. Burn's backward pass cannot return an error.

#![warn(missing_docs)]

mod activate;
mod allocation;
mod arena;
mod attention;
mod call;
mod capture;
mod conv;
mod ctx;
mod cube;
mod decode;
mod embed;
mod epilogue;
mod error;
mod group_norm;
mod int32_buffers;
mod layout;
mod matmul;
mod memory;
mod norm;
mod offsets;
mod placed;
mod pointwise;
mod pool;
mod quantized;
mod rope;
mod sample;
pub mod training;
mod update_inputs;
mod upload;
mod views;

pub use activate::{activate, activate_memory};
pub use allocation::check_allocation;
pub use arena::{Arena, apart};
pub use attention::{
    Packing, attention, attention_backward, attention_memory, attention_packed,
    attention_packed_with_lse, attention_with_lse,
};
pub use capture::{StreamGuard, capture_alone, captures, stream_guard};
/// Checkpoint files that [`QuantizedWeight`]s are read from and written to.
pub use checkpoint;
pub use conv::{BatchNorm, ConvOptions, conv_transpose2d, conv1d, conv2d, fold_batch_norm};
pub use ctx::{Ctx, Rehearsed};
pub use cube::{columns, contiguous, shared_columns, split_heads, view};
pub use decode::{Cache, Cached, DecodeOptions, Lengths, Table, decode, decode_with_lse};
pub use embed::embed;
pub use epilogue::{Epilogue, RowNorm};
pub use error::OpError;
pub use group_norm::{GroupNormOptions, group_norm};
pub use kernels::attention::{AttentionOptions, Implementation};
pub use kernels::matmul::{Activation, Constant};
pub use kernels::norm::NormKind;
pub use kernels::pointwise::{Function, MAX_INPUTS, MAX_STEPS, Operation, Program, Step};
pub use kernels::sample::Choice;
pub use layout::broadcast;
pub use matmul::{grouped_matmul, linear, linear_memory, matmul, takes_norm};
pub use memory::{GRAPH_OVERHEAD, Liveness, MemoryProfile, OpMemory, pool_overhead};
pub use norm::{NormWeights, norm, norm_memory};
pub use offsets::Groups;
pub use placed::{Lifetime, Pass, Placed, places};
pub use pointwise::{pointwise, pointwise_into};
pub use pool::{Pool, PoolOptions, Resize, pool, resize};
pub use quant::{Block, Scales, Scheme, WeightFormat};
pub use quantized::{
    QuantizedLinear, QuantizedWeight, quantized_glu, quantized_glu_memory, quantized_linear,
    quantized_linear_memory,
};
pub use rope::{KvSlots, QkNorm, RopeOptions, rope, rope_memory};
pub use sample::{sample, sample_memory, seen_bytes};
pub use update_inputs::{overwrite, update_floats, update_inputs};
pub use upload::upload;
pub use views::{narrowed, order, reshaped};
