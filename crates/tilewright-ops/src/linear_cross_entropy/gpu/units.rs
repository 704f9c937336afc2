//! The loss head on the matrix units, for factors of 16 bits: blocks of logits that are used where they are made.
//!
//! A group walks the sum as that of a product does and then, a tile of fragments at a time, either takes the logits into the largest and the sum of
//! exponentials of their row, of which it writes a pair for the columns of each plane, or makes them gradients, rounded once: the tile that two
//! products take as it is. Logits themselves are never in memory.

use tilewright_core::{DType, Result};

use super::Tiles;
use crate::Tensor;
use crate::matmul::gpu::Product;
use crate::matmul::gpu::matrix::{Way, native};
use crate::matmul::gpu::shape::Blocks;
use crate::matmul::gpu::slices::{Shape, Slice, Source, sum};
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::pace::ROWS;
use crate::runtime::gpu::prelude::*;

/// What stands below every logit.
const LEAST: f32 = -1.0e30;

/// Columns that a span of the vocabulary has at least; it ends where a group does.
const COLUMNS: usize = 128;

/// How a head runs on the matrix units.
#[derive(Clone, Copy)]
pub(super) struct Units {
    way: Way,
    blocks: Blocks,
}

/// A head's tensors and sizes: `hidden (n, d)`, the first `vocab` rows of `weight`, `targets` of the rows.
#[derive(Clone, Copy)]
pub(super) struct Logits<'a> {
    pub(super) op: &'static str,
    pub(super) hidden: &'a Tensor,
    pub(super) weight: &'a Tensor,
    pub(super) targets: &'a Tensor,
    pub(super) n: usize,
    pub(super) vocab: usize,
    pub(super) d: usize,
    pub(super) ignore: i32,
}

