//! Decisions recorded from the `laya` package, all of which must be made again. How they were recorded: `tests/data/README.md`.

use serde_json::{Value, json};

use super::{Hints, LanguageGuess, Registry, Rules};
use crate::json::json_text;

/// Decides as the recorded router did.
fn decide(row: &Value) -> Value {
    let registry = Registry::default();
    let auto_task = row["auto_task"] == true;
    let default = if auto_task { "english" } else { "multilingual" };
    let hint = |key: &str| row["hints"][key].as_str();
    let hints = Hints {
        model: hint("model"),
        task: hint("task"),
        lang: hint("lang"),
        lang_guess: hint("lang_guess").map(LanguageGuess::Code),
    };
    let rules = Rules { registry: &registry, default, auto_task, lang_guess: None };
    match rules.decide(&row["state"], &row["questions"], hints) {
        Ok(decision) => decision.to_json(),
        Err(error) => json!({"error": error.to_string()}),
    }
}

/// The state and both decisions of each row that is decided differently.
fn differences(rows: &[Value]) -> Vec<String> {
    let compare = |row: &Value| {
        let decided = decide(row);
        // As text, so that the order of keys and the spelling of numbers count too.
        (json_text(&decided) != json_text(&row["decision"]))
            .then(|| format!("{}\n  recorded {}\n  decided  {decided}", row["state"], row["decision"]))
    };
    rows.iter().filter_map(compare).collect()
}

#[test]
fn states_of_every_kind_are_decided_as_recorded() {
    let text = include_str!("../../tests/data/routing.jsonl");
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(rows.len() > 300, "{} rows", rows.len());
    let different = differences(&rows);
    assert!(different.is_empty(), "{} of {}:\n{}", different.len(), rows.len(), different.join("\n"));
}

#[test]
fn the_shared_routing_fixture_is_decided_as_recorded() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tilewright-models/tests/fixtures/laya/cases/routing.json");
    let fixture: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let rows = fixture["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 24);
    let different = differences(rows);
    assert!(different.is_empty(), "{}", different.join("\n"));
}
