//! Requests of all kinds, most of them odd, against the tiny checkpoints: no panic, no number that is not finite, no distribution that does not sum to 1.

mod support;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Map, Number, Value, json};
use support::{CHECKPOINTS, fixtures};
use tilewright_decide::{Agent, OpenOptions, PredictOptions, TOLERANCE, json_text};
use tilewright_models::laya::{Laya, Scorer};

/// Pieces that tokenizers, JSON and Python treat specially.
const ODD: [&str; 16] = [
    "",
    " ",
    "[MASK]",
    "<mask>",
    "[SEP][CLS]",
    "<eos>",
    "[PAD]",
    "\u{0}",
    "\u{1f}",
    "\u{200b}\u{feff}",
    "e\u{301}",
    "\u{1f469}\u{200d}\u{1f469}",
    "\"\\\n\t",
    "\u{2028}",
    "true",
    "مرحبا 发票 मुझसे",
];

fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![prop::sample::select(&ODD[..]).prop_map(str::to_owned), "[a-z ]{0,12}", "\\PC{0,8}"];
    prop::collection::vec(piece, 0..6).prop_map(|pieces| pieces.concat())
}

fn number() -> impl Strategy<Value = Value> {
    let odd = [
        "0",
        "-0",
        "1",
        "1.0",
        "-0.0",
        "1e16",
        "1e-5",
        "5e-324",
        "1.7976931348623157e308",
        "1e400",
        "-1e999",
        "12345678901234567890123456789012345678901234567890",
        "0.1",
        "9007199254740993",
    ];
    let odd = prop::sample::select(odd.to_vec()).prop_map(|n| Value::Number(n.parse::<Number>().unwrap()));
    prop_oneof![odd, any::<i64>().prop_map(Value::from), any::<f64>().prop_map(Value::from)]
}

fn scalar() -> impl Strategy<Value = Value> {
    prop_oneof![4 => text().prop_map(Value::from), 2 => number(), 1 => any::<bool>().prop_map(Value::from), 1 => Just(Value::Null)]
}

fn value() -> impl Strategy<Value = Value> {
    scalar().prop_recursive(6, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((text(), inner), 0..4).prop_map(|m| Value::Object(m.into_iter().collect())),
        ]
    })
}

fn state() -> impl Strategy<Value = Value> {
    prop_oneof![3 => text().prop_map(Value::from), 3 => value(), 1 => prop::collection::vec(text(), 0..60).prop_map(|t| t.join(" ").into())]
}

/// Labels that are mostly different.
fn labels(most: usize) -> impl Strategy<Value = Value> {
    let named = prop::collection::vec((text(), value()), 1..most)
        .prop_map(|m| Value::Object(m.into_iter().enumerate().map(|(i, (k, v))| (format!("{k}{i}"), v)).collect()));
    let numbered = (1..most).prop_map(|n| (0..n).map(|i| format!("label {i}")).collect());
    prop_oneof![2 => named, 2 => numbered, 1 => prop::collection::vec(scalar(), 0..8).prop_map(Value::from)]
}

fn question(most: usize) -> impl Strategy<Value = Value> {
    let criteria = prop_oneof![
        4 => labels(most).prop_map(|c| json!({"type": "choice", "criteria": c})),
        2 => prop::collection::vec(value(), 1..8).prop_map(|c| json!({"type": "score", "criteria": c})),
        2 => (value(), text()).prop_map(|(v, t)| json!({"type": "noul", "criteria": {"TRUE": v, "false": t}})),
        1 => (text(), text()).prop_map(|(a, b)| json!({"type": "noul", "labels": {"true": a, "false": b}})),
        1 => value().prop_map(|c| json!({"type": "choice", "criteria": c})),
    ];
    let order = prop_oneof![6 => Just(Value::Null), 1 => Just(json!([1, 0])), 1 => value()];
    (criteria, value(), order).prop_map(|(mut question, instructions, order)| {
        question["instructions"] = if instructions.is_null() { "What is it?".into() } else { instructions };
        if !order.is_null() {
            question["option_order"] = order;
        }
        question
    })
}

fn request(most: usize) -> impl Strategy<Value = (Value, Value, PredictOptions)> {
    let questions = prop::collection::vec((text(), question(most)), 0..4)
        .prop_map(|q| Value::Object(q.into_iter().map(|(id, q)| (format!("q{id}"), q)).collect::<Map<_, _>>()));
    let length = |most| prop::option::weighted(0.3, 0..most as usize);
    (state(), questions, length(300), length(200)).prop_map(|(state, questions, max_len, head_max_len)| {
        (state, questions, PredictOptions { max_len, head_max_len, ..PredictOptions::default() })
    })
}

