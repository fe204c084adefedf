//! Graphs: nodes with attributes, and values with ids.

use std::collections::{BTreeMap, HashMap};

use burn::tensor::DType;
use ops::{Activation, Program};

use crate::OnnxError;
use crate::array::Array;
use crate::error::invalid;
use crate::proto::{
    AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto, TypeValue, ValueInfoProto,
};
use crate::source::Files;
use crate::tensor::{self, Constant};

/// Index of a value in a graph.
pub(crate) type ValueId = usize;

/// A graph.
#[derive(Debug, Clone, Default)]
pub(crate) struct Graph {
    pub(crate) values: Vec<Value>,
    /// Values that the caller passes to a run.
    pub(crate) inputs: Vec<ValueId>,
    /// Values of outer graphs, which are passed after the inputs.
    pub(crate) captured: Vec<ValueId>,
    pub(crate) outputs: Vec<ValueId>,
    /// Nodes in topological order.
    pub(crate) nodes: Vec<Node>,
}

impl Graph {
    /// Removes nodes whose outputs are unused.
    pub(crate) fn sweep(&mut self) {
        let mut read = vec![false; self.values.len()];
        self.outputs.iter().for_each(|id| read[*id] = true);
        let mut nodes = std::mem::take(&mut self.nodes);
        nodes.reverse();
        nodes.retain(|node| {
            let used = node.outputs.iter().flatten().any(|id| read[*id]);
            if used {
                node.inputs.iter().flatten().for_each(|id| read[*id] = true);
            }
            used
        });
        nodes.reverse();
        self.nodes = nodes;
    }
}

/// A value.
#[derive(Debug, Clone, Default)]
pub(crate) struct Value {
    pub(crate) name: String,
    pub(crate) ty: Type,
    /// Names of its symbolic dimensions in the file.
    pub(crate) symbols: Vec<Option<String>>,
    /// Elements of a constant.
    pub(crate) constant: Option<Constant>,
}

impl Value {
    /// Makes the value a constant.
    pub(crate) fn set(&mut self, data: Constant) {
        let shape = data.shape.iter().map(|len| Some(*len)).collect();
        self.ty = Type { dtype: Some(data.dtype), shape: Some(shape) };
        self.constant = Some(data);
    }
}

/// Dtype and shape of a value, as far as they are known before a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Type {
    pub(crate) dtype: Option<DType>,
    /// Lengths of dimensions; None if the rank is unknown.
    pub(crate) shape: Option<Vec<Option<usize>>>,
}

impl Type {
    /// Returns the shape, if all lengths are known.
    pub(crate) fn known_shape(&self) -> Option<Vec<usize>> {
        self.shape.as_ref()?.iter().copied().collect()
    }

    /// Adds the known dtype and dimensions of another type, which take precedence.
    pub(crate) fn refine(&mut self, other: Self) {
        self.dtype = other.dtype.or(self.dtype);
        let Some(mut shape) = other.shape else { return };
        if let Some(own) = self.shape.as_ref().filter(|own| own.len() == shape.len()) {
            shape.iter_mut().zip(own).for_each(|(new, own)| *new = new.or(*own));
        }
        self.shape = Some(shape);
    }

    /// Checks that an output has this shape, on which inference and passes rely, and casts floats
    /// to this dtype.
    pub(crate) fn checked(&self, array: Array) -> Result<Array, String> {
        if !self.has(&array.shape()) {
            let (have, want) = (array.shape(), self.lengths());
            return Err(format!("expected an output of the inferred shape {want}, got {have:?}"));
        }
        let float = |own: &DType| own.is_float() && array.dtype().is_float();
        Ok(match self.dtype.filter(float) {
            Some(dtype) => array.cast(dtype),
            None => array,
        })
    }

    /// Checks that an input has this dtype and shape.
    pub(crate) fn fits(&self, dtype: DType, shape: &[usize]) -> Result<(), String> {
        let bools =
            |one: DType, other: DType| matches!((one, other), (DType::Bool(_), DType::Bool(_)));
        if let Some(want) = self.dtype.filter(|want| *want != dtype && !bools(*want, dtype)) {
            return Err(format!("expected dtype {want:?}, got {dtype:?}"));
        }
        match self.has(shape) {
            true => Ok(()),
            false => Err(format!("expected shape {}, got {shape:?}", self.lengths())),
        }
    }

    fn has(&self, shape: &[usize]) -> bool {
        let fits = |(have, want): (&usize, &Option<usize>)| want.is_none_or(|want| *have == want);
        self.shape
            .as_ref()
            .is_none_or(|own| own.len() == shape.len() && shape.iter().zip(own).all(fits))
    }

    /// Returns the shape as text, with `?` for unknown lengths.
    pub(crate) fn lengths(&self) -> String {
        let named = |own: &Option<usize>| own.map_or("?".to_owned(), |own| own.to_string());
        match &self.shape {
            Some(shape) => format!("[{}]", shape.iter().map(named).collect::<Vec<_>>().join(", ")),
            None => "any shape".to_owned(),
        }
    }

