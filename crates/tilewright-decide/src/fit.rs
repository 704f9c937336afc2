//! Fitting temperatures to labelled rows.
//!
//! A temperature divides the logits of a row; the one that makes the labels likeliest is found by golden-section search in ln T. The likelihood is
//! concave in 1/T, so the search cannot end in a lesser peak. Temperatures are fitted by type, and by type and number of options where enough rows
//! have them; the rest inherit. A part of the rows, drawn by a seeded hash of their ids, is held out and tells whether it helped.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tilewright_models::laya::QuestionType;

use crate::answer::Answer;
use crate::calibrate::{BUCKETS, CalibrationFile, Identity, TEMPERATURE_RANGE, Temperatures, bucket};
use crate::evaluate::expected_calibration_error;
use crate::json::float;

/// Steps of the search; each narrows it to 0.618 of what it was, from a factor of ten to the last bits of a float.
const STEPS: usize = 80;

/// A labelled row, before any temperature.
#[derive(Clone, PartialEq, Debug)]
pub struct Example {
    /// What the split goes by: rows of one id are on one side.
    pub id: String,
    /// The type of the question.
    pub kind: QuestionType,
    /// Raw logits in the order of the options.
    pub logits: Vec<f32>,
    /// The index of the true option.
    pub truth: usize,
}

impl Example {
    /// Takes the logits of an answer.
    pub fn new(id: &str, answer: &Answer, truth: usize) -> Self {
        Example { id: id.to_owned(), kind: answer.kind(), logits: answer.logits.clone(), truth }
    }

    /// -ln p of the true option, and the largest probability with whether it is the true one's.
    fn at(&self, temperature: f64) -> (f64, f64, bool) {
        let z: Vec<f64> = self.logits.iter().map(|l| f64::from(*l) / temperature).collect();
        let best = (0..z.len()).fold(0, |best, i| if z[i] > z[best] { i } else { best });
        let sum: f64 = z.iter().map(|v| (v - z[best]).exp()).sum();
        (sum.ln() + z[best] - z[self.truth], 1.0 / sum, best == self.truth)
    }

    fn bucket(&self) -> &'static str {
        bucket(self.kind, self.logits.len())
    }
}

/// How to fit.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct FitOptions {
    /// Seed of the split.
    pub seed: u64,
    /// The share of rows held out.
    pub holdout: f64,
    /// Rows that a temperature needs.
    pub least: usize,
}

impl Default for FitOptions {
    fn default() -> Self {
        FitOptions { seed: 1337, holdout: 0.2, least: 50 }
    }
}

/// Where a temperature comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// Fitted on these rows.
    Fitted,
    /// Too few rows: the type's.
    Inherited,
    /// Too few rows of the type: what was in use before.
    Kept,
}

impl Origin {
    /// One word.
    pub fn name(self) -> &'static str {
        match self {
            Origin::Fitted => "fitted",
            Origin::Inherited => "inherited",
            Origin::Kept => "kept",
        }
    }
}

/// How probabilities fit the labels of rows.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Quality {
    /// Mean negative log-likelihood, in nats.
    pub nll: f64,
    /// Expected calibration error.
    pub ece: f64,
}

/// One type or bucket.
#[derive(Clone, PartialEq, Debug)]
pub struct Fitted {
    /// `choice`, or `choice:3-5`.
    pub name: &'static str,
    /// Rows that it was, or would have been, fitted on.
    pub rows: usize,
    /// Rows held out.
    pub held_out: usize,
    /// The temperature; of a type, the one of buckets without their own.
    pub temperature: f64,
    /// Where it comes from.
    pub origin: Origin,
    /// On the rows held out, with the temperatures before and after; none without such rows.
    pub quality: Option<[Quality; 2]>,
}

/// What was fitted.
#[derive(Clone, PartialEq, Debug)]
pub struct Fit {
    /// By type, in the order choice, score, noul.
    pub types: [Fitted; 3],
    /// The buckets that have rows.
    pub buckets: Vec<Fitted>,
    /// The temperatures, ready to use.
    pub temperatures: Temperatures,
    /// What should be read before the numbers.
    pub warnings: Vec<String>,
}

