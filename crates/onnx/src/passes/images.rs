//! Fuses nodes before a convolution or group norm: padding, upsampling by two, concatenated
//! channels.

use crate::graph::{Attribute, Node, ValueId};

use super::epilogues::operand::SECOND;
use super::view::{View, in_place_of};

/// Fuses zero padding into the convolution that reads it.
pub(super) fn pad(view: &mut View<'_>, at: usize) -> Option<()> {
    let node = view.call(at, "Conv")?;
    let before = view.made_for_one(node.x()?, "Pad")?;
    let image = before.x()?;
    let rank = view.dims(image)?.len();
    let constant = before.text("mode").is_none_or(|own| own == "constant");
    let zero = match (before.float("value"), before.input(2)) {
        (Some(own), _) => own == 0.0,
        (None, Some(id)) => view.number(id) == Some(0.0),
        (None, None) => true,
    };
    let more = match before.ints("pads") {
        Some(own) => own.to_vec(),
        None => view.ints(before.input(1)?)?,
    };
    let plain = node.text("auto_pad").is_none_or(|own| own == "NOTSET" || own == "VALID");
    if !constant
        || !zero
        || !plain
        || before.input(3).is_some()
        || more.len() != 2 * rank
        || rank < 3
    {
        return None;
    }
    let outer = [more[0], more[1], more[rank], more[rank + 1]];
    if outer != [0; 4] || more.iter().any(|own| *own < 0) {
        return None;
    }
    let mut pads = node.ints("pads").map_or_else(|| vec![0; 2 * (rank - 2)], <[i64]>::to_vec);
    for (side, own) in pads.iter_mut().enumerate() {
        let (end, axis) = (side / (rank - 2), side % (rank - 2));
        *own += more[end * rank + 2 + axis];
    }
    let mut own = node.clone();
    own.inputs[0] = Some(image);
    own.attributes.remove("auto_pad");
    view.replace(at, own.with("pads", Attribute::Ints(pads)));
    Some(())
}

/// Fuses nearest-neighbour upsampling by two and concatenated channels into convolutions and group
/// norms.
pub(super) fn rewrite(view: &mut View<'_>, at: usize) -> Option<()> {
    let node = view.node(at)?;
    match node.op.as_str() {
        "Conv" | "flashover::Conv" => doubled(view, at).or_else(|| second(view, at, SECOND)),
        "GroupNormalization" | "flashover::GroupNorm" => second(view, at, 3),
        _ => None,
    }
}

fn doubled(view: &mut View<'_>, at: usize) -> Option<()> {
    let node = view.node(at)?;
    let resize = view.made_for_one(node.x()?, "Resize")?;
    let (x, large) = (resize.x()?, node.x()?);
    let (small, large) = (view.shape(x)?, view.shape(large)?);
    let twice = small.len() == 4 && large == [small[0], small[1], 2 * small[2], 2 * small[3]];
    let place = resize.text("coordinate_transformation_mode").unwrap_or("half_pixel");
    let round = resize.text("nearest_mode").unwrap_or("round_prefer_floor");
    let plain = match place {
        "asymmetric" => round == "floor",
        "half_pixel" | "pytorch_half_pixel" => round.starts_with("round"),
        _ => false,
    };
    let nearest = resize.text("mode").is_none_or(|own| own == "nearest");
    if !twice || !plain || !nearest || node.input(SECOND).is_some() {
        return None;
    }
    let mut own = as_ours(node, "flashover::Conv");
    own.inputs[0] = Some(x);
    view.replace(at, own.with("doubled", Attribute::Int(1)));
    Some(())
}

fn as_ours(node: &Node, op: &str) -> Node {
    let mut own = in_place_of(node, op, node.inputs.clone());
    own.attributes = node.attributes.clone();
    own
}

/// Reads two images instead of their concatenation, if all its readers can do so.
fn second(view: &mut View<'_>, at: usize, place: usize) -> Option<()> {
    let node = view.node(at)?;
    let whole = node.x()?;
    let concat = view.made_by(whole, "Concat")?;
    let [Some(one), Some(other)] = concat.inputs[..] else { return None };
    let image = view.dims(whole)?.len() == 4 && matches!(concat.int("axis"), Some(1 | -3));
    let reads = |place: &usize| view.node(*place).is_some_and(|own| takes_two(view, own, whole));
    if !image || view.is_output(whole) || !view.readers(whole).iter().all(reads) {
        return None;
    }
    let op = if place == SECOND { "flashover::Conv" } else { "flashover::GroupNorm" };
    let mut own = as_ours(node, op);
    own.inputs[0] = Some(one);
    own.inputs.resize(own.inputs.len().max(place + 1), None);
    own.inputs[place] = Some(other);
    own.given = own.inputs.len();
    view.replace(at, own);
    Some(())
}

fn takes_two(view: &View<'_>, node: &Node, whole: ValueId) -> bool {
    let once = node.inputs.iter().filter(|id| **id == Some(whole)).count() == 1;
    let image = node.x() == Some(whole) && once;
    match node.op.as_str() {
        "Conv" | "flashover::Conv" => {
            let plain = node.int("group").unwrap_or(1) == 1 && node.int("doubled").is_none();
            image && plain && node.input(SECOND).is_none()
        }
        "GroupNormalization" | "flashover::GroupNorm" => {
            let weighted = node.input(1).is_some() && node.input(2).is_some();
            image
                && weighted
                && node.input(3).is_none()
                && view.dims(whole).is_some_and(|own| own.len() == 4)
        }
        _ => false,
    }
}
