//! Checks small U-Nets against diffusers, in every dtype that the device supports.
//!
//! Frames launched kernel by kernel, replayed from a graph, and computed by another thread in memory of its own must have the same
//! bits, also after frames of other inputs.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;

use arch::{ArchProfile, Backend, DType, Device};
use checkpoint::Checkpoint;
use flashover::unet::{Condition, Frames, UnetModel, UnetOptions, UnetShape};
use flashover::{Compute, LoadError, Policy};
use reference::Comparison;
use serde_json::json;
use suite::{CheckError, Job, Verdict};

/// Tolerance of f32 relative to the largest value.
const EXACT: f64 = 3e-6;
/// Error of 16-bit floats relative to that of torch.
const OF_TORCH: f64 = 1.2;

/// One check per folder in `fixtures/unet` and dtype.
pub(super) fn jobs(arch: &ArchProfile, fixtures: &Path) -> anyhow::Result<Vec<Job>> {
    let all = fixtures.join("unet");
    let names = super::folders(&all, "golden.safetensors")?;
    let dtypes =
        [(DType::F32, Compute::F32), (DType::F16, Compute::F16), (DType::Bf16, Compute::Bf16)];
    let mut jobs = Vec::new();
    for name in names {
        for (dtype, compute) in dtypes {
            let params = [("model", name.clone()), ("dtype", dtype.to_string())];
            let folder = all.join(&name);
            jobs.push(Job {
                op: "unet",
                params: params.map(|(key, value)| (key.to_owned(), value.into())).into(),
                config: match dtype {
                    DType::Bf16 if arch.backend == Backend::Vulkan => {
                        Err(LoadError::UnetBf16.to_string())
                    }
                    _ if arch.dtypes.contains(&dtype) => Ok(json!({})),
                    _ => Err(format!("needs {dtype} buffers, which the device lacks")),
                },
                programs: None,
                run: Box::new(move |device| check(device, &folder, compute)),
            });
        }
    }
    Ok(jobs)
}

fn failed(why: impl ToString) -> CheckError {
    CheckError::Kernel(why.to_string())
}

/// Inputs of a frame, and results of diffusers.
struct Golden {
    shape: UnetShape,
    values: BTreeMap<String, Vec<f32>>,
}

impl Golden {
    fn open(folder: &Path) -> Result<Self, CheckError> {
        let file = Checkpoint::open(folder.join("golden.safetensors")).map_err(failed)?;
        let mut values = BTreeMap::new();
        for name in file.names() {
            let tensor = file.tensor(name).map_err(failed)?;
            values.insert(name.to_owned(), tensor.widened().map_err(failed)?.into_owned());
        }
        let shape = |name: &str| file.tensor(name).map(|tensor| tensor.shape);
        let sample = shape("sample").map_err(failed)?;
        let tokens = shape("text").map_or(0, |text| text[1]);
        let shape = UnetShape { batch: sample[0], size: [sample[2], sample[3]], tokens };
        Ok(Self { shape, values })
    }

    fn get(&self, name: &str) -> Option<&[f32]> {
        self.values.get(name).map(Vec::as_slice)
    }

    fn needed(&self, name: &str) -> Result<&[f32], CheckError> {
        self.get(name).ok_or_else(|| failed(format!("the fixture has no `{name}`")))
    }

    /// Computes the frame, or that of the negated sample.
    fn frame(&self, frames: &mut Frames, negated: bool) -> Result<Vec<f32>, CheckError> {
        let condition = Condition {
            timesteps: self.needed("timestep")?,
            text: self.get("text"),
            classes: self.get("classes"),
            pooled_text: self.get("pooled"),
            sizes: self.get("sizes"),
        };
        let sign = if negated { -1.0 } else { 1.0 };
        let sample: Vec<f32> = self.needed("sample")?.iter().map(|x| sign * x).collect();
        frames.frame(&sample, &condition).map_err(failed)
    }
}

fn check(device: &Device, folder: &Path, compute: Compute) -> Result<Verdict, CheckError> {
    let golden = Golden::open(folder)?;
    let options = UnetOptions {
        dtype: Some(compute),
        policy: Some(Policy::Default),
        ..UnetOptions::default()
    };
    let ours = flashover::Device::from(device.clone());
    let model = UnetModel::load(&ours, folder, &options).map_err(failed)?;
    let mut frames = model.frames(golden.shape).map_err(failed)?;
    let out = golden.frame(&mut frames, false)?;
    let negated = golden.frame(&mut frames, true)?;
    if device.backend() == Backend::Cuda && !frames.captured() {
        return Err(failed("the second frame was not captured"));
    }
    let same = |what: &str, own: Vec<f32>| match own == out {
        true => Ok(()),
        false => Err(failed(format!("{what} has other bits than the first one"))),
    };
    same("a replayed frame", golden.frame(&mut frames, false)?)?;
    if negated == out {
        return Err(failed("a frame of another sample has the result of the one before"));
    }
    // Not in the memory of the first thread.
    let elsewhere = thread::scope(|scope| {
        scope.spawn(|| golden.frame(&mut frames, false)).join().map_err(|_| failed("a panic"))
    })??;
    same("a frame of another thread", elsewhere)?;
    let bytes: Vec<u8> = out.iter().flat_map(|value| value.to_le_bytes()).collect();
    let comparison = compared(&golden, &out, compute)?;
    Ok(Verdict { comparison, digest: suite::fnv1a(&bytes) })
}

/// Compares with the result of diffusers in f32: the largest difference in f32, the root mean square in 16-bit floats.
fn compared(golden: &Golden, out: &[f32], compute: Compute) -> Result<Comparison, CheckError> {
    let want: Vec<f64> = golden.needed("f32")?.iter().map(|value| f64::from(*value)).collect();
    let largest = want.iter().fold(0f64, |top, value| top.max(value.abs()));
    let comparison = Comparison::within(out, &want, EXACT * largest)?;
    let torch = match compute {
        Compute::F16 => golden.needed("f16")?,
        Compute::Bf16 => golden.needed("bf16")?,
        Compute::F32 | Compute::Tf32 => return Ok(comparison),
    };
    let deviation = |values: &[f32]| {
        let gaps = values.iter().zip(&want).map(|(value, want)| f64::from(*value) - want);
        (gaps.map(|gap| gap * gap).sum::<f64>() / want.len() as f64).sqrt()
    };
    let (max_err, tolerance) = (deviation(out), OF_TORCH * deviation(torch));
    Ok(Comparison { max_err, tolerance, passed: max_err <= tolerance, ..comparison })
}
