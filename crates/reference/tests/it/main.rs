//! The reference against independent statements of the same thing.

mod attention;
mod inputs;
mod matmul;
mod nf4;
