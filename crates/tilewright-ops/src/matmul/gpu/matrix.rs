//! Matrix products on the matrix units: 16-bit factors, f32 sums, by the loop of `slices.rs`. A tile at a time the sums pass through shared memory to meet
//! the epilogue.

use tilewright_core::{DType, Result};

use super::shape::{self, Blocks};
use super::slices::{Shape, Slice, Source, sum};
use super::{Epilogue, Product, applied, finish};
use crate::Tensor;
use crate::runtime::gpu::prelude::*;
use crate::runtime::gpu::{Gpu, MatrixTile};

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
    terms: usize,
    #[comptime] e: Epilogue,
    #[comptime] s: Shape,
    #[define(F, S, A, B, C, P, O)] _elems: [ElemType; 7],
) {
    let tm = comptime!(s.tile[0]);
    let tn = comptime!(s.tile[1]);
    let bm = comptime!(s.blocks.group[0]);
    let bn = comptime!(s.blocks.group[1]);
    let wm = comptime!(s.blocks.plane[0]);
    let wn = comptime!(s.blocks.plane[1]);
    let fm = comptime!(wm / tm);
    let fnn = comptime!(wn / tn);
    let sa = comptime!(s.slices[0]);
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
    let mut group = CUBE_POS;
    let mut from = 0usize;
    let mut count = k;
    let mut behind = 0usize;
    if comptime![s.parted] {
        let part = group / (tall * wide);
        group %= tall * wide;
        from = min(part * terms, k);
        count = min(terms, k - from);
        behind = part * m;
    }
    let top = group / (band * wide) * band;
    let height = min(tall - min(top, tall), band);
    let within = group % (band * wide);
    if within < height * wide && count > 0 {
        let row0 = (top + within % height) * bm;
        let col0 = within / height * bn;
        let totals = sum::<F, S, A, B>(
            a,
            a_ones,
            b,
            b_ones,
            &mut memory,
            (row0, col0),
            (m, n, k),
            (from, count),
            (a_ld, b_ld),
            (down, right, turn),
            s,
        );
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
                    let at = (behind + row) * ld + column;
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

/// A type of the matrix units.
pub(crate) fn native(dtype: DType) -> ElemType {
    ElemType::Float(if dtype == DType::BF16 { FloatKind::BF16 } else { FloatKind::F16 })
}

/// Whether shared memory holds words.
pub(crate) fn words(gpu: &Gpu) -> bool {
    gpu.capabilities().compiler.contains("spirv")
}

/// How an operand of `lines` lines of `length` elements is read for factors of a type; none where it cannot be.
fn source(t: &Tensor, ld: usize, length: usize, factors: DType, round: bool, padded: bool) -> Option<Source> {
    let wide = match t.dtype() {
        dtype if dtype == factors => false,
        DType::F32 if round => true,
        _ => return None,
    };
    let even = t.offset.is_multiple_of(16) && ld.is_multiple_of(8) && (padded || length.is_multiple_of(8));
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
    pub(super) along: [bool; 2],
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
        let operand = |(t, row, sum): (&Tensor, usize, usize), rows, round, padded| {
            let (along, ld, length) = match (row, sum) {
                (ld, 1) => (true, ld, k),
                (1, ld) => (false, ld, rows),
                _ => return None,
            };
            Some((source(t, ld, length, factors, round, padded)?, along, ld))
        };
        let a = operand(product.a, m, product.round, product.padded)?;
        let b = operand(product.b, n, false, false)?;
        let (sources, along, ld) = ([a.0, b.0], [a.1, b.1], [a.2, b.2]);
        Some(Way { tile, plane, factors, sources, along, ld, words: words(gpu) })
    }

    /// The table's blocks for a product.
    pub(crate) fn choose(&self, gpu: &Gpu, m: usize, n: usize) -> Option<Blocks> {
        shape::choose(gpu.capabilities(), &self.tile, self.plane, self.along, [m, n])
    }

    /// The table's blocks and the terms of a part, where a product of few groups and many terms is faster in parts whose f32 sums, of `bytes` at most, are
    /// added afterwards.
    pub(crate) fn parts(&self, gpu: &Gpu, size: [usize; 3], bytes: usize) -> Option<(Blocks, usize)> {
        shape::parts(gpu.capabilities(), &self.tile, self.plane, self.along, size, bytes)
    }

    /// Whether these blocks run.
    pub(crate) fn fits(&self, gpu: &Gpu, blocks: &Blocks) -> bool {
        blocks.fits(gpu.capabilities(), &self.tile, self.plane, self.along)
    }

    /// `blocks` fit. With fewer `terms` than `k`, a multiple of a slice's, `out` is `(parts, m, n)`, a product of so many terms each.
    pub(crate) fn run(
        &self,
        gpu: &Gpu,
        op: &'static str,
        blocks: Blocks,
        tensors: [&Tensor; 5],
        epilogue: Epilogue,
        [m, n, k]: [usize; 3],
        ld: usize,
        terms: usize,
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
            parted: terms < k,
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
                gpu.grid(tall * wide * k.div_ceil(terms)),
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
                terms,
                epilogue,
                shape,
                elems,
            );
        }
        gpu.launched(op, &[to])
    }
}
