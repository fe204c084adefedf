//! The rules, as functions of names and text.
//!
//! Patterns are concatenated from pieces, so that this file does not break its own rules.

use std::collections::{BTreeMap, BTreeSet};

/// All visible entries of the root.
const TOP_LEVEL: [&str; 10] = [
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "README.md",
    "benches",
    "crates",
    "kernels",
    "models",
    "xtask",
];

/// File that measures the load of other programs, and no kernels.
const LOAD: &str = "crates/arch/src/cores.rs";

/// Files that name optional parts of the public crate.
const OPTIONAL_PARTS: [&str; 7] = [
    "crates/arch/src/facts.rs",
    "crates/arch/src/transfer/resource.rs",
    "crates/precompile/src/lib.rs",
    "crates/precompile/src/properties.rs",
    "crates/flashover/src/lib.rs",
    "crates/flashover/src/load_error.rs",
    "crates/flashover/src/engine/builder.rs",
];

/// Maximum size of a tracked file, in bytes.
const SIZE: u64 = 2 << 20;

/// Exception to [`SIZE`] with its own limit: the demo model works without a download.
const CARRIED: (&str, u64) = ("models/demo/model.safetensors", 12 << 20);

/// Forbidden dependencies by package. They keep the layers apart.
const FORBIDDEN_DEPENDENCIES: [(&str, &[&str]); 9] = [
    ("quant", &["checkpoint", "record", "arch", "cubecl", "burn"]),
    ("reference", &["kernels", "tune", "arch", "cubecl", "burn"]),
    ("checkpoint", &["kernels", "tune", "arch", "cubecl", "burn"]),
    ("hub", &["checkpoint", "text", "models", "kernels", "tune", "arch", "cubecl", "burn"]),
    ("text", &["checkpoint", "models", "kernels", "tune", "arch", "cubecl", "burn"]),
    ("kernels", &["burn", "models", "flashover"]),
    ("models", &["cubecl"]),
    ("report", &["burn", "cubecl", "arch", "tune", "kernels", "models", "flashover"]),
    ("xtask", &["burn", "cubecl", "arch", "tune", "kernels", "models", "flashover"]),
];

/// Hosts of single registries or mirrors. Programs should leave that choice to their tools.
const HOSTS: [&str; 7] = [
    concat!("crates", ".io"),
    concat!("pypi", ".org"),
    concat!("pythonhosted", ".org"),
    concat!("deb.", "debian.org"),
    concat!("security.", "debian.org"),
    concat!("registry.", "npmjs.org"),
    concat!("archive.", "ubuntu.com"),
];

/// Prefixes of paths that exist on one machine only.
const FOLDERS: [&str; 4] =
    [concat!("/", "home/"), concat!("/", "root"), concat!("/", "work/"), concat!("/", "Users/")];

/// Checks that the visible top level is exactly [`TOP_LEVEL`]. Tool settings are dotfiles.
pub(super) fn top_level(files: &[String]) -> Vec<String> {
    let found: BTreeSet<&str> = files
        .iter()
        .filter_map(|file| file.split('/').next())
        .filter(|name| !name.starts_with('.'))
        .collect();
    let agreed = BTreeSet::from(TOP_LEVEL);
    let extra =
        found.difference(&agreed).map(|name| format!("{name}: not an allowed top-level entry"));
    let absent = agreed.difference(&found).map(|name| format!("{name}: missing at the top level"));
    extra.chain(absent).collect()
}

/// Checks the size of a file that every clone downloads.
pub(super) fn size(file: &str, bytes: u64) -> Option<String> {
    let (carried, own) = CARRIED;
    let max = if file == carried { own } else { SIZE };
    (bytes > max).then(|| format!("{file}: {bytes} bytes, expected at most {max}"))
}

