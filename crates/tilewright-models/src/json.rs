//! Reading fields of configuration files, with errors that name file and field.

use std::path::Path;

use serde_json::{Map, Value};
use tilewright_core::{Error, Result};

/// An object of a JSON file.
pub(crate) struct Fields<'a> {
    path: &'a Path,
    hint: &'static str,
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// `hint` ends every error: the next thing to try.
    pub(crate) fn new(path: &'a Path, hint: &'static str, object: &'a Map<String, Value>) -> Self {
        Fields { path, hint, object }
    }

    pub(crate) fn error(&self, what: impl Into<String>) -> Error {
        Error::format(self.path, 0, what, self.hint)
    }

    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name)
    }

    /// The value, unless the field is absent or null.
    pub(crate) fn present(&self, name: &str) -> Option<&'a Value> {
        self.get(name).filter(|v| !v.is_null())
    }

    pub(crate) fn wrong(&self, name: &str, value: &Value, want: &str) -> Error {
        self.error(format!("`{name}` is {}, {want} is expected", brief(value)))
    }

    /// A whole number from 0 on.
    pub(crate) fn count(&self, name: &str, default: Option<usize>) -> Result<usize> {
        match (self.get(name), default) {
            (None, Some(default)) => Ok(default),
            (None, None) => Err(self.error(format!("there is no `{name}`"))),
            (Some(value), _) => {
                let count = value.as_u64().and_then(|n| usize::try_from(n).ok());
                count.ok_or_else(|| self.wrong(name, value, "a whole number from 0 on"))
            }
        }
    }

    /// A whole number from 1 on that leaves room for products of several of them.
    pub(crate) fn size(&self, name: &str, default: Option<usize>) -> Result<usize> {
        let size = self.count(name, default)?;
        if size == 0 || size > 1 << 24 {
            return Err(self.error(format!("`{name}` is {size}, a number in 1..=16777216 is expected")));
        }
        Ok(size)
    }

    /// A finite number above 0.
    pub(crate) fn positive(&self, name: &str, default: f64) -> Result<f64> {
        match self.present(name) {
            None => Ok(default),
            Some(value) => {
                let number = value.as_f64().filter(|x| x.is_finite() && *x > 0.0);
                number.ok_or_else(|| self.wrong(name, value, "a number above 0"))
            }
        }
    }

    pub(crate) fn flag(&self, name: &str, default: bool) -> Result<bool> {
        match self.present(name) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(name, value, "true or false")),
        }
    }

    /// A word that has only one supported value, which is also the default.
    pub(crate) fn only(&self, name: &str, supported: &str) -> Result<()> {
        match self.present(name) {
            Some(value) if value.as_str() != Some(supported) => {
                Err(self.error(format!("`{name}` is {}; only \"{supported}\" is supported", brief(value))))
            }
            _ => Ok(()),
        }
    }
}

/// Parses a file that must hold an object. `NaN` and infinities, which Python writes and reads, become the strings of their names.
pub(crate) fn object(json: &[u8], path: &Path, hint: &'static str) -> Result<Map<String, Value>> {
    let bad = |what: String| Error::format(path, 0, what, hint);
    let parsed = serde_json::from_slice(json)
        .or_else(|error| without_non_finite(json).map_or(Err(error), |json| serde_json::from_slice(&json)));
    match parsed {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(bad(format!("an object is expected, not {}", brief(&other)))),
        Err(error) => Err(bad(format!("not valid JSON: {error}"))),
    }
}

/// The text with `NaN`, `Infinity` and `-Infinity` in quotes; `None` when there are none outside of strings.
fn without_non_finite(json: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(json.len() + 16);
    let (mut quoted, mut found, mut i) = (false, false, 0);
    while i < json.len() {
        if !quoted
            && let Some(word) = [&b"NaN"[..], b"-Infinity", b"Infinity"].iter().find(|w| json[i..].starts_with(w))
        {
            out.push(b'"');
            out.extend_from_slice(word);
            out.push(b'"');
            i += word.len();
            found = true;
            continue;
        }
        match json[i] {
            b'"' => quoted = !quoted,
            b'\\' if quoted => {
                out.push(b'\\');
                i += 1;
                if i == json.len() {
                    break;
                }
            }
            _ => {}
        }
        out.push(json[i]);
        i += 1;
    }
    found.then_some(out)
}

/// A value in an error message, however long it is.
pub(crate) fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Map<String, Value>> {
        object(text.as_bytes(), Path::new("a.json"), "look again")
    }

    #[test]
    fn python_s_non_finite_numbers_are_read_as_their_names() {
        let map = parsed(r#"{"a": [NaN, -Infinity, Infinity], "b": "NaN \" Infinity"}"#).unwrap();
        assert_eq!(map["a"], serde_json::json!(["NaN", "-Infinity", "Infinity"]));
        assert_eq!(map["b"], "NaN \" Infinity");
    }

    #[test]
    fn what_is_no_object_is_refused_with_file_and_hint() {
        for text in ["", "[1]", "3", "{", "{\"a\": NaN", "nul", "{\"a\": \"NaN\\"] {
            let message = parsed(text).unwrap_err().to_string();
            assert!(message.contains("a.json") && message.contains("look again"), "{text}: {message}");
        }
    }

    #[test]
    fn a_long_value_is_shortened_at_a_character() {
        let long = brief(&Value::String("ä".repeat(100)));
        assert!(long.ends_with("ä...") && long.chars().count() == 63, "{long}");
    }

    #[test]
    fn numbers_are_neither_texts_nor_flags() {
        let map = parsed(r#"{"s": "3", "t": true, "f": 2.5, "n": -1, "z": 0, "big": 123456789012345678901234567890}"#)
            .unwrap();
        let fields = Fields::new(Path::new("a.json"), "look again", &map);
        for name in ["s", "t", "f", "n", "big"] {
            let message = fields.count(name, None).unwrap_err().to_string();
            assert!(message.contains(&format!("`{name}`")), "{message}");
        }
        assert_eq!(fields.count("z", None).unwrap(), 0);
        assert!(fields.size("z", None).is_err());
        assert!(fields.flag("n", false).is_err());
        assert!(fields.positive("n", 1.0).is_err());
        assert!(fields.count("absent", None).unwrap_err().to_string().contains("there is no `absent`"));
    }
}
