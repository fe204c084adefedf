//! Shortens chains of nodes that only move elements to at most three: split, transpose and merge
//! dimensions.
//!
//! ```text
//! [s, b, h·d] → [s, b·h, d] → [b·h, s, d] → [b, h, s, d]      becomes      [s, b, h·d] → [s, b, h, d] → [b, h, s, d]
//! ```
//!
//! Splitting and transposing are views. A chain that merges dimensions and splits them again would
//! copy.

use burn::tensor::TensorData;

use crate::graph::{Attribute, Node, Type, ValueId};

use super::view::{View, in_place_of};

const MOVES: [&str; 5] = ["Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"];

/// A dimension, or a part of one, that is never split: its number and its length.
type Atom = (usize, usize);

pub(super) fn rewrite(view: &mut View<'_>, at: usize) -> Option<()> {
    let last = view.node(at).filter(|node| MOVES.contains(&node.op.as_str()))?.clone();
    let y = last.y()?;
    // A chain is rewritten at its last node.
    if view.only_reader(y).is_some_and(|(_, node)| MOVES.contains(&node.op.as_str())) {
        return None;
    }
    let mut chain = vec![(at, last.clone())];
    let mut x = last.x()?;
    while let Some(place) =
        MOVES.iter().find_map(|op| view.producer_index(x, op)).filter(|_| view.is_read_once(x))
    {
        let node = view.node(place)?.clone();
        x = node.x()?;
        chain.push((place, node));
    }
    chain.reverse();
    let shape = view.shape(x)?;
    let mut moved = Moved::new(&shape);
    for (_, node) in &chain {
        let to = view.shape(node.y()?)?;
        match node.op.as_str() {
            "Transpose" => moved.reorder(node, to.len())?,
            _ => moved.reshape(&to)?,
        }
    }
    let out = view.shape(y)?;
    let split: Vec<usize> = moved.from.iter().map(|own| own.1).collect();
    let order: Vec<i64> = moved
        .to
        .iter()
        .flatten()
        .map(|(number, _)| moved.from.iter().position(|own| own.0 == *number).map(|at| at as i64))
        .collect::<Option<_>>()?;
    let joined: Vec<usize> = order.iter().map(|at| split[*at as usize]).collect();
    let reorders = !order.iter().enumerate().all(|(at, own)| at as i64 == *own);
    let steps = [reorders && split != shape, reorders, joined != out || !reorders];
    let count = steps.iter().filter(|own| **own).count();
    if count >= chain.len() {
        return None;
    }
    let dtype = view.dtype(y);
    let value = |view: &mut View<'_>, shape: &[usize]| {
        let shape = Some(shape.iter().map(|len| Some(*len)).collect());
        view.add_value(Type { dtype, shape })
    };
    let mut nodes = Vec::new();
    let mut from = x;
    if steps[0] {
        let to = value(view, &split);
        nodes.push(reshape(view, &last, from, to, &split));
        from = to;
    }
    if steps[1] {
        let to = if steps[2] { value(view, &joined) } else { y };
        let own = in_place_of(&last, "Transpose", vec![Some(from)]);
        let own = Node { outputs: vec![Some(to)], ..own };
        nodes.push(own.with("perm", Attribute::Ints(order)));
        from = to;
    }
    if steps[2] {
        nodes.push(reshape(view, &last, from, y, &out));
    }
    chain.iter().for_each(|(place, _)| view.remove(*place));
    let own = nodes.pop()?;
    view.replace(at, own);
    nodes.into_iter().for_each(|node| view.insert(at, node));
    Some(())
}

fn reshape(view: &mut View<'_>, like: &Node, from: ValueId, to: ValueId, shape: &[usize]) -> Node {
    let lengths: Vec<i64> = shape.iter().map(|len| *len as i64).collect();
    let lengths = view.add_constant(TensorData::new(lengths, [shape.len()]));
    let own = in_place_of(like, "Reshape", vec![Some(from), Some(lengths)]);
    Node { outputs: vec![Some(to)], ..own }
}

/// Positions of the parts of a tensor's dimensions.
struct Moved {
    /// Parts in the order of the input.
    from: Vec<Atom>,
    /// Parts of each dimension of the result.
    to: Vec<Vec<Atom>>,
    count: usize,
}

impl Moved {
    fn new(shape: &[usize]) -> Self {
        let from: Vec<Atom> = shape.iter().copied().enumerate().filter(|own| own.1 != 1).collect();
        let to = shape.iter().copied().enumerate();
        let to = to.map(|own| if own.1 == 1 { Vec::new() } else { vec![own] }).collect();
        Self { from, to, count: shape.len() }
    }

    fn reorder(&mut self, node: &Node, rank: usize) -> Option<()> {
        let order = match node.ints("perm") {
            Some(own) => own.to_vec(),
            None => (0..rank as i64).rev().collect(),
        };
        let to = order.iter().map(|at| self.to.get(usize::try_from(*at).ok()?).cloned());
        self.to = to.collect::<Option<_>>()?;
        Some(())
    }

    /// Groups the parts into the dimensions of another shape; splits parts that two dimensions
    /// share.
    fn reshape(&mut self, shape: &[usize]) -> Option<()> {
        let mut rest: Vec<Atom> = self.to.concat();
        rest.reverse();
        let mut to = Vec::new();
        for len in shape {
            let (mut have, mut own) = (1, Vec::new());
            while have < *len {
                let part = rest.pop()?;
                if have * part.1 <= *len {
                    have *= part.1;
                    own.push(part);
                    continue;
                }
                let outer = len.checked_div(have).filter(|outer| have * outer == *len)?;
                let inner = part.1.checked_div(outer).filter(|inner| inner * outer == part.1)?;
                let parts = [(self.count, outer), (self.count + 1, inner)];
                self.count += 2;
                let at = self.from.iter().position(|own| *own == part)?;
                self.from.splice(at..=at, parts);
                own.push(parts[0]);
                rest.push(parts[1]);
                have = *len;
            }
            to.push(own);
        }
        self.to = to;
        rest.is_empty().then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_dimensions_that_are_joined_and_split() {
        // [s, b, h·d] → [s, b·h, d] → [b·h, s, d] → [b, h, s, d]
        let mut own = Moved::new(&[5, 2, 12]);
        own.reshape(&[5, 6, 4]).expect("12 is 3 · 4");
        let transposed = Node::default().with("perm", Attribute::Ints(vec![1, 0, 2]));
        own.reorder(&transposed, 3).expect("a rank of 3");
        own.reshape(&[2, 3, 5, 4]).expect("6 is 2 · 3");
        let lengths = |own: &[Atom]| own.iter().map(|own| own.1).collect::<Vec<_>>();
        assert_eq!(lengths(&own.from), [5, 2, 3, 4]);
        assert_eq!(own.to.iter().map(|own| lengths(own)).collect::<Vec<_>>(), [[2], [3], [5], [4]]);
        // 4 · 6 cannot be split as 6 · 4.
        assert!(Moved::new(&[4, 6]).reshape(&[6, 4]).is_none());
    }
}
