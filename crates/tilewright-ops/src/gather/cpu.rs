//! Rows are copied in tasks of a fixed size. Bound by memory: the table's rows are far apart.

use super::Forward;
use crate::cpu::disjoint::Disjoint;
use crate::cpu::isa::per_isa;
use crate::cpu::{Cpu, Element};

/// Elements of a task: below it, waking another thread costs more than it saves.
const TASK: usize = 16 * 1024;

pub(super) fn forward<T: Element>(cpu: &Cpu, args: &Forward<'_>, width: usize) {
    let isa = cpu.isa();
    // SAFETY: the contract checked dtypes, shapes, overlaps and every index; no other op runs meanwhile.
    let (table, index) = unsafe { (args.table.slice_of::<T>(), args.index.slice_of::<i32>()) };
    let out = Disjoint::new(unsafe { args.out.slice_of_mut::<f32>() });
    let rows = (TASK / width.max(1)).max(1);
    cpu.pool().run(index.len().div_ceil(rows), &|task, _| {
        let (first, end) = (task * rows, index.len().min((task + 1) * rows));
        // SAFETY: tasks own disjoint ranges of rows.
        let out = unsafe { out.part(first * width, end * width) };
        for (out, &row) in out.chunks_exact_mut(width.max(1)).zip(&index[first..end]) {
            widen(isa, &table[row as usize * width..(row as usize + 1) * width], out);
        }
    });
}

per_isa! {
    fn widen[T: Element](row: &[T], out: &mut [f32]) {
        for (o, x) in out.iter_mut().zip(row) {
            *o = x.to_f32();
        }
    }
}
