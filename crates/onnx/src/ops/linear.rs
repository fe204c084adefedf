//! Matmuls, einsum and determinants.

use burn::backend::Dispatch;
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::tensor::DType;

use ops::{Ctx, Epilogue, OpError};

use super::fused::is_ours;
use super::{Call, Read};
use crate::array::{Array, Kind, broadcast};

pub(super) fn read(call: &Call<'_>) -> Read {
    Some(Ok(match call.op() {
        "MatMul" => {
            Box::new(|inputs| Ok(vec![matmul(inputs.ctx, inputs.get(0)?, inputs.get(1)?)?]))
        }
        "Gemm" => {
            let (alpha, beta) =
                (call.float("alpha").unwrap_or(1.0), call.float("beta").unwrap_or(1.0));
            let transposed = [call.flag("transA"), call.flag("transB")];
            Box::new(move |inputs| {
                let [a, b] = [0, 1].map(|at| {
                    let own = inputs.get(at)?;
                    Ok::<_, String>(if transposed[at] { own.permute(&[1, 0]) } else { own })
                });
                let out = matmul(inputs.ctx, a?, b?)?;
                let out = if alpha == 1.0 { out } else { out.times_number(alpha) };
                Ok(vec![match inputs.maybe(2) {
                    None => out,
                    Some(_) if beta == 0.0 => out,
                    Some(c) if beta == 1.0 => out.plus(c),
                    Some(c) => out.plus(c.times_number(beta)),
                }])
            })
        }
        "Einsum" => {
            let equation = call.text("equation").unwrap_or_default().to_owned();
            Box::new(move |inputs| Ok(vec![einsum(inputs.ctx, &equation, inputs.each()?)?]))
        }
        "Det" => Box::new(|inputs| Ok(vec![determinant(&inputs.get(0)?)?])),
        _ => return None,
    }))
}

/// Computes a matmul with our kernel; None for operands that it does not support.
fn by_kernel(ctx: &Ctx, a: &Array, b: &Array) -> Result<Option<Array>, String> {
    let ranks = [a.rank(), b.rank()];
    let plain = ranks.iter().all(|rank| (2..=4).contains(rank)) && a.dtype() == b.dtype();
    let here = !a.is_on_host() && !b.is_on_host();
    if !plain || !here || !is_ours(a.dtype()) {
        return Ok(None);
    }
    let text = |why: OpError| why.to_string();
    let (a, b) = (a.clone(), b.clone());
    if ranks[1] == 2 && ranks[0] > 2 {
        // One matrix for all batches: a single matmul.
        let (mut shape, width) = (a.shape(), b.shape()[1]);
        let k = shape.pop().unwrap_or(0);
        let rows = shape.iter().product();
        shape.push(width);
        let a = a.reshape(&[rows, k]).tensor::<2>();
        let out = ops::matmul(ctx, a, b.tensor::<2>(), Epilogue::default()).map_err(text)?;
        return Ok(Some(Array::from_tensor(out).reshape(&shape)));
    }
    let out = ops::matmul(ctx, a.tensor::<4>(), b.tensor::<4>(), Epilogue::default());
    let out = Array::from_tensor(out.map_err(text)?);
    let shape = out.shape()[4 - ranks[0].max(ranks[1])..].to_vec();
    Ok(Some(out.reshape(&shape)))
}

