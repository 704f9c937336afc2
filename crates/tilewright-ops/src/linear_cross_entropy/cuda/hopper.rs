//! The loss head on Hopper (`hopper.cu`): `forward` as one product whose tiles never leave the registers, and `forward_backward` in chunks of rows.
//!
//! A chunk keeps `exp(logit - the target's logit)` of all its rows in bf16, which needs no second pass: the factor that makes it softmax belongs to
//! the row, so `dhidden` takes it behind its product, and `dweight` takes it in a copy of the hidden rows. A row whose target lies so far below its
//! largest logit that this could overflow is found by its sum, and its 256 rows are made again relative to their log-sum-exp. So bf16 rounds each
//! weight of the vocabulary once and each scaled hidden row once; log-sum-exp, losses and products are f32.

use tilewright_core::{DType, Result};

use super::{Cut, Head, Outputs, Tiles, stride};
use crate::Tensor;
use crate::runtime::cuda::launch::aligned;
use crate::runtime::cuda::tiles::{COLUMNS, Job, PAIR, TensorMap, clusters, tiles};
use crate::runtime::cuda::{Arg, Cuda, Source};

pub(crate) static SOURCE: Source = Source {
    name: "linear_cross_entropy/hopper.cu",
    text: tiles!("hopper.cu"),
    parameters: &["TW_TYPE"],
    variants: &[&[1], &[2]],
    exact: false,
};

/// Bytes of statistics of tiles that `forward` keeps, at most (but always of one pair of tiles).
const STATISTICS: usize = 56 << 20;
/// Bytes of the workspace of `forward_backward`, at most, as far as the rows of a chunk can be chosen.
const TRAINING: usize = 700 << 20;

fn pairs(rows: usize) -> usize {
    rows.div_ceil(PAIR)
}

/// Where sums of `dweight` wait between chunks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sums {
    /// In `dweight` itself.
    InPlace,
    /// f32 in the workspace, rounded once at the end.
    Float,
    /// Cut to 17 bits: 16 in `dweight`, one in the workspace. Where f32 sums would leave no room for a chunk.
    Cut,
}

/// The plan of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    n: usize,
    d: usize,
    vp: usize,
    clusters: usize,
    asked: Option<usize>,
}

impl Plan {
    /// `None` where the chip has no such matrix units or the driver no such descriptors.
    pub(super) fn of(cuda: &Cuda, tiles: &Tiles) -> Option<Plan> {
        let &Tiles { n, d, vp, asked } = tiles;
        let fits = cuda.info().capability.0 == 9 && n > 0 && d.is_multiple_of(8) && TensorMap::available();
        fits.then_some(Plan { n, d, vp, clusters: clusters(cuda), asked: asked.map(|a| a[0]) })
    }

    fn tiles(&self) -> usize {
        self.vp.div_ceil(COLUMNS)
    }

    /// Rows whose statistics `forward` keeps at once.
    fn forward_rows(&self) -> usize {
        let fit = (STATISTICS / (8 * self.tiles()) / PAIR).max(1) * PAIR;
        self.asked.unwrap_or(fit).min(self.n)
    }

    pub(super) fn forward_bytes(&self) -> usize {
        let mut cut = Cut::default();
        self.forward_parts(&mut cut);
        cut.bytes
    }

    /// Statistics, targets' logits.
    fn forward_parts(&self, cut: &mut Cut) -> [usize; 2] {
        let rows = self.forward_rows();
        [cut.take(2 * self.tiles() * rows), cut.take(rows)]
    }

    /// Rows of a chunk where its own share of the workspace is `bytes`: as many as fit, but so that tiles of `dhidden` fill the chip.
    fn rows_within(&self, bytes: usize) -> usize {
        let row = 2 * stride(self.vp) + 8 * self.tiles() + 32;
        let most = (bytes / row / PAIR).clamp(1, pairs(self.n));
        let columns = self.d.div_ceil(COLUMNS);
        let filled = |pairs: usize| {
            let tiles = pairs * columns;
            tiles as f64 / tiles.next_multiple_of(self.clusters) as f64
        };
        let full = (1..=most).rev().find(|&p| filled(p) > 0.94);
        // Half the chunk for a better fit is no gain.
        let pairs = full.filter(|p| 2 * p > most).unwrap_or(most);
        (pairs * PAIR).min(self.n)
    }

