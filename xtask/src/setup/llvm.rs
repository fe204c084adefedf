//! The LLVM that CubeCL's CUDA and CPU backends link.
//!
//! Their build dependency `tracel-llvm-bundler` downloads a prebuilt LLVM into a folder of the user. If the download is
//! unreachable, xtask fills the folder with a stand-in for `llvm-config`. This script forwards to the distribution's
//! LLVM.

use std::fs;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{announce, apt, cannot_write};
use crate::place;
use report::fail::usage;

/// LLVM release of the pinned CubeCL.
const RELEASE: &str = "23.1.0-4";
const DOWNLOADS: &str = "https://github.com/tracel-ai/tracel-llvm/releases/download";
/// File that marks the folder as complete for the bundler.
const SENTINEL: &str = ".tracel-llvm-installed";
/// LLVM versions of a distribution that work, best tested first.
const VERSIONS: [u32; 2] = [22, 23];

/// Makes sure that the next build finds an LLVM or can download one.
pub(super) fn prepare() -> Result<()> {
    let data = dirs::data_local_dir().context("no folder for local data of this user")?;
    let folder = data.join(format!("tracel/tracel-llvm-{RELEASE}"));
    if folder.join(SENTINEL).exists() {
        if runs(&folder.join("bin/llvm-config")) {
            return Ok(());
        }
        // The bundler trusts the folder without checking it.
        announce(&format!("{} has no working LLVM; it is created again", folder.display()));
        fs::remove_dir_all(&folder).map_err(|why| cannot_write(&folder, &why))?;
    }
    if can_download(&format!("{DOWNLOADS}/v{RELEASE}/{}", checksum_file()?)) {
        announce("the build will download LLVM from its release page");
        return Ok(());
    }
    let real = distribution_llvm()?;
    write_folder(&folder, &real)?;
    announce(&format!("LLVM cannot be downloaded; using {} instead", real.display()));
    Ok(())
}

/// True if this `llvm-config` prints its version. A symlink or a stand-in may point to a missing file.
fn runs(config: &Path) -> bool {
    let asked = Command::new(config).arg("--version").output();
    asked.is_ok_and(|out| out.status.success() && !out.stdout.trim_ascii().is_empty())
}

/// Name of the first file that the bundler downloads.
fn checksum_file() -> Result<String> {
    let os = match std::env::consts::OS {
        "linux" => "linux",
        "macos" => "macos",
        other => return Err(usage(format!("LLVM is not available for {other}"), "use Linux")),
    };
    let arch = if cfg!(target_arch = "aarch64") { "AArch64" } else { "x64" };
    Ok(format!("{os}-{arch}.checksums.json"))
}

/// Requests the headers of a download with curl or wget. Without both, only checks that the host accepts a connection.
fn can_download(url: &str) -> bool {
    let ask = |program: &str, args: &[&str]| {
        Command::new(program).args(args).arg(url).output().is_ok_and(|out| out.status.success())
    };
    if place::tool("curl").is_some() {
        ask("curl", &["-sfIL", "--max-time", "10"])
    } else if place::tool("wget").is_some() {
        ask("wget", &["-q", "--spider", "--tries=1", "--timeout=10"])
    } else {
        connects(url)
    }
}

/// True if the host of this address accepts a connection within ten seconds.
fn connects(url: &str) -> bool {
    let host = url.split('/').nth(2).unwrap_or_default();
    let authority = if host.contains(':') { host.to_owned() } else { format!("{host}:443") };
    let Ok(mut addresses) = authority.to_socket_addrs() else { return false };
    addresses.any(|address| TcpStream::connect_timeout(&address, Duration::from_secs(10)).is_ok())
}

/// Returns `llvm-config` of the distribution, which it installs if it is missing and this user may.
fn distribution_llvm() -> Result<PathBuf> {
    let version = VERSIONS.into_iter().find(|v| config_of(*v).exists()).unwrap_or(VERSIONS[0]);
    let llvm_dev = format!("llvm-{version}-dev");
    let packages =
        [llvm_dev.as_str(), "libz3-dev", "libzstd-dev", "zlib1g-dev", "libxml2-dev", "g++"];
    let why = "the prebuilt LLVM cannot be downloaded from here";
    let real = config_of(version);
    let absent = match apt::absent(&packages) {
        Some(absent) => absent,
        // Not Debian: uses an LLVM of the right version without checks.
        None if real.exists() => Vec::new(),
        None => packages.to_vec(),
    };
    if absent.is_empty() {
        return Ok(real);
    }
    match apt::install(&absent, why)? {
        Ok(()) if real.exists() => Ok(real),
        Ok(()) => Err(usage(
            format!("{llvm_dev} was installed, but {} is still missing", real.display()),
            "install LLVM 22 or 23 manually",
        )),
        Err(commands) => Err(usage(
            format!("{why}, and these packages are missing: {}", absent.join(" ")),
            format!("run this as root:\n  {commands}"),
        )),
    }
}

