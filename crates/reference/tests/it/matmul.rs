use proptest::prelude::*;
use reference::{
    Activation, DType, Distribution, Epilogue, Error, Layout, Matmul, Sample, Special, Strides, Up,
    fill, plant,
};

const NONE: Epilogue<'static> = Epilogue::NONE;

/// Evaluates the definition, index by index, for up to two batch axes.
fn by_index(matmul: &Matmul, lhs: &[f32], rhs: &[f32], epilogue: Epilogue<'_>) -> Vec<f64> {
    let axis = |i: usize| matmul.batch.get(i).copied().unwrap_or(1);
    let stride = |strides: &Strides, i: usize| strides.batch.get(i).copied().unwrap_or(0);
    let mut out = Vec::new();
    for b0 in 0..axis(0) {
        for b1 in 0..axis(1) {
            let lhs_at = b0 * stride(&matmul.lhs, 0) + b1 * stride(&matmul.lhs, 1);
            let rhs_at = b0 * stride(&matmul.rhs, 0) + b1 * stride(&matmul.rhs, 1);
            for row in 0..matmul.m {
                for col in 0..matmul.n {
                    let mut sum = 0.0;
                    for p in 0..matmul.k {
                        let l = lhs[lhs_at + row * matmul.lhs.row + p * matmul.lhs.col];
                        let r = rhs[rhs_at + p * matmul.rhs.row + col * matmul.rhs.col];
                        sum += f64::from(l) * f64::from(r);
                    }
                    out.push(sum + epilogue.bias.map_or(0.0, |bias| f64::from(bias[col])));
                }
            }
        }
    }
    out
}

fn operands(matmul: &Matmul, seed: u64) -> (Vec<f32>, Vec<f32>) {
    let [lhs, rhs, _] = matmul.lens();
    (fill(seed, lhs, Distribution::Normal), fill(seed + 1, rhs, Distribution::Normal))
}

fn layout() -> impl Strategy<Value = Layout> {
    prop_oneof![Just(Layout::Row), Just(Layout::Col)]
}

fn dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(&DType::ALL[..])
}

/// Contiguous problems of every rank; each batch axis of each operand may be broadcast.
fn problem() -> impl Strategy<Value = Matmul> {
    let batch = prop::collection::vec((1..4usize, any::<bool>(), any::<bool>()), 0..3);
    (batch, [1..9usize, 1..9, 0..20], layout(), layout()).prop_map(|(axes, [m, n, k], l, r)| {
        let batch: Vec<_> = axes.iter().map(|&(size, _, _)| size).collect();
        let kept = |size: usize, keep: bool| if keep { size } else { 1 };
        let lhs: Vec<_> = axes.iter().map(|&(size, keep, _)| kept(size, keep)).collect();
        let rhs: Vec<_> = axes.iter().map(|&(size, _, keep)| kept(size, keep)).collect();
        Matmul {
            lhs: Strides::contiguous(&lhs, m, k, l),
            rhs: Strides::contiguous(&rhs, k, n, r),
            ..Matmul::contiguous(&batch, [m, n, k], l, r, DType::F32)
        }
    })
}

/// Rows 0 and 1 use the second matrix, row 2 the third, and no row the first.
#[test]
fn groups_are_rows_by_matrices_of_their_own() -> Result<(), Error> {
    let matmul = Matmul {
        lhs: Strides { batch: vec![0], row: 1, col: 1 },
        ..Matmul::contiguous(&[3], [3, 1, 1], Layout::Row, Layout::Row, DType::F32)
    };
    let (lhs, rhs) = ([1.0, 2.0, 3.0], [10.0, 100.0, 1000.0]);
    let bias = Epilogue::bias(&[1.0, 2.0, 3.0]);
    let check = |offsets: &[usize], out: [f32; 3]| {
        matmul.check_groups(offsets, None, &lhs, &rhs, bias, &out)
    };
    assert!(check(&[0, 0, 2, 3], [102.0, 202.0, 3003.0])?.passed);
    let wrong = check(&[0, 0, 2, 3], [102.0, 202.0, 302.0])?;
    assert_eq!((wrong.passed, wrong.worst_index), (false, Some(2)));
    assert!(check(&[0, 2, 3], [0.0; 3]).is_err(), "three groups have four offsets");
    assert!(check(&[0, 2, 1, 3], [0.0; 3]).is_err(), "offsets do not fall");
    Ok(())
}

