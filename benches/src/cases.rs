//! What is measured: suites of cases, sized for what runs them.

use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, bail};
use arch::DType;
use kernels::attention::backward::{AttentionBackward, BackwardProblem};
use kernels::attention::decode::{Decode, DecodeProblem};
use kernels::attention::{Attention, AttentionProblem};
use kernels::embed::{Embed, EmbedProblem};
use kernels::int8::{self, Int8Dequantize, Int8Matmul, Int8MatmulProblem, Int8Quantize};
use kernels::matmul::{Activation, Epilogue, Layout, Matmul, MatmulProblem, Precision};
use kernels::nf4::{
    CodeBook, DequantizeProblem, Nf4Dequantize, Nf4Matmul, Nf4MatmulProblem, Nf4Quantize, Order,
    QuantizeProblem, Weight,
};
use kernels::norm::{Norm, NormKind, NormProblem};
use kernels::rope::{HeadNorm, KvLayout, Rope, RopeProblem};
use kernels::sample::{Sample, SampleProblem};
use models::{Fusion, shapes};
use tune::Kernel;

use crate::family::Family;
use crate::model_cases::ModelCase;

/// How much to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Suite {
    /// Two minutes at most: one case of each kind.
    Quick,
    /// Every kernel in every precision and layout.
    Kernels,
    /// Also the products of whole models.
    All,
    /// What the documents that this project began with tell of: products in every precision, and requests to models.
    Documents,
}

impl FromStr for Suite {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "quick" => Ok(Self::Quick),
            "kernels" => Ok(Self::Kernels),
            "all" => Ok(Self::All),
            "documents" => Ok(Self::Documents),
            _ => Err(format!("unknown suite `{s}`\nhint: one of quick, kernels, all, documents")),
        }
    }
}

/// Whether the cases are for a GPU or for a few cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    Gpu,
    Host,
}

/// What a case computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Problem {
    Matmul(MatmulProblem),
    Attention(AttentionProblem),
    AttentionBackward(BackwardProblem),
    Decode(DecodeProblem),
    Nf4Dequantize(DequantizeProblem),
    Nf4Matmul(Nf4MatmulProblem),
    Nf4Quantize(QuantizeProblem),
    Int8Dequantize(int8::DequantizeProblem),
    Int8Matmul(Int8MatmulProblem),
    Int8Quantize(int8::QuantizeProblem),
    Embed(EmbedProblem),
    Norm(NormProblem),
    Rope(RopeProblem),
    Sample(SampleProblem),
}

/// One case.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Case {
    pub(crate) problem: Problem,
    /// Whether Burn's own op and cubek's run beside it; Burn's first call on a GPU tunes for up to 40 s.
    pub(crate) peer: bool,
}

impl Case {
    pub(crate) fn name(&self) -> String {
        match &self.problem {
            Problem::Matmul(p) => record::case_name(Matmul::NAME, &Matmul::params(p)),
            Problem::Attention(p) => record::case_name(Attention::NAME, &Attention::params(p)),
            Problem::AttentionBackward(p) => {
                record::case_name(AttentionBackward::NAME, &AttentionBackward::params(p))
            }
            Problem::Decode(p) => record::case_name(Decode::NAME, &Decode::params(p)),
            Problem::Nf4Dequantize(p) => {
                record::case_name(Nf4Dequantize::NAME, &Nf4Dequantize::params(p))
            }
            Problem::Nf4Matmul(p) => record::case_name(Nf4Matmul::NAME, &Nf4Matmul::params(p)),
            Problem::Nf4Quantize(p) => {
                record::case_name(Nf4Quantize::NAME, &Nf4Quantize::params(p))
            }
            Problem::Int8Dequantize(p) => {
                record::case_name(Int8Dequantize::NAME, &Int8Dequantize::params(p))
            }
            Problem::Int8Matmul(p) => record::case_name(Int8Matmul::NAME, &Int8Matmul::params(p)),
            Problem::Int8Quantize(p) => {
                record::case_name(Int8Quantize::NAME, &Int8Quantize::params(p))
            }
            Problem::Embed(p) => record::case_name(Embed::NAME, &Embed::params(p)),
            Problem::Norm(p) => record::case_name(Norm::NAME, &Norm::params(p)),
            Problem::Rope(p) => record::case_name(Rope::NAME, &Rope::params(p)),
            Problem::Sample(p) => record::case_name(Sample::NAME, &Sample::params(p)),
        }
    }
}

