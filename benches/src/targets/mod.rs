//! Reports registers, spills, shared memory and occupancy of every config, for cards that are not present.

mod sweep;

use std::io::IsTerminal;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use command::OutFile;
use precompile::{Known, Toolkit};

use self::sweep::{Row, sweep};

/// Compiles every config and code path for sm_89, sm_90 and sm_120 without a GPU and reports registers, spills and
/// shared memory.
#[derive(clap::Args)]
pub(crate) struct TargetsArgs {
    /// Folder of a CUDA 13 toolkit with bin/ptxas, include/, and NVRTC for the dynamic linker
    #[arg(long)]
    cuda_home: PathBuf,
    #[arg(long)]
    json: bool,
    /// Compile only instances whose `target case config` contains this text
    #[arg(long)]
    filter: Option<String>,
    /// Keep CUDA C++, PTX and machine code in this folder
    #[arg(long)]
    dump: Option<PathBuf>,
    /// Also compile configs that the shipped tune cache holds for an RTX card
    #[arg(long)]
    tuned: bool,
    /// With --tuned: compile one in so many of these configs
    #[arg(long, value_name = "N", default_value = "1", requires = "tuned")]
    share: NonZeroUsize,
    /// Compile again instances with stored results
    #[arg(long)]
    fresh: bool,
    /// File of stored results [default: flashover/targets.jsonl in the cache folder]
    #[arg(long, value_name = "FILE")]
    cache: Option<PathBuf>,
    /// Write a table with one row per target and kernel to this file
    #[arg(long, value_name = "FILE", conflicts_with = "filter")]
    summary: Option<PathBuf>,
}

/// Prints the sweep; returns false if an instance failed.
pub(crate) fn run(args: &TargetsArgs) -> anyhow::Result<bool> {
    let TargetsArgs { cuda_home, filter, tuned, .. } = args;
    let (filter, dump, tuned) = (filter.as_deref(), args.dump.as_deref(), *tuned);
    let whole = tuned && args.share == NonZeroUsize::MIN;
    if let Some(dir) = dump {
        std::fs::create_dir_all(dir).map_err(|e| {
            anyhow::anyhow!("cannot create {}: {e}\nhint: set --dump to a folder", dir.display())
        })?;
    }
    let terminal = std::io::stderr().is_terminal();
    let show = |done, total| {
        if let Some(text) = progress(done, total, terminal) {
            eprint!("{text}");
        }
    };
    let summary = args.summary.as_deref().map(OutFile::new).transpose()?;
    let cache =
        args.cache.clone().or_else(|| Some(dirs::cache_dir()?.join("flashover/targets.jsonl")));
    let kept = match &cache {
        Some(file) if !args.fresh => std::fs::read_to_string(file).unwrap_or_default(),
        _ => String::new(),
    };
    let known = Known::read(&kept);
    let (rows, findings) =
        sweep(&Toolkit::at(cuda_home)?, filter, (tuned, args.share), dump, &known, show)?;
    if rows.is_empty() && findings.is_empty() {
        anyhow::bail!(
            "no instance matches\nhint: use part of a name such as `rtx4090 matmul bf16 \
             4096x4096x4096 lhs=row rhs=col`"
        );
    }
    if let (Some(file), None) = (&cache, dump) {
        // A complete sweep drops stored results that it did not use.
        let lines = known.lines(filter.is_some() || !whole);
        if let Err(why) = keep(file, &lines) {
            eprintln!("warning: results are not cached: {why:#}");
        }
    }
    if let Some(file) = summary {
        file.write(summarised(&rows).as_bytes())?;
    }
    if args.json {
        let report = serde_json::json!({ "rows": rows, "findings": findings });
        command::print(&format!("{report}\n"))?;
        return Ok(findings.is_empty());
    }
    let head = ["target", "case", "regs", "spill", "shared", "cubes"].map(str::to_owned);
    let cells = |r: &Row| {
        let numbers = [r.usage.registers, r.usage.spilled(), r.usage.shared, r.occupancy];
        let [regs, spill, shared, cubes] = numbers.map(|n| n.to_string());
        [r.target.to_owned(), r.instance.clone(), regs, spill, shared, cubes]
    };
    let lines: Vec<_> = std::iter::once(head).chain(rows.iter().map(cells)).collect();
    let configs = std::iter::once(Ok("config".to_owned()))
        .chain(rows.iter().map(|r| serde_json::to_string(&r.config)));
    let mut text = String::new();
    for (line, config) in aligned(&lines).into_iter().zip(configs) {
        text += &format!("{line}  {}\n", config?);
    }
    for f in &findings {
        let config = serde_json::to_string(&f.config)?;
        text += &format!("failed: {} {} {config}: {}\n", f.target, f.instance, f.what);
    }
    let spill = rows.iter().filter(|r| r.usage.spilled() > 0).count();
    let (all, failed) = (rows.len(), findings.len());
    let new = if dump.is_some() { all } else { known.compiled() };
    text += &format!("{all} instances, {spill} of them spill, {failed} failed; {new} compiled\n");
    if tuned {
        let of_cache: Vec<_> = rows.iter().filter(|r| r.tuned).collect();
        let spill = of_cache.iter().filter(|r| r.usage.spilled() > 0).count();
        text += &format!(
            "{} instances from the shipped cache, {spill} of them spill\n",
            of_cache.len()
        );
    }
    command::print(&text)?;
    Ok(findings.is_empty())
}

