//! A Hugging Face folder, the matrices of its layers in 4 or 8 bits.
//!
//! ```text
//!   for each tensor, one at a time:
//!     a matrix of a layer     [out, in] to the device; codes and absmax back; into the file
//!     any other               into the file as it is
//!   config.json               with what transformers writes of such weights
//!   other files               as they are
//! ```
//!
//! All of it goes to a folder beside the one that was asked for, which gets its name when it is whole.
//! Matrices that are stored `[in, out]`, as GPT-2's, are turned first, and fused ones stay fused: transformers
//! does so too.

mod errors;
mod folder;
mod matrix;
mod peaks;
mod shards;

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

use errors::Sums;
use folder::Target;
use matrix::Matrix;
pub use peaks::Peaks;
use shards::Shard;

use crate::device::Device;

/// How [`quantize_model`] writes weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantizeOptions {
    /// What the matrices of the layers become.
    pub format: WeightFormat,
    /// Values that share an absmax in 4 bits: a power of two from 32 to 4096. In 8 bits those of a row do.
    pub block_size: u32,
    /// Whether absmax of 4 bits are bytes themselves, which bitsandbytes calls double quantization.
    pub nested: bool,
    /// Bytes of tensors that a file holds at most, unless one tensor has more.
    pub shard_bytes: u64,
    /// Whether what was written is decoded again and compared with what it was made of.
    pub measure: bool,
}

impl QuantizeOptions {
    /// The format with the block and the scales that these options say, where it has such options.
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
    /// NF4 in blocks of 64, nested, in files of 5 GB.
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

/// What [`quantize_model`] wrote.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct QuantizedModel {
    /// What the matrices became.
    pub quant: WeightFormat,
    /// Of 4 bits.
    pub block_size: Option<u32>,
    /// Of 4 bits, whether absmax are bytes themselves.
    pub nested: Option<bool>,
    /// In the order of their names.
    pub weights: Vec<QuantizedWeight>,
    /// Of all of `weights`.
    pub total: Figures,
    /// Tensors that were left as they are.
    pub kept: usize,
    /// Bytes of all tensors, before.
    pub bytes_before: u64,
    /// Bytes of all tensors, after.
    pub bytes: u64,
    /// The most that was taken meanwhile.
    pub peaks: Peaks,
}

/// A weight in 4 or 8 bits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct QuantizedWeight {
    /// As the file has it.
    pub name: String,
    /// `[out, in]`
    pub shape: [usize; 2],
    /// Its own.
    #[serde(flatten)]
    pub figures: Figures,
}

/// How small, and how close.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Figures {
    /// Numbers that were quantised.
    pub values: u64,
    /// In the file: codes, absmax, and what says how to read them.
    pub bytes: u64,
    /// `bytes` over `values`, in bits.
    pub bits_per_weight: f64,
    /// Where [`QuantizeOptions::measure`] asked for them.
    #[serde(flatten)]
    pub errors: Option<WeightErrors>,
}

/// What the weights of a file, decoded, differ by from those they were made of.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct WeightErrors {
    /// ‖w - decoded‖ / ‖w‖, 0 where all of w is 0.
    pub relative_error: f64,
    /// max |w - decoded|
    pub largest_error: f64,
}

/// Why a model was not quantised. Nothing was written then.
#[derive(Debug, thiserror::Error)]
pub enum QuantizeError {
    /// The folder has no model that can be read.
    #[error("{0}{hint}", hint = .0.hint())]
    Model(models::Error),
    /// Its tokenizer cannot be read or is another model's.
    #[error(transparent)]
    Text(#[from] text::Error),
    /// Weights that are in 4 or 8 bits in the files.
    #[error("{what} is quantised already\nhint: quantise the weights that it was made of")]
    Quantized {
        /// The tensor, or the field of config.json that says so.
        what: String,
    },
    /// The folder to write to is taken, or cannot be made there; which one and why.
    #[error("{}\nhint: name a folder that is not there yet, or an empty one", .0)]
    Output(String),
    /// A block size that there is not.
    #[error(transparent)]
    Block(InvalidWeight),
    /// A matrix of a size that codes do not take, such as an empty one.
    #[error("tensor {tensor}: {why}")]
    Weight {
        /// Its name.
        tensor: String,
        /// What is wrong with it.
        why: InvalidWeight,
    },
    /// A weight with infinities or NaN.
    #[error(
        "tensor {tensor} holds infinities or NaN\nhint: codes stand for finite numbers only; the checkpoint is damaged"
    )]
    NotFinite {
        /// Its name.
        tensor: String,
    },
    /// A matrix that the device has no buffer for.
    #[error(
        "tensor {tensor} takes {need} bytes, and the device gives {have} at once\nhint: --backend cpu may have more"
    )]
    Memory {
        /// Its name.
        tensor: String,
        /// Bytes of the buffer.
        need: u64,
        /// Bytes of the largest buffer that the device gives.
        have: u64,
    },
    /// A matrix that the device cannot quantise.
    #[error("tensor {tensor}: {why}\nhint: another --backend may serve it")]
    Unsupported {
        /// Its name.
        tensor: String,
        /// What the device lacks.
        why: Infeasible,
    },
    /// The device failed at a matrix.
    #[error(
        "tensor {tensor}: the device failed: {why}\nhint: `flashover doctor` says what this machine has; \
         another --backend may do it"
    )]
    Failed {
        /// Its name.
        tensor: String,
        /// What the device says.
        why: String,
    },
    /// A format that no file has.
    #[error(transparent)]
    NotStored(NotStored),
    /// A file or folder that cannot be written.
    #[error("cannot write {}: {why}\nhint: {}", .path.display(), checkpoint::writable(.why))]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// As the system says.
        why: io::Error,
    },
    /// The caller's `stop` said so.
    #[error("stopped before the model was whole; nothing was written")]
    Stopped,
}

