//! Gradients of a convolution.
//!
//! ```text
//! dx = dout ∗ᵀ weight: a transposed convolution, or a convolution with steps if this one is transposed
//! dweight[:, r, s, :] = Σ over windows: doutᵀ · x at tap (r, s)         one matmul per tap
//! dbias = Σ dout
//! ```

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, Slice};
use kernels::conv::ConvProblem;
use kernels::matmul::{Epilogue, Precision, Reading};

use super::ConvOps;
use crate::Ctx;
use crate::call::{Call, Optional, summed_over_rows};
use crate::matmul::product_of;

/// Parents of a convolution's node: x, weight and bias; x stands in for an absent bias.
#[derive(Debug)]
pub(super) struct ConvBackward;

/// State that the gradients need.
#[derive(Clone)]
pub(super) struct Saved {
    pub(super) x: Option<NodeId>,
    pub(super) weight: Option<NodeId>,
    pub(super) biased: bool,
    pub(super) problem: ConvProblem,
    pub(super) ctx: Ctx,
}

impl std::fmt::Debug for Saved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Saved").field("problem", &self.problem).finish_non_exhaustive()
    }
}

impl<B: ConvOps> Backward<B, 3> for ConvBackward {
    type State = Saved;

    fn backward(
        self,
        ops: Ops<Saved, 3>,
        gradients: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let [to_x, to_weight, to_bias] = ops.parents;
        let Saved { x, weight, biased, problem, ctx } = ops.state;
        let dout = gradients.consume::<B>(&ops.node);
        if let (Some(node), Some(weight)) = (to_x, weight) {
            let weight = checkpointer.retrieve_node_output(weight);
            let dx = image_gradient::<B>(dout.clone(), weight, &problem, &ctx);
            gradients.register::<B>(node.id, dx);
        }
        if let (Some(node), Some(x)) = (to_weight, x) {
            let x = checkpointer.retrieve_node_output(x);
            let dweight = weight_gradient::<B>(x, dout.clone(), &problem, &ctx);
            gradients.register::<B>(node.id, dweight);
        }
        if let (Some(node), true) = (to_bias, biased) {
            gradients.register::<B>(node.id, summed_over_rows::<B>(dout));
        }
    }
}

fn reshaped<B: Backend, const D: usize>(t: FloatTensor<B>, shape: [usize; D]) -> FloatTensor<B> {
    B::float_reshape(t, Shape::new(shape))
}

fn sizes(pair: [u32; 2]) -> [usize; 2] {
    pair.map(|size| size as usize)
}

/// Exchanges filters and channels of a weight, and turns its taps around.
fn turned<B: Backend>(weight: FloatTensor<B>, groups: usize) -> FloatTensor<B> {
    let [filters, rows, cols, depth] = weight.shape().dims();
    let each = filters / groups;
    let weight = reshaped::<B, 5>(weight, [groups, each, rows, cols, depth]);
    let weight = B::float_permute(weight, &[0, 4, 2, 3, 1]);
    let weight = reshaped::<B, 4>(weight, [groups * depth, rows, cols, each]);
    B::float_flip(weight, &[1, 2])
}

/// Returns the gradient of x, `[batch, height, width, channels]`.
fn image_gradient<B: ConvOps>(
    dout: FloatTensor<B>,
    weight: FloatTensor<B>,
    p: &ConvProblem,
    ctx: &Ctx,
) -> FloatTensor<B> {
    let mut padding = p.padding;
    let doubled = p.reading == Reading::Doubled;
    let image = if doubled { p.image.map(|size| 2 * size) } else { p.image };
    let output = p.output();
    if p.reading != Reading::Spread {
        // Pixels past the last window have no gradient, but the result has them.
        for axis in 0..2 {
            let [before, _] = padding[axis].map(i64::from);
            let reach = i64::from(p.dilation[axis]) * i64::from(p.taps[axis] - 1);
            let spread = i64::from(output[axis] - 1) * i64::from(p.stride[axis]) + 1;
            padding[axis][1] = (spread + reach - before - i64::from(image[axis])) as i32;
        }
    }
    let problem = ConvProblem {
        image: output,
        channels: [p.filters, 0],
        filters: p.channels[0],
        padding,
        reading: match p.reading {
            Reading::Spread => Reading::Plain,
            Reading::Plain | Reading::Doubled => Reading::Spread,
        },
        precision: match p.precision {
            Precision::F16Acc16 => Precision::F16,
            other => other,
        },
        epilogue: Epilogue::default(),
        ..*p
    };
    let (call, absent) = (Call::new(ctx), || Optional::Absent);
    let weight = turned::<B>(weight, p.groups as usize);
    let checked = match problem.checked() {
        Ok(problem) => problem,
        Err(e) => panic!("the backward pass of a convolution failed: {e}"),
    };
    let dx = B::convolve(dout, weight, absent(), absent(), absent(), checked, call.clone());
    if let Some(e) = call.failed() {
        panic!("the backward pass of a convolution failed: {e}");
    }
    if !doubled {
        return dx;
    }
    let ([height, width], batch) = (sizes(p.image), p.batch as usize);
    let channels = p.channels[0] as usize;
    let squares = reshaped::<B, 6>(dx, [batch, height, 2, width, 2, channels]);
    let sum = B::float_sum_dim(B::float_sum_dim(squares, 2), 4);
    reshaped::<B, 4>(sum, [batch, height, width, channels])
}

