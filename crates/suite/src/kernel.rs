//! The trait that each kernel's file implements.

use std::collections::BTreeMap;
use std::fmt::Debug;

use arch::{Backend, DType, Device};
use kernels::matmul::Precision;
use serde_json::Value;
use tune::Kernel;
use tune::timing::{Timing, TimingError};

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{CheckError, Verdict};

/// Parameters of a case, by name, as records hold them.
pub type Params = BTreeMap<String, Value>;

/// Times of other implementations, by name.
pub type Peers = Vec<(&'static str, Result<Timing, TimingError>)>;

/// Cases, checks and benchmarks of one kernel.
pub trait KernelSuite: Kernel + Sync {
    /// A problem and the inputs that check it.
    type Case: Clone + Debug + 'static;

    /// Precisions with their own cases. `verify` tries a measured config on cases of its precision only.
    const PRECISIONS: &'static [Precision] = &[Precision::F32, Precision::F16, Precision::Bf16];

    /// Precision of the matmuls. Its measured peak bounds the kernel.
    fn precision(problem: &Self::Problem) -> Precision;

    /// Parameters of a problem in records; they form the name of a case.
    fn params(problem: &Self::Problem) -> Params;

    /// Cases that the default config and the measured configs must pass.
    fn edge_cases(precision: Precision, backend: Backend) -> Vec<Self::Case>;

    /// Fewer cases, for configs that are not the default.
    fn config_cases(precision: Precision) -> Vec<Self::Case>;

    fn problem(case: &Self::Case) -> &Self::Problem;

    /// Parameters of a case: those of its problem, plus the ones that distinguish its inputs.
    fn case_params(case: &Self::Case) -> Params {
        Self::params(Self::problem(case))
    }

    /// Runs `case` on fresh host inputs and compares every result with the f64 reference. Outputs are NaN before the
    /// launch, so that an unwritten element fails.
    ///
    /// # Errors
    /// The kernel failed to run. A wrong result is a [`Verdict`].
    fn verify(
        device: &Device,
        case: &Self::Case,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError>;

    /// Compares the results of a launch in `operands` with the f64 reference. A large result is compared at positions
    /// sampled by `seed`.
    ///
    /// # Errors
    /// The launch failed.
    fn verify_operands(
        device: &Device,
        problem: &Self::Problem,
        operands: &Self::Operands,
        seed: u64,
    ) -> Result<Verdict, CheckError>;

    /// Cases of a bench suite, for a GPU or for the cores of a host.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<Self::Problem>>;

    /// Problems to cross-compile: those that generate different code.
    fn instances() -> Vec<InstanceCase<Self::Problem>>;

    /// Times of peers that run on our operands.
    fn peers_on(_device: &Device, _problem: &Self::Problem, _sets: &[Self::Operands]) -> Peers {
        Peers::new()
    }

    /// Times of peers that allocate their own `sets` sets of operands.
    fn peers(_device: &Device, _problem: &Self::Problem, _sets: usize) -> Peers {
        Peers::new()
    }

    /// Name of the library that [`KernelSuite::torch`] measures.
    fn torch_name(_problem: &Self::Problem) -> &'static str {
        "torch"
    }

    /// The problem as a request to `torch.py`; `None` if torch has no equivalent op.
    fn torch(_problem: &Self::Problem) -> Option<Value> {
        None
    }
}

/// Matmul precision for values of `dtype`. It is never tf32, which has to be named.
pub(crate) const fn precision(dtype: DType) -> Precision {
    match dtype {
        DType::F16 => Precision::F16,
        DType::Bf16 => Precision::Bf16,
        _ => Precision::F32,
    }
}

/// Parameters by name.
pub(crate) fn params<const N: usize>(of: [(&str, Value); N]) -> Params {
    of.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Inserts `name: true` for each rule.
pub(crate) fn insert_rules(params: &mut Params, rules: impl IntoIterator<Item = &'static str>) {
    params.extend(rules.into_iter().map(|rule| (rule.to_owned(), true.into())));
}
