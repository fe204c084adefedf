//! Type inference and constant folding.
//!
//! Nodes with constant inputs run once, on the host. `Shape` of a value with a known shape is a
//! constant, and so are known dimensions of a partly known shape. So shape computations of an
//! exported graph become constants once the input shapes are known.

use std::sync::Arc;

use burn::tensor::{DType, TensorData};

use crate::array::{Array, scalar_of};
use crate::devices::Devices;
use crate::graph::{Attribute, Graph, Node, Type, Value, ValueId};
use crate::limits::fits;
use crate::ops::{Inputs, operator};
use crate::tensor::Constant;
use crate::{rules, types};

/// Maximum bytes by which a folded constant may exceed its inputs.
const MOST_BYTES: usize = 1 << 20;

/// Infers types, and replaces nodes that depend only on constants.
pub(crate) fn fold(graph: &mut Graph, opset: i64, host: &Arc<Devices>) {
    let nodes = std::mem::take(&mut graph.nodes);
    for mut node in nodes {
        fold_subgraphs(graph, &mut node, opset, host);
        let types = match node.attributes.values().any(|own| matches!(own, Attribute::Graph(..))) {
            true => branch_types(&node),
            false => infer(graph, &node, opset, host),
        };
        for (id, ty) in node.outputs.iter().zip(types) {
            if let Some(id) = id {
                graph.values[*id].ty.refine(ty);
            }
        }
        if inline_if(graph, &node).is_some() || replace_sequence_at(graph, &node).is_some() {
            continue;
        }
        match constants(graph, &node, opset, host) {
            Some(made) => {
                for (id, data) in node.outputs.iter().zip(made) {
                    if let Some(id) = id {
                        graph.values[*id].set(data);
                    }
                }
            }
            None => graph.nodes.push(node),
        }
    }
}

/// Replaces `SequenceAt` of a `SplitToSequence` by a slice.
fn replace_sequence_at(graph: &mut Graph, node: &Node) -> Option<()> {
    if node.op != "SequenceAt" {
        return None;
    }
    let [Some(sequence), Some(place)] = node.inputs[..] else { return None };
    let place = graph.values[place].constant.as_ref()?.data().iter::<i64>().next()?;
    let split =
        graph.nodes.iter().rev().find(|own| {
            own.op == "SplitToSequence" && own.outputs.first() == Some(&Some(sequence))
        })?;
    let x = split.inputs.first().copied()??;
    let shape = graph.values[x].ty.shape.clone()?;
    let int = |name: &str, usual: i64| match split.attributes.get(name) {
        Some(Attribute::Int(own)) => *own,
        _ => usual,
    };
    let at = crate::ops::axis(int("axis", 0), shape.len()).ok()?;
    let sizes = match split.inputs.get(1).copied().flatten() {
        Some(id) => Some(graph.values[id].constant.as_ref()?.data()),
        None => None,
    };
    // One size for all parts except the last, or one size per part.
    let (from, to) = match &sizes {
        Some(own) if own.shape().rank() == 1 => {
            let sizes: Vec<i64> = own.iter::<i64>().collect();
            let place = if place < 0 { place + sizes.len() as i64 } else { place };
            let place = usize::try_from(place).ok().filter(|own| *own < sizes.len())?;
            let from: i64 = sizes[..place].iter().sum();
            (from, from + sizes[place])
        }
        own => {
            let size = own.as_ref().map_or(Some(1), |own| own.iter::<i64>().next())?;
            let size = Some(size).filter(|own| *own > 0)?;
            let len = i64::try_from(shape[at]?).ok()?;
            let place = if place < 0 {
                place + len.div_euclid(size) + i64::from(len % size > 0)
            } else {
                place
            };
            let from = place.checked_mul(size).filter(|from| (0..len).contains(from))?;
            (from, from.saturating_add(size).min(len))
        }
    };
    let squeezes = sizes.is_none() && int("keepdims", 1) == 0;
    let mut constant = |values: Vec<i64>| {
        let len = values.len();
        let mut value =
            Value { name: format!("{}.{}", node.name, graph.values.len()), ..Value::default() };
        value.set(Constant::new(TensorData::new(values, [len])));
        graph.values.push(value);
        Some(graph.values.len() - 1)
    };
    let axis = constant(vec![at as i64]);
    let (starts, ends) = (constant(vec![from]), constant(vec![to]));
    let between = graph.values.len();
    graph.values.push(Value { name: format!("{}.slice", node.name), ..Value::default() });
    let sliced = if squeezes { vec![Some(between)] } else { node.outputs.clone() };
    let own = |op: &str, inputs: Vec<Option<ValueId>>, outputs| Node {
        op: op.to_owned(),
        name: node.name.clone(),
        given: inputs.len(),
        inputs,
        outputs,
        ..Node::default()
    };
    graph.nodes.push(own("Slice", vec![Some(x), starts, ends, axis], sliced));
    if squeezes {
        graph.nodes.push(own("Squeeze", vec![Some(between), axis], node.outputs.clone()));
    }
    Some(())
}

