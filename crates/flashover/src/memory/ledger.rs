//! Record of the sessions, batches and trainers that share a model's weights, so that one budget covers all of them.
//!
//! Activations live in pages of their thread, which the thread's next session reuses. So each thread counts only its
//! largest activations, once.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use models::Footprint;

/// Bytes of a session, a batch or a trainer.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Need {
    /// Bytes during its whole life.
    kept: u128,
    /// Bytes during a forward or backward pass.
    transient: u128,
}

impl Need {
    /// Bytes that stay.
    pub(crate) const fn of_kept(kept: u128) -> Self {
        Self { kept, transient: 0 }
    }
}

impl From<&Footprint> for Need {
    fn from(parts: &Footprint) -> Self {
        Self { kept: parts.kept(), transient: parts.transient() }
    }
}

/// Bytes of all other entries, as a session of this thread sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Others {
    kept: u128,
    /// Largest transient bytes of this thread; `elsewhere` is the sum over other threads.
    here: u128,
    elsewhere: u128,
}

impl Others {
    /// Adds bytes of another entry.
    pub(crate) const fn and(self, kept: u128) -> Self {
        Self { kept: self.kept + kept, ..self }
    }

    /// Returns their bytes next to a session with `transient` bytes.
    pub(crate) const fn next_to(self, transient: u128) -> u128 {
        self.kept + self.elsewhere + self.here.saturating_sub(transient)
    }
}

/// All entries on the weights of one model, shared by its clones.
#[derive(Debug, Default)]
pub(crate) struct Ledger(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    next: u64,
    live: BTreeMap<u64, (ThreadId, Need)>,
}

/// An entry of the ledger; dropping it removes the entry.
#[derive(Debug)]
pub(crate) struct Grant {
    ledger: Arc<Ledger>,
    entry: u64,
}

impl Ledger {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        // No code panics between two changes that belong together.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the bytes of all entries except `own`.
    pub(crate) fn others(&self, own: Option<&Grant>) -> Others {
        self.entries().others(own.map(|grant| grant.entry))
    }

    /// Adds an entry for `need`, or replaces `own`, unless `refuse` returns an error.
    pub(crate) fn admit<E>(
        self: &Arc<Self>,
        own: &mut Option<Grant>,
        need: Need,
        refuse: impl FnOnce(Others) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut entries = self.entries();
        let before = own.as_ref().map(|grant| grant.entry);
        refuse(entries.others(before))?;
        let entry = before.unwrap_or_else(|| {
            entries.next += 1;
            entries.next
        });
        entries.live.insert(entry, (thread::current().id(), need));
        drop(entries);
        own.get_or_insert_with(|| Grant { ledger: self.clone(), entry });
        Ok(())
    }
}

impl Entries {
    fn others(&self, own: Option<u64>) -> Others {
        let (mut kept, mut max) = (0, HashMap::<ThreadId, u128>::new());
        for (_, (thread, need)) in self.live.iter().filter(|(entry, _)| Some(**entry) != own) {
            kept += need.kept;
            let max = max.entry(*thread).or_default();
            *max = need.transient.max(*max);
        }
        let here = max.remove(&thread::current().id()).unwrap_or_default();
        Others { kept, here, elsewhere: max.into_values().sum() }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.ledger.entries().live.remove(&self.entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(
        ledger: &Arc<Ledger>,
        own: &mut Option<Grant>,
        kept: u128,
        transient: u128,
    ) -> u128 {
        let mut beside = 0;
        let seen = |others: Others| {
            beside = others.next_to(transient);
            Ok::<_, ()>(())
        };
        ledger.admit(own, Need { kept, transient }, seen).expect("not refused");
        beside
    }

    #[test]
    fn what_lives_adds_up_and_what_passes_does_not() {
        let ledger = Arc::new(Ledger::default());
        let (mut a, mut b) = (None, None);
        assert_eq!(admitted(&ledger, &mut a, 10, 3), 0);
        assert_eq!(admitted(&ledger, &mut b, 5, 1), 10 + 2);
        let others = ledger.others(None);
        assert_eq!((others.next_to(0), others.next_to(2), others.next_to(3)), (15 + 3, 15 + 1, 15));
        // A growing entry does not count against itself.
        assert_eq!(admitted(&ledger, &mut a, 20, 4), 5);
        assert_eq!(ledger.others(a.as_ref()).next_to(0), 5 + 1);
        let other = ledger.clone();
        let there = thread::spawn(move || other.others(None).next_to(9)).join().expect("no panic");
        assert_eq!(there, 25 + 4, "another thread's pages serve nobody here");
        drop(a);
        assert_eq!(ledger.others(None).next_to(1), 5);
        drop(b);
        assert_eq!(ledger.others(None), Others::default());
    }

    #[test]
    fn what_is_refused_is_not_entered() {
        let ledger = Arc::new(Ledger::default());
        let mut own = None;
        let need = Need { kept: 8, transient: 0 };
        let refused = ledger.admit(&mut own, need, |_| Err("full"));
        assert_eq!((refused, own.is_some()), (Err("full"), false));
        assert_eq!(ledger.others(None), Others::default());
        admitted(&ledger, &mut own, 3, 0);
        let refused = ledger.admit(&mut own, need, |_| Err("full"));
        assert_eq!((refused, ledger.others(None).next_to(0)), (Err("full"), 3), "as it was");
    }
}
