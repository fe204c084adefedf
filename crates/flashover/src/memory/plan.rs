//! The memory of a model with a workload on a device: its parts, and what to change where they do not fit.

use std::fmt;

use models::{KvFormat, ModelPrecision, Recompute, Training, Workload};
use quant::WeightFormat;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

/// Memory of a model with a workload on a device, part by part, in bytes.
///
/// # Units
/// Bytes of the device's pools. The driver keeps some hundred MiB for a process besides on CUDA, for which a
/// [reserve](crate::memory::MemoryBudget::reserve_bytes) is.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Folder or shape of the model.
    pub model: String,
    /// Name of the device, as its driver reports it.
    pub device: String,
    /// Bytes of the device.
    pub total_bytes: Option<u64>,
    /// Bytes that stay free for others.
    pub reserve_bytes: u64,
    /// Bytes that may be used.
    pub budget_bytes: Option<u64>,
    /// Workload that it was made for.
    pub workload: Workload,
    /// Dtype that is computed in.
    pub dtype: String,
    /// Weight format of the layers; none where they are dense.
    pub matrices: Option<WeightFormat>,
    /// Format of the KV cache.
    pub kv: KvFormat,
    /// Weights.
    pub weights_bytes: u64,
    /// KV cache, and tables of RoPE; 0 to train.
    pub cache_bytes: u64,
    /// Values of the adapter that is trained.
    pub adapter_bytes: u64,
    /// Moments of AdamW.
    pub optimizer_bytes: u64,
    /// The most that is alive at once of activations, logits and gradients.
    pub activations_bytes: u64,
    /// Dense copies of quantised weights, the graph of a decode step, and what pools round up by.
    pub workspace_bytes: u64,
    /// Other sessions, batches and trainers that live on the same weights.
    pub other_bytes: u64,
    /// The most sequences of this context that fit; none without a budget, or if sequences share positions.
    pub largest_batch: Option<usize>,
    /// The most positions that fit of as many sequences, likewise.
    pub largest_context: Option<usize>,
    /// True if the device stores 8 bits, for a KV cache.
    pub(super) stores_int8: bool,
    /// Peaks with weights that are quantised further, if they fit, by the name of the format.
    pub(super) quantized: Vec<(&'static str, u64)>,
}

impl Plan {
    /// Returns the bytes of all parts.
    pub fn peak_bytes(&self) -> u64 {
        let parts = [
            self.weights_bytes,
            self.cache_bytes,
            self.adapter_bytes,
            self.optimizer_bytes,
            self.activations_bytes,
            self.workspace_bytes,
        ];
        parts.into_iter().fold(0, u64::saturating_add)
    }

    /// Returns true if the parts fit into the budget next to all that lives, or if the budget is unknown.
    pub fn fits(&self) -> bool {
        self.budget_bytes.is_none_or(|budget| self.all_bytes() <= budget)
    }

    fn all_bytes(&self) -> u64 {
        self.peak_bytes().saturating_add(self.other_bytes)
    }

    /// Returns the parts with their names.
    pub fn parts(&self) -> [(&'static str, u64); 4] {
        let weights = ("weights", self.weights_bytes);
        match self.workload.training {
            None => [
                weights,
                ("keys and values", self.cache_bytes),
                ("activations", self.activations_bytes),
                ("workspace", self.workspace_bytes),
            ],
            Some(_) => [
                weights,
                ("adapter", self.adapter_bytes),
                ("optimizer", self.optimizer_bytes),
                (
                    "activations and gradients",
                    self.activations_bytes.saturating_add(self.workspace_bytes),
                ),
            ],
        }
    }

    /// Returns the dtype and the weight format.
    pub fn precision(&self) -> String {
        match self.matrices {
            None => self.dtype.clone(),
            Some(format) => format!("{} over {} bits", self.dtype, format.bits()),
        }
    }

    /// Returns what to change where the plan does not fit.
    pub fn advice(&self) -> String {
        let fewer = match self.budget_bytes {
            Some(budget) if self.peak_bytes() <= budget => "fewer of them at once; ",
            _ => "",
        };
        let smaller = match &self.workload.training {
            None => self.smaller_inference(),
            Some(training) => self.smaller_training(training),
        };
        let quantized = self.quantized.iter();
        let quantized = quantized
            .map(|(name, bytes)| format!("; with --quant {name} it takes {}", formatted(*bytes)));
        format!("{fewer}{smaller}{}{}", quantized.collect::<String>(), self.smaller_cache())
    }

    fn smaller_inference(&self) -> String {
        let Workload { batch, shared, .. } = self.workload;
        let fitting = match (self.largest_context, self.largest_batch) {
            (Some(context), _) if context > 0 => {
                format!("{context} positions fit, of a batch of {batch}")
            }
            (_, Some(batch)) if batch > 0 => format!("a batch of {batch} fits"),
            _ if shared > 0 => "fewer answers or fewer new tokens".to_owned(),
            _ => "a larger budget or a smaller model".to_owned(),
        };
        match (self.matrices, &*self.dtype) {
            (None, "f32" | "tf32") => {
                format!("{fitting}; bf16, where the device has it, takes half of what f32 does")
            }
            _ => fitting,
        }
    }

    fn smaller_training(&self, training: &Training) -> String {
        let Workload { batch, context, .. } = self.workload;
        let fitting = match (self.largest_batch, self.largest_context) {
            (Some(batch), _) if batch > 0 => {
                format!("a batch of {batch} fits, of {context} tokens each")
            }
            (_, Some(context)) if context > 1 => {
                format!("{context} tokens fit, of a batch of {batch}")
            }
            _ => "a larger budget, a smaller rank or a smaller model".to_owned(),
        };
        match training.recompute {
            Recompute::Nothing => {
                format!("{fitting}; without --keep-activations layers are computed again")
            }
            Recompute::Layers => fitting,
        }
    }

    /// Advises a KV cache in 8 bits where that is enough, or where the cache is an eighth of all.
    fn smaller_cache(&self) -> &'static str {
        let over = self.all_bytes().saturating_sub(self.budget_bytes.unwrap_or(u64::MAX));
        let counts = self.cache_bytes / 2 >= over || self.cache_bytes > self.peak_bytes() / 8;
        let float = self.workload.training.is_none() && self.kv == KvFormat::Float;
        let advice = "; --kv-cache int8 halves keys and values";
        if float && self.stores_int8 && counts { advice } else { "" }
    }
}

