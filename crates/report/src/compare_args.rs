//! Command line of `compare`, and checks of its files.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Args, ValueEnum};
use quant::WeightFormat;
use record::{DTYPES, PROFILES};
use serde_json::Value;

use crate::devices::Selection;
use crate::fail::usage;

/// Values of `--kv-cache`, passed on to processes of `flashover`.
pub const KV_CACHES: [&str; 2] = ["float", "int8"];

/// Default prompt of a comparison.
pub const PROMPT: &str = "Once upon a time";

/// Context length for perplexity in tokens, if the model has that many positions.
const WINDOW: usize = 512;

/// Arguments of `compare`: one model, the backends and the precisions.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// Folder with config.json and safetensors; a name on the Hugging Face Hub is not accepted
    #[arg(long, short, value_name = "DIR", required_unless_present = "onnx")]
    model: Option<PathBuf>,
    /// ONNX file in place of a model folder: its outputs and its speed on each backend
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["model", "quant", "kv_cache", "prompt", "tokens", "max_new_tokens", "text"]
    )]
    pub onnx: Option<PathBuf>,
    /// Input of the ONNX graph: [NAME=]FILE with .npy, .pb or .safetensors; may be repeated [default: random numbers]
    #[arg(long = "input", value_name = "[NAME=]FILE", requires = "onnx")]
    pub inputs: Vec<String>,
    /// Length of a dimension of the ONNX graph that has a name, such as batch=1; may be repeated. Others have length 1
    #[arg(long = "dim", value_name = "NAME=LENGTH", requires = "onnx")]
    pub dimensions: Vec<String>,
    /// Backends to compare, each in every precision: `auto`, `all`, or a list of cuda, vulkan, webgpu, cpu; the first
    /// result is the reference
    #[arg(long, default_value = "all", value_name = "LIST")]
    pub backend: Selection,
    /// Restrict the CUDA device to the capabilities of this GPU
    #[arg(long, value_parser = PROFILES)]
    pub profile: Option<String>,
    /// Compute dtype [default: f32 on a CPU, elsewhere the dtype of the files]
    #[arg(long, value_parser = DTYPES)]
    pub dtype: Option<String>,
    #[arg(long, default_value = "none", value_name = "LIST", value_parser = quants, help = quant_help())]
    pub quant: List,
    /// Formats of the KV cache: a list of float (the compute dtype), int8
    #[arg(long, default_value = "float", value_name = "LIST", value_parser = kv_caches)]
    pub kv_cache: List,
    /// Prompt as text [default: Once upon a time]
    #[arg(long, value_name = "TEXT", conflicts_with = "tokens")]
    pub prompt: Option<String>,
    /// Prompt as comma-separated token ids
    #[arg(long, value_name = "IDS", value_delimiter = ',', value_parser = token)]
    pub tokens: Option<Vec<u32>>,
    /// Number of tokens to generate greedily
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_new_tokens: u32,
    /// Also measure perplexity on this text
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Output format
    #[arg(long, value_enum, default_value_t = CompareFormat::Md)]
    pub format: CompareFormat,
}

/// Output format of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CompareFormat {
    /// A table: drawn on a terminal, Markdown elsewhere
    Md,
    /// One JSON object, with every token
    Json,
}

/// Values of an option in the order given, without repeats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List(pub Vec<&'static str>);

fn quants(text: &str) -> Result<List, String> {
    list(text, &known_quants())
}

fn known_quants() -> Vec<&'static str> {
    ["none"].into_iter().chain(WeightFormat::at_load().map(WeightFormat::name)).collect()
}

fn quant_help() -> String {
    let known = known_quants().join(", ");
    format!("Weight formats to quantise the layers to at load: a list of {known}")
}

fn kv_caches(text: &str) -> Result<List, String> {
    list(text, &KV_CACHES)
}

fn list(text: &str, known: &[&'static str]) -> Result<List, String> {
    let mut list = Vec::new();
    for name in text.split(',').map(str::trim) {
        let refused = |why| {
            let known = known.join(", ");
            format!("`{name}` {why}\nhint: use a list of {known}, each at most once")
        };
        let word = known.iter().find(|word| **word == name);
        let word = word.ok_or_else(|| refused("is not known"))?;
        if list.contains(word) {
            return Err(refused("occurs twice"));
        }
        list.push(*word);
    }
    Ok(List(list))
}

fn token(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| "it is not a token id\nhint: use ids such as 1,2,3".into())
}

impl CompareArgs {
    /// Returns the folder of the model; an empty path for an ONNX graph.
    pub fn model(&self) -> &Path {
        self.model.as_deref().unwrap_or(Path::new(""))
    }

