//! Tests of the public crate on the CPU.

mod api;
mod dataset;
mod engine;
mod examples;
mod fuzz;
mod grpo;
mod train;
mod unet;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use flashover::device::DType;
use flashover::host::{HostOpError, HostTensor, Layout, MatmulOptions, matmul, run_op};
use flashover::ops::OpError;
use flashover::{Backend, Device, Policy};

fn cpu() -> Device {
    Device::open(Backend::Cpu).expect("the CPU runtime needs nothing")
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/fixtures").join(name)
}

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

/// Returns a tensor of small integers, so that every product and sum is exact in f32.
/// Returns all examples of a data set.
fn examples(data: &flashover::train::Dataset) -> Vec<flashover::train::Example> {
    (0..data.len()).map(|index| data.get(index).expect("it can be read")).collect()
}

fn integers(shape: &[usize], salt: usize) -> HostTensor {
    let len = shape.iter().product();
    let values: Vec<f32> = (0..len).map(|i| ((i * 7 + salt * 3) % 11) as f32 - 5.0).collect();
    HostTensor::from_f32(shape, &values).expect("as many values as the shape holds")
}

fn run(
    lhs: &HostTensor,
    rhs: &HostTensor,
    bias: Option<&HostTensor>,
    options: &MatmulOptions,
) -> Result<HostTensor, HostOpError> {
    matmul(&cpu(), lhs, rhs, bias, options, Policy::Default)
}

#[test]
fn batches_broadcast_as_in_numpy() {
    // [2, 1, 3, 4] x [5, 4, 2] -> [2, 5, 3, 2]
    let (lhs, rhs) = (integers(&[2, 1, 3, 4], 1), integers(&[5, 4, 2], 2));
    let out = run(&lhs, &rhs, None, &MatmulOptions::default()).expect("shapes agree");
    assert_eq!(out.shape(), [2, 5, 3, 2]);
    let (a, b) = (lhs.to_f32().expect("f32"), rhs.to_f32().expect("f32"));
    let mut expected = Vec::new();
    for outer in 0..2 {
        for inner in 0..5 {
            for row in 0..3 {
                for col in 0..2 {
                    let terms =
                        (0..4).map(|k| a[(outer * 3 + row) * 4 + k] * b[(inner * 4 + k) * 2 + col]);
                    expected.push(terms.sum::<f32>());
                }
            }
        }
    }
    assert_eq!(out.to_f32().expect("f32"), expected);
}

#[test]
fn a_linear_layer_takes_its_weight_as_stored_and_adds_its_bias() {
    let (x, weight, bias) = (integers(&[4, 6], 1), integers(&[3, 6], 2), integers(&[3], 3));
    let linear = MatmulOptions { rhs: Layout::Col, ..MatmulOptions::default() };
    let out = run(&x, &weight, Some(&bias), &linear).expect("shapes agree");
    let values = |t: &HostTensor| t.to_f32().expect("f32");
    let (a, w, b) = (values(&x), values(&weight), values(&bias));
    let cell = |i: usize| {
        let (row, col) = (i / 3, i % 3);
        (0..6).map(|k| a[row * 6 + k] * w[col * 6 + k]).sum::<f32>() + b[col]
    };
    assert_eq!(values(&out), (0..12).map(cell).collect::<Vec<_>>());
}

