use proptest::prelude::*;
use reference::nf4::{
    NESTED_BLOCK_SIZE, dequantize, dynamic_map, encode_nested, mean, nest, nested_disagreement,
    unnest,
};
use reference::{DType, Distribution, Error, FourBit, fill, int8};

/// Returns the distance to the nearest value of a codebook.
fn nearest(codebook: &[f32], x: f32) -> f32 {
    codebook.iter().map(|value| (value - x).abs()).fold(f32::INFINITY, f32::min)
}

#[test]
fn codebooks_are_those_of_bitsandbytes() {
    let nf4 = FourBit::Nf4.codebook();
    assert!(nf4.is_sorted() && nf4[7].to_bits() == 0 && nf4[0] == -1.0 && nf4[15] == 1.0);
    // Bits of `get_4bit_type`.
    let bits = [(1, 0xbf32_39b1u32), (6, 0xbdba_7871), (8, 0x3da2_faff), (14, 0x3f39_13b3)];
    for (code, bits) in bits {
        assert_eq!(nf4[code].to_bits(), bits, "{code}");
    }
    let fp4 = FourBit::Fp4.codebook();
    assert_eq!(fp4[1].to_bits(), 0x3baa_aaab); // 1/192
    assert_eq!(fp4[2].to_bits(), 0x3f2a_aaab); // 2/3
    assert_eq!(fp4[8].to_bits(), 0);
    for code in 9..16 {
        assert_eq!(fp4[code], -fp4[code - 8]);
    }
}

#[test]
fn a_threshold_belongs_to_the_code_below() {
    let codebook = FourBit::Nf4.codebook();
    for code in 0..15u8 {
        let middle = (codebook[usize::from(code)] + codebook[usize::from(code) + 1]) / 2.0;
        assert_eq!(FourBit::Nf4.encode(middle), code);
        assert_eq!(FourBit::Nf4.encode(middle.next_up()), code + 1);
    }
    // CUDA's thresholds of FP4 are a few ulps off the midpoints.
    for (threshold, below, above) in [
        (0.002_604_17f32, 0, 1),
        (0.085_937_5, 1, 6),
        (0.208_333_33, 6, 7),
        (0.291_666_67, 7, 4),
        (0.416_666_7, 4, 5),
        (0.583_333, 5, 2),
        (0.833_333_3, 2, 3),
    ] {
        for (sign, bit) in [(1.0, 0), (-1.0, 8)] {
            assert_eq!(FourBit::Fp4.encode(sign * threshold), bit + below);
            assert_eq!(FourBit::Fp4.encode(sign * threshold.next_up()), bit + above);
        }
    }
    assert_eq!([0.0, -0.0, -1e-9].map(|x| FourBit::Fp4.encode(x)), [0, 0, 8]);
}

#[test]
fn every_code_survives() -> Result<(), Error> {
    for format in FourBit::ALL {
        for (code, value) in format.codebook().into_iter().enumerate() {
            let back = format.encode(value);
            assert_eq!(usize::from(back), if value == 0.0 { code & 7 } else { code });
        }
    }
    Ok(())
}

#[test]
fn the_dynamic_map_is_sorted_and_nearly_odd() {
    let map = dynamic_map();
    assert!(map.is_sorted_by(|a, b| a < b));
    assert_eq!((map[127], map[255], map[126]), (0.0, 1.0, -map[128]));
    // Bits of `create_dynamic_map`.
    for (code, bits) in [
        (0, 0xbf7e_3333u32),
        (64, 0xbdc9_eb85),
        (128, 0x3513_a3b7),
        (129, 0x365a_1a94),
        (200, 0x3e6f_3333),
        (254, 0x3f7e_3333),
    ] {
        assert_eq!(map[code].to_bits(), bits, "{code}");
    }
    for code in 0..=255u8 {
        assert_eq!(encode_nested(&map, map[usize::from(code)]), code);
    }
}

