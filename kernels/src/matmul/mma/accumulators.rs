//! Accumulators of a plane: one type for each accumulation precision.
//!
//! A fragment is 16 x 8. A unit holds two pairs of neighbouring columns of each fragment, eight
//! rows apart.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use crate::tile::{multiply_bytes, multiply_halves, typed};

/// Two neighbouring columns of a row.
pub(crate) type Pair = Vector<f32, Const<2>>;

/// Accumulator fragments of a plane, and the instruction that adds to them.
#[cube]
pub(crate) trait Accumulators: CubeType {
    /// Allocates registers for `fragments` fragments.
    fn new(#[comptime] fragments: usize) -> Self;

    /// Sets the first `fragments` fragments to zero.
    fn clear(&mut self, #[comptime] fragments: usize);

    /// Adds `left · right` to fragment `at`; the words of the rhs fragment start at `from`.
    fn multiply<I: Float>(
        this: &mut Self,
        left: &Array<u32>,
        right: &Array<u32>,
        #[comptime] from: usize,
        #[comptime] at: usize,
        #[comptime] inst_k: u32,
    );

    /// Returns the unit's pair in rows 0 to 7 (`half` 0) or 8 to 15 of a fragment.
    fn pair(&self, #[comptime] fragment: usize, #[comptime] half: usize) -> Pair;
}

/// f32 accumulators.
#[derive(CubeType)]
pub(crate) struct F32Accumulators {
    pub(crate) fragments: Sequence<Array<Pair>>,
}

#[cube]
impl Accumulators for F32Accumulators {
    fn new(#[comptime] fragments: usize) -> F32Accumulators {
        let mut registers = Sequence::<Array<Pair>>::new();
        #[unroll]
        for _ in 0..fragments {
            registers.push(Array::<Pair>::new(2usize));
        }
        F32Accumulators { fragments: registers }
    }

    fn clear(&mut self, #[comptime] fragments: usize) {
        #[unroll]
        for i in 0..fragments {
            #[unroll]
            for half in 0..2usize {
                self.fragments.index_mut(i)[half] = Vector::new(0.0f32);
            }
        }
    }

    fn multiply<I: Float>(
        this: &mut Self,
        left: &Array<u32>,
        right: &Array<u32>,
        #[comptime] from: usize,
        #[comptime] at: usize,
        #[comptime] inst_k: u32,
    ) {
        let def = MmaDefinition::<I, I, f32>::new(16usize, 8usize, inst_k as usize);
        let size!(NF) = def.vector_size(MatrixIdent::A);
        let left = typed::<I, NF>(left, 0usize, 4usize);
        let right = typed::<I, NF>(right, from, 2usize);
        def.execute_inplace(&left, &right, this.fragments.index_mut(at));
    }

    fn pair(&self, #[comptime] fragment: usize, #[comptime] half: usize) -> Pair {
        self.fragments.index(fragment)[half]
    }
}

/// f16 accumulators, two per word.
#[derive(CubeType)]
pub(crate) struct F16Accumulators {
    fragments: Sequence<Array<u32>>,
}

#[cube]
impl Accumulators for F16Accumulators {
    fn new(#[comptime] fragments: usize) -> F16Accumulators {
        let mut registers = Sequence::<Array<u32>>::new();
        #[unroll]
        for _ in 0..fragments {
            registers.push(Array::<u32>::new(2usize));
        }
        F16Accumulators { fragments: registers }
    }

    fn clear(&mut self, #[comptime] fragments: usize) {
        #[unroll]
        for i in 0..fragments {
            #[unroll]
            for half in 0..2usize {
                self.fragments.index_mut(i)[half] = 0u32;
            }
        }
    }

    fn multiply<I: Float>(
        this: &mut Self,
        left: &Array<u32>,
        right: &Array<u32>,
        #[comptime] from: usize,
        #[comptime] at: usize,
        #[comptime] _inst_k: u32,
    ) {
        multiply_halves(left, right, from, this.fragments.index_mut(at));
    }

    fn pair(&self, #[comptime] fragment: usize, #[comptime] half: usize) -> Pair {
        let word = self.fragments.index(fragment)[half];
        Vector::cast_from(Vector::<half::f16, Const<2>>::reinterpret(word))
    }
}

/// i32 accumulators of int8 products, as words; the same words hold f32 after scaling.
#[derive(CubeType)]
pub(crate) struct I32Accumulators {
    pub(crate) fragments: Sequence<Array<u32>>,
}

#[cube]
impl Accumulators for I32Accumulators {
    fn new(#[comptime] fragments: usize) -> I32Accumulators {
        let mut registers = Sequence::<Array<u32>>::new();
        #[unroll]
        for _ in 0..fragments {
            registers.push(Array::<u32>::new(4usize));
        }
        I32Accumulators { fragments: registers }
    }

    fn clear(&mut self, #[comptime] fragments: usize) {
        #[unroll]
        for i in 0..fragments {
            #[unroll]
            for word in 0..4usize {
                self.fragments.index_mut(i)[word] = 0u32;
            }
        }
    }

    fn multiply<I: Float>(
        this: &mut Self,
        left: &Array<u32>,
        right: &Array<u32>,
        #[comptime] from: usize,
        #[comptime] at: usize,
        #[comptime] _inst_k: u32,
    ) {
        multiply_bytes(left, right, from, this.fragments.index_mut(at));
    }

    fn pair(&self, #[comptime] fragment: usize, #[comptime] half: usize) -> Pair {
        let words = self.fragments.index(fragment);
        let mut pair = Pair::new(0.0f32);
        pair.insert(0usize, f32::reinterpret(words[comptime!(2 * half)]));
        pair.insert(1usize, f32::reinterpret(words[comptime!(2 * half + 1)]));
        pair
    }
}
