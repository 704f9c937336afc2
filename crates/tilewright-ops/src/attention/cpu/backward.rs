//! Backward: blocks of keys against blocks of queries, probabilities recomputed from the saved log-sum-exp.

use super::{BACKWARD_KEYS as KEYS, Cut, QUERIES, Shared, Sizes, log2_scale};
use crate::Tensor;
use crate::cpu::tiles::product::{Left, Product, Triangle, product};
use crate::cpu::tiles::rows::{Block, narrow, row_dots, softmax_backward, transpose, widen};
use crate::cpu::tiles::simd::WIDTH;
use crate::cpu::{Cpu, Element, Isa};

/// Where a thread keeps what, in f32 from the start of its part of the workspace.
pub(super) struct Layout {
    queries: usize,
    dout: usize,
    /// Without shares: `dQ` of the whole (batch, head). With shares each has its own, behind the threads' parts.
    dqueries: usize,
    /// `D = sum over d of dO * O`, and the log-sum-exp in units of log2.
    dot: usize,
    lse: usize,
    keys: usize,
    keys_transposed: usize,
    values_transposed: usize,
    dkeys: usize,
    dvalues: usize,
    scores: usize,
    dscores: usize,
    pub(super) floats: usize,
    /// `dQ` of every share, summed in their order at the end.
    pub(super) shared_floats: usize,
}

impl Layout {
    pub(super) fn new(sizes: Sizes) -> Self {
        let (t, stride) = (sizes.t, sizes.stride());
        let (queries, keys) = (t.min(QUERIES), t.next_multiple_of(WIDTH).min(KEYS));
        let shares = sizes.shares();
        let mut cut = Cut::new();
        Layout {
            queries: cut.take(t * stride),
            dout: cut.take(t * stride),
            dqueries: cut.take(if shares == 1 { t * stride } else { 0 }),
            dot: cut.take(t),
            lse: cut.take(t),
            keys: cut.take(keys * stride),
            keys_transposed: cut.take(stride * keys),
            values_transposed: cut.take(stride * keys),
            dkeys: cut.take(keys * stride),
            dvalues: cut.take(keys * stride),
            scores: cut.take(queries * keys),
            dscores: cut.take(queries * keys),
            floats: cut.next,
            shared_floats: if shares == 1 { 0 } else { shares * sizes.b * sizes.heads * t * stride },
        }
    }
}

/// The tensors of a call.
pub(in super::super) struct Tensors<'a> {
    pub(in super::super) qkv: &'a Tensor,
    pub(in super::super) out: &'a Tensor,
    pub(in super::super) lse: &'a Tensor,
    pub(in super::super) dout: &'a Tensor,
    pub(in super::super) dqkv: &'a Tensor,
    pub(in super::super) workspace: &'a Tensor,
}

