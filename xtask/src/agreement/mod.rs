//! `cargo xtask compare`: one model on several backends, in several precisions, and how far they are apart.
//!
//! ```text
//! generate   greedy tokens of each subject: a backend in a precision
//! logits     after the prompt and the reference's greedy tokens: divergence, KL, largest difference
//! logits     after each token of a text: perplexity
//! bench      speed
//! ```
//!
//! The reference is the first subject that gives tokens and logits.

mod numbers;
mod program;
mod subject;
mod table;

use std::fs;
use std::path::Path;

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;

use self::numbers::{Agreement, Answer, Logits, Windows};
use self::program::{Failure, Model, Speed};
use self::subject::Subject;
use crate::bench::wants;
use crate::cli::{CompareArgs, CompareFormat, word};
use crate::devices::{Backend, Chosen, Device, Doctor};
use crate::fail::{Fail, check, usage};
use crate::place::Place;
use crate::programs::Programs;
use crate::report::Style;
use crate::setup;

const PROMPT: &str = "Once upon a time";

/// Tokens of a text that see each other, where the model has as many positions.
const WINDOW: usize = 512;

/// Logits that are asked for at once: a model of a large vocabulary has 256 MiB of them in a window.
const BYTES_AT_ONCE: usize = 512 << 20;

/// Tokens that are asked for at once: an argument holds 128 KiB.
const TOKENS_AT_ONCE: usize = 16 << 10;

/// What can be known without the programs is checked before they are built.
pub(crate) fn run(args: &CompareArgs) -> Result<()> {
    let place = Place::find()?;
    let window = check_files(args)?;
    setup::check_drivers(&args.backend)?;
    let (programs, _) = Programs::ready(&place, wants(&args.backend))?;
    let chosen = Doctor::ask(&programs)?.choose(&args.backend, false)?;
    check_profile(args, &chosen)?;
    let model = Model::new(&programs, args);
    let task = Task::new(&model, args, window)?;
    eprintln!("{chosen}");
    let mut report = task.compare(&chosen);
    if let Some(refusal) = report.refusal() {
        return Err(Fail::Refused(refusal.to_owned()).into());
    }
    if has_tokenizer(&args.model) {
        let named = report.name_tokens(|tokens| model.texts(tokens));
        named.unwrap_or_else(|why| eprintln!("warning: tokens have no text: {why:#}"));
    }
    command::print(&match args.format {
        CompareFormat::Md => table::document(&report, Style::of_stdout()),
        CompareFormat::Json => serde_json::to_string_pretty(&report)? + "\n",
    })?;
    report.verdict()
}

/// Refuses files that cannot be what they are given as; returns the size of the windows of a text.
fn check_files(args: &CompareArgs) -> Result<usize> {
    let hint = "a model is a folder with config.json and safetensors, as Hugging Face has it";
    let path = args.model.join("config.json");
    let shown = path.display();
    let config = fs::read_to_string(&path)
        .map_err(|why| usage(format!("cannot read {shown}: {why}"), hint))?;
    let config: Value = serde_json::from_str(&config)
        .map_err(|why| usage(format!("{shown} is no JSON: {why}"), hint))?;
    if !has_tokenizer(&args.model) {
        let shown = args.model.display();
        let without = |what: &str, hint: &str| {
            Err(usage(format!("{shown} has no tokenizer.json, so {what}"), hint))
        };
        if args.tokens.is_none() {
            return without("a prompt cannot be text", "give ids, such as --tokens 1,2,3");
        }
        if args.text.is_some() {
            return without("--text cannot be read", "leave out --text");
        }
    }
    if let Some(file) = &args.text {
        let shown = file.display();
        let hint = "--text names a file in UTF-8, such as README.md";
        let text = fs::read_to_string(file)
            .map_err(|why| usage(format!("cannot read {shown}: {why}"), hint))?;
        if text.trim().is_empty() {
            return Err(usage(format!("{shown} has no text"), hint));
        }
    }
    Ok(window(&config))
}

fn has_tokenizer(model: &Path) -> bool {
    model.join("tokenizer.json").is_file()
}

/// As long as is usual, or as long as the model goes.
fn window(config: &Value) -> usize {
    let of = |name| config.get(name).and_then(Value::as_u64);
    let context = of("max_position_embeddings").or_else(|| of("n_positions"));
    context.and_then(|most| usize::try_from(most).ok()).map_or(WINDOW, |most| most.min(WINDOW))
}

