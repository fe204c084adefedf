use burn::tensor::{Device, FloatDType, Int, IntDType, Tensor, TensorData};
use ops::{Ctx, OpError, embed};
use reference::{DType, Embed};

use crate::{tensor, values};

const VOCAB: usize = 9;
const MAX_SEQ: usize = 7;
/// The last token of the second sequence is past the vocabulary and past the positions.
const TOKENS: [i32; 6] = [3, 0, 8, 3, 1, 9];
const START: [i32; 2] = [0, 5];
const POSITIONS: [u32; 6] = [0, 1, 2, 5, 6, 7];

fn ints<const D: usize>(of: &[i32], shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(of.to_vec(), shape), (device, burn::tensor::DType::I32))
}

fn tokens(device: &Device) -> Tensor<2, Int> {
    ints(&TOKENS, [2, 3], device)
}

fn start(device: &Device) -> Tensor<1, Int> {
    ints(&START, [2], device)
}

#[test]
fn rows_are_the_references() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    for (float, dtype) in [
        (FloatDType::F32, DType::F32),
        (FloatDType::F16, DType::F16),
        (FloatDType::BF16, DType::Bf16),
    ] {
        for (hidden, scale) in [(16, 1.0), (5, 7.75)] {
            for learned in [false, true] {
                let table = tensor::<2>([VOCAB, hidden], 1, &device).cast(float);
                let positions = tensor::<2>([MAX_SEQ, hidden], 2, &device).cast(float);
                let (host, added) = (values(table.clone()), values(positions.clone()));
                let positions = learned.then_some(positions);
                let reference = Embed {
                    hidden,
                    table: &host,
                    scale: scale.into(),
                    learned: learned.then_some((&added, &POSITIONS)),
                    dtype,
                };
                for int in [IntDType::I32, IntDType::U32, IntDType::I64] {
                    let (tokens, start) = (tokens(&device).cast(int), start(&device).cast(int));
                    let out = embed(&ctx, tokens, table.clone(), start, positions.clone(), scale);
                    let out = out.expect("valid");
                    assert_eq!((out.dims(), out.dtype()), ([6, hidden], float.into()));
                    let out = values(out);
                    assert!(out[5 * hidden..].iter().all(|v| v.is_nan()), "{out:?}");
                    let verdict = reference.check(&TOKENS.map(i32::cast_unsigned), &out);
                    let verdict = verdict.expect("lengths agree");
                    assert!(verdict.passed, "{dtype} {hidden} {learned} {int:?}: {verdict}");
                }
            }
        }
    }
}

#[test]
fn mistakes_are_errors() {
    let (device, ctx) = (Device::cpu(), Ctx::default());
    let table = || tensor::<2>([VOCAB, 8], 1, &device);
    let run = |start, table, positions, scale| {
        embed(&ctx, tokens(&device), table, start, positions, scale)
    };
    let fails = |start, positions, scale| {
        run(start, table(), positions, scale).expect_err("a mistake").to_string()
    };
    assert!(fails(ints(&[0], [1], &device), None, 1.0).contains("start has shape [1]"));
    let narrow = tensor::<2>([MAX_SEQ, 4], 2, &device);
    assert!(fails(start(&device), Some(narrow), 1.0).contains("positions has shape [7, 4]"));
    let half = tensor::<2>([MAX_SEQ, 8], 2, &device).cast(FloatDType::F16);
    assert!(fails(start(&device), Some(half), 1.0).contains("positions is F16"));
    assert!(fails(start(&device), None, f32::NAN).contains("expected a finite scale, got NaN"));
    let none = Tensor::<2>::zeros([0, 8], &device);
    let none = run(start(&device), none, None, 1.0).expect_err("no vocabulary").to_string();
    assert!(none.contains("expected vocab of at least 1"), "{none}");

    let device = Device::cpu().autodiff();
    let run = |table| embed(&ctx, tokens(&device), table, start(&device), None, 1.0);
    let refused = run(tensor::<2>([VOCAB, 8], 1, &device).require_grad());
    assert!(matches!(refused, Err(OpError::NoGradient)), "{refused:?}");
    assert!(run(tensor([VOCAB, 8], 1, &device)).is_ok(), "nothing is tracked");
}
