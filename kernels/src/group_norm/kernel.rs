//! The loops of a group norm.

use arch::ArchProfile;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use tune::Queue;

use super::sum::group_sum;
use super::{GroupNormConfig, GroupNormOperands, GroupNormProblem};
use crate::elem::elem;
use crate::launch::{index_width, launch};
use crate::matmul::{Activation, Arithmetic, activation};
use crate::round::{by_hand, rounded};
use crate::rows::{RowScale, add, add_squares, total, zeros};

/// Bytes of a chunk that a unit of a cube of `units` keeps in registers; of more, it reads all again. Units of large cubes have 64
/// registers.
const fn held_bytes(units: u32) -> u32 {
    if units > 512 { 64 } else { 160 }
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    /// Vectors of a pixel in one group.
    pub per_group: u32,
    /// Vectors of a pixel that a cube reads.
    pub columns: u32,
    /// Pixels that a cube reads at once.
    rows: u32,
    /// Vectors that a unit keeps in registers; 0 if it reads them again.
    held: u32,
    /// Chunks whose sums a unit merges, at most.
    merged: u32,
    activation: Option<Activation>,
    modulated: bool,
    /// True if single PTX instructions are exact enough for the activation.
    ptx: bool,
    /// True if the kernel rounds results itself before it stores them.
    rounds: bool,
}

impl Plan {
    fn new(arch: &ArchProfile, p: &GroupNormProblem, [rows, groups, chunks]: [u32; 3]) -> Self {
        let (vector, per_group) = (p.vector(arch), p.per_group(arch));
        let each = p.pixels.div_ceil(chunks).div_ceil(rows);
        let (size, columns) = (p.dtype.size() as u32, groups * per_group);
        let holds = each * vector * size <= held_bytes(rows * columns);
        Self {
            per_group,
            columns,
            rows,
            held: if holds { each } else { 0 },
            merged: chunks.div_ceil(rows * per_group),
            activation: p.activation,
            modulated: p.modulation_pitch > 0,
            ptx: arch.inline_ptx() && size == 2,
            rounds: by_hand(arch, p.dtype),
        }
    }

    pub(super) const fn units(self) -> u32 {
        self.rows * self.columns
    }

    /// Units of a group.
    pub(super) const fn members(self) -> u32 {
        self.rows * self.per_group
    }

    const fn arithmetic(self) -> Arithmetic {
        if self.ptx { Arithmetic::Ptx } else { Arithmetic::Plain }
    }
}

pub(super) fn launch(
    queue: &Queue,
    p: &GroupNormProblem,
    c: &GroupNormConfig,
    operands: &GroupNormOperands,
    scratch: Option<&Handle>,
) {
    let arch = queue.profile();
    let (width, per_group) = (p.vector(arch) as usize, p.per_group(arch));
    let (address, dtype) = (index_width(p.elements() as u64), elem(p.dtype));
    let vectors = p.width() / width as u32;
    let pitch = p.modulation_pitch / width as u32;
    // SAFETY: all lengths below follow from the problem, and the kernels read and write pixels of its images only.
    let buffer = |handle: &Handle, len| unsafe { BufferArg::from_raw_parts(handle.clone(), len) };
    let x = || buffer(&operands.x, p.len(0) / width);
    let out = || buffer(&operands.out, p.elements() / width);
    let affine = || {
        let (row, weight) = (vectors as usize, &operands.weight);
        // An absent modulation is bound to another buffer, which the kernel does not read.
        let modulation = match &operands.modulation {
            Some(modulation) => buffer(modulation, p.modulation_len() / width),
            None => buffer(weight, row),
        };
        (buffer(weight, row), buffer(&operands.bias, row), modulation)
    };
    let (rows, groups, chunks) = match *c {
        GroupNormConfig::Alone { units } => {
            let parts = u64::from(p.batch) * u64::from(p.groups);
            let cubes = CubeCount::Static(crate::cubes(arch, parts, units), 1, 1);
            let sizes = SizesLaunch::new(p.pixels, p.pixels, 1, pitch, p.eps);
            let (weight, bias, modulation) = affine();
            // SAFETY: see above.
            unsafe {
                launch!(
                    queue,
                    alone,
                    cubes,
                    CubeDim::new_1d(units),
                    address,
                    width,
                    x(),
                    JoinedLaunch::of(p, operands, width),
                    weight,
                    bias,
                    modulation,
                    out(),
                    p.batch * p.groups,
                    sizes,
                    Plan::new(arch, p, [1, 1, 1]),
                    dtype,
                );
            }
            return;
        }
        GroupNormConfig::Shared { rows, groups, chunks } => (rows, groups, chunks),
    };
    let plan = Plan::new(arch, p, [rows, groups, chunks]);
    let dim = CubeDim::new_1d(rows * groups * per_group);
    let cubes = CubeCount::Static(p.batch * (p.groups / groups), chunks, 1);
    let sizes = || SizesLaunch::new(p.pixels, p.pixels.div_ceil(chunks), chunks, pitch, p.eps);
    let (weight, bias, modulation) = affine();
    let Some(scratch) = scratch else {
        // SAFETY: see above.
        unsafe {
            launch!(
                queue,
                whole,
                cubes,
                dim,
                address,
                width,
                x(),
                JoinedLaunch::of(p, operands, width),
                weight,
                bias,
                modulation,
                out(),
                sizes(),
                plan,
                dtype,
            );
        }
        return;
    };
    let partials = || {
        let len = chunks as usize * p.groups as usize * p.batch as usize;
        buffer(scratch, len)
    };
    // SAFETY: see above.
    unsafe {
        launch!(
            queue,
            sum_chunks,
            cubes.clone(),
            dim,
            address,
            width,
            x(),
            JoinedLaunch::of(p, operands, width),
            partials(),
            sizes(),
            plan,
            dtype,
        );
        launch!(
            queue,
            normalise_chunks,
            cubes,
            dim,
            address,
            width,
            x(),
            JoinedLaunch::of(p, operands, width),
            weight,
            bias,
            modulation,
            partials(),
            out(),
            sizes(),
            plan,
            dtype,
        );
    }
}

