//! The modules of a U-Net, for weights of any kind: names and shapes, or tensors on a device.

use std::ops::Range;

use super::config::{Attention, Classes, Level, Resample, UnetConfig};
use crate::Error;

/// A weight: tensors of a checkpoint, joined along their first axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) tensors: Vec<Stored>,
    /// Rows of a single tensor; none for all.
    pub(crate) rows: Option<Range<usize>>,
}

/// A tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stored {
    /// Name, and older forms of it. A checkpoint has one of them.
    pub(crate) names: Vec<String>,
    /// Tensor of the same shape that is added.
    pub(crate) added: Option<String>,
    pub(crate) shape: Vec<usize>,
}

impl Stored {
    fn new(name: String, shape: &[usize]) -> Self {
        Self { names: vec![name], added: None, shape: shape.to_vec() }
    }
}

impl Part {
    fn one(name: String, shape: &[usize]) -> Self {
        Self { tensors: vec![Stored::new(name, shape)], rows: None }
    }

    /// Returns the number of values in the checkpoint, with those that are added to others.
    pub(crate) fn parameters(&self) -> usize {
        let added = self.tensors.iter().filter(|tensor| tensor.added.is_some());
        self.values() + added.map(|tensor| tensor.shape.iter().product::<usize>()).sum::<usize>()
    }

    /// Returns the number of values.
    pub(crate) fn values(&self) -> usize {
        let of = |tensor: &Stored| match &self.rows {
            None => tensor.shape.iter().product::<usize>(),
            Some(rows) => rows.len() * tensor.shape[1..].iter().product::<usize>(),
        };
        self.tensors.iter().map(of).sum()
    }
}

/// Makes weights from their descriptions.
pub(crate) type Make<'a, W> = dyn FnMut(&Part) -> Result<W, Error> + 'a;

/// A convolution.
#[derive(Debug, Clone)]
pub(crate) struct Conv<W> {
    /// Filters, channels, rows, columns.
    pub(crate) shape: [usize; 4],
    pub(crate) weight: W,
    /// None if the bias is added to that of the time embedding.
    pub(crate) bias: Option<W>,
}

/// Linear layers of one input, joined.
#[derive(Debug, Clone)]
pub(crate) struct Linear<W> {
    /// Outputs of all layers, inputs.
    pub(crate) shape: [usize; 2],
    pub(crate) weight: W,
    pub(crate) bias: Option<W>,
}

/// Weight and bias of a norm.
#[derive(Debug, Clone)]
pub(crate) struct Norm<W> {
    pub(crate) weight: W,
    pub(crate) bias: W,
}

/// Two linear layers with an activation between them.
#[derive(Debug, Clone)]
pub(crate) struct Embedding<W> {
    pub(crate) first: Linear<W>,
    pub(crate) second: Linear<W>,
}

/// A residual block.
#[derive(Debug, Clone)]
pub(crate) struct Residual<W> {
    pub(crate) name: String,
    pub(crate) norm1: Norm<W>,
    pub(crate) conv1: Conv<W>,
    /// Rows of the joint projection of the time embedding.
    pub(crate) time: Range<usize>,
    pub(crate) norm2: Norm<W>,
    pub(crate) conv2: Conv<W>,
    pub(crate) shortcut: Option<Conv<W>>,
}

/// Attention among pixels.
#[derive(Debug, Clone)]
pub(crate) struct PixelAttention<W> {
    pub(crate) name: String,
    pub(crate) heads: usize,
    pub(crate) norm: Option<(Norm<W>, usize)>,
    pub(crate) qkv: Linear<W>,
    pub(crate) out: Linear<W>,
}

/// Transformer blocks with a projection before and after them.
#[derive(Debug, Clone)]
pub(crate) struct Transformer<W> {
    pub(crate) name: String,
    pub(crate) heads: usize,
    pub(crate) norm: Norm<W>,
    pub(crate) before: Linear<W>,
    pub(crate) blocks: Vec<TransformerBlock<W>>,
    pub(crate) after: Linear<W>,
}

