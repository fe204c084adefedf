//! Prompts of different lengths in one pass.

use burn::tensor::Tensor;

use super::{Learns, Pass, Recompute};
use crate::Error;
use crate::decoder::batch::{Batch, TrainBatch};
use crate::decoder::paged::Places;
use crate::decoder::{Decoder, Example};

/// Prompts, one after the other, and the places of their keys and values.
pub(in crate::decoder) struct PackedPrefill<'a> {
    pub(in crate::decoder) prompts: &'a [&'a [u32]],
    pub(in crate::decoder) places: &'a Places<'a>,
}

impl Decoder {
    /// Runs prompts, and returns the logits after each, `[prompts, vocab]` in f32.
    pub(in crate::decoder) fn prefill_packed(
        &self,
        PackedPrefill { prompts, places }: PackedPrefill<'_>,
    ) -> Result<Tensor<2>, Error> {
        let _first = trace::first(|| "prompt");
        let rows: usize = prompts.iter().map(|own| own.len()).sum();
        let _prompt = trace::span(|| format!("prompt {rows}"));
        // The row of a target is the last of its prompt, whatever the target.
        let example = |own: &&[u32]| Example { tokens: [own, &[0][..]].concat(), from: own.len() };
        let examples: Vec<_> = prompts.iter().map(example).collect();
        let batch = &TrainBatch::new(self, Batch::measured(&examples, 1.0))?;
        let (learns, places) = (&Learns::Nothing, Some(places));
        let pass = Pass { decoder: self, batch, learns, gradients: None, places };
        let (x, _) = pass.through_layers(self.layers.len(), &Recompute::Layers.into())?;
        self.logits(match &batch.rows {
            Some(rows) => x.select(0, rows.clone()),
            None => x,
        })
    }
}
