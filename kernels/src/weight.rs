//! Errors and word copies that weights of every format share.

use arch::Device;
use cubecl::prelude::*;
use cubecl::server::Handle;
use quant::WeightFormat;
use tune::Infeasible;

/// An invalid weight.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidWeight {
    #[error("expected {axis} of at least 1, got 0\nhint: skip an empty weight")]
    Empty { axis: &'static str },
    #[error(
        "expected a block size that is a power of two from 32 to 4096, got {0}\nhint: use a block \
         size of 64"
    )]
    BlockSize(u32),
    #[error("a weight of {n} x {k} with block size {block_size} cannot be stored in tiles: {why}")]
    Tiles { n: u32, k: u32, block_size: u32, why: &'static str },
    #[error("cannot join the weights: {why}\nhint: run one matmul per weight")]
    Join { why: &'static str },
    #[error(
        "expected {format} rows of a multiple of the block size, got k {k} for a block size of \
         {block}\nhint: use a format with blocks that cross rows, such as nf4"
    )]
    Rows { format: WeightFormat, k: u32, block: u32 },
    #[error(
        "{0} does not support this block size or scale format\nhint: use the scheme that \
         `WeightFormat::scheme` returns"
    )]
    Scheme(WeightFormat),
    #[error("the device failed: {0}")]
    Device(String),
    #[error(
        "expected a weight of at most 2^34 elements and rows of fewer than 2^31, got {0} \
         elements\nhint: split the weight"
    )]
    TooLarge(u64),
}

/// Reasons why a weight was not quantised.
#[derive(Debug, thiserror::Error)]
pub enum QuantizeError {
    #[error(
        "expected a finite weight, got infinities or NaN\nhint: keep the weight dense, or repair \
         its values"
    )]
    NotFinite,
    #[error("cannot quantise on this device: {0}")]
    Unsupported(#[from] Infeasible),
    #[error("the device failed: {0}")]
    Device(String),
}

/// Returns the grid for `len` words: cubes and units of a cube.
pub(crate) fn spread(device: &Device, len: usize) -> (CubeCount, CubeDim) {
    let alone = device.profile().cores().is_some();
    let (units, max) = if alone { (1, 1) } else { (128, 65_535) };
    let cubes = len.div_ceil(units as usize).min(max) as u32;
    (CubeCount::Static(cubes, 1, 1), CubeDim::new_1d(units))
}

/// Copies `len` words from word `first` of one buffer to word `to_first` of another. Each buffer is a handle
/// and its length in words.
pub(crate) fn copy_words(
    device: &Device,
    (from, from_len): (&Handle, usize),
    first: usize,
    (to, to_len): (&Handle, usize),
    to_first: usize,
    len: usize,
) {
    let (cubes, dim) = spread(device, len);
    // SAFETY: the caller's words lie within the buffers, and the kernel checks its index.
    unsafe {
        copy::launch_unchecked(
            device.client(),
            cubes,
            dim,
            BufferArg::from_raw_parts(from.clone(), from_len),
            BufferArg::from_raw_parts(to.clone(), to_len),
            first as u32,
            to_first as u32,
            len as u32,
        );
    }
}

#[cube(launch_unchecked)]
fn copy(from: &[u32], to: &mut [u32], from_at: u32, to_at: u32, len: u32) {
    let mut i = ABSOLUTE_POS as u32;
    let stride = CUBE_COUNT as u32 * CUBE_DIM;
    while i < len {
        to[(to_at + i) as usize] = from[(from_at + i) as usize];
        i += stride;
    }
}
