//! How good answers are on labelled rows: accuracy, Brier score, calibration error and coverage, each with its 95 % interval.
//!
//! ```text
//! accuracy   share of rows whose likeliest option is the true one
//! Brier      mean of sum_j (p_j - [j is true])^2             0 perfect, 2 certain and wrong
//! NLL        mean of -ln p_true                              in nats
//! ECE        sum over bins of share * |accuracy - mean confidence|, 15 bins of equal width
//! MAE        mean of |expected level - true level|           scores only
//! coverage   largest share of rows, taken from the most confident down, among which the accuracy is the asked one
//! interval   2.5 % and 97.5 % of the value over resampled rows
//! ```
//!
//! An accuracy whose interval reaches down to what guessing gives is worth nothing, however well calibrated; that is said first and loudly.

mod bootstrap;
mod label;
mod metrics;
mod reliability;

use serde_json::{Value, json};
use tilewright_models::laya::QuestionType;

use crate::answer::Answer;
use crate::json::float;

pub use bootstrap::Estimate;
pub use label::truth;
pub use metrics::{Bin, Coverage};
pub use reliability::reliability_svg;

pub(crate) use metrics::expected_calibration_error;

/// Fewer rows say little, and the bootstrap does not notice.
const FEW: usize = 30;

/// One answer and what would have been right.
#[derive(Clone, PartialEq, Debug)]
pub struct Scored {
    /// The question.
    pub id: String,
    /// Its type.
    pub kind: QuestionType,
    /// In the order of the options.
    pub probabilities: Vec<f64>,
    /// What is published as confidence.
    pub confidence: f64,
    /// The index of the true option.
    pub truth: usize,
}

impl Scored {
    /// Puts an answer beside the truth.
    pub fn new(answer: &Answer, truth: usize) -> Self {
        Scored {
            id: answer.id.clone(),
            kind: answer.kind(),
            probabilities: answer.distribution.probabilities().iter().map(|p| f64::from(*p)).collect(),
            confidence: answer.answer_confidence,
            truth,
        }
    }
}

/// How to evaluate.
#[derive(Clone, PartialEq, Debug)]
pub struct Options {
    /// Resamples of every interval.
    pub resamples: usize,
    /// Seed of the resampling.
    pub seed: u64,
    /// Accuracies for which the coverage is told.
    pub precisions: Vec<f64>,
}

impl Default for Options {
    fn default() -> Self {
        Options { resamples: 2000, seed: 1337, precisions: vec![0.9, 0.95, 0.99] }
    }
}

/// What guessing would get right.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Chance {
    /// Always answering each question's commonest option.
    pub majority: f64,
    /// Drawing an option by lot.
    pub uniform: f64,
}

/// The measures of one question, or of all questions of a type.
#[derive(Clone, PartialEq, Debug)]
pub struct Group {
    /// The question's id, or `all <type>`.
    pub name: String,
    /// The type.
    pub kind: QuestionType,
    /// Rows.
    pub rows: usize,
    /// Accuracy.
    pub accuracy: Estimate,
    /// Brier score.
    pub brier: Estimate,
    /// Negative log-likelihood.
    pub nll: Estimate,
    /// Expected calibration error.
    pub ece: Estimate,
    /// Mean absolute error of scores.
    pub mae: Option<Estimate>,
    /// Coverage at each precision.
    pub coverage: Vec<(Coverage, Estimate)>,
    /// What guessing gives.
    pub chance: Chance,
    /// Accuracy by confidence.
    pub bins: Vec<Bin>,
    /// What should be read before the numbers.
    pub warnings: Vec<String>,
}

/// Evaluates each question, and each type that several questions have.
pub fn evaluate(rows: &[Scored], options: &Options) -> Vec<Group> {
    let mut ids: Vec<(&str, QuestionType)> = Vec::new();
    for row in rows {
        if !ids.contains(&(&row.id, row.kind)) {
            ids.push((&row.id, row.kind));
        }
    }
    let mut groups: Vec<Group> = Vec::new();
    for (id, kind) in &ids {
        let members: Vec<&Scored> = rows.iter().filter(|r| r.id == *id && r.kind == *kind).collect();
        groups.push(group((*id).to_owned(), *kind, &members, options));
    }
    for kind in QuestionType::ALL {
        if ids.iter().filter(|(_, k)| *k == kind).count() > 1 {
            let members: Vec<&Scored> = rows.iter().filter(|r| r.kind == kind).collect();
            groups.push(group(format!("all {}", kind.name()), kind, &members, options));
        }
    }
    groups
}

