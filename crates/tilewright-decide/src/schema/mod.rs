//! Decisions in the shape of a JSON schema: every property becomes a question, and its answer a value that the schema allows.
//!
//! | property | question | value |
//! |---|---|---|
//! | `enum` or `const` | choice | the likeliest value |
//! | `boolean`, or an `enum` of both | noul | whether the statement is at least as likely as not |
//! | `integer` or `number` with integer bounds | score | the likeliest level |
//!
//! What cannot be answered from a fixed set of options is refused with its path.

mod property;

use serde_json::{Map, Value};
use tilewright_models::laya::Scorer;

use crate::agent::{Agent, PredictOptions};
use crate::answer::{Answer, AnswerValue};
use crate::error::{Result, schema_error};
use crate::json::{canonical, float, round4};
use crate::prediction::Prediction;
use crate::python::type_name;

/// Properties of a schema, options of a property, levels of a scale.
const MAX_PROPERTIES: usize = 32;
const MAX_OPTIONS: usize = 32;
const MAX_LEVELS: i128 = 10;

/// A property as a question, and how its answer becomes a value.
#[derive(Clone, PartialEq, Debug)]
struct Field {
    name: String,
    question: Value,
    target: Target,
}

#[derive(Clone, PartialEq, Debug)]
enum Target {
    /// The value of each option.
    Options(Vec<Value>),
    /// The value of level 0.
    Level(i128),
    Truth,
}

impl Field {
    /// The value that an answer means; null if it was held back.
    fn value(&self, answer: &Answer) -> Value {
        if answer.abstained() {
            return Value::Null;
        }
        match &self.target {
            Target::Options(values) => values.get(answer.distribution.largest().0).map_or(Value::Null, canonical),
            Target::Level(lowest) => {
                // The likeliest as published: of levels that round to the same probability the lowest.
                let mut best = (0, f64::NEG_INFINITY);
                for (i, p) in answer.distribution.probabilities().iter().enumerate() {
                    let p = round4(f64::from(*p));
                    if p > best.1 {
                        best = (i, p);
                    }
                }
                (lowest + best.0 as i128).to_string().parse().map_or(Value::Null, Value::Number)
            }
            Target::Truth => matches!(answer.value, AnswerValue::Noul(p) if p >= 0.5).into(),
        }
    }
}

/// What a schema asks.
fn plan(schema: &Value) -> Result<Vec<Field>> {
    let Value::Object(root) = schema else {
        return schema_error!("expected a JSON schema object, got {}", type_name(schema));
    };
    let object = match root.get("type") {
        None | Some(Value::Null) => true,
        Some(kind) => kind == "object",
    };
    let Some(properties) = root.get("properties").filter(|_| object) else {
        return schema_error!("the top level must be an object with 'properties'");
    };
    let Some(properties) = properties.as_object().filter(|p| !p.is_empty()) else {
        return schema_error!("'properties' must be a non-empty object");
    };
    if properties.len() > MAX_PROPERTIES {
        return schema_error!("{} properties exceeds MAX_PROPERTIES={MAX_PROPERTIES}", properties.len());
    }
    properties.iter().map(|(name, property)| property::field(name, property, root)).collect()
}

/// The questions that a schema asks.
pub fn schema_questions(schema: &Value) -> Result<Value> {
    Ok(questions(&plan(schema)?))
}

fn questions(fields: &[Field]) -> Value {
    fields.iter().map(|f| (f.name.clone(), f.question.clone())).collect::<Map<_, _>>().into()
}

/// A decision in the shape of a schema.
#[derive(Clone, PartialEq, Debug)]
pub struct Decision {
    /// A value for each property, in order; null where a gate held the answer back.
    pub values: Map<String, Value>,
    /// The answers behind them.
    pub prediction: Prediction,
}

impl Decision {
    /// The values with confidences, probabilities and answers by property.
    pub fn details(&self) -> Value {
        let by_name = |f: &dyn Fn(&Answer) -> Value| -> Value {
            self.prediction.answers.iter().map(|a| (a.id.clone(), f(a))).collect::<Map<_, _>>().into()
        };
        let probabilities = |answer: &Answer| match answer.value {
            AnswerValue::Noul(p) => serde_json::json!({"false": float(round4(1.0 - p)), "true": float(p)}),
            _ => answer.to_json()["probabilities"].take(),
        };
        serde_json::json!({
            "values": self.values,
            "confidence": by_name(&|a| float(a.confidence)),
            "probabilities": by_name(&probabilities),
            "answers": by_name(&Answer::to_json),
            "usage": self.prediction.usage.to_json(),
            "answer_confidence": by_name(&|a| float(a.answer_confidence)),
        })
    }
}

impl<S: Scorer> Agent<S> {
    /// Decides about a state in the shape of a schema.
    pub fn decide(&mut self, state: &Value, schema: &Value, options: &PredictOptions) -> Result<Decision> {
        let mut decisions = self.decide_batch(std::slice::from_ref(state), schema, options)?;
        Ok(decisions.pop().expect("one state, one decision"))
    }

