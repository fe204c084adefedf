//! Choice of a model's formats, and its memory, before it is loaded.

#[cfg(test)]
mod tests;

use std::path::Path;

use arch::{ArchProfile, Backend, DType};
use burn::tensor::FloatDType;
use kernels::quantized;
use models::{
    Adapter, DecoderConfig, KvFormat, LoadOptions, ModelPrecision, OnDevice, Weights, Workload,
};
use quant::WeightFormat;

use crate::device::Device;
use crate::device_error::check_free;
use crate::engine::Engine;
use crate::load_error::LoadError;
use crate::memory::{Plan, PlannedModel, check_host};
use crate::options::{Compute, EngineOptions};

/// A model with known formats and memory that is not yet on a device.
pub(crate) struct Prepared {
    pub(crate) planned: PlannedModel,
    pub(crate) load: LoadOptions,
}

impl Prepared {
    pub(crate) fn of_files(
        profile: &ArchProfile,
        folder: &Path,
        weights: &Weights,
        adapter: Option<&Adapter>,
        options: &EngineOptions,
    ) -> Result<Self, LoadError> {
        let load = load_options(profile, options, models::file_dtype(weights)?)?;
        let OnDevice { weight_format, bytes, lora_columns } =
            models::on_device(weights, adapter, &load)?;
        let more = |quant: WeightFormat| weight_format.is_some_and(|own| own.bits() < quant.bits());
        if options.quant.is_some_and(more) {
            return Err(LoadError::FourBits(folder.to_owned()));
        }
        let precision =
            ModelPrecision { lora_columns, ..precision(profile, &load, weight_format)? };
        let planned = PlannedModel {
            model: folder.display().to_string(),
            config: in_context(weights.config().clone(), options)?,
            precision,
            weights: bytes,
            device: profile.clone(),
            budget: options.budget,
        };
        Ok(Self { planned, load })
    }

    pub(crate) fn of_shape(
        profile: &ArchProfile,
        shape: &str,
        options: &EngineOptions,
    ) -> Result<Self, LoadError> {
        let config = in_context(Engine::shape(shape)?, options)?;
        let load = load_options(profile, options, FloatDType::BF16)?;
        let precision = precision(profile, &load, options.quant)?;
        let planned = PlannedModel {
            model: shape.to_owned(),
            weights: config.loaded_bytes(precision),
            config,
            precision,
            device: profile.clone(),
            budget: options.budget,
        };
        Ok(Self { planned, load })
    }

    /// Refuses a workload that does not fit in memory.
    pub(crate) fn fits(&self, device: &Device, options: &EngineOptions) -> Result<(), LoadError> {
        let workload = options.workload.clone().unwrap_or(Workload::new(1, 1));
        let plan = self.planned.checked(workload)?.fitting()?;
        check_host(plan.host_bytes.into())?;
        Ok(check_free(device, plan.peak_bytes().into())?)
    }
}

impl Plan {
    /// Plans for a Hugging Face folder on a device with this profile. Reads only the headers of the weights.
    ///
    /// # Errors
    /// The errors of [`crate::Engine::load`], but a plan that does not [fit](Plan::fits) is returned.
    /// [`LoadError::Plan`] for an adapter that the model cannot have.
    pub fn of_folder(
        profile: &ArchProfile,
        folder: impl AsRef<Path>,
        options: &EngineOptions,
        workload: Workload,
    ) -> Result<Self, LoadError> {
        let weights = Weights::open(folder.as_ref()).map_err(LoadError::Folder)?;
        let prepared = Prepared::of_files(profile, folder.as_ref(), &weights, None, options)?;
        Ok(prepared.planned.checked(workload)?)
    }

    /// Plans for a published shape with random weights, as in [`crate::Engine::random`].
    ///
    /// # Errors
    /// The errors of [`crate::Engine::random`] and [`Plan::of_folder`].
    pub fn of_shape(
        profile: &ArchProfile,
        shape: &str,
        options: &EngineOptions,
        workload: Workload,
    ) -> Result<Self, LoadError> {
        let prepared = Prepared::of_shape(profile, shape, options)?;
        Ok(prepared.planned.checked(workload)?)
    }
}

/// Returns the config with the context length of the options.
fn in_context(config: DecoderConfig, options: &EngineOptions) -> Result<DecoderConfig, LoadError> {
    let Some(positions) = options.max_context else { return Ok(config) };
    config.with_context(positions).map_err(LoadError::Model)
}

/// Returns the number formats of a model. Load options made in this module always have a dtype.
fn precision(
    profile: &ArchProfile,
    load: &LoadOptions,
    weight_format: Option<WeightFormat>,
) -> Result<ModelPrecision, LoadError> {
    let rounds = |format| quantized::rounds_activations(profile, format);
    if load.int8_activations && !weight_format.is_some_and(rounds) {
        return Err(LoadError::Int8Activations);
    }
    if load.tf32 && weight_format.is_some() {
        return Err(LoadError::Tf32);
    }
    let dtype = load.dtype.unwrap_or(FloatDType::F32);
    Ok(ModelPrecision { dtype, tf32: load.tf32, weight_format, kv: load.kv, lora_columns: 0 })
}

const fn storage(dtype: FloatDType) -> DType {
    match dtype {
        FloatDType::BF16 => DType::Bf16,
        FloatDType::F16 => DType::F16,
        _ => DType::F32,
    }
}

/// Returns the dtype of tensors: the requested one, or that of the files if the device computes in it.
pub(crate) fn compute_dtype(
    profile: &ArchProfile,
    requested: Option<Compute>,
    file: FloatDType,
) -> Result<FloatDType, LoadError> {
    let stored = &profile.dtypes;
    let Some(compute) = requested else {
        // A CPU computes in f32 for every stored dtype. WGSL has no 16-bit dtypes here.
        let wide = profile.backend == Backend::Cpu || !stored.contains(&storage(file));
        return Ok(if wide { FloatDType::F32 } else { file });
    };
    let (need, float) = match compute {
        Compute::F32 => (DType::F32, FloatDType::F32),
        Compute::Tf32 => (DType::Tf32, FloatDType::F32),
        Compute::F16 => (DType::F16, FloatDType::F16),
        Compute::Bf16 => (DType::Bf16, FloatDType::BF16),
    };
    match stored.contains(&need) {
        true => Ok(float),
        false => Err(LoadError::DType { need, backend: profile.backend }),
    }
}

fn load_options(
    profile: &ArchProfile,
    options: &EngineOptions,
    file: FloatDType,
) -> Result<LoadOptions, LoadError> {
    let dtype = Some(compute_dtype(profile, options.dtype, file)?);
    let quant = options.quant.map(WeightFormat::scheme);
    if options.kv == KvFormat::Int8 && !profile.dtypes.contains(&DType::I8) {
        return Err(LoadError::KvFormat { backend: profile.backend });
    }
    let tf32 = options.dtype == Some(Compute::Tf32);
    let int8_activations = options.int8_activations;
    Ok(LoadOptions { dtype, tf32, quant, kv: options.kv, int8_activations })
}
