//! Shape of a 4-bit weight, and the two orders of its codes on a device.

use arch::Device;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};

use crate::weight::{InvalidWeight, copy_words, spread};

/// Number of blocks whose nested absmax share one scale.
pub const NESTED_BLOCK: u32 = 256;

/// Memory order of a weight's codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// Order of bitsandbytes: `[n, k]`, row-major, with element 2i in the high half of byte i. One absmax per
    /// block of consecutive elements; a block may span rows.
    Rows,
    /// Order of matrix instructions: `[n / 16, k / 64]` pieces of 16 rows by 64 of k. Unit `4·r + q` of a
    /// plane finds its 16 bytes of a piece in one load. Byte c of the first eight has elements `8c + 2q` and
    /// `8c + 2q + 1` of row r; the other eight are of row r + 8. One absmax per row and 64 of k, with those of 256
    /// of k together: `[n / 16, k / 256, 8, 2, 4]`.
    Tiles,
}

impl Order {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rows => "rows",
            Self::Tiles => "tiles",
        }
    }
}

/// A weight `[n, k]` in 4 bits an element. Each code is an index into a codebook of 16 values, which the
/// absmax of the block scales. Build it with [`Weight::new`], which checks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weight {
    pub n: u32,
    pub k: u32,
    /// Elements that share an absmax.
    pub block_size: u32,
    /// True if each absmax is a byte: an index into a codebook of 256 values. A scale and an offset of 256
    /// neighbouring blocks apply to it.
    pub nested: bool,
    pub order: Order,
}

impl Weight {
    /// Creates a weight in bitsandbytes' order.
    ///
    /// # Errors
    /// See [`InvalidWeight`].
    pub fn new(n: u32, k: u32, block_size: u32, nested: bool) -> Result<Self, InvalidWeight> {
        Self { n, k, block_size, nested, order: Order::Rows }.checked()
    }

    /// Returns the same weight in another order.
    ///
    /// # Errors
    /// [`InvalidWeight::Tiles`] if it does not divide into whole tiles.
    pub fn ordered(self, order: Order) -> Result<Self, InvalidWeight> {
        Self { order, ..self }.checked()
    }

    /// Returns the weight if it is valid.
    ///
    /// # Errors
    /// See [`InvalidWeight`].
    pub fn checked(self) -> Result<Self, InvalidWeight> {
        let Self { n, k, block_size, .. } = self;
        for (axis, size) in [("n", n), ("k", k)] {
            if size == 0 {
                return Err(InvalidWeight::Empty { axis });
            }
        }
        if !block_size.is_power_of_two() || !(32..=4096).contains(&block_size) {
            return Err(InvalidWeight::BlockSize(block_size));
        }
        // Indices of words and blocks are u32; the top bit of k must be 0.
        if self.len() > 1 << 34 || k >> 31 != 0 {
            return Err(InvalidWeight::TooLarge(self.len()));
        }
        if self.order == Order::Tiles {
            let tiles = |why| Err(InvalidWeight::Tiles { n, k, block_size, why });
            if n % 16 != 0 {
                return tiles("expected n to be a multiple of 16");
            }
            if k % 256 != 0 {
                return tiles("expected k to be a multiple of 256");
            }
            if block_size < 64 {
                return tiles("expected a block size of at least 64");
            }
        }
        Ok(self)
    }

    /// Joins weights of one k, block size and order into one, with their rows one after the other.
    ///
    /// # Errors
    /// [`InvalidWeight::Join`] if these differ, or if a block or a nested group would span two weights; the
    /// errors of [`Weight::checked`].
    pub fn joined(parts: &[Self]) -> Result<Self, InvalidWeight> {
        let refused = |why| Err(InvalidWeight::Join { why });
        let Some((last, rest)) = parts.split_last() else { return refused("got no weights") };
        if !rest.iter().all(|part| Self { n: last.n, ..*part } == *last) {
            return refused("their k, block sizes or layouts differ");
        }
        if !rest.iter().all(Self::ends_whole) {
            return refused("a block or a nested group would hold elements of two weights");
        }
        let n = rest.iter().try_fold(last.n, |n, part| n.checked_add(part.n));
        let Some(n) = n else { return refused("the total number of rows exceeds u32") };
        Self { n, ..*last }.checked()
    }

    /// Number of elements.
    pub const fn len(&self) -> u64 {
        self.n as u64 * self.k as u64
    }

    /// Always false, because [`Weight::checked`] rejects empty weights.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of blocks, each with one absmax.
    pub const fn blocks(&self) -> u64 {
        self.len().div_ceil(self.block_size as u64)
    }

    /// Number of 4-byte words of codes.
    pub const fn words(&self) -> u64 {
        self.len().div_ceil(8)
    }

