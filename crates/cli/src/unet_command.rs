//! `flashover unet`: U-Nets of diffusers, frame by frame.

mod run;

use std::path::PathBuf;

use anyhow::bail;
use clap::{Subcommand, ValueEnum};
use command::OutFile;
use flashover::device::ArchProfile;
use flashover::unet::{
    FrameSpeed, UnetConfig, UnetModel, UnetOptions, UnetPlan, UnetShape, UnetWeights,
};
use flashover::{Compute, LoadError, Policy};
use serde::Serialize;

use crate::interrupt;
use crate::model_args::{DeviceArgs, choice};
use crate::profile_command::{milliseconds, operators_table};

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure frames per second, latency and memory of shapes with random weights, or of a model
    Bench(BenchArgs),
    /// Compute frames of the inputs in a file, or sample pictures from noise
    Run(run::RunArgs),
    /// Print the work and memory of each layer, without a device
    Plan(PlanArgs),
    /// Print the time of a frame by operator and by layer, with the memory of each layer
    Profile(ProfileArgs),
}

/// Compute dtype and accumulators.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Precision {
    /// f32
    F32,
    /// f32, with matmuls in tf32
    Tf32,
    /// f16 with accumulators in f32
    F16,
    /// f16 with accumulators in f16
    F16acc16,
    /// bf16
    Bf16,
}

impl Precision {
    const fn options(self, policy: Policy) -> UnetOptions {
        let dtype = match self {
            Self::F32 => Compute::F32,
            Self::Tf32 => Compute::Tf32,
            Self::F16 | Self::F16acc16 => Compute::F16,
            Self::Bf16 => Compute::Bf16,
        };
        let f16_accumulation = matches!(self, Self::F16acc16);
        UnetOptions { dtype: Some(dtype), f16_accumulation, policy: Some(policy) }
    }

    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    const fn bytes(self) -> u128 {
        if matches!(self, Self::F32 | Self::Tf32) { 4 } else { 2 }
    }
}

#[derive(clap::Args)]
struct LoadArgs {
    /// For untuned shapes: `frozen` fails, `default` uses an inherited or the first config, `measure` tunes now
    #[arg(long, default_value = "default", value_parser = choice::<Policy>(Policy::ALL.map(Policy::name)), hide_possible_values = true)]
    policy: Policy,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Size of frames.
#[derive(clap::Args)]
struct SizeArgs {
    /// Height and width of a sample: one number, or HEIGHTxWIDTH [default: the sample size in config.json, or 64]
    #[arg(long, value_parser = size)]
    size: Option<Size>,
    /// Tokens of the text, for models that attend to one
    #[arg(long, default_value_t = 77, value_parser = clap::value_parser!(u16).range(1..))]
    tokens: u16,
}

#[derive(Clone, Copy)]
struct Size([usize; 2]);

fn size(text: &str) -> Result<Size, String> {
    let number = |text: &str| text.parse::<u16>().ok().filter(|size| *size > 0);
    let sizes = match text.split_once('x') {
        None => number(text).map(|size| [size, size]),
        Some((height, width)) => number(height).zip(number(width)).map(<[u16; 2]>::from),
    };
    let bad = || {
        format!(
            "expected a size, got `{text}`\nhint: use numbers from 1 to 65535, such as 64 or 64x96"
        )
    };
    Ok(Size(sizes.ok_or_else(bad)?.map(|size| size as usize)))
}

impl SizeArgs {
    fn shape(&self, config: &UnetConfig, batch: usize) -> UnetShape {
        let size = self.size.map(|Size(size)| size).or(config.sample_size).unwrap_or([64, 64]);
        let tokens = if config.cross.is_some() { self.tokens.into() } else { 0 };
        UnetShape { batch, size, tokens }
    }
}

#[derive(clap::Args)]
struct BenchArgs {
    /// Shapes with random weights, separated by commas: unet-38m, unet-97m, unet-390m, unet-880m, unet-1b, sd15, sdxl, or a
    /// config.json
    #[arg(
        long,
        value_delimiter = ',',
        required_unless_present = "model",
        conflicts_with = "model"
    )]
    shape: Vec<String>,
    /// Folder with config.json and safetensors of diffusers
    #[arg(long, short)]
    model: Option<PathBuf>,
    /// Samples of a frame, separated by commas
    #[arg(long, short, value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u16).range(1..))]
    batch: Vec<u16>,
    /// Compute dtypes, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "f16")]
    dtype: Vec<Precision>,
    /// Frames of a measurement, after those that compile and capture
    #[arg(long, short, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: u32,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    size: SizeArgs,
    #[command(flatten)]
    load: LoadArgs,
}

