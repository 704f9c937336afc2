//! Detects outliers in a stream of losses or gradient norms by their z-score against the last 128 values.

use tilewright_core::format::state::DetectorState;

/// Values in the window.
pub const WINDOW: usize = 128;

/// A sliding window with running sums.
///
/// The running sums are part of the state: recomputing them from the window would round differently, and a resumed run must skip
/// exactly the updates that an undisturbed one skips.
#[derive(Clone, PartialEq, Debug)]
pub struct OutlierDetector {
    window: [f64; WINDOW],
    count: usize,
    index: usize,
    sum: f64,
    sum_of_squares: f64,
}

impl Default for OutlierDetector {
    fn default() -> Self {
        OutlierDetector { window: [0.0; WINDOW], count: 0, index: 0, sum: 0.0, sum_of_squares: 0.0 }
    }
}

impl OutlierDetector {
    /// Adds a value; gives its z-score against the window that includes it, NaN until the window is full.
    ///
    /// A value that is not finite is not an observation: it gets NaN and leaves the window alone.
    pub fn update(&mut self, value: f64) -> f64 {
        if !value.is_finite() {
            return f64::NAN;
        }
        if self.count < WINDOW {
            self.window[self.count] = value;
            self.count += 1;
            self.sum += value;
            self.sum_of_squares += value * value;
            return f64::NAN;
        }
        let old = std::mem::replace(&mut self.window[self.index], value);
        self.index = (self.index + 1) % WINDOW;
        self.sum += value - old;
        self.sum_of_squares += value * value - old * old;
        let mean = self.sum / WINDOW as f64;
        // Rounding can push the variance of a constant stream below zero.
        let deviation = (self.sum_of_squares / WINDOW as f64 - mean * mean).max(0.0).sqrt();
        if deviation == 0.0 { 0.0 } else { (value - mean) / deviation }
    }

    /// Whether a z-score means that the update is to be skipped; a threshold of 0 never does.
    pub fn is_outlier(z: f64, threshold: f64) -> bool {
        threshold > 0.0 && z.is_finite() && z > threshold
    }

    /// The state, for the checkpoint.
    pub fn state(&self) -> DetectorState {
        // Until the window is full the index stays 0.
        let (newest, oldest) = self.window[..self.count].split_at(self.index);
        let values = [oldest, newest].concat();
        DetectorState { values, sum: self.sum, sum_sq: self.sum_of_squares }
    }

    /// The detector back from its state; `None` when the state cannot be one.
    pub fn restore(state: &DetectorState) -> Option<Self> {
        let count = state.values.len();
        let mut detector =
            OutlierDetector { count, sum: state.sum, sum_of_squares: state.sum_sq, ..OutlierDetector::default() };
        detector.window.get_mut(..count)?.copy_from_slice(&state.values);
        Some(detector)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(i: usize) -> f64 {
        5.0 + (i as f64 * 0.7).sin()
    }

    #[test]
    fn no_score_until_the_window_is_full() {
        let mut d = OutlierDetector::default();
        assert!((0..WINDOW).all(|i| d.update(wave(i)).is_nan()));
        assert!(d.update(wave(WINDOW)).is_finite());
    }

    #[test]
    fn the_score_is_taken_against_the_window_that_includes_the_value() {
        let mut d = OutlierDetector::default();
        let values: Vec<f64> = (0..300).map(|i| if i == 299 { 9.0 } else { wave(i) }).collect();
        let mut z = f64::NAN;
        for v in &values {
            z = d.update(*v);
        }
        let window = &values[300 - WINDOW..];
        let mean = window.iter().sum::<f64>() / WINDOW as f64;
        let var = window.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / WINDOW as f64;
        let want = (9.0 - mean) / var.sqrt();
        assert!((z - want).abs() < 1e-9, "{z} {want}");
        assert!(OutlierDetector::is_outlier(z, 3.0) && !OutlierDetector::is_outlier(z, 50.0));
    }

    #[test]
    fn zero_threshold_and_missing_scores_never_skip() {
        assert!(!OutlierDetector::is_outlier(100.0, 0.0));
        assert!(!OutlierDetector::is_outlier(f64::NAN, 3.0));
        assert!(!OutlierDetector::is_outlier(f64::INFINITY, 3.0));
        assert!(!OutlierDetector::is_outlier(-9.0, 3.0), "a low loss is no outlier");
    }

    #[test]
    fn a_constant_stream_scores_zero() {
        let mut d = OutlierDetector::default();
        for _ in 0..WINDOW {
            d.update(0.1);
        }
        for _ in 0..10 * WINDOW {
            let z = d.update(0.1);
            assert!(z.is_finite() && z.abs() < 1e3, "{z}");
        }
    }

    #[test]
    fn a_value_that_is_not_finite_does_not_poison_the_window() {
        let mut d = OutlierDetector::default();
        for i in 0..WINDOW {
            d.update(wave(i));
        }
        let before = d.clone();
        assert!(d.update(f64::NAN).is_nan() && d.update(f64::INFINITY).is_nan());
        assert_eq!(d, before);
    }

    #[test]
    fn bug_6_a_resumed_detector_continues_bit_for_bit() {
        // llm.c forgets its windows at a resume, so that nothing is skipped for 128 steps.
        for split in [1, 100, WINDOW, 200, 333] {
            let (mut whole, mut first) = (OutlierDetector::default(), OutlierDetector::default());
            for i in 0..split {
                whole.update(wave(i));
                first.update(wave(i));
            }
            let mut resumed = OutlierDetector::restore(&first.state()).unwrap();
            for i in split..500 {
                assert_eq!(
                    whole.update(wave(i)).to_bits(),
                    resumed.update(wave(i)).to_bits(),
                    "split {split}, value {i}"
                );
            }
        }
    }

    #[test]
    fn a_window_that_is_too_long_is_refused() {
        let state = |n| DetectorState { values: vec![1.0; n], sum: n as f64, sum_sq: n as f64 };
        assert!(OutlierDetector::restore(&state(WINDOW)).is_some());
        assert!(OutlierDetector::restore(&state(WINDOW + 1)).is_none());
    }
}
