use burn::tensor::{Bool, Device, FloatDType, Tensor, TensorData};
use ops::{
    AttentionOptions, Ctx, Implementation, OpError, Packing, attention, attention_backward,
    attention_packed, attention_packed_with_lse, attention_with_lse,
};
use reference::{Attention, HeadStrides, Scores, fill};

use crate::{close, tensor, values};

const HEADS: [usize; 2] = [4, 2];
const SEQS: [usize; 2] = [5, 7];
const DIM: usize = 8;

fn operands(device: &Device) -> [Tensor<4>; 3] {
    let ([heads, kv_heads], [seq_q, seq_kv]) = (HEADS, SEQS);
    [
        tensor([2, heads, seq_q, DIM], 1, device),
        tensor([2, kv_heads, seq_kv, DIM], 2, device),
        tensor([2, kv_heads, seq_kv, DIM], 3, device),
    ]
}

fn reference(options: &AttentionOptions) -> Attention {
    let plain = Attention::contiguous(2, HEADS, SEQS, DIM, reference::DType::F32);
    Attention {
        scale: options.scale.map_or(plain.scale, f64::from),
        softcap: options.softcap.map(f64::from),
        causal: options.causal,
        window: options.window.map(|w| w as usize),
        ..plain
    }
}

fn cases() -> Vec<AttentionOptions> {
    let plain = AttentionOptions::default();
    vec![
        plain,
        AttentionOptions { causal: true, ..plain },
        AttentionOptions { window: Some(2), causal: true, scale: Some(0.7), ..plain },
        AttentionOptions { softcap: Some(1.5), ..plain },
    ]
}

/// Hides every second key of every second query, and all keys of one query.
fn mask() -> Vec<bool> {
    let [seq_q, seq_kv] = SEQS;
    (0..seq_q * seq_kv).map(|at| at / seq_kv == 3 || at % 2 == 1 && at / seq_kv % 2 == 0).collect()
}

#[test]
fn rules_and_shared_heads_are_the_references() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let [seq_q, seq_kv] = SEQS;
    let [q, k, v] = operands(&device);
    let host = [q.clone(), k.clone(), v.clone()].map(values);
    let bias = tensor::<4>([1, HEADS[0], 1, seq_kv], 4, &device);
    let biases = values(bias.clone().expand([2, HEADS[0], seq_q, seq_kv]));
    let masks: Vec<bool> = (0..2 * HEADS[0]).flat_map(|_| mask()).collect();
    let data = TensorData::new(mask(), [1, 1, seq_q, seq_kv]);
    let hidden = Tensor::<4, Bool>::from_data(data, &device);
    for options in cases() {
        let reference = reference(&options);
        for (mask, bias, scores) in [
            (None, None, Scores::default()),
            (Some(hidden.clone()), None, Scores { mask: Some(&masks), ..Scores::default() }),
            (None, Some(bias.clone()), Scores { bias: Some(&biases), ..Scores::default() }),
        ] {
            let want = reference.run(&host[0], &host[1], &host[2], scores).expect("sizes");
            let (q, k, v) = (q.clone(), k.clone(), v.clone());
            let out = attention(&ctx, q, k, v, mask, bias, options).expect("valid");
            close(&values(out), &want.out, &format!("{options:?}"));
        }
    }
}

#[test]
fn heads_may_lie_beside_each_other() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let [q, k, v] = operands(&device);
    let host = [q.clone(), k.clone(), v.clone()].map(values);
    // `[batch, seq, heads, head_dim]` in memory, as a projection writes it.
    let beside = |t: Tensor<4>| {
        Tensor::<4>::from_data(t.swap_dims(1, 2).into_data(), &device).swap_dims(1, 2)
    };
    let options = AttentionOptions { causal: true, ..AttentionOptions::default() };
    let out = attention(&ctx, beside(q), beside(k), beside(v), None, None, options).expect("valid");
    let reference = reference(&options);
    let want = reference.run(&host[0], &host[1], &host[2], Scores::default()).expect("sizes");
    close(&values(out), &want.out, "interleaved");
    assert_eq!(reference.q, HeadStrides::contiguous(HEADS[0], SEQS[0], DIM));
}

