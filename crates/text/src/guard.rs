//! Limits on the source of a chat template.
//!
//! minijinja compiles, prints, compares and drops recursively, and a stack overflow ends the process. Its own limits
//! cover brackets (150) and calls (500), but not chains of operators and not values. Therefore:
//!
//! ```text
//! source   at most MAX_SOURCE bytes: each level of a chain or of a literal takes at least one
//! tag      at most MAX_TAG tokens
//! name     at most MAX_NAME bytes
//! block    at most MAX_BLOCKS per template
//! a * b    becomes a * unfolded_one * b: the compiler would multiply literals of any size
//! ```
//!
//! With these limits and the checks of [`crate::program`], no chain or value is nested deeper than the source has
//! bytes. [`on_stack`] sizes the stack for that.

use std::ops::Range;
use std::thread;

use minijinja::Error;
use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;

use crate::marks;
use crate::panics::caught;
use crate::program::ONE;
use crate::steps::refused;

/// Largest template in bytes; the largest one of trl has 20 thousand.
const MAX_SOURCE: usize = 128 << 10;

/// Most tokens of a tag: the time to compile a chain is quadratic in its length.
const MAX_TAG: usize = 8192;

/// Most bytes of a name: each instruction that uses a name compares it.
const MAX_NAME: usize = 256;

/// Most blocks of a template: each call of a macro saves them all.
const MAX_BLOCKS: usize = 64;

/// Base size of the stack, and bytes of stack per byte of the template. In a release build `tests/it/deep.rs` overflows
/// with 1 MiB plus 128 bytes per byte, and passes with 512.
const STACK: usize = 8 << 20;
const STACK_PER_BYTE: usize = 3 << 10;

/// Runs `call` on a thread whose stack is large enough for a template of `source` bytes.
pub(crate) fn on_stack<T: Send>(
    source: usize,
    call: impl FnOnce() -> T + Send,
) -> Result<T, String> {
    let size = STACK + STACK_PER_BYTE * source.min(MAX_SOURCE);
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(size).spawn_scoped(scope, || caught(call));
        let thread = thread.map_err(|why| format!("cannot start its thread: {why}"))?;
        thread.join().expect("its panics are caught")
    })
}

/// Checks a template's source, and returns it with edges of generation blocks and with multiplications that the
/// compiler cannot evaluate. Invalid source is left unchanged, so that minijinja's parser reports it.
pub(crate) fn guarded(source: &str, syntax: &SyntaxConfig) -> Result<String, Error> {
    if source.len() > MAX_SOURCE {
        return Err(refused(format!(
            "it has {} bytes, expected at most {MAX_SOURCE}",
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
                "a tag has {} tokens, expected at most {MAX_TAG}",
                tag.len()
            )));
        }
        let long =
            |(token, _): &(Token, _)| matches!(token, Token::Ident(name) if name.len() > MAX_NAME);
        if tag.iter().any(long) {
            return Err(refused(format!("a name has more than {MAX_NAME} bytes")));
        }
        if let Some(pair) = tag.windows(2).find(|pair| {
            matches!(pair[1].0, Token::Ident("self")) && !matches!(pair[0].0, Token::Dot)
        }) {
            return Err(unsupported(&source[pair[1].1.clone()]));
        }
        for pair in tag.windows(2).filter(|pair| matches!(pair[1].0, Token::Mul)) {
            // Otherwise the `*` unpacks arguments of a call.
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
        return Err(refused(format!("it has {blocks} blocks, expected at most {MAX_BLOCKS}")));
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
