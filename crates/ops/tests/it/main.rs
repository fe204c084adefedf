//! Tests of ops on Burn's CPU device against the f64 reference, and of gradients against its finite
//! differences.

mod attention;
mod conv;
mod decode;
mod embed;
mod golden;
mod int8;
mod matmul;
mod nf4;
mod norm;
mod pool;
mod quantized;
mod rope;
mod training;
mod update_inputs;

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use reference::{Distribution, fill};

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.cast(FloatDType::F32).into_data().try_to_vec().expect("f32 values")
}

fn tensor<const D: usize>(shape: [usize; D], seed: u64, device: &Device) -> Tensor<D> {
    let values = fill(seed, shape.iter().product(), Distribution::Normal);
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Panics unless `got` equals `want` within the rounding of f32 sums.
fn close(got: &[f32], want: &[f64], what: &str) {
    let size = want.iter().fold(1.0f64, |m, v| m.max(v.abs()));
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        // Written so that NaN fails.
        assert!(error <= 2e-5 * size, "{what}: [{i}] is {got}, not {want}");
    }
}
