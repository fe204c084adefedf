//! ONNX backend tests: one folder per test, with a model, inputs and expected outputs.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{Model, OnnxError, Options, ValueType, decode_tensor};
use burn::tensor::{DType, Device, TensorData};

/// Outcome of a test.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// All outputs match.
    Passed,
    /// The model is not supported, with the reason.
    Refused(String),
    /// The run failed, with the reason.
    Failed(String),
    /// An output differs from the expected one.
    Wrong(String),
}

/// A test.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Test {
    /// Name of its folder or file.
    pub name: String,
    /// Its folder with a model and data, or a model `light_NAME.onnx` with outputs in the same
    /// folder.
    pub path: PathBuf,
}

/// Returns the tests in a folder and its subfolders, sorted by name.
///
/// # Errors
/// [`OnnxError::Read`].
pub fn tests(root: &Path) -> Result<Vec<Test>, OnnxError> {
    let failed = |why| OnnxError::Read { path: root.to_owned(), why };
    let mut found = Vec::new();
    for entry in fs::read_dir(root).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if path.join("model.onnx").is_file() || (is_light(&path) && path.is_file()) {
            found.push(Test { name, path });
        } else if path.is_dir() && !path.is_symlink() {
            found.append(&mut tests(&path)?);
        }
    }
    found.sort();
    Ok(found)
}

/// Returns true for a model of the suite `light`, whose inputs are computed and whose outputs are
/// in its folder.
fn is_light(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with("light_") && name.ends_with(".onnx")
}

/// Tolerance of a test.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Tolerance {
    /// 1e-3 of each expected element plus 1e-7, as in ONNX.
    Onnx,
    /// Tolerance relative to the largest element of an output. The argmax of each row must match,
    /// unless both elements are equal within the tolerance.
    OfLargest(f64),
}

/// Runs a test.
pub fn check(test: &Test, tolerance: Tolerance, options: &Options, device: &Device) -> Outcome {
    let path = &test.path;
    let file = if is_light(path) { path.clone() } else { path.join("model.onnx") };
    let model = match Model::open(file, options.clone(), device) {
        Ok(model) => model,
        Err(why) => return Outcome::Refused(why.to_string()),
    };
    if is_light(path) {
        let inputs = model.inputs().iter().map(counted).collect();
        let output = |at: usize| path.with_file_name(format!("{}_output_{at}.pb", test.name));
        let expected = (0..model.outputs().len()).map(|at| read(&output(at)));
        return match expected.collect() {
            Ok(expected) => outcome(&model, tolerance, inputs, expected),
            Err(why) => Outcome::Refused(why.to_string()),
        };
    }
    let mut sets: Vec<PathBuf> = fs::read_dir(path)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.is_dir())
        .collect();
    sets.sort();
    if sets.is_empty() {
        return Outcome::Refused("the test has no data sets".to_owned());
    }
    for set in sets {
        let all = |kind: &str| -> Result<Vec<TensorData>, OnnxError> {
            let path = |at: usize| set.join(format!("{kind}_{at}.pb"));
            (0..).map(path).take_while(|path| path.exists()).map(|path| read(&path)).collect()
        };
        let outcome = match (all("input"), all("output")) {
            (Ok(inputs), Ok(expected)) => outcome(&model, tolerance, inputs, expected),
            (Err(why), _) | (_, Err(why)) => {
                Outcome::Failed(format!("cannot read its data: {why}"))
            }
        };
        if outcome != Outcome::Passed {
            return outcome;
        }
    }
    Outcome::Passed
}

/// Returns the input of a light model, with elements i / count.
fn counted(input: &ValueType) -> TensorData {
    let shape = input.shape.iter().flatten().map(|own| own.parse().unwrap_or(1));
    let shape: Vec<usize> = shape.collect();
    let count: usize = shape.iter().product();
    let each = (0..count).map(|at| (at as f64 / count as f64) as f32);
    TensorData::new(each.collect::<Vec<_>>(), shape)
}

/// Runs a model and compares its outputs.
fn outcome(
    model: &Model,
    tolerance: Tolerance,
    inputs: Vec<TensorData>,
    expected: Vec<TensorData>,
) -> Outcome {
    let outputs = match model.run(inputs) {
        Ok(outputs) => outputs,
        Err(why) => return Outcome::Failed(why.to_string()),
    };
    if outputs.len() != expected.len() {
        let (have, want) = (outputs.len(), expected.len());
        return Outcome::Wrong(format!("expected {want} outputs, got {have}"));
    }
    for (at, (have, want)) in outputs.iter().zip(&expected).enumerate() {
        if let Some(why) = difference(have, want, tolerance) {
            return Outcome::Wrong(format!("output {at}: {why}"));
        }
    }
    Outcome::Passed
}

