//! One run: the card, the ceilings, then each case: right first, then fast.

use std::collections::BTreeMap;
use std::path::Path;

use arch::{Backend, Device};
use kernels::attention::Attention;
use kernels::attention::backward::AttentionBackward;
use kernels::attention::decode::Decode;
use kernels::ceiling;
use kernels::embed::Embed;
use kernels::int8::{Int8Dequantize, Int8Matmul, Int8Quantize};
use kernels::matmul::{Matmul, Precision};
use kernels::nf4::{Nf4Dequantize, Nf4Matmul, Nf4Quantize};
use kernels::norm::Norm;
use kernels::rope::Rope;
use kernels::sample::Sample;
use record::{Line, Record, SCHEMA, Summary};
use serde_json::Value;
use tune::timing::{self, Effort, Timing, TimingError};
use tune::{Cost, Policy, TuneError, Tuner};

use crate::cases::{self, Case, Problem, Scale, Suite};
use crate::emit::emit;
use crate::family::Family;
use crate::model_cases::{self, ModelCase};
use crate::torch::Torch;
use crate::{Target, provenance, tuning};

/// Names of the ceilings, as a filter sees them.
pub(crate) const CEILINGS: [&str; 6] =
    ["copy", "mma f32", "mma tf32", "mma f16", "mma bf16", "mma f16acc16"];

/// Whom to measure beside us.
pub(crate) struct Peers {
    /// Burn, and cubek where it is a contender.
    pub(crate) rust: bool,
    /// A Python that has torch.
    pub(crate) torch: Option<String>,
}

/// Runs a suite; false when a case failed.
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
    let software = arch::report::describe(&device).software;
    let host = device.backend() == Backend::Cpu || software;
    let scale = if host { Scale::Host } else { Scale::Gpu };
    let ceilings = |name: &str| filter.is_none_or(|f| name.contains(f));
    let ceiling = filter.is_some_and(|f| CEILINGS.iter().any(|name| name.contains(f)));
    let kernels = cases::select(suite, scale, filter)?;
    let models = model_cases::select(suite, scale, filter, demo);
    let none = kernels.is_empty() && models.is_empty();
    if let (true, false, Some(filter)) = (none, ceiling, filter) {
        // It names cases of another backend, which a run over several goes on to.
        emit(&Line::Card(card))?;
        emit(&Line::Plan { cases: 1 })?;
        let reason = format!("no case for this device matches `{filter}`");
        emit(&Line::Skip { case: record::ALL_CASES.to_owned(), reason })?;
        return Ok(true);
    }
    let torch = match &peers.torch {
        Some(python) if device.backend() == Backend::Cuda => Some(Torch::start(python)?),
        Some(_) => {
            eprintln!("torch is measured beside CUDA only");
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
    // From here on a failure costs this backend's column only, whatever its cause: the caller's mistakes
    // that can be known before a measurement were refused above.
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
    card: &mut record::Card,
    (kernels, models): (Vec<Case>, Vec<ModelCase>),
    shown: impl Fn(&str) -> bool,
    with_rust: bool,
    mut torch: Option<Torch>,
) -> anyhow::Result<bool> {
    let (device, policy) = (tuner.device, tuner.policy);
    // The ceilings are always measured: every share is a share of them.
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
        let case = Case { peer: case.peer && with_rust, ..case };
        emit(&Line::Begin { case: case.name() })?;
        let warned = tuner.cache.warnings().len();
        let torch = torch.as_mut();
        let line = match &case.problem {
            Problem::Matmul(p) => one::<Matmul>(&mut tuner, p, case.peer, card, torch)?,
            Problem::Attention(p) => one::<Attention>(&mut tuner, p, case.peer, card, torch)?,
            Problem::AttentionBackward(p) => {
                one::<AttentionBackward>(&mut tuner, p, case.peer, card, torch)?
            }
            Problem::Decode(p) => one::<Decode>(&mut tuner, p, case.peer, card, torch)?,
            Problem::Nf4Dequantize(p) => {
                one::<Nf4Dequantize>(&mut tuner, p, case.peer, card, torch)?
            }
            Problem::Nf4Matmul(p) => one::<Nf4Matmul>(&mut tuner, p, case.peer, card, torch)?,
            Problem::Nf4Quantize(p) => one::<Nf4Quantize>(&mut tuner, p, case.peer, card, torch)?,
            Problem::Int8Dequantize(p) => {
                one::<Int8Dequantize>(&mut tuner, p, case.peer, card, torch)?
            }
            Problem::Int8Matmul(p) => one::<Int8Matmul>(&mut tuner, p, case.peer, card, torch)?,
            Problem::Int8Quantize(p) => one::<Int8Quantize>(&mut tuner, p, case.peer, card, torch)?,
            Problem::Embed(p) => one::<Embed>(&mut tuner, p, case.peer, card, torch)?,
            Problem::Norm(p) => one::<Norm>(&mut tuner, p, case.peer, card, torch)?,
            Problem::Rope(p) => one::<Rope>(&mut tuner, p, case.peer, card, torch)?,
            Problem::Sample(p) => one::<Sample>(&mut tuner, p, case.peer, card, torch)?,
        };
        tuner.cache.warnings().iter().skip(warned).for_each(|w| eprintln!("{w}"));
        good &= !matches!(&line, Line::Record(r) if r.error.is_some());
        emit(&line)?;
    }
    // They look their configs up in the same file.
    drop(tuner);
    Ok(model_cases::run(device, card, policy, &models)? && good)
}

