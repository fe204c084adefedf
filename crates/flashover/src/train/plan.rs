//! What training an adapter will take of a device's memory, before anything is loaded.

use std::fmt;
use std::path::Path;

use arch::{ArchProfile, Backend};
use burn::tensor::FloatDType;
use models::{Lessons, LoraOptions, Matrices, Recompute, TrainFootprint, Weights};
use serde::Serialize;

use crate::ledger::Others;
use crate::load_error::LoadError;
use crate::options::EngineOptions;
use crate::plan::{
    MOST_POSITIONS, MOST_SEQUENCES, MemoryBudget, PlanError, Planned, Quantized, advised,
    computes_in, fewer, largest, of_budget, precision, shown,
};
use crate::prepare::Prepared;

/// What is learned at most at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct TrainWorkload {
    /// Sequences that pass together.
    pub batch: usize,
    /// Tokens of each.
    pub context: usize,
    /// Whether gradients of several such batches make up a step.
    pub accumulates: bool,
    /// What is kept of a layer for its gradients.
    #[serde(serialize_with = "name_of")]
    pub recompute: Recompute,
}

/// What training takes of a device, part by part, in bytes.
///
/// # Units
/// As those of a [`Plan`](crate::Plan).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainPlan {
    /// The folder or the shape.
    pub model: String,
    /// Its name, as the driver has it.
    pub device: String,
    /// Of the device.
    pub total_bytes: Option<u64>,
    /// What stays free for others.
    pub reserve_bytes: u64,
    /// What may be used of it.
    pub budget_bytes: Option<u64>,
    /// What it was made for.
    pub workload: TrainWorkload,
    /// Of the adapter.
    pub rank: usize,
    /// What is computed in.
    pub dtype: String,
    /// How the matrices of the layers are held.
    pub matrices: Matrices,
    /// The weights, as they are held.
    pub weights_bytes: u64,
    /// The adapter's values.
    pub adapter_bytes: u64,
    /// The moments of AdamW.
    pub optimizer_bytes: u64,
    /// What comes and goes in a step: inputs of layers, activations, logits, gradients, dense copies of weights in 4 or 8
    /// bits, and a page of what is small.
    pub passing_bytes: u64,
    /// What sessions, batches and other trainers of the model take that live beside it.
    #[serde(skip)]
    pub beside_bytes: u64,
    /// The most sequences of this context; none without a budget.
    pub largest_batch: Option<usize>,
    /// The most tokens of as many sequences, likewise.
    pub largest_context: Option<usize>,
    /// What it takes where weights are quantised further, if that fits.
    #[serde(skip)]
    quantized: Quantized,
}

impl TrainPlan {
    /// Plans for a Hugging Face folder on a device of this profile. Only the headers of its files are read.
    ///
    /// # Errors
    /// As [`crate::Plan::of_folder`], and of an adapter that the model cannot have.
    pub fn of_folder(
        profile: &ArchProfile,
        folder: impl AsRef<Path>,
        options: &EngineOptions,
        lora: &LoraOptions,
        workload: TrainWorkload,
    ) -> Result<Self, LoadError> {
        let weights = Weights::open(folder.as_ref()).map_err(LoadError::Folder)?;
        let prepared = Prepared::of_files(profile, folder.as_ref(), &weights, None, options)?;
        let (planned, others) = (&prepared.planned, Others::default());
        Ok(Self::new(planned, profile, &options.budget, lora, workload, others)?)
    }

    /// Plans for a published shape.
    ///
    /// # Errors
    /// As [`crate::Plan::of_shape`], and of an adapter that the model cannot have.
    pub fn of_shape(
        profile: &ArchProfile,
        shape: &str,
        options: &EngineOptions,
        lora: &LoraOptions,
        workload: TrainWorkload,
    ) -> Result<Self, LoadError> {
        let prepared = Prepared::of_shape(profile, shape, options)?;
        let (planned, others) = (&prepared.planned, Others::default());
        Ok(Self::new(planned, profile, &options.budget, lora, workload, others)?)
    }

    pub(crate) fn new(
        planned: &Planned,
        profile: &ArchProfile,
        budget: &MemoryBudget,
        lora: &LoraOptions,
        workload: TrainWorkload,
        others: Others,
    ) -> Result<Self, PlanError> {
        planned.check(profile, budget, workload.batch, workload.context)?;
        if profile.backend == Backend::Vulkan && planned.held.dtype == FloatDType::BF16 {
            return Err(PlanError::TrainBf16);
        }
        let Planned { model, config, held, .. } = planned;
        let of = |planned: &Planned, workload: TrainWorkload| {
            let TrainWorkload { batch, context: positions, accumulates, recompute } = workload;
            let load = Lessons { batch, positions, accumulates, recompute };
            config.training_footprint(planned.held, planned.weights, lora, load)
        };
        let (total_bytes, budget_bytes) = (profile.memory_bytes, budget.of(profile.memory_bytes));
        let TrainFootprint { weights, adapter, optimizer, passing, small } = of(planned, workload)?;
        let bytes = |part: u128| u64::try_from(part).unwrap_or(u64::MAX);
        let takes = |planned: &Planned, workload| {
            let parts = of(planned, workload).ok()?;
            let all = parts.total() + others.beside(parts.passing + parts.small);
            budget_bytes.is_some_and(|budget| all <= budget.into()).then(|| bytes(parts.total()))
        };
        let fits = |workload| takes(planned, workload).is_some();
        let known = |most: usize| budget_bytes.map(|_| most);
        let context = config.context().unwrap_or(MOST_POSITIONS).min(MOST_POSITIONS);
        Ok(Self {
            model: model.clone(),
            device: profile.name.clone(),
            total_bytes,
            reserve_bytes: budget.reserve_bytes,
            budget_bytes,
            workload,
            rank: lora.rank,
            dtype: computes_in(*held),
            matrices: held.matrices,
            weights_bytes: bytes(weights),
            adapter_bytes: bytes(adapter),
            optimizer_bytes: bytes(optimizer),
            passing_bytes: bytes(passing + small),
            beside_bytes: bytes(others.beside(passing + small)),
            largest_batch: known(largest(MOST_SEQUENCES, |batch| {
                fits(TrainWorkload { batch, ..workload })
            })),
            largest_context: known(largest(context, |context| {
                fits(TrainWorkload { context, ..workload })
            })),
            quantized: planned
                .quantized()
                .filter_map(|(name, quantized)| Some((name, takes(&quantized, workload)?)))
                .collect(),
        })
    }