    /// How sums wait and the rows of a chunk, for a `dweight` of 16 bits.
    fn chunk(&self) -> (Sums, usize) {
        let elements = self.vp * self.d;
        let (float, cut) = (4 * elements, self.low_bytes());
        if let Some(rows) = self.asked {
            // Tests reach all three: by chunks of one row, of fewer than all, of all.
            let sums = if rows >= self.n {
                Sums::InPlace
            } else if rows % 2 == 1 {
                Sums::Cut
            } else {
                Sums::Float
            };
            return (sums, rows.clamp(1, self.n));
        }
        let whole = self.rows_within(TRAINING);
        if whole == self.n {
            return (Sums::InPlace, whole);
        }
        if float <= TRAINING / 4 {
            (Sums::Float, self.rows_within(TRAINING - float))
        } else {
            (Sums::Cut, self.rows_within(TRAINING.saturating_sub(cut)))
        }
    }

    /// One bit of each element of whole pairs of tiles.
    fn low_bytes(&self) -> usize {
        2 * pairs(self.vp) * self.d.div_ceil(COLUMNS) * (128 * COLUMNS / 8)
    }

    pub(super) fn training_bytes(&self) -> usize {
        let mut cut = Cut::default();
        self.training_parts(&mut cut);
        cut.bytes
    }

    /// Sums, statistics of tiles, kept weights, four numbers a row, flags.
    fn training_parts(&self, cut: &mut Cut) -> [usize; 5] {
        let (sums, rows) = self.chunk();
        let waiting = match sums {
            Sums::InPlace => 0,
            Sums::Float => self.vp * self.d,
            Sums::Cut => self.low_bytes().div_ceil(4),
        };
        [
            cut.take(waiting),
            cut.take(2 * self.tiles() * rows),
            cut.take((rows * stride(self.vp)).div_ceil(2)),
            cut.take(4 * rows),
            cut.take(pairs(rows)),
        ]
    }
}

