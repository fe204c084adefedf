//! Compiles every instance of every kernel for every target, on all cores.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Mutex;

use arch::ArchProfile;
use precompile::{Known, Limits, Toolkit, Usage, occupancy, properties, target_properties};
use rayon::prelude::*;
use serde::Serialize;
use serde_json::Value;
use suite::{Instance, KERNELS, RTX_SHARED_BYTES};

/// Recorded profiles that represent the architectures.
const TARGETS: [&str; 3] = ["rtx4090", "h200", "rtx5090"];

/// One kernel instance on one target.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    pub(crate) kernel: &'static str,
    pub(crate) target: &'static str,
    pub(crate) sm: u32,
    /// Name of the case.
    pub(crate) instance: String,
    pub(crate) config: Value,
    pub(crate) usage: Usage,
    /// Cubes that fit on one processor.
    pub(crate) occupancy: u32,
    /// True if the shipped cache holds this config for an RTX card.
    pub(crate) tuned: bool,
}

/// A fault of an instance.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Finding {
    pub(crate) target: &'static str,
    pub(crate) instance: String,
    pub(crate) config: Value,
    pub(crate) what: String,
}

/// Compiles, for every target, the instances whose `target case config` text contains `filter`. With `tuned`, also
/// compiles configs from the shipped cache, one in `share`. Results in `known` are reused. Both returned lists are in a
/// fixed order.
///
/// With `dump`, sources and binaries are stored in that folder, numbered in list order. `progress` gets the finished
/// and the total number of instances, beginning with 0 finished.
///
/// # Errors
/// A target profile is not recorded.
pub(crate) fn sweep(
    toolkit: &Toolkit,
    filter: Option<&str>,
    (tuned, share): (bool, NonZeroUsize),
    dump: Option<&Path>,
    known: &Known,
    progress: impl Fn(usize, usize) + Sync,
) -> Result<(Vec<Row>, Vec<Finding>), arch::UnknownProfile> {
    let mut work = Vec::new();
    for target in TARGETS {
        let arch = ArchProfile::recorded(target)?;
        let mut others = 0;
        let chosen = |of: &Instance| {
            others += usize::from(!of.swept);
            of.swept || (tuned && others % share == 0)
        };
        for instance in instances(&arch).into_iter().filter(chosen) {
            let text = format!("{target} {} {}", instance.name, instance.config);
            if filter.is_none_or(|f| text.contains(f)) {
                work.push((work.len(), target, arch.clone(), instance));
            }
        }
    }
    let total = work.len();
    progress(0, total);
    let done = Mutex::new(0);
    let results: Vec<_> = work
        .into_par_iter()
        .map(|(index, target, arch, instance)| {
            let stem = dump.map(|d| d.join(format!("{index:03}-{target}")));
            let sm = arch.compute_capability.unwrap_or(0);
            let outcome = toolkit.usage(instance.program.as_ref(), sm, stem.as_deref(), known);
            let mut done = done.lock().expect("no holder panics");
            *done += 1;
            progress(*done, total);
            drop(done);
            (target, sm, instance, outcome)
        })
        .collect();
    let (mut rows, mut findings) = (Vec::new(), Vec::new());
    for (target, sm, of, outcome) in results {
        let (instance, config) = (of.name, of.config);
        let mut find = |what: String| {
            let (instance, config) = (instance.clone(), config.clone());
            findings.push(Finding { target, instance, config, what });
        };
        match outcome {
            Err(e) => find(e.to_string()),
            Ok(usage) => {
                let occupancy = Limits::from_sm(sm)
                    .map_or(0, |l| occupancy(l, usage.units, usage.registers, usage.shared));
                faults(target, of.clean, &usage, occupancy).into_iter().for_each(find);
                let (kernel, tuned) = (of.kernel, of.tuned);
                rows.push(Row { kernel, target, sm, instance, config, usage, occupancy, tuned });
            }
        }
    }
    Ok((rows, findings))
}

/// Bytes per unit that a `clean` instance may spill: a few registers, stored and loaded once.
const SMALL_SPILL: u32 = 16;

/// Faults of a compiled instance. A `clean` one must not spill more than [`SMALL_SPILL`] on an RTX card. Any other spill is only
/// reported in the table, because the tuner decides by time.
fn faults(target: &str, clean: bool, usage: &Usage, occupancy: u32) -> Vec<String> {
    let rtx = target.starts_with("rtx");
    let mut faults = Vec::new();
    if rtx && clean && usage.spilled() > SMALL_SPILL {
        faults.push(format!("spills {} bytes", usage.spilled()));
    }
    if rtx && usage.shared > RTX_SHARED_BYTES {
        faults.push(format!("{} bytes of shared memory, expected at most 99 KiB", usage.shared));
    }
    if occupancy == 0 {
        faults.push("does not fit on one processor".to_owned());
    }
    faults
}

/// Instances of every kernel for `arch`.
fn instances(arch: &ArchProfile) -> Vec<Instance> {
    let (properties, target) = (properties(arch), target_properties());
    KERNELS.iter().flat_map(|kernel| kernel.instances(arch, &properties, &target)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spills_and_memory_are_faults_on_an_rtx_card() {
        let fits = Usage {
            registers: 64,
            spill_stores: 0,
            spill_loads: 0,
            stack: 0,
            shared: RTX_SHARED_BYTES,
            units: 128,
        };
        let small = Usage { spill_loads: SMALL_SPILL, ..fits };
        let spills = Usage { spill_loads: 20, ..fits };
        let large = Usage { shared: RTX_SHARED_BYTES + 1, ..fits };
        assert!(faults("rtx4090", true, &fits, 1).is_empty());
        assert!(faults("rtx4090", true, &small, 1).is_empty());
        assert_eq!(faults("rtx4090", true, &spills, 1), ["spills 20 bytes"]);
        assert!(faults("rtx4090", false, &spills, 1).is_empty(), "the tuner decides by time");
        assert_eq!(faults("rtx4090", false, &large, 1).len(), 1);
        assert!(faults("h200", true, &spills, 1).is_empty());
        assert!(faults("h200", true, &large, 1).is_empty());
        assert_eq!(faults("h200", true, &fits, 0), ["does not fit on one processor"]);
    }

    #[test]
    fn every_code_path_is_compiled_for_every_target() {
        for target in TARGETS {
            let all = instances(&ArchProfile::recorded(target).expect("recorded"));
            for part in [
                "matmul f16acc16 4096x4096x4096",
                "matmul bf16 4088x4072x4104",
                "matmul tf32 4095x4093x4091",
                "matmul bf16 1x14336x4096",
                "matmul bf16 64x14336x4096",
                " groups=8",
                " epilogue=bias+gelu+gate+residual",
                "attention bf16 batch=4 causal=true head_dim=80",
                "decode bf16 batch=1 block_size=16 cache=i8",
                "decode bf16 batch=1 block_size=256",
                " seq_q=16",
            ] {
                assert!(all.iter().any(|i| i.name.contains(part)), "{target}:{part}");
            }
            let tuned = all.iter().any(|i| i.kernel == "matmul" && i.name.contains("x2304x768"));
            assert_eq!(tuned, target.starts_with("rtx"), "{target}: the shipped results of GPT-2");
            let cut = |i: &Instance| i.config["parts"].as_u64() > Some(1);
            assert!(all.iter().any(cut), "{target}: split-k");
            let added = |i: &Instance| cut(i) && i.name.ends_with(" launch 2");
            assert!(all.iter().any(added), "{target}: the sum of its parts");
        }
    }
}
