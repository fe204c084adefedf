//! The kernels of 8-bit weights behind Burn's dispatch.

use arch::{DType, Device};
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, AutodiffBackend, Backend, ExtensionType, backend_extension};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels::int8::{
    Activations, DequantizeOperands, DequantizeProblem, Int8Dequantize, Int8Matmul,
    Int8MatmulOperands, Int8MatmulProblem, Weight, WeightBuffers, quantize,
};
use kernels::matmul::{Activation, Epilogue};
use tune::Kernel;

use crate::OpError;
use crate::call::{Call, Optional, Parts, empty_like, float_of, launch};
use crate::frozen::{Frozen, tracked};
use crate::matmul::{MatmulOps, finish};
use crate::words::words_at;

/// The buffers of a weight as integer tensors.
#[derive(Clone, ExtensionType)]
pub(crate) struct Words<B: Backend> {
    pub(crate) codes: IntTensor<B>,
    pub(crate) scb: IntTensor<B>,
}

/// What remains of a product without its tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spec {
    pub(super) weight: Weight,
    pub(super) activations: Option<Activations>,
    pub(super) dtype: DType,
    pub(super) activation: Option<Activation>,
}

#[backend_extension(Cube, Autodiff)]
pub(crate) trait Int8Ops: Backend {
    /// x is `[m, k]`, and everything else that of a validated call.
    fn int8_product(
        x: FloatTensor<Self>,
        #[extension_type] words: Words<Self>,
        #[extension_type] parts: Parts<Self>,
        spec: Spec,
        call: Call,
    ) -> FloatTensor<Self>;

    /// The dense weight `[n, k]`.
    fn int8_dequantize(
        #[extension_type] words: Words<Self>,
        weight: Weight,
        dtype: DType,
        call: Call,
    ) -> FloatTensor<Self>;

    fn int8_quantize(values: FloatTensor<Self>, weight: Weight, call: Call) -> Words<Self>;
}

impl Words<CubeBackend> {
    fn buffers(&self) -> WeightBuffers {
        let handle = |t: &CubeTensor| into_contiguous(t.clone()).handle;
        WeightBuffers { codes: handle(&self.codes), scb: handle(&self.scb) }
    }
}

impl Int8Ops for CubeBackend {
    fn int8_product(
        x: CubeTensor,
        words: Words<Self>,
        parts: Parts<Self>,
        spec: Spec,
        call: Call,
    ) -> CubeTensor {
        let x = into_contiguous(x);
        let m = x.meta.shape()[0];
        let out = empty_like(&x, [m, spec.weight.n as usize], spec.dtype);
        let launched = call.ctx.device(&out.device).and_then(|device| {
            let plain = problem(m, &spec, &parts)?;
            let problem = match spec.activations {
                Some(activations) => plain.rounded_where_faster(device.profile(), activations),
                None => plain,
            };
            let config = call.ctx.config::<Int8Matmul>(&device, &problem)?;
            let operands = Int8MatmulOperands {
                x: x.handle.clone(),
                weight: words.buffers(),
                out: out.handle.clone(),
                epilogue: parts.buffers(),
            };
            let scratch = Int8Matmul::scratch(&device, &problem, &config);
            launch::<Int8Matmul>(&device, &problem, &config, &operands, scratch.as_ref());
            Ok(())
        });
        if let Err(e) = launched {
            call.fail(e);
        }
        out
    }

    fn int8_dequantize(words: Words<Self>, weight: Weight, dtype: DType, call: Call) -> CubeTensor {
        let out = empty_like(&words.codes, [weight.n as usize, weight.k as usize], dtype);
        let launched = call.ctx.device(&out.device).and_then(|device| {
            let problem = DequantizeProblem { weight, out: dtype };
            let config = call.ctx.config::<Int8Dequantize>(&device, &problem)?;
            let operands = DequantizeOperands { weight: words.buffers(), out: out.handle.clone() };
            launch::<Int8Dequantize>(&device, &problem, &config, &operands, None);
            Ok(())
        });
        if let Err(e) = launched {
            call.fail(e);
        }
        out
    }