/// Computes a matmul like NumPy's: vectors are rows or columns, and batches broadcast. Our kernels
/// run where the device has them, because Burn rounds f32 to tf32.
pub(crate) fn matmul(ctx: &Ctx, a: Array, b: Array) -> Result<Array, String> {
    if let Some(made) = by_kernel(ctx, &a, &b)? {
        return Ok(made);
    }
    let (mut of_a, of_b) = (a.shape(), b.shape());
    if of_a.is_empty() || of_b.is_empty() {
        return Err(format!(
            "expected operands of rank 1 or more, got shapes {of_a:?} and {of_b:?}"
        ));
    }
    let [row, column] = [of_a.len() == 1, of_b.len() == 1];
    if row || column {
        let a = if row { a.reshape(&[1, of_a[0]]) } else { a };
        let b = if column { b.reshape(&[of_b[0], 1]) } else { b };
        let out = matmul(ctx, a, b)?;
        let mut shape = out.shape();
        let rows = shape.len() - 2;
        if column {
            shape.pop();
        }
        if row {
            shape.remove(rows);
        }
        return Ok(out.reshape(&shape));
    }
    if of_a.len() > 2 && of_b.len() == 2 && of_a.last() == of_b.first() {
        // One matrix for all batches: a single matmul.
        let k = of_a.pop().unwrap_or(0);
        let rows = matmul(ctx, a.reshape(&[of_a.iter().product(), k]), b)?;
        of_a.push(of_b[1]);
        return Ok(rows.reshape(&of_a));
    }
    let [(batch_a, matrix_a), (batch_b, matrix_b)] =
        [&of_a, &of_b].map(|own| own.split_at(own.len() - 2));
    if matrix_a[1] != matrix_b[0] {
        return Err(format!("expected equal inner dimensions, got shapes {of_a:?} and {of_b:?}"));
    }
    let batch = broadcast(&[batch_a.to_vec(), batch_b.to_vec()]);
    let batch =
        batch.ok_or_else(|| format!("batches of {of_a:?} and {of_b:?} do not broadcast"))?;
    let shape = [&batch, &[matrix_a[0], matrix_b[1]][..]].concat();
    if !a.is_on_host() {
        // Our kernels take one dimension of batches.
        let flat = |own: &Array, matrix: &[usize]| {
            let whole = own.clone().expand(&[&batch, matrix].concat());
            whole.reshape(&[batch.iter().product(), matrix[0], matrix[1]])
        };
        if let Some(out) = by_kernel(ctx, &flat(&a, matrix_a), &flat(&b, matrix_b))? {
            return Ok(out.reshape(&shape));
        }
    }
    let padded = |own: Array, matrix: &[usize]| {
        let ones = vec![1; shape.len() - own.rank()];
        let own_batch = &own.shape()[..own.rank() - 2];
        own.reshape(&[&ones, own_batch, matrix].concat())
    };
    let (a, b) = (padded(a, matrix_a), padded(b, matrix_b));
    let is_float = a.kind() == Kind::Float;
    let (a, b) = (a.into_inner(), b.into_inner());
    Ok(Array::from_dispatch(match is_float {
        true => Dispatch::float_matmul(a, b),
        false => Dispatch::int_matmul(a, b),
    })
    .reshape(&shape))
}

