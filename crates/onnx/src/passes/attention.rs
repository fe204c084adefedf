//! Fuses `softmax(α · q·kᵀ + mask) · v` from its parts.
//!
//! A fully masked row (-∞ everywhere) returns 0. Exporters write `Where(IsNaN(softmax), 0,
//! softmax)` for this; without it, the separate nodes would return NaN.

use crate::graph::{Attribute, Node, ValueId};

use super::view::{View, in_place_of};

/// Scores: a matmul with its scale and its mask.
struct Scores {
    q: ValueId,
    /// k, with its last two dimensions transposed.
    transposed: ValueId,
    scale: f64,
    mask: Option<ValueId>,
}

pub(super) fn rewrite(view: &mut View<'_>, at: usize) -> Option<()> {
    let node = view.call(at, "MatMul")?;
    let (weights, v) = (node.x()?, node.input(1)?);
    let softmax = softmax(view, weights)?;
    let rank = view.dims(softmax.x()?)?.len();
    // Until opset 12 the default axis is another one.
    let axis = softmax.int("axis")?;
    if (axis != -1 && axis != rank as i64 - 1) || !(3..=4).contains(&rank) {
        return None;
    }
    let Scores { q, transposed, scale, mask } = scores(view, softmax.x()?)?;
    let (q, by) = scaled(view, q);
    let (transposed, more) = scaled(view, transposed);
    let scale = scale * by * more;
    // All operands have the same rank and heads.
    let fits =
        [q, transposed, v].iter().all(|id| view.dims(*id).is_some_and(|own| own.len() == rank));
    let heads = |id: ValueId| view.dims(id).map(|own| &own[..rank - 2]);
    let known = || heads(q).is_some_and(|own| own.iter().all(Option::is_some));
    if !fits || !known() || heads(q) != heads(transposed) || heads(q) != heads(v) {
        return None;
    }
    let node = node.clone();
    let k = swapped(view, at, transposed)?;
    let mut inputs = vec![Some(q), Some(k), Some(v)];
    inputs.extend(mask.map(Some));
    let own = in_place_of(&node, "flashover::Attention", inputs)
        .with("scale", Attribute::Float(scale as f32));
    view.replace(at, own);
    Some(())
}

/// Returns the softmax that computes the weights, with or without the NaN guard.
fn softmax<'a>(view: &'a View<'_>, weights: ValueId) -> Option<&'a Node> {
    let Some(guard) = view.made_for_one(weights, "Where") else {
        return view.made_for_one(weights, "Softmax");
    };
    let own = guard.input(2)?;
    let is_guard = view.made_for_one(guard.x()?, "IsNaN")?.x() == Some(own);
    let only = view.readers(own).len() == 2 && !view.is_output(own);
    (is_guard && only && view.number(guard.input(1)?) == Some(0.0))
        .then(|| view.made_by(own, "Softmax"))?
}

fn scores(view: &View<'_>, id: ValueId) -> Option<Scores> {
    if let Some(sum) = view.made_for_one(id, "Add") {
        let [Some(one), Some(other)] = sum.inputs[..] else { return None };
        return [(one, other), (other, one)].into_iter().find_map(|(own, mask)| {
            let scores = matmul(view, own)?;
            // The mask must broadcast to the scores, not the scores to the mask.
            let (whole, part) = (view.dims(own)?, view.dims(mask)?);
            let from = whole.len().checked_sub(part.len())?;
            let fits = part
                .iter()
                .zip(&whole[from..])
                .all(|(part, whole)| *part == Some(1) || (part.is_some() && part == whole));
            (fits && part.last() == whole.last()).then_some(Scores { mask: Some(mask), ..scores })
        });
    }
    matmul(view, id)
}

fn matmul(view: &View<'_>, id: ValueId) -> Option<Scores> {
    let (own, scale) = scaled(view, id);
    let node = view.made_for_one(own, "MatMul")?;
    Some(Scores { q: node.x()?, transposed: node.input(1)?, scale, mask: None })
}

/// Splits `value · number` with one reader; the number is 1 for other values.
fn scaled(view: &View<'_>, id: ValueId) -> (ValueId, f64) {
    let factor = || {
        if let Some(node) = view.made_for_one(id, "Mul") {
            return view.with_number(node);
        }
        let node = view.made_for_one(id, "Div")?;
        Some((node.x()?, 1.0 / view.number(node.input(1)?)?))
    };
    factor().unwrap_or((id, 1.0))
}

/// Returns a value with its last two dimensions transposed; inserts a `Transpose` before the node
/// at an index if needed.
fn swapped(view: &mut View<'_>, at: usize, id: ValueId) -> Option<ValueId> {
    let rank = view.dims(id)?.len();
    let mut order: Vec<i64> = (0..rank as i64).collect();
    order.swap(rank - 1, rank - 2);
    if let Some(own) = view.made_by(id, "Transpose").filter(|own| own.ints("perm") == Some(&order))
    {
        return own.x();
    }
    let mut ty = view.ty(id).clone();
    if let Some(shape) = &mut ty.shape {
        shape.swap(rank - 1, rank - 2);
    }
    let to = view.add_value(ty);
    let node = Node {
        outputs: vec![Some(to)],
        ..in_place_of(view.node(at)?, "Transpose", vec![Some(id)])
    };
    view.insert(at, node.with("perm", Attribute::Ints(order)));
    Some(to)
}
