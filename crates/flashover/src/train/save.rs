//! Saved models, adapters and runs.
//!
//! ```text
//! model.safetensors, config.json, tokenizer …      all weights, in the compute dtype; or
//! adapter_model.safetensors, adapter_config.json   an adapter, in f32
//! flashover_run.safetensors                        of a run: master weights, moments, loss scale
//! flashover_run.json                               of a run: steps taken, options of the trainer and of the caller
//! ```
//!
//! The files of a folder are replaced together: a kill leaves those of one save. A run that is resumed takes the same steps, bit
//! by bit, as one that was not interrupted.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, Staged};
use models::Adapter;
use models::export::{read_buffers, write_buffers};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Moments, Schedule, Subject, TrainError, Trainer, Trains};
use crate::model_files::{BATCH, CONFIG, INDEX, REFERENCE, RUN, STATE, WEIGHTS, hash};

impl Trainer {
    /// Saves the adapter into a folder in PEFT's format, or all weights as a Hugging Face folder.
    ///
    /// # Errors
    /// [`TrainError::Diverged`] for values that are not finite; [`TrainError::Device`]; [`TrainError::Model`] for a folder
    /// that cannot be written.
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<(), TrainError> {
        self.save_into(&mut Adapter::begin(folder)?)
    }

    /// Saves like [`Trainer::save`], into a folder that [`Adapter::begin`] has locked for this process.
    ///
    /// # Errors
    /// The errors of [`Trainer::save`].
    pub fn save_into(&self, folder: &mut Staged) -> Result<(), TrainError> {
        self.write(folder)?;
        // The state of an earlier save does not belong to these weights: until it is gone, their hash tells.
        for file in [RUN, STATE, BATCH, REFERENCE] {
            folder.remove(file).map_err(models::Error::from)?;
        }
        Ok(())
    }

    fn write(&self, folder: &mut Staged) -> Result<(), TrainError> {
        self.stage(folder)?;
        self.publish(folder)
    }

    /// Puts the staged files into the folder. An index would lead to files of an earlier model.
    fn publish(&self, folder: &mut Staged) -> Result<(), TrainError> {
        folder.publish().map_err(models::Error::from)?;
        if matches!(self.subject, Subject::Weights { .. }) {
            folder.remove(INDEX).map_err(models::Error::from)?;
        }
        Ok(())
    }

    /// Writes all files into the staging folder, and returns that of the weights.
    fn stage(&self, folder: &Staged) -> Result<PathBuf, TrainError> {
        let to = folder.path();
        if let Some(adapter) = self.adapter()? {
            let model = self.engine.folder().display().to_string();
            return Ok(adapter.stage(folder, self.engine.config(), &model)?);
        }
        let Subject::Weights { files, weights, .. } = &self.subject else {
            return Ok(to.join(WEIGHTS));
        };
        weights.write(to.join(WEIGHTS), self.engine.config(), files.prefix)?;
        for (file, own) in &files.others {
            let target = to.join(file);
            target.parent().map_or(Ok(()), fs::create_dir_all).map_err(writing(&target))?;
            let from = files.folder.join(file);
            match own {
                Some(bytes) => fs::write(&target, bytes).map_err(writing(&target))?,
                None if !from.exists() => {
                    log::warn!("{} is gone, and is not saved", from.display());
                }
                None => drop(fs::copy(&from, &target).map_err(writing(&target))?),
            }
        }
        let config = to.join(CONFIG);
        fs::write(&config, &files.config).map_err(writing(&config))?;
        Ok(to.join(WEIGHTS))
    }

    /// Saves like [`Trainer::save_into`], with all that [`Trainer::resume`] needs. `run` are options of the caller that a resumed
    /// run must share, such as its data.
    ///
    /// # Errors
    /// The errors of [`Trainer::save`].
    pub fn checkpoint_into(&mut self, folder: &mut Staged, run: &Value) -> Result<(), TrainError> {
        let weights = self.stage(folder)?;
        if let Some(state) = &mut self.state {
            write_buffers(folder.path().join(STATE), &mut state.optimizer.buffers())?;
            let weights = hash_of(&weights)?;
            let options = self.options();
            let text =
                json!({ "done": self.done, "trainer": options, "run": run, "weights": weights });
            let path = folder.path().join(RUN);
            fs::write(&path, format!("{text:#}\n")).map_err(writing(&path))?;
        }
        self.publish(folder)
    }

    /// Continues the run that [`Trainer::checkpoint_into`] saved in a folder. The trainer has the weights or the adapter of that
    /// folder.
    ///
    /// # Errors
    /// [`TrainError::NoRun`] for a folder without a run; [`TrainError::Resume`] for other options, each of them named;
    /// [`TrainError::State`] for a damaged file; [`TrainError::Plan`] for too little memory.
    pub fn resume(&mut self, folder: impl AsRef<Path>, run: &Value) -> Result<(), TrainError> {
        let saved = SavedRun::open(&folder)?;
        let mut differs = differences(&saved.trainer, &self.options());
        differs.extend(differences(&saved.run, run));
        if !differs.is_empty() {
            return Err(TrainError::Resume(differs));
        }
        let [_, adapter] = Adapter::files(&folder);
        let path = match self.subject {
            Subject::Adapter(_) => adapter,
            Subject::Weights { .. } => folder.as_ref().join(WEIGHTS),
        };
        if hash_of(&path)? != saved.weights {
            let why = "these weights are of another save".to_owned();
            return Err(TrainError::State { path, why });
        }
        self.reserve(&self.trained(1, 1, 1))?;
        if let Some(state) = &mut self.state {
            let path = folder.as_ref().join(STATE);
            read_buffers(&path, &mut state.optimizer.buffers())
                .map_err(|why| TrainError::State { path, why: why.to_string() })?;
        }
        self.done = saved.done;
        Ok(())
    }

