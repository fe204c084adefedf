//! Every config of every kernel, every code path around it, and what the shipped cache chose, on every target.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;

use arch::{ArchProfile, DType};
use cubecl::prelude::CubeKernel;
use kernels::attention::backward::{AttentionBackward, BackwardProblem};
use kernels::attention::decode::{CacheLayout, CacheStrides, Decode, DecodeProblem};
use kernels::attention::{Attention, AttentionProblem, ScoreStrides};
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
use rayon::prelude::*;
use serde::Serialize;
use serde_json::Value;
use tune::{Kernel, TuneCache};

use crate::Known;
use crate::compile::{Toolkit, Usage, properties, target_properties};
use crate::occupancy::{Limits, occupancy};

/// Recorded profiles that stand for the architectures.
pub const TARGETS: [&str; 3] = ["rtx4090", "h200", "rtx5090"];
/// What an RTX card gives one cube.
const RTX_SHARED: u32 = 99 << 10;

/// One kernel instance on one target.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    pub kernel: &'static str,
    pub target: &'static str,
    pub sm: u32,
    /// `bf16 row.col 4096x4096x4096`: what is computed.
    pub instance: String,
    pub config: Value,
    pub usage: Usage,
    /// Cubes on one processor.
    pub occupancy: u32,
    /// Whether the shipped cache chose it, under the profile of an RTX card.
    pub tuned: bool,
}

/// What is wrong with an instance.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    pub target: &'static str,
    pub instance: String,
    pub config: Value,
    pub what: String,
}

/// Compiles, for every target, the instances whose `target kernel instance config` text contains `filter`; both
/// lists are in a fixed order. With `tuned`, what the shipped cache chose is among them. What is `known` is not
/// compiled again. With `dump`, sources and binaries are kept in that folder, numbered in the order of the list.
/// `progress` is told how many of how many are compiled: from 0 on, in order, each once.
///
/// # Errors
/// A target profile that is not recorded.
pub fn sweep(
    toolkit: &Toolkit,
    filter: Option<&str>,
    tuned: bool,
    dump: Option<&Path>,
    known: &Known,
    progress: impl Fn(usize, usize) + Sync,
) -> Result<(Vec<Row>, Vec<Finding>), arch::UnknownProfile> {
    let mut work = Vec::new();
    for target in TARGETS {
        let arch = ArchProfile::recorded(target)?;
        for instance in instances(&arch).into_iter().filter(|of| tuned || of.swept) {
            let text =
                format!("{target} {} {} {}", instance.kernel, instance.name, instance.config);
            if filter.is_none_or(|f| text.contains(f)) {
                work.push((work.len(), target, arch.clone(), instance));
            }
        }
    }
    let total = work.len();
    progress(0, total);
    let done = Mutex::new(0);
    let results: Vec<_> = work
        .into_par_iter()
        .map(|(index, target, arch, instance)| {
            let stem = dump.map(|d| d.join(format!("{index:03}-{target}")));
            let sm = arch.compute_capability.unwrap_or(0);
            let outcome = toolkit.usage(instance.program.as_ref(), sm, stem.as_deref(), known);
            let mut done = done.lock().expect("no holder panics");
            *done += 1;
            progress(*done, total);
            drop(done);
            (target, sm, instance, outcome)
        })
        .collect();
    let (mut rows, mut findings) = (Vec::new(), Vec::new());
    for (target, sm, of, outcome) in results {
        let (instance, config) = (of.name, of.config);
        let mut find = |what: String| {
            let (instance, config) = (instance.clone(), config.clone());
            findings.push(Finding { target, instance, config, what });
        };
        match outcome {
            Err(e) => find(e.to_string()),
            Ok(usage) => {
                let occupancy = Limits::of(sm)
                    .map_or(0, |l| occupancy(l, usage.units, usage.registers, usage.shared));
                faults(target, of.clean, &usage, occupancy).into_iter().for_each(find);
                let (kernel, tuned) = (of.kernel, of.tuned);
                rows.push(Row { kernel, target, sm, instance, config, usage, occupancy, tuned });
            }
        }
    }
    Ok((rows, findings))
}

