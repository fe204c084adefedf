//! out[r, c] = round(factor · x[r, c])    x: f32 `[rows, columns]`, dense; out: columns of a matrix with rows of `stride`
//!
//! Cost: one read and one write. It takes an adapter's factors, which train in f32, into the matrices of a decoder: a few
//! hundred copies a step, each of a few microseconds. It has no config.

use arch::{DType, Device};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::elem::elem;
use crate::launch::index_width;
use crate::round::{by_hand, rounded};

/// Shape of a copy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScaledCopy {
    pub rows: u32,
    pub columns: u32,
    /// Elements of the destination.
    pub len: usize,
    /// First element of the destination that is written.
    pub first: u32,
    /// Elements from one row of the destination to the next.
    pub stride: u32,
    pub factor: f32,
    /// Type of the destination.
    pub dtype: DType,
}

/// Copies `x`, of at least rows · columns elements, into `out`, which holds what [`ScaledCopy`] says.
pub fn scaled_copy(device: &Device, x: &Handle, out: &Handle, copy: &ScaledCopy) {
    let ScaledCopy { rows, columns, len, first, stride, factor, dtype } = *copy;
    let count = rows as usize * columns as usize;
    let units = device.profile().cores().unwrap_or(256);
    let cubes = crate::cubes(device.profile(), count as u64, units);
    // SAFETY: the caller passes buffers of these lengths.
    let (x, out) = unsafe {
        (BufferArg::from_raw_parts(x.clone(), count), BufferArg::from_raw_parts(out.clone(), len))
    };
    scaled_copy_kernel::launch(
        device.client(),
        CubeCount::Static(cubes, 1, 1),
        CubeDim::new_1d(units),
        index_width(len.max(count) as u64),
        x,
        out,
        columns,
        first,
        stride,
        factor,
        by_hand(device.profile(), dtype),
        elem(dtype),
    );
}

#[cube(launch, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "a launch passes each number by itself")]
fn scaled_copy_kernel<F: Float>(
    x: &[f32],
    out: &mut [F],
    columns: u32,
    first: u32,
    stride: u32,
    factor: f32,
    #[comptime] by_hand: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut i = ABSOLUTE_POS;
    let step = CUBE_COUNT * CUBE_DIM as usize;
    while i < x.len() {
        let (row, column) = (i as u32 / columns, i as u32 % columns);
        out[(first + row * stride + column) as usize] = rounded::<F>(factor * x[i], by_hand);
        i += step;
    }
}