fn config_of(version: u32) -> PathBuf {
    PathBuf::from(format!("/usr/lib/llvm-{version}/bin/llvm-config"))
}

/// Writes the script first and the sentinel last, so that a crash in between leaves the folder incomplete.
fn write_folder(folder: &Path, real: &Path) -> Result<()> {
    let bin = folder.join("bin");
    let write = || -> std::io::Result<()> {
        fs::create_dir_all(&bin)?;
        let file = bin.join("llvm-config");
        fs::write(&file, script(real))?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
        fs::write(folder.join(SENTINEL), "")
    };
    write().map_err(|why| cannot_write(folder, &why))
}

/// The stand-in for `llvm-config`. It keeps only the targets that the backends use.
fn script(real: &Path) -> String {
    let host = if cfg!(target_arch = "aarch64") { "AArch64" } else { "X86" };
    include_str!("llvm-config.sh")
        .replace("@REAL@", &format!("'{}'", real.display()))
        .replace("@KEEP@", &format!("{host}|NVPTX"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits until no process has `program` open for writing. A child that another test starts inherits open files
    /// until it executes, and Linux does not run a file that is open for writing.
    fn released(program: &Path) {
        let busy = |why: std::io::Error| why.kind() == std::io::ErrorKind::ExecutableFileBusy;
        while Command::new(program).output().is_err_and(busy) {
            std::thread::yield_now();
        }
    }

    /// Runs the stand-in on a fake llvm-config with Debian's output.
    fn stand_in(args: &[&str]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().join("real-llvm-config");
        let fake = r#"#!/bin/sh
case "$*" in
  *--targets-built*) echo "AArch64 ARM NVPTX SPIRV X86 XCore" ;;
  *--system-libs*) echo "-lrt -ldl -lm /usr/lib/x86_64-linux-gnu/libz3.so -lz -lzstd -lxml2" ;;
  *--libnames*) echo "libLLVMXCoreInfo.a libLLVMX86Info.a libPolly.a libLLVMSupport.a" ;;
  *--libs*) echo "-lLLVMXCoreCodeGen -lLLVMX86TargetMCA -lLLVMX86CodeGen -lLLVMSPIRVAnalysis -lLLVMNVPTXDesc -lLLVMARMUtils -lLLVMAArch64AsmParser -lPolly -lPollyISL -lLLVMAnalysis -lLLVMAsmParser -lLLVMCodeGen -lLLVMSupport" ;;
  *) echo "22.1.8 $*" ;;
esac
"#;
        fs::write(&real, fake).unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o755)).unwrap();
        let folder = dir.path().join("tracel");
        write_folder(&folder, &real).unwrap();
        assert!(folder.join(SENTINEL).exists());
        let config = folder.join("bin/llvm-config");
        released(&real);
        released(&config);
        let out = Command::new(config).args(args).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap().trim().to_owned()
    }

    #[test]
    fn a_library_given_by_path_becomes_a_name() {
        let libs = stand_in(&["--link-static", "--system-libs"]);
        assert_eq!(libs, "-lrt -ldl -lm -lz3 -lz -lzstd -lxml2");
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn only_the_targets_in_use_are_linked() {
        let libs = stand_in(&["--link-static", "--libs"]);
        assert_eq!(
            libs,
            "-lLLVMX86TargetMCA -lLLVMX86CodeGen -lLLVMNVPTXDesc -lLLVMAnalysis -lLLVMAsmParser \
             -lLLVMCodeGen -lLLVMSupport"
        );
        assert_eq!(stand_in(&["--libnames"]), "libLLVMX86Info.a libLLVMSupport.a");
    }

    #[test]
    fn other_questions_pass_unchanged() {
        assert_eq!(stand_in(&["--link-static", "--version"]), "22.1.8 --link-static --version");
    }

    #[test]
    fn a_folder_that_cannot_be_written_has_a_hint() {
        let error = write_folder(Path::new("/proc/x"), Path::new("llvm-config")).unwrap_err();
        assert_eq!(report::fail::report(&error), 2);
        assert!(error.to_string().contains("\nhint: "), "{error}");
    }

    #[test]
    fn an_llvm_is_believed_when_it_runs() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("bin/llvm-config");
        assert!(!runs(&config), "missing");
        write_folder(dir.path(), &dir.path().join("gone")).unwrap();
        assert!(config.exists() && !runs(&config), "forwards to nothing");
        fs::write(&config, "").unwrap();
        assert!(!runs(&config), "empty");
        write_folder(dir.path(), &place::tool("echo").unwrap()).unwrap();
        released(&config);
        assert!(runs(&config));
    }

    #[test]
    fn an_unreachable_page_is_not_a_download() {
        assert!(!can_download("http://127.0.0.1:9/nothing"));
        assert!(!connects("http://127.0.0.1:9/nothing"));
    }

    #[test]
    fn a_host_that_listens_takes_a_connection() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(connects(&format!("http://{}/file", listener.local_addr().unwrap())));
    }
}
