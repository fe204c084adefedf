//! Checks optimizer steps and the norm of a gradient against their references.

use arch::{Backend, DType, Device};
use cubecl::prelude::CubeElement;
use cubecl::server::Handle;
use kernels::matmul::Precision;
use kernels::optimizer::{
    AdamW, AdamWConfig, AdamWOperands, AdamWProblem, BLOCK, BlockBuffers, CONTROL, Control,
    Moments, Rule, Scalars, Squares, SquaresConfig, SquaresOperands, SquaresProblem, signed_map,
    unsigned_map,
};
use reference::{Comparison, Distribution, Parameters, fill};
use serde_json::Value;
use tune::{Kernel, Queue};

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, guarded, intact, kernel_error, read, reference_dtype, scratch_of,
    window,
};
use crate::kernel::{KernelSuite, Params, insert_rules, params, precision};

/// State before a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inputs {
    /// Moments of earlier steps. The second block has neither moments nor a gradient.
    Later,
    /// The first step: moments of 0.
    First,
    /// A gradient that is not finite: nothing may change.
    Skipped,
}

/// A step to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: AdamWProblem,
    pub inputs: Inputs,
    pub seed: u64,
}

/// Bytes of all buffers that a step changes.
#[derive(Clone, PartialEq)]
struct State {
    weights: Vec<u8>,
    master: Vec<u8>,
    m: Vec<u8>,
    v: Vec<u8>,
    absmax: Vec<u8>,
}

impl State {
    /// Reads the parameters of `p`, the first of `all`.
    fn read(
        device: &Device,
        p: &AdamWProblem,
        all: u64,
        of: &AdamWOperands,
    ) -> Result<Self, CheckError> {
        let len = p.len as usize;
        let moment = moment_bytes(p);
        let part = |handle: Option<&Handle>, bytes: usize| match handle {
            Some(handle) => read(device, &window(handle, 0, bytes), bytes),
            None => Ok(Vec::new()),
        };
        let (own, blocks) = (4 * len / BLOCK as usize, 4 * (all / u64::from(BLOCK)) as usize);
        let mut absmax = Vec::new();
        if let Some(BlockBuffers { absmax: both, .. }) = &of.blocks {
            for start in [0, blocks] {
                absmax.extend(read(device, &window(both, start, own), own)?);
            }
        }
        Ok(Self {
            weights: read(device, &of.weights, len * p.weights.size())?,
            master: part(of.master.as_ref(), 4 * len)?,
            m: part(of.m.as_ref(), moment)?,
            v: part(of.v.as_ref(), moment)?,
            absmax,
        })
    }

    fn upload(&self, device: &Device, p: &AdamWProblem, given: &Given) -> AdamWOperands {
        let all = |bytes: &[u8]| guarded(device, bytes);
        AdamWOperands {
            gradient: all(f32::as_bytes(&given.gradient)),
            weights: all(&self.weights),
            master: p.master.then(|| all(&self.master)),
            m: Some(all(&self.m)),
            v: Some(all(&self.v)),
            blocks: (p.moments == Moments::Int8).then(|| BlockBuffers {
                absmax: all(&self.absmax),
                ..BlockBuffers::zeros(&Queue::Device(device), p.len)
            }),
            control: all(f32::as_bytes(&given.control.to_array())),
        }
    }

    /// Returns parameters and moments as numbers.
    fn decoded(&self, p: &AdamWProblem) -> Result<Parameters<f32>, CheckError> {
        let dtype = reference_dtype(p.weights);
        let weights = if p.master { floats(&self.master) } else { dtype.decode(&self.weights)? };
        let absmax = floats(&self.absmax);
        let (of_m, of_v) = absmax.split_at(absmax.len() / 2);
        let moment = |bytes: &[u8], map: [f32; 256], absmax: &[f32]| {
            let value =
                |(i, code): (usize, &u8)| map[usize::from(*code)] * absmax[i / BLOCK as usize];
            Ok::<_, CheckError>(match p.moments {
                Moments::F32 => floats(bytes),
                Moments::Bf16 => reference::DType::Bf16.decode(bytes)?,
                Moments::Int8 => bytes.iter().enumerate().map(value).collect(),
            })
        };
        Ok(Parameters {
            p: weights,
            m: moment(&self.m, signed_map(), of_m)?,
            v: moment(&self.v, unsigned_map(), of_v)?,
        })
    }
}

/// Parameters that are compared after a measurement.
const SAMPLE: u64 = 1 << 18;

