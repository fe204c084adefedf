//! Compares operators of the domain `com.microsoft` with ONNX Runtime. `contrib.py` writes the
//! cases.

use std::fs;

use burn::tensor::{DType, Device, TensorData};
use onnx::{Model, Options};
use safetensors::{Dtype, SafeTensors};

/// Largest difference, relative to the largest element of a result.
const TOLERANCE: f64 = 1e-5;

fn data(file: &SafeTensors<'_>, name: &str) -> Option<TensorData> {
    let view = file.tensor(name).ok()?;
    let dtype = match view.dtype() {
        Dtype::F32 => DType::F32,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        Dtype::U8 => DType::U8,
        other => panic!("{name} has the type {other:?}"),
    };
    Some(TensorData::from_bytes_vec(view.data().to_vec(), view.shape().to_vec(), dtype))
}

/// Returns the largest difference, relative to the largest expected element.
fn apart(have: &TensorData, want: &TensorData) -> f64 {
    assert_eq!(have.shape(), want.shape());
    let most = want.iter::<f64>().fold(0.0, |most: f64, own| most.max(own.abs()));
    let pairs = have.iter::<f64>().zip(want.iter::<f64>());
    pairs.fold(0.0, |apart: f64, (have, want)| {
        assert!(have.is_finite());
        apart.max((have - want).abs() / most.max(f64::MIN_POSITIVE))
    })
}

#[test]
fn operators_of_onnx_runtime_give_its_results() {
    let bytes = fs::read("tests/contrib.safetensors").unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (path, mut cases, mut wrong) = (folder.path().join("model.onnx"), 0, Vec::new());
    for name in file.names().into_iter().filter_map(|own| own.strip_suffix(" model")) {
        cases += 1;
        fs::write(&path, file.tensor(&format!("{name} model")).unwrap().data()).unwrap();
        let all = |kind: &str| -> Vec<TensorData> {
            (0..).map_while(|at| data(&file, &format!("{name} {kind} {at}"))).collect()
        };
        let run = || Model::open(&path, Options::default(), &Device::flex())?.run(all("input"));
        let want = all("output");
        match run() {
            Ok(have) => {
                assert_eq!(have.len(), want.len(), "{name}");
                let each = have.iter().zip(&want).map(|(have, want)| apart(have, want));
                let most = each.fold(0.0, f64::max);
                if most > TOLERANCE {
                    wrong.push(format!("{name}: {most:.1e}"));
                }
            }
            Err(why) => wrong.push(format!("{name}: {why}")),
        }
    }
    assert!(cases == 101 && wrong.is_empty(), "{cases} cases\n{}", wrong.join("\n"));
}
