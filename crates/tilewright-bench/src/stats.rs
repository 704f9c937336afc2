//! The statistics of paired measurements, written to be read.
//!
//! A pair `i` is one time of the baseline `A` and one of the arm `B`, taken right after each other on the same input.
//!
//! ```text
//! x_i     = ln(A_i / B_i)                     above 0: the arm was faster
//! ratio   = exp(median x)                     "the arm is `ratio` times as fast"
//! ci95    = percentile bootstrap of median x  (2.5 % and 97.5 % of 2,000 resampled medians), widened for few blocks
//! SE      = standard deviation of the resampled medians, widened alike
//! MDE     = exp(2.8 SE) - 1                   the least effect that a session of this size would see 4 times in 5
//! IQR     = quartiles of A_i / B_i            how single pairs spread
//! ```
//!
//! All of it works on logarithms, so that comparing B with A gives the exact mirror image of comparing A with B.
//!
//! **Resemblance** of neighbouring pairs is measured by the lag-1 autocorrelation of the *ranks* of x: a single burst of another program makes
//! one x so large that the plain autocorrelation no longer sees anything else, and the median asks for ranks only.
//!
//! **Blocks.** Where neighbours resemble each other (above 0.2, or the mean over lags 1 to 8 stands two standard errors above 0), n pairs hold less
//! than n pairs' worth of knowledge, and resampling single pairs gives too narrow an interval. Then runs of 10 neighbours are drawn together, and
//! of 25 where even lags 5 to 12 resemble; never more than n / 4.
//!
//! **Widening**, both factors applied to the distance of either end from the median, and to SE:
//!
//! - few blocks: m = n / block pieces tell their own spread badly, as m values do for a normal mean, and Student's t has the remedy:
//!   t(0.975, m-1) / 1.96 * sqrt(m / (m-1)); 1.03 for 60 single pairs, 1.4 for six blocks;
//! - what blocks cut off: with r the rank autocorrelation, corrected for its bias of -(1 + 3r)/n, single pairs miss a variance of (1 + r)/(1 - r), and
//!   blocks of b the part that reaches from one block into the next, 2r / (b (1 - r^2)).
//!
//! `LOG.md` has the measured coverage which asked for each of these, and the slow wandering of one arm that no rule on 60 pairs can see.

use serde::{Deserialize, Serialize};

use crate::rng::SplitMix;

/// Resamples of every bootstrap.
pub const RESAMPLES: usize = 2000;
/// Pairs of a confirmation, at least.
pub const LEAST_CONFIRM: usize = 60;
/// Neighbours that resemble each other more than this are drawn in blocks.
pub const MAX_LAG1: f64 = 0.2;
/// `z(0.975) + z(0.8)`: an effect of so many standard errors is found 4 times in 5.
pub const MDE_FACTOR: f64 = 2.8;

/// Median, quartiles and extremes of one arm's samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Samples.
    pub n: usize,
    /// The middle one.
    pub median: f64,
    /// A quarter lies below.
    pub q1: f64,
    /// A quarter lies above.
    pub q3: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
}

/// What the pairs say about the ratio of two arms.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Paired {
    /// Pairs.
    pub n: usize,
    /// Median of baseline / arm: above 1 the arm needs less.
    pub ratio: f64,
    /// The 95 % interval of that median.
    pub ci95: [f64; 2],
    /// Quartiles of the single pairs' ratios.
    pub iqr: [f64; 2],
    /// Standard error of the logarithm of the median ratio.
    pub se: f64,
    /// Least detectable effect as a fraction: 0.01 is one per cent.
    pub mde: f64,
    /// Lag-1 autocorrelation of their ranks.
    pub lag1: f64,
    /// Pairs that were resampled together; 1 is one by one.
    pub block: usize,
}

/// A quantile of sorted values, linear between neighbours.
pub fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = q * (sorted.len() - 1) as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * (at - low as f64)
}

/// The middle of the values; the mean of the two middle ones of an even number.
pub fn median(values: &[f64]) -> f64 {
    quantile(&sorted(values), 0.5)
}

/// Median, quartiles and extremes; `None` of nothing.
pub fn spread(values: &[f64]) -> Option<Spread> {
    let sorted = sorted(values);
    let (min, max) = (*sorted.first()?, *sorted.last()?);
    let [q1, median, q3] = [0.25, 0.5, 0.75].map(|q| quantile(&sorted, q));
    Some(Spread { n: sorted.len(), median, q1, q3, min, max })
}

