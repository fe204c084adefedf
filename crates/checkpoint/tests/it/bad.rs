//! Broken files: each gives an error with the tensor and the reason, and never a panic.

use std::fs;
use std::path::Path;

use checkpoint::{Checkpoint, DType, Error, Reason, Tensor, Weight};
use proptest::prelude::*;

use crate::{FIXTURES, Named, fixture, save, tensors, weight_of};

const STATE: &str = "linear.weight.quant_state.bitsandbytes__nf4";

/// A change that breaks a fixture.
type Change = Box<dyn Fn(&mut Vec<Named>)>;

/// Returns the error from reading the linear layer after a change to a fixture.
fn refused(name: &str, change: impl Fn(&mut Vec<Named>)) -> String {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("x.safetensors");
    let mut tensors = tensors(name);
    change(&mut tensors);
    save(&path, &tensors).expect("whole, if wrong");
    let file = Checkpoint::open(&path).expect("a safetensors file");
    file.linear("linear").expect_err("broken").to_string()
}

#[test]
fn a_folder_without_weights_says_what_it_has_instead() {
    for (files, hint) in [
        (&["config.json"][..], None),
        (
            &["model-00001-of-00002.safetensors", "model.bin"],
            Some("download model.safetensors.index.json"),
        ),
        (&["pytorch_model.bin"], Some("PyTorch pickles")),
        (&["model-q4_0.gguf"], Some("GGUF weights for llama.cpp")),
    ] {
        let folder = tempfile::tempdir().expect("temporary folder");
        for file in files {
            fs::write(folder.path().join(file), "x").expect("written");
        }
        let refused = Checkpoint::open(folder.path()).expect_err("no weights").to_string();
        assert!(refused.contains(" has neither model.safetensors nor "), "{refused}");
        assert_eq!(refused.contains("\nhint: "), hint.is_some(), "{refused}");
        assert!(refused.contains(hint.unwrap_or_default()), "{refused}");
    }
}

fn tensor<'t>(tensors: &'t mut [Named], name: &str) -> &'t mut Tensor<'static> {
    let named = tensors.iter_mut().find(|(have, _)| have == name);
    &mut named.unwrap_or_else(|| panic!("no {name}")).1
}

fn put(name: &'static str, dtype: DType, shape: &'static [usize]) -> Change {
    Box::new(move |tensors| {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        tensors.retain(|(have, _)| have != name);
        tensors.push((name.into(), Tensor::new(dtype, shape, vec![0; bytes])));
    })
}

fn drop(name: &'static str) -> Change {
    Box::new(move |tensors| tensors.retain(|(have, _)| have != name))
}

/// Replaces text in the JSON of the state.
fn state(from: &'static str, to: &'static str) -> Change {
    Box::new(move |tensors| {
        let state = tensor(tensors, STATE);
        let text = String::from_utf8(state.bytes.to_vec()).expect("JSON");
        assert!(text.contains(from), "{text}");
        let text = text.replace(from, to).into_bytes();
        *state = Tensor::new(DType::U8, &[text.len()], text);
    })
}

fn rename(from: &'static str, to: &'static str) -> Change {
    Box::new(move |tensors| {
        let named = tensors.iter_mut().find(|(name, _)| name == from);
        named.expect("there").0 = to.into();
    })
}

fn nan(name: &'static str) -> Change {
    number(name, 1, f32::NAN)
}

fn number(name: &'static str, at: usize, value: f32) -> Change {
    Box::new(move |tensors| {
        tensor(tensors, name).bytes.to_mut()[4 * at..][..4].copy_from_slice(&value.to_le_bytes());
    })
}

fn reversed(name: &'static str) -> Change {
    Box::new(move |tensors| {
        let bytes = tensor(tensors, name).bytes.to_mut();
        let words: Vec<u8> = bytes.rchunks(4).flatten().copied().collect();
        bytes.copy_from_slice(&words);
    })
}

