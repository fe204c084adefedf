//! Moments in 8 bits: bitsandbytes' dynamic maps, and the nearest code of a value.

use cubecl::prelude::*;

use crate::nf4::nested_values;

/// Values with one absmax.
pub const BLOCK: u32 = 256;

/// Returns the signed dynamic map, ascending: 7 decades below 1, each with twice as many steps as the one below.
pub fn signed_map() -> [f32; 256] {
    nested_values()
}

/// Returns the unsigned dynamic map, ascending: twice the steps of the signed one in each decade, and 0 and 1.
pub fn unsigned_map() -> [f32; 256] {
    let mut values = vec![0.0f32, 1.0];
    for decade in 0..7i32 {
        let parts = 2 << decade;
        // torch.linspace(0.1, 1, parts + 1), which counts from the nearer end and uses FMA.
        let step = 0.9f32 / parts as f32;
        let edge = |i: i32| match i < (parts + 1) / 2 {
            true => step.mul_add(i as f32, 0.1),
            false => (-step).mul_add((parts - i) as f32, 1.0),
        };
        let scale = 10f64.powi(decade - 6) as f32;
        values.extend((0..parts).map(|i| scale * ((edge(i) + edge(i + 1)) / 2.0)));
    }
    values.sort_by(f32::total_cmp);
    values.try_into().expect("2 and 254")
}

/// Returns the index of the nearest value in an ascending map of 256 values that starts at `first`, by bisection as in
/// bitsandbytes (`quantize_2D`).
#[cube]
pub(super) fn nearest_code(x: f32, map: &[f32], first: u32) -> u32 {
    let mut pivot = 127u32.runtime();
    let mut lower = 0u32.runtime();
    let mut upper = 255u32.runtime();
    #[unroll]
    for i in 0..7u32 {
        let step = comptime!(64u32 >> i);
        let above = x > map[(first + pivot) as usize];
        lower = select(above, pivot, lower);
        upper = select(above, upper, pivot);
        pivot = select(above, pivot + step, pivot - step);
    }
    let here = map[(first + pivot) as usize];
    let next = (map[(first + upper) as usize] + here) * 0.5f32;
    let last = (map[(first + lower) as usize] + here) * 0.5f32;
    let above = select(x > next, upper, pivot);
    let below = select(x < last, lower, pivot);
    select(x > here, above, below)
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