fn group(name: String, kind: QuestionType, rows: &[&Scored], options: &Options) -> Group {
    let sorted = metrics::Sorted::new(rows, &options.precisions);
    let (plain, intervals) = bootstrap::estimate(&sorted, options.resamples, options.seed);
    let estimate = |i: usize| Estimate { value: plain[i], low: intervals[i][0], high: intervals[i][1] };
    let [accuracy, brier, nll, ece, mae] = [0, 1, 2, 3, 4].map(estimate);
    let chance = chance(rows);
    let coverage: Vec<_> = sorted.coverage().into_iter().enumerate().map(|(i, c)| (c, estimate(5 + i))).collect();
    let warnings = warnings(rows.len(), accuracy, chance);
    Group {
        name,
        kind,
        rows: rows.len(),
        accuracy,
        brier,
        nll,
        ece,
        mae: (kind == QuestionType::Score).then_some(mae),
        coverage,
        chance,
        bins: sorted.bins(),
        warnings,
    }
}

/// The commonest option counts by question: pooled questions have options of their own.
fn chance(rows: &[&Scored]) -> Chance {
    let mut counts: Vec<(&str, Vec<usize>)> = Vec::new();
    for row in rows {
        let at = counts.iter().position(|(id, _)| *id == row.id).unwrap_or_else(|| {
            counts.push((&row.id, Vec::new()));
            counts.len() - 1
        });
        let of_question = &mut counts[at].1;
        of_question.resize(of_question.len().max(row.truth + 1), 0);
        of_question[row.truth] += 1;
    }
    let n = rows.len().max(1) as f64;
    let majority: usize = counts.iter().filter_map(|(_, c)| c.iter().max()).sum();
    let uniform: f64 = rows.iter().map(|r| 1.0 / r.probabilities.len() as f64).sum();
    Chance { majority: majority as f64 / n, uniform: uniform / n }
}

fn warnings(rows: usize, accuracy: Estimate, chance: Chance) -> Vec<String> {
    let mut warnings = Vec::new();
    let Estimate { value, low, high } = accuracy;
    let measured = format!("accuracy {value:.3} (95 % interval {low:.3} to {high:.3})");
    if chance.majority >= 1.0 {
        warnings.push("ALL ROWS HAVE ONE LABEL: the accuracy says nothing; add rows with other labels".to_owned());
    } else if low <= chance.majority {
        warnings.push(format!(
            "NEAR CHANCE: {measured} is not above {:.3}, which always answering the commonest label gives; do not rely on \
             this question",
            chance.majority
        ));
    } else if low <= chance.uniform {
        warnings.push(format!(
            "NEAR CHANCE: {measured} is not above {:.3}, which drawing an option by lot gives; do not rely on this question",
            chance.uniform
        ));
    }
    if rows < FEW {
        warnings.push(format!("only {rows} rows: the intervals are too narrow; label {FEW} or more"));
    }
    warnings
}

