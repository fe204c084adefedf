//! Checks embeddings against their reference.

use arch::{Backend, DType, Device};
use cubecl::server::Handle;
use kernels::embed::{Embed, EmbedConfig, EmbedOperands, EmbedProblem, Learned};
use kernels::matmul::Precision;
use reference::{Distribution, fill};
use tune::{Kernel, Queue};

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, apart, fnv1a, launch_twice, padded, read, reference_dtype, together,
    unwritten,
};
use crate::kernel::{KernelSuite, Params, params, precision};

/// An embedding to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: EmbedProblem,
    /// True if some tokens and positions are past the ends of the tables.
    pub past: bool,
    pub seed: u64,
}

/// Values of one embedding, dense.
struct Host {
    tokens: Vec<u32>,
    table: Vec<f32>,
    /// Learned positions, and the start position of each sequence.
    learned: Option<(Vec<f32>, Vec<u32>)>,
}

impl KernelSuite for Embed {
    type Case = EdgeCase;

    fn precision(p: &EmbedProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &EmbedProblem) -> Params {
        let mut params = params([
            ("batch", p.batch.into()),
            ("seq", p.seq.into()),
            ("hidden", p.hidden.into()),
            ("vocab", p.vocab.into()),
            ("dtype", p.dtype.name().into()),
        ]);
        if let Some(positions) = p.positions {
            params.insert("positions".to_owned(), positions.into());
        }
        params
    }

    fn problem(case: &EdgeCase) -> &EmbedProblem {
        &case.problem
    }

    fn case_params(case: &EdgeCase) -> Params {
        let mut params = Self::params(&case.problem);
        params.insert("past".to_owned(), case.past.into());
        params
    }

    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<EdgeCase> {
        let dtype = precision.storage();
        let mut cases = Vec::new();
        for hidden in [1, 3, 64, 1000, 4096, 4098] {
            for tokens in [[1, 1], [3, 5], [2, 1]] {
                for (positions, scale) in
                    [(None, 1.0), (Some(11), 1.0), (None, 11.3), (Some(6), 0.3)]
                {
                    let problem = EmbedProblem::new(tokens, [37, hidden], dtype).expect("valid");
                    let problem = EmbedProblem { positions, scale, ..problem };
                    let problem = problem.checked().expect("valid");
                    for past in [false, true] {
                        let seed = 13_000 + cases.len() as u64;
                        cases.push(EdgeCase { problem, past, seed });
                    }
                }
            }
        }
        // Padded rows whose strides are, and are not, multiples of the vector length.
        for (pad, past) in [(64, false), (64, true), (3, true)] {
            let problem = EmbedProblem::new([2, 3], [11, 896], dtype).expect("valid");
            let problem = EmbedProblem {
                table_stride: 896 + pad,
                positions: Some(9),
                positions_stride: 896 + 2 * pad,
                ..problem
            };
            let seed = 13_000 + cases.len() as u64;
            cases.push(EdgeCase { problem: problem.checked().expect("valid"), past, seed });
        }
        cases
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        Self::edge_cases(precision, Backend::Cpu).into_iter().skip(5).step_by(13).collect()
    }

