//! The command line: what may be typed, nothing of what it does.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::devices::Selection;
use crate::sanitize::Sanitizer;

/// The GPUs of `crates/arch/profiles`.
const PROFILES: [&str; 4] = ["h200", "rtx4080", "rtx4090", "rtx5090"];

#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Builds, checks, measures and packs Flashover, and sets up what that needs",
    after_help = "Example:\n  cargo xtask bench\n\n\
                  Exit codes: 0 done, 1 a check failed or a case got slower, 2 bad input."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure every kernel on the devices of this machine and print the table
    Bench(BenchArgs),
    /// Everything that CI runs: format, rules, lints, tests, targets, verification
    Test(TestArgs),
    /// Check every kernel over its edge shapes against the reference
    Verify(VerifyArgs),
    /// Run one model on several backends, in several precisions: tokens, logits, perplexity and speed side by side
    Compare(CompareArgs),
    /// Print every device, what would be chosen and why, and what is missing
    #[command(after_help = "Example:\n  cargo xtask doctor --json")]
    Doctor(Rest),
    /// Show, run or merge tuned configs
    #[command(after_help = "Example:\n  cargo xtask tune show")]
    Tune(Rest),
    /// Compile every kernel for GPUs that are not here and report registers, spills and memory
    #[command(
        after_help = "Examples:\n  cargo xtask targets --json\n  cargo xtask targets --tuned --filter nf4"
    )]
    Targets(Rest),
    /// Install or fetch what the other commands need; they also do so by themselves
    #[command(after_help = "Example:\n  cargo xtask setup")]
    Setup,
    /// Pack the programs and a script that verifies and measures on a machine without Rust
    Bundle(BundleArgs),
    /// Regenerate the tables in README.md from the committed records
    Readme(ReadmeArgs),
    /// Check the rules of the project that no compiler checks
    #[command(after_help = "Example:\n  cargo xtask tidy")]
    Tidy,
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Examples:\n  cargo xtask bench\n  \
                  cargo xtask bench --suite kernels --backend cuda,vulkan --save now.jsonl\n  \
                  cargo xtask bench --suite kernels --profile rtx4090 \\\n      \
                  --compare benches/baselines/cuda-sm90-132@rtx4090/kernels.jsonl"
)]
pub(crate) struct BenchArgs {
    /// Which cases run
    #[arg(long, value_enum, default_value_t = Suite::Quick)]
    pub(crate) suite: Suite,
    /// `auto`, `all`, or a list out of cuda, vulkan, webgpu, cpu
    #[arg(long, default_value = "auto", value_name = "LIST")]
    pub(crate) backend: Selection,
    /// Restrict the device to what this GPU has
    #[arg(long, value_parser = PROFILES)]
    pub(crate) profile: Option<String>,
    /// Run the cases whose name contains this text
    #[arg(long, value_name = "TEXT")]
    pub(crate) filter: Option<String>,
    /// What to do about a shape that was never tuned
    #[arg(long, value_enum)]
    pub(crate) policy: Option<Policy>,
    /// Refuse to run without a GPU
    #[arg(long)]
    pub(crate) require_gpu: bool,
    /// Also measure torch on CUDA, with this Python, which needs torch, triton and CUDA
    #[arg(long, value_name = "PYTHON")]
    pub(crate) torch: Option<String>,
    /// Write the records to this file, one JSON line each
    #[arg(long, value_name = "FILE")]
    pub(crate) save: Option<PathBuf>,
    /// Compare with records saved before; exit 1 when a case got slower beyond noise
    #[arg(long, value_name = "FILE")]
    pub(crate) compare: Option<PathBuf>,
    /// Slowdown in percent that `--compare` lets pass
    #[arg(long, value_name = "PCT", default_value_t = 5.0, value_parser = percent)]
    #[arg(allow_negative_numbers = true, requires = "compare")]
    pub(crate) threshold: f64,
    /// How the result is printed on standard output
    #[arg(long, value_enum, default_value_t = Format::Md)]
    pub(crate) format: Format,
    /// Also write one self-contained page with charts to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Refuse what would be refused, and measure nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  cargo xtask test\n  cargo xtask test --fast")]
pub(crate) struct TestArgs {
    /// Only format, rules, lints and unit tests
    #[arg(long)]
    pub(crate) fast: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  cargo xtask verify --backend cuda,cpu --filter matmul\n  \
                  cargo xtask verify --backend cuda --sanitizer memcheck --jobs 8")]
pub(crate) struct VerifyArgs {
    /// `auto`, `all`, or a list out of cuda, vulkan, webgpu, cpu
    #[arg(long, default_value = "auto", value_name = "LIST")]
    pub(crate) backend: Selection,
    /// Check the cases whose name contains this text
    #[arg(long, value_name = "TEXT")]
    pub(crate) filter: Option<String>,
    /// Restrict the device to what this GPU has
    #[arg(long, value_parser = PROFILES)]
    pub(crate) profile: Option<String>,
    /// Also check every candidate config, not only the default and the measured ones
    #[arg(long)]
    pub(crate) configs: bool,
    /// Also take all memory of the card for a moment, to see that a model lives on
    #[arg(long)]
    pub(crate) exhaust: bool,
    /// Run below compute-sanitizer, which needs CUDA and many times as long
    #[arg(long, value_name = "TOOL")]
    pub(crate) sanitizer: Option<Sanitizer>,
    /// Processes of each backend, which share its checks: most of the time goes to compilers and references, on a few cores each
    #[arg(long, default_value_t = NonZeroUsize::MIN, value_name = "N")]
    pub(crate) jobs: NonZeroUsize,
    /// Write a line for each kernel and backend, as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) save: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Examples:\n  cargo xtask compare --model models/demo --text README.md\n  \
                  cargo xtask compare --model DIR --backend cuda,vulkan,cpu --quant nf4\n  \
                  cargo xtask compare --model DIR --backend cuda --quant none,int8,nf4 --kv-cache float,int8\n\n\
                  Exit codes: 0 every backend answers, 1 one fails or refuses every precision, 2 bad input. Tokens\n\
                  that differ fail nothing, and a precision that is refused fails no backend that answers in another."
)]
pub(crate) struct CompareArgs {
    /// Folder with config.json and safetensors, as Hugging Face has it
    #[arg(long, short, value_name = "DIR")]
    pub(crate) model: PathBuf,
    /// `auto`, `all`, or a list out of cuda, vulkan, webgpu, cpu: each is asked for every precision, and all are
    /// compared with the first that answers
    #[arg(long, default_value = "all", value_name = "LIST")]
    pub(crate) backend: Selection,
    /// Restrict the CUDA device to what this GPU has
    #[arg(long, value_parser = PROFILES)]
    pub(crate) profile: Option<String>,
    /// What is computed in; without it f32 on a CPU, and elsewhere what the files have
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<Dtype>,
    /// How the matrices of the layers are quantised at load: a list out of none, nf4, int8
    #[arg(long, default_value = "none", value_name = "LIST")]
    pub(crate) quant: List<Quant>,
    /// How keys and values are held, as they are computed or in 8 bits: a list out of float, int8
    #[arg(long, default_value = "float", value_name = "LIST")]
    pub(crate) kv_cache: List<KvCache>,
    /// The text to go on from [default: Once upon a time]
    #[arg(long, value_name = "TEXT", conflicts_with = "tokens")]
    pub(crate) prompt: Option<String>,
    /// Token ids to go on from
    #[arg(long, value_name = "IDS", value_delimiter = ',', value_parser = token)]
    pub(crate) tokens: Option<Vec<u32>>,
    /// Greedy tokens that each generates
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_new_tokens: u32,
    /// Also take the perplexity of this text
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// How the result is printed on standard output
    #[arg(long, value_enum, default_value_t = CompareFormat::Md)]
    pub(crate) format: CompareFormat,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  cargo xtask bundle --out flashover-bundle")]
pub(crate) struct BundleArgs {
    /// Folder to write; made when it is missing
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  cargo xtask readme --check")]
pub(crate) struct ReadmeArgs {
    /// Change nothing; exit 1 and show what differs
    #[arg(long)]
    pub(crate) check: bool,
}

/// Arguments that go to the program unread.
#[derive(Debug, Args)]
pub(crate) struct Rest {
    /// Passed on as they are; `-- --help` lists what there is
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    pub(crate) args: Vec<String>,
}

/// How much a bench runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Suite {
    /// A few cases of each kernel, in under two minutes
    Quick,
    /// Every case of our kernels
    Kernels,
    /// Everything there is
    All,
    /// Products in every precision, and requests to models in each with latency and memory
    Documents,
}

/// What a shape without a tuned config gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Policy {
    /// It fails
    Frozen,
    /// It runs with the default config
    Default,
    /// It is tuned first
    Measure,
}

/// What a model computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    F32,
    F16,
    Bf16,
}