#[derive(Debug, Clone)]
pub(crate) struct TransformerBlock<W> {
    pub(crate) norm1: Norm<W>,
    pub(crate) qkv: Linear<W>,
    pub(crate) out1: Linear<W>,
    pub(crate) norm2: Norm<W>,
    pub(crate) q: Linear<W>,
    /// First row of the keys in the joint projection of the text; the values follow.
    pub(crate) text: usize,
    pub(crate) out2: Linear<W>,
    pub(crate) norm3: Norm<W>,
    /// Values, and the gate that multiplies them.
    pub(crate) up: Linear<W>,
    pub(crate) gate: Linear<W>,
    pub(crate) down: Linear<W>,
}

#[derive(Debug, Clone)]
pub(crate) enum Attends<W> {
    Pixels(PixelAttention<W>),
    Text(Transformer<W>),
}

#[derive(Debug, Clone)]
pub(crate) enum Resampler<W> {
    Conv { name: String, conv: Conv<W>, padding: [i32; 2] },
    Residual(Box<Residual<W>>),
}

/// Blocks of equal resolution.
#[derive(Debug, Clone)]
pub(crate) struct Stage<W> {
    pub(crate) layers: Vec<(Residual<W>, Option<Attends<W>>)>,
    pub(crate) resample: Option<Resampler<W>>,
}

/// All weights of a U-Net.
#[derive(Debug, Clone)]
pub(crate) struct Modules<W> {
    pub(crate) conv_in: Conv<W>,
    pub(crate) time: Embedding<W>,
    pub(crate) classes: Option<ClassEmbedding<W>>,
    pub(crate) text_time: Option<Embedding<W>>,
    pub(crate) down: Vec<Stage<W>>,
    pub(crate) middle: Option<Stage<W>>,
    pub(crate) up: Vec<Stage<W>>,
    pub(crate) norm_out: Norm<W>,
    pub(crate) conv_out: Conv<W>,
    /// Projections of the time embedding for all residual blocks.
    pub(crate) times: Linear<W>,
    /// Keys and values of the text for all transformer blocks.
    pub(crate) texts: Option<Linear<W>>,
}

#[derive(Debug, Clone)]
pub(crate) enum ClassEmbedding<W> {
    /// `[classes, hidden]`
    Table(W),
    Timestep(Embedding<W>),
}

