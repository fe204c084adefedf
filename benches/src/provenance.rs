//! Provenance of a measurement: commit, date, device.

use std::collections::BTreeMap;

use anyhow::Context;
use arch::Device;
use record::Card;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

pub(crate) const COMMIT: &str = env!("FLASHOVER_COMMIT");

/// True if the program was built from a tree with uncommitted changes.
pub(crate) fn dirty() -> bool {
    env!("FLASHOVER_DIRTY") == "true"
}

/// Current time in UTC, to the second.
pub(crate) fn now() -> anyhow::Result<String> {
    let now = OffsetDateTime::now_utc()
        .replace_nanosecond(0)
        .context("the system clock is before 1970")?;
    now.format(&Rfc3339).context("cannot format the date")
}

/// Describes `device`, without measured ceilings.
pub(crate) fn card(device: &Device) -> anyhow::Result<Card> {
    let facts = arch::report::describe(device);
    Ok(Card {
        backend: facts.backend.to_string(),
        name: facts.name,
        arch_id: facts.arch_id,
        profile: device.profile().restricted_to.clone(),
        driver: facts.versions.get("driver").cloned(),
        versions: facts.versions,
        memory_bytes: facts.memory_bytes,
        clocks: facts.clocks,
        commit: COMMIT.to_owned(),
        dirty: dirty(),
        date: now()?,
        copy_gbps: None,
        peak_tflops: BTreeMap::new(),
    })
}
