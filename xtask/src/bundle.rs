//! `cargo xtask bundle`: packs the programs into one archive, with a script that runs them elsewhere.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use command::OutFile;

use crate::cli::BundleArgs;
use crate::place::{self, Place};
use crate::programs::Programs;
use crate::setup::{self, Cuda, Wants};
use report::fail::{check, usage};

/// Maximum size of archive and script together, in bytes.
const LIMIT: u64 = 40_000_000;
const ARCHIVE: &str = "flashover.tar.xz";
/// Name of the work folder. It is unique to this command, because its contents are deleted.
const WORK: &str = ".flashover-bundle.part";
/// Packed programs. A symlink lets the first one also run as `flashover`.
const PACKED: [&str; 2] = ["flashover-bench", "xtask"];
const SCRIPT: &str = include_str!("run.sh");

/// Packs the programs only: configs and profiles are compiled into them, and a baseline is valid only for the machine
/// that measured it.
pub(crate) fn run(args: &BundleArgs) -> Result<()> {
    let place = Place::find()?;
    place.workspace()?;
    if args.out.exists() && !args.out.is_dir() {
        return Err(usage(format!("{} is not a folder", args.out.display()), "name a folder"));
    }
    make_folder(&args.out)?;
    setup::ensure_xz()?;
    let (programs, _) =
        Programs::ready(&place, Wants { cuda: Cuda::Installed, gl: false, node_tests: false })?;
    let bytes = pack(programs.dir(), &args.out, LIMIT)?;
    Ok(command::print(&format!("{}: {:.1} MB\n", args.out.display(), bytes as f64 / 1e6))?)
}

/// Creates the folder and checks that it is writable, before the programs are built.
fn make_folder(out: &Path) -> Result<()> {
    fs::create_dir_all(out).and_then(|()| tempfile::tempfile_in(out)).map(drop).map_err(|why| {
        usage(format!("cannot write to {}: {why}", out.display()), "name a writable folder")
    })
}

/// Writes both files atomically and returns their total size in bytes.
fn pack(programs: &Path, out: &Path, limit: u64) -> Result<u64> {
    let work = Work::begin(out)?;
    for name in PACKED {
        let copy = work.folder.join(name);
        fs::copy(programs.join(name), &copy).with_context(|| format!("cannot copy {name}"))?;
        strip(&copy)?;
    }
    symlink(PACKED[0], work.folder.join("flashover"))?;
    let libraries = work.folder.join("lib");
    fs::create_dir(&libraries)?;
    for library in libraries_of(&programs.join(PACKED[0]))? {
        let name = library.file_name().context("a library has a name")?;
        fs::copy(&library, libraries.join(name))
            .with_context(|| format!("cannot copy {}", library.display()))?;
    }
    let archive = work.folder.join(ARCHIVE);
    let status = Command::new("tar")
        .args(["--use-compress-program", "xz --lzma2=preset=6,dict=384MiB", "-cf"])
        .arg(&archive)
        .arg("-C")
        .arg(&work.folder)
        .args(PACKED)
        .args(["flashover", "lib"])
        .status()
        .context("cannot start tar")?;
    if !status.success() {
        return Err(check("tar could not pack the programs"));
    }
    let bytes = fs::metadata(&archive)?.len() + SCRIPT.len() as u64;
    if bytes > limit {
        return Err(check(format!(
            "the bundle has {:.1} MB, expected at most {} MB",
            bytes as f64 / 1e6,
            limit / 1_000_000
        )));
    }
    fs::rename(&archive, out.join(ARCHIVE))?;
    let script = out.join("run.sh");
    OutFile::new(&script)?.write(SCRIPT.as_bytes())?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    Ok(bytes)
}

/// Work folder of a bundle, removed on drop. It has a fixed name and a lock: a run clears the leftovers of a killed
/// one, and two runs cannot share it.
struct Work {
    folder: PathBuf,
    /// Held until drop.
    _lock: File,
}

impl Work {
    fn begin(out: &Path) -> Result<Self> {
        let folder = out.join(WORK);
        let cannot = || format!("cannot create {}", folder.display());
        fs::create_dir_all(&folder).with_context(cannot)?;
        let lock = File::open(&folder).with_context(cannot)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(usage(
                    format!("another `bundle` is writing to {}", out.display()),
                    "wait until it ends, or name another folder",
                ));
            }
            Err(TryLockError::Error(why)) => return Err(why).with_context(cannot),
        }
        for left in fs::read_dir(&folder)? {
            let left = left?.path();
            if left.is_dir() { fs::remove_dir_all(&left) } else { fs::remove_file(&left) }
                .with_context(|| format!("cannot remove {}", left.display()))?;
        }
        Ok(Self { folder, _lock: lock })
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // A drop cannot report an error; the next run clears the leftovers.
        drop(fs::remove_dir_all(&self.folder));
    }
}

/// Removes the symbols from a copy, which halves its size. Without `strip`, which comes with the C compiler, the copy
/// stays unchanged and the size limit decides.
fn strip(program: &Path) -> Result<()> {
    let Some(strip) = place::tool("strip") else { return Ok(()) };
    let status = Command::new(strip).arg(program).status().context("cannot start strip")?;
    if status.success() {
        Ok(())
    } else {
        Err(check(format!("strip failed on {}", program.display())))
    }
}

