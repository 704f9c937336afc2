//! The widening of 16-bit panels with AVX2 and F16C.

use std::arch::x86_64::*;

use tilewright_core::DType;

use crate::cpu::Element;

/// Widens `pairs` pairs of steps of a panel of 16 columns: `[pair][column][2]` becomes `[step][column]`.
///
/// # Safety
/// The block holds the pairs and `out` twice as many steps; the machine has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn widen<T: Element>(mut block: *const f32, pairs: usize, mut out: *mut f32) {
    // The low halves of the four words of each 128-bit part go to its front, the high halves behind them.
    let split = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    for _ in 0..pairs {
        for at in [0, 8] {
            // SAFETY: the caller vouches for both.
            unsafe {
                let v = _mm256_loadu_si256(block.add(at).cast());
                let (low, high) = if T::DTYPE == DType::F16 {
                    let halves = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_shuffle_epi8(v, split));
                    let high = _mm256_extracti128_si256::<1>(halves);
                    (_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(high))
                } else {
                    let high = _mm256_and_si256(v, _mm256_set1_epi32(0xFFFF_0000u32 as i32));
                    (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(v)), _mm256_castsi256_ps(high))
                };
                _mm256_storeu_ps(out.add(at), low);
                _mm256_storeu_ps(out.add(16 + at), high);
            }
        }
        block = block.wrapping_add(16);
        out = out.wrapping_add(32);
    }
}
