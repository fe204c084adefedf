//! Fuses norms from their parts, and folds batch norms into the filters of convolutions.

use burn::tensor::TensorData;

use crate::graph::{Attribute, Node, ValueId};

use super::epilogues::flat;
use super::view::{View, in_place_of};

/// Fuses layer norms and RMS norms over the last dimension: first without weights, then with weight
/// and bias.
pub(super) fn rows(view: &mut View<'_>, at: usize) -> Option<()> {
    let node = view.node(at)?;
    let own = match normalised(view, node) {
        Some((x, centred, epsilon)) => {
            let op = if centred { "LayerNormalization" } else { "RMSNormalization" };
            in_place_of(node, op, vec![Some(x)])
                .with("axis", Attribute::Int(-1))
                .with("epsilon", Attribute::Float(epsilon as f32))
        }
        None => {
            let norms = ["LayerNormalization", "RMSNormalization"];
            let width = |id: ValueId| {
                let columns = (*view.dims(node.y()?)?.last()?)?;
                let own = view.constant(id)?;
                (own.count() == columns && own.shape.last() == Some(&columns)).then_some(columns)
            };
            weighted(view, node, &norms, |id| width(id).is_some())?
        }
    };
    view.replace(at, own);
    Some(())
}

/// Matches `(x - mean) / √(mean of squares + ε)` or `x / √(…)`. Returns x, true if the mean is
/// subtracted, and ε.
fn normalised(view: &View<'_>, node: &Node) -> Option<(ValueId, bool, f64)> {
    let root = |id: ValueId| view.made_by(id, "Sqrt")?.x();
    let (far, sum) = match node.op.as_str() {
        "Div" => (node.x()?, root(node.input(1)?)?),
        "Mul" => {
            let [Some(one), Some(other)] = node.inputs[..] else { return None };
            [(one, other), (other, one)].into_iter().find_map(|(far, inverse)| {
                if let Some(own) = view.made_by(inverse, "Reciprocal") {
                    return Some((far, root(own.x()?)?));
                }
                if let Some(own) = view.made_by(inverse, "Div") {
                    let one = view.number(own.x()?) == Some(1.0);
                    return one.then_some((far, root(own.input(1)?)?));
                }
                let power = view.made_by(inverse, "Pow")?;
                (view.number(power.input(1)?) == Some(-0.5)).then_some((far, power.x()?))
            })?
        }
        _ => return None,
    };
    let (mean, epsilon) = view.with_number(view.made_by(sum, "Add")?)?;
    let squares = mean_of_rows(view, mean)?;
    let is_square = match view.made_by(squares, "Pow") {
        Some(own) => own.x() == Some(far) && view.number(own.input(1)?) == Some(2.0),
        None => view.made_by(squares, "Mul")?.inputs == [Some(far), Some(far)],
    };
    if !is_square {
        return None;
    }
    let centred = view.made_by(far, "Sub").and_then(|own| {
        let x = own.x()?;
        (mean_of_rows(view, own.input(1)?)? == x).then_some(x)
    });
    Some((centred.unwrap_or(far), centred.is_some(), epsilon))
}

/// Returns x if a value is its mean over the last dimension, with `keepdims`.
fn mean_of_rows(view: &View<'_>, id: ValueId) -> Option<ValueId> {
    let node = view.made_by(id, "ReduceMean")?;
    let x = node.x()?;
    let axes = match (node.ints("axes"), node.input(1)) {
        (Some(own), _) => own.to_vec(),
        (None, Some(id)) => view.ints(id)?,
        (None, None) => return None,
    };
    let last = view.dims(x)?.len() as i64 - 1;
    (node.int("keepdims") != Some(0) && (axes == [-1] || axes == [last])).then_some(x)
}

/// Adds a weight (`Mul`) or a bias (`Add`) to the norm before a node.
fn weighted(
    view: &View<'_>,
    node: &Node,
    norms: &[&str],
    fits: impl Fn(ValueId) -> bool,
) -> Option<Node> {
    let place = match node.op.as_str() {
        "Mul" => 1,
        "Add" => 2,
        _ => return None,
    };
    let [Some(one), Some(other)] = node.inputs[..] else { return None };
    let (norm, weight) = [(one, other), (other, one)].into_iter().find_map(|(own, weight)| {
        let norm = norms.iter().find_map(|op| view.made_for_one(own, op))?;
        let free = norm.input(place).is_none() && norm.input(2).is_none();
        (free && fits(weight)).then_some((norm, weight))
    })?;
    let mut inputs = norm.inputs.clone();
    inputs.resize(3, None);
    inputs[place] = Some(weight);
    let mut own = in_place_of(node, &norm.op, inputs);
    own.attributes = norm.attributes.clone();
    Some(own)
}

