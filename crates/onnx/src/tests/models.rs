//! Tests of loaded models: what they refuse, what they keep, what they bound.

use std::fs;

use burn::tensor::{DType, Device, TensorData};
use prost::Message;

use super::{model, node, open, refused, run, value};
use crate::passes::Passes;
use crate::proto::{
    AttributeProto, GraphProto, ModelProto, OperatorSetIdProto, TensorProto, ValueInfoProto,
};
use crate::{Model, OnnxError, Options};

fn number(name: &str, data_type: i32) -> TensorProto {
    TensorProto { dims: vec![1], data_type, name: name.to_owned(), ..TensorProto::default() }
}

fn ints(name: &str, int64_data: Vec<i64>) -> TensorProto {
    TensorProto { int64_data, ..number(name, 7) }
}

fn floats(name: &str, float_data: Vec<f32>) -> TensorProto {
    TensorProto { float_data, ..number(name, 1) }
}

fn with(mut model: ModelProto, constants: Vec<TensorProto>) -> ModelProto {
    model.graph.as_mut().unwrap().initializer = constants;
    model
}

#[test]
fn names_are_unique_and_domains_are_known() {
    let sum = || model(vec![node("Add", &["x", "c"], &["y"])], &["x"], &["y"]);
    let twice = with(sum(), vec![floats("c", vec![1.0]), floats("c", vec![2.0])]);
    assert!(refused(&twice).contains("`c`"), "{}", refused(&twice));
    assert_eq!(run(&with(sum(), vec![floats("c", vec![1.0])])), [2.0, -1.0]);
    let mut other = with(sum(), vec![floats("c", vec![1.0])]);
    other.graph.as_mut().unwrap().node[0].domain = "com.example".to_owned();
    let domain = "com.example".to_owned();
    other.opset_import.push(OperatorSetIdProto { domain, version: 1 });
    let why = refused(&other);
    assert!(why.contains("com.example::Add (1): the operator is not supported"), "{why}");
}

#[test]
fn inputs_have_their_number_dtype_and_shape() {
    let folder = tempfile::tempdir().unwrap();
    let relu = model(vec![node("Relu", &["x"], &["y"])], &["x"], &["y"]);
    let model = open(&relu, folder.path(), &[]).unwrap();
    let why = |inputs: Vec<TensorData>| model.run(inputs).unwrap_err().to_string();
    let wrong = [
        TensorData::new(vec![1i64, 2], [1, 2]),
        TensorData::new(vec![1f32, 2.0], [2]),
        TensorData::new(vec![1f32, 2.0, 3.0], [1, 3]),
    ];
    for data in wrong {
        let shown = format!("{data:?}");
        let why = why(vec![data]);
        assert!(why.contains("input `x`: ") && why.contains("expected"), "{shown}: {why}");
    }
    assert!(why(Vec::new()).contains("1 inputs"));
    assert_eq!(model.run(vec![TensorData::new(vec![-1f32, 2.0], [1, 2])]).unwrap().len(), 1);
}

