//! Tests `flashover quantize` against bitsandbytes and against the reference.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use checkpoint::{Absmax, Checkpoint, DType, FourBit, Plan, Tensor, Weight, Writer};
use flashover::WeightFormat;
use flashover::quantize::{
    QuantizeError, QuantizeOptions, QuantizeProgress, QuantizedModel, quantize_model,
    quantize_model_until,
};
use half::bf16;
use models::Weights;
use reference::{int8, nf4};
use serde_json::Value;

use crate::{TWO_WORDS, cpu, demo, fixture, flashover};

/// NF4 model folders that bitsandbytes made, with the dense weights that it quantised.
const FIXTURES: [&str; 3] = ["llama_nf4", "phi3_nf4", "gpt2_nf4"];

type Tensors = BTreeMap<String, Tensor<'static>>;

fn tensors(path: &Path) -> Tensors {
    let file = Checkpoint::open(path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
    let tensor = |name: &str| {
        let Tensor { dtype, shape, bytes } = file.tensor(name).expect("listed");
        (name.to_owned(), Tensor::new(dtype, &shape, bytes.into_owned()))
    };
    file.names().map(tensor).collect()
}

fn config(folder: &Path) -> Value {
    let text = fs::read_to_string(folder.join("config.json")).expect("there");
    serde_json::from_str(&text).expect("JSON")
}

fn save(path: &Path, tensors: &Tensors) {
    let plan = tensors.iter().map(|(name, t)| Plan::new(name, t.dtype, &t.shape));
    let mut writer = Writer::create(path, plan).expect("can be written");
    for (name, tensor) in tensors {
        writer.write(name, tensor).expect("planned");
    }
    writer.finish().expect("whole");
}

/// Creates a model folder with the dense weights of a fixture, after `change`.
fn dense(name: &str, folder: &Path, change: impl FnOnce(&mut Tensors)) {
    fs::create_dir(folder).expect("made");
    let mut config = config(&fixture(name));
    config.as_object_mut().expect("an object").remove("quantization_config");
    fs::write(folder.join("config.json"), format!("{config:#}\n")).expect("written");
    fs::write(folder.join("tokenizer_config.json"), "{}").expect("written");
    let mut tensors = tensors(&fixture(name).join("dense.safetensors"));
    change(&mut tensors);
    save(&folder.join("model.safetensors"), &tensors);
}

fn f32s(tensor: &Tensor<'_>) -> Vec<f32> {
    let halves = tensor.bytes.as_chunks::<2>().0.iter();
    halves.map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
}

fn widen(tensors: &mut Tensors) {
    for tensor in tensors.values_mut() {
        let bytes: Vec<u8> = f32s(tensor).iter().flat_map(|v| v.to_le_bytes()).collect();
        *tensor = Tensor::new(DType::F32, &tensor.shape, bytes);
    }
}

/// Temporary folder for a model and its quantised output.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("temporary folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("UTF-8").to_owned()
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).expect("listed");
        let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("read").file_name();
        let mut names: Vec<_> = entries.map(|e| name(e).into_string().expect("UTF-8")).collect();
        names.sort();
        names
    }

    fn quantize(&self, options: &QuantizeOptions) -> Result<QuantizedModel, QuantizeError> {
        quantize_model(&cpu(), &self.path("model"), &self.path("out"), options)
    }
}

