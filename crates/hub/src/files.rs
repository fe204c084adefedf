//! Selects the files of a repository that a model folder needs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::cache::is_sha256;

/// Files next to the weights, in download order. `tokenizer.json` is the last, so that a folder with it has them all.
const SMALL: [&str; 8] = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.json",
];

/// Index of a sharded checkpoint.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// Largest accepted index in bytes; one with 100,000 tensors has 10 MB.
const LONGEST_INDEX: u64 = 64 << 20;

/// Name of a checkpoint in a single file.
const WEIGHTS: &str = "model.safetensors";

/// The part of a repository to download.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    Model,
    Tokenizer,
}

/// A commit and its files, from the Hub's listing.
#[derive(Debug, Deserialize)]
pub(crate) struct Listing {
    pub(crate) sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Debug, Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

/// Additional fields of a large file in a listing.
#[derive(Debug, Deserialize)]
struct Lfs {
    sha256: Option<String>,
}

/// The part of an index that names files.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Names of files to download, weights last.
pub(crate) struct Files(Vec<String>);

impl Listing {
    pub(crate) fn has(&self, name: &str) -> bool {
        self.file(name).is_some()
    }

    pub(crate) fn size(&self, name: &str) -> Option<u64> {
        self.file(name)?.size
    }

    /// Returns the SHA-256 of a file in lower case; `None` if absent or malformed.
    pub(crate) fn sha256(&self, name: &str) -> Option<String> {
        let sum = self.file(name)?.lfs.as_ref()?.sha256.as_ref();
        sum.filter(|sum| is_sha256(sum)).map(|sum| sum.to_ascii_lowercase())
    }

    fn file(&self, name: &str) -> Option<&Sibling> {
        self.siblings.iter().find(|sibling| sibling.rfilename == name)
    }
}

impl Files {
    pub(crate) fn of_tokenizer(listing: &Listing) -> Self {
        let small = SMALL.into_iter().filter(|name| listing.has(name));
        Self(small.map(str::to_owned).collect())
    }

    /// Selects the files of a model; `None` without weights in safetensors.
    pub(crate) fn of_model(listing: &Listing) -> Option<Self> {
        listing.has(WEIGHTS).then(|| {
            let mut files = Self::of_tokenizer(listing);
            files.0.push(WEIGHTS.to_owned());
            files
        })
    }

