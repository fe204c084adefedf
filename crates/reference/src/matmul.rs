//! Batched matmul with an epilogue.
//!
//! ```text
//! out = factor·(residual + gate·activation(lhs·rhs + bias)·(lhs·up + bias))   up is optional; the gate may be a derivative at gate
//! with a norm, lhs is norm(lhs), rounded as by a separate kernel; the reference does not round it
//! lhs: [batch.., m, k]   rhs: [batch.., k, n]   bias: [n]   out, gate, residual: [batch.., m, n]
//!   for each output position [.., row, col]:
//!     for p in 0..k: sum += lhs[.., row, p]·rhs[.., p, col]
//! ```
//!
//! The same loop is evaluated twice. The reference is in `f64` from the stored values. The naive evaluation
//! has operands in the kernel's precision and `f32` sums, and sets the tolerance. A matmul of 8192^3 takes
//! minutes here, so that both can be limited to a [`Sample`].

mod arithmetic;

use rand_chacha::rand_core::Rng;
use rayon::prelude::*;

pub use self::arithmetic::Activation;
use self::arithmetic::{Number, gather, multiply, multiply_in_blocks};
use crate::compare::{Comparison, compare};
use crate::inputs::stream;
use crate::norm::Norm;
use crate::{DType, Error};

/// Memory order of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Rows are contiguous.
    Row,
    /// Columns are contiguous.
    Col,
}

/// Strides of an operand along each axis, in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strides {
    /// One for each batch axis; 0 repeats the operand along it.
    pub batch: Vec<usize>,
    pub row: usize,
    pub col: usize,
}

/// A batched matmul; the output is row-major and contiguous.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Matmul {
    /// Batch axes of the output, outermost first; empty for a single matmul.
    pub batch: Vec<usize>,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub lhs: Strides,
    pub rhs: Strides,
    /// Precision of both operands.
    pub dtype: DType,
    /// Format of the accumulators.
    pub sums: DType,
    /// Format of the output.
    pub out_dtype: DType,
}

/// Operations on the sums before they are rounded; parts that are None do nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Epilogue<'a> {
    /// Norm of the rows of lhs, before the matmul.
    pub norm: Option<RowNorm<'a>>,
    /// [n]
    pub bias: Option<&'a [f32]>,
    /// Format in which `lhs·rhs + bias` is stored before the activation, if it is; the reference does not round it.
    pub pre_activation: Option<DType>,
    pub activation: Option<Activation>,
    /// True to apply the activation after the residual.
    pub activation_last: bool,
    /// A second matmul that the first one gates.
    pub up: Option<Up<'a>>,
    /// [batch.., m, n]
    pub gate: Option<&'a [f32]>,
    /// The factor is the derivative of this activation at the gate, instead of the gate.
    pub slope: Option<Activation>,
    /// [batch.., m, n]
    pub residual: Option<&'a [f32]>,
    /// Multiplies the result.
    pub factor: Option<f32>,
}

/// A norm of rows of lhs.
#[derive(Debug, Clone, Copy)]
pub struct RowNorm<'a> {
    pub norm: Norm,
    /// [k]
    pub weight: &'a [f32],
}

/// A matmul of lhs with another matrix of rhs's shape and strides, with its own bias.
#[derive(Debug, Clone, Copy)]
pub struct Up<'a> {
    pub rhs: &'a [f32],
    /// [n]
    pub bias: Option<&'a [f32]>,
}

impl<'a> Epilogue<'a> {
    /// Epilogue that does nothing.
    pub const NONE: Self = Self {
        norm: None,
        bias: None,
        pre_activation: None,
        activation: None,
        activation_last: false,
        up: None,
        gate: None,
        slope: None,
        residual: None,
        factor: None,
    };

    /// Epilogue with only a bias `[n]`.
    pub const fn bias(bias: &'a [f32]) -> Self {
        Self { bias: Some(bias), ..Self::NONE }
    }
}

/// Output positions to evaluate: every combination of a batch, a row and a column, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Flat batch indices.
    pub batches: Vec<usize>,
    pub rows: Vec<usize>,
    pub cols: Vec<usize>,
}