const ROWS: [Layout; 2] = [Layout::Row, Layout::Row];
/// A linear layer: the weight is `[n, k]`.
const LINEAR: [Layout; 2] = [Layout::Row, Layout::Col];

/// The cases of `suite` whose name contains `filter`; none where it names cases of the other scale only.
///
/// # Errors
/// A filter that matches no case of either.
pub(crate) fn select(
    suite: Suite,
    scale: Scale,
    filter: Option<&str>,
) -> anyhow::Result<Vec<Case>> {
    if let Some(filter) = filter {
        check_filter(suite, filter)?;
    }
    let mut cases = all(suite, scale)?;
    cases.retain(|c| filter.is_none_or(|f| c.name().contains(f)));
    Ok(cases)
}

/// Refuses a filter that matches no case of the suite, for a GPU or for a CPU, and no ceiling.
fn check_filter(suite: Suite, filter: &str) -> anyhow::Result<()> {
    let names = names(suite)?;
    if names.iter().any(|name| name.contains(filter)) {
        return Ok(());
    }
    let known = names.first().map(String::as_str).unwrap_or_default();
    bail!("no case of this suite matches `{filter}`\nhint: names look like `{known}`")
}

fn all(suite: Suite, scale: Scale) -> anyhow::Result<Vec<Case>> {
    use Precision::{Bf16, F16, F16Acc16, F32, Tf32};
    let mut cases = Vec::new();
    let mut add = |batch, sizes, layouts, precision, peer| -> anyhow::Result<()> {
        let problem = MatmulProblem::dense(batch, sizes, layouts, precision)
            .context("a case of the suite is invalid")?;
        let problem = Problem::Matmul(problem);
        if !cases.iter().any(|c: &Case| c.problem == problem) {
            cases.push(Case { problem, peer });
        }
        Ok(())
    };
    // Adapters of a linear layer, each for rows of its own.
    let grouped = |groups, sizes, precision| -> anyhow::Result<Case> {
        let problem = MatmulProblem::grouped(groups, sizes, LINEAR[1], precision)
            .context("a case of the suite is invalid")?;
        Ok(Case { problem: Problem::Matmul(problem), peer: false })
    };
    let mut normed = Vec::new();
    match (scale, suite) {
        (Scale::Host, Suite::Quick) => {
            add(1, [512; 3], ROWS, F32, true)?;
            add(1, [1024; 3], ROWS, F32, true)?;
            add(1, [512; 3], LINEAR, F32, true)?;
            add(1, [512; 3], LINEAR, Bf16, true)?;
            add(1, [1, 4096, 4096], LINEAR, F32, true)?;
            add(1, [8, 2048, 2048], LINEAR, F32, true)?;
        }
        (Scale::Host, Suite::Documents) => {
            for precision in [F32, F16, Bf16] {
                add(1, [512; 3], ROWS, precision, false)?;
            }
        }
        (Scale::Gpu, Suite::Documents) => {
            for size in [4096, 8192] {
                for precision in [F32, Tf32, F16, Bf16] {
                    add(1, [size; 3], ROWS, precision, false)?;
                }
            }
        }
        (Scale::Host, _) => {
            for precision in [F32, F16, Bf16] {
                for layouts in [ROWS, LINEAR] {
                    for sizes in [[512; 3], [1024; 3], [1, 4096, 4096], [8, 4096, 4096]] {
                        add(1, sizes, layouts, precision, true)?;
                    }
                }
            }
            add(8, [128, 128, 64], ROWS, F32, true)?;
        }
        (Scale::Gpu, Suite::Quick) => {
            for precision in [Bf16, F16, Tf32, F32] {
                add(1, [4096; 3], LINEAR, precision, precision == Bf16)?;
            }
            add(1, [4096; 3], LINEAR, F16Acc16, false)?;
            add(1, [4096; 3], ROWS, Bf16, true)?;
            add(1, [512, 4096, 4096], LINEAR, Bf16, true)?;
            add(1, [1, 14336, 4096], LINEAR, Bf16, true)?;
            add(1, [8, 14336, 4096], LINEAR, Bf16, false)?;
        }
        (Scale::Gpu, _) => {
            for precision in [Bf16, F16, Tf32, F32] {
                for layouts in [ROWS, LINEAR] {
                    for size in [1024, 4096, 8192] {
                        let peer = precision == Bf16 || (precision == F16 && size == 4096);
                        add(1, [size; 3], layouts, precision, peer && size > 1024)?;
                    }
                }
            }
            for layouts in [ROWS, LINEAR] {
                for size in [4096, 8192] {
                    add(1, [size; 3], layouts, F16Acc16, false)?;
                }
                add(1, [512, 4096, 4096], layouts, Bf16, layouts == LINEAR)?;
                for m in [1, 8, 64] {
                    add(1, [m, 14336, 4096], layouts, Bf16, m < 64 && layouts == LINEAR)?;
                    add(1, [m, 4096, 14336], layouts, Bf16, false)?;
                }
            }
            for n in [6144, 14336] {
                let plain = MatmulProblem::dense(1, [1, n, 4096], LINEAR, Bf16);
                let plain = plain.context("a case of the suite is invalid")?;
                normed.push(of_norm(Problem::Matmul(plain)));
            }
            // What stands beside the products with weights in 4 bits.
            for [m, n, k] in [
                [1, 4096, 4096],
                [1, 11008, 4096],
                [1, 4096, 11008],
                [1, 32000, 4096],
                [1, 1024, 4096],
                [512, 14336, 4096],
                [4096, 14336, 4096],
            ] {
                add(1, [m, n, k], LINEAR, Bf16, false)?;
            }
            add(1, [64, 64, 65536], ROWS, Bf16, false)?;
            add(64, [512, 512, 128], ROWS, Bf16, true)?;
        }
    }
    if suite == Suite::Documents {
        if scale == Scale::Gpu {
            for size in [4096, 8192] {
                cases.extend(squares_of_bytes(size)?);
            }
        }
        return Ok(cases);
    }
    if suite == Suite::All {
        let rows: &[u32] = match scale {
            Scale::Gpu => &[1, 8, 16, 512, 4096],
            Scale::Host => &[1],
        };
        let llama = shapes::named("llama-3-8b").context("no shapes of llama-3-8b")?;
        for linear in llama.linears(Fusion::Fused) {
            for m in rows {
                add(1, [*m, linear.n as u32, linear.k as u32], LINEAR, Bf16, false)?;
            }
        }
    }
    cases.extend(normed);
    cases.push(match scale {
        Scale::Gpu => grouped(8, [4096; 3], Bf16)?,
        Scale::Host => grouped(4, [512; 3], F32)?,
    });
    cases.extend(attentions(suite, scale)?);
    cases.extend(backwards(suite, scale)?);
    cases.extend(decodes(suite, scale)?);
    cases.extend(nf4s(suite, scale)?);
    cases.extend(int8s(suite, scale)?);
    cases.extend(norms(suite, scale)?);
    cases.extend(embeds(suite, scale)?);
    cases.extend(samples(suite, scale)?);
    cases.extend(ropes(suite, scale)?);
    Ok(cases)
}

