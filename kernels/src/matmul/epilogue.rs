//! The epilogue of a matmul. Every part is optional.
//!
//! ```text
//!   z = sum + bias             out = round(factor · (residual + gate · activation(z)))
//!   activation last:           out = round(factor · activation(residual + gate · z))
//!
//!   forward pass of a layer:   z is stored too; the activation reads z as it is stored
//!   backward pass:             out = round(residual + sum · activation'(z)), where the gate's buffer holds z
//! ```
//!
//! The bias `[n]` has the operands' type; gate, residual and z `[batch, m, n]` have the result's type. All arithmetic is f32
//! until out and z are rounded. The residual may alias the result: the unit that writes an element also reads it.
//!
//! Ladder, of GPT-2's layer with 32768 rows (H200 as RTX 4090, us; z, h and their gradients are 201 MB each, 49 us of a copy):
//!
//! | version | forward | backward |
//! |---|---:|---:|
//! | a matmul, then a kernel for the activation or its derivative | 395 + 137 | 377 + 265 |
//! | both in the epilogue: no other work hides its loads and its arithmetic | 585 | 832 |
//! | loads of four rows of the gate before their stores | 585 | 667 |
//! | exponentials and reciprocals in single instructions; two blocks of 128 x 128 a processor (the tuner's choice) | 465 | 514 |
//!
//! Gated as in Shazeer, "GLU Variants Improve Transformer" (2020).

use arch::DType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::Queue;

use super::nonlinearity::{Activation, Arithmetic, Constant, activation, slope};
use crate::tile::quad_transpose;

/// Parts of the epilogue that a problem uses.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct Epilogue {
    /// Adds a vector `[n]` to every row.
    pub bias: bool,
    /// Also stores `sum + bias`, in the result's type; the activation is then that of the stored value.
    #[serde(default)]
    pub pre_activation: bool,
    pub activation: Option<Activation>,
    /// Applies the activation to the sum with the residual, as the blocks of a ResNet do.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub activation_last: bool,
    /// Multiplies by a matrix of the result's shape.
    pub gate: bool,
    /// Multiplies by the derivative of this activation at the gate, instead of by the gate.
    #[serde(default)]
    pub slope: Option<Activation>,
    /// Adds a matrix of the result's shape.
    pub residual: bool,
    /// Multiplies the result by a number.
    #[serde(default)]
    pub factor: Option<Constant>,
}

