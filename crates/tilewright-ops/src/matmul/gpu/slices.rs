//! The loop of a product on the matrix units. A group's slices of both factors lie in shared memory as they lie in memory: rows along the sum, or lines of
//! the sum along the rows. Each unit copies 16 bytes at a time, the next slice's while this one is multiplied, and each plane holds its part of the sums
//! in fragments.

use tilewright_core::DType;

use super::matrix::Way;
use super::shape::Blocks;
use crate::runtime::gpu::prelude::*;

/// How an operand is read.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Source {
    /// 16-bit elements, eight at a time.
    Packs,
    /// 16-bit elements one by one: lines do not start at multiples of 16 bytes.
    Ones,
    /// f32, rounded on the way; eight at a time.
    WidePacks,
    /// f32, rounded on the way, one by one.
    WideOnes,
}

/// An operand's slices.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Slice {
    pub(crate) source: Source,
    /// Lines are rows of the product and run along the sum; else the other way round.
    pub(crate) along: bool,
    /// Elements may lie beyond the end of the sum, and count as zero.
    pub(crate) tail: bool,
    /// Rows and terms are whole slices of whole packs: nothing lies beyond an end, and what a unit copies is as far apart as the first two.
    pub(crate) full: bool,
    /// Packs of a line, with and without what stands behind it.
    pub(crate) line: [usize; 2],
    /// Packs that a unit copies, and units of a group.
    pub(crate) share: [usize; 2],
    /// Factors are bf16, not f16.
    pub(crate) bf16: bool,
    /// Shared memory holds words, not elements of the factors' type: fragments are read 16 bytes at a time then. Metal wants elements.
    pub(crate) words: bool,
}

/// What a kernel is specialised by, beside its epilogue.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Shape {
    pub(crate) blocks: Blocks,
    pub(crate) tile: [usize; 3],
    pub(crate) plane: usize,
    pub(crate) slices: [Slice; 2],
    /// Rows of the result are whole packs; else its elements are written one by one.
    pub(crate) even: bool,
    /// Whether `bias`, `pre` and `out` are f32.
    pub(crate) wide: [bool; 3],
    /// Groups take parts of the sum, each of which has a product of its own behind that of the part before.
    pub(crate) parted: bool,
}

/// Element `at` of a line, or zero.
#[cube]
fn element<A: Numeric>(ones: &[A], start: usize, at: usize, length: usize, #[comptime] s: Slice) -> u32 {
    let x = ones[start + min(at, length - 1)];
    let bits =
        if comptime![s.source == Source::WideOnes] { short(f32::cast_from(x), s.bf16) } else { u32::cast_from(x) };
    if comptime![s.along && s.tail] { select(at < length, bits, 0u32) } else { bits }
}

/// Two f32 in the factors' type.
#[cube]
fn pair(low: u32, high: u32, #[comptime] bf16: bool) -> u32 {
    short(f32::reinterpret(low), bf16) | (short(f32::reinterpret(high), bf16) << 16u32)
}

/// Pack `q` of a line.
#[cube]
fn eight<A: Numeric>(
    packs: &[Pack],
    ones: &[A],
    line: usize,
    ld: usize,
    q: usize,
    length: usize,
    #[comptime] s: Slice,
) -> Pack {
    if comptime![s.source == Source::Packs] {
        packs[line * (ld / 8) + q]
    } else if comptime![s.source == Source::WidePacks] {
        let at = line * (ld / 4) + q * 2;
        let (x, y) = (packs[at], packs[at + 1]);
        let mut pack = Pack::new(0u32);
        pack.insert(0usize, pair(x.extract(0usize), x.extract(1usize), s.bf16));
        pack.insert(1usize, pair(x.extract(2usize), x.extract(3usize), s.bf16));
        pack.insert(2usize, pair(y.extract(0usize), y.extract(1usize), s.bf16));
        pack.insert(3usize, pair(y.extract(2usize), y.extract(3usize), s.bf16));
        pack
    } else {
        let mut pack = Pack::new(0u32);
        #[unroll]
        for i in 0..4usize {
            let low = element::<A>(ones, line * ld, q * 8 + 2 * i, length, s);
            let high = element::<A>(ones, line * ld, q * 8 + 2 * i + 1, length, s);
            pack.insert(i, low | (high << 16u32));
        }
        pack
    }
}