fn backwards(suite: Suite, scale: Scale) -> anyhow::Result<Vec<Case>> {
    let mut cases = Vec::new();
    let mut add = |batch, heads, seq: u32, head_dim, dtype, causal| -> anyhow::Result<()> {
        let forward = AttentionProblem::dense(batch, heads, [seq; 2], head_dim, dtype)
            .context("a case of the suite is invalid")?;
        let forward = AttentionProblem { causal, lse: true, ..forward };
        let problem = BackwardProblem::of(forward).context("a case of the suite is invalid")?;
        cases.push(Case { problem: Problem::AttentionBackward(problem), peer: false });
        Ok(())
    };
    match scale {
        Scale::Host => {
            add(1, [4, 4], 256, 64, DType::F32, true)?;
            if suite != Suite::Quick {
                add(1, [8, 2], 256, 128, DType::F32, false)?;
            }
        }
        Scale::Gpu => {
            add(4, [16, 16], 4096, 128, DType::Bf16, false)?;
            add(4, [16, 16], 4096, 128, DType::Bf16, true)?;
            if suite != Suite::Quick {
                add(4, [16, 16], 2048, 64, DType::Bf16, true)?;
                add(4, [32, 8], 4096, 128, DType::Bf16, true)?;
                add(1, [32, 8], 16384, 128, DType::Bf16, true)?;
                add(4, [16, 16], 4096, 80, DType::Bf16, true)?;
                add(4, [16, 16], 2048, 256, DType::Bf16, true)?;
            }
        }
    }
    Ok(cases)
}

