//! Type inference by onnx-ir.
//!
//! onnx-ir renames values, folds `Shape` at the sizes of the export, and panics on some files. So
//! it reads one node at a time: a model of this node, with the known types of its inputs. Only this
//! module depends on onnx-ir.

use burn::tensor::DType;
use onnx_ir::{ArgType, OnnxGraphBuilder};
use prost::Message;

use crate::graph::{Attribute, Graph, Node, Type, ValueId};
use crate::proto::{
    AttributeProto, Dimension, GraphProto, Length, ModelProto, NodeProto, OperatorSetIdProto,
    TensorProto, TensorShapeProto, TensorTypeProto, TypeProto, TypeValue, ValueInfoProto,
};
use crate::rules::host_dtype;
use crate::run::caught;
use crate::tensor::{self, Constant};

/// Maximum elements of a constant that is passed to onnx-ir: shapes, axes and factors.
const SMALL: usize = 1024;

/// Operators whose shapes onnx-ir 0.22.0 infers wrongly.
const WRONG: [&str; 4] = ["CausalConvWithState", "DFT", "Expand", "LinearAttention"];

/// Infers the output types of a node; None if onnx-ir does not support it.
pub(crate) fn infer(graph: &Graph, node: &Node, opset: i64) -> Option<Vec<Type>> {
    // For operators of other domains, it returns the type of the input.
    if WRONG.contains(&node.op.as_str()) || node.op.contains("::") {
        return None;
    }
    let mut types = infer_by_onnx_ir(graph, node, opset)?;
    // It ignores automatic padding.
    if matches!(node.attributes.get("auto_pad"), Some(Attribute::Text(how)) if how.starts_with("SAME"))
    {
        same_padding(graph, node, types.first_mut()?);
    }
    if matches!(node.attributes.get("ceil_mode"), Some(Attribute::Int(1))) {
        types.iter_mut().for_each(|ty| rounded_up(graph, node, ty));
    }
    Some(types)
}

/// Sets the output lengths of a pool with `ceil_mode`. The last window starts in the image or in the padding before it; shapes in
/// exported files often count one window more.
fn rounded_up(graph: &Graph, node: &Node, ty: &mut Type) {
    let int = |name: &str, at: usize| match node.attributes.get(name) {
        Some(Attribute::Ints(own)) => usize::try_from(*own.get(at)?).ok(),
        _ => None,
    };
    let image = node.inputs.first().copied().flatten();
    let Some(image) = image.and_then(|id| graph.values[id].ty.shape.as_ref()) else { return };
    let rank = image.len().saturating_sub(2);
    for (at, len) in ty.shape.iter_mut().flatten().skip(2).enumerate() {
        let pads = [at, at + rank].map(|at| int("pads", at).unwrap_or(0));
        let [stride, dilation] = ["strides", "dilations"].map(|name| int(name, at).unwrap_or(1));
        let count = || {
            let reach = (int("kernel_shape", at)?.checked_sub(1)?).checked_mul(dilation)? + 1;
            let room = ((*image.get(at + 2)?)? + pads[0] + pads[1]).checked_sub(reach)?;
            let count = room.div_ceil(stride.max(1)) + 1;
            let begins = (count - 1) * stride < (*image.get(at + 2)?)? + pads[0];
            Some(if begins { count } else { count - 1 })
        };
        if !node.attributes.contains_key("auto_pad") {
            *len = count().or(*len);
        }
    }
}

/// Sets the output lengths with `SAME` padding, which depend only on the strides.
fn same_padding(graph: &Graph, node: &Node, ty: &mut Type) {
    let strides = match node.attributes.get("strides") {
        Some(Attribute::Ints(strides)) => strides.as_slice(),
        _ => &[],
    };
    let image = node.inputs.first().copied().flatten();
    let image = image.and_then(|id| graph.values[id].ty.shape.as_ref());
    for (at, len) in ty.shape.iter_mut().flatten().enumerate().skip(2) {
        let stride = strides.get(at - 2).map_or(Some(1), |own| usize::try_from(*own).ok());
        let own = image.and_then(|image| *image.get(at)?).zip(stride.filter(|own| *own > 0));
        *len = own.filter(|_| node.op != "ConvTranspose").map(|(own, stride)| own.div_ceil(stride));
    }
}

fn infer_by_onnx_ir(graph: &Graph, node: &Node, opset: i64) -> Option<Vec<Type>> {
    let bytes = single_node_model(graph, node, opset)?.encode_to_vec();
    // It panics on some nodes.
    let read = caught(|| {
        let read = OnnxGraphBuilder::new().simplify(false).parse_bytes(&bytes);
        read.map_err(|why| why.to_string())
    });
    let read = read.ok()?;
    let mut made = read.outputs.iter();
    let ty = |id: &Option<ValueId>| {
        id.and_then(|_| made.next()).map_or_else(Type::default, |own| argument_type(&own.ty))
    };
    Some(node.outputs.iter().map(ty).collect())
}

