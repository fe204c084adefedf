//! Operators that move elements: reshape, slice, concatenate, pad; and operators that create
//! tensors from shapes.

use burn::tensor::{Slice, TensorData};

use super::chain::packed;
use super::{Call, Inputs, Read, Run, axis};
use crate::array::{Array, Kind, broadcast, scalar_of};
use crate::limits::must_fit;
use crate::tensor;

pub(super) fn read(call: &Call<'_>) -> Read {
    Some(Ok(match call.op() {
        "Constant" => return Some(constant(call)),
        "Shape" => {
            let (start, end) = (call.int("start").unwrap_or(0), call.int("end"));
            Box::new(move |inputs| shape(inputs, start, end))
        }
        "Size" => Box::new(|inputs| {
            let count = inputs.get(0)?.count() as i64;
            Ok(vec![Array::from_data(
                TensorData::new(vec![count], Vec::<usize>::new()),
                inputs.host,
            )])
        }),
        "Reshape" => {
            let (fixed, zeros) = (call.ints("shape").map(<[i64]>::to_vec), call.flag("allowzero"));
            Box::new(move |inputs| reshape(inputs, fixed.as_deref(), zeros))
        }
        "Flatten" => {
            let at = call.int("axis").unwrap_or(1);
            Box::new(move |inputs| {
                let x = inputs.get(0)?;
                let own = x.shape();
                let at = if at == own.len() as i64 { own.len() } else { axis(at, own.len())? };
                let (rows, columns) = (own[..at].iter().product(), own[at..].iter().product());
                Ok(vec![x.reshape(&[rows, columns])])
            })
        }
        "Squeeze" => {
            let fixed = call.ints("axes").map(<[i64]>::to_vec);
            Box::new(move |inputs| squeeze(inputs, fixed.as_deref()))
        }
        "Unsqueeze" => {
            let fixed = call.ints("axes").map(<[i64]>::to_vec);
            Box::new(move |inputs| unsqueeze(inputs, fixed.as_deref()))
        }
        "Transpose" => {
            let order = call.ints("perm").map(<[i64]>::to_vec);
            Box::new(move |inputs| {
                let x = inputs.get(0)?;
                let order = match &order {
                    Some(order) => {
                        order.iter().map(|at| axis(*at, x.rank())).collect::<Result<_, _>>()?
                    }
                    None => (0..x.rank()).rev().collect::<Vec<_>>(),
                };
                let mut sorted = order.clone();
                sorted.sort_unstable();
                if !sorted.into_iter().eq(0..x.rank()) {
                    return Err(format!(
                        "expected a permutation of {} axes, got {order:?}",
                        x.rank()
                    ));
                }
                Ok(vec![x.permute(&order)])
            })
        }
        "Concat" => {
            // Opsets 1 to 3 have a default axis.
            let at = call.int("axis").unwrap_or(1);
            Box::new(move |inputs| {
                let all = inputs.each()?;
                let at = axis(at, all.first().map_or(0, Array::rank))?;
                Ok(vec![Array::concat(all, at)])
            })
        }
        "Split" => {
            let (at, fixed) =
                (call.int("axis").unwrap_or(0), call.ints("split").map(<[i64]>::to_vec));
            let parts = call.outputs();
            if let Some(told) = call.int("num_outputs").filter(|own| *own != parts as i64) {
                return Some(Err(format!("expected {told} outputs (num_outputs), got {parts}")));
            }
            Box::new(move |inputs| split(inputs, at, fixed.as_deref(), parts))
        }
        "Slice" => {
            let fixed = ["starts", "ends", "axes"].map(|name| call.ints(name).map(<[i64]>::to_vec));
            Box::new(move |inputs| slice(inputs, &fixed))
        }
        "Expand" => Box::new(|inputs| {
            let (x, want) = (inputs.get(0)?, inputs.lengths(1)?);
            let shapes = [x.shape(), want];
            let shape =
                broadcast(&shapes).ok_or_else(|| format!("shapes {shapes:?} do not broadcast"))?;
            Ok(vec![x.expand(&shape)])
        }),
        "Tile" => Box::new(|inputs| {
            let (mut x, times) = (inputs.get(0)?, inputs.lengths(1)?);
            for (at, times) in times.into_iter().enumerate() {
                let copies = vec![x.clone(); times];
                x = if copies.is_empty() { x.narrow(at, 0, 0) } else { Array::concat(copies, at) };
            }
            Ok(vec![x])
        }),
        "Pad" => return Some(pad(call)),
        "CenterCropPad" => {
            let fixed = call.ints("axes").map(<[i64]>::to_vec);
            Box::new(move |inputs| {
                let mut x = inputs.get(0)?;
                let want = inputs.lengths(1)?;
                let axes = fixed.clone().unwrap_or_else(|| (0..x.rank() as i64).collect());
                let zero = Array::full(&[], scalar_of(0.0, x.dtype()), x.dtype(), &x.device());
                for (at, len) in axes.iter().zip(want) {
                    let at = axis(*at, x.rank())?;
                    let (have, len) = (x.shape()[at] as i64, len as i64);
                    // The smaller half is cut or added before.
                    let before = if len < have { -((have - len) / 2) } else { (len - have) / 2 };
                    x = padded(x, at, [before, len - have - before], Edge::Constant, &zero)?;
                }
                Ok(vec![x])
            })
        }
        "BitCast" => {
            let to = match tensor::dtype(call.int("to").unwrap_or(0) as i32) {
                Ok(to) => to,
                Err(why) => return Some(Err(why)),
            };
            Box::new(move |inputs| {
                let data = inputs.get(0)?.to_data()?;
                if data.dtype().size() != to.size() {
                    let have = data.dtype();
                    return Err(format!("expected dtypes of equal size, got {have:?} and {to:?}"));
                }
                let shape = data.shape().clone();
                Ok(vec![Array::from_data(
                    TensorData::from_bytes(data.into_bytes(), shape, to),
                    inputs.device,
                )])
            })
        }
        "DepthToSpace" => {
            let block = call.int("blocksize").unwrap_or(1) as usize;
            let columns_first = call.text("mode") == Some("CRD");
            Box::new(move |inputs| depth_to_space(inputs.get(0)?, block, columns_first))
        }
        "SpaceToDepth" => {
            let block = call.int("blocksize").unwrap_or(1) as usize;
            Box::new(move |inputs| space_to_depth(inputs.get(0)?, block))
        }
        "ConstantOfShape" => {
            let usual = || TensorData::new(vec![0f32], [1]);
            let value = call.tensor("value").unwrap_or_else(usual);
            Box::new(move |inputs| {
                let shape = inputs.lengths(0)?;
                let value = Array::from_data(value.clone(), inputs.device).reshape(&[]);
                Ok(vec![value.expand(&shape)])
            })
        }
        "Range" => Box::new(range),
        "EyeLike" => {
            let dtype = call.int("dtype").map(|own| tensor::dtype(own as i32));
            let k = call.int("k").unwrap_or(0);
            Box::new(move |inputs| {
                let x = inputs.get(0)?;
                let dtype = dtype.clone().transpose()?.unwrap_or(x.dtype());
                let [rows, columns] = x.shape()[..] else {
                    return Err(format!("expected x of rank 2, got shape {:?}", x.shape()));
                };
                let diagonal = |row: usize, column: usize| column as i64 - row as i64 == k;
                Ok(vec![mask(rows, columns, diagonal, &x).cast(dtype)])
            })
        }
        "Trilu" => {
            let upper = call.int("upper") != Some(0);
            Box::new(move |inputs| {
                let x = inputs.get(0)?;
                let k = inputs.maybe(1).map_or(Ok(vec![0]), |k| k.ints())?[0];
                let own = x.shape();
                let [.., rows, columns] = own[..] else {
                    return Err(format!("expected x of rank 2 or more, got shape {own:?}"));
                };
                let keeps = |row: usize, column: usize| match upper {
                    true => column as i64 - row as i64 >= k,
                    false => column as i64 - row as i64 <= k,
                };
                let zeros = Array::full(&own, scalar_of(0.0, x.dtype()), x.dtype(), &x.device());
                Ok(vec![mask(rows, columns, keeps, &x).choose(x, zeros)?])
            })
        }
        _ => return None,
    }))
}

