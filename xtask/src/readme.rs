//! `cargo xtask readme`: generates the tables of benches/RESULTS.md, and the table of speed in README.md, from committed
//! records.
//!
//! A block runs from `<!-- bench:ARCH_ID/NAME -->` to `<!-- /bench -->`, each on its own line. It shows
//! `benches/baselines/ARCH_ID/NAME.jsonl`; requests to models come last, in their own table. `NAME,NAME` shows several
//! files. `bench:ARCH_ID/NAME by precision` shows matmuls with a column per precision.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use command::OutFile;
use record::Record;
use report::fail::{check, usage};

use crate::cli::ReadmeArgs;
use crate::place::Place;

/// File with the tables.
const FILE: &str = "benches/RESULTS.md";
/// File with the table of speed, between `<!-- speed -->` and `<!-- /speed -->`.
const FRONT: &str = "README.md";
const SPEED: [&str; 2] = ["<!-- speed -->\n", "<!-- /speed -->\n"];

/// Rows of the table of speed: folder and file of records in benches/baselines, and case.
const ROWS: [(&str, &str, &str); 11] = [
    (RTX, "quick", "matmul bf16 4096x4096x4096 lhs=row rhs=col"),
    (
        RTX,
        "quick",
        "attention bf16 batch=4 causal=true head_dim=128 heads=16 kv_heads=16 seq_kv=4096 seq_q=4096",
    ),
    (
        RTX,
        "quick",
        "attention_backward bf16 batch=4 causal=true head_dim=128 heads=16 kv_heads=16 seq_kv=4096 seq_q=4096",
    ),
    (
        RTX,
        "kernels",
        "attention_decode bf16 batch=16 head_dim=128 heads=32 kv_heads=8 seq_kv=8192 seq_q=1",
    ),
    (RTX, "nf4", "nf4 bf16 1x14336x4096 block_size=64 nested=true order=tiles"),
    (RTX, "nf4", "nf4 bf16 4096x14336x4096 block_size=64 nested=true order=tiles"),
    (RTX, "int8", "int8 bf16 16x14336x4096"),
    (RTX, "models", "generate bf16 depth=512 model=llama-3-8b quant=nf4 tokens=128"),
    (VULKAN, "quick", "matmul bf16 4096x4096x4096 lhs=row rhs=row"),
    (CPU, "quick", "matmul f32 1024x1024x1024 lhs=row rhs=row"),
    (
        CPU,
        "quick",
        "attention f32 batch=1 causal=true head_dim=64 heads=4 kv_heads=4 seq_kv=256 seq_q=256",
    ),
];
const RTX: &str = "cuda-sm90-132@rtx4090";
const VULKAN: &str = "vulkan-10de-2335-nvidia.580.159.04";
const CPU: &str = "cpu-genuineintel.6.167-2";

/// Returns the name of a device in the table of speed.
fn device(arch_id: &str) -> &'static str {
    match arch_id {
        RTX => "H200 as RTX 4090",
        VULKAN => "H200, Vulkan",
        _ => "Intel CPU, 2 cores",
    }
}

const OPEN: &str = "<!-- bench:";
const CLOSE: &str = "<!-- /bench -->";
const BY_PRECISION: &str = " by precision";

pub(crate) fn run(args: &ReadmeArgs) -> Result<()> {
    let place = Place::find()?;
    let root = place.workspace()?;
    if args.check {
        return check_file(root);
    }
    for (file, (old, new)) in [(FILE, both(root)?), (FRONT, front(root)?)] {
        if old != new {
            OutFile::new(&root.join(file))?.write(new.as_bytes())?;
            eprintln!("{file}: tables regenerated");
        }
    }
    Ok(())
}

/// Fails with the differing lines if a table does not match its records.
pub(crate) fn check_file(root: &Path) -> Result<()> {
    for (file, (old, new)) in [(FILE, both(root)?), (FRONT, front(root)?)] {
        if old != new {
            return Err(check(format!(
                "{file} differs from the committed records:\n{}\nhint: run `cargo xtask readme`",
                difference(&old, &new)
            )));
        }
    }
    Ok(())
}

