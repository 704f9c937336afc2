//! Abstention: answers below a confidence are marked, never removed.

use serde_json::Value;

use crate::calibrate::BUCKETS;
use crate::error::{Result, value_error};
use crate::json::PyNumber;
use crate::python::{repr, repr_str};

/// The confidence that an answer needs: one number, or one by bucket.
#[derive(Clone, PartialEq, Debug)]
pub struct Gate {
    default: f64,
    by_bucket: Vec<(String, f64)>,
}

impl Gate {
    /// The same for every answer, within 0..=1. Zero is a gate too: everything passes, visibly (trap 23).
    pub fn uniform(threshold: f64) -> Result<Self> {
        if !(0.0..=1.0).contains(&threshold) {
            let got = crate::json::float_text(threshold);
            return value_error!("min_confidence must be a float in [0.0, 1.0], got {got}");
        }
        Ok(Gate { default: threshold, by_bucket: Vec::new() })
    }

    /// A number, or a map of buckets and "default".
    pub fn parse(min_confidence: &Value) -> Result<Self> {
        let Value::Object(map) = min_confidence else {
            return Ok(Gate { default: threshold(min_confidence)?, by_bucket: Vec::new() });
        };
        if map.is_empty() {
            return value_error!("a min_confidence map must be a non-empty dict of bucket -> float, got {{}}");
        }
        let mut gate = Gate { default: 0.0, by_bucket: Vec::new() };
        for (key, value) in map {
            if key != "default" && !BUCKETS.iter().flatten().any(|b| b == key) {
                return value_error!(
                    "min_confidence map keys must be a bucket like 'choice:3-5' or 'default', got {}",
                    repr_str(key)
                );
            }
            match threshold(value)? {
                t if key == "default" => gate.default = t,
                t => gate.by_bucket.push((key.clone(), t)),
            }
        }
        Ok(gate)
    }

    /// The threshold of a bucket.
    pub fn threshold(&self, bucket: &str) -> f64 {
        self.by_bucket.iter().find(|(name, _)| name == bucket).map_or(self.default, |(_, t)| *t)
    }

    /// What the gate says of an answer, by its confidence as it is published. One without a number is neither passed nor held back.
    pub fn judge(&self, bucket: &str, confidence: f64) -> Verdict {
        let threshold = self.threshold(bucket);
        let state = match confidence {
            c if !c.is_finite() => Abstention::Unevaluated,
            c if c < threshold => Abstention::Abstained,
            _ => Abstention::Passed,
        };
        Verdict { state, threshold }
    }
}

fn threshold(value: &Value) -> Result<f64> {
    let number = match value {
        Value::Number(n) => Some(PyNumber::of(n).as_f64()),
        _ => None,
    };
    match number.filter(|t| (0.0..=1.0).contains(t)) {
        Some(t) => Ok(t),
        None => value_error!("min_confidence must be a float in [0.0, 1.0], got {}", repr(value)),
    }
}

/// What a gate said of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Abstention {
    /// Confident enough.
    Passed,
    /// Less confident than wanted.
    Abstained,
    /// There was nothing to compare.
    Unevaluated,
}

impl Abstention {
    /// The word in the JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Abstention::Passed => "passed",
            Abstention::Abstained => "abstained",
            Abstention::Unevaluated => "unevaluated",
        }
    }
}

/// An answer's state, and the threshold that led to it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Verdict {
    /// The state.
    pub state: Abstention,
    /// The threshold.
    pub threshold: f64,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn trap_23_a_gate_of_zero_passes_everything_and_says_so() {
        let verdict = Gate::uniform(0.0).unwrap().judge("choice:2", 0.0);
        assert_eq!(verdict, Verdict { state: Abstention::Passed, threshold: 0.0 });
        assert_eq!(Gate::uniform(0.0).unwrap().judge("choice:2", f64::NAN).state, Abstention::Unevaluated);
    }

    #[test]
    fn a_bucket_goes_before_the_default_and_both_are_strict() {
        let gate = Gate::parse(&json!({"choice:3-5": 0.5, "default": 0.9})).unwrap();
        assert_eq!(gate.judge("choice:3-5", 0.5).state, Abstention::Passed);
        assert_eq!(gate.judge("choice:3-5", 0.4999).state, Abstention::Abstained);
        assert_eq!(gate.judge("noul:2", 0.8).state, Abstention::Abstained);
        assert_eq!(Gate::parse(&json!({"score:2": 1})).unwrap().threshold("noul:2"), 0.0);
    }

    #[test]
    fn what_is_no_threshold_is_refused_by_value() {
        for (value, shown) in [
            (json!(true), "True"),
            (json!(-0.5), "-0.5"),
            (json!("0.5"), "'0.5'"),
            (json!([0.5]), "[0.5]"),
            (json!(null), "None"),
            (json!({"default": 2}), "2"),
        ] {
            let message = Gate::parse(&value).unwrap_err().to_string();
            assert_eq!(message, format!("min_confidence must be a float in [0.0, 1.0], got {shown}"));
        }
        let message = Gate::parse(&json!({"choice:4": 0.5})).unwrap_err().to_string();
        assert!(message.ends_with("got 'choice:4'"), "{message}");
        assert!(Gate::parse(&json!({})).unwrap_err().to_string().ends_with("got {}"));
    }
}
