//! Gradients of a matmul with a frozen weight: by x `[m, k]` and by bias `[n]`. Nothing of the weight's dense shape is kept
//! for them.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend};

use super::dispatch::{QuantizedOps, Spec, Words};
use crate::Ctx;
use crate::call::{Call, Parts, summed_over_rows};
use crate::matmul::{MatmulOps, product_of};

/// `x · wᵀ + bias` as a node of the graph.
pub(super) fn tracked<B: QuantizedOps + MatmulOps, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    bias: Option<FloatTensor<Autodiff<B, C>>>,
    words: Words<B>,
    spec: Spec,
    call: Call,
) -> FloatTensor<Autodiff<B, C>> {
    let saved = Saved { words: words.clone(), spec, biased: bias.is_some(), ctx: call.ctx.clone() };
    let nodes = [x.node(), bias.as_ref().unwrap_or(&x).node()];
    let parts = Parts::bias(bias.map(|b| b.into_primitive()));
    let multiply = |x| B::multiply_quantized(x, words, parts, spec, call);
    match Product.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(saved, multiply(x.into_primitive())),
        OpsKind::UnTracked(prep) => prep.finish(multiply(x.into_primitive())),
    }
}

/// Parents of a product's node: x, and bias or once more x where there is none.
#[derive(Debug)]
struct Product;

/// What the gradients need.
#[derive(Clone)]
struct Saved<B: Backend> {
    words: Words<B>,
    spec: Spec,
    biased: bool,
    ctx: Ctx,
}

impl<B: Backend> std::fmt::Debug for Saved<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Saved").field("biased", &self.biased).finish_non_exhaustive()
    }
}

impl<B: QuantizedOps + MatmulOps> Backward<B, 2> for Product {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Saved<B>, 2>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [to_x, to_bias] = ops.parents;
        let Saved { words, spec: Spec { weight, dtype, .. }, biased, ctx } = ops.state;
        let dout = gradients.consume::<B>(&ops.node);
        if let Some(node) = to_x {
            let call = Call::of(&ctx);
            let dense = B::dequantize_weight(words, weight, dtype, call.clone());
            // Burn's backward pass has no way to return an error.
            if let Some(e) = call.failed() {
                panic!("the gradient of a product failed: {e}");
            }
            let gradient = product_of::<B>(dout.clone(), dense, dtype, &ctx);
            gradients.register::<B>(node.id, gradient);
        }
        if let (Some(node), true) = (to_bias, biased) {
            gradients.register::<B>(node.id, summed_over_rows::<B>(dout));
        }
    }
}
