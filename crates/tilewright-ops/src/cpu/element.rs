//! Storage types as Rust types, for kernels that are generic over them.

use tilewright_core::{DType, bf16, f16};

/// A float type that tensors may be stored in. Kernels load to f32, compute, and store with round-to-nearest-even.
pub trait Element: Copy + Send + Sync + Default + 'static {
    /// The dtype.
    const DTYPE: DType;
    /// Exact widening.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(x: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> bf16 {
        // Branch-free so that loops vectorise; a NaN keeps its sign and becomes quiet.
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
        let nan = (bits >> 16) | 0x40;
        bf16::from_bits(if x.is_nan() { nan } else { rounded } as u16)
    }
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        // Branch-free so that loops vectorise: both kinds of numbers are computed and one is taken.
        let bits = u32::from(self.to_bits());
        let magnitude = (bits & 0x7FFF) << 13;
        let exponent = magnitude & (0x1F << 23);
        // Rebias the exponent by 112; infinities and NaN once more, to 255.
        let normal = magnitude + if exponent == 0x1F << 23 { 224 << 23 } else { 112 << 23 };
        // A subnormal m * 2^-24 is the difference of two numbers just above 2^-14.
        let subnormal = f32::from_bits(magnitude + (113 << 23)) - f32::from_bits(113 << 23);
        let magnitude = if exponent == 0 { subnormal.to_bits() } else { normal };
        f32::from_bits(magnitude | (bits & 0x8000) << 16)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f16 {
        let bits = x.to_bits();
        let magnitude = bits & 0x7FFF_FFFF;
        // Rebias, then round the 13 bits that are cut off to nearest even; the carry into the exponent is what it should be.
        let odd = (magnitude >> 13) & 1;
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xFFF + odd) >> 13;
        // Below 2^-14, adding 1/2 leaves the rounded multiple of 2^-24 in the low bits.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let nan = 0x7E00 | (magnitude >> 13 & 0x3FF);
        let half = if magnitude > 0x7F80_0000 {
            nan
        } else if magnitude >= 143 << 23 {
            0x7C00 // 2^16 and more, infinity too
        } else if magnitude < 113 << 23 {
            subnormal
        } else {
            normal
        };
        f16::from_bits((half | (bits >> 16 & 0x8000)) as u16)
    }
}

/// Runs an expression with `$T` bound to the Rust type of a float dtype. The caller has checked that it is a float.
#[allow(unused_macros)]
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            tilewright_core::DType::F32 => {
                type $T = f32;
                $body
            }
            tilewright_core::DType::F16 => {
                type $T = tilewright_core::f16;
                $body
            }
            tilewright_core::DType::BF16 => {
                type $T = tilewright_core::bf16;
                $body
            }
            other => unreachable!("{other} is not a float type; the op's check let it through"),
        }
    };
}
#[allow(unused_imports)]
pub(crate) use with_element;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_like_the_half_crate() {
        let mut x = 0x1234_5678u32;
        for _ in 0..200_000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let f = f32::from_bits(x);
            let (ours, theirs) = (<bf16 as Element>::from_f32(f), bf16::from_f32(f));
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{f:e}");
        }
    }

    #[test]
    fn f16_widens_like_the_half_crate() {
        for bits in 0..=u16::MAX {
            let h = f16::from_bits(bits);
            let (ours, theirs) = (Element::to_f32(h), h.to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{bits:#06x}");
        }
    }

    #[test]
    fn f16_rounds_like_the_half_crate() {
        let same = |f: f32| {
            let (ours, theirs) = (<f16 as Element>::from_f32(f), f16::from_f32_const(f));
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{f:e}");
        };
        // Every boundary between two halves, its neighbours, and random bits.
        for bits in 0..0x7C00u16 {
            let between = (f16::from_bits(bits).to_f32() + f16::from_bits(bits + 1).to_f32()) / 2.0;
            for f in [between.next_down(), between, between.next_up()] {
                same(f);
                same(-f);
            }
        }
        for f in [65_519.996, 65_520.0, 65_536.0, 1e30, f32::INFINITY, 0.0, f32::MIN_POSITIVE, f32::from_bits(1)] {
            same(f);
            same(-f);
        }
        let mut x = 0x1234_5678u32;
        for _ in 0..1_000_000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            same(f32::from_bits(x));
        }
    }

    #[test]
    fn f16_keeps_nan_nan() {
        for bits in [0x7F80_0001u32, 0x7FC0_0000, 0xFFFF_FFFF, 0xFF80_1000] {
            assert!(<f16 as Element>::from_f32(f32::from_bits(bits)).is_nan(), "{bits:#x}");
        }
    }

    #[test]
    fn f16_conversions_round_trip() {
        for bits in 0..=u16::MAX {
            let h = f16::from_bits(bits);
            let back = <f16 as Element>::from_f32(Element::to_f32(h));
            assert!(back.to_bits() == bits || h.is_nan());
        }
    }
}
