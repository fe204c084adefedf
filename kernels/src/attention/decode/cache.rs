//! Sizes of a launch, and the device buffers of the cache: lengths, block table and scales.

use cubecl::prelude::*;

use super::DecodeOperands;
use super::problem::{CacheLayout, CacheStrides, DecodeProblem};
use crate::attention::{Steps, bound};
use crate::tile::global_address;

/// Comptime parameters of a cache. They are part of the kernel's hash: CubeCL 0.11 does not hash
/// the presence of an optional buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CachePlan {
    /// Positions per page; 0 for a contiguous cache.
    pub(crate) block: u32,
    /// True if the cache is i8 with scales.
    pub(crate) quantized: bool,
}

impl CachePlan {
    pub(super) const fn new(p: &DecodeProblem) -> Self {
        Self { block: p.layout.block_size(), quantized: p.quantized() }
    }
}

/// Sizes and strides of one launch, in elements.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Dims {
    pub(crate) batch: u32,
    pub(crate) heads: u32,
    /// Number of q heads that share a cache head.
    pub(crate) group: u32,
    pub(crate) seq_q: u32,
    /// Maximum positions of a sequence.
    pub(crate) capacity: u32,
    /// Pages of the cache, then block table entries per sequence.
    pages: u32,
    max_blocks: u32,
    /// Splits per sequence.
    pub(crate) splits: u32,
    /// Longest sequence: number of positions, first visible tile, tiles per split, and number of
    /// splits with one more tile.
    pub(crate) longest: u32,
    pub(crate) first_tile: u32,
    pub(crate) whole: u32,
    pub(crate) rest: u32,
    pub(crate) q: Steps,
    pub(crate) out: Steps,
    pub(crate) k: PageSteps,
    pub(crate) v: PageSteps,
    pub(crate) scales: PageSteps,
}

/// [`CacheStrides`] on the device.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PageSteps {
    page: usize,
    head: usize,
    pub(crate) seq: usize,
}

#[cube]
impl PageSteps {
    /// Index of the first element of row `row` of a page.
    pub(crate) fn at(&self, page: u32, head: u32, row: u32) -> usize {
        page as usize * self.page + head as usize * self.head + row as usize * self.seq
    }
}

/// Device buffers that locate positions in the cache and scale i8 values.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Cache {
    lengths: Box<[u32]>,
    table: ComptimeOption<Box<[u32]>>,
    k_scales: ComptimeOption<Box<[Vector<f32, Const<1>>]>>,
    v_scales: ComptimeOption<Box<[Vector<f32, Const<1>>]>>,
}

#[cube]
impl Cache {
    /// Positions of a sequence, clamped to the capacity.
    pub(crate) fn length(&self, dims: &Dims, batch: u32) -> u32 {
        min(self.lengths[batch as usize], dims.capacity)
    }

    /// Page and row of position `key` of a sequence.
    pub(crate) fn place(
        &self,
        dims: &Dims,
        batch: u32,
        key: u32,
        #[comptime] plan: CachePlan,
    ) -> (u32, u32) {
        let mut page = u32::cast_from(batch);
        let mut row = u32::cast_from(key);
        #[comptime]
        match &self.table {
            ComptimeOption::Some(table) => {
                let block = comptime!(plan.block);
                let entry = batch as usize * dims.max_blocks as usize + (key / block) as usize;
                page = min(table[entry], dims.pages - 1);
                row = key % block;
            }
            ComptimeOption::None => {}
        }
        (page, row)
    }

    /// Scales of k and v in row `row` of a page; 1 for a cache without scales.
    pub(crate) fn scales(&self, dims: &Dims, page: u32, head: u32, row: u32) -> (f32, f32) {
        let mut scales = (1.0f32.runtime(), 1.0f32.runtime());
        let at = dims.scales.at(page, head, row);
        #[comptime]
        match &self.k_scales {
            ComptimeOption::Some(k) => scales.0 = k[at].extract(0usize),
            ComptimeOption::None => {}
        }
        #[comptime]
        match &self.v_scales {
            ComptimeOption::Some(v) => scales.1 = v[at].extract(0usize),
            ComptimeOption::None => {}
        }
        scales
    }

    /// Returns the address of the scales of k.
    pub(crate) fn k_scales_address(&self) -> u64 {
        start_of(&self.k_scales)
    }

    /// Returns the address of the scales of v.
    pub(crate) fn v_scales_address(&self) -> u64 {
        start_of(&self.v_scales)
    }
}

/// Returns the address of a buffer; 0 if it is absent.
#[cube]
fn start_of(buffer: &ComptimeOption<Box<[Vector<f32, Const<1>>]>>) -> u64 {
    let mut address = 0u64.runtime();
    #[comptime]
    match buffer {
        ComptimeOption::Some(buffer) => address = global_address(buffer),
        ComptimeOption::None => {}
    }
    address
}

/// Bytes of `elements` elements of `size` bytes.
#[cube]
pub(crate) fn bytes(elements: usize, #[comptime] size: u32) -> u64 {
    u64::cast_from(elements) * comptime!(size as u64)
}

impl Dims {
    pub(super) fn launch_args(p: &DecodeProblem, splits: u32, tile_kv: u32) -> DimsLaunch {
        let first_tile = (p.longest - p.visible()) / tile_kv;
        let tiles = p.longest.div_ceil(tile_kv) - first_tile;
        let pages = |s: CacheStrides| {
            PageStepsLaunch::new(s.page as usize, s.head as usize, s.seq as usize)
        };
        let max_blocks = match p.layout {
            CacheLayout::Contiguous { .. } => 0,
            CacheLayout::Paged { max_blocks, .. } => max_blocks,
        };
        DimsLaunch::new(
            p.batch,
            p.heads,
            p.group(),
            p.seq_q,
            p.layout.capacity().min(u64::from(u32::MAX)) as u32,
            p.pages(),
            max_blocks,
            splits,
            p.longest,
            first_tile,
            tiles / splits,
            tiles % splits,
            Steps::launch_args(p.q, false),
            Steps::launch_args(p.out, false),
            pages(p.k),
            pages(p.v),
            pages(p.scales),
        )
    }
}

impl CacheLaunch {
    pub(super) fn from_operands(p: &DecodeProblem, operands: &DecodeOperands) -> Self {
        let scales = operands.scales.as_ref();
        let len = p.extents()[4];
        // SAFETY: the buffer holds one length per sequence.
        let lengths =
            unsafe { BufferArg::from_raw_parts(operands.lengths.clone(), p.batch as usize) };
        Self::new(
            lengths,
            bound(operands.table.as_ref().map(|table| (table, p.table_len()))),
            bound(scales.map(|s| (&s.k, len))),
            bound(scales.map(|s| (&s.v, len))),
        )
    }
}
