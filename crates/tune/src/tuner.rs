//! Chooses a config: list candidates, check, verify, measure, keep the fastest.

use std::collections::HashSet;

use arch::{DType, Device};
use cubecl::future::block_on;
use cubecl::prelude::*;
use record::Policy;

use crate::fill::fill;
use crate::queue::Queue;
use crate::timing::{self, Effort};
use crate::{CacheError, Entry, Kernel, Key, Measured, Output, Source, TuneCache, config_of};

/// A config and its origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice<C> {
    pub config: C,
    pub source: Source,
}

/// The reason that no config was chosen.
#[derive(Debug, thiserror::Error)]
pub enum TuneError {
    /// The device cannot run the problem at all.
    #[error(
        "{arch} cannot run {kernel} {problem}: {why}\nhint: use another dtype or another backend"
    )]
    Unsupported { arch: String, kernel: &'static str, problem: String, why: String },
    /// No usable result is recorded for this architecture, and the policy forbids defaults and measuring.
    #[error(
        "no config {} {key}{}\nhint: use policy `measure` or `default` (--policy)",
        if misfit.is_some() { "fits" } else { "is recorded for" },
        misfit.as_deref().map(|why| format!(": the recorded config is unusable: {why}")).unwrap_or_default()
    )]
    Frozen {
        key: Key,
        /// Reason that the recorded config does not fit, if one is recorded.
        misfit: Option<String>,
    },
    /// Every candidate failed.
    #[error(
        "no candidate of {key} ran: {first}\nhint: use policy `default` for the first candidate \
         without measuring, and check the kernels on this machine with `cargo xtask verify`"
    )]
    AllFailed { key: Key, first: String },
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// Chooses configs for one device.
pub struct Tuner<'a> {
    pub device: &'a Device,
    pub cache: TuneCache,
    pub policy: Policy,
    /// Commit of this program, written into new results.
    pub commit: String,
    /// Current date (UTC, RFC 3339), written into new results.
    pub date: String,
}

/// A candidate that is this many times slower than the best is not timed further.
const HOPELESS: f64 = 3.0;
/// A candidate replaces an earlier, simpler one only if it takes less than this fraction of its time.
const MARGIN: f64 = 0.98;