/// Computes an Einstein sum: sums over the labels that the output lacks.
fn einsum(ctx: &Ctx, equation: &str, inputs: Vec<Array>) -> Result<Array, String> {
    let text: String = equation.chars().filter(|own| !own.is_whitespace()).collect();
    let (left, right) = match text.split_once("->") {
        Some((left, right)) => (left.to_owned(), Some(right.to_owned())),
        None => (text, None),
    };
    let terms: Vec<&str> = left.split(',').collect();
    if terms.len() != inputs.len() {
        let (want, have) = (terms.len(), inputs.len());
        return Err(format!("expected {want} inputs for equation `{equation}`, got {have}"));
    }
    // An ellipsis is any number of dimensions: they get labels that are no letters.
    let named = |term: &str| term.chars().filter(|own| *own != '.').count();
    let dots = |term: &str, rank: usize| {
        if term.contains("...") { rank.saturating_sub(named(term)) } else { 0 }
    };
    let most =
        terms.iter().zip(&inputs).map(|(term, own)| dots(term, own.rank())).max().unwrap_or(0);
    let labels = |term: &str, count: usize| -> Vec<char> {
        let any = (most - count..most).map(|at| char::from(b'0' + at as u8)).collect::<String>();
        term.replace("...", &any).chars().collect()
    };
    let each: Vec<Vec<char>> =
        terms.iter().zip(&inputs).map(|(term, own)| labels(term, dots(term, own.rank()))).collect();
    let out = match right {
        Some(right) => labels(&right, most),
        None => {
            let mut all: Vec<char> = each.concat();
            all.sort_unstable();
            let once = |own: &char| {
                own.is_ascii_digit() || all.iter().filter(|other| *other == own).count() == 1
            };
            let mut out: Vec<char> = all.iter().copied().filter(once).collect();
            out.dedup();
            out
        }
    };
    let mut result: Option<(Array, Vec<char>)> = None;
    let rest = |from: usize| each[from..].concat();
    for (at, (array, labels)) in inputs.into_iter().zip(&each).enumerate() {
        let own = diagonal(array, labels)?;
        let later = rest(at + 1);
        let keeps = |label| out.contains(&label) || later.contains(&label);
        result = Some(match result {
            None => summed(own, &keeps),
            Some(before) => product(ctx, before, own, &keeps)?,
        });
    }
    let (array, labels) = result.ok_or("expected at least one input, got none")?;
    let order = out.iter().map(|own| labels.iter().position(|have| have == own));
    let order: Vec<usize> =
        order.collect::<Option<_>>().ok_or("the output has a label that no input has")?;
    Ok(array.permute(&order))
}

/// Takes the diagonal of dimensions with equal labels.
fn diagonal(mut array: Array, labels: &[char]) -> Result<(Array, Vec<char>), String> {
    let mut labels = labels.to_vec();
    if labels.len() != array.rank() {
        let (want, have) = (labels.len(), array.rank());
        return Err(format!("expected an input of rank {want} for its labels, got rank {have}"));
    }
    while let Some((one, other)) = (0..labels.len())
        .flat_map(|one| (one + 1..labels.len()).map(move |other| (one, other)))
        .find(|(one, other)| labels[*one] == labels[*other])
    {
        let shape = array.shape();
        let len = shape[one];
        let mut each = vec![1; shape.len()];
        each[one] = len;
        let mut index = shape.clone();
        index[other] = 1;
        let places = Array::arange(len, &array.device()).reshape(&each).expand(&index);
        let taken = array.gather(other, places);
        index.remove(other);
        array = taken.reshape(&index);
        labels.remove(other);
    }
    Ok((array, labels))
}

/// Multiplies two terms and sums over the labels that are not kept: a matmul, where one sums over
/// labels of both.
fn product(
    ctx: &Ctx,
    (a, of_a): (Array, Vec<char>),
    (b, of_b): (Array, Vec<char>),
    keeps: &dyn Fn(char) -> bool,
) -> Result<(Array, Vec<char>), String> {
    let (a, of_a) = summed((a, of_a), &|label| keeps(label) || of_b.contains(&label));
    let (b, of_b) = summed((b, of_b), &|label| keeps(label) || of_a.contains(&label));
    let shared: Vec<char> = of_a.iter().copied().filter(|own| of_b.contains(own)).collect();
    let (batch, inner): (Vec<char>, Vec<char>) = shared.iter().copied().partition(|l| keeps(*l));
    let size = |array: &Array, labels: &[char], label: char| {
        labels.iter().position(|own| *own == label).map(|at| array.shape()[at])
    };
    if inner.is_empty() || shared.iter().any(|l| size(&a, &of_a, *l) != size(&b, &of_b, *l)) {
        return Ok(summed(multiply((a, of_a), (b, of_b)), keeps));
    }
    let only = |labels: &[char]| -> Vec<char> {
        labels.iter().copied().filter(|own| !shared.contains(own)).collect()
    };
    let (left, right) = (only(&of_a), only(&of_b));
    // Reorders to three groups of labels, and makes each group one dimension.
    let grouped = |array: &Array, labels: &[char], groups: [&[char]; 3]| {
        let order: Vec<usize> = groups
            .concat()
            .iter()
            .filter_map(|own| labels.iter().position(|have| have == own))
            .collect();
        let sizes = groups.map(|own| own.iter().filter_map(|l| size(array, labels, *l)).product());
        array.clone().permute(&order).reshape(&sizes)
    };
    let lhs = grouped(&a, &of_a, [&batch, &left, &inner]);
    let rhs = grouped(&b, &of_b, [&batch, &inner, &right]);
    let labels = [batch, left, right].concat();
    let sizes = labels.iter().filter_map(|l| size(&a, &of_a, *l).or_else(|| size(&b, &of_b, *l)));
    let sizes: Vec<usize> = sizes.collect();
    Ok((matmul(ctx, lhs, rhs)?.reshape(&sizes), labels))
}

