//! The vocabulary of tensor-core kernels: asynchronous copies, swizzled tiles, fragments.
//!
//! A *plane* is CUDA's warp and Vulkan's subgroup, a *unit* a thread, a *cube* a thread block.
//! A shared tile is `[rows, cols]` with `cols` contiguous, cut into 16-byte chunks. `ldmatrix` reads
//! the same chunk column of eight rows at once; stored as they come, those eight chunks fall into
//! the same banks. XOR-ing the chunk with the row spreads them over all banks, for the copies in and
//! the reads out alike.

use cubecl::prelude::*;

/// A shared tile's geometry: comptime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TileShape {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Bytes of an element.
    pub(crate) elem: usize,
    /// Whether fragments read it across its rows (`ldmatrix.trans`, or scalar loads for 4 bytes).
    pub(crate) transposed: bool,
    /// Whether its chunks are XORed with their rows; not so where a row is read at a time.
    pub(crate) swizzled: bool,
    /// Whether units read half chunks, two neighbouring chunks of four rows at once.
    pub(crate) halved: bool,
}

impl TileShape {
    /// `[outer, k]`, or `[k, outer]` when the outer axis is the contiguous one (`transposed`).
    pub(crate) const fn new(outer: u32, k: u32, transposed: bool, elem: usize) -> Self {
        let (rows, cols) = if transposed { (k, outer) } else { (outer, k) };
        let (rows, cols) = (rows as usize, cols as usize);
        Self { rows, cols, elem, transposed, swizzled: true, halved: false }
    }

    /// Elements of a 16-byte chunk.
    pub(crate) const fn chunk(self) -> usize {
        16 / self.elem
    }

    /// Whether its fragments are read element by element.
    pub(crate) const fn gathered(self) -> bool {
        self.elem == 4 && self.transposed
    }

    pub(crate) const fn len(self) -> usize {
        self.rows * self.cols
    }

    pub(crate) const fn bytes(self) -> u32 {
        (self.len() * self.elem) as u32
    }

    /// Bytes of a row.
    pub(crate) const fn row_bytes(self) -> u32 {
        (self.cols * self.elem) as u32
    }

    /// How the chunk index depends on the row: `chunk ^ (((row >> shift) & mask) << up)`.
    const fn swizzle(self) -> (u32, u32, u32) {
        let chunks = self.cols / self.chunk();
        if !self.swizzled {
            return (0, 0, 0);
        }
        if self.gathered() {
            // Scalar reads: four rows at a time, eight neighbouring elements (two chunks) of each.
            return (0, 3, 1);
        }
        match chunks {
            1 => (0, 0, 0),
            2 => (2, 1, 0),
            4 => (1, 3, 0),
            _ if self.halved => (0, 3, 1),
            _ => (0, 7, 0),
        }
    }

    /// The way from a place in the tile to the one `rows` down and `cols` to the right: what its address
    /// is XORed with, and what is added then. Neither step may carry into the three bits of row or
    /// chunk that the swizzle mixes, and a tile must start at a multiple of 128 bytes.
    pub(crate) const fn step(self, rows: u32, cols: u32) -> (u32, u32) {
        let (shift, mask, up) = self.swizzle();
        let chunk = cols / self.chunk() as u32;
        let mixed = if self.swizzled { chunk % 8 } else { 0 };
        let twist = mixed ^ (((rows >> shift) & mask) << up);
        (twist * 16, rows * self.row_bytes() + (chunk - mixed) * 16)
    }
}

/// Offset in bytes of `(row, col)` in a swizzled tile.
#[cube]
pub(crate) fn offset_in_tile(row: u32, col: u32, #[comptime] shape: TileShape) -> u32 {
    let (chunk, elem) = comptime!((shape.chunk() as u32, shape.elem as u32));
    let (shift, mask, up) = comptime!(shape.swizzle());
    let twisted = (col / chunk) ^ (((row >> shift) & mask) << up);
    row * comptime!(shape.row_bytes()) + twisted * 16 + col % chunk * elem
}

/// Where a shared buffer starts.
#[cube]
pub(crate) fn shared_address(buffer: &mut [Vector<u32, Const<4>>]) -> u32 {
    let address: u32;
    gpu_asm!(
        "{{ .reg .u64 t; cvta.to.shared.u64 t, {p}; cvt.u32.u64 {a}, t; }}",
        a = out(_) address,
        p = mem_inout(_) buffer.as_mut_ptr(),
        options(explicit_mem)
    );
    address
}

