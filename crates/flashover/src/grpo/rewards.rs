//! Rewards of completions: closures, built-in rules, and commands that speak JSON lines.
//!
//! A command is started once for each worker, and gets one line for each completion:
//!
//! ```text
//! {"id": 3, "prompt": "2+2=", "completion": "4", "tokens": 1, "truncated": false, "line": 7, "answer": "4"}   fields of its line too
//! {"reward": 1.0}                                              its answer, on one line; null if it scores nothing
//! ```
//!
//! An answer may repeat the `id`, which then has to be that of the question.

use std::io::{BufRead, BufReader, Read, Write};
#[cfg(unix)]
use std::os::unix::process::CommandExt;
use std::process::{Child, Command as System, Stdio};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use fancy_regex::Regex;
use rayon::prelude::*;
#[cfg(unix)]
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Map, Value, json};

use super::GrpoError;

/// A completion to score.
#[derive(Debug, Clone, Copy)]
pub struct Scored<'a> {
    /// Text of the prompt.
    pub prompt: &'a str,
    /// Text of the completion.
    pub completion: &'a str,
    /// Tokens of the completion, with the one that ended it.
    pub tokens: &'a [u32],
    /// True if it ended because it was too long.
    pub truncated: bool,
    /// Line of the prompt in its file, from 1.
    pub line: usize,
    /// Other fields of the line.
    pub fields: &'a Map<String, Value>,
}

/// A fault of a reward for one completion; the others are unharmed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RewardError {
    /// The reward is NaN or infinite.
    #[error("the reward is {0}, which is not a finite number")]
    NotFinite(f64),
    /// The line has no field that the reward needs.
    #[error("the line has no text or number `{0}`, which the reward compares with")]
    NoField(String),
    /// A pattern took too long.
    #[error("the pattern cannot be matched: {0}")]
    Pattern(String),
    /// A command gave no answer in time. It is restarted.
    #[error("the command gave no reward within {0:?}")]
    Late(Duration),
    /// A command ended. It is restarted.
    #[error("the command ended: {0}")]
    Dead(String),
    /// A command's answer is no reward. It is restarted.
    #[error("expected a line such as {{\"reward\": 1.0}}, got {0}")]
    NotJson(String),
    /// A command wrote a line that answers no completion, or another one. It is restarted.
    #[error("expected one line of output for each completion, got also {0}")]
    Surplus(String),
}

/// Score of a completion; none if the function does not score it.
pub type Score = Result<Option<f64>, RewardError>;

/// A reward function. Closures are rewards; several threads call them at the same time.
pub trait Reward: Send + Sync {
    /// Scores one completion.
    fn score(&self, completion: &Scored<'_>) -> Score;

    /// Scores completions, in order.
    fn score_all(&self, completions: &[Scored<'_>]) -> Vec<Score> {
        completions.par_iter().map(|own| self.score(own).and_then(finite)).collect()
    }
}

impl<F: Fn(&Scored<'_>) -> Option<f64> + Send + Sync> Reward for F {
    fn score(&self, completion: &Scored<'_>) -> Score {
        Ok(self(completion))
    }
}

fn finite(score: Option<f64>) -> Score {
    match score {
        Some(score) if !score.is_finite() => Err(RewardError::NotFinite(score)),
        score => Ok(score),
    }
}

/// Built-in rules.
#[derive(Debug, Clone)]
pub enum Rule {
    /// 1 if the completion is the text of this field of its line, without spaces around both; else 0.
    Exact(String),
    /// 1 if the pattern matches somewhere in the completion; else 0.
    Regex(Box<Regex>),
    /// 1 up to this number of tokens, falling to 0 at twice as many.
    Length(usize),
    /// 1 if the completion is valid JSON; else 0.
    Json,
}

impl Reward for Rule {
    fn score(&self, own: &Scored<'_>) -> Score {
        let truth = |holds: bool| f64::from(u8::from(holds));
        Ok(Some(match self {
            Self::Exact(field) => {
                let want = match own.fields.get(field) {
                    Some(Value::String(text)) => text.trim().to_owned(),
                    Some(Value::Number(number)) => number.to_string(),
                    _ => return Err(RewardError::NoField(field.clone())),
                };
                truth(own.completion.trim() == want)
            }
            Self::Regex(pattern) => {
                let matched = pattern.is_match(own.completion);
                truth(matched.map_err(|why| RewardError::Pattern(why.to_string()))?)
            }
            Self::Length(most) => (2.0 - own.tokens.len() as f64 / *most as f64).clamp(0.0, 1.0),
            Self::Json => truth(serde_json::from_str::<Value>(own.completion).is_ok()),
        }))
    }
}

/// A command with several workers.
#[derive(Debug)]
pub struct Command {
    command: String,
    timeout: Duration,
    /// Questions asked so far.
    asked: AtomicU64,
    workers: Vec<Mutex<Option<Worker>>>,
}

/// Late answers in turn after which a worker is asked nothing more of a batch.
const MOST_LATE: usize = 2;

/// A process, in a process group of its own: it ends with its children, and an interrupt of the terminal is not for it.
#[derive(Debug)]
struct Worker {
    process: Child,
    questions: Sender<String>,
    /// Lines that it wrote at once.
    lines: Receiver<std::io::Result<Vec<String>>>,
    /// A line that came with the last answer.
    surplus: Option<String>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended already.
        #[cfg(unix)]
        if let Some(group) = Pid::from_raw(self.process.id().cast_signed()) {
            let _ended = kill_process_group(group, Signal::KILL);
        }
        let _ended = self.process.kill();
        let _status = self.process.wait();
    }
}

impl Worker {
    fn start(command: &str) -> std::io::Result<Self> {
        let mut shell = System::new("sh");
        shell.args(["-c", command]).stdin(Stdio::piped()).stdout(Stdio::piped());
        #[cfg(unix)]
        shell.process_group(0);
        let mut process = shell.spawn()?;
        let mut input = process.stdin.take().expect("it is piped");
        let (questions, asked) = channel::<String>();
        // A full pipe blocks it, and not the one who asks. Ends with the process, or with the worker.
        thread::spawn(move || {
            for question in asked {
                if writeln!(input, "{question}").and_then(|()| input.flush()).is_err() {
                    break;
                }
            }
        });
        let mut output = BufReader::new(process.stdout.take().expect("it is piped"));
        let (sender, lines) = channel();
        // Ends with the process, whose output then ends.
        thread::spawn(move || {
            while let Some(lines) = written(&mut output).transpose() {
                if sender.send(lines).is_err() {
                    break;
                }
            }
        });
        Ok(Self { process, questions, lines, surplus: None })
    }

