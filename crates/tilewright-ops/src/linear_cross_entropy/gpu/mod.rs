//! The loss head through Vulkan and Metal. Factors of 16 bits on the matrix units have kernels of their own (`units.rs`), which keep no logits; elsewhere
//! there are tiles of f32 logits by the tiled product, and reductions over their rows.
//!
//! `forward` walks the vocabulary with an online log-sum-exp. `backward` makes the logits of a tile again for all rows, so that a tile of `dweight`
//! is summed by one product, and so many columns at a time that the product fills a GPU. `forward_backward` is one after the other.

mod units;

use tilewright_core::{DType, Result};

use super::{Backward, Forward, ForwardBackward};
use crate::Tensor;
use crate::matmul::gpu::{Product, shape};
use crate::runtime::gpu::prelude::*;
use crate::runtime::gpu::{Gpu, pace};
use units::{Logits, Units};

/// Rows and columns of a tile of logits, at most: 16 MiB.
const TILE_ROWS: usize = 1024;
const TILE_COLUMNS: usize = 4096;

/// Bytes of the pairs of sums of a chunk of rows, at most (but always `LEAST_ROWS` rows).
const PARTIALS_BYTES: usize = 16 << 20;
const LEAST_ROWS: usize = pace::ROWS;

/// Bytes of a tile of all rows, at most (but always [`LEAST_BYTES`] a row, and never more than [`MOST_BYTES`]). At 4096 rows it is 8192 columns of
/// 16 bits: products of fewer columns do not fill a large GPU.
const TALL_BYTES: usize = 64 << 20;
const LEAST_BYTES: usize = 2048;
const MOST_BYTES: usize = 16_384;

/// Block sizes of a call and the sizes that they follow from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiles {
    n: usize,
    d: usize,
    vp: usize,
    /// Rows and columns of the caller's choice: tests reach many tiles with few numbers.
    asked: Option<[usize; 2]>,
    /// Gradients of logits are rounded to f16 too: asked for by tests alone, where the matrix units know no bf16.
    rounds_f16: bool,
}

impl Tiles {
    pub(super) fn new(n: usize, d: usize, vp: usize, asked: Option<[usize; 2]>) -> Self {
        // Tiles start where every device can bind them, whatever the width and the type of a row.
        let asked = asked.map(|sizes| sizes.map(|size| size.div_ceil(16).saturating_mul(16)));
        Tiles { n, d, vp, asked, rounds_f16: false }
    }

    /// The same with gradients of logits in f16 where factors are.
    #[cfg(test)]
    pub(super) fn rounding_f16(self) -> Self {
        Tiles { rounds_f16: true, ..self }
    }

    fn rows(&self) -> usize {
        self.asked.map_or(TILE_ROWS, |a| a[0]).min(self.n).max(1)
    }

    fn columns(&self) -> usize {
        self.asked.map_or(TILE_COLUMNS, |a| a[1]).min(self.vp).max(1)
    }

    /// Columns of the tile of all rows that `backward` makes, of elements of so many bytes.
    fn tall_columns(&self, size: usize) -> usize {
        let fit = (TALL_BYTES / self.n.max(1)).clamp(LEAST_BYTES, MOST_BYTES) / size / 128 * 128;
        self.asked.map_or(fit, |a| a[1]).min(self.vp).max(1)
    }

    /// Bytes of that tile, whichever elements it has.
    fn tall_bytes(&self) -> usize {
        part(self.n * self.tall_columns(4)).max(part(self.n * self.tall_columns(2).next_multiple_of(8) / 2))
    }

    /// Bytes of the pairs of sums of a chunk of rows, whichever blocks a device has.
    pub(super) fn partials_bytes(&self) -> usize {
        // Parts of eight columns or more, groups of 128 or fewer.
        let pairs = self.vp.div_ceil(128) * 16;
        let least = self.n.min(LEAST_ROWS) * pairs;
        part(2 * least.max((self.n * pairs).min(PARTIALS_BYTES / 8)))
    }

    /// Rows of such a chunk of `parts` pairs each.
    pub(super) fn sum_rows(&self, parts: usize) -> usize {
        let fit = (self.partials_bytes() / 8 / parts.max(1)).max(1);
        let whole = if fit >= self.n { self.n } else { (fit / LEAST_ROWS).max(1) * LEAST_ROWS };
        self.asked.map_or(whole, |a| whole.min(a[0])).max(1)
    }

    /// Bytes of the workspace of each entry.
    pub(super) fn forward_bytes(&self) -> usize {
        let tiles = part(3 * self.rows()) + part(self.rows() * self.columns());
        tiles.max(self.partials_bytes() + part(self.n))
    }

