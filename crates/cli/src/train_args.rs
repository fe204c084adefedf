//! Arguments of `flashover train`.

use std::path::PathBuf;

use anyhow::bail;
use clap::ValueEnum;
use flashover::memory::Preset;
use flashover::train::{AdamWOptions, Decay, LoraOptions, Moments, MuonOptions, Schedule};

use crate::model_args::{SubjectArgs, TraceArgs, choice};
use crate::train_speed::{OFFLOAD, OffloadArg, RecomputeArg};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Examples: a text, a .jsonl with {"text"}, {"prompt", "completion"} or {"messages"} on each line, or tokens: a .bin or
    /// a folder of them
    #[arg(long, value_name = "PATH")]
    pub(crate) data: PathBuf,
    /// Examples that are not trained on; prints their loss before and after training
    #[arg(long, value_name = "PATH")]
    pub(crate) held_out: Option<PathBuf>,
    /// Also measure the held-out loss after every N steps
    #[arg(long, value_name = "N", requires = "held_out", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) eval_every: Option<u32>,
    /// Folder for the adapter, or with --full for the model; created if it is absent
    #[arg(long, short, value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// Replace the adapter or the model in the output folder, and other files of the same names
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Also save after every N steps, with the state that --resume needs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) save_every: Option<u32>,
    /// Keep the last N checkpoints of --save-every, each in OUTPUT/step-NNNNNN; older folders are removed with all that is in
    /// them. The last step is saved in OUTPUT itself
    #[arg(long, value_name = "N", requires = "save_every", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) keep: Option<u32>,
    /// Continue the run that --save-every saved in a folder, with the same options; with --full, --model may be left out
    #[arg(long, value_name = "DIR", conflicts_with = "adapter")]
    pub(crate) resume: Option<PathBuf>,
    /// Write a JSON object per step: loss, norm, rate, tokens per second, MFU, memory; with --resume, append them
    #[arg(long, value_name = "FILE")]
    pub(crate) log: Option<PathBuf>,
    /// Write a page with the curves of loss, held-out loss, gradient norm and learning rate
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
    #[command(flatten)]
    pub(crate) training: TrainingArgs,
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

/// Weights, batches and steps.
#[derive(clap::Args)]
#[command(next_help_heading = "Training")]
pub(crate) struct TrainingArgs {
    /// Train all weights instead of an adapter
    #[arg(long, conflicts_with_all = ["lora_rank", "lora_alpha", "lora_targets"])]
    pub(crate) full: bool,
    /// Begin with random weights of --shape; --data has tokens
    #[arg(long, requires = "full")]
    pub(crate) from_scratch: bool,
    /// With --full and weights in 16 bits, keep no master weights in f32: bf16 is rounded stochastically
    #[arg(long, requires = "full")]
    pub(crate) no_master: bool,
    /// Maximum tokens per example; longer ones are cut [default: 512, at most the context of the model]
    #[arg(long, short = 'c', value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) context: Option<u32>,
    /// Examples per batch [default: 4, or the choice of --preset; with --tokens-per-step as many as fit]
    #[arg(long, short = 'b', value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) batch: Option<u32>,
    /// Choose precision and batch that fit the device, unless --quant and -b are given; the only preset is training
    #[arg(long, value_parser = choice::<Preset>([Preset::Training.name()]), hide_possible_values = true)]
    pub(crate) preset: Option<Preset>,
    /// Batches per step, whose gradients are added
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) accumulate: u32,
    /// Tokens per step, instead of --accumulate: a multiple of a batch's tokens
    #[arg(long, value_name = "N", conflicts_with = "accumulate", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) tokens_per_step: Option<u64>,
    /// Number of steps [default: one epoch]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) steps: Option<u32>,
    /// Random seed of initial values, of the order of examples and of rounding
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Take examples in the order of the file instead of a random one
    #[arg(long)]
    pub(crate) in_order: bool,
    /// Activations that the backward pass recomputes: fewer take more memory and less time [default: as few as fit]
    #[arg(long, value_enum)]
    pub(crate) recompute: Option<RecomputeArg>,
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PARTS", help = OFFLOAD)]
    pub(crate) offload: Vec<OffloadArg>,
}

