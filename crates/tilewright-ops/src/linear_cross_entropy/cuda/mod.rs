//! The loss head on CUDA: tiles of f32 logits by cuBLASLt in a buffer that stays in the second-level cache, and reductions over their rows.
//!
//! `forward` walks vocabulary tiles. `backward` makes each tile again for all rows, so that a tile of `dweight` is summed by one product, and sums
//! `dhidden` in f32. `forward_backward` keeps the logits of a chunk of rows (16 bits where the weight has 16) and makes gradients from them.
//! On Hopper `forward` of 16-bit factors and `forward_backward` in bf16 have their own kernels (`hopper`); the rest is for every chip.

mod hopper;

use tilewright_core::{DType, Result};

use self::hopper::Plan;
pub(crate) use self::hopper::SOURCE as HOPPER;
use super::{Backward, Forward, ForwardBackward};
use crate::Tensor;
use crate::matmul::cuda::General;
use crate::runtime::cuda::source::code;
use crate::runtime::cuda::{Arg, Cuda, Source};

pub(crate) static SOURCE: Source = Source {
    name: "linear_cross_entropy/rows.cu",
    text: include_str!("rows.cu"),
    parameters: &["TW_KEPT", "TW_GRAD"],
    variants: &[&[0, 0], &[1, 1], &[1, 2]],
    exact: false,
};

/// Rows and columns of a tile of logits: 32 MiB of f32, which the second-level cache of large chips holds.
const TILE_ROWS: usize = 4096;
const TILE_COLUMNS: usize = 2048;
/// Bytes of logits kept, at most (but always one row).
const KEPT_BYTES: usize = 416 << 20;
/// Bytes of f32 sums of a 16-bit `dweight`, at most; above it `forward_backward` makes the logits twice instead.
const SUM_BYTES: usize = 256 << 20;

/// Block sizes of a call and the sizes that they follow from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiles {
    n: usize,
    d: usize,
    vp: usize,
    /// Rows and columns of the caller's choice: tests reach many tiles with few numbers.
    asked: Option<[usize; 2]>,
}

/// Rows of tiles start on 256 bytes.
fn stride(columns: usize) -> usize {
    columns.next_multiple_of(64)
}

impl Tiles {
    pub(super) fn new(n: usize, d: usize, vp: usize, asked: Option<[usize; 2]>) -> Self {
        Tiles { n, d, vp, asked }
    }

    fn columns(&self) -> usize {
        self.asked.map_or(TILE_COLUMNS, |a| a[1]).min(self.vp).max(1)
    }

    fn tile_rows(&self) -> usize {
        self.asked.map_or(TILE_ROWS, |a| a[0]).min(self.n).max(1)
    }

    /// Columns of the tile of all rows that `backward` makes.
    fn tall_columns(&self) -> usize {
        let fit = (TILE_ROWS * TILE_COLUMNS / self.n.max(1)).next_multiple_of(128);
        self.asked.map_or(fit.clamp(256, 4 * TILE_COLUMNS), |a| a[1]).min(self.vp).max(1)
    }

    /// Rows of a chunk whose logits are kept in `bytes` bytes each; all chunks nearly alike.
    fn chunk(&self, bytes: usize) -> usize {
        let fit = (KEPT_BYTES / (stride(self.vp) * bytes)).max(1);
        let most = self.asked.map_or(if fit > 128 { fit / 128 * 128 } else { fit }, |a| a[0]).min(self.n).max(1);
        let even = self.n.div_ceil(self.n.div_ceil(most).max(1)).max(1);
        if self.asked.is_none() { even.next_multiple_of(128).min(most) } else { most }
    }

    /// Whether `forward_backward` goes over the rows once.
    fn one_walk(&self) -> bool {
        self.chunk(4) >= self.n || self.vp * self.d * 4 <= SUM_BYTES
    }

    /// Bytes of workspace on a device, for whichever way a call goes there.
    pub(super) fn forward_bytes(&self, cuda: &Cuda) -> usize {
        self.portable_forward_bytes().max(Plan::of(cuda, self).map_or(0, |p| p.forward_bytes()))
    }

    /// As [`Tiles::forward_bytes`].
    pub(super) fn training_bytes(&self, cuda: &Cuda) -> usize {
        self.portable_training_bytes().max(Plan::of(cuda, self).map_or(0, |p| p.training_bytes()))
    }

    fn portable_forward_bytes(&self) -> usize {
        let mut cut = Cut::default();
        self.forward_parts(&mut cut);
        cut.bytes
    }