/// What is wrong with an instance that compiles; a `clean` one must not spill on an RTX card. Elsewhere a
/// spill is a column of the table: the tuner decides by time.
fn faults(target: &str, clean: bool, usage: &Usage, occupancy: u32) -> Vec<String> {
    let rtx = target.starts_with("rtx");
    let mut faults = Vec::new();
    if rtx && clean && usage.spilled() > 0 {
        faults.push(format!("spills {} bytes", usage.spilled()));
    }
    if rtx && usage.shared > RTX_SHARED {
        faults.push(format!("{} bytes of shared memory, over 99 KiB", usage.shared));
    }
    if occupancy == 0 {
        faults.push("does not fit one processor".to_owned());
    }
    faults
}

/// One program to compile.
struct Instance {
    kernel: &'static str,
    name: String,
    config: Value,
    program: Box<dyn CubeKernel>,
    /// Whether it must not spill on an RTX card.
    clean: bool,
    /// Whether it is of the problems below, and whether the shipped cache chose it.
    swept: bool,
    tuned: bool,
}

/// What is compiled for `arch`, each program once.
fn instances(arch: &ArchProfile) -> Vec<Instance> {
    let mut all = instances_of::<Matmul>(arch, matmuls(), matmul_name);
    all.extend(instances_of::<Attention>(arch, attentions(), attention_name));
    all.extend(instances_of::<AttentionBackward>(arch, backwards(), |p| {
        attention_name(&p.forward)
    }));
    all.extend(instances_of::<Decode>(arch, decodes(), decode_name));
    all.extend(instances_of::<Nf4Dequantize>(arch, dequantizes(), |p| {
        format!("{} {}", p.out, weight_name(&p.weight))
    }));
    all.extend(instances_of::<Nf4Quantize>(arch, quantizes(), |p| {
        format!("{} {} b{}", p.book.name(), p.dtype, p.weight.block_size)
    }));
    all.extend(instances_of::<Nf4Matmul>(arch, nf4s(), |p| {
        let mut name = format!("{} m{} {}", p.dtype, p.m, weight_name(&p.weight));
        p.epilogue.names().into_iter().for_each(|part| name += &format!(" {part}"));
        if p.glu {
            name += " glu";
        }
        if let Some(norm) = p.norm {
            name += &format!(" norm {}", norm.name());
        }
        name
    }));
    all.extend(instances_of::<Int8Dequantize>(arch, int8_dequantizes(), |p| {
        format!("{} k{}", p.out, p.weight.k)
    }));
    all.extend(instances_of::<Int8Quantize>(arch, int8_quantizes(), |p| {
        format!("{} k{}", p.dtype, p.weight.k)
    }));
    all.extend(instances_of::<Int8Matmul>(arch, int8s(), |p| {
        let mut name = format!("{} m{} k{}", p.dtype, p.m, p.weight.k);
        p.epilogue.names().into_iter().for_each(|part| name += &format!(" {part}"));
        if let Some(int8::Activations { threshold }) = p.activations {
            name += if threshold > 0.0 { " x8 outliers" } else { " x8" };
        }
        name
    }));
    all.extend(instances_of::<Norm>(arch, norms(), |p| {
        format!("{} {} {}", p.dtype, p.width, p.names().join(" "))
    }));
    all.extend(instances_of::<Embed>(arch, embeds(), |p| {
        let learned = if p.positions.is_some() { " learned" } else { "" };
        format!("{} {}{learned}", p.dtype, p.hidden)
    }));
    all.extend(instances_of::<Rope>(arch, ropes(), |p| {
        let norm = p.qk_norm.map_or("", |norm| norm.kind.name());
        let pages = if p.pages_len() > 0 { " pages" } else { "" };
        let bytes = if p.cache.quantized() { " i8" } else { "" };
        let of = format!("{}{bytes} d{} rope{}{pages} {norm}", p.dtype, p.head_dim, p.dim);
        of.trim_end().to_owned()
    }));
    all.extend(instances_of::<Sample>(arch, samples(), |p| format!("vocab {}", p.vocab)));
    all
}

