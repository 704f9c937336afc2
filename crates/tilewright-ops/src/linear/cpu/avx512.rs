//! AVX-512 tiles: up to 14 rows x 32 columns, 28 of the 32 registers as accumulators.

use std::arch::x86_64::*;

use super::kernel::Ahead;

type Multiply = unsafe fn(usize, *const u8, *const u8, *mut f32, bool, *const u8, usize);

macro_rules! by_rows {
    ($tile:ident: $($rows:literal)*) => { [$([$tile::<$rows, 1> as Multiply, $tile::<$rows, 2> as Multiply]),*] };
}
static F32: [[Multiply; 2]; 14] = by_rows!(tile: 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
static PAIRS: [[Multiply; 2]; 14] = by_rows!(pairs: 1 2 3 4 5 6 7 8 9 10 11 12 13 14);

/// See [`super::kernel::Engine::multiply`]; rows lie tight.
///
/// # Safety
/// As there, and the machine has AVX-512.
pub(super) unsafe fn multiply(
    words: usize,
    a: *const u8,
    b: *const u8,
    sums: *mut f32,
    rows: usize,
    add: bool,
    ahead: Ahead,
) {
    let (ptr, stride) = (ahead.ptr, ahead.bytes.div_ceil(words.max(1)).min(128));
    // SAFETY: passed on.
    unsafe { F32[rows - 1][usize::from(stride > 64)](words, a, b, sums, add, ptr, stride) }
}

/// The same for pairs of bf16.
///
/// # Safety
/// As there, and the machine has AVX512-BF16.
pub(super) unsafe fn multiply_pairs(
    words: usize,
    a: *const u8,
    b: *const u8,
    sums: *mut f32,
    rows: usize,
    add: bool,
    ahead: Ahead,
) {
    let (ptr, stride) = (ahead.ptr, ahead.bytes.div_ceil(words.max(1)).min(128));
    // SAFETY: passed on.
    unsafe { PAIRS[rows - 1][usize::from(stride > 64)](words, a, b, sums, add, ptr, stride) }
}

/// Steps between the request for a line of rows and its use.
const ROWS_AHEAD: usize = 24;

macro_rules! tile_kernel {
    ($(#[$doc:meta])* $name:ident, $features:literal, $word:ty, |$acc:ident, $av:ident, $bv:ident| $step:expr) => {
        $(#[$doc])*
        #[target_feature(enable = $features)]
        unsafe fn $name<const R: usize, const LINES: usize>(
            words: usize,
            a: *const u8,
            b: *const u8,
            sums: *mut f32,
            add: bool,
            mut ahead: *const u8,
            stride: usize,
        ) {
            // SAFETY: all accesses lie inside the panels and the tile that the caller vouches for; a prefetch never faults.
            unsafe {
                let (mut a, mut b) = (a.cast::<$word>(), b.cast::<f32>());
                let mut acc = [[_mm512_setzero_ps(); 2]; R];
                for _ in 0..words {
                    _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                    if LINES == 2 {
                        _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(64).cast());
                    }
                    ahead = ahead.wrapping_add(stride);
                    if R > 4 {
                        _mm_prefetch::<_MM_HINT_T0>(a.wrapping_add(ROWS_AHEAD * R).cast());
                    }
                    let columns = [_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(16))];
                    for i in 0..R {
                        let $av = *a.add(i);
                        for j in 0..2 {
                            let ($acc, $bv) = (acc[i][j], columns[j]);
                            acc[i][j] = $step;
                        }
                    }
                    a = a.add(R);
                    b = b.add(32);
                }
                for i in 0..R {
                    for j in 0..2 {
                        let p = sums.add(32 * i + 16 * j);
                        let v = if add { _mm512_add_ps(_mm512_loadu_ps(p), acc[i][j]) } else { acc[i][j] };
                        _mm512_storeu_ps(p, v);
                    }
                }
            }
        }
    };
}

tile_kernel! {
    tile, "avx512f,avx512bw,avx512dq,avx512vl", f32,
    |acc, av, bv| _mm512_fmadd_ps(_mm512_set1_ps(av), bv, acc)
}

tile_kernel! {
    pairs, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16", i32,
    |acc, av, bv| _mm512_dpbf16_ps(acc, as_bf16(_mm512_set1_epi32(av)), as_bf16(_mm512_castps_si512(bv)))
}

#[target_feature(enable = "avx512f")]
#[inline]
fn as_bf16(v: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes of plain bits.
    unsafe { std::mem::transmute(v) }
}
