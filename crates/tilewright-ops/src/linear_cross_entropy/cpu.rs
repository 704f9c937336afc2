//! The CPU path: matrix products over tiles of rows and vocabulary columns, and one walk over each tile between them.
//!
//! Rows that count are numbered without gaps (`index` maps them back), so ignored rows take part in no product. Gradients of hidden rows are
//! made at their gapless places in the output and spread to their rows at the end, which needs no second buffer.

mod inputs;
mod kernels;
mod layout;
mod packed;

use std::ops::Range;

use self::inputs::Inputs;
use self::layout::Buffers;
pub(super) use self::layout::Layout;
use super::{Backward, Forward, ForwardBackward, Head};
use crate::cpu::disjoint::Disjoint;
use crate::cpu::element::with_element;
use crate::cpu::gemm::{MatRef, gemm};
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
    for block in walk.inputs.blocks(walk.rows()) {
        walk.statistics(block.clone(), &mut buffers, false);
        for (i, &row) in walk.inputs.index[block].iter().enumerate() {
            let (max, log_sum) = (buffers.max[i], buffers.sum[i].ln());
            losses[row as usize] = (max - buffers.target[i]) + log_sum;
            lse[row as usize] = max + log_sum;
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
    for ((shift, scale), &row) in buffers.shift.iter_mut().zip(&mut *buffers.scale).zip(walk.inputs.index) {
        (*shift, *scale) = (lse[row as usize], args.dloss);
    }
    let all = walk.rows();
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
    let all = walk.rows();
    let recompute = layout.recomputes_for_dweight(args.dweight.dtype(), all.len());
    let direct = args.dhidden.dtype() == DType::F32;
    for block in walk.inputs.blocks(all.clone()) {
        walk.statistics(block.clone(), &mut buffers, true);
        for (i, &row) in walk.inputs.index[block.clone()].iter().enumerate() {
            let (max, sum) = (buffers.max[i], buffers.sum[i]);
            // The difference first: with large logits, a log-sum-exp alone would have lost the digits of a small loss.
            losses[row as usize] = (max - buffers.target[i]) + sum.ln();
            (buffers.shift[block.start + i], buffers.scale[block.start + i]) = (max, args.dloss / sum);
        }
        let sums = std::mem::take(&mut buffers.dhidden);
        let dhidden = if direct {
            // SAFETY: as in `forward`.
            let all = unsafe { args.dhidden.slice_of_mut::<f32>() };
            &mut all[block.start * walk.inputs.d..block.end * walk.inputs.d]
        } else {
            &mut sums[..block.len() * walk.inputs.d]
        };
        walk.chunk_gradients(block.clone(), &mut buffers, dhidden, &gradients);
        if args.dweight.dtype() != DType::F32 && !recompute {
            let hidden = walk.inputs.hidden(block.clone(), buffers.gather).at(0);
            for columns in walk.inputs.tiles() {
                let tile = (&buffers.logits[columns.start..], layout.ld);
                walk.add_dweight(hidden, block.len(), columns.clone(), tile, buffers.dweight, true, &gradients);
                walk.store_dweight(columns, buffers.dweight, &gradients);
            }
        }
        if !direct {
            walk.store_dhidden(block, sums, args.dhidden);
        }
        buffers.dhidden = sums;
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

/// One call, and the steps that the three schedules are made of.
struct Walk<'a> {
    cpu: &'a Cpu,
    inputs: Inputs<'a>,
}

impl<'a> Walk<'a> {
    fn new(cpu: &'a Cpu, head: Head<'a>, layout: &'a Layout, index: &'a mut [u32]) -> Self {
        // SAFETY: as in `forward`.
        Walk { cpu, inputs: unsafe { Inputs::new(head, layout, index) } }
    }

    /// The rows that count.
    fn rows(&self) -> Range<usize> {
        0..self.inputs.index.len()
    }

    /// Turns a tile of logits into their gradient, in place and in parallel.
    fn gradient(
        &self,
        block: &Range<usize>,
        columns: Range<usize>,
        tile: &mut [f32],
        shift: &[f32],
        scale: &[f32],
        dloss: f32,
    ) {
        const ROWS_PER_TASK: usize = 8;
        let (isa, inputs, ld, rows) = (self.cpu.isa(), &self.inputs, self.inputs.layout.ld, block.len());
        let tile = Disjoint::new(tile);
        self.cpu.pool().run(rows.div_ceil(ROWS_PER_TASK), &|task, _| {
            let start = task * ROWS_PER_TASK;
            for i in start..(start + ROWS_PER_TASK).min(rows) {
                // SAFETY: no two tasks share a row.
                let logits = unsafe { tile.part(i * ld, i * ld + columns.len()) };
                kernels::softmax(isa, logits, shift[i], scale[i]);
                if let Some(t) = inputs.target_in(block.start + i, &columns) {
                    logits[t] -= dloss;
                }
            }
        });
    }

    /// `dhidden (+)= tile @ weight`.
    fn add_dhidden(
        &self,
        rows: usize,
        columns: Range<usize>,
        (tile, ld): (&[f32], usize),
        dhidden: &mut [f32],
        accumulate: bool,
    ) {
        let (width, d) = (columns.len(), self.inputs.d);
        let (tile, weight) = (MatRef::new(tile, ld, 1), self.inputs.weight(columns).at(0));
        gemm(self.cpu, rows, d, width, tile, weight, dhidden, d, accumulate);
    }

    /// `tile^T @ hidden` into `dweight` when that is f32, else into `sums`. `first` begins a new sum.
    fn add_dweight(
        &self,
        hidden: MatRef<'_>,
        rows: usize,
        columns: Range<usize>,
        (tile, ld): (&[f32], usize),
        sums: &mut [f32],
        first: bool,
        to: &Gradients<'_>,
    ) {
        let (width, d) = (columns.len(), self.inputs.d);
        let tile = MatRef::new(tile, 1, ld);
        let (out, accumulate) = if to.dweight.dtype() == DType::F32 {
            // SAFETY: as in `forward`.
            let all = unsafe { to.dweight.slice_of_mut::<f32>() };
            (&mut all[columns.start * d..columns.end * d], to.accumulate_dweight || !first)
        } else {
            (&mut sums[..width * d], !first)
        };
        gemm(self.cpu, width, d, rows, tile, hidden, out, d, accumulate);
    }

    /// Rounds a finished tile of `dweight` into its 16-bit place.
    fn store_dweight(&self, columns: Range<usize>, sums: &[f32], to: &Gradients<'_>) {
        let elements = columns.start * self.inputs.d..columns.end * self.inputs.d;
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
            let out = &mut unsafe { dhidden.slice_of_mut::<T>() }[rows.start * self.inputs.d..rows.end * self.inputs.d];
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
        let d = self.inputs.d;
        if rows.is_empty() {
            return;
        }
        let ld = self.inputs.layout.ld;
        for columns in self.inputs.tiles() {
            for block in self.inputs.blocks(rows.clone()) {
                let hidden = self.inputs.hidden(block.clone(), buffers.gather).at(0);
                let tile = &mut *buffers.logits;
                let weight = self.inputs.weight(columns.clone()).transposed_at(0);
                gemm(self.cpu, block.len(), columns.len(), d, hidden, weight, tile, ld, false);
                let (shift, scale) = (&buffers.shift[block.clone()], &buffers.scale[block.clone()]);
                self.gradient(&block, columns.clone(), tile, shift, scale, to.dloss);
                if let Some(sums) = &mut dhidden {
                    let sums = &mut sums[(block.start - rows.start) * d..(block.end - rows.start) * d];
                    self.add_dhidden(block.len(), columns.clone(), (tile, ld), sums, columns.start > 0);
                }
                if dweight {
                    let first = block.start == rows.start;
                    self.add_dweight(hidden, block.len(), columns.clone(), (tile, ld), buffers.dweight, first, to);
                }
            }
            if dweight && to.dweight.dtype() != DType::F32 {
                self.store_dweight(columns, buffers.dweight, to);
            }
        }
    }

    /// Writes what no product writes: zeros for padding and for ignored rows, and each row's gradient at its own place.
    fn finish(&self, to: &Gradients<'_>) {
        let d = self.inputs.d;
        if !to.accumulate_dweight {
            let from = if self.inputs.index.is_empty() { 0 } else { self.inputs.vocab * d };
            with_element!(to.dweight.dtype(), T => {
                // SAFETY: as in `forward`.
                let dweight = unsafe { to.dweight.slice_of_mut::<T>() };
                dweight[from..].fill(T::from_f32(0.0));
            });
        }
        with_element!(to.dhidden.dtype(), T => {
            // SAFETY: as in `forward`.
            kernels::spread(unsafe { to.dhidden.slice_of_mut::<T>() }, self.inputs.index, d);
        });
    }
}
