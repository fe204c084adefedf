//! Checks RoPE outputs and KV cache writes against their reference.

use arch::{Backend, DType, Device};
use cubecl::server::Handle;
use kernels::attention::decode::{CacheLayout, CacheStrides, Scales};
use kernels::matmul::Precision;
use kernels::norm::NormKind;
use kernels::rope::{HeadNorm, HeadWeights, KvLayout, Rope, RopeConfig, RopeOperands, RopeProblem};
use reference::{Distribution, Rotary, Stretch, fill};
use tune::{Kernel, Queue};

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, apart, fnv1a, guarded, intact, kernel_error, padded, read,
    reference_dtype, together, unwritten,
};
use crate::kernel::{KernelSuite, Params, params, precision};
use crate::norm::reference_rule;

/// A projection to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: RopeProblem,
    /// Tokens of each sequence that are already in the cache.
    pub start: Vec<u32>,
    /// Block table `[batch, max_blocks]` of a paged cache.
    pub pages: Vec<u32>,
    pub seed: u64,
}

/// Dense values of one projection, and the caches before the launch.
struct Host {
    qkv: Vec<f32>,
    start: Vec<u32>,
    pages: Vec<u32>,
    table: Vec<f32>,
    weights: Option<[Vec<f32>; 2]>,
    k: Vec<f32>,
    v: Vec<f32>,
    scales: Option<[Vec<f32>; 2]>,
}

impl Host {
    fn operands(&self) -> reference::RopeOperands<'_> {
        reference::RopeOperands {
            qkv: &self.qkv,
            start: &self.start,
            pages: &self.pages,
            table: &self.table,
            weights: self.weights.as_ref().map(|w| w.each_ref().map(|w| &w[..])),
            k: &self.k,
            v: &self.v,
            scales: self.scales.as_ref().map(|s| s.each_ref().map(|s| &s[..])),
        }
    }
}

impl KernelSuite for Rope {
    type Case = EdgeCase;

    fn precision(p: &RopeProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &RopeProblem) -> Params {
        let mut params = params([
            ("batch", p.batch.into()),
            ("seq", p.seq.into()),
            ("heads", p.heads.into()),
            ("kv_heads", p.kv_heads.into()),
            ("head_dim", p.head_dim.into()),
            ("dtype", p.dtype.name().into()),
        ]);
        if p.dim != p.head_dim {
            params.insert("dim".to_owned(), p.dim.into());
        }
        if let Some(norm) = p.qk_norm {
            params.insert("qk_norm".to_owned(), norm.kind.name().into());
        }
        if let CacheLayout::Paged { block_size, .. } = p.cache.layout {
            params.insert("pages".to_owned(), block_size.into());
        }
        if p.cache.quantized() {
            params.insert("cache".to_owned(), p.cache.dtype.name().into());
        }
        params
    }

    fn problem(case: &EdgeCase) -> &RopeProblem {
        &case.problem
    }