fn attentions(suite: Suite, scale: Scale) -> anyhow::Result<Vec<Case>> {
    let mut cases = Vec::new();
    let mut add = |batch, heads, seq: u32, head_dim, dtype, causal, peer| -> anyhow::Result<()> {
        let problem = AttentionProblem::dense(batch, heads, [seq; 2], head_dim, dtype)
            .context("a case of the suite is invalid")?;
        let problem = Problem::Attention(AttentionProblem { causal, ..problem });
        cases.push(Case { problem, peer });
        Ok(())
    };
    let (full, causal) = (false, true);
    match scale {
        Scale::Host => {
            add(1, [4, 4], 256, 64, DType::F32, full, true)?;
            add(1, [4, 4], 256, 64, DType::F32, causal, true)?;
            if suite != Suite::Quick {
                add(1, [8, 2], 512, 128, DType::F32, causal, false)?;
                add(1, [4, 4], 256, 64, DType::Bf16, causal, false)?;
            }
        }
        Scale::Gpu => {
            // Burn's attention tunes for minutes a shape: beside one of them, in the longer suites.
            let beside = suite != Suite::Quick;
            add(4, [16, 16], 4096, 128, DType::Bf16, full, beside)?;
            add(4, [16, 16], 4096, 128, DType::Bf16, causal, false)?;
            add(4, [16, 16], 2048, 64, DType::Bf16, causal, false)?;
            if suite != Suite::Quick {
                add(4, [16, 16], 4096, 128, DType::F16, full, false)?;
                add(4, [16, 16], 2048, 64, DType::Bf16, full, false)?;
                add(4, [32, 8], 4096, 128, DType::Bf16, causal, false)?;
                add(1, [32, 8], 512, 128, DType::Bf16, causal, false)?;
                add(1, [32, 8], 16384, 128, DType::Bf16, causal, false)?;
                add(4, [16, 16], 4096, 80, DType::Bf16, causal, false)?;
                add(4, [16, 16], 2048, 256, DType::Bf16, causal, false)?;
            }
        }
    }
    Ok(cases)
}

