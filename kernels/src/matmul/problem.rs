//! Matmul problems: sizes, layouts, precision and epilogue.

use arch::{ArchProfile, DType};
use serde::{Deserialize, Serialize};
use tune::Cost;

use super::epilogue::Epilogue;
use super::window::Window;
use crate::rows::NormKind;

/// Operand and accumulator types. Results have the storage type of the operands unless
/// [`MatmulProblem::out`] says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// f32 storage, f32 arithmetic.
    F32,
    /// f32 storage; tensor cores round the operands to 10 mantissa bits.
    Tf32,
    F16,
    Bf16,
    /// f16 storage with f16 accumulation, at twice the rate on GeForce cards. Sums past 65504
    /// become infinite; k terms lose about √k roundings to 11 bits.
    F16Acc16,
}

impl Precision {
    pub const ALL: [Self; 5] = [Self::F32, Self::Tf32, Self::F16, Self::Bf16, Self::F16Acc16];

    /// Storage type of operands and, by default, results.
    pub const fn storage(self) -> DType {
        match self {
            Self::F32 | Self::Tf32 => DType::F32,
            Self::F16 | Self::F16Acc16 => DType::F16,
            Self::Bf16 => DType::Bf16,
        }
    }

    /// Operand type of the matrix instruction; `F32` uses no matrix instruction.
    pub const fn instruction(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Tf32 => DType::Tf32,
            Self::F16 | Self::F16Acc16 => DType::F16,
            Self::Bf16 => DType::Bf16,
        }
    }

    /// Accumulator type.
    pub const fn sums(self) -> DType {
        match self {
            Self::F16Acc16 => DType::F16,
            _ => DType::F32,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::F16Acc16 => "f16acc16",
            _ => self.instruction().name(),
        }
    }
}

/// Contiguous axis of an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// Rows are contiguous: `[m, k]` or `[k, n]` as written.
    Row,
    /// Columns are contiguous: memory holds the transpose. The weight `[n, k]` of a linear layer is
    /// a `Col` rhs.
    Col,
}

impl Layout {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Row => "row",
            Self::Col => "col",
        }
    }
}

/// Layout of an operand in its buffer, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Operand {
    pub layout: Layout,
    /// Distance between rows (`Row`) or columns (`Col`).
    pub stride: u64,
    /// Index of the first element.
    pub start: u64,
}

/// Batches: `outer · inner` matmuls. Each stride is in elements per step; 0 broadcasts the operand.
/// Results are dense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Batches {
    pub outer: u32,
    pub inner: u32,
    pub lhs: (u64, u64),
    pub rhs: (u64, u64),
}

/// One matmul problem. Build it with [`MatmulProblem::dense`] or [`MatmulProblem::grouped`], which
/// check it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MatmulProblem {
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub lhs: Operand,
    pub rhs: Operand,
    pub batches: Batches,
    pub precision: Precision,
    /// Element type of the result.
    pub out: DType,
    pub epilogue: Epilogue,
    /// Each batch multiplies its own rows of one `[m, k]` matrix; see [`MatmulProblem::grouped`].
    #[serde(default)]
    pub grouped: bool,
    /// Norm applied to the rows of lhs, with a weight `[k]`; see [`super::NormWeight`].
    #[serde(default)]
    pub norm: Option<NormKind>,
    /// Rows of lhs are windows of an image, which has its batch strides alone of the lhs operand.
    #[serde(default)]
    pub window: Option<Window>,
    /// Batches are neighbouring columns of one result `[m, batch · n]`, as are the groups of a convolution.
    #[serde(default)]
    pub interleaved: bool,
    /// Rows that share a row of the bias, which is then `[m / period, n]`; 0 for one row of all.
    #[serde(default)]
    pub period: u32,
    /// Elements from one row of such a bias to the next: n, or a larger multiple of 8.
    #[serde(default)]
    pub bias_pitch: u32,
}

/// Reason why a matmul problem is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidMatmul {
    #[error("expected {axis} of at least 1, got 0\nhint: skip an empty matmul")]
    Empty { axis: &'static str },
    #[error("expected {axis} below 2^32, got {size}\nhint: use fewer images at once")]
    Large { axis: &'static str, size: u64 },
    #[error(
        "expected {operand} with a stride of at least its contiguous axis, got stride {stride} \
         for an axis of {axis} elements\nhint: pass rows that do not overlap; use batch stride 0 \
         to broadcast an operand"
    )]
    Stride { operand: &'static str, stride: u64, axis: u32 },
    #[error(
        "a grouped matmul needs contiguous rows of lhs, no batch axis in lhs and one batch axis \
         in rhs\nhint: pass lhs as [m, k] and rhs as [groups, k, n]"
    )]
    Groups,
    #[error(
        "expected rows of the bias that are n or a larger multiple of 8 elements apart, got {pitch} for n \
         {n}\nhint: copy the bias"
    )]
    BiasPitch { pitch: u32, n: u32 },
    #[error(
        "expected a 4-bit weight with even n (a multiple of 32 in tile order), got n {n}\nhint: \
         join a gate and an up matrix with the same number of rows"
    )]
    Halves { n: u32 },
}

