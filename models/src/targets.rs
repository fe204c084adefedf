//! Modules that an `adapter_config.json` selects, by PEFT's rules (`check_target_module_exists` of PEFT 0.21).

use fancy_regex::Regex;
use serde_json::Value;

use crate::Error;
use crate::fields::Fields;

/// Modules that PEFT adapts in a decoder if `target_modules` is null; Phi-3 has none.
const DEFAULT: [&str; 3] = ["q_proj", "v_proj", "c_attn"];

/// Selected modules of a model.
pub(crate) struct Targets {
    modules: Names,
    excluded: Names,
    /// Layers in which a name without its path selects modules; none for all.
    layers: Option<Vec<usize>>,
    /// Names of the list of layers in a module's path; empty for any.
    lists: Vec<Regex>,
}

enum Names {
    /// All matrices of the layers.
    Linear,
    /// Full names, or their ends after a dot.
    Listed(Vec<String>),
    /// Expression that matches full names.
    Pattern(Box<Regex>),
}

impl Targets {
    pub(crate) fn read(fields: &Fields<'_>) -> Result<Self, Error> {
        let number = |value: &Value| usize::try_from(value.as_u64()?).ok();
        let layers = fields.optional(
            "layers_to_transform",
            "a layer or a list of them",
            |value| match value.as_array() {
                Some(list) => list.iter().map(number).collect(),
                None => Some(vec![number(value)?]),
            },
        )?;
        let lists = fields.optional("layers_pattern", "a pattern or a list of them", |value| {
            let one = std::slice::from_ref(value);
            let all = value.as_array().map_or(one, Vec::as_slice).iter();
            all.map(|own| Some(own.as_str()?).filter(|own| !own.is_empty()))
                .collect::<Option<Vec<_>>>()
        });
        let lists = lists?.unwrap_or_default().into_iter().map(|list| {
            pattern(&format!(r"(?:.*\.)?(?:{list})\.\d+\..*"))
                .ok_or_else(|| fields.malformed("layers_pattern", "regular expressions"))
        });
        let default = Names::Listed(DEFAULT.map(str::to_owned).to_vec());
        Ok(Self {
            modules: Names::read(fields, "target_modules")?.unwrap_or(default),
            excluded: Names::read(fields, "exclude_modules")?.unwrap_or(Names::Listed(Vec::new())),
            layers: layers.filter(|layers: &Vec<usize>| !layers.is_empty()),
            lists: lists.collect::<Result<_, _>>()?,
        })
    }

    /// Returns true if the adapter has factors for a module. `layer` is none outside of the layers.
    pub(crate) fn selects(&self, name: &str, layer: Option<usize>) -> bool {
        if self.excluded.contains(name, layer) {
            return false;
        }
        // As in PEFT, a full name or a pattern selects modules of all layers.
        let everywhere = match &self.modules {
            Names::Listed(names) => names.iter().any(|own| own == name),
            Names::Linear | Names::Pattern(_) => true,
        };
        let here = || {
            let Some(layers) = &self.layers else { return true };
            layer.is_some_and(|layer| layers.contains(&layer))
                && (self.lists.is_empty() || self.lists.iter().any(|list| matches(list, name)))
        };
        self.modules.contains(name, layer) && (everywhere || here())
    }
}

impl Names {
    fn read(fields: &Fields<'_>, field: &str) -> Result<Option<Self>, Error> {
        fields.optional(field, "a list of names or a regular expression", |value| match value {
            Value::String(text) if text == "all-linear" => Some(Self::Linear),
            Value::String(text) => Some(Self::Pattern(Box::new(pattern(text)?))),
            value => {
                let names = value.as_array()?.iter();
                Some(Self::Listed(
                    names.map(|name| name.as_str().map(str::to_owned)).collect::<Option<_>>()?,
                ))
            }
        })
    }

    fn contains(&self, name: &str, layer: Option<usize>) -> bool {
        match self {
            Self::Linear => layer.is_some(),
            Self::Listed(names) => names.iter().any(|own| {
                name.strip_suffix(own.as_str())
                    .is_some_and(|path| path.is_empty() || path.ends_with('.'))
            }),
            Self::Pattern(pattern) => matches(pattern, name),
        }
    }
}

/// Compiles an expression that matches a whole name; none if it is invalid.
fn pattern(text: &str) -> Option<Regex> {
    Regex::new(&format!(r"\A(?:{text})\z")).ok()
}

/// Returns false also for a pattern that takes too many steps.
fn matches(pattern: &Regex, name: &str) -> bool {
    pattern.is_match(name).unwrap_or(false)
}
