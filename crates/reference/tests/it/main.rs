//! The reference against independent statements of the same thing.

mod inputs;
mod matmul;
