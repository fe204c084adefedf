//! Conversion of a graph from f32 to f16 or bf16.
//!
//! Inputs and outputs of a model keep the dtypes of the file. These nodes stay in f32:
//!
//! - nodes that the caller names, which no pass rewrites; control flow; quantisation;
//! - ranges, and the scales of resized images;
//! - nodes before a sine or cosine, whose arguments 16 bits would shift by whole periods;
//! - nodes before a root or logarithm, whose squares and differences underflow in 16 bits;
//! - casts of integers, nodes with a constant that underflows in f16, and arithmetic and casts that read their results.
//!
//! Operators compute statistics, softmax and sums in f32 for any input dtype.

use std::collections::{HashMap, HashSet};

use burn::tensor::DType;
use ops::{Activation, Constant, Function, Operation, Program, Step};

use crate::OnnxError;
use crate::graph::{Attribute, Graph, Node, Type, Value, ValueId};
use crate::tensor;

/// Attribute of nodes that the caller names.
pub(crate) const KEPT: &str = "flashover keeps f32";

/// Marks nodes that stay in f32, by their name or the name of an output. No pass rewrites them.
///
/// # Errors
/// [`OnnxError::Argument`] for a name that no node and no value has.
pub(crate) fn mark(graph: &mut Graph, names: &[String]) -> Result<(), OnnxError> {
    for name in names {
        let values = &graph.values;
        let made = |node: &Node| node.outputs.iter().flatten().any(|id| values[*id].name == *name);
        let mut found =
            graph.nodes.iter_mut().filter(|node| node.name == *name || made(node)).peekable();
        if found.peek().is_none() {
            let hint = "hint: `flashover onnx profile` prints the names of nodes";
            let why = format!("expected the name of a node or value, got `{name}`\n{hint}");
            return Err(OnnxError::Argument(why));
        }
        for node in found {
            node.attributes.insert(KEPT.to_owned(), Attribute::Int(1));
        }
    }
    Ok(())
}

/// Converts a graph from f32 to 16 bits, except some nodes.
pub(crate) fn convert(graph: &mut Graph, to: DType) {
    let waves = waves(graph);
    let (rooted, scaled) = (rooted(graph), scaled(graph));
    let keeps = |(at, node): (usize, &Node)| {
        rooted[at]
            || scaled[at]
            || node.attributes.contains_key(KEPT)
            || node.op == "Range"
            || node.op.contains("uantize")
            || node.op.contains("Integer")
            || node.op.contains("QLinear")
            || node.attributes.values().any(|own| matches!(own, Attribute::Graph(..)))
            || node.outputs.iter().flatten().any(|id| waves.contains(id))
    };
    let kept: Vec<bool> = graph.nodes.iter().enumerate().map(keeps).collect();
    let mut made = Converter { to, wide: HashMap::new(), narrow: HashMap::new() };
    let nodes = std::mem::take(&mut graph.nodes);
    for (mut node, kept) in nodes.into_iter().zip(kept) {
        let sizes = matches!(node.op.as_str(), "Resize" | "Upsample");
        for (at, input) in node.inputs.iter_mut().enumerate() {
            let Some(id) = *input else { continue };
            // Sizes must be exact.
            let wide = kept || sizes && at > 0;
            *input = Some(made.read(graph, id, if wide { DType::F32 } else { to }));
        }
        if let (DType::F16, Some(Attribute::Program(own))) =
            (to, node.attributes.get_mut("program"))
        {
            bounded(own);
        }
        if !kept {
            for id in node.outputs.iter().flatten() {
                let ty = &mut graph.values[*id].ty;
                ty.dtype = ty.dtype.map(|own| if own == DType::F32 { to } else { own });
            }
            let is_f32 = |own: &Attribute| matches!(own, Attribute::Int(1));
            if node.op == "Cast" && node.attributes.get("to").is_some_and(is_f32) {
                let number = tensor::number(to).unwrap_or(1);
                node.attributes.insert("to".to_owned(), Attribute::Int(number.into()));
            }
        }
        graph.nodes.push(node);
    }
}