/// The files equal those of transformers and bitsandbytes byte by byte, except for a few nested codes.
///
/// On the CPU, bitsandbytes looks up these codes in a table with 65536 entries. Near a midpoint the table gives the
/// neighbouring code. Near 0 an entry is wider than a step of the map, and it gives any code within the entry.
#[test]
fn files_are_those_of_bitsandbytes() {
    let (mut others, map) = (0, nf4::dynamic_map());
    for name in FIXTURES {
        let place = Place::new();
        dense(name, &place.path("model"), widen);
        let (model, output) = (place.text("model"), place.text("out"));
        let args = ["quantize", "--model", &model, "--output", &output, "--backend", "cpu"];
        let done = flashover(&args);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        assert_eq!(config(&place.path("out")), config(&fixture(name)), "{name}");
        let theirs = tensors(&fixture(name).join("model.safetensors"));
        let ours = tensors(&place.path("out"));
        assert!(ours.keys().eq(theirs.keys()), "{name}");
        for (tensor, theirs) in &theirs {
            let ours = &ours[tensor];
            assert_eq!((ours.dtype, &ours.shape), (theirs.dtype, &theirs.shape), "{tensor}");
            if tensor.ends_with(".absmax") {
                for (a, b) in ours.bytes.iter().zip(theirs.bytes.iter()) {
                    let apart = (map[usize::from(*a)] - map[usize::from(*b)]).abs();
                    let close = a.abs_diff(*b) <= 1 || apart <= 1.0 / 32768.0;
                    assert!(close, "{name}: {tensor}: {a} and {b}");
                    others += usize::from(a != b);
                }
            } else {
                assert!(ours.bytes == theirs.bytes, "{name}: {tensor}");
            }
        }
        let models = Weights::open(place.path("out"));
        assert!(models.is_ok(), "{name}: {models:?}");
    }
    assert!(others < 16, "{others} of some 3800 nested codes");
}

fn options(format: WeightFormat, block_size: u32, nested: bool) -> QuantizeOptions {
    let shard_bytes = 60_000;
    QuantizeOptions { format, block_size, nested, shard_bytes, measure: true }
}

/// Compares the codes with those of the reference and returns the dequantised values. `values` is `[out, in]`.
fn expected(values: &[f32], of: &QuantizeOptions, weight: &FourBit<'_>, name: &str) -> Vec<f32> {
    let four_bit = match of.format {
        WeightFormat::Nf4 => reference::FourBit::Nf4,
        WeightFormat::Fp4 => reference::FourBit::Fp4,
        other => panic!("{name}: {other} has no book"),
    };
    let block_size = of.block_size as usize;
    let want = four_bit.quantize(values, block_size).expect("finite");
    assert!(*weight.codes == want.codes, "{name}: codes");
    assert_eq!(*weight.quant_map, four_bit.codebook(), "{name}");
    let absmax = match &weight.absmax {
        Absmax::Plain(absmax) => {
            assert!(!of.nested && **absmax == want.absmax, "{name}: absmax");
            want.absmax
        }
        Absmax::Nested(nested) => {
            let offset = nf4::mean(&want.absmax);
            let blocks = nf4::nest(&want.absmax, offset).expect("finite");
            assert!(of.nested && nested.offset == offset, "{name}: offset");
            assert!(*nested.codes == blocks.codes, "{name}: nested codes");
            assert!(*nested.absmax == blocks.absmax, "{name}: nested absmax");
            let map = nf4::dynamic_map();
            assert_eq!(*nested.quant_map, map, "{name}");
            nf4::unnest(&map, &blocks.codes, &blocks.absmax, offset).expect("lengths agree")
        }
    };
    let map = four_bit.codebook();
    nf4::dequantize(&map, &want.codes, &absmax, block_size, values.len()).expect("lengths agree")
}

