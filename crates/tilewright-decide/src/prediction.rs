//! The result of a call.

use serde_json::{Map, Value};

use crate::answer::Answer;
use crate::usage::Usage;

/// What results call the model, whatever the checkpoint.
const MODEL: &str = "laya-rl-agent";

/// The answers of one state.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Prediction {
    /// In the order of the questions.
    pub answers: Vec<Answer>,
    /// What was read.
    pub usage: Usage,
    /// Further members of the JSON, in order: `shortlist`, `tournament`, `routing`.
    pub extra: Map<String, Value>,
    /// What the caller should know; not part of the JSON.
    pub warnings: Vec<String>,
}

impl Prediction {
    /// The answer to a question.
    pub fn answer(&self, id: &str) -> Option<&Answer> {
        self.answers.iter().find(|a| a.id == id)
    }

    /// The result as the `laya` package writes it.
    pub fn to_json(&self) -> Value {
        let mut out = Map::new();
        out.insert("model".into(), MODEL.into());
        let answers = self.answers.iter().map(|a| (a.id.clone(), a.to_json())).collect();
        out.insert("answers".into(), Value::Object(answers));
        out.insert("usage".into(), self.usage.to_json());
        out.extend(self.extra.clone());
        Value::Object(out)
    }

    /// The result, and which weights and calibration it comes from.
    pub fn to_json_with(&self, provenance: &Provenance) -> Value {
        let mut out = self.to_json();
        out["provenance"] = provenance.to_json();
        out
    }
}

/// Where answers come from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Provenance {
    /// A name or folder.
    pub model: Option<String>,
    /// SHA-256 of the weights.
    pub model_sha256: Option<String>,
    /// SHA-256 of the calibration file; none if the checkpoint's own temperatures were used.
    pub calibration: Option<String>,
}

impl Provenance {
    /// The `provenance` object of a result.
    pub fn to_json(&self) -> Value {
        serde_json::json!({"model": self.model, "model_sha256": self.model_sha256, "calibration": self.calibration})
    }
}
