use burn::tensor::{Device, FloatDType, Int, IntDType, Tensor, TensorData};
use ops::{Cached, Ctx, KvSlots, NormKind, OpError, QkNorm, RopeOptions, rope};
use reference::{DType, Left, Norm, NormRule, Rope, RopeOperands, Rotary, Slots, Stretch};

use crate::{tensor, values};

const BATCH: usize = 2;
const SEQ: usize = 3;
const HEADS: [usize; 2] = [4, 2];
const DIM: usize = 16;
const CAPACITY: usize = 12;
/// The second sequence's last position is past the cache.
const START: [i32; BATCH] = [4, 10];

fn slots(device: &Device) -> KvSlots {
    let [k, v] = [2, 3].map(|seed| tensor([BATCH, HEADS[1], CAPACITY, DIM], seed, device));
    KvSlots { k: Cached::Float(k), v: Cached::Float(v), start: start(device), pages: None }
}

/// Returns an int8 cache: every value is 7 with scale 0.5.
fn bytes(device: &Device) -> KvSlots {
    let cells = || Cached::Bytes {
        values: Tensor::full(
            [BATCH, HEADS[1], CAPACITY, DIM],
            7,
            (device, burn::tensor::DType::I8),
        ),
        scales: Tensor::full([BATCH, HEADS[1], CAPACITY], 0.5, device),
    };
    KvSlots { k: cells(), v: cells(), start: start(device), pages: None }
}

/// Returns the values of a float cache.
fn float(cached: &Cached) -> Tensor<4> {
    match cached {
        Cached::Float(cache) => cache.clone(),
        Cached::Bytes { .. } => panic!("a cache of bytes"),
    }
}

/// Returns the values and scales of an int8 cache.
fn parts(cached: &Cached) -> (Vec<f32>, Vec<f32>) {
    match cached {
        Cached::Float(_) => panic!("a cache of floats"),
        Cached::Bytes { values, scales } => {
            (self::values(values.clone().float()), scales.to_data().try_to_vec().expect("f32"))
        }
    }
}

/// Applies a change to keys and values.
fn changed(slots: KvSlots, change: impl Fn(Tensor<4>) -> Tensor<4>) -> KvSlots {
    let [k, v] = [&slots.k, &slots.v].map(|cached| Cached::Float(change(float(cached))));
    KvSlots { k, v, ..slots }
}

fn start(device: &Device) -> Tensor<1, Int> {
    let data = TensorData::new(START.to_vec(), [BATCH]);
    Tensor::from_data(data, (device, burn::tensor::DType::I32))
}

fn qkv(device: &Device) -> Tensor<2> {
    tensor([BATCH * SEQ, (HEADS[0] + 2 * HEADS[1]) * DIM], 1, device)
}

fn options(dim: usize, norm: bool, device: &Device) -> RopeOptions {
    let rotary = Rotary { base: 1e4, dims: dim, stretch: Stretch::None, magnitude: 1.0 };
    let table: Vec<f32> = rotary.table(CAPACITY, CAPACITY).iter().map(|v| *v as f32).collect();
    let table = TensorData::new(table, [CAPACITY, dim]);
    let [q, k] = [4, 5].map(|seed| tensor([DIM], seed, device));
    RopeOptions {
        heads: HEADS[0],
        kv_heads: HEADS[1],
        head_dim: DIM,
        table: (dim > 0).then(|| Tensor::from_data(table, device)),
        qk_norm: norm.then_some(QkNorm { kind: NormKind::Rms, eps: 1e-3, q, k }),
    }
}

/// Returns a view of `[batch, capacity, kv_heads, head_dim]`.
fn heads_last(cache: Tensor<4>) -> Tensor<4> {
    let transposed = cache.swap_dims(1, 2).into_data();
    let device = Device::cpu();
    Tensor::<4>::from_data(transposed, &device).swap_dims(1, 2)
}

/// Returns a view of `[batch, capacity, 2 · kv_heads, head_dim]`: the first half of its heads.
fn apart(cache: Tensor<4>) -> Tensor<4> {
    let [batch, heads, capacity, dim] = cache.dims();
    let twice = Tensor::cat(vec![cache.clone(), cache], 1).swap_dims(1, 2).into_data();
    let twice = Tensor::<4>::from_data(twice, &Device::cpu()).swap_dims(1, 2);
    let own = twice.slice([0..batch, 0..heads]);
    assert_eq!(own.dims(), [batch, heads, capacity, dim]);
    own
}

