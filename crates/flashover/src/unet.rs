//! U-Nets of diffusers, frame by frame.
//!
//! [`UnetModel::load`] reads a folder, [`UnetModel::frames`] fixes a shape, and [`Frames::frame`] computes a frame. The kernels of a
//! frame are captured once and replayed.

use std::cell::Cell;
use std::fs;
use std::path::Path;

use arch::Backend;
use burn::tensor::FloatDType;
use models::Error;
use models::unet::{Unet, UnetOptions as LoadOptions, shapes};
use record::Summary;
use serde::Serialize;
use trace::{Operator, Recording, Trace};
use tune::Policy;
use tune::timing::Stopwatch;

use crate::context::{context, log_warnings, on_burn};
use crate::device::Device;
use crate::engine::Ceilings;
use crate::load_error::LoadError;
use crate::memory::{MemoryUsage, free_bytes};
use crate::options::Compute;
use crate::prepare::compute_dtype;

pub use models::unet::{
    Condition, Frames, LayerPlan, Method, Schedule, Steps, UnetConfig, UnetPlan, UnetShape,
    UnetWeights,
};

/// Options of loading a U-Net.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UnetOptions {
    /// Compute dtype. None takes the files' dtype; f32 on a CPU, on a device without the files' dtype, and on Vulkan for bf16.
    pub dtype: Option<Compute>,
    /// True to accumulate f16 matmuls and convolutions in f16, which is twice as fast on GeForce cards.
    pub f16_accumulation: bool,
    /// Policy for shapes without a tuned config. None takes `Policy::Default`.
    pub policy: Option<Policy>,
}

/// A U-Net with its weights on a device.
#[derive(Debug, Clone)]
pub struct UnetModel {
    unet: Unet,
    device: Device,
}

/// Speed of frames of one shape.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FrameSpeed {
    /// Nanoseconds from a frame's inputs on the host to its result on the host, of each frame alone.
    pub latencies_ns: Vec<f64>,
    /// Nanoseconds per frame, of frames that follow each other without waiting.
    pub frame_ns: f64,
    /// Median nanoseconds of the host's work for a frame: uploads and launches.
    pub host_ns: f64,
    /// Floating-point operations of a frame; a multiply-add counts as two.
    pub flops: u64,
    /// True if the frames were replayed from a graph.
    pub captured: bool,
    /// Bytes of the weights, the inputs and the memory that all results share.
    pub planned_bytes: u64,
    /// Device memory of this process after the frames.
    pub memory: MemoryUsage,
}

impl FrameSpeed {
    /// Returns the frames per second without waiting between frames.
    pub fn fps(&self) -> f64 {
        1e9 / self.frame_ns
    }

    /// Returns the TFLOP/s without waiting between frames.
    pub fn tflops(&self) -> f64 {
        self.flops as f64 / self.frame_ns / 1e3
    }
}

impl UnetModel {
    /// Loads a folder of diffusers with `config.json` and safetensors: that of the U-Net, or a pipeline's folder with `unet` in it.
    ///
    /// # Errors
    /// [`LoadError::Folder`] for a folder without a supported U-Net; [`LoadError::Model`] for weights that the device cannot hold;
    /// [`LoadError::DType`] and [`LoadError::UnetBf16`] for a compute dtype that the device lacks.
    pub fn load(
        device: &Device,
        folder: impl AsRef<Path>,
        options: &UnetOptions,
    ) -> Result<Self, LoadError> {
        let weights = UnetWeights::open(folder).map_err(LoadError::Folder)?;
        let load = load_options(device, options, weights.dtype())?;
        let ctx = context(device, options.policy.unwrap_or(Policy::Default))?;
        log_warnings(&ctx);
        check_weights(device, weights.config(), &load)?;
        let unet = Unet::load(&weights, &on_burn(device), ctx, load)?;
        Ok(Self { unet, device: device.clone() })
    }

    /// Returns a U-Net with random weights in a shape, for benchmarks.
    ///
    /// # Errors
    /// The errors of [`UnetModel::shape`] and [`UnetModel::load`].
    pub fn random(device: &Device, shape: &str, options: &UnetOptions) -> Result<Self, LoadError> {
        let config = Self::shape(shape)?;
        let load = load_options(device, options, FloatDType::F16)?;
        let ctx = context(device, options.policy.unwrap_or(Policy::Default))?;
        log_warnings(&ctx);
        check_weights(device, &config, &load)?;
        let unet = Unet::random(&config, &on_burn(device), ctx, load)?;
        Ok(Self { unet, device: device.clone() })
    }

