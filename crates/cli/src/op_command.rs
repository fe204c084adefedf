//! `flashover op`: runs one kernel on tensors of a file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail};
use command::OutFile;
use flashover::Policy;
use flashover::device::DType;
use flashover::host::{HostTensor, run_op};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::model_args::DeviceArgs;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// matmul: reads lhs, rhs and optionally bias, writes out; conv: reads x, weight and optionally bias, writes out;
    /// attention: reads q, k, v and optionally bias, writes out
    /// and lse; with dout, the gradient of out, also dq, dk and dv
    name: String,
    /// Safetensors file with the inputs
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// Safetensors file for the outputs
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// Setting of the op, such as rhs=col, tf32=true or causal=true; may be repeated
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = pair)]
    settings: Vec<(String, String)>,
    /// For untuned shapes: `frozen` fails, `default` uses an inherited or the first config, `measure` tunes now
    #[arg(long, default_value = "default")]
    policy: Policy,
    #[command(flatten)]
    device: DeviceArgs,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text
        .split_once('=')
        .ok_or("expected NAME=VALUE\nhint: use, for example, rhs=col or tf32=true")?;
    Ok((key.to_owned(), value.to_owned()))
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let Args { name, input, output, settings, policy, device } = args;
    let target = OutFile::new(output)?;
    if OutFile::new(input).is_ok_and(|input| input.is_same(&target)) {
        bail!(
            "input and output are the same file: {}\nhint: choose another output file",
            output.display()
        );
    }
    let inputs = read_tensors(input)?;
    let outputs = run_op(name, &device.open()?, &inputs, settings, *policy)?;
    Ok(target.write(&encoded(&outputs)?)?)
}

pub(crate) fn read_tensors(path: &Path) -> anyhow::Result<BTreeMap<String, HostTensor>> {
    let shown = path.display();
    let hint = "set --input to a safetensors file";
    let about = |e| anyhow!("cannot read {shown}: {e}\nhint: {hint}");
    // A pipe or a device may have no end.
    if !std::fs::metadata(path).map_err(about)?.is_file() {
        bail!("{shown} is not a file\nhint: {hint}");
    }
    let bytes = std::fs::read(path).map_err(about)?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| {
        anyhow!(
            "{shown} is not a safetensors file: {e}\nhint: write one with `save_file` of the \
             safetensors package"
        )
    })?;
    file.tensors()
        .into_iter()
        .map(|(name, view)| {
            if view.dtype() == Dtype::I64 {
                return Ok((name.clone(), narrowed(&name, &view)?));
            }
            let dtype = match view.dtype() {
                Dtype::F32 => DType::F32,
                Dtype::F16 => DType::F16,
                Dtype::BF16 => DType::Bf16,
                Dtype::I8 => DType::I8,
                Dtype::U8 => DType::U8,
                Dtype::I32 => DType::I32,
                other => bail!("tensor `{name}` is {other:?}\nhint: cast it to f32, f16 or bf16"),
            };
            Ok((name, HostTensor::new(dtype, view.shape(), view.data().to_vec())?))
        })
        .collect()
}

/// Returns integers of 64 bits as i32.
fn narrowed(name: &str, view: &TensorView<'_>) -> anyhow::Result<HostTensor> {
    let words = view.data().as_chunks::<8>().0;
    let mut bytes = Vec::with_capacity(4 * words.len());
    for word in words {
        let value = i64::from_le_bytes(*word);
        let value = i32::try_from(value)
            .map_err(|_| anyhow!("tensor `{name}` has {value}\nhint: use integers of 32 bits"))?;
        bytes.extend(value.to_le_bytes());
    }
    Ok(HostTensor::new(DType::I32, view.shape(), bytes)?)
}

/// Encodes tensors as a safetensors file.
pub(crate) fn encoded(tensors: &BTreeMap<String, HostTensor>) -> anyhow::Result<Vec<u8>> {
    let views: Vec<(&str, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, t)| {
            let dtype = match t.dtype() {
                DType::F32 | DType::Tf32 => Dtype::F32,
                DType::F16 => Dtype::F16,
                DType::Bf16 => Dtype::BF16,
                DType::I8 => Dtype::I8,
                DType::U8 => Dtype::U8,
                DType::I32 => Dtype::I32,
                other => bail!("output `{name}` is {other}\nhint: report this as a bug"),
            };
            Ok((name.as_str(), TensorView::new(dtype, t.shape().to_vec(), t.bytes())?))
        })
        .collect::<anyhow::Result<_>>()?;
    Ok(safetensors::serialize(views, None)?)
}
