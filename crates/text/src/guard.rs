//! Bounds of what a chat template may nest.
//!
//! minijinja compiles, prints, compares and drops by recursion, and a stack that overflows ends the process. Its own
//! limits hold for brackets (150) and calls (500), not for chains of operators or for values. So:
//!
//! ```text
//! source             at most MAX_SOURCE bytes: each level of a chain or of a literal takes one of them
//! tag                at most MAX_TAG tokens
//! {% set ns.a = x %} becomes {% set ns.a = (x) | flat %}: only a namespace carries values from turn to turn
//! {% for x in y %}   becomes {% for x in (y) | loopable %}: jinja2 loops over no none
//! {% macro m(a) %}   gets {% set a = a | shallow %}: a recursive macro carries its arguments
//! {% for %}, {% with %}, {% set %}   get the same in a template with a recursive loop
//! ```
//!
//! Both filters return their value, and refuse one that is nested deeper than MAX_DEPTH; `flat` also refuses one with
//! a namespace, so that no value holds itself. With this no chain and no value is deeper than the source is long, which
//! the stack of [`on_stack`] is made for.

use std::ops::Range;
use std::thread;

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};

use crate::marks;
use crate::panics::caught;

/// Bytes of a template; the largest that trl ships has 20 thousand.
const MAX_SOURCE: usize = 128 << 10;

/// Tokens of a tag, since the time to compile a chain is the square of its length.
const MAX_TAG: usize = 8192;

/// Levels of a value that outlives a turn of a loop or a call of a macro.
const MAX_DEPTH: usize = 256;

/// Values that the checks of one rendering visit.
const MAX_VISITS: usize = 100_000_000;

/// Bytes of stack for a template of no length, and for each byte of one. In a release build `tests/it/deep.rs`
/// overflows 1 MiB and 128 bytes for each, and passes with 512.
const STACK: usize = 8 << 20;
const STACK_PER_BYTE: usize = 3 << 10;

/// Values visited in this rendering.
#[derive(Default)]
struct Visits(usize);

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

/// Registers the filters that [`guarded`] uses.
pub(crate) fn register(templates: &mut Environment) {
    templates.add_filter("flat", |state: &mut State, value: Value| bounded(state, value, true));
    templates.add_filter("shallow", |state: &mut State, value: Value| bounded(state, value, false));
}

/// A template's source with the checks and the edges of generation blocks in it. What minijinja cannot read stays as it
/// is, for its parser to tell.
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
    let tags: Vec<_> = tokens.split_inclusive(ends).collect();
    let recursive = tags.iter().any(|tag| matches!(tag, [.., (Token::Ident("recursive"), _), _]));
    let mut edits: Vec<(Range<usize>, String)> = Vec::new();
    for tag in tags {
        if tag.len() > MAX_TAG {
            return Err(refused(format!(
                "a tag has {} tokens, at most {MAX_TAG} are read",
                tag.len()
            )));
        }
        if let Some(pair) = tag.windows(2).find(|pair| {
            matches!(pair[1].0, Token::Ident("self")) && !matches!(pair[0].0, Token::Dot)
        }) {
            return Err(unsupported(&source[pair[1].1.clone()]));
        }
        let start = tag.iter().position(|(token, _)| matches!(token, Token::BlockStart));
        if let Some(start) = start {
            edit(source, &tag[start + 1..], recursive, &mut edits)?;
        }
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

/// The edits of one tag, given from its first word to its end.
fn edit(
    source: &str,
    tag: &[(Token, Range<usize>)],
    recursive: bool,
    edits: &mut Vec<(Range<usize>, String)>,
) -> Result<(), Error> {
    let [(Token::Ident(word), at), rest @ .., (Token::BlockEnd, end)] = tag else { return Ok(()) };
    let assign = outside(rest, |token| matches!(token, Token::Assign));
    let in_target = |at: usize| assign.is_none_or(|assign| at < assign);
    let dotted =
        |(at, (token, _)): (usize, &(Token, _))| in_target(at) && matches!(token, Token::Dot);
    if *word == "for" {
        let at = |word| outside(rest, |token| matches!(token, Token::Ident(name) if *name == word));
        let ends = at("if").or(at("recursive")).map_or(end.start, |at| rest[at].1.start);
        if let Some(start) = at("in").map(|at| rest[at].1.end).filter(|start| *start < ends) {
            edits.push((start..start, " (".to_owned()));
            edits.push((ends..ends, ") | loopable ".to_owned()));
        }
    }
    let names = match *word {
        "include" | "import" | "from" | "extends" => return Err(unsupported(word)),
        "generation" | "endgeneration" if rest.is_empty() => {
            edits.push((at.clone(), marks::tags(word)));
            return Ok(());
        }
        "set" if rest.iter().enumerate().any(dotted) => {
            let piped = rest.iter().any(|(token, _)| matches!(token, Token::Pipe));
            match assign {
                Some(assign) if assign + 1 < rest.len() => {
                    let after = rest[assign].1.end;
                    edits.push((after..after, " (".to_owned()));
                    edits.push((end.start..end.start, ") | flat ".to_owned()));
                }
                None if piped => edits.push((end.start..end.start, " | flat ".to_owned())),
                _ => {}
            }
            return Ok(());
        }
        "macro" => assigned(rest, 1),
        "call" if matches!(rest, [(Token::ParenOpen, _), ..]) => assigned(rest, 1),
        "with" if recursive => assigned(rest, 0),
        "for" if recursive => targets(rest, |token| matches!(token, Token::Ident("in"))),
        "set" if recursive && assign.is_some() => {
            targets(rest, |token| matches!(token, Token::Assign))
        }
        _ => return Ok(()),
    };
    if !names.is_empty() {
        let checks = names.iter().map(|name| format!("{{% set {name} = {name} | shallow %}}"));
        let checks: String = checks.collect();
        // The last of the tags trims what the one that was there trims.
        let marked = &source[end.clone()];
        let checks = format!("%}}{}{marked}", checks.trim_end_matches("%}"));
        edits.push((end.clone(), checks));
    }
    Ok(())
}

/// The first of such tokens that is in no brackets.
fn outside(tag: &[(Token, Range<usize>)], is: impl Fn(&Token) -> bool) -> Option<usize> {
    let mut depth = 0usize;
    tag.iter().position(|(token, _)| {
        depth = deepened(depth, token);
        depth == 0 && is(token)
    })
}

/// The depth in brackets after a token.
fn deepened(depth: usize, token: &Token) -> usize {
    match token {
        Token::ParenOpen | Token::BracketOpen | Token::BraceOpen => depth + 1,
        Token::ParenClose | Token::BracketClose | Token::BraceClose => depth.saturating_sub(1),
        _ => depth,
    }
}

/// Names that a tag assigns within so many brackets.
fn assigned<'a>(tag: &[(Token<'a>, Range<usize>)], within: usize) -> Vec<&'a str> {
    let (mut depth, mut starts, mut names) = (0usize, within == 0, Vec::new());
    for (token, _) in tag {
        depth = deepened(depth, token);
        match token {
            // The arguments of a macro or a caller are the first pair of brackets.
            Token::ParenClose if within > 0 && depth == 0 => break,
            Token::Ident(name) if starts && depth == within => names.push(*name),
            _ => {}
        }
        starts = matches!(token, Token::Comma | Token::ParenOpen);
    }
    names
}

