//! The parameters of a decoder, and their names in checkpoints.

use crate::DecoderConfig;
use crate::config::{Ffn, NormKind, Placement};

/// Location of a parameter in a decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Slot {
    /// Token embedding, `[vocab, hidden]`
    Embedding,
    /// Learned positions, `[max_seq, hidden]`
    Positions,
    /// Part of a layer; layers count from 0.
    Layer(usize, Part),
    /// Norm of the last layer's output, `[hidden]`
    FinalNorm,
    /// Output projection, `[vocab, hidden]`; the embedding if tied.
    Head,
}

/// Location of a parameter in a layer, in the order of the forward pass. Matrices are `[out, in]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Norm before attention, `[hidden]`
    AttentionNorm,
    /// Query projection, `[heads · head_dim, hidden]`
    Query,
    /// Key projection, `[kv_heads · head_dim, hidden]`
    Key,
    /// Value projection, `[kv_heads · head_dim, hidden]`
    Value,
    /// Norm of each query head, `[head_dim]`
    QueryNorm,
    /// Norm of each key head, `[head_dim]`
    KeyNorm,
    /// Output projection of attention, `[hidden, heads · head_dim]`
    Out,
    /// Norm of the attention output, `[hidden]`; only with [`Placement::BeforeAndAfter`].
    AttentionPostNorm,
    /// Norm before the feed-forward block, `[hidden]`
    FfnNorm,
    /// Gate projection, `[ffn_hidden, hidden]`; only in a gated block.
    Gate,
    /// Up projection, `[ffn_hidden, hidden]`
    Up,
    /// Down projection, `[hidden, ffn_hidden]`
    Down,
    /// Norm of the feed-forward output, `[hidden]`; only with [`Placement::BeforeAndAfter`].
    FfnPostNorm,
}

/// Weight or bias of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// Matrix, table of vectors, or norm weight.
    Weight,
    /// Bias: one value per row of the weight.
    Bias,
}

/// A parameter, and its tensor in a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// Location in the decoder.
    pub slot: Slot,
    /// Weight or bias.
    pub side: Side,
    /// Shape in the decoder.
    pub shape: Vec<usize>,
    /// Name in the checkpoint, without the family's prefix.
    pub name: String,
    /// Shape of the whole tensor of that name.
    pub stored: Vec<usize>,
    /// True if the tensor is stored `[in, out]`.
    pub transposed: bool,
    /// First row of the parameter in the tensor; a column if stored `[in, out]`.
    pub row: usize,
}

impl Param {
    /// Returns the slot, and whether this is its weight or its bias.
    pub const fn place(&self) -> (Slot, Side) {
        (self.slot, self.side)
    }
}

/// A module of a checkpoint, and a range of its rows.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    module: String,
    transposed: bool,
    /// First row, and number of rows of the whole tensor.
    rows: Option<[usize; 2]>,
}

impl Place {
    pub(crate) fn new(module: impl Into<String>) -> Self {
        Self { module: module.into(), transposed: false, rows: None }
    }

    pub(crate) fn transposed(self) -> Self {
        Self { transposed: true, ..self }
    }

    pub(crate) fn rows(self, first: usize, of: usize) -> Self {
        Self { rows: Some([first, of]), ..self }
    }
}

/// Returns the names that most families use.
pub(crate) fn standard(config: &DecoderConfig, slot: Slot) -> Place {
    let Slot::Layer(layer, part) = slot else {
        return Place::new(match slot {
            Slot::Positions => "embed_positions",
            Slot::FinalNorm => "norm",
            Slot::Head => "lm_head",
            Slot::Embedding | Slot::Layer(..) => "embed_tokens",
        });
    };
    // Models with four norms per layer use this name for the second; others for the norm before the
    // feed-forward block.
    let four = config.placement == Placement::BeforeAndAfter;
    let module = match part {
        Part::AttentionNorm => "input_layernorm",
        Part::Query => "self_attn.q_proj",
        Part::Key => "self_attn.k_proj",
        Part::Value => "self_attn.v_proj",
        Part::QueryNorm => "self_attn.q_norm",
        Part::KeyNorm => "self_attn.k_norm",
        Part::Out => "self_attn.o_proj",
        Part::FfnNorm if four => "pre_feedforward_layernorm",
        Part::AttentionPostNorm | Part::FfnNorm => "post_attention_layernorm",
        Part::Gate => "mlp.gate_proj",
        Part::Up => "mlp.up_proj",
        Part::Down => "mlp.down_proj",
        Part::FfnPostNorm => "post_feedforward_layernorm",
    };
    Place::new(format!("layers.{layer}.{module}"))
}

