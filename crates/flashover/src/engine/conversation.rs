//! A conversation with its messages and its KV cache.

use text::Message;

use super::{Engine, FinishReason, GenerateError, Request, Session, TextStream};

/// Minimum number of tokens for an answer; below it, old messages are dropped.
const ANSWER: usize = 64;

/// Messages of a conversation and the KV cache of their tokens. Each answer prefills only the new tokens.
#[derive(Debug)]
pub struct Conversation {
    session: Session,
    request: Request,
    messages: Vec<Message>,
    /// Number of messages at the start that are never dropped: the system message.
    kept: usize,
}

/// An answer in progress: an iterator over pieces of text. Dropping it ends the answer, and its text so far becomes a
/// message of the conversation.
#[derive(Debug)]
pub struct Answer<'c> {
    stream: TextStream<&'c mut Session>,
    messages: &'c mut Vec<Message>,
    text: String,
    prompt_tokens: usize,
    dropped: usize,
}

impl Engine {
    /// Starts a conversation with a KV cache of `context` tokens. None takes [`Engine::context_length`] of a request
    /// without a limit. `system` is the system message. `request` sets sampling and length of each answer.
    ///
    /// # Errors
    /// The errors of [`Engine::encode_chat`] and [`Engine::session`]; [`GenerateError::MessageTooLong`] if an empty
    /// message fills the context.
    pub fn conversation(
        &self,
        system: Option<&str>,
        context: Option<usize>,
        request: Request,
    ) -> Result<Conversation, GenerateError> {
        let messages: Vec<Message> =
            system.into_iter().map(|system| Message::new("system", system)).collect();
        let empty = [&messages[..], &[Message::new("user", "")]].concat();
        let need = self.encode_chat(&empty)?.len();
        let endless = Request { max_new_tokens: None, ..request.clone() };
        let context = context.unwrap_or_else(|| self.context_length(0, &endless));
        if need >= context {
            return Err(GenerateError::MessageTooLong { need, context });
        }
        let (session, kept) = (self.session(context)?, messages.len());
        Ok(Conversation { session, request, messages, kept })
    }
}

impl Conversation {
    /// Returns the messages so far, without dropped messages.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Returns the length of the KV cache in tokens.
    pub fn context(&self) -> usize {
        self.session.context()
    }

    /// Sends a user's message and returns the answer as a stream. Drops the oldest pairs of messages while fewer than
    /// 64 tokens are left for the answer.
    ///
    /// # Errors
    /// [`GenerateError::MessageTooLong`] if the message alone does not fit; the errors of [`Session::generate_text`]
    /// and [`Engine::encode_chat`]. After an error the message is not part of the conversation.
    pub fn send(&mut self, message: &str) -> Result<Answer<'_>, GenerateError> {
        let (engine, context) = (self.session.engine().clone(), self.session.context());
        let mut messages = [&self.messages[..], &[Message::new("user", message)]].concat();
        let mut all = engine.encode_chat(&messages)?;
        if all.len() > context {
            let alone = [&messages[..self.kept], &messages[messages.len() - 1..]].concat();
            let need = engine.encode_chat(&alone)?.len();
            if need > context {
                return Err(GenerateError::MessageTooLong { need, context });
            }
        }
        let mut dropped = 0;
        while all.len() + ANSWER > context && messages.len() > self.kept + 1 {
            // Drops a question together with its answer: many templates require alternating roles.
            messages.drain(self.kept..self.kept + 2);
            dropped += 2;
            all = engine.encode_chat(&messages)?;
        }
        // Keeps the KV cache of earlier tokens unless the template renders them differently now.
        let new = match all.strip_prefix(self.session.tokens()) {
            Some(new) if !new.is_empty() => new,
            _ => {
                self.session.clear();
                &all[..]
            }
        };
        let stream = TextStream::start(&mut self.session, new, &self.request)?;
        self.messages = messages;
        let (messages, prompt_tokens) = (&mut self.messages, new.len());
        Ok(Answer { stream, messages, text: String::new(), prompt_tokens, dropped })
    }
}

impl Answer<'_> {
    /// Returns the text so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the number of messages dropped for this answer.
    pub fn dropped_messages(&self) -> usize {
        self.dropped
    }

    /// Returns the number of tokens prefilled for this answer.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Returns the number of tokens of the answer so far.
    pub fn tokens(&self) -> usize {
        self.stream.tokens()
    }

    /// Returns the reason for the end of the answer; none before the end.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.stream.finish_reason()
    }
}

impl Iterator for Answer<'_> {
    type Item = Result<String, GenerateError>;

    fn next(&mut self) -> Option<Self::Item> {
        let piece = self.stream.next()?;
        if let Ok(piece) = &piece {
            self.text.push_str(piece);
        }
        Some(piece)
    }
}

impl Drop for Answer<'_> {
    fn drop(&mut self) {
        self.messages.push(Message::new("assistant", self.text.as_str()));
    }
}