impl Group {
    /// The measures as JSON.
    pub fn to_json(&self) -> Value {
        let coverage: Vec<Value> = self
            .coverage
            .iter()
            .map(|(c, e)| {
                json!({
                    "precision": c.precision, "threshold": c.threshold.map(float), "coverage": e.to_json(),
                    "rows": c.rows, "achieved": c.achieved.map(float),
                })
            })
            .collect();
        let bins: Vec<Value> = self
            .bins
            .iter()
            .map(|b| json!({"rows": b.rows, "confidence": float(b.confidence), "accuracy": float(b.accuracy)}))
            .collect();
        json!({
            "name": self.name,
            "type": self.kind.name(),
            "rows": self.rows,
            "accuracy": self.accuracy.to_json(),
            "brier": self.brier.to_json(),
            "nll": self.nll.to_json(),
            "ece": self.ece.to_json(),
            "mae": self.mae.map(|e| e.to_json()),
            "coverage": coverage,
            "chance": {"majority": float(self.chance.majority), "uniform": float(self.chance.uniform)},
            "bins": bins,
            "warnings": self.warnings,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noul(id: &str, p: f64, truth: usize) -> Scored {
        Scored {
            id: id.to_owned(),
            kind: QuestionType::Noul,
            probabilities: vec![1.0 - p, p],
            confidence: p.max(1.0 - p),
            truth,
        }
    }

    /// Statements of which a share is answered rightly, half of them true.
    fn statements(id: &str, n: usize, right: f64) -> Vec<Scored> {
        let row = |i: usize| {
            let truth = i % 2;
            let says = if (i / 2) as f64 / ((n / 2) as f64) < right { truth } else { 1 - truth };
            noul(id, if says == 1 { 0.8 } else { 0.2 }, truth)
        };
        (0..n).map(row).collect()
    }

    #[test]
    fn measures_of_a_hand_made_set() {
        // Right at 0.9, right at 0.6, wrong at 0.8.
        let rows = [noul("q", 0.9, 1), noul("q", 0.4, 0), noul("q", 0.8, 0)];
        let group = &evaluate(&rows, &Options::default())[0];
        assert_eq!((group.rows, group.name.as_str(), group.mae), (3, "q", None));
        assert!((group.accuracy.value - 2.0 / 3.0).abs() < 1e-12);
        let brier = 2.0 * (0.01 + 0.16 + 0.64) / 3.0;
        assert!((group.brier.value - brier).abs() < 1e-12);
        let nll = -(0.9f64.ln() + 0.6f64.ln() + 0.2f64.ln()) / 3.0;
        assert!((group.nll.value - nll).abs() < 1e-12);
        // Each row is alone in its bin.
        let ece = (0.1 + 0.4 + 0.8) / 3.0;
        assert!((group.ece.value - ece).abs() < 1e-12);
        let (at_90, _) = &group.coverage[0];
        assert_eq!((at_90.threshold, at_90.rows, at_90.achieved), (Some(0.9), 1, Some(1.0)));
    }

    #[test]
    fn the_error_of_a_score_is_that_of_its_expected_level() {
        let row = |p: [f64; 3], truth| Scored {
            id: "s".into(),
            kind: QuestionType::Score,
            probabilities: p.to_vec(),
            confidence: 0.5,
            truth,
        };
        let rows = [row([0.5, 0.25, 0.25], 0), row([0.0, 0.5, 0.5], 2)];
        let group = &evaluate(&rows, &Options::default())[0];
        assert!((group.mae.unwrap().value - (0.75 + 0.5) / 2.0).abs() < 1e-12);
    }

    #[test]
    fn guessing_is_called_guessing() {
        let group = &evaluate(&statements("q", 400, 0.52), &Options::default())[0];
        assert!(group.warnings[0].starts_with("NEAR CHANCE: accuracy 0.520"), "{:?}", group.warnings);
        let good = &evaluate(&statements("q", 400, 0.7), &Options::default())[0];
        assert!(good.warnings.is_empty(), "{:?}", good.warnings);
    }

    #[test]
    fn beating_the_lot_but_not_the_commonest_label_is_no_merit() {
        // Nine in ten statements are true and all are called true.
        let rows: Vec<Scored> = (0..500).map(|i| noul("q", 0.9, usize::from(i % 10 != 0))).collect();
        let group = &evaluate(&rows, &Options::default())[0];
        assert!(group.accuracy.low > 0.8 && group.chance.majority == 0.9 && group.chance.uniform == 0.5);
        assert!(group.warnings[0].contains("commonest label"), "{:?}", group.warnings);
    }

    #[test]
    fn one_label_and_few_rows_are_pointed_out() {
        let rows: Vec<Scored> = (0..10).map(|_| noul("q", 0.9, 1)).collect();
        let warnings = &evaluate(&rows, &Options::default())[0].warnings;
        assert!(warnings[0].starts_with("ALL ROWS HAVE ONE LABEL") && warnings[1].starts_with("only 10 rows"));
    }

    #[test]
    fn questions_of_a_type_are_pooled_and_their_chances_kept_apart() {
        let mut rows = statements("a", 100, 0.9);
        rows.extend(statements("b", 100, 0.5));
        let groups = evaluate(&rows, &Options::default());
        let names: Vec<&str> = groups.iter().map(|g| g.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "all noul"]);
        assert!((groups[2].accuracy.value - 0.7).abs() < 0.011);
        assert_eq!(groups[2].rows, 200);
    }

    #[test]
    fn the_same_seed_gives_the_same_intervals_and_they_hold_the_value() {
        let rows = statements("q", 200, 0.8);
        let a = evaluate(&rows, &Options::default());
        assert_eq!(a, evaluate(&rows, &Options::default()));
        let other = evaluate(&rows, &Options { seed: 7, ..Options::default() });
        assert_ne!(a[0].brier, other[0].brier);
        for e in [a[0].accuracy, a[0].brier, a[0].nll, a[0].ece] {
            assert!(e.low <= e.high && e.low >= 0.0);
        }
        // A share of 0.8 among 200 rows: standard error 0.028.
        assert!((a[0].accuracy.low - 0.745).abs() < 0.015 && (a[0].accuracy.high - 0.855).abs() < 0.015);
    }

    #[test]
    fn the_json_has_every_measure() {
        let json = evaluate(&statements("q", 60, 0.8), &Options::default())[0].to_json();
        for key in ["accuracy", "brier", "nll", "ece", "coverage", "chance", "bins", "warnings"] {
            assert!(!json[key].is_null(), "{key}");
        }
        assert!(json["accuracy"]["ci95"].is_array() && json["mae"].is_null());
    }

    #[test]
    fn nothing_gives_no_group() {
        assert!(evaluate(&[], &Options::default()).is_empty());
    }
}
