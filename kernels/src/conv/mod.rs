//! out = factor · (residual + gate · activation(x ∗ w + bias))    channels last
//!
//! ```text
//! out[n, y, x, f] = Σ over r, s, c:  x[n, y·stride + r·dilation - top, x·stride + s·dilation - left, c] · w[f, r, s, c]
//!   x: [batch, height, width, channels]   w: [filters, rows, cols, channels / groups]
//!   out, gate, residual: [batch, out height, out width, filters]   bias: [filters] or [batch, filters]
//! ```
//!
//! Channels may come from two inputs, so that joining them costs nothing. x may be read twice as large, or with zeros between its
//! pixels ([`Reading`](crate::matmul::Reading)): a resizing by two, or a transposed convolution. The taps of a transposed
//! convolution are those of its definition turned around: tap r is tap `rows - 1 - r` of torch.
//!
//! Cost: `2 · out · rows · cols · channels / groups` flop; reads x and w once, writes out once.
//!
//! Two paths. Nearly all convolutions are [matmuls](crate::matmul) whose rows are
//! [windows](crate::matmul::Window) of x. With a few filters per group, as in a depthwise one, a unit computes one result
//! ([`direct`]).

mod direct;
mod problem;

use arch::ArchProfile;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

pub use direct::DirectConfig;
pub use problem::{ConvProblem, InvalidConv};

use crate::matmul::{EpilogueBuffers, Matmul, MatmulConfig, MatmulOperands, MatmulProblem};

/// The convolution kernel family.
pub struct Conv;

/// A path and its sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ConvConfig {
    Product(MatmulConfig),
    Direct(DirectConfig),
}

/// Device buffers of a convolution; see [`ConvProblem::lens`].
#[derive(Debug, Clone)]
pub struct ConvOperands {
    pub x: Handle,
    pub second: Option<Handle>,
    pub filters: Handle,
    pub out: Handle,
    pub epilogue: EpilogueBuffers,
}

/// Filters per group from which a matmul is worth it.
const FILTERS: u32 = 8;

fn product(problem: &ConvProblem) -> MatmulProblem {
    problem.product().expect("a checked problem")
}

impl Kernel for Conv {
    type Problem = ConvProblem;
    type Config = ConvConfig;
    type Operands = ConvOperands;

    const NAME: &'static str = "conv";
    const VERSION: u32 = 2;

    fn bucket(problem: &ConvProblem) -> String {
        let groups = if problem.groups > 1 { " groups" } else { "" };
        format!("{}{groups}", product(problem).bucket())
    }

    fn candidates(arch: &ArchProfile, problem: &ConvProblem) -> Vec<ConvConfig> {
        let direct = DirectConfig::candidates(arch, problem).into_iter().map(ConvConfig::Direct);
        if problem.groups > 1 && problem.filters / problem.groups < FILTERS {
            return direct.collect();
        }
        let products = Matmul::candidates(arch, &product(problem));
        let products: Vec<_> = products.into_iter().map(ConvConfig::Product).collect();
        if products.is_empty() { direct.collect() } else { products }
    }

    fn check(
        arch: &ArchProfile,
        problem: &ConvProblem,
        config: &ConvConfig,
    ) -> Result<(), Infeasible> {
        match config {
            ConvConfig::Product(config) => Matmul::check(arch, &product(problem), config),
            ConvConfig::Direct(config) => config.check(arch, problem),
        }
    }

    fn cost(problem: &ConvProblem) -> Cost {
        problem.cost()
    }

    fn baseline(arch: &ArchProfile, problem: &ConvProblem) -> Result<ConvConfig, Infeasible> {
        let config = DirectConfig::BASELINE;
        match config.check(arch, problem) {
            Ok(()) => Ok(ConvConfig::Direct(config)),
            // Its results differ from f32 by rounding.
            Err(_) => Matmul::baseline(arch, &product(problem)).map(ConvConfig::Product),
        }
    }

    fn operands(queue: &Queue, problem: &ConvProblem, seed: u64) -> ConvOperands {
        let MatmulOperands { lhs, rhs, out, epilogue, second, .. } =
            Matmul::operands(queue, &product(problem), seed);
        ConvOperands { x: lhs, second, filters: rhs, out, epilogue }
    }

    fn outputs(problem: &ConvProblem, operands: &ConvOperands) -> Vec<Output> {
        Matmul::outputs(&product(problem), &operands.matmul())
    }

    fn scratch_bytes(problem: &ConvProblem, config: &ConvConfig) -> u64 {
        match config {
            ConvConfig::Product(config) => Matmul::scratch_bytes(&product(problem), config),
            ConvConfig::Direct(_) => 0,
        }
    }

    fn launch(
        queue: &Queue,
        problem: &ConvProblem,
        config: &ConvConfig,
        operands: &ConvOperands,
        scratch: Option<&Handle>,
    ) {
        match config {
            ConvConfig::Product(config) => {
                Matmul::launch(queue, &product(problem), config, &operands.matmul(), scratch);
            }
            ConvConfig::Direct(config) => direct::launch(queue, problem, config, operands),
        }
    }
}

impl ConvOperands {
    fn matmul(&self) -> MatmulOperands {
        MatmulOperands {
            lhs: self.x.clone(),
            rhs: self.filters.clone(),
            out: self.out.clone(),
            epilogue: self.epilogue.clone(),
            rows: None,
            norm: None,
            second: self.second.clone(),
        }
    }
}
