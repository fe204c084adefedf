//! A graph with producers and readers of its values.

use std::collections::BTreeMap;

use burn::tensor::{DType, TensorData};

use crate::graph::{Attribute, Graph, Node, Type, Value, ValueId};
use crate::precision::KEPT;
use crate::tensor::Constant;

/// A graph that a pass reads and rewrites.
pub(super) struct View<'a> {
    graph: &'a mut Graph,
    /// Nodes by index; None for removed nodes.
    nodes: Vec<Option<Node>>,
    /// Nodes that are inserted before the node at an index.
    before: BTreeMap<usize, Vec<Node>>,
    /// Index of the node that produces each value.
    makers: Vec<Option<usize>>,
    /// Indices of the nodes that read each value, once per use.
    readers: Vec<Vec<usize>>,
}

impl<'a> View<'a> {
    pub(super) fn new(graph: &'a mut Graph) -> Self {
        let nodes: Vec<_> = std::mem::take(&mut graph.nodes).into_iter().map(Some).collect();
        let count = graph.values.len();
        let (makers, readers) = (vec![None; count], vec![Vec::new(); count]);
        let mut view = Self { graph, nodes, before: BTreeMap::new(), makers, readers };
        for at in 0..view.nodes.len() {
            view.link(at);
        }
        view
    }

    /// Returns the nodes to the graph, and removes unused ones.
    pub(super) fn finish(self) {
        let Self { graph, nodes, mut before, .. } = self;
        for (at, node) in nodes.into_iter().enumerate() {
            graph.nodes.extend(before.remove(&at).unwrap_or_default());
            graph.nodes.extend(node);
        }
        graph.sweep();
    }

    /// Returns the number of node indices.
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the node at an index, unless passes must not rewrite it.
    pub(super) fn node(&self, at: usize) -> Option<&Node> {
        self.nodes.get(at)?.as_ref().filter(|node| !node.attributes.contains_key(KEPT))
    }

    /// Returns the node at an index if it calls an operator.
    pub(super) fn call(&self, at: usize, op: &str) -> Option<&Node> {
        self.node(at).filter(|node| node.op == op)
    }

    /// Returns the index of the node that produces a value as its first output, if it calls an
    /// operator.
    pub(super) fn producer_index(&self, id: ValueId, op: &str) -> Option<usize> {
        let at = self.makers[id]?;
        let node = self.call(at, op)?;
        (node.outputs.first() == Some(&Some(id))).then_some(at)
    }

    /// Returns the node that produces a value as its first output, if it calls an operator.
    pub(super) fn made_by(&self, id: ValueId, op: &str) -> Option<&Node> {
        self.node(self.producer_index(id, op)?)
    }

    /// Returns the node that produces a value with a single reader, if it calls an operator.
    pub(super) fn made_for_one(&self, id: ValueId, op: &str) -> Option<&Node> {
        self.made_by(id, op).filter(|_| self.is_read_once(id))
    }

    pub(super) fn is_read_once(&self, id: ValueId) -> bool {
        self.readers[id].len() == 1 && !self.graph.outputs.contains(&id)
    }

    /// Returns the indices of the nodes that read a value.
    pub(super) fn readers(&self, id: ValueId) -> &[usize] {
        &self.readers[id]
    }

    /// Returns true for an output of the graph.
    pub(super) fn is_output(&self, id: ValueId) -> bool {
        self.graph.outputs.contains(&id)
    }

    /// Returns the only node that reads a value, with its index.
    pub(super) fn only_reader(&self, id: ValueId) -> Option<(usize, &Node)> {
        let at = *self.readers[id].first().filter(|_| self.is_read_once(id))?;
        // The reader may be a node that was inserted before this index.
        Some((at, self.node(at).filter(|node| node.inputs.contains(&Some(id)))?))
    }

    pub(super) fn ty(&self, id: ValueId) -> &Type {
        &self.graph.values[id].ty
    }

    /// Returns the dimensions of a value, if its rank is known.
    pub(super) fn dims(&self, id: ValueId) -> Option<&[Option<usize>]> {
        self.ty(id).shape.as_deref()
    }

    pub(super) fn shape(&self, id: ValueId) -> Option<Vec<usize>> {
        self.ty(id).known_shape()
    }

    pub(super) fn dtype(&self, id: ValueId) -> Option<DType> {
        self.ty(id).dtype
    }

    pub(super) fn constant(&self, id: ValueId) -> Option<&Constant> {
        self.graph.values[id].constant.as_ref()
    }

    /// Returns the elements of a constant of floats.
    pub(super) fn floats(&self, id: ValueId) -> Option<Vec<f32>> {
        let own = self.constant(id)?;
        own.dtype.is_float().then(|| own.data().iter::<f32>().collect())
    }

    /// Returns the elements of a constant of integers.
    pub(super) fn ints(&self, id: ValueId) -> Option<Vec<i64>> {
        let own = self.constant(id)?;
        (!own.dtype.is_float()).then(|| own.data().iter::<i64>().collect())
    }

