//! From the bytes of a body to a call that is worth answering.

use serde_json::{Map, Value, json};
use tilewright_decide::{Gate, json_text, parse_questions};

use crate::config::{Dialect, Limits};
use crate::fault::{Detail, Fault};
use crate::service::{Call, Task};

/// What a body holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// One state.
    Single,
    /// Many states, the same questions.
    Batch,
    /// One state, to be shown as the model reads it.
    Explain,
}

/// What a body must keep to.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// How it is spelled.
    pub dialect: Dialect,
    /// Sizes.
    pub limits: &'a Limits,
    /// Options of a choice.
    pub most_options: usize,
    /// Choices with more options than this are read in parts.
    pub narrowed_above: usize,
}

/// Members that would change what the server does, not what is asked. Ignoring them silently would mislead.
const REFUSED: [&str; 6] = ["hooks", "hooks_raise", "hooks_timeout", "hooks_start", "hooks_end", "diagnostics"];

/// What a question without instructions is asked, in the dialect whose clients may leave them out.
const INSTRUCTIONS: [(&str, &str); 3] =
    [("noul", "Does the statement hold?"), ("choice", "Which option fits best?"), ("score", "Which level fits best?")];

/// Reads a body. Nothing in it can make this panic or take more memory than a small multiple of its size.
pub fn parse(body: &[u8], form: Form, rules: Rules<'_>) -> Result<Call, Fault> {
    let value = json(body)?;
    let Value::Object(mut fields) = value else {
        let msg = "the request body must be a JSON object with `state` and `questions`";
        return Err(Fault::malformed(&[], "model_attributes_type", msg));
    };
    call(&mut fields, form, rules)
}

/// The JSON of a body: UTF-8, one document, no deeper than 128, no lone surrogates; of equal keys the last counts.
fn json(body: &[u8]) -> Result<Value, Fault> {
    let text = std::str::from_utf8(body).map_err(|e| {
        Fault::malformed(&[], "json_invalid", format!("the body is not UTF-8 from byte {} on", e.valid_up_to()))
    })?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    serde_json::from_str(text).map_err(|e| Fault::malformed(&[], "json_invalid", format!("JSON decode error: {e}")))
}

fn call(fields: &mut Map<String, Value>, form: Form, rules: Rules<'_>) -> Result<Call, Fault> {
    let refused: Vec<&str> = REFUSED.into_iter().filter(|key| fields.get(*key).is_some_and(|v| !v.is_null())).collect();
    if let Some(first) = refused.first() {
        let msg = format!("{} cannot be sent to this endpoint; drop them", refused.join(", "));
        return Err(Fault::invalid(&[first], "value_error", msg));
    }
    let states = states(fields, form, rules.limits)?;
    let mut questions = match fields.remove("questions") {
        Some(Value::Object(questions)) => questions,
        None => return Err(Fault::malformed(&["questions"], "missing", "Field required: `questions`")),
        Some(_) => {
            let msg = "`questions` must be an object of definitions by id";
            return Err(Fault::malformed(&["questions"], "dict_type", msg));
        }
    };
    if rules.dialect == Dialect::Jev {
        if questions.is_empty() {
            return Err(Fault::invalid(&["questions"], "too_short", "`questions` must hold one question at least"));
        }
        questions.values_mut().for_each(fill_in);
    }
    sizes(&questions, rules)?;
    valid(&questions)?;
    let text = |key: &str| match fields.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(Fault::invalid(&[key], "string_type", format!("`{key}` must be a string or null"))),
    };
    let most = rules.limits.token_budget;
    let count = |key: &str, most: usize| match fields.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match integer(value) {
            Some(n) if n <= most => Ok(Some(n)),
            Some(n) => Err(Fault::invalid(
                &[key],
                "less_than_equal",
                format!("`{key}` exceeds the server's limit ({n} > {most})"),
            )),
            None => Err(Fault::invalid(&[key], "int_type", format!("`{key}` must be a positive integer"))),
        },
    };
    let gate = match fields.get("min_confidence") {
        None | Some(Value::Null) => None,
        Some(value) => {
            Some(Gate::parse(value).map_err(|e| Fault::invalid(&["min_confidence"], "value_error", e.to_string()))?)
        }
    };
    if form == Form::Batch {
        // Neither changes an answer: rows are packed without padding.
        count("batch_size", usize::MAX)?;
        if fields.get("sort_by_length").is_some_and(|v| !v.is_boolean() && !v.is_null()) {
            return Err(Fault::invalid(&["sort_by_length"], "bool_type", "`sort_by_length` must be a boolean"));
        }
    }
    Ok(Call {
        states,
        questions: questions.into(),
        task: if form == Form::Explain { Task::Explain } else { Task::Predict },
        model: text("model")?,
        hint_task: text("task")?,
        lang: text("lang")?,
        lang_guess: text("lang_guess")?,
        max_len: count("max_len", most)?,
        head_max_len: count("head_max_len", most)?,
        gate,
    })
}