/// A profile restricts CUDA devices: without one it would be ignored.
fn check_profile(args: &CompareArgs, chosen: &Chosen) -> Result<()> {
    let cuda = chosen.devices.iter().any(|(backend, _)| *backend == Backend::Cuda);
    match &args.profile {
        Some(profile) if !cuda => Err(usage(
            format!("profile {profile} restricts a CUDA device, and none is compared"),
            "leave out --profile, or take cuda into --backend",
        )),
        _ => Ok(()),
    }
}

/// What every subject is asked.
struct Task<'a> {
    model: &'a Model<'a>,
    args: &'a CompareArgs,
    prompt: Vec<u32>,
    text: Option<Windows>,
}

/// What the others are compared with.
struct Reference {
    subject: Subject,
    greedy: Vec<u32>,
    logits: Logits,
}

impl<'a> Task<'a> {
    fn new(model: &'a Model<'a>, args: &'a CompareArgs, window: usize) -> Result<Self> {
        let prompt = match (&args.tokens, &args.prompt) {
            (Some(tokens), _) => tokens.clone(),
            (None, prompt) => model.ids(prompt.as_deref().unwrap_or(PROMPT))?,
        };
        if prompt.is_empty() {
            return Err(usage("the prompt has no tokens", "give one, such as --prompt Once"));
        }
        let Some(file) = &args.text else { return Ok(Self { model, args, prompt, text: None }) };
        let windows = Windows::new(&model.ids_of_file(file)?, &model.ids("")?, window);
        if windows.scored(&windows.list) == 0 {
            return Err(usage(
                format!("{} has one token, and perplexity is of those after it", file.display()),
                "give a longer text",
            ));
        }
        Ok(Self { model, args, prompt, text: Some(windows) })
    }

    fn compare(&self, chosen: &Chosen) -> Report {
        let mut reference = None;
        let mut rows = Vec::new();
        for (backend, device) in &chosen.devices {
            for subject in Subject::of(*backend, self.args) {
                let mut row = Row::of(subject, device);
                row.failure = self.fill(subject, &mut row, &mut reference).err();
                rows.push(row);
            }
        }
        Report {
            model: self.args.model.display().to_string(),
            profile: self.args.profile.clone(),
            prompt: self.prompt.clone(),
            text: self.text.as_ref().zip(self.args.text.as_deref()).map(|(text, file)| Text {
                file: file.display().to_string(),
                scored_tokens: text.scored(&text.list),
                window: text.size,
            }),
            reference: reference.map(|reference| reference.subject.to_string()),
            rows,
        }
    }

    /// What was found out before a failure stays.
    fn fill(
        &self,
        on: Subject,
        row: &mut Row,
        reference: &mut Option<Reference>,
    ) -> Result<(), Failure> {
        let greedy = self.model.greedy(on, &self.prompt)?;
        // What comes after the last token is not compared, and the context may end with it.
        let led =
            |greedy: &[u32]| [&self.prompt[..], &greedy[..greedy.len().saturating_sub(1)]].concat();
        let passed = led(reference.as_ref().map_or(&greedy, |reference| &reference.greedy));
        eprintln!("{on}: logits after {} tokens", passed.len());
        let logits = self.model.logits(on, &passed, passed.len())?;
        let (vocab, generated) = (logits.vocab(), greedy.len());
        row.greedy = Some(greedy.clone());
        match reference {
            None => *reference = Some(Reference { subject: on, greedy, logits }),
            Some(Reference { greedy: first, logits: theirs, .. }) => {
                let theirs = Answer { greedy: first, logits: theirs };
                let here = Answer { greedy: &greedy, logits: &logits };
                row.agreement = Some(numbers::agreement(self.prompt.len(), theirs, here)?);
            }
        }
        row.perplexity = self.perplexity(on, vocab)?;
        eprintln!("{on}: speed");
        row.speed = Some(self.model.speed(on, self.prompt.len(), generated)?);
        Ok(())
    }

    fn perplexity(&self, on: Subject, vocab: usize) -> Result<Option<f64>, Failure> {
        let Some(windows) = &self.text else { return Ok(None) };
        let tokens = (BYTES_AT_ONCE / (vocab * size_of::<f32>())).min(TOKENS_AT_ONCE);
        let (all, mut done, mut sum) = (windows.list.len(), 0, 0.0);
        for part in windows.list.chunks((tokens / windows.size).max(1)) {
            eprintln!("{on}: perplexity, windows {} to {} of {all}", done + 1, done + part.len());
            let logits = self.model.logits(on, &part.concat(), windows.size)?;
            sum += windows.surprise(part, &logits);
            done += part.len();
        }
        let perplexity = (sum / windows.scored(&windows.list) as f64).exp();
        if !perplexity.is_finite() {
            return Err(format!("the perplexity is {perplexity}").into());
        }
        Ok(Some(perplexity))
    }
}