    pub(super) fn backward_bytes(&self) -> usize {
        let mut cut = Cut::default();
        self.backward_parts(&mut cut);
        cut.bytes
    }

    fn portable_training_bytes(&self) -> usize {
        let mut cut = Cut::default();
        if self.one_walk() {
            self.training_parts(&mut cut);
        } else {
            cut.take(self.n);
            cut.bytes += self.portable_forward_bytes().max(self.backward_bytes());
        }
        cut.bytes
    }

    /// Statistics, tile.
    fn forward_parts(&self, cut: &mut Cut) -> [usize; 2] {
        [cut.take(3 * self.tile_rows()), cut.take(self.tile_rows() * stride(self.columns()))]
    }

    /// Tile, its gradients, sums of `dhidden`.
    fn backward_parts(&self, cut: &mut Cut) -> [usize; 3] {
        let tile = self.n * stride(self.tall_columns());
        [cut.take(tile), cut.take(tile), cut.take(self.n * self.d)]
    }

    /// Statistics, lse, shifts, tile, kept logits, sums of `dweight`.
    fn training_parts(&self, cut: &mut Cut) -> [usize; 6] {
        let rows = self.chunk(2).max(self.chunk(4));
        let kept = (self.chunk(4) * stride(self.vp)).max((self.chunk(2) * stride(self.vp)).div_ceil(2));
        let sums = if self.chunk(4) < self.n { self.vp * self.d } else { 0 };
        let tile = self.tile_rows().min(rows) * stride(self.columns());
        [
            cut.take(3 * rows),
            cut.take(rows),
            cut.take(rows * self.vp.div_ceil(self.columns())),
            cut.take(tile),
            cut.take(kept),
            cut.take(sums),
        ]
    }
}

/// Cuts a workspace into ranges of 4-byte elements that start on 256 bytes.
#[derive(Default)]
struct Cut {
    bytes: usize,
}

impl Cut {
    fn take(&mut self, elements: usize) -> usize {
        let start = self.bytes;
        self.bytes += (elements * 4).next_multiple_of(256);
        start
    }
}

/// What the three entries hand down.
#[derive(Clone, Copy)]
struct Head<'a> {
    op: &'static str,
    cuda: &'a Cuda,
    hidden: &'a Tensor,
    weight: &'a Tensor,
    vocab: usize,
    targets: &'a Tensor,
    ignore: i32,
}