#[test]
fn between_two_values_of_the_map_the_even_one_wins() {
    let map = dynamic_map();
    for code in 0..255 {
        let middle = (map[code] + map[code + 1]) * 0.5;
        let even = code + code % 2;
        assert_eq!(usize::from(encode_nested(&map, middle)), even, "{code}");
        assert_eq!(usize::from(encode_nested(&map, middle.next_up())), code + 1);
        assert_eq!(usize::from(encode_nested(&map, middle.next_down())), code);
    }
    assert_eq!([-7.0, 7.0].map(|x| encode_nested(&map, x)), [0, 255]);
}

#[test]
fn zeros_and_subnormals() -> Result<(), Error> {
    let mut values = vec![0.0; 70];
    values[3] = -f32::MIN_POSITIVE / 2.0;
    values[64] = 2.0;
    let blocks = FourBit::Nf4.quantize(&values, 32)?;
    assert_eq!(blocks.absmax, [0.0, 0.0, 2.0]);
    assert_eq!(blocks.codes[..32], [0x77; 32]);
    let back = dequantize(&FourBit::Nf4.codebook(), &blocks.codes, &blocks.absmax, 32, 70)?;
    assert!(
        back.iter()
            .enumerate()
            .all(|(i, v)| v.to_bits() == if i == 64 { 2.0f32 } else { 0.0 }.to_bits())
    );
    // CUDA's codes of a block of zeros are accepted.
    let mut cuda = blocks.codes;
    cuda[..32].fill(0);
    assert_eq!(FourBit::Nf4.disagreement(&values, 32, &cuda, 0)?, None);
    cuda[32] = 0xe7;
    assert_eq!(FourBit::Nf4.disagreement(&values, 32, &cuda, 2)?, Some(64));
    Ok(())
}

#[test]
fn a_threshold_excuses_a_reciprocal() -> Result<(), Error> {
    let threshold = 0.389_312_54f32; // Above 11.
    let values = [1.0, threshold, threshold.next_up()];
    let blocks = FourBit::Nf4.quantize(&values, 32)?;
    assert_eq!(blocks.codes, [0xfb, 0xc7]);
    for codes in [[0xfc, 0xc7], [0xfb, 0xb7]] {
        assert!(FourBit::Nf4.disagreement(&values, 32, &codes, 0)?.is_some());
        assert_eq!(FourBit::Nf4.disagreement(&values, 32, &codes, 1)?, None);
    }
    assert_eq!(FourBit::Nf4.disagreement(&values, 32, &[0xfd, 0xc7], 2)?, Some(1));
    Ok(())
}

#[test]
fn what_is_wrong_is_named() {
    let nf4 = FourBit::Nf4;
    for block_size in [0, 16, 48, 8192] {
        assert_eq!(nf4.quantize(&[1.0], block_size), Err(Error::BlockSize(block_size)));
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = vec![1.0; 100];
        values[77] = bad;
        let want = Error::NotFinite { what: "value", index: 77 };
        assert_eq!(nf4.quantize(&values, 64), Err(want.clone()));
        assert_eq!(nest(&values, 0.5), Err(want.clone()));
        assert_eq!(int8::quantize(&values, 10, 10), Err(want));
    }
    let length = |what, need, have| Err(Error::Length { what, need, have });
    let codebook = nf4.codebook();
    assert_eq!(dequantize(&codebook, &[0; 16], &[1.0], 32, 33), length("codes", 17, 16));
    assert_eq!(dequantize(&codebook, &[0; 17], &[1.0], 32, 33), length("absmax", 2, 1));
    assert_eq!(unnest(&dynamic_map(), &[0; 257], &[1.0], 0.0), length("nested_absmax", 2, 1));
    assert_eq!(nf4.disagreement(&[1.0; 3], 32, &[0], 0).err(), length("codes", 2, 1).err());
    assert_eq!(nested_disagreement(&[1.0], 0.0, &[], 0).err(), length("codes", 1, 0).err());
}