/// Fits temperatures; `current` are those in use now.
pub fn fit(examples: &[Example], current: &Temperatures, options: &FitOptions) -> Fit {
    let (held, used): (Vec<&Example>, Vec<&Example>) =
        examples.iter().partition(|e| is_held_out(&e.id, options.seed, options.holdout));
    let mut after = Temperatures { by_type: current.by_type, by_bucket: Vec::new() };
    let mut origins = [Origin::Kept; 3];
    let mut bucket_origins: Vec<(&'static str, QuestionType, Origin)> = Vec::new();
    for kind in QuestionType::ALL {
        let of_type: Vec<&Example> = used.iter().copied().filter(|e| e.kind == kind).collect();
        let names = BUCKETS[kind.index()];
        if of_type.len() < options.least {
            // What is known of this type stays as it is, by bucket too.
            let known = current.by_bucket.iter().filter(|(name, _)| names.contains(&name.as_str()));
            after.by_bucket.extend(known.cloned());
            bucket_origins.extend(names.map(|name| (name, kind, Origin::Kept)));
            continue;
        }
        after.by_type[kind.index()] = temperature(&of_type);
        origins[kind.index()] = Origin::Fitted;
        for name in names {
            let of_bucket: Vec<&Example> = of_type.iter().copied().filter(|e| e.bucket() == name).collect();
            let origin = if of_bucket.len() < options.least { Origin::Inherited } else { Origin::Fitted };
            if origin == Origin::Fitted {
                after.by_bucket.push((name.to_owned(), temperature(&of_bucket)));
            }
            bucket_origins.push((name, kind, origin));
        }
    }
    let report = |name, temperature, origin, belongs: &dyn Fn(&Example) -> bool| {
        let held: Vec<&Example> = held.iter().copied().filter(|e| belongs(e)).collect();
        let quality = (!held.is_empty()).then(|| [quality(&held, current), quality(&held, &after)]);
        let rows = used.iter().filter(|e| belongs(e)).count();
        Fitted { name, rows, held_out: held.len(), temperature, origin, quality }
    };
    let types = QuestionType::ALL
        .map(|kind| report(kind.name(), after.by_type[kind.index()], origins[kind.index()], &|e| e.kind == kind));
    let buckets: Vec<Fitted> = bucket_origins
        .into_iter()
        .map(|(name, kind, origin)| {
            let own = after.by_bucket.iter().find(|(b, _)| b == name).map(|(_, t)| *t);
            report(name, own.unwrap_or(after.by_type[kind.index()]), origin, &|e| e.bucket() == name)
        })
        .filter(|bucket| bucket.rows + bucket.held_out > 0)
        .collect();
    let warnings = warnings(&types, &buckets, options);
    Fit { types, buckets, temperatures: after, warnings }
}

fn warnings(types: &[Fitted; 3], buckets: &[Fitted], options: &FitOptions) -> Vec<String> {
    let mut warnings = Vec::new();
    for fitted in types.iter().filter(|t| t.origin == Origin::Kept && t.rows + t.held_out > 0) {
        warnings.push(format!(
            "{}: {} rows to fit on, {} are needed; its temperatures stay as they were",
            fitted.name, fitted.rows, options.least
        ));
    }
    for fitted in types.iter().chain(buckets).filter(|f| f.origin == Origin::Fitted) {
        let Fitted { name, temperature, .. } = fitted;
        let [low, high] = TEMPERATURE_RANGE;
        if *temperature <= low * 1.001 || *temperature >= high / 1.001 {
            warnings.push(format!(
                "{name}: the temperature {temperature:.3} is at the end of the allowed range {low} to {high}; the labels ask for more"
            ));
        }
        match fitted.quality {
            Some([before, after]) if after.nll > before.nll => warnings.push(format!(
                "{name}: on the rows held out the new temperatures are worse (NLL {:.4}, before {:.4}); label more rows",
                after.nll, before.nll
            )),
            None => warnings.push(format!("{name}: no rows held out; nothing tells whether the new temperature is better")),
            Some(_) => {}
        }
    }
    warnings
}

/// Whether a row is held out: the same rows for the same seed, whatever the others are.
fn is_held_out(id: &str, seed: u64, share: f64) -> bool {
    let digest = Sha256::new().chain_update(seed.to_le_bytes()).chain_update(id.as_bytes()).finalize();
    let bytes: [u8; 8] = digest[..8].try_into().expect("a digest is longer");
    // 53 bits fill a float exactly.
    ((u64::from_le_bytes(bytes) >> 11) as f64) < share * (1u64 << 53) as f64
}

/// The temperature that makes the labels of these rows likeliest, within the allowed range.
fn temperature(rows: &[&Example]) -> f64 {
    let nll = |ln_t: f64| rows.iter().map(|row| row.at(ln_t.exp()).0).sum::<f64>();
    let [mut low, mut high] = TEMPERATURE_RANGE.map(f64::ln);
    let golden = (5f64.sqrt() - 1.0) / 2.0;
    let (mut a, mut b) = (high - golden * (high - low), low + golden * (high - low));
    let (mut at_a, mut at_b) = (nll(a), nll(b));
    for _ in 0..STEPS {
        if at_a <= at_b {
            (high, b, at_b) = (b, a, at_a);
            a = high - golden * (high - low);
            at_a = nll(a);
        } else {
            (low, a, at_a) = (a, b, at_b);
            b = low + golden * (high - low);
            at_b = nll(b);
        }
    }
    let [min, max] = TEMPERATURE_RANGE;
    ((low + high) / 2.0).exp().clamp(min, max)
}

fn quality(rows: &[&Example], temperatures: &Temperatures) -> Quality {
    let at: Vec<_> = rows.iter().map(|e| e.at(temperatures.get(e.kind, e.logits.len()))).collect();
    Quality {
        nll: at.iter().map(|(nll, _, _)| nll).sum::<f64>() / rows.len() as f64,
        ece: expected_calibration_error(at.iter().map(|(_, largest, right)| (*largest, *right))),
    }
}

impl Fit {
    /// The file that a checkpoint's agent loads.
    pub fn file(&self, identity: Identity) -> CalibrationFile {
        let by_bucket: Vec<(&str, f64)> =
            self.temperatures.by_bucket.iter().map(|(name, t)| (name.as_str(), *t)).collect();
        CalibrationFile::new(self.temperatures.by_type, &by_bucket, identity)
    }

    /// The report as JSON.
    pub fn to_json(&self) -> Value {
        let quality = |q: Quality| json!({"nll": float(q.nll), "ece": float(q.ece)});
        let row = |f: &Fitted| {
            json!({
                "name": f.name, "rows": f.rows, "held_out": f.held_out, "temperature": float(f.temperature),
                "origin": f.origin.name(), "before": f.quality.map(|q| quality(q[0])), "after": f.quality.map(|q| quality(q[1])),
            })
        };
        json!({
            "types": self.types.iter().map(row).collect::<Vec<_>>(),
            "buckets": self.buckets.iter().map(row).collect::<Vec<_>>(),
            "warnings": self.warnings,
        })
    }
}

#[cfg(test)]
mod tests {
    use tilewright_core::rng::XorShift;

    use super::*;

    const NEUTRAL: Temperatures = Temperatures { by_type: [1.0; 3], by_bucket: Vec::new() };

    /// Rows whose labels are drawn from softmax(logits / t): `t` is the temperature to be found.
    fn drawn(kind: QuestionType, options: usize, n: usize, t: f64, seed: u64) -> Vec<Example> {
        let mut rng = XorShift::new(seed);
        let row = |i: usize| {
            let logits: Vec<f32> = (0..options).map(|_| 8.0 * rng.random_f32() - 4.0).collect();
            let weights: Vec<f64> = logits.iter().map(|l| (f64::from(*l) / t).exp()).collect();
            let mut left = f64::from(rng.random_f32()) * weights.iter().sum::<f64>();
            let truth = weights.iter().position(|w| {
                left -= w;
                left < 0.0
            });
            Example { id: format!("{seed}-{i}"), kind, logits, truth: truth.unwrap_or(options - 1) }
        };
        (0..n).map(row).collect()
    }

    fn close(a: f64, b: f64, within: f64) {
        assert!((a / b).ln().abs() < within, "{a} and {b}");
    }

    #[test]
    fn the_temperature_that_made_the_labels_is_found() {
        for t in [0.7, 1.0, 2.5] {
            let examples = drawn(QuestionType::Choice, 4, 6000, t, 3);
            close(temperature(&examples.iter().collect::<Vec<_>>()), t, 0.06);
        }
    }

    #[test]
    fn the_search_ends_where_the_slope_is_zero() {
        let examples = drawn(QuestionType::Score, 5, 300, 1.4, 5);
        let rows: Vec<&Example> = examples.iter().collect();
        let t = temperature(&rows);
        let nll = |t: f64| rows.iter().map(|r| r.at(t).0).sum::<f64>();
        assert!(nll(t) <= nll(t * 1.001) && nll(t) <= nll(t / 1.001));
    }

    #[test]
    fn labels_beyond_the_range_end_at_its_ends_with_a_warning() {
        let right: Vec<Example> = (0..200)
            .map(|i| Example { id: i.to_string(), kind: QuestionType::Noul, logits: vec![0.0, 1.0], truth: 1 })
            .collect();
        let fitted = fit(&right, &NEUTRAL, &FitOptions::default());
        close(fitted.temperatures.by_type[2], 0.5, 1e-6);
        assert!(fitted.warnings.iter().any(|w| w.contains("at the end of the allowed range")), "{:?}", fitted.warnings);
        let wrong: Vec<Example> = right.into_iter().map(|e| Example { truth: 0, ..e }).collect();
        close(fit(&wrong, &NEUTRAL, &FitOptions::default()).temperatures.by_type[2], 5.0, 1e-6);
    }

    #[test]
    fn buckets_with_enough_rows_have_their_own_temperature_and_the_others_inherit() {
        let mut examples = drawn(QuestionType::Choice, 3, 2000, 2.0, 7);
        examples.extend(drawn(QuestionType::Choice, 8, 2000, 0.8, 8));
        examples.extend(drawn(QuestionType::Choice, 20, 30, 1.0, 9));
        let fitted = fit(&examples, &NEUTRAL, &FitOptions::default());
        let get = |k| fitted.temperatures.get(QuestionType::Choice, k);
        close(get(3), 2.0, 0.1);
        close(get(8), 0.8, 0.1);
        assert_eq!(get(20), fitted.temperatures.by_type[0]);
        let origins: Vec<_> = fitted.buckets.iter().map(|b| (b.name, b.origin)).collect();
        assert_eq!(
            origins,
            [("choice:3-5", Origin::Fitted), ("choice:6-10", Origin::Fitted), ("choice:11+", Origin::Inherited)]
        );
        let [before, after] = fitted.types[0].quality.unwrap();
        assert!(after.nll < before.nll && after.ece < before.ece, "{before:?} {after:?}");
    }

    #[test]
    fn a_type_with_few_rows_keeps_everything_it_had() {
        let current = Temperatures {
            by_type: [1.1, 1.2, 1.3],
            by_bucket: vec![("noul:2".into(), 3.0), ("choice:2".into(), 0.9)],
        };
        let mut examples = drawn(QuestionType::Noul, 2, 20, 2.0, 1);
        examples.extend(drawn(QuestionType::Choice, 3, 400, 1.0, 2));
        let fitted = fit(&examples, &current, &FitOptions::default());
        assert_eq!(fitted.temperatures.get(QuestionType::Noul, 2), 3.0);
        assert_eq!(fitted.temperatures.by_type[1], 1.2, "no rows at all");
        assert!(!fitted.temperatures.by_bucket.iter().any(|(name, _)| name == "choice:2"), "fitted types start anew");
        assert!(fitted.warnings[0].starts_with("noul: "), "{:?}", fitted.warnings);
        assert_eq!(fitted.buckets.iter().find(|b| b.name == "noul:2").unwrap().origin, Origin::Kept);
    }

    #[test]
    fn the_split_depends_on_seed_and_id_only_and_has_the_asked_size() {
        let ids: Vec<String> = (0..5000).map(|i| i.to_string()).collect();
        let held = |seed, share| ids.iter().filter(|id| is_held_out(id, seed, share)).count();
        assert!((held(1, 0.2) as f64 / 5000.0 - 0.2).abs() < 0.02);
        assert_eq!((held(1, 0.0), held(1, 1.0)), (0, 5000));
        assert!(ids.iter().any(|id| is_held_out(id, 1, 0.5) != is_held_out(id, 2, 0.5)));
        assert!(
            ids.iter().all(|id| !is_held_out(id, 1, 0.2) || is_held_out(id, 1, 0.5)),
            "a larger part holds the smaller"
        );
    }

    #[test]
    fn without_held_out_rows_nothing_is_claimed() {
        let examples = drawn(QuestionType::Score, 3, 100, 1.0, 4);
        let fitted = fit(&examples, &NEUTRAL, &FitOptions { holdout: 0.0, ..FitOptions::default() });
        assert_eq!(fitted.types[1].quality, None);
        assert!(fitted.warnings.iter().any(|w| w.contains("no rows held out")));
    }

    #[test]
    fn a_fit_that_does_not_help_on_held_out_rows_says_so() {
        // Fitted rows say "certain", held-out rows say the opposite.
        let options = FitOptions::default();
        let row = |i: usize| {
            let id = i.to_string();
            let truth = usize::from(!is_held_out(&id, options.seed, options.holdout));
            Example { id, kind: QuestionType::Noul, logits: vec![0.0, 1.0], truth }
        };
        let examples: Vec<Example> = (0..300).map(row).collect();
        let fitted = fit(&examples, &NEUTRAL, &options);
        assert!(
            fitted.warnings.iter().any(|w| w.contains("noul: on the rows held out the new temperatures are worse"))
        );
    }

    #[test]
    fn the_file_holds_what_was_fitted_and_reads_back() {
        let fitted = fit(&drawn(QuestionType::Choice, 3, 400, 1.5, 6), &NEUTRAL, &FitOptions::default());
        let file = fitted.file(Identity::default());
        let again = CalibrationFile::parse(&file.to_json()).unwrap();
        assert_eq!(again.temperature, file.temperature);
        assert_eq!(again.temperature_by_options.len(), 1);
        assert!(fitted.to_json()["types"][0]["after"]["nll"].as_f64().unwrap() > 0.0);
    }
}
