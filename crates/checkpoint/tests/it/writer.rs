//! Files written one tensor at a time.

use std::fs;

use checkpoint::{
    Absmax, Checkpoint, DType, Error, FourBit, Int8, Layout, Nested, Plan, Reason, Tensor, Weight,
    WeightFormat, Writer,
};
use proptest::prelude::*;
use reference::nf4::{dynamic_map, mean, nest};
use reference::{Distribution, fill, int8};

fn reason(error: Error) -> Reason {
    match error {
        Error::Tensor { reason, .. } => reason,
        other => panic!("{other}"),
    }
}

/// Quantises values like a streaming caller.
fn four_bit(layout: Layout, values: &[f32]) -> FourBit<'static> {
    let format = match layout.quant_type {
        WeightFormat::Nf4 => reference::FourBit::Nf4,
        _ => reference::FourBit::Fp4,
    };
    let blocks = format.quantize(values, layout.block_size).expect("finite");
    let absmax = if layout.nested {
        let offset = mean(&blocks.absmax);
        let nested = nest(&blocks.absmax, offset).expect("finite");
        Absmax::Nested(Nested {
            codes: nested.codes.into(),
            absmax: nested.absmax.into(),
            quant_map: dynamic_map().to_vec().into(),
            offset,
        })
    } else {
        Absmax::Plain(blocks.absmax.into())
    };
    let quant_map = format.codebook().to_vec().into();
    FourBit { layout, codes: blocks.codes.into(), quant_map, absmax }
}

fn layout(shape: &[usize], nested: bool) -> Layout {
    Layout {
        quant_type: WeightFormat::Nf4,
        block_size: 64,
        nested,
        dtype: DType::Bf16,
        shape: shape.to_vec(),
        storage: DType::U8,
    }
}

#[test]
fn weights_stream_into_a_file_in_any_order() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("model.safetensors");
    fs::write(&path, "what was there before").expect("written");
    let mut plan = Int8::plan("b.weight", [3, 5]).expect("a weight");
    plan.push(Plan::new("b.bias", DType::F16, &[3]));
    for i in 0..9 {
        let layout = layout(&[7, 11 + i], i % 2 == 0);
        plan.extend(layout.plan(&format!("a.{i}.weight")).expect("legal"));
    }
    let mut writer = Writer::create(&path, plan).expect("can be written");
    let mut weights = Vec::new();
    for i in (0..9).rev() {
        let values = fill(i as u64, 7 * (11 + i), Distribution::Normal);
        let weight = Weight::FourBit(four_bit(layout(&[7, 11 + i], i % 2 == 0), &values));
        let name = format!("a.{i}.weight");
        writer.write_all(&weight.tensors(&name).expect("consistent")).expect("as planned");
        weights.push((name, weight));
    }
    assert_eq!(fs::read(&path).expect("there"), b"what was there before");
    let rows = int8::quantize(&fill(9, 15, Distribution::Normal), 3, 5).expect("finite");
    let codes: Vec<u8> = rows.codes.iter().map(|c| *c as u8).collect();
    let int8 = Int8 { shape: [3, 5], codes: codes.into(), scb: rows.scb.into() };
    writer.write_all(&int8.tensors("b.weight").expect("consistent")).expect("as planned");
    writer.write("b.bias", &Tensor::new(DType::F16, &[3], vec![7; 6])).expect("as planned");
    writer.finish().expect("all is written");
    weights.push(("b.weight".into(), Weight::Int8(int8)));

    let file = Checkpoint::open(&path).expect("just written");
    for (name, weight) in &weights {
        assert_eq!(&file.weight(name).expect("just written"), weight, "{name}");
    }
    let start = u64::from_le_bytes(fs::read(&path).expect("there")[..8].try_into().expect("8"));
    assert_eq!(start % 8, 0, "tensors are aligned");
    let Weight::FourBit(weight) = file.weight("a.1.weight").expect("just written") else {
        panic!("four bits were expected");
    };
    let Absmax::Plain(absmax) = weight.absmax else { panic!("plain absmax were expected") };
    assert!(matches!(absmax, std::borrow::Cow::Borrowed(_)), "nothing is copied");
    assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 1);
}

#[test]
fn what_was_not_planned_is_refused() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("x.safetensors");
    let plan = || vec![Plan::new("a", DType::F32, &[2]), Plan::text("t")];
    let mut writer = Writer::create(&path, plan()).expect("can be written");
    let mut refused = |name: &str, dtype, shape: &[usize], bytes: usize| {
        reason(writer.write(name, &Tensor::new(dtype, shape, vec![0; bytes])).expect_err("refused"))
    };
    assert_eq!(refused("b", DType::F32, &[2], 8), Reason::Unexpected("the planned tensors"));
    let need = vec![DType::F32];
    assert_eq!(refused("a", DType::I32, &[2], 8), Reason::DType { have: DType::I32, need });
    assert_eq!(
        refused("a", DType::F32, &[1, 2], 8),
        Reason::Shape { have: vec![1, 2], need: vec![2] }
    );
    assert_eq!(refused("a", DType::F32, &[2], 7), Reason::Bytes { have: 7, need: 8 });
    assert!(matches!(refused("t", DType::U8, &[4097], 4097), Reason::Shape { .. }));
    let a = Tensor::new(DType::F32, &[2], vec![0; 8]);
    writer.write("a", &a).expect("as planned");
    assert_eq!(reason(writer.write("a", &a).expect_err("again")), Reason::Twice);
    let error = writer.finish().expect_err("no text");
    assert_eq!(error.to_string(), "tensor t: is missing");
    assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 0, "nothing is left");

    let twice = Writer::create(&path, [plan(), plan()].concat()).expect_err("twice");
    assert_eq!(reason(twice), Reason::Twice);
    let huge = [1, 2].map(|i| Plan::new(i.to_string(), DType::U8, &[usize::MAX / 8]));
    let vast = Plan::new("v", DType::U8, &[usize::MAX, usize::MAX]);
    assert!(Writer::create(&path, huge).is_ok(), "disks grow");
    assert!(matches!(
        reason(Writer::create(&path, [vast]).expect_err("overflows")),
        Reason::Overflow(_)
    ));
    assert!(matches!(Writer::create(folder.path().join("no/x"), plan()), Err(Error::Write { .. })));
}

