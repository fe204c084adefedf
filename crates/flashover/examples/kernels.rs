//! Runs kernels on Burn tensors: three steps of Burn's optimizer on a Flashover layer, and attention.
//!
//! `cargo run --release --example kernels`

use flashover::burn::optim::{AdamWConfig, GradientsParams};
use flashover::burn::tensor::{Device, Distribution, Tensor};
use flashover::nn::Linear;
use flashover::ops::{Activation, AttentionOptions, Ctx, attention};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let ctx = Ctx::default();
    let device = Device::cpu().autodiff(); // or `Device::cuda(0)`

    let x = Tensor::<2>::random([16, 64], Distribution::Default, &device);
    let mut layer = Linear::new(64, 32, true, &device);
    let mut optimizer = AdamWConfig::new().init();
    for step in 0..3 {
        let loss = layer.forward(&ctx, x.clone(), Some(Activation::Silu))?.powi_scalar(2).mean();
        println!("step {step}: loss {}", loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &layer);
        layer = optimizer.step(1e-2, layer, gradients);
    }

    let [q, k, v] = [8, 2, 2]
        .map(|heads| Tensor::<4>::random([1, heads, 128, 64], Distribution::Default, &device));
    let options = AttentionOptions { causal: true, ..AttentionOptions::default() };
    println!("attention {:?}", attention(&ctx, q, k, v, None, None, options)?.dims());
    Ok(())
}
