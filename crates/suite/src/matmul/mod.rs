//! Matmul: cases, instances and peers.

mod check;

use arch::{Backend, Device};
use kernels::matmul::{
    Activation, Batches, Epilogue, Layout, Matmul, MatmulConfig, MatmulOperands, MatmulProblem,
    Precision,
};
use kernels::norm::NormKind;
use models::{Fusion, shapes};
use serde_json::{Value, json};
use tune::Kernel;

pub(crate) use self::check::{
    EPS, reference_activation, reference_dtype, reference_of, result_dtype, row_norm,
};
pub use self::check::{EdgeCase, Inputs, Shares};
use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{CheckError, FAR, Verdict};
use crate::kernel::{KernelSuite, Params, Peers, params};
use crate::peers;

impl KernelSuite for Matmul {
    type Case = EdgeCase;

    const PRECISIONS: &'static [Precision] = &Precision::ALL;

    fn precision(p: &MatmulProblem) -> Precision {
        p.precision
    }

    fn params(p: &MatmulProblem) -> Params {
        let mut params = params([
            ("m", p.m.into()),
            ("n", p.n.into()),
            ("k", p.k.into()),
            ("dtype", p.precision.name().into()),
            ("lhs", p.lhs.layout.name().into()),
            ("rhs", p.rhs.layout.name().into()),
        ]);
        if p.grouped {
            params.insert("groups".to_owned(), p.batch().into());
        } else if p.batch() > 1 {
            params.insert("batch".to_owned(), p.batch().into());
        }
        if p.out != p.precision.storage() {
            params.insert("out".to_owned(), p.out.name().into());
        }
        let epilogue = p.epilogue.names();
        if !epilogue.is_empty() {
            params.insert("epilogue".to_owned(), epilogue.join("+").into());
        }
        if let Some(norm) = p.norm {
            params.insert("norm".to_owned(), norm.name().into());
        }
        params
    }

    fn problem(case: &EdgeCase) -> &MatmulProblem {
        &case.problem
    }

    fn case_params(case: &EdgeCase) -> Params {
        let p = &case.problem;
        let mut params = Self::params(p);
        if matches!(case.inputs, Inputs::Special(_)) {
            params.insert("inputs".to_owned(), "inf+nan".into());
        }
        let dense =
            MatmulProblem::dense(1, [p.m, p.n, p.k], [p.lhs.layout, p.rhs.layout], p.precision);
        if p.batch() == 1 && dense.is_ok_and(|d| d.lhs != p.lhs || d.rhs != p.rhs) {
            params.insert("view".to_owned(), format!("{}+{}", p.lhs.stride, p.lhs.start).into());
        }
        if let Some(shares) = case.shares() {
            params.insert("shares".to_owned(), shares.name().into());
        } else if matches!(case.inputs, Inputs::Far(_)) {
            let [lhs, rhs, out] = p.extents();
            let far =
                [("lhs", lhs), ("rhs", rhs), ("out", out)].into_iter().max_by_key(|(_, len)| *len);
            params.insert("far".to_owned(), far.map_or("", |(name, _)| name).into());
            params.insert("extent".to_owned(), lhs.max(rhs).max(out).into());
        } else if p.batch() > 1 && (p.batches.lhs.1 == 0 || p.batches.rhs.1 == 0) {
            params.insert("repeat".to_owned(), true.into());
        }
        params
    }

