//! AVX2 and FMA: 6 x 16, 12 of the 16 registers as accumulators.

use std::arch::x86_64::*;

pub(super) const MR: usize = 6;
pub(super) const NR: usize = 16;

/// See [`super::Micro`].
///
/// # Safety
/// The machine has AVX2 and FMA, the panels hold `kc` groups and `c` holds `rows x cols` elements.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn micro(
    kc: usize,
    mut a: *const f32,
    mut b: *const f32,
    c: *mut f32,
    ldc: usize,
    rows: usize,
    cols: usize,
    alpha: f32,
    add: bool,
) {
    // SAFETY: all accesses lie inside the panels and the tile that the caller vouches for.
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); 2]; MR];
        for _ in 0..kc {
            let bv = [_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(8))];
            for i in 0..MR {
                let av = _mm256_broadcast_ss(&*a.add(i));
                for j in 0..2 {
                    acc[i][j] = _mm256_fmadd_ps(av, bv[j], acc[i][j]);
                }
            }
            a = a.add(MR);
            b = b.add(NR);
        }
        if rows == MR && cols == NR {
            let alpha = _mm256_set1_ps(alpha);
            for i in 0..MR {
                for j in 0..2 {
                    let p = c.add(i * ldc + 8 * j);
                    let v = _mm256_mul_ps(acc[i][j], alpha);
                    _mm256_storeu_ps(p, if add { _mm256_add_ps(_mm256_loadu_ps(p), v) } else { v });
                }
            }
        } else {
            let mut tile = [0.0f32; MR * NR];
            for i in 0..MR {
                for j in 0..2 {
                    _mm256_storeu_ps(tile.as_mut_ptr().add(i * NR + 8 * j), acc[i][j]);
                }
            }
            super::store_partial(&tile, NR, c, ldc, rows, cols, alpha, add);
        }
    }
}