    /// All parts together.
    pub const fn peak_bytes(&self) -> u64 {
        let learned = self.adapter_bytes.saturating_add(self.optimizer_bytes);
        self.weights_bytes.saturating_add(learned).saturating_add(self.passing_bytes)
    }

    /// Whether they are within the budget; where nobody knows how much there is, they are.
    pub fn fits(&self) -> bool {
        let all = self.peak_bytes().saturating_add(self.beside_bytes);
        self.budget_bytes.is_none_or(|budget| all <= budget)
    }

    /// The dtype of the weights' matrices.
    pub fn precision(&self) -> String {
        precision(&self.dtype, self.matrices)
    }

    /// What to change where it does not fit.
    pub fn advice(&self) -> String {
        let fewer = fewer(self.budget_bytes, self.peak_bytes());
        format!("{fewer}{}", self.smaller())
    }

    fn smaller(&self) -> String {
        let quant = advised(&self.quantized);
        let again = match self.workload.recompute {
            Recompute::Nothing => "; without --keep-activations layers are computed again",
            Recompute::Layers => "",
        };
        let TrainWorkload { batch, context, .. } = self.workload;
        match (self.largest_batch, self.largest_context) {
            (Some(batch), _) if batch > 0 => {
                format!("a batch of {batch} fits, of {context} tokens each{again}{quant}")
            }
            (_, Some(context)) if context > 1 => {
                format!("{context} tokens fit, of a batch of {batch}{again}{quant}")
            }
            _ => format!("a larger budget, a smaller rank or a smaller model{again}{quant}"),
        }
    }
}

impl fmt::Display for TrainPlan {
    /// In a sentence.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TrainWorkload { batch, context, .. } = self.workload;
        write!(
            f,
            "training an adapter of rank {} of {} with batches of {batch} times {context} tokens takes {} on {}",
            self.rank,
            self.model,
            shown(self.peak_bytes()),
            self.device
        )?;
        of_budget(f, self.peak_bytes(), self.budget_bytes, self.beside_bytes)?;
        write!(
            f,
            ": weights {}, adapter {}, optimizer {}, activations and gradients {}",
            shown(self.weights_bytes),
            shown(self.adapter_bytes),
            shown(self.optimizer_bytes),
            shown(self.passing_bytes)
        )
    }
}

fn name_of<S: serde::Serializer>(recompute: &Recompute, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(match recompute {
        Recompute::Layers => "layers",
        Recompute::Nothing => "nothing",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Quant;

    fn plan(card: &str, quant: Option<Quant>, workload: TrainWorkload) -> TrainPlan {
        let card = ArchProfile::recorded(card).expect("recorded");
        let options = EngineOptions { quant, ..EngineOptions::default() };
        let lora = LoraOptions::default();
        TrainPlan::of_shape(&card, "llama-3-8b", &options, &lora, workload).expect("valid")
    }

    const LOAD: TrainWorkload =
        TrainWorkload { batch: 4, context: 512, accumulates: false, recompute: Recompute::Layers };

    #[test]
    fn eight_billion_are_trained_on_a_small_card_in_4_bits_alone() {
        let dense = plan("rtx4080", None, LOAD);
        assert!(!dense.fits() && dense.largest_batch == Some(0), "{dense}");
        assert!(dense.advice().contains("--quant nf4"), "{}", dense.advice());
        let four = plan("rtx4080", Some(Quant::Nf4), LOAD);
        assert!(four.fits(), "{four}");
        let batch = four.largest_batch.expect("known");
        assert!(plan("rtx4080", Some(Quant::Nf4), TrainWorkload { batch, ..LOAD }).fits());
        let more = plan("rtx4080", Some(Quant::Nf4), TrainWorkload { batch: batch + 1, ..LOAD });
        assert!(!more.fits() && more.advice().starts_with(&format!("a batch of {batch} fits")));
        let context = four.largest_context.expect("known");
        assert!(plan("rtx4080", Some(Quant::Nf4), TrainWorkload { context, ..LOAD }).fits());
        let kept = TrainWorkload { recompute: Recompute::Nothing, ..LOAD };
        let kept = plan("rtx4080", Some(Quant::Nf4), kept);
        assert!(!kept.fits() && kept.advice().contains("computed again"), "{kept}");
    }
}
