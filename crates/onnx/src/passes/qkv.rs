//! Merges matmuls of one input with several matrices into one matmul: Q, K and V of an attention,
//! or the embeddings of a time step.

use std::collections::BTreeMap;

use burn::tensor::TensorData;

use crate::graph::{Attribute, Node, Type, ValueId};

use super::epilogues::flat;
use super::view::{View, in_place_of};

/// A matmul that can be merged with others of the same input.
struct Part {
    place: usize,
    node: Node,
    weight: ValueId,
    bias: Option<ValueId>,
    transposed: bool,
    columns: usize,
}

pub(super) fn rewrite(view: &mut View<'_>, at: usize) -> Option<()> {
    let first = part(view, at)?;
    let x = first.node.x()?;
    let mut places = view.readers(x).to_vec();
    places.sort_unstable();
    places.dedup();
    let same = |own: &Part| {
        own.node.x() == Some(x)
            && own.transposed == first.transposed
            && own.bias.is_some() == first.bias.is_some()
            && view.constant(own.weight).map(|own| own.dtype)
                == view.constant(first.weight).map(|own| own.dtype)
    };
    let parts: Vec<Part> =
        places.into_iter().filter_map(|place| part(view, place)).filter(same).collect();
    if parts.len() < 2 || parts[0].place != at {
        return None;
    }
    let columns: Vec<usize> = parts.iter().map(|own| own.columns).collect();
    let all: usize = columns.iter().sum();
    let weights: Vec<TensorData> =
        parts.iter().map(|own| Some(view.constant(own.weight)?.data())).collect::<Option<_>>()?;
    let axis = usize::from(!first.transposed);
    let weight = joined(&weights, axis);
    let bias = match first.bias {
        None => None,
        Some(_) => {
            let each = parts.iter().map(|own| Some(flat(view.constant(own.bias?)?.data())));
            Some(joined(&each.collect::<Option<Vec<_>>>()?, 0))
        }
    };
    let mut ty = view.ty(first.node.y()?).clone();
    if let Some(last) = ty.shape.as_mut().and_then(|shape| shape.last_mut()) {
        *last = Some(all);
    }
    let weight = view.add_constant(weight);
    let bias = bias.map(|bias| view.add_constant(bias));
    let whole = view.add_value(Type { ..ty });
    let sizes = TensorData::new(columns.iter().map(|own| *own as i64).collect(), [columns.len()]);
    let sizes = view.add_constant(sizes);
    let mut matmul =
        in_place_of(&first.node, "flashover::Linear", vec![Some(x), Some(weight), bias]);
    matmul.outputs = vec![Some(whole)];
    matmul.attributes =
        BTreeMap::from([("transB".to_owned(), Attribute::Int(i64::from(first.transposed)))]);
    let mut split = in_place_of(&first.node, "Split", vec![Some(whole), Some(sizes)])
        .with("axis", Attribute::Int(-1));
    split.outputs = parts.iter().map(|own| own.node.y()).collect();
    parts.iter().for_each(|own| view.remove(own.place));
    view.replace(at, split);
    view.insert(at, matmul);
    Some(())
}

/// Returns the node at an index if it is a matmul with a constant matrix, with at most a bias.
fn part(view: &View<'_>, place: usize) -> Option<Part> {
    let node = view.node(place)?;
    let known = ["bias", "transB", "beta"];
    let plain = match node.op.as_str() {
        "MatMul" => node.given == 2,
        "Gemm" => {
            let one = |name: &str| node.float(name).is_none_or(|own| own == 1.0);
            one("alpha") && one("beta") && node.int("transA").unwrap_or(0) == 0
        }
        "flashover::Linear" => {
            node.inputs.iter().skip(3).all(Option::is_none)
                && node.attributes.keys().all(|name| known.contains(&name.as_str()))
        }
        _ => false,
    };
    let weight = node.input(1)?;
    let own = view.constant(weight).filter(|own| own.shape.len() == 2 && own.dtype.is_float())?;
    let transposed = node.int("transB") == Some(1);
    let columns = own.shape[usize::from(!transposed)];
    let bias = node.input(2);
    if let Some(bias) = bias {
        view.constant(bias).filter(|own| own.count() == columns)?;
    }
    // A vector x would lose its dimension.
    let rank = view.dims(node.x()?)?.len();
    (plain && rank >= 2).then(|| Part {
        place,
        node: node.clone(),
        weight,
        bias,
        transposed,
        columns,
    })
}

/// Concatenates matrices of one dtype along an axis.
fn joined(all: &[TensorData], axis: usize) -> TensorData {
    let mut shape = all[0].shape().to_vec();
    let size = all[0].dtype().size();
    shape[axis] = all.iter().map(|own| own.shape()[axis]).sum();
    let rows: usize = shape[..axis].iter().product();
    let mut bytes = Vec::with_capacity(shape.iter().product::<usize>() * size);
    for row in 0..rows {
        for own in all {
            let width = own.shape()[axis..].iter().product::<usize>() * size;
            bytes.extend_from_slice(&own.as_bytes()[row * width..(row + 1) * width]);
        }
    }
    TensorData::from_bytes_vec(bytes, shape, all[0].dtype())
}