    /// Selects the files of a sharded model. The index comes before the shards, so that missing shards are noticed.
    pub(crate) fn of_shards(listing: &Listing, index: &Path) -> Result<Self, String> {
        let mut files = Self::of_tokenizer(listing);
        files.0.push(INDEX.to_owned());
        for shard in shards(index)? {
            if !listing.has(&shard) {
                return Err(format!("{INDEX} names {shard}, which does not exist"));
            }
            files.0.push(shard);
        }
        Ok(files)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// Returns the total bytes of all files with a known size.
    pub(crate) fn bytes(&self, listing: &Listing) -> u64 {
        self.names().filter_map(|name| listing.size(name)).fold(0, u64::saturating_add)
    }
}

impl Wanted {
    /// Returns true if a folder has all required files. They come last, so optional files are then there too.
    pub(crate) fn is_whole(self, folder: &Path) -> bool {
        let has = |name: &str| folder.join(name).is_file();
        match self {
            Self::Tokenizer => has("tokenizer.json"),
            Self::Model if has(INDEX) => {
                let shards = shards(&folder.join(INDEX));
                has("config.json") && shards.is_ok_and(|all| all.iter().all(|shard| has(shard)))
            }
            Self::Model => has("config.json") && has(WEIGHTS),
        }
    }
}

/// Reads the file names in an index; returns an error for a name that could leave the folder.
fn shards(index: &Path) -> Result<BTreeSet<String>, String> {
    let broken = |why: std::io::Error| format!("{INDEX}: {why}");
    if fs::metadata(index).map_err(broken)?.len() > LONGEST_INDEX {
        return Err(format!("{INDEX} has more than {LONGEST_INDEX} bytes"));
    }
    let text = fs::read_to_string(index).map_err(broken)?;
    let Index { weight_map } =
        serde_json::from_str(&text).map_err(|why| format!("{INDEX} is malformed: {why}"))?;
    let shards: BTreeSet<String> = weight_map.into_values().collect();
    let is_plain =
        |name: &&String| name.ends_with(".safetensors") && !name.contains(['/', '\\', ':', '\0']);
    match shards.iter().find(|name| !is_plain(name)) {
        Some(other) => Err(format!("{INDEX} names `{other}`, which is not a safetensors file")),
        None if shards.is_empty() => Err(format!("{INDEX} names no files")),
        None => Ok(shards),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(names: &[&str]) -> Listing {
        let siblings =
            names.iter().map(|&name| Sibling { rfilename: name.into(), size: Some(7), lfs: None });
        Listing { sha: "c0ffee".to_owned(), siblings: siblings.collect() }
    }

    fn index(shards: &[&str]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("temporary file");
        let map: BTreeMap<String, &&str> =
            shards.iter().enumerate().map(|(at, shard)| (at.to_string(), shard)).collect();
        let json = serde_json::json!({ "metadata": {}, "weight_map": map });
        fs::write(file.path(), json.to_string()).expect("written");
        file
    }

    #[test]
    fn a_model_takes_what_it_is_loaded_from_and_weights_last() {
        let all = listing(&[
            ".gitattributes",
            "README.md",
            "model.safetensors",
            "config.json",
            "tokenizer.json",
            "pytorch_model.bin",
            "model.gguf",
            "onnx/model.onnx",
            "original/config.json",
            "chat_template.jinja",
            "consolidated.safetensors",
        ]);
        let files = Files::of_model(&all).expect("weights");
        let want = ["config.json", "chat_template.jinja", "tokenizer.json", "model.safetensors"];
        assert_eq!((files.names().collect::<Vec<_>>(), files.bytes(&all)), (want.to_vec(), 28));
        assert_eq!(Files::of_tokenizer(&all).names().collect::<Vec<_>>(), want[..3]);
        assert!(Files::of_model(&listing(&["config.json", "pytorch_model.bin"])).is_none());
    }

    #[test]
    fn shards_are_those_of_the_index() {
        let [one, two] = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"];
        let all = listing(&["config.json", INDEX, one, two, "model-x.safetensors"]);
        let files = Files::of_shards(&all, index(&[two, one, two]).path()).expect("shards");
        assert_eq!(files.names().collect::<Vec<_>>(), ["config.json", INDEX, one, two]);
        for (bad, word) in [
            (&["../x.safetensors"][..], "not a safetensors file"),
            (&["C:x.safetensors"], "not a safetensors file"),
            (&["x.bin"], "not a safetensors file"),
            (&["absent.safetensors"], "does not exist"),
            (&[], "names no files"),
        ] {
            let said = Files::of_shards(&all, index(bad).path()).err().expect("refused");
            assert!(said.contains(word), "{said}");
        }
    }

    #[test]
    fn an_index_without_end_is_not_read() {
        let long = tempfile::NamedTempFile::new().expect("temporary file");
        long.as_file().set_len(LONGEST_INDEX + 1).expect("sparse");
        let said = shards(long.path()).expect_err("refused");
        assert!(said.contains("more than"), "{said}");
    }

    #[test]
    fn a_folder_is_whole_with_config_and_every_shard() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let add = |name: &str| fs::write(dir.path().join(name), "").expect("written");
        let is_whole = |wanted: Wanted| wanted.is_whole(dir.path());
        add("config.json");
        assert!(!is_whole(Wanted::Model) && !is_whole(Wanted::Tokenizer));
        add("tokenizer.json");
        assert!(!is_whole(Wanted::Model) && is_whole(Wanted::Tokenizer));
        add(WEIGHTS);
        assert!(is_whole(Wanted::Model));
        let file = index(&["a.safetensors", "b.safetensors"]);
        fs::copy(file.path(), dir.path().join(INDEX)).expect("copied");
        add("a.safetensors");
        assert!(!is_whole(Wanted::Model), "the index counts where there is one");
        add("b.safetensors");
        assert!(is_whole(Wanted::Model));
    }
}
