//! Type inference rules for operators that onnx-ir lacks or infers wrongly, or that are frequent.

use burn::tensor::DType;

use crate::graph::{Attribute, Graph, Node, Type};
use crate::tensor::BOOL;

type Dims = Vec<Option<usize>>;

/// Operators whose output has the type of the first input.
const LIKE_FIRST: [&str; 40] = [
    "Abs",
    "Celu",
    "Ceil",
    "Clip",
    "Cos",
    "CumProd",
    "CumSum",
    "Elu",
    "Erf",
    "Exp",
    "Floor",
    "Gelu",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "LeakyRelu",
    "Log",
    "LogSoftmax",
    "Mish",
    "Neg",
    "Reciprocal",
    "Relu",
    "ReverseSequence",
    "RMSNormalization",
    "Round",
    "Selu",
    "Sigmoid",
    "Sign",
    "Sin",
    "Softmax",
    "Softplus",
    "Sqrt",
    "Swish",
    "Tanh",
    "TensorScatter",
    "com.microsoft::BiasGelu",
    "com.microsoft::FastGelu",
    "com.microsoft::QuickGelu",
    "com.microsoft::SkipLayerNormalization",
    "com.microsoft::SkipSimplifiedLayerNormalization",
];

/// Operators whose inputs broadcast, and whose output has the dtype of the first.
const ARITHMETIC: [&str; 12] =
    ["Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Sum", "Mean", "PRelu", "Where"];

/// Operators whose inputs broadcast, and whose output is bool.
const LOGIC: [&str; 8] =
    ["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor"];

/// Operators that keep the rank, and whose lengths onnx-ir 0.22.0 infers wrongly.
const SAME_RANK: [&str; 6] = ["CenterCropPad", "Pad", "Resize", "Slice", "Tile", "Upsample"];

/// Returns the output types of a node; None without a rule.
pub(crate) fn infer(graph: &Graph, node: &Node) -> Option<Vec<Type>> {
    let mut types = vec![Type::default(); node.outputs.len()];
    *types.first_mut()? = infer_first(graph, node)?;
    Some(types)
}

