//! One run: the card, the ceilings, then each case, checked before it is timed.

use std::collections::BTreeMap;
use std::path::Path;

use arch::{Backend, Device};
use kernels::ceiling;
use kernels::matmul::Precision;
use record::{Card, Line, Record};
use suite::{AnyBench, Measured, Scale, Suite};
use tune::timing::Timing;
use tune::{Policy, Tuner};

use crate::emit::emit;
use crate::model_cases::{self, ModelCase};
use crate::torch::Torch;
use crate::{Target, cases, provenance, tuning};

/// Peers to measure.
pub(crate) struct Peers {
    /// Burn, and cubek on GPUs.
    pub(crate) rust: bool,
    /// Python that has torch.
    pub(crate) torch: Option<String>,
}

/// Runs a suite; returns false if a case failed.
pub(crate) fn run(
    target: &Target,
    suite: Suite,
    filter: Option<&str>,
    policy: Policy,
    peers: &Peers,
    demo: Option<&Path>,
) -> anyhow::Result<bool> {
    let Some(device) = target.open_or_skip()? else { return Ok(true) };
    let mut card = provenance::card(&device)?;
    let scale = Scale::of_device(&device);
    let ceilings = |name: &str| filter.is_none_or(|f| name.contains(f));
    let ceiling = filter.is_some_and(|f| cases::CEILINGS.iter().any(|name| name.contains(f)));
    let kernels = cases::select(suite, scale, filter)?;
    let models = model_cases::select(suite, scale, filter, demo);
    let none = kernels.is_empty() && models.is_empty();
    if let (true, false, Some(filter)) = (none, ceiling, filter) {
        // The filter matches only cases of another backend. A run over several backends continues with that one.
        emit(&Line::Card(card))?;
        emit(&Line::Plan { cases: 1 })?;
        let reason = format!("no case for this device matches `{filter}`");
        emit(&Line::Skip { case: record::ALL_CASES.to_owned(), reason })?;
        return Ok(true);
    }
    let torch = match &peers.torch {
        Some(python) if device.backend() == Backend::Cuda => Some(Torch::start(python)?),
        Some(_) => {
            eprintln!("torch is measured with CUDA only");
            None
        }
        None => None,
    };
    let cache = tuning::open_cache()?;
    if policy == Policy::Measure {
        cache.check_writable()?;
    }
    let tuner = Tuner {
        device: &device,
        cache,
        policy,
        commit: provenance::COMMIT.to_owned(),
        date: provenance::now()?,
    };
    // From here on, any failure affects only the column of this backend. Mistakes of the caller that can be found
    // before a measurement were refused above.
    match measure(tuner, &mut card, (kernels, models), ceilings, peers.rust, torch) {
        Ok(good) => Ok(good),
        Err(e) => {
            eprintln!("error: {e:#}");
            Ok(false)
        }
    }
}

fn measure(
    mut tuner: Tuner<'_>,
    card: &mut Card,
    (kernels, models): (Vec<Box<dyn AnyBench>>, Vec<ModelCase>),
    shown: impl Fn(&str) -> bool,
    with_rust: bool,
    mut torch: Option<Torch>,
) -> anyhow::Result<bool> {
    let (device, policy) = (tuner.device, tuner.policy);
    // Ceilings are always measured, because every share is relative to them.
    let copy = measure_copy(device, card)?;
    let multiplies = measure_multiplies(device, card)?;
    card.copy_gbps = at_best(&copy, copy.gbps);
    card.peak_tflops = multiplies
        .iter()
        .filter_map(|r| Some((r.params.get("dtype")?.as_str()?.to_owned(), at_best(r, r.tflops)?)))
        .collect();
    emit(&Line::Card(card.clone()))?;
    let first: Vec<_> =
        std::iter::once(copy).chain(multiplies).filter(|r| shown(&r.case())).collect();
    emit(&Line::Plan { cases: first.len() + kernels.len() + models.len() })?;
    for record in first {
        emit(&Line::Record(record))?;
    }
    let mut good = true;
    for case in kernels {
        emit(&Line::Begin { case: case.name() })?;
        let warned = tuner.cache.warnings().len();
        let Measured { mut line, sets } = case.measure(&mut tuner, card, with_rust)?;
        if let Line::Record(record) = &mut line {
            if let (Some(torch), None) = (&mut torch, &record.error) {
                add_torch(record, torch, case.as_ref(), sets);
            }
            good &= record.error.is_none();
        }
        tuner.cache.warnings().iter().skip(warned).for_each(|w| eprintln!("{w}"));
        emit(&line)?;
    }
    // The models read their configs from the same cache file.
    drop(tuner);
    Ok(model_cases::run(device, card, policy, &models)? && good)
}

/// Adds the time of torch or bitsandbytes, on `sets` sets of operands.
fn add_torch(record: &mut Record, torch: &mut Torch, case: &dyn AnyBench, sets: usize) {
    let Some((library, request)) = case.torch() else { return };
    match torch.measure(request, sets) {
        Ok(ns) => drop(record.peers.insert(library.to_owned(), ns)),
        Err(e) => eprintln!("{}: no time for {library}: {e}", record.case()),
    }
}

/// Record of the ceiling `op`.
fn timed(
    card: &Card,
    (op, name, value): (&str, &str, serde_json::Value),
    (flops, bytes): (u64, u64),
    timing: &Timing,
) -> Record {
    let params = BTreeMap::from([(name.to_owned(), value)]);
    let mut record = Record::new(card, op, params, flops, bytes);
    record.error = record.set_times(&timing.samples_ns, timing.clock).err();
    record
}

/// Rate at the 10th percentile of the times, not at their median. A ceiling is the best rate of a device; other
/// programs can only lower it.
fn at_best(record: &Record, rate: Option<f64>) -> Option<f64> {
    Some(rate? * record.median_ns? / record.p10_ns?)
}

fn measure_copy(device: &Device, card: &Card) -> anyhow::Result<Record> {
    let (bytes, timing) = ceiling::time_copy(device)?;
    Ok(timed(card, ("copy", "mib", (bytes >> 21).into()), (0, bytes), &timing))
}

fn measure_multiplies(device: &Device, card: &Card) -> anyhow::Result<Vec<Record>> {
    let mut records = Vec::new();
    for precision in Precision::ALL {
        let Some((flops, timing)) = ceiling::time_multiply(device, precision)? else { continue };
        let dtype = ("mma", "dtype", precision.name().into());
        records.push(timed(card, dtype, (flops, 0), &timing));
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ceiling_is_the_best_rate_of_the_device() {
        let card: Card = serde_json::from_value(serde_json::json!({
            "backend": "cuda", "name": "card", "arch_id": "cuda-sm90-132", "profile": null,
            "driver": null, "versions": {}, "memory_bytes": null, "clocks": {}, "commit": "c",
            "dirty": false, "date": "d", "copy_gbps": null, "peak_tflops": {},
        }))
        .expect("a card");
        let samples_ns = vec![1.0, 1.0, 9.0, 10.0, 30.0];
        let timing = Timing { samples_ns, clock: "host", graph: false };
        let copy = timed(&card, ("copy", "mib", 1.into()), (0, 1000), &timing);
        assert_eq!(copy.gbps, Some(1000.0 / 9.0), "the case itself by its median");
        let best = at_best(&copy, copy.gbps).expect("timed");
        assert!((best - 1000.0).abs() < 1e-9, "{best}");
    }
}
