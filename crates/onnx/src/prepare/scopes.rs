//! Checks names of values, and sorts nodes.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

use crate::OnnxError;
use crate::error::invalid;
use crate::proto::{GraphProto, NodeProto};

/// Sorts the nodes of a graph and its subgraphs topologically.
///
/// # Errors
/// [`OnnxError::Invalid`] for a duplicate value name, an undefined value, or a cycle.
pub(super) fn sort(graph: &mut GraphProto) -> Result<(), OnnxError> {
    sort_within(graph, &mut Vec::new())
}

/// Sorts one graph. `outer` has the values that each outer graph defines so far.
fn sort_within(graph: &mut GraphProto, outer: &mut Vec<HashSet<String>>) -> Result<(), OnnxError> {
    let given: HashSet<String> = graph
        .input
        .iter()
        .map(|own| &own.name)
        .chain(graph.initializer.iter().map(|own| &own.name))
        .chain(graph.sparse_initializer.iter().filter_map(|own| Some(&own.values.as_ref()?.name)))
        .cloned()
        .collect();
    let inputs: Vec<&String> = graph.input.iter().map(|own| &own.name).collect();
    let constants: Vec<&String> = graph.initializer.iter().map(|own| &own.name).collect();
    for names in [inputs, constants] {
        let mut seen = HashSet::new();
        if let Some(name) = names.into_iter().find(|name| !seen.insert(*name)) {
            return Err(invalid(format!("expected unique value names, got `{name}` twice")));
        }
    }
    let mut makers = HashMap::new();
    for (at, node) in graph.node.iter().enumerate() {
        for name in node.output.iter().filter(|name| !name.is_empty()) {
            if given.contains(name) || makers.insert(name.clone(), at).is_some() {
                return Err(invalid(format!("expected unique value names, got `{name}` twice")));
            }
        }
    }
    outer.push(given);
    let order = order(&graph.node, &makers, outer)?;
    let mut nodes: Vec<_> = std::mem::take(&mut graph.node).into_iter().map(Some).collect();
    for at in order {
        let mut node = nodes[at].take().expect("each node once");
        for own in super::graphs_of(&mut node) {
            sort_within(own, outer)?;
        }
        outer.last_mut().expect("pushed").extend(node.output.iter().cloned());
        graph.node.push(node);
    }
    let known = |name: &String| outer.iter().any(|own| own.contains(name));
    let missing = graph.output.iter().find(|own| !known(&own.name));
    let missing = missing.map(|own| own.name.clone());
    outer.pop();
    match missing {
        Some(name) => Err(invalid(format!("no node computes output `{name}`"))),
        None => Ok(()),
    }
}

/// Returns the topological order of nodes that is closest to the file.
fn order(
    nodes: &[NodeProto],
    makers: &HashMap<String, usize>,
    outer: &[HashSet<String>],
) -> Result<Vec<usize>, OnnxError> {
    let mut waits = vec![0; nodes.len()];
    let mut readers = vec![Vec::new(); nodes.len()];
    for (at, node) in nodes.iter().enumerate() {
        let mut names = Vec::new();
        read_by(node, &mut HashSet::new(), &mut names);
        for name in names {
            match makers.get(name) {
                Some(maker) => {
                    readers[*maker].push(at);
                    waits[at] += 1;
                }
                None if outer.iter().any(|own| own.contains(name)) => {}
                None => {
                    let op = &node.op_type;
                    let reader = match node.name.as_str() {
                        "" => op.clone(),
                        node => format!("{op} `{node}`"),
                    };
                    return Err(invalid(format!(
                        "{reader} reads `{name}`, which no node computes"
                    )));
                }
            }
        }
    }
    let ready = (0..nodes.len()).filter(|at| waits[*at] == 0);
    let mut ready: BinaryHeap<Reverse<usize>> = ready.map(Reverse).collect();
    let mut order = Vec::with_capacity(nodes.len());
    while let Some(Reverse(at)) = ready.pop() {
        order.push(at);
        for reader in &readers[at] {
            waits[*reader] -= 1;
            if waits[*reader] == 0 {
                ready.push(Reverse(*reader));
            }
        }
    }
    match (0..nodes.len()).find(|at| waits[*at] > 0) {
        Some(at) => {
            let name = nodes[at].output.first().map_or("", String::as_str);
            Err(invalid(format!("the graph has a cycle: `{name}` depends on itself")))
        }
        None => Ok(order),
    }
}

/// Adds the names that a node and its subgraphs read from outside.
fn read_by<'a>(node: &'a NodeProto, inner: &mut HashSet<&'a str>, names: &mut Vec<&'a str>) {
    let free = |name: &&String| !name.is_empty();
    names.extend(
        node.input.iter().filter(free).map(String::as_str).filter(|name| !inner.contains(name)),
    );
    for graph in node.attribute.iter().flat_map(|own| own.g.iter().chain(&own.graphs)) {
        let given = graph.input.iter().map(|own| own.name.as_str());
        let given = given.chain(graph.initializer.iter().map(|own| own.name.as_str()));
        let made = graph.node.iter().flat_map(|own| own.output.iter().map(String::as_str));
        let mut inner: HashSet<&str> = inner.iter().copied().chain(given).chain(made).collect();
        for own in &graph.node {
            read_by(own, &mut inner, names);
        }
        let outputs = graph.output.iter().map(|own| own.name.as_str());
        names.extend(outputs.filter(|name| !inner.contains(name)));
    }
}
