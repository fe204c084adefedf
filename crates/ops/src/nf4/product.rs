//! The kernels of 4-bit weights behind Burn's dispatch.

use arch::{DType, Device};
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{
    Autodiff, AutodiffBackend, Backend, ExtensionType, TensorMetadata, backend_extension,
};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels::matmul::{Activation, Epilogue};
use kernels::nf4::{
    CodeBook, DequantizeOperands, DequantizeProblem, NestedBuffers, Nf4Dequantize, Nf4Matmul,
    Nf4MatmulOperands, Nf4MatmulProblem, Order, Weight, WeightBuffers, join, quantize,
    reorder_absmax, reorder_codes,
};
use kernels::norm::NormProblem;
use tune::Kernel;

use crate::OpError;
use crate::call::{Call, Optional, Parts, empty_like, launch};
use crate::frozen::{Frozen, tracked};
use crate::matmul::{MatmulOps, finish};
use crate::norm::{NormOps, normalised};
use crate::words::words_at;

/// The buffers of a weight as integer tensors; where absmax is not nested, the last two are the book again.
#[derive(Clone, ExtensionType)]
pub(crate) struct Words<B: Backend> {
    pub(crate) codes: IntTensor<B>,
    pub(crate) absmax: IntTensor<B>,
    pub(crate) book: IntTensor<B>,
    pub(crate) nested_book: IntTensor<B>,
    pub(crate) scales: IntTensor<B>,
}

/// What remains of a product without its tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Nf4Spec {
    pub(crate) weight: Weight,
    pub(crate) dtype: DType,
    pub(crate) activation: Option<Activation>,
    pub(crate) glu: bool,
    pub(crate) norm: Option<NormProblem>,
}

/// What of a weight lies in an order.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Part {
    Codes,
    Absmax,
}

#[backend_extension(Cube, Autodiff)]
pub(crate) trait Nf4Ops: NormOps {
    /// x is `[m, k]`, and everything else that of a validated call.
    fn nf4_product(
        x: FloatTensor<Self>,
        #[extension_type] words: Words<Self>,
        #[extension_type] parts: Parts<Self>,
        spec: Nf4Spec,
        call: Call,
    ) -> FloatTensor<Self>;

    /// The dense weight `[n, k]`.
    fn nf4_dequantize(
        #[extension_type] words: Words<Self>,
        weight: Weight,
        dtype: DType,
        call: Call,
    ) -> FloatTensor<Self>;

    /// `values` as `weight`, which lies in rows.
    fn nf4_quantize(
        values: FloatTensor<Self>,
        weight: Weight,
        book: CodeBook,
        call: Call,
    ) -> Words<Self>;

    /// Two weights as one, of which the second's rows come last.
    fn nf4_join(
        #[extension_type] first: Words<Self>,
        #[extension_type] second: Words<Self>,
        weights: [Weight; 2],
        call: Call,
    ) -> Words<Self>;

    /// Part of the same weight in another order, which is valid.
    fn nf4_reorder(
        part: IntTensor<Self>,
        which: Part,
        weight: Weight,
        order: Order,
        call: Call,
    ) -> IntTensor<Self>;
}

impl Words<CubeBackend> {
    fn buffers(&self, weight: Weight) -> WeightBuffers {
        let handle = |t: &CubeTensor| into_contiguous(t.clone()).handle;
        WeightBuffers {
            codes: handle(&self.codes),
            absmax: handle(&self.absmax),
            book: handle(&self.book),
            nested: weight.nested.then(|| NestedBuffers {
                book: handle(&self.nested_book),
                scales: handle(&self.scales),
            }),
        }
    }

    /// The buffers of `weight`, on the device of `like`.
    fn of(buffers: WeightBuffers, weight: Weight, like: &CubeTensor) -> Self {
        let tensor = |handle, words| words_at(handle, words, like);
        let book = tensor(buffers.book, 16);
        let (nested_book, scales) = match buffers.nested {
            Some(nested) => (tensor(nested.book, 256), tensor(nested.scales, 2 * weight.groups())),
            None => (book.clone(), book.clone()),
        };
        Self {
            codes: tensor(buffers.codes, weight.words()),
            absmax: tensor(buffers.absmax, weight.absmax_bytes() / 4),
            book,
            nested_book,
            scales,
        }
    }
}

