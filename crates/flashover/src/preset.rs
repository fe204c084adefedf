//! Configurations for common uses, computed from the plan of the model on the card.

use std::fmt;
use std::str::FromStr;

use models::Workload;
use quant::WeightFormat;

use crate::load_error::LoadError;
use crate::memory::Plan;
use crate::options::EngineOptions;

/// Use of a model. Each preset has a context length, a list of precisions and a range of batch sizes. It takes the
/// first precision that fits the smallest batch of the range, or otherwise the precision that fits the largest batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preset {
    /// Long completions for a few users: 2048 tokens; unquantised if 4 sequences fit, otherwise NF4; up to 8
    /// sequences.
    CodeGeneration,
    /// Many completions at once: 2048 tokens; NF4; up to 32 sequences.
    Inference,
    /// One completion as fast as possible: 1024 tokens; NF4, for the fewest bytes per token; 1 sequence.
    Latency,
    /// Training of an adapter: 512 tokens; unquantised if 4 sequences fit, otherwise NF4; up to 8 sequences.
    Training,
}

/// Options and plan that a preset chose.
#[derive(Debug, Clone, PartialEq)]
pub struct Chosen {
    /// Options to load the model with.
    pub options: EngineOptions,
    /// Plan of the largest workload within the preset.
    pub plan: Plan,
}

impl Preset {
    /// All presets.
    pub const ALL: [Self; 4] =
        [Self::CodeGeneration, Self::Inference, Self::Latency, Self::Training];

