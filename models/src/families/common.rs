//! Definition of a family, and readers that several families share.

use serde_json::Value;

use crate::config::{
    Activation, DecoderConfig, Family, Ffn, Layer, Norm, NormKind, Placement as NormPlacement,
    activation,
};
use crate::fields::Fields;
use crate::names::{Place, Slot};
use crate::{Error, Rope, rope};

/// A family: its reader and its tensor names.
pub(super) struct Definition {
    pub(super) model_type: &'static str,
    /// Class of transformers.
    pub(super) architecture: &'static str,
    pub(super) read: fn(Family, &Fields<'_>) -> Result<DecoderConfig, Error>,
    /// Returns the place of a tensor, without the prefix.
    pub(super) place: fn(&DecoderConfig, Slot) -> Place,
    /// Possible prefixes of all names except that of the output projection.
    pub(super) prefixes: &'static [&'static str],
    /// Tensors of older files that are no parameters; `{}` stands for any layer.
    pub(super) ignored: &'static [&'static str],
}

/// Defaults of fields that a family omits from `config.json`.
pub(super) struct Defaults {
    /// True if absent `num_key_value_heads` means one key head per query head.
    pub(super) kv_heads_are_heads: bool,
    pub(super) head_dim: Option<usize>,
    /// Base of the only rope; none if the family reads its own ropes.
    pub(super) rope_theta: Option<f64>,
    pub(super) tie_embeddings: bool,
}

pub(super) const DEFAULTS: Defaults = Defaults {
    kv_heads_are_heads: false,
    head_dim: None,
    rope_theta: Some(10_000.0),
    tie_embeddings: false,
};

/// Reads a decoder with norms before each block, a gated feed-forward block and one rope in every layer. Most
/// families are that, except for a few fields that they set or read afterwards.
pub(super) fn common(
    family: Family,
    fields: &Fields<'_>,
    defaults: Defaults,
) -> Result<DecoderConfig, Error> {
    let sizes = sizes(fields, &defaults)?;
    let Sizes { hidden, heads, kv_heads, head_dim } = sizes;
    let max_seq = fields.size("max_position_embeddings")?;
    let model = |theta| rope::Model { head_dim, max_seq, theta };
    let rope = defaults.rope_theta.map(|theta| Rope::of_model(fields, model(theta))).transpose()?;
    let stretched = rope.as_ref().and_then(|rope| rope.context);
    let max_seq = stretched.map_or(max_seq, |context| context.max(max_seq));
    let layer = Layer { window: None, rope: Some(0), scale: 1.0 / (head_dim as f64).sqrt() };
    Ok(DecoderConfig {
        family,
        hidden,
        ffn_hidden: fields.size("intermediate_size")?,
        heads,
        kv_heads,
        head_dim,
        vocab: fields.size("vocab_size")?,
        max_seq,
        layers: vec![layer; fields.layers("num_hidden_layers")?],
        ropes: rope.into_iter().collect(),
        norm: Norm { kind: NormKind::Rms, eps: fields.eps("rms_norm_eps")? },
        placement: NormPlacement::Before,
        qk_norm: false,
        softcap: None,
        qkv_bias: false,
        out_bias: false,
        ffn: Ffn::Gated,
        activation: activation(fields, "hidden_act")?.unwrap_or(Activation::Silu),
        ffn_bias: false,
        embedding_scale: None,
        learned_positions: false,
        logit_softcap: None,
        tie_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(defaults.tie_embeddings),
        int8_threshold: None,
    })
}

struct Sizes {
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

fn sizes(fields: &Fields<'_>, defaults: &Defaults) -> Result<Sizes, Error> {
    let hidden = fields.size("hidden_size")?;
    let heads = fields.size("num_attention_heads")?;
    let kv_heads = match fields.optional_size("num_key_value_heads")? {
        Some(kv_heads) => kv_heads,
        None if defaults.kv_heads_are_heads => heads,
        None => return Err(fields.missing("num_key_value_heads")),
    };
    fields.divides(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))?;
    let head_dim = match fields.optional_size("head_dim")?.or(defaults.head_dim) {
        Some(head_dim) => head_dim,
        None => {
            fields.divides(("hidden_size", hidden), ("num_attention_heads", heads))?;
            hidden / heads
        }
    };
    Ok(Sizes { hidden, heads, kv_heads, head_dim })
}

pub(super) const SLIDING: &str = "sliding_attention";

