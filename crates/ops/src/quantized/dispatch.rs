//! The kernels of quantised weights behind Burn's dispatch. `kernels::quantized` selects the kernel by
//! format.

use arch::{DType, Device};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;
use kernels::matmul::{Activation, Epilogue};
use kernels::norm::NormProblem;
use kernels::quantized::{Launcher, QuantizedMatmul, QuantizedMatmulOperands, Weight};
use tune::Kernel;

use crate::call::{Call, Parts, empty_like, float_of, result_like, size_of};
use crate::int32_buffers::int32_tensor;
use crate::norm::{NormOps, normalised};
use crate::{Ctx, OpError};

/// Buffers of a weight as integer tensors; the codes stand in for buffers that its format lacks.
#[derive(Clone, ExtensionType)]
pub(crate) struct PackedWeight<B: Backend> {
    pub(super) codes: IntTensor<B>,
    pub(super) absmax: IntTensor<B>,
    pub(super) codebook: IntTensor<B>,
    pub(super) nested_codebook: IntTensor<B>,
    pub(super) scales: IntTensor<B>,
}

/// Attributes of a matmul apart from its tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spec {
    pub(super) weight: Weight,
    pub(super) dtype: DType,
    pub(super) activation: Option<Activation>,
    pub(super) glu: bool,
    pub(super) norm: Option<NormProblem>,
}

/// A buffer with several possible orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Buffer {
    Codes,
    Scales,
}

#[backend_extension(Cube, Autodiff)]
pub(crate) trait QuantizedOps: NormOps {
    /// Runs a validated matmul with x `[m, k]`.
    fn multiply_quantized(
        x: FloatTensor<Self>,
        #[extension_type] packed: PackedWeight<Self>,
        #[extension_type] parts: Parts<Self>,
        spec: Spec,
        call: Call,
    ) -> FloatTensor<Self>;

    /// Dequantises the weight to `[n, k]`.
    fn dequantize_weight(
        #[extension_type] packed: PackedWeight<Self>,
        weight: Weight,
        dtype: DType,
        call: Call,
    ) -> FloatTensor<Self>;

    /// Quantises `values` to `weight`, in row order.
    fn quantize_weight(values: FloatTensor<Self>, weight: Weight, call: Call)
    -> PackedWeight<Self>;

    /// Joins two weights, with the rows of the second last.
    fn join_weights(
        #[extension_type] first: PackedWeight<Self>,
        #[extension_type] second: PackedWeight<Self>,
        weights: [Weight; 2],
        call: Call,
    ) -> PackedWeight<Self>;

    /// Reorders a buffer from the order of the first weight to that of the second.
    fn reorder_weight(
        tensor: IntTensor<Self>,
        buffer: Buffer,
        weights: [Weight; 2],
        call: Call,
    ) -> IntTensor<Self>;
}

impl<B: Backend> PackedWeight<B> {
    /// Takes the buffers of a weight in order.
    pub(super) fn new(buffers: Vec<IntTensor<B>>) -> Self {
        let mut buffers = buffers.into_iter();
        let codes = buffers.next().expect("every weight has codes");
        let mut next = || buffers.next().unwrap_or_else(|| codes.clone());
        let [absmax, codebook, nested_codebook, scales] = [next(), next(), next(), next()];
        Self { codes, absmax, codebook, nested_codebook, scales }
    }

    /// Returns the buffers that `weight` has, in order.
    pub(super) fn buffers(self, weight: &Weight) -> Vec<IntTensor<B>> {
        let Self { codes, absmax, codebook, nested_codebook, scales } = self;
        let all = [codes, absmax, codebook, nested_codebook, scales];
        all.into_iter().take(weight.buffer_bytes().len()).collect()
    }
}

impl PackedWeight<CubeBackend> {
    fn handles(self, weight: &Weight) -> Vec<Handle> {
        self.buffers(weight).into_iter().map(|tensor| into_contiguous(tensor).handle).collect()
    }

    /// Wraps the buffers of `weight`, on the device of `like`.
    fn from_handles(handles: Vec<Handle>, weight: &Weight, like: &CubeTensor) -> Self {
        let tensor = |(handle, bytes): (_, u64)| int32_tensor(handle, bytes.div_ceil(4), like);
        Self::new(handles.into_iter().zip(weight.buffer_bytes()).map(tensor).collect())
    }
}

impl Launcher for Ctx {
    type Error = OpError;