/// Returns bools `[rows, columns]` on the device of another tensor.
fn mask(rows: usize, columns: usize, holds: impl Fn(usize, usize) -> bool, like: &Array) -> Array {
    must_fit(&[rows, columns], tensor::BOOL, &crate::devices::host());
    let all = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
    let all: Vec<bool> = all.map(|(row, column)| holds(row, column)).collect();
    Array::from_data(TensorData::new(all, [rows, columns]), &like.device())
}

fn constant(call: &Call<'_>) -> Result<Run, String> {
    let none = Vec::<usize>::new();
    let data = if let Some(value) = call.tensor("value") {
        value.clone()
    } else if let Some(value) = call.float("value_float") {
        TensorData::new(vec![value as f32], none)
    } else if let Some(value) = call.int("value_int") {
        TensorData::new(vec![value], none)
    } else if let Some(values) = call.floats("value_floats") {
        TensorData::new(values.to_vec(), [values.len()])
    } else if let Some(values) = call.ints("value_ints") {
        TensorData::new(values.to_vec(), [values.len()])
    } else {
        return Err("string and sparse constants are not supported".to_owned());
    };
    Ok(Box::new(move |inputs| Ok(vec![Array::from_data(data.clone(), inputs.device)])))
}

fn shape(inputs: &Inputs<'_>, start: i64, end: Option<i64>) -> Result<Vec<Array>, String> {
    let own = inputs.get(0)?.shape();
    let rank = own.len() as i64;
    let place = |at: i64| (if at < 0 { at + rank } else { at }).clamp(0, rank) as usize;
    let (start, end) = (place(start), place(end.unwrap_or(rank)));
    let part: Vec<i64> = own.get(start..end).unwrap_or(&[]).iter().map(|len| *len as i64).collect();
    let len = part.len();
    Ok(vec![Array::from_data(TensorData::new(part, [len]), inputs.host)])
}

