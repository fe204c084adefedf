//! Runs of graphs, node by node.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::DispatchDevice;
use burn::tensor::TensorData;

use crate::array::Array;
use crate::graph::{Graph, Node};
use crate::ops::{Inputs, Run, operator};
use crate::{Fault, OnnxError};

/// A graph whose operators are read, with its constants on a device.
pub(crate) struct Program {
    steps: Vec<Step>,
    /// Constants, by value.
    constants: Vec<Option<Array>>,
    inputs: Vec<usize>,
    outputs: Vec<usize>,
    device: DispatchDevice,
    host: DispatchDevice,
}

struct Step {
    node: Node,
    run: Run,
    /// Values that no later step reads.
    last: Vec<usize>,
}

impl Program {
    /// Reads the operators of a graph.
    ///
    /// # Errors
    /// [`OnnxError::Unserved`] with every node that cannot run.
    pub(crate) fn new(
        graph: &Graph,
        opset: i64,
        device: &DispatchDevice,
        host: &DispatchDevice,
    ) -> Result<Self, OnnxError> {
        let mut faults = Vec::new();
        let mut steps = Vec::new();
        for node in &graph.nodes {
            match operator(node, opset, [device, host]) {
                Ok(run) => steps.push(Step { node: node.clone(), run, last: Vec::new() }),
                Err(why) => faults.push(Fault::new(node, why)),
            }
        }
        if !faults.is_empty() {
            return Err(OnnxError::Unserved(faults));
        }
        let mut kept = vec![false; graph.values.len()];
        graph.outputs.iter().for_each(|id| kept[*id] = true);
        for step in steps.iter_mut().rev() {
            for id in step.node.inputs.iter().chain(&step.node.outputs).flatten() {
                if !std::mem::replace(&mut kept[*id], true) {
                    step.last.push(*id);
                }
            }
        }
        let constant = |data: &TensorData| Array::from_data(data.clone(), device);
        let constants = graph.values.iter();
        let constants = constants.map(|value| value.constant.as_ref().map(constant)).collect();
        let inputs = graph.inputs.iter().chain(&graph.captured).copied().collect();
        let (device, host) = (device.clone(), host.clone());
        Ok(Self { steps, constants, inputs, outputs: graph.outputs.clone(), device, host })
    }

    /// Runs all nodes, given the inputs and then the captured values.
    ///
    /// # Errors
    /// [`OnnxError::Node`].
    pub(crate) fn run(&self, given: Vec<Array>) -> Result<Vec<Array>, OnnxError> {
        let mut values = self.constants.clone();
        for (id, array) in self.inputs.iter().zip(given) {
            values[*id] = Some(array);
        }
        for step in &self.steps {
            let node = &step.node;
            let all: Vec<_> =
                node.inputs.iter().map(|id| id.and_then(|id| values[id].clone())).collect();
            let inputs = Inputs { all: &all, device: &self.device, host: &self.host };
            // Burn reports what it cannot do by a panic.
            let made = catch_unwind(AssertUnwindSafe(|| (step.run)(&inputs)));
            let made = made.unwrap_or_else(|why| Err(panic_text(&*why)));
            let made = made.map_err(|why| OnnxError::Node(Fault::new(node, why)))?;
            for (id, array) in node.outputs.iter().zip(made) {
                if let Some(id) = id {
                    values[*id] = Some(array);
                }
            }
            step.last.iter().for_each(|id| values[*id] = None);
        }
        self.outputs
            .iter()
            .map(|id| {
                values[*id].clone().ok_or_else(|| crate::error::invalid("an output has no value"))
            })
            .collect()
    }
}

fn panic_text(why: &(dyn std::any::Any + Send)) -> String {
    let text = why.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| why.downcast_ref::<&str>().copied()).unwrap_or("it panicked").to_owned()
}