/// Names that come before the end of a target.
fn targets<'a>(tag: &[(Token<'a>, Range<usize>)], ends: impl Fn(&Token) -> bool) -> Vec<&'a str> {
    let target = tag.iter().take_while(|(token, _)| !ends(token));
    let name = |(token, _): &(Token<'a>, _)| match token {
        Token::Ident(name) => Some(*name),
        _ => None,
    };
    target.filter_map(name).collect()
}

/// The value, where it may outlive a turn or a call. Iterables are lists then, since they may hold others unseen.
fn bounded(state: &mut State, value: Value, flat: bool) -> Result<Value, Error> {
    let visits = state.get_or_insert_extension(Visits::default());
    Ok(settled(&value, MAX_DEPTH, flat, visits)?.unwrap_or(value))
}

/// Replacement of a value; none if it may stay.
fn settled(
    value: &Value,
    levels: usize,
    flat: bool,
    visits: &mut Visits,
) -> Result<Option<Value>, Error> {
    visits.0 += 1;
    if visits.0 > MAX_VISITS {
        return Err(refused("its namespaces hold too much".to_owned()));
    }
    let Some(object) = value.as_object() else { return Ok(None) };
    let kind = object.type_name();
    if flat && (kind.ends_with("::Namespace") || kind.ends_with("::Loop")) {
        return Err(refused("a namespace in a namespace is not supported".to_owned()));
    }
    let Some(levels) = levels.checked_sub(1) else {
        return Err(refused(format!("a value is nested deeper than {MAX_DEPTH}")));
    };
    // Views of other values, which may be views again.
    let view = value.kind() == ValueKind::Iterable || kind.contains("::Merge");
    let mut changed = view;
    let mut settle = |item: Value| -> Result<Value, Error> {
        let new = settled(&item, levels, flat, visits)?;
        changed |= new.is_some();
        Ok(new.unwrap_or(item))
    };
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Result<Vec<_>, Error> =
                value.try_iter()?.checked().map(|item| settle(item?)).collect();
            let items = items?;
            Ok(changed.then(|| match value.is_tuple() {
                true => Value::from(Tuple::from(items)),
                false => Value::from(items),
            }))
        }
        ValueKind::Map => {
            let pairs: Result<Vec<_>, Error> = value
                .try_iter()?
                .checked()
                .map(|key| {
                    let key = key?;
                    let item = settle(value.get_item(&key)?)?;
                    Ok((key, item))
                })
                .collect();
            let pairs = pairs?;
            Ok(changed.then(|| Value::from_pairs(pairs)))
        }
        _ => Ok(None),
    }
}

fn unsupported(word: &str) -> Error {
    refused(format!("`{word}` is not supported"))
}

fn refused(why: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}
