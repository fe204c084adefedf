//! Rows of lhs that are windows of an image: a convolution as a matmul, without a matrix of the windows.
//!
//! ```text
//! lhs[(b, y, x), (r, s, c)] = image[b, y · stride + r · dilation - before, x · stride + s · dilation - before, c]
//! ```
//!
//! A pixel outside of the image is 0. Channels past those of the first image are those of a second one, so that nothing needs to be
//! joined. [`Reading`] changes the image that the window slides over.
//!
//! Division is slow: the path of `mma.sync` decomposes its rows once a block, and its depth once a split of k
//! ([`window_feed`](super::mma)). The other paths divide for every vector.
//!
//! Sources: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning" (2014); Dumoulin and Visin, "A guide to convolution
//! arithmetic for deep learning" (2016) for transposed convolutions.

use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};

/// Image that the window slides over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reading {
    /// The image itself.
    Plain,
    /// The image with each pixel as a square of four: nearest-neighbour resizing by two.
    Doubled,
    /// The image with `spread - 1` zeros between neighbours: a transposed convolution.
    Spread,
}

/// Geometry of the windows. Pairs are height, then width.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Window {
    /// Height and width of the image in memory.
    pub image: [u32; 2],
    /// Windows of an image, down and across.
    pub output: [u32; 2],
    /// Channels of the image that a window sees, and those of a second image; 0 without one.
    pub channels: [u32; 2],
    /// Elements from one pixel to the next, of both images.
    pub pitch: [u32; 2],
    /// Rows and columns of a window.
    pub taps: [u32; 2],
    pub stride: [u32; 2],
    pub dilation: [u32; 2],
    /// Pixels from the first window's corner to the image, above and to the left; negative inside of the image.
    pub before: [i32; 2],
    pub reading: Reading,
    /// Distance of neighbours that [`Reading::Spread`] puts zeros between; 1 otherwise.
    pub spread: [u32; 2],
}

impl Window {
    /// Returns the channels of both images.
    pub const fn depth(&self) -> u32 {
        self.channels[0] + self.channels[1]
    }

    /// Returns height and width of the image that the window slides over.
    pub const fn canvas(&self) -> [u32; 2] {
        let [height, width] = self.image;
        let [down, across] = self.spread;
        match self.reading {
            Reading::Plain => [height, width],
            Reading::Doubled => [2 * height, 2 * width],
            Reading::Spread => [(height - 1) * down + 1, (width - 1) * across + 1],
        }
    }

    /// Returns the elements of one of the images, for `images` of them.
    pub(crate) const fn len(&self, images: u32, part: usize) -> u64 {
        if self.channels[part] == 0 {
            return 0;
        }
        images as u64 * self.image[0] as u64 * self.image[1] as u64 * self.pitch[part] as u64
    }

    /// Returns true if the positions of a window fit in 16 bits each, or the image has one row.
    pub(crate) fn packs(&self) -> bool {
        let reach = |axis: usize| {
            let last = u64::from(self.output[axis]) * u64::from(self.stride[axis]);
            let far = u64::from(self.taps[axis]) * u64::from(self.dilation[axis]);
            last + far
                + u64::from(self.before[axis].unsigned_abs())
                + u64::from(self.canvas()[axis])
        };
        self.is_flat() || (reach(0) < 1 << 15 && reach(1) < 1 << 15)
    }

    /// Returns true in one dimension.
    const fn is_flat(&self) -> bool {
        self.image[0] == 1 && self.taps[0] == 1 && self.output[0] == 1 && self.before[0] == 0
    }

    /// Part of the tuner's key: what decides how fast windows are read.
    pub(crate) fn bucket(&self) -> String {
        let ([rows, cols], [down, across]) = (self.taps, self.stride);
        let reading = match self.reading {
            Reading::Plain => "",
            Reading::Doubled => " doubled",
            Reading::Spread => " spread",
        };
        let joined = if self.channels[1] > 0 { " joined" } else { "" };
        let deep = self.depth().next_power_of_two().min(64);
        format!(" window {rows}x{cols} stride {down}x{across} c{deep}{reading}{joined}")
    }
}

/// Pixel of a window outside of the image.
pub(crate) const NONE: u32 = u32::MAX;
/// Added to positions, so that they are not negative in 16 bits.
const BIAS: u32 = 1 << 15;

/// Geometry of the windows on the device, and the second image.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Gather<F: Float, N: Size> {
    pub(crate) second: ComptimeOption<Box<[Vector<F, N>]>>,
    height: u32,
    width: u32,
    /// Windows of an image, and of a row of it.
    pub(crate) windows: u32,
    across: u32,
    /// Channels of the first image, and of both.
    pub(crate) first: u32,
    pub(crate) channels: u32,
    pub(crate) pitch: u32,
    pub(crate) second_pitch: u32,
    pub(crate) rows: u32,
    pub(crate) cols: u32,
    stride_y: u32,
    stride_x: u32,
    dilation_y: u32,
    dilation_x: u32,
    before_y: u32,
    before_x: u32,
    spread_y: u32,
    spread_x: u32,
    #[cube(comptime)]
    reading: Reading,
    #[cube(comptime)]
    flat: bool,
    /// True with a second image; repeated for the kernel's hash, see [`Finish`](super::Finish).
    #[cube(comptime)]
    pub(crate) joined: bool,
}

