//! LoRA adapters of the matrices of a decoder's layers, and their files in PEFT's format.
//!
//! ```text
//! y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ       A [rank, k], B [n, rank], s = alpha / rank, or alpha / √rank if rank-stabilised
//! ```
//!
//! W is frozen. A starts as noise and B as zeros, so that training starts from the model itself. A module is
//! one tensor of a file; it covers several matrices if the file stores them fused.
//!
//! Sources: Hu et al., LoRA, 2021 (arXiv:2106.09685); Kalajdzievski, rsLoRA, 2023 (arXiv:2312.03732); PEFT's
//! checkpoint format.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, DType, Plan, Reason, Staged, Tensor, Writer};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::fields::{Fields, json, read};
use crate::names::{Part, Side, Slot};
use crate::targets::Targets;
use crate::weights::{HEAD, Stored, Weights};
use crate::{DecoderConfig, Error, Ffn};

/// Hyperparameters of an adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraOptions {
    /// Rank: rows of A and columns of B, for every module.
    pub rank: usize,
    /// Numerator of the scale s: alpha / rank, or alpha / √rank if rank-stabilised.
    pub alpha: f64,
    /// True to divide alpha by √rank instead of rank (rsLoRA).
    pub rank_stabilised: bool,
    /// Last names of the adapted modules, such as `q_proj`; empty for all.
    pub targets: Vec<String>,
}

impl Default for LoraOptions {
    /// Returns rank 16, alpha 32 and all modules. QLoRA (arXiv:2305.14314) found that to suffice.
    fn default() -> Self {
        Self { rank: 16, alpha: 32.0, rank_stabilised: false, targets: Vec::new() }
    }
}

impl LoraOptions {
    /// Returns the scale s of B·A.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rank_stabilised { rank.sqrt() } else { rank }
    }
}

/// Matrices with the same input, with their rows concatenated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Block {
    /// Query, key and value projections.
    Qkv,
    /// The output projection of attention.
    Out,
    /// Gate, if any, and up projection.
    Inner,
    /// Down projection of the feed-forward block.
    Down,
}

/// Factors A and B of one module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Factor {
    /// Layer, counted from 0.
    pub layer: usize,
    /// Block that contains the module's rows.
    pub block: Block,
    /// First row of the block that B contributes to.
    pub row: usize,
    /// Name in files, without the family's prefix.
    pub module: String,
    /// Number of output features: rows of B.
    pub n: usize,
    /// Number of input features: columns of A.
    pub k: usize,
    /// Offset of A in [`Adapter::values()`]; B follows it.
    pub at: usize,
}

impl Factor {
    /// Returns the number of values of A and of B.
    pub const fn sizes(&self, rank: usize) -> [usize; 2] {
        [rank * self.k, self.n * rank]
    }

    fn name(&self) -> &str {
        last_name(&self.module)
    }
}

/// Update of one matrix: `scale · B · A`.
pub(crate) struct Delta<'a> {
    /// `[rank, k]`
    pub(crate) a: &'a [f32],
    /// `[n, rank]`
    pub(crate) b: &'a [f32],
    pub(crate) scale: f64,
    pub(crate) rank: usize,
}

/// An adapter of one model, on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    options: LoraOptions,
    factors: Vec<Factor>,
    /// A and B of each factor, in f32.
    values: Vec<f32>,
    /// Dropout that its file asks for in training.
    dropout: f64,
}

/// PEFT has no limit, and a rank above those of the matrices can be useful if they are small.
const MAX_RANK: usize = 1 << 16;
const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// Prefix that PEFT adds to the names of a model.
const PREFIX: &str = "base_model.model.";

/// Returns the names of the modules, sorted.
fn target_names(factors: &[Factor]) -> Vec<String> {
    let names: BTreeSet<_> = factors.iter().map(|own| own.name().to_owned()).collect();
    names.into_iter().collect()
}