/// Panics unless `q` and the new contents of `slots` equal the reference's for the old contents.
fn check(
    q: Tensor<4>,
    qkv: &[f32],
    before: &KvSlots,
    now: &KvSlots,
    with: &RopeOptions,
    dtype: DType,
) {
    let dims = with.table.as_ref().map_or(0, |table| table.dims()[1]);
    let reference = Rope {
        batch: BATCH,
        seq: SEQ,
        heads: HEADS[0],
        kv_heads: HEADS[1],
        head_dim: DIM,
        slots: Slots::Runs { capacity: CAPACITY },
        dims,
        norm: with.qk_norm.is_some().then_some(Norm { rule: NormRule::Rms, eps: 1e-3 }),
        dtype,
    };
    let table = with.table.clone().map_or(Vec::new(), values);
    let weights = with.qk_norm.clone().map(|norm| [values(norm.q), values(norm.k)]);
    let of = |slots: &KvSlots| match (&slots.k, &slots.v) {
        (Cached::Float(k), Cached::Float(v)) => (values(k.clone()), values(v.clone()), None),
        (k, v) => {
            let ((k, k_scales), (v, v_scales)) = (parts(k), parts(v));
            (k, v, Some([k_scales, v_scales]))
        }
    };
    let ((k, v, scales), now) = (of(before), of(now));
    let operands = RopeOperands {
        qkv,
        start: &START.map(i32::cast_unsigned),
        pages: &[],
        table: &table,
        weights: weights.as_ref().map(|w| w.each_ref().map(|w| &w[..])),
        k: &k,
        v: &v,
        scales: scales.as_ref().map(|s| s.each_ref().map(|s| &s[..])),
    };
    assert_eq!(q.dims(), [BATCH, HEADS[0], SEQ, DIM]);
    let q = values(q.swap_dims(1, 2));
    let scales = now.2.as_ref().map(|s| s.each_ref().map(|s| &s[..]));
    let verdict = reference.check(operands, Left { q: &q, k: &now.0, v: &now.1, scales });
    let verdict = verdict.expect("lengths agree");
    assert!(verdict.passed, "{dims} {dtype}: {verdict}");
}

/// Copies a cache to its own memory.
fn copy(slots: &KvSlots) -> KvSlots {
    let copy = |cached: &Cached| match cached {
        Cached::Float(cache) => Cached::Float(Tensor::from_data(cache.to_data(), &cache.device())),
        Cached::Bytes { values, scales } => Cached::Bytes {
            values: Tensor::from_data(
                values.to_data(),
                (&values.device(), burn::tensor::DType::I8),
            ),
            scales: Tensor::from_data(scales.to_data(), &scales.device()),
        },
    };
    KvSlots { k: copy(&slots.k), v: copy(&slots.v), ..slots.clone() }
}

#[test]
fn heads_are_the_references_and_every_clone_of_the_cache_has_them() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    for dim in [DIM, 6, 0] {
        for norm in [false, true] {
            let (qkv, with, slots) = (qkv(&device), options(dim, norm, &device), slots(&device));
            let before = copy(&slots);
            // A clone made before shares the memory.
            let seen = slots.clone();
            let q = rope(&ctx, qkv.clone(), &slots, with.clone()).expect("valid");
            assert_ne!(values(float(&seen.k)), values(float(&before.k)));
            check(q, &values(qkv.clone()), &before, &seen, &with, DType::F32);
            // A projection with another layout, and U32 words.
            let again = self::slots(&device);
            let again = KvSlots { start: again.start.cast(IntDType::U32), ..again };
            let transposed =
                Tensor::from_data(qkv.clone().transpose().into_data(), &device).transpose();
            rope(&ctx, transposed, &again, with.clone()).expect("valid");
            assert_eq!(values(float(&again.k)), values(float(&slots.k)));
            assert_eq!(values(float(&again.v)), values(float(&slots.v)));
            // Caches and a table with padded rows, as Burn pads them on CUDA.
            let again = self::slots(&device);
            let (k, v) = (heads_last(float(&again.k)), apart(float(&again.v)));
            let again = KvSlots { k: Cached::Float(k), v: Cached::Float(v), ..again };
            let table = with.table.clone().map(|table| {
                let [positions, dim] = table.dims();
                let padded = Tensor::cat(vec![table.clone(), table], 1);
                padded.slice([0..positions, 0..dim])
            });
            rope(&ctx, qkv, &again, RopeOptions { table, ..with }).expect("valid");
            assert_eq!(values(float(&again.k)), values(float(&slots.k)));
            assert_eq!(values(float(&again.v)), values(float(&slots.v)));
        }
    }
}