impl Head<'_> {
    /// Whether both factors are such as the matrix units take.
    pub(super) fn suits_hopper(&self) -> bool {
        let dtype = self.weight.dtype();
        dtype != DType::F32 && dtype == self.hidden.dtype() && aligned(&[self.hidden, self.weight])
    }

    fn map(&self, t: &Tensor, rows: usize, columns: usize, ld: usize, box_rows: u32) -> Result<TensorMap> {
        TensorMap::new(self.cuda, self.op, (t.cuda_address(), t.dtype()), (rows, columns, ld), box_rows)
    }

    fn hopper(&self, entry: &'static str, blocks: usize, threads: usize, args: &[Arg<'_>]) -> Result<()> {
        self.cuda.launch(self.op, &SOURCE.typed(entry, self.weight.dtype()), [blocks, 1, 1], threads, 0, args)
    }

    /// A product over `tiles` pairs of tiles.
    fn multiply(&self, entry: &'static str, tiles: usize, job: &Job) -> Result<()> {
        job.launch(self.cuda, self.op, &SOURCE.typed(entry, self.weight.dtype()), tiles, false)
    }

    /// `SOURCE`'s `target_logits`.
    fn target_logits(
        &self,
        rows: usize,
        hidden: &Tensor,
        targets: &Tensor,
        out: &Tensor,
        reference: Option<&Tensor>,
        flags: Option<&Tensor>,
    ) -> Result<()> {
        let args = [
            Arg::Tensor(hidden),
            Arg::Tensor(self.weight),
            Arg::Tensor(targets),
            Arg::Int(self.ignore),
            Arg::Tensor(out),
            Arg::Maybe(reference),
            Arg::Maybe(flags),
            Arg::Int(rows as i32),
            Arg::Int(self.width() as i32),
        ];
        self.hopper("target_logits", rows.div_ceil(8), 256, &args)
    }

    pub(super) fn hopper_forward(&self, plan: &Plan, losses: &Tensor, lse: &Tensor, workspace: &Tensor) -> Result<()> {
        let (d, step, tiles) = (plan.d, plan.forward_rows(), self.vocab.div_ceil(COLUMNS));
        let [statistics_at, logits_at] = plan.forward_parts(&mut Cut::default());
        for row in (0..plan.n).step_by(step) {
            let rows = step.min(plan.n - row);
            let statistics = workspace.reinterpret(statistics_at, DType::F32, &[2 * tiles * rows])?;
            let logits = workspace.reinterpret(logits_at, DType::F32, &[rows])?;
            let (hidden, targets) = (self.hidden.slice(row * d, &[rows, d])?, self.targets.slice(row, &[rows])?);
            self.target_logits(rows, &hidden, &targets, &logits, None, None)?;
            let job = Job {
                a: self.map(&hidden, rows, d, d, 128)?,
                b: self.map(self.weight, self.vocab, d, d, 128)?,
                pointers: [statistics.cuda_address(), 0, 0, 0],
                numbers: [rows, self.vocab, d.div_ceil(64), 8, 0, 0, 0, 0],
            };
            self.multiply("statistics", pairs(rows) * tiles, &job)?;
            let args = [
                Arg::Tensor(&statistics),
                Arg::Int(tiles as i32),
                Arg::Int(rows as i32),
                Arg::Tensor(&logits),
                Arg::Tensor(&targets),
                Arg::Int(self.ignore),
                Arg::Maybe(None),
                Arg::Maybe(None),
                Arg::Tensor(&losses.slice(row, &[rows])?),
                Arg::Tensor(&lse.slice(row, &[rows])?),
            ];
            self.hopper("close_statistics", rows.div_ceil(32), 256, &args)?;
        }
        Ok(())
    }

    /// Whether `forward_backward` can go the way of this file.
    pub(super) fn trains_on_hopper(&self, out: &Outputs<'_>) -> bool {
        let dweight = out.dweight.dtype();
        self.suits_hopper()
            && self.weight.dtype() == DType::BF16
            && out.dhidden.dtype() == DType::BF16
            && (dweight == DType::BF16 || dweight == DType::F32)
            && aligned(&[out.dhidden, out.dweight])
    }

    pub(super) fn hopper_training(
        &self,
        plan: &Plan,
        losses: &Tensor,
        out: &Outputs<'_>,
        workspace: &Tensor,
    ) -> Result<()> {
        let &Plan { n, d, .. } = plan;
        let (mut sums, step) = plan.chunk();
        let parts = plan.training_parts(&mut Cut::default());
        let whole = workspace.reinterpret(parts[0], DType::U8, &[parts[1] - parts[0]])?;
        if out.dweight.dtype() == DType::F32 {
            sums = Sums::InPlace;
        }
        let dweight = out.dweight.slice(0, &[self.vocab, d])?;
        let float = if sums == Sums::Float {
            workspace.reinterpret(parts[0], DType::F32, &[self.vocab, d])?
        } else {
            dweight.clone()
        };
        let columns = d.div_ceil(COLUMNS);
        for row in (0..n).step_by(step) {
            let rows = step.min(n - row);
            let chunk = Chunk::new(self, out, losses, workspace, &parts, row, rows)?;
            self.keep_weights(plan, &chunk, out.dloss)?;
            // The scaled rows lie where `dhidden` will: its product comes last.
            let (first, last) = (row == 0, row + rows == n);
            let add = usize::from(!first || (out.accumulate && sums != Sums::Float));
            let entry = match (float.dtype(), first, last) {
                (DType::F32, ..) => "weight_gradient_f32",
                (_, true, false) if out.accumulate => "weight_gradient_10",
                (_, true, false) => "weight_gradient_00",
                (_, true, true) if out.accumulate => "weight_gradient_11",
                (_, true, true) => "weight_gradient_01",
                (_, false, false) => "weight_gradient_20",
                (_, false, true) => "weight_gradient_21",
            };
            let job = Job {
                a: self.map(&chunk.kept, rows, self.vocab, chunk.ld, 64)?,
                b: self.map(&chunk.dhidden, rows, d, d, 64)?,
                pointers: [float.cuda_address(), whole.cuda_address(), 0, 0],
                numbers: [self.vocab, d, rows.div_ceil(64), 8, add, 0, 0, 0],
            };
            self.multiply(entry, pairs(self.vocab) * columns, &job)?;
            let job = Job {
                a: self.map(&chunk.kept, rows, self.vocab, chunk.ld, 128)?,
                b: self.map(self.weight, self.vocab, d, d, 64)?,
                pointers: [chunk.dhidden.cuda_address(), chunk.factor.cuda_address(), 0, 0],
                numbers: [rows, d, self.vocab.div_ceil(64), 4, 0, 0, 0, 0],
            };
            self.multiply("hidden_gradient", pairs(rows) * columns, &job)?;
        }
        if sums == Sums::Float { self.store(&float, &dweight, out.accumulate) } else { Ok(()) }
    }

    /// Losses of a chunk, its kept weights with the targets' onehot in them, its scaled rows (in `dhidden`) and the factors.
    fn keep_weights(&self, plan: &Plan, chunk: &Chunk, dloss: f32) -> Result<()> {
        let Chunk { rows, ld, hidden, targets, losses, statistics, kept, logits, reference, lse, flags, .. } = chunk;
        let (rows, d, tiles) = (*rows, plan.d, self.vocab.div_ceil(COLUMNS));
        self.target_logits(rows, hidden, targets, logits, Some(reference), Some(flags))?;
        let (a, b) = (self.map(hidden, rows, d, d, 128)?, self.map(self.weight, self.vocab, d, d, 128)?);
        let product = |entry, pointers| {
            let numbers = [rows, self.vocab, d.div_ceil(64), 8, *ld, 0, 0, 0];
            self.multiply(entry, pairs(rows) * tiles, &Job { a, b, pointers, numbers })
        };
        let [at_statistics, at_reference, at_kept, at_flags] =
            [statistics, reference, kept, flags].map(Tensor::cuda_address);
        product("weights", [at_statistics, at_reference, at_kept, 0])?;
        let sizes = [Arg::Tensor(statistics), Arg::Int(tiles as i32), Arg::Int(rows as i32)];
        let about = [Arg::Tensor(logits), Arg::Tensor(targets), Arg::Int(self.ignore), Arg::Tensor(flags)];
        let outputs = [Arg::Tensor(losses), Arg::Tensor(lse)];
        self.hopper("close_weights", rows.div_ceil(32), 256, &[&sizes[..], &about, &outputs].concat())?;
        // These three find no flag and end, but for rows whose target is all but impossible.
        product("statistics", [at_statistics, at_flags, 0, 0])?;
        let args = [&sizes[..], &about, &[Arg::Tensor(reference)], &outputs].concat();
        self.hopper("close_statistics", rows.div_ceil(32), 256, &args)?;
        product("weights", [at_statistics, at_reference, at_kept, at_flags])?;
        let args = [
            Arg::Tensor(lse),
            Arg::Tensor(reference),
            Arg::Tensor(losses),
            Arg::Tensor(targets),
            Arg::Int(self.ignore),
            Arg::Tensor(kept),
            Arg::Int(*ld as i32),
            Arg::Tensor(hidden),
            Arg::Tensor(&chunk.dhidden),
            Arg::Int(d as i32),
            Arg::Float(dloss),
            Arg::Tensor(&chunk.factor),
        ];
        self.hopper("settle", rows, 128, &args)
    }
}

