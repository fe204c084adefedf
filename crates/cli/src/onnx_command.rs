//! `flashover onnx`: inspects, runs and measures ONNX graphs.

pub(crate) mod tensors;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{anyhow, bail};
use clap::{Subcommand, ValueEnum};
use command::OutFile;
use flashover::burn::tensor::TensorData;
use flashover::onnx::{
    Graph, GraphOptions, Inspection, Outcome, PASSES, Passes, Plan, Tolerance, inspect, tests,
};
use flashover::{Compute, Policy};
use serde::Serialize;

use crate::interrupt;
use crate::model_args::{DeviceArgs, choice};
use crate::profile_command::{milliseconds, operators_table};
use crate::unet_command::percentile;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print inputs, outputs, operators, rewrites and unsupported nodes, without a device
    Info(InfoArgs),
    /// Run a graph on tensors from files
    Run(RunArgs),
    /// Measure a graph on random inputs
    Bench(BenchArgs),
    /// Print the memory of constants and results, without a device
    Plan(InfoArgs),
    /// Print the time of a run by operator and by node
    Profile(ProfileArgs),
    /// Run the tests in a folder, in the format of the ONNX backend tests
    Test(TestArgs),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Precision {
    /// f32
    F32,
    /// f16 instead of f32; statistics, softmax and sums stay in f32
    F16,
    /// bf16 instead of f32; statistics, softmax and sums stay in f32
    Bf16,
}

