use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::LinearConfig;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use ops::checkpoint::{Absmax, FourBit, Layout, NotStored, Weight};
use ops::{
    Activation, Block, Ctx, Epilogue, OpError, QuantizedLinear, QuantizedWeight, Scales, Scheme,
    WeightFormat, linear, quantized_glu, quantized_linear,
};
use reference::{Distribution, Matmul, fill, nf4};

use crate::{close, tensor, values};

fn product(m: usize, n: usize, k: usize) -> Matmul {
    Matmul::contiguous(
        &[],
        [m, n, k],
        reference::Layout::Row,
        reference::Layout::Col,
        reference::DType::F32,
    )
}

/// Returns a weight in the order of files.
fn stored(ctx: &Ctx, weight: &QuantizedWeight) -> FourBit<'static> {
    let host = weight.to_host(ctx).expect("on the device");
    let Ok(Weight::FourBit(stored)) = Weight::try_from(host) else { panic!("one weight") };
    stored
}

fn uploaded(ctx: &Ctx, stored: &FourBit<'_>, device: &Device) -> Result<QuantizedWeight, OpError> {
    let weight = Weight::FourBit(stored.clone());
    QuantizedWeight::from_host(ctx, &weight.encoded().expect("4 bits"), device)
}

fn quantized(ctx: &Ctx, weight: Tensor<2>) -> (QuantizedWeight, Vec<f32>) {
    let made = QuantizedWeight::quantize(ctx, weight, WeightFormat::Nf4).expect("finite");
    let dense = made.dequantize(ctx, FloatDType::F32).expect("f32");
    assert_eq!(dense.dims(), made.shape());
    (made, values(dense))
}

#[test]
fn a_weight_comes_back_as_files_have_it() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    for (shape, block_size, nested, format) in [
        ([24, 40], 64, false, WeightFormat::Nf4),
        ([320, 64], 64, true, WeightFormat::Nf4),
        ([7, 13], 32, true, WeightFormat::Fp4),
        ([48, 512], 128, true, WeightFormat::Nf4),
    ] {
        let input = fill(3, shape.iter().product(), Distribution::Normal);
        let dense = Tensor::<2>::from_data(TensorData::new(input.clone(), shape), &device);
        let scales = if nested { Scales::Nested } else { Scales::F32 };
        let scheme = Scheme { format, block: Block::Elements(block_size), scales };
        let made = QuantizedWeight::quantize(&ctx, dense, scheme).expect("finite");
        let host = stored(&ctx, &made);
        let four_bit = match format {
            WeightFormat::Nf4 => reference::FourBit::Nf4,
            _ => reference::FourBit::Fp4,
        };
        let want = four_bit.quantize(&input, block_size as usize).expect("finite");
        let Layout { shape: have, quant_type: of, .. } = &host.layout;
        assert_eq!((&have[..], *of), (&shape[..], format));
        assert_eq!(host.quant_map[..], four_bit.codebook());
        let wrong = four_bit.disagreement(&input, block_size as usize, &host.codes, 2);
        assert_eq!(wrong.expect("as many codes"), None);
        let absmax = match &host.absmax {
            Absmax::Plain(absmax) => absmax.to_vec(),
            Absmax::Nested(nested) => {
                assert_eq!(nested.offset, nf4::mean(&want.absmax));
                let map: &[f32; 256] = nested.quant_map[..].try_into().expect("256");
                let unnested = nf4::unnest(map, &nested.codes, &nested.absmax, nested.offset);
                unnested.expect("a scale for 256")
            }
        };
        if !nested {
            assert_eq!(absmax, want.absmax);
        }
        let len = input.len();
        let meant =
            nf4::dequantize(&four_bit.codebook(), &host.codes, &absmax, block_size as usize, len);
        let again = uploaded(&ctx, &host, &device).expect("as it was");
        let dense = again.dequantize(&ctx, FloatDType::F32).expect("f32");
        assert_eq!(values(dense), meant.expect("as many"));
        assert!(stored(&ctx, &again) == host);
        assert_eq!(again.bytes(), made.bytes());
        // A record holds it in this order too.
        let empty = QuantizedWeight::quantize(&ctx, Tensor::zeros(shape, &device), scheme);
        let loaded = empty.expect("finite").load_record(made.into_record());
        assert!(stored(&ctx, &loaded) == host);
    }
}

