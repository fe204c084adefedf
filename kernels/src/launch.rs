//! Launch arguments that several kernels share.

use arch::{ArchProfile, DType};
use cubecl::prelude::*;

/// Width of indices into buffers of at most `longest` elements. Above 2^32 they need 64 bits, which cost
/// registers.
pub(crate) const fn index_width(longest: u64) -> AddressType {
    if longest > u32::MAX as u64 { AddressType::U64 } else { AddressType::U32 }
}

/// Returns the vector width in elements: the widest load of `dtype` that divides all sizes and strides.
/// `whole` says whether a width divides them.
pub(crate) fn vector(arch: &ArchProfile, dtype: DType, whole: impl Fn(u32) -> bool) -> u32 {
    let widest = (arch.load_bytes.min(16) / dtype.size() as u32).max(1);
    [8, 4, 2].into_iter().find(|v| *v <= widest && whole(*v)).unwrap_or(1)
}

/// Enqueues a kernel: `launch!(queue, kernel, cubes, cube size, arguments)`. It is unsafe, as
/// `launch_unchecked` is: the buffers must hold everything that the kernel reads and writes.
macro_rules! launch {
    ($queue:expr, $($kernel:ident)::+, $cubes:expr, $dim:expr, $($argument:expr),+ $(,)?) => {
        match $queue {
            tune::Queue::Device(device) => $($kernel)::+::launch_unchecked(
                device.client(), $cubes, $dim, $($argument),+
            ),
            tune::Queue::Compiler(compiler) => compiler.keep($($kernel)::+::create_dummy_kernel(
                compiler.properties.clone(), compiler.target.clone(), $cubes, $dim, $($argument),+
            )),
        }
    };
}
pub(crate) use launch;
