//! The line protocol between the harness and an arm: one JSON object a line, a request on standard input, its answer on standard output.
//!
//! `docs/bench-protocol.md` is the published text. Nothing an arm says is trusted: lines are limited, numbers are checked, unknown keys are passed over.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Version told in `hello`.
pub const VERSION: u32 = 1;
/// Longest line an arm may say.
pub const MAX_LINE: usize = 1 << 20;
/// Longest list that a metric may be.
pub const MAX_LIST: usize = 65536;
/// Bytes and nanoseconds above this (2^53) are no measurement.
const MAX_NUMBER: f64 = 9007199254740992.0;

/// What the harness says.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "do", rename_all = "lowercase")]
pub enum Request {
    /// Who are you?
    Hello {
        /// [`VERSION`].
        protocol: u32,
    },
    /// Read these inputs and get ready.
    Prepare {
        /// Seed of whatever the arm draws itself.
        seed: u64,
        /// The case's parameters, such as shapes.
        params: BTreeMap<String, Value>,
        /// The files of the ring, raw little-endian.
        inputs: Vec<InputFile>,
    },
    /// Do the work once on an input of the ring, and time it.
    Run {
        /// Index into the ring.
        input: usize,
    },
    /// Say goodbye and end with exit code 0.
    Quit {},
}

impl Request {
    /// The word of `do`, which the answer repeats in `ok`.
    pub fn word(&self) -> &'static str {
        match self {
            Request::Hello { .. } => "hello",
            Request::Prepare { .. } => "prepare",
            Request::Run { .. } => "run",
            Request::Quit {} => "quit",
        }
    }

    /// The line, without its end.
    pub fn line(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// One tensor of one input of the ring.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InputFile {
    /// Index into the ring.
    pub index: usize,
    /// The tensor's name.
    pub name: String,
    /// Where its bytes are.
    pub path: String,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    /// `f32` or `i32`.
    pub dtype: String,
    /// Of the file.
    pub sha256: String,
}

/// A number or a list of numbers told beside the time, such as a loss or logits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, try_from = "Value")]
pub enum Metric {
    /// One number.
    Number(f64),
    /// Several.
    List(Vec<f64>),
}

impl TryFrom<Value> for Metric {
    type Error = &'static str;

    fn try_from(value: Value) -> Result<Self, Self::Error> {
        let metric = match &value {
            Value::Array(list) => list.iter().map(Value::as_f64).collect::<Option<Vec<_>>>().map(Metric::List),
            value => value.as_f64().map(Metric::Number),
        };
        metric.ok_or("a metric is a number or a list of numbers")
    }
}

/// The answer to `hello`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// Name and version in words.
    pub name: String,
    /// Versions of libraries, threads, instruction set, math mode: whatever decides the speed.
    pub fingerprint: BTreeMap<String, Value>,
}

/// The answer to `run`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ran {
    /// By the arm's own monotonic clock.
    pub ns: f64,
    /// By the device's events.
    pub device_ns: Option<f64>,
    /// Live when the window began.
    pub live_bytes: Option<u64>,
    /// Most that was live inside the window.
    pub peak_bytes: Option<u64>,
    /// A digest of the outputs.
    pub output: Option<String>,
    /// Beside the time.
    pub metrics: BTreeMap<String, Metric>,
}

/// An understood answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// To `hello`.
    Hello(Hello),
    /// To `prepare`: SHA-256 of what was read as (index, name, digest), and the bytes live now.
    Prepared(Vec<(usize, String, String)>, Option<u64>),
    /// To `run`.
    Ran(Ran),
    /// To `quit`.
    Quit,
}

/// Why an answer is none.
#[derive(Debug, Clone, PartialEq)]
pub enum Nonsense {
    /// Not of the protocol; what was wrong.
    Garbage(String),
    /// A time that is not positive.
    NegativeTime(String),
    /// The arm itself said `error`.
    Refused(String),
}

