//! Registers, spills, shared memory and occupancy of every config, for cards that are not there.

use std::path::Path;

use offline::{Toolkit, sweep};

/// Prints the sweep; false when an instance failed.
pub(crate) fn run(
    cuda_home: &Path,
    json: bool,
    filter: Option<&str>,
    dump: Option<&Path>,
) -> anyhow::Result<bool> {
    if let Some(dir) = dump {
        std::fs::create_dir_all(dir).map_err(|e| {
            anyhow::anyhow!("cannot make {}: {e}\nhint: --dump names a folder", dir.display())
        })?;
    }
    let (rows, findings) = sweep(&Toolkit::at(cuda_home)?, filter, dump)?;
    if rows.is_empty() && findings.is_empty() {
        anyhow::bail!(
            "no instance matches\nhint: names look like `rtx4090 matmul bf16 row.col 4096x4096x4096`"
        );
    }
    if json {
        println!("{}", serde_json::json!({ "rows": rows, "findings": findings }));
        return Ok(findings.is_empty());
    }
    println!(
        "{:<8} {:<6} {:<34} {:>4} {:>6} {:>7} {:>5}  config",
        "target", "kernel", "instance", "regs", "spill", "shared", "cubes"
    );
    for r in &rows {
        println!(
            "{:<8} {:<6} {:<34} {:>4} {:>6} {:>7} {:>5}  {}",
            r.target,
            r.kernel,
            r.instance,
            r.usage.registers,
            r.usage.spilled(),
            r.usage.shared,
            r.occupancy,
            serde_json::to_string(&r.config)?,
        );
    }
    for f in &findings {
        println!(
            "failed: {} {} {}: {}",
            f.target,
            f.instance,
            serde_json::to_string(&f.config)?,
            f.what
        );
    }
    let spill = rows.iter().filter(|r| r.usage.spilled() > 0).count();
    println!("{} instances compiled, {spill} of them spill, {} failed", rows.len(), findings.len());
    Ok(findings.is_empty())
}
