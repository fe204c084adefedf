use crate::Error;

/// Strings that end a text, wherever pieces cut them. The one that is whole first wins, and of several that
/// end together the longest; how the text is cut changes nothing.
#[derive(Debug, Clone)]
pub struct Stops {
    stops: Vec<String>,
    /// The end of what was pushed, as far as it may be the beginning of a stop.
    held: String,
}

/// What may be shown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Piece {
    pub text: String,
    /// Which stop ends the text here; nothing may be pushed after it.
    pub stop: Option<usize>,
}

impl Stops {
    /// # Errors
    /// [`Error::EmptyStop`].
    pub fn new(stops: impl IntoIterator<Item = impl Into<String>>) -> Result<Self, Error> {
        let stops: Vec<String> = stops.into_iter().map(Into::into).collect();
        if stops.iter().any(String::is_empty) {
            return Err(Error::EmptyStop);
        }
        Ok(Self { stops, held: String::new() })
    }

    /// The text so far that is certain to be before any stop and was not given yet.
    pub fn push(&mut self, text: &str) -> Piece {
        self.held.push_str(text);
        let found = self.stops.iter().enumerate().filter_map(|(stop, string)| {
            let start = self.held.find(string.as_str())?;
            Some((start + string.len(), start, stop))
        });
        if let Some((_, start, stop)) = found.min() {
            let mut text = std::mem::take(&mut self.held);
            text.truncate(start);
            return Piece { text, stop: Some(stop) };
        }
        let rest = self.held.split_off(self.held.len() - self.longest_beginning());
        Piece { text: std::mem::replace(&mut self.held, rest), stop: None }
    }

    /// What was held back, when nothing follows.
    pub fn finish(self) -> String {
        self.held
    }

    /// Bytes at the end of what is held that a stop begins with.
    fn longest_beginning(&self) -> usize {
        let beginning = |stop: &String| {
            let starts = stop.char_indices().map(|(at, _)| at).rev();
            starts.into_iter().find(|len| self.held.ends_with(&stop[..*len])).unwrap_or_default()
        };
        self.stops.iter().map(beginning).max().unwrap_or_default()
    }
}