impl<W> Modules<W> {
    /// Makes all weights of a U-Net, in the order of the forward pass. Joint projections come last.
    pub(crate) fn build(config: &UnetConfig, make: &mut Make<'_, W>) -> Result<Self, Error> {
        let (times, texts) = (Joint::default(), Joint::default());
        let mut b = Builder { config, make, times, texts };
        let (base, hidden) = (config.down[0].channels, config.time.hidden);
        let [first, last] = config.taps;
        let conv_in = b.conv("conv_in", [base, config.in_channels, first, first])?;
        let time = b.embedding("time_embedding", [config.time.channels, hidden])?;
        let classes = match config.classes {
            None => None,
            Some(Classes::Table(count)) => {
                let part = Part::one("class_embedding.weight".to_owned(), &[count, hidden]);
                Some(ClassEmbedding::Table((b.make)(&part)?))
            }
            Some(Classes::Timestep) => {
                let own = b.embedding("class_embedding", [config.time.channels, hidden])?;
                Some(ClassEmbedding::Timestep(own))
            }
        };
        let text_time = match config.text_time {
            None => None,
            Some(own) => Some(b.embedding("add_embedding", [own.width, hidden])?),
        };
        let (mut down, mut skips, mut channels) = (Vec::new(), vec![base], base);
        for (i, level) in config.down.iter().enumerate() {
            let inputs: Vec<usize> =
                (0..level.layers).map(|j| if j == 0 { channels } else { level.channels }).collect();
            channels = level.channels;
            skips.extend(vec![channels; level.layers + usize::from(level.resample.is_some())]);
            down.push(b.stage(&format!("down_blocks.{i}"), "downsamplers", level, &inputs)?);
        }
        let middle = match &config.middle {
            None => None,
            Some(middle) => {
                let groups = Some(middle.attention_groups);
                let first = b.residual("mid_block.resnets.0", [channels, channels])?;
                let attends = match &middle.attention {
                    None => None,
                    Some(own) => {
                        Some(b.attends("mid_block.attentions.0", own, channels, groups)?)
                    }
                };
                let second = b.residual("mid_block.resnets.1", [channels, channels])?;
                let layers = vec![(first, attends), (second, None)];
                Some(Stage { layers, resample: None })
            }
        };
        let mut up = Vec::new();
        for (i, level) in config.up.iter().enumerate() {
            let mut inputs = Vec::new();
            for _ in 0..level.layers {
                let skip = skips.pop().expect("as many blocks on the way up as down");
                inputs.push(channels + skip);
                channels = level.channels;
            }
            up.push(b.stage(&format!("up_blocks.{i}"), "upsamplers", level, &inputs)?);
        }
        let norm_out = b.norm("conv_norm_out", base)?;
        let conv_out = b.conv("conv_out", [config.out_channels, base, last, last])?;
        let times = std::mem::take(&mut b.times).linear(hidden, true, b.make)?;
        let texts = match config.cross {
            None => None,
            Some(width) => Some(std::mem::take(&mut b.texts).linear(width, false, b.make)?),
        };
        Ok(Self {
            conv_in,
            time,
            classes,
            text_time,
            down,
            middle,
            up,
            norm_out,
            conv_out,
            times,
            texts,
        })
    }
}

/// Linear layers of one input that are joined as they come.
#[derive(Default)]
struct Joint {
    weights: Vec<Stored>,
    biases: Vec<Stored>,
    rows: usize,
}

impl Joint {
    /// Adds a layer and returns its first row. `added` is another bias of its outputs.
    fn push(&mut self, module: &str, [n, k]: [usize; 2], added: Option<String>) -> usize {
        self.weights.push(Stored::new(format!("{module}.weight"), &[n, k]));
        self.biases.push(Stored { added, ..Stored::new(format!("{module}.bias"), &[n]) });
        self.rows += n;
        self.rows - n
    }

    fn linear<W>(self, k: usize, bias: bool, make: &mut Make<'_, W>) -> Result<Linear<W>, Error> {
        let weight = make(&Part { tensors: self.weights, rows: None })?;
        let bias = bias.then(|| make(&Part { tensors: self.biases, rows: None })).transpose()?;
        Ok(Linear { shape: [self.rows, k], weight, bias })
    }
}

struct Builder<'a, 'm, W> {
    config: &'a UnetConfig,
    make: &'a mut Make<'m, W>,
    times: Joint,
    texts: Joint,
}

impl<W> Builder<'_, '_, W> {
    fn one(&mut self, name: String, shape: &[usize]) -> Result<W, Error> {
        (self.make)(&Part::one(name, shape))
    }

    fn conv(&mut self, name: &str, shape: [usize; 4]) -> Result<Conv<W>, Error> {
        let weight = self.one(format!("{name}.weight"), &shape)?;
        let bias = Some(self.one(format!("{name}.bias"), &shape[..1])?);
        Ok(Conv { shape, weight, bias })
    }

    fn norm(&mut self, name: &str, width: usize) -> Result<Norm<W>, Error> {
        let weight = self.one(format!("{name}.weight"), &[width])?;
        Ok(Norm { weight, bias: self.one(format!("{name}.bias"), &[width])? })
    }

    fn linear(&mut self, name: &str, shape: [usize; 2], bias: bool) -> Result<Linear<W>, Error> {
        self.joined(&[&[name]], shape, bias)
    }