    pub(super) fn backward_bytes(&self) -> usize {
        self.tall_bytes() + part(self.n * self.d)
    }

    pub(super) fn training_bytes(&self) -> usize {
        part(self.n) + self.forward_bytes().max(self.backward_bytes())
    }
}

/// Bytes of so many elements of 4 bytes, up to where the next part starts.
fn part(elements: usize) -> usize {
    (elements * 4).next_multiple_of(256)
}

// max, sum of exp(logit - max), the target's logit: one of each a row, one array after the other.
#[cube(launch_unchecked)]
fn begin_kernel(stats: &mut [f32], rows: usize) {
    let row = ABSOLUTE_POS;
    if row < rows {
        stats[row] = -1.0e30f32;
        stats[rows + row] = 0.0f32;
        stats[2 * rows + row] = 0.0f32;
    }
}

// Takes in a tile of logits (rows, columns from `first` on), a group a row: the maximum first, then the sum.
#[cube(launch_unchecked)]
fn absorb_kernel(tile: &[f32], targets: &[i32], stats: &mut [f32], rows: usize, columns: usize, first: usize) {
    let mut shared = Shared::<[f32]>::new_slice(256usize);
    let row = CUBE_POS;
    if row < rows {
        // Read by the unit alone that writes it: the barriers on the way order the group's memory, not the device's.
        let mut before = f32::new(-1.0e30f32);
        if UNIT_POS == 0 {
            before = stats[row];
        }
        let mut most = before;
        let mut j = UNIT_POS as usize;
        while j < columns {
            most = max(most, tile[row * columns + j]);
            j += CUBE_DIM as usize;
        }
        let largest = group_max(most, &mut shared);
        let mut sum = 0.0f32;
        let mut j = UNIT_POS as usize;
        while j < columns {
            sum += (tile[row * columns + j] - largest).exp();
            j += CUBE_DIM as usize;
        }
        let total = group_sum(sum, &mut shared);
        if UNIT_POS == 0 {
            stats[row] = largest;
            stats[rows + row] = total + stats[rows + row] * (before - largest).exp();
            let target = targets[row];
            if target >= i32::cast_from(first) {
                if target < i32::cast_from(first + columns) {
                    stats[2 * rows + row] = tile[row * columns + usize::cast_from(target) - first];
                }
            }
        }
    }
}

// lse = max + ln(sum), loss = (max - target) + ln(sum); both 0 where the row does not count.
#[cube(launch_unchecked)]
fn finish_kernel(stats: &[f32], targets: &[i32], losses: &mut [f32], lse: &mut [f32], rows: usize, ignore: i32) {
    let row = ABSOLUTE_POS;
    if row < rows {
        let counts = targets[row] != ignore;
        let log = stats[rows + row].ln();
        losses[row] = select(counts, (stats[row] - stats[2 * rows + row]) + log, 0.0f32);
        lse[row] = select(counts, stats[row] + log, 0.0f32);
    }
}

// (softmax - onehot) * dloss in place of the logits of columns from `first` on; 0 for rows that do not count.
#[cube(launch_unchecked)]
fn gradients_kernel(
    tile: &mut [f32],
    targets: &[i32],
    lse: &[f32],
    rows: usize,
    columns: usize,
    first: usize,
    ignore: i32,
    dloss: f32,
) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = ABSOLUTE_POS;
    while i < rows * columns {
        let (row, j) = (i / columns, i % columns);
        let target = targets[row];
        let p = (tile[i] - lse[row]).exp();
        let hit = select(i32::cast_from(first + j) == target, 1.0f32, 0.0f32);
        tile[i] = select(target != ignore, (p - hit) * dloss, 0.0f32);
        i += step;
    }
}

// out = sums, rounded once.
#[cube(launch_unchecked)]
fn store_kernel<E: Numeric>(
    sums: &[f32],
    out: &mut [E],
    n: usize,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = ABSOLUTE_POS;
    while i < n {
        out[i] = narrow::<E>(sums[i], bf16);
        i += step;
    }
}

/// What the three entries hand down.
#[derive(Clone, Copy)]
struct Head<'a> {
    op: &'static str,
    gpu: &'a Gpu,
    hidden: &'a Tensor,
    weight: &'a Tensor,
    vocab: usize,
    targets: &'a Tensor,
    ignore: i32,
}

/// Where gradients go.
struct Outputs<'a> {
    dloss: f32,
    dhidden: &'a Tensor,
    dweight: &'a Tensor,
    accumulate: bool,
}