/// Gradient and control of a step.
struct Given {
    gradient: Vec<f32>,
    control: Control,
}

impl KernelSuite for AdamW {
    type Case = EdgeCase;

    fn precision(p: &AdamWProblem) -> Precision {
        precision(p.weights)
    }

    fn params(p: &AdamWProblem) -> Params {
        let mut all = params([
            ("elements", p.len.into()),
            ("dtype", p.weights.name().into()),
            ("moments", p.moments.name().into()),
        ]);
        let rule = (p.rule != Rule::AdamW).then(|| p.rule.name());
        insert_rules(&mut all, p.master.then_some("master").into_iter().chain(rule));
        all
    }

    fn problem(case: &EdgeCase) -> &AdamWProblem {
        &case.problem
    }

    fn case_params(case: &EdgeCase) -> Params {
        let mut all = Self::params(&case.problem);
        all.insert("inputs".to_owned(), format!("{:?}", case.inputs).to_lowercase().into());
        all
    }

    /// Each storage of moments, with and without a master; one block, a few, and more than one cube has.
    fn edge_cases(precision: Precision, backend: Backend) -> Vec<EdgeCase> {
        // A CPU's single unit takes long.
        let long = if backend == Backend::Cpu { 4096 } else { 262_144 };
        let mut cases = Vec::new();
        for moments in Moments::ALL {
            for master in masters(precision.storage()) {
                for (len, inputs) in [
                    (256, Inputs::First),
                    (768, Inputs::Later),
                    (1280, Inputs::Skipped),
                    (long + 512, Inputs::Later),
                ] {
                    let problem = problem(len, precision.storage(), *master, moments);
                    cases.push(EdgeCase { problem, inputs, seed: 31_000 + cases.len() as u64 });
                }
            }
        }
        for (len, inputs) in
            [(256, Inputs::First), (long + 512, Inputs::Later), (1280, Inputs::Skipped)]
        {
            for problem in of_muon(len, precision.storage()) {
                cases.push(EdgeCase { problem, inputs, seed: 31_500 + cases.len() as u64 });
            }
        }
        cases
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        let (dtype, inputs) = (precision.storage(), Inputs::Later);
        let case = |moments| EdgeCase {
            problem: problem(2048, dtype, masters(dtype)[0], moments),
            inputs,
            seed: 31_900,
        };
        Moments::ALL.map(case).into()
    }

    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &AdamWConfig,
    ) -> Result<Verdict, CheckError> {
        let (before, given) = inputs(case)?;
        let run = || {
            let operands = before.upload(device, &case.problem, &given);
            Self::launch(&Queue::Device(device), &case.problem, config, &operands, None);
            let after = State::read(device, &case.problem, case.problem.len, &operands)?;
            let blocks = operands.blocks.as_ref().map(|blocks| &blocks.absmax);
            let written = [&operands.weights].into_iter();
            written
                .chain(&operands.m)
                .chain(&operands.v)
                .chain(&operands.master)
                .chain(blocks)
                .try_for_each(|buffer| intact(device, buffer))?;
            Ok::<_, CheckError>(after)
        };
        let after = run()?;
        if run()? != after {
            return Err(kernel_error("two launches differ"));
        }
        if case.inputs == Inputs::Skipped && after != before {
            return Err(kernel_error("a gradient that is not finite changed the state"));
        }
        if case.inputs == Inputs::Skipped {
            let comparison = Comparison::exact(&[], &[])?;
            return Ok(Verdict { comparison, digest: fnv1a(&after.weights) });
        }
        verdict(&case.problem, &before, &after, &given)
    }

    /// Steps once more, because the state before the measured steps is gone, and compares the first parameters.
    fn verify_operands(
        device: &Device,
        p: &AdamWProblem,
        operands: &AdamWOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let config = Self::baseline(device.profile(), p).map_err(kernel_error)?;
        let control = floats(&read(device, &operands.control, 4 * CONTROL)?);
        let control: [f32; CONTROL] = control.try_into().map_err(kernel_error)?;
        let first = AdamWProblem { len: p.len.min(SAMPLE), ..*p };
        let part = |handle: &Handle, bytes: usize| window(handle, 0, bytes);
        let given = Given {
            gradient: floats(&read(
                device,
                &part(&operands.gradient, 4 * first.len as usize),
                4 * first.len as usize,
            )?),
            control: Control::from_array(control),
        };
        let state = || State::read(device, &first, p.len, operands);
        let before = state()?;
        Self::launch(&Queue::Device(device), p, &config, operands, None);
        verdict(&first, &before, &state()?, &given)
    }

    /// The parameters of GPT-2, and a sixteenth of an 8B model's.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<AdamWProblem>> {
        let case =
            |len, dtype, master, moments| BenchCase::alone(problem(len, dtype, master, moments));
        let (bf16, len) = (DType::Bf16, 124_475_904);
        match (suite, scale) {
            (Suite::Quick | Suite::Documents, _) => Vec::new(),
            (_, Scale::Host) => vec![case(1 << 20, DType::F32, false, Moments::F32)],
            (_, Scale::Gpu) => vec![
                case(len, DType::F32, false, Moments::F32),
                case(len, bf16, true, Moments::F32),
                case(len, bf16, false, Moments::Bf16),
                case(len, bf16, false, Moments::Int8),
                case(len, bf16, true, Moments::Int8),
                case(1 << 29, bf16, false, Moments::Int8),
            ]
            .into_iter()
            .chain(of_muon(len, bf16).into_iter().map(BenchCase::alone))
            .collect(),
        }
    }

    fn torch_name(p: &AdamWProblem) -> &'static str {
        if p.moments == Moments::Int8 { "bitsandbytes" } else { "torch" }
    }

    fn torch(p: &AdamWProblem) -> Option<Value> {
        let (len, dtype) = (p.len, p.weights.name());
        let fits = match p.moments {
            Moments::F32 => p.rule == Rule::AdamW && p.weights == DType::F32 && !p.master,
            Moments::Int8 => p.weights == DType::Bf16 && !p.master,
            Moments::Bf16 => false,
        };
        let moments = p.moments.name();
        fits.then(|| serde_json::json!({ "op": Self::NAME, "elements": len, "dtype": dtype, "moments": moments }))
    }

    fn instances() -> Vec<InstanceCase<AdamWProblem>> {
        let mut cases = Vec::new();
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            for moments in Moments::ALL {
                for master in masters(dtype) {
                    let problem = problem(1 << 20, dtype, *master, moments);
                    cases.push(InstanceCase { problem, max_candidates: 1, clean: 1 });
                }
            }
            let muon = of_muon(1 << 20, dtype).into_iter();
            cases.extend(muon.map(|problem| InstanceCase { problem, max_candidates: 1, clean: 1 }));
        }
        cases
    }
}

