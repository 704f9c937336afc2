//! The loss head through Vulkan and Metal: tiles of f32 logits by the tiled product, reductions over their rows.
//!
//! `forward` walks vocabulary tiles with an online log-sum-exp. `backward` makes each tile again for all rows, so that a tile of `dweight`
//! is summed by one product. `forward_backward` is one after the other.

use tilewright_core::{DType, Result};

use super::{Backward, Forward, ForwardBackward};
use crate::Tensor;
use crate::matmul::gpu::{Product, shape};
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;

/// Rows and columns of a tile of logits, at most: 16 MiB.
const TILE_ROWS: usize = 1024;
const TILE_COLUMNS: usize = 4096;

/// Block sizes of a call and the sizes that they follow from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiles {
    n: usize,
    d: usize,
    vp: usize,
    /// Rows and columns of the caller's choice: tests reach many tiles with few numbers.
    asked: Option<[usize; 2]>,
}

impl Tiles {
    pub(super) fn new(n: usize, d: usize, vp: usize, asked: Option<[usize; 2]>) -> Self {
        // Tiles start where every device can bind them, whatever the width and the type of a row.
        let asked = asked.map(|sizes| sizes.map(|size| size.div_ceil(16).saturating_mul(16)));
        Tiles { n, d, vp, asked }
    }

    fn rows(&self) -> usize {
        self.asked.map_or(TILE_ROWS, |a| a[0]).min(self.n).max(1)
    }

    fn columns(&self) -> usize {
        self.asked.map_or(TILE_COLUMNS, |a| a[1]).min(self.vp).max(1)
    }

    /// Columns of the tile of all rows that `backward` makes.
    fn tall_columns(&self) -> usize {
        let fit = (TILE_ROWS * TILE_COLUMNS / self.n.max(1)).next_multiple_of(64);
        self.asked.map_or(fit.clamp(64, TILE_COLUMNS), |a| a[1]).min(self.vp).max(1)
    }

    /// Bytes of the workspace of each entry.
    pub(super) fn forward_bytes(&self) -> usize {
        part(3 * self.rows()) + part(self.rows() * self.columns())
    }

    pub(super) fn backward_bytes(&self) -> usize {
        part(self.n * self.tall_columns()) + part(self.n * self.d)
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
fn finish_kernel(
    stats: &[f32],
    targets: &[i32],
    losses: &mut [f32],
    lse: &mut [f32],
    rows: usize,
    ignore: i32,
    #[comptime] with_losses: bool,
) {
    let row = ABSOLUTE_POS;
    if row < rows {
        let counts = targets[row] != ignore;
        let log = stats[rows + row].ln();
        if comptime![with_losses] {
            losses[row] = select(counts, (stats[row] - stats[2 * rows + row]) + log, 0.0f32);
        }
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

    fn forward(&self, tiles: &Tiles, losses: Option<&Tensor>, lse: &Tensor, workspace: &Tensor) -> Result<()> {
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
            let lse = lse.slice(row, &[rows])?;
            let losses = losses.map(|l| l.slice(row, &[rows])).transpose()?;
            let (from, ids) = (self.arg(&stats)?, self.arg(&targets)?);
            let (to, logs) = (self.arg(losses.as_ref().unwrap_or(&lse))?, self.arg(&lse)?);
            let with = losses.is_some();
            // SAFETY: one element a row each.
            unsafe {
                finish_kernel::launch_unchecked(
                    gpu.client(),
                    spread(),
                    units,
                    from,
                    ids,
                    to,
                    logs,
                    rows,
                    self.ignore,
                    with,
                );
            }
            gpu.launched(self.op, &[&lse])?;
        }
        Ok(())
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
        let most = tiles.tall_columns();
        let rounds = out.dhidden.dtype() != DType::F32;
        let sums = if rounds {
            workspace.reinterpret(part(n * most), DType::F32, &[n, d])?
        } else {
            out.dhidden.view(&[n, d])?
        };
        // Gradients of logits are rounded on their way to the matrix units. In f16 those of a mean over many tokens would lose digits.
        let short = [self.weight, self.hidden].iter().all(|t| t.dtype() == DType::BF16);
        let round = short && shape::tile(gpu.capabilities(), DType::BF16).is_some();
        for first in (0..self.vocab).step_by(most) {
            let columns = most.min(self.vocab - first);
            let tile = workspace.reinterpret(0, DType::F32, &[n, columns])?;
            self.logits(0, n, first, columns, &tile)?;
            let (grad, ids, logs) = (self.arg(&tile)?, self.arg(self.targets)?, self.arg(lse)?);
            // SAFETY: the tile is `(n, columns)`.
            unsafe {
                let grid = gpu.spread(n * columns);
                let (ignore, dloss) = (self.ignore, out.dloss);
                gradients_kernel::launch_unchecked(
                    gpu.client(),
                    grid,
                    units,
                    grad,
                    ids,
                    logs,
                    n,
                    columns,
                    first,
                    ignore,
                    dloss,
                );
            }
            gpu.launched(self.op, &[&tile])?;
            let weight = self.weight.slice(first * d, &[columns, d])?;
            let dweight = out.dweight.slice(first * d, &[columns, d])?;
            let product = Product {
                accumulate: first > 0,
                round,
                ..Product::plain((&tile, columns, 1), (&weight, 1, d), (&sums, d))
            };
            product.run(gpu, self.op, n, d, columns)?;
            let product = Product {
                accumulate: out.accumulate,
                round,
                ..Product::plain((&tile, 1, columns), (self.hidden, 1, d), (&dweight, d))
            };
            product.run(gpu, self.op, columns, d, n)?;
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

pub(super) fn forward(gpu: &Gpu, args: &Forward<'_>, tiles: &Tiles) -> Result<()> {
    let Forward { hidden, weight, vocab, targets, ignore_index: ignore, losses, lse, workspace } = *args;
    let head = Head { op: "linear_cross_entropy.forward", gpu, hidden, weight, vocab, targets, ignore };
    head.forward(tiles, Some(losses), lse, workspace)
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
    head.forward(tiles, Some(losses), &lse, &rest)?;
    head.backward(tiles, &lse, &out, &rest)
}
