//! Weights in one flat buffer.

use std::sync::Arc;

use burn::tensor::{DType, Device, FloatDType, Tensor};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rayon::prelude::*;

use super::load::rounded;
use crate::names::{Param, Part, Side, Slot};
use crate::optimizer::HostWeights;
use crate::{DecoderConfig, Error, NormKind, Parameters, Weights};

/// All parameters of a decoder in one buffer on a device, laid out by [`Parameters`]. Clones share the buffer.
#[derive(Debug, Clone)]
pub struct FlatWeights {
    parameters: Arc<Parameters>,
    values: Tensor<1>,
}

impl FlatWeights {
    /// Creates a buffer of zeros.
    pub fn zeros(parameters: Arc<Parameters>, dtype: FloatDType, device: &Device) -> Self {
        let values = zeros(parameters.len(), dtype, device);
        Self { parameters, values }
    }

    /// Reads the dense weights of a checkpoint, rounded to `dtype`. `exact` gets them in f32.
    ///
    /// # Errors
    /// [`Error::Checkpoint`]; [`Error::QuantizedWeights`] for a checkpoint with quantised weights.
    pub fn of_files(
        weights: &Weights,
        parameters: Arc<Parameters>,
        dtype: FloatDType,
        device: &Device,
        exact: Option<&mut HostWeights>,
    ) -> Result<Self, Error> {
        let flat = Self::zeros(parameters, dtype, device);
        flat.fill(exact, |param| {
            let stored = match param.side {
                Side::Weight => weights.weight(param.slot)?,
                Side::Bias => weights.bias(param.slot)?.expect("the decoder has this bias"),
            };
            let dense = stored.dense().ok_or(Error::QuantizedWeights)?;
            let values = dense.widened().expect("the survey of a checkpoint lets no other through");
            Ok(values.into_owned())
        })?;
        Ok(flat)
    }

    /// Creates weights to train from scratch, as GPT-2 does: matrices and tables are normal with a deviation of 0.02, divided by
    /// √(2 · layers) in projections onto the residual stream; biases are 0 and norms do nothing. Each parameter is a function of
    /// the seed and its name alone. `exact` gets them in f32.
    ///
    /// # Errors
    /// [`Error::Op`] for a device without kernels.
    pub fn initial(
        config: &DecoderConfig,
        parameters: Arc<Parameters>,
        dtype: FloatDType,
        device: &Device,
        seed: u64,
        exact: Option<&mut HostWeights>,
    ) -> Result<Self, Error> {
        let flat = Self::zeros(parameters, dtype, device);
        flat.fill(exact, |param| Ok(initial(config, param, seed)))?;
        Ok(flat)
    }

    /// Returns a copy in another dtype, rounded to nearest.
    #[must_use]
    pub fn rounded(&self, dtype: FloatDType) -> Self {
        let _stream_guard = ops::stream_guard();
        let (parameters, exact) = (self.parameters.clone(), self.values.clone());
        let values =
            self.values.device().memory_persistent_allocations(exact, |exact| exact.cast(dtype));
        Self { parameters, values }
    }

    /// Returns a copy in memory of its own.
    #[must_use]
    pub fn copied(&self) -> Self {
        let _stream_guard = ops::stream_guard();
        let copy = |()| self.values.clone().mul_scalar(1.0);
        let values = self.values.device().memory_persistent_allocations((), copy);
        Self { parameters: self.parameters.clone(), values }
    }

    /// Returns the bytes of all values.
    ///
    /// # Errors
    /// [`Error::Failed`].
    pub fn to_host(&self) -> Result<Vec<u8>, Error> {
        let _stream_guard = ops::stream_guard();
        let data = self.values.clone().try_into_data();
        let data = data.map_err(|why| Error::Failed(format!("{why:?}")))?;
        Ok(data.as_bytes().to_vec())
    }

    /// Overwrites all values in place.
    ///
    /// # Errors
    /// [`Error::Op`] for another number of bytes.
    pub fn overwrite(&self, bytes: Vec<u8>) -> Result<(), Error> {
        let _stream_guard = ops::stream_guard();
        let (have, need) = (bytes.len(), self.values.dims()[0] * self.values.dtype().size());
        if have != need {
            let (have, need) = (vec![have], vec![need]);
            return Err(ops::OpError::Shape { what: "the bytes of weights", have, need }.into());
        }
        Ok(ops::training::overwrite(&self.values, 0, bytes)?)
    }