/// One or two inputs, whose channels follow each other.
#[derive(CubeType, CubeLaunch)]
struct Joined<F: Float, N: Size> {
    second: ComptimeOption<Box<[Vector<F, N>]>>,
    /// Vectors of a pixel in the first input, and in both.
    first: u32,
    all: u32,
    /// True with a second input; repeated for the kernel's hash.
    #[cube(comptime)]
    joined: bool,
}

impl<F: Float, N: Size> JoinedLaunch<F, N> {
    /// Launch arguments, in vectors of `width`.
    fn of(p: &GroupNormProblem, operands: &GroupNormOperands, width: usize) -> Self {
        let second = operands.second.as_ref().map(|second| {
            // SAFETY: the problem has a second input of this length.
            unsafe { BufferArg::from_raw_parts(second.clone(), p.len(1) / width) }
        });
        let (first, joined) = (p.channels[0] / width as u32, second.is_some());
        Self::new(ComptimeOptionArgs::from(second), first, p.width() / width as u32, joined)
    }
}

#[cube]
impl<F: Float, N: Size> Joined<F, N> {
    /// Returns vector `at` of a pixel.
    fn read(&self, x: &[Vector<F, N>], pixel: usize, at: u32) -> Vector<F, N> {
        let mut vector = Vector::<F, N>::new(F::from_int(0));
        let own = comptime!(!self.joined) || at < self.first;
        if own {
            vector = x[pixel * self.first as usize + at as usize];
        }
        #[comptime]
        match &self.second {
            ComptimeOption::Some(second) => {
                if !own {
                    let rest = (self.all - self.first) as usize;
                    vector = second[pixel * rest + (at - self.first) as usize];
                }
            }
            ComptimeOption::None => {}
        }
        vector
    }
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// Pixels of an image, and of a chunk.
    pixels: u32,
    span: u32,
    chunks: u32,
    /// Vectors from the scales of one image to those of the next.
    modulation_pitch: u32,
    eps: f32,
}

/// Vectors of channels and pixels of a unit.
#[derive(CubeType, Clone, Copy)]
struct Place {
    image: u32,
    /// Vector of a pixel.
    at: u32,
    /// First pixel of the unit, and the end of the chunk.
    first: u32,
    end: u32,
    /// Pixel 0 of the image in the batch.
    origin: usize,
}

#[cube]
fn place(sizes: &Sizes, all: u32, #[comptime] plan: Plan) -> Place {
    let columns = comptime!(plan.columns);
    let blocks = all / columns;
    let (image, block) = (CUBE_POS_X / blocks, CUBE_POS_X % blocks);
    let first = CUBE_POS_Y * sizes.span;
    Place {
        image,
        at: block * columns + UNIT_POS % columns,
        first: first + UNIT_POS / columns,
        end: min(first + sizes.span, sizes.pixels),
        origin: image as usize * sizes.pixels as usize,
    }
}

