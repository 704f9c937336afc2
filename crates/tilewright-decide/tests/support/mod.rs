//! What the tests of decisions share: the tiny checkpoints, the recorded cases, and a model that remembers recorded scores.

#![allow(dead_code)]

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tilewright_decide::{Agent, Gate, PredictOptions, Tokenizer};
use tilewright_models::laya::{AgentConfig, Row, RowScores, Scorer};

pub const CHECKPOINTS: [&str; 3] = ["tiny-en", "tiny-multi", "tiny-parallel"];

/// The overrides that the recorded agents were loaded with.
pub fn languages() -> Value {
    json!({"de": {"temperature": [2.5, 1.0, 1.0], "temperature_by_options": {"noul:2": 3.0}}})
}

pub fn fixtures() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tilewright-models/tests/fixtures/laya"))
}

pub fn read_json(path: PathBuf) -> Value {
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// One recorded case: `{"case": .., "expected": ..}`.
pub fn case(name: &str) -> Value {
    read_json(fixtures().join("cases").join(format!("{name}.json")))
}

/// All recorded cases of a kind, by name.
pub fn cases(kind: &str) -> Vec<(String, Value)> {
    let mut cases: Vec<(String, Value)> = std::fs::read_dir(fixtures().join("cases"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().unwrap() != "routing.json")
        .map(|path| (path.file_stem().unwrap().to_str().unwrap().to_owned(), read_json(path)))
        .filter(|(_, value)| value["case"]["kind"] == kind)
        .collect();
    cases.sort_by(|a, b| a.0.cmp(&b.0));
    cases
}

pub fn tokenizer(checkpoint: &str) -> Tokenizer {
    Tokenizer::open(&fixtures().join(checkpoint).join("tokenizer")).unwrap()
}

pub fn config(checkpoint: &str) -> AgentConfig {
    let path = fixtures().join(checkpoint).join("rl_agent_config.json");
    AgentConfig::parse(&std::fs::read(&path).unwrap(), &path).unwrap()
}

/// The rows of every call so far.
pub type Calls = Arc<Mutex<Vec<Vec<Row>>>>;

/// A model that knows some rows, and makes up others by their ids. It notes all that it was asked.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    known: HashMap<Vec<u32>, RowScores>,
    pub calls: Calls,
}

impl Recorded {
    /// Knows the rows of a recorded case.
    pub fn of(case: &Value) -> Self {
        let mut recorded = Recorded::default();
        for detail in case["expected"]["questions_detail"].as_object().into_iter().flatten().map(|(_, d)| d) {
            let scores =
                RowScores { logits: floats(&detail["logits_slot_order"]), act_logits: floats(&detail["act_logits"]) };
            recorded.known.insert(ids(&detail["token_ids"]), scores);
        }
        recorded
    }
}

impl Scorer for Recorded {
    fn score(&mut self, rows: &[Row]) -> tilewright_core::Result<Vec<RowScores>> {
        self.calls.lock().unwrap().push(rows.to_vec());
        Ok(rows.iter().map(|row| self.known.get(&row.ids).cloned().unwrap_or_else(|| made_up(row))).collect())
    }

    fn embed(&mut self, rows: &[Vec<u32>]) -> tilewright_core::Result<Vec<Vec<f32>>> {
        Ok(rows.iter().map(|row| (0..4).map(|i| noise(row, i)).collect()).collect())
    }
}

/// Scores that depend on every id of the row.
fn made_up(row: &Row) -> RowScores {
    RowScores {
        logits: row.markers.iter().map(|&m| noise(&row.ids, m)).collect(),
        act_logits: vec![noise(&row.ids, 1000), 0.0],
    }
}

fn noise(ids: &[u32], salt: u32) -> f32 {
    let hash = ids
        .iter()
        .chain([&salt])
        .fold(0xcbf2_9ce4_8422_2325u64, |h, &id| (h ^ u64::from(id)).wrapping_mul(0x0000_0100_0000_01b3));
    (hash >> 40) as f32 / (1u64 << 24) as f32 * 8.0 - 4.0
}

pub fn agent(checkpoint: &str, scorer: Recorded) -> Agent<Recorded> {
    let agent = Agent::new(scorer, tokenizer(checkpoint), config(checkpoint));
    agent.with_languages(&languages()).unwrap()
}

/// An agent of the English checkpoint with made-up scores, and the rows that it will have asked for.
pub fn english() -> (Agent<Recorded>, Calls) {
    let scorer = Recorded::default();
    let calls = scorer.calls.clone();
    (agent("tiny-en", scorer), calls)
}

/// The options of a case; refused ones are an error as they are in the call.
pub fn options(options: &Value) -> tilewright_decide::Result<PredictOptions> {
    let number = |key: &str| options.get(key).and_then(Value::as_u64).map(|n| n as usize);
    Ok(PredictOptions {
        lang: options.get("lang").and_then(Value::as_str).map(str::to_owned),
        max_len: number("max_len"),
        head_max_len: number("head_max_len"),
        batch_size: number("batch_size"),
        sort_by_length: options.get("sort_by_length").and_then(Value::as_bool).unwrap_or(false),
        gate: options.get("min_confidence").filter(|v| !v.is_null()).map(Gate::parse).transpose()?,
    })
}

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

pub fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

/// How many numbers of two results differ by one in the fourth decimal. All else is equal, also the order of members and how numbers are spelled.
pub fn last_digits(ours: &Value, theirs: &Value, place: &str) -> usize {
    match (ours, theirs) {
        (Value::Object(a), Value::Object(b)) => {
            assert!(a.keys().eq(b.keys()), "{place}: {ours} and {theirs}");
            a.iter().map(|(key, value)| last_digits(value, &b[key], &format!("{place}.{key}"))).sum()
        }
        (Value::Array(a), Value::Array(b)) => {
            assert_eq!(a.len(), b.len(), "{place}");
            a.iter().zip(b).map(|(a, b)| last_digits(a, b, place)).sum()
        }
        (Value::Number(a), Value::Number(b)) if a != b => {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            assert!((a - b).abs() < 1.01e-4 && a.fract() != 0.0, "{place}: {a} and {b}");
            // Similarities are not rounded.
            usize::from(!place.contains(".scores"))
        }
        _ => {
            assert_eq!(ours, theirs, "{place}");
            0
        }
    }
}
