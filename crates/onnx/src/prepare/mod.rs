//! Prepares a model before it is read as a graph: inlines functions, sets named dimensions, sorts
//! nodes.

mod dimensions;
mod functions;
mod scopes;

use std::collections::BTreeMap;

use crate::OnnxError;
use crate::error::invalid;
use crate::proto::{GraphProto, ModelProto, NodeProto};

/// Oldest and newest supported opset of `ai.onnx`.
const OPSETS: [i64; 2] = [1, 27];
/// Maximum nodes of a model after inlining.
const MAX_NODES: usize = 1_000_000;
/// Maximum nesting depth of graphs and functions.
const MAX_DEPTH: usize = 32;

/// Prepares a model. `dimensions` are lengths of named dimensions.
pub(crate) fn prepare(
    model: &mut ModelProto,
    dimensions: &BTreeMap<String, u64>,
) -> Result<(), OnnxError> {
    check_opsets(model)?;
    functions::inline(model)?;
    let graph = model.graph.as_mut().expect("decoded with a graph");
    check_size(graph)?;
    dimensions::set_lengths(graph, dimensions)?;
    scopes::sort(graph)
}

/// Returns true for the domain `ai.onnx`, which has two names.
pub(crate) fn is_standard(domain: &str) -> bool {
    matches!(domain, "" | "ai.onnx")
}

/// Returns the opset of the domain `ai.onnx`.
pub(crate) fn opset(model: &ModelProto) -> Option<i64> {
    let own = model.opset_import.iter().find(|own| is_standard(&own.domain));
    own.map(|own| own.version)
}

fn check_opsets(model: &ModelProto) -> Result<(), OnnxError> {
    let [least, most] = OPSETS;
    match opset(model) {
        Some(version) if !(least..=most).contains(&version) => {
            Err(OnnxError::Opset { domain: "ai.onnx".to_owned(), version, least, most })
        }
        Some(_) => Ok(()),
        None if model.opset_import.is_empty() => Err(invalid("it imports no opset")),
        None => Ok(()),
    }
}

/// Returns the graphs in the attributes of a node.
fn graphs_of(node: &mut NodeProto) -> impl Iterator<Item = &mut GraphProto> {
    node.attribute.iter_mut().flat_map(|own| own.g.iter_mut().chain(&mut own.graphs))
}

fn check_size(graph: &mut GraphProto) -> Result<(), OnnxError> {
    fn count(graph: &mut GraphProto, depth: usize) -> Result<usize, OnnxError> {
        if depth > MAX_DEPTH {
            let what = "levels of nested graphs";
            return Err(OnnxError::Limit { what, have: depth, most: MAX_DEPTH });
        }
        let mut all = graph.node.len();
        for own in graph.node.iter_mut().flat_map(graphs_of) {
            all += count(own, depth + 1)?;
        }
        Ok(all)
    }
    match count(graph, 1)? {
        have if have > MAX_NODES => Err(OnnxError::Limit { what: "nodes", have, most: MAX_NODES }),
        _ => Ok(()),
    }
}