#[test]
fn nothing_times_something_is_nothing_and_no_summands_are_zero() {
    let of = |shape: &[usize]| HostTensor::new(DType::F32, shape, Vec::new()).expect("empty");
    let options = MatmulOptions::default();
    let none = run(&of(&[0, 4]), &integers(&[4, 3], 1), None, &options).expect("no row");
    assert_eq!((none.shape(), none.bytes()), (&[0, 3][..], &[][..]));
    let none = run(&of(&[0, 2, 4]), &integers(&[4, 3], 1), None, &options).expect("no batch");
    assert_eq!(none.shape(), [0, 2, 3]);
    let (x, w, bias) = (of(&[2, 0]), of(&[0, 3]), integers(&[3], 2));
    let zeros = run(&x, &w, None, &options).expect("no summand");
    assert_eq!(zeros.to_f32().expect("f32"), [0.0; 6]);
    let biased = run(&x, &w, Some(&bias), &options).expect("no summand");
    assert_eq!(biased.to_f32().expect("f32"), bias.to_f32().expect("f32").repeat(2));
    // Empty tensors whose axes are larger than any memory.
    for (m, n) in [(0, 1 << 40), (1 << 40, 0), (0, 1 << 61)] {
        let none = run(&of(&[m, 0]), &of(&[0, n]), None, &options).expect("nothing");
        assert_eq!((none.shape(), none.bytes()), (&[m, n][..], &[][..]));
    }
    let error = run(&of(&[2, 0]), &of(&[0, 1 << 61]), None, &options).expect_err("2^62 zeros");
    assert!(matches!(error, HostOpError::Memory { .. }), "{error}");
    // Shapes that do not match are still refused.
    let error = run(&x, &integers(&[1, 3], 1), None, &options).expect_err("k differs");
    assert!(matches!(error, HostOpError::Op(OpError::Depth { .. })), "{error}");
}

#[test]
fn mistakes_are_named() {
    let options = MatmulOptions::default();
    let fails = |lhs: &HostTensor, rhs: &HostTensor, bias: Option<&HostTensor>| {
        run(lhs, rhs, bias, &options).expect_err("a mistake")
    };
    let square = integers(&[4, 4], 1);
    let refused = |lhs: &HostTensor, rhs: &HostTensor, bias: Option<&HostTensor>| {
        let HostOpError::Op(why) = fails(lhs, rhs, bias) else { panic!("not an error of `ops`") };
        why
    };
    assert!(matches!(refused(&square, &integers(&[3, 4], 1), None), OpError::Depth { .. }));
    assert!(matches!(fails(&integers(&[4], 1), &square, None), HostOpError::Rank { rank: 1, .. }));
    assert!(matches!(
        refused(&square, &square, Some(&integers(&[3], 1))),
        OpError::Shape { what: "bias", .. }
    ));
    assert!(matches!(
        refused(&integers(&[2, 4, 4], 1), &integers(&[3, 4, 4], 1), None),
        OpError::Broadcast { .. }
    ));
    let bytes = HostTensor::new(DType::I8, &[4, 4], vec![0; 16]).expect("16 bytes");
    assert!(matches!(refused(&bytes, &bytes, None), OpError::NotFloat(_)));
    assert!(matches!(refused(&square, &bytes, None), OpError::DType { .. }));
    let tf32 = MatmulOptions { tf32: true, ..options };
    let missing = run(&square, &square, None, &tf32).expect_err("no tf32 here");
    assert!(matches!(missing, HostOpError::Op(OpError::Tune(_))), "{missing}");
    let half = HostTensor::new(DType::F16, &[1, 1], vec![0; 2]).expect("one value");
    let narrow = run(&half, &half, None, &tf32).expect_err("16 bits");
    assert!(matches!(narrow, HostOpError::Op(OpError::Tf32(_))), "{narrow}");
    // The result has 4 TiB.
    let long = HostTensor::new(DType::F32, &[1 << 20, 1], vec![0; 4 << 20]).expect("4 MiB");
    let wide = HostTensor::new(DType::F32, &[1, 1 << 20], vec![0; 4 << 20]).expect("4 MiB");
    let error = fails(&long, &wide, None);
    assert!(matches!(error, HostOpError::Memory { what: "the result", .. }), "{error}");
    assert!(error.to_string().contains("4096.0 GiB") && error.to_string().contains("\nhint: "));
    let unknown = run_op("convolve", &cpu(), &BTreeMap::new(), &[], Policy::Default);
    assert!(matches!(unknown, Err(HostOpError::UnknownOp(_))));
}

