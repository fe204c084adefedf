//! Convolutions and group norms against the reference. A convolution is linear in x and in its weight, so that its gradients are
//! those of inner products: `⟨dout, x ∗ v⟩ = ⟨dweight, v⟩` for every v.

use std::ops::Range;

use burn::tensor::{Device, FloatDType, Tensor};
use ops::{
    Activation, BatchNorm, ConvOptions, Ctx, GroupNormOptions, OpError, conv_transpose2d, conv1d,
    conv2d, fold_batch_norm, group_norm,
};
use reference::{Conv, DType, Epilogue, GroupNorm, GroupNormOperands};

use crate::{close, tensor, values};

/// Returns the values with the channels last.
fn last(x: Tensor<4>) -> Vec<f32> {
    values(x.permute([0, 2, 3, 1]))
}

/// Geometries of a convolution of 6 x 7 pixels of four channels.
fn geometries() -> Vec<(usize, ConvOptions)> {
    let base = || ConvOptions::padded([1, 1]);
    vec![
        (6, base()),
        (6, ConvOptions { stride: [2, 3], ..base() }),
        (6, ConvOptions { dilation: [2, 1], padding: [[2, 1], [0, 2]], ..base() }),
        (6, ConvOptions { padding: [[0, -1], [-1, 2]], ..base() }),
        (6, ConvOptions { groups: 2, ..base() }),
        (4, ConvOptions { groups: 4, stride: [2, 1], ..base() }),
        (6, ConvOptions { doubled: true, stride: [1, 2], ..base() }),
    ]
}

fn reference(options: &ConvOptions, filters: usize, transposed: bool) -> Conv {
    Conv {
        batch: 2,
        image: [6, 7],
        channels: 4,
        filters,
        window: [3, 2],
        stride: options.stride,
        dilation: options.dilation,
        padding: options.padding.map(|sides| sides.map(|side| side as isize)),
        groups: options.groups,
        transposed,
        upsample: options.doubled,
        dtype: DType::F32,
        sums: DType::F32,
        out_dtype: DType::F32,
    }
}

/// Panics unless a result is the reference's.
fn check(
    conv: &Conv,
    x: Tensor<4>,
    weight: Tensor<4>,
    epilogue: Epilogue<'_>,
    out: Tensor<4>,
    what: &str,
) {
    let comparison = conv.check(None, &last(x), &last(weight), epilogue, &last(out));
    let comparison = comparison.expect("lengths agree");
    assert!(comparison.passed, "{what}: {comparison}");
}

#[test]
fn convolutions_and_their_epilogues_are_the_references() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    for (at, (filters, options)) in geometries().into_iter().enumerate() {
        let x = tensor([2, 4, 6, 7], 1, &device);
        let weight = tensor([filters, 4 / options.groups, 3, 2], 2, &device);
        let bias = tensor([filters], 3, &device);
        let plain = conv2d(&ctx, x.clone(), weight.clone(), options.clone()).expect("valid");
        let conv = reference(&options, filters, false);
        let residual: Tensor<4> = tensor(plain.dims(), 4, &device);
        let what = format!("geometry {at}");
        check(&conv, x.clone(), weight.clone(), Epilogue::NONE, plain, &what);
        let (own, more) = (values::<1>(bias.clone()), last(residual.clone()));
        let epilogue = Epilogue {
            bias: Some(&own),
            activation: Some(reference::Activation::Silu),
            residual: Some(&more),
            factor: Some(0.5),
            ..Epilogue::NONE
        };
        let options = ConvOptions {
            bias: Some(bias),
            activation: Some(Activation::Silu),
            residual: Some(residual.clone()),
            factor: Some(0.5),
            ..options
        };
        let out = conv2d(&ctx, x.clone(), weight.clone(), options).expect("valid");
        check(&conv, x, weight, epilogue, out, &format!("{what} with an epilogue"));
    }
}

