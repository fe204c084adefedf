//! Gradients of all trained values, on the device or in host memory.
//!
//! ```text
//! on the device    one buffer with the layout of the values
//! in host memory   one piece after the other: open, add to it, close
//!                  window   of the open piece, and of the one before while it is copied
//!                  rest     vectors and small matrices, on the device
//! ```

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use ops::Ctx;
use ops::training::{
    Control, HostBuffer, Link, NormGradients, StepRules, Transfer, control, load, save,
};

use super::Trained;
use crate::decoder::flat::zeros;
use crate::names::{Side, Slot};
use crate::parameters::Piece;
use crate::{Error, Parameters};

/// Gradients of all trained values in f32.
pub struct Gradients {
    /// All gradients; with `offloaded`, the window and then the rest.
    sums: Tensor<1>,
    offloaded: Option<Offloaded>,
}

/// Gradients of which all pieces but the open one are in host memory.
struct Offloaded {
    link: Arc<Link>,
    pieces: Vec<(Piece, Range<usize>)>,
    /// Elements of the window: two layers, or the largest other piece.
    window: usize,
    state: RefCell<State>,
}

struct State {
    host: HostBuffer,
    /// Index of the open piece, and its first element in the window.
    open: Option<(usize, usize)>,
    /// Copies to the host, and what they read of the window.
    saving: Vec<(Range<usize>, Transfer)>,
    /// Control with the norm of each piece that is complete.
    norms: Vec<Tensor<1>>,
    /// True for pieces that the host has sums of.
    saved: Vec<bool>,
}

/// Rules that leave a norm as it is.
const NORM: StepRules = StepRules { max_norm: None, beta1: 0.0, beta2: 0.0, growth_interval: None };

impl Gradients {
    /// Creates a buffer of zeros on the device.
    pub fn zeros(trained: Trained<'_>) -> Self {
        let values = trained.values();
        let sums = zeros(values.dims()[0], FloatDType::F32, &values.device());
        Self { sums, offloaded: None }
    }

    /// Creates zeros in host memory, with a window on the device.
    ///
    /// # Errors
    /// [`Error::Op`] for too little host memory.
    pub fn offloaded(
        parameters: &Parameters,
        link: &Arc<Link>,
        device: &Device,
    ) -> Result<Self, Error> {
        let pieces = parameters.pieces();
        let (window, rest) = Self::lengths(parameters);
        let end = pieces.last().map_or(0, |(_, range)| range.end);
        let state = State {
            host: HostBuffer::zeros(link, 4 * end).map_err(ops::OpError::from)?,
            open: None,
            saving: Vec::new(),
            norms: Vec::new(),
            saved: vec![false; pieces.len()],
        };
        let (link, state) = (link.clone(), RefCell::new(state));
        let sums = zeros(window + rest, FloatDType::F32, device);
        Ok(Self { sums, offloaded: Some(Offloaded { link, pieces, window, state }) })
    }

    /// Returns the elements of the window, and of the rest.
    pub(crate) fn lengths(parameters: &Parameters) -> (usize, usize) {
        let pieces = parameters.pieces();
        let width = |(piece, range): &(Piece, Range<usize>)| match piece {
            Piece::Layer(_) => 2 * range.len(),
            _ => range.len(),
        };
        let moved: usize = pieces.iter().map(|(_, range)| range.len()).sum();
        (pieces.iter().map(width).max().unwrap_or(0), parameters.len() - moved)
    }

    /// Returns the buffer on the device: all gradients, unless they are offloaded.
    pub const fn sums(&self) -> &Tensor<1> {
        &self.sums
    }

    /// Sets all gradients to 0.
    ///
    /// # Errors
    /// [`Error::Op`] for a device without kernels.
    pub fn clear(&self, ctx: &Ctx) -> Result<(), Error> {
        let Some(own) = &self.offloaded else {
            return Ok(ops::training::clear(ctx, &self.sums)?);
        };
        let mut state = own.state.borrow_mut();
        // An abandoned step leaves a piece open.
        state.open = None;
        state.norms.clear();
        state.saved.fill(false);
        let rest = self.sums.dims()[0] - own.window;
        match rest {
            0 => Ok(()),
            rest => Ok(ops::training::clear(ctx, &ops::view(&self.sums, own.window, [rest])?)?),
        }
    }

    /// Makes place for sums of a piece; they are 0, or what an earlier [`Gradients::close`] left. Nothing for gradients on the
    /// device.
    pub(super) fn open(&self, ctx: &Ctx, piece: Piece) -> Result<(), Error> {
        let Some(own) = &self.offloaded else { return Ok(()) };
        let Some(index) = own.pieces.iter().position(|(other, _)| *other == piece) else {
            return Ok(());
        };
        let range = own.pieces[index].1.clone();
        let start = match piece {
            Piece::Layer(layer) if layer % 2 == 1 => own.window - range.len(),
            _ => 0,
        };
        let place = start..start + range.len();
        let mut state = own.state.borrow_mut();
        let overlap = |other: &Range<usize>| other.start < place.end && place.start < other.end;
        while let Some(at) = state.saving.iter().position(|(other, _)| overlap(other)) {
            state.saving.swap_remove(at).1.wait().map_err(ops::OpError::from)?;
        }
        let window: Tensor<1> = ops::view(&self.sums, start, [range.len()])?;
        match state.saved[index] {
            true => {
                let loading = load(&own.link, &mut state.host, 4 * range.start, &window)?;
                loading.wait().map_err(ops::OpError::from)?;
            }
            false => ops::training::clear(ctx, &window)?,
        }
        state.open = Some((index, start));
        Ok(())
    }