/// Loads the vectors of a unit that it keeps; those past the chunk's end are 0.
#[cube]
fn load<F: Float, N: Size>(
    x: &[Vector<F, N>],
    joined: &Joined<F, N>,
    own: &Place,
    #[comptime] plan: Plan,
) -> Array<Vector<F, N>> {
    let held = comptime!(plan.held as usize);
    let mut values = Array::<Vector<F, N>>::new(comptime!(held.max(1)));
    #[unroll]
    for h in 0..held {
        let pixel = own.first + comptime!(h as u32 * plan.rows);
        let mut vector = Vector::<F, N>::new(F::from_int(0));
        if pixel < own.end {
            vector = joined.read(x, own.origin + pixel as usize, own.at);
        }
        values[h] = vector;
    }
    values
}

/// Returns the sum of a group's values in a chunk, or of their squared deviations from `mean`, to each of its units.
#[cube]
fn chunk_sum<F: Float, N: Size>(
    x: &[Vector<F, N>],
    joined: &Joined<F, N>,
    values: &Array<Vector<F, N>>,
    own: &Place,
    mean: f32,
    shared: &mut [f32],
    #[comptime] squares: bool,
    #[comptime] plan: Plan,
) -> f32 {
    let mut sums = zeros(N::value());
    if comptime!(plan.held > 0) {
        #[unroll]
        for h in 0..comptime!(plan.held as usize) {
            if comptime!(!squares) {
                add(&mut sums, values[h]);
            } else if own.first + comptime!(h as u32 * plan.rows) < own.end {
                // Zeros past the end must not count: they deviate from the mean, too.
                add_squares(&mut sums, values[h], mean);
            }
        }
    } else {
        let mut pixel = u32::cast_from(own.first);
        while pixel < own.end {
            let vector = joined.read(x, own.origin + pixel as usize, own.at);
            if comptime!(squares) {
                add_squares(&mut sums, vector, mean);
            } else {
                add(&mut sums, vector);
            }
            pixel += comptime!(plan.rows);
        }
    }
    let call = comptime!(if squares { 1u32 } else { 0u32 });
    group_sum(total(&sums, N::value()), shared, call, plan)
}

/// Factor and addend of a unit's channels.
#[derive(CubeType)]
struct Channels {
    mean: f32,
    factors: Array<f32>,
    addends: Array<f32>,
}

#[cube]
fn channels<F: Float, N: Size>(
    weight: &[Vector<F, N>],
    bias: &[Vector<F, N>],
    modulation: &[Vector<F, N>],
    scale: &RowScale,
    sizes: &Sizes,
    image: u32,
    at: u32,
    all: u32,
    #[comptime] modulated: bool,
) -> Channels {
    let mut factors = Array::<f32>::new(N::value());
    let mut addends = Array::<f32>::new(N::value());
    let (weights, biases) = (weight[at as usize], bias[at as usize]);
    #[unroll]
    for e in 0..N::value() {
        factors[e] = scale.factor * f32::cast_from(weights.extract(e));
        addends[e] = f32::cast_from(biases.extract(e));
    }
    if comptime!(modulated) {
        let from = image as usize * sizes.modulation_pitch as usize + at as usize;
        let (scales, shifts) = (modulation[from], modulation[from + all as usize]);
        #[unroll]
        for e in 0..N::value() {
            let scale = 1.0f32 + f32::cast_from(scales.extract(e));
            factors[e] *= scale;
            addends[e] = fma(addends[e], scale, f32::cast_from(shifts.extract(e)));
        }
    }
    Channels { mean: scale.mean, factors, addends }
}

#[cube]
fn normalised<F: Float, N: Size>(
    x: Vector<F, N>,
    channels: &Channels,
    #[comptime] plan: Plan,
) -> Vector<F, N> {
    let mut out = Vector::<F, N>::new(F::from_int(0));
    #[unroll]
    for e in 0..N::value() {
        let far = f32::cast_from(x.extract(e)) - channels.mean;
        let value = fma(far, channels.factors[e], channels.addends[e]);
        let value = activation(value, plan.activation, comptime!(plan.arithmetic()));
        out.insert(e, rounded::<F>(value, plan.rounds));
    }
    out
}