impl Nf4Ops for CubeBackend {
    fn nf4_product(
        x: CubeTensor,
        words: Words<Self>,
        parts: Parts<Self>,
        spec: Nf4Spec,
        call: Call,
    ) -> CubeTensor {
        let x = into_contiguous(x);
        let m = x.meta.shape()[0];
        let n = spec.weight.n as usize / if spec.glu { 2 } else { 1 };
        let out = empty_like(&x, [m, n], spec.dtype);
        let launched = call.ctx.device(&out.device).and_then(|device| {
            let problem = problem(m, &spec, &parts)?;
            let takes = problem.norm.is_none() || Nf4Matmul::takes_norm(device.profile(), &problem);
            let (x, parts, norm) = if takes {
                let norm = parts.norm_buffers(spec.norm);
                (x, parts, norm)
            } else {
                let (x, parts) = normalised(x, parts, spec.norm, &call);
                (x, parts, None)
            };
            let problem = Nf4MatmulProblem { norm: problem.norm.filter(|_| takes), ..problem };
            let config = call.ctx.config::<Nf4Matmul>(&device, &problem)?;
            let operands = Nf4MatmulOperands {
                x: x.handle.clone(),
                weight: words.buffers(spec.weight),
                out: out.handle.clone(),
                epilogue: parts.buffers(),
                norm,
            };
            let scratch = Nf4Matmul::scratch(&device, &problem, &config);
            launch::<Nf4Matmul>(&device, &problem, &config, &operands, scratch.as_ref());
            Ok(())
        });
        if let Err(e) = launched {
            call.fail(e);
        }
        out
    }

    fn nf4_dequantize(words: Words<Self>, weight: Weight, dtype: DType, call: Call) -> CubeTensor {
        let out = empty_like(&words.codes, [weight.n as usize, weight.k as usize], dtype);
        let launched = call.ctx.device(&out.device).and_then(|device| {
            let problem = DequantizeProblem { weight, out: dtype };
            let config = call.ctx.config::<Nf4Dequantize>(&device, &problem)?;
            let operands =
                DequantizeOperands { weight: words.buffers(weight), out: out.handle.clone() };
            launch::<Nf4Dequantize>(&device, &problem, &config, &operands, None);
            Ok(())
        });
        if let Err(e) = launched {
            call.fail(e);
        }
        out
    }

    fn nf4_quantize(values: CubeTensor, weight: Weight, book: CodeBook, call: Call) -> Words<Self> {
        let values = into_contiguous(values);
        let dtype = crate::call::float_of(values.dtype).expect("validated");
        let made = call
            .ctx
            .device(&values.device)
            .and_then(|device: Device| Ok(quantize(&device, &values.handle, weight, dtype, book)?));
        match made {
            Ok(buffers) => Words::of(buffers, weight, &values),
            Err(e) => {
                call.fail(e);
                // Never seen: the caller asks for the failure first.
                let nothing = || empty_like(&values, [0], DType::F32);
                let [codes, absmax, book] = [nothing(), nothing(), nothing()];
                Words { codes, absmax, book, nested_book: nothing(), scales: nothing() }
            }
        }
    }

    fn nf4_join(
        first: Words<Self>,
        second: Words<Self>,
        weights: [Weight; 2],
        call: Call,
    ) -> Words<Self> {
        let [one, two] = weights;
        let made = call.ctx.device(&first.codes.device).and_then(|device| {
            let parts = [(one, &first.buffers(one)), (two, &second.buffers(two))];
            Ok(join(&device, &parts)?)
        });
        match made {
            Ok((weight, buffers)) => Words::of(buffers, weight, &first.codes),
            Err(e) => {
                call.fail(e);
                first
            }
        }
    }

    fn nf4_reorder(
        part: CubeTensor,
        which: Part,
        weight: Weight,
        order: Order,
        call: Call,
    ) -> CubeTensor {
        let part = into_contiguous(part);
        let device = match call.ctx.device(&part.device) {
            Ok(device) => device,
            Err(e) => {
                call.fail(e);
                return part;
            }
        };
        let ordered = Weight { order, ..weight };
        let (handle, words) = match which {
            Part::Codes => (reorder_codes(&device, weight, &part.handle, order), ordered.words()),
            Part::Absmax => {
                let made = reorder_absmax(&device, weight, &part.handle, order);
                (made, ordered.absmax_bytes() / 4)
            }
        };
        words_at(handle, words, &part)
    }
}

