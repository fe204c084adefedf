//! A step over several micro-batches, layer by layer.
//!
//! ```text
//! for each layer l: for each micro-batch i: x_{l+1,i} = layer_l(x_{l,i})                        each x waits, in host memory
//! for each micro-batch i: loss += …, dx_i = its gradient
//! for each layer l, the last first: for each micro-batch i: dx_i = gradient of x_{l,i}          then the layer's gradients leave
//! ```
//!
//! So each weight's gradient is complete before the next layer's begins, and goes to the host once in a step, for any number of
//! micro-batches. The order of all sums is that of one micro-batch after the other, except in an embedding that is the head too.
//!
//! | bytes over the bus in a step of n micro-batches | |
//! |---|---|
//! | inputs of layers, and gradients of them | 5 · n · layers · rows · hidden · size |
//! | gradients of weights | 4 · weights, and again for the optimizer |
//!
//! While one micro-batch passes a layer, the input of the next arrives and the result of the last leaves.
//!
//! Source: the order is that of Pudipeddi et al., "Training Large Neural Networks with Constant Memory using a New Execution
//! Algorithm" (2020).

use burn::tensor::Tensor;

use super::layer::Kept;
use super::parking::{Parked, Parking};
use super::{Gradients, Learns, Loss, Pass, TrainBatch, Trained};
use crate::decoder::{Decoder, MicroBatch};
use crate::parameters::Piece;
use crate::{Error, Recompute};

/// The micro-batches of a step.
struct Step<'a> {
    passes: Vec<Pass<'a>>,
    parking: &'a Parking,
    gradients: &'a Gradients,
    goes_on: &'a dyn Fn() -> bool,
}

/// Result of a pass that may be abandoned.
type Abandonable<T> = Result<Option<T>, Error>;

impl Step<'_> {
    /// Applies `f` to each micro-batch and its matrix, while the next matrix arrives and the last result leaves. None if the step
    /// is abandoned.
    fn each(
        &self,
        mut matrices: Vec<Parked>,
        f: impl Fn(&Pass<'_>, Tensor<2>) -> Result<Tensor<2>, Error>,
    ) -> Abandonable<Vec<Parked>> {
        let mut results = Vec::new();
        matrices.reverse();
        for pass in &self.passes {
            if !(self.goes_on)() {
                return Ok(None);
            }
            let own = matrices.pop().expect("one per micro-batch");
            if let Some(next) = matrices.last_mut() {
                self.parking.fetch(next)?;
            }
            let result = f(pass, self.parking.take(own)?)?;
            results.push(self.parking.park(result, self.passes.len() == 1)?);
        }
        Ok(Some(results))
    }

    /// Runs a layer forward, and keeps its inputs.
    fn forward(&self, layer: usize, inputs: &mut [Parked]) -> Abandonable<Vec<Parked>> {
        let _layer = trace::span(|| format!("layer {layer}"));
        let mut results = Vec::new();
        for (index, pass) in self.passes.iter().enumerate() {
            if !(self.goes_on)() {
                return Ok(None);
            }
            if let Some(next) = inputs.get_mut(index + 1) {
                self.parking.fetch(next)?;
            }
            let x = self.parking.tensor(&mut inputs[index])?;
            let (out, _) = pass.forward(layer, x, Recompute::Layers, [None; 2])?;
            results.push(self.parking.park(out, self.passes.len() == 1)?);
        }
        Ok(Some(results))
    }

    /// Runs a layer backward, given its inputs and the gradients of its outputs. Returns those of its inputs.
    fn backward(
        &self,
        layer: usize,
        mut inputs: Vec<Parked>,
        mut upstream: Vec<Parked>,
        below: bool,
    ) -> Abandonable<Vec<Parked>> {
        let _layer = trace::span(|| format!("backward {layer}"));
        let mut results = Vec::new();
        inputs.reverse();
        upstream.reverse();
        for pass in &self.passes {
            if !(self.goes_on)() {
                return Ok(None);
            }
            let (x, dx) = (inputs.pop(), upstream.pop());
            let (x, dx) = (x.expect("one per micro-batch"), dx.expect("one per micro-batch"));
            for next in [&mut inputs, &mut upstream] {
                if let Some(next) = next.last_mut() {
                    self.parking.fetch(next)?;
                }
            }
            let (x, dx) = (self.parking.take(x)?, self.parking.take(dx)?);
            let kept = Kept::input(x);
            pass.decoder.note_memory();
            if let Some(dx) = pass.backward(layer, kept, dx, below)? {
                results.push(self.parking.park(dx, self.passes.len() == 1)?);
            }
        }
        Ok(Some(results))
    }

    /// Adds gradients to a piece. `complete` says that no other call adds to it in this step.
    fn adding<T>(
        &self,
        piece: Piece,
        complete: bool,
        run: impl FnOnce() -> Abandonable<T>,
    ) -> Abandonable<T> {
        let ctx = self.passes[0].decoder.ctx();
        self.gradients.open(ctx, piece)?;
        let result = run()?;
        self.gradients.close(ctx, complete)?;
        Ok(result)
    }
}

