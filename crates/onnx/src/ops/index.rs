//! Gather, scatter and other operators on indices.

use burn::backend::Dispatch;
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::tensor::{DType, IndexingUpdateOp, TensorData};

use super::{Call, Inputs, Read, axis};
use crate::array::{Array, Kind, Order};
use crate::devices::host;

pub(super) fn read(call: &Call<'_>) -> Read {
    Some(Ok(match call.op() {
        "Gather" => {
            let at = call.int("axis").unwrap_or(0);
            Box::new(move |inputs| {
                let (x, indices) = (inputs.get(0)?, inputs.get(1)?);
                let at = axis(at, x.rank())?;
                let (own, index_shape) = (x.shape(), indices.shape());
                // A single index gives a view.
                if indices.count() == 1 && indices.is_known() {
                    let (index, len) = (indices.ints()?[0], own[at]);
                    let place = axis(index, len).map_err(|_| {
                        format!("expected an index below {len} for axis {at}, got {index}")
                    })?;
                    let shape = [&own[..at], &index_shape[..], &own[at + 1..]].concat();
                    return Ok(vec![x.narrow(at, place, place + 1).reshape(&shape)]);
                }
                let indices = from_start(indices, own[at]);
                let flat = indices.clone().reshape(&[indices.count()]).on(&x.device());
                let shape = [&own[..at], &index_shape[..], &own[at + 1..]].concat();
                Ok(vec![x.select(at, flat).reshape(&shape)])
            })
        }
        "GatherElements" => {
            let at = call.int("axis").unwrap_or(0);
            Box::new(move |inputs| {
                let (x, indices) = (inputs.get(0)?, inputs.get(1)?);
                let at = axis(at, x.rank())?;
                let (own, index_shape) = (x.shape(), indices.shape());
                let indices = from_start(indices, own[at]).on(&x.device());
                // Other dimensions of the indices may be shorter.
                let mut x = x;
                for (dim, len) in index_shape.iter().enumerate().filter(|(dim, _)| *dim != at) {
                    x = x.narrow(dim, 0, *len);
                }
                Ok(vec![x.gather(at, indices)])
            })
        }
        "GatherND" => {
            let batch = call.int("batch_dims").unwrap_or(0) as usize;
            Box::new(move |inputs| gather_nd(inputs, batch))
        }
        "Scatter" | "ScatterElements" => {
            let at = call.int("axis").unwrap_or(0);
            let by = match reduction(call) {
                Ok(by) => by,
                Err(why) => return Some(Err(why)),
            };
            Box::new(move |inputs| scatter_elements(inputs, at, by))
        }
        "ScatterND" => {
            let by = match reduction(call) {
                Ok(by) => by,
                Err(why) => return Some(Err(why)),
            };
            Box::new(move |inputs| scatter_nd(inputs, by))
        }
        "NonZero" => Box::new(|inputs| {
            let x = inputs.get(0)?;
            let (rank, shape) = (x.rank(), x.shape());
            let flags: Vec<bool> = x.cast(crate::tensor::BOOL).to_data()?.iter::<bool>().collect();
            let found: Vec<usize> = (0..flags.len()).filter(|at| flags[*at]).collect();
            let places = (0..rank).flat_map(|dim| {
                let step: usize = shape[dim + 1..].iter().product();
                let len = shape[dim];
                found.iter().map(move |at| (at / step % len) as i64).collect::<Vec<_>>()
            });
            let places: Vec<i64> = places.collect();
            let data = TensorData::new(places, [rank, found.len()]);
            Ok(vec![Array::from_data(data, inputs.device)])
        }),
        "Compress" => {
            let at = call.int("axis");
            Box::new(move |inputs| {
                let (x, keeps) = (inputs.get(0)?, inputs.get(1)?);
                let (x, at) = match at {
                    Some(at) => (x.clone(), axis(at, x.rank())?),
                    None => (x.clone().reshape(&[x.count()]), 0),
                };
                let keeps = keeps.cast(DType::I64).ints()?;
                let kept: Vec<i64> =
                    (0..keeps.len() as i64).filter(|at| keeps[*at as usize] != 0).collect();
                let count = kept.len();
                let kept = Array::from_data(TensorData::new(kept, [count]), &x.device());
                Ok(vec![x.select(at, kept)])
            })
        }
        "OneHot" => {
            let at = call.int("axis").unwrap_or(-1);
            Box::new(move |inputs| {
                let (indices, values) = (inputs.get(0)?, inputs.get(2)?);
                let depth = inputs.get(1)?.cast(DType::I64).lengths()?[0];
                let at = axis(at, indices.rank() + 1)?;
                let own = indices.shape();
                let indices = from_start(indices.cast(DType::I64), depth);
                let mut with = own.clone();
                with.insert(at, 1);
                let mut each = vec![1; own.len() + 1];
                each[at] = depth;
                let places = Array::arange(depth, &indices.device()).reshape(&each);
                let same = indices.reshape(&with).compared(places, Order::Equal);
                let value = |index: usize| values.clone().narrow(0, index, index + 1).reshape(&[]);
                Ok(vec![same.choose(value(1), value(0))?])
            })
        }
        _ => return None,
    }))
}

/// Makes negative indices, which count from the end of `len` elements, non-negative.
fn from_start(indices: Array, len: usize) -> Array {
    let indices = indices.cast(DType::I64);
    let zero = Array::full(&[], 0i64.into(), DType::I64, &indices.device());
    let below = zero.compared(indices.clone(), Order::Greater).cast(DType::I64);
    indices.plus(below.times_number(len as f64))
}

