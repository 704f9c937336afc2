//! Matrix products on the matrix units: 16-bit factors, f32 sums.
//!
//! A group's slices of both factors lie in shared memory as they lie in memory: rows along the sum, or lines of the sum along the rows. Each unit copies
//! 16 bytes at a time, the next slice's while this one is multiplied. Each plane holds its part of the sums in fragments; a tile at a time they
//! pass through shared memory to meet the epilogue.

use tilewright_core::{DType, Result};

use super::shape::{self, Blocks};
use super::{Epilogue, Product, applied, finish};
use crate::Tensor;
use crate::runtime::gpu::prelude::*;
use crate::runtime::gpu::{Gpu, MatrixTile};

/// Eight elements of 16 bits.
pub(crate) type Pack = Vector<u32, Const<4>>;

/// Four sums: fragments are stored by 16 bytes.
pub(crate) type Quad = Vector<f32, Const<4>>;

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
}

/// What a factor keeps of an f32, in 16 bits.
#[cube]
fn short(x: f32, #[comptime] bf16: bool) -> u32 {
    if comptime![bf16] { kept_bf16(x) } else { u32::cast_from(u16::reinterpret(half::f16::cast_from(kept_f16(x)))) }
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

/// `pack`, or zeros.
#[cube]
pub(crate) fn only_if(alive: bool, pack: Pack) -> Pack {
    let mut kept = Pack::new(0u32);
    #[unroll]
    for i in 0..4usize {
        kept.insert(i, select(alive, pack.extract(i), 0u32));
    }
    kept
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
pub(crate) fn fetch<A: Numeric>(
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
                share[j] = only_if(q * 8 < k, eight::<A>(packs, ones, row, ld, min(q, k / 8 - 1), k, s));
            } else {
                share[j] = eight::<A>(packs, ones, row, ld, q, k, s);
            }
        } else {
            let p = first + line;
            let mut q = row0 / 8 + at;
            if comptime![even] {
                q = min(q, rows / 8 - 1);
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
pub(crate) fn put<S: Numeric>(
    memory: &mut Shared<[Vector<S, Const<4>>]>,
    base: usize,
    share: &Array<Pack>,
    #[comptime] s: Slice,
) {
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

/// Eight numbers in the factors' type.
#[cube]
pub(crate) fn packed(values: &Array<f32>, #[comptime] bf16: bool) -> Pack {
    let mut pack = Pack::new(0u32);
    #[unroll]
    for i in 0..4usize {
        pack.insert(i, short(values[i * 2], bf16) | (short(values[i * 2 + 1], bf16) << 16u32));
    }
    pack
}

/// Writes eight numbers from element `at` on, a multiple of eight.
#[cube]
pub(crate) fn put_eight(
    packs: &mut [Pack],
    at: usize,
    values: &Array<f32>,
    #[comptime] wide: bool,
    #[comptime] bf16: bool,
) {
    if comptime![wide] {
        let mut low = Pack::new(0u32);
        let mut high = Pack::new(0u32);
        #[unroll]
        for i in 0..4usize {
            low.insert(i, u32::reinterpret(values[i]));
            high.insert(i, u32::reinterpret(values[i + 4]));
        }
        packs[at / 4] = low;
        packs[at / 4 + 1] = high;
    } else {
        packs[at / 8] = packed(values, bf16);
    }
}

/// Eight numbers of one pack, or of two where they are f32.
#[cube]
pub(crate) fn unpack(pack: Pack, next: Pack, values: &mut Array<f32>, #[comptime] wide: bool, #[comptime] bf16: bool) {
    #[unroll]
    for i in 0..4usize {
        if comptime![wide] {
            values[i] = f32::reinterpret(pack.extract(i));
            values[i + 4] = f32::reinterpret(next.extract(i));
        } else {
            let word = pack.extract(i);
            values[i * 2] = long(word & 0xFFFFu32, bf16);
            values[i * 2 + 1] = long(word >> 16u32, bf16);
        }
    }
}

/// Packs that hold eight numbers, and the second of them behind the first.
#[cube]
pub(crate) fn pack_at(at: usize, #[comptime] wide: bool) -> (usize, usize) {
    if comptime![wide] { (at / 4, at / 4 + 1) } else { (at / 8, at / 8) }
}

/// A 16-bit number as f32.
#[cube]
pub(crate) fn long(bits: u32, #[comptime] bf16: bool) -> f32 {
    if comptime![bf16] {
        f32::reinterpret(bits << 16u32)
    } else {
        f32::cast_from(half::f16::reinterpret(u16::cast_from(bits)))
    }
}

/// [`finish`] for eight sums of a row, 16 bytes at a time; `column` and `at` are multiples of eight.
#[cube]
fn finish_eight(
    sums: &Array<f32>,
    column: usize,
    at: usize,
    bias: &[Pack],
    pre: &mut [Pack],
    out: &mut [Pack],
    #[comptime] e: Epilogue,
    #[comptime] wide: [bool; 3],
) {
    let mut values = Array::<f32>::new(8usize);
    if comptime![e.bias] {
        let (pack, next) = pack_at(column, wide[0]);
        unpack(bias[pack], bias[next], &mut values, wide[0], e.bf16[2]);
        #[unroll]
        for i in 0..8usize {
            values[i] += sums[i];
        }
    } else {
        #[unroll]
        for i in 0..8usize {
            values[i] = sums[i];
        }
    }
    if comptime![e.pre_out] {
        put_eight(pre, at, &values, wide[1], e.bf16[3]);
    }
    let mut beside = Array::<f32>::new(8usize);
    let mut before = Array::<f32>::new(8usize);
    #[unroll]
    for i in 0..8usize {
        beside[i] = 0.0f32;
        before[i] = 0.0f32;
    }
    if comptime![e.slope || e.add] {
        let (pack, next) = pack_at(at, wide[1]);
        unpack(pre[pack], pre[next], &mut beside, wide[1], e.bf16[3]);
    }
    if comptime![e.accumulate] {
        let (pack, next) = pack_at(at, wide[2]);
        unpack(out[pack], out[next], &mut before, wide[2], e.bf16[4]);
    }
    #[unroll]
    for i in 0..8usize {
        values[i] = applied(values[i], beside[i], before[i], e);
    }
    put_eight(out, at, &values, wide[2], e.bf16[4]);
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn matrix_kernel<F: Numeric, S: Numeric, A: Numeric, B: Numeric, C: Numeric, P: Numeric, O: Numeric>(
    a: &[Pack],
    a_ones: &[A],
    b: &[Pack],
    b_ones: &[B],
    bias: &[C],
    pre: &mut [P],
    out: &mut [O],
    bias_packs: &[Pack],
    pre_packs: &mut [Pack],
    out_packs: &mut [Pack],
    m: usize,
    n: usize,
    k: usize,
    a_ld: usize,
    b_ld: usize,
    ld: usize,
    #[comptime] e: Epilogue,
    #[comptime] s: Shape,
    #[define(F, S, A, B, C, P, O)] _elems: [ElemType; 7],
) {
    let tm = comptime!(s.tile[0]);
    let tn = comptime!(s.tile[1]);
    let tk = comptime!(s.tile[2]);
    let bm = comptime!(s.blocks.group[0]);
    let bn = comptime!(s.blocks.group[1]);
    let bk = comptime!(s.blocks.group[2]);
    let wm = comptime!(s.blocks.plane[0]);
    let wn = comptime!(s.blocks.plane[1]);
    let fm = comptime!(wm / tm);
    let fnn = comptime!(wn / tn);
    let sa = comptime!(s.slices[0]);
    let sb = comptime!(s.slices[1]);
    let packs_a = comptime!(s.packs(0));
    let packs_b = comptime!(s.packs(1));
    let spread = comptime!(if sa.words { 1usize } else { 2usize });
    // Sums pass to the epilogue through a strip of each plane: in the slices' memory where that holds words, in one of their own elsewhere.
    let strip = comptime!(tm * s.blocks.strip_line() / 4);
    let strips = comptime!(s.blocks.planes() * strip);
    let own_strips = comptime!(if sa.words { 1 } else { strips });
    let packs = comptime!(if sa.words { strips.max(packs_a + packs_b) } else { packs_a + packs_b });
    let mut memory = Shared::<[Vector<S, Const<4>>]>::new_slice(comptime!(packs * spread));
    let mut patch = Shared::<[Quad]>::new_slice(own_strips);
    let own = PLANE_POS as usize;
    let across = comptime!(bn / wn);
    let split = comptime!(s.blocks.split);
    // Planes that share their part are next to each other.
    let (place, turn) = (own / split, own % split);
    let (down, right) = (place / across * wm, place % across * wn);
    // A band of rows of groups after the other, each column by column.
    let (tall, wide) = ((m + bm - 1) / bm, (n + bn - 1) / bn);
    let band = comptime!(s.blocks.band);
    let top = CUBE_POS / (band * wide) * band;
    let height = min(tall - min(top, tall), band);
    let within = CUBE_POS % (band * wide);
    if within < height * wide {
        let row0 = (top + within % height) * bm;
        let col0 = within / height * bn;
        let mut totals = Sequence::<cmma::Matrix<f32>>::new();
        #[unroll]
        for _ in 0..comptime!(fm * fnn) {
            totals.push(cmma::Matrix::<f32>::from_value(
                cmma::MatrixIdent::Accumulator,
                tm,
                tn,
                tk,
                cmma::MatrixLayout::Undefined,
                0.0f32,
            ));
        }
        let slices = (k + bk - 1) / bk;
        let last = (slices - 1) * bk;
        let mut share_a = Array::<Pack>::new(comptime!(sa.share[0]));
        let mut share_b = Array::<Pack>::new(comptime!(sb.share[0]));
        fetch::<A>(a, a_ones, &mut share_a, row0, 0usize, m, k, a_ld, sa);
        fetch::<B>(b, b_ones, &mut share_b, col0, 0usize, n, k, b_ld, sb);
        for slice in 0..slices {
            put::<S>(&mut memory, 0usize, &share_a, sa);
            put::<S>(&mut memory, packs_a, &share_b, sb);
            sync_cube();
            let next = min((slice + 1) * bk, last);
            fetch::<A>(a, a_ones, &mut share_a, row0, next, m, k, a_ld, sa);
            fetch::<B>(b, b_ones, &mut share_b, col0, next, n, k, b_ld, sb);
            multiply::<F, S>(&memory, &totals, down, right, turn, s);
            sync_cube();
        }
        let lane = UNIT_POS_PLANE as usize;
        let mine = own * strip;
        let line = comptime!(s.blocks.strip_line());
        // Runs of eight sums of a row.
        let across = comptime!(wn / 8);
        let runs = comptime!(tm * across);
        let mut values = Array::<f32>::new(8usize);
        #[unroll]
        for i in 0..fm {
            #[unroll]
            for j in 0..fnn {
                let total = totals.index(comptime!(i * fnn + j));
                let at = mine + j * tn / 4;
                if comptime![sa.words] {
                    cmma::store(&mut memory[at..at + 1], total, comptime!(line as u32), cmma::MatrixLayout::RowMajor);
                } else {
                    cmma::store(&mut patch[at..at + 1], total, comptime!(line as u32), cmma::MatrixLayout::RowMajor);
                }
            }
            meet(split);
            #[unroll]
            for x in 0..comptime!(runs.div_ceil(s.plane * split)) {
                let run = (x * split + turn) * comptime!(s.plane) + lane;
                let row = row0 + down + i * tm + run / across;
                let column = col0 + right + run % across * 8;
                if run < runs && row < m && column < n {
                    let at = run / across * comptime!(line / 4) + run % across * 2;
                    #[unroll]
                    for part in 0..split {
                        // Of each plane that shares the part, in their order.
                        let theirs = (own - turn + part) * strip + at;
                        let (low, high) = if comptime![sa.words] {
                            (floats::<S>(memory[theirs]), floats::<S>(memory[theirs + 1]))
                        } else {
                            (patch[theirs], patch[theirs + 1])
                        };
                        #[unroll]
                        for v in 0..4usize {
                            if comptime![part == 0] {
                                values[v] = low.extract(v);
                                values[v + 4] = high.extract(v);
                            } else {
                                values[v] += low.extract(v);
                                values[v + 4] += high.extract(v);
                            }
                        }
                    }
                    let at = row * ld + column;
                    if comptime![s.even] {
                        finish_eight(&values, column, at, bias_packs, pre_packs, out_packs, e, s.wide);
                    } else {
                        #[unroll]
                        for v in 0..8usize {
                            if column + v < n {
                                finish::<C, P, O>(values[v], column + v, at + v, bias, pre, out, e);
                            }
                        }
                    }
                }
            }
            meet(split);
        }
    }
}

/// Waits for the planes that share a part of the product.
#[cube]
fn meet(#[comptime] split: usize) {
    if comptime![split > 1] {
        sync_cube();
    } else {
        sync_plane();
    }
}

/// Four words of shared memory as what a fragment stored there.
#[cube]
fn floats<S: Numeric>(words: Vector<S, Const<4>>) -> Quad {
    let words = Pack::cast_from(words);
    let mut quad = Quad::new(0.0f32);
    #[unroll]
    for v in 0..4usize {
        quad.insert(v, f32::reinterpret(words.extract(v)));
    }
    quad
}

/// Adds the product of the slices to a plane's sums; of planes that share a part, each takes the terms of its turn.
#[cube]
pub(crate) fn multiply<F: Numeric, S: Numeric>(
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

/// A tensor as packs of 16 bytes.
pub(crate) fn as_packs(gpu: &Gpu, op: &'static str, t: &Tensor) -> Result<BufferArg> {
    let packs = t.bytes() / 16;
    Ok(match gpu.arg(op, t)? {
        // SAFETY: no longer than the tensor.
        BufferArg::Handle { handle } => unsafe { BufferArg::from_raw_parts_binding(handle.handle, packs) },
        alias => alias,
    })
}

/// A type of the matrix units.
pub(crate) fn native(dtype: DType) -> ElemType {
    ElemType::Float(if dtype == DType::BF16 { FloatKind::BF16 } else { FloatKind::F16 })
}

/// Whether shared memory holds words.
pub(crate) fn words(gpu: &Gpu) -> bool {
    gpu.capabilities().compiler.contains("spirv")
}

/// How an operand of `lines` lines of `length` elements is read for factors of a type; none where it cannot be.
fn source(t: &Tensor, ld: usize, length: usize, factors: DType, round: bool) -> Option<Source> {
    let wide = match t.dtype() {
        dtype if dtype == factors => false,
        DType::F32 if round => true,
        _ => return None,
    };
    let even = t.offset.is_multiple_of(16) && ld.is_multiple_of(8) && length.is_multiple_of(8);
    Some(match (wide, even) {
        (false, true) => Source::Packs,
        (false, false) => Source::Ones,
        (true, true) => Source::WidePacks,
        (true, false) => Source::WideOnes,
    })
}

/// What a product can have on the matrix units of a device.
#[derive(Clone, Copy)]
pub(crate) struct Way {
    pub(crate) tile: MatrixTile,
    pub(crate) plane: usize,
    pub(crate) factors: DType,
    pub(crate) sources: [Source; 2],
    along: [bool; 2],
    ld: [usize; 2],
    /// Of shared memory, see [`Slice::words`].
    pub(crate) words: bool,
}

impl Way {
    /// None where a factor is not of 16 bits, strides are none of the kernel's, or the device has no such units.
    pub(crate) fn of(gpu: &Gpu, product: &Product<'_>, [m, n, k]: [usize; 3]) -> Option<Way> {
        let factors = product.b.0.dtype();
        if !matches!(factors, DType::F16 | DType::BF16) || k == 0 {
            return None;
        }
        let (tile, plane) = shape::tile(gpu.capabilities(), factors)?;
        let operand = |(t, row, sum): (&Tensor, usize, usize), rows, round| {
            let (along, ld, length) = match (row, sum) {
                (ld, 1) => (true, ld, k),
                (1, ld) => (false, ld, rows),
                _ => return None,
            };
            Some((source(t, ld, length, factors, round)?, along, ld))
        };
        let a = operand(product.a, m, product.round)?;
        let b = operand(product.b, n, false)?;
        let (sources, along, ld) = ([a.0, b.0], [a.1, b.1], [a.2, b.2]);
        Some(Way { tile, plane, factors, sources, along, ld, words: words(gpu) })
    }

    /// The table's blocks for a product.
    pub(crate) fn choose(&self, gpu: &Gpu, m: usize, n: usize) -> Option<Blocks> {
        shape::choose(gpu.capabilities(), &self.tile, self.plane, self.along, [m, n])
    }

    /// Whether these blocks run.
    pub(crate) fn fits(&self, gpu: &Gpu, blocks: &Blocks) -> bool {
        blocks.fits(gpu.capabilities(), &self.tile, self.plane, self.along)
    }

    /// `blocks` fit.
    pub(crate) fn run(
        &self,
        gpu: &Gpu,
        op: &'static str,
        blocks: Blocks,
        tensors: [&Tensor; 5],
        epilogue: Epilogue,
        [m, n, k]: [usize; 3],
        ld: usize,
    ) -> Result<()> {
        let units = blocks.planes() * self.plane;
        let words = self.words;
        let shape = Shape {
            blocks,
            tile: [self.tile.m, self.tile.n, self.tile.k],
            plane: self.plane,
            slices: [Slice::of(self, &blocks, 0, [m, k]), Slice::of(self, &blocks, 1, [n, k])],
            even: n.is_multiple_of(8)
                && ld.is_multiple_of(8)
                && [2, 3, 4].iter().all(|&i| tensors[i].offset.is_multiple_of(16)),
            wide: [2, 3, 4].map(|i| tensors[i].dtype() == DType::F32),
        };
        let [x, y, bias, pre, to] = tensors;
        let one = |operand: usize| match self.sources[operand] {
            Source::Packs | Source::Ones => ElemType::UInt(UIntKind::U16),
            Source::WidePacks | Source::WideOnes => ElemType::Float(FloatKind::F32),
        };
        let stored = |t: &Tensor| Storage::of(t.dtype()).elem;
        let factor = native(self.factors);
        let shared = if words { ElemType::UInt(UIntKind::U32) } else { factor };
        let elems = [factor, shared, one(0), one(1), stored(bias), stored(pre), stored(to)];
        let (tall, wide) = (m.div_ceil(blocks.group[0]), n.div_ceil(blocks.group[1]));
        // SAFETY: the caller's sizes and strides stay inside the tensors; the kernel reads and writes within the sizes only.
        unsafe {
            matrix_kernel::launch_unchecked(
                gpu.client(),
                gpu.grid(tall * wide),
                CubeDim::new_1d(units as u32),
                as_packs(gpu, op, x)?,
                gpu.arg(op, x)?,
                as_packs(gpu, op, y)?,
                gpu.arg(op, y)?,
                gpu.arg(op, bias)?,
                gpu.arg(op, pre)?,
                gpu.arg(op, to)?,
                as_packs(gpu, op, bias)?,
                as_packs(gpu, op, pre)?,
                as_packs(gpu, op, to)?,
                m,
                n,
                k,
                self.ld[0],
                self.ld[1],
                ld,
                epilogue,
                shape,
                elems,
            );
        }
        gpu.launched(op, &[to])
    }
}
