//! `flashover compare --onnx`: the outputs of one graph on several backends, and its speed.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use flashover::Backend;
use flashover::burn::tensor::TensorData;
use flashover::onnx::{Passes, inspect, random};
use report::fail::check;
use report::{Align, CompareArgs, CompareFormat, Device, Doctor, Style, Table, digits, error};
use serde::{Deserialize, Serialize};

use crate::onnx_command::{dimension, tensors};

/// Result of a comparison.
#[derive(Debug, Clone, Serialize)]
struct Report {
    graph: String,
    profile: Option<String>,
    reference: Option<String>,
    rows: Vec<Row>,
}

/// Results on one backend.
#[derive(Debug, Clone, Serialize)]
struct Row {
    backend: Backend,
    device: String,
    arch_id: String,
    dtype: String,
    agreement: Option<Agreement>,
    speed: Option<Speed>,
    failure: Option<String>,
}

/// Difference of outputs from those of the reference.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Agreement {
    /// Output with the largest difference.
    output: String,
    /// Largest difference, in parts of the largest number of the reference.
    largest: f64,
    /// Rows of all outputs whose largest element has the same place, and all rows.
    same_places: usize,
    rows: usize,
}

#[derive(Debug, Clone, Deserialize, Serialize)]
struct Speed {
    first_ns: f64,
    frame_ns: f64,
    captured: usize,
    nodes: usize,
}

type Outputs = BTreeMap<String, TensorData>;

pub(super) fn run(args: &CompareArgs, file: &Path) -> Result<()> {
    let chosen = Doctor::ask(report::own("flashover")?)?.choose(&args.backend, false)?;
    chosen.check_profile(args.profile.as_deref())?;
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let inputs = match args.inputs.is_empty() {
        true => vec![drawn(args, file, folder.path())?],
        false => args.inputs.clone(),
    };
    command::note!("{chosen}");
    let mut reference: Option<(String, Outputs)> = None;
    let mut rows = Vec::new();
    for device in &chosen.devices {
        let mut row = Row {
            backend: device.backend,
            device: device.name.clone(),
            arch_id: device.arch_id.clone(),
            dtype: args.dtype.clone().unwrap_or_else(|| "file".to_owned()),
            agreement: None,
            speed: None,
            failure: None,
        };
        command::note!("{}: outputs, then speed", device.backend);
        let asked = Asked { args, file, inputs: &inputs, device, folder: folder.path() };
        row.failure = asked.fill(&mut row, &mut reference).err().map(|why| format!("{why:#}"));
        rows.push(row);
    }
    let report = Report {
        graph: file.display().to_string(),
        profile: args.profile.clone(),
        reference: reference.map(|own| own.0),
        rows,
    };
    command::print(&match args.format {
        CompareFormat::Md => document(&report, Style::of_stdout()),
        CompareFormat::Json => serde_json::to_string_pretty(&report)? + "\n",
    })?;
    let failed: Vec<_> = report
        .rows
        .iter()
        .filter_map(|row| Some(format!("{}: {}", row.backend, row.failure.as_ref()?)))
        .collect();
    if failed.is_empty() { Ok(()) } else { Err(check(failed.join("\n"))) }
}

/// Writes random inputs to a file, and returns its path.
fn drawn(args: &CompareArgs, file: &Path, folder: &Path) -> Result<String> {
    let dimensions = args.dimensions.iter().map(|own| dimension(own).map_err(anyhow::Error::msg));
    let found = inspect(file, &dimensions.collect::<Result<_>>()?, &Passes::default())?;
    let names = found.inputs.iter().map(|own| own.name.clone());
    let all: Outputs = names.zip(random(&found.inputs, 1)?).collect();
    let path = folder.join("inputs.safetensors");
    fs::write(&path, tensors::encode(&path, &all)?)?;
    Ok(path.display().to_string())
}

/// One graph on one device.
struct Asked<'a> {
    args: &'a CompareArgs,
    file: &'a Path,
    inputs: &'a [String],
    device: &'a Device,
    folder: &'a Path,
}

impl Asked<'_> {
    fn fill(&self, row: &mut Row, reference: &mut Option<(String, Outputs)>) -> Result<()> {
        let out = self.folder.join("outputs.safetensors");
        let mut more = vec!["--output".to_owned(), out.display().to_string()];
        more.extend(self.inputs.iter().flat_map(|own| ["--input".to_owned(), own.clone()]));
        self.run("run", &more)?;
        let outputs: Outputs = tensors::read(&out)?
            .into_iter()
            .map(|(name, data)| (name.unwrap_or_default(), data))
            .collect();
        match reference {
            None => *reference = Some((self.device.backend.name().to_owned(), outputs)),
            Some((_, theirs)) => row.agreement = Some(agreement(theirs, &outputs)?),
        }
        let printed = self.run("bench", &["--json".to_owned()])?;
        row.speed = Some(serde_json::from_slice(&printed).context("cannot parse bench")?);
        Ok(())
    }

    fn run(&self, name: &str, more: &[String]) -> Result<Vec<u8>> {
        let mut command: Command = report::own("flashover")?;
        command.args(["onnx", name]).arg(self.file);
        command.args(["--backend", self.device.backend.name()]);
        command.args(self.args.dimensions.iter().flat_map(|own| ["--dim", own]));
        let profile = self.args.profile.as_deref().filter(|_| self.device.backend == Backend::Cuda);
        for (name, value) in [("--dtype", self.args.dtype.as_deref()), ("--profile", profile)] {
            command.args(value.iter().flat_map(|own| [name, *own]));
        }
        let output = command.args(more).stdin(Stdio::null()).output();
        let output = output.context("cannot start flashover")?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        let log = String::from_utf8_lossy(&output.stderr);
        let end = format!("flashover onnx {name} {}", report::describe(output.status));
        match log.split_once("error: ") {
            Some((_, said)) => bail!("{}", said.trim_end()),
            None => bail!("{end}"),
        }
    }
}

