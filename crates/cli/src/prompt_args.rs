//! Arguments that give a prompt and sample its completion.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{anyhow, bail};
use flashover::{ModelFolder, Request};

/// A prompt as text.
#[derive(clap::Args)]
pub(crate) struct PromptArgs {
    /// Text [default: standard input]
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with_all = ["tokens", "prompt_file"])]
    pub(crate) prompt: Option<String>,
    /// Read the text from a UTF-8 file
    #[arg(long, value_name = "FILE", conflicts_with = "tokens")]
    pub(crate) prompt_file: Option<PathBuf>,
}

impl PromptArgs {
    /// Returns the text. Without one, reads standard input, and says on a terminal that it waits.
    pub(crate) fn text(&self) -> anyhow::Result<String> {
        match (&self.prompt, &self.prompt_file) {
            (Some(prompt), _) => Ok(prompt.clone()),
            (None, Some(file)) => text_file(file, "--prompt-file"),
            (None, None) => {
                if io::stdin().is_terminal() {
                    command::note!(
                        "reading the text from the terminal; Ctrl-D on an empty line ends it"
                    );
                }
                standard_input()
            }
        }
    }
}

/// Sampling options. They override generation_config.json.
#[derive(clap::Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Always take the most likely token, like --temperature 0
    #[arg(long)]
    greedy: bool,
    /// Sampling temperature; 0 always takes the most likely token [default: from generation_config.json, else 0]
    #[arg(long, allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Number of most likely tokens to sample from; 0 means all [default: from generation_config.json]
    #[arg(long, allow_negative_numbers = true, value_parser = whole::<usize>)]
    top_k: Option<usize>,
    /// Total probability of the most likely tokens to sample from; 1 means all [default: from generation_config.json]
    #[arg(long, allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Minimum probability of a token relative to the most likely one; 0 means no limit [default: from
    /// generation_config.json]
    #[arg(long, allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Penalty for tokens that already occurred; 1 means none [default: from generation_config.json]
    #[arg(long, allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,
    /// Random seed; the same seed gives the same tokens
    #[arg(long, default_value_t = 0, allow_negative_numbers = true, value_parser = whole::<u64>)]
    seed: u64,
    /// Maximum tokens to generate [default: from generation_config.json, else up to the model's context, but at most
    /// 8192 tokens in total, or prompt + 1024 if that is more]
    #[arg(long, allow_negative_numbers = true, value_parser = whole::<usize>)]
    max_new_tokens: Option<usize>,
    /// Stop sequence, instead of those in generation_config.json; may be repeated
    #[arg(long = "stop", value_name = "TEXT", allow_hyphen_values = true)]
    stops: Vec<String>,
    /// Continue after end-of-sequence tokens
    #[arg(long)]
    ignore_eos: bool,
}

impl SamplingArgs {
    /// Returns the request of generation_config.json with the options of the command line.
    pub(crate) fn request(&self, of: &ModelFolder) -> anyhow::Result<Request> {
        let mut request = of.request();
        let sampling = &mut request.sampling;
        let temperature = self.temperature.unwrap_or(sampling.temperature);
        if let (true, Some(other)) = (self.greedy, self.temperature.filter(|own| *own != 0.0)) {
            bail!(
                "--greedy is temperature 0, but --temperature is {other}\nhint: leave out one of them"
            );
        }
        sampling.temperature = if self.greedy { 0.0 } else { temperature };
        sampling.top_k = self.top_k.unwrap_or(sampling.top_k);
        sampling.top_p = self.top_p.unwrap_or(sampling.top_p);
        sampling.min_p = self.min_p.unwrap_or(sampling.min_p);
        sampling.repetition_penalty =
            self.repetition_penalty.unwrap_or(sampling.repetition_penalty);
        sampling.seed = self.seed;
        let given = [
            // Values that keep only the most likely token, or all tokens, do not conflict with temperature 0.
            ("--top-k", self.top_k.is_some_and(|k| k > 1)),
            ("--top-p", self.top_p.is_some_and(|p| p != 1.0)),
            ("--min-p", self.min_p.is_some_and(|p| p != 0.0)),
        ];
        if let (true, Some((name, _))) =
            (sampling.temperature == 0.0, given.iter().find(|(_, given)| *given))
        {
            bail!("{name} has no effect at temperature 0\nhint: add --temperature 1 to sample");
        }
        sampling.check()?;
        request.max_new_tokens = self.max_new_tokens.or(request.max_new_tokens);
        if !self.stops.is_empty() {
            request.stop_sequences.clone_from(&self.stops);
        }
        if self.ignore_eos {
            request.stop_tokens.clear();
        }
        Ok(request)
    }
}

/// Reads all text of standard input.
fn standard_input() -> anyhow::Result<String> {
    text_of(io::stdin()).map_err(|why| unread(&why))
}

/// Reads the text file that is the value of `flag`.
pub(crate) fn text_file(file: &Path, flag: &str) -> anyhow::Result<String> {
    File::open(file).and_then(text_of).map_err(|why| {
        anyhow!("cannot read {}: {why}\nhint: set {flag} to a text file in UTF-8", file.display())
    })
}

/// Maximum size of a text in bytes. Such a text has more tokens than the context of any model.
const TEXT_BYTES: u64 = 64 << 20;

/// Reads all of a text. The size limit ends endless inputs such as `/dev/zero`.
fn text_of(from: impl Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    from.take(TEXT_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > TEXT_BYTES {
        return Err(io::Error::other(format!("the text is larger than {} MiB", TEXT_BYTES >> 20)));
    }
    let text =
        String::from_utf8(bytes).map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))?;
    // Some editors begin a file with a mark.
    Ok(text.strip_prefix('\u{feff}').map_or(text.clone(), str::to_owned))
}

/// Returns the error for standard input that is not readable text.
pub(crate) fn unread(why: &io::Error) -> anyhow::Error {
    anyhow!("cannot read standard input: {why}\nhint: pipe UTF-8 text into it")
}

fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("expected an integer, got `{text}`\nhint: use 0 or more"))
}

/// Parses a token id. Spaces around it are allowed.
pub(crate) fn token(text: &str) -> Result<u32, String> {
    let bad = || format!("expected a token id, got `{text}`\nhint: write a list such as 1,2,3");
    text.trim().parse().map_err(|_| bad())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_does_not_end_is_refused() {
        let refused = |why: io::Result<String>| why.expect_err("no text").to_string();
        assert_eq!(refused(text_of(io::repeat(b'x'))), "the text is larger than 64 MiB");
        // The limit cuts a character.
        let long = io::repeat(b'x').take(TEXT_BYTES).chain("\u{2581}".as_bytes());
        assert_eq!(refused(text_of(long)), "the text is larger than 64 MiB");
        assert!(refused(text_of(&[0xc3][..])).contains("utf-8"));
        assert_eq!(text_of("\u{2581}x".as_bytes()).ok().as_deref(), Some("\u{2581}x"));
        let max = text_of(io::repeat(b'x').take(TEXT_BYTES));
        assert_eq!(max.map(|text| text.len() as u64).ok(), Some(TEXT_BYTES));
    }
}
