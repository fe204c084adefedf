//! Pooling and resizing of images, by Burn's kernels. They read channels last, and give results with channels last.

use burn::tensor::module::{avg_pool2d, interpolate, max_pool2d};
use burn::tensor::ops::{AvgPoolOptions, InterpolateMode, InterpolateOptions, MaxPoolOptions};
use burn::tensor::{DType, FloatDType, Tensor};

use crate::OpError;

/// Value of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pool {
    /// Its largest pixel.
    Max,
    /// The mean of its pixels.
    Mean {
        /// True to count the zeros of the padding as pixels.
        counts_padding: bool,
    },
}

/// Windows of a pooling. Pairs are height, then width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolOptions {
    /// Pixels of a window.
    pub size: [usize; 2],
    /// Distance of neighbouring windows.
    pub stride: [usize; 2],
    /// Pixels before and after the image, of both axes; at most half a window.
    pub padding: [[usize; 2]; 2],
    /// Distance of neighbouring pixels of a window; 1 for means.
    pub dilation: [usize; 2],
    /// True to keep a last window that reaches beyond the padding.
    pub ceil: bool,
}

impl PoolOptions {
    /// Windows of `size` next to each other.
    pub const fn new(size: [usize; 2]) -> Self {
        Self { size, stride: size, padding: [[0; 2]; 2], dilation: [1; 2], ceil: false }
    }
}

/// Pools the windows of images.
///
/// # Shapes
/// x `[batch, channels, height, width]`, result `[batch, channels, out height, out width]`. Gradients flow to x.
///
/// # Errors
/// [`OpError::NotFloat`]; [`OpError::Window`] for windows that do not fit the image, or a mean with a dilation.
pub fn pool(x: Tensor<4>, kind: Pool, options: PoolOptions) -> Result<Tensor<4>, OpError> {
    let dtype = float(x.dtype())?;
    let PoolOptions { size, stride, padding, dilation, ceil } = options;
    let [_, _, height, width] = x.dims();
    for (axis, image) in [height, width].into_iter().enumerate() {
        let window = OpError::Window { size: size[axis], image, padding: padding[axis] };
        let least = size[axis].min(stride[axis]).min(dilation[axis]);
        if least == 0 || padding[axis].iter().any(|side| *side > size[axis] / 2) {
            return Err(window);
        }
        let reach = dilation[axis] * (size[axis] - 1) + 1;
        if reach > image + padding[axis].iter().sum::<usize>() {
            return Err(window);
        }
        if kind != Pool::Max && dilation[axis] > 1 {
            return Err(window);
        }
    }
    let padding = padding.map(|[before, after]| (before, after));
    Ok(match kind {
        Pool::Max => {
            let own = MaxPoolOptions::new(size).with_stride(stride).with_dilation(dilation);
            max_pool2d(x, MaxPoolOptions { padding, ceil_mode: ceil, ..own })
        }
        Pool::Mean { counts_padding } => {
            let own = AvgPoolOptions::new(size).with_stride(stride);
            let count_include_pad = counts_padding;
            let own = AvgPoolOptions { padding, ceil_mode: ceil, count_include_pad, ..own };
            // Burn may sum in the dtype of its input.
            avg_pool2d(x.cast(FloatDType::F32), own).cast(dtype)
        }
    })
}

/// Rule for a pixel of a resized image, from the pixels around its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resize {
    /// The pixel at the place rounded down: torch's `nearest`.
    Nearest,
    /// The nearest pixel: torch's `nearest-exact`.
    NearestExact,
    /// A blend of four pixels.
    Linear {
        /// True if the centres of the corner pixels stay at the corners; false if their outer edges do.
        align_corners: bool,
    },
    /// A blend of 16 pixels, by Keys' cubic with a = -0.75.
    Cubic {
        /// As that of [`Resize::Linear`].
        align_corners: bool,
    },
}

/// Resizes images to `size`, height and width. The first call with a size times kernels of Burn.
///
/// # Shapes
/// x `[batch, channels, height, width]`, result `[batch, channels, size[0], size[1]]`.
///
/// # Errors
/// [`OpError::NotFloat`]; [`OpError::Resize`] for an empty image; [`OpError::NoGradient`] for a tracked x, unless the mode is
/// [`Resize::Nearest`].
pub fn resize(x: Tensor<4>, size: [usize; 2], mode: Resize) -> Result<Tensor<4>, OpError> {
    float(x.dtype())?;
    let [_, _, height, width] = x.dims();
    if [height, width].contains(&0) || size.contains(&0) {
        return Err(OpError::Resize { from: [height, width], to: size });
    }
    if mode != Resize::Nearest && x.is_tracked() {
        return Err(OpError::NoGradient);
    }
    let (mode, align_corners) = match mode {
        Resize::Nearest => (InterpolateMode::Nearest, false),
        Resize::NearestExact => (InterpolateMode::NearestExact, false),
        Resize::Linear { align_corners } => (InterpolateMode::Bilinear, align_corners),
        Resize::Cubic { align_corners } => (InterpolateMode::Bicubic, align_corners),
    };
    let options = InterpolateOptions::new(mode).with_align_corners(align_corners);
    Ok(interpolate(x, options.with_output_size(size)))
}

fn float(dtype: DType) -> Result<FloatDType, OpError> {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(FloatDType::from(dtype)),
        other => Err(OpError::NotFloat(other)),
    }
}