fn instances_of<K: Kernel>(
    arch: &ArchProfile,
    cases: Vec<Case<K>>,
    name: fn(&K::Problem) -> String,
) -> Vec<Instance> {
    let (properties, target) = (properties(arch), target_properties());
    // By the identity of a program, which has no order; the list keeps that of the cases.
    let mut places = HashMap::new();
    let mut instances: Vec<Instance> = Vec::new();
    // Whether one of the problems below must be clean; none for what is tuned, which must.
    let mut add = |problem: &K::Problem, config: K::Config, clean: Option<bool>| {
        let (swept, tuned, clean) = (clean.is_some(), clean.is_none(), clean.unwrap_or(true));
        let programs = K::programs(arch, problem, &config, &properties, &target);
        for (launch, program) in programs.into_iter().enumerate() {
            let place = *places.entry(program.id()).or_insert(instances.len());
            match instances.get_mut(place) {
                Some(same) => {
                    same.clean |= clean;
                    same.swept |= swept;
                    same.tuned |= tuned;
                }
                None => instances.push(Instance {
                    kernel: K::NAME,
                    name: match launch {
                        0 => name(problem),
                        later => format!("{} launch {}", name(problem), later + 1),
                    },
                    config: serde_json::to_value(config).expect("a config is plain data"),
                    program,
                    clean,
                    swept,
                    tuned,
                }),
            }
        }
    };
    for Case { problem, most, clean } in cases {
        let candidates = K::candidates(arch, &problem).into_iter().take(most);
        candidates.enumerate().for_each(|(i, config)| add(&problem, config, Some(i < clean)));
    }
    for (problem, config) in tuned::<K>(arch) {
        add(&problem, config, None);
    }
    instances
}

/// What the shipped cache chose under the profile of an RTX card, measured on another, of what that card's own tuner would
/// measure.
fn tuned<K: Kernel>(arch: &ArchProfile) -> Vec<(K::Problem, K::Config)> {
    if arch.max_shared_bytes > RTX_SHARED {
        return Vec::new();
    }
    let cache = TuneCache::shipped();
    let of_kernel = cache.entries().map(|(entry, _)| entry).filter(|entry| {
        let key = &entry.key;
        key.kernel == K::NAME && key.version == K::VERSION && key.arch_id.0.contains("@rtx")
    });
    of_kernel
        .map(|entry| {
            let problem = serde_json::from_value(entry.problem.clone());
            let config = serde_json::from_value(entry.config.clone());
            (problem.expect("a problem of the kernel"), config.expect("a config of the kernel"))
        })
        .filter(|(problem, config)| K::candidates(arch, problem).contains(config))
        .collect()
}

/// A problem, how many of its candidates are compiled, and how many of those must not spill on an RTX
/// card.
struct Case<K: Kernel> {
    problem: K::Problem,
    most: usize,
    clean: usize,
}