/// Steps of decoding with the heads of an 8B model.
fn decodes(suite: Suite, scale: Scale) -> anyhow::Result<Vec<Case>> {
    let mut cases = Vec::new();
    let mut add = |batch, seq_q, longest, pages: Option<u32>, dtype, cache| -> anyhow::Result<()> {
        let (heads, head_dim) = ([32, 8], 128);
        let problem = match pages {
            None => DecodeProblem::contiguous(batch, heads, seq_q, longest, head_dim, dtype),
            Some(size) => DecodeProblem::paged(batch, heads, seq_q, longest, head_dim, size, dtype),
        };
        let problem = problem.context("a case of the suite is invalid")?;
        let problem = Problem::Decode(DecodeProblem { cache, ..problem });
        cases.push(Case { problem, peer: false });
        Ok(())
    };
    let (bf16, bytes) = (DType::Bf16, DType::I8);
    match scale {
        Scale::Host => {
            add(1, 1, 1024, None, DType::F32, DType::F32)?;
            if suite != Suite::Quick {
                add(1, 1, 1024, Some(16), DType::F32, bytes)?;
            }
        }
        Scale::Gpu => {
            for batch in [1, 16] {
                add(batch, 1, 8192, None, bf16, bf16)?;
                add(batch, 1, 8192, None, bf16, bytes)?;
                if suite != Suite::Quick {
                    add(batch, 1, 8192, Some(16), bf16, bf16)?;
                    add(batch, 1, 8192, Some(256), bf16, bf16)?;
                    add(batch, 1, 8192, Some(16), bf16, bytes)?;
                    add(batch, 4, 8192, None, bf16, bf16)?;
                }
            }
            if suite != Suite::Quick {
                add(1, 1, 512, None, bf16, bf16)?;
                add(1, 1, 131_072, None, bf16, bf16)?;
                add(1, 16, 8192, None, bf16, bf16)?;
                add(64, 1, 1024, Some(16), bf16, bf16)?;
            }
        }
    }
    Ok(cases)
}

/// The same product of rows that it normalises.
fn of_norm(mut problem: Problem) -> Case {
    match &mut problem {
        Problem::Matmul(p) => p.norm = Some(NormKind::Rms),
        Problem::Nf4Matmul(p) => p.norm = Some(NormKind::Rms),
        _ => unreachable!("no other product normalises"),
    }
    Case { problem, peer: false }
}

/// Square products in bf16 with a weight in 4 bits, and with one in 8.
fn squares_of_bytes(size: u32) -> anyhow::Result<[Case; 2]> {
    let invalid = "a case of the suite is invalid";
    let four = Weight::new(size, size, 64, true).and_then(|weight| weight.ordered(Order::Tiles));
    let four = Nf4MatmulProblem::new(size, four.context(invalid)?, DType::Bf16).context(invalid)?;
    let eight = int8::Weight::new(size, size).context(invalid)?;
    let eight = Int8MatmulProblem::new(size, eight, DType::Bf16).context(invalid)?;
    let all = [Problem::Nf4Matmul(four), Problem::Int8Matmul(eight)];
    Ok(all.map(|problem| Case { problem, peer: false }))
}

