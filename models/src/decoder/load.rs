//! Loading of a checkpoint's weights onto a device, one tensor at a time.

use std::borrow::Cow;

use burn::tensor::{Device, Distribution, FloatDType, Tensor, TensorData};
use checkpoint::Weight;
use half::{bf16, f16};
use ops::{Ctx, Epilogue, NormWeights, OpError, QuantizedWeight, linear};
use quant::{Block, DType, Scheme, WeightFormat};
use rayon::prelude::*;

use super::projection::{Ffn, Matrix, Projection};
use super::unmerged_lora::UnmergedLora;
use super::warnings::warnings;
use super::{Decoder, FlatWeights, Layer};
use crate::config::THRESHOLD;
use crate::footprint::{KvFormat, ModelPrecision};
use crate::lora::Delta;
use crate::{
    Adapter, DecoderConfig, Error, Ffn as Kind, NormKind, Part, Side, Slot, Stored, Weights,
};

/// Options of loading weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LoadOptions {
    /// Compute dtype; none for the dtype of the embedding in the file.
    pub dtype: Option<FloatDType>,
    /// True to round f32 operands of matmuls with dense matrices to tf32, for more than 8 rows. Fewer rows
    /// take the same time in f32.
    pub tf32: bool,
    /// Quantises the layers' matrices that are dense, or have more bits, in the file.
    pub quant: Option<Scheme>,
    /// Format of the KV cache.
    pub kv: KvFormat,
    /// True to round the activations of int8 matmuls to 8 bits, except outlier columns. The threshold is
    /// [`DecoderConfig::int8_threshold`], or 6.
    pub int8_activations: bool,
}

/// Returns the format of a layer's matrix on the device: the smaller of the file's format and `quant`.
fn format_on_device(quant: Option<Scheme>, stored: &Weight<'_>) -> Option<WeightFormat> {
    match (stored.format(), quant.map(|quant| quant.format)) {
        (Some(own), Some(made)) if made.bits() < own.bits() => Some(made),
        (own, made) => own.or(made),
    }
}

/// Size and formats of a model on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OnDevice {
    /// Format of the layers' matrices; for mixed formats, the one with the most work.
    pub weight_format: Option<WeightFormat>,
    /// Bytes of all weights and of an unmerged LoRA. The absmax of 4-bit weights counts as nested.
    pub bytes: u128,
    /// See [`ModelPrecision::lora_columns`].
    pub lora_columns: usize,
}

/// Returns size and formats of a model with an adapter, before it is loaded.
///
/// # Errors
/// [`Error::Checkpoint`].
pub fn on_device(
    weights: &Weights,
    adapter: Option<&Adapter>,
    options: &LoadOptions,
) -> Result<OnDevice, Error> {
    let dtype = options.dtype.unwrap_or(file_dtype(weights)?);
    let (mut max, mut bytes, mut lora_columns) = (None, 0u128, 0);
    for param in weights.config().params() {
        let stored = match param.side {
            Side::Weight => Some(weights.weight(param.slot)?),
            Side::Bias => weights.bias(param.slot)?,
        };
        let Some(stored) = stored else { continue };
        let layers = param.slot.is_matrix() && param.slot != Slot::Head;
        let quant = options.quant.filter(|_| layers && param.side == Side::Weight);
        let weight_format = format_on_device(quant, &stored.weight);
        let (tf32, kv) = (options.tf32, options.kv);
        let precision = ModelPrecision { dtype, tf32, weight_format, kv, lora_columns: 0 };
        bytes += precision.matrix_bytes(&stored.shape);
        max = max.max(weight_format);
        if param.side == Side::Weight
            && weight_format.is_some()
            && let Some(adapter) = adapter
        {
            let (config, slot) = (weights.config(), param.slot);
            let (n, k, columns) = (param.shape[0], param.shape[1], adapter.columns(config, slot));
            lora_columns = lora_columns.max(columns);
            let a = adapter.delta(config, slot).map_or(0, |own| own.rank * k);
            bytes += ((a + n * columns) * burn::tensor::DType::from(dtype).size()) as u128;
        }
    }
    Ok(OnDevice { weight_format: max, bytes, lora_columns })
}