    /// Every size in every layout, then batches, repeated operands, strided views, deep matmuls and special values.
    fn edge_cases(precision: Precision, backend: Backend) -> Vec<EdgeCase> {
        let layouts = [Layout::Row, Layout::Col];
        let mut cases = Vec::new();
        let dense = |batch, sizes, layouts| {
            MatmulProblem::dense(batch, sizes, layouts, precision)
                .expect("sizes above are positive")
        };
        let mut add = |problem, inputs| cases.push(EdgeCase { problem, inputs });
        for (seed, sizes) in (0u64..).zip(SIZES) {
            for lhs in layouts {
                for rhs in layouts {
                    add(dense(1, sizes, [lhs, rhs]), Inputs::Normal(seed));
                }
            }
        }
        let rows = [Layout::Row; 2];
        add(dense(5, [33, 40, 24], rows), Inputs::Normal(90));
        add(dense(3, [64, 64, 64], [Layout::Row, Layout::Col]), Inputs::Normal(91));
        for (batches, seed) in [
            // rhs repeats over every batch: a linear layer.
            (Batches { outer: 1, inner: 4, lhs: (0, 20 * 24), rhs: (0, 0) }, 92),
            // lhs repeats over the inner axis, rhs over the outer: an outer product of batches.
            (Batches { outer: 2, inner: 3, lhs: (20 * 24, 0), rhs: (0, 24 * 16) }, 93),
        ] {
            add(MatmulProblem { batches, ..dense(1, [20, 16, 24], rows) }, Inputs::Normal(seed));
        }
        let view = |lhs: (u64, u64), rhs: (u64, u64), sizes| {
            let mut p = dense(1, sizes, rows);
            (p.lhs.stride, p.lhs.start) = lhs;
            (p.rhs.stride, p.rhs.start) = rhs;
            p
        };
        // Aligned and unaligned views into larger matrices.
        add(view((80, 16), (64, 8), [48, 40, 64]), Inputs::Normal(94));
        add(view((71, 3), (45, 5), [50, 33, 65]), Inputs::Normal(95));
        for (seed, (epilogue, out)) in (120..).zip(epilogues(precision)) {
            // Whole tiles, every edge, few rows. Then a k deep enough for split-k, with batches.
            for sizes in [[64, 64, 64], [33, 47, 29], [1, 136, 40]] {
                let p = MatmulProblem { epilogue, out, ..dense(1, sizes, rows) };
                add(p, Inputs::Normal(seed));
            }
            let deep = dense(3, [20, 24, 4104], rows);
            add(MatmulProblem { epilogue, out, ..deep }, Inputs::Normal(seed));
        }
        for problem in normed(precision) {
            add(problem, Inputs::Normal(140));
        }
        // Special values in one row, and in one of each of several rows.
        add(normed(precision)[0], Inputs::Special(141));
        add(normed(precision)[6], Inputs::Special(142));
        add_groups(&mut add, precision);
        // Split-k with a ragged last part.
        add(dense(1, [5, 40, 2051], [Layout::Row, Layout::Col]), Inputs::Normal(114));
        for (seed, sizes) in [(96, [40, 48, 56]), (97, [128, 128, 64]), (98, [3, 130, 35])] {
            add(dense(1, sizes, [Layout::Row, Layout::Col]), Inputs::Special(seed));
        }
        cases.extend(far_cases(precision, backend));
        cases
    }

