use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use ops::{
    Activation, Ctx, Epilogue, NormKind, NormWeights, OpError, QuantizedWeight, RowNorm,
    WeightFormat, linear, matmul, norm, quantized_glu, quantized_linear, takes_norm,
};
use reference::{Distribution, Norm, NormOperands, NormRule, fill};

use crate::{close, tensor, values};

const KINDS: [(NormKind, NormRule); 3] = [
    (NormKind::Rms, NormRule::Rms),
    (NormKind::RmsPlusOne, NormRule::RmsPlusOne),
    (NormKind::Layer, NormRule::Layer),
];

fn weights(width: usize, bias: bool, device: &Device) -> NormWeights {
    let bias = bias.then(|| tensor([width], 3, device));
    NormWeights { weight: tensor([width], 2, device), bias }
}

#[test]
fn norms_are_the_references() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    for (kind, rule) in KINDS {
        for (width, more) in [(48, false), (35, true)] {
            let x = tensor([5, width], 1, &device);
            let with = weights(width, more, &device);
            let residual: Option<Tensor<2>> = more.then(|| tensor([5, width], 4, &device));
            let (bias, added) = (with.bias.clone().map(values), residual.clone().map(values));
            let operands = NormOperands {
                weight: &values(with.weight.clone()),
                bias: bias.as_deref(),
                residual: added.as_deref(),
            };
            let reference = Norm { rule, eps: 1e-3 };
            let want = reference.run(&values(x.clone()), operands).expect("lengths agree");
            let out = norm(&ctx, x.clone(), with.clone(), residual.clone(), kind, 1e-3);
            close(&values(out.expect("valid")), &want, &format!("{kind:?} {width}"));
            // Rows with another layout.
            let transposed = Tensor::from_data(x.transpose().into_data(), &device).transpose();
            let out = norm(&ctx, transposed, with, residual, kind, 1e-3);
            close(&values(out.expect("valid")), &want, &format!("{kind:?} {width}, transposed"));
        }
    }
}

#[test]
fn halves_are_rounded_once() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    for (dtype, rounds) in
        [(FloatDType::F16, reference::DType::F16), (FloatDType::BF16, reference::DType::Bf16)]
    {
        for (kind, rule) in KINDS {
            let x = tensor::<2>([3, 64], 1, &device).cast(dtype);
            let NormWeights { weight, .. } = weights(64, false, &device);
            let weight = weight.cast(dtype);
            let host = values(weight.clone());
            let operands = NormOperands { weight: &host, bias: None, residual: None };
            let reference = Norm { rule, eps: 1e-5 };
            let x_host = values(x.clone());
            let out = norm(&ctx, x, NormWeights { weight, bias: None }, None, kind, 1e-5);
            let out = out.expect("valid");
            assert_eq!(out.dtype(), dtype.into());
            let verdict = reference.check(&x_host, operands, &values(out), rounds);
            let verdict = verdict.expect("lengths agree");
            assert!(verdict.passed, "{kind:?}: {verdict}");
        }
    }
}

