//! From finished sums to the output: bias, activation, residual, in one pass over a tile that is still in the first cache.

#[cfg(target_arch = "x86_64")]
use super::avx512_finish::{self, Then};
use super::{Activation, WIDTH};
use crate::cpu::isa::per_isa;
use crate::cpu::{Isa, math};
use crate::gelu::Gelu;

/// What happens to the sums of a call.
pub(super) struct Finish<'a> {
    /// One for each row of the weight.
    pub(super) bias: Option<&'a [f32]>,
    pub(super) activation: Activation,
    /// A matrix like the output; may be the output itself.
    pub(super) residual: Option<*const f32>,
    pub(super) out: *mut f32,
    /// Columns of the output.
    pub(super) columns: usize,
}

impl Finish<'_> {
    /// Asks for the lines of the output that a tile will write. They may lie far away, and the tile takes thousands of cycles.
    pub(super) fn prefetch(&self, isa: Isa, row: usize, rows: usize, column: usize, columns: usize) {
        #[cfg(target_arch = "x86_64")]
        if isa == Isa::Avx512 {
            let out = self.out.wrapping_add(row * self.columns + column);
            avx512_finish::prefetch(out, rows, self.columns, columns);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (isa, row, rows, column, columns);
    }

    /// The activation as one of those that AVX-512 applies in registers.
    #[cfg(target_arch = "x86_64")]
    fn in_registers(&self) -> Option<Then> {
        match self.activation {
            Activation::None => Some(Then::Nothing),
            Activation::Relu => Some(Then::Relu),
            Activation::Gelu(Gelu::Erf) => Some(Then::Gelu),
            Activation::Geglu => Some(Then::Geglu),
            Activation::Gelu(Gelu::Tanh) => None,
        }
    }

    /// Finishes a tile of sums, `width` a row: elements `(row.., column..column + columns)` of the output.
    ///
    /// # Safety
    /// The elements exist, and this task alone works on them.
    pub(super) unsafe fn apply(
        &self,
        isa: Isa,
        sums: &mut [f32],
        width: usize,
        row: usize,
        column: usize,
        columns: usize,
    ) {
        let mut bias = [0.0; WIDTH];
        if let Some(all) = self.bias {
            bias[..columns].copy_from_slice(&all[column..column + columns]);
            if self.activation == Activation::Geglu {
                let gates = self.columns + column;
                bias[width / 2..width / 2 + columns].copy_from_slice(&all[gates..gates + columns]);
            }
        }
        #[cfg(target_arch = "x86_64")]
        if isa == Isa::Avx512
            && let Some(then) = self.in_registers()
        {
            let at = row * self.columns + column;
            // SAFETY: the caller vouches for the elements.
            unsafe {
                let residual = self.residual.map(|r| r.add(at));
                let (sums, rows, out) = (sums.as_ptr(), sums.len() / width, self.out.add(at));
                avx512_finish::finish(then, sums, rows, &bias, residual, out, self.columns, columns);
            }
            return;
        }
        if self.bias.is_some() {
            add_bias(isa, sums, &bias[..width]);
        }
        match self.activation {
            Activation::None => {}
            Activation::Gelu(Gelu::Tanh) => gelu_tanh(isa, sums),
            Activation::Gelu(Gelu::Erf) => gelu_erf(isa, sums),
            Activation::Relu => relu(isa, sums),
            Activation::Geglu => geglu(isa, sums, width),
        }
        for (i, sums) in sums.chunks_exact(width).enumerate() {
            let at = (row + i) * self.columns + column;
            let sums = &sums[..columns];
            // SAFETY: the caller vouches for the elements; the residual is read before the output, which may be the same memory, is written.
            unsafe {
                let out = self.out.add(at);
                match self.residual {
                    Some(residual) => add_to(isa, sums, residual.add(at), out),
                    None => std::ptr::copy_nonoverlapping(sums.as_ptr(), out, columns),
                }
            }
        }
    }
}

per_isa! {
    fn add_bias[](sums: &mut [f32], bias: &[f32]) {
        for row in sums.chunks_exact_mut(bias.len()) {
            for (s, b) in row.iter_mut().zip(bias) {
                *s += b;
            }
        }
    }
}

per_isa! {
    fn gelu_tanh[](sums: &mut [f32]) {
        for s in sums {
            *s = math::gelu_tanh(*s);
        }
    }
}

per_isa! {
    fn gelu_erf[](sums: &mut [f32]) {
        for s in sums {
            *s = math::gelu_erf(*s);
        }
    }
}

per_isa! {
    fn relu[](sums: &mut [f32]) {
        for s in sums {
            // A NaN stays one.
            *s = if *s < 0.0 { 0.0 } else { *s };
        }
    }
}

per_isa! {
    /// The first half of each row becomes `gelu(first half) * second half`.
    fn geglu[](sums: &mut [f32], width: usize) {
        for row in sums.chunks_exact_mut(width) {
            let (activated, gates) = row.split_at_mut(width / 2);
            for (a, gate) in activated.iter_mut().zip(gates) {
                *a = math::gelu_erf(*a) * *gate;
            }
        }
    }
}

per_isa! {
    fn add_to[](sums: &[f32], residual: *const f32, out: *mut f32) {
        let mut row = [0.0; WIDTH];
        let row = &mut row[..sums.len()];
        // SAFETY: the caller of `Finish::apply` vouches for as many elements as there are sums; the copy ends before the output is written.
        unsafe {
            std::ptr::copy_nonoverlapping(residual, row.as_mut_ptr(), sums.len());
            for (r, s) in row.iter_mut().zip(sums) {
                *r += s;
            }
            std::ptr::copy_nonoverlapping(row.as_ptr(), out, sums.len());
        }
    }
}
