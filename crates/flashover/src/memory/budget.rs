//! Limits on the use of a device's memory.

use serde::Serialize;

use super::error::PlanError;

/// Limits on the use of a device's memory.
///
/// ```
/// use flashover::memory::MemoryBudget;
///
/// let gib = 1 << 30;
/// let budget = MemoryBudget { reserve_bytes: 2 * gib, ..MemoryBudget::default() };
/// assert_eq!(budget.usable_bytes(Some(16 * gib)), Some(14 * gib));
/// assert_eq!(MemoryBudget::default().usable_bytes(None), None, "unknown: nothing is refused");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MemoryBudget {
    /// Maximum bytes of the weights and of all sessions, batches and trainers of the model together. Each model of the
    /// process has its own budget. None for no limit.
    pub limit_bytes: Option<u64>,
    /// Bytes that stay free for others; 0 by default.
    pub reserve_bytes: u64,
    /// Maximum share of the device's memory, above 0 and up to 1. The reserve is subtracted from it. 1 by default.
    pub fraction: f64,
}

impl Default for MemoryBudget {
    /// Returns a budget of the whole device.
    fn default() -> Self {
        Self { limit_bytes: None, reserve_bytes: 0, fraction: 1.0 }
    }
}

impl MemoryBudget {
    /// Returns the usable bytes of a device with `total` bytes; none if neither `total` nor a limit is known.
    pub fn usable_bytes(&self, total: Option<u64>) -> Option<u64> {
        let share = |total: u64| (total as f64 * self.fraction) as u64;
        let rest = total.map(|total| share(total).saturating_sub(self.reserve_bytes));
        match (rest, self.limit_bytes) {
            (Some(rest), Some(limit)) => Some(rest.min(limit)),
            (rest, limit) => rest.or(limit),
        }
    }

    /// Refuses a budget of nothing, and a share of an unknown total.
    pub(super) fn check(&self, total: Option<u64>) -> Result<(), PlanError> {
        let refused = |name, value: String, range| Err(PlanError::Budget { name, value, range });
        if self.limit_bytes == Some(0) {
            return refused("limit", "0 bytes".to_owned(), "above 0");
        }
        if self.fraction.is_nan() || self.fraction <= 0.0 || self.fraction > 1.0 {
            return refused("fraction", self.fraction.to_string(), "above 0, up to 1");
        }
        let of_all = self.fraction < 1.0 || self.reserve_bytes > 0;
        if of_all && total.is_none() { Err(PlanError::BudgetOfUnknown) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_less_than_the_card() {
        let gib = 1u64 << 30;
        let of = |budget: MemoryBudget| budget.usable_bytes(Some(16 * gib));
        let all = MemoryBudget::default();
        assert_eq!(of(MemoryBudget { fraction: 0.5, reserve_bytes: gib, ..all }), Some(7 * gib));
        assert_eq!(of(MemoryBudget { limit_bytes: Some(3 * gib), ..all }), Some(3 * gib));
        assert_eq!(of(MemoryBudget { limit_bytes: Some(99 * gib), ..all }), Some(16 * gib));
        assert_eq!(of(MemoryBudget { reserve_bytes: 99 * gib, ..all }), Some(0));
        assert_eq!(MemoryBudget { limit_bytes: Some(5), ..all }.usable_bytes(None), Some(5));
        // Shares of an unknown total are refused.
        for part in
            [MemoryBudget { fraction: 0.5, ..all }, MemoryBudget { reserve_bytes: gib, ..all }]
        {
            let refused = part.check(None).expect_err("a part of nothing");
            assert!(matches!(refused, PlanError::BudgetOfUnknown), "{refused}");
            part.check(Some(16 * gib)).expect("a part of a card");
        }
        MemoryBudget { limit_bytes: Some(5), ..all }.check(None).expect("a number of bytes");
    }
}