impl Head<'_> {
    fn width(&self) -> usize {
        self.weight.shape().as_matrix().1
    }

    /// Storage of the gradient of the logits: that of both factors where they agree, so that the matrix units take it.
    fn grad_dtype(&self) -> DType {
        if self.weight.dtype() == self.hidden.dtype() { self.weight.dtype() } else { DType::F32 }
    }

    /// The kernels' variant.
    fn values(&self) -> [i64; 2] {
        let grad = self.grad_dtype();
        [i64::from(grad != DType::F32), code(grad)]
    }

    fn launch(&self, entry: &'static str, grid: [usize; 3], args: &[Arg<'_>]) -> Result<()> {
        self.cuda.launch(self.op, &SOURCE.kernel(entry, &self.values()), grid, 256, 0, args)
    }

    /// Logits of `rows` rows from `row` on and `columns` columns from `first` on, f32, into `tile`.
    fn logits(&self, row: usize, rows: usize, first: usize, columns: usize, tile: &Tensor, ld: usize) -> Result<()> {
        let d = self.width();
        let hidden = self.hidden.slice(row * d, &[rows, d])?;
        let weight = self.weight.slice(first * d, &[columns, d])?;
        General::plain((&hidden, d, 1), (&weight, d, 1), (tile, ld)).run(self.cuda, self.op, rows, columns, d)
    }

    /// Walks the vocabulary for rows `row..row + rows`: losses and lse, and the logits where they are to be kept.
    fn walk(
        &self,
        row: usize,
        rows: usize,
        columns: usize,
        stats: &Tensor,
        tile: &Tensor,
        keep: Option<&Keep<'_>>,
    ) -> Result<()> {
        let ld = stride(columns);
        let step = keep.map_or(rows, |k| k.tile_rows);
        self.launch("begin", [rows.div_ceil(256), 1, 1], &[Arg::Tensor(stats), Arg::Int(rows as i32)])?;
        let [most, sum, target] = [0, 1, 2].map(|i| stats.slice(i * rows, &[rows]));
        let (most, sum, target) = (most?, sum?, target?);
        for (index, first) in (0..self.vocab).step_by(columns).enumerate() {
            let width = columns.min(self.vocab - first);
            for start in (0..rows).step_by(step) {
                let count = step.min(rows - start);
                self.logits(row + start, count, first, width, tile, ld)?;
                let part = |t: &Tensor| t.slice(start, &[count]);
                let targets = self.targets.slice(row + start, &[count])?;
                let (most, sum, target) = (part(&most)?, part(&sum)?, part(&target)?);
                let tiles = self.vocab.div_ceil(columns);
                let (kept, shifts) = match keep {
                    Some(k) => {
                        let kept = k.logits.slice(start * k.ld, &[count * k.ld])?;
                        (Some(kept), Some(k.shifts.slice(start * tiles, &[count * tiles])?))
                    }
                    None => (None, None),
                };
                let args = [
                    Arg::Tensor(tile),
                    Arg::Long(ld as i64),
                    Arg::Tensor(&targets),
                    Arg::Int(first as i32),
                    Arg::Int(width as i32),
                    Arg::Tensor(&most),
                    Arg::Tensor(&sum),
                    Arg::Tensor(&target),
                    Arg::Maybe(kept.as_ref()),
                    Arg::Long(keep.map_or(0, |k| k.ld) as i64),
                    Arg::Maybe(shifts.as_ref()),
                    Arg::Int(tiles as i32),
                    Arg::Int(index as i32),
                    Arg::Int(count as i32),
                ];
                self.launch("absorb", [count.div_ceil(8), 1, 1], &args)?;
            }
        }
        Ok(())
    }

    /// From the statistics of rows `row..row + rows` to their losses and lse.
    fn finish(&self, row: usize, rows: usize, stats: &Tensor, losses: Option<&Tensor>, lse: &Tensor) -> Result<()> {
        let part = |i| stats.slice(i * rows, &[rows]);
        let (most, sum, target) = (part(0)?, part(1)?, part(2)?);
        let targets = self.targets.slice(row, &[rows])?;
        let losses = losses.map(|l| l.slice(row, &[rows])).transpose()?;
        let args = [
            Arg::Tensor(&most),
            Arg::Tensor(&sum),
            Arg::Tensor(&target),
            Arg::Tensor(&targets),
            Arg::Int(self.ignore),
            Arg::Maybe(losses.as_ref()),
            Arg::Tensor(lse),
            Arg::Int(rows as i32),
        ];
        self.launch("finish", [rows.div_ceil(256), 1, 1], &args)
    }

    /// `out = sums [+ out]`, rounded once.
    fn store(&self, sums: &Tensor, out: &Tensor, accumulate: bool) -> Result<()> {
        let args = [
            Arg::Tensor(sums),
            Arg::Tensor(out),
            Arg::Int(code(out.dtype()) as i32),
            Arg::Int(i32::from(accumulate)),
            Arg::Long(out.numel() as i64),
        ];
        let blocks = out.numel().div_ceil(1024).min(16 * self.cuda.info().multiprocessors as usize);
        self.launch("store_sums", [blocks, 1, 1], &args)
    }

    /// Rows of `dweight` for padding: zero where nothing is added to.
    fn padding(&self, dweight: &Tensor, accumulate: bool) -> Result<()> {
        let (vp, d) = dweight.shape().as_matrix();
        if !accumulate && self.vocab < vp {
            dweight.slice(self.vocab * d, &[vp - self.vocab, d])?.zero();
        }
        Ok(())
    }
}

/// Where logits of a chunk are kept.
struct Keep<'a> {
    logits: &'a Tensor,
    ld: usize,
    shifts: &'a Tensor,
    tile_rows: usize,
}

pub(super) fn forward(cuda: &Cuda, args: &Forward<'_>, tiles: &Tiles) -> Result<()> {
    let Forward { hidden, weight, vocab, targets, ignore_index: ignore, losses, lse, workspace } = *args;
    let head = Head { op: "linear_cross_entropy.forward", cuda, hidden, weight, vocab, targets, ignore };
    match Plan::of(cuda, tiles).filter(|_| head.suits_hopper()) {
        Some(plan) => head.hopper_forward(&plan, losses, lse, workspace),
        None => head.forward(tiles, Some(losses), lse, workspace),
    }
}

