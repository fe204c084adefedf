//! Filters, tests, operators and methods that charge steps before they inspect values.

use std::fmt::{self, Write};

use minijinja::value::{ObjectRepr, Rest, Tuple, Value, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, HtmlEscape, Output, State};
use minijinja::{filters, tests};
use minijinja_contrib::pycompat::unknown_method_callback;

use crate::program as check;
use crate::python::{self, loopable};
use crate::steps::{BYTES, Steps, bytes, items, refused};

/// Steps per call of a macro, a filter or a method.
const CALL: usize = 96;

/// Steps per list item that a filter visits, and per copied item.
const ITEM: usize = 12;
const COPY: usize = 6;

/// Most steps of a map key that is a list or a map: each copy of the map hashes its keys again.
const MAX_KEY: usize = 256;

/// Steps of rounding a number, which may format 1000 digits.
const ROUND: usize = 256;

/// Writer for the output of a rendering; charges one step per byte.
struct Written<'a, 'b> {
    out: &'a mut Output<'b>,
    steps: &'a mut Steps,
    refused: Result<(), Error>,
}

/// Registers these filters and operators in place of minijinja's, and the checks of programs.
pub(crate) fn register(templates: &mut Environment) {
    // This function prints all variables; jinja2 does not have it.
    templates.remove_global("debug");
    templates.add_global(check::ONE, 1);
    templates.set_formatter(write);
    templates.set_unknown_method_callback(method);
    for (name, filter) in builtin().into_iter().chain(python::filters()) {
        let filter = move |state: &mut State, args: Rest<ValueOrKwargs>| -> Result<Value, Error> {
            let args = args.into_values();
            look(Steps::from_state(state), name, &args)?;
            let result = filter.call(state, &args)?;
            settled(state, result)
        };
        templates.add_filter(name, filter);
    }
    operators(templates);
    checks(templates);
}

/// Returns minijinja's filters that inspect more than one value, without those that [`python`] replaces.
fn builtin() -> Vec<(&'static str, Value)> {
    let mut all = vec![
        ("attr", Value::from_function(filters::attr)),
        ("batch", Value::from_function(filters::batch)),
        ("capitalize", Value::from_function(filters::capitalize)),
        ("chain", Value::from_function(filters::chain)),
        ("dictsort", Value::from_function(filters::dictsort)),
        ("format", Value::from_function(filters::format)),
        ("groupby", Value::from_function(filters::groupby)),
        ("indent", Value::from_function(filters::indent)),
        ("lines", Value::from_function(filters::lines)),
        ("lower", Value::from_function(filters::lower)),
        ("map", Value::from_function(filters::map)),
        ("max", Value::from_function(filters::max)),
        ("min", Value::from_function(filters::min)),
        ("pprint", Value::from_function(filters::pprint)),
        ("reject", Value::from_function(filters::reject)),
        ("rejectattr", Value::from_function(filters::rejectattr)),
        ("replace", Value::from_function(filters::replace)),
        ("round", Value::from_function(filters::round)),
        ("safe", Value::from_function(filters::safe)),
        ("select", Value::from_function(filters::select)),
        ("selectattr", Value::from_function(filters::selectattr)),
        ("slice", Value::from_function(filters::slice)),
        ("sort", Value::from_function(filters::sort)),
        ("split", Value::from_function(filters::split)),
        ("string", Value::from_function(filters::string)),
        ("sum", Value::from_function(filters::sum)),
        ("title", Value::from_function(filters::title)),
        ("trim", Value::from_function(filters::trim)),
        ("unique", Value::from_function(filters::unique)),
        ("upper", Value::from_function(filters::upper)),
        ("zip", Value::from_function(filters::zip)),
    ];
    all.extend(["e", "escape"].map(|name| (name, Value::from_function(filters::escape))));
    all
}

