//! Convolution problems: sizes, layout, precision and epilogue.

use arch::DType;
use serde::{Deserialize, Serialize};
use tune::Cost;

use crate::matmul::{Epilogue, InvalidMatmul, Layout, MatmulProblem, Precision, Reading, Window};

/// One convolution. End with [`ConvProblem::checked`]. Pairs are height, then width; in one dimension the height is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ConvProblem {
    pub batch: u32,
    /// Height and width of x.
    pub image: [u32; 2],
    /// Channels of x, and of a second input that follow them; 0 without one.
    pub channels: [u32; 2],
    pub filters: u32,
    /// Height and width of a filter.
    pub taps: [u32; 2],
    /// Step of the filters; of a transposed convolution, the distance of neighbours of x.
    pub stride: [u32; 2],
    pub dilation: [u32; 2],
    /// Zeros before and after the image; negative ones leave pixels out. Of a transposed convolution, those of the convolution
    /// whose gradient it is.
    pub padding: [[i32; 2]; 2],
    /// Parts of the channels, and of the filters; a filter sees one part.
    pub groups: u32,
    pub reading: Reading,
    pub precision: Precision,
    /// Element type of the result.
    pub out: DType,
    pub epilogue: Epilogue,
    /// Elements from the bias of one image to that of the next: `filters`, or a larger multiple of 8. 0 for one bias of all images.
    #[serde(default)]
    pub bias_pitch: u32,
}