/// A record with the facts of `card` and nothing measured.
pub(crate) fn blank(
    card: &record::Card,
    op: &str,
    params: BTreeMap<String, Value>,
    cost: Cost,
) -> Record {
    Record {
        schema: SCHEMA,
        op: op.to_owned(),
        params,
        backend: card.backend.clone(),
        arch_id: card.arch_id.clone(),
        profile: card.profile.clone(),
        median_ns: None,
        p10_ns: None,
        p90_ns: None,
        p95_ns: None,
        samples: 0,
        clock: String::new(),
        flops: cost.flops,
        bytes: cost.bytes,
        tflops: None,
        gbps: None,
        share_of_ceiling: None,
        memory_bytes: None,
        peers: BTreeMap::new(),
        peer_clocks: BTreeMap::new(),
        max_err: None,
        tolerance: None,
        config: None,
        config_source: None,
        error: None,
        commit: card.commit.clone(),
        dirty: card.dirty,
        date: card.date.clone(),
    }
}

/// Fills in the times, and the rates that follow from them.
fn timed(mut record: Record, timing: &Timing) -> Record {
    let Some(Summary { median, p10, p90, samples, .. }) = Summary::of(&timing.samples_ns) else {
        record.error = Some("the clock gave no finite time".to_owned());
        return record;
    };
    (record.median_ns, record.p10_ns, record.p90_ns) = (Some(median), Some(p10), Some(p90));
    record.samples = samples;
    record.clock = timing.clock.to_owned();
    // Operations per nanosecond are GFLOP/s, bytes per nanosecond are GB/s.
    record.tflops = (record.flops > 0).then(|| record.flops as f64 / median / 1e3);
    record.gbps = (record.bytes > 0).then(|| record.bytes as f64 / median);
    record
}

/// A rate at the 10th percentile of the times in place of their median: a ceiling is the best that a
/// device gives, and other programs make it seem lower, never higher.
fn at_best(record: &Record, rate: Option<f64>) -> Option<f64> {
    Some(rate? * record.median_ns? / record.p10_ns?)
}

fn measure_copy(device: &Device, card: &record::Card) -> anyhow::Result<Record> {
    let (bytes, timing) = ceiling::time_copy(device)?;
    let params = BTreeMap::from([("mib".to_owned(), (bytes >> 21).into())]);
    Ok(timed(blank(card, "copy", params, Cost { flops: 0, bytes }), &timing))
}

fn measure_multiplies(device: &Device, card: &record::Card) -> anyhow::Result<Vec<Record>> {
    let mut records = Vec::new();
    for precision in Precision::ALL {
        let Some((flops, timing)) = ceiling::time_multiply(device, precision)? else { continue };
        let params = BTreeMap::from([("dtype".to_owned(), precision.name().into())]);
        records.push(timed(blank(card, "mma", params, Cost { flops, bytes: 0 }), &timing));
    }
    Ok(records)
}

