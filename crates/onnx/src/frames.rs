//! Repeated runs of one graph, with inputs that are updated in place.
//!
//! The first run launches kernel by kernel: it compiles, and tunes if the policy allows it. After a
//! run without copies between host and device, the next run is captured as a device graph, which
//! later runs replay.

use std::sync::Arc;
use std::thread::{self, ThreadId};

use burn::tensor::{Device, Graph, TensorData};
use ops::{Ctx, Placed};

use crate::OnnxError;
use crate::array::{Array, copies};
use crate::devices::Devices;
use crate::error::{device_failed, invalid};
use crate::run::Program;

type Outputs = Result<Vec<Array>, OnnxError>;
type Run = Box<dyn FnMut() -> Outputs + Send>;

/// A program with its inputs.
pub(crate) struct Frames {
    program: Arc<Program>,
    devices: Arc<Devices>,
    inputs: Vec<Array>,
    /// Memory of the results, for the thread of the first run.
    placed: Option<(ThreadId, Placed)>,
    state: State,
}

enum State {
    /// Launches kernel by kernel; counts the runs.
    Launches(usize),
    /// The last run copied nothing: the next run is captured.
    Ready,
    Graph {
        graph: Graph<Outputs, Run>,
        thread: ThreadId,
    },
}

/// Runs with copies after which a program is never captured: its copies depend on its inputs.
const MOST_EAGER: usize = 3;

impl Frames {
    pub(crate) fn new(
        program: Arc<Program>,
        devices: Arc<Devices>,
        inputs: Vec<TensorData>,
    ) -> Self {
        let _guard = ops::stream_guard();
        let on = &devices.device;
        let inputs = inputs.into_iter().map(|own| Array::from_data(own, on)).collect();
        Self { program, devices, inputs, placed: None, state: State::Launches(0) }
    }

    /// Updates an input in place.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn update(&mut self, at: usize, data: TensorData) -> Result<(), OnnxError> {
        if matches!(self.state, State::Graph { .. }) {
            return self.inputs[at].overwrite(data).map_err(device_failed);
        }
        self.inputs[at] = Array::from_data(data, &self.devices.device);
        Ok(())
    }

    /// Returns true if runs replay a device graph.
    pub(crate) fn captured(&self) -> bool {
        matches!(&self.state, State::Graph { graph, .. } if graph.is_hardware())
    }

    /// Runs the program kernel by kernel.
    ///
    /// # Errors
    /// [`OnnxError::Node`].
    pub(crate) fn launch(&self) -> Outputs {
        // Another thread allocates its own results: its kernels could overwrite memory that the
        // first thread still reads.
        let placed = self.placed.as_ref().filter(|(thread, _)| *thread == thread::current().id());
        let placed = placed.map(|(_, placed)| placed);
        self.program.run_in(&self.devices.ctx, self.inputs.clone(), placed)
    }

    /// Runs the program. The next run overwrites the memory of the results.
    ///
    /// # Errors
    /// [`OnnxError::Node`].
    pub(crate) fn run(&mut self) -> Outputs {
        match &mut self.state {
            State::Launches(runs) => {
                let runs = *runs;
                let device = Device::new(self.devices.device.clone());
                if runs == 0 && self.devices.has_kernels() {
                    self.prepare(&device)?;
                }
                let before = copies();
                let made = self.launch();
                let same = copies() == before && runs < MOST_EAGER && ops::captures(&device);
                self.state = if same { State::Ready } else { State::Launches(runs + 1) };
                made
            }
            State::Ready => {
                let (program, inputs) = (self.program.clone(), self.inputs.clone());
                let ctx = self.devices.ctx.clone();
                let placed = self.placed.as_ref().map(|(_, placed)| placed.clone());
                let run: Run =
                    Box::new(move || program.run_in(&ctx, inputs.clone(), placed.as_ref()));
                let device = Device::new(self.devices.device.clone());
                let mut graph = ops::capture_alone(&device, run);
                // SAFETY: the graph's closure holds clones of everything that it reads and writes.
                // Constants are never written; the inputs belong to these frames, which `&mut` lets
                // one thread use at a time. The graph was captured on the stream of this thread,
                // and its results are read on it before the next run. Capturing does not run
                // kernels.
                let made = cloned(unsafe { graph.replay() });
                self.state = State::Graph { graph, thread: thread::current().id() };
                made
            }
            State::Graph { thread, .. } if *thread != thread::current().id() => self.launch(),
            // SAFETY: as above.
            State::Graph { graph, .. } => cloned(unsafe { graph.replay() }),
        }
    }
}

impl Frames {
    /// Allocates the memory of the results, and compiles the kernels on many cores. Kernels that a
    /// rehearsal does not reach are compiled at their launch.
    fn prepare(&mut self, device: &Device) -> Result<(), OnnxError> {
        let mut placed = self.program.placed(device)?;
        let ctx = self.devices.ctx.rehearsal();
        self.program.run_in(&ctx, self.inputs.clone(), placed.as_ref())?;
        let rehearsed = ctx.rehearsed();
        if let Some(placed) = &mut placed {
            placed.set_workspace(rehearsed.workspace(), device);
        }
        if Ctx::precompiles(device) {
            rehearsed.compile();
        }
        self.placed = placed.map(|placed| (thread::current().id(), placed));
        Ok(())
    }
}

fn cloned(made: &Outputs) -> Outputs {
    match made {
        Ok(made) => Ok(made.clone()),
        Err(OnnxError::Node(fault)) => Err(OnnxError::Node(fault.clone())),
        Err(OnnxError::Invalid(why)) => Err(invalid(why.clone())),
        Err(OnnxError::Device(why)) => Err(device_failed(why.clone())),
        Err(why) => Err(device_failed(why.to_string())),
    }
}

/// Dropping a graph waits for its stream.
impl Drop for Frames {
    fn drop(&mut self) {
        let _guard = ops::stream_guard();
        self.state = State::Launches(0);
    }
}
