//! Runs generated code of a small graph with every operator that calls our kernels.

use std::fs;

use burn::tensor::{Bytes, Device, Distribution, Tensor};
use flashover::onnx::{Graph, GraphOptions};

/// Code that [`onnx_build::generator`] generated.
#[expect(unreachable_pub, reason = "burn-onnx writes a model for a module that is public")]
mod example {
    include!("example/example.rs.in");
}

const FOLDER: &str = "tests/example";

#[test]
fn generated_code_computes_what_the_graph_computes() {
    let device = Device::flex();
    let bytes = fs::read(format!("{FOLDER}/example.bpk")).unwrap();
    let model = example::Model::from_bytes(Bytes::from_bytes_vec(bytes), &device);
    let x = Tensor::<4>::random([2, 3, 16, 16], Distribution::Normal(0.0, 1.0), &device);
    let (logits, scaled) = model.forward(x.clone());
    let here = flashover::Device::cpu().unwrap();
    let path = format!("{FOLDER}/example.onnx");
    let graph = Graph::open(path, &here, &GraphOptions::default()).unwrap();
    let want = graph.run(vec![x.into_data()]).unwrap();
    for (have, want) in [logits.into_data(), scaled.into_data()].iter().zip(&want) {
        assert_eq!(have.shape(), want.shape());
        for (have, want) in have.iter::<f32>().zip(want.iter::<f32>()) {
            assert!((have - want).abs() <= 1e-5 * want.abs().max(1.0), "{have} and {want}");
        }
    }
}