impl<F: Float, N: Size> GatherLaunch<F, N> {
    /// Launch arguments; the second image has `images` images, in vectors of `width`.
    pub(crate) fn of(window: &Window, second: Option<&Handle>, images: u32, width: usize) -> Self {
        let joined = second.is_some();
        let second = second.map(|handle| {
            let len = window.len(images, 1) as usize / width;
            // SAFETY: the caller passes an image of this size.
            unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
        });
        let [before_y, before_x] = window.before.map(i32::cast_unsigned);
        Self::new(
            ComptimeOptionArgs::from(second),
            window.image[0],
            window.image[1],
            window.output[0] * window.output[1],
            window.output[1],
            window.channels[0],
            window.depth(),
            window.pitch[0],
            window.pitch[1],
            window.taps[0],
            window.taps[1],
            window.stride[0],
            window.stride[1],
            window.dilation[0],
            window.dilation[1],
            before_y,
            before_x,
            window.spread[0],
            window.spread[1],
            window.reading,
            window.is_flat(),
            joined,
        )
    }
}

/// Corner of a window: its image's first pixel, [`NONE`] for no window, and its position there.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Corner {
    pub(crate) image: u32,
    /// `y` and `x` with [`BIAS`], in 16 bits each; `x` alone if the image has one row.
    pub(crate) place: u32,
}

/// Place in a window, and channel.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Tap {
    pub(crate) row: u32,
    pub(crate) col: u32,
    pub(crate) channel: u32,
}

#[cube]
impl<F: Float, N: Size> Gather<F, N> {
    /// Returns the corner of the window of row `row` of the matmul; of no window from `end` on.
    pub(crate) fn corner(&self, row: u32, end: u32) -> Corner {
        let image = row / self.windows;
        let window = row % self.windows;
        let x = window % self.across * self.stride_x - self.before_x;
        let image = select(row < end, image * self.height * self.width, NONE.runtime());
        if comptime!(self.flat) {
            Corner { image, place: x }
        } else {
            let y = window / self.across * self.stride_y - self.before_y;
            Corner { image, place: ((y + BIAS) << 16u32) | ((x + BIAS) & 0xffff) }
        }
    }

    /// Returns the tap at depth `k`.
    pub(crate) fn tap(&self, k: u32) -> Tap {
        let tap = k / self.channels;
        Tap { row: tap / self.cols, col: tap % self.cols, channel: k % self.channels }
    }

    /// Returns the tap `more` channels further on.
    pub(crate) fn after(&self, tap: &Tap, more: u32) -> Tap {
        let (mut row, mut col, mut channel) = (tap.row, tap.col, tap.channel + more);
        while channel >= self.channels {
            channel -= self.channels;
            col += 1;
            if col == self.cols {
                col = 0u32;
                row += 1;
            }
        }
        Tap { row, col, channel }
    }

    /// Returns the pixel of the image at a tap of a window; [`NONE`] outside.
    pub(crate) fn pixel(&self, corner: &Corner, tap: &Tap) -> u32 {
        let mut x = corner.place + tap.col * self.dilation_x;
        let mut y = 0u32.runtime();
        if comptime!(!self.flat) {
            x = (corner.place & 0xffff) + tap.col * self.dilation_x - BIAS;
            y = (corner.place >> 16u32) + tap.row * self.dilation_y - BIAS;
        }
        // Positions below 0 are large numbers.
        let (mut height, mut width) = (self.height, self.width);
        let mut between = false.runtime();
        match comptime!(self.reading) {
            Reading::Plain => {}
            Reading::Doubled => {
                between = (y | x) >= 0x8000_0000u32;
                x /= 2u32;
                y /= 2u32;
            }
            Reading::Spread => {
                between =
                    (y | x) >= 0x8000_0000u32 || y % self.spread_y != 0 || x % self.spread_x != 0;
                y /= self.spread_y;
                x /= self.spread_x;
            }
        }
        if comptime!(self.flat) {
            height = 1u32.runtime();
            width = self.width;
        }
        let inside =
            corner.image != NONE && !between && y < height && x < width && tap.row < self.rows;
        select(inside, corner.image + y * self.width + x, NONE.runtime())
    }

    /// Returns the vector at a pixel and a channel of both images; 0 at no pixel. The image begins at element `start`.
    pub(crate) fn vector(
        &self,
        image: &[Vector<F, N>],
        start: usize,
        pixel: u32,
        channel: u32,
    ) -> Vector<F, N> {
        let mut value = Vector::<F, N>::new(F::new(0.0));
        if pixel != NONE {
            let at = pixel as usize;
            #[comptime]
            match &self.second {
                ComptimeOption::Some(second) => {
                    if channel < self.first {
                        value = image
                            [(start + at * self.pitch as usize + channel as usize) / N::value()];
                    } else {
                        let channel = (channel - self.first) as usize;
                        value = second[(at * self.second_pitch as usize + channel) / N::value()];
                    }
                }
                ComptimeOption::None => {
                    value =
                        image[(start + at * self.pitch as usize + channel as usize) / N::value()];
                }
            }
        }
        value
    }
}
