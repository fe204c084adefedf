//! Ops of an explicit backward pass.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use ops::training::{copy_scaled, linear_activated, linear_activated_backward};
use ops::{Activation, Ctx, OpError};
use reference::{Epilogue, Layout, Matmul};

use crate::{close, tensor, values};

const ACTIVATIONS: [(Activation, reference::Activation); 3] = [
    (Activation::Silu, reference::Activation::Silu),
    (Activation::Gelu, reference::Activation::Gelu),
    (Activation::GeluTanh, reference::Activation::GeluTanh),
];

fn dense(sizes: [usize; 3], rhs: Layout) -> Matmul {
    Matmul::contiguous(&[], sizes, Layout::Row, rhs, reference::DType::F32)
}

#[test]
fn a_layer_returns_both_sides_of_its_activation_and_its_gradient_reads_one() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let [rows, k, n] = [37, 24, 40];
    let (x, weight) = (tensor([rows, k], 1, &device), tensor::<2>([n, k], 2, &device));
    let (bias, dh) = (tensor([n], 3, &device), tensor([rows, 16], 4, &device));
    let down = tensor::<2>([16, n], 5, &device);
    let (xs, ws, bs) = (values(x.clone()), values(weight.clone()), values(bias.clone()));
    for (own, theirs) in ACTIVATIONS {
        let run =
            |bias| linear_activated(&ctx, x.clone(), weight.clone().transpose(), bias, own, false);
        for with in [true, false] {
            let [z, h] = run(with.then(|| bias.clone())).expect("valid");
            let start = Epilogue { bias: with.then_some(&bs), ..Epilogue::NONE };
            let forward = dense([rows, n, k], Layout::Col);
            let want = forward.run(&xs, &ws, start).expect("sizes");
            close(&values(z.clone()), &want, "z");
            let whole = Epilogue { activation: Some(theirs), ..start };
            close(&values(h), &forward.run(&xs, &ws, whole).expect("sizes"), "h");

            let (dout, down) = (dh.clone(), down.clone());
            let dz =
                linear_activated_backward(&ctx, dout.clone(), down.clone(), z.clone(), own, false);
            let zs = values(z);
            let slope = Epilogue { gate: Some(&zs), slope: Some(theirs), ..Epilogue::NONE };
            let backward = dense([rows, n, 16], Layout::Row);
            let want = backward.run(&values(dout), &values(down), slope).expect("sizes");
            close(&values(dz.expect("valid")), &want, "dz");
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let t = |shape: [usize; 2]| Tensor::<2>::zeros(shape, &device);
    let forward = |x, weight, bias| {
        linear_activated(&ctx, x, weight, bias, Activation::Silu, false).expect_err("a mistake")
    };
    let depth = forward(t([2, 3]), t([4, 5]), None);
    assert!(matches!(depth, OpError::Depth { lhs_k: 3, rhs_k: 4, .. }), "{depth}");
    let bias = forward(t([2, 3]), t([3, 5]), Some(Tensor::zeros([4], &device)));
    assert!(matches!(bias, OpError::Shape { what: "bias", .. }), "{bias}");
    let half = Tensor::<1>::zeros([5], &device).cast(FloatDType::F16);
    let half = forward(t([2, 3]), t([3, 5]), Some(half));
    assert!(matches!(half, OpError::DType { what: "bias", .. }), "{half}");
    let tracked = t([2, 3]).autodiff().require_grad();
    let tracked = forward(tracked, t([3, 5]), None);
    assert!(matches!(tracked, OpError::NoGradient), "{tracked}");
    let backward = |z| {
        let [dout, weight] = [t([2, 3]), t([3, 5])];
        let made = linear_activated_backward(&ctx, dout, weight, z, Activation::Silu, false);
        made.expect_err("a mistake")
    };
    let z = backward(t([2, 4]));
    assert!(matches!(z, OpError::Shape { what: "z", .. }), "{z}");
    let z = backward(t([2, 5]).cast(FloatDType::F16));
    assert!(matches!(z, OpError::DType { what: "z", .. }), "{z}");
}

/// A scaled copy writes its place alone, in each dtype, rounded to nearest; NaN stays NaN.
#[test]
fn a_scaled_copy_writes_its_place_alone() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let data = |values: Vec<f32>, shape| {
        Tensor::<2>::from_data(TensorData::new(values, shape), (&device, DType::F32))
    };
    for (dtype, round) in [
        (FloatDType::F32, (|x| x) as fn(f32) -> f32),
        (FloatDType::F16, |x| half::f16::from_f32(x).to_f32()),
        (FloatDType::BF16, |x| half::bf16::from_f32(x).to_f32()),
    ] {
        let mut own = values(tensor::<2>([5, 3], 7, &device));
        own[4] = f32::NAN;
        let out = tensor::<2>([9, 8], 8, &device).cast(dtype);
        let before = values(out.clone());
        copy_scaled(&ctx, &data(own.clone(), [5, 3]), &out, [3, 4], 1.7).expect("room");
        for (at, (have, before)) in values(out.clone()).into_iter().zip(before).enumerate() {
            let (row, column) = (at / 8, at % 8);
            let inside = (3..8).contains(&row) && (4..7).contains(&column);
            let want = if inside { round(1.7 * own[(row - 3) * 3 + column - 4]) } else { before };
            assert!(
                have == want || (have.is_nan() && want.is_nan()),
                "{dtype:?} {at}: {have} {want}"
            );
        }
        let wide = copy_scaled(&ctx, &data(own, [5, 3]), &out, [3, 6], 1.0);
        assert!(matches!(wide, Err(OpError::Shape { .. })), "{wide:?}");
    }
    let narrow = data(vec![0.0; 4], [2, 2]).cast(FloatDType::F16);
    let wrong = copy_scaled(&ctx, &narrow, &data(vec![0.0; 4], [2, 2]), [0, 0], 1.0);
    assert!(matches!(wrong, Err(OpError::DType { .. })), "{wrong:?}");
}