    fn case_params(case: &EdgeCase) -> Params {
        let mut params = Self::params(&case.problem);
        // Distinguishes cases that differ in start positions and in caches.
        params.insert("seed".to_owned(), case.seed.into());
        params
    }

    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<EdgeCase> {
        let dtype = precision.storage();
        let mut cases = Vec::new();
        let mut add = |problem: RopeProblem, start: &[u32]| {
            let problem = problem.checked().expect("valid");
            let seed = 11_000 + cases.len() as u64;
            let pages = scattered(&problem);
            cases.push(EdgeCase { problem, start: start.to_vec(), pages, seed });
        };
        let bytes = |p: RopeProblem| {
            let cache = KvLayout { dtype: DType::I8, ..p.cache };
            RopeProblem { cache, ..p }
        };
        let whole = |seq, heads, head_dim| {
            RopeProblem::new([3, seq], heads, head_dim, 19, dtype).expect("valid")
        };
        let norms = [None].into_iter().chain(NormKind::ALL.map(Some));
        for kind in norms {
            let qk_norm = kind.map(|kind| HeadNorm { kind, eps: 1e-3 });
            // Head dimensions with full and partial rotation, which vectors do and do not divide. One new position,
            // several, and as many as the cache holds.
            for (head_dim, dim) in [
                (6, 6),
                (6, 4),
                (10, 2),
                (64, 64),
                (80, 80),
                (80, 32),
                (128, 128),
                (128, 0),
                (256, 64),
            ] {
                for (seq, heads) in [(1, [1, 1]), (5, [4, 2]), (1, [6, 2])] {
                    let p = RopeProblem { dim, qk_norm, ..whole(seq, heads, head_dim) };
                    add(p, &[0, 13, 7]);
                    add(bytes(p), &[0, 13, 7]);
                }
            }
            add(RopeProblem { qk_norm, ..whole(19, [2, 2], 64) }, &[0, 0, 0]);
            // Positions past the cache and past the table, for some or all of a sequence; a start that wraps around.
            for start in [[17, 16, 15], [19, 18, 400], [u32::MAX, u32::MAX - 1, 0]] {
                let p = RopeProblem { qk_norm, ..whole(4, [4, 1], 64) };
                add(p, &start);
                add(RopeProblem { positions: 17, ..p }, &start);
                add(bytes(RopeProblem { positions: 17, ..p }), &start);
                add(RopeProblem { positions: 0, dim: 0, ..p }, &start);
                add(RopeProblem { positions: 40, ..p }, &start);
            }
        }
        // Caches in `[batch, capacity, kv_heads, head_dim]`, padded positions and padded table rows. Vectors divide
        // some of the strides.
        for (pad, head_dim) in [(0, 64), (48, 80), (3, 64), (2, 6)] {
            let step = u64::from(head_dim + pad);
            let k = CacheStrides { page: 19 * 2 * step, head: step, seq: 2 * step };
            let v = CacheStrides { page: 2 * 21 * step, head: 21 * step, seq: step };
            let p = whole(5, [4, 2], head_dim);
            let table_stride = p.table_stride + pad;
            let p = RopeProblem { cache: KvLayout { k, v, ..p.cache }, table_stride, ..p };
            add(p, &[3, 16, 0]);
            let scales = CacheStrides { page: 2 * 24, head: 24, seq: 1 };
            add(bytes(RopeProblem { cache: KvLayout { scales, ..p.cache }, ..p }), &[3, 16, 0]);
        }
        // Odd head dimensions, which cannot rotate; one dimension; more heads than the cubes take at once.
        for head_dim in [1, 7] {
            let cache = KvLayout::dense(1, 6, head_dim, dtype);
            let odd = RopeProblem { head_dim, dim: 0, positions: 0, cache, ..whole(2, [3, 1], 8) };
            add(odd, &[0, 4, 5]);
            add(bytes(odd), &[0, 4, 5]);
        }
        // Pages in descending order, one size with a padded stride. New positions within one page, across two, and past
        // the last.
        for (head_dim, size, step) in [(64, 16, 64), (80, 4, 80), (6, 16, 9)] {
            for start in [[0, 16, 31], [15, 33, 47], [48, 46, u32::MAX]] {
                let p = whole(3, [4, 2], head_dim);
                let cache =
                    KvLayout::paged(2, [48 / size * 3 + 2, size], 48 / size, head_dim, dtype);
                let k =
                    CacheStrides { page: u64::from(size) * 2 * step, head: step, seq: 2 * step };
                let p = RopeProblem { cache: KvLayout { k, ..cache }, positions: 47, ..p };
                add(p, &start);
                add(bytes(p), &start);
                // The last sequence has pages that do not exist.
                let few = KvLayout::paged(2, [48 / size * 2 + 1, size], 48 / size, head_dim, dtype);
                let p = RopeProblem { cache: few, ..p };
                add(p, &start);
                add(bytes(p), &start);
            }
        }
        let many = RopeProblem::new([40, 3], [16, 4], 32, 33, dtype).expect("valid");
        let start: Vec<u32> = (0..40).map(|b| b % 31).collect();
        add(many, &start);
        add(bytes(many), &start);
        cases
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        let dtype = precision.storage();
        let mut cases = Vec::new();
        let norms = [None].into_iter().chain(NormKind::ALL.map(Some));
        for (kind, seed) in norms.zip(11_500..) {
            let problem = RopeProblem::new([2, 3], [8, 2], 128, 40, dtype).expect("valid");
            let qk_norm = kind.map(|kind| HeadNorm { kind, eps: 1e-6 });
            let problem = RopeProblem { qk_norm, dim: 96, ..problem };
            cases.push(EdgeCase { problem, start: vec![36, 38], pages: Vec::new(), seed });
            let cache = KvLayout::paged(2, [6, 16], 3, 128, dtype);
            for cache in [cache, KvLayout { dtype: DType::I8, ..cache }] {
                let problem = RopeProblem { cache, ..problem };
                let pages = scattered(&problem);
                cases.push(EdgeCase { problem, start: vec![14, 38], pages, seed });
            }
        }
        cases
    }

