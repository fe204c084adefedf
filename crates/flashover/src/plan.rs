//! What a model will take of a device's memory, before anything is loaded.

use std::fmt;

use arch::{ArchProfile, DType};
use models::{Footprint, Held, KvCache, KvFormat, Matrices, Steps, Workload as Passing};
use serde::Serialize;

use crate::ledger::Others;

/// How much of a device's memory may be used.
///
/// ```
/// use flashover::MemoryBudget;
///
/// let gib = 1 << 30;
/// let budget = MemoryBudget { reserve_bytes: 2 * gib, ..MemoryBudget::default() };
/// assert_eq!(budget.of(Some(16 * gib)), Some(14 * gib));
/// assert_eq!(MemoryBudget::default().of(None), None, "nobody knows, nothing is refused");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MemoryBudget {
    /// Bytes at most, of the weights and of all sessions, batches and trainers of the model that live at once. Another
    /// model of the process has a budget of its own.
    pub limit_bytes: Option<u64>,
    /// Bytes that stay free for others.
    pub reserve_bytes: u64,
    /// Share of the device's memory at most, of which the reserve is taken.
    pub fraction: f64,
}

impl Default for MemoryBudget {
    /// All of it.
    fn default() -> Self {
        Self { limit_bytes: None, reserve_bytes: 0, fraction: 1.0 }
    }
}

impl MemoryBudget {
    /// Bytes that may be used of a device of `total`.
    pub fn of(&self, total: Option<u64>) -> Option<u64> {
        let share = |total: u64| (total as f64 * self.fraction) as u64;
        let rest = total.map(|total| share(total).saturating_sub(self.reserve_bytes));
        match (rest, self.limit_bytes) {
            (Some(rest), Some(limit)) => Some(rest.min(limit)),
            (rest, limit) => rest.or(limit),
        }
    }

    /// # Errors
    /// [`PlanError::Budget`] for what leaves nothing by itself; [`PlanError::BudgetOfUnknown`] for parts of a total that
    /// nobody knows.
    pub(crate) fn check(&self, total: Option<u64>) -> Result<(), PlanError> {
        let refused = |name, value: String, range| Err(PlanError::Budget { name, value, range });
        if self.limit_bytes == Some(0) {
            return refused("limit", "0 bytes".to_owned(), "above 0");
        }
        if self.fraction.is_nan() || self.fraction <= 0.0 || self.fraction > 1.0 {
            return refused("fraction", self.fraction.to_string(), "above 0, up to 1");
        }
        let of_all = self.fraction < 1.0 || self.reserve_bytes > 0;
        if of_all && total.is_none() { Err(PlanError::BudgetOfUnknown) } else { Ok(()) }
    }
}

/// Why a model is not planned for, or its plan does not fit.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The model and its sequences take more than the device or the budget has.
    #[error("{0}\nhint: {advice}", advice = .0.advice())]
    Memory(Box<Plan>),
    /// One buffer is larger than any that the device gives.
    #[error(
        "it needs a buffer of {}, and the device has none above {}\nhint: a shorter context or fewer sequences, where keys \
         are the largest; else another model, or --backend vulkan, cuda or cpu", shown(*need), shown(*most)
    )]
    Buffer {
        /// Of a weight, of the keys of a layer, or of what passes, in bytes.
        need: u64,
        /// What the device has at most.
        most: u64,
    },
    /// A limit, a fraction, a batch or a context that means nothing.
    #[error("{name} is {value}\nhint: a number {range}")]
    Budget {
        /// Which number.
        name: &'static str,
        /// As it was given.
        value: String,
        /// What it may be, after "a number".
        range: &'static str,
    },
    /// A fraction or a reserve of a total that the device does not tell.
    #[error(
        "the device does not tell how much memory it has, of which a fraction or a reserve would be a part\nhint: a \
         limit in bytes, as --memory-limit"
    )]
    BudgetOfUnknown,
    /// More positions than the model has, or an adapter that it cannot have.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// Burn's ops element by element are no valid SPIR-V in bf16 (CubeCL 0.11.3): NaN at the first step on an H200, where
    /// f16 and f32 learn as on CUDA.
    #[error("gradients in bf16 are not right through Vulkan\nhint: --dtype f16 or f32, or CUDA")]
    TrainBf16,
}