#[test]
fn equal_absmax_are_all_offset() -> Result<(), Error> {
    let blocks = nest(&[0.5; 3], mean(&[0.5; 3]))?;
    assert_eq!((&blocks.codes[..], &blocks.absmax[..]), (&[0; 3][..], &[0.0][..]));
    assert_eq!(unnest(&dynamic_map(), &blocks.codes, &blocks.absmax, 0.5)?, [0.5; 3]);
    Ok(())
}

#[test]
fn an_empty_weight_has_no_blocks() -> Result<(), Error> {
    let blocks = FourBit::Nf4.quantize(&[], 64)?;
    assert!(blocks.codes.is_empty() && blocks.absmax.is_empty());
    assert_eq!((nest(&[], 0.0)?, mean(&[])), (blocks, 0.0));
    Ok(())
}

proptest! {
    #[test]
    fn four_bits_are_the_nearest(
        len in 1..700usize,
        log in 5..=12u32,
        seed in 0..999u64,
        dtype in prop::sample::select(vec![DType::F32, DType::F16, DType::Bf16]),
        format in prop::sample::select(FourBit::ALL.to_vec()),
    ) {
        let block_size = 1 << log;
        let values = dtype.decode(&dtype.encode(&fill(seed, len, Distribution::Normal)))?;
        let blocks = format.quantize(&values, block_size)?;
        prop_assert_eq!(blocks.codes.len(), len.div_ceil(2));
        let padding = if len % 2 == 1 { format.encode(0.0) } else { blocks.codes[len / 2 - 1] & 15 };
        prop_assert_eq!(blocks.codes[blocks.codes.len() - 1] & 15, padding);
        let codebook = format.codebook();
        let back = dequantize(&codebook, &blocks.codes, &blocks.absmax, block_size, len)?;
        for (b, (values, back)) in
            values.chunks(block_size).zip(back.chunks(block_size)).enumerate()
        {
            let absmax = blocks.absmax[b];
            prop_assert_eq!(absmax, values.iter().fold(0.0, |max: f32, v| max.max(v.abs())));
            for (v, back) in values.iter().zip(back) {
                let (error, least) = ((v - back).abs() / absmax, nearest(&codebook, v / absmax));
                prop_assert!(error <= least + 1e-6, "{} {} {}", v, back, absmax);
            }
        }
        prop_assert_eq!(format.disagreement(&values, block_size, &blocks.codes, 0)?, None);
        // The result is a fixed point.
        let again = format.quantize(&back, block_size)?;
        prop_assert_eq!(
            dequantize(&codebook, &again.codes, &again.absmax, block_size, len)?,
            back
        );
    }

    #[test]
    fn nested_bytes_are_the_nearest(len in 1..900usize, seed in 0..999u64) {
        let values: Vec<f32> =
            fill(seed, len, Distribution::Normal).iter().map(|v| v.abs()).collect();
        let offset = mean(&values);
        let blocks = nest(&values, offset)?;
        let map = dynamic_map();
        let back = unnest(&map, &blocks.codes, &blocks.absmax, offset)?;
        for (i, (v, back)) in values.iter().zip(&back).enumerate() {
            let absmax = blocks.absmax[i / NESTED_BLOCK_SIZE];
            let least = if absmax > 0.0 { nearest(&map, (v - offset) / absmax) * absmax } else { 0.0 };
            prop_assert!((v - back).abs() <= least + 2e-6, "{} {}", v, back);
        }
        prop_assert_eq!(nested_disagreement(&values, offset, &blocks.codes, 0)?, None);
    }

    #[test]
    fn int8_is_within_half_a_step(rows in 1..20usize, cols in 1..60usize, seed in 0..999u64) {
        let values = fill(seed, rows * cols, Distribution::Normal);
        let quantized = int8::quantize(&values, rows, cols)?;
        let back = int8::dequantize(&quantized.codes, &quantized.scb, cols)?;
        for (i, (v, back)) in values.iter().zip(&back).enumerate() {
            let step = quantized.scb[i / cols] / 127.0;
            prop_assert!((v - back).abs() <= step * 0.50001);
        }
        prop_assert_eq!(int8::disagreement(&values, rows, cols, &quantized.codes, 0)?, None);
    }
}
