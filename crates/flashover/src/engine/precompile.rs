//! Compiles the kernels of a generation on many cores before their first launch: while weights load, or before the
//! prefill of a new shape.

use std::collections::BTreeSet;
use std::panic;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use burn::tensor::{Device, Tensor};
use models::{Decoder, KvCache, PagedCache};
use ops::{Ctx, OpError};

use super::Engine;
use super::error::GenerateError;
use super::sampler;
use crate::options::EngineOptions;

/// Shapes whose kernels are compiled: batch, tokens of the prefill (0 for none), positions, and 1 with the decode step; 2 for a batch.
pub(super) type Precompiled = Mutex<BTreeSet<[usize; 4]>>;

impl Engine {
    /// Compiles the kernels of a prefill of `seq` tokens per sequence; with `decode` also those of the decode step and
    /// of sampling. Each shape compiles once. Backends other than CUDA compile a kernel at its first launch.
    pub(super) fn precompile(
        &self,
        cache: &KvCache,
        seq: usize,
        decode: bool,
    ) -> Result<(), GenerateError> {
        if !Ctx::precompiles(self.decoder().device()) {
            return Ok(());
        }
        let longest = cache.lengths().into_iter().max().unwrap_or(0) + seq;
        let shape = [cache.batch(), seq, longest.next_power_of_two(), usize::from(decode)];
        let mut done = self.0.precompiled.lock().unwrap_or_else(PoisonError::into_inner);
        if done.insert(shape) {
            drop(done);
            let sampling = sampler::rehearse(!self.absent().is_empty());
            self.decoder().rehearse(cache, seq, decode, sampling)?.compile();
        }
        Ok(())
    }
}

impl Engine {
    /// Compiles the kernels of a batch: its prefill, the first decode step, and sampling. Each shape compiles once.
    pub(super) fn precompile_groups(
        &self,
        decoder: &Decoder,
        cache: &mut PagedCache,
        prompts: &[&[u32]],
        size: (usize, usize),
    ) -> Result<(), GenerateError> {
        if !Ctx::precompiles(decoder.device()) {
            return Ok(());
        }
        let rows = PagedCache::rows(prompts.len() * size.0);
        let prompt: usize = prompts.iter().map(|own| own.len()).sum();
        let longest = prompts.iter().map(|own| own.len()).max().unwrap_or(0);
        let shape = [rows, prompt.next_power_of_two(), longest.next_power_of_two(), 2];
        let mut done = self.0.precompiled.lock().unwrap_or_else(PoisonError::into_inner);
        if done.insert(shape) {
            drop(done);
            let sampling = sampler::rehearse(!self.absent().is_empty());
            decoder.rehearse_groups(cache, prompts, size, sampling)?.compile();
        }
        Ok(())
    }
}

/// A thread that compiles the kernels of the first generation while weights load.
#[derive(Default)]
pub(super) struct Precompilation {
    compiling: Option<JoinHandle<()>>,
    /// Number of kernels to compile.
    pub(super) kernels: usize,
}

impl Precompilation {
    /// Starts the thread if `workload` is a generation. It compiles a prefill of one sequence, and the decode step if
    /// the workload is one sequence. `outline` returns the model without its weights; `sampling` samples from its
    /// logits.
    pub(super) fn start(
        outline: impl FnOnce(&Ctx) -> Result<Decoder, models::Error>,
        ctx: &Ctx,
        device: &Device,
        options: &EngineOptions,
        sampling: impl Fn(&Ctx, Tensor<2>) -> Result<(), OpError>,
    ) -> Result<Self, models::Error> {
        let workload = options.workload.as_ref().filter(|own| own.training.is_none());
        let Some(workload) = workload.filter(|_| Ctx::precompiles(device)) else {
            return Ok(Self::default());
        };
        let first = outline(&ctx.rehearsal())?;
        let context = workload.context.min(first.config().context().unwrap_or(usize::MAX));
        let prompt = options.prompt.unwrap_or(0).min(context.saturating_sub(1));
        let cache = first.cache(1, context)?;
        let rehearsed = first.rehearse(&cache, prompt, workload.batch == 1, sampling)?;
        let kernels = rehearsed.count();
        Ok(Self { compiling: Some(thread::spawn(|| rehearsed.compile())), kernels })
    }

    /// Waits for the thread.
    pub(super) fn finish(self) {
        if let Some(compiling) = self.compiling {
            compiling.join().unwrap_or_else(|why| panic::resume_unwind(why));
        }
    }
}
