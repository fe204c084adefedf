//! The test suite of every kernel: cases, checks, benchmarks and peers.
//!
//! Each kernel has one file or folder. It defines the parameters in records, the edge cases and their check against the
//! f64 reference, and the bench cases. It also defines the instances to cross-compile and the peers. `bench`, `verify`,
//! `tune`, `targets` and the tests of `kernels` iterate [`KERNELS`] and name no kernel.
//!
//! To add a kernel, implement [`KernelSuite`] in a new file and append a line to [`KERNELS`]; for one of training alone, also to
//! [`TRAINING`].

mod any;
mod bench;
mod case;
mod check;
mod instance;
mod kernel;
mod pairs;
mod peers;
mod verify;

pub mod activation;
pub mod attention;
pub mod attention_backward;
pub mod column_sums;
pub mod conv;
pub mod cross_entropy;
pub mod decode;
pub mod decoder;
pub mod embed;
pub mod embed_backward;
pub mod group_norm;
pub mod int8;
pub mod matmul;
pub mod nf4;
pub mod norm;
pub mod norm_backward;
pub mod optimizer;
pub mod pointwise;
pub mod q8_0;
pub mod rope;
pub mod rope_in_place;
pub mod sample;

pub use any::AnyKernel;
pub use bench::{AnyBench, Measured, TimedConfig};
pub use case::{BenchCase, InstanceCase, Scale, Suite};
pub use check::{CheckError, Verdict, fnv1a};
pub use instance::{Instance, RTX_SHARED_BYTES};
pub use kernel::{KernelSuite, Params, Peers};
pub use verify::Job;

/// Every kernel of the project, in the order in which tables list them.
pub const KERNELS: &[&dyn AnyKernel] = &[
    &kernels::matmul::Matmul,
    &kernels::conv::Conv,
    &kernels::attention::Attention,
    &kernels::attention::backward::AttentionBackward,
    &kernels::attention::decode::Decode,
    &kernels::nf4::Nf4Dequantize,
    &kernels::nf4::Nf4Matmul,
    &kernels::nf4::Nf4Quantize,
    &kernels::int8::Int8Dequantize,
    &kernels::int8::Int8Matmul,
    &kernels::int8::Int8Quantize,
    &kernels::q8_0::Q8_0Dequantize,
    &kernels::q8_0::Q8_0Matmul,
    &kernels::q8_0::Q8_0Quantize,
    &kernels::norm::Norm,
    &kernels::group_norm::GroupNorm,
    &kernels::norm::backward::NormBackward,
    &kernels::column_sums::ColumnSums,
    &kernels::activation::Activate,
    &kernels::activation::ActivationBackward,
    &kernels::pointwise::Pointwise,
    &kernels::embed::Embed,
    &kernels::embed_backward::EmbedBackward,
    &kernels::sample::Sample,
    &kernels::cross_entropy::CrossEntropy,
    &kernels::rope::Rope,
    &kernels::rope::in_place::RopeInPlace,
    &kernels::optimizer::Squares,
    &kernels::optimizer::AdamW,
];

/// Kernels of training alone, which the filter `train` selects.
pub const TRAINING: &[&dyn AnyKernel] = &[
    &kernels::attention::backward::AttentionBackward,
    &kernels::norm::backward::NormBackward,
    &kernels::column_sums::ColumnSums,
    &kernels::activation::Activate,
    &kernels::activation::ActivationBackward,
    &kernels::embed_backward::EmbedBackward,
    &kernels::cross_entropy::CrossEntropy,
    &kernels::rope::in_place::RopeInPlace,
    &kernels::optimizer::Squares,
    &kernels::optimizer::AdamW,
];

/// Returns the kernel with this name in records and tune caches.
pub fn kernel(name: &str) -> Option<&'static dyn AnyKernel> {
    KERNELS.iter().copied().find(|kernel| kernel.name() == name)
}
