use crate::Error;

/// Stop sequences, matched across pieces of a text. The first complete match wins; of several with the same
/// end, the longest. The result does not depend on the pieces.
#[derive(Debug, Clone)]
pub struct Stops {
    stops: Vec<String>,
    /// End of the pushed text that may be the start of a stop sequence.
    held: String,
}

/// Text that may be shown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Piece {
    pub text: String,
    /// Index of the stop sequence that ends the text here; nothing may be pushed after it.
    pub stop: Option<usize>,
}

impl Stops {
    /// Makes stop sequences from strings.
    ///
    /// # Errors
    /// [`Error::EmptyStop`] for an empty string.
    pub fn new(stops: impl IntoIterator<Item = impl Into<String>>) -> Result<Self, Error> {
        let stops: Vec<String> = stops.into_iter().map(Into::into).collect();
        if stops.iter().any(String::is_empty) {
            return Err(Error::EmptyStop);
        }
        Ok(Self { stops, held: String::new() })
    }

    /// Adds text, and returns the new text that is certain to be before any stop sequence.
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

    /// Returns the text held back, when nothing follows.
    pub fn finish(self) -> String {
        self.held
    }

    /// Returns the bytes at the end of the held text that match the start of a stop sequence.
    fn longest_beginning(&self) -> usize {
        let beginning = |stop: &String| {
            let starts = stop.char_indices().map(|(at, _)| at).rev();
            starts.into_iter().find(|len| self.held.ends_with(&stop[..*len])).unwrap_or_default()
        };
        self.stops.iter().map(beginning).max().unwrap_or_default()
    }
}
