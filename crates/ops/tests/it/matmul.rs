use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use ops::{
    Activation, Ctx, Epilogue, Groups, NormKind, OpError, RowNorm, grouped_matmul, linear, matmul,
};
use reference::{Distribution, Layout, Matmul, Strides, fill};

use crate::{close, tensor, values};

fn dense(batch: &[usize], sizes: [usize; 3]) -> Matmul {
    Matmul::contiguous(batch, sizes, Layout::Row, Layout::Row, reference::DType::F32)
}

#[test]
fn strides_and_repeated_batches_are_read_as_they_are() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let run = |lhs, rhs| matmul::<4>(&ctx, lhs, rhs, Epilogue::default()).expect("valid");
    let (x, y) = (tensor([2, 3, 5, 8], 1, &device), tensor([2, 3, 8, 4], 2, &device));
    let (xs, ys) = (values(x.clone()), values(y.clone()));
    let want = dense(&[6], [5, 4, 8]).run(&xs, &ys, reference::Epilogue::NONE).expect("sizes");
    close(&values(run(x.clone(), y.clone())), &want, "dense");
    // The same values with the last two axes swapped in memory, and with the batch axes swapped.
    let transposed = |t: Tensor<4>| Tensor::from_data(t.swap_dims(2, 3).into_data(), &device);
    close(
        &values(run(transposed(x.clone()).swap_dims(2, 3), transposed(y.clone()).swap_dims(2, 3))),
        &want,
        "columns",
    );
    let swapped = Tensor::<4>::from_data(x.clone().swap_dims(0, 1).into_data(), &device);
    close(&values(run(swapped.swap_dims(0, 1), y.clone())), &want, "batch axes");
    // A view of every second column is neither row- nor column-contiguous.
    let wide = tensor::<4>([2, 3, 5, 16], 3, &device);
    let every_second = wide.clone().slice([0..2, 0..3, 0..5, 0..16]).reshape([2, 3, 5, 8, 2]);
    let every_second = every_second.narrow(4, 0, 1).reshape([2, 3, 5, 8]);
    let kept: Vec<f32> = values(wide).into_iter().step_by(2).collect();
    let spaced = dense(&[6], [5, 4, 8]).run(&kept, &ys, reference::Epilogue::NONE);
    close(&values(run(every_second, y.clone())), &spaced.expect("sizes"), "spaced");
    // Three heads share a key, two batches share one.
    let shared = y.clone().narrow(1, 0, 1);
    let mut repeated = dense(&[2, 3], [5, 4, 8]);
    repeated.rhs = Strides { batch: vec![3 * 32, 0], row: 4, col: 1 };
    let want = repeated.run(&xs, &ys, reference::Epilogue::NONE).expect("sizes");
    close(&values(run(x.clone(), shared)), &want, "repeated");
    // Three axes with uneven strides.
    let odd = matmul::<5>(
        &ctx,
        x.clone().reshape([2, 1, 3, 5, 8]),
        y.reshape([2, 3, 1, 8, 4]),
        Epilogue::default(),
    )
    .expect("valid");
    assert_eq!(odd.dims(), [2, 3, 3, 5, 4]);
    let mut outer = dense(&[2, 3, 3], [5, 4, 8]);
    outer.lhs.batch = vec![120, 0, 40];
    outer.rhs.batch = vec![96, 32, 0];
    let want = outer.run(&xs, &ys, reference::Epilogue::NONE).expect("sizes");
    close(&values(odd), &want, "uneven");
}