/// Changes the offset of nested absmax.
fn offset(to: &'static str) -> Change {
    Box::new(move |tensors| {
        let state = tensor(tensors, STATE);
        let text = String::from_utf8(state.bytes.to_vec()).expect("JSON");
        let (before, _) = text.split_once("\"nested_offset\"").expect("nested");
        let text = format!("{before}\"nested_offset\": {to}}}").into_bytes();
        *state = Tensor::new(DType::U8, &[text.len()], text);
    })
}

#[test]
fn states_that_are_broken() {
    let fp4 = "linear.weight.quant_state.bitsandbytes__fp4";
    let cases: Vec<(Change, &str)> = vec![
        (drop(STATE), "bitsandbytes__nf4: is missing"),
        (drop("linear.weight"), "tensor linear.weight: is missing"),
        (drop("linear.weight.absmax"), "linear.weight.absmax: is missing"),
        (drop("linear.weight.quant_map"), "linear.weight.quant_map: is missing"),
        (drop("linear.weight.nested_absmax"), "nested_absmax: is missing"),
        (drop("linear.weight.nested_quant_map"), "nested_quant_map: is missing"),
        (state("}", ""), "is not a quantization state: EOF"),
        (state("blocksize", "size"), "unknown field `size`"),
        (state("\"nested_blocksize\": 256, ", ""), "nested keys are missing"),
        (state("\"nf4\"", "\"int4\""), "nf4 or fp4, got \"int4\""),
        (
            state("\"nf4\"", "\"fp4\""),
            "linear.weight.quant_state.bitsandbytes__nf4: has type fp4, but its name says nf4",
        ),
        (state("\"blocksize\": 64", "\"blocksize\": 48"), "block size of 48,"),
        (state("\"blocksize\": 64", "\"blocksize\": 0"), "block size of 0,"),
        (
            state("\"blocksize\": 64", "\"blocksize\": 128"),
            "linear.weight.absmax: has shape [272], expected [136] for a block size of 128",
        ),
        (state("256", "128"), "nested block size of 128,"),
        (state("bfloat16", "float64"), "unsupported dtype \"float64\""),
        (state("\"float32\"", "\"float16\""), "unsupported nested dtype \"float16\""),
        (state("[136, 128]", "[136, 130]"), "expected 17680 4-bit values"),
        (
            state("[136, 128]", "[4294967296, 4294967296]"),
            "shape [4294967296, 4294967296] is too large",
        ),
        (state("[136, 128]", "[17408]"), "expected 2 axes"),
        (state("[136, 128]", "[128, 136]"), "tensor linear.bias: has shape [136]"),
        (state("\"nested_offset\": ", "\"nested_offset\": 1e300"), "out of range"),
        (put(STATE, DType::U8, &[5000]), "5000 bytes are too many"),
        (put(STATE, DType::I8, &[4]), "is I8, expected U8"),
        (put(fp4, DType::U8, &[4]), "has more than one quantization state: linear.weight"),
        (rename(STATE, "linear.weight.quant_state.nf4"), "got \"nf4\""),
        (rename(STATE, fp4), "__fp4: has type nf4, but its name says fp4"),
        (put("linear.weight.zeros", DType::U8, &[1]), "zeros: does not belong to the"),
        (put("linear.weight", DType::U8, &[8703, 1]), "has shape [8703, 1], expected"),
        (put("linear.weight", DType::U8, &[1, 8704]), "has shape [1, 8704], expected"),
        (put("linear.weight", DType::Bf16, &[8704, 1]), "has shape [8704, 1], expected"),
        (put("linear.weight", DType::I8, &[8704, 1]), "linear.weight: is I8, expected U8 or F16"),
        (put("linear.weight", DType::F64, &[1088, 1]), "linear.weight: is F64, expected U8 or F16"),
        (put("linear.weight.absmax", DType::F32, &[272]), "is F32, expected U8"),
        (put("linear.weight.absmax", DType::U8, &[271]), "has shape [271], expected"),
        (put("linear.weight.quant_map", DType::F32, &[15]), "has shape [15], expected [16]"),
        (put("linear.weight.quant_map", DType::F16, &[16]), "is F16, expected F32"),
        (put("linear.weight.nested_absmax", DType::F32, &[1]), "[1], expected [2]"),
        (put("linear.weight.nested_quant_map", DType::F32, &[16]), "[16], expected [256]"),
        (nan("linear.weight.nested_absmax"), "nested_absmax: value 1 is infinite"),
        (nan("linear.weight.quant_map"), "quant_map: value 1 is infinite or NaN"),
        (nan("linear.weight.nested_quant_map"), "nested_quant_map: value 1 is"),
        (number("linear.weight.nested_absmax", 0, -1.0), "nested_absmax: value 0 is negative"),
        (number("linear.weight.nested_quant_map", 255, 0.5), "nested_quant_map: does not ascend"),
        (number("linear.weight.nested_quant_map", 7, 1.0), "nested_quant_map: does not ascend"),
        (number("linear.weight.nested_absmax", 1, 3e38), "linear.weight.absmax: value 2"),
        (reversed("linear.weight.nested_quant_map"), "nested_quant_map: does not ascend"),
        (put("linear.weight.nested_quant_map", DType::F32, &[256]), "map: does not ascend"),
        (offset("0.01"), "linear.weight.absmax: value"),
        (offset("-3e38"), "linear.weight.absmax: value 0 is negative"),
        (offset("1e300"), "bitsandbytes__nf4: value 0 is infinite"),
        (number("linear.weight.quant_map", 15, 1.5), "quant_map: has 1.5 as its largest"),
        (put("linear.bias", DType::I8, &[136]), "tensor linear.bias: is I8, expected"),
    ];
    for (change, word) in cases {
        let text = refused("nf4_nested", change);
        assert!(
            text.starts_with("tensor linear.") && text.contains(word),
            "{text:?}, not {word:?}"
        );
    }
    let plain = refused("nf4_plain", put("linear.weight.nested_absmax", DType::F32, &[1]));
    assert!(plain.contains("nested_absmax: does not belong"), "{plain}");
    let plain = refused("nf4_plain", nan("linear.weight.absmax"));
    assert!(plain.contains("linear.weight.absmax: value 1 is infinite"), "{plain}");
    let plain = refused("nf4_plain", number("linear.weight.absmax", 2, -1e-3));
    assert!(plain.contains("linear.weight.absmax: value 2 is negative"), "{plain}");
    let odd = refused("nf4_odd", put("linear.weight", DType::U8, &[129, 1]));
    assert!(odd.contains("has shape [129, 1], expected 259 4-bit values"), "{odd}");
    let odd = refused("nf4_storage_f32", state("[8, 64]", "[8, 63]"));
    assert!(odd.contains("[64, 1], expected 504 4-bit values stored as F32"), "{odd}");
    let odd = refused("nf4_storage_f32", state("[8, 64]", "[1, 510]"));
    assert!(odd.contains("expected 510 4-bit values stored as F32"), "{odd}");
}