/// Returns for each layer if it has a sliding window: from `layer_types`, otherwise by the family's rule.
pub(super) fn sliding(
    fields: &Fields<'_>,
    layers: usize,
    rule: impl Fn(usize) -> bool,
) -> Result<Vec<bool>, Error> {
    let Some(list) = fields.list("layer_types")? else {
        return Ok((0..layers).map(rule).collect());
    };
    if list.len() != layers {
        return Err(fields.contradiction("layer_types", "num_hidden_layers", layers));
    }
    let slides = |kind: &Value| match kind.as_str() {
        Some(SLIDING) => Ok(true),
        Some("full_attention") => Ok(false),
        _ => Err(fields.unsupported("layer_types", "full_attention, sliding_attention")),
    };
    list.iter().map(slides).collect()
}

/// Sets `sliding_window` for the layers marked in `sliding`.
pub(super) fn set_windows(
    config: &mut DecoderConfig,
    fields: &Fields<'_>,
    sliding: &[bool],
) -> Result<(), Error> {
    if !sliding.contains(&true) {
        return Ok(());
    }
    let window = fields.size("sliding_window")?;
    for (layer, _) in config.layers.iter_mut().zip(sliding).filter(|(_, slides)| **slides) {
        layer.window = Some(window);
    }
    Ok(())
}

/// Sets `sliding_window`, if any, for all layers; `layer_types` must not contradict it. `usual` is the window
/// if the file lacks the field; null means no window.
pub(super) fn set_window_of_all(
    config: &mut DecoderConfig,
    fields: &Fields<'_>,
    usual: Option<usize>,
) -> Result<(), Error> {
    let absent = fields.absent("sliding_window");
    let window = if absent { usual } else { fields.optional_size("sliding_window")? };
    for slides in sliding(fields, config.layers.len(), |_| window.is_some())? {
        if slides != window.is_some() {
            let value = fields.value("sliding_window").cloned().unwrap_or_default();
            return Err(fields.contradiction("layer_types", "sliding_window", value));
        }
    }
    config.layers.iter_mut().for_each(|layer| layer.window = window);
    Ok(())
}

/// If `use_sliding_window` is true, sets `sliding_window` for the layers from `max_window_layers` on.
pub(super) fn set_windows_from(
    config: &mut DecoderConfig,
    fields: &Fields<'_>,
) -> Result<(), Error> {
    let layers = config.layers.len();
    let used = fields.flag("use_sliding_window")?.unwrap_or(false);
    let used = used && fields.value("sliding_window").is_some();
    let from = fields.optional("max_window_layers", "an integer of 0 or more", Value::as_u64)?;
    let sliding = match (fields.list("layer_types")?, from) {
        (None, None) if used => return Err(fields.missing("max_window_layers")),
        (_, from) => {
            let from = from.and_then(|from| usize::try_from(from).ok()).unwrap_or(layers);
            sliding(fields, layers, |layer| used && layer >= from)?
        }
    };
    if sliding.contains(&true) && !used {
        let value = fields.value("use_sliding_window").cloned().unwrap_or_default();
        return Err(fields.contradiction("layer_types", "use_sliding_window", value));
    }
    set_windows(config, fields, &sliding)
}

/// Reads the fields that Gemma 2 and 3 share.
pub(super) fn gemma(
    family: Family,
    fields: &Fields<'_>,
    defaults: Defaults,
) -> Result<DecoderConfig, Error> {
    let mut config = common(family, fields, defaults)?;
    let bent = activation(fields, "hidden_activation")?.unwrap_or(Activation::GeluTanh);
    if activation(fields, "hidden_act")?.is_some_and(|other| other != bent) {
        let value = fields.value("hidden_activation").cloned().unwrap_or_default();
        return Err(fields.contradiction("hidden_act", "hidden_activation", value));
    }
    fields.only("use_bidirectional_attention", &[Value::Bool(false)])?;
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    let scalar = fields.positive("query_pre_attn_scalar")?;
    for layer in &mut config.layers {
        layer.scale = 1.0 / scalar.sqrt();
    }
    Ok(DecoderConfig {
        norm: Norm { kind: NormKind::RmsPlusOne, ..config.norm },
        placement: NormPlacement::BeforeAndAfter,
        qkv_bias: bias,
        out_bias: bias,
        activation: bent,
        embedding_scale: Some((config.hidden as f64).sqrt()),
        ..config
    })
}