/// Where a global buffer starts.
#[cube]
pub(crate) fn global_address<T: CubePrimitive>(buffer: &[T]) -> u64 {
    let address: u64;
    gpu_asm!(
        "cvta.to.global.u64 {a}, {p};",
        a = out(_) address,
        p = mem_in(_) buffer.as_ptr(),
        options(explicit_mem)
    );
    address
}

/// A place in a global buffer that a loop needs now and then: its address stays in registers, or is asked for at each use,
/// which is an addition more and takes no register from the products. ptxas aims at a number of cubes a processor, and where
/// a cube's own tile is narrow it spills a few bytes to get there, though there are registers, unless addresses are asked for.
/// With wide tiles asking costs 2 to 14%.
#[derive(CubeType)]
pub(crate) struct Start {
    /// From the start of the buffer unless it is held.
    at: u64,
    #[cube(comptime)]
    held: bool,
}

#[cube]
impl Start {
    /// `bytes` past the start of `buffer`.
    pub(crate) fn new<T: CubePrimitive>(buffer: &[T], bytes: u64, #[comptime] held: bool) -> Start {
        let at = if comptime!(held) { global_address(buffer) + bytes } else { bytes };
        Start { at, held }
    }

    /// The address of that place in `buffer`, which is the one that it was made of.
    pub(crate) fn address<T: CubePrimitive>(&self, buffer: &[T]) -> u64 {
        if comptime!(self.held) { self.at } else { global_address(buffer) + self.at }
    }
}

/// Where a global buffer that is written starts.
#[cube]
pub(crate) fn global_address_mut<E: Numeric, N: Size>(buffer: &mut [Vector<E, N>]) -> u64 {
    let address: u64;
    gpu_asm!(
        "cvta.to.global.u64 {a}, {p};",
        a = out(_) address,
        p = mem_inout(_) buffer.as_mut_ptr(),
        options(explicit_mem)
    );
    address
}

/// The stage after the one at `at`, of a ring that lies from `start` to `end`.
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

