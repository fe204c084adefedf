//! Memory limits.

use std::panic::resume_unwind;
use std::sync::LazyLock;

use arch::HostMemory;
use burn::backend::DispatchDevice;
use burn::tensor::DType;

use crate::array::is_host;

/// Checks that a tensor fits in memory: a failed allocation on the host aborts the process.
///
/// # Errors
/// The tensor is larger than the memory of the machine, or than 1 TiB on a device.
pub(crate) fn fits(shape: &[usize], dtype: DType, device: &DispatchDevice) -> Result<(), String> {
    static MEMORY: LazyLock<usize> =
        LazyLock::new(|| HostMemory::now().map_or(1 << 36, |own| own.total as usize));
    let most = if is_host(device) { *MEMORY } else { 1 << 40 };
    let bytes = shape.iter().try_fold(dtype.size(), |all, own| all.checked_mul(*own));
    match bytes {
        Some(bytes) if bytes <= most => Ok(()),
        _ => {
            let gib = most >> 30;
            Err(format!("a tensor of shape {shape:?} exceeds the memory limit of {gib} GiB"))
        }
    }
}

/// Panics like Burn if a tensor does not fit; the panic becomes an error of the node.
pub(crate) fn must_fit(shape: &[usize], dtype: DType, device: &DispatchDevice) {
    if let Err(why) = fits(shape, dtype, device) {
        resume_unwind(Box::new(why));
    }
}
