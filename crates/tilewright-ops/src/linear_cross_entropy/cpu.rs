//! The CPU path: matrix products over tiles of rows and vocabulary columns, and one walk over each tile between them.
//!
//! Rows that count are numbered without gaps (`index` maps them back), so ignored rows take part in no product. Gradients of hidden rows are
//! made at their gapless places in the output and spread to their rows at the end, which needs no second buffer.

mod kernels;
mod layout;

use std::ops::Range;

use self::layout::Buffers;
pub(super) use self::layout::Layout;
use super::{Backward, Forward, ForwardBackward, Head};
use crate::cpu::disjoint::Disjoint;
use crate::cpu::element::with_element;
use crate::cpu::gemm::{Epilogue, MatRef, gemm};
use crate::cpu::{Cpu, Element};
use crate::{DType, Result, Tensor};

pub(super) fn forward(cpu: &Cpu, args: &Forward<'_>, layout: &Layout) -> Result<()> {
    // SAFETY: the entry checked the dtypes, and that the outputs and the workspace overlap nothing; this holds for the whole file.
    let (losses, lse) = unsafe { (args.losses.slice_of_mut::<f32>(), args.lse.slice_of_mut::<f32>()) };
    // SAFETY: nothing else has the workspace, as above.
    let mut buffers = unsafe { layout.buffers(args.workspace)? };
    let walk = Walk::new(cpu, Head::of_forward(args), layout, std::mem::take(&mut buffers.index));
    losses.fill(0.0);
    lse.fill(0.0);
    for block in walk.blocks(0..walk.index.len()) {
        let hidden = walk.hidden(block.clone(), buffers.gather);
        let stats = &mut buffers.stats[..block.len()];
        stats.fill(kernels::Stats::EMPTY);
        for columns in walk.tiles() {
            walk.logits(hidden, block.len(), columns.clone(), buffers.logits);
            walk.merge_stats(&block, columns, buffers.logits, stats);
        }
        for (&row, s) in walk.index[block].iter().zip(&*stats) {
            losses[row as usize] = s.loss();
            lse[row as usize] = s.lse();
        }
    }
    Ok(())
}

pub(super) fn backward(cpu: &Cpu, args: &Backward<'_>, layout: &Layout) -> Result<()> {
    // SAFETY: as in `forward`.
    let mut buffers = unsafe { layout.buffers(args.workspace)? };
    let walk = Walk::new(cpu, Head::of_backward(args), layout, std::mem::take(&mut buffers.index));
    // SAFETY: as in `forward`.
    let lse = unsafe { args.lse.slice_of::<f32>() };
    for ((shift, scale), &row) in buffers.shift.iter_mut().zip(&mut *buffers.scale).zip(walk.index) {
        (*shift, *scale) = (lse[row as usize], args.dloss);
    }
    let all = 0..walk.index.len();
    let gradients = Gradients {
        dhidden: args.dhidden,
        dweight: args.dweight,
        accumulate_dweight: args.accumulate_dweight,
        dloss: args.dloss,
    };
    if args.dhidden.dtype() == DType::F32 {
        // SAFETY: as in `forward`.
        let dhidden = unsafe { args.dhidden.slice_of_mut::<f32>() };
        walk.recompute(all.clone(), &mut buffers, Some(dhidden), true, &gradients);
    } else {
        // Rows are the outer loop as far as their sums have room. A `dweight` in 16 bits would be rounded once for each round of it, and gets a
        // walk of its own unless one round is enough.
        let alone = layout.recomputes_twice(args.dhidden.dtype(), args.dweight.dtype(), all.len());
        let sums = std::mem::take(&mut buffers.dhidden);
        for start in all.clone().step_by(layout.sum_rows) {
            let rows = start..(start + layout.sum_rows).min(all.end);
            let round = Gradients { accumulate_dweight: args.accumulate_dweight || start > 0, ..gradients };
            walk.recompute(rows.clone(), &mut buffers, Some(&mut *sums), !alone, &round);
            walk.store_dhidden(rows, sums, args.dhidden);
        }
        if alone {
            walk.recompute(all, &mut buffers, None, true, &gradients);
        }
    }
    walk.finish(&gradients);
    Ok(())
}