impl PlanError {
    /// Whether less would have fitted: a smaller batch, or a shorter context.
    pub const fn is_memory(&self) -> bool {
        matches!(self, Self::Memory(_) | Self::Buffer { .. })
    }

    /// How many positions the model has, where more were asked for.
    pub const fn context(&self) -> Option<usize> {
        match self {
            Self::Model(models::Error::Context { max_seq, .. }) => Some(*max_seq),
            _ => None,
        }
    }
}

/// What a model is to do at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Workload {
    /// Sequences that decode together.
    pub batch: usize,
    /// Positions that each has room for, of prompt and answer.
    pub context: usize,
    /// Positions of all sequences together that take no room, for another sequence has them: whole pages of a prompt
    /// that passes once for several answers. [`Engine::workload`](crate::Engine::workload) counts them.
    pub shared: usize,
}

impl Workload {
    /// Of sequences that share nothing.
    pub const fn new(batch: usize, context: usize) -> Self {
        Self { batch, context, shared: 0 }
    }
}

/// What a model takes of a device, part by part, in bytes.
///
/// # Units
/// Bytes of the pools of the device. What its driver keeps for a process, some hundred MiB on CUDA, is beside them, as
/// is what a [reserve](MemoryBudget::reserve_bytes) is for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
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
    pub workload: Workload,
    /// What is computed in.
    pub dtype: String,
    /// How the matrices of the layers are held.
    pub matrices: Matrices,
    /// How keys and values are held.
    pub kv: KvFormat,
    /// The weights, as they are held.
    pub weights_bytes: u64,
    /// Keys and values, and the angles of the ropes.
    pub cache_bytes: u64,
    /// What is alive at most while tokens pass.
    pub activations_bytes: u64,
    /// Dense copies of weights in 4 or 8 bits, what the graph of a step is recorded on, and a page of what is small.
    pub workspace_bytes: u64,
    /// What sessions, batches and trainers of the model take that live beside it.
    #[serde(skip)]
    pub beside_bytes: u64,
    /// The most sequences of this context; none without a budget, or where sequences share something.
    pub largest_batch: Option<usize>,
    /// The most positions of as many sequences, likewise.
    pub largest_context: Option<usize>,
    /// Whether the device has 8 bits to hold keys and values in.
    #[serde(skip)]
    has_bytes: bool,
    /// What it takes where weights are quantised further, if that fits.
    #[serde(skip)]
    quantized: Quantized,
}

