//! Loads rows of x into registers through shared memory.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::{SPANS, SQUARES_BYTES, StreamPlan};
use crate::matmul::weight_pair;
use crate::nf4::matmul::Dims;
use crate::tile::{
    CopyPlan, TileShape, commit_copies, copy_vector, global_address, load_fragments, store_shared,
    store_words, typed, wait_copies,
};

/// Shared memory for eight rows of x, 512 bytes each. The first four lie in the unused halves of the table's
/// entries, the others in the space of the sums.
#[derive(CubeType)]
pub(super) struct Stage {
    pub(super) table: u32,
    pub(super) sums: u32,
    pub(super) plane: u32,
    pub(super) lane: u32,
}

#[cube]
impl Stage {
    /// Issues the copies of eight rows of x, with zeros past the end of k. Rows past the last give columns
    /// that are never stored.
    pub(super) fn copy<F: Float, NX: Size>(
        &self,
        x: &[Vector<F, NX>],
        dims: &Dims,
        own: u32,
        quads: u32,
        #[comptime] eight: usize,
    ) {
        let chunk = comptime!(CopyPlan {
            shape: TileShape::new(8, 256, false, 2),
            width: 8,
            units: 32,
            exact: false,
        });
        let first = global_address(x) + u64::cast_from(own * 512 + self.lane * 16);
        #[unroll]
        for i in 0..8u32 {
            let row = comptime!(8 * eight as u32) + i;
            let inside = own < quads;
            let from = first + u64::cast_from(row as usize * dims.k as usize) * 2;
            // XORed with the row, so that the same chunk of eight rows lies in eight positions.
            let swizzled = (self.lane % 8) ^ i;
            let to = if comptime!(i < 4) {
                let line = self.plane * 16 + comptime!(i * 4) + self.lane / 8;
                self.table + line * 256 + 128 + swizzled * 16
            } else {
                let line = self.plane * 16 + comptime!((i - 4) * 4) + self.lane / 8;
                self.sums + line * 128 + swizzled * 16
            };
            if row < dims.m {
                copy_vector(from, to, 0u32, inside, chunk);
            }
        }
        commit_copies();
    }

    /// Waits for the copies and loads their fragments.
    pub(super) fn load<F: Float>(&self, fixed: &mut Array<u32>, #[comptime] eight: usize) {
        wait_copies(0u32);
        sync_plane();
        let (r, j) = (self.lane % 8, self.lane / 8);
        let upper = r < 4;
        let line = self.plane * 16 + r % 4 * 4;
        let step = select(upper, 256u32, 128u32);
        let start = select(upper, self.table + 128, self.sums) + line * step + (j ^ r) * 16;
        #[unroll]
        for span in 0..SPANS {
            #[unroll]
            for half in 0..2usize {
                let mut words = Array::<u32>::new(4usize);
                let at = (start + step * comptime!(span as u32)) ^ comptime!(64 * half as u32);
                let shape = comptime!(TileShape::new(8, 256, false, 2));
                load_fragments::<F>(at, &mut words, 0u32, shape, false);
                #[unroll]
                for i in 0..4usize {
                    let to = comptime!(((eight * SPANS + span) * 2 + half) * 4 + i);
                    fixed[to] = words[i];
                }
            }
        }
        // The next rows use the same space.
        sync_plane();
    }

    /// Multiplies the fragments of x by the norm weight; each unit holds 16 bytes of it. Stores the sums of
    /// squares of the plane's part of each row.
    ///
    /// The sums are the diagonal of x·xᵀ: a unit's registers of the right operand are also its registers for
    /// rows 0 to 7 of the left operand.
    pub(super) fn apply_norm_weight<F: Float, NF: Size, NC: Size>(
        &self,
        fixed: &mut Array<u32>,
        norm_weights: Vector<u32, Const<4>>,
        squares: u32,
        def: &MmaDefinition<F, F, f32>,
        #[comptime] plan: StreamPlan,
    ) {
        let kind = comptime!(plan.norm.expect("rows are normalised"));
        // The weight is stored as the first of eight rows; a fragment then uses it for all rows.
        let first = self.table + 128 + self.plane * 4096;
        store_words(first + self.lane / 8 * 256 + self.lane % 8 * 16, norm_weights);
        sync_plane();
        let start = first + self.lane / 8 * 16;
        let mut norm_weight = Array::<u32>::new(comptime!(8 * SPANS));
        #[unroll]
        for span in 0..SPANS {
            #[unroll]
            for half in 0..2usize {
                let mut words = Array::<u32>::new(4usize);
                let at = (start + comptime!(256 * span as u32)) ^ comptime!(64 * half as u32);
                let shape = comptime!(TileShape::new(8, 256, false, 2));
                load_fragments::<F>(at, &mut words, 0u32, shape, false);
                #[unroll]
                for i in 0..4usize {
                    norm_weight[comptime!((span * 2 + half) * 4 + i)] = words[i];
                }
            }
        }
        #[unroll]
        for eight in 0..comptime!(plan.eights) {
            let own = comptime!(eight * SPANS * 8);
            let mut all = Vector::<f32, NC>::new(0.0f32);
            // One chain of additions for each span.
            #[unroll]
            for span in 0..SPANS {
                let mut sum = Array::<Vector<f32, NC>>::new(2usize);
                sum[0] = Vector::new(0.0f32);
                sum[1] = Vector::new(0.0f32);
                #[unroll]
                for step in 0..4usize {
                    let from = comptime!(own + span * 8 + 2 * step);
                    let mut words = Array::<u32>::new(4usize);
                    words[0] = fixed[from];
                    words[1] = 0u32.runtime();
                    words[2] = fixed[comptime!(from + 1)];
                    words[3] = 0u32.runtime();
                    let left = typed::<F, NF>(&words, 0usize, 4usize);
                    words[1] = words[2];
                    let right = typed::<F, NF>(&words, 0usize, 2usize);
                    def.execute_inplace(&left, &right, &mut sum);
                }
                all += sum[0];
            }
            // Element r of the diagonal belongs to the unit whose first column is r or r - 1.
            if self.lane % 4 == self.lane / 8 {
                let square =
                    select(self.lane / 4 % 2 == 0, all.extract(0usize), all.extract(1usize));
                let row = self.lane / 4 + comptime!(8 * eight as u32);
                store_shared(squares + self.plane * SQUARES_BYTES + row * 4, square, 0u32);
            }
            #[unroll]
            for i in 0..comptime!(8 * SPANS) {
                fixed[comptime!(own + i)] =
                    weight_pair(fixed[comptime!(own + i)], norm_weight[i], kind);
            }
        }
    }
}
