//! The Box-Muller transform in the single-precision steps of llm.c and PyTorch.
//!
//! Logarithm, cosine and sine are the platform's: with glibc every value has llm.c's bits; another C library may differ in the last one.

use std::f64::consts::TAU;

/// The two normal deviates of uniforms `u1` in `(0, 1]` (the radius) and `u2` in `[0, 1)` (the angle).
#[inline]
pub(super) fn pair(u1: f32, u2: f32) -> (f32, f32) {
    let radius = (-2.0 * u1.ln()).sqrt();
    let angle = (TAU * f64::from(u2)) as f32;
    let (sin, cos) = angle.sin_cos();
    (radius * cos, radius * sin)
}

/// Turns 16 uniforms into 16 normals, in place: value `j` gives the radius and value `j + 8` the angle of a pair.
#[inline]
pub(super) fn block_of_16(block: &mut [f32; 16], mean: f32, std: f32) {
    for j in 0..8 {
        let u1 = (f64::from(1.0 - block[j]) + 1e-12) as f32;
        let (a, b) = pair(u1, block[j + 8]);
        block[j] = a * std + mean;
        block[j + 8] = b * std + mean;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extreme_uniforms_stay_finite() {
        for extreme in [0.0, 1.0 - 1.0 / 16_777_216.0] {
            let mut block = [extreme; 16];
            block_of_16(&mut block, 0.0, 1.0);
            assert!(block.iter().all(|x| x.is_finite() && x.abs() < 6.0), "{block:?}");
        }
    }

    #[test]
    fn a_pair_lies_on_the_circle_of_its_radius() {
        for i in 1..1000 {
            let u1 = i as f32 / 1000.0;
            let (a, b) = pair(u1, (i * 7 % 1000) as f32 / 1000.0);
            assert!((a.hypot(b) - (-2.0 * u1.ln()).sqrt()).abs() < 1e-5, "u1 {u1}");
        }
    }
}