impl Head<'_> {
    fn forward(&self, tiles: &Tiles, losses: Option<&Tensor>, lse: &Tensor, workspace: &Tensor) -> Result<()> {
        let [stats_at, tile_at] = tiles.forward_parts(&mut Cut::default());
        let (rows, columns) = (tiles.tile_rows(), tiles.columns());
        let tile = workspace.reinterpret(tile_at, DType::F32, &[rows, stride(columns)])?;
        for row in (0..tiles.n).step_by(rows) {
            let count = rows.min(tiles.n - row);
            let stats = workspace.reinterpret(stats_at, DType::F32, &[3 * count])?;
            self.walk(row, count, columns, &stats, &tile, None)?;
            self.finish(row, count, &stats, losses, &lse.slice(row, &[count])?)?;
        }
        Ok(())
    }

    fn backward(&self, tiles: &Tiles, lse: &Tensor, out: &Outputs<'_>, workspace: &Tensor) -> Result<()> {
        let (n, d, columns) = (tiles.n, tiles.d, tiles.tall_columns());
        self.padding(out.dweight, out.accumulate)?;
        if n == 0 {
            if !out.accumulate {
                out.dweight.zero();
            }
            return Ok(());
        }
        let [tile_at, grad_at, sums_at] = tiles.backward_parts(&mut Cut::default());
        let ld = stride(columns);
        let tile = workspace.reinterpret(tile_at, DType::F32, &[n, ld])?;
        let grad = workspace.reinterpret(grad_at, self.grad_dtype(), &[n, ld])?;
        let sums = workspace.reinterpret(sums_at, DType::F32, &[n, d])?;
        for first in (0..self.vocab).step_by(columns) {
            let width = columns.min(self.vocab - first);
            self.logits(0, n, first, width, &tile, ld)?;
            let args = [
                Arg::Tensor(&tile),
                Arg::Long(ld as i64),
                Arg::Tensor(self.targets),
                Arg::Int(self.ignore),
                Arg::Tensor(lse),
                Arg::Int(first as i32),
                Arg::Int(width as i32),
                Arg::Tensor(&grad),
                Arg::Long(ld as i64),
            ];
            // Rows are blocks of the grid's second dimension, which holds 65,535.
            for row in (0..n).step_by(65_535) {
                let count = 65_535.min(n - row);
                let mut args = args;
                let (targets, lse) = (self.targets.slice(row, &[count])?, lse.slice(row, &[count])?);
                let (tile, grad) = (tile.slice(row * ld, &[count, ld])?, grad.slice(row * ld, &[count, ld])?);
                (args[0], args[2], args[4], args[7]) =
                    (Arg::Tensor(&tile), Arg::Tensor(&targets), Arg::Tensor(&lse), Arg::Tensor(&grad));
                self.launch("gradients_tile", [width.div_ceil(1024), count, 1], &args)?;
            }
            let weight = self.weight.slice(first * d, &[width, d])?;
            let dweight = out.dweight.slice(first * d, &[width, d])?;
            let product = General {
                alpha: out.dloss,
                accumulate: first > 0,
                ..General::plain((&grad, ld, 1), (&weight, 1, d), (&sums, d))
            };
            product.run(self.cuda, self.op, n, d, width)?;
            let product = General {
                alpha: out.dloss,
                accumulate: out.accumulate,
                ..General::plain((&grad, 1, ld), (self.hidden, 1, d), (&dweight, d))
            };
            product.run(self.cuda, self.op, width, d, n)?;
        }
        self.store(&sums, out.dhidden, false)
    }
}

/// Where gradients go.
struct Outputs<'a> {
    dloss: f32,
    dhidden: &'a Tensor,
    dweight: &'a Tensor,
    accumulate: bool,
}

pub(super) fn backward(cuda: &Cuda, args: &Backward<'_>, tiles: &Tiles) -> Result<()> {
    let Backward { hidden, weight, vocab, targets, ignore_index: ignore, lse, dloss, dhidden, dweight, .. } = *args;
    let head = Head { op: "linear_cross_entropy.backward", cuda, hidden, weight, vocab, targets, ignore };
    let out = Outputs { dloss, dhidden, dweight, accumulate: args.accumulate_dweight };
    head.backward(tiles, lse, &out, args.workspace)
}