/// Waits until at most `pending` groups of copies are under way.
#[cube]
pub(crate) fn wait_copies(#[comptime] pending: u32) {
    gpu_asm!(
        "cp.async.wait_group {pending};",
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// A unit's share of the copies into a tile, the same for every tile. Where the copies of one unit lie
/// below each other (`even`), they differ by constants.
#[derive(CubeType)]
pub(crate) struct CopyLane {
    unit: u32,
    row: u32,
    col: u32,
    /// Where its first vector goes, from the tile's start.
    to: u32,
}

/// How a tile is copied: vectors of `width` elements by `units` units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CopyPlan {
    pub(crate) shape: TileShape,
    pub(crate) width: usize,
    pub(crate) units: usize,
    /// Nothing is past the edge.
    pub(crate) exact: bool,
}

impl CopyPlan {
    /// A vector of `words` words of each unit of a plane, nowhere past the edge.
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

    /// Whether copies of one unit differ by constants: whole periods of the swizzle apart, or, in a
    /// single plane, parts of one, whose place the swizzle turns by a constant.
    const fn even(self) -> bool {
        let whole = self.pass() % 8 == 0 || !self.shape.swizzled;
        let part = self.units == 32 && self.pass().is_power_of_two();
        self.units % self.per_row() == 0 && (whole || part)
    }

    /// What the swizzle turns in the place `down` rows below a unit's first: an XOR of bytes.
    const fn turn(self, down: u32) -> u32 {
        let (shift, mask, up) = self.shape.swizzle();
        (((down >> shift) & mask) << up) * 16
    }

    /// Whether every unit has the same number of copies.
    pub(crate) const fn divides(self) -> bool {
        self.shape.len() / self.width % self.units == 0
    }

    const fn copies(self) -> usize {
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

    /// How far from a tile's corner this unit starts in a matrix whose lines are `line` bytes apart.
    pub(crate) fn start(&self, line: u64, #[comptime] plan: CopyPlan) -> u64 {
        if comptime!(plan.even()) {
            u64::cast_from(self.row) * line
                + u64::cast_from(self.col * comptime!(plan.shape.elem as u32))
        } else {
            0u64.runtime()
        }
    }

    /// Fills the tile at shared address `to` from the matrix at `from`, which is the tile's corner plus
    /// [`CopyLane::start`] and whose lines are `line` bytes apart. Rows past `rows_left` and columns
    /// past `cols_left` become zero.
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
                let far = comptime!(down * plan.shape.row_bytes());
                // The turn stays within the 128 bytes that tiles are aligned to.
                let turn = comptime!(plan.turn(down));
                let to = if comptime!(turn == 0) { to + self.to } else { (to + self.to) ^ turn };
                copy_vector(from + comptime!(down as u64) * line, to, far, inside, plan);
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
}

/// Copies one vector to `to + far`, or writes zero when `inside` is false.
#[cube]
pub(crate) fn copy_vector(
    from: u64,
    to: u32,
    #[comptime] far: u32,
    inside: bool,
    #[comptime] plan: CopyPlan,
) {
    let bytes = comptime!(plan.vector_bytes());
    // 16 bytes pass the first-level cache by; smaller copies must go through it.
    let level = comptime!(if bytes == 16 { "cg" } else { "ca" });
    if comptime!(bytes < 4) {
        // cp.async moves 4, 8 or 16 bytes: single half-precision elements go through a register.
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

/// The two bytes at `from`.
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

/// The 16 bytes at `at + far`.
#[cube]
pub(crate) fn load_chunk(at: u32, #[comptime] far: u32) -> Vector<f32, Const<4>> {
    let chunk: Vector<f32, Const<4>>;
    gpu_asm!(
        "ld.shared.v4.f32 {chunk}, [{at}+{far}];",
        chunk = out(_) chunk,
        at = in(_) at,
        options(explicit_mem, reads_address_space shared)
    );
    chunk
}

/// The four words at `at + far`.
#[cube]
pub(crate) fn load_words(at: u32, #[comptime] far: u32) -> Vector<u32, Const<4>> {
    let words: Vector<u32, Const<4>>;
    gpu_asm!(
        "ld.shared.v4.b32 {words}, [{at}+{far}];",
        words = out(_) words,
        at = in(_) at,
        options(explicit_mem, reads_address_space shared)
    );
    words
}

/// Where a unit's `ldmatrix` row of the left operand starts, from the tile's start: the fragment at row
/// `row` and k = 0 of a `[m, k]` tile, or of a `[k, m]` tile when it is transposed. Fragments a multiple
/// of eight rows of the tile further on are at a constant distance; along the tile's columns, the
/// swizzle makes the distance an XOR with the bytes between.
#[cube]
pub(crate) fn lhs_lane(row: u32, lane: u32, #[comptime] shape: TileShape) -> u32 {
    let chunk = comptime!(shape.chunk() as u32);
    let (r, j) = (lane % 8, lane / 8);
    if comptime!(shape.transposed) {
        offset_in_tile(r + (j / 2) * 8, row + (j % 2) * chunk, shape)
    } else {
        offset_in_tile(row + r + (j % 2) * 8, (j / 2) * chunk, shape)
    }
}

/// As [`lhs_lane`] for two neighbouring 8-column fragments of the right operand at column `col` of a
/// `[k, n]` tile (`transposed`), or of an `[n, k]` tile.
#[cube]
pub(crate) fn rhs_lane(col: u32, lane: u32, #[comptime] shape: TileShape) -> u32 {
    let chunk = comptime!(shape.chunk() as u32);
    let (r, j) = (lane % 8, lane / 8);
    if comptime!(shape.transposed) {
        offset_in_tile(r + (j % 2) * 8, col + (j / 2) * 8, shape)
    } else {
        offset_in_tile(col + r + (j / 2) * 8, (j % 2) * chunk, shape)
    }
}

/// Where a unit's elements of a transposed 4-byte tile lie, which `ldmatrix` cannot turn: those of
/// `(lane % 4, outer + lane / 4)`. Rows a multiple of four and columns a multiple of 32 further on are
/// at constant distances.
#[cube]
pub(crate) fn gather_lane(outer: u32, lane: u32, #[comptime] shape: TileShape) -> u32 {
    offset_in_tile(lane % 4, outer + lane / 4, shape)
}

/// The four registers that `ldmatrix` brings from the rows at `at + far`, `at` being the stage plus
/// [`lhs_lane`] or [`rhs_lane`]: one 16-row fragment of the left operand, or two neighbouring 8-column
/// fragments of the right one.
#[cube]
pub(crate) fn load_fragments<I: Float>(
    at: u32,
    into: &mut Array<u32>,
    #[comptime] far: u32,
    #[comptime] shape: TileShape,
    #[comptime] rounds_tf32: bool,
) {
    let turned = comptime!(if shape.transposed { ".trans" } else { "" });
    let words: Vector<u32, Const<4>>;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 {words}, [{at}+{far}];",
        words = out(_) words,
        at = in(_) at,
        options(explicit_mem, reads_address_space shared)
    );
    #[unroll]
    for i in 0..4usize {
        into[i] = to_instruction::<I>(words.extract(i), shape, rounds_tf32);
    }
}

/// [`load_fragments`] for transposed 4-byte tiles, element by element: the fragment at `(k, outer)` of
/// the tile at `tile`, whose register `r` is `registers[r]` = (outer, k) further on. `lanes` are the
/// [`gather_lane`]s of the first columns, eight apart.
#[cube]
pub(crate) fn gather_fragments<I: Float>(
    tile: u32,
    lanes: &Sequence<u32>,
    into: &mut Array<u32>,
    #[comptime] at: (u32, u32),
    #[comptime] shape: TileShape,
    #[comptime] registers: [(u32, u32); 4],
    #[comptime] rounds_tf32: bool,
) {
    #[unroll]
    for r in 0..4usize {
        let (outer, k) = comptime!((at.0 + registers[r].0, at.1 + registers[r].1));
        let far = comptime!(k * shape.row_bytes() + outer / 32 * 128);
        let lane = *lanes.index(comptime!((outer / 8 % 4) as usize));
        let word: u32;
        gpu_asm!(
            "ld.shared.b32 {word}, [{at}+{far}];",
            word = out(_) word,
            at = in(_) tile + lane,
            options(explicit_mem, reads_address_space shared)
        );
        into[r] = to_instruction::<I>(word, shape, rounds_tf32);
    }
}

/// Returns the offset of a unit's half chunks in a tile: four neighbours along k, of row `row + lane / 4`. Rows a
/// multiple of eight further on are at constant distances, chunks an even number further on an XOR away.
#[cube]
pub(crate) fn half_chunk_lane(row: u32, lane: u32, #[comptime] shape: TileShape) -> u32 {
    offset_in_tile(row + lane / 4, lane % 4 * 4, shape)
}

/// Loads the registers of a 16 x 16 left fragment, in the order of k that packed values have: those of the rows at
/// `at + far`, `at` being the stage plus [`half_chunk_lane`], and of the ones eight below.
#[cube]
pub(crate) fn load_half_chunks(
    at: u32,
    into: &mut Array<u32>,
    #[comptime] far: u32,
    #[comptime] shape: TileShape,
) {
    #[unroll]
    for half in 0..2usize {
        let far = comptime!(far + 8 * half as u32 * shape.row_bytes());
        let words: Vector<u32, Const<2>>;
        gpu_asm!(
            "ld.shared.v2.b32 {words}, [{at}+{far}];",
            words = out(_) words,
            at = in(_) at,
            options(explicit_mem, reads_address_space shared)
        );
        into[half] = words.extract(0usize);
        into[comptime!(half + 2)] = words.extract(1usize);
    }
}

/// A register as the instruction takes it: f32 rounded to tf32, to nearest even by one instruction
/// where `rounds_tf32`; halves and bytes as they are.
#[cube]
fn to_instruction<I: Float>(
    word: u32,
    #[comptime] shape: TileShape,
    #[comptime] rounds_tf32: bool,
) -> u32 {
    if comptime!(shape.elem < 4) {
        word
    } else if comptime!(rounds_tf32) {
        let rounded: u32;
        gpu_asm!(
            "{{ .reg .f32 f; mov.b32 f, {x}; cvt.rn.tf32.f32 {y}, f; }}",
            y = out(_) rounded,
            x = in(_) u32::cast_from(word),
            options(pure, nomem)
        );
        rounded
    } else {
        u32::reinterpret(I::cast_from(f32::reinterpret(word)))
    }
}

/// Where the registers of a 16 x 8 left fragment lie: (row, k).
pub(crate) const LHS_REGISTERS: [(u32, u32); 4] = [(0, 0), (8, 0), (0, 4), (8, 4)];
/// Where the registers of two 8 x 8 right fragments lie: (column, k).
pub(crate) const RHS_REGISTERS: [(u32, u32); 4] = [(0, 0), (0, 4), (8, 0), (8, 4)];

/// Transposes the 4 x 4 words of four neighbouring units: unit `q` of a quad gives word `j` to unit
/// `j` and has theirs in order of unit. Its own inverse.
#[cube]
pub(crate) fn quad_transpose(words: &mut Array<u32>, lane: u32) {
    let odd = lane % 2 == 1;
    #[unroll]
    for j in [0usize, 2] {
        let (even_word, odd_word) = (words[j], words[comptime!(j + 1)]);
        let got = plane_shuffle_xor(select(odd, even_word, odd_word), 1);
        words[j] = select(odd, got, even_word);
        words[comptime!(j + 1)] = select(odd, odd_word, got);
    }
    let high = lane % 4 >= 2;
    #[unroll]
    for j in 0..2usize {
        let (low_word, high_word) = (words[j], words[comptime!(j + 2)]);
        let got = plane_shuffle_xor(select(high, low_word, high_word), 2);
        words[j] = select(high, got, low_word);
        words[comptime!(j + 2)] = select(high, high_word, got);
    }
}

/// Swaps rows and columns of the 8 x 8 halves that a plane holds, unit `4·row + column / 2` the pair at
/// an even column.
#[cube]
pub(crate) fn transpose_halves(pair: u32) -> u32 {
    let turned: u32;
    gpu_asm!(
        "movmatrix.sync.aligned.m8n8.trans.b16 {turned}, {pair};",
        turned = out(_) turned,
        pair = in(_) u32::cast_from(pair),
        options(nomem)
    );
    turned
}

/// The word at global address `from + far`.
#[cube]
pub(crate) fn load_word(from: u64, #[comptime] far: u32) -> u32 {
    let word: u32;
    gpu_asm!(
        "ld.global.b32 {word}, [{from}+{far}];",
        word = out(_) word,
        from = in(_) u64::cast_from(from),
        options(explicit_mem, reads_address_space global)
    );
    word
}

/// The two numbers at global address `from`.
#[cube]
pub(crate) fn load_pair(from: u64) -> Vector<f32, Const<2>> {
    let pair: Vector<f32, Const<2>>;
    gpu_asm!(
        "ld.global.v2.f32 {pair}, [{from}];",
        pair = out(_) pair,
        from = in(_) u64::cast_from(from),
        options(explicit_mem, reads_address_space global)
    );
    pair
}

/// Stores two numbers at global address `to`.
#[cube]
pub(crate) fn store_pair(to: u64, first: f32, second: f32) {
    gpu_asm!(
        "st.global.v2.f32 [{to}], {{{first}, {second}}};",
        to = in(_) u64::cast_from(to),
        first = in(_) f32::cast_from(first),
        second = in(_) f32::cast_from(second),
        options(explicit_mem, writes_address_space global)
    );
}

/// The number at shared address `at + far`.
#[cube]
pub(crate) fn load_shared(at: u32, #[comptime] far: u32) -> f32 {
    let value: f32;
    gpu_asm!(
        "ld.shared.f32 {value}, [{at}+{far}];",
        value = out(_) value,
        at = in(_) u32::cast_from(at),
        options(explicit_mem, reads_address_space shared)
    );
    value
}

/// Stores a number at shared address `at + far`.
#[cube]
pub(crate) fn store_shared(at: u32, value: f32, #[comptime] far: u32) {
    gpu_asm!(
        "st.shared.f32 [{at}+{far}], {value};",
        at = in(_) u32::cast_from(at),
        value = in(_) f32::cast_from(value),
        options(explicit_mem, writes_address_space shared)
    );
}

/// Stores a word at shared address `at`.
#[cube]
pub(crate) fn store_word(at: u32, word: u32) {
    gpu_asm!(
        "st.shared.b32 [{at}], {word};",
        at = in(_) u32::cast_from(at),
        word = in(_) u32::cast_from(word),
        options(explicit_mem, writes_address_space shared)
    );
}

/// Stores four words at shared address `at`, a multiple of 16.
#[cube]
pub(crate) fn store_words(at: u32, words: Vector<u32, Const<4>>) {
    gpu_asm!(
        "st.shared.v4.b32 [{at}], {{{a}, {b}, {c}, {d}}};",
        at = in(_) u32::cast_from(at),
        a = in(_) u32::cast_from(words.extract(0usize)),
        b = in(_) u32::cast_from(words.extract(1usize)),
        c = in(_) u32::cast_from(words.extract(2usize)),
        d = in(_) u32::cast_from(words.extract(3usize)),
        options(explicit_mem, writes_address_space shared)
    );
}

/// `a · b + c` of two pairs of bf16, each rounded once.
#[cube]
pub(crate) fn fma_pairs(a: u32, b: u32, c: u32) -> u32 {
    let pair: u32;
    gpu_asm!(
        "fma.rn.bf16x2 {pair}, {a}, {b}, {c};",
        pair = out(_) pair,
        a = in(_) u32::cast_from(a),
        b = in(_) u32::cast_from(b),
        c = in(_) u32::cast_from(c),
        options(pure, nomem)
    );
    pair
}

/// `len` words of a fragment from `from` on, as the instruction takes them.
#[cube]
pub(crate) fn typed<I: Float, NF: Size>(
    words: &Array<u32>,
    #[comptime] from: usize,
    #[comptime] len: usize,
) -> Array<Vector<I, NF>> {
    let mut out = Array::<Vector<I, NF>>::new(len);
    #[unroll]
    for i in 0..len {
        out[i] = Vector::reinterpret(words[comptime!(from + i)]);
    }
    out
}

/// `sums += left · right` in f16: a 16 x 16 fragment by the 16 x 8 one whose words begin at `from`.
#[cube]
pub(crate) fn multiply_halves(
    left: &Array<u32>,
    right: &Array<u32>,
    #[comptime] from: usize,
    sums: &mut Array<u32>,
) {
    let out: Vector<u32, Const<2>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {out}, {{{a}, {b}, {c}, {d}}}, {{{e}, {f}}}, {{{g}, {h}}};",
        out = out(_) out,
        a = in(_) u32::cast_from(left[0]),
        b = in(_) u32::cast_from(left[1]),
        c = in(_) u32::cast_from(left[2]),
        d = in(_) u32::cast_from(left[3]),
        e = in(_) u32::cast_from(right[from]),
        f = in(_) u32::cast_from(right[comptime!(from + 1)]),
        g = in(_) u32::cast_from(sums[0]),
        h = in(_) u32::cast_from(sums[1]),
        options(nomem)
    );
    sums[0] = out.extract(0usize);
    sums[1] = out.extract(1usize);
}

/// `sums += left · right` of bytes with signs: a 16 x 32 fragment by the 32 x 8 one whose words begin at `from`.
#[cube]
pub(crate) fn multiply_bytes(
    left: &Array<u32>,
    right: &Array<u32>,
    #[comptime] from: usize,
    sums: &mut Array<u32>,
) {
    let out: Vector<u32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {out}, {{{a}, {b}, {c}, {d}}}, {{{e}, {f}}}, {{{g}, {h}, {i}, {j}}};",
        out = out(_) out,
        a = in(_) u32::cast_from(left[0]),
        b = in(_) u32::cast_from(left[1]),
        c = in(_) u32::cast_from(left[2]),
        d = in(_) u32::cast_from(left[3]),
        e = in(_) u32::cast_from(right[from]),
        f = in(_) u32::cast_from(right[comptime!(from + 1)]),
        g = in(_) u32::cast_from(sums[0]),
        h = in(_) u32::cast_from(sums[1]),
        i = in(_) u32::cast_from(sums[2]),
        j = in(_) u32::cast_from(sums[3]),
        options(nomem)
    );
    #[unroll]
    for i in 0..4usize {
        sums[i] = out.extract(i);
    }
}

/// 2 to the power x, to 2 ulps; 0 below 2^-126.
#[cube]
pub(crate) fn exp2(x: f32) -> f32 {
    let y: f32;
    gpu_asm!("ex2.approx.ftz.f32 {y}, {x};", y = out(_) y, x = in(_) x, options(pure, nomem));
    y
}

/// Two numbers rounded to half precision, the first in the low half of the word.
#[cube]
pub(crate) fn pack_pair<N: Size>(pair: Vector<f32, N>, #[comptime] bf16: bool) -> u32 {
    let (low, high) = (pair.extract(0usize), pair.extract(1usize));
    let kind = comptime!(if bf16 { "bf16x2" } else { "f16x2" });
    let word: u32;
    gpu_asm!(
        "cvt.rn.{kind}.f32 {word}, {high}, {low};",
        word = out(_) word,
        high = in(_) high,
        low = in(_) low,
        options(pure, nomem)
    );
    word
}
