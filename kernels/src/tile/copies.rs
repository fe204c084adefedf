//! Asynchronous copies into shared tiles.

use cubecl::prelude::*;

use super::memory::global_address;
use super::{TileShape, offset_in_tile};

/// Position in a global buffer that a loop needs repeatedly. Its address is held in registers, or recomputed
/// at each use, which costs one addition and frees registers for the matmul. ptxas targets a number of cubes
/// per processor. For cubes with narrow tiles it spills a few bytes to reach that number, although registers
/// are left, unless addresses are recomputed. With wide tiles recomputing costs 2 to 14%.
#[derive(CubeType)]
pub(crate) struct Start {
    /// Absolute address if `held`, else offset from the start of the buffer.
    at: u64,
    #[cube(comptime)]
    held: bool,
}

#[cube]
impl Start {
    /// Creates the position `bytes` past the start of `buffer`.
    pub(crate) fn new<T: CubePrimitive>(buffer: &[T], bytes: u64, #[comptime] held: bool) -> Start {
        let at = if comptime!(held) { global_address(buffer) + bytes } else { bytes };
        Start { at, held }
    }

    /// Returns the address of the position. `buffer` must be the one passed to `new`.
    pub(crate) fn address<T: CubePrimitive>(&self, buffer: &[T]) -> u64 {
        if comptime!(self.held) { self.at } else { global_address(buffer) + self.at }
    }
}

/// Returns the stage after `at` in a ring from `start` to `end`.
#[cube]
pub(crate) fn next_stage(at: u32, start: u32, end: u32, #[comptime] bytes: u32) -> u32 {
    let next = at + bytes;
    select(next == end, start, next)
}

/// Closes the group of asynchronous copies issued since the last one.
#[cube]
pub(crate) fn commit_copies() {
    gpu_asm!("cp.async.commit_group;", options(nomem));
}