    /// Returns the dtype and dimensions that both types have.
    pub(crate) fn intersect(&self, other: &Self) -> Self {
        let shape = match (&self.shape, &other.shape) {
            (Some(own), Some(other)) if own.len() == other.len() => {
                let both = own.iter().zip(other).map(|(own, other)| own.filter(|_| own == other));
                Some(both.collect())
            }
            _ => None,
        };
        Self { dtype: self.dtype.filter(|_| self.dtype == other.dtype), shape }
    }
}

/// A node: a call of an operator.
#[derive(Debug, Clone, Default)]
pub(crate) struct Node {
    pub(crate) name: String,
    /// The operator: `name` in the domain `ai.onnx`, `domain::name` in others.
    pub(crate) op: String,
    pub(crate) attributes: BTreeMap<String, Attribute>,
    /// Inputs, then captured values of its subgraphs.
    pub(crate) inputs: Vec<Option<ValueId>>,
    /// Number of inputs without captured values.
    pub(crate) given: usize,
    /// Indices of constant inputs, after folding.
    pub(crate) constants: Vec<usize>,
    pub(crate) outputs: Vec<Option<ValueId>>,
}

/// Attribute of a node.
#[derive(Debug, Clone)]
pub(crate) enum Attribute {
    Int(i64),
    Ints(Vec<i64>),
    Float(f32),
    Floats(Vec<f32>),
    Text(String),
    Texts(Vec<String>),
    Tensor(Constant),
    Activation(Activation),
    Program(Program),
    /// A subgraph, and the index of its first captured value in the inputs of the node.
    Graph(Box<Graph>, usize),
    /// A type of attribute that no operator reads.
    Other,
}

/// Reads a graph whose nodes are sorted.
pub(crate) fn read(graph: GraphProto, files: &mut Files) -> Result<Graph, OnnxError> {
    Reader { files, outer: Vec::new() }.graph(graph)
}

/// A graph under construction, with its names.
#[derive(Default)]
struct Scope {
    graph: Graph,
    names: HashMap<String, ValueId>,
}

struct Reader<'a> {
    files: &'a mut Files,
    /// Scopes, outermost first; the last one is under construction.
    outer: Vec<Scope>,
}

impl Scope {
    fn add(&mut self, name: &str) -> ValueId {
        let id = self.graph.values.len();
        self.graph.values.push(Value { name: name.to_owned(), ..Value::default() });
        self.names.insert(name.to_owned(), id);
        id
    }
}