impl Tuner<'_> {
    /// Returns the config for `problem`: the cached one, or on a miss the one that the policy gives.
    ///
    /// # Errors
    /// See [`TuneError`].
    pub fn choose<K: Kernel>(
        &mut self,
        problem: &K::Problem,
    ) -> Result<Choice<K::Config>, TuneError> {
        let arch = self.device.profile();
        let key = Key::new::<K>(&arch.id, problem);
        let known = self.cache.get(&key).map(|(entry, source)| {
            let config = config_of::<K>(&entry.config).map_err(|e| format!("{e}"))?;
            K::check(arch, problem, &config).map_err(|e| e.to_string())?;
            Ok::<_, String>(Choice { config, source })
        });
        let misfit = match known {
            Some(Ok(choice)) => return Ok(choice),
            Some(Err(why)) => {
                self.cache.reject(&key, why.clone());
                Some(why)
            }
            None => None,
        };
        let first = K::candidates(arch, problem).into_iter().next().ok_or_else(|| {
            let why = K::baseline(arch, problem).err();
            TuneError::Unsupported {
                arch: arch.id.to_string(),
                kernel: K::NAME,
                problem: K::bucket(problem),
                why: why.map_or_else(
                    || "no config supports this problem".to_owned(),
                    |why| why.to_string(),
                ),
            }
        })?;
        match self.policy {
            Policy::Frozen => Err(TuneError::Frozen { key, misfit }),
            Policy::Default => Ok(self
                .inherited::<K>(problem)
                .unwrap_or(Choice { config: first, source: Source::Default })),
            Policy::Measure => {
                let config = self.measure::<K>(problem)?;
                Ok(Choice { config, source: Source::Tuned })
            }
        }
    }

    fn inherited<K: Kernel>(&self, problem: &K::Problem) -> Option<Choice<K::Config>> {
        let (config, from) = self.cache.inherited::<K>(self.device.profile(), problem)?;
        Some(Choice { config, source: Source::Inherited(from.clone()) })
    }

    /// Measures an inherited config, then every candidate of `problem`; caches the outcome and returns the winner.
    ///
    /// # Errors
    /// The cache cannot be written (checked before measuring), or no candidate ran.
    pub fn measure<K: Kernel>(&mut self, problem: &K::Problem) -> Result<K::Config, TuneError> {
        self.cache.check_writable()?;
        let arch = self.device.profile();
        let key = Key::new::<K>(&arch.id, problem);
        let mut configs: Vec<_> =
            self.inherited::<K>(problem).map(|choice| choice.config).into_iter().collect();
        configs.extend(K::candidates(arch, problem));
        let mut seen = HashSet::new();
        configs.retain(|config| seen.insert(*config));
        let outcomes = self.time::<K>(problem, configs);
        let best = fastest(&outcomes);
        let timings: Vec<_> = outcomes
            .into_iter()
            .map(|(config, outcome)| Measured {
                config: serde_json::to_value(config).expect("a config is plain data"),
                median_ns: outcome.as_ref().ok().copied(),
                error: outcome.err(),
            })
            .collect();
        let Some((config, median_ns)) = best else {
            let first = timings.into_iter().find_map(|m| m.error);
            let first = first.unwrap_or_else(|| "the kernel has no candidates".to_owned());
            return Err(TuneError::AllFailed { key, first });
        };
        self.cache.insert(Entry {
            format: Entry::FORMAT,
            key,
            problem: serde_json::to_value(problem).expect("a problem is plain data"),
            config: serde_json::to_value(config).expect("a config is plain data"),
            median_ns: Some(median_ns),
            timings,
            commit: self.commit.clone(),
            date: self.date.clone(),
        })?;
        Ok(config)
    }

    /// Times each config: median nanoseconds if its result is right, else the reason. A config that is
    /// much slower than an earlier one is timed once only.
    pub fn time<K: Kernel>(
        &self,
        problem: &K::Problem,
        configs: Vec<K::Config>,
    ) -> Vec<(K::Config, Result<f64, String>)> {
        let (arch, client) = (self.device.profile(), self.device.client());
        let (properties, target) = (client.properties_shared(), client.target_properties_shared());
        let feasible: Vec<_> =
            configs.iter().filter(|c| K::check(arch, problem, c).is_ok()).copied().collect();
        precompile::compile(self.device, feasible.len(), |i| {
            K::programs(arch, problem, &feasible[i], &properties, &target)
        });
        let sets = operand_sets::<K>(self.device, problem);
        let expected = K::baseline(arch, problem)
            .ok()
            .map(|config| run_once::<K>(self.device, problem, &config, &sets[0]));
        let mut best = f64::INFINITY;
        configs
            .into_iter()
            .map(|config| {
                let outcome = self.candidate::<K>(problem, &config, &sets, expected.as_ref(), best);
                best = outcome.as_ref().map_or(best, |ns| best.min(*ns));
                (config, outcome)
            })
            .collect()
    }

    fn candidate<K: Kernel>(
        &self,
        problem: &K::Problem,
        config: &K::Config,
        sets: &[K::Operands],
        expected: Option<&Result<Vec<Sample>, String>>,
        best: f64,
    ) -> Result<f64, String> {
        K::check(self.device.profile(), problem, config).map_err(|e| e.to_string())?;
        let got = run_once::<K>(self.device, problem, config, &sets[0])?;
        if let Some(expected) = expected {
            let expected = expected.as_ref().map_err(|e| format!("baseline config failed: {e}"))?;
            expected.iter().zip(&got).try_for_each(|(right, got)| right.agrees(got))?;
        }
        let scratch = K::scratch(self.device, problem, config);
        let queue = Queue::Device(self.device);
        let launch = |i: usize| {
            K::launch(&queue, problem, config, &sets[i % sets.len()], scratch.as_ref());
        };
        let timed =
            |effort| timing::measure(self.device, effort, launch).map_err(|e| e.to_string());
        let first = timed(Effort::glance(self.device.backend()))?.median_ns();
        if first > HOPELESS * best {
            return Ok(first);
        }
        Ok(timed(Effort::tune(self.device.backend()))?.median_ns())
    }
}

/// Returns the fastest correct config. A later config must beat an earlier, simpler one by [`MARGIN`].
fn fastest<C: Copy>(outcomes: &[(C, Result<f64, String>)]) -> Option<(C, f64)> {
    let mut best: Option<(C, f64)> = None;
    for (config, outcome) in outcomes {
        if let Ok(ns) = outcome
            && best.is_none_or(|(_, b)| *ns < b * MARGIN)
        {
            best = Some((*config, *ns));
        }
    }
    best
}

