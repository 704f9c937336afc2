//! Bearer keys with names, compared in constant time, and how often each may ask.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};
use tilewright_core::{Error, Result};

use crate::fault::Fault;

/// The variable that may hold keys, as the lines of a key file or separated by commas.
pub const KEYS_ENV: &str = "TILEWRIGHT_KEYS";

/// A key.
#[derive(Debug)]
struct Key {
    name: String,
    /// SHA-256 of the secret: all are equally long, and the secret itself is not kept.
    hash: [u8; 32],
    /// Requests a second.
    rate: Option<f64>,
    bucket: Mutex<Bucket>,
}

/// Requests that may be sent at once; it fills up with time.
#[derive(Debug)]
struct Bucket {
    left: f64,
    at: Instant,
}

/// Who may ask.
#[derive(Debug)]
pub struct Auth {
    file: Option<PathBuf>,
    env: Option<String>,
    keys: RwLock<Vec<Key>>,
}

impl Auth {
    /// Keys of a file and of the environment's text. With neither, everyone may ask.
    ///
    /// # Errors
    /// A file that cannot be read, a line that is no key, two keys of one name, no key at all where a file was given.
    pub fn new(file: Option<&Path>, env: Option<&str>) -> Result<Self> {
        let env = env.filter(|text| !text.trim().is_empty()).map(str::to_owned);
        let auth = Auth { file: file.map(Path::to_owned), env, keys: RwLock::default() };
        auth.reload()?;
        Ok(auth)
    }

    /// Reads the file again. If that fails, the keys stay.
    pub fn reload(&self) -> Result<()> {
        let mut keys = Vec::new();
        if let Some(path) = &self.file {
            let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
            keys.extend(parse(text.lines(), &path.display().to_string())?);
            if keys.is_empty() {
                return Err(Error::config(format!("{} holds no key", path.display()), "write NAME:SECRET in a line"));
            }
        }
        if let Some(text) = &self.env {
            keys.extend(parse(text.split([',', '\n']), KEYS_ENV)?);
        }
        for (i, key) in keys.iter().enumerate() {
            if keys[..i].iter().any(|k| k.name == key.name || k.hash == key.hash) {
                return Err(Error::config(format!("the key {} is given twice", key.name), "keep one of them"));
            }
        }
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = keys;
        Ok(())
    }

    /// Whether a key is needed.
    pub fn is_on(&self) -> bool {
        !self.keys.read().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// The name of the key in an `Authorization` header; none if no key is needed. Takes the same time whichever key it is, and if it is none.
    pub fn check(&self, header: Option<&[u8]>) -> Result<Option<String>, Fault> {
        let keys = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        if keys.is_empty() {
            return Ok(None);
        }
        let given = header.and_then(bearer).ok_or(Fault::Unauthenticated)?;
        let hash: [u8; 32] = Sha256::digest(given).into();
        let mut found = u32::MAX;
        for (i, key) in keys.iter().enumerate() {
            let same: Choice = key.hash[..].ct_eq(&hash[..]);
            found = u32::conditional_select(&found, &(i as u32), same);
        }
        let key = keys.get(found as usize).ok_or(Fault::Unauthenticated)?;
        key.spend(Instant::now())?;
        Ok(Some(key.name.clone()))
    }
}

impl Key {
    fn spend(&self, now: Instant) -> Result<(), Fault> {
        let Some(rate) = self.rate else { return Ok(()) };
        let most = rate.max(1.0);
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        bucket.left = (bucket.left + now.saturating_duration_since(bucket.at).as_secs_f64() * rate).min(most);
        bucket.at = now;
        if bucket.left < 1.0 {
            return Err(Fault::RateLimited(Duration::from_secs_f64((1.0 - bucket.left) / rate)));
        }
        bucket.left -= 1.0;
        Ok(())
    }
}

/// The token of `Bearer TOKEN`, whatever its bytes are.
fn bearer(header: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = header.split_at_checked(7)?;
    let token = token.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !token.is_empty()).then_some(token)
}