fn reshape(inputs: &Inputs<'_>, fixed: Option<&[i64]>, zeros: bool) -> Result<Vec<Array>, String> {
    let x = inputs.get(0)?;
    let want = match fixed {
        Some(fixed) => fixed.to_vec(),
        None => inputs.get(1)?.ints()?,
    };
    let own = x.shape();
    let mut shape = Vec::new();
    for (at, len) in want.iter().enumerate() {
        shape.push(match *len {
            0 if !zeros => *own
                .get(at)
                .ok_or_else(|| format!("0 copies dimension {at}, but x has shape {own:?}"))?,
            -1 => usize::MAX,
            len => usize::try_from(len)
                .map_err(|_| format!("expected dimensions of -1 or more, got {len}"))?,
        });
    }
    let known: usize = shape.iter().filter(|len| **len != usize::MAX).product();
    for len in shape.iter_mut().filter(|len| **len == usize::MAX) {
        *len = x.count().checked_div(known).unwrap_or(0);
    }
    match shape.iter().product::<usize>() == x.count() {
        true if shape == own => Ok(vec![x]),
        true => Ok(vec![packed(x).reshape(&shape)]),
        false => Err(format!("cannot reshape {own:?} to {want:?}: the numbers of elements differ")),
    }
}

fn squeeze(inputs: &Inputs<'_>, fixed: Option<&[i64]>) -> Result<Vec<Array>, String> {
    let x = inputs.get(0)?;
    let own = x.shape();
    let axes = match (fixed, inputs.maybe(1)) {
        (Some(fixed), _) => Some(fixed.to_vec()),
        (None, Some(axes)) => Some(axes.ints()?),
        (None, None) => None,
    };
    let gone: Vec<usize> = match axes {
        Some(axes) => axes.iter().map(|at| axis(*at, own.len())).collect::<Result<_, _>>()?,
        None => (0..own.len()).filter(|at| own[*at] == 1).collect(),
    };
    if gone.iter().any(|at| own[*at] != 1) {
        return Err(format!("expected axes of length 1, got axes {gone:?} of shape {own:?}"));
    }
    let kept: Vec<usize> =
        (0..own.len()).filter(|at| !gone.contains(at)).map(|at| own[at]).collect();
    Ok(vec![x.reshape(&kept)])
}

fn unsqueeze(inputs: &Inputs<'_>, fixed: Option<&[i64]>) -> Result<Vec<Array>, String> {
    let x = inputs.get(0)?;
    let axes = match fixed {
        Some(fixed) => fixed.to_vec(),
        None => inputs.get(1)?.ints()?,
    };
    let rank = x.rank() + axes.len();
    let new: Vec<usize> = axes.iter().map(|at| axis(*at, rank)).collect::<Result<_, _>>()?;
    let mut own = x.shape().into_iter();
    let shape: Option<Vec<usize>> =
        (0..rank).map(|at| if new.contains(&at) { Some(1) } else { own.next() }).collect();
    Ok(vec![x.reshape(&shape.ok_or_else(|| format!("expected distinct axes, got {axes:?}"))?)])
}