    /// Compares the queries and both caches, including the gaps between positions. Queries are NaN before the launch.
    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &RopeConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let dtype = reference_dtype(p.dtype);
        let [all, queries, k_len, v_len, scales_len] = p.extents();
        let make = |len: usize, salt: u64| -> Result<Vec<f32>, CheckError> {
            Ok(dtype.decode(&dtype.encode(&fill(
                8 * case.seed + salt,
                len,
                Distribution::Normal,
            )))?)
        };
        let (dims, positions) = (p.dim as usize, p.positions as usize);
        let rotary = Rotary { base: 1e4, dims, stretch: Stretch::Linear(2.0), magnitude: 1.25 };
        let table = rotary.table(if dims > 0 { positions } else { 0 }, positions);
        let weights = [make(p.head_dim as usize, 1)?, make(p.head_dim as usize, 2)?];
        let cells = |len, salt| match p.cache.quantized() {
            true => {
                let noise = fill(8 * case.seed + salt, len, Distribution::Normal);
                Ok(noise.into_iter().map(|v| (v * 60.0).round().clamp(-128.0, 127.0)).collect())
            }
            false => make(len, salt),
        };
        let (k_before, v_before) = (cells(k_len, 3)?, cells(v_len, 4)?);
        let scales_before = p.cache.quantized().then(|| {
            [5, 6].map(|salt| fill(8 * case.seed + salt, scales_len, Distribution::Uniform))
        });
        let host = Host {
            qkv: make(all, 0)?,
            start: case.start.clone(),
            table: table.into_iter().map(|v| v as f32).collect(),
            weights: p.qk_norm.map(|_| weights),
            k: gathered(p, p.cache.k, p.head_dim, &k_before),
            v: gathered(p, p.cache.v, p.head_dim, &v_before),
            scales: scales_before
                .as_ref()
                .map(|s| s.each_ref().map(|s| gathered(p, p.cache.scales, 1, s))),
            pages: case.pages.clone(),
        };
        let client = device.client();
        let upload = |values: &[f32]| client.create_from_slice(&padded(&dtype.encode(values)));
        let floats =
            |values: &[f32]| client.create_from_slice(&reference::DType::F32.encode(values));
        let words = |words: &[u32]| {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            client.create_from_slice(&bytes)
        };
        let operands = RopeOperands {
            qkv: upload(&host.qkv),
            start: words(&case.start),
            pages: (p.pages_len() > 0).then(|| words(&case.pages)),
            table: (p.dim > 0).then(|| floats(&apart(&host.table, dims, p.table_stride as usize))),
            weights: host.weights.as_ref().map(|[q, k]| HeadWeights { q: upload(q), k: upload(k) }),
            q: unwritten(device, queries * p.dtype.size()),
            k: guarded(device, &encode(p, &k_before)),
            v: guarded(device, &encode(p, &v_before)),
            scales: scales_before.as_ref().map(|scales| {
                let [k, v] = scales
                    .each_ref()
                    .map(|values| guarded(device, &reference::DType::F32.encode(values)));
                Scales { k, v }
            }),
        };
        Rope::launch(&Queue::Device(device), p, config, &operands, None);
        let scales = operands.scales.iter().flat_map(|scales| [&scales.k, &scales.v]);
        let written = [&operands.q, &operands.k, &operands.v].into_iter().chain(scales);
        written.into_iter().try_for_each(|buffer| intact(device, buffer))?;
        let between = |before: Vec<f32>, mut after: Vec<f32>, strides, width| {
            places(p, strides, width).into_iter().for_each(|at| after[at] = before[at]);
            match after == before {
                true => Ok(()),
                false => Err(kernel_error("something was written between positions")),
            }
        };
        let after =
            |handle, len: usize| decode(p, &read(device, handle, len * p.cache.dtype.size())?);
        between(k_before, after(&operands.k, k_len)?, p.cache.k, p.head_dim)?;
        between(v_before, after(&operands.v, v_len)?, p.cache.v, p.head_dim)?;
        if let Some(([k_before, v_before], Scales { k, v })) =
            scales_before.zip(operands.scales.as_ref())
        {
            for (before, handle) in [(k_before, k), (v_before, v)] {
                let after = reference::DType::F32.decode(&read(device, handle, scales_len * 4)?)?;
                between(before, after, p.cache.scales, 1)?;
            }
        }
        verdict(device, p, &operands, &host)
    }

    fn verify_operands(
        device: &Device,
        p: &RopeProblem,
        operands: &RopeOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let dtype = reference_dtype(p.dtype);
        let load = |handle: &Handle, len: usize| -> Result<Vec<f32>, CheckError> {
            Ok(dtype.decode(&read(device, handle, len * p.dtype.size())?)?)
        };
        let [all, _, k_len, v_len, _] = p.extents();
        let words = |handle: &Handle, len: usize| -> Result<Vec<u32>, CheckError> {
            let bytes = read(device, handle, len * 4)?;
            Ok(bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
        };
        let pages = match &operands.pages {
            Some(pages) => words(pages, p.pages_len())?,
            None => Vec::new(),
        };
        let table = match &operands.table {
            Some(table) => {
                let rows =
                    reference::DType::F32.decode(&read(device, table, p.table_len() * 4)?)?;
                together(&rows, p.dim as usize, p.table_stride as usize)
            }
            None => Vec::new(),
        };
        let head = p.head_dim as usize;
        let weights = operands.weights.as_ref();
        let weights = weights.map(|w| Ok::<_, CheckError>([load(&w.q, head)?, load(&w.k, head)?]));
        let host = Host {
            qkv: load(&operands.qkv, all)?,
            start: words(&operands.start, p.batch as usize)?,
            table,
            weights: weights.transpose()?,
            k: cells(device, p, &operands.k, k_len, p.cache.k)?,
            v: cells(device, p, &operands.v, v_len, p.cache.v)?,
            scales: scales(device, p, operands)?,
            pages,
        };
        verdict(device, p, operands, &host)
    }

    /// Heads of an 8B model between projection and attention: decode steps and a prefill.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<RopeProblem>> {
        let rope = |tokens, capacity, dtype| {
            RopeProblem::new(tokens, [32, 8], 128, capacity, dtype).expect("valid")
        };
        let mut problems = Vec::new();
        match (suite, scale) {
            (Suite::Quick | Suite::Documents, _) => {}
            (_, Scale::Host) => {
                problems.extend([1, 512].map(|seq| rope([1, seq], 1024, DType::F32)))
            }
            (_, Scale::Gpu) => {
                let qk_norm = Some(HeadNorm { kind: NormKind::Rms, eps: 1e-6 });
                for tokens in [[1, 1], [16, 1], [1, 512]] {
                    let plain = rope(tokens, 2048, DType::Bf16);
                    problems.extend([plain, RopeProblem { qk_norm, ..plain }]);
                }
                // Pages of 64 positions for a batch of 16 sequences.
                let whole = rope([16, 1], 2048, DType::Bf16);
                let cache = KvLayout::paged(8, [16 * 32, 64], 32, 128, DType::Bf16);
                let int8 = KvLayout { dtype: DType::I8, ..whole.cache };
                problems.extend([cache, int8].map(|cache| RopeProblem { cache, ..whole }));
            }
        }
        problems.into_iter().map(BenchCase::alone).collect()
    }

    /// Every head dimension, partial rotation, each norm.
    fn instances() -> Vec<InstanceCase<RopeProblem>> {
        let rope = |head_dim, dtype| {
            RopeProblem::new([16, 1], [32, 8], head_dim, 2048, dtype).expect("valid")
        };
        let case =
            |problem, max_candidates| InstanceCase { problem, max_candidates, clean: usize::MAX };
        let mut cases = Vec::new();
        for head_dim in [6, 64, 80, 96, 128, 256] {
            cases.push(case(rope(head_dim, DType::Bf16), if head_dim == 128 { 4 } else { 1 }));
        }
        let p = rope(128, DType::Bf16);
        cases.push(case(RopeProblem { dim: 32, ..p }, 2));
        cases.push(case(RopeProblem { dim: 0, ..p }, 2));
        for kind in NormKind::ALL {
            let qk_norm = Some(HeadNorm { kind, eps: 1e-6 });
            cases.push(case(RopeProblem { qk_norm, ..p }, 4));
            cases.push(case(RopeProblem { qk_norm, ..rope(256, DType::F32) }, 2));
        }
        cases.push(case(rope(128, DType::F16), 1));
        let cache = KvLayout::paged(8, [16 * 32, 64], 32, 128, DType::Bf16);
        cases.push(case(RopeProblem { cache, ..p }, 2));
        let bytes = KvLayout { dtype: DType::I8, ..cache };
        cases.push(case(RopeProblem { cache: bytes, ..p }, 2));
        let qk_norm = Some(HeadNorm { kind: NormKind::Rms, eps: 1e-6 });
        let bytes = KvLayout { dtype: DType::I8, ..p.cache };
        cases.push(case(RopeProblem { cache: bytes, qk_norm, ..p }, 2));
        cases
    }
}