/// Writes the stored results.
fn keep(file: &Path, lines: &str) -> anyhow::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    Ok(OutFile::new(file)?.write(lines.as_bytes())?)
}

/// Renders a Markdown table with one row per target and kernel.
fn summarised(rows: &[Row]) -> String {
    let mut text =
        "# Kernels compiled for cards that are not present\n\n`cargo xtask targets --tuned \
         --summary FILE` writes this table: registers per unit, instances that spill, bytes of \
         shared memory per cube, cubes that fit on one processor.\n\n| target | kernel | \
         instances | most registers | spill | most shared | fewest cubes \
         |\n|---|---|---:|---:|---:|---:|---:|\n"
            .to_owned();
    for group in rows.chunk_by(|a, b| (a.target, a.kernel) == (b.target, b.kernel)) {
        let max = |of: fn(&Row) -> u32| group.iter().map(of).max().unwrap_or(0);
        text += &format!(
            "| {} | {} | {} | {} | {} | {} | {} |\n",
            group[0].target,
            group[0].kernel,
            group.len(),
            max(|row| row.usage.registers),
            group.iter().filter(|row| row.usage.spilled() > 0).count(),
            max(|row| row.usage.shared),
            group.iter().map(|row| row.occupancy).min().unwrap_or(0),
        );
    }
    text
}

/// Progress text for standard error. On a terminal it is one line, overwritten and finally erased. Elsewhere it is one
/// line per tenth.
fn progress(done: usize, total: usize, terminal: bool) -> Option<String> {
    let text = format!("{done} of {total} instances");
    if terminal {
        return Some(if done == total { "\r\x1b[K".into() } else { format!("\r{text}") });
    }
    let tenth = |done: usize| done * 10 / total.max(1);
    (done == 0 || tenth(done) > tenth(done - 1)).then(|| text + "\n")
}

/// Aligns columns to their widest cell: two columns of text, then numbers.
fn aligned(lines: &[[String; 6]]) -> Vec<String> {
    let width = |column: usize| lines.iter().map(|l| l[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 6] = std::array::from_fn(width);
    let line = |cells: &[String; 6]| {
        let cell = |(i, text): (usize, &String)| {
            let width = widths[i];
            if i < 2 { format!("{text:<width$}") } else { format!("{text:>width$}") }
        };
        cells.iter().enumerate().map(cell).collect::<Vec<_>>().join(" ")
    };
    lines.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_a_line_or_ten() {
        let shown = |total: usize, terminal| -> Vec<_> {
            (0..=total).filter_map(|done| progress(done, total, terminal)).collect()
        };
        let lines = shown(619, false);
        assert_eq!((lines.len(), lines[0].as_str()), (11, "0 of 619 instances\n"));
        assert_eq!(lines[10], "619 of 619 instances\n");
        assert_eq!(shown(3, false).len(), 4);
        assert_eq!(shown(0, false), ["0 of 0 instances\n"]);
        assert_eq!(shown(2, true), ["\r0 of 2 instances", "\r1 of 2 instances", "\r\x1b[K"]);
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let line =
            |name: &str, regs: &str| ["rtx4090", name, regs, "0", "49152", "2"].map(str::to_owned);
        let lines =
            aligned(&[line("matmul bf16", "regs"), line("matmul bf16 epilogue=bias", "64")]);
        assert_eq!(lines[0], "rtx4090 matmul bf16               regs 0 49152 2");
        assert_eq!(lines[1], "rtx4090 matmul bf16 epilogue=bias   64 0 49152 2");
    }
}
