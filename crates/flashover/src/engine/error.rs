//! What can be wrong with a generation.

use std::path::PathBuf;

use crate::device_error::DeviceError;
use crate::memory::PlanError;

/// Why a model does not answer.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// Tokens or positions that do not fit the model, or an op that the device does not run.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// A chat template that cannot be read, or text, tokens or stops that it or the tokenizer does not take.
    #[error(transparent)]
    Text(#[from] ::text::Error),
    /// The sequences do not fit the device or the budget.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The device failed, or had less memory than was planned.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Text needs a tokenizer, which this folder does not have.
    #[error("{} has no tokenizer.json\nhint: give tokens in place of text", .0.display())]
    NoTokenizer(PathBuf),
    /// A chat needs a template, which this folder does not have.
    #[error(
        "{} has no chat template\nhint: a plain prompt, or prompt and completion to train on; or put a \
         chat_template.jinja into the folder", .0.display()
    )]
    NoTemplate(PathBuf),
    /// A message of a conversation that does not fit its context.
    #[error(
        "the message takes {need} tokens, but the conversation has room for {context}\nhint: a shorter message or system \
         message, or a longer context"
    )]
    MessageTooLong {
        /// Tokens of the message, with the system message and the template around them.
        need: usize,
        /// Tokens that the conversation has room for.
        context: usize,
    },
    /// There is no token to go on from.
    #[error("a prompt has no tokens\nhint: at least one, such as the model's first token")]
    EmptyPrompt,
    /// A setting of sampling out of its range.
    #[error("{name} is {value}\nhint: a number {range}")]
    Sampling {
        /// Which setting.
        name: &'static str,
        /// As it was given.
        value: f32,
        /// What it may be, after "a number".
        range: &'static str,
    },
    /// Logits that no token can be sampled from.
    #[error(
        "after {position} tokens the logits hold NaN, or no finite largest\nhint: f32 and bf16 reach further than f16, \
         which ends at 65504; penalties far from 1 reach far, too; where neither is so, the weights hold NaN"
    )]
    NotFinite {
        /// Tokens before them.
        position: usize,
    },
    /// A profile was asked for while something else records.
    #[error(transparent)]
    Recording(#[from] trace::AlreadyRecording),
}

impl GenerateError {
    /// Whether less would have fitted: a smaller batch, or a shorter context.
    pub const fn is_memory(&self) -> bool {
        match self {
            Self::Plan(why) => why.is_memory(),
            Self::Device(why) => matches!(why, DeviceError::OutOfMemory { .. }),
            _ => false,
        }
    }
}
