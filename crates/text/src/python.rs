//! What chat templates expect of Python: `tojson` and `strftime_now`.

use std::io;

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use time::OffsetDateTime;
use time::format_description::parse_strftime_borrowed;

/// `json.dumps` without `ensure_ascii`, which is what transformers gives templates as `tojson`.
pub(crate) fn tojson(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    if options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false) {
        return Err(refused("tojson with ensure_ascii"));
    }
    let sorted: bool = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let mut value = serde_json::to_value(&value).map_err(|why| refused(&why.to_string()))?;
    if sorted {
        value.sort_all_objects();
    }
    match indent {
        Some(indent) => dumped(&value, PrettyFormatter::with_indent(" ".repeat(indent).as_bytes())),
        None => dumped(&value, OneLine),
    }
}

fn dumped(value: &serde_json::Value, formatter: impl Formatter) -> Result<String, Error> {
    let mut bytes = Vec::new();
    let mut serializer = Serializer::with_formatter(&mut bytes, formatter);
    value.serialize(&mut serializer).map_err(|why| refused(&why.to_string()))?;
    String::from_utf8(bytes).map_err(|why| refused(&why.to_string()))
}

/// Python's separators: a space after each comma and colon.
struct OneLine;

impl Formatter for OneLine {
    fn begin_array_value<W: io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: io::Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// A time by the codes of C's `strftime`, in the C locale.
pub(crate) fn strftime(now: OffsetDateTime, format: &str) -> Result<String, Error> {
    let not = || refused(&format!("strftime_now of {format:?}"));
    let items = parse_strftime_borrowed(format).map_err(|_| not())?;
    now.format(&items).map_err(|_| not())
}

/// What a template asks for and Python would do.
fn refused(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("{what} is not supported"))
}

#[cfg(test)]
mod tests {
    use time::{Date, Month, Time};

    use super::*;

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