/// 2048 + 1 is half-way between two f16 values and always rounds to the even one; f32 loses nothing.
#[test]
fn naive_sums_are_rounded_to_their_format() -> Result<(), Error> {
    let wide = Matmul::contiguous(&[], [1, 1, 5], Layout::Row, Layout::Row, DType::F16);
    let (lhs, rhs) = ([2048.0, 1.0, 1.0, 1.0, 1.0], [1.0; 5]);
    assert_eq!(wide.naive(&lhs, &rhs, NONE)?, [2052.0]);
    let narrow = Matmul { sums: DType::F16, ..wide };
    assert_eq!(narrow.naive(&lhs, &rhs, NONE)?, [2048.0]);
    assert_eq!(narrow.run(&lhs, &rhs, NONE)?, [2052.0]);
    Ok(())
}

#[test]
fn an_epilogue_is_its_formula() -> Result<(), Error> {
    let matmul = Matmul::contiguous(&[], [1, 2, 1], Layout::Row, Layout::Row, DType::F32);
    let close = |activation, want: [f64; 2]| -> Result<(), Error> {
        let activation = Some(activation);
        let epilogue = Epilogue { activation, ..Epilogue::bias(&[-1.0, 1.0]) };
        for got in [matmul.run(&[1.0], &[2.0, -3.0], epilogue)?, {
            matmul.naive(&[1.0], &[2.0, -3.0], epilogue)?
        }] {
            for (got, want) in got.iter().zip(want) {
                assert!((got - want).abs() < 1e-6, "{activation:?}: {got} for {want}");
            }
        }
        Ok(())
    };
    // At 1 and at -2, from tables of Φ, of the logistic function and of tanh.
    close(Activation::Silu, [0.731_058_578_6, -0.238_405_844_0])?;
    close(Activation::Gelu, [0.841_344_746_1, -0.045_500_263_9])?;
    close(Activation::GeluTanh, [0.841_191_990_6, -0.045_402_305_9])?;
    let epilogue = Epilogue {
        gate: Some(&[10.0, 100.0]),
        residual: Some(&[0.5, 0.25]),
        ..Epilogue::bias(&[-1.0, 1.0])
    };
    assert_eq!(matmul.run(&[1.0], &[2.0, -3.0], epilogue)?, [10.5, -199.75]);
    // The sums 2 and -3 plus a bias, times those of a second matrix plus its own bias.
    let up = Some(Up { rhs: &[4.0, 5.0], bias: Some(&[0.5, -1.0]) });
    let gated = Epilogue { up, ..Epilogue::bias(&[-1.0, 1.0]) };
    assert_eq!(matmul.run(&[1.0], &[2.0, -3.0], gated)?, [4.5, -8.0]);
    assert_eq!(matmul.naive(&[1.0], &[2.0, -3.0], gated)?, [4.5, -8.0]);
    let short = Epilogue { up: Some(Up { rhs: &[4.0], bias: None }), ..NONE };
    let error = matmul.run(&[1.0], &[2.0, -3.0], short).expect_err("half a matrix");
    assert_eq!(error.to_string(), "up has 1 values, but the problem needs 2");
    let short = Epilogue { gate: Some(&[1.0]), ..NONE };
    let error = matmul.run(&[1.0], &[2.0, -3.0], short).expect_err("one gate for two results");
    assert_eq!(error.to_string(), "gate has 1 values, but the problem needs 2");
    Ok(())
}

