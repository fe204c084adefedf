//! What is compared: a backend in a precision.

use std::fmt;

use flashover::Backend;
use report::CompareArgs;

/// A backend, and how it stores weights, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Subject {
    pub(super) backend: Backend,
    /// `none`, or a format that weights are quantised to at load.
    pub(super) quant: &'static str,
    /// `float`, or a format of keys and values.
    pub(super) kv: &'static str,
}

impl Subject {
    /// Every precision of a backend, with that of weights outermost.
    pub(super) fn of(backend: Backend, args: &CompareArgs) -> impl Iterator<Item = Self> {
        let caches = &args.kv_cache.0;
        let of = move |quant| caches.iter().map(move |&kv| Self { backend, quant, kv });
        args.quant.0.iter().copied().flat_map(of)
    }
}

/// `cpu`, `cpu int8`, `cpu nf4, kv int8`: the backend, then what is quantised.
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
