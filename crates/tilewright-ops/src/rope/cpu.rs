//! Rows are independent and split into tasks of a fixed size.

use super::Forward;
use crate::cpu::Cpu;
use crate::cpu::disjoint::Disjoint;
use crate::cpu::isa::per_isa;

/// Elements of a task.
const TASK: usize = 16 * 1024;

pub(super) fn forward(cpu: &Cpu, args: &Forward<'_>, width: usize, head: usize) {
    let (isa, columns) = (cpu.isa(), args.heads * head);
    // SAFETY: the contract checked dtypes, shapes, overlaps and every position; no other op runs meanwhile.
    let (positions, table) = unsafe { (args.positions.slice_of::<i32>(), args.table.slice_of::<f32>()) };
    let x = Disjoint::new(unsafe { args.x.slice_of_mut::<f32>() });
    let rows = (TASK / columns.max(1)).max(1);
    cpu.pool().run(positions.len().div_ceil(rows), &|task, _| {
        for row in task * rows..positions.len().min((task + 1) * rows) {
            let angles = positions[row] as usize * head;
            // SAFETY: each row belongs to one task.
            let x = unsafe { x.part(row * width, row * width + columns) };
            turn(isa, x, &table[angles..angles + head]);
        }
    });
}

per_isa! {
    /// Turns every head of a row. A multiply and an add, each rounded: all instruction sets agree to the bit.
    fn turn[](row: &mut [f32], table: &[f32]) {
        let half = table.len() / 2;
        let (cosines, sines) = table.split_at(half);
        for head in row.chunks_exact_mut(table.len()) {
            let (low, high) = head.split_at_mut(half);
            for (((a, b), c), s) in low.iter_mut().zip(high).zip(cosines).zip(sines) {
                (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
            }
        }
    }
}
