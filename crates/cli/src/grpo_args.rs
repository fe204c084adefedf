//! Arguments of `flashover grpo`.

use std::path::PathBuf;

use anyhow::bail;
use clap::ValueEnum;
use flashover::Sampling;
use flashover::grpo::{Correction, GrpoOptions, Level, LossKind, ReferencePlace, Scale};

use crate::model_args::SubjectArgs;
use crate::train_args::{LoraArgs, OptimizerArgs};
use crate::train_speed::{OFFLOAD, OffloadArg, RecomputeArg};

/// Help of `--learning-rate`.
pub(crate) const LEARNING_RATE: &str = "Largest learning rate [default: 1e-5; with --full 1e-6]";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Prompts: a .jsonl with {"prompt"} or {"messages"} on each line, and other fields for rewards
    #[arg(long, value_name = "FILE")]
    pub(crate) data: PathBuf,
    /// Reward of a completion: exact (its line's `answer`), exact:FIELD, regex:PATTERN, length:TOKENS, json, or cmd:COMMAND,
    /// which reads and writes JSON lines. Several rewards are added
    #[arg(long, value_name = "REWARD", required = true)]
    pub(crate) reward: Vec<String>,
    /// Factor of each reward [default: 1]
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', allow_negative_numbers = true)]
    pub(crate) reward_weights: Vec<f64>,
    /// Processes of each reward command
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) workers: u32,
    /// Seconds until a command's answer is given up
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    pub(crate) reward_timeout: f64,
    /// Folder for the adapter, or with --full for the model; created if it is absent
    #[arg(long, short, value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// Replace the adapter or the model in the output folder
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Also save after every N batches, with the state that --resume needs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) save_every: Option<u32>,
    /// Continue the run that --save-every saved in a folder, with the same options; with --full it has the weights too
    #[arg(long, value_name = "DIR", conflicts_with = "adapter")]
    pub(crate) resume: Option<PathBuf>,
    /// Write a JSON object per batch: rewards, lengths, KL, entropy, log-ratios, time and MFU of each phase, samples; with
    /// --resume, append them
    #[arg(long, value_name = "FILE")]
    pub(crate) log: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) drawing: DrawingArgs,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
    #[command(flatten)]
    pub(crate) optimizer: OptimizerArgs,
    #[command(flatten)]
    pub(crate) lora: LoraArgs,
    /// Folder with a LoRA adapter in PEFT format to continue training
    #[arg(long, value_name = "DIR", help_heading = "Adapter", conflicts_with = "full")]
    pub(crate) adapter: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) of: SubjectArgs,
}

/// Prompts and completions of a batch.
#[derive(clap::Args)]
#[command(next_help_heading = "Completions")]
pub(crate) struct DrawingArgs {
    /// Prompts of each batch
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) positions: u32,
    /// Completions of each prompt
    #[arg(long, value_name = "N", default_value_t = 16)]
    group: usize,
    /// Most tokens of a completion
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_new_tokens: usize,
    /// Number of batches
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) steps: u32,
    /// Temperature of draws, which divides the logits when the policy learns, too
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    temperature: f32,
    /// Draw among the N most likely tokens; 0 for all
    #[arg(long, value_name = "N", default_value_t = 0)]
    top_k: usize,
    /// Draw among the most likely tokens that together reach this probability
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f32,
    /// Exclude tokens with less than this share of the most likely token's probability
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, allow_negative_numbers = true)]
    min_p: f32,
    /// Draw all tokens of each completion, past the token that ends it
    #[arg(long)]
    ignore_eos: bool,
    /// Random seed of draws, of initial values of an adapter and of rounding
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

