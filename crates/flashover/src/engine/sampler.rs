//! Samples the next tokens from rows of logits.
//!
//! Logits stay on the device. Each step uploads a few words per row, and downloads a token, two log probabilities and a flag.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use ops::{Ctx, OpError};

use super::Engine;
use super::error::GenerateError;
use super::sampling::{Place, Sampling, Token};

/// Samples tokens for the sequences of a batch, and keeps the tokens seen by each on the device.
#[derive(Debug)]
pub(super) struct Sampler {
    /// Settings of each row.
    sampling: Vec<Sampling>,
    /// Bit masks over the vocabulary: seen tokens for each row, then one row of the ids that the tokenizer lacks.
    seen: Tensor<1, Int>,
}

impl Sampler {
    /// Returns a sampler for sequences with these settings and tokens so far.
    pub(super) fn new(engine: &Engine, sequences: &[(Sampling, &[u32])]) -> Self {
        let _stream_guard = ops::stream_guard();
        let words = engine.config().vocab.div_ceil(32);
        let absent = engine.absent();
        let rows = sequences.len() + usize::from(!absent.is_empty());
        let mut bits = vec![0u32; words * rows];
        let mut mark = |row: usize, id: u32| bits[row * words + id as usize / 32] |= 1 << (id % 32);
        for (row, (_, ids)) in sequences.iter().enumerate() {
            ids.iter().for_each(|id| mark(row, *id));
        }
        absent.iter().for_each(|id| mark(sequences.len(), *id));
        let sampling = sequences.iter().map(|(sampling, _)| *sampling).collect();
        let device = engine.decoder().device();
        // The masks live as long as the sequences, so they stay out of the pools of activations.
        let seen = device.memory_persistent_allocations(bits, |bits| {
            let len = bits.len();
            u32_tensor(device, bits, [len])
        });
        Self { sampling, seen }
    }

    /// Samples a token for each row of logits, `[rows, vocab]`, at its place in the random sequence.
    pub(super) fn sample(
        &self,
        engine: &Engine,
        logits: Tensor<2>,
        places: &[Place],
    ) -> Result<Vec<Token>, GenerateError> {
        let _stream_guard = ops::stream_guard();
        let _first = trace::first(|| "sampling");
        let _part = trace::span(|| "sampling");
        let rows = self.sampling.iter().zip(places);
        let words: Vec<u32> =
            rows.flat_map(|(sampling, place)| sampling.choice(*place).words()).collect();
        let shape = [places.len(), words.len() / places.len()];
        let choices = u32_tensor(engine.decoder().device(), words, shape);
        let ctx = engine.decoder().ctx();
        let made =
            ops::sample(ctx, logits, choices, self.seen.clone()).map_err(models::Error::from)?;
        let rows = engine.on_host(made)?;
        engine.note_memory();
        let rows = rows.as_chunks::<4>().0.iter().zip(places);
        rows.map(|([id, logprob, drawn, none], place)| match *none == 0.0 {
            true => Ok(Token { id: *id as u32, logprob: *logprob, drawn_logprob: *drawn }),
            false => Err(GenerateError::NotFinite { position: place.position }),
        })
        .collect()
    }
}

/// Launches the kernels of [`Sampler::sample`] on given logits. `masked` is true if the tokenizer lacks ids.
pub(super) fn rehearse(masked: bool) -> impl Fn(&Ctx, Tensor<2>) -> Result<(), OpError> {
    move |ctx, logits| {
        let ([rows, vocab], device) = (logits.dims(), logits.device());
        let choice = Sampling::default().choice(Place { position: 0, completion: 0 }).words();
        let choices = u32_tensor(&device, choice.repeat(rows), [rows, choice.len()]);
        let words = (rows + usize::from(masked)) * vocab.div_ceil(32);
        let seen = u32_tensor(&device, vec![0; words], [words]);
        ops::sample(ctx, logits, choices, seen).map(drop)
    }
}

/// Uploads words.
fn u32_tensor<const D: usize>(
    device: &Device,
    words: Vec<u32>,
    shape: [usize; D],
) -> Tensor<D, Int> {
    let words: Vec<i32> = words.into_iter().map(u32::cast_signed).collect();
    Tensor::from_data(TensorData::new(words, shape), (device, DType::I32))
}
