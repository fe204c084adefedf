/// Errors in a caller's input; the reference itself cannot fail.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A slice is shorter than its shape and strides need, or has the wrong length.
    #[error("{what} holds {have} values, the problem needs {need}")]
    Length { what: &'static str, need: usize, have: usize },
    /// An operand has strides for another number of batch axes than the problem has.
    #[error("{what} has strides for {have} batch axes, the problem has {need}")]
    BatchRank { what: &'static str, need: usize, have: usize },
    /// `kv_heads` does not divide the number of query heads.
    #[error("{heads} heads do not divide among {kv_heads} key heads")]
    Heads { heads: usize, kv_heads: usize },
    /// An index is out of range.
    #[error("{what} {index} is outside of the {len} there are")]
    OutOfRange { what: &'static str, index: usize, len: usize },
    /// A number of bytes that is not a whole number of values.
    #[error("{bytes} bytes are not a whole number of {dtype} values")]
    Bytes { dtype: &'static str, bytes: usize },
    /// An infinity or NaN that is not allowed.
    #[error("{what} {index} is infinite or not a number")]
    NotFinite { what: &'static str, index: usize },
    /// A block size that is not a power of two from 32 to 4096.
    #[error("blocks of {0} values: a power of two in 32..=4096 was expected")]
    BlockSize(usize),
}
