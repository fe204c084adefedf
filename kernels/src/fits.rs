//! Limits of a device that every kernel's `check` tests.

use arch::{ArchProfile, DType};
use tune::Infeasible;

/// Returns the error for a device without `what`.
pub(crate) fn lacks(what: impl Into<String>) -> Infeasible {
    Infeasible::Feature { what: what.into() }
}

/// Returns the error for a config whose `name` cannot be `value`, with the reason `why`.
pub(crate) fn shape(name: &'static str, value: impl Into<u64>, why: &str) -> Infeasible {
    Infeasible::Shape { name, value: value.into(), why: why.to_owned() }
}

/// Checks that the device can store buffers of all `dtypes`.
pub(crate) fn stores(
    arch: &ArchProfile,
    dtypes: impl IntoIterator<Item = DType>,
) -> Result<(), Infeasible> {
    match dtypes.into_iter().find(|dtype| !arch.dtypes.contains(dtype)) {
        None => Ok(()),
        Some(dtype) => Err(lacks(format!("{dtype} buffers"))),
    }
}

/// Returns whether the device is an RTX card, or is limited to the features of one.
pub(crate) fn rtx(arch: &ArchProfile) -> bool {
    arch.inline_ptx() && arch.max_shared_bytes <= 99 << 10
}

/// Checks the units and the shared memory of a cube.
pub(crate) fn limits(arch: &ArchProfile, units: u32, shared: u32) -> Result<(), Infeasible> {
    if units == 0 {
        return Err(shape("units", units, "expected at least one unit per cube"));
    }
    if units > arch.max_units_per_cube {
        return Err(Infeasible::Units { need: units, have: arch.max_units_per_cube });
    }
    if shared > arch.max_shared_bytes {
        return Err(Infeasible::SharedMemory { need: shared, have: arch.max_shared_bytes });
    }
    Ok(())
}

/// Checks the loop iterations of a unit over all its loops. The test that ends a loop counts as one.
pub(crate) fn iterations(arch: &ArchProfile, need: u64) -> Result<(), Infeasible> {
    match arch.max_loop_iterations {
        Some(have) if need > u64::from(have) => Err(Infeasible::Iterations { need, have }),
        _ => Ok(()),
    }
}
