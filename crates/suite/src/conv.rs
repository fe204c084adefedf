//! Checks convolutions against their reference.

use arch::{Backend, Device};
use cubecl::server::Handle;
use kernels::conv::{Conv, ConvConfig, ConvOperands, ConvProblem};
use kernels::matmul::{
    Activation, Constant, Epilogue, EpilogueBuffers, Matmul, Precision, Reading,
};
use reference::{Comparison, Distribution, fill};
use serde_json::{Value, json};
use tune::timing::{self, Effort, TimingError};
use tune::{Kernel, Queue};

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, give_back, launch_twice, padded, read, unwritten, weights, window,
};
use crate::kernel::{KernelSuite, Params, Peers, params};
use crate::matmul::{all_parts, reference_activation, reference_dtype};
use crate::peers;

/// A convolution to verify, on normal inputs.
#[derive(Debug, Clone, Copy)]
pub struct EdgeCase {
    pub problem: ConvProblem,
    pub seed: u64,
}

/// `3x3`, or `3` for equal numbers.
fn pair<T: std::fmt::Display + PartialEq>([down, across]: [T; 2]) -> Value {
    if down == across { down.to_string().into() } else { format!("{down}x{across}").into() }
}

impl KernelSuite for Conv {
    type Case = EdgeCase;

    const PRECISIONS: &'static [Precision] = &Precision::ALL;

    fn precision(p: &ConvProblem) -> Precision {
        p.precision
    }

    fn params(p: &ConvProblem) -> Params {
        let mut all = params([
            ("batch", p.batch.into()),
            ("image", pair(p.image)),
            ("channels", p.channels[0].into()),
            ("filters", p.filters.into()),
            ("taps", pair(p.taps)),
            ("dtype", p.precision.name().into()),
        ]);
        let mut insert = |name: &str, value: Value| drop(all.insert(name.to_owned(), value));
        if p.channels[1] > 0 {
            insert("joined", p.channels[1].into());
        }
        if p.stride != [1, 1] {
            insert("stride", pair(p.stride));
        }
        if p.dilation != [1, 1] {
            insert("dilation", pair(p.dilation));
        }
        if p.padding != [[0, 0]; 2] {
            let [rows, cols] = p.padding;
            let side = |[before, after]: [i32; 2]| match before == after {
                true => before.to_string(),
                false => format!("{before}+{after}"),
            };
            insert("padding", pair([side(rows), side(cols)]));
        }
        if p.groups > 1 {
            insert("groups", p.groups.into());
        }
        match p.reading {
            Reading::Plain => {}
            Reading::Doubled => insert("doubled", true.into()),
            Reading::Spread => insert("transposed", true.into()),
        }
        if p.out != p.precision.storage() {
            insert("out", p.out.name().into());
        }
        if p.bias_pitch > 0 {
            insert("bias_per_image", true.into());
        }
        if p.bias_pitch > p.filters {
            insert("bias_pitch", p.bias_pitch.into());
        }
        let epilogue = p.epilogue.names();
        if !epilogue.is_empty() {
            insert("epilogue", epilogue.join("+").into());
        }
        all
    }

    fn problem(case: &EdgeCase) -> &ConvProblem {
        &case.problem
    }

    fn case_params(case: &EdgeCase) -> Params {
        let mut params = Self::params(&case.problem);
        if is_far(&case.problem) {
            params.insert("extent".to_owned(), extent(&case.problem).into());
        }
        params
    }

