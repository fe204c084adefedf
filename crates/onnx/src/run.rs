//! Runs graphs node by node.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread;

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device};
use ops::{Ctx, Placed};

use crate::array::{Array, Kind, kind};
use crate::devices::{Devices, Layout};
use crate::error::{device_failed, invalid};
use crate::graph::{Attribute, Graph, Node, Type, ValueId};
use crate::limits::fits;
use crate::memo::{Memo, copies};
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
        let mut values = self.begin(given);
        self.steps_in(ctx, &mut values, 0..self.steps(), None)?;
        self.outputs(values)
    }

    /// Returns the number of steps.
    pub(crate) const fn steps(&self) -> usize {
        self.steps.len()
    }

    pub(crate) fn device(&self) -> &DispatchDevice {
        &self.devices.device
    }

    pub(crate) fn is_input(&self, id: ValueId) -> bool {
        self.inputs.contains(&id)
    }

    /// Returns the values before the first step: the inputs, followed by captured values.
    pub(crate) fn begin(&self, given: Vec<Array>) -> Values {
        let mut values = self.constants();
        self.inputs.iter().zip(given).for_each(|(id, array)| values.set(*id, array));
        values
    }

    /// Returns the values of constants.
    pub(crate) fn constants(&self) -> Values {
        Values(self.constants.clone())
    }

    /// Returns the results after the last step.
    ///
    /// # Errors
    /// [`OnnxError::Invalid`] if a step did not run.
    pub(crate) fn outputs(&self, values: Values) -> Result<Vec<Array>, OnnxError> {
        self.outputs.iter().map(|id| values.get(*id).cloned()).collect()
    }

    /// Returns the values that a range of steps reads from before it, and those that it makes for later steps.
    pub(crate) fn borders(&self, steps: &Range<usize>) -> (Vec<ValueId>, Vec<ValueId>) {
        let (mut reads, mut makes) = (BTreeSet::new(), BTreeSet::new());
        for step in &self.steps[steps.clone()] {
            let is_new = |id: &ValueId| self.constants[*id].is_none() && !makes.contains(id);
            reads.extend(step.node.inputs.iter().flatten().copied().filter(is_new));
            makes.extend(step.node.outputs.iter().flatten().copied());
        }
        let dead = self.steps[steps.clone()].iter().flat_map(|step| &step.last);
        dead.for_each(|id| _ = makes.remove(id));
        (reads.into_iter().collect(), makes.into_iter().collect())
    }

    /// Drops the values that no step after the range reads.
    pub(crate) fn drop_dead(&self, steps: &Range<usize>, values: &mut Values) {
        let dead = self.steps[steps.clone()].iter().flat_map(|step| &step.last);
        dead.for_each(|id| values.0[*id] = None);
    }

    /// Returns the host-device copies that the steps keep for their next run.
    pub(crate) fn copied(&self, steps: &Range<usize>) -> Vec<Array> {
        let memo = |step: &Step| {
            let memo = step.memo.lock().unwrap_or_else(PoisonError::into_inner);
            memo.arrays().collect::<Vec<_>>()
        };
        self.steps[steps.clone()].iter().flat_map(memo).collect()
    }

    /// Runs a range of steps, with results in a preallocated buffer. Returns the steps that copied between host and device.
    ///
    /// In a rehearsal it launches none of our kernels, and stops at the first step that copies or runs a subgraph: values are not
    /// computed and must not control the run.
    ///
    /// # Errors
    /// [`OnnxError::Node`].
    pub(crate) fn steps_in(
        &self,
        ctx: &Ctx,
        values: &mut Values,
        steps: Range<usize>,
        placed: Option<&Placed>,
    ) -> Result<Vec<usize>, OnnxError> {
        let first = self.lifetimes.of_node[..steps.start].iter().flatten().count();
        let pass = placed.map(|placed| placed.pass_from(first)).transpose();
        let pass = pass.map_err(|why| device_failed(why.to_string()))?;
        let mut copying = Vec::new();
        for at in steps {
            let step = &self.steps[at];
            let node = &step.node;
            if ctx.rehearses() && matches!(node.op.as_str(), "If" | "Loop" | "Scan") {
                return Ok(vec![at]);
            }
            let all: Vec<_> =
                node.inputs.iter().map(|id| id.and_then(|id| values.0[id].clone())).collect();
            let inputs = Inputs { ctx, ..Inputs::new(&all, &self.devices) };
            let failed = |why| OnnxError::Node(Fault::new(node, why));
            let before = copies();
            let mut memo = step.memo.lock().unwrap_or_else(PoisonError::into_inner);
            let _span = trace::span(|| match node.name.is_empty() {
                true => node.op.clone(),
                false => format!("{} {}", node.op, node.name),
            });
            let mut run = || memo.during(|| caught(|| (step.run)(&inputs)));
            let place = self.lifetimes.of_node[at];
            let made = match pass.as_ref().filter(|_| place.is_some()) {
                Some(pass) => pass.place(run),
                None => run(),
            };
            drop(memo);
            if copies() > before {
                log::debug!("{} `{}` copies between host and device", node.op, node.name);
                copying.push(at);
                if ctx.rehearses() {
                    return Ok(copying);
                }
            }
            for (id, array) in node.outputs.iter().zip(made.map_err(failed)?) {
                if let Some(id) = id {
                    values.set(*id, self.types[*id].checked(array).map_err(failed)?);
                }
            }
            step.last.iter().for_each(|id| values.0[*id] = None);
        }
        Ok(copying)
    }
}

/// Values of a run, by their number in the graph.
pub(crate) struct Values(Vec<Option<Array>>);

impl Values {
    /// Returns a value.
    ///
    /// # Errors
    /// [`OnnxError::Invalid`] if it was not computed.
    pub(crate) fn get(&self, id: ValueId) -> Result<&Array, OnnxError> {
        self.0[id].as_ref().ok_or_else(|| invalid("a value was read before it was computed"))
    }

    pub(crate) fn set(&mut self, id: ValueId, array: Array) {
        self.0[id] = Some(array);
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

thread_local! {
    /// True while this thread's panics become errors.
    static CATCHES: Cell<bool> = const { Cell::new(false) };
}

/// Runs an operator. Burn reports what it cannot do by a panic, which becomes an error, and is not printed.
pub(crate) fn caught<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    static HOOK: Once = Once::new();
    // No hook can be set while a thread unwinds; an additional message is harmless then.
    if !thread::panicking() {
        HOOK.call_once(|| {
            let print = panic::take_hook();
            panic::set_hook(Box::new(move |why| {
                if !CATCHES.get() {
                    print(why);
                }
            }));
        });
    }
    let outer = CATCHES.replace(true);
    let made = catch_unwind(AssertUnwindSafe(run));
    CATCHES.set(outer);
    made.unwrap_or_else(|why| Err(panic_text(&*why)))
}

fn panic_text(why: &(dyn std::any::Any + Send)) -> String {
    let text = why.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| why.downcast_ref::<&str>().copied())
        .unwrap_or("the operator panicked")
        .to_owned()
}