    /// Number of elements of the absmax buffer.
    pub const fn absmax_len(&self) -> u64 {
        match self.order {
            Order::Rows => self.blocks(),
            Order::Tiles => self.len() / 64,
        }
    }

    /// Bytes of the absmax buffer, padded to whole words.
    pub const fn absmax_bytes(&self) -> u64 {
        let each = if self.nested { 1 } else { 4 };
        (self.absmax_len() * each).next_multiple_of(4)
    }

    /// Number of scales of nested absmax.
    pub const fn groups(&self) -> u64 {
        self.blocks().div_ceil(NESTED_BLOCK as u64)
    }

    /// Number of words of codes, absmax and scales.
    const fn lens(&self) -> [usize; 3] {
        let scales = if self.nested { 2 * self.groups() as usize } else { 0 };
        [self.words() as usize, self.absmax_bytes() as usize / 4, scales]
    }

    /// Returns whether an appended weight would begin with a block and a nested group of its own.
    fn ends_whole(&self) -> bool {
        let together = if self.nested { NESTED_BLOCK } else { 1 } * self.block_size;
        self.len() % u64::from(together) == 0
    }

    /// Total bytes of all buffers.
    pub const fn bytes(&self) -> u64 {
        let nested = if self.nested { 256 * 4 + self.groups() * 8 } else { 0 };
        self.words() * 4 + self.absmax_bytes() + 16 * 4 + nested
    }
}

/// Device buffers of a weight.
#[derive(Debug, Clone)]
pub struct WeightBuffers {
    /// Words of eight codes.
    pub codes: Handle,
    /// f32, or u8 if nested; padded to whole words.
    pub absmax: Handle,
    /// f32 `[16]`, the value of each code.
    pub codebook: Handle,
    /// Present if absmax is nested.
    pub nested: Option<NestedBuffers>,
}

impl WeightBuffers {
    /// Takes buffers in the order of [`quantized`](crate::quantized).
    pub(crate) fn from_handles(handles: &[Handle]) -> Self {
        let [codes, absmax, codebook, nested @ ..] = handles else {
            unreachable!("a 4-bit weight has codes, absmax and a codebook")
        };
        let nested = match nested {
            [codebook, scales] => {
                Some(NestedBuffers { codebook: codebook.clone(), scales: scales.clone() })
            }
            _ => None,
        };
        Self { codes: codes.clone(), absmax: absmax.clone(), codebook: codebook.clone(), nested }
    }

    /// Returns the buffers in the order of [`WeightBuffers::from_handles`].
    pub(crate) fn into_handles(self) -> Vec<Handle> {
        let nested = self.nested.into_iter().flat_map(|nested| [nested.codebook, nested.scales]);
        [self.codes, self.absmax, self.codebook].into_iter().chain(nested).collect()
    }

    /// Allocates buffers for another weight with the same codebooks, without filling them.
    fn empty_like(&self, device: &Device, weight: &Weight) -> Self {
        let client = device.client();
        Self {
            codes: client.empty(weight.words() as usize * 4),
            absmax: client.empty(weight.absmax_bytes() as usize),
            codebook: self.codebook.clone(),
            nested: self.nested.as_ref().map(|nested| NestedBuffers {
                codebook: nested.codebook.clone(),
                scales: client.empty(weight.groups() as usize * 8),
            }),
        }
    }

    /// Returns codes, absmax and, if nested, scales, with their lengths in words.
    fn pieces(&self, weight: &Weight) -> Vec<(&Handle, usize)> {
        let scales = self.nested.as_ref().map(|nested| &nested.scales);
        let handles = [Some(&self.codes), Some(&self.absmax), scales];
        handles.into_iter().flatten().zip(weight.lens()).collect()
    }
}

/// Buffers that dequantise nested absmax.
#[derive(Debug, Clone)]
pub struct NestedBuffers {
    /// f32 `[256]`, the value of each byte.
    pub codebook: Handle,
    /// f32 `[groups, 2]`: scale and offset of each 256 neighbouring blocks.
    pub scales: Handle,
}

/// Returns the same weight in order `to`, which must be valid ([`Weight::ordered`]).
///
/// Cost: one read and one write of every byte.
pub fn reorder(device: &Device, weight: Weight, from: &WeightBuffers, to: Order) -> WeightBuffers {
    WeightBuffers {
        codes: reorder_codes(device, weight, &from.codes, to),
        absmax: reorder_absmax(device, weight, &from.absmax, to),
        ..from.clone()
    }
}

