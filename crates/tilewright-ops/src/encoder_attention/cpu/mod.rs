//! A task owns some hundred queries of one (row, head). It packs keys and values, transposed and padded to whole registers, and runs its
//! blocks of queries against them: `S = Q K^T`, softmax, `O += P V`. A thread's scratch does not grow with the row.
//!
//! In general keys come in blocks that start at multiples of [`KEYS`] from the row's start, each packed once for all queries of the task,
//! and the softmax is online. In a narrow band ([`NARROW`]) each block of queries sees all its keys at once, in one block of scores. In both, what
//! a query does not see adds exactly nothing, and registers are aligned to the row's start: neither the way queries are dealt to tasks nor
//! what is skipped changes a bit.

mod ids;
mod task;

use super::Forward;
use crate::Tensor;
use crate::cpu::tiles::simd::WIDTH;
use crate::cpu::tiles::{Cut, Shared};
use crate::cpu::{Cpu, Element};
use task::Task;

/// Keys of a block: together with the values of the block 64 KB for heads of 64.
const KEYS: usize = 128;
/// Queries of a block, a multiple of the register tile's rows.
const QUERIES: usize = 66;
/// Blocks of queries of a task, at most; fewer where the tasks would not do for the threads.
const GROUP: usize = 8;
/// Channels of the queries of a task, at most, in units of a block: larger heads have fewer blocks.
const CHANNELS: usize = GROUP * 64;
/// The widest window whose keys are all packed at once; that of every published model.
const NARROW: usize = 64;
/// Keys that a block of queries meets in a narrow band, at most.
const NARROW_KEYS: usize = (QUERIES + 2 * NARROW + WIDTH - 1).next_multiple_of(WIDTH);

/// The most blocks of queries of a task; half as many in a narrow band, whose keys are packed together.
fn largest_group(head: usize, narrow: bool) -> usize {
    let blocks = (CHANNELS / head.next_multiple_of(WIDTH)).clamp(1, GROUP);
    if narrow { blocks.div_ceil(2) } else { blocks }
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
        let queries = largest_group(head, false) * QUERIES;
        let keys = KEYS.max((largest_group(head, true) - 1) * QUERIES + NARROW_KEYS);
        let mut cut = Cut::new();
        Layout {
            keys: cut.take(stride * keys),
            values: cut.take(keys * stride),
            rows: cut.take(KEYS * stride),
            queries: cut.take(queries * stride),
            output: cut.take(queries * stride),
            scores: cut.take(QUERIES * KEYS.max(NARROW_KEYS)),
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
    /// A band of indices, at most [`NARROW`] to each side.
    Narrow(usize),
    /// A band of indices.
    Band(usize),
    /// What ids say; distances above `half` and foreign options are hidden.
    Ids { half: u32, tokens: Option<&'a [i32]>, positions: Option<&'a [i32]>, option_ids: Option<&'a [i32]> },
}

impl Sight<'_> {
    /// Of a row of `length` tokens: a band that reaches from end to end hides nothing.
    fn of_row(self, length: usize) -> Self {
        match self {
            Sight::Narrow(half) | Sight::Band(half) if half >= length.saturating_sub(1) => Sight::All,
            other => other,
        }
    }
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
            Some(half) if half <= NARROW => Sight::Narrow(half),
            Some(half) => Sight::Band(half),
            None => Sight::All,
        };

        let words = workspace.slice_of_mut::<f32>();
        let (scratch, before) = words.split_at_mut(cpu.threads() * layout.floats);
        let before = std::slice::from_raw_parts_mut(before.as_mut_ptr().cast::<u32>(), row_starts.len());
        let most = largest_group(head, matches!(sight, Sight::Narrow(_)));
        let group = deal(query_starts, heads, most, cpu.threads(), before);
        let tasks = before[before.len() - 1] as usize;

        let (q, kv) = (args.q.slice_of::<T>(), args.kv.slice_of::<T>());
        let out = Shared(args.out.slice_of_mut::<T>().as_mut_ptr());
        let scratch = Shared(scratch.as_mut_ptr());
        let (before, layout) = (&*before, &layout);
        let threads = cpu.threads();
        let make = |task: usize, worker: usize| {
            let row = before.partition_point(|&b| b as usize <= task) - 1;
            let within = task - before[row] as usize;
            let (h, part) = (within % heads, within / heads);
            let (key, end) = (row_starts[row] as usize, row_starts[row + 1] as usize);
            let (query, last) = (query_starts[row] as usize, query_starts[row + 1] as usize);
            let first = part * group * QUERIES;
            Task {
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
                count: (last - query - first).min(group * QUERIES),
                sight: sight.of_row(end - key),
            }
        };
        cpu.pool().run(tasks, &|task, worker| {
            // What this thread will probably be given next; a wrong guess costs only the reading.
            let next = (task + threads < tasks).then(|| make(task + threads, worker).start());
            make(task, worker).run(next.unwrap_or_default());
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
            sum += ((pair[1] - pair[0]) as usize).div_ceil(group * QUERIES) * heads;
            *b = sum as u32;
        }
        if group == 1 || sum >= 4 * threads {
            return group;
        }
        group /= 2;
    }
}
