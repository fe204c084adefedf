//! A model whose weights are trained.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::{DType, FloatDType};
use models::{
    Decoder, DecoderConfig, FlatWeights, HostWeights, Offload, Parameters, Training, Trains,
    Weights, Workload,
};
use ops::Ctx;
use ops::training::{Link, link};
use serde_json::Value;

use super::folder::{ModelFolder, Reader};
use super::load::known_configs;
use super::pages::Pages;
use super::precompile::Precompiled;
use super::version::Version;
use super::{Engine, Inner};
use crate::context::on_burn;
use crate::device::Device;
use crate::load_error::LoadError;
use crate::model_files::{self, CONFIG};
use crate::options::EngineOptions;
use crate::prepare::Prepared;

/// Weights that training begins with.
#[derive(Debug)]
pub enum Start {
    /// The dense weights of a Hugging Face folder.
    Folder(Box<ModelFolder>),
    /// New weights of a shape: normal with a deviation of 0.02, divided by √(2 · layers) in projections onto the residual stream.
    Scratch {
        /// Name of the shape, one of [`Engine::shapes`], or path of a `config.json`.
        shape: String,
        /// Seed of the weights.
        seed: u64,
    },
}

/// Files that a saved model has besides its weights.
pub(crate) struct SourceFiles {
    /// Text of config.json.
    pub(crate) config: String,
    /// Folder of the other files.
    pub(crate) folder: PathBuf,
    /// Paths in that folder, and contents unless they are large: the folder may be gone when they are saved.
    pub(crate) others: Vec<(PathBuf, Option<Vec<u8>>)>,
    /// Prefix of the weights' names.
    pub(crate) prefix: Option<&'static str>,
}

impl SourceFiles {
    /// `max_context` replaces the context of config.json if it is longer.
    fn of_folder(
        folder: &Path,
        weights: &Weights,
        dtype: &str,
        max_context: Option<usize>,
    ) -> Result<Self, models::Error> {
        let path = folder.join(CONFIG);
        let text = fs::read_to_string(&path).map_err(|why| models::Error::Read { path, why })?;
        let mut config: Value =
            serde_json::from_str(&text).map_err(|why| models::Error::Json { file: CONFIG, why })?;
        let named = |field: &str| config.get(field).and_then(Value::as_str);
        let same = named("dtype").or_else(|| named("torch_dtype")) == Some(dtype);
        let own = DecoderConfig::from_json(&text)?.context();
        // Scaled frequencies depend on the context that the file names.
        let scaled = config.get("rope_scaling").is_some_and(|scaling| !scaling.is_null());
        let longer = max_context.filter(|max| own.is_some_and(|own| *max > own) && !scaled);
        if let Some(fields) = config.as_object_mut() {
            fields.remove("torch_dtype");
            fields.insert("dtype".to_owned(), dtype.into());
            longer.map(|max| fields.insert("max_position_embeddings".to_owned(), max.into()));
        }
        let config = if same && longer.is_none() { text } else { format!("{config:#}\n") };
        const LARGE: u64 = 64 << 20;
        let content = |file: PathBuf| {
            let path = folder.join(&file);
            let read = |why| models::Error::Read { path: path.clone(), why };
            let small = fs::metadata(&path).map_err(read)?.len() < LARGE;
            let own = small.then(|| fs::read(&path)).transpose().map_err(read)?;
            Ok::<_, models::Error>((file, own))
        };
        let others = model_files::others(folder, weights.checkpoint())?;
        let others = others.into_iter().map(content).collect::<Result<_, _>>()?;
        Ok(Self { config, folder: folder.to_owned(), others, prefix: Some(weights.prefix()) })
    }
}

/// Opens the way to host memory if a part of training is there.
pub(crate) fn host_link(
    offload: Offload,
    ctx: &Ctx,
    device: &burn::tensor::Device,
) -> Result<Option<Arc<Link>>, models::Error> {
    match offload == Offload::default() {
        true => Ok(None),
        false => Ok(Some(Arc::new(link(ctx, device)?))),
    }
}

