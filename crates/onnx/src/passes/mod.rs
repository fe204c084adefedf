//! Rewrites of a graph that make it faster and keep its results. Each has a name, can be switched off, and counts what it found.

mod activations;
mod attention;
mod epilogues;
mod images;
mod moves;
mod neutral;
mod norms;
mod pointwise;
mod qkv;
mod quantised;
mod reshapes;
#[cfg(test)]
mod tests;
mod view;

use std::collections::BTreeSet;

use crate::OnnxError;
use crate::graph::Graph;

/// Places of the inputs of our own operators.
pub(crate) use epilogues::operand;
use view::View;

/// A rewrite of graphs.
pub struct Pass {
    /// Its name, for switches.
    pub name: &'static str,
    /// The nodes that it looks for.
    pub about: &'static str,
    /// Rewrites the node at a place, if it is the last one of what the pass looks for.
    rewrite: fn(&mut View<'_>, usize) -> Option<()>,
}

/// All passes, in the order in which they run.
pub const PASSES: [Pass; 16] = [
    Pass { name: "neutral", about: "nodes that change nothing", rewrite: neutral::rewrite },
    Pass {
        name: "int8",
        about: "products of int8, and quantised values",
        rewrite: quantised::rewrite,
    },
    Pass { name: "gelu", about: "GELU from its parts", rewrite: activations::gelu },
    Pass { name: "silu", about: "SiLU from its parts", rewrite: activations::silu },
    Pass {
        name: "hard-swish",
        about: "HardSwish from its parts",
        rewrite: activations::hard_swish,
    },
    Pass { name: "norm", about: "layer and RMS norms from their parts", rewrite: norms::rows },
    Pass { name: "group-norm", about: "group norms from instance norms", rewrite: norms::groups },
    Pass { name: "batch-norm", about: "batch norms after convolutions", rewrite: norms::batch },
    Pass { name: "pad", about: "padding before convolutions", rewrite: images::pad },
    Pass { name: "attention", about: "attention from its parts", rewrite: attention::rewrite },
    Pass { name: "move", about: "chains that only move elements", rewrite: moves::rewrite },
    Pass {
        name: "reshape",
        about: "products of reshaped rows, and their sums",
        rewrite: reshapes::rewrite,
    },
    Pass {
        name: "epilogue",
        about: "what follows a convolution or product",
        rewrite: epilogues::rewrite,
    },
    Pass { name: "qkv", about: "products of one input as one product", rewrite: qkv::rewrite },
    Pass {
        name: "image",
        about: "resizing and joining before convolutions",
        rewrite: images::rewrite,
    },
    Pass { name: "chain", about: "chains of elementwise nodes", rewrite: pointwise::rewrite },
];

/// Passes that are on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passes(BTreeSet<&'static str>);

impl Default for Passes {
    fn default() -> Self {
        Self::all()
    }
}

impl Passes {
    /// All passes.
    pub fn all() -> Self {
        Self(PASSES.iter().map(|pass| pass.name).collect())
    }

    /// No pass.
    pub const fn none() -> Self {
        Self(BTreeSet::new())
    }

    /// Reads switches: `on`, `off`, names of the passes that are on, or `-NAME` for all but some.
    ///
    /// # Errors
    /// [`OnnxError::Argument`] for a name that no pass has.
    pub fn parse(text: &str) -> Result<Self, OnnxError> {
        let names: Vec<&str> =
            text.split(',').map(str::trim).filter(|own| !own.is_empty()).collect();
        let mut on = match names.first() {
            Some(first) if !first.starts_with('-') => Self::none(),
            _ => Self::all(),
        };
        for name in names {
            match name {
                "on" => on = Self::all(),
                "off" => on = Self::none(),
                _ => {
                    let own = name.trim_start_matches('-');
                    let known = PASSES.iter().map(|pass| pass.name);
                    let pass = known.clone().find(|pass| *pass == own).ok_or_else(|| {
                        let all: Vec<_> = known.collect();
                        OnnxError::Argument(format!(
                            "no pass is named `{own}`\nhint: the passes are {}",
                            all.join(", ")
                        ))
                    })?;
                    if name.starts_with('-') {
                        on.0.remove(pass)
                    } else {
                        on.0.insert(pass)
                    };
                }
            }
        }
        Ok(on)
    }

    /// Returns true if a pass is on.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains(name)
    }
}

/// Runs the passes that are on, and returns how often each rewrote something.
pub(crate) fn apply(graph: &mut Graph, opset: i64, on: &Passes) -> Vec<(&'static str, usize)> {
    // Until opset 6, operators broadcast by attributes, which passes do not read.
    let passes = PASSES.iter().filter(|pass| on.has(pass.name) && opset >= 7);
    let run = |pass: &Pass| {
        let mut view = View::new(graph);
        let count = (0..view.len()).filter(|at| (pass.rewrite)(&mut view, *at).is_some()).count();
        view.finish();
        (pass.name, count)
    };
    passes.map(run).collect()
}
