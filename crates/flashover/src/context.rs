//! Conversion of a [`Device`] to the contexts of `ops` and Burn.

use ops::Ctx;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tune::{CacheError, Policy};

use crate::device::Device;

/// Returns the context for ops on `device`, with the configs of the user's cache and the shipped ones.
pub(crate) fn context(device: &Device, policy: Policy) -> Result<Ctx, CacheError> {
    let now = OffsetDateTime::now_utc();
    let date = now.replace_nanosecond(0).unwrap_or(now).format(&Rfc3339);
    let ctx = Ctx::of_user(policy, date.expect("a year has four digits"))?;
    Ok(match &device.profile().restricted_to {
        Some(profile) => ctx.restricted_to(profile),
        None => ctx,
    })
}

/// Logs the warnings of the tune cache.
pub(crate) fn log_warnings(ctx: &Ctx) {
    ctx.warnings().iter().for_each(|warning| log::warn!("{warning}"));
}

/// Returns the same device as a Burn device.
pub(crate) fn on_burn(device: &Device) -> burn::tensor::Device {
    device.into()
}
