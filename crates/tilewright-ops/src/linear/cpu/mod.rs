//! The product on all threads. A task multiplies a block of rows with a run of panels: the rows are packed by the thread that works on them and stay
//! in its second cache, the panels stream past them in the order of their memory, each read once for all rows of the block.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_finish;
#[cfg(target_arch = "x86_64")]
mod avx512_pack;
mod finish;
mod kernel;
mod pack;

use std::sync::atomic::Ordering;

use super::weight::Panels;
use super::{Activation, Forward};
use crate::cpu::gemm::Scratch;
use crate::cpu::{Cpu, Isa};
use finish::Finish;
use kernel::{Engine, Form};
pub(super) use pack::pack;

/// Columns of a panel.
pub(super) fn panel_width(isa: Isa) -> usize {
    kernel::Kernel::new(isa).nr
}

/// The widest panel of any instruction set.
const WIDTH: usize = 32;

/// Steps of K between two visits to the partial sums, at most: the block of a panel (64 KiB in f32) then stays in a near cache while the tiles of
/// rows pass over it.
const KC: usize = 512;

/// Rows of a block, at most: their partial sums for one panel take 36 KiB.
const ROWS: usize = 288;

/// Words (f32, or pairs of bf16) of the packed rows of a block that leave room for the panel in a second cache of 1 MiB.
const NEAR_WORDS: usize = 160 << 10;

/// The part of a thread's buffer that holds packed rows.
const A_WORDS: usize = Scratch::THREAD_FLOATS - WIDTH * (ROWS + KC) - PAD;

/// Words that packing may overwrite behind a tile: the next one is packed later, and behind the last one lie these.
const PAD: usize = 16;

/// Multiply-adds below which waking other threads costs more than it gives.
const SERIAL: usize = 1 << 18;

/// Tasks a thread, so that a thread that was interrupted does not leave the others waiting long.
const TASKS: usize = 8;

/// The steps of K between two visits to the partial sums: equal parts, so that no short rest is left. A function of `k` alone, since it decides the
/// order of the sum; even, since 16-bit numbers lie in pairs.
fn k_step(k: usize) -> usize {
    k.div_ceil(k.div_ceil(KC).max(1)).next_multiple_of(16).clamp(16, KC)
}

/// Cuts `total` into `parts` as equal as possible: the start and the size of part `index`.
fn part(total: usize, parts: usize, index: usize) -> (usize, usize) {
    let (size, longer) = (total / parts, total % parts);
    (index * size + index.min(longer), size + usize::from(index < longer))
}

/// The call as the tasks see it.
struct Call<'a> {
    engine: Engine,
    panels: Panels,
    m: usize,
    step: usize,
    x: *const f32,
    weight: *const u8,
    finish: Finish<'a>,
    blocks: usize,
    groups: usize,
    group_panels: usize,
    /// Whether the packed rows of a block fit the buffer over all of K; otherwise they are packed again for each panel.
    rows_fit: bool,
    threads: usize,
}

// SAFETY: inputs are only read, and tasks write disjoint rectangles of the output.
unsafe impl Sync for Call<'_> {}

