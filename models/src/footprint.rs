//! What a model takes on a device, before it is there.
//!
//! ```text
//! weights      every parameter in the dtype that is computed in, or 4 bits and an absmax of 8 bits a block of 64, or 8
//!              bits and an absmax of f32 a row
//! cache        2 · layers · kv_heads · head_dim · batch · positions, in what is computed in or in bytes with an f32 a
//!              position and head, the angles of the ropes, and a bit a token of the vocabulary for each that was seen
//! activations  of the step that has most alive beside the residual stream x, [rows, hidden], and the room that x left
//!              when what attention adds to it was written elsewhere, which is too small for anything else:
//!                attention     qkv, or q and what leaves attention twice, as it is and turned; of a cache in bytes
//!                              beside them what keys and values so far stand for, which prompts read
//!                feed-forward  norm(x), up and gate; up is the gate's epilogue's, and of codes that are multiplied as
//!                              they are gate is nowhere
//!                logits        [rows of them, vocab], in f32, beside what a token is picked with; where all rows want
//!                              them, as many at once as take no more than the layers did
//!              beside a product of too few blocks for all processors, whose k is cut, its sums in f32; beside one that
//!              an adapter adds to, what it adds, and then gate and up are there before they are one
//! workspace    a dense copy of the largest weight in 4 or 8 bits, which prompts are multiplied with
//! small        a page of what is: shapes, lengths, tokens; and what the page of all that passes is rounded up by
//! steps        of a step that is captured everything that passes, for that lies outside of the pages of prompts: a piece
//!              for each size that there is, and dense weights where codes of so many rows are not multiplied as they are
//! ```
//!
//! Sums are of 128 bits: a configuration may be absurd.

mod train;

use burn::tensor::{DType, FloatDType};
use serde::Serialize;

use crate::names::{Part, Slot};
use crate::{DecoderConfig, Ffn, Param, Side};
pub use train::{Lessons, TrainFootprint};

/// Bytes on a device, part by part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Footprint {
    /// Every parameter, as it is held.
    pub weights: u128,
    /// Keys, values, angles, and which tokens were seen.
    pub cache: u128,
    /// What is alive at most while tokens pass.
    pub activations: u128,
    /// A dense copy of the largest weight in 4 or 8 bits; 0 where none is made.
    pub workspace: u128,
    /// A page of what is small, and what that of the rest is rounded up by.
    pub small: u128,
    /// What the graph of a step is recorded on.
    pub steps: u128,
}

/// How a device goes about steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Steps {
    /// Whether they are captured as graphs.
    pub captured: bool,
    /// So many rows at most are multiplied with codes of 4 bits themselves, more perhaps with a dense copy.
    pub coded_rows: u32,
    /// Processors of the device: a product of fewer blocks has as many more parts of k, with sums of their own. 0 where
    /// products are never cut.
    pub processors: u32,
}

impl Steps {
    /// Sums of the parts of a product `[rows, n]` over `k`.
    fn sums_bytes(self, rows: u128, n: u128, k: u128) -> u128 {
        // Of the widest tiles, and of as many of k as fill a ring of them.
        let blocks = rows.div_ceil(128) * n.div_ceil(256);
        let parts = (u128::from(self.processors) / blocks.max(1)).min(k / 128);
        if parts > 1 { 4 * rows * n * parts } else { 0 }
    }
}

/// How a model is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// What is computed in.
    pub dtype: FloatDType,
    /// See [`LoadOptions::tf32`](crate::LoadOptions::tf32).
    pub tf32: bool,
    /// How the matrices of the layers are held.
    pub matrices: Matrices,
    /// How keys and values are held.
    pub kv: KvFormat,
    /// Columns of what an adapter adds to a product of matrices that it is not part of, at most.
    pub beside: usize,
}

/// How keys and values are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KvFormat {
    /// In what is computed in.
    #[default]
    Float,
    /// A byte a number, and an f32 a position and head: about half of what 16 bits take.
    Int8,
}

