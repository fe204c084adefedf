//! `flashover unet run`: frames of given inputs, or samples from noise.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{anyhow, bail};
use clap::ValueEnum;
use command::OutFile;
use flashover::LoadError;
use flashover::device::DType;
use flashover::host::HostTensor;
use flashover::unet::{
    Condition, Method, Schedule, UnetConfig, UnetModel, UnetOptions, UnetShape, sample,
};
use tune::timing::Stopwatch;

use super::{LoadArgs, Precision, Size, percentile, size};
use crate::interrupt;
use crate::op_command::{encoded, read_tensors};

#[derive(clap::Args)]
pub(super) struct RunArgs {
    /// Folder with config.json and safetensors of diffusers
    #[arg(long, short)]
    model: PathBuf,
    /// Safetensors file with sample [batch, channels, height, width] and timestep [batch] or [1]; text [batch, tokens, width],
    /// classes [batch] or [1], pooled [batch, width] and sizes [batch, 6] if the model reads them. With --steps, only these last
    /// four
    #[arg(long, value_name = "FILE", required_unless_present = "steps")]
    input: Option<PathBuf>,
    /// Safetensors file for the result of the last frame, `sample`; replaces an existing file
    #[arg(long, short, value_name = "FILE", required_unless_present = "picture")]
    output: Option<PathBuf>,
    /// Number of frames
    #[arg(long, default_value_t = 1, conflicts_with = "steps", value_parser = clap::value_parser!(u32).range(1..))]
    frames: u32,
    /// Sample from noise in this many steps
    #[arg(long)]
    steps: Option<usize>,
    /// PNG file for the sampled pictures, side by side; replaces an existing file
    #[arg(long, value_name = "FILE", requires = "steps")]
    picture: Option<PathBuf>,
    /// Method of the steps [default: that of the folder's scheduler_config.json, or ddim]
    #[arg(long, requires = "steps")]
    method: Option<MethodArg>,
    /// Random seed of the noise
    #[arg(long, default_value_t = 0, requires = "steps")]
    seed: u64,
    /// Pictures to sample
    #[arg(long, short, default_value_t = 1, requires = "steps", value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// Height and width of the pictures: one number, or HEIGHTxWIDTH [default: the sample size in config.json, or 64]
    #[arg(long, requires = "steps", value_parser = size)]
    size: Option<Size>,
    /// Compute dtype [default: that of the files, or f32 on a CPU]
    #[arg(long)]
    dtype: Option<Precision>,
    #[command(flatten)]
    load: LoadArgs,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum MethodArg {
    Ddim,
    Euler,
}

pub(super) fn run(args: &RunArgs) -> anyhow::Result<()> {
    let [target, picture] = outputs(args)?;
    let inputs = Inputs::read(args)?;
    let schedule = args.steps.map(|_| schedule(args)).transpose()?;
    let device = args.load.device.open()?;
    let options = match args.dtype {
        Some(precision) => precision.options(args.load.policy),
        None => UnetOptions { policy: Some(args.load.policy), ..UnetOptions::default() },
    };
    let model = UnetModel::load(&device, &args.model, &options)?;
    let config = model.config();
    let color = picture.is_some().then(|| color(config.out_channels)).transpose()?;
    let shape = match inputs.sample(config)? {
        Some(shape) => shape,
        None => {
            let size = args.size.map(|Size(size)| size).or(config.sample_size).unwrap_or([64, 64]);
            UnetShape { batch: args.batch.into(), size, tokens: inputs.tokens() }
        }
    };
    let given = inputs.values(config, shape)?;
    let find = |name: &str| given.get(name).map(Vec::as_slice);
    let condition = Condition {
        timesteps: find("timestep").unwrap_or_default(),
        text: find("text"),
        classes: find("classes"),
        pooled_text: find("pooled"),
        sizes: find("sizes"),
    };
    let _listening = interrupt::listen()?;
    let mut frames = model.frames(shape)?;
    let (mut result, mut times) = (Vec::new(), Times::start());
    match (args.steps, schedule) {
        (Some(count), Some(schedule)) => {
            let steps = schedule.steps(count)?;
            let seen = |_| {
                times.lap();
                Ok::<_, anyhow::Error>(interrupt::check("stopped")?)
            };
            result = sample(&mut frames, &steps, args.seed, &condition, seen)?;
        }
        _ => {
            for _ in 0..args.frames {
                interrupt::check("stopped")?;
                result = frames.frame(find("sample").unwrap_or_default(), &condition)?;
                times.lap();
            }
        }
    }
    times.report();
    if let Some(target) = target {
        let dims = [shape.batch, config.out_channels, shape.size[0], shape.size[1]];
        let output = HostTensor::from_f32(&dims, &result)?;
        target.write(&encoded(&BTreeMap::from([("sample".to_owned(), output)]))?)?;
    }
    if let (Some(picture), Some(color)) = (picture, color) {
        picture.write(&png_of(&result, shape, config.out_channels, color)?)?;
    }
    Ok(())
}

/// Times of frames, from inputs on the host to results on the host.
struct Times {
    last: Stopwatch,
    milliseconds: Vec<f64>,
}

impl Times {
    fn start() -> Self {
        Self { last: Stopwatch::start(), milliseconds: Vec::new() }
    }