/// Returns the gradient of the weight, `[filters, rows, cols, channels / groups]`.
fn weight_gradient<B: ConvOps>(
    x: FloatTensor<B>,
    dout: FloatTensor<B>,
    p: &ConvProblem,
    ctx: &Ctx,
) -> FloatTensor<B> {
    match p.reading {
        Reading::Plain => per_tap::<B>(x, dout, p, ctx),
        Reading::Doubled => {
            let ([height, width], batch) = (sizes(p.image), p.batch as usize);
            let channels = p.channels[0] as usize;
            let x = reshaped::<B, 6>(x, [batch, height, 1, width, 1, channels]);
            let x = B::float_expand(x, Shape::new([batch, height, 2, width, 2, channels]));
            let x = reshaped::<B, 4>(x, [batch, 2 * height, 2 * width, channels]);
            per_tap::<B>(x, dout, p, ctx)
        }
        // The roles of x and dout are exchanged, and so are filters and channels.
        Reading::Spread => turned::<B>(per_tap::<B>(dout, x, p, ctx), p.groups as usize),
    }
}

/// Returns `[of small, rows, cols, of image / groups]`: at each tap, the product of the channels of `small` `[batch, h, w, F]`
/// and of the pixels that its windows see of `image` `[batch, H, W, C]`.
fn per_tap<B: ConvOps>(
    image: FloatTensor<B>,
    small: FloatTensor<B>,
    p: &ConvProblem,
    ctx: &Ctx,
) -> FloatTensor<B> {
    let ([rows, cols], groups) = (sizes(p.taps), p.groups as usize);
    let (stride, dilation) = (sizes(p.stride), sizes(p.dilation));
    let [batch, down, across, filters] = small.shape().dims();
    let channels = image.shape()[3];
    let (each, depth, windows) = (filters / groups, channels / groups, batch * down * across);
    let reach = |axis: usize, count: usize, taps: usize| {
        (count - 1) * stride[axis] + (taps - 1) * dilation[axis] + 1
    };
    let seen = [reach(0, down, rows), reach(1, across, cols)];
    let image = framed::<B>(image, p.padding.map(|sides| sides[0]), seen);
    let small = reshaped::<B, 3>(small, [windows, groups, each]);
    let small = B::float_permute(small, &[1, 2, 0]);
    let dtype = p.precision.storage();
    let tap = |(row, col): (usize, usize)| {
        let along = |axis: usize, at: usize, count: usize| {
            let from = at * dilation[axis];
            let end = from + (count - 1) * stride[axis] + 1;
            Slice::new(from as isize, Some(end as isize), stride[axis] as isize)
        };
        let whole = |len: usize| Slice::from(0..len);
        let slices = [whole(batch), along(0, row, down), along(1, col, across), whole(channels)];
        let pixels = B::float_slice(image.clone(), &slices);
        let pixels = reshaped::<B, 3>(pixels, [windows, groups, depth]);
        let pixels = B::float_permute(pixels, &[1, 0, 2]);
        let product = product_of::<B>(small.clone(), pixels, dtype, ctx);
        reshaped::<B, 3>(product, [filters, 1, depth])
    };
    let taps = (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col)));
    let all = B::float_cat(taps.map(tap).collect(), 1);
    reshaped::<B, 4>(all, [filters, rows, cols, depth])
}

/// Returns the part of an image that windows see, with zeros around it: `size` pixels from `before` before its first one.
fn framed<B: ConvOps>(image: FloatTensor<B>, before: [i32; 2], size: [usize; 2]) -> FloatTensor<B> {
    let [batch, height, width, channels] = image.shape().dims();
    // In both images: the range of the pixels that are in the other one.
    let overlap = |axis: usize, len: usize| {
        let before = before[axis] as isize;
        let from = (-before).max(0) as usize;
        let to = before.max(0) as usize;
        let count = len.saturating_sub(from).min(size[axis].saturating_sub(to));
        (from..from + count, to..to + count)
    };
    let ((from_y, to_y), (from_x, to_x)) = (overlap(0, height), overlap(1, width));
    if to_y.len() == size[0] && to_x.len() == size[1] && size == [height, width] {
        return image;
    }
    let dtype = burn::tensor::FloatDType::from(image.dtype());
    let zeros =
        B::float_zeros(Shape::new([batch, size[0], size[1], channels]), &image.device(), dtype);
    if to_y.is_empty() || to_x.is_empty() {
        return zeros;
    }
    let at = |y, x| [Slice::from(0..batch), Slice::from(y), Slice::from(x), (0..channels).into()];
    let part = B::float_slice(image, &at(from_y, from_x));
    B::float_slice_assign(zeros, &at(to_y, to_x), part)
}