/// What was found out.
#[derive(Debug, Clone, Serialize)]
struct Report {
    model: String,
    profile: Option<String>,
    prompt: Vec<u32>,
    text: Option<Text>,
    reference: Option<String>,
    rows: Vec<Row>,
}

/// Of what the perplexity is.
#[derive(Debug, Clone, Serialize)]
struct Text {
    file: String,
    scored_tokens: usize,
    window: usize,
}

/// One subject.
#[derive(Debug, Clone, Serialize)]
struct Row {
    name: String,
    backend: String,
    quant: String,
    kv: String,
    device: String,
    arch_id: String,
    greedy: Option<Vec<u32>>,
    agreement: Option<Agreement>,
    perplexity: Option<f64>,
    speed: Option<Speed>,
    failure: Option<Failure>,
}

impl Row {
    fn of(subject: Subject, device: &Device) -> Self {
        Self {
            name: subject.to_string(),
            backend: word(subject.backend),
            quant: word(subject.quant),
            kv: word(subject.kv),
            device: device.name.clone(),
            arch_id: device.arch_id.clone(),
            greedy: None,
            agreement: None,
            perplexity: None,
            speed: None,
            failure: None,
        }
    }

    /// What the program said when it refused before it gave anything.
    fn refusal(&self) -> Option<&str> {
        let refusal = self.failure.as_ref()?.refusal.as_deref();
        refusal.filter(|_| self.greedy.is_none())
    }
}

impl Report {
    /// What the program says when no subject takes the input, and all for one reason: the input is at fault.
    fn refusal(&self) -> Option<&str> {
        let mut refusals = self.rows.iter().map(Row::refusal);
        let first = refusals.next()??;
        refusals.all(|other| other == Some(first)).then_some(first)
    }

    /// Gives the tokens where subjects part their texts.
    fn name_tokens(&mut self, texts: impl FnOnce(&[u32]) -> Result<Vec<String>>) -> Result<()> {
        let parted = self.rows.iter_mut().filter_map(|row| row.agreement.as_mut());
        let parted = parted.filter_map(|agreement| agreement.divergence.as_mut());
        let mut choices: Vec<_> =
            parted.flat_map(|parted| [&mut parted.reference, &mut parted.here]).collect();
        if choices.is_empty() {
            return Ok(());
        }
        let tokens: Vec<u32> = choices.iter().map(|choice| choice.token).collect();
        for (choice, text) in choices.iter_mut().zip(texts(&tokens)?) {
            choice.text = Some(text);
        }
        Ok(())
    }