impl Adapter {
    /// Creates an adapter that does not change the model yet. As in PEFT, A is uniform in ±1/√k, from `seed`,
    /// and B is 0.
    ///
    /// # Errors
    /// [`Error::Target`] for a name that no module of the model has. [`Error::Rank`] for a rank of 0 or above
    /// 65536, or an alpha that is not a finite number above 0.
    pub fn new(config: &DecoderConfig, options: LoraOptions, seed: u64) -> Result<Self, Error> {
        let factors = config.factors(&options)?;
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut values = Vec::new();
        for factor in &factors {
            let [a, b] = factor.sizes(options.rank);
            let bound = 1.0 / (factor.k as f64).sqrt();
            // Uniform in [-1, 1), in steps of 2^-31.
            let mut draw = || f64::from(random.next_u32().cast_signed()) * 2f64.powi(-31) * bound;
            values.extend((0..a).map(|_| draw() as f32));
            values.resize(values.len() + b, 0.0);
        }
        let options = LoraOptions { targets: target_names(&factors), ..options };
        Ok(Self { options, factors, values, dropout: 0.0 })
    }

    /// Returns the `lora_dropout` of the adapter's file, which training here ignores; 0 for a new adapter.
    pub const fn dropout(&self) -> f64 {
        self.dropout
    }

    /// Returns rank, alpha and modules.
    pub const fn options(&self) -> &LoraOptions {
        &self.options
    }

    /// Returns the factors, one per module, layer by layer in the order of the forward pass.
    pub fn factors(&self) -> &[Factor] {
        &self.factors
    }

    /// Returns A and B of each factor, concatenated, in f32.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Returns the adapter with other values.
    ///
    /// # Panics
    /// Panics if the number of values differs.
    #[must_use]
    pub fn with_values(self, values: Vec<f32>) -> Self {
        assert_eq!(values.len(), self.values.len(), "an adapter keeps its shape");
        Self { values, ..self }
    }

