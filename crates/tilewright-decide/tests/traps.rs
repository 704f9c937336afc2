//! One test for each documented trap that is this crate's to avoid; those of the model, the router and the server are tested there.

mod support;

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use support::{Recorded, agent, english};
use tilewright_decide::{
    Agent, AnswerValue, Calibration, CalibrationFile, Gate, PredictOptions, Prediction, StateTokens, Truncated,
    json_text, parse_questions,
};
use tilewright_models::laya::{AgentConfig, Row, RowScores, Scorer};

fn noul() -> Value {
    json!({"q": {"type": "noul", "instructions": "Is it?"}})
}

fn predict(state: &Value, questions: &Value, options: &PredictOptions) -> Prediction {
    english().0.predict(state, questions, options).unwrap()
}

/// The ids of the only row that a call reads.
fn row(state: &Value, questions: &Value, options: &PredictOptions) -> Row {
    let (mut agent, calls) = english();
    agent.predict(state, questions, options).unwrap();
    calls.lock().unwrap()[0][0].clone()
}

fn tokens(text: &str) -> Vec<u32> {
    StateTokens::new(&support::tokenizer("tiny-en"), &text.into()).unwrap().ids
}

fn config_with(change: impl FnOnce(&mut AgentConfig)) -> AgentConfig {
    let mut config = support::config("tiny-en");
    change(&mut config);
    config
}

#[test]
fn trap_1_temperatures_are_confined_and_the_replaced_are_named() {
    let calibration = Calibration::of_checkpoint(&support::config("tiny-en"));
    let temperatures = calibration.temperatures();
    let get = |name: &str| temperatures.by_bucket.iter().find(|(b, _)| b == name).unwrap().1;
    assert_eq!((get("choice:11+"), get("noul:2"), get("choice:2")), (0.5, 5.0, 1.7));
    let [warning] = calibration.warnings() else { panic!("{:?}", calibration.warnings()) };
    assert!(warning.contains("choice:11+=0.1006 -> 0.5, noul:2=6.5 -> 5"), "{warning}");
    assert!(!warning.contains("choice:2="), "what was kept is not named: {warning}");
}

#[test]
fn trap_1_raw_values_stay_readable() {
    let config = support::config("tiny-en");
    let agent = Agent::new(Recorded::default(), support::tokenizer("tiny-en"), config);
    assert_eq!(json_text(&agent.config().temperature_by_options["choice:11+"]), "0.1006");
}

#[test]
fn trap_2_what_is_no_number_is_neutral_and_named() {
    for (raw, shown) in [(json!(true), "True"), (json!("a"), "'a'"), (json!(null), "None"), (json!([1]), "[1]")] {
        let config = config_with(|c| c.temperature[1] = raw);
        let calibration = Calibration::of_checkpoint(&config);
        assert_eq!(calibration.temperatures().by_type[1], 1.0);
        assert!(
            calibration.warnings()[0].contains(&format!("temperature[1]={shown} -> 1")),
            "{:?}",
            calibration.warnings()
        );
    }
    // How `NaN` arrives from a file that Python wrote.
    let config = config_with(|c| c.temperature[2] = "NaN".into());
    assert_eq!(Calibration::of_checkpoint(&config).temperatures().by_type[2], 1.0);
    let infinite = config_with(|c| c.temperature[0] = serde_json::from_str("1e999").unwrap());
    assert_eq!(Calibration::of_checkpoint(&infinite).temperatures().by_type[0], 1.0);
}

#[test]
fn trap_2_a_list_of_temperatures_of_the_wrong_length_is_refused_when_it_is_read() {
    for list in [json!([1, 1]), json!([1, 1, 1, 1]), json!("abc"), json!({"a": 1, "b": 2, "c": 3})] {
        let error = CalibrationFile::parse(&json!({"temperature": list})).unwrap_err();
        assert_eq!(error.to_string(), "calibration JSON must contain temperature: [3 floats]");
    }
}