    fn int8_quantize(values: CubeTensor, weight: Weight, call: Call) -> Words<Self> {
        let values = into_contiguous(values);
        let dtype = float_of(values.dtype).expect("validated");
        let made = call
            .ctx
            .device(&values.device)
            .and_then(|device: Device| Ok(quantize(&device, &values.handle, weight, dtype)?));
        match made {
            Ok(WeightBuffers { codes, scb }) => Words {
                codes: words_at(codes, weight.words(), &values),
                scb: words_at(scb, u64::from(weight.n), &values),
            },
            Err(e) => {
                call.fail(e);
                // Never seen: the caller asks for the failure first.
                let nothing = || empty_like(&values, [0], DType::F32);
                Words { codes: nothing(), scb: nothing() }
            }
        }
    }
}

fn problem(
    m: usize,
    spec: &Spec,
    parts: &Parts<CubeBackend>,
) -> Result<Int8MatmulProblem, OpError> {
    let m = u32::try_from(m).map_err(|_| OpError::TooLarge(m))?;
    let epilogue = Epilogue {
        bias: parts.bias.is_present(),
        activation: spec.activation,
        gate: parts.gate.is_present(),
        residual: parts.residual.is_present(),
    };
    let plain = Int8MatmulProblem::new(m, spec.weight, spec.dtype)?;
    Ok(Int8MatmulProblem { epilogue, ..plain })
}

impl<B: Int8Ops> Frozen<B> for (Words<B>, Spec) {
    fn dtype(&self) -> DType {
        self.1.dtype
    }

    fn dense(self, call: Call) -> FloatTensor<B> {
        let (words, spec) = self;
        B::int8_dequantize(words, spec.weight, spec.dtype, call)
    }
}

impl<B: Int8Ops + MatmulOps, C: CheckpointStrategy> Int8Ops for Autodiff<B, C> {
    fn int8_product(
        x: FloatTensor<Self>,
        words: Words<Self>,
        parts: Parts<Self>,
        spec: Spec,
        call: Call,
    ) -> FloatTensor<Self> {
        let Words { codes, scb } = words;
        let inner = Words { codes, scb };
        if ![&x].into_iter().chain(parts.tensors()).any(|t| t.is_tracked()) {
            let (x, parts) = (Self::inner(x), parts.map(Self::inner));
            return Self::from_inner(B::int8_product(x, inner, parts, spec, call));
        }
        let Parts { bias, gate, residual, .. } = parts;
        let [bias, gate, residual] = [bias, gate, residual].map(Optional::into_option);
        if spec.activation.is_some() || gate.is_some() || residual.is_some() {
            let bare = Spec { activation: None, ..spec };
            let Words { codes, scb } = inner;
            let words = Words { codes, scb };
            let sum = Self::int8_product(x, words, Parts::bias(bias), bare, call);
            return finish::<Self>(sum, spec.activation, gate, residual);
        }
        let ctx = call.ctx.clone();
        tracked::<B, C, _>(x, bias, (inner.clone(), spec), &ctx, |x, parts| {
            B::int8_product(x, inner, parts, spec, call)
        })
    }

    fn int8_dequantize(
        words: Words<Self>,
        weight: Weight,
        dtype: DType,
        call: Call,
    ) -> FloatTensor<Self> {
        let Words { codes, scb } = words;
        Self::from_inner(B::int8_dequantize(Words { codes, scb }, weight, dtype, call))
    }

    fn int8_quantize(values: FloatTensor<Self>, weight: Weight, call: Call) -> Words<Self> {
        let Words { codes, scb } = B::int8_quantize(Self::inner(values), weight, call);
        Words { codes, scb }
    }
}