#[test]
fn gradients_are_the_differences() {
    let (device, ctx) = (Device::cpu().autodiff(), Ctx::default());
    let weights = fill(9, 2 * HEADS[0] * SEQS[0] * DIM, reference::Distribution::Normal);
    let [seq_q, seq_kv] = SEQS;
    let bias = tensor::<4>([1, HEADS[0], 1, seq_kv], 4, &device);
    let biases = values(bias.clone().expand([2, HEADS[0], seq_q, seq_kv]));
    let masks: Vec<bool> = (0..2 * HEADS[0]).flat_map(|_| mask()).collect();
    let data = TensorData::new(mask(), [1, 1, seq_q, seq_kv]);
    let hidden = Tensor::<4, Bool>::from_data(data, &device);
    let (with_mask, with_bias) = (
        Scores { mask: Some(&masks), ..Scores::default() },
        Scores { bias: Some(&biases), ..Scores::default() },
    );
    // None, a mask, a bias, and a bias with a gradient, which stores the scores.
    let kinds = [(None, None), (Some(&hidden), None), (None, Some(false)), (None, Some(true))];
    for (options, (mask, biased)) in
        cases().into_iter().flat_map(|options| kinds.map(|kind| (options, kind)))
    {
        let scores = match (mask, biased) {
            (Some(_), _) => with_mask,
            (None, Some(_)) => with_bias,
            (None, None) => Scores::default(),
        };
        let bias = biased.map(|tracked| match tracked {
            true => bias.clone().require_grad(),
            false => bias.clone(),
        });
        let reference = reference(&options);
        let loss = |host: &[Vec<f32>; 3]| -> f64 {
            let [q, k, v] = host;
            let out = reference.run(q, k, v, scores).expect("sizes").out;
            out.iter().zip(&weights).map(|(o, w)| o * f64::from(*w)).sum()
        };
        let tracked = operands(&device).map(Tensor::require_grad);
        let host = tracked.clone().map(values);
        let [q, k, v] = tracked.clone();
        let out = attention(&ctx, q, k, v, mask.cloned(), bias.clone(), options).expect("valid");
        let shape = out.dims();
        let weighted = out * Tensor::from_data(TensorData::new(weights.clone(), shape), &device);
        let gradients = weighted.sum().backward();
        for (which, operand) in tracked.iter().enumerate() {
            let got = values(operand.grad(&gradients).expect("tracked"));
            let step = 1f32 / 1024.0;
            // Every third value, to keep the test short.
            let places: Vec<_> = (0..got.len()).step_by(3).collect();
            let differences = places.iter().map(|&i| {
                let at = |sign: f32| {
                    let mut moved = host.clone();
                    moved[which][i] += sign * step;
                    (loss(&moved), f64::from(moved[which][i]))
                };
                let ((up, x1), (down, x0)) = (at(1.0), at(-1.0));
                (up - down) / (x1 - x0)
            });
            let want: Vec<f64> = differences.collect();
            let got: Vec<f32> = places.iter().map(|&i| got[i]).collect();
            close(&got, &want, &format!("{options:?}, {biased:?}, operand {which}"));
        }
        if let Some(bias) = bias.filter(|_| biased == Some(true)) {
            let got = values(bias.grad(&gradients).expect("tracked"));
            let own = values(bias);
            let places: Vec<_> = (0..got.len()).step_by(3).collect();
            let [q, k, v] = &host;
            let difference = |&i: &usize| {
                let at = |sign: f32| {
                    let mut moved = own.clone();
                    moved[i] += sign / 1024.0;
                    let tensor = TensorData::new(moved.clone(), [1, HEADS[0], 1, seq_kv]);
                    let tensor = Tensor::<4>::from_data(tensor, &Device::cpu());
                    let biases = values(tensor.expand([2, HEADS[0], seq_q, seq_kv]));
                    let scores = Scores { bias: Some(&biases), ..Scores::default() };
                    let out = reference.run(q, k, v, scores).expect("sizes").out;
                    let loss: f64 = out.iter().zip(&weights).map(|(o, w)| o * f64::from(*w)).sum();
                    (loss, f64::from(moved[i]))
                };
                let ((up, x1), (down, x0)) = (at(1.0), at(-1.0));
                (up - down) / (x1 - x0)
            };
            let want: Vec<f64> = places.iter().map(difference).collect();
            let got: Vec<f32> = places.iter().map(|&i| got[i]).collect();
            close(&got, &want, &format!("{options:?}, the bias"));
        }
    }
}