/// Progress of loading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loading {
    /// Number of parts on the device: the embedding, each layer, the head.
    pub done: usize,
    /// Number of all parts.
    pub parts: usize,
}

impl Decoder {
    /// Loads the weights of a checkpoint onto a device. Matrices in 4 or 8 bits stay quantised.
    ///
    /// # Errors
    /// [`Error::Checkpoint`]. [`Error::Quantize`] for a weight with infinities or NaN. [`Error::Op`] for
    /// weights or ops that the device does not support.
    pub fn load(
        weights: &Weights,
        device: &Device,
        ctx: Ctx,
        options: &LoadOptions,
        progress: impl FnMut(Loading),
    ) -> Result<Self, Error> {
        Self::load_adapted(weights, None, device, ctx, options, progress)
    }

    /// Loads weights with an adapter. It is merged into dense matrices. It stays unmerged for matrices in 4
    /// or 8 bits, because merging would round it to their steps.
    ///
    /// # Errors
    /// The errors of [`Decoder::load`].
    pub fn load_adapted(
        weights: &Weights,
        adapter: Option<&Adapter>,
        device: &Device,
        ctx: Ctx,
        options: &LoadOptions,
        progress: impl FnMut(Loading),
    ) -> Result<Self, Error> {
        let quant = options.quant.map(|quant| quant.format);
        warnings(weights, quant)?.iter().for_each(|line| log::warn!("{line}"));
        Loader::of_files(weights, adapter, device, &ctx, options)?.decoder(progress)
    }

    /// Creates a decoder of the first layers, one of each kind. Its weights have shapes and formats but no
    /// values. It launches the same kernels as the loaded decoder.
    ///
    /// # Errors
    /// The errors of [`Decoder::load`].
    pub fn outline(
        weights: &Weights,
        adapter: Option<&Adapter>,
        device: &Device,
        ctx: &Ctx,
        options: &LoadOptions,
    ) -> Result<Self, Error> {
        let loader = Loader::of_files(weights, adapter, device, ctx, options)?;
        Loader { outline: true, ..loader }.decoder(|_| {})
    }

    /// Creates a decoder of random weights, for benchmarks. The default dtype is bf16.
    ///
    /// # Errors
    /// [`Error::Op`] for weights or ops that the device does not support.
    pub fn random(
        config: &DecoderConfig,
        device: &Device,
        ctx: Ctx,
        options: &LoadOptions,
        progress: impl FnMut(Loading),
    ) -> Result<Self, Error> {
        let dtype = options.dtype.unwrap_or(FloatDType::BF16);
        let (source, ctx) = (Source::Noise(config), &ctx);
        let loader = Loader { source, adapter: None, device, ctx, dtype, options, outline: false };
        loader.decoder(progress)
    }

    /// Creates a decoder whose weights are views of `flat`: what a training step writes there, it computes with.
    ///
    /// # Errors
    /// [`Error::Op`] for a device without kernels.
    pub fn of_flat(config: &DecoderConfig, flat: &FlatWeights, ctx: Ctx) -> Result<Self, Error> {
        let (source, ctx, device) = (Source::Flat(config, flat), &ctx, &flat.values().device());
        let (dtype, options) = (flat.dtype(), &LoadOptions::default());
        let loader = Loader { source, adapter: None, device, ctx, dtype, options, outline: false };
        loader.decoder(|_| {})
    }
}

