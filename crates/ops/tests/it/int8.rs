use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::LinearConfig;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use ops::checkpoint::{Int8, Weight};
use ops::{
    Ctx, Epilogue, OpError, QuantizedLinear, QuantizedWeight, WeightFormat, quantized_linear,
};
use reference::{Distribution, fill, int8};

use crate::{tensor, values};

/// Returns a weight in the order of files.
fn stored(ctx: &Ctx, weight: &QuantizedWeight) -> Int8<'static> {
    let host = weight.to_host(ctx).expect("on the device");
    let Ok(Weight::Int8(stored)) = Weight::try_from(host) else { panic!("int8 is of files") };
    stored
}

fn uploaded(ctx: &Ctx, stored: &Int8<'_>, device: &Device) -> Result<QuantizedWeight, OpError> {
    let weight = Weight::Int8(stored.clone());
    QuantizedWeight::from_host(ctx, &weight.encoded().expect("int8"), device)
}

fn quantize(ctx: &Ctx, weight: Tensor<2>) -> Result<QuantizedWeight, OpError> {
    QuantizedWeight::quantize(ctx, weight, WeightFormat::Int8)
}

fn quantized(ctx: &Ctx, weight: Tensor<2>) -> (QuantizedWeight, Vec<f32>) {
    let made = quantize(ctx, weight).expect("finite");
    let dense = made.dequantize(ctx, FloatDType::F32).expect("f32");
    assert_eq!(dense.dims(), made.shape());
    (made, values(dense))
}

#[test]
fn a_weight_comes_back_as_files_have_it() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    for shape in [[24, 40], [7, 13], [3, 5], [1, 1]] {
        let [n, k] = shape;
        let input = fill(3, n * k, Distribution::Normal);
        let dense = Tensor::<2>::from_data(TensorData::new(input.clone(), shape), &device);
        let made = quantize(&ctx, dense).expect("finite");
        let host = stored(&ctx, &made);
        let codes: Vec<i8> = host.codes.iter().map(|code| code.cast_signed()).collect();
        assert_eq!((host.shape, codes.len()), (shape, n * k));
        assert_eq!(host.scb[..], int8::quantize(&input, n, k).expect("finite").scb);
        assert_eq!(int8::disagreement(&input, n, k, &codes, 2), Ok(None));
        let again = uploaded(&ctx, &host, &device).expect("as it was");
        let dense = values(again.dequantize(&ctx, FloatDType::F32).expect("f32"));
        assert_eq!(dense, int8::dequantize(&codes, &host.scb, k).expect("as many"));
        assert!(stored(&ctx, &again) == host);
        assert_eq!(again.bytes(), (n * k).next_multiple_of(4) as u64 + 4 * n as u64);
        // A record holds it too.
        let empty = quantize(&ctx, Tensor::zeros(shape, &device)).expect("finite");
        let loaded = empty.load_record(made.into_record());
        assert!(stored(&ctx, &loaded) == host);
    }
}

#[test]
fn weights_are_joined_where_words_hold_one_of_them() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let (first, one) = quantized(&ctx, tensor([3, 8], 1, &device));
    let (second, two) = quantized(&ctx, tensor([5, 8], 2, &device));
    let both =
        QuantizedWeight::join(&ctx, &[&first, &second]).expect("of one k").expect("whole words");
    assert_eq!(both.shape(), [8, 8]);
    assert_eq!(values(both.dequantize(&ctx, FloatDType::F32).expect("f32")), [one, two].concat());
    let (odd, _) = quantized(&ctx, tensor([3, 5], 1, &device));
    assert!(QuantizedWeight::join(&ctx, &[&odd, &odd]).expect("of one k").is_none());
    let rounds = |threshold| first.clone().rounding(threshold);
    assert!(
        QuantizedWeight::join(&ctx, &[&rounds(6.0), &rounds(6.0)]).expect("of one k").is_some()
    );
    assert!(
        QuantizedWeight::join(&ctx, &[&rounds(6.0), &rounds(0.0)]).expect("of one k").is_none()
    );
    let error = QuantizedWeight::join(&ctx, &[&first, &odd]).expect_err("of two k");
    assert!(matches!(error, OpError::Shape { .. }), "{error}");
    assert!(matches!(QuantizedWeight::join(&ctx, &[]), Err(OpError::Empty)));
}

#[test]
fn what_multiplies_no_bytes_rounds_no_x() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let (weight, _) = quantized(&ctx, tensor([8, 16], 1, &device));
    let x = tensor::<2>([130, 16], 2, &device);
    let run = |weight: &QuantizedWeight| {
        values(quantized_linear(&ctx, x.clone(), weight, Epilogue::default()).expect("valid"))
    };
    assert_eq!(run(&weight), run(&weight.clone().rounding(0.0)));
}

#[test]
fn a_layer_of_burns_becomes_one_in_8_bits() {
    struct Floats(usize);
    impl ModuleVisitor for Floats {
        fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
            self.0 += 1;
        }
    }
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let dense = LinearConfig::new(24, 16).init(&device);
    let x = tensor::<3>([2, 3, 24], 1, &device);
    let want = values(dense.forward(x.clone()));
    let layer = QuantizedLinear::quantize(&ctx, dense, WeightFormat::Int8).expect("finite");
    let have = layer.forward(x).expect("valid");
    assert_eq!(have.dims(), [2, 3, 16]);
    for (have, want) in values(have).iter().zip(&want) {
        assert!((have - want).abs() < 0.05, "{have} {want}");
    }
    // Optimizers see only the bias.
    let mut floats = Floats(0);
    layer.visit(&mut floats);
    assert_eq!(floats.0, 1);
}

#[test]
fn mistakes_are_errors() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let (weight, _) = quantized(&ctx, tensor([8, 16], 1, &device));
    let run = |x: Tensor<2>, epilogue| quantized_linear(&ctx, x, &weight, epilogue);
    let x = || tensor::<2>([3, 16], 2, &device);
    let wrong = run(tensor([3, 15], 2, &device), Epilogue::default()).expect_err("another k");
    assert!(matches!(wrong, OpError::Depth { lhs_k: 15, rhs_k: 16, .. }), "{wrong}");
    let bias = Some(tensor::<1>([7], 3, &device));
    run(x(), Epilogue { bias, ..Epilogue::default() }).expect_err("a bias of another length");
    let tf32 = run(x(), Epilogue { tf32: true, ..Epilogue::default() }).expect_err("no tf32");
    assert!(matches!(tf32, OpError::NoTf32));
    let nothing = run(Tensor::zeros([0, 16], &device), Epilogue::default()).expect("empty");
    assert_eq!(nothing.dims(), [0, 8]);
    let mut bad = tensor::<2>([8, 16], 1, &device).into_data().try_to_vec::<f32>().expect("f32");
    bad[77] = f32::NAN;
    let bad = Tensor::<2>::from_data(TensorData::new(bad, [8, 16]), &device);
    let error = quantize(&ctx, bad).expect_err("NaN");
    assert!(matches!(error, OpError::Quantize(_)), "{error}");
    let short = Int8 { shape: [2, 3], codes: vec![0; 5].into(), scb: vec![1.0; 2].into() };
    let error = uploaded(&ctx, &short, &device).expect_err("5 of 6");
    assert!(matches!(error, OpError::Shape { what: "codes", .. }), "{error}");
    let short = Int8 { shape: [2, 3], codes: vec![0; 6].into(), scb: vec![1.0; 1].into() };
    let error = uploaded(&ctx, &short, &device).expect_err("1 of 2");
    assert!(matches!(error, OpError::Shape { what: "absmax", .. }), "{error}");
}