impl KvFormat {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Float, Self::Int8];

    /// As the command line has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float => "float",
            Self::Int8 => "int8",
        }
    }
}

/// How the matrices of the layers are held, the least work first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Matrices {
    /// In what is computed in.
    Dense,
    /// A byte a value, an absmax a row.
    Int8,
    /// Half a byte a value, an absmax a block.
    FourBit,
}

/// What it is asked for at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Sequences that decode together; prompts pass alone or together.
    pub batch: usize,
    /// Positions that each has room for.
    pub positions: usize,
    /// Tokens of prompts that pass together.
    pub chunk: usize,
}

impl Footprint {
    /// Bytes of all parts together.
    pub const fn total(&self) -> u128 {
        self.weights + self.cache + self.passing() + self.small + self.steps
    }

    /// What comes and goes while tokens pass.
    pub const fn passing(&self) -> u128 {
        self.activations + self.workspace
    }
}

impl Held {
    fn size(self) -> u128 {
        DType::from(self.dtype).size() as u128
    }

    /// Of a key, or a value, of one head.
    pub(crate) fn kv_bytes(self, head_dim: usize) -> u128 {
        match self.kv {
            KvFormat::Float => head_dim as u128 * self.size(),
            KvFormat::Int8 => head_dim as u128 + 4,
        }
    }

    /// Of a matrix of a layer, `[n, k]`.
    pub(crate) fn matrix_bytes(self, shape: &[usize]) -> u128 {
        let values = values_of(shape);
        match self.matrices {
            Matrices::FourBit => four_bit_bytes(values),
            Matrices::Int8 => values + 4 * shape[0] as u128,
            Matrices::Dense => values * self.size(),
        }
    }
}

/// Of one parameter.
fn param_bytes(held: Held, param: &Param) -> u128 {
    let layers = param.slot.is_matrix() && param.slot != Slot::Head;
    match param.side == Side::Weight && layers {
        true => held.matrix_bytes(&param.shape),
        false => values_of(&param.shape) * held.size(),
    }
}

pub(crate) fn values_of(shape: &[usize]) -> u128 {
    shape.iter().map(|size| *size as u128).product()
}

/// Half a byte, and a byte for a block of 64.
pub(crate) const fn four_bit_bytes(values: u128) -> u128 {
    values / 2 + values.div_ceil(64)
}

impl DecoderConfig {
    /// What the model takes, held and loaded so, beside its weights, whose bytes are known: see
    /// [`DecoderConfig::held_bytes`] and [`on_device`](crate::on_device).
    pub fn footprint(&self, held: Held, weights: u128, load: Workload, steps: Steps) -> Footprint {
        let activations = self.activation_bytes(held, load, steps);
        let workspace = self.workspace_bytes(held, load, steps);
        Footprint {
            weights,
            cache: self.cache_bytes(held, load.batch, load.positions)
                + self.angle_bytes(load.positions)
                + load.batch as u128 * self.seen_bytes(),
            activations,
            workspace,
            small: SMALL_PAGE + slack(activations + workspace) + self.rounded_bytes(),
            // What a graph is recorded on has a page of what is small of its own.
            steps: match steps.captured {
                true => self.step_bytes(held, load, steps) + STEP_PAGE,
                false => 0,
            },
        }
    }

    /// The most that one buffer takes: of weights, of which queries, keys and values are one, and gate and up of 4 bits;
    /// of the keys of a layer; of what passes.
    pub fn largest_buffer_bytes(&self, held: Held, load: Workload, steps: Steps) -> u128 {
        let [q, kv] = self.qkv_rows();
        let params = self.params();
        let params = params.iter().map(|param| param_bytes(held, param));
        let qkv = held.matrix_bytes(&[q + 2 * kv, self.hidden]);
        let both = match (held.matrices, self.ffn) {
            (Matrices::FourBit, Ffn::Gated) => {
                held.matrix_bytes(&[2 * self.ffn_hidden, self.hidden])
            }
            _ => 0,
        };
        let keys = self.kv_heads as u128 * held.kv_bytes(self.head_dim);
        let keys = keys * load.batch as u128 * load.positions as u128;
        let wide = self.ffn_hidden.max(q + 2 * kv).max(self.hidden) as u128;
        let passing = Self::rows(load) * wide * held.size();
        let logits = load.batch as u128 * 4 * self.vocab as u128;
        let rest = [qkv, both, keys, passing, logits, self.workspace_bytes(held, load, steps)];
        params.chain(rest).max().unwrap_or(0)
    }