/// Returns the choices of a master for weights of this type.
const fn masters(dtype: DType) -> &'static [bool] {
    match dtype {
        DType::F16 => &[true],
        DType::Bf16 => &[true, false],
        _ => &[false],
    }
}

const fn moment_bytes(p: &AdamWProblem) -> usize {
    p.len as usize
        * match p.moments {
            Moments::F32 => 4,
            Moments::Bf16 => 2,
            Moments::Int8 => 1,
        }
}

fn inputs(case: &EdgeCase) -> Result<(State, Given), CheckError> {
    let p = &case.problem;
    let len = p.len as usize;
    let normal = |salt| fill(8 * case.seed + salt, len, Distribution::Normal);
    let dtype = reference_dtype(p.weights);
    let mut gradient = normal(0);
    let first = case.inputs == Inputs::First;
    let silent = |i: usize| first || (i / BLOCK as usize == 1);
    let mut m: Vec<f32> = normal(1).iter().map(|x| 0.1 * x).collect();
    let mut v: Vec<f32> = normal(2).iter().map(|x| 0.01 * x * x).collect();
    for i in 0..len {
        if silent(i) {
            (m[i], v[i]) = (0.0, 0.0);
        }
        if i / BLOCK as usize == 1 {
            gradient[i] = 0.0;
        }
    }
    let bytes = |values: &[f32]| f32::as_bytes(values).to_vec();
    let mut absmax = Vec::new();
    let mut moment = |values: &[f32], map: [f32; 256]| match p.moments {
        Moments::F32 => bytes(values),
        Moments::Bf16 => reference::DType::Bf16.encode(values),
        Moments::Int8 => {
            let mut codes = Vec::with_capacity(len);
            for block in values.chunks(BLOCK as usize) {
                let top = block.iter().fold(0.0f32, |top, x| top.max(x.abs()));
                absmax.push(top);
                codes.extend(block.iter().map(|x| {
                    let near = |i: &usize| f64::from((map[*i] * top - x).abs());
                    (0..256).min_by(|a, b| near(a).total_cmp(&near(b))).unwrap_or(0) as u8
                }));
            }
            codes
        }
    };
    let (m, v) = (moment(&m, signed_map()), moment(&v, unsigned_map()));
    let master = normal(3);
    let state = State {
        weights: dtype.encode(&master),
        master: if p.master { bytes(&master) } else { Vec::new() },
        m,
        v,
        absmax: bytes(&absmax),
    };
    let t = if first { 1 } else { 7 };
    let correction = |beta: f64| (1.0 - beta.powi(t)) as f32;
    let control = Control {
        factor: 0.37,
        finite: if case.inputs == Inputs::Skipped { 0.0 } else { 1.0 },
        c1: correction(p.scalars.beta1),
        c2: correction(p.scalars.beta2),
        steps: t as f32,
        ..Control::new(1.0)
    };
    Ok((state, Given { gradient, control }))
}

