//! The parameters of a decoder, and what checkpoints call them.

use crate::DecoderConfig;
use crate::config::{Ffn, NormKind, Placement};

/// Where a decoder has parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Slot {
    /// `[vocab, hidden]`
    Embedding,
    /// `[max_seq, hidden]`
    Positions,
    /// A part of a layer; layers are counted from 0.
    Layer(usize, Part),
    /// `[hidden]`; of what the last layer gives.
    FinalNorm,
    /// `[vocab, hidden]`; the embedding itself where they are tied.
    Head,
}

/// Where a layer has parameters, in the order that a token passes them. Matrices are `[out, in]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// `[hidden]`; of what attention reads.
    AttentionNorm,
    /// `[heads · head_dim, hidden]`
    Query,
    /// `[kv_heads · head_dim, hidden]`
    Key,
    /// `[kv_heads · head_dim, hidden]`
    Value,
    /// `[head_dim]`
    QueryNorm,
    /// `[head_dim]`
    KeyNorm,
    /// `[hidden, heads · head_dim]`; the output projection of attention.
    Out,
    /// `[hidden]`; of what attention adds, where [`Placement::BeforeAndAfter`] says so.
    AttentionPostNorm,
    /// `[hidden]`; of what the feed-forward block reads.
    FfnNorm,
    /// `[ffn_hidden, hidden]`; only where the block is gated.
    Gate,
    /// `[ffn_hidden, hidden]`
    Up,
    /// `[hidden, ffn_hidden]`
    Down,
    /// `[hidden]`; of what the feed-forward block adds, where [`Placement::BeforeAndAfter`] says so.
    FfnPostNorm,
}

/// Which tensor of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// A matrix, a table of vectors, or the factors of a norm.
    Weight,
    /// What is added, one number for each row of the weight.
    Bias,
}

/// One parameter, and where a checkpoint has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// Where in the decoder it is.
    pub slot: Slot,
    /// Whether it is the weight there, or the bias.
    pub side: Side,
    /// As the decoder wants it.
    pub shape: Vec<usize>,
    /// The checkpoint's name, without the family's prefix.
    pub name: String,
    /// Of the whole tensor of that name.
    pub stored: Vec<usize>,
    /// The tensor is stored `[in, out]`.
    pub transposed: bool,
    /// The first of its rows, which are columns of one stored `[in, out]`.
    pub row: usize,
}

/// A module of a checkpoint, and which rows of it.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    module: String,
    transposed: bool,
    /// The first row, and how many the whole tensor has.
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

/// The names that most families have.
pub(crate) fn standard(config: &DecoderConfig, slot: Slot) -> Place {
    let Slot::Layer(layer, part) = slot else {
        return Place::new(match slot {
            Slot::Positions => "embed_positions",
            Slot::FinalNorm => "norm",
            Slot::Head => "lm_head",
            Slot::Embedding | Slot::Layer(..) => "embed_tokens",
        });
    };
    // The second of two norms, or of four.
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
    /// Every parameter, in the order that a token passes them; a tied output projection is not one.
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

    /// Rows of the query matrix, and of the key and value matrices each.
    pub(crate) fn qkv_rows(&self) -> [usize; 2] {
        [self.heads * self.head_dim, self.kv_heads * self.head_dim]
    }

    /// The parts of every layer, with the shape of their weight.
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
    /// Whether its weight multiplies what a token became, so that it may be quantised.
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
