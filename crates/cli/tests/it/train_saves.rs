//! Tests what `flashover train` saves: which files it replaces, and how runs go on.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::{demo, fixture, flashover};

/// A folder with tokens, a text and runs.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let values: Vec<u8> = (0..800u16).flat_map(|at| (at * 7 % 160).to_le_bytes()).collect();
        fs::write(folder.path().join("tokens.bin"), values).expect("written");
        fs::write(folder.path().join("data.txt"), "One day a dog ran. ".repeat(40))
            .expect("written");
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn name(&self, name: &str) -> String {
        self.path(name).to_str().expect("UTF-8").to_owned()
    }

    /// Trains into a folder; returns the exit code and what was printed.
    fn train(&self, output: &str, more: &[&str]) -> (Option<i32>, String) {
        let output = self.name(output);
        let own = ["train", "--backend", "cpu", "-b", "1", "-c", "8", "--output", &output];
        let made = flashover(&[&own[..], more].concat());
        (made.status.code(), String::from_utf8_lossy(&made.stderr).into_owned())
    }

    fn trained(&self, output: &str, more: &[&str]) -> String {
        let (code, said) = self.train(output, more);
        assert_eq!(code, Some(0), "{more:?}: {said}");
        said
    }

    fn refused(&self, output: &str, more: &[&str], why: &str) {
        let (code, said) = self.train(output, more);
        assert!(code == Some(2) && said.contains(why), "{why}: {said}");
        assert!(said.contains("\nhint: "), "{said}");
    }

    /// Asserts that two runs saved the same weights and state.
    fn same(&self, one: &str, other: &str) {
        for file in ["model.safetensors", "flashover_run.safetensors"] {
            let read = |folder: &str| fs::read(self.path(folder).join(file)).expect("saved");
            assert!(read(one) == read(other), "{one}, {other}: {file}");
        }
    }
}

/// Copies a fixture, with a file in a subfolder.
fn copied(place: &Place) -> String {
    let model = place.path("model");
    fs::create_dir_all(model.join("extra")).expect("made");
    for entry in fs::read_dir(fixture("gpt2")).expect("a fixture") {
        let path = entry.expect("listed").path();
        if path.is_file() {
            fs::copy(&path, model.join(path.file_name().expect("a file"))).expect("copied");
        }
    }
    fs::write(model.join("extra/notes.md"), "of the model").expect("written");
    fs::write(model.join("README.md"), "of the model").expect("written");
    place.name("model")
}

#[test]
fn a_model_with_subfolders_is_saved_again_and_again() {
    let place = Place::new();
    let (model, data) = (copied(&place), place.name("tokens.bin"));
    let full = ["--full", "--model", &model, "--data", &data, "--save-every", "1"];
    place.trained("run", &[&full[..], &["--steps", "3"]].concat());
    let run = place.path("run");
    let read = |file: &str| fs::read_to_string(run.join(file)).expect("saved");
    assert_eq!(
        (read("extra/notes.md"), read("README.md")),
        ("of the model".into(), "of the model".into())
    );
    let (run, whole) = (place.name("run"), ["--steps", "5"]);
    place.trained("run", &[&full[..], &["--resume", &run], &whole].concat());
    place.trained("whole", &[&full[..], &whole].concat());
    place.same("run", "whole");
    // Without --model, and then with another one.
    let goes_on = ["--full", "--data", &data, "--resume", &run, "--steps", "6"];
    place.trained("more", &goes_on);
    let demo = demo();
    let other = [&goes_on[..], &["--model", demo.to_str().expect("UTF-8")]].concat();
    place.refused("other", &other, "model: \"gpt2 with ");
}

#[test]
fn files_of_others_are_replaced_only_when_told() {
    let place = Place::new();
    let (model, data) = (copied(&place), place.name("tokens.bin"));
    let full = ["--full", "--model", &model, "--data", &data, "--steps", "1"];
    let readme = place.path("run/README.md");
    fs::create_dir(place.path("run")).expect("made");
    fs::write(&readme, "mine").expect("written");
    fs::write(place.path("run/thesis"), "mine").expect("written");
    place.refused("run", &full, "has another README.md\nhint: ");
    assert_eq!(fs::read_to_string(&readme).expect("there"), "mine");
    place.trained("run", &[&full[..], &["--overwrite"]].concat());
    assert_eq!(fs::read_to_string(&readme).expect("there"), "of the model");
    assert_eq!(fs::read_to_string(place.path("run/thesis")).expect("there"), "mine");
    place.refused("run", &full, "has a model\nhint: ");
}

