//! What a generation is asked for, and why it ended.

use super::sampling::Sampling;

/// What one generation is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Settings of the sampler.
    pub sampling: Sampling,
    /// Tokens at most; as many as there is room for when none.
    pub max_new_tokens: Option<usize>,
    /// Tokens that end it. They are not given out.
    pub stop_tokens: Vec<u32>,
    /// Strings that end it, of a text: [`Session::generate_text`](crate::Session::generate_text) and [`Completion::text`](crate::Completion::text) do not give them out, and
    /// [`Session::generate`](crate::Session::generate) does not look for them.
    pub stop_sequences: Vec<String>,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model gave a token of [`Request::stop_tokens`].
    Eos,
    /// A string of [`Request::stop_sequences`] came up.
    Stop,
    /// As many tokens as were asked for.
    Length,
    /// The session has no more room.
    Context,
    /// Who was told of the steps of a batch had enough.
    Cancelled,
}

impl Request {
    /// Whether a generation that gave out `given` tokens is at its end: `seen` are those with the prompt's, and
    /// `room` is how many may pass.
    pub(super) fn end(&self, given: usize, seen: usize, room: usize) -> Option<FinishReason> {
        match self.max_new_tokens {
            Some(most) if given >= most => Some(FinishReason::Length),
            // The last one is given out though nothing can follow it.
            _ => (seen > room).then_some(FinishReason::Context),
        }
    }
}