/// Checks [`FORBIDDEN_DEPENDENCIES`].
pub(super) fn dependencies(packages: &BTreeMap<String, Vec<String>>) -> Vec<String> {
    let mut findings = Vec::new();
    for (package, forbidden) in FORBIDDEN_DEPENDENCIES {
        for dependency in packages.get(package).into_iter().flatten() {
            if forbidden.contains(&dependency.as_str()) {
                findings.push(format!("{package}: depends on {dependency}"));
            }
        }
    }
    findings
}

/// Words that must not open a doc comment; it begins with a verb or the noun that it defines.
const OPENERS: [&str; 9] =
    ["What", "Of", "Whether", "Where", "Who", "How", "That", "Those", "As in"];

/// Words of this project only, with the term of the field.
const PRIVATE_WORDS: [(&str, &str); 8] = [
    (concat!("half ", "sums"), "f16 accumulators"),
    (concat!("turned ", "heads"), "RoPE outputs"),
    (concat!("outlying ", "columns"), "outlier columns"),
    (concat!("prompt ", "passes"), "prefill"),
    (concat!("k in ", "parts"), "split-k"),
    (concat!("sums in ", "f16"), "accumulation in f16"),
    (concat!("product of ", "a quantised"), "matmul with a quantised"),
    (concat!("as it is ", "there"), "unchanged"),
];

/// Most columns of a line of Markdown outside of tables and code, and most lines of the README.
const COLUMNS: usize = 120;
const README_LINES: usize = 150;

/// Checks the prose of one file: openers of doc comments, private words in public documents, long lines of Markdown and
/// the length of the README.
pub(super) fn prose(file: &str, text: &str) -> Vec<String> {
    let mut findings = Vec::new();
    let (rust, markdown) = (file.ends_with(".rs"), file.ends_with(".md"));
    // Generated tables have their own notes.
    let generated = file == "benches/RESULTS.md" || file.starts_with("benches/baselines/");
    if file == "README.md" && text.lines().count() > README_LINES {
        findings.push(format!("{file}: over {README_LINES} lines"));
    }
    let (mut code, mut before) = (false, "");
    for (i, line) in text.lines().enumerate() {
        let mut found = |what: &str| findings.push(format!("{file}:{}: {what}", i + 1));
        let doc =
            |line: &str| ["///", "//!"].iter().any(|mark| line.trim_start().starts_with(mark));
        if rust && doc(line) {
            let own = line.trim_start().trim_start_matches(['/', '!']).trim_start();
            let opens = !doc(before);
            if let Some(word) =
                OPENERS.iter().find(|word| opens && own.starts_with(&format!("{word} ")))
            {
                found(&format!("a doc comment opens with {word}; begin with a verb or a noun"));
            }
        }
        if markdown && line.trim_start().starts_with("```") {
            code = !code;
        }
        let table = line.trim_start().starts_with('|');
        if markdown && !generated && !code && !table && line.chars().count() > COLUMNS {
            found(&format!("over {COLUMNS} columns"));
        }
        if rust && doc(line) || markdown && !generated {
            for (word, term) in PRIVATE_WORDS.iter().filter(|(word, _)| line.contains(word)) {
                found(&format!("`{word}` is {term}"));
            }
        }
        before = line;
    }
    findings
}

/// Guide whose tables quote error texts.
pub(super) const GUIDE: &str = "crates/flashover/docs/troubleshooting.md";

/// Fewest characters of a part of a quote that the sources are searched for.
const QUOTED_PART: usize = 8;

/// Checks that the quotes in the first column of [`GUIDE`] occur in the sources, which [`joined`] returned. In a quote,
/// `...` stands for a variable part.
pub(super) fn symptoms(guide: &str, sources: &[String]) -> Vec<String> {
    let mut findings = Vec::new();
    for (i, line) in guide.lines().enumerate() {
        let Some(row) = line.trim_start().strip_prefix('|') else { continue };
        let cell = row.split('|').next().unwrap_or_default();
        for part in cell.split('`').skip(1).step_by(2).flat_map(|quote| quote.split("...")) {
            let part = part.trim();
            let long = part.chars().count() >= QUOTED_PART;
            if long && !sources.iter().any(|source| source.contains(part)) {
                findings.push(format!("{GUIDE}:{}: no source has the text `{part}`", i + 1));
            }
        }
    }
    findings
}

