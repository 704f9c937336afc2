//! Transcendental functions as branch-free f32 arithmetic, so that the loops around them vectorise. Plain multiplies and adds: a fused
//! multiply-add would be a library call on machines without the instruction.

/// `e^x`, within 2 units in the last place; 0 below -87.3 (also for -inf), +inf above 88.7, NaN for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Cody and Waite reduction to |r| <= ln(2)/2, then the Cephes polynomial.
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding and subtracting it rounds to an integer
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.3, 88.7);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HI - n * LN2_LO;
    let mut p = 1.987_569_2e-4f32;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5.000_000_3e-1;
    let y = p * r * r + r + 1.0;
    // The low bits of `shifted` are n, which goes straight into the exponent of y: inside the clamp the product is always a normal number.
    let scaled = f32::from_bits(y.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x < -87.3 {
        0.0
    } else if x <= 88.7 {
        scaled
    } else {
        x * f32::INFINITY // +inf, or the NaN
    }
}

/// `1 / (1 + e^-x)` without cancellation on either side.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `erfc(x)`, relative error below 1e-6 for |x| <= 8 (the Chebyshev fit of Numerical Recipes, 6.2).
#[inline(always)]
#[allow(clippy::excessive_precision)] // the coefficients as published
pub(crate) fn erfc(x: f32) -> f32 {
    let z = x.abs();
    let t = 1.0 / (1.0 + 0.5 * z);
    let mut p = 0.170_872_77f32;
    p = p * t - 0.822_152_23;
    p = p * t + 1.488_515_87;
    p = p * t - 1.135_203_98;
    p = p * t + 0.278_868_07;
    p = p * t - 0.186_288_06;
    p = p * t + 0.096_784_18;
    p = p * t + 0.374_091_96;
    p = p * t + 1.000_023_68;
    let tail = t * exp(p * t - 1.265_512_23 - z * z);
    if x >= 0.0 { tail } else { 2.0 - tail }
}

const GELU_SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)
const GELU_CUBIC: f32 = 0.044_715;

/// GELU in the tanh form. `0.5 (1 + tanh u)` is `sigmoid(2u)`, which loses no digits in the negative tail.
#[inline(always)]
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    let u = GELU_SCALE * (x + GELU_CUBIC * x * x * x);
    x / (1.0 + exp(-2.0 * u))
}

/// Derivative of [`gelu_tanh`].
#[inline(always)]
pub(crate) fn gelu_tanh_grad(x: f32) -> f32 {
    let x = x.clamp(-12.0, 12.0); // beyond, the derivative is 0 or 1 to the last bit and x^3 could overflow
    let u = GELU_SCALE * (x + GELU_CUBIC * x * x * x);
    let s = sigmoid(2.0 * u);
    // 1 - tanh(u)^2 = 4 s (1 - s)
    s + x * 2.0 * s * (1.0 - s) * GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * x * x)
}

/// Exact GELU.
#[inline(always)]
pub(crate) fn gelu_erf(x: f32) -> f32 {
    0.5 * x * erfc(-x * std::f32::consts::FRAC_1_SQRT_2)
}

/// Derivative of [`gelu_erf`].
#[inline(always)]
pub(crate) fn gelu_erf_grad(x: f32) -> f32 {
    const INV_SQRT_2PI: f32 = 0.398_942_3;
    let x = x.clamp(-40.0, 40.0);
    0.5 * erfc(-x * std::f32::consts::FRAC_1_SQRT_2) + x * exp(-0.5 * x * x) * INV_SQRT_2PI
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulps_over_the_whole_range() {
        let mut x = -87.0f32;
        while x < 88.6 {
            let (got, want) = (exp(x), f64::from(x).exp() as f32);
            let ulps = (i64::from(got.to_bits()) - i64::from(want.to_bits())).abs();
            assert!(ulps <= 2, "exp({x}) = {got}, want {want}, {ulps} ulps");
            x += 0.001_37;
        }
    }

    #[test]
    fn exp_at_the_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e4), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(100.0), f32::INFINITY);
        for bits in [0x7FC0_0000u32, 0x7F80_0001, 0xFFC0_0000, 0xFFFF_FFFF] {
            assert!(exp(f32::from_bits(bits)).is_nan(), "{bits:#x}");
        }
    }

    #[test]
    fn exp_is_a_normal_number_up_to_both_ends_of_its_range() {
        for x in [-87.3f32, (-87.3f32).next_up(), 88.7f32.next_down(), 88.7] {
            let want = f64::from(x).exp() as f32;
            assert!(want.is_normal() && (exp(x) / want - 1.0).abs() < 3e-7, "exp({x}) = {:e}, want {want:e}", exp(x));
        }
        assert_eq!((exp((-87.3f32).next_down()), exp(88.7f32.next_up())), (0.0, f32::INFINITY));
    }

    #[test]
    fn exp_never_falls_as_its_argument_grows() {
        // One unit in the last place is allowed where the reduction changes its multiple of ln(2).
        let mut last = 0.0f32;
        for i in 0..1_760_000 {
            let y = exp(-87.0 + i as f32 * 1e-4);
            assert!(y >= last * (1.0 - 1.2e-7), "at step {i}: {y:e} after {last:e}");
            last = y;
        }
    }

    #[test]
    fn erfc_at_known_points() {
        // Values of erfc to 10 digits, from tables.
        for (x, want) in [
            (0.0, 1.0),
            (0.5, 0.479_500_122_2),
            (1.0, 0.157_299_207_1),
            (2.0, 0.004_677_734_98),
            (3.0, 2.209_049_699_9e-5),
            (-1.0, 1.842_700_792_9),
        ] {
            let got = f64::from(erfc(x));
            assert!((got - want).abs() <= 2e-6 * want, "erfc({x}) = {got}, want {want}");
        }
    }

    #[test]
    fn gelu_derivatives_match_differences_of_the_functions() {
        for (f, g) in [(gelu_tanh as fn(f32) -> f32, gelu_tanh_grad as fn(f32) -> f32), (gelu_erf, gelu_erf_grad)] {
            let mut x = -6.0f32;
            while x < 6.0 {
                let h = 1e-2;
                let difference = (f(x + h) - f(x - h)) / (2.0 * h);
                assert!((difference - g(x)).abs() < 1e-4, "at {x}: {difference} against {}", g(x));
                x += 0.05;
            }
        }
    }

    #[test]
    fn gelu_far_out_is_finite() {
        for x in [1e4f32, 1e18, 1e38] {
            assert_eq!(gelu_tanh(x), x);
            assert_eq!(gelu_tanh(-x), 0.0);
            assert_eq!((gelu_tanh_grad(x), gelu_tanh_grad(-x)), (1.0, 0.0));
            assert_eq!((gelu_erf(x), gelu_erf(-x)), (x, 0.0));
            assert_eq!((gelu_erf_grad(x), gelu_erf_grad(-x)), (1.0, 0.0));
        }
    }
}
