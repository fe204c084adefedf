//! Functions that generated code calls. `flashover-onnx-build` generates it from a graph at build
//! time.
//!
//! They run our kernels on devices that have them, and Burn's operations elsewhere. Like modules of
//! Burn, they panic on shapes that do not match and on device failures.

use std::sync::{Mutex, PoisonError};

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use ops::Ctx;

use crate::array::Array;
use crate::devices::has_kernels;
use crate::ops::attention::{Heads, Scoring, as_numbers, attend, joined, split, whole, with_past};
use crate::ops::fused::{Convolution, GroupNorm, LinearEpilogue, Norm, Operands, project};
use crate::ops::linear;
pub use crate::ops::windows::Padding;
use crate::ops::windows::Windows;

/// Context of generated code.
static CONTEXT: Mutex<Option<Ctx>> = Mutex::new(None);

/// Sets the context of all generated code: tune cache, policy and profile. The default context has
/// the shipped configs.
pub fn set_context(ctx: Ctx) {
    *CONTEXT.lock().unwrap_or_else(PoisonError::into_inner) = Some(ctx);
}

fn context() -> Ctx {
    let mut own = CONTEXT.lock().unwrap_or_else(PoisonError::into_inner);
    own.get_or_insert_default().clone()
}

/// Weights of a layer: filters `[filters, …, channels]` of a convolution, the matrix of a matmul,
/// or the weight of a norm.
#[derive(Module, Debug)]
pub struct Weights<const D: usize> {
    /// Weight.
    pub weight: Param<Tensor<D>>,
    /// Bias `[out_features]`.
    pub bias: Option<Param<Tensor<1>>>,
}

impl<const D: usize> Weights<D> {
    /// Returns zero weights, which a record fills. The bias has `bias` elements; None means no
    /// bias.
    pub fn new(shape: [usize; D], bias: Option<usize>, device: &Device) -> Self {
        let bias = bias.map(|count| Param::from_tensor(Tensor::zeros([count], device)));
        Self { weight: Param::from_tensor(Tensor::zeros(shape, device)), bias }
    }

    /// Wraps weights that the graph computes.
    pub fn from_tensors(weight: Tensor<D>, bias: Option<Tensor<1>>) -> Self {
        Self { weight: Param::from_tensor(weight), bias: bias.map(Param::from_tensor) }
    }

    /// Wraps filters `[filters, channels, …]` that the graph computes.
    pub fn from_filters(filters: Tensor<D>, bias: Option<Tensor<1>>) -> Self {
        let order: Vec<usize> = [0].into_iter().chain(2..D).chain([1]).collect();
        Self::from_tensors(Array::from_tensor(filters).permute(&order).tensor(), bias)
    }

    fn parts(&self) -> (Array, Option<Array>) {
        let bias = self.bias.as_ref().map(|own| Array::from_tensor(own.val()));
        (Array::from_tensor(self.weight.val()), bias)
    }
}

/// Options of a convolution. Lists have one element per spatial dimension.
#[derive(Debug, Clone, Copy)]
pub struct Filters<'a> {
    pub strides: &'a [usize],
    pub padding: Padding<'a>,
    pub dilations: &'a [usize],
    pub groups: usize,
}

/// Computes a convolution of an image `[batch, channels, …]`.
pub fn conv<const D: usize>(x: Tensor<D>, weights: &Weights<D>, filters: Filters<'_>) -> Tensor<D> {
    let (weight, bias) = weights.parts();
    let order: Vec<usize> = [0, D - 1].into_iter().chain(1..D - 1).collect();
    let Filters { strides, padding, dilations, groups } = filters;
    let ours = has_kernels(&weight.device());
    let own = Convolution {
        windows: Windows::new(strides, padding, dilations, groups),
        activation: None,
        last: false,
        doubled: false,
        ours,
        channels: None,
    };
    let operands = Operands {
        x: Array::from_tensor(x),
        weight: weight.permute(&order),
        bias,
        residual: None,
        each: None,
        second: None,
    };
    made(own.run(&context(), operands))
}

/// Computes `x · weight + bias` for x `[.., in_features]`. The weight is `[in_features,
/// out_features]`, or `[out_features, in_features]` if `transposed`.
pub fn linear<const D: usize>(x: Tensor<D>, weights: &Weights<2>, transposed: bool) -> Tensor<D> {
    let (weight, bias) = weights.parts();
    let weight = if transposed { weight.permute(&[1, 0]) } else { weight };
    let (x, ours) = (Array::from_tensor(x), has_kernels(&weight.device()));
    made(project(&context(), ours, x, weight, LinearEpilogue { bias, ..LinearEpilogue::default() }))
}

/// Computes a matmul like NumPy's: vectors are rows or columns, and batches broadcast.
pub fn matmul<const L: usize, const R: usize, const O: usize>(
    a: Tensor<L>,
    b: Tensor<R>,
) -> Tensor<O> {
    made(linear::matmul(&context(), Array::from_tensor(a), Array::from_tensor(b)))
}

