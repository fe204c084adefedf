//! Files of bitsandbytes: they dequantise to the same numbers as in bitsandbytes, and are written back unchanged.

use std::cell::Cell;

use checkpoint::{Absmax, FourBit, Nested, Tensor, Weight, WeightFormat};
use reference::int8;
use reference::nf4::{NESTED_BLOCK_SIZE, dequantize, dynamic_map, mean, nest, unnest};

use crate::{FIXTURES, fixture, open, reference_dtype, save, tensors, values, weight_of};

fn format(weight: &FourBit<'_>) -> reference::FourBit {
    match weight.layout.quant_type {
        WeightFormat::Nf4 => reference::FourBit::Nf4,
        _ => reference::FourBit::Fp4,
    }
}

fn absmax(weight: &FourBit<'_>) -> Vec<f32> {
    match &weight.absmax {
        Absmax::Plain(absmax) => absmax.to_vec(),
        Absmax::Nested(Nested { codes, absmax, quant_map, offset }) => {
            let map = quant_map[..].try_into().expect("256 values");
            unnest(map, codes, absmax, *offset).expect("of the layout")
        }
    }
}

fn decode(weight: &FourBit<'_>, codes: &[u8]) -> Vec<f32> {
    let layout = &weight.layout;
    let len = layout.elements().expect("small");
    let codebook = weight.quant_map[..].try_into().expect("16 values");
    dequantize(codebook, codes, &absmax(weight), layout.block_size, len).expect("of the layout")
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Returns true for a fixture that was quantised on a GPU; these match the reference exactly.
fn on_cuda(name: &str) -> bool {
    name.starts_with("cuda_")
}

/// Runs `check` on every 4-bit weight, with its original values.
fn each_four_bit(check: impl Fn(&str, &FourBit<'_>, &[f32])) {
    for name in FIXTURES.iter().filter(|name| !name.ends_with("int8")) {
        let file = open(name);
        let [weight, original, _] = weight_of(name);
        let original = values(&file.tensor(original).expect("saved beside"));
        match file.weight(weight).expect("written by bitsandbytes") {
            Weight::FourBit(weight) => check(name, &weight, &original),
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn every_fixture_is_tested() {
    let folder = fixture("x").parent().expect("in a folder").read_dir().expect("there");
    let files = folder.map(|entry| entry.expect("listed").path());
    let mut names: Vec<_> = files
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .map(|path| path.file_stem().expect("named").to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert_eq!(names, FIXTURES);
}

#[test]
fn four_bits_decode_to_the_same_numbers() {
    each_four_bit(|name, weight, _| {
        let file = open(name);
        let want = file.tensor(weight_of(name)[2]).expect("saved beside");
        assert_eq!((want.dtype, &want.shape), (weight.layout.dtype, &weight.layout.shape));
        let encoded = reference_dtype(want.dtype).encode(&decode(weight, &weight.codes));
        let got = values(&Tensor::new(want.dtype, &want.shape, encoded));
        // Some code of bitsandbytes decodes FP4's code 8 to -0, but the codebook has 0.
        let plus_zero =
            |values: Vec<f32>| bits(&values.iter().map(|v| v + 0.0).collect::<Vec<_>>());
        assert_eq!(plus_zero(got), plus_zero(values(&want)), "{name}");
    });
}

#[test]
fn codebooks_are_ours_bit_by_bit() {
    each_four_bit(|name, weight, _| {
        assert_eq!(bits(&weight.quant_map), bits(&format(weight).codebook()), "{name}");
        if let Absmax::Nested(nested) = &weight.absmax {
            assert_eq!(bits(&nested.quant_map), bits(&dynamic_map()), "{name}");
        }
    });
}

#[test]
fn quantizing_again_gives_the_same_bytes() {
    each_four_bit(|name, weight, original| {
        let blocks = format(weight).quantize(original, weight.layout.block_size).expect("finite");
        match weight.layout.quant_type {
            // On the CPU the two zeros have the opposite sign; nothing else differs.
            WeightFormat::Fp4 if !on_cuda(name) => assert_eq!(
                bits(&decode(weight, &blocks.codes)),
                bits(&decode(weight, &weight.codes)),
                "{name}"
            ),
            _ => assert!(blocks.codes == weight.codes[..], "{name}"),
        }
        if let Absmax::Plain(absmax) = &weight.absmax {
            // On the CPU a short last block of zeros has an absmax of 1e-38, which is subnormal.
            let absmax: Vec<f32> =
                absmax.iter().map(|a| if a.is_subnormal() { 0.0 } else { *a }).collect();
            assert_eq!(bits(&blocks.absmax), bits(&absmax), "{name}");
        }
    });
}

/// Compares nested absmax. The mean matches torch's to an ulp or two. On a GPU bitsandbytes uses the nearest codes. On
/// the CPU it looks them up in a table of 65536 places, so a value may be off by half a place.
#[test]
fn nesting_again_differs_by_the_table_of_the_cpu() {
    const PLACE: f32 = 2.0 / 65535.0;
    let (all, other) = (Cell::new(0), Cell::new(0));
    each_four_bit(|name, weight, original| {
        let Absmax::Nested(theirs) = &weight.absmax else { return };
        let blocks = format(weight).quantize(original, weight.layout.block_size).expect("finite");
        let offset = theirs.offset;
        assert!((mean(&blocks.absmax) - offset).abs() <= offset * 2.0 * f32::EPSILON, "{name}");
        let ours = nest(&blocks.absmax, offset).expect("finite");
        assert_eq!(bits(&ours.absmax), bits(&theirs.absmax), "{name}");
        if on_cuda(name) {
            assert!(ours.codes == theirs.codes[..], "{name}");
        }
        let map = dynamic_map();
        for (b, codes) in ours.codes.iter().zip(&theirs.codes[..]).enumerate() {
            let x = (blocks.absmax[b] - offset) / ours.absmax[b / NESTED_BLOCK_SIZE];
            let [near, far] = [codes.0, codes.1].map(|code| (map[usize::from(*code)] - x).abs());
            assert!(far <= near + PLACE, "{name} {b}: {codes:?} {x}");
            other.set(other.get() + usize::from(codes.0 != codes.1));
        }
        all.set(all.get() + ours.codes.len());
    });
    let (all, other) = (all.get(), other.get());

    assert!(all > 300 && other < all / 50, "{other} of {all} differ");
}

#[test]
fn int8_gives_the_same_codes_and_numbers() {
    for name in ["int8", "cuda_int8"] {
        let file = open(name);
        let Weight::Int8(weight) = file.weight("linear.weight").expect("written by bitsandbytes")
        else {
            panic!("int8 was expected");
        };
        let [n, k] = weight.shape;
        let original = values(&file.tensor("original.linear").expect("saved beside"));
        let rows = int8::quantize(&original, n, k).expect("finite");
        let codes: Vec<_> = weight.codes.iter().map(|c| *c as i8).collect();
        assert_eq!(rows.codes, codes, "{name}");
        assert_eq!(bits(&rows.scb), bits(&weight.scb), "{name}");
        assert_eq!(rows.scb[5], 0.0);
        let want = file.tensor("dequantized.linear").expect("saved beside").f32s().expect("f32");
        let got = int8::dequantize(&rows.codes, &rows.scb, k).expect("of the shape");
        assert_eq!(bits(&got), bits(&want), "{name}");
    }
}

#[test]
fn weights_are_written_as_they_were_read() {
    for name in FIXTURES {
        let file = open(name);
        let weight_name = weight_of(name)[0];
        let weight = file.weight(weight_name).expect("written by bitsandbytes");
        let written = weight.tensors(weight_name).expect("consistent");
        let module = weight_name.strip_suffix(".weight").unwrap_or(weight_name);
        let parts = file
            .names()
            .filter(|part| part.strip_prefix(module).is_some_and(|rest| rest != ".bias"));
        assert_eq!(parts.count(), written.len(), "{name}");
        for (part, tensor) in written {
            assert_eq!(tensor, file.tensor(&part).expect("as before"), "{name} {part}");
        }
    }
}

#[test]
fn whole_files_are_written_as_they_were() {
    let folder = tempfile::tempdir().expect("temporary folder");
    for name in FIXTURES {
        let path = folder.path().join(name);
        save(&path, &tensors(name)).expect("written");
        let read = |path| std::fs::read(path).expect("there");
        assert!(read(path) == read(fixture(name)), "{name}");
    }
}

#[test]
fn linear_layers_have_their_bias() {
    for (name, n, bias) in [("nf4_nested", 136, true), ("nf4_plain", 24, false), ("int8", 24, true)]
    {
        let file = open(name);
        let linear = file.linear("linear").expect("written by bitsandbytes");
        assert_eq!(linear.weight.shape()[0], n);
        assert_eq!(linear.bias.map(|bias| bias.shape), bias.then(|| vec![n]));
    }
    let file = open("experts");
    let router = file.linear("router").expect("dense");
    assert!(matches!(router.weight, Weight::Dense(_)) && router.bias.is_some());
}
