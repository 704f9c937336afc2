//! A request to a router: a state, questions, and where it should go.

use serde_json::Value;

use super::decision::{Hints, LanguageGuess};
use crate::error::{Result, type_error, value_error};
use crate::json::as_int;
use crate::python::{repr, type_name};
use crate::question::{as_questions, check_state};

/// One state and its questions, with hints and limits of its own.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Request {
    /// Any JSON value but null.
    pub state: Value,
    /// Definitions by id.
    pub questions: Value,
    /// The name of a checkpoint.
    pub model: Option<String>,
    /// `typed-decisions`, or the name of a checkpoint.
    pub task: Option<String>,
    /// The language of the state.
    pub lang: Option<String>,
    /// A weaker hint at it.
    pub lang_guess: Option<String>,
    /// Tokens of a row, instead of the checkpoint's.
    pub max_len: Option<usize>,
    /// Tokens of instructions and options, instead of the checkpoint's.
    pub head_max_len: Option<usize>,
}

impl Request {
    /// A request without hints.
    pub fn new(state: Value, questions: Value) -> Self {
        Request { state, questions, ..Request::default() }
    }

    /// Reads request `i` of a batch from `{state, questions, model?, task?, lang?, lang_guess?, max_len?, head_max_len?}`; other keys are passed over.
    pub fn from_json(i: usize, value: &Value) -> Result<Self> {
        let Value::Object(fields) = value else {
            return type_error!("request {i} must be a dict, got {}", type_name(value));
        };
        let required = |key: &str| match fields.get(key) {
            Some(value) => Ok(value),
            None => value_error!("request {i} is missing required key '{key}'"),
        };
        let state = required("state")?;
        if state.is_null() {
            return type_error!("request {i} 'state' must not be None; pass a string, dict, or list");
        }
        let questions = required("questions")?;
        if !questions.is_object() {
            return type_error!("request {i} 'questions' must be a dict, got {}", type_name(questions));
        }
        let text = |key: &str| match fields.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(other) => type_error!("request {i} '{key}' must be a string, got {}", type_name(other)),
        };
        let count = |key: &str| match fields.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(other) => match as_int(other).and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0) {
                Some(n) => Ok(Some(n)),
                None => value_error!("request {i} '{key}' must be a positive integer, got {}", repr(other)),
            },
        };
        Ok(Request {
            state: state.clone(),
            questions: questions.clone(),
            model: text("model")?,
            task: text("task")?,
            lang: text("lang")?,
            lang_guess: text("lang_guess")?,
            max_len: count("max_len")?,
            head_max_len: count("head_max_len")?,
        })
    }

    /// Refuses a null state and questions that are no object.
    pub(super) fn check(&self) -> Result<()> {
        check_state(&self.state)?;
        as_questions(&self.questions).map(|_| ())
    }

    pub(super) fn hints(&self) -> Hints<'_> {
        Hints {
            model: self.model.as_deref(),
            task: self.task.as_deref(),
            lang: self.lang.as_deref(),
            lang_guess: self.lang_guess.as_deref().map(LanguageGuess::Code),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_request_is_read_with_its_hints_and_limits() {
        let value = json!({"state": ["a"], "questions": {"q": 1}, "model": "en", "lang": "de", "max_len": 64, "x": 0});
        let request = Request::from_json(0, &value).unwrap();
        assert_eq!((request.model.as_deref(), request.lang.as_deref(), request.task), (Some("en"), Some("de"), None));
        assert_eq!((request.max_len, request.head_max_len), (Some(64), None));
    }

    #[test]
    fn what_is_wrong_is_named_with_the_number_of_the_request() {
        for (value, want) in [
            (json!([]), "request 3 must be a dict, got list"),
            (json!({"questions": {}}), "request 3 is missing required key 'state'"),
            (
                json!({"state": null, "questions": {}}),
                "request 3 'state' must not be None; pass a string, dict, or list",
            ),
            (json!({"state": "x"}), "request 3 is missing required key 'questions'"),
            (json!({"state": "x", "questions": []}), "request 3 'questions' must be a dict, got list"),
            (json!({"state": "x", "questions": {}, "lang": 1}), "request 3 'lang' must be a string, got int"),
            (
                json!({"state": "x", "questions": {}, "max_len": 0}),
                "request 3 'max_len' must be a positive integer, got 0",
            ),
        ] {
            assert_eq!(Request::from_json(3, &value).unwrap_err().to_string(), want);
        }
    }
}