/// Makes operand sets that together fill three times the last-level cache; at most 24 sets.
pub fn operand_sets<K: Kernel>(device: &Device, problem: &K::Problem) -> Vec<K::Operands> {
    let bytes = K::cost(problem).bytes.max(1);
    let cache = device.profile().cache_bytes.unwrap_or(32 << 20);
    let n = (3 * cache).div_ceil(bytes).clamp(1, 24);
    // Dedicated allocations go back to the driver afterwards and do not affect the pool's page sizes.
    device.client().memory_dedicated_allocation((), |()| {
        (0..n).map(|seed| K::operands(&Queue::Device(device), problem, seed)).collect()
    })
}

/// Values from the start, the middle and the end of one output.
struct Sample {
    values: Vec<f32>,
    tolerance: f64,
}

impl Sample {
    fn agrees(&self, other: &Self) -> Result<(), String> {
        let scale = self.values.iter().fold(0f32, |m, v| m.max(v.abs()));
        let tol = self.tolerance * f64::from(scale);
        let pairs = self.values.iter().zip(&other.values);
        // Keeps a NaN: `f64::max` would drop it at the next element.
        let worst = pairs.map(|(a, b)| f64::from((a - b).abs()));
        let worst = worst.fold(0f64, |m, e| if e <= m || m.is_nan() { m } else { e });
        if worst <= tol {
            Ok(())
        } else {
            Err(format!(
                "wrong result: differs from the baseline config by {worst:.3e}, expected at most {tol:.3e}"
            ))
        }
    }
}

const WINDOW: usize = 1 << 16;

fn run_once<K: Kernel>(
    device: &Device,
    problem: &K::Problem,
    config: &K::Config,
    operands: &K::Operands,
) -> Result<Vec<Sample>, String> {
    let outputs = K::outputs(problem, operands);
    outputs.iter().for_each(|output| poison(device, output));
    let scratch = K::scratch(device, problem, config);
    K::launch(&Queue::Device(device), problem, config, operands, scratch.as_ref());
    outputs.iter().map(|output| sample(device, output)).collect()
}

fn sample(device: &Device, output: &Output) -> Result<Sample, String> {
    let client = device.client();
    block_on(client.sync_buffers([&output.handle])).map_err(|e| format!("{e:?}"))?;
    let (size, len) = (output.dtype.size(), output.len);
    let window = WINDOW.min(len);
    let mut values = Vec::with_capacity(3 * window);
    for start in [0, (len - window) / 2, len - window] {
        // Device offsets must be multiples of four bytes; the last window still reaches the end.
        let start = start / 4 * 4;
        let end = if start + window + 4 > len { len } else { start + window };
        let handle = output
            .handle
            .clone()
            .offset_start((start * size) as u64)
            .offset_end(((len - end) * size) as u64);
        let bytes = client.read_one(handle).map_err(|e| format!("{e:?}"))?;
        // A buffer is whole 4-byte words: after an odd number of halves the last half is unwritten.
        decode(output.dtype, &bytes[..(end - start) * size], &mut values);
    }
    Ok(Sample { values, tolerance: output.tolerance })
}

fn decode(dtype: DType, bytes: &[u8], into: &mut Vec<f32>) {
    match dtype {
        DType::F32 | DType::Tf32 => into.extend(f32::from_bytes(bytes)),
        DType::F16 => into.extend(half::f16::from_bytes(bytes).iter().map(|v| v.to_f32())),
        DType::Bf16 => into.extend(half::bf16::from_bytes(bytes).iter().map(|v| v.to_f32())),
        DType::I8 => into.extend(bytes.iter().map(|v| f32::from(v.cast_signed()))),
        DType::U8 => into.extend(bytes.iter().map(|v| f32::from(*v))),
        DType::I32 => into.extend(i32::from_bytes(bytes).iter().map(|v| *v as f32)),
        other => unreachable!("no kernel writes {other}"),
    }
}

/// Overwrites an output with NaN (integers: -1), so that unwritten elements are detected.
pub fn poison(device: &Device, output: &Output) {
    let words = (output.len * output.dtype.size()).div_ceil(4);
    fill(device, &output.handle, words, u32::MAX);
}

#[cfg(test)]
mod tests {
    use arch::{ArchProfile, Backend};
    use cubecl::server::Handle;

    use super::*;
    use crate::{Cost, Infeasible};