/// Returns true for nodes that cast integers to floats or read a constant that underflows in f16,
/// and for arithmetic on their results.
fn scaled(graph: &Graph) -> Vec<bool> {
    const SCALES: [&str; 8] =
        ["Add", "Ceil", "Div", "Floor", "Mul", "Round", "Sub", "flashover::Pointwise"];
    let small = |own: f64| own != 0.0 && own.abs() < f64::from(half::f16::MIN_POSITIVE);
    let is_small = |id: &ValueId| {
        let own = graph.values[*id]
            .constant
            .as_ref()
            .filter(|own| own.count() == 1 && own.dtype.is_float());
        own.is_some_and(|own| own.data().iter::<f64>().any(small))
    };
    let has_small = |node: &Node| match node.attributes.get("program") {
        Some(Attribute::Program(own)) => own.steps.iter().any(|step| match step {
            Step::Constant(own) => small(own.value().into()),
            Step::Unary(Function::Activation(Activation::Clip { low, high }), _) => {
                [low, high].iter().any(|own| small(own.value().into()))
            }
            _ => false,
        }),
        _ => {
            ["Add", "Clip", "Max", "Sub"].contains(&node.op.as_str())
                && node.inputs.iter().flatten().any(is_small)
        }
    };
    let mut wide = HashSet::new();
    let each = graph.nodes.iter().map(|node| {
        let of_integers = node.op == "Cast"
            && node
                .inputs
                .first()
                .copied()
                .flatten()
                .and_then(|id| graph.values[id].ty.dtype)
                .is_some_and(|own| own.is_int() || own.is_uint());
        if of_integers || has_small(node) {
            wide.extend(node.outputs.iter().flatten().copied());
            return true;
        }
        let made = node.outputs.first().copied().flatten().and_then(|id| graph.values[id].ty.dtype);
        let to_integers = node.op == "Cast" && made.is_some_and(|own| !own.is_float());
        (to_integers || SCALES.contains(&node.op.as_str()))
            && node.inputs.iter().flatten().any(|id| wide.contains(id))
    });
    each.collect()
}

/// Bounds the constants of a program that stand for infinity, such as -1e9 for a masked element. They overflow to infinity in f16, and
/// the softmax of a row that is masked completely would be NaN.
fn bounded(program: &mut Program) {
    /// No factor is as large.
    const STANDS: f32 = 1e8;
    let most = f32::from(half::f16::MAX);
    let first = usize::from(program.inputs);
    for at in 0..program.steps.len() {
        let Step::Constant(own) = program.steps[at] else { continue };
        let (value, register) = (own.value(), first + at);
        let is_it = |own: u8| usize::from(own) == register;
        let divides = |own: &Step| matches!(own, Step::Binary(Operation::Divide, a, b) if is_it(*a) || is_it(*b));
        if value.is_finite() && value.abs() > STANDS && !program.steps.iter().any(divides) {
            program.steps[at] = Step::Constant(Constant::new(most.copysign(value)));
        }
    }
}

struct Converter {
    to: DType,
    /// Copies of values in f32 (`wide`) and in 16 bits (`narrow`).
    wide: HashMap<ValueId, ValueId>,
    narrow: HashMap<ValueId, ValueId>,
}

impl Converter {
    /// Returns a value in a dtype; adds a cast if needed.
    fn read(&mut self, graph: &mut Graph, id: ValueId, want: DType) -> ValueId {
        let value = graph.values[id].clone();
        let have = match value.ty.dtype {
            Some(own) if own == DType::F32 || own == self.to => own,
            _ => return id,
        };
        if have == want {
            return id;
        }
        let known = if want == DType::F32 { &mut self.wide } else { &mut self.narrow };
        if let Some(own) = known.get(&id) {
            return *own;
        }
        let own = graph.values.len();
        known.insert(id, own);
        let ty = Type { dtype: Some(want), ..value.ty };
        let name = format!("{}.{want:?}", value.name);
        let cast = value.constant.is_none();
        graph.values.push(Value {
            name: name.clone(),
            ty,
            symbols: Vec::new(),
            constant: value.constant,
        });
        if cast {
            let to = tensor::number(want).unwrap_or(1);
            graph.nodes.push(Node {
                name,
                op: "Cast".to_owned(),
                attributes: [("to".to_owned(), Attribute::Int(to.into()))].into(),
                inputs: vec![Some(id)],
                given: 1,
                constants: Vec::new(),
                outputs: vec![Some(own)],
            });
        }
        own
    }
}