fn argument_type(own: &ArgType) -> Type {
    match own {
        ArgType::Shape(rank) => Type { dtype: Some(DType::I64), shape: Some(vec![Some(*rank)]) },
        ArgType::ScalarTensor(dtype) | ArgType::ScalarNative(dtype) => {
            Type { dtype: Some(host_dtype(*dtype)), shape: None }
        }
        ArgType::Tensor(own) => {
            let shape = own.static_shape.clone().filter(|shape| shape.len() == own.rank);
            let shape = shape.unwrap_or_else(|| vec![None; own.rank]);
            Type { dtype: Some(host_dtype(own.dtype)), shape: Some(shape) }
        }
    }
}

/// Returns a model of a single node; None if an input type is unknown, or if the node has
/// subgraphs.
fn single_node_model(graph: &Graph, node: &Node, opset: i64) -> Option<ModelProto> {
    let (domain, op_type) = node.op.split_once("::").unwrap_or(("", &node.op));
    let mut made = GraphProto { name: "node".to_owned(), ..GraphProto::default() };
    let mut names = Vec::new();
    for (at, id) in node.inputs.iter().enumerate() {
        let Some(id) = id else {
            names.push(String::new());
            continue;
        };
        // A value that is read twice has a single name.
        let name = format!("v{id}");
        let value = &graph.values[*id];
        let known = node.inputs[..at].contains(&Some(*id));
        match &value.constant {
            _ if known => {}
            Some(data) if data.count() <= SMALL => {
                made.initializer.push(TensorProto { name: name.clone(), ..tensor_proto(data)? });
            }
            _ => made.input.push(value_info(name.clone(), &value.ty)?),
        }
        names.push(name);
    }
    let output: Vec<String> = (0..node.outputs.len())
        .map(|at| if node.outputs[at].is_some() { format!("o{at}") } else { String::new() })
        .collect();
    let named = output.iter().filter(|name| !name.is_empty());
    made.output = named.map(|name| ValueInfoProto { name: name.clone(), r#type: None }).collect();
    let attribute = node.attributes.iter().map(attribute).collect::<Option<_>>()?;
    made.node.push(NodeProto {
        input: names,
        output,
        op_type: op_type.to_owned(),
        domain: domain.to_owned(),
        attribute,
        name: "node".to_owned(),
        overload: String::new(),
    });
    let opset_import = vec![OperatorSetIdProto { domain: String::new(), version: opset }];
    Some(ModelProto { ir_version: 8, graph: Some(made), opset_import, ..ModelProto::default() })
}

fn value_info(name: String, ty: &Type) -> Option<ValueInfoProto> {
    let length = |own: &Option<usize>| Dimension {
        value: own.and_then(|own| i64::try_from(own).ok()).map(Length::Number),
    };
    let dim = ty.shape.as_ref()?.iter().map(length).collect();
    let elem_type = tensor::number(ty.dtype?)?;
    let own = TensorTypeProto { elem_type, shape: Some(TensorShapeProto { dim }) };
    let r#type = Some(TypeProto { value: Some(TypeValue::Tensor(own)) });
    Some(ValueInfoProto { name, r#type })
}

fn tensor_proto(data: &Constant) -> Option<TensorProto> {
    Some(TensorProto {
        dims: data.shape.iter().map(|own| *own as i64).collect(),
        data_type: tensor::number(data.dtype)?,
        raw_data: data.bytes().clone(),
        ..TensorProto::default()
    })
}

fn attribute((name, value): (&String, &Attribute)) -> Option<AttributeProto> {
    let own = AttributeProto { name: name.clone(), ..AttributeProto::default() };
    let bytes = |text: &String| text.clone().into_bytes().into();
    Some(match value {
        Attribute::Float(f) => AttributeProto { r#type: 1, f: *f, ..own },
        Attribute::Int(i) => AttributeProto { r#type: 2, i: *i, ..own },
        Attribute::Text(text) => AttributeProto { r#type: 3, s: bytes(text), ..own },
        Attribute::Tensor(data) => {
            AttributeProto { r#type: 4, t: Some(tensor_proto(data)?), ..own }
        }
        Attribute::Floats(all) => AttributeProto { r#type: 6, floats: all.clone(), ..own },
        Attribute::Ints(all) => AttributeProto { r#type: 7, ints: all.clone(), ..own },
        Attribute::Texts(all) => {
            AttributeProto { r#type: 8, strings: all.iter().map(bytes).collect(), ..own }
        }
        Attribute::Graph(..)
        | Attribute::Activation(_)
        | Attribute::Program(_)
        | Attribute::Other => return None,
    })
}
