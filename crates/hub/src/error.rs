use std::path::PathBuf;

use crate::failure::Failure;
use crate::{Hub, ModelName};

/// The reason that a model cannot be downloaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    #[error(
        "{endpoint} has no model {model}\nhint: check owner, name and revision against the \
         model's page"
    )]
    NoModel { model: ModelName, endpoint: String },
    /// Access is denied. The Hub also answers so for models that do not exist, if the user is unknown.
    #[error("{endpoint} denies {model} to {who} (status {status})\nhint: {hint}")]
    Refused {
        model: ModelName,
        endpoint: String,
        who: &'static str,
        status: u16,
        hint: &'static str,
    },
    #[error(
        "cannot reach {endpoint}: {why}\nhint: check the network, HTTPS_PROXY and HF_ENDPOINT, or \
         use the cache with --offline or HF_HUB_OFFLINE=1"
    )]
    Unreachable { endpoint: String, why: String },
    #[error(
        "{model} has no weights in safetensors\nhint: find a repository with model.safetensors, \
         or convert the weights with `save_pretrained` of transformers"
    )]
    NoSafetensors { model: ModelName },
    #[error(
        "{model} is not complete in the cache, {}\nhint: run once without --offline and \
         HF_HUB_OFFLINE", .cache.display()
    )]
    NotCached { model: ModelName, cache: PathBuf },
    #[error(
        "the download of {model} was interrupted: {why}\nhint: run it again; it resumes from the \
         downloaded part"
    )]
    Interrupted { model: ModelName, why: String },
    /// The server's answer is not a valid one of a Hub.
    #[error(
        "{endpoint} sent an unusable response for {model}: {why}\nhint: try again later, and \
         check that HF_ENDPOINT is a Hub or a mirror of it"
    )]
    Answer { model: ModelName, endpoint: String, why: String },
    #[error(
        "another program is downloading {model}: {} is locked\nhint: wait for it, or end it",
        .lock.display()
    )]
    Busy { model: ModelName, lock: PathBuf },
    /// The path for the partial file of an earlier download exists but is not a file.
    #[error(
        "the partial download of {model} cannot be resumed\nhint: delete the files that end in \
         .incomplete under {}", .cache.display()
    )]
    Leftover { model: ModelName, cache: PathBuf },
    #[error(
        "cannot write to the cache {}: {why}\nhint: set HF_HUB_CACHE to a folder on a disk with \
         free space", .cache.display()
    )]
    Disk { cache: PathBuf, why: String },
    #[error("no home folder for the cache\nhint: set HF_HUB_CACHE or HF_HOME to a folder")]
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
                let by = elsewhere.map(|host| format!(" of {host}, the target of its redirect"));
                let wait = wait.map(|wait| format!(", retry after {wait:?}"));
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
            "accept the model's terms on its page with that account, or set HF_TOKEN to a token \
             that may read it",
        )
    } else {
        (
            "anonymous users",
            "check the name; for a gated or private model, accept its terms on its page, and set \
             HF_TOKEN to a token of that account or run `hf auth login`",
        )
    }
}
