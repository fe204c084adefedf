//! How far a download is.

/// What is there of the files that a model needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The file that is on its way.
    pub file: &'a str,
    /// Of all files.
    pub bytes: u64,
    /// Of all files; 0 while it is not known.
    pub total_bytes: u64,
}

/// Adds up files.
pub(crate) struct Tally<'a> {
    told: &'a mut dyn FnMut(Progress<'_>),
    before: u64,
    total: u64,
}

impl<'a> Tally<'a> {
    pub(crate) fn new(told: &'a mut dyn FnMut(Progress<'_>)) -> Self {
        Self { told, before: 0, total: 0 }
    }

    /// So many bytes are asked for from here on.
    pub(crate) fn expect(&mut self, bytes: u64) {
        (self.before, self.total) = (0, bytes);
    }

    /// So much is there of a file that comes; less than before where it begins anew.
    pub(crate) fn at(&mut self, file: &str, bytes: u64) {
        (self.told)(Progress { file, bytes: self.before + bytes, total_bytes: self.total });
    }

    /// A file that came.
    pub(crate) fn finish(&mut self, bytes: u64) {
        self.before += bytes;
    }

    /// A file that was there before.
    pub(crate) fn had(&mut self, name: &str, bytes: u64) {
        self.before += bytes;
        self.at(name, 0);
    }
}