    /// Makes layers of one input, each with `shape[0]` outputs. Each has the name of today, then older ones.
    fn joined(
        &mut self,
        names: &[&[&str]],
        [n, k]: [usize; 2],
        bias: bool,
    ) -> Result<Linear<W>, Error> {
        let mut make = |side: &str, shape: &[usize]| {
            let stored = |forms: &&[&str]| {
                let names = forms.iter().map(|name| format!("{name}.{side}")).collect();
                Stored { names, added: None, shape: shape.to_vec() }
            };
            (self.make)(&Part { tensors: names.iter().map(stored).collect(), rows: None })
        };
        let weight = make("weight", &[n, k])?;
        let bias = bias.then(|| make("bias", &[n])).transpose()?;
        Ok(Linear { shape: [names.len() * n, k], weight, bias })
    }

    /// Makes half of a layer: its first `shape[0]` outputs, or those that follow.
    fn half(&mut self, name: &str, [n, k]: [usize; 2], second: bool) -> Result<Linear<W>, Error> {
        let rows = if second { n..2 * n } else { 0..n };
        let mut part = |side: &str, shape: &[usize]| {
            let part = Part::one(format!("{name}.{side}"), shape);
            (self.make)(&Part { rows: Some(rows.clone()), ..part })
        };
        let weight = part("weight", &[2 * n, k])?;
        Ok(Linear { shape: [n, k], weight, bias: Some(part("bias", &[2 * n])?) })
    }

    fn embedding(&mut self, name: &str, [from, to]: [usize; 2]) -> Result<Embedding<W>, Error> {
        let first = self.linear(&format!("{name}.linear_1"), [to, from], true)?;
        let second = self.linear(&format!("{name}.linear_2"), [to, to], true)?;
        Ok(Embedding { first, second })
    }

    fn residual(&mut self, name: &str, [from, to]: [usize; 2]) -> Result<Residual<W>, Error> {
        let norm1 = self.norm(&format!("{name}.norm1"), from)?;
        let (time, hidden) = (format!("{name}.time_emb_proj"), self.config.time.hidden);
        let shape = [to, from, 3, 3];
        let (conv1, rows, added) = if self.config.scale_shift {
            (self.conv(&format!("{name}.conv1"), shape)?, 2 * to, None)
        } else {
            let weight = self.one(format!("{name}.conv1.weight"), &shape)?;
            (Conv { shape, weight, bias: None }, to, Some(format!("{name}.conv1.bias")))
        };
        let first = self.times.push(&time, [rows, hidden], added);
        let norm2 = self.norm(&format!("{name}.norm2"), to)?;
        let conv2 = self.conv(&format!("{name}.conv2"), [to, to, 3, 3])?;
        let shortcut = match from == to {
            true => None,
            false => Some(self.conv(&format!("{name}.conv_shortcut"), [to, from, 1, 1])?),
        };
        let time = first..first + rows;
        Ok(Residual { name: name.to_owned(), norm1, conv1, time, norm2, conv2, shortcut })
    }

    /// Makes attention. `groups` are those of the norm before attention among pixels, if they differ from the config's.
    fn attends(
        &mut self,
        name: &str,
        attention: &Attention,
        channels: usize,
        groups: Option<Option<usize>>,
    ) -> Result<Attends<W>, Error> {
        match *attention {
            Attention::Pixels { heads } => {
                let at = |module: &str| format!("{name}.{module}");
                let norm = match groups.unwrap_or(Some(self.config.groups)) {
                    None => None,
                    Some(groups) => Some((self.norm(&at("group_norm"), channels)?, groups)),
                };
                let forms = [["to_q", "query"], ["to_k", "key"], ["to_v", "value"]];
                let forms = forms.map(|forms| forms.map(at));
                let forms = forms.each_ref().map(|[new, old]| [new.as_str(), old.as_str()]);
                let names = forms.each_ref().map(|forms| &forms[..]);
                let qkv = self.joined(&names, [channels, channels], true)?;
                let [new, old] = [at("to_out.0"), at("proj_attn")];
                let out = self.joined(&[&[&new, &old]], [channels, channels], true)?;
                let name = name.to_owned();
                Ok(Attends::Pixels(PixelAttention { name, heads, norm, qkv, out }))
            }
            Attention::Text { heads, depth } => {
                let norm = self.norm(&format!("{name}.norm"), channels)?;
                let before = self.projection(&format!("{name}.proj_in"), channels)?;
                let blocks = (0..depth)
                    .map(|i| self.block(&format!("{name}.transformer_blocks.{i}"), channels))
                    .collect::<Result<_, _>>()?;
                let after = self.projection(&format!("{name}.proj_out"), channels)?;
                let name = name.to_owned();
                Ok(Attends::Text(Transformer { name, heads, norm, before, blocks, after }))
            }
        }
    }