/// Shared libraries that another machine may lack. The script uses only those that are missing there.
fn libraries_of(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("cannot start ldd")?;
    if !output.status.success() {
        return Err(check(format!("ldd cannot read {}", program.display())));
    }
    Ok(not_of_glibc(&String::from_utf8_lossy(&output.stdout)))
}

/// Extracts paths from lines such as `libz.so.1 => /lib/libz.so.1 (0x7f)`. Omits the parts of glibc, which work
/// only with each other.
fn not_of_glibc(ldd: &str) -> Vec<PathBuf> {
    const GLIBC: [&str; 7] = [
        "libc.so.",
        "libm.so.",
        "libdl.so.",
        "librt.so.",
        "libpthread.so.",
        "libresolv.so.",
        "ld-linux",
    ];
    ldd.lines()
        .filter_map(|line| line.trim().split_once(" => "))
        .filter(|(name, _)| !GLIBC.iter().any(|part| name.starts_with(part)))
        .filter_map(|(_, rest)| rest.split_whitespace().next())
        .filter(|path| path.starts_with('/'))
        .map(PathBuf::from)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_taken_unless_they_are_of_glibc() {
        let ldd = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                   \tlibz3.so.4 => /lib/x86_64-linux-gnu/libz3.so.4 (0x00007f12)\n\
                   \tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f11)\n\
                   \tlibgone.so.1 => not found\n\
                   \t/lib64/ld-linux-x86-64.so.2 (0x00007f10)\n";
        assert_eq!(not_of_glibc(ldd), [PathBuf::from("/lib/x86_64-linux-gnu/libz3.so.4")]);
    }

    /// A folder with copies of `true` in place of the programs.
    fn fake_programs() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in PACKED {
            // `strip` accepts binaries only, so a script does not work here.
            fs::copy(place::tool("true").unwrap(), dir.path().join(name)).unwrap();
        }
        dir
    }

    #[test]
    fn a_bundle_is_an_archive_and_a_script_and_nothing_else() {
        let out = tempfile::tempdir().unwrap();
        let bytes = pack(fake_programs().path(), out.path(), LIMIT).unwrap();
        let mut names: Vec<_> = fs::read_dir(out.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, [ARCHIVE, "run.sh"]);
        let size = |name: &str| fs::metadata(out.path().join(name)).unwrap().len();
        assert_eq!(bytes, size(ARCHIVE) + size("run.sh"));
    }

    #[test]
    fn the_script_unpacks_runs_and_cleans_up() {
        let out = tempfile::tempdir().unwrap();
        let results = out.path().join("results");
        let temp = out.path().join("tmp");
        fs::create_dir(&temp).unwrap();
        pack(fake_programs().path(), out.path(), LIMIT).unwrap();
        let run = Command::new(out.path().join("run.sh"))
            .args(["--backend", "cuda"])
            .env("OUT", &results)
            .env("TMPDIR", &temp)
            .output()
            .unwrap();
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        assert!(results.join("bench.md").exists());
        assert_eq!(fs::read_dir(&temp).unwrap().count(), 0, "the unpacked programs are removed");
    }

    #[test]
    fn the_script_refuses_bad_options_before_it_verifies() {
        let out = tempfile::tempdir().unwrap();
        let programs = fake_programs();
        // `false` rejects everything.
        fs::copy(place::tool("false").unwrap(), programs.path().join("xtask")).unwrap();
        pack(programs.path(), out.path(), LIMIT).unwrap();
        let mut script = Command::new(out.path().join("run.sh"));
        let run = script.args(["--backend", "x"]).env("OUT", out.path()).output().unwrap();
        assert_eq!(run.status.code(), Some(1));
        assert!(!out.path().join("bench.md").exists(), "nothing was measured");
    }

    #[test]
    fn what_a_killed_run_left_is_cleared_and_a_running_one_is_not() {
        let out = tempfile::tempdir().unwrap();
        let left = out.path().join(WORK).join("lib");
        fs::create_dir_all(&left).unwrap();
        fs::write(left.join("half"), "half").unwrap();
        let work = Work::begin(out.path()).unwrap();
        assert!(work.folder.is_dir() && !left.exists());
        let second = Work::begin(out.path()).map(drop).unwrap_err();
        assert_eq!(report::fail::report(&second), 2);
        drop(work);
        assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_the_callers_error() {
        let error = make_folder(Path::new("/proc/x")).unwrap_err();
        assert_eq!(report::fail::report(&error), 2);
        assert!(error.to_string().contains("\nhint: "), "{error}");
        let out = tempfile::tempdir().unwrap();
        make_folder(&out.path().join("a/b")).unwrap();
        assert!(out.path().join("a/b").is_dir());
    }

    #[test]
    fn a_missing_program_leaves_nothing_behind() {
        let (out, empty) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        assert!(pack(empty.path(), out.path(), LIMIT).is_err());
        assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_bundle_over_the_limit_is_not_written() {
        let out = tempfile::tempdir().unwrap();
        let error = pack(fake_programs().path(), out.path(), 1000).unwrap_err();
        assert!(error.to_string().contains("expected at most"), "{error}");
        assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
    }
}
