//! Checks 4-bit quantisation against its reference.

use arch::{Backend, DType, Device};
use kernels::matmul::Precision;
use kernels::nf4::{
    Codebook, Nf4Quantize, Order, QuantizeConfig, QuantizeOperands, QuantizeProblem, nest,
    nested_values,
};
use reference::{Comparison, Distribution, FourBit, fill, nf4};
use serde_json::Value;
use tune::{Kernel, Queue};

use super::{request, weight, weight_params};
use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, launch_twice, padded, read, reference_dtype, tells_broken,
    unwritten, zero_first,
};
use crate::kernel::{KernelSuite, Params, precision};

/// A weight to quantise and verify; if it is nested, its absmax is quantised too.
#[derive(Debug, Clone, Copy)]
pub struct QuantizeCase {
    pub problem: QuantizeProblem,
    pub seed: u64,
}

impl KernelSuite for Nf4Quantize {
    type Case = QuantizeCase;

    fn precision(p: &QuantizeProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &QuantizeProblem) -> Params {
        let mut params = weight_params(&p.weight, p.dtype);
        params.remove("order");
        params.insert("book".to_owned(), p.codebook.name().into());
        params
    }

    fn problem(case: &QuantizeCase) -> &QuantizeProblem {
        &case.problem
    }

    /// Every block size, odd counts, partial blocks, both codebooks, nested or not.
    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<QuantizeCase> {
        let dtype = precision.storage();
        let rows = |n, k, block_size, nested| weight(n, k, block_size, nested, Order::Rows);
        let mut weights: Vec<_> = [32, 64, 128, 256, 512, 1024, 2048, 4096]
            .into_iter()
            .flat_map(|size| [rows(24, 200, size, false), rows(40, 512, size, true)])
            .collect();
        weights.extend([
            rows(1, 1, 64, true),
            rows(7, 13, 32, true),
            rows(37, 41, 64, false),
            rows(3, 22000, 64, true),
        ]);
        let codebooks = [Codebook::Nf4, Codebook::Fp4];
        let problems = weights.into_iter().flat_map(|weight| {
            codebooks.map(|codebook| QuantizeProblem { weight, dtype, codebook })
        });
        (1..).zip(problems).map(|(seed, problem)| QuantizeCase { problem, seed }).collect()
    }

    fn config_cases(precision: Precision) -> Vec<QuantizeCase> {
        Self::edge_cases(precision, Backend::Cpu).into_iter().skip(3).step_by(9).collect()
    }

    fn verify(
        device: &Device,
        case: &QuantizeCase,
        config: &QuantizeConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let (len, block_size) = (p.weight.len() as usize, p.weight.block_size as usize);
        let mut values = fill(case.seed, len, Distribution::Normal);
        zero_first(&mut values, block_size);
        let dtype = reference_dtype(p.dtype);
        let client = device.client();
        let operands = QuantizeOperands {
            values: client.create_from_slice(&padded(&dtype.encode(&values))),
            codes: unwritten(device, p.weight.words() as usize * 4),
            absmax: unwritten(device, p.weight.blocks() as usize * 4),
            flag: client.create_from_slice(&[0; 4]),
        };
        let results = [&operands.codes, &operands.absmax];
        launch_twice::<Nf4Quantize>(device, p, config, &operands, &results)?;
        let verdict = Self::verify_operands(device, p, &operands, case.seed)?;
        tells_broken(device, dtype, &values, |values, flag| {
            let operands = QuantizeOperands { values, flag, ..operands.clone() };
            Nf4Quantize::launch(&Queue::Device(device), p, config, &operands, None);
        })?;
        Ok(verdict)
    }

    /// Compares absmax bit for bit. A code may differ only if a reciprocal that is off by two units in the last place
    /// explains it. The error of the verdict is the number of failed parts.
    fn verify_operands(
        device: &Device,
        p: &QuantizeProblem,
        operands: &QuantizeOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let (len, block_size) = (p.weight.len() as usize, p.weight.block_size as usize);
        let dtype = reference_dtype(p.dtype);
        let values = dtype.decode(&read(device, &operands.values, len * dtype.bytes())?)?;
        let four_bit = match p.codebook {
            Codebook::Nf4 => FourBit::Nf4,
            Codebook::Fp4 => FourBit::Fp4,
        };
        let expected = four_bit.quantize(&values, block_size)?;
        let codes = read(device, &operands.codes, len.div_ceil(2))?;
        let absmax = read(device, &operands.absmax, expected.absmax.len() * 4)?;
        let flag = read(device, &operands.flag, 4)?;
        let mut wrong = vec![reference::DType::F32.decode(&absmax)? != expected.absmax];
        wrong.push(four_bit.disagreement(&values, block_size, &codes, 2)?.is_some());
        // A block of zeros has the code of zero. An odd count is padded with that code.
        let zeros = values.iter().take(block_size).all(|v| *v == 0.0);
        wrong.push(
            zeros && codes[..block_size.min(len) / 2] != expected.codes[..block_size.min(len) / 2],
        );
        wrong.push(len % 2 == 1 && codes[len / 2] & 15 != four_bit.encode(0.0));
        wrong.push(flag != [0; 4]);
        wrong.push(
            four_bit.codebook() != p.codebook.values() || nested_values() != nf4::dynamic_map(),
        );
        if p.weight.nested {
            let offset = nf4::mean(&expected.absmax);
            let (bytes, nested) = nest(device, &operands.absmax, p.weight, offset);
            let bytes = read(device, &bytes, expected.absmax.len())?;
            let scales = read(device, &nested.scales, 8 * p.weight.groups() as usize)?;
            let outer = nf4::nest(&expected.absmax, offset)?;
            let pairs: Vec<f32> = outer.absmax.iter().flat_map(|scale| [*scale, offset]).collect();
            wrong.push(reference::DType::F32.decode(&scales)? != pairs);
            wrong.push(nf4::nested_disagreement(&expected.absmax, offset, &bytes, 2)?.is_some());
        }
        let count = wrong.iter().filter(|wrong| **wrong).count() as f32;
        let comparison = Comparison::exact(&[count], &[0.0])?;
        Ok(Verdict { comparison, digest: fnv1a(&codes) })
    }

    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<QuantizeProblem>> {
        let (n, k, dtype) = match (suite, scale) {
            (Suite::Documents, _) => return Vec::new(),
            (_, Scale::Gpu) => (14336, 4096, DType::Bf16),
            (_, Scale::Host) => (4096, 1024, DType::F32),
        };
        let weight = weight(n, k, 64, false, Order::Rows);
        vec![BenchCase::alone(QuantizeProblem { weight, dtype, codebook: Codebook::Nf4 })]
    }

    fn instances() -> Vec<InstanceCase<QuantizeProblem>> {
        let case = |codebook, block_size| {
            let weight = weight(4096, 4096, block_size, false, Order::Rows);
            let problem = QuantizeProblem { weight, dtype: DType::Bf16, codebook };
            InstanceCase { problem, max_candidates: 2, clean: 2 }
        };
        vec![case(Codebook::Nf4, 64), case(Codebook::Nf4, 4096), case(Codebook::Fp4, 64)]
    }

    fn torch_name(_: &Self::Problem) -> &'static str {
        "bitsandbytes"
    }

    fn torch(p: &QuantizeProblem) -> Option<Value> {
        Some(request(Self::NAME, 1, &p.weight, p.dtype))
    }
}