fn problem(
    m: usize,
    spec: &Nf4Spec,
    parts: &Parts<CubeBackend>,
) -> Result<Nf4MatmulProblem, OpError> {
    let m = u32::try_from(m).map_err(|_| OpError::TooLarge(m))?;
    let epilogue = Epilogue {
        bias: parts.bias.is_present(),
        activation: spec.activation,
        gate: parts.gate.is_present(),
        residual: parts.residual.is_present(),
    };
    let plain = Nf4MatmulProblem::new(m, spec.weight, spec.dtype)?;
    let problem = if spec.glu { plain.gated_by_half()? } else { plain };
    Ok(Nf4MatmulProblem { epilogue, norm: spec.norm.map(|norm| norm.kind), ..problem })
}

impl<B: Nf4Ops> Frozen<B> for (Words<B>, Nf4Spec) {
    fn dtype(&self) -> DType {
        self.1.dtype
    }

    fn dense(self, call: Call) -> FloatTensor<B> {
        let (words, spec) = self;
        B::nf4_dequantize(words, spec.weight, spec.dtype, call)
    }
}

impl<B: Nf4Ops + MatmulOps, C: CheckpointStrategy> Nf4Ops for Autodiff<B, C> {
    fn nf4_product(
        x: FloatTensor<Self>,
        words: Words<Self>,
        parts: Parts<Self>,
        spec: Nf4Spec,
        call: Call,
    ) -> FloatTensor<Self> {
        if ![&x].into_iter().chain(parts.tensors()).any(|t| t.is_tracked()) {
            let (x, words, parts) = (Self::inner(x), inner_words(words), parts.map(Self::inner));
            return Self::from_inner(B::nf4_product(x, words, parts, spec, call));
        }
        let (x, parts) = normalised(x, parts, spec.norm, &call);
        let spec = Nf4Spec { norm: None, ..spec };
        let Parts { bias, gate, residual, .. } = parts;
        let [bias, gate, residual] = [bias, gate, residual].map(Optional::into_option);
        if spec.glu || spec.activation.is_some() || gate.is_some() || residual.is_some() {
            let bare = Nf4Spec { activation: None, glu: false, ..spec };
            let sum = Self::nf4_product(x, words, Parts::bias(bias), bare, call);
            return finish_gated::<Self>(sum, gate, residual, &spec);
        }
        let (words, ctx) = (inner_words(words), call.ctx.clone());
        tracked::<B, C, _>(x, bias, (words.clone(), spec), &ctx, |x, parts| {
            B::nf4_product(x, words, parts, spec, call)
        })
    }

    fn nf4_dequantize(
        words: Words<Self>,
        weight: Weight,
        dtype: DType,
        call: Call,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::nf4_dequantize(inner_words(words), weight, dtype, call))
    }

    fn nf4_quantize(
        values: FloatTensor<Self>,
        weight: Weight,
        book: CodeBook,
        call: Call,
    ) -> Words<Self> {
        outer_words(B::nf4_quantize(Self::inner(values), weight, book, call))
    }

    fn nf4_join(
        first: Words<Self>,
        second: Words<Self>,
        weights: [Weight; 2],
        call: Call,
    ) -> Words<Self> {
        outer_words(B::nf4_join(inner_words(first), inner_words(second), weights, call))
    }

    fn nf4_reorder(
        part: IntTensor<Self>,
        which: Part,
        weight: Weight,
        order: Order,
        call: Call,
    ) -> IntTensor<Self> {
        B::nf4_reorder(part, which, weight, order, call)
    }
}

fn inner_words<B: Backend, C: CheckpointStrategy>(words: Words<Autodiff<B, C>>) -> Words<B> {
    let Words { codes, absmax, book, nested_book, scales } = words;
    Words { codes, absmax, book, nested_book, scales }
}

fn outer_words<B: Backend, C: CheckpointStrategy>(words: Words<B>) -> Words<Autodiff<B, C>> {
    let Words { codes, absmax, book, nested_book, scales } = words;
    Words { codes, absmax, book, nested_book, scales }
}

/// The rest of an epilogue, by ordinary ops; `sum` has the columns of both matrices of two.
fn finish_gated<B: Backend>(
    sum: FloatTensor<B>,
    gate: Option<FloatTensor<B>>,
    residual: Option<FloatTensor<B>>,
    spec: &Nf4Spec,
) -> FloatTensor<B> {
    if !spec.glu {
        return finish::<B>(sum, spec.activation, gate, residual);
    }
    let [m, both] = [sum.shape()[0], sum.shape()[1]];
    let half = |from: usize| {
        let slices = [(0..m).into(), (from..from + both / 2).into()];
        B::float_slice(sum.clone(), &slices)
    };
    let first = finish::<B>(half(0), spec.activation, gate, None);
    let out = B::float_mul(first, half(both / 2));
    match residual {
        Some(residual) => B::float_add(out, residual),
        None => out,
    }
}
