//! Ops on tensors in host memory. Each call uploads its operands, runs an op of [`ops`](crate::ops) and downloads the
//! result.

mod attention;
mod call;
mod conv;
mod error;
mod matmul;
mod named;
mod tensor;

pub use attention::{Attended, AttentionGradients, attention, attention_backward};
pub use conv::{ConvSettings, conv};
pub use error::HostOpError;
pub use kernels::attention::{AttentionOptions, Implementation};
pub use kernels::matmul::{Layout, Precision};
pub use matmul::{MatmulOptions, matmul};
pub use named::run_op;
pub use tensor::{HostTensor, TensorError};
