//! Operators that run on the host in f64: Unique, AffineGrid, MaxUnpool, Col2Im and RoiAlign.

use burn::tensor::{DType, TensorData};

use super::{Call, Inputs, Read, axis};
use crate::array::Array;

pub(super) fn read(call: &Call<'_>) -> Read {
    Some(Ok(match call.op() {
        "Unique" => {
            let (at, sorted) = (call.int("axis"), call.int("sorted") != Some(0));
            Box::new(move |inputs| unique(inputs, at, sorted))
        }
        "AffineGrid" => {
            let corners = call.flag("align_corners");
            Box::new(move |inputs| affine_grid(inputs, corners))
        }
        "MaxUnpool" => {
            let list = |name: &str, usual: i64, rank: usize| {
                call.ints(name).map_or_else(|| vec![usual; rank], <[i64]>::to_vec)
            };
            let kernel = list("kernel_shape", 1, 0);
            let (strides, pads) =
                (list("strides", 1, kernel.len()), list("pads", 0, 2 * kernel.len()));
            Box::new(move |inputs| max_unpool(inputs, &kernel, &strides, &pads))
        }
        "Col2Im" => {
            let list = |name: &str| call.ints(name).map(<[i64]>::to_vec);
            let lists = [list("dilations"), list("pads"), list("strides")];
            Box::new(move |inputs| col2im(inputs, &lists))
        }
        "RoiAlign" => {
            let size = |name: &str| call.int(name).unwrap_or(1).max(1) as usize;
            let options = RoiAlign {
                size: [size("output_height"), size("output_width")],
                ratio: call.int("sampling_ratio").unwrap_or(0).max(0) as usize,
                scale: call.float("spatial_scale").unwrap_or(1.0),
                largest: call.text("mode") == Some("max"),
                // Until opset 15 coordinates were not shifted by half a pixel.
                shift: match call.text("coordinate_transformation_mode") {
                    Some("output_half_pixel") => 0.0,
                    None if call.opset < 16 => 0.0,
                    _ => 0.5,
                },
            };
            Box::new(move |inputs| roi_align(inputs, &options))
        }
        _ => return None,
    }))
}

fn numbers(values: Vec<f64>, shape: Vec<usize>, like: &Array) -> Array {
    let data = TensorData::new(values, shape).convert_dtype(like.dtype());
    Array::from_data(data, &like.device())
}

/// Returns distinct slices along an axis (or elements), their first indices, the inverse indices
/// and the counts.
fn unique(inputs: &Inputs<'_>, at: Option<i64>, sorted: bool) -> Result<Vec<Array>, String> {
    let x = inputs.get(0)?;
    let (x, at) = match at {
        Some(at) => (x.clone(), axis(at, x.rank())?),
        None => {
            let count = x.count();
            (x.reshape(&[count]), 0)
        }
    };
    let shape = x.shape();
    let len = shape[at];
    // Each slice as a row.
    let mut order = vec![at];
    order.extend((0..shape.len()).filter(|own| *own != at));
    let data = x.clone().permute(&order).to_data()?;
    // Integers are compared as integers, not as floats.
    let values: Vec<i128> = match data.dtype() {
        own if own.is_float() => data.iter::<f64>().map(|own| i128::from(ordered(own))).collect(),
        DType::U64 => data.iter::<u64>().map(i128::from).collect(),
        _ => data.iter::<i64>().map(i128::from).collect(),
    };
    let width = values.len().checked_div(len).unwrap_or(0);
    let line = |row: usize| &values[row * width..(row + 1) * width];
    let compare = |one: &usize, other: &usize| line(*one).cmp(line(*other)).then(one.cmp(other));
    let mut all: Vec<usize> = (0..len).collect();
    all.sort_by(compare);
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for own in all {
        match groups.last_mut().filter(|group| line(group[0]) == line(own)) {
            Some(group) => group.push(own),
            None => groups.push(vec![own]),
        }
    }
    if !sorted {
        groups.sort_by_key(|group| group[0]);
    }
    let mut inverse = vec![0i64; len];
    for (number, group) in groups.iter().enumerate() {
        group.iter().for_each(|own| inverse[*own] = number as i64);
    }
    let list = |values: Vec<i64>| {
        let len = values.len();
        Array::from_data(TensorData::new(values, [len]), inputs.host)
    };
    let first: Vec<i64> = groups.iter().map(|group| group[0] as i64).collect();
    let counts = groups.iter().map(|group| group.len() as i64).collect();
    let distinct = x.select(at, list(first.clone()));
    Ok(vec![distinct, list(first), list(inverse), list(counts)])
}

/// Returns an integer key with the order of `total_cmp`; both zeros have one key.
fn ordered(own: f64) -> i64 {
    let bits = (own + 0.0).to_bits().cast_signed();
    if bits < 0 { bits ^ i64::MAX } else { bits }
}

