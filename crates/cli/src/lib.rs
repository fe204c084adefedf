//! The `flashover` command as a library. `flashover-bench` contains it, so that a bundle has the backends only once.

mod bench_command;
mod compare_command;
mod faults;
mod generate_command;
mod grpo_args;
mod grpo_command;
mod grpo_speed;
mod interrupt;
mod logits_command;
mod model_args;
mod monitor_command;
mod onnx_command;
mod op_command;
mod panics;
mod plan_command;
mod profile_command;
mod prompt_args;
mod quantize_command;
mod tokenize_command;
mod train_args;
mod train_command;
mod train_log;
mod train_saves;
mod train_sizes;
mod train_speed;
mod unet_command;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use clap::{CommandFactory, Parser, Subcommand};
use flashover::device::report::{KernelCache, Report};
use flashover::quantize::QuantizeError;
use report::CompareArgs;

/// Version with the commit of the build, which records of measurements name.
const VERSION: &str =
    concat!(env!("CARGO_PKG_VERSION"), " (", env!("FLASHOVER_COMMIT"), env!("FLASHOVER_MARK"), ")");

/// Layout of `flashover --help`, whose commands stand in [`GROUPS`].
const TEMPLATE: &str = "\
{about}

{usage-heading} {usage}

{before-help}Options:
{options}";

const GROUPS: [(&str, &[&str]); 5] = [
    ("Run a model", &["generate", "chat", "tokenize", "logits", "unet", "onnx"]),
    ("Train and convert", &["train", "grpo", "quantize"]),
    ("Measure and plan", &["bench", "profile", "compare", "plan"]),
    ("This machine", &["doctor", "monitor", "op"]),
    ("Shell", &["completions", "man", "help"]),
];

/// Lists the commands by group.
fn groups() -> String {
    let commands = Command::augment_subcommands(clap::Command::new("flashover"));
    let mut text = String::new();
    for (title, names) in GROUPS {
        text += &format!("{title}:\n");
        for name in names {
            let about = commands.find_subcommand(name).and_then(clap::Command::get_about);
            let about = about.map_or_else(|| "Print help".to_owned(), ToString::to_string);
            text += &format!("  {name:<12} {about}\n");
        }
        text.push('\n');
    }
    text
}

/// Runs, fine-tunes and measures language models on GPUs and CPUs.
#[derive(Parser)]
#[command(name = "flashover", version = VERSION, about, help_template = TEMPLATE, before_help = groups())]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the devices, which one is the default and why, and what is missing
    ///
    /// Example: flashover doctor --require-gpu
    Doctor {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Exit with 2 if no GPU is available
        #[arg(long)]
        require_gpu: bool,
    },
    /// Show temperature, power, clocks, memory and load of every device, with advice
    ///
    /// Example: flashover monitor --interval 5 --csv
    Monitor(monitor_command::Args),
    /// Run one kernel on tensors of a safetensors file
    ///
    /// Example: flashover op matmul --input in.safetensors --output out.safetensors --backend cpu
    Op(op_command::Args),
    /// Quantise a model's layers to 4 or 8 bits, in bitsandbytes' file format
    ///
    /// Example: flashover quantize --model llama --output llama-nf4 --report
    Quantize(quantize_command::Args),
    /// Generate text from a prompt
    ///
    /// Example: flashover generate --model models/demo --prompt "Once upon a time"
    Generate(generate_command::GenerateArgs),
    /// Chat with a model through its chat template, one line per message
    ///
    /// Example: flashover chat --model llama-instruct --quant nf4
    Chat(generate_command::ChatArgs),
    /// Measure prefill and decode speed, with the tests of llama-bench
    ///
    /// Example: flashover bench --shape llama-3-8b --quant nf4 -p 512 -n 128 --batch 1,16
    Bench(bench_command::Args),
    /// Compare one model across backends and precisions: tokens, logits, perplexity, speed
    ///
    /// Example: flashover compare --model models/demo --backend cuda,vulkan,cpu --quant none,nf4
    #[command(args_override_self = true)]
    Compare(CompareArgs),
    /// Print the memory that a model needs, its largest batch and context, before loading it
    ///
    /// Example: flashover plan --shape llama-3-8b --quant nf4 --batch 4 --context 4096 --profile rtx4080
    #[command(mut_arg("profile", |arg| arg.help(plan_command::PROFILE)))]
    Plan(plan_command::Args),
    /// Print a model's time by operator and by layer
    ///
    /// Example: flashover profile --model models/demo -p 128 -n 16 --trace trace.json
    Profile(profile_command::Args),
    /// Train a LoRA adapter, or all weights of a model (--full, --from-scratch)
    ///
    /// Example: flashover train --model models/demo --data stories.txt --output adapter --steps 50
    #[command(mut_arg("kv_cache", |arg| arg.help(train_args::KV_CACHE)), mut_group("subject", |group| group.required(false)))]
    Train(Box<train_command::Args>),
    /// Train a model on rewards of its own completions (GRPO)
    ///
    /// Example: flashover grpo --model models/demo --data prompts.jsonl --reward exact --output policy --steps 50
    #[command(
        mut_arg("learning_rate", |arg| arg.help(grpo_args::LEARNING_RATE)),
        mut_group("subject", |group| group.required(false))
    )]
    Grpo(Box<grpo_args::Args>),
    /// Write the logits of every position to a file
    ///
    /// Example: flashover logits --model models/demo --tokens 1,2,3 --output logits.safetensors
    Logits(logits_command::Args),
    /// Convert a text to token ids, or ids to text
    ///
    /// Example: flashover tokenize --model models/demo --prompt "Once upon a time"
    Tokenize(tokenize_command::Args),
    /// Run, measure or plan a U-Net of diffusers, frame by frame
    ///
    /// Example: flashover unet bench --shape unet-38m,sd15 --batch 1,8 --dtype f16
    Unet(unet_command::Args),
    /// Run, measure or inspect an ONNX graph
    ///
    /// Example: flashover onnx bench model.onnx --batch 1,32 --dtype f16
    Onnx(onnx_command::Args),
    /// Print a script that completes commands and options in a shell
    ///
    /// Example: flashover completions bash > ~/.local/share/bash-completion/completions/flashover
    Completions {
        /// Shell to complete in
        shell: clap_complete::Shell,
    },
    /// Write manual pages of all commands
    ///
    /// Example: flashover man --output ~/.local/share/man/man1
    Man {
        /// Folder for flashover.1 and a page per command
        #[arg(long, short, value_name = "DIR")]
        output: PathBuf,
    },
}

