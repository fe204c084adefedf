//! Checks group norms against their reference.

use arch::{Backend, DType, Device};
use cubecl::server::Handle;
use kernels::group_norm::{GroupNorm, GroupNormConfig, GroupNormOperands, GroupNormProblem};
use kernels::matmul::{Activation, Precision};
use reference::{Distribution, Special, fill, plant};
use serde_json::{Value, json};
use tune::Kernel;

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, launch_twice, padded, read, reference_dtype, unwritten,
};
use crate::kernel::{KernelSuite, Params, params, precision};
use crate::matmul::reference_activation;

/// Distribution of x.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inputs {
    Normal,
    /// Mean 100: the mean of the squares minus the square of the mean loses every digit.
    Shifted,
    /// A NaN in the first group of the first image.
    Special,
}

/// A group norm to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: GroupNormProblem,
    pub inputs: Inputs,
    pub seed: u64,
}

/// Values of one group norm.
struct Host {
    x: Vec<f32>,
    second: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
    modulation: Option<Vec<f32>>,
}

impl KernelSuite for GroupNorm {
    type Case = EdgeCase;

    fn precision(p: &GroupNormProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &GroupNormProblem) -> Params {
        let mut all = params([
            ("batch", p.batch.into()),
            ("pixels", p.pixels.into()),
            ("channels", p.channels[0].into()),
            ("groups", p.groups.into()),
            ("dtype", p.dtype.name().into()),
        ]);
        let mut insert = |name: &str, value: Value| drop(all.insert(name.to_owned(), value));
        if p.channels[1] > 0 {
            insert("joined", p.channels[1].into());
        }
        if let Some(activation) = p.activation {
            insert("activation", activation.name().into());
        }
        if p.modulation_pitch > 0 {
            insert("modulated", true.into());
        }
        if p.modulation_pitch > 2 * p.width() {
            insert("modulation_pitch", p.modulation_pitch.into());
        }
        all
    }

    fn problem(case: &EdgeCase) -> &GroupNormProblem {
        &case.problem
    }

    fn case_params(case: &EdgeCase) -> Params {
        let mut params = Self::params(&case.problem);
        if case.inputs != Inputs::Normal {
            let inputs = format!("{:?}", case.inputs).to_lowercase();
            params.insert("inputs".to_owned(), inputs.into());
        }
        params
    }