/// Joins string literals that a backslash continues on the next line. Returns none for files that are not sources of
/// error texts.
pub(super) fn joined(file: &str, text: &str) -> Option<String> {
    if !file.ends_with(".rs") || file.contains("/tests/") {
        return None;
    }
    let mut pieces = text.split("\\\n");
    let first = pieces.next().unwrap_or_default().to_owned();
    Some(pieces.fold(first, |whole, piece| whole + piece.trim_start()))
}

/// Checks the single lines of one file.
pub(super) fn lines(file: &str, text: &str) -> Vec<String> {
    let rust = file.ends_with(".rs");
    let mut findings = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let mut found = |what: &str| findings.push(format!("{file}:{}: {what}", i + 1));
        // The lock file names its registry in every entry.
        if file != "Cargo.lock" {
            if let Some(host) = HOSTS.iter().find(|host| line.contains(**host)) {
                found(&format!("names the host {host}"));
            }
            if FOLDERS.iter().any(|folder| mentions_folder(line, folder)) {
                found("names a folder of one machine");
            }
        }
        if rust {
            source_line(file, line, &mut found);
        }
    }
    findings
}

fn source_line(file: &str, line: &str, found: &mut impl FnMut(&str)) {
    let name = file.rsplit('/').next().unwrap_or(file);
    if !OPTIONAL_PARTS.contains(&file) && line.contains(concat!("cfg", "(feature")) {
        found("uses a build option; make the choice at run time");
    }
    if line.contains(concat!("#[al", "low(")) || line.contains(concat!("#![al", "low(")) {
        found("a lint is silenced without a reason; use `expect` with one");
    }
    for unfinished in [
        concat!("to", "do!"),
        concat!("unimple", "mented!"),
        concat!("dbg", "!("),
        concat!("FIX", "ME"),
    ] {
        if line.contains(unfinished) {
            found(&format!("unfinished: {unfinished}"));
        }
    }
    if name != "timing.rs" && file != LOAD && !file.starts_with("xtask/") && reads_clock(line) {
        found("reads the clock; only timing.rs may measure");
    }
    if file.starts_with("kernels/") && line.contains("burn::") {
        found("kernels must not use Burn");
    }
    if file.starts_with("models/") && line.contains("cubecl") {
        found("models must not use CubeCL");
    }
}

/// True if the line contains `folder` as an absolute path, not as part of a longer relative one.
fn mentions_folder(line: &str, folder: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || "._-~})>*]".contains(c);
    line.match_indices(folder).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + folder.len()..].chars().next();
        let whole_name =
            folder.ends_with('/') || !after.is_some_and(|c| c.is_alphanumeric() || c == '_');
        !before.is_some_and(part) && whole_name
    })
}

