//! Version of an engine's weights.
//!
//! A trainer of all weights writes them in place, in the memory that decode steps read. Whoever reads them holds the lock
//! with others while it does, and the trainer holds it alone for a step. Each step counts the version up, so that a session
//! whose keys come from older weights is refused.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use super::Engine;
use super::error::GenerateError;

/// Number of steps that changed the weights.
#[derive(Debug, Default)]
pub(super) struct Version(RwLock<u64>);

/// Weights that nobody else reads or writes.
pub(crate) struct Exclusive<'a>(RwLockWriteGuard<'a, u64>);

impl Exclusive<'_> {
    /// Makes all sessions stale.
    pub(crate) fn change(&mut self) {
        *self.0 += 1;
    }
}

impl Engine {
    /// Returns the number of training steps that changed the weights. A session or a conversation of an older number is refused
    /// ([`GenerateError::Stale`]).
    pub fn version(&self) -> u64 {
        *self.reading()
    }

    /// Keeps the weights as they are until the guard is dropped.
    pub(super) fn reading(&self) -> RwLockReadGuard<'_, u64> {
        // A panic between two writes of a step leaves weights that are all valid.
        self.0.version.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the weights as they are if they are of this version.
    ///
    /// # Errors
    /// [`GenerateError::Stale`].
    pub(super) fn reading_as(
        &self,
        version: u64,
    ) -> Result<RwLockReadGuard<'_, u64>, GenerateError> {
        let guard = self.reading();
        match *guard == version {
            true => Ok(guard),
            false => Err(GenerateError::Stale { session: version, weights: *guard }),
        }
    }

    /// Returns the weights to write, or None if others read them now.
    pub(crate) fn exclusive(&self) -> Option<Exclusive<'_>> {
        match self.0.version.0.try_write() {
            Ok(guard) => Some(Exclusive(guard)),
            Err(TryLockError::Poisoned(why)) => Some(Exclusive(why.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}