/// Problems whose code differs. Every candidate of whole tiles, and of few rows, where the tiles
/// themselves differ; the first few, of which one is what runs unmeasured, where the code around the
/// tiles does.
fn matmuls() -> Vec<Case<Matmul>> {
    use Precision::{Bf16, F16, F16Acc16, F32, Tf32};
    let (row, col) = (Layout::Row, Layout::Col);
    let dense = |sizes, layouts, precision| {
        MatmulProblem::dense(1, sizes, layouts, precision).expect("sizes below are positive")
    };
    let none = Epilogue::default();
    let everything =
        Epilogue { bias: true, activation: Some(Activation::Gelu), gate: true, residual: true };
    let whole = |layouts, precision| {
        let problem = dense([4096; 3], layouts, precision);
        Case { problem, most: usize::MAX, clean: usize::MAX }
    };
    // Whole vectors, but no whole tiles.
    let ragged = |layouts, precision, most| Case {
        problem: dense([4088, 4072, 4104], layouts, precision),
        most,
        clean: 1,
    };
    // Not even vectors: elements are copied one by one, and on sm_89 and sm_120 some configs spill up to
    // 148 bytes over it.
    let odd = |layouts, precision| Case {
        problem: dense([4095, 4093, 4091], layouts, precision),
        most: 2,
        clean: 0,
    };
    let mut cases = vec![
        whole([row, col], Bf16),
        whole([row, row], Bf16),
        whole([col, row], Bf16),
        whole([row, col], Tf32),
        whole([col, row], Tf32),
        whole([row, col], F32),
        whole([row, row], F32),
        whole([row, col], F16Acc16),
        whole([row, row], F16Acc16),
        // f16 differs from bf16 in one letter of an instruction.
        Case { most: 1, ..whole([row, col], F16) },
    ];
    // Few rows: flat tiles, and k in parts.
    for m in [1, 8, 64] {
        for [n, k] in [[14336, 4096], [4096, 14336]] {
            let problem = dense([m, n, k], [row, col], Bf16);
            cases.push(Case { problem, most: usize::MAX, clean: 1 });
        }
    }
    for (m, kind) in [(1, NormKind::Rms), (2, NormKind::RmsPlusOne)] {
        let problem = dense([m, 14336, 4096], [row, col], Bf16);
        let problem = MatmulProblem { norm: Some(kind), ..problem };
        cases.push(Case { problem, most: usize::MAX, clean: 1 });
    }
    let thin = dense([8, 4096, 14336], [row, col], Bf16);
    let thin = MatmulProblem { epilogue: everything, ..thin };
    cases.push(Case { problem: thin, most: 2, clean: 1 });
    cases.extend([ragged([row, col], Bf16, 5), ragged([row, col], F32, 2), odd([col, row], Tf32)]);
    // What layers have, and all of it at once.
    let (gelu, silu) = (Some(Activation::Gelu), Some(Activation::Silu));
    for epilogue in [
        Epilogue { bias: true, activation: gelu, ..none },
        Epilogue { gate: true, activation: silu, ..none },
        Epilogue { bias: true, residual: true, ..none },
        everything,
    ] {
        let Case { problem, .. } = whole([row, col], Bf16);
        let problem = MatmulProblem { epilogue, ..problem };
        cases.push(Case { problem, most: 1, clean: 1 });
    }
    for Case { problem, most, clean } in [odd([row, row], Bf16), odd([row, row], F32)] {
        let epilogue = everything;
        cases.push(Case { problem: MatmulProblem { epilogue, ..problem }, most, clean });
    }
    // Groups: where a block begins is looked up, and no tile is known to be full.
    for (precision, epilogue) in
        [(Bf16, none), (Bf16, everything), (F16Acc16, none), (Tf32, none), (F32, none)]
    {
        let grouped = MatmulProblem::grouped(8, [4096; 3], col, precision).expect("positive sizes");
        let problem = MatmulProblem { epilogue, ..grouped };
        cases.push(Case { problem, most: 2, clean: 1 });
    }
    cases
}

/// `bf16 row.col 4096x4096x4096 bias`.
fn matmul_name(p: &MatmulProblem) -> String {
    let (lhs, rhs) = (p.lhs.layout.name(), p.rhs.layout.name());
    let mut name = format!("{} {lhs}.{rhs} {}x{}x{}", p.precision.name(), p.m, p.n, p.k);
    if p.grouped {
        name += &format!(" groups={}", p.batch());
    }
    p.epilogue.names().into_iter().for_each(|part| name += &format!(" {part}"));
    if let Some(norm) = p.norm {
        name += &format!(" norm {}", norm.name());
    }
    name
}

