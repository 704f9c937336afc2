//! Attention on the matrix units, for factors of 16 bits: what its kernels share, and the forward pass.
//!
//! Each plane of a group owns a tile's rows (queries, or keys where gradients of keys are summed) as fragments, and meets tiles of the other side that
//! lie in shared memory. A strip of scores, eight columns a unit, passes through shared memory: sums live in fragments, whose places the
//! interface does not tell. The forward pass looks for the largest score of each row first, then adds up exponentials, so that no sum is
//! ever scaled.
//!
//! The units multiply what a row does not see by zero, and that is no number where an element is none. So each unit looks at what it wrote, and
//! computes a row that has something else than numbers again, from what the row sees alone.

use tilewright_core::{DType, Result};

use super::super::cpu::Sizes;
use crate::Tensor;
use crate::matmul::gpu::matrix::{native, words};
use crate::matmul::gpu::shape;
use crate::matmul::gpu::slices::{fragment, put_pack};
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;

/// Planes of a group.
pub(crate) const PLANES: usize = 4;

/// What the kernels are specialised by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Units {
    pub(crate) tile: [usize; 3],
    /// Units of a plane.
    pub(crate) plane: usize,
    pub(crate) head: usize,
    pub(crate) bf16: bool,
    /// See `matmul::gpu::slices::Slice`.
    pub(crate) words: bool,
    /// Strips of scores that a plane makes at one time: products that do not wait for each other, and fewer meetings.
    pub(crate) strips: usize,
}

impl Units {
    /// For heads of this size in tensors of this type; none where the device or the size has no such kernel.
    pub(crate) fn of(gpu: &Gpu, dtype: DType, head: usize, tensors: &[&Tensor]) -> Option<Units> {
        if !matches!(dtype, DType::F16 | DType::BF16) {
            return None;
        }
        let c = gpu.capabilities();
        let (tile, plane) = shape::tile(c, dtype)?;
        let [m, n, k] = [tile.m, tile.n, tile.k];
        let bf16 = dtype == DType::BF16;
        let mut units = Units { tile: [m, n, k], plane, head, bf16, words: words(gpu), strips: 1 };
        let fits = (8 * plane).is_multiple_of(m * n)
            && [1, 2, 4].contains(&units.span())
            && head.is_multiple_of(units.width())
            && head.is_multiple_of(k)
            && units.others().is_multiple_of(k)
            // Software makes hundreds of instructions of each product of fragments: one size is enough to test it.
            && (head <= 16 || (head <= 128 && plane >= 16))
            && PLANES * plane <= c.group
            && units.shared_bytes() <= c.shared_bytes
            && tensors.iter().all(|t| t.offset.is_multiple_of(16));
        if !fits {
            return None;
        }
        let all = units.others() / units.width();
        let most = [4, 2].into_iter().find(|strips| {
            all.is_multiple_of(*strips) && Units { strips: *strips, ..units }.shared_bytes() <= c.shared_bytes
        });
        units.strips = most.unwrap_or(1);
        Some(units)
    }

    /// Rows of a group.
    pub(crate) fn rows(&self) -> usize {
        PLANES * self.tile[0]
    }

    /// Rows of the other side that are met at a time: few, so that two groups share a multiprocessor with some 50 KiB.
    pub(crate) fn others(&self) -> usize {
        self.width().max(2 * self.tile[1])
    }

    /// Tiles side by side in a strip: eight columns a unit.
    pub(crate) fn span(&self) -> usize {
        8 * self.plane / (self.tile[0] * self.tile[1])
    }

    /// Columns of a strip.
    pub(crate) fn width(&self) -> usize {
        self.span() * self.tile[1]
    }

    /// Units that share a row of a strip.
    pub(crate) fn sharing(&self) -> usize {
        self.width() / 8
    }

    /// Units of a group.
    pub(crate) fn units(&self) -> usize {
        PLANES * self.plane
    }

    /// Packs of a row of the other side in shared memory, and of a row of weights.
    pub(crate) fn line(&self) -> usize {
        self.head / 8 + 1
    }

    pub(crate) fn weights_line(&self) -> usize {
        self.others() / 8 + 1
    }

    /// Columns of the strips that are made at one time.
    pub(crate) fn columns(&self) -> usize {
        self.strips * self.width()
    }

