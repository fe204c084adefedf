//! ONNX graphs: reads files, and runs them with our kernels.
//!
//! ```no_run
//! use flashover::onnx::{Graph, GraphOptions};
//! use flashover::Device;
//!
//! let device = Device::auto()?;
//! let graph = Graph::open("model.onnx", &device, &GraphOptions::default())?;
//! let inputs = graph.random(1)?;
//! let outputs = graph.run(inputs)?;
//! println!("{:?} has the shape {:?}", graph.outputs()[0].name, outputs[0].shape());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [Passes](PASSES) rewrite the graph, its results share one planned buffer, and its kernels are
//! captured and replayed per set of input shapes. On the backend CPU, graphs run on Burn's own CPU
//! backend, which compiles nothing.

use std::collections::BTreeMap;
use std::path::Path;

use arch::Backend;
use burn::tensor::{DType, FloatDType, TensorData};
use trace::{AlreadyRecording, Operator, Recording, Trace};
use tune::{CacheError, Policy};

use crate::context::{context, log_warnings, on_burn};
use crate::device::Device;
use crate::device_error::DeviceError;
use crate::engine::Ceilings;
use crate::options::Compute;

pub use ::onnx::conformance::{Outcome, Test, Tolerance, tests};
pub use ::onnx::layers;
pub use ::onnx::passes::{PASSES, Pass, Passes};
pub use ::onnx::{
    Counts, Fault, Inspection, OnnxError, Plan, Speed, ValueType, decode_tensor, encode_tensor,
    inspect, random,
};

/// Settings of a graph.
#[derive(Debug, Clone, Default)]
pub struct GraphOptions {
    /// Lengths of named dimensions of the inputs.
    pub dimensions: BTreeMap<String, u64>,
    /// Dtype that replaces f32. None keeps the dtypes of the file.
    pub dtype: Option<Compute>,
    /// Names of nodes, or of their outputs, that stay in f32.
    pub keep_f32: Vec<String>,
    /// Enabled graph passes.
    pub passes: Passes,
    /// Policy for shapes without a tuned config. None means `Policy::Default`.
    pub policy: Option<Policy>,
}

/// An error of loading or running a graph.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// A file that cannot be read, or a graph that cannot run.
    #[error(transparent)]
    Onnx(#[from] OnnxError),
    /// The tune cache cannot be read.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A device that failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Another recording is active.
    #[error(transparent)]
    Recording(#[from] AlreadyRecording),
    /// A dtype that graphs do not support.
    #[error("expected f32, f16 or bf16 for a graph, got tf32\nhint: use f32")]
    Tf32,
}

/// A graph on a device.
pub struct Graph {
    model: ::onnx::Model,
    device: Device,
    dtype: FloatDType,
}

/// Time of a run per operator and per node.
#[derive(Debug, Clone)]
pub struct GraphProfile {
    /// All recorded events.
    pub trace: Trace,
    /// Time per operator, longest first.
    pub operators: Vec<Operator>,
    /// Launches and nanoseconds of each node, in the order of the run.
    pub nodes: Vec<(String, usize, u64)>,
    /// Ceilings of the device.
    pub ceilings: Ceilings,
}

impl Graph {
    /// Reads a file, and prepares its graph for a device.
    ///
    /// # Errors
    /// [`GraphError`]. One error lists every unsupported node.
    pub fn open(
        path: impl AsRef<Path>,
        device: &Device,
        options: &GraphOptions,
    ) -> Result<Self, GraphError> {
        let (own, burn) = prepared(device, options)?;
        let dtype = own.dtype.unwrap_or(DType::F32);
        let model = ::onnx::Model::open(path, own, &burn)?;
        Ok(Self { model, device: device.clone(), dtype: dtype.into() })
    }

    /// Returns names and types of the inputs.
    pub fn inputs(&self) -> Vec<ValueType> {
        self.model.inputs()
    }

    /// Returns names and types of the outputs.
    pub fn outputs(&self) -> Vec<ValueType> {
        self.model.outputs()
    }

    /// Returns random inputs of the declared types. Dimensions without a fixed length get `length`.
    ///
    /// # Errors
    /// [`OnnxError::Input`] for an input without a declared dtype and rank.
    pub fn random(&self, length: usize) -> Result<Vec<TensorData>, OnnxError> {
        self.model.random(length)
    }

    /// Runs the graph. Inputs are in the order of [`Graph::inputs`], outputs in the order of
    /// [`Graph::outputs`].
    ///
    /// # Errors
    /// [`OnnxError`].
    pub fn run(&self, inputs: Vec<TensorData>) -> Result<Vec<TensorData>, OnnxError> {
        self.model.run(inputs)
    }

    /// Runs the graph repeatedly, and measures the runs.
    ///
    /// # Errors
    /// [`OnnxError`].
    pub fn measure(&self, inputs: Vec<TensorData>, times: usize) -> Result<Speed, OnnxError> {
        self.model.measure(inputs, times)
    }

    /// Returns the rewrites of each pass for inputs of these shapes, and the memory plan.
    ///
    /// # Errors
    /// [`OnnxError`].
    pub fn plan(&self, shapes: &[Vec<usize>]) -> Result<(Counts, Plan), OnnxError> {
        self.model.plan(shapes)
    }

    /// Runs an ONNX backend test.
    pub fn test(
        test: &Test,
        tolerance: Tolerance,
        device: &Device,
        options: &GraphOptions,
    ) -> Result<Outcome, GraphError> {
        let (own, burn) = prepared(device, options)?;
        Ok(::onnx::conformance::check(test, tolerance, &own, &burn))
    }

    /// Runs the graph twice as warm-up, then once with every launch timed.
    ///
    /// # Errors
    /// [`GraphError`].
    pub fn profile(&self, inputs: Vec<TensorData>) -> Result<GraphProfile, GraphError> {
        self.model.run(inputs.clone())?;
        self.model.launch(inputs.clone())?;
        let recording = Recording::of_this_thread()?;
        self.model.launch(inputs)?;
        let trace = recording.finish();
        let nodes = trace.layers(|_| true).into_iter();
        let nodes = nodes.map(|own| (own.name, own.launches, own.total_ns)).collect();
        let ceilings = Ceilings::of_device(&self.device, self.dtype)?;
        Ok(GraphProfile { operators: trace.operators(), nodes, ceilings, trace })
    }
}

/// Returns the options of the crate `onnx`, and the device for graphs.
fn prepared(
    device: &Device,
    options: &GraphOptions,
) -> Result<(::onnx::Options, burn::tensor::Device), GraphError> {
    let dtype = match options.dtype {
        None | Some(Compute::F32) => DType::F32,
        Some(Compute::F16) => DType::F16,
        Some(Compute::Bf16) => DType::BF16,
        Some(Compute::Tf32) => return Err(GraphError::Tf32),
    };
    let ctx = context(device, options.policy.unwrap_or(Policy::Default))?;
    log_warnings(&ctx);
    let own = ::onnx::Options {
        dimensions: options.dimensions.clone(),
        dtype: options.dtype.map(|_| dtype),
        keep_f32: options.keep_f32.clone(),
        passes: options.passes.clone(),
        ctx,
    };
    let burn = match device.backend() {
        Backend::Cpu => burn::tensor::Device::flex(),
        _ => on_burn(device),
    };
    Ok((own, burn))
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "graph on {:?}", self.device)
    }
}