/// Line and pack within it of the `v`th pack of a slice. Eight units that write at one time cover 128 bytes of memory; where those are parts of two lines,
/// the lines are four apart, and their places in shared memory in different banks.
#[cube]
fn line_and_pack(v: usize, #[comptime] s: Slice) -> (usize, usize) {
    let (line, at) = (v / comptime!(s.line[0]), v % comptime!(s.line[0]));
    if comptime![s.along] { (line / 8 * 8 + line % 2 * 4 + line % 8 / 2, at) } else { (line, at) }
}

/// Reads a unit's share of the slice of rows from `row0` on and of terms from `first` on. Rows beyond the last are the last one again: their sums go nowhere.
#[cube]
fn fetch<A: Numeric>(
    packs: &[Pack],
    ones: &[A],
    share: &mut Array<Pack>,
    row0: usize,
    first: usize,
    rows: usize,
    k: usize,
    ld: usize,
    #[comptime] s: Slice,
) {
    let unit = UNIT_POS as usize;
    let even = comptime!(matches!(s.source, Source::Packs | Source::WidePacks));
    let (first_line, first_at) = line_and_pack(unit, s);
    let apart = comptime!(s.share[1] / s.line[0]);
    #[unroll]
    for j in 0..comptime!(s.share[0]) {
        let v = j * comptime!(s.share[1]) + unit;
        let (line, at) = line_and_pack(v, s);
        if comptime![s.full && s.along] {
            share[j] = eight::<A>(packs, ones, row0 + first_line + j * apart, ld, first / 8 + first_at, k, s);
        } else if comptime![s.full] {
            share[j] = eight::<A>(packs, ones, first + first_line + j * apart, ld, row0 / 8 + first_at, rows, s);
        } else if comptime![s.along] {
            let (row, q) = (min(row0 + line, rows - 1), first / 8 + at);
            if comptime![even && s.tail] {
                share[j] = only_if(q * 8 < k, eight::<A>(packs, ones, row, ld, min(q, (k + 7) / 8 - 1), k, s));
            } else {
                share[j] = eight::<A>(packs, ones, row, ld, q, k, s);
            }
        } else {
            let p = first + line;
            let mut q = row0 / 8 + at;
            if comptime![even] {
                q = min(q, (rows + 7) / 8 - 1);
            }
            if comptime![s.tail] {
                share[j] = only_if(p < k, eight::<A>(packs, ones, min(p, k - 1), ld, q, rows, s));
            } else {
                share[j] = eight::<A>(packs, ones, p, ld, q, rows, s);
            }
        }
    }
}

/// Writes a unit's share of a slice that starts at pack `base` of shared memory.
#[cube]
fn put<S: Numeric>(memory: &mut Shared<[Vector<S, Const<4>>]>, base: usize, share: &Array<Pack>, #[comptime] s: Slice) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for j in 0..comptime!(s.share[0]) {
        let v = j * comptime!(s.share[1]) + unit;
        let (line, at) = line_and_pack(v, s);
        put_pack::<S>(memory, base + line * comptime!(s.line[1]) + at, share[j], s.words);
    }
}

/// Writes eight elements at pack `at`.
#[cube]
pub(crate) fn put_pack<S: Numeric>(
    memory: &mut Shared<[Vector<S, Const<4>>]>,
    at: usize,
    pack: Pack,
    #[comptime] words: bool,
) {
    if comptime![words] {
        memory[at] = Vector::<S, Const<4>>::cast_from(pack);
    } else {
        let mut low = Vector::<u32, Const<2>>::new(pack.extract(0usize));
        low.insert(1usize, pack.extract(1usize));
        let mut high = Vector::<u32, Const<2>>::new(pack.extract(2usize));
        high.insert(1usize, pack.extract(3usize));
        memory[at * 2] = Vector::<S, Const<4>>::reinterpret(low);
        memory[at * 2 + 1] = Vector::<S, Const<4>>::reinterpret(high);
    }
}

