//! How many cubes of a kernel live on one processor.

/// What one streaming multiprocessor holds (CUDA C++ Programming Guide, "Compute Capabilities").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub units: u32,
    pub cubes: u32,
    pub registers: u32,
    pub shared: u32,
}

impl Limits {
    /// The limits of compute capability `sm`; none for one that is not listed.
    pub const fn of(sm: u32) -> Option<Self> {
        let (units, cubes, shared) = match sm {
            89 => (1536, 24, 100 << 10),
            90 => (2048, 32, 228 << 10),
            120 => (1536, 24, 100 << 10),
            _ => return None,
        };
        Some(Self { units, cubes, registers: 65_536, shared })
    }
}

/// Cubes of `units` units that fit one processor, each unit with `registers` registers and each cube
/// with `shared` bytes. The driver keeps 1 KiB of shared memory a cube, and registers come in blocks
/// of 256 a plane.
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
        let ada = Limits::of(89).expect("listed");
        assert_eq!(occupancy(ada, 128, 232, 48 << 10), 2, "registers and shared memory alike");
        assert_eq!(occupancy(ada, 256, 255, 96 << 10), 1);
        assert_eq!(occupancy(ada, 1024, 32, 0), 1, "units");
        assert_eq!(occupancy(ada, 32, 16, 0), 24, "cubes");
    }
}