impl Logits<'_> {
    fn flops(&self) -> u64 {
        2 * self.n as u64 * self.vocab as u64 * self.d as u64
    }

    /// Some of its rows.
    fn rows<T>(&self, row: usize, n: usize, with: impl FnOnce(&Logits<'_>) -> Result<T>) -> Result<T> {
        let (hidden, targets) = (self.hidden.slice(row * self.d, &[n, self.d])?, self.targets.slice(row, &[n])?);
        with(&Logits { hidden: &hidden, targets: &targets, n, ..*self })
    }

    /// Some columns of its logits.
    pub(super) fn columns<T>(
        &self,
        first: usize,
        vocab: usize,
        with: impl FnOnce(&Logits<'_>) -> Result<T>,
    ) -> Result<T> {
        let weight = self.weight.slice(first * self.d, &[vocab, self.d])?;
        with(&Logits { weight: &weight, vocab, ..*self })
    }
}

// First row and column of a group's block, as a product has them; row `m` where there are more groups than blocks.
#[cube]
fn block(m: usize, n: usize, #[comptime] s: Shape) -> (usize, usize) {
    let bm = comptime!(s.blocks.group[0]);
    let bn = comptime!(s.blocks.group[1]);
    let band = comptime!(s.blocks.band);
    let (tall, wide) = ((m + bm - 1) / bm, (n + bn - 1) / bn);
    let top = CUBE_POS / (band * wide) * band;
    let height = min(tall - min(top, tall), band);
    let within = CUBE_POS % (band * wide);
    let row = (top + within % max(height, 1usize)) * bm;
    (select(within < height * wide, row, m), within / max(height, 1usize) * bn)
}

// First row and column of a plane within its group.
#[cube]
fn place(#[comptime] s: Shape) -> (usize, usize) {
    let own = PLANE_POS as usize;
    let across = comptime!(s.blocks.group[1] / s.blocks.plane[1]);
    (own / across * comptime!(s.blocks.plane[0]), own % across * comptime!(s.blocks.plane[1]))
}

// Logits of a plane, in fragments; `ones` is never read.
#[cube]
fn logits<F: Numeric, S: Numeric>(
    hidden: &[Pack],
    weight: &[Pack],
    ones: &[i32],
    memory: &mut Shared<[Vector<S, Const<4>>]>,
    row0: usize,
    col0: usize,
    m: usize,
    n: usize,
    k: usize,
    #[comptime] s: Shape,
) -> Sequence<cmma::Matrix<f32>> {
    let (down, right) = place(s);
    sum::<F, S, i32, i32>(
        hidden,
        ones,
        weight,
        ones,
        memory,
        (row0, col0),
        (m, n, k),
        (0usize, k),
        (k, k),
        (down, right, 0usize),
        s,
    )
}

// Writes a tile of a plane's logits to its patch. The plane meets behind it.
#[cube]
fn to_patch(
    totals: &Sequence<cmma::Matrix<f32>>,
    patch: &mut Shared<[Quad]>,
    mine: usize,
    #[comptime] number: usize,
    #[comptime] s: Shape,
) {
    let total = totals.index(number);
    cmma::store(&mut patch[mine..mine + 1], total, comptime!(s.tile[1] as u32), cmma::MatrixLayout::RowMajor);
    sync_plane();
}

// Eight logits of a row from a patch.
#[cube]
fn eight(patch: &Shared<[Quad]>, at: usize, values: &mut Array<f32>) {
    let (low, high) = (patch[at], patch[at + 1]);
    #[unroll]
    for v in 0..4usize {
        values[v] = low.extract(v);
        values[v + 4] = high.extract(v);
    }
}

// Largest logit and sum of exponentials of each row over the columns of each plane, from `first` on; `hits[row]` is the target's logit.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn sums_kernel<F: Numeric, S: Numeric>(
    hidden: &[Pack],
    weight: &[Pack],
    targets: &[i32],
    partials: &mut [f32],
    hits: &mut [f32],
    m: usize,
    n: usize,
    k: usize,
    first: usize,
    parts: usize,
    #[comptime] s: Shape,
    #[define(F, S)] _elems: [ElemType; 2],
) {
    let tm = comptime!(s.tile[0]);
    let tn = comptime!(s.tile[1]);
    let wn = comptime!(s.blocks.plane[1]);
    let fnn = comptime!(wn / tn);
    let mut memory = Shared::<[Vector<S, Const<4>>]>::new_slice(comptime!(
        (s.packs(0) + s.packs(1)) * if s.slices[0].words { 1 } else { 2 }
    ));
    let mut patch = Shared::<[Quad]>::new_slice(comptime!(s.blocks.planes() * tm * tn / 4));
    let (row0, col0) = block(m, n, s);
    if row0 < m {
        let totals = logits::<F, S>(hidden, weight, targets, &mut memory, row0, col0, m, n, k, s);
        let (down, right) = place(s);
        let lane = UNIT_POS_PLANE as usize;
        let mine = PLANE_POS as usize * comptime!(tm * tn / 4);
        let runs = comptime!(tm * tn / 8);
        let part = (first + col0 + right) / wn;
        #[unroll]
        for i in 0..comptime!(s.blocks.plane[0] / tm) {
            let mut most = Array::<f32>::new(comptime!(runs.div_ceil(s.plane)));
            let mut sum = Array::<f32>::new(comptime!(runs.div_ceil(s.plane)));
            #[unroll]
            for x in 0..comptime!(runs.div_ceil(s.plane)) {
                most[x] = f32::new(LEAST);
                sum[x] = 0.0f32;
            }
            #[unroll]
            for j in 0..fnn {
                to_patch(&totals, &mut patch, mine, comptime!(i * fnn + j), s);
                #[unroll]
                for x in 0..comptime!(runs.div_ceil(s.plane)) {
                    // Units beyond the tile's last run do its work once more, and write nothing.
                    let run = min(x * comptime!(s.plane) + lane, comptime!(runs - 1));
                    let row = row0 + down + i * tm + run * 8 / tn;
                    let column = col0 + right + j * tn + run * 8 % tn;
                    let mut values = Array::<f32>::new(8usize);
                    eight(&patch, mine + run * 2, &mut values);
                    let before = most[x];
                    let mut top = before;
                    #[unroll]
                    for v in 0..8usize {
                        top = max(top, select(column + v < n, values[v], f32::new(LEAST)));
                    }
                    let mut total = sum[x] * (before - top).exp();
                    #[unroll]
                    for v in 0..8usize {
                        total += select(column + v < n, (values[v] - top).exp(), 0.0f32);
                    }
                    most[x] = top;
                    sum[x] = total;
                    if x * comptime!(s.plane) + lane < runs && row < m {
                        let target = targets[row] - i32::cast_from(first + column);
                        if target >= 0 {
                            if target < 8 {
                                let mut hit = values[0];
                                #[unroll]
                                for v in 1..8usize {
                                    hit = select(target == comptime!(v as i32), values[v], hit);
                                }
                                hits[row] = hit;
                            }
                        }
                    }
                }
                sync_plane();
            }
            // Runs of one row stand side by side: the first of them takes in the others.
            #[unroll]
            for x in 0..comptime!(runs.div_ceil(s.plane)) {
                let run = x * comptime!(s.plane) + lane;
                if run < runs {
                    let mut pair = Quad::new(0.0f32);
                    pair.insert(0usize, most[x]);
                    pair.insert(1usize, sum[x]);
                    patch[mine + run] = pair;
                }
            }
            sync_plane();
            #[unroll]
            for x in 0..comptime!(runs.div_ceil(s.plane)) {
                let run = x * comptime!(s.plane) + lane;
                let row = row0 + down + i * tm + run * 8 / tn;
                if run < runs && run % comptime!(tn / 8) < 1 && row < m {
                    let mut top = most[x];
                    #[unroll]
                    for y in 1..comptime!(tn / 8) {
                        top = max(top, patch[mine + run + y].extract(0usize));
                    }
                    let mut total = sum[x] * (most[x] - top).exp();
                    #[unroll]
                    for y in 1..comptime!(tn / 8) {
                        let other = patch[mine + run + y];
                        total += other.extract(1usize) * (other.extract(0usize) - top).exp();
                    }
                    let at = (row * parts + part) * 2;
                    partials[at] = top;
                    partials[at + 1] = total;
                }
            }
            sync_plane();
        }
    }
}