/// Weights in 4 bits, blocks of 64 with nested absmax: linear layers of an 8B model.
fn nf4s(suite: Suite, scale: Scale) -> anyhow::Result<Vec<Case>> {
    let mut cases = Vec::new();
    let weight = |n, k| {
        let rows = Weight::new(n, k, 64, true).context("a case of the suite is invalid")?;
        rows.ordered(Order::Tiles).context("a case of the suite is invalid")
    };
    let mut product = |m, n, k, dtype| -> anyhow::Result<()> {
        let problem = Nf4MatmulProblem::new(m, weight(n, k)?, dtype);
        let problem = problem.context("a case of the suite is invalid")?;
        cases.push(Case { problem: Problem::Nf4Matmul(problem), peer: false });
        Ok(())
    };
    let gated = |m, n, k, dtype| -> anyhow::Result<Case> {
        let problem = Nf4MatmulProblem::new(m, weight(n, k)?, dtype)
            .and_then(Nf4MatmulProblem::gated_by_half)
            .context("a case of the suite is invalid")?;
        let silu = Epilogue { activation: Some(Activation::Silu), ..Epilogue::default() };
        let problem = Nf4MatmulProblem { epilogue: silu, ..problem };
        Ok(Case { problem: Problem::Nf4Matmul(problem), peer: false })
    };
    let (mut pairs, mut normed) = (Vec::new(), Vec::new());
    let dtype = match scale {
        Scale::Host => {
            product(1, 4096, 4096, DType::F32)?;
            if suite != Suite::Quick {
                product(8, 4096, 4096, DType::F32)?;
                product(64, 4096, 4096, DType::F32)?;
                pairs.push(gated(1, 8192, 4096, DType::F32)?);
            }
            DType::F32
        }
        Scale::Gpu => {
            let bf16 = DType::Bf16;
            for m in [1, 8, 16, 512] {
                product(m, 14336, 4096, bf16)?;
            }
            product(1, 4096, 4096, bf16)?;
            if suite != Suite::Quick {
                for m in [4, 32, 64, 128, 4096] {
                    product(m, 14336, 4096, bf16)?;
                }
                for m in [1, 8] {
                    product(m, 4096, 14336, bf16)?;
                    product(m, 11008, 4096, bf16)?;
                    product(m, 4096, 11008, bf16)?;
                    product(m, 1024, 4096, bf16)?;
                }
                product(1, 32000, 4096, bf16)?;
                // Queries, keys and values of grouped heads; gate and up.
                product(1, 6144, 4096, bf16)?;
                for m in [1, 8, 16, 512] {
                    pairs.push(gated(m, 28672, 4096, bf16)?);
                }
                for m in [1, 8] {
                    let plain = Nf4MatmulProblem::new(m, weight(6144, 4096)?, bf16);
                    let plain = plain.context("a case of the suite is invalid")?;
                    normed.push(of_norm(Problem::Nf4Matmul(plain)));
                    normed.push(of_norm(gated(m, 28672, 4096, bf16)?.problem));
                }
                product(8, 4096, 4096, bf16)?;
                product(1, 14336, 4096, DType::F16)?;
            }
            bf16
        }
    };
    cases.extend(pairs);
    cases.extend(normed);
    // The order of back ends that have no use for tiles.
    let (n, k) = if scale == Scale::Gpu { (14336, 4096) } else { (4096, 4096) };
    let in_rows = |m, n, k| -> anyhow::Result<Nf4MatmulProblem> {
        let weight = Weight { order: Order::Rows, ..weight(n, k)? };
        Nf4MatmulProblem::new(m, weight, dtype).context("a case of the suite is invalid")
    };
    let mut rows = vec![in_rows(1, n, k)?];
    if scale == Scale::Gpu && suite != Suite::Quick {
        for m in [2, 4, 8, 16, 32, 64, 128, 256] {
            rows.push(in_rows(m, n, k)?);
        }
        for (n, k) in [(4096, 14336), (4096, 4096), (6144, 4096)] {
            rows.push(in_rows(16, n, k)?);
        }
        for m in [4, 16] {
            let gated = in_rows(m, 28672, k)?.gated_by_half();
            rows.push(gated.context("a case of the suite is invalid")?);
        }
    }
    cases.extend(rows.into_iter().map(|p| Case { problem: Problem::Nf4Matmul(p), peer: false }));
    let (n, k) = if scale == Scale::Gpu { (14336, 4096) } else { (4096, 1024) };
    for order in [Order::Rows, Order::Tiles] {
        let weight = Weight { order, ..weight(n, k)? };
        let problem = DequantizeProblem { weight, out: dtype };
        cases.push(Case { problem: Problem::Nf4Dequantize(problem), peer: false });
    }
    let weight = Weight::new(n, k, 64, false).context("a case of the suite is invalid")?;
    let problem = QuantizeProblem { weight, dtype, book: CodeBook::Nf4 };
    cases.push(Case { problem: Problem::Nf4Quantize(problem), peer: false });
    Ok(cases)
}