    /// Floats from a row of a plane's strips to the next: rows start in different banks, and at multiples of 16 bytes, which fragments have to.
    pub(crate) fn strip_line(&self) -> usize {
        self.columns() + 4
    }

    /// Quads of a plane's strips.
    pub(crate) fn strip(&self) -> usize {
        self.tile[0] * self.strip_line() / 4
    }

    /// Vectors of shared memory for so many packs.
    pub(crate) fn vectors(&self, packs: usize) -> usize {
        if self.words { packs } else { packs * 2 }
    }

    /// Packs of a tile of the other side.
    pub(crate) fn tile_packs(&self) -> usize {
        self.others() * self.line()
    }

    /// Packs of two tiles of the other side, or of a group's own rows, which lie there before.
    pub(crate) fn both_packs(&self) -> usize {
        (2 * self.others()).max(self.rows()) * self.line()
    }

    /// Packs that a unit copies of so many rows.
    pub(crate) fn share(&self, rows: usize) -> usize {
        (rows * self.head / 8).div_ceil(self.units())
    }

    fn shared_bytes(&self) -> usize {
        let packs = self.both_packs() + self.rows() * self.weights_line();
        (packs + PLANES * self.strip()) * 16 + 4 * (self.units() + 2 * self.others())
    }

    /// The types of a kernel: factors, and what shared memory holds.
    pub(crate) fn elems(&self, dtype: DType) -> [ElemType; 2] {
        let factor = native(dtype);
        [factor, if self.words { ElemType::UInt(UIntKind::U32) } else { factor }]
    }
}

/// Reads a unit's share of `rows` rows of a head; those from `end` on become zero. `start` and `stride` count elements.
#[cube]
pub(crate) fn fetch_rows(
    from: &[Pack],
    share: &mut Array<Pack>,
    start: usize,
    stride: usize,
    first: usize,
    end: usize,
    #[comptime] rows: usize,
    #[comptime] u: Units,
) {
    let unit = UNIT_POS as usize;
    let each = comptime!(u.head / 8);
    #[unroll]
    for j in 0..comptime!(u.share(rows)) {
        let v = min(j * comptime!(u.units()) + unit, comptime!(rows * each - 1));
        let (row, at) = (v / each, v % each);
        let place = min(first + row, end - 1);
        share[j] = only_if(first + row < end, from[(start + place * stride) / 8 + at]);
    }
}

/// Writes a unit's share of `rows` rows to shared memory, from pack `base` on.
// Alike for a reader; the kernel has the condition only where there is a remainder, as a condition between writes keeps them apart.
#[allow(clippy::if_same_then_else)]
#[cube]
pub(crate) fn put_rows<S: Numeric>(
    to: &mut Shared<[Vector<S, Const<4>>]>,
    share: &Array<Pack>,
    #[comptime] base: usize,
    #[comptime] rows: usize,
    #[comptime] u: Units,
) {
    let unit = UNIT_POS as usize;
    let each = comptime!(u.head / 8);
    #[unroll]
    for j in 0..comptime!(u.share(rows)) {
        let v = j * comptime!(u.units()) + unit;
        let place = base + v / each * comptime!(u.line()) + v % each;
        if comptime![(rows * each).is_multiple_of(u.units())] {
            put_pack::<S>(to, place, share[j], u.words);
        } else if v < comptime!(rows * each) {
            put_pack::<S>(to, place, share[j], u.words);
        }
    }
}

/// Copies rows of a head into shared memory.
#[cube]
pub(crate) fn stage_rows<S: Numeric>(
    from: &[Pack],
    to: &mut Shared<[Vector<S, Const<4>>]>,
    start: usize,
    stride: usize,
    first: usize,
    end: usize,
    #[comptime] rows: usize,
    #[comptime] u: Units,
) {
    let mut share = Array::<Pack>::new(comptime!(u.share(rows)));
    fetch_rows(from, &mut share, start, stride, first, end, rows, u);
    put_rows::<S>(to, &share, 0usize, rows, u);
}