#[test]
fn trap_3_truncation_is_reported_from_tokens() {
    let state: Value = "word ".repeat(400).into();
    let usage = predict(&state, &noul(), &PredictOptions::default()).usage;
    let row = row(&state, &noul(), &PredictOptions::default());
    let all = tokens(state.as_str().unwrap()).len();
    let state = usage.state.unwrap();
    assert_eq!((state.tokens, state.truncated), (all, Truncated::State(true)));
    assert_eq!(row.ids.len(), 160, "a row that was cut is full");
    let question = row.markers[1] as usize;
    assert!(state.dropped > all - (160 - question), "what the question takes is missing too: {state:?}");
    assert_eq!(state.questions, ["q"]);
}

#[test]
fn trap_3_a_state_that_fits_to_the_token_is_not_called_truncated() {
    let state: Value = "word ".repeat(20).into();
    let exact = row(&state, &noul(), &PredictOptions::default()).ids.len();
    for (max_len, dropped) in [(exact, 0), (exact - 1, 1), (exact - 2, 2)] {
        let options = PredictOptions { max_len: Some(max_len), ..PredictOptions::default() };
        let usage = predict(&state, &noul(), &options).usage.state.unwrap();
        assert_eq!((usage.dropped, usage.truncated), (dropped, Truncated::State(dropped > 0)));
    }
}

#[test]
fn trap_4_conversations_keep_their_newest_turn() {
    let turns: Vec<String> = (0..60).map(|i| format!("turn {i}")).collect();
    let kept = |state: &Value| {
        let row = row(state, &noul(), &PredictOptions::default());
        support::tokenizer("tiny-en").decode(&row.ids[row.markers[1] as usize..]).unwrap()
    };
    let list = kept(&json!(turns));
    assert!(list.contains("turn 59") && !list.contains("turn 0\""), "{list}");
    let object = kept(&json!({"turns": turns}));
    assert!(
        object.contains("turn 0\"") && !object.contains("turn 59"),
        "only the whole state being a list matters: {object}"
    );
}

#[test]
fn trap_4_no_room_keeps_no_token_and_not_all_of_them() {
    let state = json!(["one", "two"]);
    let head = row(&json!([]), &noul(), &PredictOptions::default()).ids.len();
    // `[]` is one or two tokens; the row must lose them and the last [SEP] stays.
    let short = PredictOptions { max_len: Some(head - tokens("[]").len()), ..PredictOptions::default() };
    let row = row(&state, &noul(), &short);
    assert_eq!(row.ids.len(), short.max_len.unwrap());
    let usage = predict(&state, &noul(), &short).usage.state.unwrap();
    assert_eq!(usage.dropped, usage.tokens);
}

#[test]
fn trap_5_options_that_are_cut_to_the_same_tokens_are_counted() {
    let labels: Vec<String> = (0..20).map(|i| format!("the very same beginning {i}")).collect();
    let questions = json!({"q": {"type": "choice", "instructions": "Which?", "criteria": labels}, "n": {"type": "noul", "instructions": "?"}});
    let usage = predict(&"s".into(), &questions, &PredictOptions::default()).usage;
    let [(id, options)] = &usage.options[..] else { panic!("{:?}", usage.options) };
    assert_eq!((id.as_str(), options.total, options.distinct, options.tokens_per_option), ("q", 20, 1, Some(4)));
}

#[test]
fn trap_6_options_that_do_not_fit_are_an_error_that_names_both_knobs() {
    let labels: Vec<String> = (0..80).map(|i| format!("label {i}")).collect();
    let questions = json!({"q": {"type": "choice", "instructions": "Which?", "criteria": labels}});
    let message = english().0.predict(&"s".into(), &questions, &PredictOptions::default()).unwrap_err().to_string();
    assert!(message.contains("of its 80 option markers fit in max_len=160 with head_max_len=64"), "{message}");
    assert!(message.ends_with("lower head_max_len, raise max_len, or use fewer options"), "{message}");
}

#[test]
fn trap_7_noul_criteria_of_other_keys_are_refused_and_labels_offered() {
    let questions = json!({"q": {"type": "noul", "instructions": "?", "criteria": {"yes": "a", "true": "b"}}});
    let message = parse_questions(&questions).unwrap_err().to_string();
    assert!(message.contains("got ['true', 'yes']") && message.ends_with("set 'labels' instead."), "{message}");
}