    /// Exit code 1 when a backend failed, or refused every precision: to refuse one and answer in another is no
    /// failure. Tokens that differ are none either.
    fn verdict(&self) -> Result<()> {
        let answers = |on: &str| self.rows.iter().any(|r| r.backend == on && r.failure.is_none());
        let failed: Vec<_> = self
            .rows
            .iter()
            .filter(|row| row.refusal().is_none() || !answers(&row.backend))
            .filter_map(|row| Some((&row.name, row.failure.as_ref()?)))
            .map(|(on, why)| format!("{on}: {}", why.refusal.as_ref().unwrap_or(&why.what)))
            .collect();
        if failed.is_empty() { Ok(()) } else { Err(check(failed.join("\n"))) }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use clap::Parser;
    use safetensors::tensor::{Dtype, TensorView};

    use super::*;
    use crate::cli::{Cli, Command, KvCache, Quant};
    use crate::fail;
    use crate::setup::Ready;

    pub(super) fn row(name: &str) -> Row {
        let backend = name.split(' ').next().unwrap();
        let device = Device {
            backend: backend.into(),
            name: format!("{backend} card"),
            arch_id: format!("{backend}-x"),
            software: false,
        };
        let cpu = Subject { backend: Backend::Cpu, quant: Quant::None, kv: KvCache::Float };
        Row { name: name.into(), backend: backend.into(), ..Row::of(cpu, &device) }
    }

    fn args(folder: &Path, more: &[&str]) -> CompareArgs {
        let folder = folder.to_str().unwrap();
        let line = [&["xtask", "compare", "--model", folder], more].concat();
        match Cli::try_parse_from(line).unwrap().command {
            Command::Compare(args) => args,
            other => panic!("parsed as {other:?}"),
        }
    }

    /// A folder that passes for a model and for the programs; subjects say there what a test has them say.
    struct Stage(tempfile::TempDir);

    impl Stage {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/agreement/fake.sh");
            std::os::unix::fs::symlink(fake, dir.path().join("flashover")).unwrap();
            for (name, text) in [
                ("flashover-bench", ""),
                ("config.json", r#"{"n_positions": 3}"#),
                ("tokenizer.json", "{}"),
                ("text", "as many words as any.tokenize has"),
            ] {
                fs::write(dir.path().join(name), text).unwrap();
            }
            Self(dir)
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn says(&self, subject: &str, question: &str, text: impl AsRef<[u8]>) {
            fs::write(self.path(&format!("{subject}.{question}")), text).unwrap();
        }

        /// Three tokens of a vocabulary of two.
        fn answers(&self, subject: &str, greedy: &str, logits: [f32; 6]) {
            self.says(subject, "generate", format!("{greedy}\n"));
            let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
            let view = TensorView::new(Dtype::F32, vec![3, 2], &bytes).unwrap();
            let file = safetensors::serialize([("logits", view)], None).unwrap();
            self.says(subject, "logits", file);
            let test = |prompt: u8, generated: u8| {
                serde_json::json!({ "compute": "f32", "quant": null, "kv": "float", "n_prompt": prompt,
                    "n_gen": generated, "avg_ts": 100.0, "stddev_ts": 1.0 })
            };
            self.says(subject, "bench", serde_json::json!([test(2, 0), test(0, 2)]).to_string());
        }

        fn compare(&self, backends: &[Backend], more: &[&str]) -> Report {
            let ready = Ready { cuda: Err("absent".into()), gl: Ok(()) };
            let programs = Programs::at(self.0.path().to_owned(), &ready).unwrap();
            let args = args(self.0.path(), more);
            let model = Model::new(&programs, &args);
            let device = |on: &Backend| {
                let Row { backend, device: name, arch_id, .. } = row(&on.to_string());
                (*on, Device { backend, name, arch_id, software: false })
            };
            let chosen = Chosen { devices: backends.iter().map(device).collect(), why: "test" };
            Task::new(&model, &args, check_files(&args).unwrap()).unwrap().compare(&chosen)
        }
    }

    const ALL: [Backend; 3] = [Backend::Cuda, Backend::Vulkan, Backend::Cpu];

    #[test]
    fn the_first_that_answers_is_the_reference_and_a_failure_costs_its_column() {
        let stage = Stage::new();
        stage.says("any", "tokenize", "0,1,0\n");
        stage.says("any", "empty", "0\n");
        stage.says("cuda", "error", "error: no driver\nhint: install it\n");
        stage.answers("vulkan", "1,0", [0.0, 1.0, 2.0, 4.0, 3.0, 0.0]);
        stage.answers("cpu", "0,1", [0.0, 1.0, 4.0, 3.0, 3.0, 0.0]);
        let text = stage.path("text");
        let report = stage.compare(&ALL, &["--tokens", "1,1", "--text", text.to_str().unwrap()]);
        assert_eq!(report.reference.as_deref(), Some("vulkan"));
        let [cuda, vulkan, cpu] = &report.rows[..] else { panic!("{report:?}") };
        assert_eq!(
            (cuda.failure.as_ref().unwrap().what.as_str(), cuda.speed.is_some()),
            ("no driver", false)
        );
        assert!(vulkan.agreement.is_none() && vulkan.speed.is_some());
        let agreement = cpu.agreement.as_ref().unwrap();
        let parted = agreement.divergence.as_ref().unwrap();
        assert_eq!((agreement.equal_tokens, agreement.greedy_tokens), (0, 2));
        assert_eq!((parted.reference.token, parted.reference.gap), (1, 2.0));
        assert_eq!((parted.here.token, parted.here.gap), (0, 1.0));
        assert_eq!(agreement.max_difference, 0.5);
        // 1 after 0, then 0 after 1.
        let e = std::f64::consts::E;
        let want = ((1.0 + 1.0 / e) * (1.0 + e * e)).sqrt();
        assert!((vulkan.perplexity.unwrap() - want).abs() < 1e-9, "{report:?}");
        assert_eq!(report.refusal(), None, "others answer");
        let error = report.verdict().unwrap_err();
        assert_eq!(error.to_string(), "cuda: no driver\nhint: install it");
        assert_eq!(fail::report(&error), 1);
    }

    /// Greedy tokens and logits in which the second precision differs from the first.
    const ANSWERS: [(&str, [f32; 6]); 2] =
        [("1,0", [0.0, 1.0, 2.0, 4.0, 3.0, 0.0]), ("0,1", [0.0, 1.0, 4.0, 3.0, 3.0, 0.0])];

    #[test]
    fn every_backend_is_asked_for_every_precision_in_the_order_given() {
        let stage = Stage::new();
        let names = ["cpu int8, kv int8", "cpu int8", "cpu kv int8", "cpu"];
        for (at, name) in names.into_iter().enumerate() {
            let (greedy, logits) = ANSWERS[usize::from(at > 1)];
            stage.answers(name, greedy, logits);
            stage.answers(&name.replace("cpu", "webgpu"), greedy, logits);
        }
        let lists = ["--tokens", "1,1", "--quant", "int8,none", "--kv-cache", "int8,float"];
        let report = stage.compare(&[Backend::Cpu, Backend::Webgpu], &lists);
        assert_eq!(report.reference.as_deref(), Some("cpu int8, kv int8"));
        let have: Vec<_> = report.rows.iter().map(|row| row.name.as_str()).collect();
        let others = names.map(|name| name.replace("cpu", "webgpu"));
        assert_eq!(have, [&names[..], &others.each_ref().map(String::as_str)].concat());
        let Row { backend, quant, kv, .. } = &report.rows[6];
        assert_eq!([backend, quant, kv].map(String::as_str), ["webgpu", "none", "int8"]);
        let equal = |row: &Row| row.agreement.as_ref().map(|agreement| agreement.equal_tokens);
        let equal: Vec<_> = report.rows.iter().map(equal).collect();
        let [same, differs] = [Some(2), Some(0)];
        assert_eq!(equal, [None, same, differs, differs, same, same, differs, differs]);
        assert!(report.verdict().is_ok(), "tokens that differ are no failure");
    }

    #[test]
    fn a_precision_that_is_refused_is_no_failure_of_a_backend_that_answers_in_another() {
        let stage = Stage::new();
        let [(greedy, logits), _] = ANSWERS;
        stage.answers("cpu", greedy, logits);
        stage.answers("cpu kv int8", greedy, logits);
        stage.answers("webgpu", greedy, logits);
        stage.says("webgpu kv int8", "error", "error: WGSL has no i8\nhint: float\n");
        let both = [Backend::Webgpu, Backend::Cpu];
        let caches = ["--tokens", "1,1", "--kv-cache", "int8,float"];
        let report = stage.compare(&both, &caches);
        assert_eq!(report.reference.as_deref(), Some("webgpu"), "the first that answers");
        assert_eq!(report.rows[0].failure.as_ref().unwrap().what, "WGSL has no i8");
        assert!(report.refusal().is_none() && report.verdict().is_ok());

        let report = stage.compare(&both, &["--tokens", "1,1", "--kv-cache", "int8"]);
        let error = report.verdict().unwrap_err();
        assert_eq!(error.to_string(), "webgpu kv int8: WGSL has no i8\nhint: float");
        assert_eq!(fail::report(&error), 1, "a backend that answers in none");

        stage.answers("cpu kv int8", greedy, [f32::NAN; 6]);
        let error = stage.compare(&both, &caches).verdict().unwrap_err();
        assert_eq!(error.to_string(), "cpu kv int8: the logits after token 0 hold NaN");
    }

    #[test]
    fn logits_that_are_no_numbers_are_no_answer() {
        let stage = Stage::new();
        stage.answers("cuda", "1,0", [0.0, 1.0, f32::NAN, 4.0, 3.0, 0.0]);
        stage.answers("vulkan", "1,0", [0.0, 1.0, 2.0, 4.0, 3.0, 0.0]);
        stage.answers("cpu", "1,0", [0.0, 1.0, 2.0, 4.0, 3.0, f32::NAN]);
        let report = stage.compare(&ALL, &["--tokens", "1,1"]);
        assert_eq!(report.reference.as_deref(), Some("vulkan"));
        let why = |row: &Row| row.failure.as_ref().map(|failure| failure.what.clone());
        assert_eq!(why(&report.rows[0]).unwrap(), "the logits after token 1 hold NaN");
        assert_eq!(why(&report.rows[1]), None);
        assert_eq!(why(&report.rows[2]).unwrap(), "the logits after token 2 hold NaN");
        assert!(report.rows[2].agreement.is_none());
    }

    #[test]
    fn what_every_backend_refuses_alike_is_the_callers_error() {
        let stage = Stage::new();
        let why = "error: token 7 is past the vocabulary\nhint: another";
        for on in ["cuda", "vulkan", "cpu"] {
            stage.says(on, "error", why);
        }
        let report = stage.compare(&ALL, &["--tokens", "7"]);
        let want = "token 7 is past the vocabulary\nhint: another";
        assert_eq!((report.refusal(), report.reference.as_deref()), (Some(want), None));
        stage.says("cpu", "error", "error: no memory\nhint: less");
        let report = stage.compare(&ALL, &["--tokens", "7"]);
        assert_eq!(report.refusal(), None);
        assert_eq!(fail::report(&report.verdict().unwrap_err()), 1);
    }

    #[test]
    fn tokens_that_part_get_their_texts() {
        let stage = Stage::new();
        stage.answers("vulkan", "1,0", [0.0, 1.0, 2.0, 4.0, 3.0, 0.0]);
        stage.answers("cpu", "0,1", [0.0, 1.0, 4.0, 3.0, 3.0, 0.0]);
        let mut report = stage.compare(&ALL[1..], &["--tokens", "1,1"]);
        let texts = |ids: &[u32]| Ok(ids.iter().map(|id| format!("<{id}>")).collect());
        report.name_tokens(texts).unwrap();
        let agreement = report.rows[1].agreement.as_ref().unwrap();
        let parted = agreement.divergence.as_ref().unwrap();
        assert_eq!(parted.reference.text.as_deref(), Some("<1>"));
        assert_eq!(parted.here.text.as_deref(), Some("<0>"));
        let mut alone = stage.compare(&ALL[2..], &["--tokens", "1,1"]);
        alone.name_tokens(|_| panic!("nothing to name")).unwrap();
        assert!(alone.verdict().is_ok(), "one backend is no failure");
    }

    #[test]
    fn files_that_cannot_be_used_are_refused_with_a_hint() {
        let stage = Stage::new();
        let folder = |name: &str, config: &[u8]| {
            fs::create_dir(stage.path(name)).unwrap();
            fs::write(stage.path(name).join("config.json"), config).unwrap();
            stage.path(name)
        };
        let (plain, broken) = (folder("plain", b"{}"), folder("broken", b"{"));
        fs::write(stage.path("empty"), "\n").unwrap();
        fs::write(stage.path("bytes"), [0xff]).unwrap();
        let whole = stage.0.path();
        let text = |name: &str| stage.path(name).to_str().unwrap().to_owned();
        for (model, more, want) in [
            (stage.path("none").as_path(), vec![], "cannot read"),
            (&broken, vec![], "is no JSON"),
            (&plain, vec![], "a prompt cannot be text"),
            (&plain, vec!["--tokens", "1", "--text", &text("text")], "--text cannot be read"),
            (whole, vec!["--text", &text("absent")], "cannot read"),
            (whole, vec!["--text", &text("bytes")], "cannot read"),
            (whole, vec!["--text", &text("empty")], "has no text"),
        ] {
            let error = check_files(&args(model, &more)).unwrap_err();
            let said = error.to_string();
            assert!(said.contains(want) && said.contains("\nhint: "), "{want}: {said}");
            assert_eq!(fail::report(&error), 2);
        }
        assert!(check_files(&args(&plain, &["--tokens", "1"])).is_ok());
    }

    #[test]
    fn a_window_is_no_longer_than_the_context() {
        let of = |config: Value| window(&config);
        assert_eq!(of(serde_json::json!({ "max_position_embeddings": 128 })), 128);
        assert_eq!(of(serde_json::json!({ "n_positions": 100 })), 100);
        assert_eq!(of(serde_json::json!({ "max_position_embeddings": 131_072 })), WINDOW);
        assert_eq!(of(serde_json::json!({})), WINDOW);
    }

    #[test]
    fn a_profile_without_cuda_is_the_callers_error() {
        let chosen = |on| {
            let Row { backend, device: name, arch_id, .. } = row("x");
            let device = Device { backend, name, arch_id, software: false };
            Chosen { devices: vec![(on, device)], why: "test" }
        };
        let args = args(Path::new("m"), &["--profile", "rtx4090"]);
        assert!(check_profile(&args, &chosen(Backend::Cuda)).is_ok());
        let error = check_profile(&args, &chosen(Backend::Cpu)).unwrap_err();
        assert_eq!(fail::report(&error), 2);
    }
}
