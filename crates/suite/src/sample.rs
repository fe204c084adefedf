//! Checks the sampler against its reference.

use arch::{Backend, DType, Device};
use cubecl::bytes::Bytes;
use kernels::matmul::Precision;
use kernels::sample::{Choice, RESULT, Sample, SampleConfig, SampleOperands, SampleProblem};
use reference::{Distribution, fill};
use serde_json::Value;
use tune::{Kernel, Queue};

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, guarded, intact, kernel_error, read, scratch_of, twice, unwritten,
};
use crate::kernel::{KernelSuite, Params, params};

/// Rows to verify, each with its own `uniform`.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: SampleProblem,
    /// Parameters of every row. `uniform` differs by row; for a third of the rows it is an end of [0, 1).
    pub choice: Choice,
    /// True if some rows have NaN, infinities or no possible token.
    pub odd: bool,
    pub seed: u64,
}

/// Rows on the host.
struct Host {
    logits: Vec<f32>,
    choices: Vec<Choice>,
    seen: Vec<Vec<u32>>,
}

impl KernelSuite for Sample {
    type Case = EdgeCase;

    const PRECISIONS: &'static [Precision] = &[Precision::F32];

    fn precision(_: &SampleProblem) -> Precision {
        Precision::F32
    }

    fn params(p: &SampleProblem) -> Params {
        let dtype = DType::F32.name();
        let mut all =
            params([("rows", p.rows.into()), ("vocab", p.vocab.into()), ("dtype", dtype.into())]);
        if p.masked {
            all.extend(params([("masked", true.into())]));
        }
        all
    }

    fn problem(case: &EdgeCase) -> &SampleProblem {
        &case.problem
    }

    fn case_params(case: &EdgeCase) -> Params {
        let c = case.choice;
        let float = |value: f32| Value::from(f64::from(value));
        let mut all = Self::params(&case.problem);
        all.extend(params([
            ("temperature", float(c.temperature)),
            ("top_p", float(c.top_p)),
            ("min_p", float(c.min_p)),
            ("penalty", float(c.penalty)),
            ("top_k", c.top_k.into()),
            ("odd", case.odd.into()),
        ]));
        all
    }

    fn edge_cases(_precision: Precision, backend: Backend) -> Vec<EdgeCase> {
        let plain = Choice {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            penalty: 1.0,
            uniform: 0.0,
        };
        let mut choices = vec![plain, Choice { temperature: 0.0, ..plain }];
        choices.push(Choice { temperature: 0.0, penalty: 1.3, ..plain });
        choices.push(Choice { temperature: 0.4, penalty: 0.7, ..plain });
        choices.push(Choice { top_k: 1, ..plain });
        choices.push(Choice { top_k: 40, temperature: 2.0, ..plain });
        choices.push(Choice { top_p: 0.9, ..plain });
        choices.push(Choice { top_p: 0.0, ..plain });
        choices.push(Choice { min_p: 0.1, ..plain });
        choices.push(Choice { top_k: 50, top_p: 0.8, min_p: 0.02, penalty: 1.1, ..plain });
        // A CPU's single unit takes seconds for the longest row.
        let long = if backend == Backend::Cpu { 8192 } else { 128_256 };
        let mut cases = Vec::new();
        for vocab in [1, 5, 64, 1000, 4099, 50_257.min(long), long] {
            for choice in &choices {
                let problem = SampleProblem::new(3, vocab).expect("valid");
                let seed = 17_000 + cases.len() as u64;
                cases.push(EdgeCase { problem, choice: *choice, odd: false, seed });
            }
        }
        for vocab in [4, 4099] {
            for choice in &choices {
                let problem = SampleProblem::new(5, vocab).expect("valid");
                let seed = 17_000 + cases.len() as u64;
                cases.push(EdgeCase { problem, choice: *choice, odd: true, seed });
            }
        }
        for vocab in [1, 5, 64, 1001, 4099] {
            for choice in &choices {
                let problem = SampleProblem::new(3, vocab).expect("valid");
                let problem = SampleProblem { masked: true, ..problem };
                let seed = 17_000 + cases.len() as u64;
                cases.push(EdgeCase { problem, choice: *choice, odd: false, seed });
            }
        }
        cases
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        Self::edge_cases(precision, Backend::Cuda).into_iter().skip(3).step_by(7).collect()
    }

