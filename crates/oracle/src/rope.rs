//! Turned heads and the caches they go to, against their reference.

use arch::{DType, Device};
use cubecl::server::Handle;
use kernels::norm::NormKind;
use kernels::rope::{HeadNorm, HeadWeights, KvLayout, Rope, RopeConfig, RopeOperands, RopeProblem};
use reference::{Distribution, Rotary, Stretch, fill};
use tune::Kernel;

use crate::norm::reference_rule;
use crate::{CheckError, Verdict, fnv1a, padded, read, reference_dtype};

/// One projection to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: RopeProblem,
    /// Positions that each sequence has before.
    pub start: Vec<u32>,
    pub seed: u64,
}

/// Values of one projection, the caches as they were before.
struct Host {
    qkv: Vec<f32>,
    start: Vec<u32>,
    table: Vec<f32>,
    weights: Option<[Vec<f32>; 2]>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Host {
    fn operands(&self) -> reference::RopeOperands<'_> {
        reference::RopeOperands {
            qkv: &self.qkv,
            start: &self.start,
            table: &self.table,
            weights: self.weights.as_ref().map(|w| w.each_ref().map(|w| &w[..])),
            k: &self.k,
            v: &self.v,
        }
    }
}

/// Runs `case` on fresh host inputs and compares the queries and all of both caches with the reference: what
/// was there must still be, but for the new positions. Queries are filled with zeros first, which none is.
///
/// # Errors
/// The kernel failed to run; a wrong result is a [`Verdict`], not an error.
pub fn check(device: &Device, case: &EdgeCase, config: &RopeConfig) -> Result<Verdict, CheckError> {
    let p = &case.problem;
    let dtype = reference_dtype(p.dtype);
    let [all, queries, slots] = p.extents();
    let make = |len: usize, salt: u64| -> Result<Vec<f32>, CheckError> {
        Ok(dtype.decode(&dtype.encode(&fill(8 * case.seed + salt, len, Distribution::Normal)))?)
    };
    let (dims, positions) = (p.dim as usize, p.positions as usize);
    let rotary = Rotary { base: 1e4, dims, stretch: Stretch::Linear(2.0), magnitude: 1.25 };
    let table = rotary.table(if dims > 0 { positions } else { 0 }, positions);
    let weights = [make(p.head_dim as usize, 1)?, make(p.head_dim as usize, 2)?];
    let host = Host {
        qkv: make(all, 0)?,
        start: case.start.clone(),
        table: table.into_iter().map(|v| v as f32).collect(),
        weights: p.qk_norm.map(|_| weights),
        k: make(slots, 3)?,
        v: make(slots, 4)?,
    };
    let client = device.client();
    let upload = |values: &[f32]| client.create_from_slice(&padded(&dtype.encode(values)));
    let floats = |values: &[f32]| client.create_from_slice(&reference::DType::F32.encode(values));
    let start: Vec<u8> = case.start.iter().flat_map(|word| word.to_le_bytes()).collect();
    let operands = RopeOperands {
        qkv: upload(&host.qkv),
        start: client.create_from_slice(&start),
        table: (p.dim > 0).then(|| floats(&host.table)),
        weights: host.weights.as_ref().map(|[q, k]| HeadWeights { q: upload(q), k: upload(k) }),
        q: upload(&vec![0.0; queries]),
        k: upload(&host.k),
        v: upload(&host.v),
    };
    Rope::launch(device, p, config, &operands, None);
    verdict(device, p, &operands, &host)
}

/// Compares what a launch left in `operands` with the reference, reading the inputs back from the device. What
/// the caches hold beside the new positions is not known to be as before.
///
/// # Errors
/// The launch failed.
pub fn check_operands(
    device: &Device,
    p: &RopeProblem,
    operands: &RopeOperands,
) -> Result<Verdict, CheckError> {
    let dtype = reference_dtype(p.dtype);
    let load = |handle: &Handle, len: usize| -> Result<Vec<f32>, CheckError> {
        Ok(dtype.decode(&read(device, handle, len * p.dtype.size())?)?)
    };
    let [all, _, slots] = p.extents();
    let start = read(device, &operands.start, p.batch as usize * 4)?;
    let table = match &operands.table {
        Some(table) => reference::DType::F32.decode(&read(device, table, p.table_len() * 4)?)?,
        None => Vec::new(),
    };
    let head = p.head_dim as usize;
    let weights = operands.weights.as_ref();
    let weights = weights.map(|w| Ok::<_, CheckError>([load(&w.q, head)?, load(&w.k, head)?]));
    let host = Host {
        qkv: load(&operands.qkv, all)?,
        start: start.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect(),
        table,
        weights: weights.transpose()?,
        k: load(&operands.k, slots)?,
        v: load(&operands.v, slots)?,
    };
    verdict(device, p, operands, &host)
}

