//! Downloads models by name from the Hugging Face Hub or a mirror.
//!
//! [`Hub::model`] downloads only the files that a model folder needs, and returns the folder. It shares the
//! cache with `huggingface_hub`. All files come from one commit. Weights come last, and the name of a
//! revision refers to a commit only after the download is complete. An interrupted download therefore never
//! looks like a model, and the next one continues it.
//!
//! The server is not trusted. File names are checked before use, and lengths and checksums of large files
//! after the download. A token is sent only to the Hub's own address.

mod cache;
mod client;
mod download;
mod error;
mod failure;
mod files;
mod name;
mod origin;
mod part;
mod patience;
mod progress;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use cache::{Folder, is_commit};
use client::{Client, Token};
use download::Download;
pub use error::HubError;
use failure::Failure;
use files::{Files, INDEX, Listing, Wanted};
pub use name::{BadName, ModelName};
use origin::encoded;
pub use patience::Patience;
pub use progress::Progress;
use progress::Tally;

/// Largest accepted listing in bytes; one with 10,000 files has about 3 MB.
const LONGEST_LISTING: u64 = 64 << 20;

/// A model hub and its local cache.
#[derive(Debug)]
pub struct Hub {
    endpoint: String,
    token: Option<Token>,
    cache: PathBuf,
    offline: bool,
    patience: Patience,
}

impl Hub {
    /// Makes a hub at `endpoint` with an optional access token and a cache folder.
    pub fn new(endpoint: &str, token: Option<String>, cache: PathBuf) -> Self {
        let endpoint = endpoint.trim().trim_end_matches('/').to_owned();
        let token = token.map(Token::new);
        Self { endpoint, token, cache, offline: false, patience: Patience::default() }
    }

    /// Makes a hub from the environment variables of `huggingface_hub`: `HF_ENDPOINT`; `HF_TOKEN`, else the
    /// file that `hf auth login` writes; `HF_HUB_CACHE`, else `hub` in `HF_HOME`; `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// [`HubError::NoCache`] without `HF_HOME` and a home folder.
    pub fn from_env() -> Result<Self, HubError> {
        Self::from_vars(|name| env::var(name).ok(), dirs::home_dir())
    }

    /// Reads the variables through `var`; empty ones count as unset.
    fn from_vars(
        var: impl Fn(&str) -> Option<String>,
        home: Option<PathBuf>,
    ) -> Result<Self, HubError> {
        let said = |name| var(name).filter(|value| !value.trim().is_empty());
        let home = said("HF_HOME")
            .map(PathBuf::from)
            .or_else(|| Some(home?.join(".cache/huggingface")))
            .ok_or(HubError::NoCache)?;
        let token = said("HF_TOKEN").or_else(|| fs::read_to_string(home.join("token")).ok());
        let token = token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        let endpoint = said("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        let offline = said("HF_HUB_OFFLINE").is_some_and(|value| {
            ["1", "on", "yes", "true"].contains(&value.trim().to_lowercase().as_str())
        });
        let cache = said("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from);
        Ok(Self { offline, ..Self::new(&endpoint, token, cache) })
    }

    /// Disables network access, so that only cached models are found.
    #[must_use]
    pub fn offline(self) -> Self {
        Self { offline: true, ..self }
    }

    /// Sets timeouts and retries.
    #[must_use]
    pub fn with_patience(self, patience: Patience) -> Self {
        Self { patience, ..self }
    }

