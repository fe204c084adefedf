//! Burn's strided tensors as operands of a matmul.

use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;
use kernels::matmul::{Batches, Layout, Operand};

/// A tensor as a batch of matrices: its last two axes, and the strides of its batch axes, outermost first.
pub(crate) struct Matrices {
    pub(crate) operand: Operand,
    /// One stride per batch axis of the result; 0 if the tensor repeats along it.
    pub(crate) steps: Vec<u64>,
}

impl Matrices {
    /// Describes `tensor` as an operand of a result with batch axes `batch`; none if it is neither row- nor
    /// column-contiguous.
    fn from_tensor(tensor: &CubeTensor, batch: &[usize]) -> Option<Self> {
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let rank = shape.num_dims();
        let [rows, cols] = [shape[rank - 2], shape[rank - 1]];
        let [down, across] = [strides[rank - 2], strides[rank - 1]];
        // The stride of an axis of length 1 is arbitrary.
        let (layout, stride) = if (across == 1 || cols == 1) && (down >= cols || rows == 1) {
            (Layout::Row, if rows == 1 { cols } else { down })
        } else if (down == 1 || rows == 1) && (across >= rows || cols == 1) {
            (Layout::Col, if cols == 1 { rows } else { across })
        } else {
            return None;
        };
        let missing = batch.len() + 2 - rank;
        let steps = (0..batch.len())
            .map(|axis| match axis.checked_sub(missing) {
                Some(own) if shape[own] > 1 => strides[own] as u64,
                _ => 0,
            })
            .collect();
        Some(Self { operand: Operand { layout, stride: stride as u64, start: 0 }, steps })
    }

    /// Describes any tensor as [`Matrices::from_tensor`] does; copies it if it has another layout.
    pub(crate) fn of_any(tensor: CubeTensor, batch: &[usize]) -> (CubeTensor, Self) {
        if let Some(matrices) = Self::from_tensor(&tensor, batch) {
            return (tensor, matrices);
        }
        let tensor = into_contiguous(tensor);
        let matrices =
            Self::from_tensor(&tensor, batch).expect("a contiguous tensor has contiguous rows");
        (tensor, matrices)
    }
}

/// Returns the elements from one row of a matrix to the next; none if the elements of a row are not contiguous.
pub(crate) fn row_stride(matrix: &CubeTensor) -> Option<usize> {
    let (shape, strides) = (matrix.meta.shape(), matrix.meta.strides());
    // The stride of an axis of length 1 is arbitrary.
    let apart = if shape[0] == 1 { shape[1] } else { strides[0] };
    ((strides[1] == 1 || shape[1] == 1) && apart >= shape[1]).then_some(apart)
}

/// Returns a matrix with contiguous rows, and its row stride. Copies a matrix with another layout. Burn pads
/// rows on CUDA.
pub(crate) fn rows_of(tensor: CubeTensor) -> (CubeTensor, usize) {
    match row_stride(&tensor) {
        Some(apart) => (tensor, apart),
        None => {
            let width = tensor.meta.shape()[1];
            (into_contiguous(tensor), width)
        }
    }
}

/// Returns the memory of a matrix, and the elements between its rows. Copies a matrix whose rows are not
/// aligned for vectors.
pub(crate) fn pitched(tensor: CubeTensor) -> (Handle, u32) {
    let width = tensor.meta.shape()[1];
    let (tensor, apart) = rows_of(tensor);
    match u32::try_from(apart) {
        Ok(pitch) if apart == width || pitch % 8 == 0 => (tensor.handle, pitch),
        _ => (into_contiguous(tensor).handle, width as u32),
    }
}

/// Folds the batch axes into at most two with constant strides in both operands; none if that is impossible.
pub(crate) fn fold(batch: &[usize], lhs: &[u64], rhs: &[u64]) -> Option<Batches> {
    let mut axes: Vec<(u64, u64, u64)> = Vec::new(); // (size, stride of lhs, stride of rhs)
    for ((&size, &l), &r) in batch.iter().zip(lhs).zip(rhs) {
        let size = size as u64;
        match axes.last_mut() {
            _ if size == 1 => {}
            Some(outer) if outer.1 == l * size && outer.2 == r * size => {
                *outer = (outer.0 * size, l, r);
            }
            _ => axes.push((size, l, r)),
        }
    }
    let (outer, inner) = match axes[..] {
        [] => ((1, 0, 0), (1, 0, 0)),
        [inner] => ((1, 0, 0), inner),
        [outer, inner] => (outer, inner),
        _ => return None,
    };
    Some(Batches {
        outer: u32::try_from(outer.0).ok()?,
        inner: u32::try_from(inner.0).ok()?,
        lhs: (outer.1, inner.1),
        rhs: (outer.2, inner.2),
    })
}

/// Returns the batch axes of a matmul from those of its operands; none if they do not broadcast. Follows
/// NumPy: axes are aligned at the end, and two axes must be equal or one of them 1.
pub fn broadcast(lhs: &[usize], rhs: &[usize]) -> Option<Vec<usize>> {
    let rank = lhs.len().max(rhs.len());
    let at =
        |shape: &[usize], i: usize| (i + shape.len()).checked_sub(rank).map_or(1, |i| shape[i]);
    (0..rank)
        .map(|i| match (at(lhs, i), at(rhs, i)) {
            (a, b) if a == b || b == 1 => Some(a),
            (1, b) => Some(b),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_axes_fold_into_two_where_both_operands_step_evenly() {
        let fold = |batch: &[usize], lhs: &[u64], rhs: &[u64]| fold(batch, lhs, rhs);
        let batches = |outer, inner, lhs, rhs| Some(Batches { outer, inner, lhs, rhs });
        assert_eq!(fold(&[], &[], &[]), batches(1, 1, (0, 0), (0, 0)));
        // Dense on both sides, and repeated on one.
        assert_eq!(fold(&[2, 3], &[12, 4], &[30, 10]), batches(1, 6, (0, 4), (0, 10)));
        assert_eq!(fold(&[2, 3], &[12, 4], &[0, 0]), batches(1, 6, (0, 4), (0, 0)));
        // Heads that share keys repeat along the inner axis only.
        assert_eq!(fold(&[2, 3], &[12, 4], &[10, 0]), batches(2, 3, (12, 4), (10, 0)));
        assert_eq!(fold(&[2, 1, 3], &[12, 7, 4], &[10, 9, 0]), batches(2, 3, (12, 4), (10, 0)));
        assert_eq!(fold(&[2, 3, 5], &[60, 20, 4], &[10, 0, 2]), None);
    }

    #[test]
    fn batches_broadcast_as_numpy_has_it() {
        assert_eq!(broadcast(&[5, 1], &[3]), Some(vec![5, 3]));
        assert_eq!(broadcast(&[], &[2, 2]), Some(vec![2, 2]));
        assert_eq!(broadcast(&[0], &[1]), Some(vec![0]));
        assert_eq!(broadcast(&[2], &[3]), None);
    }
}
