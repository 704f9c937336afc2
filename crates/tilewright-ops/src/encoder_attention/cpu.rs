//! A task owns some hundred queries of one (row, head). It packs one block of keys and values at a time, transposed and padded to whole
//! registers, and runs all its blocks of queries against it: `S = Q K^T`, online softmax, `O += P V`. So a thread's scratch does not grow
//! with the row, and the packing is paid once for many queries.
//!
//! Blocks of keys start at multiples of [`KEYS`] from the row's start, and a key that is not seen adds exactly nothing. Therefore neither
//! the way queries are dealt to tasks nor what is skipped changes a bit.

use super::Forward;
use crate::Tensor;
use crate::cpu::isa::per_isa;
use crate::cpu::tiles::product::{Left, Product, Triangle, product};
use crate::cpu::tiles::rows::{Block, narrow, softmax, transpose, widen};
use crate::cpu::tiles::simd::WIDTH;
use crate::cpu::tiles::{Cut, Shared, log2_scale};
use crate::cpu::{Cpu, Element, Isa};

/// Keys of a block: together with the values of the block 64 KB for heads of 64.
const KEYS: usize = 128;
/// Queries of a block, a multiple of the register tile's rows.
const QUERIES: usize = 66;
/// Blocks of queries of a task, at most; fewer where the tasks would not do for the threads.
const GROUP: usize = 8;
/// Channels of queries that a task holds at most: larger heads have fewer blocks.
const CHANNELS: usize = GROUP * 64;

/// The most blocks of queries of a task.
fn largest_group(head: usize) -> usize {
    (CHANNELS / head.next_multiple_of(WIDTH)).clamp(1, GROUP)
}

/// Where a thread keeps what, in f32 from the start of its part of the workspace.
struct Layout {
    /// `(padded hs, keys)`
    keys: usize,
    values: usize,
    /// Rows of keys before they are transposed.
    rows: usize,
    queries: usize,
    output: usize,
    scores: usize,
    max: usize,
    sum: usize,
    floats: usize,
}

impl Layout {
    fn new(head: usize) -> Self {
        let stride = head.next_multiple_of(WIDTH);
        let queries = largest_group(head) * QUERIES;
        let mut cut = Cut::new();
        Layout {
            keys: cut.take(stride * KEYS),
            values: cut.take(KEYS * stride),
            rows: cut.take(KEYS * stride),
            queries: cut.take(queries * stride),
            output: cut.take(queries * stride),
            scores: cut.take(QUERIES * KEYS),
            max: cut.take(queries),
            sum: cut.take(queries),
            floats: cut.next,
        }
    }
}

/// 32-bit words of workspace: a part a thread, and how many tasks come before each row.
pub(super) fn workspace_words(threads: usize, rows: usize, head: usize) -> usize {
    threads * Layout::new(head).floats + rows + 1
}

/// Which keys a query sees, as the kernel treats it.
#[derive(Clone, Copy)]
enum Sight<'a> {
    /// All of the row.
    All,
    /// A band of indices.
    Band(usize),
    /// What ids say; distances above `half` and foreign options are hidden.
    Ids { half: u32, tokens: Option<&'a [i32]>, positions: Option<&'a [i32]>, option_ids: Option<&'a [i32]> },
}

pub(super) fn forward<T: Element>(cpu: &Cpu, args: &Forward<'_>, head: usize, workspace: &Tensor) {
    let layout = Layout::new(head);
    let (q_width, kv_width) = (args.q.shape().last(), args.kv.shape().last());
    let (isa, heads, d, key_column) = (cpu.isa(), args.heads, args.heads * head, args.key_column);
    // SAFETY: the op's check fixed dtypes and sizes, that the starts rise to the tensors' ends and that no output overlaps anything; tasks
    // write disjoint rows or columns, and each thread its own part of the workspace.
    unsafe {
        let ids = |t: &'_ Tensor| {
            let all = t.slice_of::<i32>();
            std::slice::from_raw_parts(all.as_ptr(), all.len())
        };
        let row_starts = ids(args.row_starts);
        let query_starts = args.selected.map_or(row_starts, |s| ids(s.starts));
        let tokens = args.selected.map(|s| ids(s.tokens));
        let by_ids =
            args.option_ids.is_some() || args.window.is_some() && (args.positions.is_some() || args.selected.is_some());
        let sight = match args.window {
            _ if by_ids => Sight::Ids {
                half: args.window.map_or(u32::MAX, |half| u32::try_from(half).unwrap_or(u32::MAX)),
                tokens,
                positions: args.positions.map(ids),
                option_ids: args.option_ids.map(ids),
            },
            Some(half) => Sight::Band(half),
            None => Sight::All,
        };

        let words = workspace.slice_of_mut::<f32>();
        let (scratch, before) = words.split_at_mut(cpu.threads() * layout.floats);
        let before = std::slice::from_raw_parts_mut(before.as_mut_ptr().cast::<u32>(), row_starts.len());
        let group = deal(query_starts, heads, largest_group(head), cpu.threads(), before);
        let tasks = before[before.len() - 1] as usize;

        let (q, kv) = (args.q.slice_of::<T>(), args.kv.slice_of::<T>());
        let out = Shared(args.out.slice_of_mut::<T>().as_mut_ptr());
        let scratch = Shared(scratch.as_mut_ptr());
        let (before, layout) = (&*before, &layout);
        cpu.pool().run(tasks, &|task, worker| {
            let row = before.partition_point(|&b| b as usize <= task) - 1;
            let within = task - before[row] as usize;
            let (h, part) = (within % heads, within / heads);
            let (key, end) = (row_starts[row] as usize, row_starts[row + 1] as usize);
            let (query, last) = (query_starts[row] as usize, query_starts[row + 1] as usize);
            let first = part * group * QUERIES;
            let count = (last - query - first).min(group * QUERIES);
            let task = Task {
                isa,
                layout,
                head,
                q: q.as_ptr().add((query + first) * q_width + h * head),
                q_width,
                keys: kv.as_ptr().add(key * kv_width + key_column + h * head),
                values: kv.as_ptr().add(key * kv_width + key_column + d + h * head),
                kv_width,
                out: out.at((query + first) * d + h * head),
                d,
                workspace: scratch.at(worker * layout.floats),
                row_start: key,
                length: end - key,
                query,
                first,
                count,
                sight,
            };
            task.run();
        });
    }
}