    /// Full tiles, every edge, few rows, edges in m and n only, more blocks than a card has processors. Also split-k in
    /// many parts, the last one ragged.
    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        let layouts = [Layout::Row, Layout::Col];
        let sizes = [[256, 256, 128], [131, 259, 67], [1, 264, 72], [9, 37, 80]];
        let full = all_parts(Some(Activation::Silu));
        let mut cases = Vec::new();
        let mut add = |size, layouts, seed, epilogue| {
            let plain =
                MatmulProblem::dense(1, size, layouts, precision).expect("sizes here are positive");
            let problem = MatmulProblem { epilogue, ..plain };
            cases.push(EdgeCase { problem, inputs: Inputs::Normal(seed) });
        };
        for (seed, size) in (200u64..).zip(sizes) {
            for lhs in layouts {
                for rhs in layouts {
                    add(size, [lhs, rhs], seed, Epilogue::default());
                }
            }
            add(size, layouts, seed, full);
        }
        add([24, 72, 8184], layouts, 210, Epilogue::default());
        add([2064, 3080, 256], layouts, 213, full);
        // Large tiles with split-k.
        add([256, 1024, 8184], layouts, 214, full);
        // Few rows with split-k, for tiles loaded by TMA.
        add([24, 136, 4104], [Layout::Row, Layout::Col], 215, full);
        add([40, 264, 4096], layouts, 216, Epilogue { residual: true, ..Epilogue::default() });
        // Results that do not fill a word, so the buffer is longer than the result.
        add([3, 67, 8184], layouts, 211, full);
        // Batches with whole and with ragged tiles. Every batch but the first begins past the start of the buffers.
        for (seed, batch, size) in
            [(217, 2, [256, 256, 128]), (218, 3, [72, 137, 99]), (219, 3, [24, 136, 4096])]
        {
            for rhs in layouts {
                let problem = MatmulProblem::dense(batch, size, [Layout::Row, rhs], precision)
                    .expect("sizes here are positive");
                cases.push(EdgeCase { problem, inputs: Inputs::Normal(seed) });
            }
        }
        let normed = normed(precision).into_iter().skip(2).take(4);
        cases.extend(normed.map(|problem| EdgeCase { problem, inputs: Inputs::Normal(212) }));
        for (seed, rhs) in [(207, Layout::Row), (206, Layout::Col)] {
            let problem = MatmulProblem::grouped(6, [301, 136, 72], rhs, precision)
                .expect("sizes here are positive");
            cases.push(EdgeCase { problem, inputs: Inputs::Normal(seed) });
        }
        cases
    }

    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &MatmulConfig,
    ) -> Result<Verdict, CheckError> {
        check::verify(device, case, config)
    }

    fn verify_operands(
        device: &Device,
        p: &MatmulProblem,
        operands: &MatmulOperands,
        seed: u64,
    ) -> Result<Verdict, CheckError> {
        check::verify_operands(device, p, operands, seed)
    }

    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<MatmulProblem>> {
        use Precision::{Bf16, F16, F16Acc16, F32, Tf32};
        let mut cases = Vec::new();
        let mut add = |batch, sizes, layouts, precision, peers| {
            let problem = dense(batch, sizes, layouts, precision);
            if cases.iter().all(|case: &BenchCase<_>| case.problem != problem) {
                cases.push(BenchCase { problem, peers });
            }
        };
        match (scale, suite) {
            (Scale::Host, Suite::Quick) => {
                add(1, [512; 3], ROWS, F32, true);
                add(1, [1024; 3], ROWS, F32, true);
                add(1, [512; 3], LINEAR, F32, true);
                add(1, [512; 3], LINEAR, Bf16, true);
                add(1, [1, 4096, 4096], LINEAR, F32, true);
                add(1, [8, 2048, 2048], LINEAR, F32, true);
            }
            (Scale::Host, Suite::Documents) => {
                for precision in [F32, F16, Bf16] {
                    add(1, [512; 3], ROWS, precision, false);
                }
            }
            (Scale::Gpu, Suite::Documents) => {
                for size in [4096, 8192] {
                    for precision in [F32, Tf32, F16, Bf16] {
                        add(1, [size; 3], ROWS, precision, false);
                    }
                }
            }
            (Scale::Host, _) => {
                for precision in [F32, F16, Bf16] {
                    for layouts in [ROWS, LINEAR] {
                        for sizes in [[512; 3], [1024; 3], [1, 4096, 4096], [8, 4096, 4096]] {
                            add(1, sizes, layouts, precision, true);
                        }
                    }
                }
                add(8, [128, 128, 64], ROWS, F32, true);
            }
            (Scale::Gpu, Suite::Quick) => {
                for precision in [Bf16, F16, Tf32, F32] {
                    add(1, [4096; 3], LINEAR, precision, precision == Bf16);
                }
                add(1, [4096; 3], LINEAR, F16Acc16, false);
                add(1, [4096; 3], ROWS, Bf16, true);
                add(1, [512, 4096, 4096], LINEAR, Bf16, true);
                add(1, [1, 14336, 4096], LINEAR, Bf16, true);
                add(1, [8, 14336, 4096], LINEAR, Bf16, false);
            }
            (Scale::Gpu, _) => {
                for precision in [Bf16, F16, Tf32, F32] {
                    for layouts in [ROWS, LINEAR] {
                        for size in [1024, 4096, 8192] {
                            let peer = precision == Bf16 || (precision == F16 && size == 4096);
                            add(1, [size; 3], layouts, precision, peer && size > 1024);
                        }
                    }
                }
                for layouts in [ROWS, LINEAR] {
                    for size in [4096, 8192] {
                        add(1, [size; 3], layouts, F16Acc16, false);
                    }
                    add(1, [512, 4096, 4096], layouts, Bf16, layouts == LINEAR);
                    for m in [1, 8, 64] {
                        add(1, [m, 14336, 4096], layouts, Bf16, m < 64 && layouts == LINEAR);
                        add(1, [m, 4096, 14336], layouts, Bf16, false);
                    }
                }
                // The dense counterparts of matmuls with 4-bit weights.
                for sizes in [
                    [1, 4096, 4096],
                    [1, 11008, 4096],
                    [1, 4096, 11008],
                    [1, 32000, 4096],
                    [1, 1024, 4096],
                    [512, 14336, 4096],
                    [4096, 14336, 4096],
                ] {
                    add(1, sizes, LINEAR, Bf16, false);
                }
                add(1, [64, 64, 65536], ROWS, Bf16, false);
                add(64, [512, 512, 128], ROWS, Bf16, true);
            }
        }
        if suite == Suite::All {
            let rows: &[u32] = match scale {
                Scale::Gpu => &[1, 8, 16, 512, 4096],
                Scale::Host => &[1],
            };
            let llama = shapes::named("llama-3-8b").expect("a shape of the list");
            for linear in llama.linears(Fusion::Fused) {
                for m in rows {
                    add(1, [*m, linear.n as u32, linear.k as u32], LINEAR, Bf16, false);
                }
            }
        }
        if suite == Suite::Documents {
            return cases;
        }
        if scale == Scale::Gpu && suite != Suite::Quick {
            cases.extend([6144, 14336].map(|n| {
                let plain = dense(1, [1, n, 4096], LINEAR, Bf16);
                BenchCase::alone(MatmulProblem { norm: Some(NormKind::Rms), ..plain })
            }));
        }
        // Adapters of a linear layer, each with its own rows.
        cases.push(BenchCase::alone(match scale {
            Scale::Gpu => grouped(8, [4096; 3], LINEAR[1], Bf16),
            Scale::Host => grouped(4, [512; 3], LINEAR[1], F32),
        }));
        cases
    }

    /// Every candidate for whole tiles and for few rows, where the tiles differ. Elsewhere only the code around the
    /// tiles differs, so the first few candidates, including the default, are enough.
    fn instances() -> Vec<InstanceCase<MatmulProblem>> {
        use Precision::{Bf16, F16, F16Acc16, F32, Tf32};
        let (row, col) = (Layout::Row, Layout::Col);
        let dense = |sizes, layouts, precision| {
            MatmulProblem::dense(1, sizes, layouts, precision).expect("sizes below are positive")
        };
        let none = Epilogue::default();
        let everything = all_parts(Some(Activation::Gelu));
        let whole = |layouts, precision| {
            let problem = dense([4096; 3], layouts, precision);
            InstanceCase { problem, max_candidates: usize::MAX, clean: usize::MAX }
        };
        // Whole vectors, but ragged tiles.
        let ragged = |layouts, precision, max_candidates| InstanceCase {
            problem: dense([4088, 4072, 4104], layouts, precision),
            max_candidates,
            clean: 1,
        };
        // Sizes that no vector divides: elements are copied one by one. On sm_89 and sm_120 some configs then spill up
        // to 148 bytes.
        let odd = |layouts, precision| InstanceCase {
            problem: dense([4095, 4093, 4091], layouts, precision),
            max_candidates: 2,
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
            // f16 code differs from bf16 code in one letter of an instruction.
            InstanceCase { max_candidates: 1, ..whole([row, col], F16) },
        ];
        // Few rows: flat tiles and split-k.
        for m in [1, 8, 64] {
            for [n, k] in [[14336, 4096], [4096, 14336]] {
                let problem = dense([m, n, k], [row, col], Bf16);
                cases.push(InstanceCase { problem, max_candidates: usize::MAX, clean: 1 });
            }
        }
        for (m, kind) in [(1, NormKind::Rms), (2, NormKind::RmsPlusOne)] {
            let problem = dense([m, 14336, 4096], [row, col], Bf16);
            let problem = MatmulProblem { norm: Some(kind), ..problem };
            cases.push(InstanceCase { problem, max_candidates: usize::MAX, clean: 1 });
        }
        let thin = dense([8, 4096, 14336], [row, col], Bf16);
        let thin = MatmulProblem { epilogue: everything, ..thin };
        cases.push(InstanceCase { problem: thin, max_candidates: 2, clean: 1 });
        cases.extend([
            ragged([row, col], Bf16, 5),
            ragged([row, col], F32, 2),
            odd([col, row], Tf32),
        ]);
        // Epilogues of layers, and all parts at once.
        let [silu, gelu, tanh] = Activation::SMOOTH.map(Some);
        for epilogue in [
            Epilogue { bias: true, activation: gelu, ..none },
            Epilogue { gate: true, activation: silu, ..none },
            Epilogue { bias: true, residual: true, ..none },
            Epilogue { bias: true, pre_activation: true, activation: tanh, ..none },
            Epilogue { gate: true, slope: tanh, ..none },
            everything,
        ] {
            let InstanceCase { problem, .. } = whole([row, col], Bf16);
            let problem = MatmulProblem { epilogue, ..problem };
            cases.push(InstanceCase { problem, max_candidates: 1, clean: 1 });
        }
        for InstanceCase { problem, max_candidates, clean } in
            [odd([row, row], Bf16), odd([row, row], F32)]
        {
            let epilogue = everything;
            cases.push(InstanceCase {
                problem: MatmulProblem { epilogue, ..problem },
                max_candidates,
                clean,
            });
        }
        // Groups: the first row of a block is looked up, and no tile is known to be full.
        for (precision, epilogue) in
            [(Bf16, none), (Bf16, everything), (F16Acc16, none), (Tf32, none), (F32, none)]
        {
            let grouped =
                MatmulProblem::grouped(8, [4096; 3], col, precision).expect("positive sizes");
            let problem = MatmulProblem { epilogue, ..grouped };
            cases.push(InstanceCase { problem, max_candidates: 2, clean: 1 });
        }
        cases
    }

    fn peers_on(device: &Device, p: &MatmulProblem, sets: &[MatmulOperands]) -> Peers {
        // On a CPU, Burn uses another backend than cubek.
        match device.backend() {
            Backend::Cuda | Backend::Vulkan => {
                vec![("cubek", peers::cubek_matmul(device, p, sets))]
            }
            Backend::Cpu | Backend::WebGpu => Peers::new(),
        }
    }

    fn peers(device: &Device, p: &MatmulProblem, sets: usize) -> Peers {
        vec![(peers::burn_name(device.backend()), peers::burn_matmul(device, p, sets))]
    }

    fn torch(p: &MatmulProblem) -> Option<Value> {
        p.norm.is_none().then(|| {
            json!({
                "op": Self::NAME,
                "m": p.m,
                "n": p.n,
                "k": p.k,
                "batch": p.batch(),
                "dtype": p.precision.name(),
                "lhs": p.lhs.layout.name(),
                "rhs": p.rhs.layout.name(),
                "rows": p.grouped.then(|| p.uneven_rows()),
            })
        })
    }
}

