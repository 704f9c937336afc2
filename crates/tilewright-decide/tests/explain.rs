//! What `explain` shows is what the model reads.

mod support;

use serde_json::{Value, json};
use support::english;
use tilewright_decide::{Cut, Limits, Part, PredictOptions};

fn questions() -> Value {
    let long = "very ".repeat(80);
    json!({"q": {"type": "choice", "instructions": format!("Which {long} one?"), "option_order": [1, 0],
        "criteria": {"first": "a description", "second": long}}})
}

#[test]
fn segments_put_together_are_the_row() {
    let (mut agent, calls) = english();
    for state in [json!("short"), json!("long ".repeat(300)), json!(vec!["long "; 300]), json!("")] {
        let explained = agent.explain(&state, &questions(), &PredictOptions::default()).unwrap().remove(0);
        let ids: Vec<u32> = explained.segments.iter().flat_map(|s| &s.tokens).map(|t| t.id).collect();
        assert_eq!(ids, calls.lock().unwrap().last().unwrap()[0].ids, "{state}");
    }
}

#[test]
fn what_was_cut_is_counted_by_segment() {
    let (mut agent, _) = english();
    let turns: Vec<String> = (0..80).map(|i| format!("turn {i}")).collect();
    let explained = agent.explain(&json!(turns), &questions(), &PredictOptions::default()).unwrap().remove(0);
    let find = |part: Part| explained.segments.iter().find(|s| s.part == part).unwrap();
    let instructions = find(Part::Instructions);
    assert!(instructions.cut.kept < instructions.cut.total);
    assert_eq!(find(Part::Option(0)).cut.kept, find(Part::Option(0)).cut.total);
    assert!(find(Part::Option(1)).cut.kept < find(Part::Option(1)).cut.total);
    let state = find(Part::State);
    let Cut { kept, total } = state.cut;
    assert_eq!(state.skipped, total - kept, "a conversation loses its beginning");
    assert_eq!(state.tokens.len(), kept);
    let order: Vec<Part> = explained.segments.iter().map(|s| s.part).filter(|p| matches!(p, Part::Option(_))).collect();
    assert_eq!(order, [Part::Option(1), Part::Option(0)], "options are shown in slot order");
}

#[test]
fn the_explained_answer_is_the_predicted_one() {
    let (mut agent, _) = english();
    let options = PredictOptions { lang: Some("de".into()), ..PredictOptions::default() };
    let explained = agent.explain(&"s".into(), &questions(), &options).unwrap().remove(0);
    let predicted = agent.predict(&"s".into(), &questions(), &options).unwrap().answers.remove(0);
    assert_eq!(explained.answer, predicted);
    let json = explained.to_json();
    assert_eq!(json["language"], "de");
    assert_eq!(json["options"][0]["key"], "first");
    let logit = json["options"][1]["logit"].as_f64().unwrap();
    assert_eq!(logit as f32, predicted.logits[1]);
}

#[test]
fn no_questions_explain_nothing() {
    assert!(english().0.explain(&"s".into(), &json!({}), &PredictOptions::default()).unwrap().is_empty());
}

#[test]
fn a_row_beyond_the_limit_is_refused_and_not_read() {
    let (agent, calls) = english();
    let mut agent = agent.with_limits(Limits { row_tokens: 100 });
    let error = agent.predict(&"word ".repeat(200).into(), &questions(), &PredictOptions::default()).unwrap_err();
    assert_eq!(error.kind(), "ValueError");
    assert!(error.to_string().contains("'q'") && error.to_string().ends_with("at most 100; lower max_len"), "{error}");
    assert!(calls.lock().unwrap().is_empty());
}

#[test]
fn windows_of_a_long_state_overlap_and_end_with_it() {
    let (mut agent, _) = english();
    let state: Value = "word ".repeat(300).into();
    let windows =
        agent.windows(&state, &json!({"q": {"type": "noul", "instructions": "?"}}), Some(50), Some(20)).unwrap();
    assert_eq!((windows.window, windows.stride), (50, 20));
    assert!(windows.spans.windows(2).all(|w| w[1].start == w[0].start + 20 && w[1].start < w[0].end));
    assert_eq!(windows.spans[0], 0..50);
    assert_eq!(windows.spans.last().unwrap().end, windows.tokens.len());
    let short = agent.windows(&"word".into(), &json!({}), None, None).unwrap();
    assert!(short.spans.is_empty(), "a state that fits is read whole");
}
