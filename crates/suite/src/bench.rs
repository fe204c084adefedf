//! Bench cases of one kernel: checked first, then timed.

use std::fmt;

use arch::Device;
use record::{Card, Line, Record};
use serde_json::Value;
use tune::timing::{self, Effort, Timing, TimingError};
use tune::{Cost, Kernel, Queue, TuneError, Tuner};

use crate::case::BenchCase;
use crate::kernel::{KernelSuite, Params};

/// A bench case of any kernel.
pub trait AnyBench {
    /// Name of the case: `matmul bf16 4096x4096x4096 lhs=row rhs=col`.
    fn name(&self) -> String;

    /// Measures every candidate, stores the fastest in the cache and returns it.
    ///
    /// # Errors
    /// See [`Tuner::measure`].
    fn tune(&self, tuner: &mut Tuner<'_>) -> Result<Value, TuneError>;

    /// Times the configs in `lines`, one JSON object per line.
    ///
    /// # Errors
    /// The first line that is not a config, and the reason.
    fn time(&self, tuner: &Tuner<'_>, lines: &str) -> Result<Vec<TimedConfig>, String>;

    /// Checks the case, then times it, with its peers if `peers` is set.
    ///
    /// # Errors
    /// The tune cache cannot be written. Every other failure is reported in the line.
    fn measure(
        &self,
        tuner: &mut Tuner<'_>,
        card: &Card,
        peers: bool,
    ) -> Result<Measured, TuneError>;

    /// The case as a request to `torch.py`, and the name of the library measured.
    fn torch(&self) -> Option<(&'static str, Value)>;
}

/// Outcome of a case.
pub struct Measured {
    /// A [`Line::Record`], or a [`Line::Skip`] where the device cannot run the case.
    pub line: Line,
    /// Number of operand sets that the launches rotated over.
    pub sets: usize,
}

/// A config timed on request.
pub struct TimedConfig {
    pub config: Value,
    pub cost: Cost,
    /// Nanoseconds per launch, or the reason for its absence.
    pub outcome: Result<f64, String>,
}

/// A case of `K`.
pub(crate) struct BenchOf<K: KernelSuite>(pub(crate) BenchCase<K::Problem>);

impl<K: KernelSuite> BenchOf<K> {
    fn params(&self) -> Params {
        K::params(&self.0.problem)
    }
}

impl<K: KernelSuite> AnyBench for BenchOf<K> {
    fn name(&self) -> String {
        record::case_name(K::NAME, &self.params())
    }

    fn tune(&self, tuner: &mut Tuner<'_>) -> Result<Value, TuneError> {
        tuner.measure::<K>(&self.0.problem).map(|config| plain::<K>(&config))
    }

    fn time(&self, tuner: &Tuner<'_>, lines: &str) -> Result<Vec<TimedConfig>, String> {
        let configs = lines.lines().filter(|line| !line.trim().is_empty()).map(|line| {
            let refused = |why: &dyn fmt::Display| format!("{line}: {why}");
            let value = serde_json::from_str(line).map_err(|e| refused(&e))?;
            tune::config_of::<K>(&value).map_err(|e| refused(&e))
        });
        let configs = configs.collect::<Result<_, _>>()?;
        let cost = K::cost(&self.0.problem);
        let timed = tuner.time::<K>(&self.0.problem, configs).into_iter();
        let timed = timed.map(|(config, outcome)| TimedConfig {
            config: plain::<K>(&config),
            cost,
            outcome,
        });
        Ok(timed.collect())
    }

    fn measure(
        &self,
        tuner: &mut Tuner<'_>,
        card: &Card,
        peers: bool,
    ) -> Result<Measured, TuneError> {
        let problem = &self.0.problem;
        let Cost { flops, bytes } = K::cost(problem);
        let mut record = Record::new(card, K::NAME, self.params(), flops, bytes);
        let choice = match tuner.choose::<K>(problem) {
            Ok(choice) => choice,
            Err(e @ TuneError::Unsupported { .. }) => {
                let line = Line::Skip { case: record.case(), reason: e.to_string() };
                return Ok(Measured { line, sets: 0 });
            }
            Err(e @ TuneError::Cache(_)) => return Err(e),
            Err(e) => {
                record.error = Some(e.to_string());
                return Ok(Measured { line: Line::Record(record), sets: 0 });
            }
        };
        record.config = Some(plain::<K>(&choice.config));
        record.config_source = Some(choice.source.to_string());
        let sets = tune::operand_sets::<K>(tuner.device, problem);
        let n = sets.len();
        let outcome = fill::<K>(&mut record, tuner.device, problem, &choice.config, &sets);
        record.error = outcome.err();
        record.set_share(card, K::precision(problem).name());
        if peers && self.0.peers && record.error.is_none() {
            let mut figures = K::peers_on(tuner.device, problem, &sets);
            drop(sets);
            figures.extend(K::peers(tuner.device, problem, n));
            figures.into_iter().for_each(|(name, outcome)| add_peer(&mut record, name, outcome));
        }
        Ok(Measured { line: Line::Record(record), sets: n })
    }

    fn torch(&self) -> Option<(&'static str, Value)> {
        K::torch(&self.0.problem).map(|request| (K::torch_name(&self.0.problem), request))
    }
}

/// Checks one launch, then times many. Fails on a wrong result and on a failure to run.
fn fill<K: KernelSuite>(
    record: &mut Record,
    device: &Device,
    problem: &K::Problem,
    config: &K::Config,
    sets: &[K::Operands],
) -> Result<(), String> {
    let scratch = K::scratch(device, problem, config);
    let launch = |i: usize| {
        K::launch(&Queue::Device(device), problem, config, &sets[i % sets.len()], scratch.as_ref());
    };
    K::outputs(problem, &sets[0]).iter().for_each(|output| tune::poison(device, output));
    launch(0);
    let verdict = K::verify_operands(device, problem, &sets[0], 7).map_err(|e| e.to_string())?;
    record.max_err = Some(verdict.comparison.max_err);
    record.tolerance = Some(verdict.comparison.tolerance);
    if !verdict.comparison.passed {
        return Err(format!("wrong result: {}", verdict.comparison));
    }
    let timing = timing::measure(device, Effort::report(device.backend()), launch)
        .map_err(|e| e.to_string())?;
    record.set_times(&timing.samples_ns, timing.clock)
}

fn add_peer(record: &mut Record, name: &str, outcome: Result<Timing, TimingError>) {
    match outcome {
        Ok(timing) => {
            if timing.clock != record.clock {
                record.peer_clocks.insert(name.to_owned(), timing.clock.to_owned());
            }
            record.peers.insert(name.to_owned(), timing.median_ns());
        }
        Err(e) => eprintln!("{}: no time for {name}: {e}", record.case()),
    }
}

fn plain<K: Kernel>(config: &K::Config) -> Value {
    serde_json::to_value(config).expect("a config is plain data")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::KERNELS;
    use crate::case::{Scale, Suite};

    #[test]
    fn every_suite_has_cases_of_different_names() {
        for suite in Suite::ALL {
            for scale in [Scale::Gpu, Scale::Host] {
                let cases = KERNELS.iter().flat_map(|kernel| kernel.bench_cases(suite, scale));
                let names: Vec<_> = cases.map(|case| case.name()).collect();
                assert!(!names.is_empty(), "{suite:?} {scale:?}");
                let different: BTreeSet<_> = names.iter().collect();
                assert_eq!(different.len(), names.len(), "{suite:?} {scale:?}: {names:#?}");
            }
        }
    }
}