/// Writes how many tasks come before each row, and returns the blocks of queries of a task: fewer where that gives every thread some tasks.
fn deal(query_starts: &[i32], heads: usize, most: usize, threads: usize, before: &mut [u32]) -> usize {
    let mut group = most;
    loop {
        let mut sum = 0;
        before[0] = 0;
        for (pair, b) in query_starts.windows(2).zip(&mut before[1..]) {
            sum += (pair[1] - pair[0]) as usize / (group * QUERIES) * heads;
            sum += usize::from(!((pair[1] - pair[0]) as usize).is_multiple_of(group * QUERIES)) * heads;
            *b = sum as u32;
        }
        if group == 1 || sum >= 4 * threads {
            return group;
        }
        group /= 2;
    }
}

/// Queries `first..first + count` of one (row, head).
struct Task<'a, T> {
    isa: Isa,
    layout: &'a Layout,
    head: usize,
    /// The first query of the task.
    q: *const T,
    q_width: usize,
    /// The first key and the first value of the row.
    keys: *const T,
    values: *const T,
    kv_width: usize,
    out: *mut T,
    d: usize,
    workspace: *mut f32,
    /// The row's first token.
    row_start: usize,
    length: usize,
    /// The row's first query.
    query: usize,
    /// The task's first query, counted from the row's.
    first: usize,
    count: usize,
    sight: Sight<'a>,
}

/// Positions and options of a block of queries or keys, and between what the positions lie.
struct Ids<const N: usize> {
    positions: [i32; N],
    options: [i32; N],
    lowest: i32,
    highest: i32,
}

impl<const N: usize> Ids<N> {
    fn new(row_start: usize, tokens: impl Iterator<Item = usize>, sight: &Sight<'_>) -> Self {
        let mut ids = Ids { positions: [0; N], options: [0; N], lowest: i32::MAX, highest: i32::MIN };
        let Sight::Ids { positions, option_ids, .. } = sight else { return ids };
        for (i, token) in tokens.enumerate() {
            let position = positions.map_or((token - row_start) as i32, |p| p[token]);
            (ids.positions[i], ids.options[i]) = (position, option_ids.map_or(0, |o| o[token]));
            (ids.lowest, ids.highest) = (ids.lowest.min(position), ids.highest.max(position));
        }
        ids
    }

    /// Whether some positions of the two may be no further apart than `half`.
    fn near<const M: usize>(&self, other: &Ids<M>, half: u32) -> bool {
        let gap =
            (i64::from(self.lowest) - i64::from(other.highest)).max(i64::from(other.lowest) - i64::from(self.highest));
        gap <= i64::from(half)
    }
}