/// An engine, and the flat buffers that hold its weights.
pub(crate) struct Trainable {
    pub(crate) engine: Engine,
    pub(crate) weights: FlatWeights,
    pub(crate) master: Exact,
    /// Present if a part of training is in host memory.
    pub(crate) link: Option<Arc<Link>>,
    pub(crate) files: SourceFiles,
}

/// Master weights in f32 next to weights in 16 bits.
pub(crate) enum Exact {
    Absent,
    Device(Box<FlatWeights>),
    Host(HostWeights),
    /// An optimizer took them from host memory.
    Taken,
}

impl Engine {
    /// Loads weights into flat buffers, if training fits in memory.
    pub(crate) fn trainable(
        device: &Device,
        start: Start,
        options: &EngineOptions,
        training: &Training,
    ) -> Result<Trainable, LoadError> {
        let profile = device.profile();
        let (prepared, reader, folder) = match start {
            Start::Folder(folder) => {
                let folder = match options.max_context {
                    Some(positions) => folder.with_max_context(positions)?,
                    None => *folder,
                };
                let ModelFolder { weights, reader, .. } = folder;
                let prepared =
                    Prepared::of_files(profile, &reader.folder, &weights, None, options)?;
                (prepared, reader, Ok(weights))
            }
            Start::Scratch { shape, seed } => {
                let prepared = Prepared::of_shape(profile, &shape, options)?;
                let reader = Reader::of_shape(&shape, prepared.planned.config.clone());
                (prepared, reader, Err(seed))
            }
        };
        let smallest = options.workload.clone().unwrap_or(Workload::new(1, 1));
        let workload = Workload { training: Some(training.clone()), ..smallest };
        prepared.fits(device, &EngineOptions { workload: Some(workload), ..options.clone() })?;
        let Prepared { mut planned, load } = prepared;
        let (ctx, on) = (known_configs(device, options)?, on_burn(device));
        let config: &DecoderConfig = &planned.config;
        let parameters = Arc::new(Parameters::new(config));
        let filled = |dtype, exact: Option<&mut HostWeights>| {
            let parameters = parameters.clone();
            match &folder {
                Ok(weights) => FlatWeights::of_files(weights, parameters, dtype, &on, exact),
                Err(seed) => FlatWeights::initial(config, parameters, dtype, &on, *seed, exact),
            }
        };
        let dtype = load.dtype.unwrap_or(FloatDType::F32);
        planned.weights = (parameters.len() * DType::from(dtype).size()) as u128;
        let name = match dtype {
            FloatDType::F16 => "float16",
            FloatDType::BF16 => "bfloat16",
            _ => "float32",
        };
        let files = match &folder {
            Ok(weights) => {
                SourceFiles::of_folder(&reader.folder, weights, name, options.max_context)
                    .map_err(LoadError::Folder)?
            }
            Err(_) => SourceFiles {
                config: models::shapes::with_dtype(&Self::shape_text(&planned.model)?, name)
                    .map_err(LoadError::Folder)?,
                folder: PathBuf::new(),
                others: Vec::new(),
                prefix: None,
            },
        };
        let link = host_link(training.offload, &ctx, &on).map_err(LoadError::Folder)?;
        let exact = matches!(training.trains, Trains::Weights { master: true, .. });
        let (weights, master) = match (exact && dtype != FloatDType::F32, &link) {
            (false, _) => (filled(dtype, None)?, Exact::Absent),
            (true, Some(link)) if training.offload.optimizer => {
                let master = HostWeights::zeros(link, &parameters);
                let mut master = master.map_err(LoadError::Folder)?;
                (filled(dtype, Some(&mut master))?, Exact::Host(master))
            }
            (true, _) => {
                let master = filled(FloatDType::F32, None)?;
                (master.rounded(dtype), Exact::Device(master.into()))
            }
        };
        let decoder = Decoder::of_flat(config, &weights, ctx)?;
        let engine = Self::finish_loading(Inner {
            reader,
            device: device.clone(),
            decoder,
            planned,
            ledger: Arc::default(),
            precompiled: Precompiled::default(),
            version: Version::default(),
            pages: Pages(device.clone()),
        })?;
        Ok(Trainable { engine, weights, master, link, files })
    }
}