pub(in super::super) fn backward<T: Element>(cpu: &Cpu, sizes: Sizes, tensors: &Tensors<'_>) {
    let layout = Layout::new(sizes);
    let (pairs, shares, isa) = (sizes.b * sizes.heads, sizes.shares(), cpu.isa());
    let (c, stride, size) = (sizes.c(), sizes.stride(), sizes.t * sizes.stride());
    // SAFETY: the op's check fixed dtypes and sizes, and that no output overlaps anything; tasks write disjoint rows or columns, each
    // thread its own part of the workspace, and each share its own `dQ`.
    unsafe {
        let (qkv, out, dout) = (tensors.qkv.slice_of::<T>(), tensors.out.slice_of::<T>(), tensors.dout.slice_of::<T>());
        let lse = tensors.lse.slice_of::<f32>();
        let dqkv = Shared(tensors.dqkv.slice_of_mut::<T>().as_mut_ptr());
        let workspace = Shared(tensors.workspace.slice_of_mut::<f32>().as_mut_ptr());
        let shared = Shared(workspace.0.wrapping_add(cpu.threads() * layout.floats));
        cpu.pool().run(pairs * shares, &|task, worker| {
            let (qkv_start, out_start, lse_start) = sizes.starts(task / shares);
            let workspace = workspace.at(worker * layout.floats);
            let task = Task {
                isa,
                sizes,
                layout: &layout,
                qkv: qkv.as_ptr().add(qkv_start),
                out: out.as_ptr().add(out_start),
                lse: lse.as_ptr().add(lse_start),
                dout: dout.as_ptr().add(out_start),
                dqkv: dqkv.at(qkv_start),
                workspace,
                dqueries: if shares == 1 { workspace.add(layout.dqueries) } else { shared.at(task * size) },
                share: task % shares,
                shares,
            };
            task.run();
        });
        if shares == 1 {
            return;
        }
        let blocks = sizes.t.div_ceil(QUERIES);
        cpu.pool().run(pairs * blocks, &|task, _| {
            let (pair, first) = (task / blocks, task % blocks * QUERIES);
            let rows = QUERIES.min(sizes.t - first);
            let of_share = |share: usize| shared.at((pair * shares + share) * size + first * stride);
            let sum = std::slice::from_raw_parts_mut(of_share(0), rows * stride);
            for share in 1..shares {
                let more = std::slice::from_raw_parts(of_share(share), rows * stride);
                for (s, m) in sum.iter_mut().zip(more) {
                    *s += m;
                }
            }
            let to = dqkv.at(sizes.starts(pair).0 + first * 3 * c);
            narrow::<T>(isa, sum.as_ptr(), stride, rows, sizes.head, scale(sizes.head), std::ptr::null(), to, 3 * c);
        });
    }
}

/// `1 / sqrt(hs)`, applied once to finished `dQ` and `dK`.
fn scale(head: usize) -> f32 {
    (1.0 / (head as f64).sqrt()) as f32
}

/// The key blocks `share`, `share + shares`, ... of one (batch, head).
struct Task<'a, T> {
    isa: Isa,
    sizes: Sizes,
    layout: &'a Layout,
    qkv: *const T,
    out: *const T,
    lse: *const f32,
    dout: *const T,
    dqkv: *mut T,
    workspace: *mut f32,
    dqueries: *mut f32,
    share: usize,
    shares: usize,
}

