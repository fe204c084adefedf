//! The `flashover` command, as a library: the program that measures holds it too, so that a bundle carries the
//! back ends once.

mod bench_command;
mod compare_command;
mod faults;
mod generate_command;
mod interrupt;
mod logits_command;
mod model_args;
mod monitor_command;
mod panics;
mod plan_command;
mod profile_command;
mod quantize_command;
mod tokenize_command;
mod train_command;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use clap::{Parser, Subcommand};
use command::OutFile;
use flashover::device::DType;
use flashover::device::report::{KernelCache, Report};
use flashover::host::{HostTensor, run_op};
use flashover::quantize::QuantizeError;
use flashover::{Backend, Device, Policy};
use report::CompareArgs;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

/// With the commit that it was built of, so that what a script measured says of what.
const VERSION: &str =
    concat!(env!("CARGO_PKG_VERSION"), " (", env!("FLASHOVER_COMMIT"), env!("FLASHOVER_MARK"), ")");

/// Runs and inspects Flashover's kernels on this machine.
#[derive(Parser)]
#[command(name = "flashover", version = VERSION, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print every device, which one is chosen and why, what is missing and how to get it
    Doctor {
        #[arg(long)]
        json: bool,
        /// Exit with 2 unless a GPU answers
        #[arg(long)]
        require_gpu: bool,
    },
    /// Show heat, power, clocks, memory and load of every device, and what to do about it
    ///
    /// Example: flashover monitor --interval 5 --csv
    Monitor(monitor_command::Args),
    /// Run one kernel on tensors of a safetensors file
    ///
    /// Example: flashover op matmul --input in.safetensors --output out.safetensors --backend cpu
    Op {
        /// matmul: takes lhs, rhs and optionally bias, gives out; attention: takes q, k, v and
        /// optionally bias, gives out and lse; with dout, the gradient of out, also dq, dk and dv
        name: String,
        #[arg(long)]
        input: PathBuf,
        #[arg(long)]
        output: PathBuf,
        /// cuda, vulkan, webgpu or cpu
        #[arg(long)]
        backend: Backend,
        /// Restrict the device to a recorded profile, such as rtx4090
        #[arg(long)]
        profile: Option<String>,
        /// Settings of the op, such as rhs=col, tf32=true or causal=true
        #[arg(long = "set", value_parser = pair)]
        settings: Vec<(String, String)>,
        /// What an unknown shape gets: frozen, default or measure
        #[arg(long, default_value = "default")]
        policy: Policy,
    },
    /// Write a Hugging Face model with the matrices of its layers in 4 or 8 bits, as bitsandbytes has them
    ///
    /// Example: flashover quantize --model llama --output llama-nf4 --report
    Quantize(quantize_command::Args),
    /// Go on from a text with a model
    ///
    /// Example: flashover generate --model models/demo --prompt "Once upon a time"
    Generate(generate_command::GenerateArgs),
    /// Talk with a model that has a chat template, a line a message
    ///
    /// Example: flashover chat --model llama-instruct --quant nf4
    Chat(generate_command::ChatArgs),
    /// Measure how fast a model passes prompts and generates, as llama-bench does
    ///
    /// Example: flashover bench --shape llama-3-8b --quant nf4 -p 512 -n 128 --batch 1,16
    Bench(bench_command::Args),
    /// Run one model on several back ends, in several precisions: tokens, logits, perplexity and speed side by side
    ///
    /// Example: flashover compare --model models/demo --backend cuda,vulkan,cpu --quant none,nf4
    #[command(args_override_self = true)]
    Compare(CompareArgs),
    /// Say what a model takes of a device's memory, and the largest batch and context, without loading it
    ///
    /// Example: flashover plan --shape llama-3-8b --quant nf4 --batch 4 --context 4096 --profile rtx4080
    Plan(plan_command::Args),
    /// Print where the time of a model goes, operator by operator and layer by layer
    ///
    /// Example: flashover profile --model models/demo -p 128 -n 16 --trace trace.json
    Profile(profile_command::Args),
    /// Learn an adapter of a model from examples, the model itself as it is or in 4 or 8 bits
    ///
    /// Example: flashover train --model models/demo --data stories.txt --output adapter --steps 50
    Train(train_command::Args),
    /// Write the logits of every position, to compare with another engine
    ///
    /// Example: flashover logits --model models/demo --tokens 1,2,3 --output logits.safetensors
    Logits(logits_command::Args),
    /// Print the token ids of a text, or what ids stand for
    ///
    /// Example: flashover tokenize --model models/demo --prompt "Once upon a time"
    Tokenize(tokenize_command::Args),
}