/// A positive integer without fraction or exponent.
fn integer(value: &Value) -> Option<usize> {
    let Value::Number(n) = value else { return None };
    // Larger than any limit is larger than any limit.
    let digits = n.as_str();
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    Some(digits.parse().unwrap_or(usize::MAX)).filter(|n| *n > 0)
}

fn states(fields: &mut Map<String, Value>, form: Form, limits: &Limits) -> Result<Vec<Value>, Fault> {
    let states = match form {
        Form::Single | Form::Explain => match fields.remove("state") {
            None | Some(Value::Null) => {
                return Err(Fault::malformed(&["state"], "missing", "Field required: `state` is absent or null"));
            }
            Some(state) => vec![state],
        },
        Form::Batch => match fields.remove("states") {
            Some(Value::Array(states)) if !states.is_empty() => states,
            _ => return Err(Fault::malformed(&["states"], "list_type", "`states` must be a non-empty list")),
        },
    };
    if states.len() > limits.states {
        return Err(Fault::TooLarge(format!("{} states; the limit is {}", states.len(), limits.states)));
    }
    for (i, state) in states.iter().enumerate() {
        if state.is_null() {
            return Err(Fault::malformed(&["states", &i.to_string()], "missing", format!("state {i} is null")));
        }
        let chars = match state {
            Value::String(text) => text.chars().count(),
            other => json_text(other).chars().count(),
        };
        if chars > limits.state_chars {
            let what = format!("the text of the state has {chars} characters; the limit is {}", limits.state_chars);
            return Err(Fault::TooLarge(what));
        }
    }
    Ok(states)
}

/// Instructions for a question that has none but says what it chooses from.
fn fill_in(definition: &mut Value) {
    let Value::Object(definition) = definition else { return };
    let blank = match definition.get("instructions") {
        None | Some(Value::Null) => true,
        Some(Value::String(s)) => s.trim().is_empty(),
        Some(Value::Array(items)) => items.is_empty(),
        Some(Value::Object(members)) => members.is_empty(),
        Some(_) => false,
    };
    let kind = definition.get("type").and_then(Value::as_str);
    let Some((_, text)) = INSTRUCTIONS.into_iter().find(|(name, _)| Some(*name) == kind).filter(|_| blank) else {
        return;
    };
    let says_something = match definition.get("criteria") {
        Some(Value::Object(members)) => members.values().any(|v| !v.is_null()) || kind == Some("choice"),
        Some(Value::Array(items)) => !items.is_empty(),
        _ => false,
    };
    if says_something {
        definition.insert("instructions".into(), text.into());
    }
}

