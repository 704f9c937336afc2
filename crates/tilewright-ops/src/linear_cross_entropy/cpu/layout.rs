//! How large blocks and tiles are, and where the workspace holds what. The sizes that callers plan with and the ranges that the kernels use
//! come from the same lengths.

use super::kernels::typed;
use crate::cpu::Isa;
use crate::cpu::gemm::{packed_a_floats, packed_b_floats};
use crate::{DType, Device, Result, Tensor};

/// Rows are counted in steps of the widest register tile, so that few tiles are partly empty.
const ROW_STEP: usize = 14;
/// Rows of a block where logits live for one vocabulary tile only.
const BLOCK_ROWS: usize = 19 * ROW_STEP;
/// Rows whose logits are kept whole while their gradients are made, at most.
const CHUNK_ROWS: usize = 10 * ROW_STEP;
/// Above so many rows there are at least two chunks.
const WHOLE_ROWS: usize = 128;
/// Bytes of logits kept, at most (but always one row).
const CHUNK_BYTES: usize = 32 << 20;
/// Columns of a task: whole register tiles of AVX-512, be they rows (16 x 14) or columns (7 x 32) of a product.
const TASK_COLUMNS: usize = 224;
/// Columns of a tile where all threads share one: 256 rows of it are a megabyte.
const TILE_COLUMNS: usize = 1024;
/// Tasks whose logits become gradients before all threads multiply them by the weight. Longer spans read the weight in pieces too far apart:
/// 5 % slower at 32 (LOG.md, 2026-11-30).
const SPAN_TASKS: usize = 4;
/// Bytes of f32 sums of a 16-bit `dhidden` kept, at most (but always one row).
const SUM_BYTES: usize = 8 << 20;
/// Steps of `D` between two visits to a tile of logits, at most; as the matrix product has it.
const MOST_STEPS: usize = 384;
/// Every range starts on a cache line.
const ALIGN: usize = 64;

/// The plan of one call: block sizes, and the lengths of the workspace's ranges in elements of 4 bytes.
#[derive(Clone, Debug)]
pub(in super::super) struct Layout {
    threads: usize,
    /// Rows of a block or chunk, at most.
    pub(in super::super) rows: usize,
    /// Columns of a task, at most.
    pub(super) task_cols: usize,
    /// Columns of a tile that all threads share, at most.
    pub(super) tile_cols: usize,
    /// Rows of `dhidden` that the workspace can sum.
    pub(super) sum_rows: usize,
    /// Steps of `D` in one packed part of the hidden rows.
    pub(super) step: usize,
    /// Row stride of the kept logits; of a tile when none are kept.
    pub(super) ld: usize,
    index: usize,
    row_factors: usize,
    stats: usize,
    partials: usize,
    gather: usize,
    packed: usize,
    packed_by_row: usize,
    worker_packed: usize,
    worker_tile: usize,
    logits: usize,
    dhidden: usize,
    dweight: usize,
    /// The entry, `(N, D, Vp)`, and the block sizes where the caller chose them: what another device makes its own plan of.
    #[cfg_attr(not(any(feature = "cuda", feature = "gpu")), allow(dead_code))]
    wanted: (Entry, [usize; 3], Option<[usize; 2]>),
}

#[derive(Clone, Copy, Debug)]
enum Entry {
    Forward,
    Backward,
    Training,
}

/// The workspace, cut up.
pub(super) struct Buffers<'a> {
    /// One entry a row.
    pub(super) index: &'a mut [u32],
    /// One a row that counts: what is subtracted from a logit before `exp`.
    pub(super) shift: &'a mut [f32],
    /// One a row that counts: the factor behind `exp`.
    pub(super) scale: &'a mut [f32],
    /// One a row of a block: the largest logit, the sum of `exp(logit - largest)`, the target's logit.
    pub(super) max: &'a mut [f32],
    pub(super) sum: &'a mut [f32],
    pub(super) target: &'a mut [f32],
    /// The first two of each task, one row of the block after the other.
    pub(super) task_max: &'a mut [f32],
    pub(super) task_sum: &'a mut [f32],
    /// A block of hidden rows, in their own type.
    pub(super) gather: &'a mut [f32],
    /// A block of hidden rows packed as a left operand, and as a right one.
    pub(super) packed: &'a mut [f32],
    pub(super) packed_by_row: &'a mut [f32],
    /// What each thread has for itself.
    pub(super) workers: &'a mut [f32],
    /// One tile, or a chunk of whole rows.
    pub(super) logits: &'a mut [f32],
    /// Sums of a `dhidden` stored in 16 bits.
    pub(super) dhidden: &'a mut [f32],
    /// Sums of a tile of a `dweight` stored in 16 bits.
    pub(super) dweight: &'a mut [f32],
}

impl Layout {
    pub(in super::super) fn forward(threads: usize, n: usize, d: usize, vp: usize) -> Self {
        Layout::forward_tiled(threads, n, d, vp, BLOCK_ROWS, TASK_COLUMNS).unasked()
    }

