//! The memory plan of a model with a workload on a device, and advice if it does not fit.

use std::fmt;

use models::{KvFormat, ModelPrecision, Recompute, Training, Trains, Workload};
use quant::WeightFormat;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

/// Memory of a model with a workload on a device, by part, in bytes.
///
/// # Units
/// Bytes of the device's pools. On CUDA, the driver takes another few hundred MiB per process; leave them as a
/// [reserve](crate::memory::MemoryBudget::reserve_bytes).
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Folder or shape of the model.
    pub model: String,
    /// Name of the device, as its driver reports it.
    pub device: String,
    /// Total memory of the device; none if it is not reported.
    pub total_bytes: Option<u64>,
    /// Bytes that stay free for others.
    pub reserve_bytes: u64,
    /// Usable bytes; none if neither the total nor a limit is known.
    pub budget_bytes: Option<u64>,
    /// Workload of the plan.
    pub workload: Workload,
    /// Name of the compute dtype, such as `bf16` or `tf32`.
    pub dtype: String,
    /// Weight format of the layers; none for dense weights.
    pub weight_format: Option<WeightFormat>,
    /// Format of the KV cache.
    pub kv: KvFormat,
    /// Bytes of the weights.
    pub weights_bytes: u64,
    /// Bytes of the KV cache and the RoPE tables; 0 for training.
    pub cache_bytes: u64,
    /// Bytes of a trained adapter's values, or of master weights in f32 next to weights in 16 bits.
    pub trained_bytes: u64,
    /// Bytes of the gradients of all trained values.
    pub gradients_bytes: u64,
    /// Bytes of AdamW's moments.
    pub optimizer_bytes: u64,
    /// Bytes of training that are in host memory, beside the device's.
    pub host_bytes: u64,
    /// Peak bytes of activations and logits together.
    pub activations_bytes: u64,
    /// Bytes of dequantised weights, the graph of a decode step, and rounding by pools.
    pub workspace_bytes: u64,
    /// Bytes of other sessions, batches and trainers on the same weights.
    pub other_bytes: u64,
    /// Largest batch that fits with this context; none without a budget or if sequences share positions.
    pub largest_batch: Option<usize>,
    /// Longest context that fits with this batch; none without a budget or if sequences share positions.
    pub largest_context: Option<usize>,
    /// True if the device stores 8-bit values, for the KV cache.
    pub(super) stores_int8: bool,
    /// Peak bytes with smaller weight formats that fit, by name of the format.
    pub(super) quantized: Vec<(&'static str, u64)>,
    /// Peak bytes of training all weights with less on the device, by the options; those that fit, if this plan does not.
    pub(super) lighter: Vec<(String, u64)>,
}

impl Plan {
    /// Returns the sum of all parts in bytes.
    pub fn peak_bytes(&self) -> u64 {
        let parts = [
            self.weights_bytes,
            self.cache_bytes,
            self.trained_bytes,
            self.gradients_bytes,
            self.optimizer_bytes,
            self.activations_bytes,
            self.workspace_bytes,
        ];
        parts.into_iter().fold(0, u64::saturating_add)
    }

    /// Returns true if the parts fit in the budget next to all other entries, or if the budget is unknown.
    pub fn fits(&self) -> bool {
        self.budget_bytes.is_none_or(|budget| self.all_bytes() <= budget)
    }

    fn all_bytes(&self) -> u64 {
        self.peak_bytes().saturating_add(self.other_bytes)
    }

    /// Returns the parts in bytes, with their names.
    pub fn parts(&self) -> Vec<(&'static str, u64)> {
        let weights = ("weights", self.weights_bytes);
        let activations = ("activations", self.activations_bytes);
        let workspace = ("workspace", self.workspace_bytes);
        let Some(training) = &self.workload.training else {
            return vec![weights, ("keys and values", self.cache_bytes), activations, workspace];
        };
        let trained = match training.trains {
            Trains::Adapter(_) => "adapter",
            Trains::Weights { .. } => "master weights",
        };
        let trained = (trained, self.trained_bytes);
        let gradients = ("gradients", self.gradients_bytes);
        let optimizer = ("optimizer", self.optimizer_bytes);
        vec![weights, trained, gradients, optimizer, activations, workspace]
    }