/// Attentions whose code differs: every head dimension, tiles that are whole and that are not, and each
/// rule that scores are changed by.
fn attentions() -> Vec<Case<Attention>> {
    let dense = |seq, head_dim| {
        AttentionProblem::dense(4, [16, 4], [seq; 2], head_dim, DType::Bf16).expect("valid sizes")
    };
    let case = |problem, most| Case { problem, most, clean: 1 };
    let mut cases = vec![case(dense(4096, 128), 4)];
    for head_dim in [32, 64, 80, 96, 128, 192, 256] {
        cases.push(case(AttentionProblem { causal: true, lse: true, ..dense(4001, head_dim) }, 2));
    }
    let p = dense(4001, 128);
    let scores = ScoreStrides { batch: 0, head: 0, row: 4001, col: 1 };
    cases.push(case(AttentionProblem { window: Some(512), softcap: Some(50.0), ..p }, 1));
    cases.push(case(AttentionProblem { bias: Some(scores), mask: Some(scores), ..p }, 1));
    cases.push(case(AttentionProblem { causal: true, varlen: true, ..p }, 1));
    cases
}

/// Backward passes whose code differs.
fn backwards() -> Vec<Case<AttentionBackward>> {
    let case = |seq, head_dim, most, of: &dyn Fn(AttentionProblem) -> AttentionProblem| {
        let p = AttentionProblem::dense(4, [16, 4], [seq; 2], head_dim, DType::Bf16);
        let p = of(AttentionProblem { lse: true, ..p.expect("valid sizes") });
        Case { problem: BackwardProblem::of(p).expect("valid"), most, clean: 1 }
    };
    let mut cases = vec![case(4096, 128, usize::MAX, &|p| p)];
    for head_dim in [64, 80, 96, 128] {
        cases.push(case(4001, head_dim, 3, &|p| AttentionProblem { causal: true, ..p }));
    }
    for head_dim in [32, 192, 256] {
        cases.push(case(4001, head_dim, 3, &|p| AttentionProblem { causal: true, ..p }));
    }
    let scores = ScoreStrides { batch: 0, head: 0, row: 4001, col: 1 };
    let some = Some(scores);
    cases.push(case(4001, 128, 1, &|p| AttentionProblem {
        window: Some(512),
        softcap: Some(50.0),
        ..p
    }));
    cases.push(case(4001, 128, 1, &|p| AttentionProblem { bias: some, mask: some, ..p }));
    cases.push(case(4001, 128, 1, &|p| AttentionProblem { causal: true, varlen: true, ..p }));
    cases
}

/// `bf16 d128 4096x4096 causal`.
fn attention_name(p: &AttentionProblem) -> String {
    let mut name = format!("{} d{} {}x{}", p.dtype, p.head_dim, p.seq_q, p.seq_kv);
    p.rules().into_iter().for_each(|rule| name += &format!(" {rule}"));
    name
}

