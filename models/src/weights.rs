//! The tensors of a checkpoint, matched to the parameters of a decoder.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::Path;

use checkpoint::{Checkpoint, DType, Reason, Tensor, Weight};

use crate::names::{Param, Side, Slot};
use crate::{DecoderConfig, Error, config, fields};

/// A checkpoint that holds exactly the parameters of a configuration. Files are memory-mapped; each tensor is
/// read on request.
#[derive(Debug)]
pub struct Weights {
    config: DecoderConfig,
    checkpoint: Checkpoint,
    prefix: &'static str,
    params: BTreeMap<(Slot, Side), Param>,
    claimed_bits: Option<u32>,
}

/// A parameter in a checkpoint: rows of a tensor, or columns of one stored `[in, out]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored<'a> {
    /// Shape of the parameter.
    pub shape: Vec<usize>,
    /// The whole tensor.
    pub weight: Weight<'a>,
    /// True if it is stored `[in, out]`; false for a quantised one.
    pub transposed: bool,
    /// Range of the tensor's rows, or columns, that belong to the parameter.
    pub rows: Range<usize>,
}

impl Weights {
    /// Opens the `config.json` and the weights of a folder.
    ///
    /// # Errors
    /// The errors of [`DecoderConfig::open`] and [`Weights::new`]; [`Error::Checkpoint`] for unreadable
    /// files.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, Error> {
        let folder = folder.as_ref();
        if folder.is_file() {
            let gguf = folder.extension().is_some_and(|extension| extension == "gguf");
            let what = if gguf { "it is a GGUF file" } else { "it is a file" };
            let why = io::Error::new(ErrorKind::NotADirectory, what);
            return Err(Error::Read { path: folder.to_owned(), why });
        }
        checkpoint::recover(folder)?;
        let text = fields::read(&folder.join("config.json"))?;
        let weights = Self::new(DecoderConfig::from_json(&text)?, Checkpoint::open(folder)?)?;
        Ok(Self { claimed_bits: config::claimed_bits(&text), ..weights })
    }

    /// Matches the tensors of a checkpoint to the parameters of `config`. The tensors stored with a matrix
    /// decide if it is quantised. If `config` ties the head but the checkpoint has one with other values, the
    /// head is untied, as in transformers 5; [`Weights::config`] reports that.
    ///
    /// # Errors
    /// [`Error::Tensors`] with everything that is missing, unused, or of the wrong shape or dtype.
    pub fn new(mut config: DecoderConfig, checkpoint: Checkpoint) -> Result<Self, Error> {
        let prefix = prefix(&config, &config.params(), &checkpoint);
        if config.tie_embeddings && has_own_head(&config, prefix, &checkpoint) {
            config.tie_embeddings = false;
        }
        let params = config.params();
        let mut survey = Survey::new(&checkpoint);
        for param in &params {
            survey.take(param, full_name(prefix, param));
        }
        survey.ignore(&config, prefix);
        survey.finish()?;
        let params = params.into_iter().map(|param| ((param.slot, param.side), param)).collect();
        Ok(Self { config, checkpoint, prefix, params, claimed_bits: None })
    }

    /// Returns the same weights with a context length of `positions`.
    ///
    /// # Errors
    /// The errors of [`DecoderConfig::with_context`].
    pub fn with_context(self, positions: usize) -> Result<Self, Error> {
        Ok(Self { config: self.config.with_context(positions)?, ..self })
    }

    /// Returns the configuration. Its head is untied if the checkpoint has one with other values.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Returns the bits per weight that config.json claims for the matrices of layers. The tensors decide the
    /// format.
    pub(crate) const fn claimed_bits(&self) -> Option<u32> {
        self.claimed_bits
    }

    /// Returns the prefix of all names except that of the output projection.
    pub const fn prefix(&self) -> &'static str {
        self.prefix
    }

    /// Returns the tensors, under their names in the files.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Returns the tensors that hold the matrices of the layers, under their names in the files. These are
    /// the tensors that quantisation changes. A tensor with several matrices is listed with the first of
    /// them.
    pub fn layer_matrices(&self) -> BTreeMap<String, &Param> {
        let matrix = |param: &&Param| quantizable(param) && param.slot != Slot::Head;
        let mut matrices = BTreeMap::new();
        for param in self.params.values().filter(matrix) {
            matrices.entry(full_name(self.prefix, param)).or_insert(param);
        }
        matrices
    }

    /// Returns the weight of a slot; for a tied output projection, the embedding.
    ///
    /// # Errors
    /// [`Reason::Missing`], with the name of the slot, if the decoder has no such parameter.
    pub fn weight(&self, slot: Slot) -> Result<Stored<'_>, Error> {
        let tied = slot == Slot::Head && self.config.tie_embeddings;
        let slot = if tied { Slot::Embedding } else { slot };
        self.stored(slot, Side::Weight)?.ok_or_else(|| missing(format!("{slot:?}")).into())
    }

    /// Returns the bias of a slot, if the decoder has one there.
    ///
    /// # Errors
    /// [`Error::Checkpoint`].
    pub fn bias(&self, slot: Slot) -> Result<Option<Stored<'_>>, Error> {
        self.stored(slot, Side::Bias)
    }

    /// Returns the name in the file of the tensor that holds the weight of a slot.
    pub(crate) fn name(&self, slot: Slot) -> String {
        let param = self.params.get(&(slot, Side::Weight));
        param.map_or_else(|| format!("{slot:?}"), |param| full_name(self.prefix, param))
    }

    fn stored(&self, slot: Slot, side: Side) -> Result<Option<Stored<'_>>, Error> {
        let Some(param) = self.params.get(&(slot, side)) else { return Ok(None) };
        let weight = load(&self.checkpoint, param, &full_name(self.prefix, param))?;
        let transposed = param.transposed && matches!(weight, Weight::Dense(_));
        let rows = param.row..param.row + param.shape[0];
        Ok(Some(Stored { shape: param.shape.clone(), weight, transposed, rows }))
    }
}