impl fmt::Display for Plan {
    /// In a sentence.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Workload { batch, context, training, .. }, takes) =
            (&self.workload, self.peak_bytes());
        match training {
            None => {
                let sequences = if *batch == 1 { "sequence" } else { "sequences" };
                let positions = if *context == 1 { "position" } else { "positions" };
                write!(f, "{} with {batch} {sequences} of {context} {positions}", self.model)?;
            }
            Some(Training { lora, .. }) => write!(
                f,
                "training an adapter of rank {} of {} with batches of {batch} times {context} tokens",
                lora.rank, self.model
            )?,
        }
        write!(f, " takes {} on {}", formatted(takes), self.device)?;
        if let Some(budget) = self.budget_bytes {
            write!(f, ", of which {} may be used", formatted(budget))?;
            if takes > budget && formatted(takes) == formatted(budget) {
                let lacking = takes - budget;
                write!(f, ", {lacking} byte{} too few", if lacking == 1 { "" } else { "s" })?;
            }
            if self.other_bytes > 0 {
                let others = formatted(self.other_bytes);
                write!(f, ", and other sessions, batches or trainers of it hold {others}")?;
            }
        }
        let part = |(name, bytes)| format!("{name} {}", formatted(bytes));
        write!(f, ": {}", self.parts().map(part).join(", "))
    }
}

/// Name of a weight format in a plan's JSON: 4-bit formats share one.
fn matrices_name(format: Option<WeightFormat>) -> &'static str {
    match format {
        None => "dense",
        Some(format) if format.bits() == 4 => "four_bit",
        Some(format) => format.name(),
    }
}

impl Serialize for Plan {
    /// Writes the parts that the workload has, their sum, and whether it fits.
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        map.serialize_entry("model", &self.model)?;
        map.serialize_entry("device", &self.device)?;
        map.serialize_entry("total_bytes", &self.total_bytes)?;
        map.serialize_entry("reserve_bytes", &self.reserve_bytes)?;
        map.serialize_entry("budget_bytes", &self.budget_bytes)?;
        map.serialize_entry("workload", &self.workload)?;
        let training = self.workload.training.as_ref();
        if let Some(training) = training {
            map.serialize_entry("rank", &training.lora.rank)?;
        }
        map.serialize_entry("dtype", &self.dtype)?;
        map.serialize_entry("matrices", &matrices_name(self.matrices))?;
        if training.is_none() {
            map.serialize_entry("kv", &self.kv)?;
        }
        let names = match training {
            None => ["weights_bytes", "cache_bytes", "activations_bytes", "workspace_bytes"],
            Some(_) => ["weights_bytes", "adapter_bytes", "optimizer_bytes", "passing_bytes"],
        };
        for (name, (_, bytes)) in names.into_iter().zip(self.parts()) {
            map.serialize_entry(name, &bytes)?;
        }
        map.serialize_entry("largest_batch", &self.largest_batch)?;
        map.serialize_entry("largest_context", &self.largest_context)?;
        map.serialize_entry("peak_bytes", &self.peak_bytes())?;
        map.serialize_entry("fits", &self.fits())?;
        map.end()
    }
}

/// `14.96 GiB`, or `3.25 MiB` of less than one.
pub(super) fn formatted(bytes: u64) -> String {
    const MIB: f64 = (1u64 << 20) as f64;
    match bytes as f64 / MIB {
        mib if mib < 1024.0 => format!("{mib:.2} MiB"),
        mib => format!("{:.2} GiB", mib / 1024.0),
    }
}

/// Returns the dtype that is computed in: `tf32` where matmuls are, and the rest in f32.
pub(crate) fn compute_name(precision: ModelPrecision) -> String {
    match precision.tf32 {
        true => "tf32".to_owned(),
        false => format!("{:?}", precision.dtype).to_lowercase(),
    }
}
