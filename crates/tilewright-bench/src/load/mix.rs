//! What is asked: a JSON Lines file, one request a line.
//!
//! A line is the body itself, which is sent byte for byte, or an object with a key `body`: `{"name": "long", "path": "/v1/systemone/batch",
//! "weight": 0.2, "body": {...}}`. Requests are drawn by weight, with a seed.

use std::path::Path;

use serde_json::Value;
use sha2::{Digest, Sha256};
use tilewright_core::{Error, Result};

use crate::rng::SplitMix;

/// Larger files are no mix of requests.
const MAX_BYTES: u64 = 256 << 20;

/// One request.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// What reports call it.
    pub name: String,
    /// Instead of the URL's path.
    pub path: Option<String>,
    /// What is sent.
    pub body: Vec<u8>,
    /// How often it is drawn, relative to the others.
    pub weight: f64,
}

/// All of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Mix {
    /// In the file's order.
    pub requests: Vec<Request>,
    /// Of the file.
    pub sha256: String,
    cumulative: Vec<f64>,
}

impl Mix {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Mix> {
        let size = std::fs::metadata(path).map_err(Error::io("read", path))?.len();
        if size > MAX_BYTES {
            let what = format!("{size} bytes are too many for a mix of requests");
            return Err(Error::format(path, 0, what, "give a file of at most 256 MiB"));
        }
        let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
        Mix::parse(&bytes, path)
    }

    /// Reads the bytes of a file; `path` is for errors.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Mix> {
        let mut requests = Vec::new();
        let mut offset = 0;
        for (number, line) in bytes.split(|b| *b == b'\n').enumerate() {
            let at = offset;
            offset += line.len() as u64 + 1;
            let line = line.trim_ascii();
            if line.is_empty() {
                continue;
            }
            let bad = |what: String| {
                let hint = "write one JSON object a line: a request's body, or {\"body\": ..., \"path\": ..., \"weight\": ...}";
                Error::format(path, at, format!("line {}: {what}", number + 1), hint)
            };
            requests.push(request(line, requests.len()).map_err(bad)?);
        }
        let mut sum = 0.0;
        let cumulative: Vec<f64> = requests
            .iter()
            .map(|r| {
                sum += r.weight;
                sum
            })
            .collect();
        if requests.is_empty() || !(sum > 0.0 && sum.is_finite()) {
            let hint = "give at least one request whose weight is above 0";
            return Err(Error::format(path, 0, "no request can be drawn from this file", hint));
        }
        let sha256 = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
        Ok(Mix { requests, sha256, cumulative })
    }

    /// Draws a request.
    pub fn draw(&self, rng: &mut SplitMix) -> usize {
        let all = self.cumulative.last().copied().unwrap_or(0.0);
        let at = rng.uniform() * all;
        self.cumulative.partition_point(|c| *c <= at).min(self.requests.len() - 1)
    }
}

fn request(line: &[u8], index: usize) -> Result<Request, String> {
    let value: Value = serde_json::from_slice(line).map_err(|e| e.to_string())?;
    let object = value.as_object().ok_or("not an object")?;
    let name = format!("request {}", index + 1);
    let Some(body) = object.get("body") else {
        return Ok(Request { name, path: None, body: line.to_vec(), weight: 1.0 });
    };
    if let Some(key) = object.keys().find(|k| !["name", "path", "weight", "body"].contains(&k.as_str())) {
        return Err(format!("`{key}` is not known beside `body`"));
    }
    let text = |key: &str| match object.get(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(format!("`{key}` is not a text")),
    };
    let path = text("path")?;
    if path.as_ref().is_some_and(|p| !p.starts_with('/') || p.bytes().any(|b| b <= b' ' || b == 127)) {
        return Err("`path` must begin with / and hold no blank".to_owned());
    }
    let weight = match object.get("weight") {
        None => 1.0,
        Some(w) => w.as_f64().filter(|w| (0.0..=1e9).contains(w)).ok_or("`weight` must be a number, 0 or more")?,
    };
    let body = serde_json::to_vec(body).map_err(|e| e.to_string())?;
    Ok(Request { name: text("name")?.unwrap_or(name), path, body, weight })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Mix> {
        Mix::parse(text.as_bytes(), Path::new("mix.jsonl"))
    }

    #[test]
    fn a_bare_line_is_sent_as_it_stands() {
        let mix = parse("{\"state\":  \"a\", \"big\": 12345678901234567890}\n\n  {\"b\":1.0}\r\n").unwrap();
        assert_eq!(mix.requests[0].body, b"{\"state\":  \"a\", \"big\": 12345678901234567890}");
        assert_eq!(mix.requests[1].body, b"{\"b\":1.0}");
        assert_eq!((mix.requests.len(), mix.sha256.len()), (2, 64));
    }

    #[test]
    fn a_line_with_a_body_may_have_a_path_a_name_and_a_weight() {
        let mix = parse(r#"{"name":"b","path":"/v1/x","weight":3,"body":{"z":1,"a":2}}"#).unwrap();
        let want =
            Request { name: "b".into(), path: Some("/v1/x".into()), body: b"{\"z\":1,\"a\":2}".into(), weight: 3.0 };
        assert_eq!(mix.requests, [want]);
    }

    #[test]
    fn requests_are_drawn_by_weight_and_by_seed() {
        let mix = parse("{\"weight\":3,\"body\":{}}\n{\"weight\":1,\"body\":{}}\n{\"weight\":0,\"body\":{}}").unwrap();
        let draw = |seed| {
            let mut rng = SplitMix::new(seed);
            (0..8000).map(|_| mix.draw(&mut rng)).collect::<Vec<_>>()
        };
        let drawn = draw(1);
        let share = drawn.iter().filter(|i| **i == 0).count() as f64 / 8000.0;
        assert!((share - 0.75).abs() < 0.02, "{share}");
        assert!(!drawn.contains(&2));
        assert_eq!(drawn, draw(1));
        assert_ne!(drawn, draw(2));
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        for (text, words) in [
            ("{}\n[1]", "line 2: not an object"),
            ("{\"state\":", "line 1"),
            ("{\"body\":{},\"colour\":1}", "`colour`"),
            ("{\"body\":{},\"path\":\"x\"}", "`path`"),
            ("{\"body\":{},\"path\":\"/a b\"}", "`path`"),
            ("{\"body\":{},\"weight\":-1}", "`weight`"),
            ("{\"body\":{},\"weight\":0}", "no request"),
            ("\n \n", "no request"),
        ] {
            let message = parse(text).unwrap_err().to_string();
            assert!(message.contains(words) && message.contains("mix.jsonl"), "{text}: {message}");
        }
    }
}
