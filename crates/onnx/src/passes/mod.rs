//! Graph passes, which make a graph faster and keep its results. Each has a name, can be disabled,
//! and counts its rewrites.

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

/// Input indices of our own operators.
pub(crate) use epilogues::operand;
use view::View;

/// A graph pass.
pub struct Pass {
    /// Its name on the command line.
    pub name: &'static str,
    /// The nodes that it rewrites.
    pub about: &'static str,
    /// Rewrites the pattern whose last node is at an index; None without a match.
    rewrite: fn(&mut View<'_>, usize) -> Option<()>,
}

/// All passes, in the order in which they run.
pub const PASSES: [Pass; 16] = [
    Pass { name: "neutral", about: "nodes without effect", rewrite: neutral::rewrite },
    Pass { name: "int8", about: "int8 matmuls and quantised values", rewrite: quantised::rewrite },
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
    Pass { name: "reshape", about: "reshapes around matmuls and sums", rewrite: reshapes::rewrite },
    Pass {
        name: "epilogue",
        about: "nodes after convolutions and matmuls",
        rewrite: epilogues::rewrite,
    },
    Pass { name: "qkv", about: "matmuls that share an input", rewrite: qkv::rewrite },
    Pass {
        name: "image",
        about: "upsampling and concatenation before convolutions",
        rewrite: images::rewrite,
    },
    Pass { name: "chain", about: "chains of elementwise nodes", rewrite: pointwise::rewrite },
];

/// A set of enabled passes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passes(BTreeSet<&'static str>);

impl Default for Passes {
    fn default() -> Self {
        Self::all()
    }
}

impl Passes {
    /// Returns all passes.
    pub fn all() -> Self {
        Self(PASSES.iter().map(|pass| pass.name).collect())
    }

    /// Returns no passes.
    pub const fn none() -> Self {
        Self(BTreeSet::new())
    }

    /// Parses switches: `on`, `off`, names of passes, or `-NAME` for all except some.
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

    /// Returns true if a pass is enabled.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains(name)
    }
}

/// Runs the enabled passes, and returns the rewrites of each.
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