/// How weights are quantised at load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Quant {
    /// They stay as the files have them.
    None,
    Nf4,
    Int8,
}

/// How keys and values are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvCache {
    /// As they are computed
    Float,
    /// In 8 bits, with a scale a position and head
    Int8,
}

/// Values of an option in the order typed, none of them twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct List<T>(pub(crate) Vec<T>);

impl<T: ValueEnum + PartialEq> FromStr for List<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut list = Vec::new();
        for name in text.split(',').map(str::trim) {
            let refused = |why| {
                format!("`{name}` {why}\nhint: a list out of {}, each at most once", words::<T>())
            };
            let value =
                <T as ValueEnum>::from_str(name, false).map_err(|_| refused("is not known"))?;
            if list.contains(&value) {
                return Err(refused("is there twice"));
            }
            list.push(value);
        }
        Ok(Self(list))
    }
}

/// How a comparison is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompareFormat {
    /// A table: drawn on a terminal, Markdown elsewhere
    Md,
    /// One object, with every token
    Json,
}

/// How a bench is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Tables: drawn on a terminal, Markdown elsewhere
    Md,
    /// One object with the cards and the records
    Json,
    /// One line per record
    Csv,
}

/// The word that stands for a value on the command line.
pub(crate) fn word(value: impl ValueEnum) -> String {
    value.to_possible_value().expect("no value is hidden").get_name().to_owned()
}