#[test]
fn trap_7_labels_are_two_different_texts() {
    for labels in [
        json!({"false": "a"}),
        json!({"false": "a", "true": " a"}),
        json!({"no": "a", "yes": "b"}),
        json!([]),
        json!({"false": "", "true": "b"}),
    ] {
        let questions = json!({"q": {"type": "noul", "instructions": "?", "labels": labels}});
        assert!(
            parse_questions(&questions).unwrap_err().to_string().contains("noul labels must map exactly"),
            "{labels}"
        );
    }
}

#[test]
fn trap_8_the_label_words_of_a_noul_can_be_chosen() {
    let questions = json!({"q": {"type": "noul", "instructions": "?", "labels": {"false": " B ", "true": "A"}}});
    let question = &parse_questions(&questions).unwrap()[0];
    assert_eq!(question.options, ["B: no, the statement does not hold", "A: yes, the statement holds"]);
}

#[test]
fn trap_9_repeated_labels_are_refused_and_not_merged() {
    for labels in [json!([1, 1.0]), json!([1, true]), json!([0, false]), json!(["a", "a"]), json!([2, 2])] {
        let questions = json!({"q": {"type": "choice", "instructions": "?", "criteria": labels}});
        let message = parse_questions(&questions).unwrap_err().to_string();
        assert!(message.contains("choice label 1") && message.contains("repeats label 0"), "{message}");
    }
    for labels in [json!([null]), json!([[1]]), json!([{"a": 1}])] {
        let questions = json!({"q": {"type": "choice", "instructions": "?", "criteria": labels}});
        assert_eq!(parse_questions(&questions).unwrap_err().kind(), "ValueError");
    }
}

#[test]
fn trap_9_labels_that_only_look_alike_stay_apart() {
    let questions = json!({"q": {"type": "choice", "instructions": "?", "criteria": [1, "1", 2.5, "2.5", false, ""]}});
    assert_eq!(parse_questions(&questions).unwrap()[0].options, ["1", "1", "2.5", "2.5", "False", ""]);
}

#[test]
fn trap_10_instructions_that_are_no_text_are_json_without_escapes() {
    let questions =
        json!({"q": {"type": "noul", "instructions": {"frage": "größer?"}, "criteria": {"true": {"b": [1, null]}}}});
    let question = &parse_questions(&questions).unwrap()[0];
    assert_eq!(question.instructions, "{\"frage\": \"größer?\"}");
    assert_eq!(question.options[1], "true: {\"b\": [1, null]}");
}

#[test]
fn trap_11_zero_and_false_describe_an_option() {
    let questions = json!({"q": {"type": "choice", "instructions": "?", "criteria": {"a": null, "b": 0, "c": false, "d": "", "e": 0.0}},
        "n": {"type": "noul", "instructions": "?", "criteria": {"false": 0, "true": ""}}});
    let questions = parse_questions(&questions).unwrap();
    assert_eq!(questions[0].options, ["a", "b: 0", "c: false", "d", "e: 0.0"]);
    assert_eq!(questions[1].options, ["false: 0", "true: yes, the statement holds"]);
}

#[test]
fn trap_12_many_labels_get_more_tokens_with_a_larger_budget_a_shortlist_or_a_tournament() {
    let labels: Vec<String> = (0..40).map(|i| format!("topic number {i} of a long list")).collect();
    let questions = json!({"q": {"type": "choice", "instructions": "Which?", "criteria": labels}});
    let (mut agent, calls) = english();
    let wide = PredictOptions { max_len: Some(900), head_max_len: Some(800), ..PredictOptions::default() };
    let result = agent.predict(&"s".into(), &questions, &wide).unwrap();
    assert!(result.usage.options.is_empty(), "all labels keep their tokens");
    calls.lock().unwrap().clear();
    let result = agent.predict_tournament(&"s".into(), &questions, 8, &wide).unwrap();
    assert_eq!(result.answers[0].distribution.len(), 5, "one winner of each of five groups");
    assert_eq!(result.extra["tournament"]["q"]["rounds"], 1);
    assert_eq!(calls.lock().unwrap().iter().map(Vec::len).collect::<Vec<_>>(), [5, 1]);
    let result = agent.predict_shortlist(&"s".into(), &questions, 7, &wide).unwrap();
    assert_eq!(result.answers[0].distribution.len(), 7);
    assert_eq!(result.extra["shortlist"]["q"]["n"], 40);
}