impl Strides {
    /// Strides of a contiguous [batch.., rows, cols]. A batch axis of size 1 gets stride 0, so that the
    /// operand broadcasts along it.
    pub fn contiguous(batch: &[usize], rows: usize, cols: usize, layout: Layout) -> Self {
        let mut size = rows * cols;
        let mut strides: Vec<_> = batch
            .iter()
            .rev()
            .map(|&axis| {
                let stride = if axis == 1 { 0 } else { size };
                size *= axis;
                stride
            })
            .collect();
        strides.reverse();
        match layout {
            Layout::Row => Self { batch: strides, row: cols, col: 1 },
            Layout::Col => Self { batch: strides, row: 1, col: rows },
        }
    }

    /// Number of elements that a [batch.., rows, cols] operand spans, gaps included.
    fn reach(&self, batch: &[usize], rows: usize, cols: usize) -> usize {
        let axes = batch.iter().zip(&self.batch).chain([(&rows, &self.row), (&cols, &self.col)]);
        axes.fold(1, |reach: usize, (&size, &stride)| {
            if size == 0 || reach == 0 {
                0
            } else {
                reach.saturating_add((size - 1).saturating_mul(stride))
            }
        })
    }

    /// Returns the first element of the matrix of a flat batch index.
    fn base(&self, batch: &[usize], mut index: usize) -> usize {
        let mut base = 0;
        for (&size, &stride) in batch.iter().zip(&self.batch).rev() {
            base += index % size * stride;
            index /= size;
        }
        base
    }
}

impl Matmul {
    /// Default budget of [`Matmul::sample`] in multiply-adds: about a tenth of a second on two cores in a
    /// release build.
    pub const BUDGET: usize = 1 << 28;

    /// Creates a matmul with contiguous operands that have the output's batch axes. The output has the
    /// operands' storage format. Change the fields for anything else.
    pub fn contiguous(
        batch: &[usize],
        [m, n, k]: [usize; 3],
        lhs: Layout,
        rhs: Layout,
        dtype: DType,
    ) -> Self {
        Self {
            batch: batch.to_vec(),
            m,
            n,
            k,
            lhs: Strides::contiguous(batch, m, k, lhs),
            rhs: Strides::contiguous(batch, k, n, rhs),
            dtype,
            sums: DType::F32,
            out_dtype: dtype.storage(),
        }
    }

    /// Number of elements of lhs, rhs and out.
    pub fn lens(&self) -> [usize; 3] {
        [
            self.lhs.reach(&self.batch, self.m, self.k),
            self.rhs.reach(&self.batch, self.k, self.n),
            self.batches() * self.m * self.n,
        ]
    }

    /// Computes the exact matmul.
    ///
    /// Operands are rounded to the storage format of `dtype` first, which changes nothing if they were
    /// decoded from it. A tf32 kernel is thus compared with the matmul of its f32 operands. The operands of
    /// the epilogue are not rounded.
    ///
    /// # Shapes
    /// lhs and rhs as their strides say, the epilogue's as [`Epilogue`] says; returns `[batch.., m, n]`.
    ///
    /// # Errors
    /// Fails if a slice is too short for its strides, if a part of the epilogue has the wrong length, or if
    /// strides have the wrong rank.
    pub fn run(&self, lhs: &[f32], rhs: &[f32], epilogue: Epilogue<'_>) -> Result<Vec<f64>, Error> {
        self.run_at(&self.everything(), lhs, rhs, epilogue)
    }

    /// Like [`Matmul::run`], at the sampled positions in the order of [`Matmul::indices`].
    ///
    /// # Errors
    /// As [`Matmul::run`]; a sample out of range.
    pub fn run_at(
        &self,
        sample: &Sample,
        lhs: &[f32],
        rhs: &[f32],
        epilogue: Epilogue<'_>,
    ) -> Result<Vec<f64>, Error> {
        let stored = self.dtype.storage();
        let exact = |lhs: &[f64], rhs: &[f64], sizes| multiply(lhs, rhs, sizes, |sum| sum);
        self.evaluate(sample, [lhs, rhs], epilogue, |v| stored.round(v.into()), exact)
    }