/// Returns how outputs differ from those of the reference.
fn agreement(reference: &Outputs, here: &Outputs) -> Result<Agreement> {
    let mut own = Agreement { output: String::new(), largest: -1.0, same_places: 0, rows: 0 };
    for (name, theirs) in reference {
        let here = here.get(name).with_context(|| format!("output {name} is missing"))?;
        if theirs.shape() != here.shape() {
            bail!("output {name} has the shape {:?}, not {:?}", here.shape(), theirs.shape());
        }
        let [theirs, here]: [Vec<f64>; 2] = [theirs, here].map(|own| own.iter::<f64>().collect());
        let most = theirs.iter().fold(0f64, |most, own| most.max(own.abs()));
        // A difference that is no number is the largest one.
        let apart = theirs.iter().zip(&here).fold(0f64, |most, (theirs, here)| {
            let apart = if theirs == here { 0.0 } else { (theirs - here).abs() };
            if apart.is_nan() || most.is_nan() { f64::NAN } else { most.max(apart) }
        });
        let largest = if apart == 0.0 { 0.0 } else { apart / most };
        if largest.is_nan() || largest > own.largest {
            (own.output, own.largest) = (name.clone(), largest);
        }
        let width = reference[name].shape().to_vec().last().copied().unwrap_or(1).max(1);
        for (theirs, here) in theirs.chunks(width).zip(here.chunks(width)) {
            own.rows += 1;
            own.same_places += usize::from(place_of_most(theirs) == place_of_most(here));
        }
    }
    Ok(own)
}

fn place_of_most(row: &[f64]) -> Option<usize> {
    (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]))
}

fn document(report: &Report, style: Style) -> String {
    let Report { graph, profile, reference, rows } = report;
    let profile = profile.as_ref().map_or(String::new(), |own| format!(", cuda as {own}"));
    let mut out = style.escape(&format!("{graph}{profile}\n")) + "\n";
    let names = rows.iter().map(|row| (row.backend.name().to_owned(), Align::Left));
    let mut table = Table::new([(String::new(), Align::Left)].into_iter().chain(names));
    let mut line = |label: &str, of: &dyn Fn(&Row) -> Option<String>| {
        let cells: Vec<_> = rows.iter().map(|row| of(row).unwrap_or_default()).collect();
        if cells.iter().any(|cell| !cell.is_empty()) {
            table.row([label.to_owned()].into_iter().chain(cells));
        }
    };
    line("device", &|row| Some(row.device.clone()));
    line("floats", &|row| Some(row.dtype.clone()));
    line("largest difference", &|row| match &row.agreement {
        Some(own) => Some(format!("{} in {}", error(own.largest), own.output)),
        None => (reference.as_deref() == Some(row.backend.name())).then(|| "reference".to_owned()),
    });
    line("same largest element", &|row| {
        row.agreement.as_ref().map(|own| format!("{} of {} rows", own.same_places, own.rows))
    });
    let milliseconds = |ns: f64| digits(ns / 1e6);
    line("ms a run", &|row| row.speed.as_ref().map(|own| milliseconds(own.frame_ns)));
    line("ms of the first run", &|row| row.speed.as_ref().map(|own| milliseconds(own.first_ns)));
    line("nodes captured", &|row| {
        row.speed.as_ref().map(|own| format!("{} of {}", own.captured, own.nodes))
    });
    line("failed", &|row| row.failure.as_ref().map(|own| own.lines().next().unwrap_or("").into()));
    out += &table.render(style);
    let about = "Differences are in parts of the largest number of the reference's output.\n";
    out + "\n" + &style.escape(about)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outputs(numbers: [f32; 4]) -> Outputs {
        BTreeMap::from([("y".to_owned(), TensorData::new(numbers.to_vec(), [2, 2]))])
    }

    #[test]
    fn differences_are_parts_of_the_largest_number_and_rows_are_compared_by_their_largest_element()
    {
        let own = agreement(&outputs([1.0, -4.0, 2.0, 3.0]), &outputs([1.0, -3.0, 2.0, 1.0]));
        let want = Agreement { output: "y".into(), largest: 0.5, same_places: 1, rows: 2 };
        assert_eq!(own.unwrap(), want);
    }

    #[test]
    fn no_number_differs_and_equal_infinities_do_not() {
        let infinite = outputs([f32::INFINITY, 1.0, 0.0, 0.0]);
        assert_eq!(agreement(&infinite, &infinite).unwrap().largest, 0.0);
        let none = agreement(&outputs([1.0; 4]), &outputs([f32::NAN, 1.0, 1.0, 1.0])).unwrap();
        assert!(none.largest.is_nan());
    }
}
