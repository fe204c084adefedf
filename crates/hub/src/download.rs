//! Downloads files of a commit into the cache.

use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use ureq::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE};

use crate::cache::{BlobName, Folder, NotLocked};
use crate::client::{Client, Facts, header};
use crate::failure::Failure;
use crate::files::Listing;
use crate::origin::encoded;
use crate::part::Part;
use crate::progress::Tally;
use crate::{Hub, HubError, ModelName};

/// Bytes per read.
const PIECE: usize = 1 << 17;

/// Bytes that must arrive before the retries start again from zero. A server that stalls after every byte thus counts
/// as stalled.
const RENEWS: u64 = 1 << 16;

/// A download of files of one commit.
pub(crate) struct Download<'a> {
    pub(crate) hub: &'a Hub,
    pub(crate) model: &'a ModelName,
    pub(crate) client: Client<'a>,
    pub(crate) folder: Folder,
    pub(crate) listing: &'a Listing,
    pub(crate) tally: Tally<'a>,
}

/// Expected properties of a file.
struct Whole<'a> {
    name: &'a str,
    /// Path of the URL after the endpoint.
    address: String,
    size: u64,
    /// SHA-256. Small files have git's SHA-1 instead, which is not checked.
    sum: Option<String>,
}

impl Download<'_> {
    /// Downloads a file unless it is complete in the cache, and returns its path.
    pub(crate) fn file(&mut self, name: &str) -> Result<PathBuf, HubError> {
        let commit = &self.listing.sha;
        let path = self.folder.snapshot(commit).join(name);
        let size = self.listing.size(name);
        if is_whole(&path, size) {
            self.tally.had(name, size.unwrap_or(0));
            return Ok(path);
        }
        let address = format!("/{}/resolve/{commit}/{}", self.model.name(), encoded(name));
        let facts = self.client.patience.retry(|| self.client.facts(&address));
        let facts = facts.map_err(|failure| self.failed(name, failure))?;
        let (blob, whole) = self.expected(name, address, &facts)?;
        let locked = self.folder.lock(&blob, self.client.patience.busy);
        let _locked = locked.map_err(|why| match why {
            NotLocked::Busy(lock) => HubError::Busy { model: self.model.clone(), lock },
            NotLocked::Disk(why) => self.hub.disk(&why),
        })?;
        // Another commit may contain the file, or another program may have just downloaded it.
        match is_whole(&self.folder.blob(&blob), Some(whole.size)) {
            true => self.tally.had(name, whole.size),
            false => self.fetch(&blob, &whole)?,
        }
        self.folder.link(commit, name, &blob).map_err(|why| self.hub.disk(&why))
    }

    /// Combines the facts about a file from the answer and from the listing.
    fn expected<'n>(
        &self,
        name: &'n str,
        address: String,
        facts: &Facts,
    ) -> Result<(BlobName, Whole<'n>), HubError> {
        let blob = BlobName::of_etag(&facts.etag)
            .ok_or_else(|| self.unusable(&format!("the ETag of {name} is no file name")))?;
        let size = self.listing.size(name).or(facts.size);
        let size = size.ok_or_else(|| self.unusable(&format!("it gives no length for {name}")))?;
        let (listed, said) = (self.listing.sha256(name), blob.sha256());
        if listed.is_some() && said.is_some() && listed != said {
            return Err(self.unusable(&format!("it gives two different SHA-256 for {name}")));
        }
        Ok((blob, Whole { name, address, size, sum: listed.or(said) }))
    }

    /// Downloads the missing part of a blob and checks all of it.
    fn fetch(&mut self, blob: &BlobName, whole: &Whole<'_>) -> Result<(), HubError> {
        let on_disk = |why| self.hub.disk(&why);
        let part =
            Part::open(self.folder.incomplete(blob), whole.sum.is_some()).map_err(on_disk)?;
        let mut part = part.ok_or_else(|| HubError::Leftover {
            model: self.model.clone(),
            cache: self.hub.cache.clone(),
        })?;
        // A part of full length may be complete, but only a checksum can prove it.
        if part.len() > whole.size || (part.len() == whole.size && whole.sum.is_none()) {
            part.clear().map_err(on_disk)?;
        }
        if let Err(failure) = self.complete(whole, &mut part) {
            if matches!(failure, Failure::Wrong(_)) {
                part.remove().map_err(|why| self.hub.disk(&why))?;
            }
            return Err(self.failed(whole.name, failure));
        }
        self.tally.finish(whole.size);
        part.finish(&self.folder.blob(blob)).map_err(|why| self.hub.disk(&why))
    }

    /// Sends requests until the file is complete. Fails when all retries are used before [`RENEWS`] more bytes arrive.
    fn complete(&mut self, whole: &Whole<'_>, part: &mut Part) -> Result<(), Failure> {
        let patience = self.client.patience;
        let (mut tries, mut max) = (patience.tries(), part.len());
        self.tally.at(whole.name, part.len());
        while part.len() < whole.size {
            let Err(failure) = self.pull(whole, part) else { continue };
            if part.len() >= max + RENEWS {
                (tries, max) = (patience.tries(), part.len());
            }
            if !tries.again(&failure) {
                return Err(failure);
            }
        }
        match (&whole.sum, part.sum()) {
            (Some(want), Some(have)) if *want != have => Err(Failure::Wrong(format!(
                "the SHA-256 of {} is {have}, expected {want}; the file was deleted",
                whole.name
            ))),
            _ => Ok(()),
        }
    }

    /// Requests the rest of the file once. Without an error the part has its full length.
    fn pull(&mut self, whole: &Whole<'_>, part: &mut Part) -> Result<(), Failure> {
        let mut answer = self.client.get(&whole.address, part.len());
        if part.len() > 0 && matches!(answer, Err(Failure::Status { status: 416, .. })) {
            part.clear()?;
            answer = self.client.get(&whole.address, 0);
        }
        let mut answer = answer?;
        let wrong = |what: &str, said: &str| {
            let (name, size) = (whole.name, whole.size);
            Err(Failure::Wrong(format!("{what} of {name} ({size} bytes) is {said}")))
        };
        let packed = header(&answer, CONTENT_ENCODING.as_str());
        if let Some(packed) = packed.filter(|packed| *packed != "identity") {
            return wrong("the Content-Encoding", packed);
        }
        match answer.status().as_u16() {
            200 => {
                let length = header(&answer, CONTENT_LENGTH.as_str());
                if let Some(length) = length.filter(|length| length.parse() != Ok(whole.size)) {
                    return wrong("the Content-Length", length);
                }
                part.clear()?;
            }
            206 if part.len() > 0 => {
                let range = header(&answer, CONTENT_RANGE.as_str()).unwrap_or("missing");
                if !goes_on(range, part.len(), whole.size) {
                    return wrong(&format!("the Content-Range from {} on", part.len()), range);
                }
            }
            status => return wrong("the status", &status.to_string()),
        }
        let mut body = answer.body_mut().as_reader();
        let mut piece = vec![0; PIECE];
        loop {
            let n = match body.read(&mut piece) {
                Ok(0) => break,
                Ok(n) => n,
                Err(why) if why.kind() == ErrorKind::Interrupted => continue,
                Err(why) => return Err(self.client.broke(why)),
            };
            if part.len() + n as u64 > whole.size {
                return wrong("the length", "larger");
            }
            part.push(&piece[..n])?;
            self.tally.at(whole.name, part.len());
        }
        match part.len() == whole.size {
            true => Ok(()),
            false => Err(Failure::Broke(format!(
                "{} ends after {} of {} bytes",
                whole.name,
                part.len(),
                whole.size
            ))),
        }
    }

    fn failed(&self, name: &str, failure: Failure) -> HubError {
        match failure {
            Failure::Status { status: 404, elsewhere: None, .. } => {
                self.unusable(&format!("it lists {name}, but does not have it"))
            }
            other => HubError::from_failure(other, self.hub, self.model),
        }
    }

    fn unusable(&self, why: &str) -> HubError {
        HubError::from_failure(Failure::Unusable(why.to_owned()), self.hub, self.model)
    }
}

