//! Quantisation of a model's folder: writes it again with the layers' matrices in 4 or 8 bits.
//!
//! ```text
//!   for each tensor, one at a time:
//!     matrix of a layer       upload [out, in], quantise, download values and scales, write
//!     any other tensor        write unchanged
//!   config.json               add the quantization_config that transformers writes for these weights
//!   other files               copy
//! ```
//!
//! All files go to a temporary folder next to the output folder, which is renamed when it is complete. Matrices stored
//! as `[in, out]`, as in GPT-2, are transposed first. Fused matrices stay fused, as in transformers.

mod errors;
mod folder;
mod matrix;
mod peaks;
mod shards;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, NotStored, Plan, Tensor, Writer};
use kernels::quantized::{InvalidWeight, Weight};
use models::Weights;
use quant::{Block, Scales, Scheme, WeightFormat};
use serde::Serialize;
use text::Tokenizer;
use tune::Infeasible;

use errors::ErrorSums;
use folder::Target;
use matrix::Matrix;
pub use peaks::Peaks;
use shards::Shard;

use crate::device::Device;
use crate::model_files;

/// Options of [`quantize_model`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantizeOptions {
    /// Format of the layers' matrices; NF4 by default.
    pub format: WeightFormat,
    /// Number of values that share an absmax in 4 bits: a power of two from 32 to 4096, 64 by default. In 8 bits each
    /// row has one scale.
    pub block_size: u32,
    /// True to quantise the absmax of 4-bit weights to 8 bits as well (bitsandbytes' double quantization); true by
    /// default.
    pub nested: bool,
    /// Maximum bytes of tensors per file, unless a single tensor has more; 5 GB by default.
    pub shard_bytes: u64,
    /// True to dequantise the written weights and compare them with the originals; false by default.
    pub measure: bool,
}

impl QuantizeOptions {
    /// Returns the format with the options' block size and scales, if the format has these options.
    pub(super) fn scheme(&self) -> Scheme {
        let scheme = self.format.scheme();
        match self.format.info().has_options {
            true => Scheme {
                block: Block::Elements(self.block_size),
                scales: if self.nested { Scales::Nested } else { Scales::F32 },
                ..scheme
            },
            false => scheme,
        }
    }
}

impl Default for QuantizeOptions {
    /// Returns NF4 in blocks of 64, nested, in files of up to 5 GB, without measuring.
    fn default() -> Self {
        Self {
            format: WeightFormat::Nf4,
            block_size: 64,
            nested: true,
            shard_bytes: 5_000_000_000,
            measure: false,
        }
    }
}

/// Result of [`quantize_model`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct QuantizedModel {
    /// Format of the quantised matrices.
    pub quant: WeightFormat,
    /// Block size; none for 8 bits.
    pub block_size: Option<u32>,
    /// True if the absmax is quantised too; none for 8 bits.
    pub nested: Option<bool>,
    /// Quantised weights, ordered by name.
    pub weights: Vec<QuantizedWeight>,
    /// Totals over `weights`.
    pub total: Figures,
    /// Number of tensors that are written unchanged.
    pub kept: usize,
    /// Bytes of all tensors of the source.
    pub bytes_before: u64,
    /// Bytes of all tensors of the result.
    pub bytes: u64,
    /// Peak memory of the run.
    pub peaks: Peaks,
}

/// A weight that was quantised to 4 or 8 bits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct QuantizedWeight {
    /// Name of the tensor in the file.
    pub name: String,
    /// Shape: `[out, in]`.
    pub shape: [usize; 2],
    /// Size and errors of this weight.
    #[serde(flatten)]
    pub figures: Figures,
}

/// Size and errors of quantised weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Figures {
    /// Number of quantised values.
    pub values: u64,
    /// Bytes in the file: values, absmax and metadata.
    pub bytes: u64,
    /// Bits per value: `8 · bytes / values`.
    pub bits_per_weight: f64,
    /// Errors, if [`QuantizeOptions::measure`] is set.
    #[serde(flatten)]
    pub errors: Option<WeightErrors>,
}