impl DecoderConfig {
    /// Returns every parameter in the order of the forward pass, without a tied output projection.
    pub fn params(&self) -> Vec<Param> {
        let mut params = Vec::new();
        for (slot, shape) in self.slots() {
            let biased = self.biased(slot).then_some(Side::Bias);
            for side in [Some(Side::Weight), biased].into_iter().flatten() {
                params.push(self.param(slot, side, &shape));
            }
        }
        params
    }

    /// Returns the rows of the query matrix, and of the key and value matrices each.
    pub(crate) fn qkv_rows(&self) -> [usize; 2] {
        [self.heads * self.head_dim, self.kv_heads * self.head_dim]
    }

    /// Returns the parts of a layer, with the shapes of their weights.
    pub(crate) fn parts(&self) -> Vec<(Part, Vec<usize>)> {
        let Self { hidden, head_dim, ffn_hidden: ffn, .. } = *self;
        let [q, kv] = self.qkv_rows();
        let four = self.placement == Placement::BeforeAndAfter;
        let gated = self.ffn == Ffn::Gated;
        let parts = [
            (true, Part::AttentionNorm, vec![hidden]),
            (true, Part::Query, vec![q, hidden]),
            (true, Part::Key, vec![kv, hidden]),
            (true, Part::Value, vec![kv, hidden]),
            (self.qk_norm, Part::QueryNorm, vec![head_dim]),
            (self.qk_norm, Part::KeyNorm, vec![head_dim]),
            (true, Part::Out, vec![hidden, q]),
            (four, Part::AttentionPostNorm, vec![hidden]),
            (true, Part::FfnNorm, vec![hidden]),
            (gated, Part::Gate, vec![ffn, hidden]),
            (true, Part::Up, vec![ffn, hidden]),
            (true, Part::Down, vec![hidden, ffn]),
            (four, Part::FfnPostNorm, vec![hidden]),
        ];
        parts.into_iter().filter(|part| part.0).map(|(_, part, shape)| (part, shape)).collect()
    }

    pub(crate) fn biased(&self, slot: Slot) -> bool {
        let Slot::Layer(_, part) = slot else {
            return slot == Slot::FinalNorm && self.norm.kind == NormKind::Layer;
        };
        match part {
            Part::Query | Part::Key | Part::Value => self.qkv_bias,
            Part::Out => self.out_bias,
            Part::Gate | Part::Up | Part::Down => self.ffn_bias,
            _ => self.norm.kind == NormKind::Layer,
        }
    }

    fn slots(&self) -> Vec<(Slot, Vec<usize>)> {
        let table = vec![self.vocab, self.hidden];
        let mut slots = vec![(Slot::Embedding, table.clone())];
        if self.learned_positions {
            slots.push((Slot::Positions, vec![self.max_seq, self.hidden]));
        }
        for layer in 0..self.layers.len() {
            let at = |(part, shape)| (Slot::Layer(layer, part), shape);
            slots.extend(self.parts().into_iter().map(at));
        }
        slots.push((Slot::FinalNorm, vec![self.hidden]));
        if !self.tie_embeddings {
            slots.push((Slot::Head, table));
        }
        slots
    }

    fn param(&self, slot: Slot, side: Side, shape: &[usize]) -> Param {
        let Place { module, transposed, rows } = self.family.place(self, slot);
        let (side_name, shape) = match side {
            Side::Weight => ("weight", shape.to_vec()),
            Side::Bias => ("bias", shape[..1].to_vec()),
        };
        let transposed = transposed && side == Side::Weight;
        let [row, all] = rows.unwrap_or([0, shape[0]]);
        let mut stored = shape.clone();
        stored[0] = all;
        if transposed {
            stored.reverse();
        }
        let name = format!("{module}.{side_name}");
        Param { slot, side, shape, name, stored, transposed, row }
    }
}

impl Slot {
    /// True if the weight is a matmul operand, so that it may be quantised.
    pub(crate) fn is_matrix(self) -> bool {
        use Part::{Down, Gate, Key, Out, Query, Up, Value};
        match self {
            Self::Layer(_, part) => {
                matches!(part, Query | Key | Value | Out | Gate | Up | Down)
            }
            Self::Head => true,
            Self::Embedding | Self::Positions | Self::FinalNorm => false,
        }
    }
}
