//! Loaded models.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device, Distribution, TensorData};
use ops::Ctx;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use tune::timing::Stopwatch;

use crate::array::Array;
use crate::devices::Devices;
use crate::error::device_failed;
use crate::frames::Frames;
use crate::graph::{self, Graph, Type, ValueType};
use crate::passes::{self, Passes};
use crate::plan::Plan;
use crate::prepare::{opset, prepare};
use crate::run::Program;
use crate::source::Source;
use crate::{Fault, OnnxError, fold, precision};

/// Maximum number of sets of input shapes with frames.
const MAX_SHAPES: usize = 16;

/// Settings of a model.
#[derive(Clone, Default)]
pub struct Options {
    /// Lengths of named dimensions of the inputs.
    pub dimensions: BTreeMap<String, u64>,
    /// Dtype that replaces f32: f16, bf16 or f32.
    pub dtype: Option<DType>,
    /// Names of nodes, or of their outputs, that stay in f32.
    pub keep_f32: Vec<String>,
    /// Enabled passes.
    pub passes: Passes,
    /// Tuned configs of kernels.
    pub ctx: Ctx,
}

/// A model on a device.
pub struct Model {
    /// The graph for inputs of any shape, after rewrites that do not depend on shapes.
    graph: Graph,
    opset: i64,
    options: Options,
    devices: Arc<Devices>,
    outputs: Vec<Option<DType>>,
    /// Rewrites per pass before the shapes were known.
    rewritten: Counts,
    /// Frames by input shapes, most recent last.
    frames: Mutex<Vec<(Shapes, Frames)>>,
}