impl<'a> Stored<'a> {
    /// Returns the parameter in the file's dtype, row-major; none if it is quantised. Copies only if it is
    /// stored `[in, out]`.
    pub fn dense(self) -> Option<Tensor<'a>> {
        let Self { shape, weight, transposed, rows } = self;
        let Weight::Dense(Tensor { dtype, shape: stored, bytes }) = weight else { return None };
        let size = dtype.size();
        let bytes = if transposed {
            let [k, of] = [stored[0], stored[1]];
            let value = |row, column| (column * of + row) * size;
            let values = rows.flat_map(|row| (0..k).map(move |column| value(row, column)));
            values.flat_map(|at| bytes[at..at + size].iter().copied()).collect::<Vec<_>>().into()
        } else {
            let row = stored[1..].iter().product::<usize>() * size;
            let range = rows.start * row..rows.end * row;
            match bytes {
                Cow::Borrowed(bytes) => bytes[range].into(),
                Cow::Owned(bytes) => bytes[range].to_vec().into(),
            }
        };
        Some(Tensor { dtype, shape, bytes })
    }
}

/// Result of matching a checkpoint, parameter by parameter.
struct Survey<'a> {
    checkpoint: &'a Checkpoint,
    /// Tensors that no parameter has claimed yet.
    left: BTreeSet<&'a str>,
    /// Tensors that a parameter has claimed.
    taken: BTreeSet<String>,
    missing: Vec<String>,
    wrong: Vec<checkpoint::Error>,
}

impl<'a> Survey<'a> {
    fn new(checkpoint: &'a Checkpoint) -> Self {
        Self {
            checkpoint,
            left: checkpoint.names().collect(),
            taken: BTreeSet::new(),
            missing: Vec::new(),
            wrong: Vec::new(),
        }
    }

