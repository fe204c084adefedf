//! Checks decode attention against its reference.

use std::iter;

use arch::Device;
use cubecl::server::Handle;
use kernels::attention::decode::{
    CacheLayout, CacheStrides, Decode, DecodeConfig, DecodeOperands, DecodeProblem, Scales,
};
use reference::{Cache, Comparison, Distribution, Special, Table, fill, plant};

use crate::attention::{dense, strides};
use crate::check::{
    CheckError, Verdict, fnv1a, give_back, kernel_error, large, launch_twice, nearby, padded,
    reference_dtype, scattered, scores_are_large, unwritten,
};

/// Contents of the operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inputs {
    /// Normal.
    Normal,
    /// Normal, with q scaled by [`large`]: scores of 10,000 and more, or of thousands below a soft cap.
    Large,
    /// Zeros in q and small integers in v. Every weight is 1 and every sum is exact, so a split sequence must be
    /// bit-identical to an unsplit one.
    Even,
    /// Normal, with infinities and NaN in visible elements of q, k and v.
    Special,
    /// Normal, in pages (or sequences) past 2^31 elements. Only the elements that the problem reads are initialised.
    Far,
}

/// A decode step to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: DecodeProblem,
    /// Positions of each sequence.
    pub lengths: Vec<u32>,
    pub inputs: Inputs,
    pub seed: u64,
}

/// Runs `case` on fresh host inputs and compares every result with the reference. Outputs are NaN before the launch, so
/// that an unwritten element fails. Unused cache positions are NaN too, so that reading one fails.
///
/// If `config` splits sequences, the unsplit config is checked too. With even inputs, both must be bit-identical.
///
/// # Errors
/// The kernel failed to run. A wrong result is a [`Verdict`], not an error.
pub(super) fn verify(
    device: &Device,
    case: &EdgeCase,
    config: &DecodeConfig,
) -> Result<Verdict, CheckError> {
    let checked = check_one(device, case, config);
    if case.inputs == Inputs::Far {
        give_back(device)?;
        return checked;
    }
    let verdict = checked?;
    let Some(whole) = config.without_splits() else { return Ok(verdict) };
    let whole = check_one(device, case, &whole)?;
    if case.inputs == Inputs::Even && whole.digest != verdict.digest {
        return Err(CheckError::Kernel(
            "split results are not bit-identical to the unsplit result".to_owned(),
        ));
    }
    let comparison = Comparison::worst(vec![verdict.comparison, whole.comparison]);
    Ok(Verdict { comparison, ..verdict })
}