/// A plane's rows of a staged tile as left factors, one for each step over the head.
#[cube]
pub(crate) fn own_rows<F: Numeric, S: Numeric>(
    memory: &Shared<[Vector<S, Const<4>>]>,
    #[comptime] u: Units,
) -> Sequence<cmma::Matrix<F>> {
    let row = PLANE_POS as usize * comptime!(u.tile[0]);
    let line = comptime!(u.line());
    let mut xs = Sequence::<cmma::Matrix<F>>::new();
    #[unroll]
    for step in 0..comptime!(u.head / u.tile[2]) {
        let at = row * line + step * comptime!(u.tile[2] / 8);
        xs.push(fragment::<F, S>(
            memory,
            at,
            line,
            cmma::MatrixIdent::A,
            cmma::MatrixLayout::RowMajor,
            u.tile,
            u.words,
        ));
    }
    xs
}

/// Sums of zero: a plane's rows by the head.
#[cube]
pub(crate) fn no_sums(#[comptime] u: Units) -> Sequence<cmma::Matrix<f32>> {
    let mut totals = Sequence::<cmma::Matrix<f32>>::new();
    #[unroll]
    for _ in 0..comptime!(u.head / u.tile[1]) {
        totals.push(cmma::Matrix::<f32>::from_value(
            cmma::MatrixIdent::Accumulator,
            comptime!(u.tile[0]),
            comptime!(u.tile[1]),
            comptime!(u.tile[2]),
            cmma::MatrixLayout::Undefined,
            0.0f32,
        ));
    }
    totals
}

/// Writes the products of a plane's rows and those of the other side, whose tile starts at pack `base`, from `column` on to its strips: see [`eight`]. The plane
/// meets behind it.
#[cube]
pub(crate) fn strip<F: Numeric, S: Numeric>(
    own: &Sequence<cmma::Matrix<F>>,
    other: &Shared<[Vector<S, Const<4>>]>,
    #[comptime] base: usize,
    patch: &mut Shared<[Quad]>,
    #[comptime] column: usize,
    #[comptime] u: Units,
) {
    let line = comptime!(u.line());
    let mine = PLANE_POS as usize * comptime!(u.strip());
    #[unroll]
    for x in 0..comptime!(u.strips * u.span()) {
        let sum = cmma::Matrix::<f32>::from_value(
            cmma::MatrixIdent::Accumulator,
            comptime!(u.tile[0]),
            comptime!(u.tile[1]),
            comptime!(u.tile[2]),
            cmma::MatrixLayout::Undefined,
            0.0f32,
        );
        #[unroll]
        for step in 0..comptime!(u.head / u.tile[2]) {
            let at = comptime!(base + (column + x * u.tile[1]) * line + step * u.tile[2] / 8);
            let y =
                fragment::<F, S>(other, at, line, cmma::MatrixIdent::B, cmma::MatrixLayout::ColMajor, u.tile, u.words);
            cmma::execute(own.index(step), &y, &sum, &sum);
        }
        let start = mine + comptime!(x * u.tile[1] / 4);
        let stride = comptime!(u.strip_line() as u32);
        cmma::store(&mut patch[start..start + 1], &sum, stride, cmma::MatrixLayout::RowMajor);
    }
    sync_plane();
}

/// Writes sums of a plane, `width` columns from tile `first` on, to its strip.
#[cube]
pub(crate) fn sums_to_strip(
    totals: &Sequence<cmma::Matrix<f32>>,
    patch: &mut Shared<[Quad]>,
    #[comptime] first: usize,
    #[comptime] u: Units,
) {
    let mine = PLANE_POS as usize * comptime!(u.strip());
    #[unroll]
    for x in 0..comptime!(u.span()) {
        let start = mine + comptime!(x * u.tile[1] / 4);
        let stride = comptime!(u.strip_line() as u32);
        let total = totals.index(comptime!(first + x));
        cmma::store(&mut patch[start..start + 1], total, stride, cmma::MatrixLayout::RowMajor);
    }
    sync_plane();
}

/// Row of a unit within its plane.
#[cube]
pub(crate) fn unit_row(#[comptime] u: Units) -> usize {
    UNIT_POS_PLANE as usize / comptime!(u.sharing())
}

/// First of a unit's eight columns within a strip.
#[cube]
pub(crate) fn unit_column(#[comptime] u: Units) -> usize {
    UNIT_POS_PLANE as usize % comptime!(u.sharing()) * 8
}

