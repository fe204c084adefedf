//! What can be wrong with a call.

use burn::tensor::DType;
use kernels::attention::InvalidAttention;
use kernels::attention::decode::InvalidDecode;
use kernels::embed::InvalidEmbed;
use kernels::matmul::InvalidMatmul;
use kernels::nf4::{InvalidWeight, QuantizeError};
use kernels::norm::InvalidNorm;
use kernels::rope::InvalidRope;
use kernels::sample::InvalidSample;
use tune::TuneError;

use crate::Implementation;

/// Why an op has no result.
#[derive(Debug, thiserror::Error)]
pub enum OpError {
    #[error(
        "lhs is {lhs:?} with k = {lhs_k}, rhs is {rhs:?} with k = {rhs_k}\nhint: \
         lhs is [.., m, k], rhs [.., k, n]"
    )]
    Depth { lhs: Vec<usize>, lhs_k: usize, rhs: Vec<usize>, rhs_k: usize },
    #[error("batches of {lhs:?} and {rhs:?} do not broadcast\nhint: each axis is equal or 1")]
    Broadcast { lhs: Vec<usize>, rhs: Vec<usize> },
    #[error(
        "{what} has shape {have:?}, the result needs {need:?}\nhint: \
         it does not broadcast; expand it first"
    )]
    Shape { what: &'static str, have: Vec<usize>, need: Vec<usize> },
    #[error("{what} is {have:?}, the other operand {need:?}\nhint: cast one of them")]
    DType { what: &'static str, have: DType, need: DType },
    #[error("tensors of {0:?} are not multiplied\nhint: cast to f32, f16 or bf16")]
    NotFloat(DType),
    #[error("{0} exceeds 2^32 - 1, the longest axis\nhint: split it")]
    TooLarge(usize),
    #[error("no kernels for {0}\nhint: use Device::cuda, Device::vulkan or Device::cpu")]
    Device(String),
    #[error(
        "{heads} heads do not divide among {kv_heads} key heads\nhint: \
         each key head serves as many query heads as the others"
    )]
    Heads { heads: usize, kv_heads: usize },
    #[error(
        "{implementation:?} attention cannot serve this: {why}\nhint: \
         ask for none, and one that can is taken"
    )]
    Forced { implementation: Implementation, why: String },
    #[error(
        "positions of {0} do not lie apart with their head dimension contiguous\nhint: a cache is not copied"
    )]
    Apart(&'static str),
    #[error(
        "this op has no gradient\nhint: detach what it is given; for decode there is attention instead"
    )]
    NoGradient,
    #[error(
        "nested absmax of several offsets are no weight of a file\nhint: save the weights that were joined"
    )]
    Joined,
    #[error("nothing was given to join\nhint: give one weight at least")]
    Empty,
    #[error("a weight of shape {0:?} is no matrix\nhint: a linear layer's is [n, k]")]
    NoMatrix(Vec<usize>),
    #[error("weights in 4 bits are not multiplied in tf32\nhint: their f32 products are f32")]
    NoTf32,
    #[error(transparent)]
    Weight(#[from] InvalidWeight),
    #[error(transparent)]
    Quantize(#[from] QuantizeError),
    #[error(transparent)]
    Matmul(#[from] InvalidMatmul),
    #[error(transparent)]
    Decode(#[from] InvalidDecode),
    #[error(transparent)]
    Attention(#[from] InvalidAttention),
    #[error(transparent)]
    Norm(#[from] InvalidNorm),
    #[error(transparent)]
    Embed(#[from] InvalidEmbed),
    #[error(transparent)]
    Rope(#[from] InvalidRope),
    #[error(transparent)]
    Sample(#[from] InvalidSample),
    #[error(transparent)]
    Tune(#[from] TuneError),
}
