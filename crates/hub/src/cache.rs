//! The cache, in the layout of Python's `huggingface_hub`, so that both programs share downloads.
//!
//! ```text
//! models--owner--name/refs/main                     a commit
//! models--owner--name/blobs/<etag>                  a file; <etag>.incomplete is a partial download
//! models--owner--name/snapshots/<commit>/<name>     a link to a blob
//! .locks/models--owner--name/<etag>.lock            locked while a program writes that blob
//! ```

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::ModelName;

/// Longest name of a blob; a SHA-256 has 64 characters.
const LONGEST: usize = 128;

/// Interval between two attempts to lock.
const LOOK: Duration = Duration::from_millis(50);

/// A file's ETag that is safe as a file name. It is the SHA-256 of a large file, git's SHA-1 of a small one,
/// or an arbitrary name of a mirror.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlobName(String);

impl BlobName {
    /// Parses an ETag header. `None` for names that could leave the folder or be hidden in it.
    pub(crate) fn of_etag(etag: &str) -> Option<Self> {
        let etag = etag.trim();
        let etag = etag.strip_prefix("W/").unwrap_or(etag);
        let name = etag.strip_prefix('"').and_then(|etag| etag.strip_suffix('"')).unwrap_or(etag);
        let is_plain = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
        (is_plain && (1..=LONGEST).contains(&name.len())).then(|| Self(name.to_owned()))
    }

    /// Returns the name in lower case if it is a SHA-256.
    pub(crate) fn sha256(&self) -> Option<String> {
        is_sha256(&self.0).then(|| self.0.to_ascii_lowercase())
    }
}

pub(crate) fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.chars().all(|c| c.is_ascii_hexdigit())
}

/// Returns true if `text` is safe as the name of a commit and of its folder.
pub(crate) fn is_commit(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.chars().all(|c| c.is_ascii_alphanumeric())
}

/// The cache folder of one model.
pub(crate) struct Folder {
    root: PathBuf,
    locks: PathBuf,
}

/// Guard of a blob's lock; other programs do not write the blob until it is dropped.
pub(crate) struct Locked {
    _file: File,
}

/// The reason that a blob could not be locked.
pub(crate) enum NotLocked {
    /// Another program holds this lock file.
    Busy(PathBuf),
    Disk(io::Error),
}

impl Folder {
    pub(crate) fn new(cache: &Path, model: &ModelName) -> Self {
        let name = format!("models--{}", model.name().replace('/', "--"));
        Self { root: cache.join(&name), locks: cache.join(".locks").join(name) }
    }

    pub(crate) fn blob(&self, blob: &BlobName) -> PathBuf {
        self.root.join("blobs").join(&blob.0)
    }

    /// Returns the path of a partially downloaded blob.
    pub(crate) fn incomplete(&self, blob: &BlobName) -> PathBuf {
        self.root.join("blobs").join(format!("{}.incomplete", blob.0))
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// Returns the folder of the last complete commit of a revision, or of the commit that `revision` itself names.
    pub(crate) fn kept(&self, revision: &str) -> Option<PathBuf> {
        let commit = fs::read_to_string(self.root.join("refs").join(revision));
        let commit = commit.map_or_else(|_| revision.to_owned(), |text| text.trim().to_owned());
        let folder = is_commit(&commit).then(|| self.snapshot(&commit));
        folder.filter(|folder| folder.is_dir())
    }

    /// Makes a revision refer to a commit. A revision that is a commit needs no entry.
    pub(crate) fn name(&self, revision: &str, commit: &str) -> io::Result<()> {
        if revision == commit {
            return Ok(());
        }
        let path = self.root.join("refs").join(revision);
        make_parent(&path)?;
        fs::write(path, commit)
    }

    /// Locks a blob; waits up to `wait` for another program that holds the lock.
    pub(crate) fn lock(&self, blob: &BlobName, wait: Duration) -> Result<Locked, NotLocked> {
        let path = self.locks.join(format!("{}.lock", blob.0));
        make_parent(&path).map_err(NotLocked::Disk)?;
        let opened = File::options().create(true).truncate(false).write(true).open(&path);
        let file = opened.map_err(NotLocked::Disk)?;
        let mut waited = Duration::ZERO;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Locked { _file: file }),
                Err(TryLockError::WouldBlock) if waited < wait => thread::sleep(LOOK),
                Err(TryLockError::WouldBlock) => return Err(NotLocked::Busy(path)),
                Err(TryLockError::Error(why)) => return Err(NotLocked::Disk(why)),
            }
            waited += LOOK;
        }
    }

    /// Links a blob as a file of a commit, replacing an existing file.
    ///
    /// Without support for symbolic links the blob itself moves there, as in `huggingface_hub`.
    pub(crate) fn link(&self, commit: &str, name: &str, blob: &BlobName) -> io::Result<PathBuf> {
        let path = self.snapshot(commit).join(name);
        make_parent(&path)?;
        match fs::remove_file(&path) {
            Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
            _ => {}
        }
        match symlink(&Path::new("../../blobs").join(&blob.0), &path) {
            Ok(()) => Ok(path),
            Err(_) => fs::rename(self.blob(blob), &path).map(|()| path),
        }
    }
}

pub(crate) fn make_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(windows)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::windows::fs::symlink_file(target, link)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etags_that_are_plain_names_are_names_of_blobs() {
        let sum = "0123456789abcdef".repeat(4);
        for (etag, name) in [
            (format!("\"{sum}\""), sum.as_str()),
            (format!("W/\"{}\"", &sum[..40]), &sum[..40]),
            ("plain-name_1".to_owned(), "plain-name_1"),
        ] {
            let blob = BlobName::of_etag(&etag).expect("a name");
            assert_eq!((blob.0.as_str(), blob.sha256().is_some()), (name, name == sum), "{etag}");
        }
        assert_eq!(
            BlobName(sum.to_uppercase()).sha256().as_deref(),
            Some(sum.as_str()),
            "one sum, however it is written"
        );
        for bad in [
            "",
            "\"\"",
            "\"../x\"",
            "..",
            "/etc/x",
            "a/b",
            "a\\b",
            "C:x",
            ".hidden",
            "a b",
            "a.lock",
            "\"a",
            "é",
            &"a".repeat(129),
        ] {
            assert_eq!(BlobName::of_etag(bad), None, "{bad}");
        }
    }

    #[test]
    fn commits_are_names_of_folders() {
        assert!(is_commit("0123456789abcdef0123456789abcdef01234567"));
        for bad in ["", "..", "a/b", "a.b", &"a".repeat(65)] {
            assert!(!is_commit(bad), "{bad}");
        }
    }
}