#[test]
fn codes_and_reported_errors_are_those_of_the_reference() {
    for (name, options) in [
        ("llama_nf4", options(WeightFormat::Nf4, 64, true)),
        ("phi3_nf4", options(WeightFormat::Nf4, 64, true)),
        ("gpt2_nf4", options(WeightFormat::Nf4, 4096, true)),
        ("phi3_nf4", options(WeightFormat::Fp4, 32, true)),
        ("gpt2_nf4", options(WeightFormat::Fp4, 64, false)),
        ("llama_nf4", options(WeightFormat::Nf4, 128, false)),
    ] {
        let place = Place::new();
        dense(name, &place.path("model"), |_| {});
        let made = place.quantize(&options).unwrap_or_else(|why| panic!("{name}: {why}"));
        let before = tensors(&place.path("model"));
        let out = Checkpoint::open(place.path("out")).expect("an index");
        assert!(out.files().count() > 1, "{name}: more than {} bytes", options.shard_bytes);
        let after = Weights::open(place.path("out")).expect("strict");
        assert_eq!(made.weights.len(), after.layer_matrices().len());
        let (mut squared_error, mut squared_norm) = (0.0, 0.0);
        for (weight, matrix) in made.weights.iter().zip(after.layer_matrices()) {
            assert_eq!(weight.name, matrix.0);
            let stored = &before[&weight.name];
            let mut values = f32s(stored);
            if matrix.1.transposed {
                let [k, n] = [stored.shape[0], stored.shape[1]];
                values = (0..n * k).map(|i| values[i % k * n + i / k]).collect();
            }
            let Ok(Weight::FourBit(codes)) = out.weight(&weight.name) else {
                panic!("{}: no codes", weight.name);
            };
            assert_eq!(codes.layout.dtype, DType::Bf16);
            assert_eq!(codes.layout.shape, weight.shape);
            let decoded = expected(&values, &options, &codes, &weight.name);
            let pairs = values.iter().zip(&decoded).map(|(a, b)| (f64::from(*a), f64::from(*b)));
            let error: f64 = pairs.clone().map(|(a, b)| (a - b).powi(2)).sum();
            let norm: f64 = pairs.clone().map(|(a, _)| a * a).sum();
            let largest = pairs.map(|(a, b)| (a - b).abs()).max_by(f64::total_cmp);
            let largest = largest.expect("values");
            let errors = weight.figures.errors.expect("measured");
            assert!((errors.relative_error / (error / norm).sqrt() - 1.0).abs() < 1e-12);
            assert_eq!(errors.largest_error, largest);
            squared_error += error;
            squared_norm += norm;
        }
        let total = made.total.errors.expect("measured").relative_error;
        assert!((total / f64::sqrt(squared_error / squared_norm) - 1.0).abs() < 1e-12);
        let kept: Vec<_> =
            before.keys().filter(|n| !made.weights.iter().any(|w| w.name == **n)).collect();
        assert_eq!(made.kept, kept.len());
        for name in kept {
            assert!(out.tensor(name).expect("kept") == before[name], "{name}");
        }
    }
}

/// Values come from the reference; names and configuration come from bitsandbytes and transformers.
#[test]
fn weights_of_8_bits_are_those_of_the_reference() {
    for name in ["llama_nf4", "phi3_nf4", "gpt2_nf4"] {
        let place = Place::new();
        dense(name, &place.path("model"), |_| {});
        let made = place.quantize(&options(WeightFormat::Int8, 64, true)).expect("a model");
        assert_eq!((made.block_size, made.nested), (None, None));
        let theirs = config(&fixture("llama_int8"));
        assert_eq!(
            config(&place.path("out"))["quantization_config"],
            theirs["quantization_config"]
        );
        let before = tensors(&place.path("model"));
        let out = Checkpoint::open(place.path("out")).expect("whole");
        let after = Weights::open(place.path("out")).expect("strict");
        assert_eq!(made.weights.len(), after.layer_matrices().len());
        for (weight, matrix) in made.weights.iter().zip(after.layer_matrices()) {
            let stored = &before[&weight.name];
            let mut values = f32s(stored);
            if matrix.1.transposed {
                let [k, n] = [stored.shape[0], stored.shape[1]];
                values = (0..n * k).map(|i| values[i % k * n + i / k]).collect();
            }
            let Ok(Weight::Int8(have)) = out.weight(&weight.name) else {
                panic!("{}: no codes", weight.name);
            };
            let [n, k] = weight.shape;
            assert_eq!(have.shape, [n, k]);
            let codes: Vec<i8> = have.codes.iter().map(|code| code.cast_signed()).collect();
            assert_eq!(have.scb[..], int8::quantize(&values, n, k).expect("finite").scb);
            assert_eq!(int8::disagreement(&values, n, k, &codes, 2), Ok(None), "{}", weight.name);
            let decoded = int8::dequantize(&codes, &have.scb, k).expect("as many");
            let pairs = values.iter().zip(&decoded).map(|(a, b)| (f64::from(*a), f64::from(*b)));
            let error: f64 = pairs.clone().map(|(a, b)| (a - b).powi(2)).sum();
            let norm: f64 = pairs.map(|(a, _)| a * a).sum();
            let errors = weight.figures.errors.expect("measured");
            assert!((errors.relative_error / (error / norm).sqrt() - 1.0).abs() < 1e-12);
            assert!(errors.relative_error < 0.02, "{}: {errors:?}", weight.name);
        }
    }
    let place = Place::new();
    dense("llama_nf4", &place.path("model"), |_| {});
    let (model, output) = (place.text("model"), place.text("out"));
    let args = ["quantize", "--backend", "cpu", "--model", &model, "--output", &output];
    let blocks = flashover(&[&args[..], &["--quant", "int8", "--block-size", "64"]].concat());
    let said = String::from_utf8_lossy(&blocks.stderr).into_owned();
    assert!(blocks.status.code() == Some(2) && said.contains("8 bits have no blocks"), "{said}");
    let done = flashover(&[&args[..], &["--quant", "int8"]].concat());
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success() && said.contains("in int8, one absmax per row"), "{said}");
}

