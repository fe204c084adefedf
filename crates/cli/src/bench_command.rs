//! `flashover bench`: speed tests with the options, columns and output formats of llama-bench.

use std::fmt::Write;

use anyhow::bail;
use clap::ValueEnum;
use flashover::bench::{Ceilings, Speed, SpeedTest};
use flashover::memory::{BatchSize, find_batch_size};
use flashover::train::{LoraOptions, Recompute};
use flashover::{Engine, GenerateError, KvFormat};
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tune::timing::Stopwatch;

use crate::grpo_speed::{self, GrpoArgs};
use crate::interrupt;
use crate::model_args::{SubjectArgs, TraceArgs, Tracing};
use crate::train_speed::{self, StepArgs, Train};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Prompt tokens: comma-separated numbers or ranges such as 64-512*2 or 128-512+128; 0 skips prefill tests
    #[arg(short = 'p', long, allow_hyphen_values = true, default_value = "512", value_parser = sizes)]
    n_prompt: Sizes,
    /// Tokens to generate, same syntax; 0 skips decode tests
    #[arg(short = 'n', long, allow_hyphen_values = true, default_value = "128", value_parser = sizes)]
    n_gen: Sizes,
    /// Tokens already in the KV cache, same syntax
    #[arg(short = 'd', long, allow_hyphen_values = true, default_value = "0", value_parser = sizes)]
    n_depth: Sizes,
    /// Sequences that run together, same syntax; unlike llama-bench's -b, which is a batch of tokens
    #[arg(short = 'b', long, allow_hyphen_values = true, default_value = "1", value_parser = sizes)]
    batch: Sizes,
    /// Search for the fastest batch of each test, from --batch up to N sequences; print a row per batch tried
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_535))]
    find_batch: Option<u32>,
    /// Repetitions of each test, after one warm-up run
    #[arg(short = 'r', long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    repetitions: u16,
    #[command(flatten)]
    steps: StepArgs,
    #[command(flatten)]
    grpo: GrpoArgs,
    /// With --train, tokens per sequence
    #[arg(short = 'c', long, default_value_t = 1024, requires = "train")]
    context: usize,
    /// Output format
    #[arg(long, default_value = "md")]
    format: Format,
    #[command(flatten)]
    trace: TraceArgs,
    #[command(flatten)]
    of: SubjectArgs,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// Markdown table
    Md,
    /// One line per test, after a header
    Csv,
    /// One list of objects
    Json,
    /// One object per line
    Jsonl,
    /// Statements that create a table and insert a row per test
    Sql,
}

#[derive(Clone)]
struct Sizes(Vec<usize>);

/// Maximum number of sizes in one option.
const MAX_SIZES: usize = 1000;

/// Parses a comma-separated list of sizes and ranges: `512`, `64-512*2`, `128-512+128`.
fn sizes(text: &str) -> Result<Sizes, String> {
    let bad = |part: &str| {
        format!(
            "expected a size or a range, got `{part}`\nhint: use, for example, 512, 64-512*2 or 128-512+128"
        )
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
            if all.len() == MAX_SIZES {
                return Err(format!(
                    "expected at most {MAX_SIZES} sizes, got more at `{part}`\nhint: use larger steps"
                ));
            }
            all.push(size);
            size = size * times + step;
        }
    }
    Ok(Sizes(all))
}