impl MatmulProblem {
    /// Problem of `batch` matmuls with dense operands.
    ///
    /// # Errors
    /// A size is 0.
    pub fn dense(
        batch: u32,
        [m, n, k]: [u32; 3],
        [lhs, rhs]: [Layout; 2],
        precision: Precision,
    ) -> Result<Self, InvalidMatmul> {
        let pick = |layout, row, col| u64::from(if layout == Layout::Row { row } else { col });
        let operand = |layout, stride| Operand { layout, stride, start: 0 };
        Self {
            m,
            n,
            k,
            lhs: operand(lhs, pick(lhs, k, m)),
            rhs: operand(rhs, pick(rhs, n, k)),
            batches: Batches {
                outer: 1,
                inner: batch,
                lhs: (0, u64::from(m) * u64::from(k)),
                rhs: (0, u64::from(k) * u64::from(n)),
            },
            precision,
            out: precision.storage(),
            epilogue: Epilogue::default(),
            grouped: false,
            norm: None,
            window: None,
            interleaved: false,
            period: 0,
            bias_pitch: 0,
        }
        .checked()
    }

    /// Problem of a convolution with `filters` filters in `groups` groups over `images` images.
    ///
    /// # Shapes
    /// lhs: `[images, height, width, pitch]`   rhs: `[filters, rows, cols, channels]`   out: `[images, down, across, filters]`
    ///
    /// # Errors
    /// A size is 0, or the windows of all images are more than 2³².
    pub fn windows(
        images: u32,
        window: Window,
        [filters, groups]: [u32; 2],
        precision: Precision,
    ) -> Result<Self, InvalidMatmul> {
        let m = u64::from(images) * u64::from(window.output[0]) * u64::from(window.output[1]);
        let k = u64::from(window.taps[0]) * u64::from(window.taps[1]) * u64::from(window.depth());
        let narrow =
            |axis, size| u32::try_from(size).map_err(|_| InvalidMatmul::Large { axis, size });
        let sizes = [narrow("m", m)?, filters / groups.max(1), narrow("k", k)?];
        let dense = Self::dense(groups, sizes, [Layout::Row, Layout::Col], precision)?;
        let lhs = (0, u64::from(window.channels[0]));
        let batches = Batches { lhs, ..dense.batches };
        Self { batches, window: Some(window), interleaved: groups > 1, ..dense }.checked()
    }

