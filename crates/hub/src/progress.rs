//! Progress of a download.

/// Progress of the download of a model's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// Name of the current file.
    pub file: &'a str,
    /// Bytes present of all files.
    pub bytes: u64,
    /// Total bytes of all files; 0 while unknown.
    pub total_bytes: u64,
}

/// Sums the progress of several files.
pub(crate) struct Tally<'a> {
    told: &'a mut dyn FnMut(Progress<'_>),
    before: u64,
    total: u64,
}

impl<'a> Tally<'a> {
    pub(crate) fn new(told: &'a mut dyn FnMut(Progress<'_>)) -> Self {
        Self { told, before: 0, total: 0 }
    }

    /// Sets the total and restarts the count.
    pub(crate) fn expect(&mut self, bytes: u64) {
        (self.before, self.total) = (0, bytes);
    }

    /// Reports the bytes present of the current file; the number falls if the download restarts.
    pub(crate) fn at(&mut self, file: &str, bytes: u64) {
        (self.told)(Progress { file, bytes: self.before + bytes, total_bytes: self.total });
    }

    /// Adds a file after its download.
    pub(crate) fn finish(&mut self, bytes: u64) {
        self.before += bytes;
    }

    /// Adds and reports a file that was cached.
    pub(crate) fn had(&mut self, name: &str, bytes: u64) {
        self.before += bytes;
        self.at(name, 0);
    }
}