fn split(
    inputs: &Inputs<'_>,
    at: i64,
    fixed: Option<&[i64]>,
    parts: usize,
) -> Result<Vec<Array>, String> {
    let x = inputs.get(0)?;
    let at = axis(at, x.rank())?;
    let all = x.shape()[at];
    let sizes = match (fixed, inputs.maybe(1)) {
        (Some(fixed), _) => fixed.to_vec(),
        (None, Some(sizes)) => sizes.ints()?,
        (None, None) => {
            // The last part is smaller if the split is uneven.
            let each = all.div_ceil(parts.max(1));
            (0..parts)
                .map(|part| (all.min((part + 1) * each) - all.min(part * each)) as i64)
                .collect()
        }
    };
    if sizes.iter().any(|own| *own < 0) || sizes.iter().sum::<i64>() != all as i64 {
        return Err(format!("expected split sizes with the sum {all}, got {sizes:?}"));
    }
    let mut from = 0;
    let part = |size: i64| {
        let to = from + size as usize;
        let own = x.clone().narrow(at, from, to);
        from = to;
        own
    };
    Ok(sizes.into_iter().map(part).collect())
}

fn slice(inputs: &Inputs<'_>, fixed: &[Option<Vec<i64>>; 3]) -> Result<Vec<Array>, String> {
    let x = inputs.get(0)?;
    let given = |at: usize| match fixed.get(at).and_then(Clone::clone) {
        Some(fixed) => Ok(Some(fixed)),
        None => inputs.maybe(at + 1).map(|own| own.ints()).transpose(),
    };
    let starts = given(0)?.ok_or("starts are missing")?;
    let ends = given(1)?.ok_or("ends are missing")?;
    let axes = given(2)?.unwrap_or_else(|| (0..starts.len() as i64).collect());
    let steps = given(3)?.unwrap_or_else(|| vec![1; starts.len()]);
    if [&ends, &axes, &steps].iter().any(|own| own.len() != starts.len()) {
        let lengths = [&starts, &ends, &axes, &steps].map(Vec::len);
        return Err(format!("expected starts, ends, axes, steps of one length, got {lengths:?}"));
    }
    let own = x.shape();
    let mut ranges: Vec<Slice> =
        own.iter().map(|len| Slice::new(0, Some(*len as isize), 1)).collect();
    let mut reversed = Vec::new();
    for (((start, end), at), step) in starts.iter().zip(&ends).zip(&axes).zip(&steps) {
        let at = axis(*at, own.len())?;
        let len = own[at] as i64;
        if *step == 0 {
            return Err("expected steps other than 0".to_owned());
        }
        let from_end = |value: i64| if value < 0 { value.saturating_add(len) } else { value };
        // Slice in ascending order; negative steps are reversed afterwards.
        let (first, count) = if *step > 0 {
            let (start, end) = (from_end(*start).clamp(0, len), from_end(*end).clamp(0, len));
            (start, (end - start).max(0).unsigned_abs().div_ceil(step.unsigned_abs()) as i64)
        } else {
            let (start, end) =
                (from_end(*start).clamp(-1, len - 1), from_end(*end).clamp(-1, len - 1));
            let count = (start - end).max(0).unsigned_abs().div_ceil(step.unsigned_abs()) as i64;
            reversed.push(at);
            (start + (count - 1).max(0) * step, count)
        };
        let stride = step.unsigned_abs() as i64;
        let last = if count == 0 { first } else { first + (count - 1) * stride + 1 };
        let first = first.max(0);
        ranges[at] = Slice::new(first as isize, Some(last.max(first) as isize), stride as isize);
    }
    let out = x.slice(&ranges);
    Ok(vec![if reversed.is_empty() { out } else { out.flip(&reversed) }])
}

fn depth_to_space(x: Array, block: usize, columns_first: bool) -> Result<Vec<Array>, String> {
    let [n, c, h, w] = x.shape()[..] else {
        return Err(format!("expected x of rank 4, got shape {:?}", x.shape()));
    };
    let depth = c / (block * block);
    let (parts, order) = match columns_first {
        true => ([n, depth, block, block, h, w], [0, 1, 4, 2, 5, 3]),
        false => ([n, block, block, depth, h, w], [0, 3, 4, 1, 5, 2]),
    };
    Ok(vec![x.reshape(&parts).permute(&order).reshape(&[n, depth, h * block, w * block])])
}

fn space_to_depth(x: Array, block: usize) -> Result<Vec<Array>, String> {
    let [n, c, h, w] = x.shape()[..] else {
        return Err(format!("expected x of rank 4, got shape {:?}", x.shape()));
    };
    let parts = [n, c, h / block, block, w / block, block];
    let out = [n, c * block * block, h / block, w / block];
    Ok(vec![x.reshape(&parts).permute(&[0, 3, 5, 1, 2, 4]).reshape(&out)])
}

