//! The loops between the matrix products. Sums run in 16 fixed lanes, so that every instruction set rounds alike.

use crate::cpu::disjoint::Disjoint;
use crate::cpu::isa::per_isa;
use crate::cpu::math::exp;
use crate::cpu::{Cpu, Element};

const LANES: usize = 16;

/// What is known of a row's logits so far.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Stats {
    /// The largest logit.
    pub(super) max: f32,
    /// The sum of `exp(logit - max)`.
    pub(super) sum: f32,
    /// The target's logit, once its column has passed.
    pub(super) target: f32,
}

impl Stats {
    pub(super) const FLOATS: usize = 3;
    pub(super) const EMPTY: Stats = Stats { max: f32::NEG_INFINITY, sum: 0.0, target: 0.0 };

    /// The difference first: with large logits, `lse` alone would have lost the digits of a small loss.
    pub(super) fn loss(&self) -> f32 {
        (self.max - self.target) + self.sum.ln()
    }

    pub(super) fn lse(&self) -> f32 {
        self.max + self.sum.ln()
    }
}

per_isa! {
    /// Takes more logits of a row into its statistics.
    pub(super) fn merge[](logits: &[f32], stats: &mut Stats) {
        let (body, tail) = logits.as_chunks::<LANES>();
        let mut max = [f32::NEG_INFINITY; LANES];
        for x in body {
            for l in 0..LANES {
                max[l] = if x[l] > max[l] { x[l] } else { max[l] };
            }
        }
        let max = max.iter().chain(tail).fold(stats.max, |m, &x| if x > m { x } else { m });
        let mut sum = [0.0; LANES];
        for x in body {
            for l in 0..LANES {
                sum[l] += exp(x[l] - max);
            }
        }
        let sum: f32 = sum.iter().sum::<f32>() + tail.iter().map(|&x| exp(x - max)).sum::<f32>();
        let old = if stats.sum == 0.0 { 0.0 } else { stats.sum * exp(stats.max - max) };
        (stats.max, stats.sum) = (max, old + sum);
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
unsafe impl Number for Stats {}
