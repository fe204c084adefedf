//! The policy that the KL divergence is measured from.

use models::{Batch, Decoder, Example, FlatWeights};

use super::{GrpoError, GrpoOptions, ReferencePlace, measured};
use crate::memory::Grant;
use crate::train::Trainer;

/// The reference.
pub(super) enum Reference {
    /// None is needed.
    Absent,
    /// The model without its adapter.
    Base,
    /// A copy of the weights, and a decoder that reads it.
    Device { weights: Box<FlatWeights>, decoder: Box<Decoder>, _grant: Option<Grant> },
    /// A copy of the weights.
    Host(Vec<u8>),
}

impl Reference {
    pub(super) fn new(trainer: &Trainer, options: &GrpoOptions) -> Result<Self, GrpoError> {
        Ok(match (options.beta != 0.0, options.reference) {
            (false, _) => Self::Absent,
            (true, _) if !trainer.is_full() => Self::Base,
            (true, ReferencePlace::Device) => Self::copy(trainer)?,
            (true, ReferencePlace::Host) => Self::Host(trainer.weights_on_host()?),
        })
    }

    fn copy(trainer: &Trainer) -> Result<Self, GrpoError> {
        let grant = trainer.engine().admit_copy()?;
        let (weights, decoder) = trainer.copied()?;
        Ok(Self::Device { weights: weights.into(), decoder: decoder.into(), _grant: grant })
    }

    /// Takes the present weights.
    pub(super) fn renew(&mut self, trainer: &Trainer) -> Result<(), GrpoError> {
        match self.is_copy() {
            true => self.restore(trainer.weights_on_host()?),
            false => Ok(()),
        }
    }

    /// Returns true if it is a copy of weights.
    pub(super) const fn is_copy(&self) -> bool {
        matches!(self, Self::Device { .. } | Self::Host(_))
    }

    /// Returns the bytes of a copy.
    pub(super) fn on_host(&self) -> Result<Option<Vec<u8>>, GrpoError> {
        Ok(match self {
            Self::Absent | Self::Base => None,
            Self::Device { weights, .. } => Some(weights.to_host()?),
            Self::Host(copy) => Some(copy.clone()),
        })
    }

    /// Takes the bytes of a copy.
    pub(super) fn restore(&mut self, bytes: Vec<u8>) -> Result<(), GrpoError> {
        match self {
            Self::Absent | Self::Base => {}
            Self::Device { weights, .. } => weights.overwrite(bytes)?,
            Self::Host(copy) => *copy = bytes,
        }
        Ok(())
    }

    /// Returns ln p of the learned tokens of each example.
    pub(super) fn measure(
        &self,
        trainer: &mut Trainer,
        examples: &[Example],
        micro_batch: usize,
        temperature: f64,
    ) -> Result<Vec<Vec<f32>>, GrpoError> {
        let each = |measure: &mut dyn FnMut(Batch<'_>) -> _| {
            measured(examples, micro_batch, temperature, measure)
        };
        Ok(match self {
            Self::Absent => unreachable!("a beta of 0 needs none"),
            Self::Base => each(&mut |batch| trainer.measured_by(None, batch))?,
            Self::Device { decoder, .. } => {
                each(&mut |batch| trainer.measured_by(Some(decoder), batch))?
            }
            Self::Host(copy) => trainer.with_weights(copy, |trainer| {
                each(&mut |batch| trainer.measured_by(None, batch))
            })?,
        })
    }
}
