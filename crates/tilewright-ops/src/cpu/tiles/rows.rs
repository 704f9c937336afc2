//! The element-wise passes between the products: online softmax, its gradient, packing.

use tilewright_core::DType;

use super::simd::{Simd, simd_kernel};
use crate::cpu::Element;

/// A block of scores on its way to probabilities: `rows` queries against `width` keys, row stride `stride`.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub(crate) rows: usize,
    /// Keys, padding included: a multiple of the register width.
    pub(crate) width: usize,
    /// Keys that exist.
    pub(crate) keys: usize,
    pub(crate) stride: usize,
    /// Row `i` sees keys `i + first ..= i + last`.
    pub(crate) first: isize,
    pub(crate) last: isize,
}

impl Block {
    /// No limit on one side: far beyond any block, and far from overflow.
    pub(crate) const FAR: isize = isize::MAX / 2;

    #[inline(always)]
    fn visible(&self, row: usize) -> (usize, usize) {
        let clamp = |x: isize| x.clamp(0, self.keys as isize) as usize;
        let end = clamp(row as isize + 1 + self.last);
        (clamp(row as isize + self.first).min(end), end)
    }
}

/// Turns raw scores `q.k` into `2^(c * score - max)` with the running maximum (in units of log2), zero where masked, and updates the
/// running sum. `output` rows are rescaled to the new maximum, where there was one before.
///
/// # Safety
/// The pointers are valid for the block, `rows` statistics and `rows * head_stride` outputs.
#[inline(always)]
unsafe fn softmax_body<S: Simd>(
    block: Block,
    c: f32,
    scores: *mut f32,
    max: *mut f32,
    sum: *mut f32,
    output: *mut f32,
    head_stride: usize,
) {
    unsafe {
        let lowest = S::splat(f32::NEG_INFINITY);
        let (zero, factor) = (S::splat(0.0), S::splat(c));
        for row in 0..block.rows {
            let (from, to) = block.visible(row);
            let s = scores.add(row * block.stride);
            // Whole registers lie in `whole..end`; one before and one behind them may be mixed, and are the same where both edges fall into it.
            let (first, whole, end) =
                (from / S::LANES * S::LANES, from.next_multiple_of(S::LANES), to / S::LANES * S::LANES);
            let (head, tail) = (from < whole && from < to, end < to && end >= whole);
            // Lanes of the register at `j` that the row does not see become `fill`.
            let edge = |j: usize, x: S, fill: S| fill.below(from.saturating_sub(j), x.below(to - j, fill));
            let mut highest = lowest;
            if head {
                highest = highest.max_or_self(edge(first, S::load(s.add(first)), lowest));
            }
            for j in (whole..end).step_by(S::LANES) {
                highest = highest.max_or_self(S::load(s.add(j)));
            }
            if tail {
                highest = highest.max_or_self(edge(end, S::load(s.add(end)), lowest));
            }
            let old = *max.add(row);
            let new = old.max(highest.reduce_max() * c);
            // While no finite score was seen, nothing is subtracted: 2^-inf is 0 as it should be, and -inf minus itself is not a number.
            let negated = S::splat(if new == f32::NEG_INFINITY { 0.0 } else { -new });
            let mut total = zero;
            let mut j = 0;
            while j < if head { first } else { whole.min(block.width) } {
                zero.store(s.add(j));
                j += S::LANES;
            }
            if head {
                let p = edge(j, S::load(s.add(j)).fma(factor, negated).exp2(), zero);
                p.store(s.add(j));
                total = total.add(p);
                j += S::LANES;
            }
            while j < end {
                let p = S::load(s.add(j)).fma(factor, negated).exp2();
                p.store(s.add(j));
                total = total.add(p);
                j += S::LANES;
            }
            if tail {
                let p = edge(j, S::load(s.add(j)).fma(factor, negated).exp2(), zero);
                p.store(s.add(j));
                total = total.add(p);
                j += S::LANES;
            }
            while j < block.width {
                zero.store(s.add(j));
                j += S::LANES;
            }
            if from == to {
                continue;
            }
            let added = total.reduce_add();
            *max.add(row) = new;
            // The first block, which finds nothing to rescale, comes from -inf.
            if new == old || old == f32::NEG_INFINITY {
                *sum.add(row) += added;
                continue;
            }
            let rescale = (old - new).exp2();
            *sum.add(row) = *sum.add(row) * rescale + added;
            let (out, rescale) = (output.add(row * head_stride), S::splat(rescale));
            for d in (0..head_stride).step_by(S::LANES) {
                S::load(out.add(d)).mul(rescale).store(out.add(d));
            }
        }
    }
}

