//! Operators, one file per family. An operator reads its attributes when a graph is loaded, and its
//! inputs when it runs.

pub(crate) mod attention;
mod chain;
mod control;
mod elementwise;
pub(crate) mod fused;
mod host;
mod index;
mod int8;
pub(crate) mod linear;
mod loss;
mod microsoft;
mod norm;
mod pointwise;
mod quant;
mod recurrent;
mod reduce;
mod resize;
mod sequence;
mod shape;
mod signal;
mod vision;
pub(crate) mod windows;

use std::ops::Range;
use std::sync::Arc;

use burn::backend::DispatchDevice;
use burn::tensor::{DType, TensorData};
use ops::{Activation, Ctx, Program as Steps};

pub(crate) use self::microsoft::packed::{Packed, hold, next_number};
pub(crate) use self::quant::limits;
use crate::array::Array;
use crate::devices::Devices;
use crate::graph::{Attribute, Node};
use crate::run::Program;

/// Function that computes the outputs of a node.
pub(crate) type Run = Box<dyn Fn(&Inputs<'_>) -> Result<Vec<Array>, String> + Send + Sync>;
/// Result of reading a node: None if the operator is not in this family, an error if it is not
/// supported.
pub(crate) type Read = Option<Result<Run, String>>;

const FAMILIES: [fn(&Call<'_>) -> Read; 21] = [
    fused::read,
    int8::read,
    pointwise::read,
    elementwise::read,
    shape::read,
    reduce::read,
    index::read,
    linear::read,
    norm::read,
    windows::read,
    control::read,
    attention::read,
    resize::read,
    quant::read,
    recurrent::read,
    loss::read,
    sequence::read,
    signal::read,
    vision::read,
    microsoft::read,
    host::read,
];

/// Returns the function that computes a node.
///
/// # Errors
/// The reason why the node is not supported.
pub(crate) fn operator(node: &Node, opset: i64, devices: &Arc<Devices>) -> Result<Run, String> {
    let call = Call { node, opset, devices };
    let found = FAMILIES.iter().find_map(|family| family(&call));
    found.unwrap_or_else(|| Err("the operator is not supported".to_owned()))
}

/// A node with its attributes.
pub(crate) struct Call<'a> {
    node: &'a Node,
    /// Opset of the domain `ai.onnx`.
    pub(crate) opset: i64,
    devices: &'a Arc<Devices>,
}

/// A subgraph that an operator runs.
pub(crate) struct Subgraph {
    pub(crate) program: Program,
    /// Input indices of the captured values.
    pub(crate) captured: Range<usize>,
    /// Dtype and shape of each output whose dtype is known; an unknown length is 0.
    pub(crate) outputs: Vec<Option<(DType, Vec<usize>)>>,
}

impl<'a> Call<'a> {
    pub(crate) fn op(&self) -> &'a str {
        &self.node.op
    }

    /// Returns true if our kernels run on the device.
    pub(crate) fn has_kernels(&self) -> bool {
        self.devices.has_kernels()
    }

    pub(crate) const fn devices(&self) -> &'a Arc<Devices> {
        self.devices
    }

    pub(crate) fn int(&self, name: &str) -> Option<i64> {
        match self.node.attributes.get(name)? {
            Attribute::Int(value) => Some(*value),
            _ => None,
        }
    }

    pub(crate) fn flag(&self, name: &str) -> bool {
        self.int(name).is_some_and(|value| value != 0)
    }

    pub(crate) fn ints(&self, name: &str) -> Option<&'a [i64]> {
        match self.node.attributes.get(name)? {
            Attribute::Ints(values) => Some(values),
            _ => None,
        }
    }

    pub(crate) fn float(&self, name: &str) -> Option<f64> {
        match self.node.attributes.get(name)? {
            Attribute::Float(value) => Some(f64::from(*value)),
            _ => None,
        }
    }

    pub(crate) fn floats(&self, name: &str) -> Option<&'a [f32]> {
        match self.node.attributes.get(name)? {
            Attribute::Floats(values) => Some(values),
            _ => None,
        }
    }

    pub(crate) fn activation(&self) -> Option<Activation> {
        match self.node.attributes.get("activation")? {
            Attribute::Activation(own) => Some(*own),
            _ => None,
        }
    }

    pub(crate) fn program(&self) -> Option<Steps> {
        match self.node.attributes.get("program")? {
            Attribute::Program(own) => Some(own.clone()),
            _ => None,
        }
    }

    pub(crate) fn text(&self, name: &str) -> Option<&'a str> {
        match self.node.attributes.get(name)? {
            Attribute::Text(value) => Some(value),
            _ => None,
        }
    }

    pub(crate) fn texts(&self, name: &str) -> Option<&'a [String]> {
        match self.node.attributes.get(name)? {
            Attribute::Texts(values) => Some(values),
            _ => None,
        }
    }

    pub(crate) fn tensor(&self, name: &str) -> Option<TensorData> {
        match self.node.attributes.get(name)? {
            Attribute::Tensor(value) => Some(value.data()),
            _ => None,
        }
    }

    /// Returns the subgraph of an attribute, ready to run.
    ///
    /// # Errors
    /// The attribute is missing, or a node of the subgraph is not supported.
    pub(crate) fn subgraph(&self, name: &str) -> Result<Subgraph, String> {
        let Some(Attribute::Graph(graph, from)) = self.node.attributes.get(name) else {
            return Err(format!("attribute `{name}` is missing"));
        };
        let program = Program::new(graph, self.opset, self.devices);
        let declared = |id: &usize| {
            let ty = &graph.values[*id].ty;
            let lengths = ty.shape.iter().flatten();
            Some((ty.dtype?, lengths.map(|own| own.unwrap_or(0)).collect()))
        };
        Ok(Subgraph {
            program: program.map_err(|why| why.to_string())?,
            captured: *from..from + graph.captured.len(),
            outputs: graph.outputs.iter().map(declared).collect(),
        })
    }

    /// Returns true for an input that is present and not a constant.
    pub(crate) fn is_given(&self, at: usize) -> bool {
        let id = self.node.inputs.get(at).copied().flatten();
        id.is_some() && !self.node.constants.contains(&at)
    }

    pub(crate) fn has_input(&self, at: usize) -> bool {
        self.node.inputs.get(at).copied().flatten().is_some()
    }

    /// Returns the number of inputs, without captured values of subgraphs.
    pub(crate) fn given(&self) -> usize {
        self.node.given
    }

    /// Returns the number of outputs, including unnamed ones between named ones.
    pub(crate) fn outputs(&self) -> usize {
        self.node.outputs.len()
    }
}