impl Decoder {
    /// Adds the gradients of several micro-batches like [`Decoder::add_gradients`], layer by layer. It recomputes layers, and inputs
    /// of layers wait in `parking`. Returns the loss of each; none once `goes_on` returns false, which leaves the gradients
    /// incomplete.
    ///
    /// # Errors
    /// The errors of [`Decoder::add_gradients`].
    pub fn add_gradients_by_layer(
        &self,
        trained: Trained<'_>,
        gradients: &Gradients,
        micro_batches: &[MicroBatch],
        (weight, scale): (f64, Tensor<1>),
        parking: &Parking,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Loss>>, Error> {
        let _stream_guard = ops::stream_guard();
        let batches = micro_batches.iter().map(|batch| TrainBatch::new(self, batch.into()));
        let batches = batches.collect::<Result<Vec<_>, _>>()?;
        if batches.is_empty() {
            return Err(Error::NothingToLearn);
        }
        let learns = Learns::new(self, trained)?;
        let (lowest, whole) = (learns.lowest(), matches!(learns, Learns::Weights(_)));
        let pass = |batch| Pass {
            decoder: self,
            batch,
            learns: &learns,
            gradients: Some(gradients),
            places: None,
        };
        let passes = batches.iter().map(pass).collect();
        let step = Step { passes, parking, gradients, goes_on };
        let soon = batches.len() == 1;
        let embedded = batches.iter().map(|batch| parking.park(batch.embedded(self)?, soon));
        let mut x = embedded.collect::<Result<Vec<_>, _>>()?;
        let mut inputs = Vec::new();
        for layer in 0..self.layers.len() {
            let Some(out) = step.forward(layer, &mut x)? else { return Ok(None) };
            let own = std::mem::replace(&mut x, out);
            match layer >= lowest {
                true => inputs.push(own),
                false => own.into_iter().try_for_each(|x| parking.release(x))?,
            }
        }
        let tied = self.config.tie_embeddings;
        let losses = std::cell::RefCell::new(Vec::new());
        let piece = if tied { Piece::Tables } else { Piece::Head };
        let dx = step.adding(piece, !tied, || {
            step.each(x, |pass, x| {
                let (loss, dx) = pass.loss(x, Some((weight, scale.clone())))?;
                losses.borrow_mut().push(loss);
                Ok(dx.expect("it is asked for"))
            })
        })?;
        let Some(mut dx) = dx else { return Ok(None) };
        for layer in (lowest..self.layers.len()).rev() {
            let own = inputs.pop().expect("one per layer");
            let run = || step.backward(layer, own, dx, layer > lowest || whole);
            let Some(below) = step.adding(Piece::Layer(layer), true, run)? else {
                return Ok(None);
            };
            dx = below;
        }
        if let Trained::Weights(flat) = trained {
            let run = || {
                for (batch, dx) in batches.iter().zip(dx) {
                    let dx = parking.take(dx)?;
                    self.add_tables(flat.parameters(), gradients, batch, dx)?;
                }
                Ok(Some(()))
            };
            step.adding(Piece::Tables, true, run)?;
        }
        Ok(Some(losses.into_inner()))
    }
}
