//! Python features that chat templates use: `tojson`, `strftime_now`, and tests and filters with none and undefined.

use std::io;

use minijinja::value::{Kwargs, Rest, StringInput, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, filters};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};
use time::OffsetDateTime;
use time::format_description::parse_strftime_borrowed;

/// Registers tests that differ from minijinja's: in jinja2 undefined values are iterable.
pub(crate) fn register(templates: &mut Environment) {
    templates.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    templates.add_test("sequence", |value: &Value| {
        let kinds = [ValueKind::Seq, ValueKind::Iterable, ValueKind::Map, ValueKind::String];
        value.is_undefined() || kinds.contains(&value.kind())
    });
    templates.add_test("callable", |value: &Value| {
        value.is_undefined() || value.kind() == ValueKind::Plain
    });
}

/// Returns filters that differ from minijinja's: in Python none is not iterable, and in jinja2 undefined is.
pub(crate) fn filters() -> Vec<(&'static str, Value)> {
    let length = Value::from_function(|value: &Value| filters::length(&emptied(value)));
    vec![
        ("tojson", Value::from_function(tojson)),
        ("length", length.clone()),
        ("count", length),
        ("first", Value::from_function(|value: &Value| filters::first(&emptied(value)))),
        ("last", Value::from_function(|value: &Value| filters::last(listed(value)))),
        (
            "reverse",
            Value::from_function(|value: &Value| match value.as_str() {
                Some(text) => Ok(Value::from(text.chars().rev().collect::<String>())),
                None => filters::reverse(&loopable(&listed(value))?),
            }),
        ),
        ("escape", Value::from_function(escape)),
        ("e", Value::from_function(escape)),
        (
            "list",
            Value::from_function(|state: &State, value: &Value| {
                filters::list(state, loopable(value)?)
            }),
        ),
        ("join", Value::from_function(join)),
        (
            "items",
            Value::from_function(|value: &Value| match value.is_undefined() {
                true => Ok(emptied(value)),
                false => filters::items(value),
            }),
        ),
        (
            "int",
            Value::from_function(|state: &State, value: &Value, args: Rest<Value>| {
                number(value, &args, Value::from(0), |value, (default, base, more)| {
                    // Infinity and NaN are no integers.
                    let float = value.as_str().and_then(|text| text.parse::<f64>().ok());
                    match float.or_else(|| f64::try_from(value.clone()).ok()) {
                        Some(float) if !float.is_finite() => {
                            Err(Error::from(ErrorKind::InvalidOperation))
                        }
                        _ => filters::int(state, value, default, base, more),
                    }
                })
            }),
        ),
        (
            "float",
            Value::from_function(|state: &State, value: &Value, args: Rest<Value>| {
                number(value, &args, Value::from(0.0), |value, (default, _, more)| {
                    filters::float(state, value, default, more)
                })
            }),
        ),
    ]
}

/// Returns a value for a loop; an error for none. A string becomes the list of its characters, so that the loop knows its
/// length.
pub(crate) fn loopable(value: &Value) -> Result<Value, Error> {
    match value.as_str() {
        _ if value.is_none() => {
            Err(Error::new(ErrorKind::InvalidOperation, "none is not iterable"))
        }
        Some(text) => Ok(text.chars().map(|c| Value::from(c.to_string())).collect()),
        None => Ok(value.clone()),
    }
}

/// Replaces an undefined value by an empty list.
fn emptied(value: &Value) -> Value {
    match value.is_undefined() {
        true => Value::from(Vec::<Value>::new()),
        false => value.clone(),
    }
}

/// Replaces an undefined value by an empty list, and a map by its keys.
fn listed(value: &Value) -> Value {
    match (value.kind(), value.try_iter()) {
        (ValueKind::Map, Ok(keys)) => keys.collect(),
        _ => emptied(value),
    }
}

/// The builtin filter `join`, except that none is an error instead of an empty list.
fn join(
    state: &mut State,
    value: &Value,
    between: Option<StringInput>,
    attribute: Option<&str>,
    more: Kwargs,
) -> Result<Value, Error> {
    filters::join(state, &loopable(value)?, between, attribute, more)
}

/// Converts to a number; returns the filter's default on failure, as for none.
fn number(
    value: &Value,
    args: &[Value],
    usual: Value,
    filter: impl FnOnce(&Value, (Option<Value>, Option<u32>, Kwargs)) -> Result<Value, Error>,
) -> Result<Value, Error> {
    if value.is_undefined() {
        return Err(Error::from(ErrorKind::UndefinedError));
    }
    // Python ignores white space around a number, and underscores between its digits.
    let value = value.as_str().map_or(value.clone(), |text| Value::from(joined(text.trim())));
    let args: (Option<Value>, Option<u32>, Kwargs) = from_args(args)?;
    let named: Option<Value> = args.2.get("default")?;
    let default = args.0.clone().or(named).unwrap_or(usual);
    Ok(filter(&value, args).unwrap_or(default))
}

/// Removes the underscores between digits.
fn joined(number: &str) -> String {
    let bytes = number.as_bytes();
    let digit = |at: Option<usize>| at.and_then(|at| bytes.get(at)).is_some_and(u8::is_ascii_digit);
    let keeps =
        |(at, c): &(usize, char)| *c != '_' || !digit(at.checked_sub(1)) || !digit(Some(at + 1));
    number.char_indices().filter(keeps).map(|(_, c)| c).collect()
}

