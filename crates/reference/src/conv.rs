//! Convolutions over images with channels last, as a matmul of gathered rows.
//!
//! ```text
//! out[n, y, x, f] = Σ over r, s, c:  x[n, y·stride + r·dilation - top, x·stride + s·dilation - left, c] · w[f, r, s, c]
//!   x: [batch, height, width, channels]   w: [filters, rows, cols, channels / groups]
//!   out: [batch, out height, out width, filters]
//! ```
//!
//! Pixels outside of the image are 0; negative padding leaves pixels out. A transposed convolution puts `stride - 1` zeros between
//! neighbours of x, and steps by one. Its padding is that of the convolution whose gradient it is, and its filters are those of
//! torch turned around: tap r is torch's `rows - 1 - r`. With `upsample` each pixel of x is read as a square of four. In one
//! dimension the height is 1.
//!
//! The rows of the matmul are pixels of the result, gathered from x, so that rounding and epilogues are those of [`Matmul`].

use std::ops::Range;

use crate::compare::Comparison;
use crate::matmul::{Epilogue, Layout, Matmul, Sample, Strides};
use crate::{DType, Error};

/// Sizes of a convolution. Pairs are height, then width.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conv {
    pub batch: usize,
    /// Height and width of x.
    pub image: [usize; 2],
    pub channels: usize,
    pub filters: usize,
    /// Rows and columns of a filter.
    pub window: [usize; 2],
    pub stride: [usize; 2],
    pub dilation: [usize; 2],
    /// Pixels of zeros before and after the image.
    pub padding: [[isize; 2]; 2],
    /// Parts of the channels; a filter sees one of them.
    pub groups: usize,
    pub transposed: bool,
    pub upsample: bool,
    /// Precision of x and w.
    pub dtype: DType,
    /// Format of the accumulators.
    pub sums: DType,
    /// Format of the result.
    pub out_dtype: DType,
}

impl Conv {
    /// Returns height and width of the image that the window slides over, without padding.
    fn spread(&self) -> [usize; 2] {
        [0, 1].map(|axis| {
            let size = self.image[axis] * if self.upsample { 2 } else { 1 };
            if self.transposed { (size - 1) * self.stride[axis] + 1 } else { size }
        })
    }

    /// Returns the pixels of zeros in front of the image that the window slides over. They may be negative in a transposed
    /// convolution.
    fn before(&self) -> [isize; 2] {
        [0, 1].map(|axis| self.sides(axis)[0])
    }

    fn sides(&self, axis: usize) -> [isize; 2] {
        let reach = (self.dilation[axis] * (self.window[axis] - 1)) as isize;
        self.padding[axis].map(|side| match self.transposed {
            true => reach - side,
            false => side,
        })
    }

    /// Returns height and width of the result; 0 where the window does not fit.
    pub fn output(&self) -> [usize; 2] {
        let spread = self.spread();
        [0, 1].map(|axis| {
            let reach = (self.dilation[axis] * (self.window[axis] - 1) + 1) as isize;
            let size = spread[axis] as isize + self.sides(axis).iter().sum::<isize>();
            let step = if self.transposed { 1 } else { self.stride[axis] as isize };
            if size < reach { 0 } else { ((size - reach) / step + 1) as usize }
        })
    }

    /// Returns the lengths of x, w and the result.
    pub fn lens(&self) -> [usize; 3] {
        let [height, width] = self.output();
        [
            self.batch * self.image[0] * self.image[1] * self.channels,
            self.filters * self.depth(),
            self.batch * height * width * self.filters,
        ]
    }

    /// Returns the number of products of each sum.
    fn depth(&self) -> usize {
        self.window[0] * self.window[1] * (self.channels / self.groups)
    }

    /// Returns the element of x behind a pixel of the padded image; none outside and between.
    fn pixel(&self, place: [isize; 2]) -> Option<[usize; 2]> {
        let mut found = [0; 2];
        for axis in 0..2 {
            let at = usize::try_from(place[axis]).ok()?;
            let step = if self.transposed { self.stride[axis] } else { 1 };
            if at >= self.spread()[axis] || at % step != 0 {
                return None;
            }
            found[axis] = at / step / if self.upsample { 2 } else { 1 };
        }
        Some(found)
    }