/// Checks and times one case, and the `peers` if asked.
fn one<K: Family>(
    tuner: &mut Tuner<'_>,
    problem: &K::Problem,
    peers: bool,
    card: &record::Card,
    torch: Option<&mut Torch>,
) -> anyhow::Result<Line> {
    let mut record = blank(card, K::NAME, K::params(problem), K::cost(problem));
    let choice = match tuner.choose::<K>(problem) {
        Ok(choice) => choice,
        Err(e @ TuneError::Unsupported { .. }) => {
            return Ok(Line::Skip { case: record.case(), reason: e.to_string() });
        }
        Err(e @ TuneError::Cache(_)) => return Err(e.into()),
        Err(e) => {
            record.error = Some(e.to_string());
            return Ok(Line::Record(record));
        }
    };
    record.config = Some(serde_json::to_value(choice.config)?);
    record.config_source = Some(choice.source.to_string());
    let device = tuner.device;
    let sets = tune::operand_sets::<K>(device, problem);
    let scratch = K::scratch(device, problem, &choice.config);
    let launch = |i: usize| {
        let set = &sets[i % sets.len()];
        K::launch(device, problem, &choice.config, set, scratch.as_ref());
    };
    K::outputs(problem, &sets[0]).iter().for_each(|output| tune::poison(device, output));
    launch(0);
    match K::compare(device, problem, &sets[0], 7) {
        Ok(verdict) => {
            record.max_err = Some(verdict.comparison.max_err);
            record.tolerance = Some(verdict.comparison.tolerance);
            if !verdict.comparison.passed {
                record.error = Some(format!("wrong result: {}", verdict.comparison));
                return Ok(Line::Record(record));
            }
        }
        Err(e) => {
            record.error = Some(e.to_string());
            return Ok(Line::Record(record));
        }
    }
    match timing::measure(device, Effort::report(device.backend()), launch) {
        Ok(timing) => record = timed(record, &timing),
        Err(e) => record.error = Some(e.to_string()),
    }
    record.share_of_ceiling = share(&record, card, K::unit(problem));
    let beside = peers && record.error.is_none();
    let mut figures = if beside { K::peers_on(device, problem, &sets) } else { Vec::new() };
    let n = sets.len();
    drop(sets);
    if beside {
        figures.extend(K::peers(device, problem, n));
    }
    for (name, outcome) in figures {
        add_peer(&mut record, name, outcome);
    }
    if let (Some(torch), None, Some(case)) = (torch, &record.error, K::torch(problem)) {
        match torch.measure(case, n) {
            Ok(ns) => drop(record.peers.insert(K::TORCH.to_owned(), ns)),
            Err(e) => eprintln!("{}: no figure of {}'s: {e}", record.case(), K::TORCH),
        }
    }
    Ok(Line::Record(record))
}

fn add_peer(record: &mut Record, name: &str, outcome: Result<Timing, TimingError>) {
    match outcome {
        Ok(timing) => {
            if timing.clock != record.clock {
                record.peer_clocks.insert(name.to_owned(), timing.clock.to_owned());
            }
            record.peers.insert(name.to_owned(), timing.median_ns());
        }
        Err(e) => eprintln!("{}: no figure of {name}'s: {e}", record.case()),
    }
}

/// Time at the tighter ceiling over time taken. Vulkan has no register-level ceiling to measure, so
/// there only bandwidth counts, and a case bound by arithmetic has no share.
pub(crate) fn share(record: &Record, card: &record::Card, precision: &str) -> Option<f64> {
    let median = record.median_ns?;
    let moving = record.bytes as f64 / card.copy_gbps?;
    // A CPU widens every precision and multiplies in f32.
    let unit = if card.backend == "cpu" { "f32" } else { precision };
    let computing = match card.peak_tflops.get(unit) {
        Some(peak) => record.flops as f64 / (peak * 1e3),
        None if record.flops > 200 * record.bytes => return None,
        None => 0.0,
    };
    Some(moving.max(computing) / median)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card() -> record::Card {
        record::Card {
            backend: "cuda".to_owned(),
            name: "card".to_owned(),
            arch_id: "cuda-sm90-132".to_owned(),
            profile: None,
            driver: None,
            versions: BTreeMap::new(),
            memory_bytes: None,
            clocks: BTreeMap::new(),
            commit: "c".to_owned(),
            dirty: false,
            date: "d".to_owned(),
            copy_gbps: Some(100.0),
            peak_tflops: BTreeMap::from([("bf16".to_owned(), 10.0)]),
        }
    }

    #[test]
    fn a_share_is_of_the_tighter_ceiling() {
        let share = |bytes, flops| {
            let cost = Cost { flops, bytes };
            let record = blank(&card(), "matmul", BTreeMap::new(), cost);
            share(&Record { median_ns: Some(100.0), ..record }, &card(), "bf16")
        };
        // 50 ns of moving beside 10 of computing, then the other way round.
        assert_eq!(share(5_000, 100_000), Some(0.5));
        assert_eq!(share(1_000, 500_000), Some(0.5));
    }

    #[test]
    fn a_ceiling_is_what_the_device_gives_at_its_best() {
        let cost = Cost { flops: 0, bytes: 1000 };
        let samples_ns = vec![1.0, 1.0, 9.0, 10.0, 30.0];
        let timing = Timing { samples_ns, clock: "host", graph: false };
        let copy = timed(blank(&card(), "copy", BTreeMap::new(), cost), &timing);
        assert_eq!(copy.gbps, Some(1000.0 / 9.0), "the case itself by its median");
        let best = at_best(&copy, copy.gbps).expect("timed");
        assert!((best - 1000.0).abs() < 1e-9, "{best}");
    }
}