pub(super) fn forward_backward(cpu: &Cpu, args: &ForwardBackward<'_>, layout: &Layout) -> Result<()> {
    // SAFETY: as in `forward`.
    let mut buffers = unsafe { layout.buffers(args.workspace)? };
    let walk = Walk::new(cpu, Head::of_training(args), layout, std::mem::take(&mut buffers.index));
    let gradients = Gradients {
        dhidden: args.dhidden,
        dweight: args.dweight,
        accumulate_dweight: args.accumulate_dweight,
        dloss: args.dloss,
    };
    // SAFETY: as in `forward`.
    let losses = unsafe { args.losses.slice_of_mut::<f32>() };
    losses.fill(0.0);
    let all = 0..walk.index.len();
    let recompute = layout.recomputes_for_dweight(args.dweight.dtype(), all.len());
    for block in walk.blocks(all.clone()) {
        let rows = block.len();
        let hidden = walk.hidden(block.clone(), buffers.gather);
        let stats = &mut buffers.stats[..rows];
        stats.fill(kernels::Stats::EMPTY);
        for (columns, tile) in walk.tiles().zip(buffers.logits.chunks_mut(layout.tile_len())) {
            walk.logits(hidden, rows, columns.clone(), tile);
            walk.merge_stats(&block, columns, tile, stats);
        }
        let (shift, scale) = (&mut buffers.shift[block.clone()], &mut buffers.scale[block.clone()]);
        for (i, (s, &row)) in stats.iter().zip(&walk.index[block.clone()]).enumerate() {
            losses[row as usize] = s.loss();
            (shift[i], scale[i]) = (s.max, args.dloss / s.sum);
        }
        let direct = args.dhidden.dtype() == DType::F32;
        let dhidden = if direct {
            // SAFETY: as in `forward`.
            let all = unsafe { args.dhidden.slice_of_mut::<f32>() };
            &mut all[block.start * walk.d..block.end * walk.d]
        } else {
            &mut buffers.dhidden[..rows * walk.d]
        };
        for (columns, tile) in walk.tiles().zip(buffers.logits.chunks_mut(layout.tile_len())) {
            walk.gradient(&block, columns.clone(), tile, shift, scale, args.dloss);
            walk.add_dhidden(rows, columns.clone(), tile, dhidden, columns.start > 0);
            if !recompute {
                let first = block.start == 0;
                walk.add_dweight(hidden, rows, columns.clone(), tile, buffers.dweight, first, &gradients);
                if args.dweight.dtype() != DType::F32 {
                    walk.store_dweight(columns, buffers.dweight, &gradients);
                }
            }
        }
        if !direct {
            walk.store_dhidden(block, buffers.dhidden, args.dhidden);
        }
    }
    if recompute {
        walk.recompute(all, &mut buffers, None, true, &gradients);
    }
    walk.finish(&gradients);
    Ok(())
}

/// Where gradients go.
#[derive(Clone, Copy)]
struct Gradients<'a> {
    dhidden: &'a Tensor,
    dweight: &'a Tensor,
    accumulate_dweight: bool,
    dloss: f32,
}

/// One call's inputs, and the steps that the three schedules are made of.
struct Walk<'a> {
    cpu: &'a Cpu,
    hidden: &'a Tensor,
    weight: &'a Tensor,
    targets: &'a [i32],
    /// The rows that count, ascending.
    index: &'a [u32],
    d: usize,
    vocab: usize,
    layout: &'a Layout,
}

impl<'a> Walk<'a> {
    fn new(cpu: &'a Cpu, head: Head<'a>, layout: &'a Layout, index: &'a mut [u32]) -> Self {
        // SAFETY: as in `forward`.
        let targets = unsafe { head.targets.slice_of::<i32>() };
        let mut count = 0;
        for (row, _) in targets.iter().enumerate().filter(|(_, t)| **t != head.ignore_index) {
            index[count] = row as u32;
            count += 1;
        }
        let (_, d, _) = head.dims();
        let index = &index[..count];
        Walk { cpu, hidden: head.hidden, weight: head.weight, targets, index, d, vocab: head.vocab, layout }
    }

    /// Cuts gapless rows into blocks of nearly equal size: a last block of a few rows would read all weights for little work.
    fn blocks(&self, rows: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let step = self.layout.block_rows(rows.len());
        rows.clone().step_by(step).map(move |start| start..(start + step).min(rows.end))
    }