    /// Ends a frame, and begins the next.
    fn lap(&mut self) {
        self.milliseconds.push(self.last.elapsed().as_secs_f64() * 1e3);
        self.last = Stopwatch::start();
    }

    /// Prints the speed of the frames after those that compile and capture, to stderr.
    fn report(&self) {
        const WARM: usize = 2;
        let count = self.milliseconds.len();
        let Some(steady) = self.milliseconds.get(WARM..).filter(|steady| !steady.is_empty()) else {
            return;
        };
        let [p50, p95] = [0.5, 0.95].map(|share| percentile(steady, share));
        let fps = steady.len() as f64 * 1e3 / steady.iter().sum::<f64>();
        command::note!(
            "{count} frames; after the first {WARM}: {fps:.1} FPS, p50 {p50:.3} ms, p95 {p95:.3} ms"
        );
    }
}

/// Returns the files for the result and the picture. They replace neither each other nor a file that this command reads.
fn outputs(args: &RunArgs) -> anyhow::Result<[Option<OutFile>; 2]> {
    let file = |path: &Option<PathBuf>| path.as_deref().map(OutFile::new).transpose();
    let (target, picture) = (file(&args.output)?, file(&args.picture)?);
    if let (Some(target), Some(picture)) = (&target, &picture)
        && target.is_same(picture)
    {
        bail!("--output and --picture are the same file\nhint: choose another output file");
    }
    let folders = ["", "unet", "scheduler"].map(|name| args.model.join(name));
    let listed = folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten();
    let of_model = listed.filter_map(Result::ok).map(|entry| entry.path());
    let others = args.input.clone().into_iter().chain(Schedule::file(&args.model));
    let read: Vec<PathBuf> = of_model.filter(|path| path.is_file()).chain(others).collect();
    for output in [&target, &picture].into_iter().flatten() {
        let same = |path: &&PathBuf| OutFile::new(path).is_ok_and(|path| path.is_same(output));
        if let Some(path) = read.iter().find(same) {
            let path = path.display();
            bail!(
                "the output would replace {path}, which is read\nhint: choose another output file"
            );
        }
    }
    Ok([target, picture])
}

/// Inputs of frames from a file.
struct Inputs(BTreeMap<String, HostTensor>);

impl Inputs {
    fn read(args: &RunArgs) -> anyhow::Result<Self> {
        let inputs = args.input.as_deref().map(read_tensors).transpose()?.unwrap_or_default();
        let own = ["sample", "timestep"];
        if args.steps.is_none() {
            if let Some(name) = own.into_iter().find(|name| !inputs.contains_key(*name)) {
                bail!("the input has no `{name}`\nhint: add the {name} of a frame");
            }
        } else if let Some(name) = own.into_iter().find(|name| inputs.contains_key(*name)) {
            bail!(
                "sampling does not read `{name}`\nhint: remove it from the input, or leave out --steps"
            );
        }
        Ok(Self(inputs))
    }

    /// Returns the shape of the frames, if the input has a sample.
    fn sample(&self, config: &UnetConfig) -> anyhow::Result<Option<UnetShape>> {
        let Some(sample) = self.0.get("sample") else { return Ok(None) };
        match *sample.shape() {
            [batch, channels, height, width] if channels == config.in_channels => {
                Ok(Some(UnetShape { batch, size: [height, width], tokens: self.tokens() }))
            }
            ref have => bail!(
                "expected a sample of shape [batch, {}, height, width], got {have:?}\nhint: reshape it",
                config.in_channels
            ),
        }
    }

    /// Returns the tokens of the text; 0 without one.
    fn tokens(&self) -> usize {
        match self.0.get("text").map(HostTensor::shape) {
            Some(&[_, tokens, _]) => tokens,
            _ => 0,
        }
    }

