//! Occupancy: the number of cubes of a kernel that one multiprocessor runs at once.

/// Limits of one streaming multiprocessor (CUDA C++ Programming Guide, "Compute Capabilities").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub units: u32,
    pub cubes: u32,
    pub registers: u32,
    pub shared: u32,
}

impl Limits {
    /// Returns the limits of compute capability `sm`; `None` if it is not listed.
    pub const fn from_sm(sm: u32) -> Option<Self> {
        let (units, cubes, shared) = match sm {
            89 => (1536, 24, 100 << 10),
            90 => (2048, 32, 228 << 10),
            120 => (1536, 24, 100 << 10),
            _ => return None,
        };
        Some(Self { units, cubes, registers: 65_536, shared })
    }
}

/// Returns the number of cubes that fit one multiprocessor. A cube has `units` units with `registers`
/// registers each, and `shared` bytes of shared memory. The driver reserves 1 KiB of shared memory per
/// cube, and allocates registers in blocks of 256 per plane.
pub fn occupancy(limits: Limits, units: u32, registers: u32, shared: u32) -> u32 {
    let planes = units.div_ceil(32);
    let per_cube = planes * (registers * 32).next_multiple_of(256);
    let by_registers = limits.registers / per_cube.max(1);
    let by_shared = limits.shared / (shared + 1024);
    limits.cubes.min(limits.units / units).min(by_registers).min(by_shared)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_limit_counts() {
        let ada = Limits::from_sm(89).expect("listed");
        assert_eq!(occupancy(ada, 128, 232, 48 << 10), 2, "registers and shared memory alike");
        assert_eq!(occupancy(ada, 256, 255, 96 << 10), 1);
        assert_eq!(occupancy(ada, 1024, 32, 0), 1, "units");
        assert_eq!(occupancy(ada, 32, 16, 0), 24, "cubes");
    }
}
