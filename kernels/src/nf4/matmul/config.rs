//! Configs of a matmul with a 4-bit weight: their limits on a device, and the candidates for tuning.

use arch::{ArchProfile, DType, MmaShape};
use serde::{Deserialize, Serialize};
use tune::{Infeasible, Kernel};

use super::Nf4MatmulProblem;
use super::fused::{FusedConfig, FusedPlan};
use super::gemv::GemvConfig;
use super::shared::{SharedConfig, SharedPlan};
use super::stream::{StreamConfig, StreamPlan};
use super::tensor_core::part_steps;
use crate::dequant::{self, SubgroupConfig, SubgroupProblem};
use crate::fits::{lacks, limits, shape, stores};
use crate::matmul::{MAX_NORMED_ROWS, Matmul, MatmulConfig};
use crate::nf4::dequantize::{DequantizeConfig, Nf4Dequantize};
use crate::nf4::{Order, QuantizedPlan, Weight};
use crate::rows::NormKind;

/// Config of a matmul with a 4-bit weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "path", rename_all = "lowercase")]
pub enum Nf4MatmulConfig {
    Stream(StreamConfig),
    Fused(FusedConfig),
    Shared(SharedConfig),
    #[serde(rename = "plane")]
    Subgroup(SubgroupConfig),
    #[serde(rename = "lanes")]
    Gemv(GemvConfig),
    Dense(DenseConfig),
}

/// Dequantises the weight, then runs a dense matmul.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DenseConfig {
    pub dequantize: DequantizeConfig,
    pub matmul: MatmulConfig,
}

impl Nf4MatmulConfig {
    /// Split-k parts, whose sums are kept in memory between two launches.
    pub(super) const fn parts(&self) -> u32 {
        match self {
            Self::Stream(c) => c.parts,
            Self::Fused(c) => c.parts,
            Self::Shared(c) => c.parts,
            Self::Subgroup(c) => c.parts,
            Self::Gemv(_) | Self::Dense(_) => 1,
        }
    }
}