    /// Returns the update of the matrix of a slot, if any.
    pub(crate) fn delta(&self, config: &DecoderConfig, slot: Slot) -> Option<Delta<'_>> {
        let Slot::Layer(layer, part) = slot else { return None };
        let parts = config.parts();
        let (_, shape) = parts.iter().find(|(own, _)| *own == part)?;
        let (block, row) = config.block(part)?;
        let covers = |own: &&Factor| {
            let rows = own.row..own.row + own.n;
            own.layer == layer && own.block == block && rows.contains(&row)
        };
        let own = self.factors.iter().find(covers)?;
        let rank = self.options.rank;
        let b = own.at + own.sizes(rank)[0] + (row - own.row) * rank;
        Some(Delta {
            a: &self.values[own.at..own.at + rank * own.k],
            b: &self.values[b..b + shape[0] * rank],
            scale: self.options.scale(),
            rank,
        })
    }

    /// Returns the columns of the unmerged LoRA of a slot's block: the ranks of all its modules together.
    pub(crate) fn columns(&self, config: &DecoderConfig, slot: Slot) -> usize {
        let Slot::Layer(layer, part) = slot else { return 0 };
        let Some((block, _)) = config.block(part) else { return 0 };
        let together = |own: &&Factor| own.layer == layer && own.block == block;
        self.options.rank * self.factors.iter().filter(together).count()
    }

    /// Reads a PEFT folder: `adapter_config.json` and `adapter_model.safetensors`. The modules
    /// that `target_modules` selects must have their tensors, and no others. Unchanged copies of the model's embedding and head are
    /// ignored.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Json`], [`Error::Checkpoint`], also for an interrupted save that cannot be completed.
    /// [`Error::Field`] for a configuration that needs more than A and B, such as DoRA or different ranks per module.
    /// [`Error::AdapterTensors`] with everything that does not fit.
    pub fn open(folder: impl AsRef<Path>, weights: &Weights) -> Result<Self, Error> {
        let (folder, config) = (folder.as_ref(), weights.config());
        checkpoint::recover(folder)?;
        let text = read(&folder.join(CONFIG))?;
        let value = json(CONFIG, &text)?;
        let fields = Fields::new(CONFIG, &value)?;
        let (options, targets) = (options(&fields)?, Targets::read(&fields)?);
        let dropout = fields.value("lora_dropout").and_then(Value::as_f64).unwrap_or(0.0);
        let files = Checkpoint::open(folder.join(WEIGHTS))?;
        let all = config.factors(&LoraOptions { targets: Vec::new(), ..options.clone() })?;
        let mut left: BTreeSet<&str> = files.names().collect();
        let (mut missing, mut wrong) = (Vec::new(), Vec::new());
        let (mut factors, mut values) = (Vec::new(), Vec::new());
        for factor in all {
            let full = format!("{}{}", usual_prefix(config), factor.module);
            let selected = targets.selects(&full, Some(factor.layer));
            let names = match there(config, &factor.module, &files) {
                Some(names) if selected => names,
                // Its tensors, if any, count as unused.
                _ if !selected => continue,
                _ => {
                    missing.extend(names("", &full));
                    continue;
                }
            };
            let shapes = [[options.rank, factor.k], [factor.n, options.rank]];
            let at = values.len();
            for (name, shape) in names.iter().zip(shapes) {
                if !left.remove(name.as_str()) {
                    missing.push(name.clone());
                    continue;
                }
                match tensor_of(&files, name, shape) {
                    Ok(own) => values.extend(own),
                    Err(why) => wrong.push(why),
                }
            }
            factors.push(Factor { at, ..factor });
        }
        let mut others = config.params().into_iter().filter(|param| param.slot == Slot::Embedding);
        let embedding = others.next().map(|own| format!("{}{}", usual_prefix(config), own.name));
        for name in embedding.iter().map(String::as_str).chain([HEAD]) {
            let module = name.trim_end_matches(".weight");
            if targets.selects(module, None) && !left.iter().any(|own| own.contains(module)) {
                missing.extend(names("", module));
            }
        }
        left.retain(|name| !is_copy(weights, &files, name));
        if !(left.is_empty() && missing.is_empty() && wrong.is_empty()) {
            let unused = left.into_iter().map(str::to_owned).collect();
            return Err(Error::AdapterTensors { missing, unused, wrong });
        }
        let options = LoraOptions { targets: target_names(&factors), ..options };
        match factors.is_empty() {
            true => {
                Err(Error::AdapterTensors { missing: vec![PREFIX.into()], unused: vec![], wrong })
            }
            false => Ok(Self { options, factors, values, dropout }),
        }
    }

    /// Returns the paths of the files of an adapter folder.
    pub fn files(folder: impl AsRef<Path>) -> [PathBuf; 2] {
        [CONFIG, WEIGHTS].map(|name| folder.as_ref().join(name))
    }

    /// Starts to write a folder, which may hold an adapter already.
    ///
    /// # Errors
    /// [`Error::Write`]; [`Error::Checkpoint`], also while another process writes the folder.
    pub fn begin(folder: impl AsRef<Path>) -> Result<Staged, Error> {
        if let Some(path) = Self::files(&folder).into_iter().find(|file| file.is_dir()) {
            return Err(Error::Write { path, why: ErrorKind::IsADirectory.into() });
        }
        Ok(Staged::begin(folder)?)
    }

    /// Writes the files of a folder and publishes both at once. `model` is the name of the base model.
    ///
    /// # Errors
    /// [`Error::Write`], [`Error::Checkpoint`].
    pub fn write(
        &self,
        folder: &mut Staged,
        config: &DecoderConfig,
        model: &str,
    ) -> Result<(), Error> {
        self.stage(folder, config, model)?;
        Ok(folder.publish()?)
    }

    /// Writes the files into a staging folder, as [`Adapter::write`] does, and returns that of the weights.
    ///
    /// # Errors
    /// [`Error::Write`], [`Error::Checkpoint`].
    pub fn stage(
        &self,
        folder: &Staged,
        config: &DecoderConfig,
        model: &str,
    ) -> Result<PathBuf, Error> {
        let LoraOptions { rank, .. } = self.options;
        let mut tensors = Vec::new();
        for factor in &self.factors {
            let ([a, b], [name_a, name_b]) =
                (factor.sizes(rank), names(usual_prefix(config), &factor.module));
            let own = |from: usize, len: usize| {
                let bytes = self.values[from..from + len].iter().flat_map(|v| v.to_le_bytes());
                bytes.collect::<Vec<_>>()
            };
            tensors.push((name_a, Tensor::new(DType::F32, &[rank, factor.k], own(factor.at, a))));
            let b = own(factor.at + a, b);
            tensors.push((name_b, Tensor::new(DType::F32, &[factor.n, rank], b)));
        }
        let plans = tensors.iter().map(|(name, own)| Plan::new(name, own.dtype, &own.shape));
        let [path, weights] = Self::files(folder.path());
        let text = format!("{:#}\n", self.config_json(config, model));
        fs::write(&path, text).map_err(|why| Error::Write { path, why })?;
        let mut writer = Writer::create(weights.clone(), plans.collect::<Vec<_>>())?;
        writer.write_all(&tensors)?;
        writer.finish()?;
        Ok(weights)
    }

    /// Returns the last names of the modules, or their full names if other modules share the last names.
    fn targets(&self, config: &DecoderConfig) -> BTreeSet<String> {
        let named: BTreeSet<&str> = self.factors.iter().map(Factor::name).collect();
        let all = LoraOptions { targets: Vec::new(), ..self.options.clone() };
        let same = config.factors(&all).is_ok_and(|all| {
            all.iter().filter(|own| named.contains(own.name())).count() == self.factors.len()
        });
        let prefix = usual_prefix(config);
        let name = |own: &Factor| match same {
            true => own.name().to_owned(),
            false => format!("{prefix}{}", own.module),
        };
        self.factors.iter().map(name).collect()
    }

    fn config_json(&self, config: &DecoderConfig, model: &str) -> Value {
        let LoraOptions { rank, alpha, rank_stabilised, .. } = self.options;
        let transposed = config.params().iter().any(|param| param.transposed);
        json!({
            "base_model_name_or_path": model,
            "bias": "none",
            "fan_in_fan_out": transposed,
            "inference_mode": true,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "modules_to_save": null,
            "peft_type": "LORA",
            "r": rank,
            "rank_pattern": {},
            "alpha_pattern": {},
            "target_modules": self.targets(config),
            "task_type": "CAUSAL_LM",
            "use_dora": false,
            "use_rslora": rank_stabilised,
        })
    }
}

