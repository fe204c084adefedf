//! [`TuneCache`]: tuning results in a text file.
//!
//! Each line holds one entry, sorted by key, so that files merge and diffs are readable. A line that
//! does not parse, or has another format number, is reported and ignored; the others still count. A
//! file without a single line that starts like a result is refused.
//!
//! A write takes a lock file, merges entries that another process wrote meanwhile, and replaces the
//! file by rename, with symbolic links resolved. A crash in the middle leaves the old file.

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

/// Format number, incremented when a field of [`Entry`] changes meaning.
const FORMAT: u32 = 1;

/// Largest accepted cache file in bytes; all results of one card take about a megabyte.
const MAX_BYTES: u64 = 64 << 20;

/// Results shipped with the program: those of `benches/baselines`, without times.
const RECORDED: &str = include_str!(concat!(env!("OUT_DIR"), "/recorded.jsonl"));

/// Returns the path of the user's results: `FLASHOVER_TUNE_CACHE` if set and not empty, else
/// `flashover/tune.jsonl` in the cache folder. `None` if the machine has no cache folder either.
pub fn default_cache_path() -> Option<PathBuf> {
    match std::env::var_os("FLASHOVER_TUNE_CACHE").filter(|path| !path.is_empty()) {
        Some(path) => Some(path.into()),
        None => Some(dirs::cache_dir()?.join("flashover/tune.jsonl")),
    }
}

/// Key of a result: kernel, version, architecture and bucket.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Key {
    pub kernel: String,
    pub version: u32,
    pub arch_id: ArchId,
    pub bucket: String,
}

impl Key {
    /// Returns the key of `problem` on `arch_id`.
    pub fn new<K: Kernel>(arch_id: &ArchId, problem: &K::Problem) -> Self {
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

/// Outcome of one candidate: a time or an error.
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
    /// The measured problem; others in its bucket share the result.
    pub problem: Value,
    pub config: Value,
    /// Median nanoseconds of the config. Shipped results have none: times stay in `benches/baselines`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub median_ns: Option<f64>,
    /// Outcomes of all candidates, in the order of measuring.
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
    /// Measured on another card of the same family, see [`ArchId::families`].
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

/// An ignored result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// Name of the file, or the key if the result's config does not fit.
    pub origin: String,
    /// Line number from 1; 0 if `origin` is a key.
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
    "tune cache {path}: {why}\nhint: set FLASHOVER_TUNE_CACHE to a writable file in a writable \
     folder"
)]
pub struct CacheError {
    pub path: PathBuf,
    pub why: io::Error,
}

/// Outcome of a merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Merged {
    /// Number of keys with a result in the merged text.
    pub results: usize,
    /// Number of those whose result was not older than the one in the cache.
    pub taken: usize,
}

/// A cache of shipped and measured results.
#[derive(Debug, Clone, Default)]
pub struct TuneCache {
    recorded: BTreeMap<Key, Entry>,
    measured: BTreeMap<Key, Entry>,
    path: Option<PathBuf>,
    warnings: Vec<Warning>,
}

impl TuneCache {
    /// Returns the shipped results, without a file on disk.
    pub fn shipped() -> Self {
        let mut cache = Self::default();
        (cache.recorded, cache.warnings) = parse(RECORDED.as_bytes(), "recorded");
        cache
    }

    /// Opens the shipped results and those of the file at `path`, which need not exist yet.
    ///
    /// # Errors
    /// The file exists but cannot be read, is too large, or is not a cache. Damaged lines are no error:
    /// see [`TuneCache::warnings`].
    pub fn open(path: &Path) -> Result<Self, CacheError> {
        let mut cache = Self { path: Some(path.to_owned()), ..Self::shipped() };
        let (entries, warnings) = parse(&bytes_of(path)?, &path.display().to_string());
        cache.measured = entries;
        cache.warnings.extend(warnings);
        Ok(cache)
    }

