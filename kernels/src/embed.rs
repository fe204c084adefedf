//! out[b, s] = round(round(table[token[b, s]] · scale) + learned[start[b] + s])
//!
//! ```text
//!   for each vector of each row                         // one unit
//!     x = table[token] · scale                          // f32; rounded, as in the reference models
//!     out = round(x + learned[start + s])               // only with learned positions
//! ```
//!
//! Tokens lie on the device, so that a token just sampled need not visit the host. A token past the
//! vocabulary, or a position past the learned ones, gives a row of NaN and reads nothing, so that the error
//! is visible.
//!
//! Cost: one row of the table read and one written per token; the arithmetic is negligible.

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use crate::elem::elem;
use crate::fits::{limits, stores};
use crate::launch::{index_width, launch, vector};
use crate::round::{by_hand, rounded};

/// The embedding kernel.
pub struct Embed;

/// Embedding lookup of tokens. Build it with [`EmbedProblem::new`], change fields, end with
/// [`EmbedProblem::checked`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EmbedProblem {
    pub batch: u32,
    pub seq: u32,
    pub hidden: u32,
    pub vocab: u32,
    /// Type of both tables and of the result.
    pub dtype: DType,
    /// Elements from one row of the table to the next.
    pub table_stride: u32,
    /// Number of learned positions, if the model has any; they are added.
    pub positions: Option<u32>,
    /// Elements from one learned position to the next.
    pub positions_stride: u32,
    /// Factor of the table's rows; the product is rounded.
    pub scale: f32,
}

/// An invalid embedding problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidEmbed {
    #[error("expected {axis} of at least 1, got 0\nhint: skip an empty embedding")]
    Empty { axis: &'static str },
    #[error(
        "got {seq} new positions, but the model has {positions} learned positions\nhint: pass \
         fewer tokens per call"
    )]
    Short { seq: u32, positions: u32 },
    #[error(
        "expected {what} with a stride of at least hidden, got stride {stride} for hidden \
         {hidden}\nhint: pass rows that do not overlap; gaps are allowed"
    )]
    Stride { what: &'static str, stride: u32, hidden: u32 },
    #[error("expected fewer than 2^32 tokens per launch, got {0}\nhint: split the batch")]
    TooLarge(u64),
    #[error("expected a finite scale, got {0}\nhint: pass 1 for no scaling")]
    Scale(f32),
    #[error("expected an f32, f16 or bf16 embedding table, got {0}\nhint: cast the table")]
    DType(DType),
}

