//! Kernels next to everything that checks and measures them.
//!
//! One file, or one folder, per kernel holds its parameters in records, the edge cases and their check against the f64
//! reference, the bench cases, the instances to compile for cards that are absent, and the peers. [`KERNELS`] lists
//! them. `bench`, `verify`, `tune`, `targets` and the tests of `kernels` iterate that list and name no kernel.
//!
//! To add a kernel, implement [`KernelSuite`] in a new file and append a line to [`KERNELS`].

mod any;
mod bench;
mod case;
mod check;
mod instance;
mod kernel;
mod pairs;
mod peers;
mod verify;

pub mod attention;
pub mod attention_backward;
pub mod cross_entropy;
pub mod decode;
pub mod decoder;
pub mod embed;
pub mod int8;
pub mod matmul;
pub mod nf4;
pub mod norm;
pub mod q8_0;
pub mod rope;
pub mod sample;

pub use any::AnyKernel;
pub use bench::{AnyBench, Measured, TimedConfig};
pub use case::{BenchCase, InstanceCase, Scale, Suite};
pub use check::{CheckError, Verdict, fnv1a};
pub use instance::{Instance, RTX_SHARED_BYTES};
pub use kernel::{KernelSuite, Params, Peers};
pub use verify::Job;

/// Every kernel of the project, in the order of tables.
pub const KERNELS: &[&dyn AnyKernel] = &[
    &kernels::matmul::Matmul,
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
    &kernels::embed::Embed,
    &kernels::sample::Sample,
    &kernels::cross_entropy::CrossEntropy,
    &kernels::rope::Rope,
];

/// The kernel that records and tune caches call `name`.
pub fn kernel(name: &str) -> Option<&'static dyn AnyKernel> {
    KERNELS.iter().copied().find(|kernel| kernel.name() == name)
}