    /// Computes the matmul of a naive kernel: operands rounded to `dtype`, products summed in order in
    /// `sums`, the epilogue in `f32`, the result rounded to `out_dtype`. Types of matrix instructions are
    /// summed as the instructions do, sixteen products at once, truncated (Fasi et al., "Numerical behavior
    /// of NVIDIA tensor cores", 2021). With rounding instead, sums of 4104 products on an H200 were off by
    /// 1.5 times the tolerance.
    ///
    /// # Shapes, Errors
    /// As [`Matmul::run`].
    pub fn naive(
        &self,
        lhs: &[f32],
        rhs: &[f32],
        epilogue: Epilogue<'_>,
    ) -> Result<Vec<f64>, Error> {
        self.naive_at(&self.everything(), lhs, rhs, epilogue)
    }

    /// Like [`Matmul::naive`], at the sampled positions in the order of [`Matmul::indices`].
    ///
    /// # Errors
    /// As [`Matmul::run_at`].
    pub fn naive_at(
        &self,
        sample: &Sample,
        lhs: &[f32],
        rhs: &[f32],
        epilogue: Epilogue<'_>,
    ) -> Result<Vec<f64>, Error> {
        let read = |v: f32| self.dtype.round(v.into()) as f32;
        let rounded = |sum: f32| self.sums.round(sum.into()) as f32;
        let operands = [lhs, rhs];
        let sums = match (self.dtype, self.sums) {
            (DType::F32, DType::F32) => {
                let plain = |lhs: &[f32], rhs: &[f32], sizes| multiply(lhs, rhs, sizes, |sum| sum);
                self.evaluate(sample, operands, epilogue, read, plain)?
            }
            (_, DType::F32) => {
                self.evaluate(sample, operands, epilogue, read, multiply_in_blocks)?
            }
            _ => {
                let narrow = |lhs: &[f32], rhs: &[f32], sizes| multiply(lhs, rhs, sizes, rounded);
                self.evaluate(sample, operands, epilogue, read, narrow)?
            }
        };
        Ok(sums.into_par_iter().map(|v| self.out_dtype.storage().round(v.into())).collect())
    }

    /// Compares a kernel's output with the reference at the sampled positions, with [`compare`].
    /// `worst_index` is an index into `out`.
    ///
    /// # Shapes
    /// As [`Matmul::run`]; out `[batch.., m, n]`, decoded from `out_dtype`.
    ///
    /// # Errors
    /// As [`Matmul::run_at`]; an output of the wrong length.
    pub fn check(
        &self,
        sample: &Sample,
        lhs: &[f32],
        rhs: &[f32],
        epilogue: Epilogue<'_>,
        out: &[f32],
    ) -> Result<Comparison, Error> {
        let [_, _, need] = self.lens();
        if out.len() != need {
            return Err(Error::Length { what: "out", need, have: out.len() });
        }
        let reference = self.run_at(sample, lhs, rhs, epilogue)?;
        let naive = self.naive_at(sample, lhs, rhs, epilogue)?;
        let indices: Vec<_> = self.indices(sample).collect();
        let out: Vec<_> = indices.iter().map(|&i| out[i]).collect();
        let mut comparison = compare(&out, &reference, &naive, self.out_dtype)?;
        comparison.worst_index = comparison.worst_index.map(|i| indices[i]);
        Ok(comparison)
    }

