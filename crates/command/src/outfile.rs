//! Output files of commands, written after work that may take long.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A file to be written. Errors are detected before the work. The file appears or changes only once it is
/// complete.
#[derive(Debug)]
pub struct OutFile {
    /// Path as the caller wrote it.
    path: PathBuf,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// A regular file, with symlinks resolved. A temporary file next to it is renamed to it, so that a reader
    /// never sees an incomplete file.
    File(PathBuf),
    /// A device, a pipe or an open descriptor, such as `/dev/null` and `/dev/stdout`, written directly.
    Stream(File),
}

/// The reason that a file cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum OutFileError {
    #[error("{} is a folder\nhint: name a file", .0.display())]
    Folder(PathBuf),
    #[error(
        "cannot write {}: folder {} does not exist\nhint: create it with `mkdir -p {}`", .path.display(), .folder.display(), .folder.display())]
    NoFolder { path: PathBuf, folder: PathBuf },
    #[error(
        "cannot write {}: {why}\nhint: name a writable file in a writable folder", .path.display())]
    Refused { path: PathBuf, why: io::Error },
}

impl OutFile {
    /// Checks that `path` can be written; `-` is standard output.
    ///
    /// # Errors
    /// The path cannot be written.
    pub fn new(path: &Path) -> Result<Self, OutFileError> {
        let path = if path == "-" { Path::new("/dev/stdout") } else { path };
        let refused = |why| OutFileError::Refused { path: path.to_owned(), why };
        let into = |path: &Path| OpenOptions::new().append(true).open(path);
        let place = match fs::metadata(path) {
            Ok(meta) if meta.is_dir() => return Err(OutFileError::Folder(path.to_owned())),
            Ok(meta) if !meta.is_file() => Place::Stream(into(path).map_err(refused)?),
            found => {
                let target = behind_links(path).map_err(refused)?;
                if of_processes(&target) {
                    Place::Stream(into(path).map_err(refused)?)
                } else {
                    check_folder(path, folder_of(&target))?;
                    if found.is_ok() {
                        into(&target).map_err(refused)?;
                    }
                    Place::File(target)
                }
            }
        };
        Ok(Self { path: path.to_owned(), place })
    }

    /// Returns true if both refer to the same file, which the second write would replace.
    pub fn is_same(&self, other: &Self) -> bool {
        let (Place::File(one), Place::File(two)) = (&self.place, &other.place) else {
            return false;
        };
        let folder = |file: &Path| folder_of(file).canonicalize().ok();
        one.file_name() == two.file_name() && folder(one) == folder(two)
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// The write fails, such as on a full disk; a regular file is then unchanged.
    pub fn write(mut self, bytes: &[u8]) -> Result<(), OutFileError> {
        let written = match &mut self.place {
            Place::Stream(stream) => stream.write_all(bytes).and_then(|()| stream.flush()),
            Place::File(target) => replace(target, bytes),
        };
        written.map_err(|why| OutFileError::Refused { path: self.path, why })
    }
}

fn folder_of(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Checks that a file can be created in the folder. The test file has no name, so a killed command leaves
/// nothing behind.
fn check_folder(path: &Path, folder: &Path) -> Result<(), OutFileError> {
    if !folder.is_dir() {
        return Err(OutFileError::NoFolder { path: path.to_owned(), folder: folder.to_owned() });
    }
    tempfile::tempfile_in(folder)
        .map(drop)
        .map_err(|why| OutFileError::Refused { path: path.to_owned(), why })
}

/// Resolves the symbolic links of `path`; the target need not exist.
fn behind_links(path: &Path) -> io::Result<PathBuf> {
    // Linux has the same limit.
    const MAX_LINKS: usize = 40;
    let mut target = path.to_owned();
    for _ in 0..MAX_LINKS {
        if of_processes(&target) || !target.is_symlink() {
            return Ok(target);
        }
        target = folder_of(&target).join(fs::read_link(&target)?);
    }
    Err(io::Error::other("too many symbolic links"))
}

/// Returns true if `path` is a descriptor of a process: a link to an open file, not to a name.
fn of_processes(path: &Path) -> bool {
    folder_of(path).canonicalize().is_ok_and(|folder| folder.starts_with("/proc"))
}

/// Writes a temporary file next to `target` and renames it. The file keeps its permissions; a new one gets
/// the default ones.
fn replace(target: &Path, bytes: &[u8]) -> io::Result<()> {
    match unnamed(folder_of(target)) {
        Some(file) => {
            fill(&file, target, bytes)?;
            match named(&file, folder_of(target)) {
                Ok(beside) => beside.persist(target).map_err(|e| e.error),
                // For example on a system without /proc.
                Err(_) => replace_by_name(target, bytes),
            }
        }
        None => replace_by_name(target, bytes),
    }
}

/// Copies the permissions of `target`, writes the bytes and syncs them to disk.
fn fill(mut file: &File, target: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Ok(meta) = fs::metadata(target) {
        file.set_permissions(meta.permissions())?;
    }
    file.write_all(bytes)?;
    file.sync_all()
}

/// Creates a file without a name, so that a command killed during the write leaves nothing behind. `None`
/// if the system or the file system does not support it.
fn unnamed(folder: &Path) -> Option<File> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{Mode, OFlags};
        let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
        rustix::fs::open(folder, flags, Mode::from_raw_mode(0o666)).ok().map(File::from)
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = folder;
        None
    }
}