    /// Returns the ignored lines, and results whose config did not fit.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// Returns the result for `key`: the user's own, else the shipped one.
    pub fn get(&self, key: &Key) -> Option<(&Entry, Source)> {
        let measured = self.measured.get(key).map(|e| (e, Source::Tuned));
        measured.or_else(|| self.recorded.get(key).map(|e| (e, Source::Recorded)))
    }

    /// Returns results for the problem of `key` on other cards of its families, nearest first: its own family before
    /// older ones, whole cards before restricted ones.
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

    /// Returns the first config of a related architecture that can run `problem` on `arch`, and that architecture.
    pub fn inherited<K: Kernel>(
        &self,
        arch: &ArchProfile,
        problem: &K::Problem,
    ) -> Option<(K::Config, &ArchId)> {
        self.relatives(&Key::new::<K>(&arch.id, problem)).find_map(|entry| {
            // An unreadable result is reported only when its own architecture looks it up.
            let config = config_of::<K>(&entry.config).ok()?;
            K::check(arch, problem, &config).ok()?;
            Some((config, &entry.key.arch_id))
        })
    }

    /// Adds a warning that the result for `key` cannot be used.
    pub(crate) fn reject(&mut self, key: &Key, why: String) {
        self.warnings.push(Warning { origin: key.to_string(), line: 0, why });
    }

    /// Returns all results in key order; a measured one hides the shipped one of the same key.
    pub fn entries(&self) -> impl Iterator<Item = (&Entry, Source)> {
        let mut all: BTreeMap<_, _> =
            self.recorded.iter().map(|(k, e)| (k, (e, Source::Recorded))).collect();
        all.extend(self.measured.iter().map(|(k, e)| (k, (e, Source::Tuned))));
        all.into_values()
    }

    /// Adds a result and writes the cache file, if there is one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn insert(&mut self, entry: Entry) -> Result<(), CacheError> {
        let key = entry.key.clone();
        self.measured.insert(key.clone(), entry);
        // A result measured just now wins over any date in the file.
        self.save(Some(&key))
    }

    /// Checks that results can be written, before time is spent on measuring. Creates the folder and the
    /// lock file, nothing else.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn check_writable(&self) -> Result<(), CacheError> {
        let Some(path) = &self.path else { return Ok(()) };
        let wrap = |why| CacheError { path: path.clone(), why };
        let target = behind_links(path).map_err(wrap)?;
        regular(&target).map_err(wrap)?;
        let _lock = lock(&target).map_err(wrap)?;
        let temporary = beside(&target, "new");
        File::create(&temporary).and_then(|_| fs::remove_file(&temporary)).map_err(wrap)
    }

    /// Merges the results in `text`. For each key the newer result wins, also over shipped ones; at equal
    /// dates, the one in `text`.
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

    /// Formats the measured results as in the file.
    pub fn to_text(&self) -> String {
        render(&self.measured)
    }

    /// Writes the file after merging results that another process wrote; the result for `own` is not replaced.
    fn save(&mut self, own: Option<&Key>) -> Result<(), CacheError> {
        let Some(path) = self.path.clone() else { return Ok(()) };
        let wrap = |why| CacheError { path: path.clone(), why };
        let target = behind_links(&path).map_err(wrap)?;
        // The rename would replace a device by a file, and reading a device may never end.
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

/// Returns an error if `path` exists and is not a regular file: a folder, a device, a pipe.
fn regular(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(meta) if !meta.is_file() => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "it exists, but is not a regular file"))
        }
        // A missing or unreadable path is reported when it is opened.
        _ => Ok(()),
    }
}

/// Locks the cache at `target` until the file is dropped; creates the folder.
fn lock(target: &Path) -> io::Result<File> {
    fs::create_dir_all(folder_of(target))?;
    // Never truncated: a file of this name may belong to something else.
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

/// Returns `.tune.jsonl.new` for `tune.jsonl`; it contains the whole name, so that two caches never share it.
fn beside(target: &Path, suffix: &str) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.{suffix}"))
}

