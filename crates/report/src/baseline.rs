//! Compares a run with the records of an earlier run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Metadata};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use record::{Key, Record};

use crate::devices::Chosen;
use crate::fail::usage;
use crate::render::{Align, Style, Table, millis, ratio};

/// Records of an earlier run.
#[derive(Debug)]
pub(crate) struct Baseline {
    file: PathBuf,
    records: Vec<Record>,
}

impl Baseline {
    /// Reads a file that `--save` wrote.
    pub(crate) fn read(file: &Path) -> Result<Self> {
        let hint = "use a file written by `cargo xtask bench --save FILE`";
        let cannot = |why: String| {
            usage(format!("the baseline {} cannot be used: {why}", file.display()), hint)
        };
        // Reading a device may never end; a pipe is fine.
        let device = |meta: Metadata| {
            let kind = meta.file_type();
            kind.is_char_device() || kind.is_block_device()
        };
        if fs::metadata(file).is_ok_and(device) {
            return Err(cannot("it is a device, not a file".to_owned()));
        }
        let text = fs::read_to_string(file).map_err(|why| cannot(why.to_string()))?;
        let records = record::read_baseline(&text).map_err(|why| cannot(why.to_string()))?;
        Ok(Self { file: file.to_owned(), records })
    }

    fn arch_ids(&self) -> BTreeSet<&str> {
        self.records.iter().map(|r| r.arch_id.as_str()).collect()
    }

    /// Refuses a baseline of other devices or of another profile, before anything is measured.
    pub(crate) fn check_devices(&self, chosen: &Chosen, profile: Option<&str>) -> Result<()> {
        let restricted = profile.map(|name| format!("@{name}")).unwrap_or_default();
        let ids = chosen.devices.iter().map(|device| device.arch_id.clone() + &restricted);
        let ids: Vec<_> = ids.collect();
        let here: BTreeSet<_> = ids.iter().map(String::as_str).collect();
        if here.is_disjoint(&self.arch_ids()) { Err(self.foreign(&here)) } else { Ok(()) }
    }

    fn foreign(&self, here: &BTreeSet<&str>) -> anyhow::Error {
        let list = |ids: &BTreeSet<&str>| match ids.len() {
            0 => "no record".to_owned(),
            _ => ids.iter().copied().collect::<Vec<_>>().join(", "),
        };
        usage(
            format!("{} has no records to compare with this run", self.file.display()),
            format!(
                "use a baseline with the same arch_id; the baseline has {}, this run has {}",
                list(&self.arch_ids()),
                list(here)
            ),
        )
    }

    /// Matches records by [`Key`]. `threshold` is the accepted slowdown as a fraction.
    pub(crate) fn compare(&self, now: &[Record], threshold: f64) -> Result<Comparison> {
        let base: BTreeMap<Key, &Record> = self.records.iter().map(|r| (r.key(), r)).collect();
        let mut partners = BTreeSet::new();
        let mut rows = Vec::new();
        let mut fresh = Vec::new();
        for record in now {
            let key = record.key();
            let Some(old) = base.get(&key) else {
                fresh.push(name(&key));
                continue;
            };
            rows.push(Row { name: name(&key), verdict: judge(old, record, threshold) });
            partners.insert(key);
        }
        if rows.is_empty() {
            let here: BTreeSet<_> = now.iter().map(|r| r.arch_id.as_str()).collect();
            if here.is_disjoint(&self.arch_ids()) {
                return Err(self.foreign(&here));
            }
            return Err(usage(
                format!("{} has no case in common with this run", self.file.display()),
                "run with the suite, filter and profile of the baseline",
            ));
        }
        let alone = base.keys().filter(|key| !partners.contains(*key)).map(name).collect();
        Ok(Comparison { rows, alone, fresh, threshold })
    }
}