/// The log-sum-exp equals the reference's without gradients, with them, and with a bias gradient. It is -inf
/// for a query without keys. Attentions over two halves of the keys merge into the attention over all keys.
#[test]
fn the_log_sum_exp_is_the_references_and_merges_parts() {
    let ctx = Ctx::default();
    let [seq_q, seq_kv] = SEQS;
    let masks: Vec<bool> = (0..2 * HEADS[0]).flat_map(|_| mask()).collect();
    for options in cases() {
        for device in [Device::cpu(), Device::cpu().autodiff()] {
            let tracked = device != Device::cpu();
            let data = TensorData::new(mask(), [1, 1, seq_q, seq_kv]);
            let hidden = Tensor::<4, Bool>::from_data(data, &device);
            let bias = tensor::<4>([1, HEADS[0], seq_q, seq_kv], 4, &device);
            let biases = values(bias.clone().expand([2, HEADS[0], seq_q, seq_kv]));
            let scores = Scores { mask: Some(&masks), bias: Some(&biases) };
            for wanted in [false, true] {
                let host = operands(&device).map(values);
                let [q, k, v] = match tracked {
                    true => operands(&device).map(Tensor::require_grad),
                    false => operands(&device),
                };
                let bias = match tracked && wanted {
                    true => bias.clone().require_grad(),
                    false => bias.clone(),
                };
                let want = reference(&options).run(&host[0], &host[1], &host[2], scores);
                let want = want.expect("sizes");
                let hidden = Some(hidden.clone());
                let (out, lse) =
                    attention_with_lse(&ctx, q, k, v, hidden, Some(bias), options).expect("valid");
                assert_eq!(lse.dims(), [2, HEADS[0], seq_q]);
                let what = format!("{options:?}, tracked {tracked}, bias {wanted}");
                close(&values(out), &want.out, &what);
                let (hides, sees): (Vec<_>, Vec<_>) =
                    values(lse).into_iter().zip(want.lse).partition(|(_, want)| want.is_infinite());
                assert!(!hides.is_empty(), "the mask hides a whole row");
                assert!(
                    hides.iter().all(|(got, _)| *got == f32::NEG_INFINITY),
                    "{what}: {hides:?}"
                );
                let (got, want): (Vec<_>, Vec<_>) = sees.into_iter().unzip();
                close(&got, &want, &what);
            }
        }
    }
    let device = Device::cpu();
    let [q, k, v] = operands(&device);
    let part = |keys: std::ops::Range<usize>| {
        let [k, v] = [&k, &v].map(|t| t.clone().slice_dim(2, keys.clone()));
        attention_with_lse(&ctx, q.clone(), k, v, None, None, AttentionOptions::default())
    };
    let ((one, a), (two, b)) = (part(0..3).expect("valid"), part(3..seq_kv).expect("valid"));
    let (whole, lse) = part(0..seq_kv).expect("valid");
    let merged = (a.clone().exp() + b.clone().exp()).log();
    let wide = |t: Vec<f32>| t.into_iter().map(f64::from).collect::<Vec<_>>();
    close(&values(merged.clone()), &wide(values(lse)), "merged sums");
    let share = |lse: Tensor<3>| (lse - merged.clone()).exp().unsqueeze_dim::<4>(3);
    close(&values(one * share(a) + two * share(b)), &wide(values(whole)), "merged results");
}

