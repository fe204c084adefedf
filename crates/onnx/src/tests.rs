//! Tests of models that are built here.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::{DType, Device, TensorData};
use prost::Message;

use crate::devices::Devices;
use crate::frames::Frames;
use crate::passes::Passes;
use crate::proto::{
    AttributeProto, Dimension, FunctionProto, GraphProto, Length, ModelProto, NodeProto,
    OperatorSetIdProto, StringStringEntryProto, TensorProto, TensorShapeProto, TensorTypeProto,
    TypeProto, TypeValue, ValueInfoProto,
};
use crate::{Model, OnnxError, Options};

mod models;

fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    let list = |names: &[&str]| names.iter().map(|own| (*own).to_owned()).collect();
    NodeProto {
        op_type: op.to_owned(),
        input: list(inputs),
        output: list(outputs),
        name: format!("{op} of {}", inputs.join(" ")),
        ..NodeProto::default()
    }
}

fn value(name: &str, shape: &[&str]) -> ValueInfoProto {
    let dim = shape
        .iter()
        .map(|own| Dimension {
            value: Some(own.parse().map_or(Length::Name((*own).to_owned()), Length::Number)),
        })
        .collect();
    let shape = Some(TensorShapeProto { dim });
    let tensor = TypeValue::Tensor(TensorTypeProto { elem_type: 1, shape });
    ValueInfoProto { name: name.to_owned(), r#type: Some(TypeProto { value: Some(tensor) }) }
}

fn model(nodes: Vec<NodeProto>, inputs: &[&str], outputs: &[&str]) -> ModelProto {
    let values = |names: &[&str]| names.iter().map(|own| value(own, &["n", "2"])).collect();
    let graph = GraphProto {
        node: nodes,
        input: values(inputs),
        output: values(outputs),
        ..GraphProto::default()
    };
    let opset = |domain: &str, version| OperatorSetIdProto { domain: domain.to_owned(), version };
    ModelProto {
        ir_version: 10,
        graph: Some(graph),
        opset_import: vec![opset("", 21), opset("own", 1)],
        ..ModelProto::default()
    }
}

fn open(model: &ModelProto, folder: &Path, dimensions: &[(&str, u64)]) -> Result<Model, OnnxError> {
    let path = folder.join("model.onnx");
    fs::write(&path, model.encode_to_vec()).expect("written");
    let dimensions = dimensions.iter().map(|(name, len)| ((*name).to_owned(), *len)).collect();
    Model::open(path, Options { dimensions, ..Options::default() }, &Device::flex())
}

fn refused(model: &ModelProto) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    open(model, folder.path(), &[]).err().expect("refused").to_string()
}

/// Runs a model on `[[1, -2]]`, and returns the first result.
fn run(model: &ModelProto) -> Vec<f32> {
    let folder = tempfile::tempdir().expect("a folder");
    let model = open(model, folder.path(), &[]).expect("it is valid");
    let x = TensorData::new(vec![1f32, -2.0], [1, 2]);
    let made = model.run(vec![x; model.inputs().len()]).expect("it runs");
    made[0].iter::<f32>().collect()
}

#[test]
fn nodes_run_in_the_order_of_their_values() {
    let sum = node("Add", &["a", "x"], &["y"]);
    let made = run(&model(vec![sum, node("Relu", &["x"], &["a"])], &["x"], &["y"]));
    assert_eq!(made, [2.0, -2.0]);
}

