//! A product on all threads: the operand with fewer lines is packed once into the shared buffer, the other one streams.

use super::block::{A_FLOATS, B_FLOATS, Fetch, KC, Operand, Panels, even, k_step};
use super::kernel::Kernel;
use super::pack::{View, pack, panel_floats};
use super::{Area, Buffers, Product, SHARED_FLOATS, TILE_FLOATS, serial_unchecked};
use crate::cpu::Cpu;

/// Multiply-adds below which waking other threads costs more than it gives.
const SERIAL: usize = 1 << 18;

/// Tasks a thread, at least, so that a thread that was interrupted does not leave the others waiting long.
const TASKS: usize = 3;

/// Floats of the shared operand that are packed at a time when C is small and K long: 1.5 MiB, so that it is read from a near cache. (M=256,
/// K=50304, N=768 on a core of 1 MiB: 64 % of peak with all of the buffer, 75 % so.)
const NEAR_FLOATS: usize = 384 << 10;

/// Elements of C up to which passing over it once for each part of K costs little: 4 MiB. (1 Mi against 512 Ki elements: dW of M=4096,
/// K=N=768 from 74 % to 79 % of peak, dX of M=1024 some 2 points.)
const SMALL_C: usize = 1 << 20;

/// A side of the product: its lines, cut into panels of `width`.
#[derive(Clone, Copy)]
struct Side {
    view: View,
    lines: usize,
    width: usize,
    /// Panels that the buffer of one thread holds.
    most: usize,
}

impl Side {
    fn panels(&self) -> usize {
        self.lines.div_ceil(self.width)
    }
}

pub(super) fn run(cpu: &Cpu, p: &Product<'_>, buffers: Buffers) {
    let kernel = Kernel::new(cpu.isa());
    let &Product { m, n, k, .. } = p;
    let direct = p.direct();
    let step = k_step(k);
    // SAFETY: no task runs yet.
    let (a_buffer, b_buffer, tile) = unsafe { buffers.of_worker(0) };
    if m.saturating_mul(n).saturating_mul(k) <= SERIAL {
        // SAFETY: the product was checked.
        return unsafe { serial_unchecked(kernel, p, a_buffer, b_buffer, tile) };
    }
    let a =
        Side { view: p.a.lines_are_rows(), lines: m, width: kernel.mr, most: A_FLOATS / panel_floats(kernel.mr, KC) };
    let b = Side {
        view: p.b.lines_are_columns(),
        lines: n,
        width: kernel.nr,
        most: B_FLOATS / panel_floats(kernel.nr, KC),
    };
    let share_a = m <= n;
    let (shared, stream) = if share_a { (a, b) } else { (b, a) };

    // What of the shared operand fits its buffer: all of it, else some steps of K, else also fewer lines. Partial sums over K need an output
    // that can hold them; without one, fewer lines over all of K.
    let steps = k.div_ceil(step).max(1);
    let of_step = panel_floats(shared.width, step);
    let (chunk_panels, chunk_steps) = if shared.panels() * of_step * steps <= SHARED_FLOATS {
        (shared.panels(), steps)
    } else if direct {
        let panels = even(shared.panels(), SHARED_FLOATS / of_step);
        (panels, even(steps, SHARED_FLOATS / of_step / panels))
    } else {
        let panels = SHARED_FLOATS / of_step / steps;
        if panels == 0 {
            // A hundred thousands of K into 16-bit sums: correct, without sharing.
            // SAFETY: the product was checked.
            return unsafe { serial_unchecked(kernel, p, a_buffer, b_buffer, tile) };
        }
        (even(shared.panels(), panels), steps)
    };

    let chunk_steps = if direct && m * n <= SMALL_C {
        chunk_steps.min(NEAR_FLOATS / (of_step * chunk_panels)).max(1)
    } else {
        chunk_steps
    };

    let threads = cpu.threads();
    for first in (0..shared.panels()).step_by(chunk_panels) {
        let line0 = first * shared.width;
        let lines = (chunk_panels * shared.width).min(shared.lines - line0);
        let panels = lines.div_ceil(shared.width);
        let grid = Grid::new(panels, shared.width, stream, threads, direct);
        for step0 in (0..steps).step_by(chunk_steps) {
            let k0 = step0 * step;
            let k1 = k.min((step0 + chunk_steps) * step);
            let part = Side { view: shared.view.at(line0, k0), lines, ..shared };
            let packed = share(cpu, part, k1 - k0, step, buffers.shared());
            let view = stream.view.at(0, k0);
            let task = |index: usize, worker: usize| {
                let at = grid.task(index, stream, lines);
                // The next task of this thread, when all run equally fast.
                let next = grid.task((index + threads).min(grid.tasks() - 1), stream, lines);
                let kc = step.min(k1 - k0);
                let next = (next.line != at.line).then(|| Fetch::new(view.at(next.line, 0), next.lines, kc));
                let raw = (Operand::Raw(view.at(at.line, 0)), 0);
                let packed = (Operand::Packed(packed), at.panel);
                // SAFETY: the worker's own buffers; tasks own disjoint rectangles, which `Grid` fits to the buffers.
                unsafe {
                    let buffers = buffers.of_worker(worker);
                    let (i0, rows, j0, cols, a, b) = if share_a {
                        (line0 + at.panel * shared.width, at.shared, at.line, at.lines, packed, raw)
                    } else {
                        (at.line, at.lines, line0 + at.panel * shared.width, at.shared, raw, packed)
                    };
                    Area { i0, rows, j0, cols }.run(kernel, p, step, k0..k1, a, b, next, buffers);
                }
            };
            cpu.pool().run(grid.tasks(), &task);
        }
    }
}