/// Correlation of each value with the one `lag` places before; 0 where it is not defined.
pub fn autocorrelation(values: &[f64], lag: usize) -> f64 {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let total: f64 = values.iter().map(|v| (v - mean) * (v - mean)).sum();
    if values.len() < lag + 2 || total <= 0.0 {
        return 0.0;
    }
    values.iter().zip(&values[lag..]).map(|(a, b)| (a - mean) * (b - mean)).sum::<f64>() / total
}

/// The place of each value among all, from 0; equal values share the mean of theirs.
pub fn ranks(values: &[f64]) -> Vec<f64> {
    let mut by_value: Vec<usize> = (0..values.len()).collect();
    by_value.sort_by(|&i, &j| values[i].total_cmp(&values[j]));
    let mut ranks = vec![0.0; values.len()];
    let mut from = 0;
    while from < by_value.len() {
        let same = by_value[from..].iter().take_while(|&&i| values[i] == values[by_value[from]]).count();
        for &i in &by_value[from..from + same] {
            ranks[i] = from as f64 + (same - 1) as f64 / 2.0;
        }
        from += same;
    }
    ranks
}

/// Pairs drawn together, from the ranks; see the head of this file.
fn block_length(ranks: &[f64]) -> usize {
    let n = ranks.len();
    if n < 20 {
        return 1;
    }
    let two_errors = 2.0 / (8.0 * n as f64).sqrt();
    let mean_from = |lag: usize| (lag..lag + 8).map(|k| autocorrelation(ranks, k)).sum::<f64>() / 8.0;
    let wanted = if mean_from(5) > two_errors {
        25
    } else if autocorrelation(ranks, 1) > MAX_LAG1 || mean_from(1) > two_errors {
        10
    } else {
        1
    };
    wanted.min(n / 4)
}

/// The statistics of one comparison; `None` for fewer than two pairs or a time that is not positive.
pub fn paired(baseline: &[f64], arm: &[f64], seed: u64) -> Option<Paired> {
    let logs: Vec<f64> = baseline.iter().zip(arm).map(|(a, b)| (a / b).ln()).collect();
    if logs.len() < 2 || baseline.len() != arm.len() || logs.iter().any(|x| !x.is_finite()) {
        return None;
    }
    let n = logs.len();
    let ranks = ranks(&logs);
    let lag1 = autocorrelation(&ranks, 1);
    let block = block_length(&ranks);
    let middle = median(&logs);
    let medians = resampled_medians(&logs, block, seed);
    let widening = few_blocks(n as f64 / block as f64) * cut_off(lag1, n, block);
    let end = |q: f64| (middle + (quantile(&medians, q) - middle) * widening).exp();
    let mean = medians.iter().sum::<f64>() / medians.len() as f64;
    let variance = medians.iter().map(|m| (m - mean) * (m - mean)).sum::<f64>() / medians.len() as f64;
    let se = variance.sqrt() * widening;
    let order = sorted(&logs);
    Some(Paired {
        n,
        ratio: middle.exp(),
        ci95: [end(0.025), end(0.975)],
        iqr: [quantile(&order, 0.25).exp(), quantile(&order, 0.75).exp()],
        se,
        mde: (MDE_FACTOR * se).exp() - 1.0,
        lag1,
        block,
    })
}

/// Medians of [`RESAMPLES`] resamples, sorted. Blocks wrap around the end, so that every pair is drawn equally often.
fn resampled_medians(values: &[f64], block: usize, seed: u64) -> Vec<f64> {
    let n = values.len();
    let sorted = sorted(values);
    // A resample is a count for each rank; its median is found by walking up the counts, with no sorting.
    let mut by_value: Vec<usize> = (0..n).collect();
    by_value.sort_by(|&i, &j| values[i].total_cmp(&values[j]));
    let mut rank = vec![0; n];
    by_value.iter().enumerate().for_each(|(r, &i)| rank[i] = r);

    let mut rng = SplitMix::for_purpose(seed, "bootstrap");
    let mut counts = vec![0usize; n];
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            counts.fill(0);
            let mut drawn = 0;
            while drawn < n {
                let start = rng.below(n);
                for j in 0..block.min(n - drawn) {
                    counts[rank[(start + j) % n]] += 1;
                }
                drawn += block;
            }
            let at = |k: usize| {
                let mut seen = 0;
                let r = counts.iter().position(|c| {
                    seen += c;
                    seen > k
                });
                sorted[r.unwrap_or(n - 1)]
            };
            (at((n - 1) / 2) + at(n / 2)) / 2.0
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    medians
}