impl Epilogue {
    /// Names of the parts that are present, in the order `bias pre_activation silu gate residual`. An activation that comes last
    /// follows the residual.
    pub fn names(self) -> Vec<&'static str> {
        let flag = |on: bool, name| on.then_some(name);
        [
            flag(self.bias, "bias"),
            flag(self.pre_activation, "pre_activation"),
            self.activation.filter(|_| !self.activation_last).map(Activation::name),
            flag(self.gate, self.slope.map_or("gate", Activation::name_of_slope)),
            flag(self.residual, "residual"),
            self.activation.filter(|_| self.activation_last).map(Activation::name),
            flag(self.factor.is_some(), "factor"),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// Device buffers of an epilogue, present for the parts that it uses.
#[derive(Debug, Clone, Default)]
pub struct EpilogueBuffers {
    pub bias: Option<Handle>,
    /// Written.
    pub pre_activation: Option<Handle>,
    pub gate: Option<Handle>,
    pub residual: Option<Handle>,
}

impl EpilogueBuffers {
    /// Random buffers for the parts of `epilogue`; `bias` and `out` give length and type.
    pub(crate) fn noise(
        queue: &Queue,
        epilogue: Epilogue,
        bias: (usize, DType),
        out: (usize, DType),
        seed: u64,
    ) -> Self {
        let make = |there: bool, (len, dtype): (usize, DType), salt: u64| {
            there.then(|| crate::noise(queue, len, dtype, seed + salt))
        };
        Self {
            bias: make(epilogue.bias, bias, 0),
            pre_activation: make(epilogue.pre_activation, out, 3),
            gate: make(epilogue.gate, out, 1),
            residual: make(epilogue.residual, out, 2),
        }
    }
}

/// Epilogue with its buffers; matrices in vectors of `N`.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Finish<F: Float, E: Float, N: Size> {
    bias: ComptimeOption<Box<[F]>>,
    pre_activation: ComptimeOption<Box<[Vector<E, N>]>>,
    gate: ComptimeOption<Box<[Vector<E, N>]>>,
    residual: ComptimeOption<Box<[Vector<E, N>]>>,
    /// Parts that are present. Repeated because CubeCL 0.11 caches compiled kernels under a hash
    /// that ignores whether an option is `Some` or `None`.
    #[cube(comptime)]
    pub(crate) epilogue: Epilogue,
}

impl<F: Float, E: Float, N: Size> FinishLaunch<F, E, N> {
    /// Launch arguments of `epilogue`: a bias of `bias` elements, matrices of `vectors` vectors.
    pub(crate) fn from_buffers(
        epilogue: Epilogue,
        buffers: &EpilogueBuffers,
        bias: usize,
        vectors: usize,
    ) -> Self {
        let matrix = |handle: &Option<Handle>| {
            let arg = handle.as_ref().map(|h| {
                // SAFETY: matrices of an epilogue have the result's size.
                unsafe { BufferArg::from_raw_parts(h.clone(), vectors) }
            });
            ComptimeOptionArgs::from(arg)
        };
        let bias = buffers.bias.as_ref().map(|h| {
            // SAFETY: the caller gives the length of the bias.
            unsafe { BufferArg::from_raw_parts(h.clone(), bias) }
        });
        Self::new(
            ComptimeOptionArgs::from(bias),
            matrix(&buffers.pre_activation),
            matrix(&buffers.gate),
            matrix(&buffers.residual),
            epilogue,
        )
    }

    /// Launch arguments of an empty epilogue.
    pub(crate) fn nothing() -> Self {
        let none = || ComptimeOptionArgs::None;
        Self::new(ComptimeOptionArgs::None, none(), none(), none(), Epilogue::default())
    }
}

/// Columns of a matrix: index of its first bias element, and number of columns.
#[derive(CubeType)]
pub(crate) struct Columns {
    pub(crate) first: usize,
    pub(crate) count: u32,
}

#[cube]
impl<F: Float, E: Float, N: Size> Finish<F, E, N> {
    /// Returns the results of the sums of columns `col..`, at vector `at`. Columns past the end use the last bias element; they
    /// are never stored.
    pub(crate) fn vector<W: Size>(
        &self,
        sum: Vector<f32, W>,
        at: usize,
        col: u32,
        columns: &Columns,
    ) -> Vector<f32, W> {
        let mut value = self.biased::<W>(sum, col, columns);
        #[comptime]
        match &self.pre_activation {
            ComptimeOption::Some(to) => {
                let stored = Vector::<E, N>::cast_from(value);
                // SAFETY: a kernel's buffer lives as long as the kernel, and this unit alone writes `at`.
                let mut to = unsafe { to.as_boxed_unchecked() };
                to[at] = stored;
                value = Vector::cast_from(stored);
            }
            ComptimeOption::None => {}
        }
        let value = self.activated::<W>(
            value,
            comptime!(!self.epilogue.activation_last),
            Arithmetic::Plain,
        );
        self.join::<W>(value, at)
    }

    /// Returns the results of a GLU, at vector `at`: the gate sums in columns `cols.0..`, the up sums in `cols.1..`.
    pub(crate) fn vector_of_two<W: Size>(
        &self,
        sums: (Vector<f32, W>, Vector<f32, W>),
        at: usize,
        cols: (u32, u32),
        columns: &Columns,
    ) -> Vector<f32, W> {
        comptime!(assert!(!self.epilogue.pre_activation, "a GLU stores no pre-activation"));
        comptime!(assert!(!self.epilogue.activation_last, "a GLU activates its gate"));
        let gate =
            self.activated::<W>(self.biased::<W>(sums.0, cols.0, columns), true, Arithmetic::Plain);
        self.join::<W>(gate * self.biased::<W>(sums.1, cols.1, columns), at)
    }

