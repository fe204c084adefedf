//! Host memory available to this process.

use std::fs;
use std::path::Path;

/// Host memory in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemory {
    /// Total of the machine, or the limit of this process's control group.
    pub total: u64,
    /// Memory that Linux can provide without swapping; cached files count as free.
    pub free: u64,
}

impl HostMemory {
    /// Reads the current values; `None` without Linux's `/proc`.
    pub fn now() -> Option<Self> {
        let own = Self::parse(&fs::read_to_string("/proc/meminfo").ok()?)?;
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Some(own.within(Path::new("/sys/fs/cgroup"), &groups))
    }

    /// Parses the text of `/proc/meminfo`.
    pub(crate) fn parse(meminfo: &str) -> Option<Self> {
        let bytes = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
        };
        Some(Self { total: bytes("MemTotal:")?, free: bytes("MemAvailable:")? })
    }

    /// Applies the limits of control groups (version 2) below `root`; `groups` is the text of
    /// `/proc/self/cgroup`. A group's limit also holds for the groups within it.
    fn within(self, root: &Path, groups: &str) -> Self {
        let Some(path) = groups.lines().find_map(|line| line.strip_prefix("0::/")) else {
            return self;
        };
        let own = root.join(path);
        let up = own.ancestors().take_while(|folder| folder.starts_with(root));
        up.filter_map(Self::of_group).fold(self, |least, group| Self {
            total: least.total.min(group.total),
            free: least.free.min(group.free),
        })
    }

    /// Reads a control group; `None` if it has no limit.
    fn of_group(folder: &Path) -> Option<Self> {
        let text = |name| fs::read_to_string(folder.join(name)).ok();
        let number = |name| text(name)?.trim().parse::<u64>().ok();
        let total = number("memory.max")?;
        let stat = text("memory.stat").unwrap_or_default();
        let part = |name: &str| {
            let line = stat.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        let files = part("active_file ") + part("inactive_file ");
        let held = number("memory.current")?.saturating_sub(files);
        Some(Self { total, free: total.saturating_sub(held) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn what_is_free_is_what_linux_says() {
        let text = "MemTotal:  4194304 kB\nMemFree: 1 kB\nMemAvailable:  1048576 kB\n";
        assert_eq!(HostMemory::parse(text), Some(HostMemory { total: 4 * GIB, free: GIB }));
        assert_eq!(HostMemory::parse("MemTotal: 1 kB\n"), None);
    }

    #[test]
    fn a_control_group_leaves_less() {
        let folder = tempfile::tempdir().expect("a folder");
        let inner = folder.path().join("outer/inner");
        fs::create_dir_all(&inner).expect("made");
        let write = |folder: &Path, name: &str, text: String| {
            fs::write(folder.join(name), text).expect("written");
        };
        let own = HostMemory { total: 16 * GIB, free: 8 * GIB };
        let left = || own.within(folder.path(), "4:memory:/else\n0::/outer/inner\n");
        assert_eq!(left(), own, "no limits");
        write(&inner, "memory.max", "max\n".to_owned());
        assert_eq!(left(), own);
        let outer = inner.parent().expect("outer");
        write(outer, "memory.max", format!("{}\n", 6 * GIB));
        write(outer, "memory.current", format!("{}\n", 5 * GIB));
        write(outer, "memory.stat", format!("anon 7\ninactive_file {GIB}\nactive_file {GIB}\n"));
        assert_eq!(left(), HostMemory { total: 6 * GIB, free: 3 * GIB });
        // The tightest limit counts.
        write(&inner, "memory.max", format!("{}\n", 2 * GIB));
        write(&inner, "memory.current", format!("{GIB}\n"));
        assert_eq!(left(), HostMemory { total: 2 * GIB, free: GIB });
        assert_eq!(own.within(folder.path(), ""), own, "no groups of version 2");
    }
}
