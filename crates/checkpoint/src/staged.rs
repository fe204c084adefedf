//! Replaces the contents of folders atomically.
//!
//! Files are written into a hidden staging folder next to the target and synced to disk. Then:
//!
//! 1. the staging folder links the target's other files and changes places with the target;
//! 2. the old folder, now hidden, links the new files;
//! 3. the two change places again.
//!
//! A kill at any moment leaves the old contents or the new ones. The target stays the same folder: its permissions, and
//! processes that work in it, are not affected, and files that others create in it meanwhile stay. The staging folder's
//! name depends only on the target's, so the next writer of the target removes the remains of a killed one. Its owner
//! holds a lock on it.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::Error;

/// New contents of a folder, written next to it.
#[derive(Debug)]
pub struct Staged {
    target: PathBuf,
    staging: PathBuf,
    /// Lock on the staging folder.
    lock: File,
    /// The staging folder has become the target.
    moved: bool,
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
        let name = format!(".{}.flashover-new", name.to_string_lossy());
        let staging = target.with_file_name(name);
        match fs::create_dir(&staging) {
            Err(why) if why.kind() != ErrorKind::AlreadyExists => return Err(refused(why)),
            Ok(()) | Err(_) => {}
        }
        // Clearing what a link leads to would delete files of others.
        if staging.is_symlink() {
            let why = format!("{} is a link", staging.display());
            return Err(refused(io::Error::other(why)));
        }
        let lock = locked(&staging).map_err(refused)?;
        // Cleans up after a killed process.
        let aside = aside(&staging);
        if aside.exists() && !target.exists() {
            fs::rename(&aside, &target).map_err(refused)?;
        } else if aside.exists() {
            fs::remove_dir_all(&aside).map_err(refused)?;
        }
        clear(&staging).map_err(refused)?;
        Ok(Self { target, staging, lock, moved: false })
    }

    /// Returns the folder to write into.
    pub fn path(&self) -> &Path {
        &self.staging
    }

    /// Puts the files into the target. Other files of the target stay.
    ///
    /// # Errors
    /// [`Error::Write`]; the target then has its old contents or the new ones.
    pub fn finish(mut self) -> Result<(), Error> {
        self.exchange().map_err(|why| Error::Write { path: self.target.clone(), why })
    }

    /// Puts the files into the target like [`finish`](Self::finish), and begins the next version. If the target existed,
    /// no other process can write it in between.
    ///
    /// # Errors
    /// [`Error::Write`]; the target then has its old contents or the new ones.
    pub fn publish(&mut self) -> Result<(), Error> {
        let target = self.target.clone();
        let refused = |why| Error::Write { path: target.clone(), why };
        self.exchange().map_err(refused)?;
        match self.moved {
            true => *self = Self::begin(&self.target)?,
            false => clear(&self.staging).map_err(refused)?,
        }
        Ok(())
    }

    /// Puts the files into the target. If the target does not exist, the staging folder becomes it.
    fn exchange(&mut self) -> io::Result<()> {
        let Self { target, staging, .. } = &*self;
        let new = entries(staging)?;
        if !target.exists() {
            synchronise(staging, &new)?;
            fs::rename(staging, target)?;
            self.moved = true;
            return self.synchronise_parent();
        }
        // The old folder will have the staging folder's name. The lock protects it from cleanup by other writers.
        let _replaced = locked(target)?;
        for path in new.keys() {
            // A private file stays private.
            if let Ok(meta) = fs::symlink_metadata(target.join(path)) {
                fs::set_permissions(staging.join(path), meta.permissions())?;
            }
        }
        carry_over(target, staging)?;
        synchronise(staging, &new)?;
        let all = entries(staging)?;
        swap(staging, target)?;
        self.synchronise_parent()?;
        for path in new.keys() {
            link(&target.join(path), &staging.join(path))?;
        }
        synchronise(staging, &new)?;
        swap(staging, target)?;
        // Files that others created while the staging folder was the target.
        for (path, identity) in entries(staging)? {
            let (own, there) = (staging.join(&path), target.join(&path));
            match own.is_dir() {
                _ if all.get(&path) == Some(&identity) => {}
                true => fs::create_dir_all(there)?,
                false => fs::rename(own, there)?,
            }
        }
        self.synchronise_parent()
    }

    fn synchronise_parent(&self) -> io::Result<()> {
        let parent = self.target.parent();
        let parent = parent.filter(|parent| *parent != Path::new(""));
        File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
    }
}

impl Drop for Staged {
    /// Removes the staging folder while the lock is still held.
    fn drop(&mut self) {
        if !self.moved {
            // On an error, the next writer of the target removes it.
            let _ = fs::remove_dir_all(&self.staging);
        }
        let _ = self.lock.unlock();
    }
}

/// Device and inode of a file.
type Identity = (u64, u64);

fn identity(meta: &fs::Metadata) -> Identity {
    (meta.dev(), meta.ino())
}

/// Opens and locks a folder. Fails if another process holds the lock or has replaced the folder meanwhile.
fn locked(folder: &Path) -> io::Result<File> {
    let busy = || io::Error::new(ErrorKind::ResourceBusy, "another process is writing it");
    let lock = File::open(folder)?;
    lock.try_lock().map_err(|why| match why {
        TryLockError::WouldBlock => busy(),
        TryLockError::Error(why) => why,
    })?;
    match fs::symlink_metadata(folder) {
        Ok(there) if identity(&there) == identity(&lock.metadata()?) => Ok(lock),
        _ => Err(busy()),
    }
}

/// Returns the name of the target between the renames of [`swap`].
fn aside(staging: &Path) -> PathBuf {
    staging.with_extension("flashover-old")
}