/// Replaces an `If` with a constant condition by the nodes of the branch.
fn inline_if(graph: &mut Graph, node: &Node) -> Option<()> {
    let condition = graph.values[node.inputs.first().copied()??].constant.as_ref()?;
    if node.op != "If" {
        return None;
    }
    let taken = condition.data().iter::<bool>().next()?;
    let name = if taken { "then_branch" } else { "else_branch" };
    let Some(Attribute::Graph(part, from)) = node.attributes.get(name) else { return None };
    let mut ids: Vec<Option<ValueId>> = vec![None; part.values.len()];
    for (at, id) in part.captured.iter().enumerate() {
        ids[*id] = node.inputs[from + at];
    }
    for (id, value) in part.values.iter().enumerate().filter(|own| !part.captured.contains(&own.0))
    {
        ids[id] = Some(graph.values.len());
        let name = format!("{}.{}", node.name, value.name);
        graph.values.push(Value { name, ..value.clone() });
    }
    let moved = |own: &[Option<ValueId>]| -> Vec<_> {
        own.iter().map(|id| id.and_then(|id| ids[id])).collect()
    };
    for own in &part.nodes {
        let (inputs, outputs) = (moved(&own.inputs), moved(&own.outputs));
        graph.nodes.push(Node { inputs, outputs, ..own.clone() });
    }
    for (to, from) in node.outputs.iter().zip(&part.outputs) {
        let (Some(to), Some(from)) = (*to, ids[*from]) else { continue };
        match graph.values[from].constant.clone() {
            Some(data) => graph.values[to].set(data),
            None => {
                let ty = graph.values[from].ty.clone();
                graph.values[to].ty.refine(ty);
                graph.nodes.push(Node {
                    op: "Identity".to_owned(),
                    inputs: vec![Some(from)],
                    given: 1,
                    outputs: vec![Some(to)],
                    ..Node::default()
                });
            }
        }
    }
    Some(())
}

/// Folds the subgraphs of a node, given the types of captured values.
fn fold_subgraphs(graph: &Graph, node: &mut Node, opset: i64, host: &Arc<Devices>) {
    let Node { attributes, inputs, .. } = node;
    for own in attributes.values_mut() {
        let Attribute::Graph(part, from) = own else { continue };
        for (at, id) in part.captured.clone().into_iter().enumerate() {
            let Some(outer) = inputs[*from + at] else { continue };
            let value = &mut part.values[id];
            value.ty = graph.values[outer].ty.clone();
            if let Some(data) = &graph.values[outer].constant {
                value.set(data.clone());
            }
        }
        fold(part, opset, host);
    }
}

/// Infers the output types of a node: by a run on zeros if it is cheap, by rules, by onnx-ir, by a
/// small run.
fn infer(graph: &Graph, node: &Node, opset: i64, host: &Arc<Devices>) -> Vec<Type> {
    // A run on zeros would not fit in memory.
    let large = |own: &Type| {
        own.known_shape()
            .is_some_and(|shape| fits(&shape, own.dtype.unwrap_or(DType::F32), &host.host).is_err())
    };
    if let Some(grown) = rules::large_result(graph, node).filter(large) {
        return vec![grown];
    }
    let moved = if rules::moves(&node.op) { run_on_zeros(graph, node, opset, host) } else { None };
    moved
        .or_else(|| rules::infer(graph, node))
        .or_else(|| types::infer(graph, node, opset))
        .or_else(|| run_on_zeros(graph, node, opset, host))
        .unwrap_or_default()
}

/// Returns the output types that both branches of an `If` have.
fn branch_types(node: &Node) -> Vec<Type> {
    let unknown = vec![Type::default(); node.outputs.len()];
    if node.op != "If" {
        return unknown;
    }
    let types = |name: &str| match node.attributes.get(name) {
        Some(Attribute::Graph(part, _)) => {
            Some(part.outputs.iter().map(|id| part.values[*id].ty.clone()).collect::<Vec<_>>())
        }
        _ => None,
    };
    match (types("then_branch"), types("else_branch")) {
        (Some(then), Some(other)) => {
            then.iter().zip(&other).map(|(one, other)| one.intersect(other)).collect()
        }
        _ => unknown,
    }
}

