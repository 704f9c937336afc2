//! The loops between the matrix products. Sums run in 16 fixed lanes, so that every instruction set rounds alike.

use crate::cpu::disjoint::Disjoint;
use crate::cpu::isa::per_isa;
use crate::cpu::math::exp;
use crate::cpu::{Cpu, Element};

const LANES: usize = 16;

per_isa! {
    /// The largest logit, and the sum of `exp(logit - largest)`.
    pub(super) fn summary[](logits: &[f32]) -> (f32, f32) {
        let (body, tail) = logits.as_chunks::<LANES>();
        let mut max = [f32::NEG_INFINITY; LANES];
        for x in body {
            for l in 0..LANES {
                max[l] = if x[l] > max[l] { x[l] } else { max[l] };
            }
        }
        let max = max.iter().chain(tail).fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m });
        let mut sum = [0.0; LANES];
        for x in body {
            for l in 0..LANES {
                sum[l] += exp(x[l] - max);
            }
        }
        (max, sum.iter().sum::<f32>() + tail.iter().map(|&x| exp(x - max)).sum::<f32>())
    }
}

per_isa! {
    /// Joins the summaries of all tasks, each of which holds one number a row, in the order of the tasks.
    pub(super) fn join[](task_max: &[f32], task_sum: &[f32], max: &mut [f32], sum: &mut [f32]) {
        max.fill(f32::NEG_INFINITY);
        sum.fill(0.0);
        let rows = max.len();
        for task in task_max.chunks_exact(rows) {
            for (max, &m) in max.iter_mut().zip(task) {
                *max = if m > *max { m } else { *max };
            }
        }
        for (task, task_sum) in task_max.chunks_exact(rows).zip(task_sum.chunks_exact(rows)) {
            for (((sum, &max), &m), &s) in sum.iter_mut().zip(&*max).zip(task).zip(task_sum) {
                *sum += s * exp(m - max);
            }
        }
    }
}

per_isa! {
    /// `out = exp(x - shift) * scale`
    pub(super) fn softmax_into[](x: &[f32], out: &mut [f32], shift: f32, scale: f32) {
        for (o, &x) in out.iter_mut().zip(x) {
            *o = exp(x - shift) * scale;
        }
    }
}

per_isa! {
    /// `x = exp(x - shift) * scale`
    pub(super) fn softmax[](x: &mut [f32], shift: f32, scale: f32) {
        for x in x {
            *x = exp(*x - shift) * scale;
        }
    }
}

per_isa! {
    fn round[T: Element](sums: &[f32], out: &mut [T], accumulate: bool) {
        for (o, s) in out.iter_mut().zip(sums) {
            *o = T::from_f32(if accumulate { o.to_f32() + s } else { *s });
        }
    }
}

/// `out (+)= sums`, rounded once.
pub(super) fn store<T: Element>(cpu: &Cpu, sums: &[f32], out: &mut [T], accumulate: bool) {
    const BLOCK: usize = 8192;
    assert_eq!(sums.len(), out.len());
    let (isa, len, out) = (cpu.isa(), out.len(), Disjoint::new(out));
    cpu.pool().run(len.div_ceil(BLOCK), &|task, _| {
        let range = task * BLOCK..((task + 1) * BLOCK).min(len);
        // SAFETY: blocks are disjoint and inside both slices.
        round(isa, &sums[range.clone()], unsafe { out.part(range.start, range.end) }, accumulate);
    });
}

/// Moves row `i` of `d` elements to row `index[i]`, and writes zeros to all rows that `index` leaves out. `index` ascends.
pub(super) fn spread<T: Element>(rows: &mut [T], index: &[u32], d: usize) {
    let n = rows.len() / d;
    let mut left = index.len();
    // From the end on: row `i` never moves down, so nothing is overwritten before it has moved. Once no gap is left, all are in place.
    for row in (0..n).rev() {
        if left == row + 1 {
            return;
        }
        if left > 0 && index[left - 1] as usize == row {
            left -= 1;
            rows.copy_within(left * d..(left + 1) * d, row * d);
        } else {
            rows[row * d..(row + 1) * d].fill(T::from_f32(0.0));
        }
    }
}

/// Numbers of any type seen as the first `len` of another, of no more bytes and no stricter alignment.
pub(super) fn typed<T: Number>(numbers: &mut [impl Number], len: usize) -> &mut [T] {
    assert!(len * size_of::<T>() <= size_of_val(numbers) && numbers.as_ptr().cast::<T>().is_aligned());
    // SAFETY: inside the slice and aligned by the assertion; every bit pattern is a value of every `Number`.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), len) }
}

/// Numbers as bytes.
pub(super) fn bytes<T: Number>(numbers: &[T]) -> &[u8] {
    // SAFETY: the same memory; a `Number` has no padding.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

/// Bytes as the numbers that they are.
pub(super) fn elements<T: Number>(bytes: &[u8]) -> &[T] {
    assert!(bytes.len().is_multiple_of(size_of::<T>()) && bytes.as_ptr().cast::<T>().is_aligned());
    // SAFETY: whole and aligned by the assertion; every bit pattern is a value of every `Number`.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) }
}

/// Types without padding whose every bit pattern is a value.
///
/// # Safety
/// As said.
pub(super) unsafe trait Number: Copy {}
unsafe impl Number for u8 {}
unsafe impl Number for u32 {}
unsafe impl Number for f32 {}
unsafe impl Number for tilewright_core::f16 {}
unsafe impl Number for tilewright_core::bf16 {}