/// Difference between dequantised weights and their originals w.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct WeightErrors {
    /// ‖w - dequantised‖ / ‖w‖; 0 if all of w is 0.
    pub relative_error: f64,
    /// max |w - dequantised|
    pub largest_error: f64,
}

/// Error of [`quantize_model`]. The output folder is then left as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuantizeError {
    /// The folder has no model that can be read.
    #[error("{0}{hint}", hint = .0.hint())]
    Model(models::Error),
    /// The tokenizer cannot be read or belongs to another model.
    #[error(transparent)]
    Text(#[from] text::Error),
    /// The files' weights are already in 4 or 8 bits.
    #[error("{what} is already quantised\nhint: quantise the original model")]
    Quantized {
        /// The tensor, or the field of config.json, that shows it.
        what: String,
    },
    /// The output folder is taken or cannot be created: which one, and the reason.
    #[error("{}\nhint: name a new or an empty folder", .0)]
    Output(String),
    /// The block size is invalid.
    #[error(transparent)]
    Block(InvalidWeight),
    /// The format does not support a matrix of this size, such as an empty one.
    #[error("tensor {tensor}: {why}")]
    Weight {
        /// Name of the tensor.
        tensor: String,
        /// Reason.
        why: InvalidWeight,
    },
    /// A weight has infinities or NaN.
    #[error(
        "tensor {tensor} holds infinities or NaN\nhint: quantised values must be finite; the checkpoint is damaged"
    )]
    NotFinite {
        /// Name of the tensor.
        tensor: String,
    },
    /// The device has no buffer that is large enough for a matrix.
    #[error(
        "tensor {tensor} needs a buffer of {need} bytes, but the device allows at most {have}\nhint: use \
         `Backend::Cpu` (--backend cpu)"
    )]
    Memory {
        /// Name of the tensor.
        tensor: String,
        /// Bytes required.
        need: u64,
        /// Bytes of the device's largest buffer.
        have: u64,
    },
    /// The device cannot quantise a matrix.
    #[error("tensor {tensor}: {why}\nhint: use another `Backend` (--backend)")]
    Unsupported {
        /// Name of the tensor.
        tensor: String,
        /// Feature that the device lacks.
        why: Infeasible,
    },
    /// The device failed while it quantised a matrix.
    #[error(
        "tensor {tensor}: the device failed: {why}\nhint: check the device with `flashover doctor`, or use another \
         `Backend` (--backend)"
    )]
    Failed {
        /// Name of the tensor.
        tensor: String,
        /// Error message of the device.
        why: String,
    },
    /// No file stores this format.
    #[error(transparent)]
    NotStored(NotStored),
    /// A file or folder cannot be written.
    #[error("cannot write {}: {why}\nhint: {}", .path.display(), checkpoint::writable(.why))]
    Write {
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the operating system.
        why: io::Error,
    },
    /// The caller's `stop` returned true.
    #[error("stopped before the model was complete; nothing was written")]
    Stopped,
}

// Implemented by hand: `#[from]` would make them sources, which are printed a second time.
impl From<models::Error> for QuantizeError {
    fn from(why: models::Error) -> Self {
        Self::Model(why)
    }
}

impl From<checkpoint::Error> for QuantizeError {
    fn from(why: checkpoint::Error) -> Self {
        Self::Model(why.into())
    }
}

/// Quantises the model in the folder `model` to the new folder `output`, for transformers with bitsandbytes and for
/// this library. The layers' matrices get 4 or 8 bits. Embeddings, norms, biases and the output projection stay
/// unchanged.
///
/// One tensor is processed at a time. The host holds the values of one tensor, and the device one tensor with its
/// quantised values. [`QuantizedModel::peaks`] reports the peak memory.
///
/// # Errors
/// [`QuantizeError`]. The output folder is then left as it was.
pub fn quantize_model(
    device: &Device,
    model: &Path,
    output: &Path,
    options: &QuantizeOptions,
) -> Result<QuantizedModel, QuantizeError> {
    quantize_model_until(device, model, output, options, &|_| false)
}

