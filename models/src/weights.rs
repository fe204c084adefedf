//! The tensors of a checkpoint as the parameters of a decoder, and nothing else.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::Path;

use checkpoint::{Checkpoint, DType, Reason, Tensor, Weight};

use crate::names::{Param, Side, Slot};
use crate::{DecoderConfig, Error, config, fields};

/// A checkpoint that holds exactly the parameters of a configuration. Files stay mapped: what is asked for
/// is read, one tensor at a time.
#[derive(Debug)]
pub struct Weights {
    config: DecoderConfig,
    checkpoint: Checkpoint,
    prefix: &'static str,
    params: BTreeMap<(Slot, Side), Param>,
    claimed_bits: Option<u32>,
}

/// A parameter as a checkpoint holds it: `rows` of a tensor, or columns of one stored `[in, out]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored<'a> {
    /// Of the parameter.
    pub shape: Vec<usize>,
    /// The whole tensor.
    pub weight: Weight<'a>,
    /// It is stored `[in, out]`; a quantised one never is.
    pub transposed: bool,
    /// Which of the tensor's rows, or columns, are the parameter's.
    pub rows: Range<usize>,
}

impl Weights {
    /// Opens the `config.json` and the weights of a folder.
    ///
    /// # Errors
    /// As [`DecoderConfig::open`] and [`Weights::new`]; [`Error::Checkpoint`] for files that cannot be read.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, Error> {
        let folder = folder.as_ref();
        if folder.is_file() {
            let gguf = folder.extension().is_some_and(|extension| extension == "gguf");
            let what = if gguf { "it is a file of GGUF" } else { "it is a file" };
            let why = io::Error::new(ErrorKind::NotADirectory, what);
            return Err(Error::Read { path: folder.to_owned(), why });
        }
        let text = fields::read(&folder.join("config.json"))?;
        let weights = Self::new(DecoderConfig::from_json(&text)?, Checkpoint::open(folder)?)?;
        Ok(Self { claimed_bits: config::claimed_bits(&text), ..weights })
    }

    /// Takes a checkpoint's tensors for the parameters of `config`. Whether a matrix is quantised is told by
    /// the tensors beside it. A head that is to be the embedding, and that the checkpoint has with other values, is its
    /// own, as in transformers 5; [`Weights::config`] then says so.
    ///
    /// # Errors
    /// [`Error::Tensors`] with everything that is missing, unused, or of the wrong shape or dtype.
    pub fn new(mut config: DecoderConfig, checkpoint: Checkpoint) -> Result<Self, Error> {
        let prefix = prefix(&config, &config.params(), &checkpoint);
        if config.tie_embeddings && has_own_head(&config, prefix, &checkpoint) {
            config.tie_embeddings = false;
        }
        let params = config.params();
        let mut survey = Survey::of(&checkpoint);
        for param in &params {
            survey.take(param, full_name(prefix, param));
        }
        survey.ignore(&config, prefix);
        survey.finish()?;
        let params = params.into_iter().map(|param| ((param.slot, param.side), param)).collect();
        Ok(Self { config, checkpoint, prefix, params, claimed_bits: None })
    }

    /// The same weights for sequences of up to `positions`.
    ///
    /// # Errors
    /// As [`DecoderConfig::with_context`].
    pub fn with_context(self, positions: usize) -> Result<Self, Error> {
        Ok(Self { config: self.config.with_context(positions)?, ..self })
    }

    /// What the parameters are of. The head is not tied where the checkpoint has it with other values.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Bits that config.json says matrices of layers have, where they are quantised. Tensors decide.
    pub(crate) const fn claimed_bits(&self) -> Option<u32> {
        self.claimed_bits
    }

    /// The tensors themselves, by the names that the files have.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The tensors that the matrices of the layers are, or are parts of, by the names that the files have:
    /// what is quantised where a model is. Of several matrices in one tensor the first stands for it.
    pub fn layer_matrices(&self) -> BTreeMap<String, &Param> {
        let matrix = |param: &&Param| quantizable(param) && param.slot != Slot::Head;
        let mut matrices = BTreeMap::new();
        for param in self.params.values().filter(matrix) {
            matrices.entry(full_name(self.prefix, param)).or_insert(param);
        }
        matrices
    }

    /// The weight of a slot; of a tied output projection, the embedding.
    ///
    /// # Errors
    /// [`Reason::Missing`], by the name of the slot, where the decoder has no such parameter.
    pub fn weight(&self, slot: Slot) -> Result<Stored<'_>, Error> {
        let tied = slot == Slot::Head && self.config.tie_embeddings;
        let slot = if tied { Slot::Embedding } else { slot };
        self.stored(slot, Side::Weight)?.ok_or_else(|| missing(format!("{slot:?}")).into())
    }

    /// The bias of a slot, if the decoder has one there.
    ///
    /// # Errors
    /// [`Error::Checkpoint`].
    pub fn bias(&self, slot: Slot) -> Result<Option<Stored<'_>>, Error> {
        self.stored(slot, Side::Bias)
    }

    /// The tensor that the weight of a slot is, or is part of, by the name that the file has.
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
    /// The parameter in the file's dtype, row-major; copied only where it is stored `[in, out]`. None where
    /// it is quantised.
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