    /// Images of one pixel, filters larger than the image, padding beyond the filter, odd channels, steps, groups, two inputs, and
    /// more elements than 31 bits count.
    fn edge_cases(precision: Precision, backend: Backend) -> Vec<EdgeCase> {
        let plain = |batch, image, channels, taps| {
            ConvProblem::new(batch, image, channels, taps, precision)
        };
        let same = |p: ConvProblem| {
            let side = |axis: usize| (p.dilation[axis] * (p.taps[axis] - 1) / 2) as i32;
            ConvProblem { padding: [[side(0); 2], [side(1); 2]], ..p }
        };
        let base = plain(2, [9, 7], [16, 24], [3, 3]);
        let all = all_parts(Some(Activation::Silu));
        let bias = Epilogue { bias: true, ..Epilogue::default() };
        let mut problems = vec![
            same(base),
            same(plain(1, [1, 1], [8, 8], [3, 3])),
            same(plain(1, [2, 3], [8, 16], [5, 7])),
            same(plain(3, [5, 5], [1, 7], [3, 3])),
            same(plain(1, [6, 6], [3, 40], [3, 3])),
            same(plain(1, [6, 6], [7, 3], [3, 3])),
            same(plain(1, [8, 8], [40, 32], [3, 3])),
            same(plain(1, [33, 17], [64, 72], [3, 3])),
            plain(2, [9, 8], [40, 24], [1, 1]),
            ConvProblem { stride: [2, 2], ..plain(2, [9, 8], [40, 24], [1, 1]) },
            ConvProblem { padding: [[4, 5], [6, 3]], ..base },
            ConvProblem { padding: [[-1, -2], [1, -1]], ..base },
            ConvProblem { padding: [[0, 1], [0, 1]], stride: [2, 2], ..base },
            ConvProblem { stride: [3, 2], ..same(base) },
            same(ConvProblem { dilation: [2, 5], image: [12, 13], ..base }),
            ConvProblem { groups: 2, ..same(base) },
            ConvProblem { groups: 8, ..same(base) },
            ConvProblem { groups: 16, filters: 16, ..same(base) },
            ConvProblem { groups: 16, filters: 32, stride: [2, 1], ..same(base) },
            ConvProblem { channels: [16, 8], ..same(base) },
            ConvProblem { channels: [24, 40], image: [6, 11], ..same(base) },
            ConvProblem { channels: [3, 5], ..same(base) },
            ConvProblem { channels: [16, 8], ..plain(2, [9, 8], [16, 24], [1, 1]) },
            ConvProblem { reading: Reading::Doubled, ..same(base) },
            ConvProblem { reading: Reading::Doubled, stride: [2, 1], ..same(base) },
            ConvProblem { reading: Reading::Doubled, channels: [8, 8], ..same(base) },
            ConvProblem { reading: Reading::Spread, ..base },
            ConvProblem { reading: Reading::Spread, stride: [2, 3], ..same(base) },
            ConvProblem { reading: Reading::Spread, stride: [2, 2], taps: [4, 4], ..same(base) },
            ConvProblem {
                reading: Reading::Spread,
                stride: [2, 2],
                padding: [[1, 0], [0, -1]],
                ..base
            },
            ConvProblem { reading: Reading::Spread, dilation: [2, 1], groups: 4, ..base },
            // In one dimension.
            plain(2, [1, 50], [16, 24], [1, 5]),
            ConvProblem {
                stride: [1, 3],
                padding: [[0, 0], [2, 4]],
                ..plain(1, [1, 100], [5, 9], [1, 7])
            },
            plain(1, [1, 70_001], [8, 8], [1, 2]),
            // Split k.
            same(plain(1, [4, 4], [512, 24], [3, 3])),
        ];
        let other = match precision.storage() {
            arch::DType::F32 => arch::DType::F16,
            _ => arch::DType::F32,
        };
        let relu = Some(Activation::Relu);
        let last = Epilogue { activation: relu, activation_last: true, ..all };
        for p in [
            same(base),
            same(plain(1, [4, 4], [512, 24], [3, 3])),
            ConvProblem { groups: 2, ..same(base) },
            ConvProblem { groups: 8, ..same(base) },
        ] {
            problems.extend([
                ConvProblem { epilogue: bias, ..p },
                ConvProblem { epilogue: all, ..p },
                ConvProblem { epilogue: last, ..p },
                ConvProblem { out: other, ..p },
            ]);
            if p.groups == 1 {
                let p = ConvProblem { epilogue: all, batch: 3, ..p };
                problems.push(ConvProblem { bias_pitch: p.filters, ..p });
                problems.push(ConvProblem { bias_pitch: p.filters + 40, ..p });
            }
        }
        if matches!(precision, Precision::F32 | Precision::F16) {
            problems.extend(Activation::ALL.map(|activation| {
                let factor = Some(Constant::new(0.7));
                ConvProblem {
                    epilogue: Epilogue { factor, ..all_parts(Some(activation)) },
                    ..same(base)
                }
            }));
        }
        if precision == Precision::F16 && backend == Backend::Cuda {
            // 16400 x 2048 pixels: 64 channels of them are 2^31.
            let wide = |channels| ConvProblem {
                padding: [[0, 0], [1, 1]],
                ..plain(1, [16_400, 2048], channels, [1, 3])
            };
            problems.extend([wide([64, 8]), wide([8, 64])]);
        }
        cases(problems, 50_000)
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        let plain = |batch, image, channels, taps| ConvProblem {
            padding: [[1, 1], [1, 1]],
            epilogue: all_parts(Some(Activation::Silu)),
            ..ConvProblem::new(batch, image, channels, taps, precision)
        };
        let base = plain(2, [32, 24], [64, 128], [3, 3]);
        let problems = vec![
            base,
            ConvProblem { channels: [40, 24], ..base },
            ConvProblem { channels: [4, 0], image: [16, 16], ..base },
            ConvProblem { channels: [5, 0], image: [16, 16], ..base },
            ConvProblem { stride: [2, 2], filters: 72, ..base },
            ConvProblem { reading: Reading::Doubled, image: [9, 7], ..base },
            ConvProblem { reading: Reading::Spread, stride: [2, 2], image: [9, 7], ..base },
            ConvProblem { groups: 2, ..base },
            ConvProblem { groups: 64, filters: 64, ..base },
            plain(1, [8, 8], [640, 64], [3, 3]),
            ConvProblem { bias_pitch: 136, ..base },
        ];
        cases(problems, 51_000)
    }

    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &ConvConfig,
    ) -> Result<Verdict, CheckError> {
        let EdgeCase { problem: p, seed } = case;
        if is_far(p) {
            return check_far(device, p, *seed, config);
        }
        let [x, second, filters, out] = p.lens().map(|len| len as usize);
        let (stored, result) = (reference_dtype(p.precision), result_dtype(p));
        let make =
            |len: usize, dtype: reference::DType, salt: u64| -> Result<Vec<f32>, CheckError> {
                let values = fill(8 * seed + salt, len, Distribution::Normal);
                Ok(dtype.decode(&dtype.encode(&values))?)
            };
        let depth = (filters / p.filters as usize) as u32;
        let w = weights(8 * seed + 2, filters, depth);
        let Epilogue { bias, gate, residual, .. } = p.epilogue;
        let host = Host {
            x: make(x, stored, 0)?,
            second: make(second, stored, 1)?,
            filters: stored.decode(&stored.encode(&w))?,
            bias: bias.then(|| make(p.bias_len(), stored, 3)).transpose()?,
            gate: gate.then(|| make(out, result, 4)).transpose()?,
            residual: residual.then(|| make(out, result, 5)).transpose()?,
        };
        let client = device.client();
        let upload = |values: &[f32], dtype: reference::DType| {
            client.create_from_slice(&padded(&dtype.encode(values)))
        };
        let part = |values: &Option<Vec<f32>>, dtype| values.as_ref().map(|own| upload(own, dtype));
        let operands = ConvOperands {
            x: upload(&host.x, stored),
            second: (second > 0).then(|| upload(&host.second, stored)),
            filters: upload(&host.filters, stored),
            out: unwritten(device, out * p.out.size()),
            epilogue: EpilogueBuffers {
                bias: part(&host.bias, stored),
                pre_activation: None,
                gate: part(&host.gate, result),
                residual: part(&host.residual, result),
            },
        };
        launch_twice::<Self>(device, p, config, &operands, &[&operands.out])?;
        verdict(device, p, &operands, &host, None)
    }

    fn verify_operands(
        device: &Device,
        p: &ConvProblem,
        operands: &ConvOperands,
        seed: u64,
    ) -> Result<Verdict, CheckError> {
        let [x, second, filters, out] = p.lens().map(|len| len as usize);
        let (stored, result) = (reference_dtype(p.precision), result_dtype(p));
        let values = |handle: &Handle, len: usize, dtype: reference::DType| {
            let bytes = read(device, handle, len * dtype.bytes())?;
            Ok::<_, CheckError>(dtype.decode(&bytes)?)
        };
        let part = |handle: &Option<Handle>, len, dtype| {
            handle.as_ref().map(|handle| values(handle, len, dtype)).transpose()
        };
        let host = Host {
            x: values(&operands.x, x, stored)?,
            second: part(&operands.second, second, stored)?.unwrap_or_default(),
            filters: values(&operands.filters, filters, stored)?,
            bias: part(&operands.epilogue.bias, p.bias_len(), stored)?,
            gate: part(&operands.epilogue.gate, out, result)?,
            residual: part(&operands.epilogue.residual, out, result)?,
        };
        verdict(device, p, operands, &host, Some(seed))
    }

    /// Convolutions of Stable Diffusion 1.5's U-Net at 64 x 64, and small ones of other nets.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<ConvProblem>> {
        let case = |batch, size, channels, taps: u32, precision| {
            let side = (taps / 2) as i32;
            let p = ConvProblem::new(batch, [size; 2], channels, [taps; 2], precision);
            BenchCase::alone(ConvProblem { padding: [[side; 2]; 2], ..p })
        };
        match (suite, scale) {
            (Suite::Quick | Suite::Documents, _) => Vec::new(),
            (_, Scale::Host) => vec![
                case(1, 32, [64, 64], 3, Precision::F32),
                case(1, 32, [64, 64], 3, Precision::F16),
            ],
            (_, Scale::Gpu) => {
                let mut cases = Vec::new();
                for batch in [1, 8] {
                    for (size, channels) in [
                        (64, [320, 320]),
                        (64, [640, 320]),
                        (32, [640, 640]),
                        (32, [1280, 640]),
                        (16, [1280, 1280]),
                        (16, [2560, 1280]),
                        (8, [1280, 1280]),
                    ] {
                        let own = case(batch, size, channels, 3, Precision::F16);
                        cases.push(BenchCase { peers: true, ..own });
                    }
                }
                cases.push(case(1, 64, [4, 320], 3, Precision::F16));
                cases.push(case(1, 64, [320, 4], 3, Precision::F16));
                for precision in [Precision::Bf16, Precision::F16Acc16, Precision::F32] {
                    cases.push(case(1, 64, [320, 320], 3, precision));
                }
                let joined = case(1, 64, [320, 320], 3, Precision::F16).problem;
                for problem in [
                    ConvProblem { channels: [320, 320], ..joined },
                    ConvProblem { reading: Reading::Doubled, image: [32; 2], ..joined },
                    ConvProblem { stride: [2, 2], ..joined },
                    ConvProblem { epilogue: all_parts(None), ..joined },
                    ConvProblem { groups: 320, ..joined },
                ] {
                    cases.push(BenchCase::alone(problem));
                }
                cases
            }
        }
    }

    /// Our matmul with the same m, n, k and epilogue; for 320 channels also Burn's convolution.
    fn peers(device: &Device, p: &ConvProblem, sets: usize) -> Peers {
        let product = p.matrix();
        let operands: Vec<_> = (0..sets as u64)
            .map(|set| Matmul::operands(&Queue::Device(device), &product, set))
            .collect();
        let time = |config: &_, effort| {
            let scratch = Matmul::scratch(device, &product, config);
            timing::measure(device, effort, |i| {
                let own = &operands[i % operands.len()];
                Matmul::launch(&Queue::Device(device), &product, config, own, scratch.as_ref());
            })
        };
        let candidates = Matmul::candidates(device.profile(), &product);
        let quick = Effort::tune(device.backend());
        let timed = candidates
            .iter()
            .filter_map(|config| Some((time(config, quick).ok()?.median_ns(), config)));
        let best = timed.min_by(|a, b| a.0.total_cmp(&b.0));
        let none = || TimingError::Failed("no config runs".to_owned());
        let outcome = best
            .ok_or_else(none)
            .and_then(|(_, config)| time(config, Effort::report(device.backend())));
        let mut figures = vec![("matmul", outcome)];
        // Burn autotunes every size for tens of seconds.
        if p.channels == [320, 0] {
            figures.push((peers::burn_name(device.backend()), peers::burn_conv(device, p, sets)));
        }
        figures
    }

    fn torch(p: &ConvProblem) -> Option<Value> {
        let plain = p.reading == Reading::Plain && p.channels[1] == 0;
        (plain && p.epilogue == Epilogue::default()).then(|| {
            json!({
                "op": Self::NAME,
                "batch": p.batch,
                "image": p.image,
                "channels": p.channels[0],
                "filters": p.filters,
                "taps": p.taps,
                "stride": p.stride,
                "dilation": p.dilation,
                "padding": p.padding,
                "groups": p.groups,
                "dtype": p.precision.name(),
            })
        })
    }

    fn instances() -> Vec<InstanceCase<ConvProblem>> {
        use Precision::{Bf16, F16, F16Acc16, F32, Tf32};
        let base = |precision| ConvProblem {
            padding: [[1, 1], [1, 1]],
            ..ConvProblem::new(2, [64, 64], [320, 320], [3, 3], precision)
        };
        let all = |problem| InstanceCase { problem, max_candidates: usize::MAX, clean: 1 };
        let first = |problem| InstanceCase { problem, max_candidates: 2, clean: 1 };
        let few = |problem| InstanceCase { problem, max_candidates: 1, clean: 0 };
        let full = all_parts(Some(Activation::Silu));
        vec![
            all(base(F16)),
            // Whole tiles.
            first(ConvProblem { filters: 640, ..base(F16) }),
            first(base(Bf16)),
            first(base(F16Acc16)),
            first(base(Tf32)),
            first(base(F32)),
            first(ConvProblem { epilogue: full, ..base(F16) }),
            first(ConvProblem { channels: [320, 320], ..base(F16) }),
            first(ConvProblem { reading: Reading::Doubled, ..base(F16) }),
            first(ConvProblem { reading: Reading::Spread, stride: [2, 2], ..base(F16) }),
            first(ConvProblem { groups: 4, ..base(F16) }),
            few(ConvProblem { channels: [3, 0], ..base(F16) }),
            few(ConvProblem { groups: 320, ..base(F16) }),
            few(ConvProblem::new(2, [1, 3000], [80, 384], [1, 3], F16)),
        ]
    }
}