#[test]
fn functions_take_attributes_and_values_of_their_call() {
    let mut leaky = node("LeakyRelu", &["in"], &["out"]);
    let refers = AttributeProto {
        name: "alpha".to_owned(),
        ref_attr_name: "slope".to_owned(),
        r#type: 1,
        ..AttributeProto::default()
    };
    leaky.attribute = vec![refers.clone()];
    let list = |names: &[&str]| names.iter().map(|own| (*own).to_owned()).collect::<Vec<_>>();
    let function =
        |name: &str, node: Vec<NodeProto>, attributes: Vec<AttributeProto>| FunctionProto {
            name: name.to_owned(),
            domain: "own".to_owned(),
            input: list(&["in"]),
            output: list(&["out"]),
            node,
            attribute_proto: attributes,
            ..FunctionProto::default()
        };
    let slope = |f: f32| AttributeProto {
        name: "slope".to_owned(),
        f,
        r#type: 1,
        ..AttributeProto::default()
    };
    let call = |name: &str, from: &str, to: &str, attributes: Vec<AttributeProto>| NodeProto {
        domain: "own".to_owned(),
        attribute: attributes,
        ..node(name, &[from], &[to])
    };
    let twice = vec![
        call("Leak", "in", "half", vec![slope(0.5)]),
        node("Add", &["half", "half"], &["out"]),
    ];
    let calls = vec![call("Twice", "x", "a", Vec::new()), call("Leak", "a", "y", Vec::new())];
    let mut whole = model(calls, &["x"], &["y"]);
    whole.functions = vec![
        function("Leak", vec![leaky], vec![slope(0.25)]),
        function("Twice", twice, Vec::new()),
    ];
    // 1 and -2 become 1 and -1 (slope 0.5), 2 and -2 (sum), then 2 and -0.5 (default slope).
    assert_eq!(run(&whole), [2.0, -0.5]);
    let endless = vec![call("Twice", "in", "out", Vec::new())];
    whole.functions[1] = function("Twice", endless, Vec::new());
    assert!(refused(&whole).contains("the function `Twice` calls itself"));
}

#[test]
fn a_graph_reads_values_around_it() {
    let part = |op: &str| GraphProto {
        node: vec![node(op, &["x", "x"], &["out"])],
        output: vec![ValueInfoProto { name: "out".to_owned(), r#type: None }],
        ..GraphProto::default()
    };
    let graph = |name: &str, op: &str| AttributeProto {
        name: name.to_owned(),
        g: Some(part(op)),
        r#type: 5,
        ..AttributeProto::default()
    };
    let mut branch = node("If", &["flag"], &["y"]);
    branch.attribute = vec![graph("then_branch", "Add"), graph("else_branch", "Mul")];
    let mut flag = node("Constant", &[], &["flag"]);
    for (truth, made) in [(1, [2.0, -4.0]), (0, [1.0, 4.0])] {
        let tensor =
            TensorProto { data_type: 9, raw_data: vec![truth].into(), ..TensorProto::default() };
        flag.attribute = vec![AttributeProto {
            name: "value".to_owned(),
            t: Some(tensor),
            r#type: 4,
            ..AttributeProto::default()
        }];
        assert_eq!(run(&model(vec![branch.clone(), flag.clone()], &["x"], &["y"])), made);
    }
}

#[test]
fn invalid_models_are_refused() {
    let relu = |from: &str, to: &str| node("Relu", &[from], &[to]);
    let why = |nodes: Vec<NodeProto>| refused(&model(nodes, &["x"], &["y"]));
    assert!(why(vec![relu("a", "y"), relu("y", "a")]).contains("`y` depends on itself"));
    assert!(
        why(vec![relu("x", "y"), relu("x", "y")])
            .contains("expected unique value names, got `y` twice")
    );
    assert!(
        why(vec![relu("z", "y")]).contains("Relu `Relu of z` reads `z`, which no node computes")
    );
    assert!(why(Vec::new()).contains("no node computes output `y`"));
    let unknown = why(vec![
        node("Foo", &["x"], &["a"]),
        node("Foo", &["a"], &["b"]),
        node("Bar", &["b"], &["y"]),
    ]);
    assert!(unknown.contains("Foo (2): the operator is not supported"), "{unknown}");
    assert!(unknown.contains("Bar (1): the operator is not supported"), "{unknown}");
    let mut newer = model(vec![relu("x", "y")], &["x"], &["y"]);
    newer.opset_import[0].version = 99;
    assert!(refused(&newer).contains("expected opset 1 to 27 of domain `ai.onnx`, got 99"));
    newer.opset_import.clear();
    assert!(refused(&newer).contains("imports no opset"));
}

#[test]
fn names_of_dimensions_become_numbers() {
    let folder = tempfile::tempdir().expect("a folder");
    let relu = model(vec![node("Relu", &["x"], &["y"])], &["x"], &["y"]);
    open(&relu, folder.path(), &[("n", 3)]).expect("it is a name");
    let wrong = open(&relu, folder.path(), &[("m", 3)]).err().expect("no name").to_string();
    assert_eq!(wrong, "no input has a dimension named `m`\nhint: the named dimensions are n");
}

#[test]
fn data_of_tensors_may_be_in_files_beside_the_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).expect("created");
    let bytes: Vec<u8> = [7f32, 3.0, 4.0].iter().flat_map(|own| own.to_le_bytes()).collect();
    fs::write(inner.join("data"), &bytes).expect("written");
    fs::write(folder.path().join("data"), &bytes).expect("written");
    let read = |entries: &[(&str, &str)]| {
        let entry = |(key, value): &(&str, &str)| StringStringEntryProto {
            key: (*key).to_owned(),
            value: (*value).to_owned(),
        };
        let tensor = TensorProto {
            dims: vec![1, 2],
            data_type: 1,
            name: "w".to_owned(),
            data_location: 1,
            external_data: entries.iter().map(entry).collect(),
            ..TensorProto::default()
        };
        let mut sum = model(vec![node("Add", &["x", "w"], &["y"])], &["x"], &["y"]);
        sum.graph.as_mut().expect("made above").initializer.push(tensor);
        let model = open(&sum, &inner, &[]).map_err(|why| why.to_string())?;
        let made = model.run(vec![TensorData::new(vec![1f32, 1.0], [1, 2])]).expect("it runs");
        Ok::<Vec<f32>, String>(made[0].iter::<f32>().collect())
    };
    let whole = ("location", "data");
    assert_eq!(read(&[whole, ("offset", "4"), ("length", "8")]), Ok(vec![4.0, 5.0]));
    let why = |entries: &[(&str, &str)]| read(entries).expect_err("refused");
    assert!(
        why(&[whole, ("offset", "8"), ("length", "8")]).contains("ends before the tensor's data")
    );
    assert!(
        why(&[whole, ("offset", "4"), ("length", "4")]).contains("expected 8 bytes of data, got 4")
    );
    assert!(why(&[("location", "../data")]).contains("outside the model's folder"));
    assert!(why(&[("location", "missing")]).contains("cannot read missing"));
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("../data", inner.join("link")).expect("linked");
        assert!(why(&[("location", "link")]).contains("outside the model's folder"));
    }
}