    /// Of all parameters.
    pub fn held_bytes(&self, held: Held) -> u128 {
        self.params().iter().map(|param| param_bytes(held, param)).sum()
    }

    /// Of keys and values.
    pub fn cache_bytes(&self, held: Held, batch: usize, positions: usize) -> u128 {
        let heads = 2 * self.layers.len() as u128 * self.kv_heads as u128;
        heads * held.kv_bytes(self.head_dim) * batch as u128 * positions as u128
    }

    fn angle_bytes(&self, positions: usize) -> u128 {
        self.ropes.iter().map(|rope| 4 * rope.dim as u128 * positions as u128).sum()
    }

    /// What buffers that lie by themselves are rounded up by.
    pub(crate) fn rounded_bytes(&self) -> u128 {
        // Of a layer codes, absmax of two levels and a bias for each of seven matrices, norms, keys and values.
        const OF_LAYER: usize = 40;
        ALIGNED * (OF_LAYER * self.layers.len() + OF_LAYER) as u128
    }

    /// Rows that pass together at most.
    fn rows(load: Workload) -> u128 {
        load.chunk.min(load.positions.saturating_mul(load.batch)).max(load.batch) as u128
    }

    fn activation_bytes(&self, held: Held, load: Workload, steps: Steps) -> u128 {
        let x = self.hidden as u128 * Self::rows(load) * held.size();
        let logits = load.batch as u128 * (self.logits_bytes(held) + self.sampling_bytes());
        (2 * x + self.layer_bytes(held, load, steps)).max(logits)
    }

    /// What a layer has alive beside the residual stream.
    fn layer_bytes(&self, held: Held, load: Workload, steps: Steps) -> u128 {
        let [q, kv] = self.qkv_rows().map(|size| size as u128);
        let (hidden, inner) = (self.hidden as u128, self.ffn_hidden as u128);
        let rows = Self::rows(load);
        let adapted = held.beside > 0;
        // Gate and up are one product of codes.
        let few = Self::rows(load) <= FEW_BY_FOUR_BITS;
        let codes = held.matrices == Matrices::FourBit && few && !adapted;
        let gate = match self.ffn {
            Ffn::Gated if !codes => inner,
            Ffn::Gated | Ffn::Plain => 0,
        };
        let wide = |values: u128| values * rows * held.size();
        let sums = |n, k| steps.sums_bytes(rows, n, k);
        let attention = wide((2 * q + 2 * kv).max(3 * q)) + self.in_floats_bytes(held, load);
        let products = [
            wide(hidden + q + 2 * kv) + sums(q + 2 * kv, hidden),
            wide(2 * q + hidden) + sums(hidden, q),
            wide(hidden + inner + gate) + sums(inner, hidden),
            wide(inner + hidden) + sums(hidden, inner),
        ];
        let all = products.into_iter().fold(attention, u128::max);
        if !adapted {
            return all;
        }
        // What the adapter adds and what it is added to; of gate and up their halves, too, and what becomes of them.
        let inner = match self.ffn {
            Ffn::Gated => 7 * inner,
            Ffn::Plain => 3 * inner,
        };
        all.max(wide(hidden + inner)).max(wide(hidden + 2 * (q + 2 * kv)))
    }

    /// Of a row, with what is multiplied for them.
    fn logits_bytes(&self, held: Held) -> u128 {
        4 * self.vocab as u128 + 2 * self.hidden as u128 * held.size()
    }

    /// Of a row that a token is picked of: weights of all of them in f32, and a bit of each that was seen, anew.
    fn sampling_bytes(&self) -> u128 {
        4 * self.vocab as u128 + self.seen_bytes()
    }

