//! Checks cross entropy against its reference.

use arch::{Backend, DType, Device};
use cubecl::bytes::Bytes;
use cubecl::server::Handle;
use kernels::cross_entropy::{
    CrossEntropy, CrossEntropyConfig, CrossEntropyOperands, CrossEntropyProblem, Gradient, IGNORED,
    STATS,
};
use kernels::matmul::Precision;
use reference::{Distribution, Special, fill, plant};
use serde_json::{Value, json};
use tune::{Kernel, Queue};

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, apart, fnv1a, guarded, intact, kernel_error, launch_twice, padded, read,
    reference_dtype, together, twice, unwritten, window,
};
use crate::kernel::{KernelSuite, Params, params, precision};
use crate::pairs::pairwise;

/// Distribution of the logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inputs {
    /// Normal, scaled by 3.
    Normal,
    /// Normal, scaled by 100: one token has almost all of the probability.
    Sharp,
    /// Normal. One row each has NaN, +inf, some -inf, only -inf, and a target past the vocabulary.
    Special,
}

/// A loss to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: CrossEntropyProblem,
    pub inputs: Inputs,
    pub seed: u64,
}

/// Values of rows on the host.
struct Host {
    /// `[rows, vocab]`
    logits: Vec<f32>,
    targets: Vec<u32>,
    weights: Vec<f32>,
    entropy_weights: Option<Vec<f32>>,
    /// `[STATS, rows]`
    stats: Vec<f32>,
    /// `[rows, vocab]`
    gradient: Option<Vec<f32>>,
}

impl KernelSuite for CrossEntropy {
    type Case = EdgeCase;

    fn precision(p: &CrossEntropyProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &CrossEntropyProblem) -> Params {
        let gradient = match p.gradient {
            Gradient::None => "none",
            Gradient::Separate => "separate",
            Gradient::InPlace => "in_place",
        };
        let mut all = params([
            ("rows", p.rows.into()),
            ("vocab", p.vocab.into()),
            ("dtype", p.dtype.name().into()),
            ("gradient", gradient.into()),
        ]);
        if p.entropy {
            all.insert("entropy".to_owned(), true.into());
        }
        if p.stride != p.vocab {
            all.insert("stride".to_owned(), p.stride.into());
        }
        let scalars = [("softcap", p.softcap), ("temperature", Some(p.temperature))];
        for (name, value) in scalars {
            if let Some(value) = value.filter(|value| *value != 1.0) {
                all.insert(name.to_owned(), Value::from(f64::from(value)));
            }
        }
        all
    }

    fn problem(case: &EdgeCase) -> &CrossEntropyProblem {
        &case.problem
    }

    fn case_params(case: &EdgeCase) -> Params {
        let mut all = Self::params(&case.problem);
        all.insert("inputs".to_owned(), format!("{:?}", case.inputs).to_lowercase().into());
        all
    }

    /// Vocabularies that vectors do and do not divide, with and without padding; every pair of options.
    fn edge_cases(precision: Precision, backend: Backend) -> Vec<EdgeCase> {
        // A CPU's single unit takes seconds for the longest row.
        let long = if backend == Backend::Cpu { 8192 } else { 128_256 };
        let sizes = [
            [5, 1, 1],
            [6, 5, 5],
            [7, 3, 8],
            [300, 64, 64],
            [9, 127, 128],
            [5, 1000, 1016],
            [5, 4099, 4099],
            [6, 50_257.min(long) - 1, 50_304.min(long)],
            [5, long, long],
        ];
        let gradients = [Gradient::InPlace, Gradient::Separate, Gradient::None];
        let inputs = [Inputs::Normal, Inputs::Sharp, Inputs::Special];
        let rows = pairwise(&[sizes.len(), 3, 3, 2, 2, 2]);
        let case = |(i, row): (usize, Vec<usize>)| {
            let [rows, vocab, stride] = sizes[row[0]];
            let problem = CrossEntropyProblem {
                stride,
                gradient: gradients[row[1]],
                softcap: (row[3] == 1).then_some(20.0),
                temperature: [1.0, 0.6][row[4]],
                entropy: row[5] == 1,
                ..problem(rows, vocab, precision.storage())
            };
            EdgeCase { problem, inputs: inputs[row[2]], seed: 21_000 + i as u64 }
        };
        rows.into_iter().enumerate().map(case).collect()
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        let case = |vocab, stride, softcap, seed| {
            let (inputs, temperature) = (Inputs::Special, 0.8);
            let of = problem(6, vocab, precision.storage());
            let problem = CrossEntropyProblem { stride, softcap, temperature, ..of };
            EdgeCase { problem, inputs, seed }
        };
        vec![case(4099, 4104, Some(20.0), 21_500), case(16_384, 16_384, None, 21_501)]
    }