/// Computes sampling coordinates from -1 to 1 of an affine transform: `theta · (x, y, 1)`.
fn affine_grid(inputs: &Inputs<'_>, corners: bool) -> Result<Vec<Array>, String> {
    let (theta, size) = (inputs.get(0)?, inputs.lengths(1)?);
    let [batch, _, image @ ..] = &size[..] else {
        return Err(format!("expected a size [batch, channels, …], got {size:?}"));
    };
    let dims = image.len();
    if theta.shape() != [*batch, dims, dims + 1] {
        let want = [*batch, dims, dims + 1];
        return Err(format!("expected theta of shape {want:?}, got {:?}", theta.shape()));
    }
    let values = theta.floats()?;
    let place = |at: usize, len: usize| match (corners, len) {
        (true, 1) => 0.0,
        (true, _) => 2.0 * at as f64 / (len - 1) as f64 - 1.0,
        (false, _) => (2.0 * at as f64 + 1.0) / len as f64 - 1.0,
    };
    let pixels: usize = image.iter().product();
    let mut out = Vec::with_capacity(batch * pixels * dims);
    for own in values.chunks(dims * (dims + 1)) {
        for pixel in 0..pixels {
            let mut rest = pixel;
            // x, the first coordinate, belongs to the last dimension.
            let mut point = Vec::with_capacity(dims);
            for len in image.iter().rev() {
                point.push(place(rest % len, *len));
                rest /= len;
            }
            for row in own.chunks(dims + 1) {
                let rotated: f64 = row.iter().zip(&point).map(|(own, place)| own * place).sum();
                out.push(rotated + row[dims]);
            }
        }
    }
    let shape = [&[*batch][..], image, &[dims]].concat();
    Ok(vec![numbers(out, shape, &theta)])
}

/// Scatters the results of a max pool to their indices; other elements are 0.
fn max_unpool(
    inputs: &Inputs<'_>,
    kernel: &[i64],
    strides: &[i64],
    pads: &[i64],
) -> Result<Vec<Array>, String> {
    let (x, places) = (inputs.get(0)?, inputs.get(1)?);
    let own = x.shape();
    let rank = kernel.len();
    if own.len() != rank + 2 {
        return Err(format!("expected x of rank {}, got shape {own:?}", rank + 2));
    }
    let natural = |at: usize| {
        let len = (own[at + 2] as i64 - 1) * strides[at] + kernel[at] - pads[at] - pads[at + rank];
        usize::try_from(len).map_err(|_| "the pads are larger than the output".to_owned())
    };
    let inner = (0..rank).map(natural).collect::<Result<Vec<_>, _>>()?;
    let natural = [&own[..2], &inner].concat();
    let shape = match inputs.maybe(2) {
        Some(shape) => shape.lengths()?,
        None => natural.clone(),
    };
    if shape.len() != natural.len() {
        return Err(format!("expected an output_shape of rank {}, got {shape:?}", natural.len()));
    }
    let mut out = vec![0.0; shape.iter().product()];
    for (value, place) in x.floats()?.into_iter().zip(places.ints()?) {
        // Indices refer to the pooled image; the output may be larger.
        let mut rest = place as usize;
        let mut index = vec![0; natural.len()];
        for at in (0..natural.len()).rev() {
            index[at] = rest % natural[at].max(1);
            rest /= natural[at].max(1);
        }
        let to = index.iter().zip(&shape).fold(0, |sum, (own, len)| sum * len + own);
        *out.get_mut(to).ok_or("an index is outside of the output")? = value;
    }
    Ok(vec![numbers(out, shape, &x)])
}

/// Sums windows into an image: the inverse of im2col.
fn col2im(inputs: &Inputs<'_>, lists: &[Option<Vec<i64>>; 3]) -> Result<Vec<Array>, String> {
    let (x, image, block) = (inputs.get(0)?, inputs.lengths(1)?, inputs.lengths(2)?);
    let rank = image.len();
    let list = |at: usize, usual: i64, len: usize| {
        let own = lists[at].clone().unwrap_or_else(|| vec![usual; len]);
        let own = own.into_iter().map(|own| usize::try_from(own).ok()).collect::<Option<Vec<_>>>();
        own.filter(|own| own.len() == len).ok_or_else(|| {
            format!("expected {len} numbers of 0 or more in dilations, pads or strides")
        })
    };
    let (dilations, pads, strides) = (list(0, 1, rank)?, list(1, 0, 2 * rank)?, list(2, 1, rank)?);
    let [batch, columns, windows] = x.shape()[..] else {
        return Err(format!("expected x of rank 3, got shape {:?}", x.shape()));
    };
    let taps: usize = block.iter().product();
    if block.len() != rank || taps == 0 || columns % taps != 0 {
        return Err(format!("expected columns divisible by the block {block:?}, got {columns}"));
    }
    let channels = columns / taps;
    let counts: Vec<usize> = (0..rank)
        .map(|at| {
            let reach = (block[at] - 1) * dilations[at] + 1;
            let room = (image[at] + pads[at] + pads[at + rank]).checked_sub(reach)?;
            room.checked_div(strides[at]).map(|own| own + 1)
        })
        .collect::<Option<_>>()
        .ok_or_else(|| format!("the block {block:?} is larger than the image {image:?}"))?;
    if counts.iter().product::<usize>() != windows {
        let want: usize = counts.iter().product();
        return Err(format!("expected {want} blocks for the image {image:?}, got {windows}"));
    }
    let values = x.floats()?;
    let pixels: usize = image.iter().product();
    let mut out = vec![0.0; batch * channels * pixels];
    let split = |mut at: usize, lengths: &[usize]| {
        let mut index = vec![0; lengths.len()];
        for (own, len) in index.iter_mut().zip(lengths).rev() {
            *own = at % len;
            at /= len;
        }
        index
    };
    for plane in 0..batch * channels {
        for tap in 0..taps {
            let tap_at = split(tap, &block);
            for window in 0..windows {
                let window_at = split(window, &counts);
                let place = (0..rank).try_fold(0, |sum, at| {
                    let own = window_at[at] * strides[at] + tap_at[at] * dilations[at];
                    let own = own.checked_sub(pads[at]).filter(|own| *own < image[at])?;
                    Some(sum * image[at] + own)
                });
                if let Some(place) = place {
                    out[plane * pixels + place] += values[(plane * taps + tap) * windows + window];
                }
            }
        }
    }
    let shape = [&[batch, channels][..], &image].concat();
    Ok(vec![numbers(out, shape, &x)])
}