    /// Returns the names of the shapes for [`UnetModel::random`].
    pub fn shapes() -> impl Iterator<Item = &'static str> {
        shapes::names()
    }

    /// Returns the config of a shape: the name of a known one, or the path of a `config.json`.
    ///
    /// # Errors
    /// [`LoadError::Shape`] for an unknown shape; [`LoadError::Folder`] for a file that is no config of a supported U-Net.
    pub fn shape(name: &str) -> Result<UnetConfig, LoadError> {
        if let Some(config) = shapes::named(name) {
            return Ok(config);
        }
        let path = Path::new(name);
        if path.extension().is_none_or(|extension| extension != "json") {
            let known = shapes::names().collect::<Vec<_>>().join(", ");
            return Err(LoadError::Shape { shape: name.to_owned(), known });
        }
        let read = |why| LoadError::Folder(Error::Read { path: path.to_owned(), why });
        let text = checkpoint::ends(path).and_then(|()| fs::read_to_string(path)).map_err(read)?;
        UnetConfig::from_json(&text).map_err(LoadError::Folder)
    }

    /// Returns the configuration.
    pub const fn config(&self) -> &UnetConfig {
        self.unet.config()
    }

    /// Checks, before anything is loaded, that a model and its frames fit in the free memory of a device. `value` is the bytes of a
    /// number.
    ///
    /// # Errors
    /// [`LoadError::Memory`]; [`LoadError::Model`] for a shape that the model cannot compute.
    pub fn fits(
        device: &Device,
        config: &UnetConfig,
        shape: UnetShape,
        value: u128,
    ) -> Result<(), LoadError> {
        let UnetShape { batch, size, tokens } = shape;
        let plan = UnetPlan::new(config, batch, size, tokens)?;
        let each = usize::try_from(value).unwrap_or(usize::MAX);
        let rest = (plan.parameters() + plan.inputs) * value;
        check_memory(device, "the model with a frame", plan.activation_bytes(each) + rest)
    }

    /// Allocates the inputs of frames of one shape.
    ///
    /// # Errors
    /// [`LoadError::Model`] for a shape that the model cannot compute; [`LoadError::Memory`] for one that the device has no memory
    /// for.
    pub fn frames(&self, shape: UnetShape) -> Result<Frames, LoadError> {
        let UnetShape { batch, size, tokens } = shape;
        let (plan, each) = (UnetPlan::new(self.config(), batch, size, tokens)?, self.value_bytes());
        let need = plan.activation_bytes(each) + plan.inputs * each as u128;
        check_memory(&self.device, "a frame", need)?;
        Ok(Frames::new(&self.unet, shape)?)
    }

    /// Bytes of a value.
    fn value_bytes(&self) -> usize {
        burn::tensor::DType::from(self.unet.dtype()).size()
    }

    /// Measures `repetitions` frames with random samples, after the frames that compile, tune and capture.
    ///
    /// # Errors
    /// The errors of [`UnetModel::frames`]; [`LoadError::Model`] if the device fails.
    pub fn measure(&self, shape: UnetShape, repetitions: usize) -> Result<FrameSpeed, LoadError> {
        const WARM: usize = 3;
        let mut frames = self.frames(shape)?;
        let bench = Bench::new(self, shape)?;
        for _ in 0..WARM {
            bench.frame(&mut frames)?;
        }
        let (mut latencies_ns, mut host) = (Vec::new(), Vec::new());
        for _ in 0..repetitions {
            let begin = Stopwatch::start();
            let _stream_guard = ops::stream_guard();
            bench.refresh(&mut frames)?;
            let rows = frames.run()?;
            host.push(begin.elapsed().as_nanos() as f64);
            frames.values(rows)?;
            latencies_ns.push(begin.elapsed().as_nanos() as f64);
        }
        let begin = Stopwatch::start();
        let _stream_guard = ops::stream_guard();
        let mut last = None;
        for _ in 0..repetitions {
            bench.refresh(&mut frames)?;
            last = Some(frames.run()?);
        }
        if let Some(rows) = last {
            frames.values(rows)?;
        }
        let frame_ns = begin.elapsed().as_nanos() as f64 / repetitions as f64;
        let host_ns = Summary::from_samples(&host).map_or(f64::NAN, |summary| summary.median);
        Ok(FrameSpeed {
            latencies_ns,
            frame_ns,
            host_ns,
            flops: u64::try_from(bench.plan.flops()).unwrap_or(u64::MAX),
            captured: frames.captured(),
            planned_bytes: self.planned(&bench.plan),
            memory: MemoryUsage::read(&self.device),
        })
    }
}

