//! Rows are independent and split into tasks of a fixed size; sums over rows go through partials of [`super::block_rows`] rows.

use super::{Backward, Forward, Recompute, block_rows};
use crate::Tensor;
use crate::cpu::disjoint::Disjoint;
use crate::cpu::isa::per_isa;
use crate::cpu::{Cpu, Element};

/// Independent sums of a reduction: two AVX-512 registers. The order of addition is the same for every instruction set.
const LANES: usize = 32;

/// Columns of `dweight` that one task reduces.
const COLUMNS: usize = 256;

/// Elements of a task where rows are independent.
const TASK: usize = 16 * 1024;

pub(super) fn forward<T: Element>(cpu: &Cpu, n: usize, c: usize, args: &Forward<'_>) {
    let (isa, eps) = (cpu.isa(), args.eps);
    // SAFETY (this block and the like below): the contract checked dtypes, shapes and overlaps; no other op runs meanwhile.
    let weight = unsafe { args.weight.slice_of::<T>() };
    let bias = args.bias.map(|b| unsafe { b.slice_of::<T>() });
    let out = Disjoint::new(unsafe { args.out.slice_of_mut::<T>() });
    let mean = Disjoint::new(unsafe { args.mean.slice_of_mut::<f32>() });
    let rstd = Disjoint::new(unsafe { args.rstd.slice_of_mut::<f32>() });
    let in_place = args.residual.as_ref().is_some_and(|r| r.sum.same_memory(args.x));
    let x = (!in_place).then(|| unsafe { args.x.slice_of::<T>() });
    let branch = args.residual.as_ref().map(|r| unsafe { r.branch.slice_of::<T>() });
    let sum = args.residual.as_ref().map(|r| Disjoint::new(unsafe { r.sum.slice_of_mut::<T>() }));

    let rows = task_rows(c);
    cpu.pool().run(n.div_ceil(rows), &|task, _| {
        let (r0, r1) = (task * rows, n.min((task + 1) * rows));
        let (i0, i1) = (r0 * c, r1 * c);
        // SAFETY: tasks own disjoint ranges of rows.
        let (out, mean, rstd) = unsafe { (out.part(i0, i1), mean.part(r0, r1), rstd.part(r0, r1)) };
        let x = x.map(|x| &x[i0..i1]);
        let normalised: &[T] = match (&sum, branch, x) {
            (Some(sum), Some(branch), x) => {
                // SAFETY: as above; `x` is absent where it is this very memory.
                let sum = unsafe { sum.part(i0, i1) };
                match x {
                    Some(x) => add(isa, x, &branch[i0..i1], sum),
                    None => add_in_place(isa, &branch[i0..i1], sum),
                }
                sum
            }
            (_, _, Some(x)) => x,
            _ => unreachable!("x is absent only with a residual"),
        };
        normalise(isa, c, eps, normalised, weight, bias, out, mean, rstd);
    });
}

pub(super) fn recompute<T: Element>(cpu: &Cpu, n: usize, c: usize, args: &Recompute<'_>) {
    let isa = cpu.isa();
    let (sum, weight) = unsafe { (args.sum.slice_of::<T>(), args.weight.slice_of::<T>()) };
    let bias = args.bias.map(|b| unsafe { b.slice_of::<T>() });
    let (mean, rstd) = unsafe { (args.mean.slice_of::<f32>(), args.rstd.slice_of::<f32>()) };
    let out = Disjoint::new(unsafe { args.out.slice_of_mut::<T>() });
    let rows = task_rows(c);
    cpu.pool().run(n.div_ceil(rows), &|task, _| {
        let (r0, r1) = (task * rows, n.min((task + 1) * rows));
        let (i0, i1) = (r0 * c, r1 * c);
        // SAFETY: tasks own disjoint ranges of rows.
        let out = unsafe { out.part(i0, i1) };
        apply(isa, c, &sum[i0..i1], weight, bias, out, &mean[r0..r1], &rstd[r0..r1]);
    });
}