#[test]
fn products_are_those_of_the_dense_weight() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let (n, k) = (24, 72);
    let (weight, dense) = quantized(&ctx, tensor([n, k], 1, &device));
    let x = tensor::<3>([2, 3, k], 2, &device);
    let (b, g) = (tensor::<1>([n], 3, &device), tensor::<3>([2, 3, n], 4, &device));
    let r = tensor::<3>([2, 3, n], 5, &device);
    let (xs, bs) = (values(x.clone()), values(b.clone()));
    let (gs, rs) = (values(g.clone()), values(r.clone()));
    let out = quantized_linear(&ctx, x.clone(), &weight, Epilogue::default()).expect("valid");
    assert_eq!(out.dims(), [2, 3, n]);
    let want = product(6, n, k).run(&xs, &dense, reference::Epilogue::NONE).expect("sizes");
    close(&values(out), &want, "bare");
    let epilogue = Epilogue {
        bias: Some(b),
        activation: Some(Activation::Silu),
        gate: Some(g),
        residual: Some(r),
        ..Epilogue::default()
    };
    let out = quantized_linear(&ctx, x.clone(), &weight, epilogue.clone()).expect("valid");
    let theirs = reference::Epilogue {
        norm: None,
        bias: Some(&bs),
        activation: Some(reference::Activation::Silu),
        gate: Some(&gs),
        residual: Some(&rs),
        ..reference::Epilogue::NONE
    };
    let want = product(6, n, k).run(&xs, &dense, theirs).expect("sizes");
    close(&values(out), &want, "all");
    // A view with other strides.
    let transposed = Tensor::<3>::from_data(x.swap_dims(0, 2).into_data(), &device).swap_dims(0, 2);
    close(
        &values(quantized_linear(&ctx, transposed, &weight, epilogue).expect("valid")),
        &want,
        "strides",
    );
}

#[test]
fn weights_are_joined_and_gate_one_another() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    // 16384 elements each: whole nested groups.
    let (n, k) = (64, 256);
    let (gate, gates) = quantized(&ctx, tensor([n, k], 1, &device));
    let (up, ups) = quantized(&ctx, tensor([n, k], 2, &device));
    let both = QuantizedWeight::join(&ctx, &[&gate, &up]).expect("of one k").expect("whole groups");
    assert_eq!(both.shape(), [2 * n, k]);
    let x = tensor::<2>([3, k], 3, &device);
    let (b, r) = (tensor::<1>([2 * n], 4, &device), tensor::<2>([3, n], 5, &device));
    let (xs, bs, rs) = (values(x.clone()), values(b.clone()), values(r.clone()));
    let epilogue = Epilogue {
        bias: Some(b),
        activation: Some(Activation::GeluTanh),
        residual: Some(r),
        ..Epilogue::default()
    };
    let theirs = reference::Epilogue {
        bias: Some(&bs[..n]),
        activation: Some(reference::Activation::GeluTanh),
        up: Some(reference::Up { rhs: &ups, bias: Some(&bs[n..]) }),
        residual: Some(&rs),
        ..reference::Epilogue::NONE
    };
    let want = product(3, n, k).run(&xs, &gates, theirs).expect("sizes");
    let out = quantized_glu(&ctx, x.clone(), &both, epilogue.clone()).expect("valid");
    close(&values(out), &want, "fused");
    // With a gradient, the activation is an ordinary op.
    let tracked = Tensor::<2>::from_data(x.into_data(), &device.clone().autodiff()).require_grad();
    let lifted = |t: Tensor<2>| Tensor::<2>::from_data(t.into_data(), &tracked.device());
    let epilogue = Epilogue {
        bias: epilogue.bias.map(|b| Tensor::from_data(b.into_data(), &tracked.device())),
        residual: epilogue.residual.map(lifted),
        ..epilogue
    };
    let out = quantized_glu(&ctx, tracked.clone(), &both, epilogue).expect("valid");
    close(&values(out.clone()), &want, "by ops");
    let gradient = values(tracked.grad(&out.sum().backward()).expect("x is tracked"));
    let sum = |at: usize, step: f32| {
        let mut moved = xs.clone();
        moved[at] += step;
        let out = product(3, n, k).run(&moved, &gates, theirs).expect("sizes");
        out.into_iter().sum::<f64>()
    };
    let largest = gradient.iter().fold(0.0, |max: f32, v| max.max(v.abs()));
    for at in (0..xs.len()).step_by(19) {
        let slope = (sum(at, 0.01) - sum(at, -0.01)) / 0.02;
        let off = (slope - f64::from(gradient[at])).abs();
        assert!(off < 2e-3 * f64::from(largest), "{at}: {slope}, {} of {largest}", gradient[at]);
    }

    let joined = both.to_host(&ctx).expect("on the device");
    assert_eq!(Weight::try_from(joined), Err(NotStored::Offsets));
    let (small, _) = quantized(&ctx, tensor([n / 2, k], 1, &device));
    let join = |parts: &[&QuantizedWeight]| QuantizedWeight::join(&ctx, parts);
    assert!(join(&[&small, &gate]).expect("of one k").is_none(), "half a group");
    let other = QuantizedWeight::quantize(&ctx, tensor([n, k], 1, &device), WeightFormat::Fp4);
    assert!(join(&[&gate, &other.expect("finite")]).expect("of one k").is_none(), "two books");
    assert!(matches!(join(&[]), Err(OpError::Empty)));
}