/// Encodes the values of a cache as it stores them.
fn encode(p: &RopeProblem, values: &[f32]) -> Vec<u8> {
    match p.cache.quantized() {
        true => values.iter().map(|v| (*v as i8).cast_unsigned()).collect(),
        false => reference_dtype(p.dtype).encode(values),
    }
}

fn decode(p: &RopeProblem, bytes: &[u8]) -> Result<Vec<f32>, CheckError> {
    match p.cache.quantized() {
        true => Ok(bytes.iter().map(|v| f32::from(v.cast_signed())).collect()),
        false => Ok(reference_dtype(p.dtype).decode(bytes)?),
    }
}

fn verdict(
    device: &Device,
    p: &RopeProblem,
    operands: &RopeOperands,
    host: &Host,
) -> Result<Verdict, CheckError> {
    let dtype = reference_dtype(p.dtype);
    let [_, queries, k_len, v_len, _] = p.extents();
    let q = dtype.decode(&read(device, &operands.q, queries * p.dtype.size())?)?;
    let k = cells(device, p, &operands.k, k_len, p.cache.k)?;
    let v = cells(device, p, &operands.v, v_len, p.cache.v)?;
    let scales = scales(device, p, operands)?;
    let scales = scales.as_ref().map(|s| s.each_ref().map(|s| &s[..]));
    let left = reference::Left { q: &q, k: &k, v: &v, scales };
    let comparison = reference_of(p).check(host.operands(), left)?;
    let all = [&q, &k, &v].into_iter().map(|part| &part[..]).chain(scales.into_iter().flatten());
    let bytes: Vec<u8> = all.flat_map(|part| reference::DType::F32.encode(part)).collect();
    Ok(Verdict { comparison, digest: fnv1a(&bytes) })
}