#[test]
fn by_hand() -> Result<(), Error> {
    let matmul = Matmul::contiguous(&[], [2, 2, 3], Layout::Row, Layout::Row, DType::F32);
    let lhs = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let rhs = [7.0, 8.0, 9.0, 10.0, 11.0, 12.0];
    let product = [58.0, 64.0, 139.0, 154.0];
    assert_eq!(matmul.run(&lhs, &rhs, NONE)?, product);
    assert_eq!(matmul.naive(&lhs, &rhs, NONE)?, product);
    assert_eq!(matmul.run(&lhs, &rhs, Epilogue::bias(&[0.5, -64.0]))?, [58.5, 0.0, 139.5, 90.0]);

    // The same rhs, read as a column-major [3, 2].
    let columns = Matmul::contiguous(&[], [2, 2, 3], Layout::Row, Layout::Col, DType::F32);
    assert_eq!(columns.run(&lhs, &rhs, NONE)?, [50.0, 68.0, 122.0, 167.0]);

    // One lhs for two rhs, and an rhs that is a window of a wider matrix.
    let shared = Matmul {
        lhs: Strides { batch: vec![0], row: 2, col: 1 },
        rhs: Strides { batch: vec![1], row: 3, col: 1 },
        ..Matmul::contiguous(&[2], [1, 1, 2], Layout::Row, Layout::Row, DType::F32)
    };
    assert_eq!(shared.lens(), [2, 5, 2]);
    let out = shared.run(&[1.0, 10.0], &[1.0, 2.0, 3.0, 4.0, 5.0], NONE)?;
    assert_eq!(out, [41.0, 52.0]);
    Ok(())
}

#[test]
fn contiguous_strides() {
    let row = |batch: &[usize]| Strides::contiguous(batch, 4, 5, Layout::Row);
    assert_eq!(row(&[]), Strides { batch: vec![], row: 5, col: 1 });
    assert_eq!(row(&[2, 3]), Strides { batch: vec![60, 20], row: 5, col: 1 });
    assert_eq!(row(&[2, 1]), Strides { batch: vec![20, 0], row: 5, col: 1 });
    let col = Strides::contiguous(&[3], 4, 5, Layout::Col);
    assert_eq!(col, Strides { batch: vec![20], row: 1, col: 4 });
}

#[test]
fn operands_are_read_in_their_precision() -> Result<(), Error> {
    // 1 + 2^-12 is exact in f32, and rounds to 1 in the others; in tf32 only the naive evaluation rounds.
    let x = [1.0 + 2.0f32.powi(-12)];
    let exact = f64::from(x[0]).powi(2);
    for (dtype, reference, naive) in [
        (DType::F32, exact, f64::from(x[0] * x[0])),
        (DType::Tf32, exact, 1.0),
        (DType::F16, 1.0, 1.0),
        (DType::Bf16, 1.0, 1.0),
    ] {
        let matmul = Matmul::contiguous(&[], [1, 1, 1], Layout::Row, Layout::Row, dtype);
        assert_eq!(matmul.run(&x, &x, NONE)?, [reference], "{dtype}");
        assert_eq!(matmul.naive(&x, &x, NONE)?, [naive], "{dtype}");
    }
    Ok(())
}

#[test]
fn the_naive_result_has_the_output_format() {
    let product = |out_dtype| {
        let matmul = Matmul::contiguous(&[], [1, 1, 2], Layout::Row, Layout::Row, DType::F16);
        let matmul = Matmul { out_dtype, ..matmul };
        matmul.naive(&[300.0, 1.0], &[300.0, 1.0], NONE).expect("operands fit")[0]
    };
    assert_eq!(product(DType::F16), f64::INFINITY);
    assert_eq!(product(DType::F32), 90_001.0);
    assert_eq!(product(DType::Bf16), 90_112.0);
}

#[test]
fn naive_sums_lose_what_f32_loses() -> Result<(), Error> {
    // 2^24 + 1 is not an f32 value, so that every 1 is lost; f64 keeps them.
    let matmul = Matmul::contiguous(&[], [1, 1, 11], Layout::Row, Layout::Row, DType::F32);
    let lhs: Vec<f32> = std::iter::once(16_777_216.0).chain([1.0; 10]).collect();
    assert_eq!(matmul.run(&lhs, &[1.0; 11], NONE)?, [16_777_226.0]);
    assert_eq!(matmul.naive(&lhs, &[1.0; 11], NONE)?, [16_777_216.0]);
    Ok(())
}

#[test]
fn empty_sizes() -> Result<(), Error> {
    for (batch, mnk, len) in [
        (vec![], [2, 3, 0], 6),
        (vec![], [0, 3, 4], 0),
        (vec![], [3, 0, 4], 0),
        (vec![0], [2, 3, 4], 0),
        (vec![2], [2, 3, 0], 12),
    ] {
        let matmul = Matmul::contiguous(&batch, mnk, Layout::Row, Layout::Col, DType::F32);
        let (lhs, rhs) = operands(&matmul, 1);
        assert_eq!(matmul.run(&lhs, &rhs, NONE)?, vec![0.0; len]);
        assert_eq!(matmul.indices(&matmul.sample(0)).count(), len);
        let out = vec![0.0; len];
        assert!(matmul.check(&matmul.sample(0), &lhs, &rhs, NONE, &out)?.passed);
    }
    Ok(())
}

