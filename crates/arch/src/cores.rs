//! Cores of the CPU that kernels use: those that other programs leave free, up to a limit of the user.
//!
//! A launch ends when its slowest unit ends. Beside one busy program, the unit on that program's core waits for a time
//! slice of 3 ms or more in every launch: two cores are then many times slower than one. So the load of other programs is
//! measured while kernels run, four times a second. Where there is some, kernels use fewer cores, and CubeCL's threads leave the
//! others: they poll with `sched_yield`, which gives a core that is shared away for a time slice.

use std::fs;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

/// Least time between two measurements. `/proc` counts in ticks of 10 ms.
const WINDOW: Duration = Duration::from_millis(250);
/// Ticks per second of `/proc`, on every Linux.
const TICKS: f64 = 100.0;
/// Load of other programs, in cores, that costs no core.
const SPARE: f64 = 0.25;

/// Greatest number of cores that the user allows; 0 for all.
static LIMIT: AtomicU32 = AtomicU32::new(0);

/// Limits the cores that kernels of the CPU use, on devices that this process opens from now on.
pub fn limit_cores(cores: u32) {
    LIMIT.store(cores, Ordering::Relaxed);
}

/// Returns how many of `all` cores the user allows; at least 1.
pub(crate) fn allowed_cores(all: u32) -> u32 {
    match LIMIT.load(Ordering::Relaxed) {
        0 => all,
        limit => limit.min(all),
    }
}

/// Returns how many of `all` cores other programs leave free; at least 1.
pub(crate) fn free_cores(all: u32) -> u32 {
    static LOAD: LazyLock<Load> = LazyLock::new(Load::new);
    LOAD.free(all)
}

/// Load of other programs on the cores that this process may use.
struct Load {
    started: Instant,
    /// Nanoseconds from the start to the next measurement.
    next: AtomicU64,
    /// Cores that other programs use, by the last two measurements: the larger number counts.
    busy: [AtomicU32; 2],
    before: Mutex<Option<Sample>>,
}

impl Load {
    fn new() -> Self {
        let busy = [AtomicU32::new(0), AtomicU32::new(0)];
        Self { started: Instant::now(), next: AtomicU64::new(0), busy, before: Mutex::new(None) }
    }

    fn free(&self, all: u32) -> u32 {
        let now = self.started.elapsed();
        if now.as_nanos() as u64 >= self.next.load(Ordering::Relaxed) {
            self.measure(now);
        }
        let [last, previous] = self.busy.each_ref().map(|own| own.load(Ordering::Relaxed));
        rounded(all, last.max(previous))
    }

    /// Measures the load since the last measurement. Another thread that measures now is not waited for.
    fn measure(&self, now: Duration) {
        let Ok(mut before) = self.before.try_lock() else { return };
        self.next.store((now + WINDOW).as_nanos() as u64, Ordering::Relaxed);
        let sample = Sample::now();
        if let Some((earlier, sample)) = before.as_ref().zip(sample.as_ref()) {
            let busy = sample.busy_since(earlier);
            self.busy[1].store(self.busy[0].load(Ordering::Relaxed), Ordering::Relaxed);
            self.busy[0].store((busy - SPARE).ceil().max(0.0) as u32, Ordering::Relaxed);
            let [last, previous] = self.busy.each_ref().map(|own| own.load(Ordering::Relaxed));
            log::debug!("other programs use {busy:.2} cores");
            threads::confine(&sample.cores, last.max(previous));
        }
        *before = sample;
    }
}

/// Returns the cores to use of `all` where other programs use `busy`. Few numbers are returned, since kernels are compiled for
/// each.
fn rounded(all: u32, busy: u32) -> u32 {
    let free = all.saturating_sub(busy);
    let steps = [all, all.saturating_sub(1), all * 3 / 4, all / 2, all / 4];
    steps.into_iter().find(|own| *own <= free).unwrap_or(1).max(1)
}

/// Work so far.
#[derive(Debug, Clone, PartialEq)]
struct Sample {
    at: Instant,
    /// Cores that this process may use.
    cores: Vec<u32>,
    /// Ticks of all programs on these cores.
    all: u64,
    /// Ticks of this process.
    own: u64,
}

impl Sample {
    /// Reads the counters; none without Linux's `/proc`.
    fn now() -> Option<Self> {
        let text = |path| fs::read_to_string(path).ok();
        let cores = allowed(&text("/proc/self/status")?)?;
        let all = busy_ticks(&text("/proc/stat")?, &cores);
        Some(Self { at: Instant::now(), cores, all, own: own_ticks(&text("/proc/self/stat")?)? })
    }

    /// Returns the cores that other programs used on average.
    fn busy_since(&self, before: &Self) -> f64 {
        let ticks = (self.at - before.at).as_secs_f64() * TICKS;
        let all = self.all.saturating_sub(before.all) as f64;
        let own = self.own.saturating_sub(before.own) as f64;
        if ticks > 0.0 { (all - own).max(0.0) / ticks } else { 0.0 }
    }
}