#[test]
fn kept_steps_go_on_in_their_folder() {
    let place = Place::new();
    let (model, data) = (copied(&place), place.name("tokens.bin"));
    let full = ["--full", "--model", &model, "--data", &data, "--save-every", "1"];
    let keep = [&full[..], &["--keep", "2"]].concat();
    place.trained("whole", &[&full[..], &["--steps", "7"]].concat());
    place.trained("run", &[&keep[..], &["--steps", "4"]].concat());
    place.refused("run", &[&keep[..], &["--steps", "4"]].concat(), "has a model\nhint: ");
    let root = place.name("run");
    // From the last save, which is in the output folder itself.
    place.trained("run", &[&keep[..], &["--steps", "7", "--resume", &root]].concat());
    place.same("run", "whole");
    let mut names: Vec<_> = fs::read_dir(place.path("run"))
        .expect("there")
        .filter_map(|entry| entry.expect("listed").file_name().into_string().ok())
        .filter(|name| name.starts_with("step-"))
        .collect();
    names.sort();
    assert_eq!(names, ["step-000005", "step-000006"]);
    assert!(!place.path("run/step-000006/step-000005").exists(), "a step is not part of the model");
    // A killed run has steps alone.
    for entry in fs::read_dir(place.path("run")).expect("there") {
        let path = entry.expect("listed").path();
        if path.is_file() {
            fs::remove_file(path).expect("saved");
        }
    }
    fs::remove_dir_all(place.path("run/extra")).expect("saved");
    let why = format!("use --resume {}", place.name("run/step-000006"));
    place.refused("run", &[&keep[..], &["--steps", "7", "--resume", &root]].concat(), &why);
    place.refused("run", &[&keep[..], &["--steps", "7"]].concat(), "has saved steps\nhint: ");
    let last = place.name("run/step-000006");
    place.trained("run", &[&keep[..], &["--steps", "7", "--resume", &last]].concat());
    place.same("run", "whole");
}

#[test]
fn runs_from_scratch_go_on() {
    let place = Place::new();
    let (config, data, log) =
        (fixture("gpt2").join("config.json"), place.name("tokens.bin"), place.name("log"));
    let config = config.to_str().expect("UTF-8");
    for more in [&["--optimizer", "muon"][..], &["--schedule", "wsd", "--decay-steps", "2"]] {
        let own = ["--full", "--from-scratch", "--shape", config, "--data", &data];
        let own = [&own[..], &["--save-every", "2", "--overwrite", "--log", &log], more].concat();
        let (half, schedule) = (place.name("half"), more[0] == "--schedule");
        // A schedule ends with the steps, so its run is stopped by a step that is saved.
        let first = if schedule { "6" } else { "4" };
        place.trained("whole", &[&own[..], &["--steps", "6"]].concat());
        place.trained("half", &[&own[..], &["--steps", first, "--keep", "1"]].concat());
        let from = if schedule { place.name("half/step-000004") } else { half };
        let said =
            place.trained("rest", &[&own[..], &["--steps", "6", "--resume", &from]].concat());
        assert!(said.contains("the run continues after 4 steps"), "{said}");
        place.same("rest", "whole");
        let lines = fs::read_to_string(&log).expect("written");
        let steps = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        let steps: Vec<_> = steps.filter_map(|line| line["step"].as_u64()).collect();
        assert_eq!(steps.len() as u64, first.parse::<u64>().expect("a number") + 2, "{lines}");
        assert_eq!(steps.last(), Some(&6), "appended");
    }
    for file in ["flashover_run.safetensors", "flashover_run.json"] {
        let path = place.path("rest").join(file);
        let bytes = fs::read(&path).expect("saved");
        fs::write(&path, &bytes[..bytes.len() / 2]).expect("written");
        let rest = place.name("rest");
        let own =
            ["--full", "--data", &data, "--resume", &rest, "--steps", "9", "--schedule", "wsd"];
        let own = [&own[..], &["--decay-steps", "2"]].concat();
        let why = if file.ends_with("json") {
            "cannot resume: "
        } else {
            "the run began with new weights"
        };
        place.refused("again", &own, why);
        let same =
            ["--from-scratch", "--shape", config, "--full", "--data", &data, "--resume", &rest];
        let same =
            [&same[..], &["--schedule", "wsd", "--decay-steps", "2", "--steps", "9"]].concat();
        place.refused(
            "again",
            &same,
            if file.ends_with("json") { "cannot resume: " } else { "steps: 6" },
        );
    }
}

