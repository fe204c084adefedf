//! Fuses nodes after a convolution, matmul or group norm into its epilogue:
//! `residual + activation(x ∗ weight + bias)`, or `activation(x ∗ weight + bias + residual)`.

use burn::tensor::TensorData;
use ops::{Activation, Constant};

use crate::graph::{Attribute, Node, ValueId};

use super::activations::limits;
use super::norms::is_per_channel;
use super::view::{View, in_place_of};

use operand::{BIAS, GATE, IMAGE_BIAS, RESIDUAL};

/// Input indices of `flashover::Conv` and `flashover::Linear`, after x and the weight.
pub(crate) mod operand {
    pub(crate) const BIAS: usize = 2;
    pub(crate) const RESIDUAL: usize = 3;
    /// Bias per image, of a convolution.
    pub(crate) const IMAGE_BIAS: usize = 4;
    /// Elementwise factor, of a matmul.
    pub(crate) const GATE: usize = 4;
    /// Second image, whose channels follow those of x, of a convolution.
    pub(crate) const SECOND: usize = 5;
}

pub(super) fn rewrite(view: &mut View<'_>, at: usize) -> Option<()> {
    let node = view.node(at)?;
    let start = match node.op.as_str() {
        "Conv" => conv(view, node)?,
        "MatMul" | "Gemm" => {
            Fused { node: linear(view, node)?, kind: Kind::Linear, activated: false }
        }
        "flashover::Linear" => Fused { node: node.clone(), kind: Kind::Linear, activated: false },
        "GroupNormalization" => group_norm(view, node)?,
        _ => return None,
    };
    let (mut own, mut places) = (start, vec![at]);
    while let Some((place, next)) =
        own.node.y().and_then(|y| follow(view, &own)?.filter(|_| view.is_read_once(y)))
    {
        own = next;
        places.push(place);
    }
    // A convolution with its bias, and a `Linear` of an earlier pass, are already one node.
    let made = view.node(at)?.op == "flashover::Linear";
    if places.len() == 1 && (own.kind != Kind::Linear || made) {
        return None;
    }
    let last = places.pop()?;
    places.into_iter().for_each(|place| view.remove(place));
    view.replace(last, own.node);
    Some(())
}

/// A node with a partial epilogue.
struct Fused {
    node: Node,
    kind: Kind,
    activated: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Conv,
    Linear,
    GroupNorm,
}

fn conv(view: &View<'_>, node: &Node) -> Option<Fused> {
    let rank = view.dims(node.x()?)?.len();
    let own = (3..=4)
        .contains(&rank)
        .then(|| in_place_of(node, "flashover::Conv", node.inputs.clone()))?;
    Some(fused(own, node, Kind::Conv))
}

fn fused(mut own: Node, node: &Node, kind: Kind) -> Fused {
    own.attributes = node.attributes.clone();
    Fused { node: own, kind, activated: false }
}

/// Converts a matmul with a constant matrix to `flashover::Linear`.
pub(super) fn linear(view: &View<'_>, node: &Node) -> Option<Node> {
    let weight = view.constant(node.input(1)?)?;
    let is_float = weight.shape.len() == 2 && weight.dtype.is_float();
    let one = |name: &str| node.float(name).is_none_or(|own| own == 1.0);
    let plain = one("alpha") && one("beta") && node.int("transA").unwrap_or(0) == 0;
    if !is_float || !plain || view.dims(node.x()?)?.len() < 2 {
        return None;
    }
    let mut own = in_place_of(node, "flashover::Linear", node.inputs.clone());
    own.attributes = node.attributes.clone();
    if let Some(bias) = node.input(2) {
        let n = weight.shape[usize::from(node.int("transB") != Some(1))];
        let fits =
            view.constant(bias).is_some_and(|own| own.count() == n && own.shape.last() == Some(&n));
        fits.then_some(())?;
    }
    own.attributes.remove("alpha");
    Some(own)
}

fn group_norm(view: &View<'_>, node: &Node) -> Option<Fused> {
    let weighted = node.input(1).is_some() && node.input(2).is_some();
    let image = (3..=4).contains(&view.dims(node.x()?)?.len());
    let own = (weighted && image)
        .then(|| in_place_of(node, "flashover::GroupNorm", node.inputs.clone()))?;
    Some(fused(own, node, Kind::GroupNorm))
}

/// Fuses the only reader of the result into the node. Returns the index of the reader and the fused
/// node.
fn follow(view: &View<'_>, own: &Fused) -> Option<Option<(usize, Fused)>> {
    let y = own.node.y()?;
    let (place, reader) = view.only_reader(y)?;
    Some(join(view, own, reader, y).map(|next| (place, next)))
}

