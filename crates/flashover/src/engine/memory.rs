//! Device memory next to a model's weights: planning, admission of sessions, and return of free pages.

use burn::tensor::Tensor;
use models::{Footprint, KvCache, MOST_PACKED, PagedCache, Workload};

use super::Engine;
use super::error::GenerateError;
use crate::device_error::{DeviceError, check_free};
use crate::memory::{Grant, MemoryUsage, Need, Plan, PlanError};

impl Engine {
    /// Reads the use of the device's pools by this process.
    pub fn memory(&self) -> MemoryUsage {
        MemoryUsage::read(&self.0.device)
    }

    /// Returns free pages of the pools to the device.
    ///
    /// # Errors
    /// [`DeviceError`] of a kernel that still ran.
    pub fn clear_cache(&self) -> Result<(), DeviceError> {
        self.0.pages.give_back().map_err(|why| self.failed(why))
    }

    /// Plans the memory of this model for a workload, next to all sessions, batches and trainers on its weights.
    ///
    /// # Errors
    /// [`PlanError::Budget`] for numbers out of range; [`PlanError::Model`] for more positions than the model has, or
    /// an adapter that it cannot have.
    pub fn plan(&self, workload: Workload) -> Result<Plan, PlanError> {
        self.plan_without(None, workload)
    }

    /// Plans a workload next to all entries of the ledger except `own`.
    pub(crate) fn plan_without(
        &self,
        own: Option<&Grant>,
        workload: Workload,
    ) -> Result<Plan, PlanError> {
        self.check(&workload)?;
        self.0.planned.plan(workload, self.0.ledger.others(own))
    }

    /// Refuses numbers out of range, and workloads that the model or the backend does not support.
    pub(crate) fn check(&self, workload: &Workload) -> Result<(), PlanError> {
        self.0.planned.check(workload)
    }

    /// Adds a workload to the ledger, in place of `own`, if it fits.
    pub(crate) fn admit_as(
        &self,
        own: &mut Option<Grant>,
        workload: &Workload,
    ) -> Result<Footprint, PlanError> {
        let planned = &self.0.planned;
        planned.check_buffers(workload)?;
        let parts = planned.footprint(workload)?;
        self.0.ledger.admit(own, (&parts).into(), |others| {
            planned.plan(workload.clone(), others)?.fitting().map(drop)
        })?;
        Ok(parts)
    }

    /// Adds a workload to the ledger until the grant is dropped.
    pub(crate) fn admit(&self, workload: Workload) -> Result<Option<Grant>, GenerateError> {
        let mut grant = None;
        let parts = self.admit_as(&mut grant, &workload)?;
        check_free(&self.0.device, parts.kept() + parts.transient())?;
        Ok(grant)
    }

    /// Adds a copy of the weights to the ledger until the grant is dropped.
    pub(crate) fn admit_copy(&self) -> Result<Option<Grant>, GenerateError> {
        let (planned, least) = (&self.0.planned, Workload::new(1, 1));
        let weights = planned.footprint(&least)?.weights;
        let mut grant = None;
        self.0.ledger.admit(&mut grant, Need::of_kept(weights), |others| {
            planned.plan(least, others.and(weights))?.fitting().map(drop)
        })?;
        check_free(&self.0.device, weights)?;
        Ok(grant)
    }

    /// Allocates a KV cache and adds it to the ledger until the grant is dropped.
    pub(super) fn cache(
        &self,
        batch: usize,
        context: usize,
    ) -> Result<(KvCache, Option<Grant>), GenerateError> {
        // A context longer than the model's is reported by the decoder.
        let grant = match self.config().context() {
            Some(max) if context > max => None,
            _ => self.admit(Workload::new(batch, context))?,
        };
        Ok((self.cache_within(batch, context)?, grant))
    }

    /// Allocates a KV cache of an admitted workload.
    pub(super) fn cache_within(
        &self,
        batch: usize,
        context: usize,
    ) -> Result<KvCache, GenerateError> {
        if self.config().context().is_none_or(|max| context <= max) {
            let parts = self.0.planned.footprint(&Workload::new(batch, context))?;
            self.give_back_more_than(parts.kept() + parts.transient())?;
            self.reserve_page(parts.activations + parts.workspace)?;
        }
        let cache = self.decoder().cache(batch, context)?;
        self.checked_cache(cache)
    }

    /// Allocates a cache in pages of an admitted workload, whose prompts have `prompts` tokens.
    pub(crate) fn paged_within(
        &self,
        pages: usize,
        need: &Workload,
        prompts: usize,
    ) -> Result<PagedCache, GenerateError> {
        let all = self.0.planned.footprint(need)?;
        self.give_back_more_than(all.kept() + all.transient())?;
        // A pool makes every later page as large as its largest, so this one is that of the prefill.
        let together = prompts.min(MOST_PACKED).max(need.context);
        let parts = self.0.planned.footprint(&Workload::new(1, together))?;
        self.reserve_page(parts.activations + parts.workspace)?;
        let cache = self.decoder().paged_cache(pages, need.context)?;
        cache.check_allocation().map_err(|why| self.allocation_error::<GenerateError>(why))?;
        Ok(cache)
    }

    /// Checks the allocation of a cache and returns it. Ops on the cache could not report a failed allocation.
    pub(super) fn checked_cache(&self, cache: KvCache) -> Result<KvCache, GenerateError> {
        cache.check_allocation().map_err(|why| self.allocation_error::<GenerateError>(why))?;
        Ok(cache)
    }

    /// Returns free pages to the device if they exceed what a session of `bytes` uses, or if both together exceed the
    /// budget. The memory of one cache is not reused for a cache of another length.
    fn give_back_more_than(&self, bytes: u128) -> Result<(), DeviceError> {
        /// Pools round the size of pages up to this.
        const PAGES: u128 = 8 << 20;
        let MemoryUsage { used_bytes, reserved_bytes, .. } = self.memory();
        let left = u128::from(reserved_bytes.saturating_sub(used_bytes));
        let max = self.0.planned.usable_bytes();
        let over = max.is_some_and(|max| u128::from(reserved_bytes) + bytes > max.into());
        match left > bytes + PAGES || (left > 0 && over) {
            true => self.clear_cache(),
            false => Ok(()),
        }
    }

    /// Allocates one page of `bytes` in this thread's pool. Pages that grow with use would leave smaller pages behind.
    pub(crate) fn reserve_page(&self, bytes: u128) -> Result<(), DeviceError> {
        let _stream_guard = ops::stream_guard();
        let client = self.0.device.client();
        let max = client.properties().memory.max_page_size;
        let Ok(bytes) = usize::try_from(bytes.min(max.into())) else { return Ok(()) };
        let page = client.empty(bytes);
        client.check([&page]).map_err(|why| self.failed(format!("{why:?}")))
    }

    /// Downloads a tensor.
    pub(crate) fn on_host(&self, made: Tensor<2>) -> Result<Vec<f32>, DeviceError> {
        let _stream_guard = ops::stream_guard();
        let data = made.try_into_data().map_err(|why| self.failed(format!("{why:?}")))?;
        data.try_to_vec::<f32>().map_err(|why| self.failed(format!("{why:?}")))
    }

    /// Converts the error of a failed allocation.
    pub(super) fn allocation_error<E: From<DeviceError> + From<models::Error>>(
        &self,
        why: models::Error,
    ) -> E {
        match why {
            models::Error::Failed(why) => self.failed(why).into(),
            other => other.into(),
        }
    }

    /// Returns the failure behind a message of the device.
    pub(super) fn failed(&self, why: String) -> DeviceError {
        DeviceError::new(&self.0.device, why)
    }
}
