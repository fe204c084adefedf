//! Memory of one training step of attention by the length of the sequence: `[1, 16, seq, 128]` in bf16,
//! causal. What is reserved on the device after the step is its peak. On an H200 it is 76, 140, 268 and 653 MiB
//! for 2048 to 16384 positions, where one matrix of scores would be 128 to 8192.
//!
//! `cargo run --release -p ops --example attention_memory -- cuda`

use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use ops::{AttentionOptions, Ctx, OpError, attention};

fn main() -> Result<(), OpError> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "cpu".to_owned());
    let (device, longest) = match name.as_str() {
        "cuda" => (Device::cuda(0), 16_384usize),
        "vulkan" => (Device::vulkan(burn::tensor::DeviceKind::default()), 4096),
        "cpu" => (Device::cpu(), 512),
        _ => {
            eprintln!("unknown device `{name}`\nhint: one of cuda, vulkan, cpu");
            std::process::exit(2);
        }
    };
    let (device, ctx) = (device.autodiff(), Ctx::default());
    let mut seq = longest / 8;
    while seq <= longest {
        device.memory_cleanup();
        let make = || {
            let shape = [1, 16, seq, 128];
            let noise = Tensor::<4>::random(shape, Distribution::Default, &device);
            noise.cast(FloatDType::BF16).require_grad()
        };
        let (q, k, v) = (make(), make(), make());
        let options = AttentionOptions { causal: true, ..AttentionOptions::default() };
        let out = attention(&ctx, q.clone(), k, v, None, None, options)?;
        let gradients = out.sum().backward();
        // Reading waits for everything before it.
        let gradient = q.grad(&gradients).map(|g| g.sum().into_data());
        assert!(gradient.is_some(), "q is tracked");
        let reserved = device.memory_pool_usage().map_or(0, |usage| usage.bytes_reserved);
        let scores = 16 * seq * seq * 2;
        println!(
            "seq {seq:>6}: {:>6} MiB reserved; one matrix of scores would be {:>6} MiB",
            reserved >> 20,
            scores >> 20
        );
        seq *= 2;
    }
    Ok(())
}
