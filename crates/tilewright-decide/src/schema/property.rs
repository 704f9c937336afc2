//! One property of a schema, with references, wrappers and nullable forms looked through.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::{Field, MAX_LEVELS, MAX_OPTIONS, Target};
use crate::error::{Result, schema_error};
use crate::json::PyNumber;
use crate::python::{is_falsy, label_text, repr, repr_str, type_name};

/// The members of a property by reference: merged ones come from several places, and a schema may be nested deeply.
type Members<'a> = Vec<(&'a str, &'a Value)>;

const PREFIXES: [(&str, &str); 2] = [("#/$defs/", "$defs"), ("#/definitions/", "definitions")];

fn members(map: &Map<String, Value>) -> Members<'_> {
    map.iter().map(|(k, v)| (k.as_str(), v)).collect()
}

fn get<'a>(members: &Members<'a>, key: &str) -> Option<&'a Value> {
    members.iter().find(|(k, _)| *k == key).map(|(_, v)| *v)
}

/// Puts `over` on top, except for one key.
fn merge<'a>(members: &mut Members<'a>, over: Members<'a>, except: &str) {
    for (key, value) in over.into_iter().filter(|(k, _)| *k != except) {
        match members.iter_mut().find(|(k, _)| *k == key) {
            Some((_, known)) => *known = value,
            None => members.push((key, value)),
        }
    }
}

/// The question of a property.
pub(super) fn field(name: &str, property: &Value, root: &Map<String, Value>) -> Result<Field> {
    let path = format!("properties.{name}");
    let Value::Object(property) = property else {
        return schema_error!("{path}: property must be an object, got {}", type_name(property));
    };
    let property = look_through(&path, members(property), root)?;
    let described = get(&property, "description").filter(|d| !is_falsy(d));
    let instructions = |default: String| described.cloned().unwrap_or(Value::String(default));
    let target = |question: Value, target: Target| Ok(Field { name: name.to_owned(), question, target });
    let truth =
        || target(json!({"type": "noul", "instructions": instructions(format!("Is `{name}` true?"))}), Target::Truth);

    let values = match (get(&property, "const"), get(&property, "enum")) {
        (Some(value), _) => Some(std::slice::from_ref(value)),
        (None, Some(Value::Array(values))) => Some(values.as_slice()),
        (None, Some(other)) => {
            return schema_error!("{path}: 'enum' must be an array of values, got {}", type_name(other));
        }
        (None, None) => None,
    };
    if let Some(values) = values {
        let labels = labels(&path, values)?;
        if values.contains(&Value::Bool(true))
            && values.contains(&Value::Bool(false))
            && values.iter().all(Value::is_boolean)
        {
            return truth();
        }
        let mut seen = HashSet::new();
        if !labels.iter().all(|label| seen.insert(label)) {
            return schema_error!("{path}: enum values produce duplicate choice labels");
        }
        let criteria: Map<String, Value> = labels.into_iter().map(|label| (label, Value::Null)).collect();
        let instructions = instructions(format!("What is `{name}`?"));
        let question = json!({"type": "choice", "instructions": instructions, "criteria": criteria});
        return target(question, Target::Options(values.to_vec()));
    }

    match single_type(&path, &property)? {
        Some("boolean") => truth(),
        Some("string") => {
            schema_error!("{path}: a free string cannot be a fixed option set; use 'enum' or a boolean")
        }
        Some("integer" | "number") => {
            let (low, high) = bounds(&path, &property)?;
            let instructions = instructions(format!("Score `{name}` from {low} to {high}"));
            let levels: Vec<String> = (low..=high).map(|level| level.to_string()).collect();
            let question = json!({"type": "score", "instructions": instructions, "criteria": levels});
            target(question, Target::Level(low))
        }
        Some("array") => schema_error!("{path}: arrays are not supported; ask one field per element"),
        Some("object") => schema_error!("{path}: nested objects are not supported; flatten the schema"),
        _ => {
            let members: Vec<String> = property.iter().map(|(k, v)| format!("{}: {}", repr_str(k), repr(v))).collect();
            schema_error!("{path}: unsupported schema {{{}}}", members.join(", "))
        }
    }
}

