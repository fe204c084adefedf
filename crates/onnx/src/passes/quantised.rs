//! Rewrites quantised graphs: matmuls with int8 weights, and values that are quantised and
//! dequantised.
//!
//! ```text
//! DequantizeLinear(QuantizeLinear(x, s, z), s', z)  =  clip(round(x / s), least - z, most - z) · s'
//! MatMul(x, DequantizeLinear(codes, s))             =  (x · codes) · s, by the int8 kernels
//! MatMulInteger(a, codes, zero of a)                =  (a - zero) · codes, by the same kernels
//! ```

use burn::tensor::{DType, TensorData};
use ops::{Constant as Number, Function, Operation, Program, Step};

use super::view::{View, in_place_of};
use crate::graph::{Attribute, Node, ValueId};
use crate::ops::{limits, next_number};
use crate::tensor::Constant;

pub(super) fn rewrite(view: &mut View<'_>, at: usize) -> Option<()> {
    let node = view.node(at)?.clone();
    match node.op.as_str() {
        "DequantizeLinear" => {
            fuse_quantize_dequantize(view, at, &node).or_else(|| fold_dequantized(view, at, &node))
        }
        "MatMul" => matmul(view, at, &node, false),
        "Gemm" => {
            let one = |name: &str| node.float(name).is_none_or(|own| own == 1.0);
            let plain = one("alpha") && one("beta") && node.int("transA").unwrap_or(0) == 0;
            let transposed = node.int("transB") == Some(1);
            if plain { matmul(view, at, &node, transposed) } else { None }
        }
        "MatMulInteger" => {
            let codes = Codes::read(view, node.input(1)?, node.input(3))?;
            let [_, columns] = codes.0.shape[..] else { return None };
            let one = Constant::new(TensorData::new(vec![1f32], [1]));
            let own = codes.matmul_node(&node, vec![node.x(), node.input(2)], one, columns, false);
            view.replace(at, own.with("integer", Attribute::Int(1)));
            Some(())
        }
        _ => None,
    }
}

/// Fuses quantisation and dequantisation of a value into one elementwise program.
fn fuse_quantize_dequantize(view: &mut View<'_>, at: usize, node: &Node) -> Option<()> {
    let before = view.made_for_one(node.x()?, "QuantizeLinear")?.clone();
    let (x, codes) = (before.x()?, view.dtype(node.x()?)?);
    let whole = matches!(codes, DType::I8 | DType::U8 | DType::I16 | DType::U16);
    if !whole || view.dtype(x)? != DType::F32 || view.dtype(node.y()?)? != DType::F32 {
        return None;
    }
    let zero_of = |own: &Node| own.input(2).map_or(Some(0.0), |id| view.number(id));
    let (zero, again) = (zero_of(&before)?, zero_of(node)?);
    let (scale, other) = (view.number(before.input(1)?)?, view.number(node.input(1)?)?);
    if zero != again {
        return None;
    }
    let (least, most) = limits(codes);
    let number = |own: f64| Step::Constant(Number::new(own as f32));
    let steps = vec![
        number(scale),
        Step::Binary(Operation::Divide, 0, 1),
        Step::Unary(Function::Round, 2),
        number(least - zero),
        Step::Binary(Operation::Max, 3, 4),
        number(most - zero),
        Step::Binary(Operation::Min, 5, 6),
        number(other),
        Step::Binary(Operation::Multiply, 7, 8),
    ];
    let place = view.producer_index(node.x()?, "QuantizeLinear")?;
    let program = Attribute::Program(Program { inputs: 1, steps });
    let own = in_place_of(node, "flashover::Pointwise", vec![Some(x)]).with("program", program);
    view.remove(place);
    view.replace(at, own);
    Some(())
}

