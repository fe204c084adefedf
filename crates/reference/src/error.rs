/// What a caller got wrong; the reference itself cannot fail.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A slice is shorter than its shape and strides reach, or not of the length asked for.
    #[error("{what} holds {have} values, the problem needs {need}")]
    Length { what: &'static str, need: usize, have: usize },
    /// An operand has strides for another number of batch axes than the problem has.
    #[error("{what} has strides for {have} batch axes, the problem has {need}")]
    BatchRank { what: &'static str, need: usize, have: usize },
    /// Query heads that do not share key heads evenly.
    #[error("{heads} heads do not divide among {kv_heads} key heads")]
    Heads { heads: usize, kv_heads: usize },
    /// A position lies outside of what it points into.
    #[error("{what} {index} is outside of the {len} there are")]
    OutOfRange { what: &'static str, index: usize, len: usize },
    /// Bytes that do not divide into values.
    #[error("{bytes} bytes are not a whole number of {dtype} values")]
    Bytes { dtype: &'static str, bytes: usize },
    /// Infinity or NaN where there is no place for it.
    #[error("{what} {index} is infinite or not a number")]
    NotFinite { what: &'static str, index: usize },
    /// Blocks hold 32, 64 .. 4096 values.
    #[error("blocks of {0} values: a power of two in 32..=4096 was expected")]
    BlockSize(usize),
}