    /// Begins to move the open piece to the host. `complete` says that nothing more is added to it in this step.
    pub(super) fn close(&self, ctx: &Ctx, complete: bool) -> Result<(), Error> {
        let Some(own) = &self.offloaded else { return Ok(()) };
        let mut state = own.state.borrow_mut();
        let Some((index, start)) = state.open.take() else { return Ok(()) };
        let range = own.pieces[index].1.clone();
        let window: Tensor<1> = ops::view(&self.sums, start, [range.len()])?;
        if complete {
            state.norms.push(norm(ctx, &window)?);
        }
        let saving = save(&own.link, &window, &mut state.host, 4 * range.start)?;
        state.saving.push((start..start + range.len(), saving));
        state.saved[index] = true;
        Ok(())
    }

    /// Returns a vector whose norm is that of all gradients.
    pub(crate) fn for_norm(&self, ctx: &Ctx) -> Result<Tensor<1>, Error> {
        let Some(own) = &self.offloaded else { return Ok(self.sums.clone()) };
        let state = own.state.borrow();
        let mut norms = state.norms.clone();
        let rest = self.sums.dims()[0] - own.window;
        if rest > 0 {
            norms.push(norm(ctx, &ops::view(&self.sums, own.window, [rest])?)?);
        }
        // The norm is field 6 of the control.
        let mut all: Vec<_> = norms.into_iter().map(|norm| norm.slice_dim(0, 6..7)).collect();
        let padding = all.len().next_multiple_of(4) - all.len();
        if padding > 0 {
            all.push(Tensor::zeros([padding], (&self.sums.device(), DType::F32)));
        }
        Ok(Tensor::cat(all, 0))
    }

    /// Returns the gradients of a range of values, if they are on the device.
    pub(crate) fn on_device(&self, range: &Range<usize>) -> Result<Option<Tensor<1>>, Error> {
        let Some(at) = self.place(range.start) else { return Ok(None) };
        Ok(Some(ops::view(&self.sums, at, [range.len()])?))
    }

    /// Begins to copy gradients from `from` on into a tensor.
    ///
    /// # Panics
    /// If they are on the device.
    pub(crate) fn load(&self, from: usize, into: &Tensor<1>) -> Result<Transfer, Error> {
        let own = self.offloaded.as_ref().expect("they are offloaded");
        let mut state = own.state.borrow_mut();
        for (_, saving) in std::mem::take(&mut state.saving) {
            saving.wait().map_err(ops::OpError::from)?;
        }
        Ok(load(&own.link, &mut state.host, 4 * from, into)?)
    }

    /// Returns the element of the device's buffer for a value; none for a value in host memory.
    fn place(&self, at: usize) -> Option<usize> {
        let Some(own) = &self.offloaded else { return Some(at) };
        let Some(index) = own.pieces.iter().position(|(_, range)| range.contains(&at)) else {
            let before = own.pieces.iter().filter(|(_, range)| range.end <= at);
            return Some(own.window + at - before.map(|(_, range)| range.len()).sum::<usize>());
        };
        let (open, start) = own.state.borrow().open?;
        (open == index).then(|| start + at - own.pieces[index].1.start)
    }

    fn view<const D: usize>(&self, at: usize, shape: [usize; D]) -> Result<Tensor<D>, Error> {
        let at = self.place(at).expect("the piece is open");
        Ok(ops::view(&self.sums, at, shape)?)
    }

    pub(super) fn matrix(&self, parameters: &Parameters, slot: Slot) -> Result<Tensor<2>, Error> {
        let tensor = parameters.tensor(slot, Side::Weight).expect("the decoder has it");
        self.view(tensor.at, [tensor.rows(), tensor.shape[1]])
    }

    /// Returns the gradient of a vector, if the decoder has it.
    pub(super) fn vector(
        &self,
        parameters: &Parameters,
        slot: Slot,
        side: Side,
    ) -> Result<Option<Tensor<1>>, Error> {
        let Some(tensor) = parameters.tensor(slot, side) else { return Ok(None) };
        self.view(tensor.at, [tensor.len()]).map(Some)
    }

    pub(super) fn norm(&self, parameters: &Parameters, slot: Slot) -> Result<NormGradients, Error> {
        let weight = self.vector(parameters, slot, Side::Weight)?.expect("a norm has a weight");
        let bias = self.vector(parameters, slot, Side::Bias)?;
        Ok(NormGradients { weight, bias, accumulate: true })
    }
}

/// Returns a control with the norm of some gradients.
fn norm(ctx: &Ctx, gradients: &Tensor<1>) -> Result<Tensor<1>, Error> {
    let start = TensorData::new(Control::new(1.0).to_array().to_vec(), [ops::training::CONTROL]);
    let state = Tensor::from_data(start, (&gradients.device(), DType::F32));
    control(ctx, gradients, &state, NORM)?;
    Ok(state)
}
