//! Removes reshapes around matmuls, and moves sums before reshapes:
//! `reshape(x·w) + r = reshape(x·w + unshape(r))`. The sum then becomes part of the matmul's
//! epilogue, and reshapes and transposes are views.

use burn::tensor::TensorData;

use crate::graph::{Attribute, Node, Type, ValueId};

use super::epilogues::linear;
use super::view::{View, in_place_of};

/// Maximum nodes between a matmul and a sum.
const MOST: usize = 6;

const MATMULS: [&str; 3] = ["MatMul", "Gemm", "flashover::Linear"];

pub(super) fn rewrite(view: &mut View<'_>, at: usize) -> Option<()> {
    match view.node(at)?.op.as_str() {
        "Reshape" => matmul(view, at),
        "Add" => sum(view, at),
        _ => None,
    }
}

/// Rewrites `[a, b, …] → [a·b, k] → matmul → [a·b, n] → [a, b, n]`, where the dimensions of the
/// rows are merged only for the matmul.
fn matmul(view: &mut View<'_>, at: usize) -> Option<()> {
    let last = view.node(at)?.clone();
    let joined = last.x()?;
    let place = ["Gemm", "MatMul"].iter().find_map(|op| view.producer_index(joined, op));
    let place = place.filter(|_| view.is_read_once(joined))?;
    let node = view.node(place)?.clone();
    let own = linear(view, &node)?;
    let (from, to) = (view.producer_index(node.x()?, "Reshape")?, view.shape(last.y()?)?);
    let x = view.node(from)?.x()?;
    let (have, rows) = (view.shape(x)?, view.shape(node.x()?)?);
    let (n, outer) = to.split_last()?;
    let whole = outer.len() > 1 && have.get(..outer.len()) == Some(outer);
    let fits = whole && rows.len() == 2 && outer.iter().product::<usize>() == rows[0];
    if !fits || view.shape(joined)? != [rows[0], *n] {
        return None;
    }
    let shape = [outer, &rows[1..]].concat();
    let x = match have == shape {
        true => x,
        false => {
            let ty = Type {
                dtype: view.dtype(x),
                shape: Some(shape.iter().map(|len| Some(*len)).collect()),
            };
            let lengths: Vec<i64> = shape.iter().map(|len| *len as i64).collect();
            let lengths = view.add_constant(TensorData::new(lengths, [shape.len()]));
            let to = view.add_value(ty);
            let own = in_place_of(&last, "Reshape", vec![Some(x), Some(lengths)]);
            view.insert(at, Node { outputs: vec![Some(to)], ..own });
            to
        }
    };
    let mut inputs = own.inputs.clone();
    inputs[0] = Some(x);
    view.remove(place);
    view.replace(at, Node { inputs, outputs: last.outputs, ..own });
    Some(())
}

fn sum(view: &mut View<'_>, at: usize) -> Option<()> {
    let sum = view.call(at, "Add")?.clone();
    let [Some(one), Some(other)] = sum.inputs[..] else { return None };
    let (moved, rest) = [(one, other), (other, one)].into_iter().find_map(|(own, rest)| {
        let moved = moved(view, own)?;
        let same = view.shape(own).is_some() && view.shape(own) == view.shape(rest);
        (same && view.constant(rest).is_none()).then_some((moved, rest))
    })?;
    let matmul = moved.first()?.1.x()?;
    // Undo the moves on the addend, last to first.
    let mut addend = rest;
    for (_, node) in moved.iter().rev() {
        addend = undone(view, at, node, addend)?;
    }
    // Then move the sum, first to last.
    let between = view.add_value(view.ty(matmul).clone());
    let mut own = in_place_of(&sum, "Add", vec![Some(matmul), Some(addend)]);
    own.outputs = vec![Some(between)];
    let mut last = between;
    let count = moved.len();
    let places: Vec<usize> = moved.iter().map(|(place, _)| *place).collect();
    let mut nodes = vec![own];
    for (step, (_, node)) in moved.into_iter().enumerate() {
        let to = match step + 1 == count {
            true => sum.y()?,
            false => view.add_value(view.ty(node.y()?).clone()),
        };
        let mut inputs = node.inputs.clone();
        inputs[0] = Some(last);
        nodes.push(Node { inputs, outputs: vec![Some(to)], ..node });
        last = to;
    }
    places.into_iter().for_each(|place| view.remove(place));
    let last = nodes.pop()?;
    view.replace(at, last);
    nodes.into_iter().for_each(|node| view.insert(at, node));
    Some(())
}

/// Returns the nodes that only move the elements of a matmul, first to last, with their indices.
fn moved(view: &View<'_>, id: ValueId) -> Option<Vec<(usize, Node)>> {
    let (mut found, mut id) = (Vec::new(), id);
    while found.len() < MOST && view.is_read_once(id) {
        let moves = ["Reshape", "Transpose", "Squeeze", "Unsqueeze"];
        let Some(place) = moves.iter().find_map(|op| view.producer_index(id, op)) else { break };
        let node = view.node(place)?.clone();
        view.shape(id)?;
        id = node.x()?;
        view.shape(id)?;
        found.push((place, node));
    }
    found.reverse();
    let is_matmul = MATMULS.iter().chain(&["Add"]).any(|op| view.made_for_one(id, op).is_some());
    (is_matmul && !found.is_empty() && has_matmul(view, id)).then_some(found)
}

/// Returns true for a matmul with a constant matrix, or its sum with a bias.
fn has_matmul(view: &View<'_>, id: ValueId) -> bool {
    let matmul = |id: ValueId| {
        let node = MATMULS.iter().find_map(|op| view.made_for_one(id, op));
        node.and_then(|node| node.input(1)).is_some_and(|weight| view.constant(weight).is_some())
    };
    let biased = |node: &Node| {
        let biased = node.inputs.iter().flatten().any(|id| view.constant(*id).is_some());
        biased && node.inputs.iter().flatten().any(|id| matmul(*id))
    };
    matmul(id) || view.made_for_one(id, "Add").is_some_and(biased)
}

/// Inserts the inverse of a node on a value, before the node at an index.
fn undone(view: &mut View<'_>, at: usize, node: &Node, id: ValueId) -> Option<ValueId> {
    let ty = view.ty(node.x()?).clone();
    let to = view.add_value(ty.clone());
    let own = match node.op.as_str() {
        "Transpose" => {
            let rank = ty.shape.as_ref()?.len();
            let order =
                node.ints("perm").map_or_else(|| (0..rank as i64).rev().collect(), <[i64]>::to_vec);
            let mut back = vec![0; order.len()];
            order.iter().enumerate().for_each(|(to, from)| back[*from as usize] = to as i64);
            in_place_of(node, "Transpose", vec![Some(id)]).with("perm", Attribute::Ints(back))
        }
        _ => {
            let shape: Vec<i64> = ty.known_shape()?.iter().map(|len| *len as i64).collect();
            let len = shape.len();
            let shape = view.add_constant(TensorData::new(shape, [len]));
            in_place_of(node, "Reshape", vec![Some(id), Some(shape)])
        }
    };
    view.insert(at, Node { outputs: vec![Some(to)], ..own });
    Some(to)
}
