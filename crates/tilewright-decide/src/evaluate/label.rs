//! Labels of rows: which option is the true one.

use serde_json::Value;
use tilewright_models::laya::QuestionType;

use crate::error::{Result, value_error};
use crate::json::{as_int, json_text, plain_text};
use crate::python::repr_str;
use crate::question::Question;

/// The index of the option that a label names: of a choice its label, of a score its level or the level's text, of a noul `true` or `false`,
/// also as 1 and 0 or as a string.
pub fn truth(question: &Question, label: &Value) -> Result<usize> {
    let text = plain_text(label);
    let found = match question.kind {
        QuestionType::Choice => (0..question.options.len()).find(|&i| question.key(i) == text),
        QuestionType::Score => {
            let level = as_int(label).and_then(|n| usize::try_from(n).ok()).or(text.parse().ok());
            level
                .filter(|n| *n < question.options.len())
                .or_else(|| question.names.iter().position(|name| plain_text(name) == text))
        }
        QuestionType::Noul => match text.to_lowercase().as_str() {
            "false" | "0" => Some(0),
            "true" | "1" => Some(1),
            _ => None,
        },
    };
    match found {
        Some(index) => Ok(index),
        None => {
            let known = match question.kind {
                QuestionType::Noul => "true or false".to_owned(),
                QuestionType::Score => format!("a level from 0 to {}", question.options.len() - 1),
                QuestionType::Choice => {
                    let keys: Vec<String> = (0..question.options.len()).map(|i| repr_str(&question.key(i))).collect();
                    format!("one of {}", keys.join(", "))
                }
            };
            value_error!(
                "question {}: the label {} is no option; use {known}",
                repr_str(&question.id),
                json_text(label)
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::question::parse_questions;

    fn index(definition: Value, label: Value) -> Result<usize> {
        truth(&parse_questions(&json!({"q": definition})).unwrap()[0], &label)
    }

    #[test]
    fn labels_of_each_type_are_found() {
        let choice = json!({"type": "choice", "instructions": "?", "criteria": ["a", 2, true]});
        assert_eq!(index(choice.clone(), json!("a")).unwrap(), 0);
        assert_eq!(index(choice.clone(), json!(2)).unwrap(), 1);
        assert_eq!(index(choice.clone(), json!("2")).unwrap(), 1);
        assert_eq!(index(choice, json!(true)).unwrap(), 2);
        let score = json!({"type": "score", "instructions": "?", "criteria": ["low", "mid", "high"]});
        assert_eq!(index(score.clone(), json!(2)).unwrap(), 2);
        assert_eq!(index(score.clone(), json!("1")).unwrap(), 1);
        assert_eq!(index(score, json!("high")).unwrap(), 2);
        let noul = json!({"type": "noul", "instructions": "?"});
        for (label, want) in [(json!(true), 1), (json!("False"), 0), (json!(1), 1), (json!("0"), 0)] {
            assert_eq!(index(noul.clone(), label).unwrap(), want);
        }
    }

    #[test]
    fn a_label_that_is_no_option_is_answered_with_the_options() {
        let choice = json!({"type": "choice", "instructions": "?", "criteria": ["a", "b"]});
        let message = index(choice, json!("c")).unwrap_err().to_string();
        assert_eq!(message, "question 'q': the label \"c\" is no option; use one of 'a', 'b'");
        let score = json!({"type": "score", "instructions": "?", "criteria": ["low", "high"]});
        assert!(index(score.clone(), json!(2)).unwrap_err().to_string().contains("from 0 to 1"));
        assert!(index(score, json!(-1)).is_err());
        assert!(index(json!({"type": "noul", "instructions": "?"}), json!("maybe")).is_err());
    }
}
