//! `flashover bench`: tests, columns and formats as llama-bench has them.

use std::fmt::Write;

use anyhow::bail;
use clap::ValueEnum;
use flashover::{Ceilings, Engine, KvFormat, Speed, SpeedTest};
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tune::timing::Stopwatch;

use crate::model_args::{SubjectArgs, TraceArgs, Tracing};

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    of: SubjectArgs,
    /// Tokens of a prompt: numbers and ranges such as 64-512*2 or 128-512+128, with commas between; 0 is none
    #[arg(short = 'p', long, default_value = "512", value_parser = sizes)]
    n_prompt: Sizes,
    /// Tokens to generate, likewise
    #[arg(short = 'n', long, default_value = "128", value_parser = sizes)]
    n_gen: Sizes,
    /// Positions that are there before, likewise
    #[arg(short = 'd', long, default_value = "0", value_parser = sizes)]
    n_depth: Sizes,
    /// Sequences that run together, likewise; llama-bench's -b is another thing
    #[arg(short = 'b', long, default_value = "1", value_parser = sizes)]
    batch: Sizes,
    /// Find the fastest batch instead, of so many sequences at most, beginning with --batch; each is run once
    #[arg(long, value_name = "MOST", value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(conflicts_with_all = ["repetitions", "output", "profile_trace"])]
    find_batch: Option<u32>,
    /// Repetitions of each test, after one to warm up
    #[arg(short = 'r', long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    repetitions: u16,
    /// How it is printed
    #[arg(short = 'o', long, default_value = "md")]
    output: Format,
    #[command(flatten)]
    trace: TraceArgs,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Md,
    Csv,
    Json,
    Jsonl,
    Sql,
}

#[derive(Clone)]
struct Sizes(Vec<usize>);

/// Sizes that a flag takes.
const MOST: usize = 1000;

/// `512`, `64-512*2`, `128-512+128`, and several of them with commas between.
fn sizes(text: &str) -> Result<Sizes, String> {
    let bad = |part: &str| {
        format!("`{part}` is no size and no range\nhint: such as 512, 64-512*2 or 128-512+128")
    };
    let mut all = Vec::new();
    for part in text.split(',') {
        let number = |text: &str| {
            text.trim().parse::<u32>().map(|size| size as usize).map_err(|_| bad(part))
        };
        let Some((first, rest)) = part.split_once('-') else {
            all.push(number(part)?);
            continue;
        };
        let (last, step, times) = match (rest.split_once('+'), rest.split_once('*')) {
            (Some((last, step)), _) => (last, number(step)?, 1),
            (_, Some((last, times))) => (last, 0, number(times)?),
            _ => (rest, 1, 1),
        };
        let (mut size, last) = (number(first)?, number(last)?);
        if size > last || (step == 0 && (times < 2 || size == 0)) {
            return Err(bad(part));
        }
        while size <= last {
            if all.len() == MOST {
                return Err(format!("`{part}` is more than {MOST} sizes\nhint: larger steps"));
            }
            all.push(size);
            size = size * times + step;
        }
    }
    Ok(Sizes(all))
}

/// One test, with the names of llama-bench where it has them.
#[derive(Serialize)]
struct Row {
    build_version: &'static str,
    gpu_info: String,
    backends: String,
    arch_id: String,
    model_filename: String,
    model_type: String,
    model_size: u64,
    model_n_params: u64,
    compute: String,
    quant: Option<String>,
    kv: &'static str,
    n_batch: usize,
    n_prompt: usize,
    n_gen: usize,
    n_depth: usize,
    test_time: String,
    avg_ns: f64,
    stddev_ns: f64,
    avg_ts: f64,
    stddev_ts: f64,
    first_token_ns: f64,
    bandwidth_share: Option<f64>,
    mfu: Option<f64>,
    joules_per_token: Option<f64>,
    /// From files, or of random numbers, to weights on the device.
    load_ns: f64,
    reserved_bytes: u64,
    ceiling_gbps: f64,
    ceiling_gflops: Option<f64>,
    samples_ns: Vec<f64>,
    samples_ts: Vec<f64>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let tests = tests(args);
    if tests.is_empty() {
        bail!("there is nothing to measure\nhint: -p or -n, and --batch, above 0");
    }
    let file = args.trace.file()?;
    let device = args.of.load.open()?;
    // What does not fit is an answer where a batch is looked for.
    if args.find_batch.is_none() {
        args.of.check(&device, &tests)?;
    }
    let begin = Stopwatch::start();
    let (name, engine) = (args.of.name(), args.of.engine(&device, file.as_ref())?);
    let load_ns = begin.elapsed().as_nanos() as f64;
    if let Some(most) = args.find_batch {
        return find_batches(&engine, &tests, most as usize);
    }
    let ceilings = Ceilings::measure(&engine)?;
    let tracing = Tracing::start(file, &engine)?;
    let mut printed = Printer::new(args.output);
    let mut one = |test| -> anyhow::Result<()> {
        let speed = engine.measure(test, args.repetitions.into())?;
        Ok(command::print(&printed.row(&row(&name, load_ns, &engine, &speed, &ceilings)?)?)?)
    };
    let measured = tests.into_iter().try_for_each(&mut one);
    command::print(&printed.end())?;
    measured?;
    tracing.finish(&engine)
}

