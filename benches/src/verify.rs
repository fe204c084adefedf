//! Every kernel over its edge shapes, against the reference.

use std::collections::BTreeMap;

use arch::{ArchProfile, Backend, DType, Device};
use cubecl::prelude::CubeKernel;
use kernels::attention::backward::{AttentionBackward, BackwardProblem};
use kernels::attention::decode::{Decode, DecodeProblem};
use kernels::attention::{Attention, AttentionProblem};
use kernels::embed::{Embed, EmbedProblem};
use kernels::matmul::{Matmul, MatmulProblem, Precision};
use kernels::nf4::{
    DequantizeProblem, Nf4Dequantize, Nf4Matmul, Nf4MatmulProblem, Nf4Quantize, QuantizeProblem,
};
use kernels::norm::{Norm, NormProblem};
use kernels::rope::{Rope, RopeProblem};
use oracle::attention_backward::BackwardCase;
use oracle::nf4::{DequantizeCase, ProductCase, QuantizeCase};
use oracle::{
    CheckError, Verdict, attention, attention_backward, decode, embed, matmul, nf4, norm, rope,
};
use record::{Check, Line};
use serde_json::Value;
use tune::{Entry, Kernel, Key, TuneCache};

use crate::emit::emit;
use crate::family::Family;
use crate::{Target, provenance, tuning};

/// One check: a problem with a config, or with what the device lacks for it.
struct Job {
    op: &'static str,
    params: BTreeMap<String, Value>,
    config: Result<Value, String>,
    programs: Option<Box<Programs>>,
    run: Box<Run>,
}

type Programs = dyn Fn(&Device) -> Vec<Box<dyn CubeKernel>> + Sync;
type Run = dyn Fn(&Device) -> Result<Verdict, CheckError>;

impl Job {
    fn name(&self) -> String {
        record::case_name(self.op, &self.params)
    }
}

/// Verifies every kernel; false when a check failed.
pub(crate) fn verify(target: &Target, filter: Option<&str>, configs: bool) -> anyhow::Result<bool> {
    let Some(device) = target.open_or_skip()? else { return Ok(true) };
    emit(&Line::Card(provenance::card(&device)?))?;
    let mut jobs = jobs(device.profile(), &tuning::open_cache()?, configs);
    if let Some(filter) = filter {
        jobs.retain(|job| job.name().contains(filter));
        if jobs.is_empty() {
            anyhow::bail!("no check matches `{filter}`\nhint: names look like `matmul f32 1x1x1`");
        }
    }
    emit(&Line::Plan { cases: jobs.len() })?;
    let programs: Vec<_> = jobs.iter().filter_map(|job| job.programs.as_ref()).collect();
    ahead::compile(&device, programs.len(), |i| programs[i](&device));
    let mut good = true;
    for job in jobs {
        emit(&Line::Begin { case: job.name() })?;
        let config = match job.config.clone() {
            Ok(config) => config,
            Err(reason) => {
                emit(&Line::Skip { case: job.name(), reason })?;
                continue;
            }
        };
        let mut line = Check {
            op: job.op.to_owned(),
            params: job.params.clone(),
            backend: device.backend().to_string(),
            config: Some(config),
            max_err: None,
            tolerance: None,
            passed: false,
            error: None,
            digest: None,
        };
        match (job.run)(&device) {
            Ok(verdict) => {
                line.max_err = Some(verdict.comparison.max_err);
                line.tolerance = Some(verdict.comparison.tolerance);
                line.passed = verdict.comparison.passed;
                line.digest = Some(format!("{:016x}", verdict.digest));
                if !line.passed {
                    line.error = Some(verdict.comparison.to_string());
                }
            }
            Err(e) => line.error = Some(e.to_string()),
        }
        good &= line.passed;
        emit(&Line::Check(line))?;
    }
    Ok(good)
}

/// A kernel family that is verified.
trait Verified: Family {
    /// A problem with its inputs.
    type Case: Clone + 'static;

    /// What splits the cases: configs measured for one kind are tried on that kind only.
    type Kind: Copy + PartialEq;