#[test]
fn a_second_input_is_joined_and_an_image_has_its_own_bias() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let x: Tensor<4> = tensor([2, 3, 5, 4], 1, &device);
    let second: Tensor<4> = tensor([2, 5, 5, 4], 2, &device);
    let (weight, bias) = (tensor([6, 8, 3, 3], 3, &device), tensor::<2>([2, 6], 4, &device));
    let joined = Tensor::cat(vec![x.clone(), second.clone()], 1);
    let base = ConvOptions::padded([1, 1]);
    let sum = conv2d(&ctx, joined, weight.clone(), base.clone()).expect("valid");
    let want = sum + bias.clone().reshape([2, 6, 1, 1]);
    let want: Vec<f64> = values(want).into_iter().map(f64::from).collect();
    let options = ConvOptions { second: Some(second), image_bias: Some(bias), ..base };
    let out = conv2d(&ctx, x, weight, options).expect("valid");
    close(&values(out), &want, "a second input");
}

#[test]
fn columns_of_a_matrix_are_biases_and_modulations() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let x: Tensor<4> = tensor([2, 8, 5, 4], 1, &device);
    let weight: Tensor<4> = tensor([8, 8, 3, 3], 2, &device);
    // Rows of 40 are read in place, rows of 41 are copied.
    for width in [40, 41] {
        let matrix: Tensor<2> = tensor([2, width], 3, &device);
        let outputs = |columns: &dyn Fn(Range<usize>) -> Tensor<2>| {
            let image_bias = Some(columns(4..12));
            let options = ConvOptions { image_bias, ..ConvOptions::padded([1, 1]) };
            let conv = conv2d(&ctx, x.clone(), weight.clone(), options).expect("valid");
            let modulation = Some(columns(8..24));
            let options = GroupNormOptions { modulation, ..norm_options(8, &device) };
            let norm = group_norm(&ctx, x.clone(), options).expect("valid");
            [values(conv), values(norm)]
        };
        let shared = outputs(&|own| ops::columns(matrix.clone(), own).expect("a matrix"));
        let copied = outputs(&|own| {
            let data = matrix.clone().slice_dim(1, own).into_data();
            Tensor::from_data(data, &device)
        });
        assert_eq!(shared, copied, "{width}");
    }
}

#[test]
fn a_batch_norm_becomes_part_of_its_convolution() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let x: Tensor<4> = tensor([2, 4, 5, 4], 1, &device);
    let weight: Tensor<4> = tensor([6, 4, 3, 3], 2, &device);
    let part = |seed| tensor::<1>([6], seed, &device);
    let variance = part(6).abs();
    let norm = BatchNorm { weight: part(3), bias: part(4), mean: part(5), variance, eps: 1e-3 };
    for bias in [None, Some(part(7))] {
        let conv = |weight, bias| {
            let options = ConvOptions { bias, ..ConvOptions::default() };
            conv2d(&ctx, x.clone(), weight, options).expect("valid")
        };
        let each = |part: &Tensor<1>| part.clone().reshape([1, 6, 1, 1]);
        let factor = (norm.variance.clone() + 1e-3).sqrt().recip() * norm.weight.clone();
        let plain = conv(weight.clone(), bias.clone()) - each(&norm.mean);
        let want = plain * each(&factor) + each(&norm.bias);
        let want: Vec<f64> = values(want).into_iter().map(f64::from).collect();
        let folded = fold_batch_norm(weight.clone(), bias, norm.clone()).expect("valid");
        close(&values(conv(folded.0, Some(folded.1))), &want, "folded");
    }
    let short = BatchNorm { mean: tensor([5], 5, &device), ..norm };
    let error = fold_batch_norm(weight, None, short).expect_err("refused");
    assert!(matches!(error, OpError::Shape { what: "mean", .. }));
}

#[test]
fn channels_last_tensors_and_others_give_the_same_bits() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let (x, weight) = (tensor([1, 8, 5, 5], 1, &device), tensor([8, 8, 3, 3], 2, &device));
    let out = |x: Tensor<4>, weight: Tensor<4>| {
        let out = conv2d(&ctx, x, weight, ConvOptions::padded([1, 1])).expect("valid");
        values(out)
    };
    let want = out(x.clone(), weight.clone());
    let last = |t: Tensor<4>| {
        let data = t.permute([0, 2, 3, 1]).into_data();
        Tensor::<4>::from_data(data, &device).permute([0, 3, 1, 2])
    };
    assert_eq!(out(last(x), last(weight)), want);
}

