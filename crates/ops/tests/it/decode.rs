use burn::tensor::{Device, FloatDType, Int, IntDType, Tensor, TensorData};
use ops::{
    Cache, Cached, Ctx, DecodeOptions, Implementation, Lengths, OpError, Table, decode,
    decode_with_lse,
};
use reference::{CacheStrides, Decode, HeadStrides, fill};

use crate::{close, tensor, values};

const BATCH: usize = 3;
const HEADS: [usize; 2] = [4, 2];
const CAPACITY: usize = 48;
const BLOCK: usize = 16;
const DIM: usize = 8;
const LENGTHS: [u32; BATCH] = [48, 5, 17];

fn lengths() -> Lengths {
    Lengths::Host(LENGTHS.to_vec())
}

fn floats(device: &Device) -> [Tensor<4>; 2] {
    [2, 3].map(|seed| tensor([BATCH, HEADS[1], CAPACITY, DIM], seed, device))
}

fn cache([k, v]: [Tensor<4>; 2]) -> Cache {
    Cache { k: Cached::Float(k), v: Cached::Float(v), lengths: lengths(), table: None }
}

fn reference(seq_q: usize, options: &DecodeOptions) -> Decode {
    let head = CAPACITY * DIM;
    let strides = CacheStrides { page: HEADS[1] * head, head, seq: DIM };
    let scales = CacheStrides { page: HEADS[1] * CAPACITY, head: CAPACITY, seq: 1 };
    Decode {
        batch: BATCH,
        heads: HEADS[0],
        kv_heads: HEADS[1],
        seq_q,
        head_dim: DIM,
        q: HeadStrides::contiguous(HEADS[0], seq_q, DIM),
        k: strides,
        v: strides,
        scales,
        scale: options.scale.map_or(1.0 / (DIM as f64).sqrt(), f64::from),
        softcap: options.softcap.map(f64::from),
        window: options.window.map(|w| w as usize),
        dtype: reference::DType::F32,
    }
}

/// Returns the reference's result for a cache of these values.
fn want(
    seq_q: usize,
    options: &DecodeOptions,
    q: &[f32],
    [k, v]: [&[f32]; 2],
    scales: Option<[&[f32]; 2]>,
) -> Vec<f64> {
    let reference = reference(seq_q, options);
    let cache = reference::Cache { k, v, lengths: &LENGTHS, table: None, scales };
    reference.run(&reference.all(), q, &cache).expect("sizes").out
}

#[test]
fn rules_and_lengths_are_the_references() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let host = floats(&device).map(values);
    let plain = DecodeOptions::default();
    for seq_q in [1, 3] {
        let q = tensor::<4>([BATCH, HEADS[0], seq_q, DIM], 1, &device);
        for options in [
            plain,
            DecodeOptions { window: Some(4), scale: Some(0.7), ..plain },
            DecodeOptions { softcap: Some(1.5), ..plain },
        ] {
            let want = want(seq_q, &options, &values(q.clone()), [&host[0], &host[1]], None);
            let out = decode(&ctx, q.clone(), cache(floats(&device)), options).expect("valid");
            close(&values(out), &want, &format!("{options:?}"));
        }
        // Lengths on the device.
        let data = TensorData::new(LENGTHS.map(u32::cast_signed).to_vec(), [BATCH]);
        let there = Tensor::<1, Int>::from_data(data, &device);
        let lengths = Lengths::Device { lengths: there, longest: CAPACITY as u32 };
        let want = want(seq_q, &plain, &values(q.clone()), [&host[0], &host[1]], None);
        let out = decode(&ctx, q, Cache { lengths, ..cache(floats(&device)) }, plain);
        close(&values(out.expect("valid")), &want, "lengths of the device");
    }
}

#[test]
fn a_forced_implementation_runs_or_is_refused_and_gives_its_log_sum_exp() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let host = floats(&device).map(values);
    let q = tensor::<4>([BATCH, HEADS[0], 2, DIM], 1, &device);
    let options = DecodeOptions { window: Some(6), ..DecodeOptions::default() };
    let of = reference(2, &options);
    let (k, v) = (&host[0][..], &host[1][..]);
    let held = reference::Cache { k, v, lengths: &LENGTHS, table: None, scales: None };
    let want = of.run(&of.all(), &values(q.clone()), &held).expect("sizes");
    let with = |implementation| {
        let options = DecodeOptions { implementation, ..options };
        decode_with_lse(&ctx, q.clone(), cache(floats(&device)), options)
    };
    for implementation in [None, Some(Implementation::Plain)] {
        let (out, lse) = with(implementation).expect("valid");
        assert_eq!(lse.dims(), [BATCH, HEADS[0], 2]);
        close(&values(out), &want.out, &format!("{implementation:?}"));
        close(&values(lse), &want.lse, &format!("log-sum-exp of {implementation:?}"));
    }
    let refused = with(Some(Implementation::Flash)).expect_err("a CPU has no planes");
    assert!(matches!(refused, OpError::Forced { .. }), "{refused}");
}