    fn take(&mut self, param: &Param, name: String) {
        if !self.taken.insert(name.clone()) {
            return;
        }
        if !self.left.remove(name.as_str()) {
            self.missing.push(name);
            return;
        }
        match load(self.checkpoint, param, &name) {
            Ok(Weight::Dense(_)) => {}
            Ok(_) => self.take_beside(&name),
            Err(why) => {
                self.take_beside(&name);
                self.wrong.push(why);
            }
        }
    }

    /// Takes the tensors stored with a quantised matrix.
    fn take_beside(&mut self, name: &str) {
        for part in self.checkpoint.beside(name) {
            self.left.remove(part);
        }
    }

    /// Takes tensors that files may hold although no parameter needs them.
    fn ignore(&mut self, config: &DecoderConfig, prefix: &str) {
        if config.tie_embeddings {
            self.left.remove(HEAD);
        }
        for pattern in config.family.ignored() {
            for layer in 0..config.layers.len() {
                let name = format!("{prefix}{}", pattern.replace("{}", &layer.to_string()));
                self.left.remove(name.as_str());
            }
        }
    }

    fn finish(self) -> Result<(), Error> {
        let Self { left, missing, wrong, .. } = self;
        if left.is_empty() && missing.is_empty() && wrong.is_empty() {
            return Ok(());
        }
        let unused = left.into_iter().map(str::to_owned).collect();
        Err(Error::Tensors { missing, unused, wrong })
    }
}

/// Returns the tensor that holds a parameter, if it has the expected shape.
fn load<'a>(
    checkpoint: &'a Checkpoint,
    param: &Param,
    name: &str,
) -> Result<Weight<'a>, checkpoint::Error> {
    let wrong = |reason| checkpoint::Error::Tensor { tensor: name.into(), reason };
    let weight = if quantizable(param) {
        checkpoint.weight(name)?
    } else {
        let tensor = checkpoint.tensor(name)?;
        let need = DType::FLOATS.to_vec();
        if !need.contains(&tensor.dtype) {
            return Err(wrong(Reason::DType { have: tensor.dtype, need }));
        }
        Weight::Dense(tensor)
    };
    let mut need = param.stored.clone();
    if param.transposed && !matches!(weight, Weight::Dense(_)) {
        need.reverse(); // bitsandbytes transposes tensors stored [in, out].
    }
    if weight.shape() != need {
        return Err(wrong(Reason::Shape { have: weight.shape().to_vec(), need }));
    }
    Ok(weight)
}

fn quantizable(param: &Param) -> bool {
    param.side == Side::Weight && param.slot.is_matrix()
}

/// Returns the prefix of the names in this checkpoint: the one that the first parameter has, otherwise the
/// usual one.
fn prefix(config: &DecoderConfig, params: &[Param], checkpoint: &Checkpoint) -> &'static str {
    let prefixes = config.family.prefixes();
    let there = |prefix: &&&str| {
        params.first().is_some_and(|param| checkpoint.contains(&full_name(prefix, param)))
    };
    prefixes.iter().find(there).or(prefixes.first()).copied().unwrap_or_default()
}

/// Output projection, which files of tied models may repeat as a copy.
pub(crate) const HEAD: &str = "lm_head.weight";

/// True if a checkpoint has an output projection that differs from the embedding.
fn has_own_head(config: &DecoderConfig, prefix: &str, checkpoint: &Checkpoint) -> bool {
    let Ok(head) = checkpoint.tensor(HEAD) else { return false };
    let params = config.params();
    let embedding = params.iter().find(|param| param.slot == Slot::Embedding);
    let embedding = embedding.and_then(|param| checkpoint.tensor(&full_name(prefix, param)).ok());
    let own = embedding.is_some_and(|embedding| embedding != head);
    checkpoint.release(HEAD);
    own
}

/// Returns the name with the family's prefix; the output projection has none.
pub(crate) fn full_name(prefix: &str, param: &Param) -> String {
    if param.slot == Slot::Head { param.name.clone() } else { format!("{prefix}{}", param.name) }
}

fn missing(tensor: String) -> checkpoint::Error {
    checkpoint::Error::Tensor { tensor, reason: Reason::Missing }
}