/// Progress of a quantisation. Its parts are tensors to write, matrices to compare and files to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuantizeProgress {
    /// Number of finished parts.
    pub done: usize,
    /// Number of all parts.
    pub parts: usize,
}

/// Runs [`quantize_model`], calls `stop` before each part, and ends if it returns true.
///
/// # Errors
/// The errors of [`quantize_model`]; [`QuantizeError::Stopped`].
pub fn quantize_model_until(
    device: &Device,
    model: &Path,
    output: &Path,
    options: &QuantizeOptions,
    stop: &dyn Fn(QuantizeProgress) -> bool,
) -> Result<QuantizedModel, QuantizeError> {
    if !options.format.info().in_files {
        return Err(QuantizeError::NotStored(NotStored::Format(options.format)));
    }
    Weight::new([1, 1], options.scheme()).map_err(QuantizeError::Block)?;
    let target = Target::new(model, output)?;
    let weights = Weights::open(model)?;
    Tokenizer::of_model(model, weights.config().vocab)?;
    let job = Job::new(&weights, options)?;
    let config = folder::config(model, job.compute_dtype(), options)?;
    let others = model_files::others(model, weights.checkpoint())?;
    let tensors: usize = job.shards.iter().map(|shard| shard.tensors.len()).sum();
    let (parts, done) = (tensors + job.matrices.len() + others.len() + 1, Cell::new(0));
    let go_on = || match stop(QuantizeProgress { done: done.replace(done.get() + 1), parts }) {
        true => Err(QuantizeError::Stopped),
        false => Ok(()),
    };
    let staging = target.begin()?;
    let mut peaks = Peaks::start();
    let mut sizes = BTreeMap::new();
    for shard in &job.shards {
        sizes.extend(job.write(device, staging.path(), shard, &mut peaks, &go_on)?);
    }
    shards::write_index(staging.path(), &job.shards, &sizes)?;
    let mut weights = Vec::new();
    let mut sums = ErrorSums::default();
    let written = Checkpoint::open(staging.path())?;
    for matrix in job.matrices.values() {
        go_on()?;
        let found = options.measure.then(|| job.compare(matrix, &written)).transpose()?;
        let bytes = matrix.plan()?.iter().map(|plan| sizes[&plan.name]).sum();
        let figures = Figures::new(matrix.len(), bytes, found.map(|sums| sums.errors()));
        sums.add(&found.unwrap_or_default());
        let (name, shape) = (matrix.name.clone(), matrix.shape);
        weights.push(QuantizedWeight { name, shape, figures });
    }
    drop(written);
    folder::copy(model, staging.path(), &others, &go_on)?;
    folder::write(&staging.path().join("config.json"), config.as_bytes())?;
    go_on()?;
    staging.finish()?;
    peaks.finish();
    let all = |of: fn(&Figures) -> u64| weights.iter().map(|w| of(&w.figures)).sum();
    let total =
        Figures::new(all(|f| f.values), all(|f| f.bytes), options.measure.then(|| sums.errors()));
    let has_options = options.format.info().has_options;
    Ok(QuantizedModel {
        quant: options.format,
        block_size: has_options.then_some(options.block_size),
        nested: has_options.then_some(options.nested),
        total,
        kept: job.checkpoint.names().count() - weights.len(),
        weights,
        bytes_before: job.bytes_before()?,
        bytes: sizes.values().sum(),
        peaks,
    })
}

impl Figures {
    fn new(values: u64, bytes: u64, errors: Option<WeightErrors>) -> Self {
        let bits_per_weight = bytes as f64 * 8.0 / values.max(1) as f64;
        Self { values, bytes, bits_per_weight, errors }
    }
}