impl Head<'_> {
    fn arg(&self, t: &Tensor) -> Result<BufferArg> {
        self.gpu.arg(self.op, t)
    }

    /// Logits of `rows` rows from `row` on and `columns` columns from `first` on into `tile`.
    fn logits(&self, row: usize, rows: usize, first: usize, columns: usize, tile: &Tensor) -> Result<()> {
        let d = self.weight.shape().as_matrix().1;
        let hidden = self.hidden.slice(row * d, &[rows, d])?;
        let weight = self.weight.slice(first * d, &[columns, d])?;
        Product::plain((&hidden, d, 1), (&weight, d, 1), (tile, columns)).run(self.gpu, self.op, rows, columns, d)
    }

    /// What its logits are made of, and how on the matrix units.
    fn on_units(&self, tiles: &Tiles) -> Option<(Logits<'_>, Units)> {
        let Head { op, gpu, hidden, weight, vocab, targets, ignore } = *self;
        let logits = Logits { op, hidden, weight, targets, n: tiles.n, vocab, d: tiles.d, ignore };
        Units::of(gpu, &logits).map(|units| (logits, units))
    }

    fn forward(&self, tiles: &Tiles, losses: &Tensor, lse: &Tensor, workspace: &Tensor) -> Result<()> {
        if let Some((logits, units)) = self.on_units(tiles) {
            return units.forward(self.gpu, &logits, tiles, [losses, lse], workspace);
        }
        let (gpu, units) = (self.gpu, CubeDim::new_1d(UNITS));
        let (most_rows, most_columns) = (tiles.rows(), tiles.columns());
        for row in (0..tiles.n).step_by(most_rows) {
            let rows = most_rows.min(tiles.n - row);
            let stats = workspace.reinterpret(0, DType::F32, &[3 * rows])?;
            let targets = self.targets.slice(row, &[rows])?;
            let spread = || gpu.grid(rows.div_ceil(UNITS as usize));
            // SAFETY: `stats` has three numbers a row.
            unsafe { begin_kernel::launch_unchecked(gpu.client(), spread(), units, self.arg(&stats)?, rows) };
            gpu.launched(self.op, &[&stats])?;
            for first in (0..self.vocab).step_by(most_columns) {
                let columns = most_columns.min(self.vocab - first);
                let tile = workspace.reinterpret(part(3 * most_rows), DType::F32, &[rows, columns])?;
                self.logits(row, rows, first, columns, &tile)?;
                let (logits, ids, to) = (self.arg(&tile)?, self.arg(&targets)?, self.arg(&stats)?);
                // SAFETY: the tile is `(rows, columns)`.
                unsafe {
                    absorb_kernel::launch_unchecked(
                        gpu.client(),
                        gpu.grid(rows),
                        units,
                        logits,
                        ids,
                        to,
                        rows,
                        columns,
                        first,
                    );
                }
                gpu.launched(self.op, &[&stats])?;
            }
            let [losses, lse] = [losses.slice(row, &[rows])?, lse.slice(row, &[rows])?];
            let (from, ids) = (self.arg(&stats)?, self.arg(&targets)?);
            let (to, logs) = (self.arg(&losses)?, self.arg(&lse)?);
            // SAFETY: one element a row each.
            unsafe {
                finish_kernel::launch_unchecked(gpu.client(), spread(), units, from, ids, to, logs, rows, self.ignore);
            }
            gpu.launched(self.op, &[&losses, &lse])?;
        }
        Ok(())
    }

    /// Gradients in place of the logits of all rows and of columns from `first` on.
    fn gradients(&self, first: usize, columns: usize, lse: &Tensor, dloss: f32, tile: &Tensor) -> Result<()> {
        let (gpu, n) = (self.gpu, tile.numel() / columns);
        // SAFETY: the tile is `(n, columns)`.
        unsafe {
            gradients_kernel::launch_unchecked(
                gpu.client(),
                gpu.spread(n * columns),
                CubeDim::new_1d(UNITS),
                self.arg(tile)?,
                self.arg(self.targets)?,
                self.arg(lse)?,
                n,
                columns,
                first,
                self.ignore,
                dloss,
            );
        }
        gpu.launched(self.op, &[tile])
    }

    fn backward(&self, tiles: &Tiles, lse: &Tensor, out: &Outputs<'_>, workspace: &Tensor) -> Result<()> {
        let (gpu, units) = (self.gpu, CubeDim::new_1d(UNITS));
        let Tiles { n, d, vp, .. } = *tiles;
        if !out.accumulate {
            // Padding, or everything where no row adds to it.
            let kept = if n == 0 { 0 } else { self.vocab };
            out.dweight.slice(kept * d, &[vp - kept, d])?.zero();
        }
        if n == 0 {
            return Ok(());
        }
        let rounds = out.dhidden.dtype() != DType::F32;
        let sums = if rounds {
            workspace.reinterpret(tiles.tall_bytes(), DType::F32, &[n, d])?
        } else {
            out.dhidden.view(&[n, d])?
        };
        // Gradients of logits are rounded for the matrix units. In f16 those of a mean over many tokens would lose digits.
        let factors = self.weight.dtype();
        let short = self.hidden.dtype() == factors && (factors == DType::BF16 || tiles.rounds_f16);
        let fused = self.on_units(tiles).filter(|_| short && workspace.offset.is_multiple_of(16));
        let round = short && shape::tile(gpu.capabilities(), factors).is_some();
        let most = tiles.tall_columns(if fused.is_some() { 2 } else { 4 });
        let mut first = 0;
        while first < self.vocab {
            let columns = most.min(self.vocab - first);
            let (tile, line) = if let Some((logits, units)) = &fused {
                let line = columns.next_multiple_of(8);
                let tile = workspace.reinterpret(0, factors, &[n, line])?;
                logits.columns(first, columns, |part| units.gradients(gpu, part, first, lse, out.dloss, &tile))?;
                (tile, line)
            } else {
                let tile = workspace.reinterpret(0, DType::F32, &[n, columns])?;
                self.logits(0, n, first, columns, &tile)?;
                self.gradients(first, columns, lse, out.dloss, &tile)?;
                (tile, columns)
            };
            let weight = self.weight.slice(first * d, &[columns, d])?;
            let dweight = out.dweight.slice(first * d, &[columns, d])?;
            let product = Product {
                accumulate: first > 0,
                round,
                padded: fused.is_some(),
                ..Product::plain((&tile, line, 1), (&weight, 1, d), (&sums, d))
            };
            product.run(gpu, self.op, n, d, columns)?;
            let product = Product {
                accumulate: out.accumulate,
                round,
                padded: fused.is_some(),
                ..Product::plain((&tile, 1, line), (self.hidden, 1, d), (&dweight, d))
            };
            product.run(gpu, self.op, columns, d, n)?;
            first += columns;
        }
        if rounds {
            let Storage { elem, bf16 } = gpu.storage(self.op, out.dhidden.dtype())?;
            let (from, to) = (self.arg(&sums)?, self.arg(out.dhidden)?);
            // SAFETY: both have `n * d` elements.
            unsafe {
                store_kernel::launch_unchecked(gpu.client(), gpu.spread(n * d), units, from, to, n * d, bf16, elem)
            };
            gpu.launched(self.op, &[out.dhidden])?;
        }
        Ok(())
    }
}

