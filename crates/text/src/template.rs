use std::collections::BTreeMap;
use std::error::Error as _;
use std::fmt;
use std::path::Path;

use minijinja::machinery::{eval, get_compiled_template, make_string_output};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value as JinjaValue, merge_maps};
use minijinja::{AutoEscape, Environment, ErrorKind, context};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use time::OffsetDateTime;

use crate::Error;
use crate::folder::{json, read};
use crate::guard::{guarded, on_stack};
use crate::marks::{self, Marked, NONCE, marked, nonce};
use crate::metered;
use crate::program::checked;
use crate::python::{self, strftime};
use crate::special::FolderTokens;

/// Name of a model's only template, and of the default one of several.
const DEFAULT: &str = "default";
/// Name of the template that is used with tools, if a model has several.
const TOOL_USE: &str = "tool_use";

/// Instruction limit of a rendering, after which a template counts as endless; a long conversation takes a thousandth.
const FUEL: u64 = 30_000_000;

/// Special tokens that a folder names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SpecialTokens {
    #[serde(rename = "bos_token", skip_serializing_if = "Option::is_none")]
    pub bos: Option<String>,
    #[serde(rename = "eos_token", skip_serializing_if = "Option::is_none")]
    pub eos: Option<String>,
    #[serde(rename = "pad_token", skip_serializing_if = "Option::is_none")]
    pub pad: Option<String>,
    #[serde(rename = "unk_token", skip_serializing_if = "Option::is_none")]
    pub unk: Option<String>,
    /// Other tokens by name, such as `image_token`.
    #[serde(flatten)]
    pub more: BTreeMap<String, String>,
}

/// Chat templates of a model, and the special tokens that they use.
#[derive(Debug)]
pub struct ChatTemplate {
    templates: Environment<'static>,
    names: Vec<String>,
    /// Bytes of the longest source.
    longest: usize,
    special: SpecialTokens,
}

/// A message of a text-only conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Role, such as `system`, `user`, `assistant`.
    pub role: String,
    pub content: String,
}

/// Inputs of a chat template.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Prompt {
    /// List of objects like [`Message`]; templates may use further fields.
    pub messages: Value,
    /// Functions that the model may call, as JSON schemas.
    pub tools: Option<Value>,
    /// Documents to answer from.
    pub documents: Option<Value>,
    /// True if the prompt ends with the start of an answer.
    pub add_generation_prompt: bool,
    /// Name of the template, if there are several. By default `tool_use` if tools are given and it exists, else
    /// `default`.
    pub template: Option<String>,
    /// Further variables of this template.
    pub more: Map<String, Value>,
    /// Time for `strftime_now`; by default the current time in UTC.
    pub now: Option<OffsetDateTime>,
}

/// Contents of a template file: one template, or several by name.
#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<Named>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

#[derive(Deserialize, Default)]
struct Config {
    chat_template: Option<Templates>,
}

/// Marks an error that the template itself raised.
#[derive(Debug)]
struct Raised;