/// Result of one test. Field names follow llama-bench if it has the field.
#[derive(Serialize)]
struct Row {
    /// Ends in `-dirty` if the tree had uncommitted changes.
    build_commit: String,
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
    /// Time to read or generate the weights and copy them to the device.
    load_ns: f64,
    reserved_bytes: u64,
    ceiling_gbps: f64,
    ceiling_gflops: Option<f64>,
    samples_ns: Vec<f64>,
    samples_ts: Vec<f64>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.grpo.grpo.is_some() {
        return run_grpo(args);
    }
    if let Some(train) = args.steps.train {
        return run_steps(args, train);
    }
    let tests = tests(args);
    if tests.is_empty() {
        bail!("no test to measure\nhint: set -p or -n, and --batch, above 0");
    }
    if let Some(max_batch) = args.find_batch {
        match args.batch.0[..] {
            [begin] if begin <= max_batch as usize => {}
            [begin] => bail!(
                "--batch {begin} is above --find-batch {max_batch}\nhint: use a --batch of at most {max_batch}; the search starts there"
            ),
            _ => bail!(
                "--find-batch expects one start, got several in --batch\nhint: give --batch one number"
            ),
        }
    }
    let file = args.trace.file()?;
    let device = args.of.load.open()?;
    // A batch search handles batches that do not fit.
    if args.find_batch.is_none() {
        args.of.check(&device, &tests)?;
    }
    let begin = Stopwatch::start();
    let (name, engine) = (args.of.name(), args.of.engine(&device, file.as_ref())?);
    let load_ns = begin.elapsed().as_nanos() as f64;
    let ceilings = Ceilings::measure(&engine)?;
    let tracing = Tracing::start(file, &engine)?;
    let mut printed = Printer::new(args.format);
    let mut one = |test| -> anyhow::Result<f64> {
        interrupt::check("stopped")?;
        let speed = engine.measure(test, args.repetitions.into())?;
        command::print(&printed.row(&row(&name, load_ns, &engine, &speed, &ceilings)?)?)?;
        Ok(speed.rate())
    };
    let mut found = Vec::new();
    let _listening = interrupt::listen()?;
    let measured = tests.into_iter().try_for_each(|test| match args.find_batch {
        None => one(test).map(drop),
        Some(max_batch) => {
            found.push((test, find_batch(test, max_batch as usize, &mut one)?));
            Ok(())
        }
    });
    // Also after an error: the output of finished tests must be complete, such as the closing bracket of JSON.
    command::print(&printed.end())?;
    let traced = tracing.finish(&engine);
    measured?;
    traced?;
    let max_batch = args.find_batch.unwrap_or_default() as usize;
    found.iter().for_each(|(test, found)| command::note!("{}", best(*test, max_batch, found)));
    match found.iter().find(|(_, found)| found.batch == 0) {
        Some((test, _)) => bail!(
            "{} does not fit, even with one sequence\nhint: use fewer tokens, a larger memory budget or --quant nf4",
            test.name()
        ),
        None => Ok(()),
    }
}

/// Measures training steps.
fn run_steps(args: &Args, train: Train) -> anyhow::Result<()> {
    let quant = args.of.load.options().quant;
    let training = args.steps.training(train, LoraOptions::default(), Recompute::Nothing, quant)?;
    let rows = args.batch.0.iter().map(|batch| {
        let shape = [*batch, args.context];
        train_speed::bench(&args.of, &training, shape, args.repetitions.into())
    });
    print_rows(args.format, "--train", rows, train_speed::table)
}

/// Measures steps of GRPO.
fn run_grpo(args: &Args) -> anyhow::Result<()> {
    let quant = args.of.load.options().quant;
    let train = args.steps.train.unwrap_or(grpo_speed::usual(quant));
    let training = args.steps.training(train, LoraOptions::default(), Recompute::Nothing, quant)?;
    if args.n_prompt.0.iter().chain(&args.n_gen.0).any(|tokens| *tokens == 0) {
        bail!("--grpo needs prompts and completions\nhint: set -p and -n above 0");
    }
    let shapes =
        args.n_prompt.0.iter().flat_map(|prompt| args.n_gen.0.iter().map(|own| [*prompt, *own]));
    let rows = shapes.map(|shape| {
        grpo_speed::bench(&args.of, &training, &args.grpo, shape, args.repetitions.into())
    });
    print_rows(args.format, "--grpo", rows, grpo_speed::table)
}

/// Prints rows as they come, or as one list of JSON. `option` asked for them.
fn print_rows<R: Serialize>(
    format: Format,
    option: &str,
    rows: impl Iterator<Item = anyhow::Result<R>>,
    table: impl Fn(&R) -> String,
) -> anyhow::Result<()> {
    if matches!(format, Format::Csv | Format::Sql) {
        bail!("{option} prints no CSV and no SQL\nhint: use --format md, json or jsonl");
    }
    let mut list = Vec::new();
    for row in rows {
        let row = row?;
        match format {
            Format::Md => command::print(&table(&row))?,
            Format::Jsonl => command::print(&(serde_json::to_string(&row)? + "\n"))?,
            _ => list.push(row),
        }
    }
    if matches!(format, Format::Json) {
        command::print(&(serde_json::to_string_pretty(&list)? + "\n"))?;
    }
    Ok(())
}

/// Finds the fastest batch of a test. `one` measures a batch and prints its row. Notes each batch that does not fit,
/// because it has no row.
fn find_batch(
    test: SpeedTest,
    max_batch: usize,
    mut one: impl FnMut(SpeedTest) -> anyhow::Result<f64>,
) -> anyhow::Result<BatchSize> {
    find_batch_size(test.batch, max_batch, |batch| match one(SpeedTest { batch, ..test }) {
        Ok(rate) => Ok(Some(rate)),
        Err(why) if is_memory(&why) => {
            command::note!("{}: a batch of {batch} does not fit", test.name());
            Ok(None)
        }
        Err(other) => Err(other),
    })
}