/// [`verify`] for one config. The digest covers the output and the log-sum-exp.
fn check_one(
    device: &Device,
    case: &EdgeCase,
    config: &DecodeConfig,
) -> Result<Verdict, CheckError> {
    let far = &case.problem;
    // The reference gets the pages close together.
    let near = |s: CacheStrides| CacheStrides { page: nearby(s.page), ..s };
    let p = &DecodeProblem { k: near(far.k), v: near(far.v), ..*far };
    let dtype = reference_dtype(p.dtype);
    let [q_len, k_len, v_len, out_len, scales_len] = p.extents();
    let seed = |salt: u64| 8 * case.seed + salt;
    let mut q = fill(seed(0), q_len, Distribution::Normal);
    let magnitude = match case.inputs {
        Inputs::Large => large(p.softcap),
        Inputs::Even => 0.0,
        _ => 1.0,
    };
    q.iter_mut().for_each(|v| *v *= magnitude);
    if case.inputs == Inputs::Special {
        plant(&mut q, dtype, &[(q_len / 7, Special::Inf), (q_len / 3, Special::Nan)])?;
    }
    let q = dtype.decode(&dtype.encode(&q))?;
    let table = table(case);
    let rows = rows(case, &table);
    let mut k = stored(p, &rows, p.k, fill(seed(1), k_len, Distribution::Normal))?;
    let mut v = fill(seed(2), v_len, Distribution::Normal);
    if case.inputs == Inputs::Even {
        // An int8 cache scales this by 60.
        v.iter_mut().for_each(|v| *v = (2.0 * *v).round());
    }
    let mut v = stored(p, &rows, p.v, v)?;
    if case.inputs == Inputs::Special && !p.quantized() {
        // Position 0, which every query sees: a key in sequence 0 and a value in sequence 1.
        let [key, value] = [0, 1].map(|b| rows.iter().find(|row| row.sequence == b));
        for (of, strides, row, special) in
            [(&mut k, p.k, key, Special::NegInf), (&mut v, p.v, value, Special::Nan)]
        {
            let at = row.map(|row| (row.at(strides) + 3, special));
            plant(of, dtype, &at.into_iter().collect::<Vec<_>>())?;
        }
    }
    let scales = p.quantized().then(|| {
        [3, 4].map(|salt| {
            let noise = fill(seed(salt), scales_len, Distribution::Uniform);
            let scale = |v: f32| if case.inputs == Inputs::Even { 0.25 } else { 0.02 + 0.015 * v };
            let scales = noise.into_iter().map(scale).collect();
            only_at(scales, rows.iter().map(|row| row.at(p.scales)), 1)
        })
    });

    let client = device.client();
    let upload = |bytes: &[u8]| client.create_from_slice(&padded(bytes));
    let words = |words: &[u32]| {
        upload(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>())
    };
    let numbers = |values: &[f32]| upload(&reference::DType::F32.encode(values));
    let cached = |values: &[f32], near: CacheStrides, far: CacheStrides, len: usize| {
        let (bytes, size) = (encode(p, values), p.cache.size());
        if near == far {
            return upload(&bytes);
        }
        let pages = (0..bytes.len() / (near.page as usize * size)).map(|page| {
            let [from, to, step] = [page as u64 * near.page, page as u64 * far.page, near.page]
                .map(|at| at as usize * size);
            (from..from + step, to)
        });
        scattered(device, len * size, &bytes, pages)
    };
    let [_, far_k, far_v, ..] = far.extents();
    let lse_len = p.rows() as usize;
    let operands = DecodeOperands {
        q: upload(&dtype.encode(&q)),
        k: cached(&k, p.k, far.k, far_k),
        v: cached(&v, p.v, far.v, far_v),
        out: unwritten(device, out_len * p.dtype.size()),
        lengths: words(&case.lengths),
        table: (!table.is_empty()).then(|| words(&table)),
        scales: scales.as_ref().map(|[k, v]| Scales { k: numbers(k), v: numbers(v) }),
        lse: p.lse.then(|| unwritten(device, lse_len * 4)),
    };
    let results: Vec<_> = iter::once(&operands.out).chain(&operands.lse).collect();
    launch_twice::<Decode>(device, far, config, &operands, &results)?;
    let read = |handle: &Handle| client.read_one(handle.clone()).map_err(kernel_error);
    let bytes = read(&operands.out)?;
    let bytes = &bytes[..out_len * p.dtype.size()];
    let lse_bytes = match &operands.lse {
        Some(handle) => read(handle)?[..lse_len * 4].to_vec(),
        None => Vec::new(),
    };
    let lse =
        operands.lse.is_some().then(|| reference::DType::F32.decode(&lse_bytes)).transpose()?;
    if case.inputs == Inputs::Large && p.softcap.is_none() {
        scores_are_large(lse.as_deref())?;
    }

    let reference = reference_of(p);
    let cache = Cache {
        k: &k,
        v: &v,
        lengths: &case.lengths,
        table: table_of(p, &table),
        scales: scales.as_ref().map(|[k, v]| [&k[..], &v[..]]),
    };
    let out = dense(&dtype.decode(bytes)?, p.out, [p.batch, p.heads, p.seq_q], 0, p.head_dim);
    let comparison = reference.check(&reference.all(), &q, &cache, &out, lse.as_deref())?;
    Ok(Verdict { comparison, digest: fnv1a(&[bytes, &lse_bytes].concat()) })
}

/// Compares the result of a launch in `operands` with the reference at a seeded sample of queries. Reads the inputs
/// back from the device.
///
/// # Errors
/// The launch failed.
pub(super) fn verify_operands(
    device: &Device,
    p: &DecodeProblem,
    operands: &DecodeOperands,
    seed: u64,
) -> Result<Verdict, CheckError> {
    let dtype = reference_dtype(p.dtype);
    let [q_len, k_len, v_len, out_len, scales_len] = p.extents();
    let read = |handle: &Handle, len: usize| {
        let bytes = device.client().read_one(handle.clone()).map_err(kernel_error)?;
        Ok::<_, CheckError>(bytes[..len].to_vec())
    };
    let size = p.dtype.size();
    let q = dtype.decode(&read(&operands.q, q_len * size)?)?;
    let cached = |handle, len: usize| decode(p, &read(handle, len * p.cache.size())?);
    let (k, v) = (cached(&operands.k, k_len)?, cached(&operands.v, v_len)?);
    let words = |handle, len: usize| {
        let bytes = read(handle, len * 4)?;
        let words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
        Ok::<Vec<u32>, CheckError>(words.collect())
    };
    let lengths = words(&operands.lengths, p.batch as usize)?;
    let table = match &operands.table {
        Some(table) => words(table, p.table_len())?,
        None => Vec::new(),
    };
    let numbers =
        |handle| Ok::<_, CheckError>(reference::DType::F32.decode(&read(handle, scales_len * 4)?)?);
    let scales = match &operands.scales {
        Some(scales) => Some([numbers(&scales.k)?, numbers(&scales.v)?]),
        None => None,
    };
    let bytes = read(&operands.out, out_len * size)?;
    let out = dense(&dtype.decode(&bytes)?, p.out, [p.batch, p.heads, p.seq_q], 0, p.head_dim);
    let cache = Cache {
        k: &k,
        v: &v,
        lengths: &lengths,
        table: table_of(p, &table),
        scales: scales.as_ref().map(|[k, v]| [&k[..], &v[..]]),
    };
    let reference = reference_of(p);
    let rows = reference.sample(seed, 64);
    let comparison = reference.check(&rows, &q, &cache, &out, None)?;
    Ok(Verdict { comparison, digest: fnv1a(&bytes) })
}

