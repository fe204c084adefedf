//! Inlines local functions: each call becomes the nodes of the function.

use std::collections::HashMap;

use super::{MAX_DEPTH, MAX_NODES, is_standard};
use crate::OnnxError;
use crate::error::invalid;
use crate::proto::{AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto};

/// Domain, name and overload of a function.
type Key = (String, String, String);

struct Inliner {
    functions: HashMap<Key, FunctionProto>,
    /// Calls so far, for unique names.
    calls: usize,
    /// Nodes so far.
    nodes: usize,
}

/// Inlines all calls of functions, and removes the functions.
///
/// # Errors
/// [`OnnxError::Invalid`] for a function that calls itself, has another opset than the model, or is
/// called with too many values; [`OnnxError::Limit`].
pub(super) fn inline(model: &mut ModelProto) -> Result<(), OnnxError> {
    let functions = std::mem::take(&mut model.functions);
    if functions.is_empty() {
        return Ok(());
    }
    let opset = super::opset(model);
    for function in &functions {
        let own = function.opset_import.iter().find(|own| is_standard(&own.domain));
        if let Some(own) = own.filter(|own| Some(own.version) != opset) {
            let want = opset.map_or("none".to_owned(), |own| own.to_string());
            let (name, have) = (&function.name, own.version);
            let why = format!("expected the model's opset {want} in function `{name}`, got {have}");
            return Err(invalid(why));
        }
        let add = |own: &&crate::proto::OperatorSetIdProto| {
            !model.opset_import.iter().any(|have| have.domain == own.domain)
        };
        let more: Vec<_> = function.opset_import.iter().filter(add).cloned().collect();
        model.opset_import.extend(more);
    }
    let key = |own: &FunctionProto| (own.domain.clone(), own.name.clone(), own.overload.clone());
    let functions = functions.into_iter().map(|own| (key(&own), own)).collect();
    let mut inliner = Inliner { functions, calls: 0, nodes: 0 };
    let graph = model.graph.as_mut().expect("decoded with a graph");
    inliner.graph(graph, 0)
}

impl Inliner {
    fn graph(&mut self, graph: &mut GraphProto, depth: usize) -> Result<(), OnnxError> {
        let nodes = std::mem::take(&mut graph.node);
        graph.node = self.nodes(nodes, depth)?;
        Ok(())
    }

    fn nodes(&mut self, nodes: Vec<NodeProto>, depth: usize) -> Result<Vec<NodeProto>, OnnxError> {
        let mut all = Vec::with_capacity(nodes.len());
        for mut node in nodes {
            let key = (node.domain.clone(), node.op_type.clone(), node.overload.clone());
            if let Some(function) = self.functions.get(&key).cloned() {
                if depth == MAX_DEPTH {
                    return Err(invalid(format!("the function `{}` calls itself", node.op_type)));
                }
                self.calls += 1;
                let body = body(&function, &node, self.calls)?;
                all.extend(self.nodes(body, depth + 1)?);
                continue;
            }
            for graph in super::graphs_of(&mut node) {
                self.graph(graph, depth)?;
            }
            self.nodes += 1;
            if self.nodes > MAX_NODES {
                let (what, have) = ("nodes", self.nodes);
                return Err(OnnxError::Limit { what, have, most: MAX_NODES });
            }
            all.push(node);
        }
        Ok(all)
    }
}

/// Returns the nodes of a function, with the values and attributes of a call.
fn body(
    function: &FunctionProto,
    call: &NodeProto,
    number: usize,
) -> Result<Vec<NodeProto>, OnnxError> {
    let counts = [(&call.input, &function.input), (&call.output, &function.output)];
    if counts.iter().any(|(given, takes)| given.len() > takes.len()) {
        let [(inputs, max_inputs), (outputs, max_outputs)] =
            counts.map(|(given, takes)| (given.len(), takes.len()));
        return Err(invalid(format!(
            "expected at most {max_inputs} inputs and {max_outputs} outputs in a call of function `{}`, \
             got {inputs} and {outputs}",
            function.name
        )));
    }
    let prefix = format!("{}/{number}/", function.name);
    let mut names = HashMap::new();
    for (at, own) in function.input.iter().enumerate() {
        names.insert(own.clone(), call.input.get(at).cloned().unwrap_or_default());
    }
    for (own, given) in
        function.output.iter().zip(&call.output).filter(|(_, given)| !given.is_empty())
    {
        // An input that is also an output needs an `Identity`.
        names.entry(own.clone()).or_insert_with(|| given.clone());
    }
    let mut nodes = function.node.clone();
    for node in &mut nodes {
        rename(node, &names, &prefix);
        fill(node, function, call);
    }
    let returned = function.output.iter().zip(&call.output).filter(|(own, given)| {
        !given.is_empty() && names.get(*own).is_some_and(|have| have != *given)
    });
    for (own, given) in returned {
        nodes.push(NodeProto {
            input: vec![names[own].clone()],
            output: vec![given.clone()],
            name: format!("{prefix}{own}"),
            op_type: "Identity".to_owned(),
            ..NodeProto::default()
        });
    }
    Ok(nodes)
}

/// Renames the values of a node and its subgraphs to the names of the caller, or to unique names.
fn rename(node: &mut NodeProto, names: &HashMap<String, String>, prefix: &str) {
    let renamed = |own: &mut String| match names.get(own.as_str()) {
        _ if own.is_empty() => {}
        Some(name) => own.clone_from(name),
        None => own.insert_str(0, prefix),
    };
    node.input.iter_mut().chain(&mut node.output).for_each(renamed);
    node.name.insert_str(0, prefix);
    for graph in super::graphs_of(node) {
        let values = graph.input.iter_mut().chain(&mut graph.output).chain(&mut graph.value_info);
        let tensors = graph.initializer.iter_mut().map(|own| &mut own.name);
        values.map(|own| &mut own.name).chain(tensors).for_each(renamed);
        graph.node.iter_mut().for_each(|own| rename(own, names, prefix));
    }
}

/// Resolves attributes that refer to attributes of the call. References without a value or default
/// are removed.
fn fill(node: &mut NodeProto, function: &FunctionProto, call: &NodeProto) {
    let given = |name: &str| -> Option<&AttributeProto> {
        let named = |own: &&AttributeProto| own.name == name;
        call.attribute.iter().find(named).or_else(|| function.attribute_proto.iter().find(named))
    };
    node.attribute.retain_mut(|own| match own.ref_attr_name.as_str() {
        "" => true,
        from => match given(from) {
            Some(value) => {
                *own = AttributeProto { name: own.name.clone(), ..value.clone() };
                true
            }
            None => false,
        },
    });
    for graph in super::graphs_of(node) {
        graph.node.iter_mut().for_each(|own| fill(own, function, call));
    }
}
