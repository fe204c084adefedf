//! Tests `flashover plan`, `flashover profile` and `flashover bench`, and presets.

use std::path::Path;

use serde_json::Value;

use crate::{fixture, flashover, trace_format};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_plan_says_what_a_model_takes_of_a_card_that_is_not_there() {
    let args = ["plan", "--shape", "llama-3-8b", "--profile", "rtx4080", "--context", "8192"];
    let dense = flashover(&args);
    assert_eq!(dense.status.code(), Some(2), "bf16 does not fit 16 GiB");
    let said = text(&dense.stderr);
    for part in [
        "the workload does not fit: llama-3-8b with 1 sequence",
        " with a budget of 15.44 GiB",
        "\nhint: ",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let table = text(&dense.stdout);
    for line in ["model            llama-3-8b, bf16\n", "weights                14.958 GiB\n"] {
        assert!(table.contains(line), "{table}");
    }
    let quant = [&args[..], &["--quant", "nf4", "--batch", "4", "--json"]].concat();
    let four = flashover(&quant);
    assert_eq!(four.status.code(), Some(0), "{}", text(&four.stderr));
    let plan: Value = serde_json::from_slice(&four.stdout).expect("JSON");
    assert_eq!((&plan["matrices"], &plan["workload"]["batch"]), (&"four_bit".into(), &4.into()));
    // A driver leaves 96.5% of the card.
    let total = plan["total_bytes"].as_u64().expect("bytes");
    assert_eq!(total >> 20, 15_810);
    assert!(plan["largest_batch"].as_u64() >= Some(4), "{plan}");
    // 128 bf16 values (256 bytes) become 128 bytes and a 4-byte scale. The RoPE table and the bitmap of seen tokens
    // (128256 bits) keep their size.
    let bytes = flashover(&[&quant[..], &["--kv-cache", "int8"]].concat());
    let half: Value = serde_json::from_slice(&bytes.stdout).expect("JSON");
    let cache =
        |plan: &Value| plan["cache_bytes"].as_u64().expect("bytes") - 8192 * 4 * 128 - 4 * 16_032;
    assert_eq!((&half["kv"], cache(&half) * 256), (&"int8".into(), cache(&plan) * 132));
    // The reserve reduces the budget below the memory of the card.
    let less = flashover(&[&quant[..], &["--memory-reserve", "11GiB"]].concat());
    let plan: Value = serde_json::from_slice(&less.stdout).expect("JSON");
    assert_eq!(
        (less.status.code(), &plan["budget_bytes"]),
        (Some(2), &(total - (11 << 30)).into())
    );
}

#[test]
fn a_plan_of_a_folder_is_of_its_files() {
    let model = fixture("phi3_nf4");
    let model = model.to_str().expect("UTF-8");
    let args = ["plan", "--model", model, "--backend", "cpu", "--context", "64", "--json"];
    let planned = flashover(&args);
    let plan: Value = serde_json::from_slice(&planned.stdout).expect("JSON");
    assert_eq!((&plan["dtype"], &plan["matrices"]), (&"f32".into(), &"four_bit".into()), "{plan}");
    assert!(plan["weights_bytes"].as_u64() > Some(0));
}

#[test]
fn plans_that_mean_nothing_are_refused() {
    let refused = |more: &[&str], why: &str| {
        let args = [&["plan", "--shape", "llama-3-8b", "--profile", "rtx4090"], more].concat();
        let out = flashover(&args);
        assert_eq!(out.status.code(), Some(2), "{more:?}");
        let said = text(&out.stderr);
        assert!(said.contains(why) && said.contains("hint: "), "{more:?}: {said}");
    };
    refused(&["--batch", "0"], "batch is 0");
    refused(&["--context", "9000"], "9000");
    refused(&["--memory-limit", "much"], "expected a size, got `much`");
    refused(&["--memory-limit", "0"], "limit is 0 bytes");
    refused(&["--memory-fraction", "1.5"], "fraction is 1.5");
    refused(&["--backend", "cpu"], "describes a cuda device, not cpu");
    let unknown = flashover(&["plan", "--shape", "llama-3-8b", "--profile", "gtx970"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(text(&unknown.stderr).contains("gtx970"), "{}", text(&unknown.stderr));
    let shape = flashover(&["plan", "--shape", "llama-9", "--profile", "rtx4090"]);
    assert!(text(&shape.stderr).contains("unknown shape `llama-9`"));
    for (args, why) in [
        (&["plan", "--profile", "rtx4090"][..], "<--model <MODEL>|--shape <SHAPE>>"),
        (&["profile", "--model", "a", "--shape", "b"], "cannot be used with '--shape <SHAPE>'"),
        (&["bench"], "<--model <MODEL>|--shape <SHAPE>>"),
    ] {
        let out = flashover(args);
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains(why) && said.contains("\nhint: "), "{args:?}: {said}");
    }
}

#[test]
fn a_preset_takes_the_precision_that_its_use_wants() {
    let model = fixture("llama");
    let model = model.to_str().expect("UTF-8");
    let generate = |preset: &str, more: &[&str]| {
        let args = ["generate", "--model", model, "--backend", "cpu", "--tokens", "1,2,3"];
        let rest = ["--max-new-tokens", "2", "--ignore-eos", "--preset", preset];
        flashover(&[&args[..], &rest, more].concat())
    };
    for (preset, more, precision) in [
        ("latency", &[][..], "f32 over 4 bits"),
        ("inference", &[], "f32 over 4 bits"),
        ("code-generation", &[], "f32"),
        ("latency", &["--quant", "int8"], "f32 over 8 bits"),
    ] {
        let made = generate(preset, more);
        assert!(made.status.success(), "{}", text(&made.stderr));
        let said = text(&made.stderr);
        assert!(said.contains(&format!("preset {preset}: {precision}\n")), "{said}");
    }
    // The preferred precision is kept exactly if it fits.
    let plan = ["plan", "--model", model, "--backend", "cpu", "-c", "5", "--json"];
    let plan: Value = serde_json::from_slice(&flashover(&plan).stdout).expect("JSON");
    let parts = ["weights_bytes", "cache_bytes", "activations_bytes", "workspace_bytes"];
    let whole: u64 = parts.iter().map(|part| plan[part].as_u64().expect("bytes")).sum();
    assert_eq!((&plan["peak_bytes"], &plan["fits"]), (&whole.into(), &true.into()), "{plan}");
    let limit = (whole - 1).to_string();
    let close = ["plan", "--model", model, "--backend", "cpu", "-c", "5", "--memory-limit", &limit];
    let said = text(&flashover(&close).stderr);
    assert!(said.contains(", 1 byte too few: "), "{said}");
    let made = generate("code-generation", &["--memory-limit", &whole.to_string()]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    assert!(text(&made.stderr).contains("preset code-generation: f32\n"));
    let less = generate("code-generation", &["--memory-limit", &(whole - 1).to_string()]);
    let said = text(&less.stderr);
    assert!(said.contains("preset code-generation: f32 over 4 bits\n"), "{said}");
    for (made, why) in [
        (
            generate("training", &[]),
            "preset training is only for `train` and `plan`\nhint: use --preset ",
        ),
        (generate("gaming", &[]), "gaming"),
        (generate("latency", &["--memory-limit", "100KiB"]), "larger budget or a smaller model"),
    ] {
        let said = text(&made.stderr);
        assert_eq!(made.status.code(), Some(2), "{said}");
        assert!(said.contains(why), "{why}: {said}");
    }
}

#[test]
fn a_profile_tells_operators_and_layers_and_writes_a_trace() {
    let folder = tempfile::tempdir().expect("a folder");
    let (model, trace) = (fixture("llama"), folder.path().join("trace.json"));
    let (model, trace) = (model.to_str().expect("UTF-8"), trace.to_str().expect("UTF-8"));
    let args = ["profile", "--model", model, "--backend", "cpu", "-p", "20", "-n", "2"];
    let out = flashover(&[&args[..], &["--trace", trace]].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    let said = text(&out.stdout);
    for part in
        ["| matmul ", "| attention_decode ", "| rope ", "| sample ", "| layer 0 |", "| head |"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
    let written = std::fs::read_to_string(trace).expect("written");
    trace_format::rows(&written).expect("what Perfetto reads");
    let file: Value = serde_json::from_str(&written).expect("JSON");
    let events = file["traceEvents"].as_array().expect("a list");
    let of = |category: &str| events.iter().filter(|event| event["cat"] == category).count();
    assert!(of("kernel") > 20 && of("cpu_op") > 20 && of("user_annotation") > 3);
    let first = |field: &str, value: &str| {
        let those = events.iter().filter(|event| event[field] == value);
        those.filter_map(|event| event["ts"].as_f64()).fold(f64::INFINITY, f64::min)
    };
    assert!(first("ph", "C") <= first("cat", "user_annotation"), "memory is read at the start");
    let out = flashover(&[&args[..], &["--format", "json"]].concat());
    let profile: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    assert!(profile["operators"][0]["share_of_ceiling"].as_f64() > Some(0.0), "{profile}");
    // A trace of `generate` has the same format.
    let args = ["generate", "--model", model, "--backend", "cpu", "--tokens", "1,2,3"];
    let more = ["--max-new-tokens", "3", "--ignore-eos", "--profile-trace", trace];
    assert!(flashover(&[&args[..], &more].concat()).status.success());
    let rows = trace_format::rows(&std::fs::read_to_string(trace).expect("written"));
    let rows = rows.expect("what Perfetto reads");
    let steps = rows.values().flatten().filter(|(_, _, name)| name == "step");
    assert_eq!(steps.count(), 2);
    // An output file that cannot be written is reported before the model is loaded.
    let nowhere = folder.path().join("no/trace.json");
    let more = ["--profile-trace", nowhere.to_str().expect("UTF-8")];
    let refused = flashover(&[&args[..], &more].concat());
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        text(&refused.stderr).contains(" does not exist\nhint: create it"),
        "{}",
        text(&refused.stderr)
    );
}

#[test]
fn what_is_measured_is_planned_before_it_is_loaded() {
    let model = fixture("llama");
    let model = model.to_str().expect("UTF-8");
    for (command, more, why) in [
        ("bench", &["-p", "8,4096", "-n", "0"][..], "expected at most 128 tokens, got 4096"),
        ("profile", &["-p", "120", "-n", "16"], "expected at most 128 tokens, got 136"),
        ("bench", &["-b", "1,4096", "-p", "64", "-n", "0"], "with 4096 sequences of 64 tokens"),
    ] {
        let args = [command, "--model", model, "--backend", "cpu", "--memory-limit", "64MiB"];
        let out = flashover(&[&args[..], more].concat());
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{said}");
        assert!(said.contains(why) && said.contains("\nhint: "), "{said}");
        // Even earlier tests of the list have not run.
        assert!(out.stdout.is_empty(), "{}", text(&out.stdout));
    }
}

#[test]
fn a_batch_is_found_within_a_budget() {
    let model = fixture("llama");
    let model = model.to_str().expect("UTF-8");
    let args = ["bench", "--model", model, "--backend", "cpu", "-p", "0", "-n", "4", "-b", "8"];
    let limit = {
        let plan = ["plan", "--model", model, "--backend", "cpu", "-c", "4", "-b", "3", "--json"];
        let plan: Value = serde_json::from_slice(&flashover(&plan).stdout).expect("JSON");
        let part = |name: &str| plan[name].as_u64().expect("bytes");
        ["weights_bytes", "cache_bytes", "activations_bytes", "workspace_bytes"]
            .map(part)
            .iter()
            .sum::<u64>()
    };
    let limit = limit.to_string();
    let out = flashover(&[&args[..], &["--find-batch", "64", "--memory-limit", &limit]].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    let (rows, said) = (text(&out.stdout), text(&out.stderr));
    for batch in [8, 4] {
        assert!(said.contains(&format!("tg4: a batch of {batch} does not fit\n")), "{said}");
    }
    let best = said.lines().last().expect("a line");
    assert!(["tg4: best 2, ", "tg4: best 3, "].iter().any(|two| best.starts_with(two)), "{said}");
    // Each batch that fits has a row.
    assert_eq!(rows.lines().count(), 2 + 2, "{rows}");
    assert!(rows.contains(" | cpu | 2 | tg4 | ") && rows.contains(" | cpu | 3 | tg4 | "), "{rows}");
    assert!(best.contains("do not fit: ") && best.ends_with(')'), "{best}");
    let refused = |more: &[&str]| text(&flashover(&[&args[..], more].concat()).stderr);
    let above = refused(&["--find-batch", "4"]);
    assert!(above.contains("--batch 8 is above --find-batch 4\nhint: "), "{above}");
    let list = [&args[..args.len() - 1], &["1,2", "--find-batch", "4"]].concat();
    let several = text(&flashover(&list).stderr);
    assert!(
        several.contains("--find-batch expects one start, got several in --batch\nhint: "),
        "{several}"
    );
}

/// Memory that one batch leaves in the pools is not counted again for the next.
#[test]
fn batches_that_grow_stay_within_a_budget() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let model = model.to_str().expect("UTF-8");
    let limit = 32 << 20;
    let args = ["bench", "--model", model, "--backend", "cpu", "-p", "0", "-n", "4", "-r", "1"];
    let search = ["-b", "30", "--find-batch", "48", "--format", "jsonl", "--memory-limit", "32MiB"];
    let out = flashover(&[&args[..], &search].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    let held: Vec<u64> = text(&out.stdout)
        .lines()
        .map(|row| serde_json::from_str::<Value>(row).expect("JSON")["reserved_bytes"].as_u64())
        .map(|held| held.expect("bytes"))
        .collect();
    assert!(held.len() >= 2, "{held:?}");
    assert!(held.iter().all(|held| *held <= limit), "{held:?} of {limit}");
}