/// Returns true if the file exists and has the expected size, if known.
fn is_whole(path: &Path, size: Option<u64>) -> bool {
    let there = path.metadata().ok().filter(|meta| meta.is_file()).map(|meta| meta.len());
    there.is_some_and(|there| size.is_none_or(|size| there == size))
}

/// Returns true if a Content-Range starts at byte `from` of a file of `size` bytes.
fn goes_on(range: &str, from: u64, size: u64) -> bool {
    let parts = range.strip_prefix("bytes ").and_then(|range| range.split_once('/'));
    let Some((span, total)) = parts else { return false };
    let Some((first, last)) = span.split_once('-') else { return false };
    let [first, last] = [first, last].map(|at| at.parse::<u64>().ok());
    let is_total = total == "*" || total.parse() == Ok(size);
    is_total && first == Some(from) && last.is_some_and(|last| from <= last && last < size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_go_on_where_the_part_ends() {
        for good in ["bytes 4-9/10", "bytes 4-9/*", "bytes 4-6/10"] {
            assert!(goes_on(good, 4, 10), "{good}");
        }
        for bad in [
            "bytes 0-9/10",
            "bytes 5-9/10",
            "bytes 4-9/11",
            "bytes 4-10/10",
            "bytes 4-3/10",
            "bytes */10",
            "4-9/10",
            "bytes 4-9",
            "",
            "bytes 4-9/99999999999999999999",
        ] {
            assert!(!goes_on(bad, 4, 10), "{bad}");
        }
    }
}
