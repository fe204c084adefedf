//! A budget of steps for filters, operators and output.
//!
//! minijinja counts instructions, but one instruction may compare, sort or print a whole value. A value that contains
//! the same list twice at each of 60 levels has 2^60 items. So every operation that inspects a value first charges
//! steps: some for each value within, and one per few bytes of text.

use minijinja::value::{ObjectRepr, Tuple, Value};
use minijinja::{Error, ErrorKind, State};

/// Steps of a rendering, of some 10 ns each. A prompt has at most this many bytes, because each byte written is a step.
const MAX_STEPS: usize = 64 << 20;

/// Bytes of text per step when text is copied or compared.
pub(crate) const BYTES: usize = 4;

/// Steps of a single value, and of a float, which may have 300 digits.
const SCALAR: usize = 2;
const FLOAT: usize = 32;

/// Steps to iterate over a list, over a map, and over a pair of a map.
const LIST: usize = 12;
const MAP: usize = 24;
const PAIR: usize = 8;

/// Most levels of a value that outlives an iteration of a loop or a call of a macro.
const MAX_DEPTH: usize = 256;

/// Remaining steps of a rendering.
pub(crate) struct Steps(usize);

impl Default for Steps {
    fn default() -> Self {
        Self(MAX_STEPS)
    }
}

impl Steps {
    pub(crate) fn from_state<'a>(state: &'a mut State) -> &'a mut Self {
        state.get_or_insert_extension_with(Self::default)
    }

    pub(crate) fn take(&mut self, steps: usize) -> Result<(), Error> {
        let left = self.0.checked_sub(steps);
        self.0 = left.unwrap_or_default();
        let long = || format!("its values and its text take more than {MAX_STEPS} steps");
        left.map(drop).ok_or_else(|| refused(long()))
    }

    /// Charges steps for a text.
    pub(crate) fn text(&mut self, bytes: usize) -> Result<(), Error> {
        self.take(SCALAR + bytes / BYTES)
    }

    /// Charges steps for each value within a value, and returns the number of levels.
    pub(crate) fn visit(&mut self, value: &Value) -> Result<usize, Error> {
        self.visit_all(value, false)
    }

    /// Visits a value that outlives an iteration or a call; an error for too many levels.
    pub(crate) fn shallow(&mut self, value: &Value) -> Result<(), Error> {
        shallow(self.visit(value)?)
    }

    /// Visits a value for a namespace; an error if it contains a mutable value, such as a namespace. So no value can
    /// contain itself.
    pub(crate) fn flat(&mut self, value: &Value) -> Result<(), Error> {
        shallow(self.visit_all(value, true)?)
    }

    fn visit_all(&mut self, value: &Value, flat: bool) -> Result<usize, Error> {
        if let Some(text) = value.as_str() {
            return self.text(text.len()).map(|()| 0);
        }
        let Some(object) = value.as_object() else {
            let float = value.is_number() && !value.is_integer();
            return self.take(if float { FLOAT } else { SCALAR }).map(|()| 0);
        };
        let is_map = object.repr() == ObjectRepr::Map;
        self.take(if is_map { MAP } else { LIST })?;
        let changes = |end| object.type_name().ends_with(end);
        if flat && ["::Namespace", "::Loop"].into_iter().any(changes) {
            return Err(refused("a namespace in a namespace is not supported".to_owned()));
        }
        let mut levels = 0;
        let list = object.downcast_ref::<Vec<Value>>().map(Vec::as_slice);
        if let Some(items) = list.or_else(|| object.downcast_ref::<Tuple>().map(|tuple| &**tuple)) {
            for item in items {
                levels = levels.max(self.visit_all(item, flat)?);
            }
        } else if is_map {
            for (key, value) in object.try_iter_pairs().into_iter().flatten() {
                self.take(PAIR)?;
                levels = levels.max(self.visit_all(&key, flat)?);
                levels = levels.max(self.visit_all(&value, flat)?);
            }
        } else {
            for item in object.try_iter().into_iter().flatten() {
                levels = levels.max(self.visit_all(&item, flat)?);
            }
        }
        Ok(levels + 1)
    }

    /// Visits a value and returns the steps charged.
    pub(crate) fn weigh(&mut self, value: &Value) -> Result<usize, Error> {
        let before = self.0;
        self.visit(value)?;
        Ok(before - self.0)
    }

    /// Charges the steps of a comparison, which ends with the smaller value.
    pub(crate) fn compare(&mut self, a: &Value, b: &Value) -> Result<(), Error> {
        let mut max = 256;
        loop {
            let [a, b] = [a, b].map(|value| Self(max).weigh(value).unwrap_or(max));
            self.take(a + b)?;
            if a.min(b) < max {
                return Ok(());
            }
            max *= 4;
        }
    }

    /// Charges the steps of a search.
    pub(crate) fn search(&mut self, value: &Value, container: &Value) -> Result<(), Error> {
        let each = self.weigh(value)?;
        match container.as_object() {
            Some(object) if object.repr() != ObjectRepr::Map => {
                self.take(each.saturating_mul(items(container)))
            }
            _ => self.text(bytes(container)),
        }
    }

    /// Charges the steps of indented text with one value per line; `spaces` is the steps of indentation per level. Each
    /// level is also a nested writer that passes its text on, so the cost is quadratic in levels.
    pub(crate) fn indent(&mut self, value: &Value, spaces: usize) -> Result<(), Error> {
        let before = self.0;
        let levels = self.visit(value)?;
        let each = levels.saturating_mul(levels).saturating_mul(spaces);
        self.take((before - self.0).saturating_mul(each))
    }

    /// Charges the steps of a sort, or of work with no more comparisons than a sort.
    pub(crate) fn sort(&mut self, value: &Value) -> Result<(), Error> {
        let all = self.weigh(value)?;
        self.take(all.saturating_mul(2 * items(value).max(1).ilog2() as usize + 1))
    }
}

fn shallow(levels: usize) -> Result<(), Error> {
    match levels <= MAX_DEPTH {
        true => Ok(()),
        false => Err(refused(format!("a value is nested deeper than {MAX_DEPTH}"))),
    }
}

/// Returns the bytes of a text; 0 for other values.
pub(crate) fn bytes(value: &Value) -> usize {
    value.as_str().map_or(0, str::len)
}

/// Returns the number of items of a list or a map.
pub(crate) fn items(value: &Value) -> usize {
    value.as_object().and_then(|object| object.enumerator_len()).unwrap_or_default()
}

pub(crate) fn refused(why: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}
