//! The recorded results of the `laya` package: everything but the model's arithmetic, which is replaced by the recorded logits.

mod support;

use serde_json::Value;
use support::{Recorded, agent, case, cases, config, floats, ids, options, tokenizer};
use tilewright_decide::{Budget, Distribution, Head, PromptRow, StateTokens, parse_questions};
use tilewright_models::laya::OptionLayout;

/// Every question of every predict case: the case, the row built for it, and what was recorded.
fn each_row(mut check: impl FnMut(&str, &Head, &PromptRow, &Value)) {
    let mut rows = 0;
    for (name, recorded) in cases("predict") {
        let case = &recorded["case"];
        let checkpoint = case["checkpoint"].as_str().unwrap();
        let (tokenizer, config) = (tokenizer(checkpoint), config(checkpoint));
        let options = options(&case["options"]).unwrap();
        let budget = Budget {
            max_len: options.max_len.unwrap_or(config.max_len),
            head_max_len: options.head_max_len.unwrap_or(config.head_max_len),
        };
        let state = StateTokens::new(&tokenizer, &case["state"]).unwrap();
        for question in parse_questions(&case["questions"]).unwrap() {
            let head = Head::build(&tokenizer, &question, budget.head_max_len).unwrap();
            let row = PromptRow::build(&tokenizer, &question, &head, &state, budget, config.option_layout).unwrap();
            check(
                &format!("{name} {}", question.id),
                &head,
                &row,
                &recorded["expected"]["questions_detail"][&question.id],
            );
            rows += 1;
        }
    }
    assert!(rows >= 20, "{rows} rows were compared");
}

#[test]
fn token_ids_equal_the_recorded_ones() {
    each_row(|name, _, row, expected| assert_eq!(row.row.ids, ids(&expected["token_ids"]), "{name}"));
}

#[test]
fn markers_equal_the_recorded_ones() {
    each_row(|name, _, row, expected| assert_eq!(row.row.markers, ids(&expected["markers"]), "{name}"));
}

#[test]
fn positions_of_the_parallel_layout_equal_the_recorded_ones() {
    let mut parallel = 0;
    each_row(|name, _, row, expected| match (&row.row.positions, expected.get("layout")) {
        (Some(positions), Some(layout)) => {
            parallel += 1;
            assert_eq!(positions.position_ids, ids(&layout["position_ids"]), "{name}");
            assert_eq!(positions.option_ids, ids(&layout["option_ids"]), "{name}");
        }
        (None, None) => {}
        (ours, theirs) => panic!("{name}: {ours:?} and {theirs:?}"),
    });
    assert!(parallel > 0);
}

#[test]
fn option_and_state_counts_equal_the_recorded_ones() {
    each_row(|name, head, row, expected| {
        let options = serde_json::json!({
            "options": head.options.len(), "options_distinct": head.distinct, "tokens_per_option": head.tokens_per_option
        });
        assert_eq!(options, expected["option_stats"], "{name}");
        let state = serde_json::json!({
            "state_tokens": row.state_tokens, "state_tokens_used": row.state.len(),
            "state_tokens_dropped": row.state_dropped(), "truncated": row.state_dropped() > 0
        });
        assert_eq!(state, expected["state_stats"], "{name}");
    });
}

#[test]
fn option_texts_equal_the_recorded_ones() {
    for (name, recorded) in cases("predict") {
        for question in parse_questions(&recorded["case"]["questions"]).unwrap() {
            let expected = &recorded["expected"]["questions_detail"][&question.id];
            assert_eq!(Value::from(question.options.clone()), expected["rendered_options"], "{name}");
            assert_eq!(question.instructions, expected["instructions_text"], "{name}");
        }
    }
}