#[test]
fn gradients_are_those_of_a_dense_layer() {
    let (plain, ctx) = (Device::cpu(), Ctx::default());
    let device = plain.clone().autodiff();
    let (n, k) = (24, 72);
    let (weight, dense) = quantized(&ctx, tensor([n, k], 1, &plain));
    let of = |t: Tensor<2>| Tensor::<2>::from_data(t.into_data(), &device);
    let dense = Tensor::<2>::from_data(TensorData::new(dense, [n, k]), &device);
    let (x, g) = (tensor::<2>([5, k], 2, &plain), tensor::<2>([5, n], 3, &plain));
    let (b, weights) = (tensor::<1>([n], 4, &plain), of(tensor([5, n], 6, &plain)));
    for activation in [None, Some(Activation::Silu)] {
        let run = |quantized: bool| {
            let x = of(x.clone()).require_grad();
            let b = Tensor::<1>::from_data(b.clone().into_data(), &device).require_grad();
            let gate = activation.map(|_| of(g.clone()).require_grad());
            let epilogue =
                Epilogue { bias: Some(b.clone()), activation, gate, ..Epilogue::default() };
            let y = match quantized {
                true => quantized_linear(&ctx, x.clone(), &weight, epilogue),
                false => linear(&ctx, x.clone(), dense.clone().transpose(), epilogue),
            };
            let all = (y.expect("valid") * weights.clone()).sum().backward();
            let grads = (x.grad(&all).expect("tracked"), b.grad(&all).expect("tracked"));
            (values(grads.0), values(grads.1))
        };
        let (ours, theirs) = (run(true), run(false));
        let wide = |v: Vec<f32>| v.into_iter().map(f64::from).collect::<Vec<_>>();
        close(&ours.0, &wide(theirs.0), "dx");
        close(&ours.1, &wide(theirs.1), "dbias");
    }
}

/// Lengths of a module's floating-point parameters.
struct Floats(Vec<usize>);

impl ModuleVisitor for Floats {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.val().shape().num_elements());
    }
}