#[test]
fn a_length_of_minus_one_is_any_length() {
    let mut own = model(vec![node("Relu", &["x"], &["y"])], &["x"], &["y"]);
    let graph = own.graph.as_mut().unwrap();
    (graph.input, graph.output) = (vec![value("x", &["-1", "2"])], vec![value("y", &["-1", "2"])]);
    assert_eq!(run(&own), [1.0, 0.0]);
    own.graph.as_mut().unwrap().input = vec![value("x", &["-2", "2"])];
    assert_eq!(
        refused(&own),
        "the model is invalid: expected dimensions of 0 or more for `x`, got -2"
    );
}

#[test]
fn what_a_root_is_computed_from_keeps_f32() {
    let nodes = vec![node("Mul", &["x", "x"], &["square"]), node("Sqrt", &["square"], &["y"])];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    fs::write(&path, model(nodes, &["x"], &["y"]).encode_to_vec()).unwrap();
    let options = Options { dtype: Some(DType::F16), ..Options::default() };
    let model = Model::open(path, options, &Device::flex()).unwrap();
    // The square is 9e-8, which underflows in f16.
    let made = model.run(vec![TensorData::new(vec![3e-4f32, -2.0], [1, 2])]).unwrap();
    for (have, want) in made[0].iter::<f32>().zip([3e-4, 2.0]) {
        assert!((have - want).abs() <= 1e-3 * want, "{have}, expected {want}");
    }
}

#[test]
fn the_softmax_of_a_long_row_is_exact() {
    let mut own = model(vec![node("Softmax", &["x"], &["y"])], &["x"], &["y"]);
    let graph = own.graph.as_mut().unwrap();
    (graph.input, graph.output) =
        (vec![value("x", &["1", "20000"])], vec![value("y", &["1", "20000"])]);
    let mut x = vec![-9f32; 20000];
    x[0] = 0.0;
    let folder = tempfile::tempdir().unwrap();
    let model = open(&own, folder.path(), &[]).unwrap();
    let made = model.run(vec![TensorData::new(x, [1, 20000])]).unwrap();
    let (have, want) =
        (made[0].iter::<f64>().next().unwrap(), 1.0 / (1.0 + 19999.0 * (-9f64).exp()));
    assert!((have - want).abs() <= 1e-5 * want, "{have}, expected {want}");
}