fn name(key: &Key) -> String {
    let profile = key.profile.as_ref().map(|p| format!(" as {p}")).unwrap_or_default();
    format!("{}: {}{profile}", key.backend, key.case)
}

/// Result of one case.
#[derive(Debug, Clone, PartialEq)]
enum Verdict {
    /// Slower than the threshold, and beyond the spread of both runs.
    Slower(f64, f64),
    /// Faster, by the same criteria.
    Faster(f64, f64),
    /// No significant difference.
    Same(f64, f64),
    /// It failed in this run but not in the baseline.
    Broken(f64),
    /// It failed in the baseline, so there is no time to compare with.
    NoBase,
}

/// Compares medians with [`beyond`]. A run without percentiles has no spread.
fn judge(base: &Record, now: &Record, threshold: f64) -> Verdict {
    let Some(old) = base.median_ns else { return Verdict::NoBase };
    let Some(new) = now.median_ns else { return Verdict::Broken(old) };
    let run = |r: &Record, median: f64| Run {
        p10: r.p10_ns.unwrap_or(median),
        median,
        p90: r.p90_ns.unwrap_or(median),
    };
    let (base, now) = (run(base, old), run(now, new));
    if beyond(base, now, threshold) {
        Verdict::Slower(old, new)
    } else if beyond(now, base, threshold) {
        Verdict::Faster(old, new)
    } else {
        Verdict::Same(old, new)
    }
}

/// Percentiles of one case in one run, in nanoseconds.
#[derive(Debug, Clone, Copy)]
struct Run {
    p10: f64,
    median: f64,
    p90: f64,
}

/// True if `slow` took longer than `fast` by more than the threshold and by more than noise.
///
/// Noise is twice the spread between the medians: from the median of `fast` to its 90th percentile, plus from the 10th
/// percentile of `slow` to its median. The factor is 2 because samples of one run are taken within seconds. They differ
/// less than two runs on a machine that also does other work.
///
/// Noise is capped at the time of `fast`, so that no spread excuses more than twice the time.
fn beyond(fast: Run, slow: Run, threshold: f64) -> bool {
    let noise = 2.0 * (fast.p90 - fast.median) + 2.0 * (slow.median - slow.p10);
    let within = slow.median <= fast.median * (1.0 + threshold)
        || slow.median - fast.median <= noise.min(fast.median);
    // A NaN counts as slower.
    !within
}

#[derive(Debug)]
struct Row {
    name: String,
    verdict: Verdict,
}

/// Comparison of two runs.
#[derive(Debug)]
pub(crate) struct Comparison {
    rows: Vec<Row>,
    /// Cases that only the baseline has.
    alone: Vec<String>,
    /// Cases that only this run has.
    fresh: Vec<String>,
    threshold: f64,
}

impl Comparison {
    /// Number of cases that got slower or fail now.
    pub(crate) fn regressions(&self) -> usize {
        let bad = |row: &&Row| matches!(row.verdict, Verdict::Slower(..) | Verdict::Broken(_));
        self.rows.iter().filter(bad).count()
    }

    pub(crate) fn table(&self) -> Table {
        let mut table = Table::new([
            ("case", Align::Left),
            ("base ms", Align::Right),
            ("now ms", Align::Right),
            ("now / base", Align::Right),
            ("verdict", Align::Left),
        ]);
        for Row { name, verdict } in &self.rows {
            let (times, word) = match verdict {
                Verdict::Slower(old, new) => (Some((old, new)), "SLOWER"),
                Verdict::Faster(old, new) => (Some((old, new)), "faster"),
                Verdict::Same(old, new) => (Some((old, new)), "same"),
                Verdict::Broken(_) => (None, "FAILS NOW"),
                Verdict::NoBase => (None, "failed in the baseline"),
            };
            let base = match verdict {
                Verdict::Broken(old) => millis(*old),
                _ => times.map(|(old, _)| millis(*old)).unwrap_or_default(),
            };
            table.row([
                name.clone(),
                base,
                times.map(|(_, new)| millis(*new)).unwrap_or_default(),
                times.map(|(old, new)| ratio(new / old)).unwrap_or_default(),
                word.to_owned(),
            ]);
        }
        table
    }

