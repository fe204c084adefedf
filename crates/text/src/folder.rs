//! Reads files of a model's folder, as text and as JSON.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use fancy_regex::{Captures, Regex};
use serde::Deserialize;

use crate::Error;

/// Start of a git-lfs pointer, which stands for a file that was not fetched.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Checks that a path is a folder or a regular file, since a read from a pipe might never end, and no git-lfs pointer.
pub(crate) fn check(path: &Path) -> io::Result<()> {
    let meta = fs::metadata(path)?;
    if meta.is_dir() {
        return Ok(());
    }
    if !meta.is_file() {
        return Err(io::Error::other("it is not a file"));
    }
    let mut start = Vec::new();
    fs::File::open(path)?.take(POINTER.len() as u64).read_to_end(&mut start)?;
    match start == POINTER {
        true => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "it is a git-lfs pointer instead of the file",
        )),
        false => Ok(()),
    }
}

/// Reads a text file; `None` if it does not exist. A dangling link is an error.
pub(crate) fn read(path: &Path) -> Result<Option<String>, Error> {
    match check(path).and_then(|()| fs::read_to_string(path)) {
        Ok(text) => Ok(Some(text)),
        Err(why) if why.kind() == io::ErrorKind::NotFound && !path.is_symlink() => Ok(None),
        Err(why) => Err(Error::Read { path: path.to_owned(), why }),
    }
}

/// Reads a JSON file; `None` if it does not exist. Python also writes `NaN` and `Infinity`, which become null.
pub(crate) fn json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<Option<T>, Error> {
    let Some(text) = read(path)? else { return Ok(None) };
    let why =
        |why: serde_json::Error| Error::Config { path: path.to_owned(), why: why.to_string() };
    let names = Regex::new(r#""(?:\\.|[^"\\])*"|(-?Infinity|NaN)"#).expect("it is tested");
    let null = |own: &Captures<'_>| own.get(1).map_or(own[0].to_owned(), |_| "null".to_owned());
    serde_json::from_str(&text)
        .or_else(|fault| serde_json::from_str(&names.replace_all(&text, null)).map_err(|_| fault))
        .map(Some)
        .map_err(why)
}
