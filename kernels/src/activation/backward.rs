//! Gradients of `h = activation(z) · up`, or of `h = activation(z)` without a gate, given dh.
//!
//! ```text
//!   dz  = dh · up · activation'(z)             dup = dh · activation(z)             h = activation(z) · up
//!
//!   silu'(z)      = σ(z) · (1 + z · (1 - σ(z)))                         σ(z) = 1 / (1 + exp(-z))
//!   gelu'(z)      = Φ(z) + z · φ(z)                                     Φ and φ of the normal distribution
//!   gelu_tanh'(z) = σ(2u) + z · σ(2u) · (1 - σ(2u)) · 2u'               u = √(2/π) · (z + 0.044715 z³)
//! ```
//!
//! h is computed again for the gradient of the next matrix, so that the forward pass need not keep it. dz overwrites z, dup
//! overwrites up, h overwrites dh: a unit reads an element before it writes it.
//!
//! Cost: dh, z and up once; dz, dup and h once.

use arch::ArchProfile;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use super::{ActivationConfig, ActivationProblem, Plan};
use crate::elem::elem;
use crate::launch::{index_width, launch};
use crate::matmul::{Arithmetic, activation, slope};
use crate::round::rounded;

/// The kernel of an activation's gradients.
pub struct ActivationBackward;

/// Device buffers; up and dup exist only with a gate.
#[derive(Debug, Clone)]
pub struct ActivationBackwardOperands {
    /// `[rows, width]`, replaced by h.
    pub dh: Handle,
    /// `[rows, stride]`, replaced by dz.
    pub z: Handle,
    /// `[rows, stride]`, replaced by dup.
    pub up: Option<Handle>,
}

impl Kernel for ActivationBackward {
    type Problem = ActivationProblem;
    type Config = ActivationConfig;
    type Operands = ActivationBackwardOperands;

    const NAME: &'static str = "activation_backward";
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
        let (all, matrices) = (p.elements() as u64, if p.gated { 6 } else { 4 });
        Cost { flops: 20 * all, bytes: matrices * all * p.dtype.size() as u64 }
    }

    fn baseline(arch: &ArchProfile, p: &ActivationProblem) -> Result<ActivationConfig, Infeasible> {
        ActivationConfig::baseline(arch, p)
    }

    fn operands(queue: &Queue, p: &ActivationProblem, seed: u64) -> ActivationBackwardOperands {
        let noise = |len: usize, salt| crate::noise(queue, len, p.dtype, 4 * seed + salt);
        ActivationBackwardOperands {
            dh: noise(p.elements(), 0),
            z: noise(p.strided(), 1),
            up: p.gated.then(|| noise(p.strided(), 2)),
        }
    }

    /// None: a launch reads what it writes.
    fn outputs(_: &ActivationProblem, _: &ActivationBackwardOperands) -> Vec<Output> {
        Vec::new()
    }

    fn launch(
        queue: &Queue,
        p: &ActivationProblem,
        c: &ActivationConfig,
        operands: &ActivationBackwardOperands,
        _scratch: Option<&Handle>,
    ) {
        let arch = queue.profile();
        let vector = p.vector(arch) as usize;
        let vectors = p.elements() / vector;
        let cubes = crate::cubes(arch, vectors as u64, c.units);
        let plan = Plan::new(arch, p);
        // Without a gate, another buffer is bound, which the kernel does not access.
        let up = operands.up.as_ref().unwrap_or(&operands.z);
        let strided = p.strided() / vector;
        // SAFETY: the lengths follow from the problem, and the kernel accesses vectors below `vectors`.
        unsafe {
            launch!(
                queue,
                backward,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(c.units),
                index_width(p.strided().max(p.elements()) as u64),
                vector,
                BufferArg::from_raw_parts(operands.dh.clone(), vectors),
                BufferArg::from_raw_parts(operands.z.clone(), strided),
                BufferArg::from_raw_parts(up.clone(), strided),
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
fn backward<F: Float, N: Size>(
    dh: &mut [Vector<F, N>], // [rows, width]
    z: &mut [Vector<F, N>],  // [rows, stride]
    up: &mut [Vector<F, N>], // [rows, stride]
    vectors: usize,
    width: u32,
    stride: u32,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < vectors {
        let place = at / width as usize * stride as usize + at % width as usize;
        let (given, value) = (dh[at], z[place]);
        let mut gate = Vector::<F, N>::new(F::from_int(1));
        if comptime!(plan.gated) {
            gate = up[place];
        }
        let mut dz = Vector::<F, N>::new(F::from_int(0));
        let mut dup = Vector::<F, N>::new(F::from_int(0));
        let mut h = Vector::<F, N>::new(F::from_int(0));
        #[unroll]
        for e in 0..N::value() {
            let (d, x) = (f32::cast_from(given.extract(e)), f32::cast_from(value.extract(e)));
            let own = activation(x, comptime!(Some(plan.activation)), Arithmetic::Plain);
            let bent = slope(x, plan.activation, Arithmetic::Plain);
            if comptime!(plan.gated) {
                let gate = f32::cast_from(gate.extract(e));
                dz.insert(e, rounded::<F>(d * gate * bent, plan.rounds));
                dup.insert(e, rounded::<F>(d * own, plan.rounds));
                h.insert(e, rounded::<F>(own * gate, plan.rounds));
            } else {
                dz.insert(e, rounded::<F>(d * bent, plan.rounds));
                h.insert(e, rounded::<F>(own, plan.rounds));
            }
        }
        dh[at] = h;
        z[place] = dz;
        if comptime!(plan.gated) {
            up[place] = dup;
        }
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}
