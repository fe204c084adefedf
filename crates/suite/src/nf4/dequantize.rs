//! Checks that dequantised 4-bit weights are bit-identical to the reference.

use arch::{Backend, DType, Device};
use kernels::matmul::Precision;
use kernels::nf4::{DequantizeConfig, DequantizeOperands, DequantizeProblem, Nf4Dequantize, Order};
use reference::{Comparison, FourBit};
use serde_json::Value;
use tune::Kernel;

use super::{Quantized, code_name, instance_weights, request, values_of, weight, weight_params};
use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{CheckError, Verdict, fnv1a, launch_twice, read, reference_dtype, unwritten};
use crate::kernel::{KernelSuite, Params, precision};

/// A weight to dequantise and verify.
#[derive(Debug, Clone, Copy)]
pub struct DequantizeCase {
    pub problem: DequantizeProblem,
    pub code: FourBit,
    pub seed: u64,
}

impl KernelSuite for Nf4Dequantize {
    type Case = DequantizeCase;

    fn precision(p: &DequantizeProblem) -> Precision {
        precision(p.out)
    }

    fn params(p: &DequantizeProblem) -> Params {
        weight_params(&p.weight, p.out)
    }

    fn problem(case: &DequantizeCase) -> &DequantizeProblem {
        &case.problem
    }

    fn case_params(case: &DequantizeCase) -> Params {
        let mut params = Self::params(&case.problem);
        params.insert("code".to_owned(), code_name(case.code).into());
        params
    }

    /// Every block size, nested or not, in both orders; odd counts; blocks that straddle rows; a partial last block and
    /// last group of blocks; both codebooks.
    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<DequantizeCase> {
        let out = precision.storage();
        let mut weights = Vec::new();
        for nested in [false, true] {
            for block_size in [32, 64, 128, 256, 512, 1024, 2048, 4096] {
                weights.push(weight(24, 200, block_size, nested, Order::Rows));
                if block_size >= 64 {
                    weights.push(weight(48, 512, block_size, nested, Order::Tiles));
                }
            }
            weights.extend([
                weight(1, 1, 64, nested, Order::Rows),
                weight(7, 13, 32, nested, Order::Rows),
                weight(37, 41, 64, nested, Order::Rows),
                weight(3, 22000, 64, nested, Order::Rows),
                weight(160, 768, 64, nested, Order::Tiles),
            ]);
        }
        let problems = weights.into_iter().map(|weight| DequantizeProblem { weight, out });
        (1..)
            .zip(problems)
            .map(|(seed, problem)| {
                let code = if seed % 4 == 3 { FourBit::Fp4 } else { FourBit::Nf4 };
                DequantizeCase { problem, code, seed }
            })
            .collect()
    }

    fn config_cases(precision: Precision) -> Vec<DequantizeCase> {
        Self::edge_cases(precision, Backend::Cpu).into_iter().skip(1).step_by(11).collect()
    }

    fn verify(
        device: &Device,
        case: &DequantizeCase,
        config: &DequantizeConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let host = Quantized::seeded(p.weight, case.code, case.seed)?;
        let bytes = p.weight.len() as usize * p.out.size();
        let operands = DequantizeOperands {
            weight: host.upload(device, p.weight),
            out: unwritten(device, bytes),
        };
        launch_twice::<Nf4Dequantize>(device, p, config, &operands, &[&operands.out])?;
        let out = read(device, &operands.out, bytes)?;
        let dtype = reference_dtype(p.out);
        let expected = dtype.decode(&dtype.encode(&host.values))?;
        let comparison = Comparison::exact(&dtype.decode(&out)?, &expected)?;
        Ok(Verdict { comparison, digest: fnv1a(&out) })
    }

    fn verify_operands(
        device: &Device,
        p: &DequantizeProblem,
        operands: &DequantizeOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let out = read(device, &operands.out, p.weight.len() as usize * p.out.size())?;
        let dtype = reference_dtype(p.out);
        let values = values_of(device, p.weight, &operands.weight)?;
        let expected = dtype.decode(&dtype.encode(&values))?;
        let comparison = Comparison::exact(&dtype.decode(&out)?, &expected)?;
        Ok(Verdict { comparison, digest: fnv1a(&out) })
    }

    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<DequantizeProblem>> {
        let (n, k, out) = match (suite, scale) {
            (Suite::Documents, _) => return Vec::new(),
            (_, Scale::Gpu) => (14336, 4096, DType::Bf16),
            (_, Scale::Host) => (4096, 1024, DType::F32),
        };
        let problem = |order| DequantizeProblem { weight: weight(n, k, 64, true, order), out };
        [Order::Rows, Order::Tiles].map(problem).map(BenchCase::alone).into()
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
        Some(request(Self::NAME, 1, &p.weight, p.out))
    }
}