/// Reads the options of `adapter_config.json`; an error if it needs more than A and B.
fn options(fields: &Fields<'_>) -> Result<LoraOptions, Error> {
    match fields.text("peft_type")? {
        Some("LORA") => {}
        Some(_) => return Err(fields.unsupported("peft_type", "LORA")),
        None => return Err(fields.missing("peft_type")),
    }
    for flag in ["use_dora", "use_qalora", "lora_bias"] {
        fields.only(flag, &[Value::Bool(false)])?;
    }
    fields.only("bias", &["none".into()])?;
    // Other initialisations subtract their initial B·A from the model's own weights.
    let plain = [true.into(), false.into(), "gaussian".into(), "orthogonal".into(), "eva".into()];
    fields.only("init_lora_weights", &plain)?;
    for field in ["corda_config", "loftq_config", "arrow_config"] {
        fields.only(field, &[json!({})])?;
    }
    fields.only("alora_invocation_tokens", &[json!([])])?;
    fields.only("modules_to_save", &[json!([])])?;
    for field in ["layer_replication", "trainable_token_indices", "target_parameters"] {
        fields.only(field, &[json!([])])?;
    }
    for pattern in ["rank_pattern", "alpha_pattern"] {
        fields.only(pattern, &[json!({})])?;
    }
    let rank = fields.optional_size("r")?.unwrap_or(8);
    // Defaults of PEFT.
    let alpha = fields.optional_positive("lora_alpha")?.unwrap_or(8.0);
    let rank_stabilised = fields.flag("use_rslora")?.unwrap_or(false);
    Ok(LoraOptions { rank, alpha, rank_stabilised, targets: Vec::new() })
}

/// Returns true if a tensor of an adapter is an unchanged copy of the model's embedding or head. PEFT saves
/// both if the vocabulary might have grown.
fn is_copy(weights: &Weights, files: &Checkpoint, name: &str) -> bool {
    let config = weights.config();
    let params = config.params();
    let embedding = params.iter().find(|param| param.slot == Slot::Embedding);
    let slot = match name.strip_prefix(PREFIX) {
        Some(HEAD) => Slot::Head,
        Some(own) if own.strip_prefix(usual_prefix(config)) == embedding.map(|of| &*of.name) => {
            Slot::Embedding
        }
        _ => return false,
    };
    let model = weights.weight(slot).ok().and_then(Stored::dense);
    let (Some(model), Ok(copy)) = (model, files.tensor(name)) else { return false };
    let same = |(model, copy): (Cow<'_, [f32]>, Cow<'_, [f32]>)| model == copy;
    model.shape == copy.shape && model.widened().ok().zip(copy.widened().ok()).is_some_and(same)
}

fn last_name(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}

fn usual_prefix(config: &DecoderConfig) -> &'static str {
    config.family.prefixes().first().copied().unwrap_or_default()
}

/// Returns the names of A and B.
fn names(prefix: &str, module: &str) -> [String; 2] {
    ["A", "B"].map(|side| format!("{PREFIX}{prefix}{module}.lora_{side}.weight"))
}

