//! Checks small models of every family against the reference, in every dtype that the device supports.

use std::collections::BTreeMap;
use std::path::Path;

use arch::{ArchProfile, Backend, DType, Device};
use flashover::{Compute, Engine, EngineOptions, Policy};
use models::{LoadOptions, Weights};
use reference::Comparison;
use serde_json::{Value, json};
use suite::{CheckError, Job, Verdict};

/// Length of the prompt, and number of its last tokens that are also run one at a time.
const TOKENS: usize = 24;
const STEPS: usize = 6;

/// Tolerance of f32 on a GPU, relative to the largest logit. A GPU's exponentials and roots are less accurate than a
/// host's: software WGSL is off by 1.4e-5, and the general rule allows 1.0e-5.
const APPROXIMATE: f64 = 2e-5;

/// One check per folder in `fixtures` and dtype.
pub(super) fn jobs(arch: &ArchProfile, fixtures: &Path) -> anyhow::Result<Vec<Job>> {
    let names = super::folders(fixtures, "config.json")?;
    let dtypes = [
        (DType::F32, Compute::F32, reference::DType::F32),
        (DType::Tf32, Compute::Tf32, reference::DType::Tf32),
        (DType::F16, Compute::F16, reference::DType::F16),
        (DType::Bf16, Compute::Bf16, reference::DType::Bf16),
    ];
    let mut jobs = Vec::new();
    for name in names {
        for (dtype, compute, plain) in dtypes {
            let params = [("model", name.clone()), ("dtype", dtype.to_string())];
            let params = params.map(|(key, value)| (key.to_owned(), value.into()));
            let lacks = format!("needs {dtype} buffers, which the device lacks");
            let folder = fixtures.join(&name);
            jobs.push(Job {
                op: "model",
                params: BTreeMap::from(params),
                config: match arch.dtypes.contains(&dtype) {
                    false => Err(lacks),
                    true if compute == Compute::Tf32 => is_dense(&folder),
                    true => Ok(json!({})),
                },
                programs: None,
                run: Box::new(move |device| check(device, &folder, compute, plain)),
            });
        }
    }
    Ok(jobs)
}

/// Skips 4- and 8-bit weights, which have no tf32 matmul. The check itself reports a folder that cannot be read.
fn is_dense(folder: &Path) -> Result<Value, String> {
    let options = LoadOptions::default();
    let open = Weights::open(folder).and_then(|own| models::on_device(&own, None, &options));
    match open.map(|own| own.weight_format) {
        Ok(Some(_)) => Err("4-bit and 8-bit weights have no tf32 matmul".to_owned()),
        _ => Ok(json!({})),
    }
}

fn failed(why: impl ToString) -> CheckError {
    CheckError::Kernel(why.to_string())
}

/// Compares the logits of a whole prompt, and of its last tokens one at a time.
fn check(
    device: &Device,
    folder: &Path,
    compute: Compute,
    dtype: reference::DType,
) -> Result<Verdict, CheckError> {
    let weights = Weights::open(folder).map_err(failed)?;
    let exact = suite::decoder::decoder(&weights);
    let naive = exact.naive(dtype);
    let options = EngineOptions {
        dtype: Some(compute),
        policy: Some(Policy::Default),
        ..EngineOptions::default()
    };
    let ours = flashover::Device::from(device.clone());
    let engine = Engine::load(&ours, folder, &options).map_err(failed)?;
    let vocab = exact.vocab;
    let tokens: Vec<u32> = (0..TOKENS).map(|at| (at * 7919 % vocab) as u32).collect();
    let mut session = engine.session(TOKENS).map_err(failed)?;
    let mut out = session.logits(&tokens).map_err(failed)?;
    if compute == Compute::Tf32 {
        let f32 = EngineOptions { dtype: Some(Compute::F32), ..options };
        let own = Engine::load(&ours, folder, &f32).map_err(failed)?;
        let mut own = own.session(TOKENS).map_err(failed)?;
        if own.logits(&tokens).map_err(failed)? == out {
            return Err(CheckError::Kernel(
                "the result is bit-identical to f32, so tf32 was not used".to_owned(),
            ));
        }
    }
    let (mut want, mut plain) = (exact.forward(&tokens)?, naive.forward(&tokens)?);
    session.clear();
    session.logits(&tokens[..TOKENS - STEPS]).map_err(failed)?;
    for at in TOKENS - STEPS..TOKENS {
        out.extend(session.logits(&tokens[at..=at]).map_err(failed)?);
        // A dynamically scaled rope depends on the length of the sequence.
        for (all, of) in [(&mut want, &exact), (&mut plain, &naive)] {
            all.extend_from_slice(&of.forward(&tokens[..=at])?[at * vocab..]);
        }
    }
    let bytes: Vec<u8> = out.iter().flat_map(|logit| logit.to_le_bytes()).collect();
    let mut comparison = reference::compare(&out, &want, &plain, dtype)?;
    if dtype == reference::DType::F32 && device.backend() != Backend::Cpu {
        let largest = want.iter().fold(0f64, |top, logit| top.max(logit.abs()));
        let tolerance = comparison.tolerance.max(APPROXIMATE * largest);
        comparison = Comparison::within(&out, &want, tolerance)?;
    }
    Ok(Verdict { comparison, digest: suite::fnv1a(&bytes) })
}
