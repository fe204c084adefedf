//! Models by name, from the Hugging Face Hub or a mirror of it.
//!
//! [`Hub::model`] downloads the files that a model folder needs, and no others, into the cache that
//! `huggingface_hub` keeps too, and gives the folder. All files are of one commit. Weights come last, and
//! the name of a revision leads to a commit only once all of it is there, so that a download which breaks
//! off leaves nothing that passes for a model; the next one goes on where it ended.

mod error;
mod files;
mod name;
mod progress;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use hf_hub::api::sync::{Api, ApiBuilder, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

pub use error::HubError;
use files::{Files, INDEX, Listing, Wanted};
pub use name::{BadName, ModelName};
pub use progress::Progress;
use progress::Tally;

/// Where models come from, and where they are kept.
#[derive(Debug)]
pub struct Hub {
    endpoint: String,
    token: Option<String>,
    cache: Cache,
    offline: bool,
}

impl Hub {
    /// The Hub at an address, asked with a token or without one, and a folder that keeps what came.
    pub fn new(endpoint: &str, token: Option<String>, cache: PathBuf) -> Self {
        let endpoint = endpoint.trim().trim_end_matches('/').to_owned();
        Self { endpoint, token, cache: Cache::new(cache), offline: false }
    }

    /// As the environment says, by the variables of `huggingface_hub`: `HF_ENDPOINT`; `HF_TOKEN`, or the
    /// file that `hf auth login` writes; `HF_HUB_CACHE`, or `hub` in `HF_HOME`; `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// [`HubError::NoCache`] without a home.
    pub fn from_env() -> Result<Self, HubError> {
        Self::from_vars(|name| env::var(name).ok(), dirs::home_dir())
    }

    /// A variable that is empty is none.
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

    /// Asks the network for nothing.
    #[must_use]
    pub fn offline(self) -> Self {
        Self { offline: true, ..self }
    }

    /// The folder of a model with all that it is loaded from. `progress` hears of what comes by the network.
    ///
    /// # Errors
    /// See [`HubError`]; [`HubError::NotCached`] alone where no network is asked.
    pub fn model(
        &self,
        model: &ModelName,
        progress: impl FnMut(Progress<'_>),
    ) -> Result<PathBuf, HubError> {
        self.folder(model, Wanted::Model, progress)
    }

    /// A folder with a model's tokenizer and chat template, perhaps without its weights.
    ///
    /// # Errors
    /// As [`Hub::model`]'s.
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
        if self.offline {
            let kept = self.kept(model).filter(|folder| wanted.is_whole(folder));
            return kept.ok_or_else(|| HubError::NotCached {
                model: model.clone(),
                cache: self.cache.path().clone(),
            });
        }
        let of = |api_error| HubError::of(api_error, self, model);
        let mut builder = ApiBuilder::from_cache(self.cache.clone())
            .with_endpoint(self.endpoint.clone())
            .with_token(self.token.clone())
            .with_progress(false);
        builder = builder.with_user_agent("flashover", env!("CARGO_PKG_VERSION"));
        let api = builder.build().map_err(of)?;
        let listing = self.listing(&api, model)?;
        let mut download = Download {
            hub: self,
            model,
            commit: &listing.sha,
            api: api.repo(repo(model, &listing.sha)),
            tally: Tally::new(&mut progress),
        };
        download.begin()?;
        let files = match wanted {
            Wanted::Tokenizer => Files::of_tokenizer(&listing),
            Wanted::Model if listing.has(INDEX) => {
                let index = download.file(&listing, INDEX)?;
                Files::of_shards(&listing, &index).map_err(|why| self.broken(model, &why))?
            }
            Wanted::Model => Files::of_model(&listing)
                .ok_or_else(|| HubError::NoSafetensors { model: model.clone() })?,
        };
        download.tally.expect(files.bytes(&listing));
        let mut folder = None;
        for file in files.names() {
            folder = download.file(&listing, file)?.parent().map(Path::to_owned);
        }
        let folder =
            folder.ok_or_else(|| self.broken(model, "it has none of the files of a model"))?;
        // A name that leads to a folder without weights would hide a whole one from a run without network.
        if wanted == Wanted::Model || self.kept(model).is_none() {
            let named = self.cache.repo(repo(model, model.revision()));
            named.create_ref(&listing.sha).map_err(|why| self.disk(&why))?;
        }
        Ok(folder)
    }