fn verdict(
    p: &AdamWProblem,
    before: &State,
    after: &State,
    given: &Given,
) -> Result<Verdict, CheckError> {
    let Scalars { learning_rate, beta1, beta2, eps, weight_decay, .. } = p.scalars;
    let rule = reference::AdamW {
        factor: given.control.factor.into(),
        learning_rate: learning_rate.into(),
        beta1,
        beta2,
        eps: eps.into(),
        weight_decay: weight_decay.into(),
        c1: given.control.c1.into(),
        c2: given.control.c2.into(),
        rule: match p.rule {
            Rule::AdamW => reference::Rule::AdamW,
            Rule::Momentum => reference::Rule::Momentum,
            Rule::Descent => reference::Rule::Descent,
        },
    };
    let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<_>>();
    let Parameters { p: old, m, v } = before.decoded(p)?;
    let old = Parameters { p: wide(old), m: wide(m), v: wide(v) };
    let new = after.decoded(p)?;
    let exact = rule.run(&given.gradient, &old)?;
    let f32 = reference::DType::F32;
    let stored = if p.rule == Rule::Momentum { reference_dtype(p.weights) } else { f32 };
    let naive = rule.check(&given.gradient, &old, &new, [stored, f32, f32])?;
    let dtype = reference_dtype(p.weights);
    let mut all = Vec::new();
    match (p.master, p.weights) {
        (true, _) => {
            all.push(naive[0]);
            let rounded: Vec<f32> =
                new.p.iter().map(|x| dtype.round(f64::from(*x)) as f32).collect();
            all.push(Comparison::exact(&dtype.decode(&after.weights)?, &rounded)?);
        }
        (false, DType::Bf16) if p.rule != Rule::Momentum => {
            all.extend(stochastic(&new.p, &exact.p)?);
        }
        (false, _) => all.push(naive[0]),
    }
    match p.moments {
        Moments::F32 => all.extend_from_slice(&naive[1..]),
        Moments::Bf16 => {
            all.extend(stochastic(&new.m, &exact.m)?);
            all.extend(stochastic(&new.v, &exact.v)?);
        }
        Moments::Int8 => {
            let absmax = floats(&after.absmax);
            let (of_m, of_v) = absmax.split_at(absmax.len() / 2);
            all.extend(nearest(&new.m, &exact.m, of_m, &signed_map())?);
            all.extend(nearest(&new.v, &exact.v, of_v, &unsigned_map())?);
        }
    }
    let digest = fnv1a(&[&after.weights[..], &after.m, &after.v, &after.absmax].concat());
    Ok(Verdict { comparison: Comparison::worst(all), digest })
}

/// Checks that each value in bf16 is a neighbour of the exact one, and that many are right on average.
fn stochastic(got: &[f32], exact: &[f64]) -> Result<Vec<Comparison>, CheckError> {
    let ulp = |x: f64| 2f64.powf((x.abs().max(1e-37).log2()).floor() - 7.0);
    let apart: Vec<f32> =
        got.iter().zip(exact).map(|(got, x)| ((f64::from(*got) - x) / ulp(*x)) as f32).collect();
    let mut all = vec![Comparison::within(&apart, &vec![0.0; apart.len()], 1.01)?];
    if apart.len() > 4000 {
        let mean = apart.iter().map(|x| f64::from(*x)).sum::<f64>() / apart.len() as f64;
        // Five standard deviations of a uniform error.
        let bound = 5.0 * 0.5 / (apart.len() as f64).sqrt();
        all.push(Comparison::within(&[mean as f32], &[0.0], bound)?);
    }
    Ok(all)
}