impl UnetModel {
    fn planned(&self, plan: &UnetPlan) -> u64 {
        let each = self.value_bytes();
        let rest = (plan.parameters() + plan.inputs) * each as u128;
        u64::try_from(plan.activation_bytes(each) + rest).unwrap_or(u64::MAX)
    }
}

/// Time and memory of a layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FrameLayer {
    /// Name of the layer in the checkpoint.
    pub name: String,
    /// Kernel launches.
    pub launches: usize,
    /// Nanoseconds of these launches.
    pub total_ns: u64,
    /// Share of the time of all kernels, from 0 to 1.
    pub share: f64,
    /// Bytes of its weights.
    pub weight_bytes: u64,
    /// Bytes of the largest set of activations that live at once while it runs.
    pub activation_bytes: u64,
}

/// Profile of a frame, per kernel.
#[derive(Debug, Clone)]
pub struct FrameProfile {
    /// All recorded events.
    pub trace: Trace,
    /// Nanoseconds on the host's clock, with one launch per kernel. Normal frames replay a graph and are faster.
    pub wall_ns: f64,
    /// Time per operator, longest first.
    pub operators: Vec<Operator>,
    /// Layers in the order of the forward pass.
    pub layers: Vec<FrameLayer>,
    /// Ceilings of the device.
    pub ceilings: Ceilings,
    /// Device memory after the frame.
    pub memory: MemoryUsage,
}

impl UnetModel {
    /// Computes frames as warm-up, and one more with every launch timed.
    ///
    /// # Errors
    /// [`LoadError::Recording`] during another recording; the errors of [`UnetModel::measure`].
    pub fn profile(&self, shape: UnetShape) -> Result<FrameProfile, LoadError> {
        let mut frames = self.frames(shape)?;
        let bench = Bench::new(self, shape)?;
        bench.frame(&mut frames)?;
        let recording = Recording::of_this_thread()?;
        let begin = Stopwatch::start();
        bench.frame(&mut frames)?;
        let wall_ns = begin.elapsed().as_nanos() as f64;
        let trace = recording.finish();
        let size = self.value_bytes() as u128;
        let bytes = |values: u128| u64::try_from(values * size).unwrap_or(u64::MAX);
        let find = |name: &str| bench.plan.layers.iter().find(|layer| layer.name == name);
        let layers = trace.layers(|name| find(name).is_some()).into_iter().map(|own| {
            let plan = find(&own.name);
            FrameLayer {
                launches: own.launches,
                total_ns: own.total_ns,
                share: own.share,
                weight_bytes: plan.map_or(0, |plan| bytes(plan.parameters)),
                activation_bytes: plan.map_or(0, |plan| bytes(plan.peak)),
                name: own.name,
            }
        });
        let (operators, layers) = (trace.operators(), layers.collect());
        let memory = MemoryUsage::read(&self.device);
        let ceilings = Ceilings::of_device(&self.device, self.unet.dtype())?;
        Ok(FrameProfile { wall_ns, operators, layers, ceilings, memory, trace })
    }
}

/// Inputs of frames to measure: the same numbers for each, at timesteps that count down.
struct Bench {
    plan: UnetPlan,
    timestep: Cell<f32>,
    samples: Vec<f32>,
    text: Option<Vec<f32>>,
    classes: Option<Vec<f32>>,
    pooled: Option<Vec<f32>>,
    sizes: Option<Vec<f32>>,
}

impl Bench {
    fn new(model: &UnetModel, shape: UnetShape) -> Result<Self, LoadError> {
        let (config, UnetShape { batch, size, tokens }) = (model.config(), shape);
        let numbers = |len: usize| -> Vec<f32> {
            (0..len).map(|i| ((i * 7919) % 2003) as f32 / 1001.5 - 1.0).collect()
        };
        let text_time = config.text_time;
        Ok(Self {
            plan: UnetPlan::new(config, batch, size, tokens)?,
            timestep: Cell::new(999.0),
            samples: numbers(batch * config.in_channels * size[0] * size[1]),
            text: config.cross.map(|width| numbers(batch * tokens * width)),
            classes: config.classes.map(|_| vec![0.0]),
            pooled: text_time.map(|own| numbers(batch * (own.width - 6 * own.channels))),
            sizes: text_time.map(|_| vec![512.0; 6 * batch]),
        })
    }

