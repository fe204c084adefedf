//! Errors and word copies that weights of every format share.

use arch::Device;
use cubecl::prelude::*;
use cubecl::server::Handle;
use quant::WeightFormat;
use tune::Infeasible;

/// An invalid weight.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidWeight {
    #[error("{axis} is 0\nhint: an empty weight has no kernel to run; skip it")]
    Empty { axis: &'static str },
    #[error("blocks of {0} elements\nhint: a power of two from 32 to 4096")]
    BlockSize(u32),
    #[error("{n} x {k} in blocks of {block_size} does not divide into tiles: {why}")]
    Tiles { n: u32, k: u32, block_size: u32, why: &'static str },
    #[error("cannot be one weight: {why}\nhint: multiply with each by itself")]
    Join { why: &'static str },
    #[error(
        "rows of {k} elements are no whole blocks of {block} in {format}\nhint: another format, whose blocks straddle rows"
    )]
    Rows { format: WeightFormat, k: u32, block: u32 },
    #[error("{0} does not have such blocks or scales")]
    Scheme(WeightFormat),
    #[error("the device failed: {0}")]
    Device(String),
    #[error("{0} elements\nhint: up to 2^34 are addressed, below 2^31 of them in a row")]
    TooLarge(u64),
}

/// Reasons why a weight was not quantised.
#[derive(Debug, thiserror::Error)]
pub enum QuantizeError {
    #[error(
        "the weight holds infinities or NaN\nhint: codes of 4 or 8 bits stand for finite numbers only"
    )]
    NotFinite,
    #[error("cannot quantise here: {0}")]
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