pub(super) fn forward(cpu: &Cpu, args: &Forward<'_>, m: usize) {
    let panels = *args.weight.panels();
    let Panels { n, k, .. } = panels;
    if m == 0 || n == 0 {
        return;
    }
    let engine = Engine::new(cpu, panels.precision);
    let row_words = engine.row_words(k).max(1);
    let rows_fit = engine.rows * row_words <= A_WORDS;
    let tiles = (NEAR_WORDS / (engine.rows * row_words)).clamp(1, ROWS / engine.rows);
    let blocks = m.div_ceil(tiles * engine.rows);
    let parallel = m.saturating_mul(n).saturating_mul(k) > SERIAL;
    let threads = if parallel { cpu.threads() } else { 1 };
    let groups = if parallel { (TASKS * threads).div_ceil(blocks).min(panels.count) } else { 1 };
    let group_panels = panels.count.div_ceil(groups);
    let groups = panels.count.div_ceil(group_panels);
    // SAFETY: the op has checked dtypes, shapes and that `out` overlaps nothing but a residual in the same place, which is only touched through
    // the pointers of `Finish`.
    let call = unsafe {
        Call {
            engine,
            panels,
            m,
            step: k_step(k),
            x: args.x.slice_of::<f32>().as_ptr(),
            weight: args.weight.memory().slice_of::<u8>().as_ptr(),
            finish: Finish {
                bias: args.bias.map(|t| t.slice_of::<f32>()),
                activation: args.activation,
                residual: args.residual.map(|t| t.slice_of::<f32>().as_ptr()),
                out: args.out.slice_of_mut::<f32>().as_mut_ptr(),
                columns: if args.activation == Activation::Geglu { n / 2 } else { n },
            },
            blocks,
            groups,
            group_panels,
            rows_fit,
            threads,
        }
    };
    let mut scratch = cpu.scratch();
    let first_mark = scratch.marks(blocks);
    let scratch = scratch.workers();
    let task = |index: usize, worker: usize| {
        // SAFETY: the buffer of this worker; no two tasks run at once with the same one.
        let (buffer, mark) = unsafe { scratch.of_worker(worker) };
        let block = (index / groups) as u64;
        let packed = mark.swap(first_mark + block, Ordering::Relaxed) == first_mark + block;
        // SAFETY: tasks own disjoint rectangles of the output.
        unsafe { call.task(index, buffer, packed) };
    };
    if parallel {
        cpu.pool().run(blocks * groups, &task);
    } else {
        (0..blocks * groups).for_each(|index| task(index, 0));
    }
}

/// A block of rows, cut into tiles.
struct Rows {
    first: usize,
    tiles: usize,
    count: usize,
}

impl Rows {
    /// The first row, from the start of the block on, and the number of rows of a tile.
    fn tile(&self, index: usize) -> (usize, usize) {
        part(self.count, self.tiles, index)
    }
}

