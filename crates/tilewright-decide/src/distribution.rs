//! Probabilities of the options of a question.

use std::iter::Sum;
use std::ops::AddAssign;

use crate::error::Result;

/// How far a sum may be from 1: the rounding of f32 leaves a tenth of this.
pub const TOLERANCE: f64 = 1e-6;

/// Probabilities in the order of the options. There is no way to build one that is not finite, not within 0..=1 or does not sum to 1.
#[derive(Clone, PartialEq, Debug)]
pub struct Distribution {
    p: Vec<f32>,
}

impl Distribution {
    /// Checks probabilities.
    pub fn new(p: Vec<f32>) -> Result<Self> {
        let in_range = p.iter().all(|x| (0.0..=1.0).contains(x));
        let sum: f64 = p.iter().map(|&x| f64::from(x)).sum();
        if !in_range || (sum - 1.0).abs() > TOLERANCE {
            let what = format!("the model gave {} numbers that are no probabilities (their sum is {sum})", p.len());
            return Err(tilewright_core::Error::config(what, "check the weights for NaN and infinity").into());
        }
        Ok(Distribution { p })
    }

    /// `softmax(logits / temperature)` in f32, put from slots back into the order of the options (trap 13).
    pub fn from_logits(logits: &[f32], temperature: f64, order: Option<&[usize]>) -> Result<Self> {
        let scaled: Vec<f32> = logits.iter().map(|z| z / temperature as f32).collect();
        let p = softmax(&scaled);
        match order {
            None => Distribution::new(p),
            Some(order) => Distribution::new(unslot(&p, order)),
        }
    }

    /// The probabilities, in the order of the options.
    pub fn probabilities(&self) -> &[f32] {
        &self.p
    }

    /// The number of options.
    pub fn len(&self) -> usize {
        self.p.len()
    }

    /// Never: something sums to 1.
    pub fn is_empty(&self) -> bool {
        self.p.is_empty()
    }

    /// The first of the largest, and its probability.
    pub fn largest(&self) -> (usize, f64) {
        let mut best = 0;
        for (i, p) in self.p.iter().enumerate() {
            if *p > self.p[best] {
                best = i;
            }
        }
        (best, f64::from(self.p[best]))
    }

    /// How concentrated it is: 1 - entropy / ln k, within 0..=1; 1 for a single option (trap 19).
    pub fn concentration(&self) -> f64 {
        if self.p.len() < 2 {
            return 1.0;
        }
        let terms: Vec<f32> = self.p.iter().map(|p| p * p.clamp(1e-12, 1.0).ln()).collect();
        let entropy = -f64::from(pairwise_sum(&terms));
        (1.0 - entropy / (self.p.len() as f64).ln()).clamp(0.0, 1.0)
    }

    /// The expected index.
    pub fn mean(&self) -> f64 {
        let terms: Vec<f64> = self.p.iter().enumerate().map(|(i, p)| i as f64 * f64::from(*p)).collect();
        pairwise_sum(&terms)
    }
}

/// Values of slots in the order of the options: slot `s` shows option `order[s]`.
pub(crate) fn unslot(slots: &[f32], order: &[usize]) -> Vec<f32> {
    let mut options = vec![0.0; slots.len()];
    for (value, &option) in slots.iter().zip(order) {
        options[option] = *value;
    }
    options
}

/// `softmax(x)` in f32; not finite if `x` is not.
pub(crate) fn softmax(x: &[f32]) -> Vec<f32> {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut p: Vec<f32> = x.iter().map(|z| (z - max).exp()).collect();
    let sum = pairwise_sum(&p);
    p.iter_mut().for_each(|v| *v /= sum);
    p
}

/// A sum in the order of NumPy's: eight running sums over blocks of at most 128.
fn pairwise_sum<T: Copy + Default + AddAssign + Sum>(x: &[T]) -> T {
    let plain = |x: &[T], mut sum: T| {
        for v in x {
            sum += *v;
        }
        sum
    };
    let n = x.len();
    if n < 8 {
        return plain(x, T::default());
    }
    if n > 128 {
        let half = n / 2 / 8 * 8;
        let mut sum = pairwise_sum(&x[..half]);
        sum += pairwise_sum(&x[half..]);
        return sum;
    }
    let mut r: [T; 8] = x[..8].try_into().expect("eight of them");
    let blocks = x[8..].chunks_exact(8);
    let rest = blocks.remainder();
    for block in blocks {
        for (sum, v) in r.iter_mut().zip(block) {
            *sum += *v;
        }
    }
    let add = |mut a: T, b: T| {
        a += b;
        a
    };
    let sum = add(add(add(r[0], r[1]), add(r[2], r[3])), add(add(r[4], r[5]), add(r[6], r[7])));
    plain(rest, sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_probabilities_make_a_distribution() {
        assert!(Distribution::new(vec![0.25, 0.75]).is_ok());
        for bad in
            [vec![], vec![0.5, 0.4], vec![f32::NAN, 1.0], vec![-0.5, 1.5], vec![f32::INFINITY], vec![0.5, 0.500_01]]
        {
            assert!(Distribution::new(bad.clone()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn logits_that_are_not_finite_are_an_error_and_not_an_answer() {
        for bad in [[f32::NAN, 0.0], [f32::INFINITY, 0.0], [f32::NEG_INFINITY, f32::NEG_INFINITY]] {
            assert!(Distribution::from_logits(&bad, 1.0, None).is_err(), "{bad:?}");
        }
        assert_eq!(Distribution::from_logits(&[-1e30, 1e30], 0.5, None).unwrap().probabilities(), [0.0, 1.0]);
    }

    #[test]
    fn trap_13_probabilities_return_to_the_order_of_the_options() {
        let d = Distribution::from_logits(&[3.0, 1.0, 2.0], 1.0, Some(&[2, 0, 1])).unwrap();
        let p = d.probabilities();
        assert!(p[2] > p[1] && p[1] > p[0]);
        assert_eq!(d.largest().0, 2);
    }

    #[test]
    fn trap_19_a_single_option_is_certain() {
        let d = Distribution::from_logits(&[-7.0], 2.0, None).unwrap();
        assert_eq!((d.largest(), d.concentration()), ((0, 1.0), 1.0));
    }

    #[test]
    fn the_first_of_equal_probabilities_is_the_largest() {
        assert_eq!(Distribution::new(vec![0.2, 0.4, 0.4]).unwrap().largest().0, 1);
    }

    #[test]
    fn sums_of_any_length_are_sums() {
        for n in [0, 1, 7, 8, 9, 100, 128, 129, 255, 1000] {
            let x: Vec<f64> = (0..n).map(f64::from).collect();
            assert_eq!(pairwise_sum(&x), f64::from(n * (n - 1)) / 2.0);
        }
    }
}