struct RoiAlign {
    size: [usize; 2],
    /// Samples per bin in each direction; 0 adapts to the size of the bin.
    ratio: usize,
    scale: f64,
    largest: bool,
    shift: f64,
}

/// Pools regions of an image with bilinear samples (He et al., "Mask R-CNN", 2017).
fn roi_align(inputs: &Inputs<'_>, options: &RoiAlign) -> Result<Vec<Array>, String> {
    let (x, regions, images) = (inputs.get(0)?, inputs.get(1)?, inputs.lengths(2)?);
    let [batch, channels, height, width] = x.shape()[..] else {
        return Err(format!("expected x of rank 4, got shape {:?}", x.shape()));
    };
    let (values, corners) = (x.floats()?, regions.floats()?);
    if corners.len() != 4 * images.len() || images.iter().any(|own| *own >= batch) {
        let (count, have) = (images.len(), corners.len());
        return Err(format!(
            "expected 4 numbers for each of {count} regions of {batch} images, got {have} numbers"
        ));
    }
    let [rows, columns] = options.size;
    // Weights of the four pixels around a sample.
    let around = |y: f64, x: f64| {
        if y < -1.0 || y > height as f64 || x < -1.0 || x > width as f64 {
            return [(0, 0.0); 4];
        }
        let along = |own: f64, len: usize| {
            let own = own.max(0.0);
            let low = (own as usize).min(len - 1);
            let high = (low + 1).min(len - 1);
            let part = if low == len - 1 { 0.0 } else { own - low as f64 };
            (low, high, part)
        };
        let ((top, bottom, down), (left, right, across)) = (along(y, height), along(x, width));
        [
            (top * width + left, (1.0 - down) * (1.0 - across)),
            (top * width + right, (1.0 - down) * across),
            (bottom * width + left, down * (1.0 - across)),
            (bottom * width + right, down * across),
        ]
    };
    let mut out = Vec::with_capacity(images.len() * channels * rows * columns);
    for (corner, image) in corners.chunks(4).zip(&images) {
        let [left, top, right, bottom] =
            [0, 1, 2, 3].map(|at| corner[at] * options.scale - options.shift);
        let (mut tall, mut wide) = (bottom - top, right - left);
        if options.shift == 0.0 {
            // A region is at least one pixel.
            (tall, wide) = (tall.max(1.0), wide.max(1.0));
        }
        let (bin_height, bin_width) = (tall / rows as f64, wide / columns as f64);
        let count =
            |bin: f64| if options.ratio > 0 { options.ratio } else { bin.ceil().max(0.0) as usize };
        let (down, across) = (count(bin_height), count(bin_width));
        for channel in 0..channels {
            let plane = &values[(image * channels + channel) * height * width..][..height * width];
            for row in 0..rows {
                for column in 0..columns {
                    let (mut sum, mut most) = (0.0, f64::NEG_INFINITY);
                    for sample in 0..down * across {
                        let (i, j) = (sample / across, sample % across);
                        let y = top + (row as f64 + (i as f64 + 0.5) / down as f64) * bin_height;
                        let x =
                            left + (column as f64 + (j as f64 + 0.5) / across as f64) * bin_width;
                        for (place, weight) in around(y, x) {
                            sum += plane[place] * weight;
                            most = most.max(plane[place] * weight);
                        }
                    }
                    out.push(match options.largest {
                        true if down * across > 0 => most,
                        true => 0.0,
                        false => sum / (down * across).max(1) as f64,
                    });
                }
            }
        }
    }
    Ok(vec![numbers(out, vec![images.len(), channels, rows, columns], &x)])
}