#[test]
fn convolutions_sum_their_windows() {
    let x = integers(&[1, 2, 4, 5], 1);
    let ones = HostTensor::from_f32(&[1, 2, 3, 3], &[1.0; 18]).expect("18 values");
    let run = |x: &HostTensor, weight: &HostTensor, settings: &[(&str, &str)]| {
        let inputs = [("x", x), ("weight", weight)];
        let inputs = inputs.map(|(name, tensor)| (name.to_owned(), tensor.clone()));
        let settings: Vec<_> =
            settings.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let out = run_op("conv", &cpu(), &BTreeMap::from(inputs), &settings, Policy::Default)?;
        Ok::<_, HostOpError>(out["out"].clone())
    };
    let values = x.to_f32().expect("f32");
    // Sum of the window whose corner is at (y, x); outside of the image are zeros.
    let window = |top: i32, left: i32| -> f32 {
        let inside = (0..2 * 9).filter_map(|at| {
            let (channel, row, col) = (at / 9, top + at % 9 / 3, left + at % 3);
            ((0..4).contains(&row) && (0..5).contains(&col))
                .then(|| values[((channel * 4 + row) * 5 + col) as usize])
        });
        inside.sum()
    };
    let out = run(&x, &ones, &[("padding", "1")]).expect("valid");
    assert_eq!(out.shape(), [1, 1, 4, 5]);
    let want: Vec<f32> = (0..20).map(|at| window(at / 5 - 1, at % 5 - 1)).collect();
    assert_eq!(out.to_f32().expect("f32"), want);
    let out = run(&x, &ones, &[("padding", "0,1,2,0"), ("stride", "1,2")]).expect("valid");
    assert_eq!(out.shape(), [1, 1, 3, 3]);
    let want: Vec<f32> = (0..9).map(|at| window(at / 3, at % 3 * 2 - 2)).collect();
    assert_eq!(out.to_f32().expect("f32"), want);
    // A transposed convolution of ones spreads each pixel over a square.
    let one = HostTensor::from_f32(&[1, 1, 1, 2], &[3.0, 5.0]).expect("2 values");
    let square = HostTensor::from_f32(&[1, 1, 2, 2], &[1.0; 4]).expect("4 values");
    let out = run(&one, &square, &[("transposed", "true"), ("stride", "2")]).expect("valid");
    assert_eq!(
        (out.shape(), out.to_f32().expect("f32")),
        (&[1, 1, 2, 4][..], [3.0, 3.0, 5.0, 5.0].repeat(2))
    );
    // One dimension.
    let line = HostTensor::from_f32(&[1, 1, 4], &[1.0, 2.0, 3.0, 4.0]).expect("4 values");
    let pair = HostTensor::from_f32(&[1, 1, 2], &[1.0, -1.0]).expect("2 values");
    let out = run(&line, &pair, &[("dilation", "2")]).expect("valid");
    assert_eq!((out.shape(), out.to_f32().expect("f32")), (&[1, 1, 2][..], vec![-2.0, -2.0]));

    let fails = |x: &HostTensor, weight: &HostTensor, settings: &[(&str, &str)]| {
        run(x, weight, settings).expect_err("a mistake").to_string()
    };
    for (key, value) in [("stride", "0"), ("stride", "1,2,3"), ("dilation", "x"), ("groups", "0")] {
        let text = fails(&x, &ones, &[(key, value)]);
        assert!(text.starts_with(&format!("setting `{key}` does not take `{value}`")), "{text}");
    }
    assert!(fails(&x, &ones, &[("padding", "1,2,3")]).contains("four (top,bottom,left,right)"));
    assert!(fails(&x, &ones, &[("pad", "1")]).contains("\nhint: conv takes stride=N"));
    assert!(fails(&x, &pair, &[]).contains("weight has 3 axes\nhint: conv takes x [batch"));
    assert!(fails(&x, &ones, &[("dilation", "9")]).contains("is larger than the padded image"));
    assert!(fails(&x, &ones, &[("padding", "900000")]).contains("the result needs"));
    let empty = HostTensor::from_f32(&[0, 2, 4, 5], &[]).expect("no values");
    assert!(fails(&empty, &ones, &[]).contains("expected a tensor of at least 1, got 0"));
}