/// A fragment of a factor at pack `at` of shared memory, in lines of `line` packs.
#[cube]
pub(crate) fn fragment<F: Numeric, S: Numeric>(
    memory: &Shared<[Vector<S, Const<4>>]>,
    at: usize,
    #[comptime] line: usize,
    #[comptime] ident: cmma::MatrixIdent,
    #[comptime] layout: cmma::MatrixLayout,
    #[comptime] tile: [usize; 3],
    #[comptime] words: bool,
) -> cmma::Matrix<F> {
    let tm = comptime!(tile[0]);
    let tn = comptime!(tile[1]);
    let tk = comptime!(tile[2]);
    // SAFETY: loaded before any use.
    let mut x = unsafe { cmma::Matrix::<F>::uninitialized(ident, tm, tn, tk, layout) };
    // The library counts a stride in scalars of what memory holds.
    let start = if comptime![words] { at } else { at * 2 };
    let stride = comptime!((if words { line * 4 } else { line * 8 }) as u32);
    cmma::load(&mut x, &memory[start..start + 1], stride);
    x
}

/// A plane's sums. `at` is the first row and column of the group, `size` the product's rows, columns and terms, `terms` the first of those that are summed
/// and how many, at least one, `ld` the lines of both operands, `place` the plane's first row and column within the group and its turn among those that
/// share them.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn sum<F: Numeric, S: Numeric, A: Numeric, B: Numeric>(
    a: &[Pack],
    a_ones: &[A],
    b: &[Pack],
    b_ones: &[B],
    memory: &mut Shared<[Vector<S, Const<4>>]>,
    at: (usize, usize),
    size: (usize, usize, usize),
    terms: (usize, usize),
    ld: (usize, usize),
    place: (usize, usize, usize),
    #[comptime] s: Shape,
) -> Sequence<cmma::Matrix<f32>> {
    let tm = comptime!(s.tile[0]);
    let tn = comptime!(s.tile[1]);
    let tk = comptime!(s.tile[2]);
    let bk = comptime!(s.blocks.group[2]);
    let sa = comptime!(s.slices[0]);
    let sb = comptime!(s.slices[1]);
    let packs_a = comptime!(s.packs(0));
    let (row0, col0) = at;
    let (m, n, k) = size;
    let (from, count) = terms;
    let (a_ld, b_ld) = ld;
    let (down, right, turn) = place;
    let mut totals = Sequence::<cmma::Matrix<f32>>::new();
    #[unroll]
    for _ in 0..comptime!((s.blocks.plane[0] / tm) * (s.blocks.plane[1] / tn)) {
        totals.push(cmma::Matrix::<f32>::from_value(
            cmma::MatrixIdent::Accumulator,
            tm,
            tn,
            tk,
            cmma::MatrixLayout::Undefined,
            0.0f32,
        ));
    }
    let mut share_a = Array::<Pack>::new(comptime!(sa.share[0]));
    let mut share_b = Array::<Pack>::new(comptime!(sb.share[0]));
    fetch::<A>(a, a_ones, &mut share_a, row0, from, m, k, a_ld, sa);
    fetch::<B>(b, b_ones, &mut share_b, col0, from, n, k, b_ld, sb);
    if comptime![s.blocks.guarded] {
        // Nor can a driver count this loop's turns and unroll it until registers run out.
        let mut first = from;
        let mut rest = count;
        while rest > 0usize {
            put::<S>(memory, 0usize, &share_a, sa);
            put::<S>(memory, packs_a, &share_b, sb);
            sync_cube();
            if rest > bk {
                fetch::<A>(a, a_ones, &mut share_a, row0, first + bk, m, k, a_ld, sa);
                fetch::<B>(b, b_ones, &mut share_b, col0, first + bk, n, k, b_ld, sb);
            }
            multiply::<F, S>(&*memory, &totals, down, right, turn, s);
            sync_cube();
            first += bk;
            rest -= min(rest, bk);
        }
    } else {
        let slices = (count + bk - 1) / bk;
        let last = from + (slices - 1) * bk;
        for slice in 0..slices {
            put::<S>(memory, 0usize, &share_a, sa);
            put::<S>(memory, packs_a, &share_b, sb);
            sync_cube();
            let next = min(from + (slice + 1) * bk, last);
            fetch::<A>(a, a_ones, &mut share_a, row0, next, m, k, a_ld, sa);
            fetch::<B>(b, b_ones, &mut share_b, col0, next, n, k, b_ld, sb);
            multiply::<F, S>(&*memory, &totals, down, right, turn, s);
            sync_cube();
        }
    }
    totals
}

