//! Tests with files from bitsandbytes, with our own files and with broken files.

mod bad;
mod golden;
mod kill;
mod shards;
mod writer;

use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, DType, Error, Plan, Tensor, Writer};

/// Names of all fixtures with tensors.
const FIXTURES: [&str; 18] = [
    "cuda_fp4_nested",
    "cuda_int8",
    "cuda_nf4_nested",
    "cuda_nf4_plain",
    "experts",
    "fp4_nested",
    "fp4_plain",
    "int8",
    "nf4_128_straddling",
    "nf4_32",
    "nf4_4096",
    "nf4_nested",
    "nf4_odd",
    "nf4_plain",
    "nf4_storage_bf16",
    "nf4_storage_f16",
    "nf4_storage_f32",
    "nf4_zeros",
];

/// A tensor with its name.
type Named = (String, Tensor<'static>);

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("fixtures/{name}.safetensors"))
}

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(fixture(name)).expect("a fixture is a checkpoint")
}

fn owned(tensor: Tensor<'_>) -> Tensor<'static> {
    Tensor::new(tensor.dtype, &tensor.shape, tensor.bytes.into_owned())
}

/// Reads all tensors of a fixture.
fn tensors(name: &str) -> Vec<Named> {
    let file = open(name);
    let named = |name: &str| (name.to_owned(), owned(file.tensor(name).expect("listed")));
    file.names().map(named).collect()
}

/// Writes tensors without checking them.
fn save(path: &Path, tensors: &[Named]) -> Result<(), Error> {
    let plan = tensors.iter().map(|(name, tensor)| Plan::new(name, tensor.dtype, &tensor.shape));
    let mut writer = Writer::create(path, plan)?;
    writer.write_all(tensors)?;
    writer.finish()
}

/// Returns the names of the weight, the original values and the dequantised values in a fixture.
fn weight_of(fixture: &str) -> [&'static str; 3] {
    if fixture == "experts" {
        ["experts.gate_up_proj", "original.experts", "dequantized.experts"]
    } else {
        ["linear.weight", "original.linear", "dequantized.linear"]
    }
}

fn values(tensor: &Tensor<'_>) -> Vec<f32> {
    reference_dtype(tensor.dtype).decode(&tensor.bytes).expect("whole values")
}

fn reference_dtype(dtype: DType) -> reference::DType {
    match dtype {
        DType::F16 => reference::DType::F16,
        DType::Bf16 => reference::DType::Bf16,
        _ => reference::DType::F32,
    }
}