    /// Returns the bytes of a save of all weights, with the state that continues the run if asked for; 0 for an adapter, which is
    /// small.
    pub fn save_bytes(&self, state: bool) -> u64 {
        let Some(Training { trains: Trains::Weights { master, moments, muon }, .. }) =
            self.workload.training
        else {
            return 0;
        };
        let size: u64 = if matches!(&*self.dtype, "bf16" | "f16") { 2 } else { 4 };
        let weights = self.weights_bytes / size;
        let exact = if master && size == 2 { 4 } else { 0 };
        // Muon has one moment of most weights.
        let moments = if muon { 4 * weights } else { moments.bytes(weights) };
        self.weights_bytes + if state { exact * weights + moments } else { 0 }
    }

    /// Returns the names of compute dtype and weight format.
    pub fn precision(&self) -> String {
        match self.weight_format {
            None => self.dtype.clone(),
            Some(format) => format!("{} over {} bits", self.dtype, format.bits()),
        }
    }

    /// Returns advice for a plan that does not fit.
    pub fn advice(&self) -> String {
        let fewer = match self.budget_bytes {
            Some(budget) if self.peak_bytes() <= budget => "run fewer of them at once; ",
            _ => "",
        };
        let smaller = match &self.workload.training {
            None => self.smaller_inference(),
            Some(training) => self.smaller_training(training),
        };
        let quantized = self.quantized.iter();
        let quantized = quantized
            .map(|(name, bytes)| format!("; {name} (--quant {name}) takes {}", formatted(*bytes)));
        format!("{fewer}{smaller}{}{}", quantized.collect::<String>(), self.smaller_cache())
    }

    fn smaller_inference(&self) -> String {
        let Workload { batch, shared, .. } = self.workload;
        let fitting = match (self.largest_context, self.largest_batch) {
            (Some(context), _) if context > 0 => {
                format!("{context} tokens fit with a batch of {batch}")
            }
            (_, Some(batch)) if batch > 0 => format!("a batch of {batch} fits"),
            _ if shared.unwrap_or(0) > 0 => "use fewer completions or fewer new tokens".to_owned(),
            _ => "use a larger budget or a smaller model".to_owned(),
        };
        match (self.weight_format, &*self.dtype) {
            (None, "f32" | "tf32") => {
                format!(
                    "{fitting}; bf16 (--dtype bf16) takes half of f32, if the device supports it"
                )
            }
            _ => fitting,
        }
    }

    fn smaller_training(&self, training: &Training) -> String {
        let Workload { batch, context, .. } = self.workload;
        let fitting = match (self.largest_batch, self.largest_context) {
            (Some(batch), _) if batch > 0 => {
                format!("a batch of {batch} fits with {context} tokens per sequence")
            }
            (_, Some(context)) if context > 1 => {
                format!("{context} tokens per sequence fit with a batch of {batch}")
            }
            _ => match training.trains {
                Trains::Adapter(_) => "use a larger budget, a smaller rank or a smaller model",
                Trains::Weights { .. } if self.lighter.is_empty() => {
                    "use a larger budget or a smaller model, or train an adapter"
                }
                Trains::Weights { .. } => "use less memory on the device",
            }
            .to_owned(),
        };
        let lighter = self.lighter.iter();
        let lighter =
            lighter.map(|(options, bytes)| format!("; {options} takes {}", formatted(*bytes)));
        let fitting = format!("{fitting}{}", lighter.collect::<String>());
        match training.trains {
            Trains::Adapter(_) if training.recompute != Recompute::Layers => {
                format!("{fitting}; `Recompute::Layers` (--recompute layers) takes less")
            }
            _ => fitting,
        }
    }

    /// Advises an 8-bit KV cache if it suffices, or if the cache is more than an eighth of the total.
    fn smaller_cache(&self) -> &'static str {
        let over = self.all_bytes().saturating_sub(self.budget_bytes.unwrap_or(u64::MAX));
        let counts = self.cache_bytes / 2 >= over || self.cache_bytes > self.peak_bytes() / 8;
        let float = self.workload.training.is_none() && self.kv == KvFormat::Float;
        let advice = "; `KvFormat::Int8` (--kv-cache int8) halves keys and values";
        if float && self.stores_int8 && counts { advice } else { "" }
    }
}

