//! Some hundred queries of one (row, head).

use super::ids::{Ids, hide};
use super::{KEYS, Layout, QUERIES, Sight};
use crate::DType;
use crate::cpu::tiles::product::{Left, Product, Triangle, product};
use crate::cpu::tiles::rows::{Block, divide_rows, narrow, softmax, transpose, widen};
use crate::cpu::tiles::simd::WIDTH;
use crate::cpu::tiles::{fetch_rows, log2_scale};
use crate::cpu::{Element, Isa};

/// Queries `first..first + count` of one (row, head).
pub(super) struct Task<'a, T> {
    pub(super) isa: Isa,
    pub(super) layout: &'a Layout,
    pub(super) head: usize,
    /// The first query of the task.
    pub(super) q: *const T,
    pub(super) q_width: usize,
    /// The first key and the first value of the row.
    pub(super) keys: *const T,
    pub(super) values: *const T,
    pub(super) kv_width: usize,
    pub(super) out: *mut T,
    pub(super) d: usize,
    pub(super) workspace: *mut f32,
    /// The row's first token.
    pub(super) row_start: usize,
    pub(super) length: usize,
    /// The row's first query.
    pub(super) query: usize,
    /// The task's first query, counted from the row's.
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) sight: Sight<'a>,
}

/// Rows of queries, keys and values that are needed soon.
#[derive(Clone, Copy)]
pub(super) struct Soon<T> {
    q: *const T,
    keys: *const T,
    values: *const T,
    queries: usize,
    rows: usize,
}

impl<T> Default for Soon<T> {
    fn default() -> Self {
        let none = std::ptr::null();
        Soon { q: none, keys: none, values: none, queries: 0, rows: 0 }
    }
}

/// Keys `at..at + block.keys` of those packed, which are `packed` wide.
#[derive(Clone, Copy)]
struct Keys {
    at: usize,
    packed: usize,
}

