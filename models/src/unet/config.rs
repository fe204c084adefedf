//! Configuration of a U-Net, from the `config.json` of diffusers.
//!
//! Source: diffusers 0.42.1, `models/unets/unet_2d.py`, `unet_2d_condition.py`, `unet_2d_blocks.py`. Absent fields have the
//! defaults of these classes.

use ops::Activation;
use serde_json::{Value, json};

use crate::Error;
use crate::fields::{self, Fields};

const FILE: &str = "config.json";
/// Most features of a layer.
const WIDEST: usize = 1 << 20;
/// Most pixels of a side.
const LARGEST: usize = 1 << 16;
/// Most layers, with those of transformer blocks.
const MOST_LAYERS: usize = 10_000;

/// Everything that a U-Net computes.
#[derive(Debug, Clone, PartialEq)]
pub struct UnetConfig {
    /// Height and width of the samples that the model was trained on, if known.
    pub sample_size: Option<[usize; 2]>,
    /// Channels of a sample.
    pub in_channels: usize,
    /// Channels of the result.
    pub out_channels: usize,
    /// True to compute `2 · sample - 1` first.
    pub center_input: bool,
    /// Taps of the first and the last convolution.
    pub taps: [usize; 2],
    /// Embedding of the timestep.
    pub time: Time,
    /// Embedding of a class, added to that of the timestep.
    pub classes: Option<Classes>,
    /// Embedding of a text and of sizes, added to that of the timestep.
    pub text_time: Option<TextTime>,
    /// Features of a token of the text, if the model attends to one.
    pub cross: Option<usize>,
    /// Levels from the sample inwards.
    pub down: Vec<Level>,
    /// Block in the middle.
    pub middle: Option<Middle>,
    /// Levels from the middle outwards.
    pub up: Vec<Level>,
    /// Groups of the norms.
    pub groups: usize,
    /// Constant that the norms of the residual blocks add to the variance.
    pub eps: f32,
    /// Activation of the residual blocks.
    pub activation: Activation,
    /// Activation within the embeddings, and before the last convolution.
    pub outer_activation: Activation,
    /// True if the time embedding scales and shifts the second norm of a residual block, instead of the first convolution.
    pub scale_shift: bool,
    /// True if 1x1 convolutions around transformer blocks are stored as matrices.
    pub linear_projection: bool,
}

/// Embedding of the timestep.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Time {
    /// Sines and cosines of the timestep.
    pub channels: usize,
    /// Features of the embedding.
    pub hidden: usize,
    /// Order of sines and cosines, and spacing of the frequencies.
    pub waves: Waves,
}

/// Sines and cosines of a number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Waves {
    /// True if cosines come first.
    pub cosines_first: bool,
    /// Frequency i of n is `10000^(-i / (n - shift))`.
    pub shift: f64,
}

/// Kind of a class embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Classes {
    /// A table of this many classes.
    Table(usize),
    /// The layers of a time embedding, over the waves of a number.
    Timestep,
}

/// Embedding of pooled text features, and of the waves of six sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextTime {
    /// Waves of each size.
    pub channels: usize,
    /// Features of the text and waves of all sizes.
    pub width: usize,
}

/// Residual blocks of equal resolution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Level {
    /// Channels of the results.
    pub channels: usize,
    /// Residual blocks.
    pub layers: usize,
    /// Attention after each of them.
    pub attention: Option<Attention>,
    /// Change of the resolution at the end.
    pub resample: Option<Resample>,
}

/// Block in the middle: two residual blocks, and attention between them.
#[derive(Debug, Clone, PartialEq)]
pub struct Middle {
    /// Attention between the residual blocks.
    pub attention: Option<Attention>,
    /// Groups of the norm before the attention, if there is one.
    pub attention_groups: Option<usize>,
    /// Divisor of each result.
    pub divisor: f32,
}

/// Attention after a residual block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attention {
    /// Attention among pixels.
    Pixels {
        /// Number of heads.
        heads: usize,
    },
    /// Transformer blocks with attention among pixels and to the text.
    Text {
        /// Number of heads.
        heads: usize,
        /// Number of transformer blocks.
        depth: usize,
    },
}

/// Change of the resolution by two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resample {
    /// A convolution: with steps of two, or over doubled pixels.
    Conv {
        /// Rows and columns of zeros before and after the image.
        padding: [i32; 2],
    },
    /// A residual block.
    Residual,
}