fn find_batches(engine: &Engine, tests: &[SpeedTest], most: usize) -> anyhow::Result<()> {
    for test in tests {
        let found = engine.find_batch_size(*test, most)?;
        let mut shown = format!("{}\n\n| batch | t/s |\n| ---: | ---: |\n", test.name());
        for tried in &found.tries {
            let rate = tried.rate.map_or("does not fit".to_owned(), |rate| format!("{rate:.2}"));
            writeln!(shown, "| {} | {rate} |", tried.batch).expect("a string takes all");
        }
        command::print(&format!("{shown}\nbest: {}\n", found.batch))?;
    }
    Ok(())
}

/// Prompts first, then generating, for each batch and depth.
fn tests(args: &Args) -> Vec<SpeedTest> {
    let mut tests = Vec::new();
    for batch in &args.batch.0 {
        for depth in &args.n_depth.0 {
            let of =
                |prompt, generated| SpeedTest { prompt, generated, depth: *depth, batch: *batch };
            let some = |size: &&usize| **size > 0;
            tests.extend(args.n_prompt.0.iter().filter(some).map(|prompt| of(*prompt, 0)));
            tests.extend(args.n_gen.0.iter().filter(some).map(|generated| of(0, *generated)));
        }
    }
    tests.retain(|test| test.batch > 0);
    tests
}

fn row(
    name: &str,
    load_ns: f64,
    engine: &Engine,
    speed: &Speed,
    ceilings: &Ceilings,
) -> anyhow::Result<Row> {
    let (config, test) = (engine.config(), speed.test);
    let [(avg_ns, stddev_ns), (avg_ts, stddev_ts)] =
        [mean(&speed.samples_ns), mean(&speed.rates())];
    let (device, profile) = (engine.device(), engine.device().profile());
    let (compute, quant) = engine.precision();
    Ok(Row {
        build_version: env!("CARGO_PKG_VERSION"),
        gpu_info: profile.name.clone(),
        backends: device.backend().to_string(),
        arch_id: profile.id.to_string(),
        model_filename: name.to_owned(),
        model_type: config.family.model_type().to_owned(),
        model_size: engine.weight_bytes(),
        model_n_params: config.parameters(),
        compute,
        quant,
        kv: engine.kv_format().name(),
        n_batch: test.batch,
        n_prompt: test.prompt,
        n_gen: test.generated,
        n_depth: test.depth,
        test_time: OffsetDateTime::now_utc().format(&Rfc3339)?,
        avg_ns,
        stddev_ns,
        avg_ts,
        stddev_ts,
        first_token_ns: speed.first_token_ns,
        bandwidth_share: speed.share_of_bandwidth(ceilings),
        mfu: speed.utilisation(ceilings),
        joules_per_token: speed.joules_per_token,
        load_ns,
        reserved_bytes: engine.memory().reserved_bytes,
        ceiling_gbps: ceilings.gbps,
        ceiling_gflops: ceilings.gflops,
        samples_ns: speed.samples_ns.clone(),
        samples_ts: speed.rates(),
    })
}

/// Mean and deviation of a sample.
fn mean(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let square = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
    (mean, if count > 1.0 { (square / (count - 1.0)).sqrt() } else { 0.0 })
}

/// Rows in a format, one at a time.
struct Printer {
    format: Format,
    rows: usize,
}

impl Printer {
    const fn new(format: Format) -> Self {
        Self { format, rows: 0 }
    }

