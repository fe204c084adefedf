//! Replaces files of a folder together.
//!
//! | Target | Staging folder | Commit |
//! |---|---|---|
//! | absent | hidden, next to the target | it becomes the target |
//! | a folder | `.flashover-new` in the target | it becomes `.flashover-done`, and its files are moved into the target |
//!
//! After a kill, the next writer removes an uncommitted staging folder, and the next reader or writer moves what is left
//! in a committed one ([`recover`]). Until then other programs find a folder without its `.json` files, if those differ:
//! they are removed first and moved last, the config at the very end, so that it never stands next to files of another
//! save. The target stays the same folder, and its other files are not touched. A writer holds a lock on it.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use crate::Error;

const NEW: &str = ".flashover-new";
const DONE: &str = ".flashover-done";
/// Mode of a staging folder in a target: nobody else reads the new version of a private file.
const PRIVATE: u32 = 0o700;

/// New files of a folder, not yet in it.
#[derive(Debug)]
pub struct Staged {
    target: PathBuf,
    staging: PathBuf,
    /// Lock on the target, or on the staging folder that will become it.
    lock: File,
}

impl Staged {
    /// Begins to write `target`, which need not exist.
    ///
    /// # Errors
    /// [`Error::Write`] if `target` is neither a folder nor absent, if it cannot be written, or if another process
    /// writes it.
    pub fn begin(target: impl AsRef<Path>) -> Result<Self, Error> {
        let target = target.as_ref();
        Self::started(target).map_err(|why| Error::Write { path: target.to_owned(), why })
    }

    fn started(target: &Path) -> io::Result<Self> {
        let beside = beside(target);
        if target.is_dir() {
            let lock = locked(target)?;
            settle(target)?;
            let staging = target.join(NEW);
            create(&staging, PRIVATE)?;
            clear(&staging)?;
            // A killed process left it when the target did not exist.
            if let Some(left) = beside.filter(|left| locked(left).is_ok()) {
                fs::remove_dir_all(left)?;
            }
            return Ok(Self { target: target.to_owned(), staging, lock });
        }
        match target.symlink_metadata() {
            Ok(meta) if meta.is_symlink() => {
                return Err(io::Error::other("it is a link to nothing"));
            }
            Ok(_) => return Err(ErrorKind::NotADirectory.into()),
            Err(_) => {}
        }
        let staging = beside.ok_or(ErrorKind::InvalidFilename)?;
        create(&staging, 0o777)?;
        let lock = locked(&staging)?;
        clear(&staging)?;
        Ok(Self { target: target.to_owned(), staging, lock })
    }

    /// Returns the folder to write into.
    pub fn path(&self) -> &Path {
        &self.staging
    }

    /// Removes a file of the target, if it is there.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn remove(&self, file: &str) -> Result<(), Error> {
        let path = self.target.join(file);
        match fs::remove_file(&path) {
            Err(why) if why.kind() != ErrorKind::NotFound => Err(Error::Write { path, why }),
            _ => Ok(()),
        }
    }

    /// Puts the files into the target. Other files of the target stay.
    ///
    /// # Errors
    /// [`Error::Write`]; the target then has its old files or the new ones.
    pub fn finish(mut self) -> Result<(), Error> {
        self.commit().map_err(|why| Error::Write { path: self.target.clone(), why })
    }

    /// Puts the files into the target like [`finish`](Self::finish), and begins the next version. No other process can
    /// write the target in between.
    ///
    /// # Errors
    /// [`Error::Write`]; the target then has its old files or the new ones.
    pub fn publish(&mut self) -> Result<(), Error> {
        let next = self.commit().and_then(|()| create(&self.staging, PRIVATE));
        next.map_err(|why| Error::Write { path: self.target.clone(), why })
    }

    fn commit(&mut self) -> io::Result<()> {
        let Self { target, staging, lock } = self;
        check_kinds(staging, target)?;
        synchronise(staging)?;
        if *staging != target.join(NEW) && !target.exists() {
            fs::rename(&staging, &target)?;
            File::open(folder_of(target))?.sync_all()?;
        } else {
            // The target exists only since the beginning, and has its own lock.
            if *staging != target.join(NEW) {
                *lock = locked(target)?;
            }
            fs::rename(&staging, target.join(DONE))?;
            settle(target)?;
        }
        *staging = target.join(NEW);
        Ok(())
    }
}

