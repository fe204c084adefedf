//! Rounds activations to i8: x ≈ code · scale[m]    x: `[m, k]`, codes from -127 to 127
//!
//! Outlier columns stay exact.
//!
//! ```text
//!   outliers = columns of x with a magnitude of at least `threshold`       // marked per chunk of rows, then merged
//!   scale[m] = max |x[m, ..]| / 127                                        // of the other columns
//!   code     = round(x / scale);  0 in an outlier column                   // ties to even
//! ```
//!
//! The kernel stores codes for paths with int8 instructions, and dequantised values for the others; the
//! matmul is the same. A row with NaN, or with an infinity outside of outlier columns, gets a scale that is
//! NaN or infinite. Its results are NaN.
//!
//! Cost: x is read three times, the second and third time from cache; one byte or one number is written per
//! element. Three launches, one without a threshold.
//!
//! Source: Dettmers et al., "LLM.int8()" (2022), where the threshold is 6.

use arch::{ArchProfile, DType};
use cubecl::ir::{ElemType, IntKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::Queue;

use crate::elem::elem;
use crate::launch::{index_width, launch};
use crate::round::{LEAST, by_hand, nearest, rounded};
use crate::rows::{Fold, RowPlan, larger, magnitude, row_fold};

/// Rounding of x to 8 bits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Activations {
    /// Smallest magnitude that makes its column an outlier, which stays exact. 0 disables outliers.
    pub threshold: f32,
}

/// One rounding problem.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rounding {
    pub(super) m: u32,
    pub(super) k: u32,
    pub(super) dtype: DType,
    pub(super) threshold: f32,
    /// True to store codes, which needs k to be whole words; false to store the rounded values.
    pub(super) codes: bool,
}

/// Byte offsets of the results in a scratch buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Places {
    /// u32 `[chunks, vectors]`, one bit a column. Chunk 0 holds the merged marks in the end.
    marks: u64,
    /// u32 `[1 + k]`: the number of outlier columns, then their indices in ascending order.
    pub(super) outliers: u64,
    /// f32 `[m]`.
    pub(super) scales: u64,
    /// `[m, k]`, codes or values.
    pub(super) values: u64,
    pub(super) end: u64,
}

/// Maximum number of row chunks that are marked separately.
const CHUNKS: u32 = 16;
/// Minimum rows of a chunk.
const CHUNK: u32 = 32;
/// Units of a cube.
const UNITS: u32 = 128;

impl Rounding {
    pub(super) fn outliers(self) -> bool {
        self.threshold > 0.0
    }

    /// Vector width of x in elements.
    fn width(self) -> u32 {
        let widest = 16 / self.dtype.size() as u32;
        [8, 4, 2].into_iter().find(|w| *w <= widest && self.k % w == 0).unwrap_or(1)
    }

    fn vectors(self) -> u32 {
        self.k / self.width()
    }

    /// Rows of a chunk.
    fn chunk(self) -> u32 {
        self.m.div_ceil(CHUNKS).max(CHUNK)
    }

    fn chunks(self) -> u32 {
        self.m.div_ceil(self.chunk())
    }

    /// Returns the offsets of the results behind the first `from` bytes.
    pub(super) fn places(self, from: u64) -> Places {
        // Alignment of a binding that every backend accepts.
        let aligned = |bytes: u64| bytes.next_multiple_of(256);
        let marks = aligned(from);
        let of_marks = if self.outliers() { self.chunks() * self.vectors() } else { 1 };
        let outliers = aligned(marks + 4 * u64::from(of_marks));
        let of_outliers = if self.outliers() { self.k + 1 } else { 1 };
        let scales = aligned(outliers + 4 * u64::from(of_outliers));
        let values = aligned(scales + 4 * u64::from(self.m));
        let size = if self.codes { 1 } else { self.dtype.size() as u64 };
        let end = aligned(values + u64::from(self.m) * u64::from(self.k) * size);
        Places { marks, outliers, scales, values, end }
    }

    fn plan(self, arch: &ArchProfile) -> Plan {
        let (units, lanes) = match arch.cores() {
            Some(cores) => (cores, 1),
            None => (UNITS, UNITS),
        };
        Plan {
            rows: RowPlan::new(arch, units, lanes),
            outliers: self.outliers(),
            codes: self.codes,
            by_hand: by_hand(arch, self.dtype),
        }
    }