/// Reads the values of a cache, without the gaps between positions.
fn cells(
    device: &Device,
    p: &RopeProblem,
    handle: &Handle,
    len: usize,
    strides: CacheStrides,
) -> Result<Vec<f32>, CheckError> {
    let buffer = decode(p, &read(device, handle, len * p.cache.dtype.size())?)?;
    Ok(gathered(p, strides, p.head_dim, &buffer))
}

/// Reads the scales of k and v, without gaps; `None` if the cache has none.
fn scales(
    device: &Device,
    p: &RopeProblem,
    operands: &RopeOperands,
) -> Result<Option<[Vec<f32>; 2]>, CheckError> {
    let Some(Scales { k, v }) = &operands.scales else { return Ok(None) };
    let [.., len] = p.extents();
    let load = |handle| -> Result<Vec<f32>, CheckError> {
        let buffer = reference::DType::F32.decode(&read(device, handle, len * 4)?)?;
        Ok(gathered(p, p.cache.scales, 1, &buffer))
    };
    Ok(Some([load(k)?, load(v)?]))
}

/// Buffer offsets of the elements of a cache `[batch, kv_heads, capacity, width]`, or of a paged cache
/// `[blocks, block_size, kv_heads, width]`.
fn places(p: &RopeProblem, strides: CacheStrides, width: u32) -> Vec<usize> {
    let CacheStrides { page, head, seq } = strides;
    let heads = (p.kv_heads, head);
    let axes = match p.cache.layout {
        CacheLayout::Contiguous { capacity } => [(p.batch, page), heads, (capacity, seq)],
        CacheLayout::Paged { block_size, blocks, .. } => [(blocks, page), (block_size, seq), heads],
    };
    let from = axes.into_iter().fold(vec![0], |from, (len, stride)| {
        let along = |at: u64| (0..u64::from(len)).map(move |i| at + i * stride);
        from.into_iter().flat_map(along).collect()
    });
    from.into_iter().flat_map(|at| (at..at + u64::from(width)).map(|at| at as usize)).collect()
}