/// A unit's eight columns of strip `number` of its plane.
#[cube]
pub(crate) fn eight(
    patch: &mut Shared<[Quad]>,
    values: &mut Array<f32>,
    #[comptime] number: usize,
    #[comptime] u: Units,
) {
    let row = PLANE_POS as usize * comptime!(u.strip()) + unit_row(u) * comptime!(u.strip_line() / 4);
    let at = row + comptime!(number * u.width() / 4) + UNIT_POS_PLANE as usize % comptime!(u.sharing()) * 2;
    let (low, high) = (patch[at], patch[at + 1]);
    #[unroll]
    for i in 0..4usize {
        values[i] = low.extract(i);
        values[i + 4] = high.extract(i);
    }
}

/// Where the weights of a unit's eight columns are, in packs; `column` is the strip's first.
#[cube]
pub(crate) fn weights_at(#[comptime] column: usize, #[comptime] u: Units) -> usize {
    let row = PLANE_POS as usize * comptime!(u.tile[0]) + unit_row(u);
    row * comptime!(u.weights_line()) + comptime!(column / 8) + UNIT_POS_PLANE as usize % comptime!(u.sharing())
}

/// Adds the product of a plane's weights and the rows of the other side, whose tile starts at pack `base`, to its sums. The plane meets in front of it.
#[cube]
pub(crate) fn gather<F: Numeric, S: Numeric>(
    weights: &Shared<[Vector<S, Const<4>>]>,
    other: &Shared<[Vector<S, Const<4>>]>,
    #[comptime] base: usize,
    totals: &Sequence<cmma::Matrix<f32>>,
    #[comptime] u: Units,
) {
    sync_plane();
    let line = comptime!(u.line());
    let row = PLANE_POS as usize * comptime!(u.tile[0] * u.weights_line());
    #[unroll]
    for step in 0..comptime!(u.others() / u.tile[2]) {
        let x = fragment::<F, S>(
            weights,
            row + comptime!(step * u.tile[2] / 8),
            comptime!(u.weights_line()),
            cmma::MatrixIdent::A,
            cmma::MatrixLayout::RowMajor,
            u.tile,
            u.words,
        );
        #[unroll]
        for j in 0..comptime!(u.head / u.tile[1]) {
            let at = comptime!(base + step * u.tile[2] * line + j * u.tile[1] / 8);
            let y =
                fragment::<F, S>(other, at, line, cmma::MatrixIdent::B, cmma::MatrixLayout::RowMajor, u.tile, u.words);
            let total = totals.index(j);
            cmma::execute(&x, &y, total, total);
        }
    }
}

/// The largest `value` of the units that share a row.
#[cube]
pub(crate) fn row_max(value: f32, shared: &mut Shared<[f32]>, #[comptime] u: Units) -> f32 {
    let unit = UNIT_POS as usize;
    shared[unit] = value;
    sync_cube();
    let mut most = value;
    let base = unit / comptime!(u.sharing()) * comptime!(u.sharing());
    #[unroll]
    for i in 0..comptime!(u.sharing()) {
        most = max(most, shared[base + i]);
    }
    sync_cube();
    most
}

/// Their sum, in order.
#[cube]
pub(crate) fn row_sum(value: f32, shared: &mut Shared<[f32]>, #[comptime] u: Units) -> f32 {
    let unit = UNIT_POS as usize;
    shared[unit] = value;
    sync_cube();
    let mut sum = 0.0f32;
    let base = unit / comptime!(u.sharing()) * comptime!(u.sharing());
    #[unroll]
    for i in 0..comptime!(u.sharing()) {
        sum += shared[base + i];
    }
    sync_cube();
    sum
}

/// Writes a plane's sums times `factor` (a unit's row has its own) to `out`: rows of `stride` elements, row 0 of the plane at element `start`, `rows` of
/// them. Each unit writes eight elements at a time, and tells whether one of them is no number: 0 where all are.
#[cube]
pub(crate) fn write_rows(
    totals: &Sequence<cmma::Matrix<f32>>,
    patch: &mut Shared<[Quad]>,
    out: &mut [Pack],
    start: usize,
    stride: usize,
    rows: usize,
    factor: f32,
    #[comptime] u: Units,
) -> u32 {
    let row = unit_row(u);
    let mut broken = 0u32;
    #[unroll]
    for j in 0..comptime!(u.head / u.width()) {
        sums_to_strip(totals, patch, comptime!(j * u.span()), u);
        let mut values = Array::<f32>::new(8usize);
        eight(patch, &mut values, 0usize, u);
        #[unroll]
        for i in 0..8usize {
            values[i] = values[i] * factor;
        }
        if row < rows {
            let place = start + row * stride + comptime!(j * u.width()) + unit_column(u);
            out[place / 8] = packed(&values, u.bf16);
            #[unroll]
            for i in 0..8usize {
                broken |= select(is_number(values[i]), 0u32, 1u32);
            }
        }
        sync_plane();
    }
    broken
}