/// Counts that are refused before any work is done.
fn sizes(questions: &Map<String, Value>, rules: Rules<'_>) -> Result<(), Fault> {
    let Rules { limits, most_options, narrowed_above, .. } = rules;
    if questions.len() > limits.questions {
        return Err(Fault::TooLarge(format!("{} questions; the limit is {}", questions.len(), limits.questions)));
    }
    let mut total = 0;
    for (id, definition) in questions {
        let n = match definition.get("criteria") {
            Some(Value::Object(members)) => members.len(),
            Some(Value::Array(items)) => items.len(),
            _ => 0,
        };
        let kind = definition.get("type").and_then(Value::as_str);
        let (most, what) = match kind {
            Some("choice") => (most_options, "options"),
            Some("score") => (limits.levels, "levels"),
            _ => (usize::MAX, ""),
        };
        if n > most {
            return Err(Fault::TooLarge(format!("question {id:?} has {n} {what}; the limit is {most}")));
        }
        total += if n > narrowed_above { 0 } else { n };
    }
    if total > limits.total_options {
        return Err(Fault::TooLarge(format!(
            "the questions have {total} options in all; the limit is {}",
            limits.total_options
        )));
    }
    Ok(())
}

/// All that is wrong with the questions, not only the first thing.
fn valid(questions: &Map<String, Value>) -> Result<(), Fault> {
    let details: Vec<Detail> = questions
        .iter()
        .filter_map(|(id, definition)| {
            let error = parse_questions(&json!({ id: definition })).err()?;
            Some(Detail::at(&["questions", id], "value_error", error.to_string()))
        })
        .collect();
    if details.is_empty() { Ok(()) } else { Err(Fault::Invalid { details, malformed: false }) }
}