    /// Returns the value of a constant with one element.
    pub(super) fn number(&self, id: ValueId) -> Option<f64> {
        let own = self.constant(id)?;
        if own.count() == 1 { own.data().iter::<f64>().next() } else { None }
    }

    /// Splits the inputs of a binary node, in any order, into a value and a number.
    pub(super) fn with_number(&self, node: &Node) -> Option<(ValueId, f64)> {
        let [Some(one), Some(other)] = node.inputs[..] else { return None };
        match (self.number(one), self.number(other)) {
            (None, Some(number)) => Some((one, number)),
            (Some(number), None) => Some((other, number)),
            _ => None,
        }
    }

    /// Adds a constant to the graph.
    pub(super) fn add_constant(&mut self, data: TensorData) -> ValueId {
        let id = self.add_value(Type::default());
        self.graph.values[id].set(Constant::new(data));
        id
    }

    /// Adds a value to the graph.
    pub(super) fn add_value(&mut self, ty: Type) -> ValueId {
        let id = self.graph.values.len();
        let name = format!("rewritten.{id}");
        self.graph.values.push(Value { name, ty, ..Value::default() });
        self.makers.push(None);
        self.readers.push(Vec::new());
        id
    }

    /// Replaces the node at an index.
    pub(super) fn replace(&mut self, at: usize, node: Node) {
        self.remove(at);
        self.nodes[at] = Some(node);
        self.link(at);
    }

    /// Removes the node at an index. If its outputs are read, another node must produce them.
    pub(super) fn remove(&mut self, at: usize) {
        let Some(node) = self.nodes[at].take() else { return };
        for id in node.inputs.iter().flatten() {
            if let Some(own) = self.readers[*id].iter().position(|reader| *reader == at) {
                self.readers[*id].swap_remove(own);
            }
        }
        for id in node.outputs.iter().flatten() {
            // Another node may already produce it.
            self.makers[*id] = self.makers[*id].filter(|maker| *maker != at);
        }
    }

    /// Inserts a node before the node at an index.
    pub(super) fn insert(&mut self, at: usize, node: Node) {
        for id in node.inputs.iter().flatten() {
            self.readers[*id].push(at);
        }
        self.before.entry(at).or_default().push(node);
    }

    /// Replaces a value by another one in all readers.
    pub(super) fn redirect(&mut self, from: ValueId, to: ValueId) {
        for at in std::mem::take(&mut self.readers[from]) {
            let Some(node) = &mut self.nodes[at] else { continue };
            for id in node.inputs.iter_mut().filter(|id| **id == Some(from)) {
                *id = Some(to);
            }
            self.readers[to].push(at);
        }
        for nodes in self.before.values_mut() {
            for id in nodes.iter_mut().flat_map(|node| &mut node.inputs) {
                if *id == Some(from) {
                    *id = Some(to);
                }
            }
        }
    }

    fn link(&mut self, at: usize) {
        let Some(node) = &self.nodes[at] else { return };
        node.inputs.iter().flatten().for_each(|id| self.readers[*id].push(at));
        node.outputs.iter().flatten().for_each(|id| self.makers[*id] = Some(at));
    }
}

/// Returns a node with the name and outputs of another.
pub(super) fn in_place_of(node: &Node, op: &str, inputs: Vec<Option<ValueId>>) -> Node {
    Node {
        name: node.name.clone(),
        op: op.to_owned(),
        attributes: BTreeMap::new(),
        given: inputs.len(),
        constants: Vec::new(),
        inputs,
        outputs: node.outputs.clone(),
    }
}

impl Node {
    /// Adds an attribute.
    #[must_use]
    pub(super) fn with(mut self, name: &str, value: Attribute) -> Self {
        self.attributes.insert(name.to_owned(), value);
        self
    }

    /// Returns the first input.
    pub(super) fn x(&self) -> Option<ValueId> {
        self.inputs.first().copied().flatten()
    }

    /// Returns the first output.
    pub(super) fn y(&self) -> Option<ValueId> {
        self.outputs.first().copied().flatten()
    }

    pub(super) fn input(&self, at: usize) -> Option<ValueId> {
        self.inputs.get(at).copied().flatten()
    }

    pub(super) fn int(&self, name: &str) -> Option<i64> {
        match self.attributes.get(name)? {
            Attribute::Int(own) => Some(*own),
            _ => None,
        }
    }

    pub(super) fn ints(&self, name: &str) -> Option<&[i64]> {
        match self.attributes.get(name)? {
            Attribute::Ints(own) => Some(own),
            _ => None,
        }
    }

    pub(super) fn float(&self, name: &str) -> Option<f64> {
        match self.attributes.get(name)? {
            Attribute::Float(own) => Some(f64::from(*own)),
            _ => None,
        }
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        match self.attributes.get(name)? {
            Attribute::Text(own) => Some(own),
            _ => None,
        }
    }
}