fn read(path: &Path) -> Result<TensorData, OnnxError> {
    let failed = |why| OnnxError::Read { path: path.to_owned(), why };
    let bytes = fs::read(path).map_err(failed)?;
    decode_tensor(&bytes).map(|own| own.1)
}

/// Describes the difference of two outputs; None within the tolerance.
fn difference(have: &TensorData, want: &TensorData, tolerance: Tolerance) -> Option<String> {
    if have.shape() != want.shape() {
        return Some(format!("expected shape {:?}, got {:?}", want.shape(), have.shape()));
    }
    let same = |have: DType, want: DType| {
        have == want || matches!((have, want), (DType::Bool(_), DType::Bool(_)))
    };
    if !same(have.dtype(), want.dtype()) {
        return Some(format!("expected dtype {:?}, got {:?}", want.dtype(), have.dtype()));
    }
    if !want.dtype().is_float() {
        let [have, want] = [have, want].map(integers);
        let wrong = have.into_iter().zip(want).enumerate().find(|(_, (have, want))| have != want);
        return wrong.map(|(at, (have, want))| format!("element {at} is {have}, expected {want}"));
    }
    let width = want.shape().to_vec().last().copied().unwrap_or(1).max(1);
    let [have, want]: [Vec<f64>; 2] = [have, want].map(|own| own.iter().collect());
    match tolerance {
        Tolerance::Onnx => {
            let close = |at: &usize| equal(have[*at], want[*at], 1e-7 + 1e-3 * want[*at].abs());
            let wrong = (0..want.len()).find(|at| !close(at))?;
            Some(format!("element {wrong} is {}, expected {}", have[wrong], want[wrong]))
        }
        Tolerance::OfLargest(part) => compare_to_largest(&have, &want, width, part),
    }
}

fn integers(data: &TensorData) -> Vec<i128> {
    match data.dtype() {
        DType::U64 => data.iter::<u64>().map(i128::from).collect(),
        _ => data.iter::<i64>().map(i128::from).collect(),
    }
}

fn equal(have: f64, want: f64, within: f64) -> bool {
    have == want || (have.is_nan() && want.is_nan()) || (have - want).abs() <= within
}

/// Describes the element with the largest difference, relative to the largest element, and counts
/// rows with another argmax; None within the tolerance.
fn compare_to_largest(have: &[f64], want: &[f64], width: usize, part: f64) -> Option<String> {
    let most = want.iter().fold(0.0, |most: f64, own| most.max(own.abs()));
    let close = |have: f64, want: f64| equal(have, want, part * most);
    let rows = have.chunks(width).zip(want.chunks(width));
    let moved = rows.filter(|(have, want)| !close(want[argmax(have)], want[argmax(want)]));
    let moved = moved.count();
    let apart = |at: &usize| {
        if equal(have[*at], want[*at], 0.0) { 0.0 } else { (have[*at] - want[*at]).abs() }
    };
    let at = (0..want.len()).max_by(|a, b| apart(a).total_cmp(&apart(b)))?;
    if moved == 0 && close(have[at], want[at]) {
        return None;
    }
    Some(format!(
        "element {at} is {}, expected {}: {:.1e} of the largest; {moved} of {} rows are largest elsewhere",
        have[at],
        want[at],
        apart(&at) / most,
        want.len() / width,
    ))
}

fn argmax(row: &[f64]) -> usize {
    (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(numbers: [f32; 4]) -> TensorData {
        TensorData::new(numbers.to_vec(), [2, 2])
    }

    #[test]
    fn a_tolerance_is_a_part_of_the_largest_number_and_rows_keep_the_place_of_theirs() {
        let want = rows([1.0, 1.05, 100.0, 3.0]);
        let differs = |have, part| difference(&rows(have), &want, Tolerance::OfLargest(part));
        assert_eq!(differs([1.1, 1.05, 100.0, 3.0], 1e-2), None);
        assert_eq!(
            differs([1.0, 1.05, 98.0, 3.0], 1e-2).unwrap(),
            "element 2 is 98, expected 100: 2.0e-2 of the largest; 0 of 2 rows are largest elsewhere"
        );
        assert!(differs([f32::NAN, 1.05, 100.0, 3.0], 1e-2).is_some());
        let want = rows([1.0, 10.0, 10.0, 0.0]);
        let differs = |have| difference(&rows(have), &want, Tolerance::OfLargest(0.6));
        assert_eq!(differs([5.0, 6.0, 10.0, 0.0]), None);
        assert!(
            differs([7.0, 6.0, 10.0, 0.0]).unwrap().ends_with("1 of 2 rows are largest elsewhere")
        );
        let onnx = |have| difference(&rows(have), &want, Tolerance::Onnx);
        assert_eq!(onnx([1.0, 10.005, 10.0, 0.0]), None);
        assert!(onnx([1.0, 10.02, 10.0, 0.0]).is_some());
    }
}