/// Current and regenerated contents of the README.
fn front(root: &Path) -> Result<(String, String)> {
    let old =
        fs::read_to_string(root.join(FRONT)).with_context(|| format!("cannot read {FRONT}"))?;
    let [open, close] = SPEED;
    let parts =
        old.split_once(open).and_then(|(head, rest)| Some((head, rest.split_once(close)?.1)));
    let (head, tail) = parts.with_context(|| format!("{FRONT} has no table of speed"))?;
    let mut rows = Vec::new();
    for (arch_id, name, case) in ROWS {
        let file = format!("{arch_id}/{name}");
        let record = records_of(root, &file)?.into_iter().find(|record| record.case() == case);
        rows.push((record.with_context(|| format!("{file} has no case {case}"))?, device(arch_id)));
    }
    let new = format!("{head}{open}{}\n{close}{tail}", report::speed(&rows));
    Ok((old, new))
}

/// Current and regenerated contents of the file.
fn both(root: &Path) -> Result<(String, String)> {
    let old = fs::read_to_string(root.join(FILE)).with_context(|| format!("cannot read {FILE}"))?;
    let new = regenerate(&old, |block| tables_of(root, block))?;
    Ok((old, new))
}

/// Replaces the contents of every block.
fn regenerate(text: &str, table: impl Fn(&str) -> Result<String>) -> Result<String> {
    let mut out = String::new();
    let mut lines = text.lines().enumerate();
    while let Some((i, line)) = lines.next() {
        out += line;
        out.push('\n');
        let Some(rest) = line.trim().strip_prefix(OPEN) else { continue };
        let name = rest.strip_suffix("-->").map(str::trim).with_context(|| {
            format!("{FILE} line {}: the opening comment of a bench block is not closed", i + 1)
        })?;
        let close = lines
            .by_ref()
            .map(|(_, line)| line)
            .take_while(|line| !line.trim().starts_with(OPEN))
            .find(|line| line.trim() == CLOSE);
        if close.is_none() {
            return Err(usage(
                format!("{FILE} line {}: the block bench:{name} is not closed", i + 1),
                format!("put `{CLOSE}` on a line of its own after the table"),
            ));
        }
        out += &format!("\n{}\n{CLOSE}\n", table(name)?);
    }
    Ok(out)
}

/// Renders the tables of a block, with a blank line between them.
fn tables_of(root: &Path, block: &str) -> Result<String> {
    let (files, by_precision) = match block.strip_suffix(BY_PRECISION) {
        Some(files) => (files, true),
        None => (block, false),
    };
    report::readme(&records_of(root, files)?, by_precision).ok_or_else(|| {
        usage(
            format!("{FILE}: `bench:{block}` has no rows"),
            "name files with its records, or remove the block",
        )
    })
}

/// Records of committed files of one device, `ARCH_ID/NAME,NAME`.
fn records_of(root: &Path, files: &str) -> Result<Vec<Record>> {
    let plain = |part: &str| !part.is_empty() && !part.starts_with('.');
    let parts = files.split_once('/').filter(|(device, names)| {
        plain(device) && !names.contains('/') && names.split(',').all(plain)
    });
    let Some((device, names)) = parts else {
        return Err(usage(
            format!("{FILE}: `{files}` names no committed records"),
            "write `bench:ARCH_ID/NAME` for benches/baselines/ARCH_ID/NAME.jsonl",
        ));
    };
    let mut records = Vec::new();
    for name in names.split(',') {
        let file = format!("benches/baselines/{device}/{name}.jsonl");
        let text = fs::read_to_string(root.join(&file)).map_err(|why| {
            usage(
                format!("{FILE} needs {file}, which cannot be read: {why}"),
                format!("save it with `cargo xtask bench --save {file}`, or remove the block"),
            )
        })?;
        records.extend(record::read_baseline(&text).with_context(|| file.clone())?);
    }
    Ok(records)
}