    /// Writes each parameter's values, rounded, and to `exact` as they are.
    fn fill(
        &self,
        mut exact: Option<&mut HostWeights>,
        values: impl Fn(&Param) -> Result<Vec<f32>, Error>,
    ) -> Result<(), Error> {
        let _stream_guard = ops::stream_guard();
        for tensor in self.parameters.tensors() {
            for (param, range) in tensor.parts() {
                let values = values(param)?;
                if let Some(exact) = &mut exact {
                    exact.write(range.start, &values);
                }
                let bytes = rounded(&values, self.dtype());
                ops::training::overwrite(&self.values, range.start, bytes)?;
            }
        }
        Ok(())
    }

    /// Returns the layout.
    pub const fn parameters(&self) -> &Arc<Parameters> {
        &self.parameters
    }

    /// Returns the buffer.
    pub const fn values(&self) -> &Tensor<1> {
        &self.values
    }

    /// Returns the dtype of the values.
    pub fn dtype(&self) -> FloatDType {
        self.values.dtype().into()
    }

    /// Returns a table with its padding: rows of zeros up to a multiple of [`ROWS`](crate::parameters::ROWS).
    ///
    /// # Errors
    /// [`Error::Op`] for a device without kernels.
    pub(super) fn padded(&self, slot: Slot) -> Result<Tensor<2>, Error> {
        let tensor = self.parameters.tensor(slot, Side::Weight).expect("every decoder has it");
        Ok(ops::view(&self.values, tensor.at, [tensor.rows(), tensor.shape[1]])?)
    }

    /// Returns the tensor that begins with the weight or bias of a slot: it shares memory with the buffer.
    ///
    /// # Errors
    /// [`Error::Op`] for a device without kernels.
    ///
    /// # Panics
    /// Panics if the decoder has no such parameter, or if it has another rank.
    pub(super) fn view<const D: usize>(&self, slot: Slot, side: Side) -> Result<Tensor<D>, Error> {
        let tensor = self.parameters.tensor(slot, side).expect("the decoder has this parameter");
        let shape = <[usize; D]>::try_from(&tensor.shape[..]).expect("a parameter of this rank");
        Ok(ops::view(&self.values, tensor.at, shape)?)
    }
}

/// Returns a buffer of zeros with a memory page of its own.
pub(crate) fn zeros(len: usize, dtype: FloatDType, device: &Device) -> Tensor<1> {
    let dtype = DType::from(dtype);
    device.memory_persistent_allocations((), move |()| Tensor::<1>::zeros([len], (device, dtype)))
}

/// Returns the initial values of a parameter.
fn initial(config: &DecoderConfig, param: &Param, seed: u64) -> Vec<f32> {
    let len = param.shape.iter().product();
    if param.shape.len() == 1 {
        let one = param.side == Side::Weight && config.norm.kind != NormKind::RmsPlusOne;
        return vec![if one { 1.0 } else { 0.0 }; len];
    }
    let residual = matches!(param.slot, Slot::Layer(_, Part::Out | Part::Down));
    let layers = config.layers.len() as f64;
    let deviation = if residual { 0.02 / (2.0 * layers).sqrt() } else { 0.02 };
    // FNV-1a of the name and the row: several parameters may share a tensor of a file.
    let place = param.name.bytes().chain(param.row.to_le_bytes());
    let stream = place.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    const CHUNK: usize = 1 << 14;
    let mut values = vec![0.0; len];
    values.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, values)| {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(stream.wrapping_add(chunk as u64));
        normals(values, deviation, &mut random);
    });
    values
}

/// Fills `values` with normal numbers of this deviation, by the method of Box and Muller.
pub(crate) fn normals(values: &mut [f32], deviation: f64, random: &mut ChaCha8Rng) {
    let mut uniform = || (f64::from(random.next_u32()) + 0.5) * 2f64.powi(-32);
    for pair in values.chunks_mut(2) {
        let (radius, angle) = ((-2.0 * uniform().ln()).sqrt(), std::f64::consts::TAU * uniform());
        for (value, part) in pair.iter_mut().zip([angle.cos(), angle.sin()]) {
            *value = (deviation * radius * part) as f32;
        }
    }
}