/// Weights in 8 bits: linear layers of an 8B model.
fn int8s(suite: Suite, scale: Scale) -> anyhow::Result<Vec<Case>> {
    let weight = |n, k| int8::Weight::new(n, k).context("a case of the suite is invalid");
    let ((n, k), dtype) = match scale {
        Scale::Gpu => ((14336, 4096), DType::Bf16),
        Scale::Host => ((4096, 4096), DType::F32),
    };
    let mut sizes = vec![(1, n, k)];
    if suite != Suite::Quick {
        sizes.push((8, n, k));
        if scale == Scale::Gpu {
            sizes.extend([(4, n, k), (16, n, k), (64, n, k), (512, n, k), (4096, n, k)]);
            sizes.extend([(1, 4096, 4096), (1, 4096, 14336), (1, 6144, 4096), (1, 32000, 4096)]);
        }
    }
    let mut cases = Vec::new();
    let mut push = |(m, n, k), activations| -> anyhow::Result<()> {
        let plain = Int8MatmulProblem::new(m, weight(n, k)?, dtype);
        let plain = plain.context("a case of the suite is invalid")?;
        let problem = Problem::Int8Matmul(Int8MatmulProblem { activations, ..plain });
        cases.push(Case { problem, peer: false });
        Ok(())
    };
    for sizes in sizes {
        push(sizes, None)?;
    }
    if let (Suite::All | Suite::Kernels, Scale::Gpu) = (suite, scale) {
        // x in 8 bits, but for the columns that bitsandbytes leaves as they are.
        let activations = Some(int8::Activations { threshold: 6.0 });
        for m in [8, 16, 64, 512, 4096] {
            push((m, n, k), activations)?;
        }
    }
    if suite != Suite::Quick {
        let weight = weight(n, k)?;
        let dequantize = int8::DequantizeProblem { weight, out: dtype };
        let quantize = int8::QuantizeProblem { weight, dtype };
        for problem in [Problem::Int8Dequantize(dequantize), Problem::Int8Quantize(quantize)] {
            cases.push(Case { problem, peer: false });
        }
    }
    Ok(cases)
}

/// Norms of an 8B model's rows: steps of decoding and a prompt.
fn norms(suite: Suite, scale: Scale) -> anyhow::Result<Vec<Case>> {
    let mut cases = Vec::new();
    let mut add = |rows, kind, dtype, residual| -> anyhow::Result<()> {
        let problem = NormProblem::new(rows, 4096, dtype, kind, 1e-5)
            .context("a case of the suite is invalid")?;
        let problem = Problem::Norm(NormProblem { residual, ..problem });
        cases.push(Case { problem, peer: false });
        Ok(())
    };
    match (scale, suite) {
        (_, Suite::Quick) => {}
        (Scale::Host, _) => {
            for rows in [1, 512] {
                add(rows, NormKind::Rms, DType::F32, false)?;
            }
        }
        (Scale::Gpu, _) => {
            for rows in [1, 16, 512] {
                add(rows, NormKind::Rms, DType::Bf16, false)?;
            }
            // What Gemma does after a product, and a layer norm.
            for rows in [1, 512] {
                add(rows, NormKind::RmsPlusOne, DType::Bf16, true)?;
                add(rows, NormKind::Layer, DType::Bf16, false)?;
            }
        }
    }
    Ok(cases)
}

/// Heads of an 8B model between their projection and attention: steps of decoding and a prompt.
fn ropes(suite: Suite, scale: Scale) -> anyhow::Result<Vec<Case>> {
    let mut cases = Vec::new();
    let mut add = |tokens, capacity, dtype, norm: Option<NormKind>| -> anyhow::Result<()> {
        let problem = RopeProblem::new(tokens, [32, 8], 128, capacity, dtype)
            .context("a case of the suite is invalid")?;
        let qk_norm = norm.map(|kind| HeadNorm { kind, eps: 1e-6 });
        let problem = Problem::Rope(RopeProblem { qk_norm, ..problem });
        cases.push(Case { problem, peer: false });
        Ok(())
    };
    match (scale, suite) {
        (_, Suite::Quick) => {}
        (Scale::Host, _) => {
            for tokens in [[1, 1], [1, 512]] {
                add(tokens, 1024, DType::F32, None)?;
            }
        }
        (Scale::Gpu, _) => {
            for tokens in [[1, 1], [16, 1], [1, 512]] {
                add(tokens, 2048, DType::Bf16, None)?;
                add(tokens, 2048, DType::Bf16, Some(NormKind::Rms))?;
            }
            // Pages of 64 positions, as a batch of one prompt has them.
            let whole = RopeProblem::new([16, 1], [32, 8], 128, 2048, DType::Bf16);
            let whole = whole.context("a case of the suite is invalid")?;
            let cache = KvLayout::paged(8, [16 * 32, 64], 32, 128, DType::Bf16);
            let bytes = KvLayout { dtype: DType::I8, ..whole.cache };
            for cache in [cache, bytes] {
                let problem = Problem::Rope(RopeProblem { cache, ..whole });
                cases.push(Case { problem, peer: false });
            }
        }
    }
    Ok(cases)
}