    /// Like [`Matmul::check`], for a grouped matmul: rows `offsets[g]..offsets[g + 1]` of lhs use matrix g of
    /// rhs, where g is the innermost batch axis. With a seed, only a sample of each group is checked.
    ///
    /// # Shapes
    /// lhs, out, gate, residual `[m, n]` or `[m, k]`; bias `[groups, n]`.
    ///
    /// # Errors
    /// As [`Matmul::check`]; offsets that do not fit the groups.
    pub fn check_groups<'a>(
        &self,
        offsets: &[usize],
        seed: Option<u64>,
        lhs: &[f32],
        rhs: &[f32],
        epilogue: Epilogue<'a>,
        out: &[f32],
    ) -> Result<Comparison, Error> {
        let (groups, size) = (self.batches(), self.m * self.n);
        let up_bias = epilogue.up.and_then(|up| up.bias);
        for (what, need, have) in [
            ("offsets", groups + 1, offsets.len()),
            ("out", size, out.len()),
            ("bias", groups * self.n, epilogue.bias.map_or(groups * self.n, <[f32]>::len)),
            ("bias", groups * self.n, up_bias.map_or(groups * self.n, <[f32]>::len)),
            ("gate", size, epilogue.gate.map_or(size, <[f32]>::len)),
            ("residual", size, epilogue.residual.map_or(size, <[f32]>::len)),
        ] {
            if need != have {
                return Err(Error::Length { what, need, have });
            }
        }
        let (mut reference, mut naive) = (Vec::new(), Vec::new());
        let (mut sampled, mut indices) = (Vec::new(), Vec::new());
        for (group, rows) in offsets.windows(2).enumerate() {
            let (first, end) = (rows[0], rows[1]);
            if first > end || end > self.m {
                return Err(Error::OutOfRange {
                    what: "offset",
                    index: first.max(end),
                    len: self.m,
                });
            }
            let alone = |strides: &Strides| Strides { batch: Vec::new(), ..strides.clone() };
            let part = Self {
                batch: Vec::new(),
                m: end - first,
                lhs: alone(&self.lhs),
                rhs: alone(&self.rhs),
                ..self.clone()
            };
            if part.m == 0 {
                continue;
            }
            let cells = first * self.n..end * self.n;
            let lhs = &lhs[(first * self.lhs.row).min(lhs.len())..];
            let of_group = |rhs: &[f32]| self.rhs.base(&self.batch, group).min(rhs.len());
            let rhs = &rhs[of_group(rhs)..];
            let own = |bias: Option<&'a [f32]>| bias.map(|b| &b[group * self.n..][..self.n]);
            let epilogue = Epilogue {
                bias: own(epilogue.bias),
                up: epilogue
                    .up
                    .map(|up| Up { rhs: &up.rhs[of_group(up.rhs)..], bias: own(up.bias) }),
                gate: epilogue.gate.map(|gate| &gate[cells.clone()]),
                residual: epilogue.residual.map(|residual| &residual[cells.clone()]),
                ..epilogue
            };
            let sample = match seed {
                Some(seed) => part.sample_within(seed + group as u64, Self::BUDGET / groups),
                None => part.everything(),
            };
            reference.extend(part.run_at(&sample, lhs, rhs, epilogue)?);
            naive.extend(part.naive_at(&sample, lhs, rhs, epilogue)?);
            for index in part.indices(&sample).map(|i| i + cells.start) {
                indices.push(index);
                sampled.push(out[index]);
            }
        }
        let mut comparison = compare(&sampled, &reference, &naive, self.out_dtype)?;
        comparison.worst_index = comparison.worst_index.map(|i| indices[i]);
        Ok(comparison)
    }

    /// Returns all positions of the output.
    pub fn everything(&self) -> Sample {
        Sample {
            batches: (0..self.batches()).collect(),
            rows: (0..self.m).collect(),
            cols: (0..self.n).collect(),
        }
    }

    /// Returns all positions of the output if the budget allows, else a seeded choice of about
    /// [`Matmul::BUDGET`] multiply-adds. The choice has one row and one column of every stripe of equal
    /// width, plus the outermost two on each side. At 8192^3 every block of 128 x 128 has a sample.
    pub fn sample(&self, seed: u64) -> Sample {
        self.sample_within(seed, Self::BUDGET)
    }

    /// Like [`Matmul::sample`], with a budget in multiply-adds.
    pub fn sample_within(&self, seed: u64, budget: usize) -> Sample {
        let mut counts = [self.batches(), self.m, self.n];
        // Reading dominates a thin matmul: a read counts as 16 multiply-adds.
        let cost = |[batches, rows, cols]: [usize; 3]| {
            batches.saturating_mul(rows.saturating_mul(cols) + 16 * (rows + cols))
        };
        let affordable = (budget / self.k.max(1)).max(256);
        while cost(counts) > affordable && counts != [1; 3] {
            // Halving the longest axis keeps the samples evenly spread.
            let max = (0..3).max_by_key(|&axis| counts[axis]).unwrap_or(0);
            counts[max] = counts[max].div_ceil(2);
        }
        let mut rng = stream(seed);
        Sample {
            batches: stripes(self.batches(), counts[0], &mut rng),
            rows: stripes(self.m, counts[1], &mut rng),
            cols: stripes(self.n, counts[2], &mut rng),
        }
    }

    /// Returns the flat output indices of the sampled positions.
    pub fn indices<'a>(&self, sample: &'a Sample) -> impl Iterator<Item = usize> + use<'a> {
        let (m, n) = (self.m, self.n);
        sample.batches.iter().flat_map(move |&b| {
            sample
                .rows
                .iter()
                .flat_map(move |&row| sample.cols.iter().map(move |&col| (b * m + row) * n + col))
        })
    }

    fn batches(&self) -> usize {
        self.batch.iter().product()
    }

    fn validate(
        &self,
        sample: &Sample,
        [lhs, rhs]: [&[f32]; 2],
        epilogue: Epilogue<'_>,
    ) -> Result<(), Error> {
        for (what, strides) in [("lhs", &self.lhs), ("rhs", &self.rhs)] {
            let (need, have) = (self.batch.len(), strides.batch.len());
            if need != have {
                return Err(Error::BatchRank { what, need, have });
            }
        }
        let [lhs_len, rhs_len, _] = self.lens();
        let up = epilogue.up.map_or(rhs_len, |up| up.rhs.len());
        for (what, need, have) in
            [("lhs", lhs_len, lhs.len()), ("rhs", rhs_len, rhs.len()), ("up", rhs_len, up)]
        {
            if have < need {
                return Err(Error::Length { what, need, have });
            }
        }
        let [_, _, out_len] = self.lens();
        for (what, values, need) in [
            ("norm", epilogue.norm.map(|norm| norm.weight), self.k),
            ("bias", epilogue.bias, self.n),
            ("bias", epilogue.up.and_then(|up| up.bias), self.n),
            ("gate", epilogue.gate, out_len),
            ("residual", epilogue.residual, out_len),
        ] {
            if let Some(have) = values.map(<[f32]>::len).filter(|have| *have != need) {
                return Err(Error::Length { what, need, have });
            }
        }
        for (what, positions, len) in [
            ("sampled batch", &sample.batches, self.batches()),
            ("sampled row", &sample.rows, self.m),
            ("sampled column", &sample.cols, self.n),
        ] {
            if let Some(&index) = positions.iter().find(|&&position| position >= len) {
                return Err(Error::OutOfRange { what, index, len });
            }
        }
        Ok(())
    }

    /// Evaluates the matmul in arithmetic `T`. `read` converts each operand, `multiply` multiplies.
    fn evaluate<T: Number>(
        &self,
        sample: &Sample,
        [lhs, rhs]: [&[f32]; 2],
        epilogue: Epilogue<'_>,
        read: impl Fn(f32) -> T + Sync,
        multiply: impl Fn(&[T], &[T], [usize; 3]) -> Vec<T>,
    ) -> Result<Vec<T>, Error> {
        self.validate(sample, [lhs, rhs], epilogue)?;
        let product = |rhs, finish: &dyn Fn(T, usize, usize) -> T| {
            self.products(sample, [lhs, rhs], epilogue.norm, finish, &read, &multiply)
        };
        let Some(Up { rhs: up, bias }) = epilogue.up else {
            return Ok(product(rhs, &|sum, at, col| epilogue.apply(sum, None, at, col)));
        };
        let second = Epilogue { bias, ..Epilogue::NONE };
        let second = product(up, &|sum, at, col| second.apply(sum, None, at, col));
        let first = product(rhs, &|sum, _, _| sum);
        let cols = sample.cols.iter().copied().cycle();
        let places = self.indices(sample).zip(cols);
        let both = first.into_iter().zip(second).zip(places);
        Ok(both.map(|((sum, up), (at, col))| epilogue.apply(sum, Some(up), at, col)).collect())
    }

    /// Computes the sums of one matmul, and applies `finish` to each with its index and column.
    fn products<T: Number>(
        &self,
        sample: &Sample,
        [lhs, rhs]: [&[f32]; 2],
        norm: Option<RowNorm<'_>>,
        finish: &dyn Fn(T, usize, usize) -> T,
        read: &(impl Fn(f32) -> T + Sync),
        multiply: &impl Fn(&[T], &[T], [usize; 3]) -> Vec<T>,
    ) -> Vec<T> {
        let scaled = |at: &[usize], stride| at.iter().map(|i| i * stride).collect::<Vec<_>>();
        let depth: Vec<usize> = (0..self.k).collect();
        let mut out =
            Vec::with_capacity(sample.batches.len() * sample.rows.len() * sample.cols.len());
        for &b in &sample.batches {
            let lhs = &lhs[self.lhs.base(&self.batch, b).min(lhs.len())..];
            let rhs = &rhs[self.rhs.base(&self.batch, b).min(rhs.len())..];
            let (rows, across) = (scaled(&sample.rows, self.lhs.row), scaled(&depth, self.lhs.col));
            let (down, cols) = (scaled(&depth, self.rhs.row), scaled(&sample.cols, self.rhs.col));
            let mut lhs = gather(lhs, &rows, &across, read); //                  [rows, k]
            if let Some(norm) = norm {
                lhs.par_chunks_mut(self.k.max(1))
                    .for_each(|line| T::normalise(line, norm.norm, norm.weight, read));
            }
            let rhs = gather(rhs, &down, &cols, read); //                        [k, cols]
            let sizes = [sample.rows.len(), self.k, sample.cols.len()];
            let mut product = multiply(&lhs, &rhs, sizes);
            let wide = sample.cols.len().max(1);
            for (line, &row) in product.chunks_mut(wide).zip(&sample.rows) {
                for (value, &col) in line.iter_mut().zip(&sample.cols) {
                    *value = finish(*value, (b * self.m + row) * self.n + col, col);
                }
            }
            out.append(&mut product);
        }
        out
    }
}

