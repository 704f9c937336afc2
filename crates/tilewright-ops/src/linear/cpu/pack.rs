//! Packing of weights, once, and of rows, for each call; and the widening of 16-bit panels for kernels that read f32.

use tilewright_core::{DType, bf16, f16};

use super::super::weight::{Layout, Panels};
use super::kernel::Engine;
#[cfg(target_arch = "x86_64")]
use super::kernel::Form;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512_pack};
use crate::Tensor;
use crate::cpu::disjoint::Disjoint;
use crate::cpu::element::with_element;
use crate::cpu::isa::per_isa;
use crate::cpu::{Cpu, Element, Isa};

/// Packs a weight with all threads, a panel a task.
pub(in crate::linear) fn pack(cpu: &Cpu, source: &Tensor, panels: &Panels, memory: &Tensor) {
    if panels.panel_bytes() == 0 {
        return;
    }
    let isa = cpu.isa();
    // SAFETY: the contract has checked dtypes, sizes and that the two do not overlap.
    let memory = unsafe { Disjoint::new(memory.slice_of_mut::<u8>()) };
    with_element!(source.dtype(), T => {
        // SAFETY: as above.
        let source = unsafe { source.slice_of::<T>() };
        cpu.pool().run(panels.count, &|index, _| {
            let size = panels.panel_bytes();
            // SAFETY: panels are disjoint.
            let out = unsafe { memory.part(index * size, (index + 1) * size) };
            panel::<T>(isa, source, panels, index, out);
        });
    });
}

/// The row of the weight that becomes a column of a panel; `None` past the end.
fn source_row(panels: &Panels, panel: usize, column: usize) -> Option<usize> {
    let (n, width) = (panels.n, panels.width);
    match panels.layout {
        Layout::Plain => Some(panel * width + column).filter(|&row| row < n),
        Layout::Gated => {
            let (gate, column) = (column / (width / 2), column % (width / 2));
            let pair = panel * (width / 2) + column;
            (pair < n / 2).then_some(gate * (n / 2) + pair)
        }
    }
}

fn panel<T: Element>(isa: Isa, source: &[T], panels: &Panels, index: usize, out: &mut [u8]) {
    match panels.precision {
        DType::F32 => columns::<T, f32>(isa, source, panels, index, out),
        DType::F16 => columns::<T, f16>(isa, source, panels, index, out),
        _ => columns::<T, bf16>(isa, source, panels, index, out),
    }
}

fn columns<T: Element, U: Element>(isa: Isa, source: &[T], panels: &Panels, index: usize, out: &mut [u8]) {
    let Panels { k, width, .. } = *panels;
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 {
        let rows = std::array::from_fn(|column| {
            source_row(panels, index, column).map(|row| source[row * k..(row + 1) * k].as_ptr())
        });
        // SAFETY: the rows were just made of slices; the panel starts at a multiple of 64 bytes, since the memory and the size of a panel do.
        return unsafe { avx512_pack::panel::<T, U>(&rows, k, out.as_mut_ptr().cast()) };
    }
    // SAFETY: the memory starts at a multiple of 64 bytes and holds elements of this type; every bit pattern is one.
    let out = unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<U>(), out.len() / size_of::<U>()) };
    for column in 0..width {
        let row = source_row(panels, index, column).map(|row| &source[row * k..(row + 1) * k]);
        scatter::<T, U>(isa, row, width, column, out);
    }
}

per_isa! {
    fn scatter[T: Element, U: Element](row: Option<&[T]>, width: usize, column: usize, out: &mut [U]) {
        let group = 4 / size_of::<U>();
        let value = |k: usize| row.and_then(|row| row.get(k)).map_or(U::from_f32(0.0), |x| U::from_f32(x.to_f32()));
        for (word, out) in out.chunks_exact_mut(width * group).enumerate() {
            for i in 0..group {
                out[column * group + i] = value(word * group + i);
            }
        }
    }
}

/// Packs `rows` rows of `x`, `stride` apart, over `kc` steps: `out[step * width + row]`, a pair of bf16 a step where the kernel wants pairs. Rows
/// up to `width` are zeros.
///
/// # Safety
/// The rows exist, and `out` holds `width` rows and `PAD` words behind them that may be overwritten.
pub(super) unsafe fn rows(
    engine: &Engine,
    x: *const f32,
    stride: usize,
    rows: usize,
    kc: usize,
    width: usize,
    out: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if engine.isa == Isa::Avx512 {
        let kind = match (engine.form, engine.round_rows) {
            (Form::Pairs, _) => avx512_pack::Rows::Pairs,
            (_, true) => avx512_pack::Rows::Rounded,
            _ => avx512_pack::Rows::F32,
        };
        // SAFETY: passed on; the caller keeps the padding free.
        return unsafe { avx512_pack::rows(kind, x, stride, rows, kc, out.as_mut_ptr()) };
    }
    // Eight steps at a time keep both the rows read and the steps written in the first cache.
    const STEPS: usize = 8;
    for (k0, out) in out[..width * kc].chunks_mut(width * STEPS).enumerate().map(|(i, out)| (i * STEPS, out)) {
        for row in 0..width {
            let steps = out.len() / width;
            // SAFETY: the caller vouches for the rows.
            let x =
                if row < rows { unsafe { std::slice::from_raw_parts(x.add(row * stride + k0), steps) } } else { &[] };
            for step in 0..steps {
                let value = x.get(step).copied().unwrap_or(0.0);
                out[step * width + row] =
                    if engine.round_rows { <bf16 as Element>::from_f32(value).to_f32() } else { value };
            }
        }
    }
}

/// Widens `kc` steps of a 16-bit panel.
///
/// # Safety
/// The block holds them, an odd last one padded to a pair.
pub(super) unsafe fn widen(isa: Isa, dtype: DType, block: *const u8, width: usize, kc: usize, out: &mut [f32]) {
    let len = width * kc.next_multiple_of(2);
    #[cfg(target_arch = "x86_64")]
    if matches!(isa, Isa::Avx512 | Isa::Avx2) {
        assert!(out.len() >= len);
        let (block, pairs, out) = (block.cast(), kc.div_ceil(2), out.as_mut_ptr());
        // SAFETY: the caller vouches for the block; the room was just compared.
        return unsafe {
            match (isa, dtype) {
                (Isa::Avx512, DType::F16) => avx512_pack::widen::<f16>(block, pairs, out),
                (Isa::Avx512, _) => avx512_pack::widen::<bf16>(block, pairs, out),
                (_, DType::F16) => avx2::widen::<f16>(block, pairs, out),
                _ => avx2::widen::<bf16>(block, pairs, out),
            }
        };
    }
    let out = &mut out[..width * kc];
    // SAFETY: the caller vouches for the block.
    unsafe {
        if dtype == DType::F16 {
            halves::<f16>(isa, std::slice::from_raw_parts(block.cast(), len), width, out);
        } else {
            halves::<bf16>(isa, std::slice::from_raw_parts(block.cast(), len), width, out);
        }
    }
}

per_isa! {
    fn halves[T: Element](block: &[T], width: usize, out: &mut [f32]) {
        for (pairs, out) in block.chunks_exact(2 * width).zip(out.chunks_mut(2 * width)) {
            let (low, high) = out.split_at_mut(width);
            for (low, pair) in low.iter_mut().zip(pairs.chunks_exact(2)) {
                *low = pair[0].to_f32();
            }
            for (high, pair) in high.iter_mut().zip(pairs.chunks_exact(2)) {
                *high = pair[1].to_f32();
            }
        }
    }
}
