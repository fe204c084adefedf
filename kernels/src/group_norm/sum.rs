//! The sum over the units of a group.

use cubecl::prelude::*;

use super::kernel::Plan;

/// Values that a unit adds between two barriers, at most.
const FAN: u32 = 8;

/// Sums the values of all units of a group and returns the sum to each, in a fixed order. Every unit of the cube must take part, and
/// calls of a kernel differ in `call`: each has its own part of `shared`, which the other may still read.
///
/// `shared` has two values per unit of the cube.
#[cube]
pub(super) fn group_sum(
    value: f32,
    shared: &mut [f32],
    #[comptime] call: u32,
    #[comptime] plan: Plan,
) -> f32 {
    let (columns, per_group, units) = comptime!((plan.columns, plan.per_group, plan.units()));
    let members = comptime!(plan.members());
    let column = UNIT_POS % columns;
    let member = UNIT_POS / columns * per_group + column % per_group;
    let first = comptime!(call * units) + column / per_group * members;
    shared[(first + member) as usize] = value;
    #[unroll]
    for level in 0..comptime!(levels(members)) {
        let (left, next) = comptime!((shrunk(members, level), shrunk(members, level + 1)));
        sync_cube();
        if member < next {
            shared[(first + member) as usize] = strided_sum(shared, first, member, next, left);
        }
    }
    sync_cube();
    let left = comptime!(shrunk(members, levels(members)));
    strided_sum(shared, first, 0u32.runtime(), 1u32, left)
}

/// Returns the sum of values `start`, `start + step`, `start + 2 · step`, … of the `len` values from `first` on.
#[cube]
fn strided_sum(
    shared: &mut [f32],
    first: u32,
    start: u32,
    #[comptime] step: u32,
    #[comptime] len: u32,
) -> f32 {
    let mut sum = shared[(first + start) as usize];
    #[unroll]
    for i in 1..comptime!(len.div_ceil(step)) {
        let far = comptime!(i * step);
        // start < step: only the last value can lie past the end.
        if comptime!(far + step <= len) || start + far < len {
            sum += shared[(first + start + far) as usize];
        }
    }
    sum
}

/// Number of divisions of `len` by [`FAN`] until at most [`FAN`] values are left.
const fn levels(len: u32) -> u32 {
    let (mut left, mut levels) = (len, 0);
    while left > FAN {
        (left, levels) = (left.div_ceil(FAN), levels + 1);
    }
    levels
}

/// Returns `len` after some divisions by [`FAN`], each rounded up.
const fn shrunk(len: u32, times: u32) -> u32 {
    len.div_ceil(FAN.pow(times))
}