/// More rows and columns than one block sums.
#[test]
fn blocks_join_without_a_seam() -> Result<(), Error> {
    for mnk in [[37, 259, 7], [16, 128, 3], [17, 129, 2], [1, 300, 5]] {
        let matmul = Matmul::contiguous(&[2], mnk, Layout::Row, Layout::Col, DType::F32);
        let (lhs, rhs) = operands(&matmul, 6);
        assert_eq!(matmul.run(&lhs, &rhs, NONE)?, by_index(&matmul, &lhs, &rhs, NONE));
    }
    Ok(())
}

#[test]
fn special_values_spread_along_their_row_and_column() -> Result<(), Error> {
    let matmul = Matmul::contiguous(&[], [4, 4, 8], Layout::Row, Layout::Row, DType::F16);
    let (mut lhs, mut rhs) = operands(&matmul, 5);
    plant(&mut lhs, DType::F16, &[(8, Special::Inf), (16, Special::Nan)])?; // Rows 1 and 2.
    plant(&mut rhs, DType::F16, &[(3, Special::NegZero)])?; // Meets the infinity.
    let exact = matmul.run(&lhs, &rhs, NONE)?;
    let naive = matmul.naive(&lhs, &rhs, NONE)?;
    for (i, (exact, naive)) in exact.iter().zip(&naive).enumerate() {
        let (row, col) = (i / 4, i % 4);
        assert_eq!(exact.is_nan(), row == 2 || (row == 1 && col == 3), "{i}");
        assert_eq!(exact.is_infinite(), row == 1 && col != 3, "{i}");
        assert_eq!([exact.is_nan(), exact.is_infinite()], [naive.is_nan(), naive.is_infinite()]);
    }
    let out: Vec<_> = naive.iter().map(|&v| v as f32).collect();
    let check = |out: &[f32]| matmul.check(&matmul.everything(), &lhs, &rhs, NONE, out);
    assert!(check(&out)?.passed);
    for (i, wrong) in [(0, f32::NAN), (5, 1.0), (5, f32::NAN), (7, f32::INFINITY), (9, 0.0)] {
        let mut out = out.clone();
        out[i] = wrong;
        let comparison = check(&out)?;
        assert!(!comparison.passed, "{i}: {comparison}");
        assert_eq!(comparison.worst_index, Some(i));
    }
    Ok(())
}

#[test]
fn callers_mistakes_are_named() {
    let matmul = Matmul::contiguous(&[2], [3, 4, 5], Layout::Row, Layout::Row, DType::F32);
    let (lhs, rhs) = operands(&matmul, 1);
    let fails = |result: Result<Vec<f64>, Error>, text: &str| {
        assert_eq!(result.map_err(|e| e.to_string()), Err(text.to_owned()));
    };
    fails(matmul.run(&lhs[1..], &rhs, NONE), "lhs has 29 values, but the problem needs 30");
    fails(matmul.run(&lhs, &rhs[..7], NONE), "rhs has 7 values, but the problem needs 40");
    fails(
        matmul.run(&lhs, &rhs, Epilogue::bias(&[0.0; 5])),
        "bias has 5 values, but the problem needs 4",
    );
    let flat = Matmul { rhs: Strides::contiguous(&[], 5, 4, Layout::Row), ..matmul.clone() };
    fails(flat.run(&lhs, &rhs, NONE), "rhs has strides for 0 batch axes, but the problem has 1");
    let sample = Sample { batches: vec![0], rows: vec![3], cols: vec![0] };
    fails(
        matmul.run_at(&sample, &lhs, &rhs, NONE),
        "sampled row 3 is out of range, expected an index below 3",
    );
    assert_eq!(
        matmul.check(&matmul.everything(), &lhs, &rhs, NONE, &[0.0; 23]),
        Err(Error::Length { what: "out", need: 24, have: 23 })
    );
}

