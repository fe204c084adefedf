//! `flashover quantize`.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::bail;
use command::OutFile;
use flashover::WeightFormat;
use flashover::quantize::{Figures, QuantizeOptions, QuantizedModel, quantize_model_until};

use crate::interrupt;
use crate::model_args::{DeviceArgs, HubArgs, all_spared, bar, named};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder with config.json and safetensors, or owner/name[@revision] on the Hugging Face Hub
    #[arg(long, short)]
    model: PathBuf,
    /// Folder to create; it must be absent or empty
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,
    #[arg(long, default_value = "nf4", value_parser = named(WeightFormat::in_files().map(WeightFormat::name), format), hide_possible_values = true, help = format!("Format of the weights: {}", WeightFormat::alternatives(WeightFormat::in_files())))]
    quant: WeightFormat,
    /// Values per block, which share one absmax, in 4-bit formats: a power of two from 32 to 4096 [default: 64]
    #[arg(long)]
    block_size: Option<u32>,
    /// Store absmax of 4-bit formats in f32 instead of 8 bits: 4.5 instead of 4.13 bits per weight in blocks of 64
    #[arg(long)]
    plain_absmax: bool,
    /// Maximum bytes of one file of weights
    #[arg(long, value_name = "BYTES", default_value_t = QuantizeOptions::default().shard_bytes, value_parser = clap::value_parser!(u64).range(1..))]
    shard_bytes: u64,
    /// Dequantise the written weights and print bits and errors of each, or write them to FILE as JSON
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    report: Option<Option<PathBuf>>,
    #[command(flatten)]
    hub: HubArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

fn format(text: &str) -> Result<WeightFormat, String> {
    WeightFormat::in_files().find(|format| format.name() == text).ok_or_else(|| {
        let known: Vec<_> = WeightFormat::in_files().map(WeightFormat::name).collect();
        format!("unknown quantisation `{text}`\nhint: use one of {}", known.join(", "))
    })
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let file = args.report.iter().flatten().map(|path| OutFile::new(path)).next().transpose()?;
    let options_given = args.block_size.is_some() || args.plain_absmax;
    if options_given && !args.quant.info().has_options {
        let bits = args.quant.bits();
        bail!("{bits} bits have no blocks\nhint: leave out --block-size and --plain-absmax");
    }
    let options = QuantizeOptions {
        format: args.quant,
        block_size: args.block_size.unwrap_or(QuantizeOptions::default().block_size),
        nested: !args.plain_absmax,
        shard_bytes: args.shard_bytes,
        measure: args.report.is_some(),
    };
    let model = args.hub.model(&args.model)?;
    // All files are read, because files other than weights are copied.
    file.as_ref().map_or(Ok(()), |file| all_spared(files(&model), file))?;
    let device = args.device.open()?;
    let _listening = interrupt::listen()?;
    let bar = bar("quantising {wide_bar} {percent}%, {eta} left")?;
    let made = quantize_model_until(&device, &model, &args.output, &options, &|progress| {
        bar.set_length(progress.parts as u64);
        bar.set_position(progress.done as u64);
        interrupt::came()
    });
    bar.finish_and_clear();
    let made = made?;
    let mut text = String::new();
    match file {
        Some(file) => file.write((serde_json::to_string_pretty(&made)? + "\n").as_bytes())?,
        None if options.measure => text += &table(&made),
        None => {}
    }
    let name = &device.profile().name;
    text += &format!("{} on {name} ({})\n", args.output.display(), device.backend());
    text += &summary(&made);
    Ok(command::print(&text)?)
}

/// Returns the files of a folder and its subfolders, except hidden ones.
fn files(folder: &Path) -> Vec<PathBuf> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        // Opening the model reports folders that cannot be read.
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            match entry.file_type() {
                _ if hidden => {}
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                _ => files.push(entry.path()),
            }
        }
    }
    files
}

/// Formats a table with one line per weight and a total.
fn table(made: &QuantizedModel) -> String {
    let width = made.weights.iter().map(|w| w.name.len()).max().unwrap_or_default().max(6);
    let mut text = format!(
        "{:<width$}  {:>13}  {:>5}  {:>14}  {:>13}\n",
        "weight", "shape", "bits", "relative error", "largest error"
    );
    let mut line = |name: &str, shape: &str, figures: &Figures| {
        let Figures { bits_per_weight: bits, errors, .. } = figures;
        let error = |value: Option<f64>| value.map_or_else(String::new, |v| format!("{v:.5}"));
        let [relative, largest] =
            [error(errors.map(|e| e.relative_error)), error(errors.map(|e| e.largest_error))];
        writeln!(text, "{name:<width$}  {shape:>13}  {bits:>5.2}  {relative:>14}  {largest:>13}")
            .expect("a string takes all");
    };
    for weight in &made.weights {
        let [n, k] = weight.shape;
        line(&weight.name, &format!("{n} x {k}"), &weight.figures);
    }
    line("total", &made.total.values.to_string(), &made.total);
    text
}

fn summary(made: &QuantizedModel) -> String {
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    let QuantizedModel { weights, total, kept, peaks, .. } = made;
    let absmax = match (made.block_size, made.nested) {
        (Some(size), Some(true)) => format!("blocks of {size}, nested absmax"),
        (Some(size), _) => format!("blocks of {size}, plain absmax"),
        (None, _) => "one absmax per row".to_owned(),
    };
    let host = match (peaks.host_bytes, peaks.host_bytes_before) {
        (Some(max), Some(before)) => {
            format!("host {}, {} before the first tensor", mib(max), mib(before))
        }
        _ => "host unknown".to_owned(),
    };
    format!(
        "{} weights in {}, {absmax}, {:.2} bits each; {kept} tensors as they were\n\
         {} of tensors, where there were {}\n\
         peak memory: {host}; device {}\n",
        weights.len(),
        made.quant.name(),
        total.bits_per_weight,
        mib(made.bytes),
        mib(made.bytes_before),
        mib(peaks.device_bytes),
    )
}