/// Returns the codes of a weight in order `to`.
pub fn reorder_codes(device: &Device, weight: Weight, from: &Handle, to: Order) -> Handle {
    if weight.order == to {
        return from.clone();
    }
    let words = weight.words() as usize;
    let made = device.client().empty(words * 4);
    let (cubes, dim) = spread(device, words);
    // SAFETY: both buffers have the words of the weight, and the kernel checks its index.
    unsafe {
        reorder_codes_kernel::launch_unchecked(
            device.client(),
            cubes,
            dim,
            BufferArg::from_raw_parts(from.clone(), words),
            BufferArg::from_raw_parts(made.clone(), words),
            weight.k,
            to == Order::Tiles,
        );
    }
    made
}

/// Returns the absmax of a weight in order `to`.
pub fn reorder_absmax(device: &Device, weight: Weight, from: &Handle, to: Order) -> Handle {
    if weight.order == to {
        return from.clone();
    }
    let ordered = Weight { order: to, ..weight };
    let (given, words) = (weight.absmax_bytes() as usize / 4, ordered.absmax_bytes() as usize / 4);
    let made = device.client().empty(words * 4);
    let (cubes, dim) = spread(device, words);
    // SAFETY: the buffers have the lengths of the weight in its two orders, and the kernel checks its index.
    unsafe {
        reorder_absmax_kernel::launch_unchecked(
            device.client(),
            cubes,
            dim,
            BufferArg::from_raw_parts(from.clone(), given),
            BufferArg::from_raw_parts(made.clone(), words),
            weight.k,
            weight.block_size,
            ordered.absmax_len() as u32,
            to == Order::Tiles,
            weight.nested,
        );
    }
    made
}

/// Joins weights of one k, block size and order into one, with their rows one after the other. Examples are
/// the projections of queries, keys and values, or a gated pair of matrices.
///
/// Cost: one read and one write of every byte.
///
/// # Errors
/// [`InvalidWeight::Join`] if they differ, or if a block or a nested group would span two weights;
/// [`InvalidWeight::Device`] if their codebooks cannot be read.
pub fn join(
    device: &Device,
    parts: &[(Weight, &WeightBuffers)],
) -> Result<(Weight, WeightBuffers), InvalidWeight> {
    let weights: Vec<Weight> = parts.iter().map(|(weight, _)| *weight).collect();
    let joined = Weight::joined(&weights)?;
    let (_, buffers) = parts[0];
    let codebooks = |b: &WeightBuffers| {
        let nested = b.nested.as_ref().map(|nested| nested.codebook.clone());
        let handles = [b.codebook.clone()].into_iter().chain(nested).collect();
        device.client().read(handles).map_err(|e| InvalidWeight::Device(format!("{e:?}")))
    };
    let wanted = codebooks(buffers)?;
    for (_, other) in &parts[1..] {
        if codebooks(other)? != wanted {
            return Err(InvalidWeight::Join { why: "their codebooks differ" });
        }
    }
    let made = buffers.empty_like(device, &joined);
    let mut row = 0;
    for (weight, buffers) in parts {
        let starts = Weight { n: row, ..joined }.lens();
        for ((from, to), start) in
            buffers.pieces(weight).into_iter().zip(made.pieces(&joined)).zip(starts)
        {
            copy_words(device, from, 0, to, start, from.1);
        }
        row += weight.n;
    }
    Ok((joined, made))
}

/// Splits a joined weight into weights of `heights` rows, the reverse of [`join`].
///
/// # Errors
/// [`InvalidWeight::Join`] if `heights` do not sum to the weight's rows, or if the parts could not be joined.
pub fn split(
    device: &Device,
    weight: Weight,
    buffers: &WeightBuffers,
    heights: &[u32],
) -> Result<Vec<(Weight, WeightBuffers)>, InvalidWeight> {
    let refused = |why| Err(InvalidWeight::Join { why });
    let all: u64 = heights.iter().map(|n| u64::from(*n)).sum();
    if all != u64::from(weight.n) {
        return refused("the requested rows do not sum to the rows of the weight");
    }
    let parts: Vec<Weight> =
        heights.iter().map(|n| Weight { n: *n, ..weight }.checked()).collect::<Result<_, _>>()?;
    if !parts[..parts.len() - 1].iter().all(Weight::ends_whole) {
        return refused("a block or a nested group holds elements of two parts");
    }
    let mut row = 0;
    let mut made = Vec::new();
    for part in parts {
        let own = buffers.empty_like(device, &part);
        let starts = Weight { n: row, ..weight }.lens();
        for ((from, to), start) in
            buffers.pieces(&weight).into_iter().zip(own.pieces(&part)).zip(starts)
        {
            copy_words(device, from, start, to, 0, to.1);
        }
        row += part.n;
        made.push((part, own));
    }
    Ok(made)
}

/// Returns the index of the word of [`Order::Tiles`] whose byte `chunk % 4` has the pair at column `8·chunk +
/// 2·q` of a row.
#[cube]
pub(crate) fn word_in_tiles(row: u32, chunk: u32, q: u32, k: u32) -> u32 {
    let (tile, half, r) = (row / 16, row / 8 % 2, row % 8);
    (tile * (k / 64) + chunk / 8) * 128 + r * 16 + q * 4 + half * 2 + chunk / 4 % 2
}

