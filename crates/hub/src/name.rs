//! Names of models.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// A model name: `owner/name` or `owner/name@revision`. The revision is a branch, a tag or a commit, by default `main`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelName {
    name: String,
    revision: String,
}

/// A text that is not a valid [`ModelName`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not the name of a model\nhint: use owner/name or owner/name@revision, as on the Hub"
)]
pub struct BadName(pub String);

impl ModelName {
    /// Returns the name that a path spells; none if the path exists or spells no name.
    pub fn from_path(path: &Path) -> Option<Self> {
        path.to_str()?.parse().ok().filter(|_| !path.exists())
    }

    /// Returns `owner/name`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the branch, tag or commit.
    pub fn revision(&self) -> &str {
        &self.revision
    }
}

impl FromStr for ModelName {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        let bad = || BadName(text.to_owned());
        let (name, revision) = text.split_once('@').unwrap_or((text, "main"));
        let (owner, own) = name.split_once('/').ok_or_else(bad)?;
        let parts = [owner, own].into_iter().chain(revision.split('/'));
        match parts.into_iter().all(is_part) {
            true => Ok(Self { name: name.to_owned(), revision: revision.to_owned() }),
            false => Err(bad()),
        }
    }
}

/// Returns true if `part` is safe as a component of a URL and of a path.
fn is_part(part: &str) -> bool {
    let known = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let edges = |c: char| c == '.' || c == '-';
    !part.is_empty()
        && part.len() <= 96
        && part.chars().all(known)
        && !part.starts_with(edges)
        && !part.ends_with(edges)
        && !part.contains("..")
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.revision.as_str() {
            "main" => f.write_str(&self.name),
            revision => write!(f, "{}@{revision}", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_an_owner_and_perhaps_a_revision() {
        for (text, name, revision) in [
            ("owner/name", "owner/name", "main"),
            ("a-b/Llama-3.2_1B", "a-b/Llama-3.2_1B", "main"),
            ("owner/name@v1.0", "owner/name", "v1.0"),
            ("owner/name@refs/pr/1", "owner/name", "refs/pr/1"),
        ] {
            let model: ModelName = text.parse().expect("a name");
            assert_eq!(
                (model.name(), model.revision(), model.to_string()),
                (name, revision, text.into())
            );
        }
    }

    #[test]
    fn paths_are_no_names() {
        for bad in [
            "", "name", "/name", "owner/", "a/b/c", "./model", "../model", "a/..", "a/b@",
            "a/b@../x", "a/b@x//y", "/a/b", "a b/c", "a/b?x", "~/model", "a/-b", "a/b.", "a/b@c@d",
        ] {
            let said = bad.parse::<ModelName>().expect_err(bad).to_string();
            assert!(said.contains("\nhint: "), "{said}");
        }
    }
}