/// Resolves the symbolic links of `path`; the target need not exist.
fn behind_links(path: &Path) -> io::Result<PathBuf> {
    // Linux follows as many.
    const MAX_LINKS: usize = 40;
    let mut target = path.to_owned();
    for _ in 0..MAX_LINKS {
        if !target.is_symlink() {
            return Ok(target);
        }
        target = folder_of(&target).join(fs::read_link(&target)?);
    }
    Err(io::Error::other("too many symbolic links"))
}

type Parsed = (BTreeMap<Key, Entry>, Vec<Warning>);

/// Returns lines of other formats unchanged, for other versions of this program.
fn foreign_lines(bytes: &[u8]) -> Vec<u8> {
    let foreign = lines_of(bytes).filter(|(_, line)| {
        format_of(&String::from_utf8_lossy(line)).is_some_and(|f| f != u64::from(FORMAT))
    });
    foreign.flat_map(|(_, line)| [line, b"\n".as_slice()]).flatten().copied().collect()
}

/// Reads a cache file; a missing one is empty. Refuses any other kind of file, because the first result
/// would overwrite it.
fn bytes_of(path: &Path) -> Result<Vec<u8>, CacheError> {
    let refused = |why| CacheError { path: path.to_owned(), why };
    regular(path).map_err(refused)?;
    let len = fs::metadata(path).map_or(0, |meta| meta.len());
    if len > MAX_BYTES {
        let why = format!("expected at most {} MiB, got {} MiB", MAX_BYTES >> 20, len >> 20);
        return Err(refused(io::Error::new(io::ErrorKind::FileTooLarge, why)));
    }
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(why) => return Err(refused(why)),
    };
    if lines_of(&bytes).next().is_some() && !lines_of(&bytes).any(|(_, line)| is_ours(line)) {
        let why = "it contains no results, so it is not overwritten";
        return Err(refused(io::Error::new(io::ErrorKind::InvalidData, why)));
    }
    Ok(bytes)
}

/// Returns the non-blank lines with their numbers from 1.
fn lines_of(bytes: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let lines = bytes.split(|byte| *byte == b'\n').enumerate();
    lines.map(|(i, line)| (i + 1, line)).filter(|(_, line)| !line.trim_ascii().is_empty())
}

/// True for a result of any version, and for the start of a damaged one.
fn is_ours(line: &[u8]) -> bool {
    line.starts_with(br#"{"format":"#) || format_of(&String::from_utf8_lossy(line)).is_some()
}

fn format_of(line: &str) -> Option<u64> {
    serde_json::from_str::<Value>(line).ok()?.get("format")?.as_u64()
}

fn parse(bytes: &[u8], origin: &str) -> Parsed {
    let (mut entries, mut warnings) = Parsed::default();
    // A result dated in the future would win over later ones. Clocks differ by less than a day.
    let tomorrow = rfc3339(OffsetDateTime::now_utc() + Duration::DAY);
    for (number, line) in lines_of(bytes) {
        let mut ignore = |why: String| {
            warnings.push(Warning { origin: origin.to_owned(), line: number, why });
        };
        match serde_json::from_slice::<Entry>(line) {
            Ok(entry) if entry.format != FORMAT => {
                ignore(format!(
                    "got format {}, but this version reads format {FORMAT}",
                    entry.format
                ));
            }
            Ok(Entry { median_ns: Some(ns), .. }) if ns.is_nan() || ns <= 0.0 => {
                ignore(format!("expected a time above 0 ns, got {ns}"));
            }
            Ok(entry) if !is_utc(&entry.date) => {
                ignore(format!("expected an RFC 3339 date in UTC, got {:?}", entry.date));
            }
            Ok(entry) if entry.date.as_str() > tomorrow.as_str() => {
                ignore(format!("date {} is in the future", entry.date));
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

/// True for an RFC 3339 date in UTC; such dates sort as text.
fn is_utc(date: &str) -> bool {
    date.ends_with('Z') && OffsetDateTime::parse(date, &Rfc3339).is_ok()
}

/// Merges `from` into `into`. For each key the newer result wins; at equal dates, that of `from`. Dates
/// are RFC 3339 in UTC, so they sort as text.
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
mod tests;