// lse = max + ln(sum), loss = (max - target) + ln(sum) of a row's pairs, a group a row; both 0 where the row does not count.
#[cube(launch_unchecked)]
fn join_kernel(
    partials: &[f32],
    hits: &[f32],
    targets: &[i32],
    losses: &mut [f32],
    lse: &mut [f32],
    rows: usize,
    parts: usize,
    ignore: i32,
) {
    let mut shared = Shared::<[f32]>::new_slice(256usize);
    let row = CUBE_POS;
    if row < rows {
        let mut most = f32::new(LEAST);
        let mut part = UNIT_POS as usize;
        while part < parts {
            most = max(most, partials[(row * parts + part) * 2]);
            part += CUBE_DIM as usize;
        }
        let largest = group_max(most, &mut shared);
        let mut sum = 0.0f32;
        let mut part = UNIT_POS as usize;
        while part < parts {
            let at = (row * parts + part) * 2;
            sum += partials[at + 1] * (partials[at] - largest).exp();
            part += CUBE_DIM as usize;
        }
        let log = group_sum(sum, &mut shared).ln();
        if UNIT_POS == 0 {
            let counts = targets[row] != ignore;
            losses[row] = select(counts, (largest - hits[row]) + log, 0.0f32);
            lse[row] = select(counts, largest + log, 0.0f32);
        }
    }
}

