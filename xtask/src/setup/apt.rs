//! Installs packages on Debian and its derivatives.

use std::process::Command;

use anyhow::{Context, Result};

use super::announce;
use crate::place;
use report::fail::check;

/// Right to change the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rights {
    Root,
    /// `sudo` works without a password.
    Sudo,
    None,
}

/// Prints the reason, then installs packages. Without the right or without apt, returns `Ok(Err(commands))` with the
/// commands to run by hand.
///
/// # Errors
/// apt itself failed.
pub(super) fn install(packages: &[&str], why: &str) -> Result<Result<(), String>> {
    let by_hand = commands("sudo ", packages);
    let Some(apt) = place::tool("apt-get") else { return Ok(Err(by_hand)) };
    let prefix: &[&str] = match rights() {
        Rights::Root => &["env", "DEBIAN_FRONTEND=noninteractive"],
        Rights::Sudo => &["sudo", "-n", "env", "DEBIAN_FRONTEND=noninteractive"],
        Rights::None => return Ok(Err(by_hand)),
    };
    announce(&format!("{why}; installing {}", packages.join(" ")));
    let run = |args: &[&str]| -> Result<()> {
        let (program, first) = (prefix[0], &prefix[1..]);
        let output = Command::new(program)
            .args(first)
            .arg(&apt)
            .args(args)
            .output()
            .with_context(|| format!("cannot start {program}"))?;
        if output.status.success() {
            return Ok(());
        }
        let log = String::from_utf8_lossy(&output.stderr);
        Err(check(format!("apt-get {} failed:\n{}", args.join(" "), log.trim_end())))
    };
    run(&["update", "-q"])?;
    run(&[&["install", "-y", "-q", "--no-install-recommends"], packages].concat())?;
    Ok(Ok(()))
}

/// Returns the packages that are not installed; `None` on a system without dpkg.
pub(super) fn absent<'a>(packages: &[&'a str]) -> Option<Vec<&'a str>> {
    let query = place::tool("dpkg-query")?;
    let installed = |package: &str| {
        let out = Command::new(&query).args(["-W", "-f=${db:Status-Status}", package]).output();
        out.is_ok_and(|out| out.status.success() && out.stdout == b"installed")
    };
    Some(packages.iter().copied().filter(|package| !installed(package)).collect())
}

fn rights() -> Rights {
    let user = Command::new("id").arg("-u").output();
    if user.is_ok_and(|out| out.stdout.trim_ascii() == b"0") {
        return Rights::Root;
    }
    let sudo = place::tool("sudo").is_some()
        && Command::new("sudo").args(["-n", "true"]).output().is_ok_and(|out| out.status.success());
    if sudo { Rights::Sudo } else { Rights::None }
}

/// Commands to run by hand.
fn commands(sudo: &str, packages: &[&str]) -> String {
    format!(
        "{sudo}apt-get update && {sudo}apt-get install -y --no-install-recommends {}",
        packages.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_can_be_pasted() {
        assert_eq!(
            commands("sudo ", &["g++", "libz3-dev"]),
            "sudo apt-get update && sudo apt-get install -y --no-install-recommends g++ libz3-dev"
        );
    }

    #[test]
    fn dpkg_knows_what_is_not_installed() {
        if let Some(absent) = absent(&["dpkg", "flashover-no-such-package"]) {
            assert_eq!(absent, ["flashover-no-such-package"]);
        }
    }
}
