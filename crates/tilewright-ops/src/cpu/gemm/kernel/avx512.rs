//! AVX-512: 14 x 32, 28 of the 32 registers as accumulators. Tails of rows have kernels of their own, tails of columns use masks.

use std::arch::x86_64::*;

use super::Micro;

pub(super) const MR: usize = 14;
pub(super) const NR: usize = 32;

/// See [`super::Micro`].
///
/// # Safety
/// The machine has AVX-512, the panels hold `kc` groups and `c` holds `rows x cols` elements; `rows` and `cols` are not 0.
pub(super) unsafe fn micro(
    kc: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    ldc: usize,
    rows: usize,
    cols: usize,
    alpha: f32,
    add: bool,
) {
    // SAFETY: passed on.
    unsafe { BY_ROWS[rows - 1][usize::from(cols > 16)](kc, a, b, c, ldc, rows, cols, alpha, add) }
}

macro_rules! by_rows {
    ($($rows:literal)*) => { [$([tile::<$rows, 1> as Micro, tile::<$rows, 2> as Micro]),*] };
}
static BY_ROWS: [[Micro; 2]; MR] = by_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14);

/// Steps of K between the request for a tile of C and its use.
const AHEAD: usize = 64;

/// Floats of A between the request and the use: 18 steps of 14, some 250 cycles, about the latency of a third cache.
const A_AHEAD: usize = 256;

#[inline(always)]
fn prefetch_for_write(p: *const f32) {
    // SAFETY: a prefetch never faults; every processor with AVX-512 has this one.
    unsafe { std::arch::asm!("prefetchw [{}]", in(reg) p, options(nostack, preserves_flags)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn tile<const R: usize, const V: usize>(
    kc: usize,
    mut a: *const f32,
    mut b: *const f32,
    c: *mut f32,
    ldc: usize,
    _rows: usize,
    cols: usize,
    alpha: f32,
    add: bool,
) {
    // SAFETY: all accesses lie inside the panels and the tile that the caller vouches for; a prefetch never faults.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); V]; R];
        // The tile of C may be far away: ask for it some hundreds of cycles before its use, but not before most of the panels have passed
        // through the first cache.
        let late = kc.min(AHEAD);
        for part in [kc - late, late] {
            for _ in 0..part {
                // A streams from the second cache, or from the third when its block is met first; the panel after this one follows it.
                _mm_prefetch::<_MM_HINT_T0>(a.wrapping_add(A_AHEAD).cast());
                let mut bv = [_mm512_setzero_ps(); V];
                for j in 0..V {
                    bv[j] = _mm512_loadu_ps(b.add(16 * j));
                }
                for i in 0..R {
                    let av = _mm512_set1_ps(*a.add(i));
                    for j in 0..V {
                        acc[i][j] = _mm512_fmadd_ps(av, bv[j], acc[i][j]);
                    }
                }
                a = a.add(MR);
                b = b.add(NR);
            }
            if part + late == kc {
                for i in 0..R {
                    for j in 0..V {
                        prefetch_for_write(c.wrapping_add(i * ldc + 16 * j));
                    }
                }
            }
        }
        let alpha = _mm512_set1_ps(alpha);
        if cols == 16 * V {
            for i in 0..R {
                for j in 0..V {
                    let p = c.add(i * ldc + 16 * j);
                    let v = _mm512_mul_ps(acc[i][j], alpha);
                    _mm512_storeu_ps(p, if add { _mm512_add_ps(_mm512_loadu_ps(p), v) } else { v });
                }
            }
        } else {
            let last = ((1u32 << (cols - 16 * (V - 1))) - 1) as __mmask16;
            for i in 0..R {
                for j in 0..V {
                    let mask = if j + 1 == V { last } else { !0 };
                    let p = c.add(i * ldc + 16 * j);
                    let v = _mm512_mul_ps(acc[i][j], alpha);
                    let v = if add { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, p), v) } else { v };
                    _mm512_mask_storeu_ps(p, mask, v);
                }
            }
        }
    }
}
