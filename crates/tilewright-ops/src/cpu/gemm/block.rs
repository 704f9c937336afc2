//! The loops around the micro-kernel: one block of C over all of K, in the calling thread.

use super::kernel::Kernel;
use super::pack::{View, pack, panel_floats};

/// Steps of K between two visits to C, at most. A panel of B (32 columns) then takes 48 KiB and one of A 21 KiB: one of them stays in the
/// first cache while the other streams from the second.
pub(super) const KC: usize = 384;

/// Floats for a packed block of A: 20 panels of 14 rows (or as many rows of other widths) over `KC` steps, 430 KB of a 1 MiB second cache.
pub(super) const A_FLOATS: usize = 20 * panel_floats(14, KC);

/// Floats for a packed block of B: 8 panels of 32 columns over `KC` steps, 390 KB.
pub(super) const B_FLOATS: usize = 8 * panel_floats(32, KC);

/// The steps of K between two visits to C: equal parts below `KC`, so that no short rest is left. A function of `k` alone, since it decides
/// the order of the sum.
pub(super) fn k_step(k: usize) -> usize {
    k.div_ceil(k.div_ceil(KC).max(1)).next_multiple_of(16).clamp(16, KC)
}

/// One operand of a block.
#[derive(Clone, Copy)]
pub(super) enum Operand {
    /// As the caller stores it; packed on the way.
    Raw(View),
    /// Packed already.
    Packed(Panels),
}

/// Panels of all of K, made by [`pack`] once for each step of K.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    /// The first panel of the first step.
    pub(super) ptr: *const f32,
    /// Panels from one step of K to the next.
    pub(super) panels: usize,
    /// Lines a panel.
    pub(super) width: usize,
    /// Steps of K of each but the last packing.
    pub(super) step: usize,
}

// SAFETY: a shared view of packed numbers, written before it is shared.
unsafe impl Send for Panels {}
unsafe impl Sync for Panels {}

impl Panels {
    /// The panel `panel` of the `index`-th step of K, whose length is `kc`.
    fn get(self, index: usize, panel: usize, kc: usize) -> *const f32 {
        let whole = self.panels * panel_floats(self.width, self.step);
        self.ptr.wrapping_add(index * whole + panel * panel_floats(self.width, kc))
    }
}

/// `c (m, n) = alpha * a (m, k) @ b (k, n)`, or `+=`.
pub(super) struct Block {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Steps of K between two visits to C, from [`k_step`] of the whole product.
    pub(super) step: usize,
    pub(super) a: Operand,
    /// The first panel of A, when packed.
    pub(super) a_panel: usize,
    pub(super) b: Operand,
    /// The first panel of B, when packed.
    pub(super) b_panel: usize,
    pub(super) c: *mut f32,
    pub(super) ldc: usize,
    pub(super) alpha: f32,
    pub(super) add: bool,
    /// What this thread will probably pack next, fetched while it computes.
    pub(super) next: Option<Fetch>,
}

/// A region of memory to fetch ahead: `rows` runs of `bytes`, `stride` apart.
#[derive(Clone, Copy)]
pub(super) struct Fetch {
    ptr: *const u8,
    rows: usize,
    bytes: usize,
    stride: usize,
    row: usize,
    at: usize,
}

impl Fetch {
    const LINE: usize = 64;

    /// The first `lines x kc` elements of a view.
    pub(super) fn new(view: View, lines: usize, kc: usize) -> Fetch {
        let size = view.dtype.size();
        let (rows, bytes, stride) = if view.k_stride == 1 {
            (lines, kc * size, view.line_stride * size)
        } else {
            (kc, lines * size, view.k_stride * size)
        };
        Fetch { ptr: view.ptr, rows, bytes, stride, row: 0, at: 0 }
    }

    fn lines(&self) -> usize {
        self.rows * self.bytes.div_ceil(Self::LINE)
    }

    /// Asks for the next `lines` lines.
    #[inline]
    fn advance(&mut self, lines: usize) {
        for _ in 0..lines {
            if self.row == self.rows {
                return;
            }
            prefetch(self.ptr.wrapping_add(self.row * self.stride + self.at));
            self.at += Self::LINE;
            if self.at >= self.bytes {
                self.at = 0;
                self.row += 1;
            }
        }
    }
}

