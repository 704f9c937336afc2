//! One loop over the elements, in chunks of a fixed size.

use super::Gelu;
use crate::Tensor;
use crate::cpu::disjoint::Disjoint;
use crate::cpu::isa::per_isa;
use crate::cpu::{Cpu, Element, math};

/// Elements of a task.
const CHUNK: usize = 8 * 1024;

/// One form of the function, known when its loop is compiled.
trait Form {
    fn value(x: f32) -> f32;
    fn derivative(x: f32) -> f32;
}

struct Tanh;
struct Erf;

impl Form for Tanh {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        math::gelu_tanh(x)
    }
    #[inline(always)]
    fn derivative(x: f32) -> f32 {
        math::gelu_tanh_grad(x)
    }
}

impl Form for Erf {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        math::gelu_erf(x)
    }
    #[inline(always)]
    fn derivative(x: f32) -> f32 {
        math::gelu_erf_grad(x)
    }
}

pub(super) fn forward<T: Element>(cpu: &Cpu, kind: Gelu, x: &Tensor, out: &Tensor) {
    let isa = cpu.isa();
    // SAFETY: the contract checked dtypes, shapes and overlaps; no other op runs meanwhile.
    let (x, out) = unsafe { (x.slice_of::<T>(), Disjoint::new(out.slice_of_mut::<T>())) };
    chunks(cpu, x.len(), |start, end| {
        // SAFETY: chunks are disjoint.
        let (x, out) = (&x[start..end], unsafe { out.part(start, end) });
        match kind {
            Gelu::Tanh => values::<Tanh, T>(isa, x, out),
            Gelu::Erf => values::<Erf, T>(isa, x, out),
        }
    });
}

pub(super) fn backward<T: Element>(cpu: &Cpu, kind: Gelu, x: &Tensor, dout: &Tensor, dx: &Tensor) {
    let isa = cpu.isa();
    // SAFETY: as in `forward`; `dout` is not made into a slice where it is `dx` itself.
    let dout = (!dx.same_memory(dout)).then(|| unsafe { dout.slice_of::<T>() });
    let (x, dx) = unsafe { (x.slice_of::<T>(), Disjoint::new(dx.slice_of_mut::<T>())) };
    chunks(cpu, x.len(), |start, end| {
        // SAFETY: chunks are disjoint.
        let (x, dx) = (&x[start..end], unsafe { dx.part(start, end) });
        if let Some(dout) = dout {
            dx.copy_from_slice(&dout[start..end]);
        }
        match kind {
            Gelu::Tanh => scale_by_derivative::<Tanh, T>(isa, x, dx),
            Gelu::Erf => scale_by_derivative::<Erf, T>(isa, x, dx),
        }
    });
}

fn chunks(cpu: &Cpu, n: usize, task: impl Fn(usize, usize) + Sync) {
    cpu.pool().run(n.div_ceil(CHUNK), &|i, _| task(i * CHUNK, n.min((i + 1) * CHUNK)));
}

per_isa! {
    fn values[F: Form, T: Element](x: &[T], out: &mut [T]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = T::from_f32(F::value(x.to_f32()));
        }
    }
}

per_isa! {
    fn scale_by_derivative[F: Form, T: Element](x: &[T], dx: &mut [T]) {
        for (d, x) in dx.iter_mut().zip(x) {
            *d = T::from_f32(d.to_f32() * F::derivative(x.to_f32()));
        }
    }
}