impl EmbedProblem {
    /// Creates a problem with a dense table, without positions, at scale 1.
    ///
    /// # Errors
    /// See [`InvalidEmbed`].
    pub fn new(
        [batch, seq]: [u32; 2],
        [vocab, hidden]: [u32; 2],
        dtype: DType,
    ) -> Result<Self, InvalidEmbed> {
        Self {
            batch,
            seq,
            hidden,
            vocab,
            dtype,
            table_stride: hidden,
            positions: None,
            positions_stride: hidden,
            scale: 1.0,
        }
        .checked()
    }

    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidEmbed`].
    pub fn checked(self) -> Result<Self, InvalidEmbed> {
        for (axis, size) in [
            ("batch", self.batch),
            ("seq", self.seq),
            ("hidden", self.hidden),
            ("vocab", self.vocab),
            ("positions", self.positions.unwrap_or(1)),
        ] {
            if size == 0 {
                return Err(InvalidEmbed::Empty { axis });
            }
        }
        let Self { hidden, table_stride, positions_stride, .. } = self;
        for (what, stride) in [("table", table_stride), ("positions", positions_stride)] {
            if stride < hidden {
                return Err(InvalidEmbed::Stride { what, stride, hidden });
            }
        }
        let (seq, positions) = (self.seq, self.positions.unwrap_or(self.seq));
        if seq > positions {
            return Err(InvalidEmbed::Short { seq, positions });
        }
        let tokens = u64::from(self.batch) * u64::from(seq);
        if tokens > u64::from(u32::MAX) {
            return Err(InvalidEmbed::TooLarge(tokens));
        }
        if !self.scale.is_finite() {
            return Err(InvalidEmbed::Scale(self.scale));
        }
        match self.dtype {
            DType::F32 | DType::F16 | DType::Bf16 => Ok(self),
            other => Err(InvalidEmbed::DType(other)),
        }
    }

    pub const fn tokens(&self) -> u32 {
        self.batch * self.seq
    }

    /// Elements of three buffers: the table, the learned positions and the result.
    pub fn extents(&self) -> [usize; 3] {
        let hidden = self.hidden as usize;
        let rows = |rows: u32, stride: u32| (rows - 1) as usize * stride as usize + hidden;
        [
            rows(self.vocab, self.table_stride),
            self.positions.map_or(0, |positions| rows(positions, self.positions_stride)),
            self.tokens() as usize * hidden,
        ]
    }

    /// Vector width in elements: the widest load that divides rows and strides.
    fn vector(&self, arch: &ArchProfile) -> u32 {
        let sizes = [self.hidden, self.table_stride, self.positions_stride];
        vector(arch, self.dtype, |v| sizes.iter().all(|size| size % v == 0))
    }
}

/// Launch shape of an embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EmbedConfig {
    /// Units of a cube.
    pub units: u32,
}

/// Device buffers of one launch.
#[derive(Debug, Clone)]
pub struct EmbedOperands {
    /// u32 `[batch, seq]`.
    pub tokens: Handle,
    /// `[vocab, hidden]`, with the row stride of the problem.
    pub table: Handle,
    /// Learned positions, if the problem has any.
    pub learned: Option<Learned>,
    pub out: Handle,
}

/// Learned positions, and the position at which each sequence continues.
#[derive(Debug, Clone)]
pub struct Learned {
    /// `[positions, hidden]`
    pub table: Handle,
    /// u32 `[batch]`: positions that each sequence already has.
    pub start: Handle,
}

impl Kernel for Embed {
    type Problem = EmbedProblem;
    type Config = EmbedConfig;
    type Operands = EmbedOperands;

    const NAME: &'static str = "embed";
    const VERSION: u32 = 1;

    fn bucket(p: &EmbedProblem) -> String {
        let learned = if p.positions.is_some() { " learned" } else { "" };
        let tokens = p.tokens().next_power_of_two().min(4096);
        format!("{} {}{learned} tokens {tokens}", p.dtype, p.hidden)
    }

    fn candidates(arch: &ArchProfile, p: &EmbedProblem) -> Vec<EmbedConfig> {
        let cores = arch.cores().map(|cores| [cores]);
        let all = cores.as_ref().map_or(&[128, 64, 256, 512][..], |cores| &cores[..]);
        let configs = all.iter().map(|units| EmbedConfig { units: *units });
        configs.filter(|c| Self::check(arch, p, c).is_ok()).collect()
    }

    fn check(arch: &ArchProfile, p: &EmbedProblem, c: &EmbedConfig) -> Result<(), Infeasible> {
        stores(arch, [p.dtype])?;
        limits(arch, c.units, 0)
    }

    fn cost(p: &EmbedProblem) -> Cost {
        let [.., out] = p.extents();
        let tables = if p.positions.is_some() { 2 } else { 1 };
        let bytes = (1 + tables) * (out * p.dtype.size()) as u64 + 4 * u64::from(p.tokens());
        Cost { flops: tables * out as u64, bytes }
    }

    fn baseline(arch: &ArchProfile, p: &EmbedProblem) -> Result<EmbedConfig, Infeasible> {
        let units = arch.cores().unwrap_or(64);
        let config = EmbedConfig { units };
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(queue: &Queue, p: &EmbedProblem, seed: u64) -> EmbedOperands {
        let [table, learned, out] = p.extents();
        let words = |words: Vec<u32>| queue.upload(u32::as_bytes(&words));
        let noise = |len, salt| crate::noise(queue, len, p.dtype, 8 * seed + salt);
        // The rows are far apart, so that no row is the neighbour of the next.
        let token = |i: u32| i.wrapping_add(seed as u32).wrapping_mul(0x9e37_79b1) % p.vocab;
        EmbedOperands {
            tokens: words((0..p.tokens()).map(token).collect()),
            table: noise(table, 0),
            learned: p.positions.map(|positions| {
                let free = positions - p.seq + 1;
                let start = (0..p.batch).map(|b| b.wrapping_mul(977) % free).collect();
                Learned { table: noise(learned, 1), start: words(start) }
            }),
            out: queue.empty((out * p.dtype.size()).next_multiple_of(4)),
        }
    }

    fn outputs(p: &EmbedProblem, operands: &EmbedOperands) -> Vec<Output> {
        let [.., len] = p.extents();
        vec![Output { handle: operands.out.clone(), dtype: p.dtype, len, tolerance: 0.0 }]
    }

    fn launch(
        queue: &Queue,
        p: &EmbedProblem,
        c: &EmbedConfig,
        operands: &EmbedOperands,
        _scratch: Option<&Handle>,
    ) {
        let vector = p.vector(queue.profile()) as usize;
        let [table, positions, out] = p.extents().map(|len| len / vector);
        let cubes = crate::cubes(queue.profile(), out as u64, c.units);
        // Absent operands are bound to another buffer, which the kernel does not read.
        let (learned, start) = match &operands.learned {
            Some(learned) => ((&learned.table, positions), (&learned.start, p.batch as usize)),
            None => ((&operands.table, table), (&operands.tokens, 1)),
        };
        // SAFETY: the lengths follow from the problem; the kernel bounds tokens and positions before it reads
        // a table.
        unsafe {
            launch!(
                queue,
                look_up,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(c.units),
                address(p),
                vector,
                BufferArg::from_raw_parts(operands.tokens.clone(), p.tokens() as usize),
                BufferArg::from_raw_parts(operands.table.clone(), table),
                BufferArg::from_raw_parts(learned.0.clone(), learned.1),
                BufferArg::from_raw_parts(start.0.clone(), start.1),
                BufferArg::from_raw_parts(operands.out.clone(), out),
                DimsLaunch::new(
                    p.tokens(),
                    p.seq,
                    p.hidden / vector as u32,
                    p.vocab,
                    p.table_stride / vector as u32,
                    p.positions.unwrap_or(0),
                    p.positions_stride / vector as u32,
                    p.scale,
                ),
                plan(queue.profile(), p),
                elem(p.dtype),
            );
        }
    }
}

fn address(p: &EmbedProblem) -> AddressType {
    let longest = p.extents().into_iter().max().unwrap_or(0);
    index_width(longest as u64)
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct EmbedPlan {
    learned: bool,
    /// True if the kernel rounds results itself before it stores them.
    rounds: bool,
}

fn plan(arch: &ArchProfile, p: &EmbedProblem) -> EmbedPlan {
    EmbedPlan { learned: p.positions.is_some(), rounds: by_hand(arch, p.dtype) }
}

/// Sizes of one launch.
#[derive(CubeType, CubeLaunch)]
struct Dims {
    tokens: u32,
    seq: u32,
    /// Vectors of a row.
    vectors: u32,
    vocab: u32,
    /// Vectors from one row of the table to the next.
    table: u32,
    positions: u32,
    /// Vectors from one learned position to the next.
    learned: u32,
    scale: f32,
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn look_up<F: Float, N: Size>(
    tokens: &[u32],
    table: &[Vector<F, N>],   // [vocab, vectors], strided rows
    learned: &[Vector<F, N>], // [positions, vectors], strided rows
    start: &[u32],            // [batch]
    out: &mut [Vector<F, N>], // [tokens, vectors]
    dims: Dims,
    #[comptime] plan: EmbedPlan,
    #[define(F)] _dtype: ElemType,
) {
    let all = dims.tokens as usize * dims.vectors as usize;
    let mut i = ABSOLUTE_POS;
    while i < all {
        let row = (i / dims.vectors as usize) as u32;
        let at = i % dims.vectors as usize;
        let token = tokens[row as usize];
        let mut known = token < dims.vocab;
        let mut position = 0u32.runtime();
        if comptime!(plan.learned) {
            let before = start[(row / dims.seq) as usize];
            position = before + row % dims.seq;
            // A start near 2^32 wraps around.
            known = known && before < dims.positions && position < dims.positions;
        }
        // WGSL rejects a constant NaN, so it is made from a value unknown to the compiler.
        let nan = f32::reinterpret(token | 0x7fc0_0000u32);
        let mut values = Vector::<F, N>::new(rounded::<F>(nan, plan.rounds));
        if known {
            let found = table[token as usize * dims.table as usize + at];
            let mut added = Vector::<F, N>::new(F::from_int(0));
            if comptime!(plan.learned) {
                added = learned[position as usize * dims.learned as usize + at];
            }
            #[unroll]
            for e in 0..N::value() {
                let product = f32::cast_from(found.extract(e)) * dims.scale;
                let mut value = rounded::<F>(product, plan.rounds);
                if comptime!(plan.learned) {
                    let sum = f32::cast_from(value) + f32::cast_from(added.extract(e));
                    value = rounded::<F>(sum, plan.rounds);
                }
                values.insert(e, value);
            }
        }
        out[i] = values;
        i += CUBE_COUNT * CUBE_DIM as usize;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_has_candidates_that_fit() {
        for name in arch::recorded() {
            let arch = ArchProfile::recorded(name).expect("recorded");
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                let p = EmbedProblem::new([2, 3], [10, 7], dtype).expect("valid");
                let all = Embed::candidates(&arch, &p);
                assert!(!all.is_empty(), "{name} {dtype}");
                let baseline = Embed::baseline(&arch, &p).expect("there is one");
                Embed::check(&arch, &p, &baseline).expect("it is feasible");
            }
        }
    }

    #[test]
    fn what_means_nothing_is_refused() {
        let new = |tokens, table| EmbedProblem::new(tokens, table, DType::F32);
        let good = new([2, 3], [10, 8]).expect("valid");
        assert_eq!(new([2, 0], [10, 8]), Err(InvalidEmbed::Empty { axis: "seq" }));
        assert_eq!(new([2, 3], [0, 8]), Err(InvalidEmbed::Empty { axis: "vocab" }));
        assert_eq!(new([1 << 16; 2], [10, 8]), Err(InvalidEmbed::TooLarge(1 << 32)));
        let refused = |p: EmbedProblem| p.checked().expect_err("refused");
        let positions = refused(EmbedProblem { positions: Some(0), ..good });
        assert_eq!(positions, InvalidEmbed::Empty { axis: "positions" });
        let short = refused(EmbedProblem { positions: Some(2), ..good });
        assert_eq!(short, InvalidEmbed::Short { seq: 3, positions: 2 });
        let over = refused(EmbedProblem { table_stride: 7, ..good });
        assert_eq!(over, InvalidEmbed::Stride { what: "table", stride: 7, hidden: 8 });
        let scale = refused(EmbedProblem { scale: f32::INFINITY, ..good });
        assert_eq!(scale, InvalidEmbed::Scale(f32::INFINITY));
        let bytes = refused(EmbedProblem { dtype: DType::U8, ..good });
        assert_eq!(bytes, InvalidEmbed::DType(DType::U8));
    }
}
