//! A question as the prompt and the answer need it: checked, normalised, its options rendered to text.

mod validate;

use serde_json::{Map, Value};
use tilewright_models::laya::QuestionType;

use crate::error::{Result, type_error};
use crate::json::{as_int, json_text, number_key, plain_text};
use crate::python::{label_text, strip, type_name};

/// Options of a noul question that describes none.
const NOUL_DEFAULTS: [&str; 2] = ["no, the statement does not hold", "yes, the statement holds"];

/// One question. Made by [`parse_questions`] only, so it is always askable.
#[derive(Clone, PartialEq, Debug)]
pub struct Question {
    /// Its key in the request.
    pub id: String,
    /// How it is answered.
    pub kind: QuestionType,
    /// The instructions as text.
    pub instructions: String,
    /// The text of each option, in the order of the criteria. Never empty.
    pub options: Vec<String>,
    /// Slot `s` shows option `order[s]`.
    pub order: Option<Vec<usize>>,
    /// What answers call the options: labels of a choice in the caller's JSON types, criteria texts of a score, nothing for noul.
    pub(crate) names: Vec<Value>,
}

impl Question {
    /// The key of option `i` among the probabilities: how JSON spells its label, or the number of its level.
    pub(crate) fn key(&self, i: usize) -> String {
        match (&self.kind, self.names.get(i)) {
            (QuestionType::Choice, Some(label)) => label_key(label),
            _ => i.to_string(),
        }
    }

    /// The options' indices in slot order.
    pub fn slots(&self) -> Vec<usize> {
        self.order.clone().unwrap_or_else(|| (0..self.options.len()).collect())
    }
}

/// A label as a JSON object key: 1 is "1", true is "true".
fn label_key(label: &Value) -> String {
    match label {
        Value::String(s) => s.clone(),
        Value::Number(n) => number_key(n),
        other => json_text(other),
    }
}

/// The questions of a request, which is an object of definitions by id. All are checked before any is returned.
pub fn parse_questions(questions: &Value) -> Result<Vec<Question>> {
    let questions = as_questions(questions)?;
    for (id, definition) in questions {
        validate::check(id, definition)?;
    }
    Ok(questions.iter().map(|(id, definition)| normalise(id, definition)).collect())
}

/// Refuses anything but an object.
pub(crate) fn as_questions(questions: &Value) -> Result<&Map<String, Value>> {
    match questions {
        Value::Object(map) => Ok(map),
        other => {
            type_error!("questions must be a dict of question id -> definition, got {}", type_name(other))
        }
    }
}

/// Refuses null.
pub(crate) fn check_state(state: &Value) -> Result<()> {
    match state {
        Value::Null => type_error!("state must not be None; pass a string, dict, or list"),
        _ => Ok(()),
    }
}

/// Turns a checked definition into a question.
fn normalise(id: &str, definition: &Value) -> Question {
    let kind = question_type(definition).expect("checked before");
    let criteria = definition.get("criteria").unwrap_or(&Value::Null);
    let (names, options) = match kind {
        QuestionType::Choice => choice_options(criteria),
        QuestionType::Score => score_options(criteria),
        QuestionType::Noul => (Vec::new(), noul_options(criteria, definition.get("labels"))),
    };
    let order = definition
        .get("option_order")
        .and_then(Value::as_array)
        .map(|order| order.iter().filter_map(as_int).map(|i| i as usize).collect());
    let instructions = plain_text(&definition["instructions"]);
    Question { id: id.to_owned(), kind, instructions, options, order, names }
}

/// The type that a definition names.
pub(crate) fn question_type(definition: &Value) -> Option<QuestionType> {
    let name = definition.get("type")?.as_str()?;
    QuestionType::ALL.into_iter().find(|t| t.name() == name)
}

fn choice_options(criteria: &Value) -> (Vec<Value>, Vec<String>) {
    match criteria {
        Value::Object(map) => map
            .iter()
            .map(|(label, criterion)| {
                let text =
                    if is_blank(criterion) { label.clone() } else { format!("{label}: {}", plain_text(criterion)) };
                (Value::String(label.clone()), text)
            })
            .unzip(),
        Value::Array(labels) => labels.iter().map(|label| (label.clone(), label_text(label))).unzip(),
        _ => (Vec::new(), Vec::new()),
    }
}

fn score_options(criteria: &Value) -> (Vec<Value>, Vec<String>) {
    let levels = criteria.as_array().map_or(&[][..], Vec::as_slice);
    let names = levels.iter().map(|level| Value::String(plain_text(level))).collect();
    let texts = levels.iter().enumerate().map(|(i, level)| format!("level {i}: {}", plain_text(level))).collect();
    (names, texts)
}

fn noul_options(criteria: &Value, labels: Option<&Value>) -> Vec<String> {
    let described = |wanted: &str| {
        // Keys are compared lowercased; of several that are then equal the last one counts.
        let mut members = criteria.as_object().into_iter().flatten();
        let found = members.rfind(|(key, _)| key.to_lowercase() == wanted);
        found.map(|(_, criterion)| criterion).filter(|c| !is_blank(c)).map(plain_text)
    };
    let label = |name: &str| {
        let given = labels.and_then(|l| l.get(name)).and_then(Value::as_str);
        given.map_or(name, strip).to_owned()
    };
    ["false", "true"]
        .into_iter()
        .zip(NOUL_DEFAULTS)
        .map(|(name, default)| format!("{}: {}", label(name), described(name).unwrap_or_else(|| default.to_owned())))
        .collect()
}

/// "No description": null and the empty string. 0 and false describe (trap 11).
fn is_blank(criterion: &Value) -> bool {
    match criterion {
        Value::Null => true,
        Value::String(s) => s.is_empty(),
        _ => false,
    }
}
