//! Planning a model on a device.

use arch::{ArchProfile, Backend, DType};
use burn::tensor::FloatDType;
use models::{
    DecoderConfig, Footprint, ModelPrecision, Offload, Recompute, Training, Trains, Workload,
};
use ops::MemoryProfile;
use ops::training::Moments;
use quant::WeightFormat;

use super::budget::MemoryBudget;
use super::error::PlanError;
use super::ledger::Others;
use super::plan::{Plan, compute_name};

/// A model with a device profile and a budget. Neither model nor device need exist.
#[derive(Debug, Clone)]
pub(crate) struct PlannedModel {
    pub(crate) model: String,
    pub(crate) config: DecoderConfig,
    pub(crate) precision: ModelPrecision,
    /// Bytes of the weights on the device.
    pub(crate) weights: u128,
    pub(crate) device: ArchProfile,
    pub(crate) budget: MemoryBudget,
}

/// Upper bounds of the searches for the largest batch and context.
const MAX_SEQUENCES: usize = 65_535;
const MAX_POSITIONS: usize = 1 << 24;

impl PlannedModel {
    /// Returns this model with each smaller weight format, and the format's name.
    fn quantized(&self) -> impl Iterator<Item = (&'static str, Self)> {
        let bits = self.precision.weight_format.map_or(16, WeightFormat::bits);
        WeightFormat::smaller_than(bits).map(|format| {
            let precision = ModelPrecision { weight_format: Some(format), ..self.precision };
            let weights = self.config.loaded_bytes(precision);
            (format.name(), Self { precision, weights, ..self.clone() })
        })
    }