/// Reads the answer to the request whose word is `asked`.
pub fn parse(line: &str, asked: &str) -> Result<Answer, Nonsense> {
    let garbage = |what: String| Nonsense::Garbage(format!("{what} in `{}`", shortened(line)));
    if line.len() > MAX_LINE {
        return Err(garbage(format!("a line of {} bytes, more than {MAX_LINE}", line.len())));
    }
    let value: Value = serde_json::from_str(line).map_err(|e| garbage(format!("no JSON ({e})")))?;
    let object = value.as_object().ok_or_else(|| garbage("no JSON object".to_owned()))?;
    if let Some(error) = object.get("error") {
        return Err(Nonsense::Refused(shortened(error.as_str().unwrap_or(&error.to_string()))));
    }
    match object.get("ok").and_then(Value::as_str) {
        Some(word) if word == asked => {}
        Some(word) => return Err(garbage(format!("`{}` instead of `{asked}`", shortened(word)))),
        None => return Err(garbage("neither `ok` nor `error`".to_owned())),
    }
    let number = |key: &str| match object.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(v) => match v.as_f64() {
            Some(n) if n.abs() <= MAX_NUMBER => Ok(Some(n)),
            _ => Err(garbage(format!("`{key}` is no number"))),
        },
    };
    let bytes = |key: &str| match number(key)? {
        Some(n) if n < 0.0 || n.fract() != 0.0 => Err(garbage(format!("`{key}` is no number of bytes"))),
        n => Ok(n.map(|n| n as u64)),
    };
    let text = |key: &str| object.get(key).and_then(Value::as_str).map(shortened);
    Ok(match asked {
        "hello" => {
            let fingerprint = object.get("fingerprint").and_then(Value::as_object);
            let fingerprint = fingerprint.into_iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
            Answer::Hello(Hello { name: text("name").unwrap_or_default(), fingerprint })
        }
        "prepare" => {
            let mut inputs = Vec::new();
            for input in object.get("inputs").and_then(Value::as_array).into_iter().flatten() {
                let index = input["index"].as_u64().ok_or_else(|| garbage("an input without `index`".to_owned()))?;
                let [name, sha256] = [&input["name"], &input["sha256"]].map(|v| v.as_str().unwrap_or("").to_owned());
                inputs.push((index as usize, name, sha256));
            }
            Answer::Prepared(inputs, bytes("live_bytes")?)
        }
        "run" => {
            let ns = number("ns")?.ok_or_else(|| garbage("no `ns`".to_owned()))?;
            let device_ns = number("device_ns")?;
            for (key, time) in [("ns", Some(ns)), ("device_ns", device_ns)] {
                if time.is_some_and(|t| t <= 0.0) {
                    let time = time.unwrap_or_default();
                    return Err(Nonsense::NegativeTime(format!("`{key}` is {time}; a time must be above 0")));
                }
            }
            let mut metrics = BTreeMap::new();
            for (name, value) in object.get("metrics").and_then(Value::as_object).into_iter().flatten() {
                let short = value.as_array().is_none_or(|list| list.len() <= MAX_LIST);
                let metric = Metric::try_from(value.clone()).ok().filter(|_| short);
                let metric = metric.ok_or_else(|| garbage(format!("metric `{}` is no number", shortened(name))))?;
                metrics.insert(name.clone(), metric);
            }
            let (live_bytes, peak_bytes) = (bytes("live_bytes")?, bytes("peak_bytes")?);
            if live_bytes.zip(peak_bytes).is_some_and(|(live, peak)| peak < live) {
                return Err(garbage("`peak_bytes` below `live_bytes`".to_owned()));
            }
            Answer::Ran(Ran { ns, device_ns, live_bytes, peak_bytes, output: text("output"), metrics })
        }
        _ => Answer::Quit,
    })
}