/// The product of the rows of a head that start at element `at` of `a` and at `bt` of `b`.
#[cube]
pub(crate) fn row_dot(a: &[Pack], at: usize, b: &[Pack], bt: usize, #[comptime] u: Units) -> f32 {
    let mut sum = 0.0f32;
    for i in 0..comptime!(u.head / 8) {
        let (x, y) = (a[at / 8 + i], b[bt / 8 + i]);
        #[unroll]
        for j in 0..4usize {
            let (v, w) = (x.extract(j), y.extract(j));
            sum = fma(long(v & 0xFFFFu32, u.bf16), long(w & 0xFFFFu32, u.bf16), sum);
            sum = fma(long(v >> 16u32, u.bf16), long(w >> 16u32, u.bf16), sum);
        }
    }
    sum
}

/// Adds `weight` times the eight elements from element `at` on.
#[cube]
pub(crate) fn add_eight(values: &mut Array<f32>, weight: f32, packs: &[Pack], at: usize, #[comptime] u: Units) {
    let pack = packs[at / 8];
    #[unroll]
    for i in 0..4usize {
        let word = pack.extract(i);
        values[i * 2] = fma(weight, long(word & 0xFFFFu32, u.bf16), values[i * 2]);
        values[i * 2 + 1] = fma(weight, long(word >> 16u32, u.bf16), values[i * 2 + 1]);
    }
}

/// Eight zeros.
#[cube]
pub(crate) fn zeros() -> Array<f32> {
    let mut values = Array::<f32>::new(8usize);
    #[unroll]
    for i in 0..8usize {
        values[i] = 0.0f32;
    }
    values
}

