//! Decode attention: cases, instances and peers.

mod check;

use arch::{Backend, DType, Device};
use kernels::attention::decode::{
    CacheLayout, CacheStrides, Decode, DecodeConfig, DecodeOperands, DecodeProblem,
};
use kernels::attention::{Attention, HeadStrides};
use kernels::matmul::Precision;
use serde_json::{Value, json};
use tune::Kernel;

pub use self::check::{EdgeCase, Inputs};
use crate::attention::{HEAD_DIMS, place_of};
use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{CheckError, FAR, FAR_PAGE, Verdict};
use crate::kernel::{KernelSuite, Params, insert_rules, params, precision};
use crate::pairs::pairwise;

impl KernelSuite for Decode {
    type Case = EdgeCase;

    fn precision(p: &DecodeProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &DecodeProblem) -> Params {
        let mut params = params([
            ("batch", p.batch.into()),
            ("heads", p.heads.into()),
            ("kv_heads", p.kv_heads.into()),
            ("seq_q", p.seq_q.into()),
            ("seq_kv", p.longest.into()),
            ("head_dim", p.head_dim.into()),
            ("dtype", p.dtype.name().into()),
        ]);
        if p.cache != p.dtype {
            params.insert("cache".to_owned(), p.cache.name().into());
        }
        if let CacheLayout::Paged { block_size, .. } = p.layout {
            params.insert("block_size".to_owned(), block_size.into());
        }
        insert_rules(&mut params, p.rules());
        params
    }

    fn problem(case: &EdgeCase) -> &DecodeProblem {
        &case.problem
    }

    fn case_params(case: &EdgeCase) -> Params {
        let mut params = Self::params(&case.problem);
        // Distinguishes cases that differ in more than sizes and rules.
        params.insert("seed".to_owned(), case.seed.into());
        if case.inputs != Inputs::Normal {
            let inputs = format!("{:?}", case.inputs).to_lowercase();
            params.insert("inputs".to_owned(), inputs.into());
        }
        if case.inputs == Inputs::Far {
            params.insert("extent".to_owned(), case.problem.extents()[1].into());
        }
        params
    }