/// Scores slots by their number.
#[derive(Debug)]
struct BySlot;

impl Scorer for BySlot {
    fn score(&mut self, rows: &[Row]) -> tilewright_core::Result<Vec<RowScores>> {
        let slots = |row: &Row| (0..row.markers.len()).map(|s| s as f32).collect();
        Ok(rows.iter().map(|row| RowScores { logits: slots(row), act_logits: vec![0.0, 0.0] }).collect())
    }

    fn embed(&mut self, rows: &[Vec<u32>]) -> tilewright_core::Result<Vec<Vec<f32>>> {
        Ok(vec![vec![1.0]; rows.len()])
    }
}

#[test]
fn trap_13_an_option_order_changes_the_slots_and_not_whose_probability_it_is() {
    let mut agent = Agent::new(BySlot, support::tokenizer("tiny-en"), support::config("tiny-en"));
    let questions =
        json!({"q": {"type": "choice", "instructions": "?", "criteria": ["a", "b", "c"], "option_order": [1, 2, 0]}});
    let answer = agent.predict(&"s".into(), &questions, &PredictOptions::default()).unwrap().answers.remove(0);
    assert_eq!(answer.value, AnswerValue::Choice("a".into()), "the last slot shows option 0");
    assert_eq!(answer.logits, [2.0, 0.0, 1.0]);
    let p = answer.distribution.probabilities();
    assert!(p[0] > p[2] && p[2] > p[1], "{p:?}");
    assert_eq!(answer.to_json()["probabilities"].as_object().unwrap().keys().collect::<Vec<_>>(), ["a", "b", "c"]);
}

#[test]
fn trap_13_a_tournament_drops_an_order_with_one_warning() {
    let (mut agent, _) = english();
    let labels: Vec<String> = (0..9).map(|i| format!("l{i}")).collect();
    let order: Vec<usize> = (0..9).rev().collect();
    let questions = json!({"q": {"type": "choice", "instructions": "?", "criteria": labels, "option_order": order},
        "small": {"type": "choice", "instructions": "?", "criteria": ["a", "b"], "option_order": [1, 0]}});
    let result = agent.predict_tournament(&"s".into(), &questions, 2, &PredictOptions::default()).unwrap();
    assert_eq!(result.warnings.len(), 1, "{:?}", result.warnings);
    assert!(result.warnings[0].contains("'q'"));
    assert_eq!(result.extra["tournament"]["q"]["rounds"], 3);
}

#[test]
fn trap_14_the_action_head_is_published_and_gates_nothing() {
    #[derive(Debug)]
    struct Escalates;
    impl Scorer for Escalates {
        fn score(&mut self, rows: &[Row]) -> tilewright_core::Result<Vec<RowScores>> {
            Ok(rows.iter().map(|_| RowScores { logits: vec![50.0, -50.0], act_logits: vec![-50.0, 50.0] }).collect())
        }
        fn embed(&mut self, _: &[Vec<u32>]) -> tilewright_core::Result<Vec<Vec<f32>>> {
            Ok(Vec::new())
        }
    }
    let mut agent = Agent::new(Escalates, support::tokenizer("tiny-en"), support::config("tiny-en"));
    let gate = Some(Gate::uniform(0.9).unwrap());
    let answer = agent
        .predict(&"s".into(), &noul(), &PredictOptions { gate, ..PredictOptions::default() })
        .unwrap()
        .answers
        .remove(0);
    assert_eq!(answer.act_probability, 0.0);
    assert!(!answer.abstained());
}

