//! Which kernel multiplies a tile, and in which form it reads its operands.

use tilewright_core::DType;

#[cfg(target_arch = "x86_64")]
use super::avx512;
pub(super) use crate::cpu::gemm::Kernel;
use crate::cpu::{Cpu, Isa};

/// How the kernel reads a weight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Form {
    /// f32, straight from the panel.
    F32,
    /// f32, from a copy of a block of the panel that is made for each block of rows.
    Widened,
    /// Pairs of bf16, straight from the panel, with rows in pairs of bf16 too.
    Pairs,
}

/// Memory to ask for while a tile is computed. A hint, which only the AVX-512 kernels take.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
pub(super) struct Ahead {
    pub(super) ptr: *const u8,
    pub(super) bytes: usize,
}

/// The kernel of a call.
#[derive(Clone, Copy)]
pub(super) struct Engine {
    pub(super) isa: Isa,
    pub(super) form: Form,
    /// Rows of a tile, at most.
    pub(super) rows: usize,
    /// Whether the rows of a lower tile are packed without the missing ones.
    pub(super) tight: bool,
    /// Whether rows are rounded to bf16 as they are packed.
    pub(super) round_rows: bool,
    kernel: Kernel,
}

impl Engine {
    pub(super) fn new(cpu: &Cpu, precision: DType) -> Engine {
        let isa = cpu.isa();
        let kernel = Kernel::new(isa);
        let form = match precision {
            DType::F32 => Form::F32,
            DType::BF16 if cpu.has_bf16_dot() => Form::Pairs,
            _ => Form::Widened,
        };
        let round_rows = precision == DType::BF16;
        Engine { isa, form, rows: kernel.mr, tight: isa == Isa::Avx512, round_rows, kernel }
    }

    /// Words of a packed row over `k` steps.
    pub(super) fn row_words(&self, k: usize) -> usize {
        if self.form == Form::Pairs { k.div_ceil(2) } else { k }
    }

    /// `sums = a @ b` or `+=`: `rows` rows of the width of a panel, over `words` steps.
    ///
    /// # Safety
    /// The panels hold `words` steps, `sums` has room for the tile; `rows` is not 0.
    pub(super) unsafe fn multiply(
        &self,
        words: usize,
        a: *const u8,
        b: *const u8,
        sums: *mut f32,
        rows: usize,
        add: bool,
        ahead: Ahead,
    ) {
        // SAFETY: passed on; the machine has the instruction set of the engine.
        unsafe {
            match (self.isa, self.form) {
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512, Form::Pairs) => avx512::multiply_pairs(words, a, b, sums, rows, add, ahead),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512, _) => avx512::multiply(words, a, b, sums, rows, add, ahead),
                _ => {
                    let _ = ahead;
                    let width = self.kernel.nr;
                    (self.kernel.micro)(words, a.cast(), b.cast(), sums, width, rows, width, 1.0, add);
                }
            }
        }
    }
}