    pub(in super::super) fn backward(threads: usize, n: usize, d: usize, vp: usize) -> Self {
        Layout::backward_tiled(threads, n, d, vp, BLOCK_ROWS, TILE_COLUMNS, SUM_BYTES / 4 / d.max(1)).unasked()
    }

    pub(in super::super) fn training(threads: usize, n: usize, d: usize, vp: usize) -> Self {
        let fit = CHUNK_BYTES / 4 / row_stride(vp);
        let rows = if fit >= ROW_STEP { fit / ROW_STEP * ROW_STEP } else { fit };
        let most = if n > WHOLE_ROWS { n.div_ceil(2).next_multiple_of(ROW_STEP) } else { n };
        let layout = Layout::training_tiled(threads, n, d, vp, rows.min(CHUNK_ROWS).min(most), TASK_COLUMNS);
        Layout { tile_cols: TILE_COLUMNS.min(vp).max(1), dweight: TILE_COLUMNS.min(vp) * d, ..layout }.unasked()
    }

    /// Blocks of so many rows, tasks of so many columns.
    pub(in super::super) fn forward_tiled(
        threads: usize,
        n: usize,
        d: usize,
        vp: usize,
        rows: usize,
        cols: usize,
    ) -> Self {
        let (rows, cols) = (rows.min(n).max(1), cols.min(vp).max(1));
        let step = d.div_ceil(d.div_ceil(MOST_STEPS).max(1)).next_multiple_of(16).clamp(16, MOST_STEPS);
        // For whichever instruction set wants most, so that a plan holds on every device of these threads.
        let widest = |floats: &dyn Fn(Isa) -> usize| Isa::ALL.into_iter().map(floats).max().unwrap_or(0);
        Layout {
            threads,
            rows,
            task_cols: cols,
            tile_cols: cols,
            sum_rows: 0,
            step,
            ld: row_stride(cols),
            index: n,
            row_factors: 0,
            stats: rows,
            partials: vp.div_ceil(cols) * rows,
            gather: rows * d,
            packed: widest(&|isa| packed_a_floats(isa, rows, step)) * d.div_ceil(step),
            packed_by_row: 0,
            worker_packed: widest(&|isa| packed_b_floats(isa, cols, step)).next_multiple_of(ALIGN / 4),
            worker_tile: rows * row_stride(cols),
            logits: 0,
            dhidden: 0,
            dweight: 0,
            wanted: (Entry::Forward, [n, d, vp], Some([rows, cols])),
        }
    }

    /// Blocks of so many rows, tiles of so many columns, f32 sums for so many rows of a 16-bit `dhidden`.
    pub(in super::super) fn backward_tiled(
        threads: usize,
        n: usize,
        d: usize,
        vp: usize,
        rows: usize,
        cols: usize,
        sum_rows: usize,
    ) -> Self {
        let base = Layout::forward_tiled(threads, n, d, vp, rows, cols);
        let sum_rows = sum_rows.min(n).max(1);
        Layout {
            sum_rows,
            row_factors: n,
            stats: 0,
            partials: 0,
            packed: 0,
            worker_packed: 0,
            worker_tile: 0,
            logits: base.rows * base.ld,
            dhidden: sum_rows * d,
            dweight: base.tile_cols * d,
            wanted: (Entry::Backward, [n, d, vp], Some([base.rows, base.tile_cols])),
            ..base
        }
    }

    /// Chunks of so many rows, tasks and tiles of so many columns.
    pub(in super::super) fn training_tiled(
        threads: usize,
        n: usize,
        d: usize,
        vp: usize,
        rows: usize,
        cols: usize,
    ) -> Self {
        let base = Layout::forward_tiled(threads, n, d, vp, rows, cols);
        let by_row = |floats: &dyn Fn(Isa) -> usize| Isa::ALL.into_iter().map(floats).max().unwrap_or(0);
        let transposed = by_row(&|isa| packed_a_floats(isa, base.task_cols, base.rows)).next_multiple_of(ALIGN / 4);
        Layout {
            sum_rows: base.rows,
            ld: row_stride(vp),
            row_factors: n,
            packed_by_row: by_row(&|isa| packed_b_floats(isa, d, base.rows)),
            worker_packed: base.worker_packed.max(transposed),
            logits: base.rows * row_stride(vp),
            dhidden: base.rows * d,
            dweight: base.tile_cols * d,
            wanted: (Entry::Training, [n, d, vp], Some([base.rows, base.tile_cols])),
            ..base
        }
    }

    /// The ranges in the order in which they lie.
    fn lengths(&self) -> [usize; 15] {
        let Layout { index, row_factors, stats, partials, gather, packed, packed_by_row, .. } = *self;
        let Layout { logits, dhidden, dweight, .. } = *self;
        let workers = self.threads * self.worker_len();
        [
            index,
            row_factors,
            row_factors,
            stats,
            stats,
            stats,
            partials,
            partials,
            gather,
            packed,
            packed_by_row,
            workers,
            logits,
            dhidden,
            dweight,
        ]
    }

    /// Bytes of the workspace.
    pub(in super::super) fn bytes(&self) -> usize {
        self.lengths().into_iter().map(padded).sum()
    }

