//! Both forms and their derivatives in f64.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use super::Gelu;

const CUBIC: f64 = 0.044715;

pub(crate) fn value(kind: Gelu, x: f64) -> f64 {
    match kind {
        Gelu::Tanh => 0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + CUBIC * x * x * x)).tanh()),
        Gelu::Erf => 0.5 * x * (1.0 + erf(x * FRAC_1_SQRT_2)),
    }
}

pub(crate) fn derivative(kind: Gelu, x: f64) -> f64 {
    match kind {
        Gelu::Tanh => {
            let s = (2.0 / PI).sqrt();
            let t = (s * (x + CUBIC * x * x * x)).tanh();
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * s * (1.0 + 3.0 * CUBIC * x * x)
        }
        Gelu::Erf => 0.5 * (1.0 + erf(x * FRAC_1_SQRT_2)) + x * (-0.5 * x * x).exp() / (2.0 * PI).sqrt(),
    }
}

/// `erf` by its series of positive terms, `2 / sqrt(pi) * exp(-x^2) * sum of 2^n x^(2n+1) / (2n+1)!!`, which loses no digits.
pub(crate) fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum(); // 1 - erf(6) is below 1e-16
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    2.0 / PI.sqrt() * (-x * x).exp() * sum
}
