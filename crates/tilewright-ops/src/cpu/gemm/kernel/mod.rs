//! Micro-kernels: one `MR x NR` tile of C as a sum of outer products of packed panels, one file an instruction set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use crate::cpu::Isa;

/// Computes `c = alpha * (a @ b)`, or `c += ...`, for one tile of `rows x cols`.
///
/// Arguments: `kc, a, b, c, ldc, rows, cols, alpha, add`. `a` is a packed panel (`kc` groups of `mr` floats), `b` likewise with `nr`. Only
/// `rows x cols` elements of `c` are read or written. Every element is one chain of multiply-adds in the order of `k`, wherever in the tile
/// it lies, so the way a product is cut into tiles does not change its bits.
pub(crate) type Micro = unsafe fn(usize, *const f32, *const f32, *mut f32, usize, usize, usize, f32, bool);

/// A micro-kernel and the shape of its tile.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    pub(crate) isa: Isa,
    pub(crate) mr: usize,
    pub(crate) nr: usize,
    pub(crate) micro: Micro,
}

impl Kernel {
    pub(crate) fn new(isa: Isa) -> Kernel {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Kernel { isa, mr: avx512::MR, nr: avx512::NR, micro: avx512::micro },
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Kernel { isa, mr: avx2::MR, nr: avx2::NR, micro: avx2::micro },
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Kernel { isa, mr: neon::MR, nr: neon::NR, micro: neon::micro },
            _ => Kernel { isa, mr: portable::MR, nr: portable::NR, micro: portable::micro },
        }
    }
}

/// Stores a partial tile from a buffer of row length `nr`. The arithmetic equals that of the full tile.
///
/// # Safety
/// `c` points to `rows` rows of `cols` elements, `ldc` apart.
#[inline(always)]
unsafe fn store_partial(
    tile: &[f32],
    nr: usize,
    c: *mut f32,
    ldc: usize,
    rows: usize,
    cols: usize,
    alpha: f32,
    add: bool,
) {
    for i in 0..rows {
        for j in 0..cols {
            // SAFETY: inside the `rows x cols` that the caller vouches for.
            unsafe {
                let p = c.add(i * ldc + j);
                let v = tile[i * nr + j] * alpha;
                *p = if add { *p + v } else { v };
            }
        }
    }
}
