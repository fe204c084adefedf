//! Official tests of ONNX: a folder for each, with a model, inputs and expected outputs.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{Model, OnnxError, Options, decode_tensor};
use burn::tensor::{DType, Device, TensorData};

/// End of a test.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// All outputs are as expected.
    Passed,
    /// The model is not supported, for this reason.
    Refused(String),
    /// The model ran, and failed.
    Failed(String),
    /// An output differs.
    Wrong(String),
}

/// A test.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Test {
    /// Its name: that of its folder.
    pub name: String,
    /// Its folder.
    pub folder: PathBuf,
}

/// Returns the tests in a folder and in those within it, by name.
///
/// # Errors
/// [`OnnxError::Read`].
pub fn tests(root: &Path) -> Result<Vec<Test>, OnnxError> {
    let failed = |why| OnnxError::Read { path: root.to_owned(), why };
    let mut found = Vec::new();
    for entry in fs::read_dir(root).map_err(failed)? {
        let folder = entry.map_err(failed)?.path();
        if folder.join("model.onnx").is_file() {
            let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            found.push(Test { name, folder });
        } else if folder.is_dir() && !folder.is_symlink() {
            found.append(&mut tests(&folder)?);
        }
    }
    found.sort();
    Ok(found)
}

/// Runs the test in a folder, with the tolerances of ONNX.
pub fn check(folder: &Path, options: &Options, device: &Device) -> Outcome {
    let model = match Model::open(folder.join("model.onnx"), options.clone(), device) {
        Ok(model) => model,
        Err(why) => return Outcome::Refused(why.to_string()),
    };
    let mut sets: Vec<PathBuf> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.is_dir())
        .collect();
    sets.sort();
    if sets.is_empty() {
        return Outcome::Refused("it has no data".to_owned());
    }
    for set in sets {
        let all = |kind: &str| -> Result<Vec<TensorData>, OnnxError> {
            let path = |at: usize| set.join(format!("{kind}_{at}.pb"));
            (0..).map(path).take_while(|path| path.exists()).map(|path| read(&path)).collect()
        };
        let (inputs, expected) = match (all("input"), all("output")) {
            (Ok(inputs), Ok(expected)) => (inputs, expected),
            (Err(why), _) | (_, Err(why)) => return Outcome::Refused(why.to_string()),
        };
        let outputs = match model.run(inputs) {
            Ok(outputs) => outputs,
            Err(why) => return Outcome::Failed(why.to_string()),
        };
        if outputs.len() != expected.len() {
            let (have, want) = (outputs.len(), expected.len());
            return Outcome::Wrong(format!("it has {have} outputs, expected {want}"));
        }
        for (at, (have, want)) in outputs.iter().zip(&expected).enumerate() {
            if let Some(why) = difference(have, want) {
                return Outcome::Wrong(format!("output {at}: {why}"));
            }
        }
    }
    Outcome::Passed
}

fn read(path: &Path) -> Result<TensorData, OnnxError> {
    let failed = |why| OnnxError::Read { path: path.to_owned(), why };
    let bytes = fs::read(path).map_err(failed)?;
    decode_tensor(&bytes).map(|own| own.1)
}

/// Returns how outputs differ, beyond a tolerance of 1e-3 of the expected value and 1e-7.
fn difference(have: &TensorData, want: &TensorData) -> Option<String> {
    if have.shape() != want.shape() {
        return Some(format!("its shape is {:?}, expected {:?}", have.shape(), want.shape()));
    }
    let same = |have: DType, want: DType| {
        have == want || matches!((have, want), (DType::Bool(_), DType::Bool(_)))
    };
    if !same(have.dtype(), want.dtype()) {
        return Some(format!("its type is {:?}, expected {:?}", have.dtype(), want.dtype()));
    }
    if !want.dtype().is_float() {
        let pairs = have.iter::<i64>().zip(want.iter::<i64>()).enumerate();
        let wrong = pairs.into_iter().find(|(_, (have, want))| have != want);
        return wrong.map(|(at, (have, want))| format!("element {at} is {have}, expected {want}"));
    }
    let mut pairs = have.iter::<f64>().zip(want.iter::<f64>()).enumerate();
    let close = |have: f64, want: f64| {
        have == want
            || (have.is_nan() && want.is_nan())
            || (have - want).abs() <= 1e-7 + 1e-3 * want.abs()
    };
    let wrong = pairs.find(|(_, (have, want))| !close(*have, *want));
    wrong.map(|(at, (have, want))| format!("element {at} is {have}, expected {want}"))
}
