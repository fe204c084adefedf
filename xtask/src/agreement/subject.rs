//! Who is asked: a backend in a precision.

use std::fmt;

use crate::cli::{CompareArgs, KvCache, Quant, word};
use crate::devices::Backend;

/// A backend, and what it holds weights, keys and values in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Subject {
    pub(super) backend: Backend,
    pub(super) quant: Quant,
    pub(super) kv: KvCache,
}

impl Subject {
    /// A backend in every precision that is asked for, that of weights outermost.
    pub(super) fn of(backend: Backend, args: &CompareArgs) -> impl Iterator<Item = Self> {
        let caches = &args.kv_cache.0;
        let of = move |quant| caches.iter().map(move |&kv| Self { backend, quant, kv });
        args.quant.0.iter().copied().flat_map(of)
    }
}

/// `cpu`, `cpu int8`, `cpu nf4, kv int8`: what is quantised after the backend.
impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { backend, quant, kv } = *self;
        write!(f, "{backend}")?;
        if quant != Quant::None {
            write!(f, " {}", word(quant))?;
        }
        if kv != KvCache::Float {
            let comma = if quant == Quant::None { "" } else { "," };
            write!(f, "{comma} kv {}", word(kv))?;
        }
        Ok(())
    }
}