/// Multiplies elementwise; the result has the labels of both.
fn multiply((a, of_a): (Array, Vec<char>), (b, of_b): (Array, Vec<char>)) -> (Array, Vec<char>) {
    let mut labels = of_a.clone();
    labels.extend(of_b.iter().filter(|own| !of_a.contains(own)));
    let spread = |own: Array, have: &[char]| {
        let (shape, mut order) = (own.shape(), Vec::new());
        let mut to = Vec::new();
        for label in &labels {
            match have.iter().position(|own| own == label) {
                Some(at) => {
                    order.push(at);
                    to.push(shape[at]);
                }
                None => to.push(1),
            }
        }
        own.permute(&order).reshape(&to)
    };
    let (a, b) = (spread(a, &of_a), spread(b, &of_b));
    (a.times(b), labels)
}

fn summed((array, labels): (Array, Vec<char>), keeps: &dyn Fn(char) -> bool) -> (Array, Vec<char>) {
    let mut shape = array.shape();
    let is_float = array.kind() == Kind::Float;
    let mut tensor = array.into_inner();
    for at in (0..labels.len()).filter(|at| !keeps(labels[*at])) {
        tensor = match is_float {
            true => Dispatch::float_sum_dim(tensor, at),
            false => Dispatch::int_sum_dim(tensor, at),
        };
        shape[at] = 1;
    }
    let kept: Vec<usize> = (0..labels.len()).filter(|at| keeps(labels[*at])).collect();
    let shape: Vec<usize> = kept.iter().map(|at| shape[*at]).collect();
    (Array::from_dispatch(tensor).reshape(&shape), kept.iter().map(|at| labels[*at]).collect())
}

/// Computes determinants by elimination in f64 on the host.
fn determinant(x: &Array) -> Result<Array, String> {
    let own = x.shape();
    let [.., rows, columns] = own[..] else {
        return Err(format!("expected x of rank 2 or more, got shape {own:?}"));
    };
    if rows != columns {
        return Err(format!("expected square matrices, got shape {own:?}"));
    }
    let all = x.floats()?;
    let determinant = |matrix: &[f64]| {
        let mut m = matrix.to_vec();
        let mut value = 1.0;
        for at in 0..rows {
            let largest = (at..rows).max_by(|one, other| {
                m[one * rows + at].abs().total_cmp(&m[other * rows + at].abs())
            });
            let pivot = largest.unwrap_or(at);
            if pivot != at {
                (0..rows).for_each(|column| m.swap(at * rows + column, pivot * rows + column));
                value = -value;
            }
            value *= m[at * rows + at];
            if m[at * rows + at] == 0.0 {
                return 0.0;
            }
            for row in at + 1..rows {
                let factor = m[row * rows + at] / m[at * rows + at];
                (at..rows)
                    .for_each(|column| m[row * rows + column] -= factor * m[at * rows + column]);
            }
        }
        value
    };
    let values: Vec<f64> = all.chunks(rows * rows).map(determinant).collect();
    let shape = own[..own.len() - 2].to_vec();
    let data = burn::tensor::TensorData::new(values, shape).convert_dtype(match x.dtype() {
        DType::F64 => DType::F64,
        other => other,
    });
    Ok(Array::from_data(data, &x.device()))
}
