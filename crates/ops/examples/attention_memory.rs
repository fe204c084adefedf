//! Measures the memory of one training step of attention by sequence length: `[1, 16, seq, 128]` in bf16,
//! causal, one JSON line per length. The bytes reserved after the step are its peak: eight tensors of the
//! sequence (q, k, v, the result, and their gradients), in pages of CubeCL's pools. On an H200 the peak is
//! 76, 140, 268 and 653 MiB for 2048, 4096, 8192 and 16384 positions; the last exceeds linear growth. One
//! score matrix alone would take 128 to 8192 MiB (`benches/baselines/cuda-sm90-132/attention_memory.jsonl`).
//!
//! `cargo run --release -p flashover-ops --example attention_memory -- cuda`

use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use ops::{AttentionOptions, Ctx, OpError, attention};

fn main() -> Result<(), OpError> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "cpu".to_owned());
    let (device, longest) = match name.as_str() {
        "cuda" => (Device::cuda(0), 16_384usize),
        "vulkan" => (Device::vulkan(burn::tensor::DeviceKind::default()), 4096),
        "cpu" => (Device::cpu(), 512),
        _ => {
            eprintln!("unknown device `{name}`\nhint: use one of cuda, vulkan, cpu");
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
        // Frees the temporaries of the inputs.
        device.sync().expect("a device that answers");
        device.memory_cleanup();
        let options = AttentionOptions { causal: true, ..AttentionOptions::default() };
        let out = attention(&ctx, q.clone(), k, v, None, None, options)?;
        let gradients = out.sum().backward();
        // The read waits for all earlier work.
        let gradient = q.grad(&gradients).map(|g| g.sum().into_data());
        assert!(gradient.is_some(), "q is tracked");
        let reserved = device.memory_pool_usage().map_or(0, |usage| usage.bytes_reserved);
        let (tensor, scores) = (16 * seq * 128 * 2, 16 * seq * seq * 2);
        println!(
            r#"{{"device":"{name}","seq":{seq},"reserved_bytes":{reserved},"tensor_bytes":{tensor},"scores_bytes":{scores}}}"#
        );
        seq *= 2;
    }
    Ok(())
}