/// Charges the steps of a filter or a method by its name and operands.
fn look(steps: &mut Steps, name: &str, operands: &[Value]) -> Result<(), Error> {
    let [value, args @ ..] = operands else { return Ok(()) };
    steps.take(CALL)?;
    let mut all = 0;
    for arg in args {
        all += steps.weigh(arg)?;
    }
    // Includes keyword arguments.
    let args: Vec<Value> = args.iter().flat_map(named).collect();
    let number = |arg: &Value| usize::try_from(arg.clone()).unwrap_or_default();
    let number = args.iter().map(number).fold(0, usize::saturating_add);
    let given: usize = args.iter().map(bytes).sum();
    let text = value.as_str().unwrap_or_default();
    let found = |what: Option<&Value>| match what.and_then(Value::as_str) {
        Some(what) => text.matches(what).count(),
        None => text.len(),
    };
    let many = items(value);
    let product = |a: usize, b: usize| a.saturating_mul(b);
    steps.take(match name {
        "attr" | "get" => 0,
        "batch" | "slice" => product(number, ITEM),
        // Each field may show any argument.
        "format" => {
            let fields = product(text.matches(['%', '{']).count(), all);
            digits(text).saturating_add(number).saturating_add(fields)
        }
        "indent" => product(text.matches('\n').count() + 1, number),
        "join" => product(args.first().map_or(0, items).max(many), text.len() + given) / BYTES,
        "lines" | "list" | "split" | "splitlines" => product(found(args.first()), COPY),
        "lstrip" | "rstrip" | "strip" | "trim" => product(text.len(), given) / BYTES,
        "replace" => product(found(args.first()), COPY + given) / BYTES,
        _ => product(many, given) / BYTES,
    })?;
    match name {
        "attr" | "count" | "first" | "get" | "length" => steps.text(text.len()),
        "batch" | "chain" | "items" | "keys" | "list" | "map" | "reject" | "rejectattr"
        | "reverse" | "select" | "selectattr" | "slice" | "values" | "zip" => {
            steps.text(text.len())?;
            steps.take(many.saturating_mul(ITEM))
        }
        "last" => steps.take(if value.kind() == ValueKind::Seq { ITEM } else { ITEM * many }),
        "dictsort" | "groupby" | "max" | "min" | "sort" | "unique" => steps.sort(value),
        "pprint" => steps.indent(value, 1),
        "tojson" if number > 0 => steps.indent(value, 1 + number / BYTES),
        "round" => steps.take(ROUND),
        // A sum of lists or texts copies the result for each item.
        "sum" if !args.is_empty() => {
            let all = steps.weigh(value)?;
            steps.take(all.saturating_mul(many))
        }
        _ => steps.visit(value).map(drop),
    }
}

/// Returns the values of keyword arguments, or a positional argument itself.
fn named(arg: &Value) -> Vec<Value> {
    match arg.as_object().filter(|_| arg.is_kwargs()) {
        Some(object) => {
            object.try_iter_pairs().into_iter().flatten().map(|(_, value)| value).collect()
        }
        None => vec![arg.clone()],
    }
}

/// Returns the sum of the numbers in a format string; each may be a width.
fn digits(text: &str) -> usize {
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|number| !number.is_empty());
    numbers.map(|number| number.parse().unwrap_or(usize::MAX)).fold(0, usize::saturating_add)
}

/// Calls a method of Python.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let steps = Steps::from_state(state);
    match args {
        [what] if name == "count" => steps.search(what, value)?,
        _ => {
            let operands: Vec<Value> = [value].into_iter().chain(args).cloned().collect();
            look(steps, name, &operands)?;
        }
    }
    let result = unknown_method_callback(state, value, name, args)?;
    settled(state, result)
}

/// Registers operators as filters, and the equivalent tests.
fn operators(templates: &mut Environment) {
    type Compare = fn(&Value, &Value) -> bool;
    let comparisons: [(&str, Compare, &[&str]); 7] = [
        (check::EQ, |a, b| a == b, &["==", "eq", "equalto"]),
        (check::NE, |a, b| a != b, &["!=", "ne"]),
        (check::LT, |a, b| a < b, &["<", "lt", "lessthan"]),
        (check::LE, |a, b| a <= b, &["<=", "le"]),
        (check::GT, |a, b| a > b, &[">", "gt", "greaterthan"]),
        (check::GE, |a, b| a >= b, &[">=", "ge"]),
        ("=same", tests::is_sameas, &["sameas"]),
    ];
    for (name, compare, names) in comparisons {
        let compare = move |state: &mut State, a: &Value, b: &Value| -> Result<bool, Error> {
            Steps::from_state(state).compare(a, b)?;
            Ok(compare(a, b))
        };
        templates.add_filter(name, compare);
        names.iter().for_each(|name| templates.add_test(*name, compare));
    }
    let within = |state: &mut State, value: &Value, container: &Value| -> Result<bool, Error> {
        Steps::from_state(state).search(value, container)?;
        tests::is_in(state, value, container)
    };
    templates.add_test("in", within);
    templates.add_filter(check::IN, move |state: &mut State, value: &Value, container: &Value| {
        let kinds = [ValueKind::Undefined, ValueKind::String];
        match container.as_object().is_some() || kinds.contains(&container.kind()) {
            true => within(state, value, container),
            false => Err(refused("cannot perform a containment check on this value".to_owned())),
        }
    });
    templates.add_filter(check::CONCAT, |state: &mut State, a: &Value, b: &Value| {
        let steps = Steps::from_state(state);
        steps.visit(a)?;
        steps.visit(b)?;
        settled(state, Value::from(format!("{a}{b}")))
    });
    templates.add_filter(check::ITEM, |state: &mut State, value: &Value, key: &Value| {
        let steps = Steps::from_state(state);
        steps.visit(key)?;
        match value.kind() {
            ValueKind::Iterable => steps.take(items(value))?,
            _ => steps.text(bytes(value))?,
        }
        value.get_item(key)
    });
    for (name, test) in [
        ("endingwith", Value::from_function(tests::is_endingwith)),
        ("lower", Value::from_function(tests::is_lower)),
        ("startingwith", Value::from_function(tests::is_startingwith)),
        ("upper", Value::from_function(tests::is_upper)),
    ] {
        templates.add_test(name, move |state: &mut State, args: Rest<Value>| {
            args.iter().try_for_each(|arg| Steps::from_state(state).visit(arg).map(drop))?;
            test.call(state, &args)
        });
    }
}

