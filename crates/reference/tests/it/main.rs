//! Tests of the reference against independent definitions.

mod attention;
mod decoder;
mod inputs;
mod matmul;
mod nf4;
