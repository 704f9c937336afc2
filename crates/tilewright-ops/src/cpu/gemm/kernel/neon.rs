//! NEON: 8 x 12, 24 of the 32 registers as accumulators.

use std::arch::aarch64::*;

pub(super) const MR: usize = 8;
pub(super) const NR: usize = 12;

/// See [`super::Micro`].
///
/// # Safety
/// The panels hold `kc` groups and `c` holds `rows x cols` elements.
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
    // SAFETY: every AArch64 machine has NEON; all accesses lie inside the panels and the tile that the caller vouches for.
    unsafe {
        let mut acc = [[vdupq_n_f32(0.0); 3]; MR];
        for _ in 0..kc {
            let bv = [vld1q_f32(b), vld1q_f32(b.add(4)), vld1q_f32(b.add(8))];
            for i in 0..MR {
                let av = vdupq_n_f32(*a.add(i));
                for j in 0..3 {
                    acc[i][j] = vfmaq_f32(acc[i][j], av, bv[j]);
                }
            }
            a = a.add(MR);
            b = b.add(NR);
        }
        if rows == MR && cols == NR {
            let alpha = vdupq_n_f32(alpha);
            for i in 0..MR {
                for j in 0..3 {
                    let p = c.add(i * ldc + 4 * j);
                    let v = vmulq_f32(acc[i][j], alpha);
                    vst1q_f32(p, if add { vaddq_f32(vld1q_f32(p), v) } else { v });
                }
            }
        } else {
            let mut tile = [0.0f32; MR * NR];
            for i in 0..MR {
                for j in 0..3 {
                    vst1q_f32(tile.as_mut_ptr().add(i * NR + 4 * j), acc[i][j]);
                }
            }
            super::store_partial(&tile, NR, c, ldc, rows, cols, alpha, add);
        }
    }
}
