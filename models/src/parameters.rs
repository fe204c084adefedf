//! Layout of all parameters of a decoder in one flat buffer, as training needs it.
//!
//! ```text
//! | matrices of layers | small matrices | head | tables | vectors | small vectors |        each group is contiguous
//! ```
//!
//! Weights, their exact copies, gradients and moments share the layout, so that an optimizer step is one launch per group. A
//! tensor begins at a multiple of [`ALIGNMENT`] elements: devices bind buffers at such offsets, and no block of 8-bit moments
//! contains two tensors. Queries, keys and values are one tensor, as in the decoder. The padding stays 0.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::DecoderConfig;
use crate::names::{Param, Part, Side, Slot};

/// Elements that the offset of a tensor is a multiple of.
pub const ALIGNMENT: usize = 256;

/// Rows that the length of the embedding and of the head is a multiple of in the buffer, so that rows of logits are aligned.
pub const ROWS: usize = 128;

/// Elements below which moments are f32 in 8-bit optimizers: bitsandbytes' `min_8bit_size`.
const SMALL: usize = 4096;

/// Properties that an optimizer distinguishes. The order is that of the buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Group {
    /// False for matrices of layers, which Muon updates.
    pub outer: bool,
    /// False for matrices and tables, whose weights decay.
    pub vector: bool,
    /// True if moments stay f32 in 8-bit optimizers: embeddings, and tensors of fewer than 4096 elements.
    pub exact: bool,
}

/// A tensor of the decoder: one parameter, or several with their rows concatenated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlatTensor {
    /// Parameters, in the order of their rows.
    pub params: Vec<Param>,
    /// Shape of the tensor.
    pub shape: Vec<usize>,
    /// Offset of its first element.
    pub at: usize,
    /// Group that it belongs to.
    pub group: Group,
}

impl FlatTensor {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns true for a tensor without elements, which no decoder has.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of rows in the buffer; those after the shape's own are padding.
    pub fn rows(&self) -> usize {
        match self.params[0].slot {
            Slot::Embedding | Slot::Head => self.shape[0].next_multiple_of(ROWS),
            _ => self.shape[0],
        }
    }

    /// Returns the number of elements in the buffer.
    pub(crate) fn space(&self) -> usize {
        (self.len() / self.shape[0] * self.rows()).next_multiple_of(ALIGNMENT)
    }

    /// Returns each parameter with the range of its elements in the buffer.
    pub fn parts(&self) -> impl Iterator<Item = (&Param, Range<usize>)> {
        let mut from = self.at;
        self.params.iter().map(move |param| {
            let begin = from;
            from += param.shape.iter().product::<usize>();
            (param, begin..from)
        })
    }
}

/// Neighbouring matrices whose gradients are summed, and moved to the host, together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// Matrices of a layer, except small ones.
    Layer(usize),
    /// The head, if it is not tied to the embedding.
    Head,
    /// Embedding and positions.
    Tables,
}

impl Piece {
    /// Returns the piece of a tensor; none for vectors and small matrices of layers.
    fn of(tensor: &FlatTensor) -> Option<Self> {
        match tensor.params[0].slot {
            _ if !tensor.group.on_host() => None,
            Slot::Layer(layer, _) => Some(Self::Layer(layer)),
            Slot::Head => Some(Self::Head),
            _ => Some(Self::Tables),
        }
    }
}

/// All parameters of a decoder in one flat buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameters {
    tensors: Vec<FlatTensor>,
    /// Index of the tensor that begins with a parameter.
    places: BTreeMap<(Slot, Side), usize>,
    groups: Vec<(Group, Range<usize>)>,
    len: usize,
}