const ROWS: [Layout; 2] = [Layout::Row, Layout::Row];
/// Layouts of a linear layer, whose weight is `[n, k]`.
const LINEAR: [Layout; 2] = [Layout::Row, Layout::Col];

fn dense(batch: u32, sizes: [u32; 3], layouts: [Layout; 2], precision: Precision) -> MatmulProblem {
    MatmulProblem::dense(batch, sizes, layouts, precision).expect("sizes are positive")
}

fn grouped(groups: u32, sizes: [u32; 3], rhs: Layout, precision: Precision) -> MatmulProblem {
    MatmulProblem::grouped(groups, sizes, rhs, precision).expect("sizes are positive")
}

/// Tile multiples, plus and minus one, ones, primes, thin and deep shapes.
const SIZES: [[u32; 3]; 16] = [
    [1, 1, 1],
    [128, 128, 128],
    [129, 127, 65],
    [256, 128, 96],
    [37, 41, 43],
    [1, 256, 512],
    [8, 192, 320],
    [3, 133, 136],
    [1, 1031, 776],
    [257, 1, 64],
    [33, 65, 1],
    [16, 8, 1000],
    [64, 64, 63],
    [5, 7, 2],
    [192, 320, 72],
    [17, 130, 36],
];

/// Views and batches past 2^31 elements. Cards also get operands past 2^32 and a result past 2^31. wgpu gets none,
/// because its buffers end at 4 GiB. A CPU gets 16-bit types only, because others take twice the memory.
fn far_cases(precision: Precision, backend: Backend) -> Vec<EdgeCase> {
    let served = match backend {
        Backend::Cuda => true,
        Backend::Cpu => precision.storage().size() == 2,
        _ => false,
    };
    if !served {
        return Vec::new();
    }
    let mut cases = Vec::new();
    let dense = |batch, sizes, rhs| {
        MatmulProblem::dense(batch, sizes, [Layout::Row, rhs], precision)
            .expect("sizes are positive")
    };
    let distances = if backend == Backend::Cuda { &FAR[..] } else { &FAR[..1] };
    for far in distances {
        for rhs in [Layout::Row, Layout::Col] {
            for sizes in [[37, 136, 72], [1, 264, 512], [150, 130, 64]] {
                let mut p = dense(1, sizes, rhs);
                p.lhs.start = *far;
                cases.push(p);
                let mut p = dense(1, sizes, rhs);
                p.rhs.start = *far;
                cases.push(p);
            }
            let mut p = dense(2, [40, 72, 64], rhs);
            p.batches.rhs.1 += far;
            cases.push(p);
        }
    }
    if backend == Backend::Cuda {
        cases.extend([Layout::Row, Layout::Col].map(|rhs| dense(1, [65_600, 32_800, 16], rhs)));
    }
    let seeds = 400..;
    seeds
        .zip(cases)
        .map(|(seed, problem)| EdgeCase { problem, inputs: Inputs::Far(seed) })
        .collect()
}