    /// Padding is NaN before the launch; its gradient must be 0.
    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &CrossEntropyConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let dtype = reference_dtype(p.dtype);
        let (rows, vocab, stride) = (p.rows as usize, p.vocab as usize, p.stride as usize);
        let scale = if case.inputs == Inputs::Sharp { 100.0 } else { 3.0 };
        let mut logits = fill(2 * case.seed, rows * vocab, Distribution::Normal);
        logits.iter_mut().for_each(|x| *x *= scale);
        let mut targets: Vec<u32> = (0..p.rows)
            .map(|row| if row % 3 == 2 { IGNORED } else { (row * 31 + vocab as u32 / 2) % p.vocab })
            .collect();
        if case.inputs == Inputs::Special {
            let last = vocab - 1;
            let mut places = vec![(vocab / 2, Special::Nan), (vocab + last, Special::Inf)];
            places.extend((0..vocab / 3).map(|v| (2 * vocab + v, Special::NegInf)));
            places.extend((0..vocab).map(|v| (3 * vocab + v, Special::NegInf)));
            plant(&mut logits, dtype, &places)?;
            targets[4] = p.vocab;
        }
        let logits = dtype.decode(&dtype.encode(&logits))?;
        let weights = fill(2 * case.seed + 1, rows, Distribution::Normal);
        let entropy_weights = p.entropy.then(|| fill(3 * case.seed, rows, Distribution::Normal));
        let mut whole = apart(&logits, vocab, stride);
        whole.resize(p.elements(), f32::NAN);
        let bytes = padded(&dtype.encode(&whole));
        let client = device.client();
        let words = |values: Vec<u32>| -> Vec<u8> {
            values.into_iter().flat_map(u32::to_le_bytes).collect()
        };
        let floats_on_device = |values: &[f32]| {
            client.create_from_slice(&words(values.iter().map(|x| x.to_bits()).collect()))
        };
        let operands = CrossEntropyOperands {
            logits: guarded(device, &bytes),
            targets: client.create_from_slice(&words(targets.clone())),
            weights: floats_on_device(&weights),
            entropy_weights: entropy_weights.as_deref().map(floats_on_device),
            gradient: (p.gradient == Gradient::Separate).then(|| unwritten(device, bytes.len())),
            stats: unwritten(device, 4 * STATS * rows),
        };
        if p.gradient == Gradient::InPlace {
            twice(device, &[operands.stats.clone(), operands.logits.clone()], || {
                client.write(&operands.logits, Bytes::from_bytes_vec(bytes.clone()));
                Self::launch(&Queue::Device(device), p, config, &operands, None);
            })?;
        } else {
            let outputs: Vec<_> = operands.gradient.iter().chain([&operands.stats]).collect();
            launch_twice::<Self>(device, p, config, &operands, &outputs)?;
        }
        intact(device, &operands.logits)?;
        intact(device, &operands.stats)?;
        let gradient = match p.gradient {
            Gradient::None => None,
            Gradient::Separate => operands.gradient.as_ref(),
            Gradient::InPlace => Some(&operands.logits),
        };
        let gradient = gradient.map(|handle| -> Result<Vec<f32>, CheckError> {
            let whole = dtype.decode(&read(device, handle, p.elements() * p.dtype.size())?)?;
            if whole.chunks(stride).any(|row| row[vocab..].iter().any(|x| x.to_bits() != 0)) {
                return Err(kernel_error("the gradient of padding is not 0"));
            }
            Ok(together(&whole, vocab, stride))
        });
        let gradient = gradient.transpose()?;
        let stats = floats(&read(device, &operands.stats, 4 * STATS * rows)?);
        verdict(p, &Host { logits, targets, weights, entropy_weights, stats, gradient })
    }

    /// Compares eight rows. In-place gradients are refused, because they overwrite the logits.
    fn verify_operands(
        device: &Device,
        p: &CrossEntropyProblem,
        operands: &CrossEntropyOperands,
        seed: u64,
    ) -> Result<Verdict, CheckError> {
        if p.gradient == Gradient::InPlace {
            return Err(kernel_error("expected a separate gradient, got one over the logits"));
        }
        let (dtype, rows) = (reference_dtype(p.dtype), p.rows as usize);
        let chosen: Vec<usize> =
            (0..rows.min(8)).map(|i| (i * rows / 8 + seed as usize) % rows).collect();
        let matrix = |handle: &Handle| -> Result<Vec<f32>, CheckError> {
            let size = p.dtype.size();
            let mut all = Vec::new();
            for row in &chosen {
                // Device offsets are whole words.
                let start = row * p.stride as usize * size;
                let (from, len) = (start / 4 * 4, p.vocab as usize * size);
                let part = (start - from + len).next_multiple_of(4);
                let bytes = read(device, &window(handle, from, part), start - from + len)?;
                all.extend(dtype.decode(&bytes[start - from..])?);
            }
            Ok(all)
        };
        let pick = |all: &[u8]| -> Vec<u32> {
            let word = |row: &usize| all.as_chunks::<4>().0[*row];
            chosen.iter().map(word).map(u32::from_le_bytes).collect()
        };
        let row = |handle: &Handle, at: usize| -> Result<Vec<u32>, CheckError> {
            Ok(pick(&read(device, handle, 4 * (at + 1) * rows)?[4 * at * rows..]))
        };
        let factors = |handle: &Handle| -> Result<Vec<f32>, CheckError> {
            Ok(row(handle, 0)?.into_iter().map(f32::from_bits).collect())
        };
        let mut stats = Vec::new();
        for stat in 0..STATS {
            stats.extend(row(&operands.stats, stat)?.into_iter().map(f32::from_bits));
        }
        let host = Host {
            logits: matrix(&operands.logits)?,
            targets: row(&operands.targets, 0)?,
            weights: factors(&operands.weights)?,
            entropy_weights: operands.entropy_weights.as_ref().map(factors).transpose()?,
            stats,
            gradient: operands.gradient.as_ref().map(matrix).transpose()?,
        };
        verdict(p, &host)
    }

    /// Logits of GPT-2 (padded vocabulary) and of an 8B model, for training; for the 8B model also the forward pass
    /// alone.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<CrossEntropyProblem>> {
        let case = |rows, vocab, stride, dtype, gradient| {
            let of = problem(rows, vocab, dtype);
            BenchCase::alone(CrossEntropyProblem { stride, gradient, ..of })
        };
        let (separate, none) = (Gradient::Separate, Gradient::None);
        match (suite, scale) {
            (Suite::Quick | Suite::Documents, _) => Vec::new(),
            (_, Scale::Host) => vec![case(16, 32_000, 32_000, DType::F32, separate)],
            (_, Scale::Gpu) => vec![
                case(8192, 50_257, 50_304, DType::Bf16, separate),
                case(4096, 128_256, 128_256, DType::Bf16, separate),
                case(4096, 128_256, 128_256, DType::Bf16, none),
                case(4096, 128_256, 128_256, DType::F32, separate),
            ],
        }
    }

    fn torch_name(_: &Self::Problem) -> &'static str {
        "torch.compile"
    }

    fn torch(p: &CrossEntropyProblem) -> Option<Value> {
        Some(json!({
            "op": Self::NAME,
            "rows": p.rows,
            "vocab": p.vocab,
            "dtype": p.dtype.name(),
            "gradient": p.gradient != Gradient::None,
        }))
    }

    /// Each dtype, gradient mode and option; vocabularies that vectors do and do not divide.
    fn instances() -> Vec<InstanceCase<CrossEntropyProblem>> {
        let of = |vocab, dtype| problem(4096, vocab, dtype);
        let gpt2 = CrossEntropyProblem { stride: 50_304, ..of(50_257, DType::Bf16) };
        let llama = of(128_256, DType::Bf16);
        let case = |problem, max_candidates| InstanceCase { problem, max_candidates, clean: 1 };
        vec![
            case(llama, usize::MAX),
            case(gpt2, 2),
            case(CrossEntropyProblem { gradient: Gradient::Separate, ..gpt2 }, 1),
            case(CrossEntropyProblem { gradient: Gradient::None, ..llama }, 1),
            case(CrossEntropyProblem { softcap: Some(30.0), ..llama }, 2),
            case(CrossEntropyProblem { entropy: true, ..llama }, 2),
            case(of(50_257, DType::F16), 1),
            case(of(128_256, DType::F32), 2),
        ]
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

fn verdict(p: &CrossEntropyProblem, host: &Host) -> Result<Verdict, CheckError> {
    let known = |target: &u32| (*target != IGNORED).then_some(*target);
    let targets: Vec<_> = host.targets.iter().map(known).collect();
    let reference = reference::CrossEntropy {
        logits: &host.logits,
        vocab: p.vocab as usize,
        targets: &targets,
        weights: &host.weights,
        entropy_weights: host.entropy_weights.as_deref(),
        softcap: p.softcap.map(f64::from),
        temperature: p.temperature.into(),
    };
    let dtype = reference_dtype(p.dtype);
    let comparison = reference.check(&host.stats, host.gradient.as_deref(), dtype)?;
    let results = host.stats.iter().chain(host.gradient.iter().flatten());
    let bytes: Vec<u8> = results.flat_map(|x| x.to_le_bytes()).collect();
    Ok(Verdict { comparison, digest: fnv1a(&bytes) })
}

fn problem(rows: u32, vocab: u32, dtype: DType) -> CrossEntropyProblem {
    CrossEntropyProblem::new(rows, vocab, dtype).expect("sizes are valid")
}
