//! Checks attention against its reference.

use std::iter;

use arch::Device;
use cubecl::server::Handle;
use kernels::attention::{
    Attention, AttentionConfig, AttentionOperands, AttentionProblem, HeadStrides, Offsets,
    ScoreStrides,
};
use reference::{Comparison, Distribution, Scores, Special, fill, plant};
use tune::{Kernel, Queue};

use crate::check::{
    CheckError, Verdict, fnv1a, give_back, kernel_error, large, launch_twice, nearby, padded,
    reference_dtype, scattered, scores_are_large, twice, unwritten, window,
};

/// Contents of the operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inputs {
    /// Normal.
    Normal,
    /// Normal, with q scaled by [`large`]: scores of 10,000 and more, or of thousands below a soft cap.
    Large,
    /// Normal, with some rows of the bias or mask fully masked.
    Hidden,
    /// Normal, with a third of the bias -inf, and all of it for the first 32 keys.
    Holes,
    /// Normal, with infinities and NaN in q and k, and in v unless causal. The result of a special value times a weight
    /// of 0 is unspecified.
    Special,
    /// Normal, with the second batch past 2^31 elements. Only the elements that the problem reads are initialised.
    Far,
}

/// A problem to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: AttentionProblem,
    pub inputs: Inputs,
    pub seed: u64,
    /// Queries and keys of each sequence, if lengths vary.
    pub lengths: Option<Vec<(u32, u32)>>,
}

/// Runs `case` on fresh host inputs and compares every result with the reference. Outputs are NaN before the launch, so
/// that an unwritten element fails.
///
/// # Errors
/// The kernel failed to run. A wrong result is a [`Verdict`], not an error.
pub(super) fn verify(
    device: &Device,
    case: &EdgeCase,
    config: &AttentionConfig,
) -> Result<Verdict, CheckError> {
    if case.inputs == Inputs::Far {
        let checked = check_far(device, case, config);
        give_back(device)?;
        return checked;
    }
    let host = Host::new(device, case)?;
    let results: Vec<_> = iter::once(&host.operands.out).chain(&host.operands.lse).collect();
    launch_twice::<Attention>(device, &case.problem, config, &host.operands, &results)?;
    verdict(device, case, &host)
}

/// [`verify`] for batches that lie far apart in memory. The reference gets them close together.
fn check_far(
    device: &Device,
    case: &EdgeCase,
    config: &AttentionConfig,
) -> Result<Verdict, CheckError> {
    let far = &case.problem;
    let near = |s: HeadStrides| HeadStrides { batch: nearby(s.batch), ..s };
    let [q, k, v, out] = [far.q, far.k, far.v, far.out].map(near);
    let case = EdgeCase { problem: AttentionProblem { q, k, v, out, ..*far }, ..case.clone() };
    let near = &case.problem;
    let mut host = Host::new(device, &case)?;
    let size = host.dtype.bytes();
    let [q_len, k_len, v_len, out_len] = far.extents();
    let place = |values: &[f32], len: usize, near: HeadStrides, far: HeadStrides| {
        let pieces = (0..u64::from(case.problem.batch)).map(|b| {
            let [from, to, step] =
                [b * near.batch, b * far.batch, near.batch].map(|at| at as usize * size);
            (from..from + step, to)
        });
        scattered(device, len * size, &host.dtype.encode(values), pieces)
    };
    let whole = device.client().empty(out_len * size);
    let step = near.out.batch as usize * size;
    let pieces: Vec<_> = (0..u64::from(near.batch))
        .map(|b| window(&whole, (b * far.out.batch) as usize * size, step))
        .collect();
    let operands = AttentionOperands {
        q: place(&host.q, q_len, near.q, far.q),
        k: place(&host.k, k_len, near.k, far.k),
        v: place(&host.v, v_len, near.v, far.v),
        out: whole,
        ..host.operands.clone()
    };
    let results: Vec<_> = pieces.iter().chain(&operands.lse).cloned().collect();
    twice(device, &results, || {
        Attention::launch(&Queue::Device(device), far, config, &operands, None)
    })?;
    let mut bytes = Vec::new();
    for piece in pieces {
        bytes.extend_from_slice(&device.client().read_one(piece).map_err(kernel_error)?);
    }
    host.operands.out = device.client().create_from_slice(&bytes);
    verdict(device, &case, &host)
}

