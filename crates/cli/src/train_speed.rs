//! `flashover bench --train` and `flashover profile --train`: training steps.

use anyhow::bail;
use clap::{ArgGroup, ValueEnum};
use flashover::WeightFormat;
use flashover::bench::trace::{Recording, Trace};
use flashover::bench::{Ceilings, StepShape, TrainSpeed};
use flashover::train::{
    AdamWOptions, FullOptions, LoraOptions, MuonOptions, Offload, Recompute, Start, TrainOptions,
    Trainer, Training, Trains, check_training,
};
use serde::Serialize;

use crate::model_args::{Subject, SubjectArgs};
use crate::train_args::OptimizerArg;

/// Weights that steps update.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Train {
    /// All weights
    Full,
    /// A LoRA adapter of rank 16 of all matrices of the layers
    Lora,
}

/// Arguments of training steps that are planned or measured.
#[derive(clap::Args, Clone)]
#[command(group = ArgGroup::new("learns").multiple(true))]
pub(crate) struct StepArgs {
    /// Train all weights or an adapter, instead of generating
    #[arg(long, value_enum, group = "learns")]
    pub(crate) train: Option<Train>,
    /// With --train or --grpo, activations that the backward pass recomputes [default: nothing; layers for `plan` and with --offload]
    #[arg(long, value_enum, requires = "learns")]
    recompute: Option<RecomputeArg>,
    /// With --train full, optimizer, with the format of its moments [default: adamw]
    #[arg(long, value_enum, requires = "learns")]
    optimizer: Option<OptimizerArg>,
    /// With --train full, no master weights in f32 next to weights in 16 bits
    #[arg(long, requires = "learns")]
    no_master: bool,
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PARTS", requires = "learns", help = OFFLOAD)]
    offload: Vec<OffloadArg>,
    /// With --train, batches per step
    #[arg(long, value_name = "N", default_value_t = 1, requires = "train", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    accumulate: u32,
}

impl StepArgs {
    /// Returns the training, with `usual` recomputation unless another is asked for. Refuses what `train` refuses.
    pub(crate) fn training(
        &self,
        train: Train,
        lora: LoraOptions,
        usual: Recompute,
        quant: Option<WeightFormat>,
    ) -> anyhow::Result<Training> {
        let optimizer = self.optimizer.unwrap_or(OptimizerArg::Adamw);
        let trains = match train {
            Train::Full if quant.is_some() => bail!(
                "--train full is of dense weights, --quant makes quantised ones\nhint: leave out --quant, or use --train lora"
            ),
            Train::Lora if self.optimizer.is_some() || self.no_master => bail!(
                "--optimizer and --no-master are of --train full\nhint: leave them out, or use --train full"
            ),
            Train::Full => {
                let (moments, muon) = (optimizer.moments(), optimizer.is_muon());
                Trains::Weights { master: !self.no_master, moments, muon }
            }
            Train::Lora => Trains::Adapter(lora),
        };
        let offload = offloaded(&self.offload);
        let usual = if offload.by_layer() { Recompute::Layers } else { usual };
        let recompute = self.recompute.map_or(usual, Recompute::from);
        let micro_batches = self.accumulate as usize;
        let training = Training { trains, recompute, offload, micro_batches };
        check_training(&training)?;
        Ok(training)
    }
}

/// Parts of training in host memory.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum OffloadArg {
    /// Moments and master weights
    Optimizer,
    /// Gradients, and with them the optimizer
    Gradients,
    /// Inputs of layers
    Inputs,
}

/// Help of `--offload`.
pub(crate) const OFFLOAD: &str =
    "State kept in host memory: optimizer, gradients (implies optimizer), inputs (layer inputs)";

/// Returns the parts in host memory.
pub(crate) fn offloaded(args: &[OffloadArg]) -> Offload {
    let mut offload = Offload::default();
    for arg in args {
        match arg {
            OffloadArg::Optimizer => offload.optimizer = true,
            OffloadArg::Gradients => (offload.optimizer, offload.gradients) = (true, true),
            OffloadArg::Inputs => offload.inputs = true,
        }
    }
    offload
}

/// Activations that the backward pass recomputes.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum RecomputeArg {
    /// None: the fastest, with the most memory
    Nothing,
    /// Results of norms
    Norms,
    /// Results of norms, and activations inside of feed-forward blocks
    FeedForward,
    /// All of a layer except its input
    Layers,
}

