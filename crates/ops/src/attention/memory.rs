use burn::tensor::FloatDType;

use crate::OpMemory;
use crate::memory::bytes_of;

/// Returns the bytes of an [`attention`](crate::attention()) of `rows` queries and keys. All heads of a query
/// have width `q`, those of a key `kv`. The backward pass reads q, k, v, the result and the log-sum-exp.
pub fn attention_memory(
    rows: u128,
    heads: u128,
    [q, kv]: [u128; 2],
    dtype: FloatDType,
) -> OpMemory {
    let result = bytes_of(rows * q, dtype);
    let saved = 2 * result + 2 * bytes_of(rows * kv, dtype) + 4 * rows * heads;
    OpMemory { result, saved, ..OpMemory::default() }
}