/// Loss and weights.
#[derive(clap::Args)]
#[command(next_help_heading = "Policy")]
pub(crate) struct PolicyArgs {
    /// Train all weights instead of an adapter
    #[arg(long, conflicts_with_all = ["lora_rank", "lora_alpha", "lora_targets"])]
    pub(crate) full: bool,
    /// With --full and weights in 16 bits, keep no master weights in f32: bf16 is rounded stochastically
    #[arg(long, requires = "full")]
    pub(crate) no_master: bool,
    /// Weights of tokens: each alike (dapo, bnpo), each completion alike (grpo), each alike as if all completions were longest
    /// (dr_grpo), or each alike with capped ratios (cispo)
    #[arg(long, default_value = "dapo", value_parser = crate::model_args::named(LossKind::ALL.map(LossKind::name), loss))]
    loss: LossKind,
    /// Tokens that share a ratio: each has its own, or all of a completion (GSPO)
    #[arg(long, value_enum, default_value = "token")]
    ratio: LevelArg,
    /// Distance of the lower bound of a ratio from 1
    #[arg(long, default_value_t = 0.2, allow_negative_numbers = true)]
    epsilon: f64,
    /// Distance of the upper bound from 1 [default: --epsilon]; with --loss cispo, the largest ratio [default: 5]
    #[arg(long, allow_negative_numbers = true)]
    epsilon_high: Option<f64>,
    /// Largest ratio where the advantage is negative
    #[arg(long, allow_negative_numbers = true)]
    delta: Option<f64>,
    /// Factor of the KL divergence from the reference
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    beta: f64,
    /// Standard deviation that normalises advantages: of the group, of the batch, or none
    #[arg(long, value_enum, default_value = "group")]
    scale: ScaleArg,
    /// Steps of the optimizer on each batch
    #[arg(long, value_name = "N", default_value_t = 1)]
    updates: usize,
    /// Coefficient of the entropy bonus
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    entropy: f64,
    /// Learn nothing from truncated completions
    #[arg(long)]
    mask_truncated: bool,
    /// Correct for tokens of another distribution, as with --top-k or a KV cache in 8 bits: by token, or by completion
    #[arg(long, value_enum, value_name = "LEVEL")]
    correction: Option<LevelArg>,
    /// Largest factor of a correction
    #[arg(
        long,
        value_name = "FACTOR",
        default_value_t = 2.0,
        requires = "correction",
        allow_negative_numbers = true
    )]
    correction_max: f64,
    /// Learn nothing where a correction's factor is larger, instead of taking the largest
    #[arg(long, requires = "correction")]
    correction_mask: bool,
    /// With --full and --beta, place of the copied reference
    #[arg(long, value_enum, default_value = "device", requires = "full")]
    reference: PlaceArg,
    /// With --full and --beta, make the present weights the reference after every N batches
    #[arg(long, value_name = "N")]
    renew_reference: Option<usize>,
    /// Completions of one forward and backward pass
    #[arg(long, value_name = "N", default_value_t = 16)]
    micro_batch: usize,
    /// Activations that the backward pass recomputes
    #[arg(long, value_enum, default_value = "layers")]
    pub(crate) recompute: RecomputeArg,
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PARTS", help = OFFLOAD)]
    pub(crate) offload: Vec<OffloadArg>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum LevelArg {
    Token,
    Sequence,
}

impl From<LevelArg> for Level {
    fn from(level: LevelArg) -> Self {
        match level {
            LevelArg::Token => Self::Token,
            LevelArg::Sequence => Self::Sequence,
        }
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ScaleArg {
    Group,
    Batch,
    None,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum PlaceArg {
    Device,
    Host,
}

fn loss(text: &str) -> Result<LossKind, String> {
    let found = LossKind::ALL.into_iter().find(|own| own.name() == text);
    found.ok_or_else(|| format!("no loss is named {text}"))
}

impl Args {
    /// Returns the options of GRPO.
    pub(crate) fn options(&self) -> anyhow::Result<GrpoOptions> {
        let (drawing, policy) = (&self.drawing, &self.policy);
        if policy.delta.is_some() && policy.loss == LossKind::Cispo {
            bail!(
                "--delta is of clipped ratios, and --loss cispo caps them\nhint: leave out --delta"
            );
        }
        if policy.renew_reference.is_some() && policy.beta == 0.0 {
            bail!("--renew-reference needs a reference\nhint: add --beta, such as --beta 0.04");
        }
        if matches!(policy.reference, PlaceArg::Host) && policy.beta == 0.0 {
            bail!("--reference needs a reference\nhint: add --beta, such as --beta 0.04");
        }
        let sampling = Sampling {
            temperature: drawing.temperature,
            top_k: drawing.top_k,
            top_p: drawing.top_p,
            min_p: drawing.min_p,
            seed: drawing.seed,
            ..Sampling::default()
        };
        Ok(GrpoOptions {
            group: drawing.group,
            max_new_tokens: drawing.max_new_tokens,
            sampling,
            stop_tokens: drawing.ignore_eos.then(Vec::new),
            loss: policy.loss,
            level: policy.ratio.into(),
            epsilon: policy.epsilon,
            epsilon_high: policy.epsilon_high,
            delta: policy.delta,
            beta: policy.beta,
            scale: match policy.scale {
                ScaleArg::Group => Scale::Group,
                ScaleArg::Batch => Scale::Batch,
                ScaleArg::None => Scale::None,
            },
            updates: policy.updates,
            entropy: policy.entropy,
            mask_truncated: policy.mask_truncated,
            correction: policy.correction.map(|level| Correction {
                level: level.into(),
                most: policy.correction_max,
                masks: policy.correction_mask,
            }),
            reference: match policy.reference {
                PlaceArg::Device => ReferencePlace::Device,
                PlaceArg::Host => ReferencePlace::Host,
            },
            renew_reference: policy.renew_reference,
            micro_batch: policy.micro_batch,
            ..GrpoOptions::default()
        })
    }
}