simd_kernel! {
    /// See the body.
    pub(crate) unsafe fn softmax [] (block: Block, c: f32, scores: *mut f32, max: *mut f32, sum: *mut f32, output: *mut f32, head_stride: usize) = softmax_body
}

/// Of a block whose rows see all keys up to their last: `scores` becomes `P = 2^(c * score - lse)` and `dscores`, which holds `dP = dout v^T`, becomes `P * (dP - D)`; both zero where masked.
///
/// # Safety
/// The pointers are valid for the block and for `rows` statistics.
#[inline(always)]
unsafe fn softmax_backward_body<S: Simd>(
    block: Block,
    c: f32,
    scores: *mut f32,
    dscores: *mut f32,
    lse: *const f32,
    dot: *const f32,
) {
    unsafe {
        let (zero, factor) = (S::splat(0.0), S::splat(c));
        for row in 0..block.rows {
            let (_, visible) = block.visible(row);
            let (s, ds) = (scores.add(row * block.stride), dscores.add(row * block.stride));
            let (negated, d) = (S::splat(-*lse.add(row)), S::splat(*dot.add(row)));
            let mut j = 0;
            while j + S::LANES <= visible {
                let p = S::load(s.add(j)).fma(factor, negated).exp2();
                p.store(s.add(j));
                p.mul(S::load(ds.add(j)).sub(d)).store(ds.add(j));
                j += S::LANES;
            }
            if j < visible {
                // What is masked may hold anything, NaN included: chosen away, not multiplied by zero.
                let rest = visible - j;
                let p = S::load(s.add(j)).fma(factor, negated).exp2().below(rest, zero);
                p.store(s.add(j));
                p.mul(S::load(ds.add(j)).sub(d)).below(rest, zero).store(ds.add(j));
                j += S::LANES;
            }
            while j < block.width {
                zero.store(s.add(j));
                zero.store(ds.add(j));
                j += S::LANES;
            }
        }
    }
}

simd_kernel! {
    /// See the body.
    pub(crate) unsafe fn softmax_backward [] (block: Block, c: f32, scores: *mut f32, dscores: *mut f32, lse: *const f32, dot: *const f32) = softmax_backward_body
}

/// Widens one row of `head` elements to f32 and pads it with zeros to `head_stride`.
///
/// # Safety
/// The pointers are valid for that many elements.
#[inline(always)]
pub(crate) unsafe fn widen_row<S: Simd, T: Element>(src: *const T, head: usize, dst: *mut f32, head_stride: usize) {
    // SAFETY: the caller's promise; the cast is to the type that the dtype names.
    unsafe {
        let mut d = 0;
        if T::DTYPE == DType::F16 {
            while d + S::LANES <= head {
                S::load_f16(src.add(d).cast()).store(dst.add(d));
                d += S::LANES;
            }
        }
        let from = std::slice::from_raw_parts(src.add(d), head - d);
        let to = std::slice::from_raw_parts_mut(dst.add(d), head_stride - d);
        for (t, f) in to.iter_mut().zip(from) {
            *t = f.to_f32();
        }
        to[head - d..].fill(0.0);
    }
}

/// Widens `rows` rows of `head` elements to f32, padded with zeros to `head_stride`.
///
/// # Safety
/// `src` is valid for the rows at stride `src_stride`, `dst` for `rows * head_stride`.
#[inline(always)]
unsafe fn widen_body<S: Simd, T: Element>(
    src: *const T,
    src_stride: usize,
    rows: usize,
    head: usize,
    dst: *mut f32,
    head_stride: usize,
) {
    for row in 0..rows {
        unsafe { widen_row::<S, T>(src.add(row * src_stride), head, dst.add(row * head_stride), head_stride) }
    }
}

simd_kernel! {
    /// See the body.
    pub(crate) unsafe fn widen [T: Element] (src: *const T, src_stride: usize, rows: usize, head: usize, dst: *mut f32, head_stride: usize) = widen_body
}

