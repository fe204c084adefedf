//! `flashover tokenize`: converts text to token ids and back.

use std::path::PathBuf;

use anyhow::bail;
use flashover::Tokenizer;

use crate::model_args::HubArgs;
use crate::prompt_args::{PromptArgs, token};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder with tokenizer.json, or owner/name[@revision] on the Hugging Face Hub
    #[arg(long, short)]
    model: PathBuf,
    #[command(flatten)]
    hub: HubArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    /// Comma-separated token ids to decode; prints the text of each as a JSON list
    #[arg(long, value_delimiter = ',', value_name = "IDS", value_parser = token)]
    tokens: Option<Vec<u32>>,
}

/// Prints token ids, or the texts of given ids. The ids are those that a model receives, including the special tokens
/// that the tokenizer adds.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.model.is_file() {
        bail!("{} is a file\nhint: pass its folder", args.model.display());
    }
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
    let text = args.prompt.text()?;
    let ids: Vec<String> = tokenizer.encode(&text, true)?.iter().map(u32::to_string).collect();
    Ok(command::print(&(ids.join(",") + "\n"))?)
}
