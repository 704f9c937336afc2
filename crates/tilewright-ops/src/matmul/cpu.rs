//! The three forms as products of the packed engine; only strides differ.

use super::{BackwardInput, BackwardWeight, Forward};
use crate::Tensor;
use crate::cpu::element::with_element;
use crate::cpu::gemm::{Finish, MatMut, MatRef, Product, product};
use crate::cpu::isa::per_isa;
use crate::cpu::{Cpu, Element};

/// A tensor as an operand.
///
/// # Safety
/// Nothing writes to the tensor while the view lives.
unsafe fn read(t: &Tensor, row_stride: usize, col_stride: usize) -> MatRef<'_> {
    with_element!(t.dtype(), T => MatRef::new(unsafe { t.slice_of::<T>() }, row_stride, col_stride))
}

/// A tensor as a row-major output.
///
/// # Safety
/// Nothing else uses the tensor while the view lives.
unsafe fn write(t: &Tensor, cols: usize) -> MatMut<'_> {
    with_element!(t.dtype(), T => MatMut::new(unsafe { t.slice_of_mut::<T>() }, cols))
}

pub(super) fn forward(cpu: &Cpu, args: &Forward<'_>, m: usize, n: usize, k: usize) {
    // SAFETY: the op has checked that outputs overlap nothing.
    unsafe {
        let finish = Finish {
            bias: args.bias.map(|t| read(t, 0, 1)),
            pre: args.pre_gelu.map(|t| write(t, n)),
            gelu: args.gelu,
            gelu_grad: None,
        };
        let (a, b, out) = (read(args.x, k, 1), read(args.weight, 1, k), write(args.out, n));
        product(cpu, &Product { m, n, k, a, b, out, accumulate: false, alpha: 1.0, finish });
    }
}

/// The product is `(m, k)`, the sum runs over `n`.
pub(super) fn backward_input(cpu: &Cpu, args: &BackwardInput<'_>, m: usize, n: usize, k: usize) {
    // SAFETY: as above.
    unsafe {
        let finish = Finish { gelu_grad: args.gelu.map(|(kind, t)| (kind, read(t, k, 1))), ..Finish::default() };
        let (a, b, out) = (read(args.dout, n, 1), read(args.weight, k, 1), write(args.dx, k));
        product(cpu, &Product { m, n: k, k: n, a, b, out, accumulate: args.accumulate, alpha: 1.0, finish });
    }
}

/// The product is `(n, k)`, the sum runs over `m`.
pub(super) fn backward_weight(cpu: &Cpu, args: &BackwardWeight<'_>, m: usize, n: usize, k: usize) {
    if let Some(dbias) = args.dbias {
        bias_gradient(cpu, args.dout, dbias, args.accumulate, m, n);
    }
    // SAFETY: as above.
    unsafe {
        let (a, b, out) = (read(args.dout, 1, n), read(args.x, k, 1), write(args.dweight, k));
        let accumulate = args.accumulate;
        product(cpu, &Product { m: n, n: k, k: m, a, b, out, accumulate, alpha: 1.0, finish: Finish::default() });
    }
}

/// `sums (N) (+)= sum over M of x (M, N)`.
pub(super) fn bias_gradient(cpu: &Cpu, x: &Tensor, sums: &Tensor, accumulate: bool, m: usize, n: usize) {
    // SAFETY: the op has checked that outputs overlap nothing.
    with_element!(x.dtype(), T => {
        let x = unsafe { x.slice_of::<T>() };
        with_element!(sums.dtype(), U => {
            let sums = unsafe { sums.slice_of_mut::<U>() };
            column_sums(cpu, x, m, n, sums, accumulate);
        });
    });
}

/// Columns that one task sums. No sum crosses it, so it is free to choose.
const COLUMNS: usize = 128;

/// Rows summed before their sum joins the total: the error of f32 grows with the longer of two short chains, not with one long one.
const ROWS: usize = 64;

/// `out[j] (+)= sum over i of x[i][j]`, in an order that the shape alone decides.
fn column_sums<T: Element, U: Element>(cpu: &Cpu, x: &[T], m: usize, n: usize, out: &mut [U], accumulate: bool) {
    struct Out<U>(*mut U);
    // SAFETY: tasks write disjoint columns.
    unsafe impl<U> Sync for Out<U> {}
    let isa = cpu.isa();
    assert!(x.len() == m * n && out.len() == n);
    let out = Out(out.as_mut_ptr());
    let task = |index: usize, _| {
        let out = &out;
        let j0 = index * COLUMNS;
        let cols = COLUMNS.min(n - j0);
        let mut total = [0.0f32; COLUMNS];
        for i0 in (0..m).step_by(ROWS) {
            let rows = ROWS.min(m - i0);
            add_rows::<T>(isa, &x[i0 * n + j0..], n, rows, &mut total[..cols]);
        }
        // SAFETY: columns `j0..j0 + cols` belong to this task.
        let out = unsafe { std::slice::from_raw_parts_mut(out.0.add(j0), cols) };
        for (o, t) in out.iter_mut().zip(total) {
            *o = U::from_f32(if accumulate { o.to_f32() + t } else { t });
        }
    };
    cpu.pool().run(n.div_ceil(COLUMNS), &task);
}

per_isa! {
    fn add_rows[T: Element](x: &[T], stride: usize, rows: usize, total: &mut [f32]) {
        let mut sum = [0.0f32; COLUMNS];
        for i in 0..rows {
            for (s, x) in sum[..total.len()].iter_mut().zip(&x[i * stride..i * stride + total.len()]) {
                *s += x.to_f32();
            }
        }
        for (t, s) in total.iter_mut().zip(sum) {
            *t += s;
        }
    }
}