    fn launch<K: Kernel>(
        &self,
        device: &Device,
        problem: &K::Problem,
        operands: &K::Operands,
    ) -> Result<(), OpError> {
        let config = self.config::<K>(device, problem)?;
        let scratch = K::scratch(device, problem, &config);
        Ctx::launch::<K>(self, device, problem, &config, operands, scratch.as_ref());
        Ok(())
    }
}

impl QuantizedOps for CubeBackend {
    fn multiply_quantized(
        x: CubeTensor,
        packed: PackedWeight<Self>,
        parts: Parts<Self>,
        spec: Spec,
        call: Call,
    ) -> CubeTensor {
        let x = into_contiguous(x);
        let m = x.meta.shape()[0];
        let n = spec.weight.shape()[0] as usize / if spec.glu { 2 } else { 1 };
        let out = result_like(&x, [m, n], spec.dtype);
        let launched = call.ctx.device(&out.device).and_then(|device| {
            let epilogue = Epilogue {
                bias: parts.bias.is_present(),
                activation: spec.activation,
                gate: parts.gate.is_present(),
                residual: parts.residual.is_present(),
                ..Epilogue::default()
            };
            let norm = spec.norm.map(|norm| norm.kind);
            let (m, dtype, glu) = (size_of(m)?, spec.dtype, spec.glu);
            let mut product = QuantizedMatmul { m, dtype, epilogue, glu, norm };
            let takes = norm.is_none() || spec.weight.takes_norm(device.profile(), &product)?;
            let (x, parts, norm) = if takes {
                let norm = parts.norm_buffers(spec.norm);
                (x, parts, norm)
            } else {
                product.norm = None;
                let (x, parts) = normalised(x, parts, spec.norm, &call);
                (x, parts, None)
            };
            let operands = QuantizedMatmulOperands {
                x: x.handle.clone(),
                weight: packed.handles(&spec.weight),
                out: out.handle.clone(),
                epilogue: parts.buffers(),
                norm,
            };
            spec.weight.multiply(&call.ctx, &device, &product, operands)
        });
        if let Err(e) = launched {
            call.fail(e);
        }
        out
    }

    fn dequantize_weight(
        packed: PackedWeight<Self>,
        weight: Weight,
        dtype: DType,
        call: Call,
    ) -> CubeTensor {
        let shape = weight.shape().map(|size| size as usize);
        let out = empty_like(&packed.codes, shape, dtype);
        let launched = call.ctx.device(&out.device).and_then(|device| {
            let buffers = packed.handles(&weight);
            weight.dequantize(&call.ctx, &device, &buffers, &out.handle, dtype)
        });
        if let Err(e) = launched {
            call.fail(e);
        }
        out
    }

    fn quantize_weight(values: CubeTensor, weight: Weight, call: Call) -> PackedWeight<Self> {
        let values = into_contiguous(values);
        let dtype = float_of(values.dtype).expect("validated");
        let made = call
            .ctx
            .device(&values.device)
            .and_then(|device| Ok(weight.quantize(&device, &values.handle, dtype)?));
        match made {
            Ok(handles) => PackedWeight::from_handles(handles, &weight, &values),
            Err(e) => {
                call.fail(e);
                // Never used: the caller checks for the failure first.
                PackedWeight::new(vec![empty_like(&values, [0], DType::F32)])
            }
        }
    }

    fn join_weights(
        first: PackedWeight<Self>,
        second: PackedWeight<Self>,
        weights: [Weight; 2],
        call: Call,
    ) -> PackedWeight<Self> {
        let [one, two] = &weights;
        let made = call.ctx.device(&first.codes.device).and_then(|device| {
            let buffers = (first.clone().handles(one), second.handles(two));
            let joined = Weight::joined([one, two])?;
            Ok((joined, Weight::join(&device, [(one, &buffers.0), (two, &buffers.1)])?))
        });
        match made {
            Ok((weight, handles)) => PackedWeight::from_handles(handles, &weight, &first.codes),
            Err(e) => {
                call.fail(e);
                first
            }
        }
    }

    fn reorder_weight(
        tensor: CubeTensor,
        buffer: Buffer,
        [from, to]: [Weight; 2],
        call: Call,
    ) -> CubeTensor {
        let tensor = into_contiguous(tensor);
        match call.ctx.device(&tensor.device) {
            Ok(device) => {
                let index = buffer as usize;
                let made = from.reorder(&device, &to, index, &tensor.handle);
                int32_tensor(made, to.buffer_bytes()[index].div_ceil(4), &tensor)
            }
            Err(e) => {
                call.fail(e);
                tensor
            }
        }
    }
}
