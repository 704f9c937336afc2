//! More results of the `laya` package, with the real model: `fixtures/cases.json` and what `fixtures/record.py` made of it.

mod support;

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use serde_json::Value;
use support::{fixtures, last_digits, options};
use tilewright_decide::{Agent, CalibrationFile, OpenOptions, Result, SHORTLIST_K, TOURNAMENT_GROUP};
use tilewright_models::laya::Laya;

/// Checkpoints that are open.
type Opened = HashMap<String, Agent<Laya>>;

/// The outcome of one case as JSON.
fn run(case: &Value, opened: &mut Opened) -> Result<Value> {
    let checkpoint = case.get("checkpoint").and_then(Value::as_str).unwrap_or("tiny-en");
    let languages = case.get("languages").cloned();
    let open =
        |languages| Agent::open(&fixtures().join(checkpoint), &OpenOptions { languages, ..OpenOptions::default() });
    let mut changed;
    let agent = match case.get("calibration") {
        None if languages.is_none() => match opened.entry(checkpoint.to_owned()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(free) => free.insert(open(None)?),
        },
        calibration => {
            changed = open(languages)?;
            if let Some(calibration) = calibration {
                changed = changed.with_calibration(&CalibrationFile::parse(calibration)?);
            }
            &mut changed
        }
    };
    let state = case.get("state").cloned().unwrap_or_else(|| "The state.".into());
    let (questions, given) = (&case["questions"], &case["options"]);
    let options = options(given)?;
    let number = |key: &str| given.get(key).and_then(Value::as_u64).map(|n| n as usize);
    Ok(match case["kind"].as_str().unwrap() {
        "predict" => agent.predict(&state, questions, &options)?.to_json(),
        "predict_long" => {
            agent.predict_long(&state, questions, number("window"), number("stride"), &options)?.to_json()
        }
        "tournament" => {
            let group = number("group_size").unwrap_or(TOURNAMENT_GROUP);
            agent.predict_tournament(&state, questions, group, &options)?.to_json()
        }
        "shortlist" => {
            agent.predict_shortlist(&state, questions, number("k").unwrap_or(SHORTLIST_K), &options)?.to_json()
        }
        _ => agent.decide(&state, &case["schema"], &options)?.values.into(),
    })
}

/// Compares all cases whose names begin with `prefix`.
fn compare(prefix: &str) {
    let folder = std::path::PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures"));
    let recorded = support::read_json(folder.join("recorded.json"));
    let (mut compared, mut rounded, mut opened) = (0, HashMap::new(), Opened::new());
    for (name, case) in support::read_json(folder.join("cases.json")).as_object().unwrap() {
        if !name.starts_with(prefix) {
            continue;
        }
        let expected = &recorded[name];
        match run(case, &mut opened) {
            Ok(result) => {
                assert_eq!(expected["ok"], true, "{name}: answered, expected {expected}");
                rounded.insert(name.clone(), last_digits(&result, &expected["result"], name));
            }
            Err(error) => {
                assert_eq!(expected["message"], error.to_string(), "{name}");
                assert_eq!(expected["error_type"], error.kind(), "{name}");
            }
        }
        compared += 1;
    }
    assert!(compared > 5, "{compared} cases of {prefix}");
    let numbers: usize = rounded.values().sum();
    // A few of the hundreds that are compared lie on an edge.
    assert!(numbers <= 8, "numbers rounded to the other side: {rounded:?}");
}

#[test]
fn refused_requests_are_refused_with_the_recorded_words() {
    compare("error: ");
}

#[test]
fn odd_requests_have_the_recorded_results() {
    compare("predict: ");
}

#[test]
fn long_states_have_the_recorded_windows_and_answers() {
    compare("long: ");
}

#[test]
fn shortlists_and_tournaments_have_the_recorded_results() {
    compare("narrowed: ");
}

#[test]
fn schemas_are_decided_and_refused_as_recorded() {
    compare("schema: ");
}
