//! TuneCache: what was measured, as text.
//!
//! One entry per line, sorted by key, so that two files merge and a diff reads well. A line that
//! does not parse, or of another format, is reported and ignored; the others still count; a file in
//! which no line even begins as a result does is refused. Writing takes a lock file, reads again what
//! another process wrote meanwhile, and replaces the file, behind all links, by rename: a crash in the
//! middle leaves the old file.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use arch::{ArchId, ArchProfile};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use time::format_description::well_known::Rfc3339;
use time::{Duration, OffsetDateTime};

use crate::{Kernel, config_of};

/// Bumped when a field of [`Entry`] changes meaning.
const FORMAT: u32 = 1;

/// Largest cache file that is read; all results of one card take about a megabyte.
const MOST_BYTES: u64 = 64 << 20;

/// Results that ship with the program: those of `benches/baselines`, without times.
const RECORDED: &str = include_str!(concat!(env!("OUT_DIR"), "/recorded.jsonl"));

/// The file that holds this user's results: `FLASHOVER_TUNE_CACHE`, unless it is empty, else
/// `flashover/tune.jsonl` in the cache folder; none on a machine that has neither.
pub fn default_cache_path() -> Option<PathBuf> {
    match std::env::var_os("FLASHOVER_TUNE_CACHE").filter(|path| !path.is_empty()) {
        Some(path) => Some(path.into()),
        None => Some(dirs::cache_dir()?.join("flashover/tune.jsonl")),
    }
}

/// What a result is valid for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Key {
    pub kernel: String,
    pub version: u32,
    pub arch_id: ArchId,
    pub bucket: String,
}

impl Key {
    /// The key of `problem` on `arch_id`.
    pub fn of<K: Kernel>(arch_id: &ArchId, problem: &K::Problem) -> Self {
        Self {
            kernel: K::NAME.to_owned(),
            version: K::VERSION,
            arch_id: arch_id.clone(),
            bucket: K::bucket(problem),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} v{} {} [{}]", self.kernel, self.version, self.arch_id, self.bucket)
    }
}

/// One candidate's outcome: a time, or why it has none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    pub config: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub median_ns: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The outcome of tuning one key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    pub format: u32,
    #[serde(flatten)]
    pub key: Key,
    /// The problem that was measured; others of its bucket share the result.
    pub problem: Value,
    pub config: Value,
    /// Time of the config. Shipped results leave times to `benches/baselines`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub median_ns: Option<f64>,
    /// Every candidate, in the order tried.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub timings: Vec<Measured>,
    pub commit: String,
    /// UTC, RFC 3339.
    pub date: String,
}

impl Entry {
    pub(crate) const FORMAT: u32 = FORMAT;
}

/// Origin of a config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Measured on this machine.
    Tuned,
    /// Shipped with the program for this architecture.
    Recorded,
    /// Measured on a card of the same family, see [`ArchId::families`].
    Inherited(ArchId),
    /// First candidate, unmeasured.
    Default,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tuned => f.write_str("tuned"),
            Self::Recorded => f.write_str("recorded"),
            Self::Inherited(from) => write!(f, "inherited from {from}"),
            Self::Default => f.write_str("default"),
        }
    }
}

/// A line that was ignored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// File, or the key of a result whose config does not fit.
    pub origin: String,
    /// From 1; 0 for a key.
    pub line: usize,
    pub why: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: ignored: {}", self.origin, self.why),
            line => write!(f, "{}:{line}: ignored: {}", self.origin, self.why),
        }
    }
}

/// The cache file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error(
    "tune cache {path}: {why}\nhint: FLASHOVER_TUNE_CACHE names another file; it and its folder \
     must be writable"
)]
pub struct CacheError {
    pub path: PathBuf,
    pub why: io::Error,
}

/// What came of a text of results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Merged {
    /// Keys that it has a result of.
    pub results: usize,
    /// Those whose result was not older than what was known.
    pub taken: usize,
}

/// Recorded and measured results.
#[derive(Debug, Clone, Default)]
pub struct TuneCache {
    recorded: BTreeMap<Key, Entry>,
    measured: BTreeMap<Key, Entry>,
    path: Option<PathBuf>,
    warnings: Vec<Warning>,
}