impl TrainingArgs {
    pub(crate) const fn usual(&self) -> Usual {
        match (self.from_scratch, self.full) {
            (true, _) => Usual::Scratch,
            (false, true) => Usual::Weights,
            (false, false) => Usual::Adapter,
        }
    }
}

/// Uses of an optimizer, which have different defaults.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Usual {
    /// All weights, from random ones.
    Scratch,
    /// All weights, from those of a model.
    Weights,
    Adapter,
    /// All weights, by GRPO.
    PolicyWeights,
    /// An adapter, by GRPO.
    PolicyAdapter,
}

/// Hyperparameters of the optimizer.
#[derive(clap::Args)]
#[command(next_help_heading = "Optimizer")]
pub(crate) struct OptimizerArgs {
    /// Optimizer, with the format of its moments
    #[arg(long, value_enum, default_value = "adamw")]
    optimizer: OptimizerArg,
    /// With --optimizer muon, decay rate of the momentum [default: 0.95]
    #[arg(long, allow_negative_numbers = true)]
    momentum: Option<f64>,
    /// Largest learning rate [default: 2e-4; with --full 2e-5, with --from-scratch 6e-4]
    #[arg(long, allow_negative_numbers = true)]
    learning_rate: Option<f64>,
    /// Steps of linear warmup from 0 to the learning rate
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    warmup: u32,
    /// Decay of the learning rate after the warmup
    #[arg(long, value_enum, default_value = "constant")]
    schedule: ScheduleArg,
    /// Short for --schedule cosine
    #[arg(long, conflicts_with = "schedule")]
    cosine: bool,
    /// With --schedule wsd, steps of the decay at the end
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u32).range(1..))]
    decay_steps: Option<u32>,
    /// Final learning rate as a fraction of --learning-rate [default: 0]
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    floor: Option<f64>,
    /// Decay rate of the mean of gradients
    #[arg(long, default_value_t = 0.9, allow_negative_numbers = true)]
    beta1: f64,
    /// Decay rate of the mean of squared gradients [default: 0.999; with --from-scratch 0.95]
    #[arg(long, allow_negative_numbers = true)]
    beta2: Option<f64>,
    /// Constant added to the root of the mean square
    #[arg(long, default_value_t = 1e-8, allow_negative_numbers = true)]
    eps: f64,
    /// Weight decay, of matrices alone [default: 0; with --from-scratch 0.1]
    #[arg(long, allow_negative_numbers = true)]
    weight_decay: Option<f64>,
    /// Clip the gradient to this norm; 0 disables clipping
    #[arg(long, alias = "clip", default_value_t = 1.0, allow_negative_numbers = true)]
    max_grad_norm: f64,
}

/// Optimizers.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum OptimizerArg {
    /// AdamW with moments in f32
    Adamw,
    /// AdamW with moments in bf16, rounded stochastically
    AdamwBf16,
    /// AdamW with moments in 8 bits, as in bitsandbytes
    Adamw8,
    /// Muon for the matrices of layers, AdamW for the rest; not for an adapter
    Muon,
}

impl OptimizerArg {
    pub(crate) const fn moments(self) -> Moments {
        match self {
            Self::Adamw | Self::Muon => Moments::F32,
            Self::AdamwBf16 => Moments::Bf16,
            Self::Adamw8 => Moments::Int8,
        }
    }

    pub(crate) const fn is_muon(self) -> bool {
        matches!(self, Self::Muon)
    }
}

/// Schedules of the learning rate.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ScheduleArg {
    Constant,
    /// Half a cosine
    Cosine,
    Linear,
    /// Warmup, stable, decay: constant, then linear over --decay-steps
    Wsd,
}