/// Packed sequences of different lengths, one empty, give the results and gradients of each sequence alone.
#[test]
fn packed_sequences_are_alone() {
    let (device, ctx) = (Device::cpu().autodiff(), Ctx::default());
    let ([heads, kv_heads], offsets) = (HEADS, [[0u32, 5, 5, 8, 17], [0, 7, 9, 12, 21]]);
    let packing = Packing::new(&offsets[0], &offsets[1]).expect("sorted");
    let lengths = [(heads, 17), (kv_heads, 21), (kv_heads, 21)];
    for options in cases() {
        let mut salt = 10;
        let whole = lengths.map(|(heads, length)| {
            salt += 1;
            tensor::<4>([1, heads, length, DIM], salt, &device).require_grad()
        });
        let [q, k, v] = whole.clone();
        let (out, lse) =
            attention_packed_with_lse(&ctx, q, k, v, &packing, options).expect("valid");
        let weights = tensor::<4>([1, heads, 17, DIM], 20, &device);
        let gradients = (out.clone() * weights.clone()).sum().backward();
        let got = whole.each_ref().map(|t| t.grad(&gradients).expect("tracked"));
        for sequence in 0..packing.sequences() {
            let [queries, keys] =
                offsets.map(|at| at[sequence] as usize..at[sequence + 1] as usize);
            let of = |at: usize| if at == 0 { queries.clone() } else { keys.clone() };
            if queries.is_empty() {
                let none = got[1].clone().slice_dim(2, keys);
                assert!(values(none).iter().all(|v| *v == 0.0), "nobody asked these keys");
                continue;
            }
            let mut at = 0;
            let own = whole.each_ref().map(|t| {
                at += 1;
                Tensor::<4>::from_data(t.clone().slice_dim(2, of(at - 1)).into_data(), &device)
                    .require_grad()
            });
            let [q, k, v] = own.clone();
            let (alone, sums) =
                attention_with_lse(&ctx, q, k, v, None, None, options).expect("valid");
            assert_eq!(
                values(lse.clone().slice_dim(2, queries.clone())),
                values(sums),
                "{options:?}, sequence {sequence}"
            );
            let wide = |t: Tensor<4>| values(t).into_iter().map(f64::from).collect::<Vec<_>>();
            let part = values(out.clone().slice_dim(2, queries.clone()));
            close(&part, &wide(alone.clone()), &format!("{options:?}, sequence {sequence}"));
            let weights = weights.clone().slice_dim(2, queries.clone());
            let gradients = (alone * weights).sum().backward();
            for (at, own) in own.iter().enumerate() {
                let want = wide(own.grad(&gradients).expect("tracked"));
                let got = values(got[at].clone().slice_dim(2, of(at)));
                close(&got, &want, &format!("{options:?}, sequence {sequence}, operand {at}"));
            }
        }
    }
}

#[test]
fn offsets_that_mean_nothing_are_refused() {
    let refused = |q: &[u32], kv: &[u32]| Packing::new(q, kv).expect_err("refused").to_string();
    assert!(
        refused(&[], &[0, 1])
            .starts_with("invalid offsets of queries: got fewer than two offsets\nhint: ")
    );
    assert!(
        refused(&[1, 2], &[0, 1]).starts_with("invalid offsets of queries: got 1 as the first")
    );
    assert!(
        refused(&[0, 1], &[0, 5, 4]).starts_with("invalid offsets of keys: offset 5 precedes 4")
    );
    assert!(refused(&[0, 1], &[0, 5, 6]).contains("keys: got 2 sequences, expected 1 as in"));
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let [q, k, v] = operands(&device);
    let packing = Packing::new(&[0, 5], &[0, 7]).expect("sorted");
    let run = |[q, k, v]: [Tensor<4>; 3]| {
        attention_packed(&ctx, q, k, v, &packing, AttentionOptions::default())
    };
    let refused = run([q.clone(), k.clone(), v.clone()]).expect_err("a batch of two");
    assert!(matches!(refused, OpError::Shape { what: "q", .. }), "{refused}");
    let one = [q, k, v].map(|t| t.slice_dim(0, 0..1));
    run(one.clone()).expect("as many as there are");
    let fewer = one.map(|t| t.slice_dim(2, 0..4));
    let refused = run(fewer).expect_err("fewer").to_string();
    assert!(
        refused.starts_with(
            "invalid offsets of queries: got 5 as the last offset, expected 4\nhint: "
        ),
        "{refused}"
    );
}

