//! Packing: a block of an operand becomes f32 panels in the order in which the micro-kernel reads them.
//!
//! A panel holds `width` lines (rows of A, columns of B) over `kc` steps: `panel[k * width + line]`. Lines past the end are zeros. Behind
//! each panel lie [`PAD`] floats that packing may overwrite, so that it can store whole registers.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;

use crate::cpu::element::with_element;
use crate::cpu::{Element, Isa};
use tilewright_core::DType;

/// Floats behind each panel.
pub(super) const PAD: usize = 16;

/// Floats of one panel.
pub(super) const fn panel_floats(width: usize, kc: usize) -> usize {
    width * kc + PAD
}

/// An operand seen from packing: element `(line, k)` is `ptr[line * line_stride + k * k_stride]`.
#[derive(Clone, Copy)]
pub(super) struct View {
    pub(super) ptr: *const u8,
    pub(super) dtype: DType,
    pub(super) line_stride: usize,
    pub(super) k_stride: usize,
}

// SAFETY: a shared view of plain numbers; whoever builds it keeps the data alive and unwritten.
unsafe impl Send for View {}
unsafe impl Sync for View {}

impl View {
    /// The view that starts at `(line, k)`.
    pub(super) fn at(self, line: usize, k: usize) -> View {
        let offset = (line * self.line_stride + k * self.k_stride) * self.dtype.size();
        View { ptr: self.ptr.wrapping_add(offset), ..self }
    }
}

/// Packs `lines x kc` elements into `lines.div_ceil(width)` panels, `panel_floats(width, kc)` apart.
///
/// # Safety
/// The view holds `lines x kc` elements and `out` has room for the panels; the machine has `isa`.
pub(super) unsafe fn pack(isa: Isa, view: View, width: usize, lines: usize, kc: usize, out: *mut f32) {
    // SAFETY: passed on; the type is that of the dtype.
    with_element!(view.dtype, T => unsafe {
        match (isa, width) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, 14) => avx512::pack::<T, 14>(view, lines, kc, out),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, 32) => avx512::pack::<T, 32>(view, lines, kc, out),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, 6) => avx2::<T, 6>(view, lines, kc, out),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, 16) => avx2::<T, 16>(view, lines, kc, out),
            (_, 4) => plain::<T, 4>(view, lines, kc, out),
            (_, 8) => plain::<T, 8>(view, lines, kc, out),
            (_, 12) => plain::<T, 12>(view, lines, kc, out),
            (isa, width) => unreachable!("no kernel of {} has panels of {width}", isa.name()),
        }
    })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<T: Element, const W: usize>(view: View, lines: usize, kc: usize, out: *mut f32) {
    unsafe { plain::<T, W>(view, lines, kc, out) }
}

/// Any strides, any type.
#[inline(always)]
unsafe fn plain<T: Element, const W: usize>(view: View, lines: usize, kc: usize, out: *mut f32) {
    let src = view.ptr.cast::<T>();
    let (ls, ks) = (view.line_stride, view.k_stride);
    for (panel, first) in (0..lines).step_by(W).enumerate() {
        let live = W.min(lines - first);
        // SAFETY: all reads are `(line, k)` with `line < lines`, `k < kc`; all writes lie in panel `panel`.
        unsafe {
            let out = out.add(panel * panel_floats(W, kc));
            let src = src.add(first * ls);
            if live < W {
                std::slice::from_raw_parts_mut(out, W * kc).fill(0.0);
            }
            if ls == 1 && live == W {
                for k in 0..kc {
                    for line in 0..W {
                        *out.add(k * W + line) = (*src.add(k * ks + line)).to_f32();
                    }
                }
            } else {
                // Eight steps of k at a time keep both the lines read and the panel rows written in the first cache.
                for k0 in (0..kc).step_by(8) {
                    for line in 0..live {
                        for k in k0..kc.min(k0 + 8) {
                            *out.add(k * W + line) = (*src.add(line * ls + k * ks)).to_f32();
                        }
                    }
                }
            }
        }
    }
}
