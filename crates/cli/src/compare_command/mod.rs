//! `flashover compare`: runs one model on several backends in several precisions and measures the differences.
//!
//! ```text
//! generate   greedy tokens of each subject (a backend in a precision)
//! logits     over the prompt and the reference's greedy tokens: divergence, KL, largest difference
//! logits     over a text: perplexity
//! bench      speed
//! ```
//!
//! Each line is a separate process, so that a crash loses only one subject. The reference is the first subject with
//! tokens and logits.
//!
//! For an ONNX graph, the outputs are compared in place of tokens and logits.

mod graph;
mod numbers;
mod program;
mod subject;
mod table;

use anyhow::{Result, bail};
use flashover::{Backend, Tokenizer};
use report::fail::{check, usage};
use report::{Chosen, CompareArgs, CompareFormat, Device, Doctor, PROMPT, Style};
use serde::Serialize;

use self::numbers::{Agreement, Answer, Logits, Windows};
use self::program::{Failure, Model, Speed};
use self::subject::Subject;
use crate::prompt_args::text_file;

/// Maximum bytes of logits per process. One window of 512 tokens takes 256 MiB with a vocabulary of 131072.
const BYTES_AT_ONCE: usize = 512 << 20;

/// Maximum tokens per process, because Linux limits an argument to 128 KiB.
const TOKENS_AT_ONCE: usize = 16 << 10;

pub(crate) fn run(args: &CompareArgs) -> Result<()> {
    if let Some(file) = &args.onnx {
        return graph::run(args, file);
    }
    let window = args.check_files()?;
    let flashover = || report::own("flashover");
    let chosen = Doctor::ask(flashover()?)?.choose(&args.backend, false)?;
    chosen.check_profile(args.profile.as_deref())?;
    let tokenizer = args.has_tokenizer().then(|| Tokenizer::open(args.model())).transpose()?;
    let model = Model { flashover: &flashover, args };
    let task = Task::new(&model, tokenizer.as_ref(), window)?;
    command::note!("{chosen}");
    let mut report = task.compare(&chosen);
    if let Some(refusal) = report.refusal() {
        bail!("{refusal}");
    }
    if let Some(tokenizer) = &tokenizer {
        report.name_tokens(tokenizer);
    }
    command::print(&match args.format {
        CompareFormat::Md => table::document(&report, Style::of_stdout()),
        CompareFormat::Json => serde_json::to_string_pretty(&report)? + "\n",
    })?;
    report.verdict()
}

/// Inputs that all subjects share.
struct Task<'a> {
    model: &'a Model<'a>,
    args: &'a CompareArgs,
    prompt: Vec<u32>,
    text: Option<Windows>,
}

/// Result that the other subjects are compared with.
struct Reference {
    subject: Subject,
    greedy: Vec<u32>,
    logits: Logits,
}

impl<'a> Task<'a> {
    fn new(model: &'a Model<'a>, tokenizer: Option<&Tokenizer>, window: usize) -> Result<Self> {
        let args = model.args;
        // `check_files` has refused folders that need a tokenizer and lack one.
        let ids = |text: &str| tokenizer.map_or(Ok(Vec::new()), |own| own.encode(text, true));
        let prompt = match (&args.tokens, &args.prompt) {
            (Some(tokens), _) => tokens.clone(),
            (None, prompt) => ids(prompt.as_deref().unwrap_or(PROMPT))?,
        };
        if prompt.is_empty() {
            return Err(usage("the prompt has no tokens", "give a prompt, such as --prompt Once"));
        }
        let Some(file) = &args.text else { return Ok(Self { model, args, prompt, text: None }) };
        let windows = Windows::new(&ids(&text_file(file, "--text")?)?, &ids("")?, window);
        if windows.scored(&windows.list) == 0 {
            return Err(usage(
                format!("expected at least two tokens in {} for perplexity", file.display()),
                "give a longer text",
            ));
        }
        Ok(Self { model, args, prompt, text: Some(windows) })
    }

