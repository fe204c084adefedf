//! The kernel: normalises heads, rotates them and writes them to their destinations.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::RopePlan;
use super::head::{Dims, Head};
use crate::norm::NormKind;
use crate::round::{LEAST, nearest, rounded};
use crate::rows::{Fold, RowScale, larger, magnitude, norm_weight, row_fold, row_scale};

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "operands, results, what they are")]
pub(super) fn rotate_heads<F: Float, C: Numeric, N: Size>(
    qkv: &[Vector<F, N>],      // [tokens, heads + 2 · kv_heads, head]
    start: &[u32],             // [batch]
    pages: &[u32],             // [batch, max_blocks], for a paged cache
    table: &[Vector<f32, N>],  // [positions, 2, half], strided rows
    q_weight: &[Vector<F, N>], // [head]
    k_weight: &[Vector<F, N>], // [head]
    q: &mut [Vector<F, N>],    // [tokens, heads, head]
    k: &mut [Vector<C, N>],    // [batch, kv_heads, capacity, head] or paged, strided positions
    v: &mut [Vector<C, N>],    // as k
    k_scales: &mut [f32],      // [batch, kv_heads, capacity] or paged, for a cache in i8
    v_scales: &mut [f32],      // as k_scales
    dims: Dims,
    #[comptime] plan: RopePlan,
    #[define(F, C)] _dtypes: [ElemType; 2],
) {
    let lanes = comptime!(plan.rows.lanes);
    let (group, lane) = (UNIT_POS / lanes, UNIT_POS % lanes);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.rows.shared_len()));
    let mut first = CUBE_POS_X * comptime!(plan.rows.rows());
    while first < dims.groups {
        // A group past the end repeats the last head without storing: all units must reach the barriers.
        let inside = first + group < dims.groups;
        let head = Head::new(min(first + group, dims.groups - 1), start, pages, &dims, plan);
        let scale = if comptime!(plan.norm.is_some()) {
            let kind = comptime!(plan.norm.unwrap_or(NormKind::Rms));
            row_scale(
                qkv,
                head.from,
                comptime!(plan.head).runtime(),
                dims.eps,
                &mut shared,
                kind,
                plan.rows,
            )
        } else {
            RowScale { mean: 0.0f32.runtime(), factor: 1.0f32.runtime() }
        };
        let mut inverse = 0.0f32.runtime();
        if comptime!(plan.items() <= lanes) {
            let item = min(lane, comptime!(plan.items() - 1));
            let pair = Pair::new(qkv, q_weight, k_weight, table, item, &head, &scale, plan);
            if comptime!(plan.bytes) {
                let largest = row_fold(pair.largest::<N>(), &mut shared, Fold::Largest, plan.rows);
                inverse = scale_cells(largest, k_scales, v_scales, &head, inside && lane == 0);
            }
            if inside && lane < comptime!(plan.items()) && (head.within || head.query) {
                pair.store(q, k, v, &head, inverse, plan);
            }
        } else {
            if comptime!(plan.bytes) {
                let mut largest = 0.0f32.runtime();
                for item in range_stepped(lane, comptime!(plan.items()), lanes) {
                    let pair = Pair::new(qkv, q_weight, k_weight, table, item, &head, &scale, plan);
                    largest = larger(largest, pair.largest::<N>());
                }
                let largest = row_fold(largest, &mut shared, Fold::Largest, plan.rows);
                inverse = scale_cells(largest, k_scales, v_scales, &head, inside && lane == 0);
            }
            if inside && (head.within || head.query) {
                for item in range_stepped(lane, comptime!(plan.items()), lanes) {
                    let pair = Pair::new(qkv, q_weight, k_weight, table, item, &head, &scale, plan);
                    pair.store(q, k, v, &head, inverse, plan);
                }
            }
        }
        first += CUBE_COUNT_X * comptime!(plan.rows.rows());
    }
}

/// Returns the inverse scale of a head whose largest magnitude is `largest`. The unit with `writes` stores
/// the scale.
#[cube]
fn scale_cells(
    largest: f32,
    k_scales: &mut [f32],
    v_scales: &mut [f32],
    head: &Head,
    writes: bool,
) -> f32 {
    // A smaller scale would have an infinite inverse.
    let none = largest < LEAST;
    if writes && head.within && !head.query {
        let scale = select(none, 0.0f32.runtime(), largest / 127.0);
        if head.key {
            k_scales[head.scale] = scale;
        } else {
            v_scales[head.scale] = scale;
        }
    }
    select(none, 0.0f32.runtime(), 127.0 / largest)
}

/// A rotated pair of vectors of a head, or one vector that is not rotated.
#[derive(CubeType)]
struct Pair {
    /// Vector `at` of the head.
    x: Array<f32>,
    /// The pair's other vector, half of the rotated dimensions further on; set if `rotates`.
    y: Array<f32>,
    at: usize,
    rotates: bool,
}

