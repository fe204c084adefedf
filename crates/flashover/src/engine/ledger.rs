//! What lives on a device beside a model's weights, so that a budget holds for all of it together.
//!
//! What passes through a model lies in pages of its thread, which serve whatever passes there next: of a thread it counts
//! once, as much as the most that anything living there needs.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

/// Bytes that a session, a batch or a trainer takes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Need {
    /// As long as it lives.
    pub(crate) kept: u128,
    /// While something passes.
    pub(crate) passing: u128,
}

/// Of one model, whatever clones of it there are.
#[derive(Debug, Default)]
pub(crate) struct Ledger(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    next: u64,
    live: BTreeMap<u64, (ThreadId, Need)>,
}

/// An entry, until it is dropped.
#[derive(Debug)]
pub(crate) struct Grant {
    ledger: Arc<Ledger>,
    entry: u64,
}

impl Ledger {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        // Nothing panics between two changes that belong together.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of all but `own` beside something of this thread through which so much passes.
    pub(crate) fn beside(&self, own: Option<&Grant>, passing: u128) -> u128 {
        self.entries().beside(own.map(|grant| grant.entry), passing)
    }

    /// Enters `need`, in place of what `own` was, unless `refuse` does with the bytes of all others.
    pub(crate) fn admit<E>(
        self: &Arc<Self>,
        own: &mut Option<Grant>,
        need: Need,
        refuse: impl FnOnce(u128) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut entries = self.entries();
        let before = own.as_ref().map(|grant| grant.entry);
        refuse(entries.beside(before, need.passing))?;
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
    fn beside(&self, own: Option<u64>, passing: u128) -> u128 {
        let others = self.live.iter().filter(|(entry, _)| Some(**entry) != own);
        let (mut kept, mut most) = (0, HashMap::<ThreadId, u128>::new());
        let here = thread::current().id();
        for (_, (thread, need)) in others {
            kept += need.kept;
            let served = if *thread == here { passing } else { 0 };
            let most = most.entry(*thread).or_default();
            *most = need.passing.saturating_sub(served).max(*most);
        }
        kept + most.values().sum::<u128>()
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

    fn admitted(ledger: &Arc<Ledger>, own: &mut Option<Grant>, kept: u128, passing: u128) -> u128 {
        let mut beside = 0;
        let seen = |others| {
            beside = others;
            Ok::<_, ()>(())
        };
        ledger.admit(own, Need { kept, passing }, seen).expect("not refused");
        beside
    }

    #[test]
    fn what_lives_adds_up_and_what_passes_does_not() {
        let ledger = Arc::new(Ledger::default());
        let (mut a, mut b) = (None, None);
        assert_eq!(admitted(&ledger, &mut a, 10, 3), 0);
        assert_eq!(admitted(&ledger, &mut b, 5, 1), 10 + 2);
        assert_eq!((ledger.beside(None, 0), ledger.beside(None, 3)), (15 + 3, 15));
        // One that grows does not stand in its own way.
        assert_eq!(admitted(&ledger, &mut a, 20, 4), 5);
        assert_eq!(ledger.beside(a.as_ref(), 0), 5 + 1);
        let other = ledger.clone();
        let there = thread::spawn(move || other.beside(None, 9)).join().expect("no panic");
        assert_eq!(there, 25 + 4, "another thread's pages serve nobody here");
        drop(a);
        assert_eq!(ledger.beside(None, 1), 5);
        drop(b);
        assert_eq!(ledger.beside(None, 0), 0);
    }

    #[test]
    fn what_is_refused_is_not_entered() {
        let ledger = Arc::new(Ledger::default());
        let mut own = None;
        let refused = ledger.admit(&mut own, Need { kept: 8, passing: 0 }, |_| Err("full"));
        assert_eq!((refused, own.is_some(), ledger.beside(None, 0)), (Err("full"), false, 0));
        admitted(&ledger, &mut own, 3, 0);
        let refused = ledger.admit(&mut own, Need { kept: 8, passing: 0 }, |_| Err("full"));
        assert_eq!((refused, ledger.beside(None, 0)), (Err("full"), 3), "it keeps what it had");
    }
}