    /// Checks that the files of the command line can be used. Returns the context length for perplexity in tokens.
    ///
    /// # Errors
    /// A mistake of the caller, with a hint.
    pub fn check_files(&self) -> Result<usize> {
        let hint = "pass a Hugging Face folder with config.json and safetensors";
        let path = self.model().join("config.json");
        let shown = path.display();
        let config = fs::read_to_string(&path)
            .map_err(|why| usage(format!("cannot read {shown}: {why}"), hint))?;
        let config: Value = serde_json::from_str(&config)
            .map_err(|why| usage(format!("{shown} is not JSON: {why}"), hint))?;
        if !self.has_tokenizer() {
            let shown = self.model().display();
            let without = |what: &str, hint: &str| {
                Err(usage(format!("{shown} has no tokenizer.json, so {what}"), hint))
            };
            if self.tokens.is_none() {
                return without("the prompt cannot be text", "pass ids such as --tokens 1,2,3");
            }
            if self.text.is_some() {
                return without("--text cannot be read", "omit --text");
            }
        }
        self.text.as_deref().map_or(Ok(()), check_text)?;
        Ok(window(&config))
    }

    /// True if the model has a tokenizer.
    pub fn has_tokenizer(&self) -> bool {
        self.model().join("tokenizer.json").is_file()
    }
}

fn check_text(file: &Path) -> Result<()> {
    let shown = file.display();
    let hint = "set --text to a UTF-8 file, such as README.md";
    let text = fs::read_to_string(file)
        .map_err(|why| usage(format!("cannot read {shown}: {why}"), hint))?;
    if text.trim().is_empty() {
        return Err(usage(format!("{shown} has no text"), hint));
    }
    Ok(())
}

/// [`WINDOW`], or the model's context length if that is shorter.
fn window(config: &Value) -> usize {
    let of = |name| config.get(name).and_then(Value::as_u64);
    let context = of("max_position_embeddings").or_else(|| of("n_positions"));
    context.and_then(|max| usize::try_from(max).ok()).map_or(WINDOW, |max| max.min(WINDOW))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::tests::Only;

    fn compare(args: &[&str]) -> Result<CompareArgs, clap::Error> {
        Only::try_parse_from(["compare", "--model", "m"].iter().chain(args)).map(|only| only.args)
    }

    #[test]
    fn a_comparison_takes_text_or_ids() {
        let args = compare(&["--tokens", "1,2", "--dtype", "bf16", "--quant", "nf4"]).unwrap();
        assert_eq!(args.tokens, Some(vec![1, 2]));
        assert_eq!((args.dtype.as_deref(), args.quant), (Some("bf16"), List(vec!["nf4"])));
        assert_eq!(args.kv_cache, List(vec!["float"]));
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
        assert_eq!(quants("nf4, none,int8"), Ok(List(vec!["nf4", "none", "int8"])));
        let hint = "\nhint: use a list of float, int8, each at most once";
        let refused = |text: &str| kv_caches(text).unwrap_err();
        assert_eq!(refused("int8,float,int8"), format!("`int8` occurs twice{hint}"));
        assert_eq!(refused("int8,"), format!("`` is not known{hint}"));
    }

    #[test]
    fn files_that_cannot_be_used_are_refused_with_a_hint() {
        let dir = tempfile::tempdir().unwrap();
        let folder = |name: &str, config: &[u8], tokenizer: bool| {
            let folder = dir.path().join(name);
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("config.json"), config).unwrap();
            if tokenizer {
                fs::write(folder.join("tokenizer.json"), "{}").unwrap();
            }
            folder
        };
        let plain = folder("plain", b"{}", false);
        let (broken, whole) = (folder("broken", b"{", false), folder("whole", b"{}", true));
        let text = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        for (name, bytes) in [("text", &b"words"[..]), ("empty", b"\n"), ("bytes", &[0xff])] {
            fs::write(text(name), bytes).unwrap();
        }
        let check = |model: &Path, more: &[&str]| {
            CompareArgs { model: Some(model.to_owned()), ..compare(more).unwrap() }.check_files()
        };
        for (model, more, want) in [
            (dir.path(), vec![], "cannot read"),
            (&broken, vec![], "is not JSON"),
            (&plain, vec![], "the prompt cannot be text"),
            (&plain, vec!["--tokens", "1", "--text", &text("text")], "--text cannot be read"),
            (&whole, vec!["--text", &text("absent")], "cannot read"),
            (&whole, vec!["--text", &text("bytes")], "cannot read"),
            (&whole, vec!["--text", &text("empty")], "has no text"),
        ] {
            let error = check(model, &more).unwrap_err();
            let said = error.to_string();
            assert!(said.contains(want) && said.contains("\nhint: "), "{want}: {said}");
            assert_eq!(crate::fail::report(&error), 2);
        }
        assert_eq!(check(&plain, &["--tokens", "1"]).unwrap(), WINDOW);
        assert_eq!(check(&whole, &["--text", &text("text")]).unwrap(), WINDOW);
    }

    #[test]
    fn a_window_is_no_longer_than_the_context() {
        let of = |config: Value| window(&config);
        assert_eq!(of(serde_json::json!({ "max_position_embeddings": 128 })), 128);
        assert_eq!(of(serde_json::json!({ "n_positions": 100 })), 100);
        assert_eq!(of(serde_json::json!({ "max_position_embeddings": 131_072 })), WINDOW);
        assert_eq!(of(serde_json::json!({})), WINDOW);
    }
}