#[test]
fn attention_of_nothing_is_nothing() {
    let of = |shape: [usize; 4], seed| integers(&shape, seed);
    let run = |q: [usize; 4], k: [usize; 4], dout: bool, settings: &[(String, String)]| {
        let mut inputs: BTreeMap<_, _> = [("q", of(q, 1)), ("k", of(k, 2)), ("v", of(k, 3))]
            .map(|(n, t)| (n.to_owned(), t))
            .into();
        if dout {
            inputs.insert("dout".to_owned(), of(q, 4));
        }
        run_op("attention", &cpu(), &inputs, settings, Policy::Default)
    };
    let empty = run([2, 4, 0, 8], [2, 2, 3, 8], false, &[]).expect("no queries");
    assert_eq!((empty["out"].shape(), empty["lse"].shape()), (&[2, 4, 0, 8][..], &[2, 4, 0][..]));
    let blind = run([1, 4, 3, 8], [1, 2, 0, 8], true, &[]).expect("no keys");
    assert_eq!(blind["out"].to_f32().expect("f32"), [0.0; 96]);
    assert_eq!(blind["lse"].to_f32().expect("f32"), [f32::NEG_INFINITY; 12]);
    assert_eq!(blind["dq"].to_f32().expect("f32"), [0.0; 96]);
    assert_eq!(blind["dk"].shape(), [1, 2, 0, 8]);
    let fails = |q, k, settings: &[(String, String)]| {
        run(q, k, false, settings).expect_err("a mistake").to_string()
    };
    let scale = [("scale".to_owned(), "0".to_owned())];
    assert!(fails([2, 4, 0, 8], [2, 2, 3, 8], &scale).contains("scale above 0, got 0"));
    assert!(fails([2, 3, 0, 8], [2, 2, 3, 8], &[]).contains("a multiple of 2 KV heads, got 3"));
    assert!(fails([2, 3, 1, 8], [2, 0, 3, 8], &[]).contains("a multiple of 0 KV heads, got 3"));
    assert!(fails([2, 4, 0, 0], [2, 2, 3, 0], &[]).contains("expected head_dim of at least 1"));
}