/// Returns the commit of the build, with `-dirty` if there were changes.
fn commit() -> String {
    let dirty = env!("FLASHOVER_DIRTY") == "true";
    format!("{}{}", env!("FLASHOVER_COMMIT"), if dirty { "-dirty" } else { "" })
}

/// Parses the command line of this process and runs it. Returns exit code 0 for success, 2 for an error with a hint, 1
/// if `compare` found a backend that fails, and 128 plus the signal's number if a signal ended the work.
pub fn main() -> ExitCode {
    // Only our own warnings concern the user; those of the runtimes do not.
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
        Command::Op(args) => op_command::run(&args),
        Command::Quantize(args) => quantize_command::run(&args),
        Command::Generate(args) => generate_command::generate(&args),
        Command::Chat(args) => generate_command::chat(&args),
        Command::Bench(args) => bench_command::run(&args),
        Command::Compare(args) => compare_command::run(&args),
        Command::Plan(args) => plan_command::run(&args),
        Command::Profile(args) => profile_command::run(&args),
        Command::Train(args) => train_command::run(&args),
        Command::Grpo(args) => grpo_command::run(&args),
        Command::Logits(args) => logits_command::run(&args),
        Command::Tokenize(args) => tokenize_command::run(&args),
        Command::Unet(args) => unet_command::run(&args),
        Command::Onnx(args) => onnx_command::run(&args),
        Command::Completions { shell } => completions(shell),
        Command::Man { output } => man(&output),
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

fn completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "flashover", &mut script);
    Ok(command::print(&String::from_utf8(script)?)?)
}

fn man(folder: &Path) -> anyhow::Result<()> {
    let written = std::fs::create_dir_all(folder);
    let written = written.and_then(|()| clap_mangen::generate_to(Cli::command(), folder));
    written.map_err(|why| {
        let folder = folder.display();
        anyhow!("cannot write into {folder}: {why}\nhint: choose a writable folder")
    })
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

/// Formats the report for people.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_in_one_group() {
        let mut grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        grouped.sort_unstable();
        let mut command = Cli::command();
        command.build();
        let mut all: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
        all.sort_unstable();
        assert_eq!(grouped, all);
    }

    /// Every option has a description, and the same letter means the same everywhere.
    #[test]
    fn options_are_described_and_letters_mean_one_thing() {
        let command = Cli::command();
        let mut letters = std::collections::BTreeMap::new();
        for own in command.get_subcommands() {
            for arg in own.get_arguments() {
                assert!(arg.get_help().is_some(), "{} {}", own.get_name(), arg.get_id());
                if let Some(letter) = arg.get_short() {
                    let name = arg.get_long().unwrap_or_default();
                    assert_eq!(*letters.entry(letter).or_insert(name), name, "{}", own.get_name());
                }
            }
            let about = own.get_long_about().map(ToString::to_string).unwrap_or_default();
            let own = own.get_name();
            assert!(own == "help" || about.contains("\n\nExample: flashover "), "{own}: {about}");
        }
    }

    #[test]
    fn help_of_all_commands() {
        let mut command = Cli::command().term_width(100);
        let mut text = command.render_help().to_string();
        for own in command.get_subcommands_mut() {
            let name = own.get_name().to_owned();
            text += &format!("\n--- {name}\n{}", own.render_help());
            for nested in own.get_subcommands_mut().filter(|nested| nested.get_name() != "help") {
                let own = nested.get_name().to_owned();
                text += &format!("\n--- {name} {own}\n{}", nested.render_help());
            }
        }
        insta::assert_snapshot!(text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n"));
    }
}