/// Rows of logits of an 8B model, each fourth for the likeliest token.
fn samples(suite: Suite, scale: Scale) -> anyhow::Result<Vec<Case>> {
    let sizes: &[[u32; 2]] = match (scale, suite) {
        (_, Suite::Quick) => &[],
        (Scale::Host, _) => &[[4, 32_000]],
        (Scale::Gpu, _) => &[[1, 128_256], [16, 128_256], [4, 50_257]],
    };
    let case = |[rows, vocab]: &[u32; 2]| {
        let problem =
            SampleProblem::new(*rows, *vocab).context("a case of the suite is invalid")?;
        Ok(Case { problem: Problem::Sample(problem), peer: false })
    };
    sizes.iter().map(case).collect()
}

/// Tokens of an 8B model: steps of decoding and a prompt.
fn embeds(suite: Suite, scale: Scale) -> anyhow::Result<Vec<Case>> {
    let mut cases = Vec::new();
    let mut add = |tokens, vocab, dtype| -> anyhow::Result<()> {
        let problem = EmbedProblem::new(tokens, [vocab, 4096], dtype)
            .context("a case of the suite is invalid")?;
        cases.push(Case { problem: Problem::Embed(problem), peer: false });
        Ok(())
    };
    match (scale, suite) {
        (_, Suite::Quick) => {}
        (Scale::Host, _) => add([1, 512], 4096, DType::F32)?,
        (Scale::Gpu, _) => {
            // A table of 64 MiB, so that several fit beside one another.
            for tokens in [[1, 1], [16, 1], [1, 512]] {
                add(tokens, 8192, DType::Bf16)?;
            }
        }
    }
    Ok(cases)
}

/// The names of a suite's cases, those for a GPU, those for a CPU and the ceilings, in order.
fn names(suite: Suite) -> anyhow::Result<Vec<String>> {
    let (gpu, host) = (all(suite, Scale::Gpu)?, all(suite, Scale::Host)?);
    let mut names: Vec<_> = gpu.iter().chain(&host).map(Case::name).collect();
    names.extend(crate::run::CEILINGS.map(str::to_owned));
    // Wherever its folder is.
    let models = crate::model_cases::select(suite, Scale::Gpu, None, Some(Path::new("demo")));
    names.extend(models.iter().map(ModelCase::name));
    names.sort();
    names.dedup();
    Ok(names)
}

/// Prints the names of a suite's cases.
pub(crate) fn list(suite: Suite, filter: Option<&str>) -> anyhow::Result<bool> {
    if let Some(filter) = filter {
        check_filter(suite, filter)?;
    }
    let shown = names(suite)?.into_iter().filter(|n| filter.is_none_or(|f| n.contains(f)));
    command::print(&shown.map(|name| name + "\n").collect::<String>())?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_for_gpus_selects_nothing_on_a_cpu_and_is_no_mistake() {
        let select = |scale, filter| select(Suite::Quick, scale, Some(filter)).map(|c| c.len());
        assert!(matches!(select(Scale::Gpu, "14336x4096"), Ok(1..)));
        assert!(matches!(select(Scale::Host, "14336x4096"), Ok(0)));
        assert!(matches!(select(Scale::Host, "copy"), Ok(0)), "a ceiling");
        let error = select(Scale::Host, "conv").expect_err("there is none").to_string();
        assert!(error.contains("\nhint: names look like `"), "{error}");
    }
}