impl Drop for Staged {
    /// Removes the staging folder while the lock is still held.
    fn drop(&mut self) {
        // On an error, the next writer of the target removes it.
        let _ = fs::remove_dir_all(&self.staging);
        let _ = self.lock.unlock();
    }
}

/// Returns true for the staging folder of a target that exists.
pub fn is_staging(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == NEW)
}

/// Completes a save into a folder that a kill has interrupted after its commit.
///
/// # Errors
/// [`Error::Write`] if there is such a save and the folder cannot be written.
pub fn recover(folder: &Path) -> Result<(), Error> {
    let refused = |why| Error::Write { path: folder.to_owned(), why };
    // A writer that is alive completes it in less time.
    const TRIES: usize = 1000;
    for _ in 0..TRIES {
        if !folder.join(DONE).exists() {
            return Ok(());
        }
        match locked(folder) {
            Ok(_lock) => return settle(folder).map_err(refused),
            Err(why) if why.kind() == ErrorKind::ResourceBusy => sleep(Duration::from_millis(1)),
            Err(why) => return Err(refused(why)),
        }
    }
    Err(refused(busy()))
}

/// Moves the files of a committed staging folder into its target, which is locked.
fn settle(target: &Path) -> io::Result<()> {
    let done = target.join(DONE);
    if !done.is_dir() || done.is_symlink() {
        return Ok(());
    }
    let mut names = fs::read_dir(&done)?
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect::<io::Result<Vec<_>>>()?;
    let is_json = |name: &_| Path::new(name).extension().is_some_and(|ending| ending == "json");
    // Without its config, no program reads a model or an adapter.
    let is_config = |name: &_| ["config.json", "adapter_config.json"].iter().any(|own| name == own);
    names.sort_by_key(|name| (is_config(name), is_json(name), name.clone()));
    for name in names.iter().filter(|name| is_json(name)) {
        let old = target.join(name);
        if old.is_file() && fs::read(&old)? != fs::read(done.join(name))? {
            fs::remove_file(old)?;
        }
    }
    names.iter().try_for_each(|name| place(&done.join(name), &target.join(name)))?;
    fs::remove_dir(done)?;
    File::open(target)?.sync_all()
}

/// Moves a file or a folder. The files of a folder that exists are moved into it.
fn place(from: &Path, to: &Path) -> io::Result<()> {
    if from.is_dir() && to.is_dir() {
        for entry in fs::read_dir(from)? {
            let name = entry?.file_name();
            place(&from.join(&name), &to.join(name))?;
        }
        fs::remove_dir(from)?;
        return File::open(to)?.sync_all();
    }
    // A private file stays private.
    if let Ok(meta) = fs::metadata(to) {
        fs::set_permissions(from, meta.permissions())?;
    }
    fs::rename(from, to)
}

/// Refuses a file where the target has a folder, and a folder where it has a file, before anything is moved.
fn check_kinds(new: &Path, target: &Path) -> io::Result<()> {
    for entry in fs::read_dir(new)? {
        let entry = entry?;
        let old = target.join(entry.file_name());
        match (entry.file_type()?.is_dir(), old.symlink_metadata()) {
            (true, Ok(_)) if old.is_dir() => check_kinds(&entry.path(), &old)?,
            (true, Ok(_)) => return Err(io::Error::other(format!("{} is a file", old.display()))),
            (false, Ok(meta)) if meta.is_dir() => {
                return Err(io::Error::other(format!("{} is a folder", old.display())));
            }
            _ => {}
        }
    }
    Ok(())
}

fn busy() -> io::Error {
    io::Error::new(ErrorKind::ResourceBusy, "another process is writing it")
}