#[test]
fn an_adapter_goes_on_over_its_own_model_alone() {
    let place = Place::new();
    let (model, data) = (copied(&place), place.name("tokens.bin"));
    let other = place.path("other");
    fs::create_dir(&other).expect("made");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(Path::new(&model).join(name), other.join(name)).expect("copied");
    }
    let path = other.join("model.safetensors");
    let mut bytes = fs::read(&path).expect("copied");
    *bytes.last_mut().expect("not empty") ^= 0x01;
    fs::write(&path, bytes).expect("written");
    let own = ["--data", &data, "--save-every", "1"];
    let at = |model: &str, more: &[&str]| -> Vec<String> {
        let all = [&own[..], &["--model", model], more].concat();
        all.into_iter().map(str::to_owned).collect()
    };
    let run = |args: Vec<String>, output: &str, why: Option<&str>| {
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        match why {
            None => drop(place.trained(output, &args)),
            Some(why) => place.refused(output, &args, why),
        }
    };
    run(at(&model, &["--steps", "2", "--lora-targets", "c_attn"]), "adapter", None);
    let adapter = place.name("adapter");
    let resume = ["--resume", &adapter, "--steps", "4"];
    let other = place.name("other");
    run(at(&other, &resume), "no", Some("model: \"gpt2 with "));
    let targets = [&resume[..], &["--lora-targets", "c_proj"]].concat();
    run(at(&model, &targets), "no", Some("and targets c_attn\nhint: "));
    run(at(&model, &resume), "adapter", None);
}

#[test]
fn a_result_is_not_replaced_by_another_kind() {
    let place = Place::new();
    let (model, data) = (copied(&place), place.name("tokens.bin"));
    let full = ["--full", "--model", &model, "--data", &data, "--save-every", "1"];
    let lora = ["--model", &model, "--data", &data, "--steps", "1"];
    place.trained("run", &[&full[..], &["--steps", "4", "--keep", "3"]].concat());
    place.refused("run", &lora, "has a training run\nhint: ");
    let step = place.name("run/step-000002");
    let earlier = [&full[..], &["--keep", "3", "--steps", "3", "--resume", &step]].concat();
    place.refused("run", &earlier, "has a later save than the one to resume from\nhint: ");
    for file in ["model.safetensors", "flashover_run.json", "step-000003/config.json"] {
        let path = place.name(&format!("run/{file}"));
        let page = [&full[..], &["--steps", "1", "--overwrite", "--html", &path]].concat();
        place.refused("run", &page, "the same file: ");
    }
    let weights = place.path("precious");
    fs::create_dir(&weights).expect("made");
    fs::write(weights.join("model.safetensors"), "mine").expect("written");
    let config = fixture("gpt2").join("config.json");
    let scratch = ["--full", "--from-scratch", "--shape", config.to_str().expect("UTF-8")];
    let scratch = [&scratch[..], &["--data", &data, "--steps", "1"]].concat();
    place.refused("precious", &scratch, "has a model\nhint: ");
    // Weights and state of two saves do not go together.
    let mixed = place.path("run/step-000003/model.safetensors");
    fs::copy(place.path("run/step-000001/model.safetensors"), &mixed).expect("copied");
    let step = place.name("run/step-000003");
    let resume = ["--full", "--data", &data, "--steps", "5", "--resume", &step];
    place.refused("other", &resume, "these weights are of another save\nhint: ");
}

#[test]
fn a_save_has_the_files_of_a_folder_that_is_gone() {
    let place = Place::new();
    let (model, data) = (copied(&place), place.name("tokens.bin"));
    let keep = ["--full", "--data", &data, "--save-every", "1", "--keep", "1"];
    place.trained("run", &[&keep[..], &["--model", &model, "--steps", "3"]].concat());
    fs::remove_file(place.path("run/model.safetensors")).expect("saved");
    fs::remove_file(place.path("run/flashover_run.json")).expect("saved");
    let step = place.name("run/step-000002");
    let said = place.trained("run", &[&keep[..], &["--steps", "5", "--resume", &step]].concat());
    assert!(!place.path("run/step-000002").exists() && !said.contains("is gone"), "{said}");
    for folder in ["run", "run/step-000004"] {
        let notes = fs::read_to_string(place.path(folder).join("extra/notes.md"));
        assert_eq!(notes.expect("saved"), "of the model");
    }
}

#[test]
fn held_out_files_are_not_trained_on() {
    let place = Place::new();
    fs::create_dir(place.path("data")).expect("made");
    for name in ["train.bin", "val.bin"] {
        fs::copy(place.path("tokens.bin"), place.path("data").join(name)).expect("copied");
    }
    let (model, data, val) = (copied(&place), place.name("data"), place.name("data/val.bin"));
    let own = ["--full", "--model", &model, "--data", &data, "--steps", "1"];
    let why = "is held out, and trained on as part of the --data folder\nhint: ";
    place.refused("run", &[&own[..], &["--held-out", &val]].concat(), why);
    let said = place.trained("run", &own);
    assert!(
        said.contains("note: trains on all 2 files of the folder, val.bin among them"),
        "{said}"
    );
    fs::write(place.path("zip.txt"), [80, 75, 3, 4, 0, 0, 1]).expect("written");
    let zip = place.name("zip.txt");
    let demo = demo();
    let text = ["--model", demo.to_str().expect("UTF-8"), "--data", &zip];
    place.refused("zip", &text, "it has bytes of 0, which no text has\nhint: ");
}