    fn kinds() -> Vec<Self::Kind>;
    fn kind(problem: &Self::Problem) -> Self::Kind;
    fn edge_cases(kind: Self::Kind, backend: Backend) -> Vec<Self::Case>;
    fn config_cases(kind: Self::Kind) -> Vec<Self::Case>;
    fn problem(case: &Self::Case) -> &Self::Problem;
    fn params(case: &Self::Case) -> BTreeMap<String, Value>;
    fn run(
        device: &Device,
        case: &Self::Case,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError>;
}

impl Verified for Matmul {
    type Case = matmul::EdgeCase;
    type Kind = Precision;

    fn kinds() -> Vec<Precision> {
        Precision::ALL.to_vec()
    }

    fn kind(problem: &MatmulProblem) -> Precision {
        problem.precision
    }

    fn edge_cases(kind: Precision, _backend: Backend) -> Vec<matmul::EdgeCase> {
        matmul::edge_cases(kind)
    }

    fn config_cases(kind: Precision) -> Vec<matmul::EdgeCase> {
        matmul::config_cases(kind)
    }

    fn problem(case: &matmul::EdgeCase) -> &MatmulProblem {
        &case.problem
    }

    fn params(case: &matmul::EdgeCase) -> BTreeMap<String, Value> {
        let p = &case.problem;
        let mut params = <Self as Family>::params(p);
        if matches!(case.inputs, matmul::Inputs::Special(_)) {
            params.insert("inputs".to_owned(), "inf+nan".into());
        }
        let dense =
            MatmulProblem::dense(1, [p.m, p.n, p.k], [p.lhs.layout, p.rhs.layout], p.precision);
        if p.batch() == 1 && dense.is_ok_and(|d| d.lhs != p.lhs || d.rhs != p.rhs) {
            params.insert("view".to_owned(), format!("{}+{}", p.lhs.stride, p.lhs.start).into());
        }
        if let Some(shares) = case.shares() {
            params.insert("shares".to_owned(), shares.name().into());
        } else if p.batch() > 1 && (p.batches.lhs.1 == 0 || p.batches.rhs.1 == 0) {
            params.insert("repeat".to_owned(), true.into());
        }
        params
    }

    fn run(
        device: &Device,
        case: &matmul::EdgeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        matmul::check(device, case, config)
    }
}

impl Verified for Attention {
    type Case = attention::EdgeCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &AttentionProblem) -> DType {
        problem.dtype
    }

    fn edge_cases(kind: DType, backend: Backend) -> Vec<attention::EdgeCase> {
        attention::edge_cases(kind, backend)
    }

    fn config_cases(kind: DType) -> Vec<attention::EdgeCase> {
        attention::config_cases(kind)
    }

    fn problem(case: &attention::EdgeCase) -> &AttentionProblem {
        &case.problem
    }

    fn params(case: &attention::EdgeCase) -> BTreeMap<String, Value> {
        let p = &case.problem;
        let mut params = <Self as Family>::params(p);
        // Cases that differ in more than sizes and rules are told apart by their seed.
        params.insert("seed".to_owned(), case.seed.into());
        if case.inputs != attention::Inputs::Normal {
            let inputs = format!("{:?}", case.inputs).to_lowercase();
            params.insert("inputs".to_owned(), inputs.into());
        }
        params
    }

    fn run(
        device: &Device,
        case: &attention::EdgeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        attention::check(device, case, config)
    }
}

impl Verified for AttentionBackward {
    type Case = BackwardCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        <Attention as Verified>::kinds()
    }

    fn kind(problem: &BackwardProblem) -> DType {
        problem.forward.dtype
    }

    fn edge_cases(kind: DType, backend: Backend) -> Vec<BackwardCase> {
        attention_backward::edge_cases(kind, backend)
    }

    fn config_cases(kind: DType) -> Vec<BackwardCase> {
        attention_backward::config_cases(kind)
    }

    fn problem(case: &BackwardCase) -> &BackwardProblem {
        &case.problem
    }

    fn params(case: &BackwardCase) -> BTreeMap<String, Value> {
        <Attention as Verified>::params(&case.forward)
    }

    fn run(
        device: &Device,
        case: &BackwardCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        attention_backward::check(device, case, config)
    }
}

