//! `flashover generate` and `flashover chat`.

use std::io::{BufRead, IsTerminal};
use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::{anyhow, bail};
use flashover::{End, Engine, LoadError, Message, Request, Session, Workload};
use tune::timing::Stopwatch;

use crate::model_args::{
    ModelArgs, PresetArgs, SamplingArgs, TraceArgs, Tracing, all_spared, bar, standard_input,
    text_file, token, unread,
};
use crate::{guard, interrupt};

#[derive(clap::Args)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The text to go on from; without it and --tokens, standard input
    #[arg(long, allow_hyphen_values = true, conflicts_with_all = ["tokens", "prompt_file"])]
    prompt: Option<String>,
    /// A file with the text to go on from
    #[arg(long, value_name = "FILE", conflicts_with = "tokens")]
    prompt_file: Option<PathBuf>,
    /// Token ids to go on from; ids come out, too
    #[arg(long, value_delimiter = ',', value_name = "IDS", value_parser = token, conflicts_with = "stops")]
    tokens: Option<Vec<u32>>,
    /// Put the prompt into the model's chat template, as a user's message
    #[arg(long, conflicts_with = "tokens")]
    chat: bool,
    /// How many answers; they decode together
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    completions: u16,
    #[command(flatten)]
    preset: PresetArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    trace: TraceArgs,
}

#[derive(clap::Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// What the model is told before the conversation
    #[arg(long, allow_hyphen_values = true)]
    system: Option<String>,
    /// Positions that the conversation has; without it the model's, at most 8192
    #[arg(long)]
    context: Option<usize>,
    #[command(flatten)]
    preset: PresetArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// Positions that an answer has at least, before old messages are dropped.
const ROOM: usize = 64;

pub(crate) fn generate(args: &GenerateArgs) -> anyhow::Result<()> {
    let text = match (&args.prompt, &args.prompt_file, &args.tokens) {
        (Some(prompt), ..) => Some(prompt.clone()),
        (_, Some(file), _) => Some(text_file(file, "--prompt-file")?),
        (.., Some(_)) => None,
        (None, None, None) => Some(standard_input()?),
    };
    let file = args.trace.file()?;
    let folder = args.model.open()?;
    let read = || folder.files().into_iter().chain(args.prompt_file.clone());
    file.as_ref().map_or(Ok(()), |file| all_spared(read(), file))?;
    let prompt = match (&text, &args.tokens) {
        (Some(text), _) if args.chat => {
            guard::template(|| folder.encode_chat(&[Message::new("user", text)]))?
        }
        (Some(text), _) => folder.encode(text)?,
        (None, tokens) => tokens.clone().unwrap_or_default(),
    };
    folder.check(&prompt)?;
    let mut request = args.sampling.request(&folder)?;
    if text.is_none() {
        // Ids come out, of which none is a text.
        request.stops.clear();
    }
    let workload = folder.workload(&[&prompt], args.completions.into(), &request);
    let begin = Stopwatch::start();
    let engine = args.model.load(folder, args.preset.preset, workload, Some(prompt.len()))?;
    let load = begin.elapsed().as_secs_f64();
    let tracing = Tracing::start(file, &engine)?;
    let _listening = interrupt::listen()?;
    if args.completions > 1 {
        several(&engine, &prompt, args.completions, &request, text.is_some(), load)?;
    } else {
        one(&engine, &prompt, &request, text.is_some(), load)?;
    }
    tracing.finish(&engine)?;
    Ok(interrupt::check("stopped")?)
}

/// `load` is the seconds that loading took.
fn one(
    engine: &Engine,
    prompt: &[u32],
    request: &Request,
    text: bool,
    load: f64,
) -> anyhow::Result<()> {
    let mut session = engine.session(engine.room(prompt.len(), request))?;
    if text {
        let answer = write(&mut session, prompt, request)?;
        command::print("\n")?;
        command::note!("loaded in {load:.1} s; {}", answer.summary);
        return Ok(());
    }
    let begin = Stopwatch::start();
    let mut ids = Vec::new();
    let mut tokens = session.generate(prompt, request)?;
    let first = begin.elapsed().as_secs_f64();
    for token in tokens.by_ref() {
        ids.push(token?.id.to_string());
        if interrupt::came() {
            break;
        }
    }
    let end = tokens.end();
    command::print(&format!("{}\n", ids.join(",")))?;
    let summary = summary(prompt.len(), ids.len(), first, begin.elapsed().as_secs_f64(), end);
    command::note!("loaded in {load:.1} s; {summary}");
    Ok(())
}

