//! Products of a few rows with a weight matrix whose rows lie along K: decoding one token. Dot products that read the weights once, without
//! packing them.

use super::{Buffers, Product, SHARED_FLOATS, finish};
use crate::cpu::element::with_element;
use crate::cpu::isa::per_isa;
use crate::cpu::{Cpu, Element};

/// The most rows for which dot products beat packing.
const ROWS: usize = 8;

/// Columns of C (rows of the weight) a task. Fixed; no sum crosses it.
const COLUMNS: usize = 64;

/// Columns taken together, so that four chains of additions overlap.
const GROUP: usize = 4;

/// Partial sums of one dot product.
const LANES: usize = 16;

/// Multiply-adds below which waking other threads costs more than it gives.
const SERIAL: usize = 1 << 17;

pub(super) fn fits(p: &Product<'_>) -> bool {
    p.m <= ROWS && p.b.row_stride == 1 && p.a.col_stride == 1 && p.m * p.k <= SHARED_FLOATS && p.k > 0
}

pub(super) fn run(cpu: &Cpu, p: &Product<'_>, buffers: Buffers) {
    let (m, k, isa) = (p.m, p.k, cpu.isa());
    // SAFETY: `fits` has compared the length, and no task runs yet.
    let x = unsafe { std::slice::from_raw_parts_mut(buffers.shared(), m * k) };
    for i in 0..m {
        with_element!(p.a.dtype, T => {
            // SAFETY: the product was checked.
            let row = unsafe { p.a.row::<T>(i, 0, k) };
            widen::<T>(isa, row, &mut x[i * k..(i + 1) * k]);
        });
    }
    let x = &*x;
    let task = |index: usize, _| {
        let j0 = index * COLUMNS;
        let cols = COLUMNS.min(p.n - j0);
        let mut y = [0.0f32; ROWS * COLUMNS];
        for j in (0..cols).step_by(GROUP) {
            let live = GROUP.min(cols - j);
            with_element!(p.b.dtype, T => {
                // SAFETY: column `j0 + j + g` of B is `k` elements in a row; the last ones repeat when fewer than a group is left.
                let w: [&[T]; GROUP] = std::array::from_fn(|g| unsafe {
                    let column = j0 + j + g.min(live - 1);
                    std::slice::from_raw_parts(p.b.ptr.cast::<T>().add(column * p.b.col_stride), k)
                });
                let mut sums = [0.0; ROWS * GROUP];
                dots::<T>(isa, x, w, &mut sums[..m * GROUP]);
                for i in 0..m {
                    for g in 0..live {
                        y[i * COLUMNS + j + g] = p.alpha * sums[i * GROUP + g];
                    }
                }
            });
        }
        for i in 0..m {
            let y = &mut y[i * COLUMNS..i * COLUMNS + cols];
            // SAFETY: the product was checked; tasks own disjoint columns.
            unsafe {
                p.finish.apply(isa, i, j0, y);
                finish::store(isa, &p.out, i, j0, y, p.accumulate);
            }
        }
    };
    let tasks = p.n.div_ceil(COLUMNS);
    if m * k * p.n <= SERIAL {
        (0..tasks).for_each(|index| task(index, 0));
    } else {
        cpu.pool().run(tasks, &task);
    }
}

per_isa! {
    fn widen[T: Element](x: &[T], y: &mut [f32]) {
        for (x, y) in x.iter().zip(y) {
            *y = x.to_f32();
        }
    }
}

per_isa! {
    /// `sums[i][g] = x[i] . w[g]`; `x` holds rows as long as those of `w`.
    fn dots[T: Element](x: &[f32], w: [&[T]; GROUP], sums: &mut [f32]) {
        let k = w[0].len();
        for (x, sums) in x.chunks_exact(k).zip(sums.chunks_exact_mut(GROUP)) {
            let mut acc = [[0.0f32; LANES]; GROUP];
            let whole = k / LANES * LANES;
            for at in (0..whole).step_by(LANES) {
                let x = &x[at..at + LANES];
                for g in 0..GROUP {
                    let w = &w[g][at..at + LANES];
                    for l in 0..LANES {
                        acc[g][l] += x[l] * w[l].to_f32();
                    }
                }
            }
            for at in whole..k {
                for g in 0..GROUP {
                    acc[g][at - whole] += x[at] * w[g][at].to_f32();
                }
            }
            for g in 0..GROUP {
                let mut width = LANES / 2;
                while width > 0 {
                    for l in 0..width {
                        acc[g][l] += acc[g][l + width];
                    }
                    width /= 2;
                }
                sums[g] = acc[g][0];
            }
        }
    }
}
