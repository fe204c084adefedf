//! Reads files of a model's folder, as text and as JSON.

use std::fs;
use std::io;
use std::path::Path;

use serde::Deserialize;

use crate::Error;

/// Reads a text file; `None` if it does not exist. A dangling link is an error.
pub(crate) fn read(path: &Path) -> Result<Option<String>, Error> {
    match checkpoint::ends(path).and_then(|()| fs::read_to_string(path)) {
        Ok(text) => Ok(Some(text)),
        Err(why) if why.kind() == io::ErrorKind::NotFound && !path.is_symlink() => Ok(None),
        Err(why) => Err(Error::Read { path: path.to_owned(), why }),
    }
}

/// Reads a JSON file; `None` if it does not exist.
pub(crate) fn json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<Option<T>, Error> {
    let Some(text) = read(path)? else { return Ok(None) };
    let why =
        |why: serde_json::Error| Error::Config { path: path.to_owned(), why: why.to_string() };
    serde_json::from_str(&text).map(Some).map_err(why)
}