// By hand: as sources they would be printed twice.
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

/// Writes the model of the folder `model` to the folder `output`, the matrices of its layers in 4 or 8 bits, so
/// that transformers with bitsandbytes loads it, and so does this library. Embeddings, norms, biases and the
/// output projection stay as they are.
///
/// Tensor by tensor: beside what was there before, the host holds the values of one and the device one with
/// its codes. [`QuantizedModel::peaks`] says how much that was.
///
/// # Errors
/// [`QuantizeError`]; nothing is left in `output` then.
pub fn quantize_model(
    device: &Device,
    model: &Path,
    output: &Path,
    options: &QuantizeOptions,
) -> Result<QuantizedModel, QuantizeError> {
    quantize_model_until(device, model, output, options, &|| false)
}

/// The same, which ends before the next tensor or file once `stop` says so.
///
/// # Errors
/// As [`quantize_model`]; [`QuantizeError::Stopped`].
pub fn quantize_model_until(
    device: &Device,
    model: &Path,
    output: &Path,
    options: &QuantizeOptions,
    stop: &dyn Fn() -> bool,
) -> Result<QuantizedModel, QuantizeError> {
    let go_on = || if stop() { Err(QuantizeError::Stopped) } else { Ok(()) };
    if !options.format.info().in_files {
        return Err(QuantizeError::NotStored(NotStored::Format(options.format)));
    }
    Weight::new([1, 1], options.scheme()).map_err(QuantizeError::Block)?;
    let target = Target::new(model, output)?;
    let weights = Weights::open(model)?;
    Tokenizer::of_model(model, weights.config().vocab)?;
    let job = Job::of(&weights, options)?;
    let config = folder::config(model, job.compute_dtype(), options)?;
    let others = folder::others(model, weights.checkpoint())?;
    let staging = target.begin()?;
    let mut peaks = Peaks::start();
    let mut sizes = BTreeMap::new();
    for shard in &job.shards {
        sizes.extend(job.write(device, staging.path(), shard, &mut peaks, &go_on)?);
    }
    shards::write_index(staging.path(), &job.shards, &sizes)?;
    let mut weights = Vec::new();
    let mut sums = Sums::default();
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

/// What is to be done, all of it checked.
struct Job<'a> {
    checkpoint: &'a Checkpoint,
    matrices: BTreeMap<String, Matrix>,
    shards: Vec<Shard>,
}

impl<'a> Job<'a> {
    fn of(weights: &'a Weights, options: &QuantizeOptions) -> Result<Self, QuantizeError> {
        let checkpoint = weights.checkpoint();
        let mut matrices = BTreeMap::new();
        for (name, param) in weights.layer_matrices() {
            let matrix = Matrix::of(checkpoint, &name, param.transposed, options)?;
            matrices.insert(name, matrix);
        }
        let mut job = Self { checkpoint, matrices, shards: Vec::new() };
        let plans = checkpoint.names().map(|name| Ok((name.to_owned(), job.plan(name)?)));
        let plans = plans.collect::<Result<Vec<_>, QuantizeError>>()?;
        job.shards = shards::split(plans, options.shard_bytes);
        Ok(job)
    }

    /// The tensors that one of the model becomes.
    fn plan(&self, name: &str) -> Result<Vec<Plan>, QuantizeError> {
        if let Some(matrix) = self.matrices.get(name) {
            return matrix.plan();
        }
        let tensor = self.checkpoint.tensor(name)?;
        Ok(vec![Plan::new(name, tensor.dtype, &tensor.shape)])
    }

    /// What layers compute in: the type that their matrices had.
    fn compute_dtype(&self) -> &'static str {
        self.matrices.values().next().map_or("float32", Matrix::dtype_name)
    }

    fn bytes_before(&self) -> Result<u64, QuantizeError> {
        let bytes = |name| Ok(self.checkpoint.tensor(name)?.bytes.len() as u64);
        self.checkpoint.names().map(bytes).sum()
    }

    /// Writes a file; returns the bytes of each tensor in it.
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

    /// How far a weight of the file is from what it was made of.
    fn compare(&self, matrix: &Matrix, written: &Checkpoint) -> Result<Sums, QuantizeError> {
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
