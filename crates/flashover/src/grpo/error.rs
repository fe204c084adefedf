//! Errors of GRPO.

use std::path::PathBuf;

use super::rewards::RewardError;
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
        "the prompt of line {line} has {tokens} tokens, and {room} are left of the context of {context} by completions\nhint: use \
         a shorter prompt or fewer --max-new-tokens"
    )]
    Prompt {
        /// Line of the prompt in its file.
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
        "no completion of the step has a reward; the first fault: prompt of line {line}: {why}"
    )]
    NoReward {
        /// Line of the prompt.
        line: usize,
        /// Its fault.
        why: RewardError,
    },
    /// A reward command does not start.
    #[error("cannot start `{command}`: {why}\nhint: check the command of --reward")]
    Command {
        /// The command.
        command: String,
        /// The error of the system.
        why: std::io::Error,
    },
    /// A description of a reward that is none.
    #[error(
        "expected a reward, got `{0}`\nhint: use exact, regex:PATTERN, length:TOKENS, json or cmd:COMMAND"
    )]
    Reward(String),
    /// A line of the data is no prompt.
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
