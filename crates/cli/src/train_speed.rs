//! `flashover bench --train` and `flashover profile --train`: training steps.

use clap::ValueEnum;
use flashover::bench::trace::{Recording, Trace};
use flashover::bench::{Ceilings, TrainSpeed};
use flashover::train::{FullOptions, Recompute, Start, TrainOptions, Trainer};
use serde::Serialize;

use crate::model_args::{Subject, SubjectArgs};

/// Weights that steps update.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Train {
    /// All weights
    Full,
    /// A LoRA adapter of rank 16 of all matrices of the layers
    Lora,
}

/// Steps to measure.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Steps {
    pub(crate) train: Train,
    pub(crate) batch: usize,
    pub(crate) context: usize,
    pub(crate) recompute: Recompute,
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
    recompute: &'static str,
    step_ns: f64,
    tokens_per_second: f64,
    model_tflops: f64,
    /// Share of the measured peak of the matmul kernels.
    of_ceiling: Option<f64>,
    reserved_bytes: u64,
    samples_ns: Vec<f64>,
}

/// Loads a model for training, with new weights for a shape.
pub(crate) fn trainer(of: &SubjectArgs, steps: Steps) -> anyhow::Result<Trainer> {
    let (device, recompute) = (of.load.open()?, steps.recompute);
    if matches!(steps.train, Train::Lora) {
        let options = TrainOptions { recompute, ..TrainOptions::default() };
        return Ok(Trainer::new(of.engine(&device, None)?, options)?);
    }
    let start = match of.subject()? {
        Subject::Folder(folder) => Start::Folder(Box::new(of.load.folder(&folder)?)),
        Subject::Shape(shape) => Start::Scratch { shape: shape.to_owned(), seed: 0 },
    };
    let options = FullOptions { recompute, ..FullOptions::default() };
    Ok(Trainer::full(&device, start, &of.load.options(), options)?)
}

/// Measures steps.
pub(crate) fn bench(of: &SubjectArgs, steps: Steps, repetitions: usize) -> anyhow::Result<Row> {
    let mut trainer = trainer(of, steps)?;
    let ceilings = Ceilings::measure(trainer.engine())?;
    trainer.engine().clear_cache()?;
    let Steps { batch, context, recompute, .. } = steps;
    let TrainSpeed { samples_ns, flops } = trainer.measure([batch, context], repetitions)?;
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
        recompute: recompute.name(),
        step_ns,
        tokens_per_second: (batch * context) as f64 / step_ns * 1e9,
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
        "| model | dtype | batch | tokens | recompute | ms/step | tokens/s | TFLOP/s | of ceiling | memory GiB |\n\
         | --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |\n\
         | {} | {} | {} | {} | {} | {:.2} | {:.0} | {:.1} | {ceiling} | {:.2} |\n",
        row.model,
        row.dtype,
        row.batch,
        row.context,
        row.recompute,
        row.step_ns / 1e6,
        row.tokens_per_second,
        row.model_tflops,
        row.reserved_bytes as f64 / f64::from(1 << 30),
    )
}

/// Records one step with every launch timed, after two steps as warm-up. Returns nanoseconds on the host's clock, and the trace.
pub(crate) fn record(trainer: &mut Trainer, steps: Steps) -> anyhow::Result<(f64, Trace)> {
    let Steps { batch, context, .. } = steps;
    trainer.measure([batch, context], 1)?;
    let recording = Recording::of_this_thread()?;
    let samples = trainer.measure_one([batch, context])?;
    Ok((samples, recording.finish()))
}