/// A bias with a gradient is rejected by the same rules as one without. Half precision keeps rows without
/// keys.
#[test]
fn a_bias_that_wants_a_gradient_changes_no_rule() {
    let (device, ctx) = (Device::cpu().autodiff(), Ctx::default());
    let [seq_q, seq_kv] = SEQS;
    let bias = tensor::<4>([1, HEADS[0], seq_q, seq_kv], 4, &device).require_grad();
    let run = |options| {
        let [q, k, v] = operands(&device);
        attention(&ctx, q, k, v, None, Some(bias.clone()), options)
    };
    for options in [
        AttentionOptions { softcap: Some(0.0), ..AttentionOptions::default() },
        AttentionOptions { window: Some(0), ..AttentionOptions::default() },
        AttentionOptions {
            implementation: Some(Implementation::Plain),
            ..AttentionOptions::default()
        },
    ] {
        let refused = run(options).expect_err("refused").to_string();
        assert!(refused.contains("hint: "), "{options:?}: {refused}");
    }
    run(AttentionOptions::default()).expect("served");
    let [q, k, v] = operands(&device).map(|t| t.cast(burn::tensor::DType::F16));
    let hidden = Tensor::<4, Bool>::full([1, 1, seq_q, seq_kv], true, &device);
    let half = bias.cast(burn::tensor::DType::F16);
    let out = attention(&ctx, q, k, v, Some(hidden), Some(half), AttentionOptions::default());
    let out = out.expect("served");
    assert_eq!(out.dtype(), burn::tensor::DType::F16);
    assert!(values(out.cast(burn::tensor::DType::F32)).iter().all(|v| *v == 0.0));
}

#[test]
fn what_is_hidden_is_hidden_whatever_its_bias_is() {
    let (device, ctx) = (Device::cpu().autodiff(), Ctx::default());
    let [seq_q, seq_kv] = SEQS;
    let shape = [1, HEADS[0], seq_q, seq_kv];
    // The last key is out of causal order for every query except the last, and the second is masked.
    let marks = |key: usize| {
        let row: Vec<f32> = (0..seq_kv).map(|at| f32::from(u8::from(at == key))).collect();
        Tensor::<1>::from_floats(row.as_slice(), &device)
            .reshape([1, 1, 1, seq_kv])
            .greater_elem(0.5)
    };
    let plain = tensor::<4>(shape, 4, &device);
    let options = AttentionOptions { causal: true, ..AttentionOptions::default() };
    let run = |bias: Tensor<4>, mask| {
        let [q, k, v] = operands(&device);
        let out = attention(&ctx, q, k, v, Some(mask), Some(bias.require_grad()), options);
        values(out.expect("served").slice([0..1, 0..HEADS[0], 0..seq_q - 1]))
    };
    let mask = || marks(1).expand([1, 1, seq_q, seq_kv]);
    let want = run(plain.clone(), mask());
    for odd in [f32::INFINITY, f32::NAN] {
        for key in [1, seq_kv - 1] {
            let bias = plain.clone().mask_fill(marks(key).expand(shape), odd);
            assert_eq!(run(bias, mask()), want, "{odd} at key {key}");
        }
    }
}

