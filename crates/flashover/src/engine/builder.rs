//! Builder of an engine from a folder or a name.

use std::fmt;
use std::path::{Path, PathBuf};

use models::{KvFormat, Workload};
use quant::WeightFormat;
use tune::Policy;

use super::{Engine, LoadProgress, ModelFolder};
use crate::device::Device;
use crate::load_error::LoadError;
use crate::memory::MemoryBudget;
use crate::options::{Compute, EngineOptions};

/// Progress of [`EngineBuilder::build`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BuildProgress<'a> {
    /// A file is downloaded from the Hugging Face Hub.
    Downloading {
        /// Name of the file.
        file: &'a str,
        /// Bytes downloaded so far, over all files.
        bytes: u64,
        /// Bytes of all files.
        total_bytes: u64,
    },
    /// Weights are uploaded to the device.
    Loading(LoadProgress),
}

type Report<'p> = dyn FnMut(BuildProgress<'_>) + 'p;

/// Settings for loading an [`Engine`]: see [`Engine::builder`].
#[must_use = "nothing is loaded before `build`"]
pub struct EngineBuilder<'p> {
    model: PathBuf,
    offline: bool,
    device: Option<Device>,
    adapter: Option<PathBuf>,
    options: EngineOptions,
    progress: Option<Box<Report<'p>>>,
}

impl Engine {
    /// Starts to load a model from a Hugging Face folder, or with the default feature `hub` from an
    /// `owner/name[@revision]` of the Hugging Face Hub. [`EngineBuilder::build`] loads it.
    ///
    /// ```
    /// use flashover::{Device, Engine};
    ///
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo");
    /// let engine = Engine::builder(folder).device(Device::cpu()?).build()?;
    /// let text = engine.generate("Once upon a time").max_new_tokens(8).text()?;
    /// assert!(!text.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn builder<'p>(model: impl AsRef<Path>) -> EngineBuilder<'p> {
        EngineBuilder {
            model: model.as_ref().to_owned(),
            offline: false,
            device: None,
            adapter: None,
            options: EngineOptions::default(),
            progress: None,
        }
    }
}

impl<'p> EngineBuilder<'p> {
    /// Sets the device; [`Device::auto`] by default.
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Sets the compute dtype. Default: f32 on a CPU or if the device lacks the files' dtype, otherwise the files'
    /// dtype.
    pub fn dtype(mut self, dtype: Compute) -> Self {
        self.options.dtype = Some(dtype);
        self
    }

    /// Quantises the layers' matrices to this format while they load. By default they keep the files' format.
    pub fn quant(mut self, format: WeightFormat) -> Self {
        self.options.quant = Some(format);
        self
    }

    /// Sets the format of the KV cache; the compute dtype by default.
    pub fn kv_cache(mut self, format: KvFormat) -> Self {
        self.options.kv = format;
        self
    }

    /// Applies a LoRA adapter in PEFT's format. It is merged into dense matrices and stays unmerged next to quantised
    /// ones.
    pub fn adapter(mut self, folder: impl AsRef<Path>) -> Self {
        self.adapter = Some(folder.as_ref().to_owned());
        self
    }

    /// Sets the maximum context length in tokens, which may exceed the length in config.json.
    pub fn max_context(mut self, tokens: usize) -> Self {
        self.options.max_context = Some(tokens);
        self
    }

    /// Limits the device memory of the model and its sequences; no limits by default.
    pub fn memory(mut self, budget: MemoryBudget) -> Self {
        self.options.budget = budget;
        self
    }

    /// Requires that this workload fits in memory: [`EngineBuilder::build`] fails otherwise.
    pub fn workload(mut self, workload: Workload) -> Self {
        self.options.workload = Some(workload);
        self
    }

    /// Sets the policy for problems without a tuned config: `Policy::Measure` times candidates on first use. The
    /// default is `Policy::Default`.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.options.policy = Some(policy);
        self
    }

    /// Replaces all [`EngineOptions`]. Model, device, adapter and progress stay.
    pub fn options(mut self, options: EngineOptions) -> Self {
        self.options = options;
        self
    }

    /// Takes a model given by name from the local cache of the Hub, without downloads.
    #[cfg(feature = "hub")]
    pub fn offline(mut self) -> Self {
        self.offline = true;
        self
    }

    /// Calls `report` during downloads and loading.
    pub fn on_progress(mut self, report: impl FnMut(BuildProgress<'_>) + 'p) -> Self {
        self.progress = Some(Box::new(report));
        self
    }

    /// Loads the model.
    ///
    /// # Errors
    /// The errors of [`Engine::load`]; [`LoadError::Open`] if no device opens; with the feature `hub`,
    /// [`LoadError::Hub`].
    pub fn build(mut self) -> Result<Engine, LoadError> {
        let mut progress = self.progress.take();
        let mut report = |now: BuildProgress<'_>| {
            if let Some(report) = &mut progress {
                report(now);
            }
        };
        let folder = self.folder(&mut report)?;
        let folder = ModelFolder::open(folder)?;
        let folder = match &self.adapter {
            Some(adapter) => folder.with_adapter(adapter)?,
            None => folder,
        };
        let device = match self.device {
            Some(device) => device,
            None => Device::auto()?,
        };
        Engine::from_folder(&device, folder, &self.options, |loading| {
            report(BuildProgress::Loading(loading));
        })
    }

    /// Returns the model's folder. Downloads the model if `model` is a name and not a folder.
    #[cfg(feature = "hub")]
    fn folder(&self, report: &mut Report<'_>) -> Result<PathBuf, LoadError> {
        use hub::{Hub, ModelName};

        let Some(name) = ModelName::from_path(&self.model) else { return Ok(self.model.clone()) };
        let hub = Hub::from_env()?;
        let hub = if self.offline { hub.offline() } else { hub };
        Ok(hub.model(&name, |progress| {
            let hub::Progress { file, bytes, total_bytes } = progress;
            report(BuildProgress::Downloading { file, bytes, total_bytes });
        })?)
    }

    #[cfg(not(feature = "hub"))]
    fn folder(&self, _report: &mut Report<'_>) -> Result<PathBuf, LoadError> {
        Ok(self.model.clone())
    }
}

impl fmt::Debug for EngineBuilder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("EngineBuilder");
        shown.field("model", &self.model).field("offline", &self.offline);
        shown.field("device", &self.device).field("adapter", &self.adapter);
        shown.field("options", &self.options).finish_non_exhaustive()
    }
}