fn cases(problems: Vec<ConvProblem>, seed: u64) -> Vec<EdgeCase> {
    let checked = problems.into_iter().map(|problem| problem.checked().expect("a window fits"));
    (seed..).zip(checked).map(|(seed, problem)| EdgeCase { problem, seed }).collect()
}

/// Elements of the largest operand.
fn extent(p: &ConvProblem) -> u64 {
    p.lens().into_iter().max().unwrap_or(0)
}

fn is_far(p: &ConvProblem) -> bool {
    extent(p) > 1 << 31
}

/// Checks the first and the last rows of an image of gigabytes; the filters have one row.
fn check_far(
    device: &Device,
    p: &ConvProblem,
    seed: u64,
    config: &ConvConfig,
) -> Result<Verdict, CheckError> {
    const ROWS: u32 = 4;
    let operands = Conv::operands(&Queue::Device(device), p, seed);
    let scratch = Conv::scratch(device, p, config);
    Conv::launch(&Queue::Device(device), p, config, &operands, scratch.as_ref());
    let near = ConvProblem { image: [ROWS, p.image[1]], ..*p };
    let [x, _, _, out] = near.lens().map(|len| len as usize);
    let strip = |whole: &Handle, first: u32, len: usize, size: usize| {
        let row = len / ROWS as usize * size;
        window(whole, first as usize * row, len * size)
    };
    let check = |first: u32| {
        let operands = ConvOperands {
            x: strip(&operands.x, first, x, p.precision.storage().size()),
            out: strip(&operands.out, first, out, p.out.size()),
            ..operands.clone()
        };
        Conv::verify_operands(device, &near, &operands, seed)
    };
    let (first, last) = (check(0)?, check(p.image[0] - ROWS)?);
    drop(operands);
    give_back(device)?;
    let comparison = Comparison::worst(vec![first.comparison, last.comparison]);
    Ok(Verdict { comparison, digest: first.digest ^ last.digest.rotate_left(1) })
}