#[test]
fn transposed_and_flat_convolutions_are_the_references() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    for (groups, padding, more) in [(1, [1, 0], [0, 0]), (2, [0, 1], [1, 2])] {
        let options = ConvOptions {
            stride: [2, 3],
            dilation: [1, 2],
            groups,
            ..ConvOptions::padded(padding)
        };
        let x: Tensor<4> = tensor([2, 4, 6, 7], 1, &device);
        // Torch's order: channels, filters of a group.
        let weight: Tensor<4> = tensor([4, 6 / groups, 3, 2], 2, &device);
        let out = conv_transpose2d(&ctx, x.clone(), weight.clone(), more, options.clone());
        let turned = weight
            .reshape([groups, 4 / groups, 6 / groups, 3, 2])
            .swap_dims(1, 2)
            .reshape([6, 4 / groups, 3, 2])
            .flip([2, 3]);
        let mut conv = reference(&options, 6, true);
        for (sides, more) in conv.padding.iter_mut().zip(more) {
            sides[1] -= more as isize;
        }
        let (out, what) = (out.expect("valid"), format!("{groups} groups"));
        check(&conv, x, turned, Epilogue::NONE, out, &what);
    }
    let x: Tensor<3> = tensor([2, 3, 9], 1, &device);
    let weight: Tensor<3> = tensor([5, 3, 4], 2, &device);
    let options = ConvOptions { stride: [1, 2], ..ConvOptions::padded([0, 1]) };
    let out = conv1d(&ctx, x.clone(), weight.clone(), options.clone()).expect("valid");
    let want = conv2d(&ctx, x.unsqueeze_dim(2), weight.unsqueeze_dim(2), options).expect("valid");
    assert_eq!(values(out), values(want));
}