/// Compares the outputs of a launch on `host` with the reference.
fn verdict(device: &Device, case: &EdgeCase, host: &Host) -> Result<Verdict, CheckError> {
    let (out, lse) = host.results(device)?;
    if case.inputs == Inputs::Large && case.problem.softcap.is_none() {
        scores_are_large(lse.as_deref())?;
    }
    let mut comparisons = Vec::new();
    for part in parts(case) {
        let p = &case.problem;
        let values = part.dense(&out, p.out, [p.heads, part.seq_q], part.from_q, p.head_dim);
        let sums = lse.as_deref().map(|lse| part.sums(p, lse));
        let (bias, mask) = host.scores(p, &part);
        let scores = Scores { bias: bias.as_deref(), mask: mask.as_deref() };
        let reference = part.reference(p);
        comparisons.push(reference.check(host.qkv(p, &part), scores, &values, sums.as_deref())?);
    }
    Ok(Verdict { comparison: Comparison::worst(comparisons), digest: digest(&out) })
}

/// Inputs of one case, on the host and on the device.
pub(crate) struct Host {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    bias: Option<Vec<f32>>,
    mask: Option<Vec<bool>>,
    dtype: reference::DType,
    out_len: usize,
    lse_len: usize,
    pub(crate) operands: AttentionOperands,
}

impl Host {
    pub(crate) fn new(device: &Device, case: &EdgeCase) -> Result<Self, CheckError> {
        let p = &case.problem;
        let dtype = reference_dtype(p.dtype);
        let make = |len, salt, scale| values(case, len, salt, scale);
        let [q_len, k_len, v_len, out_len] = extents(case);
        let large = if case.inputs == Inputs::Large { large(p.softcap) } else { 1.0 };
        let (mut q, mut k, mut v) =
            (make(q_len, 0, large)?, make(k_len, 1, 1.0)?, make(v_len, 2, 1.0)?);
        if case.inputs == Inputs::Special {
            plant(&mut q, dtype, &[(q_len / 7, Special::Inf), (5 * q_len / 6, Special::Nan)])?;
            let keys = [(k_len / 5, Special::NegInf), (3 * k_len / 8, Special::Nan)];
            plant(&mut k, dtype, &keys)?;
            if !p.causal {
                let values = [(5 * v_len / 8, Special::Inf), (7 * v_len / 8, Special::Nan)];
                plant(&mut v, dtype, &values)?;
            }
        }
        let hidden = |row: u64| case.inputs == Inputs::Hidden && row % 5 == 2;
        let rows = |s: ScoreStrides| move |at: usize| s.row > 0 && hidden(at as u64 / s.row);
        let bias = match p.bias {
            None => None,
            Some(s) => {
                let mut values = make(p.score_extent(s), 3, 1.0)?;
                let noise = fill(8 * case.seed + 6, values.len(), Distribution::Uniform);
                let hole = |at: usize| {
                    let key = if s.row > 0 { at as u64 % s.row } else { at as u64 };
                    case.inputs == Inputs::Holes && (key < 32 || noise[at] < -0.34)
                };
                for (at, value) in values.iter_mut().enumerate() {
                    if rows(s)(at) || hole(at) {
                        *value = f32::NEG_INFINITY;
                    }
                }
                Some(values)
            }
        };
        let mask = p.mask.map(|s| {
            let noise = fill(8 * case.seed + 4, p.score_extent(s), Distribution::Uniform);
            let hide = noise.iter().enumerate().map(|(at, v)| *v > 0.25 || rows(s)(at));
            hide.collect::<Vec<bool>>()
        });
        let upload = |bytes: &[u8]| device.client().create_from_slice(&padded(bytes));
        let words = |starts: Vec<u32>| {
            upload(&starts.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<_>>())
        };
        let queries: u32 = match &case.lengths {
            Some(lengths) => lengths.iter().map(|(q, _)| q).sum(),
            None => p.batch * p.seq_q,
        };
        let lse_len = (queries * p.heads) as usize;
        let mask_size = p.mask_dtype.size();
        let operands = AttentionOperands {
            q: upload(&dtype.encode(&q)),
            k: upload(&dtype.encode(&k)),
            v: upload(&dtype.encode(&v)),
            out: unwritten(device, out_len * p.dtype.size()),
            lse: p.lse.then(|| unwritten(device, lse_len * 4)),
            bias: bias.as_ref().map(|b| upload(&dtype.encode(b))),
            mask: mask.as_ref().map(|m| {
                let bytes = m.iter().flat_map(|hide| {
                    let mut word = [0; 4];
                    word[0] = u8::from(*hide);
                    word.into_iter().take(mask_size)
                });
                upload(&bytes.collect::<Vec<_>>())
            }),
            offsets: case.lengths.as_ref().map(|lengths| Offsets {
                q: words(starts(lengths.iter().map(|(q, _)| *q))),
                kv: words(starts(lengths.iter().map(|(_, kv)| *kv))),
                queries,
            }),
        };
        Ok(Self { q, k, v, bias, mask, dtype, out_len, lse_len, operands })
    }