    /// Downloads a model unless it is cached, and returns its folder. `progress` reports the download.
    ///
    /// # Errors
    /// See [`HubError`]; offline only [`HubError::NotCached`].
    pub fn model(
        &self,
        model: &ModelName,
        progress: impl FnMut(Progress<'_>),
    ) -> Result<PathBuf, HubError> {
        self.folder(model, Wanted::Model, progress)
    }

    /// Downloads a model's tokenizer and chat template, and returns the folder, which may lack the weights.
    ///
    /// # Errors
    /// Errors of [`Hub::model`].
    pub fn tokenizer(
        &self,
        model: &ModelName,
        progress: impl FnMut(Progress<'_>),
    ) -> Result<PathBuf, HubError> {
        self.folder(model, Wanted::Tokenizer, progress)
    }

    fn folder(
        &self,
        model: &ModelName,
        wanted: Wanted,
        mut progress: impl FnMut(Progress<'_>),
    ) -> Result<PathBuf, HubError> {
        let folder = Folder::new(&self.cache, model);
        if self.offline {
            let kept = folder.kept(model.revision()).filter(|folder| wanted.is_whole(folder));
            return kept.ok_or_else(|| HubError::NotCached {
                model: model.clone(),
                cache: self.cache.clone(),
            });
        }
        let client = Client::new(&self.endpoint, self.token.as_ref(), self.patience)
            .map_err(|failure| HubError::from_failure(failure, self, model))?;
        let listing = self.listing(&client, model)?;
        let tally = Tally::new(&mut progress);
        let mut download = Download { hub: self, model, client, folder, listing: &listing, tally };
        let files = match wanted {
            Wanted::Tokenizer => Files::of_tokenizer(&listing),
            Wanted::Model if listing.has(INDEX) => {
                let index = download.file(INDEX)?;
                Files::of_shards(&listing, &index).map_err(|why| self.broken(model, &why))?
            }
            Wanted::Model => Files::of_model(&listing)
                .ok_or_else(|| HubError::NoSafetensors { model: model.clone() })?,
        };
        download.tally.expect(files.bytes(&listing));
        let mut path = None;
        for file in files.names() {
            path = download.file(file)?.parent().map(Path::to_owned);
        }
        let path = path.ok_or_else(|| self.broken(model, "it has no files of a model"))?;
        // A revision that refers to a folder without weights would hide a complete one from offline runs.
        let folder = download.folder;
        if wanted == Wanted::Model || folder.kept(model.revision()).is_none() {
            folder.name(model.revision(), &listing.sha).map_err(|why| self.disk(&why))?;
        }
        Ok(path)
    }

    /// Requests the commit of the revision and its files.
    fn listing(&self, client: &Client<'_>, model: &ModelName) -> Result<Listing, HubError> {
        let (name, revision) = (model.name(), encoded(model.revision()));
        let address = format!("/api/models/{name}/revision/{revision}?blobs=true");
        let text = self.patience.retry(|| client.text(&address, LONGEST_LISTING));
        let text = text.map_err(|failure| HubError::from_failure(failure, self, model))?;
        let listing: Listing =
            serde_json::from_slice(&text).map_err(|why| self.broken(model, &why.to_string()))?;
        match is_commit(&listing.sha) {
            true => Ok(listing),
            false => Err(self.broken(model, "it names no commit")),
        }
    }

    fn broken(&self, model: &ModelName, why: &str) -> HubError {
        HubError::from_failure(Failure::Unusable(why.to_owned()), self, model)
    }

    fn disk(&self, why: &std::io::Error) -> HubError {
        HubError::Disk { cache: self.cache.clone(), why: why.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_are_empty_are_none() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let own = dir.path().join(".cache/huggingface");
        fs::create_dir_all(&own).expect("made");
        fs::write(own.join("token"), "kept\n").expect("written");
        let hub = |vars: &[(&str, &str)], home: Option<&Path>| {
            let var = |name: &str| vars.iter().find(|var| var.0 == name).map(|var| var.1.into());
            Hub::from_vars(var, home.map(Path::to_owned))
        };
        for (vars, cache, token) in [
            (&[][..], own.join("hub"), Some("kept")),
            (
                &[("HF_HOME", ""), ("HF_TOKEN", ""), ("HF_HUB_CACHE", " ")],
                own.join("hub"),
                Some("kept"),
            ),
            (&[("HF_HOME", "/h")], "/h/hub".into(), None),
            (&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c")], "/c".into(), None),
            (&[("HF_HUB_CACHE", "/c"), ("HF_TOKEN", " own ")], "/c".into(), Some("own")),
        ] {
            let hub = hub(vars, Some(dir.path())).expect("a home");
            assert_eq!(hub.cache, cache, "{vars:?}");
            assert_eq!(hub.token, token.map(|token| Token::new(token.into())), "{vars:?}");
            assert!(!hub.offline && hub.endpoint == "https://huggingface.co", "{hub:?}");
        }
        let hub_of = hub(&[("HF_HOME", "/h")], None).expect("a home");
        assert_eq!(hub_of.cache, Path::new("/h/hub"));
        let error = hub(&[("HF_HOME", "")], None).expect_err("no home");
        assert!(matches!(error, HubError::NoCache), "{error}");
    }

    #[test]
    fn a_token_is_not_shown() {
        let hub = Hub::new("https://hub.co", Some("hf_secret".to_owned()), "/c".into());
        let shown = format!("{hub:?}");
        assert!(shown.contains("hub.co") && !shown.contains("secret"), "{shown}");
    }
}