    fn compare(&self, chosen: &Chosen) -> Report {
        let mut reference = None;
        let mut rows = Vec::new();
        for device in &chosen.devices {
            for subject in Subject::for_backend(device.backend, self.args) {
                let mut row = Row::new(subject, device);
                row.failure = self.fill(subject, &mut row, &mut reference).err();
                rows.push(row);
            }
        }
        Report {
            model: self.args.model().display().to_string(),
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

    /// Fills in a row. After a failure, earlier results stay in it.
    fn fill(
        &self,
        on: Subject,
        row: &mut Row,
        reference: &mut Option<Reference>,
    ) -> Result<(), Failure> {
        let greedy = self.model.greedy(on, &self.prompt)?;
        // The logits after the last token are not compared, and it may exceed the context.
        let led =
            |greedy: &[u32]| [&self.prompt[..], &greedy[..greedy.len().saturating_sub(1)]].concat();
        let passed = led(reference.as_ref().map_or(&greedy, |reference| &reference.greedy));
        command::note!("{on}: logits after {} tokens", passed.len());
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
        command::note!("{on}: speed");
        row.speed = Some(self.model.speed(on, self.prompt.len(), generated)?);
        Ok(())
    }

    fn perplexity(&self, on: Subject, vocab: usize) -> Result<Option<f64>, Failure> {
        let Some(windows) = &self.text else { return Ok(None) };
        let tokens = (BYTES_AT_ONCE / (vocab * size_of::<f32>())).min(TOKENS_AT_ONCE);
        let (all, mut done, mut sum) = (windows.list.len(), 0, 0.0);
        for part in windows.list.chunks((tokens / windows.size).max(1)) {
            command::note!(
                "{on}: perplexity, windows {} to {} of {all}",
                done + 1,
                done + part.len()
            );
            let logits = self.model.logits(on, &part.concat(), windows.size)?;
            sum += windows.negative_log_likelihood(part, &logits);
            done += part.len();
        }
        let perplexity = (sum / windows.scored(&windows.list) as f64).exp();
        if !perplexity.is_finite() {
            return Err(format!("expected a finite perplexity, got {perplexity}").into());
        }
        Ok(Some(perplexity))
    }
}

/// Result of a comparison.
#[derive(Debug, Clone, Serialize)]
struct Report {
    model: String,
    profile: Option<String>,
    prompt: Vec<u32>,
    text: Option<Text>,
    reference: Option<String>,
    rows: Vec<Row>,
}

/// Text of the perplexity measurement.
#[derive(Debug, Clone, Serialize)]
struct Text {
    file: String,
    scored_tokens: usize,
    window: usize,
}

/// Results of one subject.
#[derive(Debug, Clone, Serialize)]
struct Row {
    name: String,
    backend: Backend,
    quant: &'static str,
    kv: &'static str,
    device: String,
    arch_id: String,
    greedy: Option<Vec<u32>>,
    agreement: Option<Agreement>,
    perplexity: Option<f64>,
    speed: Option<Speed>,
    failure: Option<Failure>,
}

impl Row {
    fn new(subject: Subject, device: &Device) -> Self {
        Self {
            name: subject.to_string(),
            backend: subject.backend,
            quant: subject.quant,
            kv: subject.kv,
            device: device.name.clone(),
            arch_id: device.arch_id.clone(),
            greedy: None,
            agreement: None,
            perplexity: None,
            speed: None,
            failure: None,
        }
    }

    /// Returns the message of a program that refused its input before the first result.
    fn refusal(&self) -> Option<&str> {
        let refusal = self.failure.as_ref()?.refusal.as_deref();
        refusal.filter(|_| self.greedy.is_none())
    }
}

impl Report {
    /// Returns the message if every subject refused the input for the same reason, because then the input is wrong.
    fn refusal(&self) -> Option<&str> {
        let mut refusals = self.rows.iter().map(Row::refusal);
        let first = refusals.next()??;
        refusals.all(|other| other == Some(first)).then_some(first)
    }

    /// Adds the texts of the tokens at each divergence.
    fn name_tokens(&mut self, tokenizer: &Tokenizer) {
        let agreements = self.rows.iter_mut().filter_map(|row| row.agreement.as_mut());
        for parted in agreements.filter_map(|agreement| agreement.divergence.as_mut()) {
            for choice in [&mut parted.reference, &mut parted.here] {
                // An id outside of the tokenizer's vocabulary has no text.
                let known = Some(choice.token).filter(|token| tokenizer.has(*token));
                choice.text = known.and_then(|token| tokenizer.decode(&[token], true).ok());
            }
        }
    }

    /// Fails with exit code 1 if a backend failed or refused every precision. A backend may refuse one precision if it
    /// has results in another. Tokens that differ are not a failure.
    fn verdict(&self) -> Result<()> {
        let answers =
            |on: Backend| self.rows.iter().any(|r| r.backend == on && r.failure.is_none());
        let failed: Vec<_> = self
            .rows
            .iter()
            .filter(|row| row.refusal().is_none() || !answers(row.backend))
            .filter_map(|row| Some((&row.name, row.failure.as_ref()?)))
            .map(|(on, why)| format!("{on}: {}", why.refusal.as_ref().unwrap_or(&why.what)))
            .collect();
        if failed.is_empty() { Ok(()) } else { Err(check(failed.join("\n"))) }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use clap::Parser;
    use report::fail;
    use safetensors::tensor::{Dtype, TensorView};

    use super::*;

    /// A tokenizer with two words.
    const TWO_WORDS: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}"#;

    pub(super) fn row(name: &str) -> Row {
        let backend: Backend = name.split(' ').next().unwrap().parse().unwrap();
        let device = Device {
            backend,
            name: format!("{backend} card"),
            arch_id: format!("{backend}-x"),
            software: false,
        };
        let subject = Subject { backend, quant: "none", kv: "float" };
        Row { name: name.into(), ..Row::new(subject, &device) }
    }

    fn args(folder: &Path, more: &[&str]) -> CompareArgs {
        #[derive(Parser)]
        struct Cli {
            #[command(flatten)]
            args: CompareArgs,
        }
        let folder = folder.to_str().unwrap();
        Cli::try_parse_from([&["compare", "--model", folder], more].concat()).unwrap().args
    }

    /// A folder with a fake model and a fake program, which prints the output that a test sets for each subject.
    struct Stage(tempfile::TempDir);

    impl Stage {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/compare_command/fake.sh");
            std::os::unix::fs::symlink(fake, dir.path().join("flashover")).unwrap();
            for (name, text) in [
                ("config.json", r#"{"n_positions": 3}"#),
                ("tokenizer.json", TWO_WORDS),
                ("text", "a b a"),
            ] {
                fs::write(dir.path().join(name), text).unwrap();
            }
            Self(dir)
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn tokenizer(&self) -> Tokenizer {
            Tokenizer::open(self.0.path()).unwrap()
        }

        fn says(&self, subject: &str, question: &str, text: impl AsRef<[u8]>) {
            fs::write(self.path(&format!("{subject}.{question}")), text).unwrap();
        }

        /// Sets tokens and speed, and logits after three tokens for a vocabulary of two.
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
            let args = args(self.0.path(), more);
            let model =
                Model { flashover: &|| Ok(Command::new(self.path("flashover"))), args: &args };
            let device = |on: &Backend| {
                let Row { backend, device: name, arch_id, .. } = row(on.name());
                Device { backend, name, arch_id, software: false }
            };
            let chosen = Chosen { devices: backends.iter().map(device).collect(), why: "test" };
            let window = args.check_files().unwrap();
            Task::new(&model, Some(&self.tokenizer()), window).unwrap().compare(&chosen)
        }
    }

    const ALL: [Backend; 3] = [Backend::Cuda, Backend::Vulkan, Backend::Cpu];

    #[test]
    fn the_first_that_answers_is_the_reference_and_a_failure_costs_its_column() {
        let stage = Stage::new();
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
        // The text predicts b after a, then a after b.
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
        let report = stage.compare(&[Backend::Cpu, Backend::WebGpu], &lists);
        assert_eq!(report.reference.as_deref(), Some("cpu int8, kv int8"));
        let have: Vec<_> = report.rows.iter().map(|row| row.name.as_str()).collect();
        let others = names.map(|name| name.replace("cpu", "webgpu"));
        assert_eq!(have, [&names[..], &others.each_ref().map(String::as_str)].concat());
        let Row { backend, quant, kv, .. } = &report.rows[6];
        assert_eq!([backend.name(), *quant, *kv], ["webgpu", "none", "int8"]);
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
        let both = [Backend::WebGpu, Backend::Cpu];
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
        report.name_tokens(&stage.tokenizer());
        let agreement = report.rows[1].agreement.as_ref().unwrap();
        let parted = agreement.divergence.as_ref().unwrap();
        assert_eq!(parted.reference.text.as_deref(), Some("b"));
        assert_eq!(parted.here.text.as_deref(), Some("a"));
        let alone = stage.compare(&ALL[2..], &["--tokens", "1,1"]);
        assert!(alone.verdict().is_ok(), "one backend is no failure");
    }
}