/// Registers the checks of a program.
fn checks(templates: &mut Environment) {
    templates.add_filter(check::SETTLED, settled);
    templates.add_filter(check::LOOPABLE, |state: &mut State, value: &Value| {
        Steps::from_state(state).text(bytes(value))?;
        loopable(value)
    });
    templates.add_filter(check::SHALLOW, |state: &mut State, value: Value| {
        Steps::from_state(state).shallow(&value).map(|()| value)
    });
    templates.add_filter(check::FLAT, |state: &mut State, value: Value| {
        Steps::from_state(state).flat(&value).map(|()| value)
    });
    templates.add_filter(check::UNPACKED, |state: &mut State, value: Value| {
        Steps::from_state(state).take(COPY * items(&value)).map(|()| value)
    });
    type Check = fn(&mut Steps, &[Value]) -> Result<(), Error>;
    let joint: [(&str, Check); 7] = [
        (check::COMPARED, |steps, both| {
            let [a, b] = both else { return Ok(()) };
            steps.compare(a, b)?;
            steps.search(a, b)
        }),
        (check::REPEATED, |steps, both| {
            let [a, b] = both else { return Ok(()) };
            for (value, times) in [(a, b), (b, a)] {
                let times = times.as_usize().unwrap_or_default();
                steps.take(times.saturating_mul(COPY * items(value) + bytes(value) / BYTES))?;
            }
            Ok(())
        }),
        (check::SLICED, |steps, operands| {
            let [value, ..] = operands else { return Ok(()) };
            steps.text(bytes(value))?;
            steps.take(items(value))
        }),
        (check::KEYED, |steps, pairs| {
            pairs.iter().step_by(2).try_for_each(|key| keyed(steps, key))
        }),
        (check::MERGED, |steps, all| {
            for value in all {
                steps.take(ITEM * items(value))?;
                let keys = value.as_object().filter(|object| object.repr() == ObjectRepr::Map);
                for key in keys.and_then(|object| object.try_iter()).into_iter().flatten() {
                    steps.visit(&key)?;
                }
            }
            Ok(())
        }),
        (check::CALLED, |steps, args| called(steps, args)),
        (check::OBJECT_CALLED, |steps, args| called(steps, &args[1..])),
    ];
    for (name, check) in joint {
        templates.add_filter(name, move |state: &mut State, operands: Value| {
            let all = operands.downcast_object_ref::<Tuple>().map_or(&[][..], |all| all);
            check(Steps::from_state(state), all).map(|()| operands.clone())
        });
    }
}

fn keyed(steps: &mut Steps, key: &Value) -> Result<(), Error> {
    match key.as_object().is_some() && steps.weigh(key)? > MAX_KEY {
        true => Err(refused(format!("a key of a map has more than {MAX_KEY} values"))),
        false => steps.text(bytes(key)),
    }
}

fn called(steps: &mut Steps, args: &[Value]) -> Result<(), Error> {
    steps.take(CALL)?;
    args.iter().try_for_each(|arg| steps.shallow(arg))
}

/// Charges steps for a text, and copies a lazy view into a list or a map, because the view's work would not be counted.
fn settled(state: &mut State, value: Value) -> Result<Value, Error> {
    let steps = Steps::from_state(state);
    steps.text(bytes(&value))?;
    let Some(object) = value.as_object() else { return Ok(value) };
    if value.kind() != ValueKind::Iterable && !object.type_name().contains("::Merge") {
        return Ok(value);
    }
    if object.repr() == ObjectRepr::Map {
        let pairs = object.try_iter_pairs().into_iter().flatten();
        let pairs: Result<Vec<_>, Error> =
            pairs.map(|pair| steps.take(COPY).map(|()| pair)).collect();
        return Ok(Value::from_pairs(pairs?));
    }
    let items = value.try_iter()?.checked();
    let items: Result<Vec<_>, Error> = items.map(|item| steps.take(COPY).and(item)).collect();
    Ok(Value::from(items?))
}

/// Writes a value like minijinja's default formatter, and floats like Python.
fn write(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let escapes = matches!(state.auto_escape(), AutoEscape::Html) && !value.is_safe();
    let steps = Steps::from_state(state);
    if value.as_object().is_some() {
        steps.visit(value)?;
    }
    let mut written = Written { out, steps, refused: Ok(()) };
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    let float = is_float.then(|| f64::try_from(value.clone()).ok()).flatten();
    let result = match float {
        Some(float) => written.write_str(&python::float(float)),
        None if escapes => write!(written, "{}", HtmlEscape(&value.to_string())),
        None => write!(written, "{value}"),
    };
    written.refused?;
    result.map_err(Error::from)
}

impl Write for Written<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.refused = self.steps.take(text.len());
        match self.refused {
            Ok(()) => self.out.write_str(text),
            Err(_) => Err(fmt::Error),
        }
    }
}