    /// Gathers what the window sees at pixels of the result, `[pixels, rows, cols, channels / groups]`.
    fn gather(&self, x: &[f32], pixels: &[usize], channels: &Range<usize>) -> Vec<f32> {
        let ([height, width], before) = (self.output(), self.before());
        let mut lines = Vec::with_capacity(pixels.len() * self.depth());
        for pixel in pixels {
            let (image, y, across) =
                (pixel / (height * width), pixel / width % height, pixel % width);
            for row in 0..self.window[0] {
                for col in 0..self.window[1] {
                    let place = [(0, y, row), (1, across, col)].map(|(axis, at, tap)| {
                        let step = if self.transposed { 1 } else { self.stride[axis] };
                        (at * step + tap * self.dilation[axis]) as isize - before[axis]
                    });
                    match self.pixel(place) {
                        Some([y, across]) => {
                            let line = (image * self.image[0] + y) * self.image[1] + across;
                            let at = line * self.channels;
                            lines.extend(&x[at + channels.start..at + channels.end]);
                        }
                        None => lines.resize(lines.len() + channels.len(), 0.0),
                    }
                }
            }
        }
        lines
    }

    /// Returns the matmul of some pixels with the filters of a group.
    fn matmul(&self, pixels: usize) -> Matmul {
        let (n, k) = (self.filters / self.groups, self.depth());
        let plain = Matmul::contiguous(&[], [pixels, n, k], Layout::Row, Layout::Col, self.dtype);
        let rhs = Strides { batch: Vec::new(), row: 1, col: k };
        Matmul { rhs, sums: self.sums, out_dtype: self.out_dtype, ..plain }
    }

