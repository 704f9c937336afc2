//! One token a row against the cache. Bound by memory: every cached key and value is read once.

use super::{Shared, log2_scale};
use crate::Tensor;
use crate::attention::MAX_HEAD;
use crate::cpu::tiles::rows::widen_row;
use crate::cpu::tiles::simd::{Simd, WIDTH, simd_kernel};
use crate::cpu::{Cpu, Element};

/// Keys between two updates of the running maximum.
const KEYS: usize = 64;

/// Sizes and tensors of a call.
pub(in super::super) struct Tensors<'a> {
    pub(in super::super) heads: usize,
    pub(in super::super) head: usize,
    pub(in super::super) position: usize,
    pub(in super::super) qkv: &'a Tensor,
    pub(in super::super) k_cache: &'a Tensor,
    pub(in super::super) v_cache: &'a Tensor,
    pub(in super::super) out: &'a Tensor,
}

pub(in super::super) fn decode<T: Element>(cpu: &Cpu, b: usize, longest: usize, tensors: &Tensors<'_>) {
    let &Tensors { heads, head, position, .. } = tensors;
    let (c, isa) = (heads * head, cpu.isa());
    // SAFETY: the op's check fixed dtypes and sizes, and that no output overlaps anything; a task writes the columns of its own
    // (batch, head) and reads no others of the caches.
    unsafe {
        let qkv = tensors.qkv.slice_of::<T>();
        let k_cache = Shared(tensors.k_cache.slice_of_mut::<T>().as_mut_ptr());
        let v_cache = Shared(tensors.v_cache.slice_of_mut::<T>().as_mut_ptr());
        let out = Shared(tensors.out.slice_of_mut::<T>().as_mut_ptr());
        cpu.pool().run(b * heads, &|task, _| {
            let (batch, column) = (task / heads, task % heads * head);
            let (keys, values) = (k_cache.at(batch * longest * c + column), v_cache.at(batch * longest * c + column));
            let new = qkv.as_ptr().add(batch * 3 * c + column);
            new.add(c).copy_to_nonoverlapping(keys.add(position * c), head);
            new.add(2 * c).copy_to_nonoverlapping(values.add(position * c), head);
            attend::<T>(isa, new, keys, values, c, position + 1, head, out.at(batch * c + column));
        });
    }
}

/// `out = softmax(scale * query keys^T) values` for one query.
///
/// # Safety
/// The pointers are valid for `count` rows of `head` elements at row stride `stride`.
#[inline(always)]
unsafe fn attend_body<S: Simd, T: Element>(
    query: *const T,
    keys: *const T,
    values: *const T,
    stride: usize,
    count: usize,
    head: usize,
    out: *mut T,
) {
    let padded = head.next_multiple_of(WIDTH);
    let factor = log2_scale(head);
    let (mut q, mut row, mut sums) = ([0.0f32; MAX_HEAD], [0.0f32; MAX_HEAD], [0.0f32; MAX_HEAD]);
    let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0f32);
    unsafe {
        widen_row::<S, T>(query, head, q.as_mut_ptr(), padded);
        for first in (0..count).step_by(KEYS) {
            let live = KEYS.min(count - first);
            let mut scores = [f32::NEG_INFINITY; KEYS];
            for (j, score) in scores[..live].iter_mut().enumerate() {
                widen_row::<S, T>(keys.add((first + j) * stride), head, row.as_mut_ptr(), padded);
                let mut dot = S::splat(0.0);
                for d in (0..padded).step_by(S::LANES) {
                    dot = S::load(q.as_ptr().add(d)).fma(S::load(row.as_ptr().add(d)), dot);
                }
                *score = dot.reduce_add() * factor;
            }
            let new = scores.iter().copied().fold(max, f32::max);
            let rescale = (max - new).exp2();
            max = new;
            sum *= rescale;
            for s in &mut sums[..padded] {
                *s *= rescale;
            }
            let mut total = S::splat(0.0);
            for j in (0..KEYS).step_by(S::LANES) {
                let at = scores.as_mut_ptr().add(j);
                let p = S::load(at).sub(S::splat(max)).exp2();
                p.store(at);
                total = total.add(p);
            }
            sum += total.reduce_add();
            for (j, &p) in scores[..live].iter().enumerate() {
                widen_row::<S, T>(values.add((first + j) * stride), head, row.as_mut_ptr(), padded);
                let p = S::splat(p);
                for d in (0..padded).step_by(S::LANES) {
                    let at = sums.as_mut_ptr().add(d);
                    p.fma(S::load(row.as_ptr().add(d)), S::load(at)).store(at);
                }
            }
        }
        for d in 0..head {
            out.add(d).write(T::from_f32(sums[d] / sum));
        }
    }
}

simd_kernel! {
    /// See the body.
    unsafe fn attend [T: Element] (query: *const T, keys: *const T, values: *const T, stride: usize, count: usize, head: usize, out: *mut T) = attend_body
}
