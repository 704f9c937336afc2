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
        f16::to_f32_const(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f16 {
        f16::from_f32_const(x)
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
    fn f16_conversions_round_trip() {
        for bits in 0..=u16::MAX {
            let h = f16::from_bits(bits);
            let back = <f16 as Element>::from_f32(Element::to_f32(h));
            assert!(back.to_bits() == bits || h.is_nan());
        }
    }
}
