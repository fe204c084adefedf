//! Resize and Upsample.
//!
//! ```text
//! out[.., i, ..] = Σ over j:  W[i, j] · x[.., j, ..]      one dimension after the other
//! ```
//!
//! Row i of W holds the weights of the neighbours of position i in x. Each dimension is a matmul.

use burn::backend::Dispatch;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, TensorData};

use super::linear::matmul;
use super::{Call, Inputs, Read, Run, axis};
use crate::array::{Array, scalar_of};

pub(super) fn read(call: &Call<'_>) -> Read {
    Some(match call.op() {
        "Resize" => resize(call),
        "Upsample" => upsample(call),
        _ => return None,
    })
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    Nearest(Round),
    Linear,
    /// Keys' cubic kernel with coefficient a.
    Cubic(f64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Round {
    PreferFloor,
    PreferCeil,
    Floor,
    Ceil,
}

/// Coordinate transformation from output to x.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    HalfPixel,
    HalfPixelSymmetric,
    TorchHalfPixel,
    AlignCorners,
    Asymmetric,
    Crop,
}

/// Policy that keeps the aspect ratio.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ratio {
    Stretch,
    NotLarger,
    NotSmaller,
}

#[derive(Debug, Clone)]
struct Options {
    mode: Mode,
    place: Place,
    ratio: Ratio,
    antialias: bool,
    exclude: bool,
    outside: f64,
    axes: Option<Vec<i64>>,
}

fn resize(call: &Call<'_>) -> Result<Run, String> {
    let options = Options {
        mode: match call.text("mode").unwrap_or("nearest") {
            "nearest" => {
                Mode::Nearest(match call.text("nearest_mode").unwrap_or("round_prefer_floor") {
                    "round_prefer_floor" => Round::PreferFloor,
                    "round_prefer_ceil" => Round::PreferCeil,
                    "floor" => Round::Floor,
                    "ceil" => Round::Ceil,
                    other => return Err(format!("nearest_mode `{other}` is not supported")),
                })
            }
            "linear" | "bilinear" | "trilinear" => Mode::Linear,
            "cubic" => Mode::Cubic(call.float("cubic_coeff_a").unwrap_or(-0.75)),
            other => return Err(format!("mode `{other}` is not supported")),
        },
        place: match call.text("coordinate_transformation_mode").unwrap_or("half_pixel") {
            _ if call.opset < 11 => Place::Asymmetric,
            "half_pixel" => Place::HalfPixel,
            "half_pixel_symmetric" => Place::HalfPixelSymmetric,
            "pytorch_half_pixel" => Place::TorchHalfPixel,
            "align_corners" => Place::AlignCorners,
            "asymmetric" => Place::Asymmetric,
            "tf_crop_and_resize" => Place::Crop,
            other => {
                let name = "coordinate_transformation_mode";
                return Err(format!("{name} `{other}` is not supported"));
            }
        },
        ratio: match call.text("keep_aspect_ratio_policy").unwrap_or("stretch") {
            "stretch" => Ratio::Stretch,
            "not_larger" => Ratio::NotLarger,
            "not_smaller" => Ratio::NotSmaller,
            other => return Err(format!("keep_aspect_ratio_policy `{other}` is not supported")),
        },
        antialias: call.flag("antialias"),
        exclude: call.flag("exclude_outside"),
        outside: call.float("extrapolation_value").unwrap_or(0.0),
        axes: call.ints("axes").map(<[i64]>::to_vec),
    };
    let old = call.opset < 11;
    Ok(Box::new(move |inputs| {
        let list = |at: usize| match inputs.maybe(at) {
            Some(own) if own.count() > 0 => Ok::<_, String>(Some(own.floats()?)),
            _ => Ok(None),
        };
        let [region, scales, sizes] =
            if old { [None, list(1)?, None] } else { [list(1)?, list(2)?, list(3)?] };
        resized(inputs, &options, region, scales, sizes)
    }))
}

