//! Attention.

use burn::backend::Dispatch;
use burn::backend::ops::{ActivationOps, FloatTensorOps};
use burn::tensor::{DType, TensorData};

use super::linear::product;
use super::{Call, Inputs, Read, Run};
use crate::array::{Array, Kind, scalar_of};
use crate::tensor;

pub(super) fn read(call: &Call<'_>) -> Read {
    Some(match call.op() {
        "Attention" => attention(call),
        _ => return None,
    })
}

/// Which scores the fourth result has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scores {
    Plain,
    Capped,
    Masked,
    Shares,
}

#[derive(Debug, Clone)]
struct Options {
    causal: bool,
    heads: Option<usize>,
    kv_heads: Option<usize>,
    scale: Option<f64>,
    softcap: f64,
    scores: Scores,
    precision: Option<DType>,
}

fn attention(call: &Call<'_>) -> Result<Run, String> {
    let count = |name: &str| call.int(name).map(|own| own as usize);
    let options = Options {
        causal: call.flag("is_causal"),
        heads: count("q_num_heads"),
        kv_heads: count("kv_num_heads"),
        scale: call.float("scale"),
        softcap: call.float("softcap").unwrap_or(0.0),
        scores: match call.int("qk_matmul_output_mode").unwrap_or(0) {
            0 => Scores::Plain,
            1 => Scores::Capped,
            2 => Scores::Masked,
            3 => Scores::Shares,
            other => return Err(format!("scores of kind {other} are not supported")),
        },
        precision: call
            .int("softmax_precision")
            .map(|own| tensor::dtype(own as i32))
            .transpose()?,
    };
    Ok(Box::new(move |inputs| attend(inputs, &options)))
}

/// Returns `[batch, heads, positions, size]`.
fn with_heads(x: Array, heads: Option<usize>) -> Result<Array, String> {
    match x.shape()[..] {
        [_, _, _, _] => Ok(x),
        [batch, positions, width] => {
            let heads = heads.ok_or("the number of heads is missing")?;
            Ok(x.reshape(&[batch, positions, heads, width / heads]).permute(&[0, 2, 1, 3]))
        }
        _ => Err("an operand has no rank of 3 or 4".to_owned()),
    }
}

fn attend(inputs: &Inputs<'_>, options: &Options) -> Result<Vec<Array>, String> {
    let q = inputs.get(0)?;
    let (flat, dtype) = (q.rank() == 3, q.dtype());
    let q = with_heads(q, options.heads)?;
    let mut k = with_heads(inputs.get(1)?, options.kv_heads)?;
    let mut v = with_heads(inputs.get(2)?, options.kv_heads)?;
    let mut past = 0;
    if let Some(own) = inputs.maybe(4) {
        past = own.shape()[2];
        k = Array::concat(vec![own, k], 2);
    }
    if let Some(own) = inputs.maybe(5) {
        v = Array::concat(vec![own, v], 2);
    }
    let present = [k.clone(), v.clone()];
    let [batch, heads, rows, size] = q.shape()[..] else { return Err("q has no heads".to_owned()) };
    let (kv_heads, columns) = (k.shape()[1], k.shape()[2]);
    if kv_heads == 0 || heads % kv_heads != 0 {
        return Err(format!("{kv_heads} heads of keys do not divide {heads}"));
    }
    let shared = |own: Array| {
        let [batch, heads_of, positions, size] = own.shape()[..] else { unreachable!("rank 4") };
        let each = own.reshape(&[batch, heads_of, 1, positions, size]);
        let each = each.expand(&[batch, heads_of, heads / heads_of, positions, size]);
        each.reshape(&[batch, heads, positions, size])
    };
    let (k, v) = (shared(k), shared(v));
    // Scores are computed in f32, or in f64.
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let scale = options.scale.unwrap_or(1.0 / (size as f64).sqrt()).sqrt();
    let scaled = |own: Array| own.cast(wide).times_number(scale);
    let mut scores = product(inputs.ctx, scaled(q), scaled(k).permute(&[0, 1, 3, 2]))?;
    let mut shown = scores.clone();
    if options.softcap > 0.0 {
        let cap = options.softcap;
        scores = scores.times_number(1.0 / cap).float(Dispatch::float_tanh).times_number(cap);
        if options.scores == Scores::Plain || options.scores == Scores::Capped {
            shown = scores.clone();
        }
    }
    for mask in [
        given_mask(inputs, columns, wide)?,
        causal(options, rows, columns, past, &scores),
        padding(inputs, columns, batch, &scores)?,
    ]
    .into_iter()
    .flatten()
    {
        scores = scores.plus(mask.cast(wide));
    }
    if options.scores == Scores::Masked {
        shown = scores.clone();
    }
    let own = scores.shape();
    let last = own.len() - 1;
    let shares =
        scores.cast(options.precision.filter(|own| own.is_float()).unwrap_or(wide)).cast(wide);
    let shares = Array::of(Dispatch::softmax(shares.into_inner(), last));
    if options.scores == Scores::Shares {
        shown = shares.clone();
    }
    let mut out = product(inputs.ctx, shares, v.cast(wide))?;
    if flat {
        let width = heads * out.shape()[3];
        out = out.permute(&[0, 2, 1, 3]).reshape(&[batch, rows, width]);
    }
    let [keys, values] = present;
    Ok(vec![out.cast(dtype), keys, values, shown.cast(dtype)])
}

/// Returns the mask that is given, as numbers to add; columns that it lacks are masked.
fn given_mask(inputs: &Inputs<'_>, columns: usize, wide: DType) -> Result<Option<Array>, String> {
    let Some(mask) = inputs.maybe(3) else { return Ok(None) };
    let device = mask.device();
    let number =
        |value: f64, shape: &[usize]| Array::full(shape, scalar_of(value, wide), wide, &device);
    let mask = match mask.kind() {
        Kind::Bool => mask.choose(number(0.0, &[]), number(f64::NEG_INFINITY, &[]))?,
        _ => mask.cast(wide),
    };
    let mut shape = mask.shape();
    let last = shape.len() - 1;
    let more = columns.saturating_sub(shape[last]);
    if more == 0 {
        return Ok(Some(mask));
    }
    shape[last] = more;
    Ok(Some(Array::concat(vec![mask, number(f64::NEG_INFINITY, &shape)], last)))
}

fn causal(
    options: &Options,
    rows: usize,
    columns: usize,
    past: usize,
    like: &Array,
) -> Option<Array> {
    let value =
        |row: usize, column: usize| if column > row + past { f32::NEG_INFINITY } else { 0.0 };
    let all = || (0..rows).flat_map(|row| (0..columns).map(move |column| value(row, column)));
    options.causal.then(|| {
        let data = TensorData::new(all().collect::<Vec<f32>>(), [rows, columns]);
        Array::from_data(data, &like.device())
    })
}

/// Masks keys beyond the lengths of sequences.
fn padding(
    inputs: &Inputs<'_>,
    columns: usize,
    batch: usize,
    like: &Array,
) -> Result<Option<Array>, String> {
    let Some(lengths) = inputs.maybe(6) else { return Ok(None) };
    let lengths = lengths.ints()?;
    let value =
        |length: i64, column: usize| if (column as i64) < length { 0.0 } else { f32::NEG_INFINITY };
    let all = lengths.iter().flat_map(|own| (0..columns).map(|column| value(*own, column)));
    let data = TensorData::new(all.collect::<Vec<f32>>(), [batch, 1, 1, columns]);
    Ok(Some(Array::from_data(data, &like.device())))
}