/// A loop without end, and one whose loops end late.
fn loops() -> [ModelProto; 2] {
    let flag = |name: &str| TensorProto { int32_data: vec![1], ..number(name, 9) };
    let out = |names: &[&str]| {
        let each = |name: &&str| ValueInfoProto { name: (*name).to_owned(), r#type: None };
        names.iter().map(each).collect::<Vec<_>>()
    };
    let body = |inner: GraphProto| AttributeProto {
        name: "body".to_owned(),
        g: Some(inner),
        r#type: 5,
        ..AttributeProto::default()
    };
    let endless = GraphProto {
        node: vec![node("Identity", &["on"], &["goes on"]), node("Identity", &["v"], &["w"])],
        input: out(&["i", "on", "v"]),
        output: out(&["goes on", "w"]),
        ..GraphProto::default()
    };
    let mut one = node("Loop", &["", "on", "x"], &["y"]);
    one.attribute = vec![body(endless)];
    let single = with(model(vec![one], &["x"], &["y"]), vec![flag("on")]);
    // 1000 iterations of 2000.
    let few = GraphProto {
        node: vec![
            node("Identity", &["on 2"], &["goes on 2"]),
            node("Identity", &["v 2"], &["w 2"]),
        ],
        input: out(&["i 2", "on 2", "v 2"]),
        output: out(&["goes on 2", "w 2"]),
        ..GraphProto::default()
    };
    let mut inner = node("Loop", &["2000", "on", "v"], &["w"]);
    inner.attribute = vec![body(few)];
    let many = GraphProto {
        node: vec![node("Identity", &["on"], &["goes on"]), inner],
        input: out(&["i", "on", "v"]),
        output: out(&["goes on", "w"]),
        ..GraphProto::default()
    };
    let mut two = node("Loop", &["1000", "true", "x"], &["y"]);
    two.attribute = vec![body(many)];
    let constants = vec![flag("true"), ints("1000", vec![1000]), ints("2000", vec![2000])];
    let nested = with(model(vec![two], &["x"], &["y"]), constants);
    [single, nested]
}

#[test]
fn a_loop_without_end_is_an_error() {
    for model in loops() {
        let folder = tempfile::tempdir().unwrap();
        let model = open(&model, folder.path(), &[]).unwrap();
        let x = TensorData::new(vec![1f32, -2.0], [1, 2]);
        let why = model.run(vec![x]).unwrap_err().to_string();
        assert!(why.contains("did not end within 1000000 iterations"), "{why}");
    }
}

/// x · 1e-3 · 1e3 in f16 has an error that the two nodes do not have in f32.
#[test]
fn named_nodes_keep_f32() {
    let nodes = vec![node("Mul", &["x", "a"], &["small"]), node("Mul", &["small", "b"], &["y"])];
    let whole = with(
        model(nodes, &["x"], &["y"]),
        vec![floats("a", vec![1.1e-4]), floats("b", vec![9.0e3])],
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    fs::write(&path, whole.encode_to_vec()).unwrap();
    let error = |names: &[&str]| {
        let keep_f32 = names.iter().map(|own| (*own).to_owned()).collect();
        let options = Options { dtype: Some(DType::F16), keep_f32, ..Options::default() };
        let options = Options { passes: Passes::none(), ..options };
        let model = Model::open(&path, options, &Device::flex())?;
        let made = model.run(vec![TensorData::new(vec![1f32, -2.0], [1, 2])])?;
        let want = [0.99, -1.98];
        let off = made[0].iter::<f32>().zip(want).map(|(have, want)| (have - want).abs());
        Ok::<_, OnnxError>(off.fold(0.0, f32::max))
    };
    let (all, kept) = (error(&[]).unwrap(), error(&["small", "Mul of small b"]).unwrap());
    assert!(kept < 1e-6 && all > 1e-4, "kept in f32 {kept}, in f16 {all}");
    let why = error(&["none"]).unwrap_err().to_string();
    assert!(why.contains("`none`"), "{why}");
}

#[test]
fn a_model_keeps_programs_of_a_bounded_number_of_shapes() {
    let mut own = model(vec![node("Softmax", &["x"], &["y"])], &["x"], &["y"]);
    own.graph.as_mut().unwrap().output = vec![value("y", &["n", "2"])];
    let folder = tempfile::tempdir().unwrap();
    let model = open(&own, folder.path(), &[]).unwrap();
    for round in 0..2 {
        for rows in 1..=40 {
            let x: Vec<f32> = (0..2 * rows).map(|at| (at * (round + 3) % 7) as f32).collect();
            let made = model.run(vec![TensorData::new(x.clone(), [rows, 2])]).unwrap();
            for (have, x) in made[0].iter::<f32>().zip(x.chunks(2).flat_map(|x| {
                let sum = x[0].exp() + x[1].exp();
                [x[0].exp() / sum, x[1].exp() / sum]
            })) {
                assert!((have - x).abs() < 1e-6, "{rows} rows: {have}, expected {x}");
            }
        }
    }
    assert_eq!(model.shapes_kept(), 16);
}

/// Graphs of several kinds: a matmul, an image, and a loop, whose graph is read but not run.
fn graphs() -> [(ModelProto, bool); 3] {
    let attribute = |name: &str, values: &[i64]| AttributeProto {
        name: name.to_owned(),
        ints: values.to_vec(),
        r#type: 7,
        ..AttributeProto::default()
    };
    let matrix = |name: &str, dims: &[i64]| TensorProto {
        dims: dims.to_vec(),
        data_type: 1,
        name: name.to_owned(),
        float_data: (0..dims.iter().product()).map(|at: i64| at as f32 - 2.0).collect(),
        ..TensorProto::default()
    };
    let dense = model(
        vec![node("MatMul", &["x", "w"], &["a"]), node("Softmax", &["a"], &["y"])],
        &["x"],
        &["y"],
    );
    let mut conv = node("Conv", &["image", "w"], &["a"]);
    conv.attribute = vec![attribute("pads", &[1, 1, 1, 1]), attribute("strides", &[1, 1])];
    let mut pool = node("MaxPool", &["a"], &["b"]);
    pool.attribute = vec![attribute("kernel_shape", &[2, 2])];
    let mut turned = node("Transpose", &["b"], &["c"]);
    turned.attribute = vec![attribute("perm", &[0, 2, 3, 1])];
    let last = node("Resize", &["c", "", "scales"], &["y"]);
    let nodes = vec![node("Reshape", &["x", "shape"], &["image"]), conv, pool, turned, last];
    let scales = TensorProto { dims: vec![4], ..floats("scales", vec![1.0, 2.0, 1.0, 1.5]) };
    let shape = TensorProto { dims: vec![4], ..ints("shape", vec![1, 1, 1, 2]) };
    let mut image = model(nodes, &["x"], &["y"]);
    image.graph.as_mut().unwrap().output = vec![value("y", &["a", "b", "c", "d"])];
    let image = with(image, vec![matrix("w", &[1, 1, 2, 2]), scales, shape]);
    let [endless, _] = loops();
    [(with(dense, vec![matrix("w", &[2, 2])]), true), (image, true), (endless, false)]
}

/// Damaged files are refused or run; they never panic, and take no memory that the file does not have.
#[test]
fn damaged_files_are_no_panic() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.onnx");
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % below
    };
    let before = peak_bytes();
    for (graph, runs) in graphs() {
        let whole = graph.encode_to_vec();
        let (mut valid, options) = (0, Options::default());
        for _ in 0..4000 {
            let mut bytes = whole.clone();
            for _ in 0..=random(3) {
                let at = random(bytes.len());
                bytes[at] = random(256) as u8;
            }
            bytes.truncate(bytes.len() - if random(4) == 0 { random(bytes.len()) } else { 0 });
            fs::write(&path, &bytes).expect("written");
            if let Ok(model) = Model::open(&path, options.clone(), &Device::flex()) {
                valid += 1;
                let x = TensorData::new(vec![1f32, -2.0], [1, 2]);
                let _result = runs.then(|| model.run(vec![x; model.inputs().len()]));
            }
        }
        assert!(valid > 0, "some damage changes nothing");
    }
    let grown = peak_bytes().zip(before).map(|(after, before)| after - before);
    assert!(grown < Some(1 << 30), "the process grew by {grown:?} bytes");
}

/// Returns the largest memory that this process ever had; none where the system does not tell.
fn peak_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}
