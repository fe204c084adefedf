//! Hash that stays the same between versions and machines.

/// FNV-1a over 64-bit words instead of bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fnv1a(u64);

impl Fnv1a {
    pub(crate) const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) fn add(&mut self, word: impl Into<u64>) {
        self.0 = (self.0 ^ word.into()).wrapping_mul(0x0100_0000_01b3);
    }

    pub(crate) const fn value(self) -> u64 {
        self.0
    }
}
