//! Errors of ops.

use arch::transfer::TransferError;
use burn::tensor::DType;
use kernels::activation::InvalidActivation;
use kernels::attention::InvalidAttention;
use kernels::attention::decode::InvalidDecode;
use kernels::column_sums::InvalidColumnSums;
use kernels::conv::InvalidConv;
use kernels::cross_entropy::InvalidCrossEntropy;
use kernels::embed::InvalidEmbed;
use kernels::embed_backward::InvalidEmbedBackward;
use kernels::group_norm::InvalidGroupNorm;
use kernels::matmul::InvalidMatmul;
use kernels::norm::InvalidNorm;
use kernels::optimizer::InvalidAdamW;
use kernels::pointwise::InvalidPointwise;
use kernels::quantized::{InvalidWeight, QuantizeError};
use kernels::rope::InvalidRope;
use kernels::rope::in_place::InvalidRopeInPlace;
use kernels::sample::InvalidSample;
use tune::TuneError;

use crate::Implementation;

/// An error of an op: invalid operands, a missing config, or a failed device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// Matmul operands with different k.
    #[error(
        "expected lhs and rhs with the same k, got lhs {lhs:?} with {lhs_k}, rhs {rhs:?} with \
         {rhs_k}\nhint: pass lhs as [.., m, k] and rhs as [.., k, n], or swap the last two axes \
         of a transposed operand"
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
        "batch axes of lhs {lhs:?} and rhs {rhs:?} do not broadcast\nhint: align the axes at the \
         end, as in NumPy; each pair must be equal or contain 1"
    )]
    Broadcast {
        /// Shape of lhs.
        lhs: Vec<usize>,
        /// Shape of rhs.
        rhs: Vec<usize>,
    },
    /// A tensor whose shape does not match the other operands.
    #[error(
        "{what} has shape {have:?}, expected {need:?}\nhint: reshape or expand it; this operand \
         is not broadcast"
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
        "{what} has shape {have:?}, expected scores {scores:?} or axes of 1\nhint: pass {what} as \
         [batch, heads, seq_q, seq_kv], where each axis may be 1"
    )]
    Scores {
        /// `mask` or `bias`.
        what: &'static str,
        /// Its shape.
        have: Vec<usize>,
        /// Shape of the scores, `[batch, heads, seq_q, seq_kv]`
        scores: Vec<usize>,
    },
    /// A window of a pooling that does not fit an axis, is empty, or is a mean of pixels that lie apart.
    #[error(
        "a window of {size} pixels with padding {padding:?} does not fit {image} pixels\nhint: use a \
         padding of at most half a window, and no dilation for means"
    )]
    Window {
        /// Pixels of the window.
        size: usize,
        /// Pixels of the image along the axis.
        image: usize,
        /// Pixels before and after it.
        padding: [usize; 2],
    },
    /// A resizing from or to an image without pixels.
    #[error("cannot resize an image of {from:?} to {to:?} pixels\nhint: both need pixels")]
    Resize {
        /// Height and width of the image.
        from: [usize; 2],
        /// Height and width of the result.
        to: [usize; 2],
    },
    /// A tensor whose dtype does not match the other operands.
    #[error("{what} is {have:?}, expected {need:?}\nhint: cast it; all operands share one dtype")]
    DType {
        /// Name of the tensor.
        what: &'static str,
        /// Its dtype.
        have: DType,
        /// Expected dtype.
        need: DType,
    },
    /// A dtype that no kernel supports.
    #[error("expected f32, f16 or bf16 tensors, got {0:?}\nhint: cast to one of these dtypes")]
    NotFloat(DType),
    /// An axis of this length, above the limit of 2^32 - 1.
    #[error("expected axes of at most 2^32 - 1 elements, got {0}\nhint: split the axis")]
    TooLarge(usize),
    /// A device without kernels, or one that cannot be opened or read: its name or its message.
    #[error("no kernels for {0}\nhint: use Device::cuda, Device::vulkan or Device::cpu")]
    Device(String),
    /// A number of query heads that is not a multiple of the KV heads.
    #[error(
        "expected a multiple of {kv_heads} KV heads, got {heads} query heads\nhint: use the same \
         number of query heads for every KV head"
    )]
    Heads {
        /// Number of query heads.
        heads: usize,
        /// Number of key and value heads.
        kv_heads: usize,
    },
    /// A requested implementation that does not support the call.
    #[error(
        "{implementation:?} attention does not support this problem: {why}\nhint: omit \
         `implementation` to select one automatically"
    )]
    Forced {
        /// The requested implementation.
        implementation: Implementation,
        /// The reason.
        why: String,
    },
    /// A cache whose positions overlap, or whose head dimension is not contiguous: its name.
    #[error(
        "expected {0} with a contiguous head dimension and no overlapping positions\nhint: pass \
         the cache as it was allocated; it is not copied"
    )]
    Apart(&'static str),
    /// A gradient of an op that has none.
    #[error(
        "this op has no gradient\nhint: detach its inputs, or call `attention` instead of decode \
         attention"
    )]
    NoGradient,
    /// An empty list of weights to join.
    #[error("expected at least one weight to join, got none\nhint: pass the weights to join")]
    Empty,
    /// A checkpoint weight without exactly two axes: its shape.
    #[error(
        "expected a weight of shape [n, k], got {0:?}\nhint: pass the matrix of a linear layer"
    )]
    NoMatrix(Vec<usize>),
    /// f16 accumulation with operands that are not f16, or with a quantised weight: the operands' dtype.
    #[error(
        "f16 accumulation needs dense f16 operands, got {0:?}\nhint: cast both operands to f16, \
         or accumulate in f32"
    )]
    F16Accumulation(DType),
    /// tf32 with operands that are not f32: their dtype.
    #[error("tf32 needs f32 operands, got {0:?}\nhint: cast to f32, or do not request tf32")]
    Tf32(DType),
    /// tf32 with a quantised weight.
    #[error("tf32 does not support quantised weights\nhint: compute in f32, or use a dense weight")]
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
        "invalid offsets of {what}: {why}\nhint: pass n + 1 offsets for n sequences or groups, \
         ascending from 0 to the number of {what}"
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
    /// A convolution with a bias and a bias per image.
    #[error(
        "expected one bias, got a bias and an image bias\nhint: add the bias to that of each image"
    )]
    TwoBiases,
    /// A transposed convolution of an input that only others take.
    #[error(
        "a transposed convolution takes one input that is not doubled, and groups that divide its channels\nhint: join \
         the inputs, or resize before"
    )]
    Transposed,
    /// An invalid convolution.
    #[error(transparent)]
    Conv(#[from] InvalidConv),
    /// An invalid group norm.
    #[error(transparent)]
    GroupNorm(#[from] InvalidGroupNorm),
    /// An invalid norm.
    #[error(transparent)]
    Norm(#[from] InvalidNorm),
    /// An invalid chain of elementwise operations.
    #[error(transparent)]
    Pointwise(#[from] InvalidPointwise),
    /// An invalid embedding.
    #[error(transparent)]
    Embed(#[from] InvalidEmbed),
    /// An invalid RoPE.
    #[error(transparent)]
    Rope(#[from] InvalidRope),
    /// A rotation in place that is invalid.
    #[error(transparent)]
    RopeInPlace(#[from] InvalidRopeInPlace),
    /// Column sums that are invalid.
    #[error(transparent)]
    ColumnSums(#[from] InvalidColumnSums),
    /// An activation that is invalid.
    #[error(transparent)]
    Activation(#[from] InvalidActivation),
    /// A gradient of an embedding that is invalid.
    #[error(transparent)]
    EmbedBackward(#[from] InvalidEmbedBackward),
    /// A loss that is invalid.
    #[error(transparent)]
    CrossEntropy(#[from] InvalidCrossEntropy),
    /// An optimizer step that is invalid.
    #[error(transparent)]
    AdamW(#[from] InvalidAdamW),
    /// A copy to or from host memory failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// Invalid logits or vocabulary of sampling.
    #[error(transparent)]
    Sample(#[from] InvalidSample),
    /// No config for the shape on this device.
    #[error(transparent)]
    Tune(#[from] TuneError),
}