fn upsample(call: &Call<'_>) -> Result<Run, String> {
    let mode = match call.text("mode").unwrap_or("nearest") {
        "nearest" => Mode::Nearest(Round::Floor),
        "linear" | "bilinear" => Mode::Linear,
        other => return Err(format!("mode `{other}` is not supported")),
    };
    let fixed =
        call.floats("scales").map(|all| all.iter().map(|own| f64::from(*own)).collect::<Vec<_>>());
    let options = Options {
        mode,
        place: Place::Asymmetric,
        ratio: Ratio::Stretch,
        antialias: false,
        exclude: false,
        outside: 0.0,
        axes: None,
    };
    Ok(Box::new(move |inputs| {
        let scales = match &fixed {
            Some(fixed) => fixed.clone(),
            None => inputs.get(1)?.floats()?,
        };
        resized(inputs, &options, None, Some(scales), None)
    }))
}

fn resized(
    inputs: &Inputs<'_>,
    options: &Options,
    region: Option<Vec<f64>>,
    scales: Option<Vec<f64>>,
    sizes: Option<Vec<f64>>,
) -> Result<Vec<Array>, String> {
    let x = inputs.get(0)?;
    let own = x.shape();
    let axes: Vec<usize> = match &options.axes {
        Some(axes) => axes.iter().map(|at| axis(*at, own.len())).collect::<Result<_, _>>()?,
        None => (0..own.len()).collect(),
    };
    let lens: Vec<f64> = axes.iter().map(|at| own[*at] as f64).collect();
    // Per axis: scale, and size of the output.
    let each: Vec<(f64, usize)> = match (scales, sizes) {
        (Some(scales), _) => scales
            .iter()
            .zip(&lens)
            .map(|(scale, len)| (*scale, (scale * len).floor() as usize))
            .collect(),
        (None, Some(sizes)) => {
            let ratios = sizes.iter().zip(&lens).map(|(size, len)| size / len);
            let common = match options.ratio {
                Ratio::Stretch => None,
                Ratio::NotLarger => ratios.clone().reduce(f64::min),
                Ratio::NotSmaller => ratios.clone().reduce(f64::max),
            };
            let scale_and_size = |(ratio, (size, len)): (f64, (&f64, &f64))| match common {
                None => (ratio, *size as usize),
                Some(common) => (common, (common * len + 0.5).floor() as usize),
            };
            ratios.zip(sizes.iter().zip(&lens)).map(scale_and_size).collect()
        }
        (None, None) => return Err("expected scales or sizes, got neither".to_owned()),
    };
    if each.len() != axes.len() {
        return Err(format!("expected {} scales or sizes, got {}", axes.len(), each.len()));
    }
    let dtype = x.dtype();
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let mut out = x.cast(wide);
    let mut outside: Vec<(usize, Vec<bool>)> = Vec::new();
    for (index, (at, (scale, size))) in axes.iter().zip(&each).enumerate() {
        let part =
            region.as_ref().and_then(|own| Some([*own.get(index)?, *own.get(index + axes.len())?]));
        let same = own[*at] == *size && *scale == 1.0 && options.place != Place::Crop;
        if same {
            continue;
        }
        let places = places(options.place, *scale, own[*at], *size, part)?;
        if options.place == Place::Crop {
            let beyond = |place: &f64| *place < 0.0 || *place > own[*at] as f64 - 1.0;
            outside.push((*at, places.iter().map(beyond).collect()));
        }
        let weights = weights(options, *scale, own[*at], &places);
        let data = TensorData::new(weights, [*size, own[*at]]).convert_dtype(wide);
        let weights = Array::from_data(data, &out.device());
        // Move the dimension to the second to last.
        let rank = own.len();
        let mut order: Vec<usize> = (0..rank).filter(|own| own != at).collect();
        order.push(*at);
        let lines = out.permute(&order);
        let mut shape = lines.shape();
        let count = lines.count() / own[*at].max(1);
        let made = matmul(inputs.ctx, lines.reshape(&[count, own[*at]]), weights.permute(&[1, 0]))?;
        shape[rank - 1] = *size;
        let mut back: Vec<usize> = (0..rank - 1).collect();
        back.insert(*at, rank - 1);
        out = made.reshape(&shape).permute(&back);
    }
    for (at, flags) in outside {
        let mut shape = vec![1; own.len()];
        shape[at] = flags.len();
        let flags = Array::from_data(TensorData::new(flags, shape), &out.device());
        let value = Array::full(&[], scalar_of(options.outside, wide), wide, &out.device());
        out = flags.choose(value, out)?;
    }
    let is_float = dtype.is_float();
    let out = if is_float { out } else { rounded(out) };
    Ok(vec![out.cast(dtype)])
}

