//! Kernels on files of bitsandbytes: fixtures of `checkpoint` hold original weights and their values after
//! bitsandbytes. Weights quantised on a GPU (`cuda_*`) are equal bit for bit; `reference::nf4` lists the
//! differences of the CPU.

use std::path::Path;

use arch::Backend;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use cubecl::prelude::CubeElement;
use kernels::nf4::{Weight as Sizes, nest};
use ops::checkpoint::{Absmax, Checkpoint, DType, FourBit, Layout, Nested, Weight};
use ops::{
    Block, Ctx, Epilogue, OpError, QuantizedWeight, Scales, Scheme, WeightFormat, quantized_linear,
};
use reference::{Distribution, Matmul, fill, nf4};

use crate::values;

/// Runs `check` on every weight, with its original values and those that bitsandbytes decodes.
fn each(mut check: impl FnMut(&str, Weight<'_>, [&[f32]; 2])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/fixtures");
    let files = folder.read_dir().expect("there").map(|entry| entry.expect("listed").path());
    for path in files.filter(|path| path.extension().is_some_and(|e| e == "safetensors")) {
        let name = path.file_stem().expect("named").to_string_lossy();
        let file = Checkpoint::open(&path).expect("a fixture is a checkpoint");
        let beside = |what: &str| {
            let found = file.names().find(|name| name.starts_with(what)).expect("saved beside");
            file.tensor(found).expect("listed").widened().expect("floats")
        };
        let weight = ["linear.weight", "experts.gate_up_proj"].iter().find(|w| file.contains(w));
        let weight = file.weight(weight.expect("one of these")).expect("written by bitsandbytes");
        check(&name, weight, [&beside("original."), &beside("dequantized.")]);
    }
}

/// Runs `check` on every 4-bit weight, as a matrix.
fn each_four_bit(mut check: impl FnMut(&str, FourBit<'_>, [&[f32]; 2])) {
    let mut count = 0;
    each(|name, weight, beside| {
        let Weight::FourBit(weight) = weight else { return };
        let k = *weight.layout.shape.last().expect("it has axes");
        let shape = vec![beside[0].len() / k, k];
        check(name, FourBit { layout: Layout { shape, ..weight.layout }, ..weight }, beside);
        count += 1;
    });
    assert_eq!(count, 16);
}

fn on_cuda(name: &str) -> bool {
    name.starts_with("cuda_")
}

/// Panics at the first value with different bits.
fn same(what: &str, ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (i, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        assert!(ours.to_bits() == theirs.to_bits(), "{what}: [{i}] is {ours:e}, not {theirs:e}");
    }
}

const fn float(dtype: DType) -> (FloatDType, reference::DType) {
    match dtype {
        DType::F16 => (FloatDType::F16, reference::DType::F16),
        DType::Bf16 => (FloatDType::BF16, reference::DType::Bf16),
        _ => (FloatDType::F32, reference::DType::F32),
    }
}

/// Returns values in `dtype`.
fn dense(values: &[f32], shape: [usize; 2], dtype: FloatDType) -> Tensor<2> {
    let wide = TensorData::new(values.to_vec(), shape);
    Tensor::<2>::from_data(wide, &Device::cpu()).cast(dtype)
}

/// Checks matmuls of few and of many rows with a weight `[n, k]` against those with bitsandbytes' dense
/// values.
fn multiplied(
    name: &str,
    [n, k]: [usize; 2],
    dtype: DType,
    theirs: &[f32],
    run: impl Fn(Tensor<2>) -> Result<Tensor<2>, OpError>,
) {
    let (float, dtype) = float(dtype);
    for m in [1, 40] {
        let x = fill(m as u64, m * k, Distribution::Normal);
        let x = dtype.decode(&dtype.encode(&x)).expect("whole values");
        let out = values(run(dense(&x, [m, k], float)).expect("valid"));
        let layouts = [reference::Layout::Row, reference::Layout::Col];
        let product = Matmul::contiguous(&[], [m, n, k], layouts[0], layouts[1], dtype);
        let all = product.everything();
        let compared = product.check(&all, &x, theirs, reference::Epilogue::NONE, &out);
        let compared = compared.expect("the sizes agree");
        assert!(compared.passed, "{name}, {m} rows: {compared}");
    }
}

#[test]
fn four_bits_are_decoded_and_multiplied_as_bitsandbytes_does() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    each_four_bit(|name, host, [_, theirs]| {
        let dtype = host.layout.dtype;
        let weight = Weight::FourBit(host);
        let encoded = weight.encoded().expect("4 bits");
        let weight = QuantizedWeight::from_host(&ctx, &encoded, &device).expect("a matrix");
        let ours = weight.dequantize(&ctx, float(dtype).0).expect("a float");
        // Some of bitsandbytes' code decodes FP4's code 8 to -0.
        let plus_zero = |values: &[f32]| values.iter().map(|v| v + 0.0).collect::<Vec<_>>();
        same(name, &plus_zero(&values(ours)), &plus_zero(theirs));
        multiplied(name, weight.shape(), dtype, theirs, |x| {
            quantized_linear(&ctx, x, &weight, Epilogue::default())
        });
    });
}

#[test]
fn four_bits_are_quantised_as_bitsandbytes_does() {
    let ctx = Ctx::default();
    each_four_bit(|name, theirs, [original, _]| {
        let layout = &theirs.layout;
        let [n, k] = layout.shape[..] else { panic!("a matrix") };
        let make = |nested| {
            let block = Block::Elements(layout.block_size as u32);
            let scales = if nested { Scales::Nested } else { Scales::F32 };
            let scheme = Scheme { format: layout.quant_type, block, scales };
            let dense = dense(original, [n, k], float(layout.dtype).0);
            let made = QuantizedWeight::quantize(&ctx, dense, scheme).expect("finite");
            let made = Weight::try_from(made.to_host(&ctx).expect("on the device"));
            let Ok(Weight::FourBit(made)) = made else { panic!("one weight") };
            made
        };
        let ours = make(false);
        same(name, &ours.quant_map, &theirs.quant_map);
        // The CPU swaps the signs of FP4's two zeros, codes 0 and 8.
        let unsigned = layout.quant_type == WeightFormat::Fp4 && !on_cuda(name);
        let codes = |codes: &[u8]| -> Vec<u8> {
            let halves = codes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
            halves.map(|code| if unsigned && code == 8 { 0 } else { code }).collect()
        };
        assert!(codes(&ours.codes) == codes(&theirs.codes), "{name}");
        let Absmax::Plain(absmax) = &ours.absmax else { panic!("none were nested") };
        match &theirs.absmax {
            Absmax::Plain(theirs) => {
                // On the CPU a short last block of zeros has absmax 1e-38, which is subnormal.
                let theirs = theirs.iter().map(|a| if a.is_subnormal() { 0.0 } else { *a });
                same(name, absmax, &theirs.collect::<Vec<_>>());
            }
            Absmax::Nested(theirs) => {
                let codes = nested_as_theirs(name, absmax, [n, k], layout.block_size, theirs);
                let Absmax::Nested(whole) = make(true).absmax else { panic!("all were nested") };
                // Torch's f32 mean may be the neighbouring value.
                let off = (whole.offset - theirs.offset).abs();
                assert!(off <= theirs.offset * f32::EPSILON, "{name}: {off}");
                if off == 0.0 {
                    same(name, &whole.absmax, &theirs.absmax);
                    assert!(whole.codes == codes, "{name}");
                }
            }
        }
    });
}

/// Nests absmax relative to bitsandbytes' offset; returns the codes.
fn nested_as_theirs(
    name: &str,
    absmax: &[f32],
    [n, k]: [usize; 2],
    block_size: usize,
    theirs: &Nested<'_>,
) -> Vec<u8> {
    // Step of the table in which the CPU looks codes up: a value there may be off by half a step.
    const PLACE: f32 = 2.0 / 65535.0;
    let cpu = arch::Device::open(Backend::Cpu).expect("the CPU runtime needs nothing");
    let client = cpu.client();
    let sizes = Sizes::new(n as u32, k as u32, block_size as u32, true).expect("valid");
    let handle = client.create_from_slice(f32::as_bytes(absmax));
    let (codes, nested) = nest(&cpu, &handle, sizes, theirs.offset);
    let codes = client.read_one(codes).expect("it ran")[..absmax.len()].to_vec();
    let pairs = client.read_one(nested.scales).expect("it ran");
    let pairs = f32::from_bytes(&pairs)[..2 * theirs.absmax.len()].chunks_exact(2);
    let scales: Vec<f32> = pairs.map(|pair| pair[0]).collect();
    same(name, &scales, &theirs.absmax);
    let map = nf4::dynamic_map();
    same(name, &theirs.quant_map, &map);
    assert_eq!(codes.len(), theirs.codes.len(), "{name}");
    for (block, (ours, code)) in codes.iter().zip(&theirs.codes[..]).enumerate() {
        let x = (absmax[block] - theirs.offset) / scales[block / nf4::NESTED_BLOCK_SIZE];
        let [one, other] = [ours, code].map(|code| (map[usize::from(*code)] - x).abs());
        let by_table = !on_cuda(name) && (one - other).abs() <= PLACE;
        assert!(ours == code || by_table, "{name} {block}: {ours}, not {code}, of {x}");
    }
    codes
}

#[test]
fn eight_bits_are_those_of_bitsandbytes() {
    let (device, ctx, mut count) = (Device::cpu(), Ctx::default(), 0);
    each(|name, weight, [original, dequantized]| {
        let Weight::Int8(theirs) = weight else { return };
        // bitsandbytes' quantiser rounds to f16 first.
        let dense = dense(original, theirs.shape, FloatDType::F16);
        let ours = QuantizedWeight::quantize(&ctx, dense, WeightFormat::Int8).expect("finite");
        let ours = Weight::try_from(ours.to_host(&ctx).expect("on the device"));
        let Ok(Weight::Int8(ours)) = ours else { panic!("int8 is of files") };
        assert!(ours.codes == theirs.codes, "{name}");
        same(name, &ours.scb, &theirs.scb);
        let weight = Weight::Int8(theirs.clone());
        let encoded = weight.encoded().expect("int8");
        let weight = QuantizedWeight::from_host(&ctx, &encoded, &device).expect("a matrix");
        let decoded = weight.dequantize(&ctx, FloatDType::F32).expect("a float");
        same(name, &values(decoded), dequantized);
        multiplied(name, theirs.shape, DType::F32, dequantized, |x| {
            quantized_linear(&ctx, x, &weight, Epilogue::default())
        });
        count += 1;
    });
    assert_eq!(count, 2);
}