/// Location in the cache of one position of one head.
struct Row {
    sequence: usize,
    page: u64,
    head: u64,
    row: u64,
}

impl Row {
    const fn at(&self, s: CacheStrides) -> usize {
        (self.page * s.page + self.head * s.head + self.row * s.seq) as usize
    }
}

/// Every cached position of every sequence.
fn rows(case: &EdgeCase, table: &[u32]) -> Vec<Row> {
    let p = &case.problem;
    let mut rows = Vec::new();
    for (b, length) in case.lengths.iter().enumerate() {
        for j in 0..*length {
            let (page, row) = match p.layout {
                CacheLayout::Contiguous { .. } => (b as u32, j),
                CacheLayout::Paged { block_size, max_blocks, .. } => {
                    (table[b * max_blocks as usize + (j / block_size) as usize], j % block_size)
                }
            };
            let heads = 0..u64::from(p.kv_heads);
            let row = |head| Row { sequence: b, page: page.into(), head, row: row.into() };
            rows.extend(heads.map(row));
        }
    }
    rows
}

/// A shuffled block table. Entries past the end of a sequence are invalid.
fn table(case: &EdgeCase) -> Vec<u32> {
    let CacheLayout::Paged { block_size, blocks, max_blocks } = case.problem.layout else {
        return Vec::new();
    };
    let mut free: Vec<u32> = (0..blocks).collect();
    let noise = fill(8 * case.seed + 5, blocks as usize, Distribution::Uniform);
    free.sort_by(|a, b| noise[*a as usize].total_cmp(&noise[*b as usize]));
    let mut table = Vec::new();
    for length in &case.lengths {
        let used = length.div_ceil(block_size);
        let entry = |i| if i < used { free.pop().expect("enough blocks") } else { u32::MAX };
        table.extend((0..max_blocks).map(entry));
    }
    table
}

fn table_of<'a>(p: &DecodeProblem, blocks: &'a [u32]) -> Option<Table<'a>> {
    match p.layout {
        CacheLayout::Contiguous { .. } => None,
        CacheLayout::Paged { block_size, max_blocks, .. } => {
            let [block_size, max_blocks] = [block_size, max_blocks].map(|s| s as usize);
            Some(Table { blocks, block_size, max_blocks })
        }
    }
}

/// Rounds `values` to the cache's dtype and keeps those at `rows`. The others become NaN, or 127 in an int8 cache.
fn stored(
    p: &DecodeProblem,
    rows: &[Row],
    strides: CacheStrides,
    values: Vec<f32>,
) -> Result<Vec<f32>, CheckError> {
    let values = match p.quantized() {
        // Covers the range of a byte almost evenly.
        true => values.into_iter().map(|v| (v * 60.0).round().clamp(-128.0, 127.0)).collect(),
        false => {
            let dtype = reference_dtype(p.cache);
            dtype.decode(&dtype.encode(&values))?
        }
    };
    let mut stored = only_at(values, rows.iter().map(|row| row.at(strides)), p.head_dim as usize);
    if p.quantized() {
        stored.iter_mut().filter(|v| v.is_nan()).for_each(|v| *v = 127.0);
    }
    Ok(stored)
}

/// Keeps `len` elements from each of `starts` on; the others become NaN.
fn only_at(values: Vec<f32>, starts: impl Iterator<Item = usize>, len: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; values.len()];
    for start in starts {
        out[start..start + len].copy_from_slice(&values[start..start + len]);
    }
    out
}

fn encode(p: &DecodeProblem, values: &[f32]) -> Vec<u8> {
    match p.quantized() {
        true => values.iter().map(|v| (*v as i8).cast_unsigned()).collect(),
        false => reference_dtype(p.cache).encode(values),
    }
}

fn decode(p: &DecodeProblem, bytes: &[u8]) -> Result<Vec<f32>, CheckError> {
    match p.quantized() {
        true => Ok(bytes.iter().map(|v| f32::from(v.cast_signed())).collect()),
        false => Ok(reference_dtype(p.cache).decode(bytes)?),
    }
}

fn reference_of(p: &DecodeProblem) -> reference::Decode {
    let cached = |s: CacheStrides| reference::CacheStrides {
        page: s.page as usize,
        head: s.head as usize,
        seq: s.seq as usize,
    };
    reference::Decode {
        batch: p.batch as usize,
        heads: p.heads as usize,
        kv_heads: p.kv_heads as usize,
        seq_q: p.seq_q as usize,
        head_dim: p.head_dim as usize,
        q: strides(p.q),
        k: cached(p.k),
        v: cached(p.v),
        scales: cached(p.scales),
        scale: f64::from(p.scale),
        softcap: p.softcap.map(f64::from),
        window: p.window.map(|w| w as usize),
        dtype: reference_dtype(p.dtype),
    }
}
