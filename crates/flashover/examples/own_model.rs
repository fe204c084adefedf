//! Builds a model from `flashover::ops`: one transformer block with RMSNorm, causal attention and a gated MLP.
//!
//! `cargo run --release --example own_model`

use flashover::burn::tensor::{Device, Distribution, Tensor};
use flashover::nn::Linear;
use flashover::ops::{
    Activation, AttentionOptions, Ctx, Epilogue, NormKind, NormWeights, OpError, attention, linear,
    norm,
};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const HIDDEN: usize = HEADS * HEAD_DIM;
const MLP: usize = 3 * HIDDEN;

struct Block {
    attention_norm: Tensor<1>,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    mlp_norm: Tensor<1>,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(device: &Device) -> Self {
        let linear = |inputs, outputs| Linear::new(inputs, outputs, false, device);
        Self {
            attention_norm: Tensor::ones([HIDDEN], device),
            query: linear(HIDDEN, HIDDEN),
            key: linear(HIDDEN, KV_HEADS * HEAD_DIM),
            value: linear(HIDDEN, KV_HEADS * HEAD_DIM),
            output: linear(HIDDEN, HIDDEN),
            mlp_norm: Tensor::ones([HIDDEN], device),
            gate: linear(HIDDEN, MLP),
            up: linear(HIDDEN, MLP),
            down: linear(MLP, HIDDEN),
        }
    }

    /// Runs the block. x and the result are `[tokens, HIDDEN]`.
    fn forward(&self, ctx: &Ctx, x: Tensor<2>) -> Result<Tensor<2>, OpError> {
        let tokens = x.dims()[0];
        let normed = |x: &Tensor<2>, weight: &Tensor<1>| {
            let weights = NormWeights { weight: weight.clone(), bias: None };
            norm(ctx, x.clone(), weights, None, NormKind::Rms, 1e-5)
        };
        let heads =
            |x: Tensor<2>, heads: usize| x.reshape([1, tokens, heads, HEAD_DIM]).swap_dims(1, 2);
        let with_residual = |layer: &Linear, x: Tensor<2>, residual: Tensor<2>| {
            let epilogue = Epilogue { residual: Some(residual), ..Epilogue::default() };
            linear(ctx, x, layer.weight.val(), epilogue)
        };

        let h = normed(&x, &self.attention_norm)?;
        let q = heads(self.query.forward(ctx, h.clone(), None)?, HEADS);
        let k = heads(self.key.forward(ctx, h.clone(), None)?, KV_HEADS);
        let v = heads(self.value.forward(ctx, h, None)?, KV_HEADS);
        let causal = AttentionOptions { causal: true, ..AttentionOptions::default() };
        let a = attention(ctx, q, k, v, None, None, causal)?;
        let x = with_residual(&self.output, a.swap_dims(1, 2).reshape([tokens, HIDDEN]), x)?;

        let h = normed(&x, &self.mlp_norm)?;
        let up = self.up.forward(ctx, h.clone(), None)?;
        // Computes silu(h · gate) * up in one launch.
        let gated =
            Epilogue { activation: Some(Activation::Silu), gate: Some(up), ..Epilogue::default() };
        let h = linear(ctx, h, self.gate.weight.val(), gated)?;
        with_residual(&self.down, h, x)
    }
}

fn main() -> Result<(), OpError> {
    let (ctx, device) = (Ctx::default(), Device::cpu()); // or `Device::cuda(0)`
    let block = Block::new(&device);
    let x = Tensor::<2>::random([24, HIDDEN], Distribution::Default, &device);
    let y = block.forward(&ctx, x)?;
    println!("{:?}", y.dims());
    Ok(())
}
