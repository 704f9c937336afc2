//! From a checkpoint's folder to the recorded results, with the real model.

mod support;

use serde_json::Value;
use support::{CHECKPOINTS, cases, fixtures, languages, last_digits, options};
use tilewright_decide::{Agent, OpenOptions, PredictOptions};
use tilewright_models::laya::Laya;

fn open(checkpoint: &str) -> Agent<Laya> {
    let options = OpenOptions { languages: Some(languages()), ..OpenOptions::default() };
    Agent::open(&fixtures().join(checkpoint), &options).unwrap()
}

#[test]
fn predictions_equal_the_recorded_results() {
    let (mut results, mut rounded) = (0, 0);
    for checkpoint in CHECKPOINTS {
        let mut agent = open(checkpoint);
        for (name, recorded) in cases("predict") {
            let case = &recorded["case"];
            if case["checkpoint"] != checkpoint {
                continue;
            }
            let options = options(&case["options"]).unwrap();
            let ours = agent.predict(&case["state"], &case["questions"], &options).unwrap();
            rounded += last_digits(&ours.to_json(), &recorded["expected"]["result"], &name);
            for answer in &ours.answers {
                let detail = &recorded["expected"]["questions_detail"][&answer.id];
                let theirs = support::floats(&detail["probabilities_option_order"]);
                let p = answer.distribution.probabilities();
                assert!(p.iter().zip(&theirs).all(|(a, b)| (a - b).abs() < 2e-5), "{name}: {p:?} and {theirs:?}");
            }
            results += 1;
        }
    }
    assert_eq!(results, 13);
    assert!(rounded <= 1, "{rounded} numbers were rounded to the other side");
}

#[test]
fn a_batch_equals_the_recorded_results_and_its_states_one_by_one() {
    for (name, recorded) in cases("predict_batch") {
        let case = &recorded["case"];
        let mut agent = open(case["checkpoint"].as_str().unwrap());
        let states = case["states"].as_array().unwrap();
        let options = options(&case["options"]).unwrap();
        let results = agent.predict_batch(states, &case["questions"], &options).unwrap();
        let theirs = recorded["expected"]["results"].as_array().unwrap();
        assert_eq!(results.len(), theirs.len());
        let rounded: usize = results.iter().zip(theirs).map(|(a, b)| last_digits(&a.to_json(), b, &name)).sum();
        assert!(rounded <= 1, "{rounded} numbers were rounded to the other side");
        for (state, result) in states.iter().zip(&results) {
            let alone = agent.predict(state, &case["questions"], &PredictOptions::default()).unwrap();
            assert_eq!(alone, *result, "a state alone gives the same bits");
        }
    }
}

#[test]
fn reordered_options_of_the_parallel_layout_keep_their_logits() {
    let mut agent = open("tiny-parallel");
    let ask = |agent: &mut Agent<Laya>, order: Value| {
        let questions = serde_json::json!({"q": {"type": "choice", "instructions": "Which team?", "option_order": order,
            "criteria": {"billing": "invoices", "technical": "bugs and outages", "sales": null, "other": "anything else"}}});
        let result = agent.predict(&"My invoice is wrong.".into(), &questions, &PredictOptions::default()).unwrap();
        result.answers[0].logits.clone()
    };
    let plain = ask(&mut agent, serde_json::json!([0, 1, 2, 3]));
    for order in [[3, 2, 1, 0], [1, 3, 0, 2]] {
        let other = ask(&mut agent, serde_json::json!(order));
        assert!(plain.iter().zip(&other).all(|(a, b)| (a - b).abs() < 1e-5), "{plain:?} and {other:?}");
    }
}

#[test]
fn opening_a_checkpoint_writes_nothing_and_says_what_was_opened() {
    let dir = fixtures().join("tiny-en");
    let names = dir.join("tokenizer/tokenizer_config.json");
    let before = std::fs::read(&names).unwrap();
    let agent = Agent::open(&dir, &OpenOptions { hash: true, ..OpenOptions::default() }).unwrap();
    assert_eq!(std::fs::read(&names).unwrap(), before);
    let provenance = agent.provenance();
    assert_eq!(provenance.model.as_deref(), Some("tiny-en"));
    assert_eq!(provenance.model_sha256.as_ref().unwrap().len(), 64);
    assert_eq!(provenance.calibration, None);
}

#[test]
fn a_missing_tokenizer_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = tilewright_decide::Tokenizer::open(folder.path()).unwrap_err();
    assert!(error.to_string().contains("tokenizer.json"), "{error}");
    assert_eq!(error.kind(), "Error");
}
