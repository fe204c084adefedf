//! In progress: it is to write the Rust code of an ONNX graph, which calls the kernels of Flashover. It has nothing yet.