#[test]
fn explicit_gradients_are_those_of_the_backward_pass() {
    let ctx = Ctx::default();
    let options = AttentionOptions { causal: true, ..AttentionOptions::default() };
    let mask = |device: &Device| {
        let data = TensorData::new(mask(), [1, 1, SEQS[0], SEQS[1]]);
        Some(Tensor::<4, Bool>::from_data(data, device))
    };
    let bias = |device: &Device| Some(tensor::<4>([1, HEADS[0], 1, SEQS[1]], 4, device));
    let dout = |device: &Device| tensor::<4>([2, HEADS[0], SEQS[0], DIM], 9, device);
    for device in [Device::cpu(), Device::cpu().autodiff()] {
        let [q, k, v] = operands(&device);
        let (masked, biased) = (mask(&device), bias(&device));
        let operands = [q.clone(), k.clone(), v.clone()];
        let forward = attention_with_lse(&ctx, q, k, v, masked.clone(), biased.clone(), options)
            .expect("valid");
        let explicit =
            attention_backward(&ctx, operands, masked, biased, forward, dout(&device), options);
        let device = Device::cpu().autodiff();
        let tracked = self::operands(&device).map(Tensor::require_grad);
        let [q, k, v] = tracked.clone();
        let out = attention(&ctx, q, k, v, mask(&device), bias(&device), options).expect("valid");
        let all = (out * dout(&device)).sum().backward();
        for (explicit, tracked) in explicit.expect("valid").into_iter().zip(tracked) {
            let gradient = tracked.grad(&all).expect("tracked");
            assert_eq!(values(explicit), values(gradient));
        }
    }
    // Without queries or keys the gradients are empty or zero.
    let zeros = |shape: [usize; 4]| Tensor::<4>::zeros(shape, &Device::cpu());
    let (q, k) = (zeros([1, 4, 2, 8]), zeros([1, 2, 0, 8]));
    let lse = Tensor::<3>::zeros([1, 4, 2], &Device::cpu());
    let run = |dout| {
        let (operands, forward) = ([q.clone(), k.clone(), k.clone()], (q.clone(), lse.clone()));
        attention_backward(&ctx, operands, None, None, forward, dout, options)
    };
    let [dq, dk, _] = run(q.clone()).expect("no keys");
    assert_eq!((values(dq), dk.dims()), (vec![0.0; 64], [1, 2, 0, 8]));
    let refused = run(zeros([1, 4, 2, 9])).expect_err("another shape");
    assert!(matches!(refused, OpError::Shape { what: "dout", .. }), "{refused}");
}

#[test]
fn a_forced_implementation_serves_or_says_why_not() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let run = |implementation| {
        let [q, k, v] = operands(&device);
        let options = AttentionOptions { implementation, ..AttentionOptions::default() };
        attention(&ctx, q, k, v, None, None, options)
    };
    let plain = run(Some(Implementation::Plain)).expect("runs anywhere");
    assert_eq!(values(plain), values(run(None).expect("valid")));
    let refused = run(Some(Implementation::Flash)).expect_err("a CPU has no tensor cores");
    assert!(refused.to_string().contains("matrix instructions"), "{refused}");
}

#[test]
fn mistakes_are_errors() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let t = |shape: [usize; 4]| Tensor::<4>::zeros(shape, &device);
    let options = AttentionOptions::default();
    let fails =
        |q, k, v| attention(&ctx, q, k, v, None, None, options).expect_err("a mistake").to_string();
    let q = || t([1, 4, 2, 8]);
    assert!(
        fails(q(), t([1, 3, 2, 8]), t([1, 3, 2, 8])).contains("a multiple of 3 KV heads, got 4")
    );
    assert!(fails(q(), t([1, 2, 2, 9]), t([1, 2, 2, 9])).contains("k has shape"));
    assert!(fails(q(), t([1, 2, 2, 8]), t([1, 2, 3, 8])).contains("v has shape"));
    let half = t([1, 2, 2, 8]).cast(FloatDType::F16);
    assert!(fails(q(), half, t([1, 2, 2, 8])).contains("k is F16"));
    let bias = Some(t([1, 1, 2, 5]));
    let k = t([1, 2, 2, 8]);
    let bias = attention(&ctx, q(), k.clone(), k.clone(), None, bias, options);
    assert!(matches!(bias.expect_err("5 keys for 2"), OpError::Scores { what: "bias", .. }));
    let cap = AttentionOptions { softcap: Some(0.0), ..options };
    for keys in [k, t([1, 2, 0, 8])] {
        let refused = attention(&ctx, q(), keys.clone(), keys, None, None, cap);
        assert!(matches!(refused.expect_err("a cap of 0"), OpError::Attention(_)));
    }
    let empty = || t([1, 4, 0, 0]);
    assert!(fails(empty(), empty(), empty()).contains("expected head_dim of at least 1"));
    let headless = || t([1, 0, 2, 8]);
    let none = attention(&ctx, headless(), headless(), headless(), None, None, options);
    assert_eq!(none.expect("no heads").dims(), [1, 0, 2, 8]);
    let none = attention(&ctx, q(), t([1, 2, 0, 8]), t([1, 2, 0, 8]), None, None, options);
    assert_eq!(values(none.expect("no keys, no result")), [0.0; 64]);
}
