//! Convolutions and pools over images of any rank.

use burn::backend::Dispatch;
use burn::backend::ops::{
    ConvOptions, ConvTransposeOptions, DeformConvOptions, FloatTensorOps, ModuleOps,
};
use burn::tensor::{DType, IntDType, TensorData};

use super::fused::mean_of_pixels;
use super::{Call, Inputs, Read, Run};
use crate::array::{Array, Kind, scalar_of};

pub(super) fn read(call: &Call<'_>) -> Read {
    Some(match call.op() {
        "Conv" => Windows::from_call(call)
            .map(|own| -> Run { Box::new(move |inputs| conv(inputs, &own)) }),
        "ConvTranspose" => transposed(call),
        "DeformConv" => deformed(call),
        "MaxPool" => pool(call, Pool::Max),
        "AveragePool" => pool(call, Pool::Mean),
        "LpPool" => {
            pool(call, Pool::Lp(call.float("p").or(call.int("p").map(|p| p as f64)).unwrap_or(2.0)))
        }
        "GlobalMaxPool" => Ok(global(call, Pool::Max)),
        "GlobalAveragePool" => Ok(global(call, Pool::Mean)),
        "GlobalLpPool" => Ok(global(call, Pool::Lp(call.int("p").unwrap_or(2) as f64))),
        _ => return None,
    })
}

/// Windows of a convolution or pool.
#[derive(Debug, Clone)]
pub(crate) struct Windows {
    /// Shape of a window; None if the filters define it.
    kernel: Option<Vec<usize>>,
    strides: Option<Vec<usize>>,
    dilations: Option<Vec<usize>>,
    /// Pads before each dimension, then after each.
    pads: Option<Vec<usize>>,
    auto: Auto,
    pub(crate) groups: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Auto {
    Given,
    Upper,
    Lower,
    Valid,
}

/// Padding of an image with zeros.
#[derive(Debug, Clone, Copy)]
pub enum Padding<'a> {
    /// Pads before each dimension, then after each.
    Pads(&'a [usize]),
    /// Pads that keep the size at stride 1; an odd pad goes to the end.
    SameUpper,
    /// [`Padding::SameUpper`], but an odd pad goes to the start.
    SameLower,
}

/// Sizes per dimension.
pub(super) struct Sizes {
    kernel: Vec<usize>,
    pub(super) strides: Vec<usize>,
    pub(super) dilations: Vec<usize>,
    pub(super) before: Vec<usize>,
    pub(super) after: Vec<usize>,
}

impl Windows {
    /// Returns windows whose shape the filters define.
    pub(crate) fn new(
        strides: &[usize],
        padding: Padding<'_>,
        dilations: &[usize],
        groups: usize,
    ) -> Self {
        let (pads, auto) = match padding {
            Padding::Pads(own) => (Some(own.to_vec()), Auto::Given),
            Padding::SameUpper => (None, Auto::Upper),
            Padding::SameLower => (None, Auto::Lower),
        };
        let [strides, dilations] = [strides, dilations].map(|own| Some(own.to_vec()));
        Self { kernel: None, strides, dilations, pads, auto, groups }
    }

    pub(super) fn from_call(call: &Call<'_>) -> Result<Self, String> {
        let list = |name: &str, least: i64| match call.ints(name) {
            None => Ok(None),
            Some(all) => {
                let each = |own: &i64| usize::try_from(*own).ok().filter(|_| *own >= least);
                let lengths = all.iter().map(each).collect::<Option<Vec<_>>>();
                lengths
                    .map(Some)
                    .ok_or_else(|| format!("expected {name} of {least} or more, got {all:?}"))
            }
        };
        Ok(Self {
            kernel: list("kernel_shape", 1)?,
            strides: list("strides", 1)?,
            dilations: list("dilations", 1)?,
            pads: list("pads", 0)?,
            auto: match call.text("auto_pad").unwrap_or("NOTSET") {
                "NOTSET" => Auto::Given,
                "SAME_UPPER" => Auto::Upper,
                "SAME_LOWER" => Auto::Lower,
                "VALID" => Auto::Valid,
                other => return Err(format!("auto_pad `{other}` is not supported")),
            },
            groups: usize::try_from(call.int("group").unwrap_or(1))
                .map_err(|_| "expected a group of 1 or more")?,
        })
    }

