//! Tests models by name with a Hub server on localhost.

use std::path::Path;
use std::process::{Command, Output};

use crate::demo;
use crate::server::{Manners, Models, Server, files};

/// A server with the demo model, and a separate home folder for downloads.
struct Place {
    server: Server,
    home: tempfile::TempDir,
}

impl Place {
    fn new(manners: Manners) -> Self {
        let server = Server::start(Models::from([("owner/demo", files(&demo()))]), manners);
        Self { server, home: tempfile::tempdir().expect("temporary folder") }
    }

    fn run(&self, args: &[&str], env: &[(&str, &str)]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashover"));
        for name in ["HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"] {
            command.env_remove(name);
        }
        for name in
            ["ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"]
        {
            command.env_remove(name);
        }
        command.env("HF_HOME", self.home.path()).env("HF_ENDPOINT", &self.server.endpoint);
        command.envs(env.iter().copied()).current_dir(self.home.path());
        command.args(args).output().expect("the program starts")
    }

    fn generate(&self, model: &str, more: &[&str]) -> Output {
        let wanted =
            ["--prompt", "Once upon a time", "--max-new-tokens", "4", "--temperature", "0"];
        self.run(
            &[&["generate", "--backend", "cpu", "--model", model], &wanted[..], more].concat(),
            &[],
        )
    }
}

fn stdout(out: &Output) -> String {
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout.clone()).expect("UTF-8")
}

fn refused(out: &Output, word: &str) {
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(out.stdout.is_empty() && said.contains(word), "{word:?} is not in {said}");
    assert_eq!(said.matches("\nhint: ").count(), 1, "{said}");
}

#[test]
fn a_model_by_name_answers_as_its_folder_does() {
    let place = Place::new(Manners::default());
    let want = stdout(&place.generate(demo().to_str().expect("UTF-8"), &[]));
    assert_eq!(place.server.sent(), [""; 0], "a folder needs no request");
    refused(&place.generate("owner/demo", &["--offline"]), "not complete in the cache");
    assert_eq!(stdout(&place.generate("owner/demo", &[])), want);
    assert_eq!(place.server.sent().len(), 6);
    assert_eq!(stdout(&place.generate("owner/demo@main", &[])), want);
    assert_eq!(stdout(&place.generate("owner/demo", &["--offline"])), want);
    assert_eq!(place.server.sent(), [""; 0], "what is there is not downloaded twice");
}

#[test]
fn a_folder_of_that_name_wins() {
    let place = Place::new(Manners::default());
    let folder = place.home.path().join("owner/demo");
    std::fs::create_dir_all(&folder).expect("made");
    std::fs::copy(demo().join("tokenizer.json"), folder.join("tokenizer.json")).expect("copied");
    let args = ["tokenize", "--model", "owner/demo", "--prompt", "Once"];
    stdout(&place.run(&args, &[]));
    assert_eq!(place.server.sent(), [""; 0]);
}

#[test]
fn a_tokenizer_by_name_comes_without_weights() {
    let place = Place::new(Manners { token: Some("secret"), ..Manners::default() });
    let tokenize = |model: &Path, env| {
        let model = model.to_str().expect("UTF-8");
        place.run(&["tokenize", "--model", model, "--prompt", "Once upon a time"], env)
    };
    let want = stdout(&tokenize(&demo(), &[]));
    let name = Path::new("owner/demo");
    refused(&tokenize(name, &[]), "HF_TOKEN");
    place.server.sent();
    assert_eq!(stdout(&tokenize(name, &[("HF_TOKEN", "secret")])), want);
    assert!(!place.server.sent().iter().any(|file| file.ends_with(".safetensors")));
    assert_eq!(stdout(&tokenize(name, &[("HF_HUB_OFFLINE", "1")])), want);
}

#[test]
fn what_cannot_be_had_is_refused_with_a_hint() {
    let cut = Some(("model.safetensors", 1000));
    let place = Place::new(Manners { cut, ..Manners::default() });
    refused(
        &place.generate("owner/absent", &[]),
        "owner/absent is not a local folder, and the Hub failed",
    );
    refused(&place.generate("owner/demo", &[]), "was interrupted");
    let args = ["tokenize", "--model", "absent", "--prompt", "x"];
    refused(&place.run(&args, &[]), "cannot read absent");
    let closed = [("HF_ENDPOINT", "http://127.0.0.1:9")];
    let args = ["tokenize", "--model", "owner/other", "--prompt", "x"];
    refused(&place.run(&args, &closed), "cannot reach ");
}
