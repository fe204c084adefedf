//! Repeated runs of one graph, with inputs that are updated in place.
//!
//! The first run launches kernel by kernel: it compiles, and tunes if the policy allows it. Nodes that copy between host and device in
//! the second run, because a shape or a branch depends on data, are launched in every later run. The nodes between them are
//! captured as pieces.

use std::sync::Arc;
use std::thread::{self, ThreadId};

use burn::tensor::{Device, TensorData};
use ops::{Ctx, Placed};

use crate::OnnxError;
use crate::array::Array;
use crate::devices::Devices;
use crate::error::device_failed;
use crate::pieces::Piece;
use crate::run::Program;

type Outputs = Result<Vec<Array>, OnnxError>;

/// A program with its inputs.
pub(crate) struct Frames {
    program: Arc<Program>,
    devices: Arc<Devices>,
    inputs: Vec<Array>,
    /// Memory of the results, for the thread of the first run.
    placed: Option<(ThreadId, Placed)>,
    /// True if the device can replay graphs.
    captures: bool,
    state: State,
}

enum State {
    /// Launches kernel by kernel; counts the runs.
    Launches(usize),
    /// Runs pieces, which belong to a thread, and launches the nodes between them.
    Pieces(ThreadId, Vec<Piece>),
}

impl Frames {
    pub(crate) fn new(
        program: Arc<Program>,
        devices: Arc<Devices>,
        inputs: Vec<TensorData>,
    ) -> Self {
        let _guard = ops::stream_guard();
        let on = &devices.device;
        let inputs = inputs.into_iter().map(|own| Array::from_data(own, on)).collect();
        let captures = ops::captures(&Device::new(on.clone()));
        Self { program, devices, inputs, placed: None, captures, state: State::Launches(0) }
    }

    /// Captures on any device: without hardware graphs, Burn runs the closure again.
    #[cfg(test)]
    pub(crate) const fn capture_anywhere(&mut self) {
        self.captures = true;
    }

    #[cfg(test)]
    pub(crate) fn pieces(&self) -> &[Piece] {
        let State::Pieces(_, pieces) = &self.state else { return &[] };
        pieces
    }

    /// Updates an input in place.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn update(&mut self, at: usize, data: TensorData) -> Result<(), OnnxError> {
        if matches!(self.state, State::Pieces(..)) {
            return self.inputs[at].overwrite(data).map_err(device_failed);
        }
        self.inputs[at] = Array::from_data(data, &self.devices.device);
        Ok(())
    }

    /// Returns the number of nodes that run as device graphs.
    pub(crate) fn captured(&self) -> usize {
        let State::Pieces(_, pieces) = &self.state else { return 0 };
        pieces.iter().filter(|own| own.captured()).map(|own| own.steps().len()).sum()
    }

    /// Returns the number of nodes.
    pub(crate) fn nodes(&self) -> usize {
        self.program.steps()
    }

    /// Runs the program kernel by kernel.
    ///
    /// # Errors
    /// [`OnnxError::Node`].
    pub(crate) fn launch(&self) -> Outputs {
        self.launched().map(|(made, _)| made)
    }

    /// Runs the program kernel by kernel. Also returns the steps that copied between host and device.
    fn launched(&self) -> Result<(Vec<Array>, Vec<usize>), OnnxError> {
        // Another thread allocates its results: its kernels could overwrite memory that the first one still reads.
        let placed = self.placed.as_ref().filter(|(of, _)| *of == thread::current().id());
        let placed = placed.map(|(_, placed)| placed);
        let mut values = self.program.begin(self.inputs.clone());
        let steps = 0..self.program.steps();
        let copying = self.program.steps_in(&self.devices.ctx, &mut values, steps, placed)?;
        Ok((self.program.outputs(values)?, copying))
    }

    /// Runs the program. The next run overwrites the memory of the results.
    ///
    /// # Errors
    /// [`OnnxError::Node`].
    pub(crate) fn run(&mut self) -> Outputs {
        match &mut self.state {
            State::Launches(runs) => {
                let runs = *runs;
                if runs == 0 && self.devices.has_kernels() {
                    self.prepare(&Device::new(self.devices.device.clone()))?;
                }
                let (made, copying) = self.launched()?;
                // The first run also copies data that later runs keep.
                self.state = match self.captures && (runs > 0 || copying.is_empty()) {
                    true => State::Pieces(
                        thread::current().id(),
                        Piece::between(&self.program, &copying),
                    ),
                    false => State::Launches(runs + 1),
                };
                Ok(made)
            }
            State::Pieces(thread, _) if *thread != thread::current().id() => self.launch(),
            State::Pieces(_, pieces) => {
                let (program, ctx) = (&self.program, &self.devices.ctx);
                let placed = self.placed.as_ref().map(|(_, placed)| placed);
                let mut values = program.begin(self.inputs.clone());
                let mut next = 0;
                for piece in pieces {
                    program.steps_in(ctx, &mut values, next..piece.steps().start, placed)?;
                    piece.run(program, ctx, &mut values, placed)?;
                    next = piece.steps().end;
                }
                program.steps_in(ctx, &mut values, next..program.steps(), placed)?;
                program.outputs(values)
            }
        }
    }
}

impl Frames {
    /// Allocates the memory of the results, and compiles the kernels on many cores. Kernels that a
    /// rehearsal does not reach are compiled at their launch.
    fn prepare(&mut self, device: &Device) -> Result<(), OnnxError> {
        let mut placed = self.program.placed(device)?;
        let ctx = self.devices.ctx.rehearsal();
        let mut values = self.program.begin(self.inputs.clone());
        self.program.steps_in(&ctx, &mut values, 0..self.program.steps(), placed.as_ref())?;
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

/// Dropping a graph waits for its stream.
impl Drop for Frames {
    fn drop(&mut self) {
        let _guard = ops::stream_guard();
        self.state = State::Launches(0);
    }
}