/// Matmuls that normalise their rows: one row and several, whole cubes and leftover columns, one step of k and many,
/// other output types, batches.
fn normed(precision: Precision) -> Vec<MatmulProblem> {
    let sizes = [[1, 256, 512], [2, 67, 4104], [1, 131, 8], [5, 264, 72], [8, 40, 136]];
    let kinds = [NormKind::Rms, NormKind::RmsPlusOne];
    let mut problems = Vec::new();
    for (i, size) in sizes.into_iter().enumerate() {
        let batch = if i == 1 { 3 } else { 1 };
        let plain = MatmulProblem::dense(batch, size, [Layout::Row, Layout::Col], precision)
            .expect("sizes above are positive");
        let norm = Some(kinds[i % 2]);
        let (epilogue, out) = epilogues(precision).swap_remove(i);
        problems.push(MatmulProblem { norm, ..plain });
        problems.push(MatmulProblem { norm, epilogue, out, ..plain });
    }
    problems
}

/// Grouped problems: one group, even groups, all rows in one group, single rows, empty groups, more rows than a tile,
/// an edge in every group. Also the epilogues; each group has its own bias.
fn add_groups(add: &mut impl FnMut(MatmulProblem, Inputs), precision: Precision) {
    let grouped = |groups, sizes, rhs| {
        MatmulProblem::grouped(groups, sizes, rhs, precision).expect("sizes are positive")
    };
    for pattern in 0..4 {
        for rhs in [Layout::Row, Layout::Col] {
            add(grouped(5, [67, 40, 24], rhs), Inputs::Normal(300 + pattern));
            add(grouped(3, [300, 72, 64], rhs), Inputs::Normal(304 + pattern));
        }
    }
    add(grouped(1, [33, 47, 29], Layout::Row), Inputs::Normal(308));
    add(grouped(40, [40, 264, 36], Layout::Col), Inputs::Normal(310));
    add(grouped(9, [2, 24, 16], Layout::Col), Inputs::Normal(312));
    add(grouped(4, [50, 33, 35], Layout::Row), Inputs::Special(315));
    for (seed, (epilogue, out)) in (316..).zip(epilogues(precision)) {
        let p = grouped(4, [50, 40, 33], Layout::Row);
        add(MatmulProblem { epilogue, out, ..p }, Inputs::Normal(seed));
    }
}

