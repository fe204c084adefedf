//! The next tokens of rows of logits.
//!
//! Logits stay on the device; words of each row go there with every step, and a token, its probability and a flag
//! come back.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use ops::{Ctx, OpError};

use super::Engine;
use super::error::GenerateError;
use super::sampling::{Place, Sampling, Token};

/// Picks tokens of rows that grow, and remembers on the device what each has seen.
#[derive(Debug)]
pub(super) struct Sampler {
    /// Of each row.
    sampling: Vec<Sampling>,
    /// A bit a token, row by row, and a row of what the tokenizer lacks.
    seen: Tensor<1, Int>,
}

impl Sampler {
    /// For sequences that are sampled so and have these tokens so far.
    pub(super) fn new(engine: &Engine, sequences: &[(Sampling, &[u32])]) -> Self {
        let _at_work = ops::at_work();
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
        // As long as what decodes, so outside of the pools of what passes.
        let seen = device.memory_persistent_allocations(bits, |bits| {
            let len = bits.len();
            words_on(device, bits, [len])
        });
        Self { sampling, seen }
    }

    /// The tokens after rows of logits, `[rows, vocab]`, each at its place.
    pub(super) fn sample(
        &self,
        engine: &Engine,
        logits: Tensor<2>,
        places: &[Place],
    ) -> Result<Vec<Token>, GenerateError> {
        let _at_work = ops::at_work();
        let _first = trace::first(|| "sampling");
        let _part = trace::span(|| "sampling");
        let rows = self.sampling.iter().zip(places);
        let words: Vec<u32> =
            rows.flat_map(|(sampling, place)| sampling.choice(*place).words()).collect();
        let shape = [places.len(), words.len() / places.len()];
        let choices = words_on(engine.decoder().device(), words, shape);
        let ctx = engine.decoder().ctx();
        let made =
            ops::sample(ctx, logits, choices, self.seen.clone()).map_err(models::Error::from)?;
        let rows = engine.on_host(made)?;
        engine.note_memory();
        let rows = rows.as_chunks::<3>().0.iter().zip(places);
        rows.map(|([id, logprob, none], place)| match *none == 0.0 {
            true => Ok(Token { id: *id as u32, logprob: *logprob }),
            false => Err(GenerateError::NotFinite { position: place.position }),
        })
        .collect()
    }
}

/// Launches what [`Sampler::pick`] launches with some logits; `masked` if the tokenizer lacks tokens.
pub(super) fn rehearse(masked: bool) -> impl Fn(&Ctx, Tensor<2>) -> Result<(), OpError> {
    move |ctx, logits| {
        let ([rows, vocab], device) = (logits.dims(), logits.device());
        let choice = Sampling::default().choice(Place { position: 0, completion: 0 }).words();
        let choices = words_on(&device, choice.repeat(rows), [rows, choice.len()]);
        let words = (rows + usize::from(masked)) * vocab.div_ceil(32);
        let seen = words_on(&device, vec![0; words], [words]);
        ops::sample(ctx, logits, choices, seen).map(drop)
    }
}

/// Words on a device.
fn words_on<const D: usize>(device: &Device, words: Vec<u32>, shape: [usize; D]) -> Tensor<D, Int> {
    let words: Vec<i32> = words.into_iter().map(u32::cast_signed).collect();
    Tensor::from_data(TensorData::new(words, shape), (device, DType::I32))
}