/// Checks that each value is that of the nearest code, except that m keeps its sign.
fn nearest(
    got: &[f32],
    exact: &[f64],
    absmax: &[f32],
    map: &[f32; 256],
) -> Result<Vec<Comparison>, CheckError> {
    let block = BLOCK as usize;
    let tops: Vec<f64> = exact
        .chunks(block)
        .map(|block| block.iter().fold(0.0f64, |top, x| top.max(x.abs())))
        .collect();
    let relative: Vec<f32> = absmax
        .iter()
        .zip(&tops)
        .map(|(own, top)| if *top == 0.0 { *own } else { (f64::from(*own) / top - 1.0) as f32 })
        .collect();
    let excess = |(i, (got, exact)): (usize, (&f32, &f64))| {
        let values = map.iter().map(|value| f64::from(value * absmax[i / block]));
        let signed =
            |value: &f64| *exact == 0.0 || map[0] >= 0.0 || (*value < 0.0) == (*exact < 0.0);
        let best =
            values.filter(signed).map(|value| (value - exact).abs()).fold(f64::MAX, f64::min);
        let far = (f64::from(*got) - exact).abs();
        // Rounding of f32 may decide for either neighbour.
        (far - 1.001 * best - 3e-6 * exact.abs()).max(0.0) as f32
    };
    let excess: Vec<f32> = got.iter().zip(exact).enumerate().map(excess).collect();
    Ok(vec![
        Comparison::within(&relative, &vec![0.0; relative.len()], 1e-5)?,
        Comparison::within(&excess, &vec![0.0; excess.len()], 0.0)?,
    ])
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

fn problem(len: u64, weights: DType, master: bool, moments: Moments) -> AdamWProblem {
    let scalars = Scalars {
        learning_rate: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        seed: 5,
        first: 0,
    };
    let rule = Rule::AdamW;
    AdamWProblem { len, weights, master, moments, scalars, rule }
        .checked()
        .expect("sizes are valid")
}

/// Returns the problems of Muon's elementwise steps for weights of this type.
fn of_muon(len: u64, weights: DType) -> Vec<AdamWProblem> {
    let plain = |master| problem(len, weights, master, Moments::F32);
    let mut all = Vec::new();
    if weights != DType::F16 {
        all.push(AdamWProblem { rule: Rule::Momentum, ..plain(false) });
    }
    let descent = |master: &bool| AdamWProblem { rule: Rule::Descent, ..plain(*master) };
    all.extend(masters(weights).iter().map(descent));
    all.into_iter().map(|own| own.checked().expect("sizes are valid")).collect()
}

/// A norm to verify.
#[derive(Debug, Clone)]
pub struct NormCase {
    pub problem: SquaresProblem,
    /// The gradient has an infinity.
    pub infinite: bool,
    pub seed: u64,
}

impl KernelSuite for Squares {
    type Case = NormCase;

    const PRECISIONS: &'static [Precision] = &[Precision::F32];

    fn precision(_: &SquaresProblem) -> Precision {
        Precision::F32
    }

    fn params(p: &SquaresProblem) -> Params {
        let mut all = params([("elements", p.len.into())]);
        insert_rules(&mut all, p.growth_interval.map(|_| "adaptive_scale"));
        if p.max_norm.is_finite() {
            all.insert("max_norm".to_owned(), f64::from(p.max_norm).into());
        }
        all
    }

    fn problem(case: &NormCase) -> &SquaresProblem {
        &case.problem
    }

    fn case_params(case: &NormCase) -> Params {
        let mut all = Self::params(&case.problem);
        insert_rules(&mut all, case.infinite.then_some("infinite"));
        all
    }

    fn edge_cases(_: Precision, _: Backend) -> Vec<NormCase> {
        let mut cases = Vec::new();
        for len in [4, 256, 1020, 300_000] {
            for (max_norm, growth_interval, infinite) in [
                (1.0, None, false),
                (1e9, Some(1), false),
                (f32::INFINITY, Some(2), false),
                (1.0, Some(2), true),
                (1.0, None, true),
            ] {
                let problem = norm_problem(len, max_norm, growth_interval);
                cases.push(NormCase { problem, infinite, seed: 32_000 + cases.len() as u64 });
            }
        }
        cases
    }

    fn config_cases(_: Precision) -> Vec<NormCase> {
        vec![NormCase { problem: norm_problem(5000, 1.0, None), infinite: false, seed: 32_900 }]
    }

    fn verify(
        device: &Device,
        case: &NormCase,
        config: &SquaresConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let mut gradient = fill(case.seed, p.len as usize, Distribution::Normal);
        if case.infinite {
            gradient[p.len as usize / 2] = f32::INFINITY;
        }
        let before = Control { c1: 0.1, c2: 0.05, steps: 1.0, ..Control::new(1024.0) };
        let scratch = scratch_of::<Self>(device, p, config);
        let run = || {
            let operands = SquaresOperands {
                gradient: guarded(device, f32::as_bytes(&gradient)),
                control: guarded(device, f32::as_bytes(&before.to_array())),
            };
            Self::launch(&Queue::Device(device), p, config, &operands, scratch.as_ref());
            let bytes = read(device, &operands.control, 4 * CONTROL)?;
            intact(device, &operands.control)?;
            Ok::<_, CheckError>(bytes)
        };
        let bytes = run()?;
        if run()? != bytes {
            return Err(kernel_error("two launches differ"));
        }
        scratch.iter().try_for_each(|scratch| intact(device, scratch))?;
        norm_verdict(p, &gradient, before, &floats(&bytes))
    }

    /// Runs once more, because the state before the measured launches is gone.
    fn verify_operands(
        device: &Device,
        p: &SquaresProblem,
        operands: &SquaresOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let config = Self::baseline(device.profile(), p).map_err(kernel_error)?;
        let gradient = floats(&read(device, &operands.gradient, 4 * p.len as usize)?);
        let control = || -> Result<[f32; CONTROL], CheckError> {
            floats(&read(device, &operands.control, 4 * CONTROL)?).try_into().map_err(kernel_error)
        };
        let before = Control::from_array(control()?);
        let scratch = Self::scratch(device, p, &config);
        Self::launch(&Queue::Device(device), p, &config, operands, scratch.as_ref());
        norm_verdict(p, &gradient, before, &control()?)
    }

    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<SquaresProblem>> {
        let case = |len| BenchCase::alone(norm_problem(len, 1.0, None));
        match (suite, scale) {
            (Suite::Quick | Suite::Documents, _) => Vec::new(),
            (_, Scale::Host) => vec![case(1 << 20)],
            (_, Scale::Gpu) => vec![case(124_475_904)],
        }
    }

    fn instances() -> Vec<InstanceCase<SquaresProblem>> {
        let problem = norm_problem(1 << 20, 1.0, None);
        vec![InstanceCase { problem, max_candidates: 1, clean: 1 }]
    }
}

fn norm_problem(len: u64, max_norm: f32, growth_interval: Option<u32>) -> SquaresProblem {
    SquaresProblem { len, max_norm, beta1: 0.9, beta2: 0.95, growth_interval }
}

/// Compares the control after a step with the exact one, each number relative to its size.
fn norm_verdict(
    p: &SquaresProblem,
    gradient: &[f32],
    before: Control,
    after: &[f32],
) -> Result<Verdict, CheckError> {
    let sum = gradient.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>();
    let (finite, scale) = (sum.is_finite(), f64::from(before.scale));
    let norm = sum.sqrt() / scale;
    let factor = (f64::from(p.max_norm) / (norm + 1e-6)).min(1.0) / scale;
    let next = |beta: f64, c: f32| beta * f64::from(c) + (1.0 - beta);
    let good = before.good + 1.0;
    let grows = p.growth_interval.is_some_and(|steps| good >= steps as f32);
    let exact = match finite {
        true => [
            factor,
            1.0,
            next(p.beta1, before.c1),
            next(p.beta2, before.c2),
            f64::from(before.steps) + 1.0,
            if grows { 2.0 * scale } else { scale },
            norm,
            if grows { 0.0 } else { good.into() },
        ],
        false => [
            f64::NAN,
            0.0,
            before.c1.into(),
            before.c2.into(),
            before.steps.into(),
            if p.growth_interval.is_some() { scale / 2.0 } else { scale },
            f64::NAN,
            0.0,
        ],
    };
    let apart = |(got, want): (&f32, &f64)| match *want {
        want if want.is_nan() => 0.0,
        want => {
            (f64::from(*got) - want) as f32
                / (want.abs() as f32).max(1e-30).max(f32::from(want == 0.0))
        }
    };
    let apart: Vec<f32> = after.iter().zip(&exact).map(apart).collect();
    let comparison = Comparison::within(&apart, &[0.0; CONTROL], 2e-6)?;
    Ok(Verdict { comparison, digest: fnv1a(f32::as_bytes(after)) })
}