#[test]
fn a_layer_of_burns_becomes_one_in_4_bits() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let mut dense = LinearConfig::new(72, 24).init(&device);
    dense.weight = Param::from_tensor(tensor([72, 24], 2, &device));
    dense.bias = Some(Param::from_tensor(tensor([24], 3, &device)));
    let x = tensor::<2>([4, 72], 1, &device);
    let exact = values(dense.forward(x.clone()));
    let layer = QuantizedLinear::quantize(&ctx, dense, WeightFormat::Nf4).expect("finite");
    let weight = layer.weight.dequantize(&ctx, FloatDType::F32).expect("f32");
    let bias = values(layer.bias.as_ref().map(Param::val).expect("Burn's has one"));
    let epilogue = reference::Epilogue::bias(&bias);
    let want = product(4, 24, 72).run(&values(x.clone()), &values(weight), epilogue);
    let got = values(layer.forward(x.clone()).expect("valid"));
    close(&got, &want.expect("sizes"), "layer");
    // Four bits of a normal weight in blocks of 64 have a relative RMS error of 9.6%, and so does a matmul.
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>();
    let apart = square(&mut got.iter().zip(&exact).map(|(g, e)| g - e));
    let share = (apart / square(&mut exact.iter().copied())).sqrt();
    assert!((0.05..0.15).contains(&share), "{share}");
    let silu = layer.forward_activated(x, Activation::Silu).expect("valid");
    let silu = values(silu);
    assert!(silu.iter().zip(&got).all(|(s, v)| (s - v / (1.0 + (-v).exp())).abs() < 1e-5));
    // Only the bias is trainable.
    let mut floats = Floats(Vec::new());
    layer.visit(&mut floats);
    assert_eq!(floats.0, [24]);
}

#[test]
fn what_is_no_weight_is_refused() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let quantize = |values: Vec<f32>, shape: [usize; 2], block_size| {
        let dense = Tensor::<2>::from_data(TensorData::new(values, shape), &device);
        let block = Block::Elements(block_size);
        let scheme = Scheme { block, ..WeightFormat::Nf4.scheme() };
        QuantizedWeight::quantize(&ctx, dense, scheme)
    };
    for special in [f32::NAN, f32::INFINITY] {
        let error = quantize(vec![1.0, special], [1, 2], 64).expect_err("not finite");
        assert!(matches!(error, OpError::Quantize(_)), "{error}");
    }
    assert!(matches!(quantize(vec![1.0; 96], [2, 48], 48), Err(OpError::Weight(_))));
    let weight = quantize(vec![1.0; 96], [2, 48], 64).expect("finite");
    let host = stored(&ctx, &weight);
    let short = FourBit { codes: host.codes[1..].to_vec().into(), ..host.clone() };
    let error = uploaded(&ctx, &short, &device).expect_err("47 bytes");
    assert!(error.to_string().starts_with("codes has shape [47]"), "{error}");
    let absmax = Absmax::Plain(vec![1.0].into());
    let error = uploaded(&ctx, &FourBit { absmax, ..host }, &device);
    assert!(error.expect_err("one of two blocks").to_string().starts_with("absmax"));
    let run = |x: Tensor<2>, epilogue| quantized_linear(&ctx, x, &weight, epilogue);
    let x = || tensor::<2>([3, 48], 1, &device);
    assert!(matches!(
        run(tensor([3, 47], 1, &device), Epilogue::default()),
        Err(OpError::Depth { .. })
    ));
    let half = Epilogue { out: Some(FloatDType::F16), ..Epilogue::default() };
    assert!(matches!(run(x(), half), Err(OpError::DType { what: "the result", .. })));
    let tf32 = Epilogue { tf32: true, ..Epilogue::default() };
    assert!(matches!(run(x(), tf32), Err(OpError::NoTf32)));
    let half = Epilogue { f16_accumulation: true, ..Epilogue::default() };
    assert!(matches!(run(x(), half), Err(OpError::F16Accumulation(_))));
    let bias = Epilogue { bias: Some(tensor([3], 1, &device)), ..Epilogue::default() };
    assert!(matches!(run(x(), bias), Err(OpError::Shape { what: "bias", .. })));
    for rows in [1, 3] {
        let odd = quantize(vec![1.0; rows * 48], [rows, 48], 64).expect("finite");
        let tracked = Tensor::<2>::from_data(x().into_data(), &device.clone().autodiff());
        for x in [x(), tracked.require_grad()] {
            let error = quantized_glu(&ctx, x, &odd, Epilogue::default()).expect_err("no halves");
            assert!(matches!(error, OpError::Matmul(_)), "{error}");
        }
    }
    assert_eq!(
        run(tensor([0, 48], 1, &device), Epilogue::default()).expect("empty").dims(),
        [0, 2]
    );
}