/// Peaks in bytes, by the quantisation that gives them.
pub(crate) type Quantized = Vec<(&'static str, u64)>;

/// A model that is planned for: its weights are known, the rest is computed.
#[derive(Debug, Clone)]
pub(crate) struct Planned {
    pub(crate) model: String,
    pub(crate) config: models::DecoderConfig,
    pub(crate) held: Held,
    pub(crate) steps: Steps,
    /// Bytes of the weights on the device.
    pub(crate) weights: u128,
}

/// Beyond which nobody looks for the largest.
pub(crate) const MOST_SEQUENCES: usize = 65_535;
pub(crate) const MOST_POSITIONS: usize = 1 << 24;

impl Plan {
    /// All parts together.
    pub const fn peak_bytes(&self) -> u64 {
        let rest = self.cache_bytes.saturating_add(self.activations_bytes);
        self.weights_bytes.saturating_add(rest).saturating_add(self.workspace_bytes)
    }

    /// Whether they are within the budget, beside what lives; where nobody knows how much there is, they are.
    pub fn fits(&self) -> bool {
        self.budget_bytes.is_none_or(|budget| self.all_bytes() <= budget)
    }

    /// # Errors
    /// [`PlanError::Memory`] where it does not fit.
    pub(crate) fn fitting(self) -> Result<(), PlanError> {
        match self.fits() {
            true => Ok(()),
            false => Err(PlanError::Memory(Box::new(self))),
        }
    }

    const fn all_bytes(&self) -> u64 {
        self.peak_bytes().saturating_add(self.beside_bytes)
    }
}

impl Planned {
    /// This model with weights that are quantised further, each with the name of what makes them so.
    pub(crate) fn quantized(&self) -> impl Iterator<Item = (&'static str, Self)> {
        let all = [("int8", Matrices::Int8), ("nf4", Matrices::FourBit)];
        let begun = match self.held.matrices {
            Matrices::Dense => 0,
            Matrices::Int8 => 1,
            Matrices::FourBit => all.len(),
        };
        all.into_iter().skip(begun).map(|(name, matrices)| {
            let held = Held { matrices, ..self.held };
            (name, Self { held, weights: self.config.held_bytes(held), ..self.clone() })
        })
    }

    pub(crate) fn footprint(&self, Workload { batch, context, shared }: Workload) -> Footprint {
        let passing = Passing { batch, positions: context, chunk: models::CHUNK };
        let all = self.config.footprint(self.held, self.weights, passing, self.steps);
        if shared == 0 {
            return all;
        }
        // All of the batch lie in pages then.
        let cache = |batch, positions| self.config.cache_bytes(self.held, batch, positions);
        let more = cache(batch, KvCache::paged(context)) - cache(batch, context);
        Footprint { cache: (all.cache + more).saturating_sub(cache(1, shared)), ..all }
    }

    /// # Errors
    /// [`PlanError::Budget`] of numbers that mean nothing, [`PlanError::BudgetOfUnknown`], [`PlanError::Buffer`],
    /// [`models::Error::Context`].
    pub(crate) fn checked(
        &self,
        profile: &ArchProfile,
        budget: &MemoryBudget,
        workload: Workload,
    ) -> Result<Plan, PlanError> {
        self.check(profile, budget, workload.batch, workload.context)?;
        self.check_buffers(profile, workload)?;
        Ok(self.plan(profile, budget, workload, Others::default()))
    }

    /// # Errors
    /// [`PlanError::Buffer`].
    pub(crate) fn check_buffers(
        &self,
        profile: &ArchProfile,
        Workload { batch, context, .. }: Workload,
    ) -> Result<(), PlanError> {
        let passing = Passing { batch, positions: context, chunk: models::CHUNK };
        let need = self.config.largest_buffer_bytes(self.held, passing, self.steps);
        match profile.max_buffer_bytes {
            Some(most) if need > most.into() => {
                let need = u64::try_from(need).unwrap_or(u64::MAX);
                Err(PlanError::Buffer { need, most })
            }
            _ => Ok(()),
        }
    }

    /// # Errors
    /// As [`Planned::checked`].
    pub(crate) fn check(
        &self,
        profile: &ArchProfile,
        budget: &MemoryBudget,
        batch: usize,
        context: usize,
    ) -> Result<(), PlanError> {
        budget.check(profile.memory_bytes)?;
        for (name, value) in [("batch", batch), ("context", context)] {
            if value == 0 {
                let range = "of 1 at least";
                return Err(PlanError::Budget { name, value: value.to_string(), range });
            }
        }
        if batch > MOST_SEQUENCES {
            let range = "up to 65535, which a launch has room for";
            return Err(PlanError::Budget { name: "batch", value: batch.to_string(), range });
        }
        match self.config.context().filter(|most| context > *most) {
            Some(max_seq) => Err(models::Error::Context { need: context, max_seq }.into()),
            None => Ok(()),
        }
    }

    /// What a workload takes on a device, beside what lives there.
    pub(crate) fn plan(
        &self,
        profile: &ArchProfile,
        budget: &MemoryBudget,
        workload: Workload,
        others: Others,
    ) -> Plan {
        let (total_bytes, budget_bytes) = (profile.memory_bytes, budget.of(profile.memory_bytes));
        let parts = self.footprint(workload);
        let bytes = |part: u128| u64::try_from(part).unwrap_or(u64::MAX);
        let takes = |planned: &Self, workload| {
            planned.check_buffers(profile, workload).ok()?;
            let parts = planned.footprint(workload);
            let all = parts.total() + others.beside(parts.passing() + parts.small);
            budget_bytes.is_some_and(|budget| all <= budget.into()).then(|| bytes(parts.total()))
        };
        let fits = |workload| takes(self, workload).is_some();
        // With another batch or context sequences share something else.
        let known = |most: usize| budget_bytes.filter(|_| workload.shared == 0).map(|_| most);
        let context = self.config.context().unwrap_or(MOST_POSITIONS).min(MOST_POSITIONS);
        Plan {
            model: self.model.clone(),
            device: profile.name.clone(),
            total_bytes,
            reserve_bytes: budget.reserve_bytes,
            budget_bytes,
            workload,
            dtype: computes_in(self.held),
            matrices: self.held.matrices,
            kv: self.held.kv,
            weights_bytes: bytes(parts.weights),
            cache_bytes: bytes(parts.cache),
            activations_bytes: bytes(parts.activations),
            workspace_bytes: bytes(parts.workspace + parts.steps + parts.small),
            beside_bytes: bytes(others.beside(parts.passing() + parts.small)),
            largest_batch: known(largest(MOST_SEQUENCES, |batch| {
                fits(Workload { batch, ..workload })
            })),
            largest_context: known(largest(context, |context| {
                fits(Workload { context, ..workload })
            })),
            has_bytes: profile.dtypes.contains(&DType::I8),
            quantized: self
                .quantized()
                .filter_map(|(name, planned)| Some((name, takes(&planned, workload)?)))
                .collect(),
        }
    }
}

/// The most, up to `most`, that is true of something which is true of all that is less; 0 where of none.
pub(crate) fn largest(most: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut fitting, mut not) = (0, most + 1);
    while not - fitting > 1 {
        let middle = fitting + (not - fitting) / 2;
        match fits(middle) {
            true => fitting = middle,
            false => not = middle,
        }
    }
    fitting
}

