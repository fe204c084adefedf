//! Memory for training: what it will take of a model that is loaded, and room for it.

use arch::ArchProfile;
use models::LoraOptions;

use super::error::TrainError;
use super::plan::{TrainPlan, TrainWorkload};
use crate::device_error::{DeviceError, there_is};
use crate::engine::{Engine, ModelFolder};
use crate::ledger::{Grant, Need, Others};
use crate::load_error::LoadError;
use crate::options::EngineOptions;
use crate::plan::PlanError;

impl ModelFolder {
    /// What training an adapter of this model will take.
    ///
    /// # Errors
    /// As [`TrainPlan::of_folder`].
    pub fn train_plan(
        &self,
        profile: &ArchProfile,
        options: &EngineOptions,
        lora: &LoraOptions,
        workload: TrainWorkload,
    ) -> Result<TrainPlan, LoadError> {
        let planned = self.prepared(profile, options)?.planned;
        let (budget, others) = (&options.budget, Others::default());
        Ok(TrainPlan::new(&planned, profile, budget, lora, workload, others)?)
    }
}

impl Engine {
    /// What training an adapter of this model takes, beside what lives of it by now.
    ///
    /// # Errors
    /// [`PlanError::Model`] of an adapter that the model cannot have, or of more positions than it has.
    pub fn train_plan(
        &self,
        lora: &LoraOptions,
        workload: TrainWorkload,
    ) -> Result<TrainPlan, PlanError> {
        self.train_plan_beside(None, lora, workload)
    }

    /// The same of a trainer that is among what lives as `own`.
    pub(crate) fn train_plan_beside(
        &self,
        own: Option<&Grant>,
        lora: &LoraOptions,
        workload: TrainWorkload,
    ) -> Result<TrainPlan, PlanError> {
        let others = self.ledger().others(own);
        TrainPlan::new(
            self.planned(),
            self.device().profile(),
            self.budget(),
            lora,
            workload,
            others,
        )
    }

    /// Enters a trainer among what lives, in place of what it was.
    pub(crate) fn admit_trainer(
        &self,
        own: &mut Option<Grant>,
        lora: &LoraOptions,
        workload: TrainWorkload,
    ) -> Result<TrainPlan, TrainError> {
        let (profile, budget) = (self.device().profile(), self.budget());
        let plan = |others| TrainPlan::new(self.planned(), profile, budget, lora, workload, others);
        let alone = plan(Others::default())?;
        let kept = u128::from(alone.adapter_bytes) + u128::from(alone.optimizer_bytes);
        let need = Need { kept, passing: alone.passing_bytes.into() };
        self.ledger().admit(own, need, |others| {
            let plan = plan(others)?;
            match plan.fits() {
                true => Ok(()),
                false => Err(TrainError::Memory(Box::new(plan))),
            }
        })?;
        Ok(alone)
    }

    /// Room for what passes in a step of training that fits.
    ///
    /// # Errors
    /// Those of [`Engine::clear_cache`]; [`DeviceError::OutOfMemory`].
    pub(crate) fn room_to_train(&self, plan: &TrainPlan) -> Result<(), DeviceError> {
        self.clear_cache()?;
        // The adapter's values move with each step.
        let moving = u128::from(plan.adapter_bytes) + u128::from(plan.optimizer_bytes);
        let need = moving + u128::from(plan.passing_bytes);
        there_is(self.device(), need)?;
        self.make_room(need)
    }
}