/// A model and a frame.
#[derive(clap::Args)]
struct FrameArgs {
    /// Shape with random weights, or a config.json
    #[arg(long, required_unless_present = "model", conflicts_with = "model")]
    shape: Option<String>,
    /// Folder with config.json and safetensors of diffusers
    #[arg(long, short)]
    model: Option<PathBuf>,
    /// Samples of a frame
    #[arg(long, short, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// Compute dtype
    #[arg(long, default_value = "f16")]
    dtype: Precision,
    #[command(flatten)]
    size: SizeArgs,
}

#[derive(clap::Args)]
struct PlanArgs {
    /// Print a line for each layer
    #[arg(long)]
    layers: bool,
    /// Fail if the plan exceeds the memory of a published card, such as rtx4080 or l4
    #[arg(long, value_parser = choice::<String>(ArchProfile::cards()), hide_possible_values = true)]
    profile: Option<String>,
    #[command(flatten)]
    of: FrameArgs,
}

#[derive(clap::Args)]
struct ProfileArgs {
    /// Also write a trace of every kernel launch, for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    of: FrameArgs,
    #[command(flatten)]
    load: LoadArgs,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.command {
        Command::Bench(args) => bench(args),
        Command::Run(args) => run::run(args),
        Command::Plan(args) => plan(args),
        Command::Profile(args) => profile(args),
    }
}

/// Result of one measurement.
#[derive(Serialize)]
struct Row {
    build_commit: String,
    arch_id: String,
    model: String,
    dtype: String,
    batch: usize,
    size: [usize; 2],
    /// Frames per second; a frame has `batch` samples.
    fps: f64,
    samples_per_second: f64,
    p50_ns: f64,
    p95_ns: f64,
    #[serde(flatten)]
    speed: FrameSpeed,
}

fn bench(args: &BenchArgs) -> anyhow::Result<()> {
    let models: Vec<(String, Option<&PathBuf>)> = match &args.model {
        Some(model) => vec![(model.display().to_string(), Some(model))],
        None => args.shape.iter().map(|shape| (shape.clone(), None)).collect(),
    };
    let device = args.load.device.open()?;
    // An invalid row must not end a table that took minutes.
    for (name, folder) in &models {
        let config = config_of(*folder, name)?;
        for precision in &args.dtype {
            for batch in &args.batch {
                let shape = args.size.shape(&config, (*batch).into());
                UnetModel::fits(&device, &config, shape, precision.bytes())?;
            }
        }
    }
    let _listening = interrupt::listen()?;
    let mut wrote = false;
    for (name, folder) in models {
        for precision in &args.dtype {
            let options = precision.options(args.load.policy);
            let model = match folder {
                Some(folder) => UnetModel::load(&device, folder, &options)?,
                None => UnetModel::random(&device, &name, &options)?,
            };
            for batch in &args.batch {
                interrupt::check("stopped")?;
                let shape = args.size.shape(model.config(), (*batch).into());
                let speed = model.measure(shape, args.repetitions as usize)?;
                let row = row(&name, *precision, shape, &device.profile().id.to_string(), speed);
                if !args.json && !wrote {
                    command::print(HEADER)?;
                }
                wrote = true;
                command::print(&match args.json {
                    true => serde_json::to_string(&row)? + "\n",
                    false => line(&row),
                })?;
            }
        }
    }
    Ok(())
}

fn row(
    name: &str,
    precision: Precision,
    shape: UnetShape,
    arch_id: &str,
    speed: FrameSpeed,
) -> Row {
    let at = |share| percentile(&speed.latencies_ns, share);
    Row {
        build_commit: crate::commit(),
        arch_id: arch_id.to_owned(),
        model: name.to_owned(),
        dtype: precision.name(),
        batch: shape.batch,
        size: shape.size,
        fps: speed.fps(),
        samples_per_second: speed.fps() * shape.batch as f64,
        p50_ns: at(0.5),
        p95_ns: at(0.95),
        speed,
    }
}

/// Returns a percentile of some values.
pub(crate) fn percentile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}

const HEADER: &str = "\
| model | dtype | batch | size | frames/s | samples/s | ms a frame | p50 ms | p95 ms | host us | TFLOP/s | memory GiB | planned GiB |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
";

fn line(row: &Row) -> String {
    let Row { model, dtype, batch, size: [height, width], fps, p50_ns, p95_ns, speed, .. } = row;
    let samples = row.samples_per_second;
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let captured = if speed.captured { "" } else { " (not captured)" };
    format!(
        "| {model}{captured} | {dtype} | {batch} | {height}x{width} | {fps:.1} | {samples:.1} | {:.3} | {:.3} | {:.3} | {:.0} | {:.1} | {:.2} | {:.2} |\n",
        speed.frame_ns / 1e6,
        p50_ns / 1e6,
        p95_ns / 1e6,
        speed.host_ns / 1e3,
        speed.tflops(),
        gib(speed.memory.reserved_bytes),
        gib(speed.planned_bytes),
    )
}