/// Work to do, checked in advance.
struct Job<'a> {
    checkpoint: &'a Checkpoint,
    matrices: BTreeMap<String, Matrix>,
    shards: Vec<Shard>,
}

impl<'a> Job<'a> {
    fn new(weights: &'a Weights, options: &QuantizeOptions) -> Result<Self, QuantizeError> {
        let checkpoint = weights.checkpoint();
        let mut matrices = BTreeMap::new();
        for (name, param) in weights.layer_matrices() {
            let matrix = Matrix::read(checkpoint, &name, param.transposed, options)?;
            matrices.insert(name, matrix);
        }
        let mut job = Self { checkpoint, matrices, shards: Vec::new() };
        let plans = checkpoint.names().map(|name| Ok((name.to_owned(), job.plan(name)?)));
        let plans = plans.collect::<Result<Vec<_>, QuantizeError>>()?;
        job.shards = shards::split(plans, options.shard_bytes);
        Ok(job)
    }

    /// Returns the tensors that one tensor of the model becomes.
    fn plan(&self, name: &str) -> Result<Vec<Plan>, QuantizeError> {
        if let Some(matrix) = self.matrices.get(name) {
            return matrix.plan();
        }
        let tensor = self.checkpoint.tensor(name)?;
        Ok(vec![Plan::new(name, tensor.dtype, &tensor.shape)])
    }

    /// Returns the compute dtype of the layers: the dtype of their matrices before.
    fn compute_dtype(&self) -> &'static str {
        self.matrices.values().next().map_or("float32", Matrix::dtype_name)
    }

    fn bytes_before(&self) -> Result<u64, QuantizeError> {
        let bytes = |name| Ok(self.checkpoint.tensor(name)?.bytes.len() as u64);
        self.checkpoint.names().map(bytes).sum()
    }

    /// Writes a file and returns the bytes of each tensor in it.
    fn write(
        &self,
        device: &Device,
        folder: &Path,
        shard: &Shard,
        peaks: &mut Peaks,
        go_on: &dyn Fn() -> Result<(), QuantizeError>,
    ) -> Result<Vec<(String, u64)>, QuantizeError> {
        let plans = shard.tensors.iter().flat_map(|(_, plans)| plans.iter().cloned());
        let mut writer = Writer::create(folder.join(&shard.file), plans)?;
        let mut sizes = Vec::new();
        let mut put = |writer: &mut Writer, tensors: &[(String, Tensor<'_>)]| {
            sizes.extend(tensors.iter().map(|(name, t)| (name.clone(), t.bytes.len() as u64)));
            writer.write_all(tensors)
        };
        for (name, _) in &shard.tensors {
            go_on()?;
            if let Some(matrix) = self.matrices.get(name) {
                let quantized = matrix.quantize(device, self.checkpoint, peaks)?;
                put(&mut writer, &quantized.tensors(name)?)?;
            } else {
                put(&mut writer, &[(name.clone(), self.checkpoint.tensor(name)?)])?;
            }
            self.checkpoint.release(name);
        }
        writer.finish()?;
        Ok(sizes)
    }

    /// Compares a written weight with its original.
    fn compare(&self, matrix: &Matrix, written: &Checkpoint) -> Result<ErrorSums, QuantizeError> {
        let values = matrix.values(self.checkpoint)?;
        let Some(sums) = errors::compare(&values, matrix.dtype, &written.weight(&matrix.name)?)
        else {
            let reason = checkpoint::Reason::Unexpected("weights of 4 or 8 bits");
            return Err(checkpoint::Error::Tensor { tensor: matrix.name.clone(), reason }.into());
        };
        self.checkpoint.release(&matrix.name);
        matrix.plan()?.iter().for_each(|plan| written.release(&plan.name));
        Ok(sums)
    }
}