fn several(
    engine: &Engine,
    prompt: &[u32],
    completions: u16,
    request: &Request,
    text: bool,
    load: f64,
) -> anyhow::Result<()> {
    let begin = Stopwatch::start();
    let bar = bar("{pos} tokens, {msg}")?;
    let mut ended = 0;
    let answers = engine.generate_each_with(&[(prompt, request)], completions.into(), |step| {
        bar.inc(u64::from(step.token.is_some()));
        ended += u16::from(step.end.is_some());
        bar.set_message(format!("{ended} of {completions} answers"));
        if interrupt::came() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    bar.finish_and_clear();
    let (mut all, mut shown, mut ends) = (0, String::new(), String::new());
    for (at, answer) in answers.iter().flatten().enumerate() {
        let ids: Vec<u32> = answer.tokens.iter().map(|token| token.id).collect();
        all += ids.len();
        ends += &format!("answer {at}: {} tokens; {}\n", ids.len(), reason(Some(answer.end)));
        if text {
            shown += &format!("--- {at}\n{}\n", answer.text.as_deref().unwrap_or_default());
        } else {
            let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
            shown += &format!("{}\n", ids.join(","));
        }
    }
    command::print(&shown)?;
    let seconds = begin.elapsed().as_secs_f64();
    command::note!(
        "{ends}loaded in {load:.1} s; {completions} answers to {} tokens: {all} tokens in {seconds:.2} s, {:.1} tokens/s together",
        prompt.len(),
        all as f64 / seconds
    );
    Ok(())
}

/// What was answered, and how fast.
struct Answer {
    text: String,
    summary: String,
    /// Whether the reader is still there.
    read: bool,
}

/// Writes an answer as it comes, until a signal comes or the reader has gone away.
fn write(session: &mut Session, prompt: &[u32], request: &Request) -> anyhow::Result<Answer> {
    let begin = Stopwatch::start();
    let mut pieces = session.write(prompt, request)?;
    let first = begin.elapsed().as_secs_f64();
    let (mut text, mut read) = (String::new(), true);
    for piece in pieces.by_ref() {
        let piece = piece?;
        read = command::print_on(&piece)?;
        text += &piece;
        if !read || interrupt::came() {
            break;
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    let summary = summary(prompt.len(), pieces.tokens(), first, seconds, pieces.end());
    Ok(Answer { text, summary, read })
}

/// `first` and `all` are seconds from the beginning, to the first token and to the end.
fn summary(prompt: usize, tokens: usize, first: f64, all: f64, end: Option<End>) -> String {
    let why = reason(end);
    let rate = tokens.saturating_sub(1) as f64 / (all - first).max(1e-9);
    format!(
        "{} of prompt, first token after {:.0} ms; {}, {rate:.1} tokens/s after the first; {why}",
        command::count(prompt, "token"),
        first * 1e3,
        command::count(tokens, "token")
    )
}

/// Why an answer ended.
const fn reason(end: Option<End>) -> &'static str {
    match end {
        Some(End::Eos) => "the model ended",
        Some(End::Stop) => "a stop came up",
        Some(End::Length) => "as many as asked for",
        Some(End::Context) => "the context is full",
        Some(End::Cancelled) | None => "stopped",
    }
}

pub(crate) fn chat(args: &ChatArgs) -> anyhow::Result<()> {
    let folder = args.model.open()?;
    let request = args.sampling.request(&folder)?;
    let mut messages: Vec<Message> =
        args.system.iter().map(|system| Message::new("system", system)).collect();
    let kept = messages.len();
    // Says before the weights move whether there is a template, and whether it takes a system message.
    let empty = [&messages[..], &[Message::new("user", "")]].concat();
    let least = guard::template(|| folder.encode_chat(&empty))?.len();
    let context = match args.context {
        Some(context) => context,
        None => folder.room(0, &Request { max_new_tokens: None, ..request.clone() }),
    };
    if least >= context {
        bail!(
            "an empty message takes {least} positions, of {context}\nhint: a shorter --system, or a larger --context"
        );
    }
    let engine = args.model.load(folder, args.preset.preset, Workload::new(1, context), None);
    let engine = engine.map_err(|why| {
        match why.downcast_ref::<LoadError>().and_then(LoadError::context) {
            Some(most) => anyhow!(
                "a context of {context}, where the model has {most} positions\nhint: --context {most}, or less"
            ),
            None => why,
        }
    })?;
    let mut session = engine.session(context)?;
    let terminal = std::io::stdin().is_terminal();
    let mut unanswered = 0;
    loop {
        if terminal {
            command::print("> ")?;
        }
        let mut line = String::new();
        if std::io::stdin().lock().read_line(&mut line).map_err(|why| unread(&why))? == 0 {
            // Who types has seen it.
            if unanswered > 0 && !terminal {
                let messages = command::count(unanswered, "message");
                bail!("{messages} had no answer\nhint: shorter ones, or a larger --context");
            }
            return Ok(());
        }
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        messages.push(Message::new("user", line));
        let mut all = guard::template(|| engine.encode_chat(&messages))?;
        if all.len() > context {
            // Without what there is to forget.
            let alone = [&messages[..kept], &messages[messages.len() - 1..]].concat();
            let need = guard::template(|| engine.encode_chat(&alone))?.len();
            if need > context {
                command::note!("the message is dropped: it takes {need} positions, of {context}");
                messages.pop();
                unanswered += 1;
                continue;
            }
        }
        let mut dropped = 0;
        while all.len() + ROOM > context && messages.len() > kept + 1 {
            // A question with its answer: many templates refuse roles that do not take turns.
            messages.drain(kept..kept + 2);
            dropped += 2;
            all = guard::template(|| engine.encode_chat(&messages))?;
        }
        if dropped > 0 {
            command::note!(
                "the conversation outgrew {context} positions: its first {dropped} messages are dropped"
            );
        }
        // What passed before is kept, unless the template writes it in another way now.
        let new = match all.strip_prefix(session.tokens()) {
            Some(new) if !new.is_empty() => new,
            _ => {
                session.clear();
                &all[..]
            }
        };
        let listening = interrupt::listen()?;
        let answer = write(&mut session, new, &request)?;
        if !answer.read || !command::print_on("\n")? {
            return Ok(());
        }
        command::note!("{}", answer.summary);
        // Ctrl-C ends an answer; where nothing is written it ends the program.
        interrupt::forget();
        interrupt::check("stopped")?;
        drop(listening);
        messages.push(Message::new("assistant", answer.text));
    }
}
