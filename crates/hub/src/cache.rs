//! The cache as Python's `huggingface_hub` keeps it, so that each program finds what the other downloaded.
//!
//! ```text
//! models--owner--name/refs/main                     a commit
//! models--owner--name/blobs/<etag>                  a file; <etag>.incomplete what there is of it so far
//! models--owner--name/snapshots/<commit>/<name>     a link to a blob
//! .locks/models--owner--name/<etag>.lock            held by who writes that blob
//! ```

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::ModelName;

/// The longest name of a blob: one of SHA-256 has 64 letters.
const LONGEST: usize = 128;

/// Between two looks at a lock.
const LOOK: Duration = Duration::from_millis(50);

/// The ETag of a file, which is plain enough to be a file's name: SHA-256 of a large file, git's SHA-1 of a
/// small one, or what a mirror makes up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlobName(String);

impl BlobName {
    /// Of a header. None of what could lead out of a folder or hide in it.
    pub(crate) fn of_etag(etag: &str) -> Option<Self> {
        let etag = etag.trim();
        let etag = etag.strip_prefix("W/").unwrap_or(etag);
        let name = etag.strip_prefix('"').and_then(|etag| etag.strip_suffix('"')).unwrap_or(etag);
        let is_plain = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
        (is_plain && (1..=LONGEST).contains(&name.len())).then(|| Self(name.to_owned()))
    }

    /// Where it is one, in small letters.
    pub(crate) fn sha256(&self) -> Option<String> {
        is_sha256(&self.0).then(|| self.0.to_ascii_lowercase())
    }
}

pub(crate) fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.chars().all(|c| c.is_ascii_hexdigit())
}

/// Whether it can be the name of a commit, and of its folder.
pub(crate) fn is_commit(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.chars().all(|c| c.is_ascii_alphanumeric())
}

/// What there is of one model.
pub(crate) struct Folder {
    root: PathBuf,
    locks: PathBuf,
}

/// A blob that nobody else writes until this is dropped.
pub(crate) struct Locked {
    _file: File,
}

/// Why a blob is not ours to write.
pub(crate) enum NotLocked {
    /// Another program has it.
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

    /// What there is so far of a blob.
    pub(crate) fn incomplete(&self, blob: &BlobName) -> PathBuf {
        self.root.join("blobs").join(format!("{}.incomplete", blob.0))
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// The folder of the commit that was whole last, or that the revision names.
    pub(crate) fn kept(&self, revision: &str) -> Option<PathBuf> {
        let commit = fs::read_to_string(self.root.join("refs").join(revision));
        let commit = commit.map_or_else(|_| revision.to_owned(), |text| text.trim().to_owned());
        let folder = is_commit(&commit).then(|| self.snapshot(&commit));
        folder.filter(|folder| folder.is_dir())
    }

    /// Has a revision's name lead to a commit. That of a commit needs none.
    pub(crate) fn name(&self, revision: &str, commit: &str) -> io::Result<()> {
        if revision == commit {
            return Ok(());
        }
        let path = self.root.join("refs").join(revision);
        make_parent(&path)?;
        fs::write(path, commit)
    }

    /// Waits as long for who has it.
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

    /// Has a blob be a file of a commit, in the place of what is there.
    ///
    /// Where a disk or a system has no links, the file itself goes there, as `huggingface_hub` has it.
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