#[test]
fn bytes_have_the_scale_of_their_head() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    for (dim, norm) in [(DIM, true), (6, false), (0, true)] {
        let (qkv, with, slots) = (qkv(&device), options(dim, norm, &device), bytes(&device));
        let before = copy(&slots);
        let q = rope(&ctx, qkv.clone(), &slots, with.clone()).expect("valid");
        check(q, &values(qkv.clone()), &before, &slots, &with, DType::F32);
        // Scales with another layout: those of a position are adjacent.
        let again = bytes(&device);
        let transposed = |cached: &Cached| match cached {
            Cached::Float(_) => panic!("a cache of floats"),
            Cached::Bytes { values, scales } => {
                let transposed = scales.clone().swap_dims(1, 2).into_data();
                let scales = Tensor::<3>::from_data(transposed, &device).swap_dims(1, 2);
                Cached::Bytes { values: values.clone(), scales }
            }
        };
        let (k, v) = (transposed(&again.k), transposed(&again.v));
        let transposed = KvSlots { k, v, ..again.clone() };
        rope(&ctx, qkv.clone(), &transposed, with.clone()).expect("valid");
        assert_eq!(
            (parts(&transposed.k), parts(&transposed.v)),
            (parts(&slots.k), parts(&slots.v))
        );
        // Another layout of only one of the two scales is an error, and so are caches of two formats.
        let one = KvSlots { k: transposed.k.clone(), ..copy(&before) };
        let refused =
            |slots: &KvSlots| rope(&ctx, qkv.clone(), slots, with.clone()).expect_err("no");
        assert!(matches!(refused(&one), OpError::Apart("scales")));
        let mixed = KvSlots { k: self::slots(&device).k, ..copy(&before) };
        assert!(refused(&mixed).to_string().contains("v is I8"), "{}", refused(&mixed));
    }
}

#[test]
fn pages_hold_what_runs_do() {
    const PAGE: usize = 4;
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let with = options(DIM, true, &device);
    let runs = slots(&device);
    // No sequence uses page 6.
    let pages =
        Tensor::<1, Int>::from_data([2, 5, 0, 4, 1, 3], (&device, burn::tensor::DType::I32));
    let paged = |cache: &Cached| {
        let pages = float(cache).swap_dims(1, 2).reshape([6, PAGE, HEADS[1], DIM]);
        let order = Tensor::<1, Int>::from_data([2, 4, 0, 5, 3, 1, 0], &device);
        pages.select(0, order)
    };
    let own = KvSlots {
        k: Cached::Float(paged(&runs.k)),
        v: Cached::Float(paged(&runs.v)),
        start: start(&device),
        pages: Some(pages.reshape([BATCH, CAPACITY / PAGE])),
    };
    let nobodys = |cache: &Cached| values(float(cache).narrow(0, 6, 1));
    let before = nobodys(&own.k);
    let want = rope(&ctx, qkv(&device), &runs, with.clone()).expect("valid");
    let got = rope(&ctx, qkv(&device), &own, with.clone()).expect("valid");
    let bits = |t: Tensor<4>| values(t).into_iter().map(f32::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(got), bits(want), "a query without a place is NaN in both");
    assert_eq!(values(float(&own.k).narrow(0, 0, 6)), values(paged(&runs.k).narrow(0, 0, 6)));
    assert_eq!(values(float(&own.v).narrow(0, 0, 6)), values(paged(&runs.v).narrow(0, 0, 6)));
    assert_eq!(nobodys(&own.k), before);

    let none = Tensor::<2, Int>::zeros([BATCH, 0], &device);
    let refused = |slots: KvSlots| rope(&ctx, qkv(&device), &slots, with.clone()).expect_err("no");
    let refused = |slots| refused(slots).to_string();
    assert!(
        refused(KvSlots { pages: Some(none), ..own.clone() })
            .contains("expected max_blocks of at least 1")
    );
    let odd = changed(own.clone(), |cache| cache.narrow(1, 0, 3));
    assert!(refused(odd).contains("power of two, got 3 positions"));
    let one = own.pages.clone().map(|pages| pages.narrow(0, 0, 1));
    assert!(refused(KvSlots { pages: one, ..own }).contains("start has shape [2]"));
}

