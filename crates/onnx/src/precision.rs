//! Floats of 16 bits in place of f32.
//!
//! Inputs and outputs of a model stay as the file has them. A node that keeps f32 reads and makes f32: those that the caller
//! names, those that run graphs, those of quantisation, and what sines and cosines are computed from, which 16 bits would shift by
//! whole periods. Statistics, softmax and sums are computed in f32 by their operators, whatever they read.

use std::collections::{HashMap, HashSet};

use burn::tensor::DType;
use ops::{Function, Step};

use crate::OnnxError;
use crate::error::invalid;
use crate::graph::{Attribute, Graph, Node, Type, Value, ValueId};
use crate::tensor;

/// Converts a graph to floats of 16 bits, but for the nodes with a name in `keep`.
///
/// # Errors
/// [`OnnxError::Invalid`] for a name that neither a node nor a value has.
pub(crate) fn convert(graph: &mut Graph, to: DType, keep: &[String]) -> Result<(), OnnxError> {
    let has = |node: &Node, name: &String| {
        node.name == *name
            || node.outputs.iter().flatten().any(|id| graph.values[*id].name == *name)
    };
    if let Some(name) = keep.iter().find(|name| !graph.nodes.iter().any(|node| has(node, name))) {
        return Err(invalid(format!("no node is named `{name}`, which is to keep f32")));
    }
    let waves = waves(graph);
    let keeps = |node: &Node| {
        keep.iter().any(|name| has(node, name))
            || node.op.contains("uantize")
            || node.op.contains("Integer")
            || node.op.contains("QLinear")
            || node.attributes.values().any(|own| matches!(own, Attribute::Graph(..)))
            || node.outputs.iter().flatten().any(|id| waves.contains(id))
    };
    let kept: Vec<bool> = graph.nodes.iter().map(keeps).collect();
    let mut made = Converter { to, wide: HashMap::new(), narrow: HashMap::new() };
    let nodes = std::mem::take(&mut graph.nodes);
    for (mut node, kept) in nodes.into_iter().zip(kept) {
        let sizes = matches!(node.op.as_str(), "Resize" | "Upsample" | "Range");
        for (at, input) in node.inputs.iter_mut().enumerate() {
            let Some(id) = *input else { continue };
            // Sizes are exact.
            if sizes && (at > 0 || node.op == "Range") && graph.values[id].constant.is_some() {
                continue;
            }
            *input = Some(made.read(graph, id, if kept { DType::F32 } else { to }));
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
    Ok(())
}

struct Converter {
    to: DType,
    /// Values as f32, and in 16 bits.
    wide: HashMap<ValueId, ValueId>,
    narrow: HashMap<ValueId, ValueId>,
}

impl Converter {
    /// Returns a value as floats of a type, adding a cast where one is needed.
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

/// Returns the values that sines and cosines are computed from, and these.
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
        // What the others of their readers make is not part of it.
        found.extend(
            node.inputs.iter().flatten().filter(|id| graph.values[**id].constant.is_none()),
        );
    }
    found
}