impl TuneCache {
    /// The results that ship with the program, and nothing kept on disk.
    pub fn shipped() -> Self {
        let mut cache = Self::default();
        (cache.recorded, cache.warnings) = parse(RECORDED.as_bytes(), "recorded");
        cache
    }

    /// The shipped results and those of the file at `path`, which need not exist yet.
    ///
    /// # Errors
    /// A file that exists and cannot be read, or is no cache. Damaged lines are no error: see
    /// [`TuneCache::warnings`].
    pub fn open(path: &Path) -> Result<Self, CacheError> {
        let mut cache = Self { path: Some(path.to_owned()), ..Self::shipped() };
        let (entries, warnings) = parse(&bytes_of(path)?, &path.display().to_string());
        cache.measured = entries;
        cache.warnings.extend(warnings);
        Ok(cache)
    }

    /// Lines that were ignored while reading.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// The result for `key`: one measured by this user, or else a shipped one.
    pub fn get(&self, key: &Key) -> Option<(&Entry, Source)> {
        let measured = self.measured.get(key).map(|e| (e, Source::Tuned));
        measured.or_else(|| self.recorded.get(key).map(|e| (e, Source::Recorded)))
    }

    /// Results for the problem of `key` on other cards of its families, the nearest first: its own family before older
    /// ones, whole cards before restricted ones.
    fn relatives(&self, key: &Key) -> impl Iterator<Item = &Entry> {
        let keys = self.recorded.keys().chain(self.measured.keys());
        let others: BTreeSet<_> =
            keys.map(|other| &other.arch_id).filter(|id| **id != key.arch_id).collect();
        let families = key.arch_id.families();
        let place = |id: &ArchId| {
            let own = id.families().into_iter().next()?;
            families.iter().position(|family| *family == own)
        };
        let mut near: Vec<_> = others.into_iter().filter_map(|id| Some((place(id)?, id))).collect();
        near.sort_by_key(|(place, id)| (*place, id.0.contains('@')));
        near.into_iter().filter_map(|(_, id)| {
            let key = Key { arch_id: id.clone(), ..key.clone() };
            self.get(&key).map(|(entry, _)| entry)
        })
    }

    /// The config of the nearest relative of `arch` that can run `problem`, and that relative.
    pub fn inherited<K: Kernel>(
        &self,
        arch: &ArchProfile,
        problem: &K::Problem,
    ) -> Option<(K::Config, &ArchId)> {
        self.relatives(&Key::of::<K>(&arch.id, problem)).find_map(|entry| {
            // A result that this version cannot read is named where its own architecture looks it up.
            let config = config_of::<K>(&entry.config).ok()?;
            K::check(arch, problem, &config).ok()?;
            Some((config, &entry.key.arch_id))
        })
    }

    /// Notes that the result for `key` is of no use, and why.
    pub(crate) fn reject(&mut self, key: &Key, why: String) {
        self.warnings.push(Warning { origin: key.to_string(), line: 0, why });
    }

    /// Every result, shipped ones hidden by measured ones, in key order.
    pub fn entries(&self) -> impl Iterator<Item = (&Entry, Source)> {
        let mut all: BTreeMap<_, _> =
            self.recorded.iter().map(|(k, e)| (k, (e, Source::Recorded))).collect();
        all.extend(self.measured.iter().map(|(k, e)| (k, (e, Source::Tuned))));
        all.into_values()
    }