/// The reported bytes equal the bytes of the tensors in the files.
#[test]
fn the_report_says_what_was_written() {
    let place = Place::new();
    dense("llama_nf4", &place.path("model"), |_| {});
    let quantize = |output: &str, report: &[&str]| {
        let (model, output) = (place.text("model"), place.text(output));
        let args =
            ["quantize", "--backend", "cpu", "--model", &model, "--output", &output, "--report"];
        let done = flashover(&[&args, report].concat());
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).expect("UTF-8")
    };
    quantize("out", &[&place.text("report.json")]);
    let report = fs::read_to_string(place.path("report.json")).expect("written");
    let report: Value = serde_json::from_str(&report).expect("JSON");
    let out = tensors(&place.path("out"));
    let bytes = |name: &str| {
        let own = out.iter().filter(|(n, _)| *n == name || n.starts_with(&format!("{name}.")));
        own.map(|(_, tensor)| tensor.bytes.len()).sum::<usize>()
    };
    let all: usize = out.values().map(|tensor| tensor.bytes.len()).sum();
    assert_eq!(report["bytes"], all);
    let weights = report["weights"].as_array().expect("a list");
    assert_eq!(weights.len(), 14);
    for weight in weights {
        let name = weight["name"].as_str().expect("text");
        assert_eq!(weight["bytes"], bytes(name), "{name}");
        let bits = bytes(name) as f64 * 8.0 / weight["values"].as_f64().expect("a number");
        assert_eq!(weight["bits_per_weight"], bits, "{name}");
        let error = weight["relative_error"].as_f64().expect("a number");
        assert!((0.07..0.11).contains(&error), "{name}: {error}");
    }
    assert!(report["peaks"]["device_bytes"].as_u64() > Some(0));
    let table = quantize("plain", &["--plain-absmax"]);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 1 + 14 + 1 + 4, "{table}");
    assert!(lines[0].starts_with("weight ") && lines[15].starts_with("total "), "{table}");
    let down = lines[1].split_whitespace().collect::<Vec<_>>();
    // 4 bits, 0.5 bits of absmax, 64 bytes of codebook, and the quantisation state.
    assert_eq!(down[..4], ["model.layers.0.mlp.down_proj.weight", "64", "x", "128"]);
    assert!(down[4].parse::<f64>().is_ok_and(|bits| (4.6..4.7).contains(&bits)), "{table}");
    assert!(lines[17].contains("plain absmax") && lines[19].starts_with("peak memory: host "));
}

#[test]
fn other_files_come_along_and_weights_in_other_formats_do_not() {
    let place = Place::new();
    dense("llama_nf4", &place.path("model"), |_| {});
    let model = place.path("model");
    for folder in ["templates", ".cache", "original"] {
        fs::create_dir(model.join(folder)).expect("made");
    }
    for file in
        ["templates/tool.jinja", ".cache/x", "original/consolidated.00.pth", "pytorch_model.bin"]
    {
        fs::write(model.join(file), "x").expect("written");
    }
    fs::create_dir(place.path("out")).expect("an empty folder is none");
    place.quantize(&QuantizeOptions::default()).expect("a model");
    let out = place.path("out");
    assert!(
        out.join("templates/tool.jinja").is_file() && out.join("tokenizer_config.json").is_file()
    );
    for file in [".cache", "original", "pytorch_model.bin", "model.safetensors.index.json"] {
        assert!(!out.join(file).exists(), "{file}");
    }
    assert_eq!(place.names(), ["model", "out"]);
    use std::os::unix::fs::PermissionsExt;
    let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode();
    assert_eq!(mode(&out), mode(&model), "as any other folder");
}