/// Fuses a group norm as torch exports it: an instance norm of the groups between reshapes, then
/// weight and bias per channel.
pub(super) fn groups(view: &mut View<'_>, at: usize) -> Option<()> {
    let node = view.node(at)?;
    let own = match node.op.as_str() {
        "Reshape" => {
            let norm = view.made_for_one(node.x()?, "InstanceNormalization")?;
            let inner = view.made_for_one(norm.x()?, "Reshape")?;
            let (x, y) = (inner.x()?, node.y()?);
            let [batch, groups, _] = view.dims(norm.x()?)?[..] else { return None };
            let own = view.dims(x)?;
            let same = own.len() > 2 && own == view.dims(y)? && batch.is_some() && batch == own[0];
            let all = |at: usize, number: f32| {
                let own = view.floats(norm.input(at)?)?;
                own.iter().all(|own| *own == number).then_some(())
            };
            all(1, 1.0)?;
            all(2, 0.0)?;
            let (groups, channels) = (groups?, own[1]?);
            if !same || channels % groups != 0 {
                return None;
            }
            in_place_of(node, "GroupNormalization", vec![Some(x)])
                .with("num_groups", Attribute::Int(groups as i64))
                .with("epsilon", Attribute::Float(norm.float("epsilon").unwrap_or(1e-5) as f32))
        }
        _ => {
            let fits = |id: ValueId| {
                let channels = || view.dims(node.y()?)?[1];
                channels().is_some_and(|channels| is_per_channel(view, id, channels, node.y()))
            };
            let mut own = weighted(view, node, &["GroupNormalization"], fits)?;
            // The operator takes vectors.
            let changed = own.inputs[1..].iter().flatten().copied();
            let changed: Vec<ValueId> = changed
                .filter(|id| view.constant(*id).is_some_and(|own| own.shape.len() > 1))
                .collect();
            for id in changed {
                let flat = flat(view.constant(id)?.data());
                let flat = view.add_constant(flat);
                own.inputs
                    .iter_mut()
                    .filter(|own| **own == Some(id))
                    .for_each(|own| *own = Some(flat));
            }
            own
        }
    };
    view.replace(at, own);
    Some(())
}

/// Returns true for a constant with one element per channel of an image.
pub(super) fn is_per_channel(
    view: &View<'_>,
    id: ValueId,
    channels: usize,
    image: Option<ValueId>,
) -> bool {
    let rank = image.and_then(|id| view.dims(id)).map(<[_]>::len);
    let (Some(own), Some(rank)) = (view.constant(id), rank) else { return false };
    // From the end: `[channels, 1, 1]` for an image of rank 4.
    let after = rank.checked_sub(2);
    own.count() == channels
        && own.dtype.is_float()
        && own.shape.len() <= rank
        && after.is_some_and(|after| own.shape.len() > after)
        && after.is_some_and(|after| own.shape[own.shape.len() - 1 - after] == channels)
}

/// Folds a batch norm into the convolution before it; elsewhere it becomes `Mul` and `Add`.
pub(super) fn batch(view: &mut View<'_>, at: usize) -> Option<()> {
    let node = view.call(at, "BatchNormalization")?;
    let more = node.outputs.iter().skip(1).flatten().any(|id| !view.readers(*id).is_empty());
    if more || node.int("training_mode") == Some(1) {
        return None;
    }
    let (x, floats) = (node.x()?, |at: usize| view.floats(node.input(at)?));
    let (weight, bias, mean, variance) = (floats(1)?, floats(2)?, floats(3)?, floats(4)?);
    let epsilon = node.float("epsilon").unwrap_or(1e-5) as f32;
    let factor: Vec<f32> =
        weight.iter().zip(&variance).map(|(weight, own)| weight / (own + epsilon).sqrt()).collect();
    let shift = |before: Option<&[f32]>| -> Vec<f32> {
        let each = (0..factor.len()).map(|at| {
            let before = before.map_or(0.0, |own| own[at]);
            (before - mean[at]) * factor[at] + bias[at]
        });
        each.collect()
    };
    let channels = factor.len();
    let dtype = view.dtype(x)?;
    let outputs = node.outputs[..1].to_vec();
    let conv = view.made_for_one(x, "Conv").cloned();
    let filters = conv.as_ref().and_then(|conv| view.constant(conv.input(1)?));
    let filters = filters.filter(|own| own.shape.first() == Some(&channels));
    if let (Some(conv), Some(filters)) = (conv, filters) {
        let before = match conv.input(2) {
            Some(id) => Some(view.floats(id)?),
            None => None,
        };
        let each = filters.count() / channels.max(1);
        let scaled: Vec<f32> = filters
            .data()
            .iter::<f32>()
            .enumerate()
            .map(|(at, own)| own * factor[at / each.max(1)])
            .collect();
        let scaled = TensorData::new(scaled, filters.shape.clone()).convert_dtype(dtype);
        let shift = TensorData::new(shift(before.as_deref()), [channels]).convert_dtype(dtype);
        let (scaled, shift) = (view.add_constant(scaled), view.add_constant(shift));
        let mut own =
            in_place_of(view.node(at)?, "Conv", vec![conv.x(), Some(scaled), Some(shift)]);
        (own.attributes, own.outputs) = (conv.attributes, outputs);
        view.replace(at, own);
        return Some(());
    }
    let mut shape = vec![1; view.dims(x)?.len() - 1];
    shape[0] = channels;
    let data = |own: Vec<f32>| TensorData::new(own, shape.clone()).convert_dtype(dtype);
    let (shift, factor) = (data(shift(None)), data(factor));
    let node = view.node(at)?.clone();
    let (shift, factor) = (view.add_constant(shift), view.add_constant(factor));
    let between = view.add_value(view.ty(x).clone());
    let mut scaled = in_place_of(&node, "Mul", vec![Some(x), Some(factor)]);
    scaled.outputs = vec![Some(between)];
    let mut sum = in_place_of(&node, "Add", vec![Some(between), Some(shift)]);
    sum.outputs = outputs;
    view.replace(at, sum);
    view.insert(at, scaled);
    Some(())
}
