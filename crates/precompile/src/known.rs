//! What instances used when they were last compiled, by the very operations that they were compiled from.
//!
//! Most of a sweep is NVRTC's, most of the rest CubeCL's passes; neither runs for what did not change. What ships was
//! recorded by `targets --record`; an instance whose operations, architecture, options or tools are others is not in it and
//! is compiled.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

/// Results by their keys, and which of them were asked for.
#[derive(Debug, Default)]
pub struct Known {
    recorded: BTreeMap<String, Compiled>,
    /// Of this sweep, compiled or known.
    used: Mutex<BTreeMap<String, Compiled>>,
    compiled: Mutex<usize>,
}

/// What `ptxas` reports of an instance.
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
    /// What ships with the program.
    ///
    /// # Panics
    /// When that is damaged, which a test rules out.
    pub fn shipped() -> Self {
        let lines = include_str!("../recorded/targets.jsonl").lines();
        let recorded = lines.map(|line| {
            let Line { key, compiled } = serde_json::from_str(line).expect("one result a line");
            (key, compiled)
        });
        Self { recorded: recorded.collect(), ..Self::default() }
    }

    /// How many instances had to be compiled.
    pub fn compiled(&self) -> usize {
        *held(&self.compiled)
    }

    /// The results of this sweep, one a line, in the order of their keys.
    pub fn lines(&self) -> String {
        let line = |(key, compiled): (&String, &Compiled)| {
            let line = Line { key: key.clone(), compiled: *compiled };
            serde_json::to_string(&line).expect("numbers and a text") + "\n"
        };
        held(&self.used).iter().map(line).collect()
    }

    /// The result of `key`, by `compile` where it is not known.
    pub(crate) fn get_or<E>(
        &self,
        key: String,
        compile: impl FnOnce() -> Result<Compiled, E>,
    ) -> Result<Compiled, E> {
        let compiled = match self.recorded.get(&key) {
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

/// What a result depends on, in 128 bits: the kernel's operations, and everything that makes machine code of them.
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
    fn what_ships_is_whole_and_sorted() {
        let text = include_str!("../recorded/targets.jsonl");
        let known = Known::shipped();
        assert_eq!(known.recorded.len(), text.lines().count());
        for (key, compiled) in &known.recorded {
            assert_eq!(known.get_or(key.clone(), fails), Ok(*compiled));
        }
        assert_eq!((known.lines(), known.compiled()), (text.to_owned(), 0));
    }

    #[test]
    fn the_unknown_is_compiled_and_recorded() {
        let known = Known::default();
        assert_eq!(known.get_or("b".into(), fails), Err("compiled"));
        assert_eq!(known.get_or("b".into(), || Ok::<_, ()>(ONE)), Ok(ONE));
        assert_eq!((known.compiled(), known.lines().lines().count()), (1, 1));
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