/// The factor for few blocks; see the head of this file.
fn few_blocks(blocks: f64) -> f64 {
    let freedom = (blocks - 1.0).max(1.0);
    // Cornish-Fisher expansion of Student's t around the normal quantile, within 1 % from 3 degrees of freedom on.
    let z: f64 = 1.959964;
    let (z3, z5) = (z.powi(3), z.powi(5));
    let t = z + (z3 + z) / (4.0 * freedom) + (5.0 * z5 + 16.0 * z3 + 3.0 * z) / (96.0 * freedom * freedom);
    t / z * (blocks / freedom).sqrt()
}

/// The factor for resemblance that blocks cut off; see the head of this file.
fn cut_off(lag1: f64, n: usize, block: usize) -> f64 {
    let r = (lag1 + (1.0 + 3.0 * lag1) / n as f64).clamp(0.0, 0.9);
    if block == 1 {
        ((1.0 + r) / (1.0 - r)).sqrt()
    } else {
        // More than half of the variance cut off would be a guess, not a correction.
        1.0 / (1.0 - (2.0 * r / (block as f64 * (1.0 - r * r))).min(0.5)).sqrt()
    }
}

/// Pairs that find an effect of `effect` (0.03 is 3 %) nine times in ten, judged by the standard error of a pilot.
///
/// A verdict needs |ln ratio| above 2.8 SE, so that nine in ten asks for an effect of (2.8 + 1.28) SE. SE falls with the root of n and is known only
/// to within 15 to 25 % in the pilot and again in the session, hence the factor of 1.3. Never below `least`; below some 50
/// pairs the block rule, when it takes chance for resemblance, costs more than this can foresee, so that callers give [`LEAST_CONFIRM`].
pub fn recommended_pairs(pilot: &Paired, effect: f64, least: usize) -> usize {
    let wanted = (1.0 + effect).ln() / ((MDE_FACTOR + 1.28) * 1.3);
    let n = pilot.n as f64 * (pilot.se / wanted).powi(2);
    (n.ceil() as usize).max(least).next_multiple_of(2)
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noisy(n: usize, shift: f64, seed: u64) -> (Vec<f64>, Vec<f64>) {
        let mut rng = SplitMix::new(seed);
        let mut series = |shift: f64| (0..n).map(|_| (shift + 0.01 * rng.normal()).exp()).collect::<Vec<_>>();
        (series(shift), series(0.0))
    }

    #[test]
    fn quantiles_are_linear_between_neighbours() {
        let sorted = [1.0, 2.0, 4.0, 8.0];
        assert_eq!([0.0, 0.5, 1.0].map(|q| quantile(&sorted, q)), [1.0, 3.0, 8.0]);
        assert_eq!(quantile(&sorted, 0.25), 1.75);
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
    }

    #[test]
    fn the_spread_of_nothing_is_none() {
        assert_eq!(spread(&[]), None);
        let one = spread(&[7.0]).unwrap();
        assert_eq!((one.n, one.median, one.q1, one.q3, one.min, one.max), (1, 7.0, 7.0, 7.0, 7.0, 7.0));
    }

    #[test]
    fn ranks_share_ties() {
        assert_eq!(ranks(&[5.0, 1.0, 5.0, 9.0]), [1.5, 0.0, 1.5, 3.0]);
    }

    #[test]
    fn autocorrelation_of_a_ramp_is_high_and_of_a_zigzag_negative() {
        let ramp: Vec<f64> = (0..50).map(f64::from).collect();
        let zigzag: Vec<f64> = (0..50).map(|i| f64::from(i % 2)).collect();
        assert!(autocorrelation(&ramp, 1) > 0.9);
        assert!(autocorrelation(&zigzag, 1) < -0.9);
        assert_eq!(autocorrelation(&[1.0; 50], 1), 0.0);
    }

    #[test]
    fn one_burst_does_not_hide_that_neighbours_resemble_each_other() {
        let mut logs: Vec<f64> = (0..60).map(|i| (f64::from(i) / 6.0).sin()).collect();
        logs[20] = 500.0;
        assert!(autocorrelation(&logs, 1) < MAX_LAG1);
        assert!(autocorrelation(&ranks(&logs), 1) > 0.7);
    }

    #[test]
    fn swapping_the_arms_mirrors_everything() {
        let (a, b) = noisy(60, 0.02, 1);
        let (there, back) = (paired(&a, &b, 9).unwrap(), paired(&b, &a, 9).unwrap());
        assert!((there.ratio * back.ratio - 1.0).abs() < 1e-12);
        assert!((there.se - back.se).abs() < 0.1 * there.se);
        assert!((there.ci95[0] * back.ci95[1] - 1.0).abs() < 0.002);
    }

    #[test]
    fn the_same_seed_gives_the_same_bits_and_another_one_almost() {
        let (a, b) = noisy(60, 0.02, 1);
        assert_eq!(paired(&a, &b, 9), paired(&a, &b, 9));
        let (x, y) = (paired(&a, &b, 9).unwrap(), paired(&a, &b, 10).unwrap());
        assert_ne!(x.ci95, y.ci95);
        assert!((x.ci95[0] - y.ci95[0]).abs() < 0.002);
    }

    #[test]
    fn mde_is_2_8_standard_errors_and_the_quartiles_enclose_the_ratio() {
        let (a, b) = noisy(61, 0.02, 3);
        let p = paired(&a, &b, 9).unwrap();
        assert!(((1.0 + p.mde).ln() - 2.8 * p.se).abs() < 1e-12);
        assert!(p.iqr[0] < p.ratio && p.ratio < p.iqr[1]);
        let single: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a / b).collect();
        assert!((p.ratio - median(&single)).abs() < 1e-12, "the median of an odd number is a member");
    }

    #[test]
    fn constant_times_give_a_point_and_no_error() {
        let p = paired(&[2.0; 30], &[1.0; 30], 1).unwrap();
        assert!((p.ratio - 2.0).abs() < 1e-12 && p.ci95[0] == p.ci95[1] && p.mde < 1e-9, "{p:?}");
    }

    #[test]
    fn impossible_times_have_no_statistics() {
        assert_eq!(paired(&[1.0], &[1.0], 1), None);
        assert_eq!(paired(&[1.0, 0.0], &[1.0, 1.0], 1), None);
        assert_eq!(paired(&[1.0, -1.0], &[1.0, 1.0], 1), None);
        assert_eq!(paired(&[1.0, f64::NAN], &[1.0, 1.0], 1), None);
        assert_eq!(paired(&[1.0, 1.0, 1.0], &[1.0, 1.0], 1), None);
    }

    #[test]
    fn blocks_widen_the_interval_of_pairs_that_resemble_their_neighbours() {
        let logs: Vec<f64> = (0..120).map(|i| 0.05 * (f64::from(i) / 5.0).sin()).collect();
        let a: Vec<f64> = logs.iter().map(|x| x.exp()).collect();
        let p = paired(&a, &vec![1.0; 120], 1).unwrap();
        assert!(p.lag1 > 0.9 && p.block >= 10);
        let mut shuffled = a.clone();
        SplitMix::new(4).shuffle(&mut shuffled);
        let q = paired(&shuffled, &vec![1.0; 120], 1).unwrap();
        assert!(q.block == 1 && p.se > 1.3 * q.se, "{} {}", p.se, q.se);
    }

    #[test]
    fn student_s_factor_matches_the_tables() {
        // t(0.975) of 5 and 59 degrees of freedom: 2.5706 and 2.0010.
        for (blocks, t) in [(6.0f64, 2.5706), (60.0, 2.0010)] {
            let want = t / 1.959964 * (blocks / (blocks - 1.0)).sqrt();
            assert!((few_blocks(blocks) / want - 1.0).abs() < 0.01, "{blocks}");
        }
    }

    #[test]
    fn a_noisier_pilot_asks_for_more_pairs() {
        let (a, b) = noisy(30, 0.0, 3);
        let pilot = paired(&a, &b, 9).unwrap();
        let few = recommended_pairs(&pilot, 0.03, 8);
        let many = recommended_pairs(&Paired { se: pilot.se * 4.0, ..pilot }, 0.03, 8);
        assert!(many > 8 * few.min(20) && many.is_multiple_of(2), "{few} {many}");
        assert_eq!(recommended_pairs(&Paired { se: 0.0, ..pilot }, 0.03, 20), 20);
    }
}
