//! Measures and copies of a policy, for GRPO.

use burn::tensor::Tensor;
use models::{Adapted, Batch, Decoder, FlatWeights, Loss, TokenStats};

use super::{Subject, TrainError, Trainer, trained};

impl Trainer {
    /// Returns true if all weights are trained.
    pub(crate) const fn is_full(&self) -> bool {
        matches!(self.subject, Subject::Weights { .. })
    }

    /// Returns ln p of the learned tokens of a batch, in the present policy. Memory for the batch is reserved already.
    pub(crate) fn measured(&self, batch: Batch<'_>) -> Result<Vec<f32>, TrainError> {
        let adapter = self.state.as_ref().and_then(|state| state.adapter.as_ref());
        let trained = trained(&self.subject, adapter);
        self.log_probabilities(self.engine.decoder().loss_of(Some(trained), batch)?)
    }

    /// Returns the same of another decoder; without one, of the engine's, which has no adapter.
    pub(crate) fn measured_by(
        &self,
        decoder: Option<&Decoder>,
        batch: Batch<'_>,
    ) -> Result<Vec<f32>, TrainError> {
        let decoder = decoder.unwrap_or_else(|| self.engine.decoder());
        self.log_probabilities(decoder.loss_of(None, batch)?)
    }

    fn log_probabilities(&self, loss: Loss) -> Result<Vec<f32>, TrainError> {
        let stats = loss.stats.expect("a measured batch has them");
        self.list(stats.log_probability)
    }

    /// Returns ln p and the entropies of the learned tokens of micro-batches, in order.
    pub(crate) fn token_numbers(
        &self,
        of: Vec<TokenStats>,
    ) -> Result<(Vec<f32>, Vec<f32>), TrainError> {
        let all = {
            let _stream_guard = ops::stream_guard();
            let each = of.into_iter().map(|own| (own.log_probability, own.entropy));
            let (log_probability, entropy): (Vec<_>, Vec<_>) = each.unzip();
            Tensor::cat(log_probability.into_iter().chain(entropy).collect(), 0)
        };
        let mut log_probability = self.list(all)?;
        let entropy = log_probability.split_off(log_probability.len() / 2);
        Ok((log_probability, entropy))
    }

    fn list(&self, values: Tensor<1>) -> Result<Vec<f32>, TrainError> {
        let len = values.dims()[0];
        let row = {
            let _stream_guard = ops::stream_guard();
            values.reshape([1, len])
        };
        Ok(self.engine.on_host(row)?)
    }

    /// Returns a decoder of the present policy. That of an adapter, which is kept in `adapted`, has its values now.
    pub(crate) fn policy_decoder<'a>(
        &'a self,
        adapted: &'a mut Option<Adapted>,
    ) -> Result<&'a Decoder, TrainError> {
        let decoder = self.engine.decoder();
        let adapter = self.state.as_ref().and_then(|state| state.adapter.as_ref());
        let Some(adapter) = adapter else { return Ok(decoder) };
        let own = match adapted.take() {
            Some(own) => {
                own.refresh(adapter)?;
                own
            }
            None => Adapted::new(decoder, adapter)?,
        };
        Ok(adapted.insert(own).decoder())
    }

    /// Returns a copy of the weights on the device, and a decoder that reads it.
    pub(crate) fn copied(&self) -> Result<(FlatWeights, Decoder), TrainError> {
        let (weights, decoder) = (self.flat().copied(), self.engine.decoder());
        let copy = Decoder::of_flat(decoder.config(), &weights, decoder.ctx().clone())?;
        copy.check_allocation()?;
        Ok((weights, copy))
    }

    /// Returns the bytes of the weights.
    pub(crate) fn weights_on_host(&self) -> Result<Vec<u8>, TrainError> {
        Ok(self.flat().to_host()?)
    }

    /// Runs something while other weights take the place of the present ones.
    pub(crate) fn with_weights<T>(
        &mut self,
        other: &[u8],
        run: impl FnOnce(&mut Self) -> Result<T, TrainError>,
    ) -> Result<T, TrainError> {
        let engine = self.engine.clone();
        // Their bits return, so that no session becomes stale.
        let _weights = engine.exclusive().ok_or(TrainError::Busy)?;
        let present = self.weights_on_host()?;
        self.flat().overwrite(other.to_vec())?;
        let made = run(self);
        self.flat().overwrite(present)?;
        made
    }

    fn flat(&self) -> &FlatWeights {
        match &self.subject {
            Subject::Weights { weights, .. } => weights,
            Subject::Adapter(_) => unreachable!("a copy is of all weights"),
        }
    }
}
