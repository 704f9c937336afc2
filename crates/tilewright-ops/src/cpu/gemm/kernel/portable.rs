//! The tile in plain Rust: multiply and add apart, since a fused one is a library call where the instruction is missing.

pub(super) const MR: usize = 4;
pub(super) const NR: usize = 8;

/// See [`super::Micro`].
///
/// # Safety
/// The panels hold `kc` groups and `c` holds `rows x cols` elements.
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
    // SAFETY: the caller vouches for the panels.
    let (a, b) = unsafe { (std::slice::from_raw_parts(a, kc * MR), std::slice::from_raw_parts(b, kc * NR)) };
    let mut acc = [[0.0f32; NR]; MR];
    for (a, b) in a.chunks_exact(MR).zip(b.chunks_exact(NR)) {
        for i in 0..MR {
            for j in 0..NR {
                acc[i][j] += a[i] * b[j];
            }
        }
    }
    // SAFETY: the caller vouches for `c`.
    unsafe { super::store_partial(acc.as_flattened(), NR, c, ldc, rows, cols, alpha, add) }
}