/// Normalises the pixels of a unit.
#[cube]
fn write<F: Float, N: Size>(
    x: &[Vector<F, N>],
    joined: &Joined<F, N>,
    values: &Array<Vector<F, N>>,
    out: &mut [Vector<F, N>],
    own: &Place,
    channels: &Channels,
    #[comptime] plan: Plan,
) {
    let (all, at) = (joined.all as usize, own.at as usize);
    if comptime!(plan.held > 0) {
        #[unroll]
        for h in 0..comptime!(plan.held as usize) {
            let pixel = own.first + comptime!(h as u32 * plan.rows);
            if pixel < own.end {
                let to = (own.origin + pixel as usize) * all + at;
                out[to] = normalised(values[h], channels, plan);
            }
        }
    } else {
        let mut pixel = u32::cast_from(own.first);
        while pixel < own.end {
            let from = own.origin + pixel as usize;
            let vector = joined.read(x, from, own.at);
            out[from * all + at] = normalised(vector, channels, plan);
            pixel += comptime!(plan.rows);
        }
    }
}

/// Normalises some groups of an image.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "operands, sizes, what they are")]
fn whole<F: Float, N: Size>(
    x: &[Vector<F, N>], // [batch, pixels, first]
    joined: Joined<F, N>,
    weight: &[Vector<F, N>],     // [all]
    bias: &[Vector<F, N>],       // [all]
    modulation: &[Vector<F, N>], // [batch, pitch]: scales, then shifts
    out: &mut [Vector<F, N>],    // [batch, pixels, all]
    sizes: Sizes,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(2 * plan.units() as usize));
    let own = place(&sizes, joined.all, plan);
    let values = load(x, &joined, &own, plan);
    let each = values_of::<N>(plan.per_group);
    let count = f32::cast_from(sizes.pixels) * f32::cast_from(each);
    let sum = chunk_sum(x, &joined, &values, &own, 0.0f32.runtime(), &mut shared, false, plan);
    let mean = sum / count;
    let squares = chunk_sum(x, &joined, &values, &own, mean, &mut shared, true, plan);
    let scale = RowScale { mean, factor: (squares / count + sizes.eps).inverse_sqrt() };
    let channels = channels(
        weight,
        bias,
        modulation,
        &scale,
        &sizes,
        own.image,
        own.at,
        joined.all,
        comptime!(plan.modulated),
    );
    write(x, &joined, &values, out, &own, &channels, plan);
}

/// Computes mean and squared deviations of some groups in a chunk of an image.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn sum_chunks<F: Float, N: Size>(
    x: &[Vector<F, N>],
    joined: Joined<F, N>,
    partials: &mut [Vector<f32, Const<2>>], // [batch, groups, chunks]: mean, squared deviations
    sizes: Sizes,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(2 * plan.units() as usize));
    let own = place(&sizes, joined.all, plan);
    let values = load(x, &joined, &own, plan);
    let count = chunk_count(&sizes, CUBE_POS_Y, values_of::<N>(plan.per_group));
    let sum = chunk_sum(x, &joined, &values, &own, 0.0f32.runtime(), &mut shared, false, plan);
    let mean = sum / count;
    let squares = chunk_sum(x, &joined, &values, &own, mean, &mut shared, true, plan);
    let per_group = comptime!(plan.per_group);
    if UNIT_POS < plan.columns && UNIT_POS % per_group == 0 {
        let group = own.image * (joined.all / per_group) + own.at / per_group;
        let mut pair = Vector::<f32, Const<2>>::new(mean);
        pair.insert(1usize, squares);
        partials[group as usize * sizes.chunks as usize + CUBE_POS_Y as usize] = pair;
    }
}

/// Returns the channels in some vectors.
#[cube]
fn values_of<N: Size>(#[comptime] vectors: u32) -> comptime_type!(u32) {
    let width = N::value();
    comptime!(vectors * width as u32)
}

/// Returns the values of a group in a chunk, with `each` of a pixel.
#[cube]
fn chunk_count(sizes: &Sizes, chunk: u32, #[comptime] each: u32) -> f32 {
    let pixels = min(sizes.span, sizes.pixels - chunk * sizes.span);
    f32::cast_from(pixels) * f32::cast_from(each)
}