    /// Applies the activation, if this is its place.
    fn activated<W: Size>(
        &self,
        value: Vector<f32, W>,
        #[comptime] here: bool,
        #[comptime] by: Arithmetic,
    ) -> Vector<f32, W> {
        let mut value = value;
        if comptime!(here && self.epilogue.activation.is_some()) {
            #[unroll]
            for e in 0..W::value() {
                value.insert(e, activation(value.extract(e), self.epilogue.activation, by));
            }
        }
        value
    }

    fn biased<W: Size>(&self, sum: Vector<f32, W>, col: u32, columns: &Columns) -> Vector<f32, W> {
        let mut value = sum;
        #[comptime]
        match &self.bias {
            ComptimeOption::Some(bias) =>
            {
                #[unroll]
                for e in 0..W::value() {
                    let col = min(col + comptime!(e as u32), columns.count - 1);
                    let bias = bias[columns.first + col as usize];
                    value.insert(e, value.extract(e) + f32::cast_from(bias));
                }
            }
            ComptimeOption::None => {}
        }
        value
    }

    fn join<W: Size>(&self, value: Vector<f32, W>, at: usize) -> Vector<f32, W> {
        let mut out = value;
        #[comptime]
        match &self.gate {
            ComptimeOption::Some(gate) => {
                out *= factor::<W>(
                    Vector::cast_from(gate[at]),
                    self.epilogue.slope,
                    Arithmetic::Plain,
                );
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        match &self.residual {
            ComptimeOption::Some(residual) => out += Vector::cast_from(residual[at]),
            ComptimeOption::None => {}
        }
        self.finished(out, Arithmetic::Plain)
    }

    /// Applies what comes after the residual.
    fn finished<W: Size>(
        &self,
        value: Vector<f32, W>,
        #[comptime] by: Arithmetic,
    ) -> Vector<f32, W> {
        let mut value = self.activated::<W>(value, comptime!(self.epilogue.activation_last), by);
        if comptime!(self.epilogue.factor.is_some()) {
            let factor = comptime!(self.epilogue.factor.map_or(1.0, Constant::value));
            value *= Vector::new(factor.runtime());
        }
        value
    }

    /// Returns the result of one sum, at element `at` and column `col`; for `N` = 1.
    pub(crate) fn one(&self, sum: f32, at: usize, col: u32, columns: &Columns) -> f32 {
        self.vector::<Const<1>>(Vector::new(sum), at, col, columns).extract(0usize)
    }

    /// Returns the result of a GLU: the gate sum in column `cols.0`, the up sum in `cols.1`; for
    /// `N` = 1.
    pub(crate) fn one_of_two(
        &self,
        sums: (f32, f32),
        at: usize,
        cols: (u32, u32),
        columns: &Columns,
    ) -> f32 {
        let sums = (Vector::new(sums.0), Vector::new(sums.1));
        self.vector_of_two::<Const<1>>(sums, at, cols, columns).extract(0usize)
    }

    /// Loads 16-byte vector `at` of the matrix that [`Finish::quad`] reads first, if the unit is `inside`.
    pub(crate) fn ahead(&self, at: usize, inside: bool) -> Vector<u32, Const<4>> {
        let mut vector = Vector::<u32, Const<4>>::new(0u32);
        #[comptime]
        match &self.gate {
            ComptimeOption::Some(gate) => {
                if inside {
                    vector = Vector::reinterpret(gate[at]);
                }
            }
            ComptimeOption::None =>
            {
                #[comptime]
                match &self.residual {
                    ComptimeOption::Some(residual) => {
                        if inside {
                            vector = Vector::reinterpret(residual[at]);
                        }
                    }
                    ComptimeOption::None => {}
                }
            }
        }
        vector
    }

    /// Replaces sums by results, for the four pairs that a unit of a quad holds of the 32 columns `col..` of a row. `at` is the
    /// unit's 16-byte vector, and `ahead` its [`Finish::ahead`]; units that are not `inside` access none.
    #[expect(clippy::too_many_arguments, reason = "four pairs, one place, one edge")]
    pub(crate) fn quad<W: Size>(
        &self,
        values: &mut Array<Vector<f32, W>>,
        ahead: Vector<u32, Const<4>>,
        at: usize,
        col: u32,
        lane: u32,
        columns: &Columns,
        inside: bool,
    ) {
        #[unroll]
        for j in 0..4usize {
            let left = col + comptime!(8 * j as u32) + lane % 4 * 2;
            values[j] = self.biased::<W>(values[j], left, columns);
        }
        #[comptime]
        match &self.pre_activation {
            ComptimeOption::Some(to) => {
                #[unroll]
                for j in 0..4usize {
                    values[j] = Vector::cast_from(Vector::<E, W>::cast_from(values[j]));
                }
                // SAFETY: a kernel's buffer lives as long as the kernel, and this unit alone writes `at`.
                let mut to = unsafe { to.as_boxed_unchecked() };
                store_transposed::<E, W, N>(&mut to, values, at, inside, lane);
            }
            ComptimeOption::None => {}
        }
        #[unroll]
        for j in 0..4usize {
            values[j] = self.activated::<W>(
                values[j],
                comptime!(!self.epilogue.activation_last),
                Arithmetic::Ptx,
            );
        }
        #[comptime]
        match &self.gate {
            ComptimeOption::Some(_gate) => {
                let words = transposed(ahead, lane);
                #[unroll]
                for j in 0..4usize {
                    values[j] *=
                        factor::<W>(pair::<E, W>(&words, j), self.epilogue.slope, Arithmetic::Ptx);
                }
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        match &self.residual {
            ComptimeOption::Some(residual) => {
                let mut vector = ahead;
                if comptime!(self.epilogue.gate) && inside {
                    vector = Vector::reinterpret(residual[at]);
                }
                let words = transposed(vector, lane);
                #[unroll]
                for j in 0..4usize {
                    values[j] += pair::<E, W>(&words, j);
                }
            }
            ComptimeOption::None => {}
        }
        #[unroll]
        for j in 0..4usize {
            values[j] = self.finished::<W>(values[j], Arithmetic::Ptx);
        }
    }
}

#[cube]
fn factor<W: Size>(
    gate: Vector<f32, W>,
    #[comptime] slope_of: Option<Activation>,
    #[comptime] by: Arithmetic,
) -> Vector<f32, W> {
    let mut factor = gate;
    #[comptime]
    if let Some(activation) = slope_of {
        #[unroll]
        for e in 0..W::value() {
            factor.insert(e, slope(factor.extract(e), activation, by));
        }
    }
    factor
}

#[cube]
fn pair<E: Float, W: Size>(words: &Array<u32>, #[comptime] j: usize) -> Vector<f32, W> {
    Vector::cast_from(Vector::<E, W>::reinterpret(words[j]))
}

/// Exchanges the words of vectors between the units of a quad.
#[cube]
fn transposed(vector: Vector<u32, Const<4>>, lane: u32) -> Array<u32> {
    let mut words = Array::<u32>::new(4usize);
    #[unroll]
    for j in 0..4usize {
        words[j] = vector.extract(j);
    }
    quad_transpose(&mut words, lane);
    words
}

/// Exchanges pairs between the units of a quad, and stores vector `at` of `matrix`.
#[cube]
pub(crate) fn store_transposed<E: Float, W: Size, N: Size>(
    matrix: &mut [Vector<E, N>],
    pairs: &mut Array<Vector<f32, W>>,
    at: usize,
    inside: bool,
    lane: u32,
) {
    let mut words = Array::<u32>::new(4usize);
    #[unroll]
    for j in 0..4usize {
        words[j] = u32::reinterpret(Vector::<E, W>::cast_from(pairs[j]));
    }
    quad_transpose(&mut words, lane);
    if inside {
        let mut vector = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for j in 0..4usize {
            vector.insert(j, words[j]);
        }
        matrix[at] = Vector::reinterpret(vector);
    }
}