    /// Of a sequence, a bit a token.
    fn seen_bytes(&self) -> u128 {
        4 * self.vocab.div_ceil(32) as u128
    }

    /// How many of `rows` that passed together have logits at once, where all want them: such as take no more than the
    /// layers did, one at least.
    pub(crate) fn rows_with_logits(&self, held: Held, rows: usize) -> usize {
        let load = Workload { batch: 1, positions: rows, chunk: rows };
        let launched = Steps { captured: false, coded_rows: 0, processors: 0 };
        let fitting = self.layer_bytes(held, load, launched) / self.logits_bytes(held);
        usize::try_from(fitting).unwrap_or(rows).clamp(1, rows.max(1))
    }

    /// What keys and values in bytes stand for, while a prompt of one sequence reads them: of the values two in f32
    /// beside the keys.
    fn in_floats_bytes(&self, held: Held, load: Workload) -> u128 {
        let [_, kv] = self.qkv_rows().map(|size| size as u128);
        match held.kv {
            KvFormat::Float => 0,
            KvFormat::Int8 => kv * load.positions as u128 * (held.size() + 8),
        }
    }

    fn workspace_bytes(&self, held: Held, load: Workload, steps: Steps) -> u128 {
        let (few, joins) = match held.matrices {
            Matrices::Dense => return 0,
            Matrices::Int8 => (8, false),
            Matrices::FourBit => (steps.coded_rows.into(), true),
        };
        if Self::rows(load) <= few {
            return 0;
        }
        let joint = |part: Part| match (part, self.ffn) {
            (Part::Up, Ffn::Gated) if joins => 2,
            _ => 1,
        };
        let matrices =
            self.parts().into_iter().filter(|(part, _)| Slot::Layer(0, *part).is_matrix());
        let values = matrices.map(|(part, shape)| joint(part) * values_of(&shape));
        // Queries, keys and values are one product.
        let [q, kv] = self.qkv_rows().map(|rows| rows as u128);
        let qkv = (q + 2 * kv) * self.hidden as u128;
        values.max().unwrap_or(0).max(qkv) * held.size()
    }

    /// What a step of a token of each sequence takes, where all that it makes lies beside each other: results in what is
    /// computed in, the sums in f32 of two parts of each, logits, dense copies.
    fn step_bytes(&self, held: Held, load: Workload, steps: Steps) -> u128 {
        let [q, kv] = self.qkv_rows().map(|size| size as u128);
        let (hidden, inner) = (self.hidden as u128, self.ffn_hidden as u128);
        let sums = 2 * 4 * (q + 2 * kv + hidden + 2 * inner + hidden);
        let mut results = 3 * hidden + 2 * q + 2 * kv + 2 * inner;
        if held.beside > 0 {
            // What an adapter adds to each product, and gate and up before they are one.
            results += 4 * held.beside as u128 + q + 2 * kv + 2 * hidden + 5 * inner;
        }
        let results = results * held.size();
        let batch = load.batch as u128;
        let dense = match held.matrices {
            Matrices::FourBit if batch > steps.coded_rows.into() => {
                let matrices = self.parts().into_iter();
                let matrices = matrices.filter(|(part, _)| Slot::Layer(0, *part).is_matrix());
                matrices.map(|(_, shape)| values_of(&shape)).sum::<u128>() * held.size()
            }
            _ => 0,
        };
        batch * (results + sums + 4 * self.vocab as u128) + dense
    }
}

/// So many rows at most have gate and up as one product of codes of 4 bits.
const FEW_BY_FOUR_BITS: u128 = 128;

/// The page of a CubeCL pool that holds what has at most [`SMALL`] bytes (`AdaptiveMemory`, 0.11.3).
const SMALL_PAGE: u128 = 8 << 20;
const SMALL: u128 = 64 << 10;

/// The same of a captured step, and what wgpu stages for it: 45 to 91 KB of small models.
const STEP_PAGE: u128 = SMALL_PAGE + (128 << 10);

