//! Ops of an explicit backward pass, and of the optimizer step after it.
//!
//! Unlike the other ops, they take tensors without autodiff, return errors, and **write in place**: gradients of weights are
//! added to given sums in f32, which may be [`view`](crate::view)s of one flat buffer. Every clone of a tensor that is written
//! sees the new values.

mod activation;
mod attention;
mod embed;
mod loss;
mod norm;
mod offload;
mod optimizer;
mod product;
mod rope;
mod values;

pub use activation::{activate, activation_backward};
/// Copies beside kernels.
pub use arch::transfer::{HostBuffer, Link, Transfer, TransferError};
pub use attention::attention_backward;
pub use embed::{RowSegments, embed_backward};
pub use kernels::cross_entropy::IGNORED;
pub use kernels::optimizer::{BLOCK, CONTROL, Control, Moments, Scalars, signed_map, unsigned_map};
pub use loss::{LossOptions, LossStats, cross_entropy};
pub use norm::{NormGradients, norm_backward};
pub use offload::{link, load, save};
pub use optimizer::{AdamWState, BlockScales, StepRules, adamw, control, descend, momentum};
pub use product::{add_column_sums, add_product, linear_activated, linear_activated_backward};
pub use rope::rotate;
pub use values::{clear, copy_scaled, overwrite};