    /// Reads the results of a forward launch: the output, and the log-sum-exp if it is stored.
    pub(crate) fn results(
        &self,
        device: &Device,
    ) -> Result<(Vec<f32>, Option<Vec<f32>>), CheckError> {
        let out = read(device, &self.operands.out, self.dtype, self.out_len)?;
        let lse = self.operands.lse.as_ref();
        let lse = lse.map(|lse| read(device, lse, reference::DType::F32, self.lse_len));
        Ok((out, lse.transpose()?))
    }

    /// q, k and v from the first position of `part` on.
    pub(crate) fn qkv(&self, p: &AttentionProblem, part: &Part) -> [&[f32]; 3] {
        let from = |s: HeadStrides, seq: u32| seq as usize * s.seq as usize;
        [
            &self.q[from(p.q, part.from_q)..],
            &self.k[from(p.k, part.from_kv)..],
            &self.v[from(p.v, part.from_kv)..],
        ]
    }

    /// Bias and mask of `part`, dense `[batch, heads, seq_q, seq_kv]`.
    pub(crate) fn scores(
        &self,
        p: &AttentionProblem,
        part: &Part,
    ) -> (Option<Vec<f32>>, Option<Vec<bool>>) {
        (
            self.bias.as_deref().zip(p.bias).map(|(from, s)| part.spread(from, s, p)),
            self.mask.as_deref().zip(p.mask).map(|(from, s)| part.spread(from, s, p)),
        )
    }
}

/// Converts strides to the reference's form.
pub(crate) const fn strides(s: HeadStrides) -> reference::HeadStrides {
    reference::HeadStrides { batch: s.batch as usize, head: s.head as usize, seq: s.seq as usize }
}

/// Copies `seq` positions of a strided tensor, starting at `from`, to a dense `[batch, heads, seq, head_dim]`.
pub(crate) fn dense(
    values: &[f32],
    strides: HeadStrides,
    [batch, heads, seq]: [u32; 3],
    from: u32,
    head_dim: u32,
) -> Vec<f32> {
    let mut dense = Vec::new();
    for b in 0..u64::from(batch) {
        for h in 0..u64::from(heads) {
            for i in u64::from(from)..u64::from(from) + u64::from(seq) {
                let at = (b * strides.batch + h * strides.head + i * strides.seq) as usize;
                dense.extend_from_slice(&values[at..at + head_dim as usize]);
            }
        }
    }
    dense
}

/// Seeded normal values of a case, times `scale` and rounded to its dtype.
pub(crate) fn values(
    case: &EdgeCase,
    len: usize,
    salt: u64,
    scale: f32,
) -> Result<Vec<f32>, CheckError> {
    let dtype = reference_dtype(case.problem.dtype);
    let mut values = fill(8 * case.seed + salt, len, Distribution::Normal);
    values.iter_mut().for_each(|v| *v *= scale);
    Ok(dtype.decode(&dtype.encode(&values))?)
}

/// Reads the first `len` elements of a buffer.
pub(crate) fn read(
    device: &Device,
    handle: &Handle,
    dtype: reference::DType,
    len: usize,
) -> Result<Vec<f32>, CheckError> {
    let bytes = device.client().read_one(handle.clone()).map_err(kernel_error)?;
    Ok(dtype.decode(&bytes[..len * dtype.bytes()])?)
}

