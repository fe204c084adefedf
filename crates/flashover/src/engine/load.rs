//! Loading a folder or a published shape onto a device.

use std::borrow::Cow;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use models::{Decoder, DecoderConfig, Loading};
use ops::Ctx;

use super::folder::{ModelFolder, Reader};
use super::pages::Pages;
use super::precompile::{Precompilation, Precompiled};
use super::sampler;
use super::version::Version;
use super::{Engine, Inner};
use crate::context::{context, log_warnings, on_burn};
use crate::device::Device;
use crate::load_error::LoadError;
use crate::options::EngineOptions;
use crate::prepare::Prepared;

/// Progress of loading a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Number of parts on the device. Parts are the embedding, the output projection and each layer.
    pub done: usize,
    /// Number of all parts.
    pub parts: usize,
    /// Number of kernels that compile while weights load.
    pub kernels: usize,
}

impl Engine {
    /// Loads a Hugging Face folder: config.json, safetensors, and generation_config.json and tokenizer.json if present.
    /// Files are mapped and uploaded one tensor at a time. A chat template is read on first use. [`Engine::builder`]
    /// does the same with one method per setting.
    ///
    /// # Errors
    /// - [`LoadError::Folder`] for a folder without a supported model
    /// - [`PlanError::Memory`](crate::memory::PlanError::Memory) if model and workload do not fit; nothing is loaded
    /// - [`DeviceError::OutOfMemory`](crate::DeviceError::OutOfMemory) if the device has less free memory than planned
    /// - [`LoadError::Text`] for a tokenizer that cannot be read or belongs to another model
    pub fn load(
        device: &Device,
        folder: impl AsRef<Path>,
        options: &EngineOptions,
    ) -> Result<Self, LoadError> {
        Self::from_folder(device, ModelFolder::open(folder)?, options, |_| {})
    }

    /// Loads an open folder and calls `progress` after each part.
    ///
    /// # Errors
    /// The errors of [`Engine::load`], without those of [`ModelFolder::open`].
    pub fn from_folder(
        device: &Device,
        folder: ModelFolder,
        options: &EngineOptions,
        mut progress: impl FnMut(LoadProgress),
    ) -> Result<Self, LoadError> {
        let folder = match options.max_context {
            Some(positions) => folder.with_max_context(positions)?,
            None => folder,
        };
        let ModelFolder { weights, reader, adapter, .. } = folder;
        let adapter = adapter.as_ref();
        let (profile, own) = (device.profile(), &reader.folder);
        let prepared = Prepared::of_files(profile, own, &weights, adapter, options)?;
        prepared.fits(device, options)?;
        let (ctx, on) = (known_configs(device, options)?, on_burn(device));
        let load = &prepared.load;
        let outline = |ctx: &Ctx| Decoder::outline(&weights, adapter, &on, ctx, load);
        let sampling = sampler::rehearse(!reader.absent.is_empty());
        let precompilation = Precompilation::start(outline, &ctx, &on, options, sampling)?;
        let progress = |Loading { done, parts }: Loading| {
            progress(LoadProgress { done, parts, kernels: precompilation.kernels });
        };
        let decoder = Decoder::load_adapted(&weights, adapter, &on, ctx, load, progress)?;
        precompilation.finish();
        Self::finish_loading(Inner {
            reader,
            device: device.clone(),
            decoder,
            planned: prepared.planned,
            ledger: Arc::default(),
            precompiled: Precompiled::default(),
            version: Version::default(),
            pages: Pages(device.clone()),
        })
    }

    /// Returns the names of the published shapes for [`Engine::random`], such as `llama-3-8b`.
    pub fn shapes() -> impl Iterator<Item = &'static str> {
        models::shapes::names()
    }

    /// Returns the config of a shape: the name of a published one, or the path of a `config.json`.
    ///
    /// # Errors
    /// [`LoadError::Shape`] for an unknown shape; [`LoadError::Folder`] for a file that is no config of a known family.
    pub fn shape(name: &str) -> Result<DecoderConfig, LoadError> {
        DecoderConfig::from_json(&Self::shape_text(name)?).map_err(LoadError::Folder)
    }

    /// Returns the text of a shape's `config.json`.
    pub(crate) fn shape_text(name: &str) -> Result<Cow<'static, str>, LoadError> {
        if let Some(text) = models::shapes::text(name) {
            return Ok(text.into());
        }
        let path = Path::new(name);
        if path.extension().is_none_or(|extension| extension != "json") {
            let known = models::shapes::names().collect::<Vec<_>>().join(", ");
            return Err(LoadError::Shape { shape: name.to_owned(), known });
        }
        let read = |why| models::Error::Read { path: path.to_owned(), why };
        // Reading a pipe waits for its writer.
        let text = checkpoint::ends(path).and_then(|()| fs::read_to_string(path));
        Ok(text.map_err(read).map_err(LoadError::Folder)?.into())
    }

    /// Returns a model with random weights in a shape, for benchmarks. It has no tokenizer. `shape` is one of
    /// [`Engine::shapes`], or the path of a `config.json`. Calls `progress` after each part.
    ///
    /// # Errors
    /// [`LoadError::Shape`] for an unknown shape; [`LoadError::Plan`] if it does not fit in memory;
    /// [`LoadError::Model`] if the device cannot hold or run it.
    pub fn random(
        device: &Device,
        shape: &str,
        options: &EngineOptions,
        mut progress: impl FnMut(LoadProgress),
    ) -> Result<Self, LoadError> {
        let prepared = Prepared::of_shape(device.profile(), shape, options)?;
        prepared.fits(device, options)?;
        let (ctx, on) = (known_configs(device, options)?, on_burn(device));
        let Prepared { planned, load } = prepared;
        let decoder =
            Decoder::random(&planned.config, &on, ctx, &load, |Loading { done, parts }| {
                progress(LoadProgress { done, parts, kernels: 0 });
            })?;
        Self::finish_loading(Inner {
            reader: Reader::of_shape(shape, planned.config.clone()),
            device: device.clone(),
            decoder,
            planned,
            ledger: Arc::default(),
            precompiled: Precompiled::default(),
            version: Version::default(),
            pages: Pages(device.clone()),
        })
    }

    /// Checks the allocations of a loaded engine, and frees the memory that only loading needed.
    pub(super) fn finish_loading(loaded: Inner) -> Result<Self, LoadError> {
        let engine = Self(Arc::new(loaded));
        let allocated = engine.decoder().check_allocation();
        allocated.map_err(|why| engine.allocation_error::<LoadError>(why))?;
        engine.clear_cache()?;
        Ok(engine)
    }
}

/// Returns the context with the known configs of `device`.
pub(super) fn known_configs(device: &Device, options: &EngineOptions) -> Result<Ctx, LoadError> {
    let ctx = context(device, options.policy.unwrap_or(tune::Policy::Default))?;
    log_warnings(&ctx);
    Ok(ctx)
}