#[test]
fn maps_of_the_other_type() {
    for (name, other, word) in [
        ("nf4_plain", "fp4_plain", "is not the codebook of nf4, the type in the quantization"),
        ("fp4_plain", "nf4_plain", "is not the codebook of fp4, the type in the quantization"),
    ] {
        let text = refused(name, |named| {
            let map = "linear.weight.quant_map";
            *tensor(named, map) = tensor(&mut tensors(other), map).clone();
        });
        assert!(text.starts_with(&format!("tensor linear.weight.quant_map: {word}")), "{text}");
    }
}

#[test]
fn int8_that_is_broken() {
    let cases: Vec<(Change, &str)> = vec![
        (drop("linear.SCB"), "tensor linear.SCB: is missing"),
        (drop("linear.weight"), "tensor linear.weight: is missing"),
        (number("linear.SCB", 5, -1.0), "linear.SCB: value 5 is negative"),
        (put("linear.SCB", DType::F32, &[23]), "linear.SCB: has shape [23], expected [24]"),
        (put("linear.SCB", DType::F16, &[24]), "linear.SCB: is F16, expected F32"),
        (nan("linear.SCB"), "linear.SCB: value 1 is infinite"),
        (put("linear.weight", DType::U8, &[24, 40]), "is U8, expected I8"),
        (put("linear.weight", DType::I8, &[960]), "has shape [960], expected 2 axes"),
        (put("linear.weight_format", DType::U8, &[2]), "weight_format: has shape [2]"),
        (Box::new(|t| tensor(t, "linear.weight_format").bytes.to_mut()[0] = 3), "weight format 3"),
    ];
    for (change, word) in cases {
        let text = refused("int8", change);
        assert!(
            text.starts_with("tensor linear.") && text.contains(word),
            "{text:?}, not {word:?}"
        );
    }
    let both = refused("int8", |tensors| {
        drop("linear.SCB")(tensors);
        drop("linear.weight_format")(tensors);
    });
    assert!(both.contains("linear.weight: is I8, expected F16 or BF16 or F32"), "{both}");
}

