//! What can be wrong with a call.

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

/// Why an op has no result.
#[derive(Debug, thiserror::Error)]
pub enum OpError {
    /// Operands whose summed axes differ in length.
    #[error(
        "k differs: lhs {lhs:?} has {lhs_k}, rhs {rhs:?} has {rhs_k}\nhint: lhs is [.., m, k], rhs [.., k, n]; \
         swap the last two axes of one that is stored the other way"
    )]
    Depth {
        /// Shape of the left operand.
        lhs: Vec<usize>,
        /// Length of its summed axis.
        lhs_k: usize,
        /// Shape of the right operand; `[n, k]` of a frozen weight.
        rhs: Vec<usize>,
        /// Length of its summed axis.
        rhs_k: usize,
    },
    /// Batch axes that differ and are not 1.
    #[error(
        "batches of lhs {lhs:?} and rhs {rhs:?} do not broadcast\nhint: as in NumPy, aligned at the end, each axis is \
         equal or 1"
    )]
    Broadcast {
        /// Shape of the left operand.
        lhs: Vec<usize>,
        /// Shape of the right operand.
        rhs: Vec<usize>,
    },
    /// A tensor of another shape than the others ask for.
    #[error(
        "{what} has shape {have:?}, expected {need:?}\nhint: it is not broadcast; expand it first"
    )]
    Shape {
        /// Which tensor.
        what: &'static str,
        /// Its shape.
        have: Vec<usize>,
        /// The shape it should have.
        need: Vec<usize>,
    },
    /// A mask or bias that does not broadcast to the scores of an attention.
    #[error(
        "{what} has shape {have:?}, the scores {scores:?}\nhint: {what} is [batch, heads, seq_q, seq_kv], and \
         each axis may be 1"
    )]
    Scores {
        /// `mask` or `bias`.
        what: &'static str,
        /// Its shape.
        have: Vec<usize>,
        /// `[batch, heads, seq_q, seq_kv]`
        scores: Vec<usize>,
    },
    /// A tensor of another dtype than the others.
    #[error(
        "{what} is {have:?}, expected {need:?}\nhint: operands share one dtype; cast one of them"
    )]
    DType {
        /// Which tensor.
        what: &'static str,
        /// Its dtype.
        have: DType,
        /// The dtype it should have.
        need: DType,
    },
    /// A dtype that kernels do not compute with.
    #[error("no kernel computes with tensors of {0:?}\nhint: cast to f32, f16 or bf16")]
    NotFloat(DType),
    /// An axis of this length, of which kernels count up to 2^32 - 1.
    #[error("{0} exceeds 2^32 - 1, the longest axis\nhint: split it")]
    TooLarge(usize),
    /// A device that kernels do not run on, or that cannot be opened or read; its name, or what it says.
    #[error("no kernels for {0}\nhint: use Device::cuda, Device::vulkan or Device::cpu")]
    Device(String),
    /// Query heads that do not divide among the key heads.
    #[error(
        "{heads} heads do not divide among {kv_heads} key heads\nhint: \
         each key head serves as many query heads as the others"
    )]
    Heads {
        /// Query heads.
        heads: usize,
        /// Key and value heads.
        kv_heads: usize,
    },
    /// The implementation that was asked for cannot serve the call.
    #[error(
        "{implementation:?} attention cannot serve this: {why}\nhint: leave `implementation` out"
    )]
    Forced {
        /// The one that was asked for.
        implementation: Implementation,
        /// What stands against it.
        why: String,
    },
    /// A cache whose positions overlap, or whose head dimension is not contiguous: its name.
    #[error(
        "positions of {0} do not lie apart with their head dimension contiguous\nhint: a cache is not copied"
    )]
    Apart(&'static str),
    /// A gradient was asked for.
    #[error(
        "this op has no gradient\nhint: detach what it is given; for decode there is attention instead"
    )]
    NoGradient,
    /// No weights were given to join.
    #[error("nothing was given to join\nhint: give one weight at least")]
    Empty,
    /// A weight of a checkpoint without exactly two axes: its shape.
    #[error("a weight of shape {0:?} is no matrix\nhint: a linear layer's is [n, k]")]
    NoMatrix(Vec<usize>),
    /// Sums in f16 were asked for with operands that are not f16, or with a frozen weight: the operands' dtype.
    #[error("sums in f16 are not of products of {0:?}\nhint: of dense f16 operands alone")]
    HalfSums(DType),
    /// tf32 was asked for with operands of another dtype than f32: theirs.
    #[error("tf32 was asked for operands of {0:?}\nhint: only f32 operands are rounded to tf32")]
    Tf32(DType),
    /// tf32 was asked for with a frozen weight.
    #[error("weights in 4 bits are not multiplied in tf32\nhint: their f32 products are f32")]
    NoTf32,
    /// A quantised weight that no kernel multiplies with, such as one of a block size that there is not.
    #[error(transparent)]
    Weight(#[from] InvalidWeight),
    /// A dense weight that could not be quantised.
    #[error(transparent)]
    Quantize(#[from] QuantizeError),
    /// A product that means nothing.
    #[error(transparent)]
    Matmul(#[from] InvalidMatmul),
    /// Offsets of sequences, or of groups of rows, that lie one after the other.
    #[error(
        "offsets of {what} {why}\nhint: one more than there are sequences or groups, from 0 to how many {what} there are, \
         and none below the one before"
    )]
    Offsets {
        /// `queries`, `keys` or `rows`.
        what: &'static str,
        /// What is wrong with them.
        why: String,
    },
    /// A step of decoding that means nothing.
    #[error(transparent)]
    Decode(#[from] InvalidDecode),
    /// An attention that means nothing.
    #[error(transparent)]
    Attention(#[from] InvalidAttention),
    /// A norm that means nothing.
    #[error(transparent)]
    Norm(#[from] InvalidNorm),
    /// An embedding that means nothing.
    #[error(transparent)]
    Embed(#[from] InvalidEmbed),
    /// A projection of heads that means nothing.
    #[error(transparent)]
    Rope(#[from] InvalidRope),
    /// Rows of logits that no token is picked from.
    #[error(transparent)]
    Sample(#[from] InvalidSample),
    /// There is no config for the shape on this device.
    #[error(transparent)]
    Tune(#[from] TuneError),
}