type Shapes = Vec<Vec<usize>>;
/// Number of rewrites per pass, with its name.
pub type Counts = Vec<(&'static str, usize)>;

/// Returns random tensors of declared types. Dimensions without a fixed length get `length`.
///
/// # Errors
/// [`OnnxError::Input`] for a value without a declared dtype and rank.
pub fn random(values: &[ValueType], length: usize) -> Result<Vec<TensorData>, OnnxError> {
    let each = |(at, value): (usize, &ValueType)| {
        let unknown = || OnnxError::Input {
            name: value.name.clone(),
            why: "cannot make random data: the file does not declare its dtype and rank".to_owned(),
        };
        let (dtype, shape) = value.dtype.zip(value.shape.as_ref()).ok_or_else(unknown)?;
        let shape: Vec<usize> = shape.iter().map(|own| own.parse().unwrap_or(length)).collect();
        let spread = if dtype.is_float() {
            Distribution::Normal(0.0, 1.0)
        } else {
            Distribution::Uniform(0.0, 2.0)
        };
        let mut rng = ChaCha8Rng::seed_from_u64(at as u64);
        Ok(TensorData::random::<f32, _, _>(shape, spread, &mut rng).convert_dtype(dtype))
    };
    values.iter().enumerate().map(each).collect()
}

impl Model {
    /// Loads a model.
    ///
    /// # Errors
    /// [`OnnxError`].
    pub fn open(
        path: impl AsRef<Path>,
        options: Options,
        device: &Device,
    ) -> Result<Self, OnnxError> {
        let (mut graph, opset) = read(path.as_ref(), &options.dimensions)?;
        precision::mark(&mut graph, &options.keep_f32)?;
        let outputs = graph.outputs.iter().map(|id| graph.values[*id].ty.dtype).collect();
        let device: DispatchDevice = device.clone().inner().as_dispatch().clone();
        let devices = Arc::new(Devices::new(device, options.ctx.clone()));
        let rewritten = rewrite(&mut graph, opset, &options.passes);
        // Report every unsupported node at load.
        Program::check(&graph, opset, &devices)?;
        let frames = Mutex::default();
        Ok(Self { graph, opset, options, devices, outputs, rewritten, frames })
    }

    /// Returns names and types of the inputs.
    pub fn inputs(&self) -> Vec<ValueType> {
        types(&self.graph, &self.graph.inputs)
    }

    /// Returns names and types of the outputs.
    pub fn outputs(&self) -> Vec<ValueType> {
        types(&self.graph, &self.graph.outputs)
    }

    /// Returns random inputs of the declared types. Dimensions without a fixed length get `length`.
    ///
    /// # Errors
    /// [`OnnxError::Input`] for an input without a declared dtype and rank.
    pub fn random(&self, length: usize) -> Result<Vec<TensorData>, OnnxError> {
        random(&self.inputs(), length)
    }

    /// Runs the model. Inputs are in the order of [`Model::inputs`].
    ///
    /// # Errors
    /// [`OnnxError`].
    pub fn run(&self, inputs: Vec<TensorData>) -> Result<Vec<TensorData>, OnnxError> {
        let mut frames = self.frames.lock().unwrap_or_else(PoisonError::into_inner);
        let own = self.prepare_frames(&mut frames, inputs)?;
        let _guard = ops::stream_guard();
        let made = own.run()?;
        self.read(made)
    }

    /// Runs the model repeatedly, and measures the runs.
    ///
    /// # Errors
    /// [`OnnxError`].
    pub fn measure(&self, inputs: Vec<TensorData>, times: usize) -> Result<Speed, OnnxError> {
        let mut frames = self.frames.lock().unwrap_or_else(PoisonError::into_inner);
        let started = Stopwatch::start();
        let own = self.prepare_frames(&mut frames, inputs)?;
        let _guard = ops::stream_guard();
        let device = Device::new(self.devices.device.clone());
        let wait = || device.sync().map_err(|why| device_failed(format!("{why:?}")));
        own.run()?;
        wait()?;
        let first = started.elapsed();
        for _ in 0..3 {
            own.run()?;
        }
        wait()?;
        let mut each = Vec::new();
        for _ in 0..times {
            let started = Stopwatch::start();
            own.run()?;
            wait()?;
            each.push(started.elapsed());
        }
        let started = Stopwatch::start();
        for _ in 0..times {
            own.run()?;
        }
        wait()?;
        let frame = started.elapsed() / times.max(1) as u32;
        Ok(Speed { first, frame, each, captured: own.captured(), nodes: own.nodes() })
    }

    fn read(&self, made: Vec<Array>) -> Result<Vec<TensorData>, OnnxError> {
        let data = made.iter().zip(&self.outputs).map(|(own, dtype)| {
            let data = own.to_data().map_err(device_failed)?;
            Ok(match dtype {
                Some(dtype) if dtype.is_float() => data.convert_dtype(*dtype),
                _ => data,
            })
        });
        data.collect()
    }

    /// Checks the number, types and shapes of inputs.
    fn check(&self, inputs: &[TensorData]) -> Result<(), OnnxError> {
        let ids = &self.graph.inputs;
        if inputs.len() != ids.len() {
            let (have, need) = (inputs.len(), ids.len());
            return Err(OnnxError::Argument(format!("expected {need} inputs, got {have}")));
        }
        for (id, data) in ids.iter().zip(inputs) {
            let value = &self.graph.values[*id];
            value
                .ty
                .fits(data.dtype(), data.shape())
                .map_err(|why| OnnxError::Input { name: value.name.clone(), why })?;
        }
        Ok(())
    }

    /// Returns the frames for the shapes of these inputs, updated with these inputs.
    fn prepare_frames<'a>(
        &self,
        frames: &'a mut Vec<(Shapes, Frames)>,
        inputs: Vec<TensorData>,
    ) -> Result<&'a mut Frames, OnnxError> {
        self.check(&inputs)?;
        let shapes: Shapes = inputs.iter().map(|own| own.shape().to_vec()).collect();
        let own = match frames.iter().position(|(own, _)| *own == shapes) {
            Some(at) => {
                let mut own = frames.remove(at).1;
                for (at, data) in inputs.into_iter().enumerate() {
                    own.update(at, data)?;
                }
                own
            }
            None => {
                let program = Arc::new(self.program(&shapes)?);
                Frames::new(program, self.devices.clone(), inputs)
            }
        };
        if frames.len() == MAX_SHAPES {
            frames.remove(0);
        }
        frames.push((shapes, own));
        Ok(&mut frames.last_mut().expect("pushed").1)
    }

    /// Runs the model kernel by kernel, without a device graph, for a trace. Results are not read.
    ///
    /// # Errors
    /// [`OnnxError`].
    pub fn launch(&self, inputs: Vec<TensorData>) -> Result<(), OnnxError> {
        let mut frames = self.frames.lock().unwrap_or_else(PoisonError::into_inner);
        let own = self.prepare_frames(&mut frames, inputs)?;
        let _guard = ops::stream_guard();
        own.launch().map(drop)
    }

    /// Returns the rewrites of each pass for inputs of these shapes, and the memory plan.
    ///
    /// # Errors
    /// [`OnnxError`].
    pub fn plan(&self, shapes: &[Vec<usize>]) -> Result<(Counts, Plan), OnnxError> {
        let (graph, counts) = self.concrete(shapes)?;
        Ok((counts, Plan::new(&graph)))
    }

    /// Returns the number of shapes of inputs that frames are kept for.
    #[cfg(test)]
    pub(crate) fn shapes_kept(&self) -> usize {
        self.frames.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Returns the program for inputs of these shapes.
    pub(crate) fn program(&self, shapes: &[Vec<usize>]) -> Result<Program, OnnxError> {
        Program::new(&self.concrete(shapes)?.0, self.opset, &self.devices)
    }

    /// Returns the graph for inputs of these shapes, and the rewrites of each pass.
    fn concrete(&self, shapes: &[Vec<usize>]) -> Result<(Graph, Counts), OnnxError> {
        let mut graph = self.graph.clone();
        for (id, shape) in self.graph.inputs.iter().zip(shapes) {
            let shape = shape.iter().map(|len| Some(*len)).collect();
            graph.values[*id].ty.refine(Type { dtype: None, shape: Some(shape) });
        }
        let more = rewrite(&mut graph, self.opset, &self.options.passes);
        let counts =
            self.rewritten.iter().zip(more).map(|((name, before), (_, own))| (*name, before + own));
        let counts = counts.collect();
        if let Some(dtype) = self.options.dtype.filter(|dtype| *dtype != DType::F32) {
            precision::convert(&mut graph, dtype);
        }
        if std::env::var("DBG").is_ok() {
            for node in &graph.nodes {
                eprintln!(
                    "{} {:?} {:?} -> {:?}",
                    node.op,
                    node.attributes,
                    node.inputs
                        .iter()
                        .flatten()
                        .map(|id| (
                            *id,
                            graph.values[*id].ty.dtype,
                            graph.values[*id].constant.is_some()
                        ))
                        .collect::<Vec<_>>(),
                    node.outputs
                        .iter()
                        .flatten()
                        .map(|id| (*id, graph.values[*id].ty.dtype))
                        .collect::<Vec<_>>()
                );
            }
        }
        Ok((graph, counts))
    }
}

