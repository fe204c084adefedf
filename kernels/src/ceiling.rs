//! Peak copy bandwidth and peak arithmetic of a device, the reference of all relative figures.
//!
//! *Copy* reads and writes every byte of a buffer once, 16 bytes a unit. The buffer is several times the
//! last-level cache. *Multiply* runs independent matrix instructions (or multiply-adds) on registers. It
//! loads nothing, and it stores only one number per unit, so that the compiler keeps the loop.

use arch::{ArchProfile, DType, Device};
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use cubecl::server::Handle;
use tune::Queue;
use tune::timing::{self, Effort, Timing, TimingError};

use crate::matmul::Precision;
use crate::tile::multiply_halves;

/// Copies `bytes` (a multiple of 16) from one buffer to another.
pub fn copy(device: &Device, from: &Handle, to: &Handle, bytes: usize) {
    let vectors = bytes / 16;
    let cores = device.profile().cores();
    let per_cube = cores.unwrap_or(256);
    let cubes = vectors.div_ceil(per_cube as usize * 4).min(65_535) as u32;
    let cubes = if cores.is_some() { 1 } else { cubes };
    // SAFETY: both buffers hold `vectors` vectors, and the kernel checks its index.
    unsafe {
        copy_kernel::launch_unchecked(
            device.client(),
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(per_cube),
            BufferArg::from_raw_parts(from.clone(), vectors),
            BufferArg::from_raw_parts(to.clone(), vectors),
            cores.is_some(),
        );
    }
}

#[cube(launch_unchecked)]
fn copy_kernel(
    from: &[Vector<u32, Const<4>>],
    to: &mut [Vector<u32, Const<4>>],
    #[comptime] contiguous: bool,
) {
    if comptime!(contiguous) {
        // A core copies one contiguous range.
        let run = from.len().div_ceil(CUBE_DIM as usize);
        let start = run * UNIT_POS as usize;
        let end = min(start + run, from.len());
        let mut i = start;
        while i < end {
            to[i] = from[i];
            i += 1;
        }
    } else {
        let mut i = ABSOLUTE_POS;
        let stride = CUBE_COUNT * CUBE_DIM as usize;
        while i < from.len() {
            to[i] = from[i];
            i += stride;
        }
    }
}

/// Times a copy between buffers far larger than the last-level cache. Returns the bytes read plus written,
/// and the timing.
///
/// # Errors
/// Fails if a launch fails.
pub fn time_copy(device: &Device) -> Result<(u64, Timing), TimingError> {
    let cache = device.profile().cache_bytes.unwrap_or(32 << 20) as usize;
    // Devices with a buffer limit bind at most 128 MiB.
    let max = if device.profile().max_buffer_bytes.is_some() { 64 << 20 } else { 1 << 30 };
    let bytes = (8 * cache).clamp(64 << 20, max) / 4096 * 4096;
    // A dedicated allocation returns to the driver afterwards, and the pages of a pool do not distort the
    // timing.
    let [from, to] = device.client().memory_dedicated_allocation((), |()| {
        [
            crate::noise(&Queue::Device(device), bytes / 4, DType::F32, 1),
            device.client().empty(bytes),
        ]
    });
    let effort = Effort::report(device.backend());
    let timing = timing::measure(device, effort, |_| copy(device, &from, &to, bytes))?;
    Ok((2 * bytes as u64, timing))
}

/// Times matrix multiplication on registers. Returns the operations and the timing; None if [`Multiply::from_arch`]
/// is None.
///
/// # Errors
/// Fails if a launch fails.
pub fn time_multiply(
    device: &Device,
    precision: Precision,
) -> Result<Option<(u64, Timing)>, TimingError> {
    let Some(multiply) = Multiply::from_arch(device.profile(), precision) else { return Ok(None) };
    let out = device.client().empty(multiply.out_len() * 4);
    let effort = Effort::report(device.backend());
    let timing = timing::measure(device, effort, |_| multiply.launch(device, &out))?;
    Ok(Some((multiply.flops(), timing)))
}

/// A kernel that saturates the multipliers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Multiply {
    pub precision: Precision,
    /// Depth of the instruction; 0 for scalar or vector multiply-adds.
    inst_k: u32,
    cubes: u32,
    units: u32,
    steps: u32,
    /// Elements of a vector multiply-add.
    vector: u32,
    /// Accumulators in flight.
    chains: usize,
}

/// Accumulators that a plane or unit keeps in flight.
const CHAINS: usize = 16;
/// Accumulators on a CPU: enough for two multiply-adds a cycle at latency 4. With their factor they fit in
/// the 16 vector registers of AVX2.
const CPU_CHAINS: usize = 12;

impl Multiply {
    /// Returns the loop for `precision` on `arch`. Returns None if the backend exposes only cooperative
    /// matrices, which have no registers to multiply in.
    pub fn from_arch(arch: &ArchProfile, precision: Precision) -> Option<Self> {
        let processors = arch.processors.unwrap_or(64);
        let cpu = arch.cores().is_some();
        let scalar = |vector| Self {
            precision,
            inst_k: 0,
            cubes: if cpu { 1 } else { processors * 4 },
            units: if cpu { processors } else { 256 },
            steps: if cpu { 200_000 } else { 4096 },
            vector,
            chains: if cpu { CPU_CHAINS } else { CHAINS },
        };
        match precision {
            Precision::F32 if cpu => Some(scalar((arch.load_bytes / 4).clamp(4, 16))),
            Precision::F32 => Some(scalar(1)),
            _ if arch.inline_ptx() => {
                let inst_k = arch.mma_for(precision.instruction(), precision.sums())?.k;
                let (cubes, units) = (processors, 256);
                let (steps, vector, chains) = (4096, 1, CHAINS);
                Some(Self { precision, inst_k, cubes, units, steps, vector, chains })
            }
            _ => None,
        }
    }