// (softmax - onehot) * dloss of columns from `first` on, rounded once, in rows of whole packs; 0 for rows that do not count and behind the last column.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn gradients_kernel<F: Numeric, S: Numeric>(
    hidden: &[Pack],
    weight: &[Pack],
    targets: &[i32],
    lse: &[f32],
    tile: &mut [Pack],
    m: usize,
    n: usize,
    k: usize,
    first: usize,
    ignore: i32,
    dloss: f32,
    #[comptime] s: Shape,
    #[define(F, S)] _elems: [ElemType; 2],
) {
    let tm = comptime!(s.tile[0]);
    let tn = comptime!(s.tile[1]);
    let wn = comptime!(s.blocks.plane[1]);
    let fnn = comptime!(wn / tn);
    let mut memory = Shared::<[Vector<S, Const<4>>]>::new_slice(comptime!(
        (s.packs(0) + s.packs(1)) * if s.slices[0].words { 1 } else { 2 }
    ));
    let mut patch = Shared::<[Quad]>::new_slice(comptime!(s.blocks.planes() * tm * tn / 4));
    let (row0, col0) = block(m, n, s);
    if row0 < m {
        let totals = logits::<F, S>(hidden, weight, targets, &mut memory, row0, col0, m, n, k, s);
        let (down, right) = place(s);
        let lane = UNIT_POS_PLANE as usize;
        let mine = PLANE_POS as usize * comptime!(tm * tn / 4);
        let runs = comptime!(tm * tn / 8);
        let line = (n + 7) / 8;
        let mut values = Array::<f32>::new(8usize);
        #[unroll]
        for i in 0..comptime!(s.blocks.plane[0] / tm) {
            #[unroll]
            for j in 0..fnn {
                to_patch(&totals, &mut patch, mine, comptime!(i * fnn + j), s);
                #[unroll]
                for x in 0..comptime!(runs.div_ceil(s.plane)) {
                    let run = x * comptime!(s.plane) + lane;
                    let row = row0 + down + i * tm + run * 8 / tn;
                    let column = col0 + right + j * tn + run * 8 % tn;
                    if run < runs && row < m && column < n {
                        eight(&patch, mine + run * 2, &mut values);
                        let (target, log) = (targets[row], lse[row]);
                        #[unroll]
                        for v in 0..8usize {
                            let hit = select(i32::cast_from(first + column + v) == target, 1.0f32, 0.0f32);
                            let gradient = ((values[v] - log).exp() - hit) * dloss;
                            values[v] = select(target != ignore && column + v < n, gradient, 0.0f32);
                        }
                        tile[row * line + column / 8] = packed(&values, comptime!(s.slices[0].bf16));
                    }
                }
                sync_plane();
            }
        }
    }
}

impl Units {
    /// None where a factor is not of 16 bits or not read by eight elements, or the device has no such units.
    pub(super) fn of(gpu: &Gpu, head: &Logits<'_>) -> Option<Units> {
        let (hidden, weight, d) = (head.hidden, head.weight, head.d);
        let product = Product::plain((hidden, d, 1), (weight, d, 1), (hidden, d));
        let way = Way::of(gpu, &product, [head.n, head.vocab, d])?;
        if way.sources != [Source::Packs; 2] {
            return None;
        }
        let blocks = Blocks { split: 1, ..way.choose(gpu, head.n, head.vocab)? };
        way.fits(gpu, &blocks).then_some(Units { way, blocks })
    }

    fn shape(&self, head: &Logits<'_>) -> Shape {
        let Units { way, blocks } = *self;
        let slice = |operand, rows| Slice::of(&way, &blocks, operand, [rows, head.d]);
        let tile = [way.tile.m, way.tile.n, way.tile.k];
        let slices = [slice(0, head.n), slice(1, head.vocab)];
        Shape { blocks, tile, plane: way.plane, slices, even: true, wide: [false; 3], parted: false }
    }

    fn elems(&self) -> [ElemType; 2] {
        let factor = native(self.way.factors);
        [factor, if self.way.words { ElemType::UInt(UIntKind::U32) } else { factor }]
    }

    fn dim(&self) -> CubeDim {
        CubeDim::new_1d((self.blocks.planes() * self.way.plane) as u32)
    }

    fn groups(&self, n: usize, columns: usize) -> usize {
        n.div_ceil(self.blocks.group[0]) * columns.div_ceil(self.blocks.group[1])
    }

    /// Pairs of a row.
    fn parts(&self, vocab: usize) -> usize {
        vocab.div_ceil(self.blocks.group[1]) * (self.blocks.group[1] / self.blocks.plane[1])
    }

