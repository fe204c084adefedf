//! Removes nodes without effect: `Identity`, `Dropout`, casts to the same dtype, adding 0,
//! multiplying by 1. Merges consecutive transposes.

use crate::graph::Attribute;
use crate::tensor;

use super::view::{View, in_place_of};

pub(super) fn rewrite(view: &mut View<'_>, at: usize) -> Option<()> {
    let node = view.node(at)?;
    let (x, y) = (node.x()?, node.y()?);
    let same = match node.op.as_str() {
        "Identity" => Some(x),
        // The mask output must be unused.
        "Dropout"
            if node.outputs.iter().skip(1).flatten().all(|id| view.readers(*id).is_empty()) =>
        {
            let trains = node.input(2).is_some_and(|id| view.number(id) != Some(0.0));
            (!trains).then_some(x)
        }
        "Cast" => {
            let to = node.int("to").and_then(|to| tensor::dtype(to as i32).ok());
            (to.is_some() && to == view.dtype(x)).then_some(x)
        }
        "Add" => view.with_number(node).filter(|(_, number)| *number == 0.0).map(|own| own.0),
        "Mul" => view.with_number(node).filter(|(_, number)| *number == 1.0).map(|own| own.0),
        "Sub" | "Div" | "Pow" => {
            let number = view.number(node.input(1)?);
            (number == Some(if node.op == "Sub" { 0.0 } else { 1.0 })).then_some(x)
        }
        "Transpose" => return transposed_twice(view, at),
        _ => None,
    }?;
    // The shape must not change: a constant of a higher rank would add dimensions.
    let (before, after) = (view.ty(same).clone(), view.ty(y).clone());
    let keeps =
        before.shape.is_some() && before.shape == after.shape && before.dtype == after.dtype;
    if !keeps || view.is_output(y) {
        return None;
    }
    view.redirect(y, same);
    view.remove(at);
    Some(())
}

fn transposed_twice(view: &mut View<'_>, at: usize) -> Option<()> {
    let node = view.node(at)?;
    let first = view.made_by(node.x()?, "Transpose")?;
    let (before, after) = (first.ints("perm")?, node.ints("perm")?);
    let both: Vec<i64> = after
        .iter()
        .map(|own| before.get(usize::try_from(*own).ok()?).copied())
        .collect::<Option<_>>()?;
    let own = in_place_of(node, "Transpose", vec![first.x()]).with("perm", Attribute::Ints(both));
    view.replace(at, own);
    Some(())
}
