//! How large blocks and tiles are, and where the workspace holds what. The sizes that callers plan with and the ranges that the kernels use
//! come from the same lengths.

use super::kernels::{Stats, typed};
use crate::{DType, Result, Tensor};

/// Rows of a block where logits live for one vocabulary tile only.
const BLOCK_ROWS: usize = 256;
/// Columns of a vocabulary tile. 128 rows of it are half of a second-level cache of 1 MiB.
const TILE_COLUMNS: usize = 1024;
/// Rows whose logits are kept whole while their gradients are made, at most.
const CHUNK_ROWS: usize = 128;
/// Bytes of logits kept, at most (but always one row).
const CHUNK_BYTES: usize = 32 << 20;
/// Bytes of f32 sums of a 16-bit `dhidden` kept, at most (but always one row).
const SUM_BYTES: usize = 8 << 20;
/// Every range starts on a cache line.
const ALIGN: usize = 64;

/// The plan of one call: block sizes, and the lengths of the workspace's ranges in elements of 4 bytes.
#[derive(Clone, Debug)]
pub(in super::super) struct Layout {
    /// Rows of a block, at most.
    pub(in super::super) rows: usize,
    /// Columns of a tile, at most.
    pub(super) cols: usize,
    /// Row stride of a tile: not a power of two, so that a column's elements do not fall into one set of the cache.
    pub(super) ld: usize,
    /// Rows of `dhidden` that the workspace can sum.
    pub(super) sum_rows: usize,
    index: usize,
    row_factors: usize,
    stats: usize,
    gather: usize,
    logits: usize,
    dhidden: usize,
    dweight: usize,
}

/// The workspace, cut up.
pub(super) struct Buffers<'a> {
    /// One entry a row.
    pub(super) index: &'a mut [u32],
    /// One a row that counts: what is subtracted from a logit before `exp`.
    pub(super) shift: &'a mut [f32],
    /// One a row that counts: the factor behind `exp`.
    pub(super) scale: &'a mut [f32],
    /// One a row of a block.
    pub(super) stats: &'a mut [Stats],
    /// A block of hidden rows, in their own type.
    pub(super) gather: &'a mut [f32],
    /// One tile, or all tiles of a chunk one behind the other.
    pub(super) logits: &'a mut [f32],
    /// Sums of a `dhidden` stored in 16 bits.
    pub(super) dhidden: &'a mut [f32],
    /// Sums of a tile of a `dweight` stored in 16 bits.
    pub(super) dweight: &'a mut [f32],
}

impl Layout {
    pub(in super::super) fn forward(n: usize, d: usize, vp: usize) -> Self {
        Layout::forward_tiled(n, d, vp, BLOCK_ROWS, TILE_COLUMNS)
    }

    pub(in super::super) fn backward(n: usize, d: usize, vp: usize) -> Self {
        Layout::backward_tiled(n, d, vp, BLOCK_ROWS, TILE_COLUMNS, SUM_BYTES / 4 / d.max(1))
    }

    pub(in super::super) fn training(n: usize, d: usize, vp: usize) -> Self {
        let cols = TILE_COLUMNS.min(vp).max(1);
        let fit = CHUNK_BYTES / 4 / (tile_stride(cols) * vp.div_ceil(cols).max(1));
        let rows = if fit >= 8 { fit / 8 * 8 } else { fit };
        Layout::training_tiled(n, d, vp, rows.min(CHUNK_ROWS), TILE_COLUMNS)
    }

    pub(in super::super) fn forward_tiled(n: usize, d: usize, vp: usize, rows: usize, cols: usize) -> Self {
        let (rows, cols) = (rows.min(n).max(1), cols.min(vp).max(1));
        let ld = tile_stride(cols);
        Layout {
            rows,
            cols,
            ld,
            sum_rows: 0,
            index: n,
            row_factors: 0,
            stats: rows * Stats::FLOATS,
            gather: rows * d,
            logits: rows * ld,
            dhidden: 0,
            dweight: 0,
        }
    }

    pub(in super::super) fn backward_tiled(
        n: usize,
        d: usize,
        vp: usize,
        rows: usize,
        cols: usize,
        sum_rows: usize,
    ) -> Self {
        let base = Layout::forward_tiled(n, d, vp, rows, cols);
        let sum_rows = sum_rows.min(n).max(1);
        Layout { sum_rows, row_factors: n, stats: 0, dhidden: sum_rows * d, dweight: base.cols * d, ..base }
    }

    pub(in super::super) fn training_tiled(n: usize, d: usize, vp: usize, rows: usize, cols: usize) -> Self {
        let base = Layout::forward_tiled(n, d, vp, rows, cols);
        Layout {
            sum_rows: base.rows,
            row_factors: n,
            logits: base.logits * vp.div_ceil(base.cols),
            dhidden: base.rows * d,
            dweight: base.cols * d,
            ..base
        }
    }

    /// Bytes of the workspace.
    pub(in super::super) fn bytes(&self) -> usize {
        let one = [self.index, self.row_factors, self.row_factors, self.stats, self.gather, self.logits, self.dhidden];
        one.into_iter().chain([self.dweight]).map(padded).sum()
    }

    /// Elements of one tile's buffer.
    pub(super) fn tile_len(&self) -> usize {
        self.rows * self.ld
    }

    /// Rows of each block when `n` rows are cut into as few as the buffers allow, all of nearly the same size: a last block of a few rows would
    /// read all weights for little work.
    pub(super) fn block_rows(&self, n: usize) -> usize {
        n.div_ceil(n.div_ceil(self.rows).max(1)).next_multiple_of(8).clamp(1, self.rows)
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
        let mut cut = |len: usize| -> &'a mut [u8] {
            let (range, behind) = std::mem::take(&mut rest).split_at_mut(padded(len));
            rest = behind;
            range
        };
        Ok(Buffers {
            index: typed(cut(self.index), self.index),
            shift: typed(cut(self.row_factors), self.row_factors),
            scale: typed(cut(self.row_factors), self.row_factors),
            stats: typed(cut(self.stats), self.stats / Stats::FLOATS),
            gather: typed(cut(self.gather), self.gather),
            logits: typed(cut(self.logits), self.logits),
            dhidden: typed(cut(self.dhidden), self.dhidden),
            dweight: typed(cut(self.dweight), self.dweight),
        })
    }
}

/// Bytes of a range of so many elements.
fn padded(len: usize) -> usize {
    (len * 4).next_multiple_of(ALIGN)
}

fn tile_stride(cols: usize) -> usize {
    cols.next_multiple_of(16) + 16
}