fn gathered(p: &RopeProblem, strides: CacheStrides, width: u32, buffer: &[f32]) -> Vec<f32> {
    places(p, strides, width).into_iter().map(|at| buffer[at]).collect()
}

fn reference_of(p: &RopeProblem) -> reference::Rope {
    reference::Rope {
        batch: p.batch as usize,
        seq: p.seq as usize,
        heads: p.heads as usize,
        kv_heads: p.kv_heads as usize,
        head_dim: p.head_dim as usize,
        slots: match p.cache.layout {
            CacheLayout::Contiguous { capacity } => {
                reference::Slots::Runs { capacity: capacity as usize }
            }
            CacheLayout::Paged { block_size, blocks, max_blocks } => reference::Slots::Pages {
                block_size: block_size as usize,
                blocks: blocks as usize,
                max_blocks: max_blocks as usize,
            },
        },
        dims: p.dim as usize,
        norm: p.qk_norm.map(|HeadNorm { kind, eps }| reference::Norm {
            rule: reference_rule(kind),
            eps: eps.into(),
        }),
        dtype: reference_dtype(p.dtype),
    }
}

/// A block table without repeats, in descending order from the last page. A cache with too few pages gets invalid
/// entries.
fn scattered(p: &RopeProblem) -> Vec<u32> {
    let CacheLayout::Paged { blocks, .. } = p.cache.layout else { return Vec::new() };
    (0..p.pages_len() as u32).map(|at| blocks.checked_sub(at + 1).unwrap_or(u32::MAX)).collect()
}
