//! The reference against independent statements of the same thing.

mod attention;
mod decoder;
mod inputs;
mod matmul;
mod nf4;
