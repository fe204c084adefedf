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

/// Hears of one file from hf-hub.
pub(crate) struct OfFile<'t, 'a> {
    tally: &'t mut Tally<'a>,
    name: &'t str,
    bytes: u64,
}

impl<'a> Tally<'a> {
    pub(crate) fn new(told: &'a mut dyn FnMut(Progress<'_>)) -> Self {
        Self { told, before: 0, total: 0 }
    }

    /// So many bytes are asked for from here on.
    pub(crate) fn expect(&mut self, bytes: u64) {
        (self.before, self.total) = (0, bytes);
    }

    pub(crate) fn file<'t>(&'t mut self, name: &'t str) -> OfFile<'t, 'a> {
        OfFile { tally: self, name, bytes: 0 }
    }

    /// A file that was there before.
    pub(crate) fn had(&mut self, name: &str, bytes: u64) {
        self.before += bytes;
        self.tell(name, 0);
    }

    fn tell(&mut self, file: &str, bytes: u64) {
        (self.told)(Progress { file, bytes: self.before + bytes, total_bytes: self.total });
    }
}

impl hf_hub::api::Progress for OfFile<'_, '_> {
    /// Also where a download goes on.
    fn init(&mut self, _size: usize, _file: &str) {
        self.bytes = 0;
        self.tally.tell(self.name, 0);
    }

    fn update(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        self.tally.tell(self.name, self.bytes);
    }

    fn finish(&mut self) {
        self.tally.before += self.bytes;
    }
}