    /// Returns options with which training all weights takes less of the device: first those that keep everything on it, then
    /// those that do not, each list from the fastest on.
    fn lighter(&self, training: &Training) -> [Vec<(&'static str, Training)>; 2] {
        let Trains::Weights { master, .. } = training.trains else { return [vec![], vec![]] };
        let narrow = self.precision.dtype != FloatDType::F32;
        let of = |master, moments, offload| Training {
            trains: Trains::Weights { master, moments, muon: false },
            recompute: Recompute::Layers,
            offload,
            ..training.clone()
        };
        let mut here = vec![
            ("--recompute layers", Training { recompute: Recompute::Layers, ..training.clone() }),
            ("--recompute layers --optimizer adamw8", of(master, Moments::Int8, training.offload)),
        ];
        if narrow && master {
            let without_master = of(false, Moments::Int8, training.offload);
            here.push(("--recompute layers --optimizer adamw8 --no-master", without_master));
        }
        let state = Offload { optimizer: true, gradients: false, inputs: false };
        let all = Offload { optimizer: true, gradients: true, inputs: true };
        let there = vec![
            ("--optimizer adamw8 --offload optimizer", of(master, Moments::Int8, state)),
            (
                "--optimizer adamw8 --offload optimizer,gradients,inputs",
                of(master, Moments::Int8, all),
            ),
        ];
        [here, there]
    }

    /// Returns the parts of the model's memory.
    ///
    /// # Errors
    /// [`PlanError::Model`] for an adapter that the model cannot have.
    pub(crate) fn footprint(&self, workload: &Workload) -> Result<Footprint, PlanError> {
        Ok(self.config.footprint(self.precision, self.weights, workload, self.memory_profile())?)
    }

    fn memory_profile(&self) -> MemoryProfile {
        MemoryProfile::new(&self.device, self.precision.dtype, self.precision.weight_format)
    }

    /// Returns the usable bytes.
    pub(crate) fn usable_bytes(&self) -> Option<u64> {
        self.budget.usable_bytes(self.device.memory_bytes)
    }

    /// Plans for a device without other sessions.
    ///
    /// # Errors
    /// The errors of [`PlannedModel::check`], [`PlannedModel::check_buffers`] and [`PlannedModel::footprint`].
    pub(crate) fn checked(&self, workload: Workload) -> Result<Plan, PlanError> {
        self.check(&workload)?;
        self.check_buffers(&workload)?;
        self.plan(workload, Others::default())
    }

    /// Refuses a buffer of the workload that exceeds the device's largest buffer.
    ///
    /// # Errors
    /// [`PlanError::Buffer`].
    pub(crate) fn check_buffers(&self, workload: &Workload) -> Result<(), PlanError> {
        // Training has no KV cache, and weights are checked when they load.
        let Some(max) = self.device.max_buffer_bytes.filter(|_| workload.training.is_none()) else {
            return Ok(());
        };
        let (config, profile) = (&self.config, self.memory_profile());
        let need = config.largest_buffer_bytes(self.precision, workload, profile);
        let refused = PlanError::Buffer { need: narrowed(need), max };
        if need > max.into() { Err(refused) } else { Ok(()) }
    }

    /// Refuses numbers out of range, and workloads that the model or the backend does not support.
    ///
    /// # Errors
    /// [`PlanError::Budget`], [`PlanError::BudgetOfUnknown`], [`PlanError::TrainBf16`] and [`models::Error::Context`].
    pub(crate) fn check(&self, workload: &Workload) -> Result<(), PlanError> {
        self.budget.check(self.device.memory_bytes)?;
        let Workload { batch, context, .. } = *workload;
        for (name, value) in [("batch", batch), ("context", context)] {
            if value == 0 {
                let range = "of at least 1";
                return Err(PlanError::Budget { name, value: value.to_string(), range });
            }
        }
        if batch > MAX_SEQUENCES {
            let range = "up to 65535, the limit of a kernel launch";
            return Err(PlanError::Budget { name: "batch", value: batch.to_string(), range });
        }
        if let Some(max_seq) = self.config.context().filter(|max| context > *max) {
            return Err(models::Error::Context { need: context, max_seq }.into());
        }
        let bf16 = self.precision.dtype == FloatDType::BF16;
        if workload.training.is_some() && self.device.backend == Backend::Vulkan && bf16 {
            return Err(PlanError::TrainBf16);
        }
        Ok(())
    }

    /// Plans for a device next to `others`. The plan may not fit.
    ///
    /// # Errors
    /// The errors of [`PlannedModel::footprint`].
    pub(crate) fn plan(&self, workload: Workload, others: Others) -> Result<Plan, PlanError> {
        let budget_bytes = self.usable_bytes();
        let parts = self.footprint(&workload)?;
        let fitting_bytes = |planned: &Self, workload: &Workload| {
            planned.check_buffers(workload).ok()?;
            let parts = planned.footprint(workload).ok()?;
            let all = parts.total() + others.next_to(parts.transient());
            budget_bytes.filter(|budget| all <= (*budget).into()).map(|_| narrowed(parts.total()))
        };
        let fits = |workload| fitting_bytes(self, &workload).is_some();
        // The number of shared positions holds only for this batch and context.
        let known =
            |max: usize| budget_bytes.filter(|_| workload.shared.unwrap_or(0) == 0).map(|_| max);
        let context = self.config.context().unwrap_or(MAX_POSITIONS).min(MAX_POSITIONS);
        let lighter = workload.training.iter().filter(|_| !fits(workload.clone()));
        let lighter = lighter.flat_map(|training| self.lighter(training)).filter_map(|options| {
            options.into_iter().find_map(|(name, training)| {
                let workload = Workload { training: Some(training), ..workload.clone() };
                Some((name.to_owned(), fitting_bytes(self, &workload)?))
            })
        });
        let lighter: Vec<_> = lighter.collect();
        let with_batch = |batch| Workload { batch, ..workload.clone() };
        let with_context = |context| Workload { context, ..workload.clone() };
        Ok(Plan {
            model: self.model.clone(),
            device: self.device.name.clone(),
            total_bytes: self.device.memory_bytes,
            reserve_bytes: self.budget.reserve_bytes,
            budget_bytes,
            dtype: compute_name(self.precision),
            weight_format: self.precision.weight_format,
            kv: self.precision.kv,
            weights_bytes: narrowed(parts.weights),
            cache_bytes: narrowed(parts.kv_cache),
            trained_bytes: narrowed(parts.trained),
            gradients_bytes: narrowed(parts.gradients),
            optimizer_bytes: narrowed(parts.optimizer),
            host_bytes: narrowed(parts.host),
            activations_bytes: narrowed(parts.saved + parts.activations),
            workspace_bytes: narrowed(parts.workspace + parts.graph + parts.pool_overhead),
            other_bytes: narrowed(others.next_to(parts.transient())),
            largest_batch: known(largest(MAX_SEQUENCES, |batch| fits(with_batch(batch)))),
            largest_context: known(largest(context, |context| fits(with_context(context)))),
            stores_int8: self.device.dtypes.contains(&DType::I8),
            quantized: self
                .quantized()
                .filter_map(|(name, planned)| Some((name, fitting_bytes(&planned, &workload)?)))
                .collect(),
            lighter,
            workload,
        })
    }
}

fn narrowed(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// Returns the largest number up to `max` for which `fits` is true; 0 if none. `fits` must be monotone.
fn largest(max: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut fitting, mut not) = (0, max + 1);
    while not - fitting > 1 {
        let middle = fitting + (not - fitting) / 2;
        match fits(middle) {
            true => fitting = middle,
            false => not = middle,
        }
    }
    fitting
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_is_found_where_there_is_one() {
        assert_eq!(largest(100, |n| n <= 37), 37);
        assert_eq!(largest(100, |_| true), 100);
        assert_eq!(largest(100, |_| false), 0);
        assert_eq!(largest(0, |_| true), 0);
    }
}