/// Source of the weights.
#[derive(Clone, Copy)]
enum Source<'a> {
    Files(&'a Weights),
    Noise(&'a DecoderConfig),
    /// Views of a flat buffer.
    Flat(&'a DecoderConfig, &'a FlatWeights),
}

#[derive(Clone, Copy)]
struct Loader<'a> {
    source: Source<'a>,
    adapter: Option<&'a Adapter>,
    device: &'a Device,
    ctx: &'a Ctx,
    dtype: FloatDType,
    options: &'a LoadOptions,
    /// True for weights without values, and only the first layers.
    outline: bool,
}

impl<'a> Loader<'a> {
    fn of_files(
        weights: &'a Weights,
        adapter: Option<&'a Adapter>,
        device: &'a Device,
        ctx: &'a Ctx,
        options: &'a LoadOptions,
    ) -> Result<Self, Error> {
        let dtype = options.dtype.unwrap_or(file_dtype(weights)?);
        let source = Source::Files(weights);
        Ok(Self { source, adapter, device, ctx, dtype, options, outline: false })
    }

    fn decoder(self, mut progress: impl FnMut(Loading)) -> Result<Decoder, Error> {
        let mut config = self.config().clone();
        if self.outline {
            config.layers.truncate(config.layers_of_each_kind());
        }
        let parts = config.layers.len() + 2;
        let mut done = 0;
        let mut step = || {
            progress(Loading { done, parts });
            done += 1;
        };
        step();
        let embedding = self.kept(|| self.weight(Slot::Embedding))?;
        let positions = match config.learned_positions {
            true => Some(self.kept(|| self.weight(Slot::Positions))?),
            false => None,
        };
        step();
        let mut layers = Vec::with_capacity(config.layers.len());
        for index in 0..config.layers.len() {
            layers.push(self.kept(|| self.layer(index))?);
            step();
        }
        let final_norm = self.kept(|| self.norm(Slot::FinalNorm))?;
        let head = match config.tie_embeddings {
            true => self.projection_of(vec![Matrix::Dense(embedding.clone())], None, None),
            // The head stays dense if the layers are quantised.
            false => {
                let options = &LoadOptions { quant: None, ..*self.options };
                self.kept(|| Loader { options, ..self }.projection(&[Slot::Head]))?
            }
        };
        step();
        let (ctx, device, dtype) = (self.ctx.clone(), self.device.clone(), self.dtype);
        let captures = ops::captures(&device);
        Ok(Decoder {
            config,
            ctx,
            device,
            dtype,
            tf32: self.options.tf32,
            kv: self.options.kv,
            captures,
            embedding,
            positions,
            layers,
            final_norm,
            head,
        })
    }

    /// Runs `make` with persistent allocations for its result; its temporary memory is reused by the next
    /// call.
    fn kept<T: Send>(&self, make: impl Fn() -> T + Send) -> T {
        // One part at a time, so that a thread that captures does not wait for a whole model.
        let _stream_guard = ops::stream_guard();
        self.device.memory_persistent_allocations((), move |()| make())
    }

    fn config(&self) -> &DecoderConfig {
        match self.source {
            Source::Files(weights) => weights.config(),
            Source::Noise(config) | Source::Flat(config, _) => config,
        }
    }

    fn layer(&self, index: usize) -> Result<Layer, Error> {
        let at = |part| Slot::Layer(index, part);
        let config = self.config();
        let there = |part| config.parts().iter().any(|(own, _)| *own == part);
        let norm = |part| there(part).then(|| self.norm(at(part))).transpose();
        let one = |part| self.projection(&[at(part)]);
        let ffn = match config.ffn {
            Kind::Plain => Ffn::Plain { up: one(Part::Up)?, down: one(Part::Down)? },
            Kind::Gated => self.gated(at(Part::Gate), at(Part::Up), one(Part::Down)?)?,
        };
        Ok(Layer {
            attention_norm: self.norm(at(Part::AttentionNorm))?,
            qkv: self.projection(&[Part::Query, Part::Key, Part::Value].map(at))?,
            qk_norm: match (norm(Part::QueryNorm)?, norm(Part::KeyNorm)?) {
                (Some(q), Some(k)) => Some([q, k]),
                _ => None,
            },
            out: one(Part::Out)?,
            attention_post_norm: norm(Part::AttentionPostNorm)?,
            ffn_norm: self.norm(at(Part::FfnNorm))?,
            ffn,
            ffn_post_norm: norm(Part::FfnPostNorm)?,
        })
    }

