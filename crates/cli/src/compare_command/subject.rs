//! Subject of a comparison: a backend in a precision.

use std::fmt;

use flashover::Backend;
use report::CompareArgs;

/// A backend with the format of its weights and of its KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Subject {
    pub(super) backend: Backend,
    /// Weight format to quantise to at load, or `none`.
    pub(super) quant: &'static str,
    /// Format of the KV cache, or `float` for the compute dtype.
    pub(super) kv: &'static str,
}

impl Subject {
    /// Lists every precision of a backend, with weight formats in the outer loop.
    pub(super) fn for_backend(backend: Backend, args: &CompareArgs) -> impl Iterator<Item = Self> {
        let caches = &args.kv_cache.0;
        let of = move |quant| caches.iter().map(move |&kv| Self { backend, quant, kv });
        args.quant.0.iter().copied().flat_map(of)
    }
}

/// Formats the backend, then the quantised formats: `cpu`, `cpu int8`, `cpu nf4, kv int8`.
impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { backend, quant, kv } = *self;
        write!(f, "{backend}")?;
        if quant != "none" {
            write!(f, " {quant}")?;
        }
        if kv != "float" {
            let comma = if quant == "none" { "" } else { "," };
            write!(f, "{comma} kv {kv}")?;
        }
        Ok(())
    }
}