impl Verified for Decode {
    type Case = decode::EdgeCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &DecodeProblem) -> DType {
        problem.dtype
    }

    fn edge_cases(kind: DType, _backend: Backend) -> Vec<decode::EdgeCase> {
        decode::edge_cases(kind)
    }

    fn config_cases(kind: DType) -> Vec<decode::EdgeCase> {
        decode::config_cases(kind)
    }

    fn problem(case: &decode::EdgeCase) -> &DecodeProblem {
        &case.problem
    }

    fn params(case: &decode::EdgeCase) -> BTreeMap<String, Value> {
        let mut params = <Self as Family>::params(&case.problem);
        // Cases that differ in more than sizes and rules are told apart by their seed.
        params.insert("seed".to_owned(), case.seed.into());
        params
    }

    fn run(
        device: &Device,
        case: &decode::EdgeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        decode::check(device, case, config)
    }
}

impl Verified for Nf4Dequantize {
    type Case = DequantizeCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &DequantizeProblem) -> DType {
        problem.out
    }

    fn edge_cases(kind: DType, _backend: Backend) -> Vec<DequantizeCase> {
        nf4::dequantize_cases(kind)
    }

    fn config_cases(kind: DType) -> Vec<DequantizeCase> {
        nf4::dequantize_cases(kind).into_iter().skip(1).step_by(11).collect()
    }

    fn problem(case: &DequantizeCase) -> &DequantizeProblem {
        &case.problem
    }

    fn params(case: &DequantizeCase) -> BTreeMap<String, Value> {
        let mut params = <Self as Family>::params(&case.problem);
        params.insert("code".to_owned(), case.code_name().into());
        params
    }

    fn run(
        device: &Device,
        case: &DequantizeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        nf4::check_dequantize(device, case, config)
    }
}

impl Verified for Nf4Matmul {
    type Case = ProductCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &Nf4MatmulProblem) -> DType {
        problem.dtype
    }

    fn edge_cases(kind: DType, _backend: Backend) -> Vec<ProductCase> {
        nf4::product_cases(kind)
    }

    fn config_cases(kind: DType) -> Vec<ProductCase> {
        nf4::product_config_cases(kind)
    }

    fn problem(case: &ProductCase) -> &Nf4MatmulProblem {
        &case.problem
    }

    fn params(case: &ProductCase) -> BTreeMap<String, Value> {
        let mut params = <Self as Family>::params(&case.problem);
        params.insert("code".to_owned(), case.code_name().into());
        params
    }

    fn run(
        device: &Device,
        case: &ProductCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        nf4::check(device, case, config)
    }
}

impl Verified for Nf4Quantize {
    type Case = QuantizeCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &QuantizeProblem) -> DType {
        problem.dtype
    }

    fn edge_cases(kind: DType, _backend: Backend) -> Vec<QuantizeCase> {
        nf4::quantize_cases(kind)
    }

    fn config_cases(kind: DType) -> Vec<QuantizeCase> {
        nf4::quantize_cases(kind).into_iter().skip(3).step_by(9).collect()
    }

    fn problem(case: &QuantizeCase) -> &QuantizeProblem {
        &case.problem
    }

    fn params(case: &QuantizeCase) -> BTreeMap<String, Value> {
        <Self as Family>::params(&case.problem)
    }

    fn run(
        device: &Device,
        case: &QuantizeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        nf4::check_quantize(device, case, config)
    }
}

impl Verified for Norm {
    type Case = norm::EdgeCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &NormProblem) -> DType {
        problem.dtype
    }

    fn edge_cases(kind: DType, _backend: Backend) -> Vec<norm::EdgeCase> {
        norm::edge_cases(kind)
    }

    fn config_cases(kind: DType) -> Vec<norm::EdgeCase> {
        norm::config_cases(kind)
    }

    fn problem(case: &norm::EdgeCase) -> &NormProblem {
        &case.problem
    }

    fn params(case: &norm::EdgeCase) -> BTreeMap<String, Value> {
        let mut params = <Self as Family>::params(&case.problem);
        if case.inputs != norm::Inputs::Normal {
            let inputs = format!("{:?}", case.inputs).to_lowercase();
            params.insert("inputs".to_owned(), inputs.into());
        }
        params
    }

    fn run(
        device: &Device,
        case: &norm::EdgeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        norm::check(device, case, config)
    }
}