/// For fuzzing: any bytes, every form and dialect.
pub fn fuzz(body: &[u8]) {
    let limits = Limits::default();
    for dialect in [Dialect::Jev, Dialect::Laya] {
        for form in [Form::Single, Form::Batch, Form::Explain] {
            let rules = Rules { dialect, limits: &limits, most_options: 255, narrowed_above: 100 };
            match parse(body, form, rules) {
                Ok(call) => {
                    assert!(!call.states.is_empty() && call.states.len() <= limits.states);
                    assert!(call.max_len.is_none_or(|n| (1..=limits.token_budget).contains(&n)));
                    parse_questions(&call.questions).expect("checked");
                }
                Err(fault) => {
                    let status = fault.status(dialect).as_u16();
                    assert!((400..500).contains(&status), "{fault:?}");
                    let body = fault.body(dialect).to_string();
                    serde_json::from_str::<Value>(&body).expect("an error is JSON");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(dialect: Dialect, limits: &Limits) -> Rules<'_> {
        Rules { dialect, limits, most_options: 255, narrowed_above: 100 }
    }

    fn read(body: &str, form: Form, dialect: Dialect) -> Result<Call, Fault> {
        parse(body.as_bytes(), form, rules(dialect, &Limits::default()))
    }

    fn jev(body: &str) -> Result<Call, Fault> {
        read(body, Form::Single, Dialect::Jev)
    }

    /// Place and kind of the first detail.
    fn place(result: Result<Call, Fault>) -> (String, &'static str) {
        match result.unwrap_err() {
            Fault::Invalid { details, .. } => {
                let loc = details[0].loc.iter().map(|l| l.as_str().unwrap().to_owned()).collect::<Vec<_>>();
                (loc.join("."), details[0].kind)
            }
            other => panic!("{other:?}"),
        }
    }

    const NOUL: &str = r#"{"type": "noul", "instructions": "Is it?"}"#;

    #[test]
    fn a_request_is_read_with_its_controls() {
        let call = read(
            &format!(
                r#"{{"state": ["a"], "questions": {{"q": {NOUL}}}, "model": "en", "task": null, "lang": "de",
                     "max_len": 64, "min_confidence": 0.5, "x": 1}}"#
            ),
            Form::Single,
            Dialect::Laya,
        )
        .unwrap();
        assert_eq!(call.states, [json!(["a"])]);
        assert_eq!((call.model.as_deref(), call.lang.as_deref(), call.max_len), (Some("en"), Some("de"), Some(64)));
        assert!(call.gate.is_some() && call.hint_task.is_none());
    }

    #[test]
    fn what_is_no_json_is_malformed_with_the_body_as_its_place() {
        for body in [&b"{"[..], b"", b"\xff\xfe", b"{\"state\": NaN}", br#"{"state": "\ud800"}"#, b"{} {}"] {
            let limits = Limits::default();
            let result = parse(body, Form::Single, rules(Dialect::Jev, &limits));
            assert_eq!(place(result), ("body".to_owned(), "json_invalid"), "{body:?}");
        }
        for body in ["[]", "1", "null", "\"x\""] {
            assert_eq!(place(jev(body)).1, "model_attributes_type");
        }
    }

    #[test]
    fn deep_json_is_refused_and_not_followed() {
        let deep = format!("{{\"state\": {}{}, \"questions\": {{}}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(place(jev(&deep)).1, "json_invalid");
    }

    #[test]
    fn of_equal_keys_the_last_counts_in_the_place_of_the_first() {
        let call = jev(&format!(
            r#"{{"state": "a", "state": {{"k": 1, "l": 2, "k": 3}}, "questions": {{"q": {NOUL}, "r": {NOUL}, "q": {NOUL}}}}}"#
        ))
        .unwrap();
        assert_eq!(call.states[0].to_string(), r#"{"k":3,"l":2}"#);
        assert_eq!(call.questions.as_object().unwrap().keys().collect::<Vec<_>>(), ["q", "r"]);
    }

    #[test]
    fn trap_25_a_missing_or_null_state_is_refused() {
        for body in [
            format!(r#"{{"questions": {{"q": {NOUL}}}}}"#),
            format!(r#"{{"state": null, "questions": {{"q": {NOUL}}}}}"#),
        ] {
            assert_eq!(place(jev(&body)), ("body.state".to_owned(), "missing"));
            let laya = read(&body, Form::Single, Dialect::Laya).unwrap_err();
            assert_eq!(laya.status(Dialect::Laya), 400);
        }
    }

    #[test]
    fn questions_are_needed_and_empty_ones_are_an_answer_in_laya_only() {
        assert_eq!(place(jev(r#"{"state": "a"}"#)), ("body.questions".to_owned(), "missing"));
        assert_eq!(place(jev(r#"{"state": "a", "questions": []}"#)), ("body.questions".to_owned(), "dict_type"));
        assert_eq!(place(jev(r#"{"state": "a", "questions": {}}"#)), ("body.questions".to_owned(), "too_short"));
        assert!(read(r#"{"state": "a", "questions": {}}"#, Form::Single, Dialect::Laya).is_ok());
    }

    #[test]
    fn everything_that_is_wrong_with_the_questions_is_told() {
        let fault =
            jev(r#"{"state": "a", "questions": {"x": {"instructions": "?"}, "y": {"type": "boolean"}}}"#).unwrap_err();
        let Fault::Invalid { details, .. } = fault else { panic!() };
        assert_eq!(details.len(), 2);
        assert_eq!(details[1].loc, [json!("body"), json!("questions"), json!("y")]);
    }

    #[test]
    fn a_question_without_instructions_is_asked_by_its_criteria_in_jev() {
        for (definition, text) in [
            (r#"{"type": "noul", "criteria": {"true": "angry", "false": null}}"#, "Does the statement hold?"),
            (
                r#"{"type": "choice", "instructions": null, "criteria": {"a": null, "b": null}}"#,
                "Which option fits best?",
            ),
            (r#"{"type": "score", "instructions": " ", "criteria": ["low", "high"]}"#, "Which level fits best?"),
        ] {
            let body = format!(r#"{{"state": "a", "questions": {{"q": {definition}}}}}"#);
            assert_eq!(jev(&body).unwrap().questions["q"]["instructions"], text);
            assert!(read(&body, Form::Single, Dialect::Laya).is_err(), "the other dialect wants them");
        }
        assert!(jev(r#"{"state": "a", "questions": {"q": {"type": "noul"}}}"#).is_err(), "nothing is asked");
    }

    #[test]
    fn sizes_beyond_the_limits_are_too_large() {
        let long = "x".repeat(50_001);
        let options = |n: usize| (0..n).map(|i| format!("\"o{i}\": null")).collect::<Vec<_>>().join(",");
        let choice = |n| format!(r#"{{"type": "choice", "instructions": "?", "criteria": {{{}}}}}"#, options(n));
        let levels = (0..33).map(|i| format!("\"{i}\"")).collect::<Vec<_>>().join(",");
        let many = (0..65).map(|i| format!("\"q{i}\": {NOUL}")).collect::<Vec<_>>().join(",");
        let wide = (0..6).map(|i| format!("\"q{i}\": {}", choice(90))).collect::<Vec<_>>().join(",");
        for (state, questions) in [
            (long.as_str(), format!("\"q\": {NOUL}")),
            ("a", format!("\"q\": {}", choice(256))),
            ("a", format!(r#""q": {{"type": "score", "instructions": "?", "criteria": [{levels}]}}"#)),
            ("a", many),
            ("a", wide),
        ] {
            let fault = jev(&format!(r#"{{"state": "{state}", "questions": {{{questions}}}}}"#)).unwrap_err();
            assert!(matches!(fault, Fault::TooLarge(_)), "{fault:?}");
        }
        assert!(jev(&format!(r#"{{"state": "a", "questions": {{"q": {}}}}}"#, choice(255))).is_ok());
    }

    #[test]
    fn token_budgets_are_positive_integers_within_the_limit() {
        for value in ["0", "-1", "1.5", "1e3", "true", "\"9\"", "8193", "99999999999999999999999"] {
            let body = format!(r#"{{"state": "a", "questions": {{"q": {NOUL}}}, "max_len": {value}}}"#);
            assert_eq!(place(jev(&body)).0, "body.max_len", "{value}");
        }
    }

    #[test]
    fn hints_are_strings_and_hooks_are_refused() {
        for (member, where_) in
            [("\"lang\": true", "body.lang"), ("\"model\": 1", "body.model"), ("\"hooks\": []", "body.hooks")]
        {
            let body = format!(r#"{{"state": "a", "questions": {{"q": {NOUL}}}, {member}}}"#);
            assert_eq!(place(jev(&body)).0, where_);
        }
    }

    #[test]
    fn a_batch_has_states() {
        let batch = |states: &str| {
            read(&format!(r#"{{"states": {states}, "questions": {{"q": {NOUL}}}}}"#), Form::Batch, Dialect::Laya)
        };
        assert_eq!(batch(r#"["a", {"b": 1}]"#).unwrap().states.len(), 2);
        for bad in ["[]", "\"a\"", "null", "[null]"] {
            assert_eq!(batch(bad).unwrap_err().status(Dialect::Laya), 400, "{bad}");
        }
        let many = format!("[{}]", vec!["\"a\""; 65].join(","));
        assert!(matches!(batch(&many).unwrap_err(), Fault::TooLarge(_)));
    }

    #[test]
    fn mutations_of_a_request_are_read_or_refused() {
        let seed = format!(r#"{{"state": {{"a": [1, 2.5e3, "x"]}}, "questions": {{"q": {NOUL}}}, "max_len": 64}}"#);
        let mut state = 0x2545_F491_4F6C_DD1Du64;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as usize
        };
        for _ in 0..2_000 {
            let mut bytes = seed.clone().into_bytes();
            for _ in 0..1 + next() % 4 {
                let at = next() % bytes.len();
                match next() % 3 {
                    0 => bytes[at] = next() as u8,
                    1 => bytes.truncate(at.max(1)),
                    _ => bytes.insert(at, b"{}[]\",:0e\\"[next() % 10]),
                }
            }
            fuzz(&bytes);
        }
    }
}
