//! The tensors of a U-Net's checkpoint.

use std::collections::BTreeSet;
use std::path::Path;

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use checkpoint::{Checkpoint, DType, Reason};

use super::config::UnetConfig;
use super::modules::{Modules, Part, Stored};
use crate::decoder::rounded_bytes;
use crate::{Error, fields};

/// Stem of the weight files of diffusers.
const STEM: &str = "diffusion_pytorch_model";

/// A checkpoint that holds exactly the weights of a U-Net. Files are memory-mapped.
#[derive(Debug)]
pub struct UnetWeights {
    config: UnetConfig,
    checkpoint: Checkpoint,
}

impl UnetWeights {
    /// Opens a folder with the `config.json` and the weights of a U-Net, or a pipeline's folder that has them in `unet`.
    ///
    /// Weights are `diffusion_pytorch_model.safetensors`, or with an index of shards, or their `fp16` variants.
    ///
    /// # Errors
    /// The errors of [`UnetConfig::from_json`]; [`Error::Read`] and [`Error::Checkpoint`] for unreadable files;
    /// [`Error::Tensors`] with everything that is missing, unused, or of the wrong shape or dtype.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, Error> {
        let mut folder = folder.as_ref().to_owned();
        if !folder.join("config.json").exists() && folder.join("unet/config.json").exists() {
            folder.push("unet");
        }
        let config = UnetConfig::from_json(&fields::read(&folder.join("config.json"))?)?;
        Self::new(config, Checkpoint::open_stem(&folder, STEM)?)
    }

    /// Matches the tensors of a checkpoint to the weights of `config`.
    ///
    /// # Errors
    /// [`Error::Tensors`].
    pub fn new(config: UnetConfig, checkpoint: Checkpoint) -> Result<Self, Error> {
        let mut left: BTreeSet<&str> = checkpoint.names().collect();
        let (mut missing, mut wrong) = (BTreeSet::new(), Vec::new());
        Modules::build(&config, &mut |part: &Part| {
            for Stored { names, added, shape } in &part.tensors {
                let own = names.iter().find(|name| checkpoint.contains(name)).unwrap_or(&names[0]);
                for name in [Some(own), added.as_ref()].into_iter().flatten() {
                    left.remove(name.as_str());
                    let error = |reason| checkpoint::Error::Tensor { tensor: name.clone(), reason };
                    match checkpoint.tensor(name) {
                        Err(_) => drop(missing.insert(name.clone())),
                        Ok(tensor) if !DType::FLOATS.contains(&tensor.dtype) => {
                            let (have, need) = (tensor.dtype, DType::FLOATS.to_vec());
                            wrong.push(error(Reason::DType { have, need }));
                        }
                        Ok(tensor) if tensor.shape != *shape => {
                            let (have, need) = (tensor.shape, shape.clone());
                            wrong.push(error(Reason::Shape { have, need }));
                        }
                        Ok(_) => {}
                    }
                }
            }
            Ok(())
        })?;
        let unused: Vec<String> = left.into_iter().map(str::to_owned).collect();
        if missing.is_empty() && unused.is_empty() && wrong.is_empty() {
            return Ok(Self { config, checkpoint });
        }
        Err(Error::Tensors { missing: missing.into_iter().collect(), unused, wrong })
    }

    /// Returns the configuration.
    pub const fn config(&self) -> &UnetConfig {
        &self.config
    }

    /// Returns the dtype of the first convolution, which is the default compute dtype.
    pub fn dtype(&self) -> FloatDType {
        match self.checkpoint.tensor("conv_in.weight").map(|tensor| tensor.dtype) {
            Ok(DType::F16) => FloatDType::F16,
            Ok(DType::Bf16) => FloatDType::BF16,
            _ => FloatDType::F32,
        }
    }

    /// Loads all weights onto a device, rounded to `dtype`, one at a time.
    pub(super) fn load(
        &self,
        device: &Device,
        dtype: FloatDType,
    ) -> Result<Modules<Tensor<1>>, Error> {
        Modules::build(&self.config, &mut |part: &Part| {
            let bytes = self.bytes(part, dtype)?;
            let _stream_guard = ops::stream_guard();
            let dtype = burn::tensor::DType::from(dtype);
            let data = TensorData::from_bytes_vec(bytes, vec![part.values()], dtype);
            Ok(device.memory_persistent_allocations(data, move |data| {
                Tensor::from_data(data, (device, dtype))
            }))
        })
    }

    /// Returns the values of a weight in `dtype`; those of convolutions with their channels last.
    fn bytes(&self, part: &Part, dtype: FloatDType) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        for stored in &part.tensors {
            let mut values = self.values(stored)?;
            if let Some(rows) = &part.rows {
                let row = stored.shape[1..].iter().product::<usize>();
                values = values[rows.start * row..rows.end * row].to_vec();
            }
            if let &[filters, channels, rows, cols] = &stored.shape[..] {
                values = channels_last(&values, [filters, channels, rows * cols]);
            }
            let own = rounded_bytes(&values, dtype);
            if !finite(&own, dtype) {
                let tensor = self.not_finite(stored)?.to_owned();
                let dtype = burn::tensor::DType::from(dtype).name();
                let stored = values.iter().any(|value| !value.is_finite());
                return Err(Error::NotFinite { tensor, dtype, stored });
            }
            bytes.extend(own);
        }
        Ok(bytes)
    }

    /// Returns the name that a tensor has in the checkpoint.
    fn name<'a>(&self, stored: &'a Stored) -> &'a str {
        let own = stored.names.iter().find(|name| self.checkpoint.contains(name));
        own.unwrap_or(&stored.names[0])
    }

    /// Returns the name of a tensor with values that are not finite, or else that of the sum.
    fn not_finite<'a>(&self, stored: &'a Stored) -> Result<&'a str, Error> {
        let names = stored.added.as_deref().into_iter().chain([self.name(stored)]);
        for name in names {
            if !self.read(name)?.iter().all(|value| value.is_finite()) {
                return Ok(name);
            }
        }
        Ok(self.name(stored))
    }

    /// Returns the values of a tensor of the checkpoint.
    fn read(&self, name: &str) -> Result<Vec<f32>, Error> {
        let tensor = self.checkpoint.tensor(name)?;
        let error = |reason| checkpoint::Error::Tensor { tensor: name.to_owned(), reason };
        let values = tensor.widened().map_err(error)?.into_owned();
        self.checkpoint.release(name);
        Ok(values)
    }

    /// Returns the values of a tensor, with those that are added to it.
    fn values(&self, stored: &Stored) -> Result<Vec<f32>, Error> {
        let mut values = self.read(self.name(stored))?;
        if let Some(added) = &stored.added {
            values.iter_mut().zip(self.read(added)?).for_each(|(value, more)| *value += more);
        }
        Ok(values)
    }
}

/// Reorders `[filters, channels, taps]` to `[filters, taps, channels]`.
fn channels_last(values: &[f32], [_, channels, taps]: [usize; 3]) -> Vec<f32> {
    let filters = values.chunks(channels * taps);
    let reordered = filters.flat_map(|filter| {
        (0..taps)
            .flat_map(move |tap| (0..channels).map(move |channel| filter[channel * taps + tap]))
    });
    reordered.collect()
}

/// Returns true if no value is infinite or NaN.
fn finite(bytes: &[u8], dtype: FloatDType) -> bool {
    let exponents = |mask: u16| {
        let halves = bytes.as_chunks::<2>().0;
        halves.iter().all(|half| u16::from_le_bytes(*half) & mask != mask)
    };
    match dtype {
        FloatDType::F16 => exponents(0x7c00),
        FloatDType::BF16 => exponents(0x7f80),
        _ => bytes.as_chunks::<4>().0.iter().all(|word| f32::from_le_bytes(*word).is_finite()),
    }
}