#[test]
fn a_linear_layer_has_its_epilogue_and_a_result_type() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let (x, w) = (tensor::<3>([2, 3, 8], 1, &device), tensor::<2>([8, 5], 2, &device));
    let (b, g) = (tensor::<1>([5], 3, &device), tensor::<3>([2, 3, 5], 4, &device));
    let r = tensor::<3>([2, 3, 5], 5, &device);
    for (ours, theirs) in [
        (Activation::Silu, reference::Activation::Silu),
        (Activation::Gelu, reference::Activation::Gelu),
        (Activation::GeluTanh, reference::Activation::GeluTanh),
    ] {
        let epilogue = Epilogue {
            bias: Some(b.clone()),
            activation: Some(ours),
            gate: Some(g.clone()),
            residual: Some(r.clone()),
            ..Epilogue::default()
        };
        let out = linear(&ctx, x.clone(), w.clone(), epilogue).expect("valid");
        let (b, g, r) = (values(b.clone()), values(g.clone()), values(r.clone()));
        let want = dense(&[], [6, 5, 8])
            .run(
                &values(x.clone()),
                &values(w.clone()),
                reference::Epilogue {
                    norm: None,
                    bias: Some(&b),
                    activation: Some(theirs),
                    gate: Some(&g),
                    residual: Some(&r),
                    ..reference::Epilogue::NONE
                },
            )
            .expect("sizes");
        close(&values(out), &want, ours.name());
    }
    let half = Epilogue { out: Some(FloatDType::F16), ..Epilogue::default() };
    assert_eq!(linear(&ctx, x.clone(), w.clone(), half).expect("valid").dtype(), DType::F16);
}

#[test]
fn empty_products_are_empty_or_zero() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let none = matmul::<3>(
        &ctx,
        Tensor::zeros([0, 3, 4], &device),
        Tensor::zeros([0, 4, 2], &device),
        Epilogue::default(),
    );
    assert_eq!(none.expect("an empty batch is a result").dims(), [0, 3, 2]);
    let (b, r) = (tensor::<1>([2], 1, &device), tensor::<2>([3, 2], 2, &device));
    let epilogue =
        Epilogue { bias: Some(b.clone()), residual: Some(r.clone()), ..Epilogue::default() };
    let sums =
        matmul(&ctx, Tensor::<2>::zeros([3, 0], &device), Tensor::zeros([0, 2], &device), epilogue);
    let want: Vec<f64> = values(r + b.reshape([1, 2])).into_iter().map(f64::from).collect();
    close(&values(sums.expect("a sum of nothing is 0")), &want, "k = 0");
}

#[test]
fn mistakes_are_errors() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let t = |shape: [usize; 3]| Tensor::<3>::zeros(shape, &device);
    let fails = |lhs, rhs, epilogue| matmul(&ctx, lhs, rhs, epilogue).expect_err("a mistake");
    let none = Epilogue::default;
    let depth = fails(t([1, 2, 3]), t([1, 4, 5]), none());
    assert!(matches!(depth, OpError::Depth { lhs_k: 3, rhs_k: 4, .. }), "{depth}");
    let batch = fails(t([2, 2, 3]), t([3, 3, 5]), none());
    assert!(matches!(batch, OpError::Broadcast { .. }), "{batch}");
    // Each axis is within the limit, but there are 2^32 matrices.
    let many = |t: Tensor<4>| t.expand([65_536, 65_536, 1, 1]);
    let one = || many(Tensor::<4>::zeros([1, 1, 1, 1], &device));
    let batches = matmul(&ctx, one(), one(), Epilogue::default()).expect_err("too many");
    assert!(matches!(batches, OpError::TooLarge(of) if of == 1 << 32), "{batches}");
    let half = fails(t([1, 2, 3]), t([1, 3, 5]).cast(FloatDType::F16), none());
    assert!(matches!(half, OpError::DType { what: "rhs", .. }), "{half}");
    let double =
        fails(t([1, 2, 3]).cast(FloatDType::F64), t([1, 3, 5]).cast(FloatDType::F64), none());
    assert!(matches!(double, OpError::NotFloat(DType::F64)), "{double}");
    let bias = Some(Tensor::zeros([4], &device));
    let bias = fails(t([1, 2, 3]), t([1, 3, 5]), Epilogue { bias, ..none() });
    assert!(matches!(bias, OpError::Shape { what: "bias", .. }), "{bias}");
    let gate = fails(t([1, 2, 3]), t([1, 3, 5]), Epilogue { gate: Some(t([1, 2, 1])), ..none() });
    assert!(matches!(gate, OpError::Shape { what: "gate", .. }), "{gate}");
    let flex = Device::flex();
    let elsewhere = matmul(
        &ctx,
        Tensor::<2>::zeros([2, 2], &flex),
        Tensor::zeros([2, 2], &flex),
        Epilogue::default(),
    );
    assert!(matches!(elsewhere.expect_err("no kernels"), OpError::Device(_)));
    let frozen = Ctx::new(tune::TuneCache::default(), tune::Policy::Frozen, String::new());
    let unknown = matmul(&frozen, t([1, 2, 3]), t([1, 3, 5]), none()).expect_err("not measured");
    assert!(matches!(unknown, OpError::Tune(tune::TuneError::Frozen { .. })), "{unknown}");
}