    fn row(&mut self, row: &Row) -> anyhow::Result<String> {
        let first = self.rows == 0;
        self.rows += 1;
        let object = serde_json::to_value(row)?;
        let fields: Vec<(&String, &serde_json::Value)> =
            object.as_object().into_iter().flatten().collect();
        let names = |apart: &str| {
            fields.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(apart)
        };
        Ok(match self.format {
            Format::Md => {
                let head = if first { HEAD.to_owned() } else { String::new() };
                head + &markdown(row)
            }
            Format::Json => {
                let text = serde_json::to_string_pretty(&object)?;
                format!("{}{text}", if first { "[\n" } else { ",\n" })
            }
            Format::Jsonl => format!("{object}\n"),
            Format::Csv => {
                let quoted = |value: &serde_json::Value| {
                    format!("\"{}\"", plain(value).replace('"', "\"\""))
                };
                let values: Vec<_> = fields.iter().map(|(_, value)| quoted(value)).collect();
                let head = if first { names(",") + "\n" } else { String::new() };
                format!("{head}{}\n", values.join(","))
            }
            Format::Sql => {
                // What may be absent is a rate, but for the quantisation.
                let typed = |name: &str, value: &serde_json::Value| match value {
                    serde_json::Value::Number(number) if number.is_u64() => "INTEGER",
                    serde_json::Value::Number(_) => "REAL",
                    serde_json::Value::Null if name != "quant" => "REAL",
                    _ => "TEXT",
                };
                let columns: Vec<_> = fields
                    .iter()
                    .map(|(name, value)| format!("  {name} {}", typed(name, value)))
                    .collect();
                let quoted = |value: &serde_json::Value| match value {
                    serde_json::Value::Null => "NULL".to_owned(),
                    value => format!("'{}'", plain(value).replace('\'', "''")),
                };
                let values: Vec<_> = fields.iter().map(|(_, value)| quoted(value)).collect();
                let head = match first {
                    true => format!(
                        "CREATE TABLE IF NOT EXISTS flashover_bench (\n{}\n);\n",
                        columns.join(",\n")
                    ),
                    false => String::new(),
                };
                let (names, values) = (names(", "), values.join(", "));
                format!("{head}INSERT INTO flashover_bench ({names}) VALUES ({values});\n")
            }
        })
    }

    fn end(&self) -> String {
        match self.format {
            Format::Json if self.rows > 0 => "\n]\n".to_owned(),
            _ => String::new(),
        }
    }
}

/// A value as text; lists with commas between.
fn plain(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Null => String::new(),
        serde_json::Value::Array(list) => list.iter().map(plain).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

const HEAD: &str = "\
| model | size | params | backend | batch | test | t/s | first token | bandwidth | MFU | J/token | reserved |
| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
";

fn markdown(row: &Row) -> String {
    let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30));
    let params = match row.model_n_params {
        many if many >= 1_000_000_000 => format!("{:.2} B", many as f64 / 1e9),
        few => format!("{:.2} M", few as f64 / 1e6),
    };
    let share =
        |share: Option<f64>| share.map_or_else(String::new, |s| format!("{:.1}%", s * 100.0));
    let joules = row.joules_per_token.map_or_else(String::new, |joules| format!("{joules:.3}"));
    let test = SpeedTest {
        prompt: row.n_prompt,
        generated: row.n_gen,
        depth: row.n_depth,
        batch: row.n_batch,
    };
    let mut kind = format!("{} {}", row.model_type, row.compute);
    if let Some(quant) = &row.quant {
        write!(kind, " {quant}").expect("a string takes all");
    }
    if row.kv != KvFormat::Float.name() {
        write!(kind, ", kv {}", row.kv).expect("a string takes all");
    }
    format!(
        "| {kind} | {} | {params} | {} | {} | {} | {:.2} ± {:.2} | {:.1} ms | {} | {} | {joules} | {} |\n",
        gib(row.model_size),
        row.backends,
        row.n_batch,
        test.name(),
        row.avg_ts,
        row.stddev_ts,
        row.first_token_ns / 1e6,
        share(row.bandwidth_share),
        share(row.mfu),
        gib(row.reserved_bytes),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_numbers_and_ranges() {
        let of = |text| sizes(text).map(|sizes| sizes.0);
        assert_eq!(of("512"), Ok(vec![512]));
        assert_eq!(of("1,16"), Ok(vec![1, 16]));
        assert_eq!(of("64-512*2,7"), Ok(vec![64, 128, 256, 512, 7]));
        assert_eq!(of("128-512+128"), Ok(vec![128, 256, 384, 512]));
        assert_eq!(of("3-5"), Ok(vec![3, 4, 5]));
        for bad in
            ["", "x", "5-3", "0-8*2", "0-4000000000", "1-4294967296", "1-8*1", "1-8+0", "1-", "-3"]
        {
            assert!(of(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn means_have_deviations() {
        assert_eq!(mean(&[1.0, 2.0, 3.0]), (2.0, 1.0));
        assert_eq!(mean(&[4.0]), (4.0, 0.0));
    }
}