/// Pages a cache in order: block `3·b + i` is the `i`th of sequence `b`.
fn paged(whole: Tensor<4>) -> Tensor<4> {
    let [batch, heads, capacity, dim] = whole.dims();
    let blocks = whole.reshape([batch, heads, capacity / BLOCK, BLOCK * dim]).swap_dims(1, 2);
    let blocks = blocks.reshape([batch * capacity / BLOCK, heads, BLOCK, dim]);
    blocks.swap_dims(1, 2)
}

#[test]
fn pages_and_bytes_hold_the_same() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let options = DecodeOptions::default();
    let q = tensor::<4>([BATCH, HEADS[0], 2, DIM], 1, &device);
    let host_q = values(q.clone());
    let table: Vec<u32> = (0..9).collect();
    let host = floats(&device).map(values);
    let expected = want(2, &options, &host_q, [&host[0], &host[1]], None);
    // Pages with positions and heads in either order.
    for dense in [false, true] {
        let pages = floats(&device).map(paged).map(|pages| match dense {
            true => Tensor::from_data(pages.into_data(), &device),
            false => pages,
        });
        let paged = Cache { table: Some(Table::Host(table.clone())), ..cache(pages) };
        let out = decode(&ctx, q.clone(), paged, options).expect("valid");
        close(&values(out), &expected, "pages");
    }

    let bytes = host
        .map(|v| v.iter().map(|v| (v * 40.0).round().clamp(-127.0, 127.0)).collect::<Vec<f32>>());
    let scales = [4, 5].map(|seed| {
        let noise = fill(seed, BATCH * HEADS[1] * CAPACITY, reference::Distribution::Uniform);
        noise.into_iter().map(|v| 0.03 + 0.02 * v).collect::<Vec<f32>>()
    });
    let expected =
        want(2, &options, &host_q, [&bytes[0], &bytes[1]], Some([&scales[0], &scales[1]]));
    let stored = |which: usize| {
        let shape = [BATCH, HEADS[1], CAPACITY, DIM];
        let values = Tensor::<4>::from_data(TensorData::new(bytes[which].clone(), shape), &device);
        let scales = TensorData::new(scales[which].clone(), [BATCH, HEADS[1], CAPACITY]);
        Cached::Bytes {
            values: values.int().cast(IntDType::I8),
            scales: Tensor::from_data(scales, &device),
        }
    };
    let bytes = Cache { k: stored(0), v: stored(1), lengths: lengths(), table: None };
    let out = decode(&ctx, q, bytes, options).expect("valid");
    close(&values(out), &expected, "bytes");
}

#[test]
fn mistakes_are_errors() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let q = |seq_q| tensor::<4>([BATCH, HEADS[0], seq_q, DIM], 1, &device);
    let run = |q, cache| decode(&ctx, q, cache, DecodeOptions::default());
    let fails = |q, cache| run(q, cache).expect_err("a mistake").to_string();
    let whole = || cache(floats(&device));
    assert!(
        fails(q(17), whole()).contains("expected at most 16 new positions per sequence, got 17")
    );
    let long = Lengths::Host(vec![1, 49, 1]);
    assert!(fails(q(1), Cache { lengths: long, ..whole() }).contains("holds 48"));
    let few = Lengths::Host(vec![1, 4]);
    assert!(fails(q(1), Cache { lengths: few, ..whole() }).contains("got 2 lengths, expected 3"));
    let pages =
        |table| Cache { table: Some(Table::Host(table)), ..cache(floats(&device).map(paged)) };
    assert!(fails(q(1), pages((2..11).collect())).contains("the cache has 9"));
    let there = || {
        let data = TensorData::new(vec![1i32; BATCH], [BATCH]);
        Tensor::<1, Int>::from_data(data, &device)
    };
    let short = |longest, table| Cache {
        lengths: Lengths::Device { lengths: there(), longest },
        ..pages(table)
    };
    let table = vec![0, 9, 9, 3, 9, 9, 6, 9, 9];
    run(q(1), short(BLOCK as u32, table.clone())).expect("blocks past the longest are nobody's");
    assert!(fails(q(1), short(BLOCK as u32 + 1, table)).contains("the cache has 9"));
    assert!(fails(q(1), pages((0..8).collect())).contains("table has shape"));
    let half = floats(&device).map(|t| t.cast(FloatDType::F16));
    assert!(fails(q(1), cache(half)).contains("k is F16"));
    let transposed = floats(&device).map(|t| t.swap_dims(2, 3));
    assert!(fails(q(1), cache(transposed)).contains("k has shape"));
    let wide = floats(&device).map(|t| t.reshape([BATCH, HEADS[1], DIM, CAPACITY]).swap_dims(2, 3));
    assert!(matches!(run(q(1), cache(wide)), Err(OpError::Apart("k"))));
    let device = Device::cpu().autodiff();
    let tracked = tensor::<4>([BATCH, HEADS[0], 1, DIM], 1, &device).require_grad();
    let refused = run(tracked, cache(floats(&device)));
    assert!(matches!(refused, Err(OpError::NoGradient)), "{refused:?}");
}
