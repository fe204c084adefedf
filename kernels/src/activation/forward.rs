//! `h = activation(z) · up`, or `h = activation(z)` without a gate.
//!
//! Cost: z and up once, h once.

use arch::ArchProfile;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use super::{ActivationConfig, ActivationProblem, Plan};
use crate::elem::{elem, rounding};
use crate::launch::{index_width, launch};
use crate::matmul::{Arithmetic, activation};
use crate::round::rounded;

/// The activation kernel.
pub struct Activate;

/// Device buffers; up exists only with a gate.
#[derive(Debug, Clone)]
pub struct ActivateOperands {
    pub z: Handle,
    pub up: Option<Handle>,
    pub h: Handle,
}

impl Kernel for Activate {
    type Problem = ActivationProblem;
    type Config = ActivationConfig;
    type Operands = ActivateOperands;

    const NAME: &'static str = "activate";
    const VERSION: u32 = 1;

    fn bucket(p: &ActivationProblem) -> String {
        p.bucket()
    }

    fn candidates(arch: &ArchProfile, p: &ActivationProblem) -> Vec<ActivationConfig> {
        ActivationConfig::baseline(arch, p).into_iter().collect()
    }

    fn check(
        arch: &ArchProfile,
        p: &ActivationProblem,
        c: &ActivationConfig,
    ) -> Result<(), Infeasible> {
        c.check(arch, p)
    }

    fn cost(p: &ActivationProblem) -> Cost {
        let (all, matrices) = (p.elements() as u64, if p.gated { 3 } else { 2 });
        Cost { flops: 10 * all, bytes: matrices * all * p.dtype.size() as u64 }
    }

    fn baseline(arch: &ArchProfile, p: &ActivationProblem) -> Result<ActivationConfig, Infeasible> {
        ActivationConfig::baseline(arch, p)
    }

    fn operands(queue: &Queue, p: &ActivationProblem, seed: u64) -> ActivateOperands {
        let noise = |salt| crate::noise(queue, p.strided(), p.dtype, 2 * seed + salt);
        ActivateOperands {
            z: noise(0),
            up: p.gated.then(|| noise(1)),
            h: queue.empty((p.elements() * p.dtype.size()).next_multiple_of(4)),
        }
    }

    fn outputs(p: &ActivationProblem, operands: &ActivateOperands) -> Vec<Output> {
        let (handle, len) = (operands.h.clone(), p.elements());
        vec![Output { handle, dtype: p.dtype, len, tolerance: rounding(p.dtype).max(1e-5) }]
    }

    fn launch(
        queue: &Queue,
        p: &ActivationProblem,
        c: &ActivationConfig,
        operands: &ActivateOperands,
        _scratch: Option<&Handle>,
    ) {
        let arch = queue.profile();
        let vector = p.vector(arch) as usize;
        let (vectors, strided) = (p.elements() / vector, p.strided() / vector);
        let cubes = crate::cubes(arch, vectors as u64, c.units);
        let plan = Plan::new(arch, p);
        // Without a gate, another buffer is bound, which the kernel does not read.
        let up = operands.up.as_ref().unwrap_or(&operands.z);
        // SAFETY: the lengths follow from the problem, and the kernel accesses vectors below `vectors`.
        unsafe {
            launch!(
                queue,
                activate,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(c.units),
                index_width(p.strided().max(p.elements()) as u64),
                vector,
                BufferArg::from_raw_parts(operands.z.clone(), strided),
                BufferArg::from_raw_parts(up.clone(), strided),
                BufferArg::from_raw_parts(operands.h.clone(), vectors),
                vectors,
                p.width / vector as u32,
                p.stride / vector as u32,
                plan,
                elem(p.dtype),
            );
        }
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn activate<F: Float, N: Size>(
    z: &[Vector<F, N>],     // [rows, stride]
    up: &[Vector<F, N>],    // [rows, stride]
    h: &mut [Vector<F, N>], // [rows, width]
    vectors: usize,
    width: u32,
    stride: u32,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < vectors {
        let place = at / width as usize * stride as usize + at % width as usize;
        let value = z[place];
        let mut gate = Vector::<F, N>::new(F::from_int(1));
        if comptime!(plan.gated) {
            gate = up[place];
        }
        let mut out = Vector::<F, N>::new(F::from_int(0));
        #[unroll]
        for e in 0..N::value() {
            let own = activation(
                f32::cast_from(value.extract(e)),
                comptime!(Some(plan.activation)),
                Arithmetic::Plain,
            );
            if comptime!(plan.gated) {
                out.insert(e, rounded::<F>(own * f32::cast_from(gate.extract(e)), plan.rounds));
            } else {
                out.insert(e, rounded::<F>(own, plan.rounds));
            }
        }
        h[at] = out;
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}