    /// Units of the single cube that lists outliers.
    fn listing(arch: &ArchProfile) -> u32 {
        if arch.cores().is_some() { 1 } else { 256 }
    }

    fn address(self) -> AddressType {
        let len = u64::from(self.m) * u64::from(self.k);
        index_width(len)
    }

    fn types(self) -> [ElemType; 2] {
        let out = if self.codes { ElemType::Int(IntKind::I8) } else { elem(self.dtype) };
        [elem(self.dtype), out]
    }

    /// Rounds `x` and writes the results to `scratch` at `places`.
    pub(super) fn launch(self, queue: &Queue, x: &Handle, scratch: &Handle, places: &Places) {
        let arch = queue.profile();
        let plan = self.plan(arch);
        let (width, vectors) = (self.width() as usize, self.vectors());
        let len = self.m as usize * vectors as usize;
        let (chunk, chunks) = (self.chunk(), self.chunks());
        let at = |bytes: u64| scratch.clone().offset_start(bytes);
        let units = plan.rows.units;
        let cubes =
            |parts: u64, each: u32| CubeCount::Static(crate::cubes(arch, parts, each), 1, 1);
        let marked = if self.outliers() { (chunks * vectors) as usize } else { 1 };
        // SAFETY: `scratch` holds all of `places`, and the kernels check their indices.
        unsafe {
            if self.outliers() {
                launch!(
                    queue,
                    mark_columns,
                    cubes(marked as u64, units),
                    CubeDim::new_1d(units),
                    self.address(),
                    width,
                    BufferArg::from_raw_parts(x.clone(), len),
                    BufferArg::from_raw_parts(at(places.marks), marked),
                    self.m,
                    vectors,
                    chunk,
                    self.threshold,
                    elem(self.dtype),
                );
                let units = Self::listing(arch);
                launch!(
                    queue,
                    list_columns,
                    CubeCount::Static(1, 1, 1),
                    CubeDim::new_1d(units),
                    self.address(),
                    BufferArg::from_raw_parts(at(places.marks), marked),
                    BufferArg::from_raw_parts(at(places.outliers), self.k as usize + 1),
                    chunks,
                    vectors,
                    width as u32,
                    units,
                );
            }
            launch!(
                queue,
                round_rows,
                cubes(u64::from(self.m), plan.rows.rows()),
                CubeDim::new_1d(units),
                self.address(),
                width,
                BufferArg::from_raw_parts(x.clone(), len),
                BufferArg::from_raw_parts(at(places.marks), marked),
                BufferArg::from_raw_parts(at(places.scales), self.m as usize),
                BufferArg::from_raw_parts(at(places.values), len),
                self.m,
                vectors,
                plan,
                self.types(),
            );
        }
    }
}

/// Compile-time parameters of a rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    rows: RowPlan,
    outliers: bool,
    codes: bool,
    by_hand: bool,
}

/// Marks the outlier columns in each chunk of rows.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn mark_columns<F: Float, N: Size>(
    x: &[Vector<F, N>],
    marks: &mut [u32],
    rows: u32,
    vectors: u32,
    chunk: u32,
    threshold: f32,
    #[define(F)] _dtype: ElemType,
) {
    let mut at = CUBE_POS_X * CUBE_DIM + UNIT_POS;
    while at < marks.len() as u32 {
        let first = at / vectors * chunk;
        let end = min(first + chunk, rows);
        let mut found = 0u32;
        let mut row = first;
        while row < end {
            let vector = x[row as usize * vectors as usize + (at % vectors) as usize];
            #[unroll]
            for e in 0..N::value() {
                let outlies = magnitude(f32::cast_from(vector.extract(e))) >= threshold;
                found |= select(outlies, comptime!(1u32 << e as u32).runtime(), 0u32);
            }
            row += 1;
        }
        marks[at as usize] = found;
        at += CUBE_COUNT_X * CUBE_DIM;
    }
}