    /// Operations of one launch.
    pub fn flops(&self) -> u64 {
        let [cubes, units, steps] = [self.cubes, self.units, self.steps].map(u64::from);
        let per_step = match self.inst_k {
            0 => units * 2 * u64::from(self.vector),
            k => units / 32 * 2 * 16 * 8 * u64::from(k),
        };
        cubes * steps * self.chains as u64 * per_step
    }

    /// Number of f32 elements that [`Multiply::launch`] writes.
    pub fn out_len(&self) -> usize {
        (self.cubes * self.units) as usize
    }

    pub fn launch(&self, device: &Device, out: &Handle) {
        let dim = match self.inst_k {
            0 => CubeDim::new_1d(self.units),
            _ => CubeDim::new_2d(32, self.units / 32),
        };
        let elem = ElemType::Float(match self.precision.instruction() {
            DType::Tf32 => cubecl::ir::FloatKind::TF32,
            DType::F16 => cubecl::ir::FloatKind::F16,
            DType::Bf16 => cubecl::ir::FloatKind::BF16,
            _ => cubecl::ir::FloatKind::F32,
        });
        multiply_kernel::launch(
            device.client(),
            CubeCount::Static(self.cubes, 1, 1),
            dim,
            self.vector as usize,
            // SAFETY: the buffer holds one element a unit.
            unsafe { BufferArg::from_raw_parts(out.clone(), self.out_len()) },
            self.steps,
            self.chains,
            self.inst_k,
            self.precision.sums() == DType::F16,
            elem,
        );
    }
}

#[cube(launch)]
fn multiply_kernel<I: Float, W: Size>(
    out: &mut [f32],
    steps: u32,
    #[comptime] chains: usize,
    #[comptime] inst_k: u32,
    #[comptime] f16_accumulation: bool,
    #[define(I)] _dtype: ElemType,
) {
    let seed = f32::cast_from(UNIT_POS) * 1.0e-3 + 1.0e-3;
    if comptime!(inst_k == 0) {
        let mut acc = Array::<Vector<f32, W>>::new(chains);
        let factor = Vector::<f32, W>::new(seed);
        #[unroll]
        for i in 0..chains {
            acc[i] = Vector::new(seed * comptime!(i as f32));
        }
        for _ in 0..steps {
            #[unroll]
            for i in 0..chains {
                acc[i] = fma(acc[i], factor, factor);
            }
        }
        let mut sum = Vector::<f32, W>::new(0.0f32);
        #[unroll]
        for i in 0..chains {
            sum += acc[i];
        }
        out[ABSOLUTE_POS] = sum.extract(0usize);
    } else if comptime!(f16_accumulation) {
        out[CUBE_POS_X as usize * CUBE_DIM as usize + UNIT_POS as usize] = halves(seed, steps);
    } else {
        let def = MmaDefinition::<I, I, f32>::new(16usize, 8usize, inst_k as usize);
        let size!(NF) = def.vector_size(MatrixIdent::A);
        let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
        let mut a = Array::<Vector<I, NF>>::new(4usize);
        let mut b = Array::<Vector<I, NF>>::new(2usize);
        #[unroll]
        for i in 0..4usize {
            a[i] = Vector::new(I::cast_from(seed));
        }
        #[unroll]
        for i in 0..2usize {
            b[i] = Vector::new(I::cast_from(seed));
        }
        let mut acc = Sequence::<Array<Vector<f32, NC>>>::new();
        #[unroll]
        for i in 0..CHAINS {
            let mut c = Array::<Vector<f32, NC>>::new(2usize);
            c[0] = Vector::new(seed * comptime!(i as f32));
            c[1] = Vector::new(seed);
            acc.push(c);
        }
        for _ in 0..steps {
            #[unroll]
            for i in 0..CHAINS {
                def.execute_inplace(&a, &b, acc.index_mut(i));
            }
        }
        let mut sum = 0.0f32;
        #[unroll]
        for i in 0..CHAINS {
            sum += acc.index(i)[0].extract(0usize) + acc.index(i)[1].extract(0usize);
        }
        out[CUBE_POS_X as usize * CUBE_DIM as usize + UNIT_POS as usize] = sum;
    }
}

/// Matrix instructions on f16 with f16 accumulators.
#[cube]
fn halves(seed: f32, steps: u32) -> f32 {
    let word = u32::reinterpret(Vector::<half::f16, Const<2>>::new(half::f16::cast_from(seed)));
    let mut a = Array::<u32>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        a[i] = word;
    }
    let mut b = Array::<u32>::new(2usize);
    #[unroll]
    for i in 0..2usize {
        b[i] = word;
    }
    let mut acc = Sequence::<Array<u32>>::new();
    #[unroll]
    for i in 0..CHAINS {
        let mut c = Array::<u32>::new(2usize);
        c[0] = word + comptime!(i as u32);
        c[1] = word;
        acc.push(c);
    }
    for _ in 0..steps {
        #[unroll]
        for i in 0..CHAINS {
            multiply_halves(&a, &b, 0usize, acc.index_mut(i));
        }
    }
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..CHAINS {
        #[unroll]
        for j in 0..2usize {
            let pair = Vector::<half::f16, Const<2>>::reinterpret(acc.index(i)[j]);
            sum += f32::cast_from(pair.extract(0usize));
        }
    }
    sum
}