/// Compares every gradient of `Σ out · weights` with central differences of the reference.
#[test]
fn gradients_are_the_differences() {
    let (device, ctx) = (Device::cpu().autodiff(), Ctx::default());
    let activations = [
        (None, None),
        (Some(Activation::Silu), Some(reference::Activation::Silu)),
        (Some(Activation::Gelu), Some(reference::Activation::Gelu)),
        (Some(Activation::GeluTanh), Some(reference::Activation::GeluTanh)),
    ];
    // rhs broadcasts over two batches and is stored by columns.
    let (m, n, k) = (3, 4, 5);
    let problem = {
        let mut p = dense(&[2], [m, n, k]);
        p.rhs = Strides { batch: vec![0], row: 1, col: k };
        p
    };
    let seeds = [(2 * m * k, 1), (n * k, 2), (n, 3), (2 * m * n, 4), (2 * m * n, 5)];
    let inputs = seeds.map(|(len, seed)| fill(seed, len, Distribution::Normal));
    let weights = fill(6, 2 * m * n, Distribution::Normal);
    for (activation, theirs) in activations {
        let loss = |v: &[Vec<f32>; 5]| -> f64 {
            let epilogue = reference::Epilogue {
                bias: Some(&v[2]),
                activation: theirs,
                gate: theirs.map(|_| &v[3][..]),
                residual: theirs.map(|_| &v[4][..]),
                ..reference::Epilogue::NONE
            };
            let out = problem.run(&v[0], &v[1], epilogue).expect("sizes");
            out.iter().zip(&weights).map(|(o, w)| o * f64::from(*w)).sum()
        };
        let make = |i: usize, shape: [usize; 3]| {
            let data = TensorData::new(inputs[i].clone(), shape);
            Tensor::<3>::from_data(data, &device).require_grad()
        };
        let (x, w) = (make(0, [2, m, k]), make(1, [1, n, k]));
        let b = Tensor::<1>::from_data(TensorData::new(inputs[2].clone(), [n]), &device);
        let b = b.require_grad();
        let (g, r) = (make(3, [2, m, n]), make(4, [2, m, n]));
        let all = activation.is_some();
        let epilogue = Epilogue {
            bias: Some(b.clone()),
            activation,
            gate: all.then(|| g.clone()),
            residual: all.then(|| r.clone()),
            ..Epilogue::default()
        };
        let out = matmul(&ctx, x.clone(), w.clone().swap_dims(1, 2), epilogue).expect("valid");
        let weighted = Tensor::from_data(TensorData::new(weights.clone(), [2, m, n]), &device);
        let gradients = (out * weighted).sum().backward();
        let got = [
            x.grad(&gradients).map(values),
            w.grad(&gradients).map(values),
            b.grad(&gradients).map(values),
            g.grad(&gradients).map(values),
            r.grad(&gradients).map(values),
        ];
        for (which, got) in got.into_iter().enumerate().take(if all { 5 } else { 3 }) {
            let got = got.expect("every input is tracked");
            let step = 1f32 / 1024.0;
            let want: Vec<f64> = (0..inputs[which].len())
                .map(|i| {
                    let at = |sign: f32| {
                        let mut moved = inputs.clone();
                        moved[which][i] += sign * step;
                        (loss(&moved), f64::from(moved[which][i]))
                    };
                    let ((up, x1), (down, x0)) = (at(1.0), at(-1.0));
                    (up - down) / (x1 - x0)
                })
                .collect();
            close(&got, &want, &format!("{activation:?}, input {which}"));
        }
    }
}