/// Returns the names of A and B in a file that has at least one of them.
fn there(config: &DecoderConfig, module: &str, files: &Checkpoint) -> Option<[String; 2]> {
    let prefixes = config.family.prefixes().iter();
    prefixes
        .map(|prefix| names(prefix, module))
        .find(|both| both.iter().any(|name| files.contains(name)))
}

/// Reads a tensor of this shape, with finite values.
fn tensor_of(
    files: &Checkpoint,
    name: &str,
    need: [usize; 2],
) -> Result<Vec<f32>, checkpoint::Error> {
    let wrong = |reason| checkpoint::Error::Tensor { tensor: name.into(), reason };
    let tensor = files.tensor(name)?;
    if tensor.shape != need {
        return Err(wrong(Reason::Shape { have: tensor.shape, need: need.to_vec() }));
    }
    let values = tensor.widened().map_err(wrong)?.into_owned();
    match values.iter().position(|value| !value.is_finite()) {
        Some(index) => Err(wrong(Reason::NotFinite { index })),
        None => Ok(values),
    }
}

impl DecoderConfig {
    /// Returns the factors of an adapter, layer by layer in the order of the forward pass.
    ///
    /// # Errors
    /// [`Error::Target`], [`Error::Rank`].
    pub fn factors(&self, options: &LoraOptions) -> Result<Vec<Factor>, Error> {
        let LoraOptions { rank, alpha, targets, .. } = options;
        if !((*alpha as f32).is_finite() && *alpha > 0.0) {
            return Err(Error::Rank { rank: *rank, alpha: *alpha, max: MAX_RANK });
        }
        let mut all: Vec<Factor> = Vec::new();
        for param in self.params() {
            let Slot::Layer(layer, part) = param.slot else { continue };
            // Fused matrices are one module, listed with the first of them.
            if param.side != Side::Weight || param.row > 0 {
                continue;
            }
            let Some((block, row)) = self.block(part) else { continue };
            let [mut n, mut k] = [param.stored[0], param.stored[1]];
            if param.transposed {
                (n, k) = (k, n);
            }
            let module = param.name.strip_suffix(".weight").unwrap_or(&param.name).to_owned();
            all.push(Factor { layer, block, row, module, n, k, at: 0 });
        }
        if !(1..=MAX_RANK).contains(rank) {
            return Err(Error::Rank { rank: *rank, alpha: *alpha, max: MAX_RANK });
        }
        let known: BTreeSet<&str> = all.iter().map(Factor::name).collect();
        if let Some(target) = targets.iter().find(|target| !known.contains(target.as_str())) {
            let known = known.into_iter().collect::<Vec<_>>().join(", ");
            return Err(Error::Target { target: target.clone(), known });
        }
        all.retain(|own| targets.is_empty() || targets.iter().any(|target| target == own.name()));
        let mut at = 0;
        for factor in &mut all {
            factor.at = at;
            at += factor.sizes(*rank).iter().sum::<usize>();
        }
        Ok(all)
    }

    /// Returns the block of a matrix, and its first row there; a norm has no block.
    pub(crate) fn block(&self, part: Part) -> Option<(Block, usize)> {
        let [q, kv] = self.qkv_rows();
        Some(match part {
            Part::Query => (Block::Qkv, 0),
            Part::Key => (Block::Qkv, q),
            Part::Value => (Block::Qkv, q + kv),
            Part::Out => (Block::Out, 0),
            Part::Gate => (Block::Inner, 0),
            Part::Up => (Block::Inner, if self.ffn == Ffn::Gated { self.ffn_hidden } else { 0 }),
            Part::Down => (Block::Down, 0),
            Part::AttentionNorm
            | Part::QueryNorm
            | Part::KeyNorm
            | Part::AttentionPostNorm
            | Part::FfnNorm
            | Part::FfnPostNorm => return None,
        })
    }

    /// Returns the number of rows of a block.
    pub(crate) fn block_rows(&self, block: Block) -> usize {
        let [q, kv] = self.qkv_rows();
        match block {
            Block::Qkv => q + 2 * kv,
            Block::Inner if self.ffn == Ffn::Gated => 2 * self.ffn_hidden,
            Block::Inner => self.ffn_hidden,
            Block::Out | Block::Down => self.hidden,
        }
    }
}