    /// Returns the options that change the steps, by their names on the command line.
    fn options(&self) -> Value {
        let (own, Schedule { learning_rate, warmup, decay, steps, floor }) =
            (&self.optimizer, self.schedule);
        let (config, (dtype, quant)) = (self.engine.config(), self.engine.precision());
        let (family, parameters) = (config.family.model_type(), config.parameters());
        let muon = own.muon.map(|muon| json!([muon.momentum, muon.iterations]));
        let mut options = json!({
            "architecture": format!("{family} with {parameters} parameters"),
            "dtype": dtype,
            "quant": quant,
            "learning-rate": learning_rate,
            "warmup": warmup,
            "schedule": decay,
            "steps": steps,
            "floor": floor,
            "beta1": own.beta1,
            "beta2": own.beta2,
            "eps": own.eps,
            "weight-decay": own.weight_decay,
            "max-grad-norm": own.max_grad_norm,
            "optimizer": match own.moments {
                _ if muon.is_some() => "muon",
                Moments::F32 => "adamw",
                Moments::Bf16 => "adamw-bf16",
                Moments::Int8 => "adamw8",
            },
            "momentum": muon,
            "seed": own.seed,
            // Micro-batches are then added in another order.
            "offload": if self.training.offload.gradients { "gradients" } else { "no gradients" },
        });
        let trains = match &self.training.trains {
            Trains::Adapter(lora) => json!({
                "full": false,
                "lora-rank": lora.rank,
                "lora-alpha": lora.alpha,
                "lora-targets": lora.targets,
                "rank stabilised": lora.rank_stabilised,
            }),
            Trains::Weights { master, .. } => json!({ "full": true, "no-master": !master }),
        };
        if let (Some(options), Value::Object(trains)) = (options.as_object_mut(), trains) {
            options.extend(trains);
        }
        options
    }
}

/// A run that [`Trainer::checkpoint_into`] saved.
#[derive(Debug, Clone, Deserialize)]
pub struct SavedRun {
    /// Steps taken.
    pub done: usize,
    /// Options of the trainer.
    trainer: Value,
    /// Hash of the weights that belong to the state.
    weights: String,
    /// Options of the caller.
    pub run: Value,
}

impl SavedRun {
    /// Returns the files of a run in a folder.
    pub fn files(folder: impl AsRef<Path>) -> [PathBuf; 2] {
        [RUN, STATE].map(|file| folder.as_ref().join(file))
    }

    /// Reads the run that a folder has, without its state.
    ///
    /// # Errors
    /// [`TrainError::NoRun`] for a folder without a run; [`TrainError::State`] for a damaged file.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, TrainError> {
        let folder = folder.as_ref();
        if folder.is_dir() {
            checkpoint::recover(folder).map_err(models::Error::from)?;
        }
        let path = folder.join(RUN);
        // Reading a pipe waits for its writer.
        let text = match checkpoint::ends(&path).and_then(|()| fs::read_to_string(&path)) {
            Err(why) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&why.kind()) => {
                return Err(TrainError::NoRun(folder.to_owned()));
            }
            text => text.map_err(|why| models::Error::Read { path: path.clone(), why })?,
        };
        serde_json::from_str(&text)
            .map_err(|why| TrainError::State { path, why: format!("damaged JSON: {why}") })
    }
}

/// Returns a line for each field that differs between two JSON objects.
fn differences(saved: &Value, own: &Value) -> Vec<String> {
    let none = Map::new();
    let fields = |value: &'_ Value| value.as_object().unwrap_or(&none).clone();
    let (saved, own) = (fields(saved), fields(own));
    let names: BTreeSet<_> = saved.keys().chain(own.keys()).collect();
    let of = |map: &Map<String, Value>, name: &String| map.get(name).cloned().unwrap_or_default();
    let both = names.into_iter().map(|name| (name, of(&saved, name), of(&own, name)));
    let differ = both.filter(|(_, saved, own)| saved != own);
    let told = |(name, saved, own): (&String, Value, Value)| match (&saved, &own) {
        (Value::Null, _) => format!("{name}: not in the saved run, {own} here"),
        (_, Value::Null) => format!("{name}: {saved} in the saved run, not here"),
        _ => format!("{name}: {saved} in the saved run, {own} here"),
    };
    differ.map(told).collect()
}

/// Returns the hash of a file of weights.
fn hash_of(path: &Path) -> Result<String, models::Error> {
    Ok(format!("{:016x}", hash(&Checkpoint::open(path)?)?))
}

fn writing(path: &Path) -> impl Fn(std::io::Error) -> models::Error {
    let path: PathBuf = path.to_owned();
    move |why| models::Error::Write { path: path.clone(), why }
}
