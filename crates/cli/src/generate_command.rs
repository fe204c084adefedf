//! `flashover generate` and `flashover chat`.

use std::io::{BufRead, IsTerminal};
use std::ops::ControlFlow;

use anyhow::{anyhow, bail};
use flashover::memory::Workload;
use flashover::{Engine, FinishReason, GenerateError, LoadError, Message, Request};
use tune::timing::Stopwatch;

use crate::interrupt;
use crate::model_args::{ModelArgs, PresetArgs, TraceArgs, Tracing, all_spared, bar};
use crate::prompt_args::{PromptArgs, SamplingArgs, token, unread};

#[derive(clap::Args)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    prompt: PromptArgs,
    /// Prompt as comma-separated token ids; the output is token ids too
    #[arg(long, value_delimiter = ',', value_name = "IDS", value_parser = token, conflicts_with = "stops")]
    tokens: Option<Vec<u32>>,
    /// Format the prompt with the model's chat template, as a user message
    #[arg(long, conflicts_with = "tokens")]
    chat: bool,
    /// Do not print the prompt before the completion (it is printed on terminals only)
    #[arg(long)]
    no_echo: bool,
    /// Number of completions, generated as one batch
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    completions: u16,
    #[command(flatten)]
    preset: PresetArgs,
    #[command(flatten)]
    trace: TraceArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    model: ModelArgs,
}

#[derive(clap::Args)]
pub(crate) struct ChatArgs {
    /// System message at the start of the conversation
    #[arg(long, allow_hyphen_values = true)]
    system: Option<String>,
    /// Context length of the conversation in tokens [default: that of the model, at most 8192]
    #[arg(long, short)]
    context: Option<usize>,
    #[command(flatten)]
    preset: PresetArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    model: ModelArgs,
}

pub(crate) fn generate(args: &GenerateArgs) -> anyhow::Result<()> {
    let text = match args.tokens {
        Some(_) => None,
        None => Some(args.prompt.text()?),
    };
    let file = args.trace.file()?;
    let folder = args.model.open()?;
    let read = || folder.files().into_iter().chain(args.prompt.prompt_file.clone());
    file.as_ref().map_or(Ok(()), |file| all_spared(read(), file))?;
    let prompt = match (&text, &args.tokens) {
        (Some(text), _) if args.chat => folder.encode_chat(&[Message::new("user", text)])?,
        (Some(text), _) => folder.encode(text)?,
        (None, tokens) => tokens.clone().unwrap_or_default(),
    };
    folder.check(&prompt)?;
    let mut request = args.sampling.request(&folder)?;
    if text.is_none() {
        // The output is token ids, and stop sequences apply to text only.
        request.stop_sequences.clear();
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
        let echoed = !args.no_echo && !args.chat && std::io::stdout().is_terminal();
        if let Some(text) = text.as_ref().filter(|_| echoed) {
            command::print(text)?;
        }
        one(&engine, &prompt, &request, text.is_some(), load)?;
    }
    tracing.finish(&engine)?;
    Ok(interrupt::check("stopped")?)
}

/// Generates and prints one completion. `load` is the load time in seconds.
fn one(
    engine: &Engine,
    prompt: &[u32],
    request: &Request,
    text: bool,
    load: f64,
) -> anyhow::Result<()> {
    let mut session = engine.session(engine.context_length(prompt.len(), request))?;
    if text {
        let begin = Stopwatch::start();
        let mut pieces = session.generate_text(prompt, request)?;
        let first = begin.elapsed().as_secs_f64();
        print_pieces(pieces.by_ref())?;
        let seconds = begin.elapsed().as_secs_f64();
        command::print("\n")?;
        let (tokens, end) = (pieces.tokens(), pieces.finish_reason());
        command::note!(
            "loaded in {load:.1} s; {}",
            summary(prompt.len(), tokens, first, seconds, end)
        );
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
    let end = tokens.finish_reason();
    command::print(&format!("{}\n", ids.join(",")))?;
    let summary = summary(prompt.len(), ids.len(), first, begin.elapsed().as_secs_f64(), end);
    command::note!("loaded in {load:.1} s; {summary}");
    Ok(())
}

/// Generates several completions as one batch and prints them. `load` is the load time in seconds.
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
        ended += u16::from(step.finish_reason.is_some());
        bar.set_message(format!("{ended} of {completions} completions"));
        if interrupt::came() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    bar.finish_and_clear();
    let (mut all, mut shown, mut ends) = (0, String::new(), String::new());
    for (at, answer) in answers.iter().flatten().enumerate() {
        let ids: Vec<u32> = answer.tokens.iter().map(|token| token.id).collect();
        all += ids.len();
        ends += &format!(
            "completion {at}: {} tokens; {}\n",
            ids.len(),
            reason(Some(answer.finish_reason))
        );
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
        "{ends}loaded in {load:.1} s; {completions} completions of a prompt of {} tokens: {all} tokens in {seconds:.2} s, {:.1} tokens/s in total",
        prompt.len(),
        all as f64 / seconds
    );
    Ok(())
}