    /// Renders the table, a summary, and the cases without a counterpart.
    pub(crate) fn render(&self, style: Style) -> String {
        let title = "Against the baseline";
        let mut out = match style {
            Style::Markdown => format!("\n## {title}\n\n"),
            Style::Terminal => format!("\n{title}\n{}\n", "=".repeat(title.len())),
        };
        out += &self.table().render(style);
        out += &format!(
            "\nSlower by more than {}% and beyond the spread of both runs: {} of {}.\n",
            self.threshold * 100.0,
            self.regressions(),
            self.rows.len()
        );
        let lists = [
            ("Only in the baseline, so not compared", &self.alone),
            ("Not in the baseline, so not compared", &self.fresh),
        ];
        for (what, names) in lists.into_iter().filter(|(_, names)| !names.is_empty()) {
            out += &format!("\n{what}:\n\n");
            for name in names {
                out += &format!("- {}\n", style.escape(name));
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use record::Backend;

    use crate::devices::Device;
    use crate::render::sample;

    fn record(median: f64, spread: f64) -> Record {
        let mut record = sample::run()[0].records[1].clone();
        record.median_ns = Some(median);
        record.p10_ns = Some(median * (1.0 - spread));
        record.p90_ns = Some(median * (1.0 + spread));
        record
    }

    fn baseline(records: Vec<Record>) -> Baseline {
        Baseline { file: "base.jsonl".into(), records }
    }

    #[test]
    fn slower_needs_the_threshold_and_separate_bands() {
        let verdict = |old: (f64, f64), new: (f64, f64)| {
            judge(&record(old.0, old.1), &record(new.0, new.1), 0.05)
        };
        assert_eq!(verdict((100.0, 0.01), (120.0, 0.01)), Verdict::Slower(100.0, 120.0));
        // Beyond the threshold, but the bands 80..120 and 96..144 overlap.
        assert_eq!(verdict((100.0, 0.2), (120.0, 0.2)), Verdict::Same(100.0, 120.0));
        // Separate bands, but within the threshold.
        assert_eq!(verdict((100.0, 0.001), (104.0, 0.001)), Verdict::Same(100.0, 104.0));
        assert_eq!(verdict((100.0, 0.01), (80.0, 0.01)), Verdict::Faster(100.0, 80.0));
        assert_eq!(verdict((100.0, 0.2), (80.0, 0.2)), Verdict::Same(100.0, 80.0));
    }

    #[test]
    fn a_band_that_touches_is_noise_and_nan_is_not() {
        let mut base = record(100.0, 0.0);
        let mut now = record(120.0, 0.0);
        base.p90_ns = Some(105.0);
        now.p10_ns = Some(115.0);
        assert_eq!(judge(&base, &now, 0.05), Verdict::Same(100.0, 120.0));
        now.p10_ns = Some(115.1);
        assert_eq!(judge(&base, &now, 0.05), Verdict::Slower(100.0, 120.0));
        now.median_ns = Some(f64::NAN);
        now.p10_ns = Some(f64::NAN);
        assert!(matches!(judge(&base, &now, 0.05), Verdict::Slower(..)));
    }

    #[test]
    fn noise_does_not_excuse_more_than_twice_the_time() {
        // The 10th percentile of the slow run is below half its median, so twice the spread reaches zero.
        let noisy = |median: f64| {
            let mut record = record(median, 0.0);
            (record.p10_ns, record.p90_ns) = (Some(median * 0.4), Some(median * 4.0));
            record
        };
        for times in [2.1, 100.0, 4e6] {
            let verdict = judge(&noisy(100.0), &noisy(100.0 * times), 0.05);
            assert!(matches!(verdict, Verdict::Slower(..)), "{times}: {verdict:?}");
            let verdict = judge(&noisy(100.0 * times), &noisy(100.0), 0.05);
            assert!(matches!(verdict, Verdict::Faster(..)), "{times}: {verdict:?}");
        }
        assert!(matches!(judge(&noisy(100.0), &noisy(190.0), 0.05), Verdict::Same(..)));
        assert!(matches!(judge(&noisy(100.0), &noisy(210.0), 1.5), Verdict::Same(..)), "allowed");
    }

    #[test]
    fn a_shared_machine_may_drift_by_what_its_samples_spread() {
        for drift in [1.06, 1.09, 1.13] {
            let verdict = judge(&record(100.0, 0.05), &record(100.0 * drift, 0.05), 0.05);
            assert!(matches!(verdict, Verdict::Same(..)), "{drift}: {verdict:?}");
        }
    }

    #[test]
    fn a_case_that_fails_now_is_a_regression() {
        let mut now = record(100.0, 0.1);
        now.median_ns = None;
        let comparison = baseline(vec![record(100.0, 0.1)]).compare(&[now], 0.05).unwrap();
        assert_eq!(comparison.regressions(), 1);
        assert!(comparison.render(Style::Markdown).contains("FAILS NOW"));
    }

    #[test]
    fn cases_without_a_partner_are_named() {
        let all = sample::run()[0].records.clone();
        let comparison = baseline(all[..3].to_vec()).compare(&all[1..], 0.05).unwrap();
        assert_eq!(comparison.regressions(), 0);
        insta::assert_snapshot!(comparison.render(Style::Markdown));
    }

    #[test]
    fn another_device_is_refused_with_both_names() {
        let mut foreign = record(100.0, 0.1);
        foreign.arch_id = "cuda-sm89-128".into();
        let error = baseline(vec![foreign]).compare(&[record(100.0, 0.1)], 0.05).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("cuda-sm89-128") && text.contains("cuda-sm90-132"), "{text}");
        assert_eq!(crate::fail::report(&error), 2);
    }

    #[test]
    fn a_profile_is_part_of_the_device() {
        let mut restricted = record(100.0, 0.1);
        restricted.arch_id = "cuda-sm90-132@rtx4090".into();
        let baseline = baseline(vec![restricted]);
        let device = |id: &str| {
            let device = Device {
                backend: Backend::Cuda,
                name: "card".into(),
                arch_id: id.into(),
                software: false,
            };
            Chosen { devices: vec![device], why: "test" }
        };
        let check = |id, profile| baseline.check_devices(&device(id), profile);
        assert!(check("cuda-sm90-132", Some("rtx4090")).is_ok());
        for (id, profile) in [("cuda-sm90-132", None), ("cuda-sm89-128", Some("rtx4090"))] {
            let text = check(id, profile).unwrap_err().to_string();
            assert!(text.contains(&format!("this run has {id}")), "{text}");
        }
        let nothing = baseline.compare(&[], 0.05).unwrap_err().to_string();
        assert!(nothing.ends_with("this run has no record"), "{nothing}");
    }

    #[test]
    fn nothing_in_common_is_refused() {
        let all = sample::run()[0].records.clone();
        let error = baseline(all[..1].to_vec()).compare(&all[1..], 0.05).unwrap_err();
        assert!(error.to_string().contains("no case in common"), "{error}");
    }

    #[test]
    fn an_unreadable_baseline_is_the_callers_error() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("x.jsonl");
        for text in [None, Some(""), Some("{}"), Some("{\"schema\": 99}"), Some("not json")] {
            if let Some(text) = text {
                fs::write(&file, text).unwrap();
            }
            let error = Baseline::read(&file).unwrap_err();
            assert_eq!(crate::fail::report(&error), 2, "{text:?}");
            assert!(error.to_string().contains("hint:"), "{error}");
        }
    }
}
