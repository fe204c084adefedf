//! Saved models, adapters and runs.
//!
//! ```text
//! model.safetensors, config.json, tokenizer …      all weights, in the compute dtype; or
//! adapter_model.safetensors, adapter_config.json   an adapter, in f32
//! flashover_run.safetensors                        of a run: exact weights, moments, loss scale
//! flashover_run.json                               of a run: steps taken, options of the trainer and of the caller
//! ```
//!
//! The files of a folder are replaced together: a kill leaves those of one save. A run that is resumed takes the same steps, bit
//! by bit, as one that was not interrupted.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use checkpoint::Staged;
use models::Adapter;
use models::export::{read_buffers, write_buffers};
use serde_json::{Map, Value, json};

use super::{Subject, TrainError, Trainer, Trains};
use crate::model_files::{CONFIG, RUN, STATE};

/// File of all weights.
const WEIGHTS: &str = "model.safetensors";

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
        // The state of an earlier save would not belong to these weights.
        for file in [RUN, STATE] {
            folder.remove(file).map_err(models::Error::from)?;
        }
        self.write(folder)
    }

    fn write(&self, folder: &mut Staged) -> Result<(), TrainError> {
        if let Some(adapter) = self.adapter()? {
            let model = self.engine.folder().display().to_string();
            return Ok(adapter.write(folder, self.engine.config(), &model)?);
        }
        let Subject::Weights { files, weights, .. } = &self.subject else { return Ok(()) };
        let to = folder.path();
        weights.write(to.join(WEIGHTS), self.engine.config(), files.prefix)?;
        for file in &files.others {
            let target = to.join(file);
            target.parent().map_or(Ok(()), fs::create_dir_all).map_err(writing(&target))?;
            fs::copy(files.folder.join(file), &target).map_err(writing(&target))?;
        }
        let config = to.join(CONFIG);
        fs::write(&config, &files.config).map_err(writing(&config))?;
        Ok(folder.publish().map_err(models::Error::from)?)
    }

    /// Saves like [`Trainer::save_into`], with all that [`Trainer::resume`] needs. `run` are options of the caller that a resumed
    /// run must share, such as its data.
    ///
    /// # Errors
    /// The errors of [`Trainer::save`].
    pub fn checkpoint_into(&mut self, folder: &mut Staged, run: &Value) -> Result<(), TrainError> {
        if let Some(state) = &mut self.state {
            write_buffers(folder.path().join(STATE), &mut state.optimizer.buffers())?;
            let text = json!({ "done": self.done, "trainer": self.options(), "run": run });
            let path = folder.path().join(RUN);
            fs::write(&path, format!("{text:#}\n")).map_err(writing(&path))?;
        }
        self.write(folder)
    }

    /// Continues the run that [`Trainer::checkpoint_into`] saved in a folder. The trainer has the weights or the adapter of that
    /// folder.
    ///
    /// # Errors
    /// [`TrainError::Resume`] for other options, each of them named; [`TrainError::Model`] for files that cannot be read;
    /// [`TrainError::Plan`] for too little memory.
    pub fn resume(&mut self, folder: impl AsRef<Path>, run: &Value) -> Result<(), TrainError> {
        let path = folder.as_ref().join(RUN);
        let text = fs::read_to_string(&path).map_err(|why| match why.kind() {
            ErrorKind::NotFound => TrainError::NoRun(folder.as_ref().to_owned()),
            _ => models::Error::Read { path: path.clone(), why }.into(),
        })?;
        let saved: Value =
            serde_json::from_str(&text).map_err(|why| models::Error::Json { file: RUN, why })?;
        let mut differs = Vec::new();
        differences("", &saved["trainer"], &self.options(), &mut differs);
        differences("", &saved["run"], run, &mut differs);
        if !differs.is_empty() {
            return Err(TrainError::Resume(differs));
        }
        self.reserve(&self.trained(1, 1, 1))?;
        if let Some(state) = &mut self.state {
            read_buffers(folder.as_ref().join(STATE), &mut state.optimizer.buffers())?;
        }
        let done = saved["done"].as_u64().and_then(|done| usize::try_from(done).ok());
        self.done = done.ok_or_else(|| TrainError::NoRun(folder.as_ref().to_owned()))?;
        Ok(())
    }

    /// Returns the options that change the steps.
    fn options(&self) -> Value {
        let trains = match &self.training.trains {
            Trains::Adapter(lora) => json!({
                "rank": lora.rank,
                "alpha": lora.alpha,
                "rank_stabilised": lora.rank_stabilised,
            }),
            Trains::Weights { master, .. } => json!({ "weights": "all", "master": master }),
        };
        let (own, config) = (&self.optimizer, self.engine.config());
        let (family, parameters) = (config.family.model_type(), config.parameters());
        json!({
            "model": format!("{family} with {parameters} parameters"),
            "trains": trains,
            "dtype": self.engine.precision().0,
            "schedule": self.schedule,
            "beta1": own.beta1,
            "beta2": own.beta2,
            "eps": own.eps,
            "weight_decay": own.weight_decay,
            "max_grad_norm": own.max_grad_norm,
            "moments": own.moments.name(),
            "muon": own.muon.map(|muon| json!([muon.momentum, muon.iterations])),
            "seed": own.seed,
        })
    }
}

/// Adds a line for each field that differs between two JSON values.
fn differences(name: &str, saved: &Value, own: &Value, lines: &mut Vec<String>) {
    let (Value::Object(saved), Value::Object(own)) = (saved, own) else {
        if saved != own {
            lines.push(format!("{name}: {saved} in the saved run, {own} here"));
        }
        return;
    };
    for (field, _) in
        saved.iter().chain(own.iter().filter(|(field, _)| !saved.contains_key(*field)))
    {
        let of = |map: &Map<String, Value>| map.get(field).cloned().unwrap_or_default();
        let name = if name.is_empty() { field.clone() } else { format!("{name}.{field}") };
        differences(&name, &of(saved), &of(own), lines);
    }
}

fn writing(path: &Path) -> impl Fn(std::io::Error) -> models::Error {
    let path: PathBuf = path.to_owned();
    move |why| models::Error::Write { path: path.clone(), why }
}