#[test]
fn weights_that_contradict_themselves_are_refused() {
    let values = fill(1, 7 * 11, Distribution::Normal);
    let good = || four_bit(layout(&[7, 11], true), &values);
    let refused = |change: &dyn Fn(&mut FourBit<'static>)| {
        let mut weight = good();
        change(&mut weight);
        weight.tensors("w").expect_err("refused").to_string()
    };
    let nested = |change: &dyn Fn(&mut Nested<'static>)| {
        refused(&|weight| match &mut weight.absmax {
            Absmax::Nested(nested) => change(nested),
            Absmax::Plain(_) => panic!("nested was made"),
        })
    };
    for (text, word) in [
        (refused(&|w| w.layout.block_size = 48), "tensor w: has a block size of 48,"),
        (refused(&|w| w.layout.block_size = 32), "tensor w.absmax: has shape [2]"),
        (refused(&|w| w.layout.nested = false), "tensor w.absmax: does not belong"),
        (
            refused(&|w| w.layout.dtype = DType::F64),
            "tensor w: is F64, expected F16 or BF16 or F32",
        ),
        (refused(&|w| w.layout.storage = DType::I8), "tensor w: is I8, expected U8 or"),
        (refused(&|w| w.layout.storage = DType::F8E8m0), "tensor w: is F8_E8M0, expected U8 or"),
        (refused(&|w| w.layout.storage = DType::F16), "tensor w: has shape [7, 11], expected"),
        (refused(&|w| w.layout.shape = vec![7, 13]), "tensor w: has shape [39, 1], expected"),
        (refused(&|w| w.layout.shape = vec![1 << 33, 1 << 33]), "too large"),
        (refused(&|w| w.codes.to_mut().push(0)), "tensor w: has shape [40, 1], expected"),
        (refused(&|w| w.quant_map.to_mut()[3] = f32::NAN), "w.quant_map: value 3 is"),
        (refused(&|w| w.quant_map.to_mut().push(1.0)), "w.quant_map: has shape [17]"),
        (nested(&|n| n.offset = f32::INFINITY), "w.nested_offset: value 0"),
        (nested(&|n| n.absmax.to_mut()[0] = f32::NAN), "w.nested_absmax: value 0"),
        (nested(&|n| n.codes.to_mut().push(0)), "w.absmax: has shape [3]"),
        (nested(&|n| n.quant_map.to_mut().clear()), "w.nested_quant_map: has shape [0]"),
    ] {
        assert!(text.contains(word), "{text:?}, not {word:?}");
    }
    assert!(good().tensors("w").is_ok());
    let int8 = |codes, scb: &[f32]| Int8 {
        shape: [2, 3],
        codes: vec![0; codes].into(),
        scb: scb.to_vec().into(),
    };
    for (weight, name, word) in [
        (int8(5, &[1.0; 2]), "a.weight", "tensor a.weight: has 5 bytes"),
        (int8(6, &[1.0; 3]), "a.weight", "tensor a.SCB: has shape [3]"),
        (int8(6, &[1.0, f32::NAN]), "a.weight", "tensor a.SCB: value 1 is"),
        (int8(6, &[1.0; 2]), "a.kernel", "expected the name `weight`"),
    ] {
        let text = weight.tensors(name).expect_err(word).to_string();
        assert!(text.contains(word), "{text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_weight_is_read_as_it_was_written(
        shape in prop::collection::vec(0..20usize, 1..4),
        log in 5..=12u32,
        nested: bool,
        quant_type in prop::sample::select(vec![WeightFormat::Nf4, WeightFormat::Fp4]),
        dtype in prop::sample::select(vec![DType::F16, DType::Bf16, DType::F32]),
        storage in prop::sample::select(vec![DType::U8, DType::F16, DType::Bf16, DType::F32]),
        seed in 0..99u64,
    ) {
        let len = shape.iter().product();
        let layout = Layout { quant_type, block_size: 1 << log, nested, dtype, shape, storage };
        let weight = Weight::FourBit(four_bit(layout.clone(), &fill(seed, len, Distribution::Normal)));
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("x.safetensors");
        let Ok(plan) = layout.plan("x") else {
            prop_assert!(len.div_ceil(2) % (storage.size()) != 0);
            prop_assert!(weight.tensors("x").is_err());
            return Ok(());
        };
        let mut writer = Writer::create(&path, plan).expect("can be written");
        writer.write_all(&weight.tensors("x").expect("consistent")).expect("as planned");
        writer.finish().expect("all is written");
        let file = Checkpoint::open(&path).expect("just written");
        prop_assert_eq!(file.weight("x").expect("just written"), weight);
    }
}