#[inline(always)]
fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Runs a block. `done(first_row, rows)` is called once for each range of rows when its elements of C are complete, while they are near.
///
/// # Safety
/// Operands and `c` are as large as `m`, `n`, `k` say; nobody else touches `c`; raw operands fit `scratch`: B needs
/// `n.div_ceil(nr) * panel_floats(nr, KC)` floats of `b_scratch`, A at least one panel of `a_scratch`.
pub(super) unsafe fn run(
    kernel: Kernel,
    block: &Block,
    a_scratch: &mut [f32],
    b_scratch: &mut [f32],
    done: &mut dyn FnMut(usize, usize),
) {
    let Kernel { isa, mr, nr, micro } = kernel;
    let &Block { m, n, k, step, c, ldc, alpha, .. } = block;
    // Panels of A that are multiplied with a whole block of B before the next ones: they stay in the second cache.
    let a_panels = (a_scratch.len().max(A_FLOATS) / panel_floats(mr, KC)).max(1);
    let a_fits = a_scratch.len() / panel_floats(mr, step);
    let a_panels = if matches!(block.a, Operand::Raw(_)) { a_fits.min(a_panels) } else { a_panels };
    let a_panels = even(m.div_ceil(mr), a_panels);
    let b_panels = n.div_ceil(nr);
    let steps = k.div_ceil(step).max(1);
    for index in 0..steps {
        let k0 = index * step;
        let kc = step.min(k - k0);
        let last = index + 1 == steps;
        let add = block.add || index > 0;
        let (b, b_stride) = match block.b {
            Operand::Raw(view) => {
                debug_assert!(b_panels * panel_floats(nr, kc) <= b_scratch.len());
                // SAFETY: the caller vouches for the view and the room.
                unsafe { pack(isa, view.at(0, k0), nr, n, kc, b_scratch.as_mut_ptr()) };
                (b_scratch.as_ptr(), panel_floats(nr, kc))
            }
            Operand::Packed(p) => (p.get(index, block.b_panel, kc), panel_floats(nr, kc)),
        };
        let mut fetch = match (block.b, block.a) {
            (Operand::Raw(view), Operand::Packed(_)) if !last => {
                Some(Fetch::new(view.at(0, k0 + step), n, step.min(k - k0 - step)))
            }
            (Operand::Packed(_), Operand::Raw(view)) if !last && m <= a_panels * mr => {
                Some(Fetch::new(view.at(0, k0 + step), m, step.min(k - k0 - step)))
            }
            _ if last => block.next,
            _ => None,
        };
        let calls = m.div_ceil(mr) * b_panels;
        let lines_a_call = fetch.as_ref().map_or(0, |f| f.lines().div_ceil(calls.max(1)));
        for i0 in (0..m).step_by(a_panels * mr) {
            let rows = (a_panels * mr).min(m - i0);
            let a = match block.a {
                Operand::Raw(view) => {
                    // SAFETY: the caller vouches for the view; `a_panels` fit.
                    unsafe { pack(isa, view.at(i0, k0), mr, rows, kc, a_scratch.as_mut_ptr()) };
                    a_scratch.as_ptr()
                }
                Operand::Packed(p) => p.get(index, block.a_panel + i0 / mr, kc),
            };
            for jp in 0..b_panels {
                let cols = nr.min(n - jp * nr);
                for ip in 0..rows.div_ceil(mr) {
                    if let Some(f) = &mut fetch {
                        f.advance(lines_a_call);
                    }
                    let live = mr.min(rows - ip * mr);
                    // SAFETY: tile (ip, jp) lies inside the block and the panels were packed above.
                    unsafe {
                        micro(
                            kc,
                            a.add(ip * panel_floats(mr, kc)),
                            b.add(jp * b_stride),
                            c.add((i0 + ip * mr) * ldc + jp * nr),
                            ldc,
                            live,
                            cols,
                            alpha,
                            add,
                        );
                    }
                }
            }
            if last {
                done(i0, rows);
            }
        }
    }
}

/// Cuts `total` into equal parts of at most `most`; returns the size of a part.
pub(super) fn even(total: usize, most: usize) -> usize {
    total.div_ceil(total.div_ceil(most.max(1)).max(1)).max(1)
}