/// Adds the product of the slices to a plane's sums; of planes that share a part, each takes the terms of its turn.
#[cube]
fn multiply<F: Numeric, S: Numeric>(
    memory: &Shared<[Vector<S, Const<4>>]>,
    totals: &Sequence<cmma::Matrix<f32>>,
    down: usize,
    right: usize,
    turn: usize,
    #[comptime] s: Shape,
) {
    let sa = comptime!(s.slices[0]);
    let sb = comptime!(s.slices[1]);
    let line_a = comptime!(sa.line[1]);
    let line_b = comptime!(sb.line[1]);
    let packs_a = comptime!(s.packs(0));
    let fm = comptime!(s.blocks.plane[0] / s.tile[0]);
    let fnn = comptime!(s.blocks.plane[1] / s.tile[1]);
    let layout_a = comptime!(if sa.along { cmma::MatrixLayout::RowMajor } else { cmma::MatrixLayout::ColMajor });
    let layout_b = comptime!(if sb.along { cmma::MatrixLayout::ColMajor } else { cmma::MatrixLayout::RowMajor });
    #[unroll]
    for step in 0..comptime!(s.blocks.group[2] / s.tile[2] / s.blocks.split) {
        let p = (turn * comptime!(s.blocks.group[2] / s.tile[2] / s.blocks.split) + step) * comptime!(s.tile[2]);
        let mut xs = Sequence::<cmma::Matrix<F>>::new();
        #[unroll]
        for i in 0..fm {
            let r = down + i * comptime!(s.tile[0]);
            let at = if comptime![sa.along] { r * line_a + p / 8 } else { p * line_a + r / 8 };
            xs.push(fragment::<F, S>(memory, at, line_a, cmma::MatrixIdent::A, layout_a, s.tile, sa.words));
        }
        #[unroll]
        for j in 0..fnn {
            let r = right + j * comptime!(s.tile[1]);
            let at = packs_a + if comptime![sb.along] { r * line_b + p / 8 } else { p * line_b + r / 8 };
            let y = fragment::<F, S>(memory, at, line_b, cmma::MatrixIdent::B, layout_b, s.tile, sb.words);
            #[unroll]
            for i in 0..fm {
                let total = totals.index(comptime!(i * fnn + j));
                cmma::execute(xs.index(i), &y, total, total);
            }
        }
    }
}

impl Slice {
    /// An operand's, of a product of `rows` rows and `k` terms.
    pub(crate) fn of(way: &Way, blocks: &Blocks, operand: usize, [rows, k]: [usize; 2]) -> Self {
        let (along, source) = (way.along[operand], way.sources[operand]);
        let units = blocks.planes() * way.plane;
        let [lines, length] = blocks.lines(operand, along);
        let tail = !k.is_multiple_of(blocks.group[2]);
        let packs = length / 8;
        let whole = rows.is_multiple_of(blocks.group[operand]) && !tail;
        Slice {
            source,
            along,
            tail,
            // Lines change places by eights.
            full: matches!(source, Source::Packs | Source::WidePacks) && whole && units.is_multiple_of(8 * packs),
            line: [packs, (length + blocks.pad) / 8],
            share: [lines * packs / units, units],
            bf16: way.factors == DType::BF16,
            words: way.words,
        }
    }
}

impl Shape {
    /// Packs of an operand's slice.
    pub(crate) fn packs(&self, operand: usize) -> usize {
        self.blocks.lines(operand, self.slices[operand].along)[0] * self.slices[operand].line[1]
    }
}