fn range(inputs: &Inputs<'_>) -> Result<Vec<Array>, String> {
    let all = [inputs.get(0)?, inputs.get(1)?, inputs.get(2)?];
    let dtype = all[0].dtype();
    let device = all[0].device();
    if all[0].kind() == Kind::Int {
        let [start, limit, step] = [all[0].ints()?[0], all[1].ints()?[0], all[2].ints()?[0]];
        if step == 0 {
            return Err("expected a delta other than 0".to_owned());
        }
        let far = if step > 0 { limit - start } else { start - limit };
        let count = far.max(0).unsigned_abs().div_ceil(step.unsigned_abs()) as usize;
        let values: Vec<i64> = (0..count as i64).map(|at| start + at * step).collect();
        return Ok(vec![Array::from_data(TensorData::new(values, [count]), &device).cast(dtype)]);
    }
    let [start, limit, step] = [all[0].floats()?[0], all[1].floats()?[0], all[2].floats()?[0]];
    let count = ((limit - start) / step).ceil().max(0.0) as usize;
    let values: Vec<f64> = (0..count).map(|at| start + at as f64 * step).collect();
    let data = TensorData::new(values, [count]).convert_dtype(dtype);
    Ok(vec![Array::from_data(data, &device)])
}

/// Mode of padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Edge {
    Constant,
    Repeat,
    Reflect,
    Wrap,
}

fn pad(call: &Call<'_>) -> Result<Run, String> {
    let edge = match call.text("mode").unwrap_or("constant") {
        "constant" => Edge::Constant,
        "edge" => Edge::Repeat,
        "reflect" => Edge::Reflect,
        "wrap" => Edge::Wrap,
        other => return Err(format!("mode `{other}` is not supported")),
    };
    // Opset 1 names the attribute `paddings`.
    let fixed = call.ints("pads").or_else(|| call.ints("paddings")).map(<[i64]>::to_vec);
    let value = call.float("value").unwrap_or(0.0);
    Ok(Box::new(move |inputs| {
        let mut x = inputs.get(0)?;
        let pads = match &fixed {
            Some(fixed) => fixed.clone(),
            None => inputs.get(1)?.ints()?,
        };
        let axes = match inputs.maybe(3) {
            Some(axes) => axes.ints()?,
            None => (0..x.rank() as i64).collect(),
        };
        if pads.len() != 2 * axes.len() {
            return Err(format!("expected {} pads, got {}", 2 * axes.len(), pads.len()));
        }
        let fill = match inputs.maybe(2) {
            Some(fill) => fill.reshape(&[]),
            None => Array::full(&[], scalar_of(value, x.dtype()), x.dtype(), &x.device()),
        };
        for (at, own) in axes.iter().enumerate() {
            let own = axis(*own, x.rank())?;
            x = padded(x, own, [pads[at], pads[at + axes.len()]], edge, &fill)?;
        }
        Ok(vec![x])
    }))
}

/// Pads a dimension before and after; negative pads remove elements.
fn padded(
    mut x: Array,
    axis: usize,
    [before, after]: [i64; 2],
    edge: Edge,
    fill: &Array,
) -> Result<Array, String> {
    let len = x.shape()[axis] as i64;
    let (cut, end) = ((-before).max(0), len - (-after).max(0));
    if cut > end {
        return Err(format!("expected pads that remove at most {len} elements of axis {axis}"));
    }
    if (cut, end) != (0, len) {
        x = x.narrow(axis, cut as usize, end as usize);
    }
    let (before, after, len) = (before.max(0), after.max(0), end - cut);
    if (before, after) == (0, 0) {
        return Ok(x);
    }
    if edge == Edge::Constant {
        let block = |count: i64| {
            let mut shape = x.shape();
            shape[axis] = count as usize;
            fill.clone().expand(&shape)
        };
        let parts = [block(before), x.clone(), block(after)];
        let parts = parts.into_iter().filter(|own| own.count() > 0).collect();
        return Ok(Array::concat(parts, axis));
    }
    if len == 0 {
        return Err(format!("expected elements along axis {axis}, got an empty axis"));
    }
    let place = |at: i64| match edge {
        Edge::Repeat => at.clamp(0, len - 1),
        Edge::Wrap => at.rem_euclid(len),
        Edge::Reflect | Edge::Constant => {
            let period = (2 * (len - 1)).max(1);
            let at = at.rem_euclid(period);
            if at < len { at } else { period - at }
        }
    };
    let from: Vec<i64> = (-before..len + after).map(place).collect();
    let count = from.len();
    let device = x.device();
    Ok(x.select(axis, Array::from_data(TensorData::new(from, [count]), &device)))
}
