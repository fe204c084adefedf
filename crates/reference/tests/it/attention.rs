use reference::{Attention, DType, Distribution, Error, Saved, Scores, fill};

/// Two query heads that share one key-value head, with every option at once.
fn everything() -> Attention {
    Attention {
        scale: 0.4,
        softcap: Some(2.0),
        causal: true,
        window: Some(4),
        ..Attention::contiguous(1, [2, 1], [5, 6], 3, DType::F32)
    }
}

fn operands(of: &Attention) -> [Vec<f32>; 3] {
    let queries = of.batch * of.heads * of.seq_q * of.head_dim;
    let keys = of.batch * of.kv_heads * of.seq_kv * of.head_dim;
    [(1, queries), (2, keys), (3, keys)].map(|(seed, len)| fill(seed, len, Distribution::Normal))
}

fn slices(operands: &[Vec<f32>; 3]) -> [&[f32]; 3] {
    operands.each_ref().map(Vec::as_slice)
}

#[test]
fn equal_keys_give_the_mean_of_values() -> Result<(), Error> {
    let of = Attention::contiguous(1, [1, 1], [2, 4], 2, DType::F32);
    let values = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0, 6.0, 60.0];
    let got = of.run(&[0.5; 4], &[1.0; 8], &values, Scores::default())?;
    for (got, want) in got.out.iter().zip([3.0, 30.0, 3.0, 30.0]) {
        assert!((got - want).abs() < 1e-12, "{got}");
    }
    let want = 1.0 / 2f64.sqrt() + 4f64.ln();
    assert!((got.lse[0] - want).abs() < 1e-7, "{}", got.lse[0]);
    Ok(())
}

#[test]
fn gradients_are_finite_differences() -> Result<(), Error> {
    let of = everything();
    let operands = operands(&of);
    let pairs = of.heads * of.seq_q * of.seq_kv;
    let bias = fill(4, pairs, Distribution::Normal);
    let mut mask: Vec<bool> =
        fill(5, pairs, Distribution::Uniform).iter().map(|v| *v > 0.6).collect();
    mask[2 * of.seq_kv..3 * of.seq_kv].fill(true); // A query that sees nothing.
    let scores = Scores { bias: Some(&bias), mask: Some(&mask) };
    let [q, k, v] = slices(&operands);
    let result = of.run(q, k, v, scores)?;
    let dout = fill(6, result.out.len(), Distribution::Normal);
    let loss = |operands: &[Vec<f32>; 3]| -> Result<f64, Error> {
        let [q, k, v] = slices(operands);
        let out = of.run(q, k, v, scores)?.out;
        Ok(out.iter().zip(&dout).map(|(out, dout)| out * f64::from(*dout)).sum())
    };
    let (out, lse): (Vec<_>, Vec<_>) = (
        result.out.iter().map(|v| *v as f32).collect(),
        result.lse.iter().map(|v| *v as f32).collect(),
    );
    let saved = Saved { out: &out, lse: &lse, dout: &dout };
    let gradients = of.gradients([q, k, v], scores, saved)?;
    for (which, gradient) in gradients.iter().enumerate() {
        assert_eq!(gradient.len(), operands[which].len());
        for (at, got) in gradient.iter().enumerate() {
            let moved = |by: f32| {
                let mut moved = operands.clone();
                moved[which][at] += by;
                Ok::<_, Error>((loss(&moved)?, f64::from(moved[which][at])))
            };
            let ((high, x1), (low, x0)) = (moved(1e-3)?, moved(-1e-3)?);
            let want = (high - low) / (x1 - x0);
            assert!((got - want).abs() < 1e-5, "operand {which} at {at}: {got} for {want}");
        }
    }
    Ok(())
}

/// The first row of causal attention is a value itself, of magnitude 2 or 3; rows of 200 keys are of
/// magnitude 0.1.
#[test]
fn a_late_row_is_not_excused_by_the_first() -> Result<(), Error> {
    let of =
        Attention { causal: true, ..Attention::contiguous(1, [1, 1], [200, 200], 16, DType::Bf16) };
    let rounded = |v: &f32| DType::Bf16.round((*v).into()) as f32;
    let operands = operands(&of).map(|values| values.iter().map(rounded).collect::<Vec<_>>());
    let [q, k, v] = slices(&operands);
    let right: Vec<_> =
        of.run(q, k, v, Scores::default())?.out.iter().map(|v| rounded(&(*v as f32))).collect();
    let passes = |out: &[f32]| {
        let of_rows = of.check_rows(&[0, 7, 199], [q, k, v], Scores::default(), out)?;
        let whole = of.check([q, k, v], Scores::default(), out, None)?;
        assert_eq!(of_rows.passed, whole.passed);
        Ok::<_, Error>(whole.passed)
    };
    assert!(passes(&right)?);
    for (row, wrong) in [(199, 0.04), (0, 0.1)] {
        let mut out = right.clone();
        out[row * 16] += wrong;
        assert!(!passes(&out)?, "row {row}");
    }
    Ok(())
}

#[test]
fn a_wrong_gradient_fails() -> Result<(), Error> {
    let of = Attention { causal: true, ..Attention::contiguous(1, [2, 2], [7, 9], 8, DType::F32) };
    let operands = operands(&of);
    let [q, k, v] = slices(&operands);
    let scores = Scores::default();
    let forward = of.run(q, k, v, scores)?;
    let (out, lse): (Vec<_>, Vec<_>) = (
        forward.out.iter().map(|v| *v as f32).collect(),
        forward.lse.iter().map(|v| *v as f32).collect(),
    );
    let dout = fill(7, out.len(), Distribution::Normal);
    let saved = Saved { out: &out, lse: &lse, dout: &dout };
    let right = of.gradients([q, k, v], scores, saved)?;
    let right = right.map(|g| g.into_iter().map(|v| v as f32).collect::<Vec<_>>());
    let passes = |results: &[Vec<f32>; 3]| {
        let results = slices(results);
        Ok::<_, Error>(of.check_gradients(&of.every(), [q, k, v], scores, saved, results)?.passed)
    };
    assert!(passes(&right)?);
    for which in 0..3 {
        for wrong in [f32::NAN, right[which][5] + 1e-3] {
            let mut results = right.clone();
            results[which][5] = wrong;
            assert!(!passes(&results)?, "{which}: {wrong}");
        }
    }
    Ok(())
}