pub(super) fn backward<T: Element>(cpu: &Cpu, n: usize, c: usize, args: &Backward<'_>, partials: &Tensor) {
    let (isa, accumulate_dx, accumulate_params) = (cpu.isa(), args.accumulate_dx, args.accumulate_params);
    let (dout, sum) = unsafe { (args.dout.slice_of::<T>(), args.sum.slice_of::<T>()) };
    let weight = unsafe { args.weight.slice_of::<T>() };
    let (mean, rstd) = unsafe { (args.mean.slice_of::<f32>(), args.rstd.slice_of::<f32>()) };
    let dx = Disjoint::new(unsafe { args.dx.slice_of_mut::<T>() });
    let (rows, width) = (block_rows(n), 2 * c);
    let blocks = n.div_ceil(rows);
    {
        let partials = Disjoint::new(unsafe { partials.slice_of_mut::<f32>() });
        cpu.pool().run(blocks, &|block, _| {
            let (r0, r1) = (block * rows, n.min((block + 1) * rows));
            let (i0, i1) = (r0 * c, r1 * c);
            // SAFETY: tasks own disjoint blocks of rows, and one partial each.
            let (dx, partial) = unsafe { (dx.part(i0, i1), partials.part(block * width, (block + 1) * width)) };
            let (dw, db) = partial.split_at_mut(c);
            let (mean, rstd) = (&mean[r0..r1], &rstd[r0..r1]);
            backward_rows(isa, c, accumulate_dx, &dout[i0..i1], &sum[i0..i1], weight, mean, rstd, dx, dw, db);
        });
    }
    let partials = unsafe { partials.slice_of::<f32>() };
    let dweight = Disjoint::new(unsafe { args.dweight.slice_of_mut::<T>() });
    let dbias = args.dbias.map(|d| Disjoint::new(unsafe { d.slice_of_mut::<T>() }));
    cpu.pool().run(c.div_ceil(COLUMNS), &|task, _| {
        let (c0, c1) = (task * COLUMNS, c.min((task + 1) * COLUMNS));
        // SAFETY: tasks own disjoint columns.
        reduce(isa, partials, width, c0, accumulate_params, unsafe { dweight.part(c0, c1) });
        if let Some(dbias) = &dbias {
            reduce(isa, partials, width, c + c0, accumulate_params, unsafe { dbias.part(c0, c1) });
        }
    });
}

fn task_rows(c: usize) -> usize {
    (TASK / c.max(1)).max(1)
}

per_isa! {
    fn add[T: Element](x: &[T], branch: &[T], sum: &mut [T]) {
        for ((s, x), b) in sum.iter_mut().zip(x).zip(branch) {
            *s = T::from_f32(x.to_f32() + b.to_f32());
        }
    }
}

per_isa! {
    fn add_in_place[T: Element](branch: &[T], sum: &mut [T]) {
        for (s, b) in sum.iter_mut().zip(branch) {
            *s = T::from_f32(s.to_f32() + b.to_f32());
        }
    }
}

per_isa! {
    fn normalise[T: Element](
        c: usize, eps: f32, sum: &[T], weight: &[T], bias: Option<&[T]>, out: &mut [T], mean: &mut [f32], rstd: &mut [f32],
    ) {
        for (r, (mean, rstd)) in mean.iter_mut().zip(rstd).enumerate() {
            let row = &sum[r * c..(r + 1) * c];
            let scale = 1.0 / c.max(1) as f32;
            let m = reduce_row(row, |x| x) * scale;
            let variance = reduce_row(row, |x| (x - m) * (x - m)) * scale;
            (*mean, *rstd) = (m, 1.0 / (variance + eps).sqrt());
            apply_row(row, weight, bias, &mut out[r * c..(r + 1) * c], *mean, *rstd);
        }
    }
}

per_isa! {
    fn apply[T: Element](
        c: usize, sum: &[T], weight: &[T], bias: Option<&[T]>, out: &mut [T], mean: &[f32], rstd: &[f32],
    ) {
        for (r, (&mean, &rstd)) in mean.iter().zip(rstd).enumerate() {
            apply_row(&sum[r * c..(r + 1) * c], weight, bias, &mut out[r * c..(r + 1) * c], mean, rstd);
        }
    }
}

/// The one place that turns statistics into `out`: forward and recompute agree to the bit because both call it.
#[inline(always)]
fn apply_row<T: Element>(row: &[T], weight: &[T], bias: Option<&[T]>, out: &mut [T], mean: f32, rstd: f32) {
    match bias {
        Some(bias) => {
            for (((o, x), w), b) in out.iter_mut().zip(row).zip(weight).zip(bias) {
                *o = T::from_f32((x.to_f32() - mean) * rstd * w.to_f32() + b.to_f32());
            }
        }
        None => {
            for ((o, x), w) in out.iter_mut().zip(row).zip(weight) {
                *o = T::from_f32((x.to_f32() - mean) * rstd * w.to_f32());
            }
        }
    }
}

/// Sum of `f` over a row in [`LANES`] interleaved sums.
#[inline(always)]
fn reduce_row<T: Element>(row: &[T], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, tail) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] += f(chunk[l].to_f32());
        }
    }
    for (lane, x) in lanes.iter_mut().zip(tail) {
        *lane += f(x.to_f32());
    }
    fold(lanes)
}

/// Adds the lanes pairwise.
#[inline(always)]
fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

