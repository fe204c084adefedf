//! Memory beside a model's weights: what is planned, who is admitted, and what goes back to the device.

use burn::tensor::Tensor;
use models::{Footprint, KvCache};

use super::Engine;
use super::error::GenerateError;
use crate::device_error::{DeviceError, there_is};
use crate::ledger::{Grant, Need, Others};
use crate::memory::MemoryUsage;
use crate::plan::{Plan, Workload};

impl Engine {
    /// What the pools of the device hold, for whomever in this process.
    pub fn memory(&self) -> MemoryUsage {
        MemoryUsage::of(&self.0.device)
    }

    /// Gives what the pools keep for later back to the device, as far as they do.
    ///
    /// # Errors
    /// [`DeviceError`] of what still ran.
    pub fn clear_cache(&self) -> Result<(), DeviceError> {
        self.0.pages.give_back().map_err(|why| self.failed(why))
    }

    /// What this model takes with such a workload, beside what lives of it by now.
    pub fn plan(&self, workload: Workload) -> Plan {
        self.plan_beside(workload, self.0.ledger.others(None))
    }

    fn plan_beside(&self, workload: Workload, others: Others) -> Plan {
        self.0.planned.plan(self.0.device.profile(), &self.0.budget, workload, others)
    }

    /// Enters a workload among what lives.
    pub(super) fn admit(&self, workload: Workload) -> Result<Option<Grant>, GenerateError> {
        self.0.planned.check_buffers(self.0.device.profile(), workload)?;
        let (mut grant, need) = (None, need_of(&self.0.planned.footprint(workload)));
        self.0
            .ledger
            .admit(&mut grant, need, |others| self.plan_beside(workload, others).fitting())?;
        there_is(&self.0.device, need.kept + need.passing)?;
        Ok(grant)
    }

    /// A cache that the device has room for, among what lives as long as the grant does.
    pub(super) fn cache(
        &self,
        batch: usize,
        context: usize,
    ) -> Result<(KvCache, Option<Grant>), GenerateError> {
        // One that is too long for the model is left to the error that says so.
        let grant = match self.config().context() {
            Some(most) if context > most => None,
            _ => self.admit(Workload::new(batch, context))?,
        };
        Ok((self.cache_within(batch, context)?, grant))
    }

    /// A cache of which somebody else found out that the device has room for it.
    pub(super) fn cache_within(
        &self,
        batch: usize,
        context: usize,
    ) -> Result<KvCache, GenerateError> {
        if self.config().context().is_none_or(|most| context <= most) {
            let parts = self.0.planned.footprint(Workload::new(batch, context));
            self.give_back_more_than(parts.total() - parts.weights)?;
            self.make_room(parts.passing())?;
        }
        let cache = self.decoder().cache(batch, context)?;
        self.settled_cache(cache)
    }

    /// A cache that the device had the memory for: what passes it could not say so.
    pub(super) fn settled_cache(&self, cache: KvCache) -> Result<KvCache, GenerateError> {
        cache.settle().map_err(|why| self.unsettled::<GenerateError>(why))?;
        Ok(cache)
    }

    /// Gives back what earlier sessions left, where it is more than one that takes `bytes` leaves, or where both together
    /// are more than the budget: memory of one cache serves no other of another length.
    fn give_back_more_than(&self, bytes: u128) -> Result<(), DeviceError> {
        /// What pools round pages up to.
        const PAGES: u128 = 8 << 20;
        let MemoryUsage { used_bytes, reserved_bytes, .. } = self.memory();
        let left = u128::from(reserved_bytes.saturating_sub(used_bytes));
        let most = self.0.budget.of(self.0.device.profile().memory_bytes);
        let over = most.is_some_and(|most| u128::from(reserved_bytes) + bytes > most.into());
        match left > bytes + PAGES || (left > 0 && over) {
            true => self.clear_cache(),
            false => Ok(()),
        }
    }

    /// Lets the pool of this thread have a page that holds so much: one that grows with what passes leaves the
    /// smaller ones behind.
    pub(crate) fn make_room(&self, bytes: u128) -> Result<(), DeviceError> {
        let _at_work = ops::at_work();
        let client = self.0.device.client();
        let most = client.properties().memory.max_page_size;
        let Ok(bytes) = usize::try_from(bytes.min(most.into())) else { return Ok(()) };
        let page = client.empty(bytes);
        client.check([&page]).map_err(|why| self.failed(format!("{why:?}")))
    }

    /// Numbers of the device.
    pub(crate) fn on_host(&self, made: Tensor<2>) -> Result<Vec<f32>, DeviceError> {
        let _at_work = ops::at_work();
        let data = made.try_into_data().map_err(|why| self.failed(format!("{why:?}")))?;
        data.try_to_vec::<f32>().map_err(|why| self.failed(format!("{why:?}")))
    }

    /// Why something is not on the device.
    pub(super) fn unsettled<E: From<DeviceError> + From<models::Error>>(
        &self,
        why: models::Error,
    ) -> E {
        match why {
            models::Error::Failed(why) => self.failed(why).into(),
            other => other.into(),
        }
    }

    /// The failure that the device's own words are of.
    pub(super) fn failed(&self, why: String) -> DeviceError {
        DeviceError::of(&self.0.device, why)
    }
}

/// What lives beside a model's weights, of such parts.
fn need_of(parts: &Footprint) -> Need {
    Need { kept: parts.cache + parts.steps, passing: parts.passing() + parts.small }
}
