//! Statistics per query: (log₂ of the sum of its exponentials, out·dout) as f32 pairs, indexed like
//! the log-sum-exp. A query without visible keys gets +inf, so that its weights are 0.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use crate::attention::{Dims, Sequences, Steps};

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "operands and comptime facts")]
pub(super) fn stats<F: Float, N: Size>(
    out: &[Vector<F, N>],
    dout: &[Vector<F, N>],
    lse: &[f32],
    to: &mut [Vector<f32, Const<2>>],
    sequences: Sequences,
    dims: &Dims,
    dout_steps: &Steps,
    infinity: f32,
    #[comptime] head_dim: u32,
    #[define(F)] _dtype: ElemType,
) {
    let lanes = N::value();
    let vectors = comptime!(head_dim as usize / lanes);
    let total = dims.batch * dims.heads * dims.seq_q;
    let mut task = ABSOLUTE_POS as u32;
    let stride = CUBE_COUNT as u32 * CUBE_DIM;
    while task < total {
        let (row, head) = (task % dims.seq_q, task / dims.seq_q % dims.heads);
        let batch = task / dims.seq_q / dims.heads;
        let span = sequences.span(dims, batch);
        if row < span.seq_q {
            let at = dims.out.at(span.from_q + row, batch, head) / N::value();
            let at_dout = dout_steps.at(span.from_q + row, batch, head) / N::value();
            let mut products = Vector::<f32, N>::new(0.0f32);
            for d in 0..vectors {
                let result = Vector::cast_from(out[at + d]);
                products = fma(result, Vector::cast_from(dout[at_dout + d]), products);
            }
            let mut delta = 0.0f32.runtime();
            #[unroll]
            for e in 0..N::value() {
                delta += products.extract(e);
            }
            let at = dims.lse_at(span.from_q + row, batch, head);
            let log = lse[at];
            let mut pair = Vector::<f32, Const<2>>::new(delta);
            let log = select(log == -infinity, infinity, log * std::f32::consts::LOG2_E);
            pair.insert(0usize, log);
            to[at] = pair;
        }
        task += stride;
    }
}