impl Verified for Rope {
    type Case = rope::EdgeCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &RopeProblem) -> DType {
        problem.dtype
    }

    fn edge_cases(kind: DType, _backend: Backend) -> Vec<rope::EdgeCase> {
        rope::edge_cases(kind)
    }

    fn config_cases(kind: DType) -> Vec<rope::EdgeCase> {
        rope::config_cases(kind)
    }

    fn problem(case: &rope::EdgeCase) -> &RopeProblem {
        &case.problem
    }

    fn params(case: &rope::EdgeCase) -> BTreeMap<String, Value> {
        let mut params = <Self as Family>::params(&case.problem);
        // Cases that differ in where sequences are, and in their caches, are told apart by their seed.
        params.insert("seed".to_owned(), case.seed.into());
        params
    }

    fn run(
        device: &Device,
        case: &rope::EdgeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        rope::check(device, case, config)
    }
}

impl Verified for Embed {
    type Case = embed::EdgeCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &EmbedProblem) -> DType {
        problem.dtype
    }

    fn edge_cases(kind: DType, _backend: Backend) -> Vec<embed::EdgeCase> {
        embed::edge_cases(kind)
    }

    fn config_cases(kind: DType) -> Vec<embed::EdgeCase> {
        embed::config_cases(kind)
    }

    fn problem(case: &embed::EdgeCase) -> &EmbedProblem {
        &case.problem
    }

    fn params(case: &embed::EdgeCase) -> BTreeMap<String, Value> {
        let mut params = <Self as Family>::params(&case.problem);
        params.insert("past".to_owned(), case.past.into());
        params
    }

    fn run(
        device: &Device,
        case: &embed::EdgeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        embed::check(device, case, config)
    }
}

fn jobs(arch: &ArchProfile, cache: &TuneCache, configs: bool) -> Vec<Job> {
    let mut jobs = jobs_of::<Matmul>(arch, cache, configs);
    jobs.extend(jobs_of::<Attention>(arch, cache, configs));
    jobs.extend(jobs_of::<AttentionBackward>(arch, cache, configs));
    jobs.extend(jobs_of::<Decode>(arch, cache, configs));
    jobs.extend(jobs_of::<Nf4Dequantize>(arch, cache, configs));
    jobs.extend(jobs_of::<Nf4Matmul>(arch, cache, configs));
    jobs.extend(jobs_of::<Nf4Quantize>(arch, cache, configs));
    jobs.extend(jobs_of::<Embed>(arch, cache, configs));
    jobs.extend(jobs_of::<Norm>(arch, cache, configs));
    jobs.extend(jobs_of::<Rope>(arch, cache, configs));
    jobs
}

/// What runs on a device: every edge case with the config that it gets unmeasured and the one that was
/// measured for it, then fewer cases with every measured config and, with `configs`, every candidate.
fn jobs_of<K: Verified>(arch: &ArchProfile, cache: &TuneCache, configs: bool) -> Vec<Job> {
    let mut jobs = Vec::new();
    let tuned = tuned::<K>(arch, cache);
    for kind in K::kinds() {
        for case in K::edge_cases(kind, arch.backend) {
            let problem = K::problem(&case);
            let first = K::candidates(arch, problem).into_iter().take(1);
            let key = Key::of::<K>(&arch.id, problem);
            let known = tuned.iter().filter(|(of, ..)| **of == key).map(|(.., config)| *config);
            let few = feasible::<K>(arch, problem, first.chain(known));
            if few.is_empty() {
                let why = K::simplest(arch, problem).err();
                let why = why.map_or_else(|| "no config fits".to_owned(), |why| why.to_string());
                jobs.push(job::<K>(&case, Err(why)));
            }
            jobs.extend(few.into_iter().map(|config| job::<K>(&case, Ok(config))));
        }
        for case in K::config_cases(kind) {
            let problem = K::problem(&case);
            let known = tuned.iter().filter(|(_, of, _)| *of == kind);
            let others = if configs { K::candidates(arch, problem) } else { Vec::new() };
            let all = known.map(|(.., config)| *config).chain(others);
            let many = feasible::<K>(arch, problem, all);
            jobs.extend(many.into_iter().map(|config| job::<K>(&case, Ok(config))));
        }
    }
    jobs
}

