//! Counts of latencies in log-linear buckets: three significant digits, whatever the size.
//!
//! Values below 2,048 have a bucket each. Above, every power of two is cut into 1,024 equal buckets, so that a bucket is at most 1/1,024 of what it
//! holds. Adding costs a shift and an increment, merging costs an addition a bucket, and nothing ever has to be known beforehand.

/// Buckets of a power of two.
const HALF: u64 = 1024;

/// A histogram of whole numbers, nanoseconds here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    sum: u128,
    min: u64,
    max: u64,
}

/// The bucket of a value.
fn index(value: u64) -> usize {
    if value < 2 * HALF {
        return value as usize;
    }
    // The highest eleven bits count, the others are the width of the bucket.
    let shift = 53 - value.leading_zeros() as u64;
    (HALF * (shift + 1) + ((value >> shift) - HALF)) as usize
}

/// The least and the greatest value of a bucket.
fn bounds(index: usize) -> (u64, u64) {
    let index = index as u64;
    if index < 2 * HALF {
        return (index, index);
    }
    let shift = index / HALF - 1;
    let low = (index % HALF + HALF) << shift;
    (low, low + ((1 << shift) - 1))
}

impl Histogram {
    /// Counts a value.
    pub fn add(&mut self, value: u64) {
        self.add_many(value, 1);
    }

    /// Counts a value `times` times.
    pub fn add_many(&mut self, value: u64, times: u64) {
        if times == 0 {
            return;
        }
        let at = index(value);
        if at >= self.counts.len() {
            self.counts.resize(at + 1, 0);
        }
        self.counts[at] += times;
        self.min = if self.total == 0 { value } else { self.min.min(value) };
        self.max = self.max.max(value);
        self.total += times;
        self.sum += u128::from(value) * u128::from(times);
    }

    /// Adds what another one counted.
    pub fn merge(&mut self, other: &Histogram) {
        if other.total == 0 {
            return;
        }
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        self.counts.iter_mut().zip(&other.counts).for_each(|(a, b)| *a += b);
        self.min = if self.total == 0 { other.min } else { self.min.min(other.min) };
        self.max = self.max.max(other.max);
        self.total += other.total;
        self.sum += other.sum;
    }

    /// How many values.
    pub fn count(&self) -> u64 {
        self.total
    }

    /// Their mean; 0 of nothing.
    pub fn mean(&self) -> f64 {
        if self.total == 0 { 0.0 } else { self.sum as f64 / self.total as f64 }
    }

    /// The least, exactly; 0 of nothing.
    pub fn min(&self) -> u64 {
        self.min
    }

    /// The greatest, exactly; 0 of nothing.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The least value that at least a share `q` of all does not exceed, to three digits from above; 0 of nothing.
    pub fn quantile(&self, q: f64) -> u64 {
        let wanted = ((q * self.total as f64).ceil() as u64).clamp(1, self.total.max(1));
        let mut seen = 0;
        for (i, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return bounds(i).1.clamp(self.min, self.max);
            }
        }
        self.max
    }

    /// Every bucket that holds something, by its least value: enough to build the histogram anew, but for the exact ends and the sum.
    pub fn rows(&self) -> Vec<(u64, u64)> {
        self.counts.iter().enumerate().filter(|(_, c)| **c > 0).map(|(i, c)| (bounds(i).0, *c)).collect()
    }

    /// The histogram that [`Histogram::rows`] told of.
    pub fn from_rows(rows: &[(u64, u64)]) -> Histogram {
        let mut histogram = Histogram::default();
        rows.iter().for_each(|&(value, count)| histogram.add_many(value, count));
        histogram
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::SplitMix;

    /// The definition, by sorting.
    fn exact(values: &[u64], q: f64) -> u64 {
        let mut sorted = values.to_vec();
        sorted.sort_unstable();
        sorted[((q * sorted.len() as f64).ceil() as usize).clamp(1, sorted.len()) - 1]
    }

    fn agrees(values: &[u64]) {
        let mut histogram = Histogram::default();
        values.iter().for_each(|v| histogram.add(*v));
        for q in [0.0, 0.01, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0] {
            let (got, want) = (histogram.quantile(q), exact(values, q));
            assert!(got >= want, "q {q}: {got} below {want}");
            assert!((got - want) as f64 <= want as f64 / 1024.0, "q {q}: {got} is not {want} to three digits");
        }
        assert_eq!(histogram.quantile(1.0), *values.iter().max().unwrap());
        assert_eq!((histogram.min(), histogram.max()), (exact(values, 0.0), exact(values, 1.0)));
        let mean = values.iter().map(|v| *v as f64).sum::<f64>() / values.len() as f64;
        assert!((histogram.mean() / mean.max(1e-9) - 1.0).abs() < 1e-9 || mean == 0.0);
    }

    #[test]
    fn percentiles_are_the_exact_ones_to_three_digits() {
        let mut rng = SplitMix::new(7);
        agrees(&(0..10_000).map(|_| rng.below(2_000_000_000) as u64).collect::<Vec<_>>());
        // Five powers of ten at once, as latencies with a stall have them.
        agrees(&(0..10_000).map(|_| (10f64.powf(4.0 + 5.0 * rng.uniform())) as u64).collect::<Vec<_>>());
        agrees(&(0..37).map(|_| (-rng.uniform().ln() * 1e6) as u64).collect::<Vec<_>>());
    }

    #[test]
    fn small_values_and_equal_values_are_exact() {
        agrees(&[0]);
        agrees(&[5, 5, 5, 5]);
        let mut histogram = Histogram::default();
        (0..2048).for_each(|v| histogram.add(v));
        assert_eq!(histogram.quantile(0.5), 1023);
        assert_eq!(histogram.rows().len(), 2048);
    }

    #[test]
    fn buckets_follow_each_other_without_a_gap() {
        let mut next = 0;
        for i in 0..40 * 1024 {
            let (low, high) = bounds(i);
            assert_eq!((low, index(low), index(high)), (next, i, i));
            next = high + 1;
        }
        assert_eq!(bounds(index(u64::MAX)).1, u64::MAX);
    }

    #[test]
    fn merging_is_counting_together() {
        let mut rng = SplitMix::new(8);
        let values: Vec<u64> = (0..999).map(|_| rng.below(1 << 40) as u64).collect();
        let (mut all, mut a, mut b) = (Histogram::default(), Histogram::default(), Histogram::default());
        for (i, v) in values.iter().enumerate() {
            all.add(*v);
            if i % 3 == 0 { a.add(*v) } else { b.add(*v) }
        }
        a.merge(&b);
        a.merge(&Histogram::default());
        assert_eq!(a, all);
        let mut empty = Histogram::default();
        empty.merge(&all);
        assert_eq!(empty, all);
    }

    #[test]
    fn rows_bring_the_same_percentiles_back() {
        let mut rng = SplitMix::new(9);
        let mut histogram = Histogram::default();
        (0..5000).for_each(|_| histogram.add(rng.below(1 << 33) as u64));
        let again = Histogram::from_rows(&histogram.rows());
        assert_eq!(again.rows(), histogram.rows());
        for q in [0.5, 0.9, 0.99] {
            assert_eq!(again.quantile(q), histogram.quantile(q));
        }
    }

    #[test]
    fn nothing_has_percentiles_of_zero() {
        let none = Histogram::default();
        assert_eq!((none.count(), none.quantile(0.99), none.min(), none.max(), none.mean()), (0, 0, 0, 0, 0.0));
    }
}