fn product<const D: usize>(a: &Tensor<D>, b: &Tensor<D>) -> f64 {
    let (a, b) = (values(a.clone()), values(b.clone()));
    a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

#[test]
fn gradients_are_adjoint_to_the_convolution() {
    let (plain, ctx) = (Device::cpu(), Ctx::default());
    let device = plain.clone().autodiff();
    let adjoint = |x: Tensor<4>,
                   weight: Tensor<4>,
                   what: &str,
                   run: &dyn Fn(Tensor<4>, Tensor<4>, Tensor<1>) -> Tensor<4>,
                   filters: usize| {
        let bias = tensor::<1>([filters], 3, &device).require_grad();
        let (x, weight) = (x.require_grad(), weight.require_grad());
        let out = run(x.clone(), weight.clone(), bias.clone());
        let dout = tensor(out.dims(), 4, &device);
        let gradients = (out * dout.clone()).sum().backward();
        let dx = x.grad(&gradients).expect("x is tracked");
        let dweight = weight.grad(&gradients).expect("the weight is tracked");
        let dbias = bias.grad(&gradients).expect("the bias is tracked");
        let dout = dout.inner();
        let none = Tensor::<1>::zeros([filters], &plain);
        for seed in 5..8 {
            let own = |t: &Tensor<4>, seed| tensor::<4>(t.dims(), seed, &plain);
            let (other_x, other_weight) = (own(&x, seed), own(&weight, seed + 10));
            let by_x = run(other_x.clone(), weight.clone().inner(), none.clone());
            let by_weight = run(x.clone().inner(), other_weight.clone(), none.clone());
            let other_bias = tensor::<1>([filters], seed, &plain);
            let by_bias = other_bias.clone().reshape([1, filters, 1, 1]).expand(dout.dims());
            close(&[product(&dx, &other_x) as f32], &[product(&dout, &by_x)], what);
            close(&[product(&dweight, &other_weight) as f32], &[product(&dout, &by_weight)], what);
            close(&[product(&dbias, &other_bias) as f32], &[product(&dout, &by_bias)], what);
        }
    };
    for (at, (filters, options)) in geometries().into_iter().enumerate() {
        let run = |x, weight, bias| {
            let options = ConvOptions { bias: Some(bias), ..options.clone() };
            conv2d(&ctx, x, weight, options).expect("valid")
        };
        let weight = tensor([filters, 4 / options.groups, 3, 2], 2, &device);
        let x = tensor([2, 4, 6, 7], 1, &device);
        adjoint(x, weight, &format!("geometry {at}"), &run, filters);
    }
    for groups in [1, 2] {
        let run = |x, weight, bias| {
            let base = ConvOptions { stride: [2, 3], groups, ..ConvOptions::padded([1, 0]) };
            let options = ConvOptions { bias: Some(bias), ..base };
            conv_transpose2d(&ctx, x, weight, [1, 0], options).expect("valid")
        };
        let weight = tensor([4, 6 / groups, 3, 2], 2, &device);
        let x = tensor([2, 4, 6, 7], 1, &device);
        adjoint(x, weight, &format!("transposed, {groups} groups"), &run, 6);
    }
}

fn norm_options(channels: usize, device: &Device) -> GroupNormOptions {
    GroupNormOptions {
        groups: 2,
        eps: 1e-2,
        weight: tensor([channels], 2, device),
        bias: tensor([channels], 3, device),
        second: None,
        modulation: None,
        activation: None,
    }
}

#[test]
fn group_norms_are_the_references() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let x: Tensor<4> = tensor([2, 6, 5, 3], 1, &device);
    let second: Tensor<4> = tensor([2, 2, 5, 3], 4, &device);
    let joined = last(Tensor::cat(vec![x.clone(), second.clone()], 1));
    let modulation: Tensor<2> = tensor([2, 16], 5, &device);
    let reference = GroupNorm {
        batch: 2,
        pixels: 15,
        channels: 8,
        groups: 2,
        eps: 1e-2,
        activation: Some(reference::Activation::Silu),
    };
    let options = GroupNormOptions {
        second: Some(second),
        modulation: Some(modulation.clone()),
        activation: Some(Activation::Silu),
        ..norm_options(8, &device)
    };
    let [weight, bias] = [&options.weight, &options.bias].map(|part| values(part.clone()));
    let modulation = values(modulation);
    let of = GroupNormOperands {
        x: &joined,
        weight: &weight,
        bias: &bias,
        modulation: Some(&modulation),
    };
    let want = reference.run(of).expect("lengths agree");
    let out = group_norm(&ctx, x, options).expect("valid");
    close(&last(out), &want, "group norm");
}

#[test]
fn gradients_of_a_group_norm_are_slopes() {
    let ctx = Ctx::default();
    let plain = Device::cpu();
    let device = plain.clone().autodiff();
    let x = tensor::<4>([2, 6, 3, 2], 1, &device).require_grad();
    let second: Tensor<4> = tensor([2, 2, 3, 2], 6, &device);
    let base = norm_options(8, &device);
    let modulation = tensor::<2>([2, 16], 5, &device).require_grad();
    let options = GroupNormOptions {
        weight: base.weight.clone().require_grad(),
        bias: base.bias.clone().require_grad(),
        second: Some(second.clone()),
        modulation: Some(modulation.clone()),
        activation: Some(Activation::Silu),
        ..base
    };
    let out = group_norm(&ctx, x.clone(), options.clone()).expect("valid");
    let dout: Tensor<4> = tensor(out.dims(), 7, &device);
    let gradients = (out * dout.clone()).sum().backward();
    let weights = last(dout);
    let reference = GroupNorm {
        batch: 2,
        pixels: 6,
        channels: 8,
        groups: 2,
        eps: 1e-2,
        activation: Some(reference::Activation::Silu),
    };
    let host = [
        values(x.clone().inner()),
        values(options.weight.clone().inner()),
        values(options.bias.clone().inner()),
        values(modulation.clone().inner()),
    ];
    let loss = |host: &[Vec<f32>; 4]| -> f64 {
        let data = burn::tensor::TensorData::new(host[0].clone(), [2, 6, 3, 2]);
        let x = Tensor::<4>::from_data(data, &plain);
        let joined = last(Tensor::cat(vec![x, second.clone().inner()], 1));
        let of = GroupNormOperands {
            x: &joined,
            weight: &host[1],
            bias: &host[2],
            modulation: Some(&host[3]),
        };
        let out = reference.run(of).expect("lengths agree");
        out.iter().zip(&weights).map(|(out, weight)| out * f64::from(*weight)).sum()
    };
    let got = [
        values(x.grad(&gradients).expect("tracked")),
        values(options.weight.grad(&gradients).expect("tracked")),
        values(options.bias.grad(&gradients).expect("tracked")),
        values(modulation.grad(&gradients).expect("tracked")),
    ];
    for (part, got) in got.iter().enumerate() {
        for (at, got) in got.iter().enumerate() {
            let moved = |by: f32| {
                let mut host = host.clone();
                host[part][at] += by;
                (loss(&host), f64::from(host[part][at]))
            };
            let ((low, from), (high, to)) = (moved(-1.0 / 1024.0), moved(1.0 / 1024.0));
            let want = (high - low) / (to - from);
            assert!((f64::from(*got) - want).abs() < 1e-3, "{part} [{at}]: {got} {want}");
        }
    }
}