impl Precision {
    const fn compute(self) -> Compute {
        match self {
            Self::F32 => Compute::F32,
            Self::F16 => Compute::F16,
            Self::Bf16 => Compute::Bf16,
        }
    }

    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Parses `NAME=LENGTH` of a dimension.
pub(crate) fn dimension(text: &str) -> Result<(String, u64), String> {
    let (name, length) = text.split_once('=').ok_or_else(|| {
        format!("expected NAME=LENGTH, got `{text}`\nhint: use, for example, batch=1")
    })?;
    let length: u64 = length
        .parse()
        .ok()
        .filter(|length| *length > 0 && *length <= u64::from(u32::MAX))
        .ok_or_else(|| {
            format!("expected a length from 1 to 4294967295, got `{length}`\nhint: use batch=1")
        })?;
    Ok((name.to_owned(), length))
}

fn passes(text: &str) -> Result<Passes, String> {
    Passes::parse(text).map_err(|why| why.to_string())
}

/// A model file and the lengths of its named dimensions.
#[derive(clap::Args)]
struct FileArgs {
    /// ONNX file
    model: PathBuf,
    /// Length of a named dimension, such as batch=1; may be repeated
    #[arg(long = "dim", value_name = "NAME=LENGTH", value_parser = dimension)]
    dimensions: Vec<(String, u64)>,
}

impl FileArgs {
    fn dimensions(&self) -> BTreeMap<String, u64> {
        self.dimensions.iter().cloned().collect()
    }
}

#[derive(clap::Args)]
struct InfoArgs {
    #[command(flatten)]
    file: FileArgs,
    /// Graph passes to run: `on`, `off`, names, or -NAME for all except some, separated by commas
    #[arg(long, default_value = "on", value_parser = passes, allow_hyphen_values = true)]
    passes: Passes,
}

/// Settings of a run.
#[derive(clap::Args)]
struct LoadArgs {
    /// Dtype that replaces f32 [default: as in the file]
    #[arg(long)]
    dtype: Option<Precision>,
    /// Node to keep in f32, by its name or the name of an output; may be repeated
    #[arg(long, value_name = "NAME")]
    keep_f32: Vec<String>,
    /// For untuned shapes: `frozen` fails, `default` uses an inherited or the first config, `measure` tunes now
    #[arg(long, default_value = "default", value_parser = choice::<Policy>(Policy::ALL.map(Policy::name)), hide_possible_values = true)]
    policy: Policy,
    #[command(flatten)]
    device: DeviceArgs,
}

impl LoadArgs {
    fn options(&self, file: &FileArgs, passes: &Passes) -> GraphOptions {
        GraphOptions {
            dimensions: file.dimensions(),
            dtype: self.dtype.map(Precision::compute),
            keep_f32: self.keep_f32.clone(),
            passes: passes.clone(),
            policy: Some(self.policy),
        }
    }
}

#[derive(clap::Args)]
struct RunArgs {
    #[command(flatten)]
    file: FileArgs,
    /// Input of the graph: [NAME=]FILE with .npy, .pb or .safetensors; may be repeated. Files without names are inputs in order
    #[arg(long = "input", value_name = "[NAME=]FILE")]
    inputs: Vec<String>,
    /// File for the outputs: .safetensors, or .npy or .pb for one output [default: print shapes and first elements]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Graph passes to run: `on`, `off`, names, or -NAME for all except some, separated by commas
    #[arg(long, default_value = "on", value_parser = passes, allow_hyphen_values = true)]
    passes: Passes,
    #[command(flatten)]
    load: LoadArgs,
}

#[derive(clap::Args)]
struct BenchArgs {
    #[command(flatten)]
    file: FileArgs,
    /// Length of dimensions without a fixed length, such as the batch; several separated by commas
    #[arg(long, short, value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u16).range(1..))]
    batch: Vec<u16>,
    /// Passes to measure, one row each: on, off, or the name of a pass
    #[arg(long, value_delimiter = ',', default_value = "on")]
    passes: Vec<String>,
    /// Measured runs, after warm-up runs that compile and capture
    #[arg(long, short, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: u32,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    load: LoadArgs,
}

#[derive(clap::Args)]
struct ProfileArgs {
    #[command(flatten)]
    file: FileArgs,
    /// Length of dimensions without a fixed length
    #[arg(long, short, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// Also write a trace of every kernel launch, for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Graph passes to run: `on`, `off`, names, or -NAME for all except some, separated by commas
    #[arg(long, default_value = "on", value_parser = passes, allow_hyphen_values = true)]
    passes: Passes,
    #[command(flatten)]
    load: LoadArgs,
}

#[derive(clap::Args)]
struct TestArgs {
    /// Folder of tests: folders with model.onnx and data sets of .pb files, or files light_NAME.onnx
    folder: PathBuf,
    /// Run only tests whose names contain this text
    #[arg(long, default_value = "")]
    filter: String,
    /// Graph passes to run: `on`, `off`, names, or -NAME for all except some, separated by commas
    #[arg(long, default_value = "on", value_parser = passes, allow_hyphen_values = true)]
    passes: Passes,
    /// Also print the tests that pass
    #[arg(long)]
    list: bool,
    /// Dtype that replaces f32 [default: as in the file]
    #[arg(long)]
    dtype: Option<Precision>,
    /// Largest difference, relative to the largest element of an output; the argmax of each row must match [default:
    /// 1e-3 of each element plus 1e-7, as in ONNX]
    #[arg(long, value_name = "PART")]
    tolerance: Option<f64>,
    #[command(flatten)]
    device: DeviceArgs,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.command {
        Command::Info(args) => info(args),
        Command::Run(args) => run_graph(args),
        Command::Bench(args) => bench(args),
        Command::Plan(args) => plan(args),
        Command::Profile(args) => profile(args),
        Command::Test(args) => test(args),
    }
}

fn info(args: &InfoArgs) -> anyhow::Result<()> {
    let found = inspect(&args.file.model, &args.file.dimensions(), &args.passes)?;
    let Inspection { opset, inputs, outputs, operators, rewritten, passes, unserved, .. } = &found;
    let mut text = format!("opset {opset}\n");
    for (what, values) in [("input ", inputs), ("output", outputs)] {
        values.iter().for_each(|own| text += &format!("{what}  {own}\n"));
    }
    text += "\n| operator | nodes | after passes |\n| --- | ---: | ---: |\n";
    let names: std::collections::BTreeSet<_> = operators.keys().chain(rewritten.keys()).collect();
    for name in names {
        let count = |counts: &BTreeMap<String, usize>| counts.get(name).copied().unwrap_or(0);
        text += &format!("| {name} | {} | {} |\n", count(operators), count(rewritten));
    }
    text += "\n| pass | rewrites | looks for |\n| --- | ---: | --- |\n";
    for (name, count) in passes {
        let about = PASSES.iter().find(|pass| pass.name == *name).map_or("", |pass| pass.about);
        text += &format!("| {name} | {count} | {about} |\n");
    }
    if unserved.is_empty() {
        text += "\nall nodes can run\n";
    } else {
        text += &format!("\n{} nodes cannot run:\n", unserved.len());
        unserved.iter().for_each(|own| text += &format!("{own}\n"));
    }
    command::print(&text)?;
    Ok(())
}

fn plan(args: &InfoArgs) -> anyhow::Result<()> {
    let found = inspect(&args.file.model, &args.file.dimensions(), &args.passes)?;
    let Plan { constants, inputs, arena, alive, placed, results, unknown } = found.plan;
    let mib = |bytes: u128| bytes as f64 / f64::from(1 << 20);
    let mut text = format!("constants   {:.2} MiB\n", mib(constants));
    text += &format!("inputs      {:.2} MiB\n", mib(inputs));
    text += &format!("results     {:.2} MiB without sharing\n", mib(results));
    text += &format!(
        "buffer      {:.2} MiB for {placed} results; peak of live results {:.2} MiB\n",
        mib(arena),
        mib(alive)
    );
    if unknown > 0 {
        text += &format!(
            "{unknown} results have a size that is known only at run time\nhint: set dimensions with --dim\n"
        );
    }
    command::print(&text)?;
    Ok(())
}

fn run_graph(args: &RunArgs) -> anyhow::Result<()> {
    let RunArgs { file, inputs, output, passes, load } = args;
    let target = output.as_deref().map(OutFile::new).transpose()?;
    let graph = Graph::open(&file.model, &load.device.open()?, &load.options(file, passes))?;
    let outputs = graph.run(given(&graph, inputs)?)?;
    let names = graph.outputs();
    if let (Some(target), Some(path)) = (target, output) {
        let all = names.into_iter().map(|own| own.name).zip(outputs).collect();
        return Ok(target.write(&tensors::encode(path, &all)?)?);
    }
    let mut text = String::new();
    for (own, data) in names.iter().zip(&outputs) {
        let first: Vec<String> =
            data.iter::<f64>().take(8).map(|own| format!("{own:.5}")).collect();
        let shape: Vec<usize> = data.shape().to_vec();
        text += &format!("{} {} {shape:?}: {} …\n", own.name, data.dtype().name(), first.join(" "));
    }
    command::print(&text)?;
    Ok(())
}

/// Reads the inputs of a graph from files.
fn given(graph: &Graph, files: &[String]) -> anyhow::Result<Vec<TensorData>> {
    let wanted = graph.inputs();
    let mut named = BTreeMap::new();
    let mut unnamed = Vec::new();
    for file in files {
        // A name may hold anything but `=`; a path may not begin with one that an input has.
        let (name, path) = match file.split_once('=') {
            Some((name, path)) => (Some(name.to_owned()), PathBuf::from(path)),
            None => (None, PathBuf::from(file)),
        };
        for (own, data) in tensors::read(&path)? {
            let known = own.filter(|own| wanted.iter().any(|want| want.name == *own));
            match name.clone().or(known) {
                Some(name) => {
                    if named.insert(name.clone(), data).is_some() {
                        bail!("expected each input once, got `{name}` twice\nhint: remove one");
                    }
                }
                None => unnamed.push(data),
            }
        }
    }
    if let Some(name) = named.keys().find(|name| !wanted.iter().any(|want| want.name == **name)) {
        let all: Vec<_> = wanted.iter().map(|want| want.name.as_str()).collect();
        bail!("the graph has no input `{name}`\nhint: the inputs are {}", all.join(", "));
    }
    let mut unnamed = unnamed.into_iter();
    let inputs = wanted.iter().map(|want| {
        let data = named.remove(&want.name).or_else(|| unnamed.next());
        let data = data.ok_or_else(|| {
            anyhow!("input `{}` is missing\nhint: add --input {}=FILE", want.name, want.name)
        })?;
        Ok(match want.dtype {
            Some(dtype) => tensors::converted(data, dtype),
            None => data,
        })
    });
    let inputs = inputs.collect::<anyhow::Result<Vec<_>>>()?;
    match unnamed.next() {
        Some(_) => bail!("expected at most {} inputs, got more", wanted.len()),
        None => Ok(inputs),
    }
}

/// Result of one measurement.
#[derive(Serialize)]
struct Row {
    build_commit: String,
    arch_id: String,
    model: String,
    dtype: String,
    batch: u16,
    passes: String,
    first_ns: f64,
    frame_ns: f64,
    p50_ns: f64,
    p95_ns: f64,
    captured: usize,
    nodes: usize,
    rewritten: BTreeMap<&'static str, usize>,
    planned: u128,
    alive: u128,
}

fn bench(args: &BenchArgs) -> anyhow::Result<()> {
    let BenchArgs { file, batch, passes, repetitions, json, load } = args;
    let device = load.device.open()?;
    let _listening = interrupt::listen()?;
    let mut wrote = false;
    for on in passes {
        let graph = Graph::open(&file.model, &device, &load.options(file, &Passes::parse(on)?))?;
        for batch in batch {
            interrupt::check("stopped")?;
            let inputs = graph.random(usize::from(*batch))?;
            let shapes: Vec<Vec<usize>> = inputs.iter().map(|own| own.shape().to_vec()).collect();
            let speed = graph.measure(inputs, *repetitions as usize)?;
            let (rewritten, plan) = graph.plan(&shapes)?;
            let each: Vec<f64> = speed.each.iter().map(|own| own.as_nanos() as f64).collect();
            let row = Row {
                build_commit: crate::commit(),
                arch_id: device.profile().id.to_string(),
                model: file.model.display().to_string(),
                dtype: load.dtype.map_or_else(|| "file".to_owned(), Precision::name),
                batch: *batch,
                passes: on.clone(),
                first_ns: speed.first.as_nanos() as f64,
                frame_ns: speed.frame.as_nanos() as f64,
                p50_ns: percentile(&each, 0.5),
                p95_ns: percentile(&each, 0.95),
                captured: speed.captured,
                nodes: speed.nodes,
                rewritten: rewritten.into_iter().filter(|own| own.1 > 0).collect(),
                planned: plan.arena,
                alive: plan.alive,
            };
            if !json && !wrote {
                command::print(HEADER)?;
            }
            wrote = true;
            command::print(&match json {
                true => serde_json::to_string(&row)? + "\n",
                false => line(&row),
            })?;
        }
    }
    Ok(())
}

const HEADER: &str = "\
| model | dtype | batch | passes | ms per run | runs/s | p50 ms single | p95 ms single | first run s | buffer MiB |
| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |
";

fn line(row: &Row) -> String {
    let Row { model, dtype, batch, passes, frame_ns, p50_ns, p95_ns, first_ns, planned, .. } = row;
    let captured = match row.captured {
        0 => " (not captured)".to_owned(),
        some if some == row.nodes => String::new(),
        some => format!(" ({some} of {} nodes captured)", row.nodes),
    };
    format!(
        "| {model}{captured} | {dtype} | {batch} | {passes} | {:.3} | {:.1} | {:.3} | {:.3} | {:.2} | {:.1} |\n",
        frame_ns / 1e6,
        1e9 / frame_ns,
        p50_ns / 1e6,
        p95_ns / 1e6,
        first_ns / 1e9,
        *planned as f64 / f64::from(1 << 20),
    )
}

fn profile(args: &ProfileArgs) -> anyhow::Result<()> {
    let ProfileArgs { file, batch, trace, passes, load } = args;
    let target = trace.as_deref().map(OutFile::new).transpose()?;
    let device = load.device.open()?;
    let graph = Graph::open(&file.model, &device, &load.options(file, passes))?;
    let profile = graph.profile(graph.random(usize::from(*batch))?)?;
    if profile.trace.launches.is_empty() {
        bail!(
            "expected kernel launches in the trace, got none: the CPU backend has no kernels\nhint: use --backend cuda or vulkan"
        );
    }
    let busy = profile.trace.busy_ns();
    let mut text =
        format!("{} ms in {} kernels\n", milliseconds(busy), profile.trace.launches.len());
    text += &operators_table(&profile.operators, &profile.trace, &profile.ceilings);
    text += "\n| node | launches | us |\n| --- | ---: | ---: |\n";
    for (name, launches, ns) in &profile.nodes {
        text += &format!("| {name} | {launches} | {:.1} |\n", *ns as f64 / 1e3);
    }
    command::print(&text)?;
    if let Some(target) = target {
        target.write(profile.trace.chrome(&device.profile().name).as_bytes())?;
    }
    Ok(())
}

fn test(args: &TestArgs) -> anyhow::Result<()> {
    let TestArgs { folder, filter, passes, list, dtype, tolerance, device } = args;
    let all: Vec<_> = tests(folder)?.into_iter().filter(|own| own.name.contains(filter)).collect();
    if all.is_empty() {
        bail!(
            "{} has no tests{}\nhint: pass a folder whose subfolders contain model.onnx",
            folder.display(),
            match filter.is_empty() {
                true => String::new(),
                false => format!(" with `{filter}` in their names"),
            }
        );
    }
    let device = device.open()?;
    let dtype = dtype.map(Precision::compute);
    let options = GraphOptions { dtype, passes: passes.clone(), ..GraphOptions::default() };
    let tolerance = tolerance.map_or(Tolerance::Onnx, Tolerance::OfLargest);
    let _listening = interrupt::listen()?;
    // A panic of Burn is the outcome of its test.
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let mut counts = [0; 4];
    for own in &all {
        interrupt::check("stopped")?;
        let (place, line) = match Graph::test(own, tolerance, &device, &options)? {
            Outcome::Passed => (0, list.then(|| "passed".to_owned())),
            Outcome::Refused(why) => (1, Some(format!("refused: {why}"))),
            Outcome::Failed(why) => (2, Some(format!("FAILED: {why}"))),
            Outcome::Wrong(why) => (3, Some(format!("WRONG: {why}"))),
        };
        counts[place] += 1;
        if let Some(line) = line {
            command::print(&format!("{} {}\n", own.name, line.replace('\n', " ")))?;
        }
    }
    std::panic::set_hook(before);
    let [passed, refused, failed, wrong] = counts;
    command::print(&format!(
        "{passed} of {} passed, {refused} refused, {failed} failed, {wrong} wrong\n",
        all.len()
    ))?;
    match failed + wrong {
        0 => Ok(()),
        _ => bail!("{} tests did not pass\nhint: the list above has the reasons", failed + wrong),
    }
}