/// Prints each piece as soon as it is generated, until a signal arrives or the reader closes the pipe. Returns false if
/// the pipe is closed.
fn print_pieces(
    pieces: impl Iterator<Item = Result<String, GenerateError>>,
) -> anyhow::Result<bool> {
    for piece in pieces {
        if !command::print_on(&piece?)? {
            return Ok(false);
        }
        if interrupt::came() {
            break;
        }
    }
    Ok(true)
}

/// Formats token counts and speed. `first` and `all` are the seconds from the start to the first token and to the end.
fn summary(
    prompt: usize,
    tokens: usize,
    first: f64,
    all: f64,
    end: Option<FinishReason>,
) -> String {
    let why = reason(end);
    let rate = tokens.saturating_sub(1) as f64 / (all - first).max(1e-9);
    format!(
        "prompt of {}, first token after {:.0} ms; {} generated, {rate:.1} tokens/s in decode; {why}",
        command::count(prompt, "token"),
        first * 1e3,
        command::count(tokens, "token")
    )
}

/// Describes why a completion ended.
const fn reason(end: Option<FinishReason>) -> &'static str {
    match end {
        Some(FinishReason::Eos) => "end-of-sequence token",
        Some(FinishReason::Stop) => "stop sequence",
        Some(FinishReason::Length) => "max_new_tokens reached",
        Some(FinishReason::Context) => "context full",
        Some(FinishReason::Cancelled) | None => "stopped",
    }
}

pub(crate) fn chat(args: &ChatArgs) -> anyhow::Result<()> {
    let folder = args.model.open()?;
    let request = args.sampling.request(&folder)?;
    // Reports a missing or broken template before the weights are loaded.
    let system = args.system.iter().map(|system| Message::new("system", system));
    let empty: Vec<Message> = system.chain([Message::new("user", "")]).collect();
    let need = folder.encode_chat(&empty)?.len();
    let endless = Request { max_new_tokens: None, ..request.clone() };
    let context = args.context.unwrap_or_else(|| folder.context_length(0, &endless));
    if need >= context {
        return Err(GenerateError::MessageTooLong { need, context }.into());
    }
    let engine = args.model.load(folder, args.preset.preset, Workload::new(1, context), None);
    let engine = engine.map_err(|why| {
        match why.downcast_ref::<LoadError>().and_then(LoadError::context) {
            Some(max) => anyhow!(
                "expected a context of at most {max} tokens, got {context}\nhint: use --context {max} or less"
            ),
            None => why,
        }
    })?;
    let mut conversation = engine.conversation(args.system.as_deref(), Some(context), request)?;
    let terminal = std::io::stdin().is_terminal();
    let mut unanswered = 0;
    loop {
        if terminal {
            command::print("> ")?;
        }
        let mut line = String::new();
        if std::io::stdin().lock().read_line(&mut line).map_err(|why| unread(&why))? == 0 {
            // A user at a terminal has seen the note for each dropped message.
            if unanswered > 0 && !terminal {
                let messages = command::count(unanswered, "message");
                bail!(
                    "{messages} dropped because of the context length\nhint: send shorter messages or use a larger --context"
                );
            }
            return Ok(());
        }
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        let listening = interrupt::listen()?;
        let begin = Stopwatch::start();
        let mut answer = match conversation.send(line) {
            Err(GenerateError::MessageTooLong { need, context }) => {
                command::note!(
                    "warning: message dropped: it takes {need} tokens, and the context has {context}"
                );
                unanswered += 1;
                continue;
            }
            sent => sent?,
        };
        let first = begin.elapsed().as_secs_f64();
        if answer.dropped_messages() > 0 {
            command::note!(
                "note: the conversation exceeds the context of {context} tokens, its first {} messages are dropped",
                answer.dropped_messages()
            );
        }
        if !print_pieces(answer.by_ref())? || !command::print_on("\n")? {
            return Ok(());
        }
        let seconds = begin.elapsed().as_secs_f64();
        let (prompt, tokens) = (answer.prompt_tokens(), answer.tokens());
        command::note!("{}", summary(prompt, tokens, first, seconds, answer.finish_reason()));
        drop(answer);
        // Ctrl-C ends a completion; between completions it ends the program.
        interrupt::forget();
        interrupt::check("stopped")?;
        drop(listening);
    }
}
