//! Forward: blocks of queries against the packed keys and values of their (batch, head).

use super::{Cut, QUERIES, Shared, Sizes, log2_scale};
use crate::Tensor;
use crate::cpu::tiles::product::{Left, Product, Triangle, product};
use crate::cpu::tiles::rows::{Block, narrow, softmax, transpose, widen};
use crate::cpu::tiles::simd::WIDTH;
use crate::cpu::{Cpu, Element, Isa};

/// Keys of a block: more than the queries, since the product with V then runs longer between rescalings.
const KEYS: usize = 128;

/// Where a thread keeps what, in f32 from the start of its part of the workspace.
pub(super) struct Layout {
    /// Keys by block, each `(padded hs, keys)`.
    keys: usize,
    values: usize,
    /// Rows of keys before they are transposed.
    rows: usize,
    queries: usize,
    output: usize,
    scores: usize,
    max: usize,
    sum: usize,
    pub(super) floats: usize,
}

impl Layout {
    pub(super) fn new(sizes: Sizes) -> Self {
        let (stride, padded) = (sizes.stride(), sizes.t.next_multiple_of(WIDTH));
        let (queries, keys) = (sizes.t.min(QUERIES), padded.min(KEYS));
        let mut cut = Cut::new();
        Layout {
            keys: cut.take(stride * padded),
            values: cut.take(sizes.t * stride),
            rows: cut.take(keys * stride),
            queries: cut.take(queries * stride),
            output: cut.take(queries * stride),
            scores: cut.take(queries * keys),
            max: cut.take(queries),
            sum: cut.take(queries),
            floats: cut.next,
        }
    }
}

pub(in super::super) fn forward<T: Element>(
    cpu: &Cpu,
    sizes: Sizes,
    qkv: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    workspace: &Tensor,
) {
    let layout = Layout::new(sizes);
    let (pairs, shares, isa) = (sizes.b * sizes.heads, sizes.shares(), cpu.isa());
    // SAFETY: the op's check fixed dtypes and sizes, and that no output overlaps anything; tasks write disjoint rows or columns, and each
    // thread its own part of the workspace.
    unsafe {
        let qkv = qkv.slice_of::<T>();
        let out = Shared(out.slice_of_mut::<T>().as_mut_ptr());
        let lse = Shared(lse.slice_of_mut::<f32>().as_mut_ptr());
        let workspace = Shared(workspace.slice_of_mut::<f32>().as_mut_ptr());
        cpu.pool().run(pairs * shares, &|task, worker| {
            let (qkv_start, out_start, lse_start) = sizes.starts(task / shares);
            let task = Task {
                isa,
                sizes,
                layout: &layout,
                qkv: qkv.as_ptr().add(qkv_start),
                out: out.at(out_start),
                lse: lse.at(lse_start),
                workspace: workspace.at(worker * layout.floats),
                share: task % shares,
                shares,
            };
            task.run();
        });
    }
}

/// The query blocks `share`, `share + shares`, ... of one (batch, head).
struct Task<'a, T> {
    isa: Isa,
    sizes: Sizes,
    layout: &'a Layout,
    qkv: *const T,
    out: *mut T,
    lse: *mut f32,
    workspace: *mut f32,
    share: usize,
    shares: usize,
}

impl<T: Element> Task<'_, T> {
    /// # Safety
    /// The pointers are valid for their (batch, head) and the layout; nobody else touches these rows or this workspace meanwhile.
    unsafe fn run(&self) {
        let Task { isa, sizes, .. } = *self;
        let (t, head, c, stride) = (sizes.t, sizes.head, sizes.c(), sizes.stride());
        let blocks = t.div_ceil(QUERIES);
        let Some(last) = (self.share..blocks).step_by(self.shares).next_back() else { return };
        unsafe {
            self.pack_keys((last * QUERIES + QUERIES).min(t));
            let at = |start: usize| self.workspace.add(start);
            let (queries, output) = (at(self.layout.queries), at(self.layout.output));
            let (scores, max, sum) = (at(self.layout.scores), at(self.layout.max), at(self.layout.sum));
            for block in (self.share..blocks).step_by(self.shares) {
                let first = block * QUERIES;
                let rows = QUERIES.min(t - first);
                widen::<T>(isa, self.qkv.add(first * 3 * c), 3 * c, rows, head, queries, stride);
                std::slice::from_raw_parts_mut(max, rows).fill(f32::NEG_INFINITY);
                std::slice::from_raw_parts_mut(sum, rows).fill(0.0);
                for key in (0..first + rows).step_by(KEYS) {
                    // Keys that this block sees, and their padded width in the packed block.
                    let keys = KEYS.min(first + rows - key);
                    let (width, packed) = (keys.next_multiple_of(WIDTH), self.packed_width(key));
                    let offset = first as isize - key as isize;
                    let diagonal = key + keys > first + 1;
                    product(
                        isa,
                        &Product {
                            m: rows,
                            n: width,
                            k: head,
                            a: queries,
                            lda: stride,
                            left: Left::RowMajor,
                            b: at(self.layout.keys).add(key * stride),
                            ldb: packed,
                            c: scores,
                            ldc: width,
                            accumulate: false,
                            triangle: if diagonal { Triangle::Columns(offset) } else { Triangle::Full },
                        },
                    );
                    let shape = Block { rows, width, keys, stride: width, first: -Block::FAR, last: offset };
                    softmax(isa, shape, log2_scale(head), scores, max, sum, output, stride);
                    product(
                        isa,
                        &Product {
                            m: rows,
                            n: stride,
                            k: keys,
                            a: scores,
                            lda: width,
                            left: Left::RowMajor,
                            b: at(self.layout.values).add(key * stride),
                            ldb: stride,
                            c: output,
                            ldc: stride,
                            accumulate: key > 0,
                            triangle: if diagonal { Triangle::KeysUpTo(offset) } else { Triangle::Full },
                        },
                    );
                }
                narrow::<T>(isa, output, stride, rows, head, 1.0, sum, self.out.add(first * c), c);
                for row in 0..rows {
                    let lse = *max.add(row) * std::f32::consts::LN_2 + (*sum.add(row)).ln();
                    self.lse.add(first + row).write(lse);
                }
            }
        }
    }

    /// Keys of the packed block that starts at `key`, padding included.
    fn packed_width(&self, key: usize) -> usize {
        KEYS.min(self.sizes.t.next_multiple_of(WIDTH) - key)
    }

    /// Packs the first `count` keys and values.
    unsafe fn pack_keys(&self, count: usize) {
        let Task { isa, sizes, .. } = *self;
        let (head, c, stride) = (sizes.head, sizes.c(), sizes.stride());
        unsafe {
            let (rows, keys) = (self.workspace.add(self.layout.rows), self.workspace.add(self.layout.keys));
            for key in (0..count).step_by(KEYS) {
                let live = KEYS.min(count - key);
                widen::<T>(isa, self.qkv.add(key * 3 * c + c), 3 * c, live, head, rows, stride);
                // Behind the live rows lies what was there before: those keys are seen by no query.
                let width = self.packed_width(key);
                transpose(isa, rows, stride, width, stride, keys.add(key * stride), width);
            }
            let values = self.workspace.add(self.layout.values);
            widen::<T>(isa, self.qkv.add(2 * c), 3 * c, count, head, values, stride);
        }
    }
}