/// Where buffers begin: a multiple of this on every device.
const ALIGNED: u128 = 512;

/// What a page that is made for so many bytes has beyond them: a MiB, and what rounds it up to whole ones; two at least.
const fn slack(bytes: u128) -> u128 {
    const MIB: u128 = 1 << 20;
    if bytes <= SMALL {
        return 0;
    }
    let page = (bytes + MIB).next_multiple_of(MIB);
    let page = if page < 2 * MIB { 2 * MIB } else { page };
    page - bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shapes;

    const BF16: Held = Held {
        dtype: FloatDType::BF16,
        tf32: false,
        matrices: Matrices::Dense,
        kv: KvFormat::Float,
        beside: 0,
    };
    const NF4: Held = Held { matrices: Matrices::FourBit, ..BF16 };
    const INT8: Held = Held { matrices: Matrices::Int8, ..BF16 };
    /// Of CUDA, of Vulkan, and of a CPU.
    const FUSED: Steps = Steps { captured: true, coded_rows: 128, processors: 132 };
    const DENSE: Steps = Steps { coded_rows: 8, ..FUSED };
    const LAUNCHED: Steps = Steps { captured: false, processors: 0, ..DENSE };

    #[test]
    fn llama_3_8b_takes_what_it_is_known_to() {
        let llama = shapes::named("llama-3-8b").expect("published");
        let load = Workload { batch: 1, positions: 8192, chunk: 2048 };
        let of = |held, load| llama.footprint(held, llama.held_bytes(held), load, FUSED);
        let dense = of(BF16, load);
        assert_eq!(dense.weights, 2 * 8_030_261_248);
        // 128 KiB a position, and 64 angles of two numbers.
        let seen = 4 * 4008;
        assert_eq!(dense.cache, 8192 * (131_072 + 4 * 128) + seen);
        // x and where it was, norm(x), gate and up.
        assert_eq!(dense.activations, 2048 * 2 * (4096 + 4096 + 4096 + 2 * 14_336));
        // 144 MiB and one.
        let small = SMALL_PAGE + (1 << 20) + 512 * 40 * 33;
        assert_eq!((dense.workspace, dense.small), (0, small));
        let four = of(NF4, load);
        // Embedding, head and norms stay.
        let rest = 2 * (2 * 128_256 * 4096 + 65 * 4096);
        assert_eq!(four.weights, four_bit_bytes(8_030_261_248 - rest / 2) + rest);
        assert_eq!(four.workspace, 2 * 2 * 14_336 * 4096);
        assert_eq!(four.activations, dense.activations);
        let step = of(NF4, Workload { chunk: 1, batch: 16, ..load });
        assert_eq!((step.workspace, step.cache), (0, 16 * (8192 * 131_072 + seen) + 8192 * 512));
        let logits = 16 * (2 * 4 * 128_256 + 4 * 4008 + 2 * 2 * 4096);
        assert_eq!(step.activations, logits);
        let eight = of(INT8, load);
        // Of a layer rows of q, k, v, of what leaves attention, of gate, up and down.
        let rows = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14_336 + 4096);
        assert_eq!(eight.weights, 8_030_261_248 - rest / 2 + 4 * rows + rest);
        assert_eq!(eight.workspace, 2 * 14_336 * 4096);
        let bytes = of(Held { kv: KvFormat::Int8, ..BF16 }, load);
        assert_eq!(bytes.cache, 8192 * (32 * 2 * 8 * (128 + 4) + 4 * 128) + seen);
        let attention = 2048 * 2 * (2 * 4096 + 3 * 4096) + 8192 * 1024 * (2 + 8);
        assert_eq!(bytes.activations, attention.max(dense.activations));
        let passing = four.activations + four.workspace;
        assert_eq!(four.passing(), passing);
        assert_eq!(four.total(), four.weights + four.cache + passing + four.small + four.steps);
        // x thrice, q twice, keys and values, gate and up, in f32 sums of two parts of each product, and logits.
        let row = 2 * (3 * 4096 + 2 * 4096 + 2 * 1024 + 2 * 14_336)
            + 8 * (4096 + 2 * 1024 + 4096 + 2 * 14_336 + 4096)
            + 4 * 128_256;
        assert_eq!((four.steps, step.steps), (row + STEP_PAGE, 16 * row + STEP_PAGE));
        // Where no path decodes in registers, a step of 16 has dense copies of a layer's matrices.
        let load = Workload { chunk: 2048, batch: 16, ..load };
        let of = |steps| llama.footprint(NF4, 0, load, steps);
        let layer = 2 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14_336 * 4096);
        assert_eq!(of(DENSE).steps, of(FUSED).steps + layer);
        assert_eq!(of(LAUNCHED), Footprint { steps: 0, ..of(DENSE) });
        // Four parts of 512 x 2048 are as many blocks as there are processors, but for four.
        let small = shapes::named("llama-3.2-1b").expect("published");
        let load = Workload { batch: 1, positions: 512, chunk: 2048 };
        let of = |steps| small.footprint(BF16, 0, load, steps).activations;
        let x = 512 * 2048 * 2;
        assert_eq!(of(FUSED), 2 * x + 512 * 2 * (2048 + 8192) + 4 * 4 * 512 * 2048);
        assert_eq!(of(LAUNCHED), 2 * x + 512 * 2 * (2048 + 2 * 8192));
    }

    #[test]
    fn the_largest_buffer_is_known() {
        let llama = shapes::named("llama-3-8b").expect("published");
        let of = |held, batch, positions| {
            let load = Workload { batch, positions, chunk: 2048 };
            llama.largest_buffer_bytes(held, load, LAUNCHED)
        };
        // Embedding and head, which stay dense, and then keys of a layer.
        assert_eq!(of(BF16, 1, 64), 2 * 128_256 * 4096);
        assert_eq!(of(NF4, 1, 8192), 2 * 128_256 * 4096);
        assert_eq!(of(BF16, 128, 8192), 128 * 8192 * 8 * 128 * 2);
    }

    #[test]
    fn logits_of_all_rows_take_no_more_than_was_planned() {
        for name in shapes::names() {
            let config = shapes::named(name).expect("published");
            for held in [BF16, NF4, INT8] {
                for rows in [1, 16, 2048] {
                    let load = Workload { batch: 1, positions: rows, chunk: rows };
                    let at_once = config.rows_with_logits(held, rows);
                    assert!((1..=rows).contains(&at_once), "{name}: {at_once} of {rows}");
                    let x = config.hidden as u128 * rows as u128 * held.size();
                    let logits = at_once as u128 * config.logits_bytes(held);
                    let planned = config.activation_bytes(held, load, LAUNCHED);
                    assert!(at_once == 1 || x + logits <= planned, "{name}: {logits} {planned}");
                }
            }
        }
        let llama = shapes::named("llama-3-8b").expect("published");
        // norm(x), gate and up of 2048 rows, over logits in f32 of one and what they are made of.
        let fitting = 2048 * 2 * (4096 + 2 * 14_336) / (4 * 128_256 + 2 * 2 * 4096);
        assert_eq!(llama.rows_with_logits(BF16, 2048), fitting);
    }

    #[test]
    fn pages_are_whole() {
        let mib = 1 << 20;
        // What is small lies in the page of that.
        assert_eq!((slack(0), slack(SMALL)), (0, 0));
        assert_eq!(slack(SMALL + 1), 2 * mib - SMALL - 1);
        assert_eq!((slack(mib), slack(mib + 1), slack(5 * mib)), (mib, 2 * mib - 1, mib));
    }

    #[test]
    fn more_takes_more() {
        for name in shapes::names() {
            let config = shapes::named(name).expect("published");
            let of = |batch, positions| {
                config.footprint(NF4, 0, Workload { batch, positions, chunk: 2048 }, FUSED).total()
            };
            assert!(of(1, 64) < of(1, 4096) && of(1, 4096) < of(3, 4096), "{name}");
        }
    }
}