    fn edge_cases(precision: Precision, backend: Backend) -> Vec<EdgeCase> {
        let dtype = precision.storage();
        let mut cases = Vec::new();
        let mut add = |problem: DecodeProblem, lengths: &[u32], inputs| {
            let seed = 5000 + cases.len() as u64;
            let problem = problem.checked().expect("valid");
            cases.push(EdgeCase { problem, lengths: lengths.to_vec(), inputs, seed });
        };
        // Every head dimension in every kind of cache; lengths that no tile divides, and one position.
        let lengths = [77, 1, 130];
        for head_dim in HEAD_DIMS {
            for block_size in [None, Some(16)] {
                let sizes = Sizes { lengths: &lengths, heads: [4, 2], seq_q: 1, head_dim };
                let p = sizes.problem(block_size, dtype);
                add(p, &lengths, Inputs::Normal);
                add(DecodeProblem { cache: DType::I8, ..p }, &lengths, Inputs::Normal);
            }
        }
        // Query heads and positions that share a KV head: one fragment and several, full and partial.
        let lengths = [100, 33];
        for heads in [[2, 2], [8, 2], [8, 1]] {
            for seq_q in [1, 2, 3, 7, 8, 16] {
                let p =
                    Sizes { lengths: &lengths, heads, seq_q, head_dim: 64 }.problem(None, dtype);
                add(p, &lengths, Inputs::Normal);
                add(DecodeProblem { cache: DType::I8, ..p }, &lengths, Inputs::Normal);
            }
        }
        // Head dimensions that are not multiples of a tensor core tile.
        for head_dim in [20, 7] {
            let lengths = [9, 11];
            let sizes = Sizes { lengths: &lengths, heads: [2, 1], seq_q: 2, head_dim };
            add(sizes.problem(None, dtype), &lengths, Inputs::Normal);
            add(sizes.problem(Some(16), dtype), &lengths, Inputs::Normal);
        }
        // Lengths around a tile, zero, fewer than queries, many tiles; pages of every size.
        let lengths = [15, 16, 17, 0, 3, 1000, 2049, 1];
        for block_size in [None, Some(16), Some(32), Some(64), Some(256)] {
            for seq_q in [1, 4] {
                let sizes = Sizes { lengths: &lengths, heads: [4, 1], seq_q, head_dim: 64 };
                let p = sizes.problem(block_size, dtype);
                add(p, &lengths, Inputs::Normal);
                add(DecodeProblem { cache: DType::I8, ..p }, &lengths, Inputs::Normal);
            }
        }
        // Windows narrower and wider than a tile, a soft cap, an explicit scale, large scores.
        let lengths = [500, 40, 16];
        for block_size in [None, Some(16)] {
            let p = Sizes { lengths: &lengths, heads: [8, 2], seq_q: 3, head_dim: 128 }
                .problem(block_size, dtype);
            for window in [1, 2, 15, 40, 100, 1000] {
                add(DecodeProblem { window: Some(window), ..p }, &lengths, Inputs::Normal);
            }
            let bent = DecodeProblem { softcap: Some(5.0), scale: 0.3, ..p };
            add(bent, &lengths, Inputs::Normal);
            add(
                DecodeProblem { cache: DType::I8, window: Some(33), ..bent },
                &lengths,
                Inputs::Normal,
            );
            add(p, &lengths, Inputs::Large);
            add(DecodeProblem { softcap: Some(30.0), ..p }, &lengths, Inputs::Large);
            add(DecodeProblem { softcap: Some(1e30), ..p }, &lengths, Inputs::Normal);
        }
        // One sequence that is shorter than the host expects.
        for length in [300, 290, 17, 1, 0] {
            for block_size in [None, Some(16)] {
                let p = Sizes { lengths: &[300], heads: [4, 1], seq_q: 2, head_dim: 64 }
                    .problem(block_size, dtype);
                add(p, &[length], Inputs::Normal);
                add(
                    DecodeProblem { window: Some(20), cache: DType::I8, ..p },
                    &[length],
                    Inputs::Normal,
                );
            }
        }
        // Layout `[batch, seq, heads, head_dim]` for q, k and out, padded rows of v, no log-sum-exp.
        let (heads, kv_heads, seq_q, head_dim, capacity) = (4, 2, 2, 64, 105);
        let p = Sizes { lengths: &[100, 64], heads: [heads, kv_heads], seq_q, head_dim };
        let mut p = p.problem(None, dtype);
        let queries = HeadStrides { batch: 4 * 2 * 64, head: 64, seq: 4 * 64 };
        (p.q, p.out, p.lse) = (queries, queries, false);
        let step = u64::from(kv_heads * head_dim);
        p.k = CacheStrides { page: capacity * step, head: head_dim.into(), seq: step };
        p.v = CacheStrides { page: 2 * capacity * 80, head: capacity * 80, seq: 80 };
        add(p, &[100, 64], Inputs::Normal);
        add(DecodeProblem { cache: DType::I8, ..p }, &[100, 64], Inputs::Normal);
        // Split sequences and the same unsplit: a short one next to a long one, and windows.
        let lengths = [4097, 70];
        for block_size in [None, Some(16)] {
            for (seq_q, window) in [(1, None), (3, Some(2000))] {
                let sizes = Sizes { lengths: &lengths, heads: [4, 1], seq_q, head_dim: 64 };
                let p = DecodeProblem { window, ..sizes.problem(block_size, dtype) };
                for inputs in [Inputs::Even, Inputs::Normal] {
                    add(p, &lengths, inputs);
                    add(DecodeProblem { cache: DType::I8, ..p }, &lengths, inputs);
                }
            }
            // Infinities and NaN, with and without a split.
            for lengths in [[2100, 90], [40, 20]] {
                let sizes = Sizes { lengths: &lengths, heads: [4, 2], seq_q: 2, head_dim: 64 };
                let p = sizes.problem(block_size, dtype);
                add(p, &lengths, Inputs::Special);
                add(DecodeProblem { cache: DType::I8, ..p }, &lengths, Inputs::Special);
            }
        }
        // Pages and sequences past 2^31 elements: wider types take twice the memory.
        if backend == Backend::Cuda && dtype.size() == 2 {
            for (block_size, lengths, far) in [
                (Some(16), &[30, 17][..], FAR_PAGE),
                (None, &[300, 40], FAR[0]),
                (None, &[300, 40], FAR[1]),
            ] {
                let sizes = Sizes { lengths, heads: [4, 2], seq_q: 1, head_dim: 64 };
                let p = sizes.problem(block_size, dtype);
                let apart = |s: CacheStrides| CacheStrides { page: s.page + far, ..s };
                let p = DecodeProblem { k: apart(p.k), v: apart(p.v), ..p };
                let p = match p.layout {
                    CacheLayout::Paged { block_size, max_blocks, .. } => DecodeProblem {
                        layout: CacheLayout::Paged { block_size, blocks: 4, max_blocks },
                        ..p
                    },
                    CacheLayout::Contiguous { .. } => p,
                };
                add(p, lengths, Inputs::Far);
                add(DecodeProblem { cache: DType::I8, ..p }, lengths, Inputs::Far);
            }
        }
        // Every pair of options of a decode step.
        let lengths = [150, 17, 64];
        for row in pairwise(&[3, 7, 3, 4, 2, 3, 3, 2]) {
            let [of, head_dim, heads, seq_q, cache, block_size, window, softcap] = row[..] else {
                unreachable!("as many as there are factors")
            };
            if of != place_of(dtype) {
                continue;
            }
            let sizes = Sizes {
                lengths: &lengths,
                heads: [[2, 2], [8, 2], [6, 1]][heads],
                seq_q: [1, 2, 5, 16][seq_q],
                head_dim: HEAD_DIMS[head_dim],
            };
            let p = sizes.problem([None, Some(16), Some(64)][block_size], dtype);
            let problem = DecodeProblem {
                cache: [dtype, DType::I8][cache],
                window: [None, Some(5), Some(70)][window],
                softcap: (softcap == 1).then_some(2.5),
                ..p
            };
            add(problem, &lengths, Inputs::Normal);
        }
        cases
    }