fn join(view: &View<'_>, own: &Fused, reader: &Node, y: ValueId) -> Option<Fused> {
    let Fused { node, kind, activated } = own;
    let has = |at: usize| node.input(at).is_some();
    let has_residual = *kind != Kind::GroupNorm && has(RESIDUAL);
    let with = |at: usize, id: ValueId| {
        let mut inputs = node.inputs.clone();
        inputs.resize(inputs.len().max(at + 1), None);
        inputs[at] = Some(id);
        Node { given: inputs.len(), inputs, outputs: reader.outputs.clone(), ..node.clone() }
    };
    if let Some(activation) = activation(view, reader) {
        if *activated
            || (has_residual && *kind != Kind::Conv)
            || (*kind == Kind::Linear && has(GATE))
        {
            return None;
        }
        let outputs = reader.outputs.clone();
        let mut next =
            Node { outputs, ..node.clone() }.with("activation", Attribute::Activation(activation));
        if has_residual {
            next = next.with("activation_last", Attribute::Int(1));
        }
        return Some(Fused { node: next, kind: *kind, activated: true });
    }
    let [Some(one), Some(other)] = reader.inputs[..] else { return None };
    if *kind == Kind::GroupNorm || one == other || node.int("activation_last").is_some() {
        return None;
    }
    let other = if one == y { other } else { one };
    let dims = view.dims(reader.y()?)?;
    let same = view.shape(other).is_some()
        && view.dims(other) == view.dims(y)
        && view.dims(y) == Some(dims);
    match reader.op.as_str() {
        "Add" if !has_residual => {
            let early = !(*activated || *kind == Kind::Linear && has(GATE));
            let width = if *kind == Kind::Conv { dims[1] } else { *dims.last()? };
            let is_bias = width.is_some_and(|width| match kind {
                Kind::Conv => is_per_channel(view, other, width, Some(y)),
                _ => view.constant(other).is_some_and(|own| {
                    own.count() == width
                        && own.shape.last() == Some(&width)
                        && own.shape.len() <= dims.len()
                }),
            });
            let per_image = || {
                let own = view.dims(other)?;
                let one_group = node.int("group").unwrap_or(1) == 1;
                let each =
                    own.len() == 4 && own[..2] == dims[..2] && own[2..] == [Some(1), Some(1)];
                (one_group && each && own[..2].iter().all(Option::is_some)).then_some(())
            };
            let next = if early && is_bias && !has(BIAS) {
                with(BIAS, other)
            } else if early && *kind == Kind::Conv && !has(IMAGE_BIAS) && per_image().is_some() {
                with(IMAGE_BIAS, other)
            } else if same {
                with(RESIDUAL, other)
            } else {
                return None;
            };
            Some(Fused { node: next, kind: *kind, activated: *activated })
        }
        "Mul" if *kind == Kind::Linear && same && !has_residual && !has(GATE) => {
            Some(Fused { node: with(GATE, other), kind: *kind, activated: *activated })
        }
        _ => None,
    }
}

/// Returns the activation that a node computes.
pub(super) fn activation(view: &View<'_>, node: &Node) -> Option<Activation> {
    let number = |name: &str, usual: f64| Constant::new(node.float(name).unwrap_or(usual) as f32);
    Some(match node.op.as_str() {
        "Relu" => Activation::Relu,
        "Sigmoid" => Activation::Sigmoid,
        "Tanh" => Activation::Tanh,
        "Gelu" if node.text("approximate") == Some("tanh") => Activation::GeluTanh,
        "Gelu" => Activation::Gelu,
        "Swish" if node.float("alpha").is_none_or(|own| own == 1.0) => Activation::Silu,
        "HardSwish" => Activation::HardSwish,
        "HardSigmoid" => {
            Activation::HardSigmoid { scale: number("alpha", 0.2), shift: number("beta", 0.5) }
        }
        "LeakyRelu" => Activation::LeakyRelu { slope: number("alpha", 0.01) },
        "Clip" => {
            let [low, high] = limits(view, node)?.map(|own| Constant::new(own as f32));
            Activation::Clip { low, high }
        }
        _ => return None,
    })
}

/// Returns the elements of a constant as a vector.
pub(super) fn flat(data: TensorData) -> TensorData {
    let (dtype, len) = (data.dtype(), data.num_elements());
    TensorData::from_bytes(data.into_bytes(), [len], dtype)
}