impl Reader<'_> {
    fn graph(&mut self, proto: GraphProto) -> Result<Graph, OnnxError> {
        let mut scope = Scope::default();
        for tensor in &proto.initializer {
            let id = scope.add(&tensor.name);
            scope.graph.values[id].constant = Some(tensor::read(tensor, self.files)?);
        }
        if let Some(sparse) = proto.sparse_initializer.first() {
            let name = sparse.values.as_ref().map_or("", |own| &own.name);
            return Err(invalid(format!("sparse initializer `{name}` is not supported")));
        }
        for input in &proto.input {
            // An initializer with the name of an input is its default value and counts as a
            // constant.
            if !scope.names.contains_key(&input.name) {
                let id = scope.add(&input.name);
                scope.graph.inputs.push(id);
            }
        }
        self.outer.push(scope);
        for node in proto.node {
            let node = self.node(node)?;
            self.scope().graph.nodes.push(node);
        }
        for output in &proto.output {
            let id = self
                .find(&output.name)
                .ok_or_else(|| invalid(format!("no node computes output `{}`", output.name)))?;
            self.scope().graph.outputs.push(id);
        }
        let mut scope = self.outer.pop().expect("pushed above");
        for info in &proto.input {
            let why = match info.r#type.as_ref().and_then(|own| own.value.as_ref()) {
                Some(TypeValue::Tensor(own)) if own.elem_type != 0 => {
                    tensor::dtype(own.elem_type).err()
                }
                Some(TypeValue::Tensor(_)) | None => None,
                Some(_) => Some("only dense tensors are supported".to_owned()),
            };
            if let Some(why) = why {
                return Err(OnnxError::Input { name: info.name.clone(), why });
            }
        }
        for info in proto.input.iter().chain(&proto.output).chain(&proto.value_info) {
            if let Some(id) = scope.names.get(&info.name) {
                let value = &mut scope.graph.values[*id];
                (value.ty, value.symbols) = declared(info);
            }
        }
        for value in &mut scope.graph.values {
            if let Some(data) = value.constant.take() {
                value.set(data);
            }
        }
        Ok(scope.graph)
    }

    fn scope(&mut self) -> &mut Scope {
        self.outer.last_mut().expect("a graph is read")
    }

    /// Returns a value by its name. A value of an outer graph is captured by each graph in between.
    fn find(&mut self, name: &str) -> Option<ValueId> {
        let depth = self.outer.iter().rposition(|own| own.names.contains_key(name))?;
        for at in depth + 1..self.outer.len() {
            let id = self.outer[at].add(name);
            self.outer[at].graph.captured.push(id);
        }
        self.outer.last()?.names.get(name).copied()
    }

    fn node(&mut self, proto: NodeProto) -> Result<Node, OnnxError> {
        let mut inputs = Vec::new();
        for name in &proto.input {
            let found = if name.is_empty() { None } else { self.find(name) };
            if found.is_none() && !name.is_empty() {
                return Err(invalid(format!("no input, initializer or node defines `{name}`")));
            }
            inputs.push(found);
        }
        let given = inputs.len();
        let mut attributes = BTreeMap::new();
        for own in proto.attribute {
            let name = own.name.clone();
            let mut value = self.attribute(own)?;
            if let Attribute::Graph(graph, from) = &mut value {
                *from = inputs.len();
                for id in &graph.captured {
                    let name = graph.values[*id].name.clone();
                    inputs.push(self.find(&name));
                }
            }
            attributes.insert(name, value);
        }
        let scope = self.scope();
        let outputs = proto.output.iter();
        let outputs = outputs.map(|name| (!name.is_empty()).then(|| scope.add(name))).collect();
        let op = match crate::prepare::is_standard(&proto.domain) {
            true => proto.op_type,
            false => format!("{}::{}", proto.domain, proto.op_type),
        };
        let constants = Vec::new();
        let mut node = Node { name: proto.name, op, attributes, inputs, given, constants, outputs };
        crate::ops::hold(&mut node, &self.scope().graph.values);
        Ok(node)
    }

    fn attribute(&mut self, own: AttributeProto) -> Result<Attribute, OnnxError> {
        let text = |bytes: &bytes::Bytes| {
            String::from_utf8(bytes.to_vec())
                .map_err(|_| invalid(format!("expected UTF-8 in attribute `{}`", own.name)))
        };
        Ok(match own.r#type {
            1 => Attribute::Float(own.f),
            2 => Attribute::Int(own.i),
            3 => Attribute::Text(text(&own.s)?),
            4 => {
                let tensor = own.t.as_ref();
                let tensor = tensor
                    .ok_or_else(|| invalid(format!("attribute `{}` has no tensor", own.name)))?;
                Attribute::Tensor(self.tensor(tensor)?)
            }
            5 => {
                let graph = own
                    .g
                    .ok_or_else(|| invalid(format!("attribute `{}` has no graph", own.name)))?;
                Attribute::Graph(Box::new(self.graph(graph)?), 0)
            }
            6 => Attribute::Floats(own.floats),
            7 => Attribute::Ints(own.ints),
            8 => Attribute::Texts(own.strings.iter().map(text).collect::<Result<_, _>>()?),
            // Tensors, graphs, sparse tensors, types.
            9..=14 => Attribute::Other,
            other => {
                let name = &own.name;
                let why = format!("expected type 1 to 14 of attribute `{name}`, got {other}");
                return Err(invalid(why));
            }
        })
    }

    fn tensor(&mut self, tensor: &TensorProto) -> Result<Constant, OnnxError> {
        tensor::read(tensor, self.files)
    }
}

/// Returns the type that the file declares.
fn declared(info: &ValueInfoProto) -> (Type, Vec<Option<String>>) {
    let Some(TypeProto { value: Some(TypeValue::Tensor(tensor)) }) = &info.r#type else {
        return (Type::default(), Vec::new());
    };
    let symbol = |own: &crate::proto::Dimension| match &own.value {
        Some(crate::proto::Length::Name(name)) => Some(name.clone()),
        _ => None,
    };
    let symbols = tensor.shape.iter().flat_map(|shape| shape.dim.iter().map(symbol)).collect();
    let length = |own: &crate::proto::Dimension| match own.value {
        Some(crate::proto::Length::Number(number)) => usize::try_from(number).ok(),
        _ => None,
    };
    let shape = tensor.shape.as_ref().map(|shape| shape.dim.iter().map(length).collect());
    (Type { dtype: tensor::dtype(tensor.elem_type).ok(), shape }, symbols)
}

/// Name and type of an input or output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueType {
    /// Its name.
    pub name: String,
    /// Its dtype, if known.
    pub dtype: Option<DType>,
    /// Lengths of its dimensions: numbers, names of the file, or `?`; None if the rank is unknown.
    pub shape: Option<Vec<String>>,
}

impl ValueType {
    pub(crate) fn from_value(value: &Value) -> Self {
        let length = |(at, len): (usize, &Option<usize>)| match (len, value.symbols.get(at)) {
            (Some(len), _) => len.to_string(),
            (None, Some(Some(name))) => name.clone(),
            (None, _) => "?".to_owned(),
        };
        let shape = value.ty.shape.as_ref();
        let shape = shape.map(|shape| shape.iter().enumerate().map(length).collect());
        Self { name: value.name.clone(), dtype: value.ty.dtype, shape }
    }
}

impl std::fmt::Display for ValueType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let dtype = self.dtype.map_or("?".to_owned(), |own| own.name().to_owned());
        match &self.shape {
            Some(shape) => write!(f, "{} {dtype} [{}]", self.name, shape.join(", ")),
            None => write!(f, "{} {dtype}", self.name),
        }
    }
}
