//! What makes a question unaskable, in the order in which the `laya` package looks, with its messages.

use std::collections::HashMap;

use serde_json::{Map, Value};
use tilewright_models::laya::QuestionType;

use super::question_type;
use crate::error::{Result, value_error};
use crate::json::as_int;
use crate::python::{LabelKey, repr, repr_str, strip, type_name};

/// Refuses a definition that cannot be asked.
pub(super) fn check(id: &str, definition: &Value) -> Result<()> {
    let q = format!("question {}", repr_str(id));
    if strip(id).is_empty() {
        return value_error!("question id must be a non-empty string, got {}", repr_str(id));
    }
    let Value::Object(map) = definition else {
        return value_error!("{q}: definition must be a dict, got {}", type_name(definition));
    };
    let Some(kind) = question_type(definition) else {
        let got = map.get("type").unwrap_or(&Value::Null);
        return value_error!("{q}: unknown type {}; use one of ['choice', 'noul', 'score']", repr(got));
    };
    check_instructions(&q, map)?;
    let criteria = map.get("criteria").unwrap_or(&Value::Null);
    let options = match kind {
        QuestionType::Choice => check_choice(&q, criteria)?,
        QuestionType::Score => check_score(&q, criteria)?,
        QuestionType::Noul => check_noul(&q, criteria)?,
    };
    if let Some(order) = map.get("option_order")
        && !is_permutation(order, options)
    {
        return value_error!(
            "{q}: 'option_order' must be a permutation of range({options}) -- one slot per option, each option once -- \
             got {}",
            repr(order)
        );
    }
    match map.get("labels") {
        None => Ok(()),
        Some(_) if kind != QuestionType::Noul => value_error!("{q}: 'labels' is only supported for noul questions"),
        Some(labels) if are_labels(labels) => Ok(()),
        Some(_) => {
            value_error!("{q}: noul labels must map exactly 'false' and 'true' to distinct non-empty strings")
        }
    }
}

fn check_instructions(q: &str, definition: &Map<String, Value>) -> Result<()> {
    const ADD: &str = "add the text the model should answer";
    let empty = match definition.get("instructions") {
        None => return value_error!("{q}: no 'instructions'; {ADD}"),
        Some(Value::Null) => return value_error!("{q}: 'instructions' must not be None; {ADD}"),
        Some(Value::String(s)) => strip(s).is_empty(),
        Some(Value::Array(items)) => items.is_empty(),
        Some(Value::Object(members)) => members.is_empty(),
        Some(Value::Bool(_) | Value::Number(_)) => false,
    };
    if empty { value_error!("{q}: 'instructions' must not be empty; {ADD}") } else { Ok(()) }
}

/// The number of options.
fn check_choice(q: &str, criteria: &Value) -> Result<usize> {
    let count = match criteria {
        Value::Object(map) => map.len(),
        Value::Array(labels) => labels.len(),
        _ => {
            return value_error!(
                "{q}: a choice question takes 'criteria' as a dict of label -> description, or a list of labels"
            );
        }
    };
    if count == 0 {
        return value_error!("{q}: a choice question needs at least one criterion");
    }
    let Value::Array(labels) = criteria else { return Ok(count) };
    for (i, label) in labels.iter().enumerate() {
        match label {
            Value::Array(_) | Value::Object(_) => {
                return value_error!(
                    "{q}: choice label {i} is a {}; a label is rendered as option text and used as the answer key, so it \
                     must be a scalar (a string, number or bool), got {}",
                    type_name(label),
                    repr(label)
                );
            }
            Value::Null => {
                return value_error!(
                    "{q}: choice label {i} is null; a label is rendered as option text and used as the answer key, so it \
                     must be a string, number or bool -- a null label renders as the text \"None\" while its answer key is \
                     \"null\""
                );
            }
            _ => {}
        }
    }
    let mut seen = HashMap::with_capacity(count);
    for (i, label) in labels.iter().enumerate() {
        if let Some(first) = seen.insert(LabelKey::of(label), i) {
            return value_error!(
                "{q}: choice label {i} ({}) repeats label {first}; the labels are the answer keys, so every option needs its \
                 own (1, 1.0 and True are one key)",
                repr(label)
            );
        }
    }
    Ok(count)
}

fn check_score(q: &str, criteria: &Value) -> Result<usize> {
    let Value::Array(levels) = criteria else {
        return value_error!("{q}: a score question takes 'criteria' as a list of level descriptions, index 0 first");
    };
    if levels.is_empty() {
        return value_error!("{q}: a score question needs at least one level");
    }
    match levels.iter().position(Value::is_null) {
        Some(i) => value_error!("{q}: score level {i} is null; give every level a description, index 0 first"),
        None => Ok(levels.len()),
    }
}

fn check_noul(q: &str, criteria: &Value) -> Result<usize> {
    let map = match criteria {
        Value::Null => return Ok(2),
        Value::Object(map) => map,
        _ => {
            return value_error!(
                "{q}: a noul question takes 'criteria' as a dict with optional 'true'/'false' descriptions, or omits it"
            );
        }
    };
    let mut keys: Vec<String> = map.keys().map(|k| k.to_lowercase()).collect();
    if keys.iter().all(|k| k == "true" || k == "false") {
        return Ok(2);
    }
    keys.sort();
    keys.dedup();
    let keys = Value::Array(keys.into_iter().map(Value::String).collect());
    value_error!(
        "{q}: a noul question takes 'criteria' keyed only 'true'/'false' (either or both, and omitted is fine), got {}. Those \
         keys are the option texts the model reads; any other key was silently dropped and replaced with the defaults. If you \
         want the answer worded differently, keep 'criteria' keyed 'true'/'false' and set 'labels' instead.",
        repr(&keys)
    )
}

/// Whether `order` holds each of `0..options` once, as integers.
fn is_permutation(order: &Value, options: usize) -> bool {
    let Value::Array(order) = order else { return false };
    let mut seen = vec![false; options];
    order.len() == options
        && order.iter().all(|slot| {
            let index = as_int(slot).and_then(|i| usize::try_from(i).ok()).filter(|&i| i < options);
            index.is_some_and(|i| !std::mem::replace(&mut seen[i], true))
        })
}

/// Whether these are two different texts, one for false and one for true. Null stands for the defaults.
fn are_labels(labels: &Value) -> bool {
    let Value::Object(map) = labels else { return labels.is_null() };
    let text = |key: &str| map.get(key).and_then(Value::as_str).map(strip).filter(|s| !s.is_empty());
    map.len() == 2 && matches!((text("false"), text("true")), (Some(a), Some(b)) if a != b)
}