#[test]
fn halves_are_rounded_once() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    for (half, dtype) in [(FloatDType::F16, DType::F16), (FloatDType::BF16, DType::Bf16)] {
        let slots = changed(slots(&device), |cache| cache.cast(half));
        let (qkv, plain) = (qkv(&device).cast(half), options(DIM, true, &device));
        let norm = plain.qk_norm.map(|n| QkNorm { q: n.q.cast(half), k: n.k.cast(half), ..n });
        let with = RopeOptions { qk_norm: norm, ..plain };
        let (before, was) = (copy(&slots), values(qkv.clone()));
        let q = rope(&ctx, qkv, &slots, with.clone()).expect("valid");
        assert_eq!(q.dtype(), half.into());
        check(q, &was, &before, &slots, &with, dtype);
    }
}

#[test]
fn mistakes_are_errors_and_write_nothing() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let good = || options(DIM, true, &device);
    let slots = slots(&device);
    let before = values(float(&slots.k));
    let run = |qkv, slots: &KvSlots, with| rope(&ctx, qkv, slots, with);
    let fails = |qkv, slots: &KvSlots, with| run(qkv, slots, with).expect_err("wrong").to_string();
    let heads = RopeOptions { heads: 5, ..good() };
    assert!(fails(qkv(&device), &slots, heads).contains("qkv has shape [6, 128]"));
    let odd = tensor([BATCH * SEQ + 1, 128], 1, &device);
    assert!(fails(odd, &slots, good()).contains("qkv has shape [7, 128]"));
    let few = KvSlots { start: start(&device).narrow(0, 0, 1), ..slots.clone() };
    assert!(fails(qkv(&device), &few, good()).contains("start has shape [1]"));
    let small = changed(slots.clone(), |cache| cache.slice([0..BATCH, 0..1]));
    let small = KvSlots { k: slots.k.clone(), ..small };
    assert!(fails(qkv(&device), &small, good()).contains("v has shape"));
    let half = changed(slots.clone(), |cache| cache.cast(FloatDType::F16));
    assert!(fails(qkv(&device), &half, good()).contains("k is F16"));
    let table = good().table.map(|table| table.cast(FloatDType::F16));
    let with = RopeOptions { table, ..good() };
    assert!(fails(qkv(&device), &slots, with).contains("table is F16"));
    let norm = good().qk_norm.map(|norm| QkNorm { k: tensor([8], 1, &device), ..norm });
    let with = RopeOptions { qk_norm: norm, ..good() };
    assert!(fails(qkv(&device), &slots, with).contains("key weight has shape [8]"));
    let long = tensor([BATCH * 13, 128], 1, &device);
    assert!(fails(long, &slots, good()).contains("got 13 new positions, but the cache holds 12"));
    let table = Some(tensor([CAPACITY, 18], 1, &device));
    let with = RopeOptions { table, ..good() };
    assert!(fails(qkv(&device), &slots, with).contains("got 18 of 16"));
    let transposed = changed(slots.clone(), |cache| {
        let transposed = Tensor::<4>::from_data(cache.swap_dims(2, 3).into_data(), &Device::cpu());
        transposed.swap_dims(2, 3)
    });
    let transposed = KvSlots { k: slots.k.clone(), ..transposed };
    assert!(matches!(run(qkv(&device), &transposed, good()), Err(OpError::Apart("v"))));
    let one = changed(slots.clone(), |cache| {
        cache.narrow(0, 0, 1).expand([BATCH, HEADS[1], CAPACITY, DIM])
    });
    assert!(matches!(run(qkv(&device), &one, good()), Err(OpError::Apart("k"))));
    assert_eq!(values(float(&slots.k)), before, "nothing is written");

    let device = Device::cpu().autodiff();
    let slots = changed(slots, |cache| Tensor::from_data(cache.into_data(), &device));
    let slots = KvSlots { start: start(&device), ..slots };
    let refused = run(qkv(&device).require_grad(), &slots, options(DIM, true, &device));
    assert!(matches!(refused, Err(OpError::NoGradient)), "{refused:?}");
    assert_eq!(values(float(&slots.k)), before, "nothing is written");
    run(qkv(&device), &slots, options(DIM, true, &device)).expect("nothing is tracked");
    assert_ne!(values(float(&slots.k)), before);
}
