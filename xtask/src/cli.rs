//! Command line of `cargo xtask`: arguments and help only.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use report::{BenchArgs, CompareArgs, VerifyArgs};

#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Builds, checks, measures and packs Flashover, and installs the tools for it",
    after_help = "Example:\n  cargo xtask bench\n\n\
                  Exit codes: 0 done, 1 a check failed or a case got slower, 2 bad input."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Check, tune and measure kernels on the devices of this machine, and print tables
    #[command(
        args_override_self = true,
        after_help = "Examples:\n  cargo xtask bench\n  \
                      cargo xtask bench --suite kernels --backend cuda,vulkan --save now.jsonl\n  \
                      cargo xtask bench --suite kernels --profile rtx4090 \\\n      \
                      --compare benches/baselines/cuda-sm90-132@rtx4090/kernels.jsonl"
    )]
    Bench(BenchArgs),
    /// Run everything that CI runs: format, rules, lints, tests, features, targets, verification, tables
    Test(TestArgs),
    /// Mutate models, adapters and examples: each must give a result or an error, within 2 GiB
    Fuzz(FuzzArgs),
    /// Check every kernel against the reference on its edge cases
    #[command(
        after_help = "Examples:\n  cargo xtask verify --backend cuda,cpu --filter matmul\n  \
                            cargo xtask verify --backend cuda --sanitizer memcheck --jobs 8"
    )]
    Verify(VerifyArgs),
    /// Run one model on several backends and precisions, and compare tokens, logits, perplexity and speed
    #[command(
        args_override_self = true,
        after_help = "Examples:\n  cargo xtask compare --model models/demo --text README.md\n  \
                      cargo xtask compare --model DIR --backend cuda,vulkan,cpu --quant nf4\n  \
                      cargo xtask compare --model DIR --backend cuda --quant none,int8,nf4 --kv-cache float,int8\n\n\
                      Exit codes: 0 every backend gives a result, 1 a backend fails or refuses every precision, 2 bad\n\
                      input. Different tokens are no failure, nor is a refused precision if another precision works."
    )]
    Compare(CompareArgs),
    /// Print all devices, the default device with its reason, and missing drivers and libraries
    #[command(after_help = "Example:\n  cargo xtask doctor --json")]
    Doctor(Rest),
    /// Show, run or merge tuned configs
    #[command(after_help = "Example:\n  cargo xtask tune show")]
    Tune(Rest),
    /// Compile every kernel for GPUs that are not present and report registers, spills and memory
    #[command(
        after_help = "Examples:\n  cargo xtask targets --json\n  cargo xtask targets --tuned --filter nf4"
    )]
    Targets(Rest),
    /// Install or download compilers, LLVM, the CUDA compiler and an OpenGL driver; the other commands do so on demand
    #[command(after_help = "Example:\n  cargo xtask setup")]
    Setup,
    /// Pack the programs with a script that verifies and measures on a machine without Rust
    Bundle(BundleArgs),
    /// Regenerate the tables in benches/RESULTS.md and the speed table in README.md from the committed records
    Readme(ReadmeArgs),
    /// Check the project rules that the compiler cannot check
    #[command(after_help = "Example:\n  cargo xtask tidy")]
    Tidy,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  cargo xtask test\n  cargo xtask test --fast")]
pub(crate) struct TestArgs {
    /// Run only format, rules, lints and unit tests
    #[arg(long)]
    pub(crate) fast: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  cargo xtask fuzz\n  cargo xtask fuzz --runs 100000 --filter templates"
)]
pub(crate) struct FuzzArgs {
    /// Number of random cases per test
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) runs: u32,
    /// Run only tests whose name begins with this text
    #[arg(long, value_name = "TEXT")]
    pub(crate) filter: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  cargo xtask bundle --out flashover-bundle")]
pub(crate) struct BundleArgs {
    /// Folder to write to; created if it is missing
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  cargo xtask readme --check")]
pub(crate) struct ReadmeArgs {
    /// Change nothing; show differences and exit with 1 if there are any
    #[arg(long)]
    pub(crate) check: bool,
}

/// Arguments forwarded to a program without parsing.
#[derive(Debug, Args)]
pub(crate) struct Rest {
    /// Arguments forwarded unchanged; `-- --help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    pub(crate) args: Vec<String>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

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
    fn what_the_programs_would_refuse_is_refused_here() {
        let bench = |args: &[&str]| Cli::try_parse_from(["xtask", "bench"].iter().chain(args));
        assert!(bench(&["--suite", "kernels", "--suite", "quick"]).is_ok(), "the last counts");
        for bad in [&["--suite", "fast"][..], &["--threshold", "3"], &["--demo", "models/demo"]] {
            assert_eq!(bench(bad).unwrap_err().exit_code(), 2, "{bad:?}");
        }
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
}