/// Runs `flashover logits` on a folder and returns its log.
fn logged(folder: &Path, more: &[&str]) -> String {
    let model = folder.to_str().expect("UTF-8");
    let args = ["logits", "--backend", "cpu", "--tokens", "1,2,3", "--output", "/dev/null"];
    let done = flashover(&[&args[..], &["--model", model], more].concat());
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{said}");
    said
}

#[test]
fn what_stays_as_it_is_against_what_one_may_expect_is_said_once() {
    let place = Place::new();
    dense("llama_nf4", &place.path("model"), |_| {});
    let options = options(WeightFormat::Fp4, 64, true);
    place.quantize(&options).expect("a model");
    assert!(!logged(&place.path("out"), &[]).contains("FP4"));
    let said = logged(&place.path("out"), &["--quant", "nf4"]);
    assert_eq!(said.matches("in FP4").count(), 1, "{said}");
    assert!(!logged(&place.path("model"), &[]).contains("load_in"));
    // config.json of a 4-bit model, but dense tensors.
    fs::copy(fixture("llama_nf4").join("config.json"), place.path("model/config.json"))
        .expect("copied");
    let said = logged(&place.path("model"), &[]);
    assert_eq!(said.matches("`quantization_config.load_in_4bit` is true").count(), 1, "{said}");
    assert!(!logged(&place.path("model"), &["--quant", "nf4"]).contains("load_in"));
}

#[test]
fn one_that_is_stopped_leaves_nothing_whenever_that_is() {
    let place = Place::new();
    dense("llama_nf4", &place.path("model"), |_| {});
    let (asked, parts) = (Cell::new(0), Cell::new(0));
    let until = |max: usize, output: &str| {
        asked.set(0);
        let stop = |progress: QuantizeProgress| {
            assert_eq!((progress.done, progress.parts > progress.done), (asked.get(), true));
            parts.set(progress.parts);
            asked.set(asked.get() + 1);
            asked.get() > max
        };
        let (model, output) = (place.path("model"), place.path(output));
        let options = options(WeightFormat::Nf4, 64, true);
        quantize_model_until(&cpu(), &model, &output, &options, &stop)
    };
    until(usize::MAX, "whole").expect("it is not stopped");
    let all = asked.get();
    assert_eq!(all, parts.get());
    // Stop before the first tensor, between tensors, and just before the final rename.
    for max in [0, 1, all / 2, all - 1] {
        let stopped = until(max, "out").expect_err("stopped");
        assert!(matches!(stopped, QuantizeError::Stopped), "{stopped}");
        assert_eq!(asked.get(), max + 1, "it ends there");
        assert_eq!(place.names(), ["model", "whole"]);
    }
}

#[test]
fn signals_end_it_and_leave_nothing() {
    let model = demo();
    for (signal, code) in [("-INT", 130), ("-TERM", 143)] {
        let place = Place::new();
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashover"));
        command.args(["quantize", "--backend", "cpu", "--report", "--output", &place.text("out")]);
        command.arg("--model").arg(&model).stdout(Stdio::null()).stderr(Stdio::piped());
        let child = command.spawn().expect("the program starts");
        // A temporary folder exists during the work.
        let begun = (0..60_000).any(|_| {
            sleep(Duration::from_millis(1));
            !place.names().is_empty()
        });
        let pid = child.id().to_string();
        let sent = Command::new("kill").args([signal, &pid]).status().expect("kill is there");
        let done = child.wait_with_output().expect("ends");
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(begun && sent.success(), "{said}");
        assert_eq!(done.status.code(), Some(code), "{said}");
        assert!(said.starts_with("stopped before ") && said.lines().count() == 1, "{said}");
        assert!(place.names().is_empty(), "{:?}", place.names());
    }
}