#[cube]
impl Pair {
    /// Loads item `item` of a head, out of [`RopePlan::items`].
    #[expect(clippy::too_many_arguments, reason = "operands, and which of them")]
    fn new<F: Float, N: Size>(
        qkv: &[Vector<F, N>],
        q_weight: &[Vector<F, N>],
        k_weight: &[Vector<F, N>],
        table: &[Vector<f32, N>],
        item: u32,
        head: &Head,
        scale: &RowScale,
        #[comptime] plan: RopePlan,
    ) -> Pair {
        let half = comptime!(plan.half as usize);
        // First vector of a pair, or a vector behind all pairs.
        let rotates = item < comptime!(plan.half);
        let at = select(rotates, item, item + comptime!(plan.half)) as usize;
        let mut x = load(qkv, q_weight, k_weight, at, head, scale, plan);
        let mut y = Array::<f32>::new(N::value());
        if rotates {
            y = load(qkv, q_weight, k_weight, at + half, head, scale, plan);
            if head.within && (head.query || head.key) {
                rotate(&mut x, &mut y, table, at, head, plan);
            }
        }
        Pair { x, y, at, rotates }
    }

    /// Returns the largest magnitude.
    fn largest<N: Size>(&self) -> f32 {
        let mut absmax = largest::<N>(&self.x);
        if self.rotates {
            absmax = larger(absmax, largest::<N>(&self.y));
        }
        absmax
    }

    /// Stores the vectors to the destination of their head.
    fn store<F: Float, C: Numeric, N: Size>(
        &self,
        q: &mut [Vector<F, N>],
        k: &mut [Vector<C, N>],
        v: &mut [Vector<C, N>],
        head: &Head,
        inverse: f32,
        #[comptime] plan: RopePlan,
    ) {
        if self.rotates {
            let half = comptime!(plan.half as usize);
            store(q, k, v, &self.y, self.at + half, head, inverse, plan);
        }
        store(q, k, v, &self.x, self.at, head, inverse, plan);
    }
}

/// Returns the largest magnitude in a vector.
#[cube]
fn largest<N: Size>(values: &Array<f32>) -> f32 {
    let mut absmax = 0.0f32.runtime();
    #[unroll]
    for e in 0..N::value() {
        absmax = larger(absmax, magnitude(values[e]));
    }
    absmax
}

/// Loads vector `at` of a head and applies the norm, if the head has one.
#[cube]
fn load<F: Float, N: Size>(
    qkv: &[Vector<F, N>],
    q_weight: &[Vector<F, N>],
    k_weight: &[Vector<F, N>],
    at: usize,
    head: &Head,
    scale: &RowScale,
    #[comptime] plan: RopePlan,
) -> Array<f32> {
    let width = N::value();
    let vector = qkv[head.from + at];
    let mut values = Array::<f32>::new(width);
    #[unroll]
    for e in 0..width {
        values[e] = f32::cast_from(vector.extract(e));
    }
    if comptime!(plan.norm.is_some()) {
        let kind = comptime!(plan.norm.unwrap_or(NormKind::Rms));
        if head.query || head.key {
            let mut weight = q_weight[at];
            if head.key {
                weight = k_weight[at];
            }
            #[unroll]
            for e in 0..width {
                let weight = norm_weight::<F>(weight.extract(e), kind);
                values[e] = (values[e] - scale.mean) * scale.factor * weight;
            }
        }
    }
    values
}

/// Rotates the pairs that begin with vector `at` of a head.
#[cube]
fn rotate<N: Size>(
    x: &mut Array<f32>,
    y: &mut Array<f32>,
    table: &[Vector<f32, N>],
    at: usize,
    head: &Head,
    #[comptime] plan: RopePlan,
) {
    let half = comptime!(plan.half as usize);
    let row = head.table_row + at;
    let (cos, sin) = (table[row], table[row + half]);
    #[unroll]
    for e in 0..N::value() {
        let (cos, sin) = (cos.extract(e), sin.extract(e));
        let (a, b) = (x[e], y[e]);
        x[e] = a * cos - b * sin;
        y[e] = b * cos + a * sin;
    }
}

/// Stores vector `at` of a head to its destination. A query without a position becomes NaN.
#[cube]
#[expect(clippy::too_many_arguments, reason = "results, and what goes there")]
fn store<F: Float, C: Numeric, N: Size>(
    q: &mut [Vector<F, N>],
    k: &mut [Vector<C, N>],
    v: &mut [Vector<C, N>],
    values: &Array<f32>,
    at: usize,
    head: &Head,
    inverse: f32,
    #[comptime] plan: RopePlan,
) {
    // WGSL rejects a constant NaN, so it is made from a value unknown to the compiler.
    let nan = f32::reinterpret(head.position | 0x7fc0_0000u32);
    let mut vector = Vector::<F, N>::new(F::from_int(0));
    #[unroll]
    for e in 0..N::value() {
        let value = select(head.within, values[e], nan);
        vector.insert(e, rounded::<F>(value, plan.rounds));
    }
    let to = head.to + at;
    if head.query {
        q[to] = vector;
    } else if head.key {
        k[to] = cells::<F, C, N>(vector, values, inverse, plan);
    } else {
        v[to] = cells::<F, C, N>(vector, values, inverse, plan);
    }
}

/// Converts numbers to the cache's type: rounded floats, or i8 after scaling.
#[cube]
fn cells<F: Float, C: Numeric, N: Size>(
    rounded: Vector<F, N>,
    values: &Array<f32>,
    inverse: f32,
    #[comptime] plan: RopePlan,
) -> Vector<C, N> {
    let mut cells = Vector::<C, N>::new(C::from_int(0));
    if comptime!(plan.bytes) {
        #[unroll]
        for e in 0..N::value() {
            cells.insert(e, C::cast_from(nearest(values[e] * inverse)));
        }
    } else {
        cells = Vector::cast_from(rounded);
    }
    cells
}
