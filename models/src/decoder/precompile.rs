//! Kernels of a model, collected before their first launch so that they can be compiled on many cores.

use burn::tensor::{DType, Tensor};
use ops::{Ctx, OpError, Rehearsed};

use super::step::Step;
use super::{CHUNK, Decoder, KvCache};
use crate::Error;

impl Decoder {
    /// Collects kernels without running them: those of a prefill of `seq` tokens of each sequence of `cache`
    /// (none for 0); with `decode`, those of the decode step that follows; and those that `then` launches
    /// with logits `[batch, vocab]`.
    ///
    /// # Errors
    /// [`Error::Op`] for a dtype that the device lacks; the errors of `then`.
    pub fn rehearse(
        &self,
        cache: &KvCache,
        seq: usize,
        decode: bool,
        then: impl Fn(&Ctx, Tensor<2>) -> Result<(), OpError>,
    ) -> Result<Rehearsed, Error> {
        let _stream_guard = ops::stream_guard();
        let rehearsal = self.rehearsal();
        let (batch, before) = (cache.batch(), cache.longest());
        let chunk = (CHUNK / batch).max(1);
        let step = decode.then(|| (1, cache.decode_longest(before + seq)));
        let chunks = (0..seq).step_by(chunk).map(|from| {
            let to = (from + chunk).min(seq);
            (to - from, before + to)
        });
        let mut passes: Vec<_> = step.into_iter().chain(chunks).collect();
        // Chunks in the middle of a prompt launch the kernels of the first one.
        passes.sort_unstable();
        passes.dedup_by_key(|(tokens, _)| *tokens);
        let layers = self.distinct_layers();
        for (tokens, longest) in passes {
            // Tensors without values launch nothing.
            let words = (&self.device, DType::I32);
            let start = Tensor::empty([batch], words);
            let tokens = Tensor::empty([batch, tokens], words);
            let step = Step { tokens, start: start.clone(), longest };
            rehearsal.walk(cache.memory(), &step, start, layers.iter().copied())?;
            let last = [batch, self.config.hidden];
            let last = Tensor::empty(last, (&self.device, DType::from(self.dtype)));
            then(&rehearsal.ctx, rehearsal.logits(last)?)?;
        }
        Ok(rehearsal.ctx.rehearsed())
    }

    /// Returns the decoder with a context that collects kernels.
    pub(super) fn rehearsal(&self) -> Self {
        let ctx = if self.ctx.rehearses() { self.ctx.clone() } else { self.ctx.rehearsal() };
        Self { ctx, ..self.clone() }
    }

    /// Returns the first layer of each kind: layers of one kind launch the same kernels.
    fn distinct_layers(&self) -> Vec<usize> {
        let kind = |index: usize| {
            let (rules, layer) = (self.config.layers[index], &self.layers[index]);
            let formats = [layer.qkv.format(), layer.out.format(), layer.ffn.format()];
            let bytes = [layer.qkv.bytes(), layer.out.bytes(), layer.ffn.bytes()];
            (rules.window, rules.rope, formats, bytes)
        };
        let mut seen = Vec::new();
        (0..self.layers.len())
            .filter(|index| {
                let kind = kind(*index);
                let new = !seen.contains(&kind);
                seen.push(kind);
                new
            })
            .collect()
    }
}
