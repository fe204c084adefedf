//! A model whose weights are trained.

use std::sync::Arc;

use burn::tensor::{DType, FloatDType};
use models::{Decoder, DecoderConfig, FlatWeights, Parameters, Training, Trains, Workload};

use super::folder::{ModelFolder, Reader};
use super::load::known_configs;
use super::pages::Pages;
use super::precompile::Precompiled;
use super::{Engine, Inner};
use crate::context::on_burn;
use crate::device::Device;
use crate::load_error::LoadError;
use crate::options::EngineOptions;
use crate::prepare::Prepared;

/// Weights that training begins with.
#[derive(Debug)]
pub enum Start {
    /// The dense weights of a Hugging Face folder.
    Folder(Box<ModelFolder>),
    /// New weights of a published shape, one of [`Engine::shapes`]: normal with a deviation of 0.02, divided by √(2 · layers) in
    /// projections onto the residual stream.
    Scratch {
        /// Name of the shape.
        shape: String,
        /// Seed of the weights.
        seed: u64,
    },
}

/// An engine, and the flat buffers that hold its weights.
pub(crate) struct Trainable {
    pub(crate) engine: Engine,
    pub(crate) weights: FlatWeights,
    /// Exact weights in f32; none if `weights` are exact.
    pub(crate) master: Option<FlatWeights>,
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
        let filled = |dtype| {
            let parameters = parameters.clone();
            match &folder {
                Ok(weights) => FlatWeights::of_files(weights, parameters, dtype, &on),
                Err(seed) => FlatWeights::initial(config, parameters, dtype, &on, *seed),
            }
        };
        let dtype = load.dtype.unwrap_or(FloatDType::F32);
        planned.weights = (parameters.len() * DType::from(dtype).size()) as u128;
        let exact = matches!(training.trains, Trains::Weights { master: true, .. });
        let (weights, master) = match exact && dtype != FloatDType::F32 {
            false => (filled(dtype)?, None),
            true => {
                let master = filled(FloatDType::F32)?;
                (master.rounded(dtype), Some(master))
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
            pages: Pages(device.clone()),
        })?;
        Ok(Trainable { engine, weights, master })
    }
}