    /// The same without block sizes of the caller's choice.
    fn unasked(mut self) -> Self {
        self.wanted.2 = None;
        self
    }

    /// The plan of the same call on a GPU.
    #[cfg(feature = "cuda")]
    pub(in super::super) fn tiles(&self) -> super::super::cuda::Tiles {
        let (_, [n, d, vp], asked) = self.wanted;
        super::super::cuda::Tiles::new(n, d, vp, asked)
    }

    /// As [`Layout::tiles`], through Vulkan and Metal.
    #[cfg(feature = "gpu")]
    pub(in super::super) fn portable_tiles(&self) -> super::super::gpu::Tiles {
        let (_, [n, d, vp], asked) = self.wanted;
        super::super::gpu::Tiles::new(n, d, vp, asked)
    }

    /// Bytes of the workspace on a device.
    pub(in super::super) fn bytes_on(&self, device: &Device) -> usize {
        #[cfg(feature = "cuda")]
        if let Some(cuda) = device.cuda_sizes() {
            return match self.wanted.0 {
                Entry::Forward => self.tiles().forward_bytes(cuda),
                Entry::Backward => self.tiles().backward_bytes(),
                Entry::Training => self.tiles().training_bytes(cuda),
            };
        }
        #[cfg(feature = "gpu")]
        if device.gpu_sizes().is_some() {
            let tiles = self.portable_tiles();
            return match self.wanted.0 {
                Entry::Forward => tiles.forward_bytes(),
                Entry::Backward => tiles.backward_bytes(),
                Entry::Training => tiles.training_bytes(),
            };
        }
        let _ = device;
        self.bytes()
    }

    /// Elements of one thread's own part.
    pub(super) fn worker_len(&self) -> usize {
        (self.worker_packed + self.worker_tile).next_multiple_of(ALIGN / 4)
    }

    /// A thread's part cut into room for a packed operand and for a tile of logits.
    pub(super) fn worker<'a>(&self, part: &'a mut [f32]) -> (&'a mut [f32], &'a mut [f32]) {
        part.split_at_mut(self.worker_packed)
    }

    /// Row stride of a thread's tile of logits.
    pub(super) fn tile_ld(&self) -> usize {
        row_stride(self.task_cols)
    }

    /// Columns whose gradients are made before they are multiplied by the weight.
    pub(super) fn span(&self) -> usize {
        SPAN_TASKS * self.task_cols
    }

    /// Rows of each block when `n` rows are cut into as few as the buffers allow, all of nearly the same size: a last block of a few rows would
    /// read all weights for little work.
    pub(super) fn block_rows(&self, n: usize) -> usize {
        n.div_ceil(n.div_ceil(self.rows).max(1)).next_multiple_of(ROW_STEP).clamp(1, self.rows)
    }

    /// Whether `forward_backward` makes the logits again for a `dweight` that must be rounded once.
    pub(in super::super) fn recomputes_for_dweight(&self, dweight: DType, n: usize) -> bool {
        dweight != DType::F32 && n > self.rows
    }

    /// Whether `backward` makes the logits twice because neither output can hold f32 sums.
    pub(in super::super) fn recomputes_twice(&self, dhidden: DType, dweight: DType, n: usize) -> bool {
        dhidden != DType::F32 && dweight != DType::F32 && n > self.sum_rows
    }

    /// The ranges of a workspace that is large enough.
    ///
    /// # Safety
    /// Nothing else may read or write the workspace while the ranges live.
    pub(super) unsafe fn buffers<'a>(&self, workspace: &'a Tensor) -> Result<Buffers<'a>> {
        // Refuses a workspace that starts off the alignment of its elements.
        workspace.reinterpret(0, DType::F32, &[self.bytes() / 4])?;
        let mut rest = unsafe { workspace.slice_of_mut::<u8>() };
        let mut cut = |len: usize| -> &'a mut [f32] {
            let (range, behind) = std::mem::take(&mut rest).split_at_mut(padded(len));
            rest = behind;
            typed(range, len)
        };
        let [
            index,
            shift,
            scale,
            max,
            sum,
            target,
            task_max,
            task_sum,
            gather,
            packed,
            packed_by_row,
            workers,
            rest @ ..,
        ] = self.lengths().map(&mut cut);
        let [logits, dhidden, dweight] = rest;
        let count = index.len();
        let index = typed(index, count);
        Ok(Buffers {
            index,
            shift,
            scale,
            max,
            sum,
            target,
            task_max,
            task_sum,
            gather,
            packed,
            packed_by_row,
            workers,
            logits,
            dhidden,
            dweight,
        })
    }
}

/// Bytes of a range of so many elements.
fn padded(len: usize) -> usize {
    (len * 4).next_multiple_of(ALIGN)
}

/// The distance of rows of so many elements: whole cache lines, and never a multiple of a page, which would put a column's elements into few
/// sets of a cache.
fn row_stride(cols: usize) -> usize {
    let lines = cols.next_multiple_of(16);
    if lines.is_multiple_of(64) { lines + 16 } else { lines }
}