    /// Adds a result and, when the cache has a file, writes it.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn insert(&mut self, entry: Entry) -> Result<(), CacheError> {
        let key = entry.key.clone();
        self.measured.insert(key.clone(), entry);
        // What was measured just now counts, whatever date the file has.
        self.save(Some(&key))
    }

    /// Finds out whether results can be written, before time is spent on measuring them. Nothing is
    /// changed but that the folder and the lock file are made.
    ///
    /// # Errors
    /// They cannot.
    pub fn check_writable(&self) -> Result<(), CacheError> {
        let Some(path) = &self.path else { return Ok(()) };
        let wrap = |why| CacheError { path: path.clone(), why };
        let target = behind_links(path).map_err(wrap)?;
        regular(&target).map_err(wrap)?;
        let _lock = lock(&target).map_err(wrap)?;
        let temporary = beside(&target, "new");
        File::create(&temporary).and_then(|_| fs::remove_file(&temporary)).map_err(wrap)
    }

    /// Adds the results in `text`, of two for one key the newer, what ships among them.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn merge_text<T: AsRef<[u8]> + ?Sized>(
        &mut self,
        text: &T,
        origin: &str,
    ) -> Result<Merged, CacheError> {
        let (mut entries, warnings) = parse(text.as_ref(), origin);
        let results = entries.len();
        entries.retain(|key, entry| self.get(key).is_none_or(|(have, _)| have.date <= entry.date));
        let taken = entries.len();
        self.measured.extend(entries);
        self.warnings.extend(warnings);
        self.save(None)?;
        Ok(Merged { results, taken })
    }

    /// The measured results as the file holds them.
    pub fn to_text(&self) -> String {
        render(&self.measured)
    }

    /// Writes the file, after taking over what another process wrote; `own` is kept as it is here.
    fn save(&mut self, own: Option<&Key>) -> Result<(), CacheError> {
        let Some(path) = self.path.clone() else { return Ok(()) };
        let wrap = |why| CacheError { path: path.clone(), why };
        let target = behind_links(&path).map_err(wrap)?;
        // A device would be replaced by a file, and reading one may not end.
        regular(&target).map_err(wrap)?;
        let _lock = lock(&target).map_err(wrap)?;
        let bytes = bytes_of(&path)?;
        let (mut theirs, _) = parse(&bytes, "");
        theirs.retain(|key, _| Some(key) != own);
        merge(&mut self.measured, theirs);
        let temporary = beside(&target, "new");
        let mut file = File::create(&temporary).map_err(wrap)?;
        file.write_all(render(&self.measured).as_bytes()).map_err(wrap)?;
        file.write_all(&foreign_lines(&bytes)).map_err(wrap)?;
        file.sync_all().map_err(wrap)?;
        fs::rename(&temporary, &target).map_err(wrap)
    }
}

/// Refuses what is there and no file: a folder, a device, a pipe.
fn regular(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(meta) if !meta.is_file() => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "it is there, and no regular file"))
        }
        // What is not there, or cannot be looked at, is told of by whoever opens it.
        _ => Ok(()),
    }
}

/// The lock of the cache at `target`, held until it is dropped; makes the folder.
fn lock(target: &Path) -> io::Result<File> {
    fs::create_dir_all(folder_of(target))?;
    // Never truncated: a file of this name may be somebody's.
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(beside(target, "flashover-lock"))?;
    file.lock()?;
    Ok(file)
}

fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// `.tune.jsonl.new` for `tune.jsonl`: the whole name, so that no other file has this one.
fn beside(target: &Path, suffix: &str) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.{suffix}"))
}

/// The path that `path` stands for, whether there is a file or not.
fn behind_links(path: &Path) -> io::Result<PathBuf> {
    // As many as Linux follows.
    const MOST: usize = 40;
    let mut target = path.to_owned();
    for _ in 0..MOST {
        if !target.is_symlink() {
            return Ok(target);
        }
        target = folder_of(&target).join(fs::read_link(&target)?);
    }
    Err(io::Error::other("too many symbolic links"))
}

type Parsed = (BTreeMap<Key, Entry>, Vec<Warning>);

/// Lines of other formats, as they are: another version of this program reads them.
fn foreign_lines(bytes: &[u8]) -> Vec<u8> {
    let foreign = lines_of(bytes).filter(|(_, line)| {
        format_of(&String::from_utf8_lossy(line)).is_some_and(|f| f != u64::from(FORMAT))
    });
    foreign.flat_map(|(_, line)| [line, b"\n".as_slice()]).flatten().copied().collect()
}