/// Opens and locks a folder. Fails if another process holds the lock or has replaced the folder meanwhile.
fn locked(folder: &Path) -> io::Result<File> {
    let lock = File::open(folder)?;
    lock.try_lock().map_err(|why| match why {
        TryLockError::WouldBlock => busy(),
        TryLockError::Error(why) => why,
    })?;
    let (own, there) = (lock.metadata()?, fs::metadata(folder));
    match there.is_ok_and(|there| (there.dev(), there.ino()) == (own.dev(), own.ino())) {
        true => Ok(lock),
        false => Err(busy()),
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Returns the staging folder of a target that does not exist; `None` for a path that names none, such as `..`.
fn beside(target: &Path) -> Option<PathBuf> {
    let name = target.file_name()?.to_string_lossy();
    Some(folder_of(target).join(format!(".{name}{NEW}")))
}

/// Creates a folder unless it exists.
fn create(folder: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(folder) {
        Err(why) if why.kind() != ErrorKind::AlreadyExists => return Err(why),
        Ok(()) | Err(_) => {}
    }
    // Clearing what a link leads to would delete files of others.
    match folder.is_symlink() {
        true => Err(io::Error::other(format!("{} is a link", folder.display()))),
        false => Ok(()),
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

/// Syncs a folder and everything in it to disk.
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
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::process::Command;

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
    fn files_of_subfolders_are_merged() -> Result<(), Error> {
        let parent = tempfile::tempdir().expect("temporary folder");
        let target = parent.path().join("out");
        let mut staged = Staged::begin(&target)?;
        let write = |path: PathBuf, text: &str| {
            fs::create_dir_all(path.parent().expect("a folder")).expect("writable");
            fs::write(path, text).expect("writable");
        };
        for text in ["first", "second", "third"] {
            write(staged.path().join("sub/deep/a"), text);
            write(staged.path().join("config.json"), text);
            staged.publish()?;
            write(target.join("sub/other"), "kept");
            let read = |file: &str| fs::read_to_string(target.join(file)).expect("written");
            let all = ["sub/deep/a", "config.json", "sub/other"].map(read);
            assert_eq!(all, [text, text, "kept"]);
            assert_eq!(names(&target.join("sub")), ["deep", "other"]);
        }
        // A file and a folder of one name: nothing is moved.
        write(staged.path().join("sub/deep"), "a file");
        write(staged.path().join("config.json"), "fourth");
        let why = staged.publish().expect_err("a folder is there").to_string();
        assert!(why.contains("sub/deep is a folder"), "{why}");
        drop(staged);
        let mut staged = Staged::begin(&target)?;
        write(staged.path().join("config.json/a"), "a folder");
        let why = staged.publish().expect_err("a file is there").to_string();
        assert!(why.contains("config.json is a file"), "{why}");
        assert_eq!(fs::read_to_string(target.join("config.json")).expect("kept"), "third");
        Ok(())
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
            ((meta.dev(), meta.ino()), meta.mode(), meta.mtime_nsec())
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
    fn files_of_others_are_not_touched() -> Result<(), Error> {
        let parent = tempfile::tempdir().expect("temporary folder");
        let target = parent.path().join("out");
        fs::create_dir(&target).expect("writable");
        // Reading a pipe would wait for ever.
        let pipe = Command::new("mkfifo").arg(target.join("pipe")).status().expect("it runs");
        assert!(pipe.success());
        let unreadable = target.join("unreadable");
        fs::create_dir(&unreadable).expect("writable");
        fs::set_permissions(&unreadable, fs::Permissions::from_mode(0o0)).expect("mine");
        let identity = |name: &str| {
            let meta = fs::symlink_metadata(target.join(name)).expect("there");
            (meta.ino(), meta.mode(), meta.nlink(), meta.mtime_nsec())
        };
        let before = ["pipe", "unreadable"].map(identity);
        let mut staged = Staged::begin(&target)?;
        fs::write(target.join("meanwhile"), "kept").expect("writable");
        fs::write(staged.path().join("a"), "new").expect("writable");
        staged.publish()?;
        drop(staged);
        assert_eq!(["pipe", "unreadable"].map(identity), before);
        assert_eq!(names(&target), ["a", "meanwhile", "pipe", "unreadable"]);
        Ok(())
    }

    #[test]
    fn links_lead_to_their_folders_and_are_replaced_as_files() -> Result<(), Error> {
        let parent = tempfile::tempdir().expect("temporary folder");
        let path = |name: &str| parent.path().join(name);
        fs::create_dir(path("real")).expect("writable");
        fs::write(path("elsewhere"), "kept").expect("writable");
        fs::set_permissions(path("elsewhere"), fs::Permissions::from_mode(0o640)).expect("mine");
        symlink(path("real"), path("out")).expect("writable");
        symlink(path("elsewhere"), path("real/a")).expect("writable");
        let staged = Staged::begin(path("out"))?;
        fs::write(staged.path().join("a"), "new").expect("writable");
        staged.finish()?;
        assert!(path("out").is_symlink() && !path("real/a").is_symlink());
        let mode = fs::metadata(path("real/a")).expect("there").mode() & 0o777;
        let text = |name: &str| fs::read_to_string(path(name)).expect("there");
        assert_eq!((text("real/a").as_str(), mode), ("new", 0o640));
        assert_eq!(text("elsewhere"), "kept");
        symlink(path("nowhere"), path("dangling")).expect("writable");
        for (target, want) in [("dangling", "link to nothing"), ("elsewhere", "not a directory")] {
            let why = Staged::begin(path(target)).expect_err(want).to_string();
            assert!(why.contains(want), "{why}");
        }
        assert_eq!(names(parent.path()), ["dangling", "elsewhere", "out", "real"]);
        Ok(())
    }

    #[test]
    fn a_target_that_appears_meanwhile_takes_the_files() -> Result<(), Error> {
        let parent = tempfile::tempdir().expect("temporary folder");
        let target = parent.path().join("out");
        let mut staged = Staged::begin(&target)?;
        fs::create_dir(&target).expect("writable");
        fs::write(target.join("other"), "kept").expect("writable");
        fs::write(staged.path().join("a"), "first").expect("writable");
        staged.publish()?;
        assert!(Staged::begin(&target).is_err(), "it is locked");
        fs::write(staged.path().join("a"), "second").expect("writable");
        staged.finish()?;
        assert_eq!(names(&target), ["a", "other"]);
        assert_eq!(fs::read_to_string(target.join("a")).expect("written"), "second");
        assert_eq!(names(parent.path()), ["out"]);
        Ok(())
    }

    /// In `/proc/self/fd`, as at a mount point, nothing can be renamed, and nothing can be created next to the target.
    #[test]
    fn a_target_that_cannot_be_renamed_can_be_written() -> Result<(), Error> {
        let parent = tempfile::tempdir().expect("temporary folder");
        let target = parent.path().join("out");
        fs::create_dir(&target).expect("writable");
        let opened = File::open(&target).expect("there");
        let target = PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()));
        let staged = Staged::begin(&target)?;
        fs::write(staged.path().join("a"), "new").expect("writable");
        staged.finish()?;
        assert_eq!(names(&parent.path().join("out")), ["a"]);
        Ok(())
    }

    #[test]
    fn a_link_in_place_of_the_staging_folder_is_not_followed() {
        let parent = tempfile::tempdir().expect("temporary folder");
        let precious = parent.path().join("precious");
        fs::create_dir(&precious).expect("writable");
        fs::write(precious.join("thesis"), "kept").expect("writable");
        let link = parent.path().join(".out.flashover-new");
        symlink(&precious, link).expect("writable");
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
    fn what_a_kill_leaves_is_cleared_or_completed() -> Result<(), Error> {
        let parent = tempfile::tempdir().expect("temporary folder");
        let target = parent.path().join("out");
        let write = |path: PathBuf, text: &str| {
            fs::create_dir_all(path.parent().expect("below")).expect("writable");
            fs::write(path, text).expect("writable");
        };
        write(parent.path().join(".out.flashover-new/deep/half"), "half");
        Staged::begin(&target)?.finish()?;
        // The target appeared after the kill.
        write(parent.path().join(".out.flashover-new/half"), "half");
        write(target.join(".flashover-new/half"), "half");
        write(target.join(".flashover-done/b"), "new");
        write(target.join(".flashover-done/a.json"), "new");
        write(target.join("a.json"), "old");
        recover(&target)?;
        let read = |file: &str| fs::read_to_string(target.join(file)).expect("written");
        assert_eq!((read("a.json"), read("b")), ("new".to_owned(), "new".to_owned()));
        write(target.join(".flashover-done/b"), "newer");
        drop(Staged::begin(&target)?);
        assert_eq!(read("b"), "newer");
        assert_eq!(
            (names(parent.path()), names(&target)),
            (vec!["out".into()], vec!["a.json".into(), "b".into()])
        );
        Ok(())
    }
}
