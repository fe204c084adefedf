/// Errors in a caller's input; the reference itself cannot fail.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A slice is shorter than its shape and strides need, or has the wrong length.
    #[error("{what} has {have} values, but the problem needs {need}")]
    Length { what: &'static str, need: usize, have: usize },
    /// An operand has strides for another number of batch axes than the problem has.
    #[error("{what} has strides for {have} batch axes, but the problem has {need}")]
    BatchRank { what: &'static str, need: usize, have: usize },
    /// `kv_heads` does not divide the number of query heads.
    #[error("{heads} query heads are not a multiple of {kv_heads} key heads")]
    Heads { heads: usize, kv_heads: usize },
    /// An index is out of range.
    #[error("{what} {index} is out of range, expected an index below {len}")]
    OutOfRange { what: &'static str, index: usize, len: usize },
    /// A number of bytes that is not a whole number of values.
    #[error("{bytes} bytes are not a whole number of {dtype} values")]
    Bytes { dtype: &'static str, bytes: usize },
    /// An infinity or NaN that is not allowed.
    #[error("{what} {index} is infinite or NaN")]
    NotFinite { what: &'static str, index: usize },
    /// A block size that is not a power of two from 32 to 4096.
    #[error("expected a block size that is a power of two from 32 to 4096, got {0}")]
    BlockSize(usize),
}