    /// Losses and log-sum-exps of all rows.
    pub(super) fn forward(
        &self,
        gpu: &Gpu,
        head: &Logits<'_>,
        tiles: &Tiles,
        [losses, lse]: [&Tensor; 2],
        workspace: &Tensor,
    ) -> Result<()> {
        let parts = self.parts(head.vocab);
        let most = tiles.sum_rows(parts);
        let hits = workspace.reinterpret(tiles.partials_bytes(), DType::F32, &[head.n.min(most)])?;
        for row in (0..head.n).step_by(most) {
            let rows = most.min(head.n - row);
            let partials = workspace.reinterpret(0, DType::F32, &[rows, parts, 2])?;
            let [losses, lse] = [losses.slice(row, &[rows])?, lse.slice(row, &[rows])?];
            head.rows(row, rows, |head| {
                self.sums(gpu, head, [&partials, &hits])?;
                let arg = |t: &Tensor| gpu.arg(head.op, t);
                // SAFETY: `parts` pairs a row; one element a row of the others.
                unsafe {
                    join_kernel::launch_unchecked(
                        gpu.client(),
                        gpu.grid(rows),
                        CubeDim::new_1d(UNITS),
                        arg(&partials)?,
                        arg(&hits)?,
                        arg(head.targets)?,
                        arg(&losses)?,
                        arg(&lse)?,
                        rows,
                        parts,
                        head.ignore,
                    );
                }
                gpu.launched(head.op, &[&losses, &lse])
            })?;
        }
        Ok(())
    }

    /// In launches that hold the GPU no longer than they may: of some columns where few rows are too much already.
    fn sums(&self, gpu: &Gpu, head: &Logits<'_>, [partials, hits]: [&Tensor; 2]) -> Result<()> {
        let parts = self.parts(head.vocab);
        let flops = head.flops() / head.n as u64 * head.n.min(ROWS) as u64;
        let span =
            gpu.rows_at_once(self.way.factors, head.vocab, COLUMNS.next_multiple_of(self.blocks.group[1]), flops);
        for first in (0..head.vocab).step_by(span) {
            head.columns(first, span.min(head.vocab - first), |head| {
                gpu.by_rows(self.way.factors, (head.n, ROWS), head.flops(), |row, rows| {
                    let partials = partials.slice(row * parts * 2, &[rows, parts, 2])?;
                    let hits = hits.slice(row, &[rows])?;
                    head.rows(row, rows, |head| self.sums_launch(gpu, head, first, parts, [&partials, &hits]))
                })
            })?;
        }
        Ok(())
    }

    fn sums_launch(
        &self,
        gpu: &Gpu,
        head: &Logits<'_>,
        first: usize,
        parts: usize,
        [partials, hits]: [&Tensor; 2],
    ) -> Result<()> {
        let Logits { op, n, vocab, d, .. } = *head;
        // SAFETY: rows and columns are those of the tensors; `partials` has `parts` pairs a row, one for each plane's columns.
        unsafe {
            sums_kernel::launch_unchecked(
                gpu.client(),
                gpu.grid(self.groups(n, vocab)),
                self.dim(),
                as_packs(gpu, op, head.hidden)?,
                as_packs(gpu, op, head.weight)?,
                gpu.arg(op, head.targets)?,
                gpu.arg(op, partials)?,
                gpu.arg(op, hits)?,
                n,
                vocab,
                d,
                first,
                parts,
                self.shape(head),
                self.elems(),
            );
        }
        gpu.launched(op, &[partials, hits])
    }

    /// Gradients of the logits, whose first column is `first` of the vocabulary, into `tile`: rows of whole packs.
    pub(super) fn gradients(
        &self,
        gpu: &Gpu,
        head: &Logits<'_>,
        first: usize,
        lse: &Tensor,
        dloss: f32,
        tile: &Tensor,
    ) -> Result<()> {
        let line = head.vocab.next_multiple_of(8);
        gpu.by_rows(self.way.factors, (head.n, ROWS), head.flops(), |row, rows| {
            let (lse, tile) = (lse.slice(row, &[rows])?, tile.slice(row * line, &[rows, line])?);
            head.rows(row, rows, |head| {
                let Logits { op, n, vocab, d, .. } = *head;
                // SAFETY: rows and columns are those of the tensors; a row of the tile is as many whole packs as hold the columns.
                unsafe {
                    gradients_kernel::launch_unchecked(
                        gpu.client(),
                        gpu.grid(self.groups(n, vocab)),
                        self.dim(),
                        as_packs(gpu, op, head.hidden)?,
                        as_packs(gpu, op, head.weight)?,
                        gpu.arg(op, head.targets)?,
                        gpu.arg(op, &lse)?,
                        as_packs(gpu, op, &tile)?,
                        n,
                        vocab,
                        d,
                        first,
                        head.ignore,
                        dloss,
                        self.shape(head),
                        self.elems(),
                    );
                }
                gpu.launched(op, &[&tile])
            })
        })
    }
}
