//! Errors of GRPO.

use std::path::PathBuf;

use super::report::RewardFault;
use crate::engine::GenerateError;
use crate::memory::PlanError;
use crate::train::TrainError;

/// Error of GRPO.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GrpoError {
    /// Completions cannot be drawn.
    #[error(transparent)]
    Generate(Box<GenerateError>),
    /// The policy cannot learn, an option is out of range or excludes another, or a saved run is damaged.
    #[error(transparent)]
    Train(Box<TrainError>),
    /// A prompt is longer than the context less a completion.
    #[error(
        "{} has {tokens} tokens, and at most {room} fit: the context of {context} less a completion\nhint: use a shorter prompt or \
         fewer --max-new-tokens",
        prompt(*line)
    )]
    Prompt {
        /// Line of the prompt in its file; 0 for one of no file.
        line: usize,
        /// Tokens of the prompt.
        tokens: usize,
        /// Most tokens of a prompt.
        room: usize,
        /// Context length of the model.
        context: usize,
    },
    /// A batch without prompts, or a prompt without tokens.
    #[error(
        "expected at least one prompt, each of at least one token\nhint: use the BOS token for an empty prompt"
    )]
    Empty,
    /// No completion of a step has a reward.
    #[error(
        "no completion of the batch has a reward; the first fault is of {} for {}: {}\nhint: run the reward by hand on that prompt",
        .0.function, prompt(.0.line), .0.why
    )]
    NoReward(Box<RewardFault>),
    /// A reward command does not start.
    #[error("cannot start `{command}`: {why}\nhint: check the command of --reward")]
    Command {
        /// The command.
        command: String,
        /// The error of the system.
        why: std::io::Error,
    },
    /// A text that names no reward.
    #[error(
        "expected a reward, got `{text}`{}\nhint: use exact, regex:PATTERN, length:TOKENS, json or cmd:COMMAND",
        .why.as_ref().map_or_else(String::new, |why| format!(": {why}"))
    )]
    Reward {
        /// The text.
        text: String,
        /// The problem of a pattern.
        why: Option<String>,
    },
    /// A file of prompts that cannot be read, or has none.
    #[error("{}: {why}\nhint: name a file of JSON lines with --data", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem.
        why: String,
    },
    /// A line of the data without a prompt.
    #[error(
        "{}: line {line}: {why}\nhint: write {{\"prompt\": ..}} or {{\"messages\": [..]}}, and other fields for rewards",
        .path.display()
    )]
    Data {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The problem.
        why: String,
    },
}

fn prompt(line: usize) -> String {
    match line {
        0 => "a prompt".to_owned(),
        line => format!("the prompt of line {line}"),
    }
}

impl From<GenerateError> for GrpoError {
    fn from(why: GenerateError) -> Self {
        Self::Generate(why.into())
    }
}

impl From<TrainError> for GrpoError {
    fn from(why: TrainError) -> Self {
        Self::Train(why.into())
    }
}

impl From<models::Error> for GrpoError {
    fn from(why: models::Error) -> Self {
        TrainError::from(why).into()
    }
}

impl From<PlanError> for GrpoError {
    fn from(why: PlanError) -> Self {
        TrainError::from(why).into()
    }
}