fn is_memory(why: &anyhow::Error) -> bool {
    let why = why.downcast_ref::<GenerateError>();
    why.is_some_and(GenerateError::is_memory)
}

/// Formats the best batch and the reasons against larger ones.
fn best(test: SpeedTest, max_batch: usize, found: &BatchSize) -> String {
    if found.batch == 0 {
        return format!("{}: does not fit, even with one sequence", test.name());
    }
    let larger = || found.tries.iter().filter(|tried| tried.batch > found.batch);
    let batches = |fits: bool| -> Vec<String> {
        let of = larger().filter(|tried| tried.rate.is_some() == fits);
        of.map(|tried| tried.batch.to_string()).collect()
    };
    let (slower, refused) = (batches(true), batches(false));
    let mut why = Vec::new();
    if !slower.is_empty() {
        why.push(format!("not faster: {}", slower.join(", ")));
    }
    if !refused.is_empty() {
        why.push(format!("do not fit: {}", refused.join(", ")));
    }
    if found.tries.iter().any(|tried| tried.batch == max_batch) {
        why.push(format!("{max_batch} is the limit of --find-batch"));
    }
    format!(
        "{}: best {}, {:.2} tokens/s ({})",
        test.name(),
        found.batch,
        found.rate,
        why.join("; ")
    )
}

/// Lists the tests: for each batch and depth, prefill first, then decode.
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
        build_commit: crate::commit(),
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

/// Returns mean and standard deviation of a sample.
fn mean(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let square = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
    (mean, if count > 1.0 { (square / (count - 1.0)).sqrt() } else { 0.0 })
}

/// Formats rows one at a time.
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
                // Every optional field is a number, except `quant`.
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
            Format::Json if self.rows == 0 => "[]\n".to_owned(),
            Format::Json => "\n]\n".to_owned(),
            _ => String::new(),
        }
    }
}

