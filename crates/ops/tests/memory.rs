//! What a training step keeps on the device; alone in its process, because every tensor counts.

use burn::tensor::{Device, Distribution, Tensor};
use ops::{AttentionOptions, Ctx, attention};

/// A stored score matrix of the longer sequence has 16 MiB, everything else under 1 MiB.
#[test]
fn attention_stores_no_scores() {
    let (device, ctx) = (Device::cpu().autodiff(), Ctx::default());
    let reserved = |seq: usize| {
        let make =
            || Tensor::<4>::random([1, 1, seq, 8], Distribution::Default, &device).require_grad();
        let (q, k, v) = (make(), make(), make());
        let options = AttentionOptions { causal: true, ..AttentionOptions::default() };
        let out = attention(&ctx, q.clone(), k, v, None, None, options).expect("valid");
        let gradients = out.sum().backward();
        let gradient = q.grad(&gradients).expect("tracked").into_data();
        assert_eq!(gradient.num_elements(), seq * 8);
        device.memory_pool_usage().expect("CubeCL counts").bytes_reserved
    };
    let short = reserved(64);
    let long = reserved(2048);
    assert!(long < short + (8 << 20), "{short} bytes grew to {long}");
}