/// Returns the reduction of a scatter.
fn reduction(call: &Call<'_>) -> Result<IndexingUpdateOp, String> {
    Ok(match call.text("reduction").unwrap_or("none") {
        "none" => IndexingUpdateOp::Assign,
        "add" => IndexingUpdateOp::Add,
        "mul" => IndexingUpdateOp::Mul,
        "min" => IndexingUpdateOp::Min,
        "max" => IndexingUpdateOp::Max,
        other => return Err(format!("reduction `{other}` is not supported")),
    })
}

/// Returns the flat index of each index tuple, and the number of elements per tuple.
fn flat_places(shape: &[usize], indices: &Array) -> Result<(Vec<i64>, usize), String> {
    let index_shape = indices.shape();
    let depth = *index_shape.last().ok_or("expected indices of rank 1 or more, got a scalar")?;
    if depth > shape.len() {
        let rank = shape.len();
        return Err(format!("expected at most {rank} indices per element, got {depth}"));
    }
    let block: usize = shape[depth..].iter().product();
    let all = indices.ints()?;
    let place = |row: &[i64]| {
        row.iter().zip(shape).try_fold(0i64, |place, (index, len)| {
            let len = *len as i64;
            let index = if *index < 0 { index + len } else { *index };
            (0..len).contains(&index).then_some(place * len + index)
        })
    };
    let rows = all.chunks(depth.max(1)).map(place).collect::<Option<Vec<_>>>();
    let rows = rows.ok_or_else(|| format!("an index is out of range for shape {shape:?}"))?;
    Ok((rows, block))
}

fn gather_nd(inputs: &Inputs<'_>, batch: usize) -> Result<Vec<Array>, String> {
    let (x, indices) = (inputs.get(0)?, inputs.get(1)?);
    let (own, index_shape) = (x.shape(), indices.shape());
    let depth = *index_shape.last().ok_or("expected indices of rank 1 or more, got a scalar")?;
    let shape = [&index_shape[..index_shape.len() - 1], &own[batch + depth..]].concat();
    let batches: usize = own[..batch].iter().product();
    let (places, block) = flat_places(&own[batch..], &indices)?;
    let each = places.len() / batches.max(1);
    let rows: usize = own[batch..batch + depth].iter().product();
    let places: Vec<i64> = places
        .iter()
        .enumerate()
        .map(|(at, place)| (at / each.max(1) * rows) as i64 + place)
        .collect();
    let count = places.len();
    let x = x.reshape(&[batches * rows, block]);
    let places = Array::from_data(TensorData::new(places, [count]), &x.device());
    Ok(vec![x.select(0, places).reshape(&shape)])
}

fn scatter_elements(
    inputs: &Inputs<'_>,
    at: i64,
    by: IndexingUpdateOp,
) -> Result<Vec<Array>, String> {
    let (x, indices, updates) = (inputs.get(0)?, inputs.get(1)?, inputs.get(2)?);
    let own = x.shape();
    let at = axis(at, own.len())?;
    let index_shape = indices.shape();
    let all = from_start(indices, own[at]).ints()?;
    // One index tuple per update, in the order of the updates.
    let mut places = Vec::with_capacity(all.len());
    for (number, index) in all.iter().enumerate() {
        let (mut rest, mut place, mut step) = (number, 0, 1);
        for dim in (0..own.len()).rev() {
            let own_index = if dim == at { *index as usize } else { rest % index_shape[dim] };
            rest /= index_shape[dim];
            place += own_index * step;
            step *= own[dim];
        }
        places.push(place as i64);
    }
    let count = x.count();
    let updates = updates.clone().reshape(&[updates.count(), 1]);
    let out = scattered(x.reshape(&[count, 1]), places, updates, by)?;
    Ok(vec![out.reshape(&own)])
}

fn scatter_nd(inputs: &Inputs<'_>, by: IndexingUpdateOp) -> Result<Vec<Array>, String> {
    let (x, indices, updates) = (inputs.get(0)?, inputs.get(1)?, inputs.get(2)?);
    let own = x.shape();
    let (places, block) = flat_places(&own, &indices)?;
    let rows = places.len();
    let count = x.count();
    let x = x.reshape(&[count / block.max(1), block]);
    let out = scattered(x, places, updates.reshape(&[rows, block]), by)?;
    Ok(vec![out.reshape(&own)])
}

/// Applies updates `[updates, block]` to rows of `[rows, block]`, in order.
fn scattered(
    x: Array,
    places: Vec<i64>,
    updates: Array,
    by: IndexingUpdateOp,
) -> Result<Array, String> {
    if x.kind() == Kind::Bool {
        let dtype = x.dtype();
        let (x, updates) = (x.cast(DType::I32), updates.cast(DType::I32));
        return Ok(scattered(x, places, updates, by)?.cast(dtype));
    }
    let rows = places.len();
    // On a device, Burn applies only one of several updates to one row. The host applies all.
    let mut named = places.clone();
    named.sort_unstable();
    let twice = named.windows(2).any(|pair| pair[0] == pair[1]);
    let device = x.device();
    let (x, updates) = match twice {
        true => (x.on(&host()), updates.on(&host())),
        false => (x, updates),
    };
    let places = Array::from_data(TensorData::new(places, [rows, 1]), &x.device()).into_inner();
    let is_float = x.kind() == Kind::Float;
    let (x, updates) = (x.into_inner(), updates.into_inner());
    let out = Array::from_dispatch(match is_float {
        true => Dispatch::float_scatter_nd(x, places, updates, by),
        false => Dispatch::int_scatter_nd(x, places, updates, by),
    });
    Ok(out.on(&device))
}