    fn tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (vocab, cols) = (self.vocab, self.layout.cols);
        (0..vocab).step_by(cols).map(move |start| start..(start + cols).min(vocab))
    }

    /// The hidden rows of a block as a matrix; gathered first when ignored rows lie between them.
    fn hidden<'b>(&self, block: Range<usize>, gather: &'b mut [f32]) -> MatRef<'b>
    where
        'a: 'b,
    {
        let (d, index) = (self.d, &self.index[block]);
        let (first, last) = (index[0] as usize, index[index.len() - 1] as usize);
        with_element!(self.hidden.dtype(), T => {
            // SAFETY: as in `forward`.
            let hidden = unsafe { self.hidden.slice_of::<T>() };
            if last - first + 1 == index.len() {
                MatRef::new(&hidden[first * d..(last + 1) * d], d, 1)
            } else {
                let gather = kernels::typed::<T>(gather, index.len() * d);
                for (to, &row) in gather.chunks_exact_mut(d).zip(index) {
                    to.copy_from_slice(&hidden[row as usize * d..][..d]);
                }
                MatRef::new(gather, d, 1)
            }
        })
    }

    /// A vocabulary tile of the weight, as `(D, columns)` when transposed, else as `(columns, D)`.
    fn weight(&self, columns: Range<usize>, transposed: bool) -> MatRef<'a> {
        let d = self.d;
        let (row_stride, col_stride) = if transposed { (1, d) } else { (d, 1) };
        with_element!(self.weight.dtype(), T => {
            // SAFETY: as in `forward`.
            let weight = unsafe { self.weight.slice_of::<T>() };
            MatRef::new(&weight[columns.start * d..columns.end * d], row_stride, col_stride)
        })
    }

    fn logits(&self, hidden: MatRef<'_>, rows: usize, columns: Range<usize>, tile: &mut [f32]) {
        let (width, ld) = (columns.len(), self.layout.ld);
        let weight = self.weight(columns, true);
        gemm(self.cpu, rows, width, self.d, hidden, weight, tile, ld, false, Epilogue::None);
    }

    /// Folds a tile of logits into the running maximum, sum and target logit of its rows.
    fn merge_stats(&self, block: &Range<usize>, columns: Range<usize>, tile: &mut [f32], stats: &mut [kernels::Stats]) {
        let (isa, stats) = (self.cpu.isa(), Disjoint::new(stats));
        self.each_row(block, &columns, tile, |i, target, logits| {
            // SAFETY: each row of a block is visited once.
            let stats = &mut unsafe { stats.part(i, i + 1) }[0];
            kernels::merge(isa, logits, stats);
            if let Some(t) = target {
                stats.target = logits[t];
            }
        });
    }

    /// Turns a tile of logits into their gradient, in place.
    fn gradient(
        &self,
        block: &Range<usize>,
        columns: Range<usize>,
        tile: &mut [f32],
        shift: &[f32],
        scale: &[f32],
        dloss: f32,
    ) {
        let isa = self.cpu.isa();
        self.each_row(block, &columns, tile, |i, target, logits| {
            kernels::softmax(isa, logits, shift[i], scale[i]);
            if let Some(t) = target {
                logits[t] -= dloss;
            }
        });
    }

    /// Runs `f(row of the block, target's place in the tile if it is there, the row's logits)` for all rows, in parallel.
    fn each_row(
        &self,
        block: &Range<usize>,
        columns: &Range<usize>,
        tile: &mut [f32],
        f: impl Fn(usize, Option<usize>, &mut [f32]) + Sync,
    ) {
        const ROWS_PER_TASK: usize = 8;
        let (ld, rows) = (self.layout.ld, &self.index[block.clone()]);
        assert!(tile.len() >= rows.len() * ld && columns.len() <= ld);
        let tile = Disjoint::new(tile);
        self.cpu.pool().run(rows.len().div_ceil(ROWS_PER_TASK), &|task, _| {
            let start = task * ROWS_PER_TASK;
            for i in start..(start + ROWS_PER_TASK).min(rows.len()) {
                // SAFETY: inside the tile by the assertion above; no two tasks share a row.
                let logits = unsafe { tile.part(i * ld, i * ld + columns.len()) };
                let target = self.targets[rows[i] as usize] as usize;
                f(i, target.checked_sub(columns.start).filter(|&t| t < columns.len()), logits);
            }
        });
    }

    /// `dhidden (+)= tile @ weight`.
    fn add_dhidden(&self, rows: usize, columns: Range<usize>, tile: &[f32], dhidden: &mut [f32], accumulate: bool) {
        let (width, d) = (columns.len(), self.d);
        let (tile, weight) = (MatRef::new(tile, self.layout.ld, 1), self.weight(columns, false));
        gemm(self.cpu, rows, d, width, tile, weight, dhidden, d, accumulate, Epilogue::None);
    }

    /// `tile^T @ hidden` into `dweight` when that is f32, else into `sums`. `first` begins a new sum.
    fn add_dweight(
        &self,
        hidden: MatRef<'_>,
        rows: usize,
        columns: Range<usize>,
        tile: &[f32],
        sums: &mut [f32],
        first: bool,
        to: &Gradients<'_>,
    ) {
        let (width, d) = (columns.len(), self.d);
        let tile = MatRef::new(tile, 1, self.layout.ld);
        let (out, accumulate) = if to.dweight.dtype() == DType::F32 {
            // SAFETY: as in `forward`.
            let all = unsafe { to.dweight.slice_of_mut::<f32>() };
            (&mut all[columns.start * d..columns.end * d], to.accumulate_dweight || !first)
        } else {
            (&mut sums[..width * d], !first)
        };
        gemm(self.cpu, width, d, rows, tile, hidden, out, d, accumulate, Epilogue::None);
    }

    /// Rounds a finished tile of `dweight` into its 16-bit place.
    fn store_dweight(&self, columns: Range<usize>, sums: &[f32], to: &Gradients<'_>) {
        let elements = columns.start * self.d..columns.end * self.d;
        with_element!(to.dweight.dtype(), T => {
            // SAFETY: as in `forward`.
            let out = &mut unsafe { to.dweight.slice_of_mut::<T>() }[elements];
            kernels::store(self.cpu, &sums[..out.len()], out, to.accumulate_dweight);
        });
    }

    /// Rounds finished rows of `dhidden` into their gapless 16-bit places.
    fn store_dhidden(&self, rows: Range<usize>, sums: &[f32], dhidden: &Tensor) {
        with_element!(dhidden.dtype(), T => {
            // SAFETY: as in `forward`.
            let out = &mut unsafe { dhidden.slice_of_mut::<T>() }[rows.start * self.d..rows.end * self.d];
            kernels::store(self.cpu, &sums[..out.len()], out, false);
        });
    }

    /// Makes the gradients of some rows with the vocabulary as the outer loop, from logits made again: each tile of `dweight` is finished before
    /// the next begins. `dhidden` holds the rows' f32 sums from its start.
    fn recompute(
        &self,
        rows: Range<usize>,
        buffers: &mut Buffers<'_>,
        mut dhidden: Option<&mut [f32]>,
        dweight: bool,
        to: &Gradients<'_>,
    ) {
        let d = self.d;
        if rows.is_empty() {
            return;
        }
        for columns in self.tiles() {
            for block in self.blocks(rows.clone()) {
                let hidden = self.hidden(block.clone(), buffers.gather);
                let tile = &mut buffers.logits[..self.layout.tile_len()];
                let (shift, scale) = (&buffers.shift[block.clone()], &buffers.scale[block.clone()]);
                self.logits(hidden, block.len(), columns.clone(), tile);
                self.gradient(&block, columns.clone(), tile, shift, scale, to.dloss);
                if let Some(sums) = &mut dhidden {
                    let sums = &mut sums[(block.start - rows.start) * d..(block.end - rows.start) * d];
                    self.add_dhidden(block.len(), columns.clone(), tile, sums, columns.start > 0);
                }
                if dweight {
                    let first = block.start == rows.start;
                    self.add_dweight(hidden, block.len(), columns.clone(), tile, buffers.dweight, first, to);
                }
            }
            if dweight && to.dweight.dtype() != DType::F32 {
                self.store_dweight(columns, buffers.dweight, to);
            }
        }
    }

    /// Writes what no product writes: zeros for padding and for ignored rows, and each row's gradient at its own place.
    fn finish(&self, to: &Gradients<'_>) {
        let d = self.d;
        if !to.accumulate_dweight {
            let from = if self.index.is_empty() { 0 } else { self.vocab * d };
            with_element!(to.dweight.dtype(), T => {
                // SAFETY: as in `forward`.
                let dweight = unsafe { to.dweight.slice_of_mut::<T>() };
                dweight[from..].fill(T::from_f32(0.0));
            });
        }
        with_element!(to.dhidden.dtype(), T => {
            // SAFETY: as in `forward`.
            kernels::spread(unsafe { to.dhidden.slice_of_mut::<T>() }, self.index, d);
        });
    }
}
