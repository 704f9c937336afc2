//! Packing with AVX-512: transposes of 16 x 16 in registers, conversions on the way.

use std::arch::x86_64::*;

use super::{PAD, View, panel_floats};
use crate::cpu::Element;
use tilewright_core::DType;

/// Sixteen elements as f32; lanes outside the mask are zero and are not read.
///
/// # Safety
/// The lanes of the mask are readable elements of `T`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
#[inline]
pub(crate) unsafe fn load<T: Element>(p: *const T, mask: __mmask16) -> __m512 {
    // SAFETY: the caller vouches for the lanes of the mask.
    unsafe {
        match T::DTYPE {
            DType::F32 => _mm512_maskz_loadu_ps(mask, p.cast()),
            DType::BF16 => {
                let bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
            }
            _ => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p.cast())),
        }
    }
}

/// The mask of the first `n` lanes.
pub(crate) const fn lanes(n: usize) -> __mmask16 {
    if n >= 16 { !0 } else { (1 << n) - 1 }
}

/// See [`super::pack`]. `W` is 14 or 32.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
pub(super) unsafe fn pack<T: Element, const W: usize>(view: View, lines: usize, kc: usize, out: *mut f32) {
    // SAFETY: passed on.
    unsafe {
        if view.line_stride == 1 {
            along_lines::<T, W>(view, lines, kc, out);
        } else if view.k_stride == 1 {
            along_k::<T, W>(view, lines, kc, out);
        } else {
            super::plain::<T, W>(view, lines, kc, out);
        }
    }
}

/// Lines lie next to each other: copies.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn along_lines<T: Element, const W: usize>(view: View, lines: usize, kc: usize, out: *mut f32) {
    // Sixteen steps of k over all panels, then the next: each line of the cache is read by both panels that share it while it is near.
    const STEPS: usize = 16;
    let src = view.ptr.cast::<T>();
    for k0 in (0..kc).step_by(STEPS) {
        let k1 = kc.min(k0 + STEPS);
        for (panel, first) in (0..lines).step_by(W).enumerate() {
            let live = W.min(lines - first);
            // SAFETY: reads are masked to `live` lines; a store runs at most `PAD` floats past its row, into the next row of the same panel
            // (written after it) or the padding.
            unsafe {
                let out = out.add(panel * panel_floats(W, kc));
                for k in k0..k1 {
                    let row = src.add(k * view.k_stride + first);
                    for at in (0..W).step_by(16) {
                        let live = live.saturating_sub(at).min(W - at);
                        let v = load(row.wrapping_add(at), lanes(live));
                        _mm512_storeu_ps(out.add(k * W + at), v);
                    }
                }
            }
        }
    }
    const { assert!(PAD >= 16) };
}

/// Steps of k lie next to each other: transposes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn along_k<T: Element, const W: usize>(view: View, lines: usize, kc: usize, out: *mut f32) {
    let src = view.ptr.cast::<T>();
    for (panel, first) in (0..lines).step_by(W).enumerate() {
        let live = W.min(lines - first);
        for at in (0..W).step_by(16) {
            let group = (W - at).min(16);
            let live = live.saturating_sub(at).min(group);
            // SAFETY: reads are masked to lines below `lines` and steps below `kc`; stores as in `along_lines`.
            unsafe {
                let out = out.add(panel * panel_floats(W, kc) + at);
                for k0 in (0..kc).step_by(16) {
                    let steps = (kc - k0).min(16);
                    let mask = lanes(steps);
                    let mut rows = [_mm512_setzero_ps(); 16];
                    if live == 16 && steps == 16 {
                        for (line, row) in rows.iter_mut().enumerate() {
                            *row = load(src.add((first + at + line) * view.line_stride + k0), !0);
                        }
                    } else {
                        for (line, row) in rows.iter_mut().enumerate().take(live) {
                            *row = load(src.add((first + at + line) * view.line_stride + k0), mask);
                        }
                    }
                    let columns = transpose(rows);
                    if steps == 16 {
                        for (k, column) in columns.into_iter().enumerate() {
                            _mm512_storeu_ps(out.add((k0 + k) * W), column);
                        }
                    } else {
                        for (k, column) in columns.into_iter().enumerate().take(steps) {
                            _mm512_storeu_ps(out.add((k0 + k) * W), column);
                        }
                    }
                }
            }
        }
    }
}

/// Lane `j` of register `i` becomes lane `i` of register `j`.
#[target_feature(enable = "avx512f")]
#[inline]
pub(crate) fn transpose(r: [__m512; 16]) -> [__m512; 16] {
    // Pairs of rows, then fours, inside the 128-bit quarters; then the quarters themselves.
    let mut a = r;
    for i in 0..8 {
        a[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    // b[4g + c]: column c of each quarter, rows 4g..4g+4.
    let mut b = a;
    for g in 0..4 {
        // No `map` here: a closure would be compiled without the instruction set, and called.
        let (x0, x1) = (_mm512_castps_pd(a[4 * g]), _mm512_castps_pd(a[4 * g + 1]));
        let (y0, y1) = (_mm512_castps_pd(a[4 * g + 2]), _mm512_castps_pd(a[4 * g + 3]));
        b[4 * g] = _mm512_castpd_ps(_mm512_unpacklo_pd(x0, y0));
        b[4 * g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x0, y0));
        b[4 * g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(x1, y1));
        b[4 * g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(x1, y1));
    }
    let mut out = b;
    for c in 0..4 {
        let lo02 = _mm512_shuffle_f32x4::<0x88>(b[c], b[4 + c]); // quarters 0 and 2 of rows 0..8
        let lo13 = _mm512_shuffle_f32x4::<0xDD>(b[c], b[4 + c]);
        let hi02 = _mm512_shuffle_f32x4::<0x88>(b[8 + c], b[12 + c]);
        let hi13 = _mm512_shuffle_f32x4::<0xDD>(b[8 + c], b[12 + c]);
        out[c] = _mm512_shuffle_f32x4::<0x88>(lo02, hi02);
        out[8 + c] = _mm512_shuffle_f32x4::<0xDD>(lo02, hi02);
        out[4 + c] = _mm512_shuffle_f32x4::<0x88>(lo13, hi13);
        out[12 + c] = _mm512_shuffle_f32x4::<0xDD>(lo13, hi13);
    }
    out
}