/// `14.96 GiB`, or `3.25 MiB` of less than one.
pub(crate) fn shown(bytes: u64) -> String {
    const MIB: f64 = (1u64 << 20) as f64;
    match bytes as f64 / MIB {
        mib if mib < 1024.0 => format!("{mib:.2} MiB"),
        mib => format!("{:.2} GiB", mib / 1024.0),
    }
}

impl fmt::Display for Plan {
    /// In a sentence.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Workload { batch, context, .. } = self.workload;
        let sequences = if batch == 1 { "sequence" } else { "sequences" };
        let positions = if context == 1 { "position" } else { "positions" };
        write!(
            f,
            "{} with {batch} {sequences} of {context} {positions} takes {} on {}",
            self.model,
            shown(self.peak_bytes()),
            self.device
        )?;
        of_budget(f, self.peak_bytes(), self.budget_bytes, self.beside_bytes)?;
        write!(
            f,
            ": weights {}, keys and values {}, activations {}, workspace {}",
            shown(self.weights_bytes),
            shown(self.cache_bytes),
            shown(self.activations_bytes),
            shown(self.workspace_bytes)
        )
    }
}

/// What of the device may be used, and what of that is taken.
pub(crate) fn of_budget(
    f: &mut fmt::Formatter<'_>,
    takes: u64,
    budget: Option<u64>,
    beside: u64,
) -> fmt::Result {
    if let Some(budget) = budget {
        write!(f, ", of which {} may be used", shown(budget))?;
        if takes > budget && shown(takes) == shown(budget) {
            let lacking = takes - budget;
            write!(f, ", {lacking} byte{} too few", if lacking == 1 { "" } else { "s" })?;
        }
        if beside > 0 {
            write!(f, ", and other sessions, batches or trainers of it hold {}", shown(beside))?;
        }
    }
    Ok(())
}

/// What helps where one fits, but not beside the others.
pub(crate) const fn fewer(budget: Option<u64>, own: u64) -> &'static str {
    match budget {
        Some(budget) if own <= budget => "fewer of them at once; ",
        _ => "",
    }
}

