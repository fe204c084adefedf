//! State of a run between its updates, in files next to those of the trainer.

use std::fs;
use std::path::Path;

use checkpoint::Staged;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Drawn, Grpo, GrpoError};
use crate::fnv::Fnv1a;
use crate::model_files::{BATCH, REFERENCE};
use crate::train::TrainError;

#[derive(Serialize, Deserialize)]
struct State {
    /// Steps of the trainer that is saved next to it.
    done: u64,
    drawn: u64,
    batch: Option<Drawn>,
    /// Hash of the copied reference.
    reference: Option<u64>,
}

impl Grpo {
    /// Saves the policy like [`Trainer::checkpoint_into`](crate::train::Trainer::checkpoint_into), with all that [`Grpo::resume`]
    /// needs: also the drawn completions, if updates on them remain, and a copied reference.
    ///
    /// # Errors
    /// [`GrpoError::Train`]; [`TrainError::State`] for files that cannot be written.
    pub fn checkpoint_into(&mut self, folder: &mut Staged, run: &Value) -> Result<(), GrpoError> {
        let reference = self.reference.on_host()?;
        let state = State {
            done: self.trainer.done() as u64,
            drawn: self.drawn,
            batch: self.batch.clone(),
            reference: reference.as_deref().map(hash),
        };
        let to = folder.path().to_owned();
        let write = |name: &str, bytes: &[u8]| {
            let path = to.join(name);
            fs::write(&path, bytes).map_err(|why| TrainError::State { path, why: why.to_string() })
        };
        write(BATCH, serde_json::to_string(&state).expect("numbers and lists").as_bytes())?;
        if let Some(bytes) = reference {
            write(REFERENCE, &bytes)?;
        }
        let run = self.run(run);
        Ok(self.trainer.checkpoint_into(folder, &run)?)
    }

    /// Continues the run that [`Grpo::checkpoint_into`] saved in a folder, also between two updates. The trainer has the weights or
    /// the adapter of that folder.
    ///
    /// # Errors
    /// [`GrpoError::Train`] for a folder without a run, other options, or other weights; [`TrainError::State`] for files that are
    /// damaged or of another save.
    pub fn resume(&mut self, folder: impl AsRef<Path>, run: &Value) -> Result<(), GrpoError> {
        let folder = folder.as_ref();
        let read = |name: &str| {
            let path = folder.join(name);
            let made = fs::read(&path);
            made.map_err(|why| TrainError::State { path: path.clone(), why: why.to_string() })
        };
        let text = read(BATCH)?;
        let state: State = serde_json::from_slice(&text)
            .map_err(|why| TrainError::State { path: folder.join(BATCH), why: why.to_string() })?;
        let run = self.run(run);
        self.trainer.resume(folder, &run)?;
        let other = |name: &str| {
            let why = "it is damaged, or of another save".to_owned();
            TrainError::State { path: folder.join(name), why }
        };
        if state.done != self.trainer.done() as u64 {
            return Err(other(BATCH).into());
        }
        if self.reference.is_copy() {
            let bytes = read(REFERENCE)?;
            if state.reference != Some(hash(&bytes)) {
                return Err(other(REFERENCE).into());
            }
            self.reference.restore(bytes)?;
        }
        (self.drawn, self.batch) = (state.drawn, state.batch);
        Ok(())
    }

    /// Returns the options that a resumed run must share.
    fn run(&self, of_caller: &Value) -> Value {
        let mut run = of_caller.clone();
        if let Some(fields) = run.as_object_mut() {
            fields.extend(self.options.named());
            let rewards = self.rewards.iter().map(|own| format!("{} x {}", own.weight, own.name));
            fields.insert("rewards".to_owned(), rewards.collect::<Vec<_>>().into());
        }
        run
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hash = Fnv1a::new();
    let words = bytes.chunks_exact(8);
    hash.add(bytes.len() as u64);
    words.remainder().iter().for_each(|byte| hash.add(*byte));
    for word in words {
        hash.add(u64::from_le_bytes(word.try_into().expect("eight bytes")));
    }
    hash.value()
}

/// An f64 as a word, so that it is the same after a save.
pub(super) mod double {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(
        value: &f64,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.to_bits().serialize(serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<f64, D::Error> {
        u64::deserialize(deserializer).map(f64::from_bits)
    }
}

/// The same for lists of f32.
pub(super) mod bits {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(
        values: &[f32],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>().serialize(serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<f32>, D::Error> {
        let words = Vec::<u32>::deserialize(deserializer)?;
        Ok(words.into_iter().map(f32::from_bits).collect())
    }
}

/// The same for lists that may be absent.
pub(super) mod optional_bits {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(
        values: &Option<Vec<f32>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let words =
            |values: &Vec<f32>| values.iter().map(|own| own.to_bits()).collect::<Vec<u32>>();
        values.as_ref().map(words).serialize(serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Vec<f32>>, D::Error> {
        let words = Option::<Vec<u32>>::deserialize(deserializer)?;
        Ok(words.map(|words| words.into_iter().map(f32::from_bits).collect()))
    }
}