impl Call<'_> {
    /// # Safety
    /// Nobody else works on the same task or buffer; `packed` only if the buffer holds the rows of the task's block.
    unsafe fn task(&self, index: usize, buffer: &mut [f32], packed: bool) {
        let Call { engine, panels, step, .. } = self;
        let (block, group) = (index / self.groups, index % self.groups);
        let (first, count) = part(self.m, self.blocks, block);
        let rows = Rows { first, count, tiles: count.div_ceil(engine.rows) };
        let (sums, rest) = buffer.split_at_mut(WIDTH * ROWS);
        let (wide, a) = rest.split_at_mut(WIDTH * KC);
        if self.rows_fit && !packed {
            for k0 in (0..panels.k).step_by(*step) {
                for tile in 0..rows.tiles {
                    // SAFETY: the block fits the buffer.
                    unsafe { self.pack_tile(&rows, tile, k0, a) };
                }
            }
        }
        let end = (group * self.group_panels + self.group_panels).min(panels.count);
        // The panel that this thread will probably meet next, when all run equally fast.
        let later = (index + self.threads) % self.groups * self.group_panels;
        for panel in group * self.group_panels..end {
            let next = if panel + 1 < end { panel + 1 } else { later };
            // SAFETY: as the caller vouches.
            unsafe { self.panel(&rows, panel, next, sums, wide, a) };
        }
    }

    /// Where the packed words of a tile lie, from step `k0` of K on.
    fn tile_start(&self, rows: &Rows, tile: usize, k0: usize) -> usize {
        if !self.rows_fit {
            return 0;
        }
        let words = self.engine.row_words(self.step.min(self.panels.k - k0));
        let (whole, before) = if self.engine.tight {
            (rows.count, rows.tile(tile).0)
        } else {
            (rows.tiles * self.engine.rows, tile * self.engine.rows)
        };
        whole * self.engine.row_words(k0) + before * words
    }

    /// # Safety
    /// The tile fits the buffer.
    unsafe fn pack_tile(&self, rows: &Rows, tile: usize, k0: usize, a: &mut [f32]) {
        let k = self.panels.k;
        let (first, count) = rows.tile(tile);
        let kc = self.step.min(k - k0);
        let at = self.tile_start(rows, tile, k0);
        let width = if self.engine.tight { count } else { self.engine.rows };
        let a = &mut a[at..at + width * self.engine.row_words(kc) + PAD];
        // SAFETY: rows `first..first + count` of the block and steps `k0..k0 + kc` exist.
        unsafe { pack::rows(&self.engine, self.x.add((rows.first + first) * k + k0), k, count, kc, width, a) };
    }

    /// One panel with all rows of a block.
    ///
    /// # Safety
    /// As for `task`.
    unsafe fn panel(&self, rows: &Rows, panel: usize, next: usize, sums: &mut [f32], wide: &mut [f32], a: &mut [f32]) {
        let Call { engine, panels, step, .. } = self;
        let Panels { k, width, .. } = *panels;
        let size = panels.precision.size();
        // SAFETY: all panels lie in the weight's memory.
        let start = unsafe { self.weight.add(panel * panels.panel_bytes()) };
        let out_columns = panels.out_columns();
        let column = panel * out_columns;
        let columns = out_columns.min(self.finish.columns - column);
        let steps = k.div_ceil(*step).max(1);
        for index in 0..steps {
            let k0 = index * step;
            let kc = (*step).min(k - k0);
            let last = index + 1 == steps;
            let block = start.wrapping_add(k0 * width * size);
            let b = if engine.form == Form::Widened {
                // SAFETY: the block holds `kc` steps, an odd last one padded.
                unsafe { pack::widen(engine.isa, panels.precision, block, width, kc, wide) };
                wide.as_ptr().cast()
            } else {
                block
            };
            // What is read next: the rest of this panel, or another one.
            let (ahead, bytes) = if last {
                (self.weight.wrapping_add(next * panels.panel_bytes()), (*step).min(k) * width * size)
            } else {
                (block.wrapping_add(kc * width * size), (*step).min(k - k0 - kc) * width * size)
            };
            let a_tile = bytes.div_ceil(rows.tiles).next_multiple_of(64);
            let words = engine.row_words(kc);
            for tile in 0..rows.tiles {
                let (first, count) = rows.tile(tile);
                if !self.rows_fit {
                    // SAFETY: one tile of one step fits the buffer.
                    unsafe { self.pack_tile(rows, tile, k0, a) };
                }
                let packed = &a[self.tile_start(rows, tile, k0)..];
                let sums = &mut sums[first * width..(first + count) * width];
                let ahead = kernel::Ahead { ptr: ahead.wrapping_add(tile * a_tile), bytes: a_tile };
                if last {
                    self.finish.prefetch(engine.isa, rows.first + first, count, column, columns);
                }
                // SAFETY: the panels hold `words` steps and the tile is `count` rows.
                unsafe {
                    engine.multiply(words, packed.as_ptr().cast(), b, sums.as_mut_ptr(), count, index > 0, ahead);
                    if last {
                        self.finish.apply(engine.isa, sums, width, rows.first + first, column, columns);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_everything_once_and_differ_by_one_at_most() {
        for total in 0..200 {
            for parts in 1..20 {
                let mut next = 0;
                for index in 0..parts {
                    let (start, size) = part(total, parts, index);
                    assert!(start == next && (total / parts..=total.div_ceil(parts)).contains(&size));
                    next = start + size;
                }
                assert_eq!(next, total);
            }
        }
    }

    #[test]
    fn steps_of_k_are_even_and_leave_no_short_rest() {
        for k in 1..5000 {
            let step = k_step(k);
            assert!(step.is_multiple_of(16) && step <= KC);
            let rest = k - (k.div_ceil(step) - 1) * step;
            assert!(k <= KC || rest * 2 >= step, "{k}: {step}, {rest}");
        }
    }
}