/// Returns true for a program with a sine or cosine.
fn has_wave(node: &Node) -> bool {
    let wave = |step: &Step| matches!(step, Step::Unary(Function::Sin | Function::Cos, _));
    matches!(node.attributes.get("program"), Some(Attribute::Program(own)) if own.steps.iter().any(wave))
}

/// Returns true for a square root, a logarithm, and a power with another exponent than a positive
/// integer.
fn is_root(graph: &Graph, node: &Node) -> bool {
    match node.op.as_str() {
        "Sqrt" | "Log" => true,
        "Pow" => {
            let exponent = node
                .inputs
                .get(1)
                .copied()
                .flatten()
                .and_then(|id| graph.values[id].constant.clone());
            exponent.is_some_and(|own| {
                own.data().iter::<f64>().any(|own| own < 1.0 || own.fract() != 0.0)
            })
        }
        _ => match node.attributes.get("program") {
            Some(Attribute::Program(own)) => {
                let root =
                    |own: &Step| matches!(own, Step::Unary(Function::Sqrt | Function::Log, _));
                own.steps.iter().any(root)
            }
            _ => false,
        },
    }
}

/// Returns true for roots and logarithms, and for the moves, reductions and arithmetic before them.
///
/// Before a reduction, such as the mean of a variance, the search stops at a sum of two values: it
/// is the residual stream that a norm reads.
fn rooted(graph: &Graph) -> Vec<bool> {
    const PASSED: [&str; 20] = [
        "Abs",
        "Add",
        "Cast",
        "Clip",
        "Concat",
        "Div",
        "Expand",
        "Max",
        "Min",
        "Mul",
        "Neg",
        "Pow",
        "Reshape",
        "Slice",
        "Squeeze",
        "Sub",
        "Transpose",
        "Unsqueeze",
        "Where",
        "flashover::Pointwise",
    ];
    let varies = |id: &&ValueId| graph.values[**id].constant.is_none();
    let mut kept = vec![false; graph.nodes.len()];
    // Values that lead to a root; true if every path has a reduction.
    let mut read: HashMap<ValueId, bool> = HashMap::new();
    for (at, node) in graph.nodes.iter().enumerate().rev() {
        let root = is_root(graph, node).then_some(false);
        let behind = node.outputs.iter().flatten().filter_map(|id| read.get(id).copied());
        let Some(behind) = root.into_iter().chain(behind).min() else { continue };
        let folds = node.op.starts_with("Reduce");
        let stream =
            behind && node.op == "Add" && node.inputs.iter().flatten().filter(varies).count() > 1;
        if !(root.is_some() || folds || PASSED.contains(&node.op.as_str()) && !stream) {
            continue;
        }
        kept[at] = true;
        for id in node.inputs.iter().flatten().filter(varies) {
            let own = read.entry(*id).or_insert(true);
            *own &= behind || folds;
        }
    }
    kept
}

/// Returns the values that sines and cosines depend on, and their results.
fn waves(graph: &Graph) -> HashSet<ValueId> {
    const PASSED: [&str; 18] = [
        "Add",
        "Cast",
        "Concat",
        "Cos",
        "Div",
        "Exp",
        "Expand",
        "Mul",
        "Neg",
        "Pow",
        "Reshape",
        "Sin",
        "Slice",
        "Sub",
        "Transpose",
        "Unsqueeze",
        "MatMul",
        "flashover::Pointwise",
    ];
    let mut found = HashSet::new();
    for node in graph.nodes.iter().rev() {
        let wave = matches!(node.op.as_str(), "Sin" | "Cos") || has_wave(node);
        let read = node.outputs.iter().flatten().any(|id| found.contains(id));
        if !(wave || read && PASSED.contains(&node.op.as_str())) {
            continue;
        }
        if wave {
            found.extend(node.outputs.iter().flatten());
        }
        // Other readers of these values are not included.
        found.extend(
            node.inputs.iter().flatten().filter(|id| graph.values[**id].constant.is_none()),
        );
    }
    found
}