/// Lines between the common head and the common tail of two texts, in diff style.
fn difference(old: &str, new: &str) -> String {
    let (old, new): (Vec<_>, Vec<_>) = (old.lines().collect(), new.lines().collect());
    let same_head = old.iter().zip(&new).take_while(|(a, b)| a == b).count();
    let (old, new) = (&old[same_head..], &new[same_head..]);
    let same_tail = old.iter().rev().zip(new.iter().rev()).take_while(|(a, b)| a == b).count();
    let minus = old[..old.len() - same_tail].iter().map(|line| format!("- {line}\n"));
    let plus = new[..new.len() - same_tail].iter().map(|line| format!("+ {line}\n"));
    format!("from line {}:\n{}", same_head + 1, minus.chain(plus).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_block(inside: &str) -> String {
        format!("# Title\n\n<!-- bench:cuda-x/quick -->\n{inside}<!-- /bench -->\n\nEnd.\n")
    }

    fn named(name: &str) -> Result<String> {
        Ok(format!("| {name} |\n"))
    }

    #[test]
    fn a_block_is_replaced_and_the_rest_is_kept() {
        let new = regenerate(&with_block("old\ntable\n"), named).unwrap();
        assert_eq!(new, with_block("\n| cuda-x/quick |\n\n"));
        assert_eq!(regenerate(&new, named).unwrap(), new, "a second run changes nothing");
    }

    #[test]
    fn a_text_without_blocks_is_kept() {
        assert_eq!(regenerate("# Title\n\ntext\n", named).unwrap(), "# Title\n\ntext\n");
    }

    #[test]
    fn an_open_block_does_not_swallow_what_follows() {
        let open = "<!-- bench:a/b -->\ntext\n";
        assert!(regenerate(open, named).unwrap_err().to_string().contains("not closed"));
        let two = format!("{open}{}", with_block(""));
        assert!(regenerate(&two, named).unwrap_err().to_string().contains("line 1"));
    }

    #[test]
    fn a_name_cannot_leave_the_folder_of_baselines() {
        let dir = tempfile::tempdir().unwrap();
        for bad in ["x", "../x", "a/..", "a/b/c", "/etc/passwd", "a/b,../c", "a/b,", "a/b,.c"] {
            let error = tables_of(dir.path(), bad).unwrap_err();
            assert!(error.to_string().contains("names no committed"), "{bad}: {error}");
        }
        let error = tables_of(dir.path(), "a/b").unwrap_err();
        assert!(error.to_string().contains("cannot be read"), "{error}");
    }

    fn repository() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
    }

    #[test]
    fn the_check_shows_what_differs() {
        let dir = tempfile::tempdir().unwrap();
        let [readme, folder] = [FILE, "benches/baselines/cuda-x"].map(|p| dir.path().join(p));
        fs::create_dir_all(&folder).unwrap();
        let quick = "benches/baselines/cpu-genuineintel.6.167-2/quick.jsonl";
        fs::copy(repository().join(quick), folder.join("quick.jsonl")).unwrap();
        fs::write(&readme, with_block("")).unwrap();

        fs::copy(repository().join(FRONT), dir.path().join(FRONT)).unwrap();
        for (arch_id, name, _) in ROWS {
            let file = format!("benches/baselines/{arch_id}/{name}.jsonl");
            fs::create_dir_all(dir.path().join(&file).parent().unwrap()).unwrap();
            fs::copy(repository().join(&file), dir.path().join(&file)).unwrap();
        }

        let error = check_file(dir.path()).unwrap_err().to_string();
        assert!(error.contains("+ | matmul f32 512x512x512"), "{error}");
        let (_, new) = both(dir.path()).unwrap();
        fs::write(&readme, new).unwrap();
        check_file(dir.path()).unwrap();

        let typed = fs::read_to_string(&readme).unwrap().replace("512x512x512", "512x512x513");
        fs::write(&readme, typed).unwrap();
        let error = check_file(dir.path()).unwrap_err();
        assert!(error.to_string().contains("- | matmul"), "{error}");
        assert_eq!(report::fail::report(&error), 1);
    }

    #[test]
    fn files_stand_together_in_one_block() {
        let tables = |names: &str| {
            let block = format!("cuda-sm90-132@rtx4090/{names} by precision");
            tables_of(repository(), &block)
        };
        let table = tables("kernels,int8,nf4").unwrap();
        assert!(table.starts_with("| product | f32 ms | tf32 ms |"), "{table}");
        let error = tables("rope").unwrap_err();
        assert!(error.to_string().contains("has no rows"), "{error}");
    }

    #[test]
    fn products_on_cuda_are_recorded_beside_torch() {
        let file = repository().join("benches/baselines/cuda-sm90-132@rtx4090/kernels.jsonl");
        let lines = fs::read_to_string(&file).unwrap();
        let records: Vec<Record> =
            lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        // Matmuls with a norm are left out: one kernel of ours, but two of torch's.
        let products =
            records.iter().filter(|r| r.op == "matmul" && !r.params.contains_key("norm"));
        let alone: Vec<_> = products.clone().filter(|r| !r.peers.contains_key("torch")).collect();
        assert!(products.count() > 50 && alone.is_empty(), "without torch: {alone:#?}");
    }
}