    fn condition<'a>(&'a self, timestep: &'a [f32]) -> Condition<'a> {
        Condition {
            timesteps: timestep,
            text: self.text.as_deref(),
            classes: self.classes.as_deref(),
            pooled_text: self.pooled.as_deref(),
            sizes: self.sizes.as_deref(),
        }
    }

    fn next(&self) -> f32 {
        let now = self.timestep.get();
        self.timestep.set(if now > 0.0 { now - 1.0 } else { 999.0 });
        now
    }

    fn refresh(&self, frames: &mut Frames) -> Result<(), Error> {
        frames.refresh(&self.samples, &self.condition(&[self.next()]))
    }

    fn frame(&self, frames: &mut Frames) -> Result<Vec<f32>, Error> {
        frames.frame(&self.samples, &self.condition(&[self.next()]))
    }
}

/// Samples from noise: one frame for each step. `condition` is that of all steps, apart from the timestep. Calls `seen` after each
/// step with its index. Returns samples `[batch, channels, height, width]`.
///
/// # Errors
/// [`Error::SampleChannels`] for a model whose result is not a sample; the errors of [`Frames::frame`]; those of `seen`, which stop
/// the sampling.
pub fn sample<E: From<Error>>(
    frames: &mut Frames,
    steps: &Steps,
    seed: u64,
    condition: &Condition<'_>,
    mut seen: impl FnMut(usize) -> Result<(), E>,
) -> Result<Vec<f32>, E> {
    let (config, UnetShape { batch, size, .. }) = (frames.unet().config(), frames.shape());
    let (own, out) = (config.in_channels, config.out_channels);
    if own != out {
        return Err(Error::SampleChannels { own, out }.into());
    }
    let mut sample = steps.noise(batch * config.in_channels * size[0] * size[1], seed);
    for (at, timestep) in steps.timesteps().iter().enumerate() {
        let factor = steps.input_factor(at) as f32;
        let input: Vec<f32> = sample.iter().map(|x| x * factor).collect();
        let timesteps = &[*timestep as f32];
        let result = frames.frame(&input, &Condition { timesteps, ..*condition })?;
        steps.step(at, &result, &mut sample);
        seen(at)?;
    }
    Ok(sample)
}

/// Refuses weights that the device has no memory for.
fn check_weights(
    device: &Device,
    config: &UnetConfig,
    options: &LoadOptions,
) -> Result<(), LoadError> {
    let size = options.dtype.map_or(4, |dtype| burn::tensor::DType::from(dtype).size());
    let parameters = UnetPlan::new(config, 1, [config.multiple(); 2], 1)?.parameters();
    check_memory(device, "the model", parameters * size as u128)
}

/// Refuses more than the free memory of a device, if its driver reports it.
fn check_memory(device: &Device, what: &'static str, need: u128) -> Result<(), LoadError> {
    let need = u64::try_from(need).unwrap_or(u64::MAX);
    match free_bytes(device) {
        Some(free) if need > free => Err(LoadError::Memory { what, need, free }),
        _ => Ok(()),
    }
}

fn load_options(
    device: &Device,
    options: &UnetOptions,
    file: FloatDType,
) -> Result<LoadOptions, LoadError> {
    let mut dtype = compute_dtype(device.profile(), options.dtype, file)?;
    if dtype == FloatDType::BF16 && device.profile().backend == Backend::Vulkan {
        match options.dtype {
            None => dtype = FloatDType::F32,
            Some(_) => return Err(LoadError::UnetBf16),
        }
    }
    let tf32 = options.dtype == Some(Compute::Tf32);
    let f16_accumulation = options.f16_accumulation;
    if f16_accumulation && dtype != FloatDType::F16 {
        let have = burn::tensor::DType::from(dtype);
        return Err(LoadError::Model(Error::Op(ops::OpError::F16Accumulation(have))));
    }
    Ok(LoadOptions { dtype: Some(dtype), tf32, f16_accumulation })
}
