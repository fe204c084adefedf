//! The command lines of `bench` and `verify`.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use record::{PROFILES, Policy, Suite};

use crate::devices::Selection;
use crate::sanitize::Sanitizer;

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Set of cases to run
    #[arg(long, value_parser = suite(), default_value_t = Suite::Quick)]
    pub suite: Suite,
    /// Backends to run on: `auto`, `all`, or a list of cuda, vulkan, webgpu, cpu
    #[arg(long, default_value = "auto", value_name = "LIST")]
    pub backend: Selection,
    /// Restrict the device to the capabilities of this GPU
    #[arg(long, value_parser = PROFILES)]
    pub profile: Option<String>,
    /// Run only cases whose name contains this text
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,
    /// Choice of config for untuned shapes [default: measure]
    #[arg(long, value_parser = policy())]
    pub policy: Option<Policy>,
    /// Exit with 2 if no GPU is available
    #[arg(long)]
    pub require_gpu: bool,
    /// Also measure torch on CUDA with this Python, which needs torch, triton and CUDA
    #[arg(long, value_name = "PYTHON")]
    pub torch: Option<String>,
    /// Write the records to this file, one JSON object per line
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    /// Compare with a baseline that `--save` wrote; exit with 1 if a case is slower beyond noise
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Slowdown that `--compare` accepts, in percent; a slowdown within noise is accepted too
    #[arg(long, value_name = "PCT", default_value_t = 5.0, value_parser = percent)]
    #[arg(allow_negative_numbers = true, requires = "compare")]
    pub threshold: f64,
    /// Output format
    #[arg(long, value_enum, default_value_t = Format::Md)]
    pub format: Format,
    /// Also write a self-contained HTML page with charts to this file
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Check the arguments and the devices without measuring
    #[arg(long)]
    pub dry_run: bool,
}

/// Arguments of `verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Backends to check: `auto`, `all`, or a list of cuda, vulkan, webgpu, cpu
    #[arg(long, default_value = "auto", value_name = "LIST")]
    pub backend: Selection,
    /// Check only cases whose name contains this text
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,
    /// Restrict the device to the capabilities of this GPU
    #[arg(long, value_parser = PROFILES)]
    pub profile: Option<String>,
    /// Check every candidate config, not only the default and the measured ones
    #[arg(long)]
    pub configs: bool,
    /// Also fill the memory of the card for a moment, to check that a model survives it
    #[arg(long)]
    pub exhaust: bool,
    /// Run under compute-sanitizer, which needs CUDA and is many times slower
    #[arg(long, value_name = "TOOL")]
    pub sanitizer: Option<Sanitizer>,
    /// Number of parallel processes that share the checks of a backend
    #[arg(long, default_value_t = NonZeroUsize::MIN, value_name = "N")]
    pub jobs: NonZeroUsize,
    /// Write one JSON line per kernel and backend to this file
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
}

/// Output format of a bench.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Tables: drawn on a terminal, Markdown elsewhere
    Md,
    /// One JSON object with the cards and the records
    Json,
    /// One line per record
    Csv,
}

/// Parser for the name of a suite, with help for each.
pub fn suite() -> impl TypedValueParser<Value = Suite> {
    choice(Suite::ALL.map(|suite| (suite.name(), suite.help())))
}

/// Parser for the name of a policy, with help for each.
pub fn policy() -> impl TypedValueParser<Value = Policy> {
    choice(Policy::ALL.map(|policy| (policy.name(), policy.help())))
}

fn choice<T, const N: usize>(
    words: [(&'static str, &'static str); N],
) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err: std::error::Error + Send + Sync> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(words.map(|(word, help)| PossibleValue::new(word).help(help)))
        .try_map(|word| word.parse())
}

fn percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        Ok(value) if value < 0.0 => Err("it is below 0\nhint: use 5 or 2.5, for example".into()),
        _ => Err("it is not a percentage\nhint: use 5 or 2.5, for example".into()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser;

    use super::*;

    /// A program with only these arguments.
    #[derive(Debug, Parser)]
    #[command(args_override_self = true)]
    pub(crate) struct Only<T: Args> {
        #[command(flatten)]
        pub(crate) args: T,
    }

    fn bench(args: &[&str]) -> Result<BenchArgs, clap::Error> {
        Only::try_parse_from(["bench"].iter().chain(args)).map(|only| only.args)
    }

    #[test]
    fn bench_has_honest_defaults() {
        let args = bench(&[]).unwrap();
        assert_eq!((args.suite, args.format, args.threshold), (Suite::Quick, Format::Md, 5.0));
        assert_eq!((args.backend, args.policy), (Selection::Auto, None));
    }

    #[test]
    fn a_later_option_replaces_an_earlier_one() {
        let args = bench(&["--suite", "kernels", "--suite", "documents"]).unwrap();
        assert_eq!(args.suite, Suite::Documents);
    }

    #[test]
    fn bad_input_exits_with_2() {
        for bad in [
            &["--suite", "fast"][..],
            &["--policy", "never"],
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
    fn a_threshold_below_zero_is_named_as_such() {
        let text = bench(&["--compare", "x", "--threshold", "-1"]).unwrap_err().to_string();
        assert!(text.contains("'-1' for '--threshold <PCT>': it is below 0"), "{text}");
    }
}