fn reads_clock(line: &str) -> bool {
    let imported = line.contains("time::{") && line.contains("Instant");
    imported || line.contains(concat!("Instant", "::now")) || line.contains("time::Instant")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(file: &str, line: &str) -> Option<String> {
        let mut findings = lines(file, &format!("//! First.\n{line}\n"));
        assert!(findings.len() <= 1, "{findings:?}");
        findings.pop()
    }

    #[test]
    fn the_top_level_is_exact() {
        let all: Vec<String> = TOP_LEVEL
            .iter()
            .map(|n| format!("{n}/x"))
            .chain([".cargo/config.toml".into()])
            .collect();
        assert!(top_level(&all).is_empty());
        let mut other = all[1..].to_vec();
        other.push("scripts/run".into());
        assert_eq!(
            top_level(&other),
            ["scripts: not an allowed top-level entry", "Cargo.lock: missing at the top level"]
        );
    }

    #[test]
    fn large_files_are_refused() {
        assert!(size("a", SIZE).is_none());
        assert!(size("a", SIZE + 1).is_some());
        assert!(size(CARRIED.0, SIZE + 1).is_none());
        assert!(size(CARRIED.0, CARRIED.1 + 1).is_some());
    }

    #[test]
    fn forbidden_dependencies_are_named() {
        let graph = |dependency: &str| {
            BTreeMap::from([(
                "reference".to_owned(),
                vec!["half".to_owned(), dependency.to_owned()],
            )])
        };
        assert!(dependencies(&graph("rand")).is_empty());
        assert_eq!(dependencies(&graph("kernels")), ["reference: depends on kernels"]);
    }

    #[test]
    fn hosts_and_machine_folders_are_found_in_any_text() {
        for host in HOSTS {
            assert!(one("README.md", &format!("from https://{host}/x")).is_some(), "{host}");
            assert!(one("Cargo.lock", &format!("from https://{host}/x")).is_none());
        }
        for folder in FOLDERS {
            let found = one("crates/a/src/lib.rs", &format!("let p = \"{folder}\";")).unwrap();
            assert!(found.starts_with("crates/a/src/lib.rs:2: "), "{found}");
            assert!(one("a.md", &format!("see target{folder}x")).is_none());
        }
        assert!(one("a.md", concat!("a /", "rooted tree")).is_none());
    }

    #[test]
    fn quoted_symptoms_are_texts_of_the_sources() {
        let source = "\"cannot open {path}: it is \\\n         locked by {owner}\\nhint: wait\"";
        let sources = [joined("crates/a/src/lib.rs", source).unwrap()];
        let guide =
            |cell: &str| symptoms(&format!("| symptom |\n|---|\n| {cell} | x |\n"), &sources);
        for good in
            ["plain words", "`it is locked by ...`", "`cannot open ...: it is locked`", "`ls`"]
        {
            assert!(guide(good).is_empty(), "{good}");
        }
        let part = format!("{GUIDE}:3: no source has the text `is free now`");
        assert_eq!(guide("`cannot open` or `... is free now`"), [part]);
        assert_eq!(joined("crates/a/tests/it/main.rs", source), None);
        assert_eq!(joined("crates/a/README.md", source), None);
    }

    #[test]
    fn sources_are_finished_and_explain_what_they_silence() {
        for bad in [
            concat!("#[cfg", "(feature = \"x\")]"),
            concat!("#[al", "low(dead_code)]"),
            concat!("#![al", "low(dead_code)]"),
            concat!("to", "do!()"),
            concat!("unimple", "mented!()"),
            concat!("dbg", "!(x)"),
            concat!("// FIX", "ME later"),
        ] {
            assert!(one("crates/a/src/lib.rs", bad).is_some(), "{bad}");
            assert!(one("crates/a/README.md", bad).is_none(), "{bad}");
        }
        assert!(one("a.rs", "#[expect(dead_code, reason = \"x\")]").is_none());
        assert!(one("a.rs", "#[cfg(test)]").is_none());
        let optional = concat!("#[cfg", "(feature = \"x\")]");
        assert!(one(OPTIONAL_PARTS[0], optional).is_none());
    }

    #[test]
    fn the_clock_is_read_in_one_place() {
        for line in [
            concat!("let t = Instant", "::now();"),
            "use std::time::Instant;",
            "use std::time::{Duration, Instant};",
        ] {
            assert!(one("crates/tune/src/tuner.rs", line).is_some(), "{line}");
            assert!(one("crates/tune/src/timing.rs", line).is_none());
            assert!(one("xtask/src/test.rs", line).is_none());
        }
        assert!(one("benches/src/main.rs", "use std::time::{Duration, SystemTime};").is_none());
    }

    #[test]
    fn layers_do_not_know_each_other() {
        assert!(one("kernels/src/a.rs", "use burn::tensor::Tensor;").is_some());
        assert!(one("kernels/src/a.rs", "//! As fast as Burn's.").is_none());
        assert!(one("models/src/a.rs", "use cubecl::prelude::*;").is_some());
        assert!(one("crates/ops/src/a.rs", "use cubecl::prelude::*;").is_none());
    }
}