/// A chunk's part of the call's tensors and of the workspace.
struct Chunk {
    rows: usize,
    ld: usize,
    hidden: Tensor,
    targets: Tensor,
    losses: Tensor,
    dhidden: Tensor,
    statistics: Tensor,
    kept: Tensor,
    logits: Tensor,
    reference: Tensor,
    lse: Tensor,
    factor: Tensor,
    flags: Tensor,
}

impl Chunk {
    fn new(
        head: &Head<'_>,
        out: &Outputs<'_>,
        losses: &Tensor,
        workspace: &Tensor,
        parts: &[usize; 5],
        row: usize,
        rows: usize,
    ) -> Result<Chunk> {
        let (d, ld, tiles) = (head.width(), stride(head.vocab), head.vocab.div_ceil(COLUMNS));
        let &[_, statistics, kept, numbers, flags] = parts;
        let number = |i: usize| workspace.reinterpret(numbers + 4 * i * rows, DType::F32, &[rows]);
        Ok(Chunk {
            rows,
            ld,
            hidden: head.hidden.slice(row * d, &[rows, d])?,
            targets: head.targets.slice(row, &[rows])?,
            losses: losses.slice(row, &[rows])?,
            dhidden: out.dhidden.slice(row * d, &[rows, d])?,
            statistics: workspace.reinterpret(statistics, DType::F32, &[2 * tiles * rows])?,
            kept: workspace.reinterpret(kept, DType::BF16, &[rows, ld])?,
            logits: number(0)?,
            reference: number(1)?,
            lse: number(2)?,
            factor: number(3)?,
            flags: workspace.reinterpret(flags, DType::I32, &[pairs(rows)])?,
        })
    }
}