    /// Makes a projection that is stored as a matrix or as a 1x1 convolution.
    fn projection(&mut self, name: &str, channels: usize) -> Result<Linear<W>, Error> {
        let shape: &[usize] = match self.config.linear_projection {
            true => &[channels, channels],
            false => &[channels, channels, 1, 1],
        };
        let weight = self.one(format!("{name}.weight"), shape)?;
        let bias = Some(self.one(format!("{name}.bias"), &[channels])?);
        Ok(Linear { shape: [channels; 2], weight, bias })
    }

    fn block(&mut self, name: &str, channels: usize) -> Result<TransformerBlock<W>, Error> {
        let at = |module: &str| format!("{name}.{module}");
        let square = [channels; 2];
        let inner = 4 * channels;
        let qkv = ["to_q", "to_k", "to_v"].map(|module| at(&format!("attn1.{module}")));
        let names = qkv.each_ref().map(|name| [name.as_str()]);
        let names = names.each_ref().map(|forms| &forms[..]);
        let norm1 = self.norm(&at("norm1"), channels)?;
        let qkv = self.joined(&names, square, false)?;
        let out1 = self.linear(&at("attn1.to_out.0"), square, true)?;
        let norm2 = self.norm(&at("norm2"), channels)?;
        let q = self.linear(&at("attn2.to_q"), square, false)?;
        let keys = [channels, self.config.cross.unwrap_or(channels)];
        let text = self.texts.push(&at("attn2.to_k"), keys, None);
        self.texts.push(&at("attn2.to_v"), keys, None);
        let out2 = self.linear(&at("attn2.to_out.0"), square, true)?;
        let norm3 = self.norm(&at("norm3"), channels)?;
        let up = self.half(&at("ff.net.0.proj"), [inner, channels], false)?;
        let gate = self.half(&at("ff.net.0.proj"), [inner, channels], true)?;
        let down = self.linear(&at("ff.net.2"), [channels, inner], true)?;
        Ok(TransformerBlock { norm1, qkv, out1, norm2, q, text, out2, norm3, up, gate, down })
    }

    fn stage(
        &mut self,
        name: &str,
        resamplers: &str,
        level: &Level,
        inputs: &[usize],
    ) -> Result<Stage<W>, Error> {
        let channels = level.channels;
        let mut layers = Vec::new();
        for (j, from) in inputs.iter().enumerate() {
            let residual = self.residual(&format!("{name}.resnets.{j}"), [*from, channels])?;
            let attends = match &level.attention {
                None => None,
                Some(own) => {
                    Some(self.attends(&format!("{name}.attentions.{j}"), own, channels, None)?)
                }
            };
            layers.push((residual, attends));
        }
        let name = format!("{name}.{resamplers}.0");
        let resample = match level.resample {
            None => None,
            Some(Resample::Residual) => {
                Some(Resampler::Residual(Box::new(self.residual(&name, [channels; 2])?)))
            }
            Some(Resample::Conv { padding }) => {
                let conv = self.conv(&format!("{name}.conv"), [channels, channels, 3, 3])?;
                Some(Resampler::Conv { name, conv, padding })
            }
        };
        Ok(Stage { layers, resample })
    }
}
