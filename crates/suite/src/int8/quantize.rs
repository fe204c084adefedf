//! Checks 8-bit quantisation against its reference.

use arch::{Backend, DType, Device};
use kernels::int8::{
    Int8Quantize, QuantizeConfig, QuantizeOperands, QuantizeProblem, Weight, WeightBuffers,
};
use kernels::matmul::Precision;
use reference::{Comparison, Distribution, fill, int8};
use serde_json::Value;
use tune::{Kernel, Queue};

use super::{Case, SHAPES, floats, instance_weights, layer, request, weight, weight_params};
use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, launch_twice, padded, read, reference_dtype, tells_broken,
    unwritten, zero_first,
};
use crate::kernel::{KernelSuite, Params, precision};

impl KernelSuite for Int8Quantize {
    type Case = Case<QuantizeProblem>;

    fn precision(p: &QuantizeProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &QuantizeProblem) -> Params {
        weight_params(p.weight, p.dtype)
    }

    fn problem(case: &Self::Case) -> &QuantizeProblem {
        &case.problem
    }

    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<Case<QuantizeProblem>> {
        let dtype = precision.storage();
        let problems = SHAPES.map(|(n, k)| QuantizeProblem { weight: weight(n, k), dtype });
        (1..).zip(problems).map(|(seed, problem)| Case { problem, seed }).collect()
    }

    fn config_cases(precision: Precision) -> Vec<Self::Case> {
        Self::edge_cases(precision, Backend::Cpu).into_iter().skip(3).step_by(4).collect()
    }

    fn verify(
        device: &Device,
        case: &Case<QuantizeProblem>,
        config: &QuantizeConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let mut values = fill(case.seed, p.weight.len() as usize, Distribution::Normal);
        zero_first(&mut values, p.weight.k as usize);
        let client = device.client();
        let operands = QuantizeOperands {
            values: client.create_from_slice(&padded(&reference_dtype(p.dtype).encode(&values))),
            weight: WeightBuffers {
                codes: unwritten(device, p.weight.words() as usize * 4),
                scb: unwritten(device, p.weight.n as usize * 4),
            },
            flag: client.create_from_slice(&[0; 4]),
        };
        let results = [&operands.weight.codes, &operands.weight.scb];
        launch_twice::<Int8Quantize>(device, p, config, &operands, &results)?;
        let verdict = Self::verify_operands(device, p, &operands, case.seed)?;
        tells_broken(device, reference_dtype(p.dtype), &values, |values, flag| {
            let operands = QuantizeOperands { values, flag, ..operands.clone() };
            Int8Quantize::launch(&Queue::Device(device), p, config, &operands, None);
        })?;
        Ok(verdict)
    }

    /// Compares scales bit for bit. A code may differ only if a scale that is off by two units in the last place
    /// explains it. The error of the verdict is the number of failed parts.
    fn verify_operands(
        device: &Device,
        p: &QuantizeProblem,
        operands: &QuantizeOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let Weight { n, k } = p.weight;
        let (rows, cols, dtype) = (n as usize, k as usize, reference_dtype(p.dtype));
        let values = dtype.decode(&read(device, &operands.values, rows * cols * dtype.bytes())?)?;
        let bytes = read(device, &operands.weight.codes, rows * cols)?;
        let scb = floats(device, &operands.weight.scb, rows)?;
        let codes: Vec<i8> = bytes.iter().map(|code| code.cast_signed()).collect();
        let wrong = [
            scb != int8::quantize(&values, rows, cols)?.scb,
            int8::disagreement(&values, rows, cols, &codes, 2)?.is_some(),
            read(device, &operands.flag, 4)? != [0; 4],
        ];
        let count = wrong.iter().filter(|wrong| **wrong).count() as f32;
        let comparison = Comparison::exact(&[count], &[0.0])?;
        Ok(Verdict { comparison, digest: fnv1a(&bytes) })
    }

    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<QuantizeProblem>> {
        if matches!(suite, Suite::Quick | Suite::Documents) {
            return Vec::new();
        }
        let (n, k, dtype) = layer(scale);
        vec![BenchCase::alone(QuantizeProblem { weight: weight(n, k), dtype })]
    }

    fn instances() -> Vec<InstanceCase<QuantizeProblem>> {
        let problem = |weight| QuantizeProblem { weight, dtype: DType::Bf16 };
        let case = |weight| InstanceCase { problem: problem(weight), max_candidates: 2, clean: 2 };
        instance_weights().map(case).into()
    }

    fn torch_name(_: &Self::Problem) -> &'static str {
        "bitsandbytes"
    }

    fn torch(p: &QuantizeProblem) -> Option<Value> {
        Some(request(Self::NAME, 1, p.weight, p.dtype))
    }
}
