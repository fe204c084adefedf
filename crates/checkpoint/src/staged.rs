//! Replaces folders atomically.
//!
//! Files are written into a hidden folder next to the target and synced to disk. The hidden folder then replaces the
//! target in one step, so a kill at any moment leaves the old folder or the new one. The hidden folder's name depends
//! only on the target's, so the next writer of the target removes the remains of a killed one. Its owner holds a lock
//! on it.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::Error;

/// A folder that is being written next to the one that it will replace.
#[derive(Debug)]
pub struct Staged {
    target: PathBuf,
    staging: PathBuf,
    /// Lock on the staging folder, which becomes the target in [`Staged::finish`].
    lock: File,
    finished: bool,
}

impl Staged {
    /// Begins to write `target`, which need not exist.
    ///
    /// # Errors
    /// [`Error::Write`] if the parent folder of the target cannot be written, or another process writes the target.
    pub fn begin(target: impl AsRef<Path>) -> Result<Self, Error> {
        let target = target.as_ref();
        // Resolves links, so that they stay links.
        let target = target.canonicalize().unwrap_or_else(|_| target.to_owned());
        let refused = |why| Error::Write { path: target.clone(), why };
        let name = target.file_name().ok_or_else(|| refused(ErrorKind::InvalidFilename.into()))?;
        let hidden = |what: &str| {
            let name = format!(".{}.flashover-{what}", name.to_string_lossy());
            target.with_file_name(name)
        };
        let (staging, old) = (hidden("new"), hidden("old"));
        match fs::create_dir(&staging) {
            Err(why) if why.kind() != ErrorKind::AlreadyExists => return Err(refused(why)),
            Ok(()) | Err(_) => {}
        }
        let lock = locked(&staging).map_err(refused)?;
        // Cleans up after a killed process.
        if old.exists() && !target.exists() {
            fs::rename(&old, &target).map_err(refused)?;
        } else if old.exists() {
            fs::remove_dir_all(&old).map_err(refused)?;
        }
        clear(&staging).map_err(refused)?;
        Ok(Self { target, staging, lock, finished: false })
    }

    /// Returns the folder to write into.
    pub fn path(&self) -> &Path {
        &self.staging
    }

    /// Replaces the target by the folder. Files of the target that were not rewritten stay.
    ///
    /// # Errors
    /// [`Error::Write`]; the target is then unchanged, or it is complete and only the old folder could not be removed.
    pub fn finish(mut self) -> Result<(), Error> {
        let ended = self.exchange().and_then(|replaced| match replaced {
            Some(_) => fs::remove_dir_all(&self.staging),
            None => Ok(()),
        });
        ended.map_err(|why| Error::Write { path: self.target.clone(), why })
    }

    /// Replaces the target like [`finish`](Self::finish), and begins the next version. If the target existed, no other
    /// process can write it in between.
    ///
    /// # Errors
    /// [`Error::Write`]; the target is then unchanged, or it is complete and nothing more can be written.
    pub fn publish(&mut self) -> Result<(), Error> {
        let path = self.target.clone();
        let refused = |why| Error::Write { path: path.clone(), why };
        match self.exchange().map_err(refused)? {
            Some(replaced) => {
                clear(&self.staging).map_err(refused)?;
                (self.lock, self.finished) = (replaced, false);
            }
            None => *self = Self::begin(&self.target)?,
        }
        Ok(())
    }

    /// Replaces the target by the staging folder. Returns the lock of the replaced folder if that folder now has the
    /// name of the staging folder.
    fn exchange(&mut self) -> io::Result<Option<File>> {
        let Self { target, staging, .. } = &*self;
        if !target.exists() {
            synchronise(staging)?;
            fs::rename(staging, target)?;
            self.finished = true;
            self.synchronise_parent()?;
            return Ok(None);
        }
        // The old folder will get the name of the staging folder. The lock protects it from cleanup by other writers.
        let replaced = locked(target)?;
        carry_over(target, staging)?;
        fs::set_permissions(staging, fs::metadata(target)?.permissions())?;
        synchronise(staging)?;
        let exchanged = renameat_with(CWD, staging, CWD, target, RenameFlags::EXCHANGE);
        let replaced = match exchanged {
            Ok(()) => Some(replaced),
            // Some file systems cannot exchange. `begin` undoes the first rename if the second did not happen.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                let old = staging.with_extension("flashover-old");
                fs::rename(target, &old)?;
                fs::rename(staging, target)?;
                fs::remove_dir_all(&old)?;
                None
            }
            Err(why) => return Err(why.into()),
        };
        self.finished = true;
        self.synchronise_parent()?;
        Ok(replaced)
    }

    fn synchronise_parent(&self) -> io::Result<()> {
        let parent = self.target.parent();
        let parent = parent.filter(|parent| *parent != Path::new(""));
        File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
    }
}

impl Drop for Staged {
    /// Removes an unfinished folder while the lock is still held.
    fn drop(&mut self) {
        if !self.finished {
            // On an error, the next writer of the target removes it.
            let _ = fs::remove_dir_all(&self.staging);
        }
        let _ = self.lock.unlock();
    }
}