    /// Sequences split into many parts, into few, and unsplit.
    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        let dtype = precision.storage();
        let mut cases = Vec::new();
        let long: &[u32] = &[4097];
        let many: Vec<u32> = (0..80).map(|i| 40 + i).collect();
        for (lengths, heads, seq_q, head_dim, block_size) in [
            (long, [8, 2], 1, 128, None),
            (long, [4, 1], 4, 64, Some(64)),
            (&[3000, 2, 1500], [8, 8], 2, 80, Some(16)),
            (&many, [32, 8], 1, 32, None),
        ] {
            let sizes = Sizes { lengths, heads, seq_q, head_dim };
            for cache in [dtype, DType::I8] {
                let problem = DecodeProblem { cache, ..sizes.problem(block_size, dtype) };
                let problem = problem.checked().expect("valid");
                for inputs in [Inputs::Normal, Inputs::Even] {
                    // Even inputs compare a split with an unsplit result, so they need a case that is split.
                    if inputs == Inputs::Normal || lengths == long {
                        let (seed, lengths) = (7000 + cases.len() as u64, lengths.to_vec());
                        cases.push(EdgeCase { problem, lengths, inputs, seed });
                    }
                }
            }
        }
        cases
    }

    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &DecodeConfig,
    ) -> Result<Verdict, CheckError> {
        check::verify(device, case, config)
    }

    fn verify_operands(
        device: &Device,
        p: &DecodeProblem,
        operands: &DecodeOperands,
        seed: u64,
    ) -> Result<Verdict, CheckError> {
        check::verify_operands(device, p, operands, seed)
    }

    /// Decode steps with the heads of an 8B model.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<DecodeProblem>> {
        let case = |batch, seq_q, longest, pages: Option<u32>, dtype, cache| {
            let (heads, head_dim) = ([32, 8], 128);
            let problem = match pages {
                None => DecodeProblem::contiguous(batch, heads, seq_q, longest, head_dim, dtype),
                Some(size) => {
                    DecodeProblem::paged(batch, heads, seq_q, longest, head_dim, size, dtype)
                }
            };
            BenchCase::alone(DecodeProblem { cache, ..problem.expect("valid sizes") })
        };
        let (f32, bf16, int8) = (DType::F32, DType::Bf16, DType::I8);
        let more = suite != Suite::Quick;
        let mut cases = Vec::new();
        match (suite, scale) {
            (Suite::Documents, _) => {}
            (_, Scale::Host) => {
                cases.push(case(1, 1, 1024, None, f32, f32));
                if more {
                    cases.push(case(1, 1, 1024, Some(16), f32, int8));
                }
            }
            (_, Scale::Gpu) => {
                for batch in [1, 16] {
                    cases.push(case(batch, 1, 8192, None, bf16, bf16));
                    cases.push(case(batch, 1, 8192, None, bf16, int8));
                    if more {
                        cases.push(case(batch, 1, 8192, Some(16), bf16, bf16));
                        cases.push(case(batch, 1, 8192, Some(256), bf16, bf16));
                        cases.push(case(batch, 1, 8192, Some(16), bf16, int8));
                        cases.push(case(batch, 4, 8192, None, bf16, bf16));
                    }
                }
                if more {
                    cases.push(case(1, 1, 512, None, bf16, bf16));
                    cases.push(case(1, 1, 131_072, None, bf16, bf16));
                    cases.push(case(1, 16, 8192, None, bf16, bf16));
                    cases.push(case(64, 1, 1024, Some(16), bf16, bf16));
                }
            }
        }
        cases
    }

    /// Every head dimension, each kind of cache, queries that fill one fragment and several, and each rule.
    fn instances() -> Vec<InstanceCase<DecodeProblem>> {
        let full = |heads, seq_q, head_dim| {
            DecodeProblem::contiguous(1, heads, seq_q, 8192, head_dim, DType::Bf16)
                .expect("valid sizes")
        };
        let case = |problem, max_candidates| InstanceCase { problem, max_candidates, clean: 1 };
        let mut cases = Vec::new();
        for head_dim in HEAD_DIMS {
            for (heads, seq_q) in [([32, 8], 1), ([32, 8], 4), ([32, 4], 16)] {
                let p = full(heads, seq_q, head_dim);
                let max_candidates = if head_dim == 128 && seq_q == 1 { usize::MAX } else { 1 };
                cases.push(case(p, max_candidates));
                cases.push(case(DecodeProblem { cache: DType::I8, ..p }, max_candidates));
            }
        }
        let p = full([32, 8], 1, 128);
        for block_size in [16, 256] {
            let cache = CacheStrides::paged(8, block_size, 128);
            let blocks = 8192 / block_size;
            let layout = CacheLayout::Paged { block_size, blocks, max_blocks: blocks };
            let scales = CacheStrides::paged(8, block_size, 1);
            let p = DecodeProblem { layout, k: cache, v: cache, scales, ..p };
            cases.push(case(p, 4));
            cases.push(case(DecodeProblem { cache: DType::I8, ..p }, 4));
        }
        let rules = DecodeProblem { window: Some(512), softcap: Some(50.0), lse: true, ..p };
        cases.push(case(rules, 2));
        // f16 code differs from bf16 code in one letter of an instruction, except for int8 caches.
        let half = DecodeProblem { dtype: DType::F16, cache: DType::F16, ..p };
        cases.push(case(half, 1));
        cases.push(case(DecodeProblem { cache: DType::I8, ..half }, 2));
        // Every sequence unsplit.
        cases.push(case(DecodeProblem { batch: 256, ..p }, 1));
        cases
    }

    fn torch(p: &DecodeProblem) -> Option<Value> {
        // torch has neither pages nor int8 caches.
        let plain = p.cache == p.dtype && matches!(p.layout, CacheLayout::Contiguous { .. });
        plain.then(|| {
            json!({
                "op": Attention::NAME,
                "batch": p.batch,
                "heads": p.heads,
                "kv_heads": p.kv_heads,
                "seq_q": p.seq_q,
                "seq_kv": p.longest,
                "head_dim": p.head_dim,
                "dtype": p.dtype.name(),
                // torch aligns causal order with the first key. Without causal order, its few queries see a few more
                // keys than ours but read the same cache.
                "causal": false,
            })
        })
    }
}