/// Escapes a text for HTML, like MarkupSafe.
fn escape(value: &Value) -> Value {
    if value.is_safe() {
        return value.clone();
    }
    let mut text = String::new();
    for c in value.to_string().chars() {
        match c {
            '&' => text.push_str("&amp;"),
            '<' => text.push_str("&lt;"),
            '>' => text.push_str("&gt;"),
            '"' => text.push_str("&#34;"),
            '\'' => text.push_str("&#39;"),
            other => text.push(other),
        }
    }
    Value::from_safe_string(text)
}

/// Returns a float as Python's `repr` writes it: the fewest digits that give it back, with an exponent below 1e-4 and from
/// 1e16 on.
pub(crate) fn float(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() {
            "nan"
        } else if value > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .to_owned();
    }
    let short = format!("{value:e}");
    let (digits, exponent) = short.split_once('e').expect("the format has an exponent");
    match exponent.parse::<i32>().expect("it is a number") {
        exponent if value != 0.0 && !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{value:?}"),
    }
}

/// Formats like `json.dumps` without `ensure_ascii`, as transformers' `tojson` does.
fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    if options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false) {
        return Err(refused("tojson with ensure_ascii"));
    }
    let sorted: bool = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let mut value = json(value)?;
    if sorted {
        value.sort_all_objects();
    }
    let mut bytes = Vec::new();
    let formatter = Dumps { indent, depth: 0, filled: false };
    let mut serializer = Serializer::with_formatter(&mut bytes, formatter);
    value.serialize(&mut serializer).map_err(|why| refused(&why.to_string()))?;
    String::from_utf8(bytes).map_err(|why| refused(&why.to_string()))
}

/// Converts a value to JSON; an undefined value is an error.
fn json(value: &Value) -> Result<serde_json::Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Err(Error::from(ErrorKind::UndefinedError)),
        ValueKind::Seq | ValueKind::Iterable => {
            value.try_iter()?.checked().map(|item| json(&item?)).collect()
        }
        ValueKind::Map => {
            let pair = |key: Result<Value, Error>| {
                let key = key?;
                let name = match json(&key)? {
                    serde_json::Value::String(name) => name,
                    name => name.to_string(),
                };
                Ok((name, json(&value.get_item(&key)?)?))
            };
            let pairs: Result<_, Error> = value.try_iter()?.checked().map(pair).collect();
            Ok(serde_json::Value::Object(pairs?))
        }
        _ => serde_json::to_value(value).map_err(|why| refused(&why.to_string())),
    }
}

/// Formatter with Python's separators and floats: a space after each colon, and after each comma if lines are not indented.
struct Dumps {
    indent: Option<usize>,
    depth: usize,
    /// True if the innermost array or object has a value.
    filled: bool,
}

impl Dumps {
    fn line<W: io::Write + ?Sized>(&self, writer: &mut W) -> io::Result<()> {
        match self.indent {
            Some(indent) => write!(writer, "\n{}", " ".repeat(indent * self.depth)),
            None => Ok(()),
        }
    }

    fn open<W: io::Write + ?Sized>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.filled = false;
        writer.write_all(bracket)
    }

    fn close<W: io::Write + ?Sized>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.filled {
            self.line(writer)?;
        }
        self.filled = true;
        writer.write_all(bracket)
    }

    fn next<W: io::Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        let comma: &[u8] = if self.indent.is_some() { b"," } else { b", " };
        writer.write_all(if first { b"" } else { comma })?;
        self.line(writer)
    }
}

impl Formatter for Dumps {
    fn write_f64<W: io::Write + ?Sized>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(float(value).as_bytes())
    }

    fn begin_array<W: io::Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: io::Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(writer, first)
    }

    fn end_array_value<W: io::Write + ?Sized>(&mut self, _writer: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }

    fn begin_object<W: io::Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: io::Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object_value<W: io::Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }

    fn end_object_value<W: io::Write + ?Sized>(&mut self, _writer: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }
}

/// Formats a time with the codes of C's `strftime` in the C locale.
pub(crate) fn strftime(now: OffsetDateTime, format: &str) -> Result<String, Error> {
    let not = || refused(&format!("strftime_now of {format:?}"));
    let items = parse_strftime_borrowed(format).map_err(|_| not())?;
    now.format(&items).map_err(|_| not())
}

/// Returns the error for a feature that Python has and we do not support.
fn refused(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("{what} is not supported"))
}

#[cfg(test)]
mod tests {
    use time::{Date, Month, Time};

    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (value, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (-1.25e-7, "-1.25e-07"),
            (123_456_789.25, "123456789.25"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
            (f64::NAN, "nan"),
        ] {
            assert_eq!(float(value), text);
        }
    }

    #[test]
    fn times_are_written_as_c_writes_them() {
        let date = Date::from_calendar_date(2026, Month::March, 7).expect("a date");
        let at = |hour| date.with_time(Time::from_hms(hour, 5, 9).expect("a time")).assume_utc();
        for (hour, format, text) in [
            (0, "%d %b %Y", "07 Mar 2026"),
            (13, "%A, %B %-d, %y at %I:%M:%S %p", "Saturday, March 7, 26 at 01:05:09 PM"),
            (0, "%a %j %-j %-m %H %-I %p 100%%", "Sat 066 66 3 00 12 AM 100%"),
            (12, "%I %p %Y-%m-%d", "12 PM 2026-03-07"),
        ] {
            assert_eq!(strftime(at(hour), format).expect(format), text);
        }
        for format in ["%Q", "%", "%-"] {
            let error = strftime(at(0), format).expect_err("no code");
            assert!(error.to_string().contains("is not supported"), "{error}");
        }
    }
}