/// What quantising further would take.
pub(crate) fn advised(quantized: &Quantized) -> String {
    let each =
        |(name, bytes): &(_, u64)| format!("; with --quant {name} it takes {}", shown(*bytes));
    quantized.iter().map(each).collect()
}

impl Plan {
    /// What to change where it does not fit.
    pub fn advice(&self) -> String {
        let fewer = fewer(self.budget_bytes, self.peak_bytes());
        format!("{fewer}{}", self.smaller())
    }

    fn smaller(&self) -> String {
        let float = match (self.matrices, &*self.dtype) {
            (Matrices::Dense, "f32" | "tf32") => {
                "; bf16, where the device has it, takes half of what f32 does"
            }
            _ => "",
        };
        let quant = format!("{float}{}", advised(&self.quantized));
        let over = self.all_bytes().saturating_sub(self.budget_bytes.unwrap_or(u64::MAX));
        // Where that is enough, or counts.
        let counts = self.cache_bytes / 2 >= over || self.cache_bytes > self.peak_bytes() / 8;
        let kv = match self.kv {
            KvFormat::Float if self.has_bytes && counts => {
                "; --kv-cache int8 halves keys and values"
            }
            KvFormat::Float | KvFormat::Int8 => "",
        };
        match (self.largest_context, self.largest_batch) {
            (Some(context), _) if context > 0 => {
                let batch = self.workload.batch;
                format!("{context} positions fit, of a batch of {batch}{quant}{kv}")
            }
            (_, Some(batch)) if batch > 0 => format!("a batch of {batch} fits{quant}{kv}"),
            _ if self.workload.shared > 0 => {
                format!("fewer answers or fewer new tokens{quant}{kv}")
            }
            _ => format!("a larger budget or a smaller model{quant}{kv}"),
        }
    }

    /// The dtype of the weights' matrices.
    pub fn precision(&self) -> String {
        precision(&self.dtype, self.matrices)
    }
}

/// What is computed in: `tf32` where products are, and the rest in f32.
pub(crate) fn computes_in(held: Held) -> String {
    match held.tf32 {
        true => "tf32".to_owned(),
        false => format!("{:?}", held.dtype).to_lowercase(),
    }
}

/// What is computed in, and over what.
pub(crate) fn precision(dtype: &str, matrices: Matrices) -> String {
    match matrices {
        Matrices::Dense => dtype.to_owned(),
        Matrices::Int8 => format!("{dtype} over 8 bits"),
        Matrices::FourBit => format!("{dtype} over 4 bits"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_less_than_the_card() {
        let gib = 1u64 << 30;
        let of = |budget: MemoryBudget| budget.of(Some(16 * gib));
        let all = MemoryBudget::default();
        assert_eq!(of(MemoryBudget { fraction: 0.5, reserve_bytes: gib, ..all }), Some(7 * gib));
        assert_eq!(of(MemoryBudget { limit_bytes: Some(3 * gib), ..all }), Some(3 * gib));
        assert_eq!(of(MemoryBudget { limit_bytes: Some(99 * gib), ..all }), Some(16 * gib));
        assert_eq!(of(MemoryBudget { reserve_bytes: 99 * gib, ..all }), Some(0));
        assert_eq!(MemoryBudget { limit_bytes: Some(5), ..all }.of(None), Some(5));
        // Of a device that does not tell how much it has there are no parts.
        for part in
            [MemoryBudget { fraction: 0.5, ..all }, MemoryBudget { reserve_bytes: gib, ..all }]
        {
            let refused = part.check(None).expect_err("a part of nothing");
            assert!(matches!(refused, PlanError::BudgetOfUnknown), "{refused}");
            part.check(Some(16 * gib)).expect("a part of a card");
        }
        MemoryBudget { limit_bytes: Some(5), ..all }.check(None).expect("a number of bytes");
    }

    #[test]
    fn the_largest_is_found_where_there_is_one() {
        assert_eq!(largest(100, |n| n <= 37), 37);
        assert_eq!(largest(100, |_| true), 100);
        assert_eq!(largest(100, |_| false), 0);
        assert_eq!(largest(0, |_| true), 0);
    }
}