    /// Problem of `groups` matmuls that share n and k: rows `offsets[g]` to `offsets[g + 1]` of lhs
    /// times matrix g of rhs. The offsets are a device buffer, because routing may run on the
    /// device.
    ///
    /// # Shapes
    /// offsets: u32 `[groups + 1]`, non-decreasing, at most m; rows of no group stay unwritten.
    /// lhs: `[m, k]`   rhs: `[groups, k, n]`   bias: `[groups, n]`   out, gate, residual: `[m, n]`
    ///
    /// # Errors
    /// A size is 0.
    pub fn grouped(
        groups: u32,
        [m, n, k]: [u32; 3],
        rhs: Layout,
        precision: Precision,
    ) -> Result<Self, InvalidMatmul> {
        let dense = Self::dense(groups, [m, n, k], [Layout::Row, rhs], precision)?;
        let batches = Batches { lhs: (0, 0), ..dense.batches };
        Self { batches, grouped: true, ..dense }.checked()
    }

    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidMatmul`].
    pub fn checked(self) -> Result<Self, InvalidMatmul> {
        let sizes = [
            ("m", self.m),
            ("n", self.n),
            ("k", self.k),
            ("batch", self.batches.outer.min(self.batches.inner)),
        ];
        if let Some((axis, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(InvalidMatmul::Empty { axis });
        }
        let strides =
            [("lhs", self.lhs, self.lhs_contiguous()), ("rhs", self.rhs, self.rhs_contiguous())];
        for (operand, Operand { stride, .. }, axis) in strides {
            if stride < u64::from(axis) {
                return Err(InvalidMatmul::Stride { operand, stride, axis });
            }
        }
        let Batches { outer, lhs, .. } = self.batches;
        if self.grouped && (self.lhs.layout, outer, lhs) != (Layout::Row, 1, (0, 0)) {
            return Err(InvalidMatmul::Groups);
        }
        let (n, pitch) = (self.n, self.bias_pitch);
        if self.period > 0 && pitch != n && (pitch < n || pitch % 8 != 0) {
            return Err(InvalidMatmul::BiasPitch { pitch, n });
        }
        Ok(self)
    }

    /// Number of matmuls.
    pub fn batch(&self) -> u64 {
        u64::from(self.batches.outer) * u64::from(self.batches.inner)
    }

    /// Row offsets that benchmarks of a grouped problem use. Groups have rows in proportion 1, 2,
    /// .. groups, because routing is uneven.
    pub fn uneven_rows(&self) -> Vec<u32> {
        let (m, groups) = (u128::from(self.m), u128::from(self.batch()));
        let first = |g: u128| (g * (g + 1) * m / (groups * (groups + 1))) as u32;
        (0..=groups).map(first).collect()
    }

    /// Number of `[m, n]` result matrices.
    fn results(&self) -> u64 {
        if self.grouped { 1 } else { self.batch() }
    }

    /// Number of elements of the bias.
    pub fn bias_len(&self) -> usize {
        let rows = match self.period {
            _ if self.grouped || self.interleaved => self.batch(),
            0 => 1,
            period => {
                let rows = u64::from(self.m.div_ceil(period));
                let last = rows.saturating_sub(1) * u64::from(self.bias_pitch);
                return (last + u64::from(self.n)) as usize;
            }
        };
        (rows * u64::from(self.n)) as usize
    }

    fn lhs_contiguous(&self) -> u32 {
        if self.lhs.layout == Layout::Row { self.k } else { self.m }
    }

    fn rhs_contiguous(&self) -> u32 {
        if self.rhs.layout == Layout::Row { self.n } else { self.k }
    }

    /// Returns the images of a convolution; 0 without a window.
    pub(crate) fn images(&self) -> u32 {
        self.window.map_or(0, |window| self.m / (window.output[0] * window.output[1]))
    }

    /// Minimum number of elements in the buffers of lhs, rhs and out.
    pub fn extents(&self) -> [usize; 3] {
        let Batches { outer, inner, lhs, rhs } = self.batches;
        let last = |(o, i): (u64, u64)| u64::from(outer - 1) * o + u64::from(inner - 1) * i;
        let matrix = |op: Operand, rows: u32, cols: u32| {
            let (lines, line) = if op.layout == Layout::Row { (rows, cols) } else { (cols, rows) };
            op.start + u64::from(lines - 1) * op.stride + u64::from(line)
        };
        let image = match &self.window {
            Some(window) => window.len(self.images(), 0),
            None => last(lhs) + matrix(self.lhs, self.m, self.k),
        };
        [
            image as usize,
            (last(rhs) + matrix(self.rhs, self.k, self.n)) as usize,
            (self.results() * u64::from(self.m) * u64::from(self.n)) as usize,
        ]
    }

    /// Widest vectors of lhs, rhs and out in elements, at most `limit`, that divide every line and
    /// start. Along k a vector must not cross the end, because its tail would be multiplied.
    pub(crate) fn widths(&self, limit: u64) -> [usize; 3] {
        let Batches { lhs, rhs, .. } = self.batches;
        let widest = |facts: &[u64]| {
            let mut width = limit;
            while facts.iter().any(|f| f % width != 0) {
                width /= 2;
            }
            width as usize
        };
        let depth = u64::from(self.k);
        let line = |op: Operand, along_k: bool| if along_k { depth } else { op.stride };
        let (l, r) = (self.lhs, self.rhs);
        let whole = self.extents();
        let image = self.window.map(|window| {
            let Window { channels: [first, second], pitch, .. } = window;
            widest(&[first, second, pitch[0], pitch[1]].map(u64::from))
        });
        [
            image.unwrap_or_else(|| {
                widest(&[
                    l.stride,
                    l.start,
                    lhs.0,
                    lhs.1,
                    line(l, l.layout == Layout::Row),
                    whole[0] as u64,
                ])
            }),
            widest(&[
                r.stride,
                r.start,
                rhs.0,
                rhs.1,
                line(r, r.layout == Layout::Col),
                whole[1] as u64,
            ]),
            widest(&[u64::from(self.n), u64::from(self.bias_pitch)]),
        ]
    }

    /// Widest vectors of lhs, rhs and out, at most 16 bytes of operands; see
    /// [`MatmulProblem::widths`].
    pub(crate) fn widest(&self) -> [usize; 3] {
        self.widths(16 / self.precision.storage().size() as u64)
    }

    /// Number of blocks of C over all batches, assuming groups of equal size.
    pub(super) fn blocks(&self, (tile_m, tile_n): (u32, u32)) -> u64 {
        let groups = if self.grouped { self.batch() } else { 1 };
        let m = u64::from(self.m).div_ceil(groups);
        m.div_ceil(u64::from(tile_m)) * u64::from(self.n.div_ceil(tile_n)) * self.batch()
    }

    /// Returns true if whole tiles cover the problem, so that no edge needs a check.
    pub(super) const fn divides(&self, (tile_m, tile_n): (u32, u32), tile_k: u32) -> bool {
        !self.grouped && self.m % tile_m == 0 && self.n % tile_n == 0 && self.k % tile_k == 0
    }

    /// Minimum work of the problem.
    pub fn cost(&self) -> Cost {
        let [m, n, k] = [self.m, self.n, self.k].map(u64::from);
        let Batches { outer, inner, lhs, rhs } = self.batches;
        let distinct = |(o, i): (u64, u64)| {
            u64::from(if o == 0 { 1 } else { outer }) * u64::from(if i == 0 { 1 } else { inner })
        };
        let Epilogue { bias, pre_activation, gate, residual, .. } = self.epilogue;
        let left = match &self.window {
            Some(window) => window.len(self.images(), 0) + window.len(self.images(), 1),
            None => distinct(lhs) * m * k,
        };
        let operands = left + distinct(rhs) * k * n + if bias { self.bias_len() as u64 } else { 0 };
        let more = [pre_activation, gate, residual].map(u64::from);
        let results = self.results() * m * n * (1 + more.iter().sum::<u64>());
        Cost {
            flops: 2 * self.results() * m * n * k,
            bytes: operands * self.precision.storage().size() as u64
                + results * self.out.size() as u64,
        }
    }

    /// Cache key of the tuner: exact layouts, types and alignment, rounded sizes. Most epilogues cost
    /// the same in every config. Those of training a layer's activation are part of the key: they take
    /// so long that smaller tiles pay, of which one stores while another multiplies. A norm is part of
    /// the key, because few configs support it.
    pub(crate) fn bucket(&self) -> String {
        let [wl, wr, _] = self.widest();
        format!(
            "{}{} {}{} w{wl}.{wr} m{} n{} k{} {}{}{}{}{}",
            self.precision.name(),
            if self.out == self.precision.storage() {
                String::new()
            } else {
                format!("-{}", self.out)
            },
            self.lhs.layout.name(),
            self.rhs.layout.name(),
            round_size(self.m),
            round_size(self.n),
            round_size(self.k),
            if self.grouped { "g" } else { "b" },
            self.batch().next_power_of_two(),
            if self.norm.is_some() { " norm" } else { "" },
            if self.epilogue.pre_activation { " pre_activation" } else { "" },
            if self.epilogue.slope.is_some() { " slope" } else { "" },
        ) + &self.window.map_or(String::new(), |window| window.bucket())
    }

    /// Splits the batches into launches. A single launch suffices if each operand has one batch
    /// stride.
    pub(crate) fn batch_slices(&self, arch: &ArchProfile) -> Vec<BatchSlice> {
        let Batches { outer, inner, lhs, rhs } = self.batches;
        let [_, limit] = arch.max_cubes();
        let foldable = |(o, i): (u64, u64)| inner == 1 || o == i * u64::from(inner);
        let (outer, inner, lhs, rhs) = if outer == 1 {
            (1, inner, lhs, rhs)
        } else if inner == 1 {
            (1, outer, (0, lhs.0), (0, rhs.0))
        } else if foldable(lhs) && foldable(rhs) {
            (1, outer * inner, lhs, rhs)
        } else {
            (outer, inner, lhs, rhs)
        };
        let out = match (self.grouped, self.interleaved) {
            (true, _) => 0,
            (_, true) => u64::from(self.n),
            _ => u64::from(self.m) * u64::from(self.n),
        };
        let mut slices = Vec::new();
        for o in 0..u64::from(outer) {
            let mut done = 0;
            while done < inner {
                let count = (inner - done).min(limit);
                let i = u64::from(done);
                slices.push(BatchSlice {
                    count,
                    lhs: (o * lhs.0 + i * lhs.1, lhs.1),
                    rhs: (o * rhs.0 + i * rhs.1, rhs.1),
                    out: ((o * u64::from(inner) + i) * out, out),
                });
                done += count;
            }
        }
        slices
    }
}

/// Batches of one launch: first element and distance between batches, per operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BatchSlice {
    pub(crate) count: u32,
    pub(super) lhs: (u64, u64),
    pub(super) rhs: (u64, u64),
    pub(super) out: (u64, u64),
}

/// Rounds sizes up to 64 to powers of two, larger ones to half powers (64, 96, 128, 192, ...).
/// Configs differ by tile count, which these steps follow.
fn round_size(size: u32) -> u32 {
    let power = size.next_power_of_two();
    let three_quarters = power / 4 * 3;
    if size > 64 && size <= three_quarters { three_quarters } else { power }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dense(batch: u32, sizes: [u32; 3], layouts: [Layout; 2]) -> MatmulProblem {
        MatmulProblem::dense(batch, sizes, layouts, Precision::Bf16).expect("valid sizes")
    }

    #[test]
    fn sizes_of_zero_and_short_strides_are_refused() {
        let rows = [Layout::Row, Layout::Row];
        let zero = MatmulProblem::dense(1, [4, 0, 4], rows, Precision::F32);
        assert_eq!(zero, Err(InvalidMatmul::Empty { axis: "n" }));
        let mut short = dense(1, [4, 4, 4], rows);
        short.rhs.stride = 3;
        assert!(matches!(short.checked(), Err(InvalidMatmul::Stride { operand: "rhs", .. })));
    }

    #[test]
    fn vectors_never_straddle_the_end_of_k() {
        let p = dense(1, [64, 64, 36], [Layout::Row, Layout::Row]);
        assert_eq!(p.widths(8), [4, 8, 8]);
        let mut padded = p;
        padded.lhs.stride = 40; // rows are 16-byte aligned, but k = 36 ends inside a vector of 8
        assert_eq!(padded.widths(8)[0], 4);
        assert_eq!(dense(1, [7, 5, 3], [Layout::Row, Layout::Col]).widths(8), [1, 1, 1]);
    }

    #[test]
    fn batches_that_fold_take_one_launch() {
        let card = ArchProfile::recorded("rtx4090").expect("recorded");
        let rows = [Layout::Row, Layout::Row];
        let mut p = dense(6, [2, 2, 2], rows);
        assert_eq!(p.batch_slices(&card).len(), 1);
        p.batches = Batches { outer: 2, inner: 3, lhs: (12, 4), rhs: (12, 4) };
        assert_eq!(p.batch_slices(&card).len(), 1);
        // lhs broadcasts over inner, rhs over outer: neither folds.
        p.batches = Batches { outer: 2, inner: 3, lhs: (4, 0), rhs: (0, 4) };
        let slices = p.batch_slices(&card);
        assert_eq!(slices.len(), 2);
        assert_eq!((slices[1].lhs, slices[1].rhs, slices[1].out), ((4, 0), (0, 4), (12, 4)));
        assert_eq!(p.extents(), [8, 12, 24]);
        assert_eq!(p.cost().bytes, 2 * (8 + 12 + 24));
        let many = dense(70_000, [1, 1, 1], rows);
        assert_eq!(many.batch_slices(&card).len(), 2);
    }

    #[test]
    fn groups_share_the_rows_of_one_matrix() {
        let card = ArchProfile::recorded("rtx4090").expect("recorded");
        let p = MatmulProblem::grouped(3, [10, 4, 8], Layout::Col, Precision::Bf16).expect("valid");
        assert_eq!(p.extents(), [80, 3 * 32, 40]);
        assert_eq!(p.bias_len(), 12);
        assert_eq!(p.cost().flops, 2 * 10 * 4 * 8);
        assert_eq!(p.batch_slices(&card).len(), 1);
        let one = dense(3, [10, 4, 8], [Layout::Row, Layout::Col]);
        assert_ne!(p.bucket(), one.bucket());
        assert_eq!(MatmulProblem { grouped: true, ..one }.checked(), Err(InvalidMatmul::Groups));
    }

    #[test]
    fn buckets_join_what_may_share_a_config() {
        let cols = [Layout::Row, Layout::Col];
        let bucket = |m| dense(1, [m, 4096, 4096], cols).bucket();
        assert_eq!(bucket(4096), bucket(3500));
        assert_ne!(bucket(1), bucket(2));
        assert_ne!(bucket(4096), dense(1, [4096, 4096, 4095], cols).bucket());
    }
}
