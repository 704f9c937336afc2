//! How outcomes are written, in each dialect.

use serde_json::{Map, Value, json};
use tilewright_decide::{Answer, AnswerValue, float, round4};

use crate::config::Dialect;
use crate::service::Outcome;

/// The name under which a service of this kind reports itself in the `jev` dialect.
pub const JEV_MODEL: &str = "jev-latest";

/// One outcome.
pub fn write(outcome: &Outcome, dialect: Dialect) -> Value {
    match dialect {
        Dialect::Laya => laya(outcome),
        Dialect::Jev => jev(outcome),
    }
}

/// Outcomes of a batch.
pub fn write_batch(outcomes: &[Outcome], dialect: Dialect) -> Value {
    let results: Vec<Value> = outcomes.iter().map(|o| write(o, dialect)).collect();
    let input: usize = outcomes.iter().map(|o| o.prediction.usage.input_tokens).sum();
    json!({"results": results, "total_usage": {"input_tokens": input, "output_tokens": 0}})
}

/// What `tilewright decide` prints, and Jev's confidence for who ports a threshold.
fn laya(outcome: &Outcome) -> Value {
    let mut out = outcome.prediction.to_json();
    for answer in &outcome.prediction.answers {
        if let Some(confidence) = jev_confidence(answer) {
            out["answers"][&answer.id]["x_jev_confidence"] = float(round4(confidence));
        }
    }
    out
}

/// The exact envelope, nothing more.
fn jev(outcome: &Outcome) -> Value {
    let prediction = &outcome.prediction;
    let answers: Map<String, Value> = prediction.answers.iter().map(|a| (a.id.clone(), jev_answer(a))).collect();
    json!({
        "model": outcome.model,
        "answers": answers,
        "usage": {"input_tokens": prediction.usage.input_tokens, "output_tokens": 0},
    })
}

fn jev_answer(answer: &Answer) -> Value {
    let mut out = Map::new();
    out.insert("type".into(), answer.kind().name().into());
    match &answer.value {
        AnswerValue::Choice(_) => {
            // Always text here, also of a label that is a number.
            let best = answer.distribution.largest().0;
            out.insert("choice".into(), answer.keys[best].as_str().into());
        }
        AnswerValue::Score { expected, legend } => {
            out.insert("score".into(), float(*expected));
            let legend = legend.iter().enumerate().map(|(i, text)| (i.to_string(), text.clone()));
            out.insert("legend".into(), legend.collect::<Map<_, _>>().into());
        }
        AnswerValue::Noul(p) => {
            out.insert("noul".into(), float(*p));
        }
    }
    if let Some(confidence) = jev_confidence(answer) {
        let p = answer.distribution.probabilities();
        let rounded = p.iter().map(|&p| float(round4(f64::from(p))));
        let probabilities: Map<String, Value> = answer.keys.iter().cloned().zip(rounded).collect();
        out.insert("probabilities".into(), probabilities.into());
        out.insert("confidence".into(), float(round4(confidence)));
    }
    out.into()
}

/// Jev's confidence: of a choice how far the largest probability is from a guess's, of a score how much closer the mass lies to the mode than that of a
/// uniform distribution about its centre. Within 0..=1; none for noul.
pub fn jev_confidence(answer: &Answer) -> Option<f64> {
    let p: Vec<f64> = answer.distribution.probabilities().iter().map(|&p| f64::from(p)).collect();
    match answer.value {
        AnswerValue::Choice(_) => Some(choice_confidence(&p)),
        AnswerValue::Score { .. } => Some(score_confidence(&p)),
        AnswerValue::Noul(_) => None,
    }
}

fn choice_confidence(p: &[f64]) -> f64 {
    if p.len() < 2 {
        return 1.0;
    }
    let guess = 1.0 / p.len() as f64;
    let largest = p.iter().copied().fold(0.0, f64::max);
    ((largest - guess) / (1.0 - guess)).clamp(0.0, 1.0)
}

fn score_confidence(p: &[f64]) -> f64 {
    let n = p.len();
    if n < 2 {
        return 1.0;
    }
    let mode = (0..n).fold(0, |best, i| if p[i] > p[best] { i } else { best });
    let spread = |from: f64, p: &dyn Fn(usize) -> f64| (0..n).map(|i| p(i) * (i as f64 - from).abs()).sum::<f64>();
    let uniform = spread((n - 1) as f64 / 2.0, &|_| 1.0 / n as f64);
    (1.0 - spread(mode as f64, &|i| p[i]) / uniform).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confidence_of_a_choice_is_the_distance_from_a_guess() {
        for (p, want) in [(&[1.0][..], 1.0), (&[0.5, 0.5], 0.0), (&[1.0, 0.0, 0.0], 1.0), (&[0.6, 0.2, 0.2], 0.4)] {
            assert!((choice_confidence(p) - want).abs() < 1e-12, "{p:?}");
        }
    }

    #[test]
    fn confidence_of_a_score_is_how_close_the_mass_lies_to_the_mode() {
        // Three levels: a uniform distribution lies 2/3 from its centre.
        for (p, want) in [
            (&[1.0][..], 1.0),
            (&[0.0, 1.0, 0.0], 1.0),
            (&[0.8, 0.2, 0.0], 0.7),
            (&[1.0 / 3.0; 3], 0.0),
            (&[0.5, 0.0, 0.5], 0.0),
        ] {
            assert!((score_confidence(p) - want).abs() < 1e-12, "{p:?}");
        }
    }
}