/// Inputs of a node when it runs.
pub(crate) struct Inputs<'a> {
    pub(crate) all: &'a [Option<Array>],
    /// Device of the outputs of a node without inputs.
    pub(crate) device: &'a DispatchDevice,
    /// Host device, for shapes.
    pub(crate) host: &'a DispatchDevice,
    /// Context of our kernels.
    pub(crate) ctx: &'a Ctx,
}

impl<'a> Inputs<'a> {
    pub(crate) fn new(all: &'a [Option<Array>], devices: &'a Devices) -> Self {
        Self { all, device: &devices.device, host: &devices.host, ctx: &devices.ctx }
    }

    /// Returns an input.
    ///
    /// # Errors
    /// The input is missing.
    pub(crate) fn get(&self, at: usize) -> Result<Array, String> {
        self.maybe(at).ok_or_else(|| format!("input {at} is missing"))
    }

    pub(crate) fn maybe(&self, at: usize) -> Option<Array> {
        self.all.get(at).cloned().flatten()
    }

    /// Returns an input as lengths or counts.
    ///
    /// # Errors
    /// The input is missing, or has a negative element.
    pub(crate) fn lengths(&self, at: usize) -> Result<Vec<usize>, String> {
        self.get(at)?.lengths()
    }

    /// Returns all inputs.
    ///
    /// # Errors
    /// An input is missing.
    pub(crate) fn each(&self) -> Result<Vec<Array>, String> {
        (0..self.all.len()).map(|at| self.get(at)).collect()
    }
}

/// Resolves an axis; negative ones count from the end.
///
/// # Errors
/// The axis is out of range.
pub(crate) fn axis(axis: i64, rank: usize) -> Result<usize, String> {
    let own = if axis < 0 { axis + rank as i64 } else { axis };
    match usize::try_from(own) {
        Ok(own) if own < rank.max(1) => Ok(own),
        _ => {
            let last = rank.max(1) - 1;
            Err(format!("expected an axis from -{rank} to {last} for rank {rank}, got {axis}"))
        }
    }
}
