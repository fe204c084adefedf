use std::path::PathBuf;

use crate::failure::Failure;
use crate::{Hub, ModelName};

/// The reason that a model cannot be downloaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    #[error(
        "{endpoint} has no model {model}\n\
         hint: check owner, name and revision; they are written as on the model's page"
    )]
    NoModel { model: ModelName, endpoint: String },
    /// Access is denied. The Hub also answers so for models that do not exist, if the user is unknown.
    #[error("{endpoint} does not give {model} to {who} (status {status})\nhint: {hint}")]
    Refused {
        model: ModelName,
        endpoint: String,
        who: &'static str,
        status: u16,
        hint: &'static str,
    },
    #[error(
        "{endpoint} is not reached: {why}\n\
         hint: check the network, HTTPS_PROXY and HF_ENDPOINT; --offline or HF_HUB_OFFLINE=1 takes what \
         was downloaded before"
    )]
    Unreachable { endpoint: String, why: String },
    #[error(
        "{model} has no weights in safetensors\n\
         hint: look for a repository with model.safetensors, or convert it: `save_pretrained` of \
         transformers writes it"
    )]
    NoSafetensors { model: ModelName },
    #[error(
        "{model} is not whole in the cache, {}\n\
         hint: run once without --offline and HF_HUB_OFFLINE", .cache.display()
    )]
    NotCached { model: ModelName, cache: PathBuf },
    #[error(
        "the download of {model} broke off: {why}\n\
         hint: run it again; what is there is not downloaded twice"
    )]
    Interrupted { model: ModelName, why: String },
    /// The server's answer is not a valid one of a Hub.
    #[error(
        "{endpoint} answers for {model} with what cannot be used: {why}\n\
         hint: try again later; HF_ENDPOINT must be a Hub or a mirror of it"
    )]
    Answer { model: ModelName, endpoint: String, why: String },
    #[error(
        "{model} is being downloaded by another program: {} is locked\n\
         hint: wait for it, or end it", .lock.display()
    )]
    Busy { model: ModelName, lock: PathBuf },
    /// The path for the partial file of an earlier download exists but is not a file.
    #[error(
        "what is there of {model} cannot be gone on with\n\
         hint: delete the files that end in .incomplete under {}", .cache.display()
    )]
    Leftover { model: ModelName, cache: PathBuf },
    #[error(
        "cannot write to the cache {}: {why}\n\
         hint: HF_HUB_CACHE names a folder on a disk that has room", .cache.display()
    )]
    Disk { cache: PathBuf, why: String },
    #[error("there is no home for a cache\nhint: HF_HUB_CACHE and HF_HOME name folders")]
    NoCache,
}

impl HubError {
    pub(crate) fn from_failure(failure: Failure, hub: &Hub, model: &ModelName) -> Self {
        let (model, endpoint) = (model.clone(), hub.endpoint.clone());
        match failure {
            Failure::Status { status: 404, elsewhere: None, .. } => {
                Self::NoModel { model, endpoint }
            }
            Failure::Status { status: status @ (401 | 403), elsewhere: None, .. } => {
                let (who, hint) = asker(hub.token.is_some());
                Self::Refused { model, endpoint, who, status, hint }
            }
            Failure::Status { status, elsewhere, wait } => {
                let by = elsewhere.map(|host| format!(" of {host}, where it sends on to"));
                let wait = wait.map(|wait| format!(", to be asked again in {wait:?}"));
                let [by, wait] = [by, wait].map(Option::unwrap_or_default);
                Self::Answer { model, endpoint, why: format!("status {status}{by}{wait}") }
            }
            Failure::Unreached { why, .. } => Self::Unreachable { endpoint, why },
            Failure::Broke(why) => Self::Interrupted { model, why },
            Failure::Unusable(why) | Failure::Wrong(why) => Self::Answer { model, endpoint, why },
            Failure::Disk(why) => hub.disk(&why),
        }
    }
}

/// Describes the user and gives a hint, for an error message.
const fn asker(has_token: bool) -> (&'static str, &'static str) {
    if has_token {
        (
            "the account of this token",
            "accept the model's terms on its page with that account, or give HF_TOKEN a token that may \
             read it",
        )
    } else {
        (
            "everybody",
            "it is gated, private or misspelt: accept its terms on its page, and set HF_TOKEN to a token \
             of that account or run `hf auth login`",
        )
    }
}