/// All words of an option.
pub(crate) fn words<T: ValueEnum>() -> String {
    T::value_variants().iter().cloned().map(word).collect::<Vec<_>>().join(", ")
}

fn percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        Ok(value) if value < 0.0 => Err("it is below 0\nhint: such as 5, or 2.5".into()),
        _ => Err("it is no percentage\nhint: such as 5, or 2.5".into()),
    }
}

fn token(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| "it is no token id\nhint: ids such as 1,2,3".into())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn bench(args: &[&str]) -> Result<BenchArgs, clap::Error> {
        let all = ["xtask", "bench"].iter().chain(args);
        Cli::try_parse_from(all).map(|cli| match cli.command {
            Command::Bench(args) => args,
            other => panic!("parsed as {other:?}"),
        })
    }

    #[test]
    fn every_command_has_an_example() {
        let cli = Cli::command();
        cli.clone().debug_assert();
        for command in cli.get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let name = command.get_name();
            assert!(help.contains(&format!("cargo xtask {name}")), "{name}: {help}");
        }
    }

    #[test]
    fn the_help_of_every_command() {
        let mut cli = Cli::command().term_width(100);
        cli.build();
        let pages = cli.get_subcommands_mut().filter(|command| command.get_name() != "help");
        let all: Vec<_> = pages.map(|command| command.render_long_help().to_string()).collect();
        insta::assert_snapshot!(all.join("\n----\n\n"));
    }

    #[test]
    fn bench_has_honest_defaults() {
        let args = bench(&[]).unwrap();
        assert_eq!((args.suite, args.format, args.threshold), (Suite::Quick, Format::Md, 5.0));
        assert_eq!(args.backend, Selection::Auto);
    }

    #[test]
    fn the_profiles_are_those_that_are_recorded() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/arch/profiles");
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let mut names: Vec<_> =
            files.map(|file| file.file_stem().unwrap().to_string_lossy().into_owned()).collect();
        names.sort();
        assert_eq!(names, PROFILES);
    }

    #[test]
    fn what_the_examples_name_is_there() {
        let help = Cli::command().find_subcommand("bench").unwrap().get_after_help().cloned();
        let help = help.unwrap().to_string();
        let named: Vec<_> =
            help.split_whitespace().filter(|word| word.contains("/baselines/")).collect();
        assert_eq!(named.len(), 1);
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        assert!(std::path::Path::new(root).join(named[0]).is_file(), "{named:?}");
    }

    #[test]
    fn a_later_option_replaces_an_earlier_one() {
        let args = bench(&["--suite", "kernels", "--suite", "quick"]).unwrap();
        assert_eq!(args.suite, Suite::Quick);
    }

    #[test]
    fn bad_input_exits_with_2() {
        for bad in [
            &["--suite", "fast"][..],
            &["--backend", "metal"],
            &["--backend", "auto,cuda"],
            &["--compare", "x", "--threshold", "-1"],
            &["--compare", "x", "--threshold", "NaN"],
            &["--threshold", "3"],
            &["--format", "xml"],
            &["--profile", "rtx9090"],
        ] {
            let error = bench(bad).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{bad:?}");
        }
    }

    #[test]
    fn a_comparison_takes_text_or_ids() {
        let compare = |args: &[&str]| {
            let all = ["xtask", "compare", "--model", "m"].iter().chain(args);
            Cli::try_parse_from(all).map(|cli| match cli.command {
                Command::Compare(args) => args,
                other => panic!("parsed as {other:?}"),
            })
        };
        let args = compare(&["--tokens", "1,2", "--dtype", "bf16", "--quant", "nf4"]).unwrap();
        assert_eq!(args.tokens, Some(vec![1, 2]));
        assert_eq!((args.dtype, args.quant), (Some(Dtype::Bf16), List(vec![Quant::Nf4])));
        assert_eq!(args.kv_cache, List(vec![KvCache::Float]));
        assert_eq!((args.backend, args.max_new_tokens), (Selection::All, 64));
        for bad in [
            &["--tokens", "1", "--prompt", "x"][..],
            &["--tokens", "1,x"],
            &["--max-new-tokens", "0"],
            &["--backend", "metal"],
            &["--dtype", "f8"],
            &["--quant", "int3"],
            &["--quant", ""],
            &["--kv-cache", "int8,none"],
            &["--profile", "rtx9090"],
            &["--format", "csv"],
        ] {
            assert_eq!(compare(bad).unwrap_err().exit_code(), 2, "{bad:?}");
        }
    }

    #[test]
    fn a_list_keeps_its_order_and_refuses_repeats() {
        let list: List<Quant> = "nf4, none,int8".parse().unwrap();
        assert_eq!(list, List(vec![Quant::Nf4, Quant::None, Quant::Int8]));
        let refused = |text: &str| text.parse::<List<KvCache>>().unwrap_err();
        let hint = "\nhint: a list out of float, int8, each at most once";
        assert_eq!(refused("int8,float,int8"), format!("`int8` is there twice{hint}"));
        assert_eq!(refused("int8,"), format!("`` is not known{hint}"));
    }

    #[test]
    fn a_threshold_below_zero_is_named_as_such() {
        let text = bench(&["--compare", "x", "--threshold", "-1"]).unwrap_err().to_string();
        assert!(text.contains("'-1' for '--threshold <PCT>': it is below 0"), "{text}");
    }

    #[test]
    fn options_of_the_programs_pass_unread() {
        let cli = Cli::try_parse_from(["xtask", "doctor", "--json", "--require-gpu"]).unwrap();
        let Command::Doctor(rest) = cli.command else { panic!("not doctor") };
        assert_eq!(rest.args, ["--json", "--require-gpu"]);
        let cli = Cli::try_parse_from(["xtask", "tune", "--", "--help"]).unwrap();
        let Command::Tune(rest) = cli.command else { panic!("not tune") };
        assert_eq!(rest.args, ["--help"]);
    }

    #[test]
    fn words_are_those_of_the_command_line() {
        assert_eq!(word(Suite::Kernels), "kernels");
        assert_eq!(word(Policy::Default), "default");
    }
}
