//! Intervals by resampling rows with replacement.

use serde_json::{Value, json};
use tilewright_core::rng::XorShift;

use super::metrics::Sorted;
use crate::json::float;

/// A value and its 95 % interval.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Estimate {
    /// On all rows.
    pub value: f64,
    /// 2.5 % of resamples lie below.
    pub low: f64,
    /// 2.5 % lie above.
    pub high: f64,
}

impl Estimate {
    /// `{value, ci95}`.
    pub fn to_json(self) -> Value {
        json!({"value": float(self.value), "ci95": [float(self.low), float(self.high)]})
    }
}

/// Every measure on all rows, and its interval.
pub fn estimate(rows: &Sorted, resamples: usize, seed: u64) -> (Vec<f64>, Vec<[f64; 2]>) {
    let n = rows.len();
    let plain = rows.measures(&vec![1; n]);
    let mut values = vec![Vec::with_capacity(resamples); plain.len()];
    // Seeds of a few bits start this generator slowly; spreading them does not.
    let mut rng = XorShift::new(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut weights = vec![0u32; n];
    for _ in 0..resamples {
        weights.fill(0);
        for _ in 0..n {
            weights[((u64::from(rng.random_u32()) * n as u64) >> 32) as usize] += 1;
        }
        for (list, value) in values.iter_mut().zip(rows.measures(&weights)) {
            list.push(value);
        }
    }
    let interval = |(mut list, plain): (Vec<f64>, &f64)| {
        list.sort_by(f64::total_cmp);
        match list.is_empty() {
            true => [*plain; 2],
            false => [quantile(&list, 0.025), quantile(&list, 0.975)],
        }
    };
    let intervals = values.into_iter().zip(&plain).map(interval).collect();
    (plain, intervals)
}

/// A quantile of sorted values, between two neighbours in proportion.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = q * (sorted.len() - 1) as f64;
    let low = at.floor() as usize;
    let next = sorted[(low + 1).min(sorted.len() - 1)];
    sorted[low] + (at - low as f64) * (next - sorted[low])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_neighbours() {
        let list = [0.0, 1.0, 2.0, 4.0];
        assert_eq!((quantile(&list, 0.0), quantile(&list, 0.5), quantile(&list, 1.0)), (0.0, 1.5, 4.0));
        assert_eq!(quantile(&[3.0], 0.975), 3.0);
    }
}