/// Each of 400 batches gives 3 + 3/128, which rounds to 3 + 4/128 in bf16: sums of rounded values would be
/// 1216.
#[test]
fn the_gradient_of_what_repeats_is_summed_before_it_is_rounded() {
    let (device, ctx) = (Device::cpu().autodiff(), Ctx::default());
    let ones = |shape| Tensor::<3>::ones(shape, &device);
    let x = (ones([400, 3, 2]) * (1.0 + 1.0 / 128.0)).cast(DType::BF16);
    let w = ones([1, 2, 5]).cast(DType::BF16).require_grad();
    let out = matmul(&ctx, x, w.clone(), Epilogue::default()).expect("valid");
    let gradient = w.grad(&out.sum().backward()).expect("tracked");
    assert_eq!((gradient.dims(), gradient.dtype()), ([1, 2, 5], DType::BF16));
    assert_eq!(values(gradient), [1208.0; 10]);
}

/// f16 accumulation is used only if requested, and is an error if the device lacks it.
#[test]
fn f16_accumulation_is_asked_for() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let run = |dtype| {
        let [x, w] = [tensor::<2>([3, 4], 1, &device), tensor::<2>([4, 2], 2, &device)];
        let half = Epilogue { f16_accumulation: true, ..Epilogue::default() };
        matmul(&ctx, x.cast(dtype), w.cast(dtype), half).expect_err("refused")
    };
    for dtype in [DType::F32, DType::BF16] {
        let refused = run(dtype);
        assert!(matches!(&refused, OpError::F16Accumulation(own) if *own == dtype), "{refused}");
    }
    let refused = run(DType::F16).to_string();
    assert!(refused.contains("needs f16acc16 matrix instructions"), "{refused}");
}

#[test]
fn tf32_is_for_f32() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let [x, w] = [tensor::<2>([3, 4], 1, &device), tensor::<2>([4, 2], 2, &device)];
    let tf32 = Epilogue { tf32: true, ..Epilogue::default() };
    let refused = matmul(&ctx, x.cast(DType::F16), w.cast(DType::F16), tf32).expect_err("16 bits");
    assert!(matches!(refused, OpError::Tf32(DType::F16)), "{refused}");
}

#[test]
fn what_needs_no_gradient_gets_none_and_stays_fused() {
    let (device, ctx) = (Device::cpu().autodiff(), Ctx::default());
    let (x, w) = (tensor::<2>([3, 4], 1, &device), tensor::<2>([4, 2], 2, &device));
    let tracked = w.clone().require_grad();
    let out = matmul(&ctx, x.clone(), tracked.clone(), Epilogue::default()).expect("valid");
    let gradients = out.sum().backward();
    assert!(x.grad(&gradients).is_none());
    assert!(tracked.grad(&gradients).is_some());
    // Without tracked tensors an activation is fused, and the result is outside the graph.
    let silu = Epilogue { activation: Some(Activation::Silu), ..Epilogue::default() };
    let out = matmul(&ctx, x.clone(), w.clone(), silu).expect("valid");
    let silu = |v: f64| v / (1.0 + (-v).exp());
    let plain = dense(&[], [3, 2, 4]).run(&values(x), &values(w), reference::Epilogue::NONE);
    let want: Vec<f64> = plain.expect("sizes").into_iter().map(silu).collect();
    close(&values(out), &want, "fused");
}