#[test]
fn invalid_operands_are_refused() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let x: Tensor<4> = tensor([1, 4, 3, 3], 1, &device);
    let weight: Tensor<4> = tensor([2, 4, 3, 3], 2, &device);
    let refused = |x: &Tensor<4>, weight: &Tensor<4>, options: ConvOptions| {
        conv2d(&ctx, x.clone(), weight.clone(), options).expect_err("refused").to_string()
    };
    let own = ConvOptions::default;
    let text = refused(&x, &weight, ConvOptions { padding: [[-1, 0], [0, 0]], ..own() });
    assert!(text.contains("is larger than the padded image of 2 pixels"), "{text}");
    let text = refused(&x, &tensor([2, 3, 3, 3], 2, &device), own());
    assert!(text.starts_with("weight has shape [2, 3, 3, 3], expected [2, 4, 3, 3]"), "{text}");
    let text = refused(&x, &tensor([2, 2, 3, 3], 2, &device), ConvOptions { groups: 4, ..own() });
    assert!(text.starts_with("weight has shape [2, 2, 3, 3], expected [2, 1, 3, 3]"), "{text}");
    let bias = Some(tensor([3], 3, &device));
    let text = refused(&x, &weight, ConvOptions { bias, ..own() });
    assert!(text.starts_with("bias has shape [3], expected [2]"), "{text}");
    let (bias, image_bias) = (Some(tensor([2], 3, &device)), Some(tensor([1, 2], 3, &device)));
    let both = ConvOptions { bias, image_bias, ..own() };
    let error = conv2d(&ctx, x.clone(), weight.clone(), both).expect_err("refused");
    assert!(matches!(error, OpError::TwoBiases));
    let half = weight.clone().cast(FloatDType::F16);
    let error = conv2d(&ctx, x.clone(), half, own()).expect_err("refused");
    assert!(matches!(error, OpError::DType { what: "weight", .. }));
    let doubled = ConvOptions { doubled: true, ..own() };
    let (row, taps) = (tensor([1, 2, 5], 1, &device), tensor([2, 2, 3], 2, &device));
    let text = conv1d(&ctx, row, taps, doubled.clone()).expect_err("refused").to_string();
    assert!(text.starts_with("the height has shape [2], expected [1]"), "{text}");
    let turned: Tensor<4> = tensor([4, 2, 3, 3], 2, &device);
    let error = conv_transpose2d(&ctx, x.clone(), turned, [0, 0], doubled).expect_err("refused");
    assert!(matches!(error, OpError::Transposed));
    let options = GroupNormOptions { groups: 3, ..norm_options(4, &device) };
    let text = group_norm(&ctx, x, options).expect_err("refused").to_string();
    assert!(
        text.starts_with("expected groups that divide the channels, got 3 groups of 4"),
        "{text}"
    );
}