/// Steps of decoding whose code differs: every head dimension, what caches hold and how, queries that fill
/// one fragment and several, and each rule.
fn decodes() -> Vec<Case<Decode>> {
    let full = |heads, seq_q, head_dim| {
        DecodeProblem::contiguous(1, heads, seq_q, 8192, head_dim, DType::Bf16)
            .expect("valid sizes")
    };
    let case = |problem, most| Case { problem, most, clean: 1 };
    let mut cases = Vec::new();
    for head_dim in [32, 64, 80, 96, 128, 192, 256] {
        for (heads, seq_q) in [([32, 8], 1), ([32, 8], 4), ([32, 4], 16)] {
            let p = full(heads, seq_q, head_dim);
            let most = if head_dim == 128 && seq_q == 1 { usize::MAX } else { 1 };
            cases.push(case(p, most));
            cases.push(case(DecodeProblem { cache: DType::I8, ..p }, most));
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
    cases.push(case(DecodeProblem { window: Some(512), softcap: Some(50.0), lse: true, ..p }, 2));
    // f16 differs from bf16 in one letter of an instruction, but for bytes.
    let half = DecodeProblem { dtype: DType::F16, cache: DType::F16, ..p };
    cases.push(case(half, 1));
    cases.push(case(DecodeProblem { cache: DType::I8, ..half }, 2));
    // Every sequence in one part.
    cases.push(case(DecodeProblem { batch: 256, ..p }, 1));
    cases
}

/// `bf16 i8 d128 g4 q1 kv8192`.
fn decode_name(p: &DecodeProblem) -> String {
    let mut name = format!("{} {} d{}", p.dtype, p.cache, p.head_dim);
    name += &format!(" g{} q{} kv{}", p.group(), p.seq_q, p.longest);
    if let CacheLayout::Paged { block_size, .. } = p.layout {
        name += &format!(" pages{block_size}");
    }
    p.rules().into_iter().for_each(|rule| name += &format!(" {rule}"));
    name
}

/// Weights whose decoding differs: the order of their codes, what their absmax is.
fn weights() -> Vec<Weight> {
    let mut weights = Vec::new();
    for order in [Order::Tiles, Order::Rows] {
        for nested in [true, false] {
            let rows = Weight::new(4096, 4096, 64, nested).expect("valid sizes");
            weights.push(rows.ordered(order).expect("whole tiles"));
        }
    }
    weights
}

fn dequantizes() -> Vec<Case<Nf4Dequantize>> {
    let problems =
        weights().into_iter().map(|weight| DequantizeProblem { weight, out: DType::Bf16 });
    problems.map(|problem| Case { problem, most: 2, clean: 2 }).collect()
}

fn quantizes() -> Vec<Case<Nf4Quantize>> {
    let case = |book, block_size| {
        let weight = Weight::new(4096, 4096, block_size, false).expect("valid sizes");
        let problem = QuantizeProblem { weight, dtype: DType::Bf16, book };
        Case { problem, most: 2, clean: 2 }
    };
    vec![case(CodeBook::Nf4, 64), case(CodeBook::Nf4, 4096), case(CodeBook::Fp4, 64)]
}

/// Products whose code differs: rows of x in one fragment and in two, k in parts, the plain path.
fn nf4s() -> Vec<Case<Nf4Matmul>> {
    let product =
        |m, weight| Nf4MatmulProblem::new(m, weight, DType::Bf16).expect("there are rows");
    let all =
        Epilogue { bias: true, activation: Some(Activation::Gelu), gate: true, residual: true };
    let mut cases = Vec::new();
    for weight in weights() {
        // In tiles those that stream; the plain path is the same code for both orders but for its loads.
        let most = if weight.order == Order::Tiles { 4 } else { 7 };
        for m in [1, 16] {
            cases.push(Case { problem: product(m, weight), most, clean: 1 });
        }
        for m in [1, 512] {
            let problem = Nf4MatmulProblem { epilogue: all, ..product(m, weight) };
            cases.push(Case { problem, most: 1, clean: 1 });
        }
    }
    let weight = Weight { k: 14336, ..weights()[0] };
    cases.push(Case { problem: product(8, weight), most: 4, clean: 1 });
    for m in [64, 500] {
        cases.push(Case { problem: product(m, weights()[0]), most: 6, clean: 1 });
    }
    let half = Nf4MatmulProblem { dtype: DType::F16, ..product(1, weights()[0]) };
    cases.push(Case { problem: half, most: 1, clean: 1 });
    // Two matrices that gate one another.
    let silu = Epilogue { activation: Some(Activation::Silu), ..Epilogue::default() };
    for (m, weight, most) in [(1, weights()[0], 2), (1, weight, 1), (16, weights()[0], 2)]
        .into_iter()
        .chain([(64, weights()[0], 4), (1, weights()[2], 2)])
    {
        let gated = product(m, weight).gated_by_half().expect("halves are whole");
        let problem = Nf4MatmulProblem { epilogue: silu, ..gated };
        cases.push(Case { problem, most, clean: 1 });
        let problem = Nf4MatmulProblem { norm: Some(NormKind::Rms), ..problem };
        cases.push(Case { problem, most, clean: 1 });
    }
    for (m, weight) in [(1, weights()[0]), (8, weights()[0]), (1, weights()[2])] {
        let norm = Some(NormKind::RmsPlusOne);
        let problem = Nf4MatmulProblem { norm, ..product(m, weight) };
        cases.push(Case { problem, most: 2, clean: 1 });
    }
    cases
}

/// Rows that words divide, and that they straddle.
fn int8_weights() -> [int8::Weight; 2] {
    [4096, 41].map(|k| int8::Weight::new(4096, k).expect("valid sizes"))
}

fn int8_dequantizes() -> Vec<Case<Int8Dequantize>> {
    let problem = |weight| int8::DequantizeProblem { weight, out: DType::Bf16 };
    int8_weights().map(|w| Case { problem: problem(w), most: 2, clean: 2 }).into()
}

fn int8_quantizes() -> Vec<Case<Int8Quantize>> {
    let problem = |weight| int8::QuantizeProblem { weight, dtype: DType::Bf16 };
    int8_weights().map(|w| Case { problem: problem(w), most: 2, clean: 2 }).into()
}

/// Every shape of the plain path, for one, two and many rows of x, and of those on tensor cores; what the dense path
/// adds is matmul's.
fn int8s() -> Vec<Case<Int8Matmul>> {
    let all =
        Epilogue { bias: true, activation: Some(Activation::Gelu), gate: true, residual: true };
    let mut cases = Vec::new();
    for weight in int8_weights() {
        for m in [1, 2, 8] {
            let plain = Int8MatmulProblem::new(m, weight, DType::Bf16).expect("there are rows");
            cases.push(Case { problem: plain, most: 20, clean: 20 });
            let problem = Int8MatmulProblem { epilogue: all, ..plain };
            cases.push(Case { problem, most: 1, clean: 1 });
        }
    }
    // Codes as halves, of tiles that many rows fill.
    for (m, dtype) in [(64, DType::F16), (64, DType::Bf16), (512, DType::Bf16)] {
        let weight = int8::Weight::new(4096, 4096).expect("valid sizes");
        let plain = Int8MatmulProblem::new(m, weight, dtype).expect("there are rows");
        cases.push(Case { problem: plain, most: 8, clean: 8 });
    }
    // x in bytes, with and without columns that stay as they are.
    for (m, threshold) in [(16, 6.0), (512, 0.0), (512, 6.0)] {
        let weight = int8::Weight::new(4096, 4096).expect("valid sizes");
        let plain = Int8MatmulProblem::new(m, weight, DType::Bf16).expect("there are rows");
        let activations = Some(int8::Activations { threshold });
        cases.push(Case { problem: Int8MatmulProblem { activations, ..plain }, most: 6, clean: 6 });
    }
    cases
}

/// Norms whose code differs: each kind with and without what is added, rows that units hold and that they read
/// again, whole vectors and none.
fn norms() -> Vec<Case<Norm>> {
    let norm = |width, dtype, kind| {
        NormProblem::new(16, width, dtype, kind, 1e-5).expect("sizes below are positive")
    };
    let case = |problem, most| Case { problem, most, clean: usize::MAX };
    let mut cases = Vec::new();
    for kind in NormKind::ALL {
        let plain = norm(4096, DType::Bf16, kind);
        cases.push(case(plain, usize::MAX));
        cases.push(case(NormProblem { bias: true, residual: true, ..plain }, usize::MAX));
        cases.push(case(
            NormProblem { bias: true, residual: true, ..norm(4095, DType::F32, kind) },
            2,
        ));
    }
    cases.push(case(norm(4096, DType::F32, NormKind::Rms), 2));
    cases.push(case(norm(4096, DType::F16, NormKind::Rms), 1));
    cases.push(case(norm(100_000, DType::Bf16, NormKind::Layer), 2));
    cases.push(case(norm(128, DType::Bf16, NormKind::Rms), 2));
    cases
}

/// Heads whose code differs: every dimension, part of one that turns, each norm.
fn ropes() -> Vec<Case<Rope>> {
    let rope = |head_dim, dtype| {
        RopeProblem::new([16, 1], [32, 8], head_dim, 2048, dtype).expect("sizes are valid")
    };
    let case = |problem, most| Case { problem, most, clean: usize::MAX };
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

/// Embeddings whose code differs: with learned positions and without, whole vectors and none.
fn embeds() -> Vec<Case<Embed>> {
    let mut cases = Vec::new();
    for (hidden, dtype) in [(4096, DType::Bf16), (4095, DType::F16), (4096, DType::F32)] {
        let plain = EmbedProblem::new([16, 1], [8192, hidden], dtype).expect("sizes are valid");
        for positions in [None, Some(1024)] {
            let problem = EmbedProblem { positions, ..plain };
            cases.push(Case { problem, most: 2, clean: usize::MAX });
        }
    }
    cases
}

/// Vocabularies of whole vectors and of none.
fn samples() -> Vec<Case<Sample>> {
    let case = |vocab| {
        let problem = SampleProblem::new(16, vocab).expect("sizes are valid");
        Case { problem, most: 2, clean: 1 }
    };
    Vec::from([128_256, 50_257].map(case))
}

/// `4096x4096 b64 nested tiles`.
fn weight_name(w: &Weight) -> String {
    let nested = if w.nested { " nested" } else { "" };
    format!("{}x{} b{}{nested} {}", w.n, w.k, w.block_size, w.order.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spills_and_memory_are_faults_on_an_rtx_card() {
        let fits = Usage {
            registers: 64,
            spill_stores: 0,
            spill_loads: 0,
            stack: 0,
            shared: RTX_SHARED,
            units: 128,
        };
        let spills = Usage { spill_loads: 4, ..fits };
        let large = Usage { shared: RTX_SHARED + 1, ..fits };
        assert!(faults("rtx4090", true, &fits, 1).is_empty());
        assert_eq!(faults("rtx4090", true, &spills, 1), ["spills 4 bytes"]);
        assert!(faults("rtx4090", false, &spills, 1).is_empty(), "the tuner decides by time");
        assert_eq!(faults("rtx4090", false, &large, 1).len(), 1);
        assert!(faults("h200", true, &spills, 1).is_empty());
        assert!(faults("h200", true, &large, 1).is_empty());
        assert_eq!(faults("h200", true, &fits, 0), ["does not fit one processor"]);
    }

    #[test]
    fn every_code_path_is_compiled_for_every_target() {
        for target in TARGETS {
            let all = instances(&ArchProfile::recorded(target).expect("recorded"));
            let parts = [
                "f16acc16 ",
                " 4096x",
                " 4088x",
                " 4095x",
                " 1x",
                " 64x",
                " groups=",
                " gate",
                " d80",
                " causal",
            ];
            for part in parts {
                assert!(all.iter().any(|i| i.name.contains(part)), "{target}:{part}");
            }
            for part in [" i8 ", " pages16", " pages256", " q16"] {
                assert!(all.iter().any(|i| i.name.contains(part)), "{target}:{part}");
            }
            let tuned = all.iter().any(|i| i.kernel == "matmul" && i.name.contains("x2304x768"));
            assert_eq!(tuned, target.starts_with("rtx"), "{target}: what the cache has of gpt2");
            let cut = |i: &Instance| i.config["parts"].as_u64() > Some(1);
            assert!(all.iter().any(cut), "{target}: k in parts");
            let added = |i: &Instance| cut(i) && i.name.ends_with(" launch 2");
            assert!(all.iter().any(added), "{target}: what adds them");
        }
    }
}