    /// Joins gate and up if their format has a gated matmul and no block contains values of both.
    fn gated(&self, gate: Slot, up: Slot, down: Projection) -> Result<Ffn, Error> {
        let biases = [self.bias(&[gate])?, self.bias(&[up])?];
        let mut matrices = self.apart(&[gate, up])?;
        let gated = |matrix: &Matrix| matrix.format().is_some_and(|own| own.info().gated);
        let both = match &matrices[..] {
            // The file stores both in one tensor.
            [Matrix::Quantized(both)] => Some(both.clone()),
            apart if apart.iter().all(gated) => self.joined(apart)?,
            _ => None,
        };
        if let Some(both) = both {
            let (bias, unmerged) = (self.bias(&[gate, up])?, self.unmerged(&[gate, up])?);
            return Ok(Ffn::Joint { both, bias, unmerged, down });
        }
        let last = matrices.split_off(1);
        let [first, second] = biases;
        Ok(Ffn::Gated {
            gate: self.projection_of(matrices, first, self.unmerged(&[gate])?),
            up: self.projection_of(last, second, self.unmerged(&[up])?),
            down,
        })
    }

    fn norm(&self, slot: Slot) -> Result<NormWeights, Error> {
        Ok(NormWeights { weight: self.weight(slot)?, bias: self.bias(&[slot])? })
    }

    /// Loads the matrices of `slots`, with their rows concatenated.
    fn projection(&self, slots: &[Slot]) -> Result<Projection, Error> {
        if let Source::Flat(_, flat) = self.source {
            let matrix = Matrix::Dense(flat.view(slots[0], Side::Weight)?);
            return Ok(self.projection_of(vec![matrix], self.bias(slots)?, None));
        }
        let mut matrices = self.matrices(slots)?;
        if matrices.len() > 1
            && let Some(all) = matrices.iter().map(Matrix::dense).collect::<Option<Vec<_>>>()
        {
            matrices = vec![Matrix::Dense(Tensor::cat(all, 0))];
        }
        Ok(self.projection_of(matrices, self.bias(slots)?, self.unmerged(slots)?))
    }

    fn projection_of(
        &self,
        matrices: Vec<Matrix>,
        bias: Option<Tensor<1>>,
        unmerged: Option<UnmergedLora>,
    ) -> Projection {
        Projection { matrices, bias, tf32: self.options.tf32, unmerged }
    }