#[test]
fn attention_weighs_values_by_their_keys() {
    // Two heads share one key head with equal keys, so every query gets the mean of its visible values.
    let q = integers(&[1, 2, 2, 4], 1);
    let k = HostTensor::from_f32(&[1, 1, 3, 4], &[1.0; 12]).expect("12 values");
    let v: Vec<f32> = (0..12).map(|i| (i / 4) as f32).collect();
    let v = HostTensor::from_f32(&[1, 1, 3, 4], &v).expect("12 values");
    let run = |settings: &[(&str, &str)]| {
        let inputs = [("q", &q), ("k", &k), ("v", &v)];
        let inputs = inputs.map(|(name, tensor)| (name.to_owned(), tensor.clone()));
        let settings: Vec<_> =
            settings.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        run_op("attention", &cpu(), &BTreeMap::from(inputs), &settings, Policy::Default)
    };
    let values = |settings: &[(&str, &str)], name: &str| {
        run(settings).expect("valid")[name].to_f32().expect("f32")
    };
    let close = |got: &[f32], want: f32| got.iter().all(|v| (v - want).abs() < 1e-6);
    assert!(close(&values(&[], "out"), 1.0));
    // Causal: the first of two queries is aligned with the second of three keys.
    let causal = values(&[("causal", "true")], "out");
    assert!(close(&causal[..4], 0.5) && close(&causal[4..8], 1.0), "{causal:?}");
    let nearest = values(&[("causal", "true"), ("window", "1")], "out");
    assert!(close(&nearest[..4], 1.0) && close(&nearest[4..8], 2.0), "{nearest:?}");
    let scores: f32 = q.to_f32().expect("f32")[..4].iter().sum::<f32>() / 2.0;
    let lse = values(&[("implementation", "plain")], "lse");
    assert_eq!(lse.len(), 4);
    assert!((lse[0] - (scores + 3f32.ln())).abs() < 1e-5, "{lse:?}");
    // Every attention weight is 1/3. dv sums them over 4 queries; dk_j is scale · Σ_i p·(dout·v_j - dout·out)·q_i; dq
    // is 0 because all keys are equal.
    let ones = HostTensor::from_f32(&[1, 2, 2, 4], &[1.0; 16]).expect("16 values");
    let differentiate = |dout: &HostTensor| {
        let inputs = [("q", &q), ("k", &k), ("v", &v), ("dout", dout)];
        let inputs = inputs.map(|(name, tensor)| (name.to_owned(), tensor.clone()));
        run_op("attention", &cpu(), &BTreeMap::from(inputs), &[], Policy::Default)
    };
    let of = differentiate(&ones).expect("valid");
    let gradient = |name: &str| of[name].to_f32().expect("f32");
    assert_eq!(of.len(), 5);
    assert!(close(&gradient("dv"), 4.0 / 3.0) && close(&gradient("dq"), 0.0));
    let queries = q.to_f32().expect("f32");
    let sums: Vec<f32> = (0..4).map(|d| queries[d..].iter().step_by(4).sum()).collect();
    for (at, got) in gradient("dk").into_iter().enumerate() {
        let (key, d) = ((at / 4) as f32, at % 4);
        let want = 0.5 * 4.0 / 3.0 * (key - 1.0) * sums[d];
        assert!((got - want).abs() < 1e-4, "dk[{at}] is {got}, not {want}");
    }
    let refused = differentiate(&v).expect_err("of another shape").to_string();
    assert!(refused.starts_with("dout has shape [1, 1, 3, 4]"), "{refused}");
    let fails = |settings: &[(&str, &str)]| run(settings).expect_err("a mistake").to_string();
    assert!(fails(&[("implementation", "flash")]).contains("matrix instructions"));
    assert!(fails(&[("scale", "0")]).contains("scale above 0, got 0"));
    for value in ["-1", "4294967296", "1e30"] {
        let text = fails(&[("window", value)]);
        assert!(
            text.contains(&format!("`window` does not take `{value}`\nhint: use a whole number")),
            "{text}"
        );
    }
    for (key, value) in [("softcap", "inf"), ("softcap", "1e39"), ("scale", "NaN")] {
        let text = fails(&[(key, value)]);
        assert!(
            text.contains(&format!("`{key}` does not take `{value}`\nhint: use a finite")),
            "{text}"
        );
    }
    assert!(fails(&[("causal", "yes")]).ends_with("hint: use true or false"));
    let inputs = [("q", &q), ("k", &k), ("v", &v), ("bias", &integers(&[1, 2, 3, 3], 1))];
    let inputs = inputs.map(|(name, tensor)| (name.to_owned(), tensor.clone()));
    let error = run_op("attention", &cpu(), &BTreeMap::from(inputs), &[], Policy::Default);
    let text = error.expect_err("three rows for two queries").to_string();
    assert!(text.contains("\nhint: pass bias as [batch, heads, seq_q, seq_kv]"), "{text}");
    assert!(fails(&[("heads", "2")]).contains("\nhint: attention takes causal=true|false"));
    assert!(fails(&[("window", "0")]).contains("\nhint: use a whole number of keys from 1"));
    let twice = fails(&[("causal", "true"), ("scale", "1"), ("causal", "false")]);
    assert!(twice.starts_with("setting `causal` is given twice"), "{twice}");
}