#[test]
fn bad_models_are_refused_and_nothing_is_left() {
    let place = Place::new();
    let weight = "model.layers.1.mlp.up_proj.weight";
    let nan = |bits: u16| {
        move |tensors: &mut Tensors| {
            tensors.get_mut(weight).expect("there").bytes.to_mut()[70..72]
                .copy_from_slice(&bits.to_le_bytes());
        }
    };
    dense("llama_nf4", &place.path("model"), |_| {});
    dense("llama_nf4", &place.path("nan"), nan(0x7fc0));
    dense("llama_nf4", &place.path("inf"), nan(0xff80));
    dense("llama_nf4", &place.path("less"), |tensors| drop(tensors.remove(weight)));
    dense("llama_nf4", &place.path("family"), |_| {});
    fs::write(place.path("family/config.json"), r#"{"model_type": "rwkv"}"#).expect("written");
    dense("llama_nf4", &place.path("words"), |_| {});
    fs::write(place.path("words/tokenizer.json"), TWO_WORDS).expect("written");
    dense("llama_nf4", &place.path("codes"), |_| {});
    let codes = fixture("llama_nf4").join("model.safetensors");
    fs::copy(codes, place.path("codes/model.safetensors")).expect("copied");
    dense("llama_nf4", &place.path("cut"), |_| {});
    let whole = fs::read(place.path("cut/model.safetensors")).expect("there");
    fs::write(place.path("cut/model.safetensors"), &whole[..whole.len() - 8]).expect("written");
    std::os::unix::fs::symlink("nowhere", place.path("link")).expect("linked");
    fs::write(place.path("file"), "x").expect("written");
    let weights = place.text("model/model.safetensors");
    let whole = fs::read(&weights).expect("there");
    let before = place.names();
    let coded = fixture("gpt2_nf4").to_str().expect("UTF-8").to_owned();
    let quantize = |model: &str, output: &str, more: &[&str]| {
        let args = ["quantize", "--backend", "cpu", "--model", model, "--output", output];
        flashover(&[&args, more].concat())
    };
    let of = |model: &str| quantize(&place.text(model), &place.text("out"), &[]);
    let to = |output: &str| quantize(&place.text("model"), &place.text(output), &[]);
    let with = |more: &[&str]| quantize(&place.text("model"), &place.text("out"), more);
    for (done, words) in [
        (of("nan"), format!("tensor {weight} holds infinities or NaN")),
        (of("inf"), format!("tensor {weight} holds infinities or NaN")),
        (of("less"), format!("missing: {weight}")),
        (of("family"), "`model_type` is \"rwkv\"".into()),
        (of("words"), "but the model has a vocabulary of".into()),
        (of("codes"), "mlp.down_proj.weight is already quantised".into()),
        (of("cut"), "not a safetensors file".into()),
        (of("absent"), "cannot read".into()),
        (quantize(&coded, &place.text("out"), &[]), "already quantised".into()),
        (to("nan"), "is not empty".into()),
        (to("file"), "is a file".into()),
        (to("link"), "is a link to nothing".into()),
        (to("absent/out"), "has no folder".into()),
        (to("model/out"), "lies in the folder of the model".into()),
        (with(&["--block-size", "48"]), "from 32 to 4096, got 48".into()),
        (with(&["--quant", "nf3"]), "unknown quantisation `nf3`".into()),
        (with(&["--profile", "rtx4090"]), "--backend".into()),
        (
            with(&["--report", &place.text("absent/x.json")]),
            " does not exist\nhint: create it".into(),
        ),
        (with(&["--report", &weights]), "input and output are the same file: ".into()),
    ] {
        let text = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{words}: {text}");
        assert!(text.contains(&words), "{words}: {text}");
        let last = text.trim_end().lines().last().unwrap_or_default();
        assert!(last.starts_with("hint: "), "{text}");
        assert!(!text.contains("panicked"), "{text}");
    }
    assert_eq!(place.names(), before, "nothing half-written");
    assert!(fs::read(&weights).expect("there") == whole, "nothing written over");
}
