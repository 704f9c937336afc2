//! Packing with AVX-512: transposes of 16 x 16 words in registers, conversions on the way.

use std::arch::x86_64::*;

use tilewright_core::DType;

use crate::cpu::Element;
use crate::cpu::gemm::avx512::{lanes, load, transpose};

/// What becomes of the elements of a row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rows {
    F32,
    /// f32 rounded to bf16.
    Rounded,
    /// Pairs of bf16; the machine has AVX512-BF16.
    Pairs,
}

type PackRows = unsafe fn(*const f32, usize, usize, *mut f32);

macro_rules! by_rows {
    ($name:ident: $($rows:literal)*) => { [$($name::<$rows> as PackRows),*] };
}
static PLAIN: [PackRows; 14] = by_rows!(plain_rows: 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
static ROUNDED: [PackRows; 14] = by_rows!(rounded_rows: 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
static PAIRS: [PackRows; 14] = by_rows!(paired_rows: 1 2 3 4 5 6 7 8 9 10 11 12 13 14);

/// See [`super::pack::rows`]; `width` is `rows`.
///
/// # Safety
/// As there.
pub(super) unsafe fn rows(kind: Rows, x: *const f32, stride: usize, rows: usize, kc: usize, out: *mut f32) {
    let table = match kind {
        Rows::F32 => &PLAIN,
        Rows::Rounded => &ROUNDED,
        Rows::Pairs => &PAIRS,
    };
    // SAFETY: passed on.
    unsafe { table[rows - 1](x, stride, kc, out) }
}

macro_rules! row_packer {
    ($name:ident, $features:literal, $steps:literal, |$p:ident, $live:ident| $load:expr) => {
        #[target_feature(enable = $features)]
        unsafe fn $name<const R: usize>(x: *const f32, stride: usize, kc: usize, out: *mut f32) {
            let step_words = $steps / 16;
            for k0 in (0..kc).step_by($steps) {
                let $live = (kc - k0).min($steps);
                let mut words = [_mm512_setzero_ps(); 16];
                // SAFETY: reads are masked to steps below `kc`; a store runs at most `PAD` words past its step, into the next one, which is
                // written after it, or the padding.
                unsafe {
                    for row in 0..R {
                        let $p = x.add(row * stride + k0);
                        words[row] = $load;
                    }
                    let columns = transpose(words);
                    let out = out.add(k0 / step_words * R);
                    if $live == $steps {
                        for (step, column) in columns.into_iter().enumerate() {
                            _mm512_storeu_ps(out.add(step * R), column);
                        }
                    } else {
                        for (step, column) in columns.into_iter().enumerate().take($live.div_ceil(step_words)) {
                            _mm512_storeu_ps(out.add(step * R), column);
                        }
                    }
                }
            }
        }
    };
}

row_packer! {
    plain_rows, "avx512f,avx512bw,avx512dq,avx512vl", 16, |p, live| _mm512_maskz_loadu_ps(lanes(live), p)
}

row_packer! {
    rounded_rows, "avx512f,avx512bw,avx512dq,avx512vl", 16,
    |p, live| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bf16_bits(_mm512_maskz_loadu_ps(lanes(live), p))))
}

row_packer! {
    paired_rows, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16", 32, |p, live| {
        let low = _mm512_maskz_loadu_ps(lanes(live), p);
        let high = _mm512_maskz_loadu_ps(lanes(live.saturating_sub(16)), p.wrapping_add(16));
        as_f32(_mm512_cvtne2ps_pbh(high, low))
    }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn as_f32(v: __m512bh) -> __m512 {
    // SAFETY: both are 64 bytes of plain bits.
    unsafe { std::mem::transmute(v) }
}

/// f32 rounded to the bits of bf16, in the low half of each lane. Equal to `bf16::from_f32`.
#[target_feature(enable = "avx512f")]
#[inline]
fn bf16_bits(v: __m512) -> __m512i {
    let bits = _mm512_castps_si512(v);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
    let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
    _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet))
}

/// Packs one panel of a weight: 32 columns, each from a row of `k` elements of `T` or from nothing, as f32 or as pairs of a 16-bit type `U`.
///
/// # Safety
/// The rows hold `k` elements, `out` the panel, which starts at a multiple of 64 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
pub(super) unsafe fn panel<T: Element, U: Element>(rows: &[Option<*const T>; 32], k: usize, out: *mut f32) {
    let steps = 64 / size_of::<U>();
    for k0 in (0..k).step_by(steps) {
        let live = (k - k0).min(steps);
        for group in 0..2 {
            let rows = &rows[16 * group..16 * group + 16];
            let mut words = [_mm512_setzero_ps(); 16];
            // SAFETY: reads are masked to `live` elements of rows that exist; stores lie inside the panel.
            unsafe {
                for (row, word) in rows.iter().zip(&mut words) {
                    if let Some(row) = row {
                        *word = word16::<T, U>(row.add(k0), live);
                    }
                }
                let columns = transpose(words);
                let out = out.add(k0 * size_of::<U>() / 4 * 32 + 16 * group);
                let words = (live * size_of::<U>()).div_ceil(4);
                for (step, column) in columns.into_iter().enumerate().take(words) {
                    // Past the caches: the memory is read again when all weights have been packed.
                    _mm512_stream_ps(out.add(32 * step), column);
                }
            }
        }
    }
    _mm_sfence();
}

/// Sixteen f32, or thirty-two 16-bit numbers, of which the first `live` are read and the others are zero.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
unsafe fn word16<T: Element, U: Element>(p: *const T, live: usize) -> __m512 {
    // SAFETY: the caller vouches for `live` elements.
    unsafe {
        if U::DTYPE == DType::F32 {
            return load(p, lanes(live));
        }
        if T::DTYPE == U::DTYPE {
            let mask = if live >= 32 { !0 } else { (1u32 << live) - 1 };
            return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, p.cast()));
        }
        let low = half16::<U>(load(p, lanes(live)));
        let high = half16::<U>(load(p.wrapping_add(16), lanes(live.saturating_sub(16))));
        _mm512_castsi512_ps(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high))
    }
}

/// Sixteen f32 rounded to a 16-bit type.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
fn half16<U: Element>(v: __m512) -> __m256i {
    if U::DTYPE == DType::F16 {
        _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v)
    } else {
        _mm512_cvtepi32_epi16(bf16_bits(v))
    }
}

/// Widens `pairs` pairs of steps of a panel of 32 columns: `[pair][column][2]` becomes `[step][column]`.
///
/// # Safety
/// The block holds the pairs and `out` twice as many steps.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
pub(super) unsafe fn widen<T: Element>(mut block: *const f32, pairs: usize, mut out: *mut f32) {
    for _ in 0..pairs {
        for at in [0, 16] {
            // SAFETY: the caller vouches for both.
            unsafe {
                let v = _mm512_castps_si512(_mm512_loadu_ps(block.add(at)));
                let (low, high) = if T::DTYPE == DType::F16 {
                    let low = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v));
                    (low, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(v))))
                } else {
                    let high = _mm512_and_si512(v, _mm512_set1_epi32(0xFFFF_0000u32 as i32));
                    (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(v)), _mm512_castsi512_ps(high))
                };
                _mm512_storeu_ps(out.add(at), low);
                _mm512_storeu_ps(out.add(32 + at), high);
            }
        }
        block = block.wrapping_add(32);
        out = out.wrapping_add(64);
    }
}