/// Returns the outputs of a node that depends only on constants.
fn constants(graph: &Graph, node: &Node, opset: i64, host: &Arc<Devices>) -> Option<Vec<Constant>> {
    if let Some(known) = shape_constant(graph, node) {
        return Some(vec![Constant::new(known)]);
    }
    let random = ["RandomNormal", "RandomUniform", "Multinomial", "Bernoulli", "Dropout"];
    let quantised = node.op == "DequantizeLinear";
    if quantised || random.iter().any(|op| node.op.starts_with(op)) {
        return None;
    }
    let bytes = |ty: &Type| {
        let shape = ty.known_shape()?;
        shape.iter().try_fold(ty.dtype?.size(), |all, own| all.checked_mul(*own))
    };
    let mut read = 0;
    let mut inputs = Vec::new();
    for id in &node.inputs {
        match id {
            None => inputs.push(None),
            Some(id) => {
                let data = graph.values[*id].constant.as_ref()?;
                read += data.bytes().len();
                inputs.push(Some(data));
            }
        }
    }
    let made = node.outputs.iter().flatten().map(|id| bytes(&graph.values[*id].ty));
    let grows =
        ["ConstantOfShape", "Expand", "Tile", "Range", "Pad", "Resize", "OneHot", "EyeLike"];
    match made.sum::<Option<usize>>() {
        Some(made) if made > read + MOST_BYTES => return None,
        None if read > MOST_BYTES || grows.contains(&node.op.as_str()) => return None,
        _ => {}
    }
    let run = operator(node, opset, host).ok()?;
    let all: Vec<_> =
        inputs.iter().map(|own| own.map(|own| Array::from_data(own.data(), &host.host))).collect();
    let inputs = Inputs::new(&all, host);
    let made = crate::run::caught(|| run(&inputs)).ok()?;
    made.iter().map(|own| own.to_data().ok().map(Constant::new)).collect()
}

/// Infers output types by a run on zeros. It takes no memory for operators that only move elements.
fn run_on_zeros(graph: &Graph, node: &Node, opset: i64, host: &Arc<Devices>) -> Option<Vec<Type>> {
    const OF_VALUES: [&str; 4] = ["Compress", "NonMaxSuppression", "NonZero", "Unique"];
    if OF_VALUES.contains(&node.op.as_str()) {
        return None;
    }
    let cheap = rules::moves(&node.op);
    let mut all = Vec::new();
    for (at, id) in node.inputs.iter().enumerate() {
        let Some(id) = id else {
            all.push(None);
            continue;
        };
        let Value { ty, constant, .. } = &graph.values[*id];
        all.push(Some(match constant {
            Some(data) => Array::from_data(data.data(), &host.host),
            // Lengths, axes and factors must be constants.
            None if cheap && (at > 0 || node.op == "ConstantOfShape") => return None,
            None => {
                let (dtype, shape) = (ty.dtype?, ty.known_shape()?);
                // Integers may be indices or lengths.
                let told = at > 0 && !dtype.is_float() && shape.len() < 2;
                if !cheap && (told || shape.iter().product::<usize>() > MOST_BYTES) {
                    return None;
                }
                Array::full(&[], scalar_of(0.0, dtype), dtype, &host.host).expand(&shape)
            }
        }));
    }
    let run = operator(node, opset, host).ok()?;
    let inputs = Inputs::new(&all, host);
    let made = crate::run::caught(|| run(&inputs)).ok()?;
    let ty = |own: &Array| {
        let shape = own.shape().into_iter().map(Some).collect();
        Type { dtype: Some(own.dtype()), shape: Some(shape) }
    };
    Some(made.iter().map(ty).collect())
}

/// Folds `Shape` and `Size`, and `Gather` of known dimensions.
fn shape_constant(graph: &Graph, node: &Node) -> Option<TensorData> {
    let input = |at: usize| graph.values.get(node.inputs.get(at).copied()??);
    match node.op.as_str() {
        "Size" => {
            let count = input(0)?.ty.known_shape()?.iter().product::<usize>() as i64;
            Some(TensorData::new(vec![count], Vec::<usize>::new()))
        }
        "Shape" => {
            let known = dimensions(graph, node)?.into_iter().collect::<Option<Vec<_>>>()?;
            let len = known.len();
            Some(TensorData::new(known, vec![len]))
        }
        "Gather" => {
            let shape = graph
                .nodes
                .iter()
                .rev()
                .find(|own| own.op == "Shape" && own.outputs.first() == node.inputs.first())?;
            let all = dimensions(graph, shape)?;
            let which = input(1)?.constant.as_ref()?;
            let at = |own: i64| {
                let own = if own < 0 { own + all.len() as i64 } else { own };
                *all.get(usize::try_from(own).ok()?)?
            };
            let known = which.data().iter::<i64>().map(at).collect::<Option<Vec<_>>>()?;
            Some(TensorData::new(known, which.shape.clone()))
        }
        _ => None,
    }
}

/// Returns the dimensions that a `Shape` node returns.
fn dimensions(graph: &Graph, node: &Node) -> Option<Vec<Option<i64>>> {
    let shape = graph.values[node.inputs.first().copied()??].ty.shape.as_ref()?;
    let at = |name: &str, usual: i64| match node.attributes.get(name) {
        Some(Attribute::Int(own)) => *own,
        _ => usual,
    };
    let rank = shape.len() as i64;
    let place = |own: i64| (if own < 0 { own + rank } else { own }).clamp(0, rank) as usize;
    let (from, to) = (place(at("start", 0)), place(at("end", rank)));
    let part = shape.get(from..to.max(from))?;
    Some(part.iter().map(|own| own.map(|own| own as i64)).collect())
}
