//! Models that are loaded to run.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device, TensorData};
use ops::Ctx;

use crate::array::Array;
use crate::devices::Devices;
use crate::error::invalid;
use crate::graph::{self, Graph, Type};
use crate::passes::{self, Passes};
use crate::prepare::{opset, prepare};
use crate::run::Program;
use crate::source::Source;
use crate::{OnnxError, fold, precision};

/// Shapes of inputs that a model keeps a program for.
const MAX_PROGRAMS: usize = 16;

/// How a model runs.
#[derive(Clone, Default)]
pub struct Options {
    /// Numbers for dimensions of the inputs that have names.
    pub dimensions: BTreeMap<String, u64>,
    /// Type of floats, in place of f32: f16, bf16 or f32.
    pub dtype: Option<DType>,
    /// Names of nodes, or of values that they make, which keep f32.
    pub keep_f32: Vec<String>,
    /// Passes that are on.
    pub passes: Passes,
    /// Tuned configs of kernels.
    pub ctx: Ctx,
}

/// A model on a device.
pub struct Model {
    /// The graph for inputs of any shape, rewritten as far as their shapes do not matter.
    graph: Graph,
    opset: i64,
    options: Options,
    devices: Arc<Devices>,
    outputs: Vec<Option<DType>>,
    /// Programs by the shapes of their inputs, the latest last.
    programs: Mutex<Vec<(Shapes, Arc<Program>)>>,
}

type Shapes = Vec<Vec<usize>>;

impl Model {
    /// Loads a model.
    ///
    /// # Errors
    /// [`OnnxError`].
    pub fn open(path: impl AsRef<Path>, options: Options, device: &Device) -> Result<Self, OnnxError> {
        let Source { mut model, mut files } = Source::open(path.as_ref())?;
        prepare(&mut model, &options.dimensions)?;
        let opset = opset(&model).unwrap_or(1);
        let mut graph = graph::read(model.graph.expect("decoded with a graph"), &mut files)?;
        let outputs = graph.outputs.iter().map(|id| graph.values[*id].ty.dtype).collect();
        let device: DispatchDevice = device.clone().inner().as_dispatch().clone();
        let devices = Arc::new(Devices::new(device, options.ctx.clone()));
        rewrite(&mut graph, opset, &options.passes);
        // Every node that is not served is told before a run.
        Program::check(&graph, opset, &devices)?;
        let programs = Mutex::default();
        Ok(Self { graph, opset, options, devices, outputs, programs })
    }

    /// Returns the names of the inputs.
    pub fn inputs(&self) -> Vec<&str> {
        self.names(&self.graph.inputs)
    }

    /// Returns the names of the outputs.
    pub fn outputs(&self) -> Vec<&str> {
        self.names(&self.graph.outputs)
    }

    fn names(&self, ids: &[usize]) -> Vec<&str> {
        ids.iter().map(|id| self.graph.values[*id].name.as_str()).collect()
    }

    /// Runs the model. Inputs are in the order of [`Model::inputs`].
    ///
    /// # Errors
    /// [`OnnxError`].
    pub fn run(&self, inputs: Vec<TensorData>) -> Result<Vec<TensorData>, OnnxError> {
        self.check(&inputs)?;
        let program = self.program(inputs.iter().map(|own| own.shape().to_vec()).collect())?;
        let given =
            inputs.into_iter().map(|own| Array::from_data(own, &self.devices.device)).collect();
        let outputs = program.run(given)?;
        let data = outputs.iter().zip(&self.outputs).map(|(own, dtype)| {
            let data = own.to_data().map_err(invalid)?;
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
            return Err(invalid(format!("it has {need} inputs, and {have} are given")));
        }
        for (id, data) in ids.iter().zip(inputs) {
            let value = &self.graph.values[*id];
            value.ty.fits(data.dtype(), data.shape()).map_err(|why| OnnxError::Input {
                name: value.name.clone(),
                why,
            })?;
        }
        Ok(())
    }

    /// Returns the program for inputs of these shapes.
    fn program(&self, shapes: Shapes) -> Result<Arc<Program>, OnnxError> {
        let lock = || self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        let mut programs = lock();
        if let Some(at) = programs.iter().position(|(own, _)| *own == shapes) {
            let found = programs.remove(at);
            let program = found.1.clone();
            programs.push(found);
            return Ok(program);
        }
        drop(programs);
        let mut graph = self.graph.clone();
        for (id, shape) in self.graph.inputs.iter().zip(&shapes) {
            let shape = shape.iter().map(|len| Some(*len)).collect();
            graph.values[*id].ty.learn(Type { dtype: None, shape: Some(shape) });
        }
        rewrite(&mut graph, self.opset, &self.options.passes);
        if let Some(dtype) = self.options.dtype.filter(|dtype| *dtype != DType::F32) {
            precision::convert(&mut graph, dtype, &self.options.keep_f32)?;
        }
        let program = Arc::new(Program::new(&graph, self.opset, &self.devices)?);
        let mut programs = lock();
        if programs.len() == MAX_PROGRAMS {
            programs.remove(0);
        }
        programs.push((shapes, program.clone()));
        Ok(program)
    }
}

/// Folds what is known, and runs passes.
fn rewrite(graph: &mut Graph, opset: i64, on: &Passes) -> Vec<(&'static str, usize)> {
    fold::fold(graph, opset, &Arc::new(Devices::host()));
    graph.sweep();
    passes::apply(graph, on)
}