/// Computes `α · a · b + β · c`, where c broadcasts.
pub fn gemm<const C: usize>(
    a: Tensor<2>,
    b: Tensor<2>,
    c: Option<Tensor<C>>,
    [alpha, beta]: [f64; 2],
) -> Tensor<2> {
    let [a, b] = [Array::from_tensor(a), Array::from_tensor(b)];
    let (ours, width) = (has_kernels(&b.device()), b.shape()[1]);
    let c = c.map(Array::from_tensor);
    let scaled = |own: Array, by: f64| if by == 1.0 { own } else { own.times_number(by) };
    let fits = |own: &Array| alpha == 1.0 && own.shape() == [width];
    let (bias, rest) = match c {
        Some(own) if fits(&own) => (Some(scaled(own, beta)), None),
        rest => (None, rest),
    };
    let epilogue = LinearEpilogue { bias, ..LinearEpilogue::default() };
    let product = project(&context(), ours, a, b, epilogue).map(|own| scaled(own, alpha));
    made(product.map(|own| match rest {
        Some(c) => own.plus(scaled(c, beta)),
        None => own,
    }))
}

/// Computes a layer norm over the dimensions from `first` on; an RMS norm if not `centred`.
pub fn norm<const D: usize, const W: usize>(
    x: Tensor<D>,
    weights: &Weights<W>,
    first: usize,
    epsilon: f64,
    centred: bool,
) -> Tensor<D> {
    let (weight, bias) = weights.parts();
    let own = Norm { centred, epsilon, ours: has_kernels(&weight.device()) };
    made(own.run(&context(), Array::from_tensor(x), first, Some(weight), bias))
}

/// Computes a group norm of an image `[batch, channels, …]`.
pub fn group_norm<const D: usize>(
    x: Tensor<D>,
    weights: &Weights<1>,
    groups: usize,
    epsilon: f64,
) -> Tensor<D> {
    let (weight, bias) = weights.parts();
    let own = GroupNorm { groups, epsilon, activation: None, ours: has_kernels(&weight.device()) };
    made(own.run(&context(), Array::from_tensor(x), [Some(weight), bias], None))
}

/// Computes an instance norm of an image `[batch, channels, …]`.
pub fn instance_norm<const D: usize>(
    x: Tensor<D>,
    weights: &Weights<1>,
    epsilon: f64,
) -> Tensor<D> {
    let groups = x.dims()[1];
    group_norm(x, weights, groups, epsilon)
}

/// Settings of [`attention`].
#[derive(Debug, Clone, Copy, Default)]
pub struct AttentionOptions {
    pub causal: bool,
    /// Scale of the scores; None means 1 / √head_dim.
    pub scale: Option<f64>,
    /// Soft cap of the scores; 0 disables it.
    pub softcap: f64,
    /// Heads of q, and of k and v, for operands of rank 3.
    pub heads: [usize; 2],
}

/// Computes the operator `Attention`. Operands are `[batch, heads, positions, head_dim]`, or
/// `[batch, positions, hidden]`. A mask is additive, or has bools that are true for visible keys.
/// Past keys and values are `[batch, heads, positions, head_dim]`. Returns the output, and the
/// present keys and values.
pub fn attention<const D: usize>(
    [q, k, v]: [Tensor<D>; 3],
    mask: Option<Mask>,
    past: Option<[Tensor<4>; 2]>,
    options: AttentionOptions,
) -> (Tensor<D>, [Tensor<4>; 2]) {
    let [q, k, v] = [q, k, v].map(Array::from_tensor);
    let ours = has_kernels(&q.device());
    let run = || {
        let split = |own: Array, heads: usize| if D == 3 { split(own, heads) } else { Ok(own) };
        let [of_q, of_k] = options.heads;
        let q = split(q, of_q)?;
        let [past_k, past_v] =
            past.map_or([None, None], |own| own.map(Array::from_tensor).map(Some));
        let before = past_k.as_ref().map_or(0, |own| own.shape()[2]);
        let (k, v) = (with_past(past_k, split(k, of_k)?), with_past(past_v, split(v, of_k)?));
        let mask = mask.map(|own| whole(as_numbers(own.0)?, k.shape()[2])).transpose()?;
        let scoring = Scoring {
            scale: options.scale,
            softcap: options.softcap,
            causal: options.causal.then_some(before),
            masks: mask.into_iter().collect(),
            ..Scoring::plain(ours)
        };
        let present = [k.clone(), v.clone()].map(Array::tensor);
        let (out, _) = attend(&context(), Heads { q, k, v }, scoring)?;
        Ok((if D == 3 { joined(out) } else { out }, present))
    };
    let (out, present) = checked(run());
    (out.tensor(), present)
}

/// A mask of any rank that broadcasts to the scores.
pub struct Mask(Array);

impl<const D: usize> From<Tensor<D>> for Mask {
    fn from(mask: Tensor<D>) -> Self {
        Self(Array::from_tensor(mask))
    }
}

impl<const D: usize> From<Tensor<D, burn::tensor::Bool>> for Mask {
    fn from(mask: Tensor<D, burn::tensor::Bool>) -> Self {
        Self(Array::from_dispatch(mask.into_dispatch()))
    }
}

impl std::fmt::Debug for Mask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "mask {:?}", self.0.shape())
    }
}

fn made<const D: usize>(out: Result<Array, String>) -> Tensor<D> {
    checked(out).tensor()
}

/// Returns the value of a result.
///
/// # Panics
/// The result is an error: a module cannot return one.
fn checked<T>(out: Result<T, String>) -> T {
    match out {
        Ok(out) => out,
        Err(why) => panic!("{why}"),
    }
}