/// Contents of the operands.
struct Host {
    x: Vec<f32>,
    second: Vec<f32>,
    filters: Vec<f32>,
    bias: Option<Vec<f32>>,
    gate: Option<Vec<f32>>,
    residual: Option<Vec<f32>>,
}

const fn result_dtype(p: &ConvProblem) -> reference::DType {
    match p.out {
        arch::DType::F16 => reference::DType::F16,
        arch::DType::Bf16 => reference::DType::Bf16,
        _ => reference::DType::F32,
    }
}

fn verdict(
    device: &Device,
    p: &ConvProblem,
    operands: &ConvOperands,
    host: &Host,
    sample: Option<u64>,
) -> Result<Verdict, CheckError> {
    let result = result_dtype(p);
    let sizes = |pair: [u32; 2]| pair.map(|size| size as usize);
    let [first, second] = sizes(p.channels);
    let reference = reference::Conv {
        batch: p.batch as usize,
        image: sizes(p.image),
        channels: first + second,
        filters: p.filters as usize,
        window: sizes(p.taps),
        stride: sizes(p.stride),
        dilation: sizes(p.dilation),
        padding: p.padding.map(|sides| sides.map(|side| side as isize)),
        groups: p.groups as usize,
        transposed: p.reading == Reading::Spread,
        upsample: p.reading == Reading::Doubled,
        dtype: reference_dtype(p.precision),
        sums: match p.precision.sums() {
            arch::DType::F16 => reference::DType::F16,
            _ => reference::DType::F32,
        },
        out_dtype: result,
    };
    let joined: Vec<f32> = match second {
        0 => host.x.clone(),
        _ => {
            let pixels = host.x.chunks(first).zip(host.second.chunks(second));
            pixels.flat_map(|(first, second)| [first, second].concat()).collect()
        }
    };
    let (filters, pitch) = (p.filters as usize, p.bias_pitch.max(p.filters) as usize);
    let bias = host.bias.as_ref().map(|bias| {
        let rows = bias.chunks(pitch);
        rows.flat_map(|row| &row[..filters]).copied().collect::<Vec<_>>()
    });
    let epilogue = reference::Epilogue {
        bias: bias.as_deref(),
        activation: p.epilogue.activation.map(reference_activation),
        activation_last: p.epilogue.activation_last,
        gate: host.gate.as_deref(),
        residual: host.residual.as_deref(),
        factor: p.epilogue.factor.map(Constant::value),
        ..reference::Epilogue::NONE
    };
    let len = p.lens()[3] as usize * result.bytes();
    let bytes = read(device, &operands.out, len)?;
    let out = result.decode(&bytes)?;
    let comparison = reference.check(sample, &joined, &host.filters, epilogue, &out)?;
    Ok(Verdict { comparison, digest: fnv1a(&bytes) })
}