/// Packs the shared operand with all threads.
fn share(cpu: &Cpu, side: Side, k: usize, step: usize, out: *mut f32) -> Panels {
    struct Out(*mut f32);
    // SAFETY: tasks write disjoint panels.
    unsafe impl Sync for Out {}
    let out = Out(out);
    let panels = side.panels();
    let steps = k.div_ceil(step).max(1);
    let a_task = even(panels, (panels * steps).div_ceil(TASKS * cpu.threads()));
    let tasks_a_step = panels.div_ceil(a_task);
    let isa = cpu.isa();
    let task = |index: usize, _| {
        let out = &out;
        let (s, first) = (index / tasks_a_step, index % tasks_a_step * a_task);
        let kc = step.min(k - s * step);
        let lines = (a_task * side.width).min(side.lines - first * side.width);
        let offset = s * panels * panel_floats(side.width, step) + first * panel_floats(side.width, kc);
        // SAFETY: the caller has compared the size of the shared buffer.
        unsafe { pack(isa, side.view.at(first * side.width, s * step), side.width, lines, kc, out.0.add(offset)) };
    };
    cpu.pool().run(steps * tasks_a_step, &task);
    Panels { ptr: out.0, panels, width: side.width, step }
}

/// How C is cut into tasks. The cut depends on the number of threads; no sum does.
struct Grid {
    /// Panels of the streaming operand a task.
    stream_panels: usize,
    stream_blocks: usize,
    /// Panels of the shared operand a task.
    shared_panels: usize,
    shared_groups: usize,
    shared_width: usize,
}

/// One task: lines `line..line + lines` of the streaming operand with `shared` lines of the shared one from panel `panel` on.
struct Task {
    line: usize,
    lines: usize,
    panel: usize,
    shared: usize,
}

impl Grid {
    fn new(panels: usize, width: usize, stream: Side, threads: usize, direct: bool) -> Grid {
        let total = stream.panels();
        let blocks = total.div_ceil(stream.most).max((TASKS * threads).min(total)).next_multiple_of(threads);
        let stream_panels = total.div_ceil(blocks);
        let stream_blocks = total.div_ceil(stream_panels);
        let mut groups = 1;
        if stream_blocks < TASKS * threads {
            groups = (TASKS * threads).div_ceil(stream_blocks).min(panels.div_ceil(2));
        }
        let mut shared_panels = panels.div_ceil(groups);
        if !direct {
            let most = TILE_FLOATS / (stream_panels * stream.width) / width;
            shared_panels = even(panels, most.min(shared_panels));
        }
        let shared_groups = panels.div_ceil(shared_panels);
        Grid { stream_panels, stream_blocks, shared_panels, shared_groups, shared_width: width }
    }

    fn tasks(&self) -> usize {
        self.stream_blocks * self.shared_groups
    }

    fn task(&self, index: usize, stream: Side, shared_lines: usize) -> Task {
        let (block, group) = (index / self.shared_groups, index % self.shared_groups);
        let line = block * self.stream_panels * stream.width;
        let panel = group * self.shared_panels;
        Task {
            line,
            lines: (self.stream_panels * stream.width).min(stream.lines - line),
            panel,
            shared: (self.shared_panels * self.shared_width).min(shared_lines - panel * self.shared_width),
        }
    }
}
