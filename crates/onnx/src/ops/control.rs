//! Control flow: operators that run subgraphs.

use std::cell::Cell;

use burn::tensor::{DType, TensorData};

use super::{Call, Inputs, Read, Run, Subgraph, axis};
use crate::array::Array;

/// Maximum iterations of a loop, including those of its inner loops.
const MAX_ITERATIONS: usize = 1_000_000;

thread_local! {
    /// Remaining iterations of this thread's outermost loop, while one runs.
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Runs a loop. The outermost loop starts the count.
fn counted<T>(run: impl FnOnce() -> T) -> T {
    /// Ends the count, also after an error.
    struct End(bool);
    impl Drop for End {
        fn drop(&mut self) {
            if self.0 {
                LEFT.set(None);
            }
        }
    }
    let end = End(LEFT.get().is_none());
    LEFT.set(LEFT.get().or(Some(MAX_ITERATIONS)));
    let made = run();
    drop(end);
    made
}

/// Counts an iteration.
///
/// # Errors
/// The limit is reached.
fn count() -> Result<(), String> {
    let left = LEFT.get().unwrap_or(0).checked_sub(1);
    LEFT.set(Some(left.ok_or_else(|| {
        format!("the loop did not end within {MAX_ITERATIONS} iterations, including inner loops")
    })?));
    Ok(())
}

pub(super) fn read(call: &Call<'_>) -> Read {
    Some(match call.op() {
        "If" => branch(call),
        "Loop" => repeat(call),
        "Scan" if call.opset < 9 => {
            Err("scans over batches (opset 8) are not supported".to_owned())
        }
        "Scan" => scan(call),
        _ => return None,
    })
}

fn run(graph: &Subgraph, inputs: &Inputs<'_>, given: Vec<Array>) -> Result<Vec<Array>, String> {
    let captured = inputs.all[graph.captured.clone()].iter().cloned();
    let captured = captured.collect::<Option<Vec<_>>>().ok_or("a captured value is missing")?;
    graph
        .program
        .run(inputs.ctx, given.into_iter().chain(captured).collect())
        .map_err(|why| why.to_string())
}

fn is_true(flag: &Array) -> Result<bool, String> {
    Ok(flag.clone().cast(DType::I64).ints()?.first() == Some(&1))
}

fn branch(call: &Call<'_>) -> Result<Run, String> {
    let (then, other) = (call.subgraph("then_branch")?, call.subgraph("else_branch")?);
    Ok(Box::new(move |inputs| {
        let taken = if is_true(&inputs.get(0)?)? { &then } else { &other };
        run(taken, inputs, Vec::new())
    }))
}

fn repeat(call: &Call<'_>) -> Result<Run, String> {
    let body = call.subgraph("body")?;
    let carried = call.given().saturating_sub(2);
    Ok(Box::new(move |inputs| {
        counted(|| {
            let iterations = inputs.maybe(0).map(|own| own.ints()).transpose()?;
            let iterations = iterations.and_then(|own| own.first().copied());
            let mut goes_on = inputs.maybe(1).map_or(Ok(true), |own| is_true(&own))?;
            let mut values: Vec<Array> =
                (0..carried).map(|at| inputs.get(at + 2)).collect::<Result<_, _>>()?;
            let mut collected: Vec<Vec<Array>> = Vec::new();
            let mut iteration = 0;
            while goes_on && iterations.is_none_or(|iterations| iteration < iterations) {
                count()?;
                let number = TensorData::new(vec![iteration], Vec::<usize>::new());
                let flag = TensorData::new(vec![true], Vec::<usize>::new());
                let mut given = vec![
                    Array::from_data(number, inputs.host),
                    Array::from_data(flag, inputs.host),
                ];
                given.append(&mut values);
                let mut made = run(&body, inputs, given)?.into_iter();
                goes_on = is_true(&made.next().ok_or("the body returns no condition")?)?;
                values = made.by_ref().take(carried).collect();
                for (at, own) in made.enumerate() {
                    if collected.len() <= at {
                        collected.push(Vec::new());
                    }
                    collected[at].push(own);
                }
                iteration += 1;
            }
            for (at, shape) in body.outputs.iter().skip(1 + carried).enumerate() {
                values.push(match collected.get(at) {
                    Some(all) => stacked(all.clone(), 0),
                    None => {
                        let (dtype, shape) = shape.as_ref().ok_or(
                            "the dtype of an output is unknown: the loop ran no iteration",
                        )?;
                        let whole = [&[0][..], shape].concat();
                        Array::from_data(
                            TensorData::from_bytes_vec(Vec::new(), whole, *dtype),
                            inputs.device,
                        )
                    }
                });
            }
            Ok(values)
        })
    }))
}

/// Joins tensors along a new dimension.
fn stacked(all: Vec<Array>, at: usize) -> Array {
    let with = |own: Array| {
        let mut shape = own.shape();
        shape.insert(at, 1);
        own.reshape(&shape)
    };
    Array::concat(all.into_iter().map(with).collect(), at)
}

fn scan(call: &Call<'_>) -> Result<Run, String> {
    let body = call.subgraph("body")?;
    let scanned = call.int("num_scan_inputs").unwrap_or(0) as usize;
    let carried = call
        .given()
        .checked_sub(scanned)
        .ok_or_else(|| format!("expected at least {scanned} inputs, got {}", call.given()))?;
    let list = |name: &str| call.ints(name).map(<[i64]>::to_vec).unwrap_or_default();
    let (in_axes, out_axes) = (list("scan_input_axes"), list("scan_output_axes"));
    let (in_reversed, out_reversed) =
        (list("scan_input_directions"), list("scan_output_directions"));
    Ok(Box::new(move |inputs| {
        let mut values: Vec<Array> =
            (0..carried).map(|at| inputs.get(at)).collect::<Result<_, _>>()?;
        let mut sources = Vec::new();
        for at in 0..scanned {
            let x = inputs.get(carried + at)?;
            let along = axis(in_axes.get(at).copied().unwrap_or(0), x.rank())?;
            sources.push((x, along, in_reversed.get(at) == Some(&1)));
        }
        let iterations = sources.first().map_or(0, |(x, along, _)| x.shape()[*along]);
        let mut collected: Vec<Vec<Array>> = Vec::new();
        for iteration in 0..iterations {
            let part = |(x, along, reversed): &(Array, usize, bool)| {
                let at = if *reversed { iterations - 1 - iteration } else { iteration };
                let mut shape = x.shape();
                shape.remove(*along);
                x.clone().narrow(*along, at, at + 1).reshape(&shape)
            };
            let given = std::mem::take(&mut values).into_iter().chain(sources.iter().map(part));
            let mut made = run(&body, inputs, given.collect())?.into_iter();
            values = made.by_ref().take(carried).collect();
            for (at, own) in made.enumerate() {
                if collected.len() <= at {
                    collected.push(Vec::new());
                }
                collected[at].push(own);
            }
        }
        for (at, mut all) in collected.into_iter().enumerate() {
            if out_reversed.get(at) == Some(&1) {
                all.reverse();
            }
            let along = axis(out_axes.get(at).copied().unwrap_or(0), all[0].rank() + 1)?;
            values.push(stacked(all, along));
        }
        Ok(values)
    }))
}