/// Returns the cores that a process may use, from its `/proc/<pid>/status`.
fn allowed(status: &str) -> Option<Vec<u32>> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let mut all = Vec::new();
    for part in list.trim().split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        all.extend(from.parse::<u32>().ok()?..=to.parse().ok()?);
    }
    Some(all)
}

/// Returns the ticks that some cores were busy, from `/proc/stat`: user, nice, system, irq, softirq.
fn busy_ticks(stat: &str, cores: &[u32]) -> u64 {
    let of_core = |line: &str| {
        let (core, ticks) = line.strip_prefix("cpu")?.split_once(' ')?;
        cores.contains(&core.parse().ok()?).then_some(())?;
        let ticks: Vec<u64> = ticks.split_whitespace().filter_map(|own| own.parse().ok()).collect();
        Some([0, 1, 2, 5, 6].iter().filter_map(|at| ticks.get(*at)).sum::<u64>())
    };
    stat.lines().filter_map(of_core).sum()
}

/// Returns the ticks of a process, from its `/proc/<pid>/stat`. Its name, in brackets, may hold spaces.
fn own_ticks(stat: &str) -> Option<u64> {
    let mut rest = stat.rsplit_once(')')?.1.split_whitespace();
    let user: u64 = rest.nth(11)?.parse().ok()?;
    Some(user + rest.next()?.parse::<u64>().ok()?)
}

/// Cores of CubeCL's threads.
#[cfg(target_os = "linux")]
mod threads {
    use std::collections::BTreeMap;
    use std::fs;
    use std::sync::{Mutex, PoisonError};

    use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

    /// Begin of the names of CubeCL's threads for devices: one that launches, and one for each core.
    const NAME: &str = "DSD-";

    /// Cores of the threads that were moved, before that.
    static MOVED: Mutex<BTreeMap<i32, CpuSet>> = Mutex::new(BTreeMap::new());

    /// Keeps CubeCL's threads away from the first `busy` of some cores; for 0, gives them back their own. The system moves
    /// other programs to the cores that are left to them.
    pub(super) fn confine(cores: &[u32], busy: u32) {
        let mut moved = MOVED.lock().unwrap_or_else(PoisonError::into_inner);
        if busy == 0 {
            for (id, own) in std::mem::take(&mut *moved) {
                set(id, &own);
            }
            return;
        }
        let mut rest = CpuSet::new();
        let first = (busy as usize).min(cores.len().saturating_sub(1));
        let known = cores[first..].iter().map(|core| *core as usize);
        known.filter(|core| *core < CpuSet::MAX_CPU).for_each(|core| rest.set(core));
        let names = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        for thread in names {
            let name = fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
            let id = thread.file_name().to_str().and_then(|id| id.parse::<i32>().ok());
            let Some(id) = id.filter(|_| name.starts_with(NAME)) else { continue };
            let own = Pid::from_raw(id).and_then(|id| sched_getaffinity(Some(id)).ok());
            if let Some(own) = own
                && own != rest
            {
                moved.entry(id).or_insert(own);
                set(id, &rest);
            }
        }
    }

    fn set(id: i32, cores: &CpuSet) {
        // A thread may have ended.
        if let Some(id) = Pid::from_raw(id)
            && let Err(why) = sched_setaffinity(Some(id), cores)
        {
            log::debug!("thread {id:?} stays on its cores: {why}");
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod threads {
    pub(super) fn confine(_cores: &[u32], _busy: u32) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_from_proc() {
        assert_eq!(allowed("Name:\tx\nCpus_allowed_list:\t0-2,5\n"), Some(vec![0, 1, 2, 5]));
        let stat = "cpu  9 9 9 9 9 9 9\ncpu0 1 2 4 100 100 8 16 0\ncpu1 1000 0 0 0 0 0 0\ncpu12 7 0 0 0 0 0 0\n";
        assert_eq!(busy_ticks(stat, &[0, 12]), 38);
        let own = "12 (a (b) c) R 1 2 3 4 5 6 7 8 9 10 30 12 0 0 20 0";
        assert_eq!(own_ticks(own), Some(42));
    }

    #[test]
    fn others_leave_at_least_one_core() {
        let free = |busy: u32| [1, 2, 3, 4, 16].map(|all| rounded(all, busy));
        assert_eq!(free(0), [1, 2, 3, 4, 16]);
        assert_eq!(free(1), [1, 1, 2, 3, 15]);
        assert_eq!(free(2), [1, 1, 1, 2, 12]);
        assert_eq!(free(20), [1, 1, 1, 1, 1]);
    }

    #[test]
    fn a_load_counts_after_a_window_and_ends_after_two() {
        let at = Instant::now();
        let sample = |ms: u64, all, own| Sample {
            at: at + Duration::from_millis(ms),
            cores: vec![0, 1],
            all,
            own,
        };
        let before = sample(0, 1000, 500);
        // One core of others, and one of this process.
        assert!((sample(250, 1050, 525).busy_since(&before) - 1.0).abs() < 1e-9);
        assert_eq!(sample(250, 1025, 526).busy_since(&before), 0.0);
        assert_eq!(before.busy_since(&before), 0.0);
    }
}