/// Sizes of a case.
#[derive(Debug, Clone, Copy)]
pub struct Sizes<'a> {
    /// Positions of each sequence; at least one is not 0.
    pub lengths: &'a [u32],
    /// Number of query heads and of KV heads.
    pub heads: [u32; 2],
    pub seq_q: u32,
    pub head_dim: u32,
}

impl Sizes<'_> {
    /// Returns a problem whose cache is larger than its sequences need: in pages of `block_size` positions, or
    /// contiguous for `None`.
    pub fn problem(&self, block_size: Option<u32>, dtype: DType) -> DecodeProblem {
        let Self { lengths, heads, seq_q, head_dim } = *self;
        let longest = lengths.iter().copied().max().unwrap_or(1);
        let (batch, capacity) = (lengths.len() as u32, longest + 5);
        let dense = DecodeProblem::contiguous(batch, heads, seq_q, capacity, head_dim, dtype);
        let dense = DecodeProblem { longest, lse: true, ..dense.expect("sizes are valid") };
        let Some(block_size) = block_size else { return dense };
        let max_blocks = capacity.div_ceil(block_size);
        let cache = CacheStrides::paged(heads[1], block_size, head_dim);
        DecodeProblem {
            layout: CacheLayout::Paged { block_size, blocks: batch * max_blocks + 2, max_blocks },
            k: cache,
            v: cache,
            scales: CacheStrides::paged(heads[1], block_size, 1),
            ..dense
        }
    }
}

#[cfg(test)]
mod tests {
    use arch::ArchProfile;

    use super::*;

    #[test]
    fn even_cases_are_split_on_a_card() {
        let card = ArchProfile::recorded("rtx4090").expect("recorded");
        for precision in [Precision::F16, Precision::Bf16] {
            let all = Decode::edge_cases(precision, Backend::Cuda).into_iter();
            let all = all.chain(Decode::config_cases(precision));
            let even: Vec<_> = all.filter(|case| case.inputs == Inputs::Even).collect();
            assert!(even.len() > 8);
            for case in even {
                let first = Decode::candidates(&card, &case.problem)[0];
                assert!(first.without_splits().is_some(), "{:?} by {first:?}", case.problem);
            }
        }
    }
}