/// The CPU never fuses the norm: the result equals [`norm`] followed by a matmul.
#[test]
fn products_normalise_their_rows() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let (m, n, k) = (3, 64, 256);
    let x = tensor::<2>([m, k], 1, &device);
    let dense = tensor::<2>([n, k], 2, &device);
    let quantize = |format| QuantizedWeight::quantize(&ctx, dense.clone(), format);
    let all = WeightFormat::all().map(|format| (format, quantize(format).expect("finite")));
    let all: Vec<_> = all.collect();
    for kind in KINDS.map(|(kind, _)| kind) {
        let weight = tensor::<1>([k], 3, &device);
        let with = NormWeights { weight: weight.clone(), bias: None };
        let y = norm(&ctx, x.clone(), with, None, kind, 1e-3).expect("valid");
        let row_norm = RowNorm { weight, kind, eps: 1e-3 };
        let epilogue = |norm| Epilogue {
            activation: Some(Activation::Silu),
            norm,
            ..Epilogue::<2>::default()
        };
        let check = |what: &str, of: &dyn Fn(Tensor<2>, Epilogue<2>) -> Tensor<2>| {
            let want: Vec<_> =
                values(of(y.clone(), epilogue(None))).into_iter().map(f64::from).collect();
            let out = of(x.clone(), epilogue(Some(row_norm.clone())));
            close(&values(out), &want, &format!("{what} {kind:?}"));
        };
        check("a layer", &|x, e| linear(&ctx, x, dense.clone().transpose(), e).expect("valid"));
        let transposed = Tensor::<2>::from_data(dense.clone().transpose().into_data(), &device);
        check("a weight in rows", &|x, e| matmul(&ctx, x, transposed.clone(), e).expect("valid"));
        for (format, quantized) in &all {
            let linear = |x, e| quantized_linear(&ctx, x, quantized, e).expect("valid");
            check(format.name(), &linear);
            if format.info().gated {
                let glu = |x, e| quantized_glu(&ctx, x, quantized, e).expect("valid");
                check(&format!("{format}, gated"), &glu);
            }
            assert!(!quantized.takes_norm(&ctx, &x, kind, false).expect("floats"));
        }

        let taken = takes_norm(&ctx, &x, &dense.clone().transpose(), kind).expect("floats");
        assert!(!taken, "a CPU saves no launch");
    }
}

/// Compares every gradient of `Σ out · weights` with central differences of the reference.
#[test]
fn gradients_are_the_differences() {
    let (device, ctx) = (Device::cpu().autodiff(), Ctx::default());
    let (rows, width, eps) = (3, 7, 1e-2);
    let sizes = [rows * width, width, width, rows * width];
    let inputs: [Vec<f32>; 4] =
        std::array::from_fn(|i| fill(i as u64 + 1, sizes[i], Distribution::Normal));
    let weights = fill(6, rows * width, Distribution::Normal);
    for (kind, rule) in KINDS {
        for all in [false, true] {
            let loss = |v: &[Vec<f32>; 4]| -> f64 {
                let operands = NormOperands {
                    weight: &v[1],
                    bias: all.then_some(&v[2]),
                    residual: all.then_some(&v[3]),
                };
                let out = Norm { rule, eps }.run(&v[0], operands).expect("lengths agree");
                out.iter().zip(&weights).map(|(o, w)| o * f64::from(*w)).sum()
            };
            let rows_of = |i: usize| {
                Tensor::<2>::from_data(TensorData::new(inputs[i].clone(), [rows, width]), &device)
                    .require_grad()
            };
            let line = |i: usize| {
                Tensor::<1>::from_data(TensorData::new(inputs[i].clone(), [width]), &device)
                    .require_grad()
            };
            let (x, w, b, r) = (rows_of(0), line(1), line(2), rows_of(3));
            let with = NormWeights { weight: w.clone(), bias: all.then(|| b.clone()) };
            let out = norm(&ctx, x.clone(), with, all.then(|| r.clone()), kind, eps as f32);
            let weighted =
                Tensor::from_data(TensorData::new(weights.clone(), [rows, width]), &device);
            let gradients = (out.expect("valid") * weighted).sum().backward();
            let got = [
                x.grad(&gradients).map(values),
                w.grad(&gradients).map(values),
                b.grad(&gradients).map(values),
                r.grad(&gradients).map(values),
            ];
            for (which, got) in got.into_iter().enumerate() {
                let what = format!("{kind:?}, input {which}, all {all}");
                if !all && which >= 2 {
                    assert!(got.is_none(), "{what}");
                    continue;
                }
                let want: Vec<f64> = (0..inputs[which].len())
                    .map(|i| {
                        let at = |step: f32| {
                            let mut moved = inputs.clone();
                            moved[which][i] += step;
                            (loss(&moved), f64::from(moved[which][i]))
                        };
                        let ((up, x1), (down, x0)) = (at(1.0 / 1024.0), at(-1.0 / 1024.0));
                        (up - down) / (x1 - x0)
                    })
                    .collect();
                close(&got.expect("it is tracked"), &want, &what);
            }
        }
    }
}

