//! URLs: their origin, and targets of redirects.

use ureq::http::Uri;

/// Scheme, host and port of a URL. A token is sent to a single origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    is_https: bool,
    host: String,
    port: u16,
}

impl Origin {
    /// Returns the origin of `uri`; `None` if it is not an http or https URL.
    pub(crate) fn from_uri(uri: &Uri) -> Option<Self> {
        let is_https = match uri.scheme_str()? {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        let host = uri.host().filter(|host| !host.is_empty())?.to_ascii_lowercase();
        let port = match uri.port() {
            Some(port) => port.as_str().parse().ok()?,
            None if is_https => 443,
            None => 80,
        };
        Some(Self { is_https, host, port })
    }

    pub(crate) fn host(&self) -> &str {
        &self.host
    }
}

/// Resolves a `Location` header relative to `base`.
///
/// # Errors
/// The result is not a URL, contains a name or password, or leads from https to http.
pub(crate) fn redirected(base: &Uri, location: &str) -> Result<Uri, String> {
    let bad = || "its redirect has an invalid address".to_owned();
    let location = location.split('#').next().unwrap_or_default();
    let scheme = base.scheme_str().ok_or_else(bad)?;
    let authority = base.authority().ok_or_else(bad)?;
    let is_absolute = location.split(['/', '?']).next().is_some_and(|begin| begin.contains(':'));
    let text = if is_absolute {
        location.to_owned()
    } else if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else if location.starts_with('?') {
        format!("{scheme}://{authority}{}{location}", base.path())
    } else {
        let folder = base.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        format!("{scheme}://{authority}{folder}/{location}")
    };
    let next: Uri = text.parse().map_err(|_| bad())?;
    let to = Origin::from_uri(&next).ok_or_else(bad)?;
    let own = next.authority() == Some(authority);
    if !own && next.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err("it redirects to an address with a user name or password".to_owned());
    }
    if scheme == "https" && !to.is_https {
        return Err(format!("it redirects from https to http, at {}", to.host));
    }
    Ok(next)
}

/// Percent-encodes a URL component, including `/` (as `%2F`).
pub(crate) fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                out.push(char::from(byte));
            }
            other => out.push_str(&format!("%{other:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(text: &str) -> Option<Origin> {
        Origin::from_uri(&text.parse().expect("an address"))
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let hub = origin("https://hub.co/a/b");
        assert!(hub.is_some());
        for same in ["https://HUB.co", "https://hub.co:443/x?y", "https://a:b@hub.co"] {
            assert_eq!(origin(same), hub, "{same}");
        }
        for other in [
            "http://hub.co",
            "https://hub.co:444",
            "https://cdn.hub.co",
            "https://hub.co.evil",
            "http://hub.co:443",
        ] {
            assert_ne!(origin(other), hub, "{other}");
        }
        assert!(origin("ftp://hub.co").is_none() && origin("/a").is_none());
    }

    #[test]
    fn locations_lead_where_browsers_go() {
        let base: Uri = "https://hub.co:8443/a/b?c=d".parse().expect("an address");
        for (location, to) in [
            ("https://cdn.co/x?s=a:b", "https://cdn.co/x?s=a:b"),
            ("HTTPS://cdn.co/x", "https://cdn.co/x"),
            ("//cdn.co/x", "https://cdn.co/x"),
            ("/x/y?z#part", "https://hub.co:8443/x/y?z"),
            ("x?u=http://y", "https://hub.co:8443/a/x?u=http://y"),
            ("?x", "https://hub.co:8443/a/b?x"),
        ] {
            assert_eq!(redirected(&base, location).map(|to| to.to_string()), Ok(to.to_owned()));
        }
        for (location, word) in [
            ("http://hub.co:8443/a", "from https to http"),
            ("https://name:word@cdn.co/x", "user name or password"),
            ("file:///etc/passwd", "an invalid address"),
            ("https://", "an invalid address"),
            ("/a b", "an invalid address"),
        ] {
            let said = redirected(&base, location).expect_err(location);
            assert!(said.contains(word), "{location}: {said}");
            assert!(!said.contains(":word"), "{said}");
        }
        let plain: Uri = "http://hub.co/a".parse().expect("an address");
        assert!(redirected(&plain, "https://hub.co/a").is_ok(), "up is no harm");
    }

    #[test]
    fn parts_of_addresses_stay_parts() {
        assert_eq!(encoded("model-1_a.b~c"), "model-1_a.b~c");
        assert_eq!(encoded("refs/pr/1"), "refs%2Fpr%2F1");
        assert_eq!(encoded("a?b#c%ü"), "a%3Fb%23c%25%C3%BC");
    }
}
