//! A partially downloaded file.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::cache::make_parent;

/// Bytes per read.
const PIECE: usize = 1 << 17;

/// A file that grows until it is complete, with its checksum if one is needed.
pub(crate) struct Part {
    path: PathBuf,
    file: File,
    len: u64,
    sum: Option<Sha256>,
}

impl Part {
    /// Opens the partial file of an earlier download, or creates it. `None` if the path is not a file.
    pub(crate) fn open(path: PathBuf, sums: bool) -> io::Result<Option<Self>> {
        make_parent(&path)?;
        match path.symlink_metadata() {
            Ok(meta) if !meta.is_file() => return Ok(None),
            Err(why) if why.kind() != ErrorKind::NotFound => return Err(why),
            _ => {}
        }
        let options = File::options().read(true).write(true).create(true).truncate(false).clone();
        let mut part = Self { file: options.open(&path)?, path, len: 0, sum: None };
        if !sums {
            part.len = part.file.seek(io::SeekFrom::End(0))?;
            return Ok(Some(part));
        }
        let mut sum = Sha256::new();
        let mut piece = vec![0; PIECE];
        loop {
            match part.file.read(&mut piece) {
                Ok(0) => break,
                Ok(n) => {
                    sum.update(&piece[..n]);
                    part.len += n as u64;
                }
                Err(why) if why.kind() == ErrorKind::Interrupted => {}
                Err(why) => return Err(why),
            }
        }
        part.sum = Some(sum);
        Ok(Some(part))
    }

    pub(crate) const fn len(&self) -> u64 {
        self.len
    }

    /// Empties the file.
    pub(crate) fn clear(&mut self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.len = 0;
        self.sum = self.sum.as_ref().map(|_| Sha256::new());
        Ok(())
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.len += bytes.len() as u64;
        if let Some(sum) = &mut self.sum {
            sum.update(bytes);
        }
        Ok(())
    }

    /// Returns the SHA-256 of the bytes so far, if requested in [`open`](Self::open).
    pub(crate) fn sum(&self) -> Option<String> {
        let digest = self.sum.clone()?.finalize();
        Some(digest.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Syncs the file to disk and renames it to `path`.
    pub(crate) fn finish(self, path: &Path) -> io::Result<()> {
        self.file.sync_data()?;
        drop(self.file);
        fs::rename(self.path, path)
    }

    pub(crate) fn remove(self) -> io::Result<()> {
        drop(self.file);
        fs::remove_file(self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_of_what_was_left_and_of_what_came() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("blobs/x.incomplete");
        let open = |sums| Part::open(path.clone(), sums).expect("opens").expect("a file");
        open(true).push(b"a").expect("written");
        let mut part = open(true);
        part.push(b"bc").expect("written");
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!((part.len(), part.sum().as_deref()), (3, Some(abc)));
        assert_eq!(open(false).len(), 3);
        part.clear().expect("cleared");
        part.push(b"abc").expect("written");
        assert_eq!((part.len(), part.sum().as_deref()), (3, Some(abc)));
        part.finish(&dir.path().join("whole")).expect("renamed");
        assert_eq!(fs::read(dir.path().join("whole")).expect("there"), b"abc");
        fs::create_dir(&path).expect("made");
        assert!(Part::open(path, true).expect("looked at").is_none(), "a folder is no part");
    }
}
