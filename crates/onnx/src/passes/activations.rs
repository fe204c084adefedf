//! Fuses activations from their parts, as exporters of old opsets write them.

use crate::graph::{Attribute, Node, ValueId};

use super::view::{View, in_place_of};

/// An elementwise product: a number, and other factors.
struct Product {
    number: f64,
    /// Factors that are not constant numbers.
    factors: Vec<ValueId>,
}

impl Product {
    /// Returns the factors of a value, through `Mul`, `Div` by a number and cubes that have one
    /// reader.
    fn new(view: &View<'_>, id: ValueId) -> Self {
        let mut own = Self { number: 1.0, factors: Vec::new() };
        own.join(view, id, true);
        own
    }

    fn join(&mut self, view: &View<'_>, id: ValueId, first: bool) {
        if let Some(number) = view.number(id) {
            self.number *= number;
            return;
        }
        let inner = |op: &str| view.made_by(id, op).filter(|_| first || view.is_read_once(id));
        if let Some(node) = inner("Mul") {
            node.inputs.iter().flatten().for_each(|id| self.join(view, *id, false));
        } else if let Some((x, number)) =
            inner("Div").and_then(|node| Some((node.x()?, view.number(node.input(1)?)?)))
        {
            self.number /= number;
            self.join(view, x, false);
        } else if let Some(node) =
            inner("Pow").filter(|node| node.input(1).and_then(|id| view.number(id)) == Some(3.0))
        {
            self.factors.extend(std::iter::repeat_n(node.x(), 3).flatten());
        } else {
            self.factors.push(id);
        }
    }
}

/// Returns true for two numbers that are equal within the precision of 16 bits.
fn near(have: f64, want: f64) -> bool {
    (have - want).abs() <= 1e-3 * want.abs()
}

/// Returns x if the value is `x + number`.
fn plus(view: &View<'_>, id: ValueId, number: f64) -> Option<ValueId> {
    let (x, own) = view.with_number(view.made_for_one(id, "Add")?)?;
    near(own, number).then_some(x)
}

/// Fuses `x · (1 + erf(x / √2)) / 2`, and `x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2`.
pub(super) fn gelu(view: &mut View<'_>, at: usize) -> Option<()> {
    let node = view.call(at, "Mul")?;
    let Product { number, factors } = Product::new(view, node.y()?);
    let [one, other] = factors[..] else { return None };
    if !near(number, 0.5) {
        return None;
    }
    let kind = [(one, other), (other, one)].into_iter().find_map(|(x, gate)| {
        let curve = plus(view, gate, 1.0)?;
        if let Some(erf) = view.made_for_one(curve, "Erf") {
            let inner = Product::new(view, erf.x()?);
            let fits = inner.factors == [x] && near(inner.number, std::f64::consts::FRAC_1_SQRT_2);
            return fits.then_some((x, "none"));
        }
        let inner = Product::new(view, view.made_for_one(curve, "Tanh")?.x()?);
        let root = near(inner.number, (2.0 / std::f64::consts::PI).sqrt());
        (root && is_cubic(view, &inner.factors, x)).then_some((x, "tanh"))
    });
    let (x, kind) = kind?;
    let own = in_place_of(node, "Gelu", vec![Some(x)]);
    view.replace(at, own.with("approximate", Attribute::Text(kind.to_owned())));
    Some(())
}

/// Returns true for `x + 0.044715 x³`, written as a sum or as `x · (1 + 0.044715 x²)`.
fn is_cubic(view: &View<'_>, factors: &[ValueId], x: ValueId) -> bool {
    let curve = |id: ValueId, powers: usize| {
        let own = Product::new(view, id);
        near(own.number, 0.044_715) && own.factors == vec![x; powers]
    };
    match factors {
        [sum] => view.made_for_one(*sum, "Add").is_some_and(|node| {
            let [Some(one), Some(other)] = node.inputs[..] else { return false };
            (one == x && curve(other, 3)) || (other == x && curve(one, 3))
        }),
        [one, other] => [(one, other), (other, one)].into_iter().any(|(own, gate)| {
            *own == x && plus(view, *gate, 1.0).is_some_and(|square| curve(square, 2))
        }),
        _ => false,
    }
}

/// Fuses `x · σ(α x)`.
pub(super) fn silu(view: &mut View<'_>, at: usize) -> Option<()> {
    let node = view.call(at, "Mul")?;
    let [Some(one), Some(other)] = node.inputs[..] else { return None };
    let (x, alpha) = [(one, other), (other, one)].into_iter().find_map(|(x, gate)| {
        let own = view.made_for_one(gate, "Sigmoid")?.x()?;
        if own == x {
            return Some((x, 1.0));
        }
        let inner = Product::new(view, own);
        (inner.factors == [x]).then_some((x, inner.number))
    })?;
    let own = in_place_of(node, "Swish", vec![Some(x)]);
    view.replace(at, own.with("alpha", Attribute::Float(alpha as f32)));
    Some(())
}

/// Fuses `x · clip(x + 3, 0, 6) / 6`, and `x · clip(x / 6 + 1/2, 0, 1)`.
pub(super) fn hard_swish(view: &mut View<'_>, at: usize) -> Option<()> {
    let node = view.node(at).filter(|node| matches!(node.op.as_str(), "Mul" | "Div"))?;
    let y = node.y()?;
    let Product { number, factors } = match node.op.as_str() {
        "Mul" => Product::new(view, y),
        _ => {
            let by = view.number(node.input(1)?)?;
            let own = Product::new(view, node.x().filter(|id| view.is_read_once(*id))?);
            Product { number: own.number / by, ..own }
        }
    };
    let [one, other] = factors[..] else { return None };
    let x = [(one, other), (other, one)].into_iter().find_map(|(x, gate)| {
        if let Some(own) = view.made_for_one(gate, "HardSigmoid") {
            let (alpha, beta) =
                (own.float("alpha").unwrap_or(0.2), own.float("beta").unwrap_or(0.5));
            let fits = near(alpha, 1.0 / 6.0) && near(beta, 0.5) && near(number, 1.0);
            return (fits && own.x() == Some(x)).then_some(x);
        }
        let clip = view.made_for_one(gate, "Clip")?;
        let limits = limits(view, clip)?;
        let fits = limits == [0.0, 6.0] && near(number, 1.0 / 6.0);
        (fits && plus(view, clip.x()?, 3.0) == Some(x)).then_some(x)
    })?;
    let own = in_place_of(node, "HardSwish", vec![Some(x)]);
    view.replace(at, own);
    Some(())
}

/// Returns the limits of a `Clip`, if they are constants.
pub(super) fn limits(view: &View<'_>, clip: &Node) -> Option<[f64; 2]> {
    let limit = |name: &str, at: usize, usual: f64| match (clip.float(name), clip.input(at)) {
        (Some(own), _) => Some(own),
        (None, Some(id)) => view.number(id),
        (None, None) => Some(usual),
    };
    Some([limit("min", 1, f64::NEG_INFINITY)?, limit("max", 2, f64::INFINITY)?])
}