/// What this program was built from, `-dirty` where that was not committed.
fn commit() -> String {
    let dirty = env!("FLASHOVER_DIRTY") == "true";
    format!("{}{}", env!("FLASHOVER_COMMIT"), if dirty { "-dirty" } else { "" })
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text
        .split_once('=')
        .ok_or("it is not of the form key=value\nhint: such as rhs=col or tf32=true")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Parses the command line of this process and runs it. The exit code is 0 when that went well, 2 after an error with a
/// hint, 1 when `compare` found a back end that fails, and that of a shell after a signal that ended the work.
pub fn main() -> ExitCode {
    // Runtimes warn of much that is theirs alone; ours are for the caller.
    env_logger::Builder::new()
        .filter_level(log::LevelFilter::Error)
        .filter_module("flashover", log::LevelFilter::Warn)
        .filter_module("models", log::LevelFilter::Warn)
        .init();
    panics::watch();
    let command = command::parse::<Cli>().command;
    let outcome = faults::name_signals().and_then(|()| match command {
        Command::Doctor { json, require_gpu } => doctor(json, require_gpu),
        Command::Monitor(args) => monitor_command::run(&args),
        Command::Op { name, input, output, backend, profile, settings, policy } => {
            op(&name, &input, &output, backend, profile.as_deref(), &settings, policy)
        }
        Command::Quantize(args) => quantize_command::run(&args),
        Command::Generate(args) => generate_command::generate(&args),
        Command::Chat(args) => generate_command::chat(&args),
        Command::Bench(args) => bench_command::run(&args),
        Command::Compare(args) => compare_command::run(&args),
        Command::Plan(args) => plan_command::run(&args),
        Command::Profile(args) => profile_command::run(&args),
        Command::Train(args) => train_command::run(&args),
        Command::Logits(args) => logits_command::run(&args),
        Command::Tokenize(args) => tokenize_command::run(&args),
    });
    match outcome.and_then(|()| panics::check()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e)
            if e.is::<interrupt::Stopped>()
                || matches!(e.downcast_ref::<QuantizeError>(), Some(QuantizeError::Stopped)) =>
        {
            command::note!("{e}");
            ExitCode::from(interrupt::status())
        }
        Err(e) => ExitCode::from(report::fail::report(&e)),
    }
}

fn doctor(json: bool, require_gpu: bool) -> anyhow::Result<()> {
    let report = panics::expected(flashover::device::report::survey);
    command::print(&if json {
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        shown(&report)
    })?;
    if require_gpu && !report.has_gpu() {
        bail!(
            "no GPU is available\nhint: install the drivers and libraries listed under `missing`"
        );
    }
    Ok(())
}

/// The report as people read it.
fn shown(report: &Report) -> String {
    let gib = |b: Option<u64>| {
        b.map_or_else(String::new, |b| format!(", {:.1} GiB", b as f64 / 1073741824.0))
    };
    let mut out = "devices\n".to_owned();
    for d in &report.devices {
        let kind = if d.software { " (software)" } else { "" };
        out += &format!("  {:<7} {}{kind}{}\n", d.backend, d.name, gib(d.memory_bytes));
        out += &format!("          {}\n", d.arch_id);
        for (name, value) in d.versions.iter().chain(&d.clocks) {
            out += &format!("          {name}: {value}\n");
        }
    }
    match &report.chosen {
        Some(c) => out += &format!("chosen\n  {}: {}\n", c.backend, c.why),
        None => out += "chosen\n  nothing: no backend is available\n",
    }
    if !report.missing.is_empty() {
        out += "missing\n";
    }
    for m in &report.missing {
        out += &format!("  {:<7} {}\n          hint: {}\n", m.needed_for, m.what, m.how);
    }
    if let Some(KernelCache { folder, bytes }) = &report.kernel_cache {
        let mib = *bytes as f64 / 1048576.0;
        out += &format!("compiled kernels\n  {}, {mib:.1} MiB\n", folder.display());
    }
    out
}

fn op(
    name: &str,
    input: &Path,
    output: &Path,
    backend: Backend,
    profile: Option<&str>,
    settings: &[(String, String)],
    policy: Policy,
) -> anyhow::Result<()> {
    let target = OutFile::new(output)?;
    if OutFile::new(input).is_ok_and(|input| input.is_same(&target)) {
        bail!("{} is read and written\nhint: give --output another name", output.display());
    }
    let inputs = read_tensors(input)?;
    let mut device = Device::open(backend)?;
    if let Some(profile) = profile {
        device = device.restrict(profile)?;
    }
    let outputs = run_op(name, &device, &inputs, settings, policy)?;
    Ok(target.write(&encoded(&outputs)?)?)
}

fn read_tensors(path: &Path) -> anyhow::Result<BTreeMap<String, HostTensor>> {
    let shown = path.display();
    let hint = "--input names a safetensors file";
    let about = |e| anyhow!("cannot read {shown}: {e}\nhint: {hint}");
    // A pipe or a device may have no end.
    if !std::fs::metadata(path).map_err(about)?.is_file() {
        bail!("{shown} is not a file\nhint: {hint}");
    }
    let bytes = std::fs::read(path).map_err(about)?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| {
        anyhow!(
            "{shown} is no safetensors file: {e}\nhint: write one with `save_file` of the \
             safetensors package"
        )
    })?;
    file.tensors()
        .into_iter()
        .map(|(name, view)| {
            let dtype = match view.dtype() {
                Dtype::F32 => DType::F32,
                Dtype::F16 => DType::F16,
                Dtype::BF16 => DType::Bf16,
                Dtype::I8 => DType::I8,
                Dtype::U8 => DType::U8,
                Dtype::I32 => DType::I32,
                other => bail!("tensor `{name}` is {other:?}\nhint: f32, f16 or bf16"),
            };
            Ok((name, HostTensor::new(dtype, view.shape(), view.data().to_vec())?))
        })
        .collect()
}

/// The tensors as a safetensors file.
fn encoded(tensors: &BTreeMap<String, HostTensor>) -> anyhow::Result<Vec<u8>> {
    let views: Vec<(&str, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, t)| {
            let dtype = match t.dtype() {
                DType::F32 | DType::Tf32 => Dtype::F32,
                DType::F16 => Dtype::F16,
                DType::Bf16 => Dtype::BF16,
                DType::I8 => Dtype::I8,
                DType::U8 => Dtype::U8,
                DType::I32 => Dtype::I32,
                other => bail!("output `{name}` is {other}, which no op computes"),
            };
            Ok((name.as_str(), TensorView::new(dtype, t.shape().to_vec(), t.bytes())?))
        })
        .collect::<anyhow::Result<_>>()?;
    Ok(safetensors::serialize(views, None)?)
}