impl<T: Element> Task<'_, T> {
    /// # Safety
    /// The pointers are valid for their (row, head) and the layout; nobody else touches these outputs or this workspace meanwhile.
    unsafe fn run(&self) {
        let Task { isa, head, count, length, .. } = *self;
        let stride = head.next_multiple_of(WIDTH);
        let at = |start: usize| self.workspace.wrapping_add(start);
        let (queries, output) = (at(self.layout.queries), at(self.layout.output));
        let (max, sum) = (at(self.layout.max), at(self.layout.sum));
        // The keys that any query of the task sees lie in `from..to`.
        let (from, to) = match self.sight {
            Sight::Band(half) => {
                (self.first.saturating_sub(half), (self.first + count).saturating_add(half).min(length))
            }
            _ => (0, length),
        };
        // Equal blocks: a short rest would run at the speed of a whole one.
        let blocks = count.div_ceil(QUERIES);
        let size = count.div_ceil(blocks.max(1)).next_multiple_of(6).min(QUERIES);
        unsafe {
            widen::<T>(isa, self.q, self.q_width, count, head, queries, stride);
            std::slice::from_raw_parts_mut(output, count * stride).fill(0.0);
            std::slice::from_raw_parts_mut(max, count).fill(f32::NEG_INFINITY);
            std::slice::from_raw_parts_mut(sum, count).fill(0.0);
            for key in (from / KEYS * KEYS..to).step_by(KEYS) {
                let keys = KEYS.min(to - key);
                let key_ids =
                    Ids::<KEYS>::new(self.row_start, (key..key + keys).map(|j| self.row_start + j), &self.sight);
                let mut packed = false;
                for start in (0..count).step_by(size) {
                    let rows = size.min(count - start);
                    let mut block = Block {
                        rows,
                        width: keys.next_multiple_of(WIDTH),
                        keys,
                        stride: 0,
                        first: -Block::FAR,
                        last: Block::FAR,
                    };
                    block.stride = block.width;
                    let mut ids = None;
                    match self.sight {
                        Sight::All => {}
                        Sight::Band(half) => {
                            let offset = (self.first + start) as isize - key as isize;
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
                    }
                    if !packed {
                        self.pack(key, keys);
                        packed = true;
                    }
                    self.block(start, block, |scores| {
                        if let Some((query_ids, half)) = &ids {
                            hide(isa, scores, block.width, rows, keys, query_ids, &key_ids, *half);
                        }
                    });
                }
            }
            narrow::<T>(isa, output, stride, count, head, 1.0, sum, self.out, self.d);
        }
    }

    fn query_ids(&self, start: usize, rows: usize) -> Ids<QUERIES> {
        let Sight::Ids { tokens, .. } = self.sight else { unreachable!("only ids have ids") };
        let first = self.query + self.first + start;
        let token = |query: usize| tokens.map_or(query, |t| t[query] as usize);
        Ids::new(self.row_start, (first..first + rows).map(token), &self.sight)
    }

    /// Packs a block of keys and values.
    unsafe fn pack(&self, key: usize, keys: usize) {
        let Task { isa, head, kv_width, .. } = *self;
        let (stride, width) = (head.next_multiple_of(WIDTH), keys.next_multiple_of(WIDTH));
        unsafe {
            let at = |start: usize| self.workspace.add(start);
            widen::<T>(isa, self.keys.add(key * kv_width), kv_width, keys, head, at(self.layout.rows), stride);
            // Behind the live rows lies what was there before: those keys are seen by no query.
            transpose(isa, at(self.layout.rows), stride, at(self.layout.keys), width);
            widen::<T>(isa, self.values.add(key * kv_width), kv_width, keys, head, at(self.layout.values), stride);
        }
    }

    /// The queries from `start` on against the packed keys; `hide` may set scores to minus infinity.
    unsafe fn block(&self, start: usize, block: Block, hide: impl Fn(&mut [f32])) {
        let Task { isa, head, .. } = *self;
        let Block { rows, width, keys, first, last, .. } = block;
        let stride = head.next_multiple_of(WIDTH);
        let whole = rows as isize - 1 + first <= 0 && last >= keys as isize - 1;
        unsafe {
            let at = |start: usize| self.workspace.add(start);
            let scores = at(self.layout.scores);
            let output = at(self.layout.output).add(start * stride);
            let (max, sum) = (at(self.layout.max).add(start), at(self.layout.sum).add(start));
            let scoring = Product {
                m: rows,
                n: width,
                k: head,
                a: at(self.layout.queries).add(start * stride),
                lda: stride,
                left: Left::RowMajor,
                b: at(self.layout.keys),
                ldb: width,
                c: scores,
                ldc: width,
                accumulate: false,
                triangle: if whole { Triangle::Full } else { Triangle::BandColumns(first, last) },
            };
            product(isa, &scoring);
            hide(std::slice::from_raw_parts_mut(scores, rows * width));
            softmax(isa, block, log2_scale(head), scores, max, sum, output, stride);
            let mixing = Product {
                m: rows,
                n: stride,
                k: keys,
                a: scores,
                lda: width,
                left: Left::RowMajor,
                b: at(self.layout.values),
                ldb: stride,
                c: output,
                ldc: stride,
                accumulate: true,
                triangle: if whole { Triangle::Full } else { Triangle::BandKeys(first, last) },
            };
            product(isa, &mixing);
        }
    }
}

per_isa! {
    /// Sets the scores of hidden keys to minus infinity.
    fn hide[](scores: &mut [f32], width: usize, rows: usize, keys: usize, query: &Ids<QUERIES>, key: &Ids<KEYS>, half: u32) {
        for (i, scores) in scores.chunks_exact_mut(width).enumerate().take(rows) {
            let (position, option) = (query.positions[i], query.options[i]);
            let ids = key.positions[..keys].iter().zip(&key.options[..keys]);
            for (s, (&p, &o)) in scores.iter_mut().zip(ids) {
                let far = p.abs_diff(position) > half;
                let foreign = (option > 0) & (o > 0) & (o != option);
                *s = if far | foreign { f32::NEG_INFINITY } else { *s };
            }
        }
    }
}
