//! The measures over weighted rows: a row's weight is how often a resample drew it.

use super::Scored;

/// Bins of equal width over the confidence.
const BINS: usize = 15;
/// No probability counts as less, or a single row would decide the mean.
const LEAST: f64 = 1e-12;

/// Rows of about the same confidence.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Bin {
    /// Rows.
    pub rows: usize,
    /// Their mean confidence.
    pub confidence: f64,
    /// How many were right, as a share.
    pub accuracy: f64,
}

/// How much can be answered at an accuracy.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Coverage {
    /// The accuracy that was asked for.
    pub precision: f64,
    /// The least confidence that is accepted; none if no threshold reaches the accuracy.
    pub threshold: Option<f64>,
    /// Rows at or above it.
    pub rows: usize,
    /// Their accuracy.
    pub achieved: Option<f64>,
}

/// What the measures need of a row.
#[derive(Clone, Copy)]
struct Row {
    confidence: f64,
    right: f64,
    brier: f64,
    nll: f64,
    error: f64,
    bin: usize,
}

/// Rows from the most confident down.
pub struct Sorted {
    rows: Vec<Row>,
    precisions: Vec<f64>,
}

impl Sorted {
    pub fn new(rows: &[&Scored], precisions: &[f64]) -> Self {
        let row = |scored: &&Scored| {
            let p = &scored.probabilities;
            let likeliest = (0..p.len()).fold(0, |best, i| if p[i] > p[best] { i } else { best });
            let squares = p.iter().enumerate().map(|(i, p)| (p - f64::from(u8::from(i == scored.truth))).powi(2));
            let expected: f64 = p.iter().enumerate().map(|(i, p)| i as f64 * p).sum();
            Row {
                confidence: scored.confidence,
                right: f64::from(u8::from(likeliest == scored.truth)),
                brier: squares.sum(),
                nll: -p[scored.truth].max(LEAST).ln(),
                error: (expected - scored.truth as f64).abs(),
                bin: bin(scored.confidence),
            }
        };
        let mut rows: Vec<Row> = rows.iter().map(row).collect();
        rows.sort_by(|a, b| b.confidence.total_cmp(&a.confidence));
        Sorted { rows, precisions: precisions.to_vec() }
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Accuracy, Brier, NLL, ECE, MAE, then the coverage at each precision, with row `i` counted `weights[i]` times.
    pub fn measures(&self, weights: &[u32]) -> Vec<f64> {
        let mut sums = [0.0; 4];
        let mut bins = [[0.0; 3]; BINS];
        let mut total = 0.0;
        for (row, w) in self.rows.iter().zip(weights) {
            let w = f64::from(*w);
            total += w;
            for (sum, value) in sums.iter_mut().zip([row.right, row.brier, row.nll, row.error]) {
                *sum += w * value;
            }
            for (sum, value) in bins[row.bin].iter_mut().zip([1.0, row.confidence, row.right]) {
                *sum += w * value;
            }
        }
        let [accuracy, brier, nll, error] = sums.map(|sum| sum / total);
        let ece = bins.iter().map(|[_, confidence, right]| (confidence - right).abs() / total).sum();
        let mut measures = vec![accuracy, brier, nll, ece, error];
        measures.extend(self.precisions.iter().map(|p| self.covered(*p, weights).0 / total));
        measures
    }

    /// The weight of the most confident rows among which the accuracy is `precision`, and the index behind the last of them.
    fn covered(&self, precision: f64, weights: &[u32]) -> (f64, usize) {
        let (mut seen, mut right) = (0.0, 0.0);
        let mut best = (0.0, 0);
        for (i, (row, w)) in self.rows.iter().zip(weights).enumerate() {
            seen += f64::from(*w);
            right += f64::from(*w) * row.right;
            // Rows of equal confidence are accepted together or not at all.
            let last = self.rows.get(i + 1).is_none_or(|next| next.confidence < row.confidence);
            if last && seen > 0.0 && right / seen >= precision {
                best = (seen, i + 1);
            }
        }
        best
    }

    /// The coverage at each precision, every row counted once.
    pub fn coverage(&self) -> Vec<Coverage> {
        let once = vec![1; self.rows.len()];
        let at = |precision: &f64| {
            let (_, end) = self.covered(*precision, &once);
            let right: f64 = self.rows[..end].iter().map(|r| r.right).sum();
            Coverage {
                precision: *precision,
                threshold: end.checked_sub(1).map(|last| self.rows[last].confidence),
                rows: end,
                achieved: (end > 0).then(|| right / end as f64),
            }
        };
        self.precisions.iter().map(at).collect()
    }

    /// The bins, empty ones too, from the least confident up.
    pub fn bins(&self) -> Vec<Bin> {
        let mut bins = vec![Bin::default(); BINS];
        for row in &self.rows {
            let bin = &mut bins[row.bin];
            bin.rows += 1;
            bin.confidence += row.confidence;
            bin.accuracy += row.right;
        }
        for bin in bins.iter_mut().filter(|b| b.rows > 0) {
            bin.confidence /= bin.rows as f64;
            bin.accuracy /= bin.rows as f64;
        }
        bins
    }
}

fn bin(confidence: f64) -> usize {
    // The cast saturates: what is no number goes into the first bin.
    ((confidence * BINS as f64) as usize).min(BINS - 1)
}

/// The expected calibration error of confidences and whether each was right.
pub fn expected_calibration_error(rows: impl Iterator<Item = (f64, bool)>) -> f64 {
    let mut differences = [0.0; BINS];
    let mut n = 0;
    for (confidence, right) in rows {
        differences[bin(confidence)] += confidence - f64::from(u8::from(right));
        n += 1;
    }
    differences.iter().map(|d| d.abs()).sum::<f64>() / f64::from(n.max(1))
}

#[cfg(test)]
mod tests {
    use tilewright_models::laya::QuestionType;