/// Gives a file of [`unnamed`] a temporary name, because a link cannot replace a file but a rename can.
fn named(file: &File, folder: &Path) -> io::Result<tempfile::NamedTempFile<()>> {
    use std::os::fd::AsRawFd;

    use rustix::fs::{AtFlags, CWD, linkat};
    let descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
    tempfile::Builder::new()
        .prefix(".flashover-")
        .make_in(folder, |path| Ok(linkat(CWD, &descriptor, CWD, path, AtFlags::SYMLINK_FOLLOW)?))
}

/// Replaces `target` like [`replace`], through a file with a name from the start.
fn replace_by_name(target: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let beside = tempfile::Builder::new()
        .prefix(".flashover-")
        .permissions(fs::Permissions::from_mode(0o666))
        .tempfile_in(folder_of(target))?;
    fill(beside.as_file(), target, bytes)?;
    beside.persist(target).map_err(|e| e.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn written(path: &Path, text: &str) {
        OutFile::new(path).expect("can be written").write(text.as_bytes()).expect("is written");
    }

    #[test]
    fn the_whole_file_is_replaced_and_keeps_its_permissions() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let file = dir.path().join("x.jsonl");
        written(&file, "a longer first version");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("ours");
        written(&file, "second");
        assert_eq!(fs::read_to_string(&file).expect("there"), "second");
        assert_eq!(fs::metadata(&file).expect("there").permissions().mode() & 0o777, 0o640);
        assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 1);
        replace_by_name(&file, b"third").expect("is written");
        assert_eq!(fs::read_to_string(&file).expect("there"), "third");
        assert_eq!(fs::metadata(&file).expect("there").permissions().mode() & 0o777, 0o640);
        assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 1);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn nothing_stands_in_the_folder_while_it_is_written() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let target = dir.path().join("x");
        let Some(file) = unnamed(dir.path()) else {
            println!("skipped: needs a file system with unnamed files");
            return;
        };
        fill(&file, &target, b"whole").expect("is written");
        assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 0, "a kill leaves nothing");
        let beside = named(&file, dir.path()).expect("gets a name");
        beside.persist(&target).expect("replaces");
        assert_eq!(fs::read_to_string(&target).expect("there"), "whole");
        let new = File::create(dir.path().join("y")).and_then(|f| f.metadata()).expect("made");
        let mode = |meta: fs::Metadata| meta.permissions().mode();
        assert_eq!(mode(fs::metadata(&target).expect("there")), mode(new), "as any new file");
    }

    #[test]
    fn links_stay_links() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = |name: &str| dir.path().join(name);
        symlink("second", path("first")).expect("linked");
        symlink("file", path("second")).expect("linked");
        for text in ["made", "replaced"] {
            written(&path("first"), text);
            assert!(path("first").is_symlink() && path("second").is_symlink());
            assert_eq!(fs::read_to_string(path("file")).expect("there"), text);
        }
        symlink("loop", path("loop")).expect("linked");
        assert!(matches!(OutFile::new(&path("loop")), Err(OutFileError::Refused { .. })));
    }

    #[test]
    fn devices_and_descriptors_are_written_into() {
        use std::os::fd::AsRawFd;
        written(Path::new("/dev/null"), "gone");
        let file = tempfile::NamedTempFile::new().expect("temporary file");
        let descriptor = PathBuf::from(format!("/proc/self/fd/{}", file.as_file().as_raw_fd()));
        written(&descriptor, "one ");
        written(&descriptor, "two");
        assert_eq!(fs::read_to_string(file.path()).expect("there"), "one two");
        let named = fs::metadata("/dev/null").expect("there");
        assert!(!named.is_file(), "still a device");
    }

    #[test]
    fn what_cannot_be_written_is_refused_before_the_work() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let refused = |path: &Path| OutFile::new(path).expect_err("refused").to_string();
        let absent = dir.path().join("absent/x");
        for (path, word) in [(dir.path(), "is a folder"), (absent.as_path(), " does not exist")] {
            let text = refused(path);
            assert!(text.contains(word) && text.contains("\nhint: "), "{text}");
        }
        assert!(refused(Path::new("/proc/x")).contains("\nhint: "));
        drop(OutFile::new(&dir.path().join("x")).expect("can be written"));
        assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 0, "nothing written yet");
    }
}