/// Runs random requests of at most `most` labels; returns how many were answered.
fn answered<S: Scorer>(mut agent: Agent<S>, requests: u32, most: usize) -> u32 {
    let config = Config { failure_persistence: None, max_shrink_iters: 200, ..Config::with_cases(requests) };
    let mut runner = TestRunner::new(config);
    let agent = std::cell::RefCell::new(&mut agent);
    let answered = std::cell::Cell::new(0);
    let result = runner.run(&request(most), |(state, questions, options)| {
        let result = match agent.borrow_mut().predict(&state, &questions, &options) {
            Ok(result) => result,
            Err(error) => {
                prop_assert!(error.is_request(), "{}", error);
                prop_assert!(!error.to_string().is_empty());
                return Ok(());
            }
        };
        answered.set(answered.get() + 1);
        for answer in &result.answers {
            let p = answer.distribution.probabilities();
            let sum: f64 = p.iter().map(|p| f64::from(*p)).sum();
            prop_assert!((sum - 1.0).abs() <= TOLERANCE, "{sum}");
            let numbers = [answer.confidence, answer.answer_confidence, answer.act_probability];
            prop_assert!(numbers.iter().all(|x| (0.0..=1.0).contains(x)), "{numbers:?}");
        }
        prop_assert!(!json_text(&result.to_json()).contains("NaN"));
        prop_assert_eq!(result.answers.len(), questions.as_object().unwrap().len());
        Ok(())
    });
    result.unwrap();
    answered.get()
}

fn open(checkpoint: &str) -> Agent<Laya> {
    Agent::open(&fixtures().join(checkpoint), &OpenOptions::default()).unwrap()
}

// 5,000 requests in all, with those for many options; the model reads 1,400 of them.

#[test]
fn random_requests_get_probabilities_or_a_reason() {
    let answers: u32 = CHECKPOINTS.into_iter().map(|checkpoint| answered(open(checkpoint), 400, 6)).sum();
    assert!(answers > 400, "only {answers} of the requests could be answered; the test would prove little");
}

#[test]
fn random_requests_with_made_up_scores_get_probabilities_or_a_reason() {
    let made_up = |checkpoint: &str| support::agent(checkpoint, support::Recorded::default());
    let answers: u32 = CHECKPOINTS.into_iter().map(|checkpoint| answered(made_up(checkpoint), 1200, 8)).sum();
    assert!(answers > 1000, "only {answers} of the requests could be answered; the test would prove little");
}

#[test]
fn random_requests_with_up_to_255_options_get_probabilities_or_a_reason() {
    let answers: u32 = CHECKPOINTS.into_iter().map(|checkpoint| answered(open(checkpoint), 67, 256)).sum();
    assert!(answers > 20, "only {answers} of the requests could be answered; the test would prove little");
}

#[test]
fn the_most_options_that_a_request_may_have_are_answered() {
    let mut agent = open("tiny-multi");
    let labels: Vec<String> = (0..255).map(|i| format!("no {i}")).collect();
    let questions = json!({"q": {"type": "choice", "instructions": "Which?", "criteria": labels}});
    let error = agent.predict(&"x".into(), &questions, &PredictOptions::default()).unwrap_err();
    assert!(error.to_string().contains("option markers fit in max_len=256"), "{error}");
    let options = PredictOptions { max_len: Some(1024), head_max_len: Some(1000), ..PredictOptions::default() };
    let result = agent.predict(&"x".into(), &questions, &options).unwrap();
    assert_eq!(result.answers[0].distribution.len(), 255);
}

#[test]
fn values_nested_deeper_than_any_parser_allows_do_not_overflow_the_stack() {
    let mut agent = open("tiny-en");
    let mut deep = Value::Null;
    for i in 0..20_000 {
        // Not by the macro, which copies recursively.
        deep = if i % 2 == 0 {
            Value::Array(vec![deep])
        } else {
            Value::Object([("k".to_owned(), deep)].into_iter().collect())
        };
    }
    let text = json_text(&deep);
    assert!(text.starts_with("{\"k\": [{") && text.ends_with("}]}"));
    let questions = json!({"q": {"type": "noul", "instructions": "Is it deep?"}});
    let result = agent.predict(&deep, &questions, &PredictOptions::default()).unwrap();
    assert!(result.usage.state.unwrap().dropped > 10_000);
    // Taken apart by hand: dropping it would recurse.
    while let Some(inner) = match &mut deep {
        Value::Array(items) => items.pop(),
        Value::Object(members) => members.values_mut().next().map(Value::take),
        _ => None,
    } {
        deep = inner;
    }
}