/// Returns the index of the absmax of `row` and the 64 of k at `span` in [`Order::Tiles`].
#[cube]
pub(crate) fn absmax_in_tiles(row: u32, span: u32, k: u32) -> u32 {
    let quads = k / 256;
    let (r, half) = (row % 8, row / 8 % 2);
    ((row / 16 * quads + span / 4) * 16 + r * 2 + half) * 4 + span % 4
}

#[cube(launch_unchecked)]
fn reorder_codes_kernel(from: &[u32], to: &mut [u32], k: u32, #[comptime] to_tiles: bool) {
    let mut at = ABSOLUTE_POS;
    let stride = CUBE_COUNT * CUBE_DIM as usize;
    while at < to.len() {
        let word = at as u32;
        let mut made = 0u32;
        #[unroll]
        for byte in 0..4u32 {
            let (source, which) = if comptime!(to_tiles) {
                let (i, half, q, r) = (word % 2, word / 2 % 2, word / 4 % 4, word / 16 % 8);
                let (piece, spans) = (word / 128, k / 64);
                let row = piece / spans * 16 + half * 8 + r;
                (row * (k / 8) + piece % spans * 8 + i * 4 + byte, q)
            } else {
                let (row, chunk) = (word / (k / 8), word % (k / 8));
                (word_in_tiles(row, chunk, byte.runtime(), k), chunk % 4)
            };
            made |= ((from[source as usize] >> (which * 8)) & 255) << comptime!(8 * byte);
        }
        to[at] = made;
        at += stride;
    }
}

/// Reorders absmax word by word: one f32, or four bytes.
#[cube(launch_unchecked)]
fn reorder_absmax_kernel(
    from: &[u32],
    to: &mut [u32],
    k: u32,
    block_size: u32,
    len: u32,
    #[comptime] to_tiles: bool,
    #[comptime] nested: bool,
) {
    let mut at = ABSOLUTE_POS;
    let stride = CUBE_COUNT * CUBE_DIM as usize;
    let per = comptime!(if nested { 4u32 } else { 1u32 });
    while at < to.len() {
        let mut word = 0u32;
        #[unroll]
        for e in 0..per {
            let element = at as u32 * per + e;
            if element < len {
                let source = if comptime!(to_tiles) {
                    let quads = k / 256;
                    let (span, half, r) = (element % 4, element / 4 % 2, element / 8 % 8);
                    let quad = element / 64;
                    let row = quad / quads * 16 + half * 8 + r;
                    (row * (k / 64) + quad % quads * 4 + span) / (block_size / 64)
                } else {
                    let span = element * (block_size / 64);
                    absmax_in_tiles(span / (k / 64), span % (k / 64), k)
                };
                let found = from[(source / per) as usize];
                word |= if comptime!(nested) {
                    ((found >> (source % 4 * 8)) & 255) << comptime!(e * 8)
                } else {
                    found
                };
            }
        }
        to[at] = word;
        at += stride;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_that_mean_nothing_are_refused() {
        assert_eq!(Weight::new(0, 4, 64, false), Err(InvalidWeight::Empty { axis: "n" }));
        for bad in [0, 16, 48, 8192] {
            assert_eq!(Weight::new(4, 4, bad, false), Err(InvalidWeight::BlockSize(bad)));
        }
        assert!(matches!(Weight::new(1 << 18, 1 << 17, 64, true), Err(InvalidWeight::TooLarge(_))));
        let tiles =
            |n, k, block| Weight::new(n, k, block, true).and_then(|w| w.ordered(Order::Tiles));
        assert!(tiles(16, 256, 64).is_ok());
        for (n, k, block) in [(17, 256, 64), (16, 320, 64), (16, 256, 32)] {
            assert!(
                matches!(tiles(n, k, block), Err(InvalidWeight::Tiles { .. })),
                "{n} {k} {block}"
            );
        }
    }

    #[test]
    fn a_nested_weight_takes_4_1_bits_an_element() {
        let w = Weight::new(4096, 4096, 64, true).expect("valid");
        let bits = w.bytes() as f64 * 8.0 / w.len() as f64;
        assert!((4.12..4.13).contains(&bits), "{bits}");
        let tiles = w.ordered(Order::Tiles).expect("whole tiles");
        assert_eq!(tiles.bytes(), w.bytes());
        // Tiles have an absmax for every 64 elements, even if blocks are larger.
        let wide = Weight::new(32, 512, 128, false).and_then(|w| w.ordered(Order::Tiles));
        let wide = wide.expect("whole tiles");
        assert_eq!((wide.blocks(), wide.absmax_len()), (128, 256));
    }
}