impl From<RecomputeArg> for Recompute {
    fn from(arg: RecomputeArg) -> Self {
        match arg {
            RecomputeArg::Nothing => Self::Nothing,
            RecomputeArg::Norms => Self::Norms,
            RecomputeArg::FeedForward => Self::FeedForward,
            RecomputeArg::Layers => Self::Layers,
        }
    }
}

/// Result of one test.
#[derive(Serialize)]
pub(crate) struct Row {
    model: String,
    device: String,
    dtype: String,
    batch: usize,
    context: usize,
    accumulate: usize,
    recompute: &'static str,
    offload: Vec<&'static str>,
    step_ns: f64,
    tokens_per_second: f64,
    model_tflops: f64,
    /// Share of the measured peak of the matmul kernels.
    of_ceiling: Option<f64>,
    reserved_bytes: u64,
    samples_ns: Vec<f64>,
}

/// Loads a model for training, with new weights for a shape.
pub(crate) fn trainer(of: &SubjectArgs, training: &Training) -> anyhow::Result<Trainer> {
    let device = of.load.open()?;
    let Training { trains, recompute, offload, .. } = training.clone();
    let Trains::Weights { master, moments, muon } = trains else {
        let options = TrainOptions { recompute, offload, ..TrainOptions::default() };
        options.check()?;
        return Ok(Trainer::new(of.engine(&device, None)?, options)?);
    };
    let start = match of.subject()? {
        Subject::Folder(folder) => Start::Folder(Box::new(of.load.folder(&folder)?)),
        Subject::Shape(shape) => Start::Scratch { shape: shape.to_owned(), seed: 0 },
    };
    let muon = muon.then(MuonOptions::default);
    let optimizer = AdamWOptions { moments, muon, ..AdamWOptions::default() };
    let options = FullOptions { recompute, offload, master, optimizer, ..FullOptions::default() };
    Ok(Trainer::full(&device, start, &of.load.options(), options)?)
}

/// Measures steps.
pub(crate) fn bench(
    of: &SubjectArgs,
    training: &Training,
    [batch, context]: [usize; 2],
    repetitions: usize,
) -> anyhow::Result<Row> {
    let mut trainer = trainer(of, training)?;
    let ceilings = Ceilings::measure(trainer.engine())?;
    trainer.engine().clear_cache()?;
    let accumulate = training.micro_batches;
    let shape = StepShape { micro_batches: accumulate, batch, context };
    let TrainSpeed { samples_ns, flops } = trainer.measure(shape, repetitions)?;
    let mut sorted = samples_ns.clone();
    sorted.sort_by(f64::total_cmp);
    let step_ns = sorted[sorted.len() / 2];
    let gflops = flops as f64 / step_ns;
    Ok(Row {
        model: of.name(),
        device: trainer.engine().device().profile().name.clone(),
        dtype: trainer.engine().precision().0,
        batch,
        context,
        accumulate,
        recompute: training.recompute.name(),
        offload: training.offload.names(),
        step_ns,
        tokens_per_second: shape.tokens() as f64 / step_ns * 1e9,
        model_tflops: gflops / 1e3,
        of_ceiling: ceilings.gflops.map(|peak| gflops / peak),
        reserved_bytes: trainer.engine().memory().reserved_bytes,
        samples_ns,
    })
}

/// Formats a row as a table.
pub(crate) fn table(row: &Row) -> String {
    let ceiling = row.of_ceiling.map_or(String::new(), |share| format!("{:.1}%", share * 100.0));
    format!(
        "| model | dtype | batches | tokens | recompute | offload | ms/step | tokens/s | TFLOP/s | of ceiling | memory GiB |\n\
         | --- | --- | ---: | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |\n\
         | {} | {} | {} x {} | {} | {} | {} | {:.2} | {:.0} | {:.1} | {ceiling} | {:.2} |\n",
        row.model,
        row.dtype,
        row.accumulate,
        row.batch,
        row.context,
        row.recompute,
        if row.offload.is_empty() { "nothing".to_owned() } else { row.offload.join(", ") },
        row.step_ns / 1e6,
        row.tokens_per_second,
        row.model_tflops,
        row.reserved_bytes as f64 / f64::from(1 << 30),
    )
}

/// Records one step with every launch timed, after two steps as warm-up. Returns nanoseconds on the host's clock, and the trace.
pub(crate) fn record(trainer: &mut Trainer, shape: StepShape) -> anyhow::Result<(f64, Trace)> {
    trainer.measure(shape, 1)?;
    let recording = Recording::of_this_thread()?;
    let samples = trainer.measure_one(shape)?;
    Ok((samples, recording.finish()))
}