    /// A kernel that fills a buffer with its config; correct if that equals the problem.
    struct Filled;

    const WORDS: usize = 1024;

    impl Kernel for Filled {
        type Problem = u32;
        type Config = u32;
        type Operands = Handle;
        const NAME: &'static str = "filled";
        const VERSION: u32 = 1;

        fn bucket(problem: &u32) -> String {
            problem.to_string()
        }
        fn candidates(_: &ArchProfile, problem: &u32) -> Vec<u32> {
            vec![problem + 1, *problem, problem + 2]
        }
        fn check(_: &ArchProfile, _: &u32, _: &u32) -> Result<(), Infeasible> {
            Ok(())
        }
        fn cost(_: &u32) -> Cost {
            Cost { flops: 0, bytes: WORDS as u64 * 4 }
        }
        fn baseline(_: &ArchProfile, problem: &u32) -> Result<u32, Infeasible> {
            Ok(*problem)
        }
        fn operands(queue: &Queue, _: &u32, _: u64) -> Handle {
            queue.empty(WORDS * 4)
        }
        fn outputs(_: &u32, operands: &Handle) -> Vec<Output> {
            let handle = operands.clone();
            vec![Output { handle, dtype: DType::I32, len: WORDS, tolerance: 0.0 }]
        }
        fn launch(queue: &Queue, _: &u32, config: &u32, operands: &Handle, _: Option<&Handle>) {
            // A fill runs on a device only, so a compiler has no program to collect.
            if let Queue::Device(device) = queue {
                fill(device, operands, WORDS, *config);
            }
        }
    }

    #[test]
    fn bytes_have_signs_where_they_have() {
        let of = |dtype| {
            let mut values = Vec::new();
            decode(dtype, &[0x00, 0xff, 0x81], &mut values);
            values
        };
        assert_eq!(of(DType::I8), [0.0, -1.0, -127.0]);
        assert_eq!(of(DType::U8), [0.0, 255.0, 129.0]);
    }

    #[test]
    fn a_wrong_candidate_is_neither_timed_nor_kept() {
        let device = Device::open(Backend::Cpu).expect("every machine has one");
        let mut tuner = Tuner {
            device: &device,
            cache: TuneCache::shipped(),
            policy: Policy::Measure,
            commit: "c".to_owned(),
            date: "2026-01-01T00:00:00Z".to_owned(),
        };
        let choice = tuner.choose::<Filled>(&7).expect("one of them is right");
        assert_eq!((choice.config, choice.source), (7, Source::Tuned));
        let key = Key::new::<Filled>(&device.profile().id, &7);
        let (entry, _) = tuner.cache.get(&key).expect("remembered");
        let wrong =
            |m: &&Measured| m.error.as_ref().is_some_and(|e| e.starts_with("wrong result: "));
        assert_eq!(entry.timings.iter().filter(wrong).count(), 2, "{:?}", entry.timings);
        assert_eq!(entry.timings.iter().filter(|m| m.median_ns.is_some()).count(), 1);
    }

    #[test]
    fn the_fastest_wins_by_a_margin_over_an_earlier_one() {
        let of = |times: &[f64]| {
            let outcomes: Vec<_> = times.iter().map(|ns| Ok(*ns)).enumerate().collect();
            fastest(&outcomes).map(|(i, _)| i)
        };
        assert_eq!(of(&[3.0, 1.0, 2.0]), Some(1));
        assert_eq!(of(&[1.0, 0.99]), Some(0), "too little to prefer it");
        assert_eq!(of(&[1.0, 0.97]), Some(1));
        assert_eq!(of(&[]), None);
        assert_eq!(fastest(&[(0, Err("wrong".to_owned())), (1, Ok(9.0))]), Some((1, 9.0)));
    }

    #[test]
    fn a_nan_anywhere_disagrees() {
        let sample = |values: [f32; 4]| Sample { values: values.to_vec(), tolerance: 0.1 };
        let right = sample([1.0, 2.0, 3.0, 4.0]);
        assert!(right.agrees(&sample([1.0, 2.1, 3.0, 4.0])).is_ok());
        assert!(right.agrees(&sample([1.0, 2.5, 3.0, 4.0])).is_err());
        for at in 0..4 {
            let mut wrong = [1.0, 2.0, 3.0, 4.0];
            wrong[at] = f32::NAN;
            assert!(right.agrees(&sample(wrong)).is_err(), "{at}");
        }
    }
}