/// Rounds to the nearest integer; a cast truncates.
fn rounded(x: Array) -> Array {
    x.float(Dispatch::float_round)
}

/// Returns the position in x of each output element.
fn places(
    place: Place,
    scale: f64,
    len: usize,
    size: usize,
    part: Option<[f64; 2]>,
) -> Result<Vec<f64>, String> {
    let (len, wanted) = (len as f64, scale * len as f64);
    let half = |at: f64| (at + 0.5) / scale - 0.5;
    let [from, to] = match (place, part) {
        (Place::Crop, None) => return Err("input roi is missing".to_owned()),
        (_, part) => part.unwrap_or([0.0, 1.0]),
    };
    let position = |at: usize| {
        let at = at as f64;
        match place {
            Place::HalfPixel => half(at),
            Place::HalfPixelSymmetric => len / 2.0 * (1.0 - size as f64 / wanted) + half(at),
            Place::TorchHalfPixel if wanted == 1.0 => -0.5,
            Place::TorchHalfPixel => half(at),
            Place::AlignCorners if wanted == 1.0 => 0.0,
            Place::AlignCorners => at * (len - 1.0) / (wanted - 1.0),
            Place::Asymmetric => at / scale,
            Place::Crop if wanted == 1.0 => (to - from) * (len - 1.0) / 2.0 + from * (len - 1.0),
            Place::Crop => at * (to - from) * (len - 1.0) / (wanted - 1.0) + from * (len - 1.0),
        }
    };
    Ok((0..size).map(position).collect())
}

/// Returns the rows of W.
fn weights(options: &Options, scale: f64, len: usize, places: &[f64]) -> Vec<f64> {
    let mut all = vec![0.0; places.len() * len];
    // With antialiasing, the kernel widens by the downscaling factor.
    let shrink = if options.antialias { scale.min(1.0) } else { 1.0 };
    for (place, row) in places.iter().zip(all.chunks_mut(len)) {
        let below = place.floor();
        if let Mode::Nearest(round) = options.mode {
            let nearest = match round {
                Round::PreferFloor => (place - 0.5).ceil(),
                Round::PreferCeil => (place + 0.5).floor(),
                Round::Floor => below,
                Round::Ceil => place.ceil(),
            };
            row[(nearest.max(0.0) as usize).min(len - 1)] = 1.0;
            continue;
        }
        let reach = match options.mode {
            Mode::Cubic(_) => 2.0,
            _ => 1.0,
        } / shrink;
        let (first, last) = ((place - reach).floor() as i64, (place + reach).ceil() as i64);
        let kernel = |far: f64| {
            let far = far.abs();
            match options.mode {
                Mode::Cubic(a) if far <= 1.0 => ((a + 2.0) * far - (a + 3.0)) * far * far + 1.0,
                Mode::Cubic(a) if far < 2.0 => {
                    ((a * far - 5.0 * a) * far + 8.0 * a) * far - 4.0 * a
                }
                Mode::Cubic(_) => 0.0,
                _ => (1.0 - far).max(0.0),
            }
        };
        let mut sum = 0.0;
        for at in first..=last {
            let weight = kernel((at as f64 - place) * shrink);
            let beyond = at < 0 || at >= len as i64;
            if options.exclude && beyond {
                continue;
            }
            sum += weight;
            row[at.clamp(0, len as i64 - 1) as usize] += weight;
        }
        if (options.exclude || options.antialias) && sum != 0.0 {
            row.iter_mut().for_each(|own| *own /= sum);
        }
    }
    all
}