#[test]
fn probabilities_before_rounding_equal_the_recorded_ones() {
    for (name, recorded) in cases("predict") {
        let case = &recorded["case"];
        let mut agent = agent(case["checkpoint"].as_str().unwrap(), Recorded::of(&recorded));
        let result = agent.predict(&case["state"], &case["questions"], &options(&case["options"]).unwrap()).unwrap();
        for answer in &result.answers {
            let expected = &recorded["expected"]["questions_detail"][&answer.id];
            assert_eq!(answer.applied.bucket, expected["temperature_bucket"], "{name}");
            assert_eq!(answer.applied.temperature, expected["temperature_applied"].as_f64().unwrap(), "{name}");
            let theirs = floats(&expected["probabilities_option_order"]);
            for (a, b) in answer.distribution.probabilities().iter().zip(&theirs) {
                assert!((a - b).abs() < 1e-6, "{name}: {:?} and {theirs:?}", answer.distribution);
            }
        }
    }
}

#[test]
fn results_equal_the_recorded_ones_byte_for_byte() {
    for (name, recorded) in cases("predict") {
        let case = &recorded["case"];
        let mut agent = agent(case["checkpoint"].as_str().unwrap(), Recorded::of(&recorded));
        let result = agent.predict(&case["state"], &case["questions"], &options(&case["options"]).unwrap()).unwrap();
        assert_eq!(result.to_json().to_string(), recorded["expected"]["result"].to_string(), "{name}");
    }
}

#[test]
fn errors_have_the_recorded_kinds_and_messages() {
    for (name, recorded) in cases("errors") {
        let mut agent = agent(recorded["case"]["checkpoint"].as_str().unwrap(), Recorded::default());
        let calls = recorded["case"]["calls"].as_array().unwrap();
        for (call, expected) in calls.iter().zip(recorded["expected"]["outcomes"].as_array().unwrap()) {
            let state = call.get("state").cloned().unwrap_or_else(|| "The state.".into());
            let result = options(&call["options"]).and_then(|o| agent.predict(&state, &call["questions"], &o));
            match result {
                Ok(_) => assert_eq!(expected["ok"], true, "{name}: {call}"),
                Err(error) => {
                    assert_eq!(expected["message"], error.to_string(), "{name}: {call}");
                    assert_eq!(expected["error_type"], error.kind(), "{name}: {call}");
                }
            }
        }
    }
}

#[test]
fn a_batch_asks_for_the_recorded_rows_and_counts_them() {
    let recorded = case("s14_predict_batch_sorted");
    let case = &recorded["case"];
    let scorer = Recorded::default();
    let calls = scorer.calls.clone();
    let mut agent = agent(case["checkpoint"].as_str().unwrap(), scorer);
    let states = case["states"].as_array().unwrap();
    let results = agent.predict_batch(states, &case["questions"], &options(&case["options"]).unwrap()).unwrap();
    for (result, expected) in results.iter().zip(recorded["expected"]["results"].as_array().unwrap()) {
        assert_eq!(result.usage.to_json().to_string(), expected["usage"].to_string());
    }
    let calls = calls.lock().unwrap();
    assert_eq!(calls.len(), 1, "all rows run in one call");
    let asked: Vec<_> = calls[0].iter().map(|row| row.ids.clone()).collect();
    let mut unique = Vec::new();
    for row in recorded["expected"]["token_ids"].as_array().unwrap().iter().flat_map(|rows| rows.as_array().unwrap()) {
        let row = ids(row);
        if !unique.contains(&row) {
            unique.push(row);
        }
    }
    assert_eq!(asked, unique);
}

#[test]
fn a_sequential_checkpoint_gets_no_positions() {
    assert_eq!(config("tiny-en").option_layout, OptionLayout::Sequential);
    each_row(|name, _, row, _| {
        let parallel = name.starts_with("s13");
        assert_eq!(row.row.positions.is_some(), parallel, "{name}");
    });
}

#[test]
fn recorded_distributions_are_distributions() {
    for (_, recorded) in cases("predict") {
        for detail in recorded["expected"]["questions_detail"].as_object().unwrap().values() {
            Distribution::new(floats(&detail["probabilities_option_order"])).unwrap();
        }
    }
}