impl fmt::Display for Plan {
    /// Writes the plan as a sentence.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Workload { batch, context, training, .. }, takes) =
            (&self.workload, self.peak_bytes());
        match training {
            None => {
                let sequences = if *batch == 1 { "sequence" } else { "sequences" };
                let tokens = if *context == 1 { "token" } else { "tokens" };
                write!(f, "{} with {batch} {sequences} of {context} {tokens}", self.model)?;
            }
            Some(Training { trains, .. }) => {
                match trains {
                    Trains::Adapter(lora) => {
                        write!(f, "training an adapter of rank {} of ", lora.rank)?
                    }
                    Trains::Weights { .. } => write!(f, "training all weights of ")?,
                }
                write!(f, "{} with batches of {batch} times {context} tokens", self.model)?;
            }
        }
        write!(f, " takes {} on {}", formatted(takes), self.device)?;
        if let Some(budget) = self.budget_bytes {
            write!(f, " with a budget of {}", formatted(budget))?;
            if takes > budget && formatted(takes) == formatted(budget) {
                let lacking = takes - budget;
                write!(f, ", {lacking} byte{} too few", if lacking == 1 { "" } else { "s" })?;
            }
            if self.other_bytes > 0 {
                let others = formatted(self.other_bytes);
                write!(f, ", and other sessions, batches or trainers hold {others}")?;
            }
        }
        let part = |(name, bytes)| format!("{name} {}", formatted(bytes));
        write!(f, ": {}", self.parts().into_iter().map(part).collect::<Vec<_>>().join(", "))?;
        match self.host_bytes {
            0 => Ok(()),
            host => write!(f, "; {} more in host memory", formatted(host)),
        }
    }
}

/// Returns the name of a weight format in a plan's JSON. All 4-bit formats share one name.
fn weight_format_name(format: Option<WeightFormat>) -> &'static str {
    match format {
        None => "dense",
        Some(format) if format.bits() == 4 => "four_bit",
        Some(format) => format.name(),
    }
}

impl Serialize for Plan {
    /// Writes the workload, its parts, their sum, and whether they fit.
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        map.serialize_entry("model", &self.model)?;
        map.serialize_entry("device", &self.device)?;
        map.serialize_entry("total_bytes", &self.total_bytes)?;
        map.serialize_entry("reserve_bytes", &self.reserve_bytes)?;
        map.serialize_entry("budget_bytes", &self.budget_bytes)?;
        map.serialize_entry("workload", &self.workload)?;
        let training = self.workload.training.as_ref();
        if let Some(Training { trains: Trains::Adapter(lora), .. }) = training {
            map.serialize_entry("rank", &lora.rank)?;
        }
        map.serialize_entry("dtype", &self.dtype)?;
        map.serialize_entry("matrices", &weight_format_name(self.weight_format))?;
        if training.is_none() {
            map.serialize_entry("kv", &self.kv)?;
        }
        map.serialize_entry("weights_bytes", &self.weights_bytes)?;
        match training {
            None => map.serialize_entry("cache_bytes", &self.cache_bytes)?,
            Some(_) => {
                map.serialize_entry("trained_bytes", &self.trained_bytes)?;
                map.serialize_entry("gradients_bytes", &self.gradients_bytes)?;
                map.serialize_entry("optimizer_bytes", &self.optimizer_bytes)?;
            }
        }
        if self.host_bytes > 0 {
            map.serialize_entry("host_bytes", &self.host_bytes)?;
        }
        map.serialize_entry("activations_bytes", &self.activations_bytes)?;
        map.serialize_entry("workspace_bytes", &self.workspace_bytes)?;
        map.serialize_entry("largest_batch", &self.largest_batch)?;
        map.serialize_entry("largest_context", &self.largest_context)?;
        map.serialize_entry("peak_bytes", &self.peak_bytes())?;
        map.serialize_entry("fits", &self.fits())?;
        map.end()
    }
}

/// Formats bytes as `14.96 GiB`, or as `3.25 MiB` below 1 GiB.
pub(super) fn formatted(bytes: u64) -> String {
    const MIB: f64 = (1u64 << 20) as f64;
    match bytes as f64 / MIB {
        mib if mib < 1024.0 => format!("{mib:.2} MiB"),
        mib => format!("{:.2} GiB", mib / 1024.0),
    }
}

/// Returns the name of the compute dtype: `tf32` if matmuls round to tf32 and all else is f32.
pub(crate) fn compute_name(precision: ModelPrecision) -> String {
    match precision.tf32 {
        true => "tf32".to_owned(),
        false => format!("{:?}", precision.dtype).to_lowercase(),
    }
}