    /// Compares a result with the reference at some of its pixels and filters; at all of them without a seed. Bias, gate and
    /// residual are those of the whole result: `[filters]` or `[batch, filters]`, and the result's shape.
    ///
    /// # Errors
    /// A slice of another length; an epilogue with a norm or a second matmul, which a convolution lacks.
    pub fn check(
        &self,
        sample: Option<u64>,
        x: &[f32],
        w: &[f32],
        epilogue: Epilogue<'_>,
        out: &[f32],
    ) -> Result<Comparison, Error> {
        let [x_len, w_len, out_len] = self.lens();
        let biases = epilogue.bias.map_or(1, |bias| bias.len() / self.filters.max(1));
        let per_image = if biases > 1 { self.batch } else { 1 };
        let whole = |values: Option<&[f32]>| values.map_or(out_len, <[f32]>::len);
        for (what, need, have) in [
            ("x", x_len, x.len()),
            ("w", w_len, w.len()),
            ("out", out_len, out.len()),
            ("bias", per_image * self.filters, epilogue.bias.map_or(self.filters, <[f32]>::len)),
            ("gate", out_len, whole(epilogue.gate)),
            ("residual", out_len, whole(epilogue.residual)),
            ("norm", 0, epilogue.norm.map_or(0, |norm| norm.weight.len())),
            ("up", 0, epilogue.up.map_or(0, |up| up.rhs.len())),
        ] {
            if need != have {
                return Err(Error::Length { what, need, have });
            }
        }
        let all = out_len / self.filters.max(1);
        let pixels = match sample {
            Some(seed) => self.matmul(all).sample(seed).rows,
            None => (0..all).collect(),
        };
        let (n, channels) = (self.filters / self.groups, self.channels / self.groups);
        let mut found = Vec::new();
        let size: usize = self.output().iter().product();
        let split =
            (0..self.groups).flat_map(|group| (0..per_image).map(move |image| (group, image)));
        for (group, image) in split {
            let filters = group * n..(group + 1) * n;
            let own = |pixel: &usize| per_image == 1 || pixel / size == image;
            let pixels: Vec<_> = pixels.iter().copied().filter(own).collect();
            if pixels.is_empty() {
                continue;
            }
            let lines = self.gather(x, &pixels, &(group * channels..(group + 1) * channels));
            let own = &w[filters.start * self.depth()..filters.end * self.depth()];
            let of = |values: &[f32]| -> Vec<f32> {
                let rows = pixels.iter().map(|pixel| pixel * self.filters);
                rows.flat_map(|at| &values[at + filters.start..at + filters.end]).copied().collect()
            };
            let [gate, residual] = [epilogue.gate, epilogue.residual].map(|part| part.map(of));
            let epilogue = Epilogue {
                bias: epilogue.bias.map(|bias| {
                    let first = image * self.filters;
                    &bias[first + filters.start..first + filters.end]
                }),
                gate: gate.as_deref(),
                residual: residual.as_deref(),
                ..epilogue
            };
            let matmul = self.matmul(pixels.len());
            let everything = matmul.everything();
            let sample = match sample {
                Some(seed) => Sample { rows: everything.rows, ..matmul.sample(seed) },
                None => everything,
            };
            found.push(matmul.check(&sample, &lines, own, epilogue, &of(out))?);
        }
        Ok(Comparison::worst(found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Distribution, fill};

    /// Scatters x over the padded result: the definition of a transposed convolution; and without `transposed`, gathers.
    fn directly(conv: &Conv, x: &[f32], w: &[f32]) -> Vec<f64> {
        let [height, width] = conv.output();
        let (n, channels) = (conv.filters / conv.groups, conv.channels / conv.groups);
        let mut out = vec![0.0; conv.lens()[2]];
        let scale = if conv.upsample { 2 } else { 1 };
        let sizes = conv.image.map(|size| size * scale);
        for image in 0..conv.batch {
            for y in 0..sizes[0] {
                for across in 0..sizes[1] {
                    for row in 0..conv.window[0] {
                        for col in 0..conv.window[1] {
                            // The place in the result that this tap of this pixel adds to.
                            let to = [(0, y, row), (1, across, col)].map(|(axis, at, tap)| {
                                let (at, reach) =
                                    (at as isize, (tap * conv.dilation[axis]) as isize);
                                let side = conv.padding[axis][0];
                                let step = conv.stride[axis] as isize;
                                if conv.transposed {
                                    // A transposed convolution turns its filters around.
                                    let last = (conv.window[axis] - 1) * conv.dilation[axis];
                                    return Some(at * step + last as isize - reach - side);
                                }
                                let from = at + side - reach;
                                (from % step == 0).then_some(from / step)
                            });
                            let [Some(down), Some(right)] = to else { continue };
                            if !(0..height as isize).contains(&down)
                                || !(0..width as isize).contains(&right)
                            {
                                continue;
                            }
                            let pixel = (image * height + down as usize) * width + right as usize;
                            let from = (image * conv.image[0] + y / scale) * conv.image[1]
                                + across / scale;
                            for f in 0..conv.filters {
                                let line =
                                    ((f * conv.window[0] + row) * conv.window[1] + col) * channels;
                                for c in 0..channels {
                                    let given = x[from * conv.channels + f / n * channels + c];
                                    out[pixel * conv.filters + f] +=
                                        f64::from(given) * f64::from(w[line + c]);
                                }
                            }
                        }
                    }
                }
            }
        }
        out
    }

    #[test]
    fn gathered_rows_are_the_convolution() {
        let plain = Conv {
            batch: 2,
            image: [5, 6],
            channels: 4,
            filters: 6,
            window: [3, 2],
            stride: [1, 1],
            dilation: [1, 1],
            padding: [[1, 1], [0, 1]],
            groups: 1,
            transposed: false,
            upsample: false,
            dtype: DType::F32,
            sums: DType::F32,
            out_dtype: DType::F32,
        };
        let of = |changed: &dyn Fn(&mut Conv)| {
            let mut conv = plain.clone();
            changed(&mut conv);
            conv
        };
        for conv in [
            plain.clone(),
            of(&|c| (c.stride, c.padding) = ([3, 2], [[2, 0], [1, 3]])),
            of(&|c| (c.dilation, c.padding) = ([2, 5], [[4, 4], [5, 5]])),
            of(&|c| c.groups = 2),
            of(&|c| c.upsample = true),
            of(&|c| (c.image, c.window, c.padding) = ([1, 9], [1, 4], [[0, 0], [2, 2]])),
            of(&|c| (c.image, c.padding) = ([1, 1], [[4, 4], [4, 4]])),
            of(&|c| (c.transposed, c.padding) = (true, [[0, 0], [0, 0]])),
            of(&|c| (c.transposed, c.stride, c.groups) = (true, [2, 3], 2)),
            of(&|c| (c.transposed, c.dilation, c.padding) = (true, [2, 1], [[5, 3], [1, 0]])),
            of(&|c| (c.transposed, c.stride, c.padding) = (true, [2, 2], [[1, 0], [0, -1]])),
            of(&|c| c.padding = [[-1, 1], [1, -2]]),
        ] {
            let [x_len, w_len, out_len] = conv.lens();
            assert!(out_len > 0, "{conv:?}");
            let x = fill(1, x_len, Distribution::Normal);
            let w = fill(2, w_len, Distribution::Normal);
            let out: Vec<f32> = directly(&conv, &x, &w).iter().map(|sum| *sum as f32).collect();
            let compared = conv.check(None, &x, &w, Epilogue::NONE, &out).expect("lengths");
            assert!(compared.passed, "{conv:?}: {compared}");
            let mut wrong = out;
            wrong[out_len / 2] += 1.0;
            let compared = conv.check(None, &x, &w, Epilogue::NONE, &wrong).expect("lengths");
            assert!(!compared.passed, "{conv:?}");
        }
        let none = of(&|c| (c.window, c.padding) = ([9, 9], [[0, 0], [0, 0]]));
        assert_eq!(none.output(), [0, 0]);
    }
}