impl ChatTemplate {
    /// Reads the templates of a folder from `chat_template.jinja`, else `chat_template.json`, else
    /// `tokenizer_config.json`. `None` if no file has one.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Config`]; [`Error::Template`] for a template that cannot be parsed.
    pub fn open(folder: impl AsRef<Path>) -> Result<Option<Self>, Error> {
        let folder = folder.as_ref();
        let config: Config = json(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
        let of_file = match read(&folder.join("chat_template.jinja"))? {
            Some(template) => Some(Templates::One(template)),
            None => {
                json::<Config>(&folder.join("chat_template.json"))?.and_then(|c| c.chat_template)
            }
        };
        let special = SpecialTokens::open(folder)?;
        match of_file.or(config.chat_template) {
            Some(templates) => Self::named(templates.named(), special).map(Some),
            None => Ok(None),
        }
    }

    /// Parses a single template.
    ///
    /// # Errors
    /// [`Error::Template`].
    pub fn new(template: &str, special: SpecialTokens) -> Result<Self, Error> {
        Self::named(Templates::One(template.to_owned()).named(), special)
    }

    fn named(named: Vec<Named>, special: SpecialTokens) -> Result<Self, Error> {
        let mut templates = environment();
        let mut names = Vec::new();
        let mut longest = 0;
        for Named { name, template } in named {
            // jinja2 also converts all line ends to `\n`.
            let source = template.replace("\r\n", "\n").replace('\r', "\n");
            longest = longest.max(source.len());
            let added = on_stack(source.len(), || {
                templates.add_template_owned(name.clone(), guarded(&source, &syntax())?)
            });
            let added = added.and_then(|added| added.map_err(|why| told(&why)));
            added.map_err(|why| Error::Template { name: name.clone(), why })?;
            names.push(name);
        }
        Ok(Self { templates, names, longest, special })
    }

    /// Returns the special tokens.
    pub fn special(&self) -> &SpecialTokens {
        &self.special
    }

    /// Returns the names of the templates.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Renders the prompt; encode it without special tokens.
    ///
    /// # Errors
    /// [`Error::NoTemplate`]; [`Error::Refused`] with the template's own message; [`Error::Render`] for any
    /// other failure.
    pub fn render(&self, prompt: &Prompt) -> Result<String, Error> {
        self.rendered(prompt, prompt.now.unwrap_or_else(OffsetDateTime::now_utc), None)
    }

    /// Renders the prompt with the ranges that the template marks as written by an assistant, with
    /// `{% generation %}` and `{% endgeneration %}`.
    ///
    /// # Errors
    /// Errors of [`ChatTemplate::render`]; [`Error::Render`] if a filter changes a block, or a loop breaks within one.
    pub fn render_marked(&self, prompt: &Prompt) -> Result<Marked, Error> {
        let now = prompt.now.unwrap_or_else(OffsetDateTime::now_utc);
        let nonce = nonce();
        let text = self.rendered(prompt, now, None)?;
        let with_edges = self.rendered(prompt, now, Some(&nonce))?;
        marked(&with_edges, &nonce, text).ok_or_else(|| Error::Render {
            name: self.choice(prompt).to_owned(),
            why: "a filter or a loop changes the text of a generation block".to_owned(),
        })
    }

    /// Renders a prompt; with a nonce, edges of generation blocks are included.
    fn rendered(
        &self,
        prompt: &Prompt,
        now: OffsetDateTime,
        nonce: Option<&str>,
    ) -> Result<String, Error> {
        let name = self.choice(prompt);
        let template = self
            .templates
            .get_template(name)
            .map_err(|_| Error::NoTemplate { name: name.to_owned(), known: self.names.clone() })?;
        let rendered = on_stack(self.longest, || {
            let asked = context! {
                messages => Serde(&prompt.messages),
                tools => Serde(&prompt.tools),
                documents => Serde(&prompt.documents),
                add_generation_prompt => prompt.add_generation_prompt,
                strftime_now => JinjaValue::from_function(move |format: String| strftime(now, &format)),
            };
            let [special, more] =
                [JinjaValue::from(Serde(&self.special)), JinjaValue::from(Serde(&prompt.more))];
            let nonce = JinjaValue::from_pairs([(NONCE, JinjaValue::from(nonce))]);
            let variables = merge_maps([special, more, asked, nonce]);
            let compiled = get_compiled_template(&template);
            let program = checked(&compiled.instructions);
            let blocks = compiled.blocks.iter();
            let blocks = blocks.map(|(name, block)| (*name, checked(block))).collect();
            let mut text = String::new();
            let mut out = make_string_output(&mut text);
            eval(&self.templates, &program, variables, &blocks, &mut out, AutoEscape::None)?;
            Ok(text)
        });
        let failed = |why| Error::Render { name: name.to_owned(), why };
        rendered.map_err(failed)?.map_err(|why: minijinja::Error| {
            match why.source().is_some_and(|source| source.is::<Raised>()) {
                true => {
                    let why = why.detail().unwrap_or_default().to_owned();
                    Error::Refused { name: name.to_owned(), why }
                }
                false => failed(told(&why)),
            }
        })
    }

    fn choice<'a>(&self, prompt: &'a Prompt) -> &'a str {
        let tools = prompt.tools.is_some() && self.names.iter().any(|name| name == TOOL_USE);
        prompt.template.as_deref().unwrap_or(if tools { TOOL_USE } else { DEFAULT })
    }
}

impl SpecialTokens {
    /// Reads the special tokens that a folder's files name; empty without such files.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Config`].
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, Error> {
        let named = FolderTokens::open(folder.as_ref())?.named;
        let mut more: BTreeMap<_, _> =
            named.into_iter().map(|(name, (_, token))| (name, token.content)).collect();
        let [bos, eos, pad, unk] =
            ["bos_token", "eos_token", "pad_token", "unk_token"].map(|name| more.remove(name));
        Ok(Self { bos, eos, pad, unk, more })
    }
}

impl Prompt {
    /// Makes a prompt of messages that ends with the start of an answer.
    pub fn of(messages: &[Message]) -> Self {
        let object = |Message { role, content }: &Message| serde_json::json!({ "role": role, "content": content });
        let messages = messages.iter().map(object).collect();
        Self { messages, add_generation_prompt: true, ..Self::default() }
    }
}

impl Message {
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

impl Templates {
    fn named(self) -> Vec<Named> {
        match self {
            Self::One(template) => vec![Named { name: DEFAULT.to_owned(), template }],
            Self::Named(named) => named,
        }
    }
}

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("raised by the template")
    }
}

impl std::error::Error for Raised {}

/// Sets up Jinja as in transformers.
fn environment() -> Environment<'static> {
    let mut templates = Environment::new();
    templates.set_syntax(syntax());
    templates.set_auto_escape_callback(|_| AutoEscape::None);
    templates.set_fuel(Some(FUEL));
    python::register(&mut templates);
    metered::register(&mut templates);
    marks::register(&mut templates);
    templates.add_function(
        "raise_exception",
        |why: JinjaValue| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, why.to_string())
                .with_source(Raised))
        },
    );
    templates
}

fn syntax() -> SyntaxConfig {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    syntax.expect("usual delimiters do not clash")
}

/// Formats an error with its detail and line.
fn told(why: &minijinja::Error) -> String {
    let line = why.line().map(|line| format!(", in line {line}")).unwrap_or_default();
    let detail = why.detail().map(|detail| format!(": {detail}")).unwrap_or_default();
    format!("{}{detail}{line}", why.kind())
}