fn verdict(
    device: &Device,
    p: &RopeProblem,
    operands: &RopeOperands,
    host: &Host,
) -> Result<Verdict, CheckError> {
    let dtype = reference_dtype(p.dtype);
    let [_, queries, slots] = p.extents();
    let mut bytes = Vec::new();
    let mut load = |handle, len: usize| -> Result<Vec<f32>, CheckError> {
        let part = read(device, handle, len * p.dtype.size())?;
        bytes.extend_from_slice(&part);
        Ok(dtype.decode(&part)?)
    };
    let (q, k, v) =
        (load(&operands.q, queries)?, load(&operands.k, slots)?, load(&operands.v, slots)?);
    let comparison = reference_of(p).check(host.operands(), [&q, &k, &v])?;
    Ok(Verdict { comparison, digest: fnv1a(&bytes) })
}

fn reference_of(p: &RopeProblem) -> reference::Rope {
    reference::Rope {
        batch: p.batch as usize,
        seq: p.seq as usize,
        heads: p.heads as usize,
        kv_heads: p.kv_heads as usize,
        head_dim: p.head_dim as usize,
        capacity: p.cache.capacity as usize,
        dims: p.dim as usize,
        norm: p.qk_norm.map(|HeadNorm { kind, eps }| reference::Norm {
            rule: reference_rule(kind),
            eps: eps.into(),
        }),
        dtype: reference_dtype(p.dtype),
    }
}

/// The projections that every config must get right, for one type.
pub fn edge_cases(dtype: DType) -> Vec<EdgeCase> {
    let mut cases = Vec::new();
    let mut add = |problem: RopeProblem, start: &[u32]| {
        let problem = problem.checked().expect("valid");
        let seed = 11_000 + cases.len() as u64;
        cases.push(EdgeCase { problem, start: start.to_vec(), seed });
    };
    let whole = |seq, heads, head_dim| {
        RopeProblem::new([3, seq], heads, head_dim, 19, dtype).expect("valid")
    };
    let norms = [None].into_iter().chain(NormKind::ALL.map(Some));
    for kind in norms {
        let qk_norm = kind.map(|kind| HeadNorm { kind, eps: 1e-3 });
        // Every head dimension and part of one that turns, whole vectors and none; one new position, several,
        // as many as there is room for.
        for (head_dim, dim) in
            [(6, 6), (6, 4), (10, 2), (64, 64), (80, 80), (80, 32), (128, 128), (128, 0), (256, 64)]
        {
            for (seq, heads) in [(1, [1, 1]), (5, [4, 2]), (1, [6, 2])] {
                let p = whole(seq, heads, head_dim);
                add(RopeProblem { dim, qk_norm, ..p }, &[0, 13, 7]);
            }
        }
        add(RopeProblem { qk_norm, ..whole(19, [2, 2], 64) }, &[0, 0, 0]);
        // Positions past the cache and past the table, some of a sequence's or all; a start that wraps around.
        for start in [[17, 16, 15], [19, 18, 400], [u32::MAX, u32::MAX - 1, 0]] {
            let p = RopeProblem { qk_norm, ..whole(4, [4, 1], 64) };
            add(p, &start);
            add(RopeProblem { positions: 17, ..p }, &start);
            add(RopeProblem { positions: 0, dim: 0, ..p }, &start);
            add(RopeProblem { positions: 40, ..p }, &start);
        }
    }
    // Odd heads, which do not turn; one dimension; more heads than cubes take at once.
    for head_dim in [1, 7] {
        let cache = KvLayout { dtype, capacity: 6 };
        let odd = RopeProblem { head_dim, dim: 0, positions: 0, cache, ..whole(2, [3, 1], 8) };
        add(odd, &[0, 4, 5]);
    }
    let many = RopeProblem::new([40, 3], [16, 4], 32, 33, dtype).expect("valid");
    add(many, &(0..40).map(|b| b % 31).collect::<Vec<_>>());
    cases
}

/// Fewer projections for configs that are not the default.
pub fn config_cases(dtype: DType) -> Vec<EdgeCase> {
    let mut cases = Vec::new();
    let norms = [None].into_iter().chain(NormKind::ALL.map(Some));
    for (kind, seed) in norms.zip(11_500..) {
        let problem = RopeProblem::new([2, 3], [8, 2], 128, 40, dtype).expect("valid");
        let qk_norm = kind.map(|kind| HeadNorm { kind, eps: 1e-6 });
        let problem = RopeProblem { qk_norm, dim: 96, ..problem };
        cases.push(EdgeCase { problem, start: vec![36, 38], seed });
    }
    cases
}