/// Epilogue with all parts that inference has.
pub(crate) fn all_parts(activation: Option<Activation>) -> Epilogue {
    Epilogue { bias: true, activation, gate: true, residual: true, ..Epilogue::default() }
}

/// Each part of an epilogue, all parts together, and other output types.
fn epilogues(precision: Precision) -> Vec<(Epilogue, arch::DType)> {
    let (none, own) = (Epilogue::default(), precision.storage());
    let other = if own == arch::DType::F32 { arch::DType::F16 } else { arch::DType::F32 };
    let mut parts = vec![
        (Epilogue { bias: true, ..none }, own),
        (Epilogue { gate: true, ..none }, own),
        (Epilogue { residual: true, ..none }, own),
        (none, other),
        (all_parts(None), other),
    ];
    parts.extend(Activation::SMOOTH.map(|a| (all_parts(Some(a)), own)));
    // A layer's forward and backward pass.
    for activation in Activation::SMOOTH {
        let forward = Epilogue { pre_activation: true, activation: Some(activation), ..none };
        parts.push((Epilogue { bias: true, ..forward }, own));
        parts.push((Epilogue { gate: true, slope: Some(activation), ..none }, own));
    }
    let relu = Some(Activation::Relu);
    let block = Epilogue { bias: true, activation: relu, activation_last: true, ..none };
    parts.push((Epilogue { residual: true, ..block }, own));
    let slope = Some(Activation::Silu);
    let both = Epilogue { pre_activation: true, slope, ..all_parts(None) };
    parts.push((both, own));
    parts
}