/// Rounds `rows` rows of `head` elements to storage, each times `scale` and, where `divide` is not null, divided by its row's value.
///
/// # Safety
/// As for [`widen`], the other way, and `divide` is null or valid for `rows`.
#[inline(always)]
unsafe fn narrow_body<S: Simd, T: Element>(
    src: *const f32,
    head_stride: usize,
    rows: usize,
    head: usize,
    scale: f32,
    divide: *const f32,
    dst: *mut T,
    dst_stride: usize,
) {
    for row in 0..rows {
        // SAFETY: the caller's promise; the cast is to the type that the dtype names.
        unsafe {
            let (from, to) = (src.add(row * head_stride), dst.add(row * dst_stride));
            let factor = if divide.is_null() { scale } else { scale / *divide.add(row) };
            let mut d = 0;
            if T::DTYPE == DType::F16 {
                while d + S::LANES <= head {
                    S::load(from.add(d)).mul(S::splat(factor)).store_f16(to.add(d).cast());
                    d += S::LANES;
                }
            }
            let from = std::slice::from_raw_parts(from.add(d), head - d);
            for (t, f) in std::slice::from_raw_parts_mut(to.add(d), head - d).iter_mut().zip(from) {
                *t = T::from_f32(f * factor);
            }
        }
    }
}

simd_kernel! {
    /// See the body.
    pub(crate) unsafe fn narrow [T: Element] (src: *const f32, head_stride: usize, rows: usize, head: usize, scale: f32, divide: *const f32, dst: *mut T, dst_stride: usize) = narrow_body
}

/// Divides rows of `head` elements, `stride` apart, by their row's value.
///
/// # Safety
/// The pointers are valid for that; `head` is a multiple of [`WIDTH`](super::simd::WIDTH).
#[inline(always)]
unsafe fn divide_rows_body<S: Simd>(x: *mut f32, stride: usize, rows: usize, head: usize, divide: *const f32) {
    unsafe {
        for row in 0..rows {
            let (at, factor) = (x.add(row * stride), S::splat(1.0 / *divide.add(row)));
            for d in (0..head).step_by(S::LANES) {
                S::load(at.add(d)).mul(factor).store(at.add(d));
            }
        }
    }
}

simd_kernel! {
    /// See the body.
    pub(crate) unsafe fn divide_rows [] (x: *mut f32, stride: usize, rows: usize, head: usize, divide: *const f32) = divide_rows_body
}

/// `dst (head_stride, rows) = src (rows, head_stride)^T` with rows of `dst` `dst_stride` apart and of `src` `src_stride`.
///
/// # Safety
/// Both are valid for that; `rows` and `head_stride` are multiples of [`WIDTH`](super::simd::WIDTH).
#[inline(always)]
unsafe fn transpose_body<S: Simd>(
    src: *const f32,
    src_stride: usize,
    rows: usize,
    head_stride: usize,
    dst: *mut f32,
    dst_stride: usize,
) {
    unsafe {
        for d in (0..head_stride).step_by(4) {
            for j in (0..rows).step_by(S::LANES) {
                let from = src.add(j * src_stride + d);
                let rows = std::array::from_fn(|i| S::load_quads(from.add(i * src_stride), src_stride));
                for (i, column) in S::transpose_quads(rows).into_iter().enumerate() {
                    column.store(dst.add((d + i) * dst_stride + j));
                }
            }
        }
    }
}

simd_kernel! {
    /// See the body.
    pub(crate) unsafe fn transpose [] (src: *const f32, src_stride: usize, rows: usize, head_stride: usize, dst: *mut f32, dst_stride: usize) = transpose_body
}

/// `dot[i] = sum over d of a[i, d] * b[i, d]`.
///
/// # Safety
/// `a` and `b` are valid for `rows * head_stride`, `dot` for `rows`.
#[inline(always)]
unsafe fn row_dots_body<S: Simd>(a: *const f32, b: *const f32, rows: usize, head_stride: usize, dot: *mut f32) {
    unsafe {
        for row in 0..rows {
            *dot.add(row) = dot_product::<S>(a.add(row * head_stride), b.add(row * head_stride), head_stride);
        }
    }
}

#[inline(always)]
unsafe fn dot_product<S: Simd>(a: *const f32, b: *const f32, n: usize) -> f32 {
    unsafe {
        let mut sum = S::splat(0.0);
        for d in (0..n).step_by(S::LANES) {
            sum = S::load(a.add(d)).fma(S::load(b.add(d)), sum);
        }
        sum.reduce_add()
    }
}

simd_kernel! {
    /// See the body.
    pub(crate) unsafe fn row_dots [] (a: *const f32, b: *const f32, rows: usize, head_stride: usize, dot: *mut f32) = row_dots_body
}