/// Results and gradients of groups, one empty, equal those of each group's own matmul. Lhs and rhs have
/// either layout, with all parts of an epilogue.
#[test]
fn groups_are_products_of_their_own() {
    let (device, ctx) = (Device::cpu().autodiff(), Ctx::default());
    let offsets = [0u32, 4, 4, 5, 11];
    let groups = Groups::new(&offsets).expect("sorted");
    let (m, n, k, count) = (11, 6, 5, groups.count());
    let weights = tensor::<2>([m, n], 9, &device);
    for (transposed, activation) in
        [(false, None), (true, Some(Activation::Silu)), (false, Some(Activation::Gelu))]
    {
        let x = match transposed {
            true => tensor::<2>([k, m], 1, &device).swap_dims(0, 1),
            false => tensor::<2>([m, k], 1, &device),
        };
        let w = match transposed {
            true => tensor::<3>([count, n, k], 2, &device).swap_dims(1, 2),
            false => tensor::<3>([count, k, n], 2, &device),
        };
        let (x, w) = (x.require_grad(), w.require_grad());
        let bias = tensor::<1>([count * n], 3, &device).require_grad();
        let [gate, residual] = [4, 5].map(|salt| tensor::<2>([m, n], salt, &device).require_grad());
        let all = activation.is_some();
        let epilogue = |bias: Tensor<1>, gate: Tensor<2>, residual: Tensor<2>| Epilogue {
            bias: Some(bias),
            activation,
            gate: all.then_some(gate),
            residual: all.then_some(residual),
            ..Epilogue::default()
        };
        let whole = epilogue(bias.clone(), gate.clone(), residual.clone());
        let out = grouped_matmul(&ctx, x.clone(), w.clone(), &groups, whole).expect("valid");
        let together = (out.clone() * weights.clone()).sum().backward();
        let parts: Vec<_> = (0..count)
            .filter(|g| offsets[*g] < offsets[g + 1])
            .map(|g| {
                let rows = offsets[g] as usize..offsets[g + 1] as usize;
                let of = |t: &Tensor<2>| t.clone().slice_dim(0, rows.clone());
                let own = bias.clone().slice_dim(0, g * n..(g + 1) * n);
                let w = w.clone().slice_dim(0, g..g + 1).reshape([k, n]);
                matmul(&ctx, of(&x), w, epilogue(own, of(&gate), of(&residual))).expect("valid")
            })
            .collect();
        let apart = Tensor::cat(parts, 0);
        let wide = |t: Vec<f32>| t.into_iter().map(f64::from).collect::<Vec<_>>();
        let what = format!("transposed {transposed}, {activation:?}");
        close(&values(out), &wide(values(apart.clone())), &what);
        let apart = (apart * weights.clone()).sum().backward();
        macro_rules! same {
            ($($operand:ident)*) => {$(
                let [got, want] = [&together, &apart].map(|all| {
                    values($operand.grad(all).expect("every input is tracked"))
                });
                close(&got, &wide(want), &format!("{what}, {}", stringify!($operand)));
            )*};
        }
        same!(x w bias);
        if all {
            same!(gate residual);
        }
        let empty = w.grad(&together).expect("tracked").slice_dim(0, 1..2);
        assert!(values(empty).iter().all(|v| *v == 0.0), "nobody multiplied by it");
    }
}

#[test]
fn groups_that_mean_nothing_are_refused() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let refused = |offsets: &[u32]| Groups::new(offsets).expect_err("refused").to_string();
    assert!(
        refused(&[0]).starts_with("invalid offsets of rows: got fewer than two offsets\nhint: ")
    );
    assert!(refused(&[1, 2]).starts_with("invalid offsets of rows: got 1 as the first"));
    assert!(refused(&[0, 5, 4]).starts_with("invalid offsets of rows: offset 5 precedes 4"));
    let groups = Groups::new(&[0, 2, 3]).expect("sorted");
    let run = |m: usize, rhs: [usize; 3], bias: usize| {
        let epilogue =
            Epilogue { bias: Some(Tensor::ones([bias], &device)), ..Epilogue::default() };
        let (x, w) = (Tensor::ones([m, rhs[1]], &device), Tensor::ones(rhs, &device));
        grouped_matmul(&ctx, x, w, &groups, epilogue)
    };
    let fails = |m, rhs, bias| run(m, rhs, bias).expect_err("refused").to_string();
    assert!(
        fails(4, [2, 3, 5], 10)
            .starts_with("invalid offsets of rows: got 3 as the last offset, expected 4")
    );
    assert!(fails(3, [3, 3, 5], 10).starts_with("rhs has shape [3, 3, 5]"));
    assert!(fails(3, [2, 3, 5], 5).starts_with("bias has shape [5]"));
    // With k = 0 the result is the bias of each group.
    let out = run(3, [2, 0, 2], 4).expect("valid");
    assert_eq!(values(out), [1.0; 6]);
    let norm = RowNorm { weight: Tensor::ones([3], &device), kind: NormKind::Rms, eps: 0.0 };
    let (x, w) = (Tensor::full([3, 3], 4.0, &device), Tensor::ones([2, 3, 1], &device));
    let epilogue = Epilogue { norm: Some(norm), ..Epilogue::default() };
    let out = grouped_matmul(&ctx, x, w, &groups, epilogue).expect("valid");
    close(&values(out), &[3.0; 3], "normalised");
}
