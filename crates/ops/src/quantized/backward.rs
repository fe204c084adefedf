//! Quantised matmuls under Burn's autodiff.
//!
//! Gradients of a matmul with a frozen weight: of x `[m, k]` and of bias `[n]`. No dense weight is saved for
//! them.

use arch::DType;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, AutodiffBackend, Backend, TensorMetadata};
use kernels::quantized::Weight;

use super::dispatch::{Buffer, PackedWeight, QuantizedOps, Spec};
use crate::Ctx;
use crate::call::{Call, Optional, Parts, summed_over_rows};
use crate::matmul::{MatmulOps, finish, product_of};
use crate::norm::normalised;

impl<B: QuantizedOps + MatmulOps, C: CheckpointStrategy> QuantizedOps for Autodiff<B, C> {
    fn multiply_quantized(
        x: FloatTensor<Self>,
        packed: PackedWeight<Self>,
        parts: Parts<Self>,
        spec: Spec,
        call: Call,
    ) -> FloatTensor<Self> {
        if ![&x].into_iter().chain(parts.tensors()).any(|t| t.is_tracked()) {
            let (x, packed, parts) = (Self::inner(x), inner_packed(packed), parts.map(Self::inner));
            return Self::from_inner(B::multiply_quantized(x, packed, parts, spec, call));
        }
        let (x, parts) = normalised(x, parts, spec.norm, &call);
        let spec = Spec { norm: None, ..spec };
        let Parts { bias, gate, residual, .. } = parts;
        let [bias, gate, residual] = [bias, gate, residual].map(Optional::into_option);
        if spec.glu || spec.activation.is_some() || gate.is_some() || residual.is_some() {
            let bare = Spec { activation: None, glu: false, ..spec };
            let sum = Self::multiply_quantized(x, packed, Parts::bias(bias), bare, call);
            return finish_gated::<Self>(sum, gate, residual, &spec);
        }
        tracked::<B, C>(x, bias, inner_packed(packed), spec, call)
    }

    fn dequantize_weight(
        packed: PackedWeight<Self>,
        weight: Weight,
        dtype: DType,
        call: Call,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::dequantize_weight(inner_packed(packed), weight, dtype, call))
    }

    fn quantize_weight(
        values: FloatTensor<Self>,
        weight: Weight,
        call: Call,
    ) -> PackedWeight<Self> {
        outer_packed(B::quantize_weight(Self::inner(values), weight, call))
    }

    fn join_weights(
        first: PackedWeight<Self>,
        second: PackedWeight<Self>,
        weights: [Weight; 2],
        call: Call,
    ) -> PackedWeight<Self> {
        outer_packed(B::join_weights(inner_packed(first), inner_packed(second), weights, call))
    }

    fn reorder_weight(
        tensor: IntTensor<Self>,
        buffer: Buffer,
        weights: [Weight; 2],
        call: Call,
    ) -> IntTensor<Self> {
        B::reorder_weight(tensor, buffer, weights, call)
    }
}

fn inner_packed<B: Backend, C: CheckpointStrategy>(
    packed: PackedWeight<Autodiff<B, C>>,
) -> PackedWeight<B> {
    let PackedWeight { codes, absmax, codebook, nested_codebook, scales } = packed;
    PackedWeight { codes, absmax, codebook, nested_codebook, scales }
}

fn outer_packed<B: Backend, C: CheckpointStrategy>(
    packed: PackedWeight<B>,
) -> PackedWeight<Autodiff<B, C>> {
    let PackedWeight { codes, absmax, codebook, nested_codebook, scales } = packed;
    PackedWeight { codes, absmax, codebook, nested_codebook, scales }
}

/// Applies the rest of an epilogue with ordinary ops; for a gated matmul, `sum` has the columns of both
/// matrices.
fn finish_gated<B: Backend>(
    sum: FloatTensor<B>,
    gate: Option<FloatTensor<B>>,
    residual: Option<FloatTensor<B>>,
    spec: &Spec,
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

/// Computes `x · wᵀ + bias` as a node of the graph.
fn tracked<B: QuantizedOps + MatmulOps, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    bias: Option<FloatTensor<Autodiff<B, C>>>,
    packed: PackedWeight<B>,
    spec: Spec,
    call: Call,
) -> FloatTensor<Autodiff<B, C>> {
    let saved =
        Saved { packed: packed.clone(), spec, biased: bias.is_some(), ctx: call.ctx.clone() };
    let nodes = [x.node(), bias.as_ref().unwrap_or(&x).node()];
    let parts = Parts::bias(bias.map(|b| b.into_primitive()));
    let multiply = |x| B::multiply_quantized(x, packed, parts, spec, call);
    match QuantizedMatmulBackward.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(saved, multiply(x.into_primitive())),
        OpsKind::UnTracked(prep) => prep.finish(multiply(x.into_primitive())),
    }
}

/// Parents of a matmul's node: x and bias; x stands in for an absent bias.
#[derive(Debug)]
struct QuantizedMatmulBackward;

/// State that the gradients need.
#[derive(Clone)]
struct Saved<B: Backend> {
    packed: PackedWeight<B>,
    spec: Spec,
    biased: bool,
    ctx: Ctx,
}

impl<B: Backend> std::fmt::Debug for Saved<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Saved").field("biased", &self.biased).finish_non_exhaustive()
    }
}

impl<B: QuantizedOps + MatmulOps> Backward<B, 2> for QuantizedMatmulBackward {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Saved<B>, 2>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [to_x, to_bias] = ops.parents;
        let Saved { packed, spec: Spec { weight, dtype, .. }, biased, ctx } = ops.state;
        let dout = gradients.consume::<B>(&ops.node);
        if let Some(node) = to_x {
            let call = Call::new(&ctx);
            let dense = B::dequantize_weight(packed, weight, dtype, call.clone());
            // Burn's backward pass cannot return an error.
            if let Some(e) = call.failed() {
                panic!("the backward pass of a matmul failed: {e}");
            }
            let gradient = product_of::<B>(dout.clone(), dense, dtype, &ctx);
            gradients.register::<B>(node.id, gradient);
        }
        if let (Some(node), true) = (to_bias, biased) {
            gradients.register::<B>(node.id, summed_over_rows::<B>(dout));
        }
    }
}
