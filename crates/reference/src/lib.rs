//! Expected results: every kernel as plain loops in `f64` on the host.
//!
//! | module | contents |
//! |---|---|
//! | [`dtype`] | number formats: rounding, spacing, bytes |
//! | [`inputs`] | seeded inputs, the same on every machine |
//! | [`attention`] | softmax(q·kᵀ)·v with masks, soft cap, window, grouped heads |
//! | [`decode`] | decode attention over a KV cache: pages, lengths, i8 with scales |
//! | [`decoder`] | a whole decoder of any family, tokens to logits |
//! | [`rotary`] | rotary position embeddings and their scaling |
//! | [`rope`] | heads from the QKV projection to the KV cache |
//! | [`matmul`] | C = A·B and its epilogue: exact, and as a naive kernel would compute it |
//! | [`conv`] | convolutions with channels last, as a matmul of gathered rows |
//! | [`nf4`] | 4-bit weights, NF4 and FP4, and nested absmax in 8 bits |
//! | [`embed`] | embedding lookup of tokens and positions |
//! | [`norm`] | norms of rows |
//! | [`group_norm`] | norms of groups of channels |
//! | [`optimizer`] | AdamW steps |
//! | [`sample`] | sampling a token from a row of logits |
//! | [`cross_entropy`] | cross-entropy loss and its gradient |
//! | [`int8`] | 8-bit weights, one absmax a row |
//! | [`q8_0`] | 8-bit weights, one f16 scale for 32 |
//! | [`mod@compare`] | the tolerance rule; NaN fails |
//!
//! This crate shares neither code nor constants with the kernels, and does not depend on a GPU. A check has
//! four steps, and [`Matmul::check`] does the last three:
//!
//! ```
//! use reference::{DType, Distribution, Epilogue, Layout, Matmul, fill};
//!
//! let lhs = fill(1, 6 * 40, Distribution::Normal); // [m, k]
//! let rhs = fill(2, 40 * 5, Distribution::Normal); // [k, n]
//! let matmul = Matmul::contiguous(&[], [6, 5, 40], Layout::Row, Layout::Row, DType::F16);
//!
//! // Stands for the kernel under test.
//! let out = matmul.naive(&lhs, &rhs, Epilogue::NONE)?; // [m, n]
//! let out: Vec<f32> = out.iter().map(|&v| v as f32).collect();
//!
//! let comparison = matmul.check(&matmul.sample(3), &lhs, &rhs, Epilogue::NONE, &out)?;
//! assert!(comparison.passed, "{comparison}");
//! # Ok::<(), reference::Error>(())
//! ```

pub mod attention;
pub mod compare;
pub mod conv;
pub mod cross_entropy;
pub mod decode;
pub mod decoder;
pub mod dtype;
pub mod embed;
mod error;
pub mod group_norm;
pub mod inputs;
pub mod int8;
pub mod matmul;
pub mod nf4;
pub mod norm;
pub mod optimizer;
pub mod q8_0;
pub mod rope;
pub mod rotary;
pub mod sample;

pub use attention::{Attended, Attention, HeadStrides, Saved, Scores};
pub use compare::{Comparison, Lines, compare};
pub use conv::Conv;
pub use cross_entropy::CrossEntropy;
pub use decode::{Cache, CacheStrides, Decode, Table};
pub use decoder::{Block, Decoder, Linear};
pub use dtype::DType;
pub use embed::Embed;
pub use error::Error;
pub use group_norm::{GroupNorm, GroupNormOperands};
pub use inputs::{Distribution, Special, fill, plant};
pub use matmul::{Activation, Epilogue, Layout, Matmul, RowNorm, Sample, Strides, Up};
pub use nf4::{Blocks, FourBit};
pub use norm::{Norm, NormGradients, NormOperands, NormRule};
pub use optimizer::{AdamW, Parameters, Rule};
pub use rope::{Left, Projected, Rope, RopeOperands, Slots};
pub use rotary::{Rotary, Stretch};
pub use sample::Sampler;