#[cube(launch_unchecked)]
fn units_forward_kernel<F: Numeric, S: Numeric>(
    qkv: &[Pack],
    out: &mut [Pack],
    lse: &mut [f32],
    t: usize,
    heads: usize,
    lines: usize,
    from: usize,
    to: usize,
    scale: f32,
    #[comptime] u: Units,
    #[define(F, S)] _elems: [ElemType; 2],
) {
    let rows = comptime!(u.rows());
    let others = comptime!(u.others());
    let head = comptime!(u.head);
    // A tile of keys and one of values behind it.
    let mut memory = Shared::<[Vector<S, Const<4>>]>::new_slice(comptime!(u.vectors(u.both_packs())));
    let second = comptime!(u.tile_packs());
    let mut weights = Shared::<[Vector<S, Const<4>>]>::new_slice(comptime!(u.vectors(u.rows() * u.weights_line())));
    let mut patch = Shared::<[Quad]>::new_slice(comptime!(PLANES * u.strip()));
    let mut shared = Shared::<[f32]>::new_slice(comptime!(u.units()));
    let group = from + CUBE_POS;
    if group < to {
        // The longest first.
        let tiles = (t + rows - 1) / rows;
        let (line, first) = (group % lines, (tiles - 1 - group / lines) * rows);
        let (b, h) = (line / heads, line % heads);
        let c = heads * head;
        let start = b * t * 3 * c + h * head;
        let down = PLANE_POS as usize * comptime!(u.tile[0]);
        let query = first + down + unit_row(u);
        let column = unit_column(u);
        stage_rows::<S>(qkv, &mut memory, start, 3 * c, first, t, rows, u);
        sync_cube();
        let own = own_rows::<F, S>(&memory, u);
        let end = min(first + rows, t);
        let mut most = f32::new(-1.0e30f32);
        let mut keys = Array::<Pack>::new(comptime!(u.share(u.others())));
        let mut values_of = Array::<Pack>::new(comptime!(u.share(u.others())));
        fetch_rows(qkv, &mut keys, start + c, 3 * c, 0usize, t, others, u);
        let mut key = 0usize;
        while key < end {
            sync_cube();
            put_rows::<S>(&mut memory, &keys, 0usize, others, u);
            sync_cube();
            // The next tile is on its way meanwhile.
            if key + others < end {
                fetch_rows(qkv, &mut keys, start + c, 3 * c, key + others, t, others, u);
            }
            #[unroll]
            for some in 0..comptime!(u.others() / u.columns()) {
                strip::<F, S>(&own, &memory, 0usize, &mut patch, comptime!(some * u.columns()), u);
                #[unroll]
                for part in 0..comptime!(u.strips) {
                    let from = key + comptime!(some * u.columns() + part * u.width()) + column;
                    let mut values = Array::<f32>::new(8usize);
                    eight(&mut patch, &mut values, part, u);
                    #[unroll]
                    for i in 0..8usize {
                        let score = scale * values[i];
                        most = select(from + i <= query, max(most, score), most);
                    }
                }
                sync_plane();
            }
            key += others;
        }
        let most = row_max(most, &mut shared, u);
        let totals = no_sums(u);
        let mut sum = 0.0f32;
        fetch_rows(qkv, &mut keys, start + c, 3 * c, 0usize, t, others, u);
        fetch_rows(qkv, &mut values_of, start + 2 * c, 3 * c, 0usize, t, others, u);
        let mut key = 0usize;
        while key < end {
            sync_cube();
            put_rows::<S>(&mut memory, &keys, 0usize, others, u);
            put_rows::<S>(&mut memory, &values_of, second, others, u);
            sync_cube();
            if key + others < end {
                fetch_rows(qkv, &mut keys, start + c, 3 * c, key + others, t, others, u);
                fetch_rows(qkv, &mut values_of, start + 2 * c, 3 * c, key + others, t, others, u);
            }
            #[unroll]
            for some in 0..comptime!(u.others() / u.columns()) {
                strip::<F, S>(&own, &memory, 0usize, &mut patch, comptime!(some * u.columns()), u);
                #[unroll]
                for part in 0..comptime!(u.strips) {
                    let from = key + comptime!(some * u.columns() + part * u.width()) + column;
                    let mut values = Array::<f32>::new(8usize);
                    eight(&mut patch, &mut values, part, u);
                    #[unroll]
                    for i in 0..8usize {
                        let p = select(from + i <= query, (scale * values[i] - most).exp(), 0.0f32);
                        values[i] = p;
                        sum += p;
                    }
                    let place = weights_at(comptime!(some * u.columns() + part * u.width()), u);
                    put_pack::<S>(&mut weights, place, packed(&values, u.bf16), u.words);
                }
                sync_plane();
            }
            gather::<F, S>(&weights, &memory, second, &totals, u);
            key += others;
        }
        let sum = row_sum(sum, &mut shared, u);
        let place = (b * t + first + down) * c + h * head;
        let left = t - min(first + down, t);
        let broken = write_rows(&totals, &mut patch, out, place, c, left, 1.0f32 / sum, u);
        if broken > 0u32 {
            let own = start + query * 3 * c;
            for j in 0..comptime!(u.head / u.width()) {
                let at = j * comptime!(u.width()) + column;
                let mut values = zeros();
                for key in 0..query + 1 {
                    let other = start + c + key * 3 * c;
                    let p = (scale * row_dot(qkv, own, qkv, other, u) - most).exp() / sum;
                    add_eight(&mut values, p, qkv, other + c + at, u);
                }
                out[((b * t + query) * c + h * head + at) / 8] = packed(&values, u.bf16);
            }
        }
        if column == 0 {
            if query < t {
                lse[line * t + query] = most + sum.ln();
            }
        }
    }
}

/// See [`super::forward`]; the sizes are not zero.
pub(super) fn forward(
    gpu: &Gpu,
    op: &'static str,
    u: Units,
    sizes: Sizes,
    [qkv, out, lse]: [&Tensor; 3],
) -> Result<()> {
    let Sizes { b, t, heads, .. } = sizes;
    let lines = b * heads;
    // SAFETY: the tensors have the sizes of the call, checked by the contract.
    gpu.by_groups(true, lines * t.div_ceil(u.rows()), super::flops(sizes, 3), |from, count| unsafe {
        units_forward_kernel::launch_unchecked(
            gpu.client(),
            gpu.grid(count),
            CubeDim::new_1d(u.units() as u32),
            as_packs(gpu, op, qkv)?,
            as_packs(gpu, op, out)?,
            gpu.arg(op, lse)?,
            t,
            heads,
            lines,
            from,
            from + count,
            super::scale(u.head),
            u,
            u.elems(qkv.dtype()),
        );
        gpu.launched(op, &[out, lse])
    })
}