fn infer_first(graph: &Graph, node: &Node) -> Option<Type> {
    let ty = |at: usize| Some(&graph.values[node.inputs.get(at).copied()??].ty);
    let op = node.op.as_str();
    if LIKE_FIRST.contains(&op) {
        return ty(0).cloned();
    }
    if ARITHMETIC.contains(&op) || LOGIC.contains(&op) {
        let shapes = (0..node.given).map(|at| ty(at)?.shape.clone()).collect::<Option<Vec<_>>>()?;
        let dtype = match op {
            "Where" => ty(1)?.dtype,
            _ if LOGIC.contains(&op) => Some(BOOL),
            _ => ty(0)?.dtype,
        };
        return Some(Type { dtype, shape: broadcast(&shapes) });
    }
    if SAME_RANK.contains(&op) {
        let own = ty(0)?;
        let shape = own.shape.as_ref().map(|shape| vec![None; shape.len()]);
        return Some(Type { dtype: own.dtype, shape });
    }
    let x = ty(0)?;
    let dtype = x.dtype;
    let shape = match op {
        "Cast" => {
            let to = int(node, "to").and_then(|to| crate::tensor::dtype(to as i32).ok())?;
            return Some(Type { dtype: Some(to), shape: x.shape.clone() });
        }
        "MatMul" => matmul_shape(x.shape.as_ref()?, ty(1)?.shape.as_ref()?)?,
        "Gemm" => {
            let (a, b) = (x.shape.as_ref()?, ty(1)?.shape.as_ref()?);
            let [rows, columns] = [("transA", 0), ("transB", 1)]
                .map(|(name, at)| if int(node, name).unwrap_or(0) == 0 { at } else { 1 - at });
            vec![*a.get(rows)?, *b.get(columns)?]
        }
        "Concat" => {
            let all =
                (0..node.given).map(|at| ty(at)?.shape.clone()).collect::<Option<Vec<_>>>()?;
            let mut shape = all.first()?.clone();
            let axis = axis_index(int(node, "axis").unwrap_or(1), shape.len())?;
            for own in &all[1..] {
                for (at, (have, other)) in shape.iter_mut().zip(own).enumerate() {
                    *have = if at == axis {
                        have.zip(*other).map(|(a, b)| a + b)
                    } else {
                        have.or(*other)
                    };
                }
            }
            shape
        }
        "Gather" => {
            let (own, indices) = (x.shape.as_ref()?, ty(1)?.shape.as_ref()?);
            let axis = axis_index(int(node, "axis").unwrap_or(0), own.len())?;
            [&own[..axis], indices, &own[axis + 1..]].concat()
        }
        "Range" => {
            let number = |at: usize| {
                let own = graph.values[node.inputs.get(at).copied()??].constant.as_ref()?;
                own.data().iter::<f64>().next()
            };
            let steps = (number(1)? - number(0)?) / number(2)?;
            vec![steps.is_finite().then(|| steps.ceil().max(0.0) as usize)]
        }
        "Transpose" => {
            let own = x.shape.as_ref()?;
            match node.attributes.get("perm") {
                Some(Attribute::Ints(order)) => order
                    .iter()
                    .map(|at| own.get(axis_index(*at, own.len())?).copied())
                    .collect::<Option<_>>()?,
                _ => own.iter().rev().copied().collect(),
            }
        }
        "flashover::Pointwise" => {
            let shapes =
                (0..node.given).map(|at| ty(at)?.shape.clone()).collect::<Option<Vec<_>>>()?;
            // Bool or float: the dtype is already known.
            return Some(Type { dtype: None, shape: broadcast(&shapes) });
        }
        "flashover::Linear" => {
            let mut shape = x.shape.clone()?;
            let transposed = int(node, "transB") == Some(1);
            *shape.last_mut()? = ty(1)?.shape.as_ref()?[usize::from(!transposed)];
            shape
        }
        "flashover::Int8" => {
            let mut shape = x.shape.clone()?;
            *shape.last_mut()? = usize::try_from(int(node, "columns")?).ok();
            let dtype = if int(node, "integer") == Some(1) { Some(DType::I32) } else { dtype };
            return Some(Type { dtype, shape: Some(shape) });
        }
        // Without a key, q, k and v are packed in the first input.
        "com.microsoft::GroupQueryAttention" => ty(1).and(x.shape.clone())?,
        "flashover::Attention" => {
            let mut shape = x.shape.clone()?;
            *shape.last_mut()? = *ty(2)?.shape.as_ref()?.last()?;
            shape
        }
        "flashover::GroupNorm" => {
            let mut shape = x.shape.clone()?;
            if let Some(second) = ty(3) {
                shape[1] = shape[1].zip(second.shape.as_ref()?[1]).map(|(a, b)| a + b);
            }
            shape
        }
        "flashover::Conv" => {
            let (mut shape, weight) = (x.shape.clone()?, ty(1)?.shape.clone()?);
            shape[1] = weight[0];
            for at in 2..shape.len() {
                shape[at] = conv_length(node, at - 2, shape.len() - 2, shape[at], weight[at]);
            }
            shape
        }
        _ => return None,
    };
    Some(Type { dtype, shape: Some(shape) })
}

fn int(node: &Node, name: &str) -> Option<i64> {
    match node.attributes.get(name)? {
        Attribute::Int(own) => Some(*own),
        _ => None,
    }
}

fn axis_index(axis: i64, rank: usize) -> Option<usize> {
    crate::ops::axis(axis, rank).ok()
}

/// Returns the shape that shapes broadcast to. A length is known to be 1 only if all lengths are
/// known.
fn broadcast(shapes: &[Dims]) -> Option<Dims> {
    let rank = shapes.iter().map(Vec::len).max()?;
    let dim = |at: usize| {
        let own = |shape: &Dims| (at + shape.len()).checked_sub(rank).map(|at| shape[at]);
        let all: Vec<Option<usize>> = shapes.iter().filter_map(own).collect();
        match all.iter().flatten().find(|len| **len != 1) {
            Some(len) => Some(*len),
            None => all.into_iter().collect::<Option<Vec<_>>>().map(|_| 1),
        }
    };
    Some((0..rank).map(dim).collect())
}

