//! Moments in 8 bits: bitsandbytes' dynamic maps.

use crate::nf4::dynamic_map;

/// Values with one absmax.
pub const BLOCK: u32 = 256;

/// Returns the map of m, ascending.
pub fn signed_map() -> [f32; 256] {
    dynamic_map(true)
}

/// Returns the map of v, ascending.
pub fn unsigned_map() -> [f32; 256] {
    dynamic_map(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_ascending_and_contain_zero_and_one() {
        for map in [signed_map(), unsigned_map()] {
            assert!(map.windows(2).all(|pair| pair[0] < pair[1]));
            assert!(map.contains(&0.0) && map[255] == 1.0);
        }
        let map = unsigned_map();
        for (got, want) in [(map[1], 3.25e-7), (map[2], 7.75e-7)] {
            assert!((got / want - 1.0f32).abs() < 1e-6, "{got}");
        }
    }
}
