//! Gradients of all weights, beside torch.

use std::sync::Arc;

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use checkpoint::Checkpoint;
use models::export::{read_buffers, write_buffers};
use models::{
    Activations, AdamWOptions, Decoder, Example, FlatWeights, Gradients, HostWeights, KvFormat,
    LossScale, Master, MicroBatch, ModelPrecision, MuonOptions, Offload, Optimizer, Param,
    Parameters, Parking, Recompute, Side, Trained, Training, Trains, Weights, Workload,
};
use ops::training::{Link, Moments, link};
use ops::{Ctx, MemoryProfile};
use suite::decoder::floats;

use crate::{fixture, open};

/// Fixtures with golden results of `fixtures/full.py`.
const FULL: [&str; 8] = ["gemma2", "gemma3", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3"];

/// A model to train on the CPU in f32.
pub(crate) struct Model {
    weights: Weights,
    pub(crate) parameters: Arc<Parameters>,
    pub(crate) flat: FlatWeights,
    pub(crate) decoder: Decoder,
    pub(crate) gradients: Gradients,
}

impl Model {
    pub(crate) fn open(name: &str) -> Self {
        let (weights, device) = (open(name), Device::cpu());
        let parameters = Arc::new(Parameters::new(weights.config()));
        let f32 = FloatDType::F32;
        let flat =
            FlatWeights::of_files(&weights, parameters.clone(), f32, &device, None).expect("dense");
        let decoder =
            Decoder::of_flat(weights.config(), &flat, Ctx::default()).expect("it has kernels");
        let gradients = Gradients::zeros(Trained::Weights(&flat));
        Self { weights, parameters, flat, decoder, gradients }
    }

    /// Adds the gradient of `weight` · loss of a batch, and returns the loss.
    fn learn(&self, batch: &[Example], weight: f64, recompute: Recompute) -> f64 {
        self.learn_in(batch, weight, &recompute.into())
    }

    fn learn_in(&self, batch: &[Example], weight: f64, activations: &Activations) -> f64 {
        let one = Tensor::<1>::from_data(TensorData::new(vec![1.0f32], [1]), &Device::cpu());
        let scale = (weight, one);
        let loss = self
            .decoder
            .add_gradients(Trained::Weights(&self.flat), &self.gradients, batch, scale, activations)
            .expect("a batch");
        f64::from(loss.sum.into_data().try_to_vec::<f32>().expect("f32")[0])
    }

    fn optimizer(
        &self,
        master: Master<'_>,
        options: AdamWOptions,
        offload: Option<(&Arc<Link>, Offload)>,
    ) -> Optimizer {
        Optimizer::new(Trained::Weights(&self.flat), master, options, LossScale::One, offload)
            .expect("it has kernels")
    }

    /// Returns the bits of all weights.
    fn values(&self) -> Vec<u32> {
        let values = self.flat.values().clone().into_data();
        values.try_to_vec::<f32>().expect("f32").into_iter().map(f32::to_bits).collect()
    }

    pub(crate) fn sums(&self) -> Vec<f32> {
        self.gradients.sums().clone().into_data().try_to_vec().expect("f32")
    }

    /// Compares a flat buffer with a checkpoint of the model's names: `distance` of each tensor from the golden one is at most
    /// `tolerance`.
    fn compare(
        &self,
        (flat, file): (&[f32], &str),
        name: &str,
        distance: fn(&[f32], &[f32]) -> f64,
        tolerance: f64,
    ) {
        let file =
            Checkpoint::open(fixture(name).join("full").join(file)).expect("full.py writes it");
        let golden = Weights::new(self.weights.config().clone(), file).expect("the model's names");
        let values = |param: &Param| {
            let stored = match param.side {
                Side::Weight => golden.weight(param.slot).expect("there"),
                Side::Bias => golden.bias(param.slot).expect("there").expect("a bias"),
            };
            stored.dense().expect("dense").widened().expect("f32").into_owned()
        };
        for tensor in self.parameters.tensors() {
            // Of queries, keys and values together: the gradient of a key bias is 0, but for rounding.
            let all: Vec<f32> = tensor.params.iter().flat_map(values).collect();
            let off = distance(&flat[tensor.at..tensor.at + tensor.len()], &all);
            assert!(off <= tolerance, "{name} {}: {off:e}", tensor.params[0].name);
        }
    }
}

/// Largest difference, as a share of the largest magnitude.
pub(crate) fn largest(have: &[f32], want: &[f32]) -> f64 {
    // In the total order a NaN is above all numbers.
    let max = |values: &mut dyn Iterator<Item = f32>| {
        values.map(f32::abs).max_by(f32::total_cmp).unwrap_or(0.0)
    };
    let off = max(&mut have.iter().zip(want).map(|(have, want)| have - want));
    f64::from(off) / f64::from(max(&mut want.iter().copied()))
}

/// Root of the mean square difference, as a share of that of the values. Single weights may differ by more: AdamW turns the
/// rounding of a gradient near 0 into a step.
fn mean(have: &[f32], want: &[f32]) -> f64 {
    let square =
        |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
    let off = square(&mut have.iter().zip(want).map(|(have, want)| have - want));
    (off / square(&mut want.iter().copied())).sqrt()
}

/// Returns the batch of `full.py`, and the loss of torch.
fn golden(name: &str) -> (Vec<Example>, f64, Vec<f32>) {
    let file =
        Checkpoint::open(fixture(name).join("full/golden.safetensors")).expect("full.py writes it");
    let ids = |of: &str| -> Vec<u32> {
        let tensor = file.tensor(of).expect("full.py writes it");
        tensor.bytes.as_chunks::<8>().0.iter().map(|id| i64::from_le_bytes(*id) as u32).collect()
    };
    let numbers = |of: &str| floats(&file.tensor(of).expect("full.py writes it"));
    let (tokens, lengths, from) = (ids("tokens"), ids("lengths"), ids("from"));
    let rows = tokens.chunks(tokens.len() / lengths.len()).zip(lengths).zip(from);
    let batch = rows.map(|((row, length), from)| Example {
        tokens: row[..length as usize].to_vec(),
        from: from as usize,
    });
    (batch.collect(), f64::from(numbers("loss")[0]), numbers("losses"))
}

#[test]
fn losses_and_gradients_are_those_of_torch() {
    for name in FULL {
        let (batch, want, _) = golden(name);
        let model = Model::open(name);
        let loss = model.learn(&batch, 1.0, Recompute::Nothing);
        assert!((loss - want).abs() <= 1e-5 * want, "{name}: {loss} for {want}");
        model.compare((&model.sums(), "gradients.safetensors"), name, largest, 1e-4);
    }
}

#[test]
fn steps_of_adamw_are_those_of_torch() {
    for name in FULL {
        let (batch, _, want) = golden(name);
        let model = Model::open(name);
        let options = AdamWOptions { eps: 1e-5, ..AdamWOptions::default() };
        let mut optimizer = model.optimizer(Master::Absent, options, None);
        let (ctx, count) = (Ctx::default(), batch.iter().map(Example::learned).sum::<usize>());
        for want in want {
            model.gradients.clear(&ctx).expect("it has kernels");
            let mean = 1.0 / count as f64;
            let loss = model.learn(&batch, mean, Recompute::Nothing) * mean;
            assert!((loss - f64::from(want)).abs() <= 1e-5 * loss, "{name}: {loss} for {want}");
            optimizer.step(&ctx, &model.gradients, 1e-3).expect("it has kernels");
        }
        let after: Vec<f32> = model.flat.values().clone().into_data().try_to_vec().expect("f32");
        model.compare((&after, "after.safetensors"), name, mean, 1e-5);
    }
}

#[test]
fn recomputing_changes_no_bit() {
    for name in ["gemma3", "gpt2", "llama"] {
        let (batch, ..) = golden(name);
        let run = |recompute| {
            let model = Model::open(name);
            (model.learn(&batch, 0.25, recompute).to_bits(), model.sums())
        };
        let kept = run(Recompute::Nothing);
        for recompute in Recompute::ALL {
            assert!(run(recompute) == kept, "{name} {recompute:?}");
        }
    }
}

/// Activations that layers keep take the planned bytes, and memory for them changes no bit.
#[test]
fn kept_activations_take_what_is_planned() {
    for name in FULL {
        let (batch, ..) = golden(name);
        // Sequences of different lengths are packed.
        let rows = batch.iter().map(Example::rows).sum();
        for recompute in Recompute::ALL {
            let model = Model::open(name);
            let trains = Trains::Weights { master: false, moments: Moments::F32, muon: false };
            let training = Training { recompute, trains, ..Training::default() };
            let workload = Workload { training: Some(training), ..Workload::new(1, rows) };
            let precision = ModelPrecision {
                dtype: FloatDType::F32,
                tf32: false,
                weight_format: None,
                kv: KvFormat::Float,
                lora_columns: 0,
            };
            let config = model.weights.config();
            let parts = config.footprint(precision, 0, &workload, MemoryProfile::LEAST);
            let parts = parts.expect("every layer is adapted");
            let activations = Activations::new(recompute, &parts, &Device::cpu());
            let pools = Model::open(name);
            for _ in 0..2 {
                let loss = model.learn_in(&batch, 0.25, &activations);
                assert!(loss.to_bits() == pools.learn(&batch, 0.25, recompute).to_bits());
            }
            assert!(model.sums() == pools.sums(), "{name} {recompute:?}");
            let planned = parts.saved / parts.saved_layers as u128;
            assert_eq!(u128::from(activations.needed()), planned, "{name} {recompute:?}");
        }
    }
}

#[test]
fn one_batch_equals_micro_batches() {
    for name in ["gemma2", "qwen3"] {
        let (batch, ..) = golden(name);
        let (whole, apart) = (Model::open(name), Model::open(name));
        let loss = whole.learn(&batch, 0.5, Recompute::Nothing);
        let parts: f64 = batch
            .iter()
            .map(|own| apart.learn(std::slice::from_ref(own), 0.5, Recompute::Nothing))
            .sum();
        assert!((loss - parts).abs() <= 1e-6 * loss, "{name}: {loss}, {parts}");
        let (whole, apart) = (whole.sums(), apart.sums());
        let largest = whole.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        for (at, (one, other)) in whole.iter().zip(&apart).enumerate() {
            assert!((one - other).abs() <= 1e-6 * largest, "{name} {at}: {one}, {other}");
        }
    }
}

/// A dense matrix in f64.
#[derive(Clone)]
struct Matrix {
    columns: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn rows(&self) -> usize {
        self.values.len() / self.columns
    }

    fn transposed(&self) -> Self {
        let (rows, columns) = (self.rows(), self.columns);
        let at = |index: usize| self.values[index % rows * columns + index / rows];
        Self { columns: rows, values: (0..self.values.len()).map(at).collect() }
    }

    fn times(&self, other: &Self) -> Self {
        let (k, n) = (self.columns, other.columns);
        let at = |index: usize| -> f64 {
            (0..k)
                .map(|k_at| self.values[index / n * k + k_at] * other.values[k_at * n + index % n])
                .sum()
        };
        Self { columns: n, values: (0..self.rows() * n).map(at).collect() }
    }

    /// Returns a · self + b · other.
    fn mixed(&self, a: f64, other: &Self, b: f64) -> Self {
        let both = self.values.iter().zip(&other.values);
        Self { columns: self.columns, values: both.map(|(x, y)| a * x + b * y).collect() }
    }

    /// Newton and Schulz, as torch.optim.Muon writes it: for wide matrices.
    fn orthogonalised(&self) -> Self {
        if self.rows() > self.columns {
            return self.transposed().orthogonalised().transposed();
        }
        let norm = self.values.iter().map(|x| x * x).sum::<f64>().sqrt();
        let mut x = self.mixed(1.0 / norm, self, 0.0);
        for _ in 0..5 {
            let a = x.times(&x.transposed());
            let b = a.mixed(-4.7750, &a.times(&a), 2.0315);
            x = x.mixed(3.4445, &b.times(&x), 1.0);
        }
        x
    }
}

#[test]
fn steps_of_muon_are_those_of_its_formula() {
    // Square, wide and tall matrices; queries, keys and values as one tensor.
    for name in ["qwen3", "gpt2"] {
        let (batch, ..) = golden(name);
        let model = Model::open(name);
        let options = AdamWOptions {
            muon: Some(MuonOptions { momentum: 0.9, ..MuonOptions::default() }),
            max_grad_norm: None,
            ..AdamWOptions::default()
        };
        let mut optimizer = model.optimizer(Master::Absent, options, None);
        let floats =
            || -> Vec<f32> { model.flat.values().clone().into_data().try_to_vec().expect("f32") };
        let (ctx, mut moments) = (Ctx::default(), vec![0.0; model.parameters.len()]);
        for _ in 0..2 {
            model.gradients.clear(&ctx).expect("it has kernels");
            model.learn(&batch, 0.1, Recompute::Nothing);
            let (before, gradients) = (floats(), model.sums());
            optimizer.step(&ctx, &model.gradients, 1e-2).expect("it has kernels");
            let after = floats();
            for tensor in model.parameters.tensors() {
                for (param, range) in tensor.parts() {
                    if tensor.group.outer {
                        // Tables and norms take AdamW's steps, of at most the rate and the decay.
                        let moved = range.clone().map(|at| (after[at] - before[at]).abs());
                        let moved = moved.max_by(f32::total_cmp).unwrap_or(0.0);
                        assert!(moved > 0.0 && moved < 1.2e-2, "{name} {}: {moved}", param.name);
                        continue;
                    }
                    let direction = range.clone().map(|at| {
                        let g = f64::from(gradients[at]);
                        moments[at] = 0.9 * moments[at] + 0.1 * g;
                        0.9 * moments[at] + 0.1 * g
                    });
                    let direction = Matrix { columns: param.shape[1], values: direction.collect() };
                    let update = direction.orthogonalised();
                    let scale = 1e-2 * 0.2 * (param.shape[0].max(param.shape[1]) as f64).sqrt();
                    let want: Vec<f32> = range
                        .clone()
                        .zip(update.values)
                        .map(|(at, x)| (-1e-3 * f64::from(before[at]) - scale * x) as f32)
                        .collect();
                    let have: Vec<f32> = range.map(|at| after[at] - before[at]).collect();
                    let off = mean(&have, &want);
                    assert!(off <= 1e-4, "{name} {}: {off:e}", param.name);
                }
            }
        }
    }
}

/// Everything that can be in host memory.
const ALL: Offload = Offload { optimizer: true, gradients: true, inputs: true };

fn open_link() -> Arc<Link> {
    link(&Ctx::default(), &Device::cpu()).expect("it has kernels").into()
}

#[test]
fn state_in_host_memory_takes_the_same_steps() {
    let (link, ctx) = (open_link(), Ctx::default());
    let (batch, ..) = golden("qwen3");
    for moments in Moments::ALL {
        for exact in [false, true] {
            let run = |on_host: bool| {
                let model = Model::open("qwen3");
                let options = AdamWOptions { moments, ..AdamWOptions::default() };
                let master = model.flat.rounded(FloatDType::F32);
                let master = match (exact, on_host) {
                    (false, _) => Master::Absent,
                    (true, false) => Master::Device(&master),
                    (true, true) => {
                        let (weights, f32) = (&model.weights, FloatDType::F32);
                        let mut host = HostWeights::zeros(&link, &model.parameters).expect("small");
                        let layout = model.parameters.clone();
                        let device = Device::cpu();
                        FlatWeights::of_files(weights, layout, f32, &device, Some(&mut host))
                            .expect("dense");
                        Master::Host(host)
                    }
                };
                let offload = Offload { optimizer: true, ..Offload::default() };
                let offload = on_host.then_some((&link, offload));
                let mut optimizer = model.optimizer(master, options, offload);
                for _ in 0..3 {
                    model.gradients.clear(&ctx).expect("it has kernels");
                    model.learn(&batch, 0.1, Recompute::Nothing);
                    optimizer.step(&ctx, &model.gradients, 1e-3).expect("it has kernels");
                }
                let folder = tempfile::tempdir().expect("a folder");
                let path = folder.path().join("state.safetensors");
                write_buffers(&path, &mut optimizer.buffers()).expect("written");
                let state = std::fs::read(&path).expect("just written");
                // What is read is what was written.
                read_buffers(&path, &mut optimizer.buffers()).expect("its own");
                write_buffers(&path, &mut optimizer.buffers()).expect("written");
                assert!(std::fs::read(&path).expect("just written") == state);
                (model.values(), state)
            };
            assert!(run(false) == run(true), "{moments:?}, exact: {exact}");
        }
    }
}

#[test]
fn steps_by_layer_are_those_by_micro_batch() {
    let (link, ctx, device) = (open_link(), Ctx::default(), Device::cpu());
    let always = || true;
    for name in FULL {
        let (batch, ..) = golden(name);
        let parts: Vec<Vec<Example>> = batch.iter().map(|own| vec![own.clone()]).collect();
        let scale = || (0.25, Tensor::<1>::from_data(TensorData::new(vec![1.0f32], [1]), &device));
        // Without clipping, a norm that is summed in another order changes nothing.
        for clip in [None, Some(1e-2)] {
            let options = AdamWOptions { max_grad_norm: clip, ..AdamWOptions::default() };
            let apart = Model::open(name);
            let want: f64 = parts.iter().map(|own| apart.learn(own, 0.25, Recompute::Layers)).sum();
            let mut optimizer = apart.optimizer(Master::Absent, options, None);
            optimizer.step(&ctx, &apart.gradients, 1e-3).expect("it has kernels");
            let tied = apart.weights.config().tie_embeddings;
            for offload in
                [Offload { gradients: false, ..ALL }, Offload { inputs: false, ..ALL }, ALL]
            {
                let model = Model::open(name);
                let trained = Trained::Weights(&model.flat);
                let gradients = match offload.gradients {
                    false => Gradients::zeros(trained),
                    true => Gradients::offloaded(&model.parameters, &link, &device).expect("small"),
                };
                let mut optimizer =
                    model.optimizer(Master::Absent, options, Some((&link, offload)));
                let parking = Parking::new(offload.inputs.then(|| link.clone()), &device);
                gradients.clear(&ctx).expect("it has kernels");
                let whole: Vec<MicroBatch> = parts.iter().cloned().map(MicroBatch::from).collect();
                let losses = model
                    .decoder
                    .add_gradients_by_layer(trained, &gradients, &whole, scale(), &parking, &always)
                    .expect("a step")
                    .expect("nothing stops it");
                let number = |sum: Tensor<1>| {
                    f64::from(sum.into_data().try_to_vec::<f32>().expect("f32")[0])
                };
                let loss: f64 = losses.into_iter().map(|loss| number(loss.sum)).sum();
                assert!(
                    (loss - want).abs() <= 1e-6 * want,
                    "{name} {offload:?}: {loss} for {want}"
                );
                optimizer.step(&ctx, &gradients, 1e-3).expect("it has kernels");
                if !tied && (clip.is_none() || !offload.gradients) {
                    assert!(model.values() == apart.values(), "{name} {offload:?} {clip:?}");
                }
                let floats = |model: &Model| model.flat.values().clone().into_data();
                let floats = |of| floats(of).try_to_vec::<f32>().expect("f32");
                let off = mean(&floats(&model), &floats(&apart));
                assert!(off <= 1e-6, "{name} {offload:?} {clip:?}: {off:e}");
            }
        }
    }
}
