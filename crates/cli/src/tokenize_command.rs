//! `flashover tokenize`: converts text to token ids and back.

use std::path::PathBuf;

use anyhow::bail;
use flashover::Tokenizer;

use crate::model_args::{HubArgs, standard_input, text_file, token};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder with tokenizer.json, or owner/name[@revision] on the Hugging Face Hub
    #[arg(long, short)]
    model: PathBuf,
    #[command(flatten)]
    hub: HubArgs,
    /// Text to tokenize [default: standard input]
    #[arg(long, allow_hyphen_values = true, conflicts_with_all = ["text", "tokens"])]
    prompt: Option<String>,
    /// Read the text from a UTF-8 file
    #[arg(long, value_name = "FILE", conflicts_with = "tokens")]
    text: Option<PathBuf>,
    /// Comma-separated token ids to decode; prints the text of each as a JSON list
    #[arg(long, value_delimiter = ',', value_name = "IDS", value_parser = token)]
    tokens: Option<Vec<u32>>,
}

/// Prints token ids, or the texts of given ids. The ids are those that a model receives, including the special tokens
/// that the tokenizer adds.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let tokenizer = Tokenizer::open(args.hub.tokenizer(&args.model)?)?;
    if let Some(ids) = &args.tokens {
        if let Some(id) = ids.iter().find(|id| !tokenizer.has(**id)) {
            bail!(
                "the tokenizer has no token {id}\nhint: print valid ids with `flashover tokenize --prompt TEXT`"
            );
        }
        let texts: Vec<String> =
            ids.iter().map(|id| tokenizer.decode(&[*id], true)).collect::<Result<_, _>>()?;
        return Ok(command::print(&(serde_json::to_string(&texts)? + "\n"))?);
    }
    let text = match (&args.prompt, &args.text) {
        (Some(prompt), _) => prompt.clone(),
        (_, Some(file)) => text_file(file, "--text")?,
        (None, None) => standard_input()?,
    };
    let ids: Vec<String> = tokenizer.encode(&text, true)?.iter().map(u32::to_string).collect();
    Ok(command::print(&(ids.join(",") + "\n"))?)
}