    /// Returns the unmerged LoRA of those `slots` that are quantised.
    fn unmerged(&self, slots: &[Slot]) -> Result<Option<UnmergedLora>, Error> {
        let (Source::Files(weights), Some(adapter)) = (self.source, self.adapter) else {
            return Ok(None);
        };
        // Each with its first row and its first column.
        let mut all: Vec<(usize, usize, Delta<'_>)> = Vec::new();
        let (mut a, mut n, mut columns) = (Vec::new(), 0, 0);
        for slot in slots {
            let stored = weights.weight(*slot)?;
            let format = format_on_device(self.options.quant, &stored.weight);
            let own = adapter.delta(self.config(), *slot).filter(|_| format.is_some());
            if let Some(own) = own {
                // Matrices of one tensor in the file share A.
                let same = all.last().filter(|(_, _, last)| std::ptr::eq(last.a, own.a));
                let column = same.map_or(columns, |(_, column, _)| *column);
                if same.is_none() {
                    a.extend(own.a);
                    columns += own.rank;
                }
                all.push((n, column, own));
            }
            n += stored.shape[0];
        }
        let Some((_, _, Delta { rank, .. })) = all.first() else { return Ok(None) };
        let (rank, k) = (*rank, a.len() / columns);
        let mut b = vec![0.0; n * columns];
        for (row, column, own) in all {
            for (i, values) in own.b.chunks(rank).enumerate() {
                let from = (row + i) * columns + column;
                let to = &mut b[from..from + rank];
                to.iter_mut().zip(values).for_each(|(to, value)| *to = value * own.scale as f32);
            }
        }
        Ok(Some(UnmergedLora {
            a: self.factor(&a, [columns, k]),
            b: self.factor(&b, [n, columns]),
        }))
    }

    /// Loads quantised matrices, joined if possible.
    fn matrices(&self, slots: &[Slot]) -> Result<Vec<Matrix>, Error> {
        let matrices = self.apart(slots)?;
        let joined = self.joined(&matrices)?;
        Ok(joined.map_or(matrices, |joined| vec![Matrix::Quantized(joined)]))
    }

    /// Loads one matrix per slot. If a file holds all in one tensor whose blocks straddle rows, loads only
    /// the first.
    fn apart(&self, slots: &[Slot]) -> Result<Vec<Matrix>, Error> {
        let mut matrices = Vec::with_capacity(slots.len());
        for slot in slots {
            matrices.extend(self.matrix(*slot)?);
        }
        Ok(matrices)
    }

    /// Loads the biases of `slots`, concatenated.
    fn bias(&self, slots: &[Slot]) -> Result<Option<Tensor<1>>, Error> {
        if let (Source::Flat(config, flat), first) = (self.source, slots[0]) {
            return config.biased(first).then(|| flat.view(first, Side::Bias)).transpose();
        }
        let mut biases = Vec::new();
        for slot in slots {
            match self.source {
                Source::Files(weights) => {
                    if let Some(bias) = weights.bias(*slot)? {
                        biases.push(self.tensor::<1>(bias)?);
                    }
                }
                Source::Noise(config) if config.biased(*slot) => {
                    biases.push(self.noise(*slot, Side::Bias));
                }
                Source::Noise(_) | Source::Flat(..) => {}
            }
        }
        Ok((!biases.is_empty()).then(|| Tensor::cat(biases, 0)))
    }

    /// Loads the weight of a slot that is never quantised.
    fn weight<const D: usize>(&self, slot: Slot) -> Result<Tensor<D>, Error> {
        Ok(match self.source {
            Source::Files(weights) => self.tensor(weights.weight(slot)?)?,
            Source::Noise(_) => self.noise(slot, Side::Weight),
            Source::Flat(_, flat) => flat.view(slot, Side::Weight)?,
        })
    }

    /// Loads a matrix; none if the one before contains it, because a file holds both in one tensor whose
    /// blocks straddle rows.
    fn matrix(&self, slot: Slot) -> Result<Option<Matrix>, Error> {
        let dense = match self.source {
            Source::Noise(_) => self.noise(slot, Side::Weight),
            Source::Flat(_, flat) => flat.view(slot, Side::Weight)?,
            Source::Files(weights) => {
                let stored = weights.weight(slot)?;
                if let Some(own) = stored.weight.format() {
                    let rows = stored.rows.clone();
                    if own.scheme().block != Block::Row && rows.start > 0 {
                        return Ok(None);
                    }
                    let keeps = format_on_device(self.options.quant, &stored.weight) == Some(own);
                    let weight = stored.weight.rows(rows);
                    let encoded = weight.encoded().expect("it has a format");
                    let mapped = |bytes: &[u8]| weights.checkpoint().mapped(bytes);
                    let weight = match self.outline {
                        true => self.without_values(&encoded.shape, encoded.scheme)?,
                        false => {
                            QuantizedWeight::from_files(self.ctx, &encoded, self.device, mapped)?
                        }
                    };
                    if keeps {
                        return Ok(Some(Matrix::Quantized(self.rounding(weight))));
                    }
                    weight.dequantize(self.ctx, self.dtype)?
                } else if self.options.quant.is_some() {
                    self.tensor(stored)?
                } else {
                    self.merged(slot, self.tensor(stored)?)?
                }
            }
        };
        let Some(scheme) = self.options.quant else { return Ok(Some(Matrix::Dense(dense))) };
        let made = match self.outline {
            true => self.without_values(&dense.dims(), scheme),
            false => QuantizedWeight::quantize(self.ctx, dense, scheme),
        };
        let weight = made.map_err(|why| self.not_quantized(slot, why))?;
        Ok(Some(Matrix::Quantized(self.rounding(weight))))
    }

    fn without_values(&self, shape: &[usize], scheme: Scheme) -> Result<QuantizedWeight, OpError> {
        QuantizedWeight::outline(self.ctx, shape, scheme, self.dtype, self.device)
    }

    /// Returns W + s·B·A, rounded once.
    fn merged(&self, slot: Slot, dense: Tensor<2>) -> Result<Tensor<2>, Error> {
        let Some(own) = self.adapter.and_then(|adapter| adapter.delta(self.config(), slot)) else {
            return Ok(dense);
        };
        let [n, k] = dense.dims();
        let a = self.factor(own.a, [own.rank, k]);
        let b: Vec<f32> = own.b.iter().map(|value| value * own.scale as f32).collect();
        let b = self.factor(&b, [n, own.rank]);
        let residual = Some(dense);
        Ok(linear(self.ctx, b, a, Epilogue { residual, ..Epilogue::default() })?)
    }

    fn factor(&self, values: &[f32], shape: [usize; 2]) -> Tensor<2> {
        self.upload(rounded(values, self.dtype), &shape)
    }

    /// Returns a weight whose matmuls round their activations, if that is requested and its format supports
    /// it.
    fn rounding(&self, weight: QuantizedWeight) -> QuantizedWeight {
        let says = self.config().int8_threshold;
        match self.options.int8_activations {
            true => weight.rounding(says.unwrap_or(THRESHOLD) as f32),
            false => weight,
        }
    }

    fn not_quantized(&self, slot: Slot, why: OpError) -> Error {
        match self.source {
            Source::Files(weights) => {
                Error::Quantize { tensor: weights.name(slot), why: Box::new(why) }
            }
            Source::Noise(_) | Source::Flat(..) => why.into(),
        }
    }

    /// Returns a random parameter that preserves the magnitude of its input.
    fn noise<const D: usize>(&self, slot: Slot, side: Side) -> Tensor<D> {
        let config = self.config();
        let own = |param: &crate::Param| param.slot == slot && param.side == side;
        let param = config.params().into_iter().find(own);
        let shape = param.expect("a parameter of this decoder").shape;
        let norm = shape.len() == 1 && side == Side::Weight;
        let made = match (norm, config.norm.kind) {
            (true, NormKind::RmsPlusOne) => Tensor::<D>::zeros(shape, self.device),
            (true, _) => Tensor::ones(shape, self.device),
            _ => {
                let k = if slot == Slot::Embedding { 1 } else { shape[shape.len() - 1] };
                let spread = Distribution::Normal(0.0, 1.0 / (k as f64).sqrt());
                Tensor::random(shape, spread, self.device)
            }
        };
        made.cast(self.dtype)
    }

    /// Joins several weights; none if one is dense, or if they cannot be joined.
    fn joined(&self, parts: &[Matrix]) -> Result<Option<QuantizedWeight>, Error> {
        match parts.iter().map(Matrix::quantized).collect::<Option<Vec<_>>>() {
            Some(all) if all.len() > 1 => Ok(QuantizedWeight::join(self.ctx, &all)?),
            _ => Ok(None),
        }
    }

    /// Loads a dense parameter.
    fn tensor<const D: usize>(&self, stored: Stored<'_>) -> Result<Tensor<D>, Error> {
        let tensor = stored.dense().expect("tensors outside of the layers' matrices are dense");
        let shape = tensor.shape.clone();
        if self.outline {
            return Ok(Tensor::empty(shape, (self.device, self.dtype.into())));
        }
        // Values that the file already holds in the compute dtype are uploaded from the mapped file.
        if is(tensor.dtype, self.dtype)
            && let (Source::Files(weights), Cow::Borrowed(bytes)) = (self.source, &tensor.bytes)
            && let Some(file) = weights.checkpoint().mapped(bytes)
        {
            let dims = <[usize; D]>::try_from(&shape[..]).expect("a parameter of this rank");
            return Ok(ops::upload(file, dims, self.dtype.into(), self.device)?);
        }
        Ok(self.upload(converted(tensor, self.dtype), &shape))
    }

    fn upload<const D: usize>(&self, bytes: Vec<u8>, shape: &[usize]) -> Tensor<D> {
        let dtype = burn::tensor::DType::from(self.dtype);
        let data = TensorData::from_bytes_vec(bytes, shape.to_vec(), dtype);
        Tensor::from_data(data, (self.device, dtype))
    }
}

impl Matrix {
    fn dense(&self) -> Option<Tensor<2>> {
        match self {
            Self::Dense(weight) => Some(weight.clone()),
            Self::Quantized(_) => None,
        }
    }

