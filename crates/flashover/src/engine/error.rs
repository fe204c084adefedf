//! Errors of a generation.

use std::path::PathBuf;

use crate::device_error::DeviceError;
use crate::memory::PlanError;

/// Error of a generation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// Tokens or positions do not fit the model, or the device does not run an op.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// The chat template is broken, or the template or the tokenizer refuses messages, text, tokens or stops.
    #[error(transparent)]
    Text(#[from] ::text::Error),
    /// The sequences do not fit in memory.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The device failed, or had less free memory than planned.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The model's folder has no tokenizer, which text needs.
    #[error("{} has no tokenizer.json\nhint: give token ids instead of text", .0.display())]
    NoTokenizer(PathBuf),
    /// The model's folder has no chat template.
    #[error(
        "{} has no chat template\nhint: use a plain prompt instead of messages (to train: prompt and completion), or put \
         a chat_template.jinja into the folder", .0.display()
    )]
    NoTemplate(PathBuf),
    /// A message of a conversation does not fit its context.
    #[error(
        "expected a message of at most {context} tokens, got {need}\nhint: use a shorter message or system message, \
         or a longer context"
    )]
    MessageTooLong {
        /// Tokens of the message, with the system message and the template.
        need: usize,
        /// Context length of the conversation in tokens.
        context: usize,
    },
    /// The prompt has no tokens.
    #[error(
        "expected a prompt of at least one token, got none\nhint: use the BOS token for an empty text"
    )]
    EmptyPrompt,
    /// A sampling setting is out of range.
    #[error("{name} is {value}\nhint: use a number {range}")]
    Sampling {
        /// Name of the setting.
        name: &'static str,
        /// The value given.
        value: f32,
        /// The valid range, after "a number".
        range: &'static str,
    },
    /// The logits hold no token to sample.
    #[error(
        "expected finite logits after {position} tokens, got NaN or infinity\nhint: use bf16 or f32 instead of f16, \
         which ends at 65504, and a repetition penalty near 1; otherwise the weights hold NaN"
    )]
    NotFinite {
        /// Number of tokens before these logits.
        position: usize,
    },
    /// A trainer changed the weights after the session's keys and values were computed.
    #[error(
        "the session is of version {session} of the weights, and a training step made version {weights}\nhint: start a new \
         session after a step"
    )]
    Stale {
        /// Version of the session.
        session: u64,
        /// Version of the weights.
        weights: u64,
    },
    /// A profile was started during another recording.
    #[error(transparent)]
    Recording(#[from] trace::AlreadyRecording),
}

impl GenerateError {
    /// Returns true if a smaller batch or a shorter context might fit.
    pub const fn is_memory(&self) -> bool {
        match self {
            Self::Plan(why) => why.is_memory(),
            Self::Device(why) => matches!(why, DeviceError::OutOfMemory { .. }),
            _ => false,
        }
    }
}