#[test]
fn trap_19_a_question_with_one_option_is_certain() {
    let questions = json!({"c": {"type": "choice", "instructions": "?", "criteria": ["only"]}, "s": {"type": "score", "instructions": "?", "criteria": ["only"]}});
    let result = predict(&"s".into(), &questions, &PredictOptions::default());
    let json = result.to_json();
    assert_eq!(json["answers"]["c"]["probabilities"].to_string(), r#"{"only":1.0}"#);
    assert_eq!(json["answers"]["s"]["score"].to_string(), "0.0");
    assert!(result.answers.iter().all(|a| (a.confidence, a.answer_confidence) == (1.0, 1.0)));
}

#[test]
fn trap_20_a_mask_token_in_the_text_makes_no_marker() {
    let plain = json!({"q": {"type": "choice", "instructions": "Which   one?", "criteria": {"a  b": "c  d"}}});
    let masked =
        json!({"q": {"type": "choice", "instructions": "Which [MASK] one?", "criteria": {"a[MASK] b": "c [MASK]d"}}});
    let options = PredictOptions::default();
    let expected = row(&"x   y".into(), &plain, &options);
    assert_eq!(row(&"x [MASK] y".into(), &masked, &options), expected);
    let mask = support::tokenizer("tiny-en").mask();
    assert_eq!(expected.ids.iter().filter(|id| **id == mask).count(), expected.markers.len());
}

#[test]
fn trap_20_other_special_tokens_in_the_text_become_their_ids() {
    let tokenizer = support::tokenizer("tiny-en");
    let row = row(&"x [SEP] y".into(), &noul(), &PredictOptions::default());
    assert_eq!(row.ids.iter().filter(|id| **id == tokenizer.sep()).count(), 4);
}

#[test]
fn trap_23_a_gate_marks_every_answer_and_a_later_call_without_one_none() {
    let (mut agent, _) = english();
    let gate = Some(Gate::uniform(1.0).unwrap());
    let gated = agent.predict(&"s".into(), &noul(), &PredictOptions { gate, ..PredictOptions::default() }).unwrap();
    let json = gated.to_json()["answers"]["q"].to_string();
    assert!(json.ends_with(r#""low_confidence":true,"abstention":"abstained","abstention_threshold":1.0}"#), "{json}");
    let mut answer = gated.answers[0].clone();
    answer.judge(Some(&Gate::uniform(0.0).unwrap()));
    let json = answer.to_json().to_string();
    assert!(
        json.ends_with(r#""abstention":"passed","abstention_threshold":0.0}"#) && !json.contains("low_confidence"),
        "{json}"
    );
    answer.judge(None);
    assert!(!answer.to_json().to_string().contains("abstention"));
}

#[test]
fn trap_26_a_long_option_does_not_shorten_what_is_tokenized_later() {
    let long = "word ".repeat(300);
    let questions = json!({"q": {"type": "choice", "instructions": "?", "criteria": [long.clone()]}});
    let tokenizer = support::tokenizer("tiny-en");
    let before = tokenizer.encode(&long).unwrap();
    let options = PredictOptions { max_len: Some(900), head_max_len: Some(300), ..PredictOptions::default() };
    let mut agent = Agent::new(Recorded::default(), tokenizer, support::config("tiny-en"));
    agent.predict(&"s".into(), &questions, &options).unwrap();
    assert_eq!(agent.tokenizer().encode(&long).unwrap(), before);
    assert!(before.len() > 300);
}

#[test]
fn trap_27_windows_fit_beside_the_longest_question_and_are_not_cut_again() {
    let labels: Vec<String> = (0..14).map(|i| format!("label {i}")).collect();
    let questions = json!({"wide": {"type": "choice", "instructions": "Which?", "criteria": labels}, "q": {"type": "noul", "instructions": "?"}});
    let (mut agent, calls) = english();
    let state: Value = (0..300).map(|i| format!("word{i} ")).collect::<String>().into();
    let result = agent.predict_long(&state, &questions, None, None, &PredictOptions::default()).unwrap();
    let usage = result.usage.state.as_ref().unwrap();
    assert_eq!(usage.truncated, Truncated::Windows(0), "no window was cut");
    let windows = result.usage.windows.unwrap();
    assert!(windows > 2);
    assert_eq!(calls.lock().unwrap().len(), 1, "all windows run together");
    for answer in &result.answers {
        let window = answer.window.unwrap();
        assert!(window.index < windows && window.count == windows && window.token_start < window.token_end);
    }
}

/// Scores the rows of a call with these logits, one after the other.
#[derive(Debug)]
struct InTurn(Vec<Vec<f32>>);

impl Scorer for InTurn {
    fn score(&mut self, rows: &[Row]) -> tilewright_core::Result<Vec<RowScores>> {
        let logits = self.0.iter().cycle();
        Ok(rows.iter().zip(logits).map(|(_, l)| RowScores { logits: l.clone(), act_logits: vec![0.0] }).collect())
    }

    fn embed(&mut self, _: &[Vec<u32>]) -> tilewright_core::Result<Vec<Vec<f32>>> {
        Ok(Vec::new())
    }
}

#[test]
fn evidence_anywhere_decides_a_statement_and_the_surest_window_a_choice() {
    let scores = vec![vec![9.0, 0.0], vec![0.0, 1.0], vec![4.0, 0.0]];
    let mut agent = Agent::new(InTurn(scores), support::tokenizer("tiny-en"), support::config("tiny-en"));
    let state: Value = (0..200).map(|i| format!("word{i} ")).collect::<String>().into();
    let decided = |agent: &mut Agent<InTurn>, question: Value| {
        let questions = json!({"q": question});
        let result = agent.predict_long(&state, &questions, Some(90), None, &PredictOptions::default()).unwrap();
        assert!(result.usage.windows.unwrap() >= 3);
        result.answers[0].window.unwrap().index
    };
    assert_eq!(
        decided(&mut agent, json!({"type": "noul", "instructions": "?"})),
        1,
        "the only window that speaks for it"
    );
    assert_eq!(decided(&mut agent, json!({"type": "choice", "instructions": "?", "criteria": ["a", "b"]})), 0);
}

#[test]
fn groups_of_a_tournament_are_of_nearly_equal_size() {
    let (mut agent, calls) = english();
    let labels: Vec<String> = (0..10).map(|i| format!("l{i}")).collect();
    let questions = json!({"q": {"type": "choice", "instructions": "?", "criteria": labels}});
    agent.predict_tournament(&"s".into(), &questions, 4, &PredictOptions::default()).unwrap();
    let calls = calls.lock().unwrap();
    let sizes = |call: &[Row]| call.iter().map(|row| row.markers.len()).collect::<Vec<_>>();
    assert_eq!(calls.iter().map(|call| sizes(call)).collect::<Vec<_>>(), [vec![3, 3, 4], vec![3]]);
}

#[test]
fn of_levels_with_the_same_published_probability_a_schema_gets_the_lowest() {
    let mut agent =
        Agent::new(InTurn(vec![vec![0.0, 1e-6, 0.0]]), support::tokenizer("tiny-en"), support::config("tiny-en"));
    let schema = json!({"properties": {"level": {"type": "integer", "minimum": 5, "maximum": 7}}});
    let decision = agent.decide(&"s".into(), &schema, &PredictOptions::default()).unwrap();
    assert_eq!(json!(decision.values).to_string(), r#"{"level":5}"#);
    let details = decision.details();
    assert_eq!(details["values"]["level"], 5);
    assert_eq!(details["probabilities"]["level"].to_string(), r#"{"0":0.3333,"1":0.3333,"2":0.3333}"#);
}

#[test]
fn a_value_that_the_gate_held_back_is_null() {
    let mut agent = Agent::new(InTurn(vec![vec![0.0, 0.1]]), support::tokenizer("tiny-en"), support::config("tiny-en"));
    let schema = json!({"properties": {"sure": {"type": "boolean"}, "one": {"enum": [2.5, null]}}});
    let gate = Some(Gate::parse(&json!({"noul:2": 0.9})).unwrap());
    let options = PredictOptions { gate, ..PredictOptions::default() };
    let decision = agent.decide(&"s".into(), &schema, &options).unwrap();
    assert_eq!(json!(decision.values).to_string(), r#"{"sure":null,"one":null}"#);
    assert!(decision.prediction.answers[0].abstained() && !decision.prediction.answers[1].abstained());
}

#[test]
fn trap_28_the_order_of_fields_is_the_packages() {
    let questions = json!({"c": {"type": "choice", "instructions": "?", "criteria": ["a", "b"]}, "s": {"type": "score", "instructions": "?", "criteria": ["l", "h"]}, "n": {"type": "noul", "instructions": "?"}});
    let json = predict(&"s".into(), &questions, &PredictOptions::default()).to_json();
    let keys = |v: &Value| v.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(keys(&json), "model answers usage");
    assert_eq!(keys(&json["answers"]["c"]), "type choice probabilities confidence answer_confidence action");
    assert_eq!(keys(&json["answers"]["s"]), "type score legend probabilities confidence answer_confidence action");
    assert_eq!(keys(&json["answers"]["n"]), "type noul confidence answer_confidence action");
    assert_eq!(
        keys(&json["usage"]),
        "input_tokens output_tokens state_tokens state_tokens_dropped truncated truncated_questions"
    );
}

#[test]
fn equal_rows_of_a_batch_are_scored_once_and_every_state_gets_its_result() {
    let scorer = Recorded::default();
    let calls = scorer.calls.clone();
    let mut agent = agent("tiny-multi", scorer);
    let states = [json!("a"), json!("b"), json!("a"), json!(["a"])];
    let results = agent.predict_batch(&states, &noul(), &PredictOptions::default()).unwrap();
    assert_eq!(calls.lock().unwrap()[0].len(), 3);
    assert_eq!(results[0], results[2]);
    assert_ne!(results[0].answers[0].logits, results[1].answers[0].logits);
}

#[test]
fn an_observer_is_told_of_calls_and_their_ends() {
    #[derive(Debug, Clone, Default)]
    struct Log(Arc<Mutex<Vec<String>>>);
    impl tilewright_decide::Observer for Log {
        fn predict_start(&mut self, states: &[Value], _: &Value) {
            self.0.lock().unwrap().push(format!("start {}", states.len()));
        }
        fn predict_end(&mut self, results: &[Prediction]) {
            self.0.lock().unwrap().push(format!("end {}", results.len()));
        }
        fn predict_error(&mut self, error: &tilewright_decide::Error) {
            self.0.lock().unwrap().push(format!("error {}", error.kind()));
        }
    }
    let log = Log::default();
    let mut agent = english().0.with_observer(Box::new(log.clone()));
    agent.predict_batch(&[json!("a"), json!("b")], &noul(), &PredictOptions::default()).unwrap();
    agent.predict(&Value::Null, &noul(), &PredictOptions::default()).unwrap_err();
    assert_eq!(*log.0.lock().unwrap(), ["start 2", "end 2", "start 1", "error TypeError"]);
}

/// However a request spells a number, what comes back is spelled as Python spells it.
#[test]
fn labels_of_tournaments_shortlists_and_schemas_are_spelled_as_python_spells_them() {
    let labels: Value = serde_json::from_str("[5000e0, -0, 1E+16, 0.10]").unwrap();
    let (mut agent, _) = english();
    let questions = json!({"q": {"type": "choice", "instructions": "Which?", "criteria": labels}});
    let all = "[5000.0,0,1e+16,0.1]";
    let result = agent.predict_tournament(&json!("x"), &questions, 16, &PredictOptions::default()).unwrap();
    assert_eq!(result.extra["tournament"]["q"]["labels"].to_string(), all);
    let result = agent.predict_shortlist(&json!("x"), &questions, 16, &PredictOptions::default()).unwrap();
    assert_eq!(result.extra["shortlist"]["q"]["labels"].to_string(), all);
    for (label, spelled) in labels.as_array().unwrap().iter().zip(["5000.0", "0", "1e+16", "0.1"]) {
        let schema = json!({"properties": {"p": {"enum": [label]}}});
        let decision = agent.decide(&json!("x"), &schema, &PredictOptions::default()).unwrap();
        assert_eq!(decision.values["p"].to_string(), spelled);
    }
}