impl Epilogue<'_> {
    /// Returns the value to store at flat output index `at`, in column `col`, for the sum `sum`, which gates
    /// `up`.
    fn apply<T: Number>(&self, sum: T, up: Option<T>, at: usize, col: usize) -> T {
        let x = sum + T::from(self.bias.map_or(0.0, |bias| bias[col]));
        let x = self.pre_activation.map_or(x, |dtype| x.stored(dtype));
        let activated = |value: T, here: bool| match self.activation.filter(|_| here) {
            Some(activation) => activation.apply(value),
            None => value,
        };
        let mut value = activated(x, !self.activation_last);
        if let Some(up) = up {
            value = value * up;
        }
        if let Some(gate) = self.gate {
            let gate = T::from(gate[at]);
            value = value * self.slope.map_or(gate, |activation| activation.derivative(gate));
        }
        if let Some(residual) = self.residual {
            value += T::from(residual[at]);
        }
        value = activated(value, self.activation_last);
        if let Some(factor) = self.factor {
            value = value * T::from(factor);
        }
        value
    }
}

/// Returns one position in each of `count` stripes of `size`, plus the outermost two on both sides; all
/// positions if `count` is at least `size`. Sorted, without duplicates.
fn stripes(size: usize, count: usize, rng: &mut impl Rng) -> Vec<usize> {
    if count >= size {
        return (0..size).collect();
    }
    let mut positions: Vec<_> = (0..count)
        .map(|i| {
            let (from, to) = (i * size / count, (i + 1) * size / count);
            from + rng.next_u32() as usize % (to - from)
        })
        .chain([0, 1, size - 2, size - 1]) // size > count >= 1
        .collect();
    positions.sort_unstable();
    positions.dedup();
    positions
}
