//! Noise by position instead of by sequence, and the stochastic rounding built on it.

use half::bf16;

/// SquirrelNoise5: 32 bits that depend on a position and a seed only.
#[inline]
pub const fn noise1d(position: u32, seed: u32) -> u32 {
    let mut bits = position.wrapping_mul(0xd2a8_0a3f);
    bits = bits.wrapping_add(seed);
    bits ^= bits >> 9;
    bits = bits.wrapping_add(0xa884_f197);
    bits ^= bits >> 11;
    bits = bits.wrapping_mul(0x6c73_6f4b);
    bits ^= bits >> 13;
    bits = bits.wrapping_add(0xb79f_3abb);
    bits ^= bits >> 15;
    bits = bits.wrapping_mul(0x1b56_c4f5);
    bits ^ (bits >> 17)
}

/// [`noise1d`] on a plane: `y` steps by a prime.
#[inline]
pub const fn noise2d(x: u32, y: u32, seed: u32) -> u32 {
    noise1d(x.wrapping_add(y.wrapping_mul(198_491_317)), seed)
}

/// Rounds to bf16 up (away from zero) with a probability equal to the part that is cut off: up when the low 16 bits of `x` exceed the low 16 bits of `noise`.
/// NaN stays NaN and infinities stay what they are.
#[inline]
pub fn stochastic_round_bf16(x: f32, noise: u32) -> bf16 {
    if x.is_nan() {
        return bf16::from_f32(x);
    }
    let bits = x.to_bits();
    let up = (bits & 0xffff) > (noise & 0xffff);
    bf16::from_bits(((bits >> 16) + u32::from(up)) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The specification's words: all low bits set or cleared, then round to nearest.
    fn by_the_letter(x: f32, noise: u32) -> bf16 {
        let bits = x.to_bits();
        let bits = if (bits & 0xffff) > (noise & 0xffff) { bits | 0xffff } else { bits & !0xffff };
        bf16::from_f32(f32::from_bits(bits))
    }

    #[test]
    fn stochastic_rounding_follows_the_letter_of_its_definition() {
        for i in 0..200_000u32 {
            let (x, noise) = (f32::from_bits(noise1d(i, 1)), noise1d(i, 2));
            if x.is_finite() {
                assert_eq!(
                    stochastic_round_bf16(x, noise).to_bits(),
                    by_the_letter(x, noise).to_bits(),
                    "{x:e} {noise:#x}"
                );
            }
        }
    }

    #[test]
    fn stochastic_rounding_is_unbiased() {
        let x = 1.0 + 0.3 / 128.0;
        let n = 20_000;
        let sum: f64 = (0..n).map(|i| f64::from(stochastic_round_bf16(x, noise2d(i, 0, 99)).to_f32())).sum();
        assert!((sum / f64::from(n) - f64::from(x)).abs() < 1e-4, "mean {}", sum / f64::from(n));
    }

    #[test]
    fn what_bf16_can_hold_is_never_changed() {
        for noise in [0, 1, 0xffff, u32::MAX] {
            for x in [0.0f32, -0.0, 1.0, -2.5, f32::INFINITY, f32::NEG_INFINITY] {
                assert_eq!(stochastic_round_bf16(x, noise).to_f32().to_bits(), x.to_bits(), "{x} {noise}");
            }
        }
    }

    #[test]
    fn nan_with_only_low_bits_stays_nan() {
        for bits in [0x7f80_0001u32, 0xff80_ffff, 0x7fff_ffff] {
            assert!(stochastic_round_bf16(f32::from_bits(bits), 0).is_nan(), "{bits:#x}");
        }
    }
}