/// Measured run times.
#[derive(Debug, Clone)]
pub struct Speed {
    /// The first run, including compilation.
    pub first: Duration,
    /// Mean of back-to-back runs.
    pub frame: Duration,
    /// Single runs, each including launch and synchronization.
    pub each: Vec<Duration>,
    /// Nodes that run as device graphs.
    pub captured: usize,
    /// All nodes.
    pub nodes: usize,
}

fn types(graph: &Graph, ids: &[usize]) -> Vec<ValueType> {
    ids.iter().map(|id| ValueType::from_value(&graph.values[*id])).collect()
}

/// Reads a file, and returns its graph and opset.
fn read(path: &Path, dimensions: &BTreeMap<String, u64>) -> Result<(Graph, i64), OnnxError> {
    let Source { mut model, mut files } = Source::open(path)?;
    prepare(&mut model, dimensions)?;
    let opset = opset(&model).unwrap_or(1);
    let graph = graph::read(model.graph.expect("decoded with a graph"), &mut files)?;
    Ok((graph, opset))
}

/// Contents of a file, read without a device.
#[derive(Debug, Clone)]
pub struct Inspection {
    /// Opset of the domain `ai.onnx`.
    pub opset: i64,
    /// Names and types of the inputs.
    pub inputs: Vec<ValueType>,
    /// Names and types of the outputs.
    pub outputs: Vec<ValueType>,
    /// Number of nodes per operator in the file.
    pub operators: BTreeMap<String, usize>,
    /// Number of nodes per operator after the passes.
    pub rewritten: BTreeMap<String, usize>,
    /// Number of rewrites per pass.
    pub passes: Counts,
    /// Nodes that cannot run.
    pub unserved: Vec<Fault>,
    /// Memory plan.
    pub plan: Plan,
}

/// Reads a file, and returns its contents, the rewrites of the passes and unsupported nodes.
///
/// # Errors
/// [`OnnxError`] for a file that is not a valid model. Unsupported nodes are not an error.
pub fn inspect(
    path: impl AsRef<Path>,
    dimensions: &BTreeMap<String, u64>,
    on: &Passes,
) -> Result<Inspection, OnnxError> {
    let (mut graph, opset) = read(path.as_ref(), dimensions)?;
    let count = |graph: &Graph| {
        let mut counts = BTreeMap::new();
        graph.nodes.iter().for_each(|node| *counts.entry(node.op.clone()).or_default() += 1);
        counts
    };
    let (operators, host) = (count(&graph), Devices::host());
    let passes = rewrite(&mut graph, opset, on);
    let unserved = match Program::check(&graph, opset, &host) {
        Ok(()) => Vec::new(),
        Err(OnnxError::Unserved(faults)) => faults,
        Err(why) => return Err(why),
    };
    Ok(Inspection {
        opset,
        inputs: types(&graph, &graph.inputs),
        outputs: types(&graph, &graph.outputs),
        operators,
        rewritten: count(&graph),
        passes,
        unserved,
        plan: Plan::new(&graph),
    })
}

/// Folds constants, and runs the passes.
fn rewrite(graph: &mut Graph, opset: i64, on: &Passes) -> Counts {
    fold::fold(graph, opset, &Devices::host());
    graph.sweep();
    passes::apply(graph, opset, on)
}