#[test]
fn int8_of_old_has_no_format() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("x.safetensors");
    let mut tensors = tensors("int8");
    drop("linear.weight_format")(&mut tensors);
    save(&path, &tensors).expect("written");
    let file = Checkpoint::open(&path).expect("whole");
    assert!(matches!(file.weight("linear.weight"), Ok(Weight::Int8(_))));
    assert!(matches!(
        file.weight("none"),
        Err(Error::Tensor { reason: Reason::Missing, tensor }) if tensor == "none"
    ));
}

/// Writes a file with a header and `data` zero bytes, and returns the error from opening it.
fn header(path: &Path, header: &str, data: usize) -> String {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(vec![0; data]);
    fs::write(path, bytes).expect("written");
    let error = Checkpoint::open(path).expect_err("broken");
    assert!(matches!(error, Error::Header { .. }), "{error}");
    error.to_string()
}

#[test]
fn headers_that_lie() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("x.safetensors");
    for bytes in
        [&b""[..], b"1234567", b"\xff\xff\xff\xff\xff\xff\xff\xff{}", b"\x03\0\0\0\0\0\0\0{}"]
    {
        fs::write(&path, bytes).expect("written");
        assert!(matches!(Checkpoint::open(&path), Err(Error::Header { .. })));
    }
    let long = fs::File::create(&path).expect("made");
    long.set_len(8 + 100_000_001).expect("sparse");
    std::os::unix::fs::FileExt::write_all_at(&long, &100_000_001u64.to_le_bytes(), 0)
        .expect("written");
    let error = Checkpoint::open(&path).expect_err("too long").to_string();
    assert!(
        error.contains("its header has 100000001 bytes, expected at most 100000000"),
        "{error}"
    );
    let tensor = |shape: &str, start: usize, end: usize| {
        format!(r#"{{"dtype":"U8","shape":[{shape}],"data_offsets":[{start},{end}]}}"#)
    };
    let one = |shape: &str, start, end| format!(r#"{{"a":{}}}"#, tensor(shape, start, end));
    assert!(header(&path, &one("4", 0, 4), 3).contains("expected 4 bytes of tensors, got 3"));
    for (text, data) in [
        (one("4", 0, 4), 5),
        (one("4", 0, 3), 3),
        (one("4", 1, 5), 5),
        (one("4", 4, 0), 4),
        (one("-4", 0, 4), 4),
        (one("18446744073709551615, 16", 0, 4), 4),
        ("{".into(), 0),
        ("\u{1}".into(), 0),
        (format!(r#"{{"a":{0},"a":{0}}}"#, tensor("4", 0, 4)), 8),
        (one("4", 0, 4).replace("U8", "U9"), 4),
    ] {
        header(&path, &text, data);
    }
    // The sum of the tensors' lengths overflows.
    let eighth = 1usize << 60;
    let many: Vec<_> = (0..15)
        .map(|i| format!("\"{i}\":{}", tensor(&eighth.to_string(), i * eighth, (i + 1) * eighth)))
        .chain([format!(
            "\"z\":{}",
            tensor(&(eighth - 1).to_string(), 15 * eighth, 15 * eighth + (eighth - 1))
        )])
        .collect();
    header(&path, &format!("{{{}}}", many.join(",")), 7);
}

/// Reads all weights and linear layers, and returns the first error.
fn read_all(path: &Path) -> Result<(), Error> {
    let file = Checkpoint::open(path)?;
    let names: Vec<String> = file.names().map(String::from).collect();
    let mut first = Ok(());
    for name in names {
        let weight = file.weight(&name);
        // A weight that is read without an error can be written.
        if let Ok(weight) = &weight {
            weight.tensors(&name)?;
        }
        let layer =
            name.strip_suffix(".weight").map(|layer| file.linear(layer).map(std::mem::drop));
        first = first.and(weight.map(std::mem::drop)).and(layer.unwrap_or(Ok(())));
    }
    first
}

#[test]
fn files_that_end_anywhere() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("x.safetensors");
    for name in ["nf4_odd", "nf4_zeros", "int8"] {
        let bytes = fs::read(fixture(name)).expect("there");
        for len in (0..bytes.len()).step_by(7) {
            fs::write(&path, &bytes[..len]).expect("written");
            assert!(matches!(read_all(&path), Err(Error::Header { .. })), "{name} {len}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    #[test]
    fn bytes_that_flip_give_an_error_or_a_weight(
        name in prop::sample::select(FIXTURES.to_vec()),
        places in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        header: bool,
    ) {
        let mut bytes = fs::read(fixture(name)).expect("there");
        let len = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize + 8;
        let within = if header { len } else { bytes.len() };
        for (place, byte) in places {
            bytes[place.index(within)] = byte;
        }
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("x.safetensors");
        fs::write(&path, bytes).expect("written");
        // A weight that can be read is consistent, so it can be written.
        if let Ok(file) = Checkpoint::open(&path)
            && let Ok(weight) = file.weight(weight_of(name)[0])
        {
            prop_assert!(weight.tensors(weight_of(name)[0]).is_ok());
        }
        let _ = read_all(&path);
    }

    #[test]
    fn states_that_flip_give_an_error_or_a_weight(
        name in prop::sample::select(vec!["nf4_nested", "nf4_odd", "nf4_storage_bf16", "nf4_plain"]),
        places in prop::collection::vec((any::<prop::sample::Index>(), 32..127u8), 1..3),
        cut in any::<prop::sample::Index>(),
        cuts in 0..4u8,
    ) {
        let mut tensors = tensors(name);
        let state = tensor(&mut tensors, STATE);
        let mut text = state.bytes.to_vec();
        for (place, byte) in places {
            let place = place.index(text.len());
            text[place] = byte;
        }
        if cuts == 0 {
            text.truncate(cut.index(text.len()));
        }
        *state = Tensor::new(DType::U8, &[text.len()], text);
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("x.safetensors");
        save(&path, &tensors).expect("written");
        let file = Checkpoint::open(&path).expect("whole");
        if let Ok(weight) = file.weight("linear.weight") {
            prop_assert!(weight.tensors("linear.weight").is_ok());
        }
    }
}

#[test]
fn floats_alone_are_widened() {
    let of = |dtype, bytes: &[u8]| Tensor::new(dtype, &[2], bytes.to_vec()).widened();
    let want = [1.5f32, -0.25];
    let bytes = |one: [u8; 2], two: [u8; 2]| [one, two].concat();
    let half = bytes([0x00, 0x3e], [0x00, 0xb4]);
    let brain = bytes([0xc0, 0x3f], [0x80, 0xbe]);
    let whole: Vec<u8> = want.iter().flat_map(|value| value.to_le_bytes()).collect();
    for (dtype, bytes) in [(DType::F16, &half), (DType::Bf16, &brain), (DType::F32, &whole)] {
        assert_eq!(of(dtype, bytes).expect("floats")[..], want);
        assert!(matches!(of(dtype, &bytes[1..]), Err(Reason::Bytes { .. })), "{dtype:?}");
    }
    assert!(matches!(of(DType::I16, &half), Err(Reason::DType { have: DType::I16, .. })));
}