impl Parameters {
    /// Lays out the parameters of a decoder.
    pub fn new(config: &DecoderConfig) -> Self {
        let mut tensors: Vec<FlatTensor> = Vec::new();
        for param in config.params() {
            // A query matrix or bias takes the keys and values after it; parameters alternate between both.
            let joined = match param.slot {
                Slot::Layer(layer, Part::Key | Part::Value) => {
                    let query = (Slot::Layer(layer, Part::Query), param.side);
                    tensors.iter_mut().rev().find(|own| own.params[0].place() == query)
                }
                _ => None,
            };
            if let Some(tensor) = joined {
                tensor.shape[0] += param.shape[0];
                tensor.params.push(param);
                continue;
            }
            let (shape, group) = (param.shape.clone(), Group::default());
            tensors.push(FlatTensor { params: vec![param], shape, at: 0, group });
        }
        for tensor in &mut tensors {
            tensor.group = Group::of(tensor);
        }
        tensors.sort_by_key(|tensor| tensor.group);
        let (mut groups, mut len): (Vec<(Group, Range<usize>)>, _) = (Vec::new(), 0);
        for tensor in &mut tensors {
            tensor.at = len;
            len += tensor.space();
            match groups.last_mut() {
                Some((group, range)) if *group == tensor.group => range.end = len,
                _ => groups.push((tensor.group, tensor.at..len)),
            }
        }
        let places = tensors.iter().enumerate();
        let places = places.map(|(index, tensor)| (tensor.params[0].place(), index)).collect();
        Self { tensors, places, groups, len }
    }

    /// Returns the elements of a buffer, padding included.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns true for a buffer without elements, which no decoder has.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the tensors, in the order of the buffer.
    pub fn tensors(&self) -> &[FlatTensor] {
        &self.tensors
    }

    /// Returns the groups and their ranges of the buffer.
    pub fn groups(&self) -> &[(Group, Range<usize>)] {
        &self.groups
    }

    /// Returns the pieces and their ranges of the buffer, in its order. They cover the groups for which [`Group::on_host`] is true.
    pub fn pieces(&self) -> Vec<(Piece, Range<usize>)> {
        let mut pieces: Vec<(Piece, Range<usize>)> = Vec::new();
        for tensor in &self.tensors {
            let Some(piece) = Piece::of(tensor) else { continue };
            let end = tensor.at + tensor.space();
            match pieces.last_mut() {
                Some((last, range)) if *last == piece => range.end = end,
                _ => pieces.push((piece, tensor.at..end)),
            }
        }
        pieces
    }

    /// Returns the tensor that begins with the weight or bias of a slot, if the decoder has it.
    pub fn tensor(&self, slot: Slot, side: Side) -> Option<&FlatTensor> {
        self.places.get(&(slot, side)).map(|index| &self.tensors[*index])
    }
}

impl Group {
    fn of(tensor: &FlatTensor) -> Self {
        let slot = tensor.params[0].slot;
        let vector = tensor.shape.len() == 1;
        let outer = vector || !matches!(slot, Slot::Layer(..));
        let table = matches!(slot, Slot::Embedding | Slot::Positions);
        Self { outer, vector, exact: table || tensor.len() < SMALL }
    }

    /// Returns true if offloading moves the group to host memory: not vectors, and not small matrices, which take next to nothing.
    pub const fn on_host(&self) -> bool {
        !self.vector && (self.outer || !self.exact)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shapes;

    #[test]
    fn tensors_are_apart_and_groups_are_contiguous() {
        for name in shapes::names() {
            let config = shapes::named(name).expect("it is listed");
            let all = Parameters::new(&config);
            let mut end = 0;
            for tensor in all.tensors() {
                assert_eq!(tensor.at, end, "{name} {:?}", tensor.params[0]);
                assert_eq!(tensor.at % ALIGNMENT, 0);
                end = tensor.at + tensor.space();
                let (_, range) =
                    all.groups().iter().find(|(own, _)| *own == tensor.group).expect("its group");
                assert!(range.start <= tensor.at && end <= range.end, "{name}");
            }
            assert_eq!(end, all.len());
            let count: usize = all.tensors().iter().map(FlatTensor::len).sum();
            assert_eq!(count as u64, config.parameters(), "{name}");
            let pieces = all.pieces();
            let moved =
                |(group, range): &(Group, Range<usize>)| group.on_host().then(|| range.len());
            let covered: usize = all.groups().iter().filter_map(moved).sum();
            assert_eq!(
                pieces.iter().map(|(_, range)| range.len()).sum::<usize>(),
                covered,
                "{name}"
            );
            assert!(pieces.is_sorted_by(|(_, a), (_, b)| a.end <= b.start), "{name}");
            let layers =
                pieces.iter().filter(|(piece, _)| matches!(piece, Piece::Layer(_))).count();
            assert_eq!(layers, config.layers.len(), "{name}");
            let qkv = all.tensor(Slot::Layer(0, Part::Query), Side::Weight).expect("each has it");
            assert_eq!(qkv.params.len(), 3, "{name}");
        }
    }
}