    /// Returns the score of question `id`.
    fn ask(&mut self, id: u64, question: String, timeout: Duration) -> Score {
        if let Some(line) = self.surplus.take() {
            return Err(RewardError::Surplus(shortened(&line)));
        }
        if let Ok(lines) = self.lines.try_recv() {
            let line = lines.map_or_else(|why| why.to_string(), |own| own.join("\n"));
            return Err(RewardError::Surplus(shortened(&line)));
        }
        if self.questions.send(question).is_err() {
            return Err(self.dead());
        }
        match self.lines.recv_timeout(timeout) {
            Ok(Ok(lines)) => {
                self.surplus = lines.get(1).cloned();
                answer(&lines[0], id)
            }
            Ok(Err(why)) => Err(RewardError::NotJson(why.to_string())),
            Err(RecvTimeoutError::Timeout) => Err(RewardError::Late(timeout)),
            Err(RecvTimeoutError::Disconnected) => Err(self.dead()),
        }
    }

    fn dead(&mut self) -> RewardError {
        // Its output has ended, and so it soon has.
        for _ in 0..100 {
            match self.process.try_wait() {
                Ok(Some(status)) => return RewardError::Dead(status.to_string()),
                Ok(None) => thread::sleep(Duration::from_millis(10)),
                Err(why) => return RewardError::Dead(why.to_string()),
            }
        }
        RewardError::Dead("it closed its output".to_owned())
    }
}

/// Reads a line, and those that are there already: a second one that was written with the first must not become the score of another
/// completion. None at the end.
fn written(output: &mut BufReader<impl Read>) -> std::io::Result<Option<Vec<String>>> {
    let mut all = Vec::new();
    loop {
        let mut line = String::new();
        if output.read_line(&mut line)? == 0 {
            break;
        }
        all.push(line.trim_end_matches(['\r', '\n']).to_owned());
        // Only a whole line: the rest may be long in coming.
        if !output.buffer().contains(&b'\n') {
            break;
        }
    }
    Ok((!all.is_empty()).then_some(all))
}

fn shortened(line: &str) -> String {
    line.chars().take(200).collect()
}

/// Returns the reward of a line that answers question `id`: a number, or an object with one.
fn answer(line: &str, id: u64) -> Score {
    let wrong = || RewardError::NotJson(shortened(line));
    let value: Value = serde_json::from_str(line).map_err(|_| wrong())?;
    if value.get("id").is_some_and(|own| own.as_u64() != Some(id)) {
        return Err(RewardError::Surplus(shortened(line)));
    }
    let reward = match &value {
        Value::Object(fields) => fields.get("reward").ok_or_else(wrong)?,
        other => other,
    };
    match reward {
        Value::Null => Ok(None),
        Value::Number(number) => Ok(number.as_f64()),
        _ => Err(wrong()),
    }
}

impl Command {
    /// Starts the workers of a shell command.
    ///
    /// # Errors
    /// [`GrpoError::Command`] if a shell does not start.
    pub fn start(command: &str, workers: usize, timeout: Duration) -> Result<Self, GrpoError> {
        let own = |_| {
            let started = Worker::start(command);
            started
                .map(|worker| Mutex::new(Some(worker)))
                .map_err(|why| GrpoError::Command { command: command.to_owned(), why })
        };
        let workers = (0..workers.max(1)).map(own).collect::<Result<_, _>>()?;
        Ok(Self { command: command.to_owned(), timeout, asked: AtomicU64::new(0), workers })
    }