fn job<K: Verified>(case: &K::Case, config: Result<K::Config, String>) -> Job {
    let (of, problem) = (case.clone(), K::problem(case).clone());
    let plain = |config: &K::Config| serde_json::to_value(config).expect("a config is plain data");
    Job {
        op: K::NAME,
        params: <K as Verified>::params(case),
        config: config.as_ref().map(plain).map_err(String::clone),
        programs: config.as_ref().ok().copied().map(|config| -> Box<Programs> {
            Box::new(move |device| {
                let client = device.client();
                let (properties, target) =
                    (client.properties_shared(), client.target_properties_shared());
                K::programs(device.profile(), &problem, &config, &properties, &target)
            })
        }),
        run: Box::new(move |device| match &config {
            Ok(config) => K::run(device, &of, config),
            Err(why) => Err(CheckError::Kernel(why.clone())),
        }),
    }
}

/// Those that can run `problem`, each once, in their order.
fn feasible<K: Kernel>(
    arch: &ArchProfile,
    problem: &K::Problem,
    all: impl Iterator<Item = K::Config>,
) -> Vec<K::Config> {
    let mut each = Vec::new();
    for config in all {
        if !each.contains(&config) && K::check(arch, problem, &config).is_ok() {
            each.push(config);
        }
    }
    each
}

/// The configs that were measured best on this architecture, here or before shipping, with the kind of
/// each. One that this version cannot read is named on standard error.
fn tuned<'a, K: Verified>(
    arch: &ArchProfile,
    cache: &'a TuneCache,
) -> Vec<(&'a Key, K::Kind, K::Config)> {
    let ours =
        |key: &Key| key.kernel == K::NAME && key.version == K::VERSION && key.arch_id == arch.id;
    let read = |entry: &'a Entry| {
        let problem: K::Problem = serde_json::from_value(entry.problem.clone())?;
        Ok((&entry.key, K::kind(&problem), serde_json::from_value(entry.config.clone())?))
    };
    let entries = cache.entries().map(|(entry, _)| entry).filter(|entry| ours(&entry.key));
    entries
        .filter_map(|entry| {
            let known: serde_json::Result<_> = read(entry);
            known.inspect_err(|e| eprintln!("{}: ignored: {e}", entry.key)).ok()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_configs_are_verified_where_they_were_measured() {
        let h200 = ArchProfile::recorded("h200").expect("recorded");
        let rtx4090 = ArchProfile::recorded("rtx4090").expect("recorded");
        let arch = h200.restrict("rtx4090", &rtx4090);
        let cache = TuneCache::shipped();
        let shipped = tuned::<Matmul>(&arch, &cache);
        assert!(!shipped.is_empty());
        let jobs = jobs(&arch, &cache, false);
        for (key, precision, config) in shipped {
            let config = serde_json::to_value(config).expect("plain data");
            let runs = |job: &Job| {
                job.params["dtype"] == precision.name() && job.config.as_ref() == Ok(&config)
            };
            assert!(jobs.iter().any(runs), "{key}: {config}");
        }
        assert!(tuned::<Matmul>(&rtx4090, &cache).is_empty(), "nothing was measured there");
        assert!(jobs.iter().any(|job| job.op == "attention"));
        assert!(jobs.iter().any(|job| job.op == Decode::NAME));
    }

    #[test]
    fn what_cannot_be_served_is_skipped_for_its_reason() {
        let rtx4090 = ArchProfile::recorded("rtx4090").expect("recorded");
        let mut arch = ArchProfile { backend: Backend::WebGpu, ..rtx4090 };
        arch.mma.clear();
        arch.dtypes.remove(&DType::Bf16);
        let jobs = jobs(&arch, &TuneCache::default(), false);
        let why = |dtype: &str| {
            let of = jobs.iter().filter(|job| job.params["dtype"] == dtype && job.op == "matmul");
            of.filter_map(|job| job.config.clone().err()).next().unwrap_or_default()
        };
        assert_eq!(why("bf16"), "needs bf16 buffers, which the device lacks");
        assert_eq!(why("tf32"), "needs tf32 matrix instructions, which the device lacks");
        assert_eq!(why("f16acc16"), "needs f16acc16 matrix instructions, which the device lacks");
        assert_eq!(why("f32"), "");
    }
}
