//! Checks that dequantised 8-bit weights are bit-identical to the reference.

use arch::{Backend, DType, Device};
use kernels::int8::{DequantizeConfig, DequantizeOperands, DequantizeProblem, Int8Dequantize};
use kernels::matmul::Precision;
use reference::Comparison;
use serde_json::Value;
use tune::Kernel;

use super::{
    Case, SHAPES, instance_weights, layer, request, seeded, upload, values_of, weight,
    weight_params,
};
use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{CheckError, Verdict, fnv1a, launch_twice, read, reference_dtype, unwritten};
use crate::kernel::{KernelSuite, Params, precision};

impl KernelSuite for Int8Dequantize {
    type Case = Case<DequantizeProblem>;

    fn precision(p: &DequantizeProblem) -> Precision {
        precision(p.out)
    }

    fn params(p: &DequantizeProblem) -> Params {
        weight_params(p.weight, p.out)
    }

    fn problem(case: &Self::Case) -> &DequantizeProblem {
        &case.problem
    }

    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<Case<DequantizeProblem>> {
        let out = precision.storage();
        let problems = SHAPES.map(|(n, k)| DequantizeProblem { weight: weight(n, k), out });
        (1..).zip(problems).map(|(seed, problem)| Case { problem, seed }).collect()
    }

    fn config_cases(precision: Precision) -> Vec<Self::Case> {
        Self::edge_cases(precision, Backend::Cpu).into_iter().skip(3).step_by(4).collect()
    }

    fn verify(
        device: &Device,
        case: &Case<DequantizeProblem>,
        config: &DequantizeConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let operands = DequantizeOperands {
            weight: upload(device, &seeded(p.weight, case.seed)?),
            out: unwritten(device, p.weight.len() as usize * p.out.size()),
        };
        launch_twice::<Int8Dequantize>(device, p, config, &operands, &[&operands.out])?;
        Self::verify_operands(device, p, &operands, case.seed)
    }

    fn verify_operands(
        device: &Device,
        p: &DequantizeProblem,
        operands: &DequantizeOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let out = read(device, &operands.out, p.weight.len() as usize * p.out.size())?;
        let dtype = reference_dtype(p.out);
        let expected =
            dtype.decode(&dtype.encode(&values_of(device, p.weight, &operands.weight)?))?;
        let comparison = Comparison::exact(&dtype.decode(&out)?, &expected)?;
        Ok(Verdict { comparison, digest: fnv1a(&out) })
    }

    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<DequantizeProblem>> {
        if matches!(suite, Suite::Quick | Suite::Documents) {
            return Vec::new();
        }
        let (n, k, out) = layer(scale);
        vec![BenchCase::alone(DequantizeProblem { weight: weight(n, k), out })]
    }

    fn instances() -> Vec<InstanceCase<DequantizeProblem>> {
        let problem = |weight| DequantizeProblem { weight, out: DType::Bf16 };
        let case = |weight| InstanceCase { problem: problem(weight), max_candidates: 2, clean: 2 };
        instance_weights().map(case).into()
    }

    fn torch_name(_: &Self::Problem) -> &'static str {
        "bitsandbytes"
    }

    fn torch(p: &DequantizeProblem) -> Option<Value> {
        Some(request(Self::NAME, 1, p.weight, p.out))
    }
}
