//! Launches [`dequant::gemv`](crate::dequant::gemv) with an 8-bit weight.

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use tune::Queue;

use super::problem::{Int8MatmulOperands, Int8MatmulProblem};
use super::{QuantizedValues, QuantizedValuesLaunch, Weight};
use crate::dequant::GemvConfig;
use crate::dequant::gemv::{Dims, DimsLaunch, multiply};
use crate::elem::elem;
use crate::launch::launch;
use crate::matmul::{Finish, FinishLaunch};

pub(super) fn launch(
    queue: &Queue,
    p: &Int8MatmulProblem,
    c: &GemvConfig,
    x: Handle,
    operands: &Int8MatmulOperands,
) {
    let ([x_len, _, out_len], [width, words]) = (p.dense().extents(), p.widths());
    let Weight { n, k } = p.weight;
    // SAFETY: the extents follow from the problem, and the kernel checks its edges.
    unsafe {
        launch!(
            queue,
            gemv,
            CubeCount::Static(n.div_ceil(c.rows_of_cube()), 1, 1),
            CubeDim::new_1d(c.units),
            p.address(),
            width,
            words,
            1,
            BufferArg::from_raw_parts(x, x_len / width),
            QuantizedValuesLaunch::from_buffers(&p.weight, &operands.weight, words),
            BufferArg::from_raw_parts(operands.out.clone(), out_len),
            FinishLaunch::from_buffers(p.epilogue, &operands.epilogue, n as usize, out_len),
            DimsLaunch::new(p.m, n, k),
            *c,
            elem(p.dtype),
        );
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn gemv<F: Float, NX: Size, NW: Size, NO: Size>(
    x: &[Vector<F, NX>],
    weight: &QuantizedValues<NW>,
    out: &mut [Vector<F, NO>],
    finish: Finish<F, F, NO>,
    dims: &Dims,
    #[comptime] config: GemvConfig,
    #[define(F)] _dtype: ElemType,
) {
    multiply::<QuantizedValues<NW>, F, NX, NW, NO>(x, weight, out, &finish, dims, config);
}