#[test]
fn samples_leave_no_block_out() {
    let shape = |batch: &[usize], mnk| {
        Matmul::contiguous(batch, mnk, Layout::Row, Layout::Row, DType::Bf16)
    };
    let large = shape(&[], [8192; 3]);
    let sample = large.sample(1);
    assert_eq!(sample, large.sample(1));
    assert_ne!(sample, large.sample(2));
    for positions in [&sample.rows, &sample.cols] {
        assert!(positions.is_sorted_by(|a, b| a < b));
        assert!(positions.starts_with(&[0, 1]) && positions.ends_with(&[8190, 8191]));
        for block in (0..8192).step_by(128) {
            assert!(positions.iter().any(|p| (block..block + 128).contains(p)), "{block}");
        }
    }
    let count = |sample: &Sample| sample.batches.len() * sample.rows.len() * sample.cols.len();
    assert!(count(&sample) * 8192 < 5 * Matmul::BUDGET / 4);

    let small = shape(&[3], [17, 33, 500]);
    assert_eq!(small.sample(1), small.everything());
    let row = shape(&[], [1, 128_256, 4096]);
    assert_eq!(row.sample(1).rows, [0]);
    let heads = shape(&[512], [512, 512, 64]).sample(1);
    assert!([&heads.batches, &heads.rows, &heads.cols].iter().all(|p| p.len() >= 128));
    assert!(count(&heads) * 64 < 5 * Matmul::BUDGET / 4);
    // Even the smallest budget leaves a sample.
    assert!(count(&shape(&[4], [40, 40, usize::MAX >> 20]).sample_within(1, 1)) > 0);
}

#[test]
fn one_wrong_tile_is_found() -> Result<(), Error> {
    let matmul = Matmul::contiguous(&[], [700, 640, 3000], Layout::Row, Layout::Col, DType::F16);
    let (lhs, rhs) = (vec![1.0; 700 * 3000], vec![1.0; 640 * 3000]);
    let sample = matmul.sample_within(9, 1 << 25);
    assert_ne!(sample, matmul.everything());
    let mut out = vec![3000.0; 700 * 640];
    assert!(matmul.check(&sample, &lhs, &rhs, NONE, &out)?.passed);
    for row in 640..656 {
        out[row * 640 + 320..][..16].fill(0.0);
    }
    let comparison = matmul.check(&sample, &lhs, &rhs, NONE, &out)?;
    assert!(!comparison.passed);
    assert!(comparison.worst_index.is_some_and(|i| out[i] == 0.0));
    Ok(())
}

