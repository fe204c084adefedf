//! GPU and CPU kernels, one module each. Every module reads like a paper: the mathematics, the cost, the
//! ladder of versions with their numbers, the config, the loop.
//!
//! "Rounded" means to the nearest, ties to even. The one exception is the conversion from f32 to bf16 in the
//! SPIR-V of CubeCL 0.11.3, which truncates. [`norm`], [`rope`] and [`embed`] therefore round their results
//! themselves, and [`nf4`] rounds decoded weights, which keeps bitsandbytes' bits. Matmuls and [`attention`]
//! in bf16 through Vulkan are off by up to one unit in the last place, not half of one.

pub mod activation;
pub mod attention;
pub mod ceiling;
pub mod column_sums;
pub mod conv;
mod cooperative;
pub mod cross_entropy;
mod dequant;
mod elem;
pub mod embed;
pub mod embed_backward;
mod fits;
pub mod group_norm;
pub mod int8;
mod launch;
pub mod matmul;
pub mod nf4;
pub mod norm;
pub mod optimizer;
pub mod pointwise;
pub mod q8_0;
pub mod quantized;
pub mod rope;
mod round;
mod rows;
pub mod sample;
pub mod scaled_copy;
mod softcap;
mod tile;
mod weight;

use arch::{ArchProfile, DType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use tune::Queue;

/// Returns a device buffer of `len` random elements, the same for one seed on every backend. Floats are
/// roughly normal with unit variance; bytes are uniform. The kernel generates them on the device, so that
/// operands of gigabytes never cross the bus.
pub fn noise(queue: &Queue, len: usize, dtype: DType, seed: u64) -> Handle {
    let out = queue.empty((len * dtype.size()).div_ceil(4) * 4);
    let Queue::Device(device) = queue else { return out };
    let client = device.client();
    let bytes = matches!(dtype, DType::I8 | DType::U8);
    let len = if bytes { len.div_ceil(4) } else { len };
    let cores = device.profile().cores();
    let units = cores.unwrap_or(256);
    let cubes = len.div_ceil(units as usize).min(if cores.is_some() { 1 } else { 8192 }) as u32;
    let address = launch::index_width(len as u64);
    let (count, dim) = (CubeCount::Static(cubes, 1, 1), CubeDim::new_1d(units));
    // SAFETY: the buffer holds `len` elements, or words of four.
    let buffer = unsafe { BufferArg::from_raw_parts(out.clone(), len) };
    let seed = (seed ^ (seed >> 32)) as u32;
    if bytes {
        words_kernel::launch(client, count, dim, address, buffer, seed);
    } else {
        noise_kernel::launch(client, count, dim, address, buffer, seed, elem::elem(dtype));
    }
    out
}

/// Number of cubes for `parts` work items, `each` of them a cube; the kernel loops over the rest. CPUs, where
/// a unit is a core, use one cube.
fn cubes(arch: &ArchProfile, parts: u64, each: u32) -> u32 {
    match arch.cores() {
        Some(_) => 1,
        None => parts.div_ceil(u64::from(each)).min(65_535) as u32,
    }
}

/// Wang's integer hash, folded with the seed.
#[cube]
fn hash(i: usize, seed: u32) -> u32 {
    let mut h = u32::cast_from(i) ^ (seed * 0x9e37_79b9u32);
    h = (h ^ 61u32) ^ (h >> 16u32);
    h *= 9u32;
    h = h ^ (h >> 4u32);
    h *= 0x27d4_eb2du32;
    h ^ (h >> 15u32)
}

/// Fills a buffer with words of uniform random bytes.
#[cube(launch, address_type = "dynamic")]
fn words_kernel(out: &mut [u32], seed: u32) {
    let mut i = ABSOLUTE_POS;
    let stride = CUBE_COUNT * CUBE_DIM as usize;
    while i < out.len() {
        out[i] = hash(i, seed);
        i += stride;
    }
}

/// Fills a buffer with roughly normal numbers: the sum of four hashed bytes (Irwin-Hall), which is cheap.
#[cube(launch, address_type = "dynamic")]
fn noise_kernel<F: Float>(out: &mut [F], seed: u32, #[define(F)] _dtype: ElemType) {
    let mut i = ABSOLUTE_POS;
    let stride = CUBE_COUNT * CUBE_DIM as usize;
    while i < out.len() {
        let h = hash(i, seed);
        let sum = (h & 255u32) + ((h >> 8u32) & 255u32) + ((h >> 16u32) & 255u32) + (h >> 24u32);
        // Mean 510, standard deviation 147.8.
        out[i] = F::cast_from((f32::cast_from(sum) - 510.0f32) * 0.006_766f32);
        i += stride;
    }
}