/// Dequantises a constant, except a weight that a matmul reads quantised.
fn fold_dequantized(view: &mut View<'_>, at: usize, node: &Node) -> Option<()> {
    let (x, scale, y) = (node.x()?, node.input(1)?, node.y()?);
    view.dtype(y).filter(|own| *own == DType::F32 && !view.is_output(y))?;
    let of_product = view.readers(y).iter().all(|reader| {
        view.node(*reader).is_some_and(|own| {
            ["MatMul", "Gemm"].contains(&own.op.as_str()) && own.input(1) == Some(y)
        })
    });
    if of_product && Codes::read(view, x, node.input(2)).is_some() {
        return None;
    }
    let codes = view.constant(x)?;
    if codes.dtype.is_float() || node.int("block_size").unwrap_or(0) != 0 {
        return None;
    }
    let scales = view.floats(scale)?;
    let zeros = match node.input(2) {
        None => vec![0],
        Some(id) => view.ints(id)?,
    };
    let axis = crate::ops::axis(node.int("axis").unwrap_or(1), codes.shape.len().max(1)).ok()?;
    let (each, inner) = match codes.shape.get(axis) {
        Some(each) => (*each, codes.shape[axis + 1..].iter().product::<usize>()),
        None => (1, 1),
    };
    let fits = |count: usize| count == 1 || count == each;
    if !fits(scales.len()) || !fits(zeros.len()) {
        return None;
    }
    let value = |(place, code): (usize, i64)| {
        let own = place / inner.max(1) % each.max(1);
        (code - zeros[own % zeros.len()]) as f32 * scales[own % scales.len()]
    };
    let all: Vec<f32> = codes.data().iter::<i64>().enumerate().map(value).collect();
    let data = TensorData::new(all, codes.shape.clone());
    let made = view.add_constant(data);
    view.remove(at);
    view.redirect(y, made);
    Some(())
}

/// Replaces a matmul with a dequantised weight by one with the quantised weight.
fn matmul(view: &mut View<'_>, at: usize, node: &Node, transposed: bool) -> Option<()> {
    let weight = node.input(1)?;
    let place = view.producer_index(weight, "DequantizeLinear")?;
    let decode = view.node(place)?;
    let codes = Codes::read(view, decode.x()?, decode.input(2))?;
    let columns = codes.0.shape[usize::from(!transposed)];
    let scale = view.constant(decode.input(1)?).filter(|own| own.dtype == DType::F32)?;
    let axis = crate::ops::axis(decode.int("axis").unwrap_or(1), 2).ok()?;
    let of_columns = axis == usize::from(!transposed) && scale.count() == columns;
    if decode.int("block_size").unwrap_or(0) != 0 || !(scale.count() == 1 || of_columns) {
        return None;
    }
    view.dims(node.x()?).filter(|own| own.len() >= 2)?;
    let scales = scale.clone();
    let mut inputs = vec![node.x(), None];
    inputs.extend(node.input(2).map(Some));
    view.replace(at, codes.matmul_node(node, inputs, scales, columns, transposed));
    if view.readers(weight).is_empty() && !view.is_output(weight) {
        view.remove(place);
    }
    Some(())
}

/// A constant int8 matrix with zero point 0.
struct Codes(Constant);

impl Codes {
    /// Reads the matrix of a constant. uint8 with zero point 128 becomes int8.
    fn read(view: &View<'_>, id: ValueId, zero: Option<ValueId>) -> Option<Self> {
        let own = view.constant(id).filter(|own| own.shape.len() == 2)?;
        let zeros = match zero {
            None => vec![0],
            Some(id) => view.ints(id)?,
        };
        let all = |value: i64| zeros.iter().all(|own| *own == value);
        match own.dtype {
            DType::I8 if all(0) => Some(Self(own.clone())),
            DType::U8 if all(128) => {
                let signed = own.bytes().iter().map(|own| own ^ 0x80).collect();
                let data = TensorData::from_bytes_vec(signed, own.shape.clone(), DType::I8);
                Some(Self(Constant::new(data)))
            }
            _ => None,
        }
    }

    /// Returns a matmul that replaces a node, with one scale or one scale per column.
    fn matmul_node(
        self,
        node: &Node,
        inputs: Vec<Option<ValueId>>,
        scales: Constant,
        columns: usize,
        transposed: bool,
    ) -> Node {
        in_place_of(node, "flashover::Int8", inputs)
            .with("codes", Attribute::Tensor(self.0))
            .with("columns", Attribute::Int(columns as i64))
            .with("transposed", Attribute::Int(i64::from(transposed)))
            .with("number", Attribute::Int(next_number()))
            .with("scales", Attribute::Tensor(scales))
    }
}
