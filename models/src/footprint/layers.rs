//! Live bytes while rows run through the decoder: its calls in their order.
//!
//! The residual stream x counts twice. A block writes its sum into another buffer, and the old x leaves a
//! hole in the page that nothing else fits into.

use burn::tensor::FloatDType;
use ops::{
    Liveness, MemoryProfile, OpMemory, activate_memory, attention_memory, linear_memory,
    norm_memory, quantized_glu_memory, quantized_linear_memory, rope_memory, sample_memory,
};

use super::{KvFormat, ModelPrecision};
use crate::decoder::{CHUNK, dequantized_bytes};
use crate::{DecoderConfig, Ffn, Workload};

/// Rows that run through the decoder together.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) config: &'a DecoderConfig,
    pub(super) precision: ModelPrecision,
    pub(super) profile: MemoryProfile,
    pub(super) rows: u128,
    /// Widths of queries and of keys.
    pub(super) q: u128,
    pub(super) kv: u128,
    pub(super) hidden: u128,
    pub(super) inner: u128,
}

impl<'a> Rows<'a> {
    pub(super) fn new(
        config: &'a DecoderConfig,
        precision: ModelPrecision,
        profile: MemoryProfile,
        rows: u128,
    ) -> Self {
        let [q, kv] = config.qkv_rows().map(|size| size as u128);
        let (hidden, inner) = (config.hidden as u128, config.ffn_hidden as u128);
        Self { config, precision, profile, rows, q, kv, hidden, inner }
    }

    /// Creates the rows of the largest prefill chunk.
    pub(super) fn of_prompts(
        config: &'a DecoderConfig,
        precision: ModelPrecision,
        profile: MemoryProfile,
        workload: &Workload,
    ) -> Self {
        let Workload { batch, context, .. } = *workload;
        let rows = CHUNK.min(context.saturating_mul(batch)).max(batch);
        Self::new(config, precision, profile, rows as u128)
    }

    /// Returns the bytes of the largest activation tensor.
    pub(super) fn widest(self) -> u128 {
        self.wide(self.inner.max(self.q + 2 * self.kv).max(self.hidden))
    }

    /// Returns the live bytes of prefill: prompts run through all layers, and one token per sequence is sampled.
    pub(super) fn prefill(self, workload: &Workload) -> Liveness {
        let mut live = Liveness::default();
        live.add(2 * self.wide(self.hidden));
        self.layer(&mut live, workload.context);
        let mut last = Liveness::default();
        let rows = Self { rows: workload.batch as u128, ..self };
        last.add(rows.wide(rows.hidden));
        rows.head(&mut last);
        last.call(sample_memory(rows.rows, self.config.vocab as u128));
        live.peak = live.peak.max(last.peak);
        live
    }

    /// Returns the live bytes of a decode step, which is captured before sampling. All layers reuse the
    /// tensors of the first.
    pub(super) fn step(self, workload: &Workload) -> Liveness {
        let rows = Self { rows: workload.batch as u128, ..self };
        let mut live = Liveness::default();
        rows.layer(&mut live, 0);
        rows.head(&mut live);
        live
    }

    /// Returns the peak of a layer's live bytes, without the residual stream.
    pub(super) fn layer_peak(self, context: usize) -> u128 {
        let mut live = Liveness::default();
        self.layer(&mut live, context);
        live.peak
    }

    /// Returns the bytes of the logits of a row, with the normalised row that they are computed from.
    pub(super) fn logits_bytes(self) -> u128 {
        let mut live = Liveness::default();
        let row = Self { rows: 1, ..self };
        live.add(row.wide(row.hidden));
        row.head(&mut live);
        live.peak
    }

    /// Counts `Decoder::attend` and `Decoder::feed`.
    fn layer(self, live: &mut Liveness, context: usize) {
        let Self { rows, q, kv, hidden, inner, .. } = self;
        let (dtype, heads) = (self.precision.dtype, self.config.heads as u128);
        let y = live.call(norm_memory(rows, hidden, dtype));
        let qkv = self.projection(live, [q + 2 * kv, hidden]);
        live.free(y);
        // Queries live to the end of the block.
        let queries = live.call(rope_memory(rows, q, dtype));
        live.free(qkv);
        let cache = match self.precision.kv {
            KvFormat::Float => 0,
            KvFormat::Int8 => live.add(dequantized_bytes(kv, context as u128, dtype)),
        };
        let a = live.call(attention_memory(rows, heads, [q, kv], dtype));
        let side_by_side = live.add(self.wide(q));
        live.free(a + cache);
        let sum = self.projection(live, [hidden, q]);
        live.free(queries + side_by_side + sum);
        let y = live.call(norm_memory(rows, hidden, dtype));
        let gated = self.inner(live);
        live.free(y);
        let sum = self.projection(live, [hidden, inner]);
        live.free(gated + sum);
    }

    /// Counts `Ffn::inner`.
    fn inner(self, live: &mut Liveness) -> u128 {
        let Self { rows, hidden, inner, .. } = self;
        let ModelPrecision { dtype, lora_columns, .. } = self.precision;
        let gated = self.config.ffn == Ffn::Gated;
        let one = [inner, hidden];
        let activated = match (gated, self.precision.joins_gate(self.config.ffn)) {
            (true, true) if lora_columns == 0 => {
                let shape = [2 * inner, hidden];
                return live.call(quantized_glu_memory(self.profile, rows, shape, dtype));
            }
            // Gate and up as one matrix, and its halves.
            (true, true) => {
                let both = self.projection(live, [2 * inner, hidden]);
                both + live.add(both)
            }
            (true, false) => self.projection(live, one) + self.projection(live, one),
            (false, _) => self.projection(live, one),
        };
        // The activation is the epilogue of the last matmul, unless a LoRA adds to its input.
        if lora_columns == 0 {
            live.free(activated - self.wide(inner));
            return self.wide(inner);
        }
        let activation = self.config.activation;
        let result = live.call(activate_memory(rows, inner, activation, gated, dtype));
        live.free(activated);
        result
    }

    /// Counts `Projection::apply`, with the matmuls of an unmerged LoRA.
    fn projection(self, live: &mut Liveness, [n, k]: [u128; 2]) -> u128 {
        let dtype = self.precision.dtype;
        let delta = match self.precision.lora_columns as u128 {
            0 => 0,
            columns => {
                let a = linear_memory(self.profile, self.rows, [columns, k], dtype);
                let a = live.call(a);
                let b = linear_memory(self.profile, self.rows, [n, columns], dtype);
                let delta = live.call(b);
                live.free(a);
                delta
            }
        };
        let out = live.call(self.matmul([n, k]));
        live.free(delta);
        out
    }

    /// Returns the memory of a matmul with a layer's weight `[n, k]`.
    pub(super) fn matmul(self, shape: [u128; 2]) -> OpMemory {
        let Self { profile, rows, precision: ModelPrecision { dtype, weight_format, .. }, .. } =
            self;
        match weight_format {
            None => linear_memory(profile, rows, shape, dtype),
            Some(_) => quantized_linear_memory(profile, rows, shape, dtype),
        }
    }

    /// Counts `Decoder::logits`.
    fn head(self, live: &mut Liveness) {
        let Self { rows, hidden, .. } = self;
        live.call(norm_memory(rows, hidden, self.precision.dtype));
        let shape = [self.config.vocab as u128, hidden];
        live.call(linear_memory(self.profile, rows, shape, FloatDType::F32));
    }

    pub(super) fn wide(self, width: u128) -> u128 {
        width * self.rows * self.precision.size()
    }
}