per_isa! {
    fn backward_rows[T: Element](
        c: usize, accumulate: bool, dout: &[T], sum: &[T], weight: &[T], mean: &[f32], rstd: &[f32], dx: &mut [T],
        dw: &mut [f32], db: &mut [f32],
    ) {
        dw.fill(0.0);
        db.fill(0.0);
        for (r, (&mean, &rstd)) in mean.iter().zip(rstd).enumerate() {
            let row = r * c..(r + 1) * c;
            let (dout, sum, dx) = (&dout[row.clone()], &sum[row.clone()], &mut dx[row]);
            let (g_mean, gx_mean) = parameter_row(dout, sum, weight, mean, rstd, dw, db);
            for (((dx, d), x), w) in dx.iter_mut().zip(dout).zip(sum).zip(weight) {
                let xhat = (x.to_f32() - mean) * rstd;
                let grad = rstd * (w.to_f32() * d.to_f32() - g_mean - xhat * gx_mean);
                *dx = T::from_f32(if accumulate { dx.to_f32() + grad } else { grad });
            }
        }
    }
}

/// Adds one row to the parameters' sums and returns `(mean(g), mean(g * xhat))`, in one pass over the row.
#[inline(always)]
fn parameter_row<T: Element>(
    dout: &[T],
    sum: &[T],
    weight: &[T],
    mean: f32,
    rstd: f32,
    dw: &mut [f32],
    db: &mut [f32],
) -> (f32, f32) {
    let c = dout.len();
    let (mut g_lanes, mut gx_lanes) = ([0.0f32; LANES], [0.0f32; LANES]);
    for start in (0..c).step_by(LANES) {
        let end = c.min(start + LANES);
        let (dout, sum, weight) = (&dout[start..end], &sum[start..end], &weight[start..end]);
        let (dw, db) = (&mut dw[start..end], &mut db[start..end]);
        match (dout.as_array(), sum.as_array(), weight.as_array(), dw.as_mut_array(), db.as_mut_array()) {
            (Some(d), Some(x), Some(w), Some(dw), Some(db)) => {
                parameter_group(widen(d), widen(x), widen(w), mean, rstd, &mut g_lanes, &mut gx_lanes, dw, db);
            }
            _ => {
                // The tail, filled up with zeros that add nothing: x as the mean, so that xhat is 0.
                let (mut dw_group, mut db_group) = ([0.0; LANES], [0.0; LANES]);
                let (mut d, mut x, mut w) = ([0.0; LANES], [mean; LANES], [0.0; LANES]);
                for l in 0..dw.len() {
                    (d[l], x[l], w[l]) = (dout[l].to_f32(), sum[l].to_f32(), weight[l].to_f32());
                    (dw_group[l], db_group[l]) = (dw[l], db[l]);
                }
                let (dw_group, db_group) = (&mut dw_group, &mut db_group);
                parameter_group(d, x, w, mean, rstd, &mut g_lanes, &mut gx_lanes, dw_group, db_group);
                dw.copy_from_slice(&dw_group[..dw.len()]);
                db.copy_from_slice(&db_group[..db.len()]);
            }
        }
    }
    let scale = 1.0 / c.max(1) as f32;
    (fold(g_lanes) * scale, fold(gx_lanes) * scale)
}

#[inline(always)]
fn parameter_group(
    d: [f32; LANES],
    x: [f32; LANES],
    w: [f32; LANES],
    mean: f32,
    rstd: f32,
    g_lanes: &mut [f32; LANES],
    gx_lanes: &mut [f32; LANES],
    dw: &mut [f32; LANES],
    db: &mut [f32; LANES],
) {
    for l in 0..LANES {
        let xhat = (x[l] - mean) * rstd;
        let g = w[l] * d[l];
        g_lanes[l] += g;
        gx_lanes[l] += g * xhat;
        dw[l] += xhat * d[l];
        db[l] += d[l];
    }
}

#[inline(always)]
fn widen<T: Element>(group: &[T; LANES]) -> [f32; LANES] {
    let mut wide = [0.0; LANES];
    for l in 0..LANES {
        wide[l] = group[l].to_f32();
    }
    wide
}

per_isa! {
    /// Adds the partial rows from `start` on, `width` apart, in their order.
    fn reduce[T: Element](partials: &[f32], width: usize, start: usize, accumulate: bool, out: &mut [T]) {
        let mut sums = [0.0f32; COLUMNS];
        let sums = &mut sums[..out.len()];
        let mut at = start;
        while at < partials.len() {
            for (s, p) in sums.iter_mut().zip(&partials[at..at + out.len()]) {
                *s += p;
            }
            at += width;
        }
        for (o, s) in out.iter_mut().zip(sums) {
            *o = T::from_f32(if accumulate { o.to_f32() + *s } else { *s });
        }
    }
}