    /// Returns the name of the preset on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CodeGeneration => "code-generation",
            Self::Inference => "inference",
            Self::Latency => "latency",
            Self::Training => "training",
        }
    }

    /// Returns the precisions to try, in order of preference.
    const fn quants(self) -> &'static [Option<WeightFormat>] {
        match self {
            Self::CodeGeneration | Self::Training => &[None, Some(WeightFormat::Nf4)],
            Self::Inference | Self::Latency => &[Some(WeightFormat::Nf4)],
        }
    }

    /// Returns `options` with each precision to try. A precision in `options` is the only one to try.
    fn precisions(self, options: &EngineOptions) -> Vec<EngineOptions> {
        let quants = match options.quant {
            Some(_) => &[options.quant],
            None => self.quants(),
        };
        quants.iter().map(|quant| EngineOptions { quant: *quant, ..options.clone() }).collect()
    }

    /// Returns the context length in tokens, and the smallest and the largest batch size.
    const fn wants(self) -> (usize, usize, usize) {
        match self {
            Self::CodeGeneration => (2048, 4, 8),
            Self::Inference => (2048, 1, 32),
            Self::Latency => (1024, 1, 1),
            Self::Training => (512, 4, 8),
        }
    }

    /// Returns the default context length in tokens.
    pub const fn context(self) -> usize {
        self.wants().0
    }

    /// Chooses the precision for a fixed workload: the preferred one for which `plan` fits. A precision in `options` is
    /// kept.
    ///
    /// # Errors
    /// The errors of `plan`; [`PlanError::Memory`](crate::memory::PlanError::Memory) if it fits in no precision.
    pub fn precision(
        self,
        options: &EngineOptions,
        plan: impl Fn(&EngineOptions) -> Result<Plan, LoadError>,
    ) -> Result<Chosen, LoadError> {
        let mut refused = None;
        for options in self.precisions(options) {
            let plan = plan(&options)?;
            if plan.fits() {
                return Ok(Chosen { options, plan });
            }
            refused = Some(plan);
        }
        let plan = refused.expect("there is a precision").fitting()?;
        Ok(Chosen { options: options.clone(), plan })
    }

    /// Chooses precision and batch size. `plan` plans a workload, for example with [`Plan::of_folder`]; for
    /// [`Preset::Training`] it must plan for training. A precision in `options` is kept, as are all other options. A
    /// model with a shorter context than the preset's keeps its own.
    ///
    /// # Errors
    /// The errors of `plan`; [`PlanError::Memory`](crate::memory::PlanError::Memory) if not one sequence fits in any
    /// precision.
    pub fn choose(
        self,
        options: &EngineOptions,
        plan: impl Fn(&EngineOptions, Workload) -> Result<Plan, LoadError>,
    ) -> Result<Chosen, LoadError> {
        let (wanted, min, max) = self.wants();
        let context = match plan(options, Workload::new(1, wanted)) {
            Ok(_) => wanted,
            Err(why) => why.context().ok_or(why)?,
        };
        let mut best: Option<Chosen> = None;
        for options in self.precisions(options) {
            let one = plan(&options, Workload::new(1, context))?;
            let batch = one.largest_batch.unwrap_or(max).min(max);
            let plan = plan(&options, Workload::new(batch.max(1), context))?;
            let more = best.as_ref().is_none_or(|best| {
                !best.plan.fits() || (plan.fits() && batch > best.plan.workload.batch)
            });
            if more {
                best = Some(Chosen { options, plan });
            }
            if batch >= min {
                break;
            }
        }
        let Chosen { options, plan } = best.expect("there is a precision");
        Ok(Chosen { options, plan: plan.fitting()? })
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The name of a preset is unknown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown preset `{0}`\nhint: use one of code-generation, inference, latency, training")]
pub struct UnknownPreset(String);

impl FromStr for Preset {
    type Err = UnknownPreset;

    fn from_str(text: &str) -> Result<Self, UnknownPreset> {
        let found = Self::ALL.into_iter().find(|preset| preset.name() == text);
        found.ok_or_else(|| UnknownPreset(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use arch::ArchProfile;
    use models::Training;

    use super::*;
    use crate::memory::{MemoryBudget, PlanError};

    fn within(
        preset: Preset,
        card: &str,
        shape: &str,
        limit_bytes: Option<u64>,
    ) -> Result<Chosen, LoadError> {
        let card = ArchProfile::recorded(card).expect("recorded");
        let budget = MemoryBudget { limit_bytes, ..MemoryBudget::default() };
        let options = EngineOptions { budget, ..EngineOptions::default() };
        preset.choose(&options, |options, workload| Plan::of_shape(&card, shape, options, workload))
    }

    fn chosen(preset: Preset, card: &str, shape: &str) -> Result<Chosen, LoadError> {
        within(preset, card, shape, None)
    }

    #[test]
    fn the_numbers_are_the_plans() {
        // Eight sequences fit a large card in bf16, and a small one only in 4 bits.
        for (card, quant) in [("h200", None), ("rtx4080", Some(WeightFormat::Nf4))] {
            let Chosen { options, plan } =
                chosen(Preset::CodeGeneration, card, "llama-3-8b").expect("fits");
            assert_eq!((options.quant, plan.workload.batch), (quant, 8), "{plan}");
        }
        let Chosen { plan, .. } = chosen(Preset::Inference, "rtx4080", "llama-3-8b").expect("fits");
        let batch = plan.workload.batch;
        assert!(plan.fits() && batch > 8 && batch <= 32, "{plan}");
        assert!(batch == 32 || plan.largest_batch == Some(batch), "{plan}");
        let Chosen { plan, options } =
            chosen(Preset::Latency, "rtx4090", "llama-3-8b").expect("fits");
        assert_eq!(
            (options.quant, plan.workload),
            (Some(WeightFormat::Nf4), Workload::new(1, 1024))
        );
    }

    #[test]
    fn adapters_are_learned_in_the_precision_that_fits() {
        for (card, quant) in [("h200", None), ("rtx4080", Some(WeightFormat::Nf4))] {
            let card = ArchProfile::recorded(card).expect("recorded");
            let options = EngineOptions::default();
            let chosen = Preset::Training.choose(&options, |options, workload| {
                let training = Some(Training::default());
                Plan::of_shape(&card, "llama-3-8b", options, Workload { training, ..workload })
            });
            let Chosen { options, plan } = chosen.expect("it fits");
            assert_eq!((options.quant, plan.workload.context), (quant, 512), "{plan}");
            assert!(plan.fits() && plan.workload.batch >= 4, "{plan}");
        }
    }

    #[test]
    fn what_fits_in_no_precision_is_refused() {
        for preset in Preset::ALL {
            let refused = within(preset, "rtx4080", "llama-3-8b", Some(1 << 32));
            assert!(matches!(refused, Err(LoadError::Plan(PlanError::Memory(_)))), "{refused:?}");
        }
    }

    #[test]
    fn a_model_of_a_short_context_keeps_it() {
        let Chosen { plan, .. } = chosen(Preset::Inference, "rtx4090", "gpt2").expect("fits");
        assert_eq!(plan.workload.context, 1024);
    }

    #[test]
    fn names_are_read_back() {
        for preset in Preset::ALL {
            assert_eq!(preset.to_string().parse(), Ok(preset));
        }
        let unknown = "gaming".parse::<Preset>().expect_err("none of ours");
        assert!(unknown.to_string().contains("hint: use one of code-generation"));
    }
}