    pub(super) fn sizes(&self, image: &[usize], kernel: &[usize]) -> Result<Sizes, String> {
        let rank = image.len();
        let list = |own: &Option<Vec<usize>>| own.clone().unwrap_or_else(|| vec![1; rank]);
        let (strides, dilations) = (list(&self.strides), list(&self.dilations));
        let pads = self.pads.clone().unwrap_or_else(|| vec![0; 2 * rank]);
        if [kernel.len(), strides.len(), dilations.len()] != [rank; 3] || pads.len() != 2 * rank {
            let lengths = [kernel.len(), strides.len(), dilations.len(), pads.len()];
            let want = [rank, rank, rank, 2 * rank];
            return Err(format!(
                "expected {want:?} numbers in kernel, strides, dilations and pads, got {lengths:?}"
            ));
        }
        let (mut before, mut after) = (pads[..rank].to_vec(), pads[rank..].to_vec());
        for at in 0..rank {
            let reach = (kernel[at] - 1) * dilations[at] + 1;
            let all = (image[at].div_ceil(strides[at]).max(1) - 1) * strides[at] + reach;
            let all = all.saturating_sub(image[at]);
            (before[at], after[at]) = match self.auto {
                Auto::Given => (before[at], after[at]),
                Auto::Valid => (0, 0),
                Auto::Upper => (all / 2, all.div_ceil(2)),
                Auto::Lower => (all.div_ceil(2), all / 2),
            };
        }
        Ok(Sizes { kernel: kernel.to_vec(), strides, dilations, before, after })
    }
}

/// Function that convolves an image with filters and a bias.
pub(super) type Convolve =
    Box<dyn Fn(Array, Array, Option<Array>) -> Result<Array, String> + Send + Sync>;

/// Returns the convolution of a node, for operators with other inputs.
pub(super) fn plain(call: &Call<'_>) -> Result<Convolve, String> {
    let windows = Windows::from_call(call)?;
    Ok(Box::new(move |x, filters, bias| convolved(x, filters, bias, &windows)))
}

fn conv(inputs: &Inputs<'_>, windows: &Windows) -> Result<Vec<Array>, String> {
    Ok(vec![convolved(inputs.get(0)?, inputs.get(1)?, inputs.maybe(2), windows)?])
}

pub(super) fn convolved(
    x: Array,
    filters: Array,
    bias: Option<Array>,
    windows: &Windows,
) -> Result<Array, String> {
    let (own, filter) = (x.shape(), filters.shape());
    let (Some(image), Some(kernel)) = (own.get(2..), filter.get(2..)) else {
        return Err(format!("expected x and w of rank 3 or more, got {own:?} and {filter:?}"));
    };
    let sizes = windows.sizes(image, kernel)?;
    let dtype = x.dtype();
    if dtype.is_float() && dtype.size() == 2 {
        // Accumulate in f32.
        let [x, filters] = [x, filters].map(|own| own.cast(DType::F32));
        let bias = bias.map(|own| own.cast(DType::F32));
        return Ok(convolved(x, filters, bias, windows)?.cast(dtype));
    }
    let (x, filters) = (x.into_inner(), filters.into_inner());
    let bias = bias.map(Array::into_inner);
    let groups = windows.groups;
    fn options<const N: usize>(sizes: &Sizes, groups: usize) -> ConvOptions<N> {
        ConvOptions {
            stride: std::array::from_fn(|at| sizes.strides[at]),
            padding: std::array::from_fn(|at| (sizes.before[at], sizes.after[at])),
            dilation: std::array::from_fn(|at| sizes.dilations[at]),
            groups,
        }
    }
    Ok(Array::from_dispatch(match sizes.kernel.len() {
        1 => Dispatch::conv1d(x, filters, bias, options(&sizes, groups)),
        2 => Dispatch::conv2d(x, filters, bias, options(&sizes, groups)),
        3 => Dispatch::conv3d(x, filters, bias, options(&sizes, groups)),
        other => return Err(format!("expected 1 to 3 spatial dimensions, got {other}")),
    }))
}

/// Reads a deformable convolution, which Burn computes.
fn deformed(call: &Call<'_>) -> Result<Run, String> {
    let windows = Windows::from_call(call)?;
    let parts = usize::try_from(call.int("offset_group").unwrap_or(1));
    let parts = parts.map_err(|_| "expected an offset_group of 1 or more")?;
    Ok(Box::new(move |inputs| {
        let (x, filters, offset) = (inputs.get(0)?, inputs.get(1)?, inputs.get(2)?);
        let (own, filter, dtype) = (x.shape(), filters.shape(), x.dtype());
        if own.len() != 4 || filter.len() != 4 {
            return Err(format!("expected x and w of rank 4, got {own:?} and {filter:?}"));
        }
        let sizes = windows.sizes(&own[2..], &filter[2..])?;
        // Burn pads both sides equally: further zeros at the end become part of the image.
        let mut x = x;
        for at in 0..2 {
            x = extended(x, at + 2, [sizes.before[at], sizes.after[at]], 0.0);
        }
        let options = DeformConvOptions {
            stride: [0, 1].map(|at| sizes.strides[at]),
            padding: [0; 2],
            dilation: [0, 1].map(|at| sizes.dilations[at]),
            weight_groups: windows.groups,
            offset_groups: parts,
        };
        let wide = |own: Array| {
            own.cast(if dtype == DType::F64 { dtype } else { DType::F32 }).into_inner()
        };
        let [bias, mask] = [3, 4].map(|at| inputs.maybe(at).map(wide));
        let out =
            Dispatch::deform_conv2d(wide(x), wide(offset), wide(filters), mask, bias, options);
        Ok(vec![Array::from_dispatch(out).cast(dtype)])
    }))
}

fn transposed(call: &Call<'_>) -> Result<Run, String> {
    let windows = Windows::from_call(call)?;
    let list = |name: &str| {
        call.ints(name).map(|all| all.iter().map(|own| *own as usize).collect::<Vec<_>>())
    };
    let (more, want) = (list("output_padding"), list("output_shape"));
    Ok(Box::new(move |inputs| {
        let (x, filters, bias) = (inputs.get(0)?, inputs.get(1)?, inputs.maybe(2));
        let (own, filter) = (x.shape(), filters.shape());
        let (Some(image), Some(kernel)) = (own.get(2..), filter.get(2..)) else {
            return Err(format!("expected x and w of rank 3 or more, got {own:?} and {filter:?}"));
        };
        let given = Windows { auto: Auto::Given, ..windows.clone() };
        let mut sizes = given.sizes(image, kernel)?;
        let rank = kernel.len();
        let mut more = more.clone().unwrap_or_else(|| vec![0; rank]);
        for (at, more) in more.iter_mut().enumerate() {
            let reach = (kernel[at] - 1) * sizes.dilations[at] + 1;
            let full = sizes.strides[at] * (image[at] - 1) + *more + reach;
            let wanted = match (&want, windows.auto) {
                (Some(want), _) => Some(want[want.len() - rank + at]),
                (None, Auto::Upper | Auto::Lower) => Some(image[at] * sizes.strides[at]),
                (None, _) => None,
            };
            if let Some(wanted) = wanted {
                // A larger output is padded with zeros at its end.
                *more += wanted.saturating_sub(full);
                let all = (full + wanted.saturating_sub(full)) - wanted;
                (sizes.before[at], sizes.after[at]) = match windows.auto {
                    Auto::Upper => (all / 2, all.div_ceil(2)),
                    _ => (all.div_ceil(2), all / 2),
                };
            }
        }
        fn options<const N: usize>(sizes: &Sizes, groups: usize) -> ConvTransposeOptions<N> {
            let array = |list: &[usize]| std::array::from_fn(|at| list[at]);
            ConvTransposeOptions {
                stride: array(&sizes.strides),
                padding: [0; N],
                padding_out: [0; N],
                dilation: array(&sizes.dilations),
                groups,
            }
        }
        let groups = windows.groups;
        let (x, filters) = (x.into_inner(), filters.into_inner());
        let mut out = Array::from_dispatch(match rank {
            1 => Dispatch::conv_transpose1d(x, filters, None, options(&sizes, groups)),
            2 => Dispatch::conv_transpose2d(x, filters, None, options(&sizes, groups)),
            3 => Dispatch::conv_transpose3d(x, filters, None, options(&sizes, groups)),
            other => return Err(format!("expected 1 to 3 spatial dimensions, got {other}")),
        });
        // The result without padding is cropped, or padded with zeros.
        for (at, more) in more.into_iter().enumerate() {
            let len = out.shape()[at + 2] + more;
            out = extended(out, at + 2, [0, more], 0.0);
            out = out.narrow(at + 2, sizes.before[at], len - sizes.after[at]);
        }
        if let Some(bias) = bias {
            let mut each = vec![1; rank + 2];
            each[1] = bias.count();
            out = out.plus(bias.reshape(&each));
        }
        Ok(vec![out])
    }))
}

/// Pads a dimension with a value before and after.
fn extended(x: Array, at: usize, [before, after]: [usize; 2], value: f64) -> Array {
    let block = |len: usize| {
        let mut shape = x.shape();
        shape[at] = len;
        (len > 0).then(|| Array::full(&shape, scalar_of(value, x.dtype()), x.dtype(), &x.device()))
    };
    let parts: Vec<Array> =
        [block(before), Some(x.clone()), block(after)].into_iter().flatten().collect();
    if parts.len() == 1 { x } else { Array::concat(parts, at) }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Pool {
    Max,
    Mean,
    /// The p-norm.
    Lp(f64),
}

fn pool(call: &Call<'_>, kind: Pool) -> Result<Run, String> {
    let windows = Windows::from_call(call)?;
    let kernel = windows.kernel.clone().ok_or("attribute `kernel_shape` is missing")?;
    let (up, with_pads) = (call.flag("ceil_mode"), call.flag("count_include_pad"));
    let columns_first = call.flag("storage_order");
    let wants_places = call.outputs() > 1;
    Ok(Box::new(move |inputs| {
        let x = inputs.get(0)?;
        let own = x.shape();
        let image =
            own.get(2..).ok_or_else(|| format!("expected x of rank 3 or more, got {own:?}"))?;
        let sizes = windows.sizes(image, &kernel)?;
        let counts = sizes.counts(image, up);
        let dtype = x.dtype();
        if x.kind() != Kind::Float {
            // Bytes as floats, which are exact.
            let wide = x.clone().cast(DType::F32);
            let out = pooled(&wide, &sizes, &counts, kind, with_pads);
            return Ok(vec![out.cast(dtype)]);
        }
        if !wants_places {
            let whole = [&own[..2], &counts[..]].concat();
            if let Some(out) =
                by_kernel(&x, &sizes, kind, up, with_pads).filter(|own| own.shape() == whole)
            {
                return Ok(vec![out]);
            }
        }
        let out = pooled(&x, &sizes, &counts, kind, with_pads);
        if !wants_places {
            return Ok(vec![out]);
        }
        let least = f64::NEG_INFINITY;
        let unfolded = sizes.unfold(&x, &counts, least);
        let last = unfolded.rank() - 1;
        let largest = Array::from_dispatch(Dispatch::float_argmax(
            unfolded.into_inner(),
            last,
            IntDType::I64,
        ));
        let planes: usize = own[..2].iter().product();
        let pixels: usize = image.iter().product();
        let places: Vec<i64> = (0..planes)
            .flat_map(|plane| (0..pixels).map(move |at| (plane, at)))
            .map(|(plane, at)| {
                let mut rest = at;
                let mut index: Vec<usize> = Vec::new();
                for len in image.iter().rev() {
                    index.insert(0, rest % len);
                    rest /= len;
                }
                let inner = match columns_first {
                    false => at,
                    true => {
                        index.iter().zip(image).rev().fold(0, |sum, (own, len)| sum * len + own)
                    }
                };
                (plane * pixels + inner) as i64
            })
            .collect();
        let places = Array::from_data(TensorData::new(places, own.clone()), &x.device());
        let places = sizes.unfold(&places, &counts, 0.0).gather(last, largest);
        Ok(vec![out.clone(), places.reshape(&out.shape())])
    }))
}

/// Pools a 2-D image with our kernel; None for windows that it does not support.
fn by_kernel(x: &Array, sizes: &Sizes, kind: Pool, up: bool, with_pads: bool) -> Option<Array> {
    let pair = |own: &[usize]| <[usize; 2]>::try_from(own).ok();
    let kind = match kind {
        Pool::Max => ops::Pool::Max,
        Pool::Mean if !up => ops::Pool::Mean { counts_padding: with_pads },
        _ => return None,
    };
    let (before, after) = (pair(&sizes.before)?, pair(&sizes.after)?);
    let options = ops::PoolOptions {
        size: pair(&sizes.kernel)?,
        stride: pair(&sizes.strides)?,
        padding: [[before[0], after[0]], [before[1], after[1]]],
        dilation: pair(&sizes.dilations)?,
        ceil: up,
    };
    ops::pool(x.clone().tensor::<4>(), kind, options).ok().map(Array::from_tensor)
}

impl Sizes {
    /// Returns true if the windows do not overlap and cover the image.
    pub(super) fn are_patches(&self, image: &[usize]) -> bool {
        let all = |own: &[usize], value: usize| own.iter().all(|own| *own == value);
        self.strides == self.kernel
            && [&self.before, &self.after].iter().all(|own| all(own, 0))
            && all(&self.dilations, 1)
            && image.iter().zip(&self.kernel).all(|(own, by)| own.is_multiple_of(*by))
    }

    /// Returns the number of windows per dimension.
    fn counts(&self, image: &[usize], up: bool) -> Vec<usize> {
        (0..image.len())
            .map(|at| {
                let reach = (self.kernel[at] - 1) * self.dilations[at] + 1;
                let room = (image[at] + self.before[at] + self.after[at]).saturating_sub(reach);
                let count =
                    if up { room.div_ceil(self.strides[at]) } else { room / self.strides[at] } + 1;
                // The last window starts in the image or in its left padding.
                let begins = (count - 1) * self.strides[at] < image[at] + self.before[at];
                if up && !begins { count - 1 } else { count }
            })
            .collect()
    }

    /// Unfolds x to `[batch, channels, windows …, elements of a window]`, padded with a value.
    fn unfold(&self, x: &Array, counts: &[usize], value: f64) -> Array {
        let mut x = x.clone();
        let rank = counts.len();
        for at in (0..rank).rev() {
            let axis = at + 2;
            let len = x.shape()[axis];
            let reach = (counts[at] - 1) * self.strides[at]
                + (self.kernel[at] - 1) * self.dilations[at]
                + 1;
            let after = reach.saturating_sub(len + self.before[at]).max(self.after[at]);
            let padded = extended(x, axis, [self.before[at], after], value);
            let from: Vec<i64> = (0..counts[at])
                .flat_map(|window| (0..self.kernel[at]).map(move |tap| (window, tap)))
                .map(|(window, tap)| (window * self.strides[at] + tap * self.dilations[at]) as i64)
                .collect();
            let total = from.len();
            let mut shape = padded.shape();
            let device = padded.device();
            let taken =
                padded.select(axis, Array::from_data(TensorData::new(from, [total]), &device));
            shape.splice(axis..=axis, [counts[at], self.kernel[at]]);
            // Move the taps to the end, before those of later dimensions.
            let taken = taken.reshape(&shape);
            let all = taken.rank();
            let taps = all - (rank - at);
            let mut order: Vec<usize> = (0..all).filter(|own| *own != axis + 1).collect();
            order.insert(taps, axis + 1);
            x = taken.permute(&order);
        }
        let own = x.shape();
        let taps = self.kernel.iter().product();
        x.reshape(&[&own[..2 + rank], &[taps][..]].concat())
    }
}

fn pooled(x: &Array, sizes: &Sizes, counts: &[usize], kind: Pool, with_pads: bool) -> Array {
    let dtype = x.dtype();
    let wide = x.clone().cast(if dtype == DType::F64 { DType::F64 } else { DType::F32 });
    let shape = [&x.shape()[..2], counts].concat();
    let last = counts.len() + 2;
    let sum = |own: Array| Array::from_dispatch(Dispatch::float_sum_dim(own.into_inner(), last));
    let out = match kind {
        Pool::Max => {
            let all = sizes.unfold(&wide, counts, f64::NEG_INFINITY);
            Array::from_dispatch(Dispatch::float_max_dim(all.into_inner(), last))
        }
        Pool::Mean => {
            let all = sum(sizes.unfold(&wide, counts, 0.0));
            let mut one = x.shape();
            one[..2].fill(1);
            let ones = Array::full(&one, 1f64.into(), wide.dtype(), &wide.device());
            let count = match with_pads {
                false => sum(sizes.unfold(&ones, counts, 0.0)),
                true => {
                    let mut ones = ones;
                    for at in 0..counts.len() {
                        ones = extended(ones, at + 2, [sizes.before[at], sizes.after[at]], 1.0);
                    }
                    let none = vec![0; counts.len()];
                    let inner = Sizes {
                        kernel: sizes.kernel.clone(),
                        strides: sizes.strides.clone(),
                        dilations: sizes.dilations.clone(),
                        before: none.clone(),
                        after: none,
                    };
                    sum(inner.unfold(&ones, counts, 0.0))
                }
            };
            all.over(count)
        }
        Pool::Lp(p) => {
            let all = sizes.unfold(&wide, counts, 0.0).float(Dispatch::float_abs);
            let power = |own: Array, by: f64| {
                Array::from_dispatch(Dispatch::float_powf_scalar(own.into_inner(), by.into()))
            };
            power(sum(power(all, p)), 1.0 / p)
        }
    };
    out.reshape(&shape).cast(dtype)
}

/// Returns a pool over the whole image.
fn global(call: &Call<'_>, kind: Pool) -> Run {
    let ours = call.has_kernels();
    Box::new(move |inputs| {
        let x = inputs.get(0)?;
        let own = x.shape();
        let image =
            own.get(2..).ok_or_else(|| format!("expected x of rank 3 or more, got {own:?}"))?;
        let rank = image.len();
        if let Pool::Mean = kind
            && let Some(mean) = mean_of_pixels(inputs.ctx, ours, &x)?
        {
            return Ok(vec![mean.reshape(&[&own[..2], &vec![1; rank][..]].concat())]);
        }
        if matches!(kind, Pool::Max | Pool::Mean) && x.dtype().is_float() && rank > 0 {
            // Pixels as one dimension: a view in any layout.
            let pixels = x.reshape(&[own[0], own[1], image.iter().product()]).into_inner();
            let out = match kind {
                Pool::Max => Dispatch::float_max_dim(pixels, 2),
                _ => Dispatch::float_mean_dim(pixels, 2),
            };
            return Ok(vec![
                Array::from_dispatch(out).reshape(&[&own[..2], &vec![1; rank][..]].concat()),
            ]);
        }
        let sizes = Sizes {
            kernel: image.to_vec(),
            strides: vec![1; rank],
            dilations: vec![1; rank],
            before: vec![0; rank],
            after: vec![0; rank],
        };
        Ok(vec![pooled(&x, &sizes, &vec![1; rank], kind, false)])
    })
}
