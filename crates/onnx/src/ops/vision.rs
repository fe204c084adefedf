//! Image operators: grid sampling and non-maximum suppression.

use burn::tensor::{DType, TensorData};

use super::{Call, Inputs, Read};
use crate::array::Array;

pub(super) fn read(call: &Call<'_>) -> Read {
    Some(match call.op() {
        "GridSample" => {
            let mode = match call.text("mode").unwrap_or("linear") {
                "linear" | "bilinear" => Mode::Linear,
                "nearest" => Mode::Nearest,
                "cubic" | "bicubic" => Mode::Cubic,
                other => return Some(Err(format!("mode `{other}` is not supported"))),
            };
            let edge = match call.text("padding_mode").unwrap_or("zeros") {
                "zeros" => Edge::Zeros,
                "border" => Edge::Border,
                "reflection" => Edge::Reflection,
                other => return Some(Err(format!("padding_mode `{other}` is not supported"))),
            };
            let corners = call.flag("align_corners");
            Ok(Box::new(move |inputs| grid_sample(inputs, mode, edge, corners)))
        }
        "NonMaxSuppression" => {
            let centred = call.flag("center_point_box");
            Ok(Box::new(move |inputs| suppressed(inputs, centred)))
        }
        _ => return None,
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Linear,
    Nearest,
    Cubic,
}

/// Mode of padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Edge {
    Zeros,
    Border,
    Reflection,
}

/// Returns the neighbours of a coordinate along a dimension, with their weights.
fn neighbours(place: f64, mode: Mode) -> Vec<(f64, f64)> {
    let below = place.floor();
    let far = place - below;
    match mode {
        Mode::Nearest => vec![(place.round_ties_even(), 1.0)],
        Mode::Linear => vec![(below, 1.0 - far), (below + 1.0, far)],
        Mode::Cubic => {
            // Keys' kernel with a = -0.75.
            let a = -0.75;
            let near = |x: f64| ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
            let wide = |x: f64| ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a;
            let weights = [wide(far + 1.0), near(far), near(1.0 - far), wide(2.0 - far)];
            (-1..3).zip(weights).map(|(at, weight)| (below + f64::from(at), weight)).collect()
        }
    }
}

/// Returns the first and last coordinate of a dimension.
fn bounds(len: usize, corners: bool) -> (f64, f64) {
    let last = len as f64 - 1.0;
    if corners { (0.0, last) } else { (-0.5, last + 0.5) }
}

/// Reflects a coordinate at the bounds until it is inside.
fn reflected(place: f64, (least, most): (f64, f64)) -> f64 {
    let span = most - least;
    if span <= 0.0 {
        return least;
    }
    let far = (place - least).rem_euclid(2.0 * span);
    least + if far <= span { far } else { 2.0 * span - far }
}

/// Returns the pixel index of a coordinate; None if the pixel is zero padding.
fn within(place: f64, len: usize, edge: Edge, corners: bool) -> Option<usize> {
    let last = len as f64 - 1.0;
    if (0.0..=last).contains(&place) {
        return Some(place as usize);
    }
    match edge {
        Edge::Zeros => None,
        Edge::Border => Some(place.clamp(0.0, last) as usize),
        Edge::Reflection => Some(reflected(place, bounds(len, corners)).clamp(0.0, last) as usize),
    }
}

/// Samples x at the coordinates of a grid, for any number of dimensions. The first coordinate
/// belongs to the last dimension.
fn grid_sample(
    inputs: &Inputs<'_>,
    mode: Mode,
    edge: Edge,
    corners: bool,
) -> Result<Vec<Array>, String> {
    let (x, grid) = (inputs.get(0)?, inputs.get(1)?);
    let (own, grid_shape) = (x.shape(), grid.shape());
    let (batch, channels, image) = (own[0], own[1], &own[2..]);
    let rank = image.len();
    if grid_shape.last() != Some(&rank) {
        return Err(format!("expected a grid [.., {rank}] for x of {own:?}, got {grid_shape:?}"));
    }
    let taps = match mode {
        Mode::Nearest => 1usize,
        Mode::Linear => 2,
        Mode::Cubic => 4,
    }
    .pow(rank as u32);
    let pixels: usize = image.iter().product();
    let points: usize = grid_shape[1..grid_shape.len() - 1].iter().product();
    let (mut places, mut weights) =
        (vec![0i64; batch * points * taps], vec![0f32; batch * points * taps]);
    for (point, of_point) in grid.floats()?.chunks(rank).enumerate() {
        let mut all = vec![(Some(0usize), 1.0)];
        for (at, len) in image.iter().enumerate() {
            let normal = of_point[rank - 1 - at];
            let size = *len as f64;
            let place = match corners {
                true => (normal + 1.0) / 2.0 * (size - 1.0),
                false => ((normal + 1.0) * size - 1.0) / 2.0,
            };
            let mut place = f64::from(place as f32);
            if mode == Mode::Nearest {
                place = place.round_ties_even();
            }
            // Coordinates outside move to the edge before interpolation, except in cubic mode,
            // where each neighbour moves.
            let (least, most) = bounds(*len, corners);
            if mode != Mode::Cubic && !(least..=most).contains(&place) {
                place = match edge {
                    Edge::Zeros => place,
                    Edge::Border => place.clamp(0.0, size - 1.0),
                    Edge::Reflection => reflected(place, (least, most)),
                };
            }
            let near: Vec<_> = neighbours(place, mode)
                .into_iter()
                .map(|(place, weight)| (within(place, *len, edge, corners), weight))
                .collect();
            all = all
                .iter()
                .flat_map(|(place, weight)| {
                    near.iter().map(move |(own, other)| {
                        (place.zip(*own).map(|(place, own)| place * len + own), weight * other)
                    })
                })
                .collect();
        }
        for (tap, (place, weight)) in all.into_iter().enumerate() {
            let at = point * taps + tap;
            let first = point / points.max(1) * pixels;
            places[at] = (first + place.unwrap_or(0)) as i64;
            weights[at] = if place.is_some() { weight as f32 } else { 0.0 };
        }
    }
    let (dtype, device) = (x.dtype(), x.device());
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let count = places.len();
    let places = Array::from_data(TensorData::new(places, [count]), &device);
    let weights =
        Array::from_data(TensorData::new(weights, [batch, points, taps, 1]), &device).cast(wide);
    // [batch · pixels, channels]
    let lines = x.cast(wide).reshape(&[batch, channels, pixels]).permute(&[0, 2, 1]);
    let lines = lines.reshape(&[batch * pixels, channels]).select(0, places);
    let each = lines.reshape(&[batch, points, taps, channels]).times(weights);
    let sum =
        super::reduce::sum(each, &[2]).reshape(&[batch, points, channels]).permute(&[0, 2, 1]);
    let shape = [&own[..2], &grid_shape[1..grid_shape.len() - 1]].concat();
    Ok(vec![sum.reshape(&shape).cast(dtype)])
}

/// Returns (batch, class, box) of the selected boxes in order of their scores: non-maximum
/// suppression.
fn suppressed(inputs: &Inputs<'_>, centred: bool) -> Result<Vec<Array>, String> {
    let (boxes, scores) = (inputs.get(0)?, inputs.get(1)?);
    let [batches, count, 4] = boxes.shape()[..] else {
        let have = boxes.shape();
        return Err(format!("expected boxes of shape [batches, boxes, 4], got {have:?}"));
    };
    let classes = scores.shape()[1];
    let number = |at: usize| {
        inputs
            .maybe(at)
            .map(|own| own.floats())
            .transpose()
            .map(|own| own.and_then(|own| own.first().copied()))
    };
    let most = number(2)?.unwrap_or(0.0).max(0.0) as usize;
    let (overlap, least) = (number(3)?.unwrap_or(0.0), number(4)?);
    let (boxes, scores) = (boxes.floats()?, scores.floats()?);
    // Corners in ascending order.
    let corners: Vec<[f64; 4]> = boxes
        .chunks(4)
        .map(|own| match centred {
            true => [
                own[1] - own[3] / 2.0,
                own[0] - own[2] / 2.0,
                own[1] + own[3] / 2.0,
                own[0] + own[2] / 2.0,
            ],
            false => {
                [own[0].min(own[2]), own[1].min(own[3]), own[0].max(own[2]), own[1].max(own[3])]
            }
        })
        .collect();
    let area = |own: &[f64; 4]| (own[2] - own[0]) * (own[3] - own[1]);
    let shared = |one: &[f64; 4], other: &[f64; 4]| {
        let side = |at: usize| (one[at + 2].min(other[at + 2]) - one[at].max(other[at])).max(0.0);
        let both = side(0) * side(1);
        let all = area(one) + area(other) - both;
        if all > 0.0 { both / all } else { 0.0 }
    };
    let mut kept: Vec<i64> = Vec::new();
    for batch in 0..batches {
        for class in 0..classes {
            let score = |at: usize| scores[(batch * classes + class) * count + at];
            let mut order: Vec<usize> =
                (0..count).filter(|at| least.is_none_or(|least| score(*at) > least)).collect();
            order.sort_by(|one, other| score(*other).total_cmp(&score(*one)));
            let mut own: Vec<usize> = Vec::new();
            for at in order {
                let corner = |at: usize| &corners[batch * count + at];
                if own.len() < most
                    && own.iter().all(|better| shared(corner(*better), corner(at)) <= overlap)
                {
                    own.push(at);
                }
            }
            kept.extend(own.into_iter().flat_map(|at| [batch as i64, class as i64, at as i64]));
        }
    }
    let rows = kept.len() / 3;
    Ok(vec![Array::from_data(TensorData::new(kept, [rows, 3]), inputs.device)])
}
