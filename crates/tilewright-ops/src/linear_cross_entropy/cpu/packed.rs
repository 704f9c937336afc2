//! Walks in which a task is a strip of vocabulary columns: one thread multiplies, takes the statistics or makes the gradients while the strip is in
//! its cache, and meets the others only at the end of the walk.

use std::ops::Range;

use super::layout::Buffers;
use super::{Gradients, Walk, kernels};
use crate::DType;
use crate::cpu::disjoint::Disjoint;
use crate::cpu::gemm::{MatRef, gemm, multiply_packed, pack_a, pack_b, packed_a_floats, packed_b_floats};

impl Walk<'_> {
    /// Fills `max`, `sum` and `target` for a block of rows; keeps its logits, and its hidden rows as a right operand, when asked to.
    pub(super) fn statistics(&self, block: Range<usize>, buffers: &mut Buffers<'_>, keep: bool) {
        let inputs = &self.inputs;
        let (isa, pool, layout, rows) = (self.cpu.isa(), self.cpu.pool(), inputs.layout, block.len());
        let hidden = inputs.hidden(block.clone(), buffers.gather);

        let part = packed_a_floats(isa, rows, layout.step);
        let packed = Disjoint::new(&mut *buffers.packed);
        let by_row = Disjoint::new(&mut *buffers.packed_by_row);
        let steps = inputs.d.div_ceil(layout.step);
        pool.run(steps + usize::from(keep), &|task, _| {
            // SAFETY: each task has its own step, and the last one the other buffer.
            unsafe {
                if let Some(k) = inputs.steps().nth(task) {
                    let out = packed.part(task * part, task * part + packed_a_floats(isa, rows, k.len()));
                    pack_a(isa, hidden.at(k.start), rows, k.len(), out);
                } else {
                    let out = by_row.part(0, packed_b_floats(isa, inputs.d, rows));
                    pack_b(isa, hidden.at(0), inputs.d, rows, out);
                }
            }
        });
        let packed = &*buffers.packed;

        let tasks = inputs.vocab.div_ceil(layout.task_cols);
        let (task_max, task_sum) = (&mut buffers.task_max[..tasks * rows], &mut buffers.task_sum[..tasks * rows]);
        {
            let (task_max, task_sum) = (Disjoint::new(task_max), Disjoint::new(task_sum));
            let (target, logits) = (Disjoint::new(&mut *buffers.target), Disjoint::new(&mut *buffers.logits));
            let (workers, worker_len, ld) =
                (Disjoint::new(&mut *buffers.workers), layout.worker_len(), layout.tile_ld());
            pool.run(tasks, &|task, worker| {
                // SAFETY: a worker runs one task at a time.
                let own = unsafe { workers.part(worker * worker_len, (worker + 1) * worker_len) };
                let (strip_packed, tile) = layout.worker(own);
                let columns = inputs.strip(task);
                let width = columns.len();
                for (i, k) in inputs.steps().enumerate() {
                    pack_b(isa, inputs.weight(columns.clone()).transposed_at(k.start), width, k.len(), strip_packed);
                    let a = &packed[i * part..];
                    multiply_packed(isa, rows, width, k.len(), a, strip_packed, tile, ld, i > 0, 1.0);
                }
                // SAFETY: each task has its own numbers.
                let (max, sum) = unsafe {
                    let range = (task * rows, (task + 1) * rows);
                    (task_max.part(range.0, range.1), task_sum.part(range.0, range.1))
                };
                for i in 0..rows {
                    let row = &tile[i * ld..][..width];
                    (max[i], sum[i]) = kernels::summary(isa, row);
                    // SAFETY: one task has the row's target; each has its own columns of each row.
                    unsafe {
                        if let Some(t) = inputs.target_in(block.start + i, &columns) {
                            target.part(i, i + 1)[0] = row[t];
                        }
                        if keep {
                            let start = i * layout.ld + columns.start;
                            logits.part(start, start + width).copy_from_slice(row);
                        }
                    }
                }
            });
        }
        kernels::join(isa, task_max, task_sum, &mut buffers.max[..rows], &mut buffers.sum[..rows]);
    }

    /// Makes the gradients of a chunk whose logits are kept: `dhidden`, and `dweight` when that is f32.
    pub(super) fn chunk_gradients(
        &self,
        block: Range<usize>,
        buffers: &mut Buffers<'_>,
        dhidden: &mut [f32],
        to: &Gradients<'_>,
    ) {
        let inputs = &self.inputs;
        let (isa, layout, rows, d) = (self.cpu.isa(), inputs.layout, block.len(), inputs.d);
        let (shift, scale) = (&buffers.shift[block.clone()], &buffers.scale[block.clone()]);
        let hidden = &*buffers.packed_by_row;
        let (worker_len, ld) = (layout.worker_len(), layout.tile_ld());
        let (dloss, accumulate) = (to.dloss, to.accumulate_dweight || block.start > 0);
        let strips_a_span = layout.span() / layout.task_cols;
        for (span, start) in (0..inputs.vocab).step_by(layout.span()).enumerate() {
            let columns = start..(start + layout.span()).min(inputs.vocab);
            {
                let (logits, workers) = (Disjoint::new(&mut *buffers.logits), Disjoint::new(&mut *buffers.workers));
                let dweight = (to.dweight.dtype() == DType::F32).then(|| {
                    // SAFETY: the entry checked that nothing else has this memory.
                    Disjoint::new(unsafe { to.dweight.slice_of_mut::<f32>() })
                });
                self.cpu.pool().run(columns.len().div_ceil(layout.task_cols), &|task, worker| {
                    // SAFETY: a worker runs one task at a time.
                    let own = unsafe { workers.part(worker * worker_len, (worker + 1) * worker_len) };
                    let (strip_packed, tile) = layout.worker(own);
                    let columns = inputs.strip(span * strips_a_span + task);
                    let width = columns.len();
                    for i in 0..rows {
                        let at = i * layout.ld + columns.start;
                        // SAFETY: each task has its own columns of each row.
                        let row = unsafe { logits.part(at, at + width) };
                        let own = &mut tile[i * ld..][..width];
                        kernels::softmax_into(isa, row, own, shift[i], scale[i]);
                        if let Some(t) = inputs.target_in(block.start + i, &columns) {
                            own[t] -= dloss;
                        }
                        row.copy_from_slice(own);
                    }
                    if let Some(dweight) = &dweight {
                        // SAFETY: each task has its own rows.
                        let out = unsafe { dweight.part(columns.start * d, columns.end * d) };
                        pack_a(isa, MatRef::new(tile, 1, ld), width, rows, strip_packed);
                        multiply_packed(isa, width, d, rows, strip_packed, hidden, out, d, accumulate, 1.0);
                    }
                });
            }
            let tile = MatRef::new(&buffers.logits[columns.start..], layout.ld, 1);
            let weight = inputs.weight(columns.clone()).at(0);
            gemm(self.cpu, rows, d, columns.len(), tile, weight, dhidden, d, start > 0);
        }
    }
}
