//! Temperatures by language.

use serde_json::{Map, Value};

use super::{Temperatures, warning};
use crate::error::{Result, value_error};
use crate::python::{is_falsy, repr, repr_str, type_name};

/// Overrides by the language's primary subtag.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Languages(Vec<(String, Temperatures)>);

/// "de" of "de-AT".
fn primary(lang: &str) -> String {
    lang.split('-').next().unwrap_or_default().to_lowercase()
}

impl Languages {
    pub(super) fn parse(overrides: &Value, base: &[Value; 3], warnings: &mut Vec<String>) -> Result<Self> {
        let empty = Map::new();
        let overrides = match overrides {
            Value::Null => &empty,
            Value::Object(map) => map,
            other => return value_error!("Language overrides must be a mapping, got {}", type_name(other)),
        };
        let mut languages = Languages::default();
        for (lang, entry) in overrides {
            let name = repr_str(lang);
            let entry = match entry {
                Value::Null => &empty,
                Value::Object(map) => map,
                other => return value_error!("Language override {name} must be a mapping, got {}", type_name(other)),
            };
            let given = entry.get("temperature").filter(|t| !t.is_null());
            let by_type = match given {
                None => base.clone(),
                Some(Value::Array(list)) if list.len() == 3 => [list[0].clone(), list[1].clone(), list[2].clone()],
                Some(other) => {
                    return value_error!(
                        "Language override {name} temperature must be a list of 3 floats, got {}",
                        repr(other)
                    );
                }
            };
            let by_bucket = match entry.get("temperature_by_options") {
                Some(Value::Object(map)) => map,
                None => &empty,
                Some(other) if is_falsy(other) => &empty,
                Some(other) => {
                    return value_error!(
                        "Language override {name} temperature_by_options must be a mapping of bucket -> float, got {}",
                        type_name(other)
                    );
                }
            };
            let (temperatures, replaced) = Temperatures::clamped(&by_type, by_bucket);
            // Inherited values were reported when the checkpoint was loaded.
            let types = if given.is_some() { replaced.types } else { Vec::new() };
            warnings.extend(warning(&format!("temperatures of language {name}"), types, replaced.buckets));
            languages.0.push((primary(lang), temperatures));
        }
        Ok(languages)
    }

    /// The override of a language tag; of several for one language the last.
    pub(super) fn get(&self, lang: &str) -> Option<(&str, &Temperatures)> {
        if lang.is_empty() {
            return None;
        }
        let wanted = primary(lang);
        self.0.iter().rev().find(|(name, _)| *name == wanted).map(|(name, t)| (name.as_str(), t))
    }
}