/// The gradients equal those of a norm followed by a matmul.
#[test]
fn norms_in_products_have_gradients_and_fit_their_rows() {
    let (device, ctx) = (Device::cpu().autodiff(), Ctx::default());
    let run = |x: Tensor<2>, weight: Tensor<1>, eps| {
        let norm = Some(RowNorm { weight, kind: NormKind::Rms, eps });
        let rhs = tensor::<2>([8, 5], 2, &device).require_grad();
        let out = matmul(&ctx, x, rhs.clone(), Epilogue { norm, ..Epilogue::default() })?;
        Ok::<_, OpError>((out, rhs))
    };
    let x = || tensor::<2>([4, 8], 1, &device).require_grad();
    let weight = |width: usize| tensor::<1>([width], 3, &device).require_grad();
    let (own, own_weight) = (x(), weight(8));
    let (out, rhs) = run(own.clone(), own_weight.clone(), 1e-5).expect("valid");
    let gradients = (out.clone() * out).sum().backward();
    let (other, other_weight, other_rhs) =
        (x(), weight(8), tensor::<2>([8, 5], 2, &device).require_grad());
    let with = NormWeights { weight: other_weight.clone(), bias: None };
    let y = norm(&ctx, other.clone(), with, None, NormKind::Rms, 1e-5).expect("valid");
    let out = matmul(&ctx, y, other_rhs.clone(), Epilogue::default()).expect("valid");
    let apart = (out.clone() * out).sum().backward();
    let pairs = [
        (own.grad(&gradients).map(values), other.grad(&apart).map(values)),
        (own_weight.grad(&gradients).map(values), other_weight.grad(&apart).map(values)),
        (rhs.grad(&gradients).map(values), other_rhs.grad(&apart).map(values)),
    ];
    for (which, (got, want)) in pairs.into_iter().enumerate() {
        let want = want.expect("it is tracked").into_iter().map(f64::from).collect::<Vec<_>>();
        assert!(want.iter().any(|v| v.abs() > 0.1), "{which}: {want:?}");
        close(&got.expect("it is tracked"), &want, &format!("input {which}"));
    }
    let long = run(x(), weight(9), 1e-5).expect_err("a weight of another width").to_string();
    assert!(long.contains("norm has shape [9]"), "{long}");
    let negative = run(x(), weight(8), -1.0).expect_err("no such eps").to_string();
    assert!(negative.contains("finite eps of at least 0, got -1"), "{negative}");
}

#[test]
fn mistakes_are_errors() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let x = || tensor::<2>([4, 8], 1, &device);
    let run = |x, with, residual, eps| norm(&ctx, x, with, residual, NormKind::Rms, eps);
    let fails = |with, residual| run(x(), with, residual, 1e-5).expect_err("a mistake").to_string();
    let good = || weights(8, true, &device);
    assert!(run(x(), good(), Some(x()), 1e-5).is_ok());
    assert!(fails(weights(9, false, &device), None).contains("weight has shape [9]"));
    let long = NormWeights { bias: Some(tensor([4], 1, &device)), ..good() };
    assert!(fails(long, None).contains("bias has shape [4]"));
    assert!(fails(good(), Some(tensor([8, 4], 1, &device))).contains("residual has shape [8, 4]"));
    let half = NormWeights { weight: good().weight.cast(FloatDType::F16), ..good() };
    assert!(fails(half, None).contains("weight is F16"));
    let negative = run(x(), good(), None, -1.0).expect_err("a mistake").to_string();
    assert!(negative.contains("finite eps of at least 0, got -1"), "{negative}");
    let none = Tensor::<2>::zeros([0, 8], &device);
    assert_eq!(run(none, good(), None, 1e-5).expect("nothing to do").dims(), [0, 8]);
}