    const fn quantized(&self) -> Option<&QuantizedWeight> {
        match self {
            Self::Quantized(weight) => Some(weight),
            Self::Dense(_) => None,
        }
    }
}

/// Returns the default compute dtype of a model: the dtype of its embedding.
///
/// # Errors
/// [`Error::Checkpoint`].
pub fn file_dtype(weights: &Weights) -> Result<FloatDType, Error> {
    Ok(match &weights.weight(Slot::Embedding)?.weight {
        Weight::Dense(tensor) if tensor.dtype == DType::F32 => FloatDType::F32,
        Weight::Dense(tensor) if tensor.dtype == DType::F16 => FloatDType::F16,
        _ => FloatDType::BF16,
    })
}

/// Returns true if the file's values have this dtype.
const fn is(file: DType, dtype: FloatDType) -> bool {
    matches!(
        (file, dtype),
        (DType::F32, FloatDType::F32)
            | (DType::F16, FloatDType::F16)
            | (DType::Bf16, FloatDType::BF16)
    )
}

/// Converts values to another dtype, rounded to nearest, ties to even.
fn converted(tensor: checkpoint::Tensor<'_>, to: FloatDType) -> Vec<u8> {
    if is(tensor.dtype, to) {
        return tensor.bytes.into_owned();
    }
    rounded(&tensor.widened().expect("the survey of a checkpoint lets no other through"), to)
}

/// Converts values to bytes, rounded to nearest, ties to even.
pub(crate) fn rounded(values: &[f32], to: FloatDType) -> Vec<u8> {
    match to {
        FloatDType::F16 => bytes_of(values, |v| f16::from_f32(v).to_le_bytes()),
        FloatDType::BF16 => bytes_of(values, |v| bf16::from_f32(v).to_le_bytes()),
        _ => bytes_of(values, f32::to_le_bytes),
    }
}

/// Concatenates the bytes of each value, on all cores.
fn bytes_of<const N: usize>(values: &[f32], one: impl Fn(f32) -> [u8; N] + Sync) -> Vec<u8> {
    const CHUNK: usize = 1 << 16;
    let mut bytes = vec![0; N * values.len()];
    let chunks = bytes.par_chunks_mut(N * CHUNK).zip(values.par_chunks(CHUNK));
    chunks.for_each(|(to, from)| {
        let to = to.as_chunks_mut::<N>().0;
        to.iter_mut().zip(from).for_each(|(to, value)| *to = one(*value));
    });
    bytes
}
