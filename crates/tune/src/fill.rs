//! Overwrites a buffer: to poison an output before a check, or to flush caches before a sample.

use arch::Device;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Writes `value` to the first `words` 4-byte words of `buffer`. The buffer must have at least that many:
/// device allocations are whole words.
pub fn fill(device: &Device, buffer: &Handle, words: usize, value: u32) {
    let units = if device.profile().plane_size.1 == 1 { 1 } else { 256 };
    let cubes = words.div_ceil(256).min(4096) as u32;
    fill_kernel::launch(
        device.client(),
        CubeCount::Static(cubes, 1, 1),
        CubeDim::new_1d(units),
        // SAFETY: the caller passes a buffer of at least `words` words.
        unsafe { BufferArg::from_raw_parts(buffer.clone(), words) },
        value,
    );
}

#[cube(launch)]
fn fill_kernel(out: &mut [u32], value: u32) {
    let mut i = ABSOLUTE_POS;
    let stride = CUBE_COUNT * CUBE_DIM as usize;
    while i < out.len() {
        out[i] = value;
        i += stride;
    }
}
