//! Properties of every weight format.

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use ops::{
    Activation, Ctx, Epilogue, OpError, QuantizedWeight, WeightFormat, linear, quantized_glu,
    quantized_linear,
};

use crate::{close, tensor, values};

/// Returns a weight and its dense values; none if rows of this length have no whole blocks.
fn quantized(
    ctx: &Ctx,
    weight: Tensor<2>,
    format: WeightFormat,
) -> Option<(QuantizedWeight, Vec<f32>)> {
    match QuantizedWeight::quantize(ctx, weight, format) {
        Ok(made) => {
            let dense = values(made.dequantize(ctx, FloatDType::F32).expect("f32"));
            Some((made, dense))
        }
        Err(OpError::Weight(_)) => None,
        Err(other) => panic!("{format}: {other}"),
    }
}

#[test]
fn codes_stand_for_values_that_are_near() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let exact = tensor::<2>([24, 96], 1, &device);
    for format in WeightFormat::all() {
        let (made, dense) = quantized(&ctx, exact.clone(), format).expect("whole blocks");
        assert_eq!((made.shape(), made.scheme()), ([24, 96], format.scheme()));
        let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>();
        let exact = values(exact.clone());
        let apart = square(&mut dense.iter().zip(&exact).map(|(d, e)| d - e));
        let share = (apart / square(&mut exact.iter().copied())).sqrt();
        // Relative RMS error: 10% for 4 bits of a normal weight, 0.7% for 8 bits.
        let bar = if format.bits() == 4 { 0.15 } else { 0.01 };
        assert!(share < bar, "{format}: {share}");
        let planned = format.scheme().bytes(made.shape());
        assert!(u128::from(made.bytes()) >= planned, "{format}: {} bytes", made.bytes());
        let host = made.to_host(&ctx).expect("on the device");
        let again = QuantizedWeight::from_host(&ctx, &host, &device).expect("as it was");
        assert!(again.to_host(&ctx).expect("on the device") == host, "{format}");
        let again = values(again.dequantize(&ctx, FloatDType::F32).expect("f32"));
        assert_eq!(again, dense, "{format}");
    }
}

#[test]
fn products_and_gradients_are_those_of_the_dense_weight() {
    let (plain, ctx) = (Device::cpu(), Ctx::default());
    let device = plain.clone().autodiff();
    let shapes =
        [([24, 72], 5), ([13, 37], 1), ([40, 64], 11), ([24, 96], 3), ([13, 32], 1), ([8, 64], 40)];
    for format in WeightFormat::all() {
        for ([n, k], m) in shapes {
            let made = quantized(&ctx, tensor([n, k], 1, &plain), format);
            let Some((weight, dense)) = made else { continue };
            let of = |t: Tensor<2>| Tensor::<2>::from_data(t.into_data(), &device);
            let dense = Tensor::<2>::from_data(TensorData::new(dense, [n, k]), &device);
            let (x, g) = (tensor::<2>([m, k], 2, &plain), tensor::<2>([m, n], 3, &plain));
            let (b, weights) = (tensor::<1>([n], 4, &plain), of(tensor([m, n], 6, &plain)));
            for activation in [None, Some(Activation::Silu)] {
                let run = |quantized: bool, tracked: bool| {
                    let x = of(x.clone()).set_require_grad(tracked);
                    let b = Tensor::<1>::from_data(b.clone().into_data(), &device);
                    let b = b.set_require_grad(tracked);
                    let gate = activation.map(|_| of(g.clone()).set_require_grad(tracked));
                    let epilogue =
                        Epilogue { bias: Some(b.clone()), activation, gate, ..Epilogue::default() };
                    let y = match quantized {
                        true => quantized_linear(&ctx, x.clone(), &weight, epilogue),
                        false => linear(&ctx, x.clone(), dense.clone().transpose(), epilogue),
                    };
                    let y = y.expect("valid");
                    let made = values(y.clone());
                    if !tracked {
                        return [made, Vec::new(), Vec::new()];
                    }
                    let all = (y * weights.clone()).sum().backward();
                    [
                        made,
                        values(x.grad(&all).expect("tracked")),
                        values(b.grad(&all).expect("tracked")),
                    ]
                };
                for tracked in [false, true] {
                    for ((ours, theirs), name) in
                        run(true, tracked).iter().zip(run(false, tracked)).zip(["y", "dx", "dbias"])
                    {
                        let wide: Vec<f64> = theirs.into_iter().map(f64::from).collect();
                        close(ours, &wide, &format!("{format} {name}"));
                    }
                }
            }
        }
    }
}

#[test]
fn weights_of_one_format_are_joined() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    for format in WeightFormat::all() {
        // 16384 elements each: whole words, blocks and nested groups.
        let make = |seed| quantized(&ctx, tensor([64, 256], seed, &device), format);
        let [(first, one), (second, two)] = [1, 2].map(|seed| make(seed).expect("whole blocks"));
        let both = QuantizedWeight::join(&ctx, &[&first, &second]).expect("of one k");
        let both = both.expect("whole groups");
        let dense = values(both.dequantize(&ctx, FloatDType::F32).expect("f32"));
        assert!(dense == [one, two].concat(), "{format}");
        for other in WeightFormat::all().filter(|other| *other != format) {
            let (other, _) = quantized(&ctx, tensor([64, 256], 1, &device), other).expect("whole");
            assert!(QuantizedWeight::join(&ctx, &[&first, &other]).expect("of one k").is_none());
        }
        let glu = quantized_glu(&ctx, tensor([3, 256], 3, &device), &both, Epilogue::default());
        assert_eq!(glu.is_ok(), format.info().gated, "{format}");
    }
}