    /// Images of one pixel, groups of one channel and of all, groups across both inputs, images in chunks.
    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<EdgeCase> {
        let dtype = precision.storage();
        let mut cases = Vec::new();
        let mut add = |problem, inputs| {
            let seed = 53_000 + cases.len() as u64;
            cases.push(EdgeCase { problem, inputs, seed });
        };
        for (batch, pixels, channels, groups) in [
            (1, 1, [1, 0], 1),
            (2, 1, [32, 0], 4),
            (3, 7, [6, 0], 3),
            (1, 64, [40, 0], 4),
            (2, 63, [40, 0], 40),
            (1, 100, [320, 0], 32),
            (2, 81, [24, 40], 4),
            (1, 65, [3, 9], 2),
            (2, 1024, [64, 64], 1),
            (1, 4096, [32, 0], 32),
            (1, 2047, [960, 0], 32),
            (1, 16, [2560, 0], 1),
        ] {
            let p = problem(batch, pixels, channels, groups, dtype);
            add(p, Inputs::Normal);
            let activation = Some(Activation::Silu);
            add(GroupNormProblem { activation, ..p }, Inputs::Shifted);
            for more in [0, 24] {
                let modulation_pitch = 2 * p.width() + more;
                add(GroupNormProblem { activation, modulation_pitch, ..p }, Inputs::Normal);
            }
        }
        add(problem(2, 70, [32, 0], 4, dtype), Inputs::Special);
        for activation in Activation::ALL {
            let activation = Some(activation);
            let p = GroupNormProblem { activation, ..problem(1, 9, [16, 0], 2, dtype) };
            add(p, Inputs::Normal);
        }
        cases
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        let dtype = precision.storage();
        let each = [
            (1, 4096, [32, 0], 4),
            (2, 1000, [96, 32], 8),
            (1, 130, [320, 0], 32),
            (3, 200, [60, 60], 4),
        ];
        let cases = each.into_iter().enumerate().map(|(at, (batch, pixels, channels, groups))| {
            let p = problem(batch, pixels, channels, groups, dtype);
            let (activation, modulation_pitch) = (Some(Activation::Silu), 2 * p.width());
            let problem = GroupNormProblem { activation, modulation_pitch, ..p };
            EdgeCase { problem, inputs: Inputs::Shifted, seed: 53_500 + at as u64 }
        });
        cases.collect()
    }

    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &GroupNormConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let dtype = reference_dtype(p.dtype);
        let stored = |values: Vec<f32>| -> Result<Vec<f32>, CheckError> {
            Ok(dtype.decode(&dtype.encode(&values))?)
        };
        let make = |len, salt| stored(fill(8 * case.seed + salt, len, Distribution::Normal));
        let image = |input: usize| {
            let mut x = fill(8 * case.seed + input as u64, p.len(input), Distribution::Normal);
            match case.inputs {
                Inputs::Normal => {}
                Inputs::Shifted => x.iter_mut().for_each(|x| *x += 100.0),
                Inputs::Special => plant(&mut x, dtype, &[(0, Special::Nan)])?,
            }
            stored(x)
        };
        let width = p.width() as usize;
        let host = Host {
            x: image(0)?,
            second: if p.channels[1] > 0 { image(1)? } else { Vec::new() },
            weight: make(width, 2)?,
            bias: make(width, 3)?,
            modulation: (p.modulation_pitch > 0)
                .then(|| make(p.modulation_len(), 4))
                .transpose()?,
        };
        let client = device.client();
        let upload = |values: &[f32]| client.create_from_slice(&padded(&dtype.encode(values)));
        let operands = GroupNormOperands {
            x: upload(&host.x),
            second: (!host.second.is_empty()).then(|| upload(&host.second)),
            weight: upload(&host.weight),
            bias: upload(&host.bias),
            modulation: host.modulation.as_deref().map(upload),
            out: unwritten(device, p.elements() * p.dtype.size()),
        };
        launch_twice::<Self>(device, p, config, &operands, &[&operands.out])?;
        verdict(device, p, &operands, &host)
    }

    fn verify_operands(
        device: &Device,
        p: &GroupNormProblem,
        operands: &GroupNormOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let dtype = reference_dtype(p.dtype);
        let load = |handle: &Handle, len: usize| -> Result<Vec<f32>, CheckError> {
            Ok(dtype.decode(&read(device, handle, len * p.dtype.size())?)?)
        };
        let part = |handle: &Option<Handle>, len| handle.as_ref().map(|h| load(h, len)).transpose();
        let width = p.width() as usize;
        let host = Host {
            x: load(&operands.x, p.len(0))?,
            second: part(&operands.second, p.len(1))?.unwrap_or_default(),
            weight: load(&operands.weight, width)?,
            bias: load(&operands.bias, width)?,
            modulation: part(&operands.modulation, p.modulation_len())?,
        };
        verdict(device, p, operands, &host)
    }

    /// Norms of Stable Diffusion 1.5's U-Net at 64 x 64.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<GroupNormProblem>> {
        let case = |batch, size: u32, channels, dtype| {
            let activation = Some(Activation::Silu);
            let p = problem(batch, size * size, channels, 32, dtype);
            BenchCase::alone(GroupNormProblem { activation, ..p })
        };
        match (suite, scale) {
            (Suite::Quick | Suite::Documents, _) => Vec::new(),
            (_, Scale::Host) => vec![case(1, 32, [64, 0], DType::F32)],
            (_, Scale::Gpu) => {
                let each = [1, 8].into_iter().flat_map(|batch| {
                    [
                        (64, [320, 0]),
                        (64, [640, 320]),
                        (32, [640, 0]),
                        (32, [1280, 640]),
                        (16, [1280, 0]),
                        (8, [1280, 1280]),
                    ]
                    .map(|(size, channels)| case(batch, size, channels, DType::F16))
                });
                each.chain([case(1, 64, [320, 0], DType::F32)]).collect()
            }
        }
    }

    fn torch(p: &GroupNormProblem) -> Option<Value> {
        let plain =
            p.channels[1] == 0 && p.modulation_pitch == 0 && p.activation == Some(Activation::Silu);
        plain.then(|| {
            json!({
                "op": Self::NAME,
                "batch": p.batch,
                "pixels": p.pixels,
                "channels": p.channels[0],
                "groups": p.groups,
                "dtype": p.dtype.name(),
            })
        })
    }

    fn instances() -> Vec<InstanceCase<GroupNormProblem>> {
        let case =
            |problem, max_candidates| InstanceCase { problem, max_candidates, clean: usize::MAX };
        let silu = |p| GroupNormProblem { activation: Some(Activation::Silu), ..p };
        let small = problem(1, 1024, [640, 0], 32, DType::F16);
        vec![
            case(silu(small), usize::MAX),
            case(silu(problem(8, 4096, [640, 320], 32, DType::F16)), 2),
            case(silu(GroupNormProblem { modulation_pitch: 2 * small.width(), ..small }), 2),
            case(problem(1, 4096, [320, 0], 32, DType::Bf16), 2),
            case(silu(problem(1, 4096, [320, 0], 32, DType::F32)), 2),
            case(problem(1, 100, [3, 0], 3, DType::F32), 1),
            case(problem(1, 16, [40_000, 0], 1, DType::F16), 1),
        ]
    }
}

fn verdict(
    device: &Device,
    p: &GroupNormProblem,
    operands: &GroupNormOperands,
    host: &Host,
) -> Result<Verdict, CheckError> {
    let dtype = reference_dtype(p.dtype);
    let bytes = read(device, &operands.out, p.elements() * p.dtype.size())?;
    let norm = reference::GroupNorm {
        batch: p.batch as usize,
        pixels: p.pixels as usize,
        channels: p.width() as usize,
        groups: p.groups as usize,
        eps: p.eps.into(),
        activation: p.activation.map(reference_activation),
    };
    let [first, second] = p.channels.map(|channels| channels as usize);
    let joined: Vec<f32> = match second {
        0 => host.x.clone(),
        _ => {
            let pixels = host.x.chunks(first).zip(host.second.chunks(second));
            pixels.flat_map(|(first, second)| [first, second].concat()).collect()
        }
    };
    let modulation = host.modulation.as_ref().map(|all| {
        let rows = all.chunks(p.modulation_pitch as usize);
        rows.flat_map(|row| &row[..2 * p.width() as usize]).copied().collect::<Vec<_>>()
    });
    let of = reference::GroupNormOperands {
        x: &joined,
        weight: &host.weight,
        bias: &host.bias,
        modulation: modulation.as_deref(),
    };
    let comparison = norm.check(of, &dtype.decode(&bytes)?, dtype)?;
    Ok(Verdict { comparison, digest: fnv1a(&bytes) })
}

fn problem(
    batch: u32,
    pixels: u32,
    channels: [u32; 2],
    groups: u32,
    dtype: DType,
) -> GroupNormProblem {
    let p = GroupNormProblem {
        batch,
        pixels,
        channels,
        groups,
        dtype,
        eps: 1e-5,
        activation: None,
        modulation_pitch: 0,
    };
    p.checked().expect("sizes are valid")
}
