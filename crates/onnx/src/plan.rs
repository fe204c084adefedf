//! Memory plan of results: lifetimes, and offsets in one buffer, before anything is loaded.
//!
//! A result lives from its producer to the last node that reads it or a view of it. Results of
//! known size that our kernels write are placed in the buffer; results of Burn's operations are
//! allocated when they are computed.

use burn::tensor::DType;
use ops::Lifetime;

use crate::graph::{Graph, Node};

/// Operators whose results our kernels write, on a device that has them.
const PLACED: [&str; 10] = [
    "Conv",
    "GroupNormalization",
    "LayerNormalization",
    "MatMul",
    "RMSNormalization",
    "flashover::Attention",
    "flashover::Conv",
    "flashover::GroupNorm",
    "flashover::Linear",
    "flashover::Pointwise",
];

/// Operators of Burn whose results are new allocations, not views.
const FRESH: [&str; 9] = [
    "ArgMax",
    "AveragePool",
    "GatherND",
    "GlobalAveragePool",
    "LogSoftmax",
    "MaxPool",
    "Softmax",
    "TopK",
    "Where",
];

/// Lifetimes of the results in the buffer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lifetimes {
    /// Blocks of the buffer. A block holds one result, or several that overwrite each other in
    /// place.
    pub(crate) blocks: Vec<Lifetime>,
    /// Block of each result.
    pub(crate) results: Vec<usize>,
    /// Result of each node.
    pub(crate) of_node: Vec<Option<usize>>,
}

impl Lifetimes {
    /// Finds the lifetimes of a graph whose shapes are known.
    pub(crate) fn new(graph: &Graph) -> Self {
        // Results that each value may be a view of.
        let mut holds: Vec<Vec<usize>> = vec![Vec::new(); graph.values.len()];
        let mut own = Self::default();
        // Index of the node that computes each result, and of the last node that reads it.
        let mut made_at = Vec::new();
        let mut ends: Vec<usize> = Vec::new();
        let mut sizes = Vec::new();
        for (at, node) in graph.nodes.iter().enumerate() {
            let mut read: Vec<usize> =
                node.inputs.iter().flatten().flat_map(|id| holds[*id].clone()).collect();
            read.sort_unstable();
            read.dedup();
            read.iter().for_each(|place| ends[*place] = at);
            let size = placed(graph, node);
            own.of_node.push(size.map(|_| sizes.len()));
            if let Some(size) = size {
                let place = sizes.len();
                sizes.push(size);
                made_at.push(at);
                ends.push(at);
                if let Some(Some(id)) = node.outputs.first() {
                    holds[*id] = vec![place];
                }
            } else if !FRESH.contains(&node.op.as_str()) {
                node.outputs.iter().flatten().for_each(|id| holds[*id] = read.clone());
            }
        }
        for id in &graph.outputs {
            holds[*id].iter().for_each(|place| ends[*place] = graph.nodes.len());
        }
        for (result, at) in made_at.iter().enumerate() {
            let before = overwritten(graph, &graph.nodes[*at], &holds);
            let dies = |before: &usize| ends[*before] == *at && sizes[*before] == sizes[result];
            // Time is measured in results.
            let to = made_at.partition_point(|at| *at <= ends[result]);
            match before.filter(dies) {
                Some(before) => {
                    let block = own.results[before];
                    own.blocks[block].to = to;
                    own.results.push(block);
                }
                None => {
                    own.results.push(own.blocks.len());
                    own.blocks.push(Lifetime { size: sizes[result], from: result, to });
                }
            }
        }
        own
    }

    /// Returns the peak of live bytes.
    pub(crate) fn most_at_once(&self) -> u128 {
        let at = |time: usize| {
            let alive = self.blocks.iter().filter(|own| own.from <= time && time < own.to);
            alive.map(|own| own.size).sum::<u128>()
        };
        (0..self.results.len()).map(at).max().unwrap_or(0)
    }
}

/// Returns the result that a node may overwrite in place. An elementwise program reads and writes
/// each element at the same position, if an input has the layout of the result and no other input
/// is a view of it.
fn overwritten(graph: &Graph, node: &Node, holds: &[Vec<usize>]) -> Option<usize> {
    if node.op != "flashover::Pointwise" {
        return None;
    }
    let ty = &graph.values[(*node.outputs.first()?)?].ty;
    let shape = ty.known_shape()?;
    let is_whole = |id: &&usize| graph.values[**id].ty.known_shape().as_ref() == Some(&shape);
    // The result has the layout of the first of these.
    let first = node.inputs.iter().flatten().find(is_whole)?;
    let [own] = holds[*first][..] else { return None };
    let maker = graph.nodes.iter().find(|node| node.outputs.first() == Some(&Some(*first)))?;
    let fresh = placed(graph, maker).is_some() && graph.values[*first].ty.dtype == ty.dtype;
    let mut others = node.inputs.iter().flatten().filter(|id| *id != first);
    (fresh && !others.any(|id| holds[*id].contains(&own))).then_some(own)
}

/// Returns the bytes of a node's result, if it is placed in the buffer.
fn placed(graph: &Graph, node: &Node) -> Option<u128> {
    if !PLACED.contains(&node.op.as_str()) || node.outputs.len() != 1 {
        return None;
    }
    let ty = &graph.values[(*node.outputs.first()?)?].ty;
    let dtype = ty.dtype.filter(|own| matches!(own, DType::F32 | DType::F16 | DType::BF16))?;
    let count: usize = ty.known_shape()?.iter().product();
    (count > 0).then_some(count as u128 * dtype.size() as u128)
}

/// Memory plan of a model for given input shapes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Bytes of the constants on the device.
    pub constants: u128,
    /// Bytes of the inputs.
    pub inputs: u128,
    /// Bytes of the buffer that results share.
    pub arena: u128,
    /// Peak of live bytes of these results.
    pub alive: u128,
    /// Number of results in the buffer.
    pub placed: usize,
    /// Bytes of all results with a known size, without sharing.
    pub results: u128,
    /// Number of results whose size is known only at run time.
    pub unknown: usize,
}

impl Plan {
    pub(crate) fn new(graph: &Graph) -> Self {
        let lifetimes = Lifetimes::new(graph);
        let bytes = |id: &usize| {
            let ty = &graph.values[*id].ty;
            let count: usize = ty.known_shape()?.iter().product();
            Some(count as u128 * ty.dtype?.size() as u128)
        };
        let mut read = vec![false; graph.values.len()];
        let inputs = graph.nodes.iter().flat_map(|node| &node.inputs).flatten();
        inputs.chain(&graph.outputs).for_each(|id| read[*id] = true);
        let constants = (0..graph.values.len())
            .filter(|id| read[*id] && graph.values[*id].constant.is_some())
            .filter_map(|id| bytes(&id));
        let made = || graph.nodes.iter().flat_map(|node| &node.outputs).flatten();
        Self {
            constants: constants.sum(),
            inputs: graph.inputs.iter().filter_map(bytes).sum(),
            arena: ops::places(&lifetimes.blocks).1,
            alive: lifetimes.most_at_once(),
            placed: lifetimes.results.len(),
            results: made().filter_map(bytes).sum(),
            unknown: made().filter(|id| bytes(id).is_none()).count(),
        }
    }
}