/// Waits until at most `pending` groups of copies are in flight.
#[cube]
pub(crate) fn wait_copies(#[comptime] pending: u32) {
    gpu_asm!(
        "cp.async.wait_group {pending};",
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// A unit's part of the copies into a tile, the same for every tile. If the copies of a unit are below each
/// other (`even`), their addresses differ by constants.
#[derive(CubeType)]
pub(crate) struct CopyLane {
    unit: u32,
    row: u32,
    col: u32,
    /// Offset of the unit's first vector from the start of the tile.
    to: u32,
}

/// Plan of the copies into a tile: vectors of `width` elements by `units` units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CopyPlan {
    pub(crate) shape: TileShape,
    pub(crate) width: usize,
    pub(crate) units: usize,
    /// True if no copy crosses an edge.
    pub(crate) exact: bool,
}

impl CopyPlan {
    /// Plan of one vector of `words` words per unit of a plane, without edges.
    pub(crate) const fn words(words: usize) -> Self {
        let shape = TileShape { swizzled: false, ..TileShape::new(1, words as u32, false, 4) };
        Self { shape, width: words, units: 32, exact: true }
    }

    const fn per_row(self) -> usize {
        self.shape.cols / self.width
    }

    /// Rows between the copies of one unit.
    const fn pass(self) -> usize {
        self.units / self.per_row()
    }

    /// Returns whether the copies of a unit differ by constants. They do if they are whole periods of the
    /// swizzle apart. In a single plane they may also be parts of a period apart, where the swizzle XORs a
    /// constant.
    const fn even(self) -> bool {
        let whole = self.pass() % 8 == 0 || !self.shape.swizzled;
        let part = self.units == 32 && self.pass().is_power_of_two();
        self.units % self.per_row() == 0 && (whole || part)
    }

    /// Returns whether all copies of a unit are in the same columns.
    pub(crate) const fn stays_in_column(self) -> bool {
        self.units % self.per_row() == 0
    }

    /// Returns the XOR of bytes that the swizzle adds `down` rows below a unit's first copy.
    const fn swizzle_xor(self, down: u32) -> u32 {
        let (shift, mask, up) = self.shape.swizzle();
        (((down >> shift) & mask) << up) * 16
    }

    /// Returns whether every unit has the same number of copies.
    pub(crate) const fn divides(self) -> bool {
        self.shape.len() / self.width % self.units == 0
    }

    pub(crate) const fn copies(self) -> usize {
        self.shape.len() / self.width / self.units
    }

    const fn vector_bytes(self) -> usize {
        self.width * self.shape.elem
    }
}

#[cube]
impl CopyLane {
    pub(crate) fn new(unit: u32, #[comptime] plan: CopyPlan) -> CopyLane {
        let per_row = comptime!(plan.per_row() as u32);
        let (row, col) = (unit / per_row, unit % per_row * comptime!(plan.width as u32));
        CopyLane { unit, row, col, to: offset_in_tile(row, col, plan.shape) }
    }

    /// Returns the offset of this unit's first copy from the corner of a tile, in a matrix with `line` bytes
    /// a line.
    pub(crate) fn start(&self, line: u64, #[comptime] plan: CopyPlan) -> u64 {
        if comptime!(plan.even()) {
            u64::cast_from(self.row) * line
                + u64::cast_from(self.col * comptime!(plan.shape.elem as u32))
        } else {
            0u64.runtime()
        }
    }

    /// Fills the tile at shared address `to` from the matrix at `from` with `line` bytes a line. `from` is
    /// the corner of the tile plus [`CopyLane::start`]. Rows past `rows_left` and columns past `cols_left`
    /// become zero.
    pub(crate) fn copy(
        &self,
        from: u64,
        line: u64,
        to: u32,
        rows_left: u32,
        cols_left: u32,
        #[comptime] plan: CopyPlan,
    ) {
        #[unroll]
        for i in 0..comptime!(plan.copies()) {
            if comptime!(plan.even()) {
                let down = comptime!((i * plan.pass()) as u32);
                let inside = self.row + down < rows_left && self.col < cols_left;
                self.copy_one(i, from + comptime!(down as u64) * line, to, inside, plan);
            } else {
                let per_row = comptime!(plan.per_row() as u32);
                let at = self.unit + comptime!((i * plan.units) as u32);
                let (row, col) = (at / per_row, at % per_row * comptime!(plan.width as u32));
                let inside = row < rows_left && col < cols_left;
                let bytes = u64::cast_from(col * comptime!(plan.shape.elem as u32));
                let from = from + u64::cast_from(row) * line + bytes;
                copy_vector(from, to + offset_in_tile(row, col, plan.shape), 0u32, inside, plan);
            }
        }
    }

    /// Returns the column of this unit's copies, and the row of the `i`th.
    pub(crate) fn place(&self, #[comptime] i: usize, #[comptime] plan: CopyPlan) -> (u32, u32) {
        (self.col, self.row + comptime!((i * plan.pass()) as u32))
    }

    /// Copies the vector at `from` to the place of this unit's `i`th copy in the tile at `to`; zeros unless it is `inside`. All
    /// copies of the unit must be in the same columns.
    pub(crate) fn copy_one(
        &self,
        #[comptime] i: usize,
        from: u64,
        to: u32,
        inside: bool,
        #[comptime] plan: CopyPlan,
    ) {
        let down = comptime!((i * plan.pass()) as u32);
        if comptime!(plan.even()) {
            let far = comptime!(down * plan.shape.row_bytes());
            // The XOR stays within 128 bytes, the alignment of tiles.
            let xor = comptime!(plan.swizzle_xor(down));
            let to = if comptime!(xor == 0) { to + self.to } else { (to + self.to) ^ xor };
            copy_vector(from, to, far, inside, plan);
        } else {
            let to = to + offset_in_tile(self.row + down, self.col, plan.shape);
            copy_vector(from, to, 0u32, inside, plan);
        }
    }
}

/// Copies one vector to `to + far`, or writes zero if `inside` is false.
#[cube]
pub(crate) fn copy_vector(
    from: u64,
    to: u32,
    #[comptime] far: u32,
    inside: bool,
    #[comptime] plan: CopyPlan,
) {
    let bytes = comptime!(plan.vector_bytes());
    // Copies of 16 bytes bypass the first-level cache; smaller ones must go through it.
    let level = comptime!(if bytes == 16 { "cg" } else { "ca" });
    if comptime!(bytes < 4) {
        // cp.async copies 4, 8 or 16 bytes: single half-precision elements go through a register.
        let mut value = 0u32;
        if inside {
            value = load_half(from);
        }
        gpu_asm!(
            "{{ .reg .b16 h; cvt.u16.u32 h, {v}; st.shared.b16 [{to}+{far}], h; }}",
            v = in(_) u32::cast_from(value),
            to = in(_) to,
            options(explicit_mem, writes_address_space shared)
        );
    } else if comptime!(plan.exact) {
        gpu_asm!(
            "cp.async.{level}.shared.global [{to}+{far}], [{from}], {bytes};",
            to = in(_) to,
            from = in(_) from,
            options(explicit_mem, reads_address_space global, writes_address_space shared)
        );
    } else {
        let valid = select(inside, comptime!(bytes as u32).runtime(), 0u32);
        gpu_asm!(
            "cp.async.{level}.shared.global [{to}+{far}], [{from}], {bytes}, {valid};",
            to = in(_) to,
            from = in(_) from,
            valid = in(_) valid,
            options(explicit_mem, reads_address_space global, writes_address_space shared)
        );
    }
}

/// Loads the two bytes at `from`.
#[cube]
fn load_half(from: u64) -> u32 {
    let value: u32;
    gpu_asm!(
        "{{ .reg .b16 h; ld.global.b16 h, [{from}]; cvt.u32.u16 {v}, h; }}",
        v = out(_) value,
        from = in(_) from,
        options(explicit_mem, reads_address_space global)
    );
    value
}