/// The bytes of a cache file, which need not exist. A file of something else is refused, because it
/// would be overwritten with the first result.
fn bytes_of(path: &Path) -> Result<Vec<u8>, CacheError> {
    let refused = |why| CacheError { path: path.to_owned(), why };
    regular(path).map_err(refused)?;
    let len = fs::metadata(path).map_or(0, |meta| meta.len());
    if len > MOST_BYTES {
        let why = format!("expected at most {} MiB, got {} MiB", MOST_BYTES >> 20, len >> 20);
        return Err(refused(io::Error::new(io::ErrorKind::FileTooLarge, why)));
    }
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(why) => return Err(refused(why)),
    };
    if lines_of(&bytes).next().is_some() && !lines_of(&bytes).any(|(_, line)| is_ours(line)) {
        let why = "no line of it is a result, so it is left alone";
        return Err(refused(io::Error::new(io::ErrorKind::InvalidData, why)));
    }
    Ok(bytes)
}

/// Lines that are not blank, with their numbers, from 1.
fn lines_of(bytes: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let lines = bytes.split(|byte| *byte == b'\n').enumerate();
    lines.map(|(i, line)| (i + 1, line)).filter(|(_, line)| !line.trim_ascii().is_empty())
}

/// Whether a line is a result of any version, or the beginning of one that was damaged.
fn is_ours(line: &[u8]) -> bool {
    line.starts_with(br#"{"format":"#) || format_of(&String::from_utf8_lossy(line)).is_some()
}

fn format_of(line: &str) -> Option<u64> {
    serde_json::from_str::<Value>(line).ok()?.get("format")?.as_u64()
}

fn parse(bytes: &[u8], origin: &str) -> Parsed {
    let (mut entries, mut warnings) = Parsed::default();
    // A result of the future would win over every later one. Clocks differ by less than a day.
    let tomorrow = rfc3339(OffsetDateTime::now_utc() + Duration::DAY);
    for (number, line) in lines_of(bytes) {
        let mut ignore = |why: String| {
            warnings.push(Warning { origin: origin.to_owned(), line: number, why });
        };
        match serde_json::from_slice::<Entry>(line) {
            Ok(entry) if entry.format != FORMAT => {
                ignore(format!("format {}, this program reads format {FORMAT}", entry.format));
            }
            Ok(Entry { median_ns: Some(ns), .. }) if ns.is_nan() || ns <= 0.0 => {
                ignore(format!("time {ns} is not positive"));
            }
            Ok(entry) if !is_utc(&entry.date) => {
                ignore(format!("date {:?} is none of RFC 3339 in UTC", entry.date));
            }
            Ok(entry) if entry.date.as_str() > tomorrow.as_str() => {
                ignore(format!("date {} lies in the future", entry.date));
            }
            Ok(entry) => merge(&mut entries, BTreeMap::from([(entry.key.clone(), entry)])),
            Err(e) => ignore(format!("not a result: {e}")),
        }
    }
    (entries, warnings)
}

fn rfc3339(time: OffsetDateTime) -> String {
    time.format(&Rfc3339).expect("a year of four digits")
}

/// Whether it is a date of RFC 3339 in UTC, which order as text.
fn is_utc(date: &str) -> bool {
    date.ends_with('Z') && OffsetDateTime::parse(date, &Rfc3339).is_ok()
}

/// The newer result of each key wins, of equally old ones that of `from`; dates are RFC 3339 in UTC, so
/// they order as text.
fn merge(into: &mut BTreeMap<Key, Entry>, from: BTreeMap<Key, Entry>) {
    for (key, entry) in from {
        let newer = into.get(&key).is_none_or(|have| have.date <= entry.date);
        if newer {
            into.insert(key, entry);
        }
    }
}

fn render(entries: &BTreeMap<Key, Entry>) -> String {
    let line = |e: &Entry| serde_json::to_string(e).expect("plain data serialises") + "\n";
    entries.values().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(bucket: &str, date: &str, ns: f64) -> Entry {
        Entry {
            format: FORMAT,
            key: Key {
                kernel: "matmul".into(),
                version: 1,
                arch_id: ArchId("cuda-sm89-128".into()),
                bucket: bucket.into(),
            },
            problem: Value::Null,
            config: serde_json::json!({ "tile_m": 128 }),
            median_ns: Some(ns),
            timings: Vec::new(),
            commit: "abc".into(),
            date: date.into(),
        }
    }

    #[test]
    fn shipped_results_are_readable() {
        assert_eq!(TuneCache::shipped().warnings(), &[]);
    }

    #[test]
    fn damaged_and_foreign_lines_are_named_and_the_rest_counts() {
        let good = serde_json::to_string(&entry("a", "2026-01-01T00:00:00Z", 5.0)).expect("plain");
        let foreign = good.replace("\"format\":1", "\"format\":9").replace("\"a\"", "\"b\"");
        let frozen = good.replace("5.0", "-1.0").replace("\"a\"", "\"c\"");
        let text = format!("{good}\n{{\"format\":1,\n{foreign}\n{frozen}\n");
        let (entries, warnings) = parse(text.as_bytes(), "f");
        assert_eq!(entries.len(), 1);
        assert_eq!(warnings.iter().map(|w| w.line).collect::<Vec<_>>(), [2, 3, 4]);
    }

    #[test]
    fn the_newer_result_wins_whatever_the_order() {
        let old = entry("a", "2026-01-01T00:00:00Z", 9.0);
        let new = entry("a", "2026-02-01T00:00:00Z", 5.0);
        for pair in [[&old, &new], [&new, &old]] {
            let mut cache = TuneCache::default();
            for e in pair {
                let text = serde_json::to_string(e).expect("plain");
                cache.merge_text(&text, "f").expect("no file to write");
            }
            let (found, source) = cache.get(&old.key).expect("merged");
            assert_eq!((found.median_ns, source), (Some(5.0), Source::Tuned));
        }
    }

    #[test]
    fn what_ships_is_not_hidden_by_older_results_or_undated_ones() {
        let shipped = TuneCache::shipped();
        let (first, _) = shipped.entries().next().expect("something ships");
        let merged = |date: &str| {
            let text = serde_json::to_string(&Entry { date: date.into(), ..first.clone() });
            let mut cache = TuneCache::shipped();
            let merged = cache.merge_text(&text.expect("plain"), "f").expect("no file to write");
            (merged.results, merged.taken, cache.measured.len(), cache.warnings().len())
        };
        assert_eq!(merged("2020-01-01T00:00:00Z"), (1, 0, 0, 0));
        let now = rfc3339(OffsetDateTime::now_utc());
        assert_eq!(merged(&now), (1, 1, 1, 0), "{now}");
        assert_eq!(merged("2999-01-01T00:00:00Z"), (0, 0, 0, 1), "it would win forever");
        for undated in
            ["", "garbage", "2999-01-01", "2999-01-01T00:00:00+01:00", "2999-13-01T00:00:00Z"]
        {
            assert_eq!(merged(undated), (0, 0, 0, 1), "{undated}");
        }
    }

    #[test]
    fn relatives_are_the_nearest_cards_first() {
        let of = |id: &str, bucket: &str, ns| {
            let mut entry = entry(bucket, "2026-01-01T00:00:00Z", ns);
            entry.key.arch_id = ArchId(id.into());
            serde_json::to_string(&entry).expect("plain") + "\n"
        };
        let text = [
            of("cuda-sm90-132@rtx4090", "a", 1.0),
            of("cuda-sm89-76", "a", 2.0),
            of("cuda-sm90-132", "a", 3.0),
            of("cuda-sm90-132@rtx5090", "a", 4.0),
            of("cuda-sm89-76", "b", 5.0),
            of("vulkan-10de-2335-nvidia.580.159.04", "a", 6.0),
        ];
        let mut cache = TuneCache::default();
        cache.merge_text(&text.concat(), "f").expect("no file to write");
        let near = |id: &str| {
            let key = Key { arch_id: ArchId(id.into()), ..entry("a", "", 0.0).key };
            cache.relatives(&key).map(|entry| entry.median_ns).collect::<Vec<_>>()
        };
        assert_eq!(near("cuda-sm89-128"), [Some(2.0), Some(1.0)]);
        assert_eq!(near("cuda-sm90-132@rtx4080"), [Some(2.0), Some(1.0)]);
        assert_eq!(near("cuda-sm120-170"), [Some(4.0), Some(2.0), Some(1.0)]);
        assert_eq!(near("vulkan-10de-2330-nvidia.570.1"), [Some(6.0)]);
        assert!(near("vulkan-1002-744c-radv").is_empty() && near("cuda-sm86-82").is_empty());
    }

    #[test]
    fn of_equally_old_results_the_later_one_wins() {
        let mut cache = TuneCache::default();
        for ns in [9.0, 5.0, 7.0] {
            let text = serde_json::to_string(&entry("a", "2026-01-01T00:00:00Z", ns));
            cache.merge_text(&text.expect("plain"), "f").expect("no file to write");
        }
        assert_eq!(cache.measured.values().map(|e| e.median_ns).collect::<Vec<_>>(), [Some(7.0)]);
    }

    #[test]
    fn what_was_measured_now_wins_over_a_future_date() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("tune.jsonl");
        let mut cache = TuneCache::open(&path).expect("absent file");
        let soon = rfc3339(OffsetDateTime::now_utc() + Duration::HOUR);
        cache.insert(entry("a", &soon, 9.0)).expect("writable");
        cache.insert(entry("b", &soon, 9.0)).expect("writable");
        let mut cache = TuneCache::open(&path).expect("readable");
        cache.insert(entry("a", "2026-01-01T00:00:00Z", 5.0)).expect("writable");
        let kept = TuneCache::open(&path).expect("readable");
        let times: Vec<_> = kept.measured.values().map(|e| e.median_ns).collect();
        assert_eq!(times, [Some(5.0), Some(9.0)]);
    }

    #[test]
    fn two_writers_keep_each_others_results() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("sub/tune.jsonl");
        let mut one = TuneCache::open(&path).expect("absent file");
        let mut two = TuneCache::open(&path).expect("absent file");
        one.insert(entry("a", "2026-01-01T00:00:00Z", 1.0)).expect("writable");
        two.insert(entry("b", "2026-01-01T00:00:00Z", 2.0)).expect("writable");
        let both = TuneCache::open(&path).expect("readable");
        assert_eq!(both.measured.len(), 2);
        assert_eq!(both.warnings(), TuneCache::shipped().warnings());
    }

    #[test]
    fn results_of_another_version_survive_a_rewrite() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("tune.jsonl");
        let newer = r#"{"format":99,"whatever":[1,2]}"#;
        fs::write(&path, format!("{newer}\nnot JSON\n")).expect("writable");
        let mut cache = TuneCache::open(&path).expect("readable");
        cache.insert(entry("a", "2026-01-01T00:00:00Z", 1.0)).expect("writable");
        let text = fs::read_to_string(&path).expect("written");
        assert!(text.lines().any(|l| l == newer) && text.lines().count() == 2, "{text}");
    }

    #[test]
    fn a_file_that_is_no_cache_is_refused_and_kept() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("tune.jsonl");
        for bytes in [b"export PATH\n".as_slice(), b"\xff\n", b"{\n}\n"] {
            let mut cache = TuneCache::open(&path).expect("absent file");
            fs::write(&path, bytes).expect("writable");
            let text = TuneCache::open(&path).expect_err("no cache").to_string();
            assert!(text.contains("\nhint: "), "{text}");
            assert!(cache.insert(entry("a", "2026-01-01T00:00:00Z", 1.0)).is_err());
            assert_eq!(fs::read(&path).expect("there"), bytes);
            fs::remove_file(&path).expect("ours");
        }
    }

    #[test]
    fn every_damaged_line_is_ignored_and_named_even_when_no_other_is_left() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("tune.jsonl");
        let good = serde_json::to_string(&entry("a", "2026-01-01T00:00:00Z", 5.0)).expect("plain");
        let cases: [(Vec<u8>, usize); 5] = [
            (good.as_bytes()[..60].to_vec(), 0),
            ([good.as_bytes(), b"\n\xff\n"].concat(), 1),
            ((good.clone() + &good).into_bytes(), 0),
            (good.replace("5.0", "1e400").into_bytes(), 0),
            (b"{\"format\":99,\"whatever\":\"\xff\"}\n".to_vec(), 0),
        ];
        for (bytes, kept) in cases {
            fs::write(&path, &bytes).expect("writable");
            let shown = String::from_utf8_lossy(&bytes);
            let mut cache = TuneCache::open(&path).expect("a damaged cache");
            assert_eq!((cache.measured.len(), cache.warnings().len()), (kept, 1), "{shown}");
            cache.insert(entry("b", "2026-01-01T00:00:00Z", 1.0)).expect("written");
            let foreign = bytes.starts_with(b"{\"format\":99");
            let left = fs::read(&path).expect("there");
            assert_eq!(left.ends_with(&bytes), foreign, "another version's line stays: {shown}");
        }
    }

    #[test]
    fn the_lock_is_nobody_elses_file() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = |name: &str| dir.path().join(name);
        for name in ["Cargo.lock", ".Cargo.jsonl.flashover-lock"] {
            fs::write(path(name), "kept").expect("writable");
        }
        for name in ["Cargo.jsonl", "x.lock"] {
            let mut cache = TuneCache::open(&path(name)).expect("absent file");
            cache.insert(entry("a", "2026-01-01T00:00:00Z", 1.0)).expect("writable");
            assert_eq!(TuneCache::open(&path(name)).expect("readable").measured.len(), 1);
        }
        for name in ["Cargo.lock", ".Cargo.jsonl.flashover-lock"] {
            assert_eq!(fs::read_to_string(path(name)).expect("there"), "kept");
        }
    }

    #[test]
    fn a_link_stays_a_link() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("sub/tune.jsonl", &link).expect("linked");
        for bucket in ["a", "b"] {
            let mut cache = TuneCache::open(&link).expect("readable");
            cache.insert(entry(bucket, "2026-01-01T00:00:00Z", 1.0)).expect("writable");
        }
        assert!(link.is_symlink());
        let behind = TuneCache::open(&dir.path().join("sub/tune.jsonl")).expect("readable");
        assert_eq!(behind.measured.len(), 2);
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_found_out_beforehand() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("sub/tune.jsonl");
        let cache = TuneCache::open(&path).expect("absent file");
        cache.check_writable().expect("can be written");
        assert!(!path.exists(), "nothing to write yet");
        for path in ["/proc/flashover/tune.jsonl", "/dev/null/tune.jsonl"] {
            let cache = TuneCache { path: Some(path.into()), ..TuneCache::default() };
            let text = cache.check_writable().expect_err("no such folder").to_string();
            assert!(text.contains("\nhint: "), "{text}");
        }
        TuneCache::shipped().check_writable().expect("keeps nothing");
    }

    #[test]
    fn concurrent_writers_lose_nothing() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("tune.jsonl");
        std::thread::scope(|scope| {
            for t in 0..4 {
                let path = &path;
                scope.spawn(move || {
                    for i in 0..8 {
                        let mut cache = TuneCache::open(path).expect("readable");
                        let bucket = format!("{t}-{i}");
                        cache.insert(entry(&bucket, "2026-01-01T00:00:00Z", 1.0)).expect("written");
                    }
                });
            }
        });
        assert_eq!(TuneCache::open(&path).expect("readable").measured.len(), 32);
    }

    #[test]
    fn a_half_written_file_costs_its_last_line_only() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("tune.jsonl");
        let mut cache = TuneCache::open(&path).expect("absent file");
        cache.insert(entry("a", "2026-01-01T00:00:00Z", 1.0)).expect("writable");
        cache.insert(entry("b", "2026-01-01T00:00:00Z", 1.0)).expect("writable");
        let text = fs::read_to_string(&path).expect("written");
        fs::write(&path, &text[..text.len() - 20]).expect("writable");
        let cut = TuneCache::open(&path).expect("readable");
        assert_eq!((cut.measured.len(), cut.warnings().len()), (1, 1));
    }
}