pub(crate) fn digest(values: &[f32]) -> u64 {
    fnv1a(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
}

/// Compares the result of a launch in `operands` with the reference at a seeded sample of queries. Reads the inputs
/// back from the device. Supports dense results without bias, mask or varying lengths.
///
/// # Errors
/// The launch failed.
pub(super) fn verify_operands(
    device: &Device,
    p: &AttentionProblem,
    operands: &AttentionOperands,
    seed: u64,
) -> Result<Verdict, CheckError> {
    let dtype = reference_dtype(p.dtype);
    let [q, k, v, out] = p.extents();
    let read = |handle, len| read(device, handle, dtype, len);
    let (q, k, v) = (read(&operands.q, q)?, read(&operands.k, k)?, read(&operands.v, v)?);
    let out = read(&operands.out, out)?;
    let dense = Part::whole(p);
    let reference = dense.reference(p);
    let rows = reference.sample(seed, 192);
    let comparison = reference.check_rows(&rows, [&q, &k, &v], Scores::default(), &out)?;
    Ok(Verdict { comparison, digest: digest(&out) })
}

/// Sequences that one reference computes: all of a dense problem, or one of varying length.
pub(crate) struct Part {
    batch: u32,
    pub(crate) from_q: u32,
    pub(crate) from_kv: u32,
    pub(crate) seq_q: u32,
    pub(crate) seq_kv: u32,
    /// Number of queries of all sequences.
    queries: u32,
}

pub(crate) fn parts(case: &EdgeCase) -> Vec<Part> {
    let Some(lengths) = &case.lengths else { return vec![Part::whole(&case.problem)] };
    let queries = lengths.iter().map(|(q, _)| q).sum();
    let (mut from_q, mut from_kv) = (0, 0);
    let mut parts = Vec::new();
    for &(seq_q, seq_kv) in lengths {
        parts.push(Part { batch: 1, from_q, from_kv, seq_q, seq_kv, queries });
        from_q += seq_q;
        from_kv += seq_kv;
    }
    parts
}

impl Part {
    /// All sequences of a problem with one length.
    pub(crate) const fn whole(p: &AttentionProblem) -> Self {
        Self {
            batch: p.batch,
            from_q: 0,
            from_kv: 0,
            seq_q: p.seq_q,
            seq_kv: p.seq_kv,
            queries: p.seq_q,
        }
    }

    pub(crate) fn reference(&self, p: &AttentionProblem) -> reference::Attention {
        reference::Attention {
            batch: self.batch as usize,
            heads: p.heads as usize,
            kv_heads: p.kv_heads as usize,
            seq_q: self.seq_q as usize,
            seq_kv: self.seq_kv as usize,
            head_dim: p.head_dim as usize,
            q: strides(p.q),
            k: strides(p.k),
            v: strides(p.v),
            scale: f64::from(p.scale),
            softcap: p.softcap.map(f64::from),
            causal: p.causal,
            window: p.window.map(|w| w as usize),
            dtype: reference_dtype(p.dtype),
        }
    }

    /// Copies the part's positions of a strided tensor to a dense `[batch, heads, seq, head_dim]`.
    pub(crate) fn dense(
        &self,
        values: &[f32],
        strides: HeadStrides,
        [heads, seq]: [u32; 2],
        from: u32,
        head_dim: u32,
    ) -> Vec<f32> {
        dense(values, strides, [self.batch, heads, seq], from, head_dim)
    }

    /// The part's log-sum-exps, dense `[batch, heads, seq_q]`.
    pub(crate) fn sums(&self, p: &AttentionProblem, lse: &[f32]) -> Vec<f32> {
        let heads = (self.batch * p.heads) as usize;
        let of_head = |head: usize| {
            let start = head * self.queries as usize + self.from_q as usize;
            &lse[start..start + self.seq_q as usize]
        };
        (0..heads).flat_map(of_head).copied().collect()
    }

    /// Expands a bias or mask to a dense `[batch, heads, seq_q, seq_kv]`.
    fn spread<T: Copy>(&self, from: &[T], s: ScoreStrides, p: &AttentionProblem) -> Vec<T> {
        let mut out = Vec::new();
        for b in 0..u64::from(self.batch) {
            for h in 0..u64::from(p.heads) {
                for i in 0..u64::from(self.seq_q) {
                    for j in 0..u64::from(self.seq_kv) {
                        let at = b * s.batch + h * s.head + i * s.row + j * s.col;
                        out.push(from[at as usize]);
                    }
                }
            }
        }
        out
    }
}

fn starts(lengths: impl Iterator<Item = u32>) -> Vec<u32> {
    let mut at = 0;
    let ends = lengths.map(|len| {
        at += len;
        at
    });
    iter::once(0).chain(ends.collect::<Vec<_>>()).collect()
}

/// Elements of q, k, v and out; with varying lengths, those that the sequences occupy.
pub(crate) fn extents(case: &EdgeCase) -> [usize; 4] {
    let p = &case.problem;
    let Some(lengths) = &case.lengths else { return p.extents() };
    let total = |of: fn(&(u32, u32)) -> u32| lengths.iter().map(of).sum::<u32>();
    let reach = |s: HeadStrides, heads: u32, seq: u32| {
        (u64::from(heads - 1) * s.head + u64::from(seq - 1) * s.seq) as usize + p.head_dim as usize
    };
    let (queries, keys) = (total(|l| l.0), total(|l| l.1));
    [
        reach(p.q, p.heads, queries),
        reach(p.k, p.kv_heads, keys),
        reach(p.v, p.kv_heads, keys),
        reach(p.out, p.heads, queries),
    ]
}
