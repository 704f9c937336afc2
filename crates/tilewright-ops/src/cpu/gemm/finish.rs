//! What happens to finished elements of a product: bias, GELU and its derivative, conversion to the storage type.

use super::MatRef;
use crate::cpu::element::with_element;
use crate::cpu::isa::per_isa;
use crate::cpu::{Element, Isa, math};
use crate::gelu::Gelu;
use tilewright_core::DType;

/// A row-major output matrix in any float type.
#[derive(Clone, Copy)]
pub(crate) struct MatMut<'a> {
    pub(super) ptr: *mut u8,
    pub(super) dtype: DType,
    pub(super) ld: usize,
    pub(super) len: usize,
    _data: std::marker::PhantomData<&'a mut [u8]>,
}

// SAFETY: the matrix product writes each element from one task only.
unsafe impl Send for MatMut<'_> {}
unsafe impl Sync for MatMut<'_> {}

impl<'a> MatMut<'a> {
    /// Rows of `ld` elements.
    pub(crate) fn new<T: Element>(data: &'a mut [T], ld: usize) -> Self {
        MatMut { ptr: data.as_mut_ptr().cast(), dtype: T::DTYPE, ld, len: data.len(), _data: std::marker::PhantomData }
    }

    /// `cols` elements of a row.
    ///
    /// # Safety
    /// They exist, `T` is their type, and nobody else uses them while the slice lives.
    #[allow(clippy::mut_from_ref)]
    unsafe fn row<T>(&self, row: usize, col: usize, cols: usize) -> &mut [T] {
        unsafe { std::slice::from_raw_parts_mut(self.ptr.cast::<T>().add(row * self.ld + col), cols) }
    }
}

/// The steps between a sum of products and its store, applied once to each element, in the order of the fields.
#[derive(Clone, Copy, Default)]
pub(crate) struct Finish<'a> {
    /// Adds `bias[column]`, a row vector in any float type.
    pub(crate) bias: Option<MatRef<'a>>,
    /// Stores the value so far.
    pub(crate) pre: Option<MatMut<'a>>,
    /// Applies GELU.
    pub(crate) gelu: Option<Gelu>,
    /// Multiplies by the derivative of GELU at this matrix.
    pub(crate) gelu_grad: Option<(Gelu, MatRef<'a>)>,
}

impl Finish<'_> {
    pub(super) fn is_none(&self) -> bool {
        self.bias.is_none() && self.pre.is_none() && self.gelu.is_none() && self.gelu_grad.is_none()
    }

    /// Whether it is linear in the product with weight one, so that it commutes with adding to what is there.
    pub(super) fn only_adds(&self) -> bool {
        self.pre.is_none() && self.gelu.is_none() && self.gelu_grad.is_none()
    }

    /// Applies the steps to `x`, the elements `(row, col..)`.
    ///
    /// # Safety
    /// The elements exist in all matrices, and this task alone works on them.
    pub(super) unsafe fn apply(&self, isa: Isa, row: usize, col: usize, x: &mut [f32]) {
        let n = x.len();
        if let Some(bias) = &self.bias {
            with_element!(bias.dtype, T => add_from::<T>(isa, unsafe { bias.row::<T>(0, col, n) }, x));
        }
        if let Some(pre) = &self.pre {
            with_element!(pre.dtype, T => convert::<T>(isa, x, unsafe { pre.row::<T>(row, col, n) }));
        }
        match self.gelu {
            Some(Gelu::Tanh) => gelu_tanh(isa, x),
            Some(Gelu::Erf) => gelu_erf(isa, x),
            None => {}
        }
        match &self.gelu_grad {
            Some((Gelu::Tanh, at)) => {
                with_element!(at.dtype, T => times_gelu_tanh_grad::<T>(isa, unsafe { at.row::<T>(row, col, n) }, x));
            }
            Some((Gelu::Erf, at)) => {
                with_element!(at.dtype, T => times_gelu_erf_grad::<T>(isa, unsafe { at.row::<T>(row, col, n) }, x));
            }
            None => {}
        }
    }
}

/// Stores `x` as the elements `(row, col..)` of `out`, or adds it to them.
///
/// # Safety
/// The elements exist, and this task alone works on them.
pub(super) unsafe fn store(isa: Isa, out: &MatMut<'_>, row: usize, col: usize, x: &[f32], accumulate: bool) {
    with_element!(out.dtype, T => {
        let out = unsafe { out.row::<T>(row, col, x.len()) };
        if accumulate { add_to::<T>(isa, x, out) } else { convert::<T>(isa, x, out) }
    });
}

per_isa! {
    /// `x += y`
    pub(super) fn add_from[T: Element](y: &[T], x: &mut [f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y.to_f32();
        }
    }
}

per_isa! {
    fn convert[T: Element](x: &[f32], y: &mut [T]) {
        for (x, y) in x.iter().zip(y) {
            *y = T::from_f32(*x);
        }
    }
}

per_isa! {
    fn add_to[T: Element](x: &[f32], y: &mut [T]) {
        for (x, y) in x.iter().zip(y) {
            *y = T::from_f32(y.to_f32() + *x);
        }
    }
}

per_isa! {
    fn gelu_tanh[](x: &mut [f32]) {
        for x in x {
            *x = math::gelu_tanh(*x);
        }
    }
}

per_isa! {
    fn gelu_erf[](x: &mut [f32]) {
        for x in x {
            *x = math::gelu_erf(*x);
        }
    }
}

per_isa! {
    fn times_gelu_tanh_grad[T: Element](at: &[T], x: &mut [f32]) {
        for (x, at) in x.iter_mut().zip(at) {
            *x *= math::gelu_tanh_grad(at.to_f32());
        }
    }
}

per_isa! {
    fn times_gelu_erf_grad[T: Element](at: &[T], x: &mut [f32]) {
        for (x, at) in x.iter_mut().zip(at) {
            *x *= math::gelu_erf_grad(at.to_f32());
        }
    }
}