    /// Launches once more onto zeros: NaN is the right result for an unknown token, so NaN alone would not show a
    /// write.
    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &EmbedConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let dtype = reference_dtype(p.dtype);
        let [.., out] = p.extents();
        let hidden = p.hidden as usize;
        let rows = |rows: u32| rows as usize * hidden;
        let make = |len: usize, salt: u64| -> Result<Vec<f32>, CheckError> {
            Ok(dtype.decode(&dtype.encode(&fill(
                4 * case.seed + salt,
                len,
                Distribution::Normal,
            )))?)
        };
        let mut tokens: Vec<u32> =
            (0..p.tokens()).map(|i| i.wrapping_mul(0x9e37_79b1) % p.vocab).collect();
        let mut start: Vec<u32> = (0..p.batch).map(|b| 3 * b).collect();
        if case.past {
            let last = tokens.len() - 1;
            (tokens[0], tokens[last], start[0]) = (p.vocab, u32::MAX, u32::MAX);
        }
        let learned =
            p.positions.map(|n| Ok::<_, CheckError>((make(rows(n), 1)?, start))).transpose()?;
        let host = Host { tokens, table: make(rows(p.vocab), 0)?, learned };
        let client = device.client();
        let upload = |values: &[f32]| client.create_from_slice(&padded(&dtype.encode(values)));
        let words = |words: &[u32]| {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            client.create_from_slice(&bytes)
        };
        let operands = EmbedOperands {
            tokens: words(&host.tokens),
            table: upload(&apart(&host.table, hidden, p.table_stride as usize)),
            learned: host.learned.as_ref().map(|(table, start)| {
                let table = apart(table, hidden, p.positions_stride as usize);
                Learned { table: upload(&table), start: words(start) }
            }),
            out: unwritten(device, out * p.dtype.size()),
        };
        launch_twice::<Embed>(device, p, config, &operands, &[&operands.out])?;
        tune::fill(device, &operands.out, operands.out.size_in_used() as usize / 4, 0);
        Embed::launch(&Queue::Device(device), p, config, &operands, None);
        verdict(device, p, &operands, &host)
    }

    fn verify_operands(
        device: &Device,
        p: &EmbedProblem,
        operands: &EmbedOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let dtype = reference_dtype(p.dtype);
        let load = |handle: &Handle, len: usize| -> Result<Vec<f32>, CheckError> {
            Ok(dtype.decode(&read(device, handle, len * p.dtype.size())?)?)
        };
        let words = |handle: &Handle, len: u32| -> Result<Vec<u32>, CheckError> {
            let bytes = read(device, handle, len as usize * 4)?;
            Ok(bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
        };
        let [table, learned, _] = p.extents();
        let dense =
            |rows: Vec<f32>, stride: u32| together(&rows, p.hidden as usize, stride as usize);
        let both = operands.learned.as_ref().map(|of| {
            let table = dense(load(&of.table, learned)?, p.positions_stride);
            Ok::<_, CheckError>((table, words(&of.start, p.batch)?))
        });
        let host = Host {
            tokens: words(&operands.tokens, p.tokens())?,
            table: dense(load(&operands.table, table)?, p.table_stride),
            learned: both.transpose()?,
        };
        verdict(device, p, operands, &host)
    }

    /// Tokens of an 8B model: decode steps and a prefill. The table takes 64 MiB, so that several operand sets fit.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<EmbedProblem>> {
        let case = |tokens, vocab, dtype| {
            BenchCase::alone(EmbedProblem::new(tokens, [vocab, 4096], dtype).expect("valid"))
        };
        match (suite, scale) {
            (Suite::Quick | Suite::Documents, _) => Vec::new(),
            (_, Scale::Host) => vec![case([1, 512], 4096, DType::F32)],
            (_, Scale::Gpu) => {
                [[1, 1], [16, 1], [1, 512]].map(|tokens| case(tokens, 8192, DType::Bf16)).into()
            }
        }
    }

    /// With and without learned positions; widths that vectors do and do not divide.
    fn instances() -> Vec<InstanceCase<EmbedProblem>> {
        let mut cases = Vec::new();
        for (hidden, dtype) in [(4096, DType::Bf16), (4095, DType::F16), (4096, DType::F32)] {
            let plain = EmbedProblem::new([16, 1], [8192, hidden], dtype).expect("valid");
            for positions in [None, Some(1024)] {
                let problem = EmbedProblem { positions, ..plain };
                cases.push(InstanceCase { problem, max_candidates: 2, clean: usize::MAX });
            }
        }
        cases
    }
}

fn verdict(
    device: &Device,
    p: &EmbedProblem,
    operands: &EmbedOperands,
    host: &Host,
) -> Result<Verdict, CheckError> {
    let dtype = reference_dtype(p.dtype);
    let [.., out] = p.extents();
    let bytes = read(device, &operands.out, out * p.dtype.size())?;
    let positions: Vec<u32> = match &host.learned {
        Some((_, start)) => {
            (0..p.tokens()).map(|t| start[(t / p.seq) as usize].saturating_add(t % p.seq)).collect()
        }
        None => Vec::new(),
    };
    let reference = reference::Embed {
        hidden: p.hidden as usize,
        table: &host.table,
        scale: p.scale.into(),
        learned: host.learned.as_ref().map(|(table, _)| (&table[..], &positions[..])),
        dtype,
    };
    let comparison = reference.check(&host.tokens, &dtype.decode(&bytes)?)?;
    Ok(Verdict { comparison, digest: fnv1a(&bytes) })
}