/// Follows local references, `allOf` of one and unions with null, until a property with a type of its own is left.
fn look_through<'a>(path: &str, mut property: Members<'a>, root: &'a Map<String, Value>) -> Result<Members<'a>> {
    let mut seen: Vec<&Value> = Vec::new();
    loop {
        while let Some(reference) = get(&property, "$ref") {
            if seen.contains(&reference) {
                return schema_error!("{path}: $ref {} is recursive; flatten the schema", repr(reference));
            }
            let Some(definition) = resolve(reference, root) else {
                return schema_error!(
                    "{path}: $ref {} does not resolve to an entry of this schema's '$defs' or 'definitions'",
                    repr(reference)
                );
            };
            seen.push(reference);
            // A definition's description is about the type; the question is about the property.
            let mut merged = members(definition);
            merged.retain(|(key, _)| *key != "description");
            merge(&mut merged, property, "$ref");
            property = merged;
        }
        if ["const", "enum", "type"].iter().any(|key| get(&property, key).is_some()) {
            return Ok(property);
        }
        if let Some(Value::Array(all)) = get(&property, "allOf")
            && let [Value::Object(only)] = all.as_slice()
        {
            let mut inner = members(only);
            merge(&mut inner, property, "allOf");
            property = inner;
            continue;
        }
        let union = get(&property, "anyOf").filter(|u| !is_falsy(u)).or_else(|| get(&property, "oneOf"));
        let Some(union) = union.filter(|u| !u.is_null()) else { return Ok(property) };
        let branches: Vec<_> = union
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_object)
            .filter(|branch| branch.get("type").and_then(Value::as_str) != Some("null"))
            .collect();
        let [branch] = branches[..] else {
            return schema_error!(
                "{path}: only 'Optional[...]' unions (one non-null branch) are supported, got {}",
                branches.len()
            );
        };
        let mut inner = members(branch);
        if get(&inner, "description").is_none() {
            inner.push(("description", get(&property, "description").unwrap_or(&Value::Null)));
        }
        property = inner;
    }
}

fn resolve<'a>(reference: &Value, root: &'a Map<String, Value>) -> Option<&'a Map<String, Value>> {
    let reference = reference.as_str()?;
    PREFIXES.iter().find_map(|(prefix, key)| root.get(*key)?.get(reference.strip_prefix(prefix)?)?.as_object())
}

fn labels(path: &str, values: &[Value]) -> Result<Vec<String>> {
    if values.len() > MAX_OPTIONS {
        return schema_error!("{path}: {} options exceeds MAX_OPTIONS={MAX_OPTIONS}", values.len());
    }
    if values.is_empty() {
        return schema_error!("{path}: 'enum' must not be empty");
    }
    Ok(values.iter().map(|v| if v.is_null() { "null".to_owned() } else { label_text(v) }).collect())
}

/// The type, or the one that is not null of a list of types.
fn single_type<'a>(path: &str, property: &Members<'a>) -> Result<Option<&'a str>> {
    let Some(kind) = get(property, "type") else { return Ok(None) };
    let Value::Array(kinds) = kind else { return Ok(kind.as_str()) };
    let mut kinds = kinds.iter().filter(|k| k.as_str() != Some("null"));
    let first = kinds.next();
    if kinds.next().is_some() {
        return schema_error!("{path}: 'type' has multiple non-null types; unions are not supported");
    }
    Ok(first.and_then(Value::as_str))
}

fn bounds(path: &str, property: &Members<'_>) -> Result<(i128, i128)> {
    let integer = |key: &str| match get(property, key) {
        Some(Value::Number(n)) => match PyNumber::of(n) {
            PyNumber::Int(digits) => digits.parse::<i128>().ok(),
            PyNumber::Float(_) => None,
        },
        _ => None,
    };
    let (Some(low), Some(high)) = (integer("minimum"), integer("maximum")) else {
        return schema_error!("{path}: a numeric field needs integer 'minimum' and 'maximum' to become a score");
    };
    if high < low {
        return schema_error!("{path}: 'maximum' {high} is below 'minimum' {low}");
    }
    let levels = high.saturating_sub(low).saturating_add(1);
    if levels > MAX_LEVELS {
        return schema_error!(
            "{path}: {levels} levels exceeds MAX_SCORE_LEVELS={MAX_LEVELS}; narrow the range or use an enum"
        );
    }
    Ok((low, high))
}