    /// Also compares the seen tokens afterwards: the earlier ones plus the sampled ones.
    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &SampleConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let (rows, vocab) = (p.rows as usize, p.vocab as usize);
        let mut logits = fill(2 * case.seed, rows * vocab, Distribution::Normal);
        logits.iter_mut().for_each(|v| *v *= 3.0);
        if case.odd {
            let row = |at: usize| at % rows * vocab;
            logits[row(0) + vocab / 2] = f32::NAN;
            logits[row(1)] = f32::INFINITY;
            logits[row(2)..row(2) + vocab].fill(f32::NEG_INFINITY);
            // Only two tokens are possible, with equal logits.
            logits[row(3)..row(3) + vocab - 2].fill(f32::NEG_INFINITY);
            logits[row(3) + vocab - 2..row(3) + vocab].fill(1.5);
        }
        let number = |row: usize| match (row as u64 + case.seed) % 6 {
            0 => 0.0,
            1 => 1.0 - f32::EPSILON / 2.0,
            _ => {
                let mixed = (row as u64 + 7 * case.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
                mixed as f32 / (1 << 24) as f32
            }
        };
        let choices = (0..rows).map(|row| Choice { uniform: number(row), ..case.choice }).collect();
        let seen = |row: usize| (0..p.vocab).filter(|id| (id + row as u32) % 3 == 0).collect();
        let mut host = Host { logits, choices, seen: (0..rows).map(seen).collect() };
        let mut bits = vec![0u32; p.all_words()];
        for (row, seen) in host.seen.iter().enumerate() {
            for id in seen {
                bits[row * p.seen_words() + *id as usize / 32] |= 1 << (id % 32);
            }
        }
        let client = device.client();
        let floats: Vec<u32> = host.logits.iter().map(|v| v.to_bits()).collect();
        if p.masked {
            // Masks two fifths of the tokens and the last one. A vocabulary of one token then has no token left.
            for id in (0..vocab).filter(|id| (id * 7 + 3) % 5 < 2 || id + 1 == vocab) {
                bits[rows * p.seen_words() + id / 32] |= 1 << (id % 32);
                host.logits.iter_mut().skip(id).step_by(vocab).for_each(|v| *v = f32::NEG_INFINITY);
            }
        }
        let operands = SampleOperands {
            logits: client.create_from_slice(&bytes(&floats)),
            choices: client.create_from_slice(&bytes(
                &host.choices.iter().flat_map(|c| c.words()).collect::<Vec<_>>(),
            )),
            seen: guarded(device, &bytes(&bits)),
            out: unwritten(device, 4 * RESULT * rows),
        };
        let scratch = scratch_of::<Sample>(device, p, config);
        twice(device, std::slice::from_ref(&operands.out), || {
            client.write(&operands.seen, Bytes::from_bytes_vec(bytes(&bits)));
            Sample::launch(&Queue::Device(device), p, config, &operands, scratch.as_ref());
        })?;
        let written = [&operands.out, &operands.seen].into_iter().chain(&scratch);
        written.into_iter().try_for_each(|buffer| intact(device, buffer))?;
        let verdict = verdict(device, p, &operands, &host)?;
        let out = words(&read(device, &operands.out, 4 * RESULT * rows)?);
        for (row, result) in out.as_chunks::<RESULT>().0.iter().enumerate() {
            let [token, _, _, broken] = result.map(f32::from_bits);
            if broken == 0.0 && token < p.vocab as f32 {
                bits[row * p.seen_words() + token as usize / 32] |= 1 << (token as usize % 32);
            }
        }
        match words(&read(device, &operands.seen, 4 * bits.len())?) == bits {
            true => Ok(verdict),
            false => Err(kernel_error("what is seen is not what was and the tokens")),
        }
    }

    /// Expects that seen tokens have no effect.
    fn verify_operands(
        device: &Device,
        p: &SampleProblem,
        operands: &SampleOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let (rows, vocab) = (p.rows as usize, p.vocab as usize);
        let float = f32::from_bits;
        let logits = words(&read(device, &operands.logits, 4 * rows * vocab)?);
        let each = words(&read(device, &operands.choices, 24 * rows)?);
        let choice = |c: &[u32; 6]| Choice {
            temperature: float(c[0]),
            top_k: c[1],
            top_p: float(c[2]),
            min_p: float(c[3]),
            penalty: float(c[4]),
            uniform: float(c[5]),
        };
        let host = Host {
            logits: logits.into_iter().map(float).collect(),
            choices: each.as_chunks::<6>().0.iter().map(choice).collect(),
            seen: vec![Vec::new(); rows],
        };
        verdict(device, p, operands, &host)
    }

    /// Logits of an 8B model and of GPT-2.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<SampleProblem>> {
        let sizes: &[[u32; 2]] = match (suite, scale) {
            (Suite::Quick | Suite::Documents, _) => &[],
            (_, Scale::Host) => &[[4, 32_000]],
            (_, Scale::Gpu) => &[[1, 128_256], [16, 128_256], [4, 50_257]],
        };
        let problem = |[rows, vocab]: &[u32; 2]| SampleProblem::new(*rows, *vocab).expect("valid");
        sizes.iter().map(problem).map(BenchCase::alone).collect()
    }

    /// Vocabularies that vectors do and do not divide, with and without masked tokens.
    fn instances() -> Vec<InstanceCase<SampleProblem>> {
        let case = |(vocab, masked)| {
            let problem = SampleProblem::new(16, vocab).expect("valid");
            InstanceCase {
                problem: SampleProblem { masked, ..problem },
                max_candidates: 2,
                clean: 1,
            }
        };
        [(128_256, false), (50_257, false), (151_936, true)].map(case).into()
    }
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

fn verdict(
    device: &Device,
    p: &SampleProblem,
    operands: &SampleOperands,
    host: &Host,
) -> Result<Verdict, CheckError> {
    let bytes = read(device, &operands.out, 4 * RESULT * p.rows as usize)?;
    let out: Vec<f32> =
        bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
    let rows: Vec<_> = (host.logits.chunks(p.vocab as usize).zip(&host.choices).zip(&host.seen))
        .map(|((logits, c), seen)| reference::Sampler {
            logits,
            seen,
            temperature: c.temperature.into(),
            top_k: c.top_k as usize,
            top_p: c.top_p.into(),
            min_p: c.min_p.into(),
            penalty: c.penalty.into(),
            uniform: c.uniform.into(),
        })
        .collect();
    let comparison = reference::Sampler::check(&rows, &out)?;
    Ok(Verdict { comparison, digest: fnv1a(&bytes) })
}