/// What is found out about a checkpoint, parameter by parameter.
struct Survey<'a> {
    checkpoint: &'a Checkpoint,
    /// Tensors that no parameter explains yet.
    left: BTreeSet<&'a str>,
    /// Whole tensors that a parameter was part of.
    taken: BTreeSet<String>,
    missing: Vec<String>,
    wrong: Vec<checkpoint::Error>,
}

impl<'a> Survey<'a> {
    fn of(checkpoint: &'a Checkpoint) -> Self {
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

    /// Takes the tensors next to a quantised matrix.
    fn take_beside(&mut self, name: &str) {
        for part in self.checkpoint.beside(name) {
            self.left.remove(part);
        }
    }

    /// What files may hold though nothing reads it.
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

/// The tensor that a parameter is, or is part of, when it has the shape that it must have.
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
        need.reverse(); // bitsandbytes turns what is stored [in, out].
    }
    if weight.shape() != need {
        return Err(wrong(Reason::Shape { have: weight.shape().to_vec(), need }));
    }
    Ok(weight)
}

fn quantizable(param: &Param) -> bool {
    param.side == Side::Weight && param.slot.is_matrix()
}

/// What stands before the names of this checkpoint: where the first parameter is, or else the usual.
fn prefix(config: &DecoderConfig, params: &[Param], checkpoint: &Checkpoint) -> &'static str {
    let prefixes = config.family.prefixes();
    let there = |prefix: &&&str| {
        params.first().is_some_and(|param| checkpoint.contains(&full_name(prefix, param)))
    };
    prefixes.iter().find(there).or(prefixes.first()).copied().unwrap_or_default()
}

/// The output projection, which files of tied models hold as well, as a copy.
pub(crate) const HEAD: &str = "lm_head.weight";

/// Whether a checkpoint has an output projection that is no copy of the embedding.
fn has_own_head(config: &DecoderConfig, prefix: &str, checkpoint: &Checkpoint) -> bool {
    let Ok(head) = checkpoint.tensor(HEAD) else { return false };
    let params = config.params();
    let embedding = params.iter().find(|param| param.slot == Slot::Embedding);
    let embedding = embedding.and_then(|param| checkpoint.tensor(&full_name(prefix, param)).ok());
    let own = embedding.is_some_and(|embedding| embedding != head);
    checkpoint.release(HEAD);
    own
}

/// The output projection lies outside of what families prefix.
fn full_name(prefix: &str, param: &Param) -> String {
    if param.slot == Slot::Head { param.name.clone() } else { format!("{prefix}{}", param.name) }
}

fn missing(tensor: String) -> checkpoint::Error {
    checkpoint::Error::Tensor { tensor, reason: Reason::Missing }
}