impl<T: Element> Task<'_, T> {
    /// # Safety
    /// The pointers are valid for their (row, head) and the layout; nobody else touches these outputs or this workspace meanwhile.
    pub(super) unsafe fn run(&self, next: Soon<T>) {
        let Task { isa, head, count, .. } = *self;
        let stride = head.next_multiple_of(WIDTH);
        let at = |start: usize| self.workspace.wrapping_add(start);
        let (max, sum) = (at(self.layout.max), at(self.layout.sum));
        unsafe {
            std::slice::from_raw_parts_mut(max, count).fill(f32::NEG_INFINITY);
            std::slice::from_raw_parts_mut(sum, count).fill(0.0);
            match self.sight {
                Sight::Narrow(half) => self.run_narrow(half, next),
                _ => self.run_blocks(next),
            }
            if !self.in_place() {
                narrow::<T>(isa, at(self.layout.output), stride, count, head, 1.0, sum, self.out, self.d);
            }
        }
    }

    /// Whether each block of queries meets all its keys at once.
    fn once(&self) -> bool {
        matches!(self.sight, Sight::Narrow(_)) || self.length <= KEYS
    }

    /// Whether queries are read and results written where they lie: once, as f32, in whole registers. What is used more often had better lie
    /// close together.
    fn in_place(&self) -> bool {
        self.once() && T::DTYPE == DType::F32 && self.head.is_multiple_of(WIDTH)
    }

    /// Queries of a block: all blocks equal, since a short rest would run at the speed of a whole one.
    fn block_size(&self) -> usize {
        let blocks = self.count.div_ceil(QUERIES).max(1);
        self.count.div_ceil(blocks).next_multiple_of(6).min(QUERIES)
    }

    /// The keys that any query of the task sees lie in this range.
    fn reach(&self) -> (usize, usize) {
        let Task { first, count, length, .. } = *self;
        match self.sight {
            // Multiples of a register from the row's start, as where all rows meet all keys.
            Sight::Narrow(half) => (aligned(first, half), (first + count + half).min(length)),
            Sight::Band(half) => {
                (first.saturating_sub(half) / KEYS * KEYS, (first + count).saturating_add(half).min(length))
            }
            _ => (0, length),
        }
    }

    /// What the task reads first.
    pub(super) fn start(&self) -> Soon<T> {
        let (from, to) = self.reach();
        let (queries, rows) = match self.sight {
            Sight::Narrow(half) => {
                let size = self.block_size().min(self.count);
                (size, (self.first + size + half).min(self.length) - from)
            }
            _ => (self.count, KEYS.min(to - from)),
        };
        self.soon(0, queries, from, rows)
    }

    /// Queries from `query` of the task on, keys from `key` of the row on.
    fn soon(&self, query: usize, queries: usize, key: usize, rows: usize) -> Soon<T> {
        Soon {
            q: self.q.wrapping_add(query * self.q_width),
            keys: self.keys.wrapping_add(key * self.kv_width),
            values: self.values.wrapping_add(key * self.kv_width),
            queries,
            rows,
        }
    }

    /// Part `index` of `parts` of what is needed soon.
    fn share(&self, soon: Soon<T>, index: usize, parts: usize) -> Soon<T> {
        let cut = |rows: usize| (rows * index / parts, rows * (index + 1) / parts);
        let ((q, q_end), (k, k_end)) = (cut(soon.queries), cut(soon.rows));
        Soon {
            q: soon.q.wrapping_add(q * self.q_width),
            keys: soon.keys.wrapping_add(k * self.kv_width),
            values: soon.values.wrapping_add(k * self.kv_width),
            queries: q_end - q,
            rows: k_end - k,
        }
    }

    /// The band from `half` before to `half` behind: keys are packed as the queries move on, and stay.
    unsafe fn run_narrow(&self, half: usize, next: Soon<T>) {
        let Task { first, count, length, .. } = *self;
        let size = self.block_size();
        let (from, to) = self.reach();
        let packed = (to - from).next_multiple_of(WIDTH);
        // Keys up to which a block that ends before `end` needs them, in whole registers.
        let until = |end: usize| ((first + end + half - from).next_multiple_of(WIDTH)).min(to - from);
        let mut done = 0;
        for start in (0..count).step_by(size) {
            let rows = size.min(count - start);
            let needed = until(start + rows);
            let key = aligned(first + start, half);
            let keys = (first + start + rows + half).min(length) - key;
            let offset = (first + start - key) as isize;
            let width = keys.next_multiple_of(WIDTH);
            let (before, behind) = (offset - half as isize, offset + half as isize);
            let block = Block { rows, width, keys, stride: width, first: before, last: behind };
            let more = size.min(count - start - rows);
            let soon = if more == 0 {
                next
            } else {
                self.soon(start + rows, more, from + needed, until(start + rows + more) - needed)
            };
            // SAFETY: the caller's promise.
            unsafe {
                self.pack_queries(start, rows);
                self.pack(from, done, needed, packed);
                self.block(start, block, Keys { at: key - from, packed }, soon, |_| {});
            }
            done = needed;
        }
    }

    /// Block of keys after block of keys.
    unsafe fn run_blocks(&self, next: Soon<T>) {
        let Task { isa, first, count, length, row_start, .. } = *self;
        let size = self.block_size();
        let blocks = count.div_ceil(size);
        // SAFETY: the caller's promise, here and below; the outputs lie in this task's workspace.
        unsafe {
            self.pack_queries(0, count);
            if !self.once() {
                let floats = count * self.head.next_multiple_of(WIDTH);
                std::slice::from_raw_parts_mut(self.workspace.add(self.layout.output), floats).fill(0.0);
            }
        }
        let (from, to) = self.reach();
        for key in (from..to).step_by(KEYS) {
            let keys = KEYS.min(to - key);
            let width = keys.next_multiple_of(WIDTH);
            let key_ids = Ids::<KEYS>::new(row_start, (key..key + keys).map(|j| row_start + j), &self.sight);
            let soon = if key + KEYS < to { self.soon(0, 0, key + KEYS, KEYS.min(to - key - KEYS)) } else { next };
            let mut packed = false;
            for (index, start) in (0..count).step_by(size).enumerate() {
                let rows = size.min(count - start);
                let mut block = Block { rows, width, keys, stride: width, first: -Block::FAR, last: Block::FAR };
                let mut ids = None;
                match self.sight {
                    Sight::Band(half) => {
                        let offset = (first + start) as isize - key as isize;
                        let half = half.min(length) as isize;
                        (block.first, block.last) = (offset - half, offset + half);
                        if block.first >= keys as isize || rows as isize - 1 + block.last < 0 {
                            continue;
                        }
                    }
                    Sight::Ids { half, .. } => {
                        let query_ids = self.query_ids(start, rows);
                        if !query_ids.near(&key_ids, half) {
                            continue;
                        }
                        ids = Some((query_ids, half));
                    }
                    Sight::All | Sight::Narrow(_) => {}
                }
                unsafe {
                    if !packed {
                        self.pack(key, 0, keys, width);
                        packed = true;
                    }
                    let soon = self.share(soon, index, blocks);
                    self.block(start, block, Keys { at: 0, packed: width }, soon, |scores| {
                        if let Some((query_ids, half)) = &ids {
                            hide(isa, scores, width, rows, keys, query_ids, &key_ids, *half);
                        }
                    });
                }
            }
        }
    }

    fn query_ids(&self, start: usize, rows: usize) -> Ids<QUERIES> {
        let Sight::Ids { tokens, .. } = self.sight else { unreachable!("only ids have ids") };
        let first = self.query + self.first + start;
        let token = |query: usize| tokens.map_or(query, |t| t[query] as usize);
        Ids::new(self.row_start, (first..first + rows).map(token), &self.sight)
    }

    unsafe fn pack_queries(&self, start: usize, rows: usize) {
        let Task { isa, head, q_width, .. } = *self;
        if self.in_place() {
            return;
        }
        let stride = head.next_multiple_of(WIDTH);
        unsafe {
            let to = self.workspace.add(self.layout.queries + start * stride);
            widen::<T>(isa, self.q.add(start * q_width), q_width, rows, head, to, stride);
        }
    }

    /// Packs keys and values `start..end` of those from `key` on; the packed keys are `width` wide, and `start` is a multiple of a register.
    unsafe fn pack(&self, key: usize, start: usize, end: usize, width: usize) {
        let Task { isa, head, kv_width, .. } = *self;
        let stride = head.next_multiple_of(WIDTH);
        unsafe {
            let at = |start: usize| self.workspace.add(start);
            for start in (start..end).step_by(KEYS) {
                let live = KEYS.min(end - start);
                let from = self.keys.add((key + start) * kv_width);
                widen::<T>(isa, from, kv_width, live, head, at(self.layout.rows), stride);
                // Behind the live rows lies what was there before: those keys are seen by no query.
                let to = at(self.layout.keys).add(start);
                transpose(isa, at(self.layout.rows), stride, live.next_multiple_of(WIDTH), stride, to, width);
            }
            let from = self.values.add((key + start) * kv_width);
            let to = at(self.layout.values).add(start * stride);
            widen::<T>(isa, from, kv_width, end - start, head, to, stride);
        }
    }

    /// The queries from `start` on against packed keys; `hide` may set scores to minus infinity. Between the steps goes the asking for what is
    /// needed soon, a third of it each time.
    unsafe fn block(&self, start: usize, block: Block, keys: Keys, soon: Soon<T>, hide: impl Fn(&mut [f32])) {
        let Task { isa, head, kv_width, .. } = *self;
        let Block { rows, width, first, last, .. } = block;
        let stride = head.next_multiple_of(WIDTH);
        let whole = rows as isize - 1 + first <= 0 && last >= block.keys as isize - 1;
        unsafe {
            let at = |start: usize| self.workspace.add(start);
            let scores = at(self.layout.scores);
            let (queries, lda, output, ldc) = if self.in_place() {
                let (q, out) = (self.q.add(start * self.q_width), self.out.add(start * self.d));
                (q.cast::<f32>(), self.q_width, out.cast::<f32>(), self.d)
            } else {
                let at = |part: usize| at(part).add(start * stride);
                (at(self.layout.queries).cast_const(), stride, at(self.layout.output), stride)
            };
            let (max, sum) = (at(self.layout.max).add(start), at(self.layout.sum).add(start));
            let scoring = Product {
                m: rows,
                n: width,
                k: head,
                a: queries,
                lda,
                left: Left::RowMajor,
                b: at(self.layout.keys).add(keys.at),
                ldb: keys.packed,
                c: scores,
                ldc: width,
                accumulate: false,
                triangle: if whole { Triangle::Full } else { Triangle::BandColumns(first, last) },
            };
            fetch_rows(soon.keys, kv_width, soon.rows, head);
            product(isa, &scoring);
            fetch_rows(soon.values, kv_width, soon.rows, head);
            hide(std::slice::from_raw_parts_mut(scores, rows * width));
            // Rescales outputs only where an earlier block left some.
            softmax(isa, block, log2_scale(head), scores, max, sum, output, stride);
            let mixing = Product {
                m: rows,
                n: stride,
                k: block.keys,
                a: scores,
                lda: width,
                left: Left::RowMajor,
                b: at(self.layout.values).add(keys.at * stride),
                ldb: stride,
                c: output,
                ldc,
                accumulate: !self.once(),
                triangle: if whole { Triangle::Full } else { Triangle::BandKeys(first, last) },
            };
            fetch_rows(soon.q, self.q_width, soon.queries, head);
            product(isa, &mixing);
            if self.in_place() {
                divide_rows(isa, output, ldc, rows, head, sum);
            }
        }
    }
}

/// The first key that query `query` sees in a band, down to a whole register.
fn aligned(query: usize, half: usize) -> usize {
    query.saturating_sub(half) / WIDTH * WIDTH
}
