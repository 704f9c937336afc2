//! From finished sums to the output: bias, activation, residual, in one pass over a tile that is still in the first cache.

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