/// Merges the marks of all chunks into the first chunk's, and lists the columns. Each unit handles a range of
/// vectors.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn list_columns(
    marks: &mut [u32],
    outliers: &mut [u32],
    chunks: u32,
    vectors: u32,
    width: u32,
    #[comptime] units: u32,
) {
    let each = vectors.div_ceil(units);
    let first = min(UNIT_POS * each, vectors);
    let end = min(first + each, vectors);
    let mut own = 0u32;
    let mut at = u32::cast_from(first);
    while at < end {
        let mut found = 0u32;
        let mut chunk = 0u32;
        while chunk < chunks {
            found |= marks[(chunk * vectors + at) as usize];
            chunk += 1;
        }
        marks[at as usize] = found;
        own += found.count_ones();
        at += 1;
    }
    let mut counts = Shared::<[u32]>::new_slice(comptime!(units as usize));
    let mut before = 0u32;
    let mut all = u32::cast_from(own);
    if comptime!(units > 1) {
        counts[UNIT_POS as usize] = own;
        sync_cube();
        before = 0u32;
        all = 0u32;
        #[unroll(false)]
        for unit in 0..units {
            let count = counts[unit as usize];
            before += select(unit < UNIT_POS, count, 0u32);
            all += count;
        }
    }
    if UNIT_POS == 0 {
        outliers[0] = all;
    }
    let mut to = before + 1;
    at = u32::cast_from(first);
    while at < end {
        let found = marks[at as usize];
        let mut e = 0u32;
        while e < width {
            if (found >> e) & 1 == 1 {
                outliers[to as usize] = at * width + e;
                to += 1;
            }
            e += 1;
        }
        at += 1;
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn round_rows<F: Float, C: Numeric, N: Size>(
    x: &[Vector<F, N>],
    marks: &[u32],
    scales: &mut [f32],
    out: &mut [Vector<C, N>],
    rows: u32,
    vectors: u32,
    #[comptime] plan: Plan,
    #[define(F, C)] _dtypes: [ElemType; 2],
) {
    let lanes = comptime!(plan.rows.lanes);
    let (group, lane) = (UNIT_POS / lanes, UNIT_POS % lanes);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.rows.shared_len()));
    let mut first = CUBE_POS_X * comptime!(plan.rows.rows());
    while first < rows {
        // A group past the end repeats the last row without storing: all units must reach the barriers.
        let inside = first + group < rows;
        let row = min(first + group, rows - 1);
        let from = row as usize * vectors as usize;
        let mut own = 0.0f32.runtime();
        for at in range_stepped(lane, vectors, lanes) {
            let vector = x[from + at as usize];
            let marked = marks_of(marks, at, plan);
            #[unroll]
            for e in 0..N::value() {
                let size = magnitude(f32::cast_from(vector.extract(e)));
                let outlies = (marked >> comptime!(e as u32)) & 1 == 1;
                own = larger(own, select(outlies, 0.0f32.runtime(), size));
            }
        }
        let largest = row_fold(own, &mut shared, Fold::Largest, plan.rows);
        // A smaller scale would have an infinite inverse.
        let none = largest < LEAST;
        let scale = select(none, 0.0f32.runtime(), largest / 127.0);
        let inverse = select(none, 0.0f32.runtime(), 127.0 / largest);
        if inside {
            if lane == 0 {
                scales[row as usize] = scale;
            }
            for at in range_stepped(lane, vectors, lanes) {
                let vector = x[from + at as usize];
                let marked = marks_of(marks, at, plan);
                let mut values = Vector::<C, N>::new(C::from_int(0));
                #[unroll]
                for e in 0..N::value() {
                    let value = f32::cast_from(vector.extract(e));
                    let outlies = (marked >> comptime!(e as u32)) & 1 == 1;
                    let code = nearest(value * inverse);
                    if comptime!(plan.codes) {
                        values.insert(e, C::cast_from(select(outlies, 0i32.runtime(), code)));
                    } else {
                        let value = select(outlies, value, f32::cast_from(code) * scale);
                        values.insert(e, C::cast_from(rounded::<F>(value, plan.by_hand)));
                    }
                }
                out[from + at as usize] = values;
            }
        }
        first += CUBE_COUNT_X * comptime!(plan.rows.rows());
    }
}

/// Returns the outlier bits of vector `at`.
#[cube]
fn marks_of(marks: &[u32], at: u32, #[comptime] plan: Plan) -> u32 {
    if comptime!(plan.outliers) { marks[at as usize] } else { 0u32.runtime() }
}
