//! Fields of a JSON object; every error names the file, the field and the value.

use std::borrow::Cow;
use std::fs;
use std::path::Path;

use fancy_regex::{Captures, Regex};
use serde_json::{Map, Value};

use crate::{Error, Fault};

/// Fields of an object, or of a section within one.
#[derive(Debug, Clone)]
pub(crate) struct Fields<'a> {
    file: &'static str,
    /// `section.` for a section, otherwise empty.
    prefix: String,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(file: &'static str, value: &'a Value) -> Result<Self, Error> {
        match value {
            Value::Object(map) => Ok(Self { file, prefix: String::new(), map }),
            _ => Err(Error::NotAnObject { file }),
        }
    }

    /// True if the object lacks the field. A null field is present: it overrides a family's default.
    pub(crate) fn absent(&self, field: &str) -> bool {
        !self.map.contains_key(field)
    }

    /// Returns the field's value; none for null.
    pub(crate) fn value(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// Returns the names of the fields that are present and not null.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'a str> {
        let there = |(_, value): &(&String, &Value)| !value.is_null();
        self.map.iter().filter(there).map(|(name, _)| name.as_str())
    }

    /// Reads a field; none if it is absent or null. `read` returns none for a value that is not `expected`.
    pub(crate) fn optional<T>(
        &self,
        field: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.value(field) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.malformed(field, expected))
    }

    pub(crate) fn optional_size(&self, field: &str) -> Result<Option<usize>, Error> {
        self.optional(field, "an integer from 1 to 2147483647", |value| {
            let size = i32::try_from(value.as_u64()?).ok()?;
            usize::try_from(size).ok().filter(|&size| size > 0)
        })
    }

    pub(crate) fn size(&self, field: &str) -> Result<usize, Error> {
        self.optional_size(field)?.ok_or_else(|| self.missing(field))
    }

    /// Reads a number of layers, at most 10000, because each layer takes memory before any tensor is read.
    pub(crate) fn layers(&self, field: &str) -> Result<usize, Error> {
        self.optional_count(field, 10_000)?.ok_or_else(|| self.missing(field))
    }

    /// Reads a number from 1 to `most`.
    pub(crate) fn optional_count(&self, field: &str, most: usize) -> Result<Option<usize>, Error> {
        self.optional(field, &format!("an integer from 1 to {most}"), |value| {
            usize::try_from(value.as_u64()?).ok().filter(|count| (1..=most).contains(count))
        })
    }

    /// Reads a finite number above 0.
    pub(crate) fn optional_positive(&self, field: &str) -> Result<Option<f64>, Error> {
        self.optional(field, "a number above 0", |value| {
            value.as_f64().filter(|number| number.is_finite() && *number > 0.0)
        })
    }

    /// Reads a number that is above 0 and finite in f32, such as the epsilon of a norm.
    pub(crate) fn optional_eps(&self, field: &str) -> Result<Option<f64>, Error> {
        self.optional(field, "a number above 0 in the range of f32", |value| {
            value.as_f64().filter(|number| {
                let rounded = *number as f32;
                rounded > 0.0 && rounded.is_finite()
            })
        })
    }

    pub(crate) fn eps(&self, field: &str) -> Result<f64, Error> {
        self.optional_eps(field)?.ok_or_else(|| self.missing(field))
    }

    pub(crate) fn positive(&self, field: &str) -> Result<f64, Error> {
        self.optional_positive(field)?.ok_or_else(|| self.missing(field))
    }

    pub(crate) fn flag(&self, field: &str) -> Result<Option<bool>, Error> {
        self.optional(field, "true or false", Value::as_bool)
    }

    pub(crate) fn text(&self, field: &str) -> Result<Option<&'a str>, Error> {
        self.optional(field, "a string", Value::as_str)
    }

    pub(crate) fn list(&self, field: &str) -> Result<Option<&'a Vec<Value>>, Error> {
        self.optional(field, "a list", Value::as_array)
    }

    /// Reads the object of a field.
    pub(crate) fn section(&self, field: &str) -> Result<Option<Self>, Error> {
        let map = self.optional(field, "an object", Value::as_object)?;
        Ok(map.map(|map| Self { map, prefix: format!("{}{field}.", self.prefix), ..*self }))
    }

    /// Returns an error for a field with any value except `neutral` ones, which mean the same as its absence.
    pub(crate) fn only(&self, field: &str, neutral: &[Value]) -> Result<(), Error> {
        match self.value(field) {
            Some(value) if !neutral.iter().any(|same| equal(same, value)) => {
                let known: Vec<_> = neutral.iter().map(Value::to_string).collect();
                Err(self.unsupported(field, &known.join(", ")))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn missing(&self, field: &str) -> Error {
        self.fault(field, Fault::Missing)
    }

    /// Returns the error of a file that lacks a field because it is of another `kind` of model.
    pub(crate) fn other_kind(&self, field: &str, kind: &'static str) -> Error {
        self.fault(field, Fault::OtherKind(kind))
    }

    pub(crate) fn malformed(&self, field: &str, expected: &str) -> Error {
        let value = self.value(field).cloned().unwrap_or_default();
        self.fault(field, Fault::Malformed { value, expected: expected.into() })
    }

    pub(crate) fn unsupported(&self, field: &str, known: &str) -> Error {
        let value = self.value(field).cloned().unwrap_or_default();
        self.fault(field, Fault::Unsupported { value, known: known.into() })
    }

    /// Returns the error of two fields that contradict each other; `other` is a full name.
    pub(crate) fn contradiction(
        &self,
        field: &str,
        other: impl Into<String>,
        other_value: impl Into<Value>,
    ) -> Error {
        let value = self.value(field).cloned().unwrap_or_default();
        let (other, other_value) = (other.into(), other_value.into());
        self.fault(field, Fault::Contradiction { value, other, other_value })
    }

    /// Returns an error unless the size is a multiple of the divisor.
    pub(crate) fn divides(
        &self,
        (field, value): (&'static str, usize),
        (divisor_field, divisor): (&'static str, usize),
    ) -> Result<(), Error> {
        if value.is_multiple_of(divisor) {
            return Ok(());
        }
        Err(self.fault(field, Fault::NotMultiple { value, divisor_field, divisor }))
    }

    pub(crate) fn unknown_model_type(&self, value: &str, known: String) -> Error {
        Error::UnknownModelType { file: self.file, value: value.into(), known }
    }

    fn fault(&self, field: &str, fault: Fault) -> Error {
        Error::Field { file: self.file, field: self.name(field), fault: Box::new(fault) }
    }

    /// Returns the full name of a field.
    pub(crate) fn name(&self, field: &str) -> String {
        format!("{}{field}", self.prefix)
    }
}

/// Reads the text of a file.
pub(crate) fn read(path: &Path) -> Result<String, Error> {
    let text = checkpoint::ends(path).and_then(|()| fs::read_to_string(path));
    text.map_err(|why| Error::Read { path: path.to_owned(), why })
}

/// Parses the JSON of a file. Python also writes `NaN`, `Infinity` and `-Infinity`. They become strings,
/// which every numeric field rejects.
pub(crate) fn json(file: &'static str, text: &str) -> Result<Value, Error> {
    let read = |text: &str| serde_json::from_str(text);
    read(text).or_else(|why| read(&quoted(text)).map_err(|_| Error::Json { file, why }))
}

/// Quotes Python's names of numbers that JSON lacks; strings stay.
fn quoted(text: &str) -> Cow<'_, str> {
    let names = Regex::new(r#""(?:\\.|[^"\\])*"|(-?Infinity|NaN)"#).expect("it is tested");
    let quoted = |own: &Captures<'_>| match own.get(1) {
        Some(name) => format!("\"{}\"", name.as_str()),
        None => own[0].to_owned(),
    };
    names.replace_all(text, quoted)
}

/// Compares numbers by value: 1 equals 1.0.
fn equal(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(
        value: &Value,
        test: impl Fn(&Fields<'_>) -> Result<(), Error>,
        message: Option<&str>,
    ) {
        let fields = Fields::new("x.json", value).expect("an object");
        let have = test(&fields).err().map(|error| error.to_string());
        assert_eq!(have.as_deref(), message);
    }

    #[test]
    fn refusals_name_file_field_and_value() {
        let value = json!({ "a": -1, "b": { "c": "x" }, "d": null, "e": 1.5 });
        let size = "x.json: `a` is -1, expected an integer from 1 to 2147483647";
        check(&value, |f| f.size("a").map(drop), Some(size));
        check(&value, |f| f.size("d").map(drop), Some("x.json: `d` is missing"));
        check(&value, |f| f.optional_size("d").map(drop), None);
        check(&value, |f| f.positive("e").map(drop), None);
        check(&value, |f| f.only("e", &[json!(1.5)]), None);
        let only = "x.json: `e` is 1.5, which is not supported; expected 1, null";
        check(&value, |f| f.only("e", &[json!(1), Value::Null]), Some(only));
        check(
            &value,
            |f| {
                let section = f.section("b")?.expect("an object");
                section.positive("c").map(drop)
            },
            Some("x.json: `b.c` is \"x\", expected a number above 0"),
        );
    }

    #[test]
    fn words_of_python_are_no_numbers() {
        let text = r#"{"a": Infinity, "b\\": [-Infinity, NaN], "c": "NaN \" Infinity", "d": 1}"#;
        let value = json("x.json", text).expect("Python reads it");
        let same =
            json!({"a": "Infinity", "b\\": ["-Infinity", "NaN"], "c": "NaN \" Infinity", "d": 1});
        assert_eq!(value, same);
        let error = "x.json: `a` is \"Infinity\", expected a number above 0";
        check(&value, |f| f.positive("a").map(drop), Some(error));
        assert!(json("x.json", r#"{"a": Nan}"#).is_err());
    }

    #[test]
    fn what_is_no_object_has_no_fields() {
        let error = Fields::new("x.json", &json!([1])).expect_err("a list");
        assert_eq!(error.to_string(), "x.json is not a JSON object");
    }
}
