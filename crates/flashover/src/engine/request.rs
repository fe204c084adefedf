//! Request and finish reason of a generation.

use super::sampling::Sampling;

/// Request of one generation.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Sampling settings.
    pub sampling: Sampling,
    /// Maximum number of new tokens; none for as many as fit in the context.
    pub max_new_tokens: Option<usize>,
    /// Ids that end the generation. They are not returned.
    pub stop_tokens: Vec<u32>,
    /// Stop sequences of a text. [`Session::generate_text`](crate::Session::generate_text) and
    /// [`Completion::text`](crate::Completion::text) end before them. [`Session::generate`](crate::Session::generate)
    /// ignores them.
    pub stop_sequences: Vec<String>,
}

/// Reason for the end of a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model sampled one of [`Request::stop_tokens`].
    Eos,
    /// The text reached one of [`Request::stop_sequences`].
    Stop,
    /// The generation reached [`Request::max_new_tokens`].
    Length,
    /// The context is full.
    Context,
    /// The callback of [`Engine::generate_each_with`](crate::Engine::generate_each_with) cancelled the generation.
    Cancelled,
}

impl Request {
    /// Returns the finish reason of a generation that returned `given` tokens, if it must end. `seen` counts the prompt
    /// too. `context` is the context length.
    pub(super) fn end(&self, given: usize, seen: usize, context: usize) -> Option<FinishReason> {
        match self.max_new_tokens {
            Some(max) if given >= max => Some(FinishReason::Length),
            // The last token is returned although nothing can follow it.
            _ => (seen > context).then_some(FinishReason::Context),
        }
    }
}