/// Merges the sums of all chunks of some groups, and normalises a chunk.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "operands, sizes, what they are")]
fn normalise_chunks<F: Float, N: Size>(
    x: &[Vector<F, N>],
    joined: Joined<F, N>,
    weight: &[Vector<F, N>],
    bias: &[Vector<F, N>],
    modulation: &[Vector<F, N>],
    partials: &[Vector<f32, Const<2>>],
    out: &mut [Vector<F, N>],
    sizes: Sizes,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(2 * plan.units() as usize));
    let own = place(&sizes, joined.all, plan);
    let values = load(x, &joined, &own, plan);
    let (columns, per_group) = comptime!((plan.columns, plan.per_group));
    let each = values_of::<N>(per_group);
    let count = f32::cast_from(sizes.pixels) * f32::cast_from(each);
    let group = own.image * (joined.all / per_group) + own.at / per_group;
    let from = group as usize * sizes.chunks as usize;
    // The units of a group share its chunks. All their loads wait together.
    let member = UNIT_POS / columns * per_group + UNIT_POS % per_group;
    let mut means = Array::<f32>::new(comptime!(plan.merged as usize));
    let mut deviations = Array::<f32>::new(comptime!(plan.merged as usize));
    #[unroll]
    for i in 0..comptime!(plan.merged) {
        let chunk = member + comptime!(i * plan.members());
        means[i as usize] = 0.0f32;
        deviations[i as usize] = 0.0f32;
        if chunk < sizes.chunks {
            let pair = partials[from + chunk as usize];
            means[i as usize] = pair.extract(0usize);
            deviations[i as usize] = pair.extract(1usize);
        }
    }
    let mut sum = 0.0f32.runtime();
    #[unroll]
    for i in 0..comptime!(plan.merged) {
        let chunk = member + comptime!(i * plan.members());
        let count = chunk_count(&sizes, min(chunk, sizes.chunks - 1), each);
        sum = fma(means[i as usize], count, sum);
    }
    let mean = group_sum(sum, &mut shared, 0u32, plan) / count;
    let mut squares = 0.0f32.runtime();
    #[unroll]
    for i in 0..comptime!(plan.merged) {
        let chunk = member + comptime!(i * plan.members());
        if chunk < sizes.chunks {
            let far = means[i as usize] - mean;
            squares += fma(far * far, chunk_count(&sizes, chunk, each), deviations[i as usize]);
        }
    }
    let squares = group_sum(squares, &mut shared, 1u32, plan);
    let scale = RowScale { mean, factor: (squares / count + sizes.eps).inverse_sqrt() };
    let channels = channels(
        weight,
        bias,
        modulation,
        &scale,
        &sizes,
        own.image,
        own.at,
        joined.all,
        comptime!(plan.modulated),
    );
    write(x, &joined, &values, out, &own, &channels, plan);
}

/// Normalises groups of images, each by one unit.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "operands, sizes, what they are")]
fn alone<F: Float, N: Size>(
    x: &[Vector<F, N>],
    joined: Joined<F, N>,
    weight: &[Vector<F, N>],
    bias: &[Vector<F, N>],
    modulation: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    parts: u32,
    sizes: Sizes,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let per_group = comptime!(plan.per_group);
    let each = values_of::<N>(per_group);
    let count = f32::cast_from(sizes.pixels) * f32::cast_from(each);
    let groups = joined.all / per_group;
    let mut part = ABSOLUTE_POS as u32;
    while part < parts {
        let (image, from) = (part / groups, part % groups * per_group);
        let origin = image as usize * sizes.pixels as usize;
        let mut sums = zeros(N::value());
        for pixel in 0..sizes.pixels {
            for at in 0..per_group {
                add(&mut sums, joined.read(x, origin + pixel as usize, from + at));
            }
        }
        let mean = total(&sums, N::value()) / count;
        let mut squares = zeros(N::value());
        for pixel in 0..sizes.pixels {
            for at in 0..per_group {
                let vector = joined.read(x, origin + pixel as usize, from + at);
                add_squares(&mut squares, vector, mean);
            }
        }
        let square = total(&squares, N::value()) / count;
        let scale = RowScale { mean, factor: (square + sizes.eps).inverse_sqrt() };
        for at in 0..per_group {
            let at = from + at;
            let channels = channels(
                weight,
                bias,
                modulation,
                &scale,
                &sizes,
                image,
                at,
                joined.all,
                comptime!(plan.modulated),
            );
            for pixel in 0..sizes.pixels {
                let pixel = origin + pixel as usize;
                let vector = joined.read(x, pixel, at);
                out[pixel * joined.all as usize + at as usize] =
                    normalised(vector, &channels, plan);
            }
        }
        part += u32::cast_from(CUBE_COUNT) * CUBE_DIM;
    }
}
