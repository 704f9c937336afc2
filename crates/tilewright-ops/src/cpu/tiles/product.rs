//! Small matrix products on packed f32 blocks that lie in the first two cache levels, with a causal triangle or a band cut out at the grain
//! of a register tile: of a block on the edge only what some query sees is multiplied.

use super::simd::{Simd, simd_kernel};

/// The visible part of a block in which row and column positions differ by `offset`: column `j` is visible to row `i` when
/// `j <= i + offset`.
#[derive(Clone, Copy)]
pub(crate) enum Triangle {
    /// Everything.
    Full,
    /// Rows are queries, columns keys: columns beyond a tile's last row are left as they are.
    Columns(isize),
    /// Rows are queries, the summed index keys: later keys hold zeros and are left out.
    KeysUpTo(isize),
    /// Rows are keys, the summed index queries: earlier queries hold zeros and are left out.
    QueriesFrom(isize),
    /// Rows are queries, columns keys, and row `i` sees `i + first ..= i + last`: what no row of a tile sees is left as it is.
    /// The left factor is row-major.
    BandColumns(isize, isize),
    /// Rows are queries, the summed index keys, seen as in `BandColumns`: what no row of a tile sees is left out.
    BandKeys(isize, isize),
}

/// The left factor's layout.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Left {
    /// `a[row * lda + k]`
    RowMajor,
    /// `a[k * lda + row]`
    Transposed,
}

/// `c (m, n) (+)= a (m, k) @ b (k, n)`; `n` is a multiple of the register width.
pub(crate) struct Product {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: *const f32,
    pub(crate) lda: usize,
    pub(crate) left: Left,
    pub(crate) b: *const f32,
    pub(crate) ldb: usize,
    pub(crate) c: *mut f32,
    pub(crate) ldc: usize,
    pub(crate) accumulate: bool,
    pub(crate) triangle: Triangle,
}

/// One register tile: `ROWS x COLUMNS` registers of sums, a row of `b` against single elements of `a`.
#[inline(always)]
unsafe fn tile<S: Simd, const ROWS: usize, const COLUMNS: usize, const TRANSPOSED: bool>(
    p: &Product,
    row: usize,
    column: usize,
    k: std::ops::Range<usize>,
) {
    unsafe {
        let (row_step, k_step) = if TRANSPOSED { (1, p.lda) } else { (p.lda, 1) };
        let mut a = p.a.add(row * row_step + k.start * k_step);
        let mut b = p.b.add(k.start * p.ldb + column);
        let c = p.c.add(row * p.ldc + column);
        let mut sums = [[S::splat(0.0); COLUMNS]; ROWS];
        for _ in k {
            let right: [S; COLUMNS] = std::array::from_fn(|j| S::load(b.add(j * S::LANES)));
            for i in 0..ROWS {
                let left = S::splat(*a.add(i * row_step));
                for j in 0..COLUMNS {
                    sums[i][j] = left.fma(right[j], sums[i][j]);
                }
            }
            a = a.add(k_step);
            b = b.add(p.ldb);
        }
        for i in 0..ROWS {
            for j in 0..COLUMNS {
                let at = c.add(i * p.ldc + j * S::LANES);
                let sum = if p.accumulate { S::load(at).add(sums[i][j]) } else { sums[i][j] };
                sum.store(at);
            }
        }
    }
}

#[inline(always)]
unsafe fn tile_of<S: Simd, const TRANSPOSED: bool>(
    p: &Product,
    (row, rows): (usize, usize),
    (column, columns): (usize, usize),
    k: std::ops::Range<usize>,
) {
    macro_rules! pick {
        ($($r:literal $c:literal),*) => {
            match (rows, columns) {
                $(($r, $c) if $r <= S::TILE_ROWS && $c <= S::TILE_COLUMNS => unsafe {
                    tile::<S, $r, $c, TRANSPOSED>(p, row, column, k)
                },)*
                _ => unreachable!("a tile of {rows} rows and {columns} registers"),
            }
        };
    }
    pick!(
        6 4, 5 4, 4 4, 3 4, 2 4, 1 4, 6 3, 5 3, 4 3, 3 3, 2 3, 1 3, 6 2, 5 2, 4 2, 3 2, 2 2, 1 2, 6 1, 5 1, 4 1, 3 1, 2 1, 1 1
    )
}

/// Part `index` of `parts` nearly equal ones of `registers` registers: no narrow rest, which would wait for its own sums.
#[inline(always)]
fn share(registers: usize, parts: usize, index: usize) -> (usize, usize) {
    (registers * index / parts, registers * (index + 1) / parts)
}

#[inline(always)]
unsafe fn product_body<S: Simd>(p: &Product) {
    debug_assert!(p.n.is_multiple_of(S::LANES));
    if let Triangle::BandColumns(first, last) = p.triangle {
        // SAFETY: the caller's promise.
        return unsafe { band_body::<S>(p, first, last) };
    }
    let clamp = |x: isize, most: usize| x.clamp(0, most as isize) as usize;
    let registers = p.n / S::LANES;
    let panels = registers.div_ceil(S::TILE_COLUMNS);
    for panel in 0..panels {
        let (from, to) = share(registers, panels, panel);
        let column = from * S::LANES;
        for row in (0..p.m).step_by(S::TILE_ROWS) {
            let rows = S::TILE_ROWS.min(p.m - row);
            let (mut end, mut k) = (to * S::LANES, 0..p.k);
            match p.triangle {
                Triangle::Full | Triangle::BandColumns(..) => {}
                Triangle::Columns(offset) => end = clamp((row + rows) as isize + offset, end),
                Triangle::KeysUpTo(offset) => k.end = clamp((row + rows) as isize + offset, p.k),
                Triangle::QueriesFrom(offset) => k.start = clamp(row as isize - offset, p.k),
                Triangle::BandKeys(first, last) => {
                    k = clamp(row as isize + first, p.k)..clamp((row + rows) as isize + last, p.k);
                    if k.is_empty() && p.accumulate {
                        continue;
                    }
                }
            }
            if end <= column {
                continue;
            }
            let columns = (end - column).div_ceil(S::LANES);
            // SAFETY: the caller's promise for the whole product covers each of its tiles.
            unsafe {
                match p.left {
                    Left::RowMajor => tile_of::<S, false>(p, (row, rows), (column, columns), k),
                    Left::Transposed => tile_of::<S, true>(p, (row, rows), (column, columns), k),
                }
            }
        }
    }
}

/// The tiles along a band, row by row: neighbours share nearly all their columns, which stay in the first cache.
#[inline(always)]
unsafe fn band_body<S: Simd>(p: &Product, first: isize, last: isize) {
    let clamp = |x: isize| x.clamp(0, p.n as isize) as usize;
    for row in (0..p.m).step_by(S::TILE_ROWS) {
        let rows = S::TILE_ROWS.min(p.m - row);
        let start = clamp(row as isize + first) / S::LANES;
        let end = clamp((row + rows) as isize + last).div_ceil(S::LANES);
        let registers = end.saturating_sub(start);
        let panels = registers.div_ceil(S::TILE_COLUMNS);
        for panel in 0..panels {
            let (from, to) = share(registers, panels, panel);
            // SAFETY: the caller's promise for the whole product covers each of its tiles.
            unsafe { tile_of::<S, false>(p, (row, rows), ((start + from) * S::LANES, to - from), 0..p.k) }
        }
    }
}

simd_kernel! {
    /// Runs a [`Product`].
    ///
    /// # Safety
    /// The pointers are valid for what the sizes and strides say, and `c` overlaps neither factor.
    pub(crate) unsafe fn product [] (p: &Product) = product_body
}
