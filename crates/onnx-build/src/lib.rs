//! Writes the Rust code of an ONNX graph.
