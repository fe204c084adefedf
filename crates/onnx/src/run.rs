//! Runs graphs node by node.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{DType, Device};
use ops::{Ctx, Placed};

use crate::array::{Array, Kind, Memo, copies, kind};
use crate::devices::{Devices, Layout};
use crate::error::{device_failed, invalid};
use crate::graph::{Attribute, Graph, Node, Type, ValueId};
use crate::limits::fits;
use crate::ops::fused::{PADDED_CHANNELS, is_ours};
use crate::ops::{Inputs, Run, operator};
use crate::passes::operand;
use crate::plan::Lifetimes;
use crate::{Fault, OnnxError};

/// A graph with its operators, and its constants on a device.
pub(crate) struct Program {
    steps: Vec<Step>,
    /// Constants by value id.
    constants: Vec<Option<Array>>,
    inputs: Vec<ValueId>,
    outputs: Vec<ValueId>,
    /// Types of all values, as far as they are known before a run.
    types: Vec<Type>,
    lifetimes: Lifetimes,
    devices: Arc<Devices>,
}

struct Step {
    node: Node,
    run: Run,
    /// Values whose last reader is this step.
    last: Vec<ValueId>,
    memo: Mutex<Memo>,
}

impl Program {
    /// Reads the operators of a graph.
    ///
    /// # Errors
    /// [`OnnxError::Unserved`] with every unsupported node; [`OnnxError::Node`] for a result that
    /// does not fit in memory.
    pub(crate) fn new(
        graph: &Graph,
        opset: i64,
        devices: &Arc<Devices>,
    ) -> Result<Self, OnnxError> {
        let mut steps = read(graph, opset, devices)?;
        for node in &graph.nodes {
            for id in node.outputs.iter().flatten() {
                let ty = &graph.values[*id].ty;
                if let (Some(dtype), Some(shape)) = (ty.dtype, ty.known_shape()) {
                    let fits = fits(&shape, dtype, &devices.device);
                    fits.map_err(|why| OnnxError::Node(Fault::new(node, why)))?;
                }
            }
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
        Ok(Self {
            constants: constants(graph, &kept, devices)?,
            steps,
            inputs: graph.inputs.iter().chain(&graph.captured).copied().collect(),
            outputs: graph.outputs.clone(),
            types: graph.values.iter().map(|value| value.ty.clone()).collect(),
            lifetimes: Lifetimes::new(graph),
            devices: devices.clone(),
        })
    }

    /// Allocates the shared buffer of the results; None without results, or if the device has no
    /// buffer of this size.
    ///
    /// # Errors
    /// Our kernels do not run on the device.
    pub(crate) fn placed(&self, device: &Device) -> Result<Option<Placed>, OnnxError> {
        let Lifetimes { blocks, results, .. } = &self.lifetimes;
        if results.is_empty() {
            return Ok(None);
        }
        let placed = Placed::new(blocks, results, device);
        placed.map_err(|why| device_failed(why.to_string()))
    }

    /// Checks that all operators of a graph are supported.
    ///
    /// # Errors
    /// [`OnnxError::Unserved`] with every unsupported node.
    pub(crate) fn check(
        graph: &Graph,
        opset: i64,
        devices: &Arc<Devices>,
    ) -> Result<(), OnnxError> {
        read(graph, opset, devices).map(drop)
    }

    /// Runs all nodes on the inputs, followed by captured values. In a rehearsal it launches none
    /// of our kernels, and stops at the first copy between host and device.
    ///
    /// # Errors
    /// [`OnnxError::Node`].
    pub(crate) fn run(&self, ctx: &Ctx, given: Vec<Array>) -> Result<Vec<Array>, OnnxError> {
        self.run_in(ctx, given, None)
    }

    /// Runs all nodes like [`Program::run`], with results in a preallocated buffer.
    ///
    /// # Errors
    /// [`OnnxError::Node`].
    pub(crate) fn run_in(
        &self,
        ctx: &Ctx,
        given: Vec<Array>,
        placed: Option<&Placed>,
    ) -> Result<Vec<Array>, OnnxError> {
        let pass = placed.map(Placed::pass).transpose();
        let pass = pass.map_err(|why| device_failed(why.to_string()))?;
        let mut values = self.constants.clone();
        for (id, array) in self.inputs.iter().zip(given) {
            values[*id] = Some(array);
        }
        let before = copies();
        for (step, place) in self.steps.iter().zip(&self.lifetimes.of_node) {
            // In a rehearsal, values are not computed and must not control the run.
            let decides = matches!(step.node.op.as_str(), "If" | "Loop" | "Scan");
            if ctx.rehearses() && (decides || copies() > before) {
                return Ok(Vec::new());
            }
            let node = &step.node;
            let all: Vec<_> =
                node.inputs.iter().map(|id| id.and_then(|id| values[id].clone())).collect();
            let inputs = Inputs { ctx, ..Inputs::new(&all, &self.devices) };
            let failed = |why| OnnxError::Node(Fault::new(node, why));
            let copied = copies();
            let mut memo = step.memo.lock().unwrap_or_else(PoisonError::into_inner);
            let _span = trace::span(|| match node.name.is_empty() {
                true => node.op.clone(),
                false => format!("{} {}", node.op, node.name),
            });
            let mut run = || memo.during(|| caught(|| (step.run)(&inputs)));
            let made = match pass.as_ref().filter(|_| place.is_some()) {
                Some(pass) => pass.place(run),
                None => run(),
            };
            drop(memo);
            if ctx.rehearses() && copies() > before {
                return Ok(Vec::new());
            }
            let made = made.map_err(failed)?;
            if copies() > copied {
                log::debug!("{} `{}` copies between host and device", node.op, node.name);
            }
            for (id, array) in node.outputs.iter().zip(made) {
                if let Some(id) = id {
                    values[*id] = Some(self.types[*id].checked(array).map_err(failed)?);
                }
            }
            step.last.iter().for_each(|id| values[*id] = None);
        }
        let made = self.outputs.iter().map(|id| values[*id].clone());
        made.map(|own| own.ok_or_else(|| invalid("no node computed an output"))).collect()
    }
}

/// Reads the operators of a graph.
fn read(graph: &Graph, opset: i64, devices: &Arc<Devices>) -> Result<Vec<Step>, OnnxError> {
    let (mut faults, mut steps) = (Vec::new(), Vec::new());
    for node in &graph.nodes {
        let is_constant =
            |id: &Option<ValueId>| id.is_some_and(|id| graph.values[id].constant.is_some());
        let places = (0..node.inputs.len()).filter(|at| is_constant(&node.inputs[*at]));
        let mut node = Node { constants: places.collect(), ..node.clone() };
        if let Some(few) = few_channels(graph, &node, devices) {
            node.attributes.insert("channels".to_owned(), Attribute::Int(few as i64));
        }
        let node = &node;
        if let Some(dtype) = missing(graph, node, devices) {
            faults.push(Fault::new(node, format!("the device does not support dtype {dtype:?}")));
            continue;
        }
        match operator(node, opset, devices) {
            Ok(run) => {
                let (last, memo) = (Vec::new(), Mutex::default());
                steps.push(Step { node: node.clone(), run, last, memo });
            }
            Err(why) => faults.push(Fault::new(node, why)),
        }
    }
    if faults.is_empty() { Ok(steps) } else { Err(OnnxError::Unserved(faults)) }
}

/// Returns a float dtype of an input or output that the device does not support.
fn missing(graph: &Graph, node: &Node, devices: &Devices) -> Option<DType> {
    let ids = node.inputs.iter().chain(&node.outputs).flatten();
    let mut floats = ids.filter_map(|id| graph.values[*id].ty.dtype).filter(DType::is_float);
    floats.find(|own| !devices.has(*own))
}

fn is_conv(node: &Node) -> bool {
    node.op == "Conv" || node.op == "flashover::Conv"
}

/// Returns the channels of an image that is padded to [`PADDED_CHANNELS`], so that a convolution
/// reads it in vectors; None for other convolutions.
fn few_channels(graph: &Graph, node: &Node, devices: &Devices) -> Option<usize> {
    let id = node.inputs.get(1).copied().flatten().filter(|_| is_conv(node))?;
    let read = graph.nodes.iter().filter(|own| own.inputs.contains(&Some(id))).count();
    let value = &graph.values[id];
    let shape = &value.constant.as_ref()?.shape;
    let (Some(channels), Some(kernel)) = (shape.get(1), shape.get(2..)) else { return None };
    let ints = |name: &str| match node.attributes.get(name) {
        Some(Attribute::Ints(own)) => own.as_slice(),
        _ => &[],
    };
    // Windows that do not overlap are rows of a matmul.
    let patches = ints("strides").iter().copied().eq(kernel.iter().map(|own| *own as i64));
    let plain = matches!(node.attributes.get("group"), None | Some(Attribute::Int(1)))
        && node.inputs.get(operand::SECOND).copied().flatten().is_none();
    let ours = devices.has_kernels() && value.ty.dtype.is_some_and(is_ours);
    let fits = ours && plain && read == 1 && !patches && matches!(kernel.len(), 1 | 2);
    (fits && *channels < PADDED_CHANNELS && !channels.is_multiple_of(4) && *channels > 2)
        .then_some(*channels)
}

/// Copies the used constants to the device.
fn constants(
    graph: &Graph,
    read: &[bool],
    devices: &Devices,
) -> Result<Vec<Option<Array>>, OnnxError> {
    let mut filters = HashMap::new();
    for node in graph.nodes.iter().filter(|node| devices.has_kernels() && is_conv(node)) {
        let Some(id) = node.inputs.get(1).copied().flatten() else { continue };
        let few = few_channels(graph, node, devices).is_some();
        filters.insert(id, if few { Layout::PaddedChannels } else { Layout::ChannelsLast });
    }
    let own = |(id, value): (usize, &crate::graph::Value)| {
        let Some(data) = value.constant.as_ref().filter(|_| read[id]) else { return Ok(None) };
        let dtype = value.ty.dtype.unwrap_or(data.dtype);
        let image = (3..=4).contains(&data.shape.len()) && kind(dtype) == Kind::Float;
        let layout = filters.get(&id).filter(|_| image && dtype != DType::F64);
        let layout = layout.copied().unwrap_or(Layout::Dense);
        devices
            .constant(data, dtype, layout)
            .map(Some)
            .map_err(|why| OnnxError::Tensor { name: value.name.clone(), why })
    };
    graph.values.iter().enumerate().map(own).collect()
}

/// Runs an operator. Burn panics on unsupported cases; the panic becomes an error.
pub(crate) fn caught<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let made = catch_unwind(AssertUnwindSafe(run));
    made.unwrap_or_else(|why| Err(panic_text(&*why)))
}

fn panic_text(why: &(dyn std::any::Any + Send)) -> String {
    let text = why.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| why.downcast_ref::<&str>().copied())
        .unwrap_or("the operator panicked")
        .to_owned()
}