/// `NAME:SECRET` or `NAME:SECRET:RATE`, one a line; blank lines and those that begin with `#` are passed over.
fn parse<'a>(lines: impl Iterator<Item = &'a str>, source: &str) -> Result<Vec<Key>> {
    let mut keys = Vec::new();
    for (i, line) in lines.enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        // Never the line itself: it holds a secret.
        let bad = |what: &str| {
            Error::config(format!("{source}, line {}: {what}", i + 1), "write NAME:SECRET or NAME:SECRET:RATE")
        };
        let mut parts = line.split(':').map(str::trim);
        let (name, secret, rate) = (parts.next().unwrap_or_default(), parts.next(), parts.next());
        let secret = secret.filter(|s| !s.is_empty() && !name.is_empty()).ok_or_else(|| bad("no name or no secret"))?;
        if parts.next().is_some() {
            return Err(bad("too many parts; a secret holds no colon"));
        }
        let rate = match rate {
            None => None,
            Some(text) => Some(
                text.parse()
                    .ok()
                    .filter(|r: &f64| r.is_finite() && *r > 0.0)
                    .ok_or_else(|| bad("the rate is no positive number of requests a second"))?,
            ),
        };
        let bucket = Mutex::new(Bucket { left: rate.unwrap_or(0.0).max(1.0), at: Instant::now() });
        keys.push(Key { name: name.to_owned(), hash: Sha256::digest(secret).into(), rate, bucket });
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auth(env: &str) -> Auth {
        Auth::new(None, Some(env)).unwrap()
    }

    #[test]
    fn without_keys_everyone_may_ask_whatever_the_header() {
        let auth = Auth::new(None, None).unwrap();
        assert!(!auth.is_on());
        for header in [None, Some(&b"Bearer x"[..]), Some(&b"\xff"[..])] {
            assert_eq!(auth.check(header), Ok(None));
        }
        assert!(!Auth::new(None, Some("  ")).unwrap().is_on(), "a blank value is none");
    }

    #[test]
    fn a_key_is_told_by_its_name_and_others_are_refused() {
        let auth = auth("alice:one, bob:two");
        assert_eq!(auth.check(Some(b"Bearer one")), Ok(Some("alice".into())));
        assert_eq!(auth.check(Some(b"bearer  two ")), Ok(Some("bob".into())));
        for header in [
            None,
            Some(&b"Bearer"[..]),
            Some(b"Bearer "),
            Some(b"Bearer three"),
            Some(b"Basic one"),
            Some(b"one"),
            Some(b"Bearer on"),
        ] {
            assert_eq!(auth.check(header), Err(Fault::Unauthenticated), "{header:?}");
        }
    }

    #[test]
    fn trap_25_a_bearer_of_any_bytes_is_refused_and_nothing_more() {
        assert_eq!(auth("a:b").check(Some("Bearer schlüssel".as_bytes())), Err(Fault::Unauthenticated));
        assert_eq!(auth("a:b").check(Some(b"Bearer \xff\xfe")), Err(Fault::Unauthenticated));
    }

    #[test]
    fn a_key_that_asks_too_often_is_told_when_to_come_back() {
        let auth = auth("slow:s:2, free:f");
        for _ in 0..2 {
            assert!(auth.check(Some(b"Bearer s")).is_ok());
        }
        let Err(Fault::RateLimited(wait)) = auth.check(Some(b"Bearer s")) else { panic!() };
        assert!(wait <= Duration::from_millis(500));
        for _ in 0..50 {
            assert!(auth.check(Some(b"Bearer f")).is_ok(), "the other key is not touched");
        }
        let keys = auth.keys.read().unwrap();
        assert!(keys[0].spend(Instant::now() + Duration::from_millis(600)).is_ok(), "half a second brings one");
    }

    #[test]
    fn key_files_are_read_and_what_is_wrong_is_told_without_the_secret() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("keys");
        std::fs::write(&file, "# who\n\nalice:one\nbob:two:10\n").unwrap();
        let auth = Auth::new(Some(&file), None).unwrap();
        assert!(auth.check(Some(b"Bearer two")).is_ok());
        for (text, what) in [
            ("hunter2", "line 1: no name or no secret"),
            ("a:hunter2:x", "rate"),
            ("a:hunter2:0", "rate"),
            ("a:hunter2:1:2", "too many"),
            ("a:hunter2\na:x", "twice"),
            ("# none", "no key"),
        ] {
            std::fs::write(&file, text).unwrap();
            let message = auth.reload().unwrap_err().to_string();
            assert!(message.contains(what) && !message.contains("hunter2"), "{message}");
            assert!(auth.check(Some(b"Bearer one")).is_ok(), "the keys before stay");
        }
        std::fs::write(&file, "carol:three").unwrap();
        auth.reload().unwrap();
        assert!(auth.check(Some(b"Bearer one")).is_err());
    }
}