/// The beginning of a text, for messages and records.
pub fn shortened(text: &str) -> String {
    const LIMIT: usize = 160;
    let clean: String = text.chars().take(LIMIT).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(LIMIT).is_some() { clean + "..." } else { clean }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::SplitMix;

    const RUN: &str = r#"{"ok":"run","ns":1500,"device_ns":900.5,"live_bytes":10,"peak_bytes":20,"output":"ab","metrics":{"loss":2.5,"logits":[1,-2.5]}}"#;

    #[test]
    fn a_full_answer_is_understood() {
        let Ok(Answer::Ran(ran)) = parse(RUN, "run") else { panic!() };
        assert_eq!((ran.ns, ran.device_ns, ran.live_bytes, ran.peak_bytes), (1500.0, Some(900.5), Some(10), Some(20)));
        assert_eq!(ran.output.as_deref(), Some("ab"));
        assert_eq!(ran.metrics["logits"], Metric::List(vec![1.0, -2.5]));
    }

    #[test]
    fn unknown_keys_are_passed_over_and_null_is_absent() {
        let Ok(Answer::Ran(ran)) = parse(r#"{"ok":"run","ns":1,"device_ns":null,"colour":"red"}"#, "run") else {
            panic!()
        };
        assert_eq!((ran.device_ns, ran.live_bytes), (None, None));
    }

    #[test]
    fn requests_are_one_line_with_their_word() {
        let prepare = Request::Prepare { seed: 1, params: BTreeMap::new(), inputs: vec![] };
        assert_eq!(prepare.line(), r#"{"do":"prepare","seed":1,"params":{},"inputs":[]}"#);
        for request in [Request::Hello { protocol: 1 }, Request::Run { input: 0 }, Request::Quit {}, prepare] {
            let value: Value = serde_json::from_str(&request.line()).unwrap();
            assert_eq!(value["do"], request.word());
        }
    }

    #[test]
    fn garbage_is_told_with_what_was_said() {
        for (line, what) in [
            ("Segmentation fault", "no JSON"),
            ("[]", "no JSON object"),
            ("{}", "neither"),
            (r#"{"ok":"quit"}"#, "instead of `run`"),
            (r#"{"ok":"run"}"#, "no `ns`"),
            (r#"{"ok":"run","ns":"fast"}"#, "no number"),
            (r#"{"ok":"run","ns":1e300}"#, "no number"),
            (r#"{"ok":"run","ns":1,"live_bytes":-4}"#, "no number of bytes"),
            (r#"{"ok":"run","ns":1,"live_bytes":1.5}"#, "no number of bytes"),
            (r#"{"ok":"run","ns":1,"live_bytes":9,"peak_bytes":4}"#, "below"),
            (r#"{"ok":"run","ns":1,"metrics":{"loss":"low"}}"#, "metric `loss`"),
        ] {
            let Err(Nonsense::Garbage(message)) = parse(line, "run") else { panic!("{line}") };
            assert!(message.contains(what), "{line}: {message}");
        }
    }

    #[test]
    fn times_that_are_not_positive_are_an_error_of_their_own() {
        for line in [r#"{"ok":"run","ns":-5}"#, r#"{"ok":"run","ns":0}"#, r#"{"ok":"run","ns":5,"device_ns":-1}"#] {
            assert!(matches!(parse(line, "run"), Err(Nonsense::NegativeTime(_))), "{line}");
        }
    }

    #[test]
    fn an_arm_s_own_refusal_is_passed_on_shortened() {
        let line = format!(r#"{{"error":"{}"}}"#, "x".repeat(5000));
        let Err(Nonsense::Refused(words)) = parse(&line, "run") else { panic!() };
        assert!(words.len() < 200);
    }

    #[test]
    fn no_mutation_of_an_answer_breaks_the_parser() {
        let seeds = [
            RUN,
            r#"{"ok":"prepare","inputs":[{"index":0,"name":"x","sha256":"00"}]}"#,
            r#"{"ok":"hello","name":"a","fingerprint":{"t":2}}"#,
        ];
        let mut rng = SplitMix::new(77);
        let mut accepted = 0;
        for round in 0..30_000 {
            let mut bytes = seeds[round % seeds.len()].as_bytes().to_vec();
            for _ in 0..=rng.below(4) {
                let at = rng.below(bytes.len());
                match rng.below(5) {
                    0 => bytes[at] = rng.next_u64() as u8,
                    1 => drop(bytes.remove(at)),
                    2 => bytes.insert(at, b"\"{}[]:,-0e9\\u\0"[rng.below(14)]),
                    3 => bytes.truncate(at.max(1)),
                    _ => bytes.extend_from_within(at..),
                }
                if bytes.is_empty() {
                    bytes.push(b'{');
                }
            }
            let line = String::from_utf8_lossy(&bytes);
            for asked in ["hello", "prepare", "run", "quit"] {
                if let Ok(Answer::Ran(ran)) = parse(&line, asked) {
                    accepted += 1;
                    assert!(ran.ns > 0.0 && ran.ns.is_finite(), "{line}");
                }
            }
        }
        assert!(accepted > 100, "the mutations must reach behind the first check: {accepted}");
    }

    #[test]
    fn deep_nesting_and_long_lines_are_refused() {
        assert!(parse(&"[".repeat(100_000), "run").is_err());
        assert!(parse(&format!(r#"{{"ok":"run","ns":1,"x":"{}"}}"#, "y".repeat(MAX_LINE)), "run").is_err());
    }
}
