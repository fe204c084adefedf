//! Tests of each pass on small graphs: it rewrites the pattern, and the results stay the same with
//! Burn's operations and with our kernels.

use burn::tensor::{Device, TensorData};
use prost::Message;

use super::Passes;
use crate::proto::{
    AttributeProto, Dimension, GraphProto, Length, ModelProto, NodeProto, OperatorSetIdProto,
    TensorProto, TensorShapeProto, TensorTypeProto, TypeProto, TypeValue, ValueInfoProto,
};
use crate::{Model, Options, Plan};

/// A graph under construction. Its input is `x`.
struct Build {
    graph: GraphProto,
    shape: Vec<usize>,
}

impl Build {
    fn new(shape: &[usize]) -> Self {
        Self {
            graph: GraphProto { input: vec![value("x", shape)], ..GraphProto::default() },
            shape: shape.to_vec(),
        }
    }

    /// Adds a node, and returns the name of its output.
    fn node(&mut self, op: &str, inputs: &[&str], attributes: &[(&str, &[i64])]) -> String {
        let output = format!("{op}{}", self.graph.node.len());
        let attribute = |(name, values): &(&str, &[i64])| {
            let name = (*name).to_owned();
            match **values {
                [i] if name != "axes" => {
                    AttributeProto { name, r#type: 2, i, ..AttributeProto::default() }
                }
                _ => AttributeProto {
                    name,
                    r#type: 7,
                    ints: values.to_vec(),
                    ..AttributeProto::default()
                },
            }
        };
        self.graph.node.push(NodeProto {
            op_type: op.to_owned(),
            input: inputs.iter().map(|own| (*own).to_owned()).collect(),
            output: vec![output.clone()],
            attribute: attributes.iter().map(attribute).collect(),
            ..NodeProto::default()
        });
        output
    }

    /// Adds a constant, and returns its name.
    fn numbers(&mut self, shape: &[usize], values: Vec<f32>) -> String {
        let name = format!("c{}", self.graph.initializer.len());
        self.graph.initializer.push(TensorProto {
            dims: shape.iter().map(|own| *own as i64).collect(),
            data_type: 1,
            float_data: values,
            name: name.clone(),
            ..TensorProto::default()
        });
        name
    }

    fn number(&mut self, value: f32) -> String {
        self.numbers(&[], vec![value])
    }

    /// Adds a constant of pseudo-random numbers from 0.2 to 1.2.
    fn weights(&mut self, shape: &[usize]) -> String {
        let salt = self.graph.initializer.len() + 1;
        self.numbers(shape, noise(shape.iter().product(), salt))
    }

    /// Adds a constant of bytes with a dtype.
    fn bytes(&mut self, data_type: i32, shape: &[usize], values: &[u8]) -> String {
        let name = format!("c{}", self.graph.initializer.len());
        self.graph.initializer.push(TensorProto {
            dims: shape.iter().map(|own| *own as i64).collect(),
            data_type,
            raw_data: values.to_vec().into(),
            name: name.clone(),
            ..TensorProto::default()
        });
        name
    }

    fn ints(&mut self, values: &[i64]) -> String {
        let name = format!("c{}", self.graph.initializer.len());
        self.graph.initializer.push(TensorProto {
            dims: vec![values.len() as i64],
            data_type: 7,
            int64_data: values.to_vec(),
            name: name.clone(),
            ..TensorProto::default()
        });
        name
    }

    /// Checks that passes rewrite the graph and keep the results; returns the memory plan.
    fn check(mut self, output: &str, passes: &[&str]) -> Plan {
        self.graph.output.push(ValueInfoProto { name: output.to_owned(), r#type: None });
        let opset_import = vec![OperatorSetIdProto { domain: String::new(), version: 17 }];
        let model = ModelProto {
            ir_version: 8,
            graph: Some(self.graph),
            opset_import,
            ..ModelProto::default()
        };
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.onnx");
        std::fs::write(&path, model.encode_to_vec()).expect("written");
        let x = TensorData::new(noise(self.shape.iter().product(), 0), self.shape.clone());
        let run = |passes: Passes, device: &Device| {
            let options = Options { passes, ..Options::default() };
            let model = Model::open(&path, options, device).expect("it is valid");
            let (counts, plan) = model.plan(&[self.shape.clone()]).expect("it has a plan");
            let made = model.run(vec![x.clone()]).expect("it runs");
            (counts, plan, made[0].iter::<f32>().collect::<Vec<_>>())
        };
        let (_, mut plan, want) = run(Passes::none(), &Device::flex());
        for device in [Device::flex(), Device::cpu()] {
            let (counts, have);
            (counts, plan, have) = run(Passes::all(), &device);
            for name in passes {
                let count = counts.iter().find(|own| own.0 == *name).map(|own| own.1);
                assert!(count > Some(0), "{name} finds nothing: {counts:?}");
            }
            assert_eq!(have.len(), want.len());
            for (at, (have, want)) in have.iter().zip(&want).enumerate() {
                let near = (have - want).abs() <= 1e-5 + 1e-4 * want.abs();
                assert!(near, "{passes:?} on {device:?}: element {at} is {have}, expected {want}");
            }
        }
        plan
    }
}

fn noise(len: usize, salt: usize) -> Vec<f32> {
    let own = |at: usize| ((at * 7919 + salt * 104_729 + 13) % 1009) as f32 / 1009.0 + 0.2;
    (0..len).map(own).collect()
}

fn value(name: &str, shape: &[usize]) -> ValueInfoProto {
    let length = |own: &usize| Dimension { value: Some(Length::Number(*own as i64)) };
    let shape = Some(TensorShapeProto { dim: shape.iter().map(length).collect() });
    let tensor = TypeValue::Tensor(TensorTypeProto { elem_type: 1, shape });
    ValueInfoProto { name: name.to_owned(), r#type: Some(TypeProto { value: Some(tensor) }) }
}

#[test]
fn a_block_of_a_resnet_is_one_convolution() {
    let mut own = Build::new(&[2, 4, 6, 6]);
    let w = own.weights(&[4, 4, 3, 3]);
    let y = own.node("Conv", &["x", &w], &[("pads", &[1, 1, 1, 1])]);
    let [scale, bias, mean, variance] = [(); 4].map(|()| own.weights(&[4]));
    let y = own.node("BatchNormalization", &[&y, &scale, &bias, &mean, &variance], &[]);
    let y = own.node("Add", &[&y, "x"], &[]);
    let y = own.node("Relu", &[&y], &[]);
    own.check(&y, &["batch-norm", "epilogue"]);
}

#[test]
fn a_batch_norm_without_a_convolution_is_a_chain() {
    let mut own = Build::new(&[2, 4, 3, 3]);
    let [scale, bias, mean, variance] = [(); 4].map(|()| own.weights(&[4]));
    let y = own.node("BatchNormalization", &["x", &scale, &bias, &mean, &variance], &[]);
    let y = own.node("Tanh", &[&y], &[]);
    own.check(&y, &["batch-norm", "chain"]);
}

#[test]
fn gelu_of_a_product_is_its_epilogue() {
    let mut own = Build::new(&[2, 5, 8]);
    let (w, b) = (own.weights(&[8, 16]), own.weights(&[16]));
    let y = own.node("MatMul", &["x", &w], &[]);
    let y = own.node("Add", &[&b, &y], &[]);
    let (root, one, half) =
        (own.number(std::f32::consts::SQRT_2), own.number(1.0), own.number(0.5));
    let e = own.node("Div", &[&y, &root], &[]);
    let e = own.node("Erf", &[&e], &[]);
    let e = own.node("Add", &[&e, &one], &[]);
    let y = own.node("Mul", &[&y, &e], &[]);
    let y = own.node("Mul", &[&y, &half], &[]);
    own.check(&y, &["gelu", "epilogue"]);
}

#[test]
fn hard_swish_and_what_changes_nothing_are_found() {
    let mut own = Build::new(&[3, 8]);
    let (three, zero, six) = (own.number(3.0), own.number(0.0), own.number(6.0));
    let y = own.node("Identity", &["x"], &[]);
    let g = own.node("Add", &[&y, &three], &[]);
    let g = own.node("Clip", &[&g, &zero, &six], &[]);
    let y = own.node("Mul", &[&y, &g], &[]);
    let y = own.node("Div", &[&y, &six], &[]);
    let y = own.node("Exp", &[&y], &[]);
    own.check(&y, &["neutral", "hard-swish", "chain"]);
}

#[test]
fn norms_are_found_in_their_parts() {
    for centred in [true, false] {
        let mut own = Build::new(&[2, 3, 16]);
        let (two, eps) = (own.number(2.0), own.number(1e-5));
        let (w, b) = (own.weights(&[16]), own.weights(&[16]));
        let mut far = "x".to_owned();
        if centred {
            let mean = own.node("ReduceMean", &["x"], &[("axes", &[-1])]);
            far = own.node("Sub", &["x", &mean], &[]);
        }
        let square = own.node("Pow", &[&far, &two], &[]);
        let mean = own.node("ReduceMean", &[&square], &[("axes", &[-1])]);
        let sum = own.node("Add", &[&mean, &eps], &[]);
        let root = own.node("Sqrt", &[&sum], &[]);
        let y = own.node("Div", &[&far, &root], &[]);
        let y = own.node("Mul", &[&y, &w], &[]);
        let y = own.node("Add", &[&y, &b], &[]);
        own.check(&y, &["norm"]);
    }
}

#[test]
fn a_group_norm_with_silu_is_found_in_its_parts() {
    let mut own = Build::new(&[2, 8, 4, 4]);
    let (ones, zeros) = (own.numbers(&[2], vec![1.0; 2]), own.numbers(&[2], vec![0.0; 2]));
    let (groups, back) = (own.ints(&[0, 2, -1]), own.ints(&[2, 8, 4, 4]));
    let (w, b) = (own.weights(&[8, 1, 1]), own.weights(&[8, 1, 1]));
    let y = own.node("Reshape", &["x", &groups], &[]);
    let y = own.node("InstanceNormalization", &[&y, &ones, &zeros], &[]);
    let y = own.node("Reshape", &[&y, &back], &[]);
    let y = own.node("Mul", &[&y, &w], &[]);
    let y = own.node("Add", &[&y, &b], &[]);
    let gate = own.node("Sigmoid", &[&y], &[]);
    let y = own.node("Mul", &[&y, &gate], &[]);
    own.check(&y, &["group-norm", "silu", "epilogue"]);
}

#[test]
fn attention_is_found_in_its_parts() {
    let mut own = Build::new(&[2, 5, 16]);
    let heads = own.ints(&[2, 5, 2, 8]);
    let back = own.ints(&[2, 5, 16]);
    let scale = own.number(0.35);
    let mut part = |perm: &[i64]| {
        let (w, b) = (own.weights(&[16, 16]), own.weights(&[16]));
        let y = own.node("MatMul", &["x", &w], &[]);
        let y = own.node("Add", &[&y, &b], &[]);
        let y = own.node("Reshape", &[&y, &heads], &[]);
        own.node("Transpose", &[&y], &[("perm", perm)])
    };
    let [q, k, v] = [part(&[0, 2, 1, 3]), part(&[0, 2, 3, 1]), part(&[0, 2, 1, 3])];
    let scores = own.node("MatMul", &[&q, &k], &[]);
    let scores = own.node("Mul", &[&scores, &scale], &[]);
    let mask = own.weights(&[1, 1, 5, 5]);
    let scores = own.node("Add", &[&scores, &mask], &[]);
    let shares = own.node("Softmax", &[&scores], &[("axis", &[3])]);
    let y = own.node("MatMul", &[&shares, &v], &[]);
    let y = own.node("Transpose", &[&y], &[("perm", &[0, 2, 1, 3])]);
    let y = own.node("Reshape", &[&y, &back], &[]);
    let (w, b) = (own.weights(&[16, 16]), own.weights(&[16]));
    let y = own.node("MatMul", &[&y, &w], &[]);
    let y = own.node("Add", &[&y, &b], &[]);
    let flat = own.ints(&[10, 16]);
    let y = own.node("Reshape", &[&y, &flat], &[]);
    let x = own.node("Reshape", &["x", &flat], &[]);
    let y = own.node("Add", &[&y, &x], &[]);
    own.check(&y, &["attention", "qkv", "reshape", "epilogue"]);
}

#[test]
fn convolutions_read_images_that_are_padded_doubled_or_joined() {
    let mut own = Build::new(&[1, 4, 5, 5]);
    let pads = own.ints(&[0, 0, 1, 2, 0, 0, 1, 2]);
    let w = own.weights(&[6, 4, 3, 3]);
    let y = own.node("Pad", &["x", &pads], &[]);
    let y = own.node("Conv", &[&y, &w], &[]);
    let y = own.node("Relu", &[&y], &[]);
    own.check(&y, &["pad", "epilogue"]);

    let mut own = Build::new(&[1, 4, 5, 5]);
    let (none, scales) =
        (own.numbers(&[0], Vec::new()), own.numbers(&[4], vec![1.0, 1.0, 2.0, 2.0]));
    let (w, b) = (own.weights(&[8, 8, 3, 3]), own.weights(&[8]));
    let first = own.weights(&[8, 4, 1, 1]);
    let a = own.node("Conv", &["x", &first], &[]);
    let y = own.node("Resize", &[&a, &none, &scales], &[]);
    let y = own.node("Conv", &[&y, &w, &b], &[("pads", &[1, 1, 1, 1])]);
    let y = own.node("Sigmoid", &[&y], &[]);
    own.check(&y, &["image"]);

    let mut own = Build::new(&[1, 4, 5, 5]);
    let (w, first) = (own.weights(&[8, 12, 3, 3]), own.weights(&[8, 4, 1, 1]));
    let a = own.node("Conv", &["x", &first], &[]);
    let y = own.node("Concat", &["x", &a], &[("axis", &[1])]);
    let y = own.node("Conv", &[&y, &w], &[("pads", &[1, 1, 1, 1])]);
    own.check(&y, &["image"]);
}

#[test]
fn a_product_of_reshaped_rows_and_its_residual_are_one_kernel() {
    // Attention of torch, whose rows are [positions, batch].
    let mut own = Build::new(&[2, 5, 12]);
    let transposed = own.node("Transpose", &["x"], &[("perm", &[1, 0, 2])]);
    let (heads, rows, whole) =
        (own.ints(&[5, 2, 3, 4]), own.ints(&[10, 12]), own.ints(&[5, 2, 12]));
    let split = own.node("Reshape", &[&transposed, &heads], &[]);
    let joined = own.node("Reshape", &[&split, &rows], &[]);
    let (weight, bias) = (own.weights(&[12, 12]), own.weights(&[12]));
    let product = own.node("Gemm", &[&joined, &weight, &bias], &[("transB", &[1])]);
    let apart = own.node("Reshape", &[&product, &whole], &[]);
    let back = own.node("Transpose", &[&apart], &[("perm", &[1, 0, 2])]);
    let sum = own.node("Add", &["x", &back], &[]);
    own.check(&sum, &["reshape", "epilogue"]);
}

#[test]
fn means_of_pixels_and_norms_of_rank_3_run_on_the_kernels() {
    let mut own = Build::new(&[2, 4, 6, 6]);
    let filters = own.weights(&[8, 4, 3, 3]);
    let image = own.node("Conv", &["x", &filters], &[]);
    let mean = own.node("GlobalAveragePool", &[&image], &[]);
    let shape = own.ints(&[2, 4, 36]);
    let line = own.node("Reshape", &["x", &shape], &[]);
    let (weight, bias) = (own.numbers(&[2], vec![1.0; 2]), own.numbers(&[2], vec![0.0; 2]));
    let (parts, back) = (own.ints(&[0, 2, -1]), own.ints(&[2, 4, 36]));
    let parts = own.node("Reshape", &[&line, &parts], &[]);
    let normed = own.node("InstanceNormalization", &[&parts, &weight, &bias], &[]);
    let normed = own.node("Reshape", &[&normed, &back], &[]);
    let (scale, shift) = (own.weights(&[4, 1]), own.weights(&[4, 1]));
    let scaled = own.node("Mul", &[&normed, &scale], &[]);
    let normed = own.node("Add", &[&scaled, &shift], &[]);
    let shape = own.ints(&[2, 4, 2]);
    let mean = own.node("Reshape", &[&mean, &shape], &[]);
    let mean = own.node("ReduceMean", &[&mean], &[("axes", &[2])]);
    let out = own.node("Mul", &[&normed, &mean], &[]);
    own.check(&out, &["group-norm"]);
}

#[test]
fn switches_name_passes() {
    let on = Passes::parse("-chain,-qkv").expect("they exist");
    assert!(on.has("epilogue") && !on.has("chain") && !on.has("qkv"));
    let on = Passes::parse("gelu").expect("it exists");
    assert!(on.has("gelu") && !on.has("epilogue"));
    assert_eq!(Passes::parse("off").expect("a switch"), Passes::none());
    let why = Passes::parse("fast").expect_err("no pass").to_string();
    assert!(why.contains("no pass is named `fast`"), "{why}");
}

#[test]
fn a_row_that_its_mask_hides_gives_zeros() {
    let mut own = Build::new(&[1, 2, 4, 8]);
    let hidden: Vec<f32> = (0..16).map(|at| if at < 4 { f32::NEG_INFINITY } else { 0.0 }).collect();
    let mask = own.numbers(&[1, 1, 4, 4], hidden);
    let zero = own.number(0.0);
    let k = own.node("Transpose", &["x"], &[("perm", &[0, 1, 3, 2])]);
    let scores = own.node("MatMul", &["x", &k], &[]);
    let scores = own.node("Add", &[&scores, &mask], &[]);
    let shares = own.node("Softmax", &[&scores], &[("axis", &[3])]);
    let none = own.node("IsNaN", &[&shares], &[]);
    let shares = own.node("Where", &[&none, &zero, &shares], &[]);
    let y = own.node("MatMul", &[&shares, "x"], &[]);
    own.check(&y, &["attention"]);
}

#[test]
fn images_of_three_channels_are_read_in_whole_lines_or_as_patches() {
    for (size, stride, pads) in [(3, 2, 1), (2, 2, 0)] {
        let mut own = Build::new(&[2, 3, 6, 8]);
        let (w, b) = (own.weights(&[5, 3, size, size]), own.weights(&[5]));
        let attributes: [(&str, &[i64]); 2] =
            [("strides", &[stride, stride]), ("pads", &[pads, pads, pads, pads])];
        let y = own.node("Conv", &["x", &w, &b], &attributes);
        let y = own.node("Relu", &[&y], &[]);
        own.check(&y, &["epilogue"]);
    }
}

#[test]
fn quantised_values_and_products_of_int8_are_found() {
    let mut own = Build::new(&[2, 600]);
    let codes: Vec<u8> = (0..600 * 600).map(|at| (at * 31 % 251) as u8).collect();
    let (signed, unsigned) = (own.bytes(3, &[600, 600], &codes), own.bytes(2, &[600, 600], &codes));
    let (step, middle) = (own.number(0.01), own.bytes(2, &[], &[128]));
    let scales = own.weights(&[600]);
    let q = own.node("QuantizeLinear", &["x", &step, &middle], &[]);
    let x = own.node("DequantizeLinear", &[&q, &step, &middle], &[]);
    let w = own.node("DequantizeLinear", &[&signed, &scales], &[("axis", &[1])]);
    let y = own.node("MatMul", &[&x, &w], &[]);
    // A matmul of integers, with zero points on both sides.
    let a = own.node("QuantizeLinear", &["x", &step, &middle], &[]);
    let z = own.node("MatMulInteger", &[&a, &unsigned, &middle, &middle], &[]);
    let z = own.node("Cast", &[&z], &[("to", &[1])]);
    let y = own.node("Add", &[&y, &z], &[]);
    own.check(&y, &["int8"]);
}

#[test]
fn a_chain_overwrites_what_dies_with_it() {
    let mut own = Build::new(&[4, 8]);
    let w = own.weights(&[8, 8]);
    let a = own.node("MatMul", &["x", &w], &[]);
    let b = own.node("MatMul", &[&a, &w], &[]);
    // The chain is the last to read b; a lives on.
    let c = own.node("Sub", &[&b, &a], &[]);
    let c = own.node("Tanh", &[&c], &[]);
    let transposed = own.node("Transpose", &[&a], &[("perm", &[1, 0])]);
    let d = own.node("MatMul", &[&c, &transposed], &[]);
    let plan = own.check(&d, &["chain"]);
    // Two results [4, 8] live at once, and then d [4, 4].
    assert_eq!((plan.placed, plan.alive), (4, 2 * 128 + 64));
}
