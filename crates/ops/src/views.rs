//! Views of tensors of any rank and type: other shapes and parts that share memory.
//!
//! Burn copies for most of them: it merges no strided dimensions, and begins tensors at multiples of 512 bytes only.

use burn::backend::DispatchTensor;
use burn_cubecl::tensor::CubeTensor;
use cubecl::zspace::metadata::Metadata;

use crate::cube::cube_of_any;
use crate::pointwise::tensor_of;

/// Returns the same elements in another shape, without a copy; none if their strides do not allow it, or for a device without our
/// kernels.
pub fn reshaped(tensor: &DispatchTensor, shape: &[usize]) -> Option<DispatchTensor> {
    let own = cube_of_any(tensor).ok()?;
    let strides = strides_of(&own.meta.shape().to_vec(), own.meta.strides(), shape)?;
    let meta = Box::new(Metadata::new(shape.to_vec(), strides));
    Some(tensor_of(CubeTensor { meta, ..own }))
}

/// Returns the part `from..to` of a dimension, without a copy; none if kernels cannot read buffers that begin there, or for a
/// device without our kernels.
pub fn narrowed(
    tensor: &DispatchTensor,
    axis: usize,
    from: usize,
    to: usize,
) -> Option<DispatchTensor> {
    let own = cube_of_any(tensor).ok()?;
    let mut shape = own.meta.shape().to_vec();
    let start = own.meta.strides()[axis] * from * own.dtype.size();
    // Buffers of WebGPU begin at multiples of 256 bytes; kernels load up to 16 bytes at once.
    let alignment = if own.client.name().starts_with("wgpu") { 256 } else { 16 };
    if !start.is_multiple_of(alignment) || to <= from {
        return None;
    }
    shape[axis] = to - from;
    let meta = Box::new(Metadata::new(shape, own.meta.strides().to_vec()));
    let handle = own.handle.clone().offset_start(start as u64);
    Some(tensor_of(CubeTensor { handle, meta, ..own }))
}

/// Returns the dimensions of a tensor in the order in which they lie in memory, outermost first; none for a device without our
/// kernels.
pub fn order(tensor: &DispatchTensor) -> Option<Vec<usize>> {
    let own = cube_of_any(tensor).ok()?;
    let strides = own.meta.strides().to_vec();
    let mut order: Vec<usize> = (0..strides.len()).collect();
    // The stride of a dimension of length 1 is arbitrary.
    let key = |at: usize| if own.meta.shape()[at] == 1 { usize::MAX } else { strides[at] };
    order.sort_by_key(|at| std::cmp::Reverse(key(*at)));
    Some(order)
}

/// Returns the strides of other dimensions over the same elements: each group of new dimensions splits a run of old ones that are
/// evenly strided (as NumPy reshapes without a copy).
fn strides_of(old: &[usize], strides: &[usize], new: &[usize]) -> Option<Vec<usize>> {
    if old.contains(&0) || old.iter().product::<usize>() != new.iter().product::<usize>() {
        return None;
    }
    let kept: Vec<(usize, usize)> =
        old.iter().copied().zip(strides.iter().copied()).filter(|(len, _)| *len != 1).collect();
    let mut made = vec![1; new.len()];
    let (mut from, mut to) = (0, 0);
    while from < kept.len() {
        // The shortest runs of old and new dimensions with the same number of elements.
        let (first, start) = (from, to);
        let (mut have, mut want) = (kept[from].0, 1);
        from += 1;
        while want != have {
            if want < have {
                want *= *new.get(to)?;
                to += 1;
            } else {
                have *= kept.get(from)?.0;
                from += 1;
            }
        }
        let run = &kept[first..from];
        if run.windows(2).any(|pair| pair[0].1 != pair[1].0 * pair[1].1) {
            return None;
        }
        let mut step = run.last()?.1;
        for at in (start..to).rev() {
            made[at] = step;
            step *= new[at];
        }
    }
    Some(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_change_without_a_copy_where_strides_are_even() {
        // The middle third of rows of 36, as heads.
        assert_eq!(strides_of(&[2, 5, 12], &[180, 36, 1], &[10, 3, 4]), Some(vec![36, 4, 1]));
        // An image with channels last, as rows of pixels; the stride of one image is arbitrary.
        assert_eq!(strides_of(&[1, 8, 4, 5], &[160, 1, 40, 8], &[1, 8, 20]), Some(vec![8, 1, 8]));
        // Its pixels and channels together are no view.
        assert_eq!(strides_of(&[1, 8, 4, 5], &[160, 1, 40, 8], &[160]), None);
        assert_eq!(strides_of(&[6], &[1], &[1, 2, 1, 3]), Some(vec![6, 3, 3, 1]));
        assert_eq!(strides_of(&[2, 3], &[3, 1], &[5]), None);
        assert_eq!(strides_of(&[1, 1], &[7, 9], &[1]), Some(vec![1]));
    }
}