/// Lets two folders change places.
fn swap(staging: &Path, target: &Path) -> io::Result<()> {
    match renameat_with(CWD, staging, CWD, target, RenameFlags::EXCHANGE) {
        // Some file systems cannot exchange. `begin` undoes the first rename if the second did not happen.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
            let aside = aside(staging);
            fs::rename(target, &aside)?;
            fs::rename(staging, target)?;
            fs::rename(&aside, staging)
        }
        other => Ok(other?),
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

/// Returns files and folders below a folder, by relative path.
fn entries(folder: &Path) -> io::Result<BTreeMap<PathBuf, Identity>> {
    fn walk(root: &Path, at: &Path, all: &mut BTreeMap<PathBuf, Identity>) -> io::Result<()> {
        for entry in fs::read_dir(root.join(at))? {
            let entry = entry?;
            let path = at.join(entry.file_name());
            all.insert(path.clone(), identity(&entry.metadata()?));
            if entry.file_type()?.is_dir() {
                walk(root, &path, all)?;
            }
        }
        Ok(())
    }
    let mut all = BTreeMap::new();
    walk(folder, Path::new(""), &mut all)?;
    Ok(all)
}

/// Links (or copies) a file in the place of another. Of a folder creates only the folder.
fn link(from: &Path, to: &Path) -> io::Result<()> {
    if from.symlink_metadata()?.is_dir() {
        return fs::create_dir_all(to);
    }
    match fs::remove_file(to) {
        Err(why) if why.kind() != ErrorKind::NotFound => return Err(why),
        Ok(()) | Err(_) => {}
    }
    fs::hard_link(from, to).or_else(|_| fs::copy(from, to).map(drop))
}

/// Links (or copies) files of one folder into another that lacks them.
fn carry_over(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (own, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            fs::create_dir_all(&target)?;
            carry_over(&own, &target)?;
        } else if target.symlink_metadata().is_err() {
            link(&own, &target)?;
        }
    }
    fs::set_permissions(to, fs::metadata(from)?.permissions())
}

/// Syncs a folder and entries of it to disk.
fn synchronise(folder: &Path, entries: &BTreeMap<PathBuf, Identity>) -> io::Result<()> {
    let mut paths = entries.keys().map(|path| folder.join(path)).chain([folder.to_owned()]);
    paths.try_for_each(|path| match path.symlink_metadata()?.is_symlink() {
        true => Ok(()),
        false => File::open(path)?.sync_all(),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;
    use std::thread;
    use std::time::Duration;

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
    fn the_target_stays_the_same_folder() -> Result<(), Error> {
        let parent = tempfile::tempdir().expect("temporary folder");
        let target = parent.path().join("out");
        let private = target.join("private");
        fs::create_dir_all(&private).expect("writable");
        fs::write(private.join("key"), "kept").expect("writable");
        fs::write(target.join("a"), "first").expect("writable");
        let only_mine = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("mine");
        };
        only_mine(&private, 0o700);
        only_mine(&target.join("a"), 0o600);
        let state = |path: &Path| {
            let meta = fs::metadata(path).expect("there");
            (identity(&meta), meta.mode(), meta.mtime_nsec())
        };
        let (folder, below) = (state(&target), state(&private));
        let mut staged = Staged::begin(&target)?;
        fs::write(staged.path().join("a"), "second").expect("writable");
        staged.publish()?;
        fs::write(staged.path().join("a"), "third").expect("writable");
        staged.finish()?;
        assert_eq!((state(&target).0, state(&target).1), (folder.0, folder.1));
        assert_eq!(state(&private), below);
        assert_eq!(fs::read_to_string(target.join("a")).expect("written"), "third");
        assert_eq!(state(&target.join("a")).1 & 0o777, 0o600);
        Ok(())
    }

    #[test]
    fn files_that_others_create_meanwhile_stay() -> Result<(), Error> {
        let parent = tempfile::tempdir().expect("temporary folder");
        let target = parent.path().join("out");
        fs::create_dir(&target).expect("writable");
        let (mut staged, done) = (Staged::begin(&target)?, AtomicBool::new(false));
        let written = thread::scope(|scope| {
            let others = scope.spawn(|| {
                let mut written = 0;
                while !done.load(Relaxed) {
                    fs::write(target.join(format!("other-{written}")), "kept").expect("writable");
                    written += 1;
                    thread::sleep(Duration::from_micros(500));
                }
                written
            });
            let saved = (0..40).try_for_each(|save: u8| {
                fs::write(staged.path().join("a"), [save]).expect("writable");
                staged.publish()
            });
            done.store(true, Relaxed);
            saved.map(|()| others.join().expect("no panic"))
        })?;
        drop(staged);
        let lost = (0..written).filter(|at| !target.join(format!("other-{at}")).exists()).count();
        assert!(written > 0 && lost == 0, "{lost} of {written} are lost");
        assert_eq!(names(parent.path()), ["out"]);
        Ok(())
    }

    #[test]
    fn a_link_in_place_of_the_staging_folder_is_not_followed() {
        let parent = tempfile::tempdir().expect("temporary folder");
        let precious = parent.path().join("precious");
        fs::create_dir(&precious).expect("writable");
        fs::write(precious.join("thesis"), "kept").expect("writable");
        let link = parent.path().join(".out.flashover-new");
        std::os::unix::fs::symlink(&precious, link).expect("writable");
        let why = Staged::begin(parent.path().join("out")).expect_err("a link").to_string();
        assert!(why.contains(".out.flashover-new is a link"), "{why}");
        assert_eq!(fs::read_to_string(precious.join("thesis")).ok().as_deref(), Some("kept"));
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