    /// The same for many states in one call.
    pub fn decide_batch(
        &mut self,
        states: &[Value],
        schema: &Value,
        options: &PredictOptions,
    ) -> Result<Vec<Decision>> {
        let fields = plan(schema)?;
        let predictions = self.predict_batch(states, &questions(&fields), options)?;
        let decision = |prediction: Prediction| {
            let values = fields.iter().zip(&prediction.answers).map(|(f, answer)| (f.name.clone(), f.value(answer)));
            Decision { values: values.collect(), prediction }
        };
        Ok(predictions.into_iter().map(decision).collect())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(property: Value) -> String {
        let error = plan(&json!({"properties": {"p": property}})).unwrap_err();
        assert_eq!(error.kind(), "SchemaError");
        error.to_string()
    }

    #[test]
    fn properties_become_questions_of_their_type() {
        let schema = json!({"type": "object", "properties": {
            "team": {"enum": ["a", 1, null], "description": "Who?"},
            "ok": {"type": "boolean"},
            "both": {"enum": [true, false]},
            "level": {"type": "integer", "minimum": -1, "maximum": 1},
            "fixed": {"const": 2.5}
        }});
        assert_eq!(
            schema_questions(&schema).unwrap(),
            json!({
                "team": {"type": "choice", "instructions": "Who?", "criteria": {"a": null, "1": null, "null": null}},
                "ok": {"type": "noul", "instructions": "Is `ok` true?"},
                "both": {"type": "noul", "instructions": "Is `both` true?"},
                "level": {"type": "score", "instructions": "Score `level` from -1 to 1", "criteria": ["-1", "0", "1"]},
                "fixed": {"type": "choice", "instructions": "What is `fixed`?", "criteria": {"2.5": null}}
            })
        );
    }

    #[test]
    fn references_optional_types_and_wrappers_are_looked_through() {
        let schema = json!({"$defs": {"T": {"enum": ["x", "y"], "description": "of the type"}, "U": {"$ref": "#/$defs/T"}},
        "properties": {
            "a": {"$ref": "#/$defs/U", "description": "of the field"},
            "b": {"anyOf": [{"type": "null"}, {"type": "boolean"}], "description": "outer"},
            "c": {"allOf": [{"$ref": "#/$defs/T"}]},
            "d": {"type": ["null", "boolean"]}
        }});
        let questions = schema_questions(&schema).unwrap();
        assert_eq!(questions["a"]["instructions"], "of the field");
        assert_eq!(questions["a"]["criteria"], json!({"x": null, "y": null}));
        assert_eq!(questions["b"], json!({"type": "noul", "instructions": "outer"}));
        assert_eq!(questions["c"]["instructions"], "What is `c`?");
        assert_eq!(questions["d"]["type"], "noul");
    }

    #[test]
    fn what_has_no_fixed_options_is_refused_with_its_path() {
        for (property, message) in [
            (
                json!({"type": "string"}),
                "properties.p: a free string cannot be a fixed option set; use 'enum' or a boolean",
            ),
            (json!({"type": "array"}), "properties.p: arrays are not supported; ask one field per element"),
            (json!({"type": "object"}), "properties.p: nested objects are not supported; flatten the schema"),
            (json!("x"), "properties.p: property must be an object, got str"),
            (json!({"enum": "abc"}), "properties.p: 'enum' must be an array of values, got str"),
            (json!({"enum": []}), "properties.p: 'enum' must not be empty"),
            (json!({"enum": [1, "1"]}), "properties.p: enum values produce duplicate choice labels"),
            (json!({"type": "integer", "minimum": 3, "maximum": 1}), "properties.p: 'maximum' 1 is below 'minimum' 3"),
            (json!({"a": null}), "properties.p: unsupported schema {'a': None}"),
        ] {
            assert_eq!(refused(property), message);
        }
        assert!(refused(json!({"type": "number", "minimum": true, "maximum": 3})).contains("needs integer 'minimum'"));
        assert!(refused(json!({"type": "integer", "minimum": 0, "maximum": 10})).contains("11 levels exceeds"));
        assert!(refused(json!({"type": ["string", "integer"]})).contains("multiple non-null types"));
        assert!(refused(json!({"anyOf": [{"type": "boolean"}, {"type": "integer"}]})).ends_with("got 2"));
        assert!(refused(json!({"$ref": "http://elsewhere"})).contains("does not resolve"));
        assert!(refused(json!({"enum": (0..33).collect::<Vec<_>>()})).contains("33 options exceeds"));
    }

    #[test]
    fn a_reference_to_itself_is_refused() {
        let schema = json!({"definitions": {"A": {"$ref": "#/definitions/A"}}, "properties": {"p": {"$ref": "#/definitions/A"}}});
        assert!(plan(&schema).unwrap_err().to_string().contains("is recursive"));
    }

    #[test]
    fn the_top_level_is_an_object_with_properties() {
        for schema in
            [json!([]), json!({}), json!({"type": "array", "properties": {"a": {}}}), json!({"properties": {}})]
        {
            assert_eq!(plan(&schema).unwrap_err().kind(), "SchemaError", "{schema}");
        }
        let many: Map<String, Value> = (0..33).map(|i| (i.to_string(), json!({"type": "boolean"}))).collect();
        assert!(plan(&json!({"properties": many})).unwrap_err().to_string().starts_with("33 properties exceeds"));
    }
}