impl<T: Element> Task<'_, T> {
    /// # Safety
    /// The pointers are valid for their (batch, head) and the layout; nobody else touches these rows, `dqueries` or this workspace
    /// meanwhile.
    unsafe fn run(&self) {
        let Task { isa, sizes, .. } = *self;
        let (t, head, c, stride) = (sizes.t, sizes.head, sizes.c(), sizes.stride());
        let start = self.share * KEYS;
        unsafe {
            // Earlier queries see none of this share's keys.
            std::slice::from_raw_parts_mut(self.dqueries, start.min(t) * stride).fill(0.0);
            if start >= t {
                return;
            }
            self.pack_queries(start);
            for key in (start..t).step_by(self.shares * KEYS) {
                let keys = KEYS.min(t - key);
                self.pack_keys(key, keys);
                for first in (key..t).step_by(QUERIES) {
                    self.block(key, keys, first, key == start);
                }
                let (dkeys, dvalues) = (self.layout.dkeys, self.layout.dvalues);
                let none = std::ptr::null();
                let to = self.dqkv.add(key * 3 * c);
                narrow(isa, self.workspace.add(dkeys), stride, keys, head, scale(head), none, to.add(c), 3 * c);
                narrow(isa, self.workspace.add(dvalues), stride, keys, head, 1.0, none, to.add(2 * c), 3 * c);
            }
            if self.shares == 1 {
                narrow(isa, self.dqueries, stride, t, head, scale(head), std::ptr::null(), self.dqkv, 3 * c);
            }
        }
    }

    /// The five products of the queries from `first` on with the packed keys; `fresh`: the first keys that these queries meet.
    unsafe fn block(&self, key: usize, keys: usize, first: usize, fresh: bool) {
        let Task { isa, sizes, layout, .. } = *self;
        let (head, stride) = (sizes.head, sizes.stride());
        let (rows, width) = (QUERIES.min(sizes.t - first), keys.next_multiple_of(WIDTH));
        let diagonal = first == key;
        let triangle = |t: Triangle| if diagonal { t } else { Triangle::Full };
        unsafe {
            let at = |start: usize| self.workspace.add(start);
            let (scores, dscores) = (at(layout.scores), at(layout.dscores));
            let (queries, dout) = (at(layout.queries).add(first * stride), at(layout.dout).add(first * stride));
            for (a, b, c) in [(queries, layout.keys_transposed, scores), (dout, layout.values_transposed, dscores)] {
                let full = Product {
                    m: rows,
                    n: width,
                    k: head,
                    a,
                    lda: stride,
                    left: Left::RowMajor,
                    b: at(b),
                    ldb: width,
                    c,
                    ldc: width,
                    accumulate: false,
                    triangle: triangle(Triangle::Columns(0)),
                };
                product(isa, &full);
            }
            let offset = first as isize - key as isize;
            let shape = Block { rows, width, keys, stride: width, first: -Block::FAR, last: offset };
            let (lse, dot) = (at(layout.lse).add(first), at(layout.dot).add(first));
            softmax_backward(isa, shape, log2_scale(head), scores, dscores, lse, dot);
            for (a, b, c) in [(scores, dout, layout.dvalues), (dscores, queries, layout.dkeys)] {
                let summed_over_queries = Product {
                    m: keys,
                    n: stride,
                    k: rows,
                    a,
                    lda: width,
                    left: Left::Transposed,
                    b,
                    ldb: stride,
                    c: at(c),
                    ldc: stride,
                    accumulate: !diagonal,
                    triangle: triangle(Triangle::QueriesFrom(0)),
                };
                product(isa, &summed_over_queries);
            }
            let summed_over_keys = Product {
                m: rows,
                n: stride,
                k: keys,
                a: dscores,
                lda: width,
                left: Left::RowMajor,
                b: at(layout.keys),
                ldb: stride,
                c: self.dqueries.add(first * stride),
                ldc: stride,
                accumulate: !fresh,
                triangle: triangle(Triangle::KeysUpTo(0)),
            };
            product(isa, &summed_over_keys);
        }
    }

    /// Packs queries and output gradients from `start` on, and computes what each row needs once.
    unsafe fn pack_queries(&self, start: usize) {
        let Task { isa, sizes, layout, .. } = *self;
        let (t, head, c, stride) = (sizes.t, sizes.head, sizes.c(), sizes.stride());
        unsafe {
            let at = |start: usize| self.workspace.add(start);
            let (queries, dout) = (at(layout.queries).add(start * stride), at(layout.dout).add(start * stride));
            widen(isa, self.qkv.add(start * 3 * c), 3 * c, t - start, head, queries, stride);
            widen(isa, self.dout.add(start * c), c, t - start, head, dout, stride);
            for first in (start..t).step_by(KEYS) {
                let rows = KEYS.min(t - first);
                // The buffer of `dK` is free still.
                let out = at(layout.dkeys);
                widen(isa, self.out.add(first * c), c, rows, head, out, stride);
                let dout = at(layout.dout).add(first * stride);
                row_dots(isa, out, dout, rows, stride, at(layout.dot).add(first));
            }
            for row in start..t {
                at(layout.lse).add(row).write(*self.lse.add(row) * std::f32::consts::LOG2_E);
            }
        }
    }

    /// Packs a block of keys and values.
    unsafe fn pack_keys(&self, key: usize, keys: usize) {
        let Task { isa, sizes, layout, .. } = *self;
        let (head, c, stride) = (sizes.head, sizes.c(), sizes.stride());
        let width = keys.next_multiple_of(WIDTH);
        unsafe {
            let at = |start: usize| self.workspace.add(start);
            let from = self.qkv.add(key * 3 * c);
            widen(isa, from.add(c), 3 * c, keys, head, at(layout.keys), stride);
            // Behind the live rows lies what was there before: those keys are seen by no query.
            transpose(isa, at(layout.keys), stride, width, stride, at(layout.keys_transposed), width);
            // The rows of the values are needed only for this; the buffer of `dV` is free still.
            widen(isa, from.add(2 * c), 3 * c, keys, head, at(layout.dvalues), stride);
            transpose(isa, at(layout.dvalues), stride, width, stride, at(layout.values_transposed), width);
        }
    }
}
