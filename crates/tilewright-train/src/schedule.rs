//! Learning-rate schedules: cosine, linear, constant, and warm-up-stable-decay.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tilewright_core::{Error, Result};

/// The curve between warm-up and the last step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Curve {
    /// Half a cosine from the peak to the final rate.
    Cosine,
    /// A straight line from the peak to the final rate.
    Linear,
    /// The peak throughout; no warm-up.
    Constant,
    /// The peak for 80 % of the run, then `1 - sqrt` down to the final rate.
    Wsd,
}

impl FromStr for Curve {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Ok(match s {
            "cosine" => Curve::Cosine,
            "linear" => Curve::Linear,
            "constant" => Curve::Constant,
            "wsd" => Curve::Wsd,
            _ => {
                let what = format!("no learning-rate schedule is called `{s}`");
                return Err(Error::config(what, "use --schedule cosine, linear, constant or wsd"));
            }
        })
    }
}

impl fmt::Display for Curve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Curve::Cosine => "cosine",
            Curve::Linear => "linear",
            Curve::Constant => "constant",
            Curve::Wsd => "wsd",
        })
    }
}

/// A schedule over a whole run.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// The curve.
    pub curve: Curve,
    /// Peak rate.
    pub peak: f32,
    /// Steps of linear warm-up, inside `steps`.
    pub warmup: usize,
    /// Steps of the run.
    pub steps: usize,
    /// The last rate as a fraction of the peak.
    pub final_fraction: f32,
}

impl Schedule {
    /// The rate of update `step`, counted from 0.
    ///
    /// Ratios are formed in f32, as llm.c does; the cosine goes through f64 because f32 cosines differ between C libraries.
    pub fn rate(&self, step: usize) -> f32 {
        let floor = self.peak * self.final_fraction;
        let ratio = |from: usize| (step - from) as f32 / self.steps.saturating_sub(from).max(1) as f32;
        if self.curve == Curve::Constant {
            return self.peak;
        }
        if step < self.warmup {
            return match self.curve {
                Curve::Wsd => self.peak * ((step + 1) as f32 / self.warmup as f32),
                _ => self.peak * (step + 1) as f32 / self.warmup as f32,
            };
        }
        match self.curve {
            Curve::Constant => self.peak,
            Curve::Cosine => {
                let cosine = (std::f64::consts::PI * f64::from(ratio(self.warmup))).cos() as f32;
                floor + 0.5 * (1.0 + cosine) * (self.peak - floor)
            }
            Curve::Linear => self.peak - ratio(self.warmup) * (self.peak - floor),
            Curve::Wsd => {
                let decay_from = (0.8 * self.steps as f32) as usize;
                if step < decay_from {
                    return self.peak;
                }
                floor + (1.0 - ratio(decay_from).sqrt()) * (self.peak - floor)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(curve: Curve, points: &[(usize, f64)]) {
        let schedule = Schedule { curve, peak: 6e-4, warmup: 700, steps: 18865, final_fraction: 0.1 };
        for &(step, want) in points {
            let got = f64::from(schedule.rate(step));
            // The vectors are printed with seven digits.
            assert!((got - want).abs() <= 1.01e-6 * want, "{curve} at {step}: {got:e}, want {want:e}");
        }
    }

    #[test]
    fn cosine_equals_the_vectors() {
        check(
            Curve::Cosine,
            &[
                (0, 8.571429e-07),
                (1, 1.714286e-06),
                (699, 6e-4),
                (700, 6e-4),
                (701, 6e-4),
                (5000, 5.287162e-04),
                (15092, 1.154717e-04),
                (15093, 1.154433e-04),
                (18864, 6e-5),
                (18865, 6e-5),
            ],
        );
    }

    #[test]
    fn linear_equals_the_vectors() {
        check(
            Curve::Linear,
            &[
                (0, 8.571429e-07),
                (699, 6e-4),
                (700, 6e-4),
                (701, 5.999703e-04),
                (5000, 4.721718e-04),
                (15092, 1.721618e-04),
                (15093, 1.721321e-04),
                (18864, 6.002974e-05),
                (18865, 5.999999e-05),
            ],
        );
    }

    #[test]
    fn constant_has_neither_warmup_nor_decay() {
        check(Curve::Constant, &[(0, 6e-4), (1, 6e-4), (5000, 6e-4), (18865, 6e-4)]);
    }

    #[test]
    fn wsd_equals_the_vectors() {
        check(
            Curve::Wsd,
            &[
                (0, 8.571429e-07),
                (1, 1.714286e-06),
                (699, 6e-4),
                (15092, 6e-4),
                (15093, 5.912088e-04),
                (18864, 6.007159e-05),
                (18865, 6e-5),
            ],
        );
    }

    #[test]
    fn a_run_that_is_all_warmup_stays_finite() {
        for curve in [Curve::Cosine, Curve::Linear, Curve::Wsd] {
            let schedule = Schedule { curve, peak: 1.0, warmup: 5, steps: 5, final_fraction: 0.0 };
            for step in 0..=5 {
                assert!(schedule.rate(step).is_finite(), "{curve} at {step}");
            }
            assert_eq!(schedule.rate(4), 1.0, "{curve}: the peak is reached by the last warm-up step");
        }
    }

    #[test]
    fn names_round_trip_and_others_are_refused() {
        for name in ["cosine", "linear", "constant", "wsd"] {
            assert_eq!(name.parse::<Curve>().unwrap().to_string(), name);
        }
        let message = "cosin".parse::<Curve>().unwrap_err().to_string();
        assert!(message.contains("cosin") && message.contains("--schedule"), "{message}");
    }
}
