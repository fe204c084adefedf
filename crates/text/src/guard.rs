//! Bounds of the source of a chat template.
//!
//! minijinja compiles, prints, compares and drops by recursion, and a stack that overflows ends the process. Its own
//! limits hold for brackets (150) and calls (500), not for chains of operators or for values. So:
//!
//! ```text
//! source   at most MAX_SOURCE bytes: each level of a chain or of a literal takes one of them
//! tag      at most MAX_TAG tokens
//! name     at most MAX_NAME bytes
//! block    at most MAX_BLOCKS of them
//! a * b    becomes a * unfolded_one * b: the compiler multiplies literals, whatever comes of it
//! ```
//!
//! With this and the checks of [`crate::program`] no chain and no value is deeper than the source is long, which the
//! stack of [`on_stack`] is made for.

use std::ops::Range;
use std::thread;

use minijinja::Error;
use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;

use crate::marks;
use crate::panics::caught;
use crate::program::ONE;
use crate::steps::refused;

/// Bytes of a template; the largest that trl ships has 20 thousand.
const MAX_SOURCE: usize = 128 << 10;

/// Tokens of a tag, since the time to compile a chain is the square of its length.
const MAX_TAG: usize = 8192;

/// Bytes of a name, which each instruction that has it compares.
const MAX_NAME: usize = 256;

/// Blocks, which each call of a macro puts aside.
const MAX_BLOCKS: usize = 64;

/// Bytes of stack for a template of no length, and for each byte of one. In a release build `tests/it/deep.rs`
/// overflows 1 MiB and 128 bytes for each, and passes with 512.
const STACK: usize = 8 << 20;
const STACK_PER_BYTE: usize = 3 << 10;

/// Runs what handles a template on a stack that it cannot overflow.
pub(crate) fn on_stack<T: Send>(
    source: usize,
    call: impl FnOnce() -> T + Send,
) -> Result<T, String> {
    let size = STACK + STACK_PER_BYTE * source.min(MAX_SOURCE);
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(size).spawn_scoped(scope, || caught(call));
        let thread = thread.map_err(|why| format!("its thread cannot start: {why}"))?;
        thread.join().expect("its panics are caught")
    })
}

/// A template's source with the edges of generation blocks in it, and with products that the compiler leaves to the
/// program. What minijinja cannot read stays as it is, for its parser to tell.
pub(crate) fn guarded(source: &str, syntax: &SyntaxConfig) -> Result<String, Error> {
    if source.len() > MAX_SOURCE {
        return Err(refused(format!(
            "it has {} bytes, at most {MAX_SOURCE} are read",
            source.len()
        )));
    }
    let tokens = tokenize(source, false, syntax.clone()).map_while(Result::ok);
    let tokens: Vec<_> = tokens
        .map(|(token, span)| (token, span.start_offset as usize..span.end_offset as usize))
        .collect();
    let ends = |(token, _): &(Token, _)| matches!(token, Token::BlockEnd | Token::VariableEnd);
    let mut edits: Vec<(Range<usize>, String)> = Vec::new();
    let mut blocks = 0;
    for tag in tokens.split_inclusive(ends) {
        if tag.len() > MAX_TAG {
            return Err(refused(format!(
                "a tag has {} tokens, at most {MAX_TAG} are read",
                tag.len()
            )));
        }
        let long =
            |(token, _): &(Token, _)| matches!(token, Token::Ident(name) if name.len() > MAX_NAME);
        if tag.iter().any(long) {
            return Err(refused(format!("a name has over {MAX_NAME} bytes")));
        }
        if let Some(pair) = tag.windows(2).find(|pair| {
            matches!(pair[1].0, Token::Ident("self")) && !matches!(pair[0].0, Token::Dot)
        }) {
            return Err(unsupported(&source[pair[1].1.clone()]));
        }
        for pair in tag.windows(2).filter(|pair| matches!(pair[1].0, Token::Mul)) {
            // Others are in front of the arguments of a call.
            if !matches!(pair[0].0, Token::ParenOpen | Token::Comma) {
                let end = pair[1].1.end;
                edits.push((end..end, format!(" {ONE} *")));
            }
        }
        let start = tag.iter().position(|(token, _)| matches!(token, Token::BlockStart));
        match start.map(|start| &tag[start + 1..]) {
            Some([(Token::Ident(word @ ("include" | "import" | "from" | "extends")), _), ..]) => {
                return Err(unsupported(word));
            }
            Some(
                [(Token::Ident(word @ ("generation" | "endgeneration")), at), (Token::BlockEnd, _)],
            ) => {
                edits.push((at.clone(), marks::tags(word)));
            }
            Some(
                [
                    (Token::Ident("block"), _),
                    ..,
                    (Token::Ident(word @ "required"), _),
                    (Token::BlockEnd, _),
                ],
            ) => {
                return Err(unsupported(word));
            }
            Some([(Token::Ident("block"), _), ..]) => blocks += 1,
            _ => {}
        }
    }
    if blocks > MAX_BLOCKS {
        return Err(refused(format!("it has {blocks} blocks, at most {MAX_BLOCKS} are read")));
    }
    let mut out = String::with_capacity(source.len());
    let mut copied = 0;
    for (range, text) in edits {
        out.push_str(&source[copied..range.start]);
        out.push_str(&text);
        copied = range.end;
    }
    out.push_str(&source[copied..]);
    Ok(out)
}

fn unsupported(word: &str) -> Error {
    refused(format!("`{word}` is not supported"))
}