#[test]
fn results_beyond_the_memory_are_errors_of_their_nodes() {
    let large = |name: &str, values: Vec<i64>| TensorProto {
        dims: vec![values.len() as i64],
        data_type: 7,
        int64_data: values,
        name: name.to_owned(),
        ..TensorProto::default()
    };
    for (op, values) in [
        ("Tile", vec![1 << 30, 1 << 20]),
        ("Expand", vec![1 << 50, 2]),
        ("Pad", vec![0, 1 << 50, 0, 0]),
    ] {
        let mut own = model(vec![node(op, &["x", "s"], &["y"])], &["x"], &["y"]);
        let graph = own.graph.as_mut().unwrap();
        graph.initializer = vec![large("s", values)];
        graph.output = vec![value("y", &["rows", "columns"])];
        let folder = tempfile::tempdir().unwrap();
        let model = open(&own, folder.path(), &[]).unwrap();
        let why = model.run(vec![TensorData::new(vec![1f32, -2.0], [1, 2])]).unwrap_err();
        assert!(why.to_string().contains("exceeds the memory limit"), "{op}: {why}");
    }
}

/// A node whose result's shape depends on data is launched in each run; the nodes before and after it are captured.
#[test]
fn the_pieces_around_a_data_dependent_node_are_captured() {
    let chain = |from: &str, to: &str| {
        let [a, b, c, d] = ["a", "b", "c", "d"].map(|own| format!("{to} {own}"));
        vec![
            node("Sigmoid", &[from], &[&a]),
            node("Add", &[&a, from], &[&b]),
            node("Softmax", &[&b], &[&c]),
            node("Mul", &[&c, &a], &[&d]),
            node("Neg", &[&d], &[to]),
        ]
    };
    let with = |name: &str, i: i64, mut own: NodeProto| {
        let (name, r#type) = (name.to_owned(), 2);
        own.attribute.push(AttributeProto { name, r#type, i, ..AttributeProto::default() });
        own
    };
    let mut nodes = chain("x", "all");
    nodes.push(with("keepdims", 0, node("ReduceMax", &["x", "one"], &["most"])));
    nodes.push(node("Greater", &["most", "zero"], &["which"]));
    nodes.push(with("axis", 0, node("Compress", &["all", "which"], &["few"])));
    nodes.extend(chain("few", "y"));
    let mut own = model(nodes, &["x"], &["y"]);
    let graph = own.graph.as_mut().unwrap();
    (graph.input, graph.output) = (vec![value("x", &["3", "2"])], vec![value("y", &["rows", "2"])]);
    let number = |name: &str, data_type| TensorProto {
        dims: vec![1],
        data_type,
        name: name.to_owned(),
        ..TensorProto::default()
    };
    graph.initializer = vec![
        TensorProto { int64_data: vec![1], ..number("one", 7) },
        TensorProto { float_data: vec![0.0], ..number("zero", 1) },
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    fs::write(&path, own.encode_to_vec()).unwrap();
    let host = Model::open(&path, Options::default(), &Device::flex()).unwrap();
    let options = Options { passes: Passes::none(), ..Options::default() };
    let device = Device::cpu();
    let model = Model::open(&path, options.clone(), &device).unwrap();
    let devices = Arc::new(Devices::new(device.inner().as_dispatch().clone(), options.ctx));
    let program = Arc::new(model.program(&[vec![3, 2]]).unwrap());
    let mut frames: Option<Frames> = None;
    let mut captured = Vec::new();
    // Two rows with a positive number, then one, then two again.
    for (run, positive) in [2, 2, 2, 2, 2, 1, 2, 1].into_iter().enumerate() {
        let number = |at: usize| {
            (at as f32 + 0.3 * run as f32) * if at / 2 < positive { 1.0 } else { -1.0 } + 0.1
        };
        let x = TensorData::new((0..6).map(number).collect(), [3, 2]);
        let frames = frames
            .get_or_insert_with(|| Frames::new(program.clone(), devices.clone(), vec![x.clone()]));
        if run > 0 {
            frames.update(0, x.clone()).unwrap();
        }
        frames.capture_anywhere();
        let made = frames.run().unwrap().remove(0).to_data().unwrap();
        let want = host.run(vec![x]).unwrap().remove(0);
        assert_eq!(made.shape().to_vec(), [positive, 2]);
        for (have, want) in made.iter::<f32>().zip(want.iter::<f32>()) {
            assert!((have - want).abs() <= 1e-5, "run {run}: {have}, expected {want}");
        }
        captured.push(frames.pieces().iter().filter(|own| own.is_graph()).count());
    }
    assert_eq!(captured[2..], [0, 2, 2, 2, 2, 2]);
}