proptest! {
    #[test]
    fn agrees_with_the_definition(matmul in problem(), seed in 0..99u64, biased: bool) {
        let (lhs, rhs) = operands(&matmul, seed);
        let bias = fill(seed + 2, matmul.n, Distribution::Uniform);
        let epilogue = if biased { Epilogue::bias(&bias) } else { NONE };
        prop_assert_eq!(
            matmul.run(&lhs, &rhs, epilogue)?,
            by_index(&matmul, &lhs, &rhs, epilogue)
        );
    }

    #[test]
    fn any_strides_agree_with_the_definition(
        batch in prop::collection::vec(1..4usize, 2),
        mnk in prop::array::uniform3(1..7usize),
        strides in prop::array::uniform8(0..9usize),
    ) {
        let [l0, l1, l2, l3, r0, r1, r2, r3] = strides;
        let matmul = Matmul {
            lhs: Strides { batch: vec![l0, l1], row: l2, col: l3 },
            rhs: Strides { batch: vec![r0, r1], row: r2, col: r3 },
            ..Matmul::contiguous(&batch, mnk, Layout::Row, Layout::Row, DType::F32)
        };
        let (lhs, rhs) = operands(&matmul, 3);
        prop_assert_eq!(
            matmul.run(&lhs, &rhs, NONE)?,
            by_index(&matmul, &lhs, &rhs, NONE)
        );
    }

    #[test]
    fn layouts_of_one_matrix_agree(
        mnk in prop::array::uniform3(1..12usize), dtype in dtype(), seed in 0..99u64,
    ) {
        let [m, n, k] = mnk;
        let transposed = |data: &[f32], rows: usize, cols: usize| -> Vec<f32> {
            (0..rows * cols).map(|i| data[i % rows * cols + i / rows]).collect()
        };
        let product = Matmul::contiguous(&[], mnk, Layout::Row, Layout::Row, dtype);
        let (lhs, rhs) = operands(&product, seed);
        let columns = Matmul::contiguous(&[], mnk, Layout::Col, Layout::Col, dtype);
        let (lhs_t, rhs_t) = (transposed(&lhs, m, k), transposed(&rhs, k, n));
        // Products commute and sums keep their order, so that even the roundings agree.
        let swapped = Matmul::contiguous(&[], [n, m, k], Layout::Col, Layout::Col, dtype);
        for evaluate in [Matmul::run, Matmul::naive] {
            let out = evaluate(&product, &lhs, &rhs, NONE)?;
            prop_assert_eq!(&evaluate(&columns, &lhs_t, &rhs_t, NONE)?, &out);
            let out_t = evaluate(&swapped, &rhs, &lhs, NONE)?;
            for (i, value) in out.iter().enumerate() {
                prop_assert_eq!(out_t[i % n * m + i / n], *value);
            }
        }
    }

    #[test]
    fn is_linear(matmul in problem(), seed in 0..99u64) {
        let (lhs, rhs) = operands(&matmul, seed);
        let (other, _) = operands(&matmul, seed + 500);
        // Multiples of 1/8 add without rounding in f32.
        let eighths = |v: &[f32]| v.iter().map(|v| (v * 8.0).round() / 8.0).collect::<Vec<_>>();
        let (lhs, other, rhs) = (eighths(&lhs), eighths(&other), eighths(&rhs));
        let sum: Vec<_> = lhs.iter().zip(&other).map(|(a, b)| a - 4.0 * b).collect();
        let a = matmul.run(&lhs, &rhs, NONE)?;
        let b = matmul.run(&other, &rhs, NONE)?;
        let both = matmul.run(&sum, &rhs, NONE)?;
        let apart: Vec<_> = a.iter().zip(&b).map(|(a, b)| a - 4.0 * b).collect();
        prop_assert_eq!(both, apart);
    }

    #[test]
    fn a_sample_is_a_part_of_the_whole(
        matmul in problem(), dtype in dtype(), pick in prop::array::uniform3(0..9usize),
    ) {
        let matmul = Matmul { dtype, out_dtype: dtype, ..matmul };
        let (lhs, rhs) = operands(&matmul, 8);
        let all = matmul.everything();
        let part = |all: &[usize], from: usize| all[from % all.len()..].to_vec();
        let sample = Sample {
            batches: part(&all.batches, pick[0]),
            rows: part(&all.rows, pick[1]),
            cols: part(&all.cols, pick[2]),
        };
        let whole = matmul.run(&lhs, &rhs, NONE)?;
        let naive = matmul.naive(&lhs, &rhs, NONE)?;
        let indices: Vec<_> = matmul.indices(&sample).collect();
        let pick = |from: &[f64]| indices.iter().map(|&i| from[i]).collect::<Vec<_>>();
        prop_assert_eq!(matmul.run_at(&sample, &lhs, &rhs, NONE)?, pick(&whole));
        prop_assert_eq!(matmul.naive_at(&sample, &lhs, &rhs, NONE)?, pick(&naive));
        prop_assert!(matmul.indices(&all).eq(0..whole.len()));
    }

    #[test]
    fn the_naive_evaluation_passes_and_a_wrong_element_fails(
        matmul in problem(), dtype in dtype(), seed in 0..99u64, at: prop::sample::Index,
    ) {
        let matmul = Matmul { dtype, out_dtype: dtype.storage(), ..matmul };
        let (lhs, rhs) = operands(&matmul, seed);
        let naive = matmul.naive(&lhs, &rhs, NONE)?;
        let mut out: Vec<_> = naive.iter().map(|&v| v as f32).collect();
        let sample = matmul.sample(seed);
        let good = matmul.check(&sample, &lhs, &rhs, NONE, &out)?;
        prop_assert!(good.passed, "{}", good);
        let at = at.index(out.len());
        out[at] += 8.0;
        let bad = matmul.check(&sample, &lhs, &rhs, NONE, &out)?;
        prop_assert!(!bad.passed && bad.worst_index == Some(at), "{}", bad);
    }
}