/// Formats a value as text; a list is separated by commas.
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
    use flashover::memory::BatchTry;

    use super::*;

    #[test]
    fn a_search_says_why_it_ended() {
        let said = |batch: usize, max_batch, tries: &[(usize, Option<f64>)]| {
            let tries = tries.iter().map(|(batch, rate)| BatchTry { batch: *batch, rate: *rate });
            let found = BatchSize { batch, rate: 9.0, tries: tries.collect() };
            let test = SpeedTest { prompt: 16, generated: 0, depth: 0, batch: 1 };
            best(test, max_batch, &found)
        };
        let tries = [(8, None), (4, Some(9.0)), (5, Some(8.0)), (7, Some(8.5))];
        let all = "pp16: best 4, 9.00 tokens/s (not faster: 5, 7; do not fit: 8)";
        assert_eq!(said(4, 64, &tries), all);
        let end = "pp16: best 4, 9.00 tokens/s (4 is the limit of --find-batch)";
        assert_eq!(said(4, 4, &[(3, Some(8.0)), (4, Some(9.0))]), end);
        assert_eq!(said(0, 4, &[(1, None)]), "pp16: does not fit, even with one sequence");
    }

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

    const NAME: &str = "it's \"7B\", v2";

    /// Makes a row with every optional field, or with none.
    fn sample(whole: bool) -> Row {
        Row {
            build_commit: "0123456789ab".to_owned(),
            build_version: "0.0.0",
            gpu_info: "Card".to_owned(),
            backends: "cuda".to_owned(),
            arch_id: "cuda-sm90".to_owned(),
            model_filename: NAME.to_owned(),
            model_type: "llama".to_owned(),
            model_size: 3 << 30,
            model_n_params: if whole { 8_030_261_248 } else { 4_740_352 },
            compute: "bf16".to_owned(),
            quant: whole.then(|| "4-bit".to_owned()),
            kv: if whole { "int8" } else { "float" },
            n_batch: 2,
            n_prompt: if whole { 512 } else { 0 },
            n_gen: if whole { 0 } else { 128 },
            n_depth: 0,
            test_time: "2026-01-02T03:04:05Z".to_owned(),
            avg_ns: 2.5e8,
            stddev_ns: 0.0,
            avg_ts: 4096.0,
            stddev_ts: 1.25,
            first_token_ns: 1.5e6,
            bandwidth_share: whole.then_some(0.5),
            mfu: whole.then_some(0.25),
            joules_per_token: whole.then_some(0.125),
            load_ns: 1e9,
            reserved_bytes: 1 << 30,
            ceiling_gbps: 1000.0,
            ceiling_gflops: whole.then_some(2000.0),
            samples_ns: vec![2.5e8, 2.5e8],
            samples_ts: vec![4095.0, 4097.0],
        }
    }

    /// Prints both rows.
    fn printed(format: Format) -> String {
        let mut printer = Printer::new(format);
        let rows = [true, false].map(|whole| printer.row(&sample(whole)).expect("numbers"));
        rows.concat() + &printer.end()
    }

    #[test]
    fn tables_are_for_people() {
        let want = HEAD.to_owned()
            + "| llama bf16 4-bit, kv int8 | 3.00 GiB | 8.03 B | cuda | 2 | pp512 | 4096.00 ± 1.25 | 1.5 ms | 50.0% | \
               25.0% | 0.125 | 1.00 GiB |\n\
               | llama bf16 | 3.00 GiB | 4.74 M | cuda | 2 | tg128 | 4096.00 ± 1.25 | 1.5 ms |  |  |  | 1.00 GiB |\n";
        assert_eq!(printed(Format::Md), want);
    }

    #[test]
    fn json_is_the_rows() {
        let want = [true, false].map(|whole| serde_json::to_value(sample(whole)).expect("numbers"));
        let read = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("JSON");
        let all = read(&printed(Format::Json));
        assert_eq!(all.as_array().map(Vec::as_slice), Some(&want[..]));
        let lines: Vec<_> = printed(Format::Jsonl).lines().map(read).collect();
        assert_eq!(lines, want);
        assert_eq!((&lines[1]["model_filename"], &lines[1]["n_gen"]), (&NAME.into(), &128.into()));
        assert!(lines[1]["quant"].is_null() && lines[1]["mfu"].is_null());
        assert_eq!(Printer::new(Format::Json).end(), "[]\n", "of no rows a list of none");
    }

    #[test]
    fn csv_has_a_column_a_field_whatever_is_in_it() {
        let text = printed(Format::Csv);
        let mut reader = csv::Reader::from_reader(text.as_bytes());
        let names = reader.headers().expect("a line of names").clone();
        let rows = reader.records().collect::<Result<Vec<_>, _>>().expect("as many fields each");
        assert_eq!(rows.len(), 2);
        let field = |row: usize, name: &str| {
            let at = names.iter().position(|own| own == name).expect("a column");
            rows[row][at].to_owned()
        };
        assert_eq!([field(0, "model_filename"), field(1, "model_filename")], [NAME, NAME]);
        assert_eq!([field(0, "quant"), field(1, "quant")], ["4-bit", ""]);
        assert_eq!([field(0, "mfu"), field(1, "mfu")], ["0.25", ""]);
        assert_eq!(field(1, "samples_ts"), "4095.0,4097.0");
    }

    #[test]
    fn sql_makes_a_table_once() {
        let text = printed(Format::Sql);
        let (table, rows) = text.split_once(");\n").expect("a table");
        assert!(table.starts_with("CREATE TABLE IF NOT EXISTS flashover_bench (\n"), "{table}");
        for column in ["build_commit TEXT", "model_size INTEGER", "avg_ns REAL", "quant TEXT"] {
            assert!(table.contains(&format!("\n  {column},\n")), "{column}: {table}");
        }
        let rows: Vec<&str> = rows.lines().collect();
        let into = "INSERT INTO flashover_bench (build_commit, build_version, ";
        assert!(rows.len() == 2 && rows.iter().all(|row| row.starts_with(into)), "{rows:?}");
        assert!(rows.iter().all(|row| row.contains(", 'it''s \"7B\", v2', ")), "{rows:?}");
        assert!(rows[0].contains(", '4-bit', 'int8', ") && rows[0].contains(", '0.5', '0.25', "));
        assert!(rows[1].contains(", NULL, 'float', ") && rows[1].contains(", NULL, NULL, NULL, "));
        // A field that is absent from the first row still has a column of its type.
        let first = Printer::new(Format::Sql).row(&sample(false)).expect("numbers");
        let columns = |text: &str| text.split_once(");\n").expect("a table").0.to_owned();
        assert_eq!(columns(&first), table);
    }

    #[test]
    fn means_have_deviations() {
        assert_eq!(mean(&[1.0, 2.0, 3.0]), (2.0, 1.0));
        assert_eq!(mean(&[4.0]), (4.0, 0.0));
    }
}
