//! A cache of the resource usage of compiled kernel instances, keyed by their operations.
//!
//! NVRTC takes most of the time of a sweep and CubeCL's passes most of the rest. Neither runs for an instance if a kept
//! result has the same operations, architecture, options and tools.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

/// Kept results by key.
#[derive(Debug, Default)]
pub struct Known {
    kept: BTreeMap<String, Compiled>,
    /// Results used in this sweep, compiled or kept.
    used: Mutex<BTreeMap<String, Compiled>>,
    compiled: Mutex<usize>,
}

/// Resource usage of an instance, as `ptxas` reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Compiled {
    pub(crate) registers: u32,
    pub(crate) spill_stores: u32,
    pub(crate) spill_loads: u32,
    pub(crate) stack: u32,
    pub(crate) shared: u32,
}

/// One line of the record.
#[derive(Serialize, Deserialize)]
struct Line {
    key: String,
    #[serde(flatten)]
    compiled: Compiled,
}

impl Known {
    /// Reads results from the text of a file, one per line. Skips other lines: another version wrote them.
    pub fn read(text: &str) -> Self {
        let line = |line| serde_json::from_str::<Line>(line).ok();
        let kept = text.lines().filter_map(line).map(|Line { key, compiled }| (key, compiled));
        Self { kept: kept.collect(), ..Self::default() }
    }

    /// Returns the number of instances that had to be compiled.
    pub fn compiled(&self) -> usize {
        *held(&self.compiled)
    }

    /// Formats the results of this sweep, one per line, in key order; with `all` also all kept ones.
    pub fn lines(&self, all: bool) -> String {
        let used = held(&self.used);
        let mut results = if all { self.kept.clone() } else { BTreeMap::new() };
        results.extend(used.iter().map(|(key, compiled)| (key.clone(), *compiled)));
        let line = |(key, compiled)| {
            serde_json::to_string(&Line { key, compiled }).expect("numbers and a text") + "\n"
        };
        results.into_iter().map(line).collect()
    }

    /// Returns the kept result of `key`, else calls `compile`.
    pub(crate) fn get_or<E>(
        &self,
        key: String,
        compile: impl FnOnce() -> Result<Compiled, E>,
    ) -> Result<Compiled, E> {
        let compiled = match self.kept.get(&key) {
            Some(compiled) => *compiled,
            None => {
                let compiled = compile()?;
                *held(&self.compiled) += 1;
                compiled
            }
        };
        held(&self.used).insert(key, compiled);
        Ok(compiled)
    }
}

/// Hashes everything that a result depends on: the kernel's operations, the compiler options and the tools' versions.
pub(crate) fn key(text: &str, options: &[String], tools: &str) -> String {
    let text = format!("{tools}\0{}\0{text}", options.join("\0"));
    format!("{:032x}", xxh3_128(text.as_bytes()))
}

fn held<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Compiled =
        Compiled { registers: 40, spill_stores: 0, spill_loads: 8, stack: 16, shared: 4096 };

    fn fails() -> Result<Compiled, &'static str> {
        Err("compiled")
    }

    #[test]
    fn kept_results_are_not_compiled_again() {
        let first = Known::default();
        assert_eq!(first.get_or("b".into(), fails), Err("compiled"));
        for key in ["b", "a"] {
            assert_eq!(first.get_or(key.into(), || Ok::<_, ()>(ONE)), Ok(ONE));
        }
        let text = first.lines(false);
        assert_eq!((first.compiled(), text.lines().count()), (2, 2));
        let damaged = format!("{{}}\n{text}{}", &text[..20]);
        let second = Known::read(&damaged);
        assert_eq!(second.get_or("b".into(), fails), Ok(ONE));
        assert_eq!((second.compiled(), second.lines(true)), (0, text));
        assert_eq!(second.lines(false).lines().count(), 1);
    }

    #[test]
    fn a_key_is_of_operations_options_and_tools() {
        let options = ["--gpu-architecture=sm_89".to_owned()];
        let other = ["--gpu-architecture=sm_90a".to_owned()];
        let of = key("kernel", &options, "13.0");
        assert_eq!(of.len(), 32);
        for changed in [
            key("kernel ", &options, "13.0"),
            key("kernel", &other, "13.0"),
            key("kernel", &options, "13.1"),
        ] {
            assert_ne!(of, changed);
        }
    }
}
