//! Device memory that a training step keeps. Tests run one at a time, in a process of their own, because
//! every tensor counts.

use std::sync::Mutex;

use burn::tensor::{Device, Distribution, Tensor};
use ops::{
    AttentionOptions, Ctx, Epilogue, OpError, QuantizedWeight, WeightFormat, attention,
    quantized_linear,
};

type Layer<'a> = &'a dyn Fn(usize, Tensor<2>) -> Result<Tensor<2>, OpError>;

static ALONE: Mutex<()> = Mutex::new(());

fn reserved(device: &Device) -> u64 {
    device.memory_pool_usage().expect("CubeCL counts").bytes_reserved
}

/// A stored score matrix of the longer sequence would take 16 MiB; everything else is under 1 MiB.
#[test]
fn attention_stores_no_scores() {
    let _alone = ALONE.lock().expect("the other test passed");
    let (device, ctx) = (Device::cpu().autodiff(), Ctx::default());
    let of_step = |seq: usize| {
        let make =
            || Tensor::<4>::random([1, 1, seq, 8], Distribution::Default, &device).require_grad();
        let (q, k, v) = (make(), make(), make());
        let options = AttentionOptions { causal: true, ..AttentionOptions::default() };
        let out = attention(&ctx, q.clone(), k, v, None, None, options).expect("valid");
        let gradients = out.sum().backward();
        let gradient = q.grad(&gradients).expect("tracked").into_data();
        assert_eq!(gradient.num_elements(), seq * 8);
        reserved(&device)
    };
    let short = of_step(64);
    let long = of_step(2048);
    assert!(long < short + (8 << 20), "{short} bytes grew to {long}");
}

/// A dense weight takes 4 MiB, the rows of a layer 32 KiB. A step over 16 layers takes no more than one over
/// 4: no dense weight is saved, and each reuses the memory of the one before.
#[test]
fn frozen_weights_are_dense_one_after_the_other() {
    const SIZE: usize = 1024;
    const DENSE: u64 = 4 << 20;
    let _alone = ALONE.lock().expect("the other test passed");
    let (plain, ctx) = (Device::cpu(), Ctx::default());
    let device = plain.clone().autodiff();
    let make = || Tensor::<2>::random([SIZE; 2], Distribution::Default, &plain);
    let quantize = |format| QuantizedWeight::quantize(&ctx, make(), format).expect("finite");
    let weights: Vec<Vec<_>> =
        WeightFormat::all().map(|format| (0..16).map(|_| quantize(format)).collect()).collect();
    let step = |depth: usize, layer: Layer<'_>| {
        let x = Tensor::<2>::random([8, SIZE], Distribution::Default, &device).require_grad();
        let out = (0..depth).fold(x.clone(), |x, at| layer(at, x).expect("valid") / SIZE as f32);
        let gradient = x.grad(&out.sum().backward()).expect("tracked").into_data();
        assert_eq!(gradient.num_elements(), 8 * SIZE);
        reserved(&device)
    };
    let before = reserved(&device);
    for weights in &weights {
        let layer: Layer<'_> =
            &|at, x| quantized_linear(&ctx, x, &weights[at], Epilogue::default());
        let few = step(4, layer);
        let all = step(16, layer);
        assert!(few <= before + 4 * DENSE, "{before} bytes grew to {few}");
        assert!(all < few + DENSE, "{few} bytes grew to {all}");
    }
}