pub(super) fn candidates(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Vec<Nf4MatmulConfig> {
    if !p.has_halves() {
        return Vec::new();
    }
    let feasible = |c: &Nf4MatmulConfig| check(arch, p, c).is_ok();
    if p.norm.is_some() {
        return normed(arch, p).into_iter().filter(feasible).collect();
    }
    let mut all: Vec<_> = streams(arch, p).into_iter().map(Nf4MatmulConfig::Stream).collect();
    let subgroups = subgroups(arch, p);
    // With few rows a dense weight does not pay off, and tiles are mostly empty.
    let few = if subgroups.is_empty() { FEW_BY_GEMV } else { FEW_FOR_DENSE };
    all.extend(subgroups.into_iter().map(Nf4MatmulConfig::Subgroup));
    if p.m > few {
        let shared = shared(arch, p).into_iter().map(Nf4MatmulConfig::Shared);
        let fused = fused(arch, p).into_iter().map(Nf4MatmulConfig::Fused);
        let dense = denses(arch, p).into_iter().map(Nf4MatmulConfig::Dense);
        // From about a thousand rows on, a dense weight is cheaper than decoding for every tile of rows.
        if p.m >= 1024 {
            all.extend(dense.chain(shared).chain(fused));
        } else {
            all.extend(shared.chain(fused).chain(dense));
        }
    }
    all.retain(feasible);
    // If tensor cores serve many rows, the plain path is not a candidate.
    if p.m <= FEW_BY_GEMV || all.is_empty() {
        all.extend(gemvs(arch, p).into_iter().map(Nf4MatmulConfig::Gemv).filter(feasible));
    }
    all
}

/// Maximum rows for the plain path, and for the fused path on CUDA. Above 128 rows a path through shared
/// memory or a dense weight wins.
const FEW_BY_GEMV: u32 = 8;
const FEW_BY_TENSOR_CORES: u32 = 128;
/// Rows above which a dense weight is a candidate next to plane matrices.
const FEW_FOR_DENSE: u32 = 64;

pub(super) fn max_fused_rows(arch: &ArchProfile, dtype: DType) -> u32 {
    let subgroup = |s: &MmaShape| (s.ab, s.acc, s.m, s.n) == (dtype, DType::F32, 16, 16);
    match multiplies(arch, dtype) {
        Ok(()) => FEW_BY_TENSOR_CORES,
        Err(_) if arch.matrices_from_words() && arch.cmma.iter().any(subgroup) => FEW_FOR_DENSE,
        Err(_) => FEW_BY_GEMV,
    }
}

/// Returns the configs that apply the norm, if the fastest path supports it and a launch costs more than
/// normalising in every cube.
fn normed(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Vec<Nf4MatmulConfig> {
    let unnormed = Nf4MatmulProblem { norm: None, ..*p };
    if arch.cores().is_some() {
        Vec::new()
    } else if on_tensor_cores(arch, p).is_ok() {
        streams(arch, p).into_iter().map(Nf4MatmulConfig::Stream).collect()
    } else if p.m <= FEW_BY_GEMV && !p.glu && subgroups(arch, &unnormed).is_empty() {
        // A gated pair of matrices takes 44.6 us with a norm, and 38.7 us without (28672 x 4096, Vulkan).
        gemvs(arch, p).into_iter().map(Nf4MatmulConfig::Gemv).collect()
    } else {
        Vec::new()
    }
}

/// Returns whether a path applies the norm to the rows that it multiplies, and this is cheaper than a launch.
pub(super) fn takes_norm(arch: &ArchProfile, p: &Nf4MatmulProblem) -> bool {
    let max = if on_tensor_cores(arch, p).is_ok() { 16 } else { MAX_NORMED_ROWS };
    p.norm.is_some() && p.m <= max && !candidates(arch, p).is_empty()
}

pub(super) fn check(
    arch: &ArchProfile,
    p: &Nf4MatmulProblem,
    config: &Nf4MatmulConfig,
) -> Result<(), Infeasible> {
    stores(arch, [p.dtype])?;
    if !p.has_halves() {
        return Err(shape(
            "n",
            p.weight.n,
            "expected two matrices of n / 2 rows for a gated matmul",
        ));
    }
    if p.norm == Some(NormKind::Layer) {
        return Err(lacks("LayerNorm fused into a matmul"));
    }
    match config {
        Nf4MatmulConfig::Stream(c) => check_stream(arch, p, c),
        Nf4MatmulConfig::Fused(c) => check_fused(arch, p, c),
        Nf4MatmulConfig::Shared(c) => check_shared(arch, p, c),
        Nf4MatmulConfig::Subgroup(c) => dequant::check(arch, &subgroup_problem(p)?, c),
        Nf4MatmulConfig::Gemv(c) => check_gemv(arch, p, c),
        Nf4MatmulConfig::Dense(c) => check_dense(arch, p, c),
    }
}

pub(super) fn baseline(
    arch: &ArchProfile,
    p: &Nf4MatmulProblem,
) -> Result<Nf4MatmulConfig, Infeasible> {
    let config = Nf4MatmulConfig::Gemv(GemvConfig::baseline(arch, p.glu));
    check(arch, p, &config).map(|()| config)
}

/// Returns a config for each number of parts that gives work to whole planes, fewest parts first.
fn streams(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Vec<StreamConfig> {
    let quads = p.weight.k / 256;
    let mut found: Vec<StreamConfig> = Vec::new();
    // With 16 planes a unit has 128 registers; with two fragments of x it spills 16 to 248 bytes. Eight
    // planes spill 8 bytes (sm_120) if absmax are f32, because a unit holds eight of them.
    let planes = match (p.m > 8, p.weight.nested) {
        (false, _) => [16u32, 12, 8],
        (true, true) => [12, 8, 6],
        (true, false) => [6, 4, 12],
    };
    for planes in planes.map(|planes| planes.min(arch.max_units_per_cube / 32)) {
        if planes == 0 || quads == 0 {
            continue;
        }
        for extra in 0..2 {
            let parts = quads.div_ceil(planes) + extra;
            // Equal parts: no plane has more work than another.
            let config = StreamConfig { planes: quads.div_ceil(parts), parts };
            if !found.contains(&config) {
                found.push(config);
            }
        }
    }
    found
}

/// Returns tiles for this number of rows, with split-k if there are too few blocks for all processors.
fn fused(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Vec<FusedConfig> {
    let quads = p.weight.k / 256;
    let processors = arch.processors.unwrap_or(1);
    let blocks = |c: &FusedConfig| p.m.div_ceil(c.tile_m) * p.weight.n.div_ceil(c.tile_n());
    let mut found = Vec::new();
    for (tile_m, planes, stages) in
        [(128, 8, 3), (64, 8, 5), (32, 8, 6), (64, 4, 4), (32, 4, 6), (128, 4, 4)]
    {
        if quads == 0 || tile_m > p.m.next_power_of_two().max(32) {
            continue;
        }
        let one = FusedConfig { tile_m, planes, stages, parts: 1 };
        let wanted = (2 * processors / blocks(&one)).clamp(1, quads.min(8));
        for parts in [1, wanted, wanted.div_ceil(2)] {
            // Equal parts, none of them empty.
            let parts = quads.div_ceil(quads.div_ceil(parts));
            let config = FusedConfig { parts, ..one };
            if !found.contains(&config) {
                found.push(config);
            }
        }
    }
    // First come the configs with the fewest parts that keep every processor busy.
    found.sort_by_key(|c| (blocks(c) * c.parts < processors, c.parts));
    found.truncate(8);
    found
}

/// Returns tiles for many rows, the least empty first, with split-k if there are too few blocks for all
/// processors.
fn shared(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Vec<SharedConfig> {
    let quads = p.weight.k / 256;
    let processors = arch.processors.unwrap_or(1);
    let mut found = Vec::new();
    if p.m <= FEW_BY_TENSOR_CORES || quads == 0 {
        return found;
    }
    for (planes_m, planes_n, stages) in [(4, 2, 3), (4, 2, 4), (4, 1, 4), (2, 2, 3)] {
        let one = SharedConfig { planes_m, planes_n, stages, parts: 1 };
        let blocks = p.m.div_ceil(one.tile_m()) * p.weight.n.div_ceil(one.tile_n());
        // Equal parts.
        let parts = (processors / blocks).clamp(1, quads.min(8));
        let parts = quads.div_ceil(quads.div_ceil(parts));
        for parts in [parts, 1] {
            let config = SharedConfig { parts, ..one };
            if !found.contains(&config) {
                found.push(config);
            }
        }
    }
    found.sort_by_key(|c| p.m.next_multiple_of(c.tile_m()));
    found
}

/// Returns configs of plane matrices, if the weight has the order that they need.
fn subgroups(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Vec<SubgroupConfig> {
    match subgroup_problem(p) {
        Ok(problem) => dequant::candidates(arch, &problem),
        Err(_) => Vec::new(),
    }
}

fn gemvs(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Vec<GemvConfig> {
    let columns = p.m.next_power_of_two().min(4);
    if let Some(units) = arch.cores() {
        let configs = [8, 4, 2, 1].map(|rows| GemvConfig { units, lanes: 1, rows, columns });
        return configs.to_vec();
    }
    // One row of x leaves registers for many rows of the weight, which share the reads of x. Eight rows spill
    // 8 to 44 bytes with NVRTC.
    let ptx = arch.inline_ptx();
    let shapes = match columns {
        // Four rows with a norm spill 24 bytes (sm_89).
        1 if ptx && p.norm.is_some() => {
            [[256, 32, 2], [128, 64, 2], [128, 32, 2], [128, 128, 2], [128, 64, 4], [64, 32, 2]]
        }
        1 if ptx => {
            [[128, 32, 4], [128, 64, 4], [64, 32, 4], [128, 128, 4], [128, 32, 2], [256, 32, 2]]
        }
        1 => [[128, 128, 8], [128, 64, 8], [128, 64, 4], [128, 32, 8], [128, 32, 4], [256, 32, 2]],
        _ => [[256, 32, 2], [128, 32, 2], [256, 32, 4], [256, 16, 2], [256, 64, 2], [256, 64, 4]],
    };
    let all = shapes.map(|[units, lanes, rows]| GemvConfig { units, lanes, rows, columns });
    all.into_iter().chain([GemvConfig::baseline(arch, p.glu)]).collect()
}

/// Returns candidate configs with a dense weight.
fn denses(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Vec<DenseConfig> {
    let Some(dequantize) = Nf4Dequantize::candidates(arch, &p.dequantized()).first().copied()
    else {
        return Vec::new();
    };
    // The best `Pipelined` config for 512 rows comes late in the list.
    let worth = if arch.matrices_from_words() { 8 } else { 4 };
    let all = Matmul::candidates(arch, &p.dense()).into_iter();
    all.take(worth).map(|matmul| DenseConfig { dequantize, matmul }).collect()
}

fn check_stream(
    arch: &ArchProfile,
    p: &Nf4MatmulProblem,
    c: &StreamConfig,
) -> Result<(), Infeasible> {
    on_tensor_cores(arch, p)?;
    if p.m > 16 {
        return Err(shape("m", p.m, "expected at most 16 rows of x, which stay in registers"));
    }
    if !(1..=16).contains(&c.planes) {
        return Err(shape("planes", c.planes, "expected 1 to 16"));
    }
    if !(1..=64).contains(&c.parts) {
        return Err(shape("parts", c.parts, "expected 1 to 64"));
    }
    if p.norm.is_some() && p.dtype == DType::F16 {
        return Err(lacks("a dtype with more range than f16 for rows before their norm"));
    }
    if p.norm.is_some() && c.parts > 1 {
        return Err(shape("parts", c.parts, "a fused norm does not support split-k"));
    }
    if c.reach() < p.weight.k {
        return Err(shape("planes", c.planes, "expected planes times splits to cover k"));
    }
    limits(arch, c.units(), stream_plan(p, c).shared_bytes())
}

fn check_fused(
    arch: &ArchProfile,
    p: &Nf4MatmulProblem,
    c: &FusedConfig,
) -> Result<(), Infeasible> {
    on_tensor_cores(arch, p)?;
    unnormed(p)?;
    if !arch.async_copy {
        return Err(lacks("asynchronous copies"));
    }
    for (name, value, allowed) in [
        ("tile_m", c.tile_m, &[32u32, 64, 128][..]),
        ("planes", c.planes, &[2, 4, 8]),
        ("stages", c.stages, &[2, 3, 4, 5, 6]),
    ] {
        if !allowed.contains(&value) {
            return Err(shape(name, value, &format!("expected one of {allowed:?}")));
        }
    }
    parts_have_quads(p, c.parts)?;
    if c.registers() > 255 {
        return Err(shape("tile_m", c.tile_m, "accumulators would spill registers"));
    }
    limits(arch, c.units(), fused_plan(p, c).shared_bytes())
}

fn check_shared(
    arch: &ArchProfile,
    p: &Nf4MatmulProblem,
    c: &SharedConfig,
) -> Result<(), Infeasible> {
    on_tensor_cores(arch, p)?;
    unnormed(p)?;
    if !arch.async_copy {
        return Err(lacks("asynchronous copies"));
    }
    for (name, value, allowed) in [
        // The 32 units of a plane copy the absmax of at most two pieces.
        ("planes_m", c.planes_m, &[2u32, 4][..]),
        ("planes_n", c.planes_n, &[1, 2, 4]),
        ("stages", c.stages, &[2, 3, 4, 5, 6]),
    ] {
        if !allowed.contains(&value) {
            return Err(shape(name, value, &format!("expected one of {allowed:?}")));
        }
    }
    // A unit then has the maximum number of registers.
    if c.planes() > 8 {
        return Err(shape("planes_n", c.planes_n, "expected at most 8 planes"));
    }
    parts_have_quads(p, c.parts)?;
    limits(arch, 32 * c.planes(), shared_plan(p, c).shared_bytes())
}

/// Checks that split-k parts are whole quads and none is empty.
fn parts_have_quads(p: &Nf4MatmulProblem, parts: u32) -> Result<(), Infeasible> {
    let steps = p.weight.k / 64;
    if !(1..=64).contains(&parts) || (parts - 1) * part_steps(p.weight.k, parts) >= steps {
        return Err(shape(
            "parts",
            parts,
            "expected 1 to 64 splits of at least 256 k elements each",
        ));
    }
    Ok(())
}

/// Checks that the weight is in tiles and the device has the instructions for it.
fn on_tensor_cores(arch: &ArchProfile, p: &Nf4MatmulProblem) -> Result<(), Infeasible> {
    if p.weight.order != Order::Tiles {
        return Err(shape("k", p.weight.k, "expected a weight in tiles, got rows"));
    }
    multiplies(arch, p.dtype)
}

/// Checks that the device has the instructions of the tensor-core paths.
fn multiplies(arch: &ArchProfile, dtype: DType) -> Result<(), Infeasible> {
    let half = matches!(dtype, DType::F16 | DType::Bf16);
    let inst = arch.mma_for(dtype, DType::F32).filter(|_| half);
    if inst.is_none_or(|s| (s.m, s.n, s.k) != (16, 8, 16)) {
        return Err(lacks(format!("{dtype} matrix instructions")));
    }
    Ok(())
}

/// Checks that the problem has no norm.
fn unnormed(p: &Nf4MatmulProblem) -> Result<(), Infeasible> {
    match p.norm {
        None => Ok(()),
        Some(_) => Err(lacks("a norm fused into this matmul")),
    }
}

/// Describes the matmul to [`dequant`](crate::dequant), for a weight in rows.
pub(super) fn subgroup_problem(p: &Nf4MatmulProblem) -> Result<SubgroupProblem, Infeasible> {
    unnormed(p)?;
    if p.weight.order != Order::Rows {
        return Err(lacks("a weight in rows, not in tiles"));
    }
    let (Weight { n, k, .. }, precision) = (p.weight, p.dense().precision);
    Ok(SubgroupProblem { m: p.m, n, k, precision, bits: 4, glu: p.glu })
}

fn check_gemv(arch: &ArchProfile, p: &Nf4MatmulProblem, c: &GemvConfig) -> Result<(), Infeasible> {
    limits(arch, c.units, 0)?;
    let halves = c.lanes.is_power_of_two() && c.units % c.lanes == 0;
    if !halves || c.lanes > 1 && c.units < 16 {
        let why =
            "expected a power of two that divides the units, and at least 16 units if above 1";
        return Err(shape("lanes", c.lanes, why));
    }
    if arch.cores().is_some() && c.lanes != 1 {
        return Err(lacks("cheap barriers (a GPU)"));
    }
    if !(1..=8).contains(&c.rows) || p.glu && c.rows % 2 != 0 {
        return Err(shape(
            "rows",
            c.rows,
            "expected 1 to 8, and an even number for a gated matmul",
        ));
    }
    if !(1..=8).contains(&c.columns) {
        return Err(shape("columns", c.columns, "expected 1 to 8"));
    }
    if p.weight.n.div_ceil(c.rows_of_cube()) > 65_535 {
        return Err(shape("n", p.weight.n, "expected at most 65535 cubes in one grid dimension"));
    }
    limits(arch, c.units, super::gemv_plan(arch, p, c).shared_bytes())
}

fn check_dense(
    arch: &ArchProfile,
    p: &Nf4MatmulProblem,
    c: &DenseConfig,
) -> Result<(), Infeasible> {
    unnormed(p)?;
    Nf4Dequantize::check(arch, &p.dequantized(), &c.dequantize)?;
    if p.glu {
        if p.epilogue.gate {
            return Err(lacks("a matmul with two gates"));
        }
        // The second matrix and its bias begin within a buffer.
        if !arch.unaligned_buffers() && !p.halves_are_aligned() {
            return Err(shape(
                "n",
                p.weight.n,
                "expected the second matrix and its bias aligned to 256 bytes",
            ));
        }
        Matmul::check(arch, &p.ungated(), &c.matmul)?;
    }
    Matmul::check(arch, &p.gated(), &c.matmul)
}

pub(super) fn stream_plan(p: &Nf4MatmulProblem, c: &StreamConfig) -> StreamPlan {
    StreamPlan {
        config: StreamConfig { parts: 1, ..*c },
        weight: QuantizedPlan::new(&p.weight),
        eights: p.m.div_ceil(8) as usize,
        bf16: p.dtype == DType::Bf16,
        glu: p.glu,
        partial: c.parts > 1,
        norm: p.norm,
    }
}

/// Returns the plan of the fused path.
pub(super) fn fused_plan(p: &Nf4MatmulProblem, c: &FusedConfig) -> FusedPlan {
    FusedPlan {
        config: FusedConfig { parts: 1, ..*c },
        weight: QuantizedPlan::new(&p.weight),
        bf16: p.dtype == DType::Bf16,
        exact: p.m % c.tile_m == 0,
        glu: p.glu,
        partial: c.parts > 1,
    }
}

pub(super) fn shared_plan(p: &Nf4MatmulProblem, c: &SharedConfig) -> SharedPlan {
    SharedPlan {
        config: SharedConfig { parts: 1, ..*c },
        weight: QuantizedPlan::new(&p.weight),
        bf16: p.dtype == DType::Bf16,
        exact: p.m % c.tile_m() == 0,
        glu: p.glu,
        partial: c.parts > 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nf4::{Nf4Matmul, Weight};

    fn problem(m: u32, n: u32, k: u32, order: Order, dtype: DType) -> Nf4MatmulProblem {
        let weight = Weight::new(n, k, 64, true).and_then(|w| w.ordered(order)).expect("valid");
        Nf4MatmulProblem::new(m, weight, dtype).expect("rows")
    }

    fn gated(m: u32, n: u32, k: u32, order: Order, dtype: DType) -> Nf4MatmulProblem {
        problem(m, n, k, order, dtype).gated_by_half().expect("two halves")
    }

    #[test]
    fn every_profile_has_a_candidate_and_every_candidate_passes_its_check() {
        for name in arch::recorded() {
            let arch = ArchProfile::recorded(name).expect("recorded");
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                for m in [1, 8, 9, 16, 17, 300, 512, 4096] {
                    for p in [
                        problem(m, 4096, 4096, Order::Tiles, dtype),
                        problem(m, 37, 41, Order::Rows, dtype),
                        gated(m, 4096, 4096, Order::Tiles, dtype),
                        gated(m, 38, 41, Order::Rows, dtype),
                    ] {
                        let found = Nf4Matmul::candidates(&arch, &p);
                        assert!(!found.is_empty(), "{name} {p:?}");
                        for c in found {
                            Nf4Matmul::check(&arch, &p, &c).expect("candidates are checked");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn rows_are_normalised_where_one_cube_has_all_of_k() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        let takes = |p: Nf4MatmulProblem, norm| {
            let p = Nf4MatmulProblem { norm: Some(norm), ..p };
            let found = candidates(&arch, &p);
            let one = |c: &Nf4MatmulConfig| match c {
                Nf4MatmulConfig::Stream(c) => c.parts == 1,
                Nf4MatmulConfig::Gemv(_) => p.weight.order == Order::Rows,
                _ => false,
            };
            assert!(found.iter().all(one), "{found:?}");
            takes_norm(&arch, &p)
        };
        let tiles = |m, k, dtype| problem(m, 4096, k, Order::Tiles, dtype);
        assert!(takes(tiles(1, 4096, DType::Bf16), NormKind::Rms));
        assert!(takes(gated(8, 4096, 4096, Order::Tiles, DType::Bf16), NormKind::RmsPlusOne));
        assert!(takes(problem(1, 37, 41, Order::Rows, DType::F16), NormKind::Rms));
        assert!(!takes(gated(1, 38, 41, Order::Rows, DType::F16), NormKind::Rms));
        assert!(!takes(tiles(1, 4096, DType::Bf16), NormKind::Layer));
        assert!(!takes(tiles(1, 4096, DType::F16), NormKind::Rms), "products may pass 65504");
        assert!(!takes(tiles(1, 8192, DType::Bf16), NormKind::Rms), "k is in parts");
        assert!(!takes(tiles(17, 4096, DType::Bf16), NormKind::Rms));
    }

    #[test]
    fn two_matrices_of_different_height_do_not_gate_one_another() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        for p in [
            problem(1, 37, 41, Order::Rows, DType::Bf16),
            problem(1, 48, 256, Order::Tiles, DType::Bf16),
        ] {
            p.gated_by_half().expect_err("no halves");
            let p = Nf4MatmulProblem { glu: true, ..p };
            assert!(Nf4Matmul::candidates(&arch, &p).is_empty());
            Nf4Matmul::baseline(&arch, &p).expect_err("nor does the baseline");
        }
    }

    #[test]
    fn few_rows_stream_and_their_planes_have_even_shares() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        let first =
            |m, n, k| Nf4Matmul::candidates(&arch, &problem(m, n, k, Order::Tiles, DType::Bf16))[0];
        let stream = |planes, parts| Nf4MatmulConfig::Stream(StreamConfig { planes, parts });
        assert_eq!(first(1, 14336, 4096), stream(16, 1));
        assert_eq!(first(8, 4096, 14336), stream(14, 4));
        assert_eq!(first(8, 4096, 11008), stream(15, 3));
        // With two fragments of x, 16 planes would spill.
        assert_eq!(first(16, 4096, 11008), stream(11, 4));
        assert!(matches!(first(17, 4096, 4096), Nf4MatmulConfig::Fused(_)));
        assert!(matches!(first(512, 14336, 4096), Nf4MatmulConfig::Shared(_)));
        assert!(matches!(first(4096, 4096, 4096), Nf4MatmulConfig::Dense(_)));
    }

    #[test]
    fn a_cut_k_must_be_covered() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        let p = problem(1, 4096, 4096, Order::Tiles, DType::Bf16);
        for (planes, parts) in [(8, 1), (0, 4), (16, 0), (17, 1), (u32::MAX, u32::MAX)] {
            let c = Nf4MatmulConfig::Stream(StreamConfig { planes, parts });
            assert!(Nf4Matmul::check(&arch, &p, &c).is_err(), "{c:?}");
        }
    }
}
