//! Every config of every kernel, on every target.

use std::path::Path;

use arch::ArchProfile;
use kernels::matmul::{Layout, Matmul, MatmulConfig, MatmulProblem, Precision};
use rayon::prelude::*;
use serde::Serialize;
use tune::Kernel;

use crate::compile::{CompileError, Toolkit, Usage, properties, target_properties};
use crate::occupancy::{Limits, occupancy};

/// Recorded profiles that stand for the architectures.
pub const TARGETS: [&str; 3] = ["rtx4090", "h200", "rtx5090"];
/// What an RTX card gives one cube.
const RTX_SHARED: u32 = 99 << 10;

/// One kernel instance on one target.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    pub kernel: &'static str,
    pub target: &'static str,
    pub sm: u32,
    /// `bf16 row.col`: precision and layouts.
    pub instance: String,
    pub config: MatmulConfig,
    pub usage: Usage,
    pub units: u32,
    /// Cubes on one processor.
    pub occupancy: u32,
}

/// What is wrong with an instance.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    pub target: &'static str,
    pub instance: String,
    pub config: MatmulConfig,
    pub what: String,
}

/// Compiles every candidate of every kernel for every target whose `target instance config` text
/// contains `filter`; both lists are in a fixed order. With `dump`, sources and binaries are kept in
/// that folder, numbered in the order of the list.
///
/// # Errors
/// A target profile that is not recorded.
pub fn sweep(
    toolkit: &Toolkit,
    filter: Option<&str>,
    dump: Option<&Path>,
) -> Result<(Vec<Row>, Vec<Finding>), arch::UnknownProfile> {
    let mut work = Vec::new();
    for target in TARGETS {
        let arch = ArchProfile::recorded(target)?;
        for (precision, layouts) in instances() {
            let sizes = [4096; 3];
            let problem =
                MatmulProblem::dense(1, sizes, layouts, precision).expect("4096 is a size");
            for config in Matmul::candidates(&arch, &problem) {
                let text = format!("{target} {} {config:?}", instance_name(&problem));
                if filter.is_none_or(|f| text.contains(f)) {
                    work.push((work.len(), target, arch.clone(), problem, config));
                }
            }
        }
    }
    let results: Vec<_> = work
        .into_par_iter()
        .map(|(index, target, arch, problem, config)| {
            let sm = arch.compute_capability.unwrap_or(0);
            let instance = instance_name(&problem);
            let stem = dump.map(|d| d.join(format!("{index:03}-{target}")));
            let outcome = compile(toolkit, &arch, &problem, &config, stem.as_deref());
            (target, sm, instance, config, outcome)
        })
        .collect();
    let (mut rows, mut findings) = (Vec::new(), Vec::new());
    for (target, sm, instance, config, outcome) in results {
        let mut find = |what: String| {
            findings.push(Finding { target, instance: instance.clone(), config, what });
        };
        match outcome {
            Err(e) => find(e.to_string()),
            Ok((usage, units)) => {
                // Elsewhere a spill is a column of the table: the tuner decides by time.
                let rtx = target.starts_with("rtx");
                if rtx && usage.spill_stores + usage.spill_loads > 0 {
                    find(format!("spills {} bytes", usage.spill_stores + usage.spill_loads));
                }
                if rtx && usage.shared > RTX_SHARED {
                    find(format!("{} bytes of shared memory, over 99 KiB", usage.shared));
                }
                let occupancy = Limits::of(sm)
                    .map_or(0, |l| occupancy(l, units, usage.registers, usage.shared));
                if occupancy == 0 {
                    find("does not fit one processor".to_owned());
                }
                let kernel = Matmul::NAME;
                rows.push(Row { kernel, target, sm, instance, config, usage, units, occupancy });
            }
        }
    }
    Ok((rows, findings))
}

/// Layouts and precisions whose code differs; bf16 and f16 differ in one letter of an instruction.
fn instances() -> Vec<(Precision, [Layout; 2])> {
    let (row, col) = (Layout::Row, Layout::Col);
    vec![
        (Precision::Bf16, [row, col]),
        (Precision::Bf16, [row, row]),
        (Precision::Bf16, [col, row]),
        (Precision::F16Acc16, [row, col]),
        (Precision::F16Acc16, [row, row]),
        (Precision::Tf32, [row, col]),
        (Precision::Tf32, [col, row]),
        (Precision::F32, [row, col]),
        (Precision::F32, [row, row]),
    ]
}

/// `bf16 row.col`.
fn instance_name(problem: &MatmulProblem) -> String {
    let (lhs, rhs) = (problem.lhs.layout.name(), problem.rhs.layout.name());
    format!("{} {lhs}.{rhs}", problem.precision.name())
}

fn compile(
    toolkit: &Toolkit,
    arch: &ArchProfile,
    problem: &MatmulProblem,
    config: &MatmulConfig,
    dump: Option<&Path>,
) -> Result<(Usage, u32), CompileError> {
    let properties = properties(arch);
    let kernel = Matmul::program(arch, problem, config, &properties, &target_properties());
    let units = config.units(arch);
    Ok((toolkit.usage(kernel.as_ref(), arch.compute_capability.unwrap_or(0), dump)?, units))
}