    use super::*;

    fn rows(confidences: &[(f64, bool)]) -> Vec<Scored> {
        let row = |&(c, right): &(f64, bool)| Scored {
            id: "q".into(),
            kind: QuestionType::Noul,
            probabilities: vec![1.0 - c, c],
            confidence: c,
            truth: usize::from(right),
        };
        confidences.iter().map(row).collect()
    }

    fn coverage(confidences: &[(f64, bool)], precision: f64) -> Coverage {
        let rows = rows(confidences);
        Sorted::new(&rows.iter().collect::<Vec<_>>(), &[precision]).coverage()[0]
    }

    #[test]
    fn coverage_goes_on_behind_a_dip() {
        let found = coverage(&[(0.9, true), (0.8, false), (0.7, true), (0.6, true), (0.55, false)], 0.75);
        assert_eq!((found.threshold, found.rows, found.achieved), (Some(0.6), 4, Some(0.75)));
    }

    #[test]
    fn equal_confidences_are_accepted_together() {
        let found = coverage(&[(0.9, true), (0.8, true), (0.8, false), (0.7, false)], 1.0);
        assert_eq!((found.threshold, found.rows), (Some(0.9), 1));
    }

    #[test]
    fn no_threshold_may_be_good_enough() {
        let found = coverage(&[(0.9, false), (0.6, true)], 0.9);
        assert_eq!((found.threshold, found.rows, found.achieved), (None, 0, None));
    }

    #[test]
    fn a_weight_counts_like_repeated_rows() {
        let few = rows(&[(0.9, true), (0.7, false), (0.55, true)]);
        let many = rows(&[(0.9, true), (0.9, true), (0.7, false), (0.55, true), (0.55, true), (0.55, true)]);
        let weighted = Sorted::new(&few.iter().collect::<Vec<_>>(), &[0.6]).measures(&[2, 1, 3]);
        let repeated = Sorted::new(&many.iter().collect::<Vec<_>>(), &[0.6]).measures(&[1; 6]);
        for (a, b) in weighted.iter().zip(&repeated) {
            assert!((a - b).abs() < 1e-12, "{weighted:?} {repeated:?}");
        }
    }

    #[test]
    fn the_plain_error_is_the_one_of_the_measures() {
        let set = [(0.95, true), (0.93, false), (0.7, true), (0.52, false)];
        let list = rows(&set);
        let measures = Sorted::new(&list.iter().collect::<Vec<_>>(), &[]).measures(&[1; 4]);
        assert!((expected_calibration_error(set.into_iter()) - measures[3]).abs() < 1e-12);
    }

    #[test]
    fn certainty_is_in_the_last_bin() {
        assert_eq!((bin(1.0), bin(0.0), bin(f64::NAN)), (BINS - 1, 0, 0));
    }
}