fn profile(args: &ProfileArgs) -> anyhow::Result<()> {
    let file = args.trace.as_deref().map(OutFile::new).transpose()?;
    let device = args.load.device.open()?;
    let options = args.of.dtype.options(args.load.policy);
    let model = match (&args.of.model, &args.of.shape) {
        (Some(model), _) => UnetModel::load(&device, model, &options)?,
        (None, shape) => {
            UnetModel::random(&device, shape.as_deref().unwrap_or_default(), &options)?
        }
    };
    let shape = args.of.size.shape(model.config(), args.of.batch.into());
    let profile = model.profile(shape)?;
    let kernels = profile.trace.busy_ns();
    let mut text = format!(
        "a frame took {} ms with one launch per kernel, {} ms of it in {} kernels\n",
        milliseconds(profile.wall_ns as u64),
        milliseconds(kernels),
        profile.trace.launches.len()
    );
    text += &operators_table(&profile.operators, &profile.trace, &profile.ceilings);
    text += "\n| layer | launches | total ms | share | weights MiB | activations MiB |\n";
    text += "| --- | ---: | ---: | ---: | ---: | ---: |\n";
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    for layer in &profile.layers {
        text += &format!(
            "| {} | {} | {} | {:.1}% | {:.2} | {:.2} |\n",
            layer.name,
            layer.launches,
            milliseconds(layer.total_ns),
            layer.share * 100.0,
            mib(layer.weight_bytes),
            mib(layer.activation_bytes),
        );
    }
    text += &format!("\nmemory: {:.2} MiB reserved\n", mib(profile.memory.reserved_bytes));
    command::print(&text)?;
    if let Some(file) = file {
        file.write(profile.trace.chrome(&device.profile().name).as_bytes())?;
    }
    Ok(())
}

/// Returns the config of a folder, or without one that of a shape.
fn config_of(folder: Option<&PathBuf>, shape: &str) -> anyhow::Result<UnetConfig> {
    Ok(match folder {
        Some(folder) => UnetWeights::open(folder).map_err(LoadError::Folder)?.config().clone(),
        None => UnetModel::shape(shape)?,
    })
}

fn plan(args: &PlanArgs) -> anyhow::Result<()> {
    let FrameArgs { model, shape, .. } = &args.of;
    let config = config_of(model.as_ref(), shape.as_deref().unwrap_or_default())?;
    let shape = args.of.size.shape(&config, args.of.batch.into());
    let plan = UnetPlan::new(&config, shape.batch, shape.size, shape.tokens)?;
    let each = args.of.dtype.bytes();
    let mib = |values: u128| (values * each) as f64 / f64::from(1 << 20);
    let mut text = String::new();
    if args.layers {
        text += "| layer | parameters | weights MiB | activations MiB | GFLOP | launches |\n";
        text += "| --- | ---: | ---: | ---: | ---: | ---: |\n";
        for layer in &plan.layers {
            text += &format!(
                "| {} | {} | {:.2} | {:.2} | {:.3} | {} |\n",
                layer.name,
                layer.parameters,
                mib(layer.parameters),
                mib(layer.peak),
                layer.flops as f64 / 1e9,
                layer.launches
            );
        }
        text.push('\n');
    }
    let [height, width] = shape.size;
    text += &format!("batch            {} of {height}x{width}\n", shape.batch);
    text += &format!("parameters       {:.1} M\n", plan.parameters() as f64 / 1e6);
    text += &format!("work             {:.1} GFLOP a frame\n", plan.flops() as f64 / 1e9);
    text += &format!("launches         {}, plus one per split-k reduction\n", plan.launches());
    text += &format!("weights          {:.1} MiB\n", mib(plan.parameters()));
    let bytes = plan.activation_bytes(each as usize);
    let total = bytes + (plan.parameters() + plan.inputs) * each;
    let whole = |bytes: u128| bytes as f64 / f64::from(1 << 20);
    text += &format!("inputs           {:.1} MiB\n", mib(plan.inputs));
    text += &format!(
        "activations      {:.1} MiB, {:.1} MiB of them live at once\n",
        whole(bytes),
        mib(plan.peak() - plan.inputs)
    );
    text += &format!("total            {:.1} MiB, plus the split-k workspace\n", whole(total));
    let card = args.profile.as_deref().map(ArchProfile::card).transpose()?;
    let memory = card.as_ref().and_then(|card| card.memory_bytes.map(|bytes| (&card.name, bytes)));
    if let Some((name, memory)) = memory {
        text += &format!("device memory    {:.1} MiB, {name}\n", whole(memory.into()));
    }
    command::print(&text)?;
    match memory {
        Some((name, memory)) if total > memory.into() => bail!(
            "a frame does not fit on {name}\nhint: use a smaller sample (--size), fewer samples (--batch), or f16 (--dtype)"
        ),
        _ => Ok(()),
    }
}
