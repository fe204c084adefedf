//! The tests of ONNX's operators, beside the committed lists of those that do not pass.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use anyhow::{Context, Result};
use record::Backend;
use report::fail::check as failed;

use crate::programs::Programs;

/// Output of `flashover onnx test`: the tests that do not pass, on a CPU as on CUDA.
const LIST: &str = include_str!("../../benches/baselines/onnx/node-tests.txt");

/// Tests with another outcome on Vulkan. The card of the record has no bf16, and its division is not correctly rounded.
const VULKAN: &str = include_str!("../../benches/baselines/onnx/vulkan.txt");

/// Tests of all suites in the wheel onnx 1.22.0.
const ALL: usize = 1914;

/// Folders of tests.
const SUITES: [&str; 5] = ["node", "simple", "pytorch-converted", "pytorch-operator", "light"];

/// Tests of one run by outcome.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Counts {
    passed: usize,
    all: usize,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} tests passed; the others are those of the list", self.passed, self.all)
    }
}

/// Runs all tests on a backend. Tests that do not pass must be those of the committed list, and refused for its reason.
pub(crate) fn check(
    programs: &Programs,
    folder: &Path,
    backend: Backend,
    profile: Option<&str>,
) -> Result<Counts> {
    let mut counts = Counts::default();
    let mut have = BTreeMap::new();
    for suite in SUITES {
        let mut command = programs.command("flashover");
        command.args(["onnx", "test", "--backend", backend.name()]).arg(folder.join(suite));
        command.args(profile.iter().flat_map(|own| ["--profile", own]));
        let output = command.output().context("cannot start flashover")?;
        let printed = String::from_utf8_lossy(&output.stdout);
        let Some((passed, all)) = printed.lines().last().and_then(summary) else {
            let log = String::from_utf8_lossy(&output.stderr);
            return Err(failed(format!("the tests of {suite} ended early: {}", log.trim())));
        };
        (counts.passed, counts.all) = (counts.passed + passed, counts.all + all);
        have.extend(outcomes(&printed));
    }
    if counts.all != ALL {
        return Err(failed(format!("{} tests of ONNX ran, expected {ALL}", counts.all)));
    }
    let mut list = outcomes(LIST);
    if backend == Backend::Vulkan {
        list.extend(outcomes(VULKAN));
    }
    let differences = differences(&have, &list);
    if !differences.is_empty() {
        let what = format!("{} tests of ONNX differ from the list", differences.len());
        return Err(failed(format!("{what}:\n{}", differences.join("\n"))));
    }
    Ok(counts)
}

/// Reads `3 of 4 passed, ...`.
fn summary(line: &str) -> Option<(usize, usize)> {
    let (passed, rest) = line.split_once(" of ")?;
    Some((passed.parse().ok()?, rest.split_once(' ')?.0.parse().ok()?))
}

/// Returns the outcome of each test that did not pass: `refused: why`, or `FAILED` or `WRONG` without the numbers that follow.
fn outcomes(printed: &str) -> BTreeMap<String, String> {
    let outcome = |line: &str| {
        let (name, rest) = line.split_once(' ')?;
        let (word, _) = rest.split_once(':')?;
        match word {
            "refused" => Some((name.to_owned(), rest.to_owned())),
            "FAILED" | "WRONG" => Some((name.to_owned(), word.to_owned())),
            _ => None,
        }
    };
    printed.lines().filter_map(outcome).collect()
}

fn differences(have: &BTreeMap<String, String>, list: &BTreeMap<String, String>) -> Vec<String> {
    let names: BTreeSet<_> = have.keys().chain(list.keys()).collect();
    let passes = |of: &BTreeMap<String, String>, name: &String| {
        of.get(name).map_or_else(|| "passed".to_owned(), Clone::clone)
    };
    let apart = names.into_iter().map(|name| (name, passes(have, name), passes(list, name)));
    apart
        .filter(|(_, have, list)| have != list)
        .map(|(name, have, list)| format!("{name} {have}, expected: {list}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "test_a refused: no kernel\ntest_b WRONG: output 0: 1, expected 2\n\
                           5 of 7 passed, 1 refused, 0 failed, 1 wrong\n";

    #[test]
    fn a_test_that_passes_or_fails_against_the_list_is_a_difference() {
        assert_eq!(summary(PRINTED.lines().last().unwrap()), Some((5, 7)));
        let have = outcomes(PRINTED);
        assert_eq!(differences(&have, &outcomes(PRINTED)), Vec::<String>::new());
        let list = outcomes("test_b WRONG: output 0: 3, expected 2\ntest_c refused: why\n");
        let want = [
            "test_a refused: no kernel, expected: passed",
            "test_c passed, expected: refused: why",
        ];
        assert_eq!(differences(&have, &list), want);
    }
}
