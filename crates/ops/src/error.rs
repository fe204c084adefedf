//! Errors of ops.

use burn::tensor::DType;
use kernels::attention::InvalidAttention;
use kernels::attention::decode::InvalidDecode;
use kernels::embed::InvalidEmbed;
use kernels::matmul::InvalidMatmul;
use kernels::norm::InvalidNorm;
use kernels::quantized::{InvalidWeight, QuantizeError};
use kernels::rope::InvalidRope;
use kernels::sample::InvalidSample;
use tune::TuneError;

use crate::Implementation;

/// An error of an op: invalid operands, a missing config, or a failed device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// Matmul operands with different k.
    #[error(
        "k differs: lhs {lhs:?} has {lhs_k}, rhs {rhs:?} has {rhs_k}\nhint: lhs is [.., m, k], rhs [.., k, n]; \
         swap the last two axes of one that is stored the other way"
    )]
    Depth {
        /// Shape of lhs.
        lhs: Vec<usize>,
        /// Its k.
        lhs_k: usize,
        /// Shape of rhs; `[n, k]` for a quantised weight.
        rhs: Vec<usize>,
        /// Its k.
        rhs_k: usize,
    },
    /// Batch axes that do not broadcast: they differ, and neither is 1.
    #[error(
        "batches of lhs {lhs:?} and rhs {rhs:?} do not broadcast\nhint: as in NumPy, aligned at the end, each axis is \
         equal or 1"
    )]
    Broadcast {
        /// Shape of lhs.
        lhs: Vec<usize>,
        /// Shape of rhs.
        rhs: Vec<usize>,
    },
    /// A tensor whose shape does not match the other operands.
    #[error(
        "{what} has shape {have:?}, expected {need:?}\nhint: it is not broadcast; expand it first"
    )]
    Shape {
        /// Name of the tensor.
        what: &'static str,
        /// Its shape.
        have: Vec<usize>,
        /// Expected shape.
        need: Vec<usize>,
    },
    /// A mask or bias that does not broadcast to the attention scores.
    #[error(
        "{what} has shape {have:?}, the scores {scores:?}\nhint: {what} is [batch, heads, seq_q, seq_kv], and \
         each axis may be 1"
    )]
    Scores {
        /// `mask` or `bias`.
        what: &'static str,
        /// Its shape.
        have: Vec<usize>,
        /// Shape of the scores, `[batch, heads, seq_q, seq_kv]`
        scores: Vec<usize>,
    },
    /// A tensor whose dtype does not match the other operands.
    #[error(
        "{what} is {have:?}, expected {need:?}\nhint: operands share one dtype; cast one of them"
    )]
    DType {
        /// Name of the tensor.
        what: &'static str,
        /// Its dtype.
        have: DType,
        /// Expected dtype.
        need: DType,
    },
    /// A dtype that no kernel supports.
    #[error("no kernel computes with tensors of {0:?}\nhint: cast to f32, f16 or bf16")]
    NotFloat(DType),
    /// An axis of this length, above the limit of 2^32 - 1.
    #[error("{0} exceeds 2^32 - 1, the longest axis\nhint: split it")]
    TooLarge(usize),
    /// A device without kernels, or one that cannot be opened or read: its name or its message.
    #[error("no kernels for {0}\nhint: use Device::cuda, Device::vulkan or Device::cpu")]
    Device(String),
    /// A number of query heads that is not a multiple of the key heads.
    #[error(
        "{heads} heads do not divide among {kv_heads} key heads\nhint: \
         each key head serves as many query heads as the others"
    )]
    Heads {
        /// Number of query heads.
        heads: usize,
        /// Number of key and value heads.
        kv_heads: usize,
    },
    /// A requested implementation that does not support the call.
    #[error(
        "{implementation:?} attention cannot serve this: {why}\nhint: leave `implementation` out"
    )]
    Forced {
        /// The requested implementation.
        implementation: Implementation,
        /// The reason.
        why: String,
    },
    /// A cache whose positions overlap, or whose head dimension is not contiguous: its name.
    #[error(
        "positions of {0} do not lie apart with their head dimension contiguous\nhint: a cache is not copied"
    )]
    Apart(&'static str),
    /// A gradient of an op that has none.
    #[error(
        "this op has no gradient\nhint: detach what it is given; for decode there is attention instead"
    )]
    NoGradient,
    /// An empty list of weights to join.
    #[error("nothing was given to join\nhint: give one weight at least")]
    Empty,
    /// A checkpoint weight without exactly two axes: its shape.
    #[error("a weight of shape {0:?} is no matrix\nhint: a linear layer's is [n, k]")]
    NoMatrix(Vec<usize>),
    /// f16 accumulation with operands that are not f16, or with a quantised weight: the operands' dtype.
    #[error("sums in f16 are not of products of {0:?}\nhint: of dense f16 operands alone")]
    F16Accumulation(DType),
    /// tf32 with operands that are not f32: their dtype.
    #[error("tf32 was asked for operands of {0:?}\nhint: only f32 operands are rounded to tf32")]
    Tf32(DType),
    /// tf32 with a quantised weight.
    #[error("weights in 4 bits are not multiplied in tf32\nhint: their f32 products are f32")]
    NoTf32,
    /// A quantised weight that no kernel supports, such as one with an unsupported block size.
    #[error(transparent)]
    Weight(#[from] InvalidWeight),
    /// A dense weight that cannot be quantised.
    #[error(transparent)]
    Quantize(#[from] QuantizeError),
    /// An invalid matmul.
    #[error(transparent)]
    Matmul(#[from] InvalidMatmul),
    /// Invalid offsets of packed sequences, or of groups of rows.
    #[error(
        "offsets of {what} {why}\nhint: one more than there are sequences or groups, from 0 to how many {what} there are, \
         and none below the one before"
    )]
    Offsets {
        /// `queries`, `keys` or `rows`.
        what: &'static str,
        /// The reason.
        why: String,
    },
    /// An invalid decode step.
    #[error(transparent)]
    Decode(#[from] InvalidDecode),
    /// An invalid attention.
    #[error(transparent)]
    Attention(#[from] InvalidAttention),
    /// An invalid norm.
    #[error(transparent)]
    Norm(#[from] InvalidNorm),
    /// An invalid embedding.
    #[error(transparent)]
    Embed(#[from] InvalidEmbed),
    /// An invalid RoPE.
    #[error(transparent)]
    Rope(#[from] InvalidRope),
    /// Invalid logits or vocabulary of sampling.
    #[error(transparent)]
    Sample(#[from] InvalidSample),
    /// No config for the shape on this device.
    #[error(transparent)]
    Tune(#[from] TuneError),
}
