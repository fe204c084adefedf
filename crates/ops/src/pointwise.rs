//! Chains of elementwise operations on Burn tensors of any dtype, rank and strides, in one launch.

use arch::DType;
use burn::backend::{BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind};
use burn::tensor::{BoolStore, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::zspace::metadata::Metadata;
use kernels::pointwise::{Pointwise, PointwiseInput, PointwiseOperands, PointwiseProblem, Program};

use crate::arena::result;
use crate::cube::cube_of_any;
use crate::layout::broadcast;
use crate::{Ctx, OpError};

/// Runs a program on tensors that broadcast. The result has the memory layout of the first input of
/// its shape, so NHWC images stay NHWC.
///
/// # Shapes
/// Inputs and result of any rank. `out` is the dtype of the result: a float, or the device's dtype
/// of bools.
///
/// # Errors
/// [`OpError::Broadcast`]; [`OpError::Pointwise`] for a program that is invalid or too long, or
/// tensors of more than two dtypes; [`OpError::Device`] for a device without kernels.
pub fn pointwise(
    ctx: &Ctx,
    program: &Program,
    inputs: &[DispatchTensor],
    out: burn::tensor::DType,
) -> Result<DispatchTensor, OpError> {
    let inputs = inputs.iter().map(cube_of_any).collect::<Result<Vec<_>, _>>()?;
    let shapes: Vec<Vec<usize>> = inputs.iter().map(|own| own.meta.shape().to_vec()).collect();
    let mut shape = Vec::new();
    for own in &shapes {
        shape = broadcast(&shape, own)
            .ok_or_else(|| OpError::Broadcast { lhs: shape.clone(), rhs: own.clone() })?;
    }
    let Some(first) = inputs.first() else {
        return Err(OpError::Pointwise(kernels::pointwise::InvalidPointwise::Size {
            inputs: 0,
            steps: 0,
        }));
    };
    let like = inputs.iter().find(|own| own.meta.shape().to_vec() == shape);
    let strides = dense(&shape, like.map(|own| own.meta.strides().to_vec()));
    let made = result(first.client.clone(), first.device.clone(), Shape::from(shape.clone()), out);
    let made = CubeTensor { meta: Box::new(Metadata::new(shape, strides)), ..made };
    run(ctx, program, &inputs, &made)?;
    Ok(tensor_of(made))
}

/// Runs a program like [`pointwise`], and writes the result into an existing tensor, such as a part
/// of a larger one.
///
/// # Errors
/// The errors of [`pointwise`]; [`OpError::Shape`] if the inputs do not broadcast to the shape of the tensor.
pub fn pointwise_into(
    ctx: &Ctx,
    program: &Program,
    inputs: &[DispatchTensor],
    out: &DispatchTensor,
) -> Result<(), OpError> {
    let inputs = inputs.iter().map(cube_of_any).collect::<Result<Vec<_>, _>>()?;
    run(ctx, program, &inputs, &cube_of_any(out)?)
}

fn run(
    ctx: &Ctx,
    program: &Program,
    inputs: &[CubeTensor],
    out: &CubeTensor,
) -> Result<(), OpError> {
    let shape = out.meta.shape().to_vec();
    if shape.contains(&0) {
        return Ok(());
    }
    let mut all = Vec::new();
    for own in inputs.iter().chain([out]) {
        let strides = spread(own, &shape).ok_or_else(|| OpError::Shape {
            what: "an input",
            have: own.meta.shape().to_vec(),
            need: shape.clone(),
        })?;
        all.push(strides);
    }
    let (shape, all) = merged(&shape, all);
    let size = |own: &usize| u32::try_from(*own).map_err(|_| OpError::TooLarge(*own));
    let operand = |tensor: &CubeTensor, strides: &Vec<usize>| -> Result<PointwiseInput, OpError> {
        let strides = strides.iter().map(size).collect::<Result<_, _>>()?;
        Ok(PointwiseInput { dtype: stored(tensor.dtype)?, strides })
    };
    let problem = PointwiseProblem {
        program: program.clone(),
        shape: shape.iter().map(size).collect::<Result<_, _>>()?,
        inputs: inputs
            .iter()
            .zip(&all)
            .map(|(own, strides)| operand(own, strides))
            .collect::<Result<_, _>>()?,
        out: operand(out, &all[inputs.len()])?,
    };
    let problem = problem.checked().map_err(OpError::Pointwise)?;
    let handle = |own: &CubeTensor| own.handle.clone();
    let operands =
        PointwiseOperands { inputs: inputs.iter().map(handle).collect(), out: handle(out) };
    ctx.run::<Pointwise>(out, &problem, &operands)
}

/// Returns the strides of a tensor when it broadcasts to a shape; None if it does not.
fn spread(own: &CubeTensor, shape: &[usize]) -> Option<Vec<usize>> {
    let (have, strides) = (own.meta.shape(), own.meta.strides());
    let missing = shape.len().checked_sub(have.num_dims())?;
    (0..shape.len())
        .map(|at| match at.checked_sub(missing) {
            None => Some(0),
            Some(own) if have[own] == shape[at] => {
                Some(if shape[at] == 1 { 0 } else { strides[own] })
            }
            Some(own) => (have[own] == 1).then_some(0),
        })
        .collect()
}

/// Returns the strides of a dense tensor with the dimension order of other strides.
fn dense(shape: &[usize], like: Option<Vec<usize>>) -> Vec<usize> {
    let mut order: Vec<usize> = (0..shape.len()).collect();
    if let Some(like) =
        like.filter(|like| like.iter().zip(shape).all(|(own, len)| *own > 0 || *len == 1))
    {
        // Dimensions of length 1 have arbitrary strides: they stay next to their neighbours.
        let mut key = vec![0; shape.len()];
        let mut last = usize::MAX;
        for at in 0..shape.len() {
            if shape[at] > 1 {
                last = like[at];
            }
            key[at] = last;
        }
        order.sort_by_key(|at| std::cmp::Reverse(key[*at]));
    }
    let mut strides = vec![0; shape.len()];
    let mut step = 1;
    for at in order.into_iter().rev() {
        strides[at] = step;
        step *= shape[at];
    }
    strides
}

/// Sorts dimensions by the strides of the last operand, the result, and merges those that are
/// contiguous in all operands.
fn merged(shape: &[usize], all: Vec<Vec<usize>>) -> (Vec<usize>, Vec<Vec<usize>>) {
    let out = all.last().expect("the result");
    let mut order: Vec<usize> = (0..shape.len()).filter(|at| shape[*at] > 1).collect();
    order.sort_by_key(|at| std::cmp::Reverse(out[*at]));
    let mut lengths: Vec<usize> = Vec::new();
    let mut strides = vec![Vec::new(); all.len()];
    for at in order {
        let even = !lengths.is_empty()
            && strides.iter().zip(&all).all(|(made, own): (&Vec<usize>, _)| {
                made.last().is_some_and(|outer| *outer == own[at] * shape[at])
            });
        if even {
            *lengths.last_mut().expect("there is one") *= shape[at];
            strides
                .iter_mut()
                .zip(&all)
                .for_each(|(made, own)| *made.last_mut().expect("as many") = own[at]);
        } else {
            lengths.push(shape[at]);
            strides.iter_mut().zip(&all).for_each(|(made, own)| made.push(own[at]));
        }
    }
    if lengths.is_empty() {
        lengths.push(1);
        // A single element.
        strides.iter_mut().for_each(|made| made.push(1));
    }
    (lengths, strides)
}

/// Returns the dtype of a buffer.
const fn stored(dtype: burn::tensor::DType) -> Result<DType, OpError> {
    use burn::tensor::DType as Burn;
    Ok(match dtype {
        Burn::F32 => DType::F32,
        Burn::F16 => DType::F16,
        Burn::BF16 => DType::Bf16,
        Burn::I32 => DType::I32,
        Burn::I64 => DType::I64,
        Burn::U8 | Burn::Bool(BoolStore::U8) => DType::U8,
        Burn::U32 | Burn::Bool(BoolStore::U32) => DType::U32,
        other => return Err(OpError::NotFloat(other)),
    })
}

/// Wraps a CubeCL tensor as a Burn tensor of its kind.
pub(crate) fn tensor_of(tensor: CubeTensor) -> DispatchTensor {
    let tensor = match tensor.dtype {
        burn::tensor::DType::Bool(_) => BackendTensor::Bool(tensor),
        own if own.is_float() => BackendTensor::Float(tensor),
        _ => BackendTensor::Int(tensor),
    };
    DispatchTensor {
        kind: DispatchTensorKind::Cube(tensor),
        autodiff: DispatchAutodiffContext::Disabled,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dimensions_merge_where_all_operands_walk_evenly() {
        // Two dense tensors.
        let dense = vec![12, 4, 1];
        let own = merged(&[2, 3, 4], vec![dense.clone(), dense.clone()]);
        assert_eq!(own, (vec![24], vec![vec![1], vec![1]]));
        // A vector along the last dimension.
        let own = merged(&[2, 3, 4], vec![vec![0, 0, 1], dense.clone()]);
        assert_eq!(own, (vec![6, 4], vec![vec![0, 1], vec![4, 1]]));
        // An NHWC image, and a factor per channel.
        let image = vec![60, 1, 12, 3];
        let own = merged(&[2, 3, 5, 4], vec![vec![0, 1, 0, 0], image.clone()]);
        assert_eq!(own, (vec![40, 3], vec![vec![0, 1], vec![3, 1]]));
        assert_eq!(merged(&[1, 1], vec![vec![0, 0]]), (vec![1], vec![vec![1]]));
    }

    #[test]
    fn results_lie_as_their_inputs_do() {
        let own = |shape: &[usize], like: &[usize]| dense(shape, Some(like.to_vec()));
        assert_eq!(own(&[2, 3, 5, 4], &[60, 1, 12, 3]), [60, 1, 12, 3]);
        assert_eq!(own(&[2, 3], &[0, 1]), [3, 1]);
        // The strides of dimensions of length 1 are arbitrary.
        assert_eq!(own(&[1, 8, 1, 4], &[7, 1, 9, 8]), [32, 1, 1, 8]);
    }
}