    fn ask(&self, worker: &Mutex<Option<Worker>>, completion: &Scored<'_>) -> Score {
        let mut worker = worker.lock().unwrap_or_else(PoisonError::into_inner);
        let running = match worker.take() {
            Some(running) => Ok(running),
            None => Worker::start(&self.command),
        };
        let mut running = running.map_err(|why| RewardError::Dead(why.to_string()))?;
        let Scored { prompt, completion, tokens, truncated, line, fields } = *completion;
        let id = self.asked.fetch_add(1, Ordering::Relaxed);
        let mut question = fields.clone();
        question.extend([
            ("id".to_owned(), id.into()),
            ("prompt".to_owned(), prompt.into()),
            ("completion".to_owned(), completion.into()),
            ("tokens".to_owned(), tokens.len().into()),
            ("truncated".to_owned(), truncated.into()),
            ("line".to_owned(), line.into()),
        ]);
        let score = running.ask(id, json!(question).to_string(), self.timeout);
        // After a fault its next line may answer another completion.
        if score.is_ok() {
            *worker = Some(running);
        }
        score
    }
}

impl Reward for Command {
    fn score(&self, completion: &Scored<'_>) -> Score {
        self.ask(&self.workers[0], completion)
    }

    fn score_all(&self, completions: &[Scored<'_>]) -> Vec<Score> {
        let next = AtomicUsize::new(0);
        let scores: Vec<Mutex<Option<Score>>> =
            completions.iter().map(|_| Mutex::new(None)).collect();
        thread::scope(|scope| {
            for worker in &self.workers {
                scope.spawn(|| {
                    let mut late = 0;
                    while late < MOST_LATE
                        && let at = next.fetch_add(1, Ordering::Relaxed)
                        && let Some(completion) = completions.get(at)
                    {
                        let score = self.ask(worker, completion);
                        late =
                            if matches!(score, Err(RewardError::Late(_))) { late + 1 } else { 0 };
                        let score = score.and_then(finite);
                        *scores[at].lock().unwrap_or_else(PoisonError::into_inner) = Some(score);
                    }
                });
            }
        });
        // Without a score if all workers were late too often.
        let taken = |score: Mutex<Option<Score>>| {
            let score = score.into_inner().unwrap_or_else(PoisonError::into_inner);
            score.unwrap_or(Err(RewardError::Late(self.timeout)))
        };
        scores.into_iter().map(taken).collect()
    }
}

/// Returns the reward of a description: `exact`, `exact:FIELD`, `regex:PATTERN`, `length:TOKENS`, `json` or `cmd:COMMAND`.
///
/// # Errors
/// [`GrpoError::Reward`], [`GrpoError::Command`].
pub fn parse_reward(
    text: &str,
    workers: usize,
    timeout: Duration,
) -> Result<Box<dyn Reward>, GrpoError> {
    let wrong = || GrpoError::Reward { text: text.to_owned(), why: None };
    let (kind, rest) = match text.split_once(':') {
        Some((kind, rest)) => (kind, Some(rest)),
        None => (text, None),
    };
    Ok(match (kind, rest) {
        ("exact", field) => Box::new(Rule::Exact(field.unwrap_or("answer").to_owned())),
        ("json", None) => Box::new(Rule::Json),
        ("regex", Some(pattern)) => {
            let pattern = Regex::new(pattern).map_err(|why| GrpoError::Reward {
                text: text.to_owned(),
                why: Some(why.to_string()),
            });
            Box::new(Rule::Regex(Box::new(pattern?)))
        }
        ("length", Some(tokens)) => {
            let most = tokens.parse().ok().filter(|most| *most > 0);
            Box::new(Rule::Length(most.ok_or_else(wrong)?))
        }
        ("cmd", Some(command)) if !command.trim().is_empty() => {
            Box::new(Command::start(command, workers, timeout)?)
        }
        _ => return Err(wrong()),
    })
}
