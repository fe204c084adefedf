//! Sequences of tokens, in memory or past a limit in a temporary file.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use models::Example;

/// Tokens in memory before they go to a file: 256 MiB.
const LIMIT: usize = 1 << 26;

/// Examples in the order in which they were added. Only 16 bytes of each stay in memory, once all hold more tokens than the limit.
#[derive(Debug)]
pub(super) struct Sequences {
    places: Vec<Place>,
    /// Tokens that are not in the file.
    recent: Vec<u32>,
    limit: usize,
    /// Made once it is needed; without a name, so that it goes with this value.
    file: Option<File>,
    /// Tokens in the file.
    written: u64,
}

/// Tokens of an example.
#[derive(Debug, Clone, Copy)]
struct Place {
    at: u64,
    len: u32,
    from: u32,
}

impl Default for Sequences {
    fn default() -> Self {
        Self::with_limit(LIMIT)
    }
}

impl Sequences {
    fn with_limit(limit: usize) -> Self {
        Self { places: Vec::new(), recent: Vec::new(), limit, file: None, written: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns the number of rows of the longest example.
    pub(super) fn longest(&self) -> usize {
        self.places.iter().map(|own| own.len as usize - 1).max().unwrap_or(0)
    }

    /// Adds an example, which has a token to learn.
    pub(super) fn add(&mut self, Example { tokens, from }: &Example) -> io::Result<()> {
        let narrow = |number: usize| u32::try_from(number).map_err(io::Error::other);
        let at = self.written + self.recent.len() as u64;
        self.places.push(Place { at, len: narrow(tokens.len())?, from: narrow(*from)? });
        self.recent.extend(tokens);
        if self.recent.len() < self.limit {
            return Ok(());
        }
        if self.file.is_none() {
            self.file = Some(tempfile::tempfile()?);
        }
        if let Some(file) = &mut self.file {
            let bytes: Vec<u8> = self.recent.iter().flat_map(|token| token.to_le_bytes()).collect();
            file.write_all(&bytes)?;
        }
        self.written += self.recent.len() as u64;
        self.recent.clear();
        Ok(())
    }

    /// Returns an example.
    ///
    /// # Panics
    /// Panics past the last one.
    pub(super) fn get(&self, index: usize) -> io::Result<Example> {
        let Place { at, len, from } = self.places[index];
        let (len, from) = (len as usize, from as usize);
        let Some(file) = self.file.as_ref().filter(|_| at < self.written) else {
            let at = (at - self.written) as usize;
            return Ok(Example { tokens: self.recent[at..at + len].to_vec(), from });
        };
        let mut bytes = vec![0; 4 * len];
        file.read_exact_at(&mut bytes, 4 * at)?;
        let tokens = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
        Ok(Example { tokens: tokens.collect(), from })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_past_the_limit_come_back() {
        let example = |index: u32| {
            let tokens = (0..2 + index % 5).map(|at| 1000 * index + at).collect();
            Example { tokens, from: (index % 2) as usize }
        };
        for limit in [1, 10, 1000] {
            let mut all = Sequences::with_limit(limit);
            (0..40).for_each(|index| all.add(&example(index)).expect("room"));
            assert_eq!((all.len(), all.longest()), (40, 5));
            for index in (0..40).rev() {
                assert_eq!(all.get(index).expect("just written"), example(index as u32), "{limit}");
            }
            assert_eq!(all.file.is_some(), limit < 1000);
        }
    }
}
