//! From the logits of a row to a typed answer.

use serde_json::{Map, Value};
use tilewright_models::laya::{QuestionType, RowScores};

use crate::calibrate::{Applied, Calibration};
use crate::distribution::{Distribution, softmax, unslot};
use crate::error::Result;
use crate::gate::{Gate, Verdict};
use crate::json::{canonical, float, round4};
use crate::question::Question;

/// The answer to one question. Numbers are rounded to four decimals as they are published, unless said otherwise.
#[derive(Clone, PartialEq, Debug)]
pub struct Answer {
    /// The question's id.
    pub id: String,
    /// The answer itself.
    pub value: AnswerValue,
    /// The key of each option, in their order: labels, numbers of levels, "false" and "true".
    pub keys: Vec<String>,
    /// Not rounded, in the order of the options.
    pub distribution: Distribution,
    /// How concentrated the distribution is (choice, score), or the probability of the likelier side (noul).
    pub confidence: f64,
    /// The largest probability, after binning if the calibration has one. What temperatures are fitted for, and what gates compare.
    pub answer_confidence: f64,
    /// The action head's probability of answering; it carries hardly any signal (trap 14).
    pub act_probability: f64,
    /// What the gate said, if there was one.
    pub verdict: Option<Verdict>,
    /// The part of a long state that decided.
    pub window: Option<Window>,
    /// Raw logits in the order of the options.
    pub logits: Vec<f32>,
    /// Raw logits of the action classes.
    pub act_logits: Vec<f32>,
    /// The temperature that was applied.
    pub applied: Applied,
}

/// What was answered.
#[derive(Clone, PartialEq, Debug)]
pub enum AnswerValue {
    /// The label of the likeliest option, in the JSON type that the caller gave it.
    Choice(Value),
    /// The expected level, and the text of every level.
    Score {
        /// From 0 to the number of levels - 1.
        expected: f64,
        /// In order.
        legend: Vec<Value>,
    },
    /// The probability that the statement holds.
    Noul(f64),
}

/// The window of a long state that an answer comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    /// Its number.
    pub index: usize,
    /// The first token of the state in it.
    pub token_start: usize,
    /// The token behind it.
    pub token_end: usize,
    /// How many windows there were.
    pub count: usize,
}

impl Answer {
    /// Turns the scores of a row into the answer.
    pub fn new(question: &Question, scores: &RowScores, calibration: &Calibration, lang: Option<&str>) -> Result<Self> {
        let options = question.options.len();
        if scores.logits.len() != options || scores.act_logits.is_empty() {
            let what = format!("the model gave {} logits for {options} options", scores.logits.len());
            return Err(tilewright_core::Error::config(what, "this is a fault of the program, please report it").into());
        }
        let applied = calibration.applied(question.kind, options, lang);
        let order = question.order.as_deref();
        let distribution = Distribution::from_logits(&scores.logits, applied.temperature, order)?;
        let action = Distribution::new(softmax(&scores.act_logits))?;
        let p = distribution.probabilities();
        let (best, largest) = distribution.largest();
        let (value, confidence) = match question.kind {
            QuestionType::Choice => {
                (AnswerValue::Choice(canonical(&question.names[best])), distribution.concentration())
            }
            QuestionType::Score => {
                let expected = round4(distribution.mean());
                (AnswerValue::Score { expected, legend: question.names.clone() }, distribution.concentration())
            }
            QuestionType::Noul => {
                let holds = f64::from(p[1]);
                (AnswerValue::Noul(round4(holds)), holds.max(1.0 - holds))
            }
        };
        let keys = match question.kind {
            QuestionType::Noul => vec!["false".into(), "true".into()],
            _ => (0..options).map(|i| question.key(i)).collect(),
        };
        Ok(Answer {
            id: question.id.clone(),
            value,
            keys,
            confidence: round4(confidence),
            answer_confidence: round4(calibration.confidence(largest, &applied)),
            act_probability: round4(f64::from(action.probabilities()[0])),
            verdict: None,
            window: None,
            logits: order.map_or_else(|| scores.logits.clone(), |order| unslot(&scores.logits, order)),
            act_logits: scores.act_logits.clone(),
            applied,
            distribution,
        })
    }

    /// The type of the question.
    pub fn kind(&self) -> QuestionType {
        match self.value {
            AnswerValue::Choice(_) => QuestionType::Choice,
            AnswerValue::Score { .. } => QuestionType::Score,
            AnswerValue::Noul(_) => QuestionType::Noul,
        }
    }

    /// Lets a gate judge; with none, an earlier verdict is taken back.
    pub fn judge(&mut self, gate: Option<&Gate>) {
        self.verdict = gate.map(|gate| gate.judge(self.applied.bucket, self.answer_confidence));
    }

    /// Whether the gate held the answer back.
    pub fn abstained(&self) -> bool {
        self.verdict.is_some_and(|v| v.state == crate::gate::Abstention::Abstained)
    }

    /// The answer as the `laya` package writes it.
    pub fn to_json(&self) -> Value {
        let mut out = Map::new();
        let mut put = |key: &str, value: Value| {
            out.insert(key.into(), value);
        };
        put("type", self.kind().name().into());
        let numbered = |values: &[Value]| -> Value {
            values.iter().enumerate().map(|(i, v)| (i.to_string(), v.clone())).collect::<Map<_, _>>().into()
        };
        match &self.value {
            AnswerValue::Choice(label) => put("choice", label.clone()),
            AnswerValue::Score { expected, legend } => {
                put("score", float(*expected));
                put("legend", numbered(legend));
            }
            AnswerValue::Noul(p) => put("noul", float(*p)),
        }
        if self.kind() != QuestionType::Noul {
            let p = self.distribution.probabilities();
            let rounded = p.iter().map(|&p| float(round4(f64::from(p))));
            put("probabilities", self.keys.iter().cloned().zip(rounded).collect::<Map<_, _>>().into());
        }
        put("confidence", float(self.confidence));
        put("answer_confidence", float(self.answer_confidence));
        put("action", serde_json::json!({"act_probability": float(self.act_probability)}));
        if let Some(Verdict { state, threshold }) = self.verdict {
            if self.abstained() {
                put("low_confidence", true.into());
            }
            put("abstention", state.name().into());
            put("abstention_threshold", float(threshold));
        }
        if let Some(Window { index, token_start, token_end, count }) = self.window {
            put(
                "window",
                serde_json::json!({
                    "index": index, "token_start": token_start, "token_end": token_end, "count": count
                }),
            );
        }
        Value::Object(out)
    }
}
