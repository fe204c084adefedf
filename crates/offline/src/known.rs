//! What instances used when they were last compiled, by the very text that they were compiled from.
//!
//! A sweep takes minutes of NVRTC and no time at all for sources that did not change. What ships was
//! recorded by `targets --record`; an instance whose source, architecture, options or tools are others is
//! not in it and is compiled.

use std::collections::{BTreeMap, HashMap};
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

/// What a result depends on, in 128 bits: the source, and everything that makes machine code of it. The kernel's name
/// in it must be the same for all: CubeCL's ends in a hash of Rust types, which changes with the compiler's flags.
pub(crate) fn key(source: &str, options: &[String], tools: &str) -> String {
    let text = format!("{tools}\0{}\0{}", options.join("\0"), renumbered(source));
    format!("{:032x}", xxh3_128(text.as_bytes()))
}

/// `source` with its variables (`v12`) numbered as they appear: CubeCL numbers those of shared memory otherwise in each
/// process. What follows a dot is no variable but the width of an instruction.
fn renumbered(source: &str) -> String {
    let (mut out, mut numbers) = (String::with_capacity(source.len()), HashMap::new());
    let mut rest = source;
    while let Some(at) = rest.find('v') {
        let digits = rest[at + 1..].bytes().take_while(u8::is_ascii_digit).count();
        let end = at + 1 + digits;
        let word = |c: char| c.is_alphanumeric() || c == '_';
        let begun = if at > 0 { rest[..at].chars().next_back() } else { out.chars().next_back() };
        let inside = begun.is_some_and(|c| word(c) || c == '.') || rest[end..].starts_with(word);
        out += &rest[..at];
        if digits == 0 || inside {
            out += &rest[at..end];
        } else {
            let next = numbers.len();
            out += &format!("v{}", *numbers.entry(&rest[at..end]).or_insert(next));
        }
        rest = &rest[end..];
    }
    out + rest
}

fn held<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Compiled = Compiled { registers: 40, spill_stores: 0, spill_loads: 8, stack: 16 };

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
    fn a_key_is_of_source_options_and_tools() {
        let options = ["--gpu-architecture=sm_89".to_owned()];
        let other = ["--gpu-architecture=sm_90a".to_owned()];
        let of = key("kernel", &options, "13.0");
        assert_eq!(of.len(), 32);
        // Numbers of variables are names; widths of instructions, and which variable is which, are not.
        let named = |text| key(text, &options, "13.0");
        assert_eq!(named("v12 = v7 + v12; ld.v4"), named("v3 = v5 + v3; ld.v4"));
        assert_ne!(named("v12 = v7 + v12; ld.v4"), named("v12 = v7 + v7; ld.v4"));
        assert_ne!(named("v12 = v7 + v12; ld.v4"), named("v12 = v7 + v12; ld.v2"));
        assert_ne!(named("av1"), named("av2"));
        for changed in [
            key("kernel ", &options, "13.0"),
            key("kernel", &other, "13.0"),
            key("kernel", &options, "13.1"),
        ] {
            assert_ne!(of, changed);
        }
    }
}