    /// Returns the values of all inputs, after a check of their shapes.
    fn values(
        &self,
        config: &UnetConfig,
        shape: UnetShape,
    ) -> anyhow::Result<BTreeMap<String, Vec<f32>>> {
        let UnetShape { batch, size: [height, width], tokens } = shape;
        let wide = config.text_time.map(|own| own.width - 6 * own.channels);
        let read = [
            ("sample", Some(vec![batch, config.in_channels, height, width])),
            ("timestep", Some(vec![batch])),
            ("text", config.cross.map(|features| vec![batch, tokens, features])),
            ("classes", config.classes.map(|_| vec![batch])),
            ("pooled", wide.map(|features| vec![batch, features])),
            ("sizes", wide.map(|_| vec![batch, 6])),
        ];
        for (name, need) in &read {
            let Some(need) = need else { continue };
            let shape = match *need.as_slice() {
                [batch, _, width] => format!("[{batch}, tokens, {width}]"),
                _ => format!("{need:?}"),
            };
            match self.0.get(*name).map(HostTensor::shape) {
                // Of the sampler.
                None if ["sample", "timestep"].contains(name) => {}
                None => bail!(
                    "the model reads `{name}`, which the input lacks\nhint: add {name} of shape {shape}"
                ),
                // One for all samples.
                Some([] | [1]) if need.len() == 1 => {}
                Some(have) if have != need => {
                    bail!("expected {name} of shape {shape}, got {have:?}\nhint: reshape it")
                }
                Some(_) => {}
            }
        }
        let known = |name: &str| read.iter().any(|(own, need)| *own == name && need.is_some());
        if let Some(name) = self.0.keys().find(|name| !known(name)) {
            bail!("the model does not read `{name}`\nhint: remove it from the input");
        }
        let value = |(name, tensor): (&'_ String, &HostTensor)| {
            let values = numbers(tensor)?;
            match values.iter().all(|value| value.is_finite()) {
                true => Ok((name.clone(), values)),
                false => Err(anyhow!(
                    "`{name}` has values that are infinite or NaN\nhint: check how it was made"
                )),
            }
        };
        self.0.iter().map(value).collect()
    }
}

/// Returns floats or integers as f32.
fn numbers(tensor: &HostTensor) -> anyhow::Result<Vec<f32>> {
    Ok(match tensor.dtype() {
        DType::I32 => {
            let words = tensor.bytes().as_chunks::<4>().0;
            words.iter().map(|word| i32::from_le_bytes(*word) as f32).collect()
        }
        _ => tensor.to_f32()?,
    })
}

/// Returns the schedule of the model's folder, with the method of the options.
fn schedule(args: &RunArgs) -> anyhow::Result<Schedule> {
    let own = Schedule::open(&args.model).map_err(LoadError::Folder)?;
    let schedule = match own {
        Some(own) => own,
        None => {
            log::warn!("no scheduler_config.json: noise of 1000 timesteps, and DDIM by default");
            Schedule::from_json(r#"{"_class_name": "DDIMScheduler"}"#)?
        }
    };
    Ok(match args.method {
        None => schedule,
        Some(MethodArg::Ddim) => schedule.with_method(Method::Ddim),
        Some(MethodArg::Euler) => schedule.with_method(Method::Euler),
    })
}

fn color(channels: usize) -> anyhow::Result<png::ColorType> {
    match channels {
        1 => Ok(png::ColorType::Grayscale),
        3 => Ok(png::ColorType::Rgb),
        _ => bail!(
            "expected a model with 1 or 3 channels for --picture, got {channels}\nhint: write the samples with --output, and \
             decode them with the model's VAE"
        ),
    }
}

/// Encodes samples from -1 to 1 as pictures side by side.
fn png_of(
    samples: &[f32],
    shape: UnetShape,
    channels: usize,
    color: png::ColorType,
) -> anyhow::Result<Vec<u8>> {
    let UnetShape { batch, size: [height, width], .. } = shape;
    let value = |picture: usize, channel: usize, y: usize, x: usize| {
        let at = ((picture * channels + channel) * height + y) * width + x;
        ((samples[at].clamp(-1.0, 1.0) + 1.0) * 127.5).round() as u8
    };
    let rows = (0..height).flat_map(|y| {
        (0..batch).flat_map(move |picture| {
            (0..width)
                .flat_map(move |x| (0..channels).map(move |channel| value(picture, channel, y, x)))
        })
    });
    let rows: Vec<u8> = rows.collect();
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, (batch * width) as u32, height as u32);
    encoder.set_color(color);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&rows)?;
    writer.finish()?;
    Ok(bytes)
}
