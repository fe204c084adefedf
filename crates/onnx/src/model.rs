//! Models that are loaded to run.

use std::collections::BTreeMap;
use std::path::Path;

use burn::backend::DispatchDevice;
use burn::tensor::TensorData;

use crate::array::Array;
use crate::graph;
use crate::prepare::{opset, prepare};
use crate::run::Program;
use crate::source::Source;
use crate::{OnnxError, error};

/// A model on a device.
pub struct Model {
    program: Program,
    inputs: Vec<String>,
    outputs: Vec<String>,
    device: DispatchDevice,
}

impl Model {
    /// Loads a model. `dimensions` are numbers for those of its inputs' dimensions that have names.
    ///
    /// # Errors
    /// [`OnnxError`].
    pub fn open(
        path: impl AsRef<Path>,
        dimensions: &BTreeMap<String, u64>,
        device: &DispatchDevice,
        host: &DispatchDevice,
    ) -> Result<Self, OnnxError> {
        let Source { mut model, mut files } = Source::open(path.as_ref())?;
        prepare(&mut model, dimensions)?;
        let opset = opset(&model).unwrap_or(1);
        let graph = graph::read(model.graph.expect("decoded with a graph"), &mut files)?;
        let name = |id: &usize| graph.values[*id].name.clone();
        let inputs = graph.inputs.iter().map(name).collect();
        let outputs = graph.outputs.iter().map(name).collect();
        let program = Program::new(&graph, opset, device, host)?;
        Ok(Self { program, inputs, outputs, device: device.clone() })
    }

    /// Returns the names of the inputs.
    pub fn inputs(&self) -> &[String] {
        &self.inputs
    }

    /// Returns the names of the outputs.
    pub fn outputs(&self) -> &[String] {
        &self.outputs
    }

    /// Runs the model. Inputs are in the order of [`Model::inputs`].
    ///
    /// # Errors
    /// [`OnnxError`].
    pub fn run(&self, inputs: Vec<TensorData>) -> Result<Vec<TensorData>, OnnxError> {
        if inputs.len() != self.inputs.len() {
            let (have, need) = (inputs.len(), self.inputs.len());
            return Err(error::invalid(format!("it has {need} inputs, and {have} are given")));
        }
        let given = inputs.into_iter().map(|own| Array::from_data(own, &self.device)).collect();
        let outputs = self.program.run(given)?;
        outputs.iter().map(|own| own.to_data().map_err(error::invalid)).collect()
    }
}