impl OptimizerArgs {
    /// Returns the options for a number of steps.
    pub(crate) fn options(
        &self,
        usual: Usual,
        seed: u64,
        steps: usize,
    ) -> anyhow::Result<(Schedule, AdamWOptions)> {
        let scratch = matches!(usual, Usual::Scratch);
        let rate = match usual {
            Usual::Scratch => 6e-4,
            Usual::Weights => 2e-5,
            Usual::Adapter => 2e-4,
            Usual::PolicyWeights => 1e-6,
            Usual::PolicyAdapter => 1e-5,
        };
        if self.max_grad_norm.is_nan() || self.max_grad_norm < 0.0 {
            bail!(
                "expected a gradient norm of 0 or more, got {}\nhint: use --max-grad-norm 1, or 0 to disable clipping",
                self.max_grad_norm
            );
        }
        let muon = self.optimizer.is_muon();
        if muon && matches!(usual, Usual::Adapter | Usual::PolicyAdapter) {
            bail!(
                "Muon trains whole matrices, not an adapter's factors\nhint: add --full, or use --optimizer adamw"
            );
        }
        if self.momentum.is_some() && !muon {
            bail!("--momentum is of Muon\nhint: add --optimizer muon, or use --beta1");
        }
        let decay = match (self.schedule, self.decay_steps) {
            _ if self.cosine => Decay::Cosine,
            (ScheduleArg::Constant, _) => Decay::Constant,
            (ScheduleArg::Cosine, _) => Decay::Cosine,
            (ScheduleArg::Linear, _) => Decay::Linear,
            (ScheduleArg::Wsd, Some(last)) => Decay::Stable { last: last as usize },
            (ScheduleArg::Wsd, None) => {
                bail!("--schedule wsd needs the steps of its decay\nhint: add --decay-steps")
            }
        };
        if self.decay_steps.is_some() && !matches!(decay, Decay::Stable { .. }) {
            bail!("--decay-steps is of --schedule wsd\nhint: add --schedule wsd");
        }
        if self.floor.is_some() && decay == Decay::Constant {
            bail!(
                "--floor needs a schedule that decays\nhint: add --schedule cosine, linear or wsd"
            );
        }
        let schedule = Schedule {
            learning_rate: self.learning_rate.unwrap_or(rate),
            warmup: self.warmup as usize,
            decay,
            // Without a decay, a run may be resumed with more steps.
            steps: if decay == Decay::Constant { 0 } else { steps },
            floor: self.floor.unwrap_or(0.0),
        };
        let optimizer = AdamWOptions {
            beta1: self.beta1,
            beta2: self.beta2.unwrap_or(if scratch { 0.95 } else { 0.999 }),
            eps: self.eps,
            weight_decay: self.weight_decay.unwrap_or(if scratch { 0.1 } else { 0.0 }),
            max_grad_norm: (self.max_grad_norm > 0.0).then_some(self.max_grad_norm),
            moments: self.optimizer.moments(),
            muon: muon.then(|| {
                let usual = MuonOptions::default();
                MuonOptions { momentum: self.momentum.unwrap_or(usual.momentum), ..usual }
            }),
            seed: (seed ^ seed >> 32) as u32,
        };
        Ok((schedule, optimizer))
    }

    pub(crate) const fn warmup(&self) -> usize {
        self.warmup as usize
    }

    pub(crate) fn decay_steps(&self) -> usize {
        self.decay_steps.map_or(0, |steps| steps as usize)
    }

    pub(crate) const fn optimizer(&self) -> OptimizerArg {
        self.optimizer
    }
}

/// Help of `--kv-cache`: it is an option of the model, but training refuses it.
pub(crate) const KV_CACHE: &str = "Training has no KV cache: int8 is refused";

/// Default maximum of tokens per example.
pub(crate) const USUAL_TO_TRAIN: usize = 512;

/// Shape of the adapter.
#[derive(clap::Args)]
#[command(next_help_heading = "Adapter")]
pub(crate) struct LoraArgs {
    /// Rank of the LoRA matrices A and B [default: 16]
    #[arg(long, value_name = "RANK")]
    lora_rank: Option<usize>,
    /// Alpha: the product of B and A is scaled by alpha / rank [default: twice the rank]
    #[arg(long, value_name = "ALPHA", allow_negative_numbers = true)]
    lora_alpha: Option<f64>,
    /// Names of the adapted matrices, such as q_proj,v_proj [default: all matrices of the layers]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    lora_targets: Vec<String>,
}

impl LoraArgs {
    pub(crate) fn options(&self) -> LoraOptions {
        let rank = self.lora_rank.unwrap_or(LoraOptions::default().rank);
        LoraOptions {
            rank,
            alpha: self.lora_alpha.unwrap_or(2.0 * rank as f64),
            rank_stabilised: false,
            targets: self.lora_targets.clone(),
        }
    }

    /// Returns true if an option was given.
    pub(crate) fn are_given(&self) -> bool {
        self.lora_rank.is_some() || self.lora_alpha.is_some() || !self.lora_targets.is_empty()
    }
}