impl UnetConfig {
    /// Reads a `config.json` of `UNet2DModel` or `UNet2DConditionModel`.
    ///
    /// # Errors
    /// [`Error::Json`], [`Error::NotAnObject`] or [`Error::Field`], with the field that is invalid or has no support.
    pub fn from_json(text: &str) -> Result<Self, Error> {
        let value = fields::json(FILE, text)?;
        let fields = Fields::new(FILE, &value)?;
        let conditional = match fields.text("_class_name")? {
            Some("UNet2DModel") => false,
            Some("UNet2DConditionModel") => true,
            Some(_) => {
                let known = "UNet2DModel, UNet2DConditionModel";
                return Err(fields.unsupported("_class_name", known));
            }
            None if fields.absent("model_type") => return Err(fields.missing("_class_name")),
            None => {
                let kind = "a language model, for `flashover generate`";
                return Err(fields.other_kind("_class_name", kind));
            }
        };
        Reader { fields, conditional }.config()
    }

    /// Returns the number by which height and width of a sample must be divisible.
    pub fn multiple(&self) -> usize {
        1 << self.down.iter().filter(|level| level.resample.is_some()).count()
    }
}

struct Reader<'a> {
    fields: Fields<'a>,
    conditional: bool,
}

impl Reader<'_> {
    fn config(&self) -> Result<UnetConfig, Error> {
        let Self { fields, conditional } = self;
        // With other values of these fields, a model computes something else.
        let off = || json!(false);
        for (field, neutral) in [
            ("addition_embed_type", json!("text_time")),
            ("attention_type", json!("default")),
            ("class_embeddings_concat", off()),
            ("cross_attention_norm", Value::Null),
            ("dual_cross_attention", off()),
            ("encoder_hid_dim", Value::Null),
            ("encoder_hid_dim_type", Value::Null),
            ("mid_block_only_cross_attention", off()),
            ("num_attention_heads", Value::Null),
            ("only_cross_attention", off()),
            ("resnet_out_scale_factor", json!(1)),
            ("resnet_skip_time_act", off()),
            ("reverse_transformer_layers_per_block", Value::Null),
            ("time_cond_proj_dim", Value::Null),
            ("time_embedding_act_fn", Value::Null),
            ("time_embedding_type", json!("positional")),
            ("timestep_post_act", Value::Null),
        ] {
            fields.only(field, &[neutral])?;
        }
        let usual = if *conditional { &TEXT } else { &PLAIN };
        let channels = self.sizes("block_out_channels", WIDEST)?.unwrap_or(usual.channels.to_vec());
        let levels = channels.len();
        let layers =
            self.each("layers_per_block", levels, MOST_LAYERS)?.unwrap_or_else(|| vec![2; levels]);
        let heads = self.heads(&channels)?;
        let depths = self.each("transformer_layers_per_block", levels, MOST_LAYERS)?;
        let depths = depths.unwrap_or_else(|| vec![1; levels]);
        if layers.iter().zip(&depths).map(|(layers, depth)| layers * depth).sum::<usize>()
            > MOST_LAYERS
        {
            let expected = format!("at most {MOST_LAYERS} layers and transformer blocks in all");
            return Err(fields.malformed("layers_per_block", &expected));
        }
        let down_types = self.types("down_block_types", levels, &usual.down)?;
        let up_types = self.types("up_block_types", levels, &usual.up)?;
        let padding = match fields.optional("downsample_padding", "0 or 1", Value::as_u64)? {
            // As in diffusers: without padding, zeros follow the image.
            Some(0) => [0, 1],
            None | Some(1) => [1, 1],
            Some(_) => return Err(fields.unsupported("downsample_padding", "0, 1")),
        };
        let residual = |field| match fields.text(field)? {
            None | Some("conv") => Ok(false),
            Some("resnet") => Ok(true),
            Some(_) => Err(fields.unsupported(field, "\"conv\", \"resnet\"")),
        };
        let [down_residual, up_residual] =
            [residual("downsample_type")?, residual("upsample_type")?];
        let level = |at: usize, kind: Kind, more: usize, resample: Option<Resample>| Level {
            channels: channels[at],
            layers: layers[at] + more,
            attention: match kind {
                Kind::Plain => None,
                Kind::Pixels => Some(Attention::Pixels { heads: heads[at] }),
                Kind::Text => Some(Attention::Text { heads: heads[at], depth: depths[at] }),
            },
            resample,
        };
        // Only blocks with attention among pixels read the type of their resampling.
        let resample = |kind: Kind, residual: bool, padding: [i32; 2]| match kind {
            Kind::Pixels if residual => Resample::Residual,
            _ => Resample::Conv { padding },
        };
        let down: Vec<Level> = (0..levels)
            .map(|at| {
                let (kind, inner) = (down_types[at], at + 1 < levels);
                level(at, kind, 0, inner.then(|| resample(kind, down_residual, padding)))
            })
            .collect();
        let up = (0..levels)
            .map(|i| {
                let (kind, inner) = (up_types[i], i + 1 < levels);
                let resample = inner.then(|| resample(kind, up_residual, [1, 1]));
                level(levels - 1 - i, kind, 1, resample)
            })
            .collect();
        let base = channels[0];
        let waves = Waves {
            cosines_first: fields.flag("flip_sin_to_cos")?.unwrap_or(true),
            shift: fields.optional("freq_shift", "a number", Value::as_f64)?.unwrap_or(0.0),
        };
        if base % 2 != 0 {
            return Err(fields.malformed("block_out_channels", "an even number of channels first"));
        }
        if waves.shift >= (base / 2) as f64 {
            let expected = format!("a number below {}, half the channels of a timestep", base / 2);
            return Err(fields.malformed("freq_shift", &expected));
        }
        let time = Time {
            channels: base,
            hidden: fields.optional_count("time_embedding_dim", WIDEST)?.unwrap_or(4 * base),
            waves,
        };
        let scale_shift = match fields.text("resnet_time_scale_shift")? {
            None | Some("default") => false,
            Some("scale_shift") => true,
            Some(_) => {
                let known = "\"default\", \"scale_shift\"";
                return Err(fields.unsupported("resnet_time_scale_shift", known));
            }
        };
        let groups = fields.optional_size("norm_num_groups")?.unwrap_or(32);
        let cross = conditional.then(|| self.cross_width(levels)).transpose()?;
        let activation = self.activation()?;
        let config = UnetConfig {
            sample_size: self.sample_size()?,
            in_channels: fields.optional_count("in_channels", WIDEST)?.unwrap_or(usual.samples),
            out_channels: fields.optional_count("out_channels", WIDEST)?.unwrap_or(usual.samples),
            center_input: fields.flag("center_input_sample")?.unwrap_or(false),
            taps: [self.taps("conv_in_kernel")?, self.taps("conv_out_kernel")?],
            time,
            classes: self.classes()?,
            text_time: self.text_time()?,
            cross,
            middle: self.middle(groups, scale_shift, heads[levels - 1], depths[levels - 1])?,
            down,
            up,
            groups,
            eps: fields.optional_eps("norm_eps")?.unwrap_or(1e-5) as f32,
            activation,
            // diffusers gives the outer layers of a UNet2DModel no choice.
            outer_activation: if *conditional { activation } else { Activation::Silu },
            scale_shift,
            linear_projection: fields.flag("use_linear_projection")?.unwrap_or(false),
        };
        self.divisible(&config)?;
        Ok(config)
    }

    /// Checks that groups and heads divide the channels.
    fn divisible(&self, config: &UnetConfig) -> Result<(), Error> {
        let heads_field = "attention_head_dim";
        for level in config.down.iter().chain(&config.up) {
            let channels = ("block_out_channels", level.channels);
            self.fields.divides(channels, ("norm_num_groups", config.groups))?;
            if let Some(Attention::Pixels { heads } | Attention::Text { heads, .. }) =
                level.attention
            {
                self.fields.divides(channels, (heads_field, heads))?;
            }
        }
        let inner = ("block_out_channels", config.down.last().map_or(0, |level| level.channels));
        if let Some(groups) = config.middle.as_ref().and_then(|middle| middle.attention_groups) {
            self.fields.divides(inner, ("attn_norm_num_groups", groups))?;
        }
        if let Some(Middle { attention: Some(attention), .. }) = &config.middle {
            let (Attention::Pixels { heads } | Attention::Text { heads, .. }) = attention;
            self.fields.divides(inner, (heads_field, *heads))?;
        }
        Ok(())
    }

    /// Reads a list of sizes from 1 to `most`.
    fn sizes(&self, field: &str, most: usize) -> Result<Option<Vec<usize>>, Error> {
        let Some(list) = self.fields.list(field)? else { return Ok(None) };
        let within = |size: &usize| (1..=most).contains(size);
        let size = |value: &Value| usize::try_from(value.as_u64()?).ok().filter(within);
        let sizes: Option<Vec<usize>> = list.iter().map(size).collect();
        match sizes.filter(|sizes| !sizes.is_empty() && sizes.len() <= 16) {
            Some(sizes) => Ok(Some(sizes)),
            None => {
                let expected = format!("a list of 1 to 16 integers from 1 to {most}");
                Err(self.fields.malformed(field, &expected))
            }
        }
    }

    /// Reads one size from 1 to `most`, or one for each level.
    fn each(&self, field: &str, levels: usize, most: usize) -> Result<Option<Vec<usize>>, Error> {
        let sizes = match self.fields.value(field) {
            Some(Value::Array(_)) => self.sizes(field, most)?,
            _ => self.fields.optional_count(field, most)?.map(|size| vec![size; levels]),
        };
        match sizes {
            Some(sizes) if sizes.len() != levels => {
                let expected = format!("a number, or {levels} numbers");
                Err(self.fields.malformed(field, &expected))
            }
            sizes => Ok(sizes),
        }
    }

    /// Reads the number of heads of each level.
    ///
    /// `attention_head_dim` is the size of a head in a `UNet2DModel`, and the number of heads in a `UNet2DConditionModel`
    /// (diffusers#2011).
    fn heads(&self, channels: &[usize]) -> Result<Vec<usize>, Error> {
        let field = "attention_head_dim";
        let own = match self.fields.absent(field) {
            true => Some(vec![8; channels.len()]),
            false => self.each(field, channels.len(), WIDEST)?,
        };
        Ok(match own {
            None => vec![1; channels.len()],
            Some(heads) if self.conditional => heads,
            Some(dims) => {
                let heads = |(channels, dim): (&usize, usize)| {
                    // diffusers takes one head for fewer channels than a head has.
                    let dim = dim.min(*channels);
                    self.fields.divides(("block_out_channels", *channels), (field, dim))?;
                    Ok(channels / dim)
                };
                return channels.iter().zip(dims).map(heads).collect();
            }
        })
    }

    fn types(&self, field: &str, levels: usize, usual: &[&str; 4]) -> Result<Vec<Kind>, Error> {
        let given = self.fields.list(field)?;
        let names: Vec<&str> = match given {
            None => usual.to_vec(),
            Some(list) => {
                let names: Option<Vec<&str>> = list.iter().map(Value::as_str).collect();
                names.ok_or_else(|| self.fields.malformed(field, "a list of block types"))?
            }
        };
        if names.len() != levels {
            let expected =
                format!("a list of {levels} block types, one for each of block_out_channels");
            return Err(self.fields.malformed(field, &expected));
        }
        let known = if field == "down_block_types" { DOWN_TYPES } else { UP_TYPES };
        let kind = |name: &&str| known.iter().find(|(own, _)| own == name).map(|(_, kind)| *kind);
        let kinds: Option<Vec<Kind>> = names.iter().map(kind).collect();
        // In a conditional model, diffusers reads `attention_head_dim` as another number for attention among pixels.
        let other = if self.conditional { Kind::Pixels } else { Kind::Text };
        let supported = |kind: &Kind| *kind != other;
        kinds.filter(|kinds| kinds.iter().all(supported)).ok_or_else(|| {
            let names = known.iter().filter(|(_, kind)| supported(kind)).map(|(name, _)| *name);
            self.fields.unsupported(field, &names.collect::<Vec<_>>().join(", "))
        })
    }

    fn middle(
        &self,
        groups: usize,
        scale_shift: bool,
        heads: usize,
        depth: usize,
    ) -> Result<Option<Middle>, Error> {
        let Self { fields, conditional } = self;
        let usual = if *conditional { "UNetMidBlock2DCrossAttn" } else { "UNetMidBlock2D" };
        let field = "mid_block_type";
        let kind = match fields.absent(field) {
            true => Some(usual),
            false => fields.text(field)?,
        };
        let own_groups = fields.optional_size("attn_norm_num_groups")?;
        let attention = match kind {
            None => return Ok(None),
            Some("UNetMidBlock2D") if !conditional => {
                let attends = fields.flag("add_attention")?.unwrap_or(true);
                attends.then_some(Attention::Pixels { heads })
            }
            Some("UNetMidBlock2DCrossAttn") if *conditional => {
                Some(Attention::Text { heads, depth })
            }
            Some(_) => return Err(fields.unsupported(field, &format!("\"{usual}\", null"))),
        };
        let divisor = fields.optional_eps("mid_block_scale_factor")?.unwrap_or(1.0);
        let attention_groups = own_groups.or((!scale_shift).then_some(groups));
        Ok(Some(Middle { attention, attention_groups, divisor: divisor as f32 }))
    }

    fn classes(&self) -> Result<Option<Classes>, Error> {
        let fields = &self.fields;
        match fields.text("class_embed_type")? {
            None => Ok(fields.optional_count("num_class_embeds", 1 << 24)?.map(Classes::Table)),
            Some("timestep") => Ok(Some(Classes::Timestep)),
            Some(_) => Err(fields.unsupported("class_embed_type", "\"timestep\", null")),
        }
    }

    fn text_time(&self) -> Result<Option<TextTime>, Error> {
        if !self.conditional || self.fields.value("addition_embed_type").is_none() {
            return Ok(None);
        }
        let needed = |field| -> Result<usize, Error> {
            let own = self.fields.optional_count(field, WIDEST)?;
            own.ok_or_else(|| self.fields.missing(field))
        };
        let channels = needed("addition_time_embed_dim")?;
        let width = needed("projection_class_embeddings_input_dim")?;
        if channels % 2 != 0 || width <= 6 * channels {
            let expected = "more features than the waves of six sizes, which are even";
            return Err(self.fields.malformed("projection_class_embeddings_input_dim", expected));
        }
        Ok(Some(TextTime { channels, width }))
    }

    fn cross_width(&self, levels: usize) -> Result<usize, Error> {
        let widths =
            self.each("cross_attention_dim", levels, WIDEST)?.unwrap_or_else(|| vec![1280]);
        match widths.iter().all(|width| *width == widths[0]) {
            true => Ok(widths[0]),
            false => {
                Err(self.fields.unsupported("cross_attention_dim", "one width for all levels"))
            }
        }
    }

    fn taps(&self, field: &str) -> Result<usize, Error> {
        let taps = self.fields.optional_size(field)?.unwrap_or(3);
        match taps % 2 {
            1 if taps < 32 => Ok(taps),
            _ => Err(self.fields.unsupported(field, "an odd number below 32")),
        }
    }

    fn sample_size(&self) -> Result<Option<[usize; 2]>, Error> {
        let field = "sample_size";
        Ok(match self.fields.value(field) {
            Some(Value::Array(_)) => match self.sizes(field, LARGEST)?.as_deref() {
                Some(&[height, width]) => Some([height, width]),
                _ => return Err(self.fields.malformed(field, "height and width")),
            },
            _ => self.fields.optional_count(field, LARGEST)?.map(|size| [size, size]),
        })
    }

    fn activation(&self) -> Result<Activation, Error> {
        match self.fields.text("act_fn")? {
            None | Some("silu" | "swish") => Ok(Activation::Silu),
            Some("gelu") => Ok(Activation::Gelu),
            Some("relu") => Ok(Activation::Relu),
            Some(_) => {
                Err(self.fields.unsupported("act_fn", "\"silu\", \"swish\", \"gelu\", \"relu\""))
            }
        }
    }
}

/// Kind of attention in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    Pixels,
    Text,
}

const DOWN_TYPES: &[(&str, Kind)] = &[
    ("DownBlock2D", Kind::Plain),
    ("AttnDownBlock2D", Kind::Pixels),
    ("CrossAttnDownBlock2D", Kind::Text),
];
const UP_TYPES: &[(&str, Kind)] = &[
    ("UpBlock2D", Kind::Plain),
    ("AttnUpBlock2D", Kind::Pixels),
    ("CrossAttnUpBlock2D", Kind::Text),
];

/// Defaults of a class.
struct Usual {
    channels: [usize; 4],
    /// Channels of a sample.
    samples: usize,
    down: [&'static str; 4],
    up: [&'static str; 4],
}

const PLAIN: Usual = Usual {
    channels: [224, 448, 672, 896],
    samples: 3,
    down: ["DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"],
    up: ["AttnUpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"],
};
const TEXT: Usual = Usual {
    channels: [320, 640, 1280, 1280],
    samples: 4,
    down: ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    up: ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
};