/// Opens and locks a folder. Fails if another process holds the lock or has replaced the folder meanwhile.
fn locked(folder: &Path) -> io::Result<File> {
    let busy = || io::Error::new(ErrorKind::ResourceBusy, "another process is writing it");
    let lock = File::open(folder)?;
    lock.try_lock().map_err(|why| match why {
        TryLockError::WouldBlock => busy(),
        TryLockError::Error(why) => why,
    })?;
    let identity = |meta: fs::Metadata| (meta.dev(), meta.ino());
    match fs::metadata(folder).map(identity) {
        Ok(there) if there == identity(lock.metadata()?) => Ok(lock),
        _ => Err(busy()),
    }
}

/// Removes the contents of a folder.
fn clear(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => fs::remove_dir_all(entry.path())?,
            false => fs::remove_file(entry.path())?,
        }
    }
    Ok(())
}

/// Links (or copies) files of one folder into another that lacks them.
fn carry_over(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (own, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            fs::create_dir_all(&target)?;
            carry_over(&own, &target)?;
        } else if target.symlink_metadata().is_err() && fs::hard_link(&own, &target).is_err() {
            fs::copy(&own, &target)?;
        }
    }
    Ok(())
}

/// Syncs a folder and its contents to disk.
fn synchronise(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        match entry.file_type()? {
            kind if kind.is_dir() => synchronise(&entry.path())?,
            kind if kind.is_file() => File::open(entry.path())?.sync_all()?,
            _ => {}
        }
    }
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder)
            .expect("a folder")
            .map(|entry| entry.expect("readable").file_name().into_string().expect("UTF-8"));
        let mut names: Vec<_> = entries.collect();
        names.sort();
        names
    }

    #[test]
    fn a_folder_is_made_or_replaced_whole() -> Result<(), Error> {
        let parent = tempfile::tempdir().expect("temporary folder");
        let target = parent.path().join("out");
        let write = |text: &str| {
            let staged = Staged::begin(&target)?;
            fs::write(staged.path().join("a"), text).expect("writable");
            assert!(!target.join("a").exists() || text != "first", "it is not there yet");
            staged.finish()
        };
        write("first")?;
        fs::create_dir(target.join("more")).expect("writable");
        fs::write(target.join("more/b"), "kept").expect("writable");
        write("second")?;
        let read = |file: &str| fs::read_to_string(target.join(file)).expect("written");
        assert_eq!((read("a"), read("more/b")), ("second".to_owned(), "kept".to_owned()));
        assert_eq!(names(parent.path()), ["out"]);
        // An abandoned folder leaves nothing.
        let staged = Staged::begin(&target)?;
        fs::write(staged.path().join("a"), "third").expect("writable");
        drop(staged);
        assert_eq!(
            (read("a"), names(parent.path())),
            ("second".to_owned(), vec!["out".to_owned()])
        );
        Ok(())
    }

    #[test]
    fn a_folder_is_published_again_and_again() -> Result<(), Error> {
        let parent = tempfile::tempdir().expect("temporary folder");
        let target = parent.path().join("out");
        let mut staged = Staged::begin(&target)?;
        for text in ["first", "second", "third"] {
            assert!(names(staged.path()).is_empty());
            fs::write(staged.path().join("a"), text).expect("writable");
            staged.publish()?;
            assert_eq!(fs::read_to_string(target.join("a")).expect("written"), text);
            let second = Staged::begin(&target).expect_err("busy").to_string();
            assert!(second.contains("another process is writing it"), "{second}");
        }
        drop(staged);
        assert_eq!(names(parent.path()), ["out"]);
        Staged::begin(&target)?.finish()
    }

    #[test]
    fn two_writers_are_one_too_many() -> Result<(), Error> {
        let parent = tempfile::tempdir().expect("temporary folder");
        let target = parent.path().join("out");
        let first = Staged::begin(&target)?;
        let second = Staged::begin(&target).expect_err("busy").to_string();
        assert!(second.contains("another process is writing it"), "{second}");
        first.finish()?;
        Staged::begin(&target)?.finish()?;
        // Two targets in the same folder do not interfere.
        let (first, other) = (Staged::begin(&target)?, parent.path().join("other"));
        Staged::begin(&other)?.finish()?;
        first.finish()?;
        assert_eq!(names(parent.path()), ["other", "out"]);
        Ok(())
    }

    #[test]
    fn what_a_kill_leaves_is_cleared() -> Result<(), Error> {
        let parent = tempfile::tempdir().expect("temporary folder");
        let target = parent.path().join("out");
        let left = parent.path().join(".out.flashover-new");
        fs::create_dir_all(left.join("deep")).expect("writable");
        fs::write(left.join("deep/half"), "half").expect("writable");
        // State between the two renames on a file system that cannot exchange.
        let old = parent.path().join(".out.flashover-old");
        fs::create_dir(&old).expect("writable");
        fs::write(old.join("a"), "old").expect("writable");
        let staged = Staged::begin(&target)?;
        assert!(names(staged.path()).is_empty());
        assert_eq!(fs::read_to_string(target.join("a")).expect("it is back"), "old");
        staged.finish()?;
        assert_eq!(
            (names(parent.path()), names(&target)),
            (vec!["out".to_owned()], vec!["a".to_owned()])
        );
        Ok(())
    }
}
