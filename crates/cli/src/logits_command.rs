//! `flashover logits`: writes the logits of every position.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::bail;
use command::OutFile;
use flashover::host::HostTensor;
use flashover::memory::Workload;

use crate::model_args::{ModelArgs, spared};
use crate::op_command::encoded;
use crate::prompt_args::{PromptArgs, token};

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    prompt: PromptArgs,
    /// Comma-separated token ids
    #[arg(long, value_delimiter = ',', value_name = "IDS", value_parser = token)]
    tokens: Option<Vec<u32>>,
    /// Split the tokens into windows of N and run each from an empty KV cache [default: one window]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    window: Option<u32>,
    /// Write a safetensors file with logits `[tokens, vocab]` in f32 and tokens `[tokens]` in i32; `-` is standard
    /// output
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let target = OutFile::new(&args.output)?;
    let folder = args.model.open()?;
    spared(&folder, &target)?;
    let tokens = match &args.tokens {
        Some(tokens) => tokens.clone(),
        None => folder.encode(&args.prompt.text()?)?,
    };
    folder.check(&tokens)?;
    let window = args.window.map_or(tokens.len(), |window| window as usize);
    let (first, rest) = tokens.split_at(window.min(tokens.len()));
    let engine = args.model.load(folder, None, Workload::new(1, first.len()), Some(first.len()))?;
    let mut session = engine.session(first.len())?;
    let mut logits = session.logits(first)?;
    for part in rest.chunks(window) {
        session.clear();
        logits.extend(session.logits(part)?);
    }
    let ids: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
    let shape = [tokens.len(), engine.config().vocab];
    let outputs = BTreeMap::from([
        ("logits".to_owned(), HostTensor::from_f32(&shape, &logits)?),
        ("tokens".to_owned(), HostTensor::new(flashover::device::DType::I32, &shape[..1], ids)?),
    ]);
    target.write(&encoded(&outputs)?)?;
    if let Some(first) = logits.iter().position(|logit| logit.is_nan()) {
        let count = logits.iter().filter(|logit| logit.is_nan()).count();
        let (all, token) = (logits.len(), first / engine.config().vocab);
        bail!(
            "{count} of {all} logits are NaN, the first after token {token}; the file is still written\nhint: f16 \
             overflows above 65504, so use --dtype f32 or bf16; otherwise look for NaN in the weights"
        );
    }
    Ok(())
}