pub(super) fn forward_backward(cuda: &Cuda, args: &ForwardBackward<'_>, tiles: &Tiles) -> Result<()> {
    let ForwardBackward {
        hidden, weight, vocab, targets, ignore_index: ignore, losses, dloss, dhidden, dweight, ..
    } = *args;
    let head = Head { op: "linear_cross_entropy.forward_backward", cuda, hidden, weight, vocab, targets, ignore };
    let out = Outputs { dloss, dhidden, dweight, accumulate: args.accumulate_dweight };
    let workspace = args.workspace;
    if let Some(plan) = Plan::of(cuda, tiles).filter(|_| head.trains_on_hopper(&out)) {
        head.padding(dweight, out.accumulate)?;
        return head.hopper_training(&plan, losses, &out, workspace);
    }
    if !tiles.one_walk() {
        let mut cut = Cut::default();
        let lse = workspace.reinterpret(cut.take(tiles.n), DType::F32, &[tiles.n])?;
        let rest = workspace.reinterpret(cut.bytes, DType::U8, &[workspace.bytes() - cut.bytes])?;
        head.forward(tiles, Some(losses), &lse, &rest)?;
        return head.backward(tiles, &lse, &out, &rest);
    }
    head.padding(dweight, out.accumulate)?;
    if tiles.n == 0 {
        if !out.accumulate {
            dweight.zero();
        }
        return Ok(());
    }
    head.chunks(tiles, losses, &out, workspace)
}

impl Head<'_> {
    fn chunks(&self, tiles: &Tiles, losses: &Tensor, out: &Outputs<'_>, workspace: &Tensor) -> Result<()> {
        let (n, d, columns, grad_dtype) = (tiles.n, tiles.d, tiles.columns(), self.grad_dtype());
        let rows = tiles.chunk(grad_dtype.size());
        let [stats_at, lse_at, shifts_at, tile_at, kept_at, sums_at] = tiles.training_parts(&mut Cut::default());
        let (ld, tile_rows, count_tiles) =
            (stride(tiles.vp), tiles.tile_rows().min(rows), self.vocab.div_ceil(columns));
        let tile = workspace.reinterpret(tile_at, DType::F32, &[tile_rows, stride(columns)])?;
        // One product sums all rows, or f32 sums are rounded once at the end.
        let summed = rows < n && out.dweight.dtype() != DType::F32;
        let dweight = out.dweight.slice(0, &[self.vocab, d])?;
        let sums = if summed { workspace.reinterpret(sums_at, DType::F32, &[self.vocab, d])? } else { dweight.clone() };
        for row in (0..n).step_by(rows) {
            let count = rows.min(n - row);
            let stats = workspace.reinterpret(stats_at, DType::F32, &[3 * count])?;
            let lse = workspace.reinterpret(lse_at, DType::F32, &[count])?;
            let shifts = workspace.reinterpret(shifts_at, DType::F32, &[count * count_tiles])?;
            // Kept logits and their gradients share the memory: f32 and f32, or f16 and a type of 16 bits.
            let kept_dtype = if grad_dtype == DType::F32 { DType::F32 } else { DType::F16 };
            let kept = workspace.reinterpret(kept_at, kept_dtype, &[count, ld])?;
            let grad = workspace.reinterpret(kept_at, grad_dtype, &[count, ld])?;
            let keep = Keep { logits: &kept, ld, shifts: &shifts, tile_rows };
            self.walk(row, count, columns, &stats, &tile, Some(&keep))?;
            self.finish(row, count, &stats, Some(losses), &lse)?;
            let targets = self.targets.slice(row, &[count])?;
            let args = [
                Arg::Tensor(&kept),
                Arg::Long(ld as i64),
                Arg::Tensor(&shifts),
                Arg::Int(columns as i32),
                Arg::Int(count_tiles as i32),
                Arg::Tensor(&targets),
                Arg::Int(self.ignore),
                Arg::Tensor(&lse),
                Arg::Int(0),
                Arg::Int(self.vocab as i32),
                Arg::Tensor(&grad),
                Arg::Long(ld as i64),
            ];
            self.launch("gradients_kept", [self.vocab.div_ceil(4096), count, 1], &args)?;
            let dhidden = out.dhidden.slice(row * d, &[count, d])?;
            let hidden = self.hidden.slice(row * d, &[count, d])?;
            let product =
                General { alpha: out.dloss, ..General::plain((&grad, ld, 1), (self.weight, 1, d), (&dhidden, d)) };
            product.run(self.cuda, self.op, count, d, self.vocab)?;
            let product = General {
                alpha: out.dloss,
                accumulate: row > 0 || (out.accumulate && !summed),
                ..General::plain((&grad, 1, ld), (&hidden, 1, d), (&sums, d))
            };
            product.run(self.cuda, self.op, self.vocab, d, count)?;
        }
        if summed { self.store(&sums, &dweight, out.accumulate) } else { Ok(()) }
    }
}