    /// The commit that the revision stands for, and its files.
    fn listing(&self, api: &Api, model: &ModelName) -> Result<Listing, HubError> {
        let asked = api.repo(repo(model, model.revision())).info_request().query("blobs", "true");
        let answer = asked.call().map_err(|why| HubError::of(Box::new(why).into(), self, model))?;
        let listing: Listing =
            answer.into_json().map_err(|why| self.broken(model, &why.to_string()))?;
        match listing.sha.chars().all(|c| c.is_ascii_alphanumeric()) && !listing.sha.is_empty() {
            true => Ok(listing),
            false => Err(self.broken(model, "it names no commit")),
        }
    }

    /// The folder of the commit that was whole last, or that the revision names.
    fn kept(&self, model: &ModelName) -> Option<PathBuf> {
        let folder = self.cache.path().join(repo(model, "").folder_name());
        let commit = fs::read_to_string(folder.join("refs").join(model.revision()));
        let commit = commit.map_or_else(|_| model.revision().to_owned(), |c| c.trim().to_owned());
        Some(folder.join("snapshots").join(commit)).filter(|folder| folder.is_dir())
    }

    fn broken(&self, model: &ModelName, why: &str) -> HubError {
        let (endpoint, why) = (self.endpoint.clone(), why.to_owned());
        HubError::Answer { model: model.clone(), endpoint, why }
    }

    fn disk(&self, why: &std::io::Error) -> HubError {
        HubError::Disk { cache: self.cache.path().clone(), why: why.to_string() }
    }
}

fn repo(model: &ModelName, revision: &str) -> Repo {
    Repo::with_revision(model.name().to_owned(), RepoType::Model, revision.to_owned())
}

/// The files of one commit on their way into the cache.
struct Download<'a> {
    hub: &'a Hub,
    model: &'a ModelName,
    commit: &'a str,
    api: ApiRepo,
    tally: Tally<'a>,
}

impl Download<'_> {
    /// Lets what `huggingface_hub` has of this commit be found: it keeps names of branches alone.
    fn begin(&self) -> Result<(), HubError> {
        let kept = self.hub.cache.repo(repo(self.model, self.commit));
        kept.create_ref(self.commit).map_err(|why| self.hub.disk(&why))
    }

    /// The file's path, after a download unless it is there and whole.
    fn file(&mut self, listing: &Listing, name: &str) -> Result<PathBuf, HubError> {
        let size = listing.size(name);
        let is_whole = |path: &Path| {
            let there = path.metadata().map(|meta| meta.len());
            size.map_or(there.is_ok(), |size| there.is_ok_and(|there| there == size))
        };
        let kept = self.hub.cache.repo(repo(self.model, self.commit)).get(name);
        if let Some(path) = kept.filter(|path| is_whole(path)) {
            self.tally.had(name, size.unwrap_or(0));
            return Ok(path);
        }
        let downloaded = self.api.download_with_progress(name, self.tally.file(name));
        let path = downloaded.map_err(|why| HubError::of(why, self.hub, self.model))?;
        if is_whole(&path) {
            return Ok(path);
        }
        // hf-hub takes what came for the whole.
        for part in [path.canonicalize().ok(), Some(path)].into_iter().flatten() {
            fs::remove_file(part).map_err(|why| self.hub.disk(&why))?;
        }
        let why = "the file is not as long as it was said to be".to_owned();
        Err(HubError::Interrupted { model: self.model.clone(), why })
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
            assert_eq!(Path::new(hub.cache.path()), cache, "{vars:?}");
            assert_eq!(hub.token.as_deref(), token, "{vars:?}");
            assert!(!hub.offline && hub.endpoint == "https://huggingface.co", "{hub:?}");
        }
        let hub_of = hub(&[("HF_HOME", "/h")], None).expect("a home");
        assert_eq!(Path::new(hub_of.cache.path()), "/h/hub");
        let error = hub(&[("HF_HOME", "")], None).expect_err("no home");
        assert!(matches!(error, HubError::NoCache), "{error}");
    }
}