fn matmul_shape(a: &Dims, b: &Dims) -> Option<Dims> {
    if a.len() < 2 || b.len() < 2 {
        return None;
    }
    let batches = [a[..a.len() - 2].to_vec(), b[..b.len() - 2].to_vec()];
    let mut shape = broadcast(&batches)?;
    shape.extend([a[a.len() - 2], b[b.len() - 1]]);
    Some(shape)
}

/// Returns the output length of a convolution along spatial dimension `at` of `rank`.
fn conv_length(
    node: &Node,
    at: usize,
    rank: usize,
    image: Option<usize>,
    taps: Option<usize>,
) -> Option<usize> {
    let list = |name: &str, at: usize, usual: usize| match node.attributes.get(name) {
        Some(Attribute::Ints(own)) => usize::try_from(*own.get(at)?).ok(),
        _ => Some(usual),
    };
    let image = image? * if int(node, "doubled") == Some(1) { 2 } else { 1 };
    let stride = list("strides", at, 1).filter(|own| *own > 0)?;
    let same = |how: &Attribute| matches!(how, Attribute::Text(how) if how.starts_with("SAME"));
    if node.attributes.get("auto_pad").is_some_and(same) {
        return Some(image.div_ceil(stride));
    }
    let padded = image + list("pads", at, 0)? + list("pads", at + rank, 0)?;
    let reach = list("dilations", at, 1)? * taps?.checked_sub(1)? + 1;
    Some(padded.checked_sub(reach)? / stride + 1)
}

/// Returns an approximate type of an output that may be much larger than its inputs, and whose
/// lengths are constants. It serves to check that the output fits in memory.
pub(crate) fn large_result(graph: &Graph, node: &Node) -> Option<Type> {
    let value = |at: usize| Some(&graph.values[node.inputs.get(at).copied()??]);
    let numbers = |at: usize| {
        let own = value(at)?.constant.as_ref()?.data();
        Some(own.iter::<f64>().collect::<Vec<_>>()).filter(|own| !own.is_empty())
    };
    let x = &value(0)?.ty;
    let dims = || x.known_shape();
    let made: Vec<f64> = match node.op.as_str() {
        "Tile" => dims()?.iter().zip(numbers(1)?).map(|(len, own)| *len as f64 * own).collect(),
        "Pad" if node.inputs.get(3).is_none_or(Option::is_none) => {
            let (own, pads) = (dims()?, numbers(1)?);
            let rank = own.len();
            (0..rank)
                .map(|at| Some(own[at] as f64 + pads.get(at)? + pads.get(at + rank)?))
                .collect::<Option<_>>()?
        }
        "Resize" | "Upsample" => {
            let places = if node.op == "Upsample" { [1, 1] } else { [2, 3] };
            let own = dims()?;
            match (numbers(places[0]), numbers(places[1])) {
                (Some(scales), _) if scales.len() == own.len() => {
                    own.iter().zip(scales).map(|(len, by)| (*len as f64 * by).floor()).collect()
                }
                (None, Some(sizes)) => sizes,
                _ => return None,
            }
        }
        "ConstantOfShape" => numbers(0)?,
        "Expand" => numbers(1)?,
        _ => return None,
    };
    let length = |own: &f64| (0.0..=u64::MAX as f64).contains(own).then_some(*own as usize);
    let shape = made.iter().map(length).collect::<Option<Vec<_>>>()?;
    let dtype = x.dtype.filter(|_| node.op != "ConstantOfShape");
    Some(Type { dtype, shape: Some(shape.into_iter().map(Some).collect()) })
}

/// Returns true for operators that only move elements: a run on zeros infers their types at no
/// cost.
pub(crate) fn moves(op: &str) -> bool {
    const MOVES: [&str; 13] = [
        "CenterCropPad",
        "ConstantOfShape",
        "Expand",
        "Flatten",
        "Pad",
        "Reshape",
        "Resize",
        "Slice",
        "Split",
        "Squeeze",
        "Tile",
        "Unsqueeze",
        "Upsample",
    ];
    MOVES.contains(&op)
}

/// Returns the host dtype: bools are [`BOOL`], however a device stores them.
pub(crate) fn host_dtype(dtype: DType) -> DType {
    if matches!(dtype, DType::Bool(_)) { BOOL } else { dtype }
}
