use reference::{DType, Distribution, Error, Special, fill, plant};

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The golden bits come from a separate ChaCha8 written from its specification.
#[test]
fn golden_values() {
    for (seed, distribution, first, value_39) in [
        (
            0,
            Distribution::Normal,
            [0x3dd0_e5a2, 0xbfc8_0adc, 0xbf02_f07f, 0xbdcc_cacc],
            0xbea1_e541,
        ),
        (
            0,
            Distribution::Uniform,
            [0xbf20_2200, 0x3f2c_80bf, 0x3f51_70b7, 0x3e86_9424],
            0x3d78_d6ad,
        ),
        (
            7,
            Distribution::Normal,
            [0xbe14_ff2f, 0x3ec0_39f5, 0xbff4_52f0, 0xbf84_e194],
            0xbdae_5833,
        ),
        (
            7,
            Distribution::Uniform,
            [0xbf27_768b, 0x3f07_394d, 0x3f55_3b3b, 0xbd8b_8500],
            0x3edc_eccf,
        ),
    ] {
        let values = bits(&fill(seed, 40, distribution));
        assert_eq!(values[..4], first, "{seed} {distribution:?}");
        assert_eq!(values[39], value_39, "{seed} {distribution:?}");
    }
}

/// 2^16 values are drawn per task.
#[test]
fn tasks_join_without_a_seam() {
    let values = fill(7, 65538, Distribution::Normal);
    assert_eq!(bits(&values[65535..65537]), [0xbe98_2f4b, 0xbf4c_6fa2]);
    assert_eq!(values[..65536], fill(7, 65536, Distribution::Normal));
    assert!(fill(7, 0, Distribution::Normal).is_empty());
}

#[test]
fn moments_and_no_zero() {
    for (distribution, deviation, limit) in
        [(Distribution::Normal, 1.0, 8.0), (Distribution::Uniform, (1.0f64 / 3.0).sqrt(), 1.0)]
    {
        let values = fill(3, 200_000, distribution);
        assert!(values.iter().all(|v| *v != 0.0 && v.abs() <= limit));
        let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / 2e5;
        let square = values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / 2e5;
        assert!(mean.abs() < 0.01, "{distribution:?}: mean {mean}");
        assert!((square.sqrt() - deviation).abs() < 0.01, "{distribution:?}: {square}");
    }
}

#[test]
fn normal_quantiles() {
    let values = fill(4, 400_000, Distribution::Normal);
    for (z, below) in [(-2.0, 0.02275), (-1.0, 0.15866), (0.0, 0.5), (0.3, 0.61791), (1.5, 0.93319)]
    {
        let share = values.iter().filter(|&&v| v < z).count() as f64 / 4e5;
        assert!((share - below).abs() < 0.005, "below {z}: {share}, {below} in the normal");
    }
}

#[test]
fn planted_values_are_exact_in_their_format() -> Result<(), Error> {
    let kinds = [Special::Inf, Special::NegInf, Special::Nan, Special::NegZero, Special::Denormal];
    for dtype in DType::ALL {
        let mut values = fill(1, 20, Distribution::Normal);
        let places: Vec<_> = kinds.iter().enumerate().map(|(i, &kind)| (3 * i, kind)).collect();
        plant(&mut values, dtype, &places)?;
        let stored = dtype.decode(&dtype.encode(&values))?;
        assert_eq!([stored[0], stored[3]], [f32::INFINITY, f32::NEG_INFINITY]);
        assert!(stored[6].is_nan());
        assert_eq!(stored[9].to_bits(), (-0.0f32).to_bits());
        let denormal = f64::from(stored[12]);
        assert!(denormal > 0.0 && dtype.round(denormal) == denormal);
        // A denormal shares the spacing of the values around zero.
        assert_eq!(dtype.ulp_at(2.0 * denormal), dtype.ulp_at(0.0), "{dtype}");
        assert_eq!(dtype.ulp_at(4.0 * denormal), 2.0 * dtype.ulp_at(0.0), "{dtype}");
    }
    let mut values = [1.0; 4];
    assert_eq!(
        plant(&mut values, DType::F32, &[(0, Special::Nan), (4, Special::Inf)]),
        Err(Error::OutOfRange { what: "place", index: 4, len: 4 })
    );
    assert_eq!(values, [1.0; 4]);
    Ok(())
}
