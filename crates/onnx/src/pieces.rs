//! Parts of a program that copy nothing between host and device, each captured as a graph of the device.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Graph, TensorData};
use ops::{Ctx, Placed};

use crate::OnnxError;
use crate::array::Array;
use crate::error::device_failed;
use crate::graph::ValueId;
use crate::run::{Program, Values};

type Outputs = Result<Vec<Array>, OnnxError>;
type Run = Box<dyn FnMut() -> Outputs + Send>;

/// Consecutive steps of a program.
pub(crate) struct Piece {
    steps: Range<usize>,
    /// Values from before the piece, which its steps read.
    reads: Vec<ValueId>,
    /// Values that its steps make for later ones.
    makes: Vec<ValueId>,
    state: State,
}

enum State {
    /// Launches step by step. Holds the key of the last run, if that copied nothing.
    Launches(Option<Key>),
    Graph(Box<Captured>),
}

struct Captured {
    key: Key,
    /// Arrays that the graph reads: inputs of the program, which are updated in place, and copies of other values.
    given: Vec<Array>,
    graph: Graph<Outputs, Run>,
    /// Host-device copies that its steps keep.
    _copied: Vec<Array>,
}

/// Shape, dtype and host copy of each value that a graph reads: it depends on them, besides elements on the device.
type Key = Vec<(Vec<usize>, DType, Option<TensorData>)>;

impl Piece {
    /// Steps of a piece that is worth a graph, unless it is the whole program.
    const FEWEST: usize = 4;

    /// Returns the pieces between the steps that copy.
    pub(crate) fn between(program: &Program, copying: &[usize]) -> Vec<Self> {
        let count = program.steps();
        let ends = copying.iter().copied().chain([count]);
        let starts = [0].into_iter().chain(copying.iter().map(|at| at + 1));
        let ranges = starts.zip(ends).map(|(from, to)| from..to);
        ranges
            .filter(|steps| steps.len() >= Self::FEWEST.min(count) && !steps.is_empty())
            .map(|steps| {
                let (reads, makes) = program.borders(&steps);
                Self { steps, reads, makes, state: State::Launches(None) }
            })
            .collect()
    }

    pub(crate) const fn steps(&self) -> &Range<usize> {
        &self.steps
    }

    /// Returns true once the piece was captured.
    #[cfg(test)]
    pub(crate) const fn is_graph(&self) -> bool {
        matches!(self.state, State::Graph(_))
    }

    /// Returns true if runs replay a graph of the device.
    pub(crate) fn captured(&self) -> bool {
        matches!(&self.state, State::Graph(own) if own.graph.is_hardware())
    }

    /// Runs the steps. A piece that reads what it read in the last run is captured, and replayed from then on.
    ///
    /// # Errors
    /// [`OnnxError::Node`].
    pub(crate) fn run(
        &mut self,
        program: &Arc<Program>,
        ctx: &Ctx,
        values: &mut Values,
        placed: Option<&Placed>,
    ) -> Result<(), OnnxError> {
        let key: Key =
            self.reads.iter().map(|id| key(values.get(*id)?)).collect::<Result<_, _>>()?;
        if let State::Launches(Some(last)) = &self.state
            && *last == key
        {
            self.capture(program, ctx, values, placed, key.clone())?;
        }
        match &mut self.state {
            State::Graph(own) if own.key == key => {
                for (id, to) in self.reads.iter().zip(&own.given) {
                    if !program.is_input(*id) && !to.is_known() {
                        to.assign(values.get(*id)?, ctx).map_err(device_failed)?;
                    }
                }
                // SAFETY: the closure holds clones of everything that it reads and writes, and the piece holds what its steps
                // copied before. Constants are never written; inputs and copies belong to the frames, which `&mut` lets one thread
                // use at a time. That thread captured the graph on its stream, and reads the results there before the next run.
                let made = match unsafe { own.graph.replay() } {
                    Ok(made) => made.clone(),
                    Err(OnnxError::Node(fault)) => return Err(OnnxError::Node(fault.clone())),
                    Err(why) => return Err(device_failed(why.to_string())),
                };
                program.drop_dead(&self.steps, values);
                self.makes.iter().zip(made).for_each(|(id, array)| values.set(*id, array));
                Ok(())
            }
            // The graph does not fit these values: the steps are launched.
            State::Graph(_) => program.steps_in(ctx, values, self.steps.clone(), placed).map(drop),
            State::Launches(last) => {
                let copying = program.steps_in(ctx, values, self.steps.clone(), placed)?;
                *last = copying.is_empty().then_some(key);
                Ok(())
            }
        }
    }

    fn capture(
        &mut self,
        program: &Arc<Program>,
        ctx: &Ctx,
        values: &Values,
        placed: Option<&Placed>,
        key: Key,
    ) -> Result<(), OnnxError> {
        let mut given = Vec::new();
        for id in &self.reads {
            let own = values.get(*id)?;
            // Capturing runs the steps several times. They may overwrite values that they read, in the shared buffer.
            let fixed = program.is_input(*id) || own.is_known();
            match if fixed { Ok(own.clone()) } else { own.duplicate(ctx) } {
                Ok(own) => given.push(own),
                Err(why) => {
                    log::debug!("steps {:?} are not captured: {why}", self.steps);
                    self.state = State::Launches(None);
                    return Ok(());
                }
            }
        }
        let run: Run = {
            let (program, ctx, placed) = (program.clone(), ctx.clone(), placed.cloned());
            let (steps, reads, makes) =
                (self.steps.clone(), self.reads.clone(), self.makes.clone());
            let given = given.clone();
            Box::new(move || {
                let mut values = program.constants();
                reads.iter().zip(&given).for_each(|(id, own)| values.set(*id, own.clone()));
                program.steps_in(&ctx, &mut values, steps.clone(), placed.as_ref())?;
                makes.iter().map(|id| values.get(*id).cloned()).collect()
            })
        };
        let device = Device::new(program.device().clone());
        let graph = ops::capture_alone(&device, run);
        let copied = program.copied(&self.steps);
        self.state = State::Graph(Box::new(Captured { key, given, graph, _copied: copied }));
        Ok(())
    }
}

fn key(array: &Array) -> Result<(Vec<usize>, DType, Option<TensorData>), OnnxError> {
    let known = array.is_known().then(|| array.to_data()).transpose().map_err(device_failed)?;
    Ok((array.shape(), array.dtype(), known))
}
