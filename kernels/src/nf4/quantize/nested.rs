//! Nested absmax: quantises absmax to 8 bits with a codebook of 256 values.

use arch::Device;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::nf4::{NESTED_BLOCK, NestedBuffers, Weight};

/// Returns the codebook of nested absmax: bitsandbytes' signed dynamic map.
pub fn nested_values() -> [f32; 256] {
    dynamic_map(true)
}

/// Returns bitsandbytes' dynamic map of 8 bits (`create_dynamic_map`), ascending. Each decade from 1e-6 to 1 has twice as
/// many steps as the one below. The unsigned map has twice the steps of the signed one.
pub(crate) fn dynamic_map(signed: bool) -> [f32; 256] {
    let mut values = vec![0.0f32, 1.0];
    for decade in 0..7i32 {
        let parts = (if signed { 1 } else { 2 }) << decade;
        // torch.linspace(0.1, 1, parts + 1), which counts from the nearer end and uses FMA.
        let step = 0.9f32 / parts as f32;
        let edge = |i: i32| match i < (parts + 1) / 2 {
            true => step.mul_add(i as f32, 0.1),
            false => (-step).mul_add((parts - i) as f32, 1.0),
        };
        let scale = 10f64.powi(decade - 6) as f32;
        for i in 0..parts {
            let value = scale * ((edge(i) + edge(i + 1)) / 2.0);
            values.push(value);
            if signed {
                values.push(-value);
            }
        }
    }
    values.sort_by(f32::total_cmp);
    values.try_into().expect("0, 1 and 254 means")
}

/// Quantises the absmax of a weight, minus `offset`, to bytes and scales.
pub fn nest(
    device: &Device,
    absmax: &Handle,
    weight: Weight,
    offset: f32,
) -> (Handle, NestedBuffers) {
    let client = device.client();
    let (blocks, groups) = (weight.blocks() as usize, weight.groups() as usize);
    let codes = client.empty(blocks.next_multiple_of(4));
    let codebook = client.create_from_slice(f32::as_bytes(&nested_values()));
    let scales = client.empty(groups * 8);
    let alone = device.profile().cores().is_some();
    let (units, lanes) = if alone { (1, 1) } else { (64, 64) };
    let cubes = CubeCount::Static(groups.min(65_535) as u32, 1, 1);
    // SAFETY: the lengths follow from the weight, and the kernel checks its indices.
    unsafe {
        nest_absmax::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(units),
            BufferArg::from_raw_parts(absmax.clone(), blocks),
            BufferArg::from_raw_parts(codebook.clone(), 256),
            BufferArg::from_raw_parts(codes.clone(), blocks.div_ceil(4)),
            BufferArg::from_raw_parts(scales.clone(), groups * 2),
            offset,
            lanes,
        );
    }
    (codes, NestedBuffers { codebook, scales })
}

#[cube(launch_unchecked)]
fn nest_absmax(
    absmax: &[f32],
    codebook: &[f32],
    codes: &mut [u32],
    scales: &mut [f32],
    offset: f32,
    #[comptime] lanes: u32,
) {
    let words = comptime!(NESTED_BLOCK / 4);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(lanes as usize));
    let groups = (scales.len() / 2) as u32;
    let mut group = u32::cast_from(CUBE_POS_X);
    while group < groups {
        let mut group_absmax = 0.0f32.runtime();
        let mut word = group * words + UNIT_POS;
        while word < (group + 1) * words {
            #[unroll]
            for e in 0..4u32 {
                let at = (word * 4 + e) as usize;
                if at < absmax.len() {
                    let size = f32::abs(absmax[at] - offset);
                    group_absmax = select(size > group_absmax, size, group_absmax);
                }
            }
            word += lanes;
        }
        if comptime!(lanes > 1) {
            shared[UNIT_POS as usize] = group_absmax;
            sync_cube();
            for l in 0..lanes {
                let other = shared[l as usize];
                group_absmax = select(other > group_absmax, other, group_absmax);
            }
            sync_cube();
        }
        let inverse = 1.0 / group_absmax;
        if UNIT_POS == 0 {
            scales[(2 * group) as usize] = group_absmax;
            scales[(2 * group + 1) as usize] = offset;
        }
        let mut word = group * words + UNIT_POS;
        while word < (group + 1) * words {
            let mut made = 0u32;
            #[unroll]
            for e in 0..4u32 {
                let at = (word * 4 + e) as usize;
                if at < absmax.len() && group_absmax > 0.0 {
                    let code = nearest_code((absmax[at] - offset) * inverse, codebook);
                    made |= code << comptime!(8 * e);
                }
            }
            if word < codes.len() as u32 {
                codes[word as usize] = made;
            }
            word += lanes;
        }
        group += CUBE_COUNT_X;
    }
}

/// Returns the index of the nearest value in an ascending map of 256 values, by bisection as in
/// bitsandbytes (`dQuantize`, `quantize_2D`). Half-way between two values it returns the one tested last.
#[cube]
fn nearest_code(x: f32, map: &[f32]) -> u32 {
    let mut pivot = 127u32.runtime();
    let mut lower = 0u32.runtime();
    let mut upper = 255u32.runtime();
    #[unroll]
    for i in 0..7u32 {
        let step = comptime!(64u32 >> i);
        let above = x > map[pivot as usize];
        lower = select(above, pivot, lower);
        upper = select(above, upper, pivot);
        pivot = select(above, pivot + step, pivot - step);
    }
    let here = map[pivot as usize];
    let next = (map[upper as usize] + here) * 0.5f32;
    let last = (map[lower as usize] + here) * 0.5f32;
    let above = select(x > next, upper, pivot);
    let below = select(x < last, lower, pivot);
    select(x > here, above, below)
}