/// Reason why a convolution is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidConv {
    #[error("expected {what} of at least 1, got 0\nhint: leave out what has no elements")]
    Empty { what: &'static str },
    #[error(
        "expected groups that divide {what}, got {groups} groups of {count}\nhint: check the channels of the weight"
    )]
    Groups { what: &'static str, count: u32, groups: u32 },
    #[error("a bias per image has no groups\nhint: use one bias, or one group")]
    Bias,
    #[error("a second input has no groups\nhint: join the channels, or use one group")]
    Joined,
    #[error(
        "the filter of {taps} taps, {dilation} apart, is larger than the padded image of {size} pixels\nhint: use more padding"
    )]
    Window { taps: u32, dilation: u32, size: i64 },
    #[error(
        "expected {what} below 2^31 pixels, got {size}\nhint: use a smaller image or less padding"
    )]
    Large { what: &'static str, size: u64 },
    #[error(transparent)]
    Matmul(#[from] InvalidMatmul),
}

impl ConvProblem {
    /// Problem of square filters without padding, for the fields that a caller does not set.
    pub fn new(
        batch: u32,
        image: [u32; 2],
        [channels, filters]: [u32; 2],
        taps: [u32; 2],
        precision: Precision,
    ) -> Self {
        Self {
            batch,
            image,
            channels: [channels, 0],
            filters,
            taps,
            stride: [1, 1],
            dilation: [1, 1],
            padding: [[0, 0]; 2],
            groups: 1,
            reading: Reading::Plain,
            precision,
            out: precision.storage(),
            epilogue: Epilogue::default(),
            bias_pitch: 0,
        }
    }

    /// Returns the elements of the bias.
    pub fn bias_len(&self) -> usize {
        (self.batch - 1) as usize * self.bias_pitch as usize + self.filters as usize
    }

    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidConv`].
    pub fn checked(self) -> Result<Self, InvalidConv> {
        let pairs = [self.image, self.taps, self.stride, self.dilation];
        let least = |pair: [u32; 2]| pair[0].min(pair[1]);
        for (what, size) in [
            ("batch", self.batch),
            ("channels", self.channels[0]),
            ("filters", self.filters),
            ("groups", self.groups),
            ("image", least(pairs[0])),
            ("filter size", least(pairs[1])),
            ("stride", least(pairs[2])),
            ("dilation", least(pairs[3])),
        ] {
            if size == 0 {
                return Err(InvalidConv::Empty { what });
            }
        }
        let groups = self.groups;
        for (what, count) in [("channels", self.channels[0]), ("filters", self.filters)] {
            if count % groups != 0 {
                return Err(InvalidConv::Groups { what, count, groups });
            }
        }
        if groups > 1 && self.channels[1] > 0 {
            return Err(InvalidConv::Joined);
        }
        if groups > 1 && self.bias_pitch > 0 {
            return Err(InvalidConv::Bias);
        }
        for axis in 0..2 {
            let (canvas, reach) = (self.canvas(axis), self.reach(axis));
            let [before, after] = self.sides(axis);
            let size = canvas + before + after;
            // Positions are 32-bit numbers.
            let far = canvas.max(size).max(reach).unsigned_abs();
            if far >= 1 << 31 {
                return Err(InvalidConv::Large { what: "an axis", size: far });
            }
            if size <= reach {
                let (taps, dilation) = (self.taps[axis], self.dilation[axis]);
                return Err(InvalidConv::Window { taps, dilation, size });
            }
        }
        let [height, width] = self.image.map(u64::from);
        let size = u64::from(self.batch) * height * width;
        if size >= u64::from(u32::MAX) {
            return Err(InvalidConv::Large { what: "all images", size });
        }
        self.product()?;
        Ok(self)
    }

    /// Returns the size of the image that the window slides over.
    fn canvas(&self, axis: usize) -> i64 {
        let size = i64::from(self.image[axis]);
        match self.reading {
            Reading::Plain => size,
            Reading::Doubled => 2 * size,
            Reading::Spread => (size - 1) * i64::from(self.stride[axis]) + 1,
        }
    }

    /// Returns the distance from the first to the last tap.
    fn reach(&self, axis: usize) -> i64 {
        i64::from(self.dilation[axis]) * (i64::from(self.taps[axis]) - 1)
    }

    /// Returns the pixels of zeros on both sides of the image that the window slides over.
    fn sides(&self, axis: usize) -> [i64; 2] {
        self.padding[axis].map(|side| match self.reading {
            Reading::Spread => self.reach(axis) - i64::from(side),
            _ => side.into(),
        })
    }

    /// Returns height and width of the result.
    pub fn output(&self) -> [u32; 2] {
        [0, 1].map(|axis| {
            let size = self.canvas(axis) + self.sides(axis).iter().sum::<i64>();
            let step = if self.reading == Reading::Spread { 1 } else { self.stride[axis].into() };
            ((size - self.reach(axis) - 1) / step + 1) as u32
        })
    }

    /// Returns the elements of x, the second input, the filters and the result.
    pub fn lens(&self) -> [u64; 4] {
        let image = |channels: u32| {
            u64::from(self.batch)
                * u64::from(self.image[0])
                * u64::from(self.image[1])
                * u64::from(channels)
        };
        let [height, width] = self.output().map(u64::from);
        let depth = u64::from(self.taps[0] * self.taps[1])
            * u64::from((self.channels[0] + self.channels[1]) / self.groups);
        [
            image(self.channels[0]),
            image(self.channels[1]),
            u64::from(self.filters) * depth,
            u64::from(self.batch) * height * width * u64::from(self.filters),
        ]
    }

    /// Returns the windows of the image.
    pub(crate) fn window(&self) -> Window {
        let [first, second] = self.channels;
        let spread = self.reading == Reading::Spread;
        Window {
            image: self.image,
            output: self.output(),
            channels: [first / self.groups, second],
            pitch: [first, second],
            taps: self.taps,
            stride: if spread { [1, 1] } else { self.stride },
            dilation: self.dilation,
            before: [0, 1].map(|axis| self.sides(axis)[0] as i32),
            reading: self.reading,
            spread: if spread { self.stride } else { [1, 1] },
        }
    }

    /// Returns true if the rows of the image are those of the product.
    fn is_pointwise(&self) -> bool {
        self.taps == [1, 1]
            && self.stride == [1, 1]
            && self.padding == [[0, 0]; 2]
            && self.reading == Reading::Plain
            && self.groups == 1
            && self.channels[1] == 0
    }

    /// Returns the matmul that gives the same result: of the image itself, or of its windows.
    ///
    /// # Errors
    /// See [`InvalidMatmul`].
    pub(crate) fn product(&self) -> Result<MatmulProblem, InvalidMatmul> {
        let problem = if self.is_pointwise() {
            let pixels =
                u64::from(self.batch) * u64::from(self.image[0]) * u64::from(self.image[1]);
            let m = u32::try_from(pixels)
                .map_err(|_| InvalidMatmul::Large { axis: "m", size: pixels })?;
            let sizes = [m, self.filters, self.channels[0]];
            MatmulProblem::dense(1, sizes, [Layout::Row, Layout::Col], self.precision)?
        } else {
            let filters = [self.filters, self.groups];
            MatmulProblem::windows(self.batch, self.window(), filters, self.precision)?
        };
        let [height, width] = self.output();
        let (epilogue, bias_pitch) = (self.epilogue, self.bias_pitch);
        let period = if bias_pitch > 0 { height * width } else { 0 };
        MatmulProblem { out: self.out, epilogue, period, bias_pitch, ..problem }.checked()
    }

    /// Returns the matmul of equal sizes over a matrix of the windows, which a convolution never makes.
    ///
    /// # Panics
    /// Panics for a problem that is not checked.
    pub fn matrix(&self) -> MatmulProblem {
        let MatmulProblem { m, n, k, .. } = self.product().expect("a checked problem");
        let layouts = [Layout::Row, Layout::Col];
        let dense = MatmulProblem::dense(self.groups, [m, n, k], layouts, self.precision);
        let dense = dense.expect("sizes of a product");
        MatmulProblem { out: self.out, epilogue: self.epilogue, ..dense }
    }

    pub fn cost(&self) -> Cost {
        let [x, second, filters, out] = self.lens();
        let depth = filters / u64::from(self.filters);
        let Epilogue { bias, gate, residual, .. } = self.epilogue;
        let operands = x + second + filters + if bias { self.bias_len() as u64 } else { 0 };
        let results = out * (1 + u64::from(gate) + u64::from(residual));
        Cost {
            flops: 2 * out * depth,
            bytes: operands * self.precision.storage().size() as u64
                + results * self.out.size() as u64,
        }
    }
}
