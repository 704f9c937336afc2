//! SHA-256 sums of a checkpoint's files, checked before any of them is parsed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};
use tilewright_core::{Error, Result};

use crate::json::{brief, object};

/// Expected sums in hexadecimal, by path relative to the checkpoint.
pub type Digests = BTreeMap<String, String>;

/// Names a JSON object of sums that every load is held to, unless the caller gives its own.
pub const DIGESTS_ENV: &str = "LAYA_SHA256_DIGESTS";

const HINT: &str =
    "give an object of SHA-256 sums by path relative to the checkpoint, such as {\"model.safetensors\": \"9f86d0...\"}";

/// Reads an object of sums; `source` stands in errors.
pub fn parse(json: &str, source: &str) -> Result<Digests> {
    let map = object(json.as_bytes(), Path::new(source), HINT)?;
    let entry = |(path, sum): (String, Value)| match sum {
        Value::String(sum) => Ok((path, sum)),
        other => {
            let what = format!("the sum of `{path}` is {}", brief(&other));
            Err(Error::format(Path::new(source), 0, what, HINT))
        }
    };
    map.into_iter().map(entry).collect()
}

/// The sums that the environment asks for; a blank variable asks for none.
pub fn from_env(value: Option<&str>) -> Result<Option<Digests>> {
    value.map(str::trim).filter(|v| !v.is_empty()).map(|v| parse(v, DIGESTS_ENV)).transpose()
}

/// Compares each named file of `dir` with its sum.
pub(crate) fn verify(dir: &Path, digests: &Digests) -> Result<()> {
    for (name, want) in digests {
        let path = dir.join(relative(name)?);
        if !path.is_file() {
            let source = std::io::Error::new(
                std::io::ErrorKind::NotFound,
                "a SHA-256 sum is given for it, but there is no such file; complete the checkpoint or correct the sums",
            );
            return Err(Error::Io { action: "verify", path, source });
        }
        let found = sha256(&path)?;
        if !found.eq_ignore_ascii_case(want.trim()) {
            let what = format!("SHA-256 is {found}, {} is expected", want.trim());
            return Err(Error::format(
                &path,
                0,
                what,
                "the file was changed or damaged; fetch it again, or correct the sums",
            ));
        }
    }
    Ok(())
}

/// A path that stays inside of the checkpoint on every system.
fn relative(name: &str) -> Result<PathBuf> {
    let drive = name.as_bytes().get(1) == Some(&b':') && name.as_bytes()[0].is_ascii_alphabetic();
    let escapes = name.split('/').any(|part| part == ".." || part.is_empty() || part == ".");
    if drive || escapes || name.contains(['\\', '\0']) {
        let what = format!("`{name}` in the SHA-256 sums is not a path inside of the checkpoint");
        return Err(Error::config(what, "name files as `model.safetensors` or `tokenizer/tokenizer.json`"));
    }
    Ok(name.split('/').collect())
}

/// The sum of a file in lowercase hexadecimal.
pub fn sha256(path: &Path) -> Result<String> {
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => hash.update(&buffer[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(Error::io("read", path)(e)),
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    fn folder() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        std::fs::write(dir.path().join("sub/a.txt"), "abc").unwrap();
        dir
    }

    fn check(name: &str, sum: &str) -> Result<()> {
        let dir = folder();
        verify(dir.path(), &Digests::from([(name.to_owned(), sum.to_owned())]))
    }

    #[test]
    fn a_matching_sum_passes_in_any_case_and_with_blanks_around() {
        check("sub/a.txt", ABC).unwrap();
        check("sub/a.txt", &format!(" {}\n", ABC.to_uppercase())).unwrap();
    }

    #[test]
    fn a_changed_file_is_named_with_both_sums() {
        let message = check("sub/a.txt", &ABC.replace('b', "c")).unwrap_err().to_string();
        assert!(message.contains("a.txt") && message.contains(ABC) && message.contains("fetch it again"), "{message}");
        assert!(check("sub/a.txt", "").is_err());
    }

    #[test]
    fn a_listed_file_must_exist() {
        for name in ["b.txt", "sub", "sub/b.txt"] {
            let error = check(name, ABC).unwrap_err();
            assert!(
                matches!(&error, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound),
                "{error}"
            );
        }
    }

    #[test]
    fn paths_that_leave_the_checkpoint_are_refused_before_any_file_is_read() {
        for name in [
            "/etc/passwd",
            "../a",
            "sub/../../a",
            "sub/..",
            "..",
            "",
            "a//b",
            "sub\\a.txt",
            "\\a",
            "C:/a",
            "c:a",
            "./a",
            "a\0",
        ] {
            let message = check(name, ABC).unwrap_err().to_string();
            assert!(message.contains("not a path inside"), "{name}: {message}");
        }
    }

    #[test]
    fn the_environment_holds_an_object_of_texts_or_nothing() {
        assert_eq!(from_env(None).unwrap(), None);
        assert_eq!(from_env(Some("  ")).unwrap(), None);
        let sums = from_env(Some(r#"{"a": "12"}"#)).unwrap().unwrap();
        assert_eq!(sums, Digests::from([("a".into(), "12".into())]));
        for bad in ["x", "[]", r#"{"a": 1}"#] {
            assert!(from_env(Some(bad)).unwrap_err().to_string().contains(DIGESTS_ENV), "{bad}");
        }
    }
}