/// Whether logits are made on the matrix units.
#[cfg(test)]
pub(super) fn is_on_units(gpu: &Gpu, args: &ForwardBackward<'_>, tiles: &Tiles) -> bool {
    let ForwardBackward { hidden, weight, vocab, targets, ignore_index: ignore, .. } = *args;
    Head { op: "linear_cross_entropy", gpu, hidden, weight, vocab, targets, ignore }.on_units(tiles).is_some()
}

pub(super) fn forward(gpu: &Gpu, args: &Forward<'_>, tiles: &Tiles) -> Result<()> {
    let Forward { hidden, weight, vocab, targets, ignore_index: ignore, losses, lse, workspace } = *args;
    let head = Head { op: "linear_cross_entropy.forward", gpu, hidden, weight, vocab, targets, ignore };
    head.forward(tiles, losses, lse, workspace)
}

pub(super) fn backward(gpu: &Gpu, args: &Backward<'_>, tiles: &Tiles) -> Result<()> {
    let Backward { hidden, weight, vocab, targets, ignore_index: ignore, lse, dloss, dhidden, dweight, .. } = *args;
    let head = Head { op: "linear_cross_entropy.backward", gpu, hidden, weight, vocab, targets, ignore };
    let out = Outputs { dloss, dhidden, dweight, accumulate: args.accumulate_dweight };
    head.backward(tiles, lse, &out, args.workspace)
}

pub(super) fn forward_backward(gpu: &Gpu, args: &ForwardBackward<'_>, tiles: &Tiles) -> Result<()> {
    let ForwardBackward { hidden, weight, vocab, targets, ignore_index: ignore, losses, dloss, .. } = *args;
    let head = Head { op: "linear_cross_entropy.forward_backward", gpu, hidden, weight, vocab, targets, ignore };
    let out = Outputs { dloss, dhidden: args.dhidden, dweight: args.dweight, accumulate: args.accumulate_dweight };
    let lse = args.workspace.reinterpret(0, DType::F32, &[tiles.n])?;
    let rest = args.workspace.bytes() - part(tiles.n);
    let rest = args.workspace.reinterpret(part(tiles.n), DType::U8, &[rest])?;
    head.forward(tiles, losses, &lse, &rest)?;
    head.backward(tiles, &lse, &out, &rest)
}
